"""Stable-Baselines3's buffer over a store, beside Stable-Baselines3's own."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

sb3 = pytest.importorskip("stable_baselines3.common.buffers")

from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize, VecTransposeImage  # noqa: E402

import engram  # noqa: E402
from engram.adapters.sb3 import PrioritizedReplayBuffer, ReplayBuffer  # noqa: E402
from engram.errors import NoSampleable  # noqa: E402
from tests import fresh  # noqa: E402
from tests.adapters.sb3_steps import BOX, DISCRETE, Steps, all_of, all_steps, as_bytes, both, chosen, pick, row_of, same  # noqa: E402

KINDS = {
    "box": BOX,
    "double": spaces.Box(-1, 1, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": spaces.Discrete(7),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multibinary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"image": spaces.Box(0, 255, (8, 8, 1), np.uint8), "at": BOX, "room": spaces.Discrete(4)}),
}
ACTIONS = {
    "discrete": DISCRETE,
    "box": spaces.Box(-1, 1, (2, 3), np.float64),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_theirs(kind, n):
    ours, other = both(KINDS[kind], n=n, size=20 * n)
    for count in (5, 15, 30):  # then exactly full if it holds 20; at last, steps are overwritten
        Steps(KINDS[kind], n=n, seed=count).fill(count, ours, other)
        assert (ours.pos, ours.full, ours.size()) == (other.pos, other.full, other.size())
        same(all_steps(ours), all_steps(other))


@pytest.mark.parametrize("kind", ACTIONS)
def test_actions_are_theirs(kind):
    ours, other = both(BOX, ACTIONS[kind], n=2)
    Steps(BOX, ACTIONS[kind], n=2).fill(10, ours, other)
    same(all_steps(ours), all_steps(other))


@pytest.mark.parametrize("kind", ["box", "dict"])
def test_draws_are_uniform_over_steps_and_environments(kind):
    ours, _ = both(KINDS[kind], n=2)
    steps = Steps(KINDS[kind], n=2).fill(10, ours)
    torch.manual_seed(0)
    batch = ours.sample(20_000)
    wanted = {as_bytes(pick(step[0], i)): (step, i) for step in steps for i in range(2)}
    counts = dict.fromkeys(wanted, 0)
    keys = [
        as_bytes({k: v[i] for k, v in batch.observations.items()} if kind == "dict" else batch.observations[i].numpy())
        for i in range(20_000)
    ]
    for i, key in enumerate(keys):
        counts[key] += 1
        step, env = wanted[key]
        assert np.float32(step[3][env]) == batch.rewards[i, 0]
    assert all(800 < count < 1_200 for count in counts.values())  # 1,000 and 6.4 times the standard deviation


def test_draws_follow_the_seed():
    ours, _ = both(BOX)
    Steps(BOX).fill(30, ours)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(ours.sample(16))
    same(*drawn)
    assert not torch.equal(ours.sample(16).observations, drawn[0].observations)


@pytest.mark.parametrize("handled", [False, True])
def test_timeouts(handled):
    ours, other = both(BOX, n=2, handle_timeout_termination=handled)
    other.handle_timeout_termination = handled
    steps = Steps(BOX, n=2, ends=0.5).fill(20, ours, other)
    assert any(info["TimeLimit.truncated"] for step in steps for info in step[-1])
    same(all_steps(ours), all_steps(other))
    for name in ("dones", "timeouts"):
        assert np.array_equal(getattr(ours, name), getattr(other, name)), name


@pytest.mark.parametrize("kind", ["box", "discrete", "dict"])
def test_arrays_are_theirs(kind):
    ours, other = both(KINDS[kind], n=2, size=20)
    steps = Steps(KINDS[kind], n=2)
    assert ours.rewards.shape == other.rewards.shape
    for count in (4, 9):
        steps.fill(count, ours, other)
        for name in ("observations", "next_observations", "actions", "rewards"):
            one, two = getattr(ours, name), getattr(other, name)
            pairs = [(one[key], two[key]) for key in two] if isinstance(two, dict) else [(one, two)]
            for a, b in pairs:
                assert a.dtype == b.dtype
                assert np.array_equal(a, b), name


def test_arrays_of_rows_that_are_gone():
    """As those of a step that a killed process was writing: zeros, and the others stay in their places."""
    buffer = ReplayBuffer(20, BOX, DISCRETE, "cpu", 2)
    Steps(BOX, n=2).fill(6, buffer)
    before = buffer.observations.copy()
    buffer.rb.remove([4, 12])  # step 4 of the first environment, and step 2 of the second
    before[4, 0] = before[2, 1] = 0
    assert np.array_equal(buffer.observations, before)


def test_dones_take_assignments():
    ours, other = both(BOX, n=2)
    Steps(BOX, n=2, ends=0).fill(6, ours, other)
    for buffer in (ours, other):
        buffer.dones[3, 1] = True
        buffer.dones[buffer.pos - 1] = True
    assert np.array_equal(ours.dones, other.dones)
    same(all_steps(ours), all_steps(other))


def test_reset_and_extend():
    ours, other = both(BOX, n=1)
    Steps(BOX).fill(6, ours, other)
    ours.reset()
    assert (ours.size(), ours.pos, ours.full) == (0, 0, False)
    with pytest.raises(NoSampleable):
        ours.sample(1)
    other.reset()
    steps = [Steps(BOX, seed=1).step() for _ in range(3)]
    for buffer in (ours, other):
        buffer.extend(*zip(*steps, strict=True))
    same(all_steps(ours), all_steps(other))


# ---- returns of several steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("n_steps", "count"), [(1, 9), (3, 9), (3, 33), (5, 20), (7, 50)])
def test_n_steps_are_theirs(n, n_steps, count):
    size = 20 * n
    ours = ReplayBuffer(size, BOX, DISCRETE, "cpu", n, n_steps=n_steps, gamma=0.9)
    other = sb3.NStepReplayBuffer(size, BOX, DISCRETE, "cpu", n, n_steps=n_steps, gamma=0.9)
    Steps(BOX, n=n, seed=n_steps).fill(count, ours, other)
    one, two = all_steps(ours), all_steps(other)
    for name in ("observations", "actions", "next_observations", "dones"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    torch.testing.assert_close(one.rewards, two.rewards, rtol=1e-6, atol=1e-6)
    if n_steps == 1:
        assert one.discounts is None  # an algorithm then takes its gamma, which is the same
    else:
        torch.testing.assert_close(one.discounts, two.discounts, rtol=1e-6, atol=1e-6)


def test_n_steps_of_dicts():
    """Which Stable-Baselines3 has not: against the sum."""
    space = KINDS["dict"]
    ours = ReplayBuffer(50, space, DISCRETE, "cpu", n_steps=3, gamma=0.5)
    steps = Steps(space, ends=0).fill(20, ours)
    batch = all_steps(ours)
    for i in range(18):
        rewards = [float(steps[i + k][3][0]) for k in range(3)]
        assert batch.rewards[i].item() == pytest.approx(rewards[0] + 0.5 * rewards[1] + 0.25 * rewards[2], rel=1e-5)
        assert np.array_equal(batch.next_observations["at"][i], steps[i + 2][1]["at"][0])


# ---- observations stored once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["box", "image", "dict"])
def test_observations_stored_once(kind, n):
    """With timeouts handled, and of dicts: Stable-Baselines3 refuses both."""
    ours, other = both(KINDS[kind], n=n, size=30 * n, optimize_memory_usage=True)
    steps = Steps(KINDS[kind], n=n).fill(70, ours, other)
    wanted = all_of(other)
    batch = ours.sample(600)
    found = {}
    for i in range(600):
        row = row_of(batch, i)
        key = as_bytes(row[0])
        for a, b in zip(row[1:], wanted[key], strict=True):
            assert as_bytes(a) == as_bytes(b)
        found[key] = True
    newest = [
        as_bytes(pick(steps[-1][0], i)) for i in range(n) if not steps[-1][4][i]
    ]  # their next ones are not there yet
    assert {*found} == {*wanted} - {*newest}
    with pytest.raises(AttributeError, match="optimize_memory_usage"):
        ours.next_observations  # noqa: B018


def test_n_steps_of_observations_stored_once():
    ours = ReplayBuffer(100, BOX, DISCRETE, "cpu", 2, True, n_steps=3, gamma=0.9)
    other = sb3.NStepReplayBuffer(100, BOX, DISCRETE, "cpu", 2, n_steps=3, gamma=0.9)
    Steps(BOX, n=2).fill(40, ours, other)
    one, two = chosen(ours, 37), chosen(other, 37)  # the newest steps have no next observation yet
    for name in ("observations", "actions", "next_observations", "dones"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    torch.testing.assert_close(one.rewards, two.rewards, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one.discounts, two.discounts, rtol=1e-6, atol=1e-6)


def frames_env():
    import gymnasium

    class Frames(gymnasium.Env):
        observation_space = spaces.Box(0, 255, (8, 8, 1), np.uint8)
        action_space = DISCRETE
        made = 0

        def __init__(self, length):
            self.length = length

        def _frame(self):
            Frames.made += 1
            return np.full((8, 8, 1), Frames.made % 250 + 1, np.uint8)

        def reset(self, *, seed=None, options=None):
            self.at = 0
            return self._frame(), {}

        def step(self, action):
            self.at += 1
            over = self.at == self.length
            return self._frame(), 1.0, over and self.length == 5, over and self.length == 7, {}

    return DummyVecEnv([lambda: Frames(5), lambda: Frames(7)])


@pytest.mark.parametrize("first", [False, True])
def test_one_frame_a_step(first):
    """Stacks of four, channels last or first, as VecFrameStack makes them: against stored stacks."""
    env = VecFrameStack(frames_env(), 4)
    env = VecTransposeImage(env) if first else env
    space = env.observation_space
    assert space.shape == ((4, 8, 8) if first else (8, 8, 4))
    ours = ReplayBuffer(80, space, DISCRETE, "cpu", 2, True, frame_stack=4)
    other = sb3.ReplayBuffer(80, space, DISCRETE, "cpu", 2)
    seen = env.reset()
    for _ in range(37):
        after, reward, done, infos = env.step(np.zeros(2, np.int64))
        following = after.copy()
        for i in range(2):
            if done[i]:
                following[i] = infos[i]["terminal_observation"]
        for buffer in (ours, other):
            buffer.add(seen.copy(), following, np.zeros(2), reward, done, infos)
        seen = after
    assert ours.observations.shape == (40, 2, *((1, 8, 8) if first else (8, 8, 1)))
    wanted = all_of(other)
    batch = ours.sample(500)
    for i in range(500):
        row = row_of(batch, i)
        for a, b in zip(row[1:], wanted[as_bytes(row[0])], strict=True):
            assert as_bytes(a) == as_bytes(b)
    assert ours.rb.storage.nbytes < 0.2 * (other.observations.nbytes + other.next_observations.nbytes)


def stacked_steps(frames, n, padding, seed):
    """Steps of ``n`` environments whose frames are numbers, none of them twice, with stacks of them: forever."""
    rng, number = np.random.default_rng(seed), 0
    stacks = [None] * n
    while True:
        before, after, over = [], [], rng.random(n) < 0.15
        for env in range(n):
            if stacks[env] is None:
                number += 1
                stacks[env] = [number if padding == "first" else 0] * (frames - 1) + [number]
            number += 1
            before.append(stacks[env])
            after.append([*stacks[env][1:], number])
            stacks[env] = None if over[env] else after[-1]
        cut = over & (rng.random(n) < 0.5)
        infos = [{"TimeLimit.truncated": bool(one)} for one in cut]
        yield np.array(before, np.float32), np.array(after, np.float32), over, infos


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "directory", "n_steps"])
@pytest.mark.parametrize(
    ("frames", "n", "size", "padding"),
    [(2, 1, 4, "zeros"), (3, 2, 11, "first"), (4, 3, 6, "zeros"), (4, 1, 30, "first")],
)
def test_stacks_after_the_ring_wraps(tmp_path, frames, n, size, padding, kind):
    """Each stack is what was added, and all steps are drawn but the oldest, of which frames are gone, and those that wait."""
    ahead = 2 if kind == "n_steps" else 1
    how = {"frame_stack": frames, "frame_padding": padding, "n_steps": ahead}
    how |= {"scratch_dir": tmp_path / "replay"} if kind == "directory" else {}
    cls = PrioritizedReplayBuffer if kind == "prioritized" else ReplayBuffer
    buffer = cls(size * n, spaces.Box(0, 1e6, (frames,), np.float32), DISCRETE, "cpu", n, True, **how)
    steps = stacked_steps(frames, n, padding, seed=size)
    lanes = [[] for _ in range(n)]
    for count in range(1, 4 * size + 3):
        before, after, over, infos = next(steps)
        buffer.add(before, after, np.zeros(n), np.zeros(n), over, infos)
        for env, lane in enumerate(lanes):
            lane.append((tuple(before[env]), tuple(after[env]), bool(over[env])))
        if count < size or count % 3:
            continue
        wanted = {}
        for lane in lanes:
            live = lane[-size:]
            for at in range(frames - 1, len(live)):
                ends = [step for step, one in enumerate(live) if one[2] and step >= at]
                last = min(at + ahead - 1, *ends[:1]) if ends else at + ahead - 1
                if last < len(live) - 1 or live[-1][2]:
                    wanted[live[at][0]] = live[min(last, len(live) - 1)][1]
        batch = buffer.sample(40 * n * size)
        drawn = zip(batch.observations.tolist(), batch.next_observations.tolist(), strict=True)
        assert {(tuple(a), tuple(b)) for a, b in drawn} == {*wanted.items()}, count
    buffer.close()


def test_stacks_of_a_directory_that_engram_opens(tmp_path):
    """Which whoever opens it without the adapter draws alike."""
    buffer = ReplayBuffer(
        8,
        spaces.Box(0, 1e6, (3,), np.float32),
        DISCRETE,
        "cpu",
        1,
        True,
        frame_stack=3,
        scratch_dir=tmp_path / "replay",
    )
    steps = stacked_steps(3, 1, "zeros", seed=1)
    added = []
    for _ in range(21):
        before, after, over, infos = next(steps)
        buffer.add(before, after, np.zeros(1), np.zeros(1), over, infos)
        added.append((tuple(before[0]), tuple(after[0])))
    buffer.close()
    with engram.ReplayBuffer.open(tmp_path / "replay") as rb:
        batch = rb.sample(300)
    drawn = zip(batch["observation"].tolist(), batch["next"]["observation"].tolist(), strict=True)
    found = {(tuple(a), tuple(b)) for a, b in drawn}
    assert {*added[-6:-1]} <= found <= {*added[-6:]}


def test_a_ring_that_holds_no_whole_stack():
    with pytest.raises(ValueError, match=r"buffer_size // n_envs: expected at least 7, got 6"):
        ReplayBuffer(13, spaces.Box(0, 1, (4,)), DISCRETE, "cpu", 2, True, frame_stack=4, n_steps=3)


def test_stacks_that_frames_do_not_give_again():
    space = spaces.Box(0, 255, (4, 8, 8), np.uint8)
    buffer = ReplayBuffer(20, space, DISCRETE, "cpu", 1, True, frame_stack=4)
    zero = np.zeros((1, 4, 8, 8), np.uint8)
    full, shifted = zero + 7, zero.copy()
    shifted[0, 3] = 7
    with pytest.raises(ValueError, match=r"next_obs: expected the last 3 frames of obs.*frame_stack=4"):
        buffer.add(zero, full, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    with pytest.raises(ValueError, match=r"obs: expected older frames that are zeros.*'first'"):
        buffer.add(full, full, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    assert buffer.size() == 0
    buffer.add(zero, shifted, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    repeated = ReplayBuffer(20, space, DISCRETE, "cpu", 1, True, frame_stack=4, frame_padding="first")
    repeated.add(full, full, np.zeros(1), np.zeros(1), np.ones(1), [{}])
    assert torch.equal(repeated.sample(2).observations, torch.full((2, 4, 8, 8), 7, dtype=torch.uint8))


def test_an_episode_cut_without_a_flag_is_noticed():
    """As CleanRL's scripts write them, which hand over terminations alone."""
    buffer = ReplayBuffer(20, BOX, DISCRETE, "cpu", 1, True, handle_timeout_termination=False)
    for episode in range(2):
        for step in range(3):
            at = np.full((1, 3), 10 * episode + step, np.float32)
            buffer.add(at, at + 1, np.zeros(1), np.zeros(1), np.zeros(1), {})
    batch = buffer.sample(200)
    assert torch.equal(batch.next_observations, batch.observations + 1)
    assert sorted({*batch.observations[:, 0].tolist()}) == [0, 1, 10, 11]  # what followed the third is not known


