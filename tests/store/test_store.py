"""Directory stores: their life, what is refused, and what is left behind."""

import copy
import errno
import fcntl
import gc
import inspect
import json
import mmap
import os
import pickle
import random
import shutil
import stat
import struct
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

import engram.store
from engram import (
    CorruptStore,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    StoreInUse,
    UncleanStore,
    _native,
)
from engram.format import files
from engram.format import schema as schemas
from engram.format.schema import Field, Node, Schema
from engram.store import create_store, erase, open_store
from engram.types import Plan
from tests import stress
from tests.fresh import run, start


def rows(start, n):
    """Rows that say which they are."""
    number = torch.arange(start, start + n)
    return TensorDict({"a": number, "next": {"b": torch.stack([number, -number], 1).float()}}, batch_size=[n])


def buffer(folder, capacity=10, n=7, **options):
    rb = ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder, **options))
    if n:
        rb.extend(rows(0, n))
    return rb


def snapshot(folder):
    """Everything about a folder that could change. ``alive`` is not opened: closing it would drop this process's lock."""
    found = {}
    for base, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(base, name)
            status = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(status.st_mode) and name != "alive" else None
            found[str(path.relative_to(folder))] = (
                status.st_mode,
                status.st_size,
                status.st_mtime_ns,
                status.st_ino,
                content,
            )
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A store that was closed in order."""
    folder = tmp_path_factory.mktemp("template") / "store"
    rb = buffer(folder)
    rb.sample(2)
    rb.close()
    return folder


@pytest.fixture
def folder(template, tmp_path):
    """A copy of a store that was closed in order."""
    shutil.copytree(template, tmp_path / "store", copy_function=shutil.copy2)
    return tmp_path / "store"


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


# ---- death -----------------------------------------------------------------------------------------------------------

WORDS = 4096  # per row: 32 KiB, so that a kill often lands inside a write
BATCH = 24
PERIOD = 256


def content(sequence):
    """Every word of a row derives from its number. It repeats after a few rings, so that a writer can have it at hand."""
    return (sequence[:, None] % PERIOD * 0x9E3779B97F4A7C1 + 1) ^ (torch.arange(WORDS) * 0x2545F4914F6CDD1)


WRITER = f"""
import mmap, struct, torch
from engram import ReplayBuffer
WORDS, PERIOD = {WORDS}, {PERIOD}
{inspect.getsource(content)}
rb = ReplayBuffer.open(folder)
with open(acknowledged, "r+b") as file:
    counter = mmap.mmap(file.fileno(), 8)
ready = content(torch.arange(2 * PERIOD))
sequence, step = first, 0
while True:
    n = 1 + step * 7 % batch
    step += 1
    at = sequence % PERIOD
    rows = {{"sequence": torch.arange(sequence, sequence + n), "words": ready[at : at + n]}}
    rb.extend(rows) if n > 1 else rb.add({{key: value[0] for key, value in rows.items()}})
    sequence += n
    struct.pack_into("q", counter, 0, sequence)
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
        deadline = time.monotonic() + 30
        while struct.unpack("q", counter.read_bytes())[0] == first and program.poll() is None:
            assert time.monotonic() < deadline
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


CLEAN_AT = 4096 + 56  # lock page: boot_id 40, pid namespace 8, generation 8, clean
CLAIM_AT = 3 * 4096 + 32  # first claim of the first participant
HEADER_BYTES = 96 + 6 * 32  # with the directory of sections


# ---- damage ----------------------------------------------------------------------------------------------------------

PARTS = ["a.memmap", "next/b.memmap", ".engram/control", ".engram/tickets", ".engram/alive", ".engram/store.json"]


def damage(path, how):
    match how:
        case "empty":
            path.write_bytes(b"")
        case "a byte short":
            path.write_bytes(path.read_bytes()[:-1])
        case "a byte long":
            path.write_bytes(path.read_bytes() + b"\0")
        case "a page long":
            path.write_bytes(path.read_bytes() + b" " * 4096)
        case "missing":
            path.unlink()
        case _:
            path.rename(path.with_name("elsewhere"))
            match how:
                case "a folder":
                    path.mkdir()
                case "a FIFO":
                    os.mkfifo(path)
                case "a link":
                    path.symlink_to("elsewhere")


DAMAGE = ["empty", "a byte short", "a byte long", "a page long", "missing", "a folder", "a FIFO", "a link"]


