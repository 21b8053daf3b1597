"""Environments that return torch tensors, lists or plain bools, as simulators do: rows are those of the same environment in NumPy."""

import dm_env
import gymnasium
import numpy as np
import pytest
import torch
from dm_env import specs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from pettingzoo import ParallelEnv
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from tests.env.tales import TaleEnv, rows_of

MODES = list(AutoresetMode)
#: How an environment returns an array.
FORMS = {
    "numpy": lambda array: array,
    "tensor": lambda array: torch.from_numpy(np.array(array)),
    "with grad": lambda array: (
        torch.from_numpy(np.array(array)).requires_grad_()
        if array.dtype.kind == "f"
        else torch.from_numpy(np.array(array))
    ),
    "list": lambda array: array.tolist(),
    "list of tensors": lambda array: [*torch.from_numpy(np.array(array))],
    "column": lambda array: torch.from_numpy(np.array(array))[:, None] if array.ndim == 1 else torch.tensor(array),
}


class Simulator(VectorEnv):
    """Counts: an observation is the count of its environment. All, or every other one, end together."""

    def __init__(self, n, mode, form, nested="flat", together=True):
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self.mode, self.form, self.nested = n, mode, FORMS[form], nested
        leaf = spaces.Box(-1e9, 1e9, (2,), np.float32)
        self.single_observation_space = (
            leaf if nested == "flat" else spaces.Dict(a=leaf, b=spaces.Dict(c=spaces.Box(-1e9, 1e9, (), np.float32)))
        )
        self.single_action_space = spaces.Discrete(1000)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, n)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, n)
        self.count = np.arange(n) * 10_000.0
        self.length = np.full(n, 5) if together else np.arange(n) % 2 + 4
        self.age, self.over = np.zeros(n, int), np.zeros(n, bool)

    def seen(self):
        count = self.count.astype(np.float32)
        if self.nested == "flat":
            return self.form(np.stack([count, -count], 1))
        leaves = {"a": self.form(np.stack([count, -count], 1)), "b": {"c": self.form(count)}}
        if self.nested == "dict":
            return leaves
        return TensorDict({"a": leaves["a"], "b": TensorDict(leaves["b"], [self.num_envs])}, [self.num_envs])

    def begin(self, which):
        self.count[which] += 100 - self.count[which] % 100
        self.age[which], self.over[which] = 0, False

    def reset(self, *, seed=None, options=None):
        mask = np.ones(self.num_envs, bool)
        if options is not None:
            mask = np.array([bool(one) for one in options["reset_mask"]])
        self.begin(mask)
        return self.seen(), {}

    def step(self, actions):
        waiting = self.over.copy()
        if self.mode is AutoresetMode.NEXT_STEP:
            self.begin(waiting)
        self.count[~waiting] += 1
        self.age[~waiting] += 1
        over = ~waiting & (self.age == self.length)
        reward, info = self.count.astype(np.float32), {}
        self.over |= over
        if self.mode is AutoresetMode.SAME_STEP and over.any():
            info = {"final_obs": self.seen(), "_final_obs": self.form(over)}
            if self.nested == "tensordict":
                info = TensorDict({"final_obs": info["final_obs"]}, [self.num_envs])
            self.begin(over)
        return self.seen(), self.form(reward), self.form(over & (self.count % 200 < 100)), self.form(over), info


def recorded(form, mode, nested="flat", together=True, kind=ReplayBuffer):
    rb = kind(storage=LazyTensorStorage(400, lanes=4))
    inner = Simulator(4, mode, form, nested, together)
    env = rb.record(inner)
    env.reset()
    for at in range(24):
        if mode is AutoresetMode.DISABLED and inner.over.any():
            env.reset(options={"reset_mask": FORMS[form](inner.over.copy())})
        env.step(FORMS["tensor" if form == "with grad" else form](np.arange(4) + 10 * at))
    return rb


def leaves(data, path=()):
    if not isinstance(data, (dict, TensorDict)):
        return {path: data}
    return {k: v for key, value in data.items() for k, v in leaves(value, (*path, key)).items()}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", [*FORMS][1:])
