"""Batches for transforms."""

import torch


def rows(n=6):
    torch.manual_seed(5)
    return {
        "obs": torch.randn(n, 3) * 4 + 100,
        "wide": torch.randn(n, 2, dtype=torch.float64),
        "pixels": torch.randint(0, 255, (n, 2, 2), dtype=torch.uint8),
        "done": torch.zeros(n, 1, dtype=torch.bool),
        "reward": torch.randn(n, 1),
        "next": {"obs": torch.randn(n, 3), "reward": torch.randn(n, 1)},
    }


def same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    else:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
