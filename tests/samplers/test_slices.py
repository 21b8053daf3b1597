"""Slice samplers: windows of one trajectory each, by every rule and argument."""

import copy
import gc
import itertools
import json
import pickle
import random
import threading
import time
import weakref
from collections import Counter, namedtuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

from engram import (
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
    _progress,
)
from engram.samplers.trajectory_tables import StaticTable
from engram.store import Store
from tests.samplers.machine import SETTINGS, Rings, TrajectoryMachine, stressed
from tests.statistics_of import assert_uniform

BOTH = [SliceSampler, SliceSamplerWithoutReplacement]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def steps(lengths, *, lane=0, first=0, open_end=False, ids=True, **more):
    """Rows that say where they are: lane, episode and step, with every flag there is."""
    episode = torch.cat([torch.full((n,), first + i) for i, n in enumerate(lengths)])
    step = torch.cat([torch.arange(n) for n in lengths])
    size = torch.tensor(lengths)[episode - first]
    last = step + 1 == size
    if open_end:
        last[-1] = False
    n = len(step)
    td = {
        "lane": torch.full((n,), lane),
        "step": step,
        "number": episode,
        "is_init": (step == 0).unsqueeze(-1),
        "next": TensorDict({"done": last.unsqueeze(-1)}, batch_size=[n]),
        **more,
    }
    if ids:
        td["episode"] = episode
    return TensorDict(td, batch_size=[n])


def buffer(sampler, *data, capacity=1000, lanes=1, td=True, storage=None, **arguments):
    kind = TensorDictReplayBuffer if td else ReplayBuffer
    storage = LazyTensorStorage(capacity, lanes=lanes) if storage is None else storage
    rb = kind(storage=storage, sampler=sampler, generator=seeded(), **arguments)
    for part in data:
        rb.extend(part)
    return rb


def windows(batch, length):
    """(lane, number, first step) of each window; checks that its steps follow each other."""
    assert len(batch) % length == 0
    table = torch.stack([batch["lane"], batch["number"], batch["step"]], -1).reshape(-1, length, 3)
    assert (table[:, :, :2] == table[:, :1, :2]).all()
    assert (table[:, :, 2] == table[:, :1, 2] + torch.arange(length)).all()
    return [tuple(first) for first in table[:, 0].tolist()]


def cut(batch):
    """Windows of a batch in which they may be short, by their marks: lists of (number, step)."""
    ends = batch["next", "truncated"].flatten().nonzero().flatten().tolist()
    begins = [0, *[end + 1 for end in ends]]
    assert begins[-1] == len(batch)
    rows = list(zip(batch["number"].tolist(), batch["step"].tolist(), strict=True))
    return [rows[a:b] for a, b in itertools.pairwise(begins)]


# ---- what a batch is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("arguments", [{"slice_len": 4}, {"num_slices": 3}])
def test_batches_are_windows_of_one_trajectory(cls, arguments):
    rb = buffer(cls(**arguments), steps([4, 9, 3, 12, 6]), batch_size=12)
    for _ in range(20):
        found = windows(rb.sample(), 4)
        assert 1 <= len(found) <= 3
        for _, number, first in found:
            assert number != 2  # too short
            assert 0 <= first <= [4, 9, 3, 12, 6][number] - 4


@pytest.mark.parametrize("cls", BOTH)
def test_marks_and_index(cls):
    terminated = torch.rand(20, 1, generator=seeded()) < 0.5
    data = steps([5, 6, 9])
    data["next", "terminated"] = terminated
    rb = buffer(cls(slice_len=3), data, batch_size=9)
    for _ in range(10):
        batch, info = rb.sample(return_info=True)
        n = len(batch)
        last = (torch.arange(n) % 3 == 2).unsqueeze(-1)
        index = batch["index"]
        assert index.shape == (n, 1)
        assert isinstance(info["index"], tuple)
        assert len(info["index"]) == 1
        assert torch.equal(info["index"][0], index.squeeze(-1))
        rows = index.squeeze(-1)
        assert torch.equal(data["number"][rows], batch["number"])
        assert torch.equal(batch["next", "truncated"], last)
        assert torch.equal(batch["next", "done"], data["next", "done"][rows] | last)
        assert torch.equal(batch["next", "terminated"], terminated[rows])
        assert torch.equal(batch["is_init"], data["is_init"][rows] | last.roll(1, 0))
        for key in [("next", "truncated"), ("next", "done"), ("next", "terminated"), "is_init"]:
            assert info[key].dtype is torch.bool
            assert info[key].shape == (n, 1)
            assert torch.equal(info[key], batch[key])
    # What is stored stays as it was.
    assert torch.equal(rb[:]["next", "done"], data["next", "done"])
    assert torch.equal(rb[:]["is_init"], data["is_init"])


def test_plain_buffers_have_marks_in_info_only():
    rb = buffer(SliceSampler(slice_len=5), steps([5, 5]), td=False)
    batch, info = rb.sample(10, return_info=True)
    assert "index" not in batch.keys()
    assert ("next", "truncated") not in batch.keys(True)
    assert set(info) == {"index", ("next", "truncated"), ("next", "done"), ("next", "terminated"), "is_init"}
    assert info["index"][0].shape == (10,)
    assert not info["next", "terminated"].any()
    assert info["next", "truncated"].flatten().tolist() == [False] * 4 + [True] + [False] * 4 + [True]


@pytest.mark.parametrize("cls", BOTH)
def test_truncated_key(cls):
    rb = buffer(cls(slice_len=5, truncated_key=None), steps([5, 5]))
    batch, info = rb.sample(10, return_info=True)
    assert ("next", "truncated") not in batch.keys(True)
    assert ("next", "terminated") not in batch.keys(True)
    assert set(info) == {"index", "is_init"}
    rb = buffer(cls(slice_len=2, truncated_key=("a", "b", "cut")), steps([5, 5]))
    batch = rb.sample(4)
    assert batch["a", "b", "cut"].flatten().tolist() == batch["a", "b", "done"].flatten().tolist() == [0, 1, 0, 1]
    assert batch["a", "b", "terminated"].shape == (4, 1)
    assert ("next", "truncated") not in batch.keys(True)
    assert (
        buffer(cls(slice_len=2, truncated_key="cut"), steps([5, 5])).sample(4)["cut"].flatten().tolist() == [0, 1] * 2
    )


