"""What ``inspect``, ``doctor`` and ``plan`` say, beside what is told of the same things otherwise."""

import importlib
import json
import re
import resource
import subprocess
import sys
from collections import Counter
from importlib.metadata import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import engram
from engram import Checkpointer, LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from engram.cli import main
from engram.saved.inspection import BARS, histogram

#: The module, which is called as the command is.
doctor = importlib.import_module("engram.cli.doctor")


def call(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "100"})
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def found(*arguments):
    return json.loads(call(*arguments, "--json").stdout)


# ---- histograms ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e100), min_size=1, max_size=50))
def test_every_value_is_in_its_bar(values):
    made = histogram(Counter(values))
    edges, counts = np.array(made["edges"]), made["counts"]
    assert 1 <= len(counts) <= BARS
    assert (np.diff(edges) > 0).all() or len(set(values)) == 1
    assert counts == np.histogram(values, edges)[0].tolist() or len(set(values)) == 1
    assert sum(counts) == len(values)


def test_without_values_there_are_no_bars():
    assert histogram({}) == {"edges": [], "counts": []}


# ---- trajectories ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), lanes=st.integers(1, 3))
def test_whole_trajectories_are_those_of_a_list_of_steps(data, lanes, tmp_path_factory):
    """Beside a model that keeps the steps of each lane in a list and cuts off what its ring has lost."""
    length = data.draw(st.integers(3, 20))
    folder = tmp_path_factory.mktemp("lengths")
    rb = ReplayBuffer(storage=LazyTensorStorage(length * lanes, lanes=lanes))
    steps = [[] for _ in range(lanes)]
    for _ in range(data.draw(st.integers(1, 5))):
        ends = data.draw(
            st.lists(st.sampled_from([(False, False), (True, False), (False, True)]), min_size=1, max_size=25)
        )
        lane = data.draw(st.integers(0, lanes - 1))
        done, truncated = torch.tensor(ends).unbind(1)
        rows = {"a": torch.zeros(len(ends), 9), "next": {"terminated": done[:, None], "truncated": truncated[:, None]}}
        rb.extend(rows, lane=[lane] * len(ends) if lanes > 1 else None)
        steps[lane] += [any(end) for end in ends]
    expected = 0
    for of_lane in steps:
        kept = of_lane[-length:]
        lost = len(of_lane) > length
        for end in kept:
            if end:
                expected += not lost
                lost = False
    rb.dumps(folder / "dump")
    (shard,) = found("inspect", folder / "dump")["shards"]
    assert shard["parts"]["storage"]["trajectories"]["complete"] == expected


# ---- inspect ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A store that no process has open, and checkpoints of it."""
    folder = tmp_path_factory.mktemp("run")
    sampler = PrioritizedSampler(100, 1.0, 0.4, 0.0)
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder / "store"), sampler=sampler)
    index = rb.extend(
        {f"field{number}": torch.arange(60.0) for number in range(10)} | {"done": torch.arange(60) % 10 == 9}
    )
    rb.update_priority(index, torch.arange(1.0, 61.0))
    saves = Checkpointer(folder / "saved", rb)
    saves.save(1)
    rb.extend({f"field{number}": torch.arange(5.0) for number in range(10)} | {"done": torch.arange(5) > 9})
    saves.save(2)
    rb.dumps(folder / "dump")
    rb.close()
    return folder


