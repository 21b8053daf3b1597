"""What only a GPU shows: no torn row beside writers, the host's batches for every kind of row, captured steps, kills, forks, devices.

Each test runs in small on the CPU too (``places.py``).
"""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from engram import (
    DeviceLoader,
    DeviceReplay,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from engram.format.schema import DTYPES
from tests import interpreter
from tests.device import places, torn

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=places.PLACES)
def place(request, monkeypatch):
    return places.there(request, monkeypatch)


def same(one, other):
    """Bit for bit, wherever they are: floats may be NaN."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    one, other = one.cpu().contiguous(), other.cpu().contiguous()
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return not one.numel() or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def twins(rows, capacity, *, batch_size=8, lanes=1, sampler=lambda: None, storage=LazyTensorStorage):
    """Two buffers that draw the same rows: one for the device, one for the host."""
    made = []
    for _ in range(2):
        rb = ReplayBuffer(
            storage=storage(capacity, lanes=lanes),
            sampler=sampler(),
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(5),
        )
        for lane in range(lanes):
            rb.extend(rows, lane=lane)
        made.append(rb)
    return made


# ---- torn rows -------------------------------------------------------------------------------------------------------


class Size:
    """How much a test of torn rows reads, and in what time."""

    def __init__(self, place, asked):
        small = place.is_imitated
        self.rows = (16 if small else 100_000_000) if asked is None else asked
        self.seconds = 60 if asked is None and not small else 3_600
        self.batch, self.capacity = (6, 48) if small else (4_096, 20_000)


@pytest.fixture
def size(place, request):
    return Size(place, request.config.getoption("torn_rows"))


@pytest.mark.timeout(7_200)
@pytest.mark.parametrize(
    ("share", "lanes", "prioritized"),
    [(0.7, 1, False), (0.15, 4, False), (0.15, 4, True)],
    ids=["ring", "lanes", "priority"],
)
def test_no_torn_row_beside_four_writers(place, size, share, lanes, prioritized):
    """In a graph of the user's, which also counts what is wrong; then from a loader."""
    if place.is_imitated and lanes > 1 and not prioritized:
        pytest.skip("on a GPU")
    rb = torn.buffer(size.capacity, lanes, prioritized=prioritized, batch_size=size.batch)
    counts = torch.zeros(2, dtype=torch.int64, device=place.device)  # rows, and wrong ones
    errors = torch.rand(size.batch, device=place.device) + 0.1
    with (
        torn.Writers(rb, 4, 0.05 if place.is_imitated else 0.0) as writers,
        DeviceReplay(rb, "cuda", graphs=1) as replay,
    ):

        def step():
            batch, info = replay.sample(return_info=True)
            counts[1].add_(torn.wrong(batch).sum())
            counts[0].add_(size.batch)
            if prioritized:
                replay.update_priority(info["index"], errors, generation=info["index_generation"])

        again, begin, wanted = place.captured(step), time.monotonic(), round(share * size.rows)
        for number in itertools.count(1):
            again()
            if number % 100 == 0 or place.is_imitated:
                read, wrong = counts.tolist()
                writers.check()
                assert wrong == 0, f"{wrong} of {read} rows are torn: {replay.stats()}"
                if read >= wanted:
                    break
                assert time.monotonic() - begin < share * size.seconds, (
                    f"too slow, not wrong: {read:,} of {wanted:,} rows"
                )
        found = replay.stats()
        print(f"{read:,} rows in {time.monotonic() - begin:.1f} s, 0 torn: {found}")
        assert found["transport"] == "direct"
        loader = DeviceLoader(rb, "cuda", transport="direct")
        for batch in itertools.islice(loader, 1 if place.is_imitated else 2_000):
            counts[1].add_(torn.wrong(batch).sum())
        assert int(counts[1]) == 0
        loader.close()
    at_rest(rb, place)


def at_rest(rb, place):
    """Once nobody writes, batches hold live rows as they are: nothing that was removed, or edited since."""
    if not len(rb):
        rb.extend(torn.rows_of(torch.arange(1, 5)), lane=0)
    with DeviceLoader(rb, "cuda", transport="direct", return_info=True) as loader:
        for batch, info in itertools.islice(loader, 1 if place.is_imitated else 20):
            assert not bool(torn.wrong(batch).any())
            rows = info["index"].cpu()
            assert bool((rb.storage.tickets_of(rows) >= 0).all())
            assert same(dict(batch), dict(rb.storage[rows]))


