"""Windows over several stores: each as likely as if all trajectories were in one."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    FrameStack,
    LazyMemmapStorage,
    NStep,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    WindowSpec,
)
from tests.serving.servers import serving_each

#: Lengths of the trajectories of each store.
LENGTHS = ((3, 9, 4, 1, 2), (6,), (2, 1, 1, 2, 1, 3))
LENGTH = 3
ROWS = sum(map(sum, LENGTHS))
SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=LENGTH, traj_key="episode"),
    "anchors": lambda: SliceSampler(slice_len=LENGTH, traj_key="episode", uniform_over="anchors"),
    "shaped": lambda: SliceSampler(window=WindowSpec(length=2, burn_in=1), flat=False, traj_key="episode"),
    "priority": lambda: PrioritizedSliceSampler(100, 0.8, 0.5, slice_len=LENGTH, traj_key="episode"),
    "epoch": lambda: SliceSamplerWithoutReplacement(slice_len=LENGTH, traj_key="episode"),
    "n-step": lambda: NStep(RandomSampler(), 2, 0.9),
    "stack": lambda: FrameStack(RandomSampler(), 2, -1, ["frame"]),
    "num_slices": lambda: SliceSampler(num_slices=2, traj_key="episode"),
    "short": lambda: SliceSampler(slice_len=LENGTH, traj_key="episode", strict_length=False),
}


def steps():
    """All rows, and where each trajectory begins."""
    lengths = np.concatenate(LENGTHS)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    return torch.from_numpy(episode), np.cumsum([0, *lengths[:-1]]), lengths


def priorities():
    return torch.from_numpy(np.random.default_rng(2).gamma(0.8, size=ROWS)) + 0.05


@pytest.fixture(scope="module")
def fleets(tmp_path_factory):
    root, found, (episode, _, _) = tmp_path_factory.mktemp("slices"), {}, steps()
    for name, sampler in SAMPLERS.items():
        first, found[name] = 0, []
        for number, lengths in enumerate(LENGTHS):
            rows = slice(first, first := first + sum(lengths))
            step = torch.arange(ROWS)[rows]
            over = torch.cat([episode[1:] != episode[:-1], torch.tensor([True])])[rows].unsqueeze(-1)
            next_ = TensorDict({"done": over, "reward": torch.ones(len(step), 1)}, [len(step)])
            data = {"a": step, "episode": episode[rows], "frame": step.float().unsqueeze(-1), "next": next_}
            storage = LazyMemmapStorage(100, scratch_dir=root / f"{name}-{number}")
            with TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=6) as rb:
                index = rb.extend(TensorDict(data, [len(step)]))
                if name == "priority":
                    rb.update_priority(index, priorities()[rows])
            found[name].append(root / f"{name}-{number}")
    with serving_each([folder for folders in found.values() for folder in folders]):
        yield {name: [f"unix:{folder}.sock" for folder in folders] for name, folders in found.items()}


def seeded(seed=4):
    return torch.Generator().manual_seed(seed)


def likely(name):
    """How likely a window begins at each row, by hand."""
    _, starts, lengths = steps()
    found = np.zeros(ROWS)
    for start, length in zip(starts, lengths, strict=True):
        windows = length - LENGTH + 1
        if windows > 0:
            found[start : start + windows] = 1 if name == "anchors" else 1 / windows
    if name == "priority":
        found = (found > 0) * ((priorities().numpy() + 1e-8) ** 0.8)
    return found / found.sum()


def fits(counts, expected):
    many = expected > 0
    assert not counts[~many].any()
    chi = ((counts - expected)[many] ** 2 / expected[many]).sum()
    return abs(chi - many.sum() + 1) < 5 * np.sqrt(2 * many.sum())


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", ["slices", "anchors", "shaped", "priority"])
def test_windows_are_drawn_as_of_one_store(fleets, name, prefetch):
    windows = 1500
    size = windows if name == "shaped" else windows * LENGTH
    with ReplayBuffer.connect(fleets[name], batch_size=size, generator=seeded(), prefetch=prefetch) as rb:
        batches = [rb.sample() for _ in range(4)]
        assert batches[0].batch_size == ((windows, LENGTH) if name == "shaped" else (size,))
        a = torch.cat([batch["a"].reshape(-1, LENGTH) for batch in batches])
        assert (a.diff() == 1).all()
        assert fits(np.bincount(a[:, 0].numpy(), minlength=ROWS), likely(name) * len(a))
        if name == "priority":
            leaves = (priorities() + 1e-8) ** 0.8
            weights = (leaves / leaves.min()) ** -0.5
            got = torch.cat([batch["priority_weight"].reshape(-1, LENGTH) for batch in batches])
            assert torch.allclose(got.double(), weights[a[:, :1]].expand(-1, LENGTH), rtol=1e-6)


def test_every_trajectory_comes_once_per_epoch(fleets):
    _, _, lengths = steps()
    long = set(np.flatnonzero(lengths >= LENGTH).tolist())
    with ReplayBuffer.connect(fleets["epoch"], generator=seeded()) as rb:
        for _ in range(2):
            seen = [number for batch in rb for number in batch["episode"].reshape(-1, LENGTH)[:, 0].tolist()]
            assert sorted(seen) == sorted(long)


@pytest.mark.parametrize("name", ["n-step", "stack"])
def test_expanded_rows_are_drawn_as_of_one_store(fleets, name):
    with ReplayBuffer.connect(fleets[name], batch_size=3000, generator=seeded()) as rb:
        batch = rb.sample()
        assert fits(np.bincount(batch["a"].numpy(), minlength=ROWS), np.full(ROWS, len(batch) / ROWS))
        if name == "stack":
            episode = steps()[0]
            before = (batch["a"] - 1).clamp(min=0)
            begins = episode[before] != episode[batch["a"]]
            expected = torch.where(begins | (batch["a"] == 0), batch["a"], before)
            assert torch.equal(batch["frame"][:, 0], expected.float())


@pytest.mark.parametrize(("name", "said"), [("num_slices", "different lengths"), ("short", "different lengths")])
def test_windows_of_different_lengths_are_refused(fleets, name, said):
    with pytest.raises(ValueError, match=said):
        ReplayBuffer.connect(fleets[name])
