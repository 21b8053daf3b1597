"""Checkpointers and hooks that get something else than they should say so by name."""

import pytest

import engram

CALLS = {
    "done_keys": lambda path: engram.FlatStorageCheckpointer(done_keys=3),
    "reward_keys": lambda path: engram.NestedStorageCheckpointer(reward_keys=3),
    **{
        f"{kind}: {call}: expected a storage": lambda path, kind=kind, call=call: getattr(getattr(engram, kind)(), call)(3, path / "x")
        for kind in ("TensorStorageCheckpointer", "ListStorageCheckpointer", "FlatStorageCheckpointer")
        for call in ("dumps", "loads")
    },
    **{
        f"{hook}: expected a TensorDict, got a dict": lambda path, hook=hook: getattr(engram, hook)()({"obs": 3})
        for hook in ("TED2Flat", "TED2Nested", "Flat2TED", "Nested2TED")
    },
}  # fmt: skip


@pytest.mark.parametrize("said", CALLS)
def test_named(said, tmp_path):
    with pytest.raises(TypeError, match=said):
        CALLS[said](tmp_path)
    assert list(tmp_path.iterdir()) == []
