"""Claim: with ``prefetch``, the caller hardly waits for slow batches, and fast batches cost what they cost without it.

Wait: the time of ``sample`` if each call is followed by a training step of 1 ms, during which the caller waits for
a device (it sleeps), with a transform that keeps a processor busy for 0.5 ms. The step is outside the clock. Then
the same with a step that keeps a processor busy itself. On two cores, step, transform and other programs share
them, so that is not judged.

Nothing to hide: what ``prefetch=2`` adds to ``sample`` without a transform, with such steps and without. Tight: no
step and the same transform, so that only concurrent work of two threads can be hidden. Small: the samples of
``bench_sampling`` of 128 rows, where a batch takes microseconds. Bare tensors (3 µs) are shown as well, but not
judged: reading a clock twice takes 3 % of that.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench_sampling, data, rivals
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.timing import Effort, Side, Spread, Timing, alternate

STEPPED = Effort(calls=50, blocks=20)
TIGHT = Effort(calls=50, blocks=20)
SMALL = Effort(calls=2048, blocks=40, lead=30)
DEPTHS = (0, 1, 2)
STEP_S, TRANSFORM_S = 1e-3, 0.5e-3
WITHOUT = "prefetch=0"


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Waits, then what it costs; ``share`` scales the number of blocks."""
    engram = libraries["engram"]
    if engram.module is None:
        return
    source = data.tensordict(data.fields())
    yield from _waits(libraries, source, _asleep, "a device", share)
    yield from _waits(libraries, source, _busy_for(STEP_S), "a processor", share)
    for key, what, step in (("stepped", "steps of 1 ms", _asleep), ("tight", "no steps", None)):
        sides = [_side(engram, depth, source, None, step) for depth in (0, 2)]
        timing = alternate(sides, (SMALL if step is None else STEPPED).scaled(share))
        yield _added(f"prefetch/nothing-to-hide/{key}", f"sample, nothing to hide · {what}", timing)
    sides = [_side(engram, depth, source, _transform, None) for depth in DEPTHS]
    timing = alternate(sides, TIGHT.scaled(share))
    for depth in DEPTHS[1:]:
        what = f"sample, transform of 0.5 ms, no steps · prefetch={depth}"
        yield timed(f"prefetch/tight/{depth}", what, timing, ours=f"prefetch={depth}", share=(WITHOUT,))
    fields = data.fields()
    for kind, rows in (("tensor", fields["a"]), ("dict", fields), ("tensordict", source)):
        for storage in ("tensor", "memmap"):
            yield _small(engram, kind, storage, rows, share)


def _waits(
    libraries: rivals.Libraries, source: Any, step: Callable[[], object], where: str, share: float
) -> Iterator[Row]:
    sides = [_side(libraries["engram"], depth, source, _transform, step) for depth in DEPTHS]
    if libraries["TorchRL"].module is not None:
        sides.append(_side(libraries["TorchRL"], 2, source, _transform, step, name="TorchRL, prefetch=2"))
    timing = alternate(sides, STEPPED.scaled(share))
    key = where.removeprefix("a ")
    for depth in DEPTHS[1:]:
        yield timed(
            f"prefetch/wait/{key}/{depth}",
            f"wait in sample, steps of 1 ms on {where} · prefetch={depth}",
            timing,
            ours=f"prefetch={depth}",
            share=(WITHOUT,),
            times=("TorchRL, prefetch=2",),
        )


def _side(
    library: rivals.Library,
    depth: int,
    source: Any,
    transform: Callable[[Any], Any] | None,
    step: Callable[[], object] | None,
    name: str | None = None,
) -> Side:
    module = library.module
    replay = module.ReplayBuffer(
        storage=module.LazyTensorStorage(data.ROWS),
        batch_size=data.BATCH,
        collate_fn=data.identity,
        prefetch=depth or None,
    )
    if transform is not None:
        replay.append_transform(transform)
    replay.extend(source)
    return Side(name or f"prefetch={depth}", data.checked(replay.sample, data.ROWS), between=step)


def _added(key: str, what: str, timing: Timing) -> Row:
    """A row of what ``prefetch=2`` takes beyond what a call takes without."""
    pairs = zip(timing.blocks_us["prefetch=2"], timing.blocks_us[WITHOUT], strict=True)
    added = Spread.of([mine - other for mine, other in pairs])
    compared = Comparison(WITHOUT, "value", added, FLOORS.get((key, WITHOUT)))
    spreads = {side: timing.spread(side) for side in timing.blocks_us}
    return Row(key, what, spreads, [compared], blocks_us=timing.blocks_us, calls=timing.calls)


def _small(engram: rivals.Library, kind: str, storage: str, source: Any, share: float) -> Row:
    with tempfile.TemporaryDirectory() as name:
        sides = []
        for depth in (0, 2):
            replay = rivals.torch_like(
                engram,
                storage,
                data.ROWS,
                Path(name, str(depth)),
                batch_size=data.BATCH,
                collate_fn=data.identity,
                prefetch=depth,
            )
            replay.extend(source)
            sides.append(Side(f"prefetch={depth}", data.checked(replay.sample, data.ROWS)))
        timing = alternate(sides, SMALL.scaled(share))
    what = f"sample 128 · {bench_sampling.LABELS[kind]} · {rivals.SHORT[storage]}, prefetch=2"
    return timed(f"prefetch/small/{kind}/{storage}", what, timing, ours="prefetch=2", share=(WITHOUT,))


def _asleep() -> None:
    time.sleep(STEP_S)


def _busy_for(seconds: float) -> Callable[[], None]:
    """Work in torch, which releases the interpreter's lock for as long as one product takes."""
    matrix = torch.rand(64, 64)

    def work() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            matrix @ matrix

    return work


_work = _busy_for(TRANSFORM_S)


def _transform(batch: Any) -> Any:
    _work()
    return batch
