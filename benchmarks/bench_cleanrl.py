"""Claim: CleanRL's `dqn` and `sac` are never slower with engram as their replay buffer, and the buffer's part is 1.5 times as fast.

Measured: CleanRL's own files, as its package has them and with its hyper-parameters, on CartPole and on Pendulum. Each run is a
process of its own; runs with Stable-Baselines3's buffer, which the files import, and runs with engram in its place take turns.
The clock counts the process's CPU from the making of the buffer until the environment is closed, so imports do not count. The
buffer's part is what its ``add`` and ``sample`` take, less what reading the clock takes.

The files were written for older versions of Gymnasium, and `sac` for OpenAI's Gym. Two small classes translate. Nothing of
CleanRL is copied: without its package there are no rows.
"""

import contextlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import rivals
from benchmarks.claims import FLOORS, Comparison, Row
from benchmarks.timing import Spread

STEPS, PAIRS = {"dqn": 50_000, "sac": 8_000}, 3
FEWEST = 12_000
"""Steps of which `dqn` learns in some."""
SCRIPTS = {
    "dqn": ("dqn.py", "--env-id", "CartPole-v1"),
    "c51": ("c51.py", "--env-id", "CartPole-v1"),
    "td3": ("td3_continuous_action.py", "--env-id", "Pendulum-v1", "--learning-starts", "1000"),
    "sac": ("sac_continuous_action.py", "--env-id", "Pendulum-v1"),
}


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Both files: the runs, and the buffer's part of them."""
    if libraries["CleanRL"].module is None or libraries["SB3"].module is None:
        return
    for name, steps in STEPS.items():
        steps = max(min(FEWEST, steps), round(steps * share))
        yield from rows(name, [pair(name, steps, seed) for seed in range(1, 1 + PAIRS)])


def folder() -> Path | None:
    """Where CleanRL's files are."""
    found = importlib.util.find_spec("cleanrl")
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) if places else None


