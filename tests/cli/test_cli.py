import importlib
import json
import re
import subprocess
import sys
from importlib.metadata import version

import click.testing
import pytest
import torch

from engram import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer, __version__
from engram.checkpoint.checkpointer import Checkpointer
from engram.cli import main
from engram.cli.doctor import Finding, findings


def test_help_and_version_start_without_torch():
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from engram.cli import main\n"
        "for arguments in (['--help'], ['--version'], ['plan', '--help'], ['doctor', '--help']):\n"
        "    result = CliRunner().invoke(main, arguments)\n"
        "    assert result.exit_code == 0, result.output\n"
        "print(sorted({'torch', 'tensordict', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version():
    assert click.testing.CliRunner().invoke(main, ["--version"]).output.strip() == f"engram, version {__version__}"


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "engram", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"engram, version {__version__}"
    wrong = subprocess.run([sys.executable, "-m", "engram", "inpsect"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "Usage: engram " in wrong.stderr) == (2, True)


def test_doctor_names_what_it_finds():
    found = {it.name: it for it in findings()}
    assert found["engram"] == Finding("engram", __version__, "ok", "")
    assert "loaded" in found["native core"].value
    assert found["torch"].value == version("torch")
    loaded = {it.name: it for it in findings(load=True)}
    assert loaded.keys() == found.keys()
    assert loaded["native core"].value == f"{found['native core'].value}, sees tensors natively"
    assert loaded["torch"].value.startswith(f"{torch.__version__}, ")
    assert set(found) >= {"Python", "GIL", "torch", "tensordict", "cores", "huge pages", "shared memory"}
    result = click.testing.CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert __version__ in result.output


def test_doctor_fails_where_something_essential_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = click.testing.CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert re.search("^BAD  torch +not installed", result.output, re.MULTILINE)
    loaded = click.testing.CliRunner().invoke(main, ["doctor", "--load"])
    assert loaded.exit_code == 1
    assert re.search("^BAD  torch +does not import", loaded.output, re.MULTILINE)
    found = json.loads(click.testing.CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert not found["good"]
    assert [it["what"].partition(":")[0] for it in found["problems"]] == [
        it["name"] for it in found["checks"] if it["status"] == "BAD"
    ]


@pytest.mark.parametrize(
    ("said", "status"), [("2.10.1", "BAD"), ("2.11.0+cpu", "ok"), ("3.0a1", "ok"), ("1.13", "BAD")]
)
def test_doctor_knows_which_torch_is_too_old(said, status, monkeypatch):
    monkeypatch.setattr(importlib.import_module("engram.cli.doctor"), "version", lambda name: said)
    assert {it.name: it for it in findings()}["torch"][1:3] == (said, status)


#: What a user may ask without waiting for torch. FOLDER is a store's, SAVED that of checkpoints.
WITHOUT_TORCH = [
    ["doctor"],
    ["doctor", "--json"],
    ["doctor", "FOLDER"],
    ["inspect", "FOLDER"],
    ["inspect", "SAVED", "--all"],
    ["verify", "FOLDER"],
    ["verify", "SAVED"],
    ["plan", "--capacity", "10", "--field", "a=float32"],
    ["plan", "FOLDER", "--capacity", "10"],
    *([name, "--help"] for name in main.commands),
]


@pytest.mark.timeout(300)
def test_commands_that_need_no_torch_do_not_load_it(tmp_path, monkeypatch):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "store"), sampler=PrioritizedSampler(64, 1, 1)
    )
    rb.extend({"obs": torch.zeros(40, 3), "done": torch.arange(40) % 8 == 7})
    Checkpointer(tmp_path / "saved", rb).save(1)
    rb.close()
    places = {"FOLDER": str(tmp_path / "store"), "SAVED": str(tmp_path / "saved")}
    asked = [[places.get(word, word) for word in words] for words in WITHOUT_TORCH]
    code = (
        "import json, sys\n"
        "from click.testing import CliRunner\n"
        "from engram.cli import main\n"
        "import importlib\n"
        "importlib.import_module('engram.cli.doctor')._TRIAL = 1 << 20\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    result = CliRunner().invoke(main, words)\n"
        "    print(json.dumps([words, result.exit_code, sorted({'torch', 'tensordict'} & set(sys.modules))]))\n"
    )
    program = [sys.executable, "-c", code, json.dumps(asked)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [it[0] for it in found] == asked
    assert [it for it in found if it[2]] == []
    assert all(code == 0 for words, code, _ in found if words[:2] != ["doctor", places["FOLDER"]]), found
    assert {it[1] for it in found} <= {0, 2}  # 2: a file system whose files cannot be read past memory


def test_doctor_measures_the_disk_of_a_store_and_of_a_folder(tmp_path, monkeypatch):
    doctor = importlib.import_module("engram.cli.doctor")  # the package has a command of this name
    monkeypatch.setattr(doctor, "_TRIAL", 1 << 20)
    monkeypatch.setattr(doctor, "available_memory", lambda: 12_000 + 100 * 4_005 // 4)
    rb = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path / "store", lanes=2))
    rb.extend({"a": torch.zeros(100, 1000), "b": torch.zeros(100, 5, dtype=torch.uint8)}, lane=torch.arange(100) % 2)
    try:
        rows, disk, memory = doctor.disk_speed(tmp_path / "store", 0.01)
        free_rows, free_disk = doctor.disk_speed(tmp_path, 0.01)
    except OSError as error:
        pytest.skip(f"this file system cannot be read past memory: {error}")
    assert rows == Finding("rows", "4 kB each, 4 MB in all")
    found = re.fullmatch(r"([\d.]+) [kMG]B/s, ([\d.]+) batches of 256 rows per second", disk[1])
    alone = float(found[2])
    assert alone > 0
    expected = re.fullmatch(
        r"112 kB beside what is in use; tickets and priorities need 20 kB: expect ([\d.]+) batches of 256 rows per second",
        memory[1],
    )
    assert float(expected[1]) == pytest.approx(alone / (1 - 0.025), abs=0.2)
    assert free_rows[1] == "none yet, 28.2 kB were tried"
    assert re.fullmatch(r"[\d.]+ [kMG]B/s, [\d.]+ batches of 256 rows per second", free_disk[1])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    rb.close()
    result = click.testing.CliRunner().invoke(main, ["doctor", str(tmp_path / "nothing")])
    assert result.exit_code == 2
