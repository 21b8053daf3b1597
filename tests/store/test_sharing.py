"""One buffer in many processes."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import tempfile
import threading
import time
import warnings
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
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    _native,
)
from engram.store import shared_memory, sweep_shared_memory
from engram.store.indexes import Indexes
from engram.store.locks import exclusive
from tests import fresh

METHODS = ["fork", "spawn", "forkserver"]


def steps(start: int, n: int, episode: int = 0) -> TensorDict:
    """Rows that know where they belong."""
    step = torch.arange(start, start + n)
    return TensorDict({"step": step, "twice": 2 * step, "episode": torch.full((n,), episode)}, [n])


def whole(batch: TensorDict) -> bool:
    return bool((batch["twice"] == 2 * batch["step"]).all())


def leaves(rb: ReplayBuffer) -> torch.Tensor:
    index = rb.sampler._index
    return index.leaves(index.core.rows)


class Child:
    """A process that runs a function of this module."""

    def __init__(self, target, *arguments, method="fork"):
        self.process = mp.get_context(method).Process(target=target, args=arguments, daemon=True)
        self.process.start()

    def join(self):
        self.process.join(60)
        assert self.process.exitcode == 0, self.process.exitcode

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(60)


# ---- handing a buffer over -----------------------------------------------------------------------------------------------


def add_ones(rb):
    rb.extend(TensorDict({"a": torch.ones(10)}, [10]))
    assert rb.sample(4)["a"].shape == (4,)


@pytest.mark.stress(sample=3)
@pytest.mark.parametrize("child_first", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_documented_example(method, child_first):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(21))
    zeros = TensorDict({"a": torch.zeros(10)}, [10])
    if not child_first:
        rb.extend(zeros)
    Child(add_ones, rb, method=method).join()
    if child_first:
        assert len(rb) == 10
        rb.extend(zeros)
    assert len(rb) == 20
    expected = [1.0] * 10 + [0.0] * 10 if child_first else [0.0] * 10 + [1.0] * 10
    assert rb["a"].tolist() == expected
    folder = rb.storage.scratch_dir
    rb.close()
    assert not folder.exists()


def draw_as_they_would(*drawn):
    for rb, expected in drawn:
        assert torch.equal(rb.sample(8), expected)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_handle_copies_arrives(method):
    """The generator's state, a list's priorities: memory that is made for the pipe and gone before it is read."""
    buffers = [
        ReplayBuffer(storage=LazyTensorStorage(21), shared=True),
        ReplayBuffer(storage=LazyTensorStorage(21), sampler=PrioritizedSampler(21, 1.0, 1.0)),
    ]
    drawn = []
    for rb in buffers:
        rb.set_rng(torch.Generator().manual_seed(3))
        rb.extend(torch.arange(10.0).bfloat16())
        same = copy.deepcopy(rb)
        drawn.append((rb, same.sample(8)))
    Child(draw_as_they_would, *drawn, method=method).join()
    for rb in buffers:
        rb.close()


@pytest.mark.stress(sample=3)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_ram_that_is_shared(method, written):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(21), shared=not written)
    zeros = TensorDict({"a": torch.zeros(10)}, [10])
    if written:
        rb.extend(zeros)
        assert not rb.shared
        assert rb.share() is rb
    assert rb.shared
    Child(add_ones, rb, method=method).join()
    if not written:
        rb.extend(zeros)
    assert len(rb) == 20
    assert rb["a"].sum() == 10
    folder = rb.storage.store.directory
    assert folder.name.startswith("engram-")
    rb.close()
    assert not folder.exists()


def test_share_takes_rows_cursors_and_priorities_along():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8, lanes=2), sampler=PrioritizedSampler(8, 1.0, 1.0, 0.0), batch_size=8
    )
    for lane in range(2):
        rb.extend(steps(10 * lane, 6, lane), lane=lane)
    rb.update_priority(torch.arange(8), torch.arange(8.0))
    before, count, extent = rb[:].clone(), rb.write_count, rb.storage.extent()
    rb.share()
    assert (rb[:] == before).all()
    assert (rb.write_count, rb.storage.extent().seam) == (count, extent.seam)
    assert leaves(rb).tolist() == [float(i) for i in range(8)]
    rb.extend(steps(90, 1), lane=0)
    assert rb[int(extent.seam[0])]["step"] == 90
    assert whole(rb.sample())
    rb.close()


# ---- handed over without share() -----------------------------------------------------------------------------------------


def add_and_note(rb, noted, seed):
    """Write ten rows that say which process did, draw, and tell what was drawn and warned."""
    torch.manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            rb.extend(TensorDict({"a": torch.full((5,), float(seed))}, [5]))
        rb.add(TensorDict({"a": torch.tensor(float(seed))}, []))
    noted.put((len(rb), rb.sample()["a"].tolist(), [str(warning.message) for warning in caught]))


SAMPLERS = {
    "uniform": RandomSampler,
    "a pass": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(40, 1.0, 1.0),
}


@pytest.mark.parametrize(
    ("method", "prefetch", "sampler", "written"),
    [("spawn", 0, "prioritized", True), ("forkserver", 2, "a pass", False), ("spawn", 2, "uniform", True)],
)
def test_ram_that_is_handed_to_a_process_is_shared(method, prefetch, sampler, written):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SAMPLERS[sampler](),
        batch_size=4,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(3),
    )
    if written:
        rb.extend(TensorDict({"a": torch.zeros(10)}, [10]))
        rb.sample()
    noted = mp.get_context(method).Queue()
    for seed in (1, 2):
        Child(add_and_note, rb, noted, seed, method=method).join()
        length, drawn, caught = noted.get()
        assert (length, len(drawn), caught) == (11 * seed + 10 * written, 4, [])
    assert rb.shared
    assert len(rb) == rb.write_count == 22 + 10 * written
    assert sorted(rb["a"].tolist()) == [0.0] * 10 * written + [1.0] * 11 + [2.0] * 11
    assert {len(rb.sample()) for _ in range(8)} <= {4, 2}
    rb.close()


def write_and_count(rb, counted):
    rb.extend(steps(0, 7))
    counted.put(len(rb))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_buffer_that_the_parent_drops_at_once_is_there_for_the_child(method, storage):
    context = mp.get_context(method)
    counted = context.SimpleQueue()

    def begin():
        rb = ReplayBuffer(storage=storage(100), batch_size=4)
        rb.extend(steps(0, 3))
        process = context.Process(target=write_and_count, args=(rb, counted))
        process.start()
        return process, Path(rb.storage.store.directory)

    process, folder = begin()
    gc.collect()
    process.join(60)
    assert process.exitcode == 0
    assert counted.get() == 10
    del process
    gc.collect()
    assert not folder.exists()


def test_a_storage_that_is_handed_to_a_process_is_shared():
    storage = LazyTensorStorage(40)
    rb, other = (TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(40, 1.0, 1.0)) for _ in range(2))
    rb.extend(TensorDict({"a": torch.zeros(10)}, [10]))
    other.sample(1)
    Child(set_the_first, storage, method="spawn").join()
    assert storage.shared
    assert rb["a"][0] == 7
    rb.update_priority(torch.arange(10), torch.eye(10)[3])
    assert other.sample(20)["index"].unique().tolist() == [3]  # it looks where the rows are now
    rb.close()


def set_the_first(storage):
    storage[0] = TensorDict({"a": torch.tensor(7.0)}, [])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("storage", "says"),
    [
        (lambda: ListStorage(4), "ListStorage cannot be shared. Use LazyTensorStorage or LazyMemmapStorage"),
        (lambda: LazyTensorStorage(4, device="meta"), "expected a storage on the CPU"),
        (lambda: LazyTensorStorage(4, device="auto"), 'Use device="cpu"'),
    ],
)
def test_what_cannot_be_shared_is_not_handed_to_a_process(method, storage, says):
    rb = ReplayBuffer(storage=storage())
    for handed in (rb, [rb], rb.storage):
        with pytest.raises(RuntimeError, match=f"handed to a process is shared with it.*{says}.*pass pickle.dumps"):
            Child(add_ones, handed, method=method)
    assert not rb.shared


def test_other_copies_are_copies():
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    listed = ReplayBuffer(storage=ListStorage(8))
    queue = mp.get_context("spawn").Queue()
    for one in (rb, listed):
        one.extend(torch.arange(3))
        queue.put(one)
        for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one)), queue.get()):
            assert not other.shared
        assert not one.shared
    Child(add_ones_to_a_copy, pickle.dumps(listed), method="spawn").join()
    assert len(listed) == 3


def add_ones_to_a_copy(pickled):
    rb = pickle.loads(pickled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend(torch.ones(2, dtype=torch.int64))
    assert len(rb) == 5


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, lambda n: TensorStorage(rows_of_ones(n))])
def test_a_forked_child_is_told_that_it_has_a_copy(storage, written):
    rb = TensorDictReplayBuffer(storage=storage(40), batch_size=4)
    if written:
        rb.extend(rows_of_ones(3))
    before = len(rb)
    noted = mp.get_context("fork").Queue()
    child = Child(add_and_note, rb, noted, 5, method="fork")
    _, _, caught = noted.get(timeout=60)
    child.join()
    assert len(caught) == 1
    assert "is not shared: what is written here stays here" in caught[0]
    assert len(rb) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend(rows_of_ones(2))  # the parent's own


def rows_of_ones(n):
    return TensorDict({"a": torch.ones(n)}, [n])


def read_only(rb):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rb.sample()["a"].tolist() == [1.0] * 4


def test_a_forked_child_that_reads_is_not_told():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=4)
    rb.extend(rows_of_ones(3))
    Child(read_only, rb, method="fork").join()


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
    [("td", "fork"), ("td", "spawn"), ("tensorclass", "fork"), ("dict", "fork"), ("tuple", "fork"), ("tensor", "fork")],
)
def test_around_shared_memory_all_processes_write_one_store(tmp_path, where, kind, method):
    data = shared_data(kind, where, tmp_path)
    rb = ReplayBuffer(storage=TensorStorage(data))
    assert rb.shared
    assert (len(rb), rb.write_count) == (1000, 0)  # full from the start
    children = [Child(write_many, rb, kind, k, method=method) for k in range(4)]
    for child in children:
        child.join()
    assert (len(rb), rb.write_count) == (1000, 800)
    expected = torch.cat([of_a_process(k, i) for k in range(4) for i in range(20)])
    for seen in (numbers_in(kind, data), numbers_in(kind, rb[:])):  # the caller's own tensors, and the rows
        assert torch.equal(seen[:800].sort().values, expected)
        assert not seen[800:].any()
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
            assert (len(again), again.write_count) == (1000, 800)
            assert numbers_in(kind, again[:])[5] == 77
            again.extend(make_like(kind, of_a_process(9, 0)))
        assert numbers_in(kind, data)[800] == 9000


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
    context = mp.get_context("spawn")
    go, gone = context.Event(), context.Queue()
    late = Child(write_late, rb, go, gone, method="spawn")
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


# ---- at work together ----------------------------------------------------------------------------------------------------

ROWS = 64


def write(rb, lane, count, size):
    for i in range(count):
        rb.extend(steps(1000 * i, size, episode=1000 * lane + i), lane=lane)


def draw(rb, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert whole(rb.sample())


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(),
        SamplerWithoutReplacement(),
        PrioritizedSampler(4 * ROWS, 0.6, 0.4),
        SliceSampler(slice_len=4),
        PrioritizedSliceSampler(4 * ROWS, 0.6, 0.4, slice_len=4),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_writers_and_samplers_in_processes_of_their_own(storage, sampler):
    rb = TensorDictReplayBuffer(
        storage=storage(4 * ROWS, lanes=4), sampler=copy.deepcopy(sampler), batch_size=32
    ).share()
    rb.extend(steps(0, 8, episode=-1), lane=0)  # of a trajectory that no writer goes on with
    children = [Child(write, rb, lane, 150, 8) for lane in range(3)] + [Child(draw, rb, 0.7)]
    while any(child.process.is_alive() for child in children):
        batch = rb.sample()
        assert whole(batch)
        if "Slice" in type(sampler).__name__:
            step = batch["step"].reshape(-1, 4)
            assert bool((step[:, 1:] == step[:, :-1] + 1).all())
            episode = batch["episode"].reshape(-1, 4)
            assert bool((episode == episode[:, :1]).all())
        if "Prioritized" in type(sampler).__name__:
            batch["td_error"] = torch.rand(len(batch))
            rb.update_tensordict_priority(batch)
    for child in children:
        child.join()
    assert len(rb) == 3 * ROWS
    assert rb.write_count == 8 + 3 * 150 * 8
    if isinstance(sampler, PrioritizedSampler):
        assert bool((leaves(rb)[: 3 * ROWS] > 0).all())
        assert rb.sampler._index.core.total == pytest.approx(leaves(rb).sum().item(), rel=1e-12)
    rb.close()


# ---- one pass ------------------------------------------------------------------------------------------------------------


def passing(storage, rows=1000, batch_size=7, **arguments):
    rb = ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(**arguments), batch_size=batch_size).share()
    rb.extend(torch.arange(rows))
    return rb


def walk(rb, seen):
    for _ in range(40):
        for row in rb.sample().tolist():
            seen[row] += 1


@pytest.mark.parametrize(("storage", "method"), [(LazyMemmapStorage, "spawn"), (LazyTensorStorage, "fork")])
def test_processes_walk_one_pass(storage, method):
    rb = passing(storage(1000))
    seen = [torch.zeros(1000, dtype=torch.int64).share_memory_() for _ in range(3)]
    for row in rb.sample().tolist():
        seen[0][row] += 1
    children = [Child(walk, rb, mine, method=method) for mine in seen]
    for child in children:
        child.join()
    while not rb.sampler.ran_out:
        for row in rb.sample().tolist():
            seen[0][row] += 1
    assert sum(seen).tolist() == [1] * 1000
    assert all(int(mine.sum()) >= 40 * 7 for mine in seen)
    assert all(rb.sample().tolist())
    rb.close()


def iterate(rb, seen):
    for batch in rb:
        seen[batch] += 1
        time.sleep(0.001)


def test_iterations_of_all_processes_end_with_the_pass():
    rb = passing(LazyMemmapStorage(1000))
    seen = [torch.zeros(1000, dtype=torch.int64).share_memory_() for _ in range(3)]
    children = [Child(iterate, rb, mine) for mine in seen]
    for child in children:
        child.join()
    total = sum(seen)
    assert int(total.min()) >= 1
    assert int(total.sum()) < 4000  # who draws just when another one took the last batch begins the next pass
    rb.close()


def test_a_pass_goes_on_when_the_store_is_shared_or_opened_again(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(torch.arange(10))
    seen = rb.sample().tolist()
    rb.share()
    seen += rb.sample().tolist()
    assert len(rb.sample()) == 2
    assert len(set(seen)) == 8
    rb.close()
    rb = passing(LazyMemmapStorage(10, scratch_dir=tmp_path), 10, 4, index="train")
    seen = rb.sample().tolist()
    rb.close()
    rb = ReplayBuffer.open(tmp_path)
    assert rb.sampler.index_name == "train"
    other = ReplayBuffer(storage=rb.storage, sampler=SamplerWithoutReplacement(index="eval"), batch_size=4)
    assert sorted(sum((batch.tolist() for batch in other), [])) == list(range(10))
    assert sorted(seen + sum((batch.tolist() for batch in rb), [])) == list(range(10))
    rb.close()


def walk_for_ever(rb):
    while True:
        rb.sample()


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_survives_those_who_walk_it(drop_last):
    rb = passing(LazyMemmapStorage(100), 100, drop_last=drop_last)
    for _ in range(15):
        child = Child(walk_for_ever, rb)
        for _ in range(20):
            rb.sample()
        child.kill()
        rb.sampler.ran_out = False
        while not rb.sampler.ran_out:
            rb.sample()
        rows = torch.cat(list(rb))
        assert len(rows) == (98 if drop_last else 100) == len(rows.unique())
    rb.close()


# ---- what others wrote ---------------------------------------------------------------------------------------------------


class Following:
    """A sampler that notes something of every row, whoever wrote it."""

    def __init__(self, storage):
        self.store = storage.store
        self.seen, self.next = {}, 0

    def catch_up(self):
        changes = self.store.changes(self.next)
        assert changes.tickets.tolist() == sorted(changes.tickets.tolist())
        self.seen.update(zip(changes.rows.tolist(), changes.tickets.tolist(), strict=True))
        self.next = changes.next
        return changes.rows.tolist()


def overwrite(rb, lane, count):
    for i in range(count):
        rb.extend(steps(i, 3), lane=lane)
        if i % 7 == 0:
            rb[20 * lane] = steps(i, 1)[0]


def test_what_other_processes_wrote_can_be_learnt():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(60, lanes=3))
    rb.extend(steps(0, 3), lane=0)
    following = Following(rb.storage)
    assert following.catch_up() == [0, 1, 2]
    children = [Child(overwrite, rb, lane, 400) for lane in range(3)]
    while any(child.process.is_alive() for child in children):
        following.catch_up()
    for child in children:
        child.join()
    following.catch_up()
    assert following.catch_up() == []
    rows = torch.arange(60)
    assert following.seen == dict(zip(rows.tolist(), rb.storage.numbers_of(rows).tolist(), strict=True))
    rb[5] = steps(1, 1)[0]
    assert following.catch_up() == [5]
    rb.close()


def write_best(rb, start, count):
    for i in range(count):
        rb.extend(steps(start + 8 * i, 8))


def test_the_best_rows_of_all_processes():
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(64), writer=TensorDictMaxValueWriter(rank_key="step"), batch_size=8
    )
    rb.extend(steps(0, 64))
    children = [Child(write_best, rb, 1000 * (k + 1), 40) for k in range(2)]
    write_best(rb, 5000, 10)
    for child in children:
        child.join()
    offered = [*range(64), *range(1000, 1320), *range(2000, 2320), *range(5000, 5080)]
    assert sorted(rb[:]["step"].tolist()) == sorted(offered)[-64:]
    rb.close()


def write_first(rb, barrier, start):
    barrier.wait()
    rb.extend(steps(start, 48))


def test_the_best_rows_of_processes_that_write_first_at_once():
    for _ in range(10):
        rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(64), writer=TensorDictMaxValueWriter(rank_key="step"))
        barrier = mp.get_context("fork").Barrier(2)
        for child in [Child(write_first, rb, barrier, start) for start in (0, 48)]:
            child.join()
        assert sorted(rb["step"].tolist()) == list(range(32, 96))
        rb.close()


def set_priority(rb, rows, value):
    rb.update_priority(torch.tensor(rows), value)


def write_with_plain_buffer(folder):
    rb = ReplayBuffer.open(folder, sampler=RandomSampler())
    rb.extend(steps(500, 4))
    rb.close()


def test_an_index_that_another_process_makes_is_kept_by_all(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32, scratch_dir=tmp_path / "x"), batch_size=8)
    rb.extend(steps(0, 4))
    child = Child(make_priorities, str(tmp_path / "x"))
    child.join()
    assert not rb.storage.store.indexes
    rb.extend(steps(100, 3))
    assert list(rb.storage.store.indexes) == [("main", "priorities")]
    rb.set_sampler(PrioritizedSampler(32, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [3.0] * 7 + [0.0] * 25
    Child(set_priority, rb, [1, 2], 8.0).join()
    assert leaves(rb)[:4].tolist() == [3.0, 8.0, 8.0, 3.0]
    Child(write_with_plain_buffer, str(tmp_path / "x"), method="spawn").join()
    assert leaves(rb)[7:11].tolist() == [8.0] * 4
    rb.close()


def make_priorities(folder):
    rb = ReplayBuffer.open(folder, sampler=PrioritizedSampler(32, 1.0, 1.0, 0.0))
    rb.update_priority(torch.arange(4), 3.0)
    rb.close()


def make_priorities_and_die(folder):
    Indexes.scan = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    make_priorities(folder)


@pytest.mark.parametrize("joins", ["who was there", "who comes", "who comes for something else"])
def test_an_index_whose_maker_died_before_it_saw_the_rows(tmp_path, joins):
    """While others have the store open: whoever comes or asks for it next lets it look."""
    folder = tmp_path / "x"
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32, scratch_dir=folder), batch_size=8)
    rb.extend(steps(0, 4))
    child = Child(make_priorities_and_die, str(folder))
    child.process.join(60)
    assert child.process.exitcode == -signal.SIGKILL
    mark = folder / ".engram/indexes/main/.unscanned-priorities"
    assert mark.exists()
    if joins == "who was there":
        rb.extend(steps(100, 3))  # by which it meets the index
    elif joins == "who comes":
        Child(set_priority_there, str(folder), [1], 8.0).join()
    else:
        Child(write_with_plain_buffer, str(folder), method="spawn").join()
        assert not mark.exists()
    rb.set_sampler(PrioritizedSampler(32, 1.0, 1.0, 0.0))
    assert not mark.exists()
    assert leaves(rb)[:4].tolist() == [1.0, 8.0 if joins == "who comes" else 1.0, 1.0, 1.0]
    rb.close()


def set_priority_there(folder, rows, value):
    rb = ReplayBuffer.open(folder, sampler=PrioritizedSampler(32, 1.0, 1.0, 0.0))
    set_priority(rb, rows, value)
    rb.close()


def forget(rb):
    rb.empty()


def test_another_process_empties():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32), sampler=PrioritizedSampler(32, 1.0, 1.0), batch_size=4)
    rb.extend(steps(0, 20))
    Child(forget, rb).join()
    assert len(rb) == 0
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(steps(50, 3))
    assert rb.sample()["step"].min() >= 50
    rb.close()


def cut_in_two(rb, row):
    rb[row] = TensorDict({"step": torch.tensor(row), "twice": torch.tensor(2 * row), "episode": torch.tensor(77)}, [])


def test_an_edit_of_another_process_cuts_a_trajectory():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32), sampler=SliceSampler(slice_len=3), batch_size=30)
    rb.extend(steps(0, 10))
    assert whole(rb.sample())
    Child(cut_in_two, rb, 5).join()
    for _ in range(20):
        step = rb.sample()["step"].reshape(-1, 3)
        assert not bool((step == 5).any())
    rb.close()


# ---- death ---------------------------------------------------------------------------------------------------------------


def write_for_ever(rb, lane):
    i = 0
    while True:
        rb.extend(steps(i, 8, episode=lane), lane=lane)
        i += 8


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_killed_writers_stop_nobody(storage):
    """Again and again: whoever is left goes on within a second, and in the end every row and every priority is right."""
    rb = TensorDictReplayBuffer(
        storage=storage(4 * 40, lanes=4), sampler=PrioritizedSampler(160, 0.6, 0.4), batch_size=16
    ).share()
    rb.extend(steps(0, 40), lane=3)
    children = [Child(write_for_ever, rb, lane) for lane in range(2)]
    for i in range(12):
        time.sleep(0.01 + 0.005 * (i % 5))
        children[i % 2].kill()
        began = time.monotonic()
        batch = rb.sample()
        assert whole(batch)
        batch["td_error"] = torch.rand(len(batch))
        rb.update_tensordict_priority(batch)
        rb.extend(steps(i, 3), lane=i % 2)  # over what the dead one was writing
        assert time.monotonic() - began < 1
        children[i % 2] = Child(write_for_ever, rb, i % 2)
    for child in children:
        child.kill()
    rb.storage.store.core.reclaim()
    assert rb.storage.store.core.in_flight == 0
    holes = rb.storage.extent().holes
    void = set() if holes is None else set(holes.tolist())
    live = [
        row for row in range(160) if row < rb.storage.extent().filled[row // 40] + row // 40 * 40 and row not in void
    ]
    assert len(rb) == len(live)
    assert ((leaves(rb) > 0).nonzero().flatten()).tolist() == live
    assert whole(rb[live])
    rb.close()


def test_all_dead_then_somebody_opens(tmp_path):
    program = fresh.start(
        """
        import os, torch
        from tensordict import MemoryMappedTensor, TensorDict, tensorclass
        from engram import LazyMemmapStorage, PrioritizedSampler, TensorDictReplayBuffer
        rb = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(1000, scratch_dir=folder), sampler=PrioritizedSampler(1000, 1.0, 1.0), batch_size=8
        )
        rb.extend(TensorDict({"step": torch.arange(8), "twice": 2 * torch.arange(8)}, [8]))
        other = os.fork()
        if other:
            print("writing", other, flush=True)
        i = 0
        while True:
            rb.extend(TensorDict({"step": torch.arange(i, i + 8), "twice": 2 * torch.arange(i, i + 8)}, [8]))
            i += 8
        """,
        folder=str(tmp_path / "x"),
    ).until("writing")
    other = int(program.out.split()[-1])
    time.sleep(0.3)
    program.kill()
    os.kill(other, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while _native.start_time_of(other) and time.monotonic() < deadline:
        time.sleep(0.01)
    rb = ReplayBuffer.open(tmp_path / "x")
    store = rb.storage.store
    assert store.repair is not None
    assert store.core.in_flight == 0
    void = set(store.core.holes().tolist())
    assert len(rb) == store.extent().filled[0] - len(void) >= 8
    assert ((leaves(rb) > 0).nonzero().flatten()).tolist() == [
        r for r in range(store.extent().filled[0]) if r not in void
    ]
    assert whole(rb.sample())
    rb.close()


def test_the_creator_may_go_first(tmp_path):
    """A temporary folder stays for whoever has it open, and goes with the last one."""
    program = fresh.start(
        """
        import os, sys, time, torch
        from engram import LazyMemmapStorage, ReplayBuffer
        rb = ReplayBuffer(storage=LazyMemmapStorage(10))
        rb.extend(torch.arange(4))
        folder = rb.storage.scratch_dir
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)  # until the creator is gone
            assert folder.exists()
            rb.extend(torch.arange(3))
            with open(report, "w") as file:
                print(len(rb), folder, file=file, flush=True)
            rb.close()
            with open(report, "a") as file:
                print(folder.exists(), file=file, flush=True)
            os._exit(0)
        os.close(reading)
        rb.close()
        """,
        report=str(tmp_path / "report"),
    )
    assert program.wait() == 0, program.err
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (tmp_path / "report").exists() and len((tmp_path / "report").read_text().splitlines()) == 2:
            break
        time.sleep(0.02)
    first, second = (tmp_path / "report").read_text().splitlines()
    assert first.split()[0] == "7"
    assert second == "False"
    assert not Path(first.split()[1]).exists()


def test_what_all_owners_left_in_shared_memory_is_swept():
    program = fresh.start(
        """
        import os, torch
        from engram import LazyTensorStorage, ReplayBuffer
        rb = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
        rb.extend(torch.arange(4))
        print(rb.storage.store.directory, flush=True)
        import time
        time.sleep(60)
        """
    ).until("/engram-")
    folder = Path(program.out.strip().splitlines()[-1])
    assert folder.exists()
    other = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    assert folder.exists()  # its owner lives
    program.kill()
    ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    assert not folder.exists()
    other.close()


def test_a_sweep_waits_for_nobody():
    """Somebody who is stopped while he makes or closes a store, say."""
    folder = Path(tempfile.mkdtemp(dir=shared_memory(), prefix="engram-test-"))
    with exclusive(folder):
        began = time.monotonic()
        thread = threading.Thread(target=sweep_shared_memory)  # who holds a folder himself may go in
        thread.start()
        thread.join()
        assert time.monotonic() - began < 1
    folder.rmdir()


def test_a_stopped_writer_is_reported_not_robbed(tmp_path):
    """SIGSTOP: rows that it holds cost a typed error, others nothing; it goes on unharmed."""
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(80, lanes=2, scratch_dir=tmp_path / "x"), batch_size=8)
    rb.extend(steps(0, 40), lane=1)
    child = Child(write_for_ever, rb, 0)
    time.sleep(0.2)
    os.kill(child.process.pid, signal.SIGSTOP)
    for _ in range(20):
        assert whole(rb.sample())
        rb.extend(steps(7, 3), lane=1)
    os.kill(child.process.pid, signal.SIGCONT)
    count = rb.write_count
    time.sleep(0.2)
    assert rb.write_count > count
    child.kill()
    assert whole(rb.sample())
    rb.close()
