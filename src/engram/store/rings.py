"""The memory of fields whose rows have any number of items: a ring of items per lane and field, and one control block."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support import native
from engram.errors import CorruptStore
from engram.format import files, layout
from engram.format.sizes import ragged_control_bytes
from engram.store.memory import Block, placed, private_block, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from engram.format.schema import Schema


#: Where the mutex begins in a control block, and where the lanes do.
_MUTEX, _LANES = 64, 4096
#: Bytes that are copied at a time.
_PIECE = 1 << 16


class RaggedMemory(NamedTuple):
    """The rings of a store with ragged fields, and the control block that says what of them is in use."""

    values: Mapping[int, Tensor] = MappingProxyType({})
    """``[lanes · items, *item shape]`` of each ragged field, by its number. Lane ``i`` begins at ``i · items``."""
    control: Block | None = None
    """None: no field is ragged."""
    path: Path | None = None
    """The file of the control block; None: it is in private memory."""

    @property
    def parts(self) -> list[Tensor]:
        """The memory that a copy of the store consists of, in the order in which to copy it while rows are written.

        Items that are replaced during the copy are of rows that become void. What is in use comes last, and without the mutex:
        the heads in it are behind all items of rows that were copied.
        """
        if self.control is None:
            return []
        block = self.control.tensor
        return [*self.values.values(), block[:_MUTEX], block[_LANES:]]

    def copy_from(self, parts: Sequence[Tensor]) -> RaggedMemory:
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
        try:
            core.use_ragged(self.control.address, self.control.nbytes, tuple(groups), alone)
        except (ValueError, CorruptStore) as error:
            raise CorruptStore(f"{self.path or 'ragged fields'}: {str(error).removesuffix('.')}.") from error


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


def _bytes(part: Tensor) -> Tensor:
    return part.view(-1).view(torch.uint8)


@torch.inference_mode(mode=False)
def _shaped(schema: Schema, blocks: Mapping[int, Block]) -> dict[int, Tensor]:
    return {
        number: blocks[number].tensor[: blocks[number].nbytes].view(torch_dtype(it)).view(-1, *it.shape)
        for number, it in schema.ragged.items()
    }
