"""The transforms that engram brings: what they compute, on what, and that TorchRL's compute the same."""

import copy
import warnings

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch import nn

from engram import (
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    LazyTensorStorage,
    ListStorage,
    ObservationNorm,
    RenameTransform,
    ReplayBuffer,
    RewardScaling,
    SelectTransform,
    TensorDictReplayBuffer,
    VecNorm,
)
from tests.transforms.batches import rows, same


def td_of(data):
    return TensorDict(data, [6])


def plain(data):
    return data.to_dict() if isinstance(data, TensorDict) else data


FORMS = {"dict": rows, "TensorDict": lambda: td_of(rows())}
form = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


# ---- as TorchRL's --------------------------------------------------------------------------------------------------------

NEXT = ("next", "obs")
CASES = {
    "every float64": ("DTypeCastTransform", (torch.float64, torch.float32), {}),
    "some of a dtype": ("DTypeCastTransform", (torch.float32, torch.float16), {"in_keys": ["obs", NEXT]}),
    "to other keys": ("DTypeCastTransform", (torch.float32, torch.float64, ["obs"], [("deep", "x")]), {}),
    "keys that are written": (
        "DTypeCastTransform",
        (torch.float16, torch.float32, ["obs"], None, ["obs", NEXT], ["reward", NEXT]),
        {},
    ),
    "doubles": ("DoubleToFloat", (), {}),
    "one double": ("DoubleToFloat", (["wide"],), {}),
    "device": ("DeviceCastTransform", ("cpu", "cpu"), {}),
    "device of some": ("DeviceCastTransform", ("cpu",), {"in_keys": ["obs"], "out_keys": ["there"]}),
    "rename": ("RenameTransform", (["obs", NEXT], [("deep", "x"), "y"]), {}),
    "rename what is written": ("RenameTransform", ([], [], ["inside"], ["obs"]), {}),
    "rename a copy": ("RenameTransform", (["obs"], ["x"], ["inside"], [NEXT]), {"create_copy": True}),
    "select": ("SelectTransform", ("obs", NEXT), {}),
    "select all of next": ("SelectTransform", ("next", "none"), {"keep_rewards": False, "keep_dones": False}),
    "exclude": ("ExcludeTransform", ("obs", NEXT, "none"), {}),
    "exclude from what is written": ("ExcludeTransform", ("obs",), {"inverse": True}),
    "affine": ("ObservationNorm", (3.0, 2.0, ["obs", "pixels"]), {"out_keys": ["o", "p"]}),
    "affine by tensors": ("ObservationNorm", (torch.arange(3.0), torch.full((3,), 0.5), ["obs", NEXT]), {}),
    "both ways": ("ObservationNorm", (3.0, 2.0, ["obs"], None, ["obs"]), {}),
    "standardized": ("ObservationNorm", (3.0, 2.0, ["obs"], None, ["obs"], None, True), {}),
    "rewards": ("RewardScaling", (1.0, 0.1), {}),
    "rewards of steps": ("RewardScaling", (1.0, 0.1, [("next", "reward")], None, True), {}),
}


@pytest.fixture(scope="module")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchrl")
        from torchrl.envs import transforms

        return transforms


