"""Which rows have the same content in one field: an index of a store, for draws of whole groups.

The index belongs to the rows' storage under a name. Every write of every process keeps it, and no draw looks for rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram import _native
from engram.errors import IncompatibleStore
from engram.field_paths import public
from engram.format.schema import DTYPES
from engram.store import INDEX_KINDS, LockedIndex, check_index_name, dlpack_specs, private_block, wrong_memory

if TYPE_CHECKING:
    from torch import Tensor

    from engram.field_paths import FieldPath
    from engram.format.schema import Field
    from engram.store import Block, Host, Store

#: Names the kind of index in a store's folder: never changes.
KIND = "groups"
#: Bytes of a key at most.
MOST_BYTES = 1024


class GroupIndex(LockedIndex[_native.Groups]):
    """The rows of one store by the content of a field. Made by :meth:`of_store`."""

    reset_mutex = staticmethod(_native.reset_groups_mutex)

    def made_around(self, block: Block, host: Host | None) -> _native.Groups:
        assert host is not None  # lists have no fields
        return _native.Groups(block.address, block.nbytes, host.core, (block.tensor, host.control, host.tickets))

    @staticmethod
    def copied(memory: Tensor) -> Block:
        """As :meth:`LockedIndex.copied`: its rows are found by a scan."""
        block = private_block(memory.numel())
        try:
            _native.copy_groups(memory.data_ptr(), block.address, block.nbytes)
        except ValueError as error:
            raise wrong_memory(error) from error
        return block

    def put_in_order(self) -> None:
        """After a recovery of the rows: looks at all of them. O(rows)."""
        self.core.put_in_order()

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
            _native.format_groups(block.address, block.nbytes, store.capacity, number, field.row_bytes)

        known: GroupIndex | None = store.indexes.get((name, KIND))
        if known is not None:  # perhaps with keys of another length
            known.check_field(store, name, number)
        nbytes = _native.groups_bytes(store.capacity, field.row_bytes)
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
        return self.core.draw(key, groups, each, newest, without.data_ptr(), len(without))

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
        return self.core.draw_best(store.core, numbered, key, groups, each, spread, without.data_ptr(), len(without))


def _field_of(store: Store, key: FieldPath) -> int:
    """The number of the field whose content says which group a row is in. Raises ``KeyError``, ``TypeError``."""
    numbers = {field.key: number for number, field in enumerate(store.schema.fields)}
    if key not in numbers:
        known = [public(field) for field in sorted(numbers)]
        raise KeyError(
            f"sample: expected rows with the field {public(key)!r}, which says what group a row is in, got {known}. Store it with every "
            "row, or name another field: group_key=…."
        )
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
