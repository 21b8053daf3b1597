"""Expanders around samplers of slices: windows and their marks stay, their steps say what they say when drawn alone."""

import copy
import pickle
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from engram import (
    FinalObservations,
    FrameStack,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    NextFromFollowing,
    NoSampleable,
    NStep,
    PrioritizedSliceSampler,
    ReplayBuffer,
    RewardToGo,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    WriterStalled,
)
from tests.around.test_n_step import buffer, steps


def chain(sampler):
    return RewardToGo(FrameStack(NStep(sampler, 3, 0.5), 2, -1, ["observation"]))


def test_by_hand():
    rb = buffer(chain(SliceSampler(num_slices=1)), steps([4]))
    batch, info = rb.sample(4, return_info=True)
    assert batch["step"].tolist() == [0, 1, 2, 3]
    assert batch["next", "reward"].flatten().tolist() == [1 + 1 + 0.75, 2 + 1.5 + 1, 3 + 2, 4]
    assert batch["steps_to_next_obs"].flatten().tolist() == [3, 3, 2, 1]
    assert batch["next", "observation"][:, 1].tolist() == [3, 4, 4, 4]
    assert batch["observation"][:, 1::2].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    assert batch["reward_to_go"].flatten().tolist() == [10, 9, 7, 4]
    assert batch["next", "truncated"].flatten().tolist() == [False, False, False, True]
    assert batch["next", "terminated"].flatten().tolist() == [
        False,
        True,
        True,
        True,
    ]  # of the last step that is summed
    assert batch["next", "done"].flatten().tolist() == [False, True, True, True]
    assert batch["index"].shape == (4, 1)
    assert info["index"][0].tolist() == [0, 1, 2, 3]
    assert "index_generation" not in info


def test_what_lies_behind_a_window_counts_and_its_end_is_marked():
    rb = buffer(NStep(SliceSampler(slice_len=2), 4, 1.0), steps([12, 3]))
    batch = rb.sample(400)
    left = torch.where(batch["number"] == 0, 12, 3) - batch["step"]
    k = left.clamp(max=4)
    assert (batch["steps_to_next_obs"].flatten() == k).all()
    assert (batch["next", "observation"][:, 1] == batch["step"] + k).all()
    last = torch.arange(400) % 2 == 1
    assert (batch["next", "truncated"].flatten() == last).all()
    assert (batch["next", "done"].flatten() == (last | (left <= 4))).all()
    assert (batch["next", "terminated"].flatten() == (left <= 4)).all()
    assert (left[0::2] - left[1::2] == 1).all()


def test_padding_and_first_steps():
    data = steps([2, 5], is_init=torch.tensor([1, 0, 1, 0, 0, 0, 0]).bool().unsqueeze(1))
    sampler = SliceSampler(num_slices=20, strict_length=False, pad_output=True)
    batch = buffer(NStep(sampler, 2, 1.0), data).sample(80).reshape(20, 4)
    short = batch[batch["number"][:, 0] == 0]
    assert 0 < len(short) < 20
    assert (short["step"] == torch.tensor([0, 1, 1, 1])).all()
    assert (short["steps_to_next_obs"].squeeze(-1) == torch.tensor([2, 1, 1, 1])).all()
    assert (short["collector", "mask"] == torch.tensor([True, True, False, False])).all()
    assert (batch["is_init"].squeeze(-1) == torch.tensor([True, False, False, False])).all()


def test_every_trajectory_once():
    rb = buffer(NStep(SliceSamplerWithoutReplacement(slice_len=2), 3, 1.0), steps([4, 2, 7, 3]), batch_size=4)
    for _ in range(3):
        assert sorted(torch.cat([batch["number"][::2] for batch in rb]).tolist()) == [0, 1, 2, 3]


