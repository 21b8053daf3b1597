"""Rows by their key: beside a dict, in every storage, through reopening, saves and damage, and with several processes."""

import contextlib
import multiprocessing
import os
import pickle
import random

import numpy as np
import pytest
import torch

from engram import (
    Checkpointer,
    CorruptStore,
    ImmutableDatasetWriter,
    IncompatibleStore,
    KeyedRows,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorStorage,
)
from engram.store.indexes import INDEX_KINDS
from engram.store.keys import KeyIndex
from tests import stress
from tests.store.keyed import KINDS, ROWS, check, made, names, opened, rows, text, write, write_for_ever
from tests.store.processes import Child

STORAGES = {
    "RAM": lambda _, **more: LazyTensorStorage(ROWS, **more),
    "directory": lambda folder, **more: LazyMemmapStorage(ROWS, scratch_dir=folder / "store", **more),
}


# ---- beside a dict -------------------------------------------------------------------------------------------------------


class Ring:
    """What rows hold: of each its key and when it was written."""

    def __init__(self):
        self.rows, self.next, self.writes = {}, 0, 0

    def append(self, numbers):
        for n in numbers:
            self.writes += 1
            self.rows[self.next] = (self.writes, n)
            self.next = (self.next + 1) % ROWS

    def row_of(self, n):
        found = [(when, row) for row, (when, key) in self.rows.items() if key == n]
        return max(found)[1] if found else -1

    def remove(self, gone):
        self.rows = {row: held for row, held in self.rows.items() if row not in gone}


def random_operation(chance, rb, ring):
    """Do something to both."""
    numbers = [chance.randrange(30) for _ in range(chance.randrange(1, 9))]
    live = sorted(ring.rows)
    some = chance.sample(live, min(len(live), chance.randrange(1, 4)))
    match chance.randrange(10):
        case 0 if some:  # another key
            new = [chance.randrange(30) for _ in some]
            rb[some] = rows(new)
            for row, n in zip(some, new, strict=True):
                ring.rows[row] = (ring.rows[row][0], n)
        case 1 if some:
            rb.set_at_("reward", torch.ones(len(some)), some)
        case 2 if some:
            assert rb.remove(some) == len(some)
            ring.remove(some)
        case 3:
            gone = {row for row, (_, key) in ring.rows.items() if key in numbers[:2]}
            assert rb.remove(keys=list(map(text, numbers[:2]))) == len(gone)
            ring.remove(gone)
        case 4 if chance.random() < 0.3:
            rb.empty()
            ring.rows, ring.next = {}, 0
        case 5:
            rb.add({key: value[0] for key, value in rows(numbers).items()})
            ring.append(numbers[:1])
        case _:
            rb.extend(rows(numbers))
            ring.append(numbers)


def same(found, others):
    return torch.equal(found.rows, others.rows) and torch.equal(found.generations, others.generations)


def agree(rb, ring):
    found = rb.rows_of([text(n) for n in range(30)])
    assert found.rows.tolist() == [ring.row_of(n) for n in range(30)]
    assert torch.equal(found.generations, rb.writer.generations_of(found.rows))


@pytest.mark.stress
@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_found_as_in_a_dict(storage, tmp_path):
    for seed in range(stress.size(6, 500)):
        chance, ring = random.Random(seed), Ring()
        rb = made(STORAGES[storage](tmp_path / str(seed)))
        for _ in range(40):
            random_operation(chance, rb, ring)
            agree(rb, ring)
            if storage == "directory" and ring.writes and chance.random() < 0.1:
                rb.close()
                rb = opened(tmp_path / str(seed) / "store")
            elif storage == "RAM" and chance.random() < 0.1:
                rb = pickle.loads(pickle.dumps(rb))
            elif chance.random() < 0.1:  # a state replaces other rows
                state = rb.state_dict()
                rb = made() if storage == "RAM" else rb
                rb.extend(rows([chance.randrange(30) for _ in range(7)]))
                rb.load_state_dict(state)
            agree(rb, ring)
        rb.close()


