"""DeviceLoader: on the CPU, and on a device that is not there, whose streams do nothing until they are told to."""

import gc
import threading
import weakref

import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import (
    DeviceLoader,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PriorityError,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram._support.nested import tensors
from engram.device import loader, pinning
from tests.device.imitation import Imitation


def filled(n=20, *, cls=TensorDictReplayBuffer, batch_size=4, **kwargs):
    kwargs.setdefault("sampler", SamplerWithoutReplacement(shuffle=False))
    rb = cls(storage=LazyTensorStorage(100), batch_size=batch_size, **kwargs)
    rb.extend(TensorDict({"a": torch.arange(n), "n": {"b": torch.rand(n, 2)}}, [n]))
    return rb


# ---- on the CPU ------------------------------------------------------------------------------------------------------------


def test_on_the_cpu_it_is_the_buffers_own_iteration():
    rb = filled()
    before = threading.active_count()
    expected = [batch["a"].tolist() for batch in rb]
    assert [batch["a"].tolist() for batch in DeviceLoader(rb, "cpu")] == expected
    assert threading.active_count() == before
    iterator = iter(DeviceLoader(rb, "cpu", depth=5))
    next(iterator)
    assert rb.sampler.state_dict()["visited"] == 4, "nothing was drawn ahead"


def test_what_is_there_passes_through():
    class Same:
        batch_size = 3
        sampler = None
        batch = TensorDict({"a": torch.zeros(3)}, [3])

        def __iter__(self):
            return iter([self.batch])

    assert next(iter(DeviceLoader(Same(), "cpu"))) is Same.batch


def test_with_info():
    batches = list(DeviceLoader(filled(6, cls=ReplayBuffer), "cpu", return_info=True))
    assert [info["index"].tolist() for _, info in batches] == [[0, 1, 2, 3], [4, 5]]


def test_elsewhere_without_streams():
    batch, info = next(iter(DeviceLoader(filled(), "meta", return_info=True)))
    assert batch["n", "b"].is_meta
    assert batch.device == torch.device("meta")
    assert info["index"].is_meta


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", object()])
def test_no_such_device(device):
    with pytest.raises(RuntimeError, match="DeviceLoader: device"):
        DeviceLoader(filled(), device)


@pytest.mark.parametrize(("depth", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_depth(depth, error):
    with pytest.raises(error, match="depth"):
        DeviceLoader(filled(), "cpu", depth)


def test_no_batch_size():
    with pytest.raises(RuntimeError, match="batch size"):
        DeviceLoader(filled(batch_size=None), "cpu")


def test_priorities_on_the_cpu():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
    with DeviceLoader(rb, "cpu") as batches:
        batches.update_priority(torch.arange(10), torch.zeros(10))
        batches.update_priority(torch.tensor([3]), 2.0)
        batch = next(iter(batches))
        assert batch["a"].tolist() == [3, 3, 3, 3]
        batch["td_error"] = torch.full((4,), 7.0)
        batches.update_tensordict_priority(batch)
        with pytest.raises(KeyError, match="td_error.*'a'"):
            batches.update_tensordict_priority(batch.exclude("td_error"))
        with pytest.raises(PriorityError):
            batches.update_priority(torch.tensor([3]), float("nan"))
        batches.flush()


# ---- on streams that do nothing by themselves --------------------------------------------------------------------------------


THREAD = "engram-device-loader"


@pytest.fixture
def streams(monkeypatch):
    """No time passes: without :func:`ahead`, small batches have no thread, however slow this machine is."""
    made = Imitation(late=True)
    monkeypatch.setattr(DeviceLoader, "_may_read", lambda self, rb: False)
    monkeypatch.setattr(pinning, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(loader, "Accelerator", lambda device: made)
    monkeypatch.setattr(loader, "existing_device", lambda device, name: torch.device("cuda", 0))
    return made


@pytest.fixture
def ahead(monkeypatch):
    """Every batch is a large one: behind the first there is a thread."""
    monkeypatch.setattr(loader._ThreadRule, "BYTES", 1)


def has_thread():
    return any(thread.name == THREAD for thread in threading.enumerate())


@pytest.mark.parametrize("large", [False, True])
def test_batches_in_order(streams, monkeypatch, large):
    monkeypatch.setattr(loader._ThreadRule, "BYTES", 1 if large else 10**6)
    rb = filled()
    expected = [batch["a"].tolist() for batch in rb]
    seen = [(batch["a"].tolist(), streams.holds(batch["n", "b"])) for batch in DeviceLoader(rb, "cuda")]
    assert seen == [(one, True) for one in expected]
    assert not has_thread()


def test_a_small_batch_is_one_copy_on_the_consumers_stream(streams):
    batches = iter(DeviceLoader(filled(8), "cuda"))
    consumer = threading.current_thread().name
    for _ in range(2):
        streams.log.clear()
        next(batches)
        assert streams.log == [("send", consumer)], "no events, and nothing to keep"
        assert not has_thread()


def test_a_large_batch_is_one_copy_on_a_stream_of_its_own(streams, ahead):
    batches = iter(DeviceLoader(filled(8), "cuda"))
    next(batches)
    streams.log.clear()
    next(batches)
    consumer = threading.current_thread().name
    assert streams.log == [("send", "up"), ("mark", "up", "up 0"), ("wait", consumer, "up 0"), ("keep", consumer)]
    assert not any("host waits" in entry[0] for entry in streams.log)


def test_what_was_on_the_device_already_stays_and_is_waited_for(streams, ahead):
    there = streams.on_device(torch.arange(4))
    rb = filled(8, cls=ReplayBuffer, transform=lambda td: (there, {"b": td["a"], "text": "x"}))
    consumer = threading.current_thread().name
    for number, batch in enumerate(DeviceLoader(rb, "cuda")):
        assert batch[0] is there
        assert batch[1]["text"] == "x"
        waits = [name.split()[0] for what, _, name in (e for e in streams.log if e[0] == "wait")]
        assert waits == [[], [THREAD, "up"]][number], "without a thread, it was computed on this stream"
    assert [entry[0] for entry in streams.log if entry[1] == consumer].count("keep") == 2
    assert [entry[0] for entry in streams.log].count("send") == 2


@pytest.mark.parametrize("depth", [2, 3])
def test_depth_batches_ahead(streams, ahead, depth):
    drawn, wanted = [], threading.Semaphore(0)

    def note(td):
        drawn.append(1)
        wanted.release()
        return td

    rb = filled(40, transform=note)
    batches = iter(DeviceLoader(rb, "cuda", depth))
    for _ in range(2):
        next(batches)
    for _ in range(depth + 2):
        assert wanted.acquire(timeout=60)
    assert not wanted.acquire(timeout=0.05), "and no further"
    batches.close()
    assert len(drawn) == depth + 2


# ---- whether there is a thread -----------------------------------------------------------------------------------------------


def seen_ahead(device_loader, batches):
    found = []
    for _ in range(batches):
        next(device_loader)
        found.append(has_thread())
    return found


@pytest.mark.parametrize(
    ("fields", "seconds", "depth", "found"),
    [
        (1, [0, 0], 2, [False, False, False]),
        (1, [1, 0.0009], 2, [False, False, False]),
        (1, [0.0009, 1], 2, [False, False, False]),
        (1, [0.001, 0.001], 2, [False, False, True]),
        (1, [1, 1], 1, [False, False, False]),
        (2**15 - 64, [0, 0], 2, [False, False, False]),
        (2**15, [0, 0], 2, [False, True, True]),
        (2**15, [1, 1], 1, [False, False, False]),
    ],
)
def test_the_rule_for_a_thread(streams, monkeypatch, fields, seconds, depth, found):
    """16 rows: half a MiB is 2^15 bytes each, and the index needs 128."""
    rb = ReplayBuffer(storage=LazyTensorStorage(16), batch_size=16)
    rb.extend(torch.zeros(16, fields, dtype=torch.uint8))
    passed = [0.0]

    def clock():
        ticks.append(None)
        number = (len(ticks) - 1) // 2
        passed[0] += seconds[number] if len(ticks) % 2 == 0 and number < len(seconds) else 0.0
        return passed[0]

    ticks = []
    monkeypatch.setattr(pinning, "perf_counter", clock)
    device_loader = DeviceLoader(rb, "cuda", depth)
    assert device_loader.draws_ahead is (False if depth == 1 else None)
    assert "draws_ahead" not in repr(device_loader) or depth == 1
    assert seen_ahead(iter(device_loader), 3) == found
    device_loader.close()
    assert device_loader.draws_ahead is found[-1]
    assert f"transport='block', draws_ahead={found[-1]})" in repr(device_loader)
    batches = iter(device_loader)
    assert has_thread() is found[-1], "it is decided once"
    device_loader.close()
    assert next(batches, None) is None
    assert not has_thread()


def test_without_a_thread_nothing_is_drawn_before_it_is_asked_for(streams):
    drawn = []
    rb = filled(40, transform=lambda td: drawn.append(1) or td)
    batches = iter(DeviceLoader(rb, "cuda", 5))
    assert drawn == []
    for n in range(1, 5):
        next(batches)
        assert len(drawn) == n


def test_ways(streams, monkeypatch):
    for transport in (None, "block"):
        assert DeviceLoader(filled(), "cuda", transport=transport).transport == "block"
    with pytest.raises(ValueError, match="transport: expected None, 'block', 'direct' or 'resident', got 'magic'"):
        DeviceLoader(filled(), "cuda", transport="magic")
    monkeypatch.undo()
    assert DeviceLoader(filled(), "cpu").transport == DeviceLoader(filled(), "meta").transport == "none"
    with pytest.raises(ValueError, match="expected an accelerator for 'block', got device='cpu'"):
        DeviceLoader(filled(), "cpu", transport="block")
    device_loader = DeviceLoader(filled(), "cpu")
    assert len(list(device_loader)) == 5
    assert device_loader.stats() == {"transport": "none", "batches": 5, "bytes": 0, "spilled": 0}
    assert repr(device_loader) == "DeviceLoader(batch_size=4, device='cpu')"
    assert device_loader.draws_ahead is False


# ---- errors, ends and forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4])
def test_an_error_comes_in_its_turn_and_ends_it(streams, ahead, depth):
    count = []

    def third(td):
        count.append(1)
        if len(count) == 3:
            raise ZeroDivisionError("mine")
        return td

    batches = iter(DeviceLoader(filled(40, transform=third), "cuda", depth))
    next(batches)
    next(batches)
    with pytest.raises(ZeroDivisionError, match="mine"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    assert not has_thread()


@pytest.mark.parametrize("how", ["break", "close", "forgotten", "context"])
@pytest.mark.parametrize("depth", [1, 3])
def test_left_early(streams, ahead, how, depth):
    device_loader = DeviceLoader(filled(40), "cuda", depth)
    device_loader._thread.note(1, 0.0)
    if how == "break":
        for _ in device_loader:
            break
    elif how == "context":
        with device_loader:
            batches = iter(device_loader)
            next(batches)
        assert next(batches, None) is None
    else:
        batches = iter(device_loader)
        next(batches)
        if how == "close":
            device_loader.close()
            device_loader.close()
        else:
            del batches
    gc.collect()
    assert not has_thread()
    assert len(list(device_loader)) > 0, "and once more"


@pytest.mark.parametrize("depth", [1, 3])
def test_the_same_draws_as_without_it(streams, ahead, depth):
    def draws(through):
        rb = filled(40, sampler=None, cls=ReplayBuffer, generator=torch.Generator().manual_seed(4))
        batches = iter(through(rb))
        return [next(batches)["a"].tolist() for _ in range(10)]

    assert draws(lambda rb: DeviceLoader(rb, "cuda", depth)) == draws(lambda rb: rb)


@tensorclass
class Step:
    a: torch.Tensor


@pytest.mark.parametrize(
    "form",
    [
        lambda td: td["a"],
        lambda td: {"x": {"y": td["a"]}},
        lambda td: (td["a"], [td["a"]]),
        lambda td: TensorDict({"a": td["a"]}, [4]),
        lambda td: Step(a=td["a"], batch_size=[4]),
    ],
)
def test_forms(streams, form):
    rb = filled(4, cls=ReplayBuffer, transform=form)
    (batch,) = DeviceLoader(rb, "cuda")
    assert type(batch) is type(form(rb.storage[:]))
    assert all(streams.holds(leaf) for leaf in tensors(batch))
    assert tensors(batch)[0].tolist() == [0, 1, 2, 3]


def test_samplers_and_storages(streams):
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    rb.extend([torch.tensor(i) for i in range(3)])
    assert streams.holds(next(iter(DeviceLoader(rb, "cuda"))))
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=4, traj_key="t"), batch_size=8
    )
    rb.extend(TensorDict({"t": torch.arange(40) // 10}, [40]))
    batch, info = next(iter(DeviceLoader(rb, "cuda", return_info=True)))
    assert all(streams.holds(leaf) for leaf in tensors((batch, info)))


# ---- priorities --------------------------------------------------------------------------------------------------------------


class Hearing:
    """A buffer that notes its updates."""

    batch_size = 4
    priority_key = "td_error"

    def __init__(self):
        self.heard = []
        self.sampler = None

    def __iter__(self):
        return iter([torch.zeros(4)] * 3)

    def update_priority(self, index, priority, *, generation=None):
        if not isinstance(priority, float) and bool(torch.isnan(priority).any()):
            raise PriorityError("nan")
        self.heard.append((index.tolist(), priority if isinstance(priority, float) else priority.tolist(), generation))


def test_priorities_are_applied_in_order_once_they_have_come(streams):
    rb = Hearing()
    batches = DeviceLoader(rb, "cuda")
    errors = [streams.on_device(torch.full((2,), float(i))) for i in range(3)]
    index = torch.tensor([5, 6])
    for error in errors:
        batches.update_priority(index, error)
    batches.update_priority(index, 9.0)
    consumer = threading.current_thread().name
    assert streams.log[:5] == [
        ("mark", consumer, f"{consumer} 0"),
        ("wait", "down", f"{consumer} 0"),
        ("receive", "down"),
        ("keep", "down"),
        ("mark", "down", "down 1"),
    ]
    index.fill_(-1)  # what was handed over is theirs no more
    for error in errors:
        error.fill_(77)
    assert rb.heard == []
    first, second, third = [event for event in streams.events if event.name.startswith("down")]
    second.come = True
    iterator = iter(batches)
    next(iterator)
    assert rb.heard == [], "the first has not come"
    first.come = True
    next(iterator)
    assert [priority for _, priority, _ in rb.heard] == [[0, 0], [1, 1]]
    assert not any("host waits" in entry[0] for entry in streams.log)
    batches.flush()
    assert ("host waits for", third.name) in streams.log
    assert [priority for _, priority, _ in rb.heard] == [[0, 0], [1, 1], [2, 2], 9.0]
    assert {tuple(index) for index, _, _ in rb.heard} == {(5, 6)}
    batches.close()


@pytest.mark.parametrize("held", [("down",), True])
def test_priorities_are_those_of_the_call_though_the_device_is_late(monkeypatch, held):
    """The learner may change them in place at once: its stream waits for the copy."""
    device = Imitation(held=held)
    monkeypatch.setattr(DeviceLoader, "_may_read", lambda self, rb: False)
    monkeypatch.setattr(loader, "Accelerator", lambda _: device)
    monkeypatch.setattr(loader, "existing_device", lambda device, name: torch.device("cuda", 0))
    rb = Hearing()
    batches, error = DeviceLoader(rb, "cuda"), device.on_device(torch.zeros(2))
    device.launch(lambda: error.fill_(3.0))
    batches.update_priority(torch.tensor([5, 6]), error)
    device.launch(lambda: error.fill_(77.0))
    assert rb.heard == []
    batches.flush()
    assert [priority for _, priority, _ in rb.heard] == [[3.0, 3.0]]
    assert device.faults == []


def test_batches_are_whole_though_the_device_is_late(monkeypatch, ahead):
    """Each batch is read by the learner's stream after its copy, and by nobody before. The first is copied on that stream."""
    device = Imitation(held=True)
    monkeypatch.setattr(DeviceLoader, "_may_read", lambda self, rb: False)
    monkeypatch.setattr(loader, "Accelerator", lambda _: device)
    monkeypatch.setattr(loader, "existing_device", lambda device, name: torch.device("cuda", 0))
    rb, found = filled(12), []
    for batch in DeviceLoader(rb, "cuda", depth=2):
        device.launch(lambda rows: found.append(rows.tolist()), batch["a"])
    assert found == []
    device.release(threading.current_thread().name)
    assert found == [[0, 1, 2, 3]], "the other copies have not been made"
    device.release()
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert device.counts["sync"] == 0


def test_a_bad_priority_is_dropped_and_said(streams):
    rb = Hearing()
    batches = DeviceLoader(rb, "cuda")
    for value in (1.0, float("nan"), 3.0):
        batches.update_priority(torch.tensor([0]), streams.on_device(torch.tensor([value])))
    for event in streams.events:
        event.come = True
    with pytest.raises(PriorityError):
        batches.flush()
    batches.flush()
    assert [priority for _, priority, _ in rb.heard] == [[1.0], [3.0]]


def test_host_values_are_applied_at_once(streams):
    rb = Hearing()
    DeviceLoader(rb, "cuda").update_priority(torch.tensor([1]), torch.tensor([2.0]))
    assert rb.heard == [([1], [2.0], None)]
    assert streams.log == []


def test_generations_travel_along(streams):
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
    with DeviceLoader(rb, "cuda", depth=1) as batches:
        batch = next(iter(batches))
        assert streams.holds(batch["index_generation"])
        batch["td_error"] = streams.on_device(torch.ones(4))
        rb.extend(TensorDict({"a": torch.arange(10)}, [10]))  # all rows are others now
        batches.update_tensordict_priority(batch)
    assert rb.stats()["priority_updates_dropped"] == 4


def test_the_loader_keeps_nothing(streams):
    device_loader = DeviceLoader(filled(8), "cuda", depth=1)
    batches = iter(device_loader)
    batch = next(batches)
    gone = weakref.ref(batch)
    del batch
    next(batches)
    gc.collect()
    assert gone() is None
    device_loader.close()


def test_prioritized_draws_follow_updates(streams):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, 1.0, 1.0, eps=0.0), batch_size=4
    )
    rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
    with DeviceLoader(rb, "cuda", depth=1) as batches:
        batches.update_priority(torch.arange(10), streams.on_device((torch.arange(10) == 7).float()))
        batches.flush()
        assert next(iter(batches))["a"].tolist() == [7] * 4


# ---- with a GPU ----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestCuda:
    def test_batches(self):
        rb = filled(100, pin_memory=True)
        expected = [batch.clone() for batch in rb]
        found = list(DeviceLoader(rb, "cuda", depth=3))
        assert all(batch.device.type == "cuda" for batch in found)
        for one, other in zip(found, expected, strict=True):
            assert (one.cpu() == other).all()

    @pytest.mark.parametrize(("columns", "has_thread"), [(8, False), (50_000, True)])
    def test_safe_on_the_consumers_stream(self, columns, has_thread):
        """The consumer is slow and drops each batch at once: nobody may write into it meanwhile."""
        rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=32)
        rb.extend(torch.arange(64).repeat_interleave(columns).reshape(64, columns))
        stream = torch.cuda.Stream()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        with torch.cuda.stream(stream):
            device_loader = DeviceLoader(rb, "cuda", depth=3)
            for batch, _ in zip(device_loader, range(200), strict=False):
                torch.cuda._sleep(1_000_000)
                wrong += (batch != batch[:, :1]).sum()
                del batch
        assert int(wrong) == 0
        assert device_loader.draws_ahead is has_thread

    def test_one_copy(self):
        """Of fields, index and flags; their tensors are as torch makes them."""
        batches = iter(DeviceLoader(filled(100), "cuda", depth=1))
        for _ in range(2):
            next(batches)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            batch = next(batches)
            torch.cuda.synchronize()
        copies = [event for event in profile.events() if "Memcpy HtoD" in event.name]
        assert len(copies) == 1
        assert "Pinned" in copies[0].name
        assert len({leaf.untyped_storage().data_ptr() for leaf in tensors(batch)}) == 1

    def test_priorities(self):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(10), batch_size=4
        )
        rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
        with DeviceLoader(rb, "cuda") as batches:
            torch.cuda._sleep(10_000_000)
            batches.update_priority(torch.arange(10, device="cuda"), (torch.arange(10, device="cuda") == 7).float())
            batches.flush()
            assert next(iter(batches))["a"].tolist() == [7] * 4

    def test_a_cuda_storage(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(100, device="cuda"), batch_size=8)
        rb.extend(torch.arange(100))
        batch = next(iter(DeviceLoader(rb, "cuda")))
        assert batch.is_cuda
        assert bool((batch < 100).all())
