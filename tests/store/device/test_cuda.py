"""What a GPU shows: no call waits there, and graphs do what the calls do. In small on the CPU, too."""

import pytest
import torch
from tensordict import TensorDict

from engram import PrioritizedSampler, TensorDictReplayBuffer
from tests.device import places
from tests.device.synchronisation import no_synchronisation


@pytest.fixture(params=places.PLACES)
def place(request, monkeypatch):
    return places.there(request, monkeypatch)


def steps_of(place, n, first=0):
    numbers = torch.arange(first, first + n, device=place.device)
    return TensorDict({"a": numbers, "b": numbers.unsqueeze(1).repeat(1, 3).float()}, [n])


def made(place, *, prioritized):
    sampler = PrioritizedSampler(alpha=0.6, beta=0.4) if prioritized else None
    rb = TensorDictReplayBuffer(storage=place.storage(1_000), sampler=sampler, batch_size=64)
    rb.extend(steps_of(place, 500))
    rb.sample()
    return rb


def cycle(rb, steps, error):
    rb.extend(steps)
    batch = rb.sample()
    if error is not None:
        rb.update_priority(batch["index"], error, generation=batch["index_generation"])
    rb[batch["index"][:4]] = steps[:4]
    return batch


@pytest.mark.parametrize("prioritized", [False, True])
def test_no_call_waits(place, prioritized):
    rb, steps = made(place, prioritized=prioritized), steps_of(place, 7)
    error = torch.rand(64, device=place.device) if prioritized else None
    cycle(rb, steps, error)
    with no_synchronisation():
        for _ in range(100):
            cycle(rb, steps, error)
            rb[3] = steps[0]
    assert rb.write_count == 500 + 101 * 7


@pytest.mark.parametrize("prioritized", [False, True])
def test_graphs(place, prioritized):
    rb, steps = made(place, prioritized=prioritized), steps_of(place, 7, 500)
    error = torch.rand(64, device=place.device) + 0.1 if prioritized else None
    last = []
    again = place.captured(lambda: last.append(cycle(rb, steps, error)))
    before = rb.write_count
    assert before == 500 + 3 * 7
    drawn = []
    for turn in range(200):
        steps["a"].copy_(torch.arange(7 * turn, 7 * turn + 7, device=place.device))
        steps["b"].copy_(steps["a"].unsqueeze(1).expand(7, 3))
        again()
        batch = last[-1]
        drawn.append(batch["a"].clone())
        assert torch.equal(batch["b"][:, 0].long(), batch["a"])
    assert rb.write_count == before + 1_400
    assert len(rb) == 1_000
    assert len({tuple(one.tolist()) for one in drawn}) > 150
    assert (rb[:]["b"][:, 0].long() == rb[:]["a"]).all()
    rb.stats()
