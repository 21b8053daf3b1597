"""A field is added while a batch is read: between its draw, its first read, and the read of what moved meanwhile."""

import pytest
import torch

from engram import (
    DeviceLoader,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RewardToGo,
    SamplerWithoutReplacement,
    SampleUnit,
    Sequence,
    SliceSampler,
    TensorStorage,
)
from engram.around.expander import Expansion
from engram.around.sequence import WindowTable

CAPACITY = 40


def rows(first, n=CAPACITY):
    steps = torch.arange(first, first + n)
    nexts = {"done": steps.unsqueeze(-1) % 5 == 4, "reward": torch.ones(n, 1)}
    return {"t": steps, "obs": steps.unsqueeze(-1).float(), "next": nexts}


class Pairs(SampleUnit):
    """A unit of one's own: each row stands for itself and for the one before."""

    def expand(self, index, info, storage):
        pairs = torch.stack([(index - 1) % CAPACITY, index], -1).flatten()
        return pairs, {}


WAYS = {
    "uniform": dict,
    "own draw": lambda: {"sampler": Plain()},
    "priorities": lambda: {"sampler": PrioritizedSampler(CAPACITY, 0.7, 0.5)},
    "epoch": lambda: {"sampler": SamplerWithoutReplacement()},
    "sequence": lambda: {"sample_unit": Sequence(3, burn_in=1)},
    "sequence of priorities": lambda: {
        "sampler": PrioritizedSampler(CAPACITY, 0.7, 0.5),
        "sample_unit": Sequence(3, bootstrap=1),
    },
    "sequence of an epoch": lambda: {"sampler": SamplerWithoutReplacement(), "sample_unit": Sequence(3)},
    "unit": lambda: {"sample_unit": Pairs()},
    "n-step": lambda: {"sampler": NStep(RandomSampler(), 3, 0.9)},
    "n-step of priorities": lambda: {"sampler": NStep(PrioritizedSampler(CAPACITY, 0.7, 0.5), 3, 0.9)},
    "n-step of slices": lambda: {"sampler": NStep(SliceSampler(slice_len=2), 3, 0.9)},
    "stack": lambda: {"sampler": FrameStack(RandomSampler(), 3, -1, ["obs"])},
    "returns": lambda: {"sampler": RewardToGo(RandomSampler(), 0.9)},
}


class Plain(RandomSampler):
    """Draws in Python, as its class is a user's."""

    def draw(self, extent, batch_size, key):
        return super().draw(extent, batch_size, key)


class Growing:
    """Says that the first row of what is read has moved, and lets a field be added before it is read again."""

    def __init__(self, rb, monkeypatch):
        self.rb, self.fields, self.most = rb, 0, 0
        for reader in (WindowTable, Expansion, TensorStorage):
            monkeypatch.setattr(reader, "read", self.moving(reader.read))

    def moving(self, read):
        def moved(*args, **kwargs):
            found = read(*args, **kwargs)
            at = 2 if len(found) == 3 and isinstance(found[2], list) else 1
            if self.most:
                self.most -= 1
                self.grow()
                return (*found[:at], sorted({0, *found[at]}), *found[at + 1 :])
            return found

        return moved

    def grow(self):
        self.rb.add_field(("more", f"v{self.fields}"), torch.zeros(2), fill=float(self.fields))
        self.fields += 1

    def __call__(self, act, most=2):
        self.most = most
        try:
            return act()
        finally:
            self.most = 0


def check(batch):
    assert torch.equal(batch["obs"][..., -1].long(), batch["t"])
    assert torch.equal(batch["next"]["done"].squeeze(-1), batch["t"] % 5 == 4)
    for name, values in batch.get("more", {}).items():
        assert values.eq(float(name[1:])).all()


@pytest.mark.parametrize("place", ["RAM", "folder"])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_goes_on_with_the_fields_it_began_with(way, place, monkeypatch, tmp_path):
    storage = LazyTensorStorage(CAPACITY) if place == "RAM" else LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "s")
    rb = ReplayBuffer(storage=storage, batch_size=8, **WAYS[way]())
    rb.extend(rows(0))
    growing = Growing(rb, monkeypatch)
    for _ in range(4):
        batch, _info = growing(lambda: rb.sample(return_info=True))
        if "n-step" not in way:
            check(batch)
    growing.grow()
    batch = rb.sample()
    assert len(batch["more"]) == growing.fields
    if way not in ("uniform", "priorities", "epoch"):  # which are one native call
        assert growing.fields == 9
    rb.close()


@pytest.mark.parametrize("way", ["sequence", "n-step", "unit"])
def test_prefetched_batches_and_those_of_a_loader(way, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=8, prefetch=2, **WAYS[way]())
    rb.extend(rows(0))
    growing = Growing(rb, monkeypatch)
    for _ in range(3):
        growing(rb.sample)
    with DeviceLoader(rb, "cpu") as loader:
        assert "t" in growing(lambda: next(iter(loader)))
    rb.close()


def test_members_of_an_ensemble_get_a_field_one_after_another():
    members = [ReplayBuffer(storage=LazyTensorStorage(CAPACITY)) for _ in range(2)]
    for n, member in enumerate(members):
        member.extend(rows(n * CAPACITY))
    ensemble = ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True)
    ensemble.sample()
    for member in members:
        assert "v" not in ensemble.sample()
        member.add_field("v", torch.zeros(2), fill=3)
    assert ensemble.sample()["v"].eq(3).all()
    members[0].add_field("w", torch.zeros(2))
    members[1].add_field("w", torch.zeros(3))
    with pytest.raises(RuntimeError, match="expected members with the same rows"):
        ensemble.sample()
