"""Custom samplers and writers: the protocol, and nothing else."""

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    Draw,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    ReplayBuffer,
    RoundRobinWriter,
    RowError,
    TensorDictReplayBuffer,
    WritePlan,
    WriterStalled,
)
from engram._support import native
from tests.components import Backwards, Listener, Newest
from tests.waiting import Limit

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]


@pytest.fixture(params=STORAGES)
def storage(request):
    return request.param


# ---- samplers ------------------------------------------------------------------------------------------------------------------


class TestListening:
    def test_to_every_write_through_any_buffer(self, storage):
        rb = ReplayBuffer(storage=storage(5), sampler=Listener())
        other = ReplayBuffer(storage=rb.storage)
        third = TensorDictReplayBuffer(storage=rb.storage, sampler=Listener()) if storage is ListStorage else other
        first, batch = torch.tensor(0), torch.arange(1, 4)
        rb.add(first)
        other.extend(batch)
        other.writer.add(torch.tensor(4))
        rb.writer.write_at([1, 0], torch.tensor([10, 11]))
        rb[2] = torch.tensor(20)
        other[3:5] = torch.tensor([30, 40])
        other.empty()
        rb.add(torch.tensor(5))
        heard = [[0], [1, 2, 3], [4], [1, 0], [2], [3, 4], None, [0]]
        assert [rows for rows, _ in rb.sampler.heard] == heard
        assert torch.equal(rb.sampler.heard[0][1], first)
        assert torch.equal(rb.sampler.heard[1][1], batch)
        if third is not other:
            assert [rows for rows, _ in third.sampler.heard] == heard

    def test_after_the_fact(self, storage):
        """What it is told of can be read, and is counted."""
        seen = []

        class Reading(Listener):
            def observe(self, write, data):
                seen.append((len(rb), [int(rb[row]) for row in write.rows.tolist()]))

        rb = ReplayBuffer(storage=storage(5), sampler=Reading())
        rb.extend(torch.tensor([7, 8]))
        rb.add(torch.tensor(9))
        assert seen == [(2, [7, 8]), (3, [9])]

    def test_not_to_refused_writes(self, storage):
        rb = ReplayBuffer(storage=storage(5), sampler=Listener())
        assert rb.extend(torch.zeros(0)).tolist() == []
        with pytest.raises(RowError):
            rb.add(torch.tensor(1), lane=3)
        with pytest.raises((RowError, RuntimeError)):
            rb[3] = torch.tensor(1)
        assert rb.sampler.heard == []

    def test_tickets_of_writes(self, storage):
        tickets = []

        class Noting(Listener):
            def observe(self, write, data):
                tickets.append((write.rows.clone(), write.tickets))

        rb = ReplayBuffer(storage=storage(5), sampler=Noting(), writer=RoundRobinWriter(track_generations=True))
        rb.add(torch.tensor(0))
        rb.extend(torch.arange(1, 4))
        rb[1] = torch.tensor(10)
        assert torch.equal(rb.writer.generations_of(tickets[0][0]), tickets[0][1])
        edited, number = tickets[2]  # of an edit, which leaves the generation
        assert torch.equal(rb.storage.tickets_of(edited), number)
        assert torch.equal(rb.writer.generations_of(edited), tickets[1][1][:1])
        assert (torch.cat([numbers for _, numbers in tickets]).diff() > 0).all()

    def test_rows_that_a_large_batch_overwrote(self, storage):
        rb = ReplayBuffer(storage=storage(3), sampler=Listener())
        rb.extend(torch.arange(7))
        assert rb.sampler.heard[0][0] == [0, 1, 2, 0, 1, 2, 0]

    def test_ends_when_it_is_swapped_or_gone(self, storage):
        rb = ReplayBuffer(storage=storage(3), sampler=Listener())
        old = rb.set_sampler(Listener())
        rb.add(torch.tensor(1))
        assert (len(old.heard), len(rb.sampler.heard)) == (0, 1)
        other = ReplayBuffer(storage=rb.storage, sampler=Listener())
        gone = other.sampler
        del other
        rb.add(torch.tensor(1))
        assert gone.heard == []
        assert len(rb.sampler.heard) == 2

    def test_data_is_what_is_stored_not_what_was_given(self, storage):
        rb = ReplayBuffer(storage=storage(3), sampler=Listener())
        rb.append_transform(lambda x: x + 100, invert=True)
        rb.extend(torch.tensor([1, 2]))
        rb.add(torch.tensor(3))
        assert rb.sampler.heard[0][1].tolist() == [101, 102]
        assert int(rb.sampler.heard[1][1]) == 103


