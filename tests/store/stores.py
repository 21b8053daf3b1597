"""Stores, and what is in their files."""

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, ReplayBuffer


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


# ---- death -----------------------------------------------------------------------------------------------------------

WORDS = 4096  # per row: 32 KiB, so that a kill often lands inside a write
PERIOD = 256


def content(sequence):
    """Every word of a row derives from its number. It repeats after a few rings, so that a writer can have it at hand."""
    return (sequence[:, None] % PERIOD * 0x9E3779B97F4A7C1 + 1) ^ (torch.arange(WORDS) * 0x2545F4914F6CDD1)


CLEAN_AT = 4096 + 56  # lock page: boot_id 40, pid namespace 8, generation 8, clean


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
