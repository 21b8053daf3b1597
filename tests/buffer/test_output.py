"""Batches in other forms: arrays, and attributes."""

import copy
import pickle
from itertools import islice
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    DeviceLoader,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.errors import CorruptStore


class Pair(NamedTuple):
    left: object
    right: object


def rows(n=20):
    return {
        "obs": torch.arange(n * 2).reshape(n, 2),
        "next": {"reward": torch.arange(n) / 2, "done": torch.arange(n) % 5 == 4},
    }


def plain(data):
    """Batches of any form as nested dicts of lists."""
    if isinstance(data, TensorDict):
        data = dict(data.items())
    if isinstance(data, tuple) and hasattr(data, "_asdict"):
        data = data._asdict()
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        return [plain(value) for value in data]
    return data.tolist()


def leaves(data):
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in leaves(value)]
    return [leaf for value in data for leaf in leaves(value)] if isinstance(data, tuple | list) else [data]


MAKES = {
    "dict": lambda **given: ReplayBuffer(storage=LazyTensorStorage(20), **given),
    "td": lambda **given: TensorDictReplayBuffer(storage=LazyTensorStorage(20), **given),
    "list": lambda **given: ReplayBuffer(storage=ListStorage(20), **given),
    "priorities": lambda **given: PrioritizedReplayBuffer(storage=LazyTensorStorage(20), alpha=1.0, beta=1.0, **given),
    "td priorities": lambda **given: TensorDictPrioritizedReplayBuffer(
        storage=LazyTensorStorage(20), alpha=1.0, beta=1.0, **given
    ),
    "windows": lambda **given: ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4), **given),
    "epochs": lambda **given: ReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(), **given),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("output", ["numpy", "namedtuple"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_the_same_batches_in_another_form(make, output, prefetch):
    ours, theirs = (
        make(batch_size=8, prefetch=prefetch, output=form, generator=torch.Generator().manual_seed(1))
        for form in (output, "torch")
    )
    for rb in (ours, theirs):
        data = rows()
        if isinstance(rb.storage, ListStorage):
            rb.extend([{"obs": data["obs"][i], "next": {"reward": data["next"]["reward"][i]}} for i in range(20)])
        else:
            rb.extend(TensorDict(data, [20]) if isinstance(rb, TensorDictReplayBuffer) else data)
    for take in (
        lambda rb: [rb.sample() for _ in range(3)],
        lambda rb: [rb.sample(return_info=True) for _ in range(3)],
        lambda rb: list(islice(rb, 2)),
        lambda rb: [rb.next()],
        lambda rb: list(islice(DeviceLoader(rb, "cpu"), 2)),
        lambda rb: list(islice(DeviceLoader(rb, "cpu", return_info=True), 2)),
    ):
        got, expected = take(ours), take(theirs)
        assert plain(got) == plain(expected)
        for batch in got:
            info = {}
            if type(batch) is tuple:
                batch, info = batch
            kind = np.ndarray if output == "numpy" else torch.Tensor
            assert all(isinstance(leaf, kind) for leaf in leaves(batch) + leaves(list(info.values())))
            if output == "numpy":
                assert type(batch) is type(batch["next"]) is dict
            else:
                assert batch.obs.shape[1:] == (2,)
                assert batch.next.reward is batch[list(batch._fields).index("next")][0]
    assert plain(ours[:5]) == plain(theirs[:5])  # rows by number are what they were


def test_no_copy():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, output="numpy")
    rb.extend(rows())
    batch = rb.sample()
    assert batch["obs"].flags.writeable
    assert not batch["obs"].flags.owndata  # the memory is the tensor's


@pytest.mark.parametrize("output", ["numpy", "namedtuple"])
def test_tuples_and_single_tensors_stay_such(output):
    kind = np.ndarray if output == "numpy" else torch.Tensor
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, output=output)
    rb.extend(torch.arange(20))
    assert type(rb.sample()) is kind
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, output=output)
    rb.extend((torch.arange(20), Pair(torch.arange(20), {"a": torch.arange(20)})))
    first, pair = rb.sample()
    assert type(pair) is Pair
    assert type(first) is kind
    assert type(pair.right["a"] if output == "numpy" else pair.right.a) is kind


