import re
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    FinalObservations,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    NextFromFollowing,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    plan,
)
from engram._support import native
from engram.store.device.chain import Layout, ResidentRows, columns_of
from tests.device.imitation import Imitation
from tests.store.device.there import There

ROW = {"obs": torch.zeros(4, 84, 84, dtype=torch.uint8), "next": {"reward": torch.zeros(1), "done": torch.tensor(True)}}


def test_counts():
    found = plan(ROW, 1_000_000)
    assert found.capacity == 1_000_000
    assert [(field.name, field.dtype, field.shape) for field in found.fields] == [
        ("obs", "uint8", (4, 84, 84)),
        ("('next', 'reward')", "float32", (1,)),
        ("('next', 'done')", "bool", ()),
    ]
    assert found.row_bytes == 28_224 + 4 + 1
    assert found.nbytes == found.row_bytes * 1_000_000
    assert found.overhead == 20 * 1_000_000 + native.control_bytes(1)


def test_text():
    assert str(plan(ROW, 1000)).split("\n") == [
        "obs: obs.memmap or RAM, 28.2 MB, shape [1000, 4, 84, 84] uint8",
        "('next', 'reward'): next/reward.memmap or RAM, 4 kB, shape [1000, 1] float32",
        "('next', 'done'): next/done.memmap or RAM, 1 kB, shape [1000] bool",
        "1,000 rows of 28.2 kB: 28.2 MB, and 65.1 kB beside them",
    ]


def test_small_stores_are_told_in_bytes():
    assert str(plan(torch.tensor(True), 1)).startswith(
        "_-single-tensor-_: _-single-tensor-_.memmap or RAM, 1 B, shape [1] bool\n1 row of 1 B: 1 B, and "
    )
    assert "RAM, 999 B, " in str(plan(torch.tensor(True), 999))
    assert "RAM, 1 kB, " in str(plan(torch.tensor(True), 1000))


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        torch.zeros(3, dtype=torch.bfloat16),
        (torch.zeros(3), torch.zeros(())),
        namedtuple("Pair", "a b")(torch.zeros(3), torch.zeros(())),
        TensorDict({"a": torch.zeros(3), "next": {"b": torch.zeros(2)}}, []),
    ],
)
def test_the_creation_log_says_the_same_in_one_line(tmp_path, caplog, row):
    caplog.set_level("INFO", "engram")
    *lines, total = str(plan(row, 500)).split("\n")
    assert caplog.messages == []
    fields = [re.fullmatch(r"(.+): \S+ or RAM, (.+), shape \[500(?:, )?(.*)\] (\w+)", line).groups() for line in lines]
    said = ", ".join(f"{name} [{shape}] {dtype} ({size})" for name, size, shape, dtype in fields)
    size = re.search("B: (.+), and", total)[1]
    for storage in (LazyTensorStorage(500), LazyMemmapStorage(500, scratch_dir=tmp_path / "store")):
        caplog.clear()
        ReplayBuffer(storage=storage).add(row)
        place = tmp_path / "store" if isinstance(storage, LazyMemmapStorage) else "RAM"
        assert caplog.messages == [f"500 rows in {place}, {size}: {said}"]
        assert storage.nbytes == plan(row, 500).nbytes
        storage.close()


def test_overhead_is_what_a_store_takes(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=tmp_path))
    rb.add({"a": torch.zeros(4)})
    found = plan({"a": torch.zeros(4)}, 100_000)
    words = sum((tmp_path / ".engram" / name).stat().st_size for name in ("tickets", "control"))
    assert found.overhead == words
    assert found.overhead <= 21 * 100_000
    assert found.nbytes == (tmp_path / "a.memmap").stat().st_size
    rb.close()


def test_what_storing_frames_once_spares():
    frame = torch.zeros(1, 84, 84, dtype=torch.uint8)
    row = {
        "frame": frame,
        "speed": torch.zeros(2),
        "next": {"frame": frame, "reward": torch.zeros(1), "done": torch.tensor(False)},
    }
    finals = FinalObservations(["frame"], LazyTensorStorage(50))
    once = FrameStack(NStep(NextFromFollowing(RandomSampler(), finals), 3, 0.9), 4, -3, ["frame"])
    found, frames, rest = plan(row, 1000, sampler=once), 84 * 84, 8 + 4 + 1
    assert (found.row_bytes, found.ready_bytes) == (frames + rest + 16, 8 * frames + rest)
    assert found.finals_bytes == 50 * (frames + 8)
    assert found.spared == 1000 * (7 * frames - 16) - 50 * (frames + 8)
    assert str(found).split("\n")[-1] == (
        "With stacks and next observations in each row: 56.5 MB. Stored once, they spare 49 MB (86.8 %), with 353 kB of final "
        "observations"
    )
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=once, transform=finals)
    rb.add(row)
    assert rb.storage.nbytes == found.nbytes
    both = FrameStack(RandomSampler(), 4, -3, ["frame", ("next", "frame")])  # each is stored once
    found = plan(row, 1000, sampler=both)
    assert (found.row_bytes, found.ready_bytes, found.finals_bytes) == (2 * frames + rest, 8 * frames + rest, 0)
    assert plan(row, 1000).spared == 0
    with pytest.raises(TypeError, match="plan: sampler: expected an expander, such as a FrameStack, got RandomSampler"):
        plan(row, 1000, sampler=RandomSampler())
    with pytest.raises(KeyError, match="FrameStack: in_keys: expected a stored field"):
        plan(row, 1000, sampler=FrameStack(RandomSampler(), 4, -1, ["pixels"]))


