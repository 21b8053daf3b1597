"""Checkpoints of several ranks: all shards or none, back as they were, or dealt out to others."""

import json
import shutil
import warnings

import pytest
import torch

from engram import CorruptCheckpoint, IncompatibleCheckpoint, LazyTensorStorage, ListStorage, RankFailed, ReplayBuffer
from engram.saved import attempts, disk
from engram.saved.series import Series
from tests.ranks.jobs import (
    buffer,
    checkpointer,
    columns_of,
    decides_when_voted,
    done,
    episode,
    filled,
    job,
    layout,
    play,
    steps_of,
    whos,
)
from tests.twins import contents

#: By rank and lane. The last lane of each ends with an open trajectory; of rank 2's first lane one of five was overwritten, and
#: with it what says that the next one is whole.
LENGTHS = [[(5, 7, 3), (9, 4)], [(6,), (2, 2, 2)], [(8, 8, 8, 8, 8), (1, 12, 5)]]


def write_and_save(ranks, rank, root, step=5, lanes=2, length=32, **more):
    rb = buffer(lanes, length, seed=rank)
    for lane, lengths in enumerate(LENGTHS[rank]):
        play(rb, rank, lane, lengths, open_end=lane == 1)
    report = checkpointer(root, rb, ranks).save(step, **more)
    return report, contents(rb), steps_of(rb)


def load(ranks, rank, root, lanes=2, length=32, **more):
    rb = buffer(lanes, length, seed=100 + rank)
    report = checkpointer(root, rb, ranks).restore(**more)
    return report, rb


def test_all_ranks_get_one_report_of_all_shards(tmp_path):
    saved = done(job(3, write_and_save, tmp_path))
    reports = [report for report, _, _ in saved]
    assert len({report.name for report in reports}) == 1
    assert {report.steps for report in reports} == {sum(len(steps) for _, _, steps in saved)}
    assert reports[0].episodes["open"] == {"episodes": 3, "steps": 4 + 2 + 5}
    folders = {path.name for path in reports[0].path.iterdir() if path.is_dir()}
    assert folders == {f"rank-0000{rank}-of-00003" for rank in range(3)}
    assert (tmp_path / "LATEST").read_text().strip() == reports[0].name


def test_back_to_as_many_is_exact_on_every_rank(tmp_path):
    saved = done(job(3, write_and_save, tmp_path, 5, 2, 32))
    loaded = done(job(3, lambda *args: load(*args, resume="exact"), tmp_path))
    for (_, state, _), (report, rb) in zip(saved, loaded, strict=True):
        assert contents(rb) == state
        assert report.dealt is None


