"""Page-locked ("pinned") memory: an accelerator copies batches from it while the program continues, each in one block or in parts.

The memory comes from torch's allocator. It keeps pinned blocks, and reuses a block only when no tensor refers to it (views
count) and every copy that was started from it has ended. A batch that is in use is therefore never overwritten, and a
program that drops its batches pays for pinning once per size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch

from engram._support import native, tensordicts, words
from engram._support.nested import is_tensordict, map_parts, map_tensors, map_with_paths, parts_of, tensors
from engram.store.blocks import ALIGNMENT
from engram.store.device.accelerator import Accelerator, HostMemory
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
            RuntimeError: a CPU tensor is neither dense nor jagged (sparse, quantized); the message names its place.
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
        words.warn(f"{call}: pin_memory=True, but there is no accelerator: batches are in ordinary memory.")
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
        self.done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the tensor itself, which keeps its id

    def walk(self, data: object, path: tuple[str, ...]) -> Any:
        return map_with_paths(data, self._pinned, path, keep=True)

    def _pinned(self, leaf: object, path: tuple[str, ...]) -> object:
        if is_tensordict(leaf):
            return self._collection(leaf, path)
        return self._leaf(leaf, path) if isinstance(leaf, torch.Tensor) else leaf

    def _leaf(self, tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        memory = self.memory
        if memory is None or not tensor.is_cpu:
            return tensor
        if tensor.layout is torch.jagged:
            return map_parts(tensor, lambda part: self._leaf(part, path))
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

    def _collection(self, td: tensordicts.TensorDictBase, path: tuple[str, ...]) -> object:
        device = td.device
        if device is None and self.device is not None and {leaf.device for leaf in tensors(td)} == {self.device}:
            device = self.device
        if tensordicts.is_plain_tensordict(td):
            old = tensordicts.children(td)
            new = {key: self.walk(value, (*path, key)) for key, value in old.items()}
            same = all(new[key] is value for key, value in old.items())
            if same and device == td.device:
                return td
            names = td.names if any(td.names) else None
            made = tensordicts.tensordict_type()(new, batch_size=td.batch_size, device=device, names=names)
            return made.lock_() if td.is_locked else made
        changed = device != td.device

        def pin(key: Entry, leaf: object) -> object:
            nonlocal changed
            place = (key,) if isinstance(key, str) else key
            pinned = self._leaf(leaf, (*path, *place)) if isinstance(leaf, torch.Tensor) else leaf
            changed |= pinned is not leaf
            return pinned

        made = td.named_apply(pin, nested_keys=True, filter_empty=False, device=device)
        if not changed:
            return td
        return made.lock_() if td.is_locked else made


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values lie in memory at strides."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _described(tensor: torch.Tensor) -> str:
    if tensor.is_quantized:
        return "a quantized one"
    return "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"


class Block:
    """Pinned memory of one batch. Nothing else ever has this memory while a tensor of the batch lives.

    Args:
        memory: the source of pinned memory.
        nbytes: the size. What the core draws has memory of its own where there is no room for it.
    """

    def __init__(self, memory: HostMemory, nbytes: int) -> None:
        self.memory = memory.empty((nbytes,), torch.uint8)
        self.native = native.OutputBlock(self.memory.numpy(), True)

    def pack(self, leaves: list[torch.Tensor]) -> list[int] | None:
        """Where the values of dense CPU tensors begin. Those that lie elsewhere, or are not contiguous, are copied into the block.

        None: there is no room for all of them.
        """
        begins = self.native.pack(leaves)
        if begins is None or -1 not in begins:
            return begins
        for i, leaf in enumerate(leaves):
            if begins[i] == -1:
                nbytes = _nbytes(leaf)
                begin = self.native.reserve(nbytes)
                if begin is None:
                    return None
                self.memory[begin : begin + nbytes].view(leaf.dtype).view(leaf.shape).copy_(leaf)
                begins[i] = begin
        return begins


class Drawn(NamedTuple):
    """A batch on the host."""

    batch: object
    block: Block
    #: How long drawing it took.
    seconds: float


class Sent(NamedTuple):
    """A batch on the device, whose copy is queued on the stream in use."""

    batch: object
    #: The tensors whose memory it has.
    memory: list[torch.Tensor]
    #: The bytes of the block that was copied.
    nbytes: int
    #: Whether its block was too small for it.
    spilled: bool
    #: The batch is complete when these have occurred; none: when the work on the consumer's stream has.
    events: tuple[torch.Event, ...] = ()


class Blocks:
    """Draws the batches of a loader into blocks, and sends them.

    A block is as large as the largest batch before it; powers of two, as torch's allocator of pinned memory makes them. What the
    core draws lies in it from the beginning. Other tensors, which transforms or ``collate_fn`` made, or which came over a connection,
    are copied behind it. The core draws into memory of its own where less than half of what it draws is in the batch.
    """

    def __init__(self, streams: Accelerator) -> None:
        self._streams = streams
        self._pinning = Pinning(streams.memory)
        self._nbytes = 0
        self._draws_into: bool | None = None  # None: not known yet

    def draw(self, batches: Iterator[object]) -> Drawn | None:
        """The next batch; None: there is none. Raises what drawing it raises."""
        block = Block(self._streams.memory, self._nbytes)
        begin = perf_counter()
        with nullcontext() if self._draws_into is False else block.native:
            batch = next(batches, None)
        return None if batch is None else Drawn(batch, block, perf_counter() - begin)

    def send(self, batch: object, block: Block) -> Sent:
        """Copy a batch to the device, with one copy, on the stream in use.

        Tensors that are on the device stay. Those on other devices, and those of a graph, are copied one by one.

        Raises:
            RuntimeError: a CPU tensor is neither dense nor jagged (sparse, quantized); the message names its place.
        """
        streams = self._streams
        parts = [it for leaf in tensors(batch) for it in (parts_of(leaf) if leaf.layout is torch.jagged else (leaf,))]
        of_host = {id(it): it for it in parts if it.is_cpu and not (it.requires_grad or streams.holds(it))}
        leaves = list(of_host.values())
        if not all(map(is_dense, leaves)):
            self._pinning(batch)  # raises
        drawn = block.native.used
        begins = block.pack(leaves)
        size, wanted = len(block.memory), block.native.wanted
        if begins is None:
            block = Block(streams.memory, sum(_nbytes(leaf) + ALIGNMENT for leaf in leaves))
            begins = block.pack(leaves)
            assert begins is not None
        elif self._draws_into is None and drawn:
            inside = sum(_nbytes(leaf) for leaf, at in zip(leaves, begins, strict=True) if at < drawn)
            self._draws_into = 2 * inside >= drawn
        if wanted > size:
            self._nbytes = max(self._nbytes, 1 << (wanted - 1).bit_length())
        memory, nbytes = [], block.native.used
        views: dict[int, torch.Tensor] = {}
        if leaves:
            memory.append(streams.send(block.memory[:nbytes]))
            views = dict(zip(of_host, _views(memory[0], leaves, begins), strict=True))

        def on_device(leaf: torch.Tensor) -> torch.Tensor:
            view = views.get(id(leaf))
            if view is not None:
                return view
            if leaf.layout is torch.jagged:
                return map_parts(leaf, on_device)
            memory.append(leaf if streams.holds(leaf) else streams.send(self._pinning(leaf)))
            return memory[-1]

        moved = map_tensors(batch, on_device, device=streams.device)
        return Sent(moved, memory, nbytes, 0 < size < wanted)


def _views(block: torch.Tensor, leaves: list[torch.Tensor], begins: list[int]) -> list[torch.Tensor]:
    """Tensors within a block, as contiguous as new ones.

    ``data``: each has a version of its own, which autograd compares. Of views, a change of one would be a change of all.
    """
    typed: dict[torch.dtype, torch.Tensor] = {}
    views = []
    for leaf, begin in zip(leaves, begins, strict=True):
        dtype, shape = leaf.dtype, leaf.shape
        values = typed.get(dtype)
        if values is None:
            values = typed[dtype] = block.view(dtype)
        views.append(values.as_strided(shape, _strides(shape), begin // dtype.itemsize).data)
    return views


@functools.lru_cache(1024)
def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
