"""Runs a rewritten recipe as a program and tells what its buffers did: ``driver.py TOLD SCRIPT ARGUMENTS…``."""

import json
import os
import runpy
import sys
import types
from pathlib import Path

import engram


def count():
    """Wraps what a recipe calls of a buffer, and returns what was counted."""
    told = {"rows": 0, "batches": 0, "classes": []}
    made = []
    begin, draw = engram.ReplayBuffer.__init__, engram.ReplayBuffer.sample

    def begin_counted(self, *given, **named):
        begin(self, *given, **named)
        made.append(self)
        for part in (self, self.sampler):
            if type(part).__name__ not in told["classes"]:
                told["classes"].append(type(part).__name__)

    def draw_counted(self, *given, **named):
        told["batches"] += 1
        told["rows"] = max(told["rows"], self.write_count, len(self))
        return draw(self, *given, **named)

    engram.ReplayBuffer.__init__, engram.ReplayBuffer.sample = begin_counted, draw_counted
    return told


def local_data(kind):
    """Stands in for a data set that would be downloaded: rows of an environment, in a buffer with the same arguments."""
    import torch
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    def make(dataset_id=None, *, split_trajs=False, batch_size=None, sampler=None, writer=None, transform=None, **_):
        torch.manual_seed(0)
        env = TransformedEnv(GymEnv(kind), StepCounter(max_steps=40))
        rows = torch.cat([env.rollout(40) for _ in range(12)]).exclude("step_count", ("next", "step_count"))
        rows.set("reward", torch.zeros_like(rows["next", "reward"]))
        if split_trajs:
            rows = rows.reshape(12, 40)
        storage = engram.TensorStorage(rows)
        return engram.TensorDictReplayBuffer(
            storage=storage, sampler=sampler, writer=writer, transform=transform, batch_size=batch_size
        )

    modules = {"torchrl.data.datasets.d4rl": "D4RLExperienceReplay"}
    modules["torchrl.data.datasets.minari_data"] = "MinariExperienceReplay"
    for module, name in modules.items():
        sys.modules[module] = stand_in = types.ModuleType(module)
        setattr(stand_in, name, make)


def double_pendulum():
    """Pendulum with observations of float64, known to Gymnasium as ``Pendulum64-v0``."""
    import gymnasium
    import numpy as np

    def make(**options):
        env = gymnasium.make("Pendulum-v1", **options)
        space = env.observation_space
        wide = gymnasium.spaces.Box(space.low.astype(np.float64), space.high.astype(np.float64), dtype=np.float64)
        return gymnasium.wrappers.TransformObservation(env, lambda seen: seen.astype(np.float64), wide)

    gymnasium.register("Pendulum64-v0", make)


def main():
    told_to, script, *arguments = sys.argv[1:]
    told = count()
    double_pendulum()
    if os.environ["ENGRAM_LOCAL_DATA"]:
        local_data(os.environ["ENGRAM_LOCAL_DATA"])
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent.resolve())
    runpy.run_path(script, run_name="__main__")
    Path(told_to).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
