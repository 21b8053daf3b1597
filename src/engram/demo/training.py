"""The training loop of one process. ``python -m engram.demo.training FOLDER STEPS SEED SAMPLER PHASE PARENT`` runs it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from engram import ReplayBuffer
from engram.demo.agent import Agent
from engram.demo.display import Display
from engram.demo.learning import Learning, new_replay
from engram.demo.play import Player, truncate
from engram.demo.progress import Progress
from engram.demo.task import DONE, INTERRUPTED, LEARN_EVERY, LEARN_FROM, REPLACE, SOLVED

__all__ = ["Training", "main", "run"]


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
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.agent = Agent()
        if (folder / "progress.json").exists():
            self.progress, tensors = Progress.load(folder)
            self.agent.restore(tensors)
            generator.manual_seed(seed + self.progress.steps)
            # Priorities and beta come with it.
            self.replay: Any = ReplayBuffer.open(folder / "replay", generator=generator)
        else:
            self.progress = Progress(seed, sampler)
            self.replay = new_replay(folder / "replay", sampler, generator)
        self._player = Player(self.agent, generator)
        self._learning = Learning(self.agent, self.replay, self.progress, steps)
        self._newest = -1

    def step(self) -> None:
        """One step of the environment, and one update once there is enough to learn from."""
        progress = self.progress
        row, finished = self._player.step(progress.steps, progress.seed + progress.steps)
        self._newest = self.replay.add(row)
        progress.steps += 1
        if finished is not None:
            progress.returns.append(finished)
        if len(self.replay) >= LEARN_FROM and progress.steps % LEARN_EVERY == 0:
            self._learning.update()

    def save(self) -> None:
        """Write what the next process needs, and close the replay. An episode under way ends here: nobody goes on with it."""
        if self._player.inside:
            truncate(self.replay, self._newest)
        self.progress.save(self.folder, self.agent.arrays())
        self.replay.close()


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
    with Display(console, progress, steps) as display:
        while progress.steps < steps and not interrupted:
            training.step()
            interrupted |= os.getppid() != parent  # nobody is left to go on
            display.refresh()
            recent = progress.recent_return
            progress.solved = recent > SOLVED
            if progress.solved or (first and (recent > SOLVED / 2 or progress.steps >= steps // 2)):
                break
    code = INTERRUPTED if interrupted else DONE
    if code == DONE and first and not progress.solved and progress.steps < steps:
        progress.replaced_at = len(progress.returns)
        code = REPLACE
    training.save()
    return code


def main() -> None:
    """The process that :mod:`engram.demo.run` starts."""
    folder, steps, seed, sampler, phase, parent = sys.argv[1:]
    sys.exit(run(Path(folder), int(steps), int(seed), sampler, first=phase == "first", parent=int(parent)))


if __name__ == "__main__":
    main()
