"""Registered memory beside captures, other devices and forks."""

import contextlib
import gc
import os
import threading
import traceback

import pytest
import torch

from engram import ForkedHandle
from engram.store.device.accelerator import DriverError, NotRegistered
from tests.device.imitation import Fault, Imitation
from tests.device.memory import PAGE, block, read_later


def shared(tmp_path, pages=4, name="shared"):
    (tmp_path / name).write_bytes(bytes([1]) * pages * PAGE)
    return torch.from_file(str(tmp_path / name), shared=True, size=pages * PAGE, dtype=torch.uint8)


# ---- captures -------------------------------------------------------------------------------------------------------------------


def test_a_finalizer_during_a_capture_waits_for_its_end(device, registry):
    handles = [registry.register(device, [block()])]

    def work():
        handles.clear()
        gc.collect()
        assert len(device.regions) == registry.waiting == 1

    device.capture(work)
    assert device.counts["refused in a capture"] == 0
    other = registry.register(device, [block()])  # or a use, or a close
    assert (len(device.regions), registry.waiting) == (1, 0)
    other.close()
    assert device.regions == []


def test_a_capture_of_another_thread(device, registry):
    handles = [registry.register(device, [block()])]

    def close():
        handles.pop().close()

    def work():
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()

    device.capture(work)
    assert device.counts["refused in a capture"] == 0
    assert registry.waiting == 1
    registry.settle()
    assert device.regions == []


def test_a_capture_that_the_driver_alone_knows_of(device, registry):
    """By another library: unregistering fails, and is tried again."""
    registered = registry.register(device, [block()])
    memory, device.unregister = device.unregister, lambda address: device._enter("cuMemHostUnregister")
    device.captures = type("Hidden", (list,), {"__len__": lambda self: 0})([1])
    device._enter = lambda call: (_ for _ in ()).throw(DriverError(call, 900, "CAPTURE"))
    registered.close()
    assert registry.waiting == 1
    del device._enter
    device.captures, device.unregister = [], memory
    registry.settle()
    assert device.regions == []


def test_what_a_capture_gave_up_can_be_taken_again(device, registry):
    memory = block()
    handles = [registry.register(device, [memory])]
    device.capture(handles.clear)
    again = registry.register(device, [memory])
    assert read_later(device, again, 3).tolist() == [1, 1, 1]
    assert device.counts["register"] == 1
    again.close()
    assert device.regions == []


def test_memory_that_a_graph_reads_is_waited_for_on_all_streams(registry):
    device = Imitation(held={"somewhere"})
    registered, outs = registry.register(device, [block()]), []
    graph = device.capture(lambda: outs.append(read_later(device, registered, 3)))
    with device.on(device._named("somewhere")):
        graph.replay()
    registered.close()
    assert outs[0].tolist() == [1, 1, 1]
    assert device.regions == device.faults == []
    with pytest.raises(Fault, match="not registered"):
        graph.replay()


def test_a_device_that_failed_keeps_its_memory(device, registry):
    registered = registry.register(device, [block()])
    registered.use()
    finish = device.finish

    def fails(stream=None):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device.finish = fails
    registered.close()
    assert (registry.waiting, len(device.regions)) == (1, 1)
    device.finish = finish
    registry.settle()
    assert device.regions == []


def test_an_interrupt_while_many_are_unregistered(device, registry):
    """Those that were are known to be, and the others are unregistered by the next call."""
    memories = [block() for _ in range(3)]
    registered = registry.register(device, memories)
    unregister, calls = device.unregister, []

    def interrupted(address):
        calls.append(address)
        if len(calls) == 2:
            raise KeyboardInterrupt
        unregister(address)

    device.unregister = interrupted
    with pytest.raises(KeyboardInterrupt):
        registered.close()
    assert len(device.regions) == registry.waiting == 2
    again = registry.register(device, memories)
    assert read_later(device, again, 3).tolist() == [1, 1, 1]
    again.close()
    registry.settle()
    assert device.regions == []


# ---- two devices ----------------------------------------------------------------------------------------------------------------


def test_two_devices(registry):
    one, two = Imitation("cuda:0", held=True), Imitation("cuda:1", held=True)
    two.regions = one.regions  # registrations are for all devices
    memory = block()
    first, second = registry.register(one, [memory]), registry.register(two, [memory])
    assert one.counts["register"] + two.counts["register"] == 1
    outs = [read_later(one, first, 3), read_later(two, second, 3)]
    first.close()
    assert len(one.regions) == 1
    second.close()
    assert [out.tolist() for out in outs] == [[1, 1, 1], [1, 1, 1]]
    assert one.regions == one.faults == two.faults == []


# ---- forks ----------------------------------------------------------------------------------------------------------------------


