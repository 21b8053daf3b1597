"""Fields of which a row has any number of items: how users declare them, and how much memory they get."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, cast, get_args

import numpy as np
import torch

from engram._support import checks, field_paths, nested, words
from engram.format.schema import DTYPES, MAX_DIMS, ItemsKind, RaggedItems
from engram.storages._types import at, dtype_name
from engram.store import memory, ragged_rows

Path: TypeAlias = tuple[str, ...]

#: What is stored as bytes, and returned as it was.
TEXT = ("utf-8", "bytes", "json")
#: Items of a row are counted in 31 bits.
MAX_ITEMS_OF_ROW = (1 << 31) - 1
#: Without a declaration a row may be so many times as long as the longest of the first write, and so long in any case.
_HEADROOM, _LEAST_LENGTH = 4, 64
#: Without ``ragged_bytes`` there is room for all rows if they have this share of ``max_length``, on average.
_USUAL_SHARE = 4
#: Above the size of any file.
MAX_BYTES = 1 << 60
MAX_OPEN_ROWS = 1 << 20


class Ragged:
    """Declares a field of which each row has another number of items: tokens, text, detections.

    Args:
        dtype_or_kind: the dtype of an item, of torch, of NumPy or by name; ``"utf-8"``, whose rows are strings;
            ``"bytes"``; or ``"json"``, whose rows are what ``json.dumps`` takes.
        max_length: items that a row may have at most; of strings and JSON the bytes of the text in UTF-8. None: the
            next power of two of four times the longest row of the first write, at least 64, which is logged.
        like: the field whose lengths the rows of this one have, such as the tokens of which it holds the
            log-probabilities. Where a write has None in its place, its items are zeros, and may be replaced later.
        shape: of an item; ``()`` for numbers.

    Raises:
        TypeError: no dtype and no kind, or a ``shape`` that is no tuple of ints.
        ValueError: ``max_length`` beside ``like``, or out of ``[1, 2**31)``; ``shape`` or ``like`` of a text.

    Fields that share lengths are one *group*: the field with ``max_length`` leads, those with ``like`` follow. The rows
    of a group are in one ring of items per lane, or in slots; what each of them takes is ``length`` items of every member
    and 12 bytes, in slots rounded up to pages of 4,096 bytes.

    >>> import torch
    >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
    >>> fields = {"tokens": Ragged(torch.int32, max_length=32), "log_prob": Ragged(torch.float32, like="tokens")}
    >>> fields["tokens"]
    Ragged(torch.int32, max_length=32)
    >>> Ragged("utf-8", max_length=1_000)
    Ragged('utf-8', max_length=1000)
    """

    __slots__ = ("dtype", "kind", "like", "max_length", "shape")

    #: Of an item, by name; uint8 of texts.
    dtype: str
    #: ``"utf-8"``, ``"bytes"`` or ``"json"``; empty: numbers.
    kind: ItemsKind
    like: Path | None
    max_length: int | None
    shape: tuple[int, ...]

    def __init__(
        self,
        dtype_or_kind: object,
        *,
        max_length: int | None = None,
        like: str | tuple[str, ...] | None = None,
        shape: Sequence[int] = (),
    ) -> None:
        kind: ItemsKind = dtype_or_kind if isinstance(dtype_or_kind, str) and dtype_or_kind in TEXT else ""  # type: ignore[assignment]
        self.kind, self.dtype = kind, "uint8" if kind else _dtype_name(dtype_or_kind)
        self.shape = _checked_shape(shape)
        self.like = None if like is None else field_paths.checked_path(like, "Ragged: like")
        self.max_length = None
        if max_length is not None:
            self.max_length = checks.check_count("Ragged: max_length", max_length, "items", most=MAX_ITEMS_OF_ROW)
        if self.like is not None and self.max_length is not None:
            raise ValueError(
                f"Ragged: max_length: expected none beside like={like!r}, whose lengths it has, got {max_length}. Leave it out."
            )
        if kind and (self.like is not None or self.shape):
            given = f"like={like!r}" if self.like is not None else f"shape={self.shape}"
            raise ValueError(
                f"Ragged: {given.partition('=')[0]}: expected none of {kind!r}, whose rows are texts, got {given}."
            )

    @property
    def item_bytes(self) -> int:
        """Bytes of an item.

        >>> import torch
        >>> from engram import Ragged
        >>> Ragged(torch.float32, max_length=100, shape=(2,)).item_bytes
        8
        """
        return math.prod(self.shape) * DTYPES[self.dtype]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ragged) and all(getattr(self, it) == getattr(other, it) for it in self.__slots__)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, it) for it in self.__slots__))

    def __repr__(self) -> str:
        said = [repr(self.kind) if self.kind else f"torch.{self.dtype}"]
        if self.max_length is not None:
            said.append(f"max_length={self.max_length}")
        if self.like is not None:
            said.append(f"like={field_paths.public(self.like)!r}")
        if self.shape:
            said.append(f"shape={self.shape}")
        return f"Ragged({', '.join(said)})"


def _dtype_name(given: object) -> str:
    """The name of a dtype. Raises ``TypeError``: it is none that can be stored."""
    name = dtype_name(given)
    if not name:
        kinds = ", ".join(map(repr, TEXT))
        raise TypeError(f"Ragged: expected a dtype, one of {', '.join(DTYPES)}, or {kinds}, got {given!r:.80}.")
    return name


def _checked_shape(given: object) -> tuple[int, ...]:
    """Raises ``TypeError``, ``ValueError``: it is no shape of an item."""
    if not isinstance(given, tuple | list):
        raise TypeError(f"Ragged: shape: expected a tuple of ints, that of an item, got {given!r:.80}.")
    shape = tuple(checks.check_count("Ragged: shape", size) for size in given)
    if len(shape) > MAX_DIMS - 2:  # of rows in batches
        raise ValueError(f"Ragged: shape: expected at most {MAX_DIMS - 2} dimensions, got {len(shape)}.")
    return shape


class ItemField(NamedTuple):
    """What the items of a field are."""

    key: Path
    dtype: torch.dtype
    #: Of an item.
    shape: torch.Size
    #: Of texts ``"utf-8"``, ``"bytes"`` or ``"json"``; empty: numbers.
    kind: str
    max_length: int

    @classmethod
    def of(cls, key: Path, said: Ragged | RaggedItems) -> ItemField:
        """As declared or stored."""
        longest = said.max_length or MAX_ITEMS_OF_ROW
        return cls(key, memory.DTYPE_OF[said.dtype], torch.Size(said.shape), said.kind, longest)

    @property
    def where(self) -> str:
        """How messages call it."""
        return at(self.key)

    @property
    def expected(self) -> str:
        """What rows hold, for messages."""
        if self.kind:
            return {"utf-8": "strings", "bytes": "bytes", "json": "values that json.dumps takes"}[self.kind]
        of = f" of shape {list(self.shape)}" if self.shape else ""
        return f"{memory.DTYPE_NAMES[self.dtype]} items{of}"


#: How rows of several lengths are put together.
LayoutKind: TypeAlias = Literal["jagged", "packed", "padded", "list"]


class RaggedLayout(NamedTuple):
    """How the rows of ragged fields are laid out in batches."""

    kind: LayoutKind = "jagged"
    #: Of padded rows: where the zeros are.
    side: Literal["right", "left"] = "right"
    #: Of padded rows: what divides their length.
    multiple: int = 1

    @classmethod
    def checked(cls, given: object, where: str) -> RaggedLayout:
        """A user's ``layout``: a kind, or a dict with ``kind``, ``side`` and ``multiple``. Raises ``TypeError``, ``ValueError``."""
        said = cast("dict[str, Any]", dict(given) if isinstance(given, Mapping) else {"kind": given})
        if not isinstance(given, str | Mapping) or said.keys() - set(cls._fields) or "kind" not in said:
            raise TypeError(
                f'{where}: layout: expected one of {get_args(LayoutKind)} or a dict such as {{"kind": "padded", "side": "left", '
                f'"multiple": 8}}, got {given!r:.80}.'
            )
        layout = cls()._replace(**said)
        if layout.kind not in get_args(LayoutKind) or layout.side not in ("right", "left"):
            kinds = get_args(LayoutKind)
            name, possible = ("side", ("right", "left")) if layout.kind in kinds else ("kind", kinds)
            raise ValueError(f"{where}: layout: {name}: expected one of {possible}, got {said[name]!r:.80}.")
        if layout.kind != "padded" and (layout.side, layout.multiple) != ("right", 1):
            raise ValueError(f'{where}: layout: side and multiple: expected with kind="padded", got {layout.kind!r}.')
        return layout._replace(multiple=checks.check_count(f"{where}: layout: multiple", layout.multiple))


