"""What lies in a dump of TorchRL's besides rows: fields, files and structure of the storage, the state of writer, sampler and generator."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable
from typing import Annotated, Any, NamedTuple, Self

import msgspec
import torch

from engram._support.words import raise_as
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.layout import SINGLE, encode_key
from engram.format.schema import DTYPES, MAX_DEPTH, MAX_FIELDS, Field, Node
from engram.saved.checkpointers import DumpedPriorities
from engram.saved.folder import Folder, convert
from engram.torchrl import layouts
from engram.torchrl.parts import open_layout

_NOT_TENSORS = ("NonTensorData", "NonTensorStack")
_CLASS = re.compile(r"<class '([\w.<>]+)'>")


class _Description(msgspec.Struct):
    is_pytree: bool
    len: layouts.Count
    metadata: dict[str, layouts.Leaf] = {}


class DumpedStorage:
    """Goes through ``storage/``, or what ``parts`` names, and notes fields, files and structure."""

    def __init__(self, folder: Folder, parts: layouts.Parts, ndim: int) -> None:
        self.folder = folder
        self.parts = parts
        self.ndim = ndim
        self.fields: list[Field] = []
        self.files: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.left_out: list[str] = []
        #: The rows, where each observation was saved once; None: they were saved as they are.
        self.layout: layouts.LayoutDump | None = None
        self.structure = Node("dict")
        #: Sizes of the dimensions that index rows, slots first.
        self.lead: tuple[int, ...] = ()
        self.length = 0

    @property
    def slots(self) -> int:
        return self.lead[0]

    @property
    def columns(self) -> tuple[int, ...]:
        return self.lead[1:]

    def read(self) -> None:
        self.layout = open_layout(self.folder, self.parts, layouts.Keys())
        if self.layout is not None:
            self._take(self.layout)
            return
        parts = (*self.parts, "storage_metadata.json")
        described = self.folder.described(_Description, parts)
        if described.is_pytree:
            self._read_pytree(described.metadata, self.folder.name(parts))
        else:
            self.structure = self._node(self.parts, ())
        if not self.fields:
            raise IncompatibleCheckpoint(f"{self.folder.name(self.parts)}: expected at least one tensor, got none.")
        self._set_length(described.len, self.folder.name(parts))

    def _take(self, found: layouts.LayoutDump) -> None:
        """Note the fields of rows whose observations were saved once each."""
        if len(found.columns) != self.ndim - 1:
            raise IncompatibleCheckpoint(
                f"{found.name}: expected {self.ndim} dimensions that index rows, as the storage has, got {1 + len(found.columns)}."
            )
        self.fields, self.structure, self.length = list(found.fields), found.structure, found.length
        self.lead = (found.ring.slots, *found.columns)

    def _set_length(self, length: int, name: str) -> None:
        """TorchRL counts rows; a full storage may count fewer than it has, if its size is no multiple of the columns."""
        width = math.prod(self.columns)
        slots = -(-length // width)
        if slots > self.slots or (length % width and slots < self.slots):
            raise CorruptCheckpoint(
                f"{name}: expected at most {self.slots} slots of {width} rows, whole ones, got {length} rows."
            )
        self.length = slots * width

    def _leaf(self, leaf: layouts.Leaf, key: tuple[str, ...], parts: tuple[str, ...] | None, name: str) -> Node:
        """Note a field. ``parts``: of its file, None if it has none. ``name``: of the file that describes it."""
        if leaf.is_nested:
            raise IncompatibleCheckpoint(f"{name}: field {key}: nested tensors cannot be read.")
        dtype = layouts.known_dtype(leaf.dtype, f"{name}: field {key}")
        if len(self.fields) == MAX_FIELDS:
            raise IncompatibleCheckpoint(f"{name}: more than {MAX_FIELDS} fields are not possible.")
        self._check_lead(leaf.shape, f"{name}: field {key}")
        if parts is not None:
            self.folder.open(parts, math.prod(leaf.shape) * DTYPES[dtype]).close()
            self.files[key] = parts
        self.fields.append(Field(key, dtype, leaf.shape[self.ndim :]))
        return Node("leaf", field=len(self.fields) - 1)

    def _check_lead(self, shape: tuple[int, ...], name: str) -> None:
        lead = shape[: self.ndim]
        if len(lead) < self.ndim or min(lead) < 1:
            raise IncompatibleCheckpoint(
                f"{name}: expected {self.ndim} dimensions that index rows, as the storage has, got shape {list(shape)}."
            )
        if lead != (self.lead or lead):
            raise CorruptCheckpoint(f"{name}: expected a shape that begins with {list(self.lead)}, got {list(shape)}.")
        self.lead = lead

    # ---- TensorDicts -----------------------------------------------------------------------------------------------------

    def _node(self, parts: tuple[str, ...], key: tuple[str, ...]) -> Node:
        """A TensorDict or a tensorclass, and what is below it."""
        name = self.folder.name((*parts, "meta.json"))
        meta = self.folder.json((*parts, "meta.json"))
        kind = convert(meta.get("_type"), str, name)
        if kind == layouts.TENSORDICT:
            return self._tensordict(meta, parts, key)
        match = _CLASS.fullmatch(kind)
        if match is None or not self.folder.is_folder((*parts, "_tensordict")):
            raise IncompatibleCheckpoint(f"{name}: expected a TensorDict or a tensorclass, cannot read {kind!r}.")
        others = sorted(entry for entry in meta if entry != "_type")
        if "other.pickle" in self.folder.names(parts):
            others.append("other.pickle, a pickle")
        if others:
            self.left_out.append(f"{'/'.join(parts)}: what is no tensor in {match[1]} ({', '.join(others)})")
        inside = (*parts, "_tensordict")
        meta = self.folder.json((*inside, "meta.json"))
        if meta.get("_type") != layouts.TENSORDICT:
            raise CorruptCheckpoint(f"{self.folder.name((*inside, 'meta.json'))}: expected a TensorDict.")
        inner = self._tensordict(meta, inside, key)
        return Node("tensorclass", children=inner.children, type=_class_name(match[1]), batch=inner.batch)

    def _tensordict(self, meta: dict[str, object], parts: tuple[str, ...], key: tuple[str, ...]) -> Node:
        name = self.folder.name((*parts, "meta.json"))
        shape = convert(meta.get("shape"), layouts.Shape, name)
        self._check_lead(shape, name)
        children: dict[str, Node] = {}
        for entry, value in meta.items():
            child = self._entry(value, parts, (*key, entry), name) if isinstance(value, dict) else None
            if child is not None:
                children[entry] = child
        return Node("tensordict", children=children, batch=shape[self.ndim :])

    def _entry(self, value: dict[str, object], parts: tuple[str, ...], key: tuple[str, ...], name: str) -> Node | None:
        layouts.check_key(key, name)
        kind = value.get("type")
        if kind in _NOT_TENSORS:
            folder = "/".join((*parts, encode_key(key[-1])))
            self.left_out.append(f"{folder}: field {key[0] if len(key) == 1 else key}, which is no tensor")
            return None
        if kind is None:
            leaf = convert(value, layouts.Leaf, f"{name}: field {key}")
            file = self._named(parts, key[-1], ".memmap")
            has_file = 0 not in leaf.shape or file[-1] in self.folder.names(parts)
            return self._leaf(leaf, key, file if has_file else None, name)
        return self._node(self._named(parts, key[-1], ""), key)

    def _named(self, parts: tuple[str, ...], entry: str, suffix: str) -> tuple[str, ...]:
        """Path of an entry: under its encoded name, or under the plain one that older versions used."""
        encoded = encode_key(entry) + suffix
        plain = entry + suffix
        if plain != encoded and "/" not in plain and plain not in (".", "..", ""):
            names = self.folder.names(parts)
            if encoded not in names and plain in names:
                return (*parts, plain)
        return (*parts, encoded)

    # ---- pytrees ---------------------------------------------------------------------------------------------------------

    def _read_pytree(self, leaves: dict[str, layouts.Leaf], name: str) -> None:
        if set(leaves) == {SINGLE}:
            self.structure = self._leaf(leaves[SINGLE], (SINGLE,), (*self.parts, SINGLE + ".memmap"), name)
            return
        files = self._leaf_files(leaves, name)
        tree: dict[str, object] = {}
        for dotted, leaf in leaves.items():
            key = files.get(dotted)
            if key is None and 0 not in leaf.shape:
                raise CorruptCheckpoint(f"{name}: field {dotted!r}: expected a file for it, found none.")
            file = None if key is None else (*self.parts, *key[:-1], key[-1] + ".memmap")
            key = key or tuple(dotted.split("."))
            layouts.check_key(key, name)
            node = self._leaf(leaf, key, file, name)
            _put(tree, key, node, name)
        self.structure = _containers(tree)

    def _leaf_files(self, wanted: Collection[str], name: str) -> dict[str, tuple[str, ...]]:
        """Key of every leaf by its name in the description, where dots stand both for themselves and for levels.

        The names of the files tell which: they are listed, not opened. What begins no name is not looked into.
        """
        inner = {dotted[:i] for dotted in wanted for i, letter in enumerate(dotted) if letter == "."}
        found: dict[str, tuple[str, ...]] = {}
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            parts = waiting.pop()
            for entry in self.folder.names((*self.parts, *parts)):
                leaf, folder = (*parts, entry.removesuffix(".memmap")), (*parts, entry)
                if leaf != folder and ".".join(leaf) in wanted:
                    if other := found.get(".".join(leaf)):
                        raise CorruptCheckpoint(
                            f"{name}: field {'.'.join(leaf)!r}: expected one file for it, found those of {other} and {leaf}."
                        )
                    found[".".join(leaf)] = leaf
                below = (*self.parts, *folder)
                if ".".join(folder) in inner and len(folder) < MAX_DEPTH and self.folder.is_folder(below):
                    waiting.append(folder)
        return found


def _class_name(dotted: str) -> str:
    """``module:qualname`` of a class by the longest part that is a module of this program. Nothing is imported."""
    names = dotted.split(".")
    modules = (".".join(names[:i]) for i in range(len(names) - 1, 0, -1))
    module = next((name for name in modules if name in sys.modules), ".".join(names[:-1]))
    return f"{module}:{dotted[len(module) + 1 :]}"


def _put(tree: dict[str, Any], key: tuple[str, ...], node: Node, name: str) -> None:
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise CorruptCheckpoint(f"{name}: field {key}: another field is where its parent must be.")
    if tree.setdefault(key[-1], node) is not node:
        raise CorruptCheckpoint(f"{name}: field {key} appears twice.")


def _containers(tree: dict[str, Any]) -> Node:
    """Nested dicts of leaves as a structure. What may as well be a list or a tuple is called a list."""
    children = {key: _containers(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return Node("list" if all(key == str(i) for i, key in enumerate(tree)) else "dict", children=children)


class Places(NamedTuple):
    """Folders of the components of a buffer, below that of a dump."""

    storage: layouts.Parts = ("storage",)
    sampler: layouts.Parts = ("sampler",)
    writer: layouts.Parts = ("writer",)

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

    cursor: layouts.Count
    write_count: layouts.Count | None = None
    rank_key: str | tuple[str, ...] | None = None
    dtype: str = ""
    shape: layouts.Shape = ()


class _Priorities(msgspec.Struct):
    alpha: _Parameter = msgspec.field(name="_alpha")
    beta: _Parameter = msgspec.field(name="_beta")
    eps: _Parameter = msgspec.field(name="_eps")
    max_priority: tuple[_Parameter | None, float | None] = msgspec.field(name="_max_priority")
    max_capacity: Annotated[float, msgspec.Meta(ge=1, lt=layouts.MAX_ROWS)] = msgspec.field(name="_max_capacity")
    schema_version: layouts.Count = msgspec.field(name="_schema_version", default=0)


# ---- writer --------------------------------------------------------------------------------------------------------------


def described_writer(folder: Folder, parts: layouts.Parts) -> WriterState | None:
    """What a writer saved; None: one that cannot write, which saves nothing."""
    file = (*parts, "metadata.json")
    return folder.described(WriterState, file) if file[-1] in folder.names(parts) else None


def read_writer(folder: Folder, place: layouts.Parts, storage: DumpedStorage) -> tuple[int, int]:
    """Position and rows ever written."""
    width = math.prod(storage.columns)
    live = storage.length // width
    parts = (*place, "metadata.json")
    writer = described_writer(folder, place)
    if writer is None:
        return storage.length, storage.length
    if writer.cursor >= storage.slots or (live < storage.slots and writer.cursor != live):
        expected = f"{live}, as many as are live" if live < storage.slots else f"less than {storage.slots}"
        raise CorruptCheckpoint(f"{folder.name(parts)}: expected a cursor of {expected}, got {writer.cursor}.")
    if writer.rank_key is not None:
        _check_ranks(folder, place, writer, storage)
    # The smallest number of writes that is large enough and leaves the cursor where it is.
    count = writer.write_count or 0
    least = max(count, live)
    position = least + (writer.cursor - least) % storage.slots
    return position * width, (position if writer.write_count is None else count) * width


def _check_ranks(folder: Folder, place: layouts.Parts, writer: WriterState, storage: DumpedStorage) -> None:
    """Of a max-value writer. They follow from the rows; but what is damaged is not loaded."""
    name = folder.name((*place, "metadata.json"))
    dtype = writer.dtype.removeprefix("torch.")
    if dtype not in DTYPES or dtype == "bool" or dtype.startswith("complex"):
        raise CorruptCheckpoint(f"{name}: expected a dtype of numbers, got {writer.dtype!r}.")
    if writer.shape != (0,) and (len(writer.shape) != 2 or writer.shape[1] != 2 or writer.shape[0] > storage.slots):
        raise CorruptCheckpoint(
            f"{name}: expected at most {storage.slots} ranks with a row each, got shape {list(writer.shape)}."
        )
    if writer.shape[0]:
        file = (*place, "current_top_values.memmap")
        rows = layouts.read_tensor(folder, file, layouts.Leaf(writer.dtype, writer.shape)).to(torch.float64)[:, 1]
        if not bool(((rows == rows.floor()) & (rows >= 0) & (rows < storage.slots)).all()):
            raise CorruptCheckpoint(f"{folder.name(file)}: expected rows of [0, {storage.slots}), got others.")


# ---- sampler, generator, pickles -----------------------------------------------------------------------------------------


def read_sampler(folder: Folder, parts: layouts.Parts, length: int, left_out: list[str]) -> DumpedPriorities | None:
    """What a prioritized sampler saved; None: another one. Notes what is not read."""
    names = folder.names(parts)
    if "sampler_metadata.json" in names:
        return _read_priorities(folder, parts, length)
    if "meta.json" not in names:  # random and slice samplers save nothing
        return None
    meta = folder.json((*parts, "meta.json"))
    if "drop_last" in meta:  # of one without replacement, whose pass begins again
        _entry_of(folder, parts, meta, "drop_last", "bool", 1)
        return None
    known = sorted(entry for entry, value in meta.items() if isinstance(value, dict))
    where = f" in {'/'.join(parts)}" if len(parts) > 1 else ""
    left_out.append(f"the sampler's state{where} ({', '.join(known)})")
    return None


def _entry_of(
    folder: Folder, parts: layouts.Parts, meta: dict[str, object], entry: str, dtype: str, limit: int
) -> torch.Tensor:
    """A small tensor of a component's own TensorDict."""
    name = folder.name((*parts, "meta.json"))
    leaf = convert(meta.get(entry), layouts.Leaf, f"{name}: {entry}")
    if leaf.dtype != f"torch.{dtype}" or not 1 <= math.prod(leaf.shape) <= limit:
        raise CorruptCheckpoint(
            f"{name}: {entry}: expected 1 to {limit} elements of {dtype}, got shape {list(leaf.shape)} {leaf.dtype!r}."
        )
    return layouts.read_tensor(folder, (*parts, f"{entry}.memmap"), leaf)


