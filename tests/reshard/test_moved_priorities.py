"""Priorities of steps that were dealt out to other ranks: bit for bit in every index, and drawn by them as if written there."""

import numpy as np
import pytest
import torch

from engram import (
    IncompatibleCheckpoint,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    TensorDictReplayBuffer,
)
from tests import stress
from tests.ranks.jobs import checkpointer, columns_of, done, episode, job, layout
from tests.statistics_of import assert_proportional

#: Lengths of each lane's trajectories; the last of a lane is open. They go round lanes of 24.
LENGTHS = [(9, 8, 6, 7), (5, 11, 3, 4)]


def two_buffers(lanes, length, **more):
    """Of one storage, each with priorities of its own."""
    storage = LazyTensorStorage(lanes * length, lanes=lanes)
    capacity = lanes * length
    made = [
        PrioritizedSampler(capacity, alpha=0.7, beta=0.5, index="critic", **more),
        PrioritizedSliceSampler(capacity, alpha=1.0, beta=0.4, eps=0.0, slice_len=3, index="model"),
    ]
    return [TensorDictReplayBuffer(storage=storage, sampler=it, batch_size=300, prefetch=None) for it in made]


def save(ranks, rank, root, least=0.0):
    critic, model = two_buffers(2, 24)
    for lane, lengths in enumerate(LENGTHS):
        for number, steps in enumerate(lengths):
            data = episode(rank, lane, number, steps, ends=number < 3)
            rows = critic.extend(data, lane=lane)
            # Neighbours in float64; zeros, or denormals.
            which = data["who"].to(torch.float64)
            critic.update_priority(rows, torch.nextafter(torch.ones(steps, dtype=torch.float64), which) * (1 + rank))
            model.update_priority(rows, torch.where(which % 5 == 0, least, 1.0 + which % 7))
    checkpointer(root, critic, ranks).save(1)
    return bits_of(critic), bits_of(model), [highest_of(critic), highest_of(model)]


def load(ranks, rank, root, lanes, length, **more):
    critic, model = two_buffers(lanes, length)
    report = checkpointer(root, critic, ranks).restore(incomplete={"open": "keep", "headless": "keep"}, **more)
    return report, critic, model


def bits_of(rb):
    """Who has which bits of priority."""
    state = rb.state_dict()
    leaves, numbers = state["_sampler"]["leaves"].numpy(), state["_storage"]["numbers"].numpy()
    who = columns_of(rb)["who"].numpy()
    live = np.flatnonzero(numbers)
    return dict(zip(who[live].tolist(), leaves[live].view(np.int64).tolist(), strict=True))


def highest_of(rb):
    return float(rb.state_dict()["_sampler"]["highest"])


@pytest.mark.filterwarnings("ignore:restore.*steps did not fit:UserWarning")
@pytest.mark.parametrize(("n", "lanes", "length"), [(3, 1, 60), (1, 3, 40), (2, 2, 24)])
def test_every_index_has_the_bits_that_it_had(tmp_path, n, lanes, length):
    saved = done(job(2, save, tmp_path, 5e-324))
    loaded = done(job(n, load, tmp_path, lanes, length))
    for which in range(2):
        before = {who: bits for one in saved for who, bits in one[which].items()}
        after = {}
        for _, *both in loaded:
            there = bits_of(both[which])
            assert not after.keys() & there.keys()
            after |= there
        if length > 24:
            assert after == before
        else:  # what was both headless and open, or did not fit
            assert after.items() <= before.items()
            assert len(after) > len(before) // 2
        assert {highest_of(both[which]) for _, *both in loaded} == {max(highest[which] for _, _, highest in saved)}
    for _, *both in loaded:
        live = np.flatnonzero(both[0].state_dict()["_storage"]["numbers"].numpy()).tolist()
        for name in ("critic", "model"):
            stress.check_priorities(both[0].storage.store.indexes[name, "priorities"], live)


def test_windows_begin_by_priority_wherever_there_is_room_in_their_trajectory(tmp_path):
    """Ends of old lanes are amid new ones now: what is behind them is another's. Steps are drawn by their leaves, with weights."""
    done(job(2, save, tmp_path))
    for _, _, model in done(job(1, load, tmp_path, 2, 80)):
        leaves = model.state_dict()["_sampler"]["leaves"].numpy()
        legal = np.zeros(len(leaves), bool)
        for lane, there in enumerate(layout(model)):
            for at in range(len(there) - 2):
                who = there[at]
                legal[lane * 80 + at] = who is not None and there[at + 1 : at + 3] == [who + 1, who + 2]
        counts = np.zeros(len(leaves))
        usual = leaves[legal & (leaves > 0)].min()
        torch.manual_seed(0)
        for _ in range(200):
            batch = model.sample()
            who = batch["who"].reshape(-1, 3)
            assert (who == who[:, :1] + torch.arange(3)).all()
            rows = batch["index"].reshape(-1, 3)[:, 0].numpy()
            np.add.at(counts, rows, 1)
            weight = batch["priority_weight"].reshape(-1, 3)[:, 0].double().numpy()
            ratio = (leaves[rows] / usual) ** -0.4
            np.testing.assert_allclose(weight / weight.max(), ratio / ratio.max(), rtol=1e-5)
        assert_proportional(counts, np.where(legal, leaves, 0))


def test_other_summands_are_refused_before_anything_changes(tmp_path):
    done(job(2, save, tmp_path))

    def act(ranks, _):
        storage = LazyTensorStorage(100, lanes=1)
        sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5, eps=0.25, index="critic")
        rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
        rows = rb.extend(episode(50, 0, 0, 6), lane=0)
        rb.update_priority(rows, torch.arange(6.0))
        before = bits_of(rb)
        with pytest.raises(IncompatibleCheckpoint, match="eps"):
            checkpointer(tmp_path, rb, ranks).restore()
        assert bits_of(rb) == before

    done(job(3, act))
