"""Asking for checkpoints over HTTP: request, status, list. Nothing is loaded, deleted or handed out.

What is not listed here is refused: methods, paths, hosts, bodies, requests of web pages, callers without the token. Answers hold
no paths and no texts of errors. ``http.server`` is not used: it accepts or repairs malformed requests, and has no limits on
connections or on the time that a request takes; with those added it is longer than this.
"""

from __future__ import annotations

import contextlib
import hmac
import http
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engram.errors import CorruptCheckpoint
from engram.format import series

if TYPE_CHECKING:
    from engram.checkpoint.checkpointer import Checkpointer
    from engram.checkpoint.save import SaveHandle

_log = logging.getLogger("engram")

MAX_HEADERS, MAX_BODY, MAX_CONNECTIONS = 8 << 10, 4 << 10, 16
#: Seconds for a whole request to arrive, and for the other side to take the answer.
READ_S, _SEND_S = 5.0, 0.5

_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_STATUS = re.compile(r"/checkpoint/([0-9a-f]{16})")
_FIRST = re.compile(r"([A-Z]{1,16}) (/[!-~]{0,200}) HTTP/1\.[01]")
_HEADER = re.compile(r"([A-Za-z0-9-]+):([\t -~]*)")  # linear time: neighbouring repeats share no character


