"""Attempts, votes and decisions. F60–F62, D32, D36, B22."""

import errno
import os
import shutil
import threading

import pytest

from engram.errors import CorruptCheckpoint
from engram.saved import attempts, checkpoints, disk, documents
from engram.saved.attempts import Name
from engram.saved.checkpoints import Checkpoint
from engram.saved.documents import corrupt, rank_folder
from engram.saved.inspection import verify
from engram.saved.part_reader import PartReader
from engram.saved.series import Series
from tests.saved import checkpoint_folders as made


@pytest.fixture
def epoch(tmp_path):
    return attempts.claim_epoch(tmp_path)


def attempt(root, step=10, epoch=1, world=2, voters=(), **options):
    folder = attempts.begin(root, step=step, epoch=epoch, world=world, trigger="t", **options)
    for rank in voters:
        made.vote(folder, rank, world)
    return folder


def test_names_sort_by_age_and_say_what_they_are():
    name = Name(120_000, 7, "a3f91c2d")
    assert str(name) == "ckpt-000000120000-e0007-a3f91c2d"
    assert Name.parse(str(name)) == name
    assert Name.parse("ckpt-000000120000-e0007-crash3") == Name(120_000, 7, "crash3")
    assert Name(10**13, 0, "00000000") == Name.parse(str(Name(10**13, 0, "00000000")))
    for other in ("ckpt-1-e0007-a3f91c2d", "ckpt-000000120000-e0007-A3F91C2D", "trash-" + str(name), str(name) + "x", "LATEST",
                  "ckpt-0000000120000-e0007-a3f91c2d"):  # fmt: skip
        assert Name.parse(other) is None


