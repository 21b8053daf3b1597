"""Where the calls of one buffer wait until the limits of its store admit their rows."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from engram._native import NotAdmitted
from engram._words import count
from engram.errors import NoSampleable, RateLimited
from engram.limits.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engram.storages import Storage
    from engram.store import Store

T = TypeVar("T")

#: How long a call waits where none is named. Compared by identity: calls that name none cost nothing.
WAIT_S = 60.0
#: The longest sleep: a process may die between a change and the call that wakes for it.
_SLICE_S = 1.0
#: Between two looks for a store that another process is to create.
_LOOK_S = 0.02


def checked_timeout(timeout: object, call: str) -> float:
    """Seconds to wait; of None, for ever. Raises ``TypeError``: no number. ``ValueError``: below 0, or NaN."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"{call}: timeout: expected seconds or None, got {type(timeout).__name__}.")
    if not timeout >= 0:
        raise ValueError(f"{call}: timeout: expected at least 0 seconds, got {timeout}.")
    return float(timeout)


class Room(NamedTuple):
    """What a thread that is to sample sleeps on. It keeps the store's memory, and nothing of the buffer."""

    store: Store
    rows: int
    event: int

    @classmethod
    def of(cls, store: Store | None, rows: int) -> Room | None:
        """Before it is tried to sample so many rows. None: the store has no limits."""
        return cls(store, rows, store.core.limit_event(True)) if store is not None and store.core.limited else None

    def wait(self) -> None:
        """Sleep until the rows may be admitted, or :meth:`wake`; a second at most."""
        self.store.core.await_limit(True, self.rows, self.event, _SLICE_S)

    def wake(self) -> None:
        self.store.core.wake_limits()


class Gate:
    """Admits the rows of one buffer. It owns whether the buffer still samples and writes: what waits here ends when that ends."""

    #: False after ``shutdown``.
    samples = True
    _closed = False

    # ---- the calls of a buffer -------------------------------------------------------------------------------------------

    def sampled(
        self, draw: Callable[[None], T], storage: Storage, rows: int, timeout: float, *, uses_up: bool = False
    ) -> T:
        """What a draw of so many rows returns, once they are admitted. If it raises they are given back.

        ``uses_up``: each row is drawn a limited number of times. Where none is left, new ones are waited for.

        Raises:
            RateLimited: they were not within ``timeout`` seconds. RuntimeError: the buffer was closed or shut down meanwhile.
        """
        deadline, waited = monotonic() + timeout, False
        while True:
            store = self.created(storage, rows, deadline)
            if store is None or not store.core.limited:
                return draw(None)
            written = store.core.write_count
            try:
                with self.admitted(store, rows):
                    return draw(None)
            except NotAdmitted:
                waited = self.wait(store, rows, deadline, samples=True, counted=waited)
            except NoSampleable:
                self.await_rows(store, rows, written, deadline, uses_up=uses_up)

    def await_rows(self, store: Store, rows: int, written: int, deadline: float, *, uses_up: bool) -> None:
        """Called where a draw has found nothing, other consumers may have taken the last rows: until more are written, perhaps.

        Raises: what was raised, if no rows are used up. As :meth:`sampled`.
        """
        if not uses_up and not Rules(*store.core.limit).in_flight:
            raise  # noqa: PLE0704 - in the block that handles it
        self.check_open("sample")
        if monotonic() >= deadline:
            _refuse(store, rows, samples=True)
        store.core.await_insert(written, min(deadline - monotonic(), _SLICE_S))

    @contextmanager
    def admitted(self, store: Store | None, rows: int, *, uses_up: bool = False) -> Iterator[None]:
        """In this block rows are sampled. If it raises they are given back.

        Raises ``NotAdmitted``: not now; also where nothing was drawn because another process has emptied the store meanwhile, or with
        ``uses_up`` because no row may be drawn again.
        """
        if store is None or not store.core.limited:
            yield
            return
        if not store.core.admit_samples(rows):
            raise NotAdmitted(rows)
        clock = store.core.next_ticket
        try:
            yield
        except BaseException as error:
            store.core.give_back_samples(rows)
            if isinstance(error, NoSampleable) and (
                uses_up or store.core.next_ticket != clock or not store.core.admits_samples(rows)
            ):
                raise NotAdmitted(rows) from error
            raise

    def admits(self, store: Store | None, rows: int) -> bool:
        """Whether so many rows could be sampled now."""
        return store is None or not store.core.limited or store.core.admits_samples(rows)

    def written(self, write: Callable[[None], T], store: Store, refused: NotAdmitted, timeout: float) -> T:
        """What a write returns that was refused, once its rows are admitted. Raises as :meth:`sampled`."""
        deadline, waited = monotonic() + timeout, False
        rows = refused.rows
        while True:
            waited = self.wait(store, rows, deadline, samples=False, counted=waited)
            try:
                return write(None)
            except NotAdmitted as again:
                rows = again.rows

    def created(self, storage: Storage, rows: int, deadline: float) -> Store | None:
        """The store, which is waited for where there are limits for it; None: there is none. Raises as :meth:`sampled`."""
        while True:
            store = storage.memory
            if store is not None or storage.pending_limit is None:
                return store
            self.check_open("sample")
            if monotonic() >= deadline:
                rules = Rules(*storage.pending_limit)
                raise RateLimited(
                    f"sample: {rows} rows were not admitted in time: the store does not exist yet, as nothing was ever written, and its "
                    f"limits are {_named(rules)}. Write rows first, or wait longer (timeout=…)."
                )
            time.sleep(_LOOK_S)

    def wait(self, store: Store, rows: int, deadline: float, *, samples: bool, counted: bool) -> bool:
        """Until so many rows may be admitted, perhaps. Raises as :meth:`sampled`.

        Returns True: the call is ``counted`` among those that had to wait, once, however often it looks again.
        """
        core = store.core
        if not counted:
            core.count_limit_wait(samples)
        while True:
            event = core.limit_event(samples)
            self.check_open("sample" if samples else "extend")
            left = deadline - monotonic()
            if left <= 0:
                _refuse(store, rows, samples=samples)
            if core.await_limit(samples, rows, event, min(left, _SLICE_S)):
                return True

    # ---- the buffer's end --------------------------------------------------------------------------------------------------

    def shut_down(self, store: Store | None) -> None:
        """End what waits to sample through this buffer."""
        self.samples = False
        _wake(store)

    def close(self, store: Store | None) -> None:
        """End what waits to sample or to write through this buffer."""
        self._closed = True
        self.shut_down(store)

    def check_open(self, call: str) -> None:
        """Raise ``RuntimeError``: the buffer was closed, or was shut down and is to sample."""
        if self._closed:
            raise RuntimeError(f"{call}: the buffer was closed before the call had ended.")
        if call == "sample" and not self.samples:
            raise RuntimeError("sample: the buffer was shut down.")


