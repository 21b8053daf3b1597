"""One block of pinned memory per batch: drawn into on the host, copied to the device at once, and seen there as tensors."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engram._support import native as _native
from engram._support.nested import map_tensors, tensors
from engram.device.pinning import Pinning, is_dense
from engram.store.blocks import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engram.store.device.accelerator import Accelerator, HostMemory


class Block:
    """Pinned memory of one batch. Nothing else ever has this memory while a tensor of the batch lives.

    Args:
        memory: the source of pinned memory.
        nbytes: the size. What the core draws has memory of its own where there is no room for it.
    """

    def __init__(self, memory: HostMemory, nbytes: int) -> None:
        self.memory = memory.empty((nbytes,), torch.uint8)
        self.native = _native.OutputBlock(self.memory.numpy(), True)

    def pack(self, leaves: list[Tensor]) -> list[int] | None:
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
    seconds: float
    """How long drawing it took."""


class Sent(NamedTuple):
    """A batch on the device, whose copy is queued on the stream in use."""

    batch: object
    memory: list[Tensor]
    """The tensors whose memory it has."""
    nbytes: int
    """The bytes of the block that was copied."""
    spilled: bool
    """Whether its block was too small for it."""


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
            RuntimeError: a CPU tensor is not dense (sparse, nested, quantized); the message names its place.
        """
        streams = self._streams
        of_host = {
            id(leaf): leaf
            for leaf in tensors(batch)
            if leaf.is_cpu and not leaf.requires_grad and not streams.holds(leaf)
        }
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
            self._draws_into = (
                2 * sum(_nbytes(leaf) for leaf, at in zip(leaves, begins, strict=True) if at < drawn) >= drawn
            )
        if wanted > size:
            self._nbytes = max(self._nbytes, 1 << (wanted - 1).bit_length())
        memory, nbytes = [], block.native.used
        views: dict[int, Tensor] = {}
        if leaves:
            memory.append(streams.send(block.memory[:nbytes]))
            views = dict(zip(of_host, _views(memory[0], leaves, begins), strict=True))

        def on_device(leaf: Tensor) -> Tensor:
            view = views.get(id(leaf))
            if view is not None:
                return view
            memory.append(leaf if streams.holds(leaf) else streams.send(self._pinning(leaf)))
            return memory[-1]

        moved = map_tensors(batch, on_device, device=streams.device)
        return Sent(moved, memory, nbytes, 0 < size < wanted)


def _views(block: Tensor, leaves: list[Tensor], begins: list[int]) -> list[Tensor]:
    """Tensors within a block, as contiguous as new ones.

    ``data``: each has a version of its own, which autograd compares. Of views, a change of one would be a change of all.
    """
    typed: dict[torch.dtype, Tensor] = {}
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
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return tuple(reversed(strides))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
