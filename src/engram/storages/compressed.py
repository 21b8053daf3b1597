"""Lists whose items are kept compressed, and lists whose batches are lazy stacks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Unpack, cast

import numpy as np
import torch
from torch import Tensor

from engram._support import checks, field_paths, nested, tensordicts, unsupported, words
from engram._support.copies import deflated, inflated, raw_bytes, zstd
from engram.storages.items import ItemGroups
from engram.storages.list import ListStorage
from engram.store.memory import DTYPE_NAMES, DTYPE_OF
from engram.store.row_indexes import ALL_ROWS, GroupRules, Groups

#: In a saved item: a tensor, a TensorDict, and what is said of them.
_TENSOR, _TENSORDICT = "engram.tensor", "engram.tensordict"


class LazyStackStorage(ListStorage):
    """A :class:`ListStorage` of TensorDicts whose batches are lazy stacks: shapes may differ, and entries be strings.

    Args:
        max_size, device: as for :class:`ListStorage`.
        stack_dim: the dimension of batches along which rows are stacked; a negative one counts from the end of the batch's.

    Raises:
        ValueError: ``max_size`` below 1. TypeError: ``stack_dim`` is no int.

    A batch shares the tensors of the rows: it is made at once, and an entry is stacked when it is asked for.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyStackStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
    >>> _ = rb.extend([TensorDict({"tokens": torch.zeros(n), "text": f"{n} tokens"}) for n in (3, 5)])
    >>> batch = rb.sample()
    >>> batch.shape, type(batch).__name__, len(batch[0]["tokens"]) in (3, 5)
    (torch.Size([4]), 'LazyStackedTensorDict', True)
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        device: torch.device | str | None = None,
        **later: Unpack[unsupported.TracingArguments],
    ) -> None:
        super().__init__(max_size, device=device, **later)
        self.stack_dim = checks.check_count("LazyStackStorage: stack_dim", stack_dim, least=-64, most=64)

    def stacked(self, items: list[object]) -> object:
        """A lazy stack of some rows, which are not copied.

        Raises ``TypeError``: they are no TensorDicts. ``RuntimeError``: other batch sizes, or no rows. ``ValueError``: no such dimension.

        >>> from tensordict import TensorDict
        >>> from engram import LazyStackStorage
        >>> LazyStackStorage(3, stack_dim=-1).stacked([TensorDict(batch_size=[2])] * 5).shape
        torch.Size([2, 5])
        """
        if not items:
            raise RuntimeError("LazyStackStorage: expected rows to stack, got none.")
        kinds = {type(item): item for item in items}  # each is looked at once
        odd = next((item for item in kinds.values() if not tensordicts.is_tensor_collection(item)), None)
        if odd is not None:
            raise TypeError(
                f"LazyStackStorage: expected TensorDicts, got {type(odd).__name__}. Use a ListStorage, or a collate_fn of your own."
            )
        rows = cast("list[tensordicts.TensorDict]", items)
        sizes = {row.batch_size for row in rows}
        if len(sizes) > 1:
            raise RuntimeError(
                f"LazyStackStorage: expected rows of one batch size, got {', '.join(str(list(size)) for size in sizes)}. Use a ListStorage."
            )
        dims = len(rows[0].batch_size) + 1
        if not -dims <= self.stack_dim < dims:
            raise ValueError(
                f"LazyStackStorage: stack_dim: expected one in [{-dims}, {dims}), as batches have {dims} dimensions, got {self.stack_dim}."
            )
        # Entries of the batch are no entries of what is stored.
        return tensordicts.lazy_stack(tensordicts.copies(rows), self.stack_dim % dims)

    def groups(
        self, name: str, key: field_paths.FieldPath, reward: field_paths.FieldPath | None, rules: GroupRules = ALL_ROWS
    ) -> Groups | None:
        del name  # there may be several
        if self._max_size is None:
            raise ValueError(
                "PromptGroupSampler: expected a storage with a bound, got a list without. Use LazyStackStorage(max_size=…)."
            )
        with self._lock:
            if (key, reward, rules) not in self._groups:
                groups = ItemGroups(self, key, reward, rules)
                self._tell_groups(groups)
                self._groups[key, reward, rules] = groups
            return self._groups[key, reward, rules]

    def __getitem__(self, index: object) -> object:
        """A row, or a lazy stack of some."""
        found = super().__getitem__(index)
        return self.stacked(found) if isinstance(found, list) else found


