"""Layouts: rows of a storage, piece by piece, each observation where it was seen before and after; and descriptions of TorchRL's files."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, NamedTuple, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor

from engram._support import field_paths, words
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.schema import DTYPES, MAX_DIMS, Field, Node, Schema, renumbered, validate_key
from engram.saved.checkpointers import Key, Ring, rows_state, tensordicts_of
from engram.saved.folder import Folder
from engram.saved.snapshot import bytes_of
from engram.store.memory import DTYPE_OF, write_rows
from engram.types import RowsTarget

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
    folder.open(parts, nbytes).close()  # before anything is allocated
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
    with words.raise_as(CorruptCheckpoint, name):
        validate_key(key)


def known_dtype(dtype: str, where: str) -> str:
    """The name of a dtype. Raises ``IncompatibleCheckpoint``: it cannot be stored."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPES:
        raise IncompatibleCheckpoint(f"{where}: dtype {dtype!r:.100} cannot be stored. Possible: {', '.join(DTYPES)}.")
    return name


#: What a layout notes beside the entries: whether all slots are live, the oldest slot, and sizes of the dimensions that index rows.
def structure_of(kept: Sequence[Field], whole: Node, fields: Sequence[Field]) -> Node:
    """The structure of some of the fields whose structure is ``whole``."""
    numbers = {field.key: number for number, field in enumerate(kept)}
    return renumbered(whole, {i: numbers[field.key] for i, field in enumerate(fields) if field.key in numbers})


FULL, SHIFT, SHAPE = "is_full", "shift", "_storage_shape"


_FLAGS: frozenset[Key] = frozenset((name,) for name in field_paths.DEFAULT_DONE_KEYS)
_REWARDS: frozenset[Key] = frozenset({("reward",)})


def as_key(key: object, where: str) -> Key:
    """A key of one part or of several. Raises ``TypeError``: it is none."""
    parts = (key,) if isinstance(key, str) else key
    if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
        raise TypeError(f"{where}: expected a key, a str or a tuple of them, got {key!r:.80}.")
    return parts


class Keys(msgspec.Struct, frozen=True):
    """Entries that are not observations, as they are called at the root."""

    #: The entry of a step that says whether its trajectory ends.
    done: Annotated[Key, msgspec.Meta(min_length=1)] = ("next", "done")
    flags: frozenset[Key] = _FLAGS
    rewards: frozenset[Key] = _REWARDS
    shift: str = SHIFT
    full: str = FULL

    @classmethod
    def of(cls, where: str, done_keys: Iterable[object] | None, reward_keys: Iterable[object] | None) -> Keys:
        """With other flags and rewards. Raises ``TypeError``: no keys."""
        flags = _FLAGS if done_keys is None else _all(done_keys, f"{where}: done_keys")
        rewards = _REWARDS if reward_keys is None else _all(reward_keys, f"{where}: reward_keys")
        return cls(flags=flags, rewards=rewards)

    @property
    def reserved(self) -> tuple[str, ...]:
        """Entries that a layout needs for itself."""
        return (self.full, self.shift, SHAPE)

    @property
    def of_next(self) -> frozenset[Key]:
        """Entries that are saved as those below ``next``."""
        return self.flags | self.rewards


def _all(keys: Iterable[object], where: str) -> frozenset[Key]:
    if isinstance(keys, str):
        raise TypeError(f"{where}: expected keys, got the str {keys!r}. Put it in a tuple: ({keys!r},).")
    if not isinstance(keys, Iterable):
        raise TypeError(f"{where}: expected keys, strs or tuples of them, got a {type(keys).__name__}.")
    return frozenset(as_key(key, where) for key in keys)


class Entry(NamedTuple):
    """An entry of a layout."""

    key: Key
    #: The field that has its value of each step; None: there is none, or it is not saved.
    root: Key | None
    #: The field below ``next``.
    after: Key | None

    @property
    def both(self) -> tuple[Key, Key] | None:
        """Root and after, if there are both: then its value after the last step of a trajectory is saved, too."""
        return None if self.root is None or self.after is None else (self.root, self.after)


