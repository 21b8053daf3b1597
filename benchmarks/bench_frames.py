"""Claim: large rows are copied at the speed of memory, and two threads copy them faster than one.

Measured: one ``sample`` of 256 out of 10,000 frames of 4x84x84 uint8 (28 kB a row, 282 MB in all, in RAM), with one
and with two threads: ``torch.set_num_threads`` for TorchRL and ``copy_``, ``engram.set_num_threads`` for engram;
cpprb has only one. The reference is one torch ``copy_`` of as many bytes. It is contiguous, its destination was
allocated once and is warm, and its source is a window that moves through a region much larger than the caches, so
that it reads memory as a sample does. ``sample`` does more: it draws, gathers scattered rows and allocates its
destination.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import torch

from benchmarks import machine, rivals
from benchmarks.claims import Row, timed
from benchmarks.data import identity
from benchmarks.timing import Effort, Side, Timing, alternate

FRAMES = Effort(calls=20, blocks=50, lead=20, rest_s=0.03)
"""A rest before each block, for all alike: torch's threads go on spinning for five to ten milliseconds after
their last work, on a core that the next side would use. Then twenty calls that are not timed: threads are
made, or woken, in the first three milliseconds. What is measured is a learner that samples again and again.
"""

PLAUSIBLE_GAIN = (0.85, 2.2)
"""What a second thread can do for the plain copy. Outside, another program had one of the cores."""

ROWS = 10_000
BATCH = 256
SHAPE = (4, 84, 84)
ROW_BYTES = 4 * 84 * 84
REGION_BYTES = max(512 * 2**20, 4 * machine.cache_bytes())
ONE_THREAD = "cpprb: copies with one thread only."
TAKEN = ": another program has the cores, so the floors of two threads are not judged."


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """One thread, two threads, and engram with two against engram with one."""
    frames = _frames()
    samplers = _samplers(libraries, frames)
    calls = {**samplers, "copy_": _copies()}
    effort = FRAMES.scaled(share)

    def side(name: str, threads: int, label: str = "") -> Side:
        return Side(label or name, calls[name], partial(rivals.set_threads, libraries, threads))

    try:
        timing = alternate([side(name, 1) for name in calls], effort)
        yield _row(1, timing, {})
        both = [side(name, 2) for name in calls if name != "cpprb"]
        timing = alternate([*both, side("copy_", 1, "copy_, one thread")], effort)
        gain = timing.ratio("copy_, one thread", "copy_").median
        judged = PLAUSIBLE_GAIN[0] <= gain <= PLAUSIBLE_GAIN[1]
        note = f"A second thread makes a plain copy_ {gain:.2f}× as fast here" + ("." if judged else TAKEN)
        row = _row(2, timing, {"engram": note, "cpprb": ONE_THREAD})
        yield row if judged else row.unjudged()
        if "engram" in samplers:
            timing = alternate([side("engram", 2), side("engram", 1, "one thread")], effort)
            what = "sample 256 frames · 2 threads, against 1"
            key, notes = "frames/two-against-one", {"engram": note}
            row = timed(key, what, timing, times=("one thread",), notes=notes)
            yield row if judged else row.unjudged()
    finally:
        rivals.set_threads(libraries, 1)


def _row(threads: int, timing: Timing, notes: dict[str, str]) -> Row:
    """Everybody with this many threads, and the copy."""
    count = "1 thread" if threads == 1 else f"{threads} threads"
    return timed(
        f"frames/{count.replace(' ', '-')}",
        f"sample 256 frames · tensor · LazyTensor, {count}",
        timing,
        times=("TorchRL", "cpprb"),
        share=("copy_",),
        notes=notes,
    )


def _frames() -> torch.Tensor:
    """Random frames whose first four bytes hold the row's number."""
    frames = torch.randint(0, 256, (ROWS, *SHAPE), dtype=torch.uint8)
    frames.view(ROWS, ROW_BYTES)[:, :4] = torch.arange(ROWS, dtype=torch.int32).view(torch.uint8).view(ROWS, 4)
    return frames


def _samplers(libraries: rivals.Libraries, frames: torch.Tensor) -> dict[str, Callable[[], object]]:
    """``sample`` of each library that is there, over its own copy of the frames."""
    samplers: dict[str, Callable[[], object]] = {}
    for name in rivals.TORCH_LIKE:
        if libraries[name].module is not None:
            replay = rivals.torch_like(libraries[name], "tensor", ROWS, Path(), batch_size=BATCH, collate_fn=identity)
            replay.extend(frames)
            _check(replay.sample(), frames)
            samplers[name] = replay.sample
    if libraries["cpprb"].module is not None:
        arrays = {"frame": frames.numpy()}
        replay = rivals.cpprb_buffer(libraries["cpprb"], arrays, ROWS)
        replay.add(**arrays)
        _check(torch.from_numpy(replay.sample(BATCH)["frame"]), frames)
        samplers["cpprb"] = partial(replay.sample, BATCH)
    return samplers


def _check(batch: torch.Tensor, frames: torch.Tensor) -> None:
    """Refuse a batch that is not 256 of the frames, byte for byte.

    Raises:
        ValueError: it is not.
    """
    numbers = batch.reshape(len(batch), ROW_BYTES)[:, :4].contiguous().view(torch.int32).flatten().long()
    if batch.shape != (BATCH, *SHAPE) or not torch.equal(batch, frames[numbers]):
        raise ValueError(f"frames: expected {BATCH} stored frames, got shape {tuple(batch.shape)}.")


def _copies() -> Callable[[], object]:
    """``copy_`` of the next window of a region that was written once: untouched pages would all be one zero
    page.
    """
    size = BATCH * ROW_BYTES
    region = torch.empty(REGION_BYTES, dtype=torch.uint8).random_()
    windows = cycle([region[start : start + size] for start in range(0, REGION_BYTES - size, size)])
    destination = torch.zeros(size, dtype=torch.uint8)
    upcoming = windows.__next__

    def copy() -> object:
        return destination.copy_(upcoming())

    return copy
