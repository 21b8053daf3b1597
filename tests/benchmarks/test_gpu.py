"""bench_gpu without a GPU: all of it on an imitated one, in small, as it will run for the first time where one is lent for minutes."""

import inspect
import json
from unittest import mock

import pytest
import torch

from benchmarks import bench_gpu, gpu, gpu_host, rivals
from tests.device import places

TINY = gpu.Sizes(
    rows=60,
    frames=16,
    large_frames=16,
    frame=(1, 4, 4),
    batch=4,
    appended=8,
    calls=1,
    blocks=1,
    steps=1,
    waits=3,
    seconds=0.3,
    rate=2_000,
)  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(gpu_host, "STEP_S", 1e-4)
    made = places.on_cpu(monkeypatch)
    yield made
    assert made.imitated.faults == []


#: What the issue asks for, and what else is measured.
KEYS = {
    "small": [
        "small/uniform",
        "small/uniform/graph",
        "small/uniform/stats",
        "small/prioritized",
        "small/prioritized/graph",
        "small/prioritized/stats",
    ],
    "direct": ["frames/RAM", "frames/time", "frames/shared-memory", "frames/RAM-large"],
    "block": ["block/directory", "block/directory/to", "block/transforms", "block/transforms/to"],
    "learner": [
        "learner/uniform",
        "learner/prioritized",
        "learner/sample().to",
        "learner/TorchRL",
        "learner/uniform/graph",
        "learner/prioritized/graph",
    ],
    "calls": [f"device/{name}{of}" for name in ("uniform", "cycle", "extend") for of in ("", "/waits", "/graph")],
    "mirror": ["mirror/learner", "mirror/lag"],
    "waiting": ["waiting/block", "waiting/default"],
    "pinned": [f"pinned/{name}" for name in gpu_host.TRANSFORMS],
}
#: Those that must say whether they reach their floor.
JUDGED = {
    *(key for key in KEYS["small"] if not key.endswith("stats")),
    "frames/RAM",
    "frames/shared-memory",
    *KEYS["block"],
    "learner/uniform",
    "learner/prioritized",
    *KEYS["calls"],
    *KEYS["mirror"],
    "waiting/block",
    *KEYS["pinned"],
}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*there is no accelerator")
@pytest.mark.skipif(torch.cuda.is_available(), reason="make bench-gpu runs it")
@pytest.mark.parametrize(
    ("section", "with_torchrl"), [*((name, True) for name in bench_gpu.SECTIONS), ("direct", False), ("calls", False)]
)
def test_every_section(on_cpu, monkeypatch, tmp_path, capsys, section, with_torchrl):
    if not with_torchrl:
        known = rivals._load
        absent = rivals.Library("TorchRL", None, "absent", ())
        monkeypatch.setattr(rivals, "_load", lambda name: absent if name == "TorchRL" else known(name))
    elif rivals.load()["TorchRL"].module is None:
        pytest.skip("TorchRL is not installed")
    good = bench_gpu.measure(on_cpu, TINY, tmp_path, [section])
    said = capsys.readouterr()
    assert good, said.err
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["gpu"] == "an imitation"
    expected = [key for key in KEYS[section] if with_torchrl or "TorchRL" not in key]
    assert [figure["key"] for figure in found["figures"]] == expected
    for figure in found["figures"]:
        assert (figure["met"] is not None) == (figure["key"] in JUDGED), figure["key"]
        assert bool(figure["floor"]) == (figure["key"] in JUDGED)
        assert figure["measured"]
    assert "floors reached" in said.out
    if section == "small":
        assert all(", direct" in figure["what"] for figure in found["figures"] if not figure["key"].endswith("stats"))
    if section == "direct":
        assert all(", direct" in figure["what"] for figure in found["figures"] if figure["key"] != "frames/time")
    if section in ("direct", "calls"):
        assert any("TorchRL absent" in figure["measured"] for figure in found["figures"]) == (not with_torchrl)
    if section == "block":
        assert all(", block" in figure["what"] for figure in found["figures"])
    if section == "calls":
        assert [figure["measured"] for figure in found["figures"] if figure["key"].endswith("waits")] == ["0"] * 3


