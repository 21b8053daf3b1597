"""Asking for checkpoints over HTTP: request, status, list. Nothing is loaded, deleted or handed out.

What is not listed here is refused: methods, paths, hosts, bodies, requests of web pages, callers without the token. Answers hold
no paths and no texts of errors.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engram._support.http import Answer, Call, Server
from engram.errors import CorruptCheckpoint
from engram.format import series

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.checkpoint.job import Handle, Requests
    from engram.checkpoint.reports import Entry

_log = logging.getLogger("engram")

MAX_CONNECTIONS = 16

_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_STATUS = re.compile(r"/checkpoint/([0-9a-f]{16})")


class Asked(Protocol):
    """A Checkpointer, as far as it is asked for checkpoints."""

    @property
    def requests(self) -> Requests:
        """What was asked for."""

    def list(self) -> Sequence[Entry]:
        """The checkpoints that there are."""


class Endpoint:
    """Listens in threads of its own, none of which takes part in a collective.

    Args:
        checkpointer: whose checkpoints are asked for.
        address, token_file, interval: as :meth:`Checkpointer.serve` has them.
    """

    def __init__(
        self, checkpointer: Asked, address: str | None, token_file: str | os.PathLike[str] | None, interval: float
    ) -> None:
        self._checkpointer, self._interval = checkpointer, interval
        with contextlib.ExitStack() as stack:
            if address is None or token_file is None:
                folder = tempfile.mkdtemp(prefix="engram-")  # 0700
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            #: Where the token lies.
            self.token_file = Path(folder, "token") if token_file is None else Path(token_file)
            self._token = _token(self.token_file)
            listener, self.address = _listen(f"unix:{folder}/socket" if address is None else address, stack)
            self._stack = stack.pop_all()
        self._server = Server(listener, self._answer, "engram-http", MAX_CONNECTIONS)
        _log.info("checkpoints can be asked for at %s, with the token in %s", self.address, self.token_file)

    def close(self) -> None:
        """Stop listening. Repeatable."""
        self._server.close()
        self._stack.close()

    def _answer(self, call: Call) -> Answer:
        code, said = self._reply(call)
        return Answer(code, json.dumps(said).encode() if code < 300 else b"")

    def _reply(self, call: Call) -> tuple[int, object]:
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


def _state(save: Handle | None) -> dict[str, object]:
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