@pytest.mark.parametrize("cls", BOTH)
def test_init_key(cls):
    begun = torch.zeros(10, 1, dtype=torch.bool)
    rb = buffer(cls(slice_len=2, init_key="begun"), steps([5, 5], begun=begun))
    batch = rb.sample(4)
    assert batch["begun"].flatten().tolist() == [True, False] * 2
    assert torch.equal(batch["is_init"].flatten(), batch["step"] == 0)  # as stored
    batch, info = buffer(cls(slice_len=2, init_key=None), steps([5, 5])).sample(4, return_info=True)
    assert torch.equal(batch["is_init"].flatten(), batch["step"] == 0)
    assert "is_init" not in info
    data = steps([5, 5]).exclude("is_init")
    assert "is_init" not in buffer(cls(slice_len=2), data).sample(4).keys()


def test_generations_are_those_of_what_was_drawn():
    from engram import TensorDictRoundRobinWriter

    rb = buffer(SliceSampler(slice_len=2), steps([5]), writer=TensorDictRoundRobinWriter(track_generations=True))
    batch = rb.sample(4)
    assert torch.equal(batch["index_generation"], rb.storage.numbers_of(batch["index"].flatten()))


def test_transforms_and_collate_functions():
    rb = buffer(SliceSampler(slice_len=2), steps([5]), collate_fn=lambda td: td.set("twice", 2 * td["step"]))
    batch = rb.append_transform(lambda td: td.set("thrice", 3 * td["step"])).sample(4)
    assert torch.equal(batch["twice"] + batch["step"], batch["thrice"])
    assert batch["next", "truncated"].flatten().tolist() == [False, True] * 2


def test_rows_with_batch_dimensions():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=3))
    done = torch.zeros(6, 2, 1, dtype=torch.bool)
    done[4, 1] = done[1, 0] = True
    data = {
        "episode": torch.arange(6).unsqueeze(-1).expand(6, 2) // 3,
        "is_init": done.clone(),
        "next": TensorDict({"done": done}, [6, 2]),
    }
    rb.extend(TensorDict(data, [6, 2]))
    batch = rb.sample(6)
    rows = batch["index"][:, 0, 0]
    last = (torch.arange(6) % 3 == 2).view(6, 1, 1)
    assert batch.batch_size == (6, 2)
    assert batch["index"].shape == (6, 2, 1)
    assert torch.equal(batch["next", "truncated"], last.expand(6, 2, 1))
    assert torch.equal(batch["next", "done"], done[rows] | last)  # each agent's own
    assert torch.equal(batch["is_init"], done[rows] | last.roll(1, 0))
    assert batch["next", "terminated"].shape == (6, 2, 1)


def test_a_transform_that_changes_the_batch_size():
    rb = buffer(SliceSampler(slice_len=3), steps([5])).append_transform(lambda td: td.reshape(-1, 3))
    with pytest.raises(RuntimeError, match="Use a ReplayBuffer with sample"):
        rb.sample(6)
    rb = buffer(SliceSampler(slice_len=3), steps([5]), td=False).append_transform(lambda td: td.reshape(-1, 3))
    assert rb.sample(6, return_info=True)[0].shape == (2, 3)


# ---- what ends a trajectory ----------------------------------------------------------------------------------------------


def runs_of(rb):
    """Lengths of the trajectories that the sampler sees."""
    rb.sampler.draw(rb.storage.extent(), rb.sampler.num_slices or rb.sampler.slice_len, 0)
    return rb.sampler._table.runs().reshape(-1, 3)[:, 2].tolist()


def flags(at, n=12):
    flag = torch.zeros(n, 1, dtype=torch.bool)
    flag[at] = True
    return flag


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

    by_traj, by_episode, by_done = [4] * 3, [3] * 4, [2, 10]
    assert lengths() == by_traj
    assert lengths("collector") == by_episode
    assert lengths("collector", "episode") == by_done
    assert lengths(traj_key="mine") == [6, 6]
    assert lengths(traj_key="episode") == by_episode
    assert lengths(traj_key=("collector", "traj_ids")) == by_traj
    assert lengths(end_key=("next", "cut")) == [5, 7]
    assert lengths(end_keys=[("next", "cut"), ("next", "end")]) == [5, 4, 3]
    assert lengths(end_keys=["absent", ("next", "cut")]) == [5, 7]
    assert lengths(traj_key="mine", end_key=("next", "cut")) == [6, 6]
    # A key that is not stored: the other kind, once.
    assert lengths(traj_key="absent") == by_done
    assert lengths(traj_key="absent", end_key=("next", "cut")) == [5, 7]
    assert lengths(end_key="absent") == by_traj
    assert lengths("collector", end_keys=["absent", "none"]) == by_episode
    for missing, arguments in [
        (("collector", "episode"), {"end_key": "absent"}),
        (("next",), {"traj_key": "absent"}),
        (("next", "collector", "episode"), {}),
    ]:
        with pytest.raises(RuntimeError, match="Name a stored field with traj_key or end_key"):
            lengths(*missing, **arguments)