def limit_stats(store: Store) -> dict[str, float]:
    """The limits of a store and what they have counted, for ``stats()``: nothing where there are none."""
    rules = Rules(*store.core.limit)
    if not any(rules):
        return {}
    counts = store.core.limit_counts()
    said = {"limit_ratio": rules.ratio, "limit_min_size": rules.min_size, "limit_max_in_flight": rules.in_flight}
    if (centre := rules.ratio * rules.min_size) and not store.core.fleet_limit[0]:  # a part says nothing of the sum
        said["limit_error"] = counts["limit_level"] / centre - 1
    return {**said, **counts, "samples_per_insert": counts["limit_samples"] / max(counts["limit_inserts"], 1)}


def _wake(store: Store | None) -> None:
    """Let all that waits for a store look whether its buffer goes on."""
    if store is not None and not store.closed and store.core.limited:
        store.core.wake_limits()


def _refuse(store: Store, rows: int, *, samples: bool) -> NoReturn:
    """Raise ``RateLimited``: what was asked for, the limits and counts, and what would let it go on."""
    rules, live = Rules(*store.core.limit), store.core.size()
    raise RateLimited(_refusal(rules, store.core.limit_counts(), live, rows, samples=samples))


def _refusal(rules: Rules, counts: dict[str, float], live: int, rows: int, *, samples: bool) -> str:
    """The text of ``RateLimited``."""
    in_flight, centre = int(counts["limit_in_flight"]), rules.ratio * rules.min_size
    by = rows * (1 if samples else rules.ratio)
    band = max(rules.tolerance * centre, by)
    there = in_flight if rules.in_flight else live
    if samples and there < rules.min_size:
        advice = f"Insert {count(rules.min_size - there, 'more row')}"
    elif samples and rules.in_flight and in_flight >= rules.in_flight:  # and none can be drawn, else it would have been
        advice = "Wait until those who read the rows in flight are done with them"
    elif samples:
        missing = math.ceil((centre - band + by - counts["limit_level"]) / rules.ratio) if rules.ratio else 1
        advice = f"Insert {count(max(1, missing), 'more row')}"
    elif rules.in_flight and in_flight + rows > rules.in_flight:
        advice = f"Sample until {count(in_flight + rows - rules.in_flight, 'more row')} are used up"
    else:
        advice = f"Sample {count(max(1, math.ceil(counts['limit_level'] + by - centre - band)), 'more row')}"
    facts = [f"{live} rows are live"]
    if rules.ratio:
        level, low, high = counts["limit_level"], centre - rules.tolerance * centre, centre + rules.tolerance * centre
        facts.append(f"the level is {level:g}, to stay from {low:g} to {high:g}")
    if rules.in_flight:
        facts.append(f"{in_flight} are in flight")
    if unknown := int(counts.get("limit_stores_unknown", 0)):
        facts.append(f"{count(unknown, 'store')} of the fleet never answered this buffer")
    since = f"{counts['limit_inserts']:.0f} rows were inserted and {counts['limit_samples']:.0f} sampled since"
    return (
        f"{'sample' if samples else 'extend'}: {rows} rows were not admitted in time by {_named(rules)}: {', '.join(facts)}; {since}. "
        f"{advice}, change the limit (rb.limit), or wait longer (timeout=…)."
    )


def _named(rules: Rules) -> str:
    return " and ".join(map(str, rules.limits())) or "no limit"
