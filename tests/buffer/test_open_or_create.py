"""The first line of a script that may be killed and started again."""

import re

import pytest
import torch
from tensordict import TensorDict

from engram import (
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    Ragged,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests import fresh

BUFFERS = [ReplayBuffer, TensorDictReplayBuffer, PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer]


def first_line(folder, kind=ReplayBuffer, size=20, **given):
    exponents = {"alpha": 1.0, "beta": 1.0} if "Prioritized" in kind.__name__ else {}
    return kind.open_or_create(folder, size, batch_size=4, **exponents, **given)


def rows(first, n):
    return TensorDict({"step": torch.arange(first, first + n)}, [n])


@pytest.mark.parametrize("kind", BUFFERS)
def test_every_start_goes_on_where_the_last_one_stopped(kind, tmp_path):
    folder = tmp_path / "a" / "replay"
    for start in range(4):
        rb = first_line(folder, kind)
        assert type(rb) is kind
        assert (len(rb), rb.batch_size, rb.storage.max_size) == (min(7 * start, 20), 4, 20)
        rb.extend(rows(7 * start, 7))
        if "Prioritized" in kind.__name__:
            if start:
                drawn = torch.cat([rb.sample()["step"] for _ in range(16)])
                assert set(drawn.tolist()) <= {7 * start - 1, *range(7 * start, 7 * start + 7)}  # the others have none
            rb.update_priority(torch.arange(20), 0.0)
            rb.update_priority((7 * start + 6) % 20, 5.0)
        rb.close()
    assert sorted(ReplayBuffer.open(folder)[:]["step"].tolist()) == list(range(8, 28))


@pytest.mark.parametrize("made", ["nothing", "folder"])
def test_nothing_lies_there_before_the_first_write(made, tmp_path):
    folder = tmp_path / "replay"
    if made == "folder":
        folder.mkdir()
    first_line(folder).close()
    assert folder.exists() == (made == "folder")
    assert not folder.exists() or not list(folder.iterdir())


def test_the_arguments_count_and_not_what_was_noted(tmp_path):
    rb = first_line(tmp_path / "replay", TensorDictReplayBuffer, sampler=SliceSampler(num_slices=2, traj_key="step"))
    rb.extend(rows(0, 8))
    rb.close()
    rb = ReplayBuffer.open_or_create(tmp_path / "replay", 20, batch_size=3)
    assert (type(rb), type(rb.sampler).__name__, rb.batch_size) == (ReplayBuffer, "RandomSampler", 3)


@pytest.mark.parametrize(("lanes", "ndim"), [(1, 1), (3, 1), (1, 2)])
def test_lanes_and_dimensions(lanes, ndim, tmp_path):
    for start in range(2):
        rb = ReplayBuffer.open_or_create(tmp_path / "replay", 20, lanes=lanes, ndim=ndim)  # neither divides 20
        assert (rb.lanes, rb.storage.ndim) == (lanes, ndim)
        rb.extend(torch.zeros(3, 3) if ndim == 2 else torch.zeros(3))
        assert rb.write_count == 3 * (start + 1)
        rb.close()


@pytest.mark.parametrize("other", [{"size": 21}, {"size": 19}, {"lanes": 2}, {"ndim": 2}])
def test_a_store_of_another_size(other, tmp_path):
    rb = first_line(tmp_path)
    rb.extend(rows(0, 5))
    rb.close()
    with pytest.raises(
        IncompatibleStore, match=r"open_or_create: .*another size: .*expected .*got .*ReplayBuffer\.open\("
    ):
        first_line(tmp_path, **other)
    assert len(first_line(tmp_path)) == 5


@pytest.mark.parametrize(
    "other", [{"size": 21}, {"lanes": 2}, {"ndim": 2}, {"ragged": {"text": Ragged(torch.int32, max_length=9)}}]
)
@pytest.mark.parametrize(
    "made_by", [first_line, lambda folder: ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=folder))]
)
def test_a_store_of_another_size_made_after_the_opening(other, made_by, tmp_path):
    """A learner that waits for rows is told, and does not wait for ever."""
    folder = tmp_path / "replay"
    waiting, fitting, writing = first_line(folder, **other), first_line(folder), made_by(folder)
    assert len(waiting) == 0
    writing.extend(rows(0, 5))
    for use in (lambda: len(waiting), waiting.sample, lambda: waiting.extend(rows(0, 2)), waiting.stats):
        with pytest.raises(
            IncompatibleStore, match=r"open_or_create: .*another size: (?!open).*expected .*got .*[^.]\. Use"
        ):
            use()
    waiting.close()
    assert set(fitting.sample()["step"].tolist()) <= set(range(5))
    assert len(fitting) == len(writing) == 5


