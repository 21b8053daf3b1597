"""Frames once on an accelerator: next observations from following rows, beside storages on the host."""

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engram import (
    FinalObservations,
    LazyTensorStorage,
    NextFromFollowing,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.around.test_next_from_following import check, steps
from tests.device.graphs import Graph, state_of
from tests.device.synchronisation import no_synchronisation
from tests.statistics_of import assert_proportional, assert_uniform
from tests.store.device.there import There, both_ways  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("both_ways")


def made(
    capacity=24, *, storage=There, finals=50, inner=RandomSampler, seed=0, cls=TensorDictReplayBuffer, **arguments
):
    kept = FinalObservations(["obs"], storage(finals))
    sampler = NextFromFollowing(inner(), kept)
    rows = storage(capacity, **arguments)
    return cls(storage=rows, sampler=sampler, transform=kept, generator=torch.Generator().manual_seed(seed))


def by_priority():
    return PrioritizedSampler(alpha=1.0, beta=0.5, eps=0.0)


def few(n):
    """Fewer rows where each is drawn in Triton's interpreter."""
    return n // 4 if There.kernels else n


def known(batch):
    return set(zip(batch["lane"].tolist(), batch["number"].tolist(), strict=True))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.booleans(), min_size=1, max_size=9)), min_size=1, max_size=9
    ),
    lanes=st.sampled_from([1, 3]),
    prioritized=st.booleans(),
)
def test_as_if_they_were_stored(pieces, lanes, prioritized):
    rb = made(lanes=lanes, inner=by_priority if prioritized else RandomSampler)
    ends, written = [set() for _ in range(lanes)], [0] * lanes
    for lane, done in pieces:
        lane %= lanes
        rb.extend(steps(done, first=written[lane], lane=lane), lane=lane)
        ends[lane] |= {written[lane] + i for i, last in enumerate(done) if last}
        written[lane] += len(done)
    length = 24 // lanes
    expected = {
        (lane, number)
        for lane in range(lanes)
        for number in range(max(0, written[lane] - length), written[lane])
        if number in ends[lane] or number + 1 < written[lane]
    }
    assert rb.can_sample(3) == bool(expected)
    batch = rb.sample(few(400) if expected else 2)
    if not expected:
        with pytest.raises(NoSampleable):
            rb.stats()
        return
    check(batch, ends)
    assert known(batch) == expected or (There.kernels and known(batch) < expected)
    assert rb.stats()["final_observations_lost"] == 0


@pytest.mark.parametrize("inner", [RandomSampler, by_priority])
@pytest.mark.parametrize("lanes", [1, 4])
def test_the_same_keys_draw_what_the_host_draws(inner, lanes):
    both = [made(40, storage=storage, inner=inner, lanes=lanes) for storage in (There, LazyTensorStorage)]
    for turn in range(5):  # each lane ends with an episode, so no row is without a next observation
        for rb in both:
            for lane in range(lanes):
                rb.extend(steps([False, False, True, False, True], first=5 * turn, lane=lane), lane=lane)
        ours, theirs = (rb.sample(64, return_info=True) for rb in both)
        for key in theirs[0].keys(include_nested=True, leaves_only=True):
            if key == ("next", "final"):
                continue  # tags are random
            assert torch.allclose(ours[0][key].double(), theirs[0][key].double(), rtol=1e-6, atol=0), key
            assert ours[0][key].dtype is theirs[0][key].dtype
        assert torch.equal(ours[1]["index"], theirs[1]["index"])
        assert torch.equal(ours[1]["next", "obs"], theirs[1]["next", "obs"])


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "lanes"])
def test_rows_that_have_one_are_drawn_in_proportion(kind):
    """10 of 12 rows have none yet, or none any more: what is drawn in their place is a fair draw, too."""
    rb = made(12, inner=by_priority if kind == "prioritized" else RandomSampler, lanes=2 if kind == "lanes" else 1)
    if kind == "lanes":
        rb.extend(steps([False, False, False], lane=0), lane=0)
        rb.extend(steps([False], lane=1), lane=1)
        drawable = {0: 1.0, 1: 1.0}
    else:
        rb.extend(steps([False] * 11))
        drawable = dict.fromkeys(range(10), 1.0)
    if kind == "prioritized":
        drawable = {row: row % 4 + 0.5 for row in drawable}
        rb.update_priority(torch.arange(11), torch.tensor([*drawable.values(), 9.0]))
    counts = dict.fromkeys(drawable, 0)
    for _ in range(few(20)):
        for row in rb.sample(500)["index"].tolist():
            counts[row] += 1
    assert_proportional(counts.values(), drawable.values()) if kind == "prioritized" else assert_uniform(
        counts.values()
    )


