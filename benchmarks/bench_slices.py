"""Claim: slices whose steps lie among others, and windows that are taken once, cost the batch and not the buffer.

Measured: one ``sample`` of 8 windows of 32 steps, 256 rows, from 10^6 rows of an environment-like TensorDict (obs [17], action [6],
reward [1], next obs [17], done [1]; episodes of 200 steps), in RAM, one thread.

"fragmented": ``SliceSampler(fragmented=True, step_key="step")``. 64 environments wrote in turn, each a step, so that neighbours of a
trajectory lie 64 rows apart. "while written" extends by 64 rows, a step of each environment, before every sample.
"streaming": ``StreamingSliceSampler`` after all windows were drawn once; and while written: 256 rows, which complete 8 windows, are
extended before every sample, so that each batch is of windows that were not drawn before.

Then engram alone, from 10^5, 10^6 and 10^7 rows, while written. The clock counts the CPU time of the process, so other programs do not.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

DRAW = Effort(calls=20, blocks=40)
LARGE = Effort(calls=2, blocks=10, warmup=1, lead=1)
ROWS, BATCH, LENGTH, EPISODE, ENVIRONMENTS = 10**6, 256, 32, 200, 64
GROWING = (10**5, 10**6, 10**7)
KINDS = {"fragmented": "slices of steps that lie apart", "streaming": "windows that are taken once"}


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Beside TorchRL, at rest and while written; then engram alone at growing sizes."""
    sides = [libraries[name] for name in rivals.TORCH_LIKE if libraries[name].module is not None]
    for kind, what in KINDS.items():
        for key, state, written in (("rest", "at rest", False), ("written", "while written", True)):
            drawing = [_drawing(library, kind, ROWS, written=written) for library in sides]
            effort = LARGE if written and kind == "fragmented" else DRAW
            timing = alternate(drawing, effort.scaled(share), time.process_time_ns)
            yield timed(f"slices/{kind}/{key}", f"{what} 8 x 32 · {state}", timing, times=("TorchRL",))
        if (engram := libraries["engram"]).module is not None:
            alone = [_drawing(engram, kind, rows, written=True, name=f"{rows:,} rows") for rows in GROWING]
            timing = alternate(alone, DRAW.scaled(share), time.process_time_ns)
            yield timed(
                f"slices/{kind}/growing",
                f"{what} 8 x 32 · while written, 10^7 over 10^5 rows",
                timing,
                ours=alone[-1].name,
                share=(alone[0].name,),
            )


def _rows(first: int, n: int, environments: int) -> TensorDict:
    """Rows in the order of writing: environments take turns."""
    number = torch.arange(first, first + n)
    time_of, environment = number // environments, number % environments
    step = time_of % EPISODE
    done = (step == EPISODE - 1).unsqueeze(1)
    after = {"reward": torch.rand(n, 1), "obs": torch.randn(n, 17), "done": done}
    fields = {"obs": torch.randn(n, 17), "action": torch.randn(n, 6), "next": after, "step": step}
    return TensorDict({**fields, "episode": time_of // EPISODE * environments + environment}, [n])


def _drawing(library: rivals.Library, kind: str, rows: int, *, written: bool, name: str | None = None) -> Side:
    kinds, apart = library.module, kind == "fragmented"
    environments, step = (ENVIRONMENTS, ENVIRONMENTS) if apart else (1, BATCH)
    if apart:
        sampler = kinds.SliceSampler(slice_len=LENGTH, traj_key="episode", step_key="step", fragmented=True)
    else:
        sampler = kinds.StreamingSliceSampler(slice_len=LENGTH, traj_key="episode")
    replay = kinds.TensorDictReplayBuffer(storage=kinds.LazyTensorStorage(rows), sampler=sampler, batch_size=BATCH)
    replay.extend(_rows(0, rows, environments))
    _check(replay.sample(), library.name, kind)
    if not written:
        if not apart:  # no window is new from here on
            replay.sample(rows // LENGTH * LENGTH)
        return Side(name or library.name, replay.sample)
    return Side(name or library.name, _extending(replay, rows, step, environments))


def _extending(replay: Any, rows: int, step: int, environments: int) -> Callable[[], object]:
    """Writes some rows, which were made before, and samples."""
    later = [_rows(rows + number * step, step, environments) for number in range(1000)]
    turn = itertools.cycle(later)

    def call() -> object:
        replay.extend(next(turn))
        return replay.sample()

    return call


def _check(batch: TensorDict, name: str, kind: str) -> None:
    steps = batch["step"].reshape(-1, LENGTH)
    if batch.numel() != BATCH or not bool((steps.diff(dim=1) == 1).all()):
        raise ValueError(f"slices: {kind}: expected {BATCH} rows in windows of {LENGTH}, of {name}.")
