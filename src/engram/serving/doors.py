"""The connections of a server: room for them, and an end to those that ask for nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterator

#: For how long a connection may ask for nothing that the server answers, before its first call.
SILENT_S = 10.0
#: So many files the process may have open, where the system lets it. At most one in so many is a connection that has asked for nothing.
_FILES, _SHARE = 1 << 16, 4
_INTERVAL_S = 1.0


def make_room() -> int:
    """Raise the soft limit of open files, each connection being one: what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class Doors:
    """The TCP connections to a port. Those that never called, and are old or too many, are closed: gRPC itself lets them stay.

    A call that is refused for its token is none.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._callers: set[str] = set()
        self._since: dict[str, float] = {}
        self._ended = threading.Event()
        if port > 0:
            threading.Thread(target=self._run, name="engram-doors", daemon=True).start()

    def know(self, peer: str) -> None:
        """Note who has called, as gRPC names it."""
        if self._port > 0:
            self._callers.add(unquote(peer))

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Close those that asked for nothing until now."""
        callers = self._callers.copy()  # as add and -=, it is atomic
        there = dict(self._connections())
        self._callers -= callers - there.keys()  # those that have called since need not be in the list
        self._since = {peer: self._since.get(peer, now) for peer in there if peer not in self._callers}
        oldest = sorted(self._since, key=self._since.__getitem__)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE
        too_many = set(oldest[: max(0, len(oldest) - most)])
        for peer in oldest:
            if peer in too_many or now - self._since[peer] >= SILENT_S:
                self._shut(there[peer], peer)

    def _connections(self) -> list[tuple[str, int]]:
        """Who is connected, and by which file."""
        try:
            files = [*map(int, os.listdir("/proc/self/fd"))]
        except OSError:  # no file is left to list them by
            files = [*range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
        return [(peer, file) for file in files if (peer := self._peer(file))]

    def _peer(self, file: int) -> str:
        """Who is at the other end, as gRPC names it; empty: it is no connection to the port."""
        try:
            with _borrowed(file) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != self._port:
                    return ""
                host, port = one.getpeername()[:2]
        except OSError:  # no socket, or one that listens
            return ""
        host = host.removeprefix("::ffff:")
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def _shut(self, file: int, peer: str) -> None:
        """Let gRPC find the end of a connection."""
        if self._peer(file) == peer:  # else gRPC has closed it meanwhile
            with contextlib.suppress(OSError), _borrowed(file) as one:
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(file: int) -> Iterator[socket.socket]:
    """A socket around a file that is another's. Raises ``OSError``: it is none."""
    one = socket.socket(fileno=file)
    try:
        yield one
    finally:
        one.detach()
