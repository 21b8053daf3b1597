"""Actor processes: each plays CartPole and writes its steps into its own lane of the shared buffer.

A pipe connects each actor to the learner. The learner sends how many steps the actor may take; the actor reports each row
after ``add`` has returned. There is no lock between processes, so an actor can be killed at any moment. When one end of the
pipe is closed, the process at the other end stops.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from typing import TYPE_CHECKING, NamedTuple

import gymnasium
import torch
from tensordict import TensorDict
from torch import multiprocessing

from engram.demo.agent import Agent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from tensordict import TensorDictBase

    from engram import ReplayBuffer

EXPLORE = (1.0, 0.05, 4_000)
"""Probability of a random action at the first step and at the last, and the number of steps between them."""

#: Actors are forked from a process that has imported this module once, so a new one starts in a fraction of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


class Acknowledged(NamedTuple):
    """A row for which ``add`` has returned."""

    row: int
    checksum: int
    seconds: float
    """Duration of ``add``."""
    episode_return: float | None
    """Return of the episode, if this row ends one."""


def checksums(rows: TensorDictBase) -> list[int]:
    """CRC-32 of each row of a batch, over all of its fields. Ignores ``"index"``, which the buffer adds."""
    keys = sorted(rows.exclude("index").keys(include_nested=True, leaves_only=True), key=str)
    fields = [rows[key].reshape(len(rows), -1).contiguous().view(torch.uint8) for key in keys]
    return [zlib.crc32(row) for row in torch.cat(fields, 1).numpy()]


def play(replay: ReplayBuffer, agent: Agent, seed: int) -> Iterator[tuple[TensorDict, float | None]]:
    """Steps of CartPole, without end: each row, and the return of the episode if the row ends it."""
    generator = torch.Generator().manual_seed(seed)
    environment = gymnasium.make("CartPole-v1")
    observation, total = environment.reset(seed=seed)[0], 0.0
    first, last, until = EXPLORE
    while True:
        now = torch.from_numpy(observation)
        explore = max(last, first + (last - first) * replay.write_count / until)
        if float(torch.rand((), generator=generator)) < explore:
            action = int(torch.randint(2, (), generator=generator))
        else:
            action = agent.act(now)
        observation, reward, terminated, truncated, _ = environment.step(action)
        done, total = terminated or truncated, total + float(reward)
        after = {"observation": torch.from_numpy(observation), "reward": torch.tensor([float(reward)])}
        after |= {"terminated": torch.tensor([terminated]), "truncated": torch.tensor([truncated])}
        after["done"] = torch.tensor([done])
        yield TensorDict({"observation": now, "action": torch.tensor(action), "next": after}), total if done else None
        if done:
            observation, total = environment.reset()[0], 0.0


def act(channel: Connection, replay: ReplayBuffer, policies: ReplayBuffer, lane: int, seed: int) -> None:
    """Run an actor until the learner closes the pipe or dies. The only row of ``policies`` is the newest policy."""
    torch.set_num_threads(1)
    logging.getLogger("engram").setLevel(logging.WARNING)
    agent, version = Agent(), -1
    steps = play(replay, agent, seed)
    with contextlib.closing(policies), contextlib.closing(replay), contextlib.suppress(EOFError, ConnectionError):
        while True:
            for _ in range(channel.recv()):
                if policies.write_count != version:
                    version = policies.write_count
                    agent.load_policy(policies[0])
                row, episode_return = next(steps)
                (checksum,) = checksums(row.unsqueeze(0))
                began = time.perf_counter()
                at = replay.add(row, lane=lane)
                channel.send(Acknowledged(at, checksum, time.perf_counter() - began, episode_return))


class Actor:
    """An actor as the learner sees it. The constructor starts the process.

    Args:
        replay: the buffer to write to.
        policies: the shared buffer whose only row is the newest policy.
        lane: of ``replay``.
        seed: of the environment and of exploration.
    """

    def __init__(self, replay: ReplayBuffer, policies: ReplayBuffer, lane: int, seed: int) -> None:
        self.lane = lane
        self.acknowledged: list[Acknowledged] = []
        self.owed = 0
        """Steps that were granted and are not acknowledged yet."""
        self.channel, theirs = multiprocessing.Pipe()
        self.process = _context.Process(target=act, args=(theirs, replay, policies, lane, seed), daemon=True)
        self.process.start()
        theirs.close()

    def grant(self, steps: int) -> None:
        """Let the actor take more steps."""
        self.owed += steps
        with contextlib.suppress(OSError):  # the actor was just killed: receive() will return None
            self.channel.send(steps)

    def receive(self) -> Acknowledged | None:
        """The next row that the actor acknowledges; waits for it. None: the process is dead, and all of its rows were returned."""
        try:
            row: Acknowledged = self.channel.recv()
        except (EOFError, OSError):
            return None
        self.owed -= 1
        self.acknowledged.append(row)
        return row

    def close(self) -> None:
        """Close the pipe, so that the actor ends, and wait for it. Repeatable."""
        self.channel.close()
        self.process.join(10)
        self.process.kill()
