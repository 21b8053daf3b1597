"""Every sampler and every expander keeps the contract of samplers."""

import copy
import pickle

import pytest
import torch

from engram import (
    ConsumingSampler,
    Draw,
    FilteredSampler,
    FrameStack,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    RewardToGo,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from engram.testing import SamplerContract


class Contract(SamplerContract):
    copies = (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)))


class TestRandomSampler(Contract):
    def make(self, capacity):
        return RandomSampler()


class TestSamplerWithoutReplacement(Contract):
    def make(self, capacity):
        return SamplerWithoutReplacement()


class TestConsumingSampler(Contract):
    ends_epochs = True

    def make(self, capacity):
        return ConsumingSampler(50)


class TestFilteredSampler(Contract):
    def make(self, capacity):
        return FilteredSampler(RandomSampler(), max_staleness=10**6, policy_version="episode")


class TestFilteredPriorities(Contract):
    ends_epochs = True

    def make(self, capacity):
        return FilteredSampler(PrioritizedSampler(capacity, alpha=0.6, beta=0.4), max_uses=50)


class TestStalenessAwareSampler(Contract):
    def make(self, capacity):
        return StalenessAwareSampler(version_key="episode")


class TestStreamingSliceSampler(Contract):
    def make(self, capacity):
        return StreamingSliceSampler(slice_len=2, traj_key="episode")


@pytest.mark.filterwarnings("ignore:PromptGroupSampler")
class TestPromptGroupSampler(Contract):
    def make(self, capacity):
        return PromptGroupSampler(samples_per_group=2, complete=False, group_key="episode")


@pytest.mark.filterwarnings("ignore:PromptGroupSampler")
class TestPromptGroupSamplerByReward(Contract):
    def make(self, capacity):
        return PromptGroupSampler(
            samples_per_group=2, complete=False, group_key="episode", strategy="variance", reward_key="step"
        )


class TestPrioritizedSampler(Contract):
    def make(self, capacity):
        return PrioritizedSampler(capacity, 0.7, 0.5)


class TestPrioritizedSamplerWithTheLiveMaximum(Contract):
    def make(self, capacity):
        return PrioritizedSampler(capacity, 0.7, 0.5, max_priority_within_buffer=True)


class TestSliceSampler(Contract):
    def make(self, capacity):
        return SliceSampler(slice_len=2, traj_key="episode")


class TestSliceSamplerOverAnchors(Contract):
    def make(self, capacity):
        return SliceSampler(slice_len=2, traj_key="episode", uniform_over="anchors")


class TestSliceSamplerWithoutReplacement(Contract):
    ends_epochs = True

    def make(self, capacity):
        return SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")


class TestPrioritizedSliceSampler(Contract):
    def make(self, capacity):
        return PrioritizedSliceSampler(capacity, 0.7, 0.5, slice_len=2, traj_key="episode")


class TestNStep(Contract):
    def make(self, capacity):
        return NStep(RandomSampler(), n=2, gamma=0.5)


class TestNStepOfPriorities(Contract):
    def make(self, capacity):
        return NStep(PrioritizedSampler(capacity, 0.7, 0.5), n=2, gamma=0.5)


class TestFrameStack(Contract):
    def make(self, capacity):
        return FrameStack(SamplerWithoutReplacement(), 2, -1, ["observation"])


class TestRewardToGo(Contract):
    def make(self, capacity):
        return RewardToGo(RandomSampler(), gamma=0.5)


class Recent:
    """The sampler of five methods in docs/guide/components.md."""

    def draw(self, extent, batch_size, key):
        u = torch.rand(batch_size, generator=torch.Generator().manual_seed(key))
        age = (u**2 * extent.size).long()
        return Draw((extent.seam[0] - 1 - age) % extent.size)

    def observe(self, write, data): ...

    def update_priority(self, index, priority, *, generation=None): ...

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict): ...


class TestFiveMethods(Contract):
    def make(self, capacity):
        return Recent()


class Subclass(RandomSampler):
    """Draws by itself, so nothing native may draw in its place."""

    def draw(self, extent, batch_size, key):
        return Draw(extent.rows(torch.full((batch_size,), key % extent.size)))


class TestSubclass(Contract):
    def make(self, capacity):
        return Subclass()
