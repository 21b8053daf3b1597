"""A series of checkpoints of one buffer: what is linked, what is saved while others write, what is restored. A, B22, D."""

import os
import shutil
import warnings

import pytest
import torch
from tensordict import TensorDict

from engram import CorruptCheckpoint, IncompatibleCheckpoint, LazyMemmapStorage, LazyTensorStorage
from engram.checkpoint.checkpointer import Checkpointer
from engram.saved import disk
from engram.saved.inspection import verify
from engram.saved.series import Series
from tests.checkpoint.saving import CAPACITY, WORDS, buffer, restored, steps
from tests.saved.checkpoint_folders import rewrite, tree
from tests.twins import bits, contents

"""Rows of 8 kB: a segment, which is at least 1 MiB, holds 130 of them."""


def segments(path):
    """Inode of each segment's file."""
    return {file.name: file.stat().st_ino for file in sorted(path.rglob("seg/*.bin"))}


# ---- incremental ---------------------------------------------------------------------------------------------------------


def test_what_did_not_change_is_linked(ram):
    rb = buffer(700)
    checkpointer = Checkpointer(ram, rb, keep=9)
    first = checkpointer.save(1)
    assert first.bytes_linked == 0
    rb.extend(steps(700, 30))
    second = checkpointer.save(2)
    one, two = segments(first.path), segments(second.path)
    same = [name for name in two if two[name] == one.get(name)]
    assert len(two) == 6
    assert sorted(set(two) - set(same)) == ["0-5.bin"], "only the segment that has new rows"
    size = rb.storage.nbytes / CAPACITY
    tables = 8 * CAPACITY * 2
    assert second.bytes_written <= 30 * size + 2 * (1 << 20) + tables + (1 << 18), "the bound of the documentation"
    assert second.bytes_linked >= 5 * 130 * WORDS * 4
    assert checkpointer.save(3).bytes_written < 1 << 18, "nothing is new"
    for step, n in ((1, 700), (2, 730), (3, 730)):
        assert restored(ram, step)["at"].tolist() == list(range(n))
    assert contents(restored(ram, 3)) == contents(rb)


def test_lanes_of_different_speeds(ram):
    rb = buffer(lanes=4)
    checkpointer = Checkpointer(ram, rb, keep=9)
    for lane in range(4):
        rb.extend(steps(0, 200, lane=lane), lane=lane)
    before = segments(checkpointer.save(1).path)
    rb.extend(steps(200, 300, lane=2), lane=2)
    after = segments(checkpointer.save(2).path)
    assert {name for name in after if after[name] != before.get(name)} == {"2-0.bin", "2-1.bin"}
    for step, n in ((1, 200), (2, 500)):
        other = restored(ram, step, make=lambda: buffer(lanes=4))
        fast = other["at"][other["lane"] == 2]
        assert sorted(fast.tolist()) == list(range(max(0, n - 256), n))
        assert (other["copy"] == other["at"][:, None]).all()


@pytest.mark.parametrize("laps", [1, 3])
def test_several_laps_between_saves(ram, laps):
    """The same rows with other tickets are other rows, also where they hold the same bytes."""
    rb = buffer(CAPACITY)
    checkpointer = Checkpointer(ram, rb, keep=9)
    before = segments(checkpointer.save(1).path)
    for lap in range(laps):
        rb.extend(steps(lap, CAPACITY))
    after = segments(checkpointer.save(2).path)
    assert not set(before.values()) & set(after.values())
    assert restored(ram, 1)["at"].tolist() == list(range(CAPACITY))
    assert restored(ram, 2)["at"].tolist() == list(range(laps - 1, laps - 1 + CAPACITY))


def test_an_edit_is_in_the_next_and_not_in_the_one_before(ram):
    rb = buffer(700)
    checkpointer = Checkpointer(ram, rb, keep=9)
    first = checkpointer.save(1)
    rb.set_at_("at", torch.tensor([-5]), torch.tensor([200]))
    second = checkpointer.save(2)
    one, two = segments(first.path), segments(second.path)
    assert [name for name in one if one[name] != two[name]] == ["0-1.bin"]
    assert restored(ram, 1)["at"][200] == 200
    assert restored(ram, 2)["at"][200] == -5


