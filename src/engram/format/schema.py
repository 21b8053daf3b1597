"""``store.json``: the normative description of a store.

A store is columns of equal length, its *fields*, plus the *structure* that says how one row is put together from them
(nested dicts, tuples, TensorDicts). Sizes follow from here and from nothing else, so every number is checked before
anything is allocated or mapped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import xxhash

from engram._support.words import raise_as
from engram.errors import CorruptStore, IncompatibleStore
from engram.format import strict

FORMAT = "engram.store"
VERSION = (2, 0)
_dumped = functools.partial(json.dumps, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
#: Of the description of a store whose small fields lie together.
GROUPED_VERSION = (2, 1)
#: Of a description with fields that were added to a store which held rows.
ADDED_VERSION = (2, 2)
#: Of a description of rows with dicts whose keys are ints.
INTEGERS_VERSION = (2, 3)
#: Of the description of a store in which rows keep the number of their write when they are edited: of every store, since then.
WRITES_VERSION = (2, 4)
#: Of the description of a store with fields whose rows have any length.
RAGGED_VERSION = (2, 5)
#: The same where each row has a slot for its items.
SLOTS_VERSION = (2, 6)
MAX_BYTES = strict.MAX_BYTES
MAX_FIELDS = 4096
MAX_DIMS = 32
MAX_DEPTH = 16
MAX_KEY_BYTES = 255
MAX_LANES = 1 << 20
#: Of ragged fields.
MAX_GROUPS = 64
#: Of nodes.
Kind: TypeAlias = Literal["leaf", "tensordict", "tensorclass", "dict", "tuple", "list", "namedtuple"]
#: Of an int of 64 bits, or somewhat more.
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
#: Of a kind, that a message names.
_MOST_NAMED = 3

#: Bytes per element of every dtype that can be stored: a closed table. Places in it are stored by adapters: new ones come last.
DTYPES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


Role = Literal["data", "done", "terminated", "truncated", "step_type", "env_id", "traj_id", "position"]


#: How the items of a ragged field are read: as they are, or all of a row as one value.
ItemsKind: TypeAlias = Literal["", "utf-8", "bytes", "json"]


class RaggedItems(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The items of a field whose rows have any number of them.

    Each lane has a ring of items beside its ring of rows. A *leader* has a ring of its own; its column holds where in
    that ring the items of a row lie. A *follower* has as many items in each row as its leader, at the same places of a
    ring of its own; its column is empty.
    """

    #: Of an item: one of :data:`DTYPES`.
    dtype: str
    #: The most items that a row may have.
    max_length: int
    #: Items of the ring of each lane; 0: none, each row has a slot of ``max_length`` items. A follower has those of its leader.
    items: int
    #: The shape of an item.
    shape: tuple[int, ...] = ()
    #: The number of the leader's field; -1: it is a leader.
    like: int = -1
    #: Text and bytes are items of dtype uint8 and shape ``()``.
    kind: ItemsKind = ""

    @property
    def is_leader(self) -> bool:
        return self.like < 0

    @property
    def item_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]

    def room(self, lane_length: int) -> int:
        """Items that a lane of so many rows has room for."""
        return self.items or lane_length * self.max_length


class RaggedGroup(NamedTuple):
    """Ragged fields that have the same lengths."""

    #: The number of the leader's field.
    leader: int
    #: Items that each lane has room for, in a ring or in slots.
    items: int
    #: The numbers of all fields, the leader's first.
    members: tuple[int, ...]
    #: Items of the slot that each row has; 0: the rows of a lane share a ring.
    slot: int = 0


