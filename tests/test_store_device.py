"""A store whose rows are moved by torch, beside the one whose rows are moved natively: on the CPU they must agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    NoSampleable,
    ReplayBuffer,
    RowError,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.format.schema import Field, Node, Schema
from engram.store import DeviceStore, Key, Store
from engram.types import Plan

FIELDS = (Field(key=("a",), dtype="float32", shape=(3,)), Field(key=("b",), dtype="int64", shape=()))
ROOT = Node(kind="dict", children={"a": Node(kind="leaf", field=0), "b": Node(kind="leaf", field=1)})


def schema(capacity, lanes):
    return Schema(capacity, lanes, (), FIELDS, ROOT)


def key_of(bits):
    key = Key()
    key._bits.fill_(bits)
    return key


def columns(payloads):
    payloads = torch.as_tensor(payloads, dtype=torch.int64)
    return [payloads.unsqueeze(-1).expand(*payloads.shape, 3).float().contiguous(), payloads]


steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "row", "lanes", "scatter", "kept", "edit", "empty", "read", "sample"]),
        st.integers(0, 2**31),
    ),
    max_size=12,
)


@settings(max_examples=120, deadline=None, database=None)
@given(st.integers(1, 7), st.integers(1, 3), steps)
def test_random_operations(length, lanes, operations):
    capacity = length * lanes
    native, device = (
        Store.private(schema(capacity, lanes)),
        DeviceStore.on(schema(capacity, lanes), torch.device("cpu")),
    )
    both = (native, device)
    payload = 1
    for name, seed in operations:
        random = torch.Generator().manual_seed(seed)

        def integers(high, shape, random=random):
            return torch.randint(high, shape, generator=random)

        n = int(integers(2 * capacity, ()).item()) + 1
        payloads = torch.arange(payload, payload + n)
        payload += n
        if name == "append":
            plan = Plan(lane=int(integers(lanes, ())))
            written = [store.write(plan, columns(payloads), n) for store in both]
            assert torch.equal(written[0].rows, written[1].rows)
            assert torch.equal(written[0].tickets, written[1].tickets)
        elif name == "row":
            lane = int(integers(lanes, ()))
            assert native.append_row(lane, columns(payloads[0])) == device.append_row(lane, columns(payloads[0]))
        elif name == "lanes":
            plan = Plan(lane=integers(lanes, (n,)))
            written = [store.write(plan, columns(payloads), n) for store in both]
            assert torch.equal(written[0].rows, written[1].rows)
        elif name == "scatter":
            plan = Plan(rows=integers(capacity, (n,)))
            for store in both:
                store.write(plan, columns(payloads), n)
        elif name == "kept":
            kept = (integers(2, (n,)) == 1).nonzero().flatten()
            plan = Plan(rows=integers(capacity, (len(kept),)), kept=kept)
            written = [store.write(plan, columns(payloads), n) for store in both]
            assert torch.equal(written[0].rows, written[1].rows)
            assert written[0].first == written[1].first
        elif name == "edit":
            live = (native.numbers_of(torch.arange(capacity)) >= 0).nonzero().flatten()
            if len(live):
                rows = live[integers(len(live), (n,))]
                which = [[0], [1], [0, 1]][int(integers(3, ()))]
                for store in both:
                    store.edit(rows, which, [columns(payloads)[f] for f in which])
        elif name == "empty":
            keep = bool(integers(2, ()))
            for store in both:
                store.empty(keep_write_count=keep)
        elif name == "sample" and native.core.size():
            drawn = [store.sample_uniform(key_of(seed), n, with_rows=True) for store in both]
            for one, other in zip(*drawn, strict=True):
                assert torch.equal(one, other)
        agree(native, device)


def agree(native, device):
    everything = torch.arange(native.capacity)
    assert native.extent() == device.extent()
    assert native.core.write_count == device.core.write_count
    numbers = native.numbers_of(everything)
    assert torch.equal(numbers, device.numbers_of(everything))
    live = (numbers >= 0).nonzero().flatten()
    for which in (None, [1], [1, 0]):
        found, moved = native.read(live, which=which)
        again, moved_too = device.read(live, which=which)
        assert moved == moved_too == []
        for one, other in zip(found, again, strict=True):
            assert torch.equal(one, other)
    expected = numbers.clone()
    expected[::2] -= 1
    assert native.read(everything, expected=expected)[1] == device.read(everything, expected=expected)[1]


def test_rows_outside():
    store = DeviceStore.on(schema(4, 1), torch.device("cpu"))
    with pytest.raises(NoSampleable):
        store.sample_uniform(key_of(1), 2, with_rows=False)
    store.write(Plan(lane=0), columns(torch.arange(2)), 2)
    for rows in (torch.tensor([4]), torch.tensor([-1])):
        with pytest.raises(RowError):
            store.read(rows)
        with pytest.raises(RowError):
            store.write(Plan(rows=rows), columns(torch.tensor([9])), 1)
    with pytest.raises(RowError):
        store.edit(torch.tensor([3]), [0, 1], columns(torch.tensor([9])))
    assert store.core.write_count == 2
    assert store.tensors[1].tolist() == [0, 1, 0, 0]


# ---- buffers around it ---------------------------------------------------------------------------------------------------------


class OnDevice(LazyTensorStorage):
    """As a storage on an accelerator, without one."""

    def _allocate(self, schema):
        return DeviceStore.on(schema, self._device)


def test_a_buffer():
    rb = TensorDictReplayBuffer(storage=OnDevice(6, lanes=2), generator=torch.Generator().manual_seed(1))
    data = TensorDict({"a": torch.arange(5), "n": {"b": torch.rand(5, 2, requires_grad=True)}}, batch_size=[5])
    assert rb.extend(data, lane=torch.tensor([0, 1, 0, 1, 0])).tolist() == [0, 3, 1, 4, 2]
    assert rb.add(data[0]) == 0
    assert rb["a"].tolist() == [0, 2, 4, 1, 3]
    sample = rb.sample(20)
    assert torch.equal(sample["a"], rb[sample["index"]]["a"])
    assert not sample["n", "b"].requires_grad
    rb[1:3] = data[:2]
    rb.set_at_("a", torch.tensor(77), 0)
    assert rb["a"].tolist() == [77, 0, 1, 1, 3]
    with pytest.raises(RuntimeError):
        rb.extend(data.exclude("a").set("a", torch.rand(5)))
    rb.empty()
    assert len(rb) == 0
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(data)
    assert sorted(rb.sample(9)["a"].tolist()) == [2, 3, 4]


def test_the_same_draws_as_in_native_memory():
    batches = []
    for storage in (OnDevice(50), LazyTensorStorage(50)):
        rb = ReplayBuffer(storage=storage, generator=torch.Generator().manual_seed(3))
        rb.extend(torch.arange(30))
        batches.append(rb.sample(40).tolist())
    assert batches[0] == batches[1]


# ---- accelerators --------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestCuda:
    def data(self, device, n=5):
        return TensorDict({"a": torch.arange(n), "n": {"b": torch.rand(n, 2)}}, batch_size=[n]).to(device)

    def test_cuda_data_into_a_cpu_store(self):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6))
        data = self.data("cuda")
        rb.extend(data)
        rb.add(data[0])
        assert rb["a"].tolist() == [0, 1, 2, 3, 4, 0]
        sample = rb.sample(4)
        assert sample.device == torch.device("cpu")
        assert sample["a"].device.type == "cpu"

    @pytest.mark.parametrize("source", ["cpu", "cuda"])
    def test_a_cuda_storage(self, source):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6, device="cuda"))
        data = self.data(source)
        index = rb.extend(data)
        assert index.device.type == "cuda"
        assert index.tolist() == [0, 1, 2, 3, 4]
        sample, info = rb.sample(20, return_info=True)
        for tensor in (sample["a"], sample["n", "b"], sample["index"], info["index"], rb[:]["a"], rb[2]["a"]):
            assert tensor.device.type == "cuda"
        assert sample.device.type == "cuda"
        assert torch.equal(sample["a"], sample["index"])
        assert rb.storage.device.type == "cuda"
        rb[1] = self.data(source)[4]
        rb[sample["index"][:2]] = rb[sample["index"][:2]]
        assert rb[1]["a"] == 4

    def test_device_auto(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(6, device="auto"))
        rb.extend(torch.arange(3, device="cuda"))
        assert rb.sample(4).device.type == "cuda"

    def test_existing_cuda_data(self):
        rb = ReplayBuffer(storage=TensorStorage(torch.arange(3, device="cuda"), device="auto"))
        assert len(rb) == 3
        assert set(rb.sample(30).tolist()) == {0, 1, 2}
        assert rb.write_count == 0

    def test_without_replacement(self):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(9, device="cuda"), sampler=SamplerWithoutReplacement(), batch_size=4
        )
        rb.extend(torch.arange(9))
        assert sorted(torch.cat(list(rb)).tolist()) == list(range(9))


def test_the_first_row_may_come_alone():
    """The first ``add`` takes the way of ``extend``, whose columns then have no batch dimension."""

    rb = ReplayBuffer(storage=OnDevice(3))
    for row in ({"a": torch.tensor(1.0), "b": torch.arange(1, 4)}, {"a": torch.tensor(2.0), "b": torch.arange(4, 7)}):
        rb.add(row)
    assert rb[:]["a"].tolist() == [1, 2]
    assert rb[:]["b"].tolist() == [[1, 2, 3], [4, 5, 6]]
