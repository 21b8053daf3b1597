"""What makes a job's checkpoints right, left out piece by piece: the oracles must notice.

Others are beside what they test: fsync of folders and files (tests/saved/test_crashes.py); sums, digests and sizes of a folder
(tests/saved/test_damage.py); the rewriting of ``env_id``, priorities, counts and who is saved (tests/ranks/test_mutants.py).
"""

import os
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch

from engram import LazyTensorStorage, RankFailed, Ranks, SliceSampler, TensorDictReplayBuffer
from engram.reshard import plan, scatter
from engram.reshard.plan import plan_by_trajectory
from engram.saved import attempts, checkpoints, parts
from engram.saved.checkpoints import Checkpoint
from engram.saved.series import Series
from tests.ranks.jobs import buffer, done, episode, job, layout, play, steps_of, whos
from tests.ranks.jobs import checkpointer as checkpointer_of
from tests.saved.checkpoint_folders import tree
from tests.saved.system_calls import settled


def save(ranks, rank, root, step=1, **more):
    rb = buffer(2, 64)
    play(rb, rank, 0, [5, 7, 3 + rank])
    play(rb, rank, 1, [9, 4])
    return checkpointer_of(root, rb, ranks, **more).save(step), steps_of(rb)


# ---- trajectories of the target are those that were moved there ----------------------------------------------------------------

FLAGS = ("done", "terminated", "truncated")
ONLY_ENDS, ONLY_NUMBERS = {"episode": "data"}, {("next", flag): "data" for flag in FLAGS}


