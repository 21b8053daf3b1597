"""Limits that count seconds of a core: what a busy machine does to them, and what is said when one is over."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import waiting
from tests.waiting import CORES, Limit, TooSlow, until


def loaded(monkeypatch, tmp_path, by):
    """A machine on which that many processes want each core."""
    file = tmp_path / "loadavg"
    file.write_text(f"{by * CORES:.2f} {by * CORES:.2f} {by * CORES:.2f} {by * CORES:.0f}/999 4321\n")
    monkeypatch.setattr(waiting, "LOAD", file)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    return lambda s: now.__setitem__(0, now[0] + s)


@pytest.mark.parametrize(("by", "left"), [(0, 90), (1, 90), (2, 95), (10, 99)])
@pytest.mark.parametrize("steps", [1, 7])
def test_seconds_count_by_the_share_of_a_core(monkeypatch, tmp_path, clock, by, left, steps):
    loaded(monkeypatch, tmp_path, by)
    limit = Limit(100)
    for _ in range(steps):
        clock(10 / steps)
        limit.check("a test")
    assert limit.left_s() == pytest.approx(left)


@pytest.mark.parametrize(("passed", "left"), [(10, 95), (100, 75), (400, 0)])
def test_the_load_is_that_of_the_time_which_passed(monkeypatch, tmp_path, clock, passed, left):
    file = tmp_path / "loadavg"
    file.write_text(f"{2 * CORES} {4 * CORES} {8 * CORES} 1/999 4321\n")
    monkeypatch.setattr(waiting, "LOAD", file)
    limit = Limit(100 if passed < 400 else 50)
    clock(passed)
    assert limit.left_s() == pytest.approx(left)


def test_without_a_load_seconds_are_those_of_the_wall(monkeypatch, tmp_path, clock):
    monkeypatch.setattr(waiting, "LOAD", tmp_path / "none")
    limit = Limit(5)
    clock(4)
    limit.check("a test")
    clock(2)
    with pytest.raises(
        TooSlow, match=r"too slow, not wrong: a test took more than 5 seconds of a core \(6 s on the wall\)"
    ):
        limit.check("a test")


def test_a_busy_machine_does_not_reach_a_limit(monkeypatch, tmp_path):
    loaded(monkeypatch, tmp_path, 1000)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 0.05, 0.01)
    loaded(monkeypatch, tmp_path, 0)
    with pytest.raises(TooSlow):
        until(lambda: False, 0.01)


def test_neither_programs_nor_hypothesis_catch_it():
    @settings(database=None, max_examples=3)
    @given(st.integers())
    def slow(n):
        try:
            Limit(-1).check("an example")
        except Exception as error:
            raise AssertionError from error

    with pytest.raises(TooSlow, match="an example") as caught:
        slow()
    assert not getattr(caught.value, "__notes__", []), "an example is no reason"


def test_a_test_that_hangs_ends_and_says_so(tmp_path):
    """What hangs inside Hypothesis, in a child's output or in a lock is too slow; tests after it run."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_timeout_set_timer\n")
    (tmp_path / "test_hangs.py").write_text(
        textwrap.dedent("""
            import subprocess, sys, threading
            import pytest
            from hypothesis import given, settings, strategies as st

            @pytest.mark.timeout(0.3)
            @settings(database=None)
            @given(st.integers())
            def test_example(n):
                threading.Event().wait()

            @pytest.mark.timeout(0.3)
            def test_program():
                try:
                    subprocess.run([sys.executable, "-c", "import time; print(7, flush=True); time.sleep(1000)"], capture_output=True)
                except Exception:
                    pass

            @pytest.mark.timeout(0.3)
            def test_lock():
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()

            def test_after():
                pass
        """)
    )
    root = Path(__file__).parents[1]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-c",
        os.devnull,
        "--rootdir",
        tmp_path,
    ]
    done = subprocess.run(
        [*command, tmp_path],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert "3 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("TooSlow: too slow, not wrong: test_hangs.py::test_") >= 3
    assert "Falsifying" not in done.stdout
    assert "Flaky" not in done.stdout
