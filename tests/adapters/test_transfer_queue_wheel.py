"""What ships in TransferQueue's wheel, its tests and its tutorial, over engram's backend; and deaths of its processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

transfer_queue = pytest.importorskip("transfer_queue", reason="not of CI: TransferQueue needs Ray")

HERE = Path(__file__).parent
WHEEL = Path(transfer_queue.__file__).parents[1]
TESTS = ["test_kv_storage_manager.py", "e2e/test_kv_interface_e2e.py", "e2e/test_e2e_lifecycle_consistency.py"]
TUTORIAL = sorted(path.name for path in (WHEEL / "tutorial").glob("0*.py"))

pytestmark = pytest.mark.timeout(600)


def environment(**more):
    paths = [str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQ_LOGGING_LEVEL": "ERROR", **more}


def run(*arguments, **more):
    """A Python in the wheel's folder, to its end; what it printed."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=WHEEL,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


def test_the_wheel_has_what_is_run():
    assert all((WHEEL / "tests" / name).exists() for name in TESTS)
    assert len(TUTORIAL) >= 6


@pytest.mark.parametrize("name", TESTS)
def test_tests_of_the_wheel(name):
    options = ["-q", "-p", "no:cacheprovider", "-p", "wheel_plugin", "-c", os.devnull, f"--rootdir={WHEEL}"]
    said = run("-m", "pytest", *options, str(WHEEL / "tests" / name), TQ_TEST_BACKEND="Engram")
    assert " passed" in said
    assert " failed" not in said


@pytest.mark.parametrize("name", TUTORIAL)
def test_tutorial_of_the_wheel(name):
    path = WHEEL / "tutorial" / name
    program = (
        "import runpy, transfer_queue, wheel_plugin; wheel_plugin.start_ray(); "
        f"transfer_queue.init = wheel_plugin.init; runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    run("-c", program)


# ---- deaths ------------------------------------------------------------------------------------------------------------

PROGRAM = HERE / "dying.py"


def test_a_driver_dies_and_its_successor_reads_what_its_checkpoint_knows(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(PROGRAM), "die", str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert any(line.startswith("ready") for line in driver.stdout)
        os.kill(driver.pid, signal.SIGKILL)
    run(str(PROGRAM), "succeed", str(tmp_path))


def test_a_writer_dies_and_what_it_was_told_is_there(tmp_path):
    run(str(PROGRAM), "lose a writer", str(tmp_path))