def test_a_write_through_a_view(ram):
    """It leaves no trace in tickets: only ``paranoid`` sees it."""
    rb = buffer(700)
    careless, careful = Checkpointer(ram / "a", rb), Checkpointer(ram / "b", rb, paranoid=True)
    careless.save(1)
    careful.save(1)
    rb.storage[:]["copy"][300] = 7.0
    assert careless.save(2).bytes_linked > 0
    with pytest.raises(RuntimeError, match=r"row 300 of \('copy',\) was changed through a view"):
        careful.save(2)
    assert [entry.problem is None for entry in careful.list()] == [False, True]
    rb.set_at_("copy", rb["copy"][300:301].clone(), torch.tensor([300]))
    careful.save(3)
    assert restored(ram / "a")["copy"][300, 0] == 300, "as documented: the old value"
    assert restored(ram / "b")["copy"][300, 0] == 7.0


@pytest.mark.parametrize("error", ["link", "gone"])
def test_where_nothing_can_be_linked_it_is_copied(ram, monkeypatch, error):
    rb = buffer(700)
    checkpointer = Checkpointer(ram, rb, keep=9)
    first = checkpointer.save(1)
    if error == "link":
        monkeypatch.setattr(disk, "link", lambda *_: False)
    else:
        shutil.rmtree(first.path)
    second = checkpointer.save(2)
    assert second.bytes_linked == 0
    assert contents(restored(ram, 2)) == contents(rb)
    assert verify(second.path).good
    if error == "link":
        one, two = (next(path.rglob("0-1.bin")) for path in (first.path, second.path))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("removed", [{0}, {1}, {2}, {3}, {0, 1}, {1, 2}, {0, 2}, {0, 1, 2}, {1, 2, 3}])
def test_any_of_them_may_be_removed(ram, removed):
    rb = buffer(500)
    checkpointer = Checkpointer(ram, rb, keep=9)
    reports = []
    for step in range(4):
        rb.extend(steps(500 + 100 * step, 100))
        reports.append((checkpointer.save(step), contents(rb)))
    for step in removed:
        shutil.rmtree(reports[step][0].path)
    for step, (report, was) in enumerate(reports):
        if step not in removed:
            assert checkpointer.verify(report.name) == []
            assert contents(restored(ram, step)) == was
    checkpointer.save(9)
    assert contents(restored(ram, 9)) == contents(rb)


def test_full_every(ram):
    checkpointer = Checkpointer(ram, buffer(700), keep=9, full_every=3)
    assert [checkpointer.save(step).bytes_linked > 0 for step in range(7)] == [
        *[False, True, True],
        *[False, True, True],
        False,
    ]


@pytest.mark.parametrize("resume", ["exact", "env_reset"])
@pytest.mark.parametrize("storage", ["ram", "memmap"])
def test_after_a_restore_the_next_is_incremental(ram, resume, storage):
    def make(folder=None):
        return buffer(storage=LazyMemmapStorage(CAPACITY) if storage == "memmap" else None)

    rb = make()
    rb.extend(steps(0, 700))
    first = Checkpointer(ram, rb).save(1)
    other = make()
    other.extend(steps(5000, 40))  # so that its tickets are others
    checkpointer = Checkpointer(ram, other)
    checkpointer.restore(resume=resume)
    second = checkpointer.save(2)
    one, two = segments(first.path), segments(second.path)
    changed = [name for name in two if two[name] != one.get(name)]
    assert changed == ([] if resume == "exact" else ["0-5.bin"])
    other.extend(steps(700, 130))
    third = checkpointer.save(3)
    changed = {name for name, inode in segments(third.path).items() if inode != two.get(name)}
    assert changed == {"0-5.bin", "0-6.bin"}
    again = restored(ram, 3, make=make)
    assert contents(again) == contents(other)
    assert (again["copy"] == again["at"][:, None]).all()
    for one in (rb, other, again):
        one.close()


# ---- whose rows they are ---------------------------------------------------------------------------------------------------


def test_another_store_with_equal_tickets_is_not_linked(ram):
    """As many rows were written to it, in as many calls; it may even lie where the old one lay."""
    rb = buffer(700)
    checkpointer = Checkpointer(ram, rb, keep=99)
    for step in range(6):
        report = checkpointer.save(step)
        assert report.bytes_linked == 0
        rb.set_storage(LazyTensorStorage(CAPACITY))
        rb.extend(steps(10_000 * (step + 1), 700))
        other = restored(ram, step)
        assert other["at"].tolist() == list(range(10_000 * step, 10_000 * step + 700))


