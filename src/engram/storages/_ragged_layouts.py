"""From the items of ragged rows to what users get: packed, jagged, padded, lists, texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support import tensordicts
from engram.errors import CorruptStore
from engram.store.ragged_rows import Items

if TYPE_CHECKING:
    from torch import Tensor

    from engram.storages.ragged import ItemField, RaggedLayout


class Packed(NamedTuple):
    """Rows one after the other, as attention kernels take them."""

    values: Tensor
    """``[total, *shape]``."""
    cu_seqlens: Tensor
    """int32 ``[n + 1]``: where each row begins, and the end of the last one."""
    max_seqlen: int
    """Items of the longest row; 0 of none."""


class Padded(NamedTuple):
    """Rows of one length, with zeros where they were shorter."""

    values: Tensor
    """``[n, length, *shape]``."""
    mask: Tensor
    """bool ``[n, length]``: which items are of a row."""


class Batches:
    """Lays the fields of one batch out. Fields that share lengths get offsets, masks and lengths that are the same tensors.

    Args:
        layout: how.
        within: whether the batch is a TensorDict: it holds TensorDicts in place of named tuples, and stacks of texts.
    """

    def __init__(self, layout: RaggedLayout, *, within: bool) -> None:
        self._layout, self._within = layout, within
        #: By the number of the leader: offsets of rows one after the other, int64; and of packed rows the same as int32, and the longest.
        self._offsets: dict[int, Tensor] = {}
        self._ends: dict[int, tuple[Tensor, int]] = {}

    def __call__(self, field: ItemField, items: Items, leader: int) -> object:
        """The rows of a field. ``leader``: the number of the field whose lengths it has."""
        if field.kind:
            texts = texts_of(field, items)
            return tensordicts.stack_of_objects(texts) if self._within else texts
        items = items.packed()
        assert items.offsets is not None  # packed ones have some
        return getattr(self, f"_{self._layout.kind}")(items, leader, self._offsets.setdefault(leader, items.offsets))

    def _jagged(self, items: Items, _: int, offsets: Tensor) -> object:
        longest = int(items.lengths.max()) if len(items) else 0  # without it torch pads to the items of all rows
        # Of one shape where the offsets are the same:
        return torch.nested.nested_tensor_from_jagged(items.given, offsets, max_seqlen=longest)

    def _packed(self, items: Items, leader: int, offsets: Tensor) -> object:
        if leader not in self._ends:
            self._ends[leader] = offsets.to(torch.int32), int(items.lengths.max()) if len(items.lengths) else 0
        packed = Packed(items.given, *self._ends[leader])
        if not self._within:
            return packed
        longest = tensordicts.one_object(packed.max_seqlen)
        return tensordicts.wrap({**packed._asdict(), "max_seqlen": longest}, torch.Size(()), None)

    def _padded(self, items: Items, *_: object) -> object:
        """Rows of one length: that of the longest, rounded up."""
        n, lengths, multiple = len(items), items.lengths.unsqueeze(1), self._layout.multiple
        longest = int(items.lengths.max()) if n else 0
        length = -(-longest // multiple) * multiple
        places = torch.arange(length, dtype=torch.int32, device="cpu")
        mask = places < lengths if self._layout.side == "right" else places >= length - lengths
        padded = Padded(items.given.new_zeros((n, length, *items.given.shape[1:])), mask)
        padded.values[mask] = items.given
        return tensordicts.wrap(padded._asdict(), torch.Size((n,)), None) if self._within else padded

    def _list(self, items: Items, *_: object) -> object:
        return tensordicts.stack_of_objects(items.rows()) if self._within else items.rows()


def single(field: ItemField, items: Items) -> object:
    """The only row: a tensor ``[length, *shape]``, or a text."""
    return texts_of(field, items)[0] if field.kind else items.rows()[0]


def texts_of(field: ItemField, items: Items) -> list[object]:
    """Rows of a text. Raises ``CorruptStore``: one is none; names field and row."""
    there = items.packed()
    raw, ends = there.given.numpy().tobytes(), there.starts + there.lengths
    rows = [raw[begin:end] for begin, end in zip(there.starts.tolist(), ends.tolist(), strict=True)]
    if field.kind == "bytes":
        return [*rows]
    decode, what = (json.loads, "JSON") if field.kind == "json" else (bytes.decode, "text in UTF-8")
    texts: list[object] = []
    try:
        texts.extend(map(decode, rows))
    except ValueError as error:
        place = len(texts)
        number = place if there.numbers is None else int(there.numbers[place])
        raise CorruptStore(
            f"{field.where}: row {number}: expected {what}, got other bytes: {error}. Its file was changed."
        ) from error
    return texts
