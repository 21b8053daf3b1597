"""Limits of how fast rows come and go: what they are, those refused because they would stop everything, and where calls wait for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from time import monotonic
from typing import NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from engram._support import checks, native, words
from engram.errors import NoSampleable, RateLimited
from engram.store.store import Store


@dataclass(frozen=True)
class SamplesPerInsert:
    """As many rows are sampled as ``ratio`` times those inserted, within a band: for :meth:`ReplayBuffer.limit`.

    Rows that are inserted raise a level by ``ratio`` each, rows that are sampled lower it by 1. It stays within
    ``ratio * min_size * (1 - tolerance)`` and ``ratio * min_size * (1 + tolerance)``: an insert that would raise it beyond waits, and
    so does a sample that would lower it below. Where one insert or one sample is more than half of the band, it may have as much as it
    needs; so both never wait for each other, whatever their sizes.

    Args:
        ratio: rows sampled per row inserted, above 0.
        min_size: live rows before the first is sampled. Until then no insert waits.
        tolerance: half of the band, as a part of ``ratio * min_size``; at least 0.

    Raises:
        TypeError: no numbers. ValueError: one that is out of range, or not finite.

    >>> from engram import SamplesPerInsert
    >>> SamplesPerInsert(8, min_size=1_000)
    SamplesPerInsert(ratio=8.0, min_size=1000, tolerance=0.1)
    """

    ratio: float
    _: KW_ONLY
    min_size: int
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        vars(self)["ratio"] = _number("SamplesPerInsert: ratio", self.ratio, above=True)
        vars(self)["min_size"] = checks.check_count("SamplesPerInsert: min_size", self.min_size, "row", most=1 << 48)
        vars(self)["tolerance"] = _number("SamplesPerInsert: tolerance", self.tolerance, above=False)


@dataclass(frozen=True)
class MinSize:
    """Samples wait until so many rows are live; inserts never wait. Raises as :class:`SamplesPerInsert`.

    >>> from engram import MinSize
    >>> MinSize(1_000)
    MinSize(rows=1000)
    """

    rows: int

    def __post_init__(self) -> None:
        vars(self)["rows"] = checks.check_count("MinSize: rows", self.rows, "row", most=1 << 48)


@dataclass(frozen=True)
class MaxInFlight:
    """Inserts wait while so many rows are inserted that no sampler has used up: a queue. Raises as :class:`SamplesPerInsert`.

    For a sampler that uses rows up one by one, after a number of draws: not for groups, which may never be complete. A row that is
    removed, evicted, overwritten, or lost with its writer is in flight no longer, and one that may be drawn again (``mark_update``) is in
    flight again.

    >>> from engram import MaxInFlight
    >>> MaxInFlight(5_000)
    MaxInFlight(rows=5000)
    """

    rows: int

    def __post_init__(self) -> None:
        vars(self)["rows"] = checks.check_count("MaxInFlight: rows", self.rows, "row", most=1 << 48)


Limit: TypeAlias = SamplesPerInsert | MinSize | MaxInFlight
L = TypeVar("L")


class Rules(NamedTuple):
    """Limits as a store keeps them. 0: there is no such limit."""

    ratio: float = 0.0
    tolerance: float = 0.0
    min_size: int = 0
    in_flight: int = 0

    def limits(self) -> tuple[Limit, ...]:
        """The limits that these are."""
        found: list[Limit] = []
        if self.ratio:
            found.append(SamplesPerInsert(self.ratio, min_size=self.min_size, tolerance=self.tolerance))
        elif self.min_size:
            found.append(MinSize(self.min_size))
        if self.in_flight:
            found.append(MaxInFlight(self.in_flight))
        return tuple(found)

    def check(self, capacity: int, draws_of_a_row: int | None, call: str, *, groups: bool) -> None:
        """Refuse what would stop inserts and samples for ever.

        Args:
            capacity: rows of the storage.
            draws_of_a_row: after how many draws the sampler uses a row up; None: never.
            call: what to call it in errors.
            groups: whether rows are used up by groups, which may never be complete.

        Raises:
            ValueError: it would.
        """
        if self.min_size > capacity:
            raise ValueError(
                f"{call}: expected a storage of at least {self.min_size} rows, which samples would wait for, got one of {capacity}. "
                "Take a smaller min_size."
            )
        if self.in_flight and (groups or draws_of_a_row is None):
            raise ValueError(
                f"{call}: MaxInFlight({self.in_flight}): expected a sampler that uses rows up one by one, such as a ConsumingSampler or a "
                "FilteredSampler with max_uses: with others inserts would wait for ever, as they would for groups that are never complete. "
                "SamplesPerInsert limits inserts for every sampler; a storage of as many rows lets the oldest make way, and counts them."
            )
        if self.in_flight and self.in_flight < self.min_size:
            raise ValueError(
                f"{call}: MaxInFlight({self.in_flight}): expected at least the {self.min_size} rows that samples wait for: inserts would "
                "wait for samples, and samples for inserts."
            )
        if draws_of_a_row is not None and self.ratio > draws_of_a_row:
            raise ValueError(
                f"{call}: SamplesPerInsert: ratio: expected at most {draws_of_a_row}, as often as the sampler draws a row, got "
                f"{self.ratio:g}: inserts would wait for samples that cannot come."
            )


def rules_of(limits: Iterable[object]) -> Rules:
    """The rules that limits make together; of None, or of no limit, none.

    Raises:
        TypeError: something else. ValueError: two of a kind; ``MinSize`` beside ``SamplesPerInsert``, which has its own.
    """
    given = list(limits)
    if not given:
        raise TypeError("limit: expected SamplesPerInsert, MinSize or MaxInFlight, or None for no limit, got nothing.")
    for limit in given:
        if not isinstance(limit, SamplesPerInsert | MinSize | MaxInFlight | None):
            kind = limit if isinstance(limit, type) else type(limit)
            raise TypeError(f"limit: expected SamplesPerInsert, MinSize, MaxInFlight or None, got {kind.__name__}.")
    ratio, size, in_flight = _one(given, SamplesPerInsert), _one(given, MinSize), _one(given, MaxInFlight)
    if ratio is not None and size is not None:
        raise ValueError(f"limit: expected one of {ratio} and {size}, got both. SamplesPerInsert has a min_size.")
    rules = Rules() if ratio is None else Rules(ratio.ratio, ratio.tolerance, ratio.min_size)
    if size is not None:
        rules = Rules(min_size=size.rows)
    return rules if in_flight is None else rules._replace(in_flight=in_flight.rows)


def _one(limits: Iterable[object], kind: type[L]) -> L | None:
    """The limit of a kind. Raises ``ValueError``: there are two."""
    found = [limit for limit in limits if isinstance(limit, kind)]
    if len(found) > 1:
        raise ValueError(f"limit: expected one {kind.__name__}, got {found[0]} and {found[1]}.")
    return found[0] if found else None


def _number(what: str, value: object, *, above: bool) -> float:
    """A finite number of at least 0, or ``above`` it. Raises ``TypeError``, ``ValueError``: another value."""
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{what}: expected a number, got {type(value).__name__}.")
    try:
        number = float(value)  # type: ignore[arg-type] # that is the question
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{what}: expected a number, got {type(value).__name__}.") from None
    if not (math.isfinite(number) and (number > 0 if above else number >= 0)) or number > 1e12:
        raise ValueError(f"{what}: expected a finite number {'above' if above else 'of at least'} 0, got {value}.")
    return number


T = TypeVar("T")

#: How long a call waits where none is named. Compared by identity: calls that name none cost nothing.
WAIT_S = 60.0
#: The longest sleep: a process may die between a change and the call that wakes for it.
_SLICE_S = 1.0
#: Between two looks for a store that another process is to create.
_POLL_S = 0.02
#: The first sleep, where rows come soon.
_SHORTEST_S = 0.0005


def checked_timeout(timeout: object, call: str) -> float:
    """Seconds to wait; of None, for ever. Raises ``TypeError``: no number. ``ValueError``: below 0, or NaN."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"{call}: timeout: expected seconds or None, got {type(timeout).__name__}.")
    if not timeout >= 0:
        raise ValueError(f"{call}: timeout: expected at least 0 seconds, got {timeout}.")
    return float(timeout)