def entries_of(fields: Collection[Key], keys: Keys, where: str) -> list[Entry]:
    """The entries of the layout for rows with these fields.

    Raises:
        IncompatibleCheckpoint: they are no steps with ``next``, or would not all be saved.
    """
    if keys.done not in fields:
        raise IncompatibleCheckpoint(
            f"{where}: expected the field {keys.done}, which says where trajectories end, got {sorted(fields)}."
        )
    after = {key[1:] for key in fields if key[0] == "next" and len(key) > 1}
    root = {key for key in fields if key[0] != "next"}
    if taken := sorted({key[0] for key in root | after} & {*keys.reserved}):
        raise IncompatibleCheckpoint(f"{where}: the layout needs the names {taken} for itself. Rename these fields.")
    if lost := sorted(root & keys.rewards):
        raise IncompatibleCheckpoint(
            f'{where}: expected rewards below "next" only, as those at the root are not saved, got the fields {lost}.'
        )
    if alone := sorted((after - root - keys.of_next) | ((root & keys.flags) - after)):
        raise IncompatibleCheckpoint(
            f'{where}: expected the fields {alone} both at the root and below "next", where the ones continue the others. Name flags '
            "and rewards that are not: done_keys=…, reward_keys=…."
        )
    made = []
    for key in sorted(root | after):
        flag = key in keys.of_next
        made.append(Entry(key, None if flag else key, ("next", *key) if key in after else None))
    return made


class Origin(NamedTuple):
    """Where a field's rows are in a layout."""

    #: The entry; None: the field is False, or zero, in each row.
    key: Key | None
    #: By how many observations: 1 of next observations.
    ahead: int
    expanded: bool


def origins_of(entries: Mapping[Key, bool], keys: Keys) -> dict[Key, tuple[Key, Origin]]:
    """Where fields of rows come from, by their keys, with the entry that has their shape.

    Args:
        entries: of a layout, by key: whether they have next observations.
        keys: which are flags and rewards.
    """
    found: dict[Key, tuple[Key, Origin]] = {}
    for key, expanded in entries.items():
        if key in keys.of_next:
            found["next", *key] = key, Origin(key, 0, expanded=False)
            if key in keys.flags:
                found[key] = key, Origin(None, 0, expanded=False)
        else:
            found[key] = key, Origin(key, 0, expanded=expanded)
            if expanded:
                found["next", *key] = key, Origin(key, 1, expanded=True)
    return found


