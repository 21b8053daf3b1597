"""Writes that are sent while the caller goes on: at most so many bytes, or messages, are under way."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

import pyarrow as pa

from engram._support import fork
from engram._support.native import NotAdmitted
from engram.errors import RateLimited

if TYPE_CHECKING:
    from collections.abc import Callable

Full = Literal["block", "raise", "drop"]

#: What may be under way. A larger message goes alone.
CREDIT_BYTES, CREDIT_MESSAGES = 4 << 20, 4
#: Between two requests that the limits of the store refused.
_ASK_AGAIN_S = 0.02
#: A thread that has nothing to send ends after it.
_IDLE_S = 1.0
#: For how long the end of a buffer waits for an answer.
_LEAVE_S = 10.0


class _Rows(NamedTuple):
    """Of one write."""

    batch: pa.RecordBatch
    lanes: frozenset[int]


class WritesUnderWay:
    """Rows on their way to a server, in order. A thread sends them, those that wait together in one message, until there are none.

    It owns what is under way, what was dropped, and the error that the next call raises.
    """

    def __init__(self, full: Full, send: Callable[[pa.RecordBatch, int], object]) -> None:
        """``send``: writes rows that go to so many lanes, and returns when they are in the store; raises ``NotAdmitted``."""
        self._full, self._send = full, send
        self._rows: deque[_Rows] = deque()
        self._changed = threading.Condition(fork.lock())
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._refused = self._closed = False
        #: Rows that were not written: there were no credits for them, or the server raised.
        self.dropped = 0
        fork.registered(self)

    @property
    def rows(self) -> int:
        """Under way."""
        return sum(one.batch.num_rows for one in tuple(self._rows))

    def put(self, batch: pa.RecordBatch, lanes: frozenset[int]) -> None:
        """Send rows, which are copied, and do not wait for the answer.

        Raises:
            RateLimited: there are no credits, and ``full`` is ``"raise"``. NotAdmitted: there are none because the limits of the store
                refuse the rows that were sent; the caller waits. What an earlier write raised.
        """
        with self._changed:
            self._raise()
            while not self._has_credits(batch.nbytes):
                if self._full == "drop":
                    self.dropped += batch.num_rows
                    return
                if self._full == "raise":
                    raise RateLimited(
                        f"extend: expected at most {CREDIT_MESSAGES} writes or {CREDIT_BYTES} bytes under way, got {len(self._rows)} "
                        f"before this one of {batch.nbytes} bytes. Write less often, or connect with full='block'."
                    )
                if self._refused:
                    raise NotAdmitted(batch.num_rows)
                self._changed.wait(_IDLE_S)
                self._raise()
            self._rows.append(_Rows(_copied(batch), lanes))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engram-writes", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """As :meth:`settle`, and leave what one of them raised to the next write."""
        with self._changed:
            self._changed.wait_for(lambda: not self._rows or self._refused)

    def settle(self, seconds: float | None = None) -> None:
        """Wait for the answers to all writes; those that the limits of the store refuse stay under way. Raises what one of them raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._rows or self._refused or self._error is not None, seconds)
            self._raise()

    def close(self, *, wait: bool) -> None:
        """Wait for answers, for seconds at most, and warn of rows that have none, and of an error that no call has raised. Repeatable."""
        why, failed = "the server did not admit or acknowledge them", False
        with self._changed:
            # Those that limits refuse now, too: they may be admitted yet.
            self._changed.wait_for(lambda: not self._rows or self._error is not None, _LEAVE_S if wait else 0)
            try:
                self._raise()
            except Exception as error:  # noqa: BLE001 - what ends is told of it by a warning
                why, failed = str(error), True
            left, self._closed = self.rows, True
            self._rows.clear()
            self._changed.notify_all()
        if left or failed:
            rows = f"{left} rows" if left else "rows of an earlier write"
            warnings.warn(f"close: {rows} are not known to be written: {why}.", RuntimeWarning, stacklevel=2)

    def after_fork(self) -> None:
        """In a child: what is under way is its parent's."""
        self._rows.clear()
        self._thread = None

    def _has_credits(self, nbytes: int) -> bool:
        rows = self._rows
        under_way = sum(one.batch.nbytes for one in rows)
        return not rows or (len(rows) < CREDIT_MESSAGES and under_way + nbytes <= CREDIT_BYTES)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        most = CREDIT_MESSAGES
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._rows or self._closed, _IDLE_S) or self._closed:
                    self._thread = None
                    return
                some = list(self._rows)[:most]
            most = CREDIT_MESSAGES
            try:
                self._send(_together([one.batch for one in some]), len(frozenset().union(*(one.lanes for one in some))))
            except NotAdmitted:  # fewer rows may be admitted
                most = 1
                with self._changed:
                    self._refused = True
                    self._changed.notify_all()
                    self._changed.wait(_ASK_AGAIN_S)
            except Exception as error:  # noqa: BLE001 - the next call raises it
                if len(some) > 1 and isinstance(error, ValueError):  # more than the limits can ever admit at once
                    most = 1
                    continue
                self._done(some, error)
            else:
                self._done(some)

    def _done(self, some: list[_Rows], error: Exception | None = None) -> None:
        with self._changed:
            for one in some[: len(self._rows)]:  # none are left of a buffer that was closed
                self._rows.popleft()
                self.dropped += 0 if error is None else one.batch.num_rows
            self._error, self._refused = error or self._error, False
            self._changed.notify_all()


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """In memory of its own: the caller may change its tensors."""
    arrays = []
    for array in batch.columns:
        raw = pa.py_buffer(array.buffers()[1].to_pybytes())
        arrays.append(pa.FixedSizeBinaryArray.from_buffers(array.type, len(array), [None, raw]))
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
