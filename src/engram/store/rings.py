"""The memory of fields whose rows have any number of items: a ring of items per lane and field, and one control block.

And those items on their way out and back in, for saves: where they lie, and where they are put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from engram._support import native
from engram._support.words import raise_as
from engram.errors import CorruptStore, IncompatibleCheckpoint
from engram.format import files, layout
from engram.format.schema import RaggedGroup, Schema
from engram.format.sizes import ragged_control_bytes
from engram.store.memory import Block, placed, private_block, torch_dtype, write_rows
from engram.types import RowsTarget

#: Where the mutex begins in a control block, and where the lanes do.
_MUTEX, _LANES = 64, 4096
#: Bytes that are copied at a time.
_PIECE = 1 << 16


class RaggedMemory(NamedTuple):
    """The rings of a store with ragged fields, and the control block that says what of them is in use."""

    #: ``[lanes · items, *item shape]`` of each ragged field, by its number. Lane ``i`` begins at ``i · items``.
    values: Mapping[int, torch.Tensor] = MappingProxyType({})
    #: None: no field is ragged.
    control: Block | None = None
    #: The file of the control block; None: it is in private memory.
    path: Path | None = None

    @property
    def parts(self) -> list[torch.Tensor]:
        """The memory that a copy of the store consists of, in the order in which to copy it while rows are written.

        Items that are replaced during the copy are of rows that become void. What is in use comes last, and without the mutex:
        the heads in it are behind all items of rows that were copied.
        """
        if self.control is None:
            return []
        block = self.control.tensor
        return [*self.values.values(), block[:_MUTEX], block[_LANES:]]

    def copy_from(self, parts: Sequence[torch.Tensor]) -> RaggedMemory:
        """Take over the :attr:`parts` of another store of the same schema, while no thread writes to this one. Returns itself."""
        for mine, theirs in zip(self.parts, parts, strict=True):
            for to, piece in zip(*(_bytes(it).split(_PIECE) for it in (mine, theirs)), strict=True):  # type: ignore[no-untyped-call]
                if piece.any():  # what was never written takes no memory
                    to.copy_(piece)
        if self.control is not None:
            # The words of a lane were perhaps not copied at one moment. A floor of 0 is right beside any head.
            lanes, groups = self.control.tensor[16:32].view(torch.int64).tolist()
            self.control.tensor[_LANES:].view(torch.int64).view(lanes, -1)[:, 2 : 2 + 2 * groups : 2] = 0
        return self

    def connect(self, core: native.Store, schema: Schema, *, alone: bool) -> None:
        """Let the core read and write the items. ``alone``: no other process uses them, so no process holds the mutex.

        Raises:
            CorruptStore: the control block is damaged, or of another store.
        """
        if self.control is None:
            return
        addresses = dict(zip(self.values, placed([*self.values.values()])[0], strict=True))
        members = {n: (n, addresses[n], it.item_bytes) for n, it in schema.ragged.items()}
        groups = [(*it[:2], tuple([members[n] for n in it.members]), it.slot) for it in schema.ragged_groups]
        with raise_as(CorruptStore, self.path or "ragged fields", (ValueError, CorruptStore)):
            core.use_ragged(self.control.address, self.control.nbytes, tuple(groups), alone)


#: Of a store without ragged fields.
NO_RINGS = RaggedMemory()


def private_rings(schema: Schema) -> RaggedMemory:
    """Empty rings, or slots, in private memory, whose pages are taken when they are first written.

    Raises ``OSError``: there is no space for them.
    """
    if not schema.ragged:
        return NO_RINGS
    sizes, what, sparse = schema.values_bytes.items(), schema.fields, schema.in_slots
    blocks = {n: private_block(nbytes, f"items of field {what[n].name}", sparse=sparse) for n, nbytes in sizes}
    control = private_block(ragged_control_bytes(schema))
    _format(control, schema)
    return RaggedMemory(_shaped(schema, blocks), control)


def rings_in(directory: Path, schema: Schema, block: Callable[[Path, int], Block]) -> RaggedMemory:
    """The rings of a store's folder, mapped.

    Args:
        directory: the folder.
        schema: what its rows are.
        block: maps a file of that size, and raises ``CorruptStore`` if it has another: ``memory.file_block`` or its like.
    """
    if not schema.ragged:
        return NO_RINGS
    path = layout.ragged_control(directory)
    control = block(path, ragged_control_bytes(schema))
    found = {number: block(*place) for number, place in layout.values_files(directory, schema).items()}
    return RaggedMemory(_shaped(schema, found), control, path)


def make_rings(
    made: files.Creation, directory: Path, schema: Schema, hidden: str, block: Callable[[Path, int], Block]
) -> None:
    """Create the files of empty rings in a folder that is to be the store's, their space reserved; those of slots are sparse.

    Raises ``OSError``.
    """
    if not schema.ragged:
        return
    path = layout.ragged_control(directory, hidden)
    made.folder(path.parent)
    for place in layout.values_files(directory, schema, hidden).values():
        made.file(*place, sparse=schema.in_slots)
    made.file(path, ragged_control_bytes(schema))
    _format(block(path, ragged_control_bytes(schema)), schema)


def _format(control: Block, schema: Schema) -> None:
    groups = tuple([(it.leader, it.items) for it in schema.ragged_groups])
    native.format_ragged(control.address, control.nbytes, schema.capacity, schema.lanes, groups)


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.view(-1).view(torch.uint8)


@torch.inference_mode(mode=False)
def _shaped(schema: Schema, blocks: Mapping[int, Block]) -> dict[int, torch.Tensor]:
    return {
        number: blocks[number].tensor[: blocks[number].nbytes].view(torch_dtype(it)).view(-1, *it.shape)
        for number, it in schema.ragged.items()
    }


# ---- the items of all rows, on their way out and back in -------------------------------------------------------------


class Spans(NamedTuple):
    """Where the items of rows lie in their lane's ring: int64 ``[n]`` each."""

    offsets: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, column: torch.Tensor) -> Spans:
        """As the column of a leader has them, int32 ``[n, 3]``."""
        words = column[:, :2].reshape(-1).view(torch.int64)
        return cls(words, column[:, 2].to(torch.int64))

    @property
    def column(self) -> torch.Tensor:
        """The column of a leader, int32 ``[n, 3]``."""
        column = torch.empty((len(self.offsets), 3), dtype=torch.int32, device="cpu")
        column[:, :2] = self.offsets.reshape(-1, 1).contiguous().view(torch.int32)
        column[:, 2] = self.lengths
        return column

    def moved(self, by: torch.Tensor) -> Spans:
        """The same elsewhere; 0 for rows without items: int64 ``[n]``, by how much."""
        return Spans(torch.where(self.lengths > 0, self.offsets + by, 0), self.lengths)


