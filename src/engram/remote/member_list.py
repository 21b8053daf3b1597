"""Lists of the servers of a fleet that may change while it runs: a file, or a name that DNS has several hosts for."""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from engram._support.words import raise_as
from engram.format.files import write_atomically
from engram.remote.protocol import Address, address_of, addresses_of
from engram.store.lifetime import exclusive

_FILE, _DNS = "file:", "dns:"


class MemberList(NamedTuple):
    """Where the addresses of a fleet's servers are listed: ``file:PATH``, an address in a line, or ``dns:HOST:PORT``."""

    text: str

    @property
    def interval_s(self) -> float:
        """Between two looks at it."""
        return 1.0 if self.text.startswith(_FILE) else 5.0

    @property
    def has_all(self) -> bool:
        """Whether a server that is not listed is none of the fleet's. DNS leaves out those that start again, too."""
        return self.text.startswith(_FILE)

    def addresses(self) -> tuple[Address, ...]:
        """Those that are listed now, at least one.

        Raises:
            OSError: the file cannot be read. ConnectionError: no DNS server answers, or none knows the name.
            ValueError: no address, what is none, or no text.
        """
        if self.text.startswith(_FILE):
            path = Path(self.text.removeprefix(_FILE))
            damaged = f"connect: {path}: expected a text in UTF-8, got other bytes"
            with raise_as(ValueError, damaged, UnicodeDecodeError):
                lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
            if not any(lines):
                raise ValueError(f"connect: {path}: expected an address of a server in each line, got none.")
            return tuple(addresses_of([line for line in lines if line], f"connect: {path}"))
        named = address_of(self.text.removeprefix(_DNS), "connect: dns")
        unknown = f"connect: {self.text}: no addresses of {named.host} were found"
        with raise_as(ConnectionError, unknown, socket.gaierror):
            found = socket.getaddrinfo(named.host, named.port, type=socket.SOCK_STREAM)
        hosts = sorted({str(where[0]) for *_, where in found})
        return tuple(named._replace(host=host, certified=named.host) for host in hosts)

    def remove(self, gone: Collection[Address]) -> None:
        """Take servers out of a file; all else stays in it. DNS is left as it is. Raises as :meth:`addresses`."""
        if not self.has_all:
            return
        path = Path(self.text.removeprefix(_FILE)).resolve()
        with exclusive(path.parent):
            addresses, kept = iter(self.addresses()), ""
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                text = line.partition("#")[0].strip()
                address = next(addresses) if text else None
                if address not in gone:  # the first line may have said the scheme of the others
                    kept += line.replace(text, str(address or ""), 1)
            write_atomically(path, kept.encode(), path.stat().st_mode)


def listed(address: object) -> MemberList | None:
    """The list that an address names; None: it is an address."""
    return MemberList(address) if isinstance(address, str) and address.startswith((_FILE, _DNS)) else None
