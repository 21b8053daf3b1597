"""Claim: a window around each drawn row costs the batch, not the buffer, and much less than in TorchRL where rows are being written.

Measured: ``sample`` of 256 anchors with ``Sequence(32, burn_in=8)``, 10,240 records, from rows of an environment-like TensorDict (obs
[17], action [6], reward [1], next obs [17], done [1]; episodes of 200 steps), in RAM, one thread. "while written" adds one row before
every sample, as a training does: TorchRL looks for the ends of trajectories again then, in all rows. "at rest" is without: TorchRL
keeps what it has found, and both mostly copy.

By priority: the same, and the update of the anchors' priorities. TorchRL's prioritized samplers need its extension; where that does
not load, their cell is empty.

Then engram alone at growing numbers of rows. The clock counts the CPU time of the process, so other programs do not.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.bench_indexes import NO_EXTENSION, steps
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

DRAW = Effort(calls=8, blocks=40)
ROWS, BATCH, LENGTH, BURN_IN = 10**6, 256, 32, 8
GROWING = (10**5, 10**6, 10**7)


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Sequences beside TorchRL's, then alone at growing sizes."""
    sides = [libraries[name] for name in rivals.TORCH_LIKE if libraries[name].module is not None]
    data = steps(ROWS)
    for key, what, writes in (("written", "while written", True), ("rest", "at rest", False)):
        timing = alternate(
            [_drawing(library, data, writes=writes) for library in sides], DRAW.scaled(share), time.process_time_ns
        )
        yield timed(f"units/sequence/{key}", f"sequences 256 x 40 · {what}", timing, times=("TorchRL",))
    yield _prioritized(sides, data, share)
    if (engram := libraries["engram"]).module is not None:
        alone = [_drawing(engram, steps(rows), writes=True, name=f"{rows:,} rows") for rows in GROWING]
        timing = alternate(alone, DRAW.scaled(share), time.process_time_ns)
        yield timed(
            "units/sequence/growing",
            "sequences 256 x 40 · while written, 10^7 over 10^5 rows",
            timing,
            ours=alone[-1].name,
            share=(alone[0].name,),
        )


def _drawing(library: rivals.Library, data: TensorDict, *, writes: bool, name: str | None = None) -> Side:
    kinds = library.module
    replay = kinds.TensorDictReplayBuffer(
        storage=kinds.LazyTensorStorage(len(data)),
        sample_unit=kinds.Sequence(LENGTH, burn_in=BURN_IN),
        batch_size=BATCH,
    )
    replay.extend(data)
    return Side(
        name or library.name, _both(partial(replay.add, data[0].clone()), replay.sample) if writes else replay.sample
    )


def _prioritized(sides: list[rivals.Library], data: TensorDict, share: float) -> Row:
    priority = torch.rand(BATCH * (LENGTH + BURN_IN))
    drawing, notes = [], {}
    for library in sides:
        kinds = library.module
        try:
            replay = kinds.TensorDictPrioritizedReplayBuffer(
                alpha=0.9,
                beta=0.6,
                storage=kinds.LazyTensorStorage(len(data)),
                sample_unit=kinds.Sequence(LENGTH, burn_in=BURN_IN),
                batch_size=BATCH,
            )
        except (ImportError, RuntimeError):
            notes[library.name] = NO_EXTENSION
            continue
        replay.extend(data)
        drawing.append(
            Side(library.name, _both(partial(replay.add, data[0].clone()), partial(_learn, replay, priority)))
        )
    timing = alternate(drawing, DRAW.scaled(share), time.process_time_ns)
    what = "sequences 256 x 40 · by priority and update, while written"
    return timed("units/sequence/prioritized", what, timing, times=("TorchRL",), notes=notes)


def _learn(replay: Any, priority: torch.Tensor) -> None:
    batch = replay.sample()
    batch["td_error"] = priority
    replay.update_tensordict_priority(batch)


def _both(*calls: Callable[[], Any]) -> Callable[[], None]:
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them
