"""Recording environments of Gymnasium: rows are what a correct agent sees, in every autoreset mode."""

import os
import signal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import (
    FinalObservations,
    LazyMemmapStorage,
    LazyTensorStorage,
    NextFromFollowing,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.env.tales import FORMS, TaleEnv, rows_of
from tests.store.processes import Child, context
from tests.waiting import ended

MODES = list(AutoresetMode)


def vector(lengths, mode, form="box", **arguments):
    """A vector of tales, one per list of lengths."""
    makers = [lambda i=i, one=one: TaleEnv(i, one, form) for i, one in enumerate(lengths)]
    return SyncVectorEnv(makers, autoreset_mode=mode, **arguments)


def buffer(lanes, length=200, **arguments):
    return ReplayBuffer(storage=LazyTensorStorage(lanes * length, lanes=lanes), **arguments)


def play(env, actions, mode, *, cut=(), said=None):
    """Train as users do. ``cut``: steps before which all environments are reset, or (step, mask) some of them. ``said(step)`` is
    called after each of the first ten."""
    n = env.num_envs
    over = None
    cuts = {at if isinstance(at, int) else at[0]: None if isinstance(at, int) else at[1] for at in cut}
    for at, action in enumerate(actions):
        if at == 0 or (at in cuts and cuts[at] is None):
            env.reset(seed=at)
            over = np.zeros(n, bool)
        elif at in cuts:
            over = over | cuts[at]
        if mode is AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over.copy()})
        _, _, terminated, truncated, _ = env.step(action)
        over = terminated | truncated
        if said is not None and at < 10:
            said(at)


def tales(env):
    return [one.unwrapped.tale for one in env.unwrapped.envs]


lengths_of_one = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None, database=None)
@given(
    st.lists(lengths_of_one, min_size=1, max_size=4),
    st.sampled_from(MODES),
    st.integers(1, 25),
    st.sampled_from(sorted(FORMS)),
    st.sets(st.integers(1, 24), max_size=2),
    st.booleans(),
    st.data(),
)
def test_rows_are_what_the_environments_logged(lengths, mode, steps, form, cut, copy, data):
    n = len(lengths)
    masks = st.lists(st.booleans(), min_size=n, max_size=n).map(np.array)
    partly = mode is AutoresetMode.DISABLED and data.draw(st.booleans())
    cut = [(at, data.draw(masks)) for at in sorted(cut)] if partly else sorted(cut)
    rb = buffer(n)
    env = rb.record(vector(lengths, mode, form, copy=copy))
    play(env, np.random.default_rng(steps).integers(0, 1000, (steps, n)), mode, cut=cut)
    for lane, tale in enumerate(tales(env)):
        assert rows_of(rb, lane, form) == tale.log
    assert rb.write_count == sum(len(tale.log) for tale in tales(env)), "no phantom rows"


@pytest.mark.parametrize("mode", MODES)
def test_a_full_ring_keeps_the_newest(mode):
    lengths = [[1], [2, 3], [7]]
    rb = buffer(3, length=16)
    env = rb.record(vector(lengths, mode))
    play(env, np.arange(150).reshape(50, 3), mode)
    for lane, tale in enumerate(tales(env)):
        seam = rb.storage.extent().seam[lane] - 16 * lane
        rows = rows_of(rb, lane)
        assert rows[seam:] + rows[:seam] == tale.log[-16:]


@pytest.mark.parametrize("mode", MODES)
def test_trajectories_are_episodes(mode):
    storage = LazyTensorStorage(300, lanes=3)
    rb = TensorDictReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=1), batch_size=4)
    env = rb.record(vector([[1, 4], [3], [2, 2, 1]], mode))
    play(env, np.arange(120).reshape(40, 3), mode, cut=[17])
    rb.sample()
    table = rb.sampler._table
    found = [
        [tuple(rb[table.row(track, place + i)]["observation"].tolist()) for i in range(length)]
        for track, place, length in table.runs().reshape(-1, 3).tolist()
    ]
    expected = []
    for tale in tales(env):
        episodes = {}
        for step in tale.log:
            episodes.setdefault(step["observation"][1], []).append(step["observation"])
        expected += episodes.values()
    assert found == expected


