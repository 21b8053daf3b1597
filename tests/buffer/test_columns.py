"""Storages with ndim > 1: slots of several columns, time first in memory, ``[*columns, time]`` outside."""

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.components import Listener


def grid(columns, start, stop):
    """``[columns, time]``: hundreds say the column, the rest the time."""
    return 100 * torch.arange(columns)[:, None] + torch.arange(start, stop)


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage])
def storage(request):
    return request.param


@pytest.fixture
def rb(storage):
    """Three columns, four of five slots."""
    rb = TensorDictReplayBuffer(storage=storage(15, ndim=2))
    rb.extend(TensorDict({"a": grid(3, 0, 4), "b": {"c": torch.zeros(3, 4, 2)}}, batch_size=[3, 4]))
    return rb


def test_rows_written_in_storage_order(storage):
    rb = ReplayBuffer(storage=storage(15, ndim=2))
    index = rb.extend(grid(3, 0, 2))
    assert index.dtype is torch.int64
    assert index.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert rb.add(torch.tensor([2, 102, 202])).tolist() == [[2, 0], [2, 1], [2, 2]]
    assert torch.equal(rb[:], grid(3, 0, 3))
    assert (len(rb), rb.write_count) == (9, 3)
    assert rb.dim_extend == 1
    assert rb.storage.shape == (3, 3)
    assert rb.lanes == 1


def test_capacity_is_rounded_up_to_whole_slots(storage):
    rb = ReplayBuffer(100, storage=storage(100, ndim=2))
    rb.extend(grid(3, 0, 2))
    assert rb.storage.max_size == 102
    assert rb.stats()["capacity"] == 102
    assert "asked for=100" in repr(rb)


def test_the_ring_moves_by_slots(rb):
    index = rb.extend(TensorDict({"a": grid(3, 4, 6), "b": {"c": torch.ones(3, 2, 2)}}, batch_size=[3, 2]))
    assert index.tolist() == [[4, 0], [4, 1], [4, 2], [0, 0], [0, 1], [0, 2]]
    assert rb["a"].tolist() == [[5, 1, 2, 3, 4], [105, 101, 102, 103, 104], [205, 201, 202, 203, 204]]
    assert (len(rb), rb.write_count) == (15, 6)


def test_more_slots_than_fit(storage):
    rb = ReplayBuffer(storage=storage(6, ndim=2))
    index = rb.extend(grid(2, 0, 8))
    assert len(index) == 16
    assert rb[:].tolist() == [[6, 7, 5], [106, 107, 105]]
    assert rb.write_count == 8


def test_three_dimensions(storage):
    data = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    rb = ReplayBuffer(storage=storage(60, ndim=3))
    index = rb.extend(data)
    assert index.shape == (24, 3)
    assert index[:7].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2], [1, 0, 0]]
    assert torch.equal(rb[:], data)
    batch, info = rb.sample(50, return_info=True)
    time, first, second = info["index"]
    assert torch.equal(batch, data[first, second, time])
    assert rb.storage.shape == (4, 2, 3)


def test_samples_are_rows_with_their_coordinates(rb):
    batch, info = rb.sample(600, return_info=True)
    time, column = info["index"]
    assert isinstance(info["index"], tuple)
    assert torch.equal(batch["a"], 100 * column + time)
    assert batch["index"].shape == (600, 2)
    assert torch.equal(batch["index"], torch.stack([time, column], -1))
    assert batch.batch_size == (600,)
    assert len(set(batch["a"].tolist())) == 12


def test_samples_without_replacement(storage):
    rb = ReplayBuffer(storage=storage(15, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=5)
    rb.extend(grid(3, 0, 4))
    assert sorted(torch.cat(list(rb)).tolist()) == sorted(grid(3, 0, 4).flatten().tolist())


def test_generations_are_one_per_row(storage):
    rb = TensorDictReplayBuffer(storage=storage(15, ndim=2), writer=RoundRobinWriter(track_generations=True))
    rb.extend(TensorDict({"a": grid(3, 0, 4)}, batch_size=[3, 4]))
    batch, info = rb.sample(20, return_info=True)
    assert batch["index_generation"].shape == info["index_generation"].shape == (20,)


INDICES = [1, -1, slice(None), slice(0, 2), slice(None, None, 2), [2, 0], (1, 2), (slice(None), 3), (slice(1, 3), -1)]
INDICES += [torch.tensor([True, False, True]), (torch.tensor([0, 2]), torch.tensor([3, 1])), ..., (..., 2), range(2)]


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_reading_is_in_the_layout_of_extend(rb, index):
    as_torch = list(index) if isinstance(index, range) else index
    expected = grid(3, 0, 4)[as_torch]
    found = rb[index]
    assert torch.equal(found["a"], expected)
    assert found.batch_size == expected.shape
    assert found["b", "c"].shape == (*expected.shape, 2)
    slots = torch.arange(4).expand(3, 4)[as_torch]
    assert torch.equal(found["index"], slots)


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_assigning_is_too(rb, index):
    as_torch = list(index) if isinstance(index, range) else index
    expected = grid(3, 0, 4)
    shape = expected[as_torch].shape
    new = torch.arange(1000, 1000 + shape.numel()).reshape(shape)
    expected[as_torch] = new
    rb[index] = TensorDict({"a": new, "b": {"c": torch.ones(*shape, 2)}}, batch_size=shape)
    assert torch.equal(rb["a"], expected)
    assert rb["b", "c"].sum() == 2 * shape.numel()
    assert (len(rb), rb.write_count) == (12, 4)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"a": torch.zeros(4, dtype=torch.int64)}, KeyError),
        ({"a": torch.zeros(4), "b": {"c": torch.ones(4, 2)}}, RuntimeError),
        ({"a": torch.zeros(4, dtype=torch.int64), "b": {"c": torch.ones(4, 3)}}, RuntimeError),
        ({"a": torch.zeros(1, dtype=torch.int64), "b": {"c": torch.ones(1, 2)}}, RuntimeError),
        ({"a": torch.zeros(4, dtype=torch.int64), "b": {"c": torch.ones(4, 2)}, "d": torch.ones(4)}, KeyError),
    ],
    ids=["missing", "dtype", "shape", "broadcast", "unknown"],
)
def test_what_is_assigned_is_checked(rb, wrong, kind):
    with pytest.raises(kind):
        rb[0] = TensorDict(wrong, batch_size=[len(wrong["a"])])
    assert torch.equal(rb["a"], grid(3, 0, 4))
    assert not rb["b", "c"].any()


