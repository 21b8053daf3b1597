"""Batches that a device reads by itself: those of the host, on Triton's interpreter in place of a GPU."""

import gc
import itertools
import subprocess
import threading

import pytest
import torch
from tensordict import TensorDict

from engram import (
    DeviceLoader,
    DeviceReplay,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MinSize,
    NoSampleable,
    PrioritizedSampler,
    PriorityError,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.device import direct
from tests.device.imitation import Interpreter
from tests.device.test_registry_forks import fork


@pytest.fixture
def device(monkeypatch):
    return Interpreter.installed(monkeypatch)


def steps(n):
    return TensorDict(
        {
            "obs": torch.arange(n * 3.0).view(n, 3),
            "action": torch.arange(n),
            "odd": torch.arange(n * 7).view(n, 7).to(torch.uint8),
        },
        [n],
    )


def pair(cls=TensorDictReplayBuffer, *, rows=20, size=32, storage=LazyTensorStorage, sampler=lambda: None, **kwargs):
    """Two equal buffers: one for the device, one for the host."""
    made = []
    for _ in range(2):
        rb = cls(
            storage=storage(size), sampler=sampler(), batch_size=8, generator=torch.Generator().manual_seed(3), **kwargs
        )
        rb.extend(steps(rows))
        made.append(rb)
    return made


def same(one, other):
    if isinstance(one, tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return set(one.keys()) == set(other.keys()) and all(same(one[key], other[key]) for key in one.keys())


def by_priority():
    return PrioritizedSampler(alpha=0.7, beta=0.5)


@pytest.mark.stress(sample=6)
@pytest.mark.parametrize(
    "sampler", [lambda: None, by_priority, SamplerWithoutReplacement], ids=["uniform", "priority", "epoch"]
)
@pytest.mark.parametrize("rows", [20, 40])
@pytest.mark.parametrize("return_info", [False, True])
def test_batches_are_those_of_the_host(device, sampler, rows, return_info):
    here, there = pair(rows=rows, sampler=sampler)
    if sampler is by_priority:
        for rb in (here, there):
            rb.update_priority(torch.arange(5), torch.arange(1.0, 6.0))
    reading = DeviceLoader(here, "cuda", transport="direct", return_info=return_info)
    for got in itertools.islice(reading, 6):
        expected = there.sample(return_info=return_info)
        if sampler is by_priority:
            weights = [(one[0] if return_info else one)["priority_weight"] for one in (got, expected)]
            torch.testing.assert_close(*weights, rtol=1e-6, atol=0)
            for one in (got, expected):
                (one[0] if return_info else one)["priority_weight"].zero_()
                if return_info:
                    one[1].pop("priority_weight")
        assert same(got, expected)
    assert reading.transport == reading.stats()["transport"] == "direct"
    assert "transport='direct'" in repr(reading)
    assert reading.stats()["missing"] == 0
    assert not device.faults


def test_plain_buffers_and_nested_rows(device):
    here, there = (
        ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, generator=torch.Generator().manual_seed(0))
        for _ in range(2)
    )
    rows = {"a": {"b": torch.arange(10)}, "c": (torch.rand(10, 2), torch.ones(10))}
    for rb in (here, there):
        rb.extend(rows)
    got, expected = next(iter(DeviceLoader(here, "cuda"))), there.sample()
    assert type(got) is dict
    assert torch.equal(got["a"]["b"], expected["a"]["b"])
    assert torch.equal(got["c"][0], expected["c"][0])


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_ring_of_commands_goes_round(device, monkeypatch, lanes):
    monkeypatch.setattr(direct, "_SLOTS", 4)
    made = [LazyTensorStorage(30, lanes=lanes) for _ in range(2)]
    here, there = (ReplayBuffer(storage=one, batch_size=4, generator=torch.Generator().manual_seed(0)) for one in made)
    for rb in (here, there):
        for lane in range(lanes):
            rb.extend(torch.arange(5) + 10 * lane, lane=lane)
    batches = iter(DeviceLoader(here, "cuda"))
    for _ in range(15):
        assert torch.equal(next(batches), there.sample())
    assert device.counts["capture"] == 1
    assert device.counts["replay"] == 15


def test_no_thread_and_nothing_waits(device):
    here, _ = pair()
    batches = iter(DeviceLoader(here, "cuda"))
    next(batches)
    before = device.counts.copy()
    for _ in range(3):
        next(batches)
    assert device.counts - before == {"replay": 3}


def test_refusals_are_named(device, tmp_path):
    for kwargs, cause in (
        ({"transform": lambda batch: batch}, "a transform"),
        ({"collate_fn": lambda batch: batch}, "collate_fn"),
        ({"sampler": lambda: SliceSampler(num_slices=2, traj_key="action")}, "SliceSampler"),
        ({"storage": ListStorage}, "rows in a list"),
        (
            {"storage": lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / str(len(list(tmp_path.iterdir()))))},
            "rows in files on a disk",
        ),
    ):
        rb, _ = pair(**kwargs)
        with pytest.raises(RuntimeError, match=cause):
            DeviceLoader(rb, "cuda", transport="direct")
        assert DeviceLoader(rb, "cuda").transport == "block"
        assert DeviceLoader(rb, "cuda").stats()["reason"].startswith(cause)
        with pytest.raises(RuntimeError, match=cause):
            DeviceReplay(rb, "cuda")