def test_one_end_key_merges_trajectories_that_end_by_another_flag():
    data = TensorDict({"next": TensorDict({"done": flags([3]), "truncated": flags([7])}, [12])}, [12])
    assert runs_of(buffer(SliceSampler(slice_len=1), data)) == [4, 8]
    both = [("next", "done"), ("next", "truncated")]
    assert runs_of(buffer(SliceSampler(slice_len=1, end_keys=both), data)) == [4, 4, 4]


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
    rb = buffer(SliceSampler(slice_len=2), steps([4, 4, 4]), capacity=20)
    assert runs_of(rb) == [4, 4, 4]
    rb.set_at_("episode", torch.tensor([9, 9]), [5, 6])
    assert runs_of(rb) == [4, 1, 2, 1, 4]
    rb["episode"] = torch.arange(12) // 6
    assert runs_of(rb) == [6, 6]
    rb[3:5] = steps([1, 1], first=7)
    assert runs_of(rb) == [3, 1, 1, 1, 6]
    table = rb.sampler._table
    rb.set_at_("step", torch.tensor([100]), [0])
    assert runs_of(rb) == [3, 1, 1, 1, 6]
    assert rb.sampler._table is table
    # By number, ahead of the cursor, where the seam is: rows 12 and 13 become live as zeros.
    rb.storage.set(range(14, 16), steps([2], first=40))
    assert runs_of(rb) == [2, 2, 3, 1, 1, 1, 6]
    rb.empty()
    with pytest.raises(NoSampleable):
        rb.sample(4)
    rb.extend(steps([3]))
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


# ---- how likely each is --------------------------------------------------------------------------------------------------


def test_trajectories_are_uniform_and_so_are_starts():
    rb = buffer(SliceSampler(slice_len=3), steps([3, 4, 2, 10, 6]))
    counts = Counter(window[1:] for _ in range(100) for window in windows(rb.sample(120), 3))
    by_number = {n: [counts[n, s] for s in range(20) if (n, s) in counts] for n in (0, 1, 3, 4)}
    assert [len(starts) for starts in by_number.values()] == [1, 2, 8, 4]
    assert_uniform([sum(starts) for starts in by_number.values()])
    for starts in by_number.values():
        assert_uniform(starts)
    assert sum(counts.values()) == sum(sum(starts) for starts in by_number.values())


@pytest.mark.parametrize("length", [3, 2])
def test_anchors_are_uniform(length):
    """Also where another length than the first was asked for."""
    rb = buffer(SliceSampler(num_slices=40, uniform_over="anchors"), steps([3, 4, 2, 10, 6]), capacity=30)
    rb.sample(3 * 40)
    counts = Counter(window[1:] for _ in range(100) for window in windows(rb.sample(length * 40), length))
    assert len(counts) == {3: 1 + 2 + 8 + 4, 2: 2 + 3 + 1 + 9 + 5}[length]
    assert_uniform(counts.values())


def test_every_legal_anchor_is_drawn_on_a_full_ring_of_lanes():
    lengths = torch.randint(1, 15, (40,), generator=seeded(3)).tolist()
    for uniform_over in ("trajectories", "anchors"):
        rb = buffer(SliceSampler(slice_len=4, uniform_over=uniform_over), capacity=120, lanes=2)
        legal = set()
        for lane in range(2):
            mine = lengths[20 * lane : 20 * lane + 20]
            data = steps(mine, lane=lane)
            rb.extend(data, lane=lane)
            live = data[-60:]
            for number, size in enumerate(mine):
                there = sorted(live["step"][live["number"] == number].tolist())
                legal |= {(lane, number, s) for s in there if s + 4 <= size}
        seen = {window for _ in range(150) for window in windows(rb.sample(80), 4)}
        assert seen == legal


def test_reproducible_from_the_generator():
    def batches(seed):
        rb = buffer(SliceSampler(slice_len=4), steps([9, 12, 30]))
        rb.set_rng(seeded(seed))
        return [rb.sample(16)["index"].tolist() for _ in range(4)]

    assert batches(1) == batches(1)
    assert batches(1) != batches(2)
    rb = buffer(SliceSampler(slice_len=4), steps([9, 12, 30]))
    rb.set_rng(None)
    torch.manual_seed(7)
    first = rb.sample(16)["index"]
    torch.manual_seed(7)
    assert torch.equal(first, rb.sample(16)["index"])


# ---- short ones, overhang ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
def test_strict_length(cls):
    rb = buffer(cls(slice_len=5), steps([2, 5, 3]))
    with pytest.raises(
        NoSampleable, match=r"slice_len=6: expected a trajectory of at least 6 steps, got 3 of at most 5"
    ):
        buffer(cls(slice_len=6), steps([2, 5, 3])).sample(12)
    assert {number for _, number, _ in windows(rb.sample(15), 5)} == {1}
    loose = buffer(cls(slice_len=5, strict_length=False), steps([2, 5, 3, 9]))
    whole = {0: 2, 1: 5, 2: 3}
    seen = set()
    for _ in range(30):
        for window in cut(loose.sample(10)):
            (number,) = {number for number, _ in window}
            seen.add(number)
            assert [step for _, step in window] == list(range(window[0][1], window[0][1] + len(window)))
            assert len(window) == whole.get(number, 5)
    assert seen == {0, 1, 2, 3}


def test_pad_output():
    rb = buffer(SliceSampler(slice_len=5, strict_length=False, pad_output=True), steps([2, 5, 3]))
    for _ in range(20):
        batch, info = rb.sample(20, return_info=True)
        assert len(batch) == 20
        mask = batch["collector", "mask"]
        assert mask.shape == (20,)
        assert torch.equal(info["collector", "mask"], mask)
        for window, real, last in zip(
            batch.split(5), mask.split(5), batch["next", "truncated"].flatten().split(5), strict=True
        ):
            size = [2, 5, 3][int(window["number"][0])]
            assert real.tolist() == [True] * size + [False] * (5 - size)
            assert window["step"].tolist() == [*range(size), *[size - 1] * (5 - size)]
            assert last.tolist() == [i == size - 1 for i in range(5)]
    assert ("collector", "mask") not in buffer(SliceSampler(slice_len=2), steps([5])).sample(4).keys(True)