@pytest.mark.parametrize(
    ("part", "how"),
    [(part, how) for part in PARTS for how in (DAMAGE[2:] if part == ".engram/alive" else DAMAGE)],
)
def test_damaged_files_are_named_and_left_as_they_are(folder, part, how):
    damage(folder / part, how)
    before = snapshot(folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(CorruptStore, match=f"{folder / part}: "):
            ReplayBuffer.open(folder)
    assert snapshot(folder) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("part", ["next", ".engram"])
@pytest.mark.parametrize("how", ["a file", "an empty folder", "missing"])
def test_damaged_folders_are_noticed(folder, part, how):
    shutil.rmtree(folder / part)
    if how == "a file":
        (folder / part).write_text("")
    elif how == "an empty folder":
        (folder / part).mkdir()
    before = snapshot(folder)
    gone = (part, how) == (".engram", "missing")  # then there is no store
    with pytest.raises(FileNotFoundError if gone else CorruptStore, match=f"{folder}"):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before


def test_every_changed_byte_of_the_description_is_noticed(folder):
    path = folder / ".engram" / "store.json"
    good = path.read_bytes()
    for at in range(len(good)):
        for change in (1, 0x80):
            path.write_bytes(good[:at] + bytes([good[at] ^ change]) + good[at + 1 :])
            with pytest.raises((CorruptStore, IncompatibleStore), match=str(folder)):
                open_store(folder)
    path.write_bytes(good)
    open_store(folder).close()


def test_descriptions_of_another_store_are_noticed(folder, tmp_path):
    other = buffer(tmp_path / "other", capacity=10, n=0)
    other.extend(rows(0, 3).exclude("next"))
    other.close()
    path = folder / ".engram" / "store.json"
    schema = schemas.decode(path.read_bytes(), "")
    for raw in (
        (tmp_path / "other" / ".engram" / "store.json").read_bytes(),  # fewer fields: every file it names is there
        json.dumps(json.loads(path.read_bytes())).encode(),  # the same with other spaces
        schemas.encode(type(schema)(10, 1, (), schema.fields[::-1], node_turned(schema.structure))),
    ):
        path.write_bytes(raw)
        with pytest.raises(CorruptStore, match=r"store\.json: expected the description this store was made with"):
            open_store(folder)


def node_turned(node):
    """The same structure with the two fields swapped."""
    if node.kind == "leaf":
        return Node("leaf", field=1 - node.field)
    return Node(
        node.kind,
        children={key: node_turned(child) for key, child in node.children.items()},
        type=node.type,
        batch=node.batch,
    )


def test_every_changed_byte_of_the_header_is_noticed(folder):
    path = folder / ".engram" / "control"
    good = path.read_bytes()
    for at in range(HEADER_BYTES):
        for change in (1, 0x80) if at < 96 else (1 << at % 8,):
            path.write_bytes(good[:at] + bytes([good[at] ^ change]) + good[at + 1 :])
            with pytest.raises((CorruptStore, IncompatibleStore), match="control"):
                open_store(folder)
    path.write_bytes(good)
    open_store(folder).close()


def crc32c(raw):
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def rewrite_header(folder, **changes):
    """Change words of the header as a program of another kind would have written them, checksum included."""
    path = folder / ".engram" / "control"
    raw = bytearray(path.read_bytes())
    places = {"major": (8, "I"), "minor": (12, "I"), "order": (16, "I"), "abi": (24, "Q"), "sum": (88, "Q")}
    for name, value in changes.items():
        at, kind = places[name]
        struct.pack_into(kind, raw, at, value)
    struct.pack_into("I", raw, 20, 0)
    struct.pack_into("I", raw, 20, crc32c(raw[:HEADER_BYTES]))
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"major": 3}, "format 3, this engram reads format 2"),
        ({"major": 1}, "format 1, this engram reads format 2"),
        ({"abi": 1}, "another platform"),
        ({"order": 0x04030201}, "the other byte order"),
    ],
)
def test_control_blocks_of_another_kind_are_incompatible(folder, changes, says):
    rewrite_header(folder, **changes)
    before = snapshot(folder)
    with pytest.raises(IncompatibleStore, match=says):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before


def test_control_blocks_of_a_newer_minor_format_are_fine(folder):
    rewrite_header(folder, minor=7)
    rb = ReplayBuffer.open(folder)
    assert len(rb) == 7
    rb.close()


