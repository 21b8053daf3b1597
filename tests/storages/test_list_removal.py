"""Items that are removed from lists: beside a model, in every way of reading, through saves, and beside other threads."""

import pickle
import threading
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    Checkpointer,
    CompressedListStorage,
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyStackStorage,
    ListStorage,
    NoSampleable,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RowError,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    traj,
)
from tests.store.processes import Child, leaves

ROWS = 20


def small(tensor):
    return torch.frombuffer(bytearray(zlib.compress(tensor.numpy().tobytes())), dtype=torch.uint8)


def large(data, said):
    raw = bytearray(zlib.decompress(data.numpy().tobytes()))
    return torch.frombuffer(raw, dtype=said["dtype"]).view(said["shape"])


STORAGES = {
    "list": ListStorage,
    "lazy stacks": LazyStackStorage,
    "compressed": lambda rows: CompressedListStorage(rows, compression_fn=small, decompression_fn=large),
}
SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(ROWS, 1.0, 1.0),
    "once": lambda: ConsumingSampler(max_sample_count=100),
}


def items(first, n):
    ids = torch.arange(first, first + n)
    return TensorDict({"id": ids, "episode": ids // 10, "score": ids.float()}, [n])


def made(sampler=RandomSampler, storage=ListStorage, n=ROWS, batch_size=12, **more):
    writer = TensorDictRoundRobinWriter(track_generations=True)
    rb = TensorDictReplayBuffer(
        storage=storage(ROWS),
        sampler=sampler(),
        writer=writer,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
        **more,
    )
    rb.extend(items(0, n))
    return rb


def ids(rb):
    return [int(item["id"]) for item in rb.storage]


def void(rb):
    return rb.stats()["void_rows"]


# ---- what is gone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_removed_items_are_gone_until_they_are_written_again(storage):
    rb = made(storage=STORAGES[storage])
    assert rb.remove(torch.tensor([3, 5, 3, -1])) == 2
    assert rb.remove([3, 7]) == 1
    assert rb.remove(7) == 0
    left = [i for i in range(ROWS) if i not in (3, 5, 7)]
    assert rb[:]["id"].tolist() == ids(rb) == left
    assert (len(rb), void(rb), rb.write_count) == (17, 3, ROWS)
    assert (3 in rb.storage, 4 in rb.storage) == (False, True)
    with pytest.raises(IndexError, match="3 between them were removed"):
        rb[3]
    with pytest.raises(IndexError):
        rb[3] = items(0, 1)[0]
    assert rb[-1]["id"] == ROWS - 1
    assert rb.extend(items(100, 4)).tolist() == [0, 1, 2, 3]
    assert (len(rb), void(rb)) == (18, 2)
    assert rb[3]["id"] == 103
    rb.storage.set(5, items(200, 1)[0])
    assert (rb[5]["id"], len(rb), void(rb)) == (200, 19, 1)
    assert rb.remove(torch.arange(ROWS)) == 19
    assert (len(rb), void(rb)) == (0, ROWS)
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.empty()
    assert (len(rb), void(rb)) == (0, 0)
    assert rb.extend(items(0, 2)).tolist() == [0, 1]
    assert ids(rb) == [0, 1]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_draw_finds_a_removed_item(sampler, storage, prefetch):
    rb = made(SAMPLERS[sampler], STORAGES[storage], prefetch=prefetch)
    rb.sample()
    gone = {4, 15, 16}
    assert rb.remove(sorted(gone)) == 3
    for _ in range(3 if prefetch else 0):  # those that were made before keep them
        rb.sample()
    seen = {i for _ in range(20) for i in rb.sample()["id"].tolist()}
    assert seen == set(range(ROWS)) - gone


def test_a_draw_of_a_removed_item_would_be_noticed():
    """The negative control of the test above."""
    rb = made()
    assert any(4 in rb.sample()["id"] for _ in range(200))


def test_an_epoch_has_every_item_that_is_left_once():
    rb = made(SamplerWithoutReplacement, batch_size=5)
    before = rb.sample()["id"].tolist()
    rb.remove(torch.arange(0, ROWS, 4))
    left = set(range(ROWS)) - {*before, *range(0, ROWS, 4)}  # the epoch goes on
    assert sorted(i for batch in rb for i in batch["id"].tolist()) == sorted(left)


def test_items_at_the_end_may_be_removed_and_the_next_ones_come_behind_them():
    rb = ReplayBuffer(storage=ListStorage(), collate_fn=list, batch_size=4)
    rb.extend(["a", "b", "c"])
    assert rb.remove([1, 2]) == 2
    assert rb.extend(["d"]).tolist() == [3]
    assert list(rb.storage) == rb[:] == ["a", "d"]
    assert {item for _ in range(10) for item in rb.sample()} == {"a", "d"}
    rb.storage.set(slice(None), ["A", "B", "C", "D"])  # as far as there are rows
    assert rb[:] == ["A", "B", "C", "D"]


def test_priorities_are_forgotten():
    rb = made(SAMPLERS["priority"])
    rb.update_priority(torch.arange(ROWS), torch.arange(1.0, ROWS + 1))
    rb.remove([0, 19])
    assert leaves(rb)[[0, 19]].tolist() == [0, 0]
    dropped = rb.stats()["priority_updates_dropped"]
    rb.update_priority([0, 19], 7.0)
    rb.mark_update([0, 19])
    assert rb.stats()["priority_updates_dropped"] == dropped + 2
    assert leaves(rb)[[0, 19]].tolist() == [0, 0]
    other = TensorDictReplayBuffer(
        storage=rb.storage, sampler=PrioritizedSampler(ROWS, 1.0, 1.0, index="other"), batch_size=4
    )
    assert leaves(other)[[0, 1, 19]].tolist() == pytest.approx([0, 1, 0])
    rb.extend(items(ROWS, 1))
    assert leaves(rb)[0] == pytest.approx(20)
    assert leaves(rb).sum() == pytest.approx(sum(range(2, ROWS + 1)))


def test_marking_a_row_that_was_never_written_changes_nothing():
    rb = made(SAMPLERS["priority"], n=3, batch_size=40)
    rb.mark_update([5])
    assert leaves(rb)[5] == 0
    assert {i for _ in range(20) for i in rb.sample()["id"].tolist()} == {0, 1, 2}


def test_removed_items_are_not_used_up_but_gone():
    rb = TensorDictReplayBuffer(storage=ListStorage(6), sampler=ConsumingSampler(), batch_size=2)
    rb.extend(items(0, 6))
    drawn = rb.sample()["id"].tolist()
    gone = [i for i in range(6) if i not in drawn][:2]
    rb.remove([*gone, drawn[0]])
    assert len(rb) == 2
    rest = {i for batch in rb for i in batch["id"].tolist()}
    assert rest == set(range(6)) - set(drawn) - set(gone)
    second = ConsumingSampler(index="second")
    other = TensorDictReplayBuffer(storage=rb.storage, sampler=second, batch_size=9)
    assert set(other.sample()["id"].tolist()) == set(range(6)) - {*gone, drawn[0]}


# ---- items of a time -----------------------------------------------------------------------------------------------------


def test_items_written_since_stay():
    rb = made(SAMPLERS["priority"])
    batch = rb.sample()
    rows, generation = batch["index"], batch["index_generation"]
    rb.extend(items(ROWS, 5))
    old = [row for row in rows.unique().tolist() if row >= 5]
    assert rb.remove(rows, generation=generation) == len(old)
    assert len(rb) == ROWS - len(old)
    assert rb.remove([0, 1], generation=rb.writer.generations_of(torch.tensor([0, 1]))) == 2
    assert rb.remove([0], generation=[-1]) == 0
    assert rb.writer.generations_of(torch.tensor([0, 2])).tolist()[0] == -1


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1, ROWS],), RowError, rf"remove: expected rows in \[-1, {ROWS}\), got {ROWS}"),
        (([-2, 1],), RowError, "got -2"),
        (([1.5],), TypeError, "remove: rows: expected ints"),
        (([1, 2], [3]), ValueError, "2 rows and 1 generations"),
        ((TensorDict({}, [2]),), TypeError, "expected rows, got a TensorDict"),
    ],
)
def test_bad_arguments_change_nothing(arguments, error, text):
    rb = made()
    rows, generation = (*arguments, None)[:2]
    with pytest.raises(error, match=text):
        rb.remove(rows, generation=generation)
    assert (len(rb), void(rb)) == (ROWS, 0)


