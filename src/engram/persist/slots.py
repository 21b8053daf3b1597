"""The slots of a tensor storage, which hooks and layouts save as they like, and what lies beside the files that they write."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import torch

from engram.errors import IncompatibleCheckpoint
from engram.format import beside, disk
from engram.format import schema as schemas
from engram.format.problems import corrupt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from engram.format.parts import PartReader
    from engram.format.schema import Schema
    from engram.store import Store
    from engram.types import RowsSource, StorageLoad, Traits

Key: TypeAlias = tuple[str, ...]

#: What says how many rows there are, in a folder that TensorDict or a layout has written.
METADATA = "storage_metadata.json"
#: What a part that hooks have changed calls itself; and one in a layout, of which HDF5 is no more written.
HOOKED = "HookedLayout"
LAYOUTS = ("FlatLayout", "NestedLayout", "HDF5Layout")


class LaidOut(Protocol):
    """The storage that is saved or loaded."""

    memory: Store | None
    traits: Traits

    @property
    def paused(self) -> AbstractContextManager[object]: ...

    def state_without_rows(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, object]: ...

    def prepare_rows(self, state: dict[str, object], source: RowsSource) -> StorageLoad: ...


class Ring(NamedTuple):
    """The slots of a storage, and what of them is live."""

    slots: int
    columns: tuple[int, ...]
    """Sizes of the dimensions after the first."""
    shift: int
    """Slot behind the one that was written last: the oldest one, if all are live. In ``[1, slots]``."""
    full: bool
    """Whether all slots are live; else those before ``shift`` are."""

    @property
    def width(self) -> int:
        """Rows of a slot."""
        return torch.Size(self.columns).numel()

    @property
    def live(self) -> int:
        """Live slots."""
        return self.slots if self.full else self.shift

    def slot_of(self, time: int) -> int:
        """The slot of the step that is that many steps younger than the oldest."""
        return (time + self.shift) % self.slots if self.full else time

    def pieces(self, most: int) -> Iterator[tuple[int, int, int]]:
        """Live steps in pieces of at most ``most``: ``(time, slot, n)``, each of ``n`` slots that lie together."""
        time = 0
        while time < self.live:
            slot = self.slot_of(time)
            n = min(most, self.live - time, self.slots - slot)
            yield time, slot, n
            time += n


def ring_of(store: Store, who: str) -> Ring:
    """The ring that a store's rows are in.

    Raises:
        RuntimeError: it has no rows. IncompatibleCheckpoint: rows of several lanes, or removed ones between others.
    """
    schema = store.schema
    if schema.lanes > 1:
        raise IncompatibleCheckpoint(
            f"{who}: dumps: expected rows of one lane, got {schema.lanes} lanes, whose cursors this layout has no place for. Save them "
            "without it, or use ndim=2."
        )
    position, length = store.lane_states()[0, :2].tolist()
    if not length:
        raise RuntimeError(f"{who}: dumps: expected rows, got none: the storage is empty.")
    width = torch.Size(schema.columns).numel()
    full = length == schema.capacity
    if int(store.core.void_rows) or length % width or (not full and position % schema.capacity != length):
        raise IncompatibleCheckpoint(
            f"{who}: dumps: expected rows [0, {length}), got some of others, as rows between them were removed: this layout cannot say "
            "which. Save them without it."
        )
    slots = schema.capacity // width
    return Ring(slots, schema.columns, (position // width % slots or slots), full)


def fields_of(store: Store, ring: Ring) -> dict[Key, Tensor]:
    """The fields of a store, ``[T, W, *shape]``. Views."""
    tensors = store.tensors
    return {
        field.key: tensor.view(ring.slots, ring.width, *tensor.shape[1:])
        for field, tensor in zip(store.schema.fields, tensors, strict=True)
    }


@runtime_checkable
class HasCursor(Protocol):
    """A snapshot in a layout that TorchRL reads, too."""

    @property
    def cursor(self) -> dict[str, int]: ...


def for_torchrl(folder: Path, snapshot: object, batch_size: object) -> None:
    """Beside a storage in a layout, write what TorchRL's ``loads`` of a buffer with a uniform sampler reads, too."""
    if isinstance(snapshot, HasCursor):
        disk.put(folder / beside.OF_DUMP, msgspec.json.encode({"batch_size": batch_size}))
        disk.put(folder / "writer" / beside.OF_WRITER, msgspec.json.encode(snapshot.cursor))


def written_store(storage: LaidOut, who: str) -> Store:
    """The store of a storage. Raises ``RuntimeError``: nothing was ever written. ``TypeError``: it has none."""
    store = storage.memory
    if store is not None:
        return store
    if not storage.traits.has_fields:
        raise TypeError(
            f"{who}: expected a storage of tensors, got a {type(storage).__name__}. Save it without this layout."
        )
    raise RuntimeError(f"{who}: dumps: expected rows, got a storage that was never written.")


def is_layout(reader: PartReader) -> bool:
    """Whether a part holds a storage in a layout."""
    return reader.part == "storage" and reader.type in LAYOUTS


def is_laid_out(reader: PartReader) -> bool:
    """Whether a part holds a storage in another form than its own."""
    return reader.type == HOOKED or is_layout(reader)


def rows_state(schema: Schema, length: int, position: int, write_count: int) -> dict[str, object]:
    """The state without rows of a tensor storage of one lane: the oldest row has the smallest ticket.

    Args:
        schema: with the capacity.
        length: live rows, whole slots.
        position: that the next row gets.
        write_count: rows ever written.
    """
    width = math.prod(schema.columns)
    slots, steps = schema.capacity // width, length // width
    seam = position // width % slots if length == schema.capacity else 0
    age = (torch.arange(steps, device="cpu") - seam) % max(steps, 1)  # of each slot: 0 is the oldest
    numbers = (age[:, None] * width + torch.arange(width, device="cpu") + 1).reshape(-1)
    return {
        "schema": schemas.encode(schema).decode(),
        "lanes": torch.tensor([[position, length, 0, 0]], device="cpu"),
        "numbers": numbers,
        "writes": None,
        "clock": length + 1,
        "write_count": write_count,
        "priorities": {},
        "passes": {},
        "windows": {},
    }


def summed(folder: Path, names: Sequence[str]) -> dict[str, object]:
    """Names, sizes and sums of files, as a state has them."""
    described, packed = beside.summed(folder, names)
    return {"files": described, "sums": torch.frombuffer(packed, dtype=torch.uint8).clone()}


def check_sums(folder: Path, noted: Mapping[str, object]) -> None:
    """Raise ``CorruptCheckpoint`` unless files are as they were; names the file."""
    expected = noted.get("sums")
    raw = expected.numpy().tobytes() if isinstance(expected, torch.Tensor) and expected.dtype is torch.uint8 else b""
    for problem in beside.damage(folder, beside.listed({beside.ENTRY: noted}), raw):
        raise corrupt(*problem)
