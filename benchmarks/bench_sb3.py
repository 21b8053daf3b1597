"""Claim: under Stable-Baselines3's own algorithms engram's buffer costs no step, at most 0.7 of the CPU of the buffer that it
replaces, and, of stacks of four frames, at most 0.15 of its memory.

Measured: the CPU of the process for one ``add`` and one ``sample``, taking turns, of full buffers of 10,000 steps: observations of 4
float32, batches of 32 (DQN); 17 float32, batches of 256 (SAC); and stacks of four 84 × 84 frames, batches of 32, which engram stores
as single frames (``optimize_memory_usage=True, frame_stack=4``) and Stable-Baselines3 as two stacks, its default.
Then trainings, of a DQN on CartPole and a SAC on Pendulum with their default networks, from one seed, in parts that take turns. What
environments and networks take is part of both. Memory: the bytes of the
arrays of Stable-Baselines3's default buffer, and those of engram's store with its final observations. One thread.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks import rivals
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.timing import Effort, Side, Spread, alternate

EFFORT = Effort(calls=200, blocks=25)
CAPACITY = 10_000
#: Steps of a part of a training, and parts.
STEPS, PARTS = {"dqn": 400, "sac": 100}, 25
#: Steps of an episode in the buffers that are filled.
EPISODE = 200


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """The buffers, then what they hold, then trainings."""
    if libraries["engram"].module is None or libraries["SB3"].module is None:
        return
    for name, n_envs, batch in (("dqn", 1, 32), ("dqn", 8, 32), ("sac", 1, 256), ("frames", 1, 32)):
        sides = [Side(side, _calls(_filled(side, name, n_envs), batch)) for side in ("engram", "SB3")]
        effort = EFFORT.scaled(share) if name != "frames" else Effort(calls=20, blocks=25).scaled(share)
        timing = alternate(sides, effort, time.process_time_ns)
        what = f"CPU of add and sample {batch} · {name}, environments: {n_envs}"
        yield timed(f"sb3/buffer/{name}-{n_envs}", what, timing, share=("SB3",))
    yield _memory()
    for name in STEPS:
        yield _trainings(name, share)


def _spaces(name: str) -> Any:
    from gymnasium import spaces

    if name == "frames":
        return spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(4)
    if name == "dqn":
        return spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)
    return spaces.Box(-1, 1, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32)


def _made(side: str, name: str, n_envs: int) -> Any:
    observations, actions = _spaces(name)
    if side == "SB3":
        from stable_baselines3.common.buffers import ReplayBuffer as Theirs

        return Theirs(CAPACITY, observations, actions, "cpu", n_envs)
    from engram.adapters.sb3 import ReplayBuffer

    frames = {"optimize_memory_usage": True, "frame_stack": 4} if name == "frames" else {}
    return ReplayBuffer(CAPACITY, observations, actions, "cpu", n_envs, **frames)


class _Steps:
    """What a vector environment hands over, one step after the other: made before, so that no side pays for it."""

    def __init__(self, name: str, n_envs: int) -> None:
        observations, actions = _spaces(name)
        self.stacked = name == "frames"
        random = np.random.default_rng(0)
        shape = (64, n_envs, *observations.shape)
        self._seen = random.integers(0, 255, shape).astype(observations.dtype)
        self._frames = random.integers(0, 255, (64, 84, 84)).astype(np.uint8)
        actions.seed(0)
        self._action = np.stack([np.asarray(actions.sample()) for _ in range(n_envs)])
        self._reward = np.ones(n_envs)
        self._stack = np.zeros((n_envs, 4, 84, 84), np.uint8)
        self._at = 0

    def next(self) -> tuple[Any, ...]:
        at = self._at = self._at + 1
        over = np.full(len(self._reward), at % EPISODE == 0)
        before, after = self._seen[at % 64], self._seen[(at + 1) % 64]
        if self.stacked:
            before = self._stack
            after = np.roll(before, -1, 1)
            after[:, 3] = self._frames[at % 64]
            self._stack = np.zeros_like(after) if over[0] else after
        return before, after, self._action, self._reward, over, [{"TimeLimit.truncated": False}] * len(over)


def _filled(side: str, name: str, n_envs: int) -> Any:
    buffer, steps = _made(side, name, n_envs), _Steps(name, n_envs)
    for _ in range(CAPACITY // n_envs):
        buffer.add(*steps.next())
    batch = buffer.sample(32)
    if not buffer.full or batch.observations.shape != (32, *_spaces(name)[0].shape):
        raise ValueError(f"sb3: {side}: expected a full buffer and a batch of 32.")
    buffer.steps = steps
    return buffer


def _calls(buffer: Any, batch: int) -> Callable[[], object]:
    """One ``add`` and one ``sample``: of the steps of an episode, which are made before, again and again."""
    steps = cycle([buffer.steps.next() for _ in range(EPISODE)])

    def call() -> object:
        buffer.add(*next(steps))
        return buffer.sample(batch)

    return call


def _memory() -> Row:
    """Bytes of a step of stacks of four frames."""
    found = {}
    for side in ("engram", "SB3"):
        buffer = _filled(side, "frames", 1)
        if side == "SB3":
            arrays = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
            found[side] = sum(getattr(buffer, name).nbytes for name in arrays) / CAPACITY
        else:
            finals = buffer.rb.sampler.sampler.finals.storage
            held = finals.write_count * buffer.observations[0, 0].nbytes  # the rest is taken as episodes end
            found[side] = (buffer.rb.storage.nbytes + held) / CAPACITY
    share = Spread.of([found["engram"] / found["SB3"]])
    key = "sb3/memory"
    floor = Comparison("SB3", "share", share, FLOORS.get((key, "SB3")))
    spreads = {side: Spread.of([value]) for side, value in found.items()}
    return Row(key, "bytes of a step · four 84 × 84 frames", spreads, [floor], unit="B/row")


# ---- trainings ---------------------------------------------------------------------------------------------------------


def _trainings(name: str, share: float) -> Row:
    """Both train from the same seed, by turns, in parts of some hundred steps."""
    models = {side: _model(side, name) for side in ("engram", "SB3")}
    for model in models.values():
        model.learn(2 * STEPS[name])
    parts = [Side(side, partial(one.learn, STEPS[name], reset_num_timesteps=False)) for side, one in models.items()]
    timing = alternate(parts, Effort(calls=1, blocks=PARTS, warmup=1, lead=0).scaled(share))
    notes = {
        side: f"mean return {np.mean([episode['r'] for episode in model.ep_info_buffer]):.0f}."
        for side, model in models.items()
    }
    return timed(f"sb3/{name}", f"{STEPS[name]} steps of {name.upper()}", timing, times=("SB3",), notes=notes)


def _model(side: str, name: str) -> Any:
    from stable_baselines3 import DQN, SAC

    from engram.adapters.sb3 import ReplayBuffer

    algorithm, env = (DQN, "CartPole-v1") if name == "dqn" else (SAC, "Pendulum-v1")
    chosen = {"replay_buffer_class": ReplayBuffer} if side == "engram" else {}
    return algorithm("MlpPolicy", env, buffer_size=50_000, learning_starts=100, seed=0, device="cpu", **chosen)