@pytest.mark.parametrize(
    ("version", "advice"),
    [([1, 0], "An older engram wrote it: read it with that one"), ([2, 1], "upgrade to read it"), ([3, 0], "upgrade")],
)
def test_descriptions_of_another_format_are_incompatible(folder, version, advice):
    path = folder / ".engram" / "store.json"
    raw = json.dumps({**json.loads(path.read_bytes()), "version": version, "more": {}}).encode()
    path.write_bytes(raw)
    rewrite_header(folder, sum=schemas.fingerprint(raw))
    before = snapshot(folder)
    says = rf"store\.json: expected format 2\.0, got {version[0]}\.{version[1]}\. .*{advice}"
    with pytest.raises(IncompatibleStore, match=says):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before


HOSTILE = {
    "rows beyond the files": {"capacity": 1 << 40},
    "more rows than memory": {"capacity": 1 << 57},
    "another geometry": {"lanes": 2},
    "huge field": {"fields": [{"key": ["a"], "dtype": "int64", "shape": [1 << 50]}]},
    "file outside": {"fields": [{"key": ["..", "..", "etc", "passwd"], "dtype": "int64", "shape": []}]},
    "a field without bytes and with a huge size": {"fields": [{"key": ["a"], "dtype": "int64", "shape": [0, 1 << 52]}]},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_hostile_descriptions_with_a_good_sum_map_nothing(folder, changes):
    """Whoever writes store.json can write its sum into control, too."""
    path = folder / ".engram" / "store.json"
    tree = {**json.loads(path.read_bytes()), **changes}
    if "fields" in changes:
        structure = {"kind": "leaf", "field": 0}
        for part in reversed(changes["fields"][0]["key"]):
            structure = {"kind": "dict", "children": {part: structure}}
        tree["structure"] = structure
    raw = json.dumps(tree).encode()
    path.write_bytes(raw)
    rewrite_header(folder, sum=schemas.fingerprint(raw))
    before = snapshot(folder.parent)
    if changes.get("fields", [{}])[0].get("shape") == [0, 1 << 52]:
        open_store(folder).close()  # strange, but it can be had
        return
    began = time.monotonic()
    with pytest.raises(CorruptStore):
        open_store(folder)
    assert time.monotonic() - began < 1
    assert snapshot(folder.parent) == before


@pytest.mark.parametrize(
    "raw",
    [
        b" " * (2 << 20),
        b'{"a":' * 100_000,
        b"[" * (1 << 20),
        b'{"version":[2,0],"capacity":NaN}',
        b'{"a":1,"a":2}',
        b"\xff\xfe",
    ],
    ids=["2 MiB", "100,000 deep", "1 MiB of lists", "NaN", "a key twice", "not UTF-8"],
)
def test_descriptions_that_are_no_descriptions(folder, raw):
    (folder / ".engram" / "store.json").write_bytes(raw)
    before = snapshot(folder)
    began = time.monotonic()
    with pytest.raises(CorruptStore, match=r"store\.json: "):
        open_store(folder)
    assert time.monotonic() - began < 5
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "type_name",
    ["os:stat_result", "os:path", "posix:system", ":", "no_such_module:C", "collections:OrderedDict", "a b:c.d"],
)
def test_classes_are_looked_up_never_imported(folder, type_name):
    path = folder / ".engram" / "store.json"
    tree = json.loads(path.read_bytes())
    tree["structure"]["children"]["next"] |= {"kind": "tensorclass", "type": type_name}
    raw = json.dumps(tree).encode()
    path.write_bytes(raw)
    rewrite_header(folder, sum=schemas.fingerprint(raw))
    before = {name: content[4] for name, content in snapshot(folder).items()}
    with pytest.raises(TypeError, match=r"which this program has not defined\. Import it first"):
        ReplayBuffer.open(folder)
    assert {name: content[4] for name, content in snapshot(folder).items()} == before


