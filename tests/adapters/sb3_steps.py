"""Steps of environments for replay buffers, without environments: what a vector environment hands to ``add``; and what they hold."""

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers as sb3

from engram.adapters.sb3 import ReplayBuffer

BOX = spaces.Box(-1e6, 1e6, (3,), np.float32)
DISCRETE = spaces.Discrete(5)


class Steps:
    """Random steps of ``n`` environments that are reset at once: each observation is another one.

    ``ends``: the chance that an episode ends with a step; half of them are truncations.
    """

    def __init__(self, space, action_space=DISCRETE, n=1, ends=0.2, seed=0):
        self.space, self.n, self.ends = space, n, ends
        self.actions = action_space
        self.rng = np.random.default_rng(seed)
        self.count = 0
        self.actions.seed(seed)
        self.observed = self._observe()

    def _one(self, space):
        """An observation of each environment, which says its number."""
        if isinstance(space, spaces.Dict):
            return {key: self._one(part) for key, part in space.spaces.items()}
        numbers = self.count + np.arange(self.n)
        if isinstance(space, spaces.Discrete):
            return numbers % space.n
        values = np.zeros((self.n, *space.shape), space.dtype)
        values.reshape(self.n, -1)[:, 0] = numbers % 251
        values.reshape(self.n, -1)[:, -1] = numbers // 251 % 251
        if isinstance(space, spaces.MultiBinary | spaces.MultiDiscrete):
            values %= 2
        return values

    def _observe(self):
        made = self._one(self.space)
        self.count += self.n
        return made

    def step(self):
        """``(obs, next_obs, action, reward, done, infos)``."""
        over = self.rng.random(self.n) < self.ends
        cut = over & (self.rng.random(self.n) < 0.5)
        before, following = self.observed, self._observe()
        fresh = self._observe()
        self.observed = _where(over, fresh, following)
        action = np.stack([np.asarray(self.actions.sample()) for _ in range(self.n)])
        reward = self.rng.normal(size=self.n)
        return before, following, action, reward, over, [{"TimeLimit.truncated": bool(one)} for one in cut]

    def fill(self, count, *buffers):
        """Write so many steps to each of the buffers, and return them."""
        steps = [self.step() for _ in range(count)]
        for step in steps:
            for buffer in buffers:
                buffer.add(*copied(step))
        return steps


def copied(step):
    """As an environment would that writes into the same arrays again: what is handed over is not kept."""
    return tuple(_map(part, np.copy) if not isinstance(part, list) else part for part in step)


def _map(value, function):
    return {key: function(part) for key, part in value.items()} if isinstance(value, dict) else function(value)


def _where(which, one, other):
    if isinstance(one, dict):
        return {key: _where(which, one[key], other[key]) for key in one}
    return np.where(which.reshape(-1, *(1,) * (one.ndim - 1)), one, other)


def as_bytes(value):
    """An observation as a key."""
    return tuple(np.asarray(part).tobytes() for part in (value.values() if isinstance(value, dict) else (value,)))


def pick(value, i):
    return _map(value, lambda part: np.asarray(part)[i])


# ---- two buffers side by side ----------------------------------------------------------------------------------------------


def both(space, actions=DISCRETE, size=40, n=1, **keywords):
    cls = sb3.DictReplayBuffer if isinstance(space, spaces.Dict) else sb3.ReplayBuffer
    return ReplayBuffer(size, space, actions, "cpu", n, **keywords), cls(size, space, actions, "cpu", n)


def same(one, other):
    """Whether two batches are equal to the bit, in values, dtypes and shapes."""
    assert type(one) is type(other)
    for name, a, b in zip(one._fields, one, other, strict=True):
        parts = [(a, b)] if not isinstance(a, dict) else [(a[key], b[key]) for key in b]
        for x, y in parts:
            if y is None:
                assert x is None, name
            else:
                assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device), name
                assert torch.equal(x, y), name


def all_steps(buffer, seed=0):
    """Each step that is stored, of random environments."""
    return chosen(buffer, buffer.size(), seed=seed)


def chosen(buffer, count, env=None, seed=0):
    """The first steps, each of a random environment: both buffers draw it alike."""
    np.random.seed(seed)  # noqa: NPY002 - Stable-Baselines3 draws from it
    return buffer._get_samples(np.arange(count), env)


def all_of(other):
    """What each observation that Stable-Baselines3's buffer holds belongs to."""
    made = {}
    for env in range(other.n_envs):
        for at in range(other.size()):
            seen, following = (
                {k: v[at, env] for k, v in arrays.items()} if isinstance(arrays, dict) else arrays[at, env]
                for arrays in (other.observations, other.next_observations)
            )
            done = np.float32(other.dones[at, env] * (1 - other.timeouts[at, env]))
            made[as_bytes(seen)] = other.actions[at, env], following, done, other.rewards[at, env]
    assert len(made) == other.n_envs * other.size()
    return made


def row_of(batch, i):
    def one(value):
        return {k: v[i].numpy() for k, v in value.items()} if isinstance(value, dict) else value[i].numpy()

    seen, following = one(batch.observations), one(batch.next_observations)
    return seen, batch.actions[i].numpy(), following, batch.dones[i].numpy(), batch.rewards[i].numpy()
