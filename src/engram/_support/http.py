"""A small HTTP server, for answers of a few kilobytes to callers that may be slow, many or hostile.

``http.server`` is not used: it accepts or repairs malformed requests, and has no limits on connections or on the time that a request
takes; with those added it is longer than this.
"""

from __future__ import annotations

import contextlib
import http
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_log = logging.getLogger("engram")

MAX_HEADERS, MAX_BODY = 8 << 10, 4 << 10
#: Seconds for a whole request to arrive, and for the other side to take the answer.
READ_S, SEND_S = 5.0, 0.5

_FIRST = re.compile(r"([A-Z]{1,16}) (/[!-~]{0,200}) HTTP/1\.[01]")
_HEADER = re.compile(r"([A-Za-z0-9-]+):([\t -~]*)")  # linear time: neighbouring repeats share no character


class Call(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """An answer. Only that of a request which succeeded has a body."""

    code: int
    body: bytes = b""
    kind: str = "application/json"

    def raw(self) -> bytes:
        """The bytes that are sent."""
        head = (
            f"HTTP/1.1 {self.code} {http.HTTPStatus(self.code).phrase}\r\nContent-Type: {self.kind}\r\n"
            f"Content-Length: {len(self.body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + self.body


class Server:
    """Answers requests in threads of its own, one of each connection.

    Args:
        listener: listens. It is the caller's, who closes it after :meth:`close`.
        reply: what to answer to a request. What it raises is logged, and answered as 500.
        name: of the threads.
        most: connections at a time.
    """

    def __init__(self, listener: socket.socket, reply: Callable[[Call], Answer], name: str, most: int) -> None:
        self._socket, self._reply, self._name, self._open = listener, reply, name, True
        self._places = threading.Semaphore(most)
        #: Connections that wait for the other side, the oldest first; and whether all places were taken when they came.
        self._idle: dict[socket.socket, bool] = {}
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Repeatable."""
        self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._thread.join(READ_S)

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
            if full and not self._places.acquire(timeout=SEND_S):
                with connection, contextlib.suppress(OSError):
                    connection.send(Answer(503).raw())
                continue
            self._idle[connection] = full
            try:
                threading.Thread(target=self._serve, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError:  # no threads are left
                self._end(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            call = read(connection)
            full = self._idle.pop(connection, None)  # None: its place goes to another connection
            if isinstance(call, int):
                answer = Answer(503 if (call == 408 and full) or (call == 400 and full is None) else call)
            else:
                try:
                    answer = self._reply(call)
                except Exception:  # noqa: BLE001 - logged here, not told to the caller
                    _log.exception(self._name)
                    answer = Answer(500)
            connection.settimeout(SEND_S)
            connection.sendall(answer.raw())
            connection.shutdown(socket.SHUT_WR)
            self._idle[connection] = True
            until = time.monotonic() + SEND_S  # to read the rest: closing with bytes unread would lose the answer
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


def read(connection: socket.socket) -> Call | int:
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


def _parsed(data: bytes) -> Call | int | None:
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
    return Call(begin[1], begin[2], headers, body) if len(body) == int(length) else 400
