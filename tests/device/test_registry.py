"""Registered memory: counted by pages, waited for, kept mapped, moved by forks; and what an imitated device notices otherwise."""

import collections
import gc
import mmap
import os
import threading
import traceback
import weakref

import pytest
import torch

from engram import ForkedHandle, LazyTensorStorage, ReplayBuffer
from engram.store.device import registry as module
from engram.store.device.registry import NotRegistered, Registry, _Span
from engram.store.memory import private_block
from tests.device.imitation import Fault, Imitation

PAGE = mmap.PAGESIZE


@pytest.fixture
def device():
    made = Imitation()
    yield made
    assert made.faults == []


@pytest.fixture
def held():
    """Its stream is held back."""
    made = Imitation(held={"MainThread"})
    yield made
    made.release()
    assert made.faults == []


@pytest.fixture
def registry():
    return Registry(available=lambda: 1 << 40)


def block(pages=4):
    """uint8 tensor of whole pages, private, its pages in memory."""
    made = private_block(pages * PAGE).tensor
    made.fill_(1)
    return made


def shared(tmp_path, pages=4, name="shared"):
    (tmp_path / name).write_bytes(bytes([1]) * pages * PAGE)
    return torch.from_file(str(tmp_path / name), shared=True, size=pages * PAGE, dtype=torch.uint8)


def read_later(device, registered, nbytes, at=0):
    """Queue a kernel that reads, and return where it puts what it finds."""
    registered.use()
    out, address = device.on_device(torch.zeros(nbytes, dtype=torch.uint8)), registered.addresses[at]
    device.launch(lambda out: out.copy_(device.memory_at(address, nbytes)), out)
    return out


# ---- counted by pages ----------------------------------------------------------------------------------------------------------


def test_the_device_reads_what_is_registered(device, registry):
    memory = block()
    memory[5] = 9
    with registry.register(device, [memory]) as registered:
        assert registered.addresses == (device.device_address(memory.data_ptr()),)
        assert registered.addresses != (memory.data_ptr(),)
        assert read_later(device, registered, 6).tolist() == [1, 1, 1, 1, 1, 9]
        assert registry.nbytes == 4 * PAGE
    assert (registered.closed, registry.nbytes, device.regions) == (True, 0, [])
    registered.close()
    assert device.counts["unregister"] == 1


def test_a_store_of_two_users_is_registered_once(device, registry):
    memory = block()
    one, two = registry.register(device, [memory]), registry.register(device, [memory])
    assert device.counts["register"] == 1
    assert one.addresses == two.addresses
    one.close()
    assert read_later(device, two, 3).tolist() == [1, 1, 1]
    two.close()
    assert device.regions == []


