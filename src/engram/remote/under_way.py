"""Rows on their way to a server: sent in order by a thread, several writes in a message."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence

import pyarrow as pa

from engram._support import fork
from engram._support.native import NotAdmitted
from engram.errors import RateLimited, RowError
from engram.remote import protocol, wire
from engram.remote.connection import Answer
from engram.remote.served import RETRY_INTERVAL_S

#: What may be under way. A larger message goes alone.
CREDIT_BYTES, CREDIT_ROWS = 4 << 20, 1 << 16
#: For how long small writes are gathered before they are encoded.
GATHERED_S = 0.001
#: A larger write is not gathered with others.
GATHERED = wire.GATHERED_BYTES // 4
#: Blocks in one message; and writes under way while the limits of the store refuse rows.
_MAX_TOGETHER = 4
#: A thread that has nothing to send ends after it.
_IDLE_THREAD_S = 1.0
#: For how long the end of a buffer waits for an answer, and for the next one after it.
_CLOSE_TIMEOUT_S = 10.0


class WritesUnderWay:
    """Rows on their way to a server, in order. A thread sends them, those that wait together in one message, until there are none.

    It owns what is under way, what was dropped, and the error that the next call raises.
    """

    def __init__(self, full: protocol.Full, send: Callable[[pa.RecordBatch], Answer], length: int = 0) -> None:
        """``send``: writes rows, and returns when they are in the store; raises ``NotAdmitted``.

        ``length``: of lanes that no other client or process writes to, so that writes are told the numbers of their rows; 0: they are not.
        """
        self._full, self._send, self.length = full, send, length
        #: By lane, the row that the newest write was told, where it is known.
        self.newest: dict[int, int] = {}
        self._rows: deque[wire.Rows] = deque()
        self._changed = threading.Condition(fork.lock())
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        #: Whether limits refuse rows now, and how many of the rows that were under way when they last did still are.
        self._refused, self._throttled, self._closed = False, 0, False
        #: Calls that wait for what is under way: nothing more is gathered then.
        self._awaited = 0
        #: Of all that is under way.
        self._bytes = self.rows = 0
        #: Rows that were not written: there were no credits for them, or the server raised.
        self.dropped = 0
        fork.registered(self)

    def put(self, batch: pa.RecordBatch, lanes: Sequence[int]) -> list[int] | None:
        """Send rows, which are copied, and do not wait for the answer. Returns and raises as :meth:`gather`."""
        return self.gather(batch.schema, [], lanes, batch)

    def gather(
        self, schema: pa.Schema, columns: list[bytes], lanes: Sequence[int], whole: pa.RecordBatch | None = None
    ) -> list[int] | None:
        """As :meth:`put`, rows that go with others in one message. ``columns``: the bytes of each. ``lanes``: of each row.

        Returns their numbers, as far as writes are told them. None: the newest row of a lane is not known, and nothing is sent.

        Raises:
            RateLimited: there are no credits, and ``full`` is ``"raise"``. NotAdmitted: there are none because the limits of the store
                refuse the rows that were sent; the caller waits. What an earlier write raised.
        """
        nbytes, n = sum(map(len, columns)) if whole is None else whole.nbytes, len(lanes)
        with self._changed:
            if not self._admits(n, nbytes):
                return []
            if (told := self._told(lanes)) is None:
                return None
            if whole is not None or not (self._rows and self._rows[-1].takes(schema)):
                self._append(wire.Rows(schema, whole and wire.copied(whole)))
            if whole is None:
                self._rows[-1].gather(columns, n, nbytes)
                self._bytes, self.rows = self._bytes + nbytes, self.rows + n
            self._rows[-1].told += told
            if not self._rows[-1].takes(schema):
                self._changed.notify_all()
            return told

    def _told(self, lanes: Sequence[int]) -> list[int] | None:
        """The numbers of rows that come now, each behind the newest of its lane; none where writes are not told them."""
        if self.length and not self.newest.keys() >= {*lanes}:
            return None
        told = []
        for lane in lanes if self.length else ():
            row = self.newest[lane] + 1
            self.newest[lane] = row if row % self.length else row - self.length
            told.append(self.newest[lane])
        return told

    def _append(self, rows: wire.Rows) -> None:
        self._rows.append(rows)
        self._bytes, self.rows = self._bytes + rows.nbytes, self.rows + rows.rows
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engram-writes", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _admits(self, n: int, nbytes: int) -> bool:
        """Whether there are credits for rows, which are waited for; else they are dropped."""
        self._raise()
        while not self._has_credits(n, nbytes):
            if self._full == "drop":
                self.dropped += n
                return False
            if self._full == "raise":
                raise RateLimited(
                    f"extend: expected at most {CREDIT_ROWS} rows and {CREDIT_BYTES} bytes under way, or {_MAX_TOGETHER} writes while "
                    f"limits refuse rows, got {self.rows} and {self._bytes} before these {n} of {nbytes} bytes. Write less often, or "
                    "connect with full='block'."
                )
            if self._refused:
                raise NotAdmitted(n)
            self._changed.wait(_IDLE_THREAD_S)
            self._raise()
        return True

    def forget(self) -> dict[int, int]:
        """The newest rows, by lane. No write is told a number until they are known again."""
        with self._changed:
            known, self.newest = self.newest, {}
            return known

    def wait(self) -> None:
        """As :meth:`settle`, and leave what one of them raised to the next write."""
        with self._changed:
            self._await(lambda: not self._rows or self._refused)

    def _await(self, until: Callable[[], bool], seconds: float | None = None) -> None:
        self._awaited += 1
        self._changed.notify_all()
        self._changed.wait_for(until, seconds)
        self._awaited -= 1

    def settle(self, seconds: float | None = None) -> None:
        """Wait for the answers to all writes; those that the limits of the store refuse stay under way. Raises what one of them raised."""
        with self._changed:
            self._await(lambda: not self._rows or self._refused or self._error is not None, seconds)
            self._raise()

    def close(self, *, wait: bool) -> None:
        """Wait as long as answers come, and warn of rows that have none, and of an error that no call has raised. Repeatable."""
        why, failed, before = "the server did not admit or acknowledge them", False, -1
        with self._changed:
            # Also for those that limits refuse now: they may be admitted yet.
            while self.rows != before and self._rows and self._error is None:
                before = self.rows
                self._await(lambda: not self._rows or self._error is not None, _CLOSE_TIMEOUT_S if wait else 0)
            try:
                self._raise()
            except Exception as error:  # noqa: BLE001 - what ends is told of it by a warning
                why, failed = str(error), True
            left, self._closed = self.rows, True
            self._rows.clear()
            self._bytes = self.rows = 0
            self._changed.notify_all()
        if left or failed:
            rows = f"{left} rows" if left else "rows of an earlier write"
            warnings.warn(f"close: {rows} are not known to be written: {why}.", RuntimeWarning, stacklevel=2)

    def after_fork(self) -> None:
        """In a child: what is under way is its parent's."""
        self._rows.clear()
        self._bytes = self.rows = 0
        self._thread = None

    def _has_credits(self, n: int, nbytes: int) -> bool:
        if self._throttled and sum(len(one.sizes) for one in self._rows) >= _MAX_TOGETHER:
            return False
        return not self._rows or (self.rows + n <= CREDIT_ROWS and self._bytes + nbytes <= CREDIT_BYTES)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        most = _MAX_TOGETHER
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._rows or self._closed, _IDLE_THREAD_S) or self._closed:
                    self._thread = None
                    return
                if len(self._rows) == 1 and self._rows[0].open and not self._awaited:
                    self._changed.wait_for(lambda: self._awaited or self._closed or self._rows[0].is_full, GATHERED_S)
                some = list(self._rows)[:most]
                batches = [one.batch() for one in some]
            most = _MAX_TOGETHER
            if not some:  # it was closed
                continue
            try:
                answer = self._send(wire.together(batches))
            except NotAdmitted:  # fewer rows may be admitted
                most = 1
                with self._changed:
                    self._split(some)
                    self._refused, self._throttled = True, self.rows
                    self._changed.notify_all()
                    self._changed.wait(RETRY_INTERVAL_S)
            except Exception as error:  # noqa: BLE001 - the next call raises it
                if isinstance(error, ValueError):  # more than the limits can ever admit at once
                    with self._changed:
                        split = self._split(some)
                    if split or len(some) > 1:
                        most = 1
                        continue
                self._done(some, error)
            else:
                told = [row for one in some for row in one.told]
                self._done(some, _moved(told, answer) if told else None, are_written=True)

    def _split(self, some: list[wire.Rows]) -> bool:
        """Let fewer of gathered writes be sent first: whether there are several."""
        halves = some[0].halves()
        if self._rows and len(some) == 1:
            self._rows.popleft()
            self._rows.extendleft(reversed(halves))
        return len(halves) > 1 and len(some) == 1

    def _done(self, some: list[wire.Rows], error: Exception | None = None, *, are_written: bool = False) -> None:
        with self._changed:
            if error is not None:
                self.newest.clear()
            for one in some[: len(self._rows)]:  # none are left of a buffer that was closed
                self._rows.popleft()
                self._bytes, self.rows = self._bytes - one.nbytes, self.rows - one.rows
                self._throttled = max(self._throttled - one.rows, 0)
                self.dropped += 0 if are_written else one.rows
            self._error, self._refused = error or self._error, False
            self._changed.notify_all()


def _moved(told: list[int], answer: Answer) -> RowError | None:
    """The error for rows whose writer was told other numbers; None: those are right."""
    rows = wire.tensors_in(answer.rows, answer.columns)[0].tolist()
    wrong = [f"{row} for one that was told {number}" for number, row in zip(told, rows, strict=True) if number != row]
    if not wrong:
        return None
    return RowError(
        f"add, extend: expected no other writer in the lanes of this buffer, as own_lanes says, got row {wrong[0]}, and "
        f"{len(wrong) - 1} more: they are in the store. Write to lanes of your own, or connect without own_lanes."
    )
