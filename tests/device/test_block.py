"""One block per batch: every kind of batch, what does not fit, and whose memory it is."""

import collections
import gc
import itertools
import sys
import weakref

import pytest
import torch
from tensordict import NonTensorData, TensorDict, tensorclass

import engram
from engram import (
    DeviceLoader,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram._support import native as _native
from engram._support.nested import tensors
from engram.device import loader, pinning
from engram.device.pinning import Block, Blocks, HostMemory
from tests.device.imitation import Imitation


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """No time passes, so that no batch is slow."""
    made = Imitation(late=True)
    monkeypatch.setattr(pinning, "host_memory", lambda: made.memory)
    monkeypatch.setattr(pinning, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(loader, "Accelerator", lambda device: made)
    monkeypatch.setattr(DeviceLoader, "_may_read", lambda self, rb: False)
    monkeypatch.setattr(loader, "existing_device", lambda device, name: torch.device("cuda", 0))
    return made


def sends(streams):
    return [entry for entry in streams.log if entry[0] == "send"]


def described(batch):
    """Kinds, names, dtypes, shapes and strides of a batch; and its values, as bytes."""
    if isinstance(batch, torch.Tensor):
        values = batch.resolve_conj().contiguous().flatten().view(torch.uint8)
        return batch.dtype, tuple(batch.shape), values.tolist()
    if isinstance(batch, dict):
        return {key: described(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch).__name__, [described(value) for value in batch]
    if engram._support.nested.is_tensordict(batch) and not isinstance(batch, NonTensorData):
        entries = batch.to_tensordict() if type(batch) is not TensorDict else batch
        return type(batch), batch.batch_size, {key: described(value) for key, value in entries.items()}
    return batch.data if isinstance(batch, NonTensorData) else batch


# ---- every kind of batch -------------------------------------------------------------------------------------------------------


@tensorclass
class Step:
    a: torch.Tensor
    b: torch.Tensor


Pair = collections.namedtuple("Pair", "a b")


def rows(n=40):
    generator = torch.Generator().manual_seed(1)
    return TensorDict(
        {
            "a": torch.arange(n),
            "seven": torch.randint(256, (n, 7), dtype=torch.uint8, generator=generator),
            "n": {"b": torch.rand(n, 3, 2, generator=generator), "done": torch.arange(n) % 10 == 9},
            "reward": torch.rand(n, 1, generator=generator),
            "t": torch.arange(n) // 10,
            "next": {"reward": torch.ones(n, 1), "done": torch.arange(n).reshape(n, 1) % 10 == 9},
        },
        [n],
    )


def made(cls=TensorDictReplayBuffer, data=rows, storage=LazyTensorStorage, batch_size=8, **options):
    generator = torch.Generator().manual_seed(3)
    rb = cls(storage=storage(100), batch_size=batch_size, generator=generator, **options)
    rb.extend(data())
    return rb


def prioritized(**options):
    rb = made(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5, **options)
    rb.update_priority(torch.arange(40), torch.arange(40) + 0.5)
    return rb


def as_dict():
    return {"a": torch.arange(40), "x": {"y": torch.rand(40, 3, generator=torch.Generator().manual_seed(1))}}


def a_transform(td):
    td["wide"] = td["reward"].expand(-1, 50)
    td["turned"] = td["n", "b"].transpose(1, 2)
    td["float"] = td["seven"].float() / 255
    td["same"] = td["a"]
    td["count"] = torch.tensor(td.batch_size[0]).expand(td.batch_size)
    return td


KINDS = {
    "uniform": made,
    "of dicts": lambda: made(ReplayBuffer, as_dict),
    "one tensor": lambda: made(ReplayBuffer, lambda: torch.arange(40.0)),
    "tuples": lambda: made(
        ReplayBuffer, lambda: (torch.arange(40), torch.rand(40, 2, generator=torch.Generator().manual_seed(1)))
    ),
    "named tuples": lambda: made(ReplayBuffer, lambda: Pair(torch.arange(40), {"c": torch.arange(40.0)})),
    "tensorclass": lambda: made(
        ReplayBuffer, lambda: Step(a=torch.arange(40), b=torch.arange(80.0).reshape(40, 2), batch_size=[40])
    ),
    "an epoch": lambda: made(sampler=SamplerWithoutReplacement()),
    "by priority": prioritized,
    "by priority, no TensorDict": lambda: made(ReplayBuffer, sampler=PrioritizedSampler(100, 0.7, 0.5)),
    "slices": lambda: made(sampler=SliceSampler(slice_len=4, traj_key="t")),
    "slices that may be short": lambda: made(
        sampler=SliceSampler(slice_len=7, traj_key="t", strict_length=False), batch_size=14
    ),
    "n-step": lambda: made(sampler=NStep(RandomSampler(), 2, 0.9)),
    "lists": lambda: made(ReplayBuffer, lambda: [torch.tensor([i, i + 1]) for i in range(40)], ListStorage),
    "collate_fn": lambda: made(
        ReplayBuffer,
        lambda: [{"a": i} for i in range(40)],
        ListStorage,
        collate_fn=lambda items: {"a": torch.tensor([item["a"] for item in items]), "kept": "text"},
    ),
    "a transform": lambda: made(transform=a_transform),
    "by priority, a transform": lambda: prioritized(transform=a_transform),
    "prefetch": lambda: made(prefetch=2),
    "pin_memory": lambda: made(pin_memory=True),
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("return_info", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_of_the_buffer_by_one_copy_each(streams, monkeypatch, kind, return_info, large):
    if large:
        monkeypatch.setattr(loader._ThreadRule, "BYTES", 1)
    rb, other = KINDS[kind](), KINDS[kind]()
    if return_info:
        expected = [other.sample(return_info=True) for _ in range(4)]
    else:
        expected = [batch for batch, _ in zip(other, range(4), strict=False)]
    with DeviceLoader(rb, "cuda", return_info=return_info) as device_loader:
        batches = iter(device_loader)
        for number, one in enumerate(expected):
            batch = next(batches)
            assert described(batch) == described(one)
            assert all(streams.holds(leaf) and leaf.is_contiguous() for leaf in tensors(batch))
            assert len({leaf.untyped_storage().data_ptr() for leaf in tensors(batch)}) == 1
            assert large or len(sends(streams)) == number + 1
        batches.close()
        stats = device_loader.stats()
    assert stats["batches"] == 4
    assert stats["spilled"] <= 1
    assert stats["bytes"] >= sum(leaf.nbytes for batch in expected for leaf in tensors(batch)) * 0.5


def test_what_a_connected_buffer_received(streams, tmp_path):
    """Its large columns are views of what came over the wire, which are read-only."""
    pytest.importorskip("pyarrow")
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "store"))
    stored = rows().set("long", torch.arange(40 * 9001).reshape(40, 9001))
    rb.extend(stored)
    with (
        engram.serve(rb) as address,
        TensorDictReplayBuffer.connect(address, batch_size=16) as remote,
        DeviceLoader(remote, "cuda", depth=1) as device_loader,
    ):
        for batch, _ in zip(device_loader, range(3), strict=False):
            index = batch.pop("index")
            assert described(batch) == described(stored[index])
            assert all(map(streams.holds, tensors(batch)))
    assert len(sends(streams)) == 4


# ---- leaves of every kind ------------------------------------------------------------------------------------------------------


class Given:
    """A buffer of batches that were made before."""

    batch_size = 4
    sampler = None

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes(streams, dtype):
    values = torch.randint(256, (3 * 5 * 16 * 2,), dtype=torch.uint8).clamp_(max=1).view(dtype)[:30].reshape(3, 5, 2)
    batch = {
        "plain": values.clone(),
        "none": values[:0],
        "no columns": values[:, :0],
        "number": values[0, 0, 0],
        "turned": values.transpose(0, 2),
        "every other": values[:, ::2],
        "expanded": values[:, :1].expand(3, 4, 2),
        "seven": values.flatten()[1:8],
        "sixteen": values.clone().reshape(*[1] * 15, 30),
    }
    (found,) = DeviceLoader(Given(batch), "cuda")
    assert described(found) == described(batch)
    assert len(sends(streams)) == 1
    for name, leaf in found.items():
        assert leaf.is_contiguous(), name
        assert leaf.stride() == torch.empty(leaf.shape).stride()


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view, lambda x: x.conj().imag])
def test_bytes_that_are_not_the_values(streams, view):
    values = torch.arange(4) + 1j * torch.arange(4)
    (found,) = DeviceLoader(Given((view(values), values)), "cuda")
    assert found[0].tolist() == view(values).tolist()
    assert found[1].tolist() == values.tolist()
    assert len(sends(streams)) == 1


def test_2000_fields(streams):
    batch = {f"f{i}": torch.full((4, i % 5), i, dtype=torch.int16) for i in range(2000)}
    expected = described(batch)
    for found in DeviceLoader(Given(batch, batch, batch), "cuda"):
        assert described(found) == expected
    assert len(sends(streams)) == 3


def test_nothing_to_copy(streams):
    there = streams.on_device(torch.zeros(3))
    for batch in ("text", {}, {"there": there}, (there, [there])):
        (found,) = DeviceLoader(Given(batch), "cuda")
        assert described(found) == described(batch)
        assert tensors(found) == tensors(batch) or all(leaf is there for leaf in tensors(found))
    assert sends(streams) == []


def test_a_tensor_that_occurs_twice_stays_one(streams):
    one = torch.arange(4)
    (found,) = DeviceLoader(Given({"a": one, "b": TensorDict({"c": one}, [4]), "d": [one, one[:]]}), "cuda")
    assert found["a"] is found["b"]["c"] is found["d"][0]
    assert found["d"][1] is not found["a"]
    assert found["d"][1].tolist() == [0, 1, 2, 3]


def test_other_objects_stay(streams):
    batch = TensorDict(
        {
            "a": torch.arange(3),
            "s": NonTensorData("text", batch_size=[3]),
            "d": Step(torch.ones(3), torch.ones(3), batch_size=[3]),
        },
        [3],
    )
    for locked in (False, True):
        given = batch.clone().lock_() if locked else batch
        (found,) = DeviceLoader(Given((given, {"text": "x", "none": None, "n": 1})), "cuda")
        assert found[0]["s"] == "text"
        assert type(found[0].get("d")) is Step
        assert found[0].device == streams.device
        assert found[1] == {"text": "x", "none": None, "n": 1}


def test_a_batch_of_a_graph_stays_in_it(streams):
    weight = torch.ones(4, requires_grad=True)
    (found,) = DeviceLoader(Given({"a": weight * 2, "b": torch.zeros(4)}), "cuda")
    found["a"].sum().backward()
    assert weight.grad.tolist() == [2] * 4
    assert not found["b"].requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("odd", [torch.Tensor.to_sparse, lambda x: torch.nested.nested_tensor([x[0], x[1][:1]])])
def test_tensors_that_are_not_dense(streams, odd):
    with pytest.raises(RuntimeError, match=r"expected a dense tensor at \['x', 'y'\]"):
        list(DeviceLoader(Given({"x": {"y": odd(torch.eye(2))}, "z": torch.zeros(2)}), "cuda"))


def test_changes_of_one_tensor_are_no_changes_of_another(streams):
    """Views of a block would share a version, and autograd would refuse the graph of one when another is changed."""
    batch = next(iter(DeviceLoader(made(batch_size=4), "cuda")))
    weight = torch.ones(4, 1, requires_grad=True)
    loss = (batch["reward"] * weight).sum()
    batch["a"].add_(1)
    batch["n", "b"].mul_(weight[:, :, None].detach())
    loss.backward()
    assert not batch["reward"]._is_view()
    batch["n", "b"].mul_(weight[:, :, None])  # as of any new tensor


# ---- what does not fit -----------------------------------------------------------------------------------------------------------


class Growing:
    """A buffer whose batches have other sizes each time."""

    batch_size = 4
    sampler = None

    def __init__(self, sizes, kind=ReplayBuffer):
        self.rb = ReplayBuffer(storage=LazyTensorStorage(4000))
        self.rb.extend({"a": torch.arange(4000), "b": torch.arange(4000.0)})
        self.sizes = sizes

    def __iter__(self):
        return (self.rb.sample(n) for n in self.sizes)


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_that_grow_and_shrink(streams, monkeypatch, depth):
    monkeypatch.setattr(loader._ThreadRule, "BYTES", 1)
    sizes = [4, 4, 100, 100, 3, 4000, 5, 4000, 0 + 1, 2000]
    device_loader = DeviceLoader(Growing(sizes), "cuda", depth)
    for n, batch in zip(sizes, device_loader, strict=True):
        assert batch["a"].shape == (n,)
        assert torch.equal(batch["a"].float(), batch["b"])
    assert len(sends(streams)) == len(sizes)
    stats = device_loader.stats()
    assert stats["spilled"] == 2, "100 rows and 4,000 rows were larger than all before"
    assert sum(sizes) * 12 <= stats["bytes"] <= sum(sizes) * 20 + len(sizes) * 64 * 4
    assert streams.memory.most <= 2 * (4000 * 20 + 64 * 4)


def test_a_block_that_does_not_spill_refuses():
    """The control: without spilling, the second size is an error, as it is in the block of a connection."""
    growing = Growing([])
    memory = torch.empty(256, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected a block with room"), _native.OutputBlock(memory.numpy()):
        growing.rb.sample(1000)
    native = _native.OutputBlock(memory.numpy(), True)
    with native:
        batch = growing.rb.sample(1000)
    assert native.used <= 256 < 1000 * 12 <= native.wanted
    assert torch.equal(batch["a"].float(), batch["b"])


def test_a_part_that_no_tensor_was_made_of_is_free_again_and_no_other():
    growing = Growing([])
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    kept = []
    native = _native.OutputBlock(memory.numpy(), True)
    empty = ReplayBuffer(storage=LazyTensorStorage(10))
    empty.extend({"a": torch.arange(4)})
    empty.empty()
    with native:
        for n in (10, 20, 30):
            kept.append(growing.rb.sample(n))
            used = native.used
            with pytest.raises(RuntimeError, match="no row"):
                empty.sample(100)
            assert native.used == used
    for batch in kept:
        assert torch.equal(batch["a"].float(), batch["b"])


def test_packing():
    memory = torch.zeros(1024, dtype=torch.uint8)
    native = _native.OutputBlock(memory.numpy(), True)
    inside = memory.view(torch.int64)[:4]
    assert native.reserve(32) == 0
    outside = torch.tensor([1, 2, 3], dtype=torch.int16)
    turned = torch.ones(2, 3).T
    assert native.pack([inside, outside, turned, inside[1:2], inside[::2], memory[60:70]]) == [0, 64, -1, 8, -1, 128]
    assert memory[64:70].view(torch.int16).tolist() == [1, 2, 3]
    assert native.used == 192
    assert native.pack([torch.zeros(833, dtype=torch.uint8)]) is None, "one byte too many"
    assert native.wanted == 192 + 896
    assert native.pack([torch.full((832,), 9, dtype=torch.uint8)]) == [192]
    assert memory[192:].tolist() == [9] * 832
    assert native.reserve(1) is None
    assert native.pack([torch.zeros(0), torch.zeros(3, 0)]) == [1024, 1024]
    assert native.pack([torch.zeros((), device="meta")]) == [-1]


def test_large_tensors_are_packed_by_several_threads_and_alike():
    sizes = [1, 131_072, 131_073, 700_000, 0, 64, 5_000_001]
    leaves = [torch.randint(256, (n,), dtype=torch.uint8) for n in sizes]
    one = Block(HostMemoryHere(), sum(sizes) + 64 * len(sizes))
    begins = one.pack(leaves)
    for begin, leaf in zip(begins, leaves, strict=True):
        assert begin % 64 == 0
        assert torch.equal(one.memory[begin : begin + len(leaf)], leaf)


def test_what_is_mostly_thrown_away_is_not_drawn_into_blocks(streams):
    rb = made(
        ReplayBuffer,
        lambda: {"a": torch.arange(40), "long": torch.zeros(40, 1000)},
        transform=lambda data: {"a": data["a"]},
    )
    device_loader = DeviceLoader(rb, "cuda")
    batches = iter(device_loader)
    grown = []
    for _ in range(5):
        before = device_loader.stats()["bytes"]
        assert next(batches)["a"].shape == (8,)
        grown.append(device_loader.stats()["bytes"] - before)
    assert grown[0] == grown[2] == grown[3] == grown[4] == 64
    assert grown[1] > 32_000, "found out here"


# ---- whose memory it is ----------------------------------------------------------------------------------------------------------


class HostMemoryHere(HostMemory):
    """Counts what lives of what it made."""

    def __init__(self):
        self.made, self.most, self.living = 0, 0, 0

    def empty(self, shape, dtype):
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.made += 1
        self.living += 1
        self.most = max(self.most, self.living)
        weakref.finalize(tensor, self.gone)
        return tensor

    def gone(self):
        self.living -= 1

    def is_pinned(self, tensor):
        return True


class Copying(Imitation):
    """Keeps nothing."""

    def __init__(self):
        super().__init__()
        self.memory = HostMemoryHere()

    def holds(self, tensor):
        return False

    def keep(self, tensor, stream):
        pass

    def send(self, tensor):
        return tensor.clone()

    def mark(self, stream):
        return None

    def wait(self, stream, event):
        pass


def overlaps(batches):
    """Whether tensors of two batches lie in one memory."""
    spans = sorted(
        (leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes, number)
        for number, batch in enumerate(batches)
        for leaf in tensors(batch)
    )
    return any(end > begin and one != other for (_, end, one), (begin, _, other) in itertools.pairwise(spans))


@pytest.mark.parametrize("reused", [False, True])
def test_every_batch_has_memory_of_its_own(reused):
    """Batches on the host, before their copies: a copy may still read from them. The control reuses one block."""
    streams = Copying()
    blocks = Blocks(streams)
    if reused:
        memory = torch.empty(1 << 16, dtype=torch.uint8)
        streams.memory.empty = lambda shape, dtype: memory[: shape[0]]
    batches = iter(made())
    kept = []
    for _ in range(20):
        drawn = blocks.draw(batches)
        blocks.send(drawn.batch, drawn.block)
        kept.append(drawn.batch)
    assert overlaps(kept) == reused


@pytest.mark.parametrize("depth", [1, 2])
def test_kept_batches_stay_what_they_are(streams, monkeypatch, depth):
    monkeypatch.setattr(loader._ThreadRule, "BYTES", 1)
    found = []
    with DeviceLoader(made(transform=a_transform), "cuda", depth) as device_loader:
        for batch, _ in zip(device_loader, range(30), strict=False):
            found.append((batch, described(batch)))
    assert not overlaps([batch for batch, _ in found])
    assert all(described(batch) == before for batch, before in found)


@pytest.mark.parametrize("large", [False, True])
def test_memory_is_bounded(monkeypatch, large):
    streams = Copying()
    monkeypatch.setattr(loader, "Accelerator", lambda device: streams)
    monkeypatch.setattr(loader._ThreadRule, "BYTES", 1 if large else 10**6)
    gc.collect()
    gc.disable()
    try:
        with DeviceLoader(made(), "cuda", 2) as device_loader:
            for _, _ in zip(device_loader, range(10_000), strict=False):
                pass
    finally:
        gc.enable()
    assert device_loader.stats()["batches"] == 10_001
    assert streams.memory.made >= 10_000
    assert streams.memory.most <= (6 if large else 3), "without the help of the garbage collector"
    assert streams.memory.living <= 1


def test_transforms_may_draw_from_another_buffer(streams):
    """What they draw lies in the same block, and is in order."""
    other, third = made(), made()
    rb = made(transform=lambda td: td.set("other", other.sample()["a"]))
    for batch, _ in zip(DeviceLoader(rb, "cuda"), range(3), strict=False):
        assert torch.equal(batch["other"], third.sample()["a"])


def test_python_calls_of_a_batch(streams, monkeypatch):
    """Of seven fields in two TensorDicts: each call costs 0.1 µs and more, of what is 50 µs in all."""
    fast = Copying()
    monkeypatch.setattr(loader, "Accelerator", lambda device: fast)
    fields = {
        "obs": torch.zeros(9, 17),
        "action": torch.zeros(9, 6),
        "reward": torch.zeros(9, 1),
        "done": torch.zeros(9, 1),
    }
    rb = made(
        data=lambda: TensorDict({**fields, "terminated": torch.zeros(9, 1), "next": {"obs": torch.zeros(9, 17)}}, [9])
    )
    batches = iter(DeviceLoader(rb, "cuda"))
    for _ in range(3):
        next(batches)
    calls = collections.Counter()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    next(batches)
    sys.setprofile(None)
    assert calls["call"] <= 135
