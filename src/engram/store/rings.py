"""The memory of fields whose rows have any number of items: a ring of items per lane and field, and one control block."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support import native
from engram.errors import CorruptStore
from engram.format import layout
from engram.format.schema import name_of
from engram.format.sizes import ragged_control_bytes
from engram.store.memory import Block, private_block, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from engram.format import files
    from engram.format.schema import Schema


class RaggedMemory(NamedTuple):
    """The rings of a store with ragged fields, and the control block that says what of them is in use."""

    control: Block
    values: tuple[Tensor, ...]
    """One ``[lanes · items, *item shape]`` per ragged field, in the order of the fields. Lane ``i`` begins at ``i · items``."""
    path: Path | None = None
    """The file of the control block; None: it is in private memory."""

    @property
    def parts(self) -> list[Tensor]:
        """The memory that a copy of the store consists of, in the order in which to copy it while rows are written.

        The control block comes last: it then says of all items that were replaced during the copy that they are gone.
        """
        return [*self.values, self.control.tensor]

    def copy_from(self, parts: Sequence[Tensor]) -> None:
        """Take over the :attr:`parts` of another store of the same schema. No thread writes."""
        for mine, theirs in zip(self.parts, parts, strict=True):
            mine.copy_(theirs)

    def connect(self, core: native.Store, schema: Schema) -> None:
        """Let the core read and write the items.

        Raises:
            CorruptStore: the control block is damaged, or of another store.
        """
        places = {
            number: (number, tensor.data_ptr(), it.item_bytes)
            for (number, it), tensor in zip(schema.ragged.items(), self.values, strict=True)
        }
        groups = [(it.leader, it.items, [places[number] for number in it.members]) for it in schema.ragged_groups]
        try:
            core.use_ragged(self.control.address, self.control.nbytes, groups)
        except (ValueError, CorruptStore) as error:
            raise CorruptStore(f"{self.path or 'ragged fields'}: {str(error).removesuffix('.')}.") from error


def private_rings(schema: Schema) -> RaggedMemory | None:
    """Empty rings in private memory, whose pages are taken when they are first written; None: no field is ragged.

    Raises ``OSError``: there is no space for them.
    """
    if not schema.ragged:
        return None
    names = {number: name_of(schema.fields[number].key) for number in schema.ragged}
    blocks = {n: private_block(nbytes, f"items of field {names[n]}") for n, nbytes in schema.values_bytes.items()}
    control = private_block(ragged_control_bytes(schema))
    _format(control, schema)
    return RaggedMemory(control, _shaped(schema, blocks))


def rings_in(directory: Path, schema: Schema, block: Callable[[Path, int], Block]) -> RaggedMemory | None:
    """The rings of a store's folder, mapped; None: no field is ragged.

    Args:
        directory: the folder.
        schema: what its rows are.
        block: maps a file of that size, and raises ``CorruptStore`` if it has another: :func:`engram.store.memory.file_block` or its like.
    """
    if not schema.ragged:
        return None
    path = layout.ragged_control(directory)
    control = block(path, ragged_control_bytes(schema))
    found = {number: block(*place) for number, place in layout.values_files(directory, schema).items()}
    return RaggedMemory(control, _shaped(schema, found), path)


def make_rings(
    made: files.Creation, directory: Path, schema: Schema, hidden: str, block: Callable[[Path, int], Block]
) -> None:
    """Create the files of empty rings in a folder that is to be the store's, their space reserved. Raises ``OSError``."""
    if not schema.ragged:
        return
    path = layout.ragged_control(directory, hidden)
    made.folder(path.parent)
    for place in layout.values_files(directory, schema, hidden).values():
        made.file(*place)
    made.file(path, ragged_control_bytes(schema))
    _format(block(path, ragged_control_bytes(schema)), schema)


def _format(control: Block, schema: Schema) -> None:
    groups = [(it.leader, it.items) for it in schema.ragged_groups]
    native.format_ragged(control.address, control.nbytes, schema.capacity, schema.lanes, groups)


@torch.inference_mode(mode=False)
def _shaped(schema: Schema, blocks: Mapping[int, Block]) -> tuple[Tensor, ...]:
    return tuple(
        blocks[number].tensor[: blocks[number].nbytes].view(torch_dtype(it)).view(schema.lanes * it.items, *it.shape)
        for number, it in schema.ragged.items()
    )
