"""Stacking items of a list storage, and collate functions of the user's."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, TensorDict, tensorclass
from torch.testing import assert_close

from engram import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.storages.items import stack


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 2),
        lambda: torch.randn(()),
        lambda: torch.randn(0),
        lambda: torch.randint(9, (4,), dtype=torch.uint8),
        lambda: torch.rand(5) > 0.5,
        lambda: torch.randn(2, dtype=torch.complex64),
        lambda: torch.randn(2).to(torch.bfloat16),
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(8)[::2],
        lambda: torch.randn(2, dtype=torch.complex64).conj(),
        lambda: torch.randn(2, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(2, requires_grad=True),
        lambda: torch.randn(3, 4).to_sparse(),
    ],
)
def test_tensors_as_torch_stacks_them(make):
    items = [make() for _ in range(5)]
    stacked = stack(items)
    expected = torch.stack(items)
    if expected.layout is torch.sparse_coo:
        stacked, expected = stacked.to_dense(), expected.to_dense()
    assert_close(stacked.detach(), expected.detach(), rtol=0, atol=0)
    assert stacked.data_ptr() not in {item.data_ptr() for item in items if item.numel() and not item.is_sparse}


def test_mixed_layouts_and_dtypes():
    items = [torch.zeros(2, 3), torch.ones(3, 2).t()]
    assert_close(stack(items), torch.stack(items))
    mixed = [torch.zeros(2), torch.ones(2, dtype=torch.float64)]
    try:
        expected = torch.stack(mixed)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            stack(mixed)
    else:
        assert_close(stack(mixed), expected)
    with pytest.raises(RuntimeError):
        stack([torch.zeros(2), torch.zeros(3)])


def td(n=3, **more):
    return TensorDict({"a": torch.randn(n), **more}, batch_size=[])


def test_tensordicts_become_one():
    items = [td(b=torch.arange(2)) for _ in range(4)]
    batch = stack(items)
    assert type(batch) is TensorDict
    assert batch.batch_size == (4,)
    assert not batch.is_locked
    assert (batch == torch.stack(items)).all()


def test_tensordicts_with_batch_dimensions_and_devices():
    items = [TensorDict({"a": torch.randn(3, 2)}, batch_size=[3], device="cpu") for _ in range(4)]
    batch = stack(items)
    assert batch.batch_size == (4, 3)
    assert batch.device == torch.device("cpu")
    assert td().device is None
    assert stack([td(), td()]).device is None


def test_order_of_the_keys_does_not_matter():
    first = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, batch_size=[])
    second = TensorDict({"b": torch.ones(2), "a": torch.zeros(2)}, batch_size=[])
    batch = stack([first, second])
    assert not batch["a"].any()
    assert batch["b"].all()


@pytest.mark.parametrize(
    "items",
    [[td(), td(n=5)], [td(), td(b=torch.zeros(1))], [td(b=torch.zeros(2)), td(b=torch.zeros(2, 2))]],
    ids=["lengths", "fields", "dimensions"],
)
def test_ragged_tensordicts_become_a_lazy_stack(items):
    batch = stack(items)
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch.batch_size == (2,)
    assert all((batch[i] == items[i]).all() for i in range(2))


def test_nested_tensordicts_and_memory_mapped_leaves():
    items = [
        TensorDict({"next": {"r": torch.randn(1)}, "m": MemoryMappedTensor.from_tensor(torch.randn(2))}) for _ in "abc"
    ]
    batch = stack(items)
    assert isinstance(batch, TensorDict)
    assert batch["next", "r"].shape == (3, 1)
    assert (batch == torch.stack(items)).all()


def test_dictionaries_leaf_by_leaf():
    items = [{"a": torch.randn(3), "b": {"c": torch.tensor(i), "d": td()}} for i in range(4)]
    batch = stack(items)
    assert list(batch) == ["a", "b"]
    assert torch.equal(batch["a"], torch.stack([item["a"] for item in items]))
    assert batch["b"]["c"].tolist() == [0, 1, 2, 3]
    assert batch["b"]["d"].batch_size == (4,)
    with pytest.raises(KeyError, match="'a'.*'b'"):
        stack([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
    with pytest.raises(TypeError, match="collate_fn"):
        stack([{"a": "text"}, {"a": "text"}])


@pytest.mark.parametrize("item", ["text", 3, {1}, None])
def test_other_items_need_a_function(item):
    with pytest.raises(TypeError, match=rf"{type(item).__name__}.*collate_fn"):
        stack([item, item])
    rb = ReplayBuffer(storage=ListStorage(4))
    rb.extend([item, item])
    with pytest.raises(TypeError, match="collate_fn"):
        rb.sample(2)
    assert rb[0] is item


@pytest.mark.parametrize(
    "items",
    [[torch.zeros(2), "text"], [td(), "text"], [td(), torch.zeros(2)], [{"a": torch.zeros(1)}, torch.zeros(1)]],
    ids=["tensor and text", "tensordict and text", "tensordict and tensor", "dict and tensor"],
)
def test_mixed_items_name_the_odd_one(items):
    with pytest.raises(TypeError, match="collate_fn"):
        stack(items)


def test_nothing_to_stack():
    with pytest.raises(RuntimeError, match="collate_fn|no items"):
        stack([])
    rb = ReplayBuffer(storage=ListStorage(4))
    with pytest.raises(RuntimeError):
        rb[:]
    rb = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    assert rb[:] == []


# ---- functions of the user's ---------------------------------------------------------------------------------------------


def test_tensor_storages_hand_over_the_gathered_batch():
    seen = []
    rb = ReplayBuffer(storage=LazyTensorStorage(4), collate_fn=lambda x: seen.append(x) or (x, "collated"))
    rb.extend(torch.arange(4))
    batch, mark = rb.sample(3)
    assert mark == "collated"
    assert batch is seen[-1]
    assert batch.shape == (3,)
    assert rb[1:3][1] == "collated"
    assert rb[[0, 1]][1] == "collated"


def test_list_storages_hand_over_the_items():
    seen = []
    rb = ReplayBuffer(storage=ListStorage(4), collate_fn=lambda x: seen.append(x) or len(x))
    rb.extend(["a", "b"])
    assert rb.sample(3) == 3
    assert isinstance(seen[-1], list)
    assert set(seen[-1]) <= {"a", "b"}
    assert rb[:] == 2


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("index", [1, -1, torch.tensor(1)])
def test_not_called_for_one_row(storage, index):
    def forbidden(x):
        raise AssertionError("called")

    rb = ReplayBuffer(storage=storage(4), collate_fn=forbidden)
    rb.extend(torch.arange(4))
    assert rb[index] == (3 if index == -1 else 1)


def test_identity_works_for_tensor_storages():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), collate_fn=lambda x: x)
    rb.extend({"a": torch.arange(4)})
    assert rb.sample(3)["a"].shape == (3,)


def test_a_collate_function_that_changes_the_batch_size_is_named():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, collate_fn=lambda batch: batch[:2])
    rb.extend(TensorDict({"a": torch.zeros(8)}, [8]))
    with pytest.raises(RuntimeError, match=r"a transform or collate_fn changed the batch size from 4 to \[2\]"):
        rb.sample()


def test_rows_in_two_dimensions_are_told_to_be_flattened():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(TensorDict({"a": torch.zeros(3, 2)}, [3]))
    with pytest.raises(RuntimeError, match=r"If these are 3 x 5 rows, .*\.reshape\(-1\)"):
        rb.extend(TensorDict({"a": torch.zeros(3, 5, 2)}, [3, 5]))


@tensorclass
class Step:
    a: torch.Tensor


def nested(**entries):
    return TensorDict({"a": torch.zeros(3), **entries}, [])


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (
            [nested(), TensorDict({"a": torch.zeros(3)}, [3])],
            r"sample: expected .*batch size \[\] and .*batch size \[3\]",
        ),
        ([nested(), Step(a=torch.zeros(3), batch_size=[])], "sample: expected .*TensorDict of .* and a Step of"),
        ([nested(b="x"), nested(b=nested())], "sample: field 'b': expected .* and a TensorDict of"),
        (
            [nested(b=nested(c="x")), nested(b=nested(c=nested()))],
            r"sample: field \('b', 'c'\): expected .* and a TensorDict",
        ),
    ],
)
def test_what_no_stack_holds_is_named(items, text):
    for storage in (ListStorage(4), ReplayBuffer(4).storage):
        rb = ReplayBuffer(storage=storage, batch_size=2)
        rb.extend(items)
        with pytest.raises(RuntimeError, match=f"{text}.*collate_fn=list"):
            rb[:]