# ---- what is found -------------------------------------------------------------------------------------------------------


def test_of_several_rows_the_one_that_was_written_last_is_found():
    rb = made()
    rb.extend(rows([5, 6, 5, 5]))
    assert same(rb.rows_of(text(5)), KeyedRows(torch.tensor([3]), torch.tensor([4])))
    rb.set_at_("reward", torch.ones(1), [0])  # an edit is no write
    assert rb.rows_of(text(5)).rows.tolist() == [3]
    rb.remove(3)
    assert rb.rows_of([text(5), text(6), text(7)]).rows.tolist() == [2, 1, -1]
    assert rb.remove(keys=[text(5), text(7), text(5)]) == 2
    assert rb.rows_of([text(5), text(6)]).rows.tolist() == [-1, 1]
    assert rb[:]["uid"].tolist() == [6]


def test_what_is_found_is_updated_unless_it_was_overwritten():
    sampler = PrioritizedSampler(ROWS, alpha=1.0, beta=1.0)
    rb = made(sampler=sampler)
    rb.extend(rows(range(ROWS)))
    found = rb.rows_of([text(0), text(3), text(99)])
    rb.extend(rows([50, 51]))  # over rows 0 and 1
    late = {"reward": torch.ones(3)}
    result = rb.update_if_present(index=found.rows, generation=found.generations, patch=late)
    assert result.updated.tolist() == [False, True, False]
    rb.update_priority(found.rows[:2], torch.tensor([7.0, 7.0]), generation=found.generations[:2])
    masses = sampler._index.leaves(ROWS)
    assert masses[3] == pytest.approx(7.0)
    assert masses[0] == pytest.approx(1.0)
    assert rb.remove(found.rows, generation=found.generations) == 1
    assert rb.rows_of([text(50), text(3)]).rows.tolist() == [0, -1]


