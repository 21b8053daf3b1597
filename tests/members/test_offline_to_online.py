"""Batches of a dataset and of rows that are added, beside TorchRL's class where it is installed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    ConsumingSampler,
    LazyTensorStorage,
    NoSampleable,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    TensorDictReplayBuffer,
    prefill_replay_buffer,
)


def recorded(rows=50, cls=ReplayBuffer, make=dict):
    rb = cls(storage=LazyTensorStorage(rows))
    rb.extend(data(torch.arange(rows), make))
    return rb


def data(numbers, make=dict):
    rows = {"a": numbers, "next": {"b": numbers.float()[:, None]}}
    return TensorDict(rows, [len(numbers)]) if make is TensorDict else rows


KINDS = [(ReplayBuffer, dict), (ReplayBuffer, TensorDict), (TensorDictReplayBuffer, TensorDict)]


@pytest.mark.parametrize(("cls", "make"), KINDS)
@given(st.integers(1, 40), st.floats(0.01, 0.99))
def test_each_batch_has_its_share_of_both(cls, make, size, fraction):
    rb = OfflineToOnlineReplayBuffer(recorded(cls=cls, make=make), online_capacity=20, offline_fraction=fraction)
    assert bool((rb.sample(size)["a"] < 50).all())  # there is nothing else yet
    rb.extend(data(torch.arange(100, 110), make))
    batch = rb.sample(size)
    offline = round(fraction * size)
    assert (batch["a"] < 50).tolist() == [True] * offline + [False] * (size - offline)
    assert torch.equal(batch["next"]["b"][:, 0], batch["a"].float())
    assert "index" not in batch.keys()
    assert len(rb) == 60
    assert type(batch) is (TensorDict if make is TensorDict else dict)


@given(st.integers(1, 64), st.floats(0.01, 0.99), st.integers(0, 12), st.integers(1, 10))
def test_shares_are_those_of_torchrl(size, fraction, step, total):
    rl = pytest.importorskip("torchrl.data")
    offline = rl.ReplayBuffer(storage=rl.LazyTensorStorage(50))
    offline.extend(data(torch.arange(50), TensorDict))
    both = [
        rl.OfflineToOnlineReplayBuffer(offline, online_capacity=20, offline_fraction=fraction),
        OfflineToOnlineReplayBuffer(recorded(make=TensorDict), online_capacity=20, offline_fraction=fraction),
    ]
    counts = []
    for rb in both:
        rb.extend(data(torch.arange(100, 110), TensorDict))
        rb.anneal(step, total)
        counts.append((int((rb.sample(size)["a"] < 50).sum()), rb.offline_fraction, len(rb)))
    assert counts[0] == counts[1]


def test_hooks_of_torchrls_trainer_save_and_anneal_the_share():
    hooks = pytest.importorskip("torchrl.trainers.algorithms.offline_to_online")
    rb, twin = (OfflineToOnlineReplayBuffer(recorded(make=TensorDict), online_capacity=20) for _ in range(2))
    hook, of_twin = (hooks.OfflineToOnlineReplayBufferHook(replay_buffer=it, batch_size=4) for it in (rb, twin))
    rb.extend(data(torch.arange(100, 110), TensorDict))
    rb.anneal(1, 2)
    of_twin.load_state_dict(hook.state_dict())
    assert (twin.offline_fraction, len(twin)) == (0.25, 60)
    twin.anneal(0, 2)
    assert twin.offline_fraction == 0.5


def test_transform_and_storage(tmp_path):
    rb = OfflineToOnlineReplayBuffer(
        recorded(), online_storage=lambda: LazyTensorStorage(5), batch_size=4, transform=lambda batch: batch["a"] * 2
    )
    rb.add({"a": torch.tensor(7), "next": {"b": torch.tensor([7.0])}})
    assert rb.sample()[2:].tolist() == [14, 14]
    assert repr(rb) == "OfflineToOnlineReplayBuffer(offline=50, online=1, offline_fraction=0.5, batch_size=4)"
    rb.anneal(1, 1)
    assert rb.sample(3).tolist() == [14, 14, 14]


class Elsewhere:
    """A dataset of another library's."""

    def __len__(self):
        return 7

    def sample(self, n):
        return {"a": torch.full((n,), 3)}


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("rows", [None, 1, 49, 60])
@pytest.mark.parametrize(("cls", "make"), KINDS)
def test_prefilling_copies_each_row_once(cls, make, rows, chunk):
    rb = cls(storage=LazyTensorStorage(100))
    assert prefill_replay_buffer(rb, recorded(cls=cls, make=make), rows, chunk) is rb
    assert rb[:]["a"].tolist() == list(range(min(rows or 50, 50)))


