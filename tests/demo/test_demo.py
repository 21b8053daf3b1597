"""``make demo`` as a user runs it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engram import ReplayBuffer, TensorDictPrioritizedReplayBuffer
from examples.demo import run
from tests import waiting
from tests.processes import running
from tests.waiting import until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.demo"]


def test_numbered_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run", lambda options: 0)
    for number in ("001", "002"):
        with pytest.raises(SystemExit) as ended:
            run.main([])
        assert ended.value.code == 0
        assert (tmp_path / "engram-demo" / f"run-{number}").is_dir()


def test_a_folder_with_files_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(SystemExit):
        run.main(["--dir", str(tmp_path)])
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("arguments", [["--steps", "many"], ["--actors", "0"], ["--actors", "65"]])
def test_options_out_of_range(arguments, capsys):
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def assert_all_ended(out):
    """Every learner and actor that ``out`` names ends."""
    pids = [int(pid) for line in re.findall(r"Learner (.*), one lane each", out) for pid in re.findall(r"\d+", line)]
    pids += [int(pid) for pid in re.findall(r"Actor (\d+) takes over", out)]
    until(lambda: not any(map(running, pids)), 100)
    assert pids
    assert not any(map(running, pids))


# ---- the whole demo ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    options = ["--steps", "900", "--dir", folder, "--seed", "5", "--actors", "2"]
    return folder, subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_actor_and_the_learner_are_killed_and_replaced(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    out = done.stdout
    assert "(seed 5)" in out
    first, second = re.findall(r"Learner (\d+); actors \d+, \d+, one lane each", out)
    (actor,) = re.findall(r"kill -9 (\d+) \(an actor\)", out)
    assert re.search(rf"Actor {actor} is dead\. All \d+ rows it wrote are intact\.", out)
    assert re.search(r"Meanwhile \d+ rows were written; the longest write took [\d.]+ ms", out)
    assert f"kill -9 {first} (the learner)" in out
    assert second != first
    (saved,) = re.findall(r"(ckpt-\S+): \d+ rows saved", out)
    (rows,) = re.findall(rf"A new learner opens the store: (\d+) rows are there\. Network of {saved}\.", out)
    assert 450 <= int(rows) <= 900
    # Steps are rows that were saved: one that the dead actor was writing is not.
    assert re.search(r"Not solved after (899|900) steps\.", out)
    assert f"engram inspect {folder / 'checkpoints'}" in out
    assert_all_ended(out)
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_store_of_the_demo_opens(finished):
    folder, _ = finished
    rb = ReplayBuffer.open(folder / "replay")
    assert type(rb) is TensorDictPrioritizedReplayBuffer
    assert rb.storage.store.repair is None  # closed in order
    assert rb.lanes == 2
    assert rb.write_count == 900
    assert 898 <= len(rb) <= 900, "a row that was being written when its process was killed is void"
    rows = rb[:]
    ended = rows["next", "done"].squeeze(1)
    assert torch.equal(ended, (rows["next", "terminated"] | rows["next", "truncated"]).squeeze(1))
    follows = (rows["next", "observation"][:-1] == rows["observation"][1:]).all(1)
    assert int((~ended[:-1] & ~follows).sum()) <= 5, "an episode breaks off where a lane ends or an actor does"
    batch = rb.sample()
    assert len(batch) == 128
    assert len(batch["priority_weight"].unique()) > 50
    rb.close()


def test_the_checkpoints_of_the_demo_are_whole(finished):
    folder, _ = finished
    command = [sys.executable, "-m", "engram", "verify", folder / "checkpoints"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


# ---- how it ends otherwise -----------------------------------------------------------------------------------------------


def started(folder):
    command, pipe = [*COMMAND, "--dir", str(folder)], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def output_of(process):
    """What it printed, once all processes that inherited its pipes have ended."""
    try:
        return process.communicate()
    except waiting.TooSlow:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def wait_for(path):
    until(path.exists)


def waits_for_a_learner(pid):
    """Whether that process has started one, and hears of Ctrl-C again."""
    if not learner_of(pid):
        return False
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16) >> (signal.SIGINT - 1) & 1
    return not ignored and re.search(r"State:\s*S", status) is not None


def learner_of(pid):
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended just now
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(pid) and b"spawn_main" in (folder / "cmdline").read_bytes():
                return True
    return False


def assert_the_store_is_whole(folder):
    rb = ReplayBuffer.open(folder / "replay")
    assert rb.storage.store.repair is None  # the last process closed it in order
    assert len(rb) > 0
    assert len(rb.sample()) == 128
    rb.close()


@pytest.mark.stress(sample=1)
@pytest.mark.parametrize("group", [True, False], ids=["as a terminal does", "to the parent alone"])
def test_control_c_leaves_a_store_that_opens(tmp_path, group):
    process = started(tmp_path / "run")
    wait_for(tmp_path / "run" / "replay" / ".engram" / "store.json")
    rb = ReplayBuffer.open(tmp_path / "run" / "replay")
    until(lambda: len(rb) > 0)
    rb.close()
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    out, err = output_of(process)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "engram.ReplayBuffer.open(" in out
    assert_all_ended(out)
    assert_the_store_is_whole(tmp_path / "run")


def test_control_c_before_it_has_begun(tmp_path):
    """The learner is still importing torch."""
    folder = tmp_path / "run"
    process = started(folder)
    until(lambda: waits_for_a_learner(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    _, err = output_of(process)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_all_processes_end_with_the_command(tmp_path):
    process = started(tmp_path / "run")
    wait_for(tmp_path / "run" / "replay" / ".engram" / "store.json")
    process.kill()
    out, err = output_of(process)
    assert "Traceback" not in err
    assert_all_ended(out)
    assert_the_store_is_whole(tmp_path / "run")