def test_two_blocks_that_share_a_page(device, registry):
    whole = block(3)
    cut = PAGE + 100
    one, two = registry.register(device, [whole[:cut]]), registry.register(device, [whole[cut:]])
    assert sorted((region.end - region.start) // PAGE for region in device.regions) == [1, 2]
    assert read_later(device, two, 10).tolist() == [1] * 10
    one.close()
    assert read_later(device, two, 10).tolist() == [1] * 10
    two.close()
    assert device.regions == []


def test_blocks_of_one_call_that_share_a_page_are_one(device, registry):
    whole = block(3)
    registered = registry.register(device, [whole[10:20], whole[PAGE - 5 : PAGE + 5], whole[20:30]])
    assert [(region.start, region.end - region.start) for region in device.regions] == [(whole.data_ptr(), 2 * PAGE)]
    base = device.device_address(whole.data_ptr())
    assert registered.addresses == (base + 10, base + PAGE - 5, base + 20)
    registered.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_every_order_of_closing(device, registry, order):
    whole = block(6)
    parts = [whole[: 2 * PAGE + 8], whole[2 * PAGE + 8 : 4 * PAGE + 8], whole[4 * PAGE + 8 :]]
    handles = [registry.register(device, [part]) for part in (parts[1], parts[0], parts[2])]
    del whole, parts
    for number in order:
        handles[number].close()
        for handle in handles:
            if not handle.closed:
                assert read_later(device, handle, 2 * PAGE - 8).tolist() == [1] * (2 * PAGE - 8)
    assert device.regions == []


def test_a_gap_between_two_that_are_there(device, registry):
    whole = block(5)
    ends = [registry.register(device, [whole[:PAGE]]), registry.register(device, [whole[4 * PAGE :]])]
    middle = registry.register(device, [whole])
    assert sorted((region.end - region.start) // PAGE for region in device.regions) == [1, 1, 3]
    for handle in (*ends, middle):
        handle.close()
    assert device.regions == []


def test_fields_that_lie_together_and_fields_without_bytes(device, registry):
    rows = block(2)[: 2 * PAGE].view(-1, 16)
    fields = [rows[:, :3], rows[:, 8:].view(torch.int64), torch.zeros(10, 0), torch.zeros(0)]
    registered = registry.register(device, fields)
    assert device.counts["register"] == 1
    assert registered.addresses[1] - registered.addresses[0] == 8
    assert registered.addresses[2:] == (0, 0)
    registered.close()


def test_nothing_to_register(device, registry):
    registered = registry.register(device, [])
    assert (registered.addresses, registered.use()) == ((), False)


def test_thousands_of_fields(device, registry):
    whole = block(2_000)
    fields = [whole[at * PAGE : at * PAGE + 7] for at in range(2_000)]
    registered = registry.register(device, fields)
    assert len(set(registered.addresses)) == 2_000
    registered.use()
    registered.close()
    assert device.regions == []


def test_an_added_field(device, registry):
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=4)
    rb.extend({"a": torch.arange(100)})
    store = rb.storage.store
    before = registry.register(device, store.tensors)
    rb.add_field("b", torch.tensor(0.0), fill=7.0)
    after = registry.register(device, store.tensors)
    assert after.addresses[:1] == before.addresses
    assert device.counts["register"] == 2
    out = read_later(device, after, 4, at=1)
    assert out.view(torch.float32).item() == 7.0
    rb.close()
    del rb, store
    gc.collect()
    assert read_later(device, before, 16).view(torch.int64).tolist() == [0, 1]
    before.close()
    after.close()
    assert device.regions == []


# ---- ends -----------------------------------------------------------------------------------------------------------------------


def test_memory_is_unregistered_after_the_work_that_reads_it(held, registry):
    memory = block()
    registered = registry.register(held, [memory])
    out = read_later(held, registered, 3)
    assert out.tolist() == [0, 0, 0]
    registered.close()
    assert out.tolist() == [1, 1, 1]
    assert held.counts["sync"] == 1


def test_each_stream_is_waited_for(registry):
    device = Imitation(held=True)
    memory, streams = block(), [device.stream() for _ in range(3)]
    one, two = registry.register(device, [memory]), registry.register(device, [memory])
    outs = []
    for handle, stream in ((one, streams[0]), (two, streams[1]), (one, streams[2])):
        with device.on(stream):
            outs += [read_later(device, handle, 1) for _ in range(3)]
    assert device.counts["sync"] == device.counts["event"] == 0, "uses cost the device nothing"
    one.close()
    assert device.counts["sync"] == 0
    two.close()
    assert [out.item() for out in outs] == [1] * 9
    assert device.regions == device.faults == []


def test_a_registry_that_does_not_wait_is_noticed(registry, monkeypatch):
    """The control of those tests."""
    monkeypatch.setattr(_Span, "finish", lambda span: None)
    device = Imitation(held=True)
    registered = registry.register(device, [block()])
    read_later(device, registered, 3)
    registered.close()
    with pytest.raises(Fault, match="not registered"):
        device.release()


def test_a_registry_that_does_not_merge_is_noticed(registry, monkeypatch):
    def only_own(registry, start, end):
        return [span for span in registry._spans if span.start == start // PAGE * PAGE]

    monkeypatch.setattr(Registry, "_gaps", lambda registry, start, end: [(start, end)])
    monkeypatch.setattr(Registry, "_over", only_own)
    device, whole = Imitation(), block(3)
    first = registry.register(device, [whole[: PAGE + 100]])
    with pytest.raises(NotRegistered, match="does not see all of it"):
        registry.register(device, [whole[PAGE + 100 :]])
    first.close()
    one, two = registry.register(device, [whole]), registry.register(device, [whole[PAGE:]])
    one.close()
    with pytest.raises(Fault, match="not registered"):
        read_later(device, two, 10)


def test_a_registry_that_keeps_no_memory_is_noticed(registry, monkeypatch):
    class Forgetful(_Span):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tensors = collections.deque(maxlen=0)

    device, memory = Imitation(), block(1_000)
    monkeypatch.setattr(module, "_Span", Forgetful)
    registered = registry.register(device, [memory])
    del memory
    with pytest.raises(Fault, match="not mapped"):
        read_later(device, registered, 3)
    with pytest.raises(Fault, match="unmapped before"):
        registered.close()


def test_memory_stays_mapped_until_it_is_unregistered(held, registry):
    memory = block(1_000)
    gone = weakref.ref(memory)
    registered = registry.register(held, [memory])
    out = read_later(held, registered, 3)
    del memory
    gc.collect()
    assert gone() is not None
    del registered
    gc.collect()
    assert (gone(), out.tolist(), held.regions) == (None, [1, 1, 1], [])


def test_a_store_that_is_closed_and_forgotten_first(device, registry):
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000, device="cpu"), batch_size=4)
    rb.extend({"a": torch.arange(100)})
    registered = registry.register(device, rb.storage.store.tensors)
    rb.close()
    del rb
    gc.collect()
    assert read_later(device, registered, 16).view(torch.int64).tolist() == [0, 1]
    registered.close()
    assert device.regions == []


