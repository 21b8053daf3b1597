"""Stacks of frames: order, dimensions, padding, next frames, and what is refused. The machine has the rest."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import FrameStack, LazyTensorStorage, NStep, RandomSampler, RewardToGo, TensorDictReplayBuffer


def frames(n, shape=(2, 3), dtype=torch.float32, episode=None):
    """Each frame is full of its number; the next one of the following number."""
    number = torch.arange(n)
    done = torch.zeros(n, 1, dtype=torch.bool)
    if episode:
        done[episode - 1 :: episode] = True

    def full(values):
        return values.reshape(n, *(1,) * len(shape)).expand(n, *shape).to(dtype)

    following = TensorDict({"frame": full(number + 1), "done": done, "reward": torch.ones(n, 1)}, [n])
    return TensorDict({"step": number, "frame": full(number), "next": following}, [n])


def sampled(sampler, data, capacity=100):
    """What comes of each row, in the order of steps."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, generator=torch.Generator().manual_seed(0)
    )
    rb.extend(data)
    batch = rb.sample(600)
    steps, first = batch["step"].unique(return_inverse=True)
    return batch[torch.stack([(first == i).nonzero()[0, 0] for i in range(len(steps))])]


@pytest.mark.parametrize(("dim", "shape"), [(-2, (6, 3)), (-1, (2, 9)), (None, (3, 2, 3))])
def test_along_a_dimension(dim, shape):
    out = sampled(FrameStack(RandomSampler(), 3, dim, ["frame"]), frames(7))["frame"]
    assert out.shape == (7, *shape)
    assert out.is_contiguous()
    numbers = out.unflatten(dim, (3, -1)).movedim(dim - 1, 1) if dim else out
    for t in range(7):
        expected = torch.tensor([max(t - 2, 0), max(t - 1, 0), t], dtype=torch.float32)
        assert (numbers[t] == expected[:, None, None]).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.int16])
@pytest.mark.parametrize("padding", ["same", "constant"])
def test_padding(dtype, padding):
    sampler = FrameStack(RandomSampler(), 4, -1, ["frame", ("next", "frame")], padding=padding, padding_value=7)
    out = sampled(sampler, frames(6, (1,), dtype, episode=3))
    assert out["frame"].dtype is dtype
    a, b, p, q = (0, 3, 0, 3) if padding == "same" else (0, 3, 7, 7)
    assert out["frame"].tolist() == [
        [p, p, p, a], [p, p, 0, 1], [p, 0, 1, 2],
        [q, q, q, b], [q, q, 3, 4], [q, 3, 4, 5],
    ]  # fmt: skip
    assert out["next", "frame"].tolist() == [
        [p, p, 0, 1], [p, 0, 1, 2], [0, 1, 2, 3],
        [q, q, 3, 4], [q, 3, 4, 5], [3, 4, 5, 6],
    ]  # fmt: skip


def test_next_frames_alone():
    """Without the frame before the first one, the first next frame stands for it."""
    data = frames(3, (1,))
    data["frame"] = data["frame"].double()
    out = sampled(FrameStack(RandomSampler(), 3, -1, [("next", "frame")]), data)["next", "frame"]
    assert out.tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 3]]


def test_after_the_oldest_frames_are_gone():
    out = sampled(FrameStack(RandomSampler(), 3, -1, ["frame"]), frames(14, (1,)), capacity=5)["frame"]
    assert out.tolist() == [[9, 9, 9], [9, 9, 10], [9, 10, 11], [10, 11, 12], [11, 12, 13]]


@pytest.mark.parametrize(("columns", "lanes"), [(1, 1), (1, 2), (2, 1)])
def test_whole_stacks_alone(columns, lanes):
    """Of a ring that is not full all rows; then none whose older frames may be overwritten."""
    storage = LazyTensorStorage(5 * columns * lanes, ndim=1 + (columns > 1), lanes=lanes)
    rb = TensorDictReplayBuffer(
        storage=storage, sampler=FrameStack(RandomSampler(), 3, -1, ["frame"], padding="constant", whole=True)
    )
    assert rb.sampler.config()["whole"] is True
    for count in range(1, 15):
        for lane in range(lanes):
            row = frames(count, (1,))[-1:]
            rb.extend(torch.stack([row] * columns) if columns > 1 else row, **({"lane": lane} if lanes > 1 else {}))
        found = {tuple(stack) for stack in rb.sample(500)["frame"].tolist()}
        oldest = 0 if count < 5 else count - 3
        assert found == {tuple(max(t - back, 0) for back in (2, 1, 0)) for t in range(oldest, count)}, count


