"""What ``engram doctor`` says of a GPU: of imitated ones that work, and that fail in every way that CUDA documents."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from engram.cli import gpu, main
from engram.device import direct
from engram.device.direct import DirectReader
from engram.device.pinning import Blocks
from tests.device.imitation import Interpreter

NAMES = [
    "GPU",
    "GPU reads the host",
    "GPU takes RAM",
    "GPU takes shared memory",
    "GPU takes files on a disk",
    "GPU by direct after a fork",
    "GPU by direct",
    "GPU by block",
    "GPU copies",
]


@pytest.fixture
def device(monkeypatch):
    for name, value in {"ROWS": 24, "ROW_BYTES": 96, "BATCH": 8, "BATCHES": 2}.items():
        monkeypatch.setattr(gpu, name, value)
    made = Interpreter.installed(monkeypatch, strict=True)
    yield made
    assert made.faults == []


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(gpu, "_speed", lambda accelerator, call: call() is None or 40e9)


def findings(device):
    return {it.name: it for it in gpu.gpu_findings(device, "an imitation")}


@pytest.mark.usefixtures("fast")
def test_one_that_works(device):
    found = findings(device)
    assert list(found) == NAMES
    assert [it for it in found.values() if it.status != "ok" or it.advice] == []
    assert found["GPU"].value == "an imitation, 8.59 GB free of 17.2 GB"
    assert found["GPU by direct after a fork"].value == "works"
    assert found["GPU by block"].value == "40 GB/s, 100 % of one pinned copy (8 rows of 96 B)"
    assert found["GPU takes files on a disk"].value.startswith("yes, or that is no disk")
    assert device.counts["send"] > 0
    assert not [region for region in device.regions if not region.foreign]


@pytest.mark.usefixtures("device", "fast")
def test_batches_that_are_read_ahead(monkeypatch):
    """One that was read before the fork has the rows of before."""
    monkeypatch.setattr(direct.native, "PARALLEL_BYTES", 1)
    found = findings(Interpreter.installed(monkeypatch))
    assert found["GPU by direct after a fork"].value == "works"
    assert found["GPU by direct"].status == "ok"


def test_speeds_are_measured_after_all_work(device):
    found = findings(device)
    assert list(found) == NAMES
    assert all("/s" in found[name].value for name in NAMES[-3:])
    # An interpreter is slow, and so are copies of some bytes.
    assert found["GPU by direct"].status == "note"
    assert 'transport="block" may be' in found["GPU by direct"].advice
    assert "nvidia-smi" in found["GPU copies"].advice


def test_slow_ones_are_told_what_to_do(device, monkeypatch):
    speeds = iter([5e9, 4e9, 1e9])
    monkeypatch.setattr(gpu, "_speed", lambda accelerator, call: call() is None or next(speeds))
    found = findings(device)
    assert [(found[name].value[:8], found[name].status) for name in NAMES[-3:]] == [
        ("4 GB/s, ", "ok"),
        ("1 GB/s, ", "note"),
        ("5 GB/s o", "note"),
    ]
    assert "set_num_threads" in found["GPU by block"].advice


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("Triton is not installed, which comes with torch's builds for CUDA", "pip install triton"),
        ("there is no C compiler, which Triton needs (gcc, clang, or the one that CC names)", "apt install gcc"),
        ("Triton cannot write to its cache '/x' (TRITON_CACHE_DIR names another)", "export TRITON_CACHE_DIR="),
        ("the CUDA driver cannot be used (libcuda.so.1: cannot open)", "docker run --gpus all"),
        ("this is WSL", 'transport="block"'),
    ],
)
def test_an_obstacle(device, reason, remedy):
    device.reason = reason
    found = findings(device)
    assert list(found) == ["GPU", "GPU reads the host", "GPU by block", "GPU copies"]
    it = found["GPU reads the host"]
    assert (it.value, it.status) == (f"impossible: {reason}", "note")
    assert remedy in it.advice
    assert it.advice.endswith('DeviceLoader copies batches through the host (transport="block").')
    assert found["GPU by block"].status == "ok"


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("code", [1, 2, 801])
def test_registrations_that_are_refused(device, code):
    device.refuses = lambda address, nbytes: code
    found = findings(device)
    assert list(found) == [name for name in NAMES if "fork" not in name]
    for name in ("GPU takes RAM", "GPU takes shared memory", "GPU by direct"):
        assert found[name].status == "note"
        assert str(code) in found[name].value
        assert found[name].advice
    assert found["GPU takes files on a disk"][1:] == ("no, as expected: the host copies their rows", "ok", "")
    assert found["GPU by block"].status == "ok"


@pytest.mark.usefixtures("fast")
def test_files_alone_are_refused(device, monkeypatch):
    """As on most machines."""
    made = []
    file_block = gpu.file_block
    monkeypatch.setattr(
        gpu, "file_block", lambda path, nbytes: made.append((path, file_block(path, nbytes))) or made[-1][1]
    )
    here = Path(tempfile.gettempdir())
    device.refuses = lambda address, nbytes: (
        801 if any(one.tensor.data_ptr() == address and path.parent == here for path, one in made) else None
    )
    found = findings(device)
    assert found["GPU takes shared memory"].value == "yes"
    assert found["GPU takes files on a disk"].value.startswith("no, as expected")
    assert all(it.status == "ok" for it in found.values())


@pytest.mark.usefixtures("fast")
def test_no_shared_memory(device, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "SHARED", tmp_path / "none")
    assert findings(device)["GPU takes shared memory"].status == "note"


@pytest.mark.usefixtures("fast")
def test_a_capture_that_is_refused(device):
    device.capture_refused = "CUDA error: operation not permitted when stream is capturing"
    found = findings(device)
    assert found["GPU by direct"].status == "note"
    assert "not permitted" in found["GPU by direct"].value
    assert found["GPU by block"].status == "ok"


@pytest.mark.usefixtures("fast")
def test_memory_that_cannot_be_registered_again_after_a_fork(device, monkeypatch):
    """The loader goes on through the host, if it may; here it was told not to."""
    fork_while = gpu._fork_while

    def fork(work):
        fork_while(work)
        device.refuses = lambda address, nbytes: 2

    monkeypatch.setattr(gpu, "_fork_while", fork)
    it = findings(device)["GPU by direct"]
    assert it.status == "note"
    assert "fails:" in it.value


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("when", ["before", "after a fork"])
def test_wrong_rows(device, monkeypatch, when):
    hand_out, forked = DirectReader.hand_out, []
    fork_while = gpu._fork_while
    monkeypatch.setattr(gpu, "_fork_while", lambda work: (fork_while(work), forked.append(1)))

    def torn(reader, queued, **kwargs):
        batch = hand_out(reader, queued, **kwargs)
        if bool(forked) == (when != "before"):
            batch["bytes"][3, 5] += 1
        return batch

    monkeypatch.setattr(DirectReader, "hand_out", torn)
    found = findings(device)
    it = found["GPU by direct" if when == "before" else "GPU by direct after a fork"]
    assert (it.value, it.status) == ("3 of 3 batches have wrong rows", "BAD")
    assert "report this" in it.advice


@pytest.mark.usefixtures("fast")
def test_a_device_without_memory(device, monkeypatch):
    def full(blocks, batch, block):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Blocks, "send", full)
    it = findings(device)["GPU by block"]
    assert (it.value, it.status) == ("fails: CUDA out of memory", "note")
    assert "rb.sample()" in it.advice


# ---- the command -----------------------------------------------------------------------------------------------------


def checks(*words):
    told = json.loads(CliRunner().invoke(main, ["doctor", "--json", *words]).stdout)
    return told["good"], {it["name"]: it for it in told["checks"] if it["name"].startswith("GPU")}


@pytest.fixture
def module():
    import importlib

    return importlib.import_module("engram.cli.doctor")


def test_without_a_gpu_there_is_one_line(monkeypatch, module):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "_NVIDIA", Path("/none"))
    for words in ((), ("--load",)):
        assert checks(*words)[1] == {"GPU": {"name": "GPU", "value": "no CUDA device", "status": "ok", "advice": ""}}


def test_a_gpu_that_torch_cannot_use(monkeypatch, module, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "_NVIDIA", tmp_path)
    assert "doctor --load" in checks()[1]["GPU"]["advice"]
    assert "Install a torch for CUDA" in checks("--load")[1]["GPU"]["advice"]


@pytest.mark.usefixtures("fast")
def test_the_command_on_a_machine_with_one(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an imitation")
    monkeypatch.setattr("engram.store.device.accelerator.Accelerator", lambda on: device)
    good, found = checks("--load")
    assert good
    assert list(found) == NAMES

    def broken():
        raise RuntimeError("CUDA error: device is lost")

    device.room = broken
    good, found = checks("--load")
    assert good
    assert found["GPU"]["value"] == "fails: CUDA error: device is lost"
