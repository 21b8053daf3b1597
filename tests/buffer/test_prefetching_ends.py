"""Errors of prefetched batches, and their end."""

import contextlib
import gc
import signal
import threading
import time
import traceback

import pytest
import torch

from engram import NoSampleable, PrioritizedSampler, ReplayBuffer, SamplerWithoutReplacement, Traits
from engram.buffer import prefetch
from engram.buffer.prefetching import Prefetching
from tests import fresh
from tests.buffer.prefetched import BATCH, ROWS, SAMPLERS, buffer, data, rows_of
from tests.components import Newest
from tests.waiting import until

# ---- errors --------------------------------------------------------------------------------------------------------------


def test_what_a_transform_raises_is_raised_by_the_call_of_its_batch(who):
    count = iter(range(100))

    def fragile(td):
        if next(count) in (3, 4):
            raise ZeroDivisionError("a bad batch")
        return td

    rb, expected, got = buffer(1, transform=fragile), rows_of(buffer(0), 9), []
    for _ in range(9):
        try:
            got.append(rb.sample()["x"].tolist())
        except ZeroDivisionError as error:
            got.append(None)
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            assert "fragile" in frames
            assert frames[0].startswith("test_what")
    assert got == [rows if i not in (3, 4) else None for i, rows in enumerate(expected)]
    assert rb.stats()["prefetch_queue_size"] == 1


@pytest.mark.parametrize("fails", range(4))
def test_a_pass_is_over_with_its_last_batch_even_if_that_fails(fails, who):
    seen = []
    for depth in (0, 1, 2):
        count = iter(range(100))

        def fragile(td, count=count):
            if next(count) == fails:
                raise ZeroDivisionError("a bad batch")
            return td

        rb, ran_out = buffer(depth, SamplerWithoutReplacement, batch=20, transform=fragile), []
        for i in range(7):
            with pytest.raises(ZeroDivisionError) if i == fails else contextlib.nullcontext():
                rb.sample()
            ran_out.append(rb.sampler.ran_out)
        seen.append(ran_out)
    assert seen == [[False, False, True] * 2 + [False]] * 3


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, NoSampleable])
def test_anything_that_is_raised_in_a_thread_arrives(kind, threads):
    def fragile(td):
        if threading.current_thread() is not threading.main_thread():
            raise kind("from afar")
        return td

    rb = buffer(2, transform=fragile)
    rb.sample()
    for _ in range(3):
        with pytest.raises(kind, match="from afar"):
            rb.sample()
    assert rb.stats()["prefetch_queue_size"] == 2


def test_a_storage_that_closes_while_a_thread_asks_for_its_limits(threads, monkeypatch):
    def closed(self):
        raise RuntimeError("the storage was closed")

    rb = buffer(2)
    rb.sample()
    with monkeypatch.context() as patched:
        patched.setattr(Prefetching, "room", closed)
        for _ in range(4):  # two were asked for before
            with contextlib.suppress(RuntimeError):
                rb.sample()
        with pytest.raises(RuntimeError, match="the storage was closed"):
            rb.sample()
    for _ in range(2):  # asked for before, and perhaps read before
        with contextlib.suppress(RuntimeError):
            rb.sample()
    assert rows_of(rb, 1)  # the threads live


def test_what_a_sampler_raises(who):
    class Fragile(Newest):
        count = 0

        def draw(self, extent, batch_size, key):
            self.count += 1
            if self.count == 3:
                raise ZeroDivisionError("a bad draw")
            return super().draw(extent, batch_size, key)

    rb = buffer(1, Fragile)
    rows_of(rb, 2)
    with pytest.raises(ZeroDivisionError, match="a bad draw"):
        rb.sample()
    assert len(rows_of(rb, 3)) == 3


@pytest.mark.parametrize("sampler", [s for name, s in SAMPLERS.items() if name != "custom"])
def test_an_empty_buffer_and_then_a_full_one(sampler, who):
    rb, plain = buffer(2, sampler, filled=False), buffer(0, sampler, filled=False)
    for one in (rb, plain):
        for _ in range(2):
            with pytest.raises(NoSampleable):
                one.sample()
        one.extend(data())
    assert rows_of(rb, 12) == rows_of(plain, 12)


def test_a_draw_that_is_tried_again_waits_for_the_threads(threads):
    inside = []

    class Moody(Newest):
        traits = Traits(has_epochs=False)

        def draw(self, extent, batch_size, key):
            inside.append(key)
            try:
                assert len(inside) == 1
                time.sleep(0.002)
                if threading.current_thread() is not threading.main_thread() and key % 2:
                    raise NoSampleable
                return super().draw(extent, batch_size, key)
            finally:
                inside.pop()

    rb = buffer(4, Moody)
    for _ in range(30):
        with contextlib.suppress(NoSampleable):  # of a batch that was asked for in its turn
            rb.sample()
    rb.close()


def test_nothing_to_draw_for_a_while(who):
    """What cannot be drawn ahead is tried again when it is its turn."""
    rb = buffer(2, lambda: PrioritizedSampler(ROWS, 1.0, 0.5, eps=0.0))
    rb.sample()
    rb.update_priority(torch.arange(ROWS), 0.0)
    rows_of(rb, 2)
    for _ in range(2):
        with pytest.raises(NoSampleable):
            rb.sample()
    rb.update_priority(torch.arange(ROWS), 1.0)
    assert len(rows_of(rb, 5)) == 5
    assert rb.stats()["prefetch_queue_size"] == 2


