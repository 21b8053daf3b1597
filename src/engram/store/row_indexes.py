"""The indexes that a store has besides priorities: how often rows were drawn and sampled, where an epoch is, which rows changed, which
belong together, and the version of who consumes them. Each belongs to the rows' storage under a name, and every write of every
process keeps it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch

from engram._support import fork, native
from engram._support.field_paths import FieldPath, public
from engram._support.state import check_keys, integer
from engram.errors import IncompatibleStore
from engram.format import layout
from engram.format.schema import DTYPES, Field, items_of
from engram.store import indexes, memory
from engram.store.store import Store

#: int64 rows, group by group, their tickets, and whether some come again; or a row: all rows of its group were just being written;
#: None: there is no group.
Drawn: TypeAlias = tuple[torch.Tensor, torch.Tensor, bool] | int | None

#: Which rows are in groups, as the core says it: the number of the key's field and its bytes, fields that are to be ready, uses, the field
#: of the version, staleness, the order of groups, rows of each of these, and the field of their rewards.
GroupPolicy: TypeAlias = tuple[int, int, tuple[int, ...], int, "int | None", int, int, int, "int | None"]


class _Ruled(indexes.Ordered, Protocol):
    """A core that knows its rules."""

    @property
    def policy(self) -> object: ...


P = TypeVar("P", bound=_Ruled)
#: The number of a field, and what its values are.
Specified: TypeAlias = tuple[int, tuple[int, int, tuple[int, ...]]]
#: Key of the order, rows of the epoch, how many of them were visited, and the number of the next write when it began; in a state how
#: many numbers were given since.
Progress: TypeAlias = tuple[int, int, int, int]
#: Before the first draw.
NONE: Progress = (0, 0, 0, 0)
#: Bytes of a key of a group at most.
MAX_KEY_BYTES = 1024
#: Kinds of ragged fields whose rows are texts that say a key.
TEXT_KEYS = ("utf-8", "bytes")
#: Fields of groups that are to be ready at most, and uses of a row, which are fewer.
MAX_READY, MAX_USES = 16, 1 << 24
#: Those with a NaN that groups look for.
READY_DTYPES = ("float16", "bfloat16", "float32", "float64")


class RuledIndex(indexes.TicketIndex[P]):
    """An index of rows that follow rules, by which all that use it draw."""

    @classmethod
    def of_rules(cls, store: Store, name: str, nbytes: int, asked: object, *given: object) -> Self:
        """The index of a store under a name. Raises ``IncompatibleStore``: it has other rules than the policy that is ``asked`` for."""
        known = store.indexes.get((name, cls.kind)) or store.indexes.refreshed().get((name, cls.kind))
        if known is not None:  # perhaps of another size
            nbytes = cls.checked(known, store, name, asked).block.nbytes
        return cls.of_name(store.indexes, name, nbytes, store.capacity, *given)[0].checked(store, name, asked)

    def checked(self, store: Store | None, name: str, asked: object) -> Self:
        """The index itself. Raises ``IncompatibleStore``: it has other rules."""
        if self.core.policy != asked:
            mine, theirs = self.said(store, self.core.policy), self.said(store, asked).removeprefix("max_sample_count=")
            raise IncompatibleStore(
                f"index {name!r}: expected {mine}, as the store's index of that name has, got {theirs}. Give it another name: index=…."
            )
        return self

    @staticmethod
    def said(store: Store | None, policy: object) -> str:
        """Rules, in words."""
        raise NotImplementedError


class ConsumptionIndex(RuledIndex[native.Consumption]):
    """How often each row of one store was drawn. Made by :meth:`of_store`."""

    kind = "draws"
    make_core = native.Consumption
    reset_mutex = staticmethod(native.reset_consumption_mutex)
    copy_memory = staticmethod(native.copy_consumption)
    format_memory = staticmethod(native.format_consumption)

    def count(self, stats: dict[str, float]) -> None:
        """As :meth:`Index.count`: rows that can be drawn; where there are rules, what was counted of others."""
        _add_counts(stats, self.core.totals)

    @classmethod
    def of_store(cls, store: Store, name: str, most: int, rules: GroupRules) -> ConsumptionIndex:
        """The index of that name, of rows that are drawn ``most`` times and follow the rules. A new index scans the rows once.

        Raises:
            KeyError: no such field. TypeError: it can never be not ready, or is no version; the rows are not on the CPU.
            ValueError: not a name of an index, or a store of 2^32 rows.
            IncompatibleStore: the rows of that index are drawn another number of times, or follow other rules.
            OSError: no space for its file.
        """
        if rules.exclude:
            check_native(store, "FilteredSampler")
        ready, version = given = _fields_of(store, rules) if rules.exclude else ((), None)
        nbytes = native.consumption_bytes(store.capacity, given)
        asked = tuple(number for number, _ in ready), version and version[0], most
        return cls.of_rules(store, name, nbytes, asked, most, given)

    @staticmethod
    def said(store: Store | None, policy: object) -> str:
        """As :meth:`RuledIndex.said`."""
        ready, version, most = cast("tuple[tuple[int, ...], int | None, int]", policy)
        if store is None or not (ready or version is not None):
            return f"max_sample_count={most}"
        return f"rows{_rules_said(store, ready, version, most)}"

    def counts(self, n: int) -> torch.Tensor:
        """int32 ``[n]``: how often the first rows were drawn. A copy."""
        out = torch.empty(n, dtype=torch.int32, device="cpu")
        self.core.counts(out)
        return out

    def uses(self) -> torch.Tensor:
        """The :meth:`counts` of all rows."""
        return self.counts(self.core.rows)

    def restore_uses(self, uses: torch.Tensor) -> None:
        """Take over :meth:`uses`. Rows that it says nothing of were not drawn."""
        self.core.restore(uses)


class UsageIndex(indexes.LockedIndex[native.Usage]):
    """Counts of samples of the rows of one store. It has no lock: each count is an atomic word."""

    kind = "usage"
    #: Its name, of which there is one.
    NAME = "main"
    make_core = native.Usage
    format_memory = staticmethod(native.format_usage)

    @classmethod
    def of_store(cls, store: Store) -> UsageIndex:
        """The index, made if there is none: then no row counts as sampled. Raises ``OSError``: no space for its file."""
        index, made = cls.of_name(store.indexes, cls.NAME, native.usage_bytes(store.capacity), store.capacity)
        if made:
            store.core.ask_for_usage()
        return index

    @classmethod
    def in_use(cls, store: Store) -> UsageIndex | None:
        """The index, if samples are counted. Of a store that is only read, as others count them."""
        index: UsageIndex | None = store.indexes.get((cls.NAME, cls.kind))
        if index is None and store.core.asked_usage:
            if store.readonly and store.folder is not None:
                path = store.folder / layout.FOLDER / layout.INDEXES / cls.NAME / cls.kind
                return cls(memory.read_block(path, path.stat().st_size), None) if path.exists() else None
            index = store.indexes.refreshed().get((cls.NAME, cls.kind))
        return index

    def counts(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 ``[n]``: how often these rows, int64 ``[n]``, were sampled."""
        rows = rows.contiguous()
        out = torch.empty(len(rows), dtype=torch.int64, device="cpu")
        self.core.counts(rows, out)
        return out

    def saved(self, n: int) -> torch.Tensor:
        """int32 ``[n]``: how often the first rows were sampled, copied."""
        return self._words[:n].clamp(min=0)  # above 2^31 - 1 they are negative; no row is sampled as often

    def restore(self, counts: torch.Tensor) -> None:
        """Take over such counts; the other rows were not sampled."""
        self._words.zero_()[: len(counts)] = counts

    @property
    def _words(self) -> torch.Tensor:
        return self.block.tensor[native.usage_bytes(0) : native.usage_bytes(self.core.rows)].view(torch.int32)


