"""Dumps of TorchRL's with dicts whose keys are ints, or strings of digits: their files have the same names."""

import warnings

import pytest
import torch

from engram import IncompatibleCheckpoint
from tests.storages.test_integer_keys import buffer, filled, said, taken
from tests.torchrl.torchrl_dumps import put


def torchrl_dump(folder, names):
    """What TorchRL 0.14 writes of dicts: ``a.0`` is the key 0, the key "0" or the first item of a list."""
    described = {name: {"dtype": "torch.int64", "shape": [4]} for name in names}
    put(folder / "buffer_metadata.json", {"_batch_size": 2})
    put(folder / "storage" / "storage_metadata.json", {"metadata": described, "is_pytree": True, "len": 4})
    put(folder / "writer" / "metadata.json", {"cursor": 0, "write_count": 4})
    for number, name in enumerate(names):
        path = (folder / "storage").joinpath(*name.split("."))
        put(path.with_name(path.name + ".memmap"), (torch.arange(4) + number).numpy().tobytes())
    return folder


@pytest.mark.parametrize("names", [(3, 5), (1, 0), (0, 1)])
@pytest.mark.parametrize("kind", [int, str])
def test_dumps_of_torchrl_take_the_keys_of_rows_that_are_there(names, kind, tmp_path):
    torchrl_dump(tmp_path, [f"a.{name}" for name in names])
    rb = buffer(4)
    rb.extend({"a": {kind(name): torch.zeros(1).long() for name in names}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.loads(tmp_path)
    assert said(rb[:]) == said({"a": {kind(name): torch.arange(4) + number for number, name in enumerate(names)}})


def test_dumps_of_torchrl_without_a_row_are_read_with_names_which_a_warning_says(tmp_path):
    rb = buffer(4)
    with pytest.warns(UserWarning, match="does not say which keys of dicts were ints: of .*are read as strings"):
        rb.loads(torchrl_dump(tmp_path, ["a.3", "a.5"]))
    assert said(rb[:]) == said({"a": {"3": torch.arange(4), "5": torch.arange(4) + 1}})


def test_dumps_of_torchrl_that_may_hold_lists_are_refused_without_a_row(tmp_path):
    with pytest.raises(IncompatibleCheckpoint, match="lists or in tuples, or in dicts whose keys are ints"):
        buffer(4).loads(torchrl_dump(tmp_path, ["a.0", "a.1"]))


@pytest.mark.filterwarnings("ignore:.*Pickles are never opened")
@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize(
    "tree",
    [
        {3: torch.float32, 5: torch.int64},
        {"a": {0: torch.float32, 1: {"x": torch.bool, -7: torch.int64}}, "b": torch.float32},
        {"3": torch.float32, "5": torch.int64},
        {1: torch.int64, 0: torch.int64},
        {"a": [{0: torch.int64}, {0: torch.int64}]},
    ],
    ids=str,
)
def test_dumps_by_torchrl_come_back(tree, storage, torchrl, tmp_path):
    theirs = torchrl.ReplayBuffer(storage=getattr(torchrl, storage)(8), batch_size=2)
    theirs.extend(filled(tree))
    theirs.dumps(tmp_path)
    rb = buffer(8)
    rb.add(taken(filled(tree, 1), 0))
    rb.loads(tmp_path)
    assert said(rb[:]) == said(filled(tree))
