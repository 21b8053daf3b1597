"""What is installed under which name, what it says of itself, and how a build ends that cannot succeed."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import metadata, packages_distributions, version
from pathlib import Path

import pytest

import engram

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
NAME = "engram-replay"


def listed(key):
    """Values of a list of the workflow's matrix."""
    return re.findall(r'"([^"]+)"', re.search(rf"^ +{key}: \[(.+)\]", WORKFLOW, re.MULTILINE)[1])


def newest_tensordict():
    return re.search(r"^TENSORDICT_NEWEST := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]


def test_the_distribution_is_engram_replay_and_the_import_engram():
    left = set(packages_distributions()["engram"]) - {NAME}
    assert not left, f"installed before it had this name: pip uninstall {' '.join(left)} {NAME}, then make clean"
    assert version(NAME) == engram.__version__


def test_every_text_that_names_the_distribution_names_it_in_full():
    texts = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py"), *ROOT.glob("*.md")]
    for path in [*texts, ROOT / "Makefile", ROOT / "pyproject.toml"]:
        wrong = re.search(r"\bengram\[[a-z]|\binstall +(-U +)?[\"']?engram(?!-replay)\b", path.read_text())
        assert wrong is None, f"{path}: {wrong}"


def test_classifiers_claim_what_is_tested():
    said = metadata(NAME).get_all("Classifier")
    assert [one for one in said if one.startswith("Operating System")] == ["Operating System :: POSIX :: Linux"]
    pythons = {one.rpartition(" :: ")[2] for one in said if re.search(r":: 3\.\d+$", one)}
    built = {f"3.{minor}" for minor in re.findall(r"\bcp3(\d+)-", PYPROJECT["tool"]["cibuildwheel"]["build"])}
    assert pythons == built
    assert min(pythons) == metadata(NAME)["Requires-Python"].removeprefix(">=")


def test_the_workflow_tests_both_ends_of_what_is_admitted():
    needs = {re.match(r"[\w-]+", one)[0]: one for one in metadata(NAME).get_all("Requires-Dist")}
    oldest, newest = listed("tensordict")
    following = int(newest.split(".")[1]) + 1
    assert set(needs["tensordict"].removeprefix("tensordict").split(",")) == {f">={oldest}", f"<0.{following}"}
    assert newest == newest_tensordict()
    assert f"tensordict=={oldest}\n" in (ROOT / "constraints.txt").read_text()
    torches = listed("torch")
    assert needs["torch"] == f"torch>={torches[0].removeprefix('torch==').removesuffix('.0')}"
    assert torches[-1] == "torch"  # the newest


def test_the_extension_needs_no_torch():
    """So one build serves every torch."""
    code = (
        "import engram._core, sys; assert 'torch' not in open('/proc/self/maps').read() and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def configure(tmp_path):
    """What CMake says, in one folder, when it is run with a compiler and options."""
    scripts = Path(sysconfig.get_path("scripts"))
    command = [
        scripts / "cmake",
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]

    def run(path, *options, **environment):
        done = subprocess.run(
            [*command, *options, "-S", ROOT, "-B", tmp_path / "build"],
            env={"PATH": str(path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        return " ".join(done.stderr.split())

    return run


def test_a_build_that_lacks_something_says_what_to_install(configure, tmp_path):
    """And looks for it again: pip keeps the folder of the build."""
    needs = "engram needs a C++20 compiler, found"
    remedy = "install one (Debian, Ubuntu: apt install g++) or name it (CXX=clang++)."
    assert f"{needs} NOTFOUND: {remedy}" in configure(tmp_path)
    older = tmp_path / "older"
    older.write_text(
        '#!/bin/sh\nexec c++ -U__GNUC__ -D__GNUC__=7 "$@"\n'
    )  # CMake concludes from it what the compiler knows
    older.chmod(0o755)
    path = os.environ["PATH"]
    assert f"{needs} {older}: {remedy}" in configure(path, CXX=str(older))
    said = configure(path, "-DPython_INCLUDE_DIR=/nonexistent")
    assert (
        f"the headers of {sys.executable} are missing: install them (Debian, Ubuntu: apt install python3-dev)." in said
    )


def test_on_windows_the_build_says_where_engram_runs():
    code = "import sys, scikit_build_core.build as b; import scikit_build_core.build.wheel; sys.platform = 'win32'; b.build_wheel('none')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert (
        done.stdout == "engram does not run on Windows: install it on Linux, for instance in WSL 2 (wsl --install).\n"
    )