def test_a_read_only_list_keeps_its_items():
    rb = made()
    rb.set_writer(ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="remove: the buffer is read-only"):
        rb.remove(0)
    assert ReplayBuffer(storage=ListStorage(4)).remove([0, 3]) == 0


# ---- beside other components -----------------------------------------------------------------------------------------------


def test_a_writer_of_best_rows_takes_the_places():
    rb = TensorDictReplayBuffer(storage=ListStorage(4), writer=TensorDictMaxValueWriter(rank_key="score"))
    rb.extend(items(10, 4))
    rb.extend(items(0, 1))
    rb.remove([1, 3])
    assert rb.extend(items(0, 3)).tolist() == [-1, 3, 1]
    assert ids(rb) == [10, 2, 12, 1]
    assert void(rb) == 0


def test_trajectories_end_at_removed_items():
    rb = made()
    rb.extend(items(ROWS, 5))
    rb.remove([7, 2, 12])
    found = [it.id.tolist() for it in rb.query(traj.length > 0, trajectory_key="episode")]
    assert found == [[5, 6], [8, 9], [10, 11], [*range(13, 20)], [20, 21], [23, 24]]


@pytest.mark.parametrize("form", ["dump", "series", "state", "pickle"])
@pytest.mark.parametrize("storage", STORAGES)
def test_saves_have_the_items_that_are_left(storage, form, tmp_path):
    rb, other = (made(SAMPLERS["priority"], STORAGES[storage], n=n, batch_size=40) for n in (ROWS, 3))
    rb.update_priority(torch.arange(ROWS), torch.arange(1.0, ROWS + 1))
    rb.remove([4, 15, 19])
    if form == "dump":
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
    elif form == "series":
        report = Checkpointer(tmp_path / "series", rb).save(1)
        assert report.step == 1
        rb.remove([7])
        Checkpointer(tmp_path / "series", rb).restore()
        Checkpointer(tmp_path / "series", other).restore()
    elif form == "state":
        other.load_state_dict(rb.state_dict())
    else:
        other = pickle.loads(pickle.dumps(rb))
    for each in (rb, other):
        assert ids(each) == [i for i in range(ROWS) if i not in (4, 15, 19)]
        assert (len(each), void(each)) == (ROWS - 3, 3)
        assert leaves(each)[[4, 15, 19]].tolist() == [0, 0, 0]
        assert leaves(each).sum() == pytest.approx(sum(range(1, ROWS + 1)) - 5 - 16 - 20, rel=1e-5)
        assert not {4, 15, 19} & {i for _ in range(20) for i in each.sample()["id"].tolist()}
        assert each.extend(items(50, 5)).tolist() == [0, 1, 2, 3, 4]
        assert (len(each), void(each)) == (ROWS - 2, 2)


