"""Rows of any length that each have a slot: placed by writers and removers, edited, opened again, and written by others meanwhile."""

import copy
import os
import pickle

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    Lifo,
    LowestPriority,
    MaxTimesSampled,
    PrioritizedSampler,
    Ragged,
    RemovingWriter,
    ReplayBuffer,
    StalestFirst,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.errors import IncompatibleStore
from engram.types import WritePlan
from tests.remote.test_calls import served_here
from tests.storages import ragged_rows as said

SIZE = 6


@pytest.fixture(params=["ram", "folder"])
def make(request, tmp_path):
    def make(size=SIZE, **more):
        more = {"ragged": said.fields(), "ragged_layout": "slots", **more}
        if request.param == "ram":
            return LazyTensorStorage(size, **more)
        return LazyMemmapStorage(size, scratch_dir=tmp_path / "store", **more)

    return make


def steps(numbers, scores=None):
    """Rows of these numbers, as a TensorDict."""
    rows = [said.row(number) for number in numbers]
    data = {
        "number": torch.tensor(numbers),
        "score": torch.tensor([float(number * 37 % 101) for number in numbers] if scores is None else scores),
        "version": torch.tensor([number * 7 % 5 for number in numbers]),
        "text": NonTensorStack(*[row["text"] for row in rows]),
    }
    for name in ("tokens", "log_prob"):
        data[name] = torch.nested.nested_tensor([row[name] for row in rows], layout=torch.jagged)
    data["tokens"] = torch.nested.nested_tensor_from_jagged(
        data["tokens"].values().to(torch.int32), data["tokens"].offsets()
    )
    return TensorDict(data, [len(numbers)])


def numbers_of(rb):
    """By row, after a look at all that each holds."""
    return said.check(rb[:])


@pytest.mark.parametrize("seed", range(3))
def test_the_best_rows_stay_with_their_items(make, seed):
    generator = torch.Generator().manual_seed(seed)
    rb = TensorDictReplayBuffer(storage=make(), writer=TensorDictMaxValueWriter(rank_key="score"), batch_size=4)
    best, next_one = {}, 0
    for _ in range(25):
        n = int(torch.randint(1, 9, (), generator=generator))
        numbers = list(range(next_one, next_one + n))
        scores = torch.rand(n, generator=generator).tolist()
        next_one += n
        rb.extend(steps(numbers, scores)) if n > 1 else rb.add(steps(numbers, scores)[0])
        best |= dict(zip(numbers, scores, strict=True))
        best = dict(sorted(best.items(), key=lambda it: it[1])[-SIZE:])
        assert sorted(numbers_of(rb)) == sorted(best)
        assert set(said.check(rb.sample())) <= set(best)


REMOVERS = {
    "lifo": Lifo,
    "priority": LowestPriority,
    "sampled": MaxTimesSampled,
    "stale": lambda: StalestFirst("version"),
}


@pytest.mark.parametrize("kind", REMOVERS)
def test_removers_choose_the_rows_that_they_choose_where_all_have_one_size(make, kind):
    def buffer(storage):
        return TensorDictReplayBuffer(
            storage=storage,
            sampler=PrioritizedSampler(SIZE, 1.0, 1.0),
            remover=REMOVERS[kind](),
            batch_size=4,
            generator=torch.Generator().manual_seed(3),
        )

    rb, plain = buffer(make()), buffer(LazyTensorStorage(SIZE))
    fixed = ("number", "score", "version")
    for first in range(0, 80, 4):
        n = 1 + first % 5
        data = steps(list(range(first, first + n)))
        for one, given in ((rb, data), (plain, data.select(*fixed))):
            one.extend(given)
            if kind == "sampled" and not first:
                one.count_usage()
            drawn = one.sample()
            one.update_priority(drawn["index"], drawn["score"].abs() + 0.1)
        assert numbers_of(rb) == plain[:]["number"].tolist()
    assert len(rb) == SIZE


def test_rows_are_appended_as_in_rings_and_none_is_evicted(make):
    rb, model = ReplayBuffer(storage=make(), batch_size=4), []
    for first in range(0, 120, 5):
        rb.extend(said.rows(first, 5))
        model = [*model, *range(first, first + 5)][-SIZE:]
        assert sorted(numbers_of(rb)) == model
    assert rb.storage.store.counters()["evicted_rows"] == 0


def test_rows_of_the_longest_length_fill_their_slots(make):
    rb = ReplayBuffer(storage=make(lanes=2), batch_size=4)
    for number in range(20):
        tokens = torch.full((said.LONGEST,), number, dtype=torch.int32)
        rb.add({"tokens": tokens, "log_prob": -tokens.float(), "text": "x" * 40}, lane=number % 2)
    assert [row.tolist() for row in rb[:]["tokens"].unbind()] == [[n] * said.LONGEST for n in (18, 14, 16, 19, 15, 17)]
    with pytest.raises(RuntimeError, match="at most max_length=12 items"):
        rb.add({"tokens": torch.zeros(13, dtype=torch.int32), "log_prob": torch.zeros(13), "text": ""}, lane=0)