class Steps:
    """The places of steps and observations.

    Args:
        ring: the storage.
        done: bool ``[W, T]``, in order of time: which steps end trajectories.
    """

    def __init__(self, ring: Ring, done: Tensor) -> None:
        self.ring = ring
        self.ends = done.clone()
        self.ends[:, ring.live - 1] = True
        self._before = torch.zeros(self.ends.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(self.ends.reshape(-1), 0, out=self._before[1:])

    @property
    def observations(self) -> int:
        """How many observations there are."""
        return len(self._before) - 1 + int(self._before[-1])

    def places(self, column: int, first: int, n: int) -> Tensor:
        """Where the observations of ``n`` steps lie. int64 ``[n]``, ascending; the next observation of each lies behind it."""
        at = column * self.ring.slots + first
        return torch.arange(at, at + n, device="cpu") + self._before[at : at + n]

    def trajectories(self) -> tuple[Tensor, Tensor]:
        """Of each trajectory, and of the slots behind the live ones of each column: steps and observations, int64 ``[n]``."""
        stops = self.ends.clone()
        stops[:, -1] = True
        last = stops.reshape(-1).nonzero().reshape(-1)
        lengths = torch.diff(last, prepend=torch.tensor([-1], device="cpu"))
        return lengths, lengths + self.ends.reshape(-1)[last]


#: Bytes of rows that are brought into order at a time.
_PIECE = 16 << 20


class LayoutLeaf(NamedTuple):
    """An entry of a layout."""

    dtype: str
    #: Of one step.
    shape: tuple[int, ...]
    #: Its values: more than there are slots where it has next observations.
    rows: int


class Leaves(Protocol):
    """A layout that lies somewhere. Everything raises ``CorruptCheckpoint``: it is damaged."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def ring(self) -> Ring: ...

    @property
    def length(self) -> int:
        """Live rows, as it says."""

    @property
    def leaves(self) -> Mapping[Key, LayoutLeaf]: ...

    def read(self, key: Key, first: int, n: int) -> Tensor:
        """``n`` values of an entry, ``[n, *shape]``, from the ``first`` on. To be read only."""


class LayoutDump:
    """The rows of a layout.

    Args:
        leaves: where it lies.
        keys: which entries are flags and rewards.

    Raises:
        CorruptCheckpoint: it is damaged. IncompatibleCheckpoint: the entry with the ends of trajectories is none.
    """

    def __init__(self, leaves: Leaves, keys: Keys) -> None:
        self._leaves, self.ring = leaves, leaves.ring
        self.columns = self.ring.columns
        entries = leaves.leaves
        done = keys.done[1:] if keys.done[0] == "next" else keys.done
        if done not in entries or done not in keys.flags:
            raise IncompatibleCheckpoint(
                f"{leaves.name}: expected the entry {done}, a flag that says where trajectories end, got {sorted(entries)}. Name it: "
                "done_keys=…."
            )
        slots, width = self.ring.slots, self.ring.width
        self.capacity = slots * width
        expanded = {key: leaf.rows != self.capacity for key, leaf in entries.items()}
        flag = entries[done]
        if flag.dtype != "bool" or expanded[done] or math.prod(flag.shape) != 1:
            raise IncompatibleCheckpoint(
                f"{leaves.name}: {done}: expected one bool per step, got {flag.dtype} of shape {list(flag.shape)}."
            )
        live = -(-leaves.length // width)
        if live != self.ring.live or (live == slots) != self.ring.full:
            raise CorruptCheckpoint(
                f"{leaves.name}: expected {self.ring.live * width} rows, as it says that it is {'' if self.ring.full else 'not '}full and "
                f"that slot {self.ring.shift - 1} of {slots} was written last, got {leaves.length}."
            )
        self.length = live * width
        self._origins = origins_of(expanded, keys)
        ends = check_bools(leaves.read(done, 0, self.capacity), leaves.name)
        self._steps = Steps(self.ring, ends.reshape(width, slots))
        for key, leaf in entries.items():
            if expanded[key] and leaf.rows != self._steps.observations:
                raise CorruptCheckpoint(
                    f"{leaves.name}: {key}: expected {self._steps.observations} values, as the ends of trajectories say, got {leaf.rows}."
                )
        self.fields = tuple(Field(key, entries[it].dtype, entries[it].shape) for key, (it, _) in self._origins.items())

    @property
    def name(self) -> str:
        return self._leaves.name

    @property
    def position(self) -> int:
        """Position that the next row gets: rows ``[position - length, position)`` are live."""
        return self.length + (self.ring.shift % self.ring.slots * self.ring.width if self.ring.full else 0)

    @property
    def structure(self) -> Node:
        """TensorDicts with the fields."""
        return tensordicts_of(field.key for field in self.fields)

    def schema(self, like: Schema | None, without: Collection[str] = ()) -> Schema:
        """The schema of a store with these rows.

        Args:
            like: of the store that there is: its fields are taken, in its order. Flags at the root may be missing there.
            without: entries at the root to leave out where the store has none.

        Raises:
            IncompatibleCheckpoint: the store has other fields.
        """
        if like is None:
            kept = [field for field in self.fields if field.key[0] not in without]
            return Schema(self.capacity, 1, self.columns, tuple(kept), structure_of(kept, self.structure, self.fields))
        here = {field.key: field for field in like.fields}
        found = {field.key: field for field in self.fields}
        optional = {key for key, (_, origin) in self._origins.items() if origin.key is None}
        optional |= {key for key in found if key[0] in without}
        missing, extra = sorted(here.keys() - found.keys()), sorted(found.keys() - here.keys() - optional)
        if missing or extra:
            raise IncompatibleCheckpoint(
                f"{self.name}: expected the fields of this storage; missing are {missing}, and it does not have {extra}."
            )
        for key, field in here.items():
            if (field.dtype, field.shape) != (found[key].dtype, found[key].shape):
                raise IncompatibleCheckpoint(
                    f"{self.name}: field {key}: expected {field.dtype} of shape {list(field.shape)}, as in this storage, got "
                    f"{found[key].dtype} of shape {list(found[key].shape)}."
                )
        return msgspec.structs.replace(like, capacity=self.capacity, columns=self.columns, grouped=0)

    def state(self, schema: Schema) -> dict[str, object]:
        """The state without rows of a tensor storage with these rows: the oldest has the smallest ticket."""
        return rows_state(schema, self.length, self.position, self.position)

    def verify(self) -> None:
        """Read what can be damaged without that its size says so. Raises ``CorruptCheckpoint``."""
        for key, leaf in self._leaves.leaves.items():
            if leaf.dtype == "bool" and leaf.rows == self.capacity:
                size = max(1, math.prod(leaf.shape))
                for first in range(0, self.capacity, step := max(1, _PIECE // size)):
                    check_bools(self._leaves.read(key, first, min(step, self.capacity - first)), f"{self.name}: {key}")

    def rows(self, origin: Origin, shape: Sequence[int], dtype: torch.dtype, piece: tuple[int, int]) -> Tensor:
        """The values of a field in steps ``(time, n)`` of all columns, ``[n, W, *shape]``."""
        time, n = piece
        ring = self.ring
        out = torch.zeros((n, ring.width, *shape), dtype=dtype, device="cpu")
        if origin.key is None or not out.numel():
            return out
        for column in range(ring.width):
            if origin.expanded:
                places = self._steps.places(column, time, n) + origin.ahead
                first = int(places[0])
                values = self._leaves.read(origin.key, first, int(places[-1]) - first + 1)
                values = values[places - first]
            else:
                values = self._leaves.read(origin.key, column * ring.slots + time, n)
            out[:, column] = check_bools(values, f"{self.name}: {origin.key}")
        return out

    def read_rows(self, key: Key, out: Tensor, first: int = 0) -> None:
        """Copy the rows of a field from the ``first`` on into ``out``, ``[n, *shape]``."""
        width, stop = self.ring.width, first + len(out)
        for time, slot, n in self.ring.pieces(self.ring.slots):
            begin, end = max(slot, first // width), min(slot + n, -(-stop // width))
            if begin < end:
                piece = (time + begin - slot, end - begin)
                rows = self.rows(self.origin(key), out.shape[1:], out.dtype, piece).flatten(0, 1)
                low, high = max(begin * width, first), min(end * width, stop)
                out[low - first : high - first] = rows[low - begin * width : high - begin * width]

    def origin(self, key: Key) -> Origin:
        return self._origins[key][1]


class HasRows(Protocol):
    """Rows of a dump."""

    @property
    def length(self) -> int:
        """Live rows."""

    def read_rows(self, key: Key, out: Tensor, first: int = 0) -> None:
        """Copy the rows of a field from the ``first`` on into ``out``, ``[n, *shape]``, contiguous, on the CPU."""


class DumpedRows(NamedTuple):
    """The rows of a dump, for a store."""

    dump: HasRows
    schema: Schema

    def fill(self, tensors: RowsTarget) -> None:
        """Read them into the fields of a store, ``[capacity, *shape]`` each."""
        for number, (field, tensor) in enumerate(zip(self.schema.fields, tensors, strict=True)):
            step = max(1, _PIECE // max(1, field.row_bytes))
            for first in range(0, self.dump.length, step):
                rows = tensor[first : min(first + step, self.dump.length)]
                direct = rows.is_cpu and rows.is_contiguous() and tensors.put is None
                piece = rows if direct else torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
                self.dump.read_rows(field.key, piece, first)
                if not direct:
                    write_rows(tensors, number, first, piece)


#: Takes values ``[n, *shape]`` of one entry, contiguous on the CPU, from the ``at``-th on: ``(at, values)``. What is not written is zero.
Write: TypeAlias = "Callable[[int, Tensor], None]"


class Sink(Protocol):
    """Where a layout is written to."""

    def begin(self, ring: Ring, steps: Steps, keys: Keys) -> None:
        """Before the first entry."""

    def column(
        self, key: Key, shape: torch.Size, dtype: torch.dtype, *, expanded: bool
    ) -> AbstractContextManager[Write]:
        """Begin an entry. ``expanded``: it has next observations."""


class RowsWriter:
    """Writes the rows of a storage into a sink.

    Args:
        fields: tensors ``[T, W, *shape]`` by key, each slot a row per column. They do not change meanwhile.
        ring: which of them are live.
        keys: which are flags and rewards.
        where: what messages begin with.

    Raises:
        IncompatibleCheckpoint: the fields are no steps, or flags are not one per step; or a flag at the root is True.
    """

    def __init__(self, fields: Mapping[Key, Tensor], ring: Ring, keys: Keys, where: str) -> None:
        self._fields, self._ring, self._keys, self._where = fields, ring, keys, where
        self._entries = entries_of(fields, keys, where)
        self._check_fields()
        done = fields[keys.done]
        flags = torch.zeros((ring.width, ring.slots), dtype=torch.bool, device="cpu")
        for time, slot, n in ring.pieces(ring.slots):
            flags[:, time : time + n] = done[slot : slot + n].reshape(n, ring.width).t().cpu()
        self.steps = Steps(ring, flags)

    def _check_fields(self) -> None:
        done = self._fields[self._keys.done]
        if done.dtype is not torch.bool or done.shape[2:].numel() != 1:
            raise IncompatibleCheckpoint(
                f"{self._where}: {self._keys.done}: expected one bool per step, got {done.dtype} of shape {list(done.shape[2:])}. "
                "Name another field: done_key=…."
            )
        for entry in self._entries:
            if entry.both is not None:
                root, after = (self._fields[key] for key in entry.both)
                if (root.dtype, root.shape) != (after.dtype, after.shape):
                    raise IncompatibleCheckpoint(
                        f"{self._where}: expected fields {entry.root} and {entry.after} of the same shape and dtype, got "
                        f"{list(root.shape[2:])} {root.dtype} and {list(after.shape[2:])} {after.dtype}."
                    )

    def check_flags(self) -> None:
        """Raise ``IncompatibleCheckpoint``: a flag at the root is True, which the layout has no place for."""
        for key in sorted(self._keys.flags & self._fields.keys()):
            for _, slot, n in self._ring.pieces(self._ring.slots):
                if bool(self._fields[key][slot : slot + n].any()):
                    raise IncompatibleCheckpoint(
                        f"{self._where}: expected the field {key} False in every row, as the layout saves {('next', *key)} only, got a "
                        "row where it is True. Save it without this layout."
                    )

    def write(self, sink: Sink) -> None:
        """Write everything.

        Raises:
            IncompatibleCheckpoint: a next observation is not the observation of the step after it; names the row.
        """
        self.check_flags()
        sink.begin(self._ring, self.steps, self._keys)
        for entry in self._entries:
            like = self._fields[entry.root or entry.after or self._keys.done]
            with sink.column(entry.key, like.shape[2:], like.dtype, expanded=entry.both is not None) as write:
                if entry.both is None:
                    self._write_steps(like, write)
                else:
                    self._write_observations(entry.both, write)

    def _most(self, tensor: Tensor) -> int:
        return max(1, _PIECE // max(1, tensor[:1, :1].nbytes))

    def _write_steps(self, tensor: Tensor, write: Write) -> None:
        most = self._most(tensor)
        for number in range(self._ring.width):
            for time, slot, n in self._ring.pieces(most):
                write(number * self._ring.slots + time, _copied(tensor[slot : slot + n, number]))

    def _write_observations(self, both: tuple[Key, Key], write: Write) -> None:
        root, after = (self._fields[key] for key in both)
        most, ring = self._most(root), self._ring
        for number in range(ring.width):
            for time, slot, n in ring.pieces(most):
                here = _copied(root[slot : slot + n, number])
                beyond = _copied(after[slot : slot + n, number])
                ends = self.steps.ends[number, time : time + n]
                self._check_continued(both, here, beyond, (number, time, n), ends)
                places = self.steps.places(number, time, n)
                first = int(places[0])
                values = here
                if bool(ends.any()):
                    values = here.new_empty((n + int(ends.sum()), *here.shape[1:]))
                    values[places - first] = here
                    values[places[ends] - first + 1] = beyond[ends]
                write(first, values)

    def _check_continued(
        self, both: tuple[Key, Key], here: Tensor, beyond: Tensor, piece: tuple[int, int, int], ends: Tensor
    ) -> None:
        """Raise ``IncompatibleCheckpoint`` unless each next observation is the observation after it, bit by bit."""
        number, time, n = piece
        same = ends.clone()
        same[:-1] |= (_raw(here[1:]) == _raw(beyond[:-1])).all(1)
        if not bool(ends[-1]):  # the step after this piece is live, as the last live one is an end
            slot = self._ring.slot_of(time + n)
            same[-1:] = (_raw(_copied(self._fields[both[0]][slot : slot + 1, number])) == _raw(beyond[-1:])).all(1)
        if not bool(same.all()):
            wrong = int((~same).nonzero()[0])
            row = self._ring.slot_of(time + wrong) * self._ring.width + number
            after = self._ring.slot_of(time + wrong + 1) * self._ring.width + number
            raise IncompatibleCheckpoint(
                f"{self._where}: row {row}: expected {both[1]} to be {both[0]} of row {after}, the step after it, as row {row} does "
                "not end its trajectory; got another value. Rows of multi-step returns, and trajectories without a done flag at their "
                "end, cannot be saved in this layout."
            )


def _copied(rows: Tensor) -> Tensor:
    """A copy of rows whose strides are the usual ones, also of a single row, which torch calls contiguous whatever they are."""
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)


def _raw(values: Tensor) -> Tensor:
    """The bytes of rows, ``[n, words]``: in words as long as rows permit, as few are compared faster."""
    rows = values.contiguous().reshape(len(values), values.shape[1:].numel()).view(torch.uint8)
    word = next(it for it in (torch.int64, torch.int32, torch.int16, torch.uint8) if rows.shape[1] % it.itemsize == 0)
    return rows.view(word) if rows.numel() else rows
