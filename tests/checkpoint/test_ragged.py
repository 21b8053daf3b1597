"""Rows of any length that are saved and come back: whole, in ticks, in other lanes, and in rings of other sizes."""

import contextlib
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from click.testing import CliRunner

from engram import LazyTensorStorage, Ragged, Ranks, ReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from engram.cli import main
from engram.errors import IncompatibleCheckpoint
from engram.saved.inspection import verify
from engram.saved.part_reader import PartReader
from engram.store.ragged_rows import Items
from tests.checkpoint.ragged_buffers import CAPACITY, LONG, RING, contents, fill, heads, long_rows, make, part_of
from tests.saved.system_calls import counted, killed_at
from tests.storages import ragged_rows as said

# ---- whole -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["state", "folder"])
def test_rows_without_items_stay_when_others_follow_a_load(way, tmp_path):
    rb = make(ring=1500, capacity=8)
    for number in range(60):  # the ring of texts wraps, and then all texts are empty
        rb.extend({**said.rows(number, 1), "text": ["x" * 40 if number < 50 else ""]})
    rb.dumps(tmp_path) if way == "folder" else None
    rb.load_state_dict(rb.state_dict()) if way == "state" else rb.loads(tmp_path)
    rb.extend({**said.rows(60, 1), "text": ["x"]})
    assert sorted(rb[:]["number"].tolist()) == [*range(53, 61)]


