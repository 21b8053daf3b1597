"""A mask has left nothing: ``extend`` of no rows writes none, and its index names none."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import (
    CompressedListStorage,
    ConsumingSampler,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    MinSize,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.serving.servers import serving

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage]


class Row(NamedTuple):
    x: object


@tensorclass
class Step:
    x: torch.Tensor


BATCHES = {
    "tensor": lambda n: torch.randn(n, 3),
    "dict": lambda n: {"x": torch.randn(n, 3), "next": {"y": torch.zeros(n)}},
    "array": lambda n: {"x": np.zeros((n, 3), np.float32)},
    "named tuple": lambda n: Row(torch.zeros(n, 2)),
    "tensordict": lambda n: TensorDict({"x": torch.randn(n, 3)}, [n]),
    "tensorclass": lambda n: Step(x=torch.randn(n, 3), batch_size=[n]),
    "list of dicts": lambda n: [{"x": torch.randn(3)} for _ in range(n)],
    "list of tensordicts": lambda n: [TensorDict({"x": torch.randn(3)}, []) for _ in range(n)],
}
OF_TENSORS_ALONE = {"dict", "array", "named tuple"}  # a list takes them apart


def is_none(index, dims=1):
    return index.dtype is torch.int64 and index.shape == ((0,) if dims == 1 else (0, dims))


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("storage", STORAGES)
def test_of_every_kind(storage, kind):
    if kind in OF_TENSORS_ALONE and storage not in (LazyTensorStorage, LazyMemmapStorage):
        pytest.skip("a list has no such batches")
    rb, batch = ReplayBuffer(storage=storage(10), batch_size=2), BATCHES[kind]
    assert is_none(rb.extend(batch(0)))
    assert not rb.initialized or not len(rb)
    assert rb.extend(batch(3)).tolist() == [0, 1, 2]
    assert is_none(rb.extend(batch(0)))
    assert (len(rb), rb.write_count) == (3, 3)
    assert rb.extend(batch(2)).tolist() == [3, 4]


@pytest.mark.parametrize("storage", STORAGES)
def test_of_a_mask_in_a_buffer_of_tensordicts(storage):
    rb = TensorDictReplayBuffer(storage=storage(10), batch_size=2)
    rows = TensorDict({"x": torch.randn(3, 4)}, [3])
    rb.extend(rows)
    assert is_none(rb.extend(rows[torch.zeros(3, dtype=torch.bool)]))
    assert len(rb) == 3


@pytest.mark.parametrize("lane", [None, 1, "each", []])
def test_of_lanes(lane):
    rb = ReplayBuffer(storage=LazyTensorStorage(10, lanes=2))
    rb.extend({"x": torch.zeros(2), "env": torch.arange(2)})
    nothing = {"x": torch.zeros(0), "env": torch.zeros(0, dtype=torch.int64)}
    assert is_none(rb.extend(nothing, lane=lane))
    assert is_none(rb.appender(lane=lane).extend(**nothing))
    assert is_none(rb.extend(nothing, layout="time_first"))
    assert is_none(rb.extend(nothing, lane_key="env"))
    assert len(rb) == 2


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_of_columns(shape):
    rb = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))
    rb.extend(torch.zeros(2, 3))
    assert is_none(rb.extend(torch.zeros(shape)), dims=2)
    assert len(rb) == 6


def test_of_writers_by_rank_and_of_priorities():
    best = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter(rank_key="x"))
    ranked = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4))
    for rb in (best, ranked):
        rows = TensorDict({"x": torch.arange(3.0), "td_error": torch.ones(3)}, [3])
        assert is_none(rb.extend(rows[:0]))
        rb.extend(rows)
        assert is_none(rb.extend(rows[:0]))
        assert is_none(rb.writer.extend(rows[:0]))
        assert len(rb) == 3


def test_of_rows_that_are_used_up_and_of_limits():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=ConsumingSampler(), batch_size=2)
    rb.limit(MinSize(1))
    rb.extend(torch.arange(4))
    rb.sample()
    assert is_none(rb.extend(torch.arange(0), timeout=0))
    assert rb.extend(torch.arange(2)).shape == (2,)


def test_of_transforms_none_is_asked():
    def refuse(batch):
        raise AssertionError(batch)

    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.append_transform(refuse, invert=True)
    assert is_none(rb.extend(torch.zeros(0, 3)))


def test_of_an_ensemble():
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2)]
    rb = ReplayBufferEnsemble(*members, routing_key="member", batch_size=2)
    rows = TensorDict({"member": torch.arange(2), "x": torch.zeros(2)}, [2])
    for some in (rows[:0], rows, rows[:0]):
        assert rb.extend(some)["index"].tolist() == [0] * len(some)
    assert [len(member) for member in members] == [1, 1]


def test_over_a_connection(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "s"), batch_size=2)
    rb.extend({"x": torch.zeros(3)})
    with serving(tmp_path / "s") as server, ReplayBuffer.connect(server.address) as remote:
        assert is_none(remote.extend({"x": torch.zeros(0)}))
        assert remote.extend({"x": torch.zeros(1)}).tolist() == [3]
    rb.close()


@pytest.mark.parametrize("none", [[], ()])
@pytest.mark.parametrize(
    "storage", [*STORAGES, partial(LazyTensorStorage, ndim=2), partial(LazyTensorStorage, lanes=2)]
)
def test_of_a_list_or_tuple_of_nothing(storage, none):
    for make in (ReplayBuffer, TensorDictReplayBuffer, partial(TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0)):
        rb = make(storage=storage(10), batch_size=2)
        dims, rows = rb.storage.ndim, TensorDict({"x": torch.zeros(2, 3)}, [2, 3])
        for data in (None, rows if dims > 1 else rows[0]):
            if data is not None:
                rb.extend(data, lane=None if rb.storage.lanes == 1 else 0)
            before = len(rb)
            assert is_none(rb.extend(none), dims)
            if rb.storage.lanes > 1:
                assert is_none(rb.extend(none, lane=1))
                assert is_none(rb.extend(none, layout="time_first"))
            assert len(rb) == before
    assert is_none(ReplayBuffer(10).extend(none))


def test_one_row_of_nothing_is_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(ValueError, match="add: expected a TensorDict, got list"):
        rb.add([])


@pytest.mark.parametrize("none", [[], ()])
def test_of_nothing_to_an_ensemble_and_over_a_connection(tmp_path, none):
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2)]
    for key in ({}, {"routing_key": "member"}):
        written = ReplayBufferEnsemble(*members, batch_size=2, **key).extend(none)
        assert (written.shape, len(written["index"])) == ((0,), 0)
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "s"), batch_size=2)
    rb.extend({"x": torch.zeros(3)})
    with serving(tmp_path / "s") as server, ReplayBuffer.connect(server.address) as remote:
        assert is_none(remote.extend(none))
    rb.close()


def test_what_is_no_batch_is_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(TypeError, match="expected a batch of rows"):
        rb.extend(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="the same number of rows"):
        rb.extend({"x": torch.zeros(0), "y": torch.zeros(1)})
    assert not rb.initialized or not len(rb)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_rows_without_fields_are_for_lists(storage, buffer):
    rb = buffer(storage=storage(8))
    for write in (
        lambda: rb.extend(TensorDict({}, [4])),
        lambda: rb.add(TensorDict({}, [])),
        lambda: rb.add(TensorDict({"next": TensorDict({}, [])}, [])),
    ):
        with pytest.raises(
            TypeError, match="expected at least one tensor, got a TensorDict.* Add one, or use a ListStorage"
        ):
            write()
    if buffer is ReplayBuffer:
        with pytest.raises(TypeError, match="add: expected at least one tensor, got dict"):
            rb.add({})
    assert not rb.storage.initialized
    kept = buffer(storage=ListStorage(8), batch_size=3)
    kept.extend(TensorDict({}, [4]))
    assert (len(kept), kept.sample().shape) == (4, (3,))
