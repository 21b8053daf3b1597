"""Batches made ahead: the oracle is the same buffer without them."""

import random
import threading
import time
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    Traits,
)
from tests.buffer.prefetched import BATCH, EPOCHS, ROWS, SAMPLERS, buffer, data, engaged, made_by, rows_of
from tests.components import Newest

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
        assert made.acquire(timeout=60)
        assert made.acquire(timeout=60) if _ == 0 else True  # the one that was returned, too
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
