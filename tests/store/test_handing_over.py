"""A buffer is handed to another process."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram._support import fork
from tests.store.processes import METHODS, Child, context, leaves, steps, whole
from tests.waiting import ended

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
    fork.stream = lambda *_: 0  # as in the first process
    for rb, expected in drawn:
        assert torch.equal(rb.sample(8), expected)


@pytest.mark.stress(sample=2)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
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


@pytest.mark.stress(sample=2)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
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


@pytest.mark.stress(sample=3)
@pytest.mark.parametrize(
    ("method", "prefetch", "sampler", "written"),
    [
        ("forkserver", 0, "prioritized", True),
        ("spawn", 0, "prioritized", True),
        ("forkserver", 2, "a pass", False),
        ("spawn", 2, "uniform", True),
        ("forkserver", 2, "uniform", True),
    ],
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
    noted = context(method).Queue()
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


@pytest.mark.stress(sample=2)
@pytest.mark.parametrize(
    ("method", "storage"),
    [
        ("forkserver", LazyTensorStorage),
        ("spawn", LazyTensorStorage),
        ("spawn", LazyMemmapStorage),
        ("forkserver", LazyMemmapStorage),
    ],
)
def test_a_buffer_that_the_parent_drops_at_once_is_there_for_the_child(method, storage):
    counted = context(method).SimpleQueue()

    def begin():
        rb = ReplayBuffer(storage=storage(100), batch_size=4)
        rb.extend(steps(0, 3))
        process = context(method).Process(target=write_and_count, args=(rb, counted))
        process.start()
        return process, Path(rb.storage.store.directory)

    process, folder = begin()
    gc.collect()
    ended(process)
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
    Child(set_the_first, storage, method="forkserver").join()
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
    Child(add_ones_to_a_copy, pickle.dumps(listed), method="forkserver").join()
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


CHANGES = {
    "extend": lambda rb: rb.extend(rows_of_ones(2)),
    "add": lambda rb: rb.add(rows_of_ones(1)[0]),
    "edit": lambda rb: rb.__setitem__(0, rows_of_ones(1)[0]),
    "remove": lambda rb: rb.remove(1),
    "empty": lambda rb: rb.empty(),
    "load": lambda rb: rb.load_state_dict(rb.state_dict()),
    "priorities": lambda rb: rb.update_priority(torch.arange(2), torch.ones(2)),
    "mark": lambda rb: rb.mark_update(torch.arange(2)),
}


def change_and_note(rb, noted, name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            CHANGES[name](rb)
    noted.put([str(warning.message) for warning in caught])


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("ensemble", [False, True])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_forked_child_is_told_whatever_it_changes(storage, ensemble, name):
    sampler = PrioritizedSampler(40, 1.0, 1.0)
    rb = member = TensorDictReplayBuffer(storage=storage(40), sampler=sampler, batch_size=4)
    member.extend(rows_of_ones(5))
    if ensemble:
        other = TensorDictReplayBuffer(storage=storage(40), batch_size=4)
        other.extend(rows_of_ones(5))
        rb = ReplayBufferEnsemble(other, member, batch_size=4)
        rb.sample()
    noted = mp.get_context("fork").Queue()
    child = Child(change_and_note, rb[1] if ensemble else rb, noted, name, method="fork")
    caught = noted.get(timeout=60)
    child.join()
    assert len(caught) == 1
    assert "is not shared: what is written here stays here" in caught[0]
    assert len(member) == 5


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