def overhangs(span, lengths=(6,), slice_len=4, **arguments):
    rb = buffer(SliceSampler(slice_len=slice_len, span=span, **arguments), steps(list(lengths)))
    return Counter((window[0][1], len(window)) for _ in range(60) for window in cut(rb.sample(20 * slice_len)))


def test_span():
    inside = {(0, 4), (1, 4), (2, 4)}
    left = {(0, 1), (0, 2), (0, 3)}
    right = {(3, 3), (4, 2), (5, 1)}
    assert set(overhangs(False)) == inside
    assert set(overhangs(True)) == inside | left | right
    assert set(overhangs((True, False))) == inside | left
    assert set(overhangs((False, True))) == inside | right
    assert set(overhangs((1, 2))) == inside | {(0, 3)} | {(3, 3), (4, 2)}
    assert set(overhangs(3)) == inside | left | right
    assert set(overhangs([0, 1])) == inside | {(3, 3)}
    for counts in (overhangs(True), overhangs((1, 2), uniform_over="anchors"), overhangs((2, 0))):
        assert_uniform(counts.values())


def test_span_of_short_trajectories():
    assert set(overhangs((1, 1), lengths=(2,), strict_length=False)) == {(0, 2), (1, 1)}
    with pytest.raises(NoSampleable):
        overhangs(True, lengths=(2,))


def test_span_of_a_whole_window_is_refused():
    with pytest.raises(ValueError, match="span: expected less than the 4 steps"):
        SliceSampler(slice_len=4, span=4)
    with pytest.raises(ValueError, match="span: expected less than the 4 steps"):
        buffer(SliceSampler(num_slices=2, span=(0, 4)), steps([9])).sample(8)


# ---- passes --------------------------------------------------------------------------------------------------------------


def numbers(rb, batch_size, slice_len):
    return [number for _, number, _ in windows(rb.sample(batch_size), slice_len)]


def test_a_pass_takes_every_trajectory_once():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=2), steps([2, 5, 3, 9, 4]), batch_size=4)
    for _ in range(5):
        batches = [[number for _, number, _ in windows(batch, 2)] for batch in rb]
        assert [len(batch) for batch in batches] == [2, 2, 1]
        assert sorted(sum(batches, [])) == list(range(5))
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=2), steps([2, 5, 3, 9, 4]))
    assert Counter(number for _ in range(3 * 20) for number in numbers(rb, 4, 2)) == dict.fromkeys(range(5), 20)
    starts = Counter()
    for _ in range(400):
        rb.sampler.load_state_dict({"key": 0, "version": 0, "visited": 0, "count": 0, "clock": 0, "ran_out": False})
        starts.update(first for _, number, first in windows(rb.sample(10), 2) if number == 3)
    assert len(starts) == 8
    assert_uniform(starts.values())


def test_orders_of_a_pass():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1), steps([2, 1, 3]))
    orders = Counter(tuple(numbers(rb, 3, 1)) for _ in range(1200))
    assert len(orders) == 6
    assert_uniform(orders.values())
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1, shuffle=False), steps([2, 1, 3]))
    assert [numbers(rb, 2, 1) for _ in range(4)] == [[0, 1], [2], [0, 1], [2]]


def test_a_write_begins_a_new_pass():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1, shuffle=False), steps([2, 1, 3]), capacity=20)
    assert numbers(rb, 2, 1) == [0, 1]
    rb.extend(steps([2], first=3))
    assert numbers(rb, 3, 1) == [0, 1, 2]
    assert not rb.sampler.ran_out
    rb.set_at_("step", torch.tensor([0]), [1])
    assert numbers(rb, 4, 1) == [0, 1, 2, 3]
    assert rb.sampler.ran_out
    assert numbers(rb, 3, 1) == [0, 1, 2]
    rb.empty()
    rb.extend(steps([1, 1], first=7))
    assert numbers(rb, 1, 1) == [7]


def test_too_short_ones_shorten_their_batch():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=3, shuffle=False), steps([3, 1, 2, 4, 2, 2]))
    assert numbers(rb, 6, 3) == [0]
    assert numbers(rb, 6, 3) == [3]
    with pytest.raises(NoSampleable, match="in every batch of an epoch"):
        rb.sample(6)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_window_that_moves_in_the_last_batch_begins_no_pass(drop_last):
    sampler = SliceSamplerWithoutReplacement(slice_len=1, drop_last=drop_last)
    rb = buffer(sampler, steps([1] * 6), batch_size=3)
    first = set(rb.sample()["index"].flatten().tolist())
    words, row = rb.storage.memory.control_memory[1].view(torch.int64), min({*range(6)} - first)
    words[row] -= 1  # being written, by somebody who began before the pass did
    second = rb.sample()["index"].flatten().tolist()
    words[row] += 1
    assert len(second) == 3
    assert row not in second
    assert sampler.ran_out
    assert sampler.state_dict()["visited"] == 6


def test_drop_last_begins_a_pass_where_the_rest_is_less_than_a_batch():
    """Batches of several sizes in one pass."""
    sampler = SliceSamplerWithoutReplacement(slice_len=2, drop_last=True)
    rb = buffer(sampler, steps([4] * 5), batch_size=4)
    draws = [sampler.sample(rb.storage, size)[0][0] for size in (4, 2, 6)]
    assert [len(rows) for rows in draws] == [4, 2, 6]
    assert sampler.ran_out


def test_drop_last():
    sampler = SliceSamplerWithoutReplacement(slice_len=1, drop_last=True)
    rb = buffer(sampler, steps([1] * 7), batch_size=3)
    for _ in range(3):
        batches = [len(batch) for batch in rb]
        assert batches == [3, 3]
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1, drop_last=True), steps([1] * 7), batch_size=8)
    with pytest.raises(ValueError, match="drop_last: expected at least 8 trajectories, got 7"):
        rb.sample()
    with pytest.raises(ValueError, match="drop_last needs"):
        buffer(SliceSamplerWithoutReplacement(slice_len=1, drop_last=True))
    assert [len(b) for b in buffer(SliceSamplerWithoutReplacement(slice_len=1), steps([1] * 7), batch_size=3)] == [
        3,
        3,
        1,
    ]