def test_no_two_stores_have_one_lineage():
    """Also where one lies where another lay before."""
    known, places = [], []
    for _ in range(300):
        storage = LazyTensorStorage(4)
        storage.set(range(2), TensorDict({"a": torch.zeros(2)}, [2]))
        assert storage.lineage() == storage.lineage()
        assert storage.lineage() not in known
        known.append(storage.lineage())
        places.append(id(storage.memory))
    assert len(set(places)) < len(places), "otherwise this tests nothing"


def test_two_buffers_in_one_folder(ram):
    """Not meant to be, and harmless: nothing is taken over from the other one."""
    one, two = buffer(700), buffer()
    two.extend(steps(9000, 700))
    first, second = Checkpointer(ram, one, keep=9), Checkpointer(ram, two, keep=9)
    assert first.save(1).bytes_linked == 0
    assert second.save(2).bytes_linked == 0
    assert restored(ram, 2)["at"].tolist() == list(range(9000, 9700))


@pytest.mark.parametrize("how", ["loads", "load_state_dict", "restore", "empty", "share", "storage"])
def test_what_replaced_the_rows_is_saved(ram, how):
    rb, other = buffer(700), buffer()
    other.extend(steps(9000, 700))
    other.dumps(ram / "dump")
    Checkpointer(ram / "theirs", other).save(1)
    checkpointer = Checkpointer(ram / "ours", rb, keep=9)
    checkpointer.save(1)
    if how == "loads":
        rb.loads(ram / "dump")
    elif how == "load_state_dict":
        rb.load_state_dict(other.state_dict())
    elif how == "restore":
        Checkpointer(ram / "theirs", rb).restore(resume="exact")
    elif how == "empty":
        rb.empty()
        rb.extend(steps(9000, 700))
    elif how == "storage":
        rb.storage.loads(ram / "dump" / "storage")
    else:
        rb.share()
        rb.extend(steps(700, 30))
    checkpointer.save(2)
    expected = range(730) if how == "share" else range(9000, 9700)
    assert restored(ram / "ours", 2)["at"].tolist() == list(expected)
    assert restored(ram / "ours", 1)["at"].tolist() == list(range(700))
    rb.extend(steps(expected.stop, 1))
    assert checkpointer.save(3).bytes_linked > 0
    assert contents(restored(ram / "ours", 3)) == contents(rb)
    rb.close()


def test_back_to_an_older_one(ram):
    """Rows written since have tickets that are written again, with other rows."""
    rb = buffer(700)
    checkpointer = Checkpointer(ram, rb, keep=9)
    checkpointer.save(1)
    rb.extend(steps(700, 200))
    checkpointer.save(2)
    checkpointer.restore(1, resume="exact")
    rb.extend(steps(7000, 200))
    report = checkpointer.save(3)
    assert report.bytes_linked > 0
    assert restored(ram, 3)["at"].tolist() == [*range(700), *range(7000, 7200)]
    assert restored(ram, 2)["at"].tolist() == list(range(900))


# ---- restoring -------------------------------------------------------------------------------------------------------------


def test_a_step_is_chosen(ram):
    rb = buffer(10)
    checkpointer = Checkpointer(ram, rb, keep=9)
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, found none"):
        checkpointer.restore()
    for step in (5, 20, 10):
        rb.extend(steps(100 + step, 1))
        checkpointer.save(step, user={"model": f"m{step}", "list": [1, None, 2.5, {"ä": True}]})
    other = buffer()
    for step, n in ((5, 11), (20, 12), (10, 13)):
        report = Checkpointer(ram, other).restore(step, verify="full")
        assert (report.step, report.steps, len(other)) == (step, n, n)
        assert report.user == {"model": f"m{step}", "list": [1, None, 2.5, {"ä": True}]}
        assert report.passed_over == []
    with pytest.raises(FileNotFoundError, match=r"expected a checkpoint of one of the steps \[5, 10, 20\], got 7"):
        checkpointer.restore(7)
    assert [entry.step for entry in checkpointer.list()] == [20, 10, 5]