def test_a_refused_registration_is_said_once(device):
    here, there = pair()
    device.refuses = lambda address, nbytes: 801
    with pytest.warns(UserWarning, match="cannot read the rows by itself.*801") as said:
        reading = DeviceLoader(here, "cuda")
    batches = list(itertools.islice(reading, 2))
    assert same(batches[0], there.sample())
    assert len(said) == 1
    assert reading.transport == "block"
    with pytest.raises(RuntimeError, match="801"):
        DeviceLoader(here, "cuda", transport="direct")


@pytest.mark.parametrize("cls", [subprocess.CalledProcessError, PermissionError])
def test_kernels_that_cannot_be_compiled(device, monkeypatch, cls):
    """Triton calls a C compiler, and writes to a cache."""

    def fails(*_, **__):
        raise cls(1, "gcc main.c")

    monkeypatch.setattr(direct, "Chain", fails)
    rb, _ = pair()
    with pytest.warns(UserWarning, match=rf"cannot read the rows by itself: {cls.__name__}: .*gcc main\.c"):
        assert DeviceLoader(rb, "cuda").transport == "block"
    for refused in (lambda: DeviceLoader(rb, "cuda", transport="direct"), lambda: DeviceReplay(rb, "cuda")):
        with pytest.raises(RuntimeError, match=r"gcc main\.c"):
            refused()


def test_what_changes_meanwhile(device):
    here, there = pair()
    reading = DeviceLoader(here, "cuda")
    batches = iter(reading)
    assert same(next(batches), there.sample())
    for rb in (here, there):
        rb.extend(steps(30))
    assert same(next(batches), there.sample())
    for rb in (here, there):
        rb.add_field("more", torch.tensor(5.0))
    assert same(next(batches), there.sample())
    assert reading.transport == "direct"
    for rb in (here, there):
        rb.limit(MinSize(1))
    assert same(next(batches), there.sample())
    assert reading.transport == "block"
    for rb in (here, there):
        rb.limit(None)
    assert same(next(iter(reading)), there.sample())
    assert reading.transport == "direct"
    assert "reason" not in reading.stats()
    reading.close()
    assert next(batches, None) is None


def test_an_empty_buffer_raises(device):
    here, _ = pair()
    batches = iter(DeviceLoader(here, "cuda"))
    next(batches)
    here.empty()
    with pytest.raises(NoSampleable):
        next(batches)
    fresh = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.raises(NoSampleable):
        next(iter(DeviceLoader(fresh, "cuda")))


def test_replay_inside_a_graph(device):
    here, _ = pair(TensorDictPrioritizedReplayBuffer, sampler=by_priority)
    with DeviceReplay(here, "cuda") as replayed:
        drawn = []

        def step():
            batch = replayed.sample()
            batch["td_error"] = torch.full((8,), 0.0)
            device.queue(
                lambda: (drawn.append(batch["index"].clone()), batch["td_error"].copy_(batch["obs"][:, 0] + 1))
            )
            replayed.update_tensordict_priority(batch)

        graph = device.capture(step)
        before = device.counts.copy()
        for _ in range(5):
            graph.replay()
        assert device.counts - before == {"replay": 5}
        replayed.flush()
        assert replayed.stats()["batches"] == 5
        assert len({tuple(rows.tolist()) for rows in drawn}) == 5
        rows = torch.cat(drawn).unique()
        expected = (rows * 3.0 + 1 + here.sampler.eps) ** here.sampler.alpha
        torch.testing.assert_close(here.sampler.priorities().leaves_of(rows), expected.double(), rtol=1e-6, atol=0)


