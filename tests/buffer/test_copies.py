"""Copies of buffers: copy, deepcopy, pickle, fork."""

import copy
import os
import pickle
import threading

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests import fresh
from tests.components import Listener

HOW = {"deepcopy": copy.deepcopy, "pickle": lambda rb: pickle.loads(pickle.dumps(rb))}
PRIVATE = [LazyTensorStorage, ListStorage]


@pytest.fixture(params=HOW.values(), ids=HOW.keys())
def how(request):
    return request.param


def identity(x):
    return x


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("storage", PRIVATE)
class TestPrivateMemory:
    def test_the_copy_is_independent(self, storage, how):
        rb = ReplayBuffer(storage=storage(5))
        rb.extend(torch.arange(7))
        other = how(rb)
        assert (other[:].tolist(), len(other), other.write_count) == ([5, 6, 2, 3, 4], 5, 7)
        other.add(torch.tensor(70))
        other[0] = torch.tensor(50)
        assert rb[:].tolist() == [5, 6, 2, 3, 4]
        rb.empty()
        assert other[:].tolist() == [50, 6, 70, 3, 4]
        assert rb.add(torch.tensor(9)) == 0
        assert other.add(torch.tensor(9)) == 3

    def test_the_generator_goes_on_in_both(self, storage, how):
        rb = ReplayBuffer(storage=storage(50), generator=seeded(3))
        rb.extend(torch.arange(50))
        rb.sample(5)
        other = how(rb)
        drawn = [rb.sample(20).tolist() for _ in range(3)]
        assert [other.sample(20).tolist() for _ in range(3)] == drawn
        fresh_one = ReplayBuffer(storage=rb.storage, generator=seeded(3))
        assert fresh_one.sample(20).tolist() != drawn[0]

    def test_without_a_generator_it_is_torchs(self, storage, how):
        rb = ReplayBuffer(storage=storage(50))
        rb.extend(torch.arange(50))
        other = how(rb)
        torch.manual_seed(1)
        first = rb.sample(20).tolist()
        torch.manual_seed(1)
        assert other.sample(20).tolist() == first

    def test_components_belong_to_the_copy(self, storage, how):
        rb = ReplayBuffer(
            storage=storage(6),
            writer=RoundRobinWriter(track_generations=True),
            sampler=SamplerWithoutReplacement(),
            batch_size=4,
        )
        rb.extend(torch.arange(6))
        rb.sample()
        other = how(rb)
        assert other.writer is not rb.writer
        other.writer.add(torch.tensor(60))
        assert other[0] == 60
        assert rb[0] == 0
        assert other.sample().tolist() != []
        assert other.sampler.ran_out
        assert not rb.sampler.ran_out
        assert other.batch_size == 4
        before = rb.writer.generations_of(torch.arange(6))
        assert torch.equal(other.writer.generations_of(torch.arange(1, 6)), before[1:])

    def test_samplers_hear_their_own_buffer(self, storage, how):
        rb = ReplayBuffer(storage=storage(6), sampler=Listener())
        rb.sampler._choose = None
        other = how(rb)
        other.add(torch.tensor(1))
        rb.add(torch.tensor(2))
        assert len(other.sampler.heard) == len(rb.sampler.heard) == 1
        assert other.sampler is not rb.sampler

    def test_lane_and_functions(self, storage, how):
        lanes = {"lanes": 2} if storage is LazyTensorStorage else {}
        rb = ReplayBuffer(storage=storage(6, **lanes), collate_fn=identity, transform=identity)
        rb.on_lane(len(lanes))
        other = how(rb)
        assert other.add(torch.tensor(1)) == 3 * len(lanes)
        assert len(other.transform) == 1
        assert rb.write_count == 0

    def test_a_buffer_that_was_never_written(self, storage, how):
        other = how(ReplayBuffer(storage=storage(6)))
        assert len(other) == 0
        other.extend(torch.arange(7))
        assert other[:].tolist() == [6, 1, 2, 3, 4, 5]

    def test_in_the_middle_of_an_iteration(self, storage, how):
        rb = ReplayBuffer(storage=storage(6), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4)
        rb.extend(torch.arange(6))
        rb.next()
        assert how(rb).next().tolist() == [4, 5]

    def test_copies_of_copies(self, storage, how):
        rb = ReplayBuffer(storage=storage(6), generator=seeded(1))
        rb.extend(torch.arange(6))
        assert how(how(how(rb)))[:].tolist() == rb[:].tolist()


