"""What recording an environment costs, beside the environment alone and an appender that writes the same rows.

    python benchmarks/record.py

An environment of NumPy that does nothing, observations of 4 float32 and a discrete action: one, and vectors of 1 and 8. The three take
turns, 2,000 steps each; medians of 25 turns, less the time of the environment, and the median of the ratios.
"""

import json
import os
import statistics
import time

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from engram import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

STEPS, TURNS, ROWS = 2_000, 25, 20_000
SEEN, ACTION = spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(2)


class Still(gymnasium.Env):
    """One environment, whose episodes have 200 steps."""

    observation_space, action_space = SEEN, ACTION

    def __init__(self):
        self.seen, self.at, self.infos = np.zeros(4, np.float32), 0, {}

    def reset(self, **_):
        return self.seen, self.infos

    def step(self, _):
        self.at += 1
        return self.seen, 1.0, self.at % 200 == 0, False, self.infos


class Stills(VectorEnv):
    """Several together."""

    single_observation_space, single_action_space = SEEN, ACTION

    def __init__(self, n):
        self.num_envs, self.metadata = n, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.observation_space, self.action_space = spaces.Box(-9, 9, (n, 4), np.float32), spaces.MultiDiscrete([2] * n)
        self.seen, self.reward, self.no, self.infos = np.zeros((n, 4), np.float32), np.ones(n), np.zeros(n, bool), {}

    def reset(self, **_):
        return self.seen, self.infos

    def step(self, _):
        return self.seen, self.reward, self.no, self.no, self.infos


def microseconds(step):
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS * 1e6


def measured(kind, n):
    """``n``: None of one environment."""
    make = Still if n is None else lambda: Stills(n)
    rb, other = (of(storage=LazyTensorStorage(ROWS, lanes=n or 1)) for of in (kind, ReplayBuffer))
    bare, recorded = make(), rb.record(make())
    recorded.reset()
    action = 1 if n is None else np.zeros(n, np.int64)
    appender = other.appender(lane=0 if n is None else "each")
    append = appender.add if n is None else appender.extend

    def appends():
        seen, reward, terminated, truncated, _ = bare.step(action)
        following = {"observation": seen, "reward": reward, "terminated": terminated, "truncated": truncated}
        append(observation=seen, action=action, next={**following, "done": terminated | truncated})

    def records():
        _, _, terminated, truncated, _ = recorded.step(action)
        if n is None and (terminated or truncated):
            recorded.reset()

    turns = []
    for _ in range(TURNS):
        alone, appended, taken = microseconds(lambda: bare.step(action)), microseconds(appends), microseconds(records)
        turns.append((appended - alone, taken - alone, (taken - alone) / (appended - alone)))
    names = ("appender_us", "record_us", "ratio")
    return {
        "buffer": kind.__name__,
        "environments": n,
        **dict(zip(names, map(statistics.median, zip(*turns, strict=True)), strict=True)),
    }


if __name__ == "__main__":
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        for n in (None, 1, 8):
            result = {name: round(it, 2) if isinstance(it, float) else it for name, it in measured(kind, n).items()}
            print(json.dumps({**result, "load": round(os.getloadavg()[0], 1)}), flush=True)