def trajectories_stay_apart(root, roles):
    """Where one field alone says how steps belong together: slices, and what the next checkpoint says of the target."""

    def made(lanes, length):
        by = {"traj_key": "episode", "end_keys": []} if roles is ONLY_NUMBERS else {"end_key": ("next", "done")}
        sampler = SliceSampler(slice_len=3, strict_length=True, **by)
        storage = LazyTensorStorage(lanes * length, lanes=lanes)
        return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=12)

    def first(ranks, rank):
        rb = made(2, 64)
        for lane in range(2):
            data = [episode(rank, lane, 0, 9), episode(rank, lane, 0, 5, ends=False)]
            data[1]["who"] += 1000
            if roles is ONLY_NUMBERS:  # each lane numbers its own
                data[1]["episode"] += 1
            for one in data:
                rb.extend(one, lane=lane)
        checkpointer_of(root, rb, ranks, roles=roles).save(1)

    def again(ranks, rank):
        rb = made(1, 200)
        rb.extend(episode(50, 0, 0, 200), lane=0)
        rb.sample()  # it knows where trajectories are, before
        ck = checkpointer_of(root, rb, ranks, roles=roles)
        ck.restore(incomplete={"open": "keep"})
        drawn = torch.cat([rb.sample()["who"].reshape(-1, 3) for _ in range(60)])
        path = ck.save(2).path
        with Checkpoint(path) as checkpoint, parts.open_storage(checkpoint, rank) as reader:
            table = [(it.first, it.end) for it in reader.trajectories()]
        return layout(rb)[0], drawn, table

    done(job(2, first))
    for there, drawn, table in done(job(1, again)):
        assert len({who // 1000 for who in there if who is not None}) == 8
        assert (drawn == drawn[:, :1] + torch.arange(3)).all(), "a slice of two trajectories"
        begins = [at for at, who in enumerate(there) if who is not None and (at == 0 or there[at - 1] != who - 1)]
        ends = [at + 1 for at, who in enumerate(there) if who is not None and [*there, None][at + 1] != who + 1]
        assert table == list(zip(begins, ends, strict=True))


def without_gaps(*args):
    made = plan_by_trajectory(*args)
    return made._replace(position=plan._positions(made.rank, made.lane, made.steps), gap=np.zeros_like(made.gap))


@pytest.mark.parametrize("roles", [ONLY_ENDS, ONLY_NUMBERS], ids=["ends", "numbers"])
def test_trajectories_of_the_target_stay_apart(tmp_path, roles):
    trajectories_stay_apart(tmp_path, roles)


def test_a_mutant_that_leaves_nothing_between_open_ones_is_found(tmp_path):
    with mock.patch.object(plan, "plan_by_trajectory", without_gaps), pytest.raises(AssertionError, match="of two"):
        trajectories_stay_apart(tmp_path, ONLY_ENDS)


def test_a_mutant_that_keeps_the_numbers_of_trajectories_is_found(tmp_path):
    with mock.patch.object(scatter.Scatter, "_rewrite"), pytest.raises(AssertionError, match="of two"):
        trajectories_stay_apart(tmp_path, ONLY_NUMBERS)


# ---- what fails on one rank fails on all, at once and in the same words -----------------------------------------------------------


def all_hear_what_failed_on_one(root, timeout):
    """A disk of rank 1 fails amid a restore."""
    done(job(3, save, root))

    def act(ranks, rank):
        rb = buffer(2, 128)
        play(rb, 77, 0, [6])
        before = whos(steps_of(rb))
        ck = checkpointer_of(root, rb, ranks, timeout=timeout)
        if rank == 1:
            rb._saving.prepare_placed = lambda *_, **__: (_ for _ in ()).throw(OSError("bad sector"))
        started = time.monotonic()
        with pytest.raises((RankFailed, OSError)) as caught:
            ck.restore(incomplete={})
        return str(caught.value), time.monotonic() - started, whos(steps_of(rb)) == before

    results = job(3, act)
    for result in results:  # also: one that did not raise
        assert not isinstance(result, BaseException), f"raised another one: {result}"
    assert {said for said, _, _ in results} == {"restore: rank 1: OSError: bad sector"}
    assert all(kept and took < 60 for _, took, kept in results)


def test_all_hear_what_failed_on_one(tmp_path):
    all_hear_what_failed_on_one(tmp_path, 80.0)


def says_nothing(self, what, act, timeout):
    """Whoever fails is gone, without a word."""
    own, told = act()
    try:
        return own, [one[1:] for one in self.gather(b"+" + told, timeout)]
    except RankFailed as error:
        raise RankFailed(f"{what}: {error}") from None


def goes_on(self, _, act, timeout):
    """What failed is told, and nobody listens."""
    failure, own, mine = None, None, b"-"
    try:
        own, told = act()
        mine = b"+" + told
    except Exception as error:  # noqa: BLE001 - the mutant
        failure = error
    given = self.gather(mine, timeout)
    if failure:
        raise failure
    return own, [one[1:] for one in given]


@pytest.mark.parametrize("mutant", [says_nothing, goes_on])
def test_a_mutant_that_keeps_an_error_to_itself_is_found(tmp_path, mutant):
    with mock.patch.object(Ranks, "run_on_all", mutant), pytest.raises(AssertionError):
        all_hear_what_failed_on_one(tmp_path, 2.0)


# ---- one plan, votes that hold, one incarnation --------------------------------------------------------------------------------


def nobody_loads_by_another_plan(root):
    """Rank 1 deals out otherwise: it has another version, or sees other files."""
    done(job(3, save, root))
    others, real = set(), plan.plan_by_trajectory

    def planned(*args):
        made = real(*args)
        return made._replace(rank=(made.rank + 1) % 2) if threading.get_ident() in others else made

    def act(ranks, rank):
        rb = buffer(2, 128)
        play(rb, 77, 0, [6])
        before = steps_of(rb)
        if rank == 1:
            others.add(threading.get_ident())
        with pytest.raises(RankFailed, match=r"expected the plan of rank 0 on all ranks, got others on ranks \[1\]"):
            checkpointer_of(root, rb, ranks).restore()
        assert steps_of(rb) == before

    with mock.patch.object(plan, "plan_by_trajectory", planned):
        results = job(2, act)
    assert results == [None, None]


def test_nobody_loads_by_another_plan(tmp_path):
    nobody_loads_by_another_plan(tmp_path)


def test_a_mutant_that_compares_no_plans_is_found(tmp_path):
    with mock.patch.object(plan.ReshardPlan, "digest", "the same"), pytest.raises(AssertionError):
        nobody_loads_by_another_plan(tmp_path)


def a_shard_that_lost_a_byte_is_not_committed(root):
    first = done(job(2, save, root))[0][0].path
    real = checkpoints.sync_parts

    def sync_parts(folder, shard):  # the last step before the vote
        real(folder, shard)
        if folder.name == "rank-00001-of-00002":
            path = min((folder / "storage/seg").iterdir())
            path.chmod(0o600)
            os.truncate(path, path.stat().st_size - 1)

    with mock.patch.object(attempts, "sync_parts", sync_parts):
        results = job(2, save, root, 2)
    assert [type(result) for result in results] == [RankFailed, RankFailed]
    assert all("rank-00001-of-00002" in str(result) for result in results)
    assert Series(root).latest()[0] == first


def test_a_shard_that_lost_a_byte_is_not_committed(tmp_path):
    a_shard_that_lost_a_byte_is_not_committed(tmp_path)


def test_a_mutant_that_compares_no_sizes_is_found(tmp_path):
    with mock.patch.object(attempts, "_unfit", return_value=[]), pytest.raises(AssertionError):
        a_shard_that_lost_a_byte_is_not_committed(tmp_path)


def a_job_that_was_replaced_leaves_all_as_it_is(root):
    def act(ranks, rank):
        ck = checkpointer_of(root, buffer(2, 64), ranks, keep=1)
        play(ck._job.buffer, rank, 0, [3])
        ck.save(1)
        ranks.gather(b"", 60.0)
        if rank == 0:
            later = checkpointer_of(root, buffer(2, 64), Ranks.local())
            play(later._job.buffer, 0, 0, [4])
            later.save(5)
        ranks.gather(b"", 60.0)
        settled(root)
        before = tree(root)
        ranks.gather(b"", 60.0)
        try:
            ck.save(9)
            said = "saved"
        except (RuntimeError, RankFailed) as error:
            said = str(error)
        ranks.gather(b"", 60.0)
        settled(root)
        return "later incarnation" in said, tree(root) == before

    assert done(job(2, act)) == [(True, True)] * 2


def test_a_job_that_was_replaced_leaves_all_as_it_is(tmp_path):
    a_job_that_was_replaced_leaves_all_as_it_is(tmp_path)


def test_a_mutant_that_knows_of_no_later_job_is_found(tmp_path):
    with mock.patch.object(attempts, "check_epoch", return_value=None), pytest.raises(AssertionError):
        a_job_that_was_replaced_leaves_all_as_it_is(tmp_path)


def who_comes_too_late_fails_too():
    late = threading.Event()

    def act(ranks, rank):
        claim = ranks.claim

        def claimed(key, value):
            try:
                return claim(key, value)
            finally:
                late.set()

        ranks.claim = claimed
        if rank == 1:
            assert late.wait(60)
        with pytest.raises(RankFailed, match="from rank 1"):
            ranks.gather(b"", 0.1)

    assert job(2, act) == [None, None]


def test_who_comes_too_late_fails_too():
    who_comes_too_late_fails_too()


def test_a_mutant_whose_exchange_ends_differently_for_each_is_found():
    every = Ranks.threads(1)[0].__class__
    with mock.patch.object(every, "claim", lambda self, key, value: value), pytest.raises(AssertionError):
        who_comes_too_late_fails_too()