def test_inspect_is_short_unless_it_is_told_otherwise(run):
    for what in ("store", "dump"):
        short, everything = (call("inspect", run / what, *more).output for more in ((), ("--all",)))
        assert "and 3 more: --all lists them" in short
        assert "field9" not in short
        assert "field9" in everything
        assert re.search(r"priorities.*alpha 1, beta 0.4, 65 rows can be drawn", short)
        assert re.search(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ, \d+ \w+ ago", short)


def test_histograms_and_times_are_in_the_json(run):
    store = found("inspect", run / "store")
    (index,) = store["indexes"]
    assert sum(index["histogram"]["counts"]) == 65
    assert (index["histogram"]["edges"][0], index["histogram"]["edges"][-1]) == (1.0, 60.0)
    (shard,) = found("inspect", run / "dump")["shards"]
    assert shard["parts"]["storage"]["trajectories"]["complete"] == 6
    assert store["age_s"] >= 0
    assert store["created"] <= store["written"]
    (newest, older) = found("inspect", run / "saved")["checkpoints"]
    assert newest["saved"] >= older["saved"]
    assert found("inspect", run / "saved" / newest["name"])["saved"] == newest["saved"]


def test_commands_that_read_files_start_without_torch(run):
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from engram.cli import main\n"
        "store, dump = sys.argv[1:]\n"
        "for words in (['inspect', store], ['inspect', dump], ['verify', store], ['plan', store, '--capacity', '9']):\n"
        "    assert CliRunner().invoke(main, words).exit_code == 0, words\n"
        "print(sorted({'torch', 'tensordict', 'rich'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program, str(run / "store"), str(run / "dump")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_a_plan_is_that_of_the_library(tmp_path, run):
    row = {"obs": torch.zeros(4, 84, 84, dtype=torch.uint8), "next": {"reward": torch.zeros(1)}}
    expected = engram.plan(row, 100_000, memory=10**9)
    (tmp_path / "a.json").write_text(
        '{"obs": {"dtype": "uint8", "shape": [4, 84, 84]}, "next": {"reward": "float32[1]"}}'
    )
    arrays = {"obs": np.zeros((4, 84, 84), np.uint8), "next.reward": np.zeros(1, np.float32)}
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez(tmp_path / "b.npz", **{name: np.stack([array] * 7) for name, array in arrays.items()})
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "store"))
    rb.add(row)
    rb.dumps(tmp_path / "dump")
    Checkpointer(tmp_path / "saved", rb).save(1)
    rb.close()
    fields = ["--field", "obs=uint8[4,84,84]", "--field", "next.reward=float32[1]"]
    for words in (
        [tmp_path / "a.json"],
        [tmp_path / "a.npz"],
        [tmp_path / "b.npz", "--batch"],
        [tmp_path / "store"],
        [tmp_path / "dump"],
        [tmp_path / "saved"],
        fields,
    ):
        told = found("plan", *words, "--capacity", 100_000, "--memory", "1GB")
        assert {tuple(it["key"]): it["row_bytes"] for it in told["fields"]} == {
            it.key: it.row_bytes for it in expected.fields
        }
        assert (told["row_bytes"], told["bytes"], told["overhead"]) == (
            expected.row_bytes,
            expected.nbytes,
            expected.overhead,
        )
        assert told["overhead"] + told["priorities"] == expected.resident
        assert told["from_disk"] == pytest.approx(1 - (1e9 - expected.resident) / expected.nbytes)
    assert "LazyMemmapStorage" in call("plan", *words, "--capacity", 100_000, "--memory", "1GB").output