@pytest.mark.parametrize(
    "keys",
    [
        [text(4), text(9)],
        (text(4).encode(), text(9)),
        [text(4).encode() + b"\0", text(9)],
        np.array([text(4), text(9)]),
        np.array([text(4), text(9)], dtype=object),
        names([4, 9]),
        names([4, 9]).numpy(),
        names([4, 9])[:, :8],
        torch.nn.functional.pad(names([4, 9]), (0, 5)),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_forms_of_texts(keys):
    rb = made()
    rb.extend(rows(range(3, 9)))
    assert rb.rows_of(keys).rows.tolist() == [1, -1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_of_every_width(dtype, shape):
    if dtype is torch.uint8 and shape:
        return  # a text
    numbers = torch.tensor([0, 1, 127, 100] if dtype is torch.uint8 else [0, -1, 127, -128]).to(dtype)
    rb = made(field=("meta", "uid"))
    rb.extend({"meta": {"uid": numbers.reshape(-1, *shape)}})
    assert rb.rows_of(numbers).rows.tolist() == [0, 1, 2, 3]
    assert rb.rows_of(numbers.tolist()).rows.tolist() == [0, 1, 2, 3]
    assert rb.rows_of(range(126, 128)).rows.tolist() == [-1, 2]
    assert rb.rows_of(127).rows.tolist() == [2]
    assert rb.rows_of([]).rows.tolist() == []
    if dtype is not torch.int64:
        with pytest.raises(ValueError, match=r"numbers that the field \('meta', 'uid'\).*holds, got 40000000000"):
            rb.rows_of([1, 40_000_000_000])


def test_an_index_that_is_made_late_scans_the_rows():
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), writer=RoundRobinWriter(track_generations=True))
    rb.extend(rows([i % 7 for i in range(33)]))
    rb.remove([4])
    rb.index_keys("name")
    check(rb, range(8))
    rb.index_keys("name")  # again
    check(rb, range(8))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_first_row_that_was_only_an_example(storage, tmp_path):
    """Collectors write one, and empty the buffer; what they write then may have other fields."""
    rb = made(STORAGES[storage](tmp_path), "uid")
    rb.add({"uid": torch.tensor(3), "x": torch.zeros(2)})
    rb.empty()
    rb.extend({"y": torch.zeros(2, 5), "uid": torch.tensor([4, 3])})
    assert rb.rows_of([3, 4]).rows.tolist() == [1, 0]
    rb.close()


def test_rows_that_were_there_first():
    rb = ReplayBuffer(storage=TensorStorage({"uid": torch.tensor([4, 5, 6])}))
    rb.index_keys("uid")
    assert rb.rows_of([6, 7]).rows.tolist() == [2, -1]


# ---- where the index is --------------------------------------------------------------------------------------------------


def test_the_store_keeps_the_index_through_reopening(tmp_path):
    rb = made(STORAGES["directory"](tmp_path))
    rb.extend(rows(range(7)))
    assert (tmp_path / "store" / ".engram" / "indexes" / KeyIndex.NAME / KeyIndex.kind).exists()
    rb.close()
    writer = ReplayBuffer.open(tmp_path / "store")  # knows nothing of keys
    writer.extend(rows(range(7, 30)))
    writer.close()
    rb = opened(tmp_path / "store")
    check(rb, range(31))
    rb.close()


@pytest.mark.filterwarnings("ignore:this process was forked")
def test_other_processes_find_the_index_that_one_makes(tmp_path):
    rb = ReplayBuffer(storage=STORAGES["directory"](tmp_path))
    rb.extend(rows([1, 2]))

    def child():
        other = opened(tmp_path / "store")
        other.index_keys("name")
        other.extend(rows([3]))
        other.close()

    Child(child).join()
    assert rb.rows_of([text(1), text(3)]).rows.tolist() == [0, 2]
    rb.extend(rows([4]))
    assert rb.rows_of(text(4)).rows.tolist() == [3]
    rb.close()


@pytest.mark.filterwarnings("ignore:this process was forked")
@pytest.mark.parametrize("first", ["looks", "writes", "names it"])
def test_keys_in_a_field_that_another_process_adds(tmp_path, first):
    rb = ReplayBuffer(storage=STORAGES["directory"](tmp_path))
    rb.extend({"x": torch.arange(3)})

    def child():
        other = opened(tmp_path / "store")
        other.add_field("uid", torch.tensor(0))
        other.index_keys("uid")
        other.extend({"x": torch.arange(2), "uid": torch.tensor([7, 8])})
        other.close()

    Child(child).join()
    if first == "writes":
        rb.extend({"x": torch.arange(1)})
    elif first == "names it":
        rb.index_keys("uid")
    assert rb.rows_of([0, 7, 8]).rows.tolist() == [5 if first == "writes" else 2, 3, 4]
    rb.close()


@pytest.mark.filterwarnings("ignore:this process was forked")
def test_an_index_whose_maker_died_before_it_had_scanned_scans(tmp_path):
    rb = ReplayBuffer(storage=STORAGES["directory"](tmp_path), writer=RoundRobinWriter(track_generations=True))
    rb.extend(rows([1, 2]))

    def child():
        other = opened(tmp_path / "store")
        other.storage.memory.indexes.scan = lambda *_: os._exit(0)
        other.index_keys("name")

    Child(child).join()
    rb.extend(rows([3]))  # finds the index, and tells it
    assert rb.rows_of([text(1), text(2), text(3)]).rows.tolist() == [0, 1, 2]
    check(rb, range(5))
    rb.close()


def test_a_buffer_that_only_reads_sees_what_others_write(tmp_path):
    rb = made(STORAGES["directory"](tmp_path))
    rb.extend(rows([1, 2]))
    reader = opened(tmp_path / "store", readonly=True)
    assert reader.rows_of([text(1), text(9)]).rows.tolist() == [0, -1]
    rb.extend(rows([8, 9, 9]))
    assert same(reader.rows_of([text(1), text(9)]), rb.rows_of([text(1), text(9)]))
    rb[[0]] = rows([2])
    rb.remove(keys=text(9))
    assert reader.rows_of([text(1), text(2), text(9)]).rows.tolist() == [-1, 1, -1]
    with pytest.raises(IncompatibleStore, match="'name'.*got 'uid'"):
        reader.index_keys("uid")
    reader.close()
    rb.close()


def test_a_reader_makes_an_index_of_its_own(tmp_path):
    rb = ReplayBuffer(storage=STORAGES["directory"](tmp_path))
    rb.extend(rows([1, 2]))
    reader = ReplayBuffer.open(tmp_path / "store", readonly=True, writer=ImmutableDatasetWriter())
    reader.index_keys("uid")
    rb.extend(rows([3]))
    assert reader.rows_of([2, 3]).rows.tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="without one"):
        rb.rows_of(2)
    reader.close()
    rb.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shared_buffer_keeps_its_index(when):
    rb = made()
    if when == "before":
        rb.share()
    rb.extend(rows(range(25)))
    rb.share()
    check(rb, range(26))
    rb.extend(rows([30]))
    check(rb, range(31))
    rb.close()


