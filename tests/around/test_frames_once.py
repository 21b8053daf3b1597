"""Frames stored once, with the stacks of both: every order of expanders, against recorded episodes in plain lists."""

import itertools
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    FinalObservations,
    FrameStack,
    LazyTensorStorage,
    NextFromFollowing,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    WindowSpec,
)
from tests import stress

GAMMA = 0.5
CAPACITY = 12  # of each lane
SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(1000, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=3),
    "any slice": lambda: SliceSampler(slice_len=4, strict_length=False, uniform_over="anchors"),
    "padded slices": lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True),
    "prioritized slices": lambda: PrioritizedSliceSampler(1000, 0.6, 0.4, slice_len=3),
    "each once": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "newest first": lambda: SliceSampler(window=WindowSpec(length=3), online=True),
    "after a burn-in": lambda: SliceSampler(window=WindowSpec(length=2, burn_in=1)),
}
LENGTHS = {
    "slices": 3,
    "any slice": 4,
    "padded slices": 4,
    "prioritized slices": 3,
    "each once": 2,
    "newest first": 3,
    "after a burn-in": 3,
}


class Step(NamedTuple):
    """A step of an episode, whose last one has a frame after it that no other step has."""

    lane: int
    episode: int
    number: int
    ends: bool  # when it was written
    cut: bool = False  # it became an end later, and what came after it is not known

    @property
    def frame(self):
        return 10_000 * self.lane + 100 * self.episode + self.number + 1

    @property
    def after(self):
        return self.frame + 1 if not self.ends else -self.frame


class Recording:
    """Lanes that are stepped together, as vector environments are, and reset by themselves; what a buffer must say of them."""

    def __init__(self, lanes, frames, steps, padding):
        self.lanes = [[] for _ in range(lanes)]
        self.at = [(0, 0)] * lanes
        self.frames, self.steps, self.padding = frames, steps, padding

    def step(self, lane, ends):
        episode, number = self.at[lane]
        self.at[lane] = (episode + 1, 0) if ends else (episode, number + 1)
        self.lanes[lane].append(Step(lane, episode, number, ends))
        return self.lanes[lane][-1]

    def cut(self, lane):
        if self.lanes[lane] and not self.lanes[lane][-1].ends:
            self.lanes[lane][-1] = self.lanes[lane][-1]._replace(cut=True)
            self.at[lane] = (self.at[lane][0] + 1, 0)

    def live(self):
        return [lane[-CAPACITY:] for lane in self.lanes]

    def stack(self, seen):
        """The last frames of those that were seen."""
        pad = seen[0] if self.padding == "same" else -7
        return ([pad] * self.frames + seen)[-self.frames :]

    def known(self):
        """Of each step that may be drawn what a batch says of it, by lane, episode and number."""
        known = {}
        for lane in self.live():
            for _, episode in itertools.groupby(lane, key=lambda step: step.episode):
                run = list(episode)
                seen = [step.frame for step in run] + ([run[-1].after] if run[-1].ends else [])
                for i, step in enumerate(run):
                    last = min(i + self.steps, len(run)) - 1
                    if last + 1 == len(seen):
                        continue  # it ends with the newest step, or where the episode was cut
                    known[step[:3]] = {
                        "frame": self.stack(seen[: i + 1]),
                        "next": self.stack(seen[: last + 2]),
                        "reward": sum(GAMMA**j * run[i + j].frame for j in range(last - i + 1)),
                        "steps": last - i + 1,
                        "done": run[last].ends or run[last].cut,
                    }
        return known

    def windows(self, length, strict):
        """Of each lane and episode how many steps windows may hold."""
        known, found = self.known(), {}
        for step in known:
            found[step[:2]] = found.get(step[:2], 0) + 1
        return {episode: n for episode, n in found.items() if n >= length or not strict}


def channels(values):
    return np.array(values, np.int16)[:, None, None, None] * np.ones((1, 1, 2, 2), np.int16)