class LimitWait(NamedTuple):
    """The wait of a thread that is to sample, for the limits of a store. It keeps the store's memory, and nothing of the buffer."""

    store: Store
    rows: int
    event: int

    @classmethod
    def of(cls, store: Store | None, rows: int) -> LimitWait | None:
        """Before it is tried to sample so many rows. None: the store has no limits."""
        return cls(store, rows, store.core.limit_event(True)) if store is not None and store.core.limited else None

    def wait(self) -> None:
        """Sleep until the rows may be admitted, or :meth:`wake`; a second at most."""
        self.store.core.await_limit(True, self.rows, self.event, _SLICE_S)

    def wake(self) -> None:
        self.store.core.wake_limits()


class Limited(Protocol):
    """A storage, as far as limits must know it."""

    pending_limit: Rules | None

    @property
    def memory(self) -> Store | None:
        """The store; None: nothing was ever written."""


class Gate:
    """Admits the rows of one buffer. It owns whether the buffer still samples and writes: what waits here ends when that ends."""

    #: False after ``shutdown``.
    samples = True
    _closed = False

    # ---- the calls of a buffer -------------------------------------------------------------------------------------------

    def sampled(
        self, draw: Callable[[None], T], storage: Limited, rows: int, timeout: float, *, uses_up: bool = False
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
            except native.NotAdmitted:
                waited = self.wait(store, rows, deadline, samples=True, counted=waited)
            except NoSampleable:
                self.await_rows(store, rows, written, deadline, uses_up=uses_up)

    def gathered(self, draw: Callable[[], T], can_draw: Callable[[], bool], timeout: float) -> T:
        """What a draw returns, as soon as there are rows for it. Others may be faster: then it is tried again.

        Raises:
            NoSampleable: there were none within ``timeout`` seconds. RuntimeError: the buffer was closed or shut down meanwhile.
        """
        deadline, sleep = monotonic() + timeout, _SHORTEST_S
        while True:
            try:
                return draw()
            except NoSampleable:
                if monotonic() >= deadline:
                    raise
            while not can_draw() and (left := deadline - monotonic()) > 0:
                time.sleep(min(sleep, left))
                self.check_open("sample")
                sleep = min(2 * sleep, _POLL_S)

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
            raise native.NotAdmitted(rows)
        clock = store.core.next_ticket
        try:
            yield
        except BaseException as error:
            store.core.give_back_samples(rows)
            if isinstance(error, NoSampleable) and (
                uses_up or store.core.next_ticket != clock or not store.core.admits_samples(rows)
            ):
                raise native.NotAdmitted(rows) from error
            raise

    def admits(self, store: Store | None, rows: int) -> bool:
        """Whether so many rows could be sampled now."""
        return store is None or not store.core.limited or store.core.admits_samples(rows)

    def written(self, write: Callable[[None], T], store: Store, refused: native.NotAdmitted, timeout: float) -> T:
        """What a write returns that was refused, once its rows are admitted. Raises as :meth:`sampled`."""
        deadline, waited = monotonic() + timeout, False
        rows = refused.rows
        while True:
            waited = self.wait(store, rows, deadline, samples=False, counted=waited)
            try:
                return write(None)
            except native.NotAdmitted as again:
                rows = again.rows

    def created(self, storage: Limited, rows: int, deadline: float) -> Store | None:
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
            time.sleep(_POLL_S)

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
    rules, live, counts = Rules(*store.core.limit), store.core.size(), store.core.limit_counts()
    in_flight, centre = int(counts["limit_in_flight"]), rules.ratio * rules.min_size
    by = rows * (1 if samples else rules.ratio)
    band = max(rules.tolerance * centre, by)
    there = in_flight if rules.in_flight else live
    if samples and there < rules.min_size:
        advice = f"Insert {words.count(rules.min_size - there, 'more row')}"
    elif samples and rules.in_flight and in_flight >= rules.in_flight:  # and none can be drawn, else it would have been
        advice = "Wait until those who read the rows in flight are done with them"
    elif samples:
        missing = math.ceil((centre - band + by - counts["limit_level"]) / rules.ratio) if rules.ratio else 1
        advice = f"Insert {words.count(max(1, missing), 'more row')}"
    elif rules.in_flight and in_flight + rows > rules.in_flight:
        advice = f"Sample until {words.count(in_flight + rows - rules.in_flight, 'more row')} are used up"
    else:
        advice = f"Sample {words.count(max(1, math.ceil(counts['limit_level'] + by - centre - band)), 'more row')}"
    facts = [f"{live} rows are live"]
    if rules.ratio:
        level, low, high = counts["limit_level"], centre - rules.tolerance * centre, centre + rules.tolerance * centre
        facts.append(f"the level is {level:g}, to stay from {low:g} to {high:g}")
    if rules.in_flight:
        facts.append(f"{in_flight} are in flight")
    if unknown := int(counts.get("limit_stores_unknown", 0)):
        facts.append(f"{words.count(unknown, 'store')} of the fleet never answered this buffer")
    since = f"{counts['limit_inserts']:.0f} rows were inserted and {counts['limit_samples']:.0f} sampled since"
    raise RateLimited(
        f"{'sample' if samples else 'extend'}: {rows} rows were not admitted in time by {_named(rules)}: {', '.join(facts)}; {since}. "
        f"{advice}, change the limit (rb.limit), or wait longer (timeout=…)."
    )


def _named(rules: Rules) -> str:
    return " and ".join(map(str, rules.limits())) or "no limit"
