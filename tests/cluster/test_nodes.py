"""``make demo ARGS='--nodes 2'`` as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engram import PrioritizedSampler, ReplayBuffer
from tests.processes import running

pytest.importorskip("ray", reason="engram-replay[ray] is not installed")
STEPS = 600
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.nodes", "--nodes", "2", "--steps", str(STEPS)]


@pytest.mark.timeout(900)
def test_a_server_and_a_node_are_killed_and_every_acknowledged_row_is_there(tmp_path):
    folder = tmp_path / "run"
    done = subprocess.run([*COMMAND, "--dir", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    assert done.stderr == ""
    assert "(raylet)" not in out
    (players,) = re.findall(r"Node 1: actors (\d+, \d+), one lane each", out)
    (first_learner, first_server) = re.search(r"learner (\d+), and the rows with their server (\d+)", out).groups()
    assert f"kill -9 {first_server} (the server)" in out
    (second_server,) = re.findall(r"started a new one, (\d+)\. Actors waited [\d.]+ s", out)
    assert second_server != first_server
    assert f"kill -9 of node 2: Ray, the learner {first_learner}, the server {second_server}" in out
    assert re.search(r"A new learner draws [\d.]+ s after the kill", out)
    (whole,) = re.findall(r"All (\d+) rows that were acknowledged are there, and whole", out)
    assert STEPS // 2 <= int(whole) <= STEPS + 300
    assert not any(running(int(pid)) for pid in (*players.split(", "), first_learner, first_server, second_server))

    with ReplayBuffer.open(folder / "replay") as rb:
        assert isinstance(rb.sampler, PrioritizedSampler)
        assert rb.lanes == 2
        assert STEPS <= rb.write_count <= STEPS + 400
        rows = rb[:]
    ended = rows["next", "done"].squeeze(1)
    follows = (rows["next", "observation"][:-1] == rows["observation"][1:]).all(1)
    breaks = int((~ended[:-1] & ~follows).sum())
    assert breaks <= 3, "where a lane begins, and where an actor gave up a write"
    assert torch.equal(ended, (rows["next", "terminated"] | rows["next", "truncated"]).squeeze(1))
