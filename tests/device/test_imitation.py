"""The imitated device: it does what CUDA documents, and notices what CUDA would not forgive."""

import gc
import threading

import pytest
import torch

from engram.store.device.accelerator import Accelerator, DriverError, HostMemory
from tests.device.imitation import Fault, Imitation, place
from tests.device.memory import PAGE, block


@pytest.fixture
def late():
    return Imitation(held=True)


def test_it_has_what_an_accelerator_has():
    """A call that only the real one has would go to a GPU that is not there."""
    own = {name for name in vars(Accelerator) if not name.startswith("__")}
    unused = {"_attribute", "_driven", "_missing_on_device", "_module", "up", "down", "check_not_capturing"}
    assert own - unused <= set(vars(Imitation)) | {"captures"}


def test_work_is_done_in_the_order_of_a_stream_and_when_it_is_released(late):
    done, one, two = [], late.stream(), late.stream()
    for number in range(3):
        with late.on(one):
            late.launch(done.append, ("one", number))
        with late.on(two):
            late.launch(done.append, ("two", number))
    assert done == []
    late.release(two.name)
    assert done == [("two", 0), ("two", 1), ("two", 2)]
    late.release()
    assert done[3:] == [("one", 0), ("one", 1), ("one", 2)]
    assert late.counts["launch"] == 6


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_shows(late, waits):
    value, found, other = late.on_device(torch.zeros(1)), [], late.stream()
    late.launch(value.fill_, 5.0)
    if waits:
        late.wait(other, late.mark(late.current()))
    with late.on(other):
        late.launch(lambda value: found.append(value.item()), value)
    late.release(other.name)
    late.release()
    assert found == [5.0 if waits else 0.0]


def test_events(late):
    event = late.mark(late.current())
    assert not event.query()
    late.release()
    assert event.query()
    event = late.mark(late.current())
    event.synchronize()
    assert event.query()
    assert late.counts["sync"] == 1
    tardy = Imitation(late=True)
    event = tardy.mark(tardy.current())
    assert (event.reached, event.query()) == (True, False)


def test_a_wait_without_end_is_a_fault(late):
    one, two = late.stream(), late.stream()
    missing = late.mark(late.stream())
    late._streams["stream 4"].work.clear()
    late.wait(one, missing)
    with pytest.raises(Fault, match="never"):
        late.finish(one)
    assert late.faults
    late.finish(two)


def test_copies_are_made_when_the_device_comes_to_them(late):
    source = late.memory.empty((2,), torch.int64)
    source[:] = torch.tensor([1, 2])
    sent = late.send(source)
    received = late.receive(sent)
    assert sent.tolist() != [1, 2]
    assert (late.holds(sent), late.holds(received), place(received)) == (True, False, "pinned")
    source[0] = 7  # too early: the copy has not been made
    late.release()
    assert sent.tolist() == received.tolist() == [7, 2]
    assert late.holds(sent[1:].view(1, 1)), "a view is where its storage is"


def test_copies_that_would_not_be_asynchronous_are_faults(late):
    with pytest.raises(Fault, match="not pinned"):
        late.send(torch.zeros(3))
    with pytest.raises(Fault, match="copy from"):
        late.receive(torch.zeros(3))
    with pytest.raises(Fault, match="record_stream"):
        late.keep(torch.zeros(3), late.up)
    assert len(late.faults) == 3


def test_a_kernel_with_a_tensor_of_another_device():
    one, two = Imitation("cuda:0"), Imitation("cuda:1")
    there = two.on_device(torch.zeros(3))
    for tensor in (there, torch.zeros(3)):
        with pytest.raises(ValueError, match=r"at 1.*cannot be accessed.*cuda:0"):
            one.launch(lambda *_: None, 4, tensor)
    two.launch(lambda *_: None, 4, there)


# ---- captures ------------------------------------------------------------------------------------------------------------------


