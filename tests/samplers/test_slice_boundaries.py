"""What ends a trajectory: flags, ids, step types, lanes, columns, edits and rows that hold nothing."""

import random
from collections import Counter, namedtuple

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    NStep,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.samplers.slicing import BOTH, buffer, flags, runs_of, seeded, steps, windows

# ---- what ends a trajectory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
def test_boundaries_by_default_and_by_name(cls):
    n = 12
    everything = {
        "episode": torch.arange(n) // 3,
        "collector": TensorDict({"traj_ids": torch.arange(n) // 4}, [n]),
        "mine": torch.arange(n) // 6,
        "next": TensorDict({"done": flags([1, 11]), "cut": flags([4]), "end": flags([8])}, [n]),
    }

    def lengths(*missing, **arguments):
        data = TensorDict({key: value for key, value in everything.items() if key not in missing}, [n])
        return runs_of(buffer(cls(slice_len=1, **arguments), data))

    by_traj, by_episode, by_done = [2, 2, 4, 4], [2, 1, 3, 3, 3], [2, 10]
    assert lengths() == by_traj
    assert lengths("collector") == by_episode
    assert lengths("collector", "episode") == by_done
    assert lengths(traj_key="mine") == [2, 4, 6]
    assert lengths(traj_key="episode") == by_episode
    assert lengths(traj_key=("collector", "traj_ids")) == by_traj
    assert lengths(end_key=("next", "cut")) == [4, 1, 3, 4]
    assert lengths(end_keys=[("next", "cut"), ("next", "end")]) == [4, 1, 3, 1, 3]
    assert lengths(end_keys=["absent", ("next", "cut")]) == [4, 1, 3, 4]
    assert lengths(traj_key="mine", end_key=("next", "cut")) == [5, 1, 6]
    # Ids alone.
    assert lengths(end_keys=[]) == lengths(end_key="absent") == [4] * 3
    assert lengths("collector", end_keys=["absent", "none"]) == [3] * 4
    assert lengths(traj_key="mine", end_keys=[]) == [6, 6]
    # A key that is not stored: the other kind.
    assert lengths(traj_key="absent") == by_done
    assert lengths(traj_key="absent", end_key=("next", "cut")) == [5, 7]
    for missing, arguments in [
        (("collector", "episode"), {"end_key": "absent"}),
        (("collector", "episode"), {"end_keys": []}),
        (("next",), {"traj_key": "absent"}),
        (("next", "collector", "episode"), {}),
    ]:
        with pytest.raises(RuntimeError, match="Name a stored field with traj_key or end_key"):
            lengths(*missing, **arguments)


def test_one_end_key_merges_trajectories_that_end_by_another_flag():
    data = TensorDict({"next": TensorDict({"done": flags([3]), "truncated": flags([7])}, [12])}, [12])
    assert runs_of(buffer(SliceSampler(slice_len=1, end_key=("next", "done")), data)) == [4, 8]
    assert runs_of(buffer(SliceSampler(slice_len=1), data)) == [4, 4, 4]
    both = [("next", "done"), ("next", "truncated")]
    assert runs_of(buffer(SliceSampler(slice_len=1, end_keys=both), data)) == [4, 4, 4]


@pytest.mark.parametrize("cls", BOTH)
def test_usual_end_flags(cls):
    """Each of the flags of the transition, or else of those beside the observation; an expander's is the same table."""
    done, terminated, truncated = flags([5]), flags([2]), flags([7, 11])
    both = [3, 5, 4]
    for below, expected in [
        ({"done": done, "terminated": terminated, "truncated": truncated}, [3, 3, 2, 4]),
        ({"terminated": terminated, "truncated": truncated}, both),
        ({"truncated": truncated}, [8, 4]),
    ]:
        for data in ({"x": torch.zeros(12), "next": below}, {"x": torch.zeros(12), "next": {"y": done}, **below}):
            assert runs_of(buffer(cls(slice_len=1), TensorDict(data, [12]))) == expected
            rb = buffer(NStep(cls(slice_len=1), 2, 1.0, reward_key="x", next_keys=["x"]), TensorDict(data, [12]))
            rb.sample(3)
    beside = TensorDict({"terminated": terminated, "next": {"truncated": truncated}}, [12])
    assert runs_of(buffer(cls(slice_len=1), beside)) == [8, 4]
    with pytest.raises(RuntimeError, match="expected rows with one of"):
        runs_of(buffer(cls(slice_len=1, end_keys=["absent"]), TensorDict({"done": done}, [12])))
    typed = TensorDict({"done": done, "step_type": torch.tensor([0, 1, 1, 2] * 3)}, [12])
    assert runs_of(buffer(cls(slice_len=1), typed)) == [4, 2, 2, 4]
    assert runs_of(buffer(cls(slice_len=1, end_key="done"), typed)) == [6, 6]


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([1.5, 1.5, 2.5, 2.5, 2.5]),
        torch.tensor([[1, 0], [1, 0], [1, 1], [1, 1], [1, 1]]),
        torch.tensor([True, True, False, False, False]),
        torch.tensor([0, 0, 256, 256, 256], dtype=torch.int16),
        torch.cat([torch.zeros(5, 99), torch.tensor([0.0, 0, 1, 1, 1]).unsqueeze(-1)], -1),
    ],
)
def test_ids_of_any_dtype_and_shape(ids):
    assert runs_of(buffer(SliceSampler(slice_len=1), TensorDict({"episode": ids}, [5]))) == [2, 3]