def rows_of(steps, tensordict, dim=-3):
    """What is written of some steps. ``dim`` None: frames have no channel."""
    frame = channels if dim else lambda values: channels(values)[:, 0]
    flags = np.array([[step.ends] for step in steps])
    rows = {
        "frame": frame([step.frame for step in steps]),
        "where": np.array([step[:3] for step in steps]),
        "next": {
            "frame": frame([step.after for step in steps]),
            "reward": np.array([[float(step.frame)] for step in steps]),
            "done": flags,
        },
    }
    if not tensordict:
        return rows
    below = TensorDict({key: torch.as_tensor(value) for key, value in rows.pop("next").items()}, [len(steps)])
    return TensorDict({**{key: torch.as_tensor(value) for key, value in rows.items()}, "next": below}, [len(steps)])


def wrapped(sampler, order, finals, frames, steps, padding, keys=("frame", ("next", "frame")), dim=-3, views=False):
    for kind in order:
        match kind:
            case "next":
                sampler = NextFromFollowing(sampler, finals)
            case "stack":
                sampler = FrameStack(sampler, frames, dim, list(keys), padding=padding, padding_value=-7, views=views)
            case "steps":
                sampler = NStep(sampler, steps, GAMMA)
            case _:
                sampler = RewardToGo(sampler)
    return sampler


def check(batch, info, recording):
    """Every row of a batch says what the recording says; which steps these are."""
    known = recording.known()

    def entry(*path):
        below = batch
        for part in path:
            below = below[part]
        assert below is info.get(path if len(path) > 1 else path[0], below)
        return below

    rows = [tuple(step) for step in batch["where"].tolist()]
    for key, path in (("frame", ("frame",)), ("next", ("next", "frame"))):
        frames = entry(*path)
        assert frames.shape == (len(rows), recording.frames, 2, 2)
        assert frames.dtype is torch.int16
        assert (frames == frames[:, :, :1, :1]).all()
        assert frames[:, :, 0, 0].tolist() == [known[row][key] for row in rows]
    stored = batch["next"]
    assert stored["reward"].flatten().tolist() == [known[row]["reward"] for row in rows]
    if ("next", "truncated") not in info:  # else with the ends of windows
        assert stored["done"].flatten().tolist() == [known[row]["done"] for row in rows]
    if recording.steps > 1:
        assert entry("steps_to_next_obs").flatten().tolist() == [known[row]["steps"] for row in rows]
    return rows