JAGGED = RaggedLayout()


# ---- what a storage is asked for ---------------------------------------------------------------------------------------

#: The fields that a user has declared, by path.
Declared: TypeAlias = "Mapping[Path, Ragged]"


def checked_ragged(given: object, where: str) -> dict[Path, Ragged]:
    """Declared fields by their paths, leaders before those that have their lengths.

    Raises:
        TypeError: no mapping of keys to :class:`Ragged`.
        ValueError: ``like`` names no field that leads.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f'{where}: ragged: expected a dict such as {{"tokens": Ragged(torch.int32)}}, got {given!r:.80}.'
        )
    fields: dict[Path, Ragged] = {}
    for key, field in given.items():
        if not isinstance(field, Ragged):
            raise TypeError(
                f"{where}: ragged: {key!r}: expected a Ragged, got {field!r:.80}. Write Ragged({field!r:.40}, …)."
            )
        fields[field_paths.checked_path(key, f"{where}: ragged")] = field
    leaders = [field_paths.public(path) for path, field in fields.items() if field.like is None]
    for path, field in fields.items():
        if field.like is not None and (field.like not in fields or fields[field.like].like is not None):
            raise ValueError(
                f"{where}: ragged: {field_paths.public(path)!r}: like: expected a declared field that has lengths of its own, "
                f"one of {leaders}, got {field_paths.public(field.like)!r}."
            )
    return fields


def likely_length(longest: int) -> int:
    """The ``max_length`` of a field of which nothing but the first rows is known.

    >>> from engram.storages.ragged import likely_length
    >>> likely_length(100), likely_length(0)
    (512, 64)
    """
    return min(max(1 << max(_HEADROOM * longest - 1, 0).bit_length(), _LEAST_LENGTH), MAX_ITEMS_OF_ROW)


class Group(NamedTuple):
    """Fields that share lengths, as far as their size goes."""

    max_length: int
    #: Bytes of an item of all members.
    item_bytes: int


def ring_items(groups: Sequence[Group], nbytes: int | None, capacity: int, lanes: int, where: str) -> list[int]:
    """How many items the ring of each lane holds, of each group.

    Args:
        groups: all of a storage.
        nbytes: that all rings may have together, which groups get in proportion to their longest row. None: enough for all rows if they
            have a quarter of ``max_length`` on average, and for two rows of ``max_length`` in each lane.
        capacity, lanes: rows, and rings of them.
        where: for messages.

    Raises:
        ValueError: a ring would not hold one row of ``max_length``; says the bytes needed.

    >>> from engram.storages.ragged import Group, ring_items
    >>> ring_items([Group(100, 8), Group(50, 4)], 10_000, capacity=20, lanes=2, where="example")
    [500, 250]
    """
    row = sum(group.max_length * group.item_bytes for group in groups)
    if nbytes is None:
        share = [-(-capacity // lanes) * group.max_length // _USUAL_SHARE for group in groups]
        return [max(items, 2 * group.max_length) for items, group in zip(share, groups, strict=True)]
    if nbytes < lanes * row:
        needed = f"{lanes * row:,} bytes ({words.format_size(lanes * row)})"
        raise ValueError(
            f"{where}: ragged_bytes: expected at least {needed}, room for one row of max_length in each of {lanes} lanes, got {nbytes:,}. "
            "Give more, or lower max_length."
        )
    return [nbytes * group.max_length // (row * lanes) for group in groups]


def uneven_fields(rows: Sequence[object]) -> dict[Path, Ragged]:
    """The fields of rows, one after the other, whose first dimension is not the same in all."""
    if not nested.has_entries(rows[0]):
        return {}
    found = {}
    for path, value in nested.flatten(rows[0]):
        has_rows = isinstance(value, torch.Tensor | np.ndarray) and value.ndim
        if has_rows and (declared := uneven_rows([nested.find(row, path) for row in rows])) is not None:
            found[path] = declared
    return found


def uneven_rows(rows: Sequence[object]) -> Ragged | None:
    """What arrays are that differ in their first dimension, and in no other; None: they do not."""
    arrays = [row for row in rows if isinstance(row, torch.Tensor | np.ndarray) and row.ndim]
    if not rows or len(arrays) < len(rows) or len({row.shape[0] for row in arrays}) < 2:
        return None
    shapes, dtypes = {tuple(row.shape[1:]) for row in arrays}, {_dtype_name(row.dtype) for row in arrays}
    return Ragged(dtypes.pop(), shape=shapes.pop()) if len(shapes) == len(dtypes) == 1 else None


class RaggedArguments(TypedDict, total=False):
    """Keywords of storages that take ragged fields."""

    #: Fields whose rows have different lengths. Others are found at the first write, by what is handed over.
    ragged: Mapping[str | tuple[str, ...], Ragged] | None
    #: Bytes that the items of all ragged fields may have together; None: see :func:`ring_items`.
    ragged_bytes: float | None
    #: Where items lie: in rings that the rows of a lane share, or in a slot of ``max_length`` items for each row.
    ragged_layout: Literal["ring", "slots"]
    #: How batches hold them: ``"jagged"``, ``"packed"``, ``"padded"`` or ``"list"``.
    layout: str | Mapping[str, object]
    #: Rows that may grow at once, see :meth:`ReplayBuffer.open_row`. Each has room for ``max_length`` items of every ragged field.
    open_rows: int


def checked_slots(given: object, nbytes: float | None, where: str) -> bool | None:
    """A user's ``ragged_layout``. Raises ``ValueError``: it is none; ``ragged_bytes`` beside slots."""
    if given not in (None, "ring", "slots"):
        raise ValueError(f"{where}: ragged_layout: expected 'ring' or 'slots', got {given!r:.80}.")
    if given == "slots" and nbytes is not None:
        raise ValueError(
            f"{where}: ragged_bytes: expected none with ragged_layout='slots', where each row has room for max_length items, got "
            f"{nbytes:,}. Leave it out."
        )
    return None if given is None else given == "slots"


