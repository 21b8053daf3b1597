"""What ``engram demo --nodes 2`` does without Ray: the actors and the learner, which it runs as processes of its nodes, and a picture
of how much they write and sample over time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram import ReplayBuffer, TensorDictReplayBuffer
from engram.demo.actors import checksums, play
from engram.demo.agent import Agent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

#: Seconds over which rates are counted.
BIN_S = 0.5


class Played(NamedTuple):
    """Rows for which ``add`` has returned, when it did by ``time.time()``, and the returns of episodes that ended."""

    rows: list[int]
    checksums: list[int]
    times: list[float]
    returns: list[float]


class Learned(NamedTuple):
    """The policy, and by ``time.time()`` when the batches were drawn that it learned from."""

    policy: Tensor
    times: list[float]


class Player:
    """Plays CartPole and writes its steps into its own lane.

    Args:
        lane: of the buffer.
        seed: of the environment and of exploration.
    """

    def __init__(self, lane: int, seed: int) -> None:
        _quiet()
        self._lane, self._seed = lane, seed
        self._agent, self.write_count = Agent(), 0
        self._steps = play(self, self._agent, seed)

    def attach(self, replay: ReplayBuffer) -> None:
        """Write to this buffer. Before :meth:`play`."""
        self._replay = replay

    def play(self, policy: Tensor | None, written: int, steps: int) -> Played:
        """Take some steps.

        Args:
            policy: of the learner; None: there is none yet.
            written: rows of all actors so far.
            steps: how many. Where a write fails, it is the last one, and the next call begins a new episode.
        """
        self.write_count = written
        if policy is not None:
            self._agent.load_policy(policy)
        played = Played([], [], [], [])
        for _ in range(steps):
            row, episode_return = next(self._steps)
            try:
                at = self._replay.add(row, lane=self._lane)
            except ConnectionError:  # the row may be there or not
                self._seed += 1
                self._steps = play(self, self._agent, self._seed)
                break
            played.times.append(time.time())
            played.rows.append(at)
            played.checksums.extend(checksums(row.unsqueeze(0)))
            if episode_return is not None:
                played.returns.append(episode_return)
        return played


class Learner:
    """Trains from what the actors write.

    Args:
        policy: to go on with; None: a new one.
        seed: of the network.
    """

    def __init__(self, policy: Tensor | None, seed: int) -> None:
        _quiet()
        torch.manual_seed(seed)
        self._agent = Agent()
        if policy is not None:
            self._agent.load_policy(policy)

    def attach(self, replay: TensorDictReplayBuffer) -> None:
        """Train from this buffer, which is in the memory of this machine. Before the other methods."""
        self._replay = replay

    def learn(self, seconds: float) -> Learned:
        """Learn for some seconds, from at least one batch. The buffer has rows."""
        until, times = time.time() + seconds, list[float]()
        while not times or times[-1] < until:
            batch = self._replay.sample()
            times.append(time.time())
            self._agent.learn(batch)
            self._replay.update_tensordict_priority(batch)  # does nothing for uniform sampling
        return Learned(self._agent.policy(), times)

    def differing(self, rows: list[int], sums: list[int]) -> list[int]:
        """Those of ``rows`` whose checksum is another one. Raises ``RowError``: one is missing."""
        found = checksums(self._replay[rows]) if rows else []
        return [row for row, old, new in zip(rows, sums, found, strict=True) if old != new]


def _quiet() -> None:
    torch.set_num_threads(1)


class Mark(NamedTuple):
    """Something that happened at a second of the run. ``fatal``: a kill."""

    at: float
    text: str
    fatal: bool


class Throughput:
    """The seconds of a run at which rows were acknowledged and batches drawn.

    Args:
        batch: rows of a batch.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.rows: list[float] = []
        self.batches: list[float] = []
        self.marks: list[Mark] = []

    def rates(self, times: Sequence[float], each: int = 1) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Events per second in every bin of the run: the bins' middles, and ``each`` times as many as ``times`` fall into them."""
        last = max([*self.rows, *self.batches, *(mark.at for mark in self.marks)], default=0)
        edges = np.arange(0, last + 2 * BIN_S, BIN_S)
        counts, _ = np.histogram(times, edges)
        return edges[:-1] + BIN_S / 2, counts * (each / BIN_S)

    def plot(self, path: Path) -> None:
        """Draw rows and samples per second, and the marks, into a PNG."""
        from matplotlib.figure import Figure  # takes a second

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        above, below = figure.subplots(2, sharex=True)
        self._draw(above, self.rows, 1, "rows written /s", "tab:blue")
        self._draw(below, self.batches, self.batch, "rows sampled /s", "tab:green")
        for mark in self.marks:
            above.annotate(
                f" {mark.text}", (mark.at, 1), xycoords=("data", "axes fraction"), va="bottom", rotation=20, fontsize=8
            )
        below.set_xlabel("seconds")
        figure.savefig(path, dpi=120)

    def _draw(self, axes: Axes, times: Sequence[float], each: int, label: str, color: str) -> None:
        seconds, rates = self.rates(times, each)
        axes.fill_between(seconds, rates, step="mid", color=color, alpha=0.6, linewidth=0)
        for mark in self.marks:
            axes.axvline(mark.at, color="tab:red" if mark.fatal else "0.4", linestyle="--" if mark.fatal else ":")
        first = min([*self.rows, *(mark.at for mark in self.marks)], default=0)
        axes.set(ylabel=label, xlim=(max(first - 2, 0), seconds.max(initial=0) + 1), ylim=(0, None))
        axes.yaxis.set_major_formatter("{x:,.0f}")
