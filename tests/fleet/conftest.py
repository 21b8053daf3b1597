"""Fixtures of several tests of fleets."""

import contextlib

import pytest
import torch

from engram import PrioritizedSampler
from tests.fleet.test_fleets import made, rows_of
from tests.serving.servers import serving


@pytest.fixture
def two(tmp_path):
    """Two stores, of 40 rows from 0 on with priority 1, and of 20 rows from 100 on with priority 2: their servers."""
    with contextlib.ExitStack() as stack:
        servers = []
        for k, n in enumerate((40, 20)):
            sampler = PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)
            with made(tmp_path / str(k), rows_of(n, 100 * k), sampler, 10_000) as rb:
                rb.update_priority(torch.arange(n), k + 1.0)
            servers.append(stack.enter_context(serving(tmp_path / str(k))))
        yield servers