def test_a_sampler_whose_priorities_were_not_saved_draws_no_void_item():
    rb, other = made(), made(SAMPLERS["priority"], n=3, batch_size=40)
    rb.remove([4, 15])
    other.storage.load_state_dict(rb.storage.state_dict())
    assert set(range(ROWS)) - {4, 15} == {i for _ in range(30) for i in other.sample()["id"].tolist()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.update(numbers=state["numbers"].index_fill(0, torch.tensor([0]), -1)), "each ticket once"),
        (lambda state: state.update(numbers=state["numbers"].index_fill(0, torch.tensor([0]), 2)), "each ticket once"),
        (
            lambda state: state.update(numbers=state["numbers"].index_fill(0, torch.tensor([0]), 0)),
            "items: expected 18",
        ),
    ],
)
def test_a_state_with_other_void_rows_than_items_changes_nothing(change, text):
    rb, other = made(), made(n=3)
    rb.remove([4])
    state = rb.storage.state_dict()
    assert state["numbers"].tolist().count(0) == 1
    change(state)
    with pytest.raises(ValueError, match=text):
        other.storage.load_state_dict(state)
    assert ids(other) == [0, 1, 2]


def _look(rb, gone):
    assert not set(gone) & set(ids(rb))
    assert len(rb) == ROWS - len(gone)
    rb.remove([0])
    assert len(rb) == ROWS - len(gone) - 1


@pytest.mark.filterwarnings("ignore:this process was forked")
def test_a_copy_in_another_process_has_the_same_void_rows():
    rb = made(SAMPLERS["priority"])
    rb.remove([3, 4])
    Child(_look, rb, [3, 4], method="fork").join()
    assert len(rb) == ROWS - 2


