"""delayed_init: components are made at the first use."""

import copy
import pickle
import threading

import pytest
import torch

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.statistics_of import counted


class Made:
    """Callables that note what they make."""

    def __init__(self):
        self.log = []

    def of(self, kind, *arguments):
        def make():
            self.log.append(kind.__name__)
            return kind(*arguments)

        return make


def buffer(made, cls=ReplayBuffer, **arguments):
    return cls(
        storage=made.of(LazyTensorStorage, 10),
        sampler=made.of(RandomSampler),
        writer=made.of(RoundRobinWriter),
        batch_size=4,
        delayed_init=True,
        **arguments,
    )


def storage_of_ten():
    return LazyTensorStorage(10)


USES = {
    "extend": lambda rb: rb.extend(torch.arange(3)),
    "add": lambda rb: rb.add(torch.tensor(1)),
    "storage": lambda rb: rb.storage,
    "sampler": lambda rb: rb.sampler,
    "writer": lambda rb: rb.writer,
    "transform": lambda rb: rb.transform,
    "can_sample": lambda rb: rb.can_sample(),
    "state_dict": lambda rb: rb.state_dict(),
    "write_count": lambda rb: rb.write_count,
    "lanes": lambda rb: rb.lanes,
    "share": lambda rb: rb.share(),
    "append_transform": lambda rb: rb.append_transform(lambda x: x),
    "set_sampler": lambda rb: rb.set_sampler(RandomSampler()),
    "empty": lambda rb: rb.empty(),
    "on_lane": lambda rb: rb.on_lane(0),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_the_first_use_makes_all(use):
    made = Made()
    rb = buffer(made)
    assert (made.log, len(rb), rb.initialized) == ([], 0, False)
    assert rb.stats()["size"] == rb.stats()["initialized"] == 0
    assert repr(rb) == "ReplayBuffer(delayed_init=True)"
    assert made.log == []
    use(rb)
    assert sorted(made.log) == ["LazyTensorStorage", "RandomSampler", "RoundRobinWriter"]
    assert rb.initialized
    use(rb)
    assert len(made.log) == 3


def test_it_is_a_buffer_like_others_then():
    made = Made()
    rb = buffer(made, generator=torch.Generator().manual_seed(0))
    other = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, generator=torch.Generator().manual_seed(0))
    for one in (rb, other):
        one.extend(torch.arange(6))
    assert rb.sample().tolist() == other.sample().tolist()
    assert counted(rb) == counted(other)
    assert len(rb) == 6


def test_a_transform_factory_delays_unless_told_otherwise():
    made = Made()
    rb = ReplayBuffer(5, transform_factory=made.of(torch.nn.Identity))
    assert made.log == []
    assert len(rb.transform) == 1
    assert made.log == ["Identity"]
    ReplayBuffer(5, transform_factory=made.of(torch.nn.Identity), delayed_init=False)
    assert made.log == ["Identity"] * 2
    assert ReplayBuffer(5).initialized
    assert ReplayBuffer(5, delayed_init=None).initialized


@pytest.mark.parametrize("cls", [TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_other_buffers(cls):
    arguments = {"alpha": 1.0, "beta": 1.0} if cls is TensorDictPrioritizedReplayBuffer else {}
    rb = cls(storage=storage_of_ten, batch_size=4, delayed_init=True, prefetch=2, **arguments)
    assert not rb.initialized
    assert rb.storage.max_size == 10


def test_what_a_factory_raises_is_raised_at_every_use():
    def broken():
        raise ZeroDivisionError("mine")

    rb = ReplayBuffer(storage=broken, delayed_init=True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"):
            rb.add(torch.tensor(1))
    assert len(rb) == 0
    with pytest.raises(TypeError, match="storage"):
        ReplayBuffer(storage=lambda: 3, delayed_init=True).sample(1)


def test_arguments_that_are_no_components_are_checked_at_once():
    for given, error in (({"batch_size": 0}, ValueError), ({"prefetch": -1}, ValueError), ({"sise": 3}, TypeError)):
        with pytest.raises(error, match=next(iter(given))):
            ReplayBuffer(delayed_init=True, **given)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_are_made_where_they_are_used(how):
    rb = ReplayBuffer(storage=storage_of_ten, batch_size=2, delayed_init=True)
    other = how(rb)
    other.extend(torch.arange(4))
    assert (len(other), rb.initialized, len(rb)) == (4, False, 0)
    rb.extend(torch.arange(2))
    assert len(rb) == 2
    assert len(how(rb)) == 2


def test_threads_that_use_it_first_make_it_once():
    made = Made()
    rb = buffer(made)
    ready = threading.Barrier(4)

    def use():
        ready.wait()
        rb.add(torch.tensor(1))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rb) == 4
    assert len(made.log) == 3


def test_with_consumption_and_lists():
    rb = ReplayBuffer(storage=lambda: ListStorage(4), consume_after_n_samples=1, delayed_init=True, batch_size=2)
    rb.extend([torch.tensor(i) for i in range(3)])
    assert [len(batch) for batch in rb] == [2, 1]


def test_opening_a_store(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "s"))
    rb.extend(torch.arange(3))
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s", delayed_init=True)
    assert not rb.initialized
    assert rb[:].tolist() == [0, 1, 2]
    rb.close()


def test_a_shallow_copy_of_what_is_not_made_makes_its_own():
    rb = ReplayBuffer(storage=lambda: LazyTensorStorage(10), delayed_init=True, batch_size=2)
    other = copy.copy(rb)
    rb.extend(torch.arange(3))
    assert not other.initialized
    other.extend(torch.arange(5))
    assert (len(rb), len(other)) == (3, 5)
    assert type(other) is ReplayBuffer
