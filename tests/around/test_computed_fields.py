"""What expanders compute is a field of the batch, as if it were stored: in dicts and TensorDicts, for all that comes after reading."""

import copy
import dataclasses
import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import (
    DeviceLoader,
    DTypeCastTransform,
    FinalObservations,
    FrameStack,
    LazyTensorStorage,
    NextFromFollowing,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    SliceSampler,
    TensorDictReplayBuffer,
    WindowSpec,
)

N = 40
KINDS = {"dict": ReplayBuffer, "tensordict": ReplayBuffer, "tensordict buffer": TensorDictReplayBuffer}
COMPUTED = {"gamma", "steps_to_next_obs", "reward_to_go", "reward_to_go_complete"}
BELOW = {"obs", "original_reward"}


def rows(kind):
    """One episode: observation ``t`` is ``[t, t]``, so that the next one of the last step is ``[N, N]``."""
    obs = torch.arange(N + 1.0)[:, None].expand(N + 1, 2).clone()
    next_ = {"obs": obs[1:], "reward": torch.ones(N, 1), "done": (torch.arange(N) == N - 1)[:, None]}
    data = {"obs": obs[:-1], "next": next_}
    return data if kind == "dict" else TensorDict({**data, "next": TensorDict(next_, [N])}, [N])


def buffer(kind, inner=RandomSampler, **arguments):
    finals = FinalObservations(["obs"], LazyTensorStorage(9))
    sampler = RewardToGo(NStep(NextFromFollowing(inner(), finals), 3, 0.5))
    transform = [finals, *arguments.pop("transforms", [])]
    rb = KINDS[kind](storage=LazyTensorStorage(N), sampler=sampler, batch_size=24, **arguments)
    for one in transform:
        rb.append_transform(one)
    rb.extend(rows(kind))
    return rb


def is_right(batch):
    """Three steps later, and less at the end of the episode."""
    now, after = batch["obs"], batch["next"]["obs"]
    steps = (N - now[..., :1]).clip(max=3)
    ones = steps - steps + 1
    return (
        bool((after == now + steps).all())
        and bool((batch["steps_to_next_obs"] == steps).all())
        and bool((abs(batch["gamma"] - 0.5**steps) < 1e-6).all())
        and bool((batch["next"]["original_reward"] == ones).all())
        and bool((abs(batch["reward_to_go"] - (N - now[..., :1])) < 1e-3).all())
        and bool(batch["reward_to_go_complete"].all())
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [RandomSampler, lambda: PrioritizedSampler(N, 0.6, 0.4)])
def test_every_kind_of_rows_with_names(kind, inner):
    rb = buffer(kind, inner)
    batch, info = rb.sample(return_info=True)
    assert is_right(batch)
    assert is_right(rb.sample())
    marks = {"index", "priority_weight", "index_generation"} & set(info)
    assert set(batch.keys()) == {"obs", "next", *COMPUTED, *(marks if kind == "tensordict buffer" else ())}
    assert set(batch["next"].keys()) == {"done", "reward", "final", *BELOW}
    for key in COMPUTED:
        assert batch[key] is info[key]
    for key in BELOW:
        assert batch["next"][key] is info["next", key]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flat", [True, False])
def test_windows(kind, flat):
    if flat:
        rb = buffer(kind, lambda: SliceSampler(slice_len=4))
    else:
        rb = buffer(kind, lambda: SliceSampler(window=WindowSpec(4), flat=False))
    batch, info = rb.sample(return_info=True)
    shape = (24,) if flat else (24, 4)
    assert batch["obs"].shape[:-1] == batch["next"]["obs"].shape[:-1] == shape
    assert is_right(batch)
    ends = info["next", "truncated"].reshape(-1, 4)
    assert ends.tolist() == [[False, False, False, True]] * len(ends)
    assert ("truncated" in batch["next"].keys()) == (kind == "tensordict buffer")


@pytest.mark.parametrize("prefetch", [None, 2])
def test_arrays_and_attributes(prefetch):
    batch, info = buffer("dict", output="numpy", prefetch=prefetch).sample(return_info=True)
    assert isinstance(batch["next"]["obs"], np.ndarray)
    assert is_right(batch)
    assert isinstance(info["next", "obs"], np.ndarray)
    batch = buffer("dict", output="namedtuple", prefetch=prefetch).sample()
    assert is_right({**batch._asdict(), "next": batch.next._asdict()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 3])
def test_transforms_get_them_with_the_stored_fields(kind, prefetch):
    cast = DTypeCastTransform(torch.float32, torch.float64, in_keys=["obs", ("next", "obs"), "gamma"])
    rb = buffer(kind, transforms=[cast], prefetch=prefetch)
    for _ in range(5):
        batch, info = rb.sample(return_info=True)
        assert is_right(batch)
        assert batch["next"]["obs"].dtype is batch["gamma"].dtype is batch["obs"].dtype is torch.float64
        assert info["next", "obs"].dtype is info["gamma"].dtype is torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_collate_functions_get_them_with_the_stored_fields(kind):
    def collate(data):
        seen.append(is_right(data))
        return data

    seen = []
    assert is_right(buffer(kind, collate_fn=collate).sample())
    assert seen == [True]