def test_it_is_asked_once_per_draw_with_the_extent_and_a_key(storage):
    rb = ReplayBuffer(storage=storage(5), sampler=Listener(), generator=torch.Generator().manual_seed(1))
    rb.extend(torch.arange(3))
    rb.sample(2)
    rb.sample(4)
    (extent, n, key), (again, m, other) = rb.sampler.asked
    assert extent == rb.storage.extent() == again
    assert (n, m) == (2, 4)
    assert key != other
    assert all(0 <= k < 1 << 64 for k in (key, other))
    assert len(rb.sampler.asked) == 2
    repeated = ReplayBuffer(storage=rb.storage, sampler=Listener(), generator=torch.Generator().manual_seed(1))
    repeated.sample(9)
    assert repeated.sampler.asked[0][2] == key


def test_it_is_not_asked_when_there_is_nothing(storage):
    rb = ReplayBuffer(storage=storage(5), sampler=Listener())
    with pytest.raises(NoSampleable):
        rb.sample(2)
    assert not rb.can_sample(2)
    assert rb.sampler.asked == []
    rb.extend(torch.arange(3))
    assert rb.can_sample(2)


def test_its_rows_and_its_info_are_what_the_user_gets(storage):
    extra = {"weight": torch.tensor([1.0, 2.0, 3.0]), "name": "mine"}
    rb = ReplayBuffer(storage=storage(5), sampler=Listener(lambda *_: Draw(torch.tensor([3, 0, 3]), info=extra)))
    rb.extend(torch.arange(5) * 10)
    batch, info = rb.sample(2, return_info=True)
    assert batch.tolist() == [30, 0, 30]
    assert info["index"].tolist() == [3, 0, 3]
    assert info["weight"] is extra["weight"]
    assert info["name"] == "mine"
    assert set(extra) == {"weight", "name"}


@pytest.mark.parametrize("rows", [[5], [-1], [0, 100], [-6]])
def test_rows_outside_the_store(storage, rows):
    rb = ReplayBuffer(storage=storage(5), sampler=Listener(lambda *_: Draw(torch.tensor(rows))))
    rb.extend(torch.arange(5))
    with pytest.raises(RowError):
        rb.sample(1)


def test_the_fifteen_line_sampler(storage):
    rb = ReplayBuffer(storage=storage(5), sampler=Newest(), batch_size=2)
    rb.extend(torch.arange(4))
    assert rb.sample().tolist() == [2, 3]
    rb.extend(torch.arange(4, 7))
    assert rb.sample().tolist() == [5, 6]
    state = copy.deepcopy(rb.sampler.state_dict())
    rb.empty()
    rb.add(torch.tensor(9))
    assert rb.sample().tolist() == [9]
    other = Newest()
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_iteration_is_endless_without_a_flag():
    rb = ReplayBuffer(5, sampler=Newest(), batch_size=2)
    rb.extend(torch.arange(4))
    batches = iter(rb)
    assert [next(batches).tolist() for _ in range(9)] == [[2, 3]] * 9
    assert rb.next().tolist() == [2, 3]


def test_optional_attributes():
    class Passes(Newest):
        """A sampler may say when it ran out, and what it can draw."""

        ran_out = True
        drop_last = True

        def draw(self, extent, batch_size, key):
            self.ran_out = True
            return super().draw(extent, batch_size, key)

        def can_sample(self, storage, batch_size):
            return batch_size == 2

    with pytest.raises(ValueError, match="Passes.*drop_last"):
        ReplayBuffer(5, sampler=Passes())
    rb = ReplayBuffer(5, sampler=Passes(), batch_size=2)
    rb.extend(torch.arange(4))
    assert len(list(rb)) == 1
    assert rb.can_sample()
    assert not rb.can_sample(3)