def test_nothing_has_a_priority():
    rb = made(inner=by_priority)
    rb.extend(steps([False] * 5 + [True]))
    rb.update_priority(torch.arange(6), torch.zeros(6))
    assert rb.sample(2)["priority_weight"].tolist() == [0.0, 0.0]
    with pytest.raises(NoSampleable, match="no priority"):
        rb.stats()


def test_ends_without_a_final_observation_are_passed_over():
    rb = made(finals=2)
    rb.extend(steps([False, False, False]))
    assert rb.end_trajectory().tolist() == [2]
    rb.extend(steps([False, True, False, True, False], first=3))
    assert known(rb.sample(300)) == {(0, number) for number in (0, 1, 3, 4, 5, 6)}
    rb.extend(steps([True], first=8))  # the first final observation is overwritten
    batch = rb.sample(300)
    check(batch, [{2, 4, 6, 8}])
    assert known(batch) == {(0, number) for number in (0, 1, 3, 5, 6, 7, 8)}
    assert rb.stats()["final_observations_lost"] == 1
    rb.extend(steps([True] * 5, first=9))  # more than there are places at once
    batch = rb.sample(400)
    check(batch, [set(range(8, 14))])
    assert known(batch) == {(0, number) for number in (0, 1, 3, 5, 7, 12, 13)}


@pytest.mark.parametrize("ends", ["ids", "all flags", "step types"])
def test_what_ends_an_episode(ends):
    kept = FinalObservations(["obs"], There(9), end_keys=["end"])
    keys = {"ids": {"traj_key": "id"}, "all flags": {"end_keys": ["flags"], "end_when": "all"}, "step types": {}}[ends]
    sampler = NextFromFollowing(RandomSampler(), kept, **keys)
    rb = ReplayBuffer(storage=There(20), sampler=sampler, transform=kept, batch_size=200)
    number = torch.arange(8)
    rb.extend(
        {
            "obs": number,
            "end": number < 0,
            "id": number // 3,
            "flags": torch.stack([number % 3 == 2, number % 2 == 0], 1),
            "step_type": torch.tensor([0, 1, 2, 0, 1, 1, 0, 1]),
            "next": {"obs": number + 1},
        }
    )
    expected = {"ids": [0, 1, 3, 4, 6], "all flags": [0, 1, 3, 4, 5, 6], "step types": [0, 1, 3, 4, 6]}[ends]
    batch = rb.sample()
    assert torch.equal(batch["next"]["obs"], batch["obs"] + 1)
    assert sorted(set(batch["obs"].tolist())) == expected


class Marked(FinalObservations):
    """On a device without data marks cannot be written: these are of rows within an episode."""

    def inv(self, data):
        stored = super().inv(data)
        assert stored["next", "final"].device.type == "meta"
        stored["next", "final"] = torch.full((len(data), 2), -1)
        return stored


@pytest.mark.parametrize("inner", [RandomSampler, by_priority])
@pytest.mark.parametrize("lanes", [1, 3])
def test_nothing_is_waited_for(inner, lanes):
    there = torch.device("meta")
    kept = Marked(["obs"])
    sampler = NextFromFollowing(inner(), kept)
    storage = LazyTensorStorage(99, device="meta", lanes=lanes)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, transform=kept, batch_size=16)
    assert (kept.storage.max_size, kept.storage.device) == (12, there)
    rb.extend(steps([False] * 30), lane=0)
    rb.sample()
    with no_synchronisation() as guard:
        for _ in range(3):
            rb.extend(steps([False] * 30), lane=lanes - 1)
            batch = rb.sample()
            assert batch["next", "obs"].shape == (16, 2)
            assert batch["next", "obs"].device == there
    assert guard.operations


