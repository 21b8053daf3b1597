"""A store whose rows are moved by torch, beside the one whose rows are moved natively: on the CPU they must agree."""

import copy
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    IncompatibleStore,
    LazyTensorStorage,
    NoSampleable,
    NStep,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RowError,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
    WriterStalled,
)
from engram.format.schema import Field, Node, Schema
from engram.store.blocks import Key
from engram.store.device.store import DeviceStore
from engram.store.store import Store
from engram.types import WritePlan
from tests import stress

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
        st.sampled_from(["append", "lanes", "scatter", "kept", "edit", "empty", "read", "sample"]),
        st.integers(0, 2**31),
    ),
    max_size=12,
)


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@settings(max_examples=stress.size(50, 2_000), deadline=None, database=None)
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
            plan = WritePlan(lane=int(integers(lanes, ())))
            written = [store.write(plan, columns(payloads), n) for store in both]
            assert torch.equal(written[0].rows, written[1].rows)
            assert torch.equal(written[0].tickets, written[1].tickets)
        elif name == "lanes":
            plan = WritePlan(lane=integers(lanes, (n,)))
            written = [store.write(plan, columns(payloads), n) for store in both]
            assert torch.equal(written[0].rows, written[1].rows)
        elif name == "scatter":
            plan = WritePlan(rows=integers(capacity, (n,)))
            for store in both:
                store.write(plan, columns(payloads), n)
        elif name == "kept":
            kept = (integers(2, (n,)) == 1).nonzero().flatten()
            plan = WritePlan(rows=integers(capacity, (len(kept),)), kept=kept)
            written = [store.write(plan, columns(payloads), n) for store in both]
            assert torch.equal(written[0].rows, written[1].rows)
            assert written[0].first == written[1].first
        elif name == "edit":
            live = (native.tickets_of(torch.arange(capacity)) >= 0).nonzero().flatten()
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
    numbers = native.tickets_of(everything)
    assert torch.equal(numbers, device.tickets_of(everything))
    assert torch.equal(device.rows.numbers[:-1], native.writes_of(everything, numbers).clamp(min=0))
    if native.lanes == 1:
        at, clock, filled = device.rows.cursor.tolist()
        assert (at, clock) == (native.core.next_position(0), native.core.next_ticket)
        assert not device.rows.ring or min(filled, native.capacity) == native.extent().filled[0]
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
    store.write(WritePlan(lane=0), columns(torch.arange(2)), 2)
    for rows in (torch.tensor([4]), torch.tensor([-1])):
        with pytest.raises(RowError):
            store.read(rows)
        with pytest.raises(RowError):
            store.write(WritePlan(rows=rows), columns(torch.tensor([9])), 1)
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
    assert rb.add(data[0], lane=0) == 0
    assert rb["a"].tolist() == [0, 2, 4, 1, 3]
    sample = rb.sample(20)
    assert torch.equal(sample["a"], rb[sample["index"]]["a"])
    assert not sample["n", "b"].requires_grad
    rb[1:3] = data[:2]
    rb.set_at_("a", torch.tensor(77), 0)
    assert rb["a"].tolist() == [77, 0, 1, 1, 3]
    with pytest.raises(RuntimeError):
        rb.extend(data.exclude("a").set("a", torch.rand(5)), lane=0)
    rb.empty()
    assert len(rb) == 0
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(data, lane=0)
    assert sorted(rb.sample(9)["a"].tolist()) == [2, 3, 4]


def test_the_same_draws_as_in_native_memory():
    batches = []
    for storage in (OnDevice(50), LazyTensorStorage(50)):
        rb = ReplayBuffer(storage=storage, generator=torch.Generator().manual_seed(3))
        rb.extend(torch.arange(30))
        batches.append(rb.sample(40).tolist())
    assert batches[0] == batches[1]


# ---- windows: their boundaries have a copy on the host -----------------------------------------------------------------------


def steps_of(random, n, first):
    """Steps of trajectories by id, by flags of several dtypes and shapes; no two rows are the same."""

    def flags(shape=(n, 1)):
        return torch.rand(shape, generator=random) < 0.3

    return TensorDict(
        {
            "unique": torch.arange(first, first + n),
            "wide": torch.rand(n, 2, 3, generator=random),
            "episode": torch.randint(3, (n,), generator=random),
            "over": torch.randint(2, (n, 2), generator=random, dtype=torch.int16),
            "is_init": flags((n,)),
            "next": {"done": flags(), "terminated": flags(), "other": flags((n,)).float()},
        },
        [n],
    )


