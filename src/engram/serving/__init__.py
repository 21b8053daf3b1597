"""Serves stores: a server over Arrow Flight in a process of its own, and buffers on Ray."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

from engram._support.checks import check_type
from engram.buffer import ReplayBuffer
from engram.store.store import Store

__all__ = ["serve"]

#: For how long a server may take to begin: importing torch on a busy machine takes its time.
_START_TIMEOUT_S = 120.0
#: For how long it may finish what is under way.
_STOP_TIMEOUT_S = 10.0


class serve:  # noqa: N801 - used as a function
    """Serve a buffer to other processes and machines, from a process of its own, until the end of ``with``.

    Args:
        buffer: one whose store is in a directory or shared (``rb.share()``), to which rows were written; or the directory.
        address: ``"unix:"``, a socket in a folder of your own; ``"unix:/PATH"``; or ``"HOST:PORT"``, where port 0 is any that is free.
        token: the path of a file of mode 0600 whose word clients must know. Needed for TCP.
        tls_cert, tls_key: paths of a certificate and its key, PEM. Needed where other machines reach the address.
        tls_clients: the path of the certificate that signs those of clients, PEM. Default: clients need none.
        insecure: listen without them all the same.

    ``with`` gives the address, which :meth:`ReplayBuffer.connect` takes. The buffer here stays as it is: this process and the server
    have the store open together. Several servers may serve one store.

    Raises:
        TypeError: no buffer or directory; a buffer whose rows are in memory of this process alone, or a list.
        RuntimeError: nothing was ever written, so that no store exists; the server ended, with what it said.
        ValueError: an address, token or certificate that is missing or unsafe. FileNotFoundError: no store there.
        ModuleNotFoundError: ``engram-replay[serve]`` is not installed.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, serve
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4).share()
    >>> _ = rb.extend({"obs": torch.arange(10)})
    >>> with serve(rb) as address:
    ...     other = ReplayBuffer.connect(address)
    ...     print(len(other), other.sample()["obs"].shape)
    ...     other.close()
    10 torch.Size([4])
    """

    def __init__(
        self,
        buffer: ReplayBuffer | str | os.PathLike[str],
        address: str = "unix:",
        *,
        token: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_clients: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        command = [sys.executable, "-m", "engram", "serve", _directory_of(buffer), "--listen", address]
        given = {"--token": token, "--tls-cert": tls_cert, "--tls-key": tls_key, "--tls-clients": tls_clients}
        for option, value in given.items():
            if value is not None:
                command += [option, os.fspath(value)]
        self._command = [*command, "--insecure"] if insecure else command
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        self._errors = tempfile.TemporaryFile()
        self._process = process = subprocess.Popen(  # noqa: S603 - ourselves
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors
        )
        try:
            return _first_line(process, self._errors)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._errors.close()

    @property
    def pid(self) -> int:
        """Of the server. Raises ``RuntimeError``: it does not run."""
        if self._process is None:
            raise RuntimeError("serve: expected a server that runs: use it in a with.")
        return self._process.pid


def _directory_of(buffer: object) -> str:
    if isinstance(buffer, str | os.PathLike):
        return os.fspath(buffer)
    buffer = check_type("serve", buffer, ReplayBuffer, "a ReplayBuffer or the directory of a store")
    storage = buffer.storage
    if not buffer.shared:
        raise TypeError(
            f"serve: expected a buffer that processes share, got a {type(storage).__name__} of this process alone. Call rb.share() "
            "first, or use a LazyMemmapStorage."
        )
    store: Store | None = storage.memory
    if store is None:
        raise RuntimeError("serve: nothing was ever written, so that no store exists. Write a first row, then serve.")
    if store.directory is None:
        raise TypeError("serve: expected a store of this machine, got a connection.")
    return str(store.directory)


def _first_line(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """The address that a server says when clients may come. Raises ``RuntimeError``: it ended first."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + _START_TIMEOUT_S, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"serve: the server did not begin within {_START_TIMEOUT_S:g} s.")
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                process.wait()
                errors.seek(0)
                text = errors.read().decode(errors="replace").strip()
                raise RuntimeError(f"serve: the server ended at once: {text.removeprefix('Error: ')}")
            line += part
    return line.decode().strip()