def test_a_torn_row_is_found(place):
    """The test would see one."""
    batch = {name: column.to(place.device) for name, column in torn.rows_of(torch.tensor([0, 5, 300, 301])).items()}
    assert not bool(torn.wrong(batch).any())
    for name, column in batch.items():
        broken = {**batch, name: column.clone()}
        broken[name].view(4, -1)[2, -1] += 1
        assert torn.wrong(broken).tolist() == [False, False, True, False]
    mixed = {
        name: torch.cat([column[:2], column[3:], column[2:3]]) if name == "long" else column
        for name, column in batch.items()
    }
    assert torn.wrong(mixed).tolist() == [False, False, True, True]


# ---- the host's batches ----------------------------------------------------------------------------------------------


def random_bits(dtype, shape, n):
    """Rows of any bits that the dtype has."""
    nbytes = torch.empty((), dtype=dtype).element_size() * torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (n, nbytes), dtype=torch.uint8)
    return raw.view(dtype).reshape(n, *shape) if nbytes else torch.empty((n, *shape), dtype=dtype)


def check_same(pair, count=3):
    here, there = pair
    with DeviceLoader(here, "cuda", transport="direct") as loader:
        for batch in itertools.islice(loader, count):
            expected = there.sample()
            assert same(dict(batch), dict(expected))
        assert loader.transport == "direct"
        assert loader.stats()["missing"] == 0


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(place):
    rows = {name: random_bits(getattr(torch, name), (3,), 20) for name in DTYPES}
    rows |= {f"{name}, 0-d": random_bits(getattr(torch, name), (), 20) for name in DTYPES}
    check_same(twins(rows, 20))


@pytest.mark.parametrize("width", [1, 3, 7, 9, 127, 4_097, 100_003])
def test_every_width(place, width):
    if place.is_imitated and width not in (7, 4_097):
        pytest.skip("on a GPU")
    check_same(
        twins({"a": random_bits(torch.uint8, (width,), 12), "number": torch.arange(12)}, 12), 1 if width > 200 else 3
    )


def test_an_empty_shape(place):
    check_same(twins({"a": torch.zeros(12, 0), "number": torch.arange(12)}, 12))


@pytest.mark.parametrize("fields", [40, 2_000])
def test_many_fields(place, fields):
    if place.is_imitated and fields > 100:
        pytest.skip("on a GPU")
    check_same(
        twins({f"f{at}": random_bits(torch.uint8, (at % 9 + 1,), 6) for at in range(fields)}, 6, batch_size=4), 2
    )


def test_fields_that_lie_together(place, ram):
    """In a folder in shared memory, which a device reads as it reads RAM."""
    rows = {"a": random_bits(torch.uint8, (3,), 12), "b": torch.arange(12.0), "c": random_bits(torch.uint8, (200,), 12)}
    folders = itertools.count()

    def storage(n, lanes):
        return LazyMemmapStorage(n, lanes=lanes, scratch_dir=ram / str(next(folders)), group_small_fields=64)

    if not ram.is_relative_to("/dev/shm"):
        pytest.skip("no shared memory")
    check_same(twins(rows, 12, storage=storage))


@pytest.mark.parametrize("capacity", [1, 10, 5_000_000])
@pytest.mark.parametrize("sampler", ["uniform", "epochs"])
def test_every_capacity(place, capacity, sampler):
    if place.is_imitated and capacity > 100:
        pytest.skip("on a GPU")
    rows = {
        "a": torch.arange(min(capacity, 1_000_000)),
        "b": torch.arange(min(capacity, 1_000_000))[:, None].expand(-1, 3).to(torch.uint8),
    }
    check_same(
        twins(rows, capacity, batch_size=1, sampler=SamplerWithoutReplacement if sampler == "epochs" else lambda: None),
        1,
    )


@pytest.mark.parametrize("lanes", [3, 64])
def test_lanes_that_wrap(place, lanes):
    if place.is_imitated and lanes > 3:
        pytest.skip("on a GPU")
    pair = twins({"a": torch.arange(3)}, 4 * lanes, lanes=lanes)
    check_same(pair, 2)
    for rb in pair:
        rb.extend({"a": torch.arange(3)}, lane=lanes - 1)
    check_same(pair, 2)


