"""Rows of any length in slots that are saved and come back: whole, in ticks that write what is new, in rings, and in other lanes."""

import pytest
import torch

from engram import LazyTensorStorage, Lifo, Ragged, ReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from engram.errors import IncompatibleCheckpoint
from engram.saved.inspection import verify
from engram.saved.part_reader import PartReader
from engram.store.ragged_rows import Items
from engram.types import WritePlan
from tests.checkpoint import test_ragged as in_rings
from tests.checkpoint.ragged_buffers import CAPACITY, RING, contents, fill, make, part_of
from tests.storages import ragged_rows as said


def slots(lanes=1, capacity=CAPACITY, folder=None, **more):
    return make(lanes, None, capacity, folder, ragged_layout="slots", **more)


def rings(lanes=1):
    return make(lanes, said.ROOMY)


def place(rb, rows, first):
    """Rows ``[first, …)`` to these places."""
    columns, _ = rb.storage.prepare(said.rows(first, len(rows)), "test", batched=True)
    rb.storage.write(WritePlan(rows=torch.tensor(rows)), columns, len(rows))


def restored(root, lanes=1, **more):
    rb = slots(lanes)
    Checkpointer(root, rb).restore(resume="exact", **more)
    return rb


@pytest.mark.parametrize("n", [5, 100])
@pytest.mark.parametrize("lanes", [1, 3])
def test_rows_come_back_to_slots_and_rings_and_from_them(lanes, n, ram):
    for number, (ours, theirs) in enumerate(((slots, slots), (slots, rings), (rings, slots))):
        rb = fill(ours(lanes), 0, n)
        rb.dumps(ram / str(number))
        state = rb.state_dict()
        for load in (lambda it, state=state: it.load_state_dict(state), lambda it, at=number: it.loads(ram / str(at))):
            other = fill(theirs(lanes), 700, 20)
            load(other)
            assert contents(other) == contents(rb)
            contents(fill(other, 2000, 20))


def test_a_load_without_a_layout_takes_that_of_the_rows(ram):
    rb = fill(slots(), 0, 60)
    rb.dumps(ram / "d")
    other = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    other.loads(ram / "d")
    assert other.storage.store.schema.in_slots
    assert contents(other) == contents(rb)
    ring = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, ragged=said.fields(), ragged_layout="ring"))
    with pytest.raises(IncompatibleCheckpoint, match="larger ragged_bytes"):  # usual rings have less room
        ring.loads(ram / "d")
    assert not ring.storage.initialized