def oldest_first(lanes: torch.Tensor, lane_length: int) -> list[torch.Tensor]:
    """The rows of each lane that are inside its extent, in the order of their positions.

    ``lanes``: int64 ``[L, 2]`` or wider: the position of each lane's next step, and its live rows.
    """
    found = []
    for lane, (position, live) in enumerate(lanes[:, :2].tolist()):
        seam = position % lane_length if live == lane_length else 0
        rows = torch.arange(lane * lane_length, lane * lane_length + live, device="cpu")
        found.append(rows.roll(-seam))
    return found


def compacted(lengths: Sequence[torch.Tensor], order: Sequence[torch.Tensor]) -> tuple[list[Spans], torch.Tensor]:
    """Where rows lie from offset 0 on, one after the other; and how many items each lane has, int64 ``[lanes, groups]``.

    ``lengths``: int64 ``[n]`` of each group. ``order``: as :func:`oldest_first` has it. Rows behind the last length hold nothing.
    """
    spans, heads = [], torch.zeros((len(order), len(lengths)), dtype=torch.int64, device="cpu")
    for group, of_group in enumerate(lengths):
        offsets = torch.zeros_like(of_group)
        for lane, rows in enumerate(order):
            there = rows[rows < len(of_group)]
            ends = of_group[there].cumsum(0)
            offsets[there] = ends - of_group[there]
            heads[lane, group] = ends[-1] if len(ends) else 0
        spans.append(Spans(offsets, of_group))
    return spans, heads


def heads_of(core: native.Store, schema: Schema) -> torch.Tensor:
    """int64 ``[lanes, groups]``: the offsets of the next items."""
    heads = [core.ragged_lane(lane)[1:] for lane in range(schema.lanes)]
    return torch.tensor(heads, dtype=torch.int64, device="cpu").view(schema.lanes, len(schema.ragged_groups))


def check_room(needed: torch.Tensor, here: Schema, where: str) -> None:
    """Raise ``IncompatibleCheckpoint`` unless each lane has room for so many items, int64 ``[lanes, groups]``."""
    for number, group in enumerate(here.ragged_groups):
        most = int(needed[:, number].max())
        if most > group.items:
            size = sum(here.ragged[member].item_bytes for member in group.members)
            raise IncompatibleCheckpoint(
                f"{where}: {here.fields[group.leader].name}: expected rows whose items fit the ring of a lane, {group.items} items "
                f"or {group.items * size} bytes, got {most} items: {most * size} bytes are needed. Make the storage with a larger "
                "ragged_bytes."
            )


