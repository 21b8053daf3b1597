"""A served store whose rows have slots: clients draw and write rows of any length, and the remover of the store says which go."""

import pytest

from engram import LazyMemmapStorage, Lifo, ReplayBuffer
from tests.serving.servers import serving
from tests.storages import ragged_rows as said

SIZE = 12


@pytest.mark.parametrize("remover", [None, Lifo])
def test_clients_write_to_slots(remover, tmp_path):
    storage = LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "d", ragged=said.fields(), ragged_layout="slots")
    with ReplayBuffer(storage=storage, remover=None if remover is None else remover()) as rb:
        rb.extend(said.rows(0, SIZE))
        with serving(tmp_path / "d") as server, ReplayBuffer.connect(server.address, batch_size=16) as remote:
            for first in range(100, 140, 4):
                remote.extend(said.rows(first, 4))
                assert set(said.check(remote.sample())) <= {*range(SIZE), *range(100, first + 4)}
            remote.add(said.row(200))
        kept = sorted(said.check(rb[:]))
    newest = [*range(129, 140), 200]
    assert kept == (newest if remover is None else [*range(8), 136, 137, 138, 200])
