"""TorchRL's recipes, run with engram's buffers for a few steps, each in a process of its own."""

import functools
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

import engram
from tests.recipes.rewriting import BUFFERS, rewritten
from tests.recipes.settings import RECIPES

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.py")
LIMIT_S = 600


@dataclass
class Result:
    """What came of a recipe: ``rows`` written and ``batches`` drawn by the buffers of its main process."""

    recipe: str
    outcome: str
    why: str = ""
    rows: int = 0
    batches: int = 0
    classes: list[str] = field(default_factory=list)

    @property
    def ran(self):
        return self.outcome == "ran"


@functools.cache
def names():
    """Names of TorchRL's replay modules that engram has, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [importlib.import_module(f"{BUFFERS}{part}") for part in ("", ".samplers", ".storages", ".writers")]
    return sorted({name for module in modules for name in dir(module)} & set(engram.__all__))


def at_hand():
    """The folder of recipes that torchrl's wheel installs, or None."""
    found = importlib.util.find_spec("torchrl")
    folder = None if found is None or found.origin is None else Path(found.origin).parents[1] / "sota-implementations"
    return folder if folder is not None and folder.is_dir() else None


def source_of(folder):
    """Where the recipes come from: the commit of a checkout, else the version of the wheel."""
    if folder == at_hand():
        return f"the wheel of torchrl {version('torchrl')}"
    asked = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return f"commit {asked.stdout.strip()}" if asked.returncode == 0 else "a folder without a commit"


def run(folder, name):
    """Rewrite the recipe into a folder of its own, run it there with small settings, and say what came of it."""
    recipe = RECIPES[name]
    script = folder / recipe.script
    if not script.is_file():
        return Result(name, "skipped", f"there is no {recipe.script}")
    missing = [module for module in recipe.needs if importlib.util.find_spec(module) is None]
    if missing:
        return Result(name, "skipped", f"needs {', '.join(missing)}")
    if recipe.cuda and not torch.cuda.is_available():
        return Result(name, "skipped", "needs a GPU of CUDA")
    with tempfile.TemporaryDirectory(prefix="engram-recipe-") as place:
        return _run_in(Path(place), script, name, recipe)


def _run_in(place, script, name, recipe):
    shutil.copytree(script.parent, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    replaced = set()
    for file in place.rglob("*.py"):
        found = rewritten(file.read_text(encoding="utf-8"), names())
        file.write_text(found.text, encoding="utf-8")
        replaced |= found.replaced
    if not replaced:
        return Result(name, "failed", "it imports no buffer class")
    for file, settings in recipe.settings.items():
        (place / file).write_text(json.dumps(settings))  # JSON is YAML
    told = place / "told.json"
    command = [sys.executable, str(DRIVER), str(told), script.name, *recipe.arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    environment |= {"HYDRA_FULL_ERROR": "1", "ENGRAM_LOCAL_DATA": recipe.data, "HOME": str(place)}
    try:
        ended = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Result(name, "failed", f"it ran for more than {LIMIT_S} s")
    if ended.returncode or not told.exists():
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return Result(name, "failed", "\n".join(lines[-12:]) or f"it ended with {ended.returncode}")
    said = json.loads(told.read_text())
    if not said["rows"] or not said["batches"]:
        return Result(name, "failed", f"engram's buffers were not used: {said}")
    return Result(name, "ran", "", said["rows"], said["batches"], said["classes"])


def table(results):
    """The results as a table of Markdown."""
    lines = ["| recipe | | rows | batches | engram's classes |", "|---|---|--:|--:|---|"]
    for result in results:
        short = f"{result.outcome}{': ' if result.why else ''}{result.why.splitlines()[-1] if result.why else ''}"
        lines.append(f"| {result.recipe} | {short} | {result.rows} | {result.batches} | {', '.join(result.classes)} |")
    return "\n".join(lines)
