"""The client's side of the checkpoints of shards: each actor saves its own rows, as a rank."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import ray

from engram.errors import RankFailed
from engram.remote.shards import answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from engram.remote.shards import Shard

    Lost: TypeAlias = Callable[[int, str], bool]

    class Options(Protocol):
        """What a Checkpointer was told, as far as its client must know."""

        @property
        def timeout(self) -> float:
            """Seconds for which ranks wait for each other."""


#: Calls that are made once, in threads of the actor that others do not wait for.
_SAVING = {"max_task_retries": 0, "concurrency_group": "saving"}
_BOARD = {"max_task_retries": 0, "concurrency_group": "board"}
#: Between two looks at what actors do, and for how long one may take to answer at once.
_LOOK_S, _ANSWER_S = 0.5, 10.0
#: So much longer than actors wait for each other, they are waited for.
_LONGER_S = 60.0


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
        self._options: Options

    # ---- asking --------------------------------------------------------------------------------------------------------

    def _ask(
        self, name: str, *arguments: object, ranks: Iterable[int] | None = None, **options: object
    ) -> dict[object, int]:
        """Call a method of the savers of some ranks, or of all: what the answers are of."""
        every = range(len(self._shards)) if ranks is None else ranks
        return {
            self._shards[rank].actor.saver.options(**(options or _SAVING)).remote(name, self._key, *arguments): rank
            for rank in every
        }

    def _answers(self, what: str, asked: dict[object, int], seconds: float, lost: Lost | None = None) -> list[Any]:
        """What actors answer.

        Args:
            what: for messages.
            asked: what was asked of which rank.
            seconds: at most.
            lost: called with the rank of an actor that is gone and why, until it returns True or the others have answered.

        Raises: what they raise; ``RankFailed``: some raised different errors, or are gone.
        """
        until = time.monotonic() + seconds
        found: dict[int, object] = {}
        errors: dict[int, Exception] = {}
        gone: dict[int, str] = {}
        while asked:
            ready, _ = ray.wait([*asked], num_returns=1, timeout=_LOOK_S)
            if not ready and time.monotonic() < until:
                gone = {rank: why for rank, why in gone.items() if lost is not None and not lost(rank, why)}
                continue
            one = ready[0] if ready else next(iter(asked))
            rank = asked.pop(one)
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
        said = "; ".join(f"rank {rank}: {error}" for rank, error in sorted((away or errors).items()))
        causes = {rank: type(error).__name__ for rank, error in errors.items()}
        raise RankFailed(f"{what}: {said}", causes) from errors[min(errors)]

    @property
    def _timeout(self) -> float:
        return self._options.timeout + _LONGER_S

    def _ready(self) -> None:
        """Make Checkpointers again, where an actor was started again since."""
        try:
            known = self._answers("save", self._ask("knows"), self._timeout)
        except RankFailed:  # it may be back now
            known = [False]
        if not all(known):
            self.open(self._root, self._options)

    # ---- what a Checkpointer asks for ----------------------------------------------------------------------------------

    def open(self, root: Path, options: Options) -> None:
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
                    next(iter(self._ask("give_up", rank, why, ranks=[other], **_BOARD))), _ANSWER_S, str(shard)
                ):
                    return True
            except ConnectionError:
                continue
        return False

    def restore(self, wanted: object, options: object) -> Any:
        """The report of the restore: that of the first rank, with the sums of all."""
        self._ready()
        try:
            reports = self._answers(
                "restore", self._ask("restore", wanted, options), self._timeout, lost=self._break_off
            )
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
        removed: list[str] = self._answers("prune", self._ask("prune", keep, ranks=[0]), self._timeout)[0]
        return removed
