"""Actor processes: each plays CartPole and writes its steps into its own lane of the shared buffer.

A pipe connects each actor to the learner. The learner sends how many steps the actor may take; the actor reports each row
after ``add`` has returned. There is no lock between processes, so an actor can be killed at any moment. When one end of the
pipe is closed, the process at the other end stops.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from torch import multiprocessing

from engram import ReplayBuffer
from engram.demo.agent import Agent

#: Probability of a random action at the first step and at the last, and the number of steps between them.
EXPLORE = (1.0, 0.05, 4_000)

#: Actors are forked from a process that has imported this module once, so a new one starts in a fraction of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


class Acknowledged(NamedTuple):
    """A row for which ``add`` has returned after some seconds. One that ends an episode has its return."""

    row: int
    checksum: int
    seconds: float
    episode_return: float | None


def checksums(rows: TensorDictBase) -> list[int]:
    """CRC-32 of each row of a batch, over all of its fields. Ignores ``"index"``, which the buffer adds."""
    keys = sorted(rows.exclude("index").keys(include_nested=True, leaves_only=True), key=str)
    fields = [rows[key].reshape(len(rows), -1).contiguous().view(torch.uint8) for key in keys]
    return [zlib.crc32(row) for row in torch.cat(fields, 1).numpy()]


class Counted(Protocol):
    """Knows how many rows were written so far: the more, the less actors explore."""

    @property
    def write_count(self) -> int: ...


def play(replay: Counted, agent: Agent, seed: int) -> Iterator[tuple[TensorDict, float | None]]:
    """Steps of CartPole, without end: each row, and the return of the episode if the row ends it."""
    generator = torch.Generator().manual_seed(seed)
    environment = gymnasium.make("CartPole-v1")
    observation, total = environment.reset(seed=seed)[0], 0.0
    first, last, until = EXPLORE
    while True:
        now = torch.from_numpy(observation)
        explore = max(last, first + (last - first) * replay.write_count / until)
        explores = float(torch.rand((), generator=generator)) < explore
        action = int(torch.randint(2, (), generator=generator)) if explores else agent.act(now)
        observation, reward, terminated, truncated, _ = environment.step(action)
        done, total = terminated or truncated, total + float(reward)
        outcome = {"reward": float(reward), "terminated": terminated, "truncated": truncated, "done": done}
        after = {name: torch.tensor([value]) for name, value in outcome.items()}
        after["observation"] = torch.from_numpy(observation)
        yield TensorDict({"observation": now, "action": torch.tensor(action), "next": after}), total if done else None
        if done:
            observation, total = environment.reset()[0], 0.0


def act(channel: Connection, replay: ReplayBuffer, agent: Agent, lane: int, seed: int) -> None:
    """Run an actor until the learner closes the pipe or dies. The learner trains the ``agent`` meanwhile."""
    torch.set_num_threads(1)
    steps = play(replay, agent, seed)
    with contextlib.closing(replay), contextlib.suppress(EOFError, ConnectionError):
        while True:
            for _ in range(channel.recv()):
                row, episode_return = next(steps)
                (checksum,) = checksums(row.unsqueeze(0))
                began = time.perf_counter()
                at = replay.add(row, lane=lane)
                channel.send(Acknowledged(at, checksum, time.perf_counter() - began, episode_return))


class Actor:
    """An actor as the learner sees it. The constructor starts the process.

    Args:
        replay: the buffer to write to.
        agent: chooses the actions. Its parameters move to shared memory: what it learns later, the actor uses.
        lane: of ``replay``.
        seed: of the environment and of exploration.
    """

    def __init__(self, replay: ReplayBuffer, agent: Agent, lane: int, seed: int) -> None:
        self.lane = lane
        self.acknowledged: list[Acknowledged] = []
        self.owed = 0  # steps that were granted and are not acknowledged yet
        self.channel, theirs = multiprocessing.Pipe()
        self.process = _context.Process(target=act, args=(theirs, replay, agent, lane, seed), daemon=True)
        self.process.start()
        theirs.close()

    def grant(self, steps: int) -> None:
        """Let the actor take more steps."""
        self.owed += steps
        with contextlib.suppress(OSError):  # the actor was just killed: receive() will return None
            self.channel.send(steps)

    def receive(self) -> Acknowledged | None:
        """The next row that the actor acknowledges; waits for it. None: the process is dead, and all of its rows were returned."""
        with contextlib.suppress(EOFError, OSError):
            self.acknowledged.append(self.channel.recv())
            self.owed -= 1
            return self.acknowledged[-1]
        return None

    def close(self) -> None:
        """Close the pipe, so that the actor ends, and wait for it. Repeatable."""
        self.channel.close()
        self.process.join(60)
        self.process.kill()
