"""Rows of directory stores that go through their files: the same rows as through the mapping, and errors in place of signals."""

import ctypes
import errno
import gc
import mmap
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    FrameStack,
    LazyMemmapStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from engram._support.memory import available_memory
from engram.saved import disk as format_disk
from engram.saved import part_writer, rows, snapshot
from engram.storages import tensor_state
from engram.store import opening
from tests import fresh
from tests.torchrl.torchrl_dumps import make_dump

DTYPES = (
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.complex64,
)
ROWS = 600


@pytest.fixture
def disk():
    """A folder of a file system that is not memory."""
    made = Path(tempfile.mkdtemp(dir=Path(__file__).parents[2]))
    kind = subprocess.run(["stat", "-f", "-c", "%T", made], capture_output=True, text=True, check=False).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        shutil.rmtree(made)
        pytest.skip(f"needs a disk, this is {kind}")
    yield made
    shutil.rmtree(made)


def steps(n=ROWS, seed=0):
    torch.manual_seed(seed)
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[torch.arange(12, n, 13)] = True
    fields = {str(dtype).removeprefix("torch."): (torch.randn(n, 5) * 9).to(dtype) for dtype in DTYPES}
    return TensorDict(
        fields
        | {
            "frame": torch.randint(0, 255, (n, 3, 44, 44), dtype=torch.uint8),
            "nothing": torch.zeros(n, 0),
            "next": {"reward": torch.randn(n, 1), "done": done, "obs": torch.randn(n, 4)},
        },
        [n],
    )


SAMPLERS = {
    "uniform": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(ROWS, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=4, end_key=("next", "done")),
    "prioritized slices": lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.5, slice_len=4, end_key=("next", "done")),
    "n steps": lambda: NStep(FrameStack(RandomSampler(), 4, -3, ["frame"]), 3, 0.9),
}


def run(folder, io, sampler, lanes=1):
    """All that a program with a fixed seed sees."""
    storage = LazyMemmapStorage(ROWS, scratch_dir=folder, io=io, lanes=lanes)
    generator = torch.Generator().manual_seed(3)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=64, generator=generator)
    data, seen = steps(), []
    for start in range(0, ROWS, 150):
        part = data[start : start + 150]
        rb.extend(part) if lanes == 1 else rb.extend(part, lane=torch.arange(150) % lanes)
    rb.extend(steps(70, seed=1)) if lanes == 1 else rb.extend(steps(70, seed=1), lane=torch.arange(70) % lanes)
    rb.add(data[5]) if lanes == 1 else rb.add(data[5], lane=1)
    for _ in range(6):
        batch, info = rb.sample(return_info=True)
        if "prioritized" in sampler:
            rb.update_priority(info["index"], torch.rand(64, generator=generator))
        seen.append((batch, info["index"]))
    rb[torch.tensor([3, 4, 90])] = data[7:10]
    seen += [(rb.sample(), None), (rb[:], None), (rb[torch.arange(0, 500, 7)], None)]
    stats = rb.stats()
    rb.close()
    return seen, stats


def same(a, b):
    if isinstance(a, TensorDict):
        return set(a.keys(True, True)) == set(b.keys(True, True)) and all(
            torch.equal(a[key], b[key]) for key in a.keys(True, True)
        )
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is None or torch.equal(a, b)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_both_ways_give_the_same_batches(disk, sampler):
    (mapped, unused), (read, used) = (run(disk / io, io, sampler) for io in ("map", "read"))
    assert len(mapped) == len(read)
    assert all(map(same, mapped, read))
    assert used["reads_from_files"] == used["writes_to_files"] == 1
    assert used["file_bytes_read"] > 6 * 64 * 5808
    assert used["file_bytes_written"] > ROWS * 5808
    assert unused["file_reads"] == unused["file_writes"] == 0


def test_both_ways_give_the_same_with_lanes(disk):
    seen = [run(disk / io, io, "n steps", lanes=3)[0] for io in ("map", "read")]
    assert all(map(same, *seen))