def test_stray_bytes_in_the_words_never_crash(folder, tmp_path):
    """Any byte behind the header may be anything: a typed error or rows, never an index outside, never a hang."""
    out = run(
        """
        import random, shutil
        from pathlib import Path
        import torch
        from engram import *
        from engram.store import Store
        good = Path(folder)
        control, tickets = (good / ".engram" / name for name in ("control", "tickets"))
        words = {path: path.read_bytes() for path in (control, tickets)}
        chance = random.Random(3)
        for turn in range(150):
            path = control if turn % 3 else tickets
            raw = bytearray(words[path])
            for _ in range(chance.choice([1, 1, 8])):
                if path == tickets:
                    at = chance.randrange(len(raw))
                else:  # lock page, counters, participants, lanes
                    start, size = chance.choice([(4096, 72), (8192, 160), (12288, 256), (len(raw) - 64, 24)])
                    at = start + chance.randrange(size)
                raw[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
            path.write_bytes(raw)
            try:
                rb = ReplayBuffer.open(good, unclean="accept")
            except (CorruptStore, UncleanStore):
                pass
            else:
                for use in (lambda: rb[:], lambda: rb.sample(20), lambda: rb[3], lambda: len(rb), rb.stats,
                            lambda: rb.storage.extent()):
                    try:
                        use()
                    except (EngramError, IndexError):
                        pass
                rb.close()
            for path, raw in words.items():
                path.write_bytes(raw)
        print("done")
        """,
        folder=str(folder),
    )
    assert out.split("\n")[-1] == "done"


def put_word(path, at, value, kind="Q"):
    raw = bytearray(path.read_bytes())
    struct.pack_into(kind, raw, at, value)
    path.write_bytes(raw)


PAUSE_AT, COUNTERS_AT, LANES_AT = CLEAN_AT + 8, 8192, 45056


@pytest.mark.parametrize("word", [1, 2, 256, 257, 1 << 32, 1 | 1 << 32, (1 << 64) - 1])
def test_a_closed_store_is_paused_by_nobody(folder, word):
    """Whatever the word says: writes go on, and no row is lost."""
    put_word(folder / ".engram" / "control", PAUSE_AT, word)
    rb = ReplayBuffer.open(folder)
    rb.extend(rows(7, 1))
    assert rb[:]["a"].tolist() == list(range(8))
    rb.close()


@pytest.mark.parametrize("word", [3, 257, 1 << 32, (1 << 64) - 1])
def test_a_pause_of_an_entry_that_nobody_has_ends(folder, word):
    """Entry 2 is free, others there are not: nobody would ever end it."""
    rb = ReplayBuffer.open(folder)
    with open(folder / ".engram" / "control", "r+b") as file, mmap.mmap(file.fileno(), 0) as live:
        struct.pack_into("Q", live, PAUSE_AT, word)
        rb.extend(rows(7, 1))
    assert rb[:]["a"].tolist() == list(range(8))
    rb.close()


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (COUNTERS_AT + 72, 8, "void rows"),
        (COUNTERS_AT + 72, 1 << 63, "void rows"),
        (COUNTERS_AT, 0, "ticket counter"),
        (COUNTERS_AT, 1 << 60, "ticket counter"),
        (LANES_AT, 1 << 60, "positions"),
        (LANES_AT + 8, 7, "multiples of their length"),
        (LANES_AT + 16, (1 << 64) - 1, "positions"),
    ],
)
def test_a_closed_store_that_says_of_itself_what_none_does_is_refused(folder, at, value, says):
    put_word(folder / ".engram" / "control", at, value)
    before = snapshot(folder)
    with pytest.raises(CorruptStore, match=rf"{folder}/\.engram/control: .*{says}"):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before