def test_priorities_go_back_through_the_ring(device):
    here, there = pair(TensorDictPrioritizedReplayBuffer, sampler=by_priority)
    with DeviceLoader(here, "cuda", transport="direct") as reading:
        for batch in itertools.islice(reading, 3):
            batch["td_error"] = batch["obs"][:, 0] + 1
            reading.update_tensordict_priority(batch)
            reading.flush()
            expected = there.sample()
            expected["td_error"] = expected["obs"][:, 0] + 1
            there.update_tensordict_priority(expected)
            assert torch.equal(batch["index"], expected["index"])
        assert torch.equal(here.sampler.priorities().leaves(20), there.sampler.priorities().leaves(20))

        def wrong():  # is said by the call itself, if the thread that applies it is that fast
            reading.update_priority(batch["index"], torch.full((8,), -1.0), generation=batch["index_generation"])
            reading.flush()

        with pytest.raises(PriorityError, match="left out 8 others"):
            wrong()
    assert not device.counts["receive"]


def test_replay_refuses_what_it_cannot_do(device):
    here, _ = pair()
    replayed = DeviceReplay(here, "cuda", graphs=1)
    with pytest.raises(RuntimeError, match="PrioritizedSampler"):
        replayed.update_priority(torch.arange(8), torch.ones(8))
    batches = []
    captured(device, replayed, batches)
    with pytest.raises(RuntimeError, match="at most 1 captured calls"):
        captured(device, replayed, batches)
    here.append_transform(lambda batch: batch)
    with pytest.raises(RuntimeError, match="a transform"):
        replayed.sample()
    replayed.close()
    replayed.close()
    with pytest.raises(TypeError, match="expected a ReplayBuffer, got list"):
        DeviceReplay([], "cuda")
    here, _ = pair(sampler=by_priority)
    replayed = DeviceReplay(here, "cuda")
    _, info = replayed.sample(return_info=True)
    with pytest.raises(RuntimeError, match="generation=info"):
        replayed.update_priority(info["index"].clone(), torch.ones(8))
    with pytest.raises(ValueError, match="one priority per row"):
        replayed.update_priority(info["index"], torch.ones(7))
    replayed.update_priority(info["index"], torch.full((8, 1), -1.0))
    with pytest.raises(PriorityError, match="left out 8 others"):
        replayed.flush()
    replayed.check()
    graph = captured(device, replayed, batches)
    here.empty()
    with pytest.raises(NoSampleable):
        replayed.sample()
    graph.replay()
    with pytest.raises(NoSampleable, match="8 places"):
        replayed.check()
    replayed.close()


def test_an_emptied_store_is_read_as_far_as_it_is_filled(device):
    here, there = pair(rows=32)
    batches = iter(DeviceLoader(here, "cuda"))
    assert same(next(batches), there.sample())
    for rb in (here, there):
        rb.empty()
        rb.extend(steps(3))
    assert same(next(batches), there.sample())


def captured(device, replayed, batches):
    """A graph of one sample. Its batch is kept, as CUDA keeps the memory of graphs."""
    return device.capture(lambda: batches.append(replayed.sample()))


def test_memory_stays_registered_as_long_as_a_graph_may_read_it(device):
    here, _ = pair()
    batches, replayed = [], DeviceReplay(here, "cuda")
    graph = captured(device, replayed, batches)
    del replayed
    gc.collect()
    assert device.regions
    graph.replay()
    assert not device.faults
    for reader in list(direct._CAPTURED):
        reader.close()
    assert not device.regions


def test_updates_under_way_survive_a_change_of_the_buffer(device):
    here, _ = pair(TensorDictPrioritizedReplayBuffer, sampler=by_priority)
    with DeviceLoader(here, "cuda") as reading:
        batches = iter(reading)
        batch = next(batches)
        batch["td_error"] = torch.full((8,), 3.0)
        reading.update_tensordict_priority(batch)
        here.add_field("more", torch.tensor(5.0))
        next(batches)
        expected = torch.full((8,), (3.0 + here.sampler.eps) ** here.sampler.alpha, dtype=torch.float64)
        torch.testing.assert_close(here.sampler.priorities().leaves_of(batch["index"]), expected, rtol=1e-6, atol=0)