@given(st.integers(1, 10**12), st.lists(st.integers(0, 50), max_size=3))
def test_nothing_is_allocated(capacity, shape):
    found = plan({"a": torch.zeros(shape, dtype=torch.float64)}, capacity)
    assert found.nbytes == capacity * found.row_bytes == capacity * torch.zeros(shape).numel() * 8


@pytest.mark.parametrize(
    ("capacity", "error", "says"),
    [
        (0, ValueError, "capacity: expected at least 1, got 0"),
        (-5, ValueError, "capacity: expected at least 1, got -5"),
        (True, TypeError, "capacity: expected an int, got bool"),
        (1.5, TypeError, "capacity: expected an int, got float"),
        ("10", TypeError, "capacity: expected an int, got str"),
    ],
)
def test_impossible_capacities(capacity, error, says):
    with pytest.raises(error, match=f"plan: {says}"):
        plan(ROW, capacity)


@pytest.mark.parametrize(
    ("row", "error", "says"),
    [
        ({"a": "text"}, TypeError, "plan: field 'a': expected a tensor or an array"),
        ({"a": torch.zeros(2).to(torch.float8_e8m0fnu)}, TypeError, "plan: field 'a': dtype torch.float8_e8m0fnu"),
        ({".engram": torch.zeros(2)}, ValueError, "is reserved"),
        ({}, TypeError, "plan: expected at least one tensor"),
    ],
)
def test_rows_that_could_not_be_stored(row, error, says):
    with pytest.raises(error, match=says):
        plan(row, 10)