@form
@pytest.mark.parametrize("case", CASES)
def test_as_in_torchrl(torchrl, case, make):
    name, args, kwargs = CASES[case]
    theirs = getattr(torchrl, name)(*args, **kwargs).eval()
    ours = globals()[name](*args, **kwargs)
    same(plain(ours.forward(make())), theirs(td_of(rows())).to_dict())
    same(plain(ours.inv(make())), theirs.inv(td_of(rows())).to_dict())


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:This class is to be deprecated", "ignore:The VecNorm class"
)
@pytest.mark.parametrize("decay", [1.0, 0.9999, 0.5])
@pytest.mark.parametrize("shape", [(6,), (2, 3), ()])
def test_running_statistics_as_in_torchrl(torchrl, decay, shape):
    theirs = torchrl.VecNorm(["a", ("n", "b")], ["x", ("n", "b")], decay=decay, new_api=False)
    ours = VecNorm(["a", ("n", "b"), "none"], ["x", ("n", "b"), "none"], decay=decay)
    for _ in range(5):
        td = TensorDict({"a": torch.randn(*shape, 3) * 2 + 3, "n": {"b": torch.randn(*shape, 1)}}, shape)
        if not shape:
            td = TensorDict({"a": td["a"].double() + torch.rand(1).double(), "n": {"b": td["n", "b"].double()}}, [])
        mine = ours(td)
        expected = theirs(td.clone())
        assert set(mine.keys(True, True)) == set(expected.keys(True, True))
        assert ((mine - expected).abs() < 2e-3).all()
    same(ours.inv(td).to_dict(), td.to_dict())
    for key in ("a", ("n", "b")):
        assert torch.allclose(ours.loc[key].float(), theirs.loc[key].float(), atol=1e-4)
        assert torch.allclose(ours.scale[key].float(), theirs.scale[key].float(), atol=1e-3)
    assert torch.allclose(ours.denorm(mine)["a"].float(), td["a"].float(), atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_torchrls_own_transforms_work(torchrl):
    theirs = torchrl.Compose(
        torchrl.DoubleToFloat(in_keys=["wide"]), torchrl.RenameTransform(["obs"], ["o"], ["obs"], ["o"])
    )
    assert theirs.training
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=theirs)
    rb.append_transform(torchrl.RewardScaling(0.0, 2.0))
    assert not theirs.training
    assert not theirs[0].training
    data = td_of(rows()).rename_key_("obs", "o")
    rb.extend(data)
    assert "obs" in rb.storage[:].keys()
    batch = rb.sample(4)
    assert batch["wide"].dtype is torch.float32
    assert torch.equal(batch["reward"], data["reward"][batch["index"]] * 2)
    ours = Compose(
        DoubleToFloat(in_keys=["wide"]), RenameTransform(["obs"], ["o"], ["obs"], ["o"]), RewardScaling(0.0, 2.0)
    )
    again = TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=ours)
    again.extend(data)
    same(again[:].to_dict(), rb[:].to_dict())


# ---- what they are given stays as it is ------------------------------------------------------------------------------------


def everything():
    for name, args, kwargs in CASES.values():
        yield globals()[name](*args, **kwargs)
    yield VecNorm(["obs", ("next", "reward")])


@form
@pytest.mark.parametrize("direction", ["forward", "inv"])
@pytest.mark.parametrize("locked", [False, True])
def test_nothing_that_is_given_changes(make, direction, locked):
    for transform in everything():
        data = make()
        if locked and isinstance(data, TensorDict):
            data.lock_()
        before = copy.deepcopy(plain(data))
        getattr(transform, direction)(data)
        same(plain(data), before)


def test_other_containers():
    @tensorclass
    class Step:
        obs: torch.Tensor
        wide: torch.Tensor

    step = Step(obs=torch.ones(2, 3), wide=torch.zeros(2, dtype=torch.float64), batch_size=[2])
    cast = DoubleToFloat()(step)
    assert type(cast) is Step
    assert (cast.wide.dtype, step.wide.dtype) == (torch.float32, torch.float64)
    assert type(ObservationNorm(0.0, 2.0, ["obs"])(step)) is Step
    ragged = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(n + 1, dtype=torch.float64)}, []) for n in range(2)])
    assert DoubleToFloat()(ragged)[1]["a"].dtype is torch.float32
    assert DoubleToFloat()((torch.zeros(2).double(), ["x", torch.zeros(1).double()]))[1][1].dtype is torch.float32
    assert DoubleToFloat(["a"])({"a": np.zeros(3)})["a"].dtype is torch.float32


def test_one_tensor():
    x = torch.tensor([1.0, 3.0])
    assert DTypeCastTransform(torch.float32, torch.int64)(x).tolist() == [1, 3]
    assert DTypeCastTransform(torch.float32, torch.int64)(x.double()).dtype is torch.float64
    assert ObservationNorm(1.0, 2.0, ["whatever"])(x).tolist() == [3, 7]
    assert DeviceCastTransform("cpu")(x).tolist() == [1, 3]
    assert VecNorm(decay=1.0)(x).tolist() == [-1, 1]
    norm = VecNorm(decay=1.0)
    assert norm.denorm(norm(x)).tolist() == [1, 3]
    for transform in (RenameTransform(["a"], ["b"]), SelectTransform("a"), ExcludeTransform("a")):
        with pytest.raises(TypeError, match=f"{type(transform).__name__}.*dict.*Tensor"):
            transform(x)


