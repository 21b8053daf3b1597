"""Pinned memory. Without an accelerator a stand-in notes which tensors are asked to be pinned, and when."""

import collections
import copy
import ctypes
import linecache
import weakref

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass
from torch import nn

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.device import pinning
from engram.device.pinning import HostMemory, Pinning

Pair = collections.namedtuple("Pair", "first second")


@tensorclass
class Step:
    obs: torch.Tensor
    name: str


class Noting(HostMemory):
    """Pinned memory as far as anybody can see: it knows its own."""

    def __init__(self, events=None):
        self.asked = []
        self.mine = set()
        self.held = []
        self.events = events if events is not None else []

    def empty(self, shape, dtype):
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.asked.append((tuple(shape), dtype))
        self.mine.add(tensor.untyped_storage().data_ptr())
        self.held.append(tensor)  # so that no address comes twice
        self.events.append("pin")
        return tensor

    def is_pinned(self, tensor):
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self.mine


@pytest.fixture
def memory(monkeypatch):
    memory = Noting()
    monkeypatch.setattr(pinning, "host_memory", lambda: memory)
    return memory


def leaves(data):
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in leaves(value)]
    if isinstance(data, tuple | list):
        return [leaf for value in data for leaf in leaves(value)]
    if isinstance(data, torch.Tensor):
        return [data]
    if hasattr(data, "batch_size"):
        found = []
        data.apply(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, filter_empty=True)
        return found
    return []


def steps(n=40):
    return TensorDict(
        {"obs": torch.arange(n * 3.0).reshape(n, 3), "n": {"b": torch.arange(n)}, "t": torch.arange(n) // 8}, [n]
    )


SAMPLERS = {
    "uniform": RandomSampler,
    "pass": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(100, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=4, traj_key="t"),
    "padded slices": lambda: SliceSampler(slice_len=6, traj_key="t", pad_output=True, strict_length=False),
    "prioritized slices": lambda: PrioritizedSliceSampler(100, 0.6, 0.4, slice_len=4, traj_key="t"),
}


# ---- gathered straight into it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_transforms_rows_are_gathered_into_pinned_memory(memory, sampler, storage):
    """Every leaf is a tensor that was asked for: nothing was copied a second time."""
    rb = TensorDictReplayBuffer(storage=storage(100), sampler=SAMPLERS[sampler](), pin_memory=True)
    plain = TensorDictReplayBuffer(storage=rb.storage, sampler=SAMPLERS[sampler]())
    rb.extend(steps())
    for _ in range(2):
        memory.asked.clear()
        torch.manual_seed(3)
        batch, info = rb.sample(12, return_info=True)
        assert all(memory.is_pinned(leaf) for leaf in leaves(batch) + leaves(info))
        assert len(memory.asked) <= len(leaves(batch)) + 2  # rows and numbers are drawn in any case
        assert {((12, 3), torch.float32), ((12,), torch.int64)} <= set(memory.asked)
        torch.manual_seed(3)
        if sampler != "pass":
            assert (batch == plain.sample(12)).all()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.complex64]
)
def test_dtypes(memory, dtype):
    data = torch.arange(20).to(dtype).reshape(10, 2)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False), pin_memory=True)
    rb.extend(data)
    assert torch.equal(rb.sample(10), data)
    assert memory.asked[0] == ((10, 2), dtype)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_fields_without_values(memory, shape):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), pin_memory=True)
    rb.extend({"a": torch.zeros(5, *shape), "b": torch.arange(5)})
    batch = rb.sample(4)
    assert batch["a"].shape == (4, *shape)
    assert memory.is_pinned(batch["b"])


def test_columns(memory):
    rb = ReplayBuffer(storage=LazyTensorStorage(20, ndim=2), pin_memory=True)
    rb.extend(torch.arange(20).reshape(4, 5))
    batch, info = rb.sample(6, return_info=True)
    assert all(memory.is_pinned(leaf) for leaf in [batch, *info["index"]])