def test_prefetched_batches_copies_and_states():
    rb = buffer("dict", prefetch=2, generator=torch.Generator().manual_seed(0))
    twins = [copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))]
    expected = rb.sample()
    for twin in twins:
        batch = twin.sample()
        assert is_right(batch)
        assert torch.equal(batch["next"]["obs"], expected["next"]["obs"])
    state = rb.state_dict()
    rb.load_state_dict(state)
    assert is_right(rb.sample())
    with DeviceLoader(buffer("dict"), "cpu") as loader:
        assert is_right(next(iter(loader)))
    assert is_right(rb.sample(device="cpu"))


def test_another_sampler_takes_them_away():
    rb = buffer("dict")
    assert "gamma" in rb.sample()
    rb.set_sampler(RandomSampler())
    assert rb.sample().keys() == {"obs", "next"}


def test_a_batch_is_new():
    """What a user changes in it is in no other batch."""
    rb = buffer("dict")
    first = rb.sample()
    first["next"].clear()
    first.clear()
    assert is_right(rb.sample())


Row = namedtuple("Row", ["obs", "reward", "done"])


@dataclasses.dataclass
class Record:
    obs: object
    reward: object
    done: object


@tensorclass
class Tensors:
    obs: torch.Tensor
    reward: torch.Tensor
    done: torch.Tensor


@pytest.mark.parametrize("form", [Row, Record, Tensors])
def test_rows_without_a_place_for_them_have_them_in_info(form):
    fields = {"obs": torch.arange(6.0), "reward": torch.ones(6), "done": torch.arange(6) == 5}
    data = form(**fields, **({"batch_size": [6]} if form is Tensors else {}))
    sampler = RewardToGo(RandomSampler(), reward_key="reward", end_keys=["done"])
    rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=9)
    rb.extend(data)
    batch, info = rb.sample(return_info=True)
    assert type(batch) is form
    assert not hasattr(batch, "reward_to_go")
    assert (info["reward_to_go"].flatten() == 6 - batch.obs).all()


def test_an_entry_below_a_part_without_a_place_is_in_info():
    """The rows are dicts, but the rewards are in a named tuple."""
    Below = namedtuple("Below", ["reward", "done"])
    rb = ReplayBuffer(
        storage=LazyTensorStorage(6),
        sampler=NStep(RandomSampler(), 2, 0.5, reward_key=("next", "reward")),
        batch_size=9,
    )
    rb.extend({"obs": torch.arange(6.0), "next": Below(torch.ones(6), torch.arange(6) == 5)})
    batch, info = rb.sample(return_info=True)
    assert batch["next"]._fields == ("reward", "done")
    assert torch.equal(batch["gamma"], info["gamma"].squeeze(-1))
    assert (info["next", "original_reward"] == 1).all()


@pytest.mark.parametrize("inner", [RandomSampler, lambda: SliceSampler(window=WindowSpec(3), flat=False)])
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_numbers_have_the_shape_of_rewards(inner, shape):
    """A target ``reward + gamma * value`` of dicts has one number a row."""
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=RewardToGo(NStep(inner(), 2, 0.5)), batch_size=4)
    rb.extend({"obs": torch.arange(9.0), "next": {"reward": torch.ones(9, *shape), "done": torch.arange(9) == 8}})
    batch, info = rb.sample(return_info=True)
    batched = batch["obs"].shape
    assert batch["next"]["reward"].shape == batch["reward_to_go"].shape == (*batched, *shape)
    for key in ("gamma", "steps_to_next_obs", "reward_to_go_complete"):
        assert batch[key].shape == (*batched, *([] if shape == () else [1]))
        assert torch.equal(info[key], batch[key].reshape(*batched, 1))
    assert torch.equal(batch["steps_to_next_obs"].reshape(batched), (9 - batch["obs"]).clip(max=2).long())


def test_stacks_of_next_frames():
    finals = FinalObservations(["frame"], LazyTensorStorage(9))
    sampler = FrameStack(NextFromFollowing(RandomSampler(), finals), 2, -1, ["frame"])
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, transform=finals, batch_size=50)
    frame = torch.arange(1.0, 8.0)[:, None]
    rb.extend({"frame": frame[:6], "next": {"frame": frame[1:], "done": torch.arange(6) == 5}})
    batch = rb.sample()
    last = batch["frame"][:, 1]
    assert torch.equal(batch["next"]["frame"], torch.stack([last, last + 1], 1))
