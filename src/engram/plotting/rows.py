"""What figures show of a buffer, as arrays: read through what the buffer, its storage and its sampler offer to every program."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import torch

from engram.consumption import KIND as COUNTS
from engram.field_paths import public
from engram.persist.roles import boundary_fields, roles_of
from engram.priorities import KIND as PRIORITIES
from engram.samplers import PrioritizedSampler
from engram.samplers._base import DeclaredSampler
from engram.usage import UsageIndex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.field_paths import FieldPath
    from engram.format.schema import Field
    from engram.storages import Storage
    from engram.types import Extent

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

#: Rows that are looked at, at most.
MOST = 1 << 16
_LAST_STEP = 2


class Watched(Protocol):
    """The part of a buffer that figures read."""

    @property
    def storage(self) -> Storage: ...
    @property
    def sampler(self) -> object: ...
    def stats(self) -> dict[str, float]: ...


class Priorities(NamedTuple):
    """Of live rows, in row order, and of the sampler that draws by them."""

    leaves: Floats
    """``(priority + eps) ** alpha``, which draws are proportional to."""
    smallest: float
    """The smallest positive leaf of all rows, which has weight 1; infinite if there is none."""
    alpha: float
    beta: float
    eps: float

    @property
    def values(self) -> Floats:
        """The priorities themselves. With ``alpha=0`` leaves do not tell them: all are 1."""
        if self.alpha == 0:
            return np.ones_like(self.leaves)
        values: Floats = np.maximum(self.leaves ** (1 / self.alpha) - self.eps, 0)
        return values

    @property
    def weights(self) -> Floats:
        """Importance weights, of rows that can be drawn."""
        weights: Floats = (self.leaves[self.leaves > 0] / self.smallest) ** -self.beta
        return weights


class Trajectories(NamedTuple):
    """Whole trajectories, in the order of their last steps."""

    returns: Floats
    lengths: Ints
    ends: Ints
    """Writes that came after the last step."""


def looked_at(storage: Storage, extent: Extent, most: int) -> tuple[Tensor, Tensor]:
    """Live rows at even distances in row order, ``most`` at most, and their tickets. Those that hold nothing are left out."""
    ranks = torch.arange(min(extent.size, most), device="cpu")
    rows = extent.rows(ranks * extent.size // len(ranks))
    numbers, tickets = rows.numpy(), storage.tickets_of(rows).numpy()
    live = tickets >= 0  # by NumPy: torch's threads would wait for each other where other processes have the cores
    return torch.from_numpy(numbers[live]), torch.from_numpy(tickets[live])


class Scan:
    """Reads a buffer for one figure.

    Args:
        buffer: whose rows are read.
        call: what messages begin with.
        most: rows to look at, at most: if more are live, as many at even distances.

    Raises ``RuntimeError``: the buffer is empty, or a connection.
    """

    def __init__(self, buffer: Watched, call: str, most: int = MOST) -> None:
        self._storage, self._call = buffer.storage, call
        if self._storage.traits.is_remote:
            raise RuntimeError(
                f"{call}: expected the rows in this process, the buffer is a connection. Call it where the store is"
                f"{': engram plot DIR.' if call.startswith('plot.') else '.'}"
            )
        extent = self._storage.extent()
        if not extent.size:
            before = "drawing it" if call.startswith("plot.") else "asking"
            raise RuntimeError(f"{call}: the buffer is empty. Add data before {before}.")
        self._sampler, self.extent = buffer.sampler, extent
        self.rows, self._tickets = looked_at(self._storage, extent, most)
        #: Live rows for each that is looked at.
        self.scale = extent.size / max(len(self.rows), 1)

    def ages(self) -> Ints:
        """int64 ``[n]``: writes, of single rows, that came after each row."""
        return self._ages(self._tickets)

    def ages_of(self, rows: Ints) -> Floats:
        """float64 ``[n]``: ages of these rows, NaN of those that hold nothing."""
        which = torch.from_numpy(rows)
        tickets = self._storage.tickets_of(which)
        live = (tickets >= 0) & self.extent.contains(which)
        return np.where(live.numpy(), self._ages(tickets), np.nan)

    def _ages(self, tickets: Tensor) -> Ints:
        ages: Ints = (self._storage.next_number() - 1 - tickets).clamp(min=0).numpy()
        return ages

    @property
    def has_priorities(self) -> bool:
        """Whether :meth:`priorities` has something to say."""
        return self._index(PRIORITIES) is not None

    def priorities(self) -> Priorities:
        """Raises ``RuntimeError``: the sampler has none. Copies 8 bytes a row."""
        state: Mapping[str, object] | None = None
        sampler = self._sampler
        name = self._index(PRIORITIES)
        if name is not None:
            state = self._storage.priorities_in_use(name)
            if state is None and isinstance(sampler, PrioritizedSampler):  # of a list
                state = sampler.priorities().state(self.extent.capacity)
        if state is None:
            raise RuntimeError(
                f"{self._call}: expected a sampler with priorities, such as PrioritizedSampler, got {type(sampler).__name__}."
            )
        leaves = np.maximum(np.asarray(state["leaves"]), 0)  # -0.0 is a priority of zero
        alpha, beta, eps = (cast("float", state[name]) for name in ("alpha", "beta", "eps"))
        return Priorities(leaves[self.rows.numpy()], float(leaves[leaves > 0].min(initial=math.inf)), alpha, beta, eps)

    def counts(self) -> tuple[Ints, int]:
        """How often each row was drawn, and how often at most. Raises ``RuntimeError``: nothing counts. Copies 4 bytes a row."""
        name, sampler, index = self._index(COUNTS), self._sampler, None
        usage = None if self._storage.memory is None else UsageIndex.in_use(self._storage.memory)
        if usage is not None and name is None:
            often: Ints = usage.counts(self.rows).numpy()
            return often, int(often.max(initial=0))
        if name is not None and isinstance(sampler, DeclaredSampler) and sampler.draws_of_a_row is not None:
            most = sampler.draws_of_a_row
            index = self._storage.consumption(name, most)
        if index is None:
            raise RuntimeError(
                f"{self._call}: expected draws to be counted, got {type(sampler).__name__} without. Call rb.count_usage() before."
            )
        return index.counts(self.extent.capacity).numpy()[self.rows.numpy()].astype(np.int64), most

    def _index(self, kind: str) -> str | None:
        """The name of the sampler's index of that kind."""
        indexes = self._sampler.own_indexes if isinstance(self._sampler, DeclaredSampler) else ()
        return next((name for name, found in indexes if found == kind), None)

    # ---- trajectories ------------------------------------------------------------------------------------------------

    def trajectories(self, reward: FieldPath | None, most: int = MOST) -> Trajectories:
        """Whole trajectories among the newest rows, ``most`` at most.

        A trajectory whose first step may have been overwritten is left out, and so is one without an end or with a lost row.

        Raises ``RuntimeError``: no field is a reward, or none ends trajectories. ``KeyError``: no such field.
        """
        fields = () if self._storage.memory is None else self._storage.memory.schema.fields
        key, signals = self._reward(fields, reward), Ends.of(fields)
        if not signals.fields:
            raise RuntimeError(
                f"{self._call}: expected a field that ends trajectories, such as ('next', 'done'), got {_shown(fields)}."
            )
        width = math.prod(self._storage.columns)
        length = self.extent.capacity // len(self.extent.filled)
        each = max(most // len(self.extent.filled) // width, 1) * width
        found = []
        for lane, (filled, seam) in enumerate(zip(self.extent.filled, self.extent.seam, strict=True)):
            count, start = min(filled, each), lane * length
            # The row that is written next lies behind the newest one.
            places = (seam - start + torch.arange(-count, 0, device="cpu")) % length
            rows = (start + places).reshape(-1, width)
            whole = count == filled < length
            found += [self._of_track(rows[:, i].contiguous(), key, signals, whole) for i in range(width) if count]
        returns, lengths, ends = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(-ends, kind="stable")
        return Trajectories(returns[order], lengths[order], ends[order])

    def _reward(self, fields: Sequence[Field], asked: FieldPath | None) -> FieldPath:
        keys = [field.key for field in fields]
        if asked is not None:
            if asked not in keys:
                raise KeyError(
                    f"{self._call}: reward: expected one of the fields {_shown(fields)}, got {public(asked)!r}."
                )
            return asked
        rewards = sorted((key for key in keys if key[-1] == "reward"), key=lambda key: (len(key), key[0] != "next"))
        if not rewards:
            raise RuntimeError(
                f"{self._call}: expected a field called 'reward', got {_shown(fields)}. Name the one that is it with reward=."
            )
        return next((key for key in rewards if key == ("next", "reward")), rewards[0])

    def _of_track(self, rows: Tensor, reward: FieldPath, signals: Ends, whole: bool) -> Trajectories:
        """Of rows of one track, oldest first. ``whole``: the first one is the first that the track ever had."""
        tickets = self._storage.tickets_of(rows)
        lost = (tickets < 0).numpy()
        kept, expected = rows[~torch.from_numpy(lost)], tickets[tickets >= 0]
        columns = {}
        for key in (reward, *signals.fields):
            column, moved = self._storage.field(key, kept, expected)
            values = np.zeros(len(rows))
            values[~lost] = column.reshape(len(kept), -1).sum(1, dtype=torch.float64).cpu().numpy()
            places = np.flatnonzero(~lost)[moved]  # written again meanwhile
            lost[places] = True
            columns[key] = values
        is_end = signals.are_set(columns)
        stops = np.flatnonzero(is_end)
        starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
        before = np.concatenate([[0], np.cumsum(lost)])
        good = before[stops + 1] == before[starts]
        good &= (starts > 0) | whole
        total = np.concatenate([[0.0], np.cumsum(columns[reward])])
        return Trajectories(
            (total[stops + 1] - total[starts])[good], (stops + 1 - starts)[good], self._ages(tickets)[stops[good]]
        )


class Ends(NamedTuple):
    """The fields that end trajectories."""

    flags: tuple[FieldPath, ...]
    types: tuple[FieldPath, ...]
    ids: tuple[FieldPath, ...]

    @classmethod
    def of(cls, fields: Sequence[Field]) -> Ends:
        meant = boundary_fields(fields, roles_of(fields))
        flags = [field.key for role in ("done", "terminated", "truncated") for field in meant[role]]
        types = [field.key for field in meant["last"]]
        ids = [field.key for field in meant["traj_id"]]
        return cls(tuple(flags), tuple(types), tuple(ids))

    @property
    def fields(self) -> tuple[FieldPath, ...]:
        return self.flags + self.types + self.ids

    def are_set(self, columns: Mapping[FieldPath, Floats]) -> Bools:
        """Whether each step is the last one of its trajectory. ``columns``: sums of the fields, ``[n]`` each."""
        ends = [columns[key] != 0 for key in self.flags] + [columns[key] == _LAST_STEP for key in self.types]
        ends += [np.append(np.diff(columns[key]) != 0, False) for key in self.ids]
        found: Bools = np.logical_or.reduce(ends)
        return found


def _shown(fields: Sequence[Field]) -> list[str | FieldPath]:
    return [public(field.key) for field in fields]
