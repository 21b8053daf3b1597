import sys
import time
from dataclasses import replace

import pytest

from benchmarks.timing import Turn, Window, during, together
from benchmarks.workers import Forked, Program, Shift, in_turns

SHORT = Shift(length_s=0.02, windows=2, warmup=1, lead_s=0.05)


class Clock:
    """Time that passes only where it is said to."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def passes(self, ns):
        self.now += ns


def test_calls_before_the_window_are_not_counted():
    clock = Clock()
    turn = during(lambda: clock.passes(1000), Window(2500, 7500), clock=clock)
    assert turn == Turn(calls=5, elapsed_us=5.0, p99_us=1.0, uncounted=3)  # from 3000 to 8000


def test_whoever_comes_late_makes_one_call_and_says_so():
    clock = Clock()
    clock.passes(9000)
    turn = during(lambda: clock.passes(1000), Window(2500, 7500), clock=clock)
    assert turn == Turn(calls=1, elapsed_us=1.0, p99_us=1.0, uncounted=0)


def test_finish_is_called_before_the_window_and_inside_the_clock():
    clock = Clock()
    heard = []

    def act(name, ns):
        heard.append(name)
        clock.passes(ns)

    turn = during(lambda: act("call", 1000), Window(500, 4500), lambda: act("finish", 700), clock)
    assert heard == ["call", "finish", "call", "call", "call", "finish"]
    assert (turn.calls, turn.elapsed_us, turn.p99_us) == (3, 3.7, 1.0)


@pytest.mark.parametrize(("slow", "p99"), [(1, 1.0), (2, 9.0)])
def test_p99_leaves_out_one_in_a_hundred(slow, p99):
    clock = Clock()
    lengths = iter(slow * [9000] + 100 * [1000])
    turn = during(lambda: clock.passes(next(lengths)), Window(0, slow * 9000 + (100 - slow) * 1000), clock=clock)
    assert (turn.calls, turn.p99_us) == (100, p99)


def test_two_as_fast_as_one_need_half_the_time():
    assert together([Turn(10, 100.0, 0), Turn(20, 200.0, 0)]) == 5
    assert together([Turn(10, 100.0, 0)]) == 10


def sleeper(seconds):
    return lambda: lambda: time.sleep(seconds)


def test_sides_take_turns_and_workers_may_be_on_several():
    fast, slow = Forked(sleeper(0.0005)), Forked(sleeper(0.03))  # longer than a window
    found = in_turns({"both": [fast, slow], "slow": [slow]}, replace(SHORT, windows=5))
    assert [len(turns) for turns in found["both"]] == [2] * 5
    assert [len(turns) for turns in found["slow"]] == [1] * 5
    assert max(other.calls for _, other in found["both"]) == 1 < max(one.calls for one, _ in found["both"])
    assert fast.calls > sum(turns[0].calls for turns in found["both"])  # the others too
    fast.stop()
    slow.stop()


def fail():
    raise OSError("not here")


def test_a_child_that_fails_is_an_error_here():
    with pytest.raises(EOFError):
        Forked(fail)


def test_a_killed_child_is_buried():
    worker = Forked(sleeper(0.001))
    worker.begin_without_end()
    worker.kill()
    with pytest.raises((EOFError, ConnectionResetError)):
        worker.turn()


def test_those_who_always_come_late_are_refused():
    worker = Forked(sleeper(0.001))
    with pytest.raises(TimeoutError, match=r"side: expected all processes at work within -1 s"):
        in_turns({"side": [worker]}, Shift(0.001, 1, lead_s=-1))
    worker.stop()


def test_a_program_of_another_environment(tmp_path):
    (tmp_path / "peer.py").write_text(
        "import sys, time\n"
        "from benchmarks.workers import answer_lines\n"
        "answer_lines(lambda: time.sleep(0.001), None, {'port': int(sys.argv[1])})\n"
    )
    program = Program(sys.executable, "peer", "7", path=tmp_path)
    assert program.said == {"port": 7}
    ((turn,), _) = in_turns({"side": [program]}, SHORT)["side"]
    assert 1 <= turn.calls <= 20
    program.stop()
    assert program.exit_code == 0
