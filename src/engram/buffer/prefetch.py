"""Batches ahead of the caller: asked for and handed out in the order of the calls, by whichever thread they are made."""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

import torch

from engram._support import fork, native
from engram.errors import NoSampleable
from engram.saved.disk import start_thread
from engram.store import blocks, limits

#: For how long a program that ends or forks, and a buffer that closes, waits for what threads have begun.
LEAVE_S = 5.0


@dataclass(slots=True, eq=False)
class _Batch:
    """One that was asked for."""

    key: blocks.Key
    raw: object = None
    before: dict[str, object] | None = None
    made: object = None
    error: BaseException | None = None
    drawn: bool = False
    last: bool = False
    #: What its thread sleeps on, while the limits of the store do not admit it; and whether the thread is to give it up.
    room: limits.LimitWait | None = None
    unwanted: bool = False
    #: Whether it needs nothing any more: it is made, or its error is what the caller gets.
    there: bool = False
    #: Held while a thread is to read it.
    reading: threading.Lock | None = None
    #: Held while a thread is to do what it can.
    making: threading.Lock | None = None
    mode: Callable[[], AbstractContextManager[object]] = torch.enable_grad

    def hand_over(self) -> None:
        """From now on a thread has it, which sees the gradient mode of this call."""
        self.unwanted = False
        self.reading, self.making = threading.Lock(), threading.Lock()
        self.reading.acquire()
        self.making.acquire()
        if torch.is_inference_mode_enabled():
            self.mode = torch.inference_mode
        elif not torch.is_grad_enabled():
            self.mode = torch.no_grad

    def read(self, prefetcher: Prefetcher) -> None:
        self.raw, self.before = prefetcher.read(self.key)
        self.drawn, self.last = True, prefetcher.ended()

    def finish(self, prefetcher: Prefetcher) -> None:
        raw, self.raw = self.raw, None
        self.made = prefetcher.finish(raw)
        self.there = True

    def fail(self, error: BaseException) -> None:
        """Where there was nothing to draw, there may be when its turn comes."""
        self.error, self.there = error, self.drawn or not isinstance(error, NoSampleable | native.NotAdmitted)

    def was_read(self) -> None:
        held, self.reading = self.reading, None
        if held is not None:
            held.release()

    def release(self) -> None:
        """No thread has it any more."""
        self.was_read()
        held, self.making = self.making, None
        if held is not None:
            held.release()

    def wait(self, limit_s: float = -1) -> bool:
        """Whether no thread has it any more."""
        return _wait_for(self.making, limit_s)

    def withdraw(self) -> None:
        """If its thread waits for the limits of the store it gives it up."""
        self.unwanted = True
        room = self.room
        if room is not None:
            room.wake()


def _wait_for(held: threading.Lock | None, limit_s: float = -1) -> bool:
    if held is None:
        return True
    if not held.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX)):
        return False
    held.release()
    return True


class _Workers:
    """Threads. While they have nothing to do they hold no prefetcher, so that it can be collected."""

    def __init__(self, size: int) -> None:
        self.tasks: queue.SimpleQueue[tuple[_Batch, weakref.ref[Prefetcher]] | None] = queue.SimpleQueue()
        #: Held by the thread that waits for something to read, or reads.
        self.turn = threading.Lock()
        self.stopped = False
        #: The batch whose thread waits for the limits of the store.
        self.waiting: _Batch | None = None
        self.threads = [
            threading.Thread(target=_work, args=(self,), name=f"engram-prefetch-{i}", daemon=True) for i in range(size)
        ]

    def start(self) -> None:
        try:
            for thread in self.threads:
                start_thread(thread)
        except RuntimeError:  # the machine has no more threads, or the interpreter ends
            self.stop()

    def hand(self, batch: _Batch, prefetcher: Prefetcher) -> None:
        self.tasks.put((batch, weakref.ref(prefetcher)))
        if self.stopped:  # meanwhile, so perhaps no thread looks any more
            self.stop()

    def stop(self) -> None:
        """Threads end when they are done with what they are at; the rest is let go. Repeatable."""
        self.stopped = True
        waiting = self.waiting
        if waiting is not None:
            waiting.withdraw()
        with suppress(queue.Empty):
            while True:
                task = self.tasks.get_nowait()
                if task is not None:
                    task[0].release()
        for _ in self.threads:
            self.tasks.put(None)

    def join(self, limit_s: float | None) -> None:
        """Wait until the threads have ended, but for the calling one."""
        deadline = None if limit_s is None else monotonic() + limit_s
        for thread in self.threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - monotonic()))


def _work(workers: _Workers) -> None:
    while _work_once(workers):
        pass


