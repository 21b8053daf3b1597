"""Stores whose rows are moved to the others of their fleet, while clients go on: ``engram drain``."""

import contextlib
import importlib
import itertools
import threading
import warnings

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from engram import LazyMemmapStorage, PrioritizedSampler, RandomSampler, ReplayBuffer
from engram.cli import main
from tests.fleet.test_fleets import made, rows_of, seeded
from tests.fleet.test_listed import write
from tests.serving.servers import serving, start
from tests.statistics_of import assert_proportional
from tests.waiting import until


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)
    monkeypatch.setattr("engram.remote.member_list.MemberList.interval_s", 0.02)
    command = importlib.import_module("engram.cli.drain")
    monkeypatch.setattr(command, "FORWARD_S", 0.0)
    monkeypatch.setattr(command, "_INTERVAL_S", 0.01)


def drain(address, to, *options):
    """The command, in this process."""
    return CliRunner().invoke(main, ["drain", str(address), "--to", str(to), *options])


def stored(folder):
    """What the live rows of a store say they are, and their priorities, by what they are."""
    with ReplayBuffer.open(folder, unclean="accept") as rb:
        rows, ids = torch.arange(len(rb["a"])), rb["a"].tolist()
        assert torch.equal(rb["b"], torch.ones(len(ids), 2)), "a row is torn"
        live = rb.storage.extent().in_order(torch.arange(rb.lanes))
        ids = rb[live]["a"].tolist() if len(live) else []
        del rows
        if not isinstance(rb.sampler, PrioritizedSampler):
            return dict.fromkeys(ids, 1.0) if len(set(ids)) == len(ids) else pytest.fail("a row is there twice")
        found = dict(zip(ids, rb.sampler.priorities().leaves_of(live).tolist(), strict=True))
        assert len(found) == len(ids), "a row is there twice"
        return found


def by_priority():
    return PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)


def test_rows_and_priorities_are_in_the_other_stores(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = []
        for k in range(3):
            with made(tmp_path / str(k), rows_of(30, 100 * k), by_priority()) as rb:
                rb.update_priority(torch.arange(30), torch.arange(1.0, 31.0) * (k + 1))
            servers.append(stack.enter_context(serving(tmp_path / str(k))))
        path = tmp_path / "members"
        write(path, [it.address for it in servers])
        result = drain(servers[1].address, f"file:{path}")
        assert result.exit_code == 0, result.output
        assert servers[1].program.wait() == 0
        assert servers[1].address not in path.read_text()
        assert servers[2].address in path.read_text()
        assert path.read_text().startswith("# the stores of this run\n")
    assert stored(tmp_path / "1") == {}
    found = [stored(tmp_path / name) for name in "02"]
    assert not found[0].keys() & found[1].keys()
    expected = {100 * k + i: (i + 1.0) * (k + 1) for k in range(3) for i in range(30)}
    assert found[0] | found[1] == pytest.approx(expected)
