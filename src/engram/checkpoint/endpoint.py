"""Asking for checkpoints over HTTP: request, status, list. Nothing is loaded, deleted or handed out.

Everything that is not listed here is refused: other methods, paths, hosts, bodies; whatever comes from a web page; and whoever
does not know the token. Answers have no paths and no texts of errors.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import secrets
import select
import shutil
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engram.errors import CorruptCheckpoint
from engram.format import series

if TYPE_CHECKING:
    from engram.checkpoint.requests import Request, Requests

__all__ = ["Endpoint"]

_log = logging.getLogger("engram")

MAX_HEADERS, MAX_BODY, MAX_CONNECTIONS = 8 << 10, 4 << 10, 16
READ_S = 5.0
#: Seconds that a connection more than those waits, and for the other side to take an answer.
_BUSY_S = 0.5

_TOKEN_BYTES = 32
_HOSTS = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.ASCII)
_STATUS = re.compile(r"/checkpoint/([0-9a-f]{16})", re.ASCII)
_REASONS = {
    200: "OK",
    202: "Accepted",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class _Call(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Endpoint:
    """Listens in threads of its own, none of which takes part in a collective. A context manager.

    Args:
        checkpointer: whose checkpoints are asked for.
        address, token_file, interval: as :meth:`Checkpointer.serve` has them.
    """

    def __init__(
        self, checkpointer: Any, address: str | None, token_file: str | os.PathLike[str] | None, interval: float
    ) -> None:
        self._checkpointer, self._interval = checkpointer, interval
        self._requests: Requests = checkpointer.requests
        self._folder: Path | None = None
        self._socket_file: Path | None = None
        #: Connections, the oldest first, and whether each has asked.
        self._served: dict[socket.socket, bool] = {}
        self._closed = threading.Event()
        try:
            #: Where the token lies.
            self.token_file = Path(token_file) if token_file is not None else self._private() / "token"
            self._token = _token(self.token_file)
            self._socket, self.address = self._listening(address)
        except BaseException:
            self._remove()
            raise
        self._thread = threading.Thread(target=self._accept, name="engram-http", daemon=True)
        self._thread.start()
        _log.info("checkpoints can be asked for at %s, with the token in %s", self.address, self.token_file)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. Repeatable."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._thread.join(READ_S)
            self._remove()

    def _private(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="engram-"))  # 0700
        return self._folder

    def _remove(self) -> None:
        if self._socket_file is not None:
            self._socket_file.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _listening(self, address: str | None) -> tuple[socket.socket, str]:
        address = f"unix:{self._private() / 'socket'}" if address is None else address
        if address.startswith("unix:"):
            path = Path(address.removeprefix("unix:"))
            listener = socket.socket(socket.AF_UNIX)
            os.fchmod(listener.fileno(), 0o600)  # of the file, too, from its first moment on
            listener.bind(str(path))
            self._socket_file = path
        else:
            host, _, port = address.rpartition(":")
            if host != "127.0.0.1" or not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or int(port) > 65535:
                raise ValueError(
                    f"serve: address: expected 'unix:<path>' or '127.0.0.1:<port>', got {address!r}. From other machines, come through "
                    "ssh."
                )
            listener = socket.socket(socket.AF_INET)
            listener.bind((host, int(port)))
            address = f"{host}:{listener.getsockname()[1]}"
        listener.listen(MAX_CONNECTIONS)
        return listener, address

    # ---- connections -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Serve each connection in a thread: at most ``MAX_CONNECTIONS``.

        Where there are as many, a new one that says something takes the place of the oldest one that has not asked yet: whoever
        asks at once is answered at once, however many others are slow.
        """
        waiting: dict[socket.socket, float] = {}  # until when
        while not self._closed.is_set():
            try:
                ready, _, _ = select.select([self._socket, *waiting], [], [], _BUSY_S / 10)
                new = self._socket.accept()[0] if self._socket in ready else None
            except (OSError, ValueError):
                self._closed.wait(0.05)  # or no descriptors are left
                continue
            for connection in [it for it in waiting if it in ready]:
                if self._has_room():
                    del waiting[connection]
                    self._serve_in_a_thread(connection)
            if new is not None and len(self._served) < MAX_CONNECTIONS:
                self._serve_in_a_thread(new)
            elif new is not None:
                waiting[new] = time.monotonic() + _BUSY_S
            for connection in list(waiting):
                if time.monotonic() > waiting[connection] or len(waiting) > MAX_CONNECTIONS:
                    del waiting[connection]
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(0)
                        connection.sendall(_answer(503, None))
        for connection in waiting:
            connection.close()

    def _has_room(self) -> bool:
        """Whether another connection can be served: if need be, the oldest one that has not asked yet hears that it ended."""
        if len(self._served) < MAX_CONNECTIONS:
            return True
        silent = next((it for it, asked in list(self._served.items()) if not asked), None)
        if silent is not None:
            with contextlib.suppress(OSError):
                silent.shutdown(socket.SHUT_RD)
        return False

    def _serve_in_a_thread(self, connection: socket.socket) -> None:
        self._served[connection] = False
        threading.Thread(target=self._serve, args=(connection,), name="engram-http", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                try:
                    call = _read(connection)
                    self._served[connection] = True
                    code, said = (call, None) if isinstance(call, int) else self._replied(call)
                except Exception:  # noqa: BLE001 - told here, and not to whoever asks
                    _log.exception("endpoint")
                    code, said = 500, None
                _send(connection, code, said)
        finally:
            del self._served[connection]

    # ---- what is asked ---------------------------------------------------------------------------------------------------

    def _replied(self, call: _Call) -> tuple[int, Any]:
        headers = call.headers
        if not _HOSTS.fullmatch(headers.get("host", "")) or "origin" in headers:
            return 403, None
        if any(name.startswith("sec-fetch-") for name in headers):
            return 403, None
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind != "Bearer" or not hmac.compare_digest(token.encode(), self._token):
            return 401, None
        status = _STATUS.fullmatch(call.path)
        if not (call.path in ("/checkpoint", "/checkpoints") or status):
            return 404, None
        if call.method != ("POST" if call.path == "/checkpoint" else "GET"):
            return 405, None
        if call.method == "POST":
            if headers.get("content-type") != "application/json":
                return 415, None
            if call.body.strip() not in (b"", b"{}"):
                return 400, None
            return self._asked()
        if call.body:
            return 400, None
        if status:
            request = self._requests.find(status[1])
            if request is None:
                return 404, None
            return 200, self._state(request)
        return 200, [
            {"name": entry.name, "step": entry.step, "good": entry.problem is None}
            for entry in self._checkpointer.list()
        ]

    def _asked(self) -> tuple[int, Any]:
        last = self._requests.latest()
        ended = None if last is None or last.save is None else last.save.ended
        if ended is not None and time.monotonic() - ended < self._interval:
            return 429, None
        return 202, {"id": self._requests.ask(join=True).id}

    def _state(self, request: Request) -> dict[str, Any]:
        said: dict[str, Any] = {"id": request.id, "state": "asked", "checkpoint": None, "error": None, "ranks": []}
        save = request.save
        if save is None:
            return said
        said["state"] = "saving"
        if save.path is not None:
            said["checkpoint"] = save.path.name
            with contextlib.suppress(CorruptCheckpoint, OSError):  # it may be removed by now
                for vote in series.votes(save.path):
                    state = "saved" if vote.shard else "failed" if vote.error else "saving"
                    said["ranks"].append({"rank": vote.rank, "state": state})
        if save.done:
            try:
                save.wait(0)
                said["state"] = "complete"
            except Exception as error:  # noqa: BLE001 - whatever it is, its kind is told
                said |= {"state": "failed", "error": type(error).__name__}
        return said


def _token(file: Path) -> bytes:
    """The token in a file that is ours alone; made if there is none. Raises ``PermissionError``: others could have read it."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as there:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise PermissionError(
                    f"serve: token_file: expected a file of this user with mode 600, got {file} of user {found.st_uid} with mode "
                    f"{stat.S_IMODE(found.st_mode):o}. Remove it: a new one is made."
                ) from None
            token = there.read(1024).strip()
        if not re.fullmatch(rb"[0-9a-f]{64}", token):
            raise ValueError(
                f"serve: token_file: expected {2 * _TOKEN_BYTES} hex digits in {file}. Remove it."
            ) from None
        return token
    token = secrets.token_hex(_TOKEN_BYTES).encode()
    with open(fd, "wb") as made:
        made.write(token + b"\n")
    return token


def _read(connection: socket.socket) -> _Call | int:
    """One call, within the limits; or the code of why it is none."""
    until = time.monotonic() + READ_S
    head = b""
    while b"\r\n\r\n" not in head:
        if len(head) > MAX_HEADERS:
            return 431
        piece = _more(connection, until)
        if not piece:
            return 408 if piece is None else 400
        head += piece
    head, _, body = head.partition(b"\r\n\r\n")
    if len(head) > MAX_HEADERS:
        return 431
    headers: dict[str, str] = {}
    first, *lines = head.decode("latin-1").split("\r\n")
    begin = re.fullmatch(r"([A-Z]{1,16}) (/[!-~]{0,200}) HTTP/1\.[01]", first)
    for line in lines:
        found = re.fullmatch(r"([A-Za-z0-9-]+):[ \t]*([ -~]*?)[ \t]*", line)
        if found is None or found[1].lower() in headers:
            return 400
        headers[found[1].lower()] = found[2]
    length = headers.get("content-length", "0")
    if begin is None or not re.fullmatch(r"[0-9]{1,9}", length) or "transfer-encoding" in headers:
        return 400
    if int(length) > MAX_BODY:
        return 413
    while len(body) < int(length):
        piece = _more(connection, until)
        if not piece:
            return 408 if piece is None else 400
        body += piece
    return _Call(begin[1], begin[2], headers, body) if len(body) == int(length) else 400


def _more(connection: socket.socket, until: float) -> bytes | None:
    """What comes next; None: nothing in time."""
    left = until - time.monotonic()
    if left <= 0:
        return None
    connection.settimeout(left)
    try:
        return connection.recv(4096)
    except TimeoutError:
        return None


def _send(connection: socket.socket, code: int, said: Any) -> None:
    connection.settimeout(_BUSY_S)
    connection.sendall(_answer(code, said))
    connection.shutdown(socket.SHUT_WR)
    until = time.monotonic() + _BUSY_S
    while time.monotonic() < until and connection.recv(4096):  # closed before all was read, the answer would be lost
        pass


def _answer(code: int, said: Any) -> bytes:
    body = json.dumps(said).encode() if code < 300 else b""
    lines = [
        f"HTTP/1.1 {code} {_REASONS[code]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