@pytest.mark.filterwarnings("ignore:sample. batch_size")
def test_drop_last_skips_a_rest_that_a_larger_batch_finds():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1, drop_last=True), steps([1] * 7), batch_size=3)
    assert [len(rb.sample(n)) for n in (3, 5)] == [3, 5]
    assert rb.sampler.ran_out


def test_a_draw_from_nothing_ends_no_pass():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1), steps([2]))
    rb.empty()
    state = rb.sampler.state_dict()
    with pytest.raises(NoSampleable):
        rb.sample(1)
    assert rb.sampler.state_dict() == state
    assert not rb.sampler.ran_out


def test_the_state_of_a_pass():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1), steps([1] * 9))
    first = numbers(rb, 4, 1)
    state = rb.sampler.state_dict()
    assert all(isinstance(value, int | bool) for value in state.values())
    rest = numbers(rb, 5, 1)
    rb.sampler.load_state_dict(state)
    again = numbers(rb, 5, 1)
    assert again == rest
    assert sorted(first + rest) == list(range(9))
    for bad, kind in [({}, KeyError), ({**state, "more": 1}, KeyError), ({**state, "visited": 99}, ValueError)]:
        before = rb.sampler.state_dict()
        with pytest.raises(kind):
            rb.sampler.load_state_dict(bad)
        assert rb.sampler.state_dict() == before
    assert SliceSampler(slice_len=1).state_dict() == {}


# ---- the table in the store ----------------------------------------------------------------------------------------------


def test_samplers_of_a_store_share_a_table_of_one_name():
    storage = LazyTensorStorage(30)
    one = buffer(SliceSampler(slice_len=2), steps([4, 6]), storage=storage)
    other = buffer(SliceSamplerWithoutReplacement(slice_len=3), storage=storage)
    named = buffer(SliceSampler(slice_len=2, index="other"), storage=storage)
    for rb in (one, other, named):
        rb.sample(6)
    assert one.sampler._table is other.sampler._table
    assert one.sampler._table is not named.sampler._table
    one.extend(steps([5], first=2))  # a write through one is seen by all
    assert runs_of(other) == runs_of(named) == [4, 6, 5]
    with pytest.raises(IncompatibleStore, match="Give another index=… name"):
        buffer(SliceSampler(slice_len=2, end_key=("next", "done")), storage=storage).sample(4)
    buffer(SliceSampler(slice_len=2, end_key=("next", "done"), index="ends"), storage=storage).sample(4)


def test_the_table_outlives_storage_and_buffer():
    sampler = SliceSampler(slice_len=2)
    rb = buffer(sampler, steps([4, 6]))
    rb.sample(4)
    table = sampler._table
    del rb, sampler
    assert table.census() == (2, 6)


def test_a_store_with_a_table_is_let_go():
    rb = buffer(SliceSampler(slice_len=2), steps([4, 6]))
    rb.sample(4)
    store = weakref.ref(rb.storage.memory)
    del rb
    gc.collect()
    assert store() is None


def test_a_sampler_goes_with_its_buffer_and_learns_of_another_storage():
    rb = buffer(SliceSampler(slice_len=2), steps([4, 6]))
    assert runs_of(rb) == [4, 6]
    rb.set_storage(LazyTensorStorage(50))
    with pytest.raises(NoSampleable):
        rb.sample(4)
    rb.extend(steps([3]))
    assert runs_of(rb) == [3]


def test_one_sampler_of_two_buffers():
    sampler = SliceSampler(slice_len=2)
    one, other = buffer(sampler, steps([4, 6])), buffer(sampler, steps([3], lane=1))
    for _ in range(3):
        assert {lane for lane, _, _ in windows(one.sample(8), 2)} == {0}
        assert {lane for lane, _, _ in windows(other.sample(8), 2)} == {1}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies_draw_the_same_from_tables_of_their_own(duplicate):
    rb = buffer(SliceSampler(slice_len=2), steps([4, 6]))
    rb.sample(4)
    twin = duplicate(rb)
    assert torch.equal(twin.sample(8)["index"], rb.sample(8)["index"])
    twin.extend(steps([5], first=2))
    assert runs_of(twin) == [4, 6, 5]
    assert runs_of(rb) == [4, 6]


@pytest.mark.parametrize(
    "sampler",
    [
        SliceSampler(num_slices=2, end_keys=["x", ("next", "done")], strict_length=False, pad_output=True, span=(1, 0)),
        SliceSampler(slice_len=3, traj_key=("collector", "ids"), truncated_key=None, uniform_over="anchors", index="a"),
        SliceSamplerWithoutReplacement(slice_len=3, end_key="e", init_key="i", shuffle=False, strict_length=False),
    ],
)
def test_a_store_knows_its_sampler(sampler, tmp_path):
    assert type(sampler)(**json.loads(json.dumps(sampler.config()))).config() == sampler.config()
    rb = buffer(sampler, steps([4, 6]), storage=LazyMemmapStorage(20, scratch_dir=tmp_path), batch_size=6)
    rb.close()
    again = ReplayBuffer.open(tmp_path)
    assert repr(again.sampler) == repr(sampler)
    again.sampler._bound_to(again.storage, 2)
    assert again.sampler._table.census() == (2, 6)


def test_a_store_does_not_guess_boundaries_that_were_given(tmp_path):
    sampler = SliceSampler(slice_len=2, ends=[0, 0, 0, 1], cache_values=True)
    buffer(sampler, steps([4]), storage=LazyMemmapStorage(4, scratch_dir=tmp_path)).close()
    with pytest.raises(TypeError, match="pass sampler="):
        ReplayBuffer.open(tmp_path)
    assert len(ReplayBuffer.open(tmp_path, sampler=sampler).sample(2)) == 2


