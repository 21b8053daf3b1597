"""Plain steps are written in one native call; whatever something else must look at takes the way through the buffer."""

import copy
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from engram import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplesPerInsert,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram._support import native
from engram.transforms import Transform
from tests.env.tales import TaleEnv, rows_of
from tests.env.test_gymnasium import tales

MODES = list(AutoresetMode)
KINDS = [ReplayBuffer, TensorDictReplayBuffer]


def tale(rb, lengths=(1000,), **arguments):
    env = rb.record(TaleEnv(0, lengths), **arguments)
    env.reset()
    return env


def one(kind=ReplayBuffer, **arguments):
    return kind(storage=LazyTensorStorage(200), **arguments)


def calls_of(act):
    """The names of the Python functions of engram that run meanwhile."""
    names = []

    def profile(frame, event, _):
        if event == "call" and "engram" in frame.f_globals.get("__name__", ""):
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", [None, {"log_prob": 0.0}])
def test_a_plain_step_of_one_environment_takes_few_calls(kind, store):
    rb = one(kind)
    env = tale(rb, store=store)
    calls = []
    for action in range(20):
        if store:
            rb.note(log_prob=action / 2)
        calls.append(calls_of(lambda action=action: env.step(action)))
    assert not {"add", "extend", "conformed", "copied"} & {name for each in calls[1:] for name in each}
    assert max(map(len, calls[1:])) <= (14 if store else 8)
    assert rows_of(rb, 0) == env.unwrapped.tale.log
    if store:
        assert rb[:]["log_prob"].reshape(-1).tolist() == [action / 2 for action in range(20)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_plain_steps_of_a_vector_take_few_calls_also_where_some_have_ended(kind, mode):
    rb = kind(storage=LazyTensorStorage(600, lanes=3))
    env = rb.record(SyncVectorEnv([lambda i=i: TaleEnv(i, (3 + 2 * i,)) for i in range(3)], autoreset_mode=mode))
    env.reset()
    quick = 0
    for step in range(30):
        names = calls_of(lambda step=step: env.step(np.full(3, step)))
        over = np.array([each.unwrapped.tale.over for each in env.unwrapped.envs])
        quick += "extend" not in names and len(names) <= 8
        if mode is AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over})
    for lane, each in enumerate(tales(env)):
        assert rows_of(rb, lane) == each.log
    ended = sum(any(step["done"] for step in each.log) for each in tales(env))
    assert ended == 3
    assert quick == 29 if mode is not AutoresetMode.SAME_STEP else quick >= 10


class Forms(gymnasium.Wrapper):
    """Returns the same values, each time in a form drawn by chance: plain ones, and such that Python must look at."""

    def __init__(self, env, seed):
        super().__init__(env)
        self.random = random.Random(seed)

    def form(self, array):
        changes = (
            lambda x: x,
            lambda x: x.tolist(),
            torch.from_numpy,
            lambda x: x.astype(np.float64),
            lambda x: x[::-1].copy()[::-1],
        )
        return self.random.choice(changes)(np.array(array, np.float32))

    def reset(self, **arguments):
        seen, infos = self.env.reset(**arguments)
        return self.form(seen), infos

    def step(self, action):
        seen, reward, terminated, truncated, infos = self.env.step(action)
        reward = self.random.choice([float, np.float64, np.float32, torch.tensor, lambda x: np.array([x])])(reward)
        terminated = self.random.choice([bool, np.bool_, int, torch.tensor])(terminated)
        return self.form(seen), reward, terminated, truncated, infos


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_all_forms_in_any_order(kind, seed):
    rb, chance = kind(storage=LazyTensorStorage(400)), random.Random(seed)
    env = rb.record(Forms(TaleEnv(0, (7, 2, 1, 9), raises_at=60), seed))
    env.reset()
    for step in range(150):
        action = chance.choice([int, np.int64, np.int32, np.array, torch.tensor])(step)
        try:
            over = env.step(action)[2:4]
        except KeyboardInterrupt:
            over = (True,)
        if any(map(bool, over)) or chance.random() < 0.1:
            env.reset()
    assert rows_of(rb, 0) == env.unwrapped.tale.log


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_whose_add_is_of_the_user(kind):
    seen = []

    class Own(kind):
        def add(self, data, **arguments):
            seen.append(int(data["action"]))
            return super().add(data, **arguments)

    rb = one(Own)
    env = tale(rb)
    for action in range(9):
        env.step(action)
    assert seen == [*range(9)]
    assert rb.write_count == 9