def test_a_handle_that_is_forgotten_and_its_registry_in_a_cycle(device, registry):
    registered = registry.register(device, [block()])
    cycle = [registered]
    cycle.append(cycle)
    del registered, cycle
    gc.collect()
    assert device.regions == []


def test_a_finalizer_while_the_registry_is_busy(device, registry):
    """Garbage may be collected in the middle of a registration, on the same thread."""
    one = [registry.register(device, [block()])]

    def refuses(address, nbytes):
        one.clear()
        assert len(device.regions) == 1, "it does not wait for a lock that its own thread holds"

    device.refuses = refuses
    two = registry.register(device, [block()])
    assert len(device.regions) == 1
    two.close()
    assert device.regions == []


def test_handles_of_many_threads(device, registry):
    memory, errors = block(8), []

    def work(number):
        try:
            for turn in range(50):
                part = memory[(number + turn) % 7 * PAGE :][: PAGE + 10]
                with registry.register(device, [part]) as registered:
                    assert read_later(device, registered, 3).tolist() == [1, 1, 1]
        except BaseException as error:  # noqa: BLE001 - the test raises it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    registry.settle()
    assert errors == device.regions == []


def test_use_after_close(device, registry):
    registered = registry.register(device, [block()])
    registered.close()
    with pytest.raises(RuntimeError, match="use: .*closed"):
        registered.use()


# ---- refused --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "cause"), [(1, "pin these pages"), (2, "no memory left"), (801, "file on a disk")])
def test_a_refusal_says_why_and_leaves_nothing(device, registry, code, cause):
    memories = [block(), block(), block()]
    last = max(map(torch.Tensor.data_ptr, memories))
    device.refuses = lambda address, nbytes: code if address == last else 0
    with pytest.raises(NotRegistered, match=rf"{code} .*{cause}"):
        registry.register(device, memories)
    assert (device.regions, registry.nbytes, registry.waiting) == ([], 0, 0)
    gone = weakref.ref(memories[0])
    del memories
    assert gone() is None
    device.refuses = lambda address, nbytes: 0
    registry.register(device, [block()]).close()


def test_a_refusal_leaves_what_others_have(device, registry):
    whole = block()
    one = registry.register(device, [whole[:PAGE]])
    device.refuses = lambda address, nbytes: 2
    with pytest.raises(NotRegistered):
        registry.register(device, [whole])
    assert read_later(device, one, 3).tolist() == [1, 1, 1]
    one.close()
    assert device.regions == []


def test_too_little_memory(device):
    registry = Registry(available=lambda: 10 * PAGE)
    touched, untouched = block(64), private_block(64 * PAGE).tensor
    registry.register(device, [touched]).close()  # takes no memory that is not taken already
    with pytest.raises(NotRegistered, match=r"pins all rows: expected 0\.\d MiB, got 0\.0 MiB that are free"):
        registry.register(device, [untouched])
    untouched[: 56 * PAGE] = 1
    registry.register(device, [untouched]).close()
    assert device.regions == []


def test_rows_on_another_device(device, registry):
    with pytest.raises(NotRegistered, match="some on meta"):
        registry.register(device, [block(), torch.zeros(3, device="meta")])


def test_what_somebody_else_registered_is_used_and_left(device, registry):
    memory = block()
    device.register_foreign(memory.data_ptr(), 4 * PAGE)
    registered = registry.register(device, [memory])
    assert read_later(device, registered, 3).tolist() == [1, 1, 1]
    registered.close()
    assert [region.foreign for region in device.regions] == [True]


@pytest.mark.parametrize("pages", [(0, 1), (3, 4), (1, 2)])
def test_what_somebody_else_registered_in_part(device, registry, pages):
    memory = block()
    device.register_foreign(memory.data_ptr() + pages[0] * PAGE, (pages[1] - pages[0]) * PAGE)
    with pytest.raises(NotRegistered, match="does not see all of it"):
        registry.register(device, [memory])
    assert [region.foreign for region in device.regions] == [True]


def test_pieces_that_the_device_sees_apart(device, registry):
    whole = block(3)
    device.apart = 1 << 30
    one = registry.register(device, [whole[: PAGE + 100]])
    with pytest.raises(NotRegistered, match="one piece"):
        registry.register(device, [whole[PAGE + 100 :]])
    assert read_later(device, one, 3).tolist() == [1, 1, 1]
    one.close()
    assert device.regions == []


def test_readonly(device, registry):
    registry.register(device, [block()], readonly=True).use()
    with registry.register(device, [block()], readonly=True):
        assert [region.readonly for region in device.regions] == [True]


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
    device._enter = lambda call: (_ for _ in ()).throw(module.DriverError(call, 900, "CAPTURE"))
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
