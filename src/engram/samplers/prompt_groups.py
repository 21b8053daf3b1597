"""Groups of rows that share a key, such as the answers to one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from engram._support.checks import check_count
from engram._support.field_paths import checked_path, public
from engram._support.retries import Retries
from engram._support.words import warn
from engram.errors import EMPTY, NoSampleable
from engram.samplers._base import NativeSampler, check_drawable
from engram.store import check_index_name
from engram.types import Draw

if TYPE_CHECKING:
    from torch import Tensor

    from engram._support.field_paths import FieldPath
    from engram.store.row_indexes import Groups
    from engram.store.sampled import SampledStorage
    from engram.types import Extent

_STRATEGIES = ("random", "recency", "reward", "variance")


class GroupSampler(NativeSampler):
    """What draws whole groups. :class:`PromptGroupSampler` has the arguments."""

    num_groups: int | None
    samples_per_group: int | None
    strategy: str
    index_name: str
    _key: FieldPath
    _reward: FieldPath
    _warned = False
    _storage: SampledStorage | None = None
    _groups: Groups | None = None

    # ---- where the groups are ------------------------------------------------------------------------------------------

    def bind(self, storage: SampledStorage) -> None:
        """Meet the storage whose rows are drawn. Raises as the class says."""
        if storage is self._storage:
            return
        if storage.ndim > 1:
            raise NotImplementedError(
                f"PromptGroupSampler: expected a storage with ndim=1, whose rows are in groups one by one, got ndim={storage.ndim}."
            )
        groups = None if storage.traits.has_fields else self._groups_of(storage)  # first: it may refuse
        self._storage, self._groups = storage, groups

    def _groups_of(self, storage: SampledStorage) -> Groups | None:
        by_reward = self.strategy in ("reward", "variance")
        return storage.groups(self.index_name, self._key, self._reward if by_reward else None)

    def _attached(self) -> Groups | None:
        """The groups; None while nothing was ever written."""
        if self._groups is None and self._storage is not None and not self._storage.closed:
            self._groups = self._groups_of(self._storage)
        return self._groups

    def moved(self) -> None:
        self._groups = None

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        check_drawable(extent.size)
        groups, each = self._shape(batch_size)
        found, repeated = self._drawn(groups, each, key, _NO_ROWS)
        self._warn_of(repeated, groups, each)
        return found

    def draw_again(self, extent: Extent, drawn: Draw, moved: list[int], key: int) -> tuple[list[int], Draw]:
        """Other groups for those that have lost a row. A group is drawn as a whole.

        The groups that stay are left out by their rows. If all rows of one have moved, too, the index cannot tell which group they were
        of, so that it is drawn again as well. A row that has its ticket after a draw had it during the draw.
        """
        check_drawable(extent.size)
        assert self._storage is not None  # it has groups
        assert drawn.tickets is not None
        groups, each = self._shape(len(drawn.rows))
        rows, tickets = drawn.rows.reshape(groups, each), drawn.tickets.reshape(groups, each)
        lost = torch.zeros(groups, dtype=torch.bool, device="cpu")
        lost[[place // each for place in moved]] = True
        while True:
            found, repeated = self._drawn(int(lost.sum()), each, key, rows[~lost].reshape(-1))
            known = self._storage.tickets_of(drawn.rows).reshape(groups, each) == tickets
            unknown = ~lost & ~known.any(-1)
            if not unknown.any():
                break
            lost |= unknown
        self._warn_of(repeated, groups, each)
        return lost.repeat_interleave(each).nonzero().flatten().tolist(), found

    def _shape(self, batch_size: int) -> tuple[int, int]:
        """Groups of a batch, and rows of each. Raises ``ValueError``: the size is no multiple of what is given."""
        name, given = (
            ("num_groups", self.num_groups) if self.num_groups else ("samples_per_group", self.samples_per_group)
        )
        assert given is not None  # one of them is
        if batch_size % given:
            raise ValueError(
                f"sample: expected a batch size that is a multiple of {name}={given}, so that all groups are equally large, got "
                f"{batch_size}. Use {max(batch_size // given, 1) * given}, or another {name}."
            )
        return (given, batch_size // given) if self.num_groups else (batch_size // given, given)

    def _drawn(self, groups: int, each: int, key: int, without: Tensor) -> tuple[Draw, bool]:
        """Rows of some groups, and whether some come again. ``without``: rows whose groups the batch has already."""
        of, retries = self._attached(), Retries()
        while True:
            try:
                found = None if of is None else of.draw(self.strategy, retries.key_of(key), groups, each, without)
            except ValueError as error:
                raise ValueError(
                    f'sample: {public(self._reward)!r}: {error}. Store another number there, or use strategy="random".'
                ) from error
            if found is None:
                raise NoSampleable(EMPTY)
            if not isinstance(found, int):
                rows, tickets, repeated = found
                return Draw(rows, tickets), repeated
            retries.again(torch.tensor([found], device="cpu"), [0], ", of a group,")

    def _warn_of(self, repeated: bool, groups: int, each: int) -> None:
        """Once, of a batch of so many groups in which something comes again."""
        if repeated and not self._warned:
            self._warned = True
            warn(
                f"PromptGroupSampler: expected {groups} groups of {each} rows or more, got fewer groups, or smaller ones: some rows come "
                "more than once in a batch. Add data, or lower num_groups or samples_per_group."
            )

    # ---- state ---------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, object]:
        return {**super().config(), "index": self.index_name}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_storage": None, "_groups": None}


class PromptGroupSampler(GroupSampler):
    """Draws whole groups of rows that share a key, such as the answers to one prompt. For GRPO and other group-relative objectives.

    A batch is laid out group by group: ``batch.reshape(groups, rows of each)``. Groups are equally likely, and none comes twice. Where
    there are fewer groups than that, or a group has too few rows, all come, the others are drawn among them again, and there is one
    warning.

    Every write, from any thread or process and with any sampler, updates the groups: they are in memory of the storage, under the name
    ``index``. A row whose key is edited leaves its group at once, and so does a row that is overwritten or lost with its writer. No
    draw looks through the rows.

    Args:
        num_groups: different groups in a batch; each has ``batch_size / num_groups`` rows.
        samples_per_group: rows of each group; a batch has ``batch_size / samples_per_group`` groups. Give exactly one of the two.
        group_key: the field with the key: one integer per row, or the bytes of a text that are filled up to one length, uint8 ``[n]``;
            in a :class:`LazyStackStorage` a string, too.
        strategy: which rows of a group: ``"random"``, each equally likely and none twice; ``"recency"``, those that were written or
            edited last, the newest at the end; ``"reward"``, the highest rewards, the highest first, and of equal ones the newest;
            ``"variance"``, the rows whose rewards have the largest variance, and of equal ones the largest sum, in ascending order.
        reward_key: the field with the rewards that the last two compare: the mean of its entries.
        cache_groups: without effect: groups are never out of date.
        index: samplers by different keys need different names; not in a :class:`LazyStackStorage`.

    Raises:
        TypeError: both counts, or none, or no ints; when a buffer takes it: a list storage other than
            :class:`LazyStackStorage`. ValueError: a count below 1, another strategy; when a buffer takes it: a list without a bound; when
            a batch is drawn: its size is no multiple of the count.
        NotImplementedError: when a buffer takes it: a storage with ``ndim > 1``.
        KeyError (when drawing): no such field. TypeError: its content is no key, or rewards are no real numbers.
        ValueError (when drawing): rewards that are not finite.
        IncompatibleStore (when drawing): the storage's index of that name has groups by another field.
        NoSampleable (when drawing): no row (a ``RuntimeError``).

    Cost: drawing ``B`` rows takes O(B log rows); with ``"reward"`` and ``"variance"`` the rewards of the groups that were drawn are
    read and sorted. Each row written costs O(log rows). Memory: 36 bytes and the key per row of the storage;
    of a list 76.

    >>> import torch
    >>> from engram import LazyTensorStorage, PromptGroupSampler, TensorDictReplayBuffer
    >>> from tensordict import TensorDict
    >>> rb = TensorDictReplayBuffer(
    ...     storage=LazyTensorStorage(100), sampler=PromptGroupSampler(num_groups=2, strategy="reward"), batch_size=4
    ... )
    >>> _ = rb.extend(
    ...     TensorDict(
    ...         {"query": torch.arange(12) // 4, ("next", "reward"): torch.arange(12.0)}, batch_size=[12]
    ...     )
    ... )
    >>> batch = rb.sample()
    >>> (batch["next", "reward"] % 4).reshape(2, 2).tolist()  # the two best of each group
    [[3.0, 2.0], [3.0, 2.0]]
    """

    noted = ("num_groups", "samples_per_group", "group_key", "strategy", "reward_key", "cache_groups")

    def __init__(
        self,
        *,
        num_groups: int | None = None,
        samples_per_group: int | None = None,
        group_key: str | FieldPath = "query",
        strategy: Literal["random", "recency", "reward", "variance"] = "random",
        reward_key: str | FieldPath = ("next", "reward"),
        cache_groups: bool = True,
        index: str = "main",
    ) -> None:
        name = "PromptGroupSampler"
        if (num_groups is None) == (samples_per_group is None):
            raise TypeError(
                f"{name}: expected one of num_groups and samples_per_group, got num_groups={num_groups} and "
                f"samples_per_group={samples_per_group}. The other one follows from the batch size."
            )
        if strategy not in _STRATEGIES:
            raise ValueError(f"{name}: strategy: expected one of {_STRATEGIES}, got {strategy!r}.")
        check_index_name(index, f"{name}: index")
        self.num_groups = None if num_groups is None else check_count(f"{name}: num_groups", num_groups)
        self.samples_per_group = (
            None if samples_per_group is None else check_count(f"{name}: samples_per_group", samples_per_group)
        )
        self._key = checked_path(group_key, f"{name}: group_key")
        self._reward = checked_path(reward_key, f"{name}: reward_key")
        self.strategy: str = strategy
        self.cache_groups = cache_groups
        self.index_name = index

    @property
    def group_key(self) -> str | FieldPath:
        """The field that says which group a row is in."""
        return public(self._key)

    @property
    def reward_key(self) -> str | FieldPath:
        """The field with the rewards."""
        return public(self._reward)

    @property
    def groups(self) -> int:
        """How many groups there are now; 0 before a buffer has it.

        >>> import torch
        >>> from engram import LazyTensorStorage, PromptGroupSampler, ReplayBuffer
        >>> sampler = PromptGroupSampler(num_groups=1, group_key="prompt")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=2)
        >>> _ = rb.extend({"prompt": torch.tensor([7, 7, 9]), "x": torch.zeros(3)})
        >>> sampler.groups
        2
        """
        groups = self._attached()
        return 0 if groups is None else groups.count


_NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")
