"""What was saved is what is kept and what was dropped, in episodes and in steps; and what is kept is where the rules put it."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engram import IncompatibleCheckpoint
from engram.reshard.plan import DROPPED
from tests import stress
from tests.ranks.jobs import buffer, checkpointer, columns_of, done, filled, job, layout, play, steps_of, whos

lengths = st.lists(st.integers(1, 9), min_size=0, max_size=6)
shard = st.fixed_dictionaries(
    {"length": st.integers(1, 24), "lanes": st.lists(st.tuples(lengths, st.booleans()), min_size=1, max_size=3)}
)
target = st.tuples(st.integers(1, 3), st.integers(1, 60))


def save(ranks, rank, root, shards):
    it = shards[rank]
    rb = buffer(len(it["lanes"]), it["length"])
    play(rb, 99, 0, [1])  # so that there is a schema, and a lane that is not new
    rb.empty()
    for lane, (several, is_open) in enumerate(it["lanes"]):
        several = [min(steps, it["length"]) for steps in several]
        play(rb, rank, lane, several, open_end=is_open)
    checkpointer(root, rb, ranks).save(1)
    return rb.state_dict()["_sampler"]["highest"], rb.write_count, steps_of(rb), layout(rb)


def restore(ranks, rank, root, targets, **more):
    rb = buffer(*targets[rank])
    report = checkpointer(root, rb, ranks).restore(max_drop_fraction=1.0, **more)
    return report, rb


@pytest.mark.stress
@settings(max_examples=stress.size(25, 3000), suppress_health_check=list(HealthCheck))
@given(
    shards=st.lists(shard, min_size=1, max_size=3),
    targets=st.lists(target, min_size=1, max_size=4),
    open_policy=st.sampled_from(["drop", "truncate", "keep"]),
    headless=st.sampled_from(["drop", "keep"]),
    overflow=st.sampled_from(["cut", "fill"]),
)
def test_nothing_is_lost_or_made_up(shards, targets, open_policy, headless, overflow):
    root = Path(tempfile.mkdtemp())
    try:
        check(root, shards, targets, {"open": open_policy, "headless": headless}, overflow)
    finally:
        shutil.rmtree(root)


def check(root, shards, targets, incomplete, overflow):
    saved = done(job(len(shards), save, root, shards))
    every = set().union(*(steps for _, _, steps, _ in saved))
    how = {"incomplete": incomplete, "overflow": overflow}
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what does not fit
        loaded = done(job(len(targets), lambda *args: restore(*args, **how), root, targets))
    reports, buffers = zip(*loaded, strict=True)
    parts = [steps_of(rb) for rb in buffers]
    kept = set().union(*parts)
    dealt = reports[0].dealt
    assert all(report.dealt == dealt for report in reports)

    # Every step is the same bits, with the same priority, in one place or in none.
    assert sum(map(len, parts)) == len(kept)
    assert kept <= every
    assert dealt["saved"]["steps"] == len(every)
    assert dealt["kept"]["steps"] == len(kept)
    for unit in ("episodes", "steps"):
        assert dealt["saved"][unit] == dealt["kept"][unit] + sum(dealt["dropped"][why][unit] for why in DROPPED)
    assert dealt["kept"]["episodes"] == len({who // 1000 for who in whos(kept)})
    for rank, (shard, (_, _, steps, _)) in enumerate(zip(dealt["shards"], saved, strict=True)):
        there = whos(steps)
        assert (shard["rank"], shard["saved"]["steps"]) == (rank, len(there))
        assert shard["kept"]["steps"] == len(there & whos(kept))
        assert shard["kept"]["episodes"] == len({who // 1000 for who in there & whos(kept)})
        for unit in ("episodes", "steps"):
            assert shard["saved"][unit] == shard["kept"][unit] + sum(shard["dropped"][why][unit] for why in DROPPED)
            assert shard["saved"][unit] == sum(count[unit] for count in shard["kinds"].values())
    assert (dealt["smallest_rank"], dealt["largest_rank"]) == (min(map(len, parts)), max(map(len, parts)))
    loads = [sum(who is not None for who in lane) for rb in buffers for lane in layout(rb)]
    assert (dealt["smallest_lane"], dealt["largest_lane"]) == (min(loads), max(loads))
    assert dealt["unused"] == sum(lanes * length for lanes, length in targets) - len(kept)

    # What is not there was dropped for a reason that it has, and counted under it.
    wanted, counts = what_is_kept(shards, [lanes for _, _, _, lanes in saved], targets, incomplete)
    assert {why: dealt["dropped"][why] for why in counts} == counts
    missing = wanted - whos(kept)
    assert whos(kept) <= wanted
    assert len(missing) == dealt["dropped"]["overflow"]["steps"]
    wholly = {who // 1000 for who in missing} - {who // 1000 for who in whos(kept)}
    assert len(wholly) == dealt["dropped"]["overflow"]["episodes"]

    # Whole runs, in order and together; each lane from the oldest to the newest.
    runs = [run for _, _, _, lanes in saved for lane in lanes for run in runs_of(lane)]
    for rb, target_lanes in zip(buffers, (layout(rb) for rb in buffers), strict=True):
        columns, length = columns_of(rb) if rb.storage.initialized else {}, rb.storage.max_size // rb.storage.lanes
        numbers = rb.state_dict()["_storage"]["numbers"].numpy()
        for lane, there in enumerate(target_lanes):
            for run in runs_of(there):
                whole = next(one for one in runs if one[-1] == run[-1])
                longest = max(size for _, size in targets)
                assert run == whole or (incomplete["headless"] == "keep" and longest - 1 <= len(run) <= longest)
            rows = [lane * length + at for at, who in enumerate(there) if who is not None]
            ages = numbers[list(rows)] if rows else np.empty(0)
            ends = [
                at
                for at in range(len(rows) - 1)
                if there[rows[at] % length] // 1000 != there[rows[at + 1] % length] // 1000
            ]
            assert (np.diff(ages[[*ends, -1]]) >= 0).all() if rows else True
            if rows:
                assert (columns["env_id"][rows] == lane).all()
        if columns:
            ids = [
                {
                    int(i)
                    for i in columns["episode"][[lane * length + at for at, who in enumerate(there) if who == first]]
                }
                for lane, there in enumerate(target_lanes)
                for first in {run[0] for run in runs_of(there)}
            ]
            assert len(set().union(*ids)) == len(ids)  # no two have one id

    # The largest priority is everybody's, and writes are counted once.
    for rb in buffers:
        assert rb.state_dict()["_sampler"]["highest"] == max(highest for highest, _, _, _ in saved)
    assert sum(rb.write_count for rb in buffers) == sum(count for _, count, _, _ in saved)


def what_is_kept(shards, layouts, targets, incomplete):
    """By the policies, whatever the room: who, and the episodes and steps of each reason."""
    longest, wanted = max(length for _, length in targets), set()
    counts = {why: {"episodes": 0, "steps": 0} for why in DROPPED if why != "overflow"}
    for it, lanes in zip(shards, layouts, strict=True):
        for (several, is_open), lane in zip(it["lanes"], lanes, strict=True):
            written = sum(min(steps, it["length"]) for steps in several)
            runs = runs_of(lane)
            for i, run in enumerate(runs):
                headless, opens = i == 0 and written > len(lane), is_open and i == len(runs) - 1
                why = "both" if headless and opens else "headless" if headless else "open" if opens else None
                asked = {"both": ("open", "headless"), None: ()}.get(why, (why,))
                if any(incomplete[end] == "drop" for end in asked):
                    pass
                elif len(run) + (gap := opens and incomplete["open"] == "keep") > longest and not (
                    incomplete["headless"] == "keep" and longest > gap
                ):
                    why = "oversize"
                else:
                    wanted |= set(run)
                    continue
                counts[why]["episodes"] += 1
                counts[why]["steps"] += len(run)
    return wanted, counts


def runs_of(lane):
    """Steps of one trajectory that follow each other, as tuples."""
    found = []
    for who in lane:
        if who is None:
            continue
        if found and found[-1][-1] + 1 == who and found[-1][-1] // 1000 == who // 1000:
            found[-1] = (*found[-1], who)
        else:
            found.append((who,))
    return found


def test_there_and_back_and_three_times_in_a_row(tmp_path):
    """Nothing is lost after the first time, and ages keep their order."""

    def first(ranks, rank):
        rb = buffer(3, 60)
        for lane in range(3):
            play(rb, rank, lane, [3, 5, 2, 7, 1, 4])
        checkpointer(tmp_path, rb, ranks).save(0)
        return steps_of(rb)

    def again(ranks, rank, step):
        rb = buffer(2, 120)
        ck = checkpointer(tmp_path, rb, ranks)
        ck.restore()
        ck.save(step)
        return steps_of(rb), [list(filter(None, lane)) for lane in layout(rb)]

    every = set().union(*done(job(2, first)))
    for step, n in enumerate((3, 1, 2), start=1):
        parts = done(job(n, again, step))
        assert set().union(*(part for part, _ in parts)) == every
        assert sum(len(part) for part, _ in parts) == len(every)
        for _, lanes in parts:
            for lane in lanes:
                numbers = {}
                for who in lane:
                    numbers.setdefault(who // 1_000_000, []).append(who % 1_000_000)
                assert all(
                    seen == sorted(seen) for seen in numbers.values()
                )  # of one old lane: in the order of writing


def test_dealt_out_though_every_rank_could_have_its_own(tmp_path):
    """Asked for policies, ranks of the same shape deal out as well: whole trajectories are all there, open ones are dropped."""

    def first(ranks, rank):
        rb = buffer(2, 40)
        play(rb, rank, 0, [3, 5, 2, 7])
        play(rb, rank, 1, [9, 4], open_end=True)
        checkpointer(tmp_path, rb, ranks).save(1)
        return steps_of(rb)

    def again(ranks, _, **more):
        rb = buffer(2, 40)
        report = checkpointer(tmp_path, rb, ranks).restore(**more)
        return report, steps_of(rb)

    saved = done(job(3, first))
    every = set().union(*saved)
    whole = {step for step in every if step[0] // 1000 % 100_000 != 1001}
    assert len(whole) == len(every) - 3 * 4
    assert [steps for _, steps in done(job(3, again))] == saved
    dealt = done(job(3, lambda *args: again(*args, incomplete={})))
    assert all(report.dealt["dropped"]["open"] == {"episodes": 3, "steps": 12} for report, _ in dealt)
    assert set().union(*(steps for _, steps in dealt)) == whole
    assert sum(len(steps) for _, steps in dealt) == len(whole)


def test_endless_ones_are_kept_as_often_as_they_are_dealt_out(tmp_path):
    """Where one was cut off by a restore, a part lacks its end and the next one its beginning: the same options keep both."""
    keep = {"open": "keep", "headless": "keep"}

    def first(ranks, rank):
        rb = buffer(2, 20)
        for lane in range(2):
            play(rb, rank, lane, [30], open_end=True)
        checkpointer(tmp_path, rb, ranks).save(0)
        return steps_of(rb), together(rb)

    def again(ranks, rank, step):
        rb = buffer(2, 100)
        ck = checkpointer(tmp_path, rb, ranks)
        ck.restore(incomplete=keep)
        restored = steps_of(rb), together(rb)
        for lane in range(2):
            play(rb, 10 * step + rank, lane, [7], open_end=True)
        ck.save(step)
        return restored, (steps_of(rb), together(rb))

    def together(rb):
        return {run for lane in layout(rb) for run in runs_of(lane)}

    def short(ranks, _):
        rb = buffer(2, 100)
        with pytest.raises(IncompatibleCheckpoint, match='"open": "keep".*; incomplete={"headless": "keep"}'):
            checkpointer(tmp_path, rb, ranks).restore(incomplete={})

    every = done(job(2, first))
    for step, n in enumerate((3, 1, 2), start=1):
        parts = done(job(n, again, step))
        for what in (0, 1):  # steps, and which of them follow each other
            restored = set().union(*(restored[what] for restored, _ in parts))
            assert restored == set().union(*(before[what] for before in every))
        every = [there for _, there in parts]
    done(job(3, short))


def test_lanes_of_one_row(tmp_path):
    """As small as can be: 1 → 3 → 2 ranks with a row each."""

    def first(ranks, rank, step):
        rb = buffer(2, 1)
        play(rb, rank, 0, [1, 1])  # the second one took the place of the first
        play(rb, rank, 1, [1], open_end=True)
        checkpointer(tmp_path, rb, ranks).save(step)
        return steps_of(rb)

    def again(ranks, _, step, incomplete):
        rb = buffer(1, 1)
        ck = checkpointer(tmp_path, rb, ranks)
        ck.restore(incomplete=incomplete, max_drop_fraction=1.0)
        ck.save(step)
        return steps_of(rb)

    every = done(job(1, first, 0))[0]
    keep = {"open": "truncate", "headless": "keep"}
    parts = done(job(3, again, 1, keep))
    assert sorted(map(len, parts)) == [0, 1, 1]
    assert set().union(*parts) == every
    parts = done(job(2, again, 2, keep))
    assert list(map(len, parts)) == [1, 1]
    assert set().union(*parts) == every
    # Open ones need a row behind them, which there is none of; and then there is nothing to deal out.
    done(job(1, first, 3))
    assert done(job(2, again, 4, {"open": "keep"})) == [set(), set()]
    assert done(job(3, again, 5, keep)) == [set()] * 3


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Rows, tickets and priorities are read in windows, one at a time in each thread."""
    from engram.reshard import scatter

    def act(ranks, rank):
        rb = buffer(1, 40_000)
        rb.extend(wide(rank, 40_000), lane=0)
        checkpointer(tmp_path, rb, ranks).save(0)

    done(job(2, act))
    held = []
    real = scatter.windows

    def counted(*args):
        for piece in real(*args):
            held.append(piece[1].nbytes)
            yield piece

    scatter.windows = counted
    try:
        report = done(job(1, lambda ranks, _: checkpointer(tmp_path, buffer(1, 80_000), ranks).restore()))[0]
    finally:
        scatter.windows = real
    assert report.dealt["kept"]["steps"] == 80_000
    assert sum(held) >= 80_000 * 400
    assert max(held) <= 2 << 20


def wide(rank, steps):
    from tests.ranks.jobs import episode

    data = episode(rank, 0, 0, steps)
    data["obs"] = torch.zeros(steps, 100)
    data["next", "done"][9::10] = True
    data["episode"] = torch.arange(steps) // 10
    return data


def test_few_files_are_open_however_many_shards_there_are(tmp_path, monkeypatch):
    """A process may have 1,024 of them by default, and jobs have hundreds of ranks."""
    shards = 16
    done(job(shards, lambda ranks, rank: checkpointer(tmp_path, filled(rank), ranks).save(1)))
    before, most, real = len(os.listdir("/proc/self/fd")), [0], os.open

    def counted(*args, **more):
        fd = real(*args, **more)
        most[0] = max(most[0], len(os.listdir("/proc/self/fd")))
        return fd

    monkeypatch.setattr(os, "open", counted)
    report = done(job(1, lambda ranks, _: checkpointer(tmp_path, buffer(2, 500), ranks).restore()))[0]
    assert report.dealt["kept"] == {"episodes": 5 * shards, "steps": 28 * shards}
    assert most[0] - before <= 3 * shards + 16
