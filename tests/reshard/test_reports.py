"""What is said of a redistribution: by shard and in total, before it (by a save) and after it; and of shards that are missing."""

import json

import pytest
import torch

from engram import LazyTensorStorage, ReplayBuffer
from engram.saved import attempts
from tests.ranks.jobs import buffer, checkpointer, done, episode, job, play, steps_of

KINDS = {"complete": 2, "open": 1, "headless": 0, "both": 0, "mid": 0, "orphan": 0}


def write(ranks, rank, root, *, save=True):
    """On each rank two whole trajectories and an open one, of rank + 1 steps more each."""
    rb = buffer(2, 64)
    play(rb, rank, 0, [5 + rank])
    play(rb, rank, 1, [3 + rank, 4 + rank], open_end=True)
    ck = checkpointer(root, rb, ranks)
    return ck, ck.save(1) if save else None


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "engram"]


def test_every_rank_logs_every_shard_and_target(tmp_path, caplog):
    done(job(3, write, tmp_path))
    caplog.clear()
    with caplog.at_level("INFO", logger="engram"):
        reports = done(job(2, lambda ranks, _: checkpointer(tmp_path, buffer(2, 64), ranks).restore()))
    dealt = reports[0].dealt
    assert dealt["saved"] == {"episodes": 9, "steps": 12 + 15 + 18}
    assert dealt["dropped"]["open"] == {"episodes": 3, "steps": 4 + 5 + 6}
    for rank, shard in enumerate(dealt["shards"]):
        assert shard["rank"] == rank
        assert shard["saved"] == {"episodes": 3, "steps": 12 + 3 * rank}
        assert {kind: count["episodes"] for kind, count in shard["kinds"].items()} == KINDS
        assert shard["kept"] == {"episodes": 2, "steps": 8 + 2 * rank}
        assert shard["dropped"]["open"] == {"episodes": 1, "steps": 4 + rank}
        assert sum(count["episodes"] for count in shard["dropped"].values()) == 1
    assert dealt["lost"] == {"ranks": [], "as_of": None, "episodes": None, "steps": None}
    steps = [target["steps"] for target in dealt["targets"]]
    assert (dealt["smallest_rank"], dealt["largest_rank"]) == (min(steps), max(steps))
    assert sum(steps) == 30
    assert dealt["unused"] == 4 * 64 - 30
    said = messages(caplog)
    for rank in range(3):
        line = (
            f"shard of rank {rank}: saved 3 episodes with {12 + 3 * rank} steps, kept 2 episodes with {8 + 2 * rank} steps, "
            f"dropped as open 1 episode with {4 + rank} steps"
        )
        assert sum(line in text for text in said) == 2  # by both ranks
    for target in dealt["targets"]:
        line = (
            f"rank {target['rank']}: {target['episodes']} episodes with {target['steps']} steps in 2 lanes of 64 rows"
        )
        assert sum(line in text for text in said) == 2
    assert sum(f"plan {dealt['plan']}" in text for text in said) == 2
    (file,) = (tmp_path / "reports").iterdir()
    assert {key: value for key, value in json.loads(file.read_text()).items() if key in dealt} == dealt


def test_rows_that_a_restore_gives_up_are_not_counted_as_restored(tmp_path, caplog):
    """Full lanes whose trajectories go on: where the next row would come, one that holds nothing marks their end."""

    def save(ranks, rank):
        rb = buffer(3, 16)
        play(rb, rank, 0, [40], open_end=True)
        play(rb, rank, 1, [9] * (rank + 1), open_end=True)
        play(rb, rank, 2, [4] * 8)
        return checkpointer(tmp_path, rb, ranks).save(1).steps

    def load(ranks, rank, resume):
        rb = buffer(3, 16)
        report = checkpointer(tmp_path, rb, ranks).restore(resume=resume)
        return report.steps, len(rb), len(steps_of(rb)), report.given_up, "more were saved" in str(report)

    assert done(job(2, save)) == [41 + 48] * 2
    caplog.clear()
    with caplog.at_level("INFO", logger="engram"):
        assert done(job(2, load, "env_reset")) == [(40, 40, 40, 1, True), (46, 46, 46, 2, True)]
    said = messages(caplog)
    assert (
        sum(": 46 rows in " in text and "; 2 more were saved: the oldest of full lanes" in text for text in said) == 1
    )
    assert done(job(2, load, "exact")) == [(41, 41, 41, 0, False), (48, 48, 48, 0, False)]


def test_a_truncated_trajectory_is_counted_with_its_shard(tmp_path):
    done(job(2, write, tmp_path))
    how = {"incomplete": {"open": "truncate"}}
    dealt = done(job(3, lambda ranks, _: checkpointer(tmp_path, buffer(2, 64), ranks).restore(**how)))[0].dealt
    assert [shard["truncated"] for shard in dealt["shards"]] == [
        {"episodes": 1, "steps": 4},
        {"episodes": 1, "steps": 5},
    ]
    assert dealt["truncated"] == {"episodes": 2, "steps": 9}
    assert dealt["kept"] == dealt["saved"]


def test_what_a_restore_leaves_out_is_warned_of_once(tmp_path):
    """By rank 0, with the counts of all ranks."""
    done(job(2, write, tmp_path))
    with pytest.warns(UserWarning, match="left out") as said:
        done(job(3, lambda ranks, _: checkpointer(tmp_path, buffer(2, 64), ranks).restore()))
    (left,) = (str(one.message) for one in said if "left out" in str(one.message))
    assert "9 steps of 27 were left out: 9 of open episodes." in left
    assert 'restore(incomplete={"open": "keep", "headless": "keep"})' in left


