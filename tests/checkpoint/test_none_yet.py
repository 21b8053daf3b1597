"""A series whose saves were all killed or given up has no checkpoint yet, which is no damage."""

import errno
import json
import os

import pytest
import torch
from click.testing import CliRunner

from engram import Checkpointer, CorruptCheckpoint, LazyTensorStorage, ReplayBuffer
from engram.cli import main
from engram.saved import attempts
from engram.saved.attempts import names, votes
from engram.saved.series import Series
from tests.ranks.jobs import done, job
from tests.saved import checkpoint_folders as made
from tests.saved.system_calls import counted, failing_at, killed_at


def buffer(n=5):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    if n:
        rb.extend(torch.arange(n))
    return rb


@pytest.fixture
def killed(tmp_path):
    """A series of a job that was killed in its only save, before it had voted."""

    def save(root):
        Checkpointer(root, buffer()).save(7)

    calls = counted(lambda: save(tmp_path / "count")).calls
    for number in range(calls // 2, 0, -1):
        root = tmp_path / str(number)
        assert killed_at(number, lambda root=root: save(root))
        attempts = [root / str(name) for name in names(root)] if root.exists() else []
        if attempts and not votes(attempts[0])[0].shard:
            return root
    raise AssertionError("no such moment")


WAYS = [{}, {"step": 7}, {"at_most": 9}, {"at_most": 9, "name": "ckpt-000000000009-e0001-00000001"}]


@pytest.mark.parametrize("how", WAYS)
def test_a_killed_save_leaves_none(how, killed):
    assert len(attempts.names(killed)) == 1
    rb = buffer(3)
    with pytest.raises(FileNotFoundError, match=r"no save has come to its end\. Call save\(step\) first"):
        Checkpointer(killed, rb).restore(**how)
    assert rb[:].tolist() == [0, 1, 2]
    Checkpointer(killed, rb).save(8)
    to = buffer(0)
    Checkpointer(killed, to).restore()
    assert to[:].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:restore. ")
def test_at_every_moment(tmp_path):
    def save(root):
        Checkpointer(root, buffer()).save(7)

    calls, found = counted(lambda: save(tmp_path / "count")).calls, set()
    for number in [*range(1, calls, 25), *range(calls - 3, calls + 1)]:
        root, rb = tmp_path / str(number), buffer(0)
        killed_at(number, lambda root=root: save(root))
        try:
            Checkpointer(root, rb).restore()
        except FileNotFoundError:
            assert len(rb) == 0
            found.add("none")
        else:
            assert rb[:].tolist() == [0, 1, 2, 3, 4]
            found.add("whole")
    assert found == {"none", "whole"}


def test_a_save_that_was_given_up_leaves_none(tmp_path):
    checkpoints = Checkpointer(tmp_path / "series", buffer())
    calls = counted(lambda: Checkpointer(tmp_path / "count", buffer()).save(1)).calls
    for number in range(calls // 2, calls):
        if failing_at(number, errno.ENOSPC, lambda: checkpoints.save(7)) is not None:
            break
    made = [attempts.decision(tmp_path / "series" / str(name)) for name in attempts.names(tmp_path / "series")]
    assert [one.status for one in made if one is not None] in ([], ["aborted"])
    with pytest.raises(FileNotFoundError):
        checkpoints.restore()


def test_all_ranks_hear_of_it(killed):
    def restore(group, rank):
        with pytest.raises(FileNotFoundError, match="no save has come to its end"):
            Checkpointer(killed, buffer(0), ranks=group).restore()

    done(job(2, restore))


@pytest.mark.parametrize(("attempt", "error"), [(None, FileNotFoundError), ("crash1", CorruptCheckpoint)])
@pytest.mark.parametrize("ranks_there", [(), (0, 2)])
def test_what_a_crashed_job_left_is_more_than_none(tmp_path, attempt, error, ranks_there):
    """A program that starts from nothing where there is no checkpoint would lose it; of a killed save it starts so."""
    epoch = attempts.claim_epoch(tmp_path)
    folder = attempts.begin(tmp_path, step=20, epoch=epoch, world=3, trigger="crash", attempt=attempt)
    for rank in ranks_there:
        made.vote(folder, rank, 3)
    with pytest.raises(error if ranks_there else FileNotFoundError, match="undecided") as raised:
        Checkpointer(tmp_path, buffer(0)).restore()
    assert ("allow_partial=True loads what some of the ranks saved." in str(raised.value)) == bool(ranks_there)
    whole = made.save(tmp_path, 10, epoch)
    assert Series(tmp_path).latest()[0] == whole


def test_commands_say_so(killed):
    def run(*words):
        return CliRunner().invoke(main, [*map(str, words)])

    verified, resharded = run("verify", killed), run("reshard", killed, killed / "to", "--ranks", "2", "--lanes", "1")
    assert verified.exit_code == 0
    assert "undecided" in verified.output
    assert resharded.exit_code == 2
    assert "found none" in resharded.output


def test_damage_stays_damage(tmp_path, killed):
    root = tmp_path / "damaged"
    checkpoints = Checkpointer(root, buffer())
    name = checkpoints.save(7).name
    (root / name / "manifest.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(CorruptCheckpoint):
        Checkpointer(root, buffer(0)).restore()
    os.rename(
        killed / str(attempts.names(killed)[0]), root / str(attempts.names(killed)[0])
    )  # beside a killed save, too
    with pytest.raises(CorruptCheckpoint):
        Checkpointer(root, buffer(0)).restore()
