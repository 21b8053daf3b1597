"""An interrupt while a batch is queued, and calls of several threads: the ring of commands stays in step with the device."""

import threading

import pytest

from engram import DeviceLoader, LazyMemmapStorage
from tests.device import test_direct
from tests.device.test_direct import pair, same, steps

device = test_direct.device


@pytest.mark.parametrize("queued", [False, True])
def test_an_interrupt_while_a_batch_is_queued(device, queued):
    here, there = pair()
    reading = DeviceLoader(here, "cuda")
    batches = iter(reading)
    assert same(next(batches), there.sample())
    graph = reading._direct._graph
    replay = graph.replay

    def interrupted():
        graph.replay = replay
        if queued:
            replay()
        raise KeyboardInterrupt

    graph.replay = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    there.sample()  # the batch that was interrupted
    batches = iter(reading)
    for _ in range(2):
        assert same(next(batches), there.sample())
    assert not device.faults


def test_an_interrupt_while_rows_are_sent(device, tmp_path):
    here, there = pair(
        storage=lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / str(len(list(tmp_path.iterdir()))))
    )
    reading = DeviceLoader(here, "cuda", transport="resident")
    batches = iter(reading)
    assert same(next(batches), there.sample())
    sender = reading._direct._sender

    def interrupted(*_):
        del sender._replace
        raise KeyboardInterrupt

    for rb in (here, there):
        rb[range(20)] = steps(20) * 3
    sender._replace = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    there.sample()
    assert same(next(iter(reading)), there.sample())


def test_one_thread_at_a_time_queues(device):
    """Another thread waits until a batch is queued: the chain's own memory is that of one batch."""
    here, _ = pair()
    reader = next(iter([DeviceLoader(here, "cuda")]))._direct
    graph, order = reader._graph, []
    replay, began, go_on = graph.replay, threading.Event(), threading.Event()

    def slow():
        graph.replay = replay
        began.set()
        assert go_on.wait(60)
        order.append("first")
        replay()

    graph.replay = slow
    first = threading.Thread(target=lambda: reader.read(return_info=False))
    first.start()
    assert began.wait(60)
    second = threading.Thread(target=lambda: (reader.read(return_info=False), order.append("second")))
    second.start()
    second.join(0.2)
    assert order == []
    go_on.set()
    first.join(60)
    second.join(60)
    assert order == ["first", "second"]
    assert reader._commands.number == int(reader._chain.counters[0]) == 2
