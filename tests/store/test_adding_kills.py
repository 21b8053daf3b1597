"""A process that is killed, or whose disk is full, while it adds a field: the field is there in all rows, or not at all."""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import engram.format.files
import engram.store.adding
from engram import CorruptStore, IncompatibleStore, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.format import schema
from engram.saved.inspection import verify
from tests import stress
from tests.buffer.adding import Other

CAPACITY = 12
FILL = 7.5
#: Files in which each line is a place to die.
TRACED = {engram.store.adding.__file__, engram.format.files.__file__}
STEP = stress.size(4, 1)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(n):
    """From now on: the n-th line of the files traced is not run."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            lines += 1
            if lines == n:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def in_child(function):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return ended(pid)


def rows_of(folder):
    with ReplayBuffer.open(folder) as rb:
        return {key: value.clone() for key, value in rb[:].items()}


def check(folder, n):
    """A store in which a process has died while it added ``v``."""
    with ReplayBuffer.open(folder, readonly=True) as reader:
        early = set(reader[:])
    assert verify(folder).problems == []
    found = rows_of(folder)
    assert set(found) == early, n
    assert found["a"].tolist() == list(range(8)), n
    if "v" in found:
        assert found["v"].tolist() == [[FILL, FILL]] * 8, n
    hidden = [path.name for path in (folder / ".engram").iterdir()]
    assert not [name for name in hidden if name.startswith("column-")], n
    assert set(TensorDict.load_memmap(folder).keys()) == set(found), n
    assert (folder / "v.memmap").exists() == ("v" in found), n
    with ReplayBuffer.open(folder) as rb:  # and it can be added, or is there
        rb.add_field("v", torch.zeros(2), fill=FILL)
        rb.extend({"a": torch.arange(2)})
        assert rb["v"].eq(FILL).all(), n
    return "v" in found


def test_killed_at_each_line_the_field_is_whole_or_not_there(tmp_path):
    template = tmp_path / "template"
    with ReplayBuffer.open_or_create(template, CAPACITY) as rb:
        rb.extend({"a": torch.arange(8)})
    seen = []
    for n in range(1, 10_000, STEP):
        folder = tmp_path / f"store-{n}"
        shutil.copytree(template, folder)

        def add(folder=folder, n=n):
            rb = ReplayBuffer.open(folder)
            die_at(n)
            rb.add_field("v", torch.zeros(2), fill=FILL)

        code = in_child(add)
        assert code in (0, -signal.SIGKILL)
        seen.append(check(folder, n))
        shutil.rmtree(folder)
        if code == 0:
            break
    assert seen == sorted(seen)  # once it is there, it stays
    assert not seen[0]
    assert seen[-1]
    assert len(seen) > 10


@pytest.mark.parametrize("kind", ["shared", "disk"])
def test_other_processes_go_on_when_one_was_killed(kind, tmp_path):
    """They have the field at their next call if it is there, and what they write is whole."""
    outcomes = set()
    for n in range(20, 10_000, 8 * STEP):
        rb = ReplayBuffer.open_or_create(tmp_path / f"{n}", CAPACITY, batch_size=4) if kind == "disk" else None
        if rb is None:
            rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, shared=True)
        rb.extend({"a": torch.arange(8)})

        def add(rb=rb, n=n):
            die_at(n)
            rb.add_field("v", torch.zeros(2), fill=FILL)

        code = in_child(add)
        rb.extend({"a": torch.arange(8, 12)})
        there = "v" in rb.sample()
        outcomes.add(there)
        assert rb["a"].tolist() == list(range(12))
        assert not there or rb["v"].eq(FILL).all()
        rb.add_field("v", torch.zeros(2), fill=FILL)
        assert rb["v"].eq(FILL).all()
        rb.close()
        if code == 0:
            break
    assert outcomes == {True, False}


FAILING = ["reserve", "write_atomically"]


@pytest.mark.parametrize("call", FAILING)
def test_a_full_disk_leaves_the_store_as_it_was(call, tmp_path, monkeypatch):
    folder = tmp_path / "store"
    rb = ReplayBuffer.open_or_create(folder, CAPACITY, batch_size=4)
    rb.extend({"a": torch.arange(8)})
    other = Other(rb)
    try:
        before = {path: path.read_bytes() for path in folder.rglob("*.json")}

        def full(path, *_):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(engram.format.files, call, full)
            with pytest.raises(OSError, match="No space left"):
                rb.add_field("v", torch.zeros(2), fill=FILL)
        assert {path: path.read_bytes() for path in folder.rglob("*.json")} == before
        assert not [path for path in folder.rglob("*") if "column" in path.name or path.name == "v.memmap"]
        assert set(other.sample(4)) == {"a"}
        assert set(rb.sample()) == {"a"}
        other.add_field("v", torch.zeros(2), fill=FILL)
        assert set(rb.sample()) == {"a", "v"}
    finally:
        other.end()
        rb.close()


def test_a_file_of_the_users_is_not_touched(tmp_path):
    folder = tmp_path / "store"
    with ReplayBuffer.open_or_create(folder, CAPACITY) as rb:
        rb.extend({"a": torch.arange(8)})
        (folder / "v.memmap").write_text("mine")
        with pytest.raises(FileExistsError, match="a file of that name is there already"):
            rb.add_field("v", 0)
        assert set(rb[:]) == {"a"}
        assert (folder / "v.memmap").read_text() == "mine"


def test_a_changed_description_is_refused(tmp_path):
    folder = tmp_path / "store"
    with ReplayBuffer.open_or_create(folder, CAPACITY) as rb:
        rb.extend({"a": torch.arange(8)})
        rb.add_field("v", 0, fill=3)
    path = folder / ".engram" / "store.json"
    raw = path.read_bytes()
    for old, new in ((b'"added":["0300000000000000"]', b'"added":["0400000000000000"]'), (b'["v"]', b'["w"]')):
        assert old in raw
        path.write_bytes(raw.replace(old, new))
        with pytest.raises(CorruptStore, match="store.json"):
            ReplayBuffer.open(folder)
    first = schema.encode_store(schema.decode_store(raw, "store.json").until(1))
    path.write_bytes(first)  # of before: the field would be lost, but nothing is misread
    rows_of(folder)
    path.write_bytes(raw.replace(b"[2,4]", b"[2,7]"))
    with pytest.raises(IncompatibleStore, match=r"expected format 2\.6, got 2\.7\. A newer engram wrote it"):
        ReplayBuffer.open(folder)
    path.write_bytes(raw)
    assert rows_of(folder)["v"].tolist() == [3] * 8


def test_what_belongs_to_a_field_is_removed_with_the_store(tmp_path):
    folder = tmp_path / "store"
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=folder)
    rb = ReplayBuffer(storage=storage)
    rb.extend({"a": torch.arange(8), "n": {"b": torch.arange(8)}})
    rb.add_field(("n", "v"), 0)
    rb.add_field(("m", "v"), 0)
    assert storage.cleanup()
    assert not Path(folder).exists() or list(folder.iterdir()) == []
