"""Clients of shards, stores that actors of Ray serve: where they are, a storage before there is a store, and their checkpoints."""

from __future__ import annotations

import contextlib
import json
import random
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from engram.errors import RankFailed
from engram.remote.connection import Access, Connection, Final, Found
from engram.remote.storage import RemoteStorage
from engram.storages import Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from engram.remote import awaited, protocol
    from engram.types import Sampler, Writer

    Lost: TypeAlias = Callable[[int, str], bool]


#: Names in Ray are looked for here, so that drivers of other jobs find them.
NAMESPACE = "engram"
#: Between two looks at which shards of a fleet there are.
_LIST_INTERVAL_S = 5.0
#: For how long an actor may take to end what it does.
_CLOSE_TIMEOUT_S = 10.0


class Call(Protocol):
    """A method of an actor."""

    def remote(self, *arguments: object) -> object:
        """Call it. What is returned stands for the answer."""

    def options(self, **options: object) -> Call:
        """The method, called otherwise."""


class Handle(Protocol):
    """The handle of an actor."""

    def __getattr__(self, name: str) -> Call: ...


class Shard:
    """A shard, as its clients know it. It goes by pickle to all processes of the Ray cluster.

    Args:
        actor: the handle of its actor.
        patience: seconds for which it is waited for where it does not answer.
        name: of its actor in Ray; empty: it has none.
    """

    #: Rows in memory are lost with their node.
    replaces_lost = True

    def __init__(self, actor: Handle, patience: float, name: str = "") -> None:
        self.actor, self.name = actor, name
        self.patience_s = patience
        #: Asked for, and not answered: while an actor is away, it is asked once.
        self._pending: dict[str | None, object] = {}

    def _answer(self, pending: object, seconds: float | None = None) -> Any:
        """What a call of the actor returns.

        Raises: what it raises. ``ConnectionError``: the actor is gone, or does not answer.
        """
        return answer_of(pending, self.patience_s if seconds is None else seconds, str(self))

    def describe(self) -> awaited.Described:
        """Raises what making its buffer raised; ``ConnectionError``."""
        return cast("awaited.Described", self._answer(self.actor.describe.remote()))

    def components(self) -> tuple[Storage, Sampler, Writer]:
        """Those of its buffer, which share its memory: for processes of its node. Raises ``ConnectionError``."""
        return cast("tuple[Storage, Sampler, Writer]", self._answer(self.actor.components.remote()))

    def serve(self, schema: str | None) -> Found | None:
        """Where its store is served, which is made of the schema if there is none. None: there is neither.

        Raises ``ConnectionError``; ``OSError``: no space.
        """
        pending = self._pending.pop(schema, None) or self.actor.serve.remote(schema)
        try:
            return cast("Found | None", self._answer(pending))
        except ConnectionError as error:
            if isinstance(error.__cause__, GetTimeoutError):
                self._pending[schema] = pending
            raise

    def find(self, known: protocol.Served | None) -> Found:
        """As ``Servers``. A store in memory that was lost with its node begins without rows."""
        if (found := self.serve(known.schema if known is not None else None)) is None:
            raise ConnectionError("nothing was ever written.")
        return found

    @property
    def reached(self) -> Access:
        """Servers in the cluster have no certificates of their own. An actor that is started again is waited for."""
        return Access((), None, (), self.patience_s)

    def turn(self) -> int:
        """A number that no other client gets, as long as the actor lives; any number where it does not answer."""
        try:
            return int(self._answer(self.actor.turn.options(max_task_retries=0).remote(), _CLOSE_TIMEOUT_S))
        except ConnectionError:
            return random.getrandbits(48)

    def __reduce__(self) -> tuple[type[Shard], tuple[Handle, float, str]]:
        return Shard, (self.actor, self.patience_s, self.name)

    @property
    def id(self) -> str:
        """Of its actor."""
        return str(self.actor._ray_actor_id.hex())  # type: ignore[attr-defined] # noqa: SLF001 - Ray has no other name of it

    def __str__(self) -> str:
        return f"ray:{self.id[:8]}"


def names_of(name: str) -> list[str]:
    """Of the actors that are the shards of a fleet now, in the order of their numbers, by Ray's own account: one that is started again is
    among them, and one that has ended is not.
    """
    every = [it["name"] for it in ray.util.list_named_actors(all_namespaces=True) if it["namespace"] == NAMESPACE]
    named = filter(re.compile(re.escape(name) + r"/\d+").fullmatch, every)
    return sorted(named, key=lambda it: int(it.rpartition("/")[2]))


def shards_of(names: Iterable[str], patience: float, known: Iterable[Shard] = ()) -> Iterator[Shard]:
    """The shards whose actors have these names. One that has just ended is left out. Those that are ``known`` are given as they are: as
    long as a process has such a handle, Ray does not end the actor.
    """
    there = {shard.name: shard for shard in known}
    for name in names:
        with contextlib.suppress(ValueError):
            yield there.get(name) or Shard(ray.get_actor(name, NAMESPACE), patience, name)