@settings(max_examples=stress.size(40, 2_000), deadline=None)
@given(data=st.data())
def test_against_recorded_episodes(data):
    draw = data.draw
    name = draw(st.sampled_from(sorted(SAMPLERS)))
    kinds = ["next", "stack", *draw(st.sets(st.sampled_from(["steps", "to go"])))]
    order = draw(st.permutations(kinds))
    steps = draw(st.integers(1, 4)) if "steps" in kinds else 1
    recording = Recording(
        draw(st.integers(1, 3)), draw(st.integers(1, 5)), steps, draw(st.sampled_from(["same", "constant"]))
    )
    lanes, tensordict = len(recording.lanes), draw(st.booleans())
    finals = FinalObservations(["frame"], LazyTensorStorage(200))
    keys = draw(st.sampled_from([["frame"], ["frame", ("next", "frame")]]))
    dim, views = draw(st.sampled_from([-3, None])), draw(st.booleans())
    sampler = wrapped(SAMPLERS[name](), order, finals, recording.frames, steps, recording.padding, keys, dim, views)
    rb = (TensorDictReplayBuffer if tensordict else ReplayBuffer)(
        storage=LazyTensorStorage(lanes * CAPACITY, lanes=lanes), sampler=sampler, transform=finals,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    length, strict = LENGTHS.get(name, 1), name not in ("any slice", "padded slices")
    for _ in range(draw(st.integers(1, 4))):
        for byte in draw(st.binary(min_size=1, max_size=14)):
            ends = [byte >> 2 * lane & 3 == 3 for lane in range(lanes)]
            steps_now = [recording.step(lane, ends[lane]) for lane in range(lanes)]
            rb.extend(rows_of(steps_now, tensordict, dim), lane="each")
        if draw(st.booleans()):
            lane = draw(st.integers(0, lanes - 1))
            recording.cut(lane)
            rb.end_trajectory(lane)
        known, size = recording.known(), 12 if length > 1 else 25
        drawable = recording.windows(length, strict) if length > 1 else known
        assert rb.can_sample(size) == bool(drawable)
        if not drawable:
            with pytest.raises(NoSampleable):
                rb.sample(size)
            continue
        try:
            batch, info = rb.sample(size, return_info=True)
        except NoSampleable:
            assert name == "each once"  # a batch of trajectories that are too short
            continue
        rows = check(batch, info, recording)
        if length > 1:
            assert {row[:2] for row in rows} <= set(drawable)
            ends = info["next", "truncated"].flatten().tolist()
            if name == "padded slices":
                ends = [end or i % 4 == 3 for i, end in enumerate(ends)]
            assert all(
                end or (after[:2] == row[:2] and after[2] - row[2] in (0, 1))
                for row, after, end in zip(rows, rows[1:], ends, strict=False)
            )


@pytest.mark.parametrize("name", ["uniform", "prioritized", "slices", "any slice", "prioritized slices"])
def test_all_that_may_be_drawn_is(name):
    """Three lanes whose seam lies within an episode, with an end, an open step and a cut one behind it."""
    recording = Recording(3, 4, 2, "same")
    finals = FinalObservations(["frame"], LazyTensorStorage(200))
    sampler = wrapped(SAMPLERS[name](), ["next", "stack", "steps"], finals, 4, 2, "same")
    rb = ReplayBuffer(storage=LazyTensorStorage(3 * CAPACITY, lanes=3), sampler=sampler, transform=finals)
    for number in range(17):
        steps = [recording.step(lane, number == (16, 11, 9)[lane]) for lane in range(3)]
        rb.extend(rows_of(steps, tensordict=False), lane="each")
    recording.cut(2)
    rb.end_trajectory(2)
    drawn = set()
    for _ in range(20):
        batch, info = rb.sample(120, return_info=True)
        drawn |= set(check(batch, info, recording))
    expected = set(recording.known())
    if "slices" in name:  # of three steps: in lane 2 four steps may be drawn before the newest one
        expected = {step for step in expected if step[:2] in recording.windows(3, strict=True)}
    assert drawn == expected
    if name in ("prioritized", "prioritized slices"):
        rb.update_priority(torch.arange(3 * CAPACITY), torch.ones(3 * CAPACITY) * 1e-6)
        rows = rb.sample(120, return_info=True)[1]["index"]
        assert len(rows[0] if isinstance(rows, tuple) else rows) == 120


@pytest.mark.parametrize("views", [False, True])
def test_stacks_that_are_views_of_the_same_frames(views):
    """Five frames of a row in place of eight, of which both stacks are views; those that no view gives are copies."""
    finals = FinalObservations(["frame"], LazyTensorStorage(9))
    for dim in (-3, -1, None):
        sampler = FrameStack(NextFromFollowing(RandomSampler(), finals), 4, dim, ["frame"], views=views)
        rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, transform=finals)
        frames = torch.arange(10 * 12, dtype=torch.float32).reshape(10, 1, 3, 4)
        rb.extend({"frame": frames[:-1], "next": {"frame": frames[1:], "done": torch.arange(9) == 8}})
        batch, info = rb.sample(32, return_info=True)
        row, padded = info["index"], torch.cat([frames[:1]] * 3 + [frames])
        for key, first in ((batch["frame"], 0), (batch["next"]["frame"], 1)):
            expected = torch.stack([padded[row + first + at] for at in range(4)], 1)
            if dim:
                expected = expected.movedim(1, dim - 1).flatten(dim - 1, dim)
            assert torch.equal(key, expected)
        now, after = (x.untyped_storage() for x in (batch["frame"], batch["next"]["frame"]))
        assert (now.data_ptr() == after.data_ptr()) == views
        assert now.nbytes() == 32 * 12 * 4 * (5 if views else 4)


def test_final_observations_of_rows_that_are_cast():
    finals = FinalObservations(["frame"], LazyTensorStorage(9))
    sampler = FrameStack(NextFromFollowing(RandomSampler(), finals), 2, -1, ["frame"])
    storage = LazyTensorStorage(9, dtypes={"frame": torch.float32})
    rb = ReplayBuffer(storage=storage, sampler=sampler, transform=finals)
    rb.extend(
        {
            "frame": np.array([[1.5], [2.5]]),
            "next": {"frame": np.array([[2.5], [0.1]]), "done": np.array([False, True])},
        }
    )
    batch = rb.sample(20)
    first = batch["frame"][:, 1] == 1.5
    expected = torch.where(first[:, None], torch.tensor([1.5, 2.5]), torch.tensor([2.5, 0.1]))
    assert torch.equal(batch["next"]["frame"], expected)


