"""JAX takes batches by DLPack; the program in examples/ learns, is killed and goes on."""

import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from engram import LazyTensorStorage, ReplayBuffer  # noqa: E402
from tests import interpreter, waiting  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples/jax_dqn.py"


def started(folder, steps, **more):
    command = [interpreter.executable(), "-u", str(EXAMPLE), "--steps", str(steps), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **more)


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_a_batch_arrives_as_it_was_stored(output):
    rng = np.random.default_rng(0)
    rows = {
        "obs": rng.random((50, 4), np.float32),
        "action": rng.integers(9, size=50).astype(np.int32),
        "frame": rng.integers(256, size=(50, 2, 2), dtype=np.uint8),
        "done": rng.random(50) < 0.3,
        "number": np.arange(50, dtype=np.int32),
    }
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=32, output=output)
    rb.extend(rows)
    taken = jax.dlpack.from_dlpack if output == "torch" else jax.numpy.asarray
    drawn = rb.sample()
    drawn = drawn[0] if isinstance(drawn, tuple) else drawn
    batch = jax.tree.map(taken, drawn)
    numbers = np.asarray(batch["number"])
    rb.extend({name: np.zeros_like(value) for name, value in rows.items()})  # which a batch does not see
    for name, value in rows.items():
        assert isinstance(batch[name], jax.Array)
        assert batch[name].dtype == value.dtype
        assert np.asarray(batch[name]).tobytes() == value[numbers].tobytes()


def test_an_agent_learns(tmp_path):
    program = started(tmp_path / "replay", 6_000)
    said = program.communicate()[0]
    assert program.returncode == 0
    first, last = map(int, re.search(r"^the first episodes: (\d+), the last: (\d+)$", said, re.MULTILINE).groups())
    assert first < 50
    assert last > 100


def test_a_killed_run_leaves_its_steps(tmp_path):
    program = started(tmp_path / "replay", 10_000_000)

    def steps():
        try:
            with ReplayBuffer.open(tmp_path / "replay", readonly=True) as rb:
                return len(rb)
        except (FileNotFoundError, RuntimeError):  # it is not there yet, or has no rows
            return 0

    waiting.until(lambda: steps() >= 300, 300, "300 steps")
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    before = steps()
    assert before >= 300
    again = started(tmp_path / "replay", 100)
    assert re.search(rf"^{before} steps are there$", again.communicate()[0], re.MULTILINE)
    with ReplayBuffer.open(tmp_path / "replay", readonly=True) as rb:
        assert len(rb) == before + 100
        rows = rb[:]
        on = ~rows["next"]["done"][:-1].flatten()
        assert (rows["observation"][1:][on] == rows["next"]["observation"][:-1][on]).all()
        assert bool(rows["next"]["done"][before - 1])