def test_iteration_clears_the_flag():
    class EverySecond(Newest):
        ran_out = False
        draws = 0

        def draw(self, extent, batch_size, key):
            self.draws += 1
            self.ran_out |= self.draws % 2 == 0
            return super().draw(extent, batch_size, key)

    rb = ReplayBuffer(5, sampler=EverySecond(), batch_size=2)
    rb.extend(torch.arange(4))
    assert [len(list(rb)) for _ in range(3)] == [2, 2, 2]


# ---- tickets: rows that moved since they were chosen ---------------------------------------------------------------------------------


class Remembering:
    """Draws rows with the tickets it heard of; of the rows in ``stale`` it has old ones at the first try."""

    def __init__(self, stale=()):
        self.tickets = {}
        self.stale = set(stale)
        self.tries = []

    def draw(self, extent, batch_size, key):
        first = not self.tries
        chosen = list(range(batch_size)) if first else [4] * batch_size
        self.tries.append((batch_size, key))
        tickets = [self.tickets[row] - (first and row in self.stale) for row in chosen]
        return Draw(
            torch.tensor(chosen), torch.tensor(tickets), {"chosen_at_try": torch.full((batch_size,), len(self.tries))}
        )

    def observe(self, write, data):
        if write is not None:
            self.tickets.update(zip(write.rows.tolist(), write.tickets.tolist(), strict=True))

    def update_priority(self, index, priority, *, generation=None):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


@pytest.mark.parametrize("tracks", [False, True])
def test_moved_rows_are_drawn_again(storage, tracks):
    rb = ReplayBuffer(
        storage=storage(5), sampler=Remembering([1, 3]), writer=RoundRobinWriter(track_generations=tracks)
    )
    rb.extend(torch.arange(5) * 10)
    batch, info = rb.sample(4, return_info=True)
    assert info["index"].tolist() == [0, 4, 2, 4]
    assert batch.tolist() == [0, 40, 20, 40]
    assert [n for n, _ in rb.sampler.tries] == [4, 2]
    (_, key), (_, another) = rb.sampler.tries
    assert key != another
    assert info["chosen_at_try"].tolist() == [1, 2, 1, 2]
    if tracks:
        assert torch.equal(info["index_generation"], rb.writer.generations_of(info["index"]))


def test_in_a_tensordict_buffer(storage):
    rb = TensorDictReplayBuffer(storage=storage(5), sampler=Remembering([1]))
    rb.extend(TensorDict({"a": torch.arange(5) * 10, "b": {"c": torch.arange(5)}}, batch_size=[5]))
    sample = rb.sample(3)
    assert sample["index"].tolist() == [0, 4, 2]
    assert sample["a"].tolist() == [0, 40, 20]
    assert sample["b", "c"].tolist() == [0, 4, 2]
    assert sample["chosen_at_try"].tolist() == [1, 2, 1]


def test_redraws_ask_the_generator_only_once(storage):
    """So that a reproducible run does not depend on who moved when."""

    def keys(stale):
        rb = ReplayBuffer(storage=storage(5), sampler=Remembering(stale), generator=torch.Generator().manual_seed(1))
        rb.extend(torch.arange(5))
        rb.sample(3)
        rb.sampler.stale.clear()
        rb.sample(3)
        return rb.sampler.tries[-1][1]

    assert keys([]) == keys([0, 1])


def test_a_row_that_always_moves(storage, monkeypatch):
    monkeypatch.setattr(native, "wait_limit", lambda: 0.05)

    def hopeless(extent, batch_size, key):
        return Draw(torch.full((batch_size,), 2), torch.full((batch_size,), 999_999))

    rb = ReplayBuffer(storage=storage(5), sampler=Listener(hopeless))
    rb.extend(torch.arange(5))
    with pytest.raises(WriterStalled, match="sample: row 2 "):
        rb.sample(1)
    assert isinstance(WriterStalled("x"), TimeoutError)


def test_a_buffer_that_was_emptied_meanwhile(storage):
    def empties(extent, batch_size, key):
        rb.empty()
        return Draw(torch.zeros(batch_size, dtype=torch.int64))

    rb = ReplayBuffer(storage=storage(5), sampler=Listener(empties))
    rb.extend(torch.arange(5))
    with pytest.raises((NoSampleable, RowError)):
        rb.sample(1)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
