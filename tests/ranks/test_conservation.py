"""What was saved is what is kept and what was dropped, in episodes and in steps; and what is kept is where the rules put it."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engram.checkpoint.plan import DROPPED
from tests.ranks.jobs import buffer, checkpointer, columns_of, done, job, layout, play, steps_of, whos

lengths = st.lists(st.integers(1, 9), min_size=0, max_size=6)
shard = st.fixed_dictionaries(
    {
        "length": st.integers(1, 24),
        "lanes": st.lists(st.tuples(lengths, st.booleans()), min_size=1, max_size=3),
    }
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


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
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

    # Whole runs, in order and together; each lane from the oldest to the newest.
    runs = [run for _, _, _, lanes in saved for lane in lanes for run in runs_of(lane)]
    for rb, target_lanes in zip(buffers, (layout(rb) for rb in buffers), strict=True):
        columns, length = columns_of(rb) if rb.storage.initialized else {}, rb.storage.max_size // rb.storage.lanes
        numbers = rb.state_dict()["_storage"]["numbers"].numpy()
        for lane, there in enumerate(target_lanes):
            assert all(run in runs for run in runs_of(there))
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


def test_the_plan_does_not_depend_on_hash_seeds_or_the_order_of_a_folder(tmp_path):
    import os
    import subprocess
    import sys

    def act(ranks, rank):
        rb = buffer(3, 60)
        for lane in range(3):
            play(rb, rank, lane, [3, 5, 2, 7, 1, 4])
        checkpointer(tmp_path, rb, ranks).save(0)

    done(job(3, act))
    code = (
        "import os, random, sys; real = os.listdir\n"
        "def shuffled(*a):\n    names = list(real(*a)); random.shuffle(names); return names\n"
        "os.listdir = shuffled\n"
        "from tests.ranks.jobs import *\n"
        "def act(ranks, rank):\n"
        "    rb = buffer(2, 60); return checkpointer(sys.argv[1], rb, ranks).restore().dealt['plan']\n"
        "print(*done(job(4, act)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    here = done(job(4, lambda ranks, _: checkpointer(tmp_path, buffer(2, 60), ranks).restore().dealt["plan"]))
    assert said.split() == here
    assert len(set(here)) == 1


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Rows, tickets and priorities are read in windows, which all lie in one piece of memory."""
    from engram.checkpoint import placing

    def act(ranks, rank):
        rb = buffer(1, 40_000)
        rb.extend(wide(rank, 40_000), lane=0)
        checkpointer(tmp_path, rb, ranks).save(0)

    done(job(2, act))
    held = []
    real = placing._windows

    def counted(*args):
        for piece in real(*args):
            held.append(piece[1].nbytes)
            yield piece

    placing._windows = counted
    try:
        report = done(job(1, lambda ranks, _: checkpointer(tmp_path, buffer(1, 80_000), ranks).restore()))[0]
    finally:
        placing._windows = real
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
