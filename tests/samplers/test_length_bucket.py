"""Batches of rows that are about equally long: as often as the sampler inside draws them, and alike."""

import pickle
from collections import Counter

import pytest
import torch

from engram import (
    ConsumingSampler,
    Draw,
    FilteredSampler,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    LengthBucketSampler,
    ListStorage,
    NoSampleable,
    PrioritizedSampler,
    PromptGroupSampler,
    Ragged,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from tests.statistics_of import assert_proportional, assert_uniform

FIELDS = {
    "tokens": Ragged(torch.int32, max_length=200),
    "prompt": Ragged(torch.int32, max_length=200),
    "text": Ragged("utf-8", max_length=300),
}
#: Of each row, in no order.
LENGTHS = [(7 * i * i + 3 * i) % 101 for i in range(40)]
PROMPTS = [100 - length for length in LENGTHS]


def rows(numbers=range(40)):
    return {
        "id": torch.tensor([*numbers]),
        "tokens": [torch.full((LENGTHS[i],), i, dtype=torch.int32) for i in numbers],
        "prompt": [torch.full((PROMPTS[i],), i, dtype=torch.int32) for i in numbers],
        "text": ["x" * (299 if LENGTHS[i] < 50 else 0) for i in numbers],
        "reward": torch.tensor([float(i) if i % 3 else torch.nan for i in numbers]),
    }


def made(sampler, batch_size=4, storage=None):
    storage = LazyTensorStorage(64, ragged=FIELDS, layout="list", ragged_bytes=1e6) if storage is None else storage
    rb = ReplayBuffer(
        storage=storage, sampler=sampler, batch_size=batch_size, generator=torch.Generator().manual_seed(5)
    )
    rb.extend(rows())
    return rb


def firsts(rb, batches=6_000):
    """How often each row came first in a batch: batches are independent of each other, the rows of one are not."""
    return Counter(int(rb.sample()["id"][0]) for _ in range(batches))


# ---- distributions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [2, 8])
def test_every_row_comes_as_often_as_others(pool):
    rb = made(LengthBucketSampler(field="tokens", pool=pool))
    counts = firsts(rb)
    assert_uniform([counts[i] for i in range(40)])


def test_rows_come_by_priority():
    rb = made(LengthBucketSampler(PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), field="tokens"))
    priorities = torch.tensor([1.0 + i % 7 for i in range(40)])
    rb.update_priority(torch.arange(40), priorities)
    counts = firsts(rb)
    assert_proportional([counts[i] for i in range(40)], priorities.tolist())
    batch, info = rb.sample(return_info=True)
    assert torch.allclose(info["priority_weight"], 1.0 / priorities[batch["id"]])
    rb.update_priority(info["index"], torch.zeros(4), generation=info["index_generation"])
    left = {int(i) for _ in range(300) for i in rb.sample()["id"]}
    assert not left & set(batch["id"].tolist())


def test_rows_that_are_not_ready_are_passed_over():
    rb = made(LengthBucketSampler(FilteredSampler(RandomSampler(), ready=("reward",)), field="tokens"))
    counts = firsts(rb, 2_000)
    ready = [i for i in range(40) if i % 3]
    assert set(counts) == set(ready)
    assert_uniform([counts[i] for i in ready])


# ---- what a batch is -----------------------------------------------------------------------------------------------------


class Known:
    """A sampler that draws rows which the test knows."""

    def __init__(self):
        self.pool = []

    def draw(self, extent, batch_size, key):
        generator = torch.Generator().manual_seed(key & (1 << 62) - 1)
        self.pool = torch.randint(extent.size, (batch_size,), generator=generator).tolist()
        return Draw(torch.tensor(self.pool))

    def observe(self, write, data): ...

    def update_priority(self, index, priority, *, generation=None): ...

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


BY_FIELD = {
    "tokens": LENGTHS,
    "prompt": PROMPTS,
    "text": [299 if length < 50 else 0 for length in LENGTHS],
    None: [max(pair) for pair in zip(LENGTHS, PROMPTS, strict=True)],  # texts do not count
}


@pytest.mark.parametrize("field", BY_FIELD)
def test_a_batch_is_one_bucket_of_the_pool(field):
    """Against a model: the pool in the order of its lengths, cut into buckets, each of which comes as often as the others."""
    known, lengths, came = Known(), BY_FIELD[field], Counter()
    rb = made(LengthBucketSampler(known, field=field, pool=5))
    for _ in range(1_000):
        batch = rb.sample()["id"].tolist()
        assert len(known.pool) == 20
        order = sorted(range(20), key=lambda place: lengths[known.pool[place]])
        buckets = [[known.pool[place] for place in sorted(order[at : at + 4])] for at in range(0, 20, 4)]
        found = [number for number, bucket in enumerate(buckets) if bucket == batch]
        assert found
        came[found[0]] += 1
    assert_uniform([came[number] for number in range(5)])


