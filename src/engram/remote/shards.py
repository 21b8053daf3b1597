"""Clients of shards, stores that actors of Ray serve: where they are, a storage before there is a store, and their checkpoints."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from engram.errors import RankFailed
from engram.remote.connection import Access, Found
from engram.storages import Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from engram.remote import awaited, protocol
    from engram.types import Sampler, Writer

    Lost: TypeAlias = Callable[[int, str], bool]


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
    """

    #: Rows in memory are lost with their node.
    replaces_lost = True

    def __init__(self, actor: Handle, patience: float) -> None:
        self.actor = actor
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
            found: Found | None = self._answer(pending)
        except ConnectionError as error:
            if isinstance(error.__cause__, GetTimeoutError):
                self._pending[schema] = pending
            raise
        return found

    def find(self, known: protocol.Served | None) -> Found:
        """As ``Servers``. A store in memory that was lost with its node begins without rows."""
        found = self.serve(known.schema if known is not None else None)
        if found is None:
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

    def __reduce__(self) -> tuple[type[Shard], tuple[Handle, float]]:
        return Shard, (self.actor, self.patience_s)

    def __str__(self) -> str:
        return f"ray:{self.actor._ray_actor_id.hex()[:8]}"  # type: ignore[attr-defined] # noqa: SLF001 - Ray has no other name of it


def answer_of(pending: object, seconds: float, who: str) -> Any:
    """What a call of an actor returns.

    Raises: what it raises. ``ConnectionError``: the actor is gone, or does not answer in so many seconds.
    """
    try:
        return ray.get(pending, timeout=seconds)
    except RayTaskError as error:
        raise error.cause from None
    except (RayError, GetTimeoutError) as error:
        why = str(error).strip().splitlines()
        raise ConnectionError(f"{who}: the shard does not answer: {why[0] if why else type(error).__name__}") from error


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
            described: awaited.Described = answer_of(one, max(0.0, until - time.monotonic()), str(shard))
        except ConnectionError:
            if not pending:
                raise
        else:
            return described


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
        shards: in the order of their numbers, which are those of the ranks.
        restored: called when the rows are others.
    """

    def __init__(self, shards: Sequence[Shard], restored: Callable[[], None]) -> None:
        self._shards, self._restored = shards, restored
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
        self._raise(what, errors)
        return [found[rank] for rank in sorted(found)]

    def _raise(self, what: str, errors: Mapping[int, Exception]) -> None:
        """Raise what stands for the errors of some ranks, if there are any."""
        if not errors:
            return
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
        """Make Checkpointers again, where an actor was started again since."""
        try:
            known = self._answers("save", self._ask("knows"), self._timeout)
        except RankFailed:  # it may be back now
            known = [False]
        if not all(known):
            self.open(self._root, self._options)

    # ---- what a Checkpointer asks for ----------------------------------------------------------------------------------

    def open(self, root: Path, options: SaverOptions) -> None:
        self._root, self._options, self._key = root, options, secrets.token_hex(8)
        first, patience = self._shards[0].actor, max(shard.patience_s for shard in self._shards)
        for ranks in (range(1), range(1, len(self._shards))):  # the first one answers the others
            self._answers("Checkpointer", self._ask("open", root, options, first, ranks=ranks), patience)

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
        for other, shard in enumerate(self._shards):
            if other == rank:
                continue
            try:
                if answer_of(
                    next(iter(self._ask("give_up", rank, why, ranks=[other], **_BOARD))), _ANSWER_TIMEOUT_S, str(shard)
                ):
                    return True
            except ConnectionError:
                continue
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