@pytest.mark.parametrize("inner", [RandomSampler, by_priority])
def test_a_graph_appends_and_draws(monkeypatch, inner):
    rb = made(20, inner=inner)
    rb.extend(steps([False, True, False]))
    rb.sample(64)
    rows = steps([False] * 3, first=3)

    def step():
        rb.extend(rows)
        return rb.sample(64)

    state = state_of(rb.storage) + state_of(rb.sampler.finals.storage)
    graph, ends, at = Graph(monkeypatch, state, step), {1}, 3
    for turn in range(12):
        last = turn % 3 if turn % 4 else -1
        fresh = steps([place == last for place in range(3)], first=at)
        if last >= 0:
            ends.add(at + last)
        for key in ("obs", "number", ("next", "obs"), ("next", "done")):
            rows[key].copy_(fresh[key])
        graph.replay()
        at += 3
        oldest = max(0, at - 20)
        expected = {(0, number) for number in range(oldest, at) if number in ends or number + 1 < at}
        seen = known(graph.result)
        check(graph.result, [ends])
        assert seen <= expected
        assert len(seen) > len(expected) // 2
    assert len(rb) == 20
    assert len(rb.sampler.finals.storage) == len(ends)  # the host is told
    state = rb.state_dict()
    again = made(20, inner=inner)
    again.load_state_dict(state)
    assert known(again.sample(400)) == expected
    on_host = made(20, inner=inner, storage=LazyTensorStorage)
    on_host.load_state_dict(state)
    batch = on_host.sample(400)
    check(batch, [ends])
    assert known(batch) == expected


def test_a_writer_beside():
    rb, stop = made(30, finals=8), threading.Event()
    rb.extend(steps([False] * 5))
    ends, at = set(), 5

    def write():
        nonlocal at
        generator = torch.Generator().manual_seed(1)
        while not stop.is_set():
            done = (torch.rand(4, generator=generator) < 0.2).tolist()
            ends.update(at + i for i, last in enumerate(done) if last)
            rb.extend(steps(done, first=at))
            at += 4

    writer = threading.Thread(target=write)
    writer.start()
    try:
        batches = [rb.sample(32) for _ in range(few(60))]
    finally:
        stop.set()
        writer.join()
    for batch in batches:
        check(batch, [ends])
    assert at > 30


def test_who_is_refused():
    kept = FinalObservations(["obs"], LazyTensorStorage(9))
    with pytest.raises(RuntimeError, match=r"expected final observations on meta.*on cpu. Make it with device='meta'"):
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(9, device="meta"),
            sampler=NextFromFollowing(RandomSampler(), kept),
            transform=kept,
        )
    kept = FinalObservations(["obs"])
    for sampler in (
        NextFromFollowing(NStep(RandomSampler(), 2, 1.0), kept),
        NStep(NextFromFollowing(RandomSampler(), kept), 2, 1.0),
        NextFromFollowing(SliceSampler(slice_len=2), kept),
    ):
        with pytest.raises(RuntimeError, match='expected a tensor storage on the CPU.*device="cpu"'):
            TensorDictReplayBuffer(storage=LazyTensorStorage(9, device="meta"), sampler=sampler, transform=kept)


def test_rows_that_turn_out_to_be_there():
    """``device="auto"``: the first row decides. Final observations are on the host then."""
    kept = FinalObservations(["obs"], LazyTensorStorage(9))
    rb = TensorDictReplayBuffer(
        storage=There(24), sampler=NextFromFollowing(RandomSampler(), kept), transform=kept, batch_size=4
    )
    rb.extend(steps([False, True, False]))
    with pytest.raises(RuntimeError, match="NextFromFollowing: expected a tensor storage on the CPU"):
        rb.sample()


def test_two_samplers_with_the_same_final_observations():
    rb = made()
    rb.extend(steps([False, True, False]))
    assert known(rb.sample(few(40))) == {(0, 0), (0, 1)}
    rb.set_sampler(NextFromFollowing(by_priority(), rb.sampler.finals))
    batch = rb.sample(few(40))
    check(batch, [{1}])
    assert known(batch) == {(0, 0), (0, 1)}
