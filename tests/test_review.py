"""Defects that a review found, each as it showed."""

import copy
import os
import threading

import pytest
import torch

from engram import (
    Draw,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorStorage,
)
from engram.store import DeviceStore
from engram.types import Plan


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_batch_that_no_memory_holds_is_an_error(storage):
    rb = ReplayBuffer(storage=storage(4))
    rb.extend([torch.zeros(1 << 18) for _ in range(2)])
    for n in (1 << 44, 1 << 61):
        with pytest.raises((MemoryError, ValueError)):
            rb.sample(n)
    assert len(rb.sample(3)) == 3


class Chosen:
    def __init__(self, rows):
        self.rows = rows

    def draw(self, extent, batch_size, key):
        return Draw(self.rows)

    def observe(self, write, data): ...

    def update_priority(self, index, priority, *, generation=None): ...

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict): ...


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_rows_of_any_integers_are_the_rows_meant(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Chosen(torch.tensor([1, 0, 3], dtype=dtype)))
    rb.extend(torch.arange(10))
    assert rb.sample(3).tolist() == [1, 0, 3]


def test_rows_that_are_no_integers_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Chosen(torch.tensor([1.0, 0.0])))
    rb.extend(torch.arange(10))
    with pytest.raises(TypeError, match="int64 rows"):
        rb.sample(2)


def test_a_copy_made_while_threads_write_is_whole_and_writable():
    rb = ReplayBuffer(storage=LazyTensorStorage(256))
    rb.extend(torch.zeros(256, 512, dtype=torch.int64))
    stop = threading.Event()

    def write(number):
        block = torch.full((32, 512), number)
        while not stop.is_set():
            rb.extend(block)

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        copies = [copy.deepcopy(rb) for _ in range(5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for other in copies:
        rows = other[:]
        assert bool((rows == rows[:, :1]).all())
        assert len(rows) == len(other)
        other.extend(torch.ones(300, 512, dtype=torch.int64))
        assert len(other) == 256


def test_a_child_forked_while_a_thread_writes_can_write():
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    block = torch.zeros(64, 4096, dtype=torch.int64)
    rb.extend(block)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            rb.extend(block)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                core = rb.storage.store.core
                os._exit(0 if core.in_flight == 0 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_a_write_in_flight_at_close_is_looked_at_by_the_next_open(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "r"))
    rb.extend(torch.arange(8))
    at = 12288 + 32  # t0 of the first claim of the first participant (docs/store-format.md)
    rb.close()
    with (tmp_path / "r" / ".engram" / "control").open("r+b") as file:
        file.seek(at)
        file.write((99).to_bytes(8, "little"))
    again = ReplayBuffer.open(tmp_path / "r")
    assert again.storage.store.repair.claims == 1
    again.close()
    assert ReplayBuffer.open(tmp_path / "r").storage.store.repair is None


def test_existing_data_fills_every_lane_of_a_device():
    data = torch.arange(8)
    cpu = TensorStorage(data.clone(), lanes=2)
    store = DeviceStore.on(cpu.store.schema, torch.device("cpu"))
    store.tensors[0].copy_(data)
    store.core.fill()
    assert store.extent().filled == (4, 4)
    assert store.write(Plan(lane=1), [torch.tensor([9])], 1).rows.tolist() == [4]


def test_refused_lanes_allocate_nothing():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2))
    with pytest.raises(RuntimeError, match="one dimension"):
        rb.extend(torch.arange(4), lane=torch.zeros(4, 1, dtype=torch.int64))
    assert not rb.storage.initialized


def test_another_storage_has_its_own_lanes():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=4)).on_lane(3)
    rb.set_storage(LazyTensorStorage(8))
    assert rb.add(torch.tensor(1)) == 0


def test_update_refuses_keys_that_are_not_there():
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend({"a": torch.arange(4)})
    with pytest.raises(KeyError, match="typo"):
        rb.update_({"a": torch.zeros(4, dtype=torch.int64)}, keys_to_update=["typo"])
    assert rb["a"].tolist() == [0, 1, 2, 3]
