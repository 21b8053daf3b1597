"""From the items of ragged rows to what users get: packed, jagged, padded, lists, texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support import tensordicts
from engram.errors import CorruptStore
from engram.store.ragged_rows import Items, offsets_of

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
        self._offsets: dict[int, Tensor] = {}
        self._kept: list[object] = []

    def __call__(self, field: ItemField, items: Items) -> object:
        """The rows of a field."""
        if field.kind:
            texts = texts_of(field, items)
            return tensordicts.stack_of_objects(texts) if self._within else texts
        return getattr(self, f"_{self._layout.kind}")(items.packed())

    def _offsets_of(self, items: Items) -> Tensor:
        """int64 ``[n + 1]``, the same tensor for the same lengths: nested tensors are of one shape then."""
        key = id(items.starts)
        if key not in self._offsets:
            self._offsets[key] = offsets_of(items.lengths)
            self._kept.append(items.starts)  # so that no other tensor gets its id
        return self._offsets[key]

    def _jagged(self, items: Items) -> object:
        assert items.values is not None  # rows that were read have items
        return torch.nested.nested_tensor_from_jagged(items.values, self._offsets_of(items))

    def _packed(self, items: Items) -> object:
        assert items.values is not None  # rows that were read have items
        longest = int(items.lengths.max()) if len(items) else 0
        packed = Packed(items.values, self._offsets_of(items).to(torch.int32), longest)
        if not self._within:
            return packed
        return tensordicts.wrap(
            {**packed._asdict(), "max_seqlen": tensordicts.one_object(longest)}, torch.Size(()), None
        )

    def _padded(self, items: Items) -> object:
        padded = padded_rows(items, self._layout)
        return tensordicts.wrap(padded._asdict(), torch.Size((len(items),)), None) if self._within else padded

    def _list(self, items: Items) -> object:
        return tensordicts.stack_of_objects(items.rows()) if self._within else items.rows()


def padded_rows(items: Items, layout: RaggedLayout) -> Padded:
    """Rows of one length: that of the longest, rounded up. ``items``: in order."""
    assert items.values is not None  # rows that were read have items
    n, lengths = len(items), items.lengths.unsqueeze(1)
    longest = int(items.lengths.max()) if n else 0
    length = -(-longest // layout.multiple) * layout.multiple
    places = torch.arange(length, dtype=torch.int32, device="cpu")
    mask = places < lengths if layout.side == "right" else places >= length - lengths
    values = items.values.new_zeros((n, length, *items.values.shape[1:]))
    values[mask] = items.values
    return Padded(values, mask)


def single(field: ItemField, items: Items) -> object:
    """The only row: a tensor ``[length, *shape]``, or a text."""
    return texts_of(field, items)[0] if field.kind else items.rows()[0]


def texts_of(field: ItemField, items: Items) -> list[object]:
    """Rows of a text. Raises ``CorruptStore``: one is none; names field and row."""
    there = items.packed()
    assert there.values is not None  # rows that were read have items
    raw, ends = there.values.numpy().tobytes(), there.starts + there.lengths
    rows = [raw[begin:end] for begin, end in zip(there.starts.tolist(), ends.tolist(), strict=True)]
    if field.kind == "bytes":
        return [*rows]
    decode = json.loads if field.kind == "json" else bytes.decode
    texts: list[object] = []
    try:
        texts.extend(map(decode, rows))
    except ValueError as error:
        place = len(texts)
        number = place if there.numbers is None else int(there.numbers[place])
        what = "JSON" if field.kind == "json" else "text in UTF-8"
        raise CorruptStore(
            f"{field.where}: row {number}: expected {what}, got other bytes: {error}. Its file was changed."
        ) from error
    return texts
