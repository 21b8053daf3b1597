"""Waiting for what other threads and processes do, where nothing tells of it."""

import time


def until(condition, limit_s=60):
    """Look again every few milliseconds until it holds. The limit is a guard against a hang, and no measure of speed."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come within {limit_s} s"
        time.sleep(0.003)
