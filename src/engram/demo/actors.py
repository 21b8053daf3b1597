"""Actor processes: each plays, and writes what it sees into a lane of a buffer that all share.

A pipe joins each of them to the learner. Down come the steps that it may make, up goes word of every row once it is
acknowledged. There is no lock between them: a process that is killed holds nothing that another one waits for. Whoever finds
the other end of the pipe closed knows that the other one is gone.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import multiprocessing

from engram.demo.agent import Agent
from engram.demo.play import Player, truncate

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from engram import ReplayBuffer

__all__ = ["GOODBYE_S", "Acknowledged", "Actor", "ActorFailed", "act", "checksums"]

GOODBYE_S = 10.0
"""For an actor to end after it was told to; then it is killed."""

FIELDS = (
    "observation",
    "action",
    ("next", "observation"),
    ("next", "reward"),
    ("next", "terminated"),
    ("next", "truncated"),
    ("next", "done"),
    "actor",
    "number",
)


#: A clean process from which actors are forked: it has imported everything once, so the next one is there at once.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


class ActorFailed(RuntimeError):
    """An actor ended by itself."""


class Acknowledged(NamedTuple):
    """A row that is in the store."""

    row: int
    checksum: int
    seconds: float
    """That writing it took."""
    finished: float | None
    """Return of the episode, if it ended here."""


def checksums(rows: Any) -> list[int]:
    """CRC-32 of each row of a batch."""
    fields = [rows[key].reshape(len(rows), -1).contiguous().view(torch.uint8) for key in FIELDS]
    return [zlib.crc32(row) for row in torch.cat(fields, 1).numpy()]


def act(channel: Connection, lane: int, number: int, seed: int) -> None:
    """The actor's process: play until told to stop, or until the learner is gone.

    Args:
        channel: to the learner, which first sends the replay and the buffer whose only row is the newest policy.
        lane: of the replay.
        number: of the actor, which none before had; its rows carry it.
        seed: of everything.
    """
    torch.set_num_threads(1)
    try:
        replay, policies = channel.recv()
        with contextlib.closing(policies), contextlib.closing(replay):
            _play(channel, replay, policies, lane, number, seed)
    except (EOFError, ConnectionError):
        pass  # the learner is gone
    except Exception:  # noqa: BLE001 - the learner raises it
        with contextlib.suppress(ConnectionError):
            channel.send(traceback.format_exc())


def _play(channel: Connection, replay: Any, policies: ReplayBuffer, lane: int, number: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    agent = Agent()
    player = Player(agent, generator)
    version, made, newest = -1, 0, -1
    while (steps := channel.recv()) is not None:
        for _ in range(steps):
            if policies.write_count != version:
                version = policies.write_count
                agent.take_policy(policies[0])
            row, finished = player.step(replay.write_count, seed + made)
            row["actor"], row["number"] = torch.tensor(number), torch.tensor(made)
            began = time.perf_counter()
            newest = replay.add(row, lane=lane)
            seconds = time.perf_counter() - began
            made += 1
            (checksum,) = checksums(row.unsqueeze(0))
            channel.send(Acknowledged(newest, checksum, seconds, finished))
    if player.inside:
        truncate(replay, newest)


class Actor:
    """An actor, as the learner sees it. Starts the process.

    Args:
        replay: to write to. policies: its only row is what to play by.
        lane, number, seed: as for :func:`act`.
    """

    def __init__(self, replay: Any, policies: ReplayBuffer, *, lane: int, number: int, seed: int) -> None:
        self.lane = lane
        self.number = number
        self.acknowledged: list[Acknowledged] = []
        self.granted = 0
        """Steps that it was allowed to make."""
        self.granted_at = 0.0
        self.first_at = self.last_at = 0.0
        self._failure = ""
        self._stopped = False
        self.channel, theirs = multiprocessing.Pipe()
        self.process = _context.Process(
            target=act, args=(theirs, lane, number, seed), name=f"actor-{number}", daemon=True
        )
        # A terminal's Ctrl-C reaches all processes, and the learner alone decides what follows.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
            theirs.close()
        with contextlib.suppress(OSError):  # it is gone already: heard() will say so
            self.channel.send((replay, policies))

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None  # it was started
        return pid

    @property
    def owed(self) -> int:
        """Steps that it may make and has not."""
        return self.granted - len(self.acknowledged)

    @property
    def rows_per_s(self) -> float:
        """From its first row to its last."""
        return (len(self.acknowledged) - 1) / (self.last_at - self.first_at) if self.last_at > self.first_at else 0.0

    def grant(self, steps: int) -> None:
        """Let it make more steps."""
        self.granted += steps
        self.granted_at = time.monotonic()
        with contextlib.suppress(OSError):  # it was killed just now: heard() will say so
            self.channel.send(steps)

    def heard(self) -> list[Acknowledged] | None:
        """What came since the last call; None: it is gone, and nothing more will come.

        Raises:
            ActorFailed: it ended by itself. Its traceback is in the message.
        """
        came: list[Acknowledged] = []
        try:
            while self.channel.poll():
                self._take(self.channel.recv(), came)
        except (EOFError, OSError):
            if not came:
                self._check_end()
                return None
        if came:
            self.last_at = time.monotonic()
            self.first_at = self.first_at or self.last_at
            self.acknowledged += came
        return came

    def _take(self, message: Acknowledged | str, came: list[Acknowledged]) -> None:
        if isinstance(message, str):
            self._failure = message
        else:
            came.append(message)

    def _check_end(self) -> None:
        self.process.join(GOODBYE_S)
        code = self.process.exitcode
        if self._failure or not (code == -signal.SIGKILL or (self._stopped and code == 0)):
            raise ActorFailed(
                f"The actor of lane {self.lane} (process {self.pid}) ended with code {code}; expected it to play until "
                f"it is told to stop. {self._failure or 'What it said is above.'}"
            )

    def stop(self) -> None:
        """Tell it to end when it has made the steps that it was granted."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self.channel.send(None)

    def close(self) -> None:
        """Wait until it has ended, after ten seconds no longer: then it is killed."""
        self.channel.close()
        self.process.join(GOODBYE_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
