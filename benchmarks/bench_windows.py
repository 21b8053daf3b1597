"""Claim: windows of a trajectory cost what as many scattered rows cost, and less where rows are long.

Measured: ``sample`` of 256 rows: uniform ones, and windows of 32 and of 8 steps, of dicts and of TensorDicts, from rows of 71 to
4,135 bytes: two observations of float32, an action, a reward, the flags done, terminated and truncated, and an episode id, which
slices mark and a uniform batch holds as they are stored. Episodes of 200 steps, in RAM, one thread. "WindowSpec" draws the windows
of 32 steps with two masks, as ``[8, 32]`` and with burn-in, padding and a period as R2D2 does.

The clock counts the CPU time of the process, so other programs do not.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

DRAW = Effort(calls=60, blocks=60)
BATCH, EPISODE = 256, 200
#: Numbers in an observation, and rows.
SHAPES = {4: 100_000, 17: 100_000, 128: 50_000, 512: 30_000}
BYTES = {wide: 8 * wide + 39 for wide in SHAPES}


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Windows over uniform batches of the same fields."""
    engram = libraries["engram"].module
    if engram is None:
        return
    for wide, rows in SHAPES.items():
        for form in ("dict", "tensordict"):
            timing = alternate(
                list(_sides(engram, _fields(wide, rows), form)), DRAW.scaled(share), time.process_time_ns
            )
            for ours in timing.blocks_us:
                if ours != "uniform":
                    what = f"sample {ours} · {form} of {BYTES[wide]} B"
                    key = f"windows/{ours}/{form}/{BYTES[wide]}"
                    yield timed(key, what, timing, ours=ours, share=("uniform",))


def _fields(wide: int, rows: int) -> dict[str, Any]:
    number = torch.arange(rows)
    ended = (number % EPISODE == EPISODE - 1).unsqueeze(1)
    flags = {"done": ended, "terminated": ended, "truncated": torch.zeros_like(ended)}
    following = {"obs": torch.randn(rows, wide), "reward": torch.rand(rows, 1), **flags}
    return {
        "obs": torch.randn(rows, wide),
        "action": torch.randn(rows, 6),
        "next": following,
        "episode": number // EPISODE,
    }


def _sides(engram: Any, fields: dict[str, Any], form: str) -> Iterator[Side]:
    slices, spec = engram.SliceSampler, engram.WindowSpec
    samplers = {
        "uniform": (engram.RandomSampler(), BATCH),
        "8 x 32": (slices(num_slices=8, traj_key="episode"), BATCH),
        "32 x 8": (slices(num_slices=32, traj_key="episode"), BATCH),
        "8 x 32, WindowSpec": (slices(window=spec(32), flat=False, traj_key="episode"), 8),
        "8 x 32, R2D2": (slices(window=spec(24, period=24, burn_in=8, padding=8), flat=False, traj_key="episode"), 8),
    }
    kind = engram.TensorDictReplayBuffer if form == "tensordict" else engram.ReplayBuffer
    rows = len(fields["obs"])
    for name, (sampler, batch_size) in samplers.items():
        replay = kind(storage=engram.LazyTensorStorage(rows), sampler=sampler, batch_size=batch_size)
        replay.extend(TensorDict(fields, [rows]) if form == "tensordict" else fields)
        yield Side(name, replay.sample)