class Listed:
    """The shards of a fleet that may change, as :class:`Joining`: Ray's names of actors are the list. ``each``: those known at first."""

    def __init__(self, name: str, each: Sequence[Shard]) -> None:
        self._name, self._patience_s, self._looked_at = name, each[0].patience_s, -_LIST_INTERVAL_S
        self._names = [shard.name for shard in each]

    def left(self) -> bool:
        """Others may be listed."""
        return True

    def has_left(self, storage: RemoteStorage, *, lost: bool) -> bool:
        """``lost``: it may have been listed when the list was looked at."""
        name, now = cast("Shard", storage.connection.access).name, time.monotonic()
        # To ask where Ray has ended would start another one.
        if ray.is_initialized() and (now >= self._looked_at + _LIST_INTERVAL_S or (lost and name in self._names)):
            with contextlib.suppress(RayError, OSError):  # Ray is away: then the shards stay as they are
                self._names, self._looked_at = names_of(self._name), now
        return name not in self._names

    def find(self, known: Sequence[RemoteStorage]) -> Iterator[RemoteStorage]:
        others = sorted({*self._names} - {cast("Shard", it.connection.access).name for it in known})
        for shard in shards_of(others if ray.is_initialized() else (), self._patience_s):
            with contextlib.suppress(Exception):  # it is looked for again
                shard.serve(known[-1].served.schema)
                yield RemoteStorage(Connection(shard))


def answer_of(pending: object, seconds: float, who: str) -> Any:
    """What a call of an actor returns.

    Raises: what it raises. ``ConnectionError``: the actor is gone, or does not answer in so many seconds.
    """
    try:
        return ray.get(pending, timeout=seconds)
    except RayTaskError as error:
        raise error.cause from None
    except (RayError, GetTimeoutError) as error:
        why, kind = str(error).strip().splitlines(), Final if isinstance(error, ActorDiedError) else ConnectionError
        raise kind(f"{who}: the shard does not answer: {why[0] if why else type(error).__name__}") from error


def close_shards(shards: Sequence[Shard]) -> None:
    """End the actors, for good. Their files go, if they are temporary. Starts no thread, as the interpreter may be ending."""
    if not ray.is_initialized():  # they have ended with it
        return
    pending = [shard.actor.close.options(max_task_retries=0).remote() for shard in shards]
    with contextlib.suppress(RayError):
        ray.wait(pending, num_returns=len(pending), timeout=_CLOSE_TIMEOUT_S)
    for shard in shards:
        ray.kill(shard.actor)


def first_described(shards: Sequence[Shard]) -> awaited.Described:
    """What the shard says that answers first: all are made alike. Raises as :meth:`Shard.describe`: none answers."""
    pending = {shard.actor.describe.remote(): shard for shard in shards}
    until = time.monotonic() + shards[0].patience_s
    while True:
        ready, _ = ray.wait([*pending], num_returns=1, timeout=max(0.0, until - time.monotonic()))
        one = ready[0] if ready else next(iter(pending))
        shard = pending.pop(one)
        try:
            return cast("awaited.Described", answer_of(one, max(0.0, until - time.monotonic()), str(shard)))
        except ConnectionError:
            if not pending:
                raise


#: Calls that are made once, in threads of the actor that others do not wait for.
_SAVING = {"max_task_retries": 0, "concurrency_group": "saving"}
_BOARD = {"max_task_retries": 0, "concurrency_group": "board"}
#: Between two looks at what actors do, and for how long one may take to answer at once.
_POLL_INTERVAL_S, _ANSWER_TIMEOUT_S = 0.5, 10.0
#: So much longer than actors wait for each other, they are waited for.
_EXTRA_TIMEOUT_S = 60.0


class SaverOptions(Protocol):
    """Options of a Checkpointer, which actors know in full."""

    @property
    def timeout(self) -> float:
        """For how long ranks wait for each other."""


