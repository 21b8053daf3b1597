"""Every system call of an operation fails in turn: a typed error and nothing left, or success; and then it works."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests import fresh, stress

pytestmark = pytest.mark.stress

CALLS = {
    "open": "EMFILE",
    "ftruncate": "EIO",
    "fallocate": "ENOSPC",
    "write": "ENOSPC",
    "pwrite": "EIO",
    "read": "EIO",
    "fsync": "EIO",
    "fdatasync": "EIO",
    "flock": "ENOLCK",
    "fcntl": "ENOLCK",
    "rename": "EIO",
    "link": "EDQUOT",
    "mkdir": "EDQUOT",
    "unlink": "EIO",
    "mmap": "ENOMEM",
}
ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EINTR", "EAGAIN", "ENOMEM", "EMFILE")
OPERATIONS = ("create", "open", "recover", "share", "new index", "new field", "close", "close temporary", "fork")
ALL = [(o, c, e) for o, c in itertools.product(OPERATIONS, CALLS) for e in sorted({CALLS[c], *ERRORS})]
SMALL = [
    (o, c, CALLS[c])
    for o, c in (
        ("create", "fallocate"),
        ("create", "fsync"),
        ("open", "mmap"),
        ("share", "mmap"),
        ("new index", "rename"),
        ("new field", "rename"),
        ("new field", "mmap"),
        ("close", "open"),
        ("fork", "fcntl"),
    )
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """What lets calls fail."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    made = tmp_path_factory.mktemp("library") / "failing_calls.so"
    source = Path(__file__).parents[1] / "failing_calls.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


@pytest.fixture(scope="module")
def done(library):
    """Of a program with that library: each call fails in turn, and then an error that is swallowed, a negative control."""
    folder = tempfile.mkdtemp(dir=stress.RAM)  # disks make every fsync wait
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    yield subprocess.run(
        [sys.executable, "-m", "tests.failing_calls", folder, json.dumps(stress.size(SMALL, ALL))],
        env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    shutil.rmtree(folder)


@pytest.mark.timeout(stress.LIMIT_S)
def test_every_call_fails_in_turn(done):
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    print(counts, file=sys.stderr)
    assert counts["failed calls"] >= 20


@pytest.mark.timeout(stress.LIMIT_S)
def test_an_fsync_error_that_is_swallowed_is_noticed(done):
    """Negative control."""
    assert "create: fsync number 1 gave EIO: ended with" in done.stderr
    assert "a failed fsync was not noticed" in done.stderr


# ---- too little space, too few descriptors -----------------------------------------------------------------------------

IN_TMPFS = """
    import ctypes, errno, os, sys, torch
    import engram.store, engram.storages._home
    from pathlib import Path
    from engram import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
    from engram.format import files
    libc = ctypes.CDLL(None, use_errno=True)
    CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
    home = Path(folder)
    engram.store.lifetime.shared_memory = engram.storages._home.shared_memory = lambda: home
    def mount(pages):
        return libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={pages * 4}k".encode())
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) or mount(2):
        print("not permitted")
        sys.exit()
    libc.umount2(folder.encode(), 2)
"""


def in_tmpfs(code, folder):
    program = fresh.start(textwrap.dedent(IN_TMPFS) + textwrap.dedent(code), folder=str(folder))
    status = program.wait()
    if "not permitted" in program.out:
        pytest.skip("needs the right to mount")
    return status, program


def test_sharing_in_memory_of_every_size(tmp_path):
    """An error and the private buffer as it was, or a shared one that can be filled to its last row."""
    status, program = in_tmpfs(
        """
        failed = shared = 0
        pages = 0
        while shared < 4:
            pages += 1
            mount(pages)
            rb = ReplayBuffer(storage=LazyTensorStorage(3000), sampler=PrioritizedSampler(3000, 1.0, 1.0, 0.0))
            rb.extend(torch.arange(2000))
            rb.update_priority(torch.arange(2000), torch.arange(2000.0))
            try:
                rb.share()
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
                assert os.listdir(folder) == [], (pages, os.listdir(folder))
                assert not rb.shared
                failed += 1
            else:
                shared += 1
            assert rb.sampler.priorities().leaves(2000).tolist() == list(range(2000))
            rb.extend(torch.arange(4000))
            assert sorted(rb[:].tolist()) == list(range(1000, 4000))
            rb.close()
            del rb
            libc.umount2(folder.encode(), 2)
        print(failed, shared)
        """,
        tmp_path,
    )
    assert status == 0, program.err
    failed, shared = map(int, program.out.split()[-2:])
    assert failed > 10
    assert shared == 4


def test_space_that_is_not_reserved_kills(tmp_path):
    """Negative control: with ftruncate in the place of fallocate, a write to a full file system is SIGBUS."""
    status, program = in_tmpfs(
        """
        files.fallocate = lambda fd, nbytes: os.ftruncate(fd, nbytes) is None
        mount(40)
        rb = ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=folder + "/store"))
        rb.extend(torch.arange(100))
        print("made", flush=True)
        rb.extend(torch.arange(100_000))
        """,
        tmp_path,
    )
    assert "made" in program.out
    assert status == -signal.SIGBUS, (status, program.err)


def test_every_number_of_descriptors(tmp_path):
    """An error and nothing left, or a store; with one descriptor more each time."""
    out = fresh.run(
        """
        import errno, os, resource, torch
        from pathlib import Path
        from engram import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        def limit(n):
            resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
        limit(256)
        ReplayBuffer(storage=LazyMemmapStorage(10)).extend(torch.arange(3))  # imports
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        failed, n = 0, used
        while True:
            place = Path(folder) / str(n)
            rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=place), batch_size=2)
            limit(n)
            try:
                rb.extend(torch.arange(3))
                rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0))
                rb.close()
                ReplayBuffer.open(place).close()
                done = True
            except OSError as error:
                assert error.errno == errno.EMFILE, error
                done = False
            limit(256)
            if done:
                break
            failed += 1
            if not rb.storage.initialized:
                assert not place.exists(), os.listdir(place)
                rb.extend(torch.arange(3))
            rb.close()
            assert len(ReplayBuffer.open(place)) in (0, 3)
            n += 1
        print(failed)
        """,
        folder=str(tmp_path),
    )
    assert int(out.split()[-1]) >= 2