def test_priorities_are_those_of_the_first_steps():
    rb = buffer(NStep(PrioritizedSliceSampler(100, 1.0, 1.0, eps=0.0, slice_len=3), 2, 1.0), steps([10]))
    batch = rb.sample(30)
    assert batch["priority_weight"].shape == (30,)
    batch["td_error"] = torch.where(batch["step"] == 4, 1.0, 0.0)
    rb.update_priority(torch.arange(10), (torch.arange(10) == 4).float())
    batch, info = rb.sample(30, return_info=True)
    assert (batch["step"].view(-1, 3) == torch.tensor([4, 5, 6])).all()
    assert (info["index_generation"] == rb.storage.tickets_of(info["index"][0])).all()
    rb[[4]] = rb[[4]]
    rb.update_tensordict_priority(batch.set("td_error", torch.ones(30)))
    assert rb.stats()["priority_updates_dropped"] == 0
    rb.writer.write_at([4], steps([10])[4:5])
    rb.update_tensordict_priority(batch)
    assert rb.stats()["priority_updates_dropped"] == 10


def test_plain_buffers_and_columns():
    data = torch.stack([steps([6, 4]), steps([3, 7], first=7)])
    sampler = NStep(SliceSampler(slice_len=3), 2, 1.0)
    rb = buffer(sampler, data, storage=LazyTensorStorage(40, ndim=2), kind=ReplayBuffer)
    batch, info = rb.sample(60, return_info=True)
    assert len(info["index"]) == 2
    assert (batch["number"].view(-1, 3) == batch["number"].view(-1, 3)[:, :1]).all()
    assert (batch["next", "observation"][:, 1] == batch["step"] + info["steps_to_next_obs"].flatten()).all()
    assert batch["gamma"] is info["gamma"]
    assert info["next", "truncated"].view(-1, 3).tolist() == [[False, False, True]] * 20


@pytest.mark.parametrize(
    "more",
    [{"traj_key": "number"}, {"end_key": ("next", "truncated")}, {"end_keys": [("next", "truncated")], "index": "cut"}],
)
def test_boundaries_are_those_of_the_sampler_inside(more):
    data = steps([3, 3, 3, 3], cut={1})
    data["next", "done"] = torch.zeros(12, 1).bool()
    data["next", "terminated"] = torch.zeros(12, 1).bool()
    rb = buffer(RewardToGo(SliceSampler(slice_len=3, **more)), data)
    batch = rb.sample(300)
    ends = [3, 6, 9, 12] if "traj_key" in more else [6, 12]
    reward = data["next", "reward"].flatten()
    expected = [reward[i : next(end for end in ends if end > i)].sum() for i in range(12)]
    assert (batch["reward_to_go"].flatten() == torch.stack(expected)[batch["index"].flatten()]).all()
    assert len(batch["index"].unique()) == 12
    theirs = rb.sampler.rules
    assert theirs[2] == more.get("index", "main")


def test_boundaries_of_its_own():
    data = steps([3, 3, 3, 3])
    inner = SliceSampler(slice_len=6, traj_key="half", end_keys=[])
    data["half"] = torch.arange(12) // 6
    rb = buffer(RewardToGo(inner, end_keys=[("next", "done")], index="ends"), data)
    batch = rb.sample(60)
    assert (batch["reward_to_go"].flatten() == torch.tensor([6.0, 5, 3] * 20)).all()
    rb.set_sampler(RewardToGo(SliceSampler(slice_len=6, traj_key="half", end_keys=[]), end_keys=[("next", "done")]))
    with pytest.raises(IncompatibleStore, match="Give another index"):
        rb.sample(6)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies(again):
    rb = buffer(chain(SliceSampler(slice_len=3)), steps([9]))
    rb.sample(3)
    a, b = again(rb).sample(21), rb.sample(21)
    assert (a == b).all()


def test_reopened(tmp_path):
    sampler = chain(PrioritizedSliceSampler(100, 0.6, 0.4, slice_len=3, end_key=("next", "done")))
    rb = buffer(sampler, steps([9]), storage=LazyMemmapStorage(100, scratch_dir=tmp_path), batch_size=30)
    rb.sample()
    rb.close()
    rb = ReplayBuffer.open(tmp_path)
    assert repr(rb.sampler) == repr(sampler)
    assert rb.sample()["reward_to_go"].shape == (30, 1)
    rb.close()