class EpochIndex(indexes.LockedIndex[native.Epoch]):
    """Each call of ``core.next`` takes the next stretch of rows. Made by :meth:`of_store` and :meth:`alone`."""

    reset_mutex = staticmethod(native.reset_epoch_mutex)

    kind = "pass"
    make_core = native.Epoch

    @staticmethod
    def format_memory(address: int, nbytes: int, begun: Progress = NONE) -> None:
        """Make memory one that continues from there."""
        native.format_epoch(address, nbytes)
        native.Epoch(address, nbytes, ()).state = begun

    @classmethod
    def of_store(cls, store: Store, name: str, begun: Progress) -> EpochIndex:
        """The index of a directory store under a name. A new one continues from ``begun``.

        Raises:
            ValueError: not a name of an index.
            OSError: no space for its file.
        """
        return cls.of_name(store.indexes, name, native.epoch_bytes, begun)[0]

    def state(self, clock: int) -> dict[str, int]:
        """The :data:`Progress`, under ``key, rows, visited``; ``begun`` if writes came since. ``clock``: the next one's number."""
        key, rows, visited, begun = self.core.state
        return {"key": key, "rows": rows, "visited": visited, **({"begun": begun} if 0 < begun < clock else {})}

    def go_on(self, saved: Progress, clock: int) -> None:
        """From a :meth:`state` on, in which the last number is that of the first write that came later; 0: there was none."""
        key, rows, visited, begun = saved
        self.core.state = key, rows, visited, min(begun or clock, clock)