def test_priorities_are_updated_from_arrays():
    rb = PrioritizedReplayBuffer(storage=LazyTensorStorage(20), alpha=1.0, beta=1.0, batch_size=8, output="numpy")
    rb.extend(rows())
    info = rb.sample(return_info=True)[1]
    rb.update_priority(info["index"], np.full(8, 7.0), generation=info["index_generation"])
    assert rb.sampler.default_priority == 7


def test_batches_of_attributes_are_one_class_and_can_be_pickled():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8, output="namedtuple")
    rb.extend(rows())
    first, second = rb.sample(), rb.sample()
    assert type(first) is type(second)
    for twin in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert type(twin) is type(first)
        assert plain(twin) == plain(first)


@pytest.mark.parametrize("name", ["next obs", "class", "_hidden", "1st", ""])
def test_names_that_are_no_attributes(name):
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8, output="namedtuple")
    try:
        rb.extend({"a": {name: torch.arange(20)}})
    except ValueError:
        assert not name  # no name of a field at all
        return
    with pytest.raises(
        ValueError, match=rf"sample: output='namedtuple': field \('a', '{name}'\): expected a name .*RenameTransform"
    ):
        rb.sample()


def test_a_dtype_that_numpy_does_not_have():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8, output="numpy")
    rb.extend({"a": {"b": torch.zeros(20, dtype=torch.bfloat16)}})
    with pytest.raises(
        TypeError, match=r"output='numpy': field \('a', 'b'\): NumPy has no torch\.bfloat16\. .*dtypes="
    ):
        rb.sample()


@pytest.mark.parametrize("wrong", ["jax", None, 1, "NumPy", ["numpy"]])
def test_other_outputs_are_refused(wrong):
    with pytest.raises(ValueError, match="ReplayBuffer: output: expected 'torch', 'numpy' or 'namedtuple', got"):
        ReplayBuffer(output=wrong)


@pytest.mark.parametrize("output", ["numpy", "namedtuple"])
def test_copies_and_stores_keep_it(tmp_path, output):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "a"), batch_size=8, prefetch=2, output=output
    )
    rb.extend(rows())
    kind = type(rb.sample())
    assert type(pickle.loads(pickle.dumps(rb)).sample()) is kind
    state = rb.state_dict()
    rb.load_state_dict(state)
    assert type(rb.sample()) is kind
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "a")
    assert type(rb.sample()) is kind
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "a", output="torch")
    assert isinstance(rb.sample()["obs"], torch.Tensor)
    rb.close()
    note = tmp_path / "a" / ".engram" / "buffer.json"
    assert f'"{output}"' in note.read_text()
    note.write_text(note.read_text().replace(f'"{output}"', '"jax"'))
    with pytest.raises(CorruptStore, match="open: what was recorded: output: expected"):
        ReplayBuffer.open(tmp_path / "a")
    assert type(ReplayBuffer.open_or_create(tmp_path / "a", 20, output=output, batch_size=4).sample()) is kind


class TestDevice:
    @pytest.mark.parametrize("output", ["torch", "namedtuple"])
    @pytest.mark.parametrize("return_info", [False, True])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_batches_move(self, output, return_info, prefetch):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8, output=output, prefetch=prefetch)
        rb.extend(rows())
        sample = rb.sample(return_info=return_info, device="meta")
        batch, info = sample if return_info else (sample, {})
        assert {leaf.device.type for leaf in leaves(batch) + leaves(info)} == {"meta"}
        batch = rb.sample(device="cpu")
        assert {leaf.device.type for leaf in leaves(batch)} == {"cpu"}

    def test_tensordicts_move(self):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=8)
        rb.extend(TensorDict(rows(), [20]))
        batch = rb.sample(device=torch.device("meta"))
        assert batch.device.type == batch["index"].device.type == batch["next", "done"].device.type == "meta"

    def test_what_is_no_device(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8, output="numpy")
        rb.extend(rows())
        with pytest.raises(ValueError, match="sample: device: expected none, .*got 'cpu'.*output='torch'"):
            rb.sample(device="cpu")
        with pytest.raises(RuntimeError, match="sample: device"):
            rb.sample(device="nonsense")
