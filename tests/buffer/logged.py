"""Buffers whose draws are logged, and batches compared bit for bit."""

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from engram import (
    ConsumingSampler,
    Draw,
    FinalObservations,
    FrameStack,
    LazyTensorStorage,
    NextFromFollowing,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    WindowSpec,
)

CAPACITY = 120


class Newest:
    """A sampler of somebody's own, which says something of each row in an array of NumPy."""

    def draw(self, extent, batch_size, key):
        rows = extent.rows(torch.arange(batch_size) * 7 % extent.size)
        return Draw(rows, None, {"shares": np.arange(batch_size, dtype=np.float32), ("deep", "mark"): rows % 2 == 0})

    def observe(self, write, data):
        pass

    def update_priority(self, index, priority, *, generation=None):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def prioritized():
    return PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5)


#: By name: what makes the sampler, and whether rows around a drawn one are read.
SAMPLERS = {
    "uniform": (RandomSampler, False),
    "prioritized": (prioritized, False),
    "epoch": (SamplerWithoutReplacement, False),
    "consuming": (lambda: ConsumingSampler(50), False),
    "own": (Newest, False),
    "slices": (lambda: SliceSampler(slice_len=4), False),
    "short slices": (lambda: SliceSampler(slice_len=4, strict_length=False), False),
    "padded slices": (lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True), False),
    "windows": (lambda: SliceSampler(window=WindowSpec(length=2, burn_in=1, padding=1), flat=False), False),
    "slices epoch": (lambda: SliceSamplerWithoutReplacement(slice_len=4), False),
    "prioritized slices": (lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=4), False),
    "n-step": (lambda: NStep(RandomSampler(), n=3, gamma=0.9), True),
    "n-step prioritized": (lambda: NStep(prioritized(), n=3, gamma=0.9), True),
    "frames": (lambda: FrameStack(RandomSampler(), 3, -1, ["obs"]), True),
    "frames and n-step": (lambda: NStep(FrameStack(prioritized(), 3, -1, ["obs"]), n=2, gamma=0.9), True),
    "n-step slices": (lambda: NStep(SliceSampler(slice_len=4), n=3, gamma=0.9), True),
    "n-step windows": (lambda: NStep(SliceSampler(window=WindowSpec(length=4), flat=False), n=2, gamma=0.9), True),
}


def steps(first, n, *, lane=0):
    """Steps of episodes of 9, each with a number of its own."""
    at = torch.arange(first, first + n)
    done = (at % 9 == 8)[:, None]
    obs = torch.randn(n, 3, generator=torch.Generator().manual_seed(first + 1000 * lane))
    reward = torch.sin(at.float())[:, None]
    fields = {"at": at + 10_000 * lane, "obs": obs, "next": {"obs": obs + 1, "reward": reward, "done": done}}
    return TensorDict(fields, [n])


def made(sampler, *, storage=None, kind=TensorDictReplayBuffer, seed=3, **more):
    return kind(
        storage=LazyTensorStorage(CAPACITY) if storage is None else storage,
        sampler=SAMPLERS[sampler][0](),
        batch_size=8,
        generator=torch.Generator().manual_seed(seed),
        **more,
    )


def following(storage=None):
    """A buffer of rows whose next observations are those of the following rows."""
    finals = FinalObservations(["obs"], LazyTensorStorage(40))
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY) if storage is None else storage,
        sampler=NStep(NextFromFollowing(RandomSampler(), finals), n=2, gamma=0.9),
        transform=finals,
        batch_size=8,
        generator=torch.Generator().manual_seed(3),
    )


def play(rb, samples, *, data=steps, first=0):
    """Writes and draws by turns; the batches. Priorities follow the rows."""
    drawn = []
    for turn in range(samples):
        n = 4 + turn % 2 if turn else 12
        rb.extend(data(first, n))
        first += n
        if turn % 3 == 0 and rb._wiring.of_sampler.prioritized:
            rows = torch.arange(len(rb))
            rb.update_priority(rows, (rows * 37 % 11 + 1).float())
        drawn.append(rb.sample(return_info=True))
    return drawn


def same(one, other):
    """Whether two values are equal bit for bit, with their types and keys."""
    if isinstance(one, TensorDictBase):
        return same(dict(one.items()), dict(other.items())) and one.batch_size == other.batch_size
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and same(torch.from_numpy(one), torch.from_numpy(other))
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and raw(one) == raw(other)
    return one == other


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
