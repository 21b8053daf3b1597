"""The training loop of one process. ``python -m engram.demo.training FOLDER STEPS SEED SAMPLER PHASE PARENT`` runs it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from engram.demo.agent import Agent
from engram.demo.progress import Progress
from engram.demo.task import (
    ALPHA,
    BATCH,
    BETA,
    CAPACITY,
    DONE,
    EPSILON,
    INTERRUPTED,
    LEARN_EVERY,
    LEARN_FROM,
    REPLACE,
    SOLVED,
    WINDOW,
)

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Training", "main", "run"]

KEEP = 20_000
"""Measurements kept for the report."""


class Training:
    """Environment, agent and replay buffer, begun anew or taken over from another process.

    Args:
        folder: of the run; the replay is in ``folder/replay``.
        seed: of everything.
        steps: environment steps, at most.
        sampler: ``"uniform"`` or ``"prioritized"``; of a run that is taken over, the one it began with.
    """

    def __init__(self, folder: Path, *, seed: int, steps: int, sampler: str) -> None:
        torch.set_num_threads(1)  # batches this small only lose by more
        self.folder = folder
        self.total = steps
        self.generator = torch.Generator().manual_seed(seed)
        self.environment = gymnasium.make("CartPole-v1")
        replay = folder / "replay"
        torch.manual_seed(seed)
        self.agent = Agent()
        if (folder / "progress.json").exists():
            self.progress, tensors = Progress.load(folder)
            self.agent.restore(tensors)
            self.generator.manual_seed(seed + self.progress.steps)
            self.replay: Any = ReplayBuffer.open(replay, generator=self.generator)  # priorities and beta come with it
        else:
            self.progress = Progress(seed, sampler)
            settings: dict[str, Any] = {
                "storage": LazyMemmapStorage(CAPACITY, scratch_dir=replay),
                "writer": TensorDictRoundRobinWriter(track_generations=True),
                "batch_size": BATCH,
                "generator": self.generator,
            }
            if sampler == "prioritized":
                self.replay = TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA[0], **settings)
            else:
                self.replay = TensorDictReplayBuffer(**settings)
        self._newest = -1
        self._observation: np.ndarray[Any, Any] | None = None
        self._return = 0.0

    @property
    def recent_return(self) -> float:
        """Mean return of the last 20 episodes; 0 before there are 20."""
        returns = self.progress.returns
        return sum(returns[-WINDOW:]) / WINDOW if len(returns) >= WINDOW else 0.0

    def step(self) -> None:
        """One step of the environment, and one update once there is enough to learn from."""
        progress = self.progress
        if self._observation is None:
            self._observation, _ = self.environment.reset(seed=progress.seed + progress.steps)
            self._return = 0.0
        observation = torch.from_numpy(self._observation)
        action = self._choose(observation)
        following, reward, terminated, truncated, _ = self.environment.step(action)
        row = self.replay.add(
            TensorDict(
                {
                    "observation": observation,
                    "action": torch.tensor(action),
                    "next": {
                        "observation": torch.from_numpy(following),
                        "reward": torch.tensor([float(reward)]),
                        "terminated": torch.tensor([terminated]),
                        "truncated": torch.tensor([truncated]),
                        "done": torch.tensor([terminated or truncated]),
                    },
                }
            )
        )
        progress.steps += 1
        self._return += float(reward)
        self._observation = following
        if terminated or truncated:
            progress.returns.append(self._return)
            self._observation = None
        self._newest = row
        if len(self.replay) >= LEARN_FROM and progress.steps % LEARN_EVERY == 0:
            self._learn()

    def _choose(self, observation: torch.Tensor) -> int:
        first, last, steps = EPSILON
        epsilon = max(last, first + (last - first) * self.progress.steps / steps)
        if float(torch.rand((), generator=self.generator)) < epsilon:
            return int(torch.randint(2, (), generator=self.generator))
        return self.agent.act(observation)

    def _learn(self) -> None:
        progress = self.progress
        if progress.sampler == "prioritized":
            first, last = BETA
            self.replay.sampler.beta = first + (last - first) * progress.steps / self.total
        start = time.perf_counter()
        batch = self.replay.sample()
        sampled = time.perf_counter()
        self.agent.learn(batch)
        learned = time.perf_counter()
        self.replay.update_tensordict_priority(batch)  # of a uniform sampler: does nothing
        end = time.perf_counter()
        progress.updates += 1
        _keep(progress.sample_us, (sampled - start) * 1e6)
        _keep(progress.priority_us, (end - learned) * 1e6)
        _keep(progress.update_us, (end - start) * 1e6)
        if progress.updates % 50 == 0:
            newest = int(self.replay.writer.generations_of(self._newest))
            for generation in batch["index_generation"][:16].tolist():
                _keep(progress.ages, newest - generation)

    def save(self) -> None:
        """Write what the next process needs, and close the replay. An episode under way ends here: nobody goes on with it."""
        if self._observation is not None:
            for key in ("truncated", "done"):
                self.replay.set_at_(("next", key), torch.tensor([[True]]), [self._newest])
        self.progress.save(self.folder, self.agent.arrays())
        self.replay.close()


def _keep(values: list[Any], value: Any) -> None:
    values.append(value)
    if len(values) > KEEP:
        del values[: KEEP // 2]


def run(folder: Path, steps: int, seed: int, sampler: str, *, first: bool, parent: int) -> int:
    """Train until it is time to stop: the exit code says why.

    It stops in order, too, when the process ``parent`` is gone. The first process stops half-way: when the recent return
    passes half of what solves the task, or at half of the steps.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, interrupt)
    training = Training(folder, seed=seed, steps=steps, sampler=sampler)
    progress = training.progress
    console = Console()
    if not first:
        console.print(
            f"New process: reopened {len(training.replay)} rows of {folder / 'replay'}, going on at step {progress.steps}.",
            soft_wrap=True,
        )
    with _bar(console) as bar:
        task = bar.add_task("training", total=steps, completed=progress.steps, extra="")
        shown = started = time.perf_counter()
        updates = progress.updates
        while progress.steps < steps and not interrupted:
            training.step()
            interrupted |= os.getppid() != parent  # nobody is left to go on
            now = time.perf_counter()
            if now - shown > (0.2 if console.is_terminal else 5.0):
                shown = now
                status = _status(training, (progress.updates - updates) / (now - started))
                bar.update(task, completed=progress.steps, extra=status)
                if not console.is_terminal:
                    console.print(f"step {progress.steps}: {status}")
            recent = training.recent_return
            progress.solved = recent > SOLVED
            if progress.solved or (first and (recent > SOLVED / 2 or progress.steps >= steps // 2)):
                break
    code = INTERRUPTED if interrupted else DONE
    if code == DONE and first and not progress.solved and progress.steps < steps:
        progress.replaced_at = len(progress.returns)
        code = REPLACE
    training.save()
    return code


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[extra]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _status(training: Training, updates_per_s: float) -> str:
    progress = training.progress
    ratio = progress.updates * BATCH / max(progress.steps, 1)
    return f"return {training.recent_return:.0f}, replay ratio {ratio:.0f}, {updates_per_s * BATCH:,.0f} samples/s"


def main() -> None:
    """The process that :mod:`engram.demo.run` starts."""
    folder, steps, seed, sampler, phase, parent = sys.argv[1:]
    sys.exit(run(Path(folder), int(steps), int(seed), sampler, first=phase == "first", parent=int(parent)))


if __name__ == "__main__":
    main()
