"""Claim: an ordinary loop's batches and priorities cost no more than those of other buffers that hold more, or promise less.

Measured, in process CPU and one thread: batches of 32 stacks of four 84x84 frames, now and next, from rows of one frame each,
beside Stable-Baselines3's ``sample`` of as many stacks that it holds ready (an eighth of the rows fit the same memory); batches
of 256 rows that come once per epoch, beside uniform ones of the same storage, for rows of 45 bytes and of 1 kB; and new
priorities for 256 rows, as NumPy arrays, beside cpprb's ``update_priorities``. Every call draws or names other rows than the one
before, and gives a row another priority than it has: cpprb stops where a sum stays what it was.
"""

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

FRAMES = Effort(calls=20, blocks=60)
ROWS = Effort(calls=200, blocks=60)
STEPS, EPISODE, STACK = 6_000, 250, 4
"""Rows with a frame each, in episodes of so many; frames of a stack."""
SMALL, LARGE = 4, 124
"""Numbers of an observation: rows of 45 bytes, and of 1,005."""
CAPACITY, BATCH = 100_000, 256


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Stacks, epochs, priorities."""
    if libraries["engram"].module is None:
        return
    timing = alternate(list(_stacks(libraries)), FRAMES.scaled(share), time.process_time_ns)
    yield timed("batches/stacks", "sample 32 stacks of 4 frames, now and next · NumPy dict", timing, share=("SB3",))
    for name, width in (("45 B", SMALL), ("1 kB", LARGE)):
        timing = alternate(list(_epochs(libraries, width)), ROWS.scaled(share), time.process_time_ns)
        key = f"batches/once-{name.replace(' ', '-')}"
        yield timed(key, f"sample 256 rows of {name}, each once per epoch", timing, share=("uniform",))
    timing = alternate(list(_updates(libraries)), ROWS.scaled(share), time.process_time_ns)
    yield timed("batches/update", "update 256 priorities · NumPy", timing, times=("cpprb",))


def _stacks(libraries: rivals.Libraries) -> Iterator[Side]:
    engram, random = libraries["engram"].module, np.random.default_rng(0)
    finals = engram.FinalObservations(["frame"], engram.LazyTensorStorage(2 * STEPS // EPISODE))
    sampler = engram.FrameStack(engram.NextFromFollowing(engram.RandomSampler(), finals), STACK, -3, ["frame"])
    storage = engram.LazyTensorStorage(STEPS)
    rb = engram.ReplayBuffer(storage=storage, sampler=sampler, transform=finals, batch_size=32)
    for start in range(0, STEPS, EPISODE):
        frame = random.integers(0, 256, (EPISODE + 1, 1, 84, 84), np.uint8)
        done = np.arange(EPISODE) == EPISODE - 1
        after = {"frame": frame[1:], "reward": np.zeros(EPISODE, np.float32), "done": done}
        rb.extend({"frame": frame[:-1], "action": np.arange(start, start + EPISODE), "next": after})
    yield Side("engram", lambda: rb.sample(return_info=True))
    if libraries["SB3"].module is not None:
        import gymnasium

        box, discrete = gymnasium.spaces.Box(0, 255, (STACK, 84, 84), np.uint8), gymnasium.spaces.Discrete(4)
        replay = libraries["SB3"].module.ReplayBuffer(
            STEPS, box, discrete, device="cpu", handle_timeout_termination=False
        )
        for stored in (replay.observations, replay.next_observations):
            stored[:] = random.integers(0, 256, stored.shape, np.uint8)
        replay.full = True
        yield Side("SB3", lambda: replay.sample(32))


def _epochs(libraries: rivals.Libraries, width: int) -> Iterator[Side]:
    engram = libraries["engram"].module
    storage = engram.LazyTensorStorage(CAPACITY)
    uniform = engram.ReplayBuffer(storage=storage, batch_size=BATCH)
    observation = np.zeros((CAPACITY, width), np.float32)
    rows = {"obs": observation, "next_obs": observation, "action": np.arange(CAPACITY)}
    uniform.extend({**rows, "reward": np.zeros(CAPACITY, np.float32), "done": np.zeros(CAPACITY, bool)})
    once = engram.ReplayBuffer(storage=storage, sampler=engram.SamplerWithoutReplacement(), batch_size=BATCH)
    yield Side("engram", once.sample)
    yield Side("uniform", uniform.sample)


def _updates(libraries: rivals.Libraries) -> Iterator[Side]:
    engram, random = libraries["engram"].module, np.random.default_rng(0)
    rows = [random.integers(0, CAPACITY, BATCH) for _ in range(64)]
    priorities = [random.random(BATCH).astype(np.float32) for _ in range(63)]  # each row set gets all in turn
    sampler = engram.PrioritizedSampler(CAPACITY, 0.6, 0.4)
    rb = engram.ReplayBuffer(storage=engram.LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=BATCH)
    observation = np.zeros((CAPACITY, SMALL), np.float32)
    rb.extend({"obs": observation})
    rb.update_priority(np.arange(CAPACITY), random.random(CAPACITY))
    yield Side("engram", _each(rb.update_priority, rows, priorities))
    if libraries["cpprb"].module is not None:
        shape = {"obs": {"shape": SMALL, "dtype": np.float32}}
        cpprb = libraries["cpprb"].module.PrioritizedReplayBuffer(CAPACITY, shape, alpha=0.6)
        cpprb.add(obs=observation, priorities=random.random(CAPACITY))
        yield Side("cpprb", _each(cpprb.update_priorities, rows, priorities))


def _each(update: Callable[..., object], rows: list[Any], priorities: list[Any]) -> Callable[[], object]:
    which, what = cycle(rows).__next__, cycle(priorities).__next__
    return lambda: update(which(), what())