def _work_once(workers: _Workers) -> bool:
    with workers.turn:
        task = workers.tasks.get()
        if task is None:
            return False
        batch, known = task
        prefetcher = known()
        while prefetcher is not None and not _read_once(batch, prefetcher):
            workers.waiting = batch
            del prefetcher  # a buffer that nothing else refers to ends meanwhile
            again = _waited(batch, workers)
            workers.waiting = batch.room = None
            prefetcher = known() if again else None
        batch.was_read()
    try:
        if prefetcher is not None and batch.drawn and not batch.there:
            with batch.mode():
                batch.finish(prefetcher)
    except BaseException as error:  # noqa: BLE001
        batch.fail(error)
    finally:
        batch.release()
    return True


def _read_once(batch: _Batch, prefetcher: Prefetcher) -> bool:
    """Read a batch. False: the limits of the store do not admit it now. Writes of this buffer do not wait for it then."""
    try:
        batch.room = prefetcher.room()
        with batch.mode():
            batch.read(prefetcher)
    except native.NotAdmitted as error:
        batch.fail(native.NotAdmitted(error.rows))  # without the prefetcher, which a traceback holds
        batch.was_read()
        return False
    except BaseException as error:  # noqa: BLE001 - the call that takes the batch raises it
        batch.fail(error)
    else:
        batch.error = None
    batch.room = None
    return True


def _waited(batch: _Batch, workers: _Workers) -> bool:
    """Sleep until the limits of the store may admit a batch, a second at most. False: it is to be given up."""
    if batch.room is not None and not (workers.stopped or batch.unwanted):
        batch.room.wait()
    return not (workers.stopped or batch.unwanted)


def _leave(workers: _Workers) -> None:
    workers.stop()
    workers.join(LEAVE_S)


