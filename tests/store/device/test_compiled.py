"""What the kernels become for a GPU, of which none is needed here."""

import json
import os
import subprocess
import sys

import pytest


def found(program, capability, cache):
    """What is in the kernels that a program compiles."""
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", f"tests.store.device.{program}", str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.stress(sample=1)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_rows_on_a_device(capability, tmp_path):
    all_found = found("compiled_rows", capability, tmp_path)
    assert {entry["kernel"] for entry in all_found} == {"read", "place", "record", "update", "claim"}
    for entry in all_found:
        assert entry["unrounded"] == entry["acquiring loads"] == 0, entry
        powers = entry["kernel"] == "update" or entry["constants"].get("TREE")
        assert powers or entry["fused"] == 0, entry  # exp and log have some


@pytest.mark.stress(sample=1)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_cached_load_and_no_atomic_reaches_memory_of_the_host(capability, tmp_path):
    all_found = found("compiled", capability, tmp_path)
    assert {entry["kernel"] for entry in all_found} == {"extents", "draw", "gather", "repair", "update", "publish"}
    for entry in all_found:
        assert entry["plain loads"] == 0, entry
        assert entry["volatile loads"] > 0, entry
        assert entry["acquiring loads"] == entry["atomics of tickets"], entry
        assert entry["atomics"] == entry["other atomics"], entry
        assert entry["of the device"], entry
        assert entry["unrounded"] == 0, entry
        if entry["kernel"] in ("draw", "repair"):
            assert entry["acquiring loads"] > 0, entry
            prioritized = entry["constants"]["KIND"] == 1
            assert prioritized or entry["fused"] == 0, entry  # exp and log of weights have some
        else:
            assert entry["acquiring loads"] == entry["fused"] == 0, entry


def test_the_package_loads_no_triton():
    code = "import sys, engram, engram.store.device.chain; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_on_the_cpu_kernels_need_the_interpreter():
    env = {**os.environ}
    env.pop("TRITON_INTERPRET", None)
    code = "import torch; from engram.store.device.chain import kernels_of; kernels_of(torch.device('cpu'))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "RuntimeError: kernels: expected a CUDA device, got cpu. Set TRITON_INTERPRET=1" in done.stderr