def test_rows_are_those_of_an_environment_in_numpy(form, mode, together):
    found, expected = (recorded(one, mode, together=together)[:] for one in (form, "numpy"))
    if form == "column":  # the simulator is given actions of that form, too
        expected["action"] = expected["action"][:, None]
    assert torch.equal(expected["next"]["observation"], expected["observation"] + torch.tensor([1.0, -1.0]))
    found, expected = leaves(found), leaves(expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nested", ["dict", "tensordict"])
def test_nested_observations(nested, mode, kind):
    rows = recorded("tensor", mode, nested, kind=kind)[:]
    before, after = rows["observation"], rows["next"]["observation"]
    assert torch.equal(after["b"]["c"], before["b"]["c"] + 1)
    assert torch.equal(after["a"][:, 0], before["a"][:, 0] + 1)
    assert torch.equal(after["a"][:, 0], after["b"]["c"])


@pytest.mark.parametrize("form", ["tensor", "list", "numpy"])
def test_final_observations_that_are_a_list_of_one_per_environment(form):
    class Objects(Simulator):
        def step(self, actions):
            *result, info = super().step(actions)
            if info:
                a, c = info["final_obs"]["a"].numpy(), info["final_obs"]["b"]["c"].numpy()
                each = [{"a": FORMS[form](a[i]), "b": {"c": FORMS[form](c[i])}} for i in range(4)]
                info = {"final_obs": each}
            return *result, info

    rb = ReplayBuffer(storage=LazyTensorStorage(400, lanes=4))
    env = rb.record(Objects(4, AutoresetMode.SAME_STEP, "tensor", "dict"))
    env.reset()
    for at in range(24):
        env.step(torch.arange(4) + at)
    rows = rb[:]
    assert len(rb) == 96
    assert torch.equal(rows["next"]["observation"]["a"][:, 0], rows["observation"]["a"][:, 0] + 1)


@pytest.mark.parametrize("mode", MODES)
def test_flags_that_are_one_bool_for_all(mode):
    class Plain(Simulator):
        def step(self, actions):
            observation, reward, _, truncated, info = super().step(actions)
            return observation, reward, False, truncated, info

    rb = ReplayBuffer(storage=LazyTensorStorage(400, lanes=4))
    inner = Plain(4, mode, "tensor")
    env = rb.record(inner)
    env.reset()
    for _ in range(12):
        if mode is AutoresetMode.DISABLED and inner.over.any():
            env.reset(options={"reset_mask": torch.as_tensor(inner.over)})
        env.step(torch.zeros(4, dtype=torch.long))
    rows = rb[:]
    assert not rows["next"]["terminated"].any()
    assert rows["next"]["terminated"].shape == rows["next"]["done"].shape == (len(rb),)
    assert int(rows["next"]["done"].sum()) == 8


def test_flags_of_another_number_of_environments():
    class Fewer(Simulator):
        def step(self, actions):
            observation, reward, terminated, truncated, info = super().step(actions)
            return observation, reward, terminated[:3], truncated, info

    rb = ReplayBuffer(storage=LazyTensorStorage(400, lanes=4))
    env = rb.record(Fewer(4, AutoresetMode.NEXT_STEP, "tensor"))
    env.reset()
    with pytest.raises(ValueError, match=r"step: terminated: expected one for each of 4 environments, got \[3\]"):
        env.step(torch.zeros(4, dtype=torch.long))
    assert len(rb) == 0


def as_tensors(value):
    """What an environment returned, as ``NumpyToTorch`` of Gymnasium converts it: arrays of objects hold tensors then."""
    if isinstance(value, dict):
        return {key: as_tensors(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(as_tensors, value))
    if isinstance(value, np.ndarray) and value.dtype == object:
        converted = np.empty_like(value)
        for i, one in enumerate(value):
            converted[i] = as_tensors(one)
        return converted
    return torch.as_tensor(np.array(value)) if isinstance(value, (np.ndarray, np.generic)) else value


class ToTorch(gymnasium.vector.VectorWrapper):
    def reset(self, **arguments):
        return as_tensors(super().reset(**arguments))

    def step(self, actions):
        return as_tensors(super().step(actions.numpy()))


@pytest.mark.parametrize("form", ["box", "dict", "tuple"])
@pytest.mark.parametrize("mode", MODES)
def test_wrappers_that_return_tensors(mode, form):
    makers = [lambda i=i: TaleEnv(i, [3, 2 + i], form) for i in range(3)]
    inner = ToTorch(gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=mode))
    rb = ReplayBuffer(storage=LazyTensorStorage(300, lanes=3))
    env = rb.record(inner)
    env.reset()
    over = torch.zeros(3, dtype=torch.bool)
    for at in range(20):
        if mode is AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over.numpy()})
        *_, terminated, truncated, _ = env.step(torch.arange(3) + at)
        over = terminated | truncated
    for lane, one in enumerate(env.unwrapped.envs):
        assert rows_of(rb, lane, form) == one.unwrapped.tale.log