def test_copies_have_indexes_of_their_own():
    rb = made()
    rb.extend(rows([1, 2]))
    copy = pickle.loads(pickle.dumps(rb))
    copy.extend(rows([3]))
    assert copy.rows_of([text(2), text(3)]).rows.tolist() == [1, 2]
    assert rb.rows_of([text(2), text(3)]).rows.tolist() == [1, -1]
    unwritten = pickle.loads(pickle.dumps(made()))
    unwritten.extend(rows([4]))
    assert unwritten.rows_of(text(4)).rows.tolist() == [0]


@pytest.mark.filterwarnings("ignore:this process was forked")
def test_a_forked_child_of_a_private_buffer_has_an_index_of_its_own():
    rb = made()
    rb.extend(rows([1]))

    def child():
        rb.extend(rows([2]))
        assert rb.rows_of([text(1), text(2)]).rows.tolist() == [0, 1]

    Child(child).join()
    assert rb.rows_of([text(1), text(2)]).rows.tolist() == [0, -1]


@pytest.mark.filterwarnings("ignore:restore.*did not fit")
def test_what_is_loaded_is_found(tmp_path):
    rb = made()
    rb.extend(rows([i % 12 for i in range(33)]))
    rb.remove([2, 3])
    rb.dumps(tmp_path / "dump")
    Checkpointer(tmp_path / "c", rb).save(1)
    loaded = made()
    loaded.extend(rows([40, 41]))
    loaded.loads(tmp_path / "dump")
    restored, smaller = made(), made(LazyTensorStorage(9))
    Checkpointer(tmp_path / "c", restored).restore()
    Checkpointer(tmp_path / "c", smaller).restore(convert=True)
    for it in (loaded, restored, smaller):
        check(it, [*range(13), 40, 41])
    assert same(restored.rows_of(text(1)), rb.rows_of(text(1)))


# ---- other processes and deaths ------------------------------------------------------------------------------------------


def test_several_processes_write_at_once(tmp_path):
    """They overwrite all rows several times, while this one looks."""
    rb = made(LazyMemmapStorage(200, scratch_dir=tmp_path / "store"))
    rb.extend(rows([0]))
    batches, n = stress.size(40, 2_000), 10
    children = [Child(write, tmp_path / "store", writer, batches, n) for writer in (0, 1)]
    last = 2 * batches * n
    for i in range(stress.size(100, 5_000)):
        numbers = [(i * 37 + j) % last for j in range(50)]
        found = rb.rows_of(list(map(text, numbers)))
        assert ((found.rows >= 0) == (found.generations > 0)).all()
    for child in children:
        child.join()
    check(rb, range(last))
    rb.close()