LIVE_DAMAGE = """
    import mmap, random, shutil, struct, tempfile
    from pathlib import Path
    import torch
    from tensordict import TensorDict
    from engram import *
    from engram import _native
    _native._core.set_wait_limit(0.005)
    chance = random.Random(seed)
    engram, nan, inf = Path(".engram"), float("nan"), float("inf")
    # Kind: file, first byte, bytes (0: to the end). Of a lock only what lies before it and behind.
    where = {
        "locks": ("control", 4096, 72), "counters": ("control", 8192, 160), "participants": ("control", 12288, 256),
        "lanes": ("control", 45056, 0), "tickets": ("tickets", 0, 0), "priorities": ("indexes/main/priorities", 0, 256),
        "tree": ("indexes/main/priorities", 4096, 0), "pass": ("indexes/epochs/pass", 0, 128),
    }
    name, start, size = where[kind]

    def open_all(folder):
        rb = ReplayBuffer.open(folder, sampler=PrioritizedSampler(24, 0.7, 0.5))
        made = dict(storage=rb.storage, batch_size=6)
        return rb, [rb, ReplayBuffer(**made, sampler=SliceSampler(slice_len=3, traj_key="episode")),
                    ReplayBuffer(**made, sampler=SamplerWithoutReplacement(index="epochs"))]

    def data(n):
        number = torch.arange(n)
        return TensorDict({"a": number, "episode": number // 4}, batch_size=[n])

    first = Path(tempfile.mkdtemp(dir=place)) / "good"
    rb = ReplayBuffer(storage=LazyMemmapStorage(24, scratch_dir=first, lanes=2), sampler=PrioritizedSampler(24, 0.7, 0.5))
    rb.extend(data(17), lane=0)
    rb.extend(data(5), lane=1)
    rb.update_priority(torch.arange(5), torch.rand(5))
    epochs = ReplayBuffer(storage=rb.storage, batch_size=6, sampler=SamplerWithoutReplacement(index="epochs"))
    epochs.sample()
    rb.close()

    def bad(was):
        pick = chance.randrange(8)
        if pick == 0: return struct.pack("=d", chance.choice([nan, inf, -inf, -1.0, 1e308]))
        value = struct.unpack("=Q", was)[0]
        value = [chance.randrange(4), value ^ 1 << chance.randrange(64), value + chance.randrange(1, 60),
                 value - chance.randrange(1, 60), (1 << 64) - 1 >> chance.randrange(64), 1 << chance.randrange(64),
                 chance.getrandbits(64)][pick - 1]
        return struct.pack("=Q", value % (1 << 64))

    known = {}
    for case in range(cases):
        folder = first.parent / f"{case}"
        shutil.copytree(first, folder)
        rb, all_three = open_all(folder)
        for one in all_three:
            one.sample(6)
        with open(folder / ".engram" / name, "r+b") as file:
            live = mmap.mmap(file.fileno(), 0)
        at = start + chance.randrange((size or len(live) - start) // 8) * 8
        live[at : at + 8] = bad(live[at : at + 8])
        uses = [
            lambda: rb[:], lambda: rb[3], lambda: len(rb), lambda: rb.write_count, rb.stats, rb.storage.extent,
            lambda: rb.extend(data(3), lane=0), lambda: rb.add(data(1)[0], lane=1),
            lambda: rb.update_priority(torch.arange(3), torch.rand(3)),
            *[lambda one=one: one.sample(6) for one in all_three], *[lambda one=one: one.state_dict() for one in all_three],
            lambda: rb.dumps(folder / "dump"), rb.empty,
        ]
        for use in chance.sample(uses, 10):
            try:
                use()
            except (EngramError, IndexError) as error:
                known[type(error).__name__] = known.get(type(error).__name__, 0) + 1
        try:
            rb.close()
        except EngramError:
            pass
        live.close()
        shutil.rmtree(folder)
    print(known)
    print("done")
"""


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize(
    "kind", ["locks", "counters", "participants", "lanes", "tickets", "priorities", "tree", "pass"]
)
def test_stray_words_in_a_live_store_never_crash(ram, kind):
    """A word of a store that is open becomes another: a typed error or rows. (A program that crashed would not end in order.)"""
    cases = stress.size(25, 2_000)
    program = start(LIVE_DAMAGE, place=str(ram), kind=kind, cases=cases, seed=stress.SEED)
    assert program.wait(stress.LIMIT_S) == 0, program.err
    assert program.out.endswith("done\n")


# ---- no space, no permission -----------------------------------------------------------------------------------------

FAIL_AT = {
    "reserving space": (files, "fallocate", errno.ENOSPC),
    "opening": (os, "open", errno.EMFILE),
    "making a folder": (os, "mkdir", errno.EDQUOT),
    "writing through": (os, "fsync", errno.EIO),
    "publishing": (os, "rename", errno.EIO),
    "mapping words": (torch, "from_file", errno.ENOMEM),
    "mapping a field": (MemoryMappedTensor, "from_filename", errno.ENOMEM),
    "locking": (fcntl, "flock", errno.ENOLCK),
    "attaching": (engram.store.opening, "register", errno.EIO),
}


