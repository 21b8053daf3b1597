"""The process that serves a store: ``engram serve``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyarrow import ArrowException

from engram.buffer.prioritized import ReplayBuffer
from engram.remote.addresses import Address, address_of, token_in
from engram.serving.server import Server
from engram.serving.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Listening(NamedTuple):
    """Where and how. It holds secrets, so it has no text."""

    address: Address
    token: bytes
    tls: tuple[bytes, bytes] | None

    def __repr__(self) -> str:
        return f"Listening({self.address})"


def listening(
    address: str,
    token: str | os.PathLike[str] | None,
    tls_cert: str | os.PathLike[str] | None,
    tls_key: str | os.PathLike[str] | None,
    *,
    insecure: bool,
) -> Listening:
    """Check that it is safe to listen there. Raises as ``engram.serve``."""
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("serve: expected tls_cert and tls_key together, got one of them.")
    if address == "unix:":
        at = Address("unix", str(_own_folder() / f"{os.getpid()}.sock"))
    else:
        at = address_of(address, "serve", scheme="grpc" if tls_cert is None else "grpc+tls")
    if at.scheme == "unix":
        _check_free(Path(at.host))
    elif (at.scheme == "grpc+tls") != (tls_cert is not None):
        raise ValueError(
            f"serve: expected tls_cert and tls_key for grpc+tls addresses and for no others, got {address!r}."
        )
    secret = token_in(token, "serve")
    if not insecure and at.scheme != "unix":
        if not secret:
            who = "every user of the machine reaches it" if at.is_loopback else "other machines reach it"
            raise ValueError(
                f"serve: expected a token on {at}: {who}. Pass the path of a file of mode 0600, or use a Unix socket."
            )
        if not at.is_loopback and tls_cert is None:
            raise ValueError(
                f"serve: expected tls_cert and tls_key on {at}, which other machines reach: rows and token would travel in the clear. "
                "Pass them, or insecure=True in a network that you trust."
            )
    tls = None if tls_cert is None or tls_key is None else (Path(tls_cert).read_bytes(), Path(tls_key).read_bytes())
    return Listening(at, secret, tls)


def _own_folder() -> Path:
    """A folder of mode 0700, short enough for a socket."""
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if len(os.fsencode(root)) > 60:
        root = Path("/tmp")  # noqa: S108 - the folder below is made with mode 0700, and checked
    folder = root / f"engram-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"serve: expected a folder of mode 0700 that is yours at {str(folder)!r}. Remove it.")
    return folder


def _check_free(path: Path) -> None:
    """Refuse a socket at which a server answers; remove one of a server that died."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"serve: expected a folder for the socket at {str(path.parent)!r}.")
    if not path.exists():
        return
    if not path.is_socket():
        raise FileExistsError(f"serve: {str(path)!r} is no socket.")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise FileExistsError(f"serve: a server answers at unix:{path} already. Choose another path.")
