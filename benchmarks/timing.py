"""Alternating, paired timing: the only code of the benchmarks that reads a clock.

A shared machine changes its speed within seconds, so two numbers taken one after the other say little about
each other. Here the sides take turns in short blocks (A B C A B C ...), a ratio is taken between blocks of
the same round, and the median of those ratios is reported with its quartiles. Drift slower than a round
cancels; a burst spoils one pair, which a median ignores.

Processes that work at the same time are counted instead: how many calls each begins in a window that all of
them know beforehand.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """One competitor: ``call`` is the unit of work; its result is dropped inside the clock, as a user's would
    be.

    ``prepare`` runs before each of the side's blocks, outside the clock (setting the number of threads); ``between`` after each
    call, outside the clock too.
    """

    name: str
    call: Callable[[], object]
    prepare: Callable[[], object] | None = None
    between: Callable[[], object] | None = None


@dataclass(frozen=True)
class Effort:
    """How much is measured: ``blocks`` counted rounds after ``warmup`` uncounted ones, ``calls`` per block.

    ``lead`` calls before each block are not timed, so that no block pays for the switch from another side.
    Before those there is a rest of ``rest_s`` seconds, in which spinning threads of the previous side go to sleep
    and leave the cores.
    """

    calls: int
    blocks: int
    warmup: int = 2
    lead: int = 3
    rest_s: float = 0

    def scaled(self, share: float) -> "Effort":
        """The same blocks, fewer of them: never fewer than five, or quartiles mean nothing."""
        return replace(self, blocks=max(5, round(self.blocks * share)))


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Quartiles as order statistics of the values themselves, so one value is its own median and
        quartiles.

        Raises:
            ValueError: there are no values.
        """
        if not values:
            raise ValueError("Spread.of: expected at least one value, got none.")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @classmethod
    def of_median(cls, values: Sequence[float]) -> "Spread":
        """The median, and in place of quartiles the interval that holds the median of all such values in 95 of 100 runs.

        By order statistics, so whatever the distribution. Raises as :meth:`of`.
        """
        ordered, median = sorted(values), cls.of(values).median
        reach = 1.96 * math.sqrt(len(ordered)) / 2
        first, last = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach)
        return cls(median, ordered[max(0, first)], ordered[min(len(ordered) - 1, last)])


@dataclass(frozen=True)
class Timing:
    """Microseconds per call of every counted block, per side; entry ``i`` is from round ``i``."""

    calls: int
    blocks_us: dict[str, list[float]]

    def spread(self, side: str) -> Spread:
        """Median and quartiles of one side's block times, in microseconds per call."""
        return Spread.of(self.blocks_us[side])

    def ratio(self, numerator: str, denominator: str) -> Spread:
        """Median and quartiles of the per-round ratios: the ratio of the medians would bend with drift."""
        pairs = zip(self.blocks_us[numerator], self.blocks_us[denominator], strict=True)
        return Spread.of([above / below for above, below in pairs])


def alternate(sides: Sequence[Side], effort: Effort, clock: Callable[[], int] = time.perf_counter_ns) -> Timing:
    """Let the sides take turns and time every block.

    The garbage collector is off inside blocks and runs between them, outside the clock; what lives at the
    start is frozen, so those collections do not walk over 100,000 stored rows each time.
    """
    blocks_us: dict[str, list[float]] = {side.name: [] for side in sides}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for round_ in range(-effort.warmup, effort.blocks):
            for side in sides:
                elapsed_ns = _block(side, effort, clock)
                gc.collect()
                if round_ >= 0:
                    blocks_us[side.name].append(elapsed_ns / effort.calls / 1e3)
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    return Timing(effort.calls, blocks_us)


def _block(side: Side, effort: Effort, clock: Callable[[], int]) -> int:
    """Nanoseconds of ``effort.calls`` calls."""
    if side.prepare is not None:
        side.prepare()
    if effort.rest_s:
        time.sleep(effort.rest_s)
    call = side.call
    if side.between is not None:
        return _with_breaks(call, side.between, effort, clock)
    for _ in range(effort.lead):
        call()
    start = clock()
    for _ in range(effort.calls):
        call()
    return clock() - start


def _with_breaks(
    call: Callable[[], object], between: Callable[[], object], effort: Effort, clock: Callable[[], int]
) -> int:
    """As ``_block``, something else being done after each call."""
    elapsed_ns = 0
    for number in range(-effort.lead, effort.calls):
        start = clock()
        call()
        if number >= 0:
            elapsed_ns += clock() - start
        between()
    return elapsed_ns


def once(call: Callable[[], T]) -> tuple[float, T]:
    """Milliseconds of one call, and what it returned."""
    start = time.perf_counter_ns()
    found = call()
    return (time.perf_counter_ns() - start) / 1e6, found


def longest(call: Callable[[], object], over: Callable[[], bool]) -> float:
    """Milliseconds of the longest of the calls made, at least one, until it is ``over``."""
    slowest = 0
    while True:
        start = time.perf_counter_ns()
        call()
        slowest = max(slowest, time.perf_counter_ns() - start)
        if over():
            return slowest / 1e6


# ---- processes that work at the same time ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """When processes are counted, in nanoseconds of the clock that all of them read."""

    start_ns: int
    end_ns: int

    @classmethod
    def soon(cls, lead_s: float, length_s: float) -> "Window":
        """One that begins after ``lead_s``, so that everybody hears of it in time and is at work when it opens."""
        start = time.monotonic_ns() + round(lead_s * 1e9)
        return cls(start, start + round(length_s * 1e9))


@dataclass(frozen=True)
class Turn:
    """What one process did: ``calls`` in ``elapsed_us``, of which at most one in a hundred took longer than ``p99_us``.

    ``uncounted`` are those it made before the window opened; with none of them it came late. ``cpu_us`` is that of all its threads.
    """

    calls: int
    elapsed_us: float
    p99_us: float
    uncounted: int = 0
    cpu_us: float = field(default=0.0, compare=False)


def during(
    call: Callable[[], object],
    window: Window,
    finish: Callable[[], object] | None = None,
    clock: Callable[[], int] = time.monotonic_ns,
) -> Turn:
    """Call again and again; those count that begin inside the window. The garbage collector comes after it.

    ``finish`` waits for what ``call`` only handed over. It is called before the window, for what came before it,
    and after, inside the clock.
    """
    uncounted = 0
    gc.disable()
    try:
        while clock() < window.start_ns:
            call()
            uncounted += 1
        if finish is not None:
            finish()
        cpu_ns, marks = time.process_time_ns(), [clock()]
        while len(marks) < 2 or marks[-1] < window.end_ns:
            call()
            marks.append(clock())
        if finish is not None:
            finish()
        elapsed_ns, cpu_ns = clock() - marks[0], time.process_time_ns() - cpu_ns
    finally:
        gc.enable()
    gc.collect()
    lengths = sorted(after - before for before, after in pairwise(marks))
    p99_ns = lengths[(len(lengths) * 99 + 99) // 100 - 1]
    return Turn(len(lengths), elapsed_ns / 1e3, p99_ns / 1e3, uncounted, cpu_ns / 1e3)


def together(turns: Sequence[Turn]) -> float:
    """Microseconds per call of all of them at once: half of one's, if two are as fast as one alone."""
    return 1 / sum(turn.calls / turn.elapsed_us for turn in turns)