def checked_progress(state: dict[str, object], where: str, *others: str) -> Progress:
    """What an :meth:`EpochIndex.state` says, and ``others`` beside it. Raises ``KeyError``, ``TypeError``, ``ValueError``."""
    check_keys(state, ("key", "rows", "visited", *others), where, optional=("begun",))
    key = integer(state, "key", 0, 1 << 63, where)
    rows = integer(state, "rows", 0, 1 << 62, where)
    begun = integer(state, "begun", 1, 1 << 62, where) if "begun" in state else 0
    return key, rows, integer(state, "visited", 0, rows + 1, where), begun


class ChangesIndex(indexes.LockedIndex[native.Changes]):
    """Which rows of one store may have changed since they were looked at. It has no lock: each mark is an atomic word.

    Every write of every process keeps it. A look costs what was written since the one before, not what the store holds.
    """

    #: Looks of before mean nothing to those that come.
    reset_mutex = staticmethod(native.reset_changes)

    kind = "changes"
    make_core = native.Changes
    format_memory = staticmethod(native.format_changes)

    @classmethod
    def of_store(cls, store: Store, *, samples: bool = False) -> ChangesIndex:
        """The index, made if there is none. Raises ``OSError``: no space for its file.

        Args:
            store: whose rows these are.
            samples: rows that are sampled count as changed.
        """
        # Processes attach indexes by name, and a row is counted before it is marked only if the counts come first: they are "main".
        name = "sampled" if samples else "written"
        index, made = cls.of_name(store.indexes, name, native.changes_bytes(store.capacity), store.capacity, samples)
        if made and samples:
            store.core.ask_for_usage()
        return index

    def look(self, since: int) -> tuple[int, np.typing.NDArray[np.int64]]:
        """The number of this look, and int64 ``[n]``, in order: rows that may have changed since that one. 0: all rows."""
        return self.core.look(since)


class ConsumerVersionIndex(indexes.LockedIndex[native.ConsumerVersion]):
    """A version that only grows, until the store is emptied. It has no lock. Made by :meth:`of_store` and :meth:`alone`."""

    kind = "consumer"
    make_core = native.ConsumerVersion
    format_memory = staticmethod(native.format_consumer_version)

    @classmethod
    def free_lock(cls, block: memory.Block) -> None:
        """There is none. Raises as :meth:`LockedIndex.free_lock`."""
        cls(block, None)

    def count(self, stats: dict[str, float]) -> None:
        """As :meth:`Index.count`: the version; of several the newest."""
        stats["consumer_version"] = max(self.core.version, stats.get("consumer_version", self.core.version))

    @classmethod
    def of_store(cls, store: Store, name: str) -> ConsumerVersionIndex:
        """The index of a store under a name. Raises ``ValueError``: not a name of an index. ``OSError``: no space for its file."""
        return cls.of_name(store.indexes, name, native.consumer_version_bytes)[0]