@pytest.mark.parametrize("index", [3, -4, (0, 4), (slice(None), 4), [0, 3], (0, 0, 0, 0, 0)], ids=repr)
def test_out_of_range(rb, index):
    with pytest.raises(IndexError):
        rb[index]
    with pytest.raises(IndexError):
        rb[index] = rb[0]


def test_fields(rb):
    assert torch.equal(rb["a"], grid(3, 0, 4))
    rb["a"] = grid(3, 10, 14)
    assert torch.equal(rb["a"], grid(3, 10, 14))
    with pytest.raises(KeyError):
        rb["z"] = grid(3, 0, 4)
    with pytest.raises(RuntimeError):
        rb["a"] = grid(3, 0, 3)
    rb.set_("a", grid(3, 0, 4))
    assert torch.equal(rb["a"], grid(3, 0, 4))
    rb.set_at_("a", torch.tensor([7, 8, 9]), (slice(None), 2))
    assert rb["a"][:, 2].tolist() == [7, 8, 9]
    rb.update_({"a": grid(3, 20, 24), "b": {"c": torch.ones(3, 4, 2)}})
    assert torch.equal(rb["a"], grid(3, 20, 24))
    assert rb["b", "c"].all()


def test_edits_are_heard(storage):
    rb = ReplayBuffer(storage=storage(15, ndim=2), sampler=Listener())
    rb.extend(grid(3, 0, 4))
    rb.sampler.heard.clear()
    before = rb.storage.tickets_of(torch.arange(12))
    rb[1] = torch.arange(4)
    assert sorted(rb.sampler.heard[0][0]) == [1, 4, 7, 10]
    assert (rb.storage.tickets_of(torch.arange(12)) != before).nonzero().flatten().tolist() == [1, 4, 7, 10]


def test_views_and_copies(storage):
    rb = ReplayBuffer(storage=storage(15, ndim=2))
    rb.extend(grid(3, 0, 4))
    view, copy = rb[:], rb[[0, 1, 2]]
    rb[1] = torch.tensor([7, 7, 7, 7])
    assert view[1].tolist() == [7, 7, 7, 7]
    assert copy[1].tolist() == [100, 101, 102, 103]


def test_other_columns_are_refused(rb):
    for columns in (2, 4):
        with pytest.raises(RuntimeError, match=rf"columns.*3.*{columns}"):
            rb.extend(
                TensorDict({"a": grid(columns, 0, 2), "b": {"c": torch.zeros(columns, 2, 2)}}, batch_size=[columns, 2])
            )
    with pytest.raises(RuntimeError):
        rb.add(TensorDict({"a": torch.zeros(2, dtype=torch.int64), "b": {"c": torch.zeros(2, 2)}}, batch_size=[2]))
    assert (len(rb), rb.write_count) == (12, 4)


def test_too_few_dimensions(storage):
    rb = ReplayBuffer(storage=storage(15, ndim=2))
    with pytest.raises(RuntimeError, match="leading dimensions"):
        rb.extend(torch.zeros(5))
    with pytest.raises(RuntimeError, match="leading dimensions"):
        rb.add(torch.tensor(1.0))
    assert not rb.storage.initialized


def test_existing_data_is_time_first():
    data = grid(3, 0, 4).t().contiguous()
    rb = ReplayBuffer(storage=TensorStorage(data, ndim=2))
    assert len(rb) == 12
    assert torch.equal(rb[:], grid(3, 0, 4))
    rb[2] = torch.tensor([1, 2, 3, 4])
    assert data[:, 2].tolist() == [1, 2, 3, 4]
    batch, info = rb.sample(20, return_info=True)
    assert torch.equal(batch, data[info["index"]])


def test_collating_and_transforms(storage):
    rb = ReplayBuffer(storage=storage(15, ndim=2), collate_fn=lambda x: x + 1000, transform=lambda x: x * 2)
    rb.extend(grid(3, 0, 4))
    assert torch.equal(rb[:], 2 * (grid(3, 0, 4) + 1000))
    assert torch.equal(rb[0], 2 * grid(3, 0, 4)[0])
    assert rb.sample(4).min() >= 2000


def test_reopened(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(15, ndim=2, scratch_dir=tmp_path))
    rb.extend(grid(3, 0, 4))
    rb.close()
    rb = ReplayBuffer.open(tmp_path)
    assert torch.equal(rb[:], grid(3, 0, 4))
    assert rb.add(torch.tensor([4, 104, 204])).tolist() == [[4, 0], [4, 1], [4, 2]]
    assert rb.storage.ndim == 2


def test_before_the_first_write(storage):
    rb = ReplayBuffer(storage=storage(15, ndim=2))
    assert (len(rb), rb.write_count, rb.stats()["size"]) == (0, 0, 0)
    for read in (lambda: rb[:], lambda: rb[0], lambda: rb["a"]):
        with pytest.raises(RuntimeError):
            read()
    rb.empty()
