"""Writes, updates, priorities and ends through an ensemble, over every kind of member."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.members.buffers import member, members, rows, storages


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8))
def test_each_member_has_its_rows_in_order(batches):
    rb = ReplayBufferEnsemble(*members(0, 0, 0, capacity=7), routing_key="to")
    kept, number = [[], [], []], 0
    for ids in batches:
        to = torch.tensor(ids, dtype=torch.int64)
        data = rows(0, len(ids), first=number, to=to)
        written = rb.extend(data)
        assert written["buffer_ids"].tolist() == ids
        places = [len(one) for one in kept]
        expected = []
        for one in ids:
            expected.append(places[one] % 7)
            places[one] += 1
        assert written["index"].tolist() == expected
        for one, value in zip(ids, data["a"].tolist(), strict=True):
            kept[one].append(value)
        number += len(ids)
    for one, values in zip(rb._rbs, kept, strict=True):
        held = one[:]["a"].tolist() if values else []
        assert sorted(held) == sorted(values[-7:])


@pytest.mark.parametrize("storage", ["RAM", "directory"])
def test_a_row_goes_where_it_says(tmp_path, storage):
    rb = ReplayBufferEnsemble(*members(0, 0, storage=storages(tmp_path)[storage]), routing_key=("next", "to"))
    for to in (1, 0, 1):
        written = rb.add(TensorDict({"a": 1.0, "next": {"to": to}}))
        assert written.batch_size == ()
        assert int(written["buffer_ids"]) == to
    assert [len(one) for one in rb._rbs] == [1, 2]
    assert rb.write_count == 3
    rb.close()


def test_write_transforms_of_the_ensemble_see_all_rows_and_those_of_members_theirs():
    class Add:
        def __init__(self, by):
            self.by = by

        def inv(self, data):
            return data.set("a", data["a"] + self.by)

    rb = ReplayBufferEnsemble(member(0, 0, transform=Add(1000)), member(1, 0), transform=Add(10), routing_key="to")
    data = rows(0, 4, to=torch.tensor([0, 1, 0, 1]))
    rb.extend(data)
    assert [one[:]["a"].tolist() for one in rb._rbs] == [[1010, 1012], [11, 13]]
    assert data["a"].tolist() == [0, 1, 2, 3]


def test_members_that_hold_rows_back_say_no_places():
    class Half:
        def inv(self, data):
            return data[: len(data) // 2]

    rb = ReplayBufferEnsemble(member(0, 0, transform=Half()), member(1, 0), routing_key="to")
    written = rb.extend(rows(0, 6, to=torch.tensor([0, 1, 0, 1, 0, 1])))
    assert written["index"].tolist() == [-1, 0, -1, 1, -1, 2]
    assert len(rb[0]) == 1
    assert len(rb.extend(rows(0, 0, to=torch.zeros(0, dtype=torch.int64)))) == 0


def test_rows_that_later_ones_replaced_have_no_generation():
    rb = ReplayBufferEnsemble(member(0, 0, capacity=2, tracks=True), routing_key="to")
    written = rb.extend(rows(0, 5, to=torch.zeros(5, dtype=torch.int64)))
    assert written["index"].tolist() == [0, 1, 0, 1, 0]
    numbers = written["index_generation"]
    assert (numbers == -1).tolist() == [True, True, True, False, False]
    result = rb.update_if_present(index=written, generation=numbers, patch={"x": torch.ones(5, 1)})
    assert result.updated.tolist() == [False, False, False, True, True]


def test_priorities_come_along_and_are_updated():
    some = members(0, 0, sampler=lambda: PrioritizedSampler(100, 1.0, 1.0, eps=0.0))
    rb = ReplayBufferEnsemble(*some, routing_key="to", num_buffer_sampled=2, generator=torch.Generator().manual_seed(0))
    data = rows(0, 8, to=torch.arange(8) % 2, td_error=torch.tensor([0.0, 0, 1, 0, 0, 1, 0, 0]))
    written = rb.extend(data)
    batch = rb.sample(40)
    assert set(batch["a"].flatten().tolist()) == {2, 5}
    rb.update_priority(written, torch.tensor([0.0, 0, 0, 0, 1, 0, 1, 1]))
    assert set(rb.sample(80)["a"].flatten().tolist()) == {4, 6, 7}
    rb.extend(rows(0, 200, first=100, to=torch.arange(200) % 2, td_error=torch.ones(200)))  # all rows are others now
    before = rb.storage.counters()["priority_updates_dropped"]
    rb.update_priority(batch["index"], torch.full((2, 20), 9.0), generation=batch["index_generation"])
    assert rb.storage.counters()["priority_updates_dropped"] == before + 40


def test_updates_go_by_versions():
    rb = ReplayBufferEnsemble(*members(0, 0, tracks=True), routing_key="to")
    written = rb.extend(rows(0, 4, to=torch.tensor([0, 1, 1, 0]), v=torch.tensor([1, 5, 1, 5])))
    patch = {"x": torch.full((4, 1), 7.0)}
    result = rb.update_if_present(
        index=written,
        generation=written["index_generation"],
        patch=patch,
        version_key="v",
        version=torch.tensor([3, 3, 3, 3]),
    )
    assert result.updated.tolist() == [True, False, True, False]
    assert result.version_rejected.tolist() == [False, True, False, True]
    assert result.stale_count == 0
    assert bool((result.generation >= 0).eq(result.updated).all())
    assert [one[:]["v"].tolist() for one in rb._rbs] == [[3, 5], [5, 3]]


@pytest.mark.parametrize("storage", ["RAM", "directory"])
@pytest.mark.parametrize("terminated", [False, True])
def test_ends_of_streams(tmp_path, storage, terminated):
    make = storages(tmp_path)[storage]

    def stream(n):
        writer = TensorDictRoundRobinWriter(track_generations=True)
        sampler = SliceSampler(slice_len=2, end_key=("next", "done"))
        rb = TensorDictReplayBuffer(storage=make(5), sampler=sampler, writer=writer)
        if n:
            flags = {name: torch.zeros(n, 1, dtype=torch.bool) for name in ("done", "truncated", "terminated")}
            flags["terminated"][-1] = terminated
            rb.extend(TensorDict({"step": torch.arange(n), "next": TensorDict(flags, [n])}, [n]))
        return rb

    rb = ReplayBufferEnsemble(stream(3), stream(7), stream(0))
    rb.end_streams()
    for one, n in ((rb[0], 3), (rb[1], 7)):
        last = one[:]["step"] == n - 1
        assert torch.equal(one[:]["next", "done"].flatten(), last)
        assert torch.equal(one[:]["next", "truncated"].flatten(), last & (not terminated))
        assert one.write_count == n
    rb.end_streams()  # an end stays as it is
    assert int(rb[0]["next", "done"].sum()) == 1
    rb.close()


def test_streams_whose_rows_have_ids_are_ended_too():
    writer, sampler = TensorDictRoundRobinWriter(track_generations=True), SliceSampler(slice_len=4, traj_key="id")
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(9), writer=writer, sampler=sampler)
    one.extend(rows(0, 4, id=torch.zeros(4, dtype=torch.int64)))
    rb = ReplayBufferEnsemble(one)
    rb.end_streams()
    assert bool(one[:]["next", "done"][3])
    one.extend(rows(0, 4, id=torch.zeros(4, dtype=torch.int64)))  # the number of the environment
    assert set(one.sample(400)["index"].reshape(-1, 4)[:, 0].tolist()) == {0, 4}
    one.set_sampler(SliceSampler(slice_len=2, traj_key="id", end_keys=[]))
    with pytest.raises(RuntimeError, match="end_key"):
        rb.end_streams()


def test_streams_that_cannot_be_ended():
    good = {
        "writer": TensorDictRoundRobinWriter(track_generations=True),
        "sampler": SliceSampler(slice_len=2, end_key="other"),
    }
    for one, match in [
        (member(1, 5), "track_generations"),
        (member(1, 5, tracks=True), "SliceSampler"),
        (member(1, 5, **good), "end_key"),
    ]:
        first = member(0, 4, tracks=True, sampler=SliceSampler(slice_len=2, end_key=("next", "done")))
        with pytest.raises(RuntimeError, match=f"member 1.*{match}"):
            ReplayBufferEnsemble(first, one).end_streams()
        assert not bool(first[:]["next", "done"].any())
