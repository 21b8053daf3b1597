import gc
import itertools
import math
import random
import time
from contextlib import nullcontext

import pytest

from benchmarks.claims import FLOORS, Floor, timed
from benchmarks.timing import Effort, Side, Spread, Timing, alternate, longest


def test_sides_take_turns_and_only_counted_blocks_are_kept():
    heard = []
    sides = [Side(name, lambda name=name: heard.append(name)) for name in "ABC"]
    timing = alternate(sides, Effort(calls=2, blocks=3, warmup=1, lead=1))
    assert "".join(heard) == "AAABBBCCC" * 4
    assert {name: len(blocks) for name, blocks in timing.blocks_us.items()} == {"A": 3, "B": 3, "C": 3}


def test_the_interval_of_a_median_holds_that_of_other_draws_as_often_as_it_says():
    draws = random.Random(7)
    values = [[draws.expovariate(1) for _ in range(101)] for _ in range(2_000)]
    holding = sum(it.low <= math.log(2) <= it.high for it in map(Spread.of_median, values))
    assert 1_860 < holding < 1_960  # of 2,000; 0.95, or a little more as order statistics are whole
    assert Spread.of_median([3.0]) == Spread(3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="at least one"):
        Spread.of_median([])


def test_prepare_and_lead_are_outside_the_clock():
    now = itertools.count(step=1000)
    heard = []
    side = Side("A", lambda: heard.append("call"), lambda: heard.append("prepare"))

    def clock():
        heard.append("clock")
        return next(now)

    timing = alternate([side], Effort(calls=2, blocks=1, warmup=0, lead=1), clock)
    assert heard == ["prepare", "call", "clock", "call", "call", "clock"]
    assert timing.blocks_us == {"A": [0.5]}  # 1,000 ns between two looks at the clock, two calls


def test_what_comes_between_calls_is_outside_the_clock():
    now = itertools.count(step=1000)
    heard = []
    side = Side("A", lambda: heard.append("call"), between=lambda: heard.append("between"))

    def clock():
        heard.append("clock")
        return next(now)

    timing = alternate([side], Effort(calls=2, blocks=1, warmup=0, lead=1), clock)
    assert heard == ["clock", "call", "between"] + 2 * ["clock", "call", "clock", "between"]
    assert timing.blocks_us == {"A": [1.0]}


@pytest.mark.parametrize("fails", [False, True])
def test_collector_is_off_inside_blocks_and_on_again_afterwards(fails):
    seen = []

    def call():
        seen.append(gc.isenabled())
        if fails:
            raise OSError("stopped")

    assert gc.isenabled()
    with pytest.raises(OSError, match="stopped") if fails else nullcontext():
        alternate([Side("A", call)], Effort(calls=1, blocks=1))
    assert not any(seen)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_ratio_is_the_median_over_pairs_not_the_ratio_of_medians():
    timing = Timing(1, {"ours": [1.0, 10.0, 3.0], "theirs": [4.0, 20.0, 30.0]})
    assert timing.ratio("theirs", "ours") == Spread(4.0, 3.0, 7.0)  # pairs: 4, 2, 10
    assert timing.spread("theirs").median / timing.spread("ours").median == pytest.approx(20 / 3)


def test_spread_of_one_value_and_of_none():
    assert Spread.of([2.5]) == Spread(2.5, 2.5, 2.5)
    with pytest.raises(ValueError, match="got none"):
        Spread.of([])


def test_scaled_keeps_enough_blocks_for_quartiles():
    assert Effort(200, 50, 2, 3).scaled(0.2) == Effort(200, 10, 2, 3)
    assert Effort(1, 7).scaled(0.2).blocks == 5
    assert Effort(200, 50).scaled(1.0) == Effort(200, 50)


@pytest.mark.parametrize(
    ("floor", "measured", "verdict"),
    [
        (Floor("times", 8, aim=12), Spread(7.9, 7.0, 9.0), "no"),
        (Floor("times", 8, aim=12), Spread(8.0, 7.0, 9.0), "yes"),
        (Floor("times", 8, aim=12), Spread(12.0, 7.0, 13.0), "aim"),
        (Floor("share", 1.1), Spread(1.11, 1.0, 1.2), "no"),
        (Floor("share", 1.1), Spread(1.1, 1.0, 1.2), "yes"),
        (Floor("share", 1, within_iqr=True), Spread(1.03, 0.99, 1.05), "yes"),
        (Floor("share", 1, within_iqr=True), Spread(1.03, 1.01, 1.05), "no"),
        (Floor("value", 9), Spread(8.2, 8.2, 8.2), "yes"),
        (Floor("value", 9), Spread(9.4, 9.4, 9.4), "no"),
    ],
)
def test_verdicts(floor, measured, verdict):
    assert floor.verdict(measured) == verdict


def test_comparisons_point_the_right_way_and_find_their_floors():
    timing = Timing(1, {"engram": [2.0], "TorchRL": [20.0], "cpprb": [6.0], "copy_": [1.0]})
    row = timed("sample/tensordict/tensor", "", timing, times=("TorchRL", "cpprb", "absent"), share=("copy_",))
    found = {one.against: (one.measured.median, one.verdict) for one in row.comparisons}
    assert found == {"TorchRL": (10.0, "yes"), "cpprb": (3.0, "yes"), "copy_": (2.0, "")}
    assert all(one.floor is FLOORS.get((row.key, one.against)) for one in row.comparisons)


def test_rates_turn_the_quartiles_round():
    row = timed("write/fill/tensor", "", Timing(1, {"engram": [1.0, 2.0, 4.0]})).as_rate(10)
    assert row.spreads["engram"] == Spread(5e6, pytest.approx(10e6 / 3), pytest.approx(10e6 / 1.5))
    assert row.blocks_us == {"engram": [1.0, 2.0, 4.0]}


def test_the_longest_of_some_calls():
    lengths = iter([0.001, 0.05, 0.001])
    assert 50 <= longest(lambda: time.sleep(next(lengths)), iter([False, False, True]).__next__) < 100_000


def test_there_is_one_call_at_least():
    heard = []
    assert longest(lambda: heard.append("call"), lambda: True) >= 0
    assert heard == ["call"]