def test_edits_keep_the_length(make):
    rb = ReplayBuffer(storage=make())
    rb.extend(said.rows(0, SIZE))
    length = said.length_of(2)
    row = said.row(2) | {"tokens": torch.arange(length, dtype=torch.int32)}
    rb[2] = row
    assert rb[2]["tokens"].tolist() == list(range(length))
    before = said.plain(rb[:])
    with pytest.raises(ValueError, match=r"an edit keeps the length.*open_row"):
        rb[3] = said.row(2)
    assert said.plain(rb[:]) == before


def test_rows_grow_into_slots_where_they_are_appended(make):
    rb = ReplayBuffer(storage=make(open_rows=2))
    rb.extend(said.rows(0, SIZE))
    row = rb.open_row(number=torch.tensor(9), text=said.text_of(9))
    tokens = said.row(9)["tokens"]
    for at in range(len(tokens)):
        row.append(tokens=tokens[at : at + 1], log_prob=-tokens[at : at + 1].float())
    assert row.seal() == 0
    assert numbers_of(rb) == [9, 1, 2, 3, 4, 5]

    best = TensorDictReplayBuffer(
        storage=LazyTensorStorage(SIZE, ragged=said.fields(), ragged_layout="slots", open_rows=2),
        writer=TensorDictMaxValueWriter(rank_key="score"),
    )
    best.extend(steps([1, 2]))
    with pytest.raises(
        RuntimeError, match="open_row: expected a writer that appends rows, got TensorDictMaxValueWriter"
    ):
        best.open_row(number=torch.tensor(9))


@pytest.mark.parametrize("writer", [lambda: TensorDictMaxValueWriter(rank_key="score"), lambda: RemovingWriter(Lifo())])
def test_an_open_row_is_sealed_only_where_rows_are_appended(writer, tmp_path):
    """Also one that was opened before the writer was set, here and over a connection."""
    folder = tmp_path / "store"
    storage = LazyMemmapStorage(SIZE, scratch_dir=folder, ragged=said.fields(), ragged_layout="slots", open_rows=3)
    with TensorDictReplayBuffer(storage=storage, batch_size=2) as rb:
        rb.extend(steps([1, 2]))
        tokens, text = said.row(3)["tokens"].to(torch.int32), said.text_of(3)
        row = rb.open_row(number=torch.tensor(3), score=torch.tensor(0.5), version=torch.tensor(0), text=text)
        row.append(tokens=tokens, log_prob=-tokens.float())
        appending = rb.writer
        rb.set_writer(writer())
        refused = rf"expected a writer that appends rows, got {type(rb.writer).__name__}, which places them\. Write whole rows"
        not_opened = pytest.raises(RuntimeError, match="open_row: " + refused)
        with served_here(rb, folder) as address, ReplayBuffer.connect(address) as remote, not_opened:
            remote.open_row(number=9)
        with pytest.raises(RuntimeError, match="open_row: " + refused):
            rb.open_row(number=9)
        with pytest.raises(RuntimeError, match="seal: " + refused):
            row.seal()
        assert numbers_of(rb) == [1, 2]
        assert [it.place for it in rb.unsealed()] == [row.place]
        rb.set_writer(appending)
        assert row.seal() == 2
        assert numbers_of(rb) == [1, 2, 3]


def test_rows_are_removed_and_all_are_emptied(make):
    rb = TensorDictReplayBuffer(storage=make(), remover=Lifo(), batch_size=8)
    rb.extend(steps(range(SIZE)))
    rb.remove([1, 4])
    assert {*said.check(rb.sample())} <= {0, 2, 3, 5}
    rb.extend(steps([10, 11]))
    assert sorted(numbers_of(rb)) == [0, 2, 3, 5, 10, 11]
    rb.empty()
    assert len(rb) == 0
    rb.extend(steps([20]))
    assert numbers_of(rb) == [20]


def test_a_row_beyond_the_last_one_leaves_empty_rows_before_it(make):
    rb = ReplayBuffer(storage=make())
    rb.extend(said.rows(0, 1))
    store = rb.storage.store
    columns, _ = rb.storage.prepare(said.rows(7, 1), "test", batched=True)
    store.write(WritePlan(rows=torch.tensor([3])), columns, 1)
    assert [len(row) for row in rb[:]["tokens"].unbind()] == [said.length_of(0), 0, 0, said.length_of(7)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ragged_layout": "slot"}, "ragged_layout: expected 'ring' or 'slots', got 'slot'"),
        ({"ragged_layout": 3}, "ragged_layout: expected 'ring' or 'slots', got 3"),
        ({"ragged_layout": "slots", "ragged_bytes": 1e6}, "ragged_bytes: expected none with ragged_layout='slots'"),
        ({"ragged_layout": "slots", "ndim": 2, "ragged": {}}, "expected none with ndim=2"),
    ],
)
def test_impossible_arguments(more, message):
    with pytest.raises(ValueError, match=message):
        LazyTensorStorage(6, **{"ragged": said.fields(), **more})


