"""When a checkpoint is saved: on request by a call, a signal or HTTP, and as steps and minutes pass.

Over HTTP nothing is loaded, deleted or handed out. What is not listed here is refused: methods, paths, hosts, bodies, requests of
web pages, callers without the token. Answers hold no paths and no texts of errors.
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
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from engram._support.http import Answer, Call, Server
from engram.checkpoint.ranks import Ranks
from engram.checkpoint.reports import Entry, Options
from engram.checkpoint.save import SaveHandle
from engram.errors import CorruptCheckpoint
from engram.saved import attempts

#: How many requests are remembered, for those who ask what became of theirs.
_REMEMBERED = 64


class Request:
    """A request for a save, and what became of it."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        #: The handle of the save that serves it; None: none has begun.
        self.save: SaveHandle | None = None


class Requests:
    """Requests of this rank that no save serves yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signalled = False
        self._open: Request | None = None
        self._known: dict[str, Request] = {}

    @property
    def any(self) -> bool:
        return self._signalled or self._open is not None

    def ask(self, *, join: bool = False) -> Request:
        """Ask for a save. From any thread, but not from a signal handler.

        Args:
            join: a save that has begun and is not over serves, too.
        """
        with self._lock:
            if self._open is not None:
                return self._open
            if join:
                for request in self._known.values():
                    if request.save is not None and not request.save.done:
                        return request
            self._open = Request()
            self._known[self._open.id] = self._open
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
            return self._open

    def find(self, name: str) -> Request | None:
        """The request of that id, if it is not forgotten."""
        with self._lock:
            return self._known.get(name)

    def latest(self) -> Request | None:
        """The last one that was asked for."""
        with self._lock:
            return next(reversed(self._known.values()), None)

    def serve(self, save: SaveHandle) -> None:
        """This save serves all that was asked for. To be called before its moment, so that nothing is lost."""
        with self._lock:
            self._signalled = False
            if self._open is not None:
                self._open.save, self._open = save, None

    @contextlib.contextmanager
    def listening(self, number: signal.Signals) -> Iterator[None]:
        """Inside, a signal requests a save. A handler that was set before is still called.

        Raises:
            ValueError: not called from the main thread.
        """

        def handle(received: int, frame: FrameType | None) -> None:
            self._signalled = True  # as ask, but without its lock, which the thread that is interrupted may hold
            if callable(before):
                before(received, frame)

        before = signal.getsignal(number)
        signal.signal(number, handle)
        try:
            yield
        finally:
            signal.signal(number, before if before is not None else signal.SIG_DFL)


class Schedule:
    """When this rank wants a save, and when all agree to one.

    Args:
        ranks: of the job.
        options: of the Checkpointer.
    """

    def __init__(self, ranks: Ranks, options: Options) -> None:
        self._ranks, self._options = ranks, options
        self.requests = Requests()
        #: Steps from one poll to the next, as far as is known.
        self.stride = 1
        self._polls = 0
        self._due = False
        self._began = time.monotonic()

    def began(self) -> None:
        """A save has begun, or a restore has ended."""
        self._began = time.monotonic()

    def advanced(self, steps: int) -> None:
        """So many steps passed since the last poll."""
        self.stride = max(1, steps)

    def agreed(self, before: int, step: int, *, able: bool) -> bool:
        """Whether all ranks begin a save now: one of them wants to, and each is able to.

        A rank that still writes the last save is not: training does not wait for that.

        Args:
            before: the step of the last poll.
            step: this one.
            able: whether this rank is.
        """
        options = self._options
        if options.every_steps is not None:
            self._due |= step // options.every_steps > before // options.every_steps
        self._polls += 1
        if not self._due and self._polls % options.poll_every:
            return False
        wish = int(self._due or self.requests.any or self._overdue()) if able else 2
        if self._ranks.max(wish, options.timeout) != 1:
            return False
        self._due = False
        return True

    def _overdue(self) -> bool:
        """Whether the clock asks for a save: that of rank 0, as others go otherwise."""
        every = None if self._ranks.rank else self._options.every_minutes
        return every is not None and time.monotonic() - self._began >= 60 * every


_log = logging.getLogger("engram")

MAX_CONNECTIONS = 16

_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_STATUS = re.compile(r"/checkpoint/([0-9a-f]{16})")


class Endpoint:
    """Listens in threads of its own, none of which takes part in a collective.

    Args:
        requests: of the rank that listens.
        listed: all checkpoints of the series.
        address, token_file, interval: as :meth:`Checkpointer.serve` has them.
    """

    def __init__(
        self,
        requests: Requests,
        listed: Callable[[], list[Entry]],
        address: str | None,
        token_file: str | os.PathLike[str] | None,
        interval: float,
    ) -> None:
        self._requests, self._listed, self._interval = requests, listed, interval
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
        requests = self._requests
        if call.method == "POST":
            last = requests.latest()
            ended = None if last is None or last.save is None else last.save.ended
            if ended is not None and time.monotonic() - ended < self._interval:
                return 429, None
            return 202, {"id": requests.ask(join=True).id}
        if status:
            request = requests.find(status[1])
            return (404, None) if request is None else (200, {"id": request.id, **_state(request.save)})
        return 200, [{"name": it.name, "step": it.step, "good": it.problem is None} for it in self._listed()]


def _state(save: SaveHandle | None) -> dict[str, object]:
    """What became of a request that this save serves; None: no save does yet."""
    ranks: list[dict[str, object]] = []
    state = "saving" if save else "asked"
    said: dict[str, object] = {"state": state, "checkpoint": None, "error": None, "ranks": ranks}
    if save and save.path is not None:
        said["checkpoint"] = save.path.name
        with contextlib.suppress(CorruptCheckpoint, OSError):  # it may be removed by now
            for vote in attempts.votes(save.path):
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
