"""The process that serves a store: ``engram serve``."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from engram.buffer.prioritized import ReplayBuffer
from engram.remote.addresses import Address
from engram.serving.server import Server
from engram.serving.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engram.serving.listening import Listening

_ENDS = (signal.SIGTERM, signal.SIGINT)


def run(
    directory: Path,
    at: Listening,
    ready: Callable[[Address], None],
    also: Callable[[ReplayBuffer], object] | None = None,
) -> None:
    """Serve the store in a directory until SIGTERM or SIGINT, then finish what is under way. Does not return.

    ``ready`` is told the address when clients may come, and ``also`` the open buffer before. Raises what these, opening the store and
    listening raise.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # before there are threads, which inherit it
    rb = ReplayBuffer.open(directory)
    if also is not None:
        also(rb)
    service, before = Service(rb), os.umask(0o177)  # the socket is the user's alone as soon as it is there
    server = Server(service, at.address, token=at.token, tls=at.tls)
    os.umask(before)
    address = at.address
    if address.scheme != "unix":
        address = address._replace(port=server.port)
    ready(address)
    signal.sigwait(_ENDS)
    if server.drain():  # else a command is under way
        rb.close()
    if address.scheme == "unix":
        os.unlink(address.host)
    os._exit(0)  # gRPC would wait for clients to leave