def fork(child=lambda: None):
    """Fork, let the child do something, and say whether that went well."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - it ends here
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_private_memory_is_registered_again_after_a_fork(device, registry):
    memory = block()
    registered = registry.register(device, [memory])
    fork()
    memory.fill_(2)
    assert device.memory_at(registered.addresses[0], 3).tolist() == [1, 1, 1], (
        "what the device sees has been moved away"
    )
    device.shift += PAGE
    before = registered.addresses
    assert registered.use() is True
    assert registered.addresses == (before[0] + PAGE,)
    assert read_later(device, registered, 3).tolist() == [2, 2, 2]
    assert registered.use() is False
    registered.close()
    assert device.regions == []
    assert (device.counts["register"], device.counts["unregister"]) == (2, 2)


def test_it_is_registered_again_after_the_work_that_reads_it_and_for_all_handles(held, registry):
    memory = block()
    one, two = registry.register(held, [memory]), registry.register(held, [memory])
    early = read_later(held, two, 3)
    fork()
    memory.fill_(2)
    assert one.use() is False, "to the same address"
    assert early.tolist() == [1, 1, 1]
    late = read_later(held, two, 3)
    assert held.counts["register"] == 2
    one.close()
    two.close()
    assert late.tolist() == [2, 2, 2]


@pytest.mark.parametrize("held", [True, False])
def test_memory_is_not_registered_again_before_work_is_queued(registry, held):
    """One thread asks for the addresses, the process forks, and another thread registers again before the first one has queued its work."""
    device, memory, done = Imitation(), block(), []
    one, two = registry.register(device, [memory]), registry.register(device, [memory])
    device.apart = 1 << 40  # from now on each registration is elsewhere

    def use():
        two.use()
        done.append(device.counts["register"])

    other = threading.Thread(target=use)
    with one.turn if held else contextlib.nullcontext():
        one.use()
        address = one.addresses[0]
        fork()
        other.start()
        other.join(0.2)
        assert done == ([] if held else [2])
        with contextlib.nullcontext() if held else pytest.raises(Fault, match="not registered"):
            device.launch(lambda: device.memory_at(address, 3))
    other.join()
    assert done == [2]
    assert one.use() is True
    assert read_later(device, one, 3).tolist() == [1, 1, 1]
    one.close()
    two.close()


def test_shared_memory_stays_registered(device, registry, tmp_path):
    memory = shared(tmp_path)
    registered = registry.register(device, [memory])
    fork()
    memory.fill_(2)
    assert registered.use() is False
    assert read_later(device, registered, 3).tolist() == [2, 2, 2]
    assert device.counts["register"] == 1
    registered.close()


def test_a_fork_and_then_a_refusal(device, registry):
    memory = block()
    one, two = registry.register(device, [memory]), registry.register(device, [memory])
    fork()
    device.refuses = lambda address, nbytes: 2
    for handle in (one, two, one):
        with pytest.raises(NotRegistered, match=r"after a fork: .*no memory left"):
            handle.use()
    device.refuses = lambda address, nbytes: 0
    three = registry.register(device, [memory])
    assert read_later(device, three, 3).tolist() == [1, 1, 1]
    for handle in (one, two, three):
        handle.close()
    assert device.regions == []


def test_a_fork_and_memory_of_somebody_else(device, registry):
    memory = block()
    device.register_foreign(memory.data_ptr(), 4 * PAGE)
    registered = registry.register(device, [memory])
    fork()
    with pytest.raises(NotRegistered, match="another part of this program"):
        registered.use()
    registered.close()


def test_a_fork_and_then_a_capture(device, registry):
    registered = registry.register(device, [block()])
    fork()
    with pytest.raises(RuntimeError, match=r"use: .*captured.*forked"):
        device.capture(registered.use)
    registered.use()
    registered.close()


def test_a_fork_while_memory_is_being_registered(device, registry):
    memory = block()
    device.refuses = lambda address, nbytes: fork()
    registered = registry.register(device, [memory])
    device.refuses = lambda address, nbytes: None
    registered.use()
    assert device.counts["register"] == 2
    registered.close()


def test_a_forked_child_refuses_and_unregisters_nothing(device, registry):
    registered, kept = registry.register(device, [block()]), registry.register(device, [block()])

    def child():
        with pytest.raises(ForkedHandle, match="forked"):
            registered.use()
        registered.close()
        nonlocal kept
        kept = None
        gc.collect()
        registry.settle()
        assert (registry.nbytes, device.counts["unregister"], len(device.regions)) == (0, 0, 2)
        assert device.counts["refused in a child"] == 0, "no call was made"
        fork(registry.settle)

    fork(child)
    registered.use()
    registered.close()
    kept.close()
    assert device.regions == []


def test_a_child_forked_without_hooks(device, registry, monkeypatch):
    """By native code."""
    registered = registry.register(device, [block()])
    monkeypatch.setattr(registry, "_pid", os.getpid() + 1)
    registered.close()
    assert (len(device.regions), device.counts["unregister"]) == (1, 0)
    monkeypatch.undo()
    registry.waiting = 1
    registry.settle()
    assert device.regions == []
