"""A corridor of six places: the way is to the right, where a reward is, and each step costs a little."""

import gymnasium
import numpy as np

PLACES = 6
#: The return of an agent that goes straight.
BEST = 1 - 0.01 * (PLACES - 1)


class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (PLACES,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = 0, 0
        return self._seen(), {}

    def step(self, action):
        self.at = min(max(self.at + (1 if action == 1 else -1), 0), PLACES - 1)
        self.steps += 1
        there = self.at == PLACES - 1
        return self._seen(), float(there) - 0.01, there, not there and self.steps == 50, {}

    def _seen(self):
        return np.eye(PLACES, dtype=np.float32)[self.at]
