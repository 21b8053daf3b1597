"""The learner process, which also starts the actors. ``engram.demo.run`` starts it, and a second one after the first was killed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import numpy as np
import torch

import engram
from engram.demo.actors import Actor, checksums
from engram.demo.agent import Agent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engram import ReplayBuffer, TensorDictReplayBuffer

STDIN = 0
SOLVED = 195.0
"""Training ends when the mean return of the last ``WINDOW`` episodes passes this."""
WINDOW = 20
CAPACITY = 20_000
BATCH = 128
LEARN_FROM = 500
"""Rows before the first update."""
LEARN_EVERY = 2
"""Rows between two updates."""
PUBLISH_EVERY = 10
"""Updates between two policies for the actors."""
AT_ONCE = 8
"""Steps that an actor may take before it needs another grant."""


def new_replay(folder: Path, sampler: str, lanes: int) -> TensorDictReplayBuffer:
    """A buffer in ``folder``. ``sampler``: ``"uniform"`` or ``"prioritized"``."""
    storage = engram.LazyMemmapStorage(CAPACITY // lanes * lanes, scratch_dir=folder, lanes=lanes)
    if sampler == "prioritized":
        return engram.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)
    return engram.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)


def verify(replay: ReplayBuffer, dead: Actor) -> int:
    """Compare the checksum of every acknowledged row of a dead actor. Returns how many rows that was.

    Raises:
        RuntimeError: a row is not what the actor wrote. RowError: a row is missing.
    """
    length = replay.storage.max_size // replay.lanes
    expected = dead.acknowledged[1 - length :]  # in a full lane, the row begun last may have replaced the oldest
    found = checksums(replay[[row.row for row in expected]]) if expected else []
    wrong = [row.row for row, checksum in zip(expected, found, strict=True) if row.checksum != checksum]
    if wrong:
        raise RuntimeError(f"Rows {wrong[:8]} are not what process {dead.process.pid} wrote.")
    return len(expected)


class Learner:
    """Trains from what its actors write.

    Args:
        folder: of the run: the store in ``replay``, checkpoints in ``checkpoints``, networks in ``network-STEP.npz``.
        steps: of all actors together, at most.
        seed: of networks, environments and exploration.
        sampler: ``"uniform"`` or ``"prioritized"``.
        actors: number of actor processes.
        started: when the demo started, by ``time.time()``.
    """

    def __init__(self, folder: Path, *, steps: int, seed: int, sampler: str, actors: int, started: float) -> None:
        torch.set_num_threads(1)  # batches are so small that more threads make them slower
        torch.manual_seed(seed)
        self.folder, self.total, self.seed, self.started = folder, steps, seed, started
        self.agent = Agent()
        self.returns: list[float] = []
        self.kills: list[int] = []
        """Episodes that had ended when a process was killed."""
        self.resumed = (folder / "checkpoints").exists()
        if self.resumed:
            self.replay = cast("TensorDictReplayBuffer", engram.ReplayBuffer.open(folder / "replay"))
        else:
            self.replay = new_replay(folder / "replay", sampler, actors)
        self.checkpoints = engram.Checkpointer(folder / "checkpoints", self.replay, keep=2)
        if self.resumed:
            self._load_network()
        self.updates = max(0, self.steps - LEARN_FROM) // LEARN_EVERY
        # A shared buffer of one row carries the policy: its readers never see half of a new one, and need no lock.
        self.policies = engram.ReplayBuffer(storage=engram.LazyTensorStorage(1), shared=True)
        self.policies.add(self.agent.policy())
        self.actors = [self._start_actor(lane) for lane in range(actors)]
        self.say(
            f"Learner {os.getpid()}; actors {', '.join(str(it.process.pid) for it in self.actors)}, one lane each."
        )

    def say(self, text: str, color: str | None = None) -> None:
        """Print a line with the time since the demo started."""
        click.secho(f"[{time.time() - self.started:5.1f} s] {text}", fg=color)

    @property
    def steps(self) -> int:
        """Rows written so far, by all processes of the run."""
        return self.replay.write_count

    @property
    def mean_return(self) -> float:
        """Mean return of the last 20 episodes; 0 before there are 20."""
        return sum(self.returns[-WINDOW:]) / WINDOW if len(self.returns) >= WINDOW else 0.0

    def _start_actor(self, lane: int) -> Actor:
        return Actor(self.replay, self.policies, lane, 1_000_003 * self.seed + self.steps + lane)

    def _save_network(self) -> tuple[int, dict[str, str]]:
        """What to save a checkpoint with: the step, and the name of the network's file."""
        step = self.steps
        path = self.folder / f"network-{step}.npz"
        np.savez(path, policy=self.agent.policy().numpy(), returns=self.returns, kills=self.kills)
        return step, {"network": path.name}

    def _load_network(self) -> None:
        newest = self.checkpoints.list()[0]
        with np.load(self.folder / f"network-{newest.step}.npz", allow_pickle=False) as saved:
            self.agent.load_policy(torch.from_numpy(saved["policy"]))
            self.returns, self.kills = saved["returns"].tolist(), [*saved["kills"].tolist(), len(saved["returns"])]
        self.say(
            f"A new learner opens the store: {len(self.replay):,} rows are there. Network of {newest.name}.", "green"
        )

    def train(self) -> bool:
        """Train until the task is solved or all steps are taken; False if stdin was closed before."""
        events = self._halfway_events()
        for actor in self.actors:
            self._grant(actor)
        shown, updates = time.monotonic(), self.updates
        while not (self.resumed and (self.mean_return > SOLVED or self.steps >= self.total)):
            ready = wait([STDIN, *(actor.channel for actor in self.actors)], timeout=0.1)
            if STDIN in ready:  # Ctrl-C, or the command that started this process is dead
                return False
            for actor in [actor for actor in self.actors if actor.channel in ready]:
                self._receive(actor)
            while self.steps >= LEARN_FROM + LEARN_EVERY * self.updates:
                self._update()
            next(events, None)
            if (elapsed := time.monotonic() - shown) > 2:
                rate = (self.updates - updates) * BATCH / elapsed
                bar = "█" * int(20 * min(self.mean_return / SOLVED, 1))
                self.say(f"step {self.steps:6,}  return {self.mean_return:4.0f} {bar:░<20} {rate:8,.0f} samples/s")
                shown, updates = time.monotonic(), self.updates
        return True

    def _receive(self, actor: Actor) -> None:
        """Count a row of an actor, or replace the actor if it is dead. Let it take more steps when it has taken all it may."""
        row = actor.receive()
        if row is None:
            actor = self.actors[actor.lane] = self._replace(actor)
        elif row.episode_return is not None:
            self.returns.append(row.episode_return)
        if actor.owed == 0:
            self._grant(actor)

    def _grant(self, actor: Actor) -> None:
        """Let an actor take more steps, if there are any left."""
        left = self.total - self.steps - sum(other.owed for other in self.actors)
        if left > 0:
            actor.grant(min(left, AT_ONCE))

    def _replace(self, dead: Actor) -> Actor:
        dead.process.join()
        if dead.process.exitcode != -signal.SIGKILL:
            raise RuntimeError(
                f"actor of lane {dead.lane}: expected it to play until its pipe is closed, got exit code "
                f"{dead.process.exitcode}. Its traceback is above."
            )
        successor = self._start_actor(dead.lane)
        self.say(
            f"Actor {dead.process.pid} is dead. All {verify(self.replay, dead):,} rows it wrote are intact.", "green"
        )
        self.say(f"Actor {successor.process.pid} takes over its lane.")
        return successor

    def _update(self) -> None:
        batch = self.replay.sample()
        self.agent.learn(batch)
        self.replay.update_tensordict_priority(batch)  # does nothing for uniform sampling
        self.updates += 1
        if self.updates % PUBLISH_EVERY == 0:
            self.policies.add(self.agent.policy())

    def _halfway_events(self) -> Iterator[None]:
        """Save a checkpoint, kill an actor, kill this process. Yields while it waits; the second learner has none of this."""
        while self.resumed or (self.mean_return < SOLVED / 2 and self.steps < self.total // 2):
            yield
        step, user = self._save_network()
        handle = self.checkpoints.save(step, user=user, wait=False)
        while not handle.done:
            yield
        report = handle.wait()
        self.say(f"{report.name}: {report.steps:,} rows saved; writers waited {1e3 * report.paused_s:.1f} ms.")
        dead, before = self.actors[0], self.steps
        self.say(f"kill -9 {dead.process.pid} (an actor)", "red")
        self.kills.append(len(self.returns))
        os.kill(dead.process.pid or 0, signal.SIGKILL)
        while self.actors[0] is dead or not (self.actors[0].acknowledged or self.steps >= self.total):
            yield
        others = [row.seconds for actor in self.actors[1:] for row in actor.acknowledged[before - self.steps :]]
        self.say(
            f"Meanwhile {self.steps - before} rows were written; the longest write took {1e3 * max(others, default=0):.1f} ms."
        )
        self.say(f"kill -9 {os.getpid()} (the learner)", "red")
        os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> None:
        """Save a last checkpoint, plot the learning curve, and say what can be done with the run."""
        from engram.demo.plot import plot  # takes a second to import

        step, user = self._save_network()
        self.checkpoints.save(step, user=user)
        self.say(f"{'Solved' if self.mean_return > SOLVED else 'Not solved'} after {step:,} steps.")
        plot(self.returns, self.kills, WINDOW, SOLVED, self.folder / "demo.png")
        click.echo(f"Learning curve:          {self.folder / 'demo.png'}")
        click.echo(f"Look at the checkpoints: engram inspect {self.folder / 'checkpoints'}")
        click.echo(f"Go on with the rows:     engram.ReplayBuffer.open({str(self.folder / 'replay')!r})")

    def close(self) -> None:
        """End the actors and close the buffers."""
        for actor in self.actors:
            actor.close()
        self.policies.close()
        self.replay.close()


def main() -> None:
    """The process that :mod:`engram.demo.run` starts."""
    folder, steps, seed, sampler, actors, started = sys.argv[1:]
    logging.getLogger("engram").setLevel(logging.WARNING)
    learner = Learner(
        Path(folder), steps=int(steps), seed=int(seed), sampler=sampler, actors=int(actors), started=float(started)
    )
    try:
        if learner.train():
            learner.report()
        elif learner.steps:
            click.echo(
                f"\nInterrupted. The store is whole: engram.ReplayBuffer.open({str(learner.folder / 'replay')!r})"
            )
    finally:
        learner.close()


if __name__ == "__main__":
    main()
