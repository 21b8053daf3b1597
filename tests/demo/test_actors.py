"""The demo with actor processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engram import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer
from engram.demo.actors import Acknowledged, Actor, ActorFailed, checksums
from engram.demo.agent import Agent
from engram.demo.crowd import RowsLost, verify
from engram.demo.learning import new_replay
from engram.demo.play import Player
from engram.demo.progress import Progress

COMMAND = [sys.executable, "-c", "from engram.cli import main; main()", "demo"]
WIDE = {**os.environ, "COLUMNS": "500"}


def runs(pid):
    """Whether there is such a process, which may be waiting for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def nobody_is_left(out, err):
    """No actor, and nothing in shared memory."""
    (pids,) = re.findall(r"one lane each: processes ([\d, ]+)", out)
    pids = {int(pid) for pid in [*pids.split(", "), *re.findall(r"Process (\d+) takes its place", out)]}
    deadline = time.monotonic() + 20
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(runs, pids))
    (shared,) = re.findall(r"^engram: _-single-tensor-_: (\S+)/_-single", err, re.MULTILINE)
    assert not Path(shared).exists()
    return pids


# ---- the whole of it -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    options = ["--steps", "700", "--dir", folder, "--seed", "5", "--actors", "2", "--sampler", "prioritized"]
    return folder, subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=100, check=False, env=WIDE
    )


