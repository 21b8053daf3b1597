"""Every example that is shown works: in the README, in docs/ and in docstrings."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import engram
from tests.test_api import MODULES

ROOT = Path(__file__).parents[1]
#: tests/cluster runs it, in its cluster.
ON_RAY = ROOT / "docs/ray.md"
#: tests/cluster runs it, too.
OF_RAY = "engram.serving.on_ray.RayReplayBuffer"
#: tests/checkpoint/test_recipes.py runs its programs, in two processes each.
ON_RANKS = ROOT / "docs/training-frameworks.md"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ON_RAY, ON_RANKS})
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page)


def run_page(page):
    """The blocks of a page are one program."""
    run_text(page.read_text(), page)


def run_text(text, page):
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        code = "\n" * line + block.group(1)
        if ">>> " in block.group(1):
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), 0)
            run(test, clear=False)
            names.update(test.globs)
        else:
            exec(compile(code, str(page), "exec"), names)


def run(test, *, clear=True):
    said = []
    failed, _ = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append, clear_globs=clear)
    assert not failed, "".join(said)


@pytest.mark.parametrize("name", ["engram", *MODULES])
def test_examples_of_a_module(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for test in examples_of(name):
        if not test.name.startswith(OF_RAY):
            run(test)


def examples_of(name):
    """Those in the docstrings of a module."""
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), name)
    return [test for test in found if test.examples]


def test_the_classes_show_how_they_are_used():
    for name in (
        "ReplayBuffer",
        "TensorDictReplayBuffer",
        "LazyTensorStorage",
        "LazyMemmapStorage",
        "ListStorage",
        "TensorStorage",
        "RandomSampler",
        "SamplerWithoutReplacement",
        "RoundRobinWriter",
        "TensorDictMaxValueWriter",
        "ImmutableDatasetWriter",
        "Checkpointer",
        "plan",
    ):
        assert ">>> " in getattr(engram, name).__doc__, name