@pytest.mark.parametrize("overflow", ["cut", "fill"])
def test_rows_that_stay_unused_beside_steps_that_are_left_out_are_counted(tmp_path, overflow):
    """Three ranks to two: the newest trajectories fit, the next older one is longer than what is left, and shorter ones are behind it."""

    def save(ranks, rank):
        rb = buffer(1, 64)
        play(rb, rank, 0, [6, 20, 9])
        checkpointer(tmp_path, rb, ranks).save(1)

    done(job(3, save))
    with pytest.warns(UserWarning, match="left out") as said:
        reports = done(job(2, lambda ranks, _: checkpointer(tmp_path, buffer(1, 24), ranks).restore(overflow=overflow)))
    (left,) = (str(one.message) for one in said if "left out" in str(one.message))
    dealt = reports[0].dealt
    kept, unused = dealt["kept"]["steps"], dealt["unused"]
    assert kept + unused == 48
    over = dealt["dropped"]["overflow"]["steps"]
    assert f"{over} steps did not fit as whole trajectories, and {unused} rows stay unused. Larger storages" in left
    assert (kept, over) == {"cut": (27, 78), "fill": (45, 60)}[overflow]


def test_a_save_says_what_other_ranks_would_drop(tmp_path, caplog):
    with caplog.at_level("INFO", logger="engram"):
        reports = [report for _, report in done(job(2, write, tmp_path))]
    assert [report.would_drop for report in reports] == [{"open": {"episodes": 2, "steps": 9}}] * 2
    text = "redistributed to other ranks it would drop 2 open episodes with 9 steps"
    assert sum(text in said for said in messages(caplog)) == 2
    dealt = done(job(1, lambda ranks, _: checkpointer(tmp_path, buffer(2, 64), ranks).restore()))[0].dealt
    assert {why: count for why, count in dealt["dropped"].items() if count["episodes"]} == reports[0].would_drop


@pytest.mark.filterwarnings("ignore:Checkpointer. no field says where")
def test_rows_without_trajectories_would_not_be_dropped(tmp_path):
    def act(ranks, _):
        import torch

        rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
        rb.extend(torch.arange(20))
        report = checkpointer(tmp_path, rb, ranks).save(1)
        assert report.would_drop == {}
        assert "would drop" not in str(report)

    done(job(2, act))


def crash(ranks, rank, root, before):
    """Rank 1 dies: nobody has its shard."""
    ck, _ = write(ranks, rank, root, save=before)
    epoch = ck._job.protocol.claim(5.0)
    folder = (
        [attempts.begin(root, step=9, epoch=epoch, world=3, trigger="crash", attempt="crash1")] if rank == 0 else []
    )
    folder = root / ranks.gather(folder[0].name.encode() if folder else b"", 5.0)[0].decode()
    if rank != 1:
        ck._job.write_crash(folder)


def load_partial(ranks, _, root):
    return checkpointer(root, buffer(2, 64), ranks).restore(allow_partial=True)


def test_lost_with_a_missing_shard_is_what_an_older_checkpoint_had_of_it(tmp_path):
    done(job(3, crash, tmp_path, True))
    report = done(job(2, load_partial, tmp_path))[0]
    assert (report.step, report.missing) == (9, (1,))
    older = next(str(name) for name in attempts.names(tmp_path) if name.step == 1)
    assert report.dealt["lost"] == {"ranks": [1], "as_of": older, "episodes": 3, "steps": 15}
    assert [shard["rank"] for shard in report.dealt["shards"]] == [0, 2]
    assert f"lost with the shard of rank 1: at {older} that was 3 episodes with 15 steps" in str(report)


def test_lost_with_a_missing_shard_that_was_never_saved(tmp_path):
    done(job(3, crash, tmp_path, False))
    report = done(job(2, load_partial, tmp_path))[0]
    assert report.dealt["lost"] == {"ranks": [1], "as_of": None, "episodes": None, "steps": None}
    assert "lost with the shard of rank 1: unknown how much" in str(report)


def test_what_was_noted_of_a_load_goes_with_the_checkpoint(tmp_path):
    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks, keep=2)
        play(ck._job.buffer, rank, 0, [3])
        for step in range(1, 4):
            ck.save(step)
            checkpointer(tmp_path, buffer(length=64), ranks).restore(step)
        ranks.gather(b"", 60.0)
        noted = sorted(path.name[: len("load-ckpt-000000000000")] for path in (tmp_path / "reports").iterdir())
        ranks.gather(b"", 60.0)
        if rank == 0:
            ck.prune(1)
        ranks.gather(b"", 60.0)
        return noted, len(list((tmp_path / "reports").iterdir()))

    assert done(job(2, act))[0] == ([f"load-ckpt-00000000000{step}" for step in (2, 3)], 1)


@pytest.mark.parametrize("begins", [True, False])
def test_the_first_trajectory_after_a_reset_is_known_by_its_first_step(tmp_path, begins):
    """It follows a row that holds nothing: without a field that says where trajectories begin it may lack its first steps."""

    def act(ranks, rank):
        rb = buffer(1, 64)
        ck = checkpointer(tmp_path, rb, ranks)
        for first, ends in ((0, False), (1, True)):
            data = episode(rank, 0, first, 6, ends=ends)
            if begins:
                data["is_init"] = torch.arange(6) == 0
            rb.extend(data)
            report = ck.save(1 + first)
            if not first:
                ck.restore()
        return report

    kinds = done(job(2, act))[0].episodes
    assert kinds == {
        "mid": {"episodes": 2, "steps": 12},
        "complete" if begins else "orphan": {"episodes": 2, "steps": 12},
    }
