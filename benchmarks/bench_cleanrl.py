"""Claim: CleanRL's `dqn` and `sac` are never slower with engram as their replay buffer, and the buffer's part is 1.5 times as fast.

Measured: CleanRL's own files, as its package has them and with its hyper-parameters, on CartPole and on Pendulum. Each run has both
buffers, Stable-Baselines3's, which the files import, and engram. Every ``add`` and every ``sample`` goes to both, which take turns in
going first, so both are called where the run has left the caches. The file learns from what the first returns.
The buffer's part is the CPU of these calls, less what reading the clock takes. The run is the CPU of the process from the making of
the buffers until the environment is closed, with the part of one of them: imports do not count.

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

STEPS, RUNS = {"dqn": 50_000, "sac": 8_000}, 3
FEWEST = 12_000
"""Steps of which `dqn` learns in some."""
SIDES = ("engram", "SB3")
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
        yield from rows(name, [apart(name, SIDES, steps, seed) for seed in range(1, 1 + RUNS)])


def folder() -> Path | None:
    """Where CleanRL's files are."""
    found = importlib.util.find_spec("cleanrl")
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) if places else None


def rows(name: str, runs: list[dict[str, Any]]) -> Iterator[Row]:
    """What runs took with each of the buffers, in all and in the buffer."""
    part = {side: [run["buffers"][side] for run in runs] for side in SIDES}
    rest = [run["run"] - sum(run["buffers"].values()) for run in runs]
    whole = {side: [other + own for other, own in zip(rest, part[side], strict=True)] for side in SIDES}
    shares = {side: Spread.of([own / run for own, run in zip(part[side], whole[side], strict=True)]) for side in SIDES}
    notes = {side: f"{share.median:.2%} of the CPU of the run." for side, share in shares.items()}
    for suffix, what, spent in (("", "the run", whole), ("/buffer", "the buffer's part", part)):
        ratio = Spread.of([theirs / ours for ours, theirs in zip(spent["engram"], spent["SB3"], strict=True)])
        key = f"cleanrl/{name}{suffix}"
        yield Row(
            key,
            f"CleanRL's {name}, {runs[0]['steps']:,} steps: {what}",
            {side: Spread.of(seconds) for side, seconds in spent.items()},
            [Comparison("SB3", "times", ratio, FLOORS.get((key, "SB3")))],
            "s",
            {side: [1e6 * second for second in seconds] for side, seconds in spent.items()},
            notes=notes,
        )


def apart(name: str, sides: tuple[str, ...], steps: int, seed: int) -> dict[str, Any]:
    """A run in a new process, with these buffers."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.bench_cleanrl",
        name,
        ",".join(sides),
        str(steps),
        str(seed),
    ]
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
        import torch

        import engram

        dtypes = {"rewards": torch.float32, "dones": torch.float32}
        self._rb = engram.ReplayBuffer(storage=engram.LazyTensorStorage(size, dtypes=dtypes))
        self._add = self._rb.add
        self._shape = actions.shape or (1,)
        self._timeouts = handle_timeout_termination

    def add(self, obs: Any, next_obs: Any, actions: Any, rewards: Any, dones: Any, infos: Any) -> None:
        late = self._timeouts and infos[0].get("TimeLimit.truncated", False)
        self._add(
            {
                "observations": obs[0],
                "next_observations": next_obs[0],
                "actions": actions.reshape(self._shape),
                "rewards": rewards[0],
                "dones": False if late else dones[0],
            }
        )

    def sample(self, size: int) -> Batch:
        return Batch(*self._rb.sample(size).values())


class Clock:
    """What the calls of each buffer and the whole run take, in nanoseconds of CPU."""

    def __init__(self, kinds: dict[str, Callable[..., Any]]) -> None:
        self.kinds = kinds
        self.spent = dict.fromkeys(kinds, 0)
        self.calls = {"add": 0, "sample": 0}
        self.began = self.run = 0

    def begin(self, *arguments: Any, **named: Any) -> "Clock":
        """Make the buffers: the files call this in place of a class."""
        self.began = time.process_time_ns()
        made = [(side, kind(*arguments, **named)) for side, kind in self.kinds.items()]
        self._orders = made, made[::-1]
        return self

    def add(self, *arguments: Any) -> None:
        self._each("add", *arguments)

    def sample(self, size: int) -> Any:
        return next(iter(self._each("sample", size).values()))

    def _each(self, call: str, *arguments: Any) -> dict[str, Any]:
        now, found = time.thread_time_ns, {}
        self.calls[call] += 1
        for side, rb in self._orders[self.calls[call] % 2]:
            method = getattr(rb, call)
            started = now()
            found[side] = method(*arguments)
            self.spent[side] += now() - started
        return found

    def stop(self) -> None:
        """Ends the run; takes off what reading the clock took."""
        self.run = time.process_time_ns() - self.began
        reading = []
        for _ in range(2_000):
            started = time.thread_time_ns()
            reading.append(time.thread_time_ns() - started)
        for side in self.spent:
            self.spent[side] -= sum(self.calls.values()) * sorted(reading)[len(reading) // 2]


def play(name: str, sides: list[str], steps: int, seed: int) -> dict[str, Any]:
    """A run in this process."""
    import stable_baselines3.common.buffers as sb3
    import torch

    import engram

    torch.set_num_threads(1)
    engram.set_num_threads(1)
    file, *options = SCRIPTS[name]
    kinds = {"engram": Replay, "SB3": sb3.ReplayBuffer}
    clock, returns = Clock({side: kinds[side] for side in sides}), []

    class Writer:
        """TensorBoard's, of which returns are kept."""

        def __init__(self, *_: object) -> None: ...
        def add_text(self, *_: object) -> None: ...
        def add_scalar(self, scalar: str, value: Any, step: int) -> None:
            if scalar == "charts/episodic_return":
                returns.append((step, round(float(np.asarray(value).item()), 3)))

        def close(self) -> None: ...

    sb3.ReplayBuffer = clock.begin  # type: ignore[assignment, misc]
    _install("torch.utils.tensorboard", SummaryWriter=Writer)
    _install("distutils.util", strtobool=lambda text: text == "True")
    _translate(clock)
    place = folder()
    assert place is not None
    sys.argv = [file, *options, "--total-timesteps", str(steps), "--seed", str(seed), "--cuda", "False"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        runpy.run_path(str(place / file), run_name="__main__")
    buffers = {side: spent / 1e9 for side, spent in clock.spent.items()}
    return {
        "steps": steps,
        "run": clock.run / 1e9,
        "buffers": buffers,
        "calls": sum(clock.calls.values()),
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
    print(json.dumps(play(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4]))))