@pytest.mark.parametrize("outside", [False, True])
def test_with_returns_of_several_steps(outside):
    keys = ["frame", ("next", "frame")]
    if outside:
        sampler = NStep(FrameStack(RandomSampler(), 2, -1, keys), 3, 1.0)
    else:
        sampler = FrameStack(NStep(RandomSampler(), 3, 1.0), 2, -1, keys)
    out = sampled(sampler, frames(5, (1,)))
    assert out["frame"].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert out["next", "frame"].tolist() == [[2, 3], [3, 4], [4, 5], [4, 5], [4, 5]]


def test_one_frame_is_the_plain_sample():
    data = frames(9)
    assert (sampled(FrameStack(RandomSampler(), 1, -1, ["frame"]), data)["frame"] == data["frame"]).all()


@pytest.mark.parametrize(
    ("arguments", "more", "error", "text"),
    [
        ((0, -1, ["a"]), {}, ValueError, "n: expected at least 1"),
        ((2, 1, ["a"]), {}, ValueError, "dim: expected a negative"),
        ((2, -1.0, ["a"]), {}, TypeError, "dim: expected an int"),
        ((2, -1, "a"), {}, TypeError, "in_keys: expected a list"),
        ((2, -1, None), {}, TypeError, "in_keys: expected a list"),
        ((2, -1, ["a"]), {"padding": "zeros"}, ValueError, "padding: expected 'same'"),
        ((2, -1, ["a"]), {"padding": ["same"]}, ValueError, r"padding: expected 'same' or 'constant', got \['same'\]"),
        (
            (2, -1, ["a"]),
            {"padding": np.array(["same"])},
            ValueError,
            "padding: expected 'same' or 'constant', got array",
        ),
        (
            (2, -1, ["a"]),
            {"padding": np.array(["a", "b"])},
            ValueError,
            "padding: expected 'same' or 'constant', got array",
        ),
        ((2, -1, ["a"]), {"padding_value": float("inf")}, ValueError, "padding_value: expected a finite"),
    ],
)
def test_bad_arguments(arguments, more, error, text):
    with pytest.raises(error, match=text):
        FrameStack(RandomSampler(), *arguments, **more)


def test_fields_that_do_not_fit():
    with pytest.raises(
        ValueError, match="expected a dimension -3 of a frame, got shape .* With dim=None .*, \\[2, 2, 3\\]"
    ):
        sampled(FrameStack(RandomSampler(), 2, -3, ["frame"]), frames(5))
    with pytest.raises(KeyError, match="in_keys: expected a stored field"):
        sampled(FrameStack(RandomSampler(), 2, -1, ["pixels"]), frames(5))
    with pytest.raises(TypeError, match="inside has changed"):
        sampled(FrameStack(FrameStack(RandomSampler(), 2, -1, ["frame"]), 2, -1, ["frame"]), frames(5))
    with pytest.raises(TypeError, match="inside has changed"):
        sampled(FrameStack(NStep(RandomSampler(), 2, 1.0), 2, -1, [("next", "reward")]), frames(5))


def test_reward_to_go_by_hand():
    out = sampled(RewardToGo(RandomSampler(), 0.5), frames(5, episode=3))
    assert out["reward_to_go"].tolist() == [[1.75], [1.5], [1], [1.5], [1]]
    assert out["reward_to_go_complete"].flatten().tolist() == [True] * 3 + [False] * 2
    out = sampled(RewardToGo(NStep(RandomSampler(), 2, 0.5), 1.0, out_key=("next", "return")), frames(5))
    assert out["next", "return"].flatten().tolist() == [5, 4, 3, 2, 1]
    assert not out["next", "return_complete"].any()
    with pytest.raises(ValueError, match="gamma"):
        RewardToGo(RandomSampler(), -0.1)
    with pytest.raises(ValueError, match="a name of its own"):
        sampled(RewardToGo(RandomSampler(), out_key="step"), frames(3))


def test_reward_to_go_of_a_trajectory_longer_than_is_listed_at_once():
    n = 300_000
    data = frames(n, (1,))
    sampler = RewardToGo(RandomSampler())
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler, batch_size=12)
    rb.extend(data)
    batch = rb.sample()
    assert (batch["reward_to_go"].flatten() == n - batch["step"]).all()
