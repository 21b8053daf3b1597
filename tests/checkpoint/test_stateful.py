"""A replay in checkpoints of another library: its name goes in, and that checkpoint is there and is restored."""

import json
import shutil
import warnings

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint as dcp

from engram import Checkpointer, CorruptCheckpoint, LazyTensorStorage, ReplayBuffer
from engram.saved import series
from engram.saved.inspection import verify
from engram.saved.series import Series
from tests.ranks.jobs import buffer, checkpointer, done, job, play
from tests.ranks.processes import run


def made():
    return ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4)


class Training:
    """A step, and what is checkpointed at it."""

    def __init__(self, root, *, keep=1, named=3, **restore):
        self.step = 0
        self.rb = made()
        self.model = torch.nn.Linear(2, 1)
        self.checkpoints = Checkpointer(root, self.rb, keep=keep)
        self.replay = self.checkpoints.stateful(lambda: self.step, keep=named, **restore)

    def go(self, steps=1):
        for _ in range(steps):
            self.step += 1
            self.rb.extend(torch.arange(self.step * 10, self.step * 10 + 2))
        return self

    @property
    def rows(self):
        return self.rb[:].tolist()

    @property
    def names(self):
        return [entry.name for entry in self.checkpoints.list()]


def test_the_name_goes_in_and_the_rows_come_back(tmp_path):
    first = Training(tmp_path).go(3)
    state = first.replay.state_dict()
    assert state == {"checkpoint": first.checkpoints.latest}
    rows = first.rows
    first.go(2)

    again = Training(tmp_path, resume="exact")
    again.replay.load_state_dict(state)
    assert again.rows == rows
    assert (again.replay.report.step, again.replay.report.name) == (3, state["checkpoint"])


def test_a_step_has_one_checkpoint(tmp_path):
    it = Training(tmp_path, keep=9).go()
    name = it.replay.state_dict()
    it.rb.extend(torch.arange(2))
    assert it.replay.state_dict() == name
    assert len(it.names) == 1
    it.go()
    assert it.replay.state_dict() != name
    assert len(it.names) == 2


def test_a_save_that_was_begun_is_waited_for(tmp_path):
    it = Training(tmp_path).go(2)
    rows, handle = it.rows, it.replay.begin()
    it.rb.extend(torch.arange(5))
    state = it.replay.state_dict()
    assert handle.done
    assert state == {"checkpoint": handle.wait().name}
    again = Training(tmp_path, resume="exact")
    again.replay.load_state_dict(state)
    assert again.rows == rows, "of the moment of begin()"


def test_a_save_that_failed_is_tried_again(tmp_path, monkeypatch):
    it = Training(tmp_path).go()
    with monkeypatch.context() as patch:
        patch.setattr("engram.checkpoint.save.Job.write_shard", broken)
        with pytest.raises(OSError, match="no space"):
            it.replay.state_dict()
    assert it.replay.state_dict() == {"checkpoint": it.checkpoints.latest}


def broken(*_):
    raise OSError("no space")


def test_an_empty_buffer_saves_nothing_and_loading_that_empties(tmp_path):
    state = Training(tmp_path).replay.state_dict()
    assert state == {"checkpoint": ""}
    other = Training(tmp_path).go()
    assert other.names == []
    other.replay.load_state_dict(state)
    assert len(other.rb) == 0
    assert other.replay.report is None


def test_named_ones_stay_whatever_keep_says(tmp_path):
    it, named = Training(tmp_path, keep=1, named=2), []
    for _ in range(4):
        named.append(it.go().replay.state_dict()["checkpoint"])
        it.go()
        it.checkpoints.save(it.step)
    assert it.names == [it.names[0], named[3], named[2]], "the newest, and the two that were named last"
    assert it.checkpoints.prune(1) == []
    for name, rows in ((named[2], 10), (named[3], 14)):
        again = Training(tmp_path, resume="exact")
        again.replay.load_state_dict({"checkpoint": name})
        assert len(again.rb) == rows
    with pytest.raises(FileNotFoundError, match="is gone"):
        Training(tmp_path).replay.load_state_dict({"checkpoint": named[1]})


def test_pins_of_another_process_stay(tmp_path):
    first = Training(tmp_path, keep=1, named=2).go().replay.state_dict()["checkpoint"]
    again = Training(tmp_path, keep=1, named=2)
    again.replay.load_state_dict({"checkpoint": first})
    again.step = 1
    second = again.go().replay.state_dict()["checkpoint"]
    assert again.names == [second, first]


def test_a_step_that_is_named_again_counts_as_the_newest(tmp_path):
    for step in (1, 2, 3, 1):
        Series(tmp_path).pin(step, 3)
    assert Series(tmp_path).pinned() == (2, 3, 1)
    Series(tmp_path).pin(9, 1)
    assert Series(tmp_path).pinned() == (9,)


@pytest.mark.parametrize("raw", [b"", b"{", b'{"format":"engram.pins"}', b"\xff" * 100, b" " * 70_000])
def test_a_damaged_file_of_pins_protects_nothing_is_noted_and_stays(tmp_path, raw):
    it = Training(tmp_path).go()
    it.replay.state_dict()
    (tmp_path / series.PINS).chmod(0o600)
    (tmp_path / series.PINS).write_bytes(raw)
    assert Series(tmp_path).pinned() == ()
    assert [note.path for note in verify(tmp_path).notes] == [tmp_path / series.PINS]
    with pytest.warns(UserWarning, match="stays no longer than others.*remove it"):
        it.go().replay.state_dict()
    assert (tmp_path / series.PINS).read_bytes() == raw  # what it named may be in use
    (tmp_path / series.PINS).unlink()
    it.go().replay.state_dict()
    assert Series(tmp_path).pinned() == (3,)
    assert verify(tmp_path).notes == []