def test_a_plan_of_a_device():
    row = {"obs": torch.zeros(4, 84, 84, dtype=torch.uint8)}
    words = ("plan", "--field", "obs=uint8[4,84,84]", "--capacity", 1_000, "--device", "cuda:0", "--batch-size", 32)
    expected = engram.plan(row, 1_000, device="cuda:0", batch_size=32).on_device
    told = found(*words)["device"]
    assert set(told) == set(expected.__struct_fields__)
    for name in ("device", "storage", "priorities", "mirror", "resident", "batch", "batches", "pinned", "block"):
        assert told[name] == getattr(expected, name)
    said = call(*words).output
    assert "rows there" in said
    assert "transport=" in said
    assert found(*words[:5])["device"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--field", "obs=uint8", "--device", "cpu"], "--device: expected an accelerator such as 'cuda'"),
        (["--field", "obs=uint8", "--device", "gpu"], "--device: expected a device or its name, got 'gpu'"),
        ([], "expected a SAMPLE or --field"),
        (["--field", "obs"], "expected NAME=DTYPE[SHAPE]"),
        (["--field", "obs=float31"], "expected a dtype of bool"),
        (["--field", "obs=float32[4,,2]"], "expected a shape such as"),
        (["--field", "obs=float32", "--field", "obs.a=float32"], "both a field and the beginning"),
        (["--field", "obs=float32", "--memory", "much"], "expected a size such as 16GB"),
        (["bad.json"], "expected JSON"),
        (["list.json"], "expected an object"),
        (["deep.json"], "next.reward: expected a dtype"),
        (["objects.npz"], "expected arrays of numbers"),
        (["text.txt"], "expected an .npz, .npy or .json file"),
    ],
)
def test_a_plan_of_what_cannot_be_read(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("bad.json", "{"),
        ("list.json", "[1]"),
        ("deep.json", '{"next": {"reward": 3}}'),
        ("text.txt", ""),
    ):
        (tmp_path / name).write_text(text)
    np.savez(tmp_path / "objects.npz", a=np.array([object()], dtype=object))
    result = call("plan", "--capacity", "5", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


# ---- doctor ----------------------------------------------------------------------------------------------------------

MOUNTS = [
    "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
    "22 21 0:5 / /home rw - nfs4 server:/home rw",
    r"23 21 0:6 / /home/a\040b rw - xfs /dev/sdb rw",
    "24 21 0:7 / /run rw - tmpfs tmpfs rw",
    "25 21 0:8 / /box rw - overlay overlay rw",
]


@pytest.mark.parametrize(
    ("path", "kind", "status", "advice"),
    [
        ("/data/x", "ext4", "ok", ""),
        ("/home/x", "nfs4", "note", "A live store may not"),
        ("/home/a b/x", "xfs", "ok", ""),
        ("/home/a bc", "nfs4", "note", "A live store may not"),
        ("/run/x", "tmpfs", "note", "no restart"),
        ("/box/x", "overlay", "note", "mount a volume"),
    ],
)
def test_on_which_file_system_a_folder_lies(path, kind, status, advice):
    it = doctor.file_system(Path(path), MOUNTS)
    assert (it.value.split()[0], it.status) == (kind, status)
    assert advice in it.advice


def test_what_the_doctor_thinks_of_limits(tmp_path, monkeypatch):
    setting = tmp_path / "enabled"
    for said, status in (("always [madvise] never", "ok"), ("always madvise [never]", "note")):
        setting.write_text(said)
        assert doctor._huge_pages(setting)[1:3] == (said, status)
    assert doctor._huge_pages(tmp_path / "none").value == "unknown"
    unlimited = resource.RLIM_INFINITY
    assert doctor._memory_locks(unlimited, unlimited) == doctor.Finding("memory locks", "unlimited")
    (tmp_path / "cards").mkdir()
    for cards, status in (("none", "ok"), ("cards", "ok"), (".", "note")):
        it = doctor._memory_locks(65_536, unlimited, tmp_path / cards)
        assert it[:3] == ("memory locks", "65.5 kB of unlimited", status)
    assert doctor._open_files(256, 4096)[:3] == ("open files", "256 of 4096", "note")
    assert doctor._open_files(4096, 4096).status == "ok"
    assert doctor._shared_memory(tmp_path / "none").status == "note"
    usage = type("Usage", (), {"free": 64 << 20, "total": 64 << 20})()
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage)
    it = doctor._shared_memory(tmp_path)
    assert (it.status, "--shm-size" in it.advice) == ("note", True)
    monkeypatch.setattr(doctor, "version", lambda name: (_ for _ in ()).throw(doctor.PackageNotFoundError))
    assert (
        doctor._extra("ray", "ray", "buffers on Ray").advice == 'For buffers on Ray: pip install "engram-replay[ray]"'
    )


def test_the_doctor_in_json():
    told = found("doctor")
    assert told["good"]
    assert told["problems"] == []
    assert {it["name"] for it in told["checks"]} >= {
        "shared memory",
        "huge pages",
        "memory locks",
        "extra plot",
        "open files",
    }
    assert all(it["status"] in ("ok", "note") and (it["advice"] or it["status"] == "ok") for it in told["checks"])


def test_the_doctor_knows_every_extra_of_users():
    made = {"demo", "bench", "docs", "dev"}  # of the Makefile; each consists of others and tools
    declared = set(metadata("engram-replay").get_all("Provides-Extra")) - made
    if sys.version_info >= (3, 14):
        declared.discard("zstd")  # part of Python
    assert {it["name"] for it in found("doctor")["checks"] if it["name"].startswith("extra ")} == {
        f"extra {extra}" for extra in declared
    }
