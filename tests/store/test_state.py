"""What a store says of its rows: read at one moment, with all writers waiting, and put into another store."""

import os
import signal
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, SliceSampler, WriterStalled
from engram._support import native
from engram.store.indexes import Indexes
from engram.store.priorities import PriorityIndex
from tests.waiting import Limit


def buffer(kind, rows=12, **arguments):
    if kind == "shared":
        return ReplayBuffer(storage=LazyTensorStorage(rows), shared=True, **arguments)
    storage = {"private": LazyTensorStorage, "directory": LazyMemmapStorage}[kind](rows)
    return ReplayBuffer(storage=storage, **arguments)


KINDS = ["private", "shared", "directory"]


def saved(rb):
    store = rb.storage.store
    with store.paused():
        return store.state(), [tensor.clone() for tensor in store.tensors]


def put(rb, state, rows):
    def fill(tensors):
        for tensor, row in zip(tensors, rows, strict=True):
            tensor.copy_(row)

    rb.storage.store.replace(state, fill)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 11, 12, 13, 29])
def test_another_store_goes_on_as_the_first_one_would(kind, n):
    first, second = (buffer(kind) for _ in range(2))
    for rb in (first, second):
        rb.extend(torch.arange(5.0) + 100)  # the second one held other rows, and more of them
    first.empty()
    if n:
        first.extend(torch.arange(float(n)))
    put(second, *saved(first))
    for step in range(4):
        assert second.storage.extent() == first.storage.extent()
        assert second.write_count == first.write_count == n + 5 * step
        assert torch.equal(second[:], first[:])
        for rb in (first, second):
            rb.extend(torch.arange(5.0) + 1000 * step)


@given(st.data())
def test_the_order_of_writes_survives(data):
    first, second = buffer("private", 8), buffer("private", 8)
    for rb in (first, second):
        rb.extend(torch.zeros(2))
    for _ in range(data.draw(st.integers(0, 12))):
        if data.draw(st.booleans()):
            first.extend(torch.zeros(data.draw(st.integers(1, 9))))
        else:
            first[data.draw(st.integers(0, len(first) - 1))] = torch.ones(())
    before = second.storage.store.core.next_ticket
    put(second, *saved(first))
    live = torch.arange(len(first))
    ours, theirs = (rb.storage.store.tickets_of(live) for rb in (first, second))
    assert torch.equal(ours.argsort(), theirs.argsort())
    assert theirs.min() >= before  # none of an earlier draw matches


def test_void_rows_stay_void():
    first, second = buffer("private"), buffer("private")
    for rb in (first, second):
        rb.extend(torch.arange(6.0))
    state, rows = saved(first)
    state.numbers[2] = state.writes[2] = 0
    put(second, state, rows)
    assert len(second) == 5
    assert second.storage.extent().holes.tolist() == [2]
    assert 2.0 not in second.sample(500)
    second.extend(torch.arange(12.0))
    assert len(second) == 12


def test_priorities_begin_anew_and_windows_follow_the_rows():
    def made():
        return buffer("private", sampler=SliceSampler(slice_len=2, end_key="done"), generator=torch.Generator())

    first, second = made(), made()
    first.extend(TensorDict({"x": torch.arange(20), "done": torch.arange(20) % 5 == 4}, [20]))
    second.extend(TensorDict({"x": torch.arange(9), "done": torch.ones(9, dtype=torch.bool)}, [9]))
    with pytest.raises(RuntimeError):
        second.sample(8)
    put(second, *saved(first))
    for rb in (first, second):
        rb.set_rng(torch.Generator().manual_seed(3))
    assert torch.equal(first.sample(64)["x"], second.sample(64)["x"])

    ranked = buffer("directory", sampler=PrioritizedSampler(12, 1.0, 1.0))
    ranked.extend(torch.arange(12.0))
    ranked.update_priority(torch.arange(12), torch.arange(12.0) * 100)
    state, rows = saved(ranked)
    put(ranked, state, rows)
    assert len(set(ranked.storage.store.indexes["main", "priorities"].leaves(12).tolist())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_inside_leaves_an_empty_store(kind):
    rb = buffer(kind)
    rb.extend(torch.arange(12.0))
    state, _ = saved(rb)

    def fail(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rb.storage.store.replace(state, fail)
    assert len(rb) == 0
    assert not rb.storage.store.core.paused
    rb.extend(torch.arange(3.0))
    assert rb[:].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s._replace(clock=3), "beyond the counter"),
        (lambda s: s._replace(clock=0), "ticket counter"),
        (lambda s: s._replace(clock=1 << 60), "ticket counter"),
        (lambda s: s._replace(numbers=s.numbers[:-1]), "expected 1 lanes and 12 rows"),
        (lambda s: s._replace(numbers=-s.numbers), "beyond the counter"),
        (lambda s: s._replace(lanes=torch.tensor([[13, 13, 0, 0]])), "more live rows"),
        (lambda s: s._replace(lanes=torch.tensor([[12, 6, 0, 0]])), "fewer live rows"),
        (lambda s: s._replace(lanes=torch.tensor([[-1, 0, 0, 0]])), "negative"),
        (lambda s: s._replace(lanes=torch.tensor([[2, 2, 0, 0]])), "not live"),
    ],
)
def test_a_state_that_no_store_has_is_refused_before_anything_changes(change, message):
    rb = buffer("private")
    rb.extend(torch.arange(12.0))
    state, _ = saved(rb)
    with pytest.raises(ValueError, match=message):
        rb.storage.store.replace(change(state), pytest.fail)
    assert rb[:].tolist() == list(range(12))


