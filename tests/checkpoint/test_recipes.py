"""The programs of docs/training-frameworks.md, two processes each: they train, are started again, and go on with their rows."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from engram import LazyTensorStorage, ReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from tests.test_docs import BLOCK, ON_RANKS

#: By heading: the module that a program needs.
NEEDS = {"Plain DDP, with DCP": "torch", "accelerate": "accelerate", "Lightning Fabric": "lightning_fabric"}


def programs():
    text = ON_RANKS.read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    return dict(zip(headings, (block.group(1) for block in BLOCK.finditer(text)), strict=True))


def test_there_is_a_program_for_each():
    assert list(programs()) == list(NEEDS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("heading", NEEDS)
def test_a_program_resumes(heading, tmp_path):
    module = NEEDS[heading]
    if importlib.util.find_spec(module) is None:
        pytest.skip(
            f"{module} is not installed: pip install --no-deps accelerate lightning-fabric …, see CONTRIBUTING.md"
        )
    program = tmp_path / "train.py"
    program.write_text(programs()[heading])
    assert said_by(program, tmp_path) == [f"rank {rank}: step 20, 40 rows of rank [{rank}]" for rank in (0, 1)]
    assert said_by(program, tmp_path) == [f"rank {rank}: step 40, 80 rows of rank [{rank}]" for rank in (0, 1)]
    entries = Checkpointer(tmp_path / "run/replay", ReplayBuffer(storage=LazyTensorStorage(1_000))).list()
    assert [(entry.step, entry.problem) for entry in entries] == [(40, None), (20, None)]


def said_by(program, folder):
    """What the ranks say in the end. The launcher picks a free port, and holds it."""
    (folder / "run").mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    made = subprocess.run(
        [*launcher, str(program), str(folder / "run")],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return sorted(re.findall(r"rank \d: step \d+, .*? of rank \[\d\]", made.stdout))