@pytest.mark.parametrize("convert", [False, True])
def test_a_series_is_no_dump(ram, convert):
    Checkpointer(ram / "s", buffer(10)).save(1)
    other = buffer(3)
    before = bits(other.state_dict())
    with pytest.raises(
        IncompatibleCheckpoint, match=r"one checkpoint.*got a folder of them.*Checkpointer\('.*/s', rb\)\.restore\(\)"
    ):
        other.loads(ram / "s", convert=convert)
    assert bits(other.state_dict()) == before
    (entry,) = Checkpointer(ram / "s", other).list()
    other.loads(entry.path)
    assert len(other) == 10


def test_of_several_at_one_step_the_last_is_the_newest(ram):
    rb = buffer(10)
    checkpointer = Checkpointer(ram, rb, keep=2)
    for n in range(8):
        rb.extend(steps(10 + n, 1))
        name = checkpointer.save(5).name
        assert checkpointer.list()[0].name == name
        for step in (None, 5):
            assert contents(restored(ram, step)) == contents(rb)


@pytest.mark.parametrize("damage", ["segment", "manifest", "undecided", "table"])
def test_the_newest_is_damaged(ram, damage):
    rb = buffer(300)
    checkpointer = Checkpointer(ram, rb)
    checkpointer.save(1)
    was = contents(rb)
    rb.extend(steps(300, 300))
    path = checkpointer.save(2).path
    if damage == "segment":
        os.truncate(_writable(next(path.rglob("0-2.bin"))), 100)
    elif damage == "table":
        next(path.rglob("lanes.bin")).unlink()
    elif damage == "undecided":
        (path / "manifest.json").unlink()
        next(path.glob("rank-*/shard.json")).unlink()  # else whoever restores decides
    else:
        raw = bytearray((path / "manifest.json").read_bytes())
        raw[50] ^= 1
        rewrite(path / "manifest.json", raw)
    other = buffer(3)
    before = contents(other)
    with pytest.raises(CorruptCheckpoint, match="000000000002"):
        Checkpointer(ram, other).restore(2)
    assert contents(other) == before
    with pytest.warns(UserWarning, match="is loaded, and not: .*000000000002"):
        report = Checkpointer(ram, other).restore(resume="exact")
    assert report.step == 1
    assert report.passed_over
    assert contents(other) == was
    assert [entry.problem is None for entry in checkpointer.list()] == [False, True]
    assert checkpointer.verify(path.name)


def _writable(path):
    path.chmod(0o600)
    return path


def test_a_flipped_bit_is_found_when_it_is_read(ram):
    rb = buffer(300)
    path = Checkpointer(ram, rb).save(1).path
    file = next(path.rglob("0-1.bin"))
    raw = bytearray(file.read_bytes())
    raw[1000] ^= 1
    rewrite(file, raw)
    for verified in ("read", "full"):
        other = buffer()
        with pytest.raises(CorruptCheckpoint, match=r"0-1\.bin at byte 0"):
            Checkpointer(ram, other).restore(verify=verified)
        assert len(other) == 0
        other.extend(steps(0, 5))
        before = contents(other)
        with pytest.raises(CorruptCheckpoint, match=r"0-1\.bin at byte 0"):
            Checkpointer(ram, other).restore(verify=verified)
        assert contents(other) == before
    assert [str(problem.path) for problem in Checkpointer(ram, rb).verify(path.name)] == [str(file)]


@pytest.mark.parametrize("saves", [1, 2])
def test_a_hint_that_was_not_written_any_more(ram, monkeypatch, saves):
    """The process died before: that is no reason for a warning."""
    rb, other = buffer(20), buffer()
    checkpointer = Checkpointer(ram, rb)
    for step in range(saves):
        if step == saves - 1:
            monkeypatch.setattr(Series, "set_latest", lambda *_: None)
        rb.extend(steps(0, 3))
        last = checkpointer.save(step)
    with warnings.catch_warnings(action="error"):
        report = Checkpointer(ram, other).restore(resume="exact")
    assert (report.name, report.passed_over) == (last.name, [])
    assert contents(other) == contents(rb)


