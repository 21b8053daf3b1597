"""Which rows have the same content in one field: an index of a store, for draws of whole groups.

The index belongs to the rows' storage under a name. Every write of every process keeps it, and no draw looks for rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from engram._support import native
from engram._support.field_paths import public
from engram.errors import IncompatibleStore
from engram.format.schema import DTYPES
from engram.store import INDEX_KINDS, TicketIndex, check_index_name, dlpack_specs

if TYPE_CHECKING:
    from torch import Tensor

    from engram._support.field_paths import FieldPath
    from engram.format.schema import Field
    from engram.store import Block, Store

    #: int64 rows, group by group, their tickets, and whether some come again; or a row: all rows of its group were just being written;
    #: None: there is no group.
    Drawn: TypeAlias = tuple[Tensor, Tensor, bool] | int | None

#: Names the kind of index in a store's folder: never changes.
KIND = "groups"
#: Bytes of a key at most.
MOST_BYTES = 1024


class GroupIndex(TicketIndex[native.Groups]):
    """The rows of one store by the content of a field. Made by :meth:`of_store`."""

    make_core = native.Groups
    reset_mutex = staticmethod(native.reset_groups_mutex)
    copy_memory = staticmethod(native.copy_groups)

    @classmethod
    def of_store(cls, store: Store, name: str, key: FieldPath) -> GroupIndex:
        """The index of that name, of rows by a field. A new index scans the rows once.

        Raises:
            KeyError: no such field. TypeError: its content is no key.
            ValueError: not a name of an index, or a store of 2^32 rows.
            IncompatibleStore: the index of that name has groups by another field.
            OSError: no space for its file.
        """
        check_index_name(name)
        number = _field_of(store, key)
        field = store.schema.fields[number]

        def make(block: Block) -> None:
            native.format_groups(block.address, block.nbytes, store.capacity, number, field.row_bytes)

        known: GroupIndex | None = store.indexes.get((name, KIND))
        if known is not None:  # perhaps with keys of another length
            known.check_field(store, name, number)
        nbytes = native.groups_bytes(store.capacity, field.row_bytes)
        index: GroupIndex = store.indexes.lasting(name, KIND, nbytes, make)[0]
        index.check_field(store, name, number)
        return index

    def check_field(self, store: Store, name: str, number: int) -> None:
        """Raise ``IncompatibleStore`` if the keys are another field."""
        if self.core.field != number:
            fields = store.schema.fields
            raise IncompatibleStore(
                f"index {name!r}: expected groups by {public(fields[self.core.field].key)!r}, as the store's index of that name has, got "
                f"{public(fields[number].key)!r}. Give it another name: index=…."
            )

    def draw(
        self, key: int, groups: int, each: int, *, newest: bool, without: Tensor
    ) -> tuple[Tensor, Tensor, bool] | None:
        """int64 rows, their tickets, and whether some come again; None: there is no group.

        Args:
            key: of the draw.
            groups: how many, each once.
            each: rows of each.
            newest: the newest, the oldest of them first. Else any.
            without: int64, contiguous: rows whose groups are left out, if there are enough others.
        """
        return self.core.draw(key, groups, each, newest, without)

    def best(
        self, store: Store, reward: Field, key: int, groups: int, each: int, *, spread: bool, without: Tensor
    ) -> tuple[Tensor, Tensor, bool] | int | None:
        """As :meth:`draw`, rows that are chosen by their rewards. A row: all rows of its group were just being written.

        Raises ``ValueError``: a reward is not finite.

        Args:
            store: whose rows these are.
            reward: its field with the rewards.
            key, groups, each, without: as for :meth:`draw`.
            spread: those with the largest variance, and of equal ones the largest sum, in ascending order. Else the highest, the highest
                first, and of equal ones the newest.
        """
        numbered = store.schema.fields.index(reward), dlpack_specs([reward])[0]
        return self.core.draw_best(store.core, numbered, key, groups, each, spread, without)


class Groups(Protocol):
    """The groups of the rows of a storage."""

    @property
    def count(self) -> int:
        """How many there are."""

    def draw(self, strategy: str, key: int, groups: int, each: int, without: Tensor) -> Drawn:
        """Rows of some groups.

        Raises:
            KeyError: a row has no key, or no reward. TypeError: what it has there is none. ValueError: a reward is not finite.

        Args:
            strategy: ``"random"``, ``"recency"``, ``"reward"`` or ``"variance"``, as :class:`PromptGroupSampler` says it.
            key: of the draw.
            groups: how many, each once.
            each: rows of each.
            without: int64, contiguous: rows whose groups are left out, if there are enough others.
        """


class StoredGroups:
    """The groups of a store's rows.

    Args:
        store: the rows.
        name: of its index.
        key: the field that says the group of a row.
        reward: the field with its reward; None: none is asked for.

    Raises:
        TypeError: the rows are not on the CPU. As :meth:`GroupIndex.of_store`.
    """

    def __init__(self, store: Store, name: str, key: FieldPath, reward: FieldPath | None) -> None:
        if not store.is_native:
            raise TypeError(
                f'PromptGroupSampler: expected rows on the CPU, got those of {store.place}. Use a storage with device="cpu", and a '
                "DeviceLoader for batches on an accelerator."
            )
        self._store, self._reward, self._index = store, reward, GroupIndex.of_store(store, name, key)

    def _current(self) -> GroupIndex:
        """The groups as they are now, also of a store that this process only reads."""
        if self._store.readonly:
            self._index.core.catch_up()
        return self._index

    @property
    def count(self) -> int:
        return self._current().core.groups

    def draw(self, strategy: str, key: int, groups: int, each: int, without: Tensor) -> Drawn:
        """As :meth:`Groups.draw`."""
        index = self._current()
        if strategy in ("random", "recency"):
            return index.draw(key, groups, each, newest=strategy == "recency", without=without)
        assert self._reward is not None  # the strategy asks for it
        reward = self._rewards(self._reward)
        return index.best(self._store, reward, key, groups, each, spread=strategy == "variance", without=without)

    def _rewards(self, reward: FieldPath) -> Field:
        """The field with the rewards. Raises ``KeyError``: there is none. ``TypeError``: its rows are no real numbers."""
        fields = {field.key: field for field in self._store.schema.fields}
        field = fields.get(reward)
        if field is None:
            raise no_rewards(reward, sorted(fields))
        if field.dtype.startswith("complex") or not field.row_bytes:
            raise TypeError(
                f"sample: {public(reward)!r}: expected rewards that are real numbers, got {field.dtype} {list(field.shape)}."
            )
        return field


def no_rewards(reward: FieldPath, known: list[FieldPath]) -> KeyError:
    """The error of rows without rewards."""
    return KeyError(
        f"sample: expected rows with the field {public(reward)!r}, by which the sampler's strategy compares them, got "
        f"{list(map(public, known))}. Store it with every row, or name another field: reward_key=…."
    )


def no_key(key: FieldPath, known: list[FieldPath]) -> KeyError:
    """The error of rows that say no group."""
    return KeyError(
        f"sample: expected rows with the field {public(key)!r}, which says what group a row is in, got {list(map(public, known))}. "
        "Store it with every row, or name another field: group_key=…."
    )


def _field_of(store: Store, key: FieldPath) -> int:
    """The number of the field whose content says which group a row is in. Raises ``KeyError``, ``TypeError``."""
    numbers = {field.key: number for number, field in enumerate(store.schema.fields)}
    if key not in numbers:
        raise no_key(key, sorted(numbers))
    field = store.schema.fields[numbers[key]]
    integers = not field.dtype.startswith(("float", "bfloat", "complex"))
    text = field.dtype == "uint8" and len(field.shape) == 1
    if not integers or not (field.row_bytes == DTYPES[field.dtype] or text) or field.row_bytes > MOST_BYTES:
        raise TypeError(
            f"sample: {public(key)!r}: expected one integer per row, or the bytes of a text, uint8 [n] with n of at most {MOST_BYTES}, "
            f"filled up with zeros; got {field.dtype} {list(field.shape)}. Number the prompts, or hash them."
        )
    return numbers[key]


INDEX_KINDS[KIND] = GroupIndex