def test_tensordict_buffers(how):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), priority_key="error")
    rb.extend(TensorDict({"a": torch.arange(6), "n": {"b": torch.zeros(6, 2)}}, batch_size=[6]))
    other = how(rb)
    assert type(other) is TensorDictReplayBuffer
    assert other.priority_key == "error"
    sample = other.sample(10)
    assert torch.equal(sample["a"], sample["index"])
    assert other[2]["index"] == 2


def test_existing_data(how):
    data = torch.arange(4)
    other = how(ReplayBuffer(storage=TensorStorage(data)))
    other[0] = torch.tensor(9)
    assert data[0] == 0
    assert other[:].tolist() == [9, 1, 2, 3]


def test_columns(how):
    rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    rb.extend(torch.arange(4).reshape(2, 2))
    other = how(rb)
    assert other[:].tolist() == [[0, 1], [2, 3]]
    assert other.add(torch.tensor([8, 9])).tolist() == [[2, 0], [2, 1]]
    assert len(rb) == 4


def test_a_directory_is_the_same_store(how, tmp_path):
    """What copies of a directory buffer share is on disk: within a process they are handles on it."""
    rb = ReplayBuffer(storage=LazyMemmapStorage(6, scratch_dir=tmp_path))
    rb.extend(torch.arange(3))
    other = how(rb)
    other.add(torch.tensor(3))
    assert rb[:].tolist() == [0, 1, 2, 3]
    assert len(pickle.dumps(rb)) < 5_000


def test_a_temporary_folder_lives_as_long_as_its_last_handle():
    rb = ReplayBuffer(storage=LazyMemmapStorage(6))
    rb.extend(torch.arange(3))
    folder = rb.storage.scratch_dir
    other = copy.deepcopy(rb)
    rb.close()
    assert folder.exists()
    assert other[:].tolist() == [0, 1, 2]
    other.close()
    assert not folder.exists()


def test_shallow_copies_share_the_storage():
    rb = ReplayBuffer(storage=LazyTensorStorage(6), generator=seeded(1))
    rb.extend(torch.arange(3))
    other = copy.copy(rb)
    assert other.storage is rb.storage
    other.add(torch.tensor(3))
    assert len(rb) == 4
    assert other.sample(20).tolist() == rb.sample(20).tolist()
    assert other._reading._key is not rb._reading._key  # each draws under a lock of its own


def test_shut_down_stays_shut_down(how):
    rb = ReplayBuffer(3)
    rb.add(torch.tensor(1))
    rb.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        how(rb).sample(1)


def test_functions_that_cannot_be_pickled_fail_as_python_says():
    rb = ReplayBuffer(3, collate_fn=lambda x: x)
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        pickle.dumps(rb)


def test_after_fork_the_child_has_a_copy():
    out = fresh.run(
        """
        import os, torch
        from engram import LazyTensorStorage, ReplayBuffer

        rb = ReplayBuffer(storage=LazyTensorStorage(5))
        rb.extend(torch.arange(3))
        pid = os.fork()
        if pid == 0:
            rb.add(torch.tensor(3))
            print("child", rb[:].tolist(), len(rb.sample(4)), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print("parent", rb[:].tolist())
        """
    )
    assert out.splitlines() == ["child [0, 1, 2, 3] 4", "parent [0, 1, 2]"]


def test_a_forked_child_does_not_remove_its_parents_files():
    out = fresh.run(
        """
        import os, sys, torch
        from engram import LazyMemmapStorage, ReplayBuffer

        rb = ReplayBuffer(storage=LazyMemmapStorage(5))
        rb.extend(torch.arange(3))
        folder = rb.storage.scratch_dir
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # an ordinary exit, with finalizers
        os.waitpid(pid, 0)
        print(folder.exists(), rb[:].tolist())
        rb.close()
        print(folder.exists())
        """
    )
    assert out.splitlines()[0] == "True [0, 1, 2]"
    assert out.splitlines()[-1] == "False"


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
