"""Fields, files and structure of the storage in a TorchRL dump."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.layout import SINGLE, encode_key
from engram.format.schema import DTYPES, MAX_DEPTH, MAX_FIELDS, Field, Node
from engram.saved.folder import convert
from engram.torchrl.described import TENSORDICT, Count, Leaf, Parts, Shape, check_key, known_dtype
from engram.torchrl.layouts import Keys
from engram.torchrl.parts import open_layout

if TYPE_CHECKING:
    from collections.abc import Collection

    from engram.saved.folder import Folder
    from engram.torchrl.layouts import LayoutDump

_NOT_TENSORS = ("NonTensorData", "NonTensorStack")
_CLASS = re.compile(r"<class '([\w.<>]+)'>")


class _Description(msgspec.Struct):
    is_pytree: bool
    len: Count
    metadata: dict[str, Leaf] = {}


class DumpedStorage:
    """Goes through ``storage/``, or what ``parts`` names, and notes fields, files and structure."""

    def __init__(self, folder: Folder, parts: Parts, ndim: int) -> None:
        self.folder = folder
        self.parts = parts
        self.ndim = ndim
        self.fields: list[Field] = []
        self.files: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.left_out: list[str] = []
        #: The rows, where each observation was saved once; None: they were saved as they are.
        self.layout: LayoutDump | None = None
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
        self.layout = open_layout(self.folder, self.parts, Keys())
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

    def _take(self, found: LayoutDump) -> None:
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

    def _leaf(self, leaf: Leaf, key: tuple[str, ...], parts: tuple[str, ...] | None, name: str) -> Node:
        """Note a field. ``parts``: of its file, None if it has none. ``name``: of the file that describes it."""
        if leaf.is_nested:
            raise IncompatibleCheckpoint(f"{name}: field {key}: nested tensors cannot be read.")
        dtype = known_dtype(leaf.dtype, f"{name}: field {key}")
        if len(self.fields) == MAX_FIELDS:
            raise IncompatibleCheckpoint(f"{name}: more than {MAX_FIELDS} fields are not possible.")
        self._check_lead(leaf.shape, f"{name}: field {key}")
        if parts is not None:
            self.folder.check(parts, math.prod(leaf.shape) * DTYPES[dtype])
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
        if kind == TENSORDICT:
            return self._tensordict(meta, parts, key)
        match = _CLASS.fullmatch(kind)
        if match is None or not self.folder.is_folder((*parts, "_tensordict")):
            raise IncompatibleCheckpoint(
                f"{name}: expected a TensorDict or a tensorclass, got {kind!r}: it cannot be read."
            )
        others = sorted(entry for entry in meta if entry != "_type")
        if "other.pickle" in self.folder.names(parts):
            others.append("other.pickle, a pickle")
        if others:
            self.left_out.append(f"{'/'.join(parts)}: what is no tensor in {match[1]} ({', '.join(others)})")
        inside = (*parts, "_tensordict")
        meta = self.folder.json((*inside, "meta.json"))
        if meta.get("_type") != TENSORDICT:
            raise CorruptCheckpoint(f"{self.folder.name((*inside, 'meta.json'))}: expected a TensorDict.")
        inner = self._tensordict(meta, inside, key)
        return Node("tensorclass", children=inner.children, type=_class_name(match[1]), batch=inner.batch)

    def _tensordict(self, meta: dict[str, object], parts: tuple[str, ...], key: tuple[str, ...]) -> Node:
        name = self.folder.name((*parts, "meta.json"))
        shape = convert(meta.get("shape"), Shape, name)
        self._check_lead(shape, name)
        children: dict[str, Node] = {}
        for entry, value in meta.items():
            child = self._entry(value, parts, (*key, entry), name) if isinstance(value, dict) else None
            if child is not None:
                children[entry] = child
        return Node("tensordict", children=children, batch=shape[self.ndim :])

    def _entry(self, value: dict[str, object], parts: tuple[str, ...], key: tuple[str, ...], name: str) -> Node | None:
        check_key(key, name)
        kind = value.get("type")
        if kind in _NOT_TENSORS:
            folder = "/".join((*parts, encode_key(key[-1])))
            self.left_out.append(f"{folder}: field {key[0] if len(key) == 1 else key}, which is no tensor")
            return None
        if kind is None:
            leaf = convert(value, Leaf, f"{name}: field {key}")
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

    def _read_pytree(self, leaves: dict[str, Leaf], name: str) -> None:
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
            check_key(key, name)
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
                if (
                    ".".join(folder) in inner
                    and len(folder) < MAX_DEPTH
                    and self.folder.is_folder((*self.parts, *folder))
                ):
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