def test_beside_a_writer():
    """Whoever writes laps the ring all the time; windows and returns are always those of rows that belong together."""
    rb = buffer(NStep(SliceSampler(slice_len=2, traj_key="number"), 3, 0.5), capacity=64, lanes=2)
    rb.extend(steps([20], first=100), lane=0)
    stop = threading.Event()

    def write(lane):
        episode = lane
        while not stop.is_set():
            episode += 2
            rb.extend(steps([2 + episode % 7], first=episode), lane=lane)

    writers = [threading.Thread(target=write, args=(lane,)) for lane in range(2)]
    for writer in writers:
        writer.start()
    try:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            batch = rb.sample(32)
            k, step, number = batch["steps_to_next_obs"].flatten(), batch["step"], batch["number"]
            assert (number[::2] == number[1::2]).all()
            assert (step[::2] + 1 == step[1::2]).all()
            assert (batch["next", "observation"][:, 0] == number).all()
            assert (batch["next", "observation"][:, 1] == step + k).all()
            expected = sum(torch.where(i < k, 0.5**i * (1.0 + step + i), 0.0) for i in range(3))
            assert torch.equal(batch["next", "reward"].flatten(), expected)
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_a_step_that_moves_is_read_again_and_at_last_drawn_again(monkeypatch):
    monkeypatch.setattr("engram._support.native.wait_limit", lambda: 0.05)
    rb = buffer(NStep(SliceSampler(slice_len=2), 3, 1.0), steps([9]))
    rb.sample(4)
    expansion = rb.sampler._expansion
    genuine = expansion.native
    calls = []

    class Moving:
        """Of the first so many reads the second row moved."""

        def __init__(self, times):
            self.left = times

        def read(self, *of):
            tensors, moved, *others = genuine.read(*of)
            calls.append(n := len(of[2]))
            if self.left > 0:
                self.left -= 1
                for tensor in tensors:
                    tensor[-1] = 0
                moved = [n - 1]
            return tensors, moved, *others

    for times, sizes in ((2, [8, 1, 1]), (12, [8] + [1] * 8 + [8, 1, 1, 1])):
        calls.clear()
        expansion.native = Moving(times)
        batch = rb.sample(8)
        assert calls == sizes
        assert (batch["next", "observation"][:, 1] == batch["step"] + batch["steps_to_next_obs"].flatten()).all()
    expansion.native = Moving(10**9)
    with pytest.raises(WriterStalled, match="of a window, moved at every try"):
        rb.sample(8)


def test_too_short():
    rb = buffer(NStep(SliceSampler(slice_len=5), 3, 1.0), steps([4]))
    assert not rb.can_sample(5)
    with pytest.raises(NoSampleable, match="expected a trajectory of at least 5 steps"):
        rb.sample(5)
    with pytest.raises(RuntimeError, match="expected a multiple of slice_len=5, got 6"):
        rb.sample(6)
    rb.sampler.slice_len = 4
    assert len(rb.sample(4)) == 4


def test_what_is_refused():
    static = SliceSampler(slice_len=2, ends=torch.zeros(4), cache_values=True)
    with pytest.raises(TypeError, match="windows of trajectories that the rows tell, got a SliceSampler with ends"):
        NStep(static, 3, 0.9)
    finals = FinalObservations(["obs"], LazyTensorStorage(9))
    inner = SliceSampler(slice_len=2)

    class Windows(SliceSampler):
        def draw(self, extent, batch_size, key):
            return super().draw(extent, batch_size, key)

    with pytest.raises(TypeError, match="NextFromFollowing: sampler: expected one that draws rows, got a Windows"):
        NextFromFollowing(Windows(slice_len=2), finals)
    rows = TensorDict({"next": {"reward": torch.zeros(4, 1)}}, [4])
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=NStep(inner, 2, 1.0))
    rb.extend(rows)
    with pytest.raises(RuntimeError, match="trajectory ids"):
        rb.sample(4)
