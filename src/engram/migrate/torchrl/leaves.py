"""Where the components of a buffer lie in a dump of TorchRL's, and small tensors in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from engram._dtypes import DTYPE_OF
from engram.errors import CorruptCheckpoint
from engram.format.schema import MAX_DIMS, validate_key

if TYPE_CHECKING:
    from typing import Self

    from engram.format.folder import Folder

MAX_ROWS = 1 << 58

Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ROWS)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]

Parts = tuple[str, ...]


class Leaf(msgspec.Struct):
    """What TorchRL's JSON says of a tensor."""

    dtype: str
    shape: Shape
    is_nested: bool = False


class Places(NamedTuple):
    """Folders of the components of a buffer, below that of a dump."""

    storage: Parts = ("storage",)
    sampler: Parts = ("sampler",)
    writer: Parts = ("writer",)

    @classmethod
    def of_member(cls, number: int) -> Self:
        """Of a buffer of an ensemble."""
        return cls(*((*parts, str(number)) for parts in Places()))


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return values.reshape(-1).view(torch.uint8).numpy().data


def read_tensor(folder: Folder, parts: Parts, leaf: Leaf, rows: int | None = None) -> Tensor:
    """The first rows of a small tensor, all without ``rows``, in fresh memory. Its dtype is in the table."""
    dtype = DTYPE_OF[leaf.dtype.removeprefix("torch.")]
    nbytes = math.prod(leaf.shape) * dtype.itemsize
    folder.check(parts, nbytes)  # before anything is allocated
    values = torch.empty(leaf.shape if rows is None else (rows, *leaf.shape[1:]), dtype=dtype, device="cpu")
    if values.numel():
        folder.read_into(bytes_of(values), parts, nbytes)
    check_bools(values, folder.name(parts))
    return values


def check_bools(values: Tensor, name: str) -> None:
    """Raise ``CorruptCheckpoint`` if bytes that are read as bool are neither 0 nor 1: what torch makes of them is undefined."""
    if values.dtype is torch.bool and values.numel() and int(values.view(torch.uint8).max()) > 1:
        raise CorruptCheckpoint(f"{name}: expected bools, got bytes other than 0 and 1.")


def check_key(key: tuple[str, ...], name: str) -> None:
    """Raise ``CorruptCheckpoint`` for a key that no store can hold."""
    try:
        validate_key(key)
    except ValueError as error:
        raise CorruptCheckpoint(f"{name}: {str(error).removesuffix('.')}.") from error
