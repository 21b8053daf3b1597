"""RoundRobinWriter and TensorDictRoundRobinWriter: places, generations, rows by number."""

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    RowError,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    WritePlan,
)

STORAGES = [LazyTensorStorage, ListStorage]


def tracking(storage=LazyTensorStorage, capacity=6, rows=0, **kwargs):
    rb = ReplayBuffer(storage=storage(capacity, **kwargs), writer=RoundRobinWriter(track_generations=True))
    if rows:
        rb.extend(torch.arange(rows))
    return rb


def test_placing_has_no_side_effect():
    rb = tracking(rows=4)
    before = rb.storage.extent()
    for _ in range(3):
        assert rb.writer.place(before, 5, 0, None) == WritePlan(lane=0)
    assert rb.storage.extent() == before
    assert rb.write_count == 4


@pytest.mark.parametrize("storage", STORAGES)
class TestWriteAt:
    def test_the_cursor_stays_and_the_count_advances(self, storage):
        rb = tracking(storage, rows=4)
        written = rb.writer.write_at([1, 3], torch.tensor([10, 30]))
        assert written.tolist() == [1, 3]
        assert torch.stack(list(rb[:])).tolist() == [0, 10, 2, 30]
        assert rb.write_count == 6
        assert rb.add(torch.tensor(4)) == 4

    def test_generations_advance(self, storage):
        rb = tracking(storage, rows=4)
        before = rb.writer.generations_of(torch.arange(4))
        rb.writer.write_at(torch.tensor([2]), torch.tensor([20]))
        after = rb.writer.generations_of(torch.arange(4))
        assert (after > before).tolist() == [False, False, True, False]
        assert after[2] > before.max()

    def test_the_length_grows_to_the_highest_row(self, storage):
        rb = tracking(storage, rows=2)
        rb.writer.write_at([2, 3], torch.tensor([20, 30]))
        assert len(rb) == 4
        assert rb.add(torch.tensor(7)) == 2

    def test_of_a_row_named_twice_the_last_one_stays(self, storage):
        rb = tracking(storage, rows=4)
        rb.writer.write_at([1, 1, 0, 1], torch.tensor([10, 11, 12, 13]))
        assert rb[1] == 13
        assert rb.write_count == 8

    @pytest.mark.parametrize("row", [-1, 6, 100])
    def test_rows_outside_change_nothing(self, storage, row):
        rb = tracking(storage, rows=4)
        with pytest.raises(IndexError):
            rb.writer.write_at([0, row], torch.tensor([10, 11]))
        assert torch.stack(list(rb[:])).tolist() == [0, 1, 2, 3]
        assert rb.write_count == 4

    def test_as_many_rows_as_indices(self, storage):
        rb = tracking(storage, rows=4)
        with pytest.raises(RuntimeError):
            rb.writer.write_at([0, 1, 2], torch.tensor([10, 11]))
        assert torch.stack(list(rb[:])).tolist() == [0, 1, 2, 3]
        assert rb.write_count == 4


def test_a_gap_becomes_zeros():
    rb = tracking(rows=2)
    rb.writer.write_at([4], torch.tensor([40]))
    assert rb[:].tolist() == [0, 1, 0, 0, 40]
    with pytest.raises(RowError):
        rb[5]
    listed = tracking(ListStorage, rows=2)
    with pytest.raises(RuntimeError, match="gap"):
        listed.writer.write_at([4], torch.tensor([40]))


@pytest.mark.parametrize("storage", STORAGES)
class TestGenerations:
    def test_grow_with_every_write(self, storage):
        rb = tracking(storage, rows=6)
        numbers = rb.writer.generations_of(torch.arange(6))
        assert numbers.dtype is torch.int64
        assert numbers.tolist() == sorted(set(numbers.tolist()))
        rb.extend(torch.arange(2))
        again = rb.writer.generations_of(torch.arange(6))
        assert (again > numbers).tolist() == [True, True, False, False, False, False]
        assert set(again[:2].tolist()).isdisjoint(numbers.tolist())

    def test_stay_with_edits(self, storage):
        rb = tracking(storage, rows=6)
        before = rb.writer.generations_of(torch.arange(6))
        rb[3] = torch.tensor(30)
        assert torch.equal(rb.writer.generations_of(torch.arange(6)), before)
        rb.writer.write_at([3], torch.tensor([31]))
        assert (rb.writer.generations_of(torch.arange(6)) > before).tolist() == [row == 3 for row in range(6)]

    def test_do_not_repeat_after_empty(self, storage):
        rb = tracking(storage, rows=6)
        before = rb.writer.generations_of(torch.arange(6))
        rb.empty()
        assert rb.writer.generations_of(torch.arange(6)).tolist() == [-1] * 6
        rb.extend(torch.arange(6))
        assert rb.writer.generations_of(torch.arange(6)).min() > before.max()

    def test_of_rows_that_were_never_written(self, storage):
        rb = tracking(storage, rows=2)
        numbers = rb.writer.generations_of([0, 5, -1, 6, 1000])
        assert (numbers[1:] == -1).all()
        assert numbers[0] >= 0

    def test_keep_the_shape_of_the_index(self, storage):
        rb = tracking(storage, rows=6)
        assert rb.writer.generations_of(torch.tensor([[0, 1], [2, 3]])).shape == (2, 2)
        assert rb.writer.generations_of(3).shape == ()

    def test_two_buffers_on_a_storage_agree(self, storage):
        rb = tracking(storage, rows=6)
        other = ReplayBuffer(storage=rb.storage, writer=RoundRobinWriter(track_generations=True))
        other.extend(torch.arange(3))
        assert torch.equal(*(b.writer.generations_of(torch.arange(6)) for b in (rb, other)))

    def test_not_tracked(self, storage):
        rb = ReplayBuffer(storage=storage(6))
        rb.extend(torch.arange(6))
        assert rb.writer.generations_of([0, 1]).tolist() == [-1, -1]
        assert not rb.writer.tracks_generations