@pytest.mark.parametrize("place", ["new", "there", "temporary"])
@pytest.mark.parametrize("what", FAIL_AT)
def test_failing_at_every_step_of_a_creation_leaves_nothing(tmp_path, monkeypatch, what, place):
    owner, name, code = FAIL_AT[what]
    real = getattr(owner, name)
    calls = failing = 0

    def fails(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scratch_dir = {"new": tmp_path / "new" / "deep", "there": tmp_path, "temporary": None}[place]
    (tmp_path / "mine").write_text("mine")
    descriptors = len(os.listdir("/proc/self/fd"))
    steps = 0
    while True:
        failing, calls = steps + 1, 0
        rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=scratch_dir))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            try:
                rb.extend(rows(0, 3))
                got = None
            except OSError as error:
                got = error.errno
        if calls < failing:
            break
        assert got in (None, code)
        steps += 1
        assert steps < 60
        if rb.storage.initialized:
            assert calls == failing, "a store although its creation failed"
            rb.storage.cleanup()
            continue
        assert os.listdir(tmp_path) == ["mine"]
        assert len(rb) == 0
        rb.extend(rows(0, 3))  # space was made: the same buffer works
        assert rb[:]["a"].tolist() == [0, 1, 2]
        rb.storage.cleanup()
        if place == "new":
            (tmp_path / "new").rmdir()
        assert os.listdir(tmp_path) == ["mine"]
        del rb
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert steps >= 1
    assert (tmp_path / "mine").read_text() == "mine"
    rb.storage.cleanup()


def test_limits_on_file_sizes_are_errors_at_creation(tmp_path):
    out = run(
        """
        import errno, os, resource, torch
        from engram import LazyMemmapStorage, ReplayBuffer
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        rb = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=folder + "/store"))
        try:
            rb.extend({"small": torch.zeros(3), "large": torch.zeros(3, 1000)})
        except OSError as error:
            print(error.errno == errno.EFBIG, "reserving 4000000 bytes" in str(error), "large.memmap" in str(error))
        print(os.listdir(folder), rb.storage.initialized)
        rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder + "/store"))
        print(rb.extend({"small": torch.zeros(3), "large": torch.zeros(3, 1000)}).tolist())
        """,
        folder=str(tmp_path),
    )
    assert out.split("\n") == ["True True True", "[] False", "[0, 1, 2]"]


def test_full_disks_are_errors_at_creation(tmp_path):
    """A file system of every size in pages: an error and nothing left, or a store that can be filled to the last row."""
    out = run(
        """
        import ctypes, errno, os, sys, torch
        from engram import LazyMemmapStorage, ReplayBuffer
        libc = ctypes.CDLL(None, use_errno=True)
        CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
        def mount(options):
            os.umask(0)
            return libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options.encode())
        if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) or mount("size=8k"):
            print("not permitted")
            sys.exit()
        libc.umount2(folder.encode(), 2)
        row = {"a": torch.ones(500), "next": {"b": torch.ones(2)}}
        failed = 0
        for pages in range(1, 60):
            mount(f"size={pages * 4}k")
            rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=folder + "/store"))
            try:
                rb.add(row)
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
                assert os.listdir(folder) == [], (pages, os.listdir(folder))
                assert len(rb) == 0
                failed += 1
                whole = False
            else:
                for _ in range(30):
                    rb.add(row)
                assert bool((rb.storage.store.tensors[0] == 1).all())
                rb.close()
                again = ReplayBuffer.open(folder + "/store")
                assert len(again) == 20
                again.close()
                whole = True
            del rb
            libc.umount2(folder.encode(), 2)
        print(failed > 5, whole)
        """,
        folder=str(tmp_path),
    )
    if out.endswith("not permitted"):
        pytest.skip("needs the right to mount")
    assert out.endswith("True True")


def test_folders_that_cannot_be_written_to(tmp_path):
    place = Path(tempfile.mkdtemp(prefix="engram-tests-"))
    try:
        out = run(
            """
            import os, torch
            from engram import LazyMemmapStorage, ReplayBuffer
            if os.getuid() == 0:
                os.chmod(folder, 0o755)
                os.setgid(65534)
                os.setuid(65534)
            else:
                os.chmod(folder, 0o555)
            for name in ("", "/new", "/new/deep"):
                try:
                    LazyMemmapStorage(10, scratch_dir=folder + name)
                except PermissionError as error:
                    said = "scratch_dir: expected a folder that can be written to" in str(error)
                    print(error.errno, error.filename == folder, said)
            """,
            folder=str(place),
        )
        assert out.split("\n") == ["13 True True"] * 3
        assert os.listdir(place) == []
    finally:
        place.chmod(0o700)
        shutil.rmtree(place)


