"""The plan of a redistribution against the rule it follows, written down naively."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("engram.saved.description")
from engram.reshard.plan import DROPPED, Incomplete, Source, Target, plan_by_trajectory

FIRST, LAST, OPEN = 1, 2, 8


def kept_by(plan):
    return {"episodes": len(plan.rank), "steps": int(plan.steps.sum())}


@st.composite
def sources(draw):
    shards = []
    for _ in range(draw(st.integers(0, 4))):
        runs, clock = [], 1
        for lane in range(draw(st.integers(1, 3))):
            at, count = draw(st.integers(0, 50)), draw(st.integers(0, 6))
            time = 0
            for i in range(count):
                steps = draw(st.integers(1, 9))
                time += draw(st.integers(1, 20))
                flags = draw(st.sampled_from([FIRST | LAST] * 4 + [LAST, FIRST, 0]))
                if i == count - 1 and draw(st.booleans()):
                    flags = (flags & FIRST) | OPEN
                runs.append((lane, at, at + steps, time, flags))
                at += steps
            clock = max(clock, time + 1)
        shards.append(Source(clock + draw(st.integers(0, 5)), np.array(runs, np.int64).reshape(-1, 5)))
    return shards


def targets():
    return st.lists(st.builds(Target, st.integers(1, 3), st.integers(1, 30)), min_size=1, max_size=4)


def kind(runs, i):
    lane, _, _, _, flags = runs[i]
    oldest = i == 0 or runs[i - 1][0] != lane
    if flags & FIRST:
        return "complete" if flags & LAST else "open" if flags & OPEN else "mid"
    if oldest and flags & LAST:
        return "headless"
    return "both" if oldest and flags & OPEN else "orphan"


def naive(shards, ranks, incomplete, overflow):
    """(rank, lane) → [(shard, run)], oldest first; and steps dropped by reason."""
    dropped = dict.fromkeys(DROPPED, 0)
    candidates = []
    for s, shard in enumerate(shards):
        for i, (lane, first, end, time, _) in enumerate(shard.runs.tolist()):
            what = kind(shard.runs.tolist(), i)
            ends, skipped = bool(shard.runs[i, 4] & LAST), 0
            keep = (ends or incomplete.open != "drop") and (
                bool(shard.runs[i, 4] & FIRST) or incomplete.headless != "drop"
            )
            if not keep:
                dropped[what] += end - first
                continue
            gap, longest = not ends and incomplete.open == "keep", max(t.lane_length for t in ranks)
            if incomplete.headless == "keep" and longest > gap:
                skipped = max(0, end - first + gap - longest)
            if end - first + gap - skipped > longest:
                dropped["oversize"] += end - first
            else:
                candidates.append(((shard.clock - time, s, lane, -first), s, i, end - first - skipped, gap, skipped))
    candidates.sort()
    load = [[0] * t.lanes for t in ranks]
    placed = {}
    for at, (_, s, i, steps, gap, skipped) in enumerate(candidates):
        for n in sorted(range(len(ranks)), key=lambda n: (Fraction(sum(load[n]), ranks[n].capacity), n)):
            lane = min(range(ranks[n].lanes), key=lambda k: (load[n][k], k))
            if load[n][lane] + steps + gap <= ranks[n].lane_length:
                load[n][lane] += steps + gap
                placed.setdefault((n, lane), []).insert(0, (s, i, skipped))
                dropped["overflow"] += skipped
                break
        else:
            if overflow == "cut":
                dropped["overflow"] += sum(steps + skipped for *_, steps, _, skipped in candidates[at:])
                break
            dropped["overflow"] += steps + skipped
    return placed, dropped


@given(
    sources(),
    targets(),
    st.builds(Incomplete, st.sampled_from(["drop", "truncate", "keep"]), st.sampled_from(["drop", "keep"])),
    st.sampled_from(["cut", "fill"]),
)
def test_the_plan_follows_the_rule(shards, ranks, incomplete, overflow):
    plan = plan_by_trajectory(shards, ranks, incomplete, overflow)
    placed, dropped = naive(shards, ranks, incomplete, overflow)
    found = {}
    for rank, lane, *what in zip(plan.rank, plan.lane, plan.source, plan.run, plan.skipped, strict=True):
        found.setdefault((int(rank), int(lane)), []).append(tuple(map(int, what)))
    assert found == placed
    assert {reason: count["steps"] for reason, count in plan.dropped.items()} == dropped
    for unit in ("episodes", "steps"):
        at = ("episodes", "steps").index(unit)
        assert kept_by(plan)[unit] + sum(c[unit] for c in plan.dropped.values()) == sum(
            int(it.saved[at]) for it in shards
        )
    for s, shard in enumerate(shards):  # and of each shard
        kept = plan.steps[plan.source == s]
        assert (shard.saved == plan.drops[s].sum(0) + np.array([len(kept), kept.sum()])).all()
        runs = shard.runs.tolist()
        for name, policy in (("open", incomplete.open), ("headless", incomplete.headless), ("mid", incomplete.open)):
            of_kind = [run[2] - run[1] for i, run in enumerate(runs) if kind(runs, i) == name]
            dropped = [len(of_kind), sum(of_kind)] if policy == "drop" else [0, 0]
            assert plan.drops[s, DROPPED.index(name)].tolist() == dropped
    ends = {}
    for rank, lane, position, room in zip(plan.rank, plan.lane, plan.position, plan.steps + plan.gap, strict=True):
        assert position == ends.get((rank, lane), 0)  # one behind the other
        ends[rank, lane] = position + room
        assert ends[rank, lane] <= ranks[rank].lane_length
    cut = [not shards[s].runs[i, 4] & LAST for s, i in zip(plan.source, plan.run, strict=True)]
    assert plan.truncated.tolist() == [c and incomplete.open == "truncate" for c in cut]
    assert plan.digest == plan_by_trajectory(shards, ranks, incomplete, overflow).digest


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_loads_differ_by_no_more_than_the_longest_at_every_point_of_time(steps, ranks, lanes):
    ends = np.cumsum(steps, dtype=np.int64)
    table = np.stack(
        [np.zeros_like(ends), ends - np.array(steps, np.int64), ends, ends, np.full_like(ends, FIRST | LAST)], 1
    )
    for newest in range(len(steps) + 1):
        plan = plan_by_trajectory([Source(1 << 20, table[len(steps) - newest :])], [Target(lanes, 10_000)] * ranks)
        load = np.zeros((ranks, lanes), np.int64)
        np.add.at(load, (plan.rank, plan.lane), plan.steps)
        longest = max(steps, default=0)
        assert np.ptp(load.sum(1)) <= longest
        assert all(np.ptp(of_rank) <= longest for of_rank in load)


def test_ages_count_from_the_clock_of_their_shard():
    def one(clock, time):
        return Source(clock, np.array([[0, 0, 3, time, FIRST | LAST]]))

    plan = plan_by_trajectory([one(1000, 990), one(50, 49)], [Target(1, 3)])
    assert plan.source.tolist() == [1]
    assert plan.dropped["overflow"] == {"episodes": 1, "steps": 3}


def test_steps_of_columns_are_counted_as_steps():
    runs = np.array([[0, 0, 6, 5, FIRST | LAST], [0, 1, 7, 4, LAST], [0, 6, 12, 9, LAST]])
    plan = plan_by_trajectory([Source(10, runs, columns=2)], [Target(1, 20)])
    assert plan.dropped["headless"] == plan.dropped["orphan"] == {"episodes": 1, "steps": 3}
    assert kept_by(plan) == {"episodes": 1, "steps": 3}
    plan = plan_by_trajectory([Source(10, runs, columns=2)], [Target(1, 20)], Incomplete(headless="keep"))
    assert kept_by(plan) == {"episodes": 3, "steps": 9}


def test_nothing_to_plan():
    assert kept_by(plan_by_trajectory([], [Target(2, 5)])) == {"episodes": 0, "steps": 0}
