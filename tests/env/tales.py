"""Environments that know what a correct agent sees of them, and log it: the oracle of the tests of recording.

An observation says which environment, episode and step it is of. Only an environment itself sees which of its steps are real, so
its log shares nothing with what records it.
"""

import gymnasium
import numpy as np
from gymnasium import spaces

FLAGS = ("terminated", "truncated", "done")


class Step(dict):
    """A row: ``observation`` and ``next`` as (environment, episode, step), action, reward and flags."""

    def end(self):
        """The episode was cut behind it."""
        if not self["done"]:
            self.update(truncated=True, done=True)


class Tale:
    """Episodes of given lengths, by turns terminated, truncated and both; without an interface."""

    def __init__(self, which, lengths):
        self.which, self.lengths = which, lengths
        self.episode, self.step_number = -1, 0
        self.log = []
        self.over = True

    @property
    def seen(self):
        return (self.which, self.episode, self.step_number)

    def begin(self):
        if self.log:
            self.log[-1].end()
        self.episode, self.step_number, self.over = self.episode + 1, 0, False

    def go_on(self, action):
        before = self.seen
        self.step_number += 1
        ends = self.step_number >= self.lengths[self.episode % len(self.lengths)]
        terminated, truncated = ends and self.episode % 3 != 1, ends and self.episode % 3 != 0
        reward = self.episode + self.step_number / 8
        self.over = terminated or truncated
        self.log.append(
            Step(
                observation=before,
                action=int(action),
                next=self.seen,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                done=self.over,
            )
        )
        return reward, terminated, truncated


def box(seen):
    return np.array(seen, np.float32)


def as_dict(seen):
    return {"at": np.array(seen[1:], np.int64), "who": {"id": np.array([seen[0]], np.uint8)}}


def as_tuple(seen):
    return (seen[0], (np.array(seen[1:], np.float32),))


#: How an observation is told, its space, and what was told: ``[n, 3]`` of recorded ones.
FORMS = {
    "box": (box, spaces.Box(-1, 1e6, (3,), np.float32), lambda x: x),
    "dict": (
        as_dict,
        spaces.Dict(at=spaces.Box(-1, 10**6, (2,), np.int64), who=spaces.Dict(id=spaces.Box(0, 255, (1,), np.uint8))),
        lambda x: np.concatenate([x["who"]["id"].astype(np.int64), x["at"]], 1),
    ),
    "tuple": (
        as_tuple,
        spaces.Tuple([spaces.Discrete(100), spaces.Tuple([spaces.Box(-1, 1e6, (2,), np.float32)])]),
        lambda x: np.concatenate([x[0][:, None], x[1][0]], 1),
    ),
}


class TaleEnv(gymnasium.Env):
    """A tale as an environment of Gymnasium. ``returned``: what its last call gave back."""

    def __init__(self, which=0, lengths=(3,), form="box", raises_at=None):
        self.tale = Tale(which, lengths)
        self.tell, self.observation_space, _ = FORMS[form]
        self.action_space = spaces.Discrete(1000)
        self.raises_at = raises_at
        self.returned = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tale.begin()
        self.returned = self.tell(self.tale.seen), {"seen": self.tale.seen}
        return self.returned

    def step(self, action):
        if self.raises_at is not None and len(self.tale.log) == self.raises_at:
            self.raises_at = None
            raise KeyboardInterrupt
        reward, terminated, truncated = self.tale.go_on(action)
        self.returned = self.tell(self.tale.seen), reward, terminated, truncated, {}
        return self.returned


def _numpy(data):
    if isinstance(data, tuple):
        return tuple(map(_numpy, data))
    if hasattr(data, "items"):
        return {key: _numpy(value) for key, value in data.items()}
    return data.numpy()


def rows_of(rb, lane, form="box"):
    """The rows of a lane of a buffer that never was full, as the log of its environment says them. Void ones are left out."""
    length = rb.storage.max_size // rb.lanes
    extent = rb.storage.extent()
    void = [] if extent.holes is None else extent.holes.tolist()
    rows = [row for row in range(lane * length, lane * length + extent.filled[lane]) if row not in void]
    if not rows:
        return []
    data = _numpy(rb[rows])
    told = FORMS[form][2]
    before, after = told(data["observation"]).tolist(), told(data["next"]["observation"]).tolist()
    return [
        Step(
            observation=tuple(before[i]),
            action=int(data["action"][i]),
            next=tuple(after[i]),
            reward=float(data["next"]["reward"][i].item()),
            **{flag: bool(data["next"][flag][i].item()) for flag in FLAGS},
        )
        for i in range(len(rows))
    ]
