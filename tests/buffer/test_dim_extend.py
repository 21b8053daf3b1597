"""``dim_extend`` says which of a storage's dimensions is time in what is written and read, as in TorchRL."""

import copy

import pytest
import torch
import torchrl.data
from tensordict import TensorDict
from torchrl.data.replay_buffers import Sequence as TorchSequence

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    Sequence,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

T, COLUMNS = 5, 4


def steps(first=0, *, time=1, shape=(COLUMNS,)):
    """Steps of columns; each says which one it is. ``time``: where that dimension is."""
    count = int(torch.tensor(shape).prod())
    step = torch.arange(first, first + T * count).reshape(T, *shape)
    done = torch.zeros(T, *shape, 1, dtype=torch.bool)
    done[-1] = True
    data = TensorDict({"step": step, "next": {"done": done}}, [T, *shape])
    return data.permute(*range(1, time + 1), 0, *range(time + 1, data.ndim)).contiguous()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("time", [0, 1, None])
def test_rows_are_written_and_read_as_by_torchrl(storage, time):
    data = steps(time=1 if time is None else time)
    ours = TensorDictReplayBuffer(storage=storage(40, ndim=2), dim_extend=time, batch_size=8)
    theirs = torchrl.data.TensorDictReplayBuffer(
        storage=torchrl.data.LazyTensorStorage(40, ndim=2), dim_extend=time, batch_size=8
    )
    assert ours.extend(data).tolist() == theirs.extend(data).tolist()
    assert ours.dim_extend == theirs.dim_extend
    assert torch.equal(ours[:]["step"], theirs[:]["step"])
    assert torch.equal(ours[:]["step"], data["step"])
    assert torch.equal(ours.storage.flatten()[:]["step"], theirs.storage.flatten()[:]["step"])
    batch = ours.sample()
    assert torch.equal(batch["step"], batch["index"][:, 0] * COLUMNS + batch["index"][:, 1])
    ours[:] = steps(100, time=1 if time is None else time)
    assert int(ours[:]["step"].min()) == 100
    ours.close()


@pytest.mark.parametrize("time", [0, 1, 2])
def test_of_three_dimensions(time):
    data = steps(time=time, shape=(2, 3))
    rb = ReplayBuffer(storage=LazyTensorStorage(60, ndim=3), dim_extend=time, batch_size=8)
    rb.extend({"step": data["step"]})
    assert torch.equal(rb[:]["step"], data["step"])
    assert rb.storage.flatten()[:]["step"].tolist() == list(range(30))
    picked = [slice(None)] * 3
    picked[time] = 2
    assert torch.equal(rb[tuple(picked)]["step"], data["step"].select(time, 2))
    rb.add({"step": torch.arange(30, 36).reshape(2, 3)})
    assert rb[:]["step"].shape == tuple(T + 1 if dim == time else size for dim, size in enumerate(data.shape))
    other = copy.deepcopy(rb)
    assert other.dim_extend == time
    assert torch.equal(other[:]["step"], rb[:]["step"])


@pytest.mark.parametrize("time", [0, 1])
def test_priorities_and_transforms(time):
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(40, ndim=2), dim_extend=time, batch_size=8
    )
    seen = []

    def look(data):
        seen.append(data["step"].clone())
        return data

    rb.append_transform(look, invert=True)
    data = steps(time=time)
    data["td_error"] = data["step"].float() + 1
    rb.extend(data)
    assert torch.equal(seen[0], data["step"])
    assert rb.sampler.priorities().leaves(20).tolist() == list(range(1, 21))
    rb.add(
        TensorDict(
            {
                "step": torch.arange(20, 24),
                "td_error": torch.ones(4),
                "next": {"done": torch.zeros(4, 1, dtype=torch.bool)},
            },
            [4],
        )
    )
    assert rb.storage.flatten()[:]["step"].tolist() == list(range(24))


@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
def test_sequences_are_those_of_torchrl(time, boundary):
    ours = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, ndim=2),
        dim_extend=time,
        batch_size=8,
        sample_unit=Sequence(3, boundary, burn_in=1),
    )
    theirs = torchrl.data.TensorDictReplayBuffer(
        storage=torchrl.data.LazyTensorStorage(40, ndim=2), dim_extend=time, batch_size=8
    )
    data = torch.cat([steps(time=time), steps(20, time=time), steps(40, time=time)], time)
    ours.extend(data)
    theirs.extend(data)
    anchors = torch.tensor([[0, 0], [1, 3], [4, 2], [6, 1], [9, 0]])
    if boundary == "include_reset":  # where the seam is they say otherwise
        anchors = anchors[1:2]
    index, info = ours._wiring.unit.expand(anchors, {}, ours.storage)
    expected, their_info = TorchSequence(3, boundary, burn_in=1).expand(anchors, {}, theirs.storage)
    if boundary != "include_reset":
        assert torch.equal(
            torch.stack(index, -1)[info["validity_mask"]], torch.stack(expected, -1)[info["validity_mask"]]
        )
        assert torch.equal(info["validity_mask"], their_info["validity_mask"])
    batch = ours.sample().reshape(8, 4)
    assert bool((batch["step"] % COLUMNS == batch["step"][:, :1] % COLUMNS).all())  # of one column
    where = batch["index"].flatten(0, 1)
    assert torch.equal(ours.storage.flatten()[:]["step"][ours.storage.rows_at(where)], batch["step"].flatten())


def test_slices_follow_time():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, ndim=2), dim_extend=0, batch_size=12, sampler=SliceSampler(slice_len=3)
    )
    rb.extend(steps(time=0))
    assert bool((rb.sample()["step"].reshape(4, 3).diff() == COLUMNS).all())


def test_a_writer_of_ones_own_is_told_steps():
    class Counted(RoundRobinWriter):
        steps = 0

        def extend(self, data):
            self.steps += data.shape[0]
            return super().extend(data)

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=0, writer=Counted())
    rb.extend(steps(time=0))
    assert rb.writer.steps == T
    assert torch.equal(rb[:]["step"], steps(time=0)["step"])


def test_what_is_no_dimension_of_rows_is_refused():
    for dim in (2, -1, 1.5):
        with pytest.raises(
            TypeError, match=r"dim_extend: expected None or one of the 2 dimensions.*Make the storage with ndim=3"
        ):
            ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=dim)
    storage = LazyTensorStorage(40, ndim=2)
    assert ReplayBuffer(storage=storage, dim_extend=0).dim_extend == 0
    with pytest.raises(TypeError, match="which has dim_extend=0 already"):
        ReplayBuffer(storage=storage, dim_extend=1)
    assert ReplayBuffer(storage=storage).dim_extend == 0
