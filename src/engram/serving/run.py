"""The process that serves a store: ``engram serve``."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from pyarrow import ArrowException

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
    listening raise: then the buffer is closed, and signals and files are treated as before.
    """
    # where this fails, the process may go on and start programs, which inherit what is blocked
    with contextlib.ExitStack() as otherwise:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # before there are threads, which inherit it, too
        otherwise.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
        rb = otherwise.enter_context(ReplayBuffer.open(directory))
        if also is not None:
            also(rb)
        server = _server(Service(rb), at)
        otherwise.callback(server.drain)
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


def _server(service: Service, at: Listening) -> Server:
    """Listens already. A socket is the user's alone as soon as it is there. Raises ``OSError``: it cannot listen there."""
    before = os.umask(0o177)
    try:
        return Server(service, at.address, token=at.token, tls=at.tls)
    except ArrowException as error:  # which gRPC's log explains, in its own words
        raise OSError(
            f"serve: {at.address}: cannot listen there: {error}. Expected an address that is free, and of this machine; see the log "
            "above. Port 0 is any that is free."
        ) from error
    finally:
        os.umask(before)
