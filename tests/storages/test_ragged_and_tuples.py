"""Rows that are tuples or have no fields, and stacks of rows of several shapes."""

from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from engram import (
    CompressedListStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)


class Step(NamedTuple):
    obs: torch.Tensor
    action: torch.Tensor


PAIR = (torch.zeros(2), torch.ones(()))


@pytest.mark.parametrize("kind", [ListStorage, LazyTensorStorage, CompressedListStorage])
@pytest.mark.parametrize(
    "row",
    [PAIR, Step(*PAIR), {"a": PAIR, "b": Step(*PAIR)}, (PAIR, {"c": torch.zeros(3)}), [*PAIR]],
    ids=["tuple", "named", "in a dict", "nested", "list"],
)
def test_tuples_are_rows(kind, row):
    rb = ReplayBuffer(storage=kind(10), batch_size=4)
    rb.extend([row] * 3)
    rb.add(row)
    batch = rb.sample()
    assert type(batch) is type(row)
    leaves, _ = torch.utils._pytree.tree_flatten(batch)
    assert [leaf.shape[0] for leaf in leaves] == [4] * len(leaves)
    assert leaves[0].shape == (4, 2)


def test_tuples_of_several_lengths_are_refused():
    rb = ReplayBuffer(storage=ListStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
    rb.extend([PAIR, PAIR[:1]])
    with pytest.raises(TypeError, match="expected items of one kind"):
        rb.sample()


@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_rows_without_fields(kind, buffer):
    rb = buffer(storage=kind(10), batch_size=4)
    rb.extend(TensorDict(batch_size=[3]))
    rb.add(TensorDict())
    assert rb.sample().batch_size == (4,)
    assert set(rb.sample().keys()) <= {"index"}


RAGGED = {
    "a": [TensorDict({"a": torch.zeros(n), "b": torch.zeros(())}) for n in (2, 3)],
    ("n", "a"): [TensorDict({"b": torch.zeros(()), "n": {"a": torch.zeros(n, 4)}}) for n in (2, 3)],
}


@pytest.mark.parametrize("key", RAGGED)
@pytest.mark.parametrize("form", ["stack", "in a dict", "in a TensorDict"])
@pytest.mark.parametrize("written", [False, True])
def test_a_ragged_stack_is_refused(make, key, form, written):
    rb = ReplayBuffer(storage=make(10))
    data = {"stack": lazy_stack, "in a dict": lambda rows: {"x": lazy_stack(rows)}}.get(
        form, lambda rows: TensorDict({"x": lazy_stack(rows)}, [2])
    )
    path = key if form == "stack" else ("x", *([key] if isinstance(key, str) else key))
    if written:
        rb.extend(data([RAGGED[key][0]] * 2))
    elif form == "stack" and key == "a":
        pytest.skip("it says that the field is ragged")
    with pytest.raises(RuntimeError) as raised:
        rb.extend(data(RAGGED[key]))
    message = str(raised.value)
    assert message.startswith(f"extend: field {path!r}: expected tensors of one shape in a stack, got [2")
    assert "LazyStackStorage" in message
    assert len(rb) == 2 * written
    rb.close()


@pytest.mark.parametrize("wrapped", [lambda x: {"a": x}, lambda x: {"n": {"a": x}}, lambda x: x, lambda x: (x, x)])
def test_items_of_several_shapes_name_the_field(wrapped):
    rb = ReplayBuffer(storage=ListStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
    rb.extend([wrapped(torch.zeros(n)) for n in (2, 3)])
    with pytest.raises(
        RuntimeError, match=r"^sample: .*expected tensors of one shape to stack.*LazyStackStorage"
    ) as raised:
        rb.sample()
    for key in ("'a'", "('n', 'a')", "'0'"):
        said = {"'a'": {"a": 0}, "('n', 'a')": {"n": {"a": 0}}, "'0'": (0, 0)}[key] == wrapped(0)
        assert (f"field {key}: " in str(raised.value)) == said
