"""What all readers of TorchRL's files ask: descriptions of tensors, their bytes, dtypes and keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import torch

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.schema import DTYPES, MAX_DIMS, Node, validate_key
from engram.saved.snapshot import bytes_of
from engram.store.memory import DTYPE_OF

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from engram.saved.folder import Folder

#: What TensorDict's files say of a TensorDict.
TENSORDICT = "<class 'tensordict._td.TensorDict'>"
MAX_ROWS = 1 << 58

Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ROWS)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]

Parts: TypeAlias = tuple[str, ...]


class Leaf(msgspec.Struct):
    """What TorchRL's JSON says of a tensor."""

    dtype: str
    shape: Shape
    is_nested: bool = False


def read_tensor(folder: Folder, parts: Parts, leaf: Leaf, rows: int | None = None) -> Tensor:
    """The first rows of a small tensor, all without ``rows``, in fresh memory. Its dtype is in the table."""
    dtype = DTYPE_OF[leaf.dtype.removeprefix("torch.")]
    nbytes = math.prod(leaf.shape) * dtype.itemsize
    folder.check(parts, nbytes)  # before anything is allocated
    values = torch.empty(leaf.shape if rows is None else (rows, *leaf.shape[1:]), dtype=dtype, device="cpu")
    if values.numel():
        folder.read_into(bytes_of(values), parts, nbytes)
    return check_bools(values, folder.name(parts))


def check_bools(values: Tensor, name: str) -> Tensor:
    """Values. Raise ``CorruptCheckpoint`` if bytes that are read as bool are neither 0 nor 1: what torch makes of them is undefined."""
    if values.dtype is torch.bool and values.numel() and int(values.contiguous().view(torch.uint8).max()) > 1:
        raise CorruptCheckpoint(f"{name}: expected bools, got bytes other than 0 and 1.")
    return values


def check_key(key: tuple[str, ...], name: str) -> None:
    """Raise ``CorruptCheckpoint`` for a key that no store can hold."""
    try:
        validate_key(key)
    except ValueError as error:
        raise CorruptCheckpoint(f"{name}: {str(error).removesuffix('.')}.") from error


def known_dtype(dtype: str, where: str) -> str:
    """The name of a dtype. Raises ``IncompatibleCheckpoint``: it cannot be stored."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPES:
        raise IncompatibleCheckpoint(f"{where}: dtype {dtype!r:.100} cannot be stored. Possible: {', '.join(DTYPES)}.")
    return name


def renumbered(node: Node, numbers: Mapping[int, int]) -> Node:
    """The structure with other numbers of fields, without fields that have none."""
    if node.kind == "leaf":
        return Node("leaf", field=numbers[node.field])
    kept = {key: it for key, it in node.children.items() if it.kind != "leaf" or it.field in numbers}
    made = {key: (it, renumbered(it, numbers)) for key, it in kept.items()}
    left = {key: one for key, (it, one) in made.items() if one.children or not it.children}  # of others nothing is left
    return msgspec.structs.replace(node, children=left)
