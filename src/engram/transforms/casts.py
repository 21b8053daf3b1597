"""Transforms between the dtypes and devices of the buffer and those of batches."""

from __future__ import annotations

from typing import ClassVar

import torch

from engram._support import devices, nested, tensordicts
from engram.transforms import _base
from engram.transforms._base import Key, Keys


class DTypeCastTransform(_base.KeyedTransform):
    """Casts entries from ``dtype_in`` to ``dtype_out`` on reading, and back on writing.

    Args:
        dtype_in: the dtype in the buffer.
        dtype_out: the dtype in batches.
        in_keys: the entries to cast on reading; None: every tensor of ``dtype_in``.
        out_keys: the names of the results; default ``in_keys``.
        in_keys_inv: the entries to cast to ``dtype_in`` on writing. Default: every tensor of ``dtype_out``, or none if
            ``in_keys`` is given.
        out_keys_inv: the names of these entries in the written data; default ``in_keys_inv``.

    Raises:
        TypeError: an argument is not a dtype, or not a key.
        ValueError: ``out_keys`` without ``in_keys``.
        KeyError: on use: there is no such entry.

    >>> import torch
    >>> from engram import DTypeCastTransform, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=DTypeCastTransform(torch.float16, torch.float32))
    >>> _ = rb.extend({"a": torch.zeros(3)})
    >>> rb.storage[:]["a"].dtype, rb.sample(2)["a"].dtype
    (torch.float16, torch.float32)
    """

    shown: ClassVar[tuple[str, ...]] = ("dtype_in", "dtype_out", "in_keys", "in_keys_inv")

    def __init__(
        self,
        dtype_in: torch.dtype,
        dtype_out: torch.dtype,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        name = type(self).__name__
        for argument, value in (("dtype_in", dtype_in), ("dtype_out", dtype_out)):
            if not isinstance(value, torch.dtype):
                raise TypeError(f"{name}: {argument}: expected a torch.dtype, got {value!r}.")
        if (in_keys is None and out_keys is not None) or (in_keys_inv is None and out_keys_inv is not None):
            raise ValueError(f"{name}: out_keys: expected none without in_keys, as every entry is cast in its place.")
        self.dtype_in, self.dtype_out = dtype_in, dtype_out
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self._all = in_keys is None
        self._all_inv = in_keys_inv is None and in_keys is None
        self.reads, self.writes = self._all or self.reads, self._all_inv or self.writes

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype_out)

    def apply_inv(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype_in)

    def forward(self, data: object) -> object:
        if not self._all:
            return super().forward(data)
        return _base.map_tensors(data, lambda x: x.to(self.dtype_out) if x.dtype is self.dtype_in else x)

    def inv(self, data: object) -> object:
        if not self._all_inv:
            return super().inv(data)
        return _base.map_tensors(data, lambda x: x.to(self.dtype_in) if x.dtype is self.dtype_out else x)


class DoubleToFloat(DTypeCastTransform):
    """:class:`DTypeCastTransform` from float64 inside to float32 outside.

    >>> import torch
    >>> from engram import DoubleToFloat
    >>> DoubleToFloat(in_keys=["a"])({"a": torch.zeros(2, dtype=torch.float64)})["a"].dtype
    torch.float32
    """

    shown = ("in_keys", "in_keys_inv")

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__(torch.float64, torch.float32, in_keys, out_keys, in_keys_inv, out_keys_inv)