def test_epochs_are_claimed_once(tmp_path):
    claimed = []
    threads = [threading.Thread(target=lambda: claimed.append(attempts.claim_epoch(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 9))
    assert attempts.newest_epoch(tmp_path) == 8


def test_all_votes_make_a_checkpoint(tmp_path, epoch):
    folder = attempt(tmp_path, voters=[1], user={"model": "a"}, parent="ckpt-x")
    assert attempts.decide(folder, epoch) is None
    assert attempts.decision(folder) is None
    assert [(v.rank, v.shard is not None, v.error) for v in attempts.votes(folder)] == [
        (0, False, None),
        (1, True, None),
    ]
    made.vote(folder, 0, 2)
    manifest = attempts.decide(folder, epoch)
    assert manifest.status == "complete"
    assert (manifest.step, manifest.world, manifest.steps_by_rank, manifest.user, manifest.parent) == (
        10,
        2,
        (10, 10),
        {"model": "a"},
        "ckpt-x",
    )
    with Checkpoint(folder) as checkpoint:
        assert [checkpoint.shard(rank).rank for rank in range(2)] == [0, 1]
        assert not list(checkpoint.problems("full"))
    with pytest.raises(FileExistsError, match="no vote of rank 0 yet"):
        vote_again(folder)


def vote_again(folder):
    attempts.accept(folder, 0, [], made.CONTENT._replace(schema_sum=""))


@pytest.mark.parametrize("late", ["before", "after"])
def test_one_no_aborts_and_a_late_yes_does_not_revive(tmp_path, epoch, late):
    folder = attempt(tmp_path, voters=[0] if late == "before" else [])
    own = folder / rank_folder(1, 2)
    own.mkdir()
    (own / "half").write_bytes(b"x")
    attempts.refuse(folder, 1, "OSError: No space left on device")
    assert sorted(os.listdir(own)) == ["error.json"]
    manifest = attempts.decide(folder, epoch)
    assert manifest.status == "aborted"
    assert manifest.reasons == ("rank 1: OSError: No space left on device",)
    if late == "after":
        made.vote(folder, 0, 2)
    assert attempts.decide(folder, epoch) == manifest
    assert Series(tmp_path).latest()[0] is None
    with pytest.raises(CorruptCheckpoint, match="aborted: rank 1"):
        Checkpoint(folder)


def test_a_deadline_aborts_and_names_who_is_missing(tmp_path, epoch):
    folder = attempt(tmp_path, world=3, voters=[1])
    manifest = attempts.decide(folder, epoch, give_up="600 s are over")
    assert manifest.reasons == ("600 s are over: no vote of ranks [0, 2]",)
    made.vote(folder, 0, 3)
    made.vote(folder, 2, 3)
    assert attempts.decide(folder, epoch).status == "aborted"


def test_two_committers_and_an_abort_race_and_all_report_the_winner(tmp_path, epoch):
    for step in range(12):
        folder = attempt(tmp_path, step=step, voters=[0, 1])
        seen = []
        go = threading.Barrier(3)

        def decide(i):
            go.wait()
            if i:
                seen.append(attempts.decide(folder, epoch))
            else:  # one that does not see a vote yet
                given = [vote._replace(shard=None, entry=None) for vote in attempts.votes(folder)]
                raw = checkpoints.manifest_of(attempts.read_attempt(folder), given, ["too late"]).encode()
                disk.publish(folder / "manifest.json", raw)
                seen.append(attempts.decision(folder))

        threads = [threading.Thread(target=decide, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 3
        assert len({manifest.encode() for manifest in seen}) == 1
        assert (folder / "manifest.json").read_bytes() == seen[0].encode()
        assert not list(folder.glob("*.tmp"))


def test_the_next_start_commits_what_all_voted_for(tmp_path, epoch):
    whole, partial = attempt(tmp_path, 10, voters=[0, 1]), attempt(tmp_path, 20, voters=[0])
    later = attempts.claim_epoch(tmp_path)
    with pytest.raises(RuntimeError, match="no later incarnation of this job than 1, got 2"):
        attempts.decide(whole, epoch)
    assert Series(tmp_path).recover(later) == [whole.name]
    assert attempts.decision(partial) is None
    found, problems = Series(tmp_path).latest()
    assert found == whole
    assert "undecided: 1 of 2 ranks voted" in str(problems[0])


def test_an_old_incarnation_may_do_nothing(tmp_path, epoch):
    good = made.save(tmp_path, 10, epoch)
    folder = attempt(tmp_path, 20, voters=[0, 1])
    attempts.claim_epoch(tmp_path)
    before = made.tree(tmp_path)
    for act in (
        lambda: attempts.decide(folder, epoch),
        lambda: attempts.decide(folder, epoch, give_up="late"),
        lambda: Series(tmp_path).prune(1, epoch),
        lambda: Series(tmp_path).set_latest(good.name, epoch),
        lambda: attempt(tmp_path, 30, epoch),
        lambda: Series(tmp_path).recover(epoch),
    ):
        with pytest.raises(RuntimeError, match="This process was replaced"):
            act()
    assert made.tree(tmp_path) == before
    assert attempts.decide(good, epoch).status == "complete"  # what is decided may be read


@pytest.mark.parametrize("wrong", ["attempt", "rank", "world", "damaged", "shard of another part", "schema"])
def test_votes_that_do_not_count(tmp_path, epoch, wrong):
    folder = attempt(tmp_path, voters=[0])
    own = folder / rank_folder(1, 2)
    if wrong in ("attempt", "world"):
        other = attempt(tmp_path, 5, world=3 if wrong == "world" else 2, voters=[1])
        shutil.copytree(other / rank_folder(1, 3 if wrong == "world" else 2), own)
    elif wrong == "rank":
        shutil.copytree(folder / rank_folder(0, 2), own)
    elif wrong == "schema":
        parts = [made.write_index(own / "sampler")]
        attempts.accept(folder, 1, parts, made.CONTENT._replace(schema_sum="0" * 16))
    else:
        made.vote(folder, 1, 2)
        path = own / ("shard.json" if wrong == "damaged" else "sampler/part.json")
        made.rewrite(path, path.read_bytes()[:-1])
    manifest = attempts.decide(folder, epoch)
    assert manifest.status == "aborted"
    says = "one schema on all ranks, got 2: of rank 0, of rank 1" if wrong == "schema" else "rank"
    assert says in manifest.reasons[0]
    assert not any(reason.endswith(".") for reason in manifest.reasons), "whoever says it ends the sentence"


def test_what_a_rank_said_ends_with_one_full_stop(tmp_path, epoch):
    folder = attempt(tmp_path, voters=[0])
    attempts.refuse(folder, 1, "ValueError: save: step: expected 3, as on rank 0, got 2.")
    assert attempts.decide(folder, epoch).reasons == (
        "rank 1: ValueError: save: step: expected 3, as on rank 0, got 2",
    )
    assert str(Series(folder.parent).look(folder.name)).endswith("as on rank 0, got 2.")
    assert str(corrupt(folder, "expected less. Rename the key.")) == f"{folder}: expected less. Rename the key."


LATESTS = {
    "missing": None,
    "empty": "",
    "trash": "trash-ckpt-000000000010-e0001-00000000",
    "partial": "partial",
    "damaged": "damaged",
    "a path": "../../etc",
    "long": "x" * 5000,
}


@pytest.mark.parametrize("what", LATESTS)
def test_a_hint_that_is_wrong(tmp_path, epoch, what):
    made.save(tmp_path, 5, epoch)
    good = made.save(tmp_path, 10, epoch)
    partial, damaged = attempt(tmp_path, 20, voters=[0]), made.save(tmp_path, 30, epoch)
    path = next(damaged.glob("rank-*/sampler/000.bin"))
    os.chmod(path, 0o600)
    os.truncate(path, 3)
    hint = {"partial": partial.name, "damaged": damaged.name}.get(what, LATESTS[what])
    (tmp_path / "LATEST").chmod(0o600)
    (tmp_path / "LATEST").unlink() if hint is None else (tmp_path / "LATEST").write_text(hint)
    found, problems = Series(tmp_path).latest()
    assert found == good
    said = "\n".join(map(str, problems))
    assert "expected 32 bytes, got 3" in said
    assert "undecided: 1 of 2" in said
    assert f"expected the name of {good.name}" in said
    assert Series(tmp_path).latest(at_most=9)[0].name.startswith("ckpt-000000000005")
    Series(tmp_path).set_latest(good.name, epoch)
    assert len(Series(tmp_path).latest()[1]) == 2
    report = verify(tmp_path)
    assert [problem.path for problem in report.problems] == [path]


def test_a_hint_that_lags(tmp_path, epoch):
    """As a process leaves it that dies between its decision and the hint: nothing is wrong."""
    hint = tmp_path / "LATEST"
    first = made.save(tmp_path, 10, epoch)
    hint.unlink()  # not written yet
    assert Series(tmp_path).latest() == (first, [])
    Series(tmp_path).set_latest(first.name, epoch)
    second = made.save(tmp_path, 20, epoch)
    Series(tmp_path).set_latest(first.name, epoch)
    assert Series(tmp_path).latest() == (second, [])
    assert verify(tmp_path).notes == []
    later = attempts.claim_epoch(tmp_path)
    third = attempt(tmp_path, 30, epoch=later, voters=[0, 1])
    Series(tmp_path).recover(later)
    assert Series(tmp_path).latest() == (third, [])

    # But all of these are something else.
    hint.unlink()
    assert Series(tmp_path).latest()[1] != [], "there was one, as two are older"
    again = made.save(tmp_path, 15, attempts.claim_epoch(tmp_path))
    found, problems = Series(tmp_path).latest()
    assert found == third
    assert [problem.path for problem in problems] == [hint], "a later incarnation went back and on from there"
    Series(tmp_path).set_latest(first.name, attempts.newest_epoch(tmp_path))
    shutil.rmtree(first)
    assert [problem.path for problem in Series(tmp_path).latest()[1]] == [hint], "what it names is gone"
    Series(tmp_path).set_latest(again.name, attempts.newest_epoch(tmp_path))
    assert [problem.path for problem in Series(tmp_path).latest()[1]] == [hint]


def test_any_may_be_removed_and_the_rest_stays_good(tmp_path, epoch):
    folders = [made.save(tmp_path, 10, epoch)]
    for step in (20, 30, 40):
        folders.append(made.save(tmp_path, step, epoch, parent=folders[-1]))
    inodes = {folder.stat().st_ino for folder in tmp_path.glob("ckpt-*/rank-*/storage/seg/0-1.bin")}
    assert len(inodes) == 1
    for gone in (1, 0, 3):
        shutil.rmtree(folders[gone])
        assert verify(tmp_path).problems == []
    assert Series(tmp_path).latest()[0] == folders[2]


def test_retention(tmp_path, epoch):
    for step in (10, 20, 30, 40):
        made.save(tmp_path, step, epoch)
    aborted = attempt(tmp_path, 35)
    attempts.refuse(aborted, 0, "x")
    attempts.decide(aborted, epoch)
    under_way = attempt(tmp_path, 36, voters=[0])
    crash = [attempt(tmp_path, 15, attempt=f"crash{i}") for i in (1, 2)]
    newer = attempt(tmp_path, 50, voters=[0])
    later = attempts.claim_epoch(tmp_path)
    ahead = attempt(tmp_path, 1, epoch=later, voters=[0, 1])
    removed = Series(tmp_path).prune(2, later)
    assert [Name.parse(name).step for name in removed] == [36, 35, 20, 15, 10]
    assert not under_way.exists()
    assert not aborted.exists()
    left = {Name.parse(path.name).step for path in tmp_path.glob("ckpt-*")}
    assert left == {1, 15, 30, 40, 50}
    assert ahead.exists()
    assert newer.exists()
    assert crash[1].exists()
    assert not crash[0].exists()
    assert not list(tmp_path.glob("trash-*"))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Series(tmp_path).prune(0, later)


def test_the_last_good_one_is_never_removed(tmp_path, epoch):
    good = made.save(tmp_path, 10, epoch)
    for step in (20, 30):
        shutil.rmtree(next(made.save(tmp_path, step, epoch).glob("rank-*/sampler")))
    assert Series(tmp_path).prune(1, epoch) == []
    assert Series(tmp_path).latest()[0] == good
    shutil.rmtree(next(good.glob("rank-*/sampler")))
    assert Series(tmp_path).prune(1, epoch) == []  # nothing is good: nothing is touched


def test_going_back_to_an_earlier_step_keeps_what_is_saved_then(tmp_path, epoch):
    """The job was started again from step 100 of 200: what it saves next is older by its step, and newer by its epoch."""
    made.save(tmp_path, 200, epoch)
    later = attempts.claim_epoch(tmp_path)
    made.save(tmp_path, 110, later)
    now = made.save(tmp_path, 120, later)
    Series(tmp_path).prune(1, later)
    assert now.exists()
    assert sorted(name.step for name in attempts.names(tmp_path)) == [120, 200]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOENT])
def test_where_files_cannot_be_linked_they_are_written(tmp_path, epoch, monkeypatch, code):
    parent = made.save(tmp_path, 10, epoch)
    real = os.link

    def fail(source, target, **options):
        if "seg" in str(target):
            raise OSError(code, "no")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", fail)
    folder = made.save(tmp_path, 20, epoch, parent=parent)
    assert verify(folder).good
    with PartReader.open(folder / rank_folder(0, 1) / "storage") as part:
        assert [it.flags for it in part.listing.segments] == [0, 0, 0, 0]


def test_a_parent_that_was_pruned_meanwhile(tmp_path, epoch):
    parent = made.save(tmp_path, 10, epoch)
    folder = attempt(tmp_path, 20, world=1)
    with PartReader.open(parent / rank_folder(0, 1) / "storage") as reader:
        shutil.rmtree(parent)
        made.vote(folder, 0, 1, parent=reader)
    assert attempts.decide(folder, epoch).status == "complete"
    assert verify(folder).good


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step": -1}, "expected a step"), ({"world": 0}, "1 to 65536 ranks"), ({"world": 65537}, "got 10, 1 and 65537"),
        ({"attempt": "../x"}, "eight hex digits"), ({"user": {"a": float("nan")}}, "finite"), ({"user": {"a" * 2_000_000: 1}}, "at most"),
    ],
)  # fmt: skip
def test_attempts_that_cannot_begin(tmp_path, epoch, options, says):
    with pytest.raises(ValueError, match=says):
        attempt(tmp_path, **options)
    with pytest.raises(TypeError, match=r"\$\.user\.model: expected None, a bool.*got object"):
        attempt(tmp_path, user={"model": object()})
    assert attempts.names(tmp_path) == []