@pytest.mark.parametrize(
    "flag",
    [
        torch.tensor([0, 1, 0, 0, 0], dtype=torch.uint8),
        torch.tensor([0.0, 0.5, 0, 0, 0]),
        torch.tensor([[0, 0], [0, 256], [0, 0], [0, 0], [0, 0]], dtype=torch.int32),
    ],
)
def test_end_flags_of_any_dtype_and_shape(flag):
    assert runs_of(buffer(SliceSampler(slice_len=1, end_key="flag"), TensorDict({"flag": flag}, [5]))) == [2, 3]


def test_ends_and_ids_of_the_rows_given():
    data = steps([4, 4, 4])
    ends = torch.zeros(12, dtype=torch.bool)
    ends[[4, 11]] = True
    assert runs_of(buffer(SliceSampler(slice_len=1, ends=ends, cache_values=True), data)) == [5, 7]
    ids = torch.arange(12) // 6
    assert runs_of(buffer(SliceSampler(slice_len=1, trajectories=ids, cache_values=True), data)) == [6, 6]
    assert runs_of(buffer(SliceSamplerWithoutReplacement(slice_len=1, ends=ends), data)) == [5, 7]
    assert runs_of(buffer(SliceSamplerWithoutReplacement(slice_len=1, trajectories=ids.tolist()), data)) == [6, 6]


def test_static_boundaries_are_those_of_the_live_rows_and_survive_writes():
    ends = torch.zeros(12, dtype=torch.bool)
    ends[[4, 11]] = True
    sampler = SliceSampler(slice_len=1, ends=ends, cache_values=True)
    rb = buffer(sampler, steps([4, 4]), capacity=12)
    with pytest.raises(ValueError, match="ends: expected one value per live row, 8, got 12"):
        rb.sample(4)
    assert not rb.can_sample(4)
    rb.extend(steps([4]))
    assert runs_of(rb) == [5, 7]
    rb.extend(steps([3]))  # rows 0, 1, 2 are the newest now: they keep their flags
    assert runs_of(rb) == [2, 7, 3]
    assert rb.can_sample(4)
    ids = torch.arange(12) // 6
    rb = buffer(SliceSampler(slice_len=1, trajectories=ids, cache_values=True), steps([12]), capacity=12)
    assert runs_of(rb) == [6, 6]
    rb.extend(steps([3]))
    assert runs_of(rb) == [3, 6, 3]
    ids[:] = 0  # the caller's
    rb.extend(steps([3]))
    assert runs_of(rb) == [6, 6]


def test_the_last_row_of_a_young_ring_ends_a_trajectory_and_the_seam_of_a_full_one_does():
    rb = buffer(SliceSampler(slice_len=1), steps([3, 4], open_end=True), capacity=10)
    assert runs_of(rb) == [3, 4]
    rb.extend(steps([5], first=2))  # rows 7, 8, 9, 0, 1: across the end of the array
    assert runs_of(rb) == [1, 4, 5]
    rb.sampler.slice_len = 5
    assert set(windows(rb.sample(50), 5)) == {(0, 2, 0)}
    rb.sampler.slice_len = 4
    assert {number for _, number, _ in windows(rb.sample(400), 4)} == {1, 2}
    # One trajectory for ever: all but the seam.
    rb = buffer(SliceSampler(slice_len=10), steps([7], open_end=True), capacity=10)
    assert not rb.can_sample(10)
    for _ in range(9):
        more = steps([7], open_end=True)
        more["step"] += 7 + rb.write_count - 7
        rb.extend(more)
        ((_, _, first),) = windows(rb.sample(10), 10)
        assert first == rb.write_count - 10


