"""Batches of a connection on their way to a device."""

import sys

import pytest
import torch

import engram
from engram import DeviceLoader, LazyTensorStorage, TensorDictReplayBuffer
from engram.device.pinning import Block
from tests import interpreter
from tests.device import test_block

streams = test_block.streams


def test_batches_of_a_connection_are_copied_once(streams, monkeypatch):
    """Out of the message into pinned memory: small columns when a batch is taken, though a message has many; large ones when it is sent.

    ``rb.sample().to(device)`` copies as much out of the message, and then each field through pinned memory of the driver's.
    """
    pytest.importorskip("pyarrow")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40)).share()
    rb.extend(test_block.rows().set("long", torch.arange(40 * 1100).reshape(40, 1100)))
    outside, pack = [], Block.pack

    def packed(block, leaves):
        begin, end = block.memory.data_ptr(), block.memory.data_ptr() + len(block.memory)
        outside.append([leaf.nbytes for leaf in leaves if leaf.nbytes and not begin <= leaf.data_ptr() < end])
        return pack(block, leaves)

    monkeypatch.setattr(Block, "pack", packed)
    monkeypatch.setattr(sys, "executable", interpreter.executable())
    for batch_size in (2, 35):  # of 18 and of 308 kB: several in a message, and one
        with (
            engram.serve(rb) as address,
            TensorDictReplayBuffer.connect(address, batch_size=batch_size, prefetch=1) as remote,
            DeviceLoader(remote, "cuda", depth=1) as device_loader,
        ):
            outside.clear()
            for _ in zip(device_loader, range(9), strict=False):
                pass
        assert len(outside) >= 9
        # Where the message begins decides whether the processor reads the large column in it.
        assert all(sizes in ([], [308_000]) for sizes in outside[-6:])
