"""Dumps that are loaded into buffers of another size, or with other priorities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)


def buffer(rows, lanes=1, sampler=None, storage=LazyTensorStorage, **arguments):
    return TensorDictReplayBuffer(
        storage=storage(rows, lanes=lanes), sampler=sampler or RandomSampler(), batch_size=8, **arguments
    )


def episodes(lengths, lane, first=0):
    """Steps of whole trajectories but for the last one, which goes on; every step has a number of its own."""
    done, episode = [], []
    for number, length in enumerate(lengths):
        done += [False] * (length - 1) + [number + 1 < len(lengths)]
        episode += [100 * lane + number] * length
    n = len(done)
    return TensorDict(
        {
            "id": torch.arange(first, first + n),
            "env_id": torch.full((n,), lane, dtype=torch.uint8),
            "episode": torch.tensor(episode),
            "next": {
                "done": torch.tensor(done)[:, None],
                "obs": torch.arange(first, first + n)[:, None] + torch.zeros(3),
            },
        },
        [n],
    )


def by_episode(rb):
    """Steps of each trajectory of a buffer, oldest first, lane by lane."""
    extent = rb.storage.extent()
    length = extent.capacity // len(extent.filled)
    found = []
    for lane, (filled, seam) in enumerate(zip(extent.filled, extent.seam, strict=True)):
        rows = (
            [lane * length + (seam - lane * length + i) % length for i in range(length)]
            if filled == length
            else range(lane * length, lane * length + filled)
        )
        last = None
        for row in rows:
            if extent.holes is not None and row in extent.holes.tolist():
                last = None
                continue
            step = rb[int(row)]
            key = int(step["episode"])
            if key != last:
                found.append([])
            found[-1].append(int(step["id"]))
            assert int(step["next", "obs"][0]) == int(step["id"])
            last = None if bool(step["next", "done"]) else key
    return found


@settings(max_examples=60)
@given(data=st.data())
def test_newest_whole_trajectories_move_with_their_priorities(data, tmp_path_factory):
    lanes = data.draw(st.integers(1, 3))
    length = data.draw(st.integers(4, 20))
    rb = buffer(lanes * length, lanes, PrioritizedSampler(lanes * length, 0.5, 0.5))
    first = 0
    for lane in range(lanes):
        steps = episodes(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)), lane, first)
        first += len(steps)
        rb.extend(steps, lane=lane)
    rb.update_priority(rows := torch.arange(lanes * length)[live(rb)], priorities := torch.rand(len(rows)) + 0.1)
    expected = {int(rb[int(row)]["id"]): float(p) for row, p in zip(rows, priorities, strict=True)}
    whole = by_episode(rb)
    path = tmp_path_factory.mktemp("dump") / "x"
    rb.dumps(path)

    to_lanes, to_length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 25))
    other = buffer(to_lanes * to_length, to_lanes, PrioritizedSampler(to_lanes * to_length, 0.5, 0.5))
    try:
        with warnings_ignored():
            other.loads(path, convert=True)
    except IncompatibleCheckpoint as error:
        assert "cannot be moved" in str(error) or to_lanes * to_length == lanes * length  # noqa: PT017
        return
    moved = by_episode(other)
    for steps in moved:
        assert any(steps == old or steps == old[-len(steps) :] for old in whole)  # in order, whole, none joined
    kept = [step for steps in moved for step in steps]
    assert len(set(kept)) == len(kept) == len(other)
    extent = other.storage.extent()
    for lane in range(to_lanes):
        for row in range(lane * to_length, lane * to_length + extent.filled[lane]):
            if extent.holes is None or row not in extent.holes.tolist():
                step = other[row]
                assert int(step["env_id"]) == lane
                leaf = other.sampler.state_dict()["leaves"][row]
                assert float(leaf) == pytest.approx((expected[int(step["id"])] + other.sampler.eps) ** 0.5, rel=1e-5)
    ages = other.storage.store.numbers_of(torch.arange(to_lanes * to_length)[live(other)])
    order = torch.tensor([int(other[int(row)]["id"]) for row in torch.arange(to_lanes * to_length)[live(other)]])
    old = {
        int(rb[int(row)]["id"]): int(number)
        for row, number in zip(rows, rb.storage.store.numbers_of(rows), strict=True)
    }
    assert torch.tensor([old[int(i)] for i in order]).argsort().tolist() == ages.argsort().tolist()
    if to_lanes * to_length >= len(rb) + 3 * lanes and to_lanes == 1:
        assert len(other) == len(rb)
    other.extend(episodes([2, 2], 0, 1000), lane=0)
    other.sample()


def live(rb):
    return rb.storage.extent().contains(torch.arange(rb.storage.max_size))


def warnings_ignored():
    import warnings

    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.simplefilter("ignore")

    class Until:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            caught.__exit__(*error)

    return Until()


@pytest.mark.parametrize("rows", [7, 100])
def test_rows_without_trajectories_move_by_themselves(tmp_path, rows):
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    rb.extend(torch.arange(33))
    rb.dumps(tmp_path / "x")
    other = ReplayBuffer(storage=LazyTensorStorage(rows))
    with warnings_ignored():
        other.loads(tmp_path / "x", convert=True)
    newest = list(range(33 - min(rows, 20), 33))
    assert other[:].tolist() == newest
    other.add(torch.tensor(99))
    assert (other[0] if rows == 7 else other[20]) == 99


def test_windows_do_not_join_what_was_not_together(tmp_path):
    rb = buffer(40, 2, SliceSampler(slice_len=3, end_key=("next", "done")))
    for lane in range(2):
        rb.extend(episodes([5, 6, 4], lane, 100 * lane), lane=lane)
    rb.dumps(tmp_path / "x")
    other = buffer(40, 1, SliceSampler(slice_len=3, end_key=("next", "done")))
    other.loads(tmp_path / "x", convert=True)
    other.extend(episodes([4], 0, 500))
    with warnings_ignored():
        ids = other.sample(600)["id"].view(-1, 3)
    assert (ids.diff() == 1).all()
    assert {103, 112, 501} <= set(ids[:, 0].tolist()) or {0, 11, 500} <= set(ids[:, 0].tolist())


def test_alpha_and_eps_are_converted(tmp_path):
    rb = buffer(10, sampler=PrioritizedSampler(10, 0.5, 0.5, eps=0.1))
    rb.extend(episodes([10], 0))
    rb.update_priority(torch.arange(5), torch.arange(5.0))
    rb.dumps(tmp_path / "x")
    other = buffer(10, sampler=PrioritizedSampler(10, 0.8, 0.5, eps=0.2))
    with pytest.raises(IncompatibleCheckpoint, match="alpha"):
        other.loads(tmp_path / "x")
    other.loads(tmp_path / "x", convert=True)
    assert other.sampler.state_dict()["leaves"][:5].tolist() == pytest.approx([(p + 0.2) ** 0.8 for p in range(5)])
    larger = buffer(12, sampler=PrioritizedSampler(12, 0.8, 0.5, eps=0.2))
    larger.loads(tmp_path / "x", convert=True)
    leaves = larger.sampler.state_dict()["leaves"]
    assert leaves[:5].tolist() == pytest.approx([(p + 0.2) ** 0.8 for p in range(5)])
    assert leaves[5:10].tolist() == pytest.approx([(4 + 0.2) ** 0.8] * 5) or leaves[5:10].tolist() == pytest.approx(
        [1.2**0.8] * 5
    )


def test_a_pass_begins_anew(tmp_path):
    rb = buffer(20, sampler=SamplerWithoutReplacement())
    rb.extend(episodes([5, 5, 5, 1], 0))
    rb.sample()
    rb.dumps(tmp_path / "x")
    other = buffer(30, 2, sampler=SamplerWithoutReplacement())
    other.loads(tmp_path / "x", convert=True)
    assert sorted(torch.cat([batch["id"] for batch in other]).tolist()) == list(range(16))


def test_into_a_directory(tmp_path):
    rb = buffer(20)
    rb.extend(episodes([5, 5, 5, 1], 0))
    rb.dumps(tmp_path / "x")
    other = buffer(30, storage=LazyMemmapStorage)
    other.loads(tmp_path / "x", convert=True)
    assert sorted(step for steps in by_episode(other) for step in steps) == list(range(16))


@pytest.mark.parametrize("used", [False, True])
def test_what_cannot_be_converted_changes_nothing(tmp_path, used):
    endless = buffer(10)
    steps = episodes([25], 0)
    endless.extend(steps)
    endless.dumps(tmp_path / "endless")
    other = buffer(30)
    if used:
        other.extend(steps[:3])
    before = other[:] if used else None
    with pytest.raises(IncompatibleCheckpoint, match=r"10 of 10 steps belong to trajectories that cannot be moved"):
        other.loads(tmp_path / "endless", convert=True)
    many = buffer(900, 300)
    whole = buffer(9)
    whole.extend(episodes([2, 2, 2], 0))
    whole.dumps(tmp_path / "whole")
    with pytest.raises(IncompatibleCheckpoint, match="at most 256 lanes"):
        many.loads(tmp_path / "whole", convert=True)
    fields = buffer(30)
    fields.extend(steps.exclude("id"))
    with pytest.raises(IncompatibleCheckpoint, match="expected the fields of this storage"):
        fields.loads(tmp_path / "whole", convert=True)
    with pytest.raises(IncompatibleCheckpoint):
        TensorDictReplayBuffer(storage=ListStorage(30), batch_size=8).loads(tmp_path / "whole", convert=True)
    if used:
        assert (other[:] == before).all()
    else:
        assert len(other) == 0