def test_a_folder_with_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"open_or_create: expected a folder with a store, an empty one .*'notes\.txt'"
    ):
        first_line(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(NotADirectoryError, match="expected a folder, found a file"):
        first_line(tmp_path / "notes.txt")


def test_a_folder_with_a_dump(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(torch.zeros(2))
    rb.dumps(tmp_path / "dump")
    with pytest.raises(FileExistsError, match="no store"):
        first_line(tmp_path / "dump")


@pytest.mark.parametrize(
    "address", ["unix:/run/a.sock", "grpc+tls://replay-0:7777", "ray:critic", "file:/shared/members"]
)
def test_an_address_is_no_folder(address):
    with pytest.raises(ValueError, match=rf"expected a path, got the address '{re.escape(address)}'.*connect"):
        first_line(address)
    with pytest.raises(ValueError, match="connect takes addresses"):
        LazyMemmapStorage(10, scratch_dir=address)


def test_arguments_that_cannot_be(tmp_path):
    for given, kind, said in (
        ({"storage": LazyTensorStorage(20)}, TypeError, "storage: expected none, the rows lie in the directory"),
        ({"batchsize": 3}, TypeError, "unexpected argument 'batchsize'. Did you mean batch_size?"),
        ({"lanes": 0}, ValueError, "open_or_create: lanes: expected at least 1, got 0"),
        ({"unclean": "maybe"}, ValueError, "open_or_create: unclean: expected 'refuse' or 'accept'"),
    ):
        for folder in (tmp_path / "new", tmp_path / "there"):
            with pytest.raises(kind, match=re.escape(said)):
                ReplayBuffer.open_or_create(folder, 20, **given)
        if not (tmp_path / "there").exists():
            rb = first_line(tmp_path / "there")
            rb.extend(rows(0, 5))
            rb.close()
    with pytest.raises(TypeError, match="open_or_create: directory: expected a path, got NoneType"):
        first_line(None)


def test_the_error_of_a_folder_that_holds_a_store_names_it(tmp_path):
    rb = first_line(tmp_path)
    rb.extend(rows(0, 5))
    rb.close()
    with pytest.raises(RuntimeError, match=r"ReplayBuffer\.open_or_create\('.*', size\).*existsok=True erases it"):
        LazyMemmapStorage(20, scratch_dir=tmp_path)


def test_what_a_killed_process_had_begun_to_create_is_no_other_file(tmp_path):
    program = """
        import os
        from engram import ReplayBuffer
        from engram.format import files
        import torch
        text = files.Creation.text
        def killed(self, path, content):
            text(self, path, content)
            if path.name == "alive":
                os.kill(os.getpid(), 9)
        files.Creation.text = killed
        ReplayBuffer.open_or_create(folder, 20).extend({"step": torch.arange(3)})
    """
    assert fresh.start(program, folder=str(tmp_path / "replay")).wait(60) == -9
    assert list((tmp_path / "replay").iterdir())
    rb = first_line(tmp_path / "replay")
    rb.extend(rows(0, 5))
    assert len(rb) == 5


RACER = """
    import torch
    from engram import ReplayBuffer
    rb = ReplayBuffer.open_or_create(folder, 1_000, batch_size=4)
    print("made", flush=True)
    for step in range(50):
        rb.extend({"who": torch.full((2,), me)})
    print(rb.write_count >= 100, flush=True)
    rb.close()
"""


@pytest.mark.parametrize("attempt", range(3))
def test_two_processes_at_once(attempt, tmp_path):
    """One creates the store, the other writes to the same one, whichever is first."""
    programs = [fresh.start(RACER, folder=str(tmp_path / "replay"), me=me) for me in range(3)]
    for program in programs:
        assert program.wait(60) == 0, program.err
        assert program.out.split() == ["made", "True"]
    rb = first_line(tmp_path / "replay", size=1_000)
    assert torch.bincount(rb[:]["who"]).tolist() == [100, 100, 100]


def test_all_have_called_it_before_one_writes(tmp_path):
    first, second, other = first_line(tmp_path), first_line(tmp_path), first_line(tmp_path, size=21)
    program = """
        import torch
        from engram import ReplayBuffer
        ReplayBuffer.open_or_create(folder, 20).extend({"step": torch.arange(3)})
    """
    assert fresh.start(program, folder=str(tmp_path)).wait(60) == 0
    assert len(first) == 3  # it sees them without a write
    second.extend({"step": torch.arange(3, 5)})
    assert first[:]["step"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(IncompatibleStore, match="another size: capacity: expected 21, got 20"):
        other.extend(rows(0, 2))
    assert len(first) == 5


@pytest.mark.parametrize("rows", [{"a": torch.zeros(4)}, torch.zeros(4), (torch.zeros(4),)])
@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_a_store_of_other_rows_is_refused_at_opening(tmp_path, rows, kind):
    given = {"alpha": 1.0, "beta": 1.0} if kind is TensorDictPrioritizedReplayBuffer else {}
    rb = ReplayBuffer.open_or_create(tmp_path / "a", 10)
    rb.extend(rows)
    rb.close()
    with pytest.raises(
        IncompatibleStore, match=r"expected rows that are TensorDicts.*Use ReplayBuffer\.open_or_create"
    ):
        kind.open_or_create(tmp_path / "a", 10, **given)
    rb = ReplayBuffer.open_or_create(tmp_path / "a", 10)
    assert len(rb) == 4