def test_rows_that_were_moved_while_they_were_read(memory, monkeypatch):
    class ByRow(SamplerWithoutReplacement):
        """Draws, and leaves reading to the buffer."""

        traits = SamplerWithoutReplacement.traits._replace(reads_natively=False)

    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ByRow(), pin_memory=True)
    rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
    read, first = rb.storage.read, [True]

    def moving(rows, expected=None):
        columns, moved = read(rows, expected)
        if first.pop() if first else False:
            columns[0][:1] = -1
            moved = [0]
        return columns, moved

    monkeypatch.setattr(rb.storage, "read", moving)
    batch = rb.sample(4)
    assert (batch["a"] >= 0).all()
    assert all(memory.is_pinned(leaf) for leaf in leaves(batch))


def test_an_error_of_the_allocator_comes_through_and_nothing_is_lost(memory, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), pin_memory=True)
    rb.extend({"a": torch.arange(5), "b": torch.arange(5)})
    empty, tries = memory.empty, []

    def full(shape, dtype):
        tries.append(1)
        if len(tries) == 2:
            raise RuntimeError("no pinned memory left")
        return empty(shape, dtype)

    memory.empty = full
    with pytest.raises(RuntimeError, match="no pinned memory left"):
        rb.sample(3)
    batch = rb.sample(3)
    assert torch.equal(batch["a"], batch["b"])
    memory.asked.clear()
    assert ReplayBuffer(storage=rb.storage).sample(3)["a"].shape == (3,)
    assert not memory.asked, "it is a matter of one buffer's sample alone"


def test_windows_that_moved_are_replaced_by_longer_ones(memory):
    """For which there is no room: it is made anew, while the GIL is released."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(32),
        sampler=SliceSampler(num_slices=4, traj_key="t", strict_length=False),
        batch_size=32,
        pin_memory=True,
    )

    def write(length, numbers):
        for t in numbers:
            rb.extend(TensorDict({"a": torch.full((length,), t), "t": torch.full((length,), t)}, [length]))

    write(2, range(16))
    empty, asked = memory.empty, []

    def empty_and_write(shape, dtype):
        asked.append(shape[0])
        if len(asked) == 1:  # between choosing rows and reading them
            write(8, range(100, 104))
        return empty(shape, dtype)

    memory.empty = empty_and_write
    batch = rb.sample()
    assert asked[0] == 8
    assert max(asked) == 32
    assert rb.stats()["redraws"] > 0
    assert bool((batch["a"] == batch["t"]).all())
    assert bool((batch["a"] >= 100).all())
    assert all(memory.is_pinned(leaf) for leaf in leaves(batch))


def test_rows_by_number_and_writes_are_not_pinned(memory):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), pin_memory=True)
    rb.extend(torch.arange(5))
    assert rb.add(torch.tensor(5)) == 5
    _ = rb[[1, 2]], rb[0], rb[:]
    assert not memory.asked


def test_off_asks_nobody(memory):
    for off in (False, None):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), pin_memory=off)
        rb.extend(steps())
        rb.sample(4)
    assert not memory.asked


# ---- a batch that somebody holds -----------------------------------------------------------------------------------------


class Recycling(HostMemory):
    """Hands a block out again when no tensor refers to it, as torch's allocator does."""

    def __init__(self):
        self.free = collections.defaultdict(list)
        self.made = 0

    def empty(self, shape, dtype):
        count = max(torch.Size(shape).numel(), 1)
        room = self.free[count, dtype]
        if room:
            block = room.pop()
        else:
            block = ctypes.create_string_buffer(count * dtype.itemsize)
            self.made += 1
        owner = (ctypes.c_char * len(block)).from_buffer(block)
        weakref.finalize(owner, room.append, block)
        return torch.frombuffer(owner, dtype=dtype)[: torch.Size(shape).numel()].reshape(shape)

    def is_pinned(self, tensor):
        return True


