"""Transforms: the list, and what a buffer does with it."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.transforms import Compose


class Times:
    """Duck-typed, both ways: reads multiplied, writes multiplied by something else."""

    def __init__(self, forward=1, inverse=1):
        self._forward, self._inverse = forward, inverse

    def forward(self, x):
        return x * self._forward

    def inv(self, x):
        return x * self._inverse


class Plus(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n
        self.drop = nn.Dropout(1.0)

    def forward(self, x):
        return self.drop(x + self.n)


class Noting:
    """Notes the batch sizes or shapes that inv sees."""

    def __init__(self, then=lambda x: x):
        self.seen = []
        self._then = then

    def inv(self, x):
        first = x
        while isinstance(first, dict | tuple):
            first = next(iter(first.values())) if isinstance(first, dict) else first[0]
        self.seen.append(tuple(first.batch_size if isinstance(first, TensorDict) else first.shape))
        return self._then(x)


# ---- the list ------------------------------------------------------------------------------------------------------------


def test_forward_in_order_and_inverse_in_reverse():
    steps = Compose()
    steps.append(lambda x: [*x, "read first"])
    steps.append(lambda x: [*x, "read second"])
    steps.append(lambda x: [*x, "write second"], invert=True)
    steps.append(lambda x: [*x, "write first"], invert=True)
    assert steps.forward([]) == ["read first", "read second"]
    assert steps.inv([]) == ["write first", "write second"]


def test_both_directions_of_one_object_and_invert():
    steps = Compose(Times(2, 3))
    assert (steps.forward(1), steps.inv(1)) == (2, 3)
    swapped = Compose()
    swapped.append(Times(2, 3), invert=True)
    assert (swapped.forward(1), swapped.inv(1)) == (3, 2)


def test_a_callable_reads_only():
    steps = Compose(lambda x: x + 1)
    assert (steps.forward(1), steps.inv(1)) == (2, 1)
    assert steps.reads
    assert not steps.writes
    steps = Compose()
    steps.append(lambda x: x + 1, invert=True)
    assert (steps.forward(1), steps.inv(1)) == (1, 2)
    assert steps.writes
    assert not steps.reads


def test_one_direction_only():
    class Reads:
        def forward(self, x):
            return x + 1

    class Writes:
        def inv(self, x):
            return x - 1

    assert (Compose(Reads()).forward(1), Compose(Reads()).inv(1)) == (2, 1)
    assert (Compose(Writes()).forward(1), Compose(Writes()).inv(1)) == (1, 0)


def test_it_is_like_a_list():
    first, second, third = Times(), Times(), Times()
    steps = Compose(second)
    steps.append(third)
    steps.insert(0, first)
    assert len(steps) == 3
    assert list(steps) == [first, second, third]
    assert steps[0] is first
    assert steps[-1] is third
    assert repr(steps) == "Compose(Times, Times, Times)"
    copied = Compose.of(steps)
    copied.append(Times())
    assert (len(steps), len(copied)) == (3, 4)
    assert len(Compose()) == 0


@pytest.mark.parametrize("index", [4, -4, 100])
def test_insert_out_of_range(index):
    steps = Compose(Times())
    with pytest.raises(ValueError, match=str(index)):
        steps.insert(index, Times())
    assert len(steps) == 1


def test_insert_inverts():
    steps = Compose(Times(2, 3))
    steps.insert(0, Times(5, 7), invert=True)
    assert (steps.forward(1), steps.inv(1)) == (14, 15)


@pytest.mark.parametrize("wrong", [3, "name", object(), [Times()]])
def test_what_is_no_transform(wrong):
    with pytest.raises(RuntimeError, match=type(wrong).__name__):
        Compose(wrong)
    rb = ReplayBuffer(5)
    with pytest.raises(RuntimeError, match=type(wrong).__name__):
        rb.append_transform(wrong)
    with pytest.raises(RuntimeError, match=type(wrong).__name__):
        rb.insert_transform(0, wrong)
    assert len(rb.transform) == 0


def test_modules_are_put_into_evaluation_mode_and_called():
    module = Plus(3)
    hooked = []
    module.register_forward_hook(lambda *_: hooked.append(1))
    assert module.training
    steps = Compose(module)
    assert not module.training
    assert not module.drop.training
    assert steps.forward(torch.ones(2)).tolist() == [4, 4]
    assert hooked


# ---- reading -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage, ListStorage])
def rb(request):
    rb = ReplayBuffer(storage=request.param(5), batch_size=4)
    rb.extend(torch.arange(4.0))
    return rb


def test_samples_and_rows_are_transformed(rb):
    assert rb.append_transform(lambda x: x + 10) is rb
    assert rb.append_transform(Times(2)) is rb
    assert set(rb.sample().tolist()) <= {20, 22, 24, 26}
    assert set(rb.sample(return_info=True)[0].tolist()) <= {20, 22, 24, 26}
    assert rb[1] == 22
    assert rb[:].tolist() == [20, 22, 24, 26]
    assert rb[[3, 0]].tolist() == [26, 20]
    assert rb.read_all_in_order(2).tolist() == [20, 22]
    assert set(next(iter(rb)).tolist()) <= {20, 22, 24, 26}
    assert rb.storage[1] == 1  # what is stored


def test_given_to_the_constructor():
    rb = ReplayBuffer(storage=LazyTensorStorage(5), transform=Times(2, 3))
    rb.extend(torch.ones(3))
    assert rb[:].tolist() == [6, 6, 6]
    assert len(rb.transform) == 1


def test_a_factory_makes_one_for_every_buffer():
    made = []

    def factory():
        made.append(Times(2, 3))
        return made[-1]

    first, second = (
        kind(storage=LazyTensorStorage(5), transform_factory=factory) for kind in (ReplayBuffer, TensorDictReplayBuffer)
    )
    assert [first.transform[0], second.transform[0]] == made
    assert made[0] is not made[1]
    first.extend(torch.ones(3))
    assert first[:].tolist() == [6, 6, 6]
    assert len(made) == 2
    steps = ReplayBuffer(storage=LazyTensorStorage(5), transform_factory=lambda: Compose(Times(2), Times(5))).transform
    assert (len(steps), steps.forward(1)) == (2, 10)
    assert len(ReplayBuffer(5, transform_factory=lambda: None).transform) == 0
    assert len(ReplayBuffer(5, transform_factory=None, transform=Times()).transform) == 1


def test_bad_factories():
    def broken():
        raise ZeroDivisionError("mine")

    for wrong, error, text in (
        ({"transform_factory": Times()}, TypeError, "transform_factory: expected a callable .* got Times"),
        ({"transform_factory": Times, "transform": Times()}, TypeError, "one of transform and transform_factory"),
        ({"transform_factory": lambda: 3}, RuntimeError, "got int"),
        ({"transform_factory": broken}, ZeroDivisionError, "mine"),
    ):
        with pytest.raises(error, match=text):
            ReplayBuffer(storage=LazyTensorStorage(5), **wrong).transform  # noqa: B018 - is when a factory is called
    assert ReplayBuffer(5, transform_factory=Times).transform[0].forward(3) == 3  # a class is a factory


def test_inserted_before_another(rb):
    rb.append_transform(lambda x: x + 10)
    assert rb.insert_transform(0, lambda x: x * 2) is rb
    assert rb[:].tolist() == [10, 12, 14, 16]
    rb.insert_transform(0, lambda x: x * 2, invert=True)
    assert rb.add(torch.tensor(4.0)) == 4
    assert rb.storage[4] == 8
    assert rb[4] == 26


def test_appended_through_the_list_itself(rb):
    rb.transform.append(lambda x: x + 10)
    assert set(rb.sample().tolist()) <= {10, 11, 12, 13}
    assert rb[1] == 11


def test_after_collating():
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=torch.stack, transform=lambda x: (x, x.shape))
    rb.extend(torch.arange(4))
    batch, shape = rb.sample(3)
    assert shape == batch.shape == (3,)


def test_a_slice_with_transforms_is_a_copy():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(torch.zeros(4))
    rb[:].add_(1)  # a live view
    rb.append_transform(lambda x: x)
    rb[:].add_(1)
    assert rb.storage[0] == 1


def test_tensordict_samples_are_not_locked():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(5))
    rb.extend(TensorDict({"a": torch.arange(4)}, batch_size=[4]))
    rb.append_transform(lambda td: td.set("b", td["a"] * 2))
    sample = rb.sample(6)
    assert torch.equal(sample["b"], sample["a"] * 2)
    assert torch.equal(rb[:]["b"], rb[:]["a"] * 2)
    assert rb[1]["b"] == 2
    assert "b" not in rb.storage[:].keys()


def test_a_batch_of_another_size_cannot_say_its_index():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(TensorDict({"a": torch.arange(4)}, batch_size=[4]))
    rb.append_transform(lambda td: td[:-1])
    with pytest.raises(RuntimeError, match="return_info"):
        rb.sample(3)
    plain = ReplayBuffer(storage=rb.storage, transform=lambda td: td[:-1])
    batch, info = plain.sample(3, return_info=True)
    assert (len(batch), len(info["index"])) == (2, 3)


def test_a_batch_with_more_dimensions_has_its_index_expanded():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(TensorDict({"a": torch.arange(8).reshape(4, 2)}, batch_size=[4]))
    rb.append_transform(lambda td: TensorDict({"a": td["a"]}, batch_size=[*td.batch_size, 2]))
    sample = rb.sample(3)
    assert sample["index"].shape == (3, 2)
    assert torch.equal(sample["index"], sample["a"] // 2)


def test_something_else_than_a_tensordict():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5), transform=lambda td: td["a"])
    rb.extend(TensorDict({"a": torch.arange(4)}, batch_size=[4]))
    with pytest.raises(RuntimeError, match="Tensor"):
        rb.sample(3)
    assert rb[:].tolist() == [0, 1, 2, 3]


# ---- writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_inverse_on_every_write(storage):
    rb = ReplayBuffer(storage=storage(6), transform=Times(1, 3))
    rb.add(torch.tensor(1.0))
    rb.extend(torch.tensor([2.0, 3.0]))
    assert rb[:].tolist() == [3, 6, 9]
    rb[0] = torch.tensor(10.0)
    rb[1:3] = torch.tensor([20.0, 30.0])
    assert rb[:].tolist() == [30, 60, 90]
    rb.write_all(torch.ones(3))
    assert rb[:].tolist() == [3, 3, 3]


def test_editing_fields_skips_them():
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend({"a": torch.zeros(3)})
    rb.append_transform(lambda x: {"a": x["a"] + 100}, invert=True)
    rb.set_at_("a", torch.tensor(1.0), 0)
    rb["a"] = rb["a"] + 1
    rb.set_("a", rb["a"] * 2)
    rb.update_({"a": rb["a"] + 1})
    assert rb["a"].tolist() == [5, 3, 3]


def test_fields_that_a_transform_adds_are_stored():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6))
    rb.append_transform(lambda td: td.set("b", td["a"] + 1), invert=True)
    rb.extend(TensorDict({"a": torch.arange(3)}, batch_size=[3]))
    rb.add(TensorDict({"a": torch.tensor(7)}, batch_size=[]))
    assert rb["b"].tolist() == [1, 2, 3, 8]


class TestAddShowsABatchOfOne:
    def test_tensors(self):
        noting = Noting()
        rb = ReplayBuffer(storage=LazyTensorStorage(6), transform=noting)
        assert rb.add(torch.zeros(3)) == 0
        assert rb.add(torch.zeros(3)) == 1
        assert noting.seen == [(1, 3), (1, 3)]
        assert rb[:].shape == (2, 3)

    @pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
    @pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
    def test_tensordicts_in_both_buffers(self, buffer, storage):
        noting = Noting()
        rb = buffer(storage=storage(6), transform=noting)
        assert rb.add(TensorDict({"a": torch.zeros(3)}, batch_size=[])) == 0
        assert noting.seen == [(1,)]
        assert rb[0]["a"].shape == (3,)
        assert rb[0].batch_size == ()

    @pytest.mark.filterwarnings("ignore:add. the first row is a TensorDict of batch size")
    @pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
    def test_rows_with_batch_dimensions(self, buffer):
        noting = Noting()
        rb = buffer(storage=LazyTensorStorage(6), transform=noting)
        assert rb.add(TensorDict({"a": torch.arange(6).reshape(3, 2)}, batch_size=[3])) == 0
        assert noting.seen == [(3, 1)]
        assert len(rb) == 1
        assert rb[0].batch_size == (3,)
        assert rb[0]["a"].tolist() == [[0, 1], [2, 3], [4, 5]]

    @pytest.mark.filterwarnings("ignore:add. the first row is a TensorDict of batch size")
    def test_rows_with_batch_dimensions_that_become_two(self):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(6), transform=Noting(lambda td: torch.cat([td, td + 100], -1))
        )
        assert rb.add(TensorDict({"a": torch.arange(3)}, batch_size=[3])).tolist() == [0, 1]
        assert rb["a"].tolist() == [[0, 1, 2], [100, 101, 102]]

    def test_nested_dictionaries(self):
        noting = Noting()
        rb = ReplayBuffer(storage=LazyTensorStorage(6), transform=noting)
        assert rb.add({"a": {"b": torch.zeros(3)}, "c": torch.tensor(1)}) == 0
        assert noting.seen == [(1, 3)]
        assert rb[0]["a"]["b"].shape == (3,)
        assert rb[0]["c"].shape == ()

    def test_arrays(self):
        noting = Noting()
        rb = ReplayBuffer(storage=LazyTensorStorage(6), transform=noting)
        assert rb.add({"a": torch.zeros(4).numpy(), "b": torch.tensor(1).numpy()}) == 0
        assert noting.seen == [(1, 4)]
        assert len(rb) == 1
        assert rb[0]["a"].shape == (4,)

    def test_columns(self):
        noting = Noting()
        rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), transform=noting)
        assert rb.add({"a": torch.arange(3)}).tolist() == [[0, 0], [0, 1], [0, 2]]
        assert noting.seen == [(3, 1)]
        assert rb[:]["a"].tolist() == [[0], [1], [2]]

    def test_any_object_in_a_list(self):
        rb = ReplayBuffer(storage=ListStorage(6), collate_fn=list)
        rb.append_transform(lambda x: x, invert=True)
        assert rb.add("abc") == 0
        assert rb.add(3) == 1
        assert rb.add(("pair", 4)) == 2
        assert rb[:] == ["abc", 3, ("pair", 4)]


@pytest.mark.parametrize(("ndim", "shape"), [(1, (5, 2)), (2, (3, 5, 2))])
@pytest.mark.parametrize("how", [lambda x: None, lambda x: x[..., :0, :]], ids=["None", "no rows"])
def test_holding_everything_back(how, ndim, shape):
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=ndim))
    rb.append_transform(how, invert=True)
    index = rb.extend(torch.zeros(shape))
    assert index.shape == (0, ndim)
    assert index.dtype is torch.int64
    assert rb.add(torch.zeros(shape[1:] if ndim == 1 else (3, 2))).shape == (0, ndim)
    assert len(rb) == rb.write_count == 0


def test_later_steps_are_not_asked_when_nothing_is_left():
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.append_transform(lambda x: x + 1, invert=True)
    rb.append_transform(lambda x: None, invert=True)
    assert rb.extend(torch.zeros(3)).shape == (0, 1)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_fewer_and_more_rows(storage):
    rb = ReplayBuffer(storage=storage(9))
    rb.append_transform(lambda x: x[::2], invert=True)
    assert rb.extend(torch.arange(5)).tolist() == [0, 1, 2]
    assert rb.add(torch.tensor(7)) == 3
    rb.append_transform(lambda x: torch.cat([x, x, x]), invert=True)
    assert rb.add(torch.tensor(8)).tolist() == [4, 5]
    assert rb[:].tolist() == [0, 2, 4, 7, 8, 8]


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("transform", [None, Times(1, 1)], ids=["plain", "transformed"])
def test_an_empty_batch_of_the_callers_writes_nothing(buffer, transform):
    rb = buffer(storage=LazyTensorStorage(9), transform=transform)
    assert rb.extend(TensorDict({"a": torch.zeros(0, 2)}, batch_size=[0])).tolist() == []
    assert rb.write_count == 0


def test_a_refused_row_of_the_transform_changes_nothing():
    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    rb.extend(torch.arange(3.0))
    rb.append_transform(lambda x: x.double(), invert=True)
    with pytest.raises(RuntimeError, match="float32"):
        rb.extend(torch.arange(3.0))
    with pytest.raises(RuntimeError, match="float32"):
        rb.add(torch.tensor(3.0))
    assert rb[:].tolist() == [0, 1, 2]


def test_an_error_of_the_transform_comes_through():
    class Stubborn:
        def inv(self, x):
            raise ZeroDivisionError("mine")

        def forward(self, x):
            raise ZeroDivisionError("mine")

    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    rb.extend(torch.arange(3.0))
    rb.append_transform(Stubborn())
    for call in (
        lambda: rb.add(torch.tensor(1.0)),
        lambda: rb.extend(torch.zeros(2)),
        lambda: rb.sample(1),
        lambda: rb[0],
    ):
        with pytest.raises(ZeroDivisionError, match="mine"):
            call()
    assert rb.write_count == 3


def test_copies_have_transforms_of_their_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Times(2))
    rb.extend(torch.ones(3))
    other = copy.deepcopy(rb)
    rb.append_transform(Times(5))
    assert rb[:].tolist() == [10, 10, 10]
    assert other[:].tolist() == [2, 2, 2]


def test_a_single_value_of_any_stride_is_saved_with_the_state_of_a_transform(tmp_path):
    def make():
        keeper = torch.nn.Identity()
        keeper.register_buffer("value", torch.tensor(2.5).expand(1))
        return ReplayBuffer(storage=LazyTensorStorage(10), transform=keeper)

    rb, again = make(), make()
    rb.extend({"a": torch.arange(5)})
    rb.dumps(tmp_path / "dump")
    again.loads(tmp_path / "dump")
    assert again["a"].tolist() == [*range(5)]