# ---- one environment -----------------------------------------------------------------------------------------------------

#: How an environment returns a number.
NUMBERS = {
    "tensor": torch.tensor,
    "tensor of one": lambda value: torch.tensor([value]),
    "with grad": lambda value: torch.tensor(value, requires_grad=isinstance(value, float)),
    "list": lambda value: [value],
    "numpy of one": lambda value: np.array([value]),
}


class Single(gymnasium.Env):
    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, number):
        self.number, self.at = number, 0

    def seen(self):
        return torch.tensor([float(self.at)], requires_grad=True) * 1

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return self.seen(), {}

    def step(self, action):
        self.at += 1
        return self.seen(), self.number(self.at / 2), self.number(self.at == 3), self.number(False), {}


class Steps(dm_env.Environment):
    def __init__(self, number):
        self.number, self.at = number, 0

    def reset(self):
        self.at = 0
        return dm_env.restart(torch.zeros(1))

    def step(self, action):
        self.at += 1
        kind = dm_env.StepType.LAST if self.at == 3 else dm_env.StepType.MID
        discount = self.number(0.0 if self.at == 3 else 1.0)
        return dm_env.TimeStep(kind, self.number(self.at / 2), discount, torch.full((1,), float(self.at)))

    def observation_spec(self):
        return specs.Array((1,), np.float32)

    action_spec = observation_spec


class Agents(ParallelEnv):
    metadata = {"name": "agents"}
    possible_agents = ["one", "two"]

    def __init__(self, number):
        self.number, self.at = number, 0

    def observation_space(self, agent):
        return Single.observation_space

    action_space = observation_space

    def reset(self, seed=None, options=None):
        self.agents, self.at = list(self.possible_agents), 0
        return {agent: torch.zeros(1) for agent in self.agents}, {}

    def step(self, actions):
        self.at += 1
        seen = {agent: torch.full((1,), float(self.at)) for agent in self.agents}
        told = [{agent: self.number(one) for agent in self.agents} for one in (self.at / 2, self.at == 3, False)]
        if self.at == 3:
            self.agents = []
        return seen, *told, {}


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("make", [Single, Steps, Agents])
def test_numbers_of_one_environment(make, number, kind):
    lanes = 2 if make is Agents else 1
    rb = kind(storage=LazyTensorStorage(50 * lanes, lanes=lanes))
    env = rb.record(make(NUMBERS[number]))
    for _ in range(2):
        env.reset()
        for at in range(3):
            action = torch.tensor([float(at)], requires_grad=True) * 1  # not a leaf of a graph, as of an actor
            env.step(dict.fromkeys(env.agents, action) if make is Agents else action)
    rows, width = rb[:], () if kind is ReplayBuffer else (1,)
    assert rows["action"].flatten().tolist() == [0, 1, 2] * 2 * lanes
    assert rows["next"]["observation"].flatten().tolist() == [1, 2, 3] * 2 * lanes
    assert rows["next"]["reward"].flatten().tolist() == [0.5, 1, 1.5] * 2 * lanes
    assert rows["next"]["terminated"].flatten().tolist() == [False, False, True] * 2 * lanes
    assert {rows["next"][name].shape[1:] for name in ("reward", "terminated", "done")} == {torch.Size(width)}


def test_bfloat16():
    class Half(Simulator):
        def seen(self):
            return super().seen().bfloat16()

    rb = ReplayBuffer(storage=LazyTensorStorage(40, lanes=1))
    env = rb.record(Half(1, AutoresetMode.SAME_STEP, "tensor"))
    env.reset()
    env.step(torch.zeros(1, dtype=torch.long))
    assert rb[0]["next"]["observation"].tolist() == [101.0, -101.0]