SAMPLERS = {
    "by id": lambda: SliceSampler(slice_len=2, traj_key="episode"),
    "by flag": lambda: SliceSampler(slice_len=3, end_key=("next", "done"), index="flags"),
    "by flags": lambda: SliceSampler(
        slice_len=2, end_keys=["over", ("next", "other")], index="more", truncated_key=("next", "cut")
    ),
    "padded": lambda: SliceSampler(num_slices=4, strict_length=False, pad_output=True),
    "short": lambda: SliceSampler(num_slices=4, strict_length=False, uniform_over="anchors"),
    "span": lambda: SliceSampler(slice_len=3, span=(True, 1), init_key=None, truncated_key=None),
    "epoch": lambda: SliceSamplerWithoutReplacement(num_slices=2, strict_length=False),
    "prioritized": lambda: PrioritizedSliceSampler(100, 0.7, 0.5, slice_len=2, strict_length=False),
    "doubles": lambda: PrioritizedSliceSampler(100, 0.7, 0.5, slice_len=2, dtype=torch.float64, index="flags"),
    "other flags": lambda: SliceSampler(slice_len=2, index="odd", end_key=("next", "other"), init_key="over"),
}


class Pair:
    """Two buffers with the same rows, of which torch moves those of one."""

    def __init__(self, capacity, lanes=1, **arguments):
        self.both = [
            TensorDictReplayBuffer(
                storage=storage(capacity, lanes=lanes, **arguments), generator=torch.Generator().manual_seed(5)
            )
            for storage in (LazyTensorStorage, OnDevice)
        ]

    def __call__(self, do):
        one, other = (do(rb) for rb in self.both)
        return one, other

    def sample(self, n):
        """What both draw, which must be the same to the last bit. None: nothing, for the same reason."""
        drawn = []
        for rb in self.both:
            try:
                drawn.append(rb.sample(n, return_info=True))
            except (NoSampleable, IncompatibleStore) as error:
                drawn.append(str(error))
        if isinstance(drawn[0], str):
            assert drawn[0] == drawn[1]
            return None
        (batch, info), (again, info_too) = drawn
        assert set(batch.keys(include_nested=True)) == set(again.keys(include_nested=True))
        assert (batch == again).all()
        assert info.keys() == info_too.keys()
        for key, value in info.items():
            if key == "index":
                value, info_too[key] = torch.stack(value), torch.stack(info_too[key])
            assert value.dtype == info_too[key].dtype, key
            assert torch.equal(value, info_too[key]), key
        return batch


window_steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "add", "lanes", "set", "field", "column", "prioritize", "empty", "ahead"]),
        st.sampled_from(sorted(SAMPLERS)),
        st.integers(0, 2**31),
    ),
    max_size=14,
)


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@settings(max_examples=stress.size(60, 2_000), deadline=None, database=None)
@given(st.integers(1, 7), st.integers(1, 3), window_steps)
def test_windows_are_those_of_native_memory(length, lanes, operations):
    """Whatever was written, however, before a sampler of some boundaries came and after."""
    capacity, unique = length * lanes, 0
    pair = Pair(capacity, lanes)
    for name, sampler, seed in [("extend", "by id", 1), *operations]:
        random = torch.Generator().manual_seed(seed)

        def integers(high, shape=(), random=random):
            return torch.randint(high, shape, generator=random)

        n = int(integers(2 * capacity)) + 1
        data = steps_of(random, n, unique)
        unique += n
        live = torch.arange(capacity)[pair.both[0].storage.tickets_of(torch.arange(capacity)) >= 0]
        if name == "extend":
            lane = int(integers(lanes))
            pair(lambda rb: rb.extend(data, lane=lane))
        elif name == "add":
            lane = int(integers(lanes))
            pair(lambda rb: rb.add(data[0], lane=lane))
        elif name == "lanes":
            of = integers(lanes, (n,))
            pair(lambda rb: rb.extend(data, lane=of))
        elif name == "empty":
            pair(lambda rb: rb.empty())
        elif name == "ahead":
            rows = integers(capacity, (n,))
            pair(lambda rb: rb.storage.set(rows, data))
        elif len(live):
            rows = live[integers(len(live), (n,))]
            if name == "set":
                pair(lambda rb: rb.__setitem__(rows, data))
            elif name == "field":
                pair(lambda rb: rb.set_at_("episode", data["episode"], rows))
            elif name == "column":
                column = (torch.rand(len(live), 1, generator=random) < 0.5).bool()
                pair(lambda rb: rb.set_(("next", "done"), column))
            else:
                priority = torch.rand(n, generator=random)
                pair(lambda rb: rb.set_sampler(SAMPLERS["prioritized"]()))
                pair(lambda rb: rb.update_priority(rows, priority))
        pair(lambda rb: rb.set_sampler(SAMPLERS[sampler]()))
        for _ in range(2):
            assert len(set(pair(lambda rb: rb.can_sample(12)))) == 1
            pair.sample(12)


