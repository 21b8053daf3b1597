"""Claim: batches with goals in hindsight are several times as fast as TorchRL's, and as fast from many rows as from few.

Measured: one ``sample`` of 256 rows of ``HERReplayBuffer`` with its defaults, a share of 0.8 and goals of the future, from 10^6 rows in
episodes of 50 steps: observations of 10, goals of 3 and actions of 4 float32. The reward is 1 where a goal is nearer than 0.05: its
time is part of both. TorchRL looks for the ends of all episodes once, before the clock runs, and again after each write. Then engram
alone, from 10^5, 10^6 and 10^7 rows. One thread.
"""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

SAMPLE = Effort(calls=40, blocks=60)
ROWS, BATCH, EPISODE = 1_000_000, 256, 50
SIZES = {"1e+05 rows": 100_000, "1e+06 rows": ROWS, "1e+07 rows": 10_000_000}


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Beside TorchRL, then from more and more rows."""
    data = _rows(ROWS)
    there = [libraries[name] for name in rivals.TORCH_LIKE if libraries[name].module is not None]
    timing = alternate([Side(one.name, _filled(one, data).sample) for one in there], SAMPLE.scaled(share))
    yield timed("hindsight/future", f"sample {BATCH} · goals in hindsight", timing, times=("TorchRL",))
    if (engram := libraries["engram"]).module is None:
        return
    sides = [Side(name, _filled(engram, _rows(size)).sample) for name, size in SIZES.items()]
    timing = alternate(sides, SAMPLE.scaled(share))
    others = [name for name in SIZES if name != "1e+07 rows"]
    yield timed("scaling/hindsight", f"sample {BATCH} · goals in hindsight", timing, ours="1e+07 rows", share=others)


def _reward(rows: TensorDict) -> torch.Tensor:
    far = (rows["next", "achieved_goal"] - rows["desired_goal"]).norm(dim=-1, keepdim=True)
    return (far < 0.05).float()


def _rows(n: int) -> TensorDict:
    done = (torch.arange(n) % EPISODE == EPISODE - 1).unsqueeze(1)

    def step() -> dict[str, torch.Tensor]:
        return {
            "observation": torch.randn(n, 10),
            "achieved_goal": torch.randn(n, 3),
            "desired_goal": torch.randn(n, 3),
        }

    ends = {"reward": torch.zeros(n, 1), "done": done, "terminated": done.clone()}
    following = TensorDict({**step(), **ends}, [n])
    return TensorDict({**step(), "action": torch.randn(n, 4), "next": following}, [n])


def _filled(library: rivals.Library, data: TensorDict) -> Any:
    storage = library.module.LazyTensorStorage(len(data))
    rb = library.module.HERReplayBuffer(_reward, storage=storage, batch_size=BATCH)
    rb.extend(data)
    batch = rb.sample()
    if batch.shape != (BATCH,) or not torch.equal(batch["next", "reward"][:204], _reward(batch[:204])):
        raise ValueError(f"hindsight: expected {BATCH} rows with the rewards of their goals, of {library.name}.")
    return rb