class Counting(gymnasium.Env):
    """Frames that count the steps; episodes of ``limit`` steps."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, limit, shape):
        self.limit, self.episode = limit, -1
        self.observation_space = gymnasium.spaces.Box(0, 9999, shape, np.int16)

    def _frame(self):
        return np.full(self.observation_space.shape, 1000 * self.limit + 20 * self.episode + self.at, np.int16)

    def reset(self, *, seed=None, options=None):
        self.episode, self.at = self.episode + 1, 0
        return self._frame(), {}

    def step(self, action):
        self.at += 1
        return self._frame(), 1.0, self.at == self.limit, False, {}


@pytest.mark.parametrize(("dim", "shape"), [(-3, (1, 2, 2)), (None, (2, 2))])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_recorded_environments(mode, dim, shape):
    """With autoresets, and a reset in the middle of episodes. Frames without a channel are stacked in a dimension of their own."""
    finals = FinalObservations(["observation"], LazyTensorStorage(99))
    sampler = FrameStack(NextFromFollowing(NStep(RandomSampler(), 2, 1.0), finals), 3, dim, ["observation"])
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(400, lanes=2), sampler=sampler, transform=finals)
    mode = gymnasium.vector.AutoresetMode[mode]
    envs = [lambda: Counting(3, shape), lambda: Counting(5, shape)]
    env = rb.record(gymnasium.vector.SyncVectorEnv(envs, autoreset_mode=mode))
    for steps in (9, 13):
        env.reset()
        for _ in range(steps):
            env.step(np.zeros(2, int))
    batch = rb.sample(500)
    now, after = batch["observation"][:, :, 0, 0].int(), batch["next", "observation"][:, :, 0, 0].int()
    step, steps = now[:, -1:] % 20, batch["steps_to_next_obs"].int()
    back = torch.arange(2, -1, -1, dtype=torch.int32)
    assert torch.equal(now, now[:, -1:] - torch.minimum(back, step))
    assert torch.equal(after, now[:, -1:] + steps - torch.minimum(back, step + steps))
    assert torch.equal(batch["next", "terminated"], after[:, -1:] % 20 == now[:, -1:] // 1000)
    assert len(batch["index"].unique()) > 25


def test_what_cannot_be_composed_is_refused_when_it_is_built():
    finals = FinalObservations(["frame"], LazyTensorStorage(9))
    twice = r"expected a field as it is stored, but an expander inside has changed"
    with pytest.raises(TypeError, match=rf"FrameStack: {twice} 'frame'"):
        FrameStack(NStep(FrameStack(RandomSampler(), 2, -1, ["frame"]), 2, 1.0), 2, -1, ["frame"])
    with pytest.raises(TypeError, match=rf"FrameStack: {twice} \('next', 'reward'\)"):
        FrameStack(NStep(RandomSampler(), 2, 1.0), 2, -1, [("next", "reward")])
    with pytest.raises(TypeError, match=rf"NStep: {twice} \('next', 'reward'\)"):
        NStep(FrameStack(RandomSampler(), 2, -1, [("next", "reward")]), 2, 1.0)
    with pytest.raises(TypeError, match="expected one with replacement"):
        FrameStack(NextFromFollowing(SamplerWithoutReplacement(), finals), 2, -1, ["frame"])


@pytest.mark.parametrize("name", ["uint16", "float8_e5m2", "bool"])
def test_final_observations_of_any_dtype(name):
    """Whatever torch has operations for."""
    finals = FinalObservations(["frame"])
    sampler = FrameStack(NextFromFollowing(RandomSampler(), finals), 2, None, ["frame", ("next", "frame")], views=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, transform=finals, batch_size=64)
    frames = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(getattr(torch, name))
    ends = torch.tensor([False, True])
    rb.extend({"frame": frames[:2], "next": {"frame": frames[1:], "done": ends}})
    batch = rb.sample()
    for now, after in zip(batch["frame"].float().tolist(), batch["next"]["frame"].float().tolist(), strict=True):
        first, second, last = frames.float().tolist()
        assert (now, after) in (([first, first], [first, second]), ([first, second], [second, last]))
    assert batch["frame"].data_ptr() + frames[0].nbytes == batch["next"]["frame"].data_ptr()  # views of three frames