def test_prefilling_from_elsewhere():
    rb = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(100)), Elsewhere(), chunk_size=3)
    assert rb[:]["a"].tolist() == [3] * 7
    assert OfflineToOnlineReplayBuffer(Elsewhere(), online_capacity=2, batch_size=2).sample()["a"].tolist() == [3, 3]


def test_what_is_refused():
    offline = recorded()
    for arguments, error, said in (
        ({}, ValueError, "expected one of online_storage and online_capacity, got none"),
        ({"online_capacity": 3, "online_storage": LazyTensorStorage(3)}, ValueError, "got both"),
        ({"online_capacity": 0}, ValueError, "online_capacity"),
        ({"online_capacity": 3, "offline_fraction": 1.0}, ValueError, "a number between 0 and 1, got 1.0"),
        (
            {"online_capacity": 3, "offline_fraction": "0.5"},
            TypeError,
            r"offline_fraction: expected a number in \[0, 1\], got str",
        ),
        ({"online_capacity": 3, "offline_fraction": None}, TypeError, "offline_fraction: .* got NoneType"),
        ({"online_capacity": 3, "transform": 3}, TypeError, "transform: expected a function of a batch, got int"),
        ({"online_capacity": 3, "batch_size": 0}, ValueError, "batch_size"),
    ):
        with pytest.raises(error, match=said):
            OfflineToOnlineReplayBuffer(offline, **arguments)
    with pytest.raises(TypeError, match="expected a buffer, or a dataset with sample.* got 'minari:x'"):
        OfflineToOnlineReplayBuffer("minari:x", online_capacity=3)
    with pytest.raises(TypeError, match="prefill_replay_buffer: dataset: expected a buffer"):
        prefill_replay_buffer(offline, 3)
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=3)
    with pytest.raises(ValueError, match="expected a number of rows, here or in the constructor, got none"):
        rb.sample()
    with pytest.raises(ValueError, match="total_steps"):
        rb.anneal(1, 0)
    for step, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="anneal: step: expected a finite number of at least 0, got"):
            rb.anneal(step, 10)
    assert rb.offline_fraction == 0.5
    with pytest.raises(TypeError, match="prefill_replay_buffer: rb: expected a buffer to write to, got int"):
        prefill_replay_buffer(3, offline)
    wide = OfflineToOnlineReplayBuffer(offline, online_capacity=3)
    wide.extend({"a": torch.zeros(3, 7, dtype=torch.int64), "next": {"b": torch.zeros(3, 1)}})
    with pytest.raises(
        RuntimeError, match=r"field 'a': expected rows of one shape .* \[\] of the dataset and \[7\] of the online"
    ):
        wide.sample(4)
    rb.extend({"other": torch.zeros(3)})
    with pytest.raises(KeyError, match="same fields in both buffers"):
        rb.sample(4)
    with pytest.raises(NoSampleable):
        OfflineToOnlineReplayBuffer(ReplayBuffer(storage=LazyTensorStorage(3)), online_capacity=3).sample(2)


def test_all_rows_are_copied_of_queues_and_of_slots():
    queue = ReplayBuffer(storage=LazyTensorStorage(12), sampler=ConsumingSampler(1), batch_size=4)
    queue.extend(torch.arange(8))
    queue.sample()  # four are used up
    copied = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(20)), queue, chunk_size=3)
    assert copied[:].tolist() == [*range(8)]
    slots = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    slots.extend(torch.arange(12).reshape(3, 4))
    copied = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(20)), slots, chunk_size=2)
    assert torch.equal(copied[:], slots[:])
    assert len(prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(20)), slots, n_samples=2)) == 2
