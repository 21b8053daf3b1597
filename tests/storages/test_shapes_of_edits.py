"""Edits whose values are broadcast over rows with several dimensions, and patches in the shapes that come from writes."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, TensorDictRoundRobinWriter

KINDS = {
    "TensorDict": lambda tensor, *dims: TensorDict({"b": tensor}, list(dims)),
    "dict": lambda tensor, *_: {"b": tensor},
    "tensor": lambda tensor, *_: tensor,
}
INDEXES = [
    ((slice(None), slice(1, 3)), [(2,), (), (1, 2), (3, 1), (3, 2), (1, 1)]),
    ((slice(None), 2), [(3,), (), (1,)]),
    ((1, slice(1, None, 2)), [(2,), (), (1,)]),
    ((1,), [(4,), (), (1,)]),
    ((slice(None), torch.tensor([3, 0])), [(2,), (3, 1)]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("index", "dims"), [(index, dims) for index, all_dims in INDEXES for dims in all_dims])
def test_values_are_broadcast_as_torch_does(make, kind, index, dims):
    row = KINDS[kind]
    rb = ReplayBuffer(storage=make(24, ndim=2))
    rb.extend(row(torch.zeros(3, 4, 2), 3, 4))
    values = torch.arange(1.0, 1 + 2 * torch.Size(dims).numel()).reshape(*dims, 2)
    expected = torch.zeros(3, 4, 2)
    expected[index] = values
    if kind == "TensorDict" and 1 in dims and expected[index].shape[:-1] != dims:  # which tensordict refuses, too
        with pytest.raises(RuntimeError, match="leading dimensions"):
            rb[index] = row(values, *dims)
        return
    rb[index] = row(values, *dims)
    found = rb[:] if kind == "tensor" else rb[:]["b"]
    assert found.tolist() == expected.tolist()
    rb.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [(3,), (2, 3), (4,)])
def test_values_of_other_sizes_change_nothing(make, kind, dims):
    row = KINDS[kind]
    rb = ReplayBuffer(storage=make(24, ndim=2))
    rb.extend(row(torch.zeros(3, 4, 2), 3, 4))
    with pytest.raises(RuntimeError, match=r"^rb\[index\] = value: "):
        rb[:, 1:3] = row(torch.ones(*dims, 2), *dims)
    assert not (rb[:] if kind == "tensor" else rb[:]["b"]).any()
    rb.close()


def test_a_number_is_broadcast():
    rb = ReplayBuffer(storage=LazyTensorStorage(24, ndim=2))
    rb.extend({"a": torch.zeros(3, 4), "done": torch.zeros(3, 4, dtype=torch.bool)})
    rb[:, 1:3] = {"a": 1, "done": True}
    assert rb[:]["a"].tolist() == [[0, 1, 1, 0]] * 3
    assert rb[:]["done"].tolist() == [[False, True, True, False]] * 3


def written(data, ndim=1):
    writer = TensorDictRoundRobinWriter(track_generations=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=ndim), writer=writer, batch_size=4)
    index = rb.extend(data)
    return rb, {"index": index, "generation": rb.writer.generations_of(index)}


@pytest.mark.parametrize("stored", [(), (1,), (1, 1)])
@pytest.mark.parametrize("given", [(), (1,), (1, 1)])
def test_a_patch_has_the_shape_of_the_index(stored, given):
    rb, rows = written(TensorDict({"a": torch.zeros(5, *stored)}, [5]))
    result = rb.update_if_present(**rows, patch={"a": torch.arange(5.0).reshape(5, *given)})
    assert result.updated.all()
    assert rb[:]["a"].flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("field", [(), (2,), (1,)])
def test_a_patch_is_laid_out_as_the_index_or_as_the_data(field):
    data = TensorDict({"a": torch.zeros(3, 4, *field)}, [3, 4])
    values = torch.arange(float(data["a"].numel())).reshape(3, 4, *field)
    in_order = values.movedim(1, 0).reshape(12, *field)  # the index goes slot by slot
    for patch in (values, in_order, in_order.reshape(4, 3, *field), TensorDict({"a": values}, [3, 4])):
        rb, rows = written(data, ndim=2)
        result = rb.update_if_present(**rows, patch=patch if isinstance(patch, TensorDict) else {"a": patch})
        assert result.updated.shape == (12,)
        assert rb[:]["a"].tolist() == values.tolist()


def test_a_patch_of_several_steps_of_several_environments():
    rb, rows = written(TensorDict({"a": torch.zeros(12)}, [12]))
    rb.update_if_present(**rows, patch={"a": torch.arange(12.0).reshape(3, 4)})
    assert rb[:]["a"].tolist() == list(range(12))


def test_patches_of_other_sizes_are_refused():
    rb, rows = written(TensorDict({"a": torch.zeros(12, 2)}, [12]))
    for shape in ((12,), (2, 12), (6, 4), (12, 3)):
        with pytest.raises(ValueError, match="field a: expected shape"):
            rb.update_if_present(**rows, patch={"a": torch.zeros(shape)})
    assert not rb[:]["a"].any()


@pytest.mark.parametrize("number", [1.0, 1, np.float32(1), torch.tensor(1.0)])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_number_is_that_of_all_fields(make, number, ndim, buffer):
    rb = buffer(storage=make(24, ndim=ndim))
    rows = TensorDict({"a": torch.zeros(3, 4, 2), "next": {"b": torch.zeros(3, 4)}}, [3, 4])
    rb.extend(rows if ndim == 2 else rows[0])
    place = (slice(None), slice(1, 3)) if ndim == 2 else slice(1, 3)
    rb[place] = number
    expected = torch.tensor([0.0, 1, 1, 0]).expand(3, 4) if ndim == 2 else torch.tensor([0.0, 1, 1, 0])
    assert torch.equal(rb[:]["next", "b"], expected)
    assert torch.equal(rb[:]["a"], expected.unsqueeze(-1).expand(*expected.shape, 2))
    rb[0] = number
    assert bool((rb[0]["a"] == 1).all())
    rb.close()


def test_a_number_that_a_field_does_not_hold_changes_nothing():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(RuntimeError, match=r"^rb\[index\] = value: field b: expected"):
        rb[1:] = 1.5
    rb[1:] = 2
    assert (rb[:]["a"].tolist(), rb[:]["b"].tolist()) == ([0, 2, 2], [0, 2, 2])
    flat = ReplayBuffer(storage=LazyTensorStorage(10))
    flat.extend(torch.zeros(3, 2))
    flat[1:] = 1.0
    assert flat[:].tolist() == [[0, 0], [1, 1], [1, 1]]