def rows_by_version(store: Store, key: FieldPath, ready: tuple[FieldPath, ...]) -> native.Versions:
    """The ready rows of a store by the version in a field, for draws of this process. It catches up with writers, who do nothing for it.

    Raises ``KeyError``: no such field. ``TypeError``: it is no version, or can never be not ready.
    """
    fields = [*(specified(store, "ready", path) for path in ready), specified(store, "version_key", key)]
    numbers, columns = store.on_host([number for number, _ in fields])
    *until, version = zip(numbers, (spec for _, spec in fields), strict=True)
    keep = (*store.control_memory, *columns)
    return fork.registered(native.Versions(store.core, (until, version), *memory.placed(columns), keep))


class GroupRules(NamedTuple):
    """Which rows of a store are drawn, or are in groups."""

    #: Rows are not drawn, and in no group, while one of these fields has a NaN.
    ready: tuple[FieldPath, ...] = ()
    #: After so many draws, of the row or of its group, it is not drawn any more; None: there is no limit, and none is counted.
    max_uses: int | None = None
    #: The field with the version of a row; None: rows have none.
    version: FieldPath | None = None
    #: Rows whose version is further behind the consumer's are not drawn.
    max_staleness: int = 0
    #: By which groups are in order: 0 nothing, 1 when their newest row was written or edited, 2 the variance of rewards.
    order: int = 0
    #: Rows of each group that is in order.
    least: int = 0
    #: The field with the rewards that the order is by.
    reward: FieldPath | None = None

    @property
    def exclude(self) -> bool:
        """Whether rows that were not used up may be excluded."""
        return bool(self.ready) or self.version is not None


#: All of them.
ALL_ROWS = GroupRules()


class GroupDraw(NamedTuple):
    """What is drawn of groups."""

    #: ``"random"``, ``"recency"``, ``"reward"`` or ``"variance"``, as :class:`PromptGroupSampler` says it.
    strategy: str
    #: How many, each once.
    groups: int
    #: Rows of each.
    each: int
    #: No row and no group comes twice.
    complete: bool = False
    #: The oldest version, from now on; NaN: as it is.
    floor: float = math.nan
    #: Which groups: 0 any, 1 the first, 2 the last ones in order.
    which: int = 0


class GroupIndex(RuledIndex[native.Groups]):
    """The rows of one store by the content of a field. Made by :meth:`of_store`."""

    kind = "groups"
    make_core = native.Groups
    reset_mutex = staticmethod(native.reset_groups_mutex)
    copy_memory = staticmethod(native.copy_groups)
    format_memory = staticmethod(native.format_groups)

    @classmethod
    def of_store(cls, store: Store, name: str, key: FieldPath, rules: GroupRules) -> GroupIndex:
        """The index of that name, of rows by a field. A new index scans the rows once.

        Raises:
            KeyError: no such field. TypeError: its content is no key, can never be not ready, or is no version.
            ValueError: not a name of an index, or a store of 2^32 rows.
            IncompatibleStore: the index of that name has groups by other rules.
            OSError: no space for its file.
        """
        policy = _policy_of(store, key, rules)
        nbytes = native.groups_bytes(store.capacity, policy)
        return cls.of_rules(store, name, nbytes, _numbers_of(policy), policy)

    @staticmethod
    def said(store: Store | None, policy: object) -> str:
        """As :meth:`RuledIndex.said`."""
        assert store is not None  # its rows are in groups
        number, _, ready, most, version, staleness, order, least, reward = cast("GroupPolicy", policy)
        fields = store.schema.fields
        said = f"groups by {public(fields[number].key)!r}{_rules_said(store, ready, version, most, staleness)}"
        if order:
            by = "their age" if reward is None else f"the variance of {public(fields[reward].key)!r}"
            said += f", those of {least} rows in the order of {by}"
        return said

    def count(self, stats: dict[str, float]) -> None:
        """As :meth:`Index.count`: what is counted of groups. Of used, expired and evicted rows where the rules are such."""
        _add_counts(stats, self.core.counts)


def _add_counts(stats: dict[str, float], counts: dict[str, int]) -> None:
    """Add up what several indexes have counted."""
    for name, number in counts.items():
        stats[name] = stats.get(name, 0) + number