# ---- what a process remembers ----------------------------------------------------------------------------------------


def decoded(monkeypatch):
    """The files whose text is read from now on."""
    names, decode = [], documents._decode_same

    def noted(raw, kind):
        names.append(kind.__name__)
        return decode(raw, kind)

    monkeypatch.setattr(documents, "_decode_same", noted)
    return names


def test_a_known_checkpoint_is_not_read_again(tmp_path, monkeypatch):
    folder, known = made.save(tmp_path, 10, 1, world=2), Series(tmp_path)
    assert known.look(folder.name) is None
    names = decoded(monkeypatch)
    assert known.look(folder.name) is None
    assert known.latest()[0] == folder
    with known.open(folder) as checkpoint:
        assert checkpoint.part(1, "storage").schema == made.SCHEMA
        assert checkpoint.shard(0).rank == 0
    assert names == []
    assert verify(folder).good
    assert names.count("Part") == 4, "verification reads all"


def test_a_process_does_not_read_what_it_wrote(tmp_path, monkeypatch):
    known = Series(tmp_path)
    folder = attempts.begin(tmp_path, step=1, epoch=1, world=1, trigger="save")
    parts = [made.write_segments(folder / rank_folder(0, 1) / "storage")]
    names = decoded(monkeypatch)
    attempts.accept(folder, 0, parts, made.CONTENT, contents=known.contents(folder))
    assert attempts.decide(folder, 1, contents=known.contents(folder)).status == "complete"
    assert known.look(folder.name) is None
    assert names == ["Attempt"]
    with known.open(folder) as ours, Checkpoint(folder) as read:
        assert ours.contents.manifest == read.manifest
        assert ours.shard(0) == read.shard(0)
        assert ours.part(0, "storage").listing == read.part(0, "storage").listing


@pytest.mark.parametrize(
    "name", ["rank-00000-of-00001/shard.json", "rank-00000-of-00001/storage/seg/0-1.bin", "manifest.json"]
)
@pytest.mark.parametrize("change", ["remove", "shorten", "replace by a link"])
def test_what_became_of_a_known_checkpoint_is_said_as_of_any_other(tmp_path, name, change):
    folder, known = made.save(tmp_path, 10, 1), Series(tmp_path)
    assert known.look(folder.name) is None
    path = folder / name
    raw = path.read_bytes()
    path.unlink()
    if change == "shorten":
        path.write_bytes(raw[:-1])
    elif change == "replace by a link":
        (tmp_path / "elsewhere").write_bytes(raw)
        path.symlink_to(tmp_path / "elsewhere")
    assert known.look(folder.name) == Series(folder.parent).look(folder.name) is not None
    path.unlink(missing_ok=True)
    path.write_bytes(raw)
    assert known.look(folder.name) is None