def _read_priorities(folder: Folder, parts: layouts.Parts, length: int) -> DumpedPriorities:
    described = (*parts, "sampler_metadata.json")
    state = folder.described(_Priorities, described)
    size = int(state.max_capacity)
    if size != state.max_capacity or size < length:
        raise CorruptCheckpoint(
            f"{folder.name(described)}: expected room for {length} priorities, got _max_capacity={state.max_capacity}."
        )
    sums, mins = (*parts, "sumtree.memmap"), (*parts, "mintree.memmap")
    tree = layouts.Leaf("torch.float64", (size,))
    leaves, smallest = layouts.read_tensor(folder, sums, tree, length), layouts.read_tensor(folder, mins, tree, length)
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
    return DumpedPriorities(state.alpha, state.beta, state.eps, leaves, value)


def read_rng(folder: Folder) -> torch.Tensor | None:
    """The state of the generator that was given to the buffer; None: there was none."""
    if not folder.names(("rng_state",)):
        return None
    meta = folder.json(("rng_state", "meta.json"))
    state = _entry_of(folder, ("rng_state",), meta, "rng_state", "uint8", _MAX_RNG_BYTES)
    mine = torch.Generator(device="cpu")
    if state.numel() == mine.get_state().numel():  # else it is that of an accelerator's generator
        with raise_as(CorruptCheckpoint, folder.name(("rng_state", "rng_state.memmap")), RuntimeError):
            mine.set_state(state)
    return state


_LOST = {
    "prefetch.pkl": "prefetched batches, if there were any",
    "transform.t": "state of the transforms",
    "consuming_sampler.pt": "state of the consuming sampler",
    "streaming_slice.pt": "state of the streaming slice sampler",
}


def find_pickles(folder: Folder, places: Iterable[layouts.Parts]) -> list[str]:
    """Pickles that lie in some folders, and what they hold."""
    pickles = ((parts, entry) for parts in places for entry in folder.names(parts) if entry.endswith(_PICKLES))
    return [f"{'/'.join((*parts, entry))} ({_lost(entry)})" for parts, entry in pickles]


def _lost(entry: str) -> str:
    of_member = entry.endswith("_transform.pt")
    return "state of a member's transforms, if there were any" if of_member else _LOST.get(entry, "a pickle")