class Patient(gymnasium.vector.VectorWrapper):
    """Lets environments that are over stand still until they are reset."""

    over = np.zeros(2, bool)

    def step(self, actions):
        self.env._autoreset_envs[:] = False
        observation, reward, terminated, truncated, infos = super().step(actions)
        waited, self.over = self.over, self.over | terminated | truncated
        return observation, reward, terminated & ~waited, truncated & ~waited, infos


def test_a_reset_that_comes_late():
    rb = buffer(2)
    env = rb.record(Patient(vector([[2], [9]], AutoresetMode.DISABLED)))
    env.reset()
    for at in range(6):
        env.step(np.array([at, at]))
    first, second = tales(env)
    assert rows_of(rb, 0) == first.log[:2]
    assert rows_of(rb, 1) == second.log
    env.reset(options={"reset_mask": np.array([True, False])})
    env.step(np.array([7, 7]))
    assert rows_of(rb, 0) == first.log[:2] + first.log[-1:]
    assert rows_of(rb, 1) == second.log


@pytest.mark.parametrize("tensordicts", [False, True])
def test_layout_of_rows(tensordicts):
    storage = LazyTensorStorage(60, lanes=2)
    rb = (TensorDictReplayBuffer if tensordicts else ReplayBuffer)(storage=storage)
    env = rb.record(vector([[3], [4]], AutoresetMode.NEXT_STEP))
    play(env, np.arange(20).reshape(10, 2), AutoresetMode.NEXT_STEP)
    number = (1,) if tensordicts else ()
    fields = {field.key: (field.dtype, tuple(field.shape)) for field in storage.store.schema.fields}
    assert fields == {
        ("observation",): ("float32", (3,)),
        ("action",): ("int64", ()),
        ("next", "observation"): ("float32", (3,)),
        ("next", "reward"): ("float32", number),
        ("next", "terminated"): ("bool", number),
        ("next", "truncated"): ("bool", number),
        ("next", "done"): ("bool", number),
    }
    for lane, tale in enumerate(tales(env)):
        assert rows_of(rb, lane) == tale.log


# ---- one environment -----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, database=None)
@given(lengths_of_one, st.integers(1, 20), st.sampled_from(sorted(FORMS)), st.sets(st.integers(1, 19)), st.booleans())
def test_one_environment(lengths, steps, form, cut, autoreset):
    rb = buffer(1)
    inner = TaleEnv(0, lengths, form)
    env = rb.record(gymnasium.wrappers.Autoreset(inner) if autoreset else inner)
    over = True
    for at in range(steps):
        if at == 0 or at in cut or (over and not autoreset):
            env.reset()
        *_, terminated, truncated, _ = env.step(np.int64(at))
        over = terminated or truncated
    assert rows_of(rb, 0, form) == inner.tale.log


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("form", ["box", "dict"])
def test_one_environment_is_stored_as_a_vector_of_one(kind, form):
    stored = []
    for single in (True, False):
        rb = kind(storage=LazyTensorStorage(50))
        inner = TaleEnv(0, [3, 4], form)
        env = rb.record(inner if single else SyncVectorEnv([lambda inner=inner: inner]))
        for _ in range(3):
            env.reset()
            for at in range(3):
                env.step(at if single else np.array([at]))
        assert rows_of(rb, 0, form) == inner.tale.log
        stored.append({(field.key, field.dtype, tuple(field.shape)) for field in rb.storage.store.schema.fields})
    assert stored[0] == stored[1]


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_write_transforms_of_one_environment(kind):
    """They get rows of one environment as a batch of one, also those that are one number."""
    finals = FinalObservations(["observation"], LazyTensorStorage(20))
    rb = kind(storage=LazyTensorStorage(50), sampler=NextFromFollowing(RandomSampler(), finals), transform=finals)
    env = rb.record(TaleEnv(0, [3, 4]))
    for at in range(15):
        if at % 5 == 0:
            env.reset()
        env.step(at)
    batch = rb.sample(99)
    expected = {step["observation"]: step["next"] for step in env.unwrapped.tale.log}
    after = map(tuple, batch["next"]["observation"].tolist())
    assert all(expected[tuple(now)] == next_ for now, next_ in zip(batch["observation"].tolist(), after, strict=True))


