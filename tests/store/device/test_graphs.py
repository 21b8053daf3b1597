"""Calls that are captured: what a CUDA graph does of them, on an imitation that does the recorded operations again."""

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, NoSampleable, PrioritizedSampler, RowError, TensorDictReplayBuffer
from tests.device.graphs import CAPTURING, Graph, state_of
from tests.store.device.there import There, both_ways  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("both_ways")


def made(capacity=20, *, prioritized=False, **arguments):
    sampler = PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0) if prioritized else None
    rb = TensorDictReplayBuffer(storage=There(capacity, **arguments), sampler=sampler, batch_size=64)
    rb.extend(steps_of(torch.arange(5)), lane=0)
    rb.sample()
    return rb


def steps_of(numbers):
    return TensorDict({"a": numbers, "b": numbers.unsqueeze(-1).expand(*numbers.shape, 3).float()}, [len(numbers)])


class Steps:
    """What a graph appends: the memory of the next rows."""

    def __init__(self, n):
        self.numbers = torch.zeros(n, dtype=torch.int64)

    def __call__(self):
        return TensorDict(
            {"a": self.numbers, "b": self.numbers.unsqueeze(-1).repeat(1, 3).float()}, [len(self.numbers)]
        )


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(("n", "times"), [(3, 2), (3, 11), (7, 30), (50, 2)])
def test_appends_go_where_the_device_is(monkeypatch, n, times, prioritized):
    rb, plain, steps = made(prioritized=prioritized), made(), Steps(n)
    state = state_of(rb.storage)
    graph = Graph(monkeypatch, state, lambda: rb.extend(steps()))
    assert len(rb) == 5
    assert rb["a"].tolist() == [0, 1, 2, 3, 4]
    at = 100
    for turn in range(times):
        steps.numbers.copy_(torch.arange(at, at + n))
        graph.replay()
        assert torch.equal(graph.result, plain.extend(steps()))
        at += n
        if turn % 4 == 3:  # the host looks, or writes by itself
            for it in (rb, plain):
                it.extend(steps_of(torch.arange(at, at + 2)))
                it[1] = steps_of(torch.tensor([at]))[0]
                if turn == 7:
                    it.empty()
            at += 2
    assert len(rb) == len(plain)
    assert rb.write_count == plain.write_count
    assert torch.equal(rb["a"], plain["a"])
    assert torch.equal(rb["b"], plain["b"])
    rows = torch.arange(20)
    assert torch.equal(rb.storage.tickets_of(rows), plain.storage.tickets_of(rows))
    assert rb.storage.extent() == plain.storage.extent()
    assert torch.equal(rb.storage.store.rows.numbers[:-1], plain.storage.store.rows.numbers[:-1])
    if prioritized:
        assert rb.sampler.priorities().leaves(20).tolist() == [1.0] * len(rb) + [0.0] * (20 - len(rb))
    graph.replay()
    assert rb.write_count == plain.write_count + n


def test_copies_on_the_host_follow(monkeypatch):
    rb, steps = made(), Steps(4)
    rb.storage.store.on_host([0])
    graph = Graph(monkeypatch, state_of(rb.storage), lambda: rb.extend(steps()))
    for at in range(100, 200, 4):
        steps.numbers.copy_(torch.arange(at, at + 4))
        graph.replay()
    assert len(rb) == 20
    (copied,) = rb.storage.store.on_host([0])[1]
    assert torch.equal(copied, rb.storage.store.tensors[0])


def test_uniform_draws_follow_the_ring(monkeypatch):
    rb, steps = made(), Steps(3)
    state = state_of(rb.storage)
    draw = Graph(monkeypatch, state, rb.sample)
    append = Graph(monkeypatch, state, lambda: rb.extend(steps()))
    seen = []
    for size in (5, 8, 11, 14, 17, 20, 20):
        found = set()
        for _ in range(20):
            draw.replay()
            batch = draw.result
            assert torch.equal(batch["b"][:, 0].long(), batch["a"])
            found |= set(batch["index"].tolist())
        assert found == set(range(size))
        seen.append(draw.result["index"].tolist())
        steps.numbers.add_(10)
        append.replay()
    assert len({tuple(one) for one in seen}) == len(seen)