def test_the_copies_on_the_host_are_those_that_were_asked_for():
    _, rb = Pair(20).both
    data = steps_of(torch.Generator(), 15, 0)
    data["episode"] = torch.arange(15) // 6
    data["over"].zero_()
    rb.extend(data)
    store = rb.storage.store
    assert isinstance(store, DeviceStore)
    assert not store._copies
    rb.set_sampler(SAMPLERS["by flags"]())
    rb.sample(4)
    names = [store.schema.fields[number].name for number in store._copies]
    assert names == ["episode", "over", "('next', 'other')"]
    for part in (7, 9):
        rb.extend(steps_of(torch.Generator(), part, 20))
        for number, column in store._copies.items():
            assert torch.equal(column, store.tensors[number])
            assert column.data_ptr() != store.tensors[number].data_ptr()


def test_windows_of_columns():
    pair = Pair(24, ndim=2)
    random = torch.Generator().manual_seed(2)
    pair(lambda rb: rb.set_sampler(SliceSampler(slice_len=2, end_key=("next", "done"))))
    for n in (6, 5):
        data = torch.stack([steps_of(random, n, 10 * c) for c in range(3)])
        pair(lambda rb, data=data: rb.extend(data))
        assert len(pair.sample(8)) == 8


def test_static_boundaries():
    pair = Pair(9)
    data = steps_of(torch.Generator().manual_seed(2), 9, 0)
    pair(lambda rb: rb.extend(data))
    pair(lambda rb: rb.set_sampler(SliceSampler(slice_len=3, trajectories=torch.arange(9) // 3, cache_values=True)))
    assert set(pair.sample(300)["unique"].view(-1, 3)[:, 0].tolist()) == {0, 3, 6}


def test_priorities_of_windows_on_a_device():
    _, rb = Pair(20).both
    data = steps_of(torch.Generator(), 12, 0)
    data["episode"] = torch.arange(12) // 6
    data["next"].zero_()  # ids alone
    rb.extend(data)
    rb.set_sampler(PrioritizedSliceSampler(20, 1.0, 1.0, eps=0.0, slice_len=3))
    batch = rb.sample(30)
    rb.update_tensordict_priority(batch.set("td_error", torch.zeros(30)))
    rb.update_priority(torch.tensor([8]), 1.0)
    rb.update_priority(torch.tensor([0, 1, 2, 3, 6, 7, 9]), 0.0)
    batch, info = rb.sample(6, return_info=True)
    assert batch["unique"].tolist() == [8, 9, 10] * 2
    assert info["priority_weight"].shape == info["index_generation"].shape == (6,)


def test_a_copy_of_a_buffer_finds_its_boundaries_again():
    _, rb = Pair(9).both
    rb.extend(steps_of(torch.Generator(), 9, 0))
    rb.set_sampler(SliceSampler(slice_len=1))
    rb.sample(3)
    again = copy.deepcopy(rb)
    assert torch.equal(again.sample(9)["unique"], rb.sample(9)["unique"])


@pytest.mark.parametrize("inner", [RandomSampler(), SliceSampler(slice_len=2)])
def test_expanders_are_refused(inner):
    with pytest.raises(RuntimeError, match='NStep: expected a tensor storage on the CPU.*on meta.*device="cpu"'):
        TensorDictReplayBuffer(storage=LazyTensorStorage(9, device="meta"), sampler=NStep(inner, 2, 1.0))
    rb = TensorDictReplayBuffer(storage=OnDevice(9), sampler=NStep(inner, 2, 1.0))  # as with device="auto"
    rb.extend(steps_of(torch.Generator(), 9, 0))
    with pytest.raises(RuntimeError, match="NStep: expected a tensor storage on the CPU"):
        rb.sample(4)


def test_windows_beside_writers():
    """Rows are chosen from the copies on the host and then read from the device: never of two laps, never of two trajectories."""
    rb = TensorDictReplayBuffer(storage=OnDevice(60, lanes=2), sampler=SliceSampler(slice_len=3), batch_size=30)
    stop = threading.Event()

    def write(lane):
        episode = lane
        while not stop.is_set():
            n = 3 + episode % 5
            rb.extend(
                TensorDict({"episode": torch.full((n,), episode), "step": torch.arange(n), "x": torch.rand(n, 4)}, [n]),
                lane=lane,
            )
            episode += 2

    writers = [threading.Thread(target=write, args=(lane,)) for lane in range(2)]
    for writer in writers:
        writer.start()
    try:
        while not rb.can_sample(3):
            time.sleep(0.001)
        for _ in range(300):
            batch = rb.sample().reshape(10, 3)
            assert (batch["episode"] == batch["episode"][:, :1]).all()
            assert (batch["step"] == batch["step"][:, :1] + torch.arange(3)).all()
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_windows_that_move_at_every_try(monkeypatch):
    monkeypatch.setattr("engram._support.native.wait_limit", lambda: 0.05)
    _, rb = Pair(9).both
    rb.extend(steps_of(torch.Generator(), 9, 0))
    rb.set_sampler(SliceSampler(slice_len=2, strict_length=False))
    store = rb.storage.store
    read = store.read
    monkeypatch.setattr(store, "read", lambda rows, expected: read(rows, expected=expected + 1))
    with pytest.raises(WriterStalled, match="of a window, moved at every try"):
        rb.sample(4)
    calls = []

    def once(rows, expected):
        calls.append(len(rows))
        return read(rows, expected=expected + (len(calls) == 1))

    monkeypatch.setattr(store, "read", once)
    assert len(rb.sample(2)) > 0
    assert len(calls) == 2


def test_uniform_draws_beside_copies_on_the_host():
    pair = Pair(20)
    pair(lambda rb: rb.extend(steps_of(torch.Generator().manual_seed(1), 15, 0)))
    pair(lambda rb: rb.set_sampler(SAMPLERS["by flags"]()))
    pair.sample(4)
    for sampler in (RandomSampler, SamplerWithoutReplacement):
        for rb in pair.both:
            rb.set_sampler(sampler())
        drawn = [rb.sample(10, return_info=True) for rb in pair.both]
        assert (drawn[0][0] == drawn[1][0]).all()
        assert torch.equal(drawn[0][1]["index"], drawn[1][1]["index"])


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

    @pytest.mark.parametrize("sampler", sorted(SAMPLERS))
    @pytest.mark.parametrize("source", ["cpu", "cuda"])
    def test_windows(self, sampler, source):
        """The same windows as from a storage on the CPU, on the device."""
        random = torch.Generator().manual_seed(3)
        parts = [steps_of(random, n, 100 * n) for n in (30, 25, 1, 9)]
        drawn = []
        for device in ("cpu", "cuda"):
            rb = TensorDictReplayBuffer(
                storage=LazyTensorStorage(40, device=device), generator=torch.Generator().manual_seed(9)
            )
            rb.extend(parts[0].to(source))
            rb.set_sampler(SAMPLERS[sampler]())
            for part in parts[1:]:
                rb.extend(part.to(source))
                drawn.append(rb.sample(12, return_info=True))
                for value in drawn[-1][1].values():
                    assert (value[0] if isinstance(value, tuple) else value).device.type == device
        for (batch, info), (again, info_too) in zip(drawn[:3], drawn[3:], strict=True):
            assert again.device.type == "cuda"
            assert (batch == again.cpu()).all()
            assert torch.equal(torch.stack(info["index"]), torch.stack(info_too["index"]).cpu())


def test_the_first_row_may_come_alone():
    """The first ``add`` takes the way of ``extend``, whose columns then have no batch dimension."""

    rb = ReplayBuffer(storage=OnDevice(3))
    for row in ({"a": torch.tensor(1.0), "b": torch.arange(1, 4)}, {"a": torch.tensor(2.0), "b": torch.arange(4, 7)}):
        rb.add(row)
    assert rb[:]["a"].tolist() == [1, 2]
    assert rb[:]["b"].tolist() == [[1, 2, 3], [4, 5, 6]]