def test_the_other_way_reads_what_one_wrote_through_a_copy_and_a_fork(disk):
    rb = ReplayBuffer(storage=LazyMemmapStorage(50, scratch_dir=disk / "store", io="read"), batch_size=200)
    rb.extend({"a": torch.arange(40), "frame": torch.arange(40)[:, None].expand(40, 5000).contiguous()})
    copied = pickle.loads(pickle.dumps(rb))
    assert copied.storage.store.core.io_state()[1:3] == (1, 1)
    pid = os.fork()
    if pid == 0:
        whole = False
        try:
            batch = ReplayBuffer.open(disk / "store", io="read").sample()  # the parent's handle is its own
            whole = bool(
                (batch["frame"].numpy() == batch["a"].numpy()[:, None]).all()
            )  # torch's threads are the parent's
        finally:
            os._exit(0 if whole else 1)
    assert os.waitpid(pid, 0)[1] == 0
    batch = rb.sample()
    assert bool((batch["frame"] == batch["a"][:, None]).all())
    rb.close()
    again = ReplayBuffer.open(disk / "store")
    assert again.storage.store.core.io_state()[1:3] == (0, 0)
    assert again[:]["a"].tolist() == list(range(40))
    again.close()
    again = ReplayBuffer.open_or_create(disk / "store", 50, io="read")
    assert again.stats()["reads_from_files"] == 1
    again.close()


@pytest.mark.parametrize("io", ["disk", None, 3, "AUTO"])
def test_another_word_is_refused_before_anything_is_made(disk, io):
    with pytest.raises(ValueError, match="LazyMemmapStorage: io: expected 'auto', 'map' or 'read', got"):
        LazyMemmapStorage(5, scratch_dir=disk / "store", io=io)
    with pytest.raises(ValueError, match="open: io: expected"):
        ReplayBuffer.open(disk / "store", io=io)
    with pytest.raises(ValueError, match="open_or_create: io: expected"):
        ReplayBuffer.open_or_create(disk / "store", 5, io=io)
    assert list(disk.iterdir()) == []


# ---- which way is taken ------------------------------------------------------------------------------------------------


def drop(path):
    """Put a file that no process has mapped out of memory; False: this file system keeps it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not any(in_memory(path))


def in_memory(path):
    """Of each page of a file, whether it is in memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        pages = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
        at = np.frombuffer(memory, np.uint8).ctypes.data
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(len(memory)), pages) == 0
        return [page & 1 for page in pages]


def test_rows_in_memory_stay_on_the_map_and_those_that_are_not_are_read(disk):
    rb = ReplayBuffer(storage=LazyMemmapStorage(300, scratch_dir=disk / "store"), batch_size=16)
    frames = torch.randint(0, 255, (300, 20_000), dtype=torch.uint8)
    rb.extend({"frame": frames, "a": torch.arange(300)})
    for _ in range(100):
        rb.sample()
    stats = rb.stats()
    assert (stats["reads_from_files"], stats["file_reads"], stats["larger_than_memory"]) == (0, 0, 0)
    rb.close()
    del rb
    gc.collect()  # nothing maps the file any more
    if not drop(disk / "store" / "frame.memmap"):
        pytest.skip("this file system keeps files in memory that it is told to drop")
    rb = ReplayBuffer.open(disk / "store", batch_size=16)
    batch = rb.sample()
    assert torch.equal(batch["frame"], frames[batch["a"]])
    stats = rb.stats()
    assert (stats["reads_from_files"], stats["file_reads"]) == (1, 1)
    assert stats["file_bytes_read"] == 16 * 20_008
    rb[:]["frame"].sum()  # into memory, and to be looked at
    assert rb.stats()["reads_from_files"] == 1
    for _ in range(1_000):
        rb.sample()
    assert rb.stats()["reads_from_files"] == 0
    rb.close()


def test_a_store_that_is_larger_than_memory_is_known_and_one_that_cannot_work_is_said(disk, monkeypatch):
    def opened(memory, sampler=None):
        monkeypatch.setattr(opening, "available_memory", lambda: memory)
        rb = ReplayBuffer.open(disk / "store", sampler=sampler)
        rb.sample(2)
        stats = rb.stats()
        rb.close()
        return stats["larger_than_memory"]

    rb = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=disk / "store"))
    rb.extend(torch.zeros(1000, 100))
    rb.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [opened(memory) for memory in (0, 800_000, 799_999, 20_000)] == [0, 0, 1, 1]
    with pytest.warns(
        UserWarning, match="tickets and priorities of 1,000 rows need 20 kB of memory, this process can have 20 kB"
    ):
        opened(19_999, PrioritizedSampler(1000, 0.5, 0.5))
    with pytest.warns(UserWarning, match=r"each draw waits for the disk\. Give it more"):
        opened(28_000)  # there are priorities now