class _Leaf:
    """A compressed tensor."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, data: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        self.data, self.shape, self.dtype = data, shape, dtype


class _Entries:
    """A TensorDict of which the tensors are compressed."""

    __slots__ = ("batch_size", "device", "entries", "names")

    def __init__(
        self,
        entries: dict[str, object],
        batch_size: torch.Size,
        device: torch.device | None,
        names: list[str | None] | None = None,
    ) -> None:
        self.entries, self.batch_size, self.device, self.names = entries, batch_size, device, names


class CompressedListStorage(ListStorage):
    """A :class:`ListStorage` that keeps tensors compressed, those in TensorDicts, dicts, lists and tuples, too: for images and the like.

    Args:
        max_size: rows.
        compression_fn: makes a uint8 tensor ``[n]`` of a tensor. Default: Zstandard, of Python's standard library from 3.14 on, and
            before of ``engram-replay[zstd]``; zlib, which is slower, where neither is installed. Both are read.
        decompression_fn: makes a tensor of that and of a dict with its ``"shape"``, ``"dtype"`` and ``"device"``.
        compression_level: of Zstandard: larger is smaller and slower. Of zlib the nearest one in [1, 9].
        device: where tensors that are read are to be.

    Raises:
        ValueError: ``max_size`` below 1, or a level that Zstandard does not know. TypeError: one of the two functions alone, or no
            function; when rows are written: ``compression_fn`` returned no tensor. ModuleNotFoundError: when rows are read: Zstandard
            compressed them, and is not installed here.

    Objects that are no tensors are kept as they are. :meth:`bytes` says how much the tensors take.

    Cost: writing compresses each tensor by itself, and reading decompresses it: at Zstandard's speed.

    >>> import torch
    >>> from engram import CompressedListStorage, ReplayBuffer
    >>> import zlib
    >>> def small(tensor):
    ...     return torch.frombuffer(bytearray(zlib.compress(tensor.numpy().tobytes())), dtype=torch.uint8)
    >>> def large(data, said):
    ...     return torch.frombuffer(bytearray(zlib.decompress(data.numpy().tobytes())), dtype=said["dtype"]).view(said["shape"])
    >>> storage = CompressedListStorage(10, compression_fn=small, decompression_fn=large)
    >>> rb = ReplayBuffer(storage=storage, batch_size=4)
    >>> _ = rb.extend([{"pixels": torch.zeros(84, 84)} for _ in range(3)])
    >>> rb.sample()["pixels"].shape, storage.bytes() < 300
    (torch.Size([4, 84, 84]), True)
    """

    _loads = ("CompressedListStorage",)
    _keeps_whole = False

    def __init__(
        self,
        max_size: int,
        *,
        compression_fn: Callable[[Tensor], Tensor] | None = None,
        decompression_fn: Callable[[Tensor, dict[str, object]], Tensor] | None = None,
        compression_level: int = 3,
        device: torch.device | str | None = "cpu",
        **later: Unpack[unsupported.TracingArguments],
    ) -> None:
        super().__init__(max_size, device=device, **later)
        who = type(self).__name__
        for name, one in (("compression_fn", compression_fn), ("decompression_fn", decompression_fn)):
            checks.check_callable(f"{who}: {name}", one, "a callable", optional=True)
        if (compression_fn is None) != (decompression_fn is None):
            raise TypeError(f"{who}: expected compression_fn and decompression_fn together, got one of them.")
        level = checks.check_count(f"{who}: compression_level", compression_level, least=-sys.maxsize)
        self.compression_level = level
        self._compress, self._decompress = compression_fn, decompression_fn
        if compression_fn is None and (module := zstd()) is not None:
            low, high = module.CompressionParameter.compression_level.bounds()
            if not low <= level <= high:
                raise ValueError(
                    f"{who}: compression_level: expected one in [{low}, {high}] of Zstandard, got {level}."
                )

    def _stored(self, items: list[object]) -> list[object]:
        return [self._compressed(item) for item in items]

    def _compressed(self, item: object) -> object:
        return nested.map_leaves(item, self._compressed_leaf)

    def _compressed_leaf(self, leaf: object) -> object:
        if isinstance(leaf, Tensor):
            plain = leaf.detach().to("cpu").resolve_conj().resolve_neg()
            if self._compress is not None:
                data = self._compress(plain)
                made = f"a uint8 tensor from {self._compress!r:.80}"
                advice = "Return one: torch.frombuffer(bytearray(data), dtype=torch.uint8) makes it of bytes."
                data = checks.check_type(f"{type(self).__name__}: compression_fn", data, Tensor, made, advice)
            else:
                raw = deflated(_bytes_of(plain), self.compression_level)
                data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            return _Leaf(data, leaf.shape, leaf.dtype)
        if tensordicts.is_plain_tensordict(leaf):
            entries = {key: self._compressed(value) for key, value in tensordicts.children(leaf).items()}
            return _Entries(entries, leaf.batch_size, leaf.device, leaf.names if any(leaf.names) else None)
        return leaf

    def _whole(self, item: object) -> object:
        return nested.map_leaves(item, self._whole_leaf)

    def _whole_leaf(self, leaf: object) -> object:
        if isinstance(leaf, _Entries):
            entries = {key: self._whole(value) for key, value in leaf.entries.items()}
            device = self._device if leaf.device else None
            return tensordicts.tensordict_type()(entries, batch_size=leaf.batch_size, device=device, names=leaf.names)
        return self._tensor(leaf) if isinstance(leaf, _Leaf) else leaf

    def _tensor(self, leaf: _Leaf) -> Tensor:
        who = type(self).__name__
        device = self._device or torch.device("cpu")
        if self._decompress is not None:
            made = self._decompress(leaf.data, {"shape": leaf.shape, "dtype": leaf.dtype, "device": device})
        else:
            with words.raise_as(RuntimeError, f"{who}: a tensor {list(leaf.shape)} {leaf.dtype}"):
                raw = bytearray(inflated(_bytes_of(leaf.data), leaf.shape.numel() * leaf.dtype.itemsize, who))
            made = torch.frombuffer(raw, dtype=leaf.dtype) if raw else torch.empty(0, dtype=leaf.dtype)
            made = made.reshape(leaf.shape)
        return made.to(device)

    def read(self, rows: Tensor, expected: Tensor | None = None) -> tuple[list[object], list[int]]:
        items, moved = super().read(rows, expected)
        return [self._whole(item) for item in items], moved

    def _items_to_save(self) -> list[object]:
        return [_saved(item) for item in super()._items_to_save()]

    def _items_of(self, saved: list[object], where: str) -> list[object]:
        return [_loaded(item, where) for item in saved]

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(map(_size, self._items))

    def bytes(self) -> int:
        """Bytes that the compressed tensors take.

        >>> from engram import CompressedListStorage
        >>> CompressedListStorage(3, compression_fn=lambda x: x, decompression_fn=lambda x, said: x).bytes()
        0
        """
        return self.nbytes

    def to_bytestream(self, data: Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:  # type: ignore[valid-type]
        r"""The bytes of a tensor or an array. Raises ``TypeError``: something else.

        >>> import torch
        >>> from engram import CompressedListStorage
        >>> storage = CompressedListStorage(3, compression_fn=lambda x: x, decompression_fn=lambda x, said: x)
        >>> storage.to_bytestream(torch.tensor([1, 2], dtype=torch.uint8))
        b'\x01\x02'
        """
        tensor = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
        return _bytes_of(checks.check_type("to_bytestream", tensor, Tensor, "a tensor or an array"))


def _bytes_of(tensor: Tensor) -> bytes:
    return raw_bytes(tensor.detach().to("cpu")).numpy().tobytes()


def _size(item: object) -> int:
    sizes: list[int] = []

    def note(leaf: object) -> None:
        if isinstance(leaf, _Leaf):
            sizes.append(leaf.data.nbytes)
        elif isinstance(leaf, _Entries):
            nested.map_leaves(leaf.entries, note)

    nested.map_leaves(item, note)
    return sum(sizes)


def _saved(item: object) -> object:
    """A compressed item of tensors and containers alone."""
    return nested.map_leaves(item, _saved_leaf)


def _saved_leaf(leaf: object) -> object:
    if isinstance(leaf, _Leaf):
        return {_TENSOR: leaf.data, "shape": _numbers(leaf.shape), "dtype": _text(DTYPE_NAMES[leaf.dtype])}
    if isinstance(leaf, _Entries):
        device = _text("" if leaf.device is None else "device")
        return {_TENSORDICT: _saved(leaf.entries), "batch": _numbers(leaf.batch_size), "device": device}
    return leaf


def _numbers(sizes: torch.Size) -> Tensor:
    return torch.tensor(list(sizes), dtype=torch.int64, device="cpu")


def _loaded(saved: object, where: str) -> object:
    """What :func:`_saved` was made of. Raises ``ValueError``: no such item."""
    if isinstance(saved, dict) and _TENSOR in saved:
        data, shape, dtype = saved[_TENSOR], _sizes(saved.get("shape"), where), _said(saved.get("dtype"), where)
        if len(saved) != 3 or not isinstance(data, Tensor) or data.dtype is not torch.uint8 or dtype not in DTYPE_OF:
            raise ValueError(f"{where}: expected a compressed tensor, got {list(saved)}.")
        return _Leaf(data, shape, DTYPE_OF[dtype])
    if isinstance(saved, dict) and _TENSORDICT in saved:
        entries, batch = saved[_TENSORDICT], _sizes(saved.get("batch"), where)
        device = _said(saved.get("device"), where)
        if len(saved) != 3 or not isinstance(entries, dict):
            raise ValueError(f"{where}: expected a compressed TensorDict, got {list(saved)}.")
        made = {str(key): _loaded(value, where) for key, value in entries.items()}
        return _Entries(made, batch, torch.device("cpu") if device else None)
    if isinstance(saved, dict):
        return {key: _loaded(value, where) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_loaded(value, where) for value in saved)
    raise ValueError(f"{where}: expected a compressed item, got a {type(saved).__name__}.")


def _text(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _said(text: object, where: str) -> str:
    if not isinstance(text, Tensor) or text.dtype is not torch.uint8 or text.ndim != 1 or len(text) > 64:
        raise ValueError(f"{where}: expected a word as bytes, got {type(text).__name__}.")
    return _bytes_of(text).decode("ascii", "replace")


def _sizes(sizes: object, where: str) -> torch.Size:
    if not isinstance(sizes, Tensor) or sizes.dtype is not torch.int64 or sizes.ndim != 1 or len(sizes) > 64:
        raise ValueError(f"{where}: expected the sizes of a shape, got {type(sizes).__name__}.")
    shape = torch.Size(sizes.tolist())
    if any(size < 0 for size in shape) or math.prod(shape) > 1 << 47:
        raise ValueError(f"{where}: expected the sizes of a shape, got {list(shape)}.")
    return shape