class TestRowsOfTheDead:
    """That become void between the look at what is live and the read."""

    @pytest.fixture
    def rb(self, storage, monkeypatch):
        rb = ReplayBuffer(storage=storage(5), sampler=Listener(lambda *_: Draw(torch.tensor([1, 2, 2]))))
        rb.extend(torch.arange(5))
        tickets = rb.storage.store.control_memory[1].view(torch.int64)
        read = rb.storage.read

        def dies(*arguments):
            tickets[2] |= 3
            return read(*arguments)

        monkeypatch.setattr(rb.storage, "read", dies)
        limit = Limit(20)
        yield rb
        limit.check("going on")

    def test_by_number(self, rb):
        with pytest.raises(RowError, match="row 2 is not live any more"):
            rb[[1, 2]]

    def test_drawn(self, rb):
        batch, info = rb.sample(3, return_info=True)
        assert batch.tolist() == info["index"].tolist()
        assert batch[0] == 1
        assert 2 not in batch


# ---- writers -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
class TestWriters:
    def test_place_rows(self, storage):
        rb = ReplayBuffer(storage=storage(5), writer=Backwards())
        assert rb.add(torch.tensor(1)) == 4
        assert rb.extend(torch.tensor([2, 3])).tolist() == [3, 2]
        assert rb[:].tolist() == [0, 0, 3, 2, 1]  # the length is that of the highest row
        assert rb.write_count == 3

    def test_are_asked_with_the_extent_the_count_the_lane_and_the_data(self, storage):
        rb = ReplayBuffer(storage=storage(6, lanes=2), writer=Backwards())
        batch = torch.tensor([2, 3])
        rb.extend(batch, lane=1)
        extent, n, lane, data = rb.writer.asked[0]
        assert (extent.capacity, extent.filled) == (6, (0, 0))
        assert (n, lane) == (2, 1)
        assert data is batch
        rb.on_lane(1).add(torch.tensor(3))
        assert rb.writer.asked[1][1:3] == (1, 1)

    def test_refusing_changes_nothing(self, storage):
        rb = ReplayBuffer(storage=storage(3), writer=Backwards())
        with pytest.raises(RuntimeError, match="no room"):
            rb.extend({"a": torch.arange(4)})
        assert not rb.storage.initialized
        rb.extend({"a": torch.arange(2)})
        with pytest.raises(RuntimeError, match="no room"):
            rb.extend({"a": torch.arange(2)})
        assert rb["a"].tolist() == [0, 1, 0]
        assert rb.write_count == 2

    @pytest.mark.parametrize("rows", [[0], [0, 1, 2], [[0, 1]]])
    def test_another_number_of_places(self, storage, rows):
        class Wrong(Backwards):
            def place(self, extent, n, lane, data):
                return WritePlan(rows=torch.tensor(rows))

        rb = ReplayBuffer(storage=storage(3), writer=Wrong())
        with pytest.raises(RuntimeError, match="2"):
            rb.extend(torch.arange(2))
        assert (len(rb), rb.write_count) == (0, 0)

    @pytest.mark.parametrize("row", [-1, 3, 100])
    def test_places_outside(self, storage, row):
        class Wrong(Backwards):
            def place(self, extent, n, lane, data):
                return WritePlan(rows=torch.tensor([0, row]))

        rb = ReplayBuffer(storage=storage(3), writer=Wrong())
        with pytest.raises(RowError):
            rb.extend(torch.arange(2))
        assert (len(rb), rb.write_count) == (0, 0)

    def test_lanes(self, storage):
        class Alternating(Backwards):
            def place(self, extent, n, lane, data):
                return WritePlan(lane=torch.arange(n) % 2)

        rb = ReplayBuffer(storage=storage(6, lanes=2), writer=Alternating())
        assert rb.extend(torch.arange(4)).tolist() == [0, 3, 1, 4]
        assert rb.add(torch.tensor(9)) == 2