class DeviceCastTransform(_base.KeyedTransform):
    """Moves batches to ``device``, and written rows to ``orig_device``.

    Args:
        device: the device of batches.
        orig_device: the device of written rows; None: they are not moved (a storage takes data from any device).
        in_keys: the entries to move on reading; default all. If only some entries move, the TensorDict has no ``device``.
        out_keys: the names of the moved entries; default ``in_keys``. With another name, the original entry stays.
        in_keys_inv, out_keys_inv: the same for writing.

    Raises:
        RuntimeError: this machine has no such device.
        KeyError: on use: there is no such entry.

    A copy from pinned memory to an accelerator is asynchronous for the host, and ordered on the caller's stream.
    :class:`engram.DeviceLoader` copies while the learner works.

    >>> import torch
    >>> from engram import DeviceCastTransform
    >>> DeviceCastTransform("cpu")({"a": torch.zeros(2)})["a"].device
    device(type='cpu')
    """

    shown = ("device", "orig_device", "in_keys", "in_keys_inv")

    def __init__(
        self,
        device: torch.device | str | int,
        orig_device: torch.device | str | int | None = None,
        *,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        who = "DeviceCastTransform"
        self.device = devices.existing_device(device, f"{who}: device")
        self.orig_device = None if orig_device is None else devices.existing_device(orig_device, f"{who}: orig_device")
        self._all = not self.in_keys and not self.in_keys_inv
        self.reads = self._all or bool(self.in_keys)
        self.writes = self.orig_device is not None and (self._all or bool(self.in_keys_inv))

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return _moved(value, self.device)

    def apply_inv(self, value: torch.Tensor) -> torch.Tensor:
        assert self.orig_device is not None  # else writes is False
        return _moved(value, self.orig_device)

    def forward(self, data: object) -> object:
        return _everything(data, self.device) if self._all else super().forward(_without_device(data))

    def inv(self, data: object) -> object:
        if self.orig_device is None:
            return data
        return _everything(data, self.orig_device) if self._all else super().inv(_without_device(data))


def _moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A copy to the host must have ended before its result is read.
    return value.to(device, non_blocking=device.type != "cpu")


def _everything(data: object, device: torch.device) -> object:
    if nested.is_tensordict(data):
        return data.to(device, non_blocking=device.type != "cpu")  # without non_blocking=, it waits at the end
    return _base.map_tensors(data, lambda x: _moved(x, device))


def _without_device(data: object) -> object:
    """A TensorDict that may hold entries of several devices."""
    if _base.is_tensor(data) or not nested.is_tensordict(data) or data.device is None:
        return data
    return _base.shallow(data, "DeviceCastTransform").clear_device_()


class RenameTransform(_base.KeyedTransform):
    """Renames entries: ``in_keys`` become ``out_keys`` on reading, ``out_keys_inv`` become ``in_keys_inv`` on writing.

    Args:
        in_keys, out_keys: names in the buffer and in batches, in pairs.
        in_keys_inv, out_keys_inv: the same for writing. By default, nothing is renamed.
        create_copy: keep the entry under its old name as well.

    Raises:
        ValueError: the lists differ in length, or a key is in both of them (the order would matter: use two transforms).
        KeyError: on use: there is no such entry.
        TypeError: on use: the data is neither a TensorDict nor a dict.

    >>> import torch
    >>> from engram import RenameTransform
    >>> sorted(RenameTransform(["obs"], [("next", "obs")])({"obs": torch.zeros(2), "a": torch.zeros(2)}))
    ['a', 'next']
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys, [] if out_keys is None else out_keys, in_keys_inv, out_keys_inv)
        self.create_copy = bool(create_copy)
        both = [key for key in self.in_keys if key in self.out_keys]
        if both:
            raise ValueError(f"RenameTransform: expected no key among both in_keys and out_keys, got {both}. Use two.")

    def forward(self, data: object) -> object:
        return self._renamed(data, self.in_keys, self.out_keys)

    def inv(self, data: object) -> object:
        return self._renamed(data, self.out_keys_inv, self.in_keys_inv)

    def _renamed(self, data: object, old: list[Key], new: list[Key]) -> object:
        made = _base.shallow(data, "RenameTransform")
        for source in old:
            if _base.find(data, source) is None:
                raise KeyError(f"RenameTransform: expected the key {source!r}, got {_base.described(data)}.")
        if not self.create_copy:
            for source in old:
                _remove(made, source)
        for source, target in zip(old, new, strict=True):
            _base.put(made, target, _base.find(data, source))
        return made


class SelectTransform(_base.Transform):
    """Keeps only some entries of a batch.

    Args:
        *selected_keys: the entries to keep, if they exist. The key of a nested TensorDict or dict selects all of it.
        keep_rewards, keep_dones: keep ``"reward"`` and ``"done"`` as well.

    Raises:
        TypeError: a key is not a string or a tuple of strings; on use: the data is neither a TensorDict nor a dict.

    >>> import torch
    >>> from engram import SelectTransform
    >>> list(SelectTransform("obs", keep_dones=False)({"obs": torch.zeros(2), "done": torch.zeros(2)}))
    ['obs']
    """

    writes = False

    def __init__(self, *selected_keys: Key, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        self.selected_keys = _base.as_keys(list(selected_keys), "SelectTransform: selected_keys")
        self.keep_rewards, self.keep_dones = bool(keep_rewards), bool(keep_dones)
        self._kept = [*self.selected_keys, *["reward"] * self.keep_rewards, *["done"] * self.keep_dones]

    def forward(self, data: object) -> object:
        if nested.is_tensordict(data):
            return data.select(*self._kept, strict=False)
        _base.shallow(data, "SelectTransform")  # rejects data without keys
        selected: dict[str, object] = {}
        for key in self._kept:
            value = _base.find(data, key)
            if value is not None:
                kept = _base.shallow(value, "SelectTransform") if nested.has_entries(value) else value
                _base.put(selected, _base.keys_of(data, key), kept)
        return selected

    def __repr__(self) -> str:
        return f"SelectTransform({', '.join(map(repr, self.selected_keys))})"


class ExcludeTransform(_base.Transform):
    """Removes some entries of a batch, or of rows that are written.

    Args:
        *excluded_keys: the entries to remove, if they exist.
        inverse: remove them on writing instead of on reading.

    Raises:
        TypeError: a key is not a string or a tuple of strings; on use: the data is neither a TensorDict nor a dict.

    >>> import torch
    >>> from engram import ExcludeTransform
    >>> list(ExcludeTransform("debug")({"obs": torch.zeros(2), "debug": torch.zeros(2)}))
    ['obs']
    """

    def __init__(self, *excluded_keys: Key, inverse: bool = False) -> None:
        self.excluded_keys = _base.as_keys(list(excluded_keys), "ExcludeTransform: excluded_keys")
        self.inverse = bool(inverse)
        self.reads, self.writes = not self.inverse, self.inverse

    def forward(self, data: object) -> object:
        return data if self.inverse else self._without(data)

    def inv(self, data: object) -> object:
        return self._without(data) if self.inverse else data

    def _without(self, data: object) -> object:
        if nested.is_tensordict(data):
            return data.exclude(*self.excluded_keys)
        made = _base.shallow(data, "ExcludeTransform")
        for key in self.excluded_keys:
            if _base.find(made, key) is not None:
                _remove(made, key)
        return made

    def __repr__(self) -> str:
        inverse = ", inverse=True" if self.inverse else ""
        return f"ExcludeTransform({', '.join(map(repr, self.excluded_keys))}{inverse})"


def _remove(data: dict[str, object] | tensordicts.TensorDictBase, key: Key) -> None:
    *way, last = _base.keys_of(data, key)
    for part in way:
        data = data.get(part)
    if isinstance(data, dict):
        del data[last]
    else:
        data.del_(last)
