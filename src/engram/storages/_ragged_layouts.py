"""From the items of ragged rows to what users get: packed, jagged, padded, lists, texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support import native, tensordicts
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
        #: By the number of the leader: offsets of rows one after the other, int64 and int32, and the longest; and of padded rows the mask.
        self._known: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._masks: dict[int, Tensor] = {}

    def __call__(self, field: ItemField, items: Items, leader: int) -> object:
        """The rows of a field. ``leader``: the number of the field whose lengths it has."""
        if field.kind:
            texts = texts_of(field, items)
            return tensordicts.stack_of_objects(texts) if self._within else texts
        items = items.packed()
        if leader not in self._known:
            assert items.offsets is not None  # packed ones have some
            ends = items.offsets.to(torch.int32) if items.ends is None else items.ends
            longest = (int(items.lengths.max()) if len(items) else 0) if items.longest is None else items.longest
            self._known[leader] = items.offsets, ends, longest
        return getattr(self, f"_{self._layout.kind}")(items, leader, *self._known[leader])

    def _jagged(self, items: Items, _: int, offsets: Tensor, __: Tensor, longest: int) -> object:
        # The longest: without it torch pads to the items of all rows. Of one shape where the offsets are the same.
        return torch.nested.nested_tensor_from_jagged(items.given, offsets, max_seqlen=longest)

    def _packed(self, items: Items, _: int, __: Tensor, ends: Tensor, longest: int) -> object:
        if len(items.given) >= 1 << 31:
            raise RuntimeError(f"sample: packed: expected fewer than 2**31 items of a field, got {len(items.given):,}.")
        packed = Packed(items.given, ends, longest)
        if not self._within:
            return packed
        said = {**packed._asdict(), "max_seqlen": tensordicts.one_object(longest)}
        return tensordicts.wrap(said, torch.Size(()), None)

    def _padded(self, items: Items, leader: int, _: Tensor, __: Tensor, longest: int) -> object:
        """Rows of one length: that of the longest, rounded up."""
        multiple, left, mask = self._layout.multiple, self._layout.side == "left", self._masks.get(leader)
        length = -(-longest // multiple) * multiple
        made = native.pad([items.given], items.lengths, length, left, mask is None) if length else None
        if made is None:  # no items, or torch does not let the core look at tensors
            lengths, places = items.lengths.unsqueeze(1), torch.arange(length, dtype=torch.int32, device="cpu")
            mask = places >= length - lengths if left else places < lengths
            made = [items.given.new_zeros((len(items), length, *items.given.shape[1:]))]
            made[0][mask] = items.given
        padded = Padded(made[0], self._masks.setdefault(leader, made[-1] if mask is None else mask))
        return tensordicts.wrap(padded._asdict(), torch.Size((len(items),)), None) if self._within else padded

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