def test_draws_of_several_lanes_follow_what_the_host_writes(monkeypatch):
    rb = made(lanes=4)
    draw = Graph(monkeypatch, state_of(rb.storage), rb.sample)
    for lane in (2, 3, 2):
        rb.extend(steps_of(torch.arange(3)), lane=lane)
        expected = set((rb.storage.tickets_of(torch.arange(20)) >= 0).nonzero().flatten().tolist())
        found = set()
        for _ in range(8):
            draw.replay()
            found |= set(draw.result["index"].tolist())
        assert found == expected


def test_captured_draws_pass_over_removed_rows(monkeypatch):
    rb = made()
    rb.extend(steps_of(torch.arange(15)))
    draw = Graph(monkeypatch, state_of(rb.storage), rb.sample)
    rb.remove(torch.arange(3, 12))
    for _ in range(20):
        draw.replay()
        assert not ((draw.result["index"] >= 3) & (draw.result["index"] < 12)).any()
    rb.empty()
    draw.replay()
    with pytest.raises(NoSampleable, match="1 draws found no row"):
        rb.stats()


def test_a_cycle_of_priorities(monkeypatch):
    rb, error = made(prioritized=True), torch.zeros(64)

    def cycle():
        batch = rb.sample()
        rb.sampler.priorities().update_there(batch["index"], error, batch["index_generation"])
        return batch

    graph = Graph(monkeypatch, state_of(rb.storage), cycle)
    assert rb.sampler.priorities().leaves(5).tolist() == [1.0] * 5
    error.copy_(torch.rand(64) + 0.5)
    graph.replay()
    batch = graph.result
    assert set(batch["index"].tolist()) == set(range(5))
    expected = torch.ones(5, dtype=torch.float64)
    expected[batch["index"]] = error.double()
    assert torch.equal(rb.sampler.priorities().leaves(5), expected)
    rb.sampler.beta = 0.0
    graph.replay()
    assert graph.result["priority_weight"].tolist() == [1.0] * 64
    rb.storage.set(torch.arange(5), steps_of(torch.arange(5)))
    assert rb.stats()["priority_updates_dropped"] == 0


def test_edits_are_captured(monkeypatch):
    rb, rows, steps = made(), torch.tensor([1, -1, 1]), Steps(3)
    before = rb.storage.tickets_of(torch.arange(5))
    writes = rb.storage.writes_of(torch.arange(5), before)
    which = range(2)

    def edit():
        data = steps()
        rb.storage.store.edit_there(rows, which, [data["a"], data["b"]])

    graph = Graph(monkeypatch, state_of(rb.storage), edit)
    single = Graph(monkeypatch, state_of(rb.storage), lambda: rb.__setitem__(2, steps()[0]))
    steps.numbers.copy_(torch.tensor([7, 8, 9]))
    graph.replay()
    single.replay()
    assert rb["a"].tolist() == [0, 9, 7, 3, 8]
    with rb.storage.paused:  # the host hears of it
        now = rb.storage.tickets_of(torch.arange(5))
    assert (now != before).tolist() == [False, True, True, False, True]
    assert torch.equal(rb.storage.writes_of(torch.arange(5), now), writes)
    rows.fill_(9)
    graph.replay()
    with pytest.raises(RowError, match="got 3 others"):
        rb.stats()


def test_what_the_host_must_do_is_refused(monkeypatch):
    lanes = made(lanes=4)
    monkeypatch.setattr(CAPTURING, lambda *_: True)
    with pytest.raises(RuntimeError, match="has 4 lanes: the host must place the rows"):
        lanes.extend(steps_of(torch.arange(3)), lane=1)
    assert len(lanes) == 5


def test_tensors_of_the_host_are_refused(monkeypatch):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20, device="meta"), batch_size=4)
    rb.extend(steps_of(torch.arange(5)))
    monkeypatch.setattr(CAPTURING, lambda *_: True)
    with pytest.raises(
        RuntimeError, match="extend: expected tensors on meta while a CUDA graph is captured, got one on cpu"
    ):
        rb.extend(steps_of(torch.arange(5)))
    with pytest.raises(RuntimeError, match="read: expected tensors on meta"):
        rb[[3, 1]]
    assert len(rb) == 5