def test_generations_in_info():
    rb = tracking(rows=6)
    _, info = rb.sample(20, return_info=True)
    assert torch.equal(info["index_generation"], rb.writer.generations_of(info["index"]))
    rb.add(torch.tensor(0))
    rows = info["index"]
    changed = rb.writer.generations_of(rows) != info["index_generation"]
    assert torch.equal(changed, rows == 0)
    plain = ReplayBuffer(storage=rb.storage)
    assert "index_generation" not in plain.sample(20, return_info=True)[1]


def test_generations_of_columns():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), writer=RoundRobinWriter(track_generations=True))
    index = rb.extend(torch.zeros(2, 3))
    numbers = rb.writer.generations_of(index)
    assert numbers.shape == (6,)
    assert numbers.tolist() == sorted(set(numbers.tolist()))
    assert rb.writer.generations_of(torch.tensor([[3, 0], [2, 1]])).tolist() == [-1, numbers[5]]
    _, info = rb.sample(10, return_info=True)
    assert torch.equal(info["index_generation"], rb.writer.generations_of(torch.stack(info["index"], -1)))


@pytest.mark.parametrize("storage", STORAGES)
def test_verbs_of_torchrl(storage):
    writer = RoundRobinWriter()
    with pytest.raises(RuntimeError, match="registered storage"):
        writer.add(torch.tensor(1))
    assert writer.write_count == 0
    rb = ReplayBuffer(storage=storage(5), writer=writer)
    assert writer.add(torch.tensor(1)) == 0
    assert writer.extend(torch.tensor([2, 3])).tolist() == [1, 2]
    assert writer.write_count == rb.write_count == 3
    assert torch.stack(list(rb[:])).tolist() == [1, 2, 3]
    other = storage(5)
    writer.register_storage(other)
    assert writer.add(torch.tensor(9)) == 0
    assert len(other) == 1
    assert len(rb) == 3


def test_writes_by_the_writer_skip_transforms():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.append_transform(lambda x: x + 100, invert=True)
    rb.add(torch.tensor(1))
    rb.writer.add(torch.tensor(1))
    assert rb[:].tolist() == [101, 1]


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
class TestTheClass:
    def test_stateless(self, writer):
        assert writer().state_dict() == {}
        writer().load_state_dict({})
        with pytest.raises(KeyError, match="_cursor"):
            writer().load_state_dict({"_cursor": 3})

    def test_configuration(self, writer):
        one = writer(track_generations=True)
        assert one.tracks_generations
        assert repr(one) == f"{writer.__name__}(track_generations=True)"
        assert type(one)(**one.config()).tracks_generations

    def test_later_arguments(self, writer):
        writer(compilable=False)
        writer(compilable=True)
        with pytest.raises(TypeError, match=rf"{writer.__name__}: compilable: expected True or False.*got \[1\]"):
            writer(compilable=[1])
        with pytest.raises(TypeError, match="other"):
            writer(other=1)


# ---- rows read back by number --------------------------------------------------------------------------------------------


def rows_of(n):
    return TensorDict({"a": torch.arange(n) * 10}, batch_size=[n])


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", STORAGES)
def test_tensordict_writers_say_the_row(storage, buffer):
    rb = buffer(storage=storage(5), writer=TensorDictRoundRobinWriter())
    rb.extend(rows_of(7))
    assert rb[1]["index"] == 1
    assert rb[1]["a"] == 60
    assert rb[-1]["index"] == 4
    assert rb[:]["index"].tolist() == [0, 1, 2, 3, 4]
    assert rb[1:3]["index"].tolist() == [1, 2]
    assert rb[[4, 0]]["index"].tolist() == [4, 0]
    assert rb["index"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("storage", STORAGES)
def test_other_writers_do_not(storage):
    rb = TensorDictReplayBuffer(storage=storage(5), writer=RoundRobinWriter())
    rb.extend(rows_of(5))
    assert list(rb[1].keys()) == ["a"]
    assert list(rb[:].keys()) == ["a"]
    assert "index" in rb.sample(2).keys()


def test_rows_with_batch_dimensions_repeat_their_number():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(TensorDict({"a": torch.zeros(4, 3, 2)}, batch_size=[4, 3]))
    assert rb[2]["index"].tolist() == [2, 2, 2]
    assert rb[1:3]["index"].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert rb[1:3].batch_size == (2, 3)