def _policy_of(store: Store, key: FieldPath, rules: GroupRules) -> Any:
    """The rules as the core takes them, which knows fields by their numbers. Raises ``KeyError``, ``TypeError``."""
    number = _key_field(store, key)
    ready, version = _fields_of(store, rules)
    reward = None if rules.reward is None else specified(store, "reward_key", rules.reward)
    key_bytes, most = key_bytes_of(store.schema.fields[number]), rules.max_uses or 0
    return number, key_bytes, ready, most, version, rules.max_staleness, rules.order, rules.least, reward


def _fields_of(store: Store, rules: GroupRules) -> tuple[tuple[Specified, ...], Specified | None]:
    """The fields that are to be ready, and the version. Raises ``KeyError``, ``TypeError``."""
    ready = tuple(specified(store, "ready", path) for path in rules.ready)
    return ready, None if rules.version is None else specified(store, "policy_version", rules.version)


def _numbers_of(policy: Any) -> GroupPolicy:
    """The same with the numbers of fields alone."""
    number, key_bytes, ready, most, version, staleness, order, least, reward = policy
    version, reward = (None if field is None else field[0] for field in (version, reward))
    return number, key_bytes, tuple(field for field, _ in ready), most, version, staleness, order, least, reward


def _rules_said(
    store: Store, ready: tuple[int, ...], version: int | None, most: int, staleness: int | None = None
) -> str:
    """Rules of rows, in words. ``staleness``: None: each draw names its own."""
    fields = store.schema.fields
    said = f", ready={tuple(public(fields[it].key) for it in ready)}" if ready else ""
    said += f", max_uses={most}" if most else ""
    if version is None:
        return said
    return f"{said}, {'versions' if staleness is None else f'max_staleness={staleness}'} by {public(fields[version].key)!r}"


def check_native(store: Store, who: str) -> None:
    """Raise ``TypeError``: the rows are not on the CPU."""
    if not store.is_native:
        raise TypeError(
            f'{who}: expected rows on the CPU, got those of {store.place}. Use a storage with device="cpu", and a '
            "DeviceLoader for batches on an accelerator."
        )


class Groups:
    """The groups of a store's rows.

    Args:
        store: the rows.
        name: of its index.
        key: the field that says the group of a row.
        reward: the field with its reward; None: none is asked for.
        rules: which rows are in groups.

    Raises:
        TypeError: the rows are not on the CPU. As :meth:`GroupIndex.of_store`.
    """

    def __init__(
        self, store: Store, name: str, key: FieldPath, reward: FieldPath | None, rules: GroupRules = ALL_ROWS
    ) -> None:
        check_native(store, "PromptGroupSampler")
        self._store, self._reward, self._index = store, reward, GroupIndex.of_store(store, name, key, rules)

    @property
    def count(self) -> int:
        """How many there are."""
        return self.of_size(1)

    def of_size(self, least: int, floor: float = math.nan) -> int:
        """How many there are of at least so many rows. ``floor``: as :attr:`GroupDraw.floor`."""
        return indexes.caught_up(self._index, readonly=self._store.readonly).core.groups(least, floor)

    def draw(self, key: int, draw: GroupDraw, without: torch.Tensor) -> Drawn:
        """Rows of some groups.

        Raises:
            KeyError: a row has no key, or no reward. TypeError: what it has there is none. ValueError: a reward is not finite.

        Args:
            key: of the draw.
            draw: what is drawn.
            without: int64, contiguous: rows whose groups are left out, if there are enough others.
        """
        core, store = indexes.caught_up(self._index, readonly=self._store.readonly).core, self._store
        _, groups, each, complete, floor, which = draw
        if draw.strategy in ("random", "recency"):
            return core.draw(key, groups, each, draw.strategy == "recency", without, complete, floor, which)
        assert self._reward is not None  # the strategy asks for it
        reward, spread = specified(store, "reward_key", self._reward), draw.strategy == "variance"
        return core.draw_best(store.core, reward, key, groups, each, spread, without, complete, floor, which)

    def take_back(self, rows: torch.Tensor, tickets: torch.Tensor) -> None:
        """Rows that were drawn were not read: they are used once less."""
        self._index.core.take_back(rows.contiguous(), tickets.contiguous())

    def uses(self) -> torch.Tensor:
        """int32 ``[n]``: how often each row was used. A copy."""
        out = torch.empty(self._index.core.rows, dtype=torch.int32, device="cpu")
        self._index.core.uses(out)
        return out

    def restore_uses(self, uses: torch.Tensor) -> None:
        """Take over :meth:`uses`. Rows that it says nothing of were not used."""
        self._index.core.restore_uses(uses)


