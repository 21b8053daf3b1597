"""Where two conveniences meet: default storages, layouts of time, priorities of one window, and positions of any writer."""

import contextlib

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from engram import (
    FrameStack,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    Trajectory,
)


@pytest.mark.parametrize("time", [0, 1])
def test_a_square_patch_goes_to_the_rows_of_its_places(time):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8, ndim=2), dim_extend=time, writer=RoundRobinWriter(track_generations=True)
    )
    data = torch.tensor([[0, 1], [2, 3]])
    index = rb.extend(TensorDict({"a": data}, [2, 2]))
    rb.update_if_present(index=index, generation=rb.writer.generations_of(index), patch={"a": data + 100})
    assert rb[:]["a"].tolist() == [[100, 101], [102, 103]]


def test_another_buffer_does_not_turn_the_layout_of_one():
    storage = LazyTensorStorage(8, ndim=2)
    first = ReplayBuffer(storage=storage)
    first.extend(torch.arange(8).reshape(2, 4))
    with pytest.raises(TypeError, match="dim_extend"):
        ReplayBuffer(storage=storage, dim_extend=0)
    assert first[:].shape == (2, 4)
    assert ReplayBuffer(storage=storage, dim_extend=1)[:].shape == (2, 4)


def test_a_sampler_of_ones_own_need_not_make_its_base():
    class Mine(RandomSampler):
        def __init__(self, more):
            self.more = more

    rb = ReplayBuffer(storage=ListStorage(10), sampler=Mine(3), batch_size=4)
    rb.extend([torch.tensor(1)] * 3)
    assert rb.sample().tolist() == [1] * 4


def test_one_window_takes_one_priority():
    sampler = PrioritizedSliceSampler(20, 1.0, 1.0, eps=0.0, slice_len=5)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=5)
    rb.extend({"a": torch.arange(20), "done": torch.arange(20) % 10 == 9})
    _, info = rb.sample(return_info=True)
    rb.update_priority(info, torch.tensor([7.0]))
    leaves = rb.sampler.anchors.priorities().leaves(20)
    first = int(torch.as_tensor(info["index"][0] if isinstance(info["index"], tuple) else info["index"]).reshape(-1)[0])
    assert leaves[first] == 7
    assert (leaves == 7).sum() == 1


def test_an_ensembles_windows_take_priorities_in_the_shape_of_its_batch():
    members = [
        ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=3))
        for _ in "ab"
    ]
    for member in members:
        member.extend({"o": torch.zeros(30), "done": torch.arange(30) % 10 == 9})
    rb = ReplayBufferEnsemble(*members, batch_size=12)
    _, info = rb.sample(return_info=True)
    rb.update_priority(info, torch.full((2, 2), 5.0))
    assert all(bool((member.sampler.anchors.priorities().leaves(30) == 5).any()) for member in members)


@pytest.mark.parametrize("wrong", [5, torch.zeros(0, 3), []])
def test_a_first_write_of_nothing_decides_no_storage(wrong):
    rb = ReplayBuffer(100, batch_size=2)
    with contextlib.suppress(TypeError):
        rb.extend(wrong)
    rb.extend({"a": torch.zeros(3)})
    assert isinstance(rb.storage, LazyTensorStorage)
    assert rb.sample()["a"].shape == (2,)


def test_another_number_of_rows_does_not_forget_the_fields():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2))
    rb.extend({"a": torch.zeros(2)}, lane="each")
    rb.empty()
    with pytest.raises(RuntimeError, match="rows?"):
        rb.extend({"a": torch.zeros(3)}, lane=[0, 1])
    assert rb.storage.initialized


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: NStep(RandomSampler(), n=2, gamma=0.9),
        lambda: FrameStack(RandomSampler(), 2, None, ["obs"]),
        lambda: PromptGroupSampler(num_groups=1, group_key="group"),
    ],
)
def test_samplers_that_need_fields_have_them_by_default(sampler):
    rb = ReplayBuffer(100, sampler=sampler(), batch_size=2)
    rb.extend(
        {
            "obs": torch.zeros(6, 3),
            "group": torch.zeros(6, dtype=torch.int64),
            "next": {"obs": torch.zeros(6, 3), "reward": torch.ones(6), "done": torch.arange(6) == 5},
        }
    )
    assert rb.sample()["obs"].shape[0] == 2


def test_an_environment_is_recorded_by_default():
    rb = ReplayBuffer(100, batch_size=2)
    env = rb.record(gymnasium.make("CartPole-v1"))
    env.reset(seed=0)
    env.step(0)
    assert isinstance(rb.storage, LazyTensorStorage)
    assert len(rb) == 1


class TestPositions:
    def test_of_a_data_set(self):
        rb = ReplayBuffer(storage=TensorStorage(torch.zeros(10)), writer=ImmutableDatasetWriter())
        assert rb.writer.positions_of(range(10)).tolist() == list(range(10))

    def test_of_data_that_is_written_over(self):
        rb = ReplayBuffer(storage=TensorStorage(torch.zeros(6)))
        for n in range(15):
            found = rb.writer.positions_of(range(6)).tolist()
            newest = max(n, 6) - 1
            assert sorted(found) == list(range(newest - 5, newest + 1))
            assert found[(n - 1) % 6] == newest
            rb.add(torch.tensor(1.0))

    def test_where_a_writer_chooses(self):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter("a"))
        rb.extend(TensorDict({"a": torch.arange(5.0)}, [5]))
        with pytest.raises(TypeError, match="not of a TensorDictMaxValueWriter"):
            rb.writer.positions_of([3])

    def test_without_a_buffer(self):
        assert RoundRobinWriter().positions_of([3]).tolist() == [-1]


def test_a_trajectory_is_no_unit():
    with pytest.raises(TypeError, match=r"expected a TensorDict \[T\], got none. To draw steps: sample_unit=Sequence"):
        Trajectory()