def test_a_long_scan_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "CHUNK", 3)
    monkeypatch.setattr(_progress, "_SILENT_S", 0)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    rb = buffer(RandomSampler(), steps([10, 10]))
    rb.set_sampler(SliceSampler(slice_len=3))
    assert runs_of(rb) == [10, 10]
    assert "engram: looking for trajectories" in capsys.readouterr().err


# ---- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({}, TypeError),
        ({"num_slices": 2, "slice_len": 3}, TypeError),
        ({"slice_len": 0}, ValueError),
        ({"num_slices": -1}, ValueError),
        ({"slice_len": 2.0}, TypeError),
        ({"slice_len": True}, TypeError),
        ({"slice_len": 1, "end_key": "a", "end_keys": ["b"]}, RuntimeError),
        ({"slice_len": 1, "ends": [1], "trajectories": [1]}, RuntimeError),
        ({"slice_len": 1, "ends": [1], "traj_key": "a"}, RuntimeError),
        ({"slice_len": 1, "trajectories": [1], "end_key": "a"}, RuntimeError),
        ({"slice_len": 1, "trajectories": [1], "end_keys": ["a"]}, RuntimeError),
        ({"slice_len": 1, "end_key": 3}, TypeError),
        ({"slice_len": 1, "traj_key": ()}, TypeError),
        ({"slice_len": 1, "end_keys": "done"}, TypeError),
        ({"slice_len": 1, "end_keys": []}, TypeError),
        ({"slice_len": 1, "truncated_key": 1}, TypeError),
        ({"slice_len": 1, "init_key": ("a", 1)}, TypeError),
        ({"slice_len": 1, "index": ""}, ValueError),
        ({"slice_len": 1, "index": "a/b"}, ValueError),
        ({"slice_len": 1, "index": "x" * 65}, ValueError),
        ({"slice_len": 1, "index": 1}, TypeError),
        ({"slice_len": 1, "fragmented": True}, TypeError),
        ({"slice_len": 1, "step_key": "a"}, TypeError),
        ({"slice_len": 1, "unheard": 1}, TypeError),
        ({"slice_len": 1, "ends": True}, TypeError),
    ],
)
def test_mistaken_arguments(cls, arguments, kind):
    with pytest.raises(kind, match="Slice"):
        cls(**arguments)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"slice_len": 1, "ends": [1]}, RuntimeError),
        ({"slice_len": 1, "pad_output": True}, ValueError),
        ({"slice_len": 1, "uniform_over": "rows"}, ValueError),
        ({"slice_len": 3, "span": "left"}, TypeError),
        ({"slice_len": 3, "span": (1, 2, 3)}, TypeError),
        ({"slice_len": 3, "span": -1}, ValueError),
    ],
)
def test_mistaken_arguments_with_replacement(arguments, kind):
    with pytest.raises(kind, match="SliceSampler"):
        SliceSampler(**arguments)


def test_variants():
    made = SliceSampler(replacement=False, slice_len=2, drop_last=True)
    assert type(made) is SliceSamplerWithoutReplacement
    assert made.drop_last
    assert type(SliceSampler(replacement=True, slice_len=2)) is SliceSampler
    assert type(SliceSamplerWithoutReplacement(replacement=False, slice_len=2)) is SliceSamplerWithoutReplacement
    with pytest.raises(TypeError, match="replacement=False"):
        SliceSamplerWithoutReplacement(replacement=True, slice_len=2)


def test_arguments_that_change_nothing():
    def drawn(**arguments):
        return buffer(SliceSampler(slice_len=3, **arguments), steps([5, 9])).sample(12)["index"].tolist()

    assert drawn() == drawn(cache_values=True) == drawn(compile={"mode": "x"}) == drawn(use_gpu=True)
    SliceSamplerWithoutReplacement(slice_len=3, compile=True, use_gpu="cuda:0")