def test_keys_on_the_way_are_made():
    for data in (rows(), td_of(rows())):
        made = RenameTransform(["obs"], [("a", "b", "c")])(data)
        assert made["a"]["b"]["c"] is not None
        assert "obs" not in made.keys()


# ---- bad input -----------------------------------------------------------------------------------------------------------


@form
@pytest.mark.parametrize(
    "transform",
    [
        lambda: DTypeCastTransform(torch.float32, torch.float64, ["none"]),
        lambda: ObservationNorm(0.0, 1.0, [("next", "none")]),
        lambda: RenameTransform(["none"], ["x"]),
        lambda: RewardScaling(0.0, 1.0, ["none"]),
        lambda: DeviceCastTransform("cpu", in_keys=["none"]),
    ],
)
def test_no_such_key(make, transform):
    with pytest.raises(KeyError, match="none.*'obs'"):
        transform()(make())


@form
def test_a_key_of_something_else_than_a_tensor(make):
    with pytest.raises(TypeError, match="next"):
        ObservationNorm(0.0, 1.0, ["next"])(make())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: DTypeCastTransform("float32", torch.float64), TypeError, "dtype_in.*float32"),
        (lambda: DTypeCastTransform(torch.float32, torch.float64, out_keys=["a"]), ValueError, "out_keys"),
        (lambda: DTypeCastTransform(torch.float32, torch.float64, ["a"], ["a", "b"]), ValueError, "equally many"),
        (lambda: RenameTransform(["a"], ["b", "c"]), ValueError, "equally many"),
        (lambda: RenameTransform(["a"], [], ["c"], []), ValueError, "equally many"),
        (lambda: RenameTransform(["a", "b"], ["b", "c"]), ValueError, "both.*'b'"),
        (lambda: RenameTransform([1.5], ["b"]), TypeError, "in_keys.*1.5"),
        (lambda: SelectTransform(1.5), TypeError, "selected_keys.*1.5"),
        (lambda: ExcludeTransform(("a", 1.5)), TypeError, "excluded_keys"),
        (lambda: ObservationNorm(0.0, 0.0, ["a"]), ValueError, "scale.*positive.*0"),
        (lambda: ObservationNorm(0.0, float("nan"), ["a"]), ValueError, "scale.*finite"),
        (lambda: ObservationNorm(float("inf"), 1.0, ["a"]), ValueError, "loc.*finite"),
        (lambda: ObservationNorm("1", 1.0, ["a"]), TypeError, "loc.*str"),
        (lambda: ObservationNorm(0.0, 1.0), TypeError, "in_keys"),
        (lambda: RewardScaling(0.0, -1.0), ValueError, "positive"),
        (lambda: VecNorm(decay=0.0), ValueError, "decay"),
        (lambda: VecNorm(decay=1.1), ValueError, "decay"),
        (lambda: VecNorm(eps=0.0), ValueError, "eps"),
        (lambda: VecNorm(["a"], shapes=[]), ValueError, "shapes"),
        (lambda: DeviceCastTransform("nowhere"), RuntimeError, "nowhere"),
        (lambda: DeviceCastTransform("cuda:99"), RuntimeError, "no such device, 'cuda:99'.*cpu"),
        (lambda: DeviceCastTransform("cpu", "cuda:99"), RuntimeError, "orig_device.*cuda:99"),
        (lambda: DeviceCastTransform(object()), RuntimeError, "expected a device"),
    ],
)
def test_bad_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()


