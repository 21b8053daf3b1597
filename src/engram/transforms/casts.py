"""Other dtypes and devices outside of the buffer than inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import is_tensor_collection

from engram._devices import existing_device
from engram.transforms._base import KeyedTransform, arguments, is_tensor, map_tensors, shallow

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DTypeCastTransform", "DeviceCastTransform", "DoubleToFloat"]


class DTypeCastTransform(KeyedTransform):
    """``dtype_in`` in the buffer, ``dtype_out`` outside: entries are cast on reading, and back on writing.

    Args:
        dtype_in: the dtype inside.
        dtype_out: the dtype outside.
        in_keys: what to cast on reading; None: every tensor of ``dtype_in``.
        out_keys: where to; default ``in_keys``.
        in_keys_inv: what to cast to ``dtype_in`` on writing. Default: every tensor of ``dtype_out``; nothing if ``in_keys`` are given.
        out_keys_inv: the names of these entries in what is written; default ``in_keys_inv``.

    Raises:
        TypeError: no dtypes, no keys. ValueError: ``out_keys`` without ``in_keys``.
        KeyError: on use: no such entry.

    >>> import torch
    >>> from engram import DTypeCastTransform, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=DTypeCastTransform(torch.float16, torch.float32))
    >>> _ = rb.extend({"a": torch.zeros(3)})
    >>> rb.storage[:]["a"].dtype, rb.sample(2)["a"].dtype
    (torch.float16, torch.float32)
    """

    def __init__(
        self,
        dtype_in: torch.dtype,
        dtype_out: torch.dtype,
        in_keys: Any = None,
        out_keys: Any = None,
        in_keys_inv: Any = None,
        out_keys_inv: Any = None,
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

    def apply(self, value: Tensor) -> Tensor:
        return value.to(self.dtype_out)

    def apply_inv(self, value: Tensor) -> Tensor:
        return value.to(self.dtype_in)

    def forward(self, data: Any) -> Any:
        if not self._all:
            return super().forward(data)
        return map_tensors(data, lambda x: x.to(self.dtype_out) if x.dtype is self.dtype_in else x)

    def inv(self, data: Any) -> Any:
        if not self._all_inv:
            return super().inv(data)
        return map_tensors(data, lambda x: x.to(self.dtype_in) if x.dtype is self.dtype_out else x)

    def __repr__(self) -> str:
        return arguments(self, ("dtype_in", "dtype_out", "in_keys", "in_keys_inv"))


class DoubleToFloat(DTypeCastTransform):
    """:class:`DTypeCastTransform` from float64 inside to float32 outside.

    >>> import torch
    >>> from engram import DoubleToFloat
    >>> DoubleToFloat(in_keys=["a"])({"a": torch.zeros(2, dtype=torch.float64)})["a"].dtype
    torch.float32
    """

    def __init__(
        self, in_keys: Any = None, out_keys: Any = None, in_keys_inv: Any = None, out_keys_inv: Any = None
    ) -> None:
        super().__init__(torch.float64, torch.float32, in_keys, out_keys, in_keys_inv, out_keys_inv)

    def __repr__(self) -> str:
        return arguments(self, ("in_keys", "in_keys_inv"))


class DeviceCastTransform(KeyedTransform):
    """Moves what is read to ``device``, and what is written to ``orig_device``.

    Args:
        device: where batches go.
        orig_device: where written data goes; None: it stays (the storage takes data from any device).
        in_keys: what to move on reading; default everything. A TensorDict of which only parts move has no device any more.
        out_keys: where to; default ``in_keys``, otherwise the entry moved is a second one.
        in_keys_inv, out_keys_inv: the same for writing.

    Raises:
        RuntimeError: no such device on this machine.
        KeyError: on use: no such entry.

    Copies are asynchronous for the host where the source is pinned and the target an accelerator, and complete for the stream
    of the caller. See :class:`engram.DeviceLoader` for copies beside the learner's work.

    >>> import torch
    >>> from engram import DeviceCastTransform
    >>> DeviceCastTransform("cpu")({"a": torch.zeros(2)})["a"].device
    device(type='cpu')
    """

    def __init__(
        self,
        device: torch.device | str | int,
        orig_device: torch.device | str | int | None = None,
        *,
        in_keys: Any = None,
        out_keys: Any = None,
        in_keys_inv: Any = None,
        out_keys_inv: Any = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.device = existing_device(device, "DeviceCastTransform: device")
        self.orig_device = (
            None if orig_device is None else existing_device(orig_device, "DeviceCastTransform: orig_device")
        )
        self._all = not self.in_keys and not self.in_keys_inv
        self.reads = self._all or bool(self.in_keys)
        self.writes = self.orig_device is not None and (self._all or bool(self.in_keys_inv))

    def apply(self, value: Tensor) -> Tensor:
        return _moved(value, self.device)

    def apply_inv(self, value: Tensor) -> Tensor:
        assert self.orig_device is not None  # or it is not asked
        return _moved(value, self.orig_device)

    def forward(self, data: Any) -> Any:
        return _everything(data, self.device) if self._all else super().forward(_without_device(data))

    def inv(self, data: Any) -> Any:
        if self.orig_device is None:
            return data
        return _everything(data, self.orig_device) if self._all else super().inv(_without_device(data))

    def __repr__(self) -> str:
        return arguments(self, ("device", "orig_device", "in_keys", "in_keys_inv"))


def _moved(value: Tensor, device: torch.device) -> Tensor:
    # To the host a copy must have ended before anybody looks.
    return value.to(device, non_blocking=device.type != "cpu")


def _everything(data: Any, device: torch.device) -> Any:
    if is_tensor_collection(data):
        return data.to(device, non_blocking=device.type != "cpu")  # by itself it would wait at the end
    return map_tensors(data, lambda x: _moved(x, device))


def _without_device(data: Any) -> Any:
    """A TensorDict that may hold entries of several devices."""
    if is_tensor(data) or not is_tensor_collection(data) or data.device is None:
        return data
    return shallow(data, "DeviceCastTransform").clear_device_()
