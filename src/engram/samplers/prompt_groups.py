"""Groups of rows that share a key, such as the answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from engram._support import checks, words
from engram._support.field_paths import FieldPath, checked_path, plain, public
from engram._support.retries import Retries
from engram.errors import EMPTY, NoSampleable
from engram.samplers import _base, staleness
from engram.store import row_indexes, sampled
from engram.types import Draw, Extent

_STRATEGIES = ("random", "recency", "reward", "variance")
#: Of each order of groups: whether any are drawn, the first or the last ones of those that the index keeps in order.
_WHICH = {"random": 0, "freshest": 2, "oldest": 1, "spread": 2}


_Rows: TypeAlias = Literal["random", "recency", "reward", "variance"]


class PromptGroupSampler(staleness.RuledSampler[row_indexes.Groups]):
    """Draws whole groups of rows that share a key, such as the answers to one prompt. For GRPO and other group-relative objectives.

    A batch is laid out group by group: ``batch.reshape(groups, rows of each)``. Groups are equally likely, and none comes twice.

    With ``samples_per_group``, or ``complete=True``, groups are drawn that have as many rows as the batch has of each: no row comes
    twice, also where answers are still missing or were overwritten. Where there are fewer such groups than the batch has, there is no
    batch; ``rb.sample(timeout=…)`` waits for them, so many seconds. Otherwise, where there are fewer groups than that, or a group has too
    few rows, all come, the others are drawn among them again, and there is one warning.

    Rows do not count while a field of ``ready`` holds a NaN in them: store such a field as NaN, and write it when it is known
    (``rb.update_if_present``, ``rb.set_at_``). They do not count, either, once their group was drawn ``max_uses`` times, or when their
    version is more than ``max_staleness`` behind the consumer's. All these rules are those of the index, and every process that draws
    from it has the same ones. A draw is counted before its rows are read, for all rows that the groups have then: so a
    group is handed out ``max_uses`` times in all threads and processes together, and not more often, and if one of them dies between the
    two, they count as drawn. Uses belong to what a row holds: edits keep them, another row in its place has none.

    Every write, from any thread or process and with any sampler, updates the groups: they are in memory of the storage, under the name
    ``index``. A row whose key is edited leaves its group at once, and so does a row that is overwritten or lost with its writer. No
    draw looks through the rows.

    Args:
        num_groups: different groups in a batch; each has ``batch_size / num_groups`` rows.
        samples_per_group: rows of each group; a batch has ``batch_size / samples_per_group`` groups. Give exactly one of the two.
        complete: whether groups with fewer rows are passed over. Default: with ``samples_per_group``.
        group_key: the field with the key: one integer per row, a text, or its bytes, filled up to one length, uint8 ``[n]``;
            in a :class:`LazyStackStorage` a string, too.
        strategy: which rows of a group: ``"random"``, each equally likely and none twice; ``"recency"``, those that were written or
            edited last, the newest at the end; ``"reward"``, the highest rewards, the highest first, and of equal ones the newest;
            ``"variance"``, the rows whose rewards have the largest variance, and of equal ones the largest sum, in ascending order.
            Or a pair, ``("random", "oldest")``: the second one says which groups: ``"random"``, each equally likely; the ``"freshest"``,
            whose newest rows were written or edited last, or the ``"oldest"``; or those with the largest ``"spread"``, variance of the
            rewards of their rows that count. The last three with complete groups of ``samples_per_group``. Without ``max_uses`` they draw
            the same groups again and again.
        reward_key: the field with the rewards that the last two compare: the mean of its entries.
        cache_groups: without effect: groups are never out of date.
        ready: fields of floating numbers, 16 at most. In a :class:`LazyStackStorage` an entry that is None or missing is not ready, too.
        max_uses: draws of a group; None: any number. ``consume_after_n_samples`` of a buffer stands for it.
        max_staleness: how far a row's version may be behind ``consumer_version``; -1: rows need no version.
        policy_version: the field with the version: one number per row. A NaN is never drawn.
        index: samplers by different keys, or with other rules (``ready``, ``max_uses``, ``max_staleness``, groups in order), need
            different names; not in a :class:`LazyStackStorage`. The consumer's version has the same name.

    Raises:
        TypeError: both counts, or none, or no ints; when a buffer takes it: a list storage other than
            :class:`LazyStackStorage`, or a declared ragged field that says no group.
        ValueError: a count below 1, another strategy, ``complete=False`` with ``max_uses``; when a buffer takes it: a list without a
            bound; when a batch is drawn: its size is no multiple of the count.
        NotImplementedError: when a buffer takes it: a storage with ``ndim > 1``.
        KeyError (when drawing): no such field. TypeError: its content is no key, rewards or versions are no real numbers, or a field of
            ``ready`` has integers, of which none is NaN.
        ValueError (when drawing): rewards that are not finite.
        IncompatibleStore (when drawing): the storage's index of that name has groups by another field, or other rules.
        NoSampleable (when drawing): no row, or fewer complete groups than the batch has (a ``RuntimeError``).

    Cost: drawing ``B`` rows takes O(B log rows); with ``"reward"`` and ``"variance"`` the rewards of the groups that were drawn are
    read and sorted; with ``max_uses`` it takes O(log rows) for each row of these groups. Each row written costs O(log rows), and so does
    each that becomes too old; with the largest spread first, also O(rows of its group). The first draw of complete groups of another
    size costs O(rows), as do draws of more than four sizes in turn. Memory: 37 bytes and the key per row of the storage, with
    ``max_uses`` 12 more, with ``max_staleness`` 16 more, with groups in order 28 more; of a list 93.

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

    Answers that are drawn once, as groups of four that all have a reward:

    >>> sampler = PromptGroupSampler(samples_per_group=4, ready=(("next", "reward"),), max_uses=1)
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
    >>> rows = rb.extend(
    ...     TensorDict({"query": torch.arange(8) // 4, ("next", "reward"): torch.full((8,), torch.nan)}, batch_size=[8])
    ... )
    >>> rb.can_sample()
    False
    >>> rb = rb.set_at_(("next", "reward"), torch.ones(4), rows[:4])
    >>> rb.sample()["query"].tolist(), rb.can_sample()
    ([0, 0, 0, 0], False)
    """

    traits = _base.NativeSampler.traits._replace(awaits_rows=True)
    noted = ("num_groups", "samples_per_group", "group_key", "strategy", "reward_key", "cache_groups")
    _warned = False

    def __init__(
        self,
        *,
        num_groups: int | None = None,
        samples_per_group: int | None = None,
        group_key: str | FieldPath = "query",
        strategy: _Rows | tuple[_Rows, Literal["random", "freshest", "oldest", "spread"]] = "random",
        reward_key: str | FieldPath = ("next", "reward"),
        cache_groups: bool = True,
        complete: bool | None = None,
        ready: Sequence[str | FieldPath] = (),
        max_uses: int | None = None,
        max_staleness: int = -1,
        policy_version: str | FieldPath = "policy_version",
        index: str = "main",
    ) -> None:
        name = "PromptGroupSampler"
        if (num_groups is None) == (samples_per_group is None):
            raise TypeError(
                f"{name}: expected one of num_groups and samples_per_group, got num_groups={num_groups} and "
                f"samples_per_group={samples_per_group}. The other one follows from the batch size."
            )
        self.num_groups = None if num_groups is None else checks.check_count(f"{name}: num_groups", num_groups)
        self.samples_per_group = (
            None if samples_per_group is None else checks.check_count(f"{name}: samples_per_group", samples_per_group)
        )
        if not isinstance(complete, bool | None):
            raise TypeError(f"{name}: complete: expected True, False or None, got {complete!r}.")
        self.strategy, self.order = _strategies(strategy)
        self._key = checked_path(group_key, f"{name}: group_key")
        self._reward = checked_path(reward_key, f"{name}: reward_key")
        self.cache_groups = cache_groups
        self.complete = complete
        self._follow(name, self._in_order(), ready, max_staleness, policy_version, index)
        if max_uses is not None:
            self.use_up(max_uses, f"{name}: max_uses")

    def _in_order(self) -> row_indexes.GroupRules:
        """The rules of groups that are kept in order, if they are. Raises ``ValueError``: they are not complete, or not of one size."""
        if self.order == "random":
            return row_indexes.GroupRules()
        if self.samples_per_group is None or not self.whole:
            raise ValueError(
                f"PromptGroupSampler: strategy: {self.order!r}: expected complete groups of one size, which are kept in order, got "
                f"{'num_groups' if self.samples_per_group is None else 'complete=False'}. Give samples_per_group alone."
            )
        if self.order == "spread":
            return row_indexes.GroupRules(order=2, least=self.samples_per_group, reward=self._reward)
        return row_indexes.GroupRules(order=1, least=self.samples_per_group)

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
        return self._of_size(1)

    def _of_size(self, least: int) -> int:
        """How many groups there are of at least so many rows."""
        groups = self._attached()
        return 0 if groups is None else groups.of_size(least, self._floor())

    def use_up(self, max_uses: int, call: str) -> None:
        """Set ``max_uses``, before a buffer takes it. ``call``: for messages. Raises ``ValueError``: groups may not be complete.

        >>> from engram import PromptGroupSampler
        >>> sampler = PromptGroupSampler(samples_per_group=8)
        >>> sampler.use_up(1, "ReplayBuffer")
        >>> sampler
        PromptGroupSampler(samples_per_group=8, max_uses=1)
        """
        uses = checks.check_count(call, max_uses, most=row_indexes.MAX_USES - 1)
        if not self.whole:
            raise ValueError(
                f"{call}: expected complete groups, as a row that comes twice in a batch is used more often, got a sampler of others. Give "
                "it complete=True."
            )
        self._rules = self._rules._replace(max_uses=uses)

    # ---- where the groups are ------------------------------------------------------------------------------------------

    def bind(self, storage: sampled.SampledStorage) -> None:
        """Meet the storage whose rows are drawn. Raises as the class says.

        >>> from engram import ListStorage, PromptGroupSampler
        >>> PromptGroupSampler(num_groups=1).bind(ListStorage(10))
        Traceback (most recent call last):
        TypeError: PromptGroupSampler: expected a tensor storage, ...
        """
        if storage is self._storage:
            return
        if storage.ndim > 1:
            raise NotImplementedError(
                f"PromptGroupSampler: expected a storage with ndim=1, whose rows are in groups one by one, got ndim={storage.ndim}."
            )
        made = storage.traits.has_fields and storage.memory is not None  # before, declared fields may be refused
        groups = None if made else self._index_of(storage)
        self._storage, self._index = storage, groups
        if self._rules.version is not None:
            self._consumer.bind(storage)

    def _index_of(self, storage: sampled.SampledStorage) -> row_indexes.Groups | None:
        by_reward = self.strategy in ("reward", "variance") or self._rules.reward is not None
        return storage.groups(self.index_name, self._key, self._reward if by_reward else None, self._rules)

    @property
    def whole(self) -> bool:
        """Whether only complete groups are drawn."""
        return self.samples_per_group is not None if self.complete is None else self.complete

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        _base.check_drawable(extent.size)
        groups, each = self._shape(batch_size)
        found, repeated = self._drawn(groups, each, key, _NO_ROWS)
        self._warn_of(repeated, groups, each)
        return found

    def _draw_beside(self, before: Tensor, extent: Extent, batch_size: int, key: int) -> Draw:
        """Groups that are not in the batch yet, or those that are where there are no others. Of fewer than are asked for all are drawn."""
        _base.check_drawable(extent.size)
        groups, each = self._shape(batch_size)
        known = 0 if self._rules.max_uses == 1 else len(before) // each
        there = self._of_size(each if self.whole else 1) - known
        draw, repeated = self._drawn(max(1, min(groups, there)), each, key, before)
        self._warn_of(repeated, groups, each)
        return draw

    def were_read(self, draw: Draw, *, failed: bool = False) -> None:
        """As of every sampler: where uses are counted, the groups count as used once less.

        >>> import torch
        >>> from engram import LazyTensorStorage, PromptGroupSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=PromptGroupSampler(samples_per_group=2, max_uses=1), batch_size=2)
        >>> _ = rb.extend({"query": torch.tensor([7, 7])})
        >>> drawn = rb.sampler.draw(rb.storage.extent(), 2, key=7)
        >>> before = rb.can_sample()
        >>> rb.sampler.were_read(drawn, failed=True)
        >>> before, rb.can_sample()
        (False, True)
        """
        groups = self._attached()
        if failed and self._rules.max_uses is not None and groups is not None and draw.tickets is not None:
            groups.take_back(draw.rows.reshape(-1), draw.tickets.reshape(-1))

    @property
    def rows_of_unit(self) -> int:
        """Rows of a group. Raises ``ValueError``: that follows from the size of a batch, as there is ``num_groups``."""
        if self.samples_per_group is None:
            raise ValueError(
                f"sample: max_tokens: expected samples_per_group=…, which says what is a group, got num_groups={self.num_groups}."
            )
        return self.samples_per_group

    def can_sample(self, storage: sampled.SampledStorage, batch_size: int) -> bool:
        """Whether there are the groups of such a batch. Raises as drawing, but not ``NoSampleable``.

        >>> import torch
        >>> from engram import LazyTensorStorage, PromptGroupSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PromptGroupSampler(samples_per_group=2))
        >>> _ = rb.extend({"query": torch.tensor([7, 9, 9])})
        >>> rb.can_sample(2), rb.can_sample(4)
        (True, False)
        """
        if not super().can_sample(storage, batch_size):
            return False
        self.bind(storage)
        groups, each = self._shape(batch_size)
        return self._of_size(each) >= groups if self.whole else self.groups > 0

    def draw_again(self, extent: Extent, drawn: Draw, moved: list[int], key: int) -> tuple[list[int], Draw]:
        """Other groups for those that have lost a row. A group is drawn as a whole.

        The groups that stay are left out by their rows. If all rows of one have moved, too, the index cannot tell which group they were
        of, so that it is drawn again as well. A row that has its ticket after a draw had it during the draw.

        >>> import torch
        >>> from engram import LazyTensorStorage, PromptGroupSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=PromptGroupSampler(samples_per_group=2))
        >>> _ = rb.extend({"query": torch.tensor([5, 5, 7, 7, 9, 9])})
        >>> extent = rb.storage.extent()
        >>> drawn = rb.sampler.draw(extent, 4, key=7)
        >>> places, others = rb.sampler.draw_again(extent, drawn, [1], key=8)
        >>> places, bool(torch.isin(others.rows, drawn.rows[2:]).any())  # a group that is not in the batch
        ([0, 1], False)
        """
        _base.check_drawable(extent.size)
        assert self._storage is not None  # it has groups
        assert drawn.tickets is not None
        groups, each = self._shape(len(drawn.rows))
        rows, tickets = drawn.rows.reshape(groups, each), drawn.tickets.reshape(groups, each)
        lost = torch.zeros(groups, dtype=torch.bool, device="cpu")
        lost[[place // each for place in moved]] = True
        if self._rules.max_uses is not None:
            return self._draw_used_again(rows, tickets, lost, key)
        while True:
            found, repeated = self._drawn(int(lost.sum()), each, key, rows[~lost].reshape(-1))
            known = self._storage.tickets_of(drawn.rows).reshape(groups, each) == tickets
            unknown = ~lost & ~known.any(-1)
            if not unknown.any():
                break
            lost |= unknown
        self._warn_of(repeated, groups, each)
        return lost.repeat_interleave(each).nonzero().flatten().tolist(), found

    def _draw_used_again(self, rows: Tensor, tickets: Tensor, lost: Tensor, key: int) -> tuple[list[int], Draw]:
        """The same where uses are counted: a group whose rows were edited only, and are one still, is read again: its use is counted.

        Where there are no others, the groups that stay count as used once less.

        Args:
            rows, tickets: int64 ``[groups, each]``, of the batch.
            lost: of each group, whether a row has moved.
            key: of the draw.
        """
        assert self._storage is not None  # it has groups
        now = self._storage.tickets_of(rows.reshape(-1)).reshape(rows.shape)
        edited = torch.tensor(
            [bool(lost[i]) and self._is_still_one(rows[i], tickets[i], now[i]) for i in range(len(rows))], device="cpu"
        )
        gone = lost & ~edited
        rows, tickets = rows.clone(), torch.where(edited.unsqueeze(-1), now, tickets)
        if gone.any():
            try:
                found, repeated = self._drawn(int(gone.sum()), rows.shape[1], key, rows[~gone].reshape(-1))
            except NoSampleable:
                self.were_read(Draw(rows[~gone], tickets[~gone]), failed=True)
                raise
            self._warn_of(repeated, *rows.shape)
            assert found.tickets is not None  # of groups they are known
            rows[gone] = found.rows.reshape(-1, rows.shape[1])
            tickets[gone] = found.tickets.reshape(-1, rows.shape[1])
        places = lost.repeat_interleave(rows.shape[1]).nonzero().flatten().tolist()
        return places, Draw(rows[lost].reshape(-1), tickets[lost].reshape(-1))

    def _is_still_one(self, rows: Tensor, tickets: Tensor, now: Tensor) -> bool:
        """Whether the rows of a group, int64 ``[each]``, hold the same writes, and have one key. ``now``: their tickets."""
        assert self._storage is not None  # it has groups
        before = self._storage.writes_of(rows, tickets)
        if not bool((now >= 0).all()) or not torch.equal(self._storage.writes_of(rows, now), before):
            return False
        keys, moved = self._storage.field(self._key, rows, now)
        first = keys[0]
        return not moved and all(bool(torch.as_tensor(key == first).all()) for key in keys)

    def _shape(self, batch_size: int) -> tuple[int, int]:
        """Groups of a batch, and rows of each. Raises ``ValueError``: the size is no multiple of what is given."""
        name = "num_groups" if self.num_groups else "samples_per_group"
        given: int = getattr(self, name)
        if batch_size % given:
            raise ValueError(
                f"sample: expected a batch size that is a multiple of {name}={given}, so that all groups are equally large, got "
                f"{batch_size}. Use {max(batch_size // given, 1) * given}, or another {name}."
            )
        return (given, batch_size // given) if self.num_groups else (batch_size // given, given)

    def _drawn(self, groups: int, each: int, key: int, without: Tensor) -> tuple[Draw, bool]:
        """Rows of some groups, and whether some come again. ``without``: rows whose groups the batch has already."""
        of, retries, floor = self._attached(), Retries(), self._floor()
        asked = row_indexes.GroupDraw(self.strategy, groups, each, self.whole, floor, _WHICH[self.order])
        while True:
            try:
                found = None if of is None else of.draw(retries.key_of(key), asked, without)
            except ValueError as error:
                raise ValueError(
                    f'sample: {public(self._reward)!r}: {error}. Store another number there, or use strategy="random".'
                ) from error
            if found is None:
                raise NoSampleable(EMPTY if of is None else self._too_few(of, asked, len(without) // each))
            if not isinstance(found, int):
                rows, tickets, repeated = found
                return Draw(rows, tickets), repeated
            retries.again(torch.tensor([found], device="cpu"), [0], ", of a group,")

    def _too_few(self, of: row_indexes.Groups, asked: row_indexes.GroupDraw, others: int) -> str:
        """What is said where nothing was drawn. ``others``: groups that the batch has already."""
        there = of.count
        why = self._passed_over() if self._rules.exclude or self._rules.max_uses is not None else ""
        if not asked.complete:
            return f"sample: no row can be drawn now: {why}." if why else EMPTY
        rows = "row" if asked.each == 1 else "rows"
        complete = of.of_size(asked.each)
        more = f" besides the {others} of the batch that are there already" if others else ""
        return (
            f"sample: expected {asked.groups} complete groups, of {asked.each} {rows} or more each{more}, got {complete} of {there} groups"
            f"{'; ' + why if why else ''}. Add data, sample fewer rows, or draw with complete=False, which repeats rows."
        )

    def _warn_of(self, repeated: bool, groups: int, each: int) -> None:
        """Once, of a batch of so many groups in which something comes again."""
        if repeated and not self._warned:
            self._warned = True
            words.warn(
                f"PromptGroupSampler: expected {groups} groups of {each} rows or more, got fewer groups, or smaller ones: some rows come "
                "more than once in a batch. Add data, or lower num_groups or samples_per_group."
            )

    # ---- state ---------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, object]:
        complete = {} if self.complete is None else {"complete": self.complete}
        strategy = self.strategy if self.order == "random" else plain((self.strategy, self.order))
        return {**super().config(), "strategy": strategy, "index": self.index_name, **complete, **self._rules_config()}


def _strategies(given: object) -> tuple[str, str]:
    """Which rows of a group, and which groups. Raises ``ValueError``: no such strategies."""
    pair = tuple(given) if isinstance(given, tuple | list) else (given, "random")
    if len(pair) == 2 and pair[0] in _STRATEGIES and pair[1] in _WHICH:
        return pair
    raise ValueError(
        f"PromptGroupSampler: strategy: expected one of {_STRATEGIES}, or a pair of one of them and one of {tuple(_WHICH)}, got {given!r}."
    )


_NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")