def test_bad_arguments():
    with pytest.raises(ValueError, match="prefetch: expected at least 0 batches, got -1"):
        ReplayBuffer(batch_size=3, prefetch=-1)
    with pytest.raises(ValueError, match="prefetch=2: expected a batch size, too"):
        ReplayBuffer(prefetch=2)
    for bad in (True, 1.0, "2"):
        with pytest.raises(TypeError, match="prefetch: expected an int"):
            ReplayBuffer(batch_size=3, prefetch=bad)
    assert ReplayBuffer(prefetch=0).prefetch == 0


def test_another_batch_size(who):
    rb = buffer(2)
    expected = rows_of(buffer(0), 3)
    for i in range(3):
        with pytest.raises(ValueError, match="batch_size: expected the prefetched 8, got 9"):
            rb.sample(9)
        assert rb.sample(BATCH)["x"].tolist() == expected[i]
    with pytest.raises(ValueError, match="at least 1"):
        rb.sample(0)


def test_a_transform_that_samples(who):
    def greedy(td):
        rb.sample()
        return td

    rb = buffer(2)
    rb.append_transform(greedy)
    for _ in range(4):
        with pytest.raises(RuntimeError, match=r"while a batch of the same buffer is made|recursion"):
            rb.sample()


def test_a_transform_that_writes(who):
    rb = buffer(2)
    rb.append_transform(lambda td: (rb.add(data(5, 1)[0]), td)[1])
    assert len(rows_of(rb, 5)) == 5


@pytest.mark.parametrize("grad", [True, False])
def test_the_gradient_mode_is_that_of_the_call(grad, who):
    weight = torch.ones(1, requires_grad=True)
    rb = buffer(2, transform=lambda td: td.set("x", td["x"] * weight))
    with torch.set_grad_enabled(grad):
        assert [rb.sample()["x"].requires_grad for _ in range(5)] == [grad] * 5
    with torch.inference_mode():
        rb = buffer(2)
        rb.append_transform(lambda td: td.set("x", td["x"] + torch.is_inference_mode_enabled()))
        assert all(rb.sample()["x"].is_inference() for _ in range(5))
    rb.sample()


def test_an_interrupt_while_waiting_loses_nothing(threads, monkeypatch):
    go, waits, wait = threading.Event(), threading.Event(), prefetch._Batch.wait

    def slow(td):
        if threading.current_thread() is not threading.main_thread():
            go.wait(60)
        return td

    def seen(batch, limit_s):
        waits.set()
        return wait(batch, limit_s)

    def interrupt():
        # No look at the frames of threads tells this: sys._current_frames() of Python before 3.11.8 may never return (gh-106883).
        assert waits.wait(60)
        time.sleep(0.05)  # it is about to sleep
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    rb, expected = buffer(2, transform=slow), rows_of(buffer(0), 4)
    got = [rb.sample()["x"].tolist()]
    for _ in range(2):
        waits.clear()
        threading.Thread(target=interrupt).start()
        with monkeypatch.context() as patched:
            patched.setattr(prefetch._Batch, "wait", seen)
            with pytest.raises(KeyboardInterrupt):
                rb.sample()
    go.set()
    assert got + rows_of(rb, 3) == expected


# ---- its end -------------------------------------------------------------------------------------------------------------


def helpers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("engram-prefetch")]


def gone():
    until(lambda: not helpers(), 60)
    return not helpers()


@pytest.mark.parametrize("end", ["close", "shutdown"])
def test_close_ends_threads_and_sampling(end, who):
    gc.collect()
    assert gone()
    rb = buffer(2)
    rows_of(rb, 4)
    rb.synchronize()
    for _ in range(2):
        getattr(rb, end)()
    assert gone()
    if end == "shutdown":
        assert rb.stats()["prefetch_queue_size"] == 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed" if end == "close" else "shut down"):
            rb.sample()


def test_close_while_another_thread_waits(threads):
    go = threading.Event()

    def stuck(td):
        if threading.current_thread().name.startswith("engram"):
            go.wait(60)
        return td

    rb = buffer(2, transform=stuck)
    rb.sample()
    got = []

    def take():
        try:
            got.append(rb.sample())
        except RuntimeError as error:
            got.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    time.sleep(0.05)
    threading.Timer(0.1, go.set).start()
    rb.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert len(got) == 1  # the batch, which was begun, or that there is none
    assert gone()


def test_what_comes_too_late_for_the_threads_is_let_go():
    """Else a call that hands a batch over while another thread closes the buffer would wait for ever."""
    workers = prefetch._Workers(1)
    workers.start()
    workers.stop()
    workers.join(60)
    batch = prefetch._Batch(None)
    batch.hand_over()
    workers.hand(batch, workers)  # any object
    batch.wait(60)
    assert batch.making is None
    assert not batch.there


def test_without_threads_the_caller_goes_on(threads, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    rb = buffer(2, SamplerWithoutReplacement)
    assert rows_of(rb, 9) == rows_of(buffer(0, SamplerWithoutReplacement), 9)
    rb.close()


def test_a_buffer_that_is_dropped_takes_its_threads_along(threads):
    gc.collect()
    assert gone()
    rb = buffer(3)
    rows_of(rb, 3)
    assert len(helpers()) == 3
    rb.synchronize()
    del rb
    assert gone()


@pytest.mark.parametrize("at_the_end", ["", "rb.close()", "del rb", "atexit.register(rb.sample)"])
def test_the_interpreter_goes_while_threads_are_at_work(at_the_end):
    out = fresh.run(
        f"""
        import atexit, time, torch
        from engram import LazyTensorStorage, ReplayBuffer
        def slow(x):
            for _ in range(50):
                x = x + torch.ones_like(x)
                time.sleep(0.001)
            return x
        rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=4, prefetch=3, transform=slow)
        rb.extend(torch.arange(50))
        for _ in range(2):
            rb.sample()
        {at_the_end}
        print("end")
        """
    )
    assert out == "end"
