"""Threads that an interrupt does not lose."""

import _thread
import threading
import time
from functools import partial

import pytest

from engram.saved.disk import start_thread
from tests.buffer.test_interrupts import interrupted_at


def stuck_moments(start, limit):
    """Interrupt it at each of its moments. At which of them a thread began and does not end; how many moments there are."""
    stuck, hit, n = [], True, 0
    while hit:
        n += 1
        before = _thread._count()
        thread = threading.Thread(target=lambda: None, daemon=True)
        hit = interrupted_at(n, partial(start, thread))
        until = time.monotonic() + limit
        while _thread._count() > before and time.monotonic() < until:
            time.sleep(0.001)
        if _thread._count() > before:
            stuck.append(n)
    return stuck, n - 1


def test_an_interrupt_keeps_no_thread_from_running():
    stuck, count = stuck_moments(start_thread, 60)
    assert stuck == []
    assert count >= 5


def test_an_error_of_starting_comes_back():
    thread = threading.Thread(target=lambda: None)
    start_thread(thread)
    with pytest.raises(RuntimeError, match="once"):
        start_thread(thread)


def test_whatever_starting_raises_comes_back(monkeypatch):
    thread = threading.Thread(target=lambda: None)

    def start():
        raise MemoryError

    monkeypatch.setattr(thread, "start", start)
    with pytest.raises(MemoryError):
        start_thread(thread)
