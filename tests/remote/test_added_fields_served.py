"""A field that is added to a store which is being served: the server and its clients go on with those that they began with."""

import pytest
import torch

from engram import LazyMemmapStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, SliceSampler
from tests.serving.servers import serving

SAMPLERS = {
    "uniform": RandomSampler,
    "priority": lambda: PrioritizedSampler(64, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2, end_key="done"),
}


def rows(n, first=0):
    steps = torch.arange(first, first + n)
    return {"a": steps, "done": steps % 4 == 3}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("lanes", [1, 2])
def test_clients_go_on_and_what_they_write_is_filled(sampler, lanes, tmp_path):
    storage = LazyMemmapStorage(64, scratch_dir=tmp_path / "store", lanes=lanes)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=8)
    rb.extend(rows(16), lane=0)
    with serving(tmp_path / "store") as served:
        client = ReplayBuffer.connect(served.address)
        assert set(client.sample()) == {"a", "done"}
        rb.add_field("v", torch.zeros(2), fill=3.0)
        for n in range(3):
            batch = client.sample()
            assert set(batch) == {"a", "done"}
            assert torch.equal(batch["done"], batch["a"] % 4 == 3)
            client.extend(rows(4, 16 + 4 * n), lane=lanes - 1)
        late = ReplayBuffer.connect(served.address)
        assert set(late.sample()) == {"a", "done"}
        assert rb["a"].tolist() == list(range(28))
        assert rb["v"].tolist() == [[3.0, 3.0]] * 28
        with pytest.raises(
            RuntimeError, match="add_field: expected the rows in this process, the buffer is a connection"
        ):
            client.add_field("w", 0)
        late.close()
        client.close()
    with serving(tmp_path / "store") as served:
        client = ReplayBuffer.connect(served.address)
        assert set(client.sample()) == {"a", "done", "v"}
        client.extend(rows(4, 28), lane=0)
        client.close()
    assert rb["v"].eq(3.0).all()
    assert len(rb) == 32
    rb.close()