def test_it_goes_to_the_lane_that_is_named():
    rb = buffer(3)
    envs = [rb.record(TaleEnv(0), lane=2), rb.on_lane(1).record(TaleEnv(1))]
    for env in envs:
        env.reset()
        env.step(5)
    assert rb.storage.extent().filled == (0, 1, 1)
    assert [int(rb[row]["observation"][0]) for row in (200, 400)] == [1, 0]


@pytest.mark.parametrize("lane", [[2, 0], (2, 0), np.array([2, 0]), torch.tensor([2, 0])], ids=repr)
def test_a_vector_goes_to_the_lanes_that_are_named(lane):
    rb = buffer(3)
    env = rb.record(vector([[1, 3], [2]], AutoresetMode.NEXT_STEP), lane=lane)
    play(env, np.arange(18).reshape(9, 2), AutoresetMode.NEXT_STEP)
    assert [rows_of(rb, i) for i in (2, 1, 0)] == [tales(env)[0].log, [], tales(env)[1].log]


def test_lanes_that_the_caller_changes_later():
    rb, lane = buffer(2), torch.tensor([1])
    env = rb.record(TaleEnv(), lane=lane)
    lane[0] = 0
    env.reset()
    env.step(1)
    assert rb.storage.extent().filled == (0, 1)


# ---- what the user sees --------------------------------------------------------------------------------------------------


def test_reset_and_step_return_what_the_environment_returned():
    inner = TaleEnv()
    env = buffer(1).record(inner)
    assert isinstance(env, gymnasium.Env)
    assert env.reset(seed=3) is inner.returned
    assert env.step(1) is inner.returned
    assert (env.action_space, env.observation_space) == (inner.action_space, inner.observation_space)
    assert env.unwrapped is inner


class Kept(gymnasium.vector.VectorWrapper):
    """Keeps what it returns."""

    def reset(self, **arguments):
        self.returned = super().reset(**arguments)
        return self.returned

    def step(self, actions):
        self.returned = super().step(actions)
        return self.returned


@pytest.mark.parametrize("mode", MODES)
def test_so_do_those_of_a_vector(mode):
    inner = Kept(vector([[2], [3]], mode))
    env = buffer(2).record(inner)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert env.reset(seed=[1, 2]) is inner.returned
    plain = vector([[2], [3]], mode)
    plain.reset(seed=[1, 2])
    for at in range(2):
        found, expected = env.step(np.array([at, 5])), plain.step(np.array([at, 5]))
        assert found is inner.returned
        assert all(np.array_equal(a, b) for a, b in zip(found[:4], expected[:4], strict=True))
    assert env.num_envs == 2


def test_what_the_user_does_with_observations_changes_no_row():
    rb = buffer(1)
    env = rb.record(TaleEnv(0, [4]))
    observation, _ = env.reset()
    for at in range(4):
        observation[:] = -1
        observation, *_ = env.step(at)
    assert rows_of(rb, 0) == env.unwrapped.tale.log


# ---- cuts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_step_that_was_interrupted_ends_what_came_before(mode):
    rb = buffer(2)
    env = rb.record(vector([[9], [9]], mode))
    env.reset()
    env.step(np.array([1, 1]))
    env.unwrapped.envs[1].raises_at = 1
    with pytest.raises(KeyboardInterrupt):
        env.step(np.array([2, 2]))
    for at in (3, 4):
        env.step(np.array([at, at]))
    for lane in range(2):
        rows = rows_of(rb, lane)
        assert [row["action"] for row in rows] == [1, 4], "what cannot be told is no row"
        assert [row["truncated"] for row in rows] == [True, False]


def test_a_write_that_failed_ends_what_came_before():
    fails = [False]

    def write(rows):
        if fails[0]:
            raise OSError("no space")
        return rows

    rb = buffer(1)
    rb.append_transform(write, invert=True)
    env = rb.record(TaleEnv(0, [9]))
    env.reset()
    env.step(0)
    fails[0] = True
    with pytest.raises(OSError, match="no space"):
        env.step(1)
    fails[0] = False
    env.step(2)
    env.step(3)
    assert [(row["action"], row["truncated"]) for row in rows_of(rb, 0)] == [(0, True), (3, False)]


