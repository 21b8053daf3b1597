"""Stores that are only read, and processes that may do no more."""

import ctypes
import os
import signal
from pathlib import Path

import torch

from engram import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from tests.store.processes import Child
from tests.waiting import ended

NOBODY = 65534
_NEW_MOUNTS = 0x0002_0000
_PRIVATE, _BIND, _READ_ONLY = 0x4000 | 0x4_0000, 0x1000, 0x1000 | 0x20 | 1


def steps(start, n, length=5):
    """Dict rows that say whether they are whole; every ``length`` of them end an episode."""
    step = torch.arange(start, start + n)
    return {"step": step, "words": step[:, None] * torch.arange(1, 65), "next": {"done": (step + 1) % length == 0}}


def whole(batch):
    step = batch["step"]
    return bool((batch["words"] == step[:, None] * torch.arange(1, 65)).all())


def prioritized(folder, n=30, capacity=60, **options):
    """A store with priorities, row ``k`` of which has ``k + 1``."""
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(capacity, scratch_dir=folder, **options),
        sampler=PrioritizedSampler(capacity, 1.0, 1.0, eps=0.0),
    )
    rb.extend(steps(0, n))
    rb.update_priority(torch.arange(n), torch.arange(n) + 1.0)
    return rb


def run(act, *arguments):
    """Run a function in a forked process; a crash or an error there fails the test."""
    Child(act, *arguments).join()


def without_rights(act, folder, how):
    """Run ``act(folder)`` in a process that may not write there. Returns why that cannot be had here; empty: it was run."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    modes = {path: path.stat().st_mode for path in (*folders, *folder.rglob("*"))}
    for path in modes:
        path.chmod(0o555 if path in folders else 0o444)
    why = folder.with_name("why")
    try:
        run(_with_less, act, folder, how, why)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    return why.read_text() if why.exists() else ""


def _with_less(act, folder, how, why):
    if how == "mount" and not _mount_read_only(folder):
        why.write_text(f"a read-only mount: {os.strerror(ctypes.get_errno())}")
        return
    if how == "user" and os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        Path(folder, "written").write_text("")
    except OSError:
        act(folder)
    else:
        raise AssertionError("this process may write")


def _mount_read_only(folder):
    libc, place = ctypes.CDLL(None, use_errno=True), str(folder).encode()
    return (
        libc.unshare(_NEW_MOUNTS) == 0
        and libc.mount(b"none", b"/", None, _PRIVATE, None) == 0
        and libc.mount(place, place, None, _BIND, None) == 0
        and libc.mount(b"none", place, None, _READ_ONLY, None) == 0
    )


def die_while_writing(folder, rows):
    """Open a store, leave rows as a process does that is killed in the middle of writing them, and be killed."""
    rb = ReplayBuffer.open(folder)
    rb.extend(steps(100, 5))
    words = rb.storage.store._ticket_words()
    words[rows] = words[rows] - 2 + 1  # committed is 2, being written 1
    os.kill(os.getpid(), signal.SIGKILL)


def left_by_the_dead(folder, rows):
    """A store whose only process was killed."""
    prioritized(folder).close()
    child = Child(die_while_writing, folder, rows)
    ended(child.process)
    assert child.process.exitcode == -signal.SIGKILL