class Prefetcher:
    """Keeps ``depth`` batches ahead of the caller.

    Each call of :meth:`next` takes the random bits of the batch ``depth`` ahead of the one that it returns. What has been asked for
    is read in that order, before whatever :meth:`materialize` is called for, so which batches come does not depend on who makes
    them: the caller, as long as that takes no longer than a thread would cost, then ``depth`` threads. A pass is not read beyond its
    end before all of it was handed out.

    An error is raised by the call whose batch it is; the others come as if nothing had happened.
    """

    #: A batch that takes the caller longer is slow: to hand one to a thread, which wakes up, costs tens of microseconds.
    slow_s = 200e-6
    #: So many slow batches in a row, and threads make them from then on. One alone may be the fault of another process.
    slow_in_a_row = 8

    def __init__(self, depth: int) -> None:
        self.depth = depth
        #: Whether nothing is ahead but :attr:`turns`. The caller may take the first of them himself, make that batch, draw into its
        #: key and put it behind the others; :meth:`took` hears how long that took.
        self.lazy = False
        #: Keys of batches ahead that are made when their turn comes. They come behind what is made already.
        self.turns: deque[blocks.Key] = deque()
        #: Slow batches in a row.
        self.slow = 0
        self._ahead: deque[_Batch] = deque()
        #: Of batches that were dropped: they come next.
        self._keys: deque[blocks.Key] = deque()
        self._spare: list[blocks.Key] = []
        self._plain = self._has_epochs = self._threaded = self._making = self._closed = False
        self._workers: _Workers | None = None
        self._end: weakref.finalize[..., Prefetcher] | None = None
        #: The last that a thread was given.
        self._pending: _Batch | None = None
        self._lock = fork.rlock()
        fork.registered(self, uses_others=True)

    def draws(self, *, plainly: bool, has_epochs: bool) -> None:
        """What is read. Nothing is ahead, or this has not changed.

        Args:
            plainly: nothing is gained from reading before a batch's turn: it follows from its key and from what :meth:`materialize` guards,
                and its steps run no code of the user's that may sample.
            has_epochs: it has ends, so each batch is read before the next is asked for.
        """
        self._plain, self._has_epochs = plainly, has_epochs
        self.lazy = self.lazy and plainly

    def __len__(self) -> int:
        return len(self._ahead) + len(self.turns)

    # ---- the stages of a batch, which each kind of prefetching has ---------------------------------------------------

    def ask(self, key: blocks.Key) -> None:
        """Draw the random bits of the next batch, in the caller's thread."""

    def read(self, key: blocks.Key) -> tuple[object, dict[str, object] | None]:
        """Draw rows and copy them, one batch after the other: what was read, and what takes the rows back to their epoch.

        Raises ``NoSampleable``, ``NotAdmitted``: not now.
        """
        raise NotImplementedError

    def room(self) -> limits.LimitWait | None:
        """What the thread that is to read next sleeps on, if it is not admitted; None: there are no limits."""

    def finish(self, raw: object) -> object:
        """From what was read to what is handed out. Called by several threads at a time."""

    def ended(self) -> bool:
        """Whether an epoch ended with the last batch that was read. Said once."""
        raise NotImplementedError

    def over(self) -> None:
        """An epoch ended with the batch that is handed out now, or that failed."""

    # ---- taking --------------------------------------------------------------------------------------------------------

    def next(self, deadline: float = math.inf) -> Any:
        """The next batch. An interrupt while it is waited for loses nothing.

        Raises:
            NotAdmitted: the limits of the store do not admit it; or did not until the deadline, and a thread waits for them.
            RuntimeError: it was closed; or a step asks for a batch that waits for the step.
            NoSampleable: there is nothing to draw.
            BaseException: what a step raised while this batch was made.
        """
        self._check_outside("sample")
        while True:
            with self._lock:
                self._making = True
                try:
                    head, taken = self._take()
                finally:
                    self._making = False
            if taken:
                break
            self._wait_for_head(head, deadline)
        self._spare.append(head.key)
        if head.last:
            self.over()
        error, head.error = head.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error, head  # which its traceback holds
        return head.made

    @staticmethod
    def _wait_for_head(head: _Batch, deadline: float) -> None:
        """Until no thread has it any more. The lock is free: writes that it waits for may need it."""
        error = head.error
        if head.making is None and isinstance(error, native.NotAdmitted):
            raise native.NotAdmitted(error.rows)
        while not head.wait(max(0.01, deadline - monotonic())):
            error = head.error
            if isinstance(error, native.NotAdmitted):
                raise native.NotAdmitted(error.rows)

    def _take(self) -> tuple[_Batch, bool]:
        """The next batch, and whether it was taken. Else a thread has it, or it is not admitted."""
        self._check_open()
        ahead = self._ahead
        fresh = not ahead
        if fresh:
            self._begin()
        if self._plain and not self._threaded:
            while len(self) <= self.depth:
                self.turns.append(self._asked())
        else:
            while len(ahead) <= self.depth and self._may_begin(ahead[-1]):
                self._begin()
        head = ahead[0]
        if head.making is None and not (head.there or (fresh and head.error is not None)):
            make = self._have_made if isinstance(head.error, native.NotAdmitted) else self._make
            make(head)
        if head.making is not None or (isinstance(head.error, native.NotAdmitted) and not head.there):
            return head, False
        self._check_open()
        ahead.popleft()
        self.lazy = bool(self.turns) and not ahead
        return head, True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("sample: the buffer was closed, and its prefetching with it. Make or open another one.")

    def _check_outside(self, call: str) -> None:
        if self._is_at_it():
            raise RuntimeError(
                f"{call}: called while a batch of the same buffer is made: with prefetch, a transform, collate_fn or sampler cannot "
                "do that. Use another ReplayBuffer over the same storage."
            )

    def _is_at_it(self) -> bool:
        """Whether a step is calling."""
        return self._is_worker() or (self._making and self._lock._is_owned())  # type: ignore[attr-defined] # noqa: SLF001

    def _is_worker(self) -> bool:
        return self._workers is not None and threading.current_thread() in self._workers.threads

    def _asked(self) -> blocks.Key:
        """The key of another batch: one whose batch was dropped, or a new one."""
        if self._keys:
            return self._keys.popleft()
        key = self._spare.pop() if self._spare else blocks.Key()
        self.ask(key)
        return key

    def _may_begin(self, tail: _Batch) -> bool:
        """Whether another batch may be read behind one: there was something to draw, and the epoch goes on."""
        if tail.reading is not None and not self._has_epochs:
            return True
        _wait_for(tail.reading)
        if tail.drawn and not tail.last:
            tail.last = self.ended()  # other processes may have taken the rest of it
        return (tail.drawn or tail.there) and not tail.last

    def _begin(self) -> None:
        """Make another batch, or have it made."""
        batch = _Batch(self.turns.popleft() if self.turns else self._asked())
        self._ahead.append(batch)
        self._have_made(batch)

    def _have_made(self, batch: _Batch) -> None:
        workers = self._called_workers() if self._threaded else None
        if workers is None:
            self._make(batch)
        else:
            batch.hand_over()
            self._pending = batch
            workers.hand(batch, self)

    def _called_workers(self) -> _Workers | None:
        """The threads; None if there can be none."""
        if self._workers is None:
            self._workers = workers = _Workers(self.depth)
            workers.start()
            self._end = weakref.finalize(self, _leave, workers)  # before the interpreter goes, too
        return None if self._workers.stopped else self._workers

    def _make(self, batch: _Batch) -> None:
        """By the caller. What a step raises is kept for the batch's turn."""
        self._wait_for_threads()
        batch.error = None
        start = perf_counter()
        try:
            batch.read(self)
            batch.finish(self)
        except Exception as error:  # noqa: BLE001 - the call that takes the batch raises it
            batch.fail(error)
        self.took(perf_counter() - start)

    def took(self, seconds: float) -> None:
        """The caller made a batch himself."""
        self.slow = self.slow + 1 if seconds > self.slow_s else 0
        if self.slow >= self.slow_in_a_row:
            self._threaded, self.lazy = True, False

    # ---- what happens to the rows ------------------------------------------------------------------------------------

    def materialize(self) -> None:
        """Have everything read that was asked for: what happens to the rows next is not seen by it."""
        if self._is_at_it():
            return
        if self.turns:
            with self._lock:
                self._making, self.lazy = True, False
                try:
                    while self.turns:
                        self._begin()
                finally:
                    self._making = False
        self._wait_for_threads()

    def _wait_for_threads(self) -> None:
        """Until they have read what they were given, but for what the limits of the store do not admit, and what comes behind that."""
        pending = self._pending
        if pending is None or pending.reading is None:
            return
        for batch in list(self._ahead):
            _wait_for(batch.reading)
            if isinstance(batch.error, native.NotAdmitted):
                return

    def drop(self, call: str, *, keys: bool = True) -> dict[str, object] | None:
        """Drop what is ahead. The random bits it was made of come again, so that all later ones are those of any other depth;
        without ``keys`` they are dropped, too. The caller makes batches again, until they prove slow.

        Returns: what takes the rows back to their epoch; None where nothing needs to.
        """
        self._check_outside(call)
        with self._lock:
            self.wait()
            first = next((batch.before for batch in self._ahead if batch.drawn), None)
            self._keys.extendleft(reversed([*(batch.key for batch in self._ahead), *self.turns]))
            if not keys:
                self._keys.clear()
            self._forget()
            return first

    def _forget(self) -> None:
        self._ahead.clear()
        self.turns.clear()
        self._pending, self._threaded, self.lazy, self.slow = None, False, False, 0

    def wait(self) -> None:
        """Until threads have made what they were given, or given up what the limits of the store do not admit."""
        self._withdraw()
        for batch in list(self._ahead):
            batch.wait()

    def _withdraw(self) -> None:
        for batch in list(self._ahead):
            batch.withdraw()

    def close(self, limit_s: float | None = LEAVE_S) -> None:
        """Drop what is ahead, and end the threads; not waiting longer than that for what they are at. Repeatable."""
        self._closed, self.lazy = True, False
        if self._end is not None and self._workers is not None:
            self._end.detach()
            self._workers.stop()
            self._workers.join(limit_s)
        if not self._is_worker() and self._lock.acquire(timeout=-1 if limit_s is None else limit_s):
            try:
                self._forget()
            finally:
                self._lock.release()

    # ---- copies and forks ----------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, Any]:
        """What is ahead: ``batches``, of each its ``key`` and, if it is made, ``made``, ``last`` and ``before``; and the ``keys`` to
        come. With the state of the generator and of what draws, these are all batches to come. One whose making failed is made
        again. Waits for the threads.
        """
        self._check_outside("copy")
        with self._lock:
            self.materialize()
            self.wait()
            batches = []
            for batch in self._ahead:
                entry: dict[str, object] = {"key": batch.key.value}
                if batch.there and batch.error is None:
                    entry |= {"made": batch.made, "last": batch.last, "before": batch.before}
                batches.append(entry)
            return {"batches": batches, "keys": [key.value for key in self._keys]}

    def take_entries(self, saved: dict[str, Any]) -> None:
        """Go on with what :meth:`entries` returned, instead of what is ahead."""
        batches = []
        for entry in saved["batches"]:
            batch = _Batch(blocks.Key.of(entry["key"]))
            if "made" in entry:
                batch.made, batch.last, batch.before = entry["made"], entry["last"], entry["before"]
                batch.drawn = batch.there = True
            batches.append(batch)
        keys = [blocks.Key.of(bits) for bits in saved["keys"]]
        with self._lock:
            self.drop("restore", keys=False)
            self._ahead.extend(batches)
            self._keys.extend(keys)

    def before_fork(self) -> None:
        """What threads are at is made, so that the child has it."""
        if not self._is_at_it():
            self._withdraw()
            deadline = monotonic() + LEAVE_S
            for batch in list(self._ahead):
                batch.wait(max(0.0, deadline - monotonic()))

    def forked(self, token: object) -> None:
        pass

    def after_fork(self) -> None:
        """In the child there are no threads, and nothing is ahead."""
        if self._end is not None:
            self._end.detach()
        self._workers = self._end = None
        self._making = False
        self._forget()  # they are the parent's, and would be those of all its children
        self._keys.clear()
