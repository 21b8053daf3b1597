"""Goals that a batch gets in hindsight, and the rewards that follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from engram import _native
from engram._tensordict import add_fields
from engram.field_paths import public

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engram.expanders.reading import Reading
    from engram.field_paths import FieldPath
    from engram.storages import TensorStorage
    from engram.store import Store
    from engram.types import Entry, Info, SampledStorage


#: The end flag that says nothing of a goal.
_CUT = "truncated"


class Rule(NamedTuple):
    """Which rows get another goal, and which one."""

    goal: int
    """As the native core numbers the strategies."""
    ratio: float
    """The share of a batch."""
    reward: Callable[..., object]
    """The reward of such rows."""
    end: Callable[..., object] | None
    """Whether the goal of such rows ends their episode; None: their end flags stay."""


class Relabelling:
    """Puts goals into batches: reads them where rows are read, and computes the rewards when all rows stand.

    A batch is relabelled in its first rows; one of windows in its first windows, each of which has one goal, drawn for its last step.
    """

    def __init__(self, reading: Reading, rule: Rule, goal: int, achieved: int, reward: int, ends: list[int]) -> None:
        """``goal``, ``achieved``, ``reward``, ``ends``: fields, the latter of end flags.

        Raises ``ValueError``, ``TypeError``: goals of another shape or dtype. ``KeyError``: the rule ends episodes, and no flag does.
        """
        self._rule = rule
        #: End flags, by key.
        self._ends = {reading.fields[number].key: number for number in ends}
        if rule.end is not None and all(key[-1] == _CUT for key in self._ends):
            raise KeyError(
                "sample: Hindsight: end_fn: expected a stored end flag that it can set, such as ('next', 'terminated'), got "
                f"{[*map(public, reading.numbers)]}. Store one, or name it with end_keys=."
            )
        self._achieved, self._reward = achieved, reward
        fields = reading.fields
        self._goals = [goal, *reading.nexts_of(fields[goal].key)]
        source = fields[achieved]
        for number in self._goals:
            field = fields[number]
            if field.shape != source.shape:
                raise ValueError(
                    f"sample: Hindsight: field {field.name}: expected goals of the shape {list(source.shape)} of {source.name}, got "
                    f"{list(field.shape)}. Store both in one shape."
                )
            if field.dtype != source.dtype:
                raise TypeError(
                    f"sample: Hindsight: field {field.name}: expected goals of the dtype {source.dtype} of {source.name}, got "
                    f"{field.dtype}. Store both in one dtype."
                )

    def check(self, reading: Reading) -> None:
        """Raise ``TypeError`` if another expander changes what is relabelled, or sums rewards of other steps."""
        kinds = [column.kind for column in (*reading.columns, *reading.entries.values())]
        if "sum" in kinds or any(column.ahead for column in reading.columns):
            raise TypeError(
                "sample: Hindsight: expected no NStep or RewardToGo around or inside: the rewards that they add up are those of the "
                "stored goals. Relabel single steps."
            )
        for number in (*self._goals, self._achieved, self._reward, *self._ends.values()):
            if reading.columns[number].kind != "row":
                raise TypeError(
                    f"sample: Hindsight: expected {public(reading.fields[number].key)!r} as it is stored, but another expander changes it."
                )

    def native(self, specs: Sequence[tuple[int, int, tuple[int, ...]]]) -> _native.Goals:
        """The native read of goals. ``specs``: of the fields."""
        return _native.Goals(self._rule.goal, self._achieved, specs[self._achieved])

    def rows_of(self, n: int) -> int:
        """How many of ``n`` rows, or windows, get another goal."""
        return int(n * self._rule.ratio)

    def goals(self, native: _native.Goals, memory: Store, table: _native.Trajectories, key: int) -> Goals:
        """Those of a batch that is drawn with a key: none so far."""
        return Goals(self, native, memory, table, key)

    def apply(
        self,
        batch_of: Callable[[list[Tensor], int], object],
        columns: list[Tensor],
        values: Tensor,
        info: Info,
        cut: Tensor | None,
    ) -> None:
        """Put goals ``[n, *shape]`` into the first rows of a batch's columns, and the rewards and end flags that they give.

        Args:
            batch_of: makes what the functions are given, of the first ``n`` rows of columns.
            columns: changed in place.
            values: the goals.
            info: of the batch. The end flags of windows in it are changed in place.
            cut: bool ``[B, 1]``, the marks of steps at which windows end.

        Raises ``RuntimeError``, ``TypeError``: a function returned something else than a reward, or flag, per row.
        """
        n = values.shape[0]
        first = _native.put_goals(columns, self._goals, values, n)
        stored, batch = first[self._reward], batch_of(first, n)
        stored.copy_(self._checked(self._rule.reward(batch), stored))
        if self._rule.end is not None:
            self._end(self._rule.end(batch), first, n, info, cut)

    def _end(self, ended: object, first: list[Tensor], n: int, info: Info, cut: Tensor | None) -> None:
        """Set the end flags of the first ``n`` rows of a batch."""
        if not isinstance(ended, Tensor):
            raise TypeError(f"sample: Hindsight: end_fn: expected a tensor [{n}], got {type(ended).__name__}.")
        if ended.shape not in ((n,), (n, 1)):
            raise RuntimeError(
                f"sample: Hindsight: end_fn: expected [{n}] or [{n}, 1], got {list(ended.shape)}. Return one flag per row of the batch."
            )
        terminal = over = ended.reshape(n) != 0
        for key, number in self._ends.items():
            if key[-1] == _CUT:
                over = over | (first[number].reshape(n, -1) != 0).any(1)
        marked = over if cut is None else over | cut[:n, 0]
        for key, number in self._ends.items():
            if key[-1] == _CUT:
                continue
            terminates = key[-1] == "terminated"
            _put(first[number], terminal if terminates else over)
            if public(key) in info:  # windows end where they are cut
                _put(cast("Tensor", info[public(key)])[:n], terminal if terminates else marked)

    def _checked(self, reward: object, stored: Tensor) -> Tensor:
        if not isinstance(reward, Tensor):
            raise TypeError(
                f"sample: Hindsight: reward_fn: expected a tensor {list(stored.shape)}, got {type(reward).__name__}."
            )
        shape, got = stored.shape, reward.shape
        if got != shape and shape[1:] == (1,) and got == shape[:1]:
            reward, got = reward.unsqueeze(-1), shape
        if got != shape or not torch.can_cast(reward.dtype, stored.dtype):
            raise RuntimeError(
                f"sample: Hindsight: reward_fn: expected {list(shape)} {stored.dtype}, as rewards are stored, got {list(got)} "
                f"{reward.dtype}. Return one reward per row of the batch."
            )
        return reward.detach() if reward.requires_grad else reward


class Goals:
    """The goals of one batch, of rows or of windows."""

    def __init__(
        self, relabelling: Relabelling, native: _native.Goals, memory: Store, table: _native.Trajectories, key: int
    ) -> None:
        """``key``: of the draw."""
        self._relabelling = relabelling
        self._native, self._memory, self._table = native, memory, table
        self._key = key % (1 << 64)
        self._attempt = 0
        #: Rows or windows that get one.
        self._most = 0
        self._found: Tensor | None = None
        #: Steps of each window; None: they are rows.
        self._steps: Tensor | None = None

    def read(self, rows: Tensor, tickets: Tensor, moved: list[int]) -> list[int]:
        """Read the goals of a batch of rows that were read with these tickets: places to draw again, ``moved`` among them."""
        self._most = n = self._relabelling.rows_of(len(rows))
        missing = self._read(rows, tickets, n) if n else []
        return sorted({*moved, *missing}) if missing else moved

    def read_again(self, rows: Tensor, tickets: Tensor, moved: list[int], places: Tensor) -> list[int]:
        """The same of rows that stand at these places of the batch now: which of these rows to draw yet again."""
        some = (places < self._most).nonzero().flatten()
        missing = self._read(rows[some], tickets[some], len(some), places[some]) if len(some) else []
        return sorted({*moved, *some[missing].tolist()}) if missing else moved

    def read_windows(self, rows: Tensor, tickets: Tensor, ends: Tensor) -> list[int]:
        """The goals of windows that end at these places among the rows: places of those without one now."""
        last = ends[: self._relabelling.rows_of(len(ends))]
        self._found, self._steps = None, torch.diff(last, prepend=last.new_full((1,), -1))
        missing = self._read(rows[last], tickets[last], len(last)) if len(last) else []
        return [int(last[place]) for place in missing]

    def _read(self, rows: Tensor, tickets: Tensor, n: int, numbers: Tensor | None = None) -> list[int]:
        """Read the goals of the first ``n`` rows: positions of those that are not there now. ``numbers``: of the goals; None: in order."""
        core, attempt = self._memory.core, self._attempt
        values, missing = self._native.read(core, self._table, rows, tickets, numbers, n, self._key, attempt)
        self._attempt += 1
        if self._found is None or numbers is None:
            self._found = values
        else:
            self._found[numbers] = values
        return missing

    def apply(
        self,
        storage: SampledStorage,
        columns: list[Tensor],
        info: Info,
        computed: Mapping[Entry, bool],
        cut: FieldPath | None = None,
    ) -> None:
        """Relabel the batch that was read.

        Args:
            storage: of the rows.
            columns, info: changed in place.
            computed: entries of ``info`` that are fields of the batch.
            cut: the entry of ``info`` that marks where windows end.

        Raises as :meth:`Relabelling.apply`.
        """
        if self._found is None:
            return
        values = self._found if self._steps is None else self._found.repeat_interleave(self._steps, 0)

        def batch_of(some: list[Tensor], n: int) -> object:
            batch: object = cast("TensorStorage", storage).batch(some, (n,))  # expanders take no other
            if computed:
                made = cast("dict[Entry, Tensor]", info)
                add_fields(
                    batch, {key: made[key][:n].squeeze(-1) if flat else made[key][:n] for key, flat in computed.items()}
                )
            return batch

        marks = None if cut is None else cast("Tensor", info[public(cut)])
        self._relabelling.apply(batch_of, columns, values, info, marks)


def _put(flag: Tensor, value: Tensor) -> None:
    """Set a flag ``[n, …]`` of any dtype to bools ``[n]``."""
    flag.copy_(value.view(len(value), *(1,) * (flag.ndim - 1)))
