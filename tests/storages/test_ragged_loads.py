"""What a storage that was never written declares of its ragged fields holds for what is loaded into it."""

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, Ragged, ReplayBuffer
from engram.errors import IncompatibleCheckpoint

LENGTHS = [5, 0, 40, 7]


def saved(way, tmp_path):
    """Loads a buffer of rows of up to 40 items, of at most 100, into another."""
    source = ReplayBuffer(storage=LazyTensorStorage(10, ragged={"tokens": Ragged(torch.int32, max_length=100)}))
    source.extend({"tokens": [torch.full((n,), n, dtype=torch.int32) for n in LENGTHS]})
    if way == "state":
        state = source.state_dict()
        return lambda target: target.load_state_dict(state)
    source.dumps(tmp_path / "dump")
    return lambda target: target.loads(tmp_path / "dump")


@pytest.mark.parametrize("way", ["state", "dump"])
@pytest.mark.parametrize("ragged_bytes", [None, 40_000])
@pytest.mark.parametrize("place", ["RAM", "directory"])
@pytest.mark.parametrize(("most", "fits"), [(100, True), (3000, True), (41, True), (40, True), (39, False), (1, False)])
def test_a_load_keeps_the_max_length_that_was_declared(most, fits, place, ragged_bytes, way, tmp_path):
    options = {"ragged": {"tokens": Ragged(torch.int32, max_length=most)}, "ragged_bytes": ragged_bytes}
    storage = (
        LazyTensorStorage(10, **options)
        if place == "RAM"
        else LazyMemmapStorage(10, scratch_dir=tmp_path / "s", **options)
    )
    target, load = ReplayBuffer(storage=storage), saved(way, tmp_path)
    if not fits:
        with pytest.raises(
            (IncompatibleCheckpoint, ValueError), match=f"expected (at most|0 to) {most} items.* got (40|5)"
        ):
            load(target)
        assert not storage.initialized
        return
    load(target)
    assert [row.tolist() for row in target[:]["tokens"].unbind()] == [[n] * n for n in LENGTHS]
    with pytest.raises(RuntimeError, match=f"max_length={most:,}"):
        target.add({"tokens": torch.zeros(most + 1, dtype=torch.int32)})
    target.add({"tokens": torch.ones(most, dtype=torch.int32)})
    assert [len(row) for row in target[:]["tokens"].unbind()][-1] == most
    target.close()