def test_what_is_unchanged_is_linked_on_every_rank(tmp_path):
    def act(ranks, rank):
        rb = buffer(length=4096)
        for lane in range(2):
            play(rb, rank, lane, [20] * 200)
        ck = checkpointer(tmp_path, rb, ranks)
        first, second = ck.save(1), ck.save(2)
        return first.bytes_linked, second.bytes_linked, second.bytes_written

    for first, linked, written in done(job(2, act)):
        assert first == 0
        assert linked > 2 * 2 * 4000 * 20
        assert written > 0


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_dealt_out_to_other_ranks(tmp_path, n):
    saved = done(job(3, write_and_save, tmp_path))
    every = set.union(*(steps for _, _, steps in saved))
    incomplete = {w for w in whos(every) if w // 1000 in {1001, 101002, 201002, 200001}}
    assert len(incomplete) == 11 + 8
    loaded = done(job(n, lambda *args: load(*args, length=100), tmp_path))
    parts = [steps_of(rb) for _, rb in loaded]
    together = set.union(*parts)
    assert sum(map(len, parts)) == len(together)
    assert together == {step for step in every if step[0] not in incomplete}
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 12
    for report, rb in loaded:
        assert report.dealt["saved"] == {"episodes": 16, "steps": len(every)}
        assert report.dealt["dropped"]["open"] == {"episodes": 3, "steps": 11}
        assert report.dealt["dropped"]["headless"] == {"episodes": 1, "steps": 8}
        assert report.dealt["plan"] == loaded[0][0].dealt["plan"]
        assert report.steps == len(steps_of(rb))
        for lane, there in enumerate(layout(rb)):
            said = columns_of(rb)["env_id"][lane * 100 : lane * 100 + len(there)]
            assert (said == lane).all()
    reports = list((tmp_path / "reports").iterdir())
    assert len(reports) == 1
    assert json.loads(reports[0].read_text())["kept"] == loaded[0][0].dealt["kept"]


def test_environments_numbered_over_all_ranks(tmp_path):
    done(job(2, write_and_save, tmp_path))
    loaded = done(job(3, lambda *args: load(*args, length=100, env_id="global"), tmp_path))
    for rank, (_, rb) in enumerate(loaded):
        for lane, there in enumerate(layout(rb)):
            said = columns_of(rb)["env_id"][lane * 100 : lane * 100 + len(there)]
            assert (said == 2 * rank + lane).all()


def test_ranks_of_different_sizes(tmp_path):
    saved = done(job(3, write_and_save, tmp_path))
    every = whos(set.union(*(steps for _, _, steps in saved)))

    def act(ranks, rank):
        return load(ranks, rank, tmp_path, lanes=1 + 2 * rank, length=40 * (2 - rank))

    loaded = done(job(2, act))
    together = set.union(*(whos(steps_of(rb)) for _, rb in loaded))
    assert together <= every
    assert len(together) == len(every) - 11 - 8
    assert [target["lanes"] for target in loaded[0][0].dealt["targets"]] == [1, 3]


def test_another_size_on_one_rank_deals_out_anew_on_all(tmp_path):
    done(job(2, write_and_save, tmp_path))
    loaded = done(job(2, lambda ranks, rank: load(ranks, rank, tmp_path, length=32 + rank)))
    assert all(report.dealt is not None for report, _ in loaded)


def test_policies(tmp_path):
    saved = done(job(3, write_and_save, tmp_path))
    every = whos(set.union(*(steps for _, _, steps in saved)))
    for policy in ("keep", "truncate"):
        loaded = done(
            job(
                2, lambda *args, p=policy: load(*args, length=100, incomplete={"open": p, "headless": "keep"}), tmp_path
            )
        )
        assert set.union(*(whos(steps_of(rb)) for _, rb in loaded)) == every
        marked = sum(int(columns_of(rb)["next.truncated"].sum()) for _, rb in loaded)
        assert marked == (3 if policy == "truncate" else 0)
        cut = loaded[0][0].dealt["truncated"]
        assert cut == ({"episodes": 3, "steps": 11} if policy == "truncate" else {"episodes": 0, "steps": 0})
        holes = sum(lane.count(None) for _, rb in loaded for lane in layout(rb))
        assert holes == (3 if policy == "keep" else 0)
    with pytest.raises(ValueError, match="incomplete: expected 'open' or 'headless', got 'closed'"):
        done(job(1, lambda *args: load(*args, incomplete={"closed": "drop"}), tmp_path))
    with pytest.raises(ValueError, match="'headless': expected 'drop' or 'keep', got 'truncate'"):
        done(job(1, lambda *args: load(*args, incomplete={"headless": "truncate"}), tmp_path))


def test_too_little_room_keeps_the_newest(tmp_path):
    saved = done(job(3, write_and_save, tmp_path))
    total = sum(len(steps) for _, _, steps in saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report, rb = done(job(1, lambda *args: load(*args, lanes=1, length=30), tmp_path))[0]
    assert any("did not fit" in str(it.message) for it in caught)
    over = report.dealt["dropped"]["overflow"]["steps"]
    assert over > 0
    assert len(steps_of(rb)) + over + 11 + 8 == total


def test_endless_trajectories_are_not_silently_dropped(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [20], open_end=True)
        checkpointer(tmp_path, rb, ranks).save(1)

    done(job(2, act))

    def back(ranks, rank):
        rb = buffer()
        play(rb, rank, 1, [4])
        before = contents(rb)
        with pytest.raises(IncompatibleCheckpoint, match=r'40 open.*incomplete=\{"open": "keep"\}'):
            checkpointer(tmp_path, rb, ranks).restore()
        assert contents(rb) == before
        report = checkpointer(tmp_path, rb, ranks).restore(incomplete={"open": "keep"})
        assert report.dealt["kept"]["steps"] == 40

    done(job(3, back))


def test_save_fails_on_one_rank_and_there_is_no_checkpoint(tmp_path):
    done(job(2, write_and_save, tmp_path))
    before = Series(tmp_path).latest()[0]

    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [4])
        ck = checkpointer(tmp_path, rb, ranks)
        if rank == 1:
            ck._job.write_parts = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        with pytest.raises(RankFailed, match=r"rank 1: OSError: \[Errno 28\] No space left"):
            ck.save(9)
        if rank == 1:
            del ck._job.write_parts
        return ck.save(9).name

    names = set(done(job(2, act)))
    assert len(names) == 1
    good = [name for name in attempts.names(tmp_path) if Series(tmp_path).look(name) is None]
    assert {str(name) for name in good} == {before.name, *names}


def test_a_rank_that_never_comes_makes_others_wait_for_the_deadline_only(tmp_path):
    def act(ranks, rank):
        if rank == 1:
            return
        rb = buffer()
        play(rb, rank, 0, [4])
        with pytest.raises(RankFailed, match=r"no vote of ranks \[1\]"):
            decides_when_voted(checkpointer(tmp_path, rb, ranks), (0, 2), 1.0).save(9)

    done(job(3, act))
    assert Series(tmp_path).latest()[0] is None


def test_rank_0_never_comes(tmp_path):
    def act(ranks, rank):
        if rank == 0:
            return
        rb = buffer()
        with pytest.raises(RankFailed, match=r"rank 0 began no checkpoint within 2 s"):
            checkpointer(tmp_path, rb, ranks, timeout=2.0).save(9)

    done(job(2, act))


def test_rank_0_dies_between_votes_and_decision(tmp_path, monkeypatch):
    """Another rank commits; and where all died, the next job does so before it loads."""
    from engram.checkpoint import save as between_ranks

    monkeypatch.setattr(between_ranks, "_TRY_S", 0.1)

    def act(ranks, rank, everybody):
        rb = buffer()
        play(rb, rank, 0, [4])
        ck = checkpointer(tmp_path, rb, ranks)
        if rank == 0 or everybody:
            ck._job.protocol.decided = lambda *_: (_ for _ in ()).throw(SystemExit)
            with pytest.raises(SystemExit):
                ck.save(9 + everybody)
            return None
        return ck.save(9 + everybody).name

    names = job(3, act, False)
    assert names[0] is None
    assert names[1] == names[2] is not None
    assert Series(tmp_path).latest()[0].name == names[1]
    with monkeypatch.context() as undecided:
        undecided.setattr(attempts, "decide", lambda *_, **__: None)
        job(3, act, True)
    assert next(name.step for name in attempts.names(tmp_path)) == 10
    assert Series(tmp_path).look(attempts.names(tmp_path)[0]) is not None
    with pytest.warns(UserWarning, match="LATEST"):
        loaded = done(job(3, load, tmp_path))
    assert loaded[0][0].step == 10


def test_different_steps_are_refused(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [4])
        with pytest.raises(RankFailed, match="rank 1: ValueError: save: step: expected 5, as on rank 0, got 6"):
            checkpointer(tmp_path, rb, ranks).save(5 + rank)

    done(job(2, act))


def test_rank_0s_user_state_counts_and_its_mistakes_are_everybodys(tmp_path):
    saved = done(job(2, lambda *args: write_and_save(*args, user={"model": "a"}), tmp_path))
    assert len({report.name for report, _, _ in saved}) == 1
    assert done(job(2, load, tmp_path))[1][0].user == {"model": "a"}

    def act(ranks, rank):
        checkpointer(tmp_path, buffer(), ranks).save(7, user={"x": object()})

    first, second = job(2, act)
    assert isinstance(first, RankFailed)
    assert isinstance(second, RankFailed)
    assert "rank 0: TypeError" in str(second)


def test_a_load_that_fails_on_one_rank_leaves_nothing_on_any(tmp_path):
    saved = done(job(3, write_and_save, tmp_path))
    folder = saved[0][0].path / "rank-00001-of-00003" / "storage" / "seg"
    victim = min(folder.iterdir())
    victim.chmod(0o600)
    raw = bytearray(victim.read_bytes())
    raw[0] ^= 1
    victim.write_bytes(raw)

    def act(ranks, rank):
        rb = buffer()
        with pytest.raises(CorruptCheckpoint, match="none that is whole: .*rank 1: CorruptCheckpoint"):
            checkpointer(tmp_path, rb, ranks).restore()
        with pytest.raises(RankFailed, match="rank 1: CorruptCheckpoint"):
            checkpointer(tmp_path, rb, ranks).restore(saved[0][0].step)
        return len(rb)

    assert done(job(3, act)) == [0, 0, 0]
    with pytest.raises(CorruptCheckpoint, match="rank 0: CorruptCheckpoint: .*rank-00001-of-00003"):
        done(job(2, lambda *args: load(*args, verify="full"), tmp_path))


@pytest.mark.parametrize("damage", ["missing", "other attempt", "duplicate"])
def test_shards_that_do_not_belong_together(tmp_path, damage):
    first = done(job(2, write_and_save, tmp_path, 5))[0][0].path
    second = done(job(2, write_and_save, tmp_path, 6))[0][0].path
    one, two = (second / f"rank-0000{rank}-of-00002" for rank in range(2))
    shutil.rmtree(two)
    if damage == "other attempt":
        shutil.copytree(first / two.name, two)
    elif damage == "duplicate":
        shutil.copytree(one, two)
    with pytest.warns(UserWarning, match="is loaded, and not"):
        loaded = done(job(3, load, tmp_path))
    assert [report.step for report, _ in loaded] == [5, 5, 5]

    def act(ranks, _):
        checkpointer(tmp_path, buffer(), ranks).restore(step=6)

    for error in job(2, act):
        assert isinstance(error, CorruptCheckpoint)
        assert two.name in str(error)


def test_other_fields_are_refused_on_all_ranks(tmp_path):
    done(job(2, write_and_save, tmp_path))

    def act(ranks, _):
        rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4)
        rb.extend(torch.arange(5))
        with pytest.raises(IncompatibleCheckpoint):
            checkpointer(tmp_path, rb, ranks).restore()
        return len(rb)

    assert done(job(1, act)) == [5]


