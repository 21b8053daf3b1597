"""The size of a storage, before it is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engram._checks import check_count
from engram._words import said_bytes
from engram.format import layout
from engram.storages._dtypes import NO_DTYPES, Dtypes, checked_dtypes
from engram.storages._structure import Structure
from engram.storages.announcing import advice, creation_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from engram.format.schema import Field

__all__ = ["StoragePlan", "plan"]


class StoragePlan(NamedTuple):
    """The result of :func:`plan`. ``print`` shows it as a table."""

    capacity: int
    fields: tuple[Field, ...]
    row_bytes: int
    """Bytes of one row."""
    nbytes: int
    """Bytes of all rows."""
    overhead: int
    """Bytes beside the rows: a ticket and a lap per row, and the control block of a store with one lane."""
    dtypes: Dtypes = NO_DTYPES
    """Those that were given, by the fields' paths."""

    def __str__(self) -> str:
        lines = creation_lines(self.fields, self.capacity, lambda field: "/".join(field.key) + ".memmap or RAM")
        total = f"{self.capacity} rows of {self.row_bytes} bytes: {said_bytes(self.nbytes)}"
        return "\n".join(
            [*lines, f"{total}, and {said_bytes(self.overhead)} beside them", *advice(self.fields, self.dtypes)]
        )


def plan(
    example: object, capacity: int, *, dtypes: Mapping[str | tuple[str, ...], torch.dtype] | None = None
) -> StoragePlan:
    """Compute how much space a tensor storage needs, without allocating anything.

    Args:
        example: one row, as for ``add``.
        capacity: number of rows, at least 1.
        dtypes: as for the storages.

    Returns:
        A :class:`StoragePlan` with the fields, and the bytes of a row, of all rows and of the metadata. Its text names the ``dtypes``
        that halve float64 fields.

    Raises:
        TypeError: the row cannot be stored; the message names the field. ``capacity`` is not an int. ``dtypes`` that are none.
        KeyError: ``dtypes`` of a field that is not there.
        ValueError: a field has an unsupported value; ``capacity`` is below 1.

    >>> import torch, engram
    >>> print(engram.plan({"obs": torch.zeros(4, 84, 84, dtype=torch.uint8), "reward": torch.zeros(1)}, 1_000_000))
    obs: obs.memmap or RAM, 28224.000 MB, shape [1000000, 4, 84, 84] uint8
    reward: reward.memmap or RAM, 4.000 MB, shape [1000000, 1] float32
    1000000 rows of 28228 bytes: 28228.000 MB, and 12.045 MB beside them
    """
    from engram import _native

    capacity = check_count("plan: capacity", capacity)
    checked = NO_DTYPES if dtypes is None else checked_dtypes(dtypes, "plan")
    structure = Structure.of(example, batched=False, call="plan", dtypes=checked)
    row_bytes = sum(field.row_bytes for field in structure.fields)
    overhead = layout.tickets_bytes(capacity) + _native.control_bytes(1)
    return StoragePlan(capacity, structure.fields, row_bytes, row_bytes * capacity, overhead, checked)
