"""The learner process, which also starts the actors. ``engram.demo.run`` starts it, and a second one after the first was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

import click
import numpy as np
import torch

import engram
from engram.demo.actors import Actor, checksums
from engram.demo.agent import Agent
from engram.demo.run import Settings

#: Training ends when the mean return of the last ``WINDOW`` episodes passes this.
SOLVED = 195.0
WINDOW = 20
CAPACITY = 20_000
BATCH = 128
#: Rows before the first update.
LEARN_FROM = 500
#: Rows between two updates.
LEARN_EVERY = 2
#: Steps that an actor may take before it needs another grant.
AT_ONCE = 8


def new_replay(folder: Path, sampler: str, lanes: int) -> engram.TensorDictReplayBuffer:
    """A buffer in ``folder``. ``sampler``: ``"uniform"`` or ``"prioritized"``."""
    storage = engram.LazyMemmapStorage(CAPACITY // lanes * lanes, scratch_dir=folder, lanes=lanes)
    if sampler == "prioritized":
        return engram.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)
    return engram.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)


def verify(replay: engram.ReplayBuffer, dead: Actor) -> int:
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
    """Trains from what its actors write."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)  # batches are so small that more threads make them slower
        torch.manual_seed(settings.seed)
        self.settings, self.agent = settings, Agent()
        self.returns: list[float] = []
        self.kills: list[int] = []  # numbers of episodes that had ended when a process was killed
        folder = settings.folder
        self.resumed = (folder / "checkpoints").exists()
        if self.resumed:
            self.replay = cast("engram.TensorDictReplayBuffer", engram.ReplayBuffer.open(folder / "replay"))
        else:
            self.replay = new_replay(folder / "replay", settings.sampler, settings.actors)
        self.checkpoints = engram.Checkpointer(folder / "checkpoints", self.replay, keep=2)
        if self.resumed:
            self._load_network()
        self.updates = max(0, self.steps - LEARN_FROM) // LEARN_EVERY
        self.actors = [self._start_actor(lane) for lane in range(settings.actors)]
        pids = ", ".join(str(actor.process.pid) for actor in self.actors)
        self.say(f"Learner {os.getpid()}; actors {pids}, one lane each.")

    def say(self, text: str, color: str | None = None) -> None:
        """Print a line with the time since the demo started."""
        self.settings.say(text, color)

    @property
    def steps(self) -> int:
        """Rows written so far, by all processes of the run."""
        return self.replay.write_count

    @property
    def mean_return(self) -> float:
        """Mean return of the last 20 episodes; 0 before there are 20."""
        return sum(self.returns[-WINDOW:]) / WINDOW if len(self.returns) >= WINDOW else 0.0

    def _start_actor(self, lane: int) -> Actor:
        return Actor(self.replay, self.agent, lane, 1_000_003 * self.settings.seed + self.steps + lane)

    def _save(self) -> engram.SaveHandle:
        """Begin to save a checkpoint. The network, which it names, is saved before."""
        step = self.steps
        path = self.settings.folder / f"network-{step}.npz"
        np.savez(path, policy=self.agent.policy().numpy(), returns=self.returns, kills=self.kills)
        handle: engram.SaveHandle = self.checkpoints.save(step, user={"network": path.name}, wait=False)
        return handle

    def _load_network(self) -> None:
        newest = self.checkpoints.list()[0]
        with np.load(self.settings.folder / f"network-{newest.step}.npz", allow_pickle=False) as saved:
            self.agent.load_policy(torch.from_numpy(saved["policy"]))
            self.returns, self.kills = saved["returns"].tolist(), [*saved["kills"].tolist(), len(saved["returns"])]
        rows = f"{len(self.replay):,} rows are there"
        self.say(f"A new learner opens the store: {rows}. Network of {newest.name}.", "green")

    def train(self, parent: Connection) -> bool:
        """Train until the task is solved or all steps are taken; False if ``parent`` was closed before."""
        events = self._halfway_events()
        shown, updates = time.monotonic(), self.updates
        while not (self.resumed and (self.mean_return > SOLVED or self.steps >= self.settings.steps)):
            self._grant_steps()
            ready = wait([parent, *(actor.channel for actor in self.actors)], timeout=0.1)
            if parent in ready:  # Ctrl-C, or the command that started this process is dead
                return False
            for actor in self.actors:
                if actor.channel in ready:
                    self._receive(actor)
            while self.steps >= LEARN_FROM + LEARN_EVERY * self.updates:
                batch = self.replay.sample()
                self.agent.learn(batch)
                self.replay.update_tensordict_priority(batch)  # does nothing for uniform sampling
                self.updates += 1
            next(events, None)
            if (elapsed := time.monotonic() - shown) > 2:
                rate = (self.updates - updates) * BATCH / elapsed
                self.settings.say_progress(self.steps, self.mean_return, SOLVED, f"{rate:8,.0f} samples/s")
                shown, updates = time.monotonic(), self.updates
        return True

    def _grant_steps(self) -> None:
        """Let the actors that have taken all their steps take more, if there are any left."""
        for actor in self.actors:
            left = self.settings.steps - self.steps - sum(other.owed for other in self.actors)
            if actor.owed == 0 and left > 0:
                actor.grant(min(left, AT_ONCE))

    def _receive(self, actor: Actor) -> None:
        """Count a row of an actor, or replace the actor if it is dead."""
        row = actor.receive()
        if row is None:
            self._replace(actor)
        elif row.episode_return is not None:
            self.returns.append(row.episode_return)

    def _replace(self, dead: Actor) -> None:
        dead.process.join()
        if dead.process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"The actor of lane {dead.lane} failed with exit code {dead.process.exitcode}.")
        self.actors[dead.lane] = self._start_actor(dead.lane)
        intact = verify(self.replay, dead)
        self.say(f"Actor {dead.process.pid} is dead. All {intact:,} rows it wrote are intact.", "green")
        self.say(f"Actor {self.actors[dead.lane].process.pid} takes over its lane.")

    def _halfway_events(self) -> Iterator[None]:
        """Save a checkpoint, kill an actor, kill this process. Yields while it waits; the second learner has none of this."""
        total = self.settings.steps
        while self.resumed or (self.mean_return < SOLVED / 2 and self.steps < total // 2):
            yield
        handle = self._save()
        while not handle.done:
            yield
        report = handle.wait()
        self.say(f"{report.name}: {report.steps:,} rows saved; writers waited {1e3 * report.paused_s:.1f} ms.")
        dead, before = self.actors[0], self.steps
        self.say(f"kill -9 {dead.process.pid} (an actor)", "red")
        self.kills.append(len(self.returns))
        dead.process.kill()
        while self.actors[0] is dead or not (self.actors[0].acknowledged or self.steps >= total):
            yield
        written = self.steps - before
        longest = max((row.seconds for actor in self.actors[1:] for row in actor.acknowledged[-written:]), default=0)
        self.say(f"Meanwhile {written} rows were written; the longest write took {1e3 * longest:.1f} ms.")
        self.say(f"kill -9 {os.getpid()} (the learner)", "red")
        os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> None:
        """Save a last checkpoint, plot the learning curve, and say what can be done with the run."""
        folder, saved = self.settings.folder, self._save().wait()
        self.say(f"{'Solved' if self.mean_return > SOLVED else 'Not solved'} after {saved.steps:,} steps.")
        self.plot(folder / "demo.png")
        click.echo(f"Learning curve:          {folder / 'demo.png'}")
        click.echo(f"Look at the checkpoints: engram inspect {folder / 'checkpoints'}")
        click.echo(f"Go on with the rows:     engram.ReplayBuffer.open({str(folder / 'replay')!r})")

    def plot(self, path: Path) -> None:
        """Draw the return of every episode, their mean, and the episodes at which processes were killed."""
        from matplotlib.figure import Figure  # takes a second

        figure = Figure(figsize=(8, 3.5), layout="constrained")
        axes, returns = figure.subplots(), self.returns
        axes.plot(range(1, len(returns) + 1), returns, color="0.75", linewidth=1, label="return of an episode")
        ends = range(WINDOW, len(returns) + 1)
        axes.plot(ends, [sum(returns[i - WINDOW : i]) / WINDOW for i in ends], label=f"mean of the last {WINDOW}")
        axes.axhline(SOLVED, color="0.4", linestyle=":", label="solved")
        for number, kill in enumerate(self.kills):
            axes.axvline(kill, color="tab:red", linestyle="--", label="" if number else "kill -9")
        axes.set(xlabel="episode", ylabel="return", title="DQN on CartPole-v1")
        axes.legend()
        figure.savefig(path, dpi=120)

    def close(self) -> None:
        """End the actors and close the buffer."""
        for actor in self.actors:
            actor.close()
        self.replay.close()


def learn(parent: Connection, settings: Settings) -> None:
    """What a learner process does. It stops when ``parent`` is closed."""
    with contextlib.closing(Learner(settings)) as learner:
        if learner.train(parent):
            learner.report()
        elif learner.replay.storage.initialized:
            store = str(settings.folder / "replay")
            click.echo(f"\nInterrupted. The store is whole: engram.ReplayBuffer.open({store!r})")