def test_updates_are_applied_in_the_order_of_the_calls(device):
    here, _ = pair(TensorDictPrioritizedReplayBuffer, sampler=by_priority)
    with DeviceLoader(here, "cuda") as reading:
        batch = next(iter(reading))
        reading.update_priority(batch["index"], torch.full((8,), 7.0), generation=batch["index_generation"])
        reading.update_priority(batch["index"], torch.full((8,), 1.0))
        expected = torch.full((8,), (1.0 + here.sampler.eps) ** here.sampler.alpha, dtype=torch.float64)
    torch.testing.assert_close(here.sampler.priorities().leaves_of(batch["index"]), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [DeviceLoader, DeviceReplay])
def test_what_was_queued_on_another_stream_is_waited_for(device, kind):
    rb, _ = pair(sampler=by_priority)
    reading, rows, device.held = kind(rb, "cuda"), torch.arange(8), {"another"}
    writes = rb.storage.memory.writes_of(rows, rb.storage.memory.tickets_of(rows))
    with device.on(device._named("another")):
        _ = reading.sample() if kind is DeviceReplay else next(iter(reading))
        reading.update_priority(rows, torch.full((8,), 9.0), generation=writes)
    reading.flush()
    assert rb.sampler.priorities().leaves(9).tolist() == pytest.approx([9.0**0.7] * 8 + [1.0])
    with device.on(device._named("another")):
        _ = reading.sample() if kind is DeviceReplay else next(iter(reading))
    assert reading.stats()["batches"] == 2
    reading.close()


def test_a_loader_made_before_the_first_row_reads_directly(device):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    reading = DeviceLoader(rb, "cuda", transport="direct")
    batches = iter(reading)
    rb.extend(steps(5))
    next(batches)
    assert device.counts["replay"] == 1
    assert reading.transport == "direct"


def test_limits_before_the_first_row(device):
    """A sample waits for rows then; it drew them on the host, whatever was asked for."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.limit(MinSize(4))
    with pytest.raises(RuntimeError, match="limits"):
        DeviceLoader(rb, "cuda", transport="direct")
    loader = DeviceLoader(rb, "cuda")
    assert loader.stats()["reason"] == "limits"
    rb.limit(None)
    rb.extend({"a": torch.arange(10)})
    assert next(iter(loader))["a"].shape == (4,)
    assert loader.transport == "direct"


def test_replay_without_replacement_is_refused(device):
    here, _ = pair(sampler=SamplerWithoutReplacement)
    with pytest.raises(RuntimeError, match="without replacement"):
        DeviceReplay(here, "cuda")


@pytest.mark.parametrize("call", ["sample", "update"])
def test_no_thread_registers_again_while_another_one_queues_a_batch(device, monkeypatch, call):
    rb, _ = pair(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)
    one, two = DeviceReplay(rb, "cuda"), DeviceReplay(rb, "cuda")
    batch, order, before = one.sample(), [], device.counts["register"]
    other = threading.Thread(target=lambda: (two.sample(), order.append(device.counts["register"] - before)))

    def meanwhile(queue):
        def queued(*arguments, **constants):
            if not order:
                order.append("fork")
                fork()
                other.start()
                other.join(0.2)
                order.append("queued")
            return queue(*arguments, **constants)

        return queued

    monkeypatch.setattr(device, "launch", meanwhile(device.launch))
    for kernels in (one._reader._chain, one._reader.updates):
        monkeypatch.setattr(kernels, "_launcher", device.launch)
    if call == "sample":
        one.sample()
    else:
        one.update_priority(batch["index"], torch.ones(8), generation=batch["index_generation"])
    other.join()
    assert order[:2] == ["fork", "queued"]
    assert order[2] > 0
    one.sample()


def test_memory_that_lies_elsewhere_after_a_fork(device):
    rb, expected = pair()
    replayed, reading = DeviceReplay(rb, "cuda"), DeviceLoader(rb, "cuda")
    loaded = iter(reading)
    replayed.sample()
    expected.sample()  # as many keys
    assert same(next(loaded), expected.sample())
    fork()
    for handle in (replayed._reader._registered, reading._direct._registered):
        handle.addresses = tuple(address + 1 for address in handle.addresses)  # it seems to move
    with pytest.raises(RuntimeError, match="expected the memory of the buffer where it was"):
        replayed.sample()
    with pytest.raises(RuntimeError, match="Make a new DeviceReplay"):
        replayed.sample()
    before = reading._direct
    assert same(next(loaded), expected.sample())
    assert reading._direct is not before