#: dtype and shape of a leader's column, a *span*: a u64 offset in two words, low one first, and a u32 length, in items.
SPAN = ("int32", (3,))
#: Bytes of a span.
SPAN_BYTES = 12
#: dtype and shape of a follower's column.
NO_SPAN = ("uint8", (0,))


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column of a store."""

    key: tuple[str, ...]
    dtype: str
    #: The shape of one row.
    shape: tuple[int, ...]
    #: What a row holds beside its column, where it has any number of items; None: the column is all of it.
    ragged: RaggedItems | None = None
    #: A store does not know what its fields mean.
    role: ClassVar[str] = "data"

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def name(self) -> str:
        """The key as users write it: ``a`` or ``('next', 'reward')``."""
        return name_of(self.key)


def name_of(key: tuple[str, ...]) -> str:
    """A key as users write it: ``a`` or ``('next', 'reward')``."""
    return key[0] if len(key) == 1 else str(key)


class PartField(msgspec.Struct, frozen=True):
    """A column of saved rows; ``shape`` is that of one row."""

    id: int
    key: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    role: Role = "data"
    #: As of a :class:`Field`; unset: the column is all of it.
    ragged: RaggedItems | msgspec.UnsetType = msgspec.UNSET

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


Column: TypeAlias = Field | PartField


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """A node of the structure of a row: a leaf names a field, any other kind has children."""

    kind: Kind
    #: Leaf: number of its field.
    field: int = -1
    #: Others: in order; tuples and lists use "0", "1", …, named tuples the names of their fields
    children: dict[str, Node] = {}
    #: tensorclass and namedtuple: ``module:qualname``. Looked up among classes the program has, never imported.
    type: str = ""
    #: tensordict and tensorclass: batch dimensions of one row.
    batch: tuple[int, ...] = ()
    #: dict: the children, in order, whose key in a row is an int. Here and in paths of fields they are called by its digits.
    integers: tuple[str, ...] = ()

    @property
    def has_integers(self) -> bool:
        """Whether a key is an int, here or below."""
        # Of a child called so an object follows; in texts quotes are escaped.
        return b'"integers":[' in msgspec.json.encode(self)

    @functools.cached_property
    def keys(self) -> tuple[str | int, ...]:
        """The keys of the children in a row, in order."""
        return tuple(map(self.key_of, self.children)) if self.integers else tuple(self.children)

    @functools.cached_property
    def entries(self) -> tuple[tuple[str | int, Node], ...]:
        """The children by the keys of a row, in order."""
        return tuple(zip(self.keys, self.children.values(), strict=True))

    def key_of(self, name: str) -> str | int:
        """The key that a child has in a row."""
        return int(name) if name in self.integers else name


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The schema of a store: everything about it that never changes."""

    capacity: int
    lanes: int
    #: Sizes of the dimensions after the first (``ndim > 1``); empty otherwise.
    columns: tuple[int, ...]
    fields: tuple[Field, ...]
    structure: Node
    format: str = FORMAT
    version: tuple[int, int] = VERSION
    #: In the folder of a store: fields whose rows have at most so many bytes lie in one file; 0: none. Rows that are saved do not depend
    #: on it: :func:`encode` leaves it out. Fields that were added have files of their own.
    grouped: int = 0
    #: Of the last fields, which were added to a store that held rows: what a row has whose writer leaves them out, its bytes in
    #: hexadecimal digits; those of one number, where all numbers of the row are equal.
    added: tuple[str, ...] = ()

    @functools.cached_property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields)

    @functools.cached_property
    def ragged(self) -> dict[int, RaggedItems]:
        """The items of ragged fields, by the number of the field; empty: no field is ragged."""
        return {number: field.ragged for number, field in enumerate(self.fields) if field.ragged is not None}

    @functools.cached_property
    def ragged_groups(self) -> tuple[RaggedGroup, ...]:
        """The ragged fields that share lengths, by the number of their leader. Of a schema that is valid."""
        members: dict[int, list[int]] = {}
        for number, it in self.ragged.items():
            members.setdefault(number if it.is_leader else it.like, []).append(number)
        every = [(n, self.ragged[n], tuple(all_of)) for n, all_of in members.items()]
        length = self.capacity // self.lanes
        return tuple(RaggedGroup(n, it.room(length), own, 0 if it.items else it.max_length) for n, it, own in every)

    @property
    def in_slots(self) -> bool:
        """Whether each row has room of its own for the items of ragged fields, so that it can be written anywhere."""
        return any(not it.items for it in self.ragged.values())

    @functools.cached_property
    def values_bytes(self) -> dict[int, int]:
        """Bytes of the items of each ragged field, of all lanes, by its number. Of a schema that is valid."""
        length = self.capacity // self.lanes
        return {number: self.lanes * it.room(length) * it.item_bytes for number, it in self.ragged.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and items."""
        return self.row_bytes * self.capacity + sum(self.values_bytes.values())

    @property
    def first_fields(self) -> int:
        """How many fields the store had at first."""
        return len(self.fields) - len(self.added)

    def fill(self, number: int) -> bytes | None:
        """A row of a field as it is where its writer leaves it out; None: no writer may."""
        if number < self.first_fields:
            return None
        raw = bytes.fromhex(self.added[number - self.first_fields])
        return raw * (self.fields[number].row_bytes // len(raw)) if raw else raw

    def grown(self, field: Field, fill: bytes) -> Schema:
        """The schema with one field more, the last one. Containers that it lies in and that are not there are made like the root.

        Args:
            field: the new one.
            fill: a row of it.

        Raises:
            ValueError: its key is taken, or no entry can be added there; or as :meth:`validate`.
        """
        width = DTYPES[field.dtype]
        short = fill[:width] if fill == fill[:width] * (len(fill) // width) else fill
        structure = _with_leaf(self.structure, self.structure, field.key, 0, len(self.fields))
        more = {"fields": (*self.fields, field), "structure": structure, "added": (*self.added, short.hex())}
        schema = msgspec.structs.replace(self, **more)
        schema.validate()
        return schema

    def until(self, number: int) -> Schema:
        """The schema as it was before that field was added, and those behind it."""
        structure = renumbered(self.structure, {n: n for n in range(number)})
        added = self.added[: number - self.first_fields]
        return msgspec.structs.replace(self, fields=self.fields[:number], structure=structure, added=added)

    def validate(self) -> None:
        """Check all that types cannot say.

        Raises:
            ValueError: what is wrong, and with which field.
        """
        validate_geometry(self.capacity, self.lanes, self.columns)
        if self.format != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}, got {self.format!r}")
        if not 0 <= self.grouped < 1 << 62:
            raise ValueError(f"{self.grouped} bytes of a row that is grouped are impossible")
        validate_fields(self.fields, self.capacity)
        if self.added:
            self._validate_added()
        for field in self.fields:
            if field.ragged is not None:
                self.validate_ragged()
                break
        leaves: list[int] = []
        self._collect_leaves(self.structure, (), leaves)
        if sorted(leaves) != list(range(len(self.fields))):
            raise ValueError("the structure does not name every field once")

    def validate_ragged(self) -> None:
        """Check the ragged fields. Raises as :meth:`validate`."""
        if (leaders := sum(it.is_leader for it in self.ragged.values())) > MAX_GROUPS:
            raise ValueError(f"{leaders} groups of ragged fields, at most {MAX_GROUPS} are possible")
        for number, it in self.ragged.items():
            if found := next((what for what, is_wrong in self._wrong_of(number, it) if is_wrong), ""):
                raise ValueError(f"field {self.fields[number].name}: {found}")

    def _validate_added(self) -> None:
        if len(self.added) >= len(self.fields):
            raise ValueError(f"{len(self.added)} of {len(self.fields)} fields were added: there was none at first")
        for field, digits in zip(self.fields[self.first_fields :], self.added, strict=True):
            try:
                nbytes = len(bytes.fromhex(digits))
            except ValueError:
                nbytes = -1
            if nbytes not in (field.row_bytes, min(field.row_bytes, DTYPES[field.dtype])) or digits != digits.lower():
                raise ValueError(
                    f"field {field.name}: a fill of {len(digits)} digits for rows of {field.row_bytes} bytes"
                )

    def _wrong_of(self, number: int, it: RaggedItems) -> Iterator[tuple[str, object]]:
        """What may be wrong with a ragged field, and whether it is."""
        field, column = self.fields[number], SPAN if it.is_leader else NO_SPAN
        yield from _wrong_of_items(it, self.lanes, it.room(self.capacity // self.lanes))
        yield "in a ring, beside fields in slots: one store has one of the two", it.items and self.in_slots
        yield "ragged, in a store with columns. Give its storage one row dimension", self.columns
        yield "a ragged field cannot be added. Name it when the store is created", number >= self.first_fields
        yield f"its column is to be {_said_column(*column)}", (field.dtype, field.shape) != column
        if not it.is_leader:
            leader = self.ragged.get(it.like) if it.like < number else None
            yield f"like field {it.like}, which is no leader before it", leader is None or not leader.is_leader
            sizes = leader and (leader.items, leader.max_length)
            yield f"items or max_length of field {it.like}, its leader, are others", (it.items, it.max_length) != sizes

    def _collect_leaves(self, node: Node, path: tuple[str, ...], leaves: list[int]) -> list[tuple[int, ...]]:
        """Check a node and what is below it; the shapes of its leaves."""
        if len(path) > MAX_DEPTH:
            raise ValueError(f"the structure is nested more than {MAX_DEPTH} deep")
        _validate_node(node, path)
        if node.kind == "leaf":
            field = self.fields[node.field] if 0 <= node.field < len(self.fields) else None
            if field is None or (field.key != path if path else len(field.key) > 1):
                raise ValueError(f"the structure has field {node.field} at {path}, where it is not")
            leaves.append(node.field)
            return [field.shape]
        shapes = [s for key, child in node.children.items() for s in self._collect_leaves(child, (*path, key), leaves)]
        if node.batch and any(shape[: len(node.batch)] != node.batch for shape in shapes):
            raise ValueError(
                f"the structure has fields at {path} that do not begin with its batch size {list(node.batch)}"
            )
        return shapes


def _with_leaf(node: Node, root: Node, key: tuple[str, ...], at: int, number: int) -> Node:
    name = key[at]
    where = name_of(key[:at]) if at else "the row"
    if node.kind not in ("tensordict", "dict", "tensorclass") or (node.kind == "tensorclass" and at == 0):
        raise ValueError(f"field {name_of(key)}: {where} is a {node.kind}, which takes no entry more")
    child = node.children.get(name)
    if at == len(key) - 1:
        if child is not None:
            raise ValueError(f"field {name_of(key)} is there already")
        child = Node("leaf", number)
    else:
        if child is not None and child.kind != "leaf" and not child.children:
            raise ValueError(f"field {name_of(key)}: {name_of(key[: at + 1])} has no entries, and takes none")
        child = _with_leaf(child or Node(root.kind, batch=root.batch), root, key, at + 1, number)
    return msgspec.structs.replace(node, children={**node.children, name: child})


def renumbered(node: Node, numbers: Mapping[int, int]) -> Node:
    """The structure with other numbers of fields, without fields that have none, and without nodes of which nothing is left."""
    if node.kind == "leaf":
        return Node("leaf", field=numbers[node.field])
    children = {}
    for name, child in node.children.items():
        if child.kind != "leaf" or child.field in numbers:
            made = renumbered(child, numbers)
            if made.children or not child.children:
                children[name] = made
    integers = tuple(name for name in node.integers if name in children)
    return msgspec.structs.replace(node, children=children, integers=integers)


#: Made once: msgspec takes its time to read annotations.
_DECODER = msgspec.json.Decoder(Schema)


def _validate_node(node: Node, path: tuple[str, ...]) -> None:
    if node.kind == "leaf" and node.children:
        raise ValueError(f"the structure has a leaf with children at {path}")
    if node.kind in ("tuple", "list") and any(key != str(i) for i, key in enumerate(node.children)):
        raise ValueError(f"the structure has a {node.kind} with the entries {list(node.children)} at {path}")
    if bool(node.type) != (node.kind in ("tensorclass", "namedtuple")):
        raise ValueError(f"the structure has a {node.kind} of type {node.type!r} at {path}")
    if node.batch and (node.kind not in ("tensordict", "tensorclass") or min(node.batch) < 0):
        raise ValueError(f"the structure has a {node.kind} of batch size {list(node.batch)} at {path}")
    if node.integers and (
        node.kind != "dict"
        or not all(map(INTEGER.fullmatch, node.integers))
        or node.integers != tuple(name for name in node.children if name in node.integers)
    ):
        raise ValueError(f"the structure has a {node.kind} with the integers {list(node.integers)!s:.100} at {path}")


def validate_geometry(capacity: int, lanes: int, columns: tuple[int, ...]) -> None:
    """Raise ``ValueError`` for sizes that do not add up."""
    if capacity < 1 or lanes < 1 or capacity % lanes:
        raise ValueError(f"capacity {capacity} is not a positive multiple of {lanes} lanes")
    if min(columns, default=1) < 1 or capacity % math.prod(columns):
        raise ValueError(f"capacity {capacity} is not a multiple of the columns {columns}")
    if lanes > (1 if columns else MAX_LANES):
        raise ValueError(f"{lanes} lanes, at most {MAX_LANES} are possible, and 1 with columns")
    if capacity >= 1 << 58:
        raise ValueError(f"{capacity} rows are too many")


def validate_fields(fields: Sequence[Column], rows: int) -> None:
    """Raise ``ValueError`` for fields that no store of that many rows can have."""
    if not 1 <= len(fields) <= MAX_FIELDS:
        raise ValueError(f"{len(fields)} fields, at least 1 and at most {MAX_FIELDS} are possible")
    seen: set[tuple[str, ...]] = set()
    for field in fields:
        validate_key(field.key)
        if field.key in seen:
            raise ValueError(f"field {name_of(field.key)} appears twice")
        seen.add(field.key)
        if field.dtype not in DTYPES:
            raise ValueError(f"field {name_of(field.key)}: unknown dtype {field.dtype}")
        if len(field.shape) > MAX_DIMS or min(field.shape, default=0) < 0:
            raise ValueError(f"field {name_of(field.key)}: impossible shape {list(field.shape)}")
        # Zeros count as ones: torch multiplies the other sizes too.
        if math.prod(filter(None, field.shape)) * DTYPES[field.dtype] * rows >= 1 << 62:
            raise ValueError(f"field {name_of(field.key)}: {rows} rows of {field.row_bytes} bytes are too many")


def _wrong_of_items(it: RaggedItems, lanes: int, room: int) -> Iterator[tuple[str, object]]:
    """What may be wrong with the items of a ragged field, and whether it is."""
    yield f"items of the unknown dtype {it.dtype}", it.dtype not in DTYPES
    yield f"items of the impossible shape {list(it.shape)}", len(it.shape) > MAX_DIMS or min(it.shape, default=1) < 1
    yield f"{it.max_length} items of a row, at least 1 and below 2^31 are possible", not 1 <= it.max_length < 1 << 31
    yield f"a lane of {room} items, at least 1 and below 2^48 are possible", it.items < 0 or not 1 <= room < 1 << 48
    yield f"{lanes} lanes of {room} items are too many", lanes * room * it.item_bytes >= 1 << 62
    yield f"like field {it.like}", it.like < -1
    is_text = (it.dtype, it.shape) == ("uint8", ())
    yield f"items of kind {it.kind!r:.40}", it.kind not in get_args(ItemsKind)
    yield f"text of items with {_said_column(it.dtype, it.shape)}, it has shape [] uint8", it.kind and not is_text


def validate_key(key: tuple[str, ...]) -> None:
    """Raise ``ValueError`` for a key that no store can hold."""
    if not 1 <= len(key) <= MAX_DEPTH:
        raise ValueError(f"field {key}: nested {len(key)} deep, at most {MAX_DEPTH} levels are possible")
    for part in key:
        if part == ".engram":
            raise ValueError(f"field {key}: the name '.engram' is reserved for the store's own files. Rename the key.")
        try:
            nbytes = len(part.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"field {key!a}: a key that is not valid Unicode. Rename the key.") from error
        if nbytes > MAX_KEY_BYTES:
            raise ValueError(f"field {key}: a key of {nbytes} bytes, at most {MAX_KEY_BYTES} are possible")


def differences(expected: Schema, got: Schema) -> str:
    """How another schema differs, for a message: the first few fields, then sizes, then the structure of rows.

    Empty: they are the same, and so are their bytes.
    """
    if encode(expected) == encode(got):
        return ""
    found = field_differences(expected.fields, got.fields)
    for name in ("capacity", "lanes", "columns", "version"):
        ours, theirs = getattr(expected, name), getattr(got, name)
        if ours != theirs:
            found.append(f"{name}: expected {_listed(ours)}, got {_listed(theirs)}")
    if not found:
        found = _node_differences(expected.structure, got.structure, ())
    return "; ".join(found)


def field_differences(expected: Sequence[Column], got: Sequence[Column]) -> list[str]:
    """How other fields differ: which are missing or unknown, and the first with another shape, dtype or role.

    Args:
        expected: each with a key of its own.
        got: the same.

    Returns:
        An entry for each thing to say; none: nothing differs, nor does their order.
    """
    ours, theirs = ({field.key: _said(field) for field in fields} for fields in (expected, got))
    found = _key_differences(ours, theirs)
    other = [key for key, said in ours.items() if theirs.get(key, said) != said]
    found += [f"field {_name(key)}: expected {ours[key]}, got {theirs[key]}" for key in other[:_MOST_NAMED]]
    if len(other) > _MOST_NAMED:
        found.append(f"{len(other) - _MOST_NAMED} more fields")
    return found or _order_differences(ours, theirs, "fields")


def key_differences(expected: Iterable[object], got: Iterable[object]) -> str:
    """Which keys are missing of those that are expected, and which are unknown; empty: none."""
    return ", ".join(_key_differences(dict.fromkeys(expected), dict.fromkeys(got)))


def _key_differences(ours: Collection[object], theirs: Collection[object]) -> list[str]:
    strangers = {"missing": [key for key in ours if key not in theirs], "unknown": [k for k in theirs if k not in ours]}
    return [f"{what} {_named(keys)}" for what, keys in strangers.items() if keys]


def _order_differences(ours: Collection[object], theirs: Collection[object], what: str) -> list[str]:
    pairs = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if mine != other]
    return [f"{what} in another order: expected {_name(a)} where {_name(b)} is" for a, b in pairs[:1]]


def _node_differences(ours: Node, theirs: Node, path: tuple[str, ...]) -> list[str]:
    """The first node that differs, in a structure of the same fields."""
    where = f"field {_name(path)}" if path else "data"
    for entry in ("kind", "type", "batch", "integers"):
        expected, got = getattr(ours, entry), getattr(theirs, entry)
        if expected != got:
            return [f"{where}: {entry}: expected {_listed(expected)!s:.100}, got {_listed(got)!s:.100}"]
    found = _key_differences(ours.children, theirs.children)
    found = found or _order_differences(ours.children, theirs.children, "entries")
    if found:
        return [f"{where}: {', '.join(found)}"]
    pairs = ((name, child, theirs.children[name]) for name, child in ours.children.items())
    return next((said for name, a, b in pairs if (said := _node_differences(a, b, (*path, name)))), [])


def _said(field: Column) -> str:
    if field.ragged:
        return items_of(field.ragged)
    return _said_column(field.dtype, field.shape) + (f" as {field.role}" if field.role != "data" else "")


def _said_column(dtype: str, shape: tuple[int, ...]) -> str:
    return f"shape {list(shape)!s:.100} {dtype}"


def items_of(it: RaggedItems) -> str:
    """The items of a ragged field, for a message: of what, and how many."""
    what = it.kind or _said_column(it.dtype, it.shape)
    like = "" if it.is_leader else f", like field {it.like}"
    return f"ragged {what}, at most {it.max_length} a row and {it.items or 'a slot for each row of'} a lane{like}"


def _plain(key: object) -> object:
    """As users write it."""
    return key[0] if isinstance(key, tuple) and len(key) == 1 else key


def _name(key: object) -> str:
    return f"{_plain(key)!s:.100}"


def _named(keys: Sequence[object]) -> str:
    shown = ", ".join(f"{_plain(key)!r:.100}" for key in keys[:_MOST_NAMED])
    return f"[{shown}]" + (f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else "")


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def encode(schema: Schema) -> bytes:
    """JSON without spaces. Entries keep their order, since that of children is significant. Equal values have equal bytes."""
    entries = msgspec.to_builtins(schema) | {"version": _version_of(schema, VERSION)}
    del entries["grouped"]
    if not schema.added:
        del entries["added"]
    return _dumped(entries).encode()


def encode_store(schema: Schema, *, earlier: bool = False) -> bytes:
    """``store.json``: as :func:`encode`, with which fields lie together, and the checksum of fields that were added.

    ``earlier``: as it was before version 2.4.
    """
    version = _version_of(schema, GROUPED_VERSION if schema.grouped else VERSION)
    if not earlier and not schema.ragged:
        version = WRITES_VERSION
    entries = msgspec.to_builtins(schema) | {"version": version}
    if not schema.grouped:
        del entries["grouped"]
    if schema.added:
        entries["sum"] = _sum_of(entries)
    else:
        del entries["added"]
    return _dumped(entries).encode()


def _version_of(schema: Schema, first: tuple[int, int]) -> tuple[int, int]:
    """The first version that has what a description says; ``first`` where that is nothing special."""
    if schema.ragged:
        return SLOTS_VERSION if schema.in_slots else RAGGED_VERSION
    if schema.structure.has_integers:
        return INTEGERS_VERSION
    return ADDED_VERSION if schema.added else first


def _sum_of(entries: dict[str, object]) -> str:
    return f"{xxhash.xxh3_64_intdigest(_dumped(entries).encode()):016x}"


def fingerprint(raw: bytes) -> int:
    """xxh3-64 of ``store.json`` as the store was made. The control block holds it too, so that the two belong together."""
    return int(xxhash.xxh3_64_intdigest(raw))


def first_fingerprints(schema: Schema, raw: bytes) -> tuple[int, ...]:
    """The :func:`fingerprint` that a store may have whose description is ``raw`` now, and says this: it may have been made earlier."""
    first = schema.until(schema.first_fields)
    made = encode_store(first) if schema.added else raw
    return tuple(map(fingerprint, (made, encode_store(first, earlier=True))))


def is_earlier(raw: bytes) -> bool:
    """Whether a description that can be read is of a store in which edits do not keep the numbers of writes."""
    return tuple(msgspec.json.decode(raw)["version"]) < WRITES_VERSION


def decode_store(raw: bytes, path: str) -> Schema:
    """Read ``store.json``. Raises as :func:`decode`."""
    return decode(raw, path, of_store=True)


def decode(raw: bytes, path: str, *, of_store: bool = False) -> Schema:
    """Read what :func:`encode` has written, or :func:`encode_store`.

    Raises:
        IncompatibleStore: another format version.
        CorruptStore: anything else that is wrong with it; nothing was allocated.
    """
    if len(raw) > MAX_BYTES:
        raise CorruptStore(f"{path}: expected at most {MAX_BYTES} bytes, got {len(raw)}.")
    with contextlib.suppress(ValueError, RecursionError):
        schema = _DECODER.decode(raw)
        known = msgspec.structs.replace(schema, version=VERSION)
        same = encode(known) if schema.version == VERSION else encode_store(known) if of_store else b""
        if same == raw:  # so it can be read one way only
            known.validate()
            return known
    with raise_as(CorruptStore, f"{path}: not readable as JSON"):
        tree = strict.parse(raw, max_depth=2 * MAX_DEPTH + 4)  # a level of the structure is two of the text
    version = tree.get("version") if isinstance(tree, dict) else None
    if not (
        isinstance(tree, dict)
        and isinstance(version, list)
        and len(version) == 2
        and all(type(v) is int and v >= 0 for v in version)
    ):
        raise CorruptStore(f"{path}: expected an engram store description, found no version.")
    newest = SLOTS_VERSION if of_store else VERSION
    of_stores = (GROUPED_VERSION, WRITES_VERSION) if of_store else ()
    if tuple(version) not in (VERSION, ADDED_VERSION, INTEGERS_VERSION, RAGGED_VERSION, SLOTS_VERSION, *of_stores):
        found = f"expected format {newest[0]}.{newest[1]}, got {version[0]}.{version[1]}"
        if tuple(version) > newest:
            raise IncompatibleStore(f"{path}: {found}. A newer engram wrote it: upgrade to read it.")
        raise IncompatibleStore(f"{path}: {found}. An older engram wrote it: read it with that one.")
    with raise_as(CorruptStore, path, (msgspec.ValidationError, ValueError, RecursionError)):
        return _converted(tree, tuple(version), of_store)


def _converted(tree: dict[str, object], version: tuple[int, int], of_store: bool) -> Schema:
    """The schema that a description of a version says. Raises ``ValueError``."""
    found = tree.keys() | set()
    given = tree.pop("sum", None)
    if given is not None and given != _sum_of(tree):
        raise ValueError(f"sum: expected {_sum_of(tree)}, got {given!r:.40}: the description was changed")
    schema = msgspec.convert({**tree, "version": VERSION}, Schema, strict=True)
    schema.validate()
    if version == INTEGERS_VERSION and not schema.structure.has_integers:
        raise ValueError("structure: a description of version 2.3 has keys that are ints, got none")
    if (version in (RAGGED_VERSION, SLOTS_VERSION)) != bool(schema.ragged):
        raise ValueError("fields: a description has ragged ones where its version is 2.5 or 2.6, and in no other")
    known = msgspec.json.decode(encode_store(schema, earlier=version < WRITES_VERSION) if of_store else encode(schema))
    if ([*version], found) != (known["version"], known.keys()):
        raise ValueError(
            f"expected version {known['version']} with the entries {sorted(known)}, got {[*version]} with {sorted(found)}: stores have "
            "grouped from version 2.1 on, sum with added; descriptions have added from version 2.2 on, ints as keys from version 2.3 on"
        )
    if tree["fields"] != known["fields"]:
        raise ValueError("fields: expected no entry that says what is so without it")
    return schema
