"""Batches as a sampling log describes them: which arrays they have, and a digest of what was read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from engram._dtypes import DTYPE_NAMES, DTYPE_OF
from engram.around import Expander
from engram.field_paths import public
from engram.format.draws import Entry, Form
from engram.samplers._base import NativeSampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from engram.buffer.wiring import Wiring
    from engram.types import Entry as Key
    from engram.types import Info

#: The entry of a batch's info that has the tickets of its rows.
NUMBERS = "index_generation"
#: The same, of a batch whose info does not have them without a log.
TICKETS = "engram.tickets"


class Drawn(NamedTuple):
    """What was read of a batch, before it is collated and transformed."""

    columns: list[Tensor]
    computed: dict[Key, Tensor]
    """Of expanders, by key."""

    @classmethod
    def of(cls, wiring: Wiring, columns: Sequence[Tensor], info: Info) -> Drawn:
        """``info``: of the batch, of which some entries are computed."""
        return cls(list(columns), {key: cast("Tensor", info[key]) for key in wiring.source.computed_keys})

    @property
    def arrays(self) -> list[Tensor]:
        return [*self.columns, *self.computed.values()]

    def values(self, places: NDArray[np.int64], lead: int) -> list[memoryview]:
        """What all arrays have at some places, whose first ``lead`` dimensions are those of the rows."""
        which = torch.from_numpy(places)
        return [bytes_of(array.flatten(0, lead - 1)[which]) for array in self.arrays]

    def digest(self) -> bytes:
        """xxh3-128 of all arrays, in order."""
        summing = xxhash.xxh3_128()
        for array in self.arrays:
            summing.update(bytes_of(array))
        return summing.digest()


def bytes_of(array: object) -> memoryview:
    """A tensor or array, as a contiguous buffer in C order. A view where it can be."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else cast("Tensor", array)
    buffer: memoryview
    if tensor.is_cpu and tensor.dtype in _OF_NUMPY and tensor.is_contiguous() and not tensor.requires_grad:
        buffer = tensor.numpy().data
    else:
        buffer = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return buffer


#: The usual dtypes that NumPy has, too.
_OF_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


def nbytes_of(entry: Entry, shape: Sequence[int]) -> int:
    """Bytes of an array of that shape. Raises ``ValueError``: no such dtype or shape."""
    if entry.dtype not in DTYPE_OF or min(shape, default=0) < 0:
        raise ValueError(f"expected a dtype and a shape, got {entry.dtype!r} {list(shape)}")
    return DTYPE_OF[entry.dtype].itemsize * math.prod(shape)


def tensor_of(raw: memoryview, entry: Entry, shape: Sequence[int]) -> Tensor:
    """A tensor of the bytes of an entry. A copy."""
    made = torch.empty(tuple(shape), dtype=DTYPE_OF[entry.dtype], device="cpu")
    made.reshape(-1).view(torch.uint8).numpy().data[:] = raw
    return made


def says_tickets(wiring: Wiring) -> bool:
    """Whether a batch's info has tickets without a log, too."""
    if wiring.of_writer.tracks_tickets or wiring.of_sampler.prioritized:
        return True
    source = wiring.source
    # A sampler of the user's own inside an expander may.
    return isinstance(source, Expander) and (source.traits.consumes or not isinstance(source.innermost, NativeSampler))


def expanders_of(wiring: Wiring) -> tuple[str, ...]:
    """Classes of the expanders, the innermost first."""
    source = wiring.source
    return tuple(type(one).__name__ for one in source.chain) if isinstance(source, Expander) else ()


def form_of(wiring: Wiring, drawn: Drawn, rows: Tensor, said: tuple[Entry, ...]) -> Form:
    """How a log describes batches like this one."""
    memory, source = wiring.storage.memory, wiring.source
    schema, lead = memory.schema, rows.ndim
    named = source.innermost if isinstance(source, Expander) else wiring.sampler
    return Form(
        capacity=schema.capacity,
        lanes=schema.lanes,
        base=0,
        sampler=type(named).__name__,
        around=expanders_of(wiring),
        steps=rows.shape[1] if lead > 1 else 0,
        row_bytes=4 if schema.capacity <= 1 << 32 else 8,
        columns=tuple(
            Entry(field.key, DTYPE_NAMES[column.dtype], tuple(column.shape[lead:]))
            for field, column in zip(schema.fields, drawn.columns, strict=False)  # a field may have been added since
        ),
        computed=tuple(entry_of(key, value, rows) for key, value in drawn.computed.items()),
        said=said,
    )


def entry_of(key: object, value: object, rows: Tensor) -> Entry:
    """How a log describes an array of a batch. Raises ``TypeError``: it is none, or its key is no key."""
    array = isinstance(value, np.ndarray)
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    path = (key,) if isinstance(key, str) else key
    if not (isinstance(path, tuple) and all(isinstance(part, str) for part in path)):
        raise TypeError(f"SamplingLog: info: expected keys that are str or tuples of them, got {key!r}.")
    if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"SamplingLog: info[{key!r}]: expected a tensor or an array, got {type(value).__name__}. A sampler whose info is something "
            "else cannot be logged."
        )
    whole = tensor.shape[: rows.ndim] != rows.shape
    shape = tuple(tensor.shape if whole else tensor.shape[rows.ndim :])
    return Entry(path, DTYPE_NAMES[tensor.dtype], shape, isinstance(key, str), whole, array)


def key_of(entry: Entry) -> Key:
    """The key of an entry, as the info had it."""
    return public(entry.key) if entry.plain else entry.key


def described(entries: Iterable[Entry]) -> list[tuple[object, ...]]:
    """What must be equal of arrays, so that they can be compared."""
    return [(entry.key, entry.dtype, entry.shape) for entry in entries]
