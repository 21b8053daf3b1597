"""What only a GPU shows: no call waits there, and graphs do what the calls do."""

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from tests.device.synchronisation import no_synchronisation

pytestmark = pytest.mark.gpu


def steps_of(n, first=0):
    numbers = torch.arange(first, first + n, device="cuda")
    return TensorDict({"a": numbers, "b": numbers.unsqueeze(1).repeat(1, 3).float()}, [n])


def made(*, prioritized):
    sampler = PrioritizedSampler(alpha=0.6, beta=0.4) if prioritized else None
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000, device="cuda"), sampler=sampler, batch_size=64)
    rb.extend(steps_of(500))
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
def test_no_call_waits(prioritized):
    rb, steps = made(prioritized=prioritized), steps_of(7)
    error = torch.rand(64, device="cuda") if prioritized else None
    cycle(rb, steps, error)
    with no_synchronisation():
        for _ in range(100):
            cycle(rb, steps, error)
            rb[3] = steps[0]
    assert rb.write_count == 500 + 101 * 7


@pytest.mark.parametrize("prioritized", [False, True])
def test_graphs(prioritized):
    rb, steps = made(prioritized=prioritized), steps_of(7, 500)
    error = torch.rand(64, device="cuda") + 0.1 if prioritized else None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            cycle(rb, steps, error)
    torch.cuda.current_stream().wait_stream(stream)
    before = rb.write_count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = cycle(rb, steps, error)
    assert rb.write_count == before
    drawn = []
    for turn in range(200):
        steps["a"].copy_(torch.arange(7 * turn, 7 * turn + 7, device="cuda"))
        steps["b"].copy_(steps["a"].unsqueeze(1).expand(7, 3))
        graph.replay()
        drawn.append(batch["a"].clone())
        assert torch.equal(batch["b"][:, 0].long(), batch["a"])
    assert rb.write_count == before + 1_400
    assert len(rb) == 1_000
    assert len({tuple(one.tolist()) for one in drawn}) > 150
    assert (rb[:]["b"][:, 0].long() == rb[:]["a"]).all()
    rb.stats()