def test_lanes_have_trajectories_of_their_own():
    rb = buffer(SliceSampler(slice_len=3), capacity=52, lanes=4)
    for lane in range(4):
        rb.extend(steps([5, 8], lane=lane), lane=lane)
    seen = {window for _ in range(50) for window in windows(rb.sample(24), 3)}
    assert {(lane, number) for lane, number, _ in seen} == {(lane, number) for lane in range(4) for number in range(2)}
    # Rows of several lanes in one write.
    mixed = torch.stack([steps([4], lane=lane, first=9) for lane in range(4)], 1).reshape(-1)
    rb.extend(mixed, lane=torch.arange(16) % 4)
    for _ in range(20):
        windows(rb.sample(24), 3)
    assert runs_of(rb) == [1, 8, 4] * 4


def test_columns_have_trajectories_of_their_own():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60, ndim=2), sampler=SliceSampler(slice_len=3), generator=seeded()
    )
    lengths = {0: [5, 8, 2], 1: [15], 2: [1, 3, 11]}
    columns = torch.stack([steps(lengths[c], lane=c) for c in range(3)])
    rb.extend(columns)
    seen = Counter()
    for _ in range(60):
        batch, info = rb.sample(12, return_info=True)
        assert batch["index"].shape == (12, 2)
        assert len(info["index"]) == 2
        assert torch.equal(torch.stack(info["index"], -1), batch["index"])
        assert torch.equal(batch["index"][:, 1], batch["lane"])
        seen.update(windows(batch, 3))
    assert {(lane, number) for lane, number, _ in seen} == {(0, 0), (0, 1), (1, 0), (2, 1), (2, 2)}
    rb.extend(torch.stack([steps([10], lane=c, first=20) for c in range(3)]))  # across the seam
    assert runs_of(rb) == [8, 2, 10, 10, 10, 10, 10]
    for _ in range(40):
        windows(rb.sample(12), 3)


def test_edits_of_boundaries_are_seen_and_others_change_nothing():
    def numbered(*lengths, **more):
        return steps(*lengths, **more).exclude("next")

    rb = buffer(SliceSampler(slice_len=2), numbered([4, 4, 4]), capacity=20)
    assert runs_of(rb) == [4, 4, 4]
    rb.set_at_("episode", torch.tensor([9, 9]), [5, 6])
    assert runs_of(rb) == [4, 1, 2, 1, 4]
    rb["episode"] = torch.arange(12) // 6
    assert runs_of(rb) == [6, 6]
    rb[3:5] = numbered([1, 1], first=7)
    assert runs_of(rb) == [3, 1, 1, 1, 6]
    table = rb.sampler._table
    rb.set_at_("step", torch.tensor([100]), [0])
    assert runs_of(rb) == [3, 1, 1, 1, 6]
    assert rb.sampler._table is table
    # By number, ahead of the cursor, where the seam is: rows 12 and 13 become live as zeros.
    rb.storage.set(range(14, 16), numbered([2], first=40))
    assert runs_of(rb) == [2, 2, 3, 1, 1, 1, 6]
    rb.empty()
    with pytest.raises(NoSampleable):
        rb.sample(4)
    rb.extend(numbered([3]))
    assert runs_of(rb) == [3]


def test_a_storage_that_holds_data_is_scanned():
    data = steps([4, 9, 7])
    rb = buffer(SliceSampler(slice_len=3), storage=TensorStorage(data.clone()))
    assert runs_of(rb) == [4, 9, 7]
    rb.extend(steps([5], first=9))
    assert runs_of(rb) == [8, 7, 5]
    late = buffer(RandomSampler(), data, steps([3], first=5), capacity=21)
    late.set_sampler(SliceSampler(slice_len=3))
    assert runs_of(late) == [2, 9, 7, 3]


def test_void_rows_end_trajectories(tmp_path):
    rb = buffer(SliceSampler(slice_len=1), steps([12]), storage=LazyMemmapStorage(20, scratch_dir=tmp_path))
    core = rb.storage.memory
    words = core.control_memory[1].view(torch.int64)
    words[5] |= 3  # as a writer that died leaves it
    assert runs_of(rb) == [5, 6]
    rb.sampler.slice_len = 7
    with pytest.raises(NoSampleable, match="got 2 of at most 6"):
        rb.sample(7)