# ---- other threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["uniform", "priority", "epoch"])
def test_threads_that_sample_see_whole_items_only(sampler):
    rb = made(SAMPLERS[sampler], batch_size=8)
    stop, wrong = threading.Event(), []

    def look():
        try:
            while not stop.is_set():
                batch = rb.sample()
                if not (batch["episode"] == batch["id"] // 10).all():
                    wrong.append(batch)
        except Exception as error:  # noqa: BLE001 - the test shows it
            wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for at in range(300):
        rb.remove([(at * 7 + i) % ROWS for i in range(5)])
        rb.extend(items(1000 + at, 3))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_row_that_is_read_before_it_is_written_again_counts_as_one_that_moved():
    rb = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    rb.extend(["a", "b"])
    rb.remove(1)

    class Items(list):
        """Another thread writes the row as soon as it was looked at."""

        def __getitem__(self, row):
            item = super().__getitem__(row)
            if row == 1 and waiting:
                rb.storage.set(1, waiting.pop())
            return item

    waiting = ["c"]
    rb.storage._items = Items(rb.storage._items)
    assert rb.storage.read(torch.tensor([0, 1])) == (["a", None], [1])
    assert rb[:] == ["a", "c"]


def test_an_item_is_not_removed_between_looking_for_it_and_reading_it(monkeypatch):
    storage = ListStorage(4)
    rb = ReplayBuffer(storage=storage, collate_fn=list)
    rb.extend(["a", "b"])
    read, other = ListStorage.read, []

    def late(self, rows, expected=None):
        if not other:
            other.append(threading.Thread(target=rb.remove, args=(1,)))
            other[0].start()
            other[0].join(0.1)  # it waits, or has removed the item by then
        return read(self, rows, expected)

    monkeypatch.setattr(ListStorage, "read", late)
    assert storage[1] == "b"
    other[0].join()
    assert len(rb) == 1


# ---- a model ---------------------------------------------------------------------------------------------------------------

SIZE = 5
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 7)),
    st.tuples(st.just("write there"), st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("remove"), st.lists(st.integers(-1, SIZE - 1), max_size=5)),
    st.tuples(st.just("edit"), st.integers(0, SIZE - 1)),
    st.tuples(st.just("update"), st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("empty"), st.just(0)),
    st.tuples(st.just("reload"), st.just(0)),
)


def run_program(program):
    rb = ReplayBuffer(
        storage=ListStorage(SIZE), sampler=PrioritizedSampler(SIZE, 1.0, 1.0, eps=0.0), collate_fn=list, batch_size=32
    )
    rb.update_priority([], [])
    held, priorities, cursor, highest = [], [], 0, 1.0
    for at, (name, what) in enumerate(program):
        value = torch.tensor(100 * at)
        if name == "write":
            rb.extend([value + i for i in range(what)])
            for i in range(what):
                row = cursor % SIZE
                held[row : row + 1], priorities[row : row + 1] = [100 * at + i], [highest]
                cursor += 1
        elif name == "write there":
            rows = [row for row in what if row < len(held)]
            if rows:
                rb.storage.set(rows, [value + i for i in range(len(rows))])
                for i, row in enumerate(rows):
                    held[row], priorities[row] = 100 * at + i, highest
        elif name == "remove":
            gone = {row for row in what if 0 <= row < len(held) and held[row] is not None}
            assert rb.remove(torch.tensor(what, dtype=torch.int64)) == len(gone)
            for row in gone:
                held[row], priorities[row] = None, 0.0
        elif name == "edit":
            if what < len(held) and held[what] is not None:
                rb[what] = value
                held[what] = 100 * at
            else:
                with pytest.raises(IndexError):
                    rb[what] = value
        elif name == "update":
            rb.update_priority(torch.tensor(what), torch.tensor([1.0 + row for row in what]))
            for row in what:
                if row < len(held) and held[row] is not None:
                    priorities[row], highest = 1.0 + row, max(highest, 1.0 + row)
        elif name == "empty":
            rb.empty()
            held, priorities, cursor, highest = [], [], 0, 1.0
        else:
            rb.load_state_dict(rb.state_dict())
        live = [i for i in held if i is not None]
        assert [int(i) for i in rb.storage] == [int(i) for i in rb[:]] == live
        assert (len(rb), void(rb)) == (len(live), len(held) - len(live))
        assert leaves(rb).tolist() == pytest.approx(priorities + [0.0] * (SIZE - len(held)))
        if live:
            assert {int(i) for i in rb.sample()} <= set(live)
        else:
            with pytest.raises(NoSampleable):
                rb.sample()


@settings(max_examples=120, deadline=None)
@given(st.lists(OPERATIONS, max_size=14))
def test_random_programs(program):
    run_program(program)


def test_the_model_notices_a_removal_that_no_index_hears_of(monkeypatch):
    """The negative control."""

    def forgetful(storage, rows, expected):
        storage._items[int(rows[0])] = torch.tensor(-1)
        return len(rows)

    monkeypatch.setattr(ListStorage, "remove", forgetful)
    with pytest.raises(AssertionError):
        run_program([("write", 3), ("remove", [1])])