def test_a_section_that_fails_leaves_the_others(on_cpu, monkeypatch, tmp_path, capsys):
    def broken(bench):
        bench.add("first", "the first", "1")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def later(bench):
        bench.add("later", "the later", "2", "≥ 1", True)

    monkeypatch.setattr(bench_gpu, "SECTIONS", {"broken": broken, "later": later})
    assert not bench_gpu.measure(on_cpu, TINY, tmp_path, ["broken", "later"])
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert [(figure["key"], figure["met"]) for figure in figures] == [
        ("first", None),
        ("broken", False),
        ("later", True),
    ]
    assert "illegal memory access" in figures[1]["measured"]
    out, err = capsys.readouterr()
    assert "1 of 2 floors reached; missed: broken" in out
    assert "Traceback" in err


def test_it_says_that_there_is_no_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main()
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_what_it_asks_of_cuda_exists(monkeypatch):
    """Calls are checked against torch's own functions, as nothing here can run them."""
    cuda = mock.create_autospec(torch.cuda)
    cuda.current_device.return_value = 0
    cuda.get_device_name.return_value = "none"
    with mock.patch.object(torch, "cuda", cuda):
        it = gpu.Gpu()
        assert it.name == "none"
        assert it.device == torch.device("cuda", 0)
        it.finish()
        done = []
        assert it.captured(lambda: done.append(1)) is cuda.CUDAGraph.return_value.replay
        assert len(done) == 4
        assert it.event().record.called
        it.sleep(3)
        cuda._sleep.assert_called_with(3)
    cuda.synchronize.assert_called_with(torch.device("cuda", 0))
    assert {"fused", "capturable"} <= set(inspect.signature(torch.optim.Adam).parameters)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    assert it.waits(lambda: None, 3) == 0


def test_the_command(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_gpu, "Gpu", lambda: "gpu")
    monkeypatch.setattr(bench_gpu, "measure", lambda *given: asked.append(given) or True)
    for words in (["--quick"], ["--out", str(tmp_path), "--only", "small", "--only", "direct"]):
        monkeypatch.setattr("sys.argv", ["bench_gpu", *words])
        with pytest.raises(SystemExit) as ended:
            bench_gpu.main()
        assert ended.value.code == 0
    assert asked == [
        ("gpu", gpu.QUICK, bench_gpu.RESULTS / "quick", [*bench_gpu.SECTIONS]),
        ("gpu", gpu.Sizes(), tmp_path, ["small", "direct"]),
    ]


def test_wrong_rows_are_refused():
    batch = gpu_host.steps(4)
    gpu_host.check_steps(batch, 4, 4)
    batch["number"][2, 1] += 1
    with pytest.raises(ValueError, match="whole rows"):
        gpu_host.check_steps(batch, 4, 4)
    with pytest.raises(ValueError, match="whole frames"):
        gpu_host._check_frames({"pixels": torch.ones(2, 3), "number": torch.tensor([1, 2])}, 5)


def test_another_library_that_cannot(tmp_path):
    def bench(module):
        return gpu.Bench(None, TINY, {"TorchRL": rivals.Library("TorchRL", module, "1", ())}, tmp_path)

    it = bench("module")
    assert it.beside(lambda module: module.upper)() == "MODULE"
    assert it.why_not == ""
    assert it.beside(lambda module: lambda: 1 // 0) is None
    assert it.why_not == "TorchRL cannot: ZeroDivisionError: integer division or modulo by zero"
    it.add_time("a", "", {"engram": [2.0, 3.0, 5.0], "plain": [4.0]}, "engram", 3)
    assert (
        it.figures[0]["measured"]
        == "3.0 µs (plain 4.0, TorchRL cannot: ZeroDivisionError: integer division or modulo by zero)"
    )
    assert it.figures[0]["met"]
    absent = bench(None)
    assert absent.beside(lambda module: module.upper) is None
    assert absent.why_not == "TorchRL absent"


def test_a_share_of_another_speed(tmp_path):
    it = gpu.Bench(None, TINY, {}, tmp_path)
    taken = {"engram": [10.0, 5.0, 10.0], "copy": [9.0, 4.5, 2.0]}
    it.add_share("a", "", taken, ("engram", "copy"), 0.9)
    it.add_share("b", "", taken, ("engram", "copy"), 0.91)
    assert [(figure["measured"], figure["met"]) for figure in it.figures] == [
        ("90 % (10.0 and 4.5 µs)", True),
        ("90 % (10.0 and 4.5 µs)", False),
    ]