@pytest.mark.parametrize("larger", [True, False])
def test_a_dump_of_a_store_that_is_larger_than_memory_leaves_its_memory_to_rows(disk, monkeypatch, larger):
    frames = torch.randint(0, 255, (600, 5000), dtype=torch.uint8)
    rb = ReplayBuffer(storage=LazyMemmapStorage(600, scratch_dir=disk / "store"))
    rb.extend({"frame": frames})
    rb.close()
    monkeypatch.setattr(part_writer, "_START", 1 << 19)
    monkeypatch.setattr(opening, "available_memory", lambda: 1_000_000 if larger else 1 << 40)
    rb = ReplayBuffer.open(disk / "store")
    rb.dumps(disk / "dump")
    Checkpointer(disk / "series", rb).save(1)
    rb.close()
    (written,) = disk.glob("dump/**/frame.memmap")
    kept = in_memory(written)
    if larger and kept[0]:
        pytest.skip("this file system keeps files in memory that it is told to drop")
    assert sum(kept[: len(kept) // 2]) == (0 if larger else len(kept) // 2)
    for load in (lambda rb: rb.loads(disk / "dump"), lambda rb: Checkpointer(disk / "series", rb).restore()):
        other = ReplayBuffer(storage=LazyMemmapStorage(600), batch_size=8)
        other.extend({"frame": frames[:1]})
        load(other)
        assert torch.equal(other[:]["frame"][-599:], frames[1:])  # the oldest may mark where the last trajectory ends
        other.close()


@pytest.mark.parametrize("save", [lambda rb, to: rb.dumps(to), lambda rb, to: Checkpointer(to, rb).save(1)])
def test_saves_of_a_larger_store_leave_in_memory_what_was_there(disk, monkeypatch, save):
    rb = ReplayBuffer(storage=LazyMemmapStorage(600, scratch_dir=disk / "store"))
    rb.extend({"frame": torch.randint(0, 255, (600, 5000), dtype=torch.uint8)})
    rb.close()
    del rb
    gc.collect()  # nothing maps the file any more
    if not drop(path := disk / "store" / "frame.memmap"):
        pytest.skip("this file system keeps files in memory that it is told to drop")
    monkeypatch.setattr(opening, "available_memory", lambda: 1_000_000)
    monkeypatch.setattr(rows, "PIECE", 1 << 18)
    monkeypatch.setattr(snapshot, "PIECE", 1 << 18)
    monkeypatch.setattr(tensor_state, "_COPIED", 0)  # few rows are copied at once
    rb = ReplayBuffer.open(disk / "store")
    rb[torch.arange(100, 150)]
    before = in_memory(path)
    assert 50 < sum(before) < 70
    save(rb, disk / "saved")
    assert [page for page, (then, now) in enumerate(zip(before, in_memory(path), strict=True)) if now > then] == []
    rb.close()


LOADS = {
    "dump": (600, lambda rb, folder: rb.loads(folder / "dump")),
    "checkpoint": (600, lambda rb, folder: Checkpointer(folder / "series", rb).restore()),
    "conversion": (650, lambda rb, folder: rb.loads(folder / "dump", convert=True)),
    "state": (600, lambda rb, folder: rb.load_state_dict(ReplayBuffer.open(folder / "store").state_dict())),
    "TorchRL": (600, lambda rb, folder: rb.loads(folder / "theirs")),
}


@pytest.mark.parametrize("kind", LOADS)
def test_loads_into_a_larger_store_write_to_its_files(disk, monkeypatch, kind):
    """The oracle is a load through the mapping."""
    frames = torch.randint(0, 255, (600, 5000), dtype=torch.uint8)
    done = (torch.arange(600) % 7 == 6)[:, None]
    rb = ReplayBuffer(storage=LazyMemmapStorage(600, scratch_dir=disk / "store"))
    data = TensorDict({"frame": frames, "a": torch.arange(600), "next": {"done": done}}, [600])
    rb.extend(data)
    rb.dumps(disk / "dump")
    Checkpointer(disk / "series", rb).save(1)
    rb.close()
    make_dump(disk / "theirs", {"frame": frames, "a": torch.arange(600), "next": {"done": done}}, 600)
    monkeypatch.setattr(rows, "PIECE", 1 << 18)
    monkeypatch.setattr(snapshot, "PIECE", 1 << 18)
    found = []
    monkeypatch.setattr(opening, "available_memory", lambda: 1_000_000)
    for io in ("map", "auto"):
        capacity, load = LOADS[kind]
        rb = ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=disk / io, io=io))
        rb.extend(data[:2])
        written = rb.stats()["file_bytes_written"]
        load(rb, disk)
        batch = rb[:]
        order = batch["a"].argsort()
        columns = [batch[key][order] for key in ("frame", "a", ("next", "done"))]
        found.append((rb.stats()["file_bytes_written"] - written, *columns))
        rb.close()
    (none, *mapped), (everything, *read) = found
    assert (none, everything) == (0, 600 * 5009)
    assert all(map(torch.equal, mapped, read))
    assert torch.equal(read[0][-599:], frames[1:])  # the oldest may mark where the last trajectory ends


