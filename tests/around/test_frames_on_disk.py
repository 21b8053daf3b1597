"""Frames stored once in directories: killed and begun again, opened by name, only read, moved."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from engram import (
    CorruptStore,
    FinalObservations,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    NextFromFollowing,
    RandomSampler,
    ReplayBuffer,
)
from tests import fresh

ROOT = Path(__file__).parents[2]
KEYS = ["frame"]
EPISODE = 5


def frame(i):
    return np.full(2, i, np.float32)


def play(rb, first, steps):
    """Episodes of five steps, six frames each: every frame has a number of its own."""
    for step in range(first, first + steps):
        i = 6 * (step // EPISODE) + step % EPISODE
        ends = step % EPISODE == EPISODE - 1
        after = {"frame": frame(i + 1), "reward": 1.0, "terminated": ends, "truncated": False}
        rb.add({"frame": frame(i), "next": after})


def checked(rb):
    """What a batch says of each row: as the frames were made."""
    batch = rb.sample(256)
    here, after = batch["frame"][:, :, 0], batch["next"]["frame"][:, :, 0]
    for stack, following, ended in zip(
        here.tolist(), after.tolist(), batch["next"]["terminated"].tolist(), strict=True
    ):
        now = int(stack[-1])
        begin = now - now % 6
        assert stack == [max(now - k, begin) for k in (2, 1, 0)]
        assert following == [max(now - k, begin) for k in (1, 0, -1)]
        assert ended == (now % 6 == 4)
    return {int(stack[-1]) for stack in here.tolist()}


def sampler(finals):
    return FrameStack(NextFromFollowing(RandomSampler(), finals), n=3, dim=None, in_keys=KEYS)


def begun(folder, size=64):
    finals = FinalObservations.open_or_create(KEYS, folder / "finals", 20)
    return ReplayBuffer.open_or_create(folder / "rb", size, sampler=sampler(finals), transform=finals)


def closed(rb, finals):
    rb.close()
    finals.storage.close()


def finals_of(rb):
    return rb.sampler.sampler.finals


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, root)
from tests.around.test_frames_on_disk import begun, checked, play

rb = begun(Path(folder))
if len(rb):
    checked(rb)
play(rb, first, 13)
checked(rb)
os.kill(os.getpid(), 9)
"""


def test_killed_and_begun_again(tmp_path):
    for start in range(2):
        program = fresh.start(KILLED, root=str(ROOT), folder=str(tmp_path), first=13 * start)
        assert program.wait(120) == -9, program.err
    rb = ReplayBuffer.open(tmp_path / "rb")
    assert len(rb) == 26
    assert checked(rb) <= {6 * (step // EPISODE) + step % EPISODE for step in range(26)}
    play(rb, 26, 20)  # the transform is that of the sampler
    checked(rb)
    assert len(finals_of(rb).storage) == 9
    closed(rb, finals_of(rb))


def test_the_directory_says_where_they_are(tmp_path):
    rb = begun(tmp_path / "here")
    play(rb, 0, 12)
    closed(rb, finals_of(rb))
    shutil.move(tmp_path / "here", tmp_path / "there")
    rb = ReplayBuffer.open(tmp_path / "there" / "rb")
    play(rb, 12, 10)
    checked(rb)
    reader = ReplayBuffer.open(tmp_path / "there" / "rb", readonly=True)
    assert checked(reader) == checked(rb)
    assert finals_of(rb).folder == tmp_path / "there" / "finals"
    closed(reader, finals_of(reader))
    closed(rb, finals_of(rb))


def test_before_the_first_end_there_are_none(tmp_path):
    rb = begun(tmp_path)
    play(rb, 0, 3)
    rb.close()
    assert not (tmp_path / "finals").exists()
    with pytest.raises(FileNotFoundError, match="finals"):
        ReplayBuffer.open(tmp_path / "rb", readonly=True)
    rb = ReplayBuffer.open(tmp_path / "rb")
    play(rb, 3, 4)
    checked(rb)
    closed(rb, finals_of(rb))


def test_what_is_given_counts(tmp_path):
    rb = begun(tmp_path)
    play(rb, 0, 12)
    closed(rb, finals_of(rb))
    plain = ReplayBuffer.open(tmp_path / "rb", sampler=RandomSampler())
    assert "frame" not in plain.sample(4)["next"]
    plain.close()
    finals = FinalObservations.open_or_create(KEYS, tmp_path / "finals", 20)
    rb = ReplayBuffer.open(tmp_path / "rb", sampler=sampler(finals))
    play(rb, 12, 5)
    checked(rb)
    closed(rb, finals)


def test_final_observations_in_memory_are_not_noted(tmp_path):
    """Nor taken beside a directory: that is said before a row is written."""
    finals = FinalObservations(KEYS, LazyTensorStorage(20))
    with pytest.raises(RuntimeError, match=r"final observations is not\. Use FinalObservations.open_or_create"):
        ReplayBuffer.open_or_create(tmp_path / "rb", 64, sampler=sampler(finals), transform=finals)
    assert not (tmp_path / "rb").exists()
    finals.storage.share()
    rb = ReplayBuffer.open_or_create(tmp_path / "rb", 64, sampler=sampler(finals), transform=finals)
    play(rb, 0, 12)
    checked(rb)
    rb.close()
    with pytest.raises(TypeError, match="'FrameStack'.*: pass sampler="):
        ReplayBuffer.open(tmp_path / "rb")


def test_a_store_that_is_there_is_not_taken_for_a_new_one(tmp_path):
    rb = begun(tmp_path)
    play(rb, 0, 12)
    closed(rb, finals_of(rb))
    with pytest.raises(RuntimeError, match=r"FinalObservations\.open_or_create"):
        FinalObservations(KEYS, LazyMemmapStorage(20, scratch_dir=tmp_path / "finals"))
    with pytest.raises(ValueError, match="open_or_create: .* holds a store of another size"):
        FinalObservations.open_or_create(KEYS, tmp_path / "finals", 30)
    with pytest.raises(TypeError, match="directory"):
        FinalObservations.open_or_create(KEYS, None, 30)
    shutil.rmtree(tmp_path / "finals")
    rb = ReplayBuffer.open(tmp_path / "rb")
    with pytest.raises(RuntimeError, match="the final observation of row .* is not in"):
        rb.sample(200)
    closed(rb, finals_of(rb))


@pytest.mark.parametrize(
    "wrong", [None, [], {}, {"keys": 3}, {"directory": 3}, {"keys": []}, {"max_size": "x"}, {"end_keys": 7}]
)
def test_notes_that_are_damaged(tmp_path, wrong):
    rb = begun(tmp_path)
    play(rb, 0, 4)
    rb.close()
    path = next((tmp_path / "rb" / ".engram").glob("buffer*"))
    noted = json.loads(path.read_bytes())
    holder = noted["sampler"]["config"]["sampler"]["config"]
    holder["finals"] = {**holder["finals"], **wrong} if isinstance(wrong, dict) and wrong else wrong
    path.write_bytes(json.dumps(noted).encode())
    with pytest.raises(CorruptStore, match="recorded (final observations|sampler)"):
        ReplayBuffer.open(tmp_path / "rb")
    assert os.listdir(tmp_path) == ["rb"]