def test_a_sampler_that_listens_hears_of_every_step_from_then_on():
    class Listens(RandomSampler):
        listens = True

        def __init__(self):
            super().__init__()
            self.heard = []

        def observe(self, write, data):
            self.heard += write.rows.tolist()

    rb = one(batch_size=2)
    env = tale(rb)
    for action in range(5):
        env.step(action)
    sampler = Listens()
    rb.set_sampler(sampler)
    for action in range(5, 9):
        env.step(action)
    rb.set_sampler(RandomSampler())
    env.step(9)
    assert sampler.heard == [5, 6, 7, 8]
    assert rows_of(rb, 0) == env.unwrapped.tale.log


def test_a_transform_sees_every_step_from_then_on():
    class Doubles(Transform):
        def inv(self, data):
            return {**data, "action": data["action"] * 2}

    rb = one()
    env = tale(rb)
    env.step(1)
    env.step(2)
    rb.append_transform(Doubles())
    env.step(3)
    env.step(4)
    assert rb[:]["action"].tolist() == [1, 2, 6, 8]


def test_a_priority_that_comes_with_the_steps():
    rb = TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(20), alpha=1.0, beta=1.0, batch_size=64)
    env = tale(rb, store={"td_error": 0.0})
    for action in range(6):
        rb.note(td_error=float(action == 4))
        env.step(action)
    assert set(rb.sample()["action"].tolist()) == {4}


def test_steps_wait_for_the_limits_of_the_store():
    rb = one(batch_size=1)
    env = tale(rb)
    for action in range(4):
        env.step(action)
    rb.limit(SamplesPerInsert(1, min_size=4, tolerance=0.5))  # between 2 and 6 rows more than samples

    def go_on():
        for action in range(4, 34):
            env.step(action)

    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(go_on)
        for _ in range(29):
            rb.sample()
        stepping.result()
    assert rows_of(rb, 0) == env.unwrapped.tale.log
    assert len(rb) == 34


@pytest.mark.parametrize("kind", KINDS)
def test_another_storage_gets_the_rows_from_then_on(kind):
    first, second = LazyTensorStorage(200), LazyTensorStorage(200)
    rb = kind(storage=first)
    env = tale(rb)
    for action in range(5):
        env.step(action)
    rb.set_storage(second)
    for action in range(5, 9):
        env.step(action)
    assert (len(first), len(second)) == (5, 4)
    assert rows_of(rb, 0) == env.unwrapped.tale.log[5:]


def test_a_closed_storage_refuses():
    rb = one()
    env = tale(rb)
    for action in range(5):
        env.step(action)
    rb.storage.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_an_environment_records_into_the_copy_of_its_buffer(kind):
    rb = one(kind)
    env = tale(rb)
    for action in range(4):
        env.step(action)
    rb_too, env_too = copy.deepcopy((rb, env))
    for action in range(4, 9):
        env_too.step(action)
    env.step(100)
    assert rows_of(rb, 0) == env.unwrapped.tale.log
    assert rows_of(rb_too, 0) == env_too.unwrapped.tale.log
    assert (len(rb), len(rb_too)) == (5, 9)


