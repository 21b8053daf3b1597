"""Hooks that cannot be called as they are, raise, or return something else than they should."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from engram import CorruptCheckpoint, IncompatibleCheckpoint, LazyTensorStorage, TED2Flat, TensorDictReplayBuffer


def buffer():
    return TensorDictReplayBuffer(storage=LazyTensorStorage(8))


def rows():
    return TensorDict({"obs": torch.arange(4.0), "x": {"y": torch.arange(4)}}, [4])


def unchanged(data, path=None):
    return data


class Broken(Exception):
    """What a hook raises."""


def raises(data, path=None, out=None):
    raise Broken("on purpose")


# ---- registering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook", [lambda: None, lambda data: data, lambda data, *, out: data, lambda data, out=None: data]
)
def test_a_save_hook_that_cannot_be_called(hook):
    rb = buffer()
    with pytest.raises(
        TypeError, match=r"register_save_hook: expected .* hook\(data, path=folder\), got .*lambda.* takes"
    ):
        rb.register_save_hook(hook)
    assert rb.storage.checkpointer.is_plain


@pytest.mark.parametrize("hook", [lambda: None, lambda data: data, lambda data, path=None: data])
def test_a_load_hook_that_cannot_be_called(hook):
    rb = buffer()
    with pytest.raises(
        TypeError, match=r"register_load_hook: expected .* hook\(data, out=None\), got .*lambda.* takes"
    ):
        rb.register_load_hook(hook)
    assert rb.storage.checkpointer.is_plain


@pytest.mark.parametrize("which", ["save", "load"])
@pytest.mark.parametrize("hook", [3, None, "hook", TensorDict({}, [])])
def test_no_function(which, hook):
    rb = buffer()
    with pytest.raises(TypeError, match=rf"TensorStorageCheckpointer: register_{which}_hook: expected a function"):
        getattr(rb, f"register_{which}_hook")(hook)
    assert rb.storage.checkpointer.is_plain


class AnyCall:
    def __call__(self, data, **kwargs):
        return data


@pytest.mark.parametrize("hook", [TED2Flat(), AnyCall(), lambda *a, **k: a[0], lambda data, path=None, more=3: data])
def test_hooks_that_can_be_called(hook):
    buffer().register_save_hook(hook)


def test_a_function_whose_signature_nobody_knows():
    buffer().register_save_hook(max)  # of C, without a signature: its call says what is wrong


# ---- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [3, None, {"obs": torch.zeros(4)}, torch.zeros(4)])
def test_a_save_hook_returns_something_else(tmp_path, odd):
    rb = buffer()
    rb.extend(rows())
    rb.register_save_hook(lambda data, path=None: odd)
    with pytest.raises(
        TypeError, match=rf"expected a TensorDict from .*lambda.*, got {type(odd).__name__}. Return one"
    ):
        rb.dumps(tmp_path / "dump")
    assert list(tmp_path.iterdir()) == []
    assert len(rb) == 4


def nothing(data, path=None):
    return TensorDict({}, [8])


def no_rows(data, path=None):
    return data[:0]


def text_alone(data, path=None):
    return TensorDict({"text": "rows"}, [])


def nothing_in_place(data, path=None):
    return data.exclude(*data.keys(), inplace=True)


@pytest.mark.parametrize("hook", [nothing, no_rows, text_alone, nothing_in_place])
def test_a_save_hook_returns_nothing(tmp_path, hook):
    """Which would be found out when it is loaded, and the rows are gone."""
    rb = buffer()
    rb.extend(rows())
    rb.register_save_hook(unchanged)
    rb.dumps(tmp_path / "dump")
    rb.register_save_hook(hook)
    for dump in (rb.dumps, rb.storage.dumps):
        path = tmp_path / ("dump" if dump == rb.dumps else "rows")
        with pytest.raises(
            ValueError,
            match=rf"dumps: expected tensors of 4 slots from the save hooks, .*unchanged.*, .*{hook.__name__}.*got none",
        ):
            dump(path)
    assert [path.name for path in tmp_path.iterdir()] == ["dump"], "the older dump is still there"
    assert len(rb) == 4
    other = buffer()
    other.register_load_hook(lambda data, out=None: data)
    other.loads(tmp_path / "dump")
    assert other[:]["obs"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_rows_without_elements_are_saved(tmp_path):
    rb, other = buffer(), buffer()
    rb.extend(TensorDict({"obs": torch.zeros(4, 0)}, [4]))
    rb.register_save_hook(unchanged)
    rb.dumps(tmp_path / "dump")
    other.register_load_hook(lambda data, out=None: data)
    other.loads(tmp_path / "dump")
    assert other[:]["obs"].shape == (4, 0)


def test_a_save_hook_raises(tmp_path):
    rb = buffer()
    rb.extend(rows())
    rb.register_save_hook(raises)
    with pytest.raises(Broken, match="on purpose") as caught:
        rb.dumps(tmp_path / "dump")
    assert any("save hook" in note and "raises" in note for note in caught.value.__notes__)
    assert list(tmp_path.iterdir()) == []


# ---- loading -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    rb = buffer()
    rb.extend(rows())
    rb.register_save_hook(unchanged)
    rb.dumps(tmp_path / "dump")
    rb.storage.dumps(tmp_path / "rows")
    return tmp_path


def refuse(saved, hook, error, match):
    """Both ways of loading raise, and change nothing."""
    rb = buffer()
    rb.extend(rows()[:2] + 7)
    rb.register_load_hook(hook)
    for load, path in ((rb.loads, "dump"), (rb.storage.loads, "rows")):
        with pytest.raises(error, match=match) as caught:
            load(saved / path)
        assert not isinstance(caught.value, CorruptCheckpoint)
        assert rb[:]["obs"].tolist() == [7.0, 8.0]
    return caught.value


@pytest.mark.parametrize("odd", [3, None, {"obs": torch.zeros(4)}, torch.zeros(4)])
def test_a_load_hook_returns_something_else(saved, odd):
    match = rf"load: expected a TensorDict from .*lambda.*, got {type(odd).__name__}. Return one"
    refuse(saved, lambda data, out=None: odd, TypeError, match)


@pytest.mark.parametrize("wrong", [KeyError("no such key"), ZeroDivisionError("by zero"), Broken("on purpose")])
def test_a_load_hook_raises(saved, wrong):
    """Its own exception, which says nothing about the folder."""

    def hook(data, out=None):
        raise wrong

    error = refuse(saved, hook, type(wrong), wrong.args[0])
    assert any("load hook" in note for note in error.__notes__)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data.select("obs"), r"\('x', 'y'\) int64 of shape \[\] from the hooks, got none"),
        (lambda data: data[:2], r"at least 4 rows from the hooks, got the batch size \[2\]"),
        (lambda data: data.clone().set("obs", data["obs"].double()), r"\('obs',\) float32 .* got torch.float64"),
        (lambda data: TensorDict({}, [8]), "at least 4 rows from the hooks, got"),
        (lambda data: TensorDict({"obs": torch.zeros(4)}, []), r"batch size \[\]"),
    ],
)
def test_a_load_hook_returns_other_rows(saved, change, match):
    refuse(saved, lambda data, out=None: change(data), IncompatibleCheckpoint, match)


@pytest.mark.parametrize("odd", [torch.zeros(8, dtype=torch.float8_e8m0fnu), "text"])
def test_a_load_hook_returns_what_cannot_be_stored(saved, odd):
    """Where the storage was not written yet, its fields are what the hook returns."""
    (saved / "rows" / ".engram").rename(saved / "aside")
    rb = buffer()
    rb.register_load_hook(lambda data, out=None: data.clone().set("odd", odd))
    with pytest.raises(IncompatibleCheckpoint, match=r"\('odd',\): expected a tensor .* from the hooks, got"):
        rb.storage.loads(saved / "rows")
    assert len(rb) == 0


# ---- another size ------------------------------------------------------------------------------------------------------


def test_a_layout_of_another_size(tmp_path):
    """The advice to convert is for what can be converted."""
    rb, other = buffer(), TensorDictReplayBuffer(storage=LazyTensorStorage(9))
    rb.extend(rows())
    rb.register_save_hook(unchanged)
    rb.dumps(tmp_path / "hooked")
    other.register_load_hook(lambda data, out=None: data)
    for convert in (False, True):
        with pytest.raises(IncompatibleCheckpoint, match="got 8. .* saved without a layout or hooks, with rb.loads"):
            other.loads(tmp_path / "hooked", convert=convert)
    plain = buffer()
    plain.extend(rows())
    plain.dumps(tmp_path / "plain")
    other.loads(tmp_path / "plain", convert=True)
    assert len(other) == 4
