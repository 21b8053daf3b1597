"""Fields of which a row has any number of items: how users declare them, and how much memory they get."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from engram._support.checks import check_count, check_number
from engram._support.field_paths import checked_path, public
from engram._support.words import format_size
from engram.format.schema import DTYPES, MAX_DIMS, MAX_ITEMS_OF_ROW, ItemsKind
from engram.store.memory import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    Path: TypeAlias = tuple[str, ...]

#: What is stored as bytes, and returned as it was.
TEXT = ("utf-8", "bytes", "json")
#: Without a declaration a row may be so many times as long as the longest of the first write.
_HEADROOM = 4
#: Without ``ragged_bytes`` there is room for all rows if they have this share of ``max_length``, on average.
_USUAL_SHARE = 4
#: Above the size of any file.
_MAX_BYTES = 1 << 60


class Ragged:
    """Declares a field of which each row has another number of items: tokens, text, detections.

    Args:
        dtype_or_kind: the dtype of an item, of torch, of NumPy or by name; ``"utf-8"``, whose rows are strings;
            ``"bytes"``; or ``"json"``, whose rows are what ``json.dumps`` takes.
        max_length: items that a row may have at most; of strings and JSON the bytes of the text in UTF-8. None: the
            next power of two of four times the longest row of the first write, which is logged.
        like: the field whose lengths the rows of this one have, such as the tokens of which it holds the
            log-probabilities. A write may leave it out: its items are zeros then, and may be replaced later.
        shape: of an item; ``()`` for numbers.

    Raises:
        TypeError: no dtype and no kind, or a ``shape`` that is no tuple of ints.
        ValueError: ``max_length`` beside ``like``, or out of ``[1, 2**31)``; ``shape`` or ``like`` of a text.

    Fields that share lengths are one *group*: the field with ``max_length`` leads, those with ``like`` follow. The rows
    of a group are in one ring of items per lane; what each of them takes is ``length`` items of every member and 12 bytes.

    >>> import torch
    >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
    >>> fields = {"tokens": Ragged(torch.int32, max_length=32), "log_prob": Ragged(torch.float32, like="tokens")}
    >>> fields["tokens"]
    Ragged(torch.int32, max_length=32)
    >>> Ragged("utf-8", max_length=1_000)
    Ragged('utf-8', max_length=1000)
    """

    __slots__ = ("dtype", "kind", "like", "max_length", "shape")

    dtype: str
    """Of an item, by name; uint8 of texts."""
    kind: ItemsKind
    """``"utf-8"``, ``"bytes"`` or ``"json"``; empty: numbers."""
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
        self.like = None if like is None else checked_path(like, "Ragged: like")
        self.max_length = None
        if max_length is not None:
            self.max_length = check_count("Ragged: max_length", max_length, "items", most=MAX_ITEMS_OF_ROW)
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
        """Bytes of an item."""
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
            said.append(f"like={public(self.like)!r}")
        if self.shape:
            said.append(f"shape={self.shape}")
        return f"Ragged({', '.join(said)})"


def _dtype_name(given: object) -> str:
    """The name of a dtype. Raises ``TypeError``: it is none that can be stored."""
    try:
        name = DTYPE_NAMES[given] if isinstance(given, torch.dtype) else str(given)
        name = name if name in DTYPES else np.dtype(given).name  # type: ignore[call-overload] # that is the question
    except (KeyError, TypeError):
        name = ""
    if name not in DTYPES or given is None:
        kinds = ", ".join(map(repr, TEXT))
        raise TypeError(f"Ragged: expected a dtype, one of {', '.join(DTYPES)}, or {kinds}, got {given!r:.80}.")
    return name


def _checked_shape(given: object) -> tuple[int, ...]:
    """Raises ``TypeError``, ``ValueError``: it is no shape of an item."""
    if not isinstance(given, tuple | list):
        raise TypeError(f"Ragged: shape: expected a tuple of ints, that of an item, got {given!r:.80}.")
    shape = tuple(check_count("Ragged: shape", size) for size in given)
    if len(shape) > MAX_DIMS - 2:  # of rows in batches
        raise ValueError(f"Ragged: shape: expected at most {MAX_DIMS - 2} dimensions, got {len(shape)}.")
    return shape


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
        fields[checked_path(key, f"{where}: ragged")] = field
    leaders = [public(path) for path, field in fields.items() if field.like is None]
    for path, field in fields.items():
        if field.like is not None and (field.like not in fields or fields[field.like].like is not None):
            raise ValueError(
                f"{where}: ragged: {public(path)!r}: like: expected a declared field that has lengths of its own, one of {leaders}, got "
                f"{public(field.like)!r}."
            )
    return fields


def checked_bytes(given: object, where: str) -> int | None:
    """``ragged_bytes``. Raises ``TypeError``, ``ValueError``: it is no size."""
    return None if given is None else int(check_number(f"{where}: ragged_bytes", given, least=1, most=_MAX_BYTES))


def likely_length(longest: int) -> int:
    """The ``max_length`` of a field of which nothing but the first rows is known.

    >>> from engram.storages.ragged import likely_length
    >>> likely_length(100), likely_length(0)
    (512, 4)
    """
    return min(1 << max(_HEADROOM * longest - 1, _HEADROOM - 1).bit_length(), MAX_ITEMS_OF_ROW)


class Group(NamedTuple):
    """Fields that share lengths, as far as their size goes."""

    max_length: int
    item_bytes: int
    """Bytes of an item of all members."""

    @property
    def most(self) -> int:
        """Bytes of the longest row."""
        return self.max_length * self.item_bytes


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
    row = sum(group.most for group in groups)
    if nbytes is None:
        share = [-(-capacity // lanes) * group.max_length // _USUAL_SHARE for group in groups]
        return [max(items, 2 * group.max_length) for items, group in zip(share, groups, strict=True)]
    if nbytes < lanes * row:
        needed = f"{lanes * row:,} bytes ({format_size(lanes * row)})"
        raise ValueError(
            f"{where}: ragged_bytes: expected at least {needed}, room for one row of max_length in each of {lanes} lanes, got {nbytes:,}. "
            "Give more, or lower max_length."
        )
    return [nbytes * group.max_length // (row * lanes) for group in groups]
