"""Claim: counting samples takes at most 1 % of the time of a sample, and counting those of each row about a nanosecond a row.

What is counted takes some tens of nanoseconds, and the speed of a shared machine changes by more than that between two blocks of
samples. So both sides are the same samples of the same buffer, and each sample is followed by the calls that count one: on the
store itself, which counts it once more; and on a view of a store that only reads, where the same calls return at once. Blocks
are short, many, and take turns; each block of the one side lies between two of the other, and its difference from their mean is put
over what a sample took in the same round. Ten buffers take part, as now and then one lies in memory so that one side is slower. Shown
is the median of all rounds, with the interval that holds it in 95 of 100 runs.

Then process CPU of batches beside the same with an index ``usage``, and what one ``stats()`` takes.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch

from benchmarks import rivals
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.timing import Effort, Side, Spread, alternate

EFFORT = Effort(calls=500, blocks=40, lead=2)
PAIRS = Effort(calls=50, blocks=200, lead=2)
BUFFERS = 10
ASKED = Effort(calls=20, blocks=20, lead=1)
ROWS = 100_000

Make: TypeAlias = Callable[[], Any]


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Batches beside the same that are counted once more; batches that are counted by row."""
    library = libraries["engram"]
    if library.module is None:
        return
    engram = library.module
    with tempfile.TemporaryDirectory() as folder:
        engram.ReplayBuffer(storage=engram.LazyMemmapStorage(1, scratch_dir=folder)).extend({"a": torch.zeros(1, 1)})
        with engram.ReplayBuffer.open(folder, readonly=True) as readonly:
            idle = readonly.storage.memory.core
            for n in (64, 256):
                tensordicts, dicts = partial(_buffer, engram, n), partial(_of_dicts, engram, n)
                prioritized = partial(dicts, sampler=partial(engram.PrioritizedSampler, ROWS, 0.6, 0.4))
                yield _counting(f"meter/tensordict/{n}", f"counting {n} rows, TensorDict", tensordicts, idle, share)
                yield _counting(f"meter/dict/{n}", f"counting {n} rows, dict of two", dicts, idle, share)
                what = f"counting {n} rows by priority, dict of two"
                yield _counting(f"meter/prioritized/{n}", what, prioritized, idle, share, natively=False)
    for n in (64, 256):
        plain, usage = _buffer(engram, n), _buffer(engram, n)
        usage.count_usage()
        sides = [Side("counted", plain.sample), Side("usage", usage.sample)]
        timing = alternate(sides, EFFORT.scaled(share), time.process_time_ns)
        yield timed(f"meter/usage-{n}", f"batches of {n} rows, TensorDict", timing, ours="usage", share=("counted",))
    asked: Callable[[], object] = _buffer(engram, 64).stats
    timing = alternate([Side("engram", asked)], ASKED.scaled(share), time.process_time_ns)
    yield timed("meter/stats", f"stats() of {ROWS:,} rows", timing)


def _counting(key: str, what: str, make: Make, idle: Any, share: float, *, natively: bool = True) -> Row:
    """What counting takes of a sample's time, in per cent."""
    found: list[float] = []
    for _ in range(BUFFERS):
        rb = make()
        core = rb.storage.memory.core
        again, without = (
            (_natively(rb, core), _natively(rb, idle)) if natively else (_from_python(rb, core), _untimed(rb, idle))
        )
        sides = {"sample": rb.sample, "before": without, "again": again, "after": without}
        blocks = alternate([Side(*side) for side in sides.items()], PAIRS.scaled(share)).blocks_us
        rounds = zip(*(blocks[name] for name in sides), strict=True)
        found += [100 * (again - (before + after) / 2) / sample for sample, before, again, after in rounds]
    measured = Spread.of_median(found)
    return Row(key, what, {"engram": measured}, [Comparison("1 %", "value", measured, FLOORS[key, "1 %"])], unit="%")


def _natively(rb: Any, core: Any) -> Callable[[], None]:
    """A sample, then what counts one, of that store: both sides pay for the calls, which a native draw does not make."""
    sample, n = rb.sample, rb.batch_size
    begin_wait, count_wait, count_all_sampled = core.begin_wait, core.count_wait, core.count_all_sampled

    def call() -> None:
        since = begin_wait()
        sample()
        count_all_sampled(n)
        count_wait(since)

    return call


def _from_python(rb: Any, core: Any) -> Callable[[], None]:
    """As a draw in Python counts: the calls that time it are a part of what counting takes."""
    sample, n = rb.sample, rb.batch_size
    begin_wait, count_wait, count_all_sampled = core.begin_wait, core.count_wait, core.count_all_sampled

    def call() -> None:
        since = begin_wait()
        sample()
        count_all_sampled(n)
        if since:
            count_wait(since)

    return call


def _untimed(rb: Any, idle: Any) -> Callable[[], None]:
    """A sample, then the one call of those that a draw in Python does not make either."""
    sample, n, count_all_sampled = rb.sample, rb.batch_size, idle.count_all_sampled

    def call() -> None:
        sample()
        count_all_sampled(n)

    return call


def _of_dicts(engram: Any, n: int, sampler: Callable[[], Any] | None = None) -> Any:
    storage = engram.LazyTensorStorage(ROWS)
    rb = engram.ReplayBuffer(storage=storage, batch_size=n, sampler=None if sampler is None else sampler())
    rb.extend({"obs": torch.zeros(ROWS, 4), "reward": torch.zeros(ROWS, 1)})
    return rb


def _buffer(engram: Any, n: int) -> Any:
    rb = engram.TensorDictReplayBuffer(storage=engram.LazyTensorStorage(ROWS), batch_size=n)
    from tensordict import TensorDict

    rb.extend(
        TensorDict({"obs": torch.zeros(ROWS, 14), "reward": torch.zeros(ROWS, 1), "id": torch.arange(ROWS)}, [ROWS])
    )
    return rb
