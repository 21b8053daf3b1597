"""The end flag that a ``HERReplayBuffer`` is told to read."""

import pytest
import torch

from engram import HERReplayBuffer, LazyTensorStorage
from tests.around.hindsight import reward, steps

pytestmark = pytest.mark.filterwarnings("ignore:sample. Hindsight. goals are those that were achieved before")


def her(data, **arguments):
    rb = HERReplayBuffer(reward, storage=LazyTensorStorage(100), batch_size=8, **arguments)
    rb.extend(data)
    return rb


@pytest.mark.parametrize("ids", [False, True])
def test_an_end_key_that_was_named_must_be_stored(ids):
    data = steps([4, 3, 5], ids=ids)
    data["next", "terminated"] = data["next", "done"].clone()
    with pytest.raises(KeyError, match=r"Hindsight: end_key: expected a stored field.*'next', 'dnoe'"):
        her(data, end_key=("next", "dnoe")).sample()
    for key in (("next", "done"), ("next", "terminated")):
        assert len(her(data, end_key=key).sample()) == 8
    del data["next", "done"]
    assert len(her(data).sample()) == 8  # the default one: ids and the flag beside it do
    assert torch.is_tensor(her(data, end_key=("next", "terminated")).sample()["desired_goal"])
