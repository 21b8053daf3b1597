"""Dumps that are loaded into buffers of another size, or with other priorities."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    Checkpointer,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from engram.format import schema as schemas
from engram.reshard.plan import open_shard
from engram.saved import rows, snapshot
from engram.saved.part_reader import PartReader
from engram.storages import tensor_state
from tests.saved.test_damage import flip
from tests.twins import contents


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
        assert "would leave out" in str(error) or to_lanes * to_length == lanes * length  # noqa: PT017
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
    ages = other.storage.store.tickets_of(torch.arange(to_lanes * to_length)[live(other)])
    order = torch.tensor([int(other[int(row)]["id"]) for row in torch.arange(to_lanes * to_length)[live(other)]])
    old = {
        int(rb[int(row)]["id"]): int(number)
        for row, number in zip(rows, rb.storage.store.tickets_of(rows), strict=True)
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
    with pytest.raises(IncompatibleCheckpoint, match="eps"):
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


def test_of_a_task_without_ends_all_is_kept(tmp_path):
    rb = buffer(10)
    rb.extend(episodes([25], 0))
    rb.dumps(tmp_path / "x")
    other = buffer(30, 2)
    other.loads(tmp_path / "x", convert=True)
    assert other[:]["id"].tolist() == list(range(15, 25))
    smaller = buffer(8)
    with pytest.warns(UserWarning, match="left out: 0 episodes with 3 steps as overflow"):
        smaller.loads(tmp_path / "x", convert=True)
    assert smaller[:]["id"].tolist() == list(range(18, 25)), "the newest, and a row that ends them"


@pytest.mark.parametrize("used", [False, True])
def test_what_cannot_be_converted_changes_nothing(tmp_path, used):
    steps = episodes([25], 0)
    many = buffer(900, 300)
    if used:
        many.extend(steps[:3], lane=7)
    before = many[:] if used else None
    whole = buffer(9)
    whole.extend(episodes([2, 2, 2], 0))
    whole.dumps(tmp_path / "whole")
    with pytest.raises(IncompatibleCheckpoint, match="at most 256 lanes"):
        many.loads(tmp_path / "whole", convert=True)
    fields = buffer(30)
    fields.extend(steps.exclude("id"))
    with pytest.raises(
        IncompatibleCheckpoint, match=r"expected the fields of this storage, got others: unknown \['id'\]\."
    ):
        fields.loads(tmp_path / "whole", convert=True)
    with pytest.raises(IncompatibleCheckpoint):
        TensorDictReplayBuffer(storage=ListStorage(30), batch_size=8).loads(tmp_path / "whole", convert=True)
    if used:
        assert (many[:] == before).all()
    else:
        assert len(many) == 0


@pytest.mark.parametrize("rows", [30, 12])
def test_a_damaged_block_costs_no_rows_that_were_there(tmp_path, rows):
    """Of the same size, or moved: neither a field nor a ticket is taken over before all are read."""
    rb = buffer(12, 1, PrioritizedSampler(12, 0.5, 0.5))
    rb.extend(episodes([5, 5, 2], 0))
    rb.dumps(tmp_path / "x")
    for name in ("storage/id.memmap", "storage/next/obs.memmap", "storage/.engram/tickets.bin", "sampler/000.bin"):
        file = tmp_path / "x" / name
        flip(file)
        other = buffer(rows, 1, PrioritizedSampler(rows, 0.5, 0.5))
        other.extend(episodes([3], 0, 100))
        before = contents(other)
        with pytest.raises(CorruptCheckpoint, match=f"{file.name}.*expected the checksum"):
            other.loads(tmp_path / "x", convert=True)
        assert contents(other) == before
        flip(file)
    other.loads(tmp_path / "x", convert=True)
    assert other[:]["id"].tolist()[:10] == list(range(10))


@pytest.mark.parametrize(
    "forged",
    [
        [[0, 1000, 1004, 5, 3]],
        [[0, -4, 0, 5, 3]],
        [[0, 0, 4, 5, 3], [0, 3, 8, 5, 3]],
        [[0, 0, 16, 5, 3]] * 2,
        [[0, 12, 17, 5, 3]],
        [[0, (1 << 62), (1 << 62) + 4, 5, 3]],
        [[0, -(1 << 63), (1 << 63) - 1, 5, 3]],
        [[1, 0, 4, 5, 3]],
        [[0, 4, 4, 5, 3]],
    ],
)
def test_trajectories_of_rows_that_are_not_there(tmp_path, monkeypatch, forged):
    """All sums are right: somebody made it so."""
    rb = buffer(20)
    rb.extend(episodes([5, 5, 5, 1], 0))
    monkeypatch.setattr(snapshot, "find_runs", lambda *_, **__: np.array(forged, np.int64))
    rb.dumps(tmp_path / "x")
    other = buffer(30)
    with pytest.raises(CorruptCheckpoint, match=r"trajectories.bin.*of the rows that are there"):
        other.loads(tmp_path / "x", convert=True)
    assert len(other) == 0


@pytest.mark.parametrize("n", [0, 1, 5, 12, 13, 29])
@pytest.mark.parametrize("lanes", [1, 3, None])
def test_trajectories_of_every_extent_are_read(tmp_path, n, lanes):
    """``lanes=None``: columns."""
    storage = LazyTensorStorage(12, ndim=2) if lanes is None else LazyTensorStorage(12, lanes=lanes)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=8)
    data = episodes([3, 3, 10, 1, 20], 0)
    if lanes is None:
        rb.extend(torch.stack([data[:7], data[20:27]]))
        for i in range(n):
            rb.extend(torch.stack([data[i : i + 1], data[36 - i : 37 - i]]))
    else:
        rb.extend(data[: n + 1], lane=torch.arange(n + 1) % lanes)
    rb.dumps(tmp_path / "x")
    with PartReader.open(tmp_path / "x" / "storage") as reader:
        runs = open_shard(reader).source.runs
    assert (runs[:, 2] - runs[:, 1]).sum() == len(rb) * (
        1 if lanes else 2
    )  # with columns positions step by their number


def test_memory_follows_what_is_stored_and_not_what_is_claimed(tmp_path, monkeypatch):
    rb = buffer(20)
    rb.extend(episodes([5, 5], 0))
    claimed = msgspec.structs.replace(rb.storage.store.schema, capacity=1 << 45)
    described, describe = rows.described, tensor_state.describe_store
    monkeypatch.setattr(snapshot, "described", lambda _, roles: described(claimed, roles))
    text = schemas.encode(claimed).decode()
    monkeypatch.setattr(tensor_state, "describe_store", lambda *given: {**describe(*given), "schema": text})
    Checkpointer(tmp_path, rb).save(1)
    monkeypatch.undo()
    other = buffer(20)
    Checkpointer(tmp_path, other).restore()
    assert sorted(other["id"].tolist()) == list(range(5)), "the whole trajectory"


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("before", [0, 2])
def test_rows_that_were_written_by_number(tmp_path, ends, before):
    """They lie ahead of the cursor, in a lane that is not full."""

    def made(rows):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=8)
        rb.set_writer(TensorDictMaxValueWriter(rank_key="score"))
        return rb

    step = torch.arange(5)
    rows = TensorDict({"score": step.double(), "end" if not ends else "done": (step == 2)[:, None]}, [5])
    rb = made(10)
    rb.extend(rows)
    rb.set_writer(TensorDictRoundRobinWriter())
    if before:
        rb.extend(rows[:before])
    rb.set_writer(TensorDictMaxValueWriter(rank_key="score"))
    rb.dumps(tmp_path / "x")
    other = made(20)
    other.loads(tmp_path / "x", convert=True)
    assert sorted(other["score"].tolist()) == sorted(rb["score"].tolist())


@pytest.mark.parametrize("one_less", [True, False])
def test_fields_that_are_not_those_of_the_schema(tmp_path, monkeypatch, one_less):
    """All sums are right: somebody made it so."""
    rb = buffer(20)
    rb.extend(episodes([5, 5], 0))
    schema = rb.storage.store.schema
    name = schema.fields[-1].key[-1]
    describe = tensor_state.describe_store
    if one_less:
        more = msgspec.structs.replace(
            schema, fields=(*schema.fields, msgspec.structs.replace(schema.fields[0], key=("z",)))
        )
        root = msgspec.structs.replace(
            schema.structure,
            children={**schema.structure.children, "z": schemas.Node("leaf", field=len(schema.fields))},
        )
        text = schemas.encode(msgspec.structs.replace(more, structure=root)).decode()
        says = r"got others: missing \['z'\]"
    else:
        fields = (*schema.fields[:-1], msgspec.structs.replace(schema.fields[-1], dtype="complex128"))
        text = schemas.encode(msgspec.structs.replace(schema, fields=fields)).decode()
        says = rf"got others: field .*{name}.*: expected shape .* complex128, got shape"
    monkeypatch.setattr(tensor_state, "describe_store", lambda *given: {**describe(*given), "schema": text})
    rb.dumps(tmp_path / "x")
    other = buffer(20)
    with pytest.raises(
        CorruptCheckpoint, match=f"part.json.*expected geometry and fields as its schema has them, {says}"
    ):
        other.loads(tmp_path / "x")
    assert len(other) == 0