def test_a_folder_that_becomes_unwritable_later(tmp_path):
    place = Path(tempfile.mkdtemp(prefix="engram-tests-"))
    try:
        out = run(
            """
            import os, torch
            from engram import LazyMemmapStorage, ReplayBuffer
            root = os.getuid() == 0
            if root:
                os.chmod(folder, 0o777)
                os.setgid(65534)
                os.setegid(65534)
                os.seteuid(65534)
            rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
            if root:
                os.seteuid(0)
            os.chmod(folder, 0o555)
            if root:
                os.seteuid(65534)
            try:
                rb.add(torch.zeros(3))
            except PermissionError as error:
                print(error.errno, os.listdir(folder), rb.storage.initialized)
            """,
            folder=str(place),
        )
        assert out == "13 [] False"
    finally:
        place.chmod(0o700)
        shutil.rmtree(place)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copies(thing):
    return {"deepcopy": copy.deepcopy(thing), "pickle": pickle.loads(pickle.dumps(thing))}


def test_copies_of_private_stores_are_independent():
    storage = LazyTensorStorage(10, lanes=2)
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(0, 4), lane=1)
    for name, other in copies(storage).items():
        assert other.store is not storage.store, name
        assert other.extent() == storage.extent()
        assert torch.equal(other.store.tickets_of(torch.arange(10)), storage.store.tickets_of(torch.arange(10)))
        twin = ReplayBuffer(storage=other)
        assert twin.write_count == 4
        assert twin.extend(rows(10, 2), lane=1).tolist() == [9, 5]
        assert twin[9]["a"] == 10
        assert rb[5]["a"] == 0
        assert 9 not in storage
        assert len(rb) == 4


def test_copies_of_unwritten_storages_are_independent(tmp_path):
    for storage in (LazyTensorStorage(10, lanes=2), LazyMemmapStorage(10, scratch_dir=tmp_path / "x", lanes=2)):
        for other in copies(storage).values():
            assert not other.initialized
            assert (other.max_size, other.lanes, type(other)) == (10, 2, type(storage))


def test_copies_of_directory_stores_are_the_same_store(folder):
    rb = ReplayBuffer.open(folder)
    assert len(pickle.dumps(rb.storage)) < 4000
    for name, other in copies(rb.storage).items():
        assert other.store is rb.storage.store, name
        ReplayBuffer(storage=other).extend(rows(50, 1))
    assert rb[7]["a"] == rb[8]["a"] == 50
    rb.close()


def test_pickles_of_directory_stores_attach_elsewhere(folder, tmp_path):
    rb = ReplayBuffer.open(folder)
    (tmp_path / "pickle").write_bytes(pickle.dumps(rb.storage))
    program = """
        import pickle
        print(len(pickle.load(open(path, "rb"))))
    """
    assert run(program, path=str(tmp_path / "pickle")) == "7"
    rb.close()
    assert run(program, path=str(tmp_path / "pickle")) == "7"


# ---- what is handed out, and what is taken ---------------------------------------------------------------------------


def test_views_stay_valid_after_closing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for scratch_dir in (None, tmp_path / "kept"):
        rb = buffer(scratch_dir)
        view, field = rb[:], rb.storage.store.tensors[0]
        rb.close()
        assert view["a"].tolist() == list(range(7))
        del rb
        gc.collect()
        assert view["a"].tolist() == list(range(7))
        assert field[:7].tolist() == list(range(7))
        assert view["next", "b"].sum() == 0


def test_closed_stores_are_neither_read_nor_written(folder):
    rb = ReplayBuffer.open(folder)
    store = rb.storage.store
    rb.close()
    before = snapshot(folder)
    for use in (
        lambda: store.append_row(0, store.tensors),
        lambda: store.write(Plan(lane=0), store.tensors, 1),
        lambda: store.edit(torch.tensor([0]), range(2), store.tensors),
        lambda: store.empty(keep_write_count=False),
        lambda: store.read(torch.tensor([0])),
        lambda: store.tickets_of(torch.tensor([0])),
        store.changes,
        store.extent,
        lambda: store.paused().__enter__(),
        lambda: store.placing().__enter__(),
    ):
        with pytest.raises(RuntimeError, match=r"the store in .* was closed\. Use ReplayBuffer\.open to go on"):
            use()
    assert "size=7/10" in repr(rb)
    assert rb.storage.store.closed
    assert snapshot(folder) == before


def test_bytes_beside_the_rows(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=tmp_path / "store"))
    rb.add({"a": torch.zeros(3), "b": torch.tensor(1, dtype=torch.int16)})
    beside = sum(
        path.stat().st_blocks * 512
        for path in (tmp_path / "store").rglob("*")
        if path.is_file() and path.suffix != ".memmap"
    )
    assert beside <= 13 * 100_000
    taken = (tmp_path / "store" / "a.memmap").stat().st_blocks * 512
    assert taken >= 1_200_000
    rb.close()


