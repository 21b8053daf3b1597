"""The replay buffer of the demo, and how the agent learns from it, whoever writes to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from engram import (
    LazyMemmapStorage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from engram.demo.task import ALPHA, BATCH, BETA, CAPACITY

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engram.demo.agent import Agent
    from engram.demo.progress import Progress

__all__ = ["Learning", "new_replay"]

KEEP = 20_000
"""Measurements kept for the report."""


def new_replay(folder: Path, sampler: str, generator: torch.Generator, *, lanes: int = 1) -> Any:
    """A buffer in a folder, made at the first write. ``sampler``: ``"uniform"`` or ``"prioritized"``."""
    settings: dict[str, Any] = {
        "storage": LazyMemmapStorage(CAPACITY, scratch_dir=folder, lanes=lanes),
        "writer": TensorDictRoundRobinWriter(track_generations=True),
        "batch_size": BATCH,
        "generator": generator,
    }
    if sampler == "prioritized":
        return TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA[0], **settings)
    return TensorDictReplayBuffer(**settings)


class Learning:
    """Updates of an agent from a buffer, and what they cost.

    Args:
        agent, replay: which learns, from which.
        progress: where training stands; the updates are noted in it.
        steps: environment steps, at most.
    """

    def __init__(self, agent: Agent, replay: Any, progress: Progress, steps: int) -> None:
        self._agent = agent
        self._replay = replay
        self._progress = progress
        self._total = steps

    def update(self) -> None:
        """Sample, learn, tell the replay how wrong the agent was."""
        progress = self._progress
        if progress.sampler == "prioritized":
            first, last = BETA
            self._replay.sampler.beta = first + (last - first) * progress.steps / self._total
        start = time.perf_counter()
        batch = self._replay.sample()
        sampled = time.perf_counter()
        self._agent.learn(batch)
        learned = time.perf_counter()
        self._replay.update_tensordict_priority(batch)  # of a uniform sampler: does nothing
        end = time.perf_counter()
        progress.updates += 1
        _keep(progress.sample_us, (sampled - start) * 1e6)
        _keep(progress.priority_us, (end - learned) * 1e6)
        _keep(progress.update_us, (end - start) * 1e6)
        if progress.updates % 50 == 0:
            newest = self._newest()
            for generation in batch["index_generation"][:16].tolist():
                _keep(progress.ages, newest - generation)

    def _newest(self) -> int:
        """Generation of the row that was written last, in any lane."""
        extent = self._replay.storage.extent()
        length = extent.capacity // len(extent.seam)
        last = [(seam - 1 - lane * length) % length + lane * length for lane, seam in enumerate(extent.seam)]
        return int(self._replay.writer.generations_of(last).max())


def _keep(values: list[Any], value: Any) -> None:
    values.append(value)
    if len(values) > KEEP:
        del values[: KEEP // 2]