def test_what_is_not_on_disk_is_not_forgotten(disk, monkeypatch):
    def fails(fd, offset, nbytes, flags):
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(format_disk, "_sync_file_range", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        format_disk.forget(0, 0, 4096)


def test_a_file_system_that_is_memory_is_never_read():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rb = ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=folder + "/store", io="read"), batch_size=4)
        rb.extend(torch.arange(9))
        assert set(rb.sample().tolist()) <= set(range(9))
        assert rb.stats()["file_reads"] == rb.stats()["file_writes"] == 0
        rb.close()


def machine(tmp_path, *, available="9000 kB", cgroup="", **limits):
    for path, text in {
        "proc/meminfo": f"MemTotal: 9999 kB\nMemAvailable: {available}\n",
        "proc/self/cgroup": cgroup,
        **limits,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return available_memory(tmp_path)


V2_USED = {
    "sys/fs/cgroup/a/memory.max": "5000\n",
    "sys/fs/cgroup/a/memory.current": "3000\n",
    "sys/fs/cgroup/a/memory.stat": "anon 2000\nfile 900\nactive_file 700\ninactive_file 50\n",
}
V1_USED = {
    "sys/fs/cgroup/memory/job/one/memory.limit_in_bytes": "4096\n",
    "sys/fs/cgroup/memory/job/one/memory.usage_in_bytes": "1000\n",
    "sys/fs/cgroup/memory/job/one/memory.stat": "active_file 3\ntotal_active_file 10\ntotal_inactive_file 20\n",
}
V1 = "9:name=systemd:/\n4:cpu,memory:/job/one\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("", {}, 9000 * 1024),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": "5000\n"}, 5000),
        ("0::/../elsewhere\n", {"sys/fs/cgroup/memory.max": "77\n"}, 77),
        (V1, {"sys/fs/cgroup/memory/job/one/memory.limit_in_bytes": "4096\n"}, 4096),
        (V1, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 9000 * 1024),
        ("0::/a\n", V2_USED, 5000 - (3000 - 700 - 50)),
        ("0::/a\n", V2_USED | {"sys/fs/cgroup/a/memory.current": "9000\n"}, 0),
        ("0::/a\n", V2_USED | {"sys/fs/cgroup/a/memory.current": "600\n"}, 5000),
        (V1, V1_USED, 4096 - (1000 - 30)),
    ],
)
def test_the_memory_is_what_the_kernel_has_and_groups_have_left(tmp_path, cgroup, limits, expected):
    assert machine(tmp_path, cgroup=cgroup, **limits) == expected


def test_a_machine_that_says_nothing_has_none(tmp_path):
    assert available_memory(tmp_path) == 0
    assert 0 < available_memory() < 1 << 60


# ---- a disk that fails -------------------------------------------------------------------------------------------------


def test_a_file_that_is_truncated_beneath_a_store_is_an_error_that_names_it(disk):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=disk / "store", io="read"), batch_size=500)
    rows = {"frame": torch.arange(100)[:, None].expand(100, 5000).contiguous()}
    rb.extend(rows)
    path = disk / "store" / "frame.memmap"
    os.truncate(path, 50 * 40_000)
    for _ in range(3):
        with pytest.raises(OSError, match=r"read at byte \d+: expected more rows, the file ends there") as raised:
            rb.sample()
        assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    with pytest.raises(OSError, match=r"write at byte 0: expected more rows, the file ends there") as raised:
        rb.extend(rows)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    assert path.stat().st_size == 50 * 40_000
    os.truncate(path, 100 * 40_000)
    rb.extend(rows)
    assert set(rb.sample()["frame"][:, 4_999].tolist()) == set(range(100))
    rb.close()