@pytest.mark.parametrize("n", [5, 30, 100])
@pytest.mark.parametrize("lanes", [1, 3])
def test_states_come_back(lanes, n):
    rb = fill(make(lanes), 0, n)
    rows = contents(rb)
    file = io.BytesIO()
    torch.save(rb.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for ring in (RING, 3 * RING):
        other = make(lanes, ring)
        other.load_state_dict(state)
        assert contents(other) == rows
        contents(fill(other, 500, 60))
        other.load_state_dict(state)  # over rows of before
        assert contents(other) == rows
        contents(fill(other, 500, 300))


def test_a_state_holds_copies_and_lengths():
    rb = fill(make(), 0, 10)
    state = rb.storage.state_dict()
    fill(rb, 10, 60)
    lengths = [said.length_of(number) for number in range(10)]
    names = [field.name for field in rb.storage.written().fields]
    assert state["rows"][names.index("tokens")].tolist() == lengths
    tokens, text, _ = state["items"]
    assert tokens.tolist() == [number for number in range(10) for _ in range(lengths[number])]
    assert bytes(text.tolist()).decode() == "".join(said.text_of(number) for number in range(10))
    assert "heads" not in state


def test_a_state_that_needs_more_room_is_refused():
    rb, other = fill(make(3), 0, 100), make(3, 1000)
    for number in range(700, 705):
        other.extend(said.rows(number, 1), lane=0)
    before = contents(other)
    with pytest.raises(
        IncompatibleCheckpoint, match=r"tokens: .* or \d+ bytes, got \d+ items: \d+ bytes are needed.*ragged_bytes"
    ):
        other.load_state_dict(rb.state_dict())
    assert contents(other) == before


def test_longer_rows_than_here_are_refused():
    rb, state = make(ragged=said.fields(6)), fill(make(), 0, 30).state_dict()
    rb.extend(said.rows(13, 1))
    with pytest.raises(ValueError, match="tokens: row .*expected 0 to 6 items"):
        rb.load_state_dict(state)
    assert len(rb) == 1


def _lengths(value):
    def change(state, at):
        state["rows"][at][0] = value

    return change


BAD_STATES = {
    "negative": (_lengths(-1), ValueError),
    "too long": (_lengths(100), ValueError),
    "other total": (_lengths(said.length_of(0) + 1), ValueError),
    "no items": (lambda state, _: state.pop("items"), KeyError),
    "fewer fields": (lambda state, _: state["items"].pop(), ValueError),
    "other dtype": (lambda state, _: state["items"].__setitem__(0, state["items"][0].long()), TypeError),
    "a dead row": (lambda state, _: state["numbers"].__setitem__(1, 0), ValueError),
}


@pytest.mark.parametrize("what", BAD_STATES)
def test_states_that_no_store_saves(what):
    change, error = BAD_STATES[what]
    rb, other = fill(make(), 0, 10), fill(make(), 700, 10)
    state = rb.storage.state_dict()
    change(state, [field.name for field in rb.storage.written().fields].index("tokens"))
    before = contents(other)
    with pytest.raises(error):
        other.storage.load_state_dict(state)
    assert contents(other) == before


@pytest.mark.parametrize("n", [5, 100])
@pytest.mark.parametrize("lanes", [1, 3])
def test_dumps_come_back_exactly(lanes, n, ram):
    rb = fill(make(lanes), 0, n)
    rows = contents(rb)
    rb.dumps(ram / "d")
    assert verify(ram / "d").good
    twin, other = make(lanes), make(lanes, 3 * RING)
    twin.loads(ram / "d")
    assert heads(twin) == heads(rb)
    assert contents(twin) == rows
    assert contents(fill(twin, 500, 100)) == contents(fill(rb, 500, 100))
    assert heads(twin) == heads(rb)
    other.loads(ram / "d")
    assert contents(other) == rows
    fill(other, 500, 300)
    other.loads(ram / "d")
    assert contents(other) == rows
    other.dumps(ram / "again")
    twin.loads(ram / "d")
    assert contents(twin) == rows
    contents(fill(twin, 500, 100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint16, torch.bool, torch.complex64, torch.float8_e5m2])
def test_items_of_any_dtype_and_shape_come_back(dtype, ram):
    fields = {"a": Ragged(dtype, max_length=5, shape=(2, 3)), "b": Ragged(torch.float64, like="a")}

    def made(nbytes):
        return ReplayBuffer(storage=LazyTensorStorage(9, ragged=fields, ragged_bytes=nbytes))

    rb = made(2000)
    for number in range(14):
        a = torch.randint(0, 2, (number % 6, 2, 3), generator=torch.Generator().manual_seed(number)).to(dtype)
        rb.add({"a": a, "b": torch.full((number % 6,), number / 3, dtype=torch.float64)})
    rows = [(it["a"].view(torch.uint8).tolist(), it["b"].tolist()) for it in map(rb.__getitem__, range(9))]
    rb.dumps(ram / "d")
    for nbytes in (2000, 9000):
        for load in (lambda it: it.loads(ram / "d"), lambda it: it.load_state_dict(rb.state_dict())):
            other = made(nbytes)
            load(other)
            assert [
                (it["a"].view(torch.uint8).tolist(), it["b"].tolist()) for it in map(other.__getitem__, range(9))
            ] == rows


def test_a_folder_is_saved_and_takes_rows_over(ram):
    rb = fill(make(3, folder=ram / "store"), 0, 100)
    rows = contents(rb)
    rb.dumps(ram / "d")
    fill(rb, 500, 50)
    rb.loads(ram / "d")
    assert contents(rb) == rows
    rb.close()
    again = ReplayBuffer.open(ram / "store")
    assert contents(again) == rows
    contents(fill(again, 900, 100))


def test_declared_fields_that_differ_are_refused(ram):
    fill(make(), 0, 10).dumps(ram / "d")
    rb = make(ragged={**said.fields(), "tokens": Ragged(torch.int64, max_length=12)})
    with pytest.raises(IncompatibleCheckpoint, match=r"tokens: expected Ragged\(torch.int64"):
        rb.loads(ram / "d")
    assert not len(rb)


@pytest.mark.parametrize(("lanes", "capacity"), [(1, 60), (4, 200), (2, 16)])
@pytest.mark.filterwarnings("ignore:loads. .*left out")
def test_dumps_are_converted(lanes, capacity, ram):
    """To other capacities, lanes and rings: all rows where there is room, else some of them, each whole and once."""
    rb = fill(make(3), 0, 100)
    rb.dumps(ram / "d")
    other = make(lanes, 2 * RING, capacity)
    other.loads(ram / "d", convert=True)
    rows = contents(other)
    assert len({one[0] for one in rows}) == len(rows) >= min(capacity // 2, len(rb))
    assert {str(one) for one in rows} <= {str(one) for one in contents(rb)}
    if capacity > CAPACITY:
        assert len(rows) == len(rb)
    contents(fill(other, 500, 3 * capacity))


def test_a_ring_that_is_too_small_is_named_before_a_conversion(ram):
    rb = fill(make(ring=said.ROOMY), 0, 39)
    rb.dumps(ram / "d")
    other = fill(make(capacity=60), 700, 5)
    before = contents(other)
    with pytest.raises(IncompatibleCheckpoint, match=r"tokens: .*bytes are needed"):
        other.loads(ram / "d", convert=True)
    assert contents(other) == before


def on_all(ranks, work):
    """Call ``work(rank, ranks)`` in a thread for each rank. What the calls return, in their order."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks), Ranks.threads(ranks)))


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_are_dealt_out_anew(ranks, ram):
    """Five rows to a trajectory: by a restore, and by ``engram reshard``."""
    done = torch.arange(5) == 4

    def save(rank, its):
        rb = fill(make(), 1000 * rank, 25, done=done)
        Checkpointer(ram / "s", rb, ranks=its).save(1)
        assert len(rb) == 25
        return contents(rb)

    def load(rank, its, root):
        rb = make(ring=3 * RING, capacity=-(-3 * CAPACITY // ranks))
        Checkpointer(root, rb, ranks=its).restore(incomplete={"open": "keep", "headless": "keep"})
        rows = contents(rb)
        contents(fill(rb, 5000, 200, done=done))
        return rows

    saved = sorted(one for rows in on_all(2, save) for one in rows)
    options = ["--ranks", ranks, "--lanes", 2, "--open", "keep", "--headless", "keep"]
    result = CliRunner().invoke(main, [*map(str, ["reshard", ram / "s", ram / "t", *options])])
    assert not result.exit_code, result.output
    assert verify(ram / "t").good
    for root in (ram / "s", ram / "t"):
        found = on_all(ranks, lambda rank, its: load(rank, its, root))
        assert sorted(one for rows in found for one in rows) == saved


# ---- ticks -----------------------------------------------------------------------------------------------------------------


def restored(root, lanes=1, ring=RING, **more):
    rb = make(lanes, ring)
    Checkpointer(root, rb).restore(resume="exact", **more)
    return rb


@pytest.mark.parametrize("lanes", [1, 3])
def test_every_tick_comes_back(lanes, ram):
    rb, rows = make(lanes), {}
    checkpointer = Checkpointer(ram / "s", rb, keep=9)
    for step in range(1, 9):
        contents(fill(rb, 40 * step, 15))
        checkpointer.save(step)
        rows[step] = contents(rb)
    for step in (1, 2, 5, 8):
        assert contents(restored(ram / "s", lanes, step=step)) == rows[step]
    assert verify(ram / "s").good
    other = make(lanes)
    again = Checkpointer(ram / "s", other)
    again.restore(resume="exact")
    report = again.save(9)
    assert report.bytes_linked > 10 * (report.bytes_written - 10_000)  # all but its documents
    fill(other, 2000, 10)
    again.save(10)
    assert contents(restored(ram / "s", lanes)) == contents(other)


@pytest.mark.parametrize(("ring", "linked"), [(RING, True), (3 * RING, False)])
@pytest.mark.parametrize("lanes", [1, 3])
def test_ticks_go_on_behind_rows_that_were_loaded_over_others(lanes, ring, linked, ram):
    """Offsets are larger there than where they were saved, and are saved as they were."""
    rb = fill(make(lanes), 0, 70)
    Checkpointer(ram / "s", rb).save(1)
    other = fill(make(lanes, ring), 3000, 150)
    checkpointer = Checkpointer(ram / "s", other)
    checkpointer.restore(resume="exact")
    assert contents(other) == contents(rb)
    report = checkpointer.save(2)
    assert (report.bytes_linked > 5000) == linked
    assert contents(restored(ram / "s", lanes)) == contents(rb)
    contents(fill(other, 5000, 15))
    checkpointer.save(3)
    assert contents(restored(ram / "s", lanes, ring)) == contents(other)
    assert verify(ram / "s").good


def test_a_tick_writes_little_more_than_what_is_new(ram):
    rb = ReplayBuffer(storage=LazyTensorStorage(4000, ragged=LONG, ragged_bytes=12e6))
    for first in range(0, 1600, 200):  # the ring wraps
        rb.extend(long_rows(first, 200))
    checkpointer = Checkpointer(ram / "s", rb)
    checkpointer.save(0)
    for step in range(1, 4):
        rows = long_rows(10_000 * step, 64)
        rb.extend(rows)
        new = sum(8 * len(it) for it in rows["tokens"])
        assert checkpointer.save(step).bytes_written <= 1.3 * new
    other = ReplayBuffer(storage=LazyTensorStorage(4000, ragged=LONG, ragged_bytes=12e6))
    Checkpointer(ram / "s", other).restore(resume="exact")
    batch = other[:]
    assert torch.equal(batch["number"], rb[:]["number"])
    for number, tokens, values in zip(
        batch["number"], batch["tokens"].unbind(), batch["log_prob"].unbind(), strict=True
    ):
        assert len(tokens) >= 200
        assert bool((tokens == number).all())
        assert bool((values == number).all())


SHORT = {"tokens": Ragged(torch.int32, max_length=8)}


def ticked(rows, root):
    """A store full of so many short rows, two ticks of some others, and the report of the second one."""
    storage = LazyTensorStorage(rows, ragged=SHORT, ragged_bytes=16 * (rows + 200))
    rb = ReplayBuffer(storage=storage)
    checkpointer = Checkpointer(root, rb)
    for step, n in enumerate([rows, 64, 64]):
        rb.extend(
            {"number": torch.arange(n), "tokens": (torch.zeros(4 * n, dtype=torch.int32), torch.arange(n + 1) * 4)}
        )
        report = checkpointer.save(step)
    return report


def test_a_tick_over_more_rows_links_as_many_files_and_reads_as_little_of_its_parent(ram, monkeypatch):
    found, read = [], PartReader.read

    def noted(self, file, offset, into):
        names.append(file)
        return read(self, file, offset, into)

    monkeypatch.setattr(PartReader, "read", noted)
    for rows in (60_000, 240_000):
        names = []
        report = ticked(rows, ram / str(rows))
        found.append((report, [*report.path.rglob("*.bin")]))
        assert 1 <= len([name for name in names if str(name).startswith("seg/")]) <= 4  # of two ticks
        segments = [it for it in found[-1][1] if it.parent.name == "seg"]
        assert len([it for it in segments if it.stat().st_nlink == 1]) in (1, 2)
        assert 120 <= len(segments) <= 130
    (small, of_small), (large, of_large) = found
    assert abs(len(of_large) - len(of_small)) <= 3
    assert large.bytes_written <= small.bytes_written + 2 * 20 * (240_000 - 60_000) // 120


def test_small_ticks_are_joined(ram):
    rb = make()
    checkpointer, most = Checkpointer(ram / "s", rb, keep=1), 0
    for step in range(20):
        fill(rb, 5 * step, 5)
        checkpointer.save(step)
        with PartReader.open(part_of(ram / "s")) as part:
            most = max(most, len(part.listing.pieces))
    assert 10 < most <= 2 * 16 + 2
    assert contents(restored(ram / "s")) == contents(rb)


def edit(rb, row, value):
    """Replace the tokens of a row by as many others."""
    store = rb.storage.store
    which = [field.key for field in store.schema.fields].index(("tokens",))
    length = torch.tensor([len(rb[row]["tokens"])], dtype=torch.int32)
    items = Items.of_lengths(torch.full((int(length),), value, dtype=torch.int32), length)
    store.edit(torch.tensor([row]), [which], [items])


def test_edited_items_are_in_the_next_checkpoint_alone(ram):
    rb = fill(make(ring=said.ROOMY), 0, 30)
    checkpointer = Checkpointer(ram / "s", rb, keep=3)
    checkpointer.save(1)
    before = contents(rb)
    row = next(row for row, one in enumerate(before) if len(one[1]) > 3)
    edit(rb, row, -7)
    checkpointer.save(2)
    assert contents(restored(ram / "s", ring=said.ROOMY, step=1)) == before
    after = contents(restored(ram / "s", ring=said.ROOMY), edited=True)
    assert after[row][1] == [-7] * len(before[row][1])
    assert after == contents(rb, edited=True)
    assert [one for at, one in enumerate(after) if at != row] == [one for at, one in enumerate(before) if at != row]


def test_edits_of_other_fields_write_no_items(ram):
    rb = ReplayBuffer(storage=LazyTensorStorage(400, ragged=LONG, ragged_bytes=8e6))
    rb.extend(long_rows(0, 200))
    checkpointer = Checkpointer(ram / "s", rb)
    checkpointer.save(1)
    rb.storage.store.edit(torch.arange(200), [0], [torch.arange(200) + 1000])
    assert rb.storage.written().fields[0].key == ("number",)
    assert checkpointer.save(2).bytes_written < 100_000
    other = ReplayBuffer(storage=LazyTensorStorage(400, ragged=LONG, ragged_bytes=8e6))
    Checkpointer(ram / "s", other).restore(resume="exact")
    assert other[:]["number"].tolist() == list(range(1000, 1200))
    assert [int(it[0]) for it in other[:]["tokens"].unbind()] == list(range(200))


def test_a_checkpoint_of_one_row_comes_back(ram):
    rb = make()
    rb.extend(said.rows(7, 1))
    Checkpointer(ram / "saved", rb).save(1)
    other = make()
    Checkpointer(ram / "saved", other).restore()
    assert contents(other) == contents(rb)
    assert other[:]["number"].tolist() == [7]
    over = fill(make(), 500, 60)  # whose offsets are larger than where the row was saved
    Checkpointer(ram / "saved", over).restore(resume="exact")
    Checkpointer(ram / "more", over).save(1)
    assert contents(restored(ram / "more")) == contents(over) == contents(rb)


def test_evicted_rows_are_not_saved(ram):
    rb = fill(make(ring=700), 0, 100)
    live = contents(rb)
    assert len(live) < CAPACITY / 2
    Checkpointer(ram / "s", rb).save(1)
    rb.dumps(ram / "d")
    for load in (lambda it: Checkpointer(ram / "s", it).restore(resume="exact"), lambda it: it.loads(ram / "d")):
        other = make(ring=700)
        load(other)
        assert contents(other) == live
        assert len(other) == len(rb)
        contents(fill(other, 300, 50))
    state = rb.storage.state_dict()
    assert [len(items) for items in state["items"][:1]] == [sum(len(one[1]) for one in live)]


@contextlib.contextmanager
def written_to(rb, number):
    """Another thread appends rows inside."""
    stop = threading.Event()

    def write():
        first = number
        while not stop.is_set():
            fill(rb, first, 5)
            first += 5

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def test_rows_that_others_write_meanwhile_are_whole_or_left_out(ram):
    rb = fill(make(), 0, 30)
    checkpointer = Checkpointer(ram / "s", rb, keep=20)
    with written_to(rb, 30):
        for step in range(8):
            checkpointer.save(step)
    for step in range(8):
        numbers = [one[0] for one in contents(restored(ram / "s", step=step))]
        assert sorted(numbers) == sorted(set(numbers))


def test_short_dumps_are_exact_whoever_writes(ram):
    rb = fill(make(), 0, 30)
    with written_to(rb, 30):
        for number in range(3):
            rb.dumps(ram / f"rb{number}")
            rb.storage.dumps(ram / f"storage{number}")
    for number in range(3):
        for load in (lambda it: it.loads(ram / f"rb{number}"), lambda it: it.storage.loads(ram / f"storage{number}")):
            other = make()
            load(other)
            numbers = sorted(one[0] for one in contents(other))
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert len(numbers) > 20


def test_paranoid_saves_see_items_that_were_changed_through_a_view(ram):
    rb = fill(make(), 0, 30)
    checkpointer = Checkpointer(ram / "s", rb, paranoid=True)
    checkpointer.save(1)
    checkpointer.save(2)
    rb.storage.store.items[1][:200] += 1
    with pytest.raises(RuntimeError, match="changed through a view"):
        checkpointer.save(3)


@pytest.mark.filterwarnings("ignore:restore. ")
def test_killed_at_system_calls(ram):
    """A save that links; the checkpoint before, or this one, comes back."""

    def begun(folder):
        rb = fill(make(), 0, 30)
        checkpointer = Checkpointer(folder, rb, keep=2)
        checkpointer.save(1)
        before = contents(rb)
        fill(rb, 500, 10)
        return checkpointer, before, contents(rb)

    checkpointer = begun(ram / "count")[0]
    calls = counted(lambda: checkpointer.save(2)).calls
    seen = set()
    for number in (calls // 3, calls // 2, calls - 12, calls - 1):
        folder = ram / str(number)
        checkpointer, before, after = begun(folder)
        assert killed_at(number, lambda: checkpointer.save(2))
        found = contents(restored(folder))
        assert found in (before, after)
        seen.add(found == after)
    assert False in seen