@given(
    sizes=st.lists(st.sampled_from([1, 3, 8, 40, 64, 1000, 4096, 4104, 6144, 28_224]), min_size=1, max_size=3),
    share=st.floats(0.01, 2),
    batch=st.integers(1, 300),
)
def test_what_a_batch_reads_is_the_pages_that_its_rows_lie_in(sizes, share, batch):
    """The oracle counts the pages of every row of a store whose rows end with a page."""
    row, rows = {str(i): torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}, 4096
    without = plan(row, rows)
    with pytest.raises(
        ValueError, match=r"from_disk: expected a plan .*, got one without\. Use engram.plan\(.*memory=bytes"
    ):
        without.from_disk(batch)
    memory = without.resident + int(share * without.nbytes)
    pages = sum((k * size + size - 1) // 4096 - k * size // 4096 + 1 for size in sizes for k in range(rows)) / rows
    missing = 1 - min(1, int(share * without.nbytes) / without.nbytes)
    assert plan(row, rows, memory=memory).from_disk(batch) == pytest.approx(batch * pages * 4096 * missing)
    small = [size for size in sizes if size <= 100]
    if len(small) > 1:  # as if they were one field
        alone = {"small": torch.zeros(sum(small), dtype=torch.uint8)}
        alone |= {name: column for name, column in row.items() if column.numel() > 100}
        assert plan(row, rows, memory=memory, group_small_fields=100).from_disk(batch) == pytest.approx(
            plan(alone, rows, memory=memory).from_disk(batch)
        )


def test_what_must_stay_in_memory():
    rows = 1_000_000
    found = plan(ROW, rows, memory=40_000_000)
    assert found.resident == found.overhead + native.priority_bytes(rows, True)
    assert str(found).splitlines()[-1] == (
        "In 40 MB of memory: 31.5 MB for tickets and priorities; a batch of 256 rows reads 10.4 MB from disk"
    )
    assert str(plan(ROW, rows, memory=30_000_000)).splitlines()[-1].startswith("In 30 MB of memory: too little. ")
    assert str(plan(ROW, 10, memory=20_000_000)).endswith("all rows fit")
    with pytest.raises(ValueError, match="plan: memory: expected at least 1, got 0"):
        plan(ROW, rows, memory=0)
    with pytest.raises(TypeError, match="plan: memory: expected an int, got str"):
        plan(ROW, rows, memory="2 GB")


# ---- on a device -----------------------------------------------------------------------------------------------------


def bytes_of(*tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("capacity", [1, 127, 128, 1_000, 20_000])
def test_a_device_takes_what_was_foreseen(capacity):
    found = plan(ROW, capacity, device="cuda", batch_size=32).on_device
    rb = ReplayBuffer(storage=There(capacity), sampler=PrioritizedSampler(capacity, alpha=0.7, beta=0.5))
    rb.extend(
        {"obs": torch.zeros(1, 4, 84, 84, dtype=torch.uint8), "next": {"reward": torch.zeros(1, 1), "done": [True]}}
    )
    rows = rb.storage.store.rows
    assert bytes_of(*rows.whole, rows.numbers, rows.edited, rows.told, rows.last) == found.storage
    rb.sample(1)
    tree = rows.trees[0].tree
    assert bytes_of(*tree.sums, *tree.lows) == found.priorities


def test_the_host_takes_what_was_foreseen():
    found = plan(ROW, 500, device="cuda", batch_size=32).on_device
    rb = ReplayBuffer(
        storage=LazyTensorStorage(500), sampler=PrioritizedSampler(500, alpha=0.7, beta=0.5), batch_size=32
    )
    rb.extend(
        {"obs": torch.zeros(1, 4, 84, 84, dtype=torch.uint8), "next": {"reward": torch.zeros(1, 1), "done": [True]}}
    )
    store = rb.storage.store
    index = rb.device_readable().priorities
    pinned = bytes_of(*store.control_memory, *store.tensors, index.block.tensor)
    assert abs(pinned - found.pinned) < 1 << 17  # a ring of commands and one of priorities come to it
    device = Imitation()
    resident = ResidentRows(store, device)
    assert found.resident - 64 == resident.nbytes
    columns = columns_of(store, lambda address: address, index)
    assert found.batch == Layout(columns.fields, 32, weighted=True).nbytes


def test_a_device_that_is_not_there_is_foreseen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    found = plan(ROW, 1000, device="cuda:3")
    assert (found.on_device.device, found.on_device.free) == ("cuda:3", None)
    assert "free memory unknown on this machine" in str(found)
    assert "Too little" not in str(found)
    assert plan(ROW, 1000).on_device is None
    assert "cuda" not in str(plan(ROW, 1000))


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr("engram._support.devices.free_bytes", lambda device: 20_000_000)
    monkeypatch.setattr("engram.format.sizes.available_memory", lambda: 10_000_000)
    said = str(plan(ROW, 1000, device="cuda")).splitlines()
    assert [line.partition(":")[0] for line in said if line.startswith("Too little")] == [
        "Too little memory for LazyTensorStorage(device='cuda')",
        'Too little memory for transport="resident"',
        'Too little memory for transport="direct"',
    ]
    assert "expected 28.3 MB, got 20 MB that are free. Use fewer or smaller rows." in "\n".join(said)
    monkeypatch.setattr("engram._support.devices.free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr("engram.format.sizes.available_memory", lambda: 0)  # unknown
    assert plan(ROW, 1000, device="cuda").on_device.problems == ()


def test_final_observations_are_on_the_device_too():
    frame = torch.zeros(1, 84, 84, dtype=torch.uint8)
    row = {"frame": frame, "next": {"frame": frame, "done": torch.tensor(False)}}
    sampler = NextFromFollowing(RandomSampler(), FinalObservations(["frame"], LazyTensorStorage(2_000)))
    found = plan(row, 10_000, sampler=sampler, device="cuda")
    assert found.on_device.storage == 10_001 * (found.row_bytes + 24) + found.finals_bytes


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"device": "cpu"}, ValueError, "plan: device: expected an accelerator such as 'cuda', got 'cpu'"),
        ({"device": "meta"}, ValueError, "got 'meta'"),
        ({"device": "gpu"}, RuntimeError, "plan: device: expected a device or its name, got 'gpu'"),
        ({"device": object()}, RuntimeError, "plan: device: expected a device or its name, got "),
        ({"device": "cuda", "batch_size": 0}, ValueError, "plan: batch_size"),
        ({"device": "cuda", "batch_size": 2.5}, TypeError, "plan: batch_size"),
    ],
)
def test_devices_that_are_none(kwargs, error, said):
    with pytest.raises(error, match=re.escape(said)):
        plan(ROW, 1000, **kwargs)


def test_another_device_than_those_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match=r"plan: device: no such device, .*This machine has cpu, cuda:0"):
        plan(ROW, 1000, device="cuda:7")
