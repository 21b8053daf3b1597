"""What ``inspect`` prints where a terminal is narrow, and what ``stats`` and ``plot`` do before torch is imported."""

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from tensordict import TensorDict

from engram import Checkpointer, LazyMemmapStorage, PrioritizedSampler, TensorDictReplayBuffer
from engram.cli import main


@pytest.fixture
def run(tmp_path):
    storage = LazyMemmapStorage(100_000, scratch_dir=tmp_path / "a_folder_with_a_name_that_is_long" / "store")
    sampler = PrioritizedSampler(100_000, 0.6, 0.4)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    done = torch.arange(2000)[:, None] % 100 == 99
    rows = rb.extend(TensorDict({"obs": torch.zeros(2000, 4), "next": {"done": done}}, [2000]))
    rb.update_priority(rows, torch.arange(2000.0) + 1)
    Checkpointer(tmp_path / "checkpoints", rb).save(1)
    rb.close()
    return tmp_path


def inspected(folder, columns):
    result = CliRunner().invoke(main, ["inspect", str(folder)], env={"COLUMNS": str(columns)})
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize("columns", [40, 60])
def test_no_line_is_wider_than_the_terminal(run, columns):
    store = run / "a_folder_with_a_name_that_is_long" / "store"
    (checkpoint,) = [path for path in (run / "checkpoints").iterdir() if path.is_dir() and "ckpt" in path.name]
    for folder in (store, checkpoint):
        lines, wide = inspected(folder, columns), inspected(folder, 1000)
        assert max(map(len, lines)) <= columns
        words = [word for line in wide for word in line.split() if "█" not in word and len(word) < columns // 2]
        assert [word for word in words if word not in " ".join(lines)] == []
    assert any(
        line.startswith(" " * 4) for line in inspected(store, columns)
    )  # what goes on stands below the second column


def test_the_rest_of_a_path_stands_below_it_and_is_whole(run):
    store = run / "a_folder_with_a_name_that_is_long" / "store"
    lines = inspected(store, 40)
    end = next(i for i, line in enumerate(lines) if line.startswith("created"))
    assert "".join(line.strip() for line in lines[:end]).replace(" ", "") == f"store{store}"
    assert inspected(store, 0)[0] == f"store {store}"  # what is no terminal gets whole lines


PRINTED = """
import sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.stdout.write("TORCH")
            sys.stdout.flush()
            sys.meta_path.remove(self)

if {without}:
    sys.modules["matplotlib"] = None
sys.meta_path.insert(0, Watch())
from engram.cli import main
main({words!r})
"""


def printed(*words, without=False):
    program = PRINTED.format(words=[*map(str, words)], without=without)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    return done.stdout, done.stderr


def test_stats_say_what_they_know_before_torch_is_imported(run):
    store = run / "a_folder_with_a_name_that_is_long" / "store"
    before, after = printed("stats", store)[0].split("TORCH")
    said = dict(line.split(maxsplit=1) for line in before.splitlines())
    assert (said["size"], said["capacity"]) == ("2,000", "100,000")
    assert int(said["bytes"].replace(",", "")) > 100_000 * 16
    rest = [line.split()[0] for line in after.splitlines()]
    assert "write_count" in rest
    assert not said.keys() & {*rest}
    assert "e+" not in before + after


def test_refusals_need_no_torch(run, tmp_path):
    store, checkpoint = run / "a_folder_with_a_name_that_is_long" / "store", run / "checkpoints"
    out = tmp_path / "a.png"
    for words, without, said in (
        (("stats", tmp_path / "none"), False, "found nothing"),
        (("plot", tmp_path / "none", "--out", out), False, "found nothing"),
        (("plot", store, "--out", tmp_path / "a.txt"), False, "expected a name that ends with"),
        (("plot", store, "--out", out), True, "matplotlib"),
        (("plot", checkpoint / "none", "--out", out), False, "found nothing"),
    ):
        stdout, stderr = printed(*words, without=without)
        assert "TORCH" not in stdout, words
        assert said in stderr, (words, stderr)
