"""The public names, and what importing them costs."""

import ast
import builtins
import importlib
import importlib.resources
import importlib.util
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import engram
from engram import errors

SOURCES = sorted(Path(str(importlib.resources.files(engram))).rglob("*.py"))
#: Of an extra that wheels are tested without.
OF_RAY = {"engram.remote.shards", "engram.serving.actors"}
LEFT_OUT = {"engram._core"} | (set() if importlib.util.find_spec("ray") else OF_RAY)
LEFT_OUT |= set() if importlib.util.find_spec("transfer_queue") else {"engram.adapters.transfer_queue"}
OF_SB3 = {
    f"engram.adapters.sb3{name}" for name in ("", ".algorithms", ".buffers", ".hindsight", ".prioritized", ".rows")
}
LEFT_OUT |= set() if importlib.util.find_spec("stable_baselines3") else OF_SB3
LEFT_OUT |= set() if importlib.util.find_spec("tianshou") else {"engram.adapters.tianshou"}
LEFT_OUT |= {"engram.adapters.rllib"}  # Ray may be there without what RLlib needs: tests/doors imports it
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(engram.__path__, "engram.")
    if not module.name.endswith("__main__") and module.name not in LEFT_OUT
)


def test_the_list():
    """All names of the stub. Those that were released may not go: ``tests/structure/public_names.json`` has them."""
    stub = ast.parse(importlib.resources.files(engram).joinpath("__init__.pyi").read_text())
    names = [name.asname for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert dir(engram) == engram.__all__ == sorted(names)


@pytest.mark.parametrize("name", engram.__all__)
def test_every_name_is_there_and_explained(name):
    value = getattr(engram, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)
        assert value.__doc__, f"{name} has no docstring of its own"
        assert value.__name__ == name


def test_unknown_names():
    with pytest.raises(AttributeError, match="Prioritised"):
        engram.Prioritised  # noqa: B018


@pytest.mark.parametrize("module", MODULES)
def test_lists_of_modules(module):
    loaded = importlib.import_module(module)
    assert loaded.__doc__, f"{module} does not say what it is"
    for name in getattr(loaded, "__all__", []):
        assert hasattr(loaded, name), f"{module}.{name}"


def test_public_methods_of_buffers_are_explained():
    for cls in (engram.ReplayBuffer, engram.TensorDictReplayBuffer):
        for name, member in inspect.getmembers(cls):
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{cls.__name__}.{name}"


def test_types_ship():
    assert importlib.resources.files(engram).joinpath("py.typed").is_file()


def test_version():
    assert [part.isdecimal() for part in engram.__version__.split(".")[:3]] == [True] * 3


def test_importing_is_light_and_changes_nothing():
    program = """
import json, signal, sys, threading, warnings
before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
import engram
found = {
    "heavy": sorted({"torch", "tensordict", "numpy", "msgspec"} & set(sys.modules)),
    "signals": all(signal.getsignal(s) is before[s] for s in before),
    "threads": threading.active_count(),
    "names": len(dir(engram)),
}
import engram.format.schema
found["format"] = sorted({"torch", "tensordict", "numpy"} & set(sys.modules))
engram.EngramError, engram.RowError
found["errors"] = sorted({"torch", "tensordict", "numpy"} & set(sys.modules))
engram.ReplayBuffer
found["handlers"] = all(signal.getsignal(s) is before[s] for s in before)
print(json.dumps(found))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == {
        "heavy": [],
        "signals": True,
        "threads": 1,
        "names": len(engram.__all__),
        "format": [],
        "errors": [],
        "handlers": True,
    }
    assert out.stderr == ""


@pytest.mark.parametrize(
    ("n", "kind"), [(0, ValueError), (-1, ValueError), (1025, ValueError), ("2", TypeError), (True, TypeError)]
)
def test_numbers_of_threads(n, kind):
    before = engram.num_threads()
    with pytest.raises(kind, match="set_num_threads"):
        engram.set_num_threads(n)
    assert engram.num_threads() == before >= 1


# ---- exceptions ----------------------------------------------------------------------------------------------------------


def raised():
    """(file, line, class name) of everything the library raises by name; programs end as click wants it."""
    for path in SOURCES:
        if path.parent.name == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                call = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if isinstance(call, ast.Name | ast.Attribute):
                    yield path.name, node.lineno, call.id if isinstance(call, ast.Name) else call.attr


#: Errors that are caught within the package, or are ones of the tree.
INTERNAL = (
    "Changed",
    "DriverError",
    "Final",
    "NoRoom",
    "NoRows",
    "NotAdmitted",
    "NotDirect",
    "NotOnce",
    "RowGone",
    "TakesNone",
    "NotRegistered",
    "OutOfOrder",
    "StorageKeyNotFoundError",  # TransferQueue's, by which its callers know a key that was cleared
    "TooMany",
    "Untrusted",
    "WrongCount",
    "_AnotherStore",
    "_Changed",
    "_ReplacedAgain",
)


def test_everything_raised_is_in_the_tree_or_builtin():
    found = list(raised())
    assert len(found) > 50
    for file, line, name in found:
        if name.lstrip("_")[0].islower():
            continue  # a variable that holds one, or a function that makes one
        builtin = getattr(builtins, name, None)
        assert name in (*errors.__all__, *INTERNAL) or (builtin and issubclass(builtin, Exception)), (
            f"{file}:{line} raises {name}"
        )
        assert name != "Exception", f"{file}:{line}"
        assert name != "AssertionError" or file == "contract.py", f"{file}:{line}"  # contracts are tests


def test_every_exception_derives_from_ours_and_from_a_builtin():
    assert errors.__all__ == sorted(errors.__all__)
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert issubclass(cls, errors.EngramError)
        assert getattr(engram, name) is cls
        if cls is not errors.EngramError:
            (builtin,) = [base for base in cls.__bases__ if base.__module__ == "builtins"]
            line = next(line for line in errors.__doc__.splitlines() if f" {name} " in line)
            assert builtin.__name__ in line, "the tree in the docstring is out of date"


def test_every_exception_is_used():
    used = {name for _, _, name in raised()}
    text = "\n".join(path.read_text() for path in SOURCES)
    for name in set(errors.__all__) - {"EngramError"}:
        assert name in used or f"= {name} if" in text or f"{name}(why)" in text, f"{name} is never raised"
