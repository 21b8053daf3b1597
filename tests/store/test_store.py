"""Directory stores: their life, what is refused, and what is left behind."""

import gc
import inspect
import json
import os
import random
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import engram.store
from engram import LazyMemmapStorage, ReplayBuffer, StoreInUse, UncleanStore
from engram.format import files
from engram.store.opening import open_store
from tests.fresh import run, start
from tests.store.stores import CLEAN_AT, PERIOD, WORDS, buffer, content, rows, snapshot
from tests.waiting import until

# ---- life ------------------------------------------------------------------------------------------------------------

SHOW = """
    import json
    from engram import ReplayBuffer
    rb = ReplayBuffer.open(folder)
    extent = rb.storage.extent()
    print(json.dumps({
        "a": rb[:]["a"].tolist(), "b": rb[:]["next", "b"].tolist(), "length": len(rb), "count": rb.write_count,
        "capacity": extent.capacity, "filled": extent.filled, "seam": extent.seam, "lanes": rb.lanes,
        "repair": rb.storage.store.repair, "drawn": rb.sample(50)["a"].tolist(),
    }))
"""


@pytest.mark.parametrize(
    ("options", "writes", "expected"),
    [
        ({}, [(None, 7)], {"a": list(range(7)), "filled": [7], "seam": [7], "count": 7, "capacity": 10}),
        (
            {},
            [(None, 7), (None, 6)],
            {"a": [10, 11, 12, 3, 4, 5, 6, 7, 8, 9], "filled": [10], "seam": [3], "count": 13},
        ),
        (
            {"lanes": 3},
            [(0, 1), (2, 5)],
            {"a": [0, 4, 5, 3], "filled": [1, 0, 3], "seam": [1, 3, 8], "count": 6, "lanes": 3, "capacity": 9},
        ),
    ],
)
def test_another_process_goes_on_with_the_same_rows(tmp_path, options, writes, expected):
    rb = buffer(tmp_path / "store", n=0, **options)
    written = 0
    for lane, n in writes:
        rb.extend(rows(written, n), lane=lane)
        written += n
    rb.close()
    found = json.loads(run(SHOW, folder=str(tmp_path / "store")))
    assert {key: found[key] for key in expected} == expected
    assert found["b"] == [[a, -a] for a in found["a"]]
    assert found["length"] == len(found["a"])
    assert set(found["drawn"]) <= set(found["a"])
    assert found["repair"] is None
    again = ReplayBuffer.open(tmp_path / "store")  # and back: the program closed it at its exit
    assert again.storage.store.repair is None
    seam = again.storage.extent().seam[0]
    assert again.extend(rows(50, 2), lane=0)[0] == seam
    again.close()


def test_tickets_go_on_after_reopening(folder):
    rb = ReplayBuffer.open(folder)
    before = rb.storage.store.tickets_of(torch.arange(7))
    rb.add(rows(0, 1)[0])
    assert int(rb.storage.store.tickets_of(torch.tensor([7]))[0]) > int(before.max())
    rb.close()


def test_a_process_that_opens_twice_gets_the_same_store(folder, tmp_path):
    first = ReplayBuffer.open(folder)
    (tmp_path / "link").symlink_to(folder)
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        for name in (folder, "store", str(folder) + "/", tmp_path / "link", tmp_path / "link" / ".." / "store"):
            assert ReplayBuffer.open(name).storage.store is first.storage.store
    finally:
        os.chdir(here)
    first.close()
    second = ReplayBuffer.open(folder)
    assert second.storage.store is not first.storage.store
    assert second.storage.store.repair is None
    second.close()


def test_threads_that_open_at_once_get_the_same_store(folder, monkeypatch):
    gate = threading.Barrier(8)
    real = files.read_small

    def slow(*args):
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(files, "read_small", slow)

    def open_it(_):
        gate.wait()
        return open_store(folder)

    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(open_it, range(8)))
    assert len({id(store) for store in stores}) == 1
    stores[0].close()


def test_dropped_stores_are_closed(folder):
    gc.collect()  # what other tests left
    descriptors = len(os.listdir("/proc/self/fd"))
    rb = ReplayBuffer.open(folder)
    del rb
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    rb = ReplayBuffer.open(folder)
    assert rb.storage.store.repair is None
    rb.close()
    rb.close()


OPENS = """
    from engram import *
    try:
        ReplayBuffer.open(folder)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("opened")
"""


REPLACES = """
    import torch
    from engram import *
    try:
        ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder, existsok=True)).extend(torch.arange(3))
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("replaced")
"""


