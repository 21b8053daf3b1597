"""TorchRL's buffer for ``torch.distributed.rpc``: what is called of a reference is called of the buffer."""

import inspect
import pickle

import pytest
import torch
from tensordict import TensorDict

import engram
from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    TensorDictReplayBuffer,
)


class Reference:
    """As an ``RRef``: it has nothing of the buffer but the buffer."""

    def __init__(self, buffer):
        self._buffer = buffer

    def local_value(self):
        return self._buffer


def rows(n, first=0):
    return TensorDict({"a": torch.arange(first, first + n)}, [n])


def test_methods_take_a_reference_in_place_of_the_buffer():
    cls = RemoteTensorDictReplayBuffer
    rb = cls(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(alpha=1.0, beta=1.0), batch_size=4)
    ref = Reference(rb)
    assert cls.extend(ref, rows(10)).tolist() == list(range(10))
    assert cls.add(ref, rows(1, 10)[0]) == 10
    cls.update_priority(ref, torch.arange(11), torch.tensor([0.0] * 10 + [1.0]))
    batch, info = cls.sample(ref, 4, None, True)  # TorchRL's order
    assert batch["a"].tolist() == [10] * 4
    assert info["index"].tolist() == [10] * 4
    batch["td_error"] = torch.full((4,), 2.0)
    cls.update_tensordict_priority(ref, batch)
    assert cls.stats(ref)["size"] == 11
    state = cls.state_dict(ref)
    cls.empty(ref)
    assert len(rb) == 0
    cls.load_state_dict(ref, state)
    assert len(rb) == 11
    assert rb.sample(return_info=True)[0]["a"].tolist() == [10] * 4


def test_methods_can_be_sent_to_the_process_of_the_buffer():
    class Node(RemoteTensorDictReplayBuffer):
        pass

    for method in (Node.extend, Node.add, Node.sample, Node.update_priority, Node.stats, Node.dumps):
        assert pickle.loads(pickle.dumps(method)) is method


def test_it_is_a_tensordict_buffer_that_open_knows(tmp_path):
    with RemoteTensorDictReplayBuffer(
        storage=LazyMemmapStorage(50, scratch_dir=tmp_path / "store"), batch_size=4
    ) as rb:
        rb.extend(rows(20))
        assert isinstance(rb, TensorDictReplayBuffer)
        assert len(rb.sample()) == 4
        with engram.serve(rb) as address, ReplayBuffer.connect(address) as other:  # what is to be used in its place
            assert type(other) is RemoteTensorDictReplayBuffer
            assert other.extend(rows(5, 20)).tolist() == list(range(20, 25))
    with ReplayBuffer.open(tmp_path / "store") as rb:
        assert type(rb) is RemoteTensorDictReplayBuffer
        assert rb[:]["a"].tolist() == list(range(25))


def test_its_signature_is_that_of_torchrl():
    torchrl = pytest.importorskip("torchrl.data", reason="torchrl is not installed")
    for name in ("sample", "extend", "add", "update_priority", "update_tensordict_priority"):
        theirs = inspect.signature(getattr(torchrl.RemoteTensorDictReplayBuffer, name)).parameters
        ours = inspect.signature(getattr(RemoteTensorDictReplayBuffer, name)).parameters
        positional = [it.name for it in theirs.values() if it.kind is it.POSITIONAL_OR_KEYWORD]
        for place, (one, other) in enumerate(zip(positional, ours, strict=False)):
            assert place == 0 or one in (other, "tensordicts"), name