@pytest.mark.parametrize("kind", KINDS)
def test_writers_wait_and_readers_do_not(kind):
    rb = buffer(kind)
    rb.extend(torch.arange(12.0))
    done = threading.Event()

    def write():
        rb.add(torch.tensor(50.0))
        rb[3] = torch.tensor(51.0)
        rb.empty()
        done.set()

    writer = threading.Thread(target=write)
    store = rb.storage.store
    with store.paused(), store.paused():
        writer.start()
        assert not done.wait(0.05)
        assert rb[:].tolist() == list(range(12))
        assert len(rb.sample(5)) == 5
    writer.join(60)
    assert done.is_set()


def test_who_waits_in_vain_is_told_so():
    rb = buffer("private")
    rb.extend(torch.arange(12.0))
    before = native.wait_limit()
    native._core.set_wait_limit(0.02)
    try:
        with (
            rb.storage.store.paused(),
            pytest.raises(
                WriterStalled, match="this process has paused the store, to save or load it, for 20 ms.*Checkpointer"
            ),
        ):
            rb.add(torch.tensor(1.0))
    finally:
        native._core.set_wait_limit(before)
    rb.add(torch.tensor(1.0))


def test_a_writer_is_told_which_process_saves():
    rb = buffer("shared")
    rb.extend(torch.arange(12.0))
    (said, saying), (go_on, going) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(going)  # so that the end of the other process is heard of
        with rb.storage.store.paused():
            os.write(saying, b"x")
            os.read(go_on, 1)
        os._exit(0)
    assert os.read(said, 1) == b"x"
    before = native.wait_limit()
    native._core.set_wait_limit(0.02)
    try:
        with pytest.raises(WriterStalled, match=f"process {pid} has paused the store"):
            rb.add(torch.tensor(1.0))
        with pytest.raises(WriterStalled, match=f"process {pid} has paused the store"), rb.storage.store.paused():
            pass
    finally:
        native._core.set_wait_limit(before)
        os.close(going)
        assert os.waitpid(pid, 0)[1] == 0
    rb.add(torch.tensor(1.0))
    for fd in (said, saying, go_on):
        os.close(fd)


@pytest.mark.parametrize("replacing", [False, True])
def test_who_dies_with_a_store_paused_holds_nobody_up(replacing):
    rb = buffer("shared")
    rb.extend(torch.arange(12.0))
    state, _ = saved(rb)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = rb.storage.store

        def wait(_):
            os.write(write, b"x")
            signal.pause()

        if replacing:
            store.replace(state, wait)
        with store.paused():
            wait(None)
    assert os.read(read, 1) == b"x"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    limit = Limit(20)
    rb.add(torch.tensor(77.0))
    limit.check("going on")
    assert len(rb) == (1 if replacing else 12)
    os.close(read), os.close(write)


@pytest.mark.parametrize("survivor", [True, False])
@pytest.mark.parametrize("at", ["scan", "restore"])
def test_who_dies_before_the_priorities_are_there_leaves_an_empty_store(tmp_path, at, survivor):
    """Not rows that no sampler finds, or with priorities that nobody gave them."""
    saved_one = ReplayBuffer(storage=LazyTensorStorage(12), sampler=PrioritizedSampler(12, 0.7, 0.5))
    saved_one.extend(torch.arange(12.0))
    saved_one.update_priority(torch.arange(12), torch.arange(12) + 1.0)
    state = saved_one.state_dict()

    def used():
        storage = LazyMemmapStorage(12, scratch_dir=tmp_path / "store")
        rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(12, 0.7, 0.5))
        rb.extend(torch.arange(3.0))
        return rb

    rb = used() if survivor else None
    pid = os.fork()
    if pid == 0:
        mine = used() if rb is None else rb
        setattr(Indexes if at == "scan" else PriorityIndex, at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        mine.load_state_dict(state)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    if rb is None:
        rb = ReplayBuffer.open(tmp_path / "store")
    rb.add(torch.tensor(77.0))
    assert len(rb) == 1
    assert set(rb.sample(20).tolist()) == {77.0}
    rb.close()


@pytest.mark.filterwarnings("ignore:this process was forked")
def test_a_child_forked_while_a_thread_has_the_store_paused_can_write():
    rb = buffer("private")
    rb.extend(torch.arange(12.0))
    inside, leave = threading.Event(), threading.Event()

    def pause():
        with rb.storage.store.paused():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=pause)
    thread.start()
    inside.wait()
    pid = os.fork()
    if pid == 0:
        rb.add(torch.tensor(1.0))
        with rb.storage.store.paused():
            os._exit(17)
    _, status = os.waitpid(pid, 0)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 17