def test_rows_beyond_the_first_2_gib(place):
    """Addresses are of 64 bits."""
    rows, width = (10, 20) if place.is_imitated else (100_000, 28_224)

    def some(first, n):
        numbers = torch.arange(first, first + n)
        return {"a": (numbers % 251).to(torch.uint8)[:, None].expand(-1, width), "number": numbers}

    here, there = twins(some(0, 1), rows)
    for first in range(1, rows, 1_000):
        for rb in (here, there):
            rb.extend(some(first, min(1_000, rows - first)))
    check_same((here, there), 2 if place.is_imitated else 50)


def test_a_field_that_is_added_and_rows_that_go(place):
    pair = twins({"a": torch.arange(20)}, 24)
    check_same(pair, 2)
    for rb in pair:
        rb.add_field("more", torch.tensor(5.0))
        rb.remove(torch.arange(3))
    check_same(pair, 2)
    for rb in pair:
        rb.empty()
        rb.extend({"a": torch.arange(4), "more": torch.arange(4.0)})
    check_same(pair, 2)


# ---- steps of a learner ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["host", "device"])
def test_a_captured_step(place, source):
    """Draw, loss, optimizer and update in one graph: each replay draws anew, moves the network, and its priorities arrive."""
    n = 200
    storage = LazyTensorStorage(n) if source == "host" else place.storage(n)
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=1.0, beta=0.5, eps=0.0), batch_size=8)
    rb.extend({"x": torch.arange(n)[:, None].repeat(1, 3) / n, "number": torch.arange(n)})
    net = torch.nn.Linear(3, 1).to(place.device)
    optimizer = place.adam(net.parameters())
    replay = DeviceReplay(rb, "cuda", graphs=1) if source == "host" else rb
    last = {}

    def step():
        batch, info = replay.sample(return_info=True)
        error = net(batch["x"]).squeeze(1) - 1
        optimizer.zero_grad(set_to_none=True)
        (info["priority_weight"] * error.square()).mean().backward()
        optimizer.step()
        priority = 1.0 + batch["number"] % 3
        replay.update_priority(info["index"], priority.float(), generation=info["index_generation"])
        last["drawn"] = batch["number"]

    again = place.captured(step)
    drawn, weight = set(), net.weight.detach().clone()
    for number in range(4 if place.is_imitated else 500):
        again()
        if source == "host" and number % 16 == 15:
            replay.flush()  # or priorities are dropped where the host is slow
        drawn.add(tuple(last["drawn"].tolist()))
    place.finish()
    assert len(drawn) >= (3 if place.is_imitated else 490)
    assert bool((net.weight != weight).any())
    if source == "host":
        replay.flush()
        replay.check()
        assert replay.stats()["refused"] == replay.stats()["dropped"] == 0
        leaves = rb.sampler.priorities().leaves(n)
    else:
        rb.stats()  # raises what went wrong on the device
        leaves = rb.sampler.priorities().tree.leaves[:n].cpu()
    changed = torch.tensor(sorted({row for one in drawn for row in one}))
    assert torch.equal(leaves[changed], (1.0 + changed % 3).double())
    if source == "host":
        replay.close()


def test_a_slow_host_while_a_graph_runs(place):
    """Appends, an emptying and a new field meanwhile: batches are whole rows, or say that there are none."""
    rb = torn.buffer(64, 1, batch_size=8)
    counts = torch.zeros((), dtype=torch.int64, device=place.device)
    with DeviceReplay(rb, "cuda", graphs=1) as replay:
        kept = []
        again = place.recorded(lambda: kept.append(replay.sample()))
        for change in (
            lambda: rb.extend(torn.rows_of(torch.arange(500, 600))),
            lambda: rb.add_field("more", torch.tensor(5.0)),
            rb.empty,
            lambda: rb.extend({**torn.rows_of(torch.arange(1, 9)), "more": torch.zeros(8)}),
            lambda: None,
        ):
            for _ in range(1 if place.is_imitated else 1_000):
                again()
                counts.add_(torn.wrong(kept[-1]).sum())
            change()
        place.finish()
        assert int(counts) == 0
        assert bool((kept[-1]["number"] > 0).all())
        with pytest.raises(NoSampleable):
            replay.check()  # while it was empty


# ---- processes, forks, devices ---------------------------------------------------------------------------------------

