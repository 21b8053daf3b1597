"""Addresses and tokens: where servers are, and what opens them."""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path
from typing import NamedTuple

_MAX_TOKEN = 4096


class Address(NamedTuple):
    """Of one server."""

    scheme: str
    """``unix``, ``grpc`` (TCP) or ``grpc+tls``."""
    host: str
    """Of a Unix socket: its path."""
    port: int = 0

    @property
    def uri(self) -> str:
        """As Arrow Flight takes it."""
        return f"grpc+unix://{self.host}" if self.scheme == "unix" else f"{self.scheme}://{self.place}"

    @property
    def place(self) -> str:
        """Host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nothing outside this machine reaches it."""
        if self.scheme == "unix" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    def __str__(self) -> str:
        return f"unix:{self.host}" if self.scheme == "unix" else f"{self.scheme}://{self.place}"


def address_of(text: object, call: str, *, scheme: str = "grpc") -> Address:
    """One address: ``unix:PATH``, ``HOST:PORT``, ``grpc://HOST:PORT`` or ``grpc+tls://HOST:PORT``.

    Raises ``TypeError``: no text. ``ValueError``: none of these.
    """
    if not isinstance(text, str):
        raise TypeError(f"{call}: address: expected a str, got {type(text).__name__}.")
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(os.fsencode(path)) > 100:
            raise ValueError(
                f"{call}: address: expected unix: and an absolute path of at most 100 bytes, got {text!r}."
            )
        return Address("unix", path)
    named, separator, place = text.partition("://")
    scheme, place = (named, place) if separator else (scheme, text)
    host, separator, port = place.rpartition(":")
    if scheme not in ("grpc", "grpc+tls") or not (separator and host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(
            f"{call}: address: expected unix:/PATH, HOST:PORT, grpc://HOST:PORT or grpc+tls://HOST:PORT, got {text!r}."
        )
    return Address(scheme, host.removeprefix("[").removesuffix("]"), int(port))


def addresses_of(text: object, call: str) -> list[Address]:
    """Those of several servers of one store: a list, or text with commas. The first one's scheme holds for those that name none.

    Raises: as :func:`address_of`.
    """
    texts = text.split(",") if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not texts:
        got = type(text).__name__ if texts else "an empty list"
        raise TypeError(f"{call}: address: expected a str or a list of them, got {got}.")
    first = address_of(texts[0], call)
    scheme = "grpc" if first.scheme == "unix" else first.scheme
    return [first, *(address_of(one, call, scheme=scheme) for one in texts[1:])]


def token_in(path: str | os.PathLike[str] | None, call: str) -> bytes:
    """What a token file says; empty for None.

    Raises:
        TypeError: no path. ValueError: it is empty, too long or of more than one line. PermissionError: others may read it.
        OSError: it cannot be read.
    """
    if path is None:
        return b""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{call}: token: expected the path of a file, got {type(path).__name__}.")
    with Path(path).open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(
                f"{call}: token: expected a file that only its owner, you, may read, got mode {stat.S_IMODE(status.st_mode):04o} of "
                f"{os.fspath(path)!r}. Use chmod 600."
            )
        token = file.read(_MAX_TOKEN + 1).strip()
    if not token or len(token) > _MAX_TOKEN or not token.isascii() or len(token.split()) != 1:
        raise ValueError(
            f"{call}: token: expected one word of 1 to {_MAX_TOKEN} ASCII characters in {os.fspath(path)!r}."
        )
    return token
