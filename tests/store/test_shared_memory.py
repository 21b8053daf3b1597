"""Rows in memory that processes share, which a program made or share() makes."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from tensordict import MemoryMappedTensor, TensorDict, tensorclass

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.format import layout
from engram.store import memory
from tests.store.processes import Child, context
from tests.store.test_handing_over import add_ones

# ---- around memory that is shared already --------------------------------------------------------------------------------


@tensorclass
class Sent:
    a: torch.Tensor
    b: torch.Tensor


def two_fields(n):
    return {"a": torch.zeros(n, dtype=torch.int64), "b": torch.zeros(n, 3, dtype=torch.float32)}


def nested(n):
    return TensorDict({"a": torch.zeros(n, dtype=torch.int64), "next": {"b": torch.zeros(n, 3)}}, [n])


def of_a_process(k, i):
    """The i-th ten rows of process k."""
    return 1000 * k + torch.arange(10 * i, 10 * i + 10)


def make_like(kind, number):
    number = number.to(torch.int64)
    b = number.float().unsqueeze(-1).expand(*number.shape, 3).contiguous()
    match kind:
        case "td":
            return TensorDict({"a": number, "next": {"b": b}}, number.shape)
        case "tensorclass":
            return Sent(number, b, batch_size=number.shape)
        case "dict":
            return {"a": number, "b": b}
        case "tuple":
            return (number, b)
    return number


def write_many(rb, kind, k):
    for i in range(20):
        assert len(rb.extend(make_like(kind, of_a_process(k, i)))) == 10


def numbers_in(kind, data):
    match kind:
        case "td" | "dict":
            return data["a"]
        case "tensorclass":
            return data.a
        case "tuple":
            return data[0]
    return data


def others_in(kind, data):
    return {
        "td": lambda: data["next", "b"],
        "dict": lambda: data["b"],
        "tensorclass": lambda: data.b,
        "tuple": lambda: data[1],
    }[kind]()


def shared_data(kind, where, folder, n=1000):
    """Data that processes share, as programs make it."""
    tensors = two_fields(n)
    if where == "files":
        match kind:
            case "td":
                return nested(n).memmap_(folder)
            case "tensorclass":
                return Sent(**tensors, batch_size=[n]).memmap_(folder)
            case "dict":
                return dict(TensorDict(tensors, [n]).memmap_(folder).items())
            case "tuple":
                made = TensorDict({"0": tensors["a"], "1": tensors["b"]}, [n]).memmap_(folder)
                return (made["0"], made["1"])
        return MemoryMappedTensor.from_tensor(tensors["a"], filename=folder / "_-single-tensor-_.memmap")
    if kind == "td":
        return nested(n).share_memory_()
    if kind == "tensorclass":
        return Sent(**tensors, batch_size=[n]).share_memory_()
    for tensor in tensors.values():
        tensor.share_memory_()
    return {"dict": tensors, "tuple": tuple(tensors.values()), "tensor": tensors["a"]}[kind]


@pytest.mark.parametrize("where", ["files", "segment"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("td", "fork"),
        ("td", "forkserver"),
        pytest.param("td", "spawn", marks=pytest.mark.stress(sample=1)),
        ("tensorclass", "fork"),
        ("dict", "fork"),
        ("tuple", "fork"),
        ("tensor", "fork"),
    ],
)
def test_around_shared_memory_all_processes_write_one_store(tmp_path, where, kind, method):
    data = shared_data(kind, where, tmp_path)
    rb = ReplayBuffer(storage=TensorStorage(data))
    assert rb.shared
    assert (len(rb), rb.write_count) == (1000, 0)  # full from the start
    methods = [method, "fork"] if method == "spawn" else [method] * 4  # it takes seconds
    children = [Child(write_many, rb, kind, k, method=method) for k, method in enumerate(methods)]
    for child in children:
        child.join()
    writers = len(methods)
    written = 200 * writers
    assert (len(rb), rb.write_count) == (1000, written)
    expected = torch.cat([of_a_process(k, i) for k in range(writers) for i in range(20)])
    for seen in (numbers_in(kind, data), numbers_in(kind, rb[:])):  # the caller's own tensors, and the rows
        assert torch.equal(seen[:written].sort().values, expected)
        assert not seen[written:].any()
    if kind != "tensor":
        assert torch.equal(others_in(kind, data)[:, 2].long(), numbers_in(kind, data))
    numbers_in(kind, data)[5] = 77  # it is the very same memory
    assert numbers_in(kind, rb[5:6]).item() == 77
    folder = rb.storage.store.directory
    rb.close()
    if where == "segment":
        assert not folder.exists()
    else:
        with contextlib.closing(ReplayBuffer.open(folder)) as again:
            assert (len(again), again.write_count) == (1000, written)
            assert numbers_in(kind, again[:])[5] == 77
            again.extend(make_like(kind, of_a_process(9, 0)))
        assert numbers_in(kind, data)[written] == 9000


@pytest.mark.parametrize("first", [True, False])
def test_a_process_that_ends_while_memory_is_looked_for(first, monkeypatch):
    """Its memory is opened where another one has it."""
    with contextlib.closing(ReplayBuffer(storage=TensorStorage(nested(10).share_memory_()))) as rb:
        rb.extend(nested(10) + 3)
        store, children = rb.storage.store, []
        for _ in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                time.sleep(300)
                os._exit(0)

        def end(child):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

        def found(_, find=memory.open_files):
            paths = find(children if first else children[::-1])
            end(children[0])
            return paths

        monkeypatch.setattr(memory, "open_files", found)
        folder = store.directory / layout.FOLDER
        control = memory.file_block(folder / layout.CONTROL, (folder / layout.CONTROL).stat().st_size)
        try:
            fields = memory.segment_fields(folder, store.schema, memory.segments_in(folder), control)
        finally:
            end(children[1])
        assert [bool((field == 3).all()) for field in fields] == [True, True]


def test_a_folder_that_becomes_a_store_keeps_what_lies_in_it(tmp_path):
    td = nested(10).memmap_(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "a.memmap").chmod(0o640)
    before = {path: path.stat() for path in tmp_path.rglob("*") if path.is_file()}
    rb = TensorDictReplayBuffer(storage=TensorStorage(td)).share()
    rb.extend(nested(3) + 1)
    rb.close()
    for path, status in before.items():
        assert (path.stat().st_ino, path.stat().st_mode, path.stat().st_size) == (
            status.st_ino,
            status.st_mode,
            status.st_size,
        )
    assert TensorDict.load_memmap(tmp_path)["a"].tolist() == [1] * 3 + [0] * 7
    with contextlib.closing(ReplayBuffer.open(tmp_path)) as again:
        assert type(again) is TensorDictReplayBuffer
        assert again["a"].tolist() == [1] * 3 + [0] * 7


def test_who_dies_while_a_folder_becomes_a_store_leaves_the_rows(tmp_path, monkeypatch):
    td = nested(10).memmap_(tmp_path)
    td["a"][:] = 5

    def die():
        monkeypatch.setattr(os, "fsync", lambda _: None)
        monkeypatch.setattr(Path, "rename", lambda *_: os._exit(9))
        TensorStorage(td)

    child = mp.get_context("fork").Process(target=die)
    child.start()
    child.join(60)
    assert child.exitcode == 9
    assert list(tmp_path.glob(".engram-*"))
    rb = TensorDictReplayBuffer(storage=TensorStorage(td))
    assert rb.shared
    assert rb["a"].tolist() == [5] * 10
    rb.storage.store.remove()
    assert td["a"].tolist() == TensorDict.load_memmap(tmp_path)["a"].tolist() == [5] * 10


def test_segments_live_as_long_as_a_process_that_shares_them():
    data = nested(100).share_memory_()
    rb = TensorDictReplayBuffer(storage=TensorStorage(data), batch_size=4)
    folder = rb.storage.store.directory
    other = pickle.loads(pickle.dumps(rb))
    assert other.storage.store is rb.storage.store
    assert len(pickle.dumps(rb)) < 4096
    go, gone = context("forkserver").Event(), context("forkserver").Queue()
    late = Child(write_late, rb, go, gone, method="forkserver")
    gone.get(timeout=60)
    rb.close()
    other.close()
    assert folder.exists()
    go.set()
    late.join()
    assert data["a"][:10].tolist() == of_a_process(3, 0).tolist()
    assert not folder.exists()


@pytest.mark.parametrize("where", ["files", "segment"])
def test_dumps_of_shared_memory(tmp_path, where):
    data = shared_data("td", where, tmp_path / "rows", n=10)
    rb = TensorDictReplayBuffer(storage=TensorStorage(data))
    rb.extend(make_like("td", torch.arange(3)))
    rb.dumps(tmp_path / "dump")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    other.loads(tmp_path / "dump")
    assert other["a"].tolist() == [0, 1, 2] + [0] * 7
    rb.empty()
    rb.loads(tmp_path / "dump")
    assert data["a"].tolist() == [0, 1, 2] + [0] * 7
    rb.close()


def write_late(rb, go, gone):
    gone.put(len(rb))
    assert go.wait(60)
    rb.extend(make_like("td", of_a_process(3, 0)))
    rb.close()


def half_shared(tmp_path):
    return TensorDict({"a": torch.zeros(10).share_memory_(), "b": torch.zeros(10)}, [10])


def part_of_a_segment(tmp_path):
    return torch.zeros(20).share_memory_()[5:15]


def end_of_a_segment(tmp_path):
    return torch.zeros(20).share_memory_()[10:]


def part_of_files(tmp_path):
    return nested(20).memmap_(tmp_path)[:10]


def two_folders(tmp_path):
    first, second = (nested(10).memmap_(tmp_path / name) for name in "xy")
    return TensorDict({"a": first["a"], "b": second["next", "b"]}, [10])


def other_names(tmp_path):
    return {"c": nested(10).memmap_(tmp_path)["a"]}


def files_that_cannot_be_written(tmp_path):
    td = nested(10).memmap_(tmp_path)
    (tmp_path / "next" / "b.memmap").chmod(0o444)
    return td


def a_store_already(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(nested(10))
    rb.close()
    return TensorDict.load_memmap(tmp_path)


def files_and_a_segment(tmp_path):
    return TensorDict({"a": nested(10).memmap_(tmp_path)["a"], "b": torch.zeros(10).share_memory_()}, [10])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (half_shared, "field b: expected memory that is shared, as of other fields"),
        (part_of_a_segment, "expected all of the memory that was shared, got a view of a part of it"),
        (end_of_a_segment, "expected all of the memory that was shared, got a view of a part of it"),
        (part_of_files, "expected all of the memory that was shared, got a view of a part of it"),
        (two_folders, "expected files as memmap_"),
        (other_names, "expected files as memmap_"),
        (
            files_that_cannot_be_written,
            r"field \('next', 'b'\): expected a file that can be written to, got .*b.memmap",
        ),
        (a_store_already, "holds a store already. Use ReplayBuffer.open"),
        (files_and_a_segment, "expected files as memmap_"),
    ],
)
def test_shared_memory_that_cannot_be_a_store(tmp_path, make, says):
    data = make(tmp_path)
    rb = ReplayBuffer(storage=TensorStorage(data))
    assert not rb.shared
    assert len(rb) == 10
    assert rb.extend(
        rb[:3].clone() if isinstance(rb[:], torch.Tensor | TensorDict) else {"c": rb[:3]["c"].clone()}
    ).tolist() == [0, 1, 2]
    rb.sample(3)
    with pytest.raises(RuntimeError, match=f"share: the rows lie in memory that processes share, but.*{says}"):
        rb.share()
    with pytest.raises(RuntimeError, match=f"handed to a process.*{says}"):
        Child(add_ones, rb, method="spawn")
    assert not rb.shared
    Child(may_not_write, rb, says, method="fork").join()


def may_not_write(rb, says):
    rb.sample(3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"this process was forked.*{says}"):
            rb.writer.add(rb[0])


def test_private_data_is_shared_by_a_copy():
    data = nested(10)
    rb = TensorDictReplayBuffer(storage=TensorStorage(data))
    assert not rb.shared
    assert rb.share().shared
    assert (len(rb), rb.write_count) == (10, 0)
    rb.extend(nested(2) + 1)
    assert rb["a"].tolist() == [1, 1] + [0] * 8
    assert not data["a"].any()
    rb.close()


def test_a_flat_storage_is_shared_by_the_one_it_was_made_of(tmp_path):
    storage = TensorStorage(torch.zeros(4, 3), ndim=2)
    with pytest.raises(RuntimeError, match="expected the storage that was made of the data"):
        storage.flatten().share()
    shared = TensorStorage(TensorDict({"a": torch.zeros(4, 3)}, [4, 3]).memmap_(tmp_path), ndim=2)
    assert shared.shared
    assert shared.flatten().shared
    ReplayBuffer(storage=shared).close()


def test_what_cannot_be_shared():
    with pytest.raises(RuntimeError, match="ListStorage cannot be shared"):
        ReplayBuffer(storage=ListStorage(4)).share()
    with pytest.raises(RuntimeError, match="expected a storage on the CPU, got one on meta"):
        ReplayBuffer(storage=LazyTensorStorage(4, device="meta"), shared=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    assert not rb.share(False).shared
    undecided = ReplayBuffer(storage=LazyTensorStorage(3, device="auto"))
    with pytest.raises(RuntimeError, match='before the first write, which decides. Use device="cpu"'):
        undecided.share()
    undecided.extend(torch.arange(2))
    assert undecided.share().sample(1).shape == (1,)
    undecided.close()


def test_a_share_that_does_not_fit_changes_nothing(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(torch.arange(3))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("engram.format.files.reserve", full)
        with pytest.raises(OSError, match="No space left"):
            rb.share()
    assert not rb.shared
    assert rb[:].tolist() == [0, 1, 2]
    assert rb.share().shared
    rb.close()


def test_handles_are_small():
    rows = TensorDict({f"key{i}": torch.zeros(3, 4) for i in range(40)}, [3])
    for storage in (LazyMemmapStorage(1000), LazyTensorStorage(1000)):
        rb = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(1000, 0.6, 0.4)).share()
        rb.extend(rows)
        assert len(pickle.dumps(rb)) < 4096
        other = pickle.loads(pickle.dumps(rb))
        other.extend(rows)
        assert len(rb) == 6
        rb.close()


def test_copies_of_a_shared_buffer_share():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), shared=True)
    early = copy.deepcopy(rb)
    rb.extend(torch.arange(3))
    late = copy.deepcopy(rb)
    early.extend(torch.arange(2))
    assert len(rb) == len(late) == len(early) == 5
    rb.close()


def first_row_of_another_kind(rb):
    rb.extend({"b": torch.zeros(2)})


def test_the_first_write_says_what_rows_are():
    rb = ReplayBuffer(storage=LazyMemmapStorage(8))
    twin = copy.deepcopy(rb)
    Child(first_row_of_another_kind, rb).join()
    with pytest.raises(
        KeyError, match=r"expected the fields of the first row, got others: missing \['b'\], unknown \['a'\]"
    ):
        twin.extend({"a": torch.zeros(2)})
    assert len(twin) == 2
    rb.close()
