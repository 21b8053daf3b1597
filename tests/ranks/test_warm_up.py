"""Before training the ranks agree that each can draw, whatever its sampler draws, and warm up together."""

import pytest
import torch

from engram import (
    FrameStack,
    LazyTensorStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Ranks,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.ranks.jobs import checkpointer, done, episode, job

SAMPLERS = {
    "rows": RandomSampler,
    "a pass": lambda: SamplerWithoutReplacement(drop_last=True),
    "priorities": lambda: PrioritizedSampler(64, 0.7, 0.5),
    "windows": lambda: SliceSampler(slice_len=4),
    "trajectories": lambda: SliceSamplerWithoutReplacement(slice_len=4, strict_length=False),
    "windows by priority": lambda: PrioritizedSliceSampler(64, 0.7, 0.5, slice_len=4),
    "returns": lambda: NStep(RandomSampler(), 3, 0.9, reward_key="obs"),
    "returns around windows": lambda: NStep(SliceSampler(slice_len=4), 3, 0.9, reward_key="obs"),
    "stacks around windows": lambda: FrameStack(SliceSampler(slice_len=4), 3, -1, ["obs"]),
}


def made(sampler):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(64, lanes=2), sampler=SAMPLERS[sampler](), batch_size=8, generator=torch.Generator()
    )


def draws(rb):
    try:
        return len(rb.sample()) > 0
    except (NoSampleable, ValueError):
        return False


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_warm_up_until_each_can_draw(tmp_path, sampler):
    """Two long trajectories and a short one, on four ranks: some have what no window fits into, one has nothing."""

    def write(ranks, rank):
        rb = made(sampler)
        for number, length in enumerate([[9, 2], [6]][rank]):
            rb.extend(episode(rank, 0, number, length), lane=0)
        checkpointer(tmp_path, rb, ranks).save(1)

    done(job(2, write))

    def act(ranks, rank):
        rb = made(sampler)
        checkpointer(tmp_path, rb, ranks).restore()
        before = rb.can_sample(), draws(rb)
        rounds = 0
        while not ranks.all(rb.can_sample(), timeout=60.0):
            rb.extend(episode(7, 1, rounds, 1 + rounds), lane=1)
            rounds += 1
            assert rounds < 20
        return before, rounds, draws(rb)

    found = done(job(4, act))
    assert all(said == drew for (said, drew), _, _ in found), "can_sample says what sample does"
    assert not all(said for (said, _), _, _ in found), "one has nothing"
    assert len({rounds for _, rounds, _ in found}) == 1
    assert found[0][1] > 0
    assert all(drew for _, _, drew in found)


def test_priorities_of_zero_are_no_anchors():
    rb = made("priorities")
    rows = rb.extend(episode(0, 0, 0, 8), lane=0)
    rb.update_priority(rows, 0.0)
    assert rb.can_sample()  # eps is above zero
    rb.set_sampler(PrioritizedSampler(64, 0.7, 0.5, eps=0.0, index="bare"))
    rb.update_priority(rows, 0.0)
    assert (rb.can_sample(), draws(rb)) == (False, False)


def test_all_is_true_where_each_says_so():
    assert Ranks.local().all(True, 1.0)
    assert not Ranks.local().all(False, 1.0)
    assert done(job(3, lambda ranks, rank: (ranks.all(True, 60.0), ranks.all(rank != 1, 60.0)))) == [(True, False)] * 3