# ---- back in ---------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Items of a lane that lie one after the other, and are put to their place together."""

    lane: int
    #: The offset of the first item, as the spans have it.
    first: int
    #: ``[items, *shape]`` of each member of the group.
    values: Sequence[torch.Tensor]


class SavedItems(Protocol):
    """Rows of any length as they were saved."""

    #: int64 ``[lanes, groups]``: no row has items at these offsets or behind.
    heads: torch.Tensor
    #: int64 ``[n]``: the lane of each row.
    lane_of: torch.Tensor

    #: Of each group: those of all rows up to the last one, ``[n]``; length 0 where a row holds nothing. The offsets of live ones grow.
    spans: list[Spans]

    def pieces(self, group: int) -> Iterator[Piece]:
        """The items of all rows."""


class RingsTarget:
    """The rings of a store whose rows are replaced.

    What is put there lies behind all items of before, so that offsets never fall.
    """

    def __init__(self, core: native.Store, schema: Schema, items: Mapping[int, torch.Tensor]) -> None:
        self._core, self._schema, self._items = core, schema, items
        #: int64 ``[lanes, groups]``: by how much offsets are larger here than they were saved. None: nothing was put here.
        self.shifts: torch.Tensor | None = None

    def fill(self, columns: RowsTarget, saved: SavedItems) -> None:
        """Put all items to their places, and write where they are."""
        groups = self._schema.ragged_groups
        if self._schema.in_slots:
            for number, group in enumerate(groups):
                self._fill_slots(columns, saved, number, group)
            return
        rings = torch.tensor([group.items for group in groups], device="cpu")
        heads = heads_of(self._core, self._schema)
        behind = (heads - (saved.heads - rings).clamp(min=0)).clamp(min=0)
        self.shifts = shifts = (behind + rings - 1) // rings * rings
        self._heads = saved.heads + shifts
        for number, group in enumerate(groups):
            spans = saved.spans[number]
            spans = Spans(spans.offsets + shifts[saved.lane_of, number], spans.lengths)
            write_rows(columns, group.leader, 0, spans.column)
            for piece in saved.pieces(number):
                self._put(group, number, piece)

    def _put(self, group: RaggedGroup, number: int, piece: Piece) -> None:
        assert self.shifts is not None  # as set before
        ring, start = group.items, piece.lane * group.items
        first = piece.first + int(self.shifts[piece.lane, number])
        end = first + len(piece.values[0])
        at = max(first, int(self._heads[piece.lane, number]) - ring)  # what lies before makes way for what lies behind
        while at < end:
            stop = min(end, (at // ring + 1) * ring)
            place = slice(start + at % ring, start + at % ring + stop - at)
            for field, values in zip(group.members, piece.values, strict=True):
                self._items[field][place] = values[at - first : stop - first]
            at = stop

    def _fill_slots(self, columns: RowsTarget, saved: SavedItems, number: int, group: RaggedGroup) -> None:
        spans, every = saved.spans[number], torch.arange(len(saved.spans[number].lengths), device="cpu")
        offsets = every % (self._schema.capacity // self._schema.lanes) * group.slot
        write_rows(columns, group.leader, 0, Spans(offsets, spans.lengths).column)
        order = every[spans.lengths > 0]
        order = order[spans.offsets[order].argsort()]
        lanes = [order[saved.lane_of[order] == lane] for lane in range(self._schema.lanes)]
        for piece in saved.pieces(number):
            rows = lanes[piece.lane]
            ends = torch.tensor([piece.first, piece.first + len(piece.values[0])], device="cpu")
            begin, end = torch.searchsorted(spans.offsets[rows], ends).tolist()
            some = rows[begin:end]
            runs = spans.offsets[some], offsets[some] + piece.lane * group.items, spans.lengths[some]
            for field, values in zip(group.members, piece.values, strict=True):
                given, into, size = values.contiguous(), self._items[field], self._schema.ragged[field].item_bytes
                native.place_runs(
                    given.data_ptr(), piece.first, len(given), *runs, into.data_ptr(), len(into), size, size
                )

    def settle(self) -> None:
        """Let writers go on behind what was put here. The store is paused."""
        if self.shifts is not None:
            for lane, heads in enumerate(self._heads.tolist()):
                self._core.set_ragged_lane(lane, tuple(heads))


def fill_rings(columns: RowsTarget, saved: SavedItems) -> None:
    """Put the items of rows to their places in the store whose rows are replaced, and write where they are."""
    rings = columns.rings
    assert isinstance(rings, RingsTarget)  # a store with ragged fields gives one
    rings.fill(columns, saved)
