"""One rank has no room: it says no, there is no checkpoint for anybody, and the last one stays as it is."""

import contextlib
import errno
import os
import resource
import subprocess

import pytest
import torch

from engram import RankFailed
from engram.saved.series import Series
from tests.ranks import processes
from tests.ranks.jobs import buffer, checkpointer, episode, steps_of, whos
from tests.ranks.networks import enter_mounts, own_mounts
from tests.ranks.processes import answer, join, meet, run, wait_for
from tests.saved.checkpoint_folders import tree

#: Bytes that a file, or a disk, has room for; a row needs 4 KiB.
ROOM = 1 << 20
#: Saves that fail, one after the other. What each leaves must not be what the next one lacks.
FAIL = 8


def rows(rank, number, n):
    data = episode(rank, 0, number, n)
    data["obs"] = torch.full((n, 1024), float(number))
    return data


@contextlib.contextmanager
def small_files():
    """No file of this process may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_some(ranks, rank, folder, root, limit):
    """After the first save rank 1 has more than there is room for; in the end it has little again."""
    rb = buffer(1, 512)
    ck = checkpointer(root, rb, ranks)
    rb.extend(rows(rank, 0, 5), lane=0)
    first = ck.save(1).path
    ranks.gather(b"", 60.0)
    before = tree(first)
    rb.extend(rows(rank, 1, 400 if rank else 5), lane=0)
    real, said = ck._job.write_parts, []

    def write(own, *args):
        wait_for((own.parent / "rank-00000-of-00002" / "shard.json").exists)  # the other one has had its room
        return real(own, *args)

    if rank:
        ck._job.write_parts = write
    with limit() if rank else contextlib.nullcontext():
        for _ in range(FAIL):
            try:
                said.append(ck.save(2).name)
            except RankFailed as error:
                said.append(str(error))
    ranks.gather(b"", 60.0)
    kept = Series(root).latest()[0] == first and tree(first) == before
    left = {str(path.relative_to(path.parents[1])) for path in root.glob("ckpt-000000000002-*/rank-*/*")}
    ranks.gather(b"", 60.0)  # the next one is of the same step
    rb = buffer(1, 512)
    rb.extend(rows(rank, 2, 5), lane=0)
    again = checkpointer(root, rb, ranks).save(2).path
    other = buffer(1, 512)
    checkpointer(root, other, ranks).restore()
    meet(folder, "over", ranks)  # rank 0 holds the store
    return {
        "said": said,
        "kept": kept,
        "left": sorted(left),
        "again": Series(root).latest()[0] == again,
        "same": whos(steps_of(other)) == whos(steps_of(rb)),
    }


def check(said, error):
    assert said[0] == said[1]
    assert all(f"rank 1: OSError: [Errno {error}]" in text for text in said[0].pop("said"))
    left = ["rank-00000-of-00002/shard.json", "rank-00001-of-00002/error.json"]
    assert said[0] == {"kept": True, "left": left, "again": True, "same": True}


def test_files_that_may_not_grow(tmp_path):
    said, codes = run(2, save_some, tmp_path / "job", tmp_path / "root", small_files)
    assert codes == [0, 0]
    check(said, errno.EFBIG)


def on_a_small_disk(rank, n, folder, disk):
    """Ranks with a disk of their own that others do not see; before there are threads, each of which would have its own view."""
    if rank == 0:
        try:
            own_mounts()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", disk], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            processes.tell(folder / "not allowed", str(error))
            return
        (folder / "mounted").touch()
    else:
        wait_for((folder / "first").exists)
        wait_for(lambda: (folder / "mounted").exists() or (folder / "not allowed").exists())
        if (folder / "not allowed").exists():
            return
        enter_mounts(int((folder / "first").read_text()))
    assert os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize == ROOM
    processes._run(rank, n, save_some, folder, disk / "root", contextlib.nullcontext)


def test_a_disk_that_is_full(tmp_path):
    """A real one: a tmpfs of a megabyte."""
    folder, disk = tmp_path / "job", tmp_path / "disk"
    folder.mkdir()
    disk.mkdir()
    every = processes.spawn(2, on_a_small_disk, folder, disk)
    processes.tell(folder / "first", str(every[0].pid))
    codes = join(every)
    if (folder / "not allowed").exists():
        pytest.skip(f"a disk cannot be mounted here: {(folder / 'not allowed').read_text()}")
    assert codes == [0, 0]
    assert not list(disk.iterdir())  # it was theirs alone
    check([answer(folder, rank) for rank in range(2)], errno.ENOSPC)