def pair(name: str, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """A run with each buffer; the one that begins alternates."""
    sides = ("engram", "SB3") if seed % 2 else ("SB3", "engram")
    return {side: apart(name, side, steps, seed) for side in sides}


def rows(name: str, pairs: list[dict[str, dict[str, Any]]]) -> Iterator[Row]:
    """What pairs of runs took, in all and in the buffer."""
    steps = pairs[0]["engram"]["steps"]
    for part, what in (("run", "the run"), ("buffer", "the buffer's part")):
        key = f"cleanrl/{name}" + ("/buffer" if part == "buffer" else "")
        spent = {side: [one[side][part] for one in pairs] for side in ("engram", "SB3")}
        ratio = Spread.of([theirs / ours for ours, theirs in zip(spent["engram"], spent["SB3"], strict=True)])
        comparison = Comparison("SB3", "times", ratio, FLOORS.get((key, "SB3")))
        spreads = {side: Spread.of(seconds) for side, seconds in spent.items()}
        notes = {}
        if part == "buffer":
            shares = {side: Spread.of([one[side]["buffer"] / one[side]["run"] for one in pairs]) for side in spent}
            notes = {side: f"{share.median:.2%} of the CPU of the run." for side, share in shares.items()}
        row = f"CleanRL's {name}, {steps:,} steps: {what}"
        yield Row(
            key, row, spreads, [comparison], "s", {side: [1e6 * s for s in spent[side]] for side in spent}, notes=notes
        )


def apart(name: str, side: str, steps: int, seed: int) -> dict[str, Any]:
    """The run in a new process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_cleanrl", name, side, str(steps), str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[4:])}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- one run -----------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What the files ask of a batch."""

    observations: Any
    next_observations: Any
    actions: Any
    rewards: Any
    dones: Any


class Replay:
    """engram, called as Stable-Baselines3's buffer is: one environment, whose flags and rewards become the float32 of the files."""

    def __init__(
        self, size: int, _observations: Any, actions: Any, _device: Any, *, handle_timeout_termination: bool
    ) -> None:
        import engram

        self._rb = engram.ReplayBuffer(storage=engram.LazyTensorStorage(size))
        self._add = self._rb.add
        self._shape = actions.shape or (1,)
        self._timeouts = handle_timeout_termination

    def add(self, obs: Any, next_obs: Any, actions: Any, rewards: Any, dones: Any, infos: Any) -> None:
        done = float(dones[0])
        if self._timeouts and infos[0].get("TimeLimit.truncated", False):
            done = 0.0
        self._add(
            {
                "observations": obs[0],
                "next_observations": next_obs[0],
                "actions": actions.reshape(self._shape),
                "rewards": float(rewards[0]),
                "dones": done,
            }
        )

    def sample(self, size: int) -> Batch:
        return Batch(*self._rb.sample(size).values())


class Clock:
    """What a buffer's calls and the whole run take, in nanoseconds of CPU."""

    def __init__(self) -> None:
        self.began = self.buffer = self.calls = self.run = 0

    def around(self, kind: Callable[..., Any]) -> type:
        """A class whose instances are buffers of this kind, with the clock around their calls."""
        clock, now = self, time.thread_time_ns

        class Timed:
            def __init__(self, *arguments: Any, **named: Any) -> None:
                clock.began = time.process_time_ns()
                rb = kind(*arguments, **named)
                self._add, self._sample = rb.add, rb.sample

            def add(self, *arguments: Any) -> None:
                started = now()
                self._add(*arguments)
                clock.buffer += now() - started
                clock.calls += 1

            def sample(self, size: int) -> Any:
                started = now()
                batch = self._sample(size)
                clock.buffer += now() - started
                clock.calls += 1
                return batch

        return Timed

    def stop(self) -> None:
        """Ends the run; takes off what reading the clock took."""
        self.run = time.process_time_ns() - self.began
        reading = []
        for _ in range(2_000):
            started = time.thread_time_ns()
            reading.append(time.thread_time_ns() - started)
        self.buffer -= self.calls * sorted(reading)[len(reading) // 2]


def play(name: str, side: str, steps: int, seed: int) -> dict[str, Any]:
    """A run in this process."""
    import stable_baselines3.common.buffers as sb3
    import torch

    import engram

    torch.set_num_threads(1)
    engram.set_num_threads(1)
    file, *options = SCRIPTS[name]
    clock, returns = Clock(), []

    class Writer:
        """TensorBoard's, of which returns are kept."""

        def __init__(self, *_: object) -> None: ...
        def add_text(self, *_: object) -> None: ...
        def add_scalar(self, scalar: str, value: Any, step: int) -> None:
            if scalar == "charts/episodic_return":
                returns.append((step, round(float(np.asarray(value).item()), 3)))

        def close(self) -> None: ...

    kind = Replay if side == "engram" else sb3.ReplayBuffer
    sb3.ReplayBuffer = clock.around(kind)  # type: ignore[misc]
    _install("torch.utils.tensorboard", SummaryWriter=Writer)
    _install("distutils.util", strtobool=lambda text: text == "True")
    _translate(clock)
    place = folder()
    assert place is not None
    sys.argv = [file, *options, "--total-timesteps", str(steps), "--seed", str(seed), "--cuda", "False"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        runpy.run_path(str(place / file), run_name="__main__")
    return {
        "steps": steps,
        "run": clock.run / 1e9,
        "buffer": clock.buffer / 1e9,
        "calls": clock.calls,
        "returns": returns,
    }


def _install(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
    return module


def _translate(clock: Clock) -> None:
    """Give ``gymnasium`` the vector of its version 0.28, and make a module ``gym`` as version 0.21 was."""
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    class Vector(SyncVectorEnv):
        """Of 0.28: it resets in the same step, and has other names in its infos."""

        def __init__(self, makers: Any) -> None:
            super().__init__(makers, autoreset_mode=AutoresetMode.SAME_STEP)

        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            infos = result[4]
            if "final_obs" in infos:
                infos["final_observation"] = infos["final_obs"]
                infos["final_info"] = [{"episode": infos["final_info"]["episode"]}]
            return result

        def close(self, **named: Any) -> None:
            clock.stop()
            super().close(**named)

    class GymVector(Vector):
        """Of 0.21: one flag, an info for each environment, seeds that are given beforehand."""

        def reset(self, **_: Any) -> Any:
            return super().reset(seed=[env.first_seed for env in self.envs])[0]

        def step(self, actions: Any) -> Any:
            observations, rewards, terminated, truncated, infos = super().step(actions)
            dones, each = terminated | truncated, [{} for _ in self.envs]
            for i in dones.nonzero()[0]:
                each[i] = {
                    "terminal_observation": infos["final_obs"][i],
                    "TimeLimit.truncated": bool(truncated[i] and not terminated[i]),
                    "episode": infos["final_info"][i]["episode"],
                }
            return observations, rewards, dones, each

    class Seeded(gymnasium.wrappers.RecordEpisodeStatistics):
        first_seed: int

        def seed(self, seed: int) -> None:
            self.first_seed = seed

    gymnasium.vector.SyncVectorEnv = Vector  # type: ignore[misc]
    wrappers = types.SimpleNamespace(RecordEpisodeStatistics=Seeded)
    vector = types.SimpleNamespace(SyncVectorEnv=GymVector)
    _install("gym", make=gymnasium.make, wrappers=wrappers, vector=vector, spaces=gymnasium.spaces)


if __name__ == "__main__":
    print(json.dumps(play(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