def test_rings_refuse_placing_writers_by_name_and_say_what_to_do():
    with pytest.raises(ValueError, match=r"RemovingWriter: .*ragged_layout='slots'"):
        ReplayBuffer(storage=LazyTensorStorage(6, ragged=said.fields()), remover=Lifo())
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), writer=TensorDictMaxValueWriter(rank_key="n"))
    with pytest.raises(RuntimeError, match='ragged_layout="slots"'):
        rb.extend(TensorDict({"x": NonTensorStack("a", "b"), "n": torch.arange(2.0)}, [2]))


# ---- in folders ----------------------------------------------------------------------------------------------------------


def folder_of(path, size=SIZE, **more):
    return LazyMemmapStorage(size, scratch_dir=path, ragged=said.fields(), ragged_layout="slots", **more)


def test_a_folder_is_opened_again_with_its_writer(tmp_path):
    rb = TensorDictReplayBuffer(storage=folder_of(tmp_path / "d"), writer=TensorDictMaxValueWriter(rank_key="score"))
    rb.extend(steps(range(20)))
    before = numbers_of(rb)
    rb.close()
    rb = TensorDictReplayBuffer.open(tmp_path / "d")
    assert numbers_of(rb) == before
    rb.extend(steps([30], [1000.0]))
    assert 30 in numbers_of(rb)
    rb.close()


def test_open_or_create_takes_the_layout(tmp_path):
    arguments = {"ragged": said.fields(), "ragged_layout": "slots"}
    for first in (0, 10):
        rb = ReplayBuffer.open_or_create(tmp_path / "d", SIZE, remover=Lifo(), **arguments)
        rb.extend(said.rows(first, 4))
        assert rb.storage.store.schema.in_slots
        rb.close()
    with pytest.raises(IncompatibleStore, match="a slot for each row"):
        ReplayBuffer.open_or_create(tmp_path / "d", SIZE, ragged=said.fields(), ragged_bytes=1e5)


def test_files_take_what_was_written(tmp_path):
    storage = LazyMemmapStorage(
        1000,
        scratch_dir=tmp_path / "d",
        ragged={"tokens": Ragged(torch.int64, max_length=1 << 16)},
        ragged_layout="slots",
    )
    rb = ReplayBuffer(storage=storage)
    rb.extend({"tokens": [torch.arange(100) for _ in range(8)]})
    file = os.stat(tmp_path / "d" / ".engram" / "ragged" / "0.values")
    assert file.st_size == 1000 * 8 << 16
    assert file.st_blocks * 512 <= 1 << 20
    assert [row.tolist() for row in rb[:]["tokens"].unbind()] == [list(range(100))] * 8
    rb.close()


def test_memory_may_be_smaller_than_all_slots():
    storage = LazyTensorStorage(
        1 << 20, ragged={"tokens": Ragged(torch.int64, max_length=1 << 20)}, ragged_layout="slots"
    )  # eight terabytes
    rb = ReplayBuffer(storage=storage)
    rb.extend({"tokens": [torch.arange(100) for _ in range(8)]})
    assert [row.tolist() for row in rb[:]["tokens"].unbind()] == [list(range(100))] * 8


def test_a_full_disk_is_an_error_and_changes_nothing(tmp_path):
    """A page that the file cannot have: as of a file that is too short, which the kernel says alike."""
    rb = ReplayBuffer(storage=folder_of(tmp_path / "d", 64))
    rb.extend(said.rows(0, 4))
    tokens = max((tmp_path / "d" / ".engram" / "ragged").glob("*.values"), key=lambda it: it.name.startswith("1."))
    size = tokens.stat().st_size
    os.truncate(tokens, 0)
    rows = said.rows(4, 3)
    long = torch.full((said.LONGEST,), 1, dtype=torch.int32)
    rows |= {"tokens": [long] * 3, "log_prob": [long.float()] * 3}
    with pytest.raises(OSError, match="write of the items of row 4"):
        rb.extend(rows)
    os.truncate(tokens, size)
    rb.extend(said.rows(10, 2))
    assert rb[:]["number"].tolist() == [0, 1, 2, 3, 10, 11]  # what was reserved in vain is void
    assert said.check(rb[[7, 8]]) == [10, 11]
    rb.close()


def test_keys_and_copies_know_rows_that_were_placed(make):
    rb = ReplayBuffer(storage=make(), remover=Lifo(), batch_size=4)
    rb.index_keys("text")
    for first in range(0, 40, 3):
        rb.extend(said.rows(first, 3))
    numbers = numbers_of(rb)
    assert numbers == [0, 1, 2, 39, 40, 41]
    found = rb.rows_of([*map(said.text_of, numbers), said.text_of(38)])
    assert found.rows.tolist() == [0, 1, 2, 3, 4, 5, -1]
    for copied in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert numbers_of(copied) == numbers


def test_rows_move_to_memory_that_processes_share():
    rb = ReplayBuffer(storage=LazyTensorStorage(SIZE, ragged=said.fields(), ragged_layout="slots"), remover=Lifo())
    rb.extend(said.rows(0, SIZE))
    rb.share()
    rb.extend(said.rows(100, 2))
    assert sorted(numbers_of(rb)) == [0, 1, 2, 3, 100, 101]
    rb.close()
