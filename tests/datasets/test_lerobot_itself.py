"""LeRobot reads what we write, and we read what it writes: `make test-doors` installs it beside our torch."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engram import record_robot
from engram.datasets import from_lerobot, to_lerobot
from tests.datasets.episodes import flat, same
from tests.datasets.lerobot_itself import FPS, KEY, LENGTHS

HERE = Path(__file__).parents[2]
INSTALLED = Path(os.environ.get("ENGRAM_LEROBOT", HERE / "build/lerobot"))
pytestmark = pytest.mark.skipif(
    not (INSTALLED / "lerobot").is_dir(), reason="LeRobot is not installed: make test-doors"
)


def lerobot(*arguments):
    command = [sys.executable, "-m", "tests.datasets.lerobot_itself", *map(str, arguments)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(arguments[1]) + "-cache"}
    environment = os.environ | offline | {"PYTHONPATH": f"{HERE}{os.pathsep}{INSTALLED}"}
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def read(folder, tmp_path):
    file = tmp_path / f"{folder.name}.npz"
    lerobot("read", folder, file)
    with np.load(file) as found:
        return dict(found)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A data set that LeRobot has recorded, and what it reads of it."""
    folder = tmp_path_factory.mktemp("recorded")
    lerobot("write", folder / "in")
    return folder / "in", read(folder / "in", folder)


def test_we_read_what_lerobot_has_recorded(recorded, tmp_path):
    folder, expected = recorded
    rows = flat(from_lerobot(folder, tmp_path / "data")[:])
    for name in ("observation.state", "action", "grid", "success", "timestamp", "frame_index", "task_index"):
        assert same(rows[tuple(name.split("."))], expected[f"row/{name}"]), name
    assert rows["collector", "traj_ids"].tolist() == np.repeat([0, 1, 2], LENGTHS).tolist()
    frames = np.moveaxis(rows[tuple(KEY.split("."))], 3, 1)
    np.testing.assert_array_equal(frames, expected[f"row/{KEY}"])  # the same decoder on the same file


def test_lerobot_reads_what_we_export(recorded, tmp_path):
    folder, expected = recorded
    from_lerobot(folder, tmp_path / "data").close()
    to_lerobot(tmp_path / "data", tmp_path / "out")
    found = read(tmp_path / "out", tmp_path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == f"row/{KEY}":
            assert abs(found[name].astype(int) - value).mean() < 1
        elif name.startswith("row/"):
            assert same(found[name], value), name  # with the texts of tasks
        elif name.rpartition("/")[2][0] != "q":  # LeRobot's quantiles are of histograms
            np.testing.assert_allclose(found[name], value, atol=0.01 if KEY in name else 1e-5, err_msg=name)
        else:
            assert found[name].shape == value.shape


def test_lerobot_reads_a_recording_of_a_robot(tmp_path):
    features = {
        KEY: {"dtype": "video", "shape": (64, 96, 3)},
        "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    }
    with record_robot(tmp_path / "robot", features, fps=FPS, room_s=10, hours=0.01) as recorder:
        for episode in range(2):
            for step in range(6):
                recorder.add({"observation.state": [episode, step]}, timestamp=step / FPS)
                recorder.add(
                    {KEY: np.full((64, 96, 3), 100 * episode + 10 * step, np.uint8)}, timestamp=step / FPS + 0.01
                )
            recorder.end_episode()
    to_lerobot(tmp_path / "robot", tmp_path / "out", task="wave")
    found = read(tmp_path / "out", tmp_path)
    assert found["row/observation.state"].tolist() == [[episode, step] for episode in range(2) for step in range(6)]
    assert set(found["row/task"]) == {"wave"}
    levels = [100 * episode + 10 * step for episode in range(2) for step in range(6)]
    np.testing.assert_allclose(found[f"row/{KEY}"].reshape(12, -1).mean(1), levels, atol=2)
