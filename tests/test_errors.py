import inspect

import pytest

import engram
from engram import errors

BUILTINS = {
    "RowError": IndexError,
    "NoSampleable": RuntimeError,
    "PriorityError": ValueError,
    "WriterStalled": TimeoutError,
    "RateLimited": TimeoutError,
    "ReadOnlyStore": RuntimeError,
    "StoreInUse": RuntimeError,
    "ForkedHandle": RuntimeError,
    "IncompatibleStore": ValueError,
    "CorruptStore": RuntimeError,
    "UncleanStore": RuntimeError,
    "IncompatibleCheckpoint": ValueError,
    "CorruptCheckpoint": RuntimeError,
    "DatasetError": ValueError,
    "RankFailed": RuntimeError,
}


@pytest.mark.parametrize("name", BUILTINS)
def test_every_class_is_also_the_builtin_one_would_catch(name):
    kind = getattr(errors, name)
    assert kind.__bases__ == (errors.EngramError, BUILTINS[name])
    assert getattr(engram, name) is kind
    assert inspect.getdoc(kind)


def test_the_tree_in_the_docstring_is_the_tree():
    listed = [line.split()[1:3] for line in errors.__doc__.split("\n") if "──" in line]
    assert listed == [[name, builtin.__name__] for name, builtin in BUILTINS.items()]
    assert sorted([*BUILTINS, "EngramError"]) == errors.__all__