def test_nobody_replaces_what_another_live_process_has_open(folder):
    rb = ReplayBuffer.open(folder)
    before = snapshot(folder)
    said = run(REPLACES, folder=str(folder))
    assert said.startswith("StoreInUse expected a store that no process has open, but another process has")
    assert str(folder) in said
    assert snapshot(folder) == before
    rb.close()
    assert run(REPLACES, folder=str(folder)) == "replaced"


def test_another_live_process_has_it_too(folder):
    rb = ReplayBuffer.open(folder)
    assert run(OPENS, folder=str(folder)) == "opened"
    other = start(
        """
        import sys
        import torch
        from engram import ReplayBuffer
        rb = ReplayBuffer.open(folder)
        two = rb[[0, 1]]
        two["a"] = torch.tensor([70, 71]).to(two["a"].dtype)
        rb.extend(two)
        print("written")
        sys.stdin.readline()
        """,
        folder=str(folder),
    ).until("written")
    count = rb.write_count
    assert 71 in rb[:]["a"].tolist()
    rb.extend(rows(80, 2))
    assert rb.write_count == count + 2
    other.kill()
    rb.close()
    assert run(OPENS, folder=str(folder)) == "opened"


def test_an_owner_that_was_killed_has_it_no_longer(folder):
    holder = start(
        """
        import time
        from engram import ReplayBuffer
        rb = ReplayBuffer.open(folder)
        rb.add(rb[0])
        print("open")
        time.sleep(60)
        """,
        folder=str(folder),
    ).until("open")
    with pytest.raises(StoreInUse):
        erase_as_replacing(folder)
    holder.kill()
    rb = ReplayBuffer.open(folder)
    assert rb.storage.store.repair == (0, 0, 0)
    assert len(rb) == 8
    rb.close()


def erase_as_replacing(folder):
    ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder, existsok=True)).extend(torch.arange(3))


def test_a_forked_child_is_a_participant_of_its_own(folder):
    out = run(
        """
        import os
        from engram import ReplayBuffer, StoreInUse
        rb = ReplayBuffer.open(folder)
        pid = os.fork()
        if pid == 0:
            again = ReplayBuffer.open(folder)
            print(again.storage.store is rb.storage.store)
            os._exit(0)  # closes the child's descriptors: the parent must keep its lock
        os.waitpid(pid, 0)
        pid = os.fork()
        if pid == 0:
            rb.close()
            del rb
            os._exit(0)
        os.waitpid(pid, 0)
        print("clean" if rb.storage.store.core.clean else "still open")
        """,
        folder=str(folder),
    )
    assert out.split("\n") == ["True", "still open"]


BATCH = 24


WRITER = f"""
import mmap, torch
from engram import ReplayBuffer
WORDS, PERIOD = {WORDS}, {PERIOD}
{inspect.getsource(content)}
rb = ReplayBuffer.open(folder)
with open(acknowledged, "r+b") as file:
    counter = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
ready = content(torch.arange(2 * PERIOD))
sequence, step = first, 0
while True:
    n = 1 + step * 7 % batch
    step += 1
    at = sequence % PERIOD
    rows = {{"sequence": torch.arange(sequence, sequence + n), "words": ready[at : at + n]}}
    rb.extend(rows) if n > 1 else rb.add({{key: value[0] for key, value in rows.items()}})
    sequence += n
    counter[0] = sequence  # in one store: struct.pack_into writes zeros first, and whoever dies then has acknowledged nothing
"""


