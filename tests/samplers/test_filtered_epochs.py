"""Filters around samplers without replacement: batches are full, and an epoch has each row that may be drawn once."""

import pytest
import torch

from engram import FilteredSampler, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement


def made(rows, ready, **options):
    sampler = FilteredSampler(SamplerWithoutReplacement(**options), ready=("reward",))
    rb = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=8)
    reward = torch.full((rows,), torch.nan)
    reward[torch.randperm(rows, generator=torch.Generator().manual_seed(1))[:ready]] = 1.0
    rb.extend({"reward": reward, "id": torch.arange(rows)})
    return rb, set(reward.isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("rows", "ready"), [(40, 30), (1000, 20), (200, 8)])
def test_an_epoch_has_each_ready_row_once(shuffle, rows, ready):
    rb, known = made(rows, ready, shuffle=shuffle)
    for _ in range(3):
        seen, sizes = [], []
        while len(seen) < ready:
            batch = rb.sample()
            seen += batch["id"].tolist()
            sizes.append(len(batch["id"]))
        assert set(seen) == known
        assert len(seen) == ready
        assert sizes[:-1] == [8] * (len(sizes) - 1)


@pytest.mark.parametrize("ready", [8, 16, 30, 40])
def test_iteration_ends_with_the_epoch(ready):
    rb, known = made(40, ready)
    for _ in range(4):
        sizes, seen = zip(*[(len(batch["id"]), batch["id"].tolist()) for batch in rb], strict=True)
        assert sizes == (8,) * (ready // 8) + ((ready % 8,) if ready % 8 else ())
        assert sorted(sum(seen, [])) == sorted(known)


def test_few_rows_are_found_in_each_epoch():
    rb, known = made(40, 2)
    for _ in range(20):
        assert set(rb.sample()["id"].tolist()) <= known


def test_batches_that_are_dropped_are_never_handed_out_short():
    rb, known = made(40, 30, drop_last=True)
    for _ in range(20):
        ids = rb.sample()["id"].tolist()
        assert len(ids) == len(set(ids)) == 8
        assert set(ids) <= known