FAILS = """
    import ctypes, errno, sys, torch
    from engram import LazyMemmapStorage, ReplayBuffer, SliceSampler
    control = ctypes.CDLL(None)
    rb = ReplayBuffer(storage=LazyMemmapStorage(64, scratch_dir=sys.argv[1] + "/store", io="read"), batch_size=8)
    rows = {"a": torch.arange(64), "frame": torch.arange(64)[:, None].expand(64, 700).contiguous()}
    rows["done"] = (torch.arange(64) % 8 == 7)[:, None]
    some = {key: column[:9] for key, column in rows.items()}
    def check(batch):
        assert bool((batch["frame"] == batch["a"][:, None]).all())
    def fails(call, code, act, is_right=lambda: check(rb.sample()) is None):
        found = 0
        for n in range(1, 100):
            rb.extend(rows)
            control.failing_calls_arm(call, n, code)
            try:
                act()
                raised = None
            except OSError as error:
                raised = error
            left = control.failing_calls_left()
            control.failing_calls_arm(b"", 0, 0)
            assert (raised is None) == (left > 0), (n, left, raised)
            if raised is None:
                return found
            assert raised.errno == code and raised.filename.endswith(".memmap") and "at byte" in str(raised), raised
            found += 1
            assert is_right()
    rb.extend(rows)
    torch.set_num_threads(1)
    print(fails(b"preadv", errno.EIO, lambda: check(rb.sample())))
    print(fails(b"pwritev", errno.ENOSPC, lambda: (rb.extend(some), check(rb.sample()))))
    print(fails(b"pwritev", errno.EIO, lambda: rb.__setitem__(torch.arange(0, 18, 2), some)))
    windows = ReplayBuffer(storage=rb.storage, sampler=SliceSampler(slice_len=4, end_key="done"), batch_size=8)
    print(fails(b"preadv", errno.EIO, lambda: check(windows.sample())))
    rb.extend(rows)
    rb.dumps(sys.argv[1] + "/dump")
    print(fails(b"pwritev", errno.EIO, lambda: rb.loads(sys.argv[1] + "/dump"), lambda: len(rb) == 0))
    rb.loads(sys.argv[1] + "/dump")
    check(rb[:])
    control.failing_calls_arm(b"sync_file_range", 1, errno.EIO)
    try:
        for _ in range(2 * (4 << 20) // rows["frame"].nbytes):
            rb.extend(rows)
        raise AssertionError("bytes that the disk did not take")
    except OSError as error:
        assert error.errno == errno.EIO and "write out rows of earlier calls" in str(error), error
        assert error.filename.endswith("frame.memmap"), error.filename
    rb.extend(rows)
    assert len(rb) == 64
    check(rb[:])
    rb.close()
    again = ReplayBuffer.open(sys.argv[1] + "/store")
    assert again.storage.store.repair is None and len(again) == 64
"""


def test_a_disk_that_fails_is_an_error_and_the_buffer_goes_on(disk):
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    library = disk / "failing_calls.so"
    source = Path(__file__).parents[1] / "failing_calls.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAILS), str(disk)],
        env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(int(line) >= 2 for line in done.stdout.split()), done.stdout


# ---- two processes -----------------------------------------------------------------------------------------------------

WRITES = """
    import torch
    from engram import ReplayBuffer
    rb = ReplayBuffer.open(folder, io="read")
    pad = torch.zeros(7, 3000, dtype=torch.int64)
    for number in range(40, 1440, 7):
        rows = torch.arange(number, number + 7)
        rb.extend({"a": rows, "frame": rows[:, None] + pad})
    rb.close()
"""


def test_a_process_writes_by_calls_while_another_one_reads(disk):
    rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=disk / "store", io="read"), batch_size=16)
    rb.extend({"a": torch.arange(40), "frame": torch.arange(40)[:, None].expand(40, 3000).contiguous()})
    writer = fresh.start(textwrap.dedent(WRITES), folder=str(disk / "store"))
    while writer.poll() is None:
        batch = rb.sample()
        assert bool((batch["frame"] == batch["a"][:, None]).all())
    assert writer.poll() == 0, writer.err
    assert sorted(rb[:]["a"].tolist()) == list(range(1400, 1440))
    assert int(rb.sample()["a"].min()) >= 1400
    rb.close()
