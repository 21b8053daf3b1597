"""Updates of rows over a connection are applied once, whatever becomes of messages and servers."""

import contextlib

import pytest
import torch

from engram import ReplayBuffer
from tests.remote.test_calls import FAULTS, KILLS, ROWS, interrupted, made

VERSIONS = [{}, {"version_key": "uid", "version": torch.tensor([2, 8]), "require_newer": True}]
LOST = tuple(fault for fault in (*FAULTS, *KILLS) if fault not in ("none", "repeat"))


@contextlib.contextmanager
def updated(tmp_path, versions):
    """A store, a proxy before its server, and a function that updates rows 2 and 5 through it."""
    with made(tmp_path / "store") as rb:
        index = torch.tensor([2, 5])
        named = {"index": index, "generation": rb.writer.generations_of(index), **versions}
        patch = {"reward": torch.tensor([1.0, 2.0]), "log_prob": [torch.full((3,), 1.0), torch.full((6,), 2.0)]}

        def update(remote):
            rb["uid"] = torch.arange(ROWS) - 1  # which the versions are above
            done = remote.update_if_present(**named, patch=patch)
            assert (done.version_rejected is None) == (not versions)
            assert done.version_rejected_count == 0
            assert done.generation.tolist() == named["generation"].where(done.updated, -1).tolist()
            return done.updated.tolist()

        with interrupted(tmp_path / "store", rb) as proxy, ReplayBuffer.connect(proxy.address) as remote:
            yield rb, proxy, lambda: update(remote)


@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize("fault", [*FAULTS, *KILLS])
def test_fields_are_updated_once(fault, versions, tmp_path):
    with updated(tmp_path, versions) as (rb, proxy, update):
        for faults in (
            [fault],
            ["none", fault],
        ):  # of the message that looks at the rows, and of the one that changes them
            proxy.faults = faults
            assert update() == [True, True]
            assert rb["reward"][[2, 5]].tolist() == [1.0, 2.0]
            assert [rb[row]["log_prob"].tolist() for row in (2, 5)] == [[1.0] * 3, [2.0] * 6]
            rb["reward"] = torch.full((ROWS,), 7.0)
            proxy.let_calls_go()  # what comes late changes nothing
            assert rb["reward"].tolist() == [7.0] * ROWS
            assert proxy.faults == []


@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize("fault", LOST)
def test_what_others_wrote_before_a_message_was_sent_again_stays(fault, versions, tmp_path):
    with updated(tmp_path, versions) as (rb, proxy, update):
        proxy.between = lambda: rb.__setitem__("reward", torch.full((ROWS,), 9.0))
        proxy.faults = ["none", fault]
        assert update() == [False, False]  # whether they were for a moment is not known
        assert rb["reward"].tolist() == [9.0] * ROWS
        assert proxy.faults == []


@pytest.mark.parametrize("versions", VERSIONS)
def test_an_edit_of_others_is_no_obstacle_where_no_message_is_lost(versions, tmp_path):
    with updated(tmp_path, versions) as (rb, proxy, update):
        proxy.between = lambda: rb.__setitem__("reward", torch.full((ROWS,), 9.0))
        proxy.faults = ["none", "edited"]
        assert update() == [True, True]
        assert rb["reward"].tolist() == [{2: 1.0, 5: 2.0}.get(row, 9.0) for row in range(ROWS)]
        assert rb.stats()["field_updates"] == 2 * 2  # of two parts: numbers, and items