def test_other_dtypes_are_refused_on_all_ranks(tmp_path):
    done(job(2, write_and_save, tmp_path))

    def act(ranks, rank):
        rb = buffer()
        data = episode(rank, 0, 0, 5)
        data["obs"] = data["obs"].double()
        rb.extend(data, lane=0)
        before = contents(rb)
        with pytest.raises((IncompatibleCheckpoint, RankFailed), match="obs"):
            checkpointer(tmp_path, rb, ranks).restore()
        assert contents(rb) == before

    for n in (2, 3):
        done(job(n, act))


def test_lists_cannot_be_dealt_out(tmp_path):
    def save(ranks, _):
        rb = ReplayBuffer(storage=ListStorage(10), batch_size=2)
        rb.extend([torch.zeros(1), torch.ones(2)])
        checkpointer(tmp_path, rb, ranks).save(1)

    def act(ranks, _):
        rb = ReplayBuffer(storage=ListStorage(10), batch_size=2)
        checkpointer(tmp_path, rb, ranks).restore()
        return len(rb)

    done(job(2, save))
    assert done(job(2, act)) == [2, 2]
    for error in job(3, act):
        assert isinstance(error, IncompatibleCheckpoint)
        assert "ListStorage" in str(error)


def test_more_ranks_than_trajectories(tmp_path):
    def save(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [4])
        checkpointer(tmp_path, rb, ranks).save(1)

    done(job(1, save))
    loaded = done(job(4, load, tmp_path))
    assert [len(rb) for _, rb in loaded] == [4, 0, 0, 0]
    done(job(4, lambda ranks, rank: checkpointer(tmp_path, loaded[rank][1], ranks).save(2)))
    assert [len(rb) for _, rb in done(job(4, load, tmp_path))] == [4, 0, 0, 0]