def test_a_write_moves_only_what_it_must(folder):
    """Nothing but rows, tickets and control changes while a store is used."""
    rb = ReplayBuffer.open(folder)
    before = snapshot(folder)
    rb.extend(rows(7, 2))
    rb.sample(5)
    after = snapshot(folder)
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert changed <= {"a.memmap", "next/b.memmap", ".engram/tickets", ".engram/control", ".engram/buffer.json"}
    rb.close()


# ---- the lowest level ------------------------------------------------------------------------------------------------

SCHEMA = Schema(6, 2, (), (Field(("a",), "int64", ()),), Node("dict", children={"a": Node("leaf", field=0)}))


def test_descriptions_that_are_too_long_are_refused_before_anything_is_made(tmp_path):
    fields = tuple(Field((f"{'x' * 240}{i}",), "bool", ()) for i in range(2048))
    structure = Node("dict", children={field.key[0]: Node("leaf", field=i) for i, field in enumerate(fields)})
    with pytest.raises(ValueError, match=r"its description needs \d+ bytes, at most 1048576 are possible"):
        create_store(Schema(6, 1, (), fields, structure), tmp_path / "store")
    assert os.listdir(tmp_path) == []


def test_names_that_clash_are_refused_before_anything_is_made(tmp_path):
    for data in ({"meta.json": {"a": torch.zeros(3)}}, {"a": torch.zeros(3), "a.memmap": {"b": torch.zeros(3)}}):
        rb = ReplayBuffer(storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "store"))
        with pytest.raises(ValueError, match=r"two keys need .*, once as a file and once as a folder\. Rename one"):
            rb.extend(data)
        assert os.listdir(tmp_path) == []


def test_opening_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("", "nowhere", "file", "file/deeper"):
        with pytest.raises(FileNotFoundError, match=r"open: expected a store in .*\.engram/store\.json.*found none"):
            ReplayBuffer.open(tmp_path / name)


def test_two_first_writes_of_other_rows(tmp_path):
    """Of processes that share a storage which nobody has written to."""
    store = create_store(SCHEMA, tmp_path / "store", maker="both")
    assert create_store(SCHEMA, tmp_path / "store", maker="both") is store
    field = SCHEMA.fields[0]
    fields = (msgspec.structs.replace(field, shape=(*field.shape, 7)), *SCHEMA.fields[1:])
    with pytest.raises(IncompatibleStore) as caught:
        create_store(msgspec.structs.replace(SCHEMA, fields=fields), tmp_path / "store", maker="both")
    assert str(caught.value) == (
        f"{str(tmp_path / 'store')!r}: expected rows as in the first write of another process, got others: field {field.name}: "
        f"expected shape {list(field.shape)} {field.dtype}, got shape {[*field.shape, 7]} {field.dtype}."
    )
    store.close()


def test_erase_leaves_what_is_not_the_stores(tmp_path):
    create_store(SCHEMA, tmp_path / "store").close()
    (tmp_path / "store" / "mine").write_text("mine")
    erase(tmp_path / "store", SCHEMA)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["mine"]


def test_sizes(tmp_path):
    store = create_store(SCHEMA, tmp_path / "store")
    assert (store.capacity, store.lanes, store.lane_length, store.nbytes) == (6, 2, 3, 48)
    assert (tmp_path / "store" / "a.memmap").stat().st_size == 48
    assert (tmp_path / "store" / ".engram" / "tickets").stat().st_size == 48 + 24  # six tickets, six laps
    assert (tmp_path / "store" / ".engram" / "control").stat().st_size == _native.control_bytes(2)
    assert (tmp_path / "store" / ".engram" / "store.json").read_bytes() == schemas.encode(SCHEMA)
    store.close()


def test_files_are_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        rb = buffer(tmp_path / "deep" / "store")
    finally:
        os.umask(before)
    found = snapshot(tmp_path)
    assert {name: stat.S_IMODE(entry[0]) for name, entry in found.items() if stat.S_ISREG(entry[0])} == {
        f"deep/store/{name}": 0o600
        for name in (*PARTS, "meta.json", "next/meta.json", ".engram/buffer.json", ".engram/maker")
    }
    assert {stat.S_IMODE(entry[0]) for entry in found.values() if stat.S_ISDIR(entry[0])} == {0o700}
    rb.close()
