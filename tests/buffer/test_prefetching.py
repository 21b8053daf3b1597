"""Batches made ahead: the oracle is the same buffer without them."""

import contextlib
import copy
import gc
import os
import pickle
import random
import signal
import threading
import time
import traceback
from collections import deque
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    Checkpointer,
    DeviceLoader,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    Traits,
    pinning,
    prefetch,
)
from engram.pinning import HostMemory
from engram.prefetch import Prefetcher
from tests import fresh
from tests.components import Newest

ROWS, BATCH = 60, 8
SAMPLERS = {
    "uniform": RandomSampler,
    "pass": SamplerWithoutReplacement,
    "pass-in-order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "prioritized": lambda: PrioritizedSampler(ROWS, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=4),
    "slices-pass": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized-slices": lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.5, slice_len=4),
    "custom": Newest,
    "expander": lambda: RewardToGo(RandomSampler(), reward_key="reward", traj_key="episode"),
    "expander-pass": lambda: RewardToGo(SamplerWithoutReplacement(), reward_key="reward", traj_key="episode"),
}
EPOCHS = ("pass", "pass-in-order", "slices-pass", "expander-pass")


def made_by(who, monkeypatch):
    """From the second batch on."""
    monkeypatch.setattr(Prefetcher, "slow_s", 0.0 if who == "threads" else 1e9)
    monkeypatch.setattr(Prefetcher, "slow_in_a_row", 1)


@pytest.fixture(params=["caller", "threads", "as-it-comes"])
def who(request, monkeypatch):
    """Who makes batches: as measured, or always the same."""
    if request.param != "as-it-comes":
        made_by(request.param, monkeypatch)
    return request.param


@pytest.fixture
def threads(monkeypatch):
    made_by("threads", monkeypatch)