class _Call(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Endpoint:
    """Listens in threads of its own, none of which takes part in a collective.

    Args:
        checkpointer: whose checkpoints are asked for.
        address, token_file, interval: as :meth:`Checkpointer.serve` has them.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        address: str | None,
        token_file: str | os.PathLike[str] | None,
        interval: float,
    ) -> None:
        self._checkpointer, self._interval, self._open = checkpointer, interval, True
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        #: Connections that wait for the other side, the oldest first; and whether all places were taken when they came.
        self._idle: dict[socket.socket, bool] = {}
        with contextlib.ExitStack() as stack:
            if address is None or token_file is None:
                folder = tempfile.mkdtemp(prefix="engram-")  # 0700
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            #: Where the token lies.
            self.token_file = Path(folder, "token") if token_file is None else Path(token_file)
            self._token = _token(self.token_file)
            self._socket, self.address = _listen(f"unix:{folder}/socket" if address is None else address, stack)
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._accept, name="engram-http", daemon=True)
        self._thread.start()
        _log.info("checkpoints can be asked for at %s, with the token in %s", self.address, self.token_file)

    def close(self) -> None:
        """Stop listening. Repeatable."""
        self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._thread.join(READ_S)
        self._stack.close()

    def _accept(self) -> None:
        """Serve each connection in a thread. When all places are taken, a new connection gets that of the oldest idle one."""
        while self._open:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or no descriptors are left
                time.sleep(0.05)
                continue
            full = not self._places.acquire(blocking=False)
            for idle in list(self._idle)[: int(full)]:
                self._idle.pop(idle, None)
                with contextlib.suppress(OSError):
                    idle.shutdown(socket.SHUT_RD)  # what has arrived is read all the same
            if full and not self._places.acquire(timeout=_SEND_S):
                with connection, contextlib.suppress(OSError):
                    connection.send(_answer(503, None))
                continue
            self._idle[connection] = full
            try:
                threading.Thread(target=self._serve, args=(connection,), name="engram-http", daemon=True).start()
            except RuntimeError:  # no threads are left
                self._end(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            call = _read(connection)
            full = self._idle.pop(connection, None)  # None: its place goes to another connection
            if isinstance(call, int):
                code, said = 503 if (call == 408 and full) or (call == 400 and full is None) else call, None
            else:
                try:
                    code, said = self._reply(call)
                except Exception:  # noqa: BLE001 - logged here, not told to the caller
                    _log.exception("endpoint")
                    code, said = 500, None
            connection.settimeout(_SEND_S)
            connection.sendall(_answer(code, said))
            connection.shutdown(socket.SHUT_WR)
            self._idle[connection] = True
            until = time.monotonic() + _SEND_S  # to read the rest: closing with bytes unread would lose the answer
            while time.monotonic() < until and connection.recv(1 << 16):
                pass
        except OSError:
            pass  # the other side is gone, or too slow to take the answer
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._idle.pop(connection, None)
        connection.close()
        self._places.release()

    def _reply(self, call: _Call) -> tuple[int, object]:
        headers, status = call.headers, _STATUS.fullmatch(call.path)
        if not _HOST.fullmatch(headers.get("host", "")) or any(re.match("origin$|sec-fetch-", it) for it in headers):
            return 403, None
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind != "Bearer" or not hmac.compare_digest(token, self._token):
            return 401, None
        if call.path not in ("/checkpoint", "/checkpoints") and not status:
            return 404, None
        if call.method != ("POST" if call.path == "/checkpoint" else "GET"):
            return 405, None
        if call.method == "POST" and headers.get("content-type") != "application/json":
            return 415, None
        if call.body.strip() not in ((b"", b"{}") if call.method == "POST" else (b"",)):
            return 400, None
        requests = self._checkpointer.requests
        if call.method == "POST":
            last = requests.latest()
            ended = None if last is None or last.save is None else last.save.ended
            if ended is not None and time.monotonic() - ended < self._interval:
                return 429, None
            return 202, {"id": requests.ask(join=True).id}
        if status:
            request = requests.find(status[1])
            return (404, None) if request is None else (200, {"id": request.id, **_state(request.save)})
        listed = self._checkpointer.list()
        return 200, [{"name": it.name, "step": it.step, "good": it.problem is None} for it in listed]


def _state(save: SaveHandle | None) -> dict[str, object]:
    """What became of a request that this save serves; None: no save does yet."""
    ranks: list[dict[str, object]] = []
    said: dict[str, object] = {
        "state": "saving" if save else "asked",
        "checkpoint": None,
        "error": None,
        "ranks": ranks,
    }
    if save and save.path is not None:
        said["checkpoint"] = save.path.name
        with contextlib.suppress(CorruptCheckpoint, OSError):  # it may be removed by now
            for vote in series.votes(save.path):
                state = "saved" if vote.shard else "failed" if vote.error else "saving"
                ranks.append({"rank": vote.rank, "state": state})
    if save and save.done:
        try:
            save.wait(0)
            said["state"] = "complete"
        except Exception as error:  # noqa: BLE001 - whatever it is, its kind is told
            said |= {"state": "failed", "error": type(error).__name__}
    return said


def _token(file: Path) -> str:
    """The token in a file that is ours alone; made if there is none. Raises ``PermissionError``: others could have read it."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
        with open(made, "w") as new:
            new.write(secrets.token_hex(32) + "\n")
    with open(os.open(file, os.O_RDONLY | flags), encoding="latin-1") as there:
        found = os.fstat(there.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(
                f"serve: token_file: expected a file of this user with mode 600, got {file} of user {found.st_uid} with mode "
                f"{stat.S_IMODE(found.st_mode):o}. Remove it: a new one is made."
            )
        token = there.read(1024).strip()
    if not re.fullmatch("[0-9a-f]{64}", token):
        raise ValueError(f"serve: token_file: expected 64 hex digits in {file}. Remove it.")
    return token


def _listen(address: str, stack: contextlib.ExitStack) -> tuple[socket.socket, str]:
    """A socket that listens until the stack is closed, and its address."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        os.fchmod(listener.fileno(), 0o600)  # of the file, too, from its first moment on
        listener.bind(str(path))
        stack.callback(path.unlink, missing_ok=True)
    elif host == "127.0.0.1" and re.fullmatch("[0-9]{1,5}", port) and int(port) <= 65535:
        listener = stack.enter_context(socket.socket(socket.AF_INET))
        listener.bind((host, int(port)))
        address = f"{host}:{listener.getsockname()[1]}"
    else:
        raise ValueError(
            f"serve: address: expected 'unix:<path>' or '127.0.0.1:<port>', got {address!r}. From other machines, come through ssh."
        )
    listener.listen()  # more may wait there than are served: a full queue delays a caller by seconds
    return listener, address


def _read(connection: socket.socket) -> _Call | int:
    """One request, within the limits; or the code of why there is none."""
    data, until = b"", time.monotonic() + READ_S
    while (call := _parsed(data)) is None:
        if (left := until - time.monotonic()) <= 0:
            return 408
        connection.settimeout(left)
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            return 408
        if not piece:
            return 400
        data += piece
    return call


def _parsed(data: bytes) -> _Call | int | None:
    """None: more has to arrive."""
    head, ended, body = data.partition(b"\r\n\r\n")
    if len(head) > MAX_HEADERS:
        return 431
    if not ended:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    begin, found = _FIRST.fullmatch(first), [match for it in lines if (match := _HEADER.fullmatch(it))]
    headers = {it[1].lower(): it[2].strip() for it in found}
    length = "chunked" if "transfer-encoding" in headers else headers.get("content-length", "0")
    if begin is None or not len(headers) == len(lines) == len(found) or not re.fullmatch("[0-9]{1,9}", length):
        return 400  # also where a line is no header, or two have one name
    if int(length) > MAX_BODY:
        return 413
    if len(body) < int(length):
        return None
    return _Call(begin[1], begin[2], headers, body) if len(body) == int(length) else 400


def _answer(code: int, said: object) -> bytes:
    body = json.dumps(said).encode() if code < 300 else b""
    head = (
        f"HTTP/1.1 {code} {http.HTTPStatus(code).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
