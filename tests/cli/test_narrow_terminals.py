"""What ``inspect`` prints where a terminal is narrow, and what ``stats`` and ``plot`` do before torch is imported."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from tensordict import TensorDict

from engram import (
    Checkpointer,
    LazyMemmapStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.cli import main
from engram.format import layout
from engram.saved import attempts


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


HEADS = {"field", "key", "checkpoint", "ranks", "steps", "episodes", "bytes", "linked", "age"}
LONG = {"proprioception_of_the_left_hand": 17, "z" * 60: 1, "observation": 4}


def make_folders(place):
    """Folders of many kinds, good and damaged ones. Returns those that are damaged, too."""
    fields = {name: torch.zeros(300, width) for name, width in LONG.items()}
    deep = {"a": {"quite": {"deep": {"name_of_a_field": torch.zeros(300, 3, dtype=torch.float64)}}}}
    many = {f"field_{i}": torch.zeros(300) for i in range(12)}
    done = torch.arange(300)[:, None] % 30 == 29
    rows = TensorDict({**fields, **many, "next": {**deep, "done": done, "reward": torch.zeros(300, 1)}}, [300])
    for name, lanes in (("one", 1), ("lanes", 4)):
        storage = LazyMemmapStorage(400, scratch_dir=place / name, lanes=lanes)
        rb = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(400, 0.6, 0.4), batch_size=4)
        for lane in range(lanes):
            index = rb.extend(rows[: 300 // lanes], **({"lane": lane} if lanes > 1 else {}))
            rb.update_priority(index, torch.rand(300 // lanes) + 0.01)
        rb.dumps(place / f"dump_{name}")
        Checkpointer(place / f"series_{name}", rb, keep=9).save(1_000_000)
        rb.close()
    rb = ReplayBuffer(storage=ListStorage(20), batch_size=2)
    rb.extend([torch.zeros(3), {"an": [torch.ones(2)]}])
    checkpoints = Checkpointer(place / "lists", rb, keep=9)
    for step in (1, 20):
        checkpoints.save(step, user={"a_long_name_of_something_kept": "with a text that is rather long, too"})
    rb.dumps(place / "dump_of_a_list")
    rb.close()
    ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=place / "few")).add({"x": torch.zeros(())})
    attempts.begin(place / "lists", step=30, epoch=1, world=3, trigger="every_steps")
    shutil.copytree(place / "one", place / "no_schema")
    (place / "no_schema" / layout.FOLDER / layout.STORE).write_bytes(b"{}")
    shutil.copytree(place / "one", place / "short")
    os.truncate(place / "short" / "observation.memmap", 16)
    shutil.copytree(place / "series_lanes", place / "bad")
    shutil.copytree(place / "dump_one", place / "bad_dump")
    for document in (*place.glob("bad/*/manifest.json"), *place.glob("bad_dump/manifest.json")):
        document.write_bytes(document.read_bytes()[:-20])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("a_folder_of_runs_whose_name_is_long")
    make_folders(place)
    inside = [path for path in place.glob("*/*") if path.is_dir() and ("ckpt" in path.name or path.name == "storage")]
    return [*place.iterdir(), *inside]


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("words", [("inspect",), ("inspect", "--all"), ("verify",), ("stats",)], ids=" ".join)
def test_every_line_of_every_folder_fits_and_says_all(folders, words, columns):
    for folder in folders:
        wide, narrow = (
            CliRunner().invoke(main, [words[0], str(folder), *words[1:]], env={"COLUMNS": str(width)}).stdout
            for width in (100_000, columns)
        )
        lines = narrow.splitlines()
        assert not [line for line in lines if len(line) > columns], folder
        whole = "".join(narrow.split())
        for word in wide.split():
            # Numbers get older meanwhile, and narrow tables have no heads.
            assert word in whole or word in HEADS or not any(map(str.isalpha, word)), (folder, word)


def test_a_narrow_table_names_its_cells(folders):
    (store,) = [folder for folder in folders if folder.name == "one"]
    lines = inspected(store, 40)
    at = lines.index("proprioception_of_the_left_hand")
    assert lines[at + 1 : at + 3] == ["    dtype float32, shape [17],", "    a row 68 B"]
    assert any(line.split()[:2] == ["field", "dtype"] for line in inspected(store, 100))
    (several,) = [folder for folder in folders if folder.name == "lists"]
    result = CliRunner().invoke(main, ["inspect", str(several)], env={"COLUMNS": "40"})
    assert "    ranks 1, steps 2, episodes" in result.stdout


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
    env = {**os.environ, "COLUMNS": "1000"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=300, check=False
    )
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


def test_plot_says_what_it_draws_before_torch_is_imported(run, tmp_path):
    pytest.importorskip("matplotlib")
    store, checkpoints = run / "a_folder_with_a_name_that_is_long" / "store", run / "checkpoints"
    out = tmp_path / "a.png"
    for folder, words, said in (
        (store, (), f"drawing all figures of {store}, 2,000 of 100,000 rows, into {out}"),
        (checkpoints, ("--what", "age", "--what", "map"), f"drawing age, map of {checkpoints} into {out}"),
    ):
        before, after = printed("plot", folder, "--out", out, *words)[0].split("TORCH")
        assert (before.splitlines(), after) == ([said], "")
        assert out.read_bytes()[1:4] == b"PNG"
        out.unlink()


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
        assert "drawing" not in stdout, words
        assert said in stderr, (words, stderr)