def data(first=0, n=ROWS):
    step = torch.arange(first, first + n)
    return TensorDict({"x": step, "episode": step // 6, "reward": step[:, None].float()}, [n])


def buffer(depth, sampler=RandomSampler, storage=LazyTensorStorage, *, seed=5, filled=True, batch=BATCH, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    rb = TensorDictReplayBuffer(
        storage=storage(ROWS), sampler=sampler(), batch_size=batch, prefetch=depth, generator=generator, **kwargs
    )
    if filled:
        rb.extend(data())
    return rb


def rows_of(rb, n):
    return [rb.sample()["x"].tolist() for _ in range(n)]


def engaged(rb):
    """Whether threads make the batches of a buffer."""
    return rb._prefetching.prefetcher._workers is not None


# ---- the sequence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_every_depth_brings_the_same_batches(sampler, who):
    def jittered(td):
        time.sleep(random.random() / 2000)
        return td

    expected = rows_of(buffer(0, sampler), 30)
    for depth in (1, 2, 4):
        rb = buffer(depth, sampler, transform=None if who == "caller" else jittered)
        assert rows_of(rb, 30) == expected
        rb.close()


@pytest.mark.parametrize(
    "storage",
    [
        lambda ndim: ListStorage(ROWS),
        lambda ndim: LazyTensorStorage(ROWS),
        lambda ndim: LazyTensorStorage(ROWS, ndim=2),
        lambda ndim: LazyMemmapStorage(ROWS),
    ],
    ids=["list", "tensor", "2-d", "memmap"],
)
@pytest.mark.parametrize("info", [False, True, "in turn"])
def test_every_storage_and_kind_of_call(storage, info, who):
    def drawn(depth):
        generator = torch.Generator().manual_seed(1)
        made = storage(2)
        rb = ReplayBuffer(storage=made, batch_size=7, prefetch=depth, generator=generator)
        rb.extend(torch.arange(ROWS).reshape((3, -1) if made.ndim == 2 else (-1,)))
        out = []
        for i in range(12):
            wanted = bool(i % 2) if info == "in turn" else info
            got = rb.sample(return_info=wanted)
            batch, more = got if wanted else (got, {})
            out.append((batch.tolist(), str(more.get("index"))))
        rb.close()
        return out

    assert drawn(0) == drawn(3)


def test_the_default_generator_is_asked_in_the_call(who):
    """What happens to it between calls is seen, whoever makes the batches."""

    def drawn():
        torch.manual_seed(4)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=BATCH, prefetch=2)
        rb.extend(data())
        out = [(rb.sample()["x"].tolist(), torch.rand(1).item()) for _ in range(20)]
        return out, torch.get_rng_state().tolist()

    (first, state), (again, state_again) = drawn(), drawn()
    assert first == again
    assert state == state_again


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_program_brings_the_same_batches_whoever_makes_them(sampler, monkeypatch):
    """With writes, edits and updates in between: batches show the buffer as it was when they were asked for."""

    def drawn(who):
        made_by(who, monkeypatch)
        rb = buffer(2, sampler)
        out = []
        for i in range(25):
            try:
                batch, info = rb.sample(return_info=True)
                out.append((batch["x"].tolist(), str(info.get("priority_weight"))))
            except NoSampleable:  # a batch of a pass of which all trajectories are too short
                out.append(None)
            if i % 3 == 0:
                rb.extend(data(100 + 6 * i, 6))
            if i % 4 == 1 and getattr(rb.sampler, "prioritized", False):
                rb.update_priority(info["index"], torch.arange(len(batch)) + 1.0)
            if i % 5 == 2:
                rb[3] = data(1000 + i, 1)[0]
            if i % 7 == 3:
                rb.add(data(2000 + i, 1)[0])
        assert engaged(rb) == (who == "threads")
        return out

    assert drawn("threads") == drawn("caller")


OPERATIONS = st.lists(st.sampled_from(["sample", "sample", "extend", "add", "edit", "prioritize"]), max_size=25)


@pytest.mark.parametrize("makers", ["caller", "threads", "as-it-comes"])
@pytest.mark.parametrize("name", ["uniform", "prioritized", "slices", "custom", "expander"])
@settings(max_examples=15, deadline=None)
@given(operations=OPERATIONS, depth=st.integers(1, 4))
def test_batches_show_the_buffer_as_it_was_when_they_were_asked_for(name, makers, operations, depth):
    """The oracle samples without prefetching, and ahead."""
    with pytest.MonkeyPatch.context() as patch:
        if makers != "as-it-comes":
            made_by(makers, patch)
        rb, plain = buffer(depth, SAMPLERS[name]), buffer(0, SAMPLERS[name])
        asked = deque()
        for number, operation in enumerate(operations):
            if operation == "sample":
                while len(asked) <= depth:
                    asked.append(plain.sample()["x"].tolist())
                assert rb.sample()["x"].tolist() == asked.popleft()
            for one in (rb, plain):
                if operation == "extend":
                    one.extend(data(100 * number, 7))
                elif operation == "add":
                    one.add(data(100 * number, 1)[0])
                elif operation == "edit":
                    one.set_("x", -one["x"])
                elif operation == "prioritize" and name == "prioritized":
                    one.update_priority(torch.arange(ROWS), (torch.arange(ROWS) + number) % 7 + 1.0)
        rb.close()


def test_several_threads_take_each_batch_once(who):
    rb = buffer(3, lambda: SamplerWithoutReplacement(drop_last=True), batch=6)
    taken, lock = [], threading.Lock()

    def take():
        for _ in range(5):
            rows = rb.sample()["x"].tolist()
            with lock:
                taken.extend(rows)

    crowd = [threading.Thread(target=take) for _ in range(4)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert sorted(taken) == sorted(2 * list(range(ROWS)))


def test_uniform_batches_from_several_threads_beside_a_writer(who):
    rb = buffer(2)
    stop, failed = threading.Event(), []

    def take():
        try:
            while not stop.is_set():
                assert rb.sample().shape == (BATCH,)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    crowd = [threading.Thread(target=take) for _ in range(3)]
    for thread in crowd:
        thread.start()
    for i in range(100):
        rb.extend(data(i, 4))
        if i % 30 == 0:
            rb.append_transform(lambda td: td)
    stop.set()
    for thread in crowd:
        thread.join()
    assert not failed
    rows_of(rb, 300)
    assert rb.stats()["prefetch_queue_size"] == 2


# ---- the queue ---------------------------------------------------------------------------------------------------------


def test_after_each_call_the_depth_is_ahead(who):
    rb = buffer(3)
    assert rb.stats()["prefetch_queue_size"] == 0
    for _ in range(600):
        rb.sample()
        assert rb.stats()["prefetch_queue_size"] == 3
    assert rb.prefetch == 3
    assert "prefetch=3" in repr(rb)


def test_near_the_end_of_a_pass_fewer_are(who):
    rb = buffer(2, SamplerWithoutReplacement, batch=20)
    seen = []
    for _ in range(7):
        rb.sample()
        seen.append((rb.stats()["prefetch_queue_size"], rb.sampler.ran_out))
    assert seen == [(2, False), (1, False), (0, True)] * 2 + [(2, False)]


@pytest.mark.parametrize("name", EPOCHS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_iteration_ends_with_the_pass(name, storage, who):
    expected = buffer(0, SAMPLERS[name], storage)
    rb = buffer(3, SAMPLERS[name], storage)
    for _ in range(3):
        assert [batch["x"].tolist() for batch in rb] == [batch["x"].tolist() for batch in expected]
        assert rb.stats()["prefetch_queue_size"] == 0
    for one in (rb, expected):  # a pass that was left goes on
        one.sample()
        next(iter(one))
    assert [batch["x"].tolist() for batch in rb] == [batch["x"].tolist() for batch in expected]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_iteration_that_was_left_just_before_the_end(storage, who):
    """The last batch was drawn already when the next iteration clears ``ran_out``."""
    seen = []
    for depth in (0, 2):
        rb = buffer(depth, SamplerWithoutReplacement, storage, batch=20)
        for _ in zip(range(2), rb, strict=False):
            pass
        seen.append([[len(batch) for batch in rb], [len(batch) for batch in rb]])
    assert seen[0] == seen[1]


def test_next_is_as_without(who):
    rb, expected = buffer(2, SamplerWithoutReplacement, batch=25), buffer(0, SamplerWithoutReplacement, batch=25)
    for _ in range(9):
        one, other = rb.next(), expected.next()
        assert (one is None) == (other is None)
        assert one is None or one["x"].tolist() == other["x"].tolist()


def test_a_batch_is_ready_while_the_current_one_trains(threads):
    made = threading.Semaphore(0)

    def counted(td):
        made.release()
        return td

    rb = buffer(1, transform=counted)
    rb.sample()
    for _ in range(3):
        assert made.acquire(timeout=5)
        assert made.acquire(timeout=5) if _ == 0 else True  # the one that was returned, too
        assert not made.acquire(timeout=0.02)  # and no more than that
        rb.sample()


def test_threads_draw_one_after_the_other(threads):
    """Samplers are not asked to draw twice at a time, nor out of order, by threads that sleep meanwhile."""
    keys, inside = [], []

    class Slow(Newest):
        traits = Traits(has_epochs=False)  # else each draw is waited for before the next is asked for

        def draw(self, extent, batch_size, key):
            inside.append(key)
            assert len(inside) == 1
            keys.append(key)
            time.sleep(0.001 * random.random())
            inside.pop()
            return super().draw(extent, batch_size, key)

    rb = buffer(4, Slow)
    rows_of(rb, 20)
    rb.close()
    drawn, keys = keys[:20], []
    rows_of(buffer(0, Slow), 20)
    assert drawn == keys


def test_batches_come_in_order_however_long_they_take(threads):
    lengths = iter([0.03, 0.0, 0.02, 0.0] * 10)

    def uneven(td):
        time.sleep(next(lengths))
        return td

    assert rows_of(buffer(4, transform=uneven), 16) == rows_of(buffer(0), 16)


# ---- what happens to the buffer in between -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_writes_do_not_change_what_is_ahead(depth, sampler, who):
    rb, expected = buffer(depth, sampler), rows_of(buffer(0, sampler), depth + 1)
    assert rb.sample()["x"].tolist() == expected[0]
    ahead = int(rb.stats()["prefetch_queue_size"])
    for i in range(10):
        rb.extend(data(1000 + 6 * i, 6))
    assert rows_of(rb, ahead) == expected[1 : ahead + 1]
    assert max(rb.sample()["x"]) >= 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda rb: rb.set_("x", torch.full((ROWS,), -1)),
        lambda rb: rb.__setitem__(slice(None), data(1000)),
        lambda rb: rb.update_({"x": torch.full((ROWS,), -1)}),
        lambda rb: [rb.add(data(1000, 1)[0]) for _ in range(ROWS)],
        lambda rb: rb.writer.extend(data(1000)),
    ],
)
def test_edits_do_not_either(change, who):
    rb = buffer(2)
    rb.sample()
    change(rb)
    assert rows_of(rb, 2) == rows_of(buffer(0), 3)[1:]


def test_empty_drops_what_is_ahead(who):
    rb, plain = buffer(3), buffer(0)
    for one in (rb, plain):
        one.sample()
        one.empty()
        assert one.stats()["prefetch_queue_size"] == 0
        with pytest.raises(NoSampleable):
            one.sample()
        one.extend(data(500))
    assert rows_of(rb, 5) == rows_of(plain, 5)


def test_another_sampler_or_storage_drops_it_too(who):
    rb, plain = buffer(2), buffer(0)
    for one in (rb, plain):
        one.sample()
        one.set_sampler(SamplerWithoutReplacement())
        assert one.stats()["prefetch_queue_size"] == 0
    assert rows_of(rb, 4) == rows_of(plain, 4)
    for one in (rb, plain):
        one.set_storage(LazyTensorStorage(ROWS))
        assert one.stats()["prefetch_queue_size"] == 0
        one.extend(data(500))
    assert rows_of(rb, 4) == rows_of(plain, 4)


def test_another_writer_loses_no_row_of_a_pass(who):
    rb = buffer(2, SamplerWithoutReplacement)
    rows = rb.sample()["x"].tolist()
    rb.set_writer(TensorDictRoundRobinWriter(track_generations=True))
    for batch in rb:
        assert batch["index_generation"].shape == batch.batch_size
        rows += batch["x"].tolist()
    assert sorted(rows) == list(range(ROWS))


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_another_transform_is_seen_by_the_next_batch(sampler, who):
    rb, plain = buffer(3, sampler), buffer(0, sampler)
    for one in (rb, plain):
        one.sample()
        one.append_transform(lambda td: td.set_("x", -td["x"]))  # in place
    assert rows_of(rb, 2) == rows_of(plain, 2)
    for one in (rb, plain):
        one.insert_transform(0, lambda td: td.set("x", td["x"] + 7))
    assert rows_of(rb, 9) == rows_of(plain, 9)


def test_another_generator(who):
    rb, plain = buffer(2), buffer(0)
    for one in (rb, plain):
        rows_of(one, 3)
        one.set_rng(torch.Generator().manual_seed(8))
    assert rows_of(rb, 4) == rows_of(plain, 4)


def test_priorities_count_for_batches_asked_for_later(who):
    rb = PrioritizedReplayBuffer(
        alpha=1.0, beta=0.5, storage=LazyTensorStorage(ROWS), batch_size=BATCH, prefetch=2, eps=0.0
    )
    rb.extend(torch.arange(ROWS))
    rb.sample()
    rb.update_priority(torch.arange(ROWS), (torch.arange(ROWS) == 7).float())
    seen = [set(rb.sample().tolist()) for _ in range(4)]
    assert seen[0] != {7} != seen[1]
    assert seen[2:] == [{7}, {7}]
    _, info = rb.sample(return_info=True)
    assert set(info) == {"index", "priority_weight", "index_generation"}


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


def test_an_interrupt_while_waiting_loses_nothing(threads):
    go = threading.Event()

    def slow(td):
        if threading.current_thread() is not threading.main_thread():
            go.wait(10)
        return td

    rb, expected = buffer(2, transform=slow), rows_of(buffer(0), 4)
    got = [rb.sample()["x"].tolist()]
    for _ in range(2):
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            rb.sample()
    go.set()
    assert got + rows_of(rb, 3) == expected


# ---- its end -------------------------------------------------------------------------------------------------------------


def helpers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("engram-prefetch")]


def gone(n=0):
    deadline = time.monotonic() + 5
    while len(helpers()) > n and time.monotonic() < deadline:
        time.sleep(0.005)
    return len(helpers()) <= n


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
            go.wait(20)
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
    waiting.join(5)
    assert not waiting.is_alive()
    assert len(got) == 1  # the batch, which was begun, or that there is none
    assert gone()


def test_what_comes_too_late_for_the_threads_is_let_go():
    """Else a call that hands a batch over while another thread closes the buffer would wait for ever."""
    workers = prefetch._Workers(1)
    workers.start()
    workers.stop()
    workers.join(5)
    batch = prefetch._Batch(None)
    batch.hand_over()
    workers.hand(batch, None)
    batch.wait(5)
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
    before = len(helpers())
    rb = buffer(3)
    rows_of(rb, 3)
    assert len(helpers()) == before + 3
    rb.synchronize()
    del rb
    assert gone(before)


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


# ---- copies, forks, processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["copy", "pickle"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_copy_goes_on_with_the_same_batches(copied, sampler, who):
    rb = buffer(2, sampler)
    rows_of(rb, 3)
    other = copied(rb)
    assert rows_of(other, 12) == rows_of(rb, 12) == rows_of(buffer(0, sampler), 15)[3:]


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_what_was_saved_comes_back(sampler, who):
    rb = buffer(2, sampler)
    rows_of(rb, 3)
    saved = copy.deepcopy(rb._prefetching.prefetcher.saved(rb._prefetching))
    assert len(saved["batches"]) == rb.stats()["prefetch_queue_size"]
    drawn, generator = rb.sampler.state_dict(), rb._wiring.generator.get_state()
    expected = rows_of(rb, 8)
    rb.sampler.load_state_dict(drawn)
    rb._wiring.generator.set_state(generator)
    rb._prefetching.prefetcher.restore(saved)
    assert rows_of(rb, 8) == expected


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_state_goes_on_with_the_same_batches(sampler, who):
    rb, other = buffer(2, sampler), buffer(2, sampler, filled=False)
    rows_of(rb, 3)
    other.load_state_dict(rb.state_dict())
    expected = [rb.sample(return_info=True) for _ in range(8)]
    for batch, info in expected:
        found, its_info = other.sample(return_info=True)
        assert all((found[key] == batch[key]).all() for key in batch.keys(True, True) if key != "index_generation")
        assert its_info.keys() == info.keys()
    rb.append_transform(lambda td: td)  # random bits are given back, and nothing is ahead
    other.load_state_dict(rb.state_dict())
    assert rows_of(other, 3) == rows_of(rb, 3)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("save", ["state_dict", "dumps", "Checkpointer"])
def test_priorities_of_batches_ahead_that_were_loaded_count(save, storage, tmp_path, threads):
    """They name the rows as they are numbered now."""
    rb, other = (buffer(2, SAMPLERS["prioritized"], storage) for _ in range(2))
    rows_of(rb, 3)
    other.extend(data(n=7))
    for _ in range(2):  # what was loaded is saved again
        if save == "state_dict":
            other.load_state_dict(rb.state_dict())
        elif save == "dumps":
            rb.dumps(tmp_path / "dump")
            other.loads(tmp_path / "dump")
        else:
            Checkpointer(tmp_path / "series", rb).save(1)
            Checkpointer(tmp_path / "series", other).restore(resume="exact")
        for _ in range(4):
            drawn, same = rb.sample(), other.sample()
            assert (drawn["x"] == same["x"]).all()
            for one, batch in ((rb, drawn), (other, same)):
                one.update_priority(batch["index"], torch.arange(8.0), generation=batch["index_generation"])
                assert one.stats()["priority_updates_dropped"] == 0
        rb, other = other, rb


@pytest.mark.parametrize("name", EPOCHS)
def test_batches_that_are_left_out_of_a_dump_go_back_to_their_pass(name, tmp_path, threads):
    rb, other, plain = buffer(2, SAMPLERS[name]), buffer(0, SAMPLERS[name], filled=False), buffer(0, SAMPLERS[name])
    assert rows_of(rb, 3) == rows_of(plain, 3)
    rb.dumps(tmp_path / "dump", prefetch="drop")
    other.loads(tmp_path / "dump")
    which, expected = rows_of(other, 2), rows_of(plain, 2)
    if name == "slices-pass":  # where in its trajectory a slice begins follows from the batch's own random bits
        which, expected = ([[x // 6 for x in batch] for batch in batches] for batches in (which, expected))
    assert which == expected


def test_batches_that_cannot_be_saved_can_be_left_out(tmp_path, threads):
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=8, prefetch=2, transform=lambda td: td["x"].numpy())
    rb.extend(data())
    rb.sample(), rb.sample()
    with pytest.raises(TypeError, match="ndarray"):
        rb.dumps(tmp_path / "dump")
    rb.dumps(tmp_path / "dump", prefetch="drop")
    other = ReplayBuffer(storage=LazyTensorStorage(ROWS), transform=lambda td: td)
    other.loads(tmp_path / "dump")
    assert other[:]["x"].tolist() == list(range(ROWS))


@pytest.mark.parametrize("save", ["state_dict", "dumps"])
def test_writers_do_not_wait_for_batches_ahead_to_be_saved(save, tmp_path, threads):
    """Nor does a transform that writes: it would wait for the save, and the save for it."""
    started = threading.Event()

    def writes(td):
        started.set()
        time.sleep(0.05)
        written.append(rb.extend(data(n=1)))
        return td

    written = []
    rb = buffer(2, transform=writes)
    rb.sample()
    started.clear()
    rb.sample()
    assert started.wait(5)
    start = time.monotonic()
    if save == "state_dict":
        rb.state_dict()
    else:
        rb.dumps(tmp_path / "dump")
    assert time.monotonic() - start < 2
    assert len(rb.sample()) == BATCH
    rb.close()
    assert len(written) >= 4


def test_a_state_without_batch_size_is_refused():
    rb, other = buffer(0, batch=None), buffer(2)
    with pytest.raises(ValueError, match="_batch_size: expected an int, as prefetch=2 needs one"):
        other.load_state_dict(rb.state_dict())
    assert len(other.sample()) == BATCH


def test_random_bits_that_were_given_back_are_saved_too(who):
    rb, plain = buffer(2), buffer(0)
    rows_of(rb, 3)
    rb.append_transform(lambda td: td)
    plain.sample()
    rows_of(plain, 2)
    assert rows_of(copy.copy(rb), 5) == rows_of(plain, 5)


def test_a_batch_that_failed_is_made_anew_by_whoever_restores_it(threads):
    fail = threading.Event()
    fail.set()

    def fragile(td):
        if fail.is_set() and threading.current_thread().name.startswith("engram"):
            raise ZeroDivisionError
        return td

    rb, expected = buffer(2, transform=fragile), buffer(0)
    rb.sample()
    saved = rb._prefetching.prefetcher.saved(rb._prefetching)
    assert [sorted(entry) for entry in saved["batches"]] == [["key"], ["key"]]
    fail.clear()
    rb._prefetching.prefetcher.restore(saved)
    assert rows_of(rb, 2) == rows_of(expected, 3)[1:]


def test_a_copy_has_batches_of_its_own(who):
    rb = buffer(1)
    rb.sample()
    other = copy.copy(rb)
    rb.sample()["x"].zero_()
    assert other.sample()["x"].tolist() == rows_of(buffer(0), 2)[1]


def test_a_shared_handle_takes_no_batches_along(who):
    rb = buffer(2, SamplerWithoutReplacement, batch=10, shared=True)
    rb.sample()
    handle = pickle.loads(pickle.dumps(rb))
    assert handle.prefetch == 2
    assert handle.stats()["prefetch_queue_size"] == 0
    rows = rows_of(rb, 2)
    theirs = [handle.sample()["x"].tolist()]
    assert not {row for batch in rows for row in batch} & set(theirs[0])
    handle.close()
    rb.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_child(shared, who):
    """An independent copy goes on with the same batches; a process that shares the buffer leaves them to its parent."""
    rb = buffer(2, SamplerWithoutReplacement, batch=4)
    rb.share(shared)
    done = [rows_of(rb, 3)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rows = rows_of(rb, 4)
            rb.close()
            os.write(writer, repr(rows).encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    theirs = eval(os.read(reader, 10_000).decode())
    os.close(reader)
    os.close(writer)
    ours = rows_of(rb, 4)
    if shared:
        rows = [row for batches in (*done, theirs, ours) for batch in batches for row in batch]
        assert len(set(rows)) == len(rows) == 44
    else:
        assert ours == theirs
    rb.close()


def test_a_fork_does_not_wait_for_ever(threads, monkeypatch):
    """The child makes itself what a thread of its parent is at."""
    monkeypatch.setattr(prefetch, "LEAVE_S", 0.05)
    go = threading.Event()

    def stuck(td):
        if threading.current_thread() is not threading.main_thread():
            go.wait(20)
        return td

    rb, expected = buffer(2, transform=stuck), rows_of(buffer(0), 5)
    rb.sample()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            made_by("caller", monkeypatch)  # a thread of the child would wait, too
            code = 0 if rows_of(rb, 4) == expected[1:] else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    assert rows_of(rb, 4) == expected[1:]


def test_fork_beside_busy_threads(threads):
    rb = buffer(3, SamplerWithoutReplacement, batch=1, transform=lambda td: time.sleep(0.002) or td)
    for _ in range(8):
        rb.sample()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if len(rows_of(rb, 5)) == 5 else 1
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_processes_share_a_pass():
    out = fresh.run(
        """
        import multiprocessing, torch
        from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

        def take(rb, out):
            out.put([row for _ in range(5) for row in rb.sample().tolist()])
            rb.close()

        rb = ReplayBuffer(
            storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=5, prefetch=2, shared=True,
            transform=lambda x: x + 0,
        )
        rb.extend(torch.arange(100))
        mine = [row for _ in range(2) for row in rb.sample().tolist()]
        context = multiprocessing.get_context("fork")
        out = context.SimpleQueue()
        others = [context.Process(target=take, args=(rb, out)) for _ in range(2)]
        for other in others:
            other.start()
        theirs = out.get() + out.get()
        for other in others:
            other.join()
        mine += [row for _ in range(2) for row in rb.sample().tolist()]
        rows = mine + theirs
        print(len(rows), len(set(rows)), [other.exitcode for other in others])
        """
    )
    assert out == "70 70 [0, 0]"


@pytest.mark.parametrize(
    ("recorded", "given", "depth"), [(None, 2, 2), (3, None, 3), (3, 1, 1), (3, 0, 0), (None, None, 0)]
)
def test_open_takes_it_or_what_was_recorded(recorded, given, depth, tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "store"), batch_size=4, prefetch=recorded)
    rb.extend(torch.arange(20))
    rb.close()
    again = ReplayBuffer.open(tmp_path / "store", prefetch=given)
    assert again.sample().shape == (4,)
    assert again.prefetch == again.stats()["prefetch_queue_size"] == depth
    again.close()


def test_a_loader_hands_out_the_whole_pass(who):
    for return_info in (False, True):
        loader = DeviceLoader(buffer(2, SamplerWithoutReplacement, batch=25), "cpu", return_info=return_info)
        for _ in range(2):
            batches = [one[0] if return_info else one for one in loader]
            assert [len(batch) for batch in batches] == [25, 25, 10]


# ---- pinning ---------------------------------------------------------------------------------------------------------------


class Memory(HostMemory):
    """Ordinary tensors that count as pinned."""

    def __init__(self):
        self.made, self.threads, self.copied = {}, set(), False

    def empty(self, shape, dtype):
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.made[tensor.data_ptr()] = tensor
        self.threads.add(threading.current_thread())
        return tensor

    def is_pinned(self, tensor):
        self.copied |= tensor.data_ptr() not in self.made
        return tensor.data_ptr() in self.made


@pytest.mark.parametrize("transform", [None, lambda td: td.set("y", td["x"] + 1)])
def test_batches_are_pinned_by_whoever_makes_them(transform, who, monkeypatch):
    memory = Memory()
    monkeypatch.setattr(pinning, "host_memory", lambda: memory)
    rb, plain = buffer(2, transform=transform, pin_memory=True), buffer(0, transform=transform)
    for number in range(6):
        batch, info = rb.sample(return_info=True)
        assert all(memory.is_pinned(leaf) for leaf in (*batch.values(), *info.values()))
        assert batch["index"] is info["index"]
        assert batch["x"].tolist() == plain.sample()["x"].tolist()
        assert number or memory.threads  # or nothing would be shown
    assert memory.copied == (transform is not None)  # else rows are gathered there
    if who != "as-it-comes":
        assert (memory.threads == {threading.main_thread()}) == (who == "caller")


# ---- pickles between processes -----------------------------------------------------------------------------------------------


def test_batches_go_to_processes_by_value(who):
    """A tensor's file descriptor would be another's by the time that the receiver looks."""
    rb = buffer(2)
    rb.sample()
    sent = bytes(ForkingPickler.dumps(rb))
    expected = rows_of(rb, 4)
    for _ in range(2):
        assert rows_of(pickle.loads(sent), 4) == expected


def test_batches_of_other_kinds_survive_too(who):
    def nested(td):
        inner = TensorDict({"z": td["x"][:, None] * torch.ones(3)}, [len(td), 3], names=["batch", "time"])
        return {"td": inner, "many": (td["x"], [1, "two"]), "scale": torch.ones((), requires_grad=True) * 2}

    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=BATCH, prefetch=1, transform=nested)
    rb.extend(data())
    rb.sample()
    one, other = copy.deepcopy(rb).sample(), rb.sample()
    assert torch.equal(one["td"]["z"], other["td"]["z"])
    assert (one["td"].batch_size, one["td"].names) == (other["td"].batch_size, ["batch", "time"])
    assert one["many"][0].tolist() == other["many"][0].tolist()
    assert one["many"][1] == [1, "two"]


# ---- who makes them --------------------------------------------------------------------------------------------------------


class Clock:
    """Time passes when it is told to: else a busy machine would decide."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def lasting(self, *seconds):
        """A transform that takes so long, each time, and the last of these from then on."""
        left = list(seconds)

        def transform(data):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return data

        return transform


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("engram.prefetch.perf_counter", clock)
    monkeypatch.setattr("engram.buffer.prefetching.perf_counter", clock)
    return clock


def test_cheap_batches_are_the_callers(clock):
    rb = buffer(2, transform=clock.lasting(190e-6))
    seen = set()
    rb.append_transform(lambda td: (seen.add(threading.current_thread()), td)[1])
    rows_of(rb, 50)
    assert seen == {threading.main_thread()}
    assert not engaged(rb)


def test_slow_ones_go_to_threads_until_the_buffer_is_another(clock):
    rb = buffer(2, transform=clock.lasting(210e-6))
    rows_of(rb, 5)  # and two ahead
    assert not engaged(rb)
    rows_of(rb, 2)
    assert engaged(rb)
    assert rb._prefetching.prefetcher._threaded
    rb.set_sampler(RandomSampler())
    rows_of(rb, 1)
    assert not rb._prefetching.prefetcher._threaded


def test_one_cheap_batch_among_slow_ones_keeps_them_with_the_caller(clock):
    rb = buffer(2, transform=clock.lasting(*[210e-6] * 7, 0, *[210e-6] * 7, 0))
    rows_of(rb, 30)
    assert not engaged(rb)


def test_slow_uniform_batches_go_to_threads_too(clock):
    """Those that nothing is done to are timed by the call itself."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3, prefetch=2, collate_fn=clock.lasting(210e-6))
    rb.extend(torch.arange(10))
    for _ in range(7):
        rb.sample()
    assert rb._prefetching.prefetcher.lazy
    rb.sample()
    assert not rb._prefetching.prefetcher.lazy
    for _ in range(3):
        rb.sample()
    assert engaged(rb)
    assert rb.stats()["prefetch_queue_size"] == 2