@pytest.mark.parametrize("hint", [None, "", "ckpt-x\n", "ckpt-000000000001-e0001-00000000\n", b"\xff" * 300, "../x"])
def test_the_hint_is_only_a_hint(ram, hint):
    rb = buffer(20)
    Checkpointer(ram, rb).save(0)
    name = Checkpointer(ram, rb).save(1).name
    (ram / "LATEST").unlink()
    if hint is not None:
        (ram / "LATEST").write_bytes(hint if isinstance(hint, bytes) else hint.encode())
    other = buffer()
    with pytest.warns(UserWarning, match=f"{name} is loaded, and not: .*LATEST"):
        report = Checkpointer(ram, other).restore(resume="exact")
    assert report.name == name
    assert contents(other) == contents(rb)
    Checkpointer(ram, rb).save(2)
    with warnings.catch_warnings(action="error"):
        Checkpointer(ram, other).restore()


def test_prune_and_verify(ram):
    rb = buffer(300)
    checkpointer = Checkpointer(ram, rb, keep=2)
    names = [checkpointer.save(step).name for step in range(4)]
    assert [entry.name for entry in checkpointer.list()] == [names[3], names[2]]
    assert checkpointer.prune(1) == [names[2]]
    assert sorted(os.listdir(ram)) == ["EPOCH-00000001", "LATEST", names[3]]
    assert checkpointer.verify(names[3], "meta") == []
    (ram / names[3] / "stranger").touch()
    assert checkpointer.verify(names[3], "read") == []
    assert "stranger" in str(checkpointer.verify(names[3]))
    with pytest.raises(FileNotFoundError, match="expected one of"):
        checkpointer.verify("x")
    with pytest.raises(ValueError, match="expected 'meta', 'read' or 'full', got 'all'"):
        checkpointer.verify(names[3], "all")
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        checkpointer.prune(0)
    assert contents(restored(ram)) == contents(rb)


def test_bad_arguments(ram):
    rb = buffer(20)
    rb.dumps(ram / "dump")
    with pytest.raises(FileExistsError, match="expected a folder for checkpoints, got a dump"):
        Checkpointer(ram / "dump", rb)
    for wrong, error in (({"keep": 0}, ValueError), ({"full_every": 0}, ValueError), ({"keep": 1.0}, TypeError)):
        with pytest.raises(error, match=f"{next(iter(wrong))}: expected"):
            Checkpointer(ram / "x", rb, **wrong)
    with pytest.raises(ValueError, match="expected one of data, done"):
        Checkpointer(ram / "x", rb, roles={"at": "over"})
    assert not (ram / "x").exists()
    checkpointer = Checkpointer(ram / "x", rb)
    for step in (-1, 1.0, True, "1", None):
        with pytest.raises(ValueError, match="step: expected an int of at least 0"):
            checkpointer.save(step)
    with pytest.raises(ValueError, match="resume: expected"):
        checkpointer.restore(resume="x")
    with pytest.raises(ValueError, match="verify: expected"):
        checkpointer.restore(verify="meta")
    assert os.listdir(ram / "x") == []
    for user in ({"a": object()}, {"a": float("nan")}, {1: 2}, {"a": torch.zeros(1)}, {"a": "x" * (1 << 21)}):
        with pytest.raises((TypeError, ValueError)):
            checkpointer.save(1, user=user)
        assert checkpointer.list() == []
    with pytest.raises(KeyError, match="expected stored fields"):
        Checkpointer(ram / "x", rb, roles={"nothing": "done"}).save(1)
    assert all(entry.problem for entry in checkpointer.list())


def test_roles(ram):
    rb = buffer()
    rb.extend(steps(0, 20).set("over", torch.arange(20) % 5 == 4))
    assert Checkpointer(ram / "a", rb).save(1).episodes == {"open": {"episodes": 1, "steps": 20}}
    report = Checkpointer(ram / "b", rb, roles={"over": "done"}).save(1)
    assert report.episodes == {"complete": {"episodes": 4, "steps": 20}}
    assert "4 complete" in str(report)


def test_a_later_incarnation_takes_over(ram):
    rb = buffer(20)
    old, new = Checkpointer(ram, rb), Checkpointer(ram, buffer(30))
    old.save(1)
    new.save(2)
    before = tree(ram)
    for call in (lambda: old.save(3), lambda: old.prune(1), lambda: old.save(3, wait=False).wait(60)):
        with pytest.raises(RuntimeError, match="This process was replaced"):
            call()
    assert tree(ram) == before
    new.save(4)
    assert len(restored(ram)) == 30
    old.restore(2)  # reading is allowed