def _killed(directory, mode):
    rb = ReplayBuffer(storage=LazyMemmapStorage(400, lanes=2, scratch_dir=directory), batch_size=4)
    env = rb.record(vector([[5], [1, 30]], mode))
    play(env, np.arange(26).reshape(13, 2), mode)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("mode", MODES)
def test_killed_and_opened_again(mode, tmp_path):
    child = Child(_killed, tmp_path / "store", mode)
    ended(child.process)
    assert child.process.exitcode == -signal.SIGKILL
    same = vector([[5], [1, 30]], mode)
    play(same, np.arange(26).reshape(13, 2), mode)
    before = [tale.log for tale in tales(same)]
    rb = ReplayBuffer.open(tmp_path / "store")
    assert [rows_of(rb, lane) for lane in range(2)] == before
    env = rb.record(vector([[4], [2]], mode))
    for log in before:
        log[-1].end()
    assert [rows_of(rb, lane) for lane in range(2)] == before
    play(env, np.arange(20).reshape(10, 2), mode)
    after = [tale.log for tale in tales(env)]
    assert [rows_of(rb, lane) for lane in range(2)] == [a + b for a, b in zip(before, after, strict=True)]
    rb.close()


MOST = 3_000


def _stopped_at_any_moment(directory, mode, started):
    rb = ReplayBuffer(storage=LazyMemmapStorage(3 * 2 * MOST, lanes=3, scratch_dir=directory))
    env = rb.record(vector([[5], [1, 30], [2, 3]], mode))
    play(env, np.arange(3 * MOST).reshape(MOST, 3), mode, said=started.put)
    signal.pause()


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_any_moment(mode, tmp_path):
    steps = context("fork").SimpleQueue()
    child = Child(_stopped_at_any_moment, tmp_path / "store", mode, steps)
    while steps.get() < 9:
        pass
    child.kill()
    same = vector([[5], [1, 30], [2, 3]], mode)
    play(same, np.arange(3 * MOST).reshape(MOST, 3), mode)
    rb = ReplayBuffer.open(tmp_path / "store")
    before = [rows_of(rb, lane) for lane in range(3)]
    for rows, tale in zip(before, tales(same), strict=True):
        assert rows == tale.log[: len(rows)]
        assert rows
    env = rb.record(vector([[4], [2], [3]], mode))
    for rows in before:
        rows[-1].end()
    assert [rows_of(rb, lane) for lane in range(3)] == before
    play(env, np.arange(30).reshape(10, 3), mode)
    assert [rows_of(rb, lane) for lane in range(3)] == [
        rows + tale.log for rows, tale in zip(before, tales(env), strict=True)
    ]
    rb.close()


# ---- names ---------------------------------------------------------------------------------------------------------------


def test_other_names():
    names = {"observation": "obs", ("next", "observation"): "next_obs", ("next", "done"): ("over", "any")}
    names |= {("next", "truncated"): ("over", "cut")}
    rb = buffer(1)
    env = rb.record(TaleEnv(0, [3]), names=names)
    env.reset()
    env.step(1)
    env.reset()
    env.step(2)
    row = rb[0]
    assert set(row) == {"obs", "action", "next_obs", "next", "over"}
    assert (set(row["next"]), set(row["over"])) == ({"reward", "terminated"}, {"any", "cut"})
    assert rb["over", "cut"].tolist() == rb["over", "any"].tolist() == [True, False], "the reset has cut the first one"


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        ({"obs": "o"}, KeyError, "expected some of"),
        ({"observation": "action"}, ValueError, "collide"),
        ({"observation": "next"}, ValueError, "collide"),
        ({"observation": 1.5}, TypeError, "expected a string or a tuple of strings, got 1.5"),
    ],
)
def test_names_that_cannot_be(names, error, said):
    with pytest.raises(error, match=f"record: names.*{said}"):
        buffer(1).record(TaleEnv(), names=names)