class RaggedOptions(NamedTuple):
    """What a storage was asked for, as far as ragged fields go."""

    #: Declared ones.
    fields: Mapping[Path, Ragged] = {}
    #: Whether others are found at the first write.
    finds: bool = False
    nbytes: int | None = None
    capacity: int = 1
    lanes: int = 1
    #: For messages.
    where: str = ""
    #: Whether rows of fields that are found may have any length.
    unlimited: bool = False
    layout: RaggedLayout = JAGGED
    #: Rows that may grow at once.
    open_rows: int = 0
    #: Whether each row has a slot for its items; None: as rows that are loaded had it, else not.
    slots: bool | None = None

    def without_items(self) -> dict[Path, object]:
        """One row of each declared field, which leaves it out."""
        none = torch.zeros(1, dtype=torch.int64, device="cpu")
        return {path: ragged_rows.Items(None, none, none.to(torch.int32)) for path in self.fields}

    def of_rows(self, rows: Sequence[object]) -> RaggedOptions:
        """The same for one row of a list, in which fields are ragged whose first dimension differs from row to row."""
        if not self.finds or not rows:
            return self
        return self._replace(fields={**uneven_fields(rows), **self.fields}, unlimited=True)

    def check_room(self) -> None:
        """Raise ``ValueError``: the bytes are too few for a row of the declared fields whose ``max_length`` is known."""
        nbytes: dict[Path, int] = {}
        for path, it in self.fields.items():
            leader = it.like or path
            nbytes[leader] = nbytes.get(leader, 0) + it.item_bytes
        self.rings([Group(most, nbytes[at]) for at, it in self.fields.items() if (most := it.max_length) is not None])

    def rings(self, groups: Sequence[Group]) -> list[int]:
        """As :func:`ring_items`; 1 each where rows may have any length, 0 where they have slots."""
        if self.unlimited or self.slots:
            return [0 if self.slots else 1] * len(groups)
        return ring_items(groups, self.nbytes, self.capacity, self.lanes, self.where)


NO_RAGGED = RaggedOptions()