# ---- step types ----------------------------------------------------------------------------------------------------------

ALF = namedtuple("ALF", ["time_step", "action"])
TimeStep = namedtuple("TimeStep", ["step_type", "observation"])
IN = {
    "TensorDict": lambda step, n: TensorDict({"time_step": step, "action": torch.zeros(n)}, [n]),
    "dict": lambda step, n: {"time_step": step, "action": torch.zeros(n)},
    "named tuple": lambda step, n: ALF(TimeStep(**step), torch.zeros(n)),
    "tuple": lambda step, n: ({"time_step": step}, torch.zeros(n)),
}


def typed_steps(chance, count, dtype):
    """Step types as dm_env has them, of which some LAST are lost, and which trajectory each belongs to."""
    types, owners, owner = [], [], 0
    while len(types) < count:
        steps = chance.randint(4, 9)
        whole = [0, *[1] * (steps - 2), 2][: steps - (chance.random() < 0.3)]
        types += whole
        owners += [owner] * len(whole)
        owner += 1
    return {"step_type": torch.tensor(types).to(dtype), "observation": torch.tensor(owners)}, len(types)


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("kind", IN)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_step_types_end_and_begin_trajectories(cls, kind, dtype):
    """LAST ends one; FIRST begins one, also behind a trajectory whose LAST is not there."""
    chance = random.Random(f"{kind} {dtype}")
    rb = ReplayBuffer(storage=LazyTensorStorage(128, lanes=2), sampler=cls(slice_len=3), batch_size=12)
    for lane in range(2):
        for _ in range(4):  # over the end of the ring
            step, n = typed_steps(chance, 30, dtype)
            rb.extend(IN[kind](step, n), lane=lane)
    named = {
        field.key[-2:]: tensor
        for field, tensor in zip(rb.storage.store.schema.fields, rb.storage.store.tensors, strict=True)
    }
    types, owners = named["time_step", "step_type"], named["time_step", "observation"]
    drawn = set()
    for _ in range(200):
        try:
            rows = rb.sample(return_info=True)[1]["index"][0].reshape(-1, 3)
        except NoSampleable:  # the last ones of a pass may all be too short
            assert cls is SliceSamplerWithoutReplacement
            continue
        lane = rows // 64
        assert (lane == lane[:, :1]).all()
        assert (rows[:, 1:] % 64 == (rows[:, :-1] + 1) % 64).all()
        assert (owners[rows] == owners[rows][:, :1]).all()
        assert not (types[rows][:, :-1] == 2).any()
        assert not (types[rows][:, 1:] == 0).any()
        drawn |= set(rows[:, 0].tolist())
    assert len(drawn) > 20


def test_step_types_that_are_named_end_trajectories_too():
    step = {"step_type": torch.tensor([0, 1, 2, 0, 1, 1, 2, 0]), "observation": torch.arange(8)}
    rb = buffer(SliceSampler(slice_len=3, end_key=("time_step", "step_type")), IN["TensorDict"](step, 8))
    for _ in range(30):
        windows = rb.sample(3)["time_step", "observation"].tolist()
        assert windows in ([0, 1, 2], [3, 4, 5], [4, 5, 6])
    rb[5] = rb[5].set(("time_step", "step_type"), torch.tensor(0))
    for _ in range(30):
        assert rb.sample(3)["time_step", "observation"].tolist() == [0, 1, 2]


def test_step_types_count_beside_ids():
    types = torch.tensor([0, 2, 0, 1, 0, 2])  # the last step of the second trajectory was lost
    rows = TensorDict({"episode": torch.zeros(6), "step_type": types, "step": torch.arange(6)}, [6])
    assert runs_of(buffer(SliceSampler(slice_len=2), rows)) == [2, 2, 2]
    assert runs_of(buffer(SliceSampler(slice_len=2, end_keys=[]), rows)) == [6]
    ahead = TensorDict({"episode": torch.zeros(6), "next": {"step_type": torch.tensor([1, 2, 1, 2, 1, 1])}}, [6])
    assert runs_of(buffer(SliceSampler(slice_len=2), ahead)) == [2, 2, 2]
    rows = TensorDict({"step_type": torch.tensor([0.0, 2.0]), "step": torch.arange(2)}, [2])
    with pytest.raises(RuntimeError, match=r"or with a 'step_type' of integers, got \['step_type', 'step'\]"):
        buffer(SliceSampler(slice_len=2), rows).sample(2)