def test_killed_writers_leave_whole_rows(tmp_path):
    capacity = 64
    folder, counter = tmp_path / "store", tmp_path / "acknowledged"
    rb = ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder))
    rb.extend({"sequence": torch.tensor([0]), "words": content(torch.tensor([0]))})
    rb.close()
    here = {0: 0}  # row -> sequence number of the acknowledged row there
    next_row, count = 1, 1
    repairs = []
    chance = random.Random(7)
    while len(repairs) < 10 or sum(repair.claims for repair in repairs) < 2:
        assert len(repairs) < 60, "no kill landed inside a write: the test shows nothing"
        first = (len(repairs) + 1) * 1_000_000
        counter.write_bytes(struct.pack("q", first))
        program = start(WRITER, folder=str(folder), acknowledged=str(counter), first=first, batch=BATCH)
        until(lambda: struct.unpack("q", counter.read_bytes())[0] != first or program.poll() is not None)
        time.sleep(chance.random() * 0.01)
        assert program.kill() == -9, program.err
        acknowledged = struct.unpack("q", counter.read_bytes())[0]
        for sequence in range(first, acknowledged):
            here[(next_row + sequence - first) % capacity] = sequence
        unsure = {(next_row + acknowledged - first + i) % capacity for i in range(BATCH)}

        rb = ReplayBuffer.open(folder)
        repair = rb.storage.store.repair
        assert repair is not None
        repairs.append(repair)
        extent = rb.storage.extent()
        live = {row for row in range(capacity) if row in rb.storage}
        assert len(rb) == extent.size == len(live) == len(rb[:]["sequence"])
        assert rb.stats()["void_rows"] == extent.filled[0] - len(live) <= repair.voided + repair.gaps
        for row in live:
            item = rb[row]
            sequence = int(item["sequence"])
            assert torch.equal(item["words"], content(item["sequence"][None])[0]), f"row {row} is torn"
            late = row in unsure and acknowledged <= sequence < acknowledged + BATCH
            assert sequence == here.get(row) or late, f"row {row} holds {sequence}, not {here.get(row)}"
        assert set(here) - unsure <= live, "an acknowledged row is gone"
        assert set(rb.sample(200)["sequence"].tolist()) <= {int(rb[row]["sequence"]) for row in live}

        # Writing goes on behind the last position that was reserved. It fills the whole ring, and heals it.
        seam = extent.seam[0]
        assert seam in {(next_row + acknowledged - first + i) % capacity for i in range(BATCH + 1)}
        fresh = first + 500_000 + torch.arange(capacity)
        written = rb.extend({"sequence": fresh, "words": content(fresh)})
        assert written[0] == seam
        assert len(rb) == capacity
        assert rb.stats()["void_rows"] == 0
        here = dict(zip(written.tolist(), fresh.tolist(), strict=True))
        next_row = seam
        assert rb.write_count > count
        count = rb.write_count
        rb.close()


def killed_while_open(folder):
    program = start(
        """
        import time
        from engram import ReplayBuffer
        rb = ReplayBuffer.open(folder)
        print("open")
        time.sleep(60)
        """,
        folder=str(folder),
    )
    program.until("open").kill()


def test_unclean_stores_of_another_boot_are_refused_unless_accepted(folder, monkeypatch):
    killed_while_open(folder)
    monkeypatch.setattr(engram.store.opening, "_boot_id", lambda: "another")
    before = snapshot(folder)
    with pytest.raises(
        UncleanStore, match=r'nothing is promised of its rows\. Use ReplayBuffer\.open.*unclean="accept"'
    ):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before
    rb = ReplayBuffer.open(folder, unclean="accept")
    assert rb[:]["a"].tolist() == list(range(7))
    assert rb.storage.store.core.boot_id == "another"
    rb.close()
    ReplayBuffer.open(folder).close()


def test_clean_stores_of_another_boot_are_fine(folder, monkeypatch):
    monkeypatch.setattr(engram.store.opening, "_boot_id", lambda: "another")
    rb = ReplayBuffer.open(folder)
    assert rb.storage.store.repair is None
    rb.close()


def test_unclean_takes_two_values(folder):
    before = snapshot(folder)
    with pytest.raises(ValueError, match="unclean: expected 'refuse' or 'accept', got 'yes'"):
        ReplayBuffer.open(folder, unclean="yes")
    assert snapshot(folder) == before


def test_half_written_rows_are_set_aside(folder):
    """As a writer leaves them that died inside a write: claimed, marked, not committed."""
    control, tickets = folder / ".engram" / "control", folder / ".engram" / "tickets"
    ReplayBuffer.open(folder).close()
    words = bytearray(tickets.read_bytes())
    for row, state in ((2, 1), (5, 3)):
        number = struct.unpack_from("Q", words, row * 8)[0] >> 2
        struct.pack_into("Q", words, row * 8, number << 2 | state)
    tickets.write_bytes(words)
    raw = bytearray(control.read_bytes())
    assert struct.unpack_from("Q", raw, CLEAN_AT)[0] == 1
    struct.pack_into("Q", raw, CLEAN_AT, 0)
    struct.pack_into("Q", raw, CLAIM_AT, 9)
    control.write_bytes(raw)

    rb = ReplayBuffer.open(folder)
    assert rb.storage.store.repair == (1, 1, 0)
    assert (
        str(rb.storage.store.repair)
        == "1 unfinished writes, 1 half-written rows and 0 rows that were never begun set aside"
    )
    assert len(rb) == 5
    assert rb[:]["a"].tolist() == [0, 1, 3, 4, 6]
    assert set(rb.sample(300)["a"].tolist()) == {0, 1, 3, 4, 6}
    with pytest.raises(IndexError, match="row 2 is not live"):
        rb[2]
    assert rb.extend(rows(7, 10)).tolist() == [7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    assert len(rb) == 10
    rb.close()


CLAIM_AT = 3 * 4096 + 32  # first claim of the first participant
