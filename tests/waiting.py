"""Waiting for other threads and processes, with limits that a busy machine does not reach.

A limit guards against a hang. It counts seconds of a core, not of the wall: where four times as many processes want to run as
there are cores, a process gets a quarter of a core, and four seconds count as one.
"""

import os
import time
from pathlib import Path

CORES = len(os.sched_getaffinity(0))
#: Where the machine says how many processes wanted to run, on average over the last 1, 5 and 15 minutes, and how many do now.
LOAD = Path("/proc/loadavg")


class TooSlow(BaseException):
    """A limit is over. No ``Exception``: neither code under test nor Hypothesis takes it for a fault of what they run."""


class Limit:
    """So many seconds of a core, from now on."""

    def __init__(self, limit_s: float) -> None:
        self._left_s = self.limit_s = limit_s
        self._looked = self._began = time.monotonic()

    def left_s(self) -> float:
        """What is left of it: a process that wants to run has had the rest."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        self._left_s -= passed * CORES / max(CORES, _wanted_to_run(passed))
        return self._left_s

    def check(self, what: str) -> None:
        """Raises :class:`TooSlow` when it is over."""
        if self.left_s() < 0:
            raise TooSlow(
                f"too slow, not wrong: {what} took more than {self.limit_s:g} seconds of a core "
                f"({time.monotonic() - self._began:.0f} s on the wall). It hangs, or the limit is too low."
            )


def _wanted_to_run(passed_s):
    """How many processes did, in the last so many seconds."""
    try:
        one, five, fifteen, running, *_ = LOAD.read_text().split()
    except OSError:  # no Linux, or hidden: seconds are seconds
        return 0
    if passed_s > 60:
        return float(five if passed_s <= 300 else fifteen)
    return max(float(one), float(running.partition("/")[0]))  # the average is late where much began just now


def until(condition, limit_s=60, what="what it waits for"):
    """Look again every few milliseconds until it holds."""
    limit = Limit(limit_s)
    while not condition():
        limit.check(what)
        time.sleep(0.003)


def ended(process, limit_s=60):
    """Wait until a process of multiprocessing has ended: its exit code."""
    until(lambda: not process.is_alive(), limit_s, "a process")
    process.join()
    return process.exitcode