@pytest.mark.filterwarnings("ignore:loads. ")
@pytest.mark.parametrize(("lanes", "capacity"), [(1, 60), (3, 39), (2, 20)])
def test_dumps_are_converted(lanes, capacity, ram):
    rb = fill(slots(), 0, 35)
    rb.dumps(ram / "d")
    other = slots(lanes, capacity)
    other.loads(ram / "d", convert=True)
    kept = contents(other)
    assert kept
    assert all(one in contents(rb) for one in kept)
    assert len(kept) == min(35, capacity // lanes * lanes)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_are_dealt_out_anew(ranks, ram, monkeypatch):
    monkeypatch.setattr(in_rings, "make", lambda lanes=1, ring=RING, capacity=CAPACITY: slots(lanes, capacity))
    in_rings.test_ranks_are_dealt_out_anew(ranks, ram)


@pytest.mark.parametrize("lanes", [1, 3])
def test_every_tick_of_rows_that_are_placed_comes_back(lanes, ram):
    rb, rows = fill(slots(lanes), 0, 60), {}
    generator = torch.Generator().manual_seed(lanes)
    checkpointer = Checkpointer(ram / "s", rb, keep=40)
    for step in range(1, 25):
        some = torch.randperm(len(rb), generator=generator)[: step % 6].tolist()
        if some:
            place(rb, some, 100 * step)
        if step % 7 == 0:
            rb.remove([int(torch.randint(len(rb), (), generator=generator))])
        if step % 5 == 0:
            fill(rb, 100 * step + 50, 5)
        checkpointer.save(step)
        rows[step] = contents(rb)
        with PartReader.open(part_of(ram / "s")) as part:
            assert len(part.listing.pieces) <= lanes * 2 * 20
    assert verify(ram / "s").good
    for step in (1, 9, 17, 24):
        assert contents(restored(ram / "s", lanes, step=step)) == rows[step]
    other = restored(ram / "s", lanes)
    again = Checkpointer(ram / "s", other)
    again.restore(resume="exact")
    place(other, [3], 9000)
    again.save(25)
    assert contents(restored(ram / "s", lanes)) == contents(other)


LONG = {"tokens": Ragged(torch.int32, max_length=2000), "log_prob": Ragged(torch.float32, like="tokens")}


def long_rows(first, n, length=None):
    generator = torch.Generator().manual_seed(first)
    lengths = torch.randint(200, 2001, (n,), generator=generator).tolist() if length is None else [length] * n
    tokens = [torch.full((length,), number, dtype=torch.int32) for number, length in enumerate(lengths, first)]
    return {"number": torch.arange(first, first + n), "tokens": tokens, "log_prob": [it.float() for it in tokens]}


@pytest.mark.parametrize("length", [None, 2000])
def test_a_tick_writes_little_more_than_the_rows_that_were_placed(length, ram):
    """Anywhere among the others; and of a length that all have, so that the old items might pass for new ones."""
    rb = ReplayBuffer(storage=LazyTensorStorage(1500, ragged=LONG, ragged_layout="slots"))
    rb.extend(long_rows(0, 1500, length))
    checkpointer = Checkpointer(ram / "s", rb)
    whole = sum(8 * len(it) for it in rb[:]["tokens"].unbind())
    report = checkpointer.save(0)
    assert whole <= report.bytes_written <= 1.02 * whole + 100_000  # no holes
    for step in range(1, 4):
        rows = long_rows(10_000 * step, 48, length)
        columns, _ = rb.storage.prepare(rows, "test", batched=True)
        at = torch.randperm(1500, generator=torch.Generator().manual_seed(step))[:48]
        rb.storage.write(WritePlan(rows=at), columns, 48)
        new = sum(8 * len(it) for it in rows["tokens"])
        assert checkpointer.save(step).bytes_written <= 1.3 * new
    other = ReplayBuffer(storage=LazyTensorStorage(1500, ragged=LONG, ragged_layout="slots"))
    Checkpointer(ram / "s", other).restore(resume="exact")
    batch = other[:]
    assert torch.equal(batch["number"], rb[:]["number"])
    for number, tokens, values in zip(
        batch["number"], batch["tokens"].unbind(), batch["log_prob"].unbind(), strict=True
    ):
        assert len(tokens) >= 200
        assert bool((tokens == number).all())
        assert bool((values == number).all())


def test_edits_of_other_fields_write_no_items_and_those_of_items_do(ram):
    rb = ReplayBuffer(storage=LazyTensorStorage(200, ragged=LONG, ragged_layout="slots"))
    rb.extend(long_rows(0, 200))
    checkpointer = Checkpointer(ram / "s", rb, keep=3)
    checkpointer.save(1)
    rb.storage.store.edit(torch.arange(200), [0], [torch.arange(200) + 1000])
    assert rb.storage.written().fields[0].key == ("number",)
    assert checkpointer.save(2).bytes_written < 60_000
    store = rb.storage.store
    which = [field.key for field in store.schema.fields].index(("tokens",))
    length = torch.tensor([len(rb[5]["tokens"])], dtype=torch.int32)
    items = Items.of_lengths(torch.full((int(length),), -1, dtype=torch.int32), length)
    store.edit(torch.tensor([5]), [which], [items])
    checkpointer.save(3)
    for step, expected in ((2, 5), (3, -1)):
        other = ReplayBuffer(storage=LazyTensorStorage(200, ragged=LONG, ragged_layout="slots"))
        Checkpointer(ram / "s", other).restore(resume="exact", step=step)
        assert set(other[5]["tokens"].tolist()) == {expected}
        assert other[:]["number"].tolist() == list(range(1000, 1200))


def test_space_of_rows_that_are_gone_is_taken_back(ram):
    """Every row is replaced many times: a checkpoint holds at most twice what its rows do."""
    rb = ReplayBuffer(storage=LazyTensorStorage(100, ragged=LONG, ragged_layout="slots"), remover=Lifo())
    rb.extend(long_rows(0, 100))
    checkpointer = Checkpointer(ram / "s", rb, keep=1)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 25):
        columns, _ = rb.storage.prepare(long_rows(1000 * step, 10), "test", batched=True)
        rb.storage.write(WritePlan(rows=torch.randperm(100, generator=generator)[:10]), columns, 10)
        checkpointer.save(step)
        with PartReader.open(part_of(ram / "s")) as part:
            held = sum(piece.items for piece in part.listing.pieces)
            assert held <= 2 * sum(len(it) for it in rb[:]["tokens"].unbind())


@pytest.mark.filterwarnings("ignore:restore. ")
def test_killed_at_system_calls(ram, monkeypatch):
    monkeypatch.setattr(in_rings, "make", lambda *_: slots())
    in_rings.test_killed_at_system_calls(ram)


@pytest.mark.parametrize("short", [False, True])
def test_rows_that_others_write_meanwhile_are_whole_or_left_out(short, ram, monkeypatch):
    monkeypatch.setattr(in_rings, "make", lambda *_: slots())
    if short:
        in_rings.test_short_dumps_are_exact_whoever_writes(ram)
    else:
        in_rings.test_rows_that_others_write_meanwhile_are_whole_or_left_out(ram)


def test_paranoid_saves_see_items_that_were_changed_through_a_view(ram, monkeypatch):
    monkeypatch.setattr(in_rings, "make", lambda *_: slots())
    in_rings.test_paranoid_saves_see_items_that_were_changed_through_a_view(ram)