# ---- normalization -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["box", "dict"])
def test_normalization_is_theirs(kind):
    space = KINDS[kind]
    ours, other = both(space)
    Steps(space).fill(20, ours, other)

    import gymnasium

    class Still(gymnasium.Env):
        observation_space, action_space = space, DISCRETE

    keys = ["at"] if kind == "dict" else None
    env = VecNormalize(DummyVecEnv([Still]), norm_obs_keys=keys, clip_reward=0.5)
    for rms in env.obs_rms.values() if kind == "dict" else [env.obs_rms]:
        rms.mean, rms.var = rms.mean + 3, rms.var * 2
    env.ret_rms.var = np.float64(4.0)
    same(chosen(ours, 20, env), chosen(other, 20, env))
    n_step = ReplayBuffer(40, space, DISCRETE, "cpu", n_steps=2, gamma=0.5)
    Steps(space).fill(20, n_step)
    plain, scaled = n_step._get_samples(np.arange(20)), n_step._get_samples(np.arange(20), env)
    torch.testing.assert_close(scaled.rewards, plain.rewards / np.float32(np.sqrt(4 + env.epsilon)))


# ---- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"observation_space": spaces.Text(5)}, TypeError, r"observation_space: expected a Box.*got Text"),
        ({"observation_space": spaces.Tuple((BOX, BOX))}, TypeError, r"observation_space: expected.*got Tuple"),
        ({"observation_space": spaces.Dict({"a": spaces.Dict({"b": BOX})})}, TypeError, r"\['a'\]: expected.*got Dict"),
        ({"action_space": spaces.Text(5)}, TypeError, r"action_space: expected.*got Text"),
        ({"frame_stack": 4}, ValueError, r"frame_stack: expected optimize_memory_usage=True"),
        (
            {"frame_stack": 2, "optimize_memory_usage": True},
            ValueError,
            r"frame_stack: expected observations that are 2 frames",
        ),
        (
            {"frame_stack": 3, "optimize_memory_usage": True, "frame_padding": "no"},
            ValueError,
            r"'zeros' or 'first', got 'no'",
        ),
        (
            {"observation_space": spaces.Dict({"a": BOX}), "frame_stack": 3, "optimize_memory_usage": True},
            ValueError,
            r"a Box",
        ),
        ({"n_envs": 0}, ValueError, r"n_envs"),
        ({"buffer_size": 0}, ValueError, r"buffer_size"),
        ({"n_steps": 0}, ValueError, r"n_steps"),
        ({"gamma": 2.0}, ValueError, r"gamma"),
        ({"scratch_dir": 5}, TypeError, r"scratch_dir: expected a path"),
    ],
)
def test_what_cannot_be(how, error, said):
    with pytest.raises(error, match=said):
        ReplayBuffer(**{"buffer_size": 40, "observation_space": BOX, "action_space": DISCRETE, "device": "cpu"} | how)