_WRITES = """
import sys
sys.path.insert(0, root)
import torch
from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from engram.store.device import mirror
from tests.device import torn

mirror.LOOK_S, mirror.PRIORITIES_S = 0.002, 0.01
if imitated:
    from tests.device.imitation import Imitation
    from tests.store.device.mirrored import There
    mirror.Accelerator = lambda _: Imitation()
    storage = There(500, mirror=folder)
else:
    storage = LazyTensorStorage(500, device="cuda", mirror=folder)
rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=1.0, beta=0.5, eps=0.0), batch_size=8)
first = rb.write_count + 1
for turn in range(10**9):
    n = turn % 59 + 1
    rb.extend(torn.rows_of(torch.arange(first, first + n)))
    first += n
    batch, info = rb.sample(return_info=True)
    rb.update_priority(info["index"], batch["number"] % 13 + 2.0)
    if turn % 5 == 0:
        rb.storage.flush()
        print("flushed", first, flush=True)
"""


def killed(place, folder, seconds):
    """Let a process write to a folder, and kill it so many seconds after its first flush. The rows at its last flush."""
    given = {"root": str(ROOT), "folder": str(folder), "imitated": place.is_imitated}
    code = "\n".join([*(f"{name} = {value!r}" for name, value in given.items()), _WRITES])
    command = [interpreter.executable() if place.is_imitated else sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writes:
        first = writes.stdout.readline()
        assert first.startswith("flushed")
        time.sleep(seconds)
        writes.kill()
        lines = [first, *writes.stdout.read().split("\n")[:-1]]  # the last one may be a part
    return int(lines[-1].split()[1])


def test_a_mirror_after_kill_9(place, tmp_path):
    """The folder opens on the host, and holds whole rows, one after the other, up to at least the last flush."""
    seen = 0
    for turn in range(3):
        flushed = killed(place, tmp_path / "store", 0.05 + 0.1 * turn)
        rb = ReplayBuffer.open(tmp_path / "store")
        rows = rb.storage.extent().rows(torch.arange(len(rb)))
        found = rb.storage[rows]
        assert not bool(torn.wrong(found).any())
        numbers = found["number"][rb.storage.tickets_of(rows).argsort()]
        assert torch.equal(numbers, torch.arange(int(numbers[0]), int(numbers[0]) + len(numbers)))
        assert int(numbers[-1]) == rb.write_count >= max(flushed - 1, seen)
        leaves = rb.sampler.priorities().leaves(500)[rows]
        assert ((leaves == found["number"].double() % 13 + 2) | (leaves <= 14)).all()
        seen = rb.write_count
        rb.close()


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_batches_after_a_fork(place):
    """Private rows may move while a child shares their pages: the parent's batches are right; the child's loader raises."""
    here, there = twins({"a": torch.arange(64), "b": torch.arange(64)[:, None].expand(64, 5_000).to(torch.uint8)}, 64)
    with DeviceLoader(here, "cuda", transport="direct") as loader:
        batches = iter(loader)
        assert same(dict(next(batches)), dict(there.sample()))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(writing)
                os.read(reading, 1)
                next(batches)
            except RuntimeError:
                status = 0
            finally:
                os._exit(status)
        os.close(reading)
        for rb in (here, there):
            rb.extend({"a": torch.arange(100, 164), "b": torch.arange(64)[:, None].expand(64, 5_000).to(torch.uint8)})
        for _ in range(3):
            assert same(dict(next(batches)), dict(there.sample()))
        os.close(writing)
        assert os.waitpid(child, 0)[1] == 0
        assert same(dict(next(batches)), dict(there.sample()))


def test_another_device(place):
    if place.is_imitated:
        where = "cuda"
    elif torch.cuda.device_count() < 2:
        pytest.skip("one device")
    else:
        where = "cuda:1"
    here, there = twins({"a": torch.arange(20), "b": torch.rand(20, 3)}, 20)
    before = None if place.is_imitated else torch.cuda.current_device()
    with DeviceLoader(here, where, transport="direct") as loader:
        for batch in itertools.islice(loader, 3):
            assert place.is_imitated or str(batch["a"].device) == where
            assert same(dict(batch), dict(there.sample()))
    if before is not None:
        assert torch.cuda.current_device() == before
        storage = LazyTensorStorage(20, device=where)
        rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=0.6, beta=0.4), batch_size=4)
        rb.extend(TensorDict({"a": torch.arange(9, device=where)}, [9]))
        batch, info = rb.sample(return_info=True)
        rb.update_priority(info["index"], torch.rand(4, device=where), generation=info["index_generation"])
        rb.stats()
        assert str(batch["a"].device) == where