class TestBuffersWithBadTransforms:
    """Each is a clear error, and nothing is lost."""

    def buffer(self, transform=None, **kwargs):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), **kwargs)
        rb.extend(td_of(rows()))
        if transform is not None:
            rb.append_transform(lambda td: td)
            rb.append_transform(transform)
        return rb

    def test_raising_names_the_transform(self):
        class Bad:
            def forward(self, td):
                raise ZeroDivisionError("mine")

            inv = forward

        rb = self.buffer(Bad())
        for call in (lambda: rb.sample(2), lambda: rb[:2], lambda: rb[0]):
            with pytest.raises(ZeroDivisionError) as info:
                call()
            assert info.value.__notes__ == ["Raised by transform 1, Bad, on reading."]
        for call in (
            lambda: rb.extend(td_of(rows())),
            lambda: rb.add(td_of(rows())[0]),
            lambda: rb.__setitem__(0, td_of(rows())[0]),
        ):
            with pytest.raises(ZeroDivisionError) as info:
                call()
            assert info.value.__notes__ == ["Raised by transform 1, Bad, on writing."]
        assert rb.write_count == 6

    @pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
    def test_none_on_reading(self, buffer):
        rb = buffer(storage=self.buffer().storage)

        def forgets(td):
            td["more"] = td["obs"] + 1

        rb.append_transform(forgets)
        for call in (lambda: rb.sample(2), lambda: rb[0]):
            with pytest.raises(RuntimeError, match="transform 0, forgets.*None.*return"):
                call()

    def test_no_tensor_on_writing(self):
        rb = self.buffer()
        for wrong, error in ((lambda td: "text", TypeError), (lambda td: {**td.to_dict(), "obs": "text"}, TypeError)):
            rb.append_transform(wrong, invert=True)
            with pytest.raises(error, match="str"):
                rb.extend(td_of(rows()))
            del rb.transform._steps[-1]
        assert rb.write_count == 6

    def test_other_keys(self):
        rb = self.buffer(lambda td: td.select("obs").set("new", td["obs"] * 2))
        assert set(rb.sample(3).keys()) == {"obs", "new", "index"}
        rb.append_transform(lambda td: td.exclude("obs"), invert=True)
        with pytest.raises(KeyError, match="obs"):
            rb.extend(td_of(rows()))
        assert rb.write_count == 6

    def test_another_length(self):
        rb = self.buffer(lambda td: td[:2])
        with pytest.raises(RuntimeError, match="return_info"):
            rb.sample(4)
        assert len(ReplayBuffer(storage=rb.storage, transform=lambda td: td[:2]).sample(4)) == 2
        assert len(rb[:]) == 2

    @pytest.mark.parametrize("wrong", [DoubleToFloat, VecNorm])
    def test_a_class(self, wrong):
        with pytest.raises(RuntimeError, match=f"class {wrong.__name__}"):
            self.buffer(wrong)

    @pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
    @pytest.mark.parametrize("collate", [None, list, lambda items: items[0]])
    @pytest.mark.parametrize("ragged", [False, True])
    def test_changing_what_was_read_never_reaches_the_store(self, storage, collate, ragged):
        if ragged and storage is LazyTensorStorage:
            pytest.skip("rows of a tensor storage are equal")
        rb = ReplayBuffer(storage=storage(20), collate_fn=collate)
        rb.extend([TensorDict({"a": torch.ones(i + 1 if ragged else 2)}, []) for i in range(4)])

        def change(data):
            for item in data if isinstance(data, list) else [data]:
                tds = item.tensordicts if isinstance(item, LazyStackedTensorDict) else [item]
                for td in tds:
                    td["a"].zero_()
                    td["b"] = torch.zeros(td.batch_size)
            return data

        rb.append_transform(change)
        for read in (lambda: rb.sample(3), lambda: rb[0], lambda: rb[1:3], lambda: rb[[0, 1]]):
            read()
        stored = ReplayBuffer(storage=rb.storage, collate_fn=list)
        for i in range(4):
            assert bool((stored[i]["a"] == 1).all())
            assert list(stored[i].keys()) == ["a"]

    def test_changing_what_is_written_never_reaches_the_caller(self):
        for data in (td_of(rows()), rows()):
            rb = ReplayBuffer(storage=LazyTensorStorage(20))

            def change(td):
                td["more"] = td["obs"] * 2
                del td["wide"]
                td["next"]["more"] = td["reward"]
                return td

            rb.append_transform(change, invert=True)
            rb.extend(data)
            row = td_of(rows())[0]
            rb.add(row if isinstance(data, TensorDict) else row.to_dict())
            rb[0:6] = data
            same(plain(data), rows())
            assert "more" in rb[:]["next"].keys()


# ---- in buffers ------------------------------------------------------------------------------------------------------------


