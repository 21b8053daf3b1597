"""What lies in a dump of TorchRL's beside the rows: the state of writer, sampler and generator, and pickles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from engram.errors import CorruptCheckpoint
from engram.format.schema import DTYPES
from engram.saved.checkpointers import DumpedPriorities
from engram.saved.folder import convert
from engram.torchrl.described import MAX_ROWS, Count, Leaf, Parts, Shape, read_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from engram.saved.folder import Folder
    from engram.torchrl.storage import DumpedStorage


class Places(NamedTuple):
    """Folders of the components of a buffer, below that of a dump."""

    storage: Parts = ("storage",)
    sampler: Parts = ("sampler",)
    writer: Parts = ("writer",)

    @classmethod
    def of_member(cls, number: int) -> Self:
        """Of a buffer of an ensemble."""
        return cls(*((*parts, str(number)) for parts in Places()))


_PICKLES = (".pkl", ".pickle", ".pt", ".t")
#: From here on a leaf of TorchRL's min tree means "never written": its float64 trees pass through float32 on the way out.
_UNWRITTEN = torch.finfo(torch.float32).max
_MAX_RNG_BYTES = 1 << 16

_Parameter = Annotated[float, msgspec.Meta(ge=0)]


class Buffer(msgspec.Struct):
    """What is saved of a buffer itself."""

    batch_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


class WriterState(msgspec.Struct):
    """What a writer saves."""

    cursor: Count
    write_count: Count | None = None
    rank_key: str | tuple[str, ...] | None = None
    dtype: str = ""
    shape: Shape = ()


class _Priorities(msgspec.Struct):
    alpha: _Parameter = msgspec.field(name="_alpha")
    beta: _Parameter = msgspec.field(name="_beta")
    eps: _Parameter = msgspec.field(name="_eps")
    max_priority: tuple[_Parameter | None, float | None] = msgspec.field(name="_max_priority")
    max_capacity: Annotated[float, msgspec.Meta(ge=1, lt=MAX_ROWS)] = msgspec.field(name="_max_capacity")
    schema_version: Count = msgspec.field(name="_schema_version", default=0)


@dataclass(frozen=True)
class DumpedRanks:
    """What a max-value writer saved."""

    rank_key: str | tuple[str, ...]
    ranks: Tensor | None
    """float64 ``[length]``, CPU: the rank of each row, mostly with the precision of float32; None if they must be computed
    from the rows, since TorchRL's numbers of rows were rounded or do not name every row once."""


# ---- writer --------------------------------------------------------------------------------------------------------------


def described_writer(folder: Folder, parts: Parts) -> WriterState | None:
    """What a writer saved; None: one that cannot write, which saves nothing."""
    file = (*parts, "metadata.json")
    return folder.described(WriterState, file) if file[-1] in folder.names(parts) else None


def read_writer(folder: Folder, place: Parts, storage: DumpedStorage) -> tuple[int, int, DumpedRanks | None]:
    """Position and rows ever written, and what a max-value writer saved."""
    width = math.prod(storage.columns)
    live = storage.length // width
    parts = (*place, "metadata.json")
    writer = described_writer(folder, place)
    if writer is None:
        return storage.length, storage.length, None
    if writer.cursor >= storage.slots or (live < storage.slots and writer.cursor != live):
        expected = f"{live}, as many as are live" if live < storage.slots else f"less than {storage.slots}"
        raise CorruptCheckpoint(f"{folder.name(parts)}: expected a cursor of {expected}, got {writer.cursor}.")
    ranks = None
    if writer.rank_key is not None:
        ranks = DumpedRanks(writer.rank_key, _read_ranks(folder, place, writer, storage))
    # The smallest number of writes that is large enough and leaves the cursor where it is.
    count = writer.write_count or 0
    least = max(count, live)
    position = least + (writer.cursor - least) % storage.slots
    return position * width, (position if writer.write_count is None else count) * width, ranks


def _read_ranks(folder: Folder, place: Parts, writer: WriterState, storage: DumpedStorage) -> Tensor | None:
    name = folder.name((*place, "metadata.json"))
    dtype = writer.dtype.removeprefix("torch.")
    if dtype not in DTYPES or dtype == "bool" or dtype.startswith("complex"):
        raise CorruptCheckpoint(f"{name}: expected a dtype of numbers, got {writer.dtype!r}.")
    if writer.shape != (0,) and (len(writer.shape) != 2 or writer.shape[1] != 2 or writer.shape[0] > storage.slots):
        raise CorruptCheckpoint(
            f"{name}: expected at most {storage.slots} ranks with a row each, got shape {list(writer.shape)}."
        )
    if writer.shape[0] == 0:
        return torch.empty(0, dtype=torch.float64, device="cpu") if storage.length == 0 else None
    file = (*place, "current_top_values.memmap")
    values = read_tensor(folder, file, Leaf(writer.dtype, writer.shape))
    if values.is_floating_point() and storage.length > 2 / torch.finfo(values.dtype).eps:
        return None  # numbers of rows were rounded
    pairs = values.to(torch.float64)
    rows = pairs[:, 1]
    if not bool(((rows == rows.floor()) & (rows >= 0) & (rows < storage.slots)).all()):
        raise CorruptCheckpoint(f"{folder.name(file)}: expected rows of [0, {storage.slots}), got others.")
    at = rows.to(torch.int64)
    if not torch.equal(at.sort().values, torch.arange(storage.length, device="cpu")):
        return None
    ranks = torch.empty(storage.length, dtype=torch.float64, device="cpu")
    ranks[at] = pairs[:, 0]
    return ranks


