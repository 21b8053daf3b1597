"""Windows of rows that are dicts, tuples or named tuples: as those of TensorDicts."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

LENGTHS = [7, 1, 12, 5, 9, 3, 8]


class Following(NamedTuple):
    done: object
    reward: object


def steps():
    """Episodes of LENGTHS, the last one open, as arrays."""
    episode = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    t = np.concatenate([np.arange(n) for n in LENGTHS])
    done = np.concatenate([np.arange(n) == n - 1 for n in LENGTHS])
    done[-1] = False
    return episode, t, done, np.random.default_rng(0).standard_normal(len(t)).astype(np.float32)


def as_dict(episode, t, done, reward):
    return {"episode": episode, "t": t, "next": {"done": done, "reward": reward}}


def as_namedtuples(episode, t, done, reward):
    return {"episode": episode, "t": t, "next": Following(done, reward)}


def as_tensordict(episode, t, done, reward):
    made = as_dict(*map(torch.from_numpy, (episode, t, done, reward)))
    return TensorDict(made, [len(t)])


SAMPLERS = {
    "slices": lambda **options: SliceSampler(slice_len=4, **options),
    "pass": lambda **options: SliceSamplerWithoutReplacement(slice_len=4, shuffle=False, **options),
    "priorities": lambda **options: PrioritizedSliceSampler(100, 0.7, 0.5, slice_len=4, **options),
}


def filled(form, sampler, batch_size=24):
    generator = torch.Generator().manual_seed(3)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=batch_size, generator=generator)
    rb.extend(form(*steps()))
    return rb


@pytest.mark.parametrize(
    "key", [{"traj_key": "episode"}, {"end_keys": [("next", "done")]}, {}], ids=["id", "end", "found"]
)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("form", [as_dict, as_namedtuples])
def test_they_are_windows_of_one_episode_and_those_of_tensordicts(form, sampler, key):
    ours, theirs = filled(form, SAMPLERS[sampler](**key)), filled(as_tensordict, SAMPLERS[sampler](**key))
    for _ in range(20):
        batch, info = ours.sample(return_info=True)
        other, its_info = theirs.sample(return_info=True)
        assert torch.equal(batch["t"], other["t"])
        assert info.keys() == its_info.keys()
        assert str(info) == str(its_info)
        episode, t = batch["episode"].tolist(), batch["t"].tolist()
        ends = info["next", "truncated"].flatten().tolist()
        for i in range(1, len(t)):
            if not ends[i - 1]:  # within a window
                assert (episode[i], t[i]) == (episode[i - 1], t[i - 1] + 1)


@pytest.mark.parametrize("form", [as_dict, as_namedtuples])
def test_all_windows_are_drawn_in_equal_shares(form):
    """Chi-square over the starts that a window of 4 may have."""
    rb = filled(form, SliceSampler(slice_len=4, strict_length=True, traj_key="episode"), 40)
    places = {(e, t): 0 for e, n in enumerate(LENGTHS) for t in range(n - 3)}
    for _ in range(600):
        batch = rb.sample()
        for e, t in zip(batch["episode"][::4].tolist(), batch["t"][::4].tolist(), strict=True):
            places[e, t] += 1
    by_episode = {e: sum(k for (of, _), k in places.items() if of == e) for e, n in enumerate(LENGTHS) if n > 3}
    expected = 6000 / len(by_episode)
    assert sum((k - expected) ** 2 / expected for k in by_episode.values()) < 25  # 4 degrees of freedom: p = 5e-5


def test_lanes_are_recorded_as_dicts_and_drawn_after_reopening(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(60, scratch_dir=tmp_path / "store", lanes=3))
    for t in range(18):
        rb.extend(
            {"t": [t] * 3, "env": [0, 1, 2], "next": {"done": [t % (4 + k) == 3 + k for k in range(3)]}}, lane="each"
        )
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "store", sampler=SliceSampler(slice_len=3, strict_length=True), batch_size=30)
    for _ in range(30):
        batch = rb.sample()
        t, env, done = (x.reshape(10, 3) for x in (batch["t"], batch["env"], batch["next"]["done"]))
        assert bool((t.diff(dim=1) == 1).all())
        assert bool((env == env[:, :1]).all())
        assert not bool(done[:, :-1].any())


def test_rows_of_one_tensor_have_no_fields():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2))
    rb.extend(torch.zeros(4))
    with pytest.raises(RuntimeError, match="got rows of one tensor each"):
        rb.sample(2)
