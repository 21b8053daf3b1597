"""Checkpoints of the shards of one buffer: each actor saves its rows as a rank of the job that the actors are."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from engram.checkpoint.checkpointer import Checkpointer
from engram.errors import CorruptCheckpoint, RankFailed
from engram.format import series
from engram.ranks import Ranks
from engram.remote.shards import answer_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engram.buffer import ReplayBuffer
    from engram.checkpoint.options import Options, RestoreOptions
    from engram.checkpoint.reports import RestoreReport, SaveReport
    from engram.checkpoint.save import SaveHandle
    from engram.checkpoint.select import Wanted
    from engram.remote.shards import Handle

Said: TypeAlias = Literal["set", "get", "claim", "add", "forget"]
#: For how long the actor that holds the board may take to answer.
_ANSWER_S = 60.0
_AGAIN = "the shard was started again, or another Checkpointer saves it now."


class Board:
    """What ranks tell each other: the actor of the first shard holds it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        #: Why nothing is told any more.
        self.broken = ""

    def _check(self, key: str) -> None:
        if key != self.key or self.broken:
            raise RankFailed(self.broken or _AGAIN)

    def do(self, key: str, what: Said, name: str, value: bytes | int | None) -> bytes | int | None:
        """What :class:`Ranks` calls by these names. Raises ``RankFailed``: this is the board of another job, or the job was broken off."""
        self._check(key)
        values, counters = self._values, self._counters
        match what, value:
            case "set", bytes():
                values[name] = value
            case "get", None:
                return values.get(name)
            case "claim", bytes():
                return values.setdefault(name, value)
            case "add", int():
                counters[name] = counters.get(name, 0) + value
                return counters[name]
            case "forget", None:
                values.pop(name, None)
                counters.pop(name, None)
        return None

    def look(self, key: str, names: Sequence[str]) -> dict[str, bytes]:
        """What is set of some names. Raises as :meth:`do`."""
        self._check(key)
        return {name: self._values[name] for name in names if name in self._values}

    def break_off(self, key: str, why: str) -> None:
        """Whatever is asked for from now on fails, for this reason."""
        if key == self.key:
            self.broken = why


class RanksOnRay(Ranks):
    """A rank of a job of actors.

    Args:
        rank, world: as of all ranks.
        holder: the actor that holds the board.
        key: of the board.
    """

    def __init__(self, rank: int, world: int, holder: Handle, key: str) -> None:
        super().__init__(rank, world)
        self._holder, self._key = holder, key

    def _answer(self, asked: object) -> Any:
        """What the holder answers. Raises ``RankFailed``: it does not."""
        try:
            return answer_of(asked, _ANSWER_S, "rank 0, which holds the board of this job")
        except ConnectionError as error:
            raise RankFailed(str(error)) from error

    def _ask(self, what: Said, name: str, value: bytes | int | None = None) -> Any:
        board = self._holder.board.options(max_task_retries=0, concurrency_group="board")
        return self._answer(board.remote(self._key, what, name, value))

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._ask("get", key)
        return found

    def _look(self, keys: Sequence[str]) -> dict[str, bytes]:
        look = self._holder.look.options(max_task_retries=0, concurrency_group="board")
        found: dict[str, bytes] = self._answer(look.remote(self._key, [*keys]))
        return found

    def claim(self, key: str, value: bytes) -> bytes:
        there: bytes = self._ask("claim", key, value)
        return there

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def forget(self, key: str) -> None:
        self._ask("forget", key)


class ShardSaver:
    """Saves and restores the rows of one shard.

    Args:
        rb: its buffer.
        rank, world: its number, and how many shards there are.
    """

    def __init__(self, rb: ReplayBuffer, rank: int, world: int) -> None:
        self._rb, self._rank, self._world = rb, rank, world
        self.board = Board("")
        self._key = ""
        self._checkpointer: Checkpointer
        self._handle: SaveHandle | None = None
        self._lock = threading.Lock()

    def knows(self, key: str) -> bool:
        """Whether its Checkpointer is that of this job."""
        return key == self._key and not self.board.broken

    def _check(self, key: str) -> None:
        if key != self._key:
            raise RankFailed(_AGAIN)

    def open(self, key: str, root: Path, options: Options, holder: Handle) -> None:
        """Make the Checkpointer of a job, in place of that of an older one. Raises what making it raises."""
        if self._rank == 0:
            self.board = Board(key)
        ranks = RanksOnRay(self._rank, self._world, holder, key) if self._world > 1 else None
        self._checkpointer = Checkpointer(root, self._rb, ranks=ranks, **options._asdict())
        with self._lock:
            self._key, self._handle = key, None

    def begin(self, key: str, step: int, user: str) -> None:
        """Begin a save, and return when the snapshot is taken. Raises as ``Checkpointer.save``."""
        self._check(key)
        with self._lock:
            self._handle = None
        handle = self._checkpointer.save(step, user=json.loads(user), wait=False)
        with self._lock:
            self._handle = handle

    def end(self, key: str) -> SaveReport:
        """Wait for the save. Raises as ``Checkpointer.save``."""
        self._check(key)
        if self._handle is None:
            raise RankFailed("no save goes on here.")
        return self._handle.wait()

    def give_up(self, key: str, rank: int, why: str) -> bool:
        """Vote against the save that goes on, for a rank that is gone. Whether it was named already, so that this could be."""
        with self._lock:
            handle = self._handle if key == self._key else None
        if handle is None or handle.path is None:
            return False
        with contextlib.suppress(OSError, CorruptCheckpoint):
            if series.decision(handle.path) is None:
                series.refuse(handle.path, rank, why)
        return True

    def restore(self, key: str, wanted: Wanted, options: RestoreOptions) -> RestoreReport:
        """As ``Checkpointer.restore``."""
        self._check(key)
        which = {"step": wanted.step, "name": wanted.name, "at_most": wanted.at_most, "allow_partial": wanted.partial}
        return self._checkpointer.restore(**which, **options._asdict())  # type: ignore[arg-type] # as it was called

    def prune(self, key: str, keep: int | None) -> list[str]:
        """As ``Checkpointer.prune``."""
        self._check(key)
        return self._checkpointer.prune(keep)