def test_half_precision_inside():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), transform=DTypeCastTransform(torch.float16, torch.float32)
    )
    data = TensorDict({"obs": torch.randn(6, 3), "n": {"x": torch.randn(6)}, "i": torch.arange(6)}, [6])
    rb.extend(data)
    rb.add(data[0])
    assert {f.dtype for f in rb.storage.store.schema.fields} == {"float16", "int64"}
    batch = rb.sample(5)
    assert batch["n", "x"].dtype is torch.float32
    assert torch.allclose(batch["obs"], data["obs"][batch["index"] % 6], atol=1e-2)


def test_directions_that_do_nothing_cost_nothing():
    assert not Compose(ObservationNorm(0.0, 1.0, ["a"]), SelectTransform("a"), VecNorm()).writes
    assert not Compose(ExcludeTransform("a", inverse=True), RenameTransform([], [], ["a"], ["b"])).reads
    assert Compose(DoubleToFloat()).writes
    assert not Compose(DeviceCastTransform("cpu")).writes


def test_modules_and_functions():
    net = nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 2))
    rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=Compose(lambda x: x["obs"], net, torch.tanh))
    rb.extend(rows())
    assert not net[0].training
    assert rb.sample(4).shape == (4, 2)
    assert repr(rb.transform) == "Compose(function, Sequential, builtin_function_or_method)"


# ---- lists -----------------------------------------------------------------------------------------------------------------


class TestCompose:
    def test_nested(self):
        inner = Compose(lambda x: x + 1)
        outer = Compose(inner, lambda x: x * 2)
        assert outer(1) == 4
        inner.append(lambda x: x * 10)
        assert outer(1) == 40
        inner.insert(0, lambda x: x - 100, invert=True)
        assert (outer(1), outer.inv(1)) == (40, -99)
        assert len(outer) == 2
        assert outer[0] is inner
        assert "Compose(Compose(" in repr(outer)

    def test_slices_and_directions(self):
        steps = Compose(lambda x: x + 1, lambda x: x * 2, lambda x: x - 3)
        steps.append(lambda x: x / 4, invert=True)
        part = steps[1:]
        assert (part(5), part.inv(8), len(part)) == (7, 2, 3)
        assert next(iter(steps)) is steps[0]

    def test_a_buffer_has_a_list_of_its_own(self):
        mine = Compose(lambda x: x + 1)
        rb = ReplayBuffer(5, transform=mine)
        rb.append_transform(lambda x: x)
        assert (len(mine), len(rb.transform)) == (1, 2)

    def test_empty(self):
        assert Compose()(3) == Compose().inv(3) == 3
        assert not Compose().reads

    def test_state(self):
        first, second = (Compose(lambda x: x, VecNorm(["obs"]), nn.Linear(2, 2)) for _ in range(2))
        first[1](rows())
        state = first.state_dict()
        assert set(state) == {"1", "2"}
        second.load_state_dict(state)
        same(second.state_dict()["1"], state["1"])
        assert torch.equal(second[2].weight, first[2].weight)
        with pytest.raises(KeyError, match="'1', '2'"):
            second.load_state_dict({"0": {}})


# ---- devices ---------------------------------------------------------------------------------------------------------------


def test_part_of_a_tensordict_moves():
    td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2], device="cpu")
    moved = DeviceCastTransform("meta", in_keys=["a"])(td)
    assert moved.device is None
    assert (moved["a"].device.type, moved["b"].device.type) == ("meta", "cpu")
    assert td.device == torch.device("cpu")
    assert DeviceCastTransform("meta")(td).device.type == "meta"
    assert DeviceCastTransform("meta")({"n": {"a": torch.zeros(2)}})["n"]["a"].is_meta
    back = DeviceCastTransform("meta", "cpu", in_keys=["a"])
    assert (back.reads, back.writes) == (True, False)


@pytest.mark.gpu
def test_to_the_accelerator_and_back():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=DeviceCastTransform("cuda", "cpu"))
    rb.extend(td_of(rows()).cuda())
    batch = rb.sample(4)
    assert batch["obs"].is_cuda
    assert batch.device.type == "cuda"
    assert torch.equal(batch["obs"].cpu(), rb.storage[batch["index"].cpu()]["obs"])
