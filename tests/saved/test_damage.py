"""Damage of every file: verify names it, readers refuse it, and nothing is changed. B19, B21, T9."""

import contextlib
import hashlib
import os
import random
import shutil

import pytest

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.saved import description, part_reader
from engram.saved.checkpoints import Checkpoint
from engram.saved.inspection import verify
from engram.saved.part_reader import PartReader
from tests.saved import checkpoint_folders as made


def load(path):
    """All that a load reads: every array, file and table."""
    with Checkpoint(path) as checkpoint:
        for rank in range(checkpoint.manifest.world):
            for part in checkpoint.parts(rank):
                for name in part.files:
                    part.read_all(name)
                if part.records:
                    part.lanes()
                    list(part.trajectories())


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "dump"
    made.write_dump(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    return made.save(root, 10, 1, world=2)


FILES_OF_DUMP = [
    "manifest.json", "shard.json",
    "storage/.engram/part.json", "storage/.engram/sums.bin", "storage/.engram/lanes.bin",
    "storage/.engram/tickets.bin", "storage/.engram/trajectories.bin", "storage/meta.json", "storage/next/meta.json",
    "storage/next/reward.memmap", "storage/observation.memmap", "storage/done.memmap",
    "sampler/part.json", "sampler/sums.bin", "sampler/000.bin", "sampler/001.bin", "sampler/002.bin",
    "indexes/000/part.json", "indexes/000/sums.bin", "indexes/000/000.bin", "indexes/000/001.bin", "indexes/000/002.bin",
]  # fmt: skip
FILES_OF_CHECKPOINT = [
    "manifest.json", "attempt.json",
    *(f"rank-0000{rank}-of-00002/{name}" for rank in range(2) for name in (
        "shard.json", "sampler/part.json", "sampler/sums.bin", "sampler/000.bin", "sampler/001.bin", "sampler/002.bin",
        "storage/.engram/part.json", "storage/.engram/sums.bin", "storage/.engram/lanes.bin", "storage/.engram/tickets.bin",
        "storage/.engram/trajectories.bin", "storage/.engram/segments.bin",
        "storage/seg/0-0.bin", "storage/seg/0-1.bin", "storage/seg/0-2.bin", "storage/seg/1-0.bin",
    )),
]  # fmt: skip


def copied(source, tmp_path):
    target = tmp_path / source.name
    shutil.copytree(source, target)
    return target


def remove(path):
    path.unlink()


def shorten(path):
    os.truncate(writable(path), path.stat().st_size - 1)


def lengthen(path):
    os.truncate(writable(path), path.stat().st_size + 1)


def empty(path):
    os.truncate(writable(path), 0)


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    made.rewrite(path, raw)


def link(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target.name)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def writable(path):
    path.chmod(0o600)
    return path


def restore(path, good):
    for left in (path, path.with_name("elsewhere")):
        if left.is_dir():
            left.rmdir()
        left.unlink(missing_ok=True)
    shutil.copy2(good, path)


DAMAGES = [remove, shorten, lengthen, empty, flip, link, pipe, folder]


def check_refused(path, damaged, level="full"):
    before = {p: (p.lstat().st_size, p.lstat().st_mtime_ns) for p in path.rglob("*")}
    report = verify(path, level)
    assert not report.good
    assert any(damaged in str(problem) for problem in report.problems), report.problems
    assert {p: (p.lstat().st_size, p.lstat().st_mtime_ns) for p in path.rglob("*")} == before


def test_the_lists_of_files_are_complete(dump, checkpoint):
    for folder, files in ((dump, FILES_OF_DUMP), (checkpoint, FILES_OF_CHECKPOINT)):
        assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == set(files)
        assert verify(folder).good
        load(folder)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES_OF_DUMP)
def test_every_damage_of_every_file(dump, tmp_path, name, damage):
    path = copied(dump, tmp_path)
    if (path / name).stat().st_size == 0 and damage in (shorten, empty, flip):
        pytest.skip("an empty file")
    damage(path / name)
    check_refused(path, name)
    with pytest.raises(CorruptCheckpoint, match=name.rpartition("/")[2].replace(".", r"\.")):
        load(path)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_in_a_checkpoint_of_two_ranks(checkpoint, tmp_path, damage):
    source = copied(checkpoint, tmp_path)
    for name in FILES_OF_CHECKPOINT:
        if (source / name).stat().st_size == 0 and damage in (shorten, empty, flip):
            continue
        damage(source / name)
        # Without its manifest it is an attempt that nobody decided on.
        check_refused(source, "undecided" if name == "manifest.json" and not os.path.lexists(source / name) else name)
        restore(source / name, checkpoint / name)
    assert verify(source).good


def test_files_swapped_with_others_of_equal_size(dump, tmp_path):
    other = tmp_path / "other"
    made.write_dump(other, seed=7)
    for i, name in enumerate(FILES_OF_DUMP):
        path = copied(dump, tmp_path / str(i))
        ours, theirs = (path / name).read_bytes(), (other / name).read_bytes()
        if ours == theirs:
            continue
        if len(ours) == len(theirs) or name.endswith(".json"):
            made.rewrite(path / name, theirs)
            assert not verify(path).good, name
            with pytest.raises(CorruptCheckpoint):
                load(path)
    for one, two in (("sampler", "indexes/000"),):  # whole parts that differ in a name only
        path = copied(dump, tmp_path / "parts")
        (path / one).rename(path / "x")
        (path / two).rename(path / one)
        (path / "x").rename(path / two)
        check_refused(path, "part.json")