def test_padding_is_rare():
    """Of padded rows as many tokens as a batch has, of the lengths that a model of the sampler inside has."""
    storage = LazyTensorStorage(64, ragged={"tokens": FIELDS["tokens"]}, layout="padded")
    padded = []
    for sampler in (RandomSampler(), LengthBucketSampler(RandomSampler(), pool=16)):
        rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4, generator=torch.Generator().manual_seed(1))
        if not len(rb):
            rb.extend({"tokens": rows()["tokens"]})
        masks = [rb.sample()["tokens"].mask for _ in range(200)]
        padded.append(sum(int((~mask).sum()) for mask in masks) / sum(mask.numel() for mask in masks))
    assert padded[0] > 0.3
    assert padded[1] < 0.1


# ---- rows that are used up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["consuming", "filtered"])
@pytest.mark.parametrize("uses", [1, 3])
def test_rows_of_other_buckets_are_given_back(inner, uses):
    sampler = ConsumingSampler(uses) if inner == "consuming" else FilteredSampler(RandomSampler(), max_uses=uses)
    rb = made(LengthBucketSampler(sampler, field="tokens", pool=4))
    counts = Counter()
    while rb.can_sample():
        left = len(rb)
        batch = rb.sample()["id"].tolist()
        assert len(batch) == min(4, left if inner == "consuming" else uses * 40 - counts.total())
        counts.update(batch)
    assert counts == dict.fromkeys(range(40), uses)
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.extend(rows([3]))
    assert rb.sample()["id"].tolist() == [3] * (uses if inner == "filtered" else 1)


def test_nothing_is_used_up_where_a_draw_fails(monkeypatch):
    rb = made(LengthBucketSampler(ConsumingSampler(), field="tokens"))
    rb.sample()
    monkeypatch.setattr(type(rb.storage.store), "lengths_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rb.sample()
    monkeypatch.undo()
    assert len(rb) == 36


# ---- as every sampler --------------------------------------------------------------------------------------------------------


def test_a_folder_notes_it(tmp_path):
    sampler = LengthBucketSampler(FilteredSampler(RandomSampler(), ready=("reward",)), field="tokens", pool=3)
    with made(
        sampler, storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "s", ragged=FIELDS, ragged_bytes=1e6)
    ) as rb:
        del rb
    with ReplayBuffer.open(tmp_path / "s") as rb:
        assert repr(rb.sampler) == repr(sampler)
        assert (rb.sampler.field, rb.sampler.pool, rb.sampler.ready) == (("tokens",), 3, sampler.ready)
        assert set(rb.sample()["id"].tolist()) <= {i for i in range(40) if i % 3}


def test_a_copy_and_a_state_draw_the_same():
    rb = made(LengthBucketSampler(PrioritizedSampler(alpha=1.0, beta=0.5), field="tokens"))
    rb.update_priority(torch.arange(40), torch.arange(40).float())
    other = pickle.loads(pickle.dumps(rb))
    loaded = made(LengthBucketSampler(PrioritizedSampler(alpha=1.0, beta=0.5), field="tokens"))
    loaded.load_state_dict(rb.state_dict())
    for _ in range(5):
        expected = rb.sample()["id"].tolist()
        assert other.sample()["id"].tolist() == expected
        assert loaded.sample()["id"].tolist() == expected


def test_attributes_are_those_of_the_sampler_inside():
    rb = made(LengthBucketSampler(PrioritizedSampler(alpha=0.7, beta=0.5), field="tokens"))
    rb.sampler.beta = 1.0
    assert (rb.sampler.alpha, rb.sampler.sampler.beta) == (0.7, 1.0)


# ---- what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        SamplerWithoutReplacement(),
        SliceSampler(slice_len=2),
        PromptGroupSampler(samples_per_group=2),
        FrameStack(RandomSampler(), 2, None, ["x"]),
        LengthBucketSampler(),
        FilteredSampler(SamplerWithoutReplacement(), ready=("reward",)),
        FilteredSampler(SliceSampler(slice_len=2), ready=("reward",)),
        "uniform",
    ],
    ids=lambda it: type(it).__name__,
)
def test_samplers_of_more_than_single_rows_are_refused(sampler):
    with pytest.raises(
        TypeError, match="LengthBucketSampler: sampler: expected a sampler of single rows without epochs"
    ):
        LengthBucketSampler(sampler)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="pool: expected at least 2, got 1"):
        LengthBucketSampler(pool=1)
    with pytest.raises(TypeError, match="field: expected a string"):
        LengthBucketSampler(field=1.5)
    for inner in (PrioritizedSampler(alpha=1.0, beta=1.0, normalize="batch"),):
        with pytest.raises(ValueError, match='normalize="batch"'):
            LengthBucketSampler(inner)
    rb = made(LengthBucketSampler(field="nothing"))
    with pytest.raises(
        KeyError, match=r"LengthBucketSampler: field: expected one of the ragged fields .*'tokens'.*got 'nothing'"
    ):
        rb.sample()
    rb.set_sampler(LengthBucketSampler())
    with pytest.raises(ValueError, match="max_tokens: expected a sampler that draws rows, got LengthBucketSampler"):
        rb.sample(max_tokens=100)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_rows_of_one_size_are_refused(storage):
    rb = ReplayBuffer(storage=storage(10), sampler=LengthBucketSampler(), batch_size=2)
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.extend(torch.arange(5))
    with pytest.raises(TypeError, match="expected a storage with ragged fields, got one without"):
        rb.sample()