def test_an_actor_is_killed_and_replaced(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    out = done.stdout
    (killed,) = re.findall(r"Half-way, at a return of \d+: kill -9 (\d+)\.", out)
    lived = (
        rf"Actor 0 \(lane 0, process {killed}\) is dead. It had acknowledged (\d+) rows: all of them are in the store"
    )
    (acknowledged,) = re.findall(lived, out)
    assert re.search(
        r"Actor 2 \(lane 0, process \d+\) plays on, [\d.]+ s after. Meanwhile the others wrote \d+ rows", out
    )
    written = re.findall(r"^Actor \d \(lane \d, process \d+\): (\d+) rows, \d+ rows/s", out, re.MULTILINE)
    assert written[0] == acknowledged
    assert sum(map(int, written)) == 700
    assert int(written[2]) > 0
    assert "Learner: 101 updates of 128 rows" in out
    assert re.search(
        r"Rows drawn again because somebody was writing them: \d+\. Rows left void by the kill: [01]\.", out
    )
    assert "Updates dropped because their row was rewritten meanwhile: 0." in out
    assert len(nobody_is_left(out, done.stderr)) == 3
    assert (folder / "demo.png").exists()
    progress, _ = Progress.load(folder)
    assert (progress.steps, progress.updates, progress.sampler) == (700, 101, "prioritized")
    assert progress.replaced_at is not None


def test_the_store_holds_what_every_actor_saw(finished):
    rb = ReplayBuffer.open(finished[0] / "replay")
    assert type(rb) is TensorDictPrioritizedReplayBuffer
    assert rb.storage.store.repair is None  # closed in order
    assert rb.lanes == 2
    assert len(rb) >= 700
    assert rb.sampler.state_dict()["beta"] > 0.99
    rows = rb[:]
    for number in range(3):
        own = rows[rows["actor"] == number]
        assert own["number"].tolist() == list(range(len(own)))
        ended = own["next", "done"].squeeze(1)
        inside = (
            (~ended).nonzero().squeeze(1)
        )  # never the last one: an actor that stops, or is killed, ends its episode
        assert torch.equal(own["next", "observation"][inside], own["observation"][inside + 1])
    rb.close()


# ---- ends of the learner -------------------------------------------------------------------------------------------------


def started(folder, *options):
    command = [*COMMAND, "--dir", str(folder), "--actors", "2", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=WIDE
    )
    deadline = time.monotonic() + 60
    while not (folder / "replay" / ".engram" / "store.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def the_store_is_whole(folder):
    rb = ReplayBuffer.open(folder / "replay")
    assert rb.storage.store.repair is None  # the last one closed it in order
    rows = rb[:]
    assert len(rows) == len(rb) > 0
    for number in range(2):
        own = rows[rows["actor"] == number]
        assert own["number"].tolist() == list(range(len(own)))
    rb.close()


def test_control_c_leaves_the_store_and_nothing_else(tmp_path):
    process = started(tmp_path / "run")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "engram.ReplayBuffer.open(" in out
    nobody_is_left(out, err)
    the_store_is_whole(tmp_path / "run")


def test_actors_end_with_the_learner(tmp_path):
    process = started(tmp_path / "run")
    process.kill()
    _, err = process.communicate(timeout=60)  # until the actors, which have the same pipes, are gone, too
    assert process.returncode == -signal.SIGKILL
    assert "Traceback" not in err
    (shared,) = re.findall(r"^engram: _-single-tensor-_: (\S+)/_-single", err, re.MULTILINE)
    assert not Path(shared).exists()
    the_store_is_whole(tmp_path / "run")


# ---- parts ---------------------------------------------------------------------------------------------------------------


def test_what_an_actor_raises_is_raised_in_the_learner(tmp_path):
    replay = new_replay(tmp_path / "replay", "uniform", torch.Generator(), lanes=2)
    policies = ReplayBuffer(storage=LazyTensorStorage(1), shared=True)
    policies.add(Agent().policy())
    actor = Actor(replay, policies, lane=2, number=0, seed=0)  # there is no lane 2
    actor.grant(1)
    assert actor.channel.poll(60)
    actor.process.join(60)
    with pytest.raises(ActorFailed, match=r"(?s)lane 2 .*expected it to play until .*Traceback.*RowError"):
        actor.heard()
    actor.close()
    policies.close()
    replay.close()


def test_a_policy_acts_elsewhere_as_it_did():
    torch.manual_seed(0)
    one, other = Agent(), Agent()
    observations = torch.randn(50, 4)
    assert [one.act(o) for o in observations] != [other.act(o) for o in observations]
    policy = one.policy()
    other.take_policy(policy.clone())
    assert [one.act(o) for o in observations] == [other.act(o) for o in observations]
    assert policy.untyped_storage().data_ptr() != one.policy().untyped_storage().data_ptr()


def dead(replay, *, steps, told, lane=1, number=4):
    """What is left of an actor that wrote some rows, and told of the first of them."""
    player = Player(Agent(), torch.Generator().manual_seed(0))
    acknowledged = []
    for i in range(steps):
        row, finished = player.step(0, seed=i)
        row["actor"], row["number"] = torch.tensor(number), torch.tensor(i)
        at = replay.add(row, lane=lane)
        acknowledged.append(Acknowledged(at, *checksums(row.unsqueeze(0)), 0.0, finished))
    return SimpleNamespace(lane=lane, number=number, acknowledged=acknowledged[:told])


@pytest.fixture
def replay(tmp_path):
    made = new_replay(tmp_path / "replay", "prioritized", torch.Generator(), lanes=200)  # 100 rows each
    yield made
    made.close()


def test_rows_of_the_dead_are_found(replay):
    assert verify(replay, dead(replay, steps=0, told=0)) == 0
    one = dead(replay, steps=5, told=5)
    assert not bool(replay[104]["next", "done"])
    assert verify(replay, one) == 5
    assert bool(replay[104]["next", "done"])
    assert bool(replay[104]["next", "truncated"])


def test_the_row_that_could_not_be_told_ends_the_episode(replay):
    assert verify(replay, dead(replay, steps=5, told=4)) == 4
    assert replay[list(range(100, 105))]["next", "truncated"].squeeze(1).tolist() == [False] * 4 + [True]


def test_only_what_a_lane_holds_is_expected(replay):
    assert verify(replay, dead(replay, steps=230, told=230)) == 100
    assert bool(replay[129]["next", "done"])


@pytest.mark.parametrize("half", [False, True])
def test_of_a_full_lane_the_oldest_row_is_not_expected_where_another_was_begun(replay, half):
    one = dead(replay, steps=131, told=130)
    if half:  # killed in the middle of it
        replay.storage.store.words[1].view(torch.int64)[130] |= 3
    assert verify(replay, one) == 99
    assert bool(replay[129]["next", "done"]) == half
    assert half or bool(replay[130]["next", "done"])


def test_a_row_that_is_not_as_it_was_written_is_noticed(replay):
    one = dead(replay, steps=5, told=5)
    replay.set_at_("action", 1 - replay[102]["action"].unsqueeze(0), [102])
    with pytest.raises(RowsLost, match=r"Rows \[102\] are not what actor 4 had written"):
        verify(replay, one)


def test_a_missing_row_is_noticed(replay):
    one = dead(replay, steps=5, told=5)
    one.acknowledged.append(one.acknowledged[-1]._replace(row=105))
    with pytest.raises(RowsLost, match="Of 6 rows that actor 4 had acknowledged 1 are missing"):
        verify(replay, one)


def test_checksums_depend_on_every_field():
    player = Player(Agent(), torch.Generator().manual_seed(0))
    row, _ = player.step(0, seed=0)
    row["actor"], row["number"] = torch.tensor(0), torch.tensor(0)
    rows = torch.stack([row] * 10).contiguous()
    for i, key in enumerate(sorted(row.keys(True, True), key=str)):
        rows[key][i] = 1 - rows[key][i].to(torch.float32)
    assert len(set(checksums(rows))) == 10, "nine changed in one field each, one as it was"