#: What a field says, by the argument that names it.
_SAYS = {
    "group_key": "which says what group a row is in",
    "reward_key": "by which the sampler's strategy compares them",
    "ready": "which is NaN until it is ready",
    "policy_version": (version := "the policy version that made them"),
    "version_key": version,
}


def not_known(argument: str, key: FieldPath, known: list[FieldPath]) -> KeyError:
    """The error of rows without the field that an argument of the sampler names."""
    return KeyError(
        f"sample: {argument}: expected rows with the field {public(key)!r}, {_SAYS[argument]}, got {list(map(public, known))}. Store "
        f"it with every row, or name another field: {argument}=…."
    )


def _stored(store: Store, argument: str, key: FieldPath) -> tuple[int, Field]:
    """A field and its number. Raises ``KeyError``: there is none. ``TypeError``: its rows have any number of items."""
    for number, field in enumerate(store.schema.fields):
        if field.key == key and (field.ragged is None or argument == "group_key"):
            return number, field
        if field.key == key:
            raise TypeError(
                f"sample: {argument}: {public(key)!r}: expected one value per row, or several of one shape, got {content_of(field)}. Store "
                "a number beside it."
            )
    raise not_known(argument, key, sorted(field.key for field in store.schema.fields))


def specified(store: Store, argument: str, key: FieldPath) -> Specified:
    """The number of a field that an argument names, and what its values are. Raises ``KeyError``; ``TypeError``: it is no such field."""
    number, field = _stored(store, argument, key)
    is_real, got = not field.dtype.startswith("complex"), f"{field.dtype} {list(field.shape)}"
    if argument == "reward_key" and not (is_real and field.row_bytes):
        raise TypeError(f"sample: {public(key)!r}: expected rewards that are real numbers, got {got}.")
    if argument in ("policy_version", "version_key") and not (is_real and field.row_bytes == DTYPES[field.dtype]):
        raise TypeError(f"sample: {argument}: {public(key)!r}: expected one real number per row, got {got}.")
    if argument == "ready" and not (field.dtype in READY_DTYPES and field.row_bytes):
        raise TypeError(
            f"sample: ready: {public(key)!r}: expected floating numbers, which are NaN until they are ready, got {got}. No value of it "
            "says that it is not ready: store it as float32, or leave it out."
        )
    return number, memory.dlpack_specs([field])[0]


def _key_field(store: Store, key: FieldPath) -> int:
    """The number of the field whose content says which group a row is in. Raises ``KeyError``, ``TypeError``."""
    number, field = _stored(store, "group_key", key)
    integer = field.row_bytes == DTYPES[field.dtype] and not field.dtype.startswith(("float", "bfloat", "complex"))
    if not (is_text(field) or (integer and field.ragged is None)) or key_bytes_of(field) > MAX_KEY_BYTES:
        raise no_group_key("sample", key, content_of(field))
    return number


def no_group_key(call: str, key: FieldPath, got: object) -> TypeError:
    """The error of a field whose content says no group."""
    return TypeError(
        f"{call}: {public(key)!r}: expected one integer per row, or {TEXTS}; got {got}. Number the prompts, or hash them."
    )


#: What a text is that a row is found by, or that says its group.
TEXTS = f'a text of at most {MAX_KEY_BYTES} bytes: Ragged("utf-8") or Ragged("bytes") with max_length=, or uint8 [n], filled up with zeros'


def is_text(field: Field) -> bool:
    """Whether rows of a field hold texts, or bytes."""
    if field.ragged is not None:
        return field.ragged.kind in TEXT_KEYS
    return field.dtype == "uint8" and len(field.shape) == 1


def key_bytes_of(field: Field) -> int:
    """The bytes of a key, of a text the most that it may have."""
    return field.row_bytes if field.ragged is None else field.ragged.max_length


def content_of(field: Field) -> str:
    """What rows of a field hold, for messages."""
    return f"{field.dtype} {list(field.shape)}" if field.ragged is None else items_of(field.ragged)