@pytest.mark.parametrize("kind", ["file", "folder", "link", "hidden"])
@pytest.mark.parametrize("where", ["", "storage/", "storage/.engram/", "sampler/", "indexes/"])
def test_what_is_not_listed(dump, tmp_path, kind, where):
    path = copied(dump, tmp_path)
    stranger = path / f"{where}{'.' if kind == 'hidden' else ''}stranger.pkl"
    if kind == "folder":
        stranger.mkdir()
    elif kind == "link":
        stranger.symlink_to("/etc/passwd")
    else:
        stranger.write_bytes(b"x")
    check_refused(path, "stranger.pkl")
    assert verify(path, "read").good
    load(path)  # what is not listed is not opened


def test_lengths_of_every_file(dump, tmp_path):
    """Cut at every third byte: found by the size alone, before any byte is read."""
    path = copied(dump, tmp_path)
    tried = 0
    for name in FILES_OF_DUMP:
        raw = (path / name).read_bytes()
        fd = os.open(writable(path / name), os.O_RDWR)
        for length in (*range(0, len(raw), 3), len(raw) - 1)[: len(raw)]:
            os.ftruncate(fd, length)
            with pytest.raises(CorruptCheckpoint), Checkpoint(path) as checkpoint:
                for _ in checkpoint.parts(0):
                    pass
            tried += 1
        os.pwrite(fd, raw, 0)
        os.close(fd)
    assert tried > 1300
    assert verify(path).good


def test_every_bit_of_every_description(dump, tmp_path):
    """A sample of the bits of every file; every third one of the manifest, which nothing else names."""
    path = copied(dump, tmp_path)
    bits = random.Random(0)
    for name in FILES_OF_DUMP:
        raw = (path / name).read_bytes()
        fd = os.open(writable(path / name), os.O_RDWR)
        some = (
            range(0, len(raw) * 8, 3)
            if name == "manifest.json"
            else sorted(bits.sample(range(len(raw) * 8), min(60, len(raw) * 8)))
        )
        for bit in some:
            os.pwrite(fd, bytes([raw[bit // 8] ^ 1 << bit % 8]), bit // 8)
            try:
                load(path)
            except (CorruptCheckpoint, IncompatibleCheckpoint):
                pass
            else:
                raise AssertionError(f"{name}: bit {bit} is not missed")
            os.pwrite(fd, raw[bit // 8 : bit // 8 + 1], bit // 8)
        os.close(fd)
    assert verify(path).good


def test_damage_in_a_large_file_is_found_where_it_is(tmp_path):
    writer = part_writer(tmp_path / "p", 5 * description.BLOCK + 17)
    path = tmp_path / "p/000.bin"
    raw = bytearray(path.read_bytes())
    for at in (0, description.BLOCK, 3 * description.BLOCK + 9, 5 * description.BLOCK + 16):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        made.rewrite(path, flipped)
        (problem,) = verify(tmp_path / "p").problems
        assert (problem.path, problem.offset) == (path, at // description.BLOCK * description.BLOCK)
    raw[0] ^= 1
    raw[-1] ^= 1
    made.rewrite(path, raw)
    (problem,) = verify(tmp_path / "p").problems
    assert problem.offset == 0
    assert "2 blocks" in problem.what
    assert writer.sha256 == hashlib.sha256((tmp_path / "p/part.json").read_bytes()).hexdigest()


def part_writer(folder, nbytes):
    from engram.saved.part_writer import PartWriter

    part = PartWriter(folder, "writer", "W")
    part.array("uint8", (nbytes,), made.noise(nbytes))
    return part.finish({})


def test_a_file_that_shrinks_while_it_is_open(tmp_path):
    part_writer(tmp_path / "p", 2 * description.BLOCK)
    with PartReader.open(tmp_path / "p") as part:
        os.truncate(writable(tmp_path / "p/000.bin"), 100)
        with pytest.raises(CorruptCheckpoint, match=r"000\.bin at byte 100: expected .* the file ends here"):
            part.read_all(0)


# ---- negative controls: each check is the one that finds it ----------------------------------------------------------


def silent(path):
    with contextlib.suppress(CorruptCheckpoint, IncompatibleCheckpoint):
        load(path)
        return True
    return False


def test_without_the_comparison_of_sums_a_flipped_bit_is_data(dump, tmp_path, monkeypatch):
    path = copied(dump, tmp_path)
    flip(path / "storage/observation.memmap")
    assert not silent(path)
    monkeypatch.setattr(description, "first_wrong", lambda *_: None)
    assert silent(path)


def test_without_the_digest_a_description_of_another_dump_is_taken(dump, tmp_path, monkeypatch):
    other = tmp_path / "other"
    made.write_dump(other, seed=7)
    path = copied(dump, tmp_path)
    shutil.rmtree(path / "storage")
    shutil.copytree(other / "storage", path / "storage")
    assert not silent(path)
    read = part_reader.read_listing
    monkeypatch.setattr(part_reader, "read_listing", lambda folder, fd, sha: read(folder, fd))
    assert silent(path)


def test_without_the_comparison_of_sizes_a_longer_file_is_taken(dump, tmp_path, monkeypatch):
    path = copied(dump, tmp_path)
    lengthen(path / "storage/observation.memmap")
    assert not silent(path)
    monkeypatch.setattr(PartReader, "misfits", lambda self: iter(()))
    assert silent(path)
