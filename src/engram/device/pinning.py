"""Page-locked ("pinned") memory: an accelerator copies batches from it while the program continues.

The memory comes from torch's allocator. It keeps pinned blocks, and reuses a block only when no tensor refers to it (views
count) and every copy that was started from it has ended. A batch that is in use is therefore never overwritten, and a
program that drops its batches pays for pinning once per size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram._support import native
from engram._support.nested import is_tensordict, map_with_paths, tensors
from engram._support.tensordicts import children, is_plain_tensordict, tensordict_type
from engram._support.words import warn
from engram.store.device.accelerator import HostMemory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tensordict import TensorDictBase

    from engram.types import Entry


class Pinning:
    """The last step of a sample, which pins the CPU tensors of a batch.

    Args:
        memory: the source of pinned tensors; None: there is no accelerator, and tensors stay where they are.
    """

    def __init__(self, memory: HostMemory | None) -> None:
        self.memory = memory

    def gathering(self) -> AbstractContextManager[None]:
        """A context in which the native core allocates its tensors on this thread in pinned memory."""
        return native.making(None if self.memory is None else self.memory.empty)

    def __call__(self, data: object, device: torch.device | None = None) -> Any:
        """Data of the same structure whose CPU leaves are pinned. Parts that need no change are returned as they are.

        Containers that must change are copied, because a transform may have returned a container that it keeps.

        Args:
            data: any nesting of tensors, TensorDicts, tensorclasses, dicts, tuples and lists. Other objects, tensors on other
                devices and pinned tensors pass through. A tensor that occurs twice stays one tensor.
            device: the device to set on a TensorDict without one, if all its leaves are there.

        Raises:
            RuntimeError: a CPU tensor is not dense (sparse, nested, quantized); the message names its place.
        """
        return _Walk(self.memory, device).walk(data, ())


def pinning_for(pin_memory: object, call: str) -> Pinning | None:
    """The step for the user's ``pin_memory``; None if it is off. Warns if there is no accelerator.

    Raises:
        TypeError: ``pin_memory`` is not a bool.
    """
    if not isinstance(pin_memory, bool | None):
        raise TypeError(f"{call}: pin_memory: expected a bool, got {type(pin_memory).__name__}.")
    if not pin_memory:
        return None
    memory = host_memory()
    if memory is None:
        warn(f"{call}: pin_memory=True, but there is no accelerator: batches are in ordinary memory.")
    return Pinning(memory)


def host_memory() -> HostMemory | None:
    """Pinned memory for this machine's accelerator; None without one, or if it shares the host's memory."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None or accelerator.type == "mps" else HostMemory()


class _Walk:
    """One walk over a batch."""

    def __init__(self, memory: HostMemory | None, device: torch.device | None) -> None:
        self.memory = memory
        self.device = device
        self.done: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself, which keeps its id

    def walk(self, data: object, path: tuple[str, ...]) -> Any:
        return map_with_paths(data, self._pinned, path, keep=True)

    def _pinned(self, leaf: object, path: tuple[str, ...]) -> object:
        if is_tensordict(leaf):
            return self._collection(leaf, path)
        return self._leaf(leaf, path) if isinstance(leaf, Tensor) else leaf

    def _leaf(self, tensor: Tensor, path: tuple[str, ...]) -> Tensor:
        memory = self.memory
        if memory is None or not tensor.is_cpu:
            return tensor
        known = self.done.get(id(tensor))
        if known is not None:
            return known[1]
        if not is_dense(tensor):
            raise RuntimeError(
                f"sample: pin_memory: expected a dense tensor at {list(path) or 'the batch'}, got {_described(tensor)}. "
                "Make it dense in a transform, or leave pin_memory off."
            )
        pinned = tensor
        if not memory.is_pinned(tensor):
            # Not Tensor.pin_memory, which keeps strides and so fails on expanded tensors.
            pinned = memory.empty(tensor.shape, tensor.dtype)
            pinned.copy_(tensor)
        self.done[id(tensor)] = (tensor, pinned)
        return pinned

    def _collection(self, td: TensorDictBase, path: tuple[str, ...]) -> object:
        device = td.device
        if device is None and self.device is not None and {leaf.device for leaf in tensors(td)} == {self.device}:
            device = self.device
        if is_plain_tensordict(td):
            old = children(td)
            new = {key: self.walk(value, (*path, key)) for key, value in old.items()}
            same = all(new[key] is value for key, value in old.items())
            if same and device == td.device:
                return td
            names = td.names if any(td.names) else None
            made = tensordict_type()(new, batch_size=td.batch_size, device=device, names=names)
            return made.lock_() if td.is_locked else made
        changed = device != td.device

        def pin(key: Entry, leaf: object) -> object:
            nonlocal changed
            place = (key,) if isinstance(key, str) else key
            pinned = self._leaf(leaf, (*path, *place)) if isinstance(leaf, Tensor) else leaf
            changed |= pinned is not leaf
            return pinned

        made = td.named_apply(pin, nested_keys=True, filter_empty=False, device=device)
        if not changed:
            return td
        return made.lock_() if td.is_locked else made


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in memory at strides."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _described(tensor: Tensor) -> str:
    if tensor.is_quantized:
        return "a quantized one"
    return "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