def test_in_a_list():
    rb = ReplayBuffer(3, writer=type("Ring", (), {"place": lambda *_: WritePlan(lane=0)}))
    assert rb.extend(["a", "b"]).tolist() == [0, 1]

    class Overwrites:
        def place(self, extent, n, lane, data):
            return WritePlan(rows=torch.arange(n))

    rb.set_writer(Overwrites())
    assert rb.extend(["c", "d", "e"]).tolist() == [0, 1, 2]
    assert rb.storage.get(slice(None)) == ["c", "d", "e"]

    class TooFew:
        def place(self, extent, n, lane, data):
            return WritePlan(rows=torch.arange(n - 1))

    rb.set_writer(TooFew())
    with pytest.raises(RuntimeError, match="2"):
        rb.extend(["x", "y"])
    assert rb.storage.get(slice(None)) == ["c", "d", "e"]
    assert rb.write_count == 5


def test_a_writer_may_refine_the_ring(storage):
    """``place`` of a subclass is asked for single rows too."""

    class EverySecond(RoundRobinWriter):
        def place(self, extent, n, lane, data):
            return WritePlan(rows=2 * torch.arange(n))

    rb = ReplayBuffer(storage=LazyTensorStorage(9), writer=EverySecond())
    assert rb.add(torch.tensor(1)) == 0
    assert rb.extend(torch.tensor([2, 3])).tolist() == [0, 2]
    assert rb.writer.extend(torch.tensor([4, 5])).tolist() == [0, 2]


def test_a_sampler_may_refine_the_uniform_one():
    from engram import RandomSampler

    class FirstRow(RandomSampler):
        def draw(self, extent, batch_size, key):
            return Draw(torch.zeros(batch_size, dtype=torch.int64))

    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=FirstRow())
    rb.extend(torch.arange(9))
    assert rb.sample(5).tolist() == [0] * 5


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_batch_that_no_memory_holds_is_an_error(storage):
    rb = ReplayBuffer(storage=storage(4))
    rb.extend([torch.zeros(1 << 18) for _ in range(2)])
    for n in (1 << 44, 1 << 61):
        with pytest.raises((MemoryError, ValueError)):
            rb.sample(n)
    assert len(rb.sample(3)) == 3


def chosen(rows):
    return Listener(lambda extent, batch_size, key: Draw(rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_rows_of_any_integers_are_the_rows_meant(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=chosen(torch.tensor([1, 0, 3], dtype=dtype)))
    rb.extend(torch.arange(10))
    assert rb.sample(3).tolist() == [1, 0, 3]


def test_rows_that_are_no_integers_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=chosen(torch.tensor([1.0, 0.0])))
    rb.extend(torch.arange(10))
    with pytest.raises(TypeError, match="int64 rows"):
        rb.sample(2)


class Fields(Listener):
    reads = ("a",)

    def draw(self, extent, batch_size, key, fields):
        return super().draw(extent, batch_size, key)


@pytest.mark.parametrize("kind", [Listener, Fields])
@pytest.mark.parametrize(
    ("drawn", "got"),
    [
        (np.arange(2), "ndarray"),
        (torch.arange(2), "Tensor"),
        (None, "NoneType"),
        (Draw(np.arange(2)), "ndarray"),
        (Draw([0, 1]), "list"),
        (Draw(torch.arange(2), np.arange(2)), "ndarray"),
        (Draw(Draw(torch.arange(2)).index), "builtin_function_or_method"),
    ],
)
def test_a_draw_that_is_none_is_named(kind, drawn, got):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=kind(lambda *_: drawn))
    rb.extend({"a": torch.arange(10)})
    says = rf"^sample: {kind.__name__}\.draw: expected a Draw .*Draw\(rows, tickets=None, info={{}}\), got {got}\. Return Draw"
    with pytest.raises(TypeError, match=says):
        rb.sample(2)


def test_methods_that_are_missing_are_named():
    class Half:
        def draw(self, extent, batch_size, key): ...
        def state_dict(self): ...

    for given, missing in (
        ({"sampler": Half()}, r"got Half\. It has no observe, update_priority, load_state_dict\.$"),
        ({"sampler": Half}, r"got one that made a Half\. It has no observe, "),
        ({"sampler": 3}, r"got int\.$"),
        ({"storage": []}, r"got list\.$"),
    ):
        with pytest.raises(TypeError, match=missing):
            ReplayBuffer(**{"storage": LazyTensorStorage(10), **given})