def test_what_was_written_stays_when_the_environment_uses_its_memory_again():
    rb = ReplayBuffer(storage=LazyTensorStorage(60, lanes=3))
    made = SyncVectorEnv([lambda i=i: TaleEnv(i, (50,)) for i in range(3)], copy=False)
    env = rb.record(made)
    action = np.zeros(3, np.int64)
    env.reset()
    for step in range(15):
        action[:] = step
        env.step(action)
    for lane, each in enumerate(tales(env)):
        assert rows_of(rb, lane) == each.log


class Turned(gymnasium.vector.VectorEnv):
    """Environments whose observations are once the wrong way round, or of the other order of bytes."""

    def __init__(self, dtype):
        self.num_envs, self.metadata, self.turned = 3, {"autoreset_mode": AutoresetMode.DISABLED}, False
        self.single_observation_space = gymnasium.spaces.Box(-99, 99, (2,), np.dtype(dtype))
        self.single_action_space = gymnasium.spaces.Discrete(9)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, 3)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, 3)

    def seen(self):
        return np.array([[0, 1], [10, 11], [20, 21]], np.float32)

    def reset(self, **_):
        return np.ascontiguousarray(self.seen().T) if self.turned else self.seen(), {}

    def step(self, action):
        no = np.zeros(3, np.bool_)
        return self.seen(), np.ones(3, np.float32), no, no, {}


def test_observations_the_wrong_way_round_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(60, lanes=3))
    made = Turned(np.float32)
    env = rb.record(made)
    env.reset()
    for _ in range(3):
        env.step(np.zeros(3, int))
    made.turned = True
    env.reset()
    with pytest.raises(RuntimeError, match="same number of rows"):
        env.step(np.zeros(3, int))
    assert rb.write_count == 9
    assert rb["observation"].unique(dim=0).tolist() == made.seen().tolist()


def test_a_space_of_the_other_order_of_bytes():
    rb = ReplayBuffer(storage=LazyTensorStorage(60, lanes=3))
    made = Turned(">f4")
    env = rb.record(made)
    env.reset()
    for _ in range(4):
        env.step(np.zeros(3, int))
    assert rb["observation"].unique(dim=0).tolist() == made.seen().tolist()


def test_the_core_refuses_masks_and_flags_of_another_size():
    rb = one()
    env = tale(rb)
    env.step(1)
    memory = rb.storage.memory
    specs = [(2, 32, (3,)), (0, 64, ()), (2, 32, (3,)), (2, 32, ()), (6, 8, ()), (6, 8, ()), (6, 8, ())]
    seen, action = (native.Intake(specs, tree, ()) for tree in (0, 1))
    outcome = native.Intake(specs, ("tuple", tuple, [0, 1, 2, 3], [2, 3, 4, 5]), ())
    masks = [np.zeros(1, np.bool_) for _ in range(4)]

    def steps(masks=masks, lanes=(0,), done=6, mode="NextStep", outcome=outcome):
        return native.Steps(memory.core, seen, action, outcome, done, [*lanes], masks, False, mode)

    held = [np.zeros(3, np.float32)], [np.zeros((), np.int64)]
    assert steps().hold(*held)
    assert not steps().hold([np.zeros(2, np.float32)], held[1])
    assert not steps().hold([], held[1])
    assert not steps().hold([np.zeros((3, 1), np.float32)], held[1]), "as many bytes of another shape"
    assert not steps().hold([np.zeros(3, ">f4")], held[1])
    assert not steps(done=5).hold(*held), "a field twice, and one never"
    short = native.Intake(specs, ("tuple", tuple, [0, 1], [2, 3]), ())
    for wrong in (
        {"masks": masks[:3]},
        {"masks": [np.zeros(2, np.bool_)] * 4},
        {"lanes": (0, 0)},
        {"lanes": ()},
        {"mode": "never"},
    ):
        with pytest.raises(ValueError, match="expected|per environment|mode"):
            steps(**wrong)
    for wrong in ({"done": 3}, {"outcome": short}):
        with pytest.raises(ValueError, match="flags"):
            steps(**wrong)
    with pytest.raises(IndexError):
        steps(done=7)