def test_values_of_another_shape():
    ours, _ = both(BOX, n=2)
    good = Steps(BOX, n=2).step()
    for at, name in enumerate(["obs", "next_obs", "action", "reward", "done"]):
        bad = [*good]
        bad[at] = np.zeros((3, 5))
        with pytest.raises(ValueError, match=rf"add: {name}: expected \[2, \d\], got \[3, 5\]"):
            ours.add(*bad)
    assert ours.size() == 0


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(
    ("infos", "got"), [([{"TimeLimit.truncated": True}], 1), ([{}], 1), ([], 0), ([{}] * 3, 3), ({}, "a dict")]
)
def test_infos_of_another_number_of_environments(infos, got, once):
    ours, _ = both(BOX, n=2, optimize_memory_usage=once)
    step = Steps(BOX, n=2).step()
    with pytest.raises(ValueError, match=rf"add: infos: expected one of each of 2 environments, got {got}\."):
        ours.add(*step[:-1], infos)
    assert ours.size() == 0
    ours.add(*step)
    assert ours.size() == 1


def test_without_the_package():
    said = fresh.run(
        """
        import sys
        sys.modules["stable_baselines3"] = None
        try:
            import engram.adapters.sb3
        except ModuleNotFoundError as error:
            print(error)
        """
    )
    assert said == 'engram.adapters.sb3: needs stable_baselines3: pip install "engram-replay[sb3]".'
