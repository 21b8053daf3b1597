"""Registered memory: counted by pages, waited for, kept mapped; and what an imitated device notices otherwise."""

import contextlib
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.store.device import accelerator as module
from engram.store.device.accelerator import NotRegistered, Registry, _Span
from engram.store.memory import private_block
from tests import fresh
from tests.device.imitation import Fault, Imitation
from tests.device.memory import PAGE, block, read_later

# ---- counted by pages ----------------------------------------------------------------------------------------------------------


def test_the_device_reads_what_is_registered(device, registry):
    memory = block()
    memory[5] = 9
    with contextlib.closing(registry.register(device, [memory])) as registered:
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
            self.tensors = weakref.WeakValueDictionary()

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


def in_ram(folder):
    return ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=4), False


def in_shared_memory(folder):
    return in_ram(folder)[0].share(), False


def in_files(folder):
    return ReplayBuffer(storage=LazyMemmapStorage(1_000, scratch_dir=folder / "rb"), batch_size=4), False


def that_is_read(folder):
    rb, _ = in_files(folder)
    rb.extend({"a": torch.arange(100), "b": torch.zeros(100, 1_000)})
    rb.close()
    return ReplayBuffer.open(folder / "rb", readonly=True, batch_size=4), True


@pytest.mark.parametrize("make", [in_ram, in_shared_memory, in_files, that_is_read])
@pytest.mark.parametrize(
    "order", ["close store, forget handle", "forget store, close handle", "close handle, forget store"]
)
def test_stores_and_handles_end_in_any_order(device, registry, tmp_path, make, order):
    rb, readonly = make(tmp_path)
    if not readonly:
        rb.extend({"a": torch.arange(100), "b": torch.zeros(100, 1_000)})
    tensors = [*rb.storage.store.tensors, *rb.storage.store.control_memory]
    handle = registry.register(device, tensors, readonly=readonly)
    assert {region.readonly for region in device.regions} == {readonly}
    del tensors
    for step in order.split(", "):
        if step == "close store":
            rb.close()
        if step.endswith("store"):
            del rb
        elif step == "close handle":
            handle.close()
        else:
            del handle
        gc.collect()
        if "handle" in locals() and not handle.closed:
            assert read_later(device, handle, 16).view(torch.int64).tolist() == [0, 1]
    assert device.regions == []
    assert device.counts["register"] == device.counts["unregister"] > 0


def test_the_end_of_a_program_unregisters_after_the_work():
    out = fresh.run(
        """
        import sys, weakref
        sys.path.insert(0, root)
        from engram.store.device.accelerator import REGISTRY
        from tests.device.imitation import Imitation
        from tests.device.memory import block, read_later

        device = Imitation(held=True)
        weakref.finalize(device, lambda: print(out.tolist(), len(device.regions), device.faults))  # the last one of all
        registered = REGISTRY.register(device, [block()])
        out = read_later(device, registered, 3)
        """,
        root=str(Path(__file__).parents[2]),
    )
    assert out.strip() == "[1, 1, 1] 0 []"


def test_a_handle_that_is_forgotten_and_its_registry_in_a_cycle(device, registry):
    registered = registry.register(device, [block()])
    cycle = [registered]
    cycle.append(cycle)
    del registered, cycle
    gc.collect()
    assert device.regions == []


def test_short_users_beside_a_long_one_leave_nothing(device, registry):
    memory = block()
    with contextlib.closing(registry.register(device, [memory])):
        for _ in range(20):
            registry.register(device, [memory[:100]]).close()
        (span,) = registry._spans
        assert len(span.tensors) == 2


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
                with contextlib.closing(registry.register(device, [part])) as registered:
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
    with pytest.raises(NotRegistered, match="pins all rows: expected 262 kB, got 41 kB that are free"):
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
    with contextlib.closing(registry.register(device, [block()], readonly=True)):
        assert [region.readonly for region in device.regions] == [True]