def test_a_batch_that_is_referred_to_is_never_reused(monkeypatch):
    memory = Recycling()
    monkeypatch.setattr(pinning, "host_memory", lambda: memory)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), pin_memory=True)
    rb.extend(steps())
    kept = []
    for round_ in range(20):
        batch = rb.sample(8)
        view = batch["obs"][2:5, 1].view(-1)
        kept.append((view, view.clone()))
        kept.append((batch["n"], batch["n"].clone()))
        if round_ == 10:
            made = memory.made
            kept.clear()
        del batch, view
    assert memory.made <= made + 2, "what was let go is used again"
    for tensor, as_it_was in kept:
        assert (tensor == as_it_was).all()


def test_the_buffer_itself_holds_nothing(memory):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), pin_memory=True)
    rb.extend(torch.arange(5))
    memory.held = collections.deque(maxlen=0)
    batch = rb.sample(4)
    gone = weakref.ref(batch)
    del batch
    assert gone() is None


# ---- after the transforms ------------------------------------------------------------------------------------------------


def test_a_transform_that_builds_a_tensordict(memory):
    """Its device is None: the field's buffers then pin nothing, without a word."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8, pin_memory=True)
    rb.append_transform(lambda td: TensorDict({"x": td["obs"] * 2, "deep": {"y": td["t"] + 1}}, td.batch_size))
    rb.append_transform(lambda td: TensorDict({"z": td["x"] + 1, **td.to_dict()}, td.batch_size))
    rb.extend(steps())
    batch, info = rb.sample(return_info=True)
    assert len(leaves(batch)) == 4  # index, too
    assert all(memory.is_pinned(leaf) for leaf in leaves(batch) + leaves(info))
    assert batch.device == torch.device("cpu")
    assert batch["deep"].device == torch.device("cpu")
    assert torch.equal(batch["z"], batch["x"] + 1)
    assert batch["index"] is info["index"], "pinned once"


def test_the_order():
    events = []
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    rb._wiring.pinning = Pinning(Noting(events))
    for name in "ab":
        rb.append_transform(lambda td, name=name: (events.append(name), td.set(name, td["t"] * 1))[1])
    rb.extend(steps())
    rb.sample()
    assert events == ["a", "b", *["pin"] * 6]


def test_modules(memory):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=nn.Linear(3, 2), pin_memory=True)
    rb.extend(torch.rand(10, 3))
    assert memory.is_pinned(rb.sample(4))


def test_list_storages_are_pinned_after_stacking(memory):
    rb = ReplayBuffer(storage=ListStorage(10), pin_memory=True)
    rb.extend([{"a": torch.tensor(i)} for i in range(5)])
    batch, info = rb.sample(3, return_info=True)
    assert all(memory.is_pinned(leaf) for leaf in (batch["a"], info["index"]))
    assert len(memory.asked) == 2
    items = ReplayBuffer(storage=rb.storage, collate_fn=list, pin_memory=True).sample(3)
    assert all(memory.is_pinned(item["a"]) for item in items)


def test_leaves_agree_or_not(memory):
    td = TensorDict({"a": torch.zeros(2), "b": TensorDict({"c": torch.zeros(2, device="meta")}, [2])}, [2])
    cpu = torch.device("cpu")
    pinned = Pinning(memory)(td, cpu)
    assert pinned.device is None
    assert pinned["b"].device is None
    assert Pinning(memory)(td["b"], cpu).device is None
    assert Pinning(memory)(TensorDict({"a": torch.zeros(2)}, [2]), None).device is None
    assert Pinning(memory)(TensorDict({}, [2]), cpu).device is None
    assert Pinning(memory)(TensorDict({"a": torch.zeros(2)}, [2], device="cpu"), None).device == cpu


# ---- whatever comes out --------------------------------------------------------------------------------------------------


FORMS = {
    "tensor": lambda: torch.arange(4),
    "dict": lambda: {"a": torch.arange(4), "b": {"c": torch.zeros(4), "n": 3}},
    "ordered dict": lambda: collections.OrderedDict(a=torch.arange(4)),
    "default dict": lambda: collections.defaultdict(list, a=torch.arange(4)),
    "tuple": lambda: (torch.arange(4), [torch.zeros(4), None], "text"),
    "named tuple": lambda: Pair(torch.arange(4), torch.zeros(4)),
    "TensorDict": lambda: TensorDict({"a": torch.arange(4), "n": {"b": torch.zeros(4, 2)}}, [4], names=["time"]),
    "TensorDict on cpu": lambda: TensorDict({"a": torch.arange(4)}, [4], device="cpu"),
    "locked": lambda: TensorDict({"a": torch.arange(4)}, [4]).lock_(),
    "not only tensors": lambda: TensorDict({"a": torch.arange(4), "s": NonTensorData("hi", batch_size=[4])}, [4]),
    "tensorclass": lambda: Step(obs=torch.zeros(4, 2), name="walk", batch_size=[4]),
    "tensorclass within": lambda: TensorDict({"s": Step(obs=torch.zeros(4), name="x", batch_size=[4])}, [4]),
    "lazy stack": lambda: LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(n + 1)}, []) for n in range(3)]),
    "arrays": lambda: {"a": torch.arange(4).numpy(), "b": torch.zeros(2)},
    "expanded": lambda: {"a": torch.zeros(4, 1).expand(4, 3)},
    "transposed": lambda: {"a": torch.arange(12).reshape(3, 4).T},
    "with gradient": lambda: {"a": torch.zeros(3, requires_grad=True) * 2},
    "conjugate": lambda: {"a": torch.randn(3, dtype=torch.complex64).conj()},
    "scalar": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(memory, form):
    data = FORMS[form]()
    before = [leaf.clone() for leaf in leaves(data)]
    pinned = Pinning(memory)(data)
    assert type(pinned) is type(data)
    assert all(memory.is_pinned(leaf) for leaf in leaves(pinned))
    for new, old in zip(leaves(pinned), before, strict=True):
        assert torch.equal(new, old)
        assert new.requires_grad == old.requires_grad
    assert not any(memory.is_pinned(leaf) for leaf in leaves(data)), "what came in is as it was"
    if hasattr(data, "batch_size"):
        assert (pinned.batch_size, pinned.names, pinned.device) == (data.batch_size, data.names, data.device)
        assert pinned.is_locked == data.is_locked
    again = Pinning(memory)(pinned)
    assert again is pinned, "what is pinned passes through"


def test_other_entries_stay(memory):
    pinned = Pinning(memory)(FORMS["tensorclass"]())
    assert pinned.name == "walk"
    pinned = Pinning(memory)(FORMS["tuple"]())
    assert pinned[1][1] is None
    assert pinned[2] == "text"
    assert Pinning(memory)(FORMS["not only tensors"]())["s"] == "hi"


def test_leaves_elsewhere_pass_through(memory):
    elsewhere = torch.zeros(3, device="meta")
    pinned = Pinning(memory)({"a": elsewhere, "b": torch.zeros(3)})
    assert pinned["a"] is elsewhere
    assert len(memory.asked) == 1


def test_one_tensor_twice_stays_one(memory):
    shared = torch.zeros(3)
    pinned = Pinning(memory)(({"a": shared}, TensorDict({"b": shared}, [3])))
    assert pinned[0]["a"] is pinned[1]["b"]


@pytest.mark.parametrize(
    ("odd", "words"),
    [(lambda: torch.zeros(3, 3).to_sparse(), "sparse_coo"), (lambda: torch.zeros(3, 3).to_sparse_csr(), "csr")],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_cannot_be_pinned_is_named(memory, odd, words):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=lambda x: {"deep": {"a": odd()}}, pin_memory=True)
    rb.extend(torch.arange(5))
    with pytest.raises(RuntimeError, match=f"'deep', 'a'.*{words}"):
        rb.sample(3)
    assert len(rb) == 5


# ---- whether there is anything to pin for ---------------------------------------------------------------------------------


def test_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no accelerator") as said:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), pin_memory=True)
    assert len(said) == 1
    rb.extend(steps())
    for _ in range(3):
        batch = rb.sample(4)
    assert not batch["obs"].is_pinned()
    rb.append_transform(lambda td: TensorDict({"a": td["obs"]}, [4]))
    assert rb.sample(4).device == torch.device("cpu"), "as with one"


@pytest.mark.parametrize(
    "make",
    [
        lambda _: ReplayBuffer(10, pin_memory=True),
        lambda _: TensorDictReplayBuffer(storage=LazyTensorStorage(10), pin_memory=True),
        lambda _: PrioritizedReplayBuffer(10, alpha=1.0, beta=1.0, pin_memory=True),
        lambda _: TensorDictPrioritizedReplayBuffer(10, alpha=1.0, beta=1.0, pin_memory=True),
        lambda folder: ReplayBuffer.open(folder, pin_memory=True),
    ],
)
def test_the_warning_points_to_the_line_that_asked(monkeypatch, tmp_path, make):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(steps(5))
    rb.close()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no accelerator") as said:
        make(tmp_path).close()
    assert [(one.filename, "pin_memory=True" in linecache.getline(one.filename, one.lineno)) for one in said] == [
        (__file__, True)
    ]


@pytest.mark.parametrize("wrong", [1, "yes", torch.device("cpu")])
def test_not_a_bool(wrong):
    with pytest.raises(TypeError, match="pin_memory"):
        ReplayBuffer(10, pin_memory=wrong)


def test_copies_and_reopened_stores_pin_too(memory, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), pin_memory=True)
    rb.extend(torch.arange(5))
    twin = copy.deepcopy(rb)
    assert isinstance(twin._wiring.pinning, Pinning)
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "s")).extend(torch.arange(5))
    rb = ReplayBuffer.open(tmp_path / "s", pin_memory=True)
    assert memory.is_pinned(rb.sample(3))


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_every_leaf(self, sampler):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SAMPLERS[sampler](), pin_memory=True)
        rb.extend(steps())
        batch, info = rb.sample(12, return_info=True)
        assert all(leaf.is_pinned() for leaf in leaves(batch) + leaves(info))

    @pytest.mark.parametrize("form", FORMS)
    def test_forms(self, form):
        assert all(leaf.is_pinned() for leaf in leaves(Pinning(HostMemory())(FORMS[form]())))

    def test_after_transforms(self):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), pin_memory=True)
        rb.append_transform(lambda td: TensorDict({"x": td["obs"] * 2, "c": td["t"].cuda()}, td.batch_size))
        rb.extend(steps())
        batch = rb.sample(8)
        assert batch["x"].is_pinned()
        assert batch["c"].is_cuda

    def test_memory_is_reused_once_nobody_refers_to_it_and_no_copy_is_under_way(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(100), pin_memory=True)
        rb.extend(torch.arange(100).repeat_interleave(10_000).reshape(100, 10_000))
        pairs = []
        for _ in range(30):
            batch = rb.sample(64)
            pairs.append((batch.cuda(non_blocking=True), batch[:, 0].clone()))
        held = rb.sample(64)
        as_it_was = held.clone()
        addresses = {rb.sample(64).data_ptr() for _ in range(30)}
        assert held.data_ptr() not in addresses
        assert len(addresses) < 30
        assert torch.equal(held, as_it_was)
        for on_device, first in pairs:
            assert torch.equal(on_device.cpu(), first[:, None].expand(64, 10_000))
