"""Checkpointers and hooks that get something else than they should say so by name."""

import pytest

import engram

CALLS = {
    "done_keys": lambda path: engram.FlatStorageCheckpointer(done_keys=3),
    "reward_keys": lambda path: engram.NestedStorageCheckpointer(reward_keys=3),
    "checkpoint_file": lambda path: engram.H5StorageCheckpointer(checkpoint_file=3),
    "h5_kwargs": lambda path: engram.H5StorageCheckpointer(h5_kwargs=3),
    "h5_kwargs: expected keywords of create_dataset, got 'gzip'": lambda path: engram.H5StorageCheckpointer(h5_kwargs="gzip"),
    **{
        f"{kind}: {call}: expected a storage": lambda path, kind=kind, call=call: getattr(getattr(engram, kind)(), call)(3, path / "x")
        for kind in ("TensorStorageCheckpointer", "ListStorageCheckpointer", "FlatStorageCheckpointer", "H5StorageCheckpointer")
        for call in ("dumps", "loads")
    },
    **{
        f"H5StorageCheckpointer: {call}: expected a storage of": lambda path, call=call: getattr(engram.H5StorageCheckpointer(), call)(
            3, path / "x.h5"
        )
        for call in ("dumps", "loads")
    },
    **{
        f"{hook}: expected a TensorDict, got a dict": lambda path, hook=hook: getattr(engram, hook)()({"obs": 3})
        for hook in ("TED2Flat", "TED2Nested", "Flat2TED", "Nested2TED", "H5Split", "H5Combine")
    },
}  # fmt: skip


@pytest.mark.parametrize("said", CALLS)
def test_named(said, tmp_path):
    with pytest.raises(TypeError, match=said):
        CALLS[said](tmp_path)
    assert list(tmp_path.iterdir()) == []
