"""One learner, many actors, one buffer; one actor is killed on the way and another one takes its place."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console

from engram import LazyTensorStorage, ReplayBuffer
from engram.demo.actors import GOODBYE_S, Acknowledged, Actor, ActorFailed, checksums
from engram.demo.agent import Agent
from engram.demo.display import Display
from engram.demo.learning import Learning, new_replay
from engram.demo.play import truncate
from engram.demo.progress import Progress
from engram.demo.report import work
from engram.demo.task import AT_ONCE, DONE, INTERRUPTED, LEARN_EVERY, LEARN_FROM, PUBLISH_EVERY, SOLVED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ActorFailed", "Crowd", "RowsLost", "run", "verify"]

IDLE_S = 0.1
"""Between two looks at Ctrl-C while the learner waits for rows."""


class RowsLost(RuntimeError):
    """The store does not hold what it acknowledged."""


class Absence(NamedTuple):
    """From the kill of an actor to the first row of its successor."""

    successor: Actor
    began: float
    updates: int
    steps: int


class Crowd:
    """The learner, its actors, and what they share.

    Args:
        folder: of the run; the replay is in ``folder/replay``.
        seed: of everything. With several actors no two runs are alike all the same.
        steps: environment steps of all actors together, at most.
        sampler: ``"uniform"`` or ``"prioritized"``.
        actors: how many.
        console: what happens is told there.
    """

    def __init__(self, folder: Path, *, seed: int, steps: int, sampler: str, actors: int, console: Console) -> None:
        torch.set_num_threads(1)  # batches this small only lose by more
        torch.manual_seed(seed)
        self.folder = folder
        self.total = steps
        self.progress = Progress(seed, sampler)
        self.agent = Agent()
        self.replay = new_replay(folder / "replay", sampler, torch.Generator().manual_seed(seed), lanes=actors)
        # A row is never read torn, and who is killed while reading it stops nobody: that is what policies need, too.
        self.policies = ReplayBuffer(storage=LazyTensorStorage(1), shared=True)
        self.policies.add(self.agent.policy())
        self.began = time.monotonic()
        self.everybody: list[Actor] = []
        """All actors ever started, in order."""
        self.actors: list[Actor] = []
        """The one of each lane."""
        self._learning = Learning(self.agent, self.replay, self.progress, steps)
        self._console = console
        self._absences: list[Absence] = []
        self._longest_s = 0.0
        try:
            for lane in range(actors):
                self.actors.append(self._new_actor(lane))
        except BaseException:
            self.close()
            raise

    def _new_actor(self, lane: int) -> Actor:
        number = len(self.everybody)
        seed = 1_000_003 * self.progress.seed + 100_003 * number
        actor = Actor(self.replay, self.policies, lane=lane, number=number, seed=seed)
        self.everybody.append(actor)
        return actor

    @property
    def complete(self) -> bool:
        """Whether every actor that replaced another one has written."""
        return not self._absences

    @property
    def behind(self) -> bool:
        """Whether there is something to learn from that came since the last update."""
        progress = self.progress
        return progress.steps >= LEARN_FROM and progress.updates * LEARN_EVERY <= progress.steps - LEARN_FROM

    def turn(self) -> None:
        """Hear what the actors wrote, let them go on, and learn if it is time."""
        progress = self.progress
        behind = self.behind
        wait([actor.channel for actor in self.actors], timeout=0 if behind else IDLE_S)
        for actor in self.actors:
            came = actor.heard()
            if came is None:
                self._replace(actor)
            elif came:
                self._count(actor, came)
        self._grant()
        if behind:
            self._learning.update()
            if progress.updates % PUBLISH_EVERY == 0:
                self.policies.add(self.agent.policy())

    def _count(self, actor: Actor, came: list[Acknowledged]) -> None:
        self.progress.steps += len(came)
        self.progress.returns += [row.finished for row in came if row.finished is not None]
        for absence in [absence for absence in self._absences if absence.successor is actor]:
            self._absences.remove(absence)
            self._tell_return(absence, len(came))
        self._longest_s = max(self._longest_s, *(row.seconds for row in came))

    def _grant(self) -> None:
        """Steps for the actors: they stay that close to the learner, which never gets ahead of them.

        Every actor has its share at hand, so that none waits for the learner's answer, and one that is just starting keeps
        its share, however fast the others are.
        """
        learned = LEARN_FROM + LEARN_EVERY * self.progress.updates
        ahead = AT_ONCE * len(self.actors)
        left = min(self.total, learned + ahead) - self.progress.steps - sum(actor.owed for actor in self.actors)
        for actor in sorted(self.actors, key=lambda actor: actor.granted_at):  # in turn
            steps = min(left, AT_ONCE - actor.owed)
            if steps > 0:
                actor.grant(steps)
                left -= steps

    def kill(self, actor: Actor) -> None:
        """End an actor as hard as a process can be ended: ``kill -9``."""
        self._console.print(f"Half-way, at a return of {self.progress.recent_return:.0f}: kill -9 {actor.pid}.")
        self.progress.replaced_at = len(self.progress.returns)
        os.kill(actor.pid, signal.SIGKILL)

    def _replace(self, dead: Actor) -> None:
        """Start another actor in the lane of one that was killed; look what is left of its rows meanwhile."""
        began = time.monotonic()
        successor = self._new_actor(dead.lane)
        self.actors[dead.lane] = successor
        self._absences.append(Absence(successor, began, self.progress.updates, self.progress.steps))
        self._longest_s = 0.0
        kept = verify(self.replay, dead)
        acknowledged = len(dead.acknowledged)
        there = "all of them" if kept == acknowledged else f"the last {kept}, which is what its lane holds,"
        self._console.print(
            f"Actor {dead.number} (lane {dead.lane}, process {dead.pid}) is dead. It had acknowledged {acknowledged} rows: "
            f"{there} are in the store, as it wrote them. Process {successor.pid} takes its place.",
            soft_wrap=True,
        )

    def _tell_return(self, absence: Absence, written: int) -> None:
        others = self.progress.steps - absence.steps - written
        self._console.print(
            f"Actor {absence.successor.number} (lane {absence.successor.lane}, process {absence.successor.pid}) plays on, "
            f"{time.monotonic() - absence.began:.1f} s after. Meanwhile the others wrote {others} rows, the longest write took "
            f"{1e3 * self._longest_s:.1f} ms, and the learner made {self.progress.updates - absence.updates} updates.",
            soft_wrap=True,
        )

    def finish(self) -> None:
        """Let the actors end in order, counting what they still write, and save what was learned."""
        for actor in self.actors:
            actor.stop()
        deadline = time.monotonic() + GOODBYE_S
        for actor in self.actors:
            while (came := actor.heard()) is not None and time.monotonic() < deadline:
                if came:
                    self._count(actor, came)
                else:
                    wait([actor.channel], timeout=IDLE_S)
        self.progress.save(self.folder, self.agent.arrays())

    def close(self) -> None:
        """End all actors, in whatever state they are, and let go of the buffers. Repeatable."""
        for actor in self.everybody:
            actor.close()
        self.policies.close()
        self.replay.close()


def verify(replay: Any, dead: Actor) -> int:
    """Read what a dead actor had acknowledged, as much as its lane holds, and end its episode. How many rows that was.

    Raises:
        RowsLost: one is missing, or is not what was written.
    """
    length: int = replay.storage.max_size // replay.lanes
    expected = dead.acknowledged[-length:]
    if not expected:
        return 0
    following = dead.lane * length + (expected[-1].row + 1) % length
    whole = int(replay.writer.generations_of([following])) >= 0
    untold = whole and _number_of(replay[following]) == (dead.number, len(dead.acknowledged))
    if len(expected) == length and (untold or not whole):
        del expected[0]  # where it lay is the row that could not be told, or what is left of it
    rows = [row.row for row in expected]
    missing = (replay.writer.generations_of(rows) < 0).tolist()
    if any(missing):
        raise RowsLost(f"Of {len(rows)} rows that actor {dead.number} had acknowledged {sum(missing)} are missing.")
    wrong = [row.row for row, found in zip(expected, checksums(replay[rows]), strict=True) if found != row.checksum]
    if wrong:
        raise RowsLost(f"Rows {wrong[:8]} are not what actor {dead.number} had written.")
    truncate(replay, following if untold else dead.acknowledged[-1].row)
    return len(rows)


def _number_of(row: Any) -> tuple[int, int]:
    """Which actor wrote a row, and how many it had written before."""
    return int(row["actor"]), int(row["number"])


def run(folder: Path, *, seed: int, steps: int, sampler: str, actors: int, interrupted: Callable[[], bool]) -> int:
    """Train until the task is solved or the steps are made; the exit code: 0, or 130 where ``interrupted()``.

    Half-way, when the recent return passes half of what solves the task, or at half of the steps, one actor is killed.

    Raises:
        ActorFailed: an actor raised.
        RowsLost: a row that an actor had acknowledged is not there.
    """
    console = Console()
    crowd = Crowd(folder, seed=seed, steps=steps, sampler=sampler, actors=actors, console=console)
    progress = crowd.progress
    pids = ", ".join(str(actor.pid) for actor in crowd.actors)
    console.print(f"Learner: process {os.getpid()}. Actors, one lane each: processes {pids}.", soft_wrap=True)
    try:
        with Display(console, progress, steps) as display:
            while not interrupted():
                crowd.turn()
                display.refresh()
                recent = progress.recent_return
                progress.solved = recent > SOLVED
                if progress.replaced_at is None and (recent > SOLVED / 2 or progress.steps >= steps // 2):
                    crowd.kill(crowd.actors[0])
                if (progress.steps >= steps and not crowd.behind) or (progress.solved and crowd.complete):
                    break
        crowd.finish()
        stats = crowd.replay.stats()
    finally:
        crowd.close()
    if interrupted():
        return INTERRUPTED
    console.print(work(crowd.everybody, progress, stats, time.monotonic() - crowd.began), soft_wrap=True)
    return DONE
