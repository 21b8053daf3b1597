"""Alternating, paired timing: the only code of the benchmarks that reads a clock.

A shared machine changes its speed within seconds, so two numbers taken one after the other say little about
each other. Here the sides take turns in short blocks (A B C A B C ...), a ratio is taken between blocks of
the same round, and the median of those ratios is reported with its quartiles. Drift slower than a round
cancels; a burst spoils one pair, which a median ignores.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Side:
    """One competitor: ``call`` is the unit of work; its result is dropped inside the clock, as a user's would
    be.

    ``prepare`` runs before each of the side's blocks, outside the clock (setting the number of threads).
    """

    name: str
    call: Callable[[], object]
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True)
class Effort:
    """How much is measured: ``blocks`` counted rounds after ``warmup`` uncounted ones, ``calls`` per block.

    ``lead`` calls before each block are not timed, so that no block pays for the switch from another side.
    Before those nobody does anything for ``rest_s`` seconds: threads that the side before keeps spinning, in
    case there is more to do, go to sleep and leave the cores.
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
    for _ in range(effort.lead):
        call()
    start = clock()
    for _ in range(effort.calls):
        call()
    return clock() - start