@pytest.mark.parametrize("cls", BOTH)
def test_mistakes_when_drawing(cls):
    with pytest.raises(RuntimeError, match="batch_size: expected a multiple of slice_len=4, got 10"):
        buffer(cls(slice_len=4), steps([9])).sample(10)
    with pytest.raises(RuntimeError, match="batch_size: expected a multiple of num_slices=4, got 2"):
        buffer(cls(num_slices=4), steps([9])).sample(2)
    with pytest.raises(NoSampleable, match="the buffer is empty"):
        buffer(cls(slice_len=4)).sample(4)
    with pytest.raises(RuntimeError, match="expected a tensor storage"):
        buffer(cls(slice_len=4), steps([9]), storage=ListStorage(20)).sample(4)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=cls(slice_len=2))
    rb.extend({"episode": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="rows that are no TensorDicts"):
        rb.sample(2)
    with pytest.raises(RuntimeError, match="expected a storage"):
        cls(slice_len=2).draw(rb.storage.extent(), 2, 0)


def test_a_length_that_no_trajectory_has_costs_nothing():
    """Whole trajectories are asked for so: room for what there is, not for what there might be."""
    rb = buffer(SliceSampler(num_slices=4, strict_length=False), steps([5, 3]), batch_size=4 << 40)
    assert 12 <= len(rb.sample()) <= 20


@pytest.mark.parametrize("cls", BOTH)
def test_another_thread_may_draw_from_another_buffer_meanwhile(cls):
    class Interrupted(cls):
        other = None

        def _sample(self, *arguments):
            other, self.other = self.other, None
            if other is not None:
                other.sample()
            return super()._sample(*arguments)

    sampler = Interrupted(slice_len=4)
    one = buffer(sampler, steps([5] * 12), batch_size=40)
    other = buffer(sampler, steps([7] * 8 + [4]), batch_size=40)
    for _ in range(5):
        sampler.other = other
        windows(one.sample(), 4)


def test_threads_that_draw_first_place_static_boundaries_once(monkeypatch):
    """Else one draws from the other's table, which knows no boundaries yet."""
    made, make = [], StaticTable

    def slowly(*arguments, **more):
        made.append(make(*arguments, **more))
        time.sleep(0.05)
        return made[-1]

    monkeypatch.setattr("engram.samplers.windows.StaticTable", slowly)
    rb = buffer(SliceSampler(slice_len=4, ends=torch.arange(200) % 5 == 4, cache_values=True), steps([5] * 40))
    batches = []
    threads = [threading.Thread(target=lambda: batches.append(rb.sample(40))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(batches) == 3
    for batch in batches:
        windows(batch, 4)


def test_settings_may_change_between_draws():
    rb = buffer(SliceSampler(slice_len=4), steps([6, 6, 2]))
    ends = ("next", "truncated")
    assert rb.sample(12)[ends].sum() == 3
    rb.sampler.slice_len = 2
    assert rb.sample(12)[ends].sum() == 6
    rb.sampler.slice_len = 4
    rb.sampler.strict_length = False
    assert len(rb.sample(400)) < 400
    rb.sampler.pad_output = True
    assert len(rb.sample(400)) == 400
    rb.sampler.truncated_key = None
    assert ends not in rb.sample(400).keys(include_nested=True)


def test_can_sample():
    rb = buffer(SliceSampler(slice_len=4))
    assert not rb.can_sample(4)
    rb.extend(steps([3, 3], open_end=True))
    assert not rb.can_sample(4)
    assert buffer(SliceSampler(slice_len=4, strict_length=False), steps([3])).can_sample(4)
    more = steps([2], first=1)
    more["step"] += 3
    rb.extend(more)
    assert rb.can_sample(8)
    assert not rb.can_sample(9)
    assert len(rb.sample(4)) == 4


def test_torchrls_verbs():
    rb = buffer(RandomSampler(), steps([5, 9]))
    sampler = SliceSampler(slice_len=3)
    (rows,), info = sampler.sample(rb.storage, 6)
    assert rows.shape == (6,)
    assert info["next", "truncated"].flatten().tolist() == [False, False, True] * 2
    assert sampler.can_sample(rb.storage, 6)


# ---- beside writers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2])
def test_windows_are_whole_beside_writers(lanes):
    rb = buffer(SliceSampler(slice_len=3), capacity=60 * lanes, lanes=lanes)
    for lane in range(lanes):
        rb.extend(steps([5, 6, 7], lane=lane), lane=lane)
    stop, failures = threading.Event(), []

    def write(lane):
        number = 3
        while not stop.is_set():
            rb.extend(steps([3 + number % 6], lane=lane, first=number), lane=lane)
            number += 1

    threads = [threading.Thread(target=write, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            windows(rb.sample(12), 3)
    except AssertionError as error:
        failures.append(error)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_child_goes_on_with_its_copy():
    """Also where another thread of the parent was at work in the table."""
    from tests import fresh

    program = fresh.start(
        """
        import os, threading, torch
        from tensordict import TensorDict
        from engram import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5000), sampler=SliceSampler(slice_len=2), batch_size=512)
        data = TensorDict({"episode": torch.arange(1000) // 7}, [1000])
        rb.extend(data)
        stop = threading.Event()

        def work(call):
            while not stop.is_set():
                call()

        threads = [threading.Thread(target=work, args=(call,)) for call in (rb.sample, lambda: rb.extend(data))]
        for thread in threads:
            thread.start()
        for _ in range(30):
            child = os.fork()
            if child == 0:
                rb.set_rng(torch.Generator())  # of torch's own a thread of the parent may have held the lock
                for _ in range(3):
                    rb.extend(data)
                    episodes = rb.sample()["episode"].reshape(-1, 2)
                os._exit(0 if bool((episodes[:, 0] == episodes[:, 1]).all()) else 3)
            _, status = os.waitpid(child, 0)
            if status != 0:
                stop.set()
                raise SystemExit(f"child: {status}")
        stop.set()
        for thread in threads:
            thread.join()
        """
    )
    assert program.wait() == 0, program.err


def test_a_child_forked_during_the_first_look_at_the_rows_looks_itself():
    """The parent's thread held the sampler's lock, the store's and the table's."""
    from tests import fresh

    program = fresh.start(
        """
        import os, threading, time, torch
        from tensordict import TensorDict
        from engram import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

        n = 8_000_000
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(n), sampler=SliceSampler(slice_len=2), batch_size=64)
        rb.extend(TensorDict({"episode": torch.arange(n) // 7}, [n]))
        thread = threading.Thread(target=rb.sample)
        thread.start()
        time.sleep(0.05)
        child = os.fork()
        if child == 0:
            rb.set_rng(torch.Generator())
            rb.extend(TensorDict({"episode": torch.arange(10) // 7}, [10]))
            episodes = rb.sample()["episode"].reshape(-1, 2)
            os._exit(0 if bool((episodes[:, 0] == episodes[:, 1]).all()) else 3)
        busy = thread.is_alive()
        _, status = os.waitpid(child, 0)
        thread.join()
        assert busy, "the first look was over before the fork: take more rows"
        assert status == 0, status
        """
    )
    assert program.wait() == 0, program.err


# ---- the table against plain lists ---------------------------------------------------------------------------------------


class Runs(RuleBasedStateMachine):
    """Writes of every kind; the sampler's table says what lists of rows say."""

    @initialize(
        lanes=st.integers(1, 3),
        length=st.integers(1, 9),
        by_id=st.booleans(),
        late=st.booleans(),
    )
    def start(self, lanes, length, by_id, late):
        self.rings, self.by_id = Rings(lanes, length), by_id
        key = {"traj_key": "id"} if by_id else {"end_keys": ["done", "cut"]}
        self.rb = ReplayBuffer(
            storage=LazyTensorStorage(lanes * length, lanes=lanes), sampler=SliceSampler(slice_len=1, **key)
        )
        if not late:
            self.write(0, [(0, False, False)])
            self.rb.sample(1)

    values = st.tuples(st.integers(0, 2), st.booleans(), st.booleans())

    def data(self, values):
        ids, done, cut = zip(*values, strict=True)
        return TensorDict(
            {"id": torch.tensor(ids), "done": torch.tensor(done), "cut": torch.tensor(cut)}, [len(values)]
        )

    @rule(lane=st.integers(0, 2), values=st.lists(values, min_size=1, max_size=12))
    def write(self, lane, values):
        lane %= len(self.rings.lanes)
        rows = self.rb.extend(self.data(values), lane=lane).tolist()
        assert rows == [self.rings.append(lane, value) for value in values]

    @precondition(lambda self: self.rings.live())
    @rule(data=st.data(), value=values)
    def edit(self, data, value):
        row = data.draw(st.sampled_from(list(self.rings.live())))
        self.rings.edit(row, value)
        if data.draw(st.booleans()):
            self.rb[[row]] = self.data([value])
        else:
            self.rb.storage.set([row], self.data([value]))

    @rule()
    def empty(self):
        self.rb.empty()
        self.rings.clear()

    def runs(self):
        return self.rings.runs(lambda a, b: a[0] != b[0] if self.by_id else a[1] or a[2])

    @invariant()
    def agrees(self):
        expected = self.runs()
        assert self.rb.can_sample(1) == bool(expected)
        if not expected:
            return
        _, info = self.rb.sample(8, return_info=True)
        assert {row for run in expected for row in run} >= set(info["index"][0].tolist())
        table = self.rb.sampler._table
        found = table.runs().reshape(-1, 3).tolist()
        assert [[table.row(track, first + i) for i in range(n)] for track, first, n in found] == expected


TestRuns = Runs.TestCase
TestRuns.settings = SETTINGS
stressed(TestRuns)


class TrajectoryPasses(TrajectoryMachine):
    """Beside the sampler, the trajectories that a pass has left."""

    def make_sampler(self, draw):
        self.drop_last, self.shuffle = draw(st.booleans()), draw(st.booleans())
        self.writes, self.ran_out, self.saved = 0, False, None
        self.of_writes, self.left = -1, []  # those of the pass, by number
        return SliceSamplerWithoutReplacement(**self.boundaries(draw), drop_last=self.drop_last, shuffle=self.shuffle)

    def wrote(self, rows):
        self.writes += 1

    edited = wrote

    def emptied(self):
        self.wrote([])

    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)

    @rule(ns=sizes)
    def draw(self, ns):
        there = self.trajectories()
        for n in ns:
            if len(there) < (n if self.drop_last else 1):
                with pytest.raises(ValueError if there else NoSampleable):
                    self.rb.sample(n * self.length)
            else:
                self.draw_from(there, n)
            assert self.rb.sampler.ran_out == self.ran_out
            assert self.rb.can_sample(n * self.length) == bool(self.starts())

    def draw_from(self, there, n):
        if self.of_writes != self.writes or len(self.left) < (n if self.drop_last else 1):
            self.of_writes, self.left = self.writes, list(range(len(there)))
        number_at = {first: number for first, (_, number) in self.starts().items()}
        try:
            drawn = [number_at[first] for first in self.windows(n)[0]]
        except NoSampleable:  # all that the batch is made of are too short, which does not keep the pass from going on
            drawn = []
        taken = min(n, len(self.left))
        if self.shuffle:  # which short ones were passed over is not known, but how many
            short = [number for number in self.left if number not in number_at.values()]
            gone = drawn + short[: taken - len(drawn)]
        else:
            gone = self.left[:taken]
            assert drawn == [number for number in gone if number in number_at.values()]
        assert len(gone) == len(set(gone)) == taken
        assert set(gone) <= set(self.left)
        self.left = [number for number in self.left if number not in gone]
        if self.drop_last and len(self.left) < n:
            self.left = []
        self.ran_out = not self.left

    @precondition(lambda self: self.left)
    @rule()
    def save(self):
        self.saved = self.rb.sampler.state_dict(), (self.of_writes, self.left, self.ran_out)

    @precondition(lambda self: self.saved)
    @rule(ns=sizes)
    def load(self, ns):
        state, (self.of_writes, self.left, self.ran_out) = self.saved
        self.rb.sampler.load_state_dict(state)
        self.draw(ns)


TestTrajectoryPasses = pytest.mark.filterwarnings("ignore:sample. batch_size")(TrajectoryPasses.TestCase)
TestTrajectoryPasses.settings = SETTINGS
stressed(TestTrajectoryPasses)


def test_index_of_a_store():
    from engram.format.schema import Field, Node, Schema

    schema = Schema(4, 1, (), (Field(("a",), "int64", ()),), Node("leaf", 0))
    store = Store.private(schema)
    made = []
    assert store.indexes.table("main", "list", 1, lambda: made) is made
    assert store.indexes.table("main", "list", 1, dict) is made
    assert store.indexes.table("main", "dict", 2, dict) == {}
    assert store.indexes.table("other", "list", 2, list) == []
    with pytest.raises(IncompatibleStore, match="index 'main': expected the list of 1"):
        store.indexes.table("main", "list", 2, list)

    def fail():
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        store.indexes.table("broken", "list", 1, fail)
    assert store.indexes.table("broken", "list", 1, list) == []


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


def test_an_id_or_a_flag_counts_before_step_types():
    rows = TensorDict(
        {"episode": torch.zeros(6), "step_type": torch.tensor([0, 2, 0, 2, 0, 2]), "step": torch.arange(6)}, [6]
    )
    assert buffer(SliceSampler(slice_len=6), rows).sample(6)["step"].tolist() == [0, 1, 2, 3, 4, 5]
    rows = TensorDict({"step_type": torch.tensor([0.0, 2.0]), "step": torch.arange(2)}, [2])
    with pytest.raises(RuntimeError, match=r"or with a 'step_type' of integers, got \['step_type', 'step'\]"):
        buffer(SliceSampler(slice_len=2), rows).sample(2)
