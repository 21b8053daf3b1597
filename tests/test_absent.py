"""Public names of TorchRL's that engram does not have: each says so in a sentence, and one that is misspelt has a near name."""

import importlib
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import engram
from engram import LazyTensorStorage, ReplayBuffer
from engram._support import absent

ROOT = Path(engram.__file__).parent
#: What TorchRL's modules have, in lines of words.
FROZEN = json.loads(Path(__file__).with_name("torchrl_names.json").read_text())
NAMES = {module: " ".join(lines).split() for module, lines in FROZEN.items()}
ABSENT = sorted({name for names in NAMES.values() for name in names if name not in engram.__all__})


def hint_on(name):
    with pytest.raises(AttributeError, match=rf"^module 'engram' has no attribute '{name}'") as raised:
        getattr(engram, name)
    return raised.value


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_torchrls(module):
    there = pytest.importorskip(module)
    assert {name for name in there.__all__ if not name.startswith("_")} == set(NAMES[module])


def test_each_name_that_is_not_here_says_so():
    assert len(ABSENT) > 140
    for name in ABSENT:
        text = str(hint_on(name)).partition(". ")[2]
        assert text.startswith("It is a name of TorchRL's that engram does not have. "), name
        assert text.endswith("."), name


@pytest.mark.parametrize("name", absent._REMOVED)
def test_a_name_that_was_removed_says_what_to_use(name):
    assert name not in engram.__all__
    assert ". It was removed. " in str(hint_on(name))


def test_the_table_has_no_other_names():
    beside = {name for (module, _), names in absent._ELSEWHERE.items() if module not in NAMES for name in names.split()}
    assert {*absent._MODULES} - beside <= {*ABSENT}
    assert not {*absent._MODULES} & {*absent._INSTEAD}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchRL's own modules, when they are first imported
def test_they_are_where_the_sentences_say():
    pytest.importorskip("torchrl")
    for name, (module, _) in absent._MODULES.items():
        assert str(hint_on(name)).partition("Import it from ")[2].startswith(f"{module}.")
        if module != "torchrl.objectives.llm":  # which needs more than TorchRL
            assert hasattr(importlib.import_module(module), name)


def test_a_storage_in_redis_is_a_name_that_says_what_to_use():
    from engram import Storage, StoreStorage  # as programs do before they choose

    assert not issubclass(StoreStorage, Storage)
    for make in (lambda: StoreStorage(100), lambda: StoreStorage(max_size=100, host="localhost", port=6379)):
        with pytest.raises(NotImplementedError, match=r"engram serve DIR.*ReplayBuffer\.connect"):
            make()
    with pytest.raises(NotImplementedError, match="engram serve DIR"):
        ReplayBuffer(storage=StoreStorage)


def test_only_transforms_are_said_to_be_taken():
    transforms = pytest.importorskip("torchrl.envs.transforms")
    for name, (module, what) in absent._MODULES.items():
        if module == "torchrl.envs.transforms":
            there = getattr(transforms, name)
            assert bool(what) == (isinstance(there, type) and issubclass(there, transforms.Transform)), name


@pytest.mark.parametrize(("name", "near"), [("LazyTensorStorag", "LazyTensorStorage"), ("ReplayBufer", "ReplayBuffer")])
def test_a_misspelt_name_has_a_near_one(name, near):
    error = hint_on(name)
    assert str(error) == f"module 'engram' has no attribute '{name}'"
    assert (error.name, error.obj) == (name, engram)
    shown = subprocess.run(
        [sys.executable, "-c", f"import engram; engram.{name}"], capture_output=True, text=True, check=False
    )
    assert f"Did you mean: '{near}'?" in shown.stderr  # which the interpreter looks for


def test_other_names_are_no_names():
    assert str(hint_on("Foo")) == "module 'engram' has no attribute 'Foo'"
    with ReplayBuffer(storage=LazyTensorStorage(2)) as rb:
        assert not hasattr(rb, "ReplayBufferEnsemble")


# ---- modules that moved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [f"engram.{name}" for name in absent._MOVED])
def test_modules_are_imported_by_the_paths_that_they_had(path):
    if absent.moved_to(path) in {"engram.remote.shards", "engram.serving.actors"}:
        pytest.importorskip("ray")
    was, there = importlib.import_module(path), importlib.import_module(absent.moved_to(path))
    names = {name for name, value in vars(there).items() if not (name.startswith("__") or inspect.ismodule(value))}
    assert all(getattr(was, name) is getattr(there, name) for name in names)


def test_modules_inside_of_folders_that_moved():
    from engram.members import components as samplers
    from engram.members.replay_buffer import ReplayBufferEnsemble

    assert ReplayBufferEnsemble is engram.ReplayBufferEnsemble
    assert samplers.SamplerEnsemble is engram.SamplerEnsemble
    with pytest.raises(ModuleNotFoundError, match=r"engram\.members\.nothing"):
        importlib.import_module("engram.ensembles.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"engram\.nothing"):
        importlib.import_module("engram.nothing")


def test_no_module_is_where_others_were():
    there = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    assert not there & {name for old in absent._MOVED for name in (old, f"{old}.__init__")}


def test_names_that_a_module_had():
    for module, homes in absent._MOVED_NAMES.items():
        was = importlib.import_module(module)
        for there, names in homes.items():
            now = importlib.import_module(there)
            assert all(getattr(was, name) is getattr(now, name) for name in names.split())
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nothing'"):
            _ = was.Nothing


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("engram.expanders.hindsight", "HindsightStrategy"),
        ("engram.expanders.n_step", "NStep"),
        ("engram.samplers", "SliceSampler"),
        ("engram.samplers.slices", "StreamingSliceSampler"),
        ("engram.samplers.window_spec", "WindowSpec"),
        ("engram.units.sequence", "Sequence"),
    ],
)
def test_pickles_name_classes_by_the_paths_that_they_had(module, name):
    assert pickle.loads(f"c{module}\n{name}\n.".encode()) is getattr(engram, name)