class ShardSavers:
    """The actors of a buffer as the ranks that save it: what a Checkpointer asks of ``Savers``.

    Args:
        find: the shards that there are now, in the order of the ranks.
        restored: called when the rows are others.
    """

    def __init__(self, find: Callable[[], Sequence[Shard]], restored: Callable[[], None]) -> None:
        self._find, self._restored = find, restored
        self._shards = find()
        self._key = ""
        self._root: Path
        self._options: SaverOptions

    # ---- asking --------------------------------------------------------------------------------------------------------

    def _ask(
        self, name: str, *arguments: object, ranks: Iterable[int] | None = None, **options: object
    ) -> dict[object, int]:
        """Call a method of the savers of some ranks, or of all: what the answers are of."""
        every = range(len(self._shards)) if ranks is None else ranks
        savers = {rank: self._shards[rank].actor.saver.options(**(options or _SAVING)) for rank in every}
        return {saver.remote(name, self._key, *arguments): rank for rank, saver in savers.items()}

    def _answers(self, what: str, pending: dict[object, int], seconds: float, lost: Lost | None = None) -> list[Any]:
        """What actors answer.

        Args:
            what: for messages.
            pending: what was asked of which rank.
            seconds: at most.
            lost: called with the rank of an actor that is gone and why, until it returns True or the others have answered.

        Raises: what they raise; ``RankFailed``: some raised different errors, or are gone.
        """
        until = time.monotonic() + seconds
        found: dict[int, object] = {}
        errors: dict[int, Exception] = {}
        gone: dict[int, str] = {}
        while pending:
            ready, _ = ray.wait([*pending], num_returns=1, timeout=_POLL_INTERVAL_S)
            if not ready and time.monotonic() < until:
                gone = {rank: why for rank, why in gone.items() if lost is not None and not lost(rank, why)}
                continue
            one = ready[0] if ready else next(iter(pending))
            rank = pending.pop(one)
            try:
                found[rank] = answer_of(one, seconds if ready else 0.0, str(self._shards[rank]))
            except ConnectionError as error:
                errors[rank], gone[rank] = error, str(error)
            except Exception as error:  # noqa: BLE001 - raised when all have answered
                errors[rank] = error
        if not errors:
            return [found[rank] for rank in sorted(found)]
        away = {rank: error for rank, error in errors.items() if isinstance(error, ConnectionError)}
        if not away and len({type(error) for error in errors.values()}) == 1:
            raise errors[min(errors)]
        text = "; ".join(f"rank {rank}: {error}" for rank, error in sorted((away or errors).items()))
        causes = {rank: type(error).__name__ for rank, error in errors.items()}
        raise RankFailed(f"{what}: {text}", causes) from errors[min(errors)]

    @property
    def _timeout(self) -> float:
        return self._options.timeout + _EXTRA_TIMEOUT_S

    def _ready(self) -> None:
        """Make Checkpointers again, where an actor was started again since, or shards have joined or left."""
        try:
            known = self._answers("save", self._ask("knows"), self._timeout)
        except RankFailed:  # it may be back now
            known = [False]
        if not all(known) or {it.id for it in self._shards} != {it.id for it in self._find()}:
            self.open(self._root, self._options)

    # ---- what a Checkpointer asks for ----------------------------------------------------------------------------------

    def open(self, root: Path, options: SaverOptions) -> None:
        self._root, self._options, self._key, self._shards = root, options, secrets.token_hex(8), self._find()
        first, patience = self._shards[0].actor, max(shard.patience_s for shard in self._shards)
        ids = [shard.id for shard in self._shards]
        for ranks in (range(1), range(1, len(self._shards))):  # the first one answers the others
            self._answers("Checkpointer", self._ask("open", root, options, first, ids, ranks=ranks), patience)

    def begin(self, step: int, user: Mapping[str, object]) -> None:
        self._ready()
        self._answers("save", self._ask("begin", step, json.dumps(user)), self._timeout)

    def end(self) -> Any:
        """The report of the save: that of the first rank, with the longest pause of all."""
        reports = self._answers("save", self._ask("end"), self._timeout, lost=self._give_up)
        return reports[0]._replace(paused_s=max(report.paused_s for report in reports))

    def _give_up(self, rank: int, why: str) -> bool:
        """Let another actor vote against the save for one that is gone. Whether it has."""
        self._break_off(rank, why)
        for other in {*range(len(self._shards))} - {rank}:
            (asked,) = self._ask("give_up", rank, why, ranks=[other], **_BOARD)
            with contextlib.suppress(ConnectionError):
                if answer_of(asked, _ANSWER_TIMEOUT_S, str(self._shards[other])):
                    return True
        return False

    def restore(self, wanted: object, options: object) -> Any:
        """The report of the restore: that of the first rank, with the sums of all."""
        self._ready()
        try:
            asked = self._ask("restore", wanted, options)
            reports = self._answers("restore", asked, self._timeout, lost=self._break_off)
        except BaseException:  # rows may be gone by now: batches drawn before are of none
            with contextlib.suppress(ConnectionError):
                self._restored()
            raise
        self._restored()
        steps, given_up = sum(report.steps for report in reports), sum(report.given_up for report in reports)
        return reports[0]._replace(steps=steps, given_up=given_up)

    def _break_off(self, rank: int, why: str) -> bool:
        """End the agreements of a restore, of which a rank is gone."""
        if rank:  # else the board is gone, too
            self._ask("break_off", f"rank {rank}: {why}", ranks=[0], **_BOARD)
        return True

    def prune(self, keep: int | None) -> list[str]:
        self._ready()
        return cast("list[str]", self._answers("prune", self._ask("prune", keep, ranks=[0]), self._timeout)[0])
