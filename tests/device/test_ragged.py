"""Rows of any length on an accelerator: the host gathers them, in every layout; what would need the device to read them is refused."""

import itertools

import pytest
import torch

from engram import (
    DeviceLoader,
    DeviceReplay,
    LazyTensorStorage,
    Ragged,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram._support.nested import find
from engram.device import loader, pinning
from tests.buffer.test_ragged_batches import buffer, expected
from tests.device.imitation import Imitation, Interpreter, place

PADDED = {"kind": "padded", "side": "left", "multiple": 8}
LAYOUTS = ["packed", "jagged", "padded", PADDED, "list"]
NUMBERS = ("tokens", "log_prob", "prompt")
#: A list within a TensorDict is an object, which stays as it is.
BATCHES = [
    (kind, it) for kind in (ReplayBuffer, TensorDictReplayBuffer) for it in LAYOUTS[: 5 - (kind is not ReplayBuffer)]
]


@pytest.fixture
def streams(monkeypatch):
    """An accelerator whose copies are there when a test lets them, and which pins memory."""
    made = Imitation(late=True)
    monkeypatch.setattr(pinning, "host_memory", lambda: made.memory)
    monkeypatch.setattr(loader, "Accelerator", lambda device: made)
    monkeypatch.setattr(loader, "existing_device", lambda device, name: torch.device("cuda", 0))
    yield made
    assert made.faults == []


def entry(batch, *path):
    """What a field has under these names, in a dict of named tuples or a TensorDict."""
    for name in path:
        batch = getattr(batch, name) if isinstance(batch, tuple) else find(batch, (name,))
    return batch


def parts(batch, field):
    """The dense tensors that a field consists of."""
    value = entry(batch, field)
    if isinstance(value, torch.Tensor) and value.is_nested:
        return [value._values, value._offsets]
    if isinstance(value, tuple | dict) or hasattr(value, "batch_size"):
        return [entry(batch, field, name) for name in ("values", "cu_seqlens", "mask") if name in names(value)]
    return [*value]


def names(value):
    return value._fields if isinstance(value, tuple) else value.keys()


def rows_of(batch, field):
    """The items of each row of a field, as lists."""
    value = entry(batch, field)
    if isinstance(value, list):
        return [row.tolist() for row in value]
    if isinstance(value, torch.Tensor):
        return [row.tolist() for row in value.unbind()]
    values = entry(batch, field, "values")
    if "mask" in names(value):
        mask = entry(batch, field, "mask")
        return [row[there].tolist() for row, there in zip(values, mask, strict=True)]
    ends = entry(batch, field, "cu_seqlens").tolist()
    return [values[a:b].tolist() for a, b in itertools.pairwise(ends)]


def check(batch):
    drawn = batch["number"].tolist()
    for field in NUMBERS:
        assert rows_of(batch, field) == [expected(field, n) for n in drawn]
    shared = [parts(batch, field)[1] for field in ("tokens", "log_prob")]
    assert isinstance(entry(batch, "tokens"), list) or shared[0] is shared[1]
    return drawn


@pytest.mark.parametrize(("kind", "layout"), BATCHES, ids=str)
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_one_copy_brings_a_batch_of_every_layout(streams, kind, layout, sampler):
    rb = buffer(sampler(), kind=kind, layout=layout)
    host = buffer(sampler(), kind=kind, layout=layout)
    for number, (batch, _) in enumerate(zip(DeviceLoader(rb, "cuda", depth=1), range(4), strict=False)):
        assert check(batch) == host.sample()["number"].tolist()
        assert len([it for it in streams.log if it[0] == "send"]) == number + 1
        for field in NUMBERS:
            assert {place(part) for part in parts(batch, field)} == {"cuda:0"}


@pytest.mark.parametrize(("kind", "layout"), BATCHES, ids=str)
@pytest.mark.parametrize("within", [False, True])
def test_items_are_gathered_into_pinned_memory(streams, kind, layout, within, monkeypatch):
    rb = buffer(kind=kind, layout="list", pin_memory=True)
    copies, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, it, *more: copies.append(it.shape) or copy(to, it, *more))
    for _ in range(3):
        batch = rb.sample(layout=layout, **{"max_tokens": 100} if within else {})
        check(batch)
        for field in NUMBERS:
            assert {place(part) for part in parts(batch, field)} == {"pinned"}
    assert set(copies) <= {batch["number"].shape}  # of numbers of rows, which a TensorDict has


def test_a_batch_that_is_pinned_already_stays_as_it_is(streams):
    batch = buffer(layout="jagged", pin_memory=True).sample()
    assert pinning.Pinning(streams.memory)(batch) is batch


def test_jagged_tensors_of_transforms_are_brought_too(streams):
    def jagged(batch):
        offsets = torch.tensor([0, 1, 3, 4])
        batch["made"] = torch.nested.nested_tensor_from_jagged(batch["a"][:4].float(), offsets)
        return batch

    rb = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=5, transform=jagged)
    rb.extend({"a": torch.full((9,), 7)})
    batch = next(iter(DeviceLoader(rb, "cuda")))
    assert [row.tolist() for row in batch["made"].unbind()] == [[7.0], [7.0, 7.0], [7.0]]
    assert {place(part) for part in parts(batch, "made")} == {"cuda:0"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_call_says_device_and_layout(layout):
    batch = buffer(layout="list").sample(layout=layout, device="meta")
    assert {part.device.type for field in NUMBERS for part in parts(batch, field)} == {"meta"}
    assert all(isinstance(text, str) for text in batch["text"])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("pin_memory", [False, True])
def test_on_a_gpu(layout, pin_memory):
    rb = buffer(layout="list", pin_memory=pin_memory)
    batch = rb.sample(layout=layout, device="cuda")
    torch.cuda.synchronize()
    assert {part.device.type for field in NUMBERS for part in parts(batch, field)} == {"cuda"}
    for field in NUMBERS:
        assert rows_of(batch, field) == [expected(field, n) for n in batch["number"].tolist()]
    for batch, _ in zip(DeviceLoader(buffer(layout=layout), "cuda"), range(4), strict=False):
        check(batch)


# ---- what the host cannot be spared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["direct", "resident"])
def test_a_device_that_is_to_read_them_itself_is_refused_by_name(transport, monkeypatch):
    Interpreter.installed(monkeypatch)
    with pytest.raises(RuntimeError, match=r"does not allow it: rows of several lengths\. Use transport='block'"):
        DeviceLoader(buffer(), "cuda", transport=transport)
    with pytest.raises(RuntimeError, match=r"rows of several lengths\. Use DeviceLoader\(rb, device\), which copies"):
        DeviceReplay(buffer(), "cuda")
    made = DeviceLoader(buffer(), "cuda")
    assert (made.transport, made.stats()["reason"]) == ("block", "rows of several lengths")
    check(next(iter(made)))


def test_rows_on_the_device_are_refused_by_name():
    said = r"ragged: expected none with device='cuda', got \['tokens'\]\. Leave device= out, and use a DeviceLoader"
    with pytest.raises(ValueError, match=said):
        LazyTensorStorage(10, device="cuda", ragged={"tokens": Ragged(torch.int32, max_length=3)})
