"""Slice samplers: windows of one trajectory each, by every rule and argument."""

from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, NoSampleable, SliceSampler, TensorDictReplayBuffer
from tests.samplers.slicing import BOTH, buffer, cut, seeded, steps, windows
from tests.statistics_of import assert_uniform

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
    data = steps([5, 6, 9])
    terminated = data["next", "done"] & (torch.rand(20, 1, generator=seeded()) < 0.5)
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
    assert torch.equal(batch["index_generation"], rb.storage.tickets_of(batch["index"].flatten()))


def test_transforms_and_collate_functions():
    rb = buffer(SliceSampler(slice_len=2), steps([5]), collate_fn=lambda td: td.set("twice", 2 * td["step"]))
    batch = rb.append_transform(lambda td: td.set("thrice", 3 * td["step"])).sample(4)
    assert torch.equal(batch["twice"] + batch["step"], batch["thrice"])
    assert batch["next", "truncated"].flatten().tolist() == [False, True] * 2


def test_rows_with_batch_dimensions():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=3))
    done = torch.zeros(6, 2, 1, dtype=torch.bool)
    done[5, 1] = done[2, 0] = True
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