def test_a_checkpoint_that_was_removed_is_named_with_what_to_do(tmp_path):
    it = Training(tmp_path).go()
    state = it.replay.state_dict()
    shutil.rmtree(tmp_path / state["checkpoint"])
    rows = len(it.rb)
    with pytest.raises(
        FileNotFoundError, match=f"checkpoint {state['checkpoint']} of this state is gone.*stateful.keep=.*empty buffer"
    ):
        it.replay.load_state_dict(state)
    assert len(it.rb) == rows


@pytest.mark.parametrize("state", [{}, {"checkpoint": 3}, {"checkpoint": "x", "more": 1}, {"step": 3}])
def test_another_state_is_refused(tmp_path, state):
    it = Training(tmp_path).go()
    rows = it.rows
    with pytest.raises(ValueError, match="expected {'checkpoint': name}, as stateful"):
        it.replay.load_state_dict(state)
    assert it.rows == rows


def test_bad_arguments(tmp_path):
    checkpoints = Checkpointer(tmp_path, made())
    with pytest.raises(TypeError, match="step: expected a function that returns the step, got int"):
        checkpoints.stateful(3)
    for keep in (0, 1001):
        with pytest.raises(ValueError, match="stateful: keep: expected at"):
            checkpoints.stateful(lambda: 1, keep=keep)
    it = Training(tmp_path).go()
    it.step = -1
    with pytest.raises(ValueError, match="step: expected an int of at least 0, got -1"):
        it.replay.state_dict()
    assert not (tmp_path / series.PINS).exists()


def test_a_damaged_checkpoint_is_not_loaded(tmp_path):
    first = Training(tmp_path).go()
    state = first.replay.state_dict()
    segment = next((tmp_path / state["checkpoint"]).rglob("seg/*.bin"))
    segment.chmod(0o600)
    segment.write_bytes(b"\xff" + segment.read_bytes()[1:])
    again = Training(tmp_path)
    with pytest.raises(CorruptCheckpoint):
        again.replay.load_state_dict(state)
    assert len(again.rb) == 0


# ---- several ranks -------------------------------------------------------------------------------------------------------


def test_ranks_save_one_checkpoint_also_where_one_of_them_is_empty(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        if rank == 1:
            play(rb, rank, 0, [5, 4])
        return checkpointer(tmp_path, rb, ranks).stateful(lambda: 3).state_dict()

    states = done(job(3, act))
    assert states[0] == states[1] == states[2]
    assert states[0]["checkpoint"]

    def load(ranks, rank):
        rb = buffer()
        replay = checkpointer(tmp_path, rb, ranks).stateful(lambda: 0, incomplete={"open": "keep"})
        replay.load_state_dict(states[0])
        return len(rb)

    assert sum(done(job(2, load))) == 9


def dcp_job(ranks, rank, folder, act):
    """Two processes with gloo: what is said of a save by DCP, or of a load in new processes."""
    torch.manual_seed(7)
    rb = buffer()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    step = {"save": 4, "async": 5, "load": 0}[act]
    replay = checkpointer(folder.parent / "replay", rb, ranks).stateful(lambda: step, resume="exact")
    state = {"model": model, "replay": replay}
    path = folder.parent / "dcp"
    if act == "load":
        torch.nn.init.zeros_(model.module.weight)
        dcp.load(state, checkpoint_id=path)
    else:
        play(rb, rank, 0, [3, 4, 2 + rank])
        if act == "save":
            dcp.save(state, checkpoint_id=path)
        else:
            replay.begin()
            dcp.async_save(state, checkpoint_id=path).result(timeout=60)
    distributed.barrier()
    return [sorted(rb[:]["who"].tolist()), model.module.weight.tolist(), dcp_names(path)]


def dcp_names(path):
    """The entries of the replay in a checkpoint of DCP."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return sorted(name for name in entries if "replay" in name)


@pytest.mark.parametrize("how", ["save", "async"])
def test_dcp_of_two_processes(tmp_path, how):
    saved, codes = run(2, dcp_job, tmp_path / "first", how)
    assert codes == [0, 0], saved
    loaded, codes = run(2, dcp_job, tmp_path / "second", "load")
    assert codes == [0, 0], loaded
    assert loaded == saved
    assert saved[0][0] != saved[1][0]
    assert saved[0][2] == ["replay.checkpoint"], "only the name goes in"


def test_dcp_alone(tmp_path):
    first = Training(tmp_path / "replay").go(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"model": first.model, "replay": first.replay}, checkpoint_id=tmp_path / "dcp")
        rows = first.rows
        again = Training(tmp_path / "replay", resume="exact")
        dcp.load({"model": again.model, "replay": again.replay}, checkpoint_id=tmp_path / "dcp")
        assert again.rows == rows
        assert torch.equal(again.model.weight, first.model.weight)
        # Back to it, in a buffer that goes on.
        again.step = 3
        again.go(2)
        dcp.load({"replay": again.replay}, checkpoint_id=tmp_path / "dcp")
    assert again.rows == rows
    assert json.loads(json.dumps(first.replay.state_dict())) == first.replay.state_dict(), "plain values"
