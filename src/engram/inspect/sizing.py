"""The size of a storage, before it is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from engram._support import checks, devices, words
from engram._support.memory import missing_share
from engram.around import Expander
from engram.format import layout, schema
from engram.format.sizes import DevicePlan, ShownField
from engram.storages import _structure, _types, announcing

__all__ = ["DevicePlan", "StoragePlan", "plan"]


_PAGE = 4096
#: Where ragged fields lie.
_RAGGED = f"{layout.FOLDER}/{layout.RAGGED}"


class StoragePlan(NamedTuple):
    """The result of :func:`plan`. ``print`` shows it as a table.

    >>> import torch
    >>> from engram import plan
    >>> estimate = plan({"obs": torch.zeros(4)}, 1_000)
    >>> estimate.row_bytes, estimate.nbytes
    (16, 16000)
    """

    capacity: int
    fields: tuple[schema.Field, ...]
    #: Bytes of one row.
    row_bytes: int
    #: Bytes of all rows, and of the items of ragged ones.
    nbytes: int
    #: Bytes beside the rows: a ticket and a lap per row, and the control block of a store with one lane.
    overhead: int
    #: Those that were given, by the fields' paths.
    dtypes: _types.Dtypes = _types.NO_DTYPES
    #: With a sampler that stacks frames or reads next observations from other rows: bytes of a row that held them ready. Else 0.
    ready_bytes: int = 0
    #: Bytes of the final observations that such a sampler needs.
    finals_bytes: int = 0
    #: Bytes that the store may have in memory, as they were given. 0: none were.
    memory: int = 0
    #: Bytes that every draw touches, which must fit into memory: those beside the rows, and the priorities of one sampler.
    resident: int = 0
    #: ``group_small_fields``, as it was given.
    grouped: int = 0
    #: What rows take on the ``device`` that was given, and what that device takes on the host.
    on_device: DevicePlan | None = None

    def from_disk(self, batch_size: int) -> float:
        """Bytes that a uniform batch reads from disk on average, in whole pages, while memory is full.

        0 where all rows fit. Exact for draws that are independent; windows read less, as rows share pages. Items of ragged fields
        are not counted.

        Raises:
            ValueError: the plan was made without ``memory``.

        >>> import torch, engram
        >>> found = engram.plan({"a": torch.zeros(10)}, 1_000_000, memory=50_000_000)
        >>> round(found.from_disk(256))
        567446
        """
        if not self.memory:
            raise ValueError(
                "from_disk: expected a plan that knows how much memory there is, got one without. "
                "Use engram.plan(example, capacity, memory=bytes)."
            )
        missing = missing_share(max(1, self.nbytes), self.memory, self.resident)
        # A row of r bytes begins anywhere in a page, in steps of what r and the page have in common.
        rows = schema.Schema(self.capacity, 1, (), self.fields, schema.Node("leaf"), grouped=self.grouped)
        group = layout.group_of(rows)
        together = group.offsets if group else {}
        alone = (f for n, f in enumerate(self.fields) if n not in together and f.ragged is None)
        sizes = [f.row_bytes for f in alone if f.row_bytes]
        sizes += [group.stride] if group else []
        pages = sum((size - math.gcd(size, _PAGE)) / _PAGE + 1 for size in sizes)
        return batch_size * pages * _PAGE * missing

    @property
    def spared(self) -> int:
        """Bytes by which the rows, with final observations, are smaller than with ready stacks and next observations."""
        return max(0, self.ready_bytes * self.capacity - self.nbytes - self.finals_bytes) if self.ready_bytes else 0

    def __str__(self) -> str:
        lines = [*map(self._line, self.fields)]
        row, total, beside = map(words.format_size, (self.row_bytes, self.nbytes, self.overhead))
        lines.append(f"{words.count(self.capacity, 'row')} of {row}: {total}, and {beside} beside them")
        if self.spared:
            ready = self.ready_bytes * self.capacity
            lines.append(
                f"With stacks and next observations in each row: {words.format_size(ready)}. Stored once, they spare "
                f"{words.format_size(self.spared)} ({words.format_share(self.spared / ready)}), with "
                f"{words.format_size(self.finals_bytes)} of final observations"
            )
        if self.memory:
            lines.append(self._in_memory())
        if self.on_device is not None:
            lines.append(str(self.on_device))
        return "\n".join([*lines, *announcing.advice(self.fields, self.dtypes)])

    def _line(self, field: schema.Field) -> str:
        it = ShownField.of(field, self.capacity)
        where = _RAGGED if it.is_ragged else f"{'/'.join(field.key)}.memmap"
        shape = f"rows {it.shape}" if it.is_ragged else f"shape {[self.capacity, *field.shape]}"
        return f"{it.name}: {where} or RAM, {words.format_size(it.nbytes)}, {shape} {it.dtype}"

    def _in_memory(self) -> str:
        have = f"In {words.format_size(self.memory)} of memory: "
        if self.memory < self.resident:
            return f"{have}too little. Tickets and priorities need {words.format_size(self.resident)}, or each draw waits for the disk"
        batch = self.from_disk(256)
        read = f"a batch of 256 rows reads {words.format_size(round(batch))} from disk" if batch else "all rows fit"
        return f"{have}{words.format_size(self.resident)} for tickets and priorities; {read}"


def plan(
    example: object,
    capacity: int,
    *,
    dtypes: Mapping[str | tuple[str, ...], torch.dtype] | None = None,
    sampler: Expander | None = None,
    memory: int | None = None,
    group_small_fields: int = 0,
    device: torch.device | str | int | None = None,
    batch_size: int = 256,
) -> StoragePlan:
    """Compute how much space a tensor storage needs, without allocating anything.

    Args:
        example: one row, as for ``add``.
        capacity: number of rows, at least 1.
        dtypes: as for the storages.
        sampler: the expander that batches will be drawn with, such as a :class:`FrameStack` around a :class:`NextFromFollowing`:
            the plan is of rows as they are stored then, and shows what storing frames once spares.
        memory: bytes that the store may have in memory, at least 1: what is left beside the program, which takes some hundred MB
            with torch. The plan then says what must stay there, and what a batch reads from disk; ``engram doctor DIR`` says how
            many batches per second that makes.
        group_small_fields: as for :class:`LazyMemmapStorage`: a row of all small fields is then read at once.
        device: an accelerator, such as ``"cuda"``. The plan then also has the memory that rows take there, and that a device which
            reads rows by itself takes on the host, and says what does not fit. It need not be in this machine: what is free is then
            unknown.
        batch_size: rows of a batch, at least 1: of a loader to the ``device``.

    Returns:
        A :class:`StoragePlan` with the fields, and the bytes of a row, of all rows and of the metadata. Its text names the ``dtypes``
        that halve float64 fields.

    Raises:
        TypeError: the row cannot be stored; the message names the field. ``capacity``, ``memory``, ``group_small_fields`` or
            ``batch_size`` is not an int. ``dtypes`` that are none. ``sampler`` is no expander.
        KeyError: ``dtypes`` of a field that is not there; a field of the ``sampler`` is not.
        ValueError: a field has an unsupported value; ``capacity``, ``memory`` or ``batch_size`` is below 1, ``group_small_fields`` below
            0; the ``device`` is the CPU.
        RuntimeError: no such device, on a machine that has others.

    >>> import torch, engram
    >>> print(engram.plan({"obs": torch.zeros(4, 84, 84, dtype=torch.uint8), "reward": torch.zeros(1)}, 1_000_000))
    obs: obs.memmap or RAM, 28.2 GB, shape [1000000, 4, 84, 84] uint8
    reward: reward.memmap or RAM, 4 MB, shape [1000000, 1] float32
    1,000,000 rows of 28.2 kB: 28.2 GB, and 20 MB beside them
    >>> print(str(engram.plan({"obs": torch.zeros(28_224, dtype=torch.uint8)}, 1_000_000, memory=8_000_000_000)).splitlines()[-1])
    In 8 GB of memory: 31.5 MB for tickets and priorities; a batch of 256 rows reads 5.93 MB from disk

    >>> print(engram.plan({"obs": torch.zeros(4)}, 1_000_000, device="cuda").on_device.resident)
    32000128

    >>> from engram import FinalObservations, FrameStack, LazyTensorStorage, NextFromFollowing, RandomSampler
    >>> sampler = NextFromFollowing(RandomSampler(), FinalObservations(["frame"], LazyTensorStorage(2_000)))
    >>> sampler = FrameStack(sampler, n=4, dim=-3, in_keys=["frame"])
    >>> frame = torch.zeros(1, 84, 84, dtype=torch.uint8)
    >>> row = {"frame": frame, "next": {"frame": frame, "done": torch.tensor(False)}}
    >>> print(engram.plan(row, 1_000_000, sampler=sampler))
    frame: frame.memmap or RAM, 7.06 GB, shape [1000000, 1, 84, 84] uint8
    ('next', 'done'): next/done.memmap or RAM, 1 MB, shape [1000000] bool
    ('next', 'final'): next/final.memmap or RAM, 16 MB, shape [1000000, 2] int64
    1,000,000 rows of 7.07 kB: 7.07 GB, and 20 MB beside them
    With stacks and next observations in each row: 56.4 GB. Stored once, they spare 49.4 GB (87.4 %), with 14.1 MB of final observations
    """
    from engram._support import native

    capacity = checks.check_count("plan: capacity", capacity)
    memory = 0 if memory is None else checks.check_count("plan: memory", memory)
    together = checks.check_count("plan: group_small_fields", group_small_fields, "bytes", least=0)
    batch_size = checks.check_count("plan: batch_size", batch_size)
    checked = _types.NO_DTYPES if dtypes is None else _types.checked_dtypes(dtypes, "plan")
    structure = _structure.Structure.of(example, batched=False, call="plan", dtypes=checked)
    fields, ready, finals = structure.fields, 0, 0
    if sampler is not None:
        sampler = checks.check_type("plan: sampler", sampler, Expander, "an expander, such as a FrameStack")
        fields = sampler.stored(fields)
        ready = sampler.ready_bytes(fields)
        finals = sum(expander.beside_bytes(fields) for expander in sampler.chain)
    row_bytes = sum(field.row_bytes for field in fields)
    nbytes = sum(ShownField.of(field, capacity).nbytes for field in fields)
    overhead = layout.tickets_bytes(capacity) + native.control_bytes(1)
    spans = capacity * sum(field.row_bytes for field in fields if field.ragged is not None)
    resident = overhead + spans + native.priority_bytes(capacity, True)
    sizes, there = [field.row_bytes for field in fields], None
    if device is not None:
        there = DevicePlan.of(*devices.foreseen(device), capacity, sizes, overhead, batch_size, finals)
    return StoragePlan(
        capacity, fields, row_bytes, nbytes, overhead, checked, ready, finals, memory, resident, together, there
    )  # fmt: skip