# ---- sampler, generator, pickles -----------------------------------------------------------------------------------------


def read_sampler(
    folder: Folder, parts: Parts, length: int, left_out: list[str]
) -> tuple[DumpedPriorities | None, bool | None]:
    """What a prioritized sampler saved, and ``drop_last`` of one without replacement. Notes what is not read."""
    names = folder.names(parts)
    if "sampler_metadata.json" in names:
        return _read_priorities(folder, parts, length), None
    if "meta.json" not in names:  # random and slice samplers save nothing
        return None, None
    meta = folder.json((*parts, "meta.json"))
    if "drop_last" in meta:
        return None, bool(_entry_of(folder, parts, meta, "drop_last", "bool", 1))
    known = sorted(entry for entry, value in meta.items() if isinstance(value, dict))
    where = f" in {'/'.join(parts)}" if len(parts) > 1 else ""
    left_out.append(f"the sampler's state{where} ({', '.join(known)})")
    return None, None


def _entry_of(folder: Folder, parts: Parts, meta: dict[str, object], entry: str, dtype: str, limit: int) -> Tensor:
    """A small tensor of a component's own TensorDict."""
    name = folder.name((*parts, "meta.json"))
    leaf = convert(meta.get(entry), Leaf, f"{name}: {entry}")
    if leaf.dtype != f"torch.{dtype}" or not 1 <= math.prod(leaf.shape) <= limit:
        raise CorruptCheckpoint(
            f"{name}: {entry}: expected 1 to {limit} elements of {dtype}, got shape {list(leaf.shape)} {leaf.dtype!r}."
        )
    return read_tensor(folder, (*parts, f"{entry}.memmap"), leaf)


def _read_priorities(folder: Folder, parts: Parts, length: int) -> DumpedPriorities:
    described = (*parts, "sampler_metadata.json")
    state = folder.described(_Priorities, described)
    size = int(state.max_capacity)
    if size != state.max_capacity or size < length:
        raise CorruptCheckpoint(
            f"{folder.name(described)}: expected room for {length} priorities, got _max_capacity={state.max_capacity}."
        )
    sums, mins = (*parts, "sumtree.memmap"), (*parts, "mintree.memmap")
    tree = Leaf("torch.float64", (size,))
    leaves, smallest = read_tensor(folder, sums, tree, length), read_tensor(folder, mins, tree, length)
    bad = ~(leaves.isfinite() & (leaves >= 0))
    if bool(bad.any()):
        i = int(bad.int().argmax())
        raise CorruptCheckpoint(
            f"{folder.name(sums)}: expected priorities that are finite and at least 0, got {float(leaves[i])} in row {i}."
        )
    bad = (smallest != leaves) & ~((leaves == 0) & (smallest >= _UNWRITTEN))
    if bool(bad.any()):
        i = int(bad.int().argmax())
        raise CorruptCheckpoint(
            f"{folder.name(mins)}: expected {float(leaves[i])} in row {i}, as in sumtree.memmap, got {float(smallest[i])}."
        )
    value, at = state.max_priority
    row = int(at) if at is not None and 0 <= at < length and at == int(at) else None
    if value is not None and row is not None and state.schema_version == 0 and state.alpha > 0:
        # Older versions keep the priority itself or, once they had to look for the largest in the tree, the leaf there.
        leaf = leaves[row]
        if float(leaf) == float(torch.tensor(value, dtype=torch.float32)):
            value = max(float(leaf ** (1 / state.alpha)) - state.eps, 0.0)
    if value is not None and not math.isfinite(value):
        raise CorruptCheckpoint(f"{folder.name(described)}: expected a largest priority that is finite, got {value}.")
    return DumpedPriorities(state.alpha, state.beta, state.eps, leaves, value, row)


def read_rng(folder: Folder) -> Tensor | None:
    """The state of the generator that was given to the buffer; None: there was none."""
    if not folder.names(("rng_state",)):
        return None
    meta = folder.json(("rng_state", "meta.json"))
    state = _entry_of(folder, ("rng_state",), meta, "rng_state", "uint8", _MAX_RNG_BYTES)
    mine = torch.Generator(device="cpu")
    if state.numel() == mine.get_state().numel():  # else it is that of an accelerator's generator
        try:
            mine.set_state(state)
        except RuntimeError as error:
            raise CorruptCheckpoint(f"{folder.name(('rng_state', 'rng_state.memmap'))}: {error}.") from error
    return state


_LOST = {
    "prefetch.pkl": "prefetched batches, if there were any",
    "transform.t": "state of the transforms",
    "consuming_sampler.pt": "state of the consuming sampler",
    "streaming_slice.pt": "state of the streaming slice sampler",
}


def find_pickles(folder: Folder, places: Iterable[Parts]) -> list[str]:
    """Pickles that lie in some folders, and what they hold."""
    return [
        f"{'/'.join((*parts, entry))} ({_lost(entry)})"
        for parts in places
        for entry in folder.names(parts)
        if entry.endswith(_PICKLES)
    ]


def _lost(entry: str) -> str:
    of_member = entry.endswith("_transform.pt")
    return "state of a member's transforms, if there were any" if of_member else _LOST.get(entry, "a pickle")
