"""What is recorded is what was given to the environment and came from it, also where either changes it or lies about its dtype."""

import copy

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from engram import LazyTensorStorage, ReplayBuffer


class Scales(gymnasium.Env):
    """Changes its action in place."""

    observation_space = spaces.Box(0, 255, (2,), np.uint8)
    action_space = spaces.Box(-9, 9, (1,), np.float32)
    observed = np.zeros(2, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.uint8), {}

    def step(self, action):
        action *= 0
        return self.observed, 0.0, False, False, {}


class ScalesToo(dm_env.Environment):
    def reset(self):
        return dm_env.restart(np.zeros(2))

    def step(self, action):
        action *= 0
        return dm_env.transition(0.0, np.zeros(2))

    def observation_spec(self):
        return specs.Array((2,), np.float64)

    def action_spec(self):
        return specs.Array((1,), np.float32)


def buffer(lanes=1):
    return ReplayBuffer(storage=LazyTensorStorage(20, lanes=lanes))


@pytest.mark.parametrize("env", [Scales, ScalesToo])
def test_an_action_that_the_step_changes(env):
    rb = buffer()
    recorded = rb.record(env())
    recorded.reset()
    for action in (3, 4):
        recorded.step(np.full(1, action, np.float32))
    assert rb[:]["action"].tolist() == [[3], [4]]


def test_actions_that_the_step_of_a_vector_changes():
    rb = buffer(2)
    recorded = rb.record(gymnasium.vector.SyncVectorEnv([Scales, Scales]))
    recorded.reset()
    recorded.step(np.array([[3], [4]], np.float32))
    assert rb[:]["action"].tolist() == [[3], [4]]


@pytest.mark.parametrize("observed", [np.array([300, 0]), np.array([-1, 0])])
def test_integers_that_the_space_does_not_hold(observed):
    rb = buffer()
    env = Scales()
    env.observed = observed
    recorded = rb.record(env)
    recorded.reset()
    with pytest.raises(TypeError, match="observation: expected values of uint8"):
        recorded.step(np.zeros(1, np.float32))
    env.observed = np.array([255, 0])
    recorded.reset()
    recorded.step(np.zeros(1, np.float32))
    assert rb[0]["next"]["observation"].tolist() == [255, 0]


def test_a_copy_of_a_recorded_environment():
    recorded = buffer().record(ScalesToo())
    assert copy.copy(recorded).action_spec() == recorded.action_spec()