@pytest.mark.stress
def test_writers_that_are_killed_leave_an_index_of_the_rows(tmp_path):
    rb = made(LazyMemmapStorage(60, scratch_dir=tmp_path / "store"))
    rb.extend(rows(range(10)))
    reader = opened(tmp_path / "store", readonly=True)
    for kill in range(stress.size(6, 200)):
        ready = multiprocessing.get_context("fork").Event()
        child = Child(write_for_ever, tmp_path / "store", kill % 3, 11, ready)
        assert ready.wait(60)
        for _ in range(3 + kill % 4):
            rb.rows_of(list(map(text, range(KINDS))))
        child.kill()
        rb.storage.store.core.reclaim()  # as writers do twice a second
        rb.extend(rows([1, 2]))
        check(rb, range(KINDS))
        assert same(reader.rows_of(text(1)), rb.rows_of(text(1)))
        if kill % 2:  # nobody is left
            reader.close()
            rb.close()
            rb, reader = opened(tmp_path / "store"), opened(tmp_path / "store", readonly=True)
            check(rb, range(KINDS))
    reader.close()
    rb.close()


def test_the_index_survives_the_death_of_all(tmp_path):
    def begin(ready):
        made(LazyMemmapStorage(60, scratch_dir=tmp_path / "store")).extend(rows([1]))
        write_for_ever(tmp_path / "store", 1, 7, ready)

    ready = multiprocessing.get_context("fork").Event()
    child = Child(begin, ready)
    assert ready.wait(60)
    child.kill()
    rb = opened(tmp_path / "store")
    check(rb, range(KINDS))
    rb.close()


# ---- damage --------------------------------------------------------------------------------------------------------------


def damaged(folder, at, content):
    path = folder / "store" / ".engram" / "indexes" / KeyIndex.NAME / KeyIndex.kind
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.fixture
def closed(tmp_path):
    """A store with an index that was closed in order."""
    rb = made(STORAGES["directory"](tmp_path))
    rb.extend(rows(range(15)))
    rb.close()
    return tmp_path


@pytest.mark.parametrize(
    ("at", "content"),
    [(0, b"engkeys\2"), (8, b"\x15"), (16, b"\x63"), (24, b"\x0d"), (24, b"\0"), (24, b"\xff" * 8)],
    ids=["magic", "rows", "field", "key bytes", "no bytes", "many bytes"],
)
def test_another_header_is_refused(closed, at, content):
    damaged(closed, at, content)
    with pytest.raises(IncompatibleStore, match="index"):
        opened(closed / "store")


def test_another_size_is_refused(closed):
    path = closed / "store" / ".engram" / "indexes" / KeyIndex.NAME / KeyIndex.kind
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(IncompatibleStore, match="size"):
        opened(closed / "store")


@pytest.mark.parametrize("at", [4096, 4096 + 16, 4096 + 24 * ROWS])
def test_damaged_trees_are_said_to_be_damaged_and_are_rebuilt(closed, at):
    damaged(closed, at, b"\xee" * 24)
    rb = opened(closed / "store")
    with contextlib.suppress(CorruptStore):  # or it lies where no key leads
        rb.rows_of(list(map(text, range(30))))
    with contextlib.suppress(CorruptStore):
        rb.extend(rows(range(40, 40 + ROWS)))
    rb.storage.memory.indexes[KeyIndex.NAME, KeyIndex.kind].put_in_order()
    check(rb, range(60))
    rb.close()


def test_an_older_engram_refuses_the_index_by_name(closed, monkeypatch):
    monkeypatch.delitem(INDEX_KINDS, KeyIndex.kind)
    with pytest.raises(IncompatibleStore, match=r"indexes/main/keys.*newer engram"):
        opened(closed / "store")