def test_an_incarnation_that_was_replaced_decides_nothing(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [4])
        ck = checkpointer(tmp_path, rb, ranks)
        ck.save(1)
        if rank == 0:
            attempts.claim_epoch(tmp_path)
        ranks.gather(b"", 60.0)
        ck.save(2)

    first, second = job(2, act)
    assert "later incarnation" in str(first)
    assert isinstance(second, RankFailed)
    assert "later incarnation" in str(second)


@pytest.mark.parametrize("n", [None, 1, 2])
def test_whoever_restores_commits_what_all_voted_for(tmp_path, n):
    """Rank 0 died before it decided: also where one process loads it, without saying that it is a job."""
    saved = done(job(2, write_and_save, tmp_path))
    (saved[0][0].path / "manifest.json").unlink()
    (tmp_path / "LATEST").unlink()
    if n is None:
        loaded = [load(None, 0, tmp_path, length=100)]
    else:
        loaded = done(job(n, lambda *args: load(*args, length=100), tmp_path))
    assert {report.name for report, _ in loaded} == {saved[0][0].name}
    assert Series(saved[0][0].path.parent).look(saved[0][0].path.name) is None


def test_a_folder_that_is_only_read_is_restored_from(tmp_path, monkeypatch, caplog):
    saved = done(job(2, write_and_save, tmp_path, 5)) + done(job(2, write_and_save, tmp_path, 6))
    (saved[2][0].path / "manifest.json").unlink()
    (tmp_path / "LATEST").write_text(f"{saved[0][0].name}\n")
    monkeypatch.setattr(disk, "publish", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Read-only file system")))
    with pytest.warns(UserWarning, match="undecided: 2 of 2 ranks voted for it"):
        assert load(None, 0, tmp_path, length=100)[0].step == 5
    assert "what is undecided stays so: [Errno 13]" in caplog.text


def test_of_step_and_name_one_is_given(tmp_path):
    saved = done(job(1, write_and_save, tmp_path))
    rb = buffer()
    with pytest.raises(ValueError, match="restore: expected step or name, got step=5, name='ckpt-"):
        checkpointer(tmp_path, rb, None).restore(5, name=saved[0][0].name)
    assert len(rb) == 0


@pytest.mark.parametrize(
    "wrong", [{"overflow": "no"}, {"step": 1, "at_most": 2}, {"incomplete": {"open": "x"}}], ids=repr
)
def test_a_bad_argument_of_one_rank_is_told_to_all_and_the_next_restore_goes_on(tmp_path, wrong):
    done(job(2, write_and_save, tmp_path))

    def act(ranks, rank):
        rb = buffer(2, 32)
        ck = checkpointer(tmp_path, rb, ranks)
        with pytest.raises(RankFailed, match=r"restore: rank 1: (ValueError|KeyError|TypeError)"):
            ck.restore(**(wrong if rank else {}))
        assert len(rb) == 0
        return ck.restore().step

    assert done(job(2, act)) == [5, 5]


def test_a_process_forgets_documents_of_checkpoints_that_are_gone(tmp_path):
    """Of a job that saves for weeks; also where rank 0 alone removes them."""

    def act(ranks, rank):
        ck = checkpointer(tmp_path, filled(rank), ranks, keep=2)
        for step in range(6):
            ck.save(step)
        return len(ck._job.series._contents)

    assert max(done(job(3, act))) <= 2
