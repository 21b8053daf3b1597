"""A ragged field in a described row is refused by the name of the file that describes it."""

import pytest
import torch

from engram import LazyMemmapStorage, Ragged, ReplayBuffer
from engram.cli.plan import Misuse, fields_of_row


@pytest.mark.parametrize("described", [True, False])
def test_the_message_names_the_file(tmp_path, described):
    with ReplayBuffer(
        storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "data", ragged={"t": Ragged(torch.int64)})
    ) as rb:
        rb.add({"t": torch.arange(3)})
    (path,) = (tmp_path / "data").rglob("store.json")
    with pytest.raises(Misuse) as caught:
        fields_of_row(*((None, path) if described else (path, None)))
    assert str(caught.value).startswith(f"{path}: t is ragged")