def test_a_capture_runs_nothing_and_each_replay_all(late):
    value = late.on_device(torch.zeros(1))
    graph = late.capture(lambda: late.launch(value.add_, 1.0))
    late.release()
    assert value.item() == 0
    graph.replay()
    graph.replay()
    assert value.item() == 0
    late.finish()
    assert value.item() == 2
    assert (late.counts["capture"], late.counts["replay"]) == (1, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda device: device.finish(),
        lambda device: device.finish(device.up),
        lambda device: device.events[0].query(),
        lambda device: device.events[0].synchronize(),
    ],
)
@pytest.mark.parametrize("hides", [True, False])
def test_a_call_that_synchronizes_breaks_a_capture(late, call, hides):
    late.mark(late.current())
    before = late.current()

    def work():
        assert late.capturing()
        try:
            call(late)
        except RuntimeError:
            if not hides:
                raise

    with pytest.raises(RuntimeError, match="when stream is capturing"):
        late.capture(work)
    assert late.current() is before
    assert (late.captures, late.capturing(), late.counts["capture"]) == ([], False, 0)


def test_a_capture_is_of_one_thread(late):
    found = []

    def work():
        thread = threading.Thread(target=lambda: found.append((late.capturing(), late.finish())))
        thread.start()
        thread.join()

    late.capture(work)
    assert found == [(False, None)]


def test_a_capture_that_is_refused(late):
    late.capture_refused = "CUDA error: operation not supported"
    with pytest.raises(RuntimeError, match="not supported"):
        late.capture(lambda: None)


def test_a_call_that_must_go_through_the_host_says_why(late):
    late.check_not_capturing("extend", "it waits for writers")
    with pytest.raises(RuntimeError, match=r"extend: expected .* graph is captured .*: it waits for writers\. Call it"):
        late.capture(lambda: late.check_not_capturing("extend", "it waits for writers"))


# ---- memory of the host ----------------------------------------------------------------------------------------------------------


def test_registering_by_the_driver():
    device, memory = Imitation(), block()
    start = memory.data_ptr()
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        device.device_address(start)
    device.register(start, 2 * PAGE)
    for address in (start, start + PAGE):  # the page before may be mapped or not
        with pytest.raises(DriverError, match="712"):
            device.register(address, 2 * PAGE)
    device.register(start + 2 * PAGE, 2 * PAGE)
    assert device.memory_at(device.device_address(start), 4 * PAGE).tolist() == memory.tolist()
    with pytest.raises(DriverError, match="713"):
        device.unregister(start + PAGE)
    device.unregister(start)
    for address in (device.device_address(start + 2 * PAGE) - 1, start + 2 * PAGE):
        with pytest.raises(Fault, match="illegal address"):
            device.memory_at(address, 2)
    device.register_foreign(start, PAGE)
    with pytest.raises(Fault, match="another library"):
        device.unregister(start)
    assert device.counts["register"] == 2


def test_memory_that_is_gone():
    device, memory = Imitation(), block(1_000)
    start = memory.data_ptr()
    device.register(start, 1_000 * PAGE)
    address = device.device_address(start)
    del memory
    gc.collect()
    with pytest.raises(Fault, match="not mapped"):
        device.memory_at(address, 3)
    with pytest.raises(Fault, match="unmapped before"):
        device.unregister(start)
    with pytest.raises(DriverError):
        Imitation().register(start, PAGE)


@pytest.mark.parametrize("code", [1, 2, 801])
def test_refusals(code):
    device, memory = Imitation(), block()
    device.refuses = lambda address, nbytes: code
    with pytest.raises(DriverError) as raised:
        device.register(memory.data_ptr(), PAGE)
    assert raised.value.code == code
    assert device.regions == []


def test_pinned_memory_is_that_of_the_device():
    device = Imitation()
    assert isinstance(device.memory, HostMemory)
    ring = device.memory.empty((4,), torch.int64)
    address = device.device_address(ring.data_ptr())
    ring[2] = 6
    assert device.memory_at(address, 32).view(torch.int64)[2] == 6
    device.memory_at(address, 32).view(torch.int64)[1] = 5
    assert ring[1] == 5
    assert device.memory.is_pinned(device.memory.empty((3,), torch.float32))
    assert not device.memory.is_pinned(torch.zeros(3))
    assert device.room() == (device.free, device.total)
