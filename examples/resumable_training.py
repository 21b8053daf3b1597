"""A training that may be killed at any moment and is started again by the same command.

Its first line is ``open_or_create``: at the first start it makes the replay, at every later one it goes on with the rows and
priorities that are there. The weights are saved beside it. Run as it stands, the program is its own operator: it starts the
training in a process, kills it with SIGKILL, and starts it again, until it has ended.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import multiprocessing

from engram import TensorDictPrioritizedReplayBuffer

STEPS, ROWS, BATCH = 600, 4_000, 64
KILL_AT = (150, 400)


def train(folder: Path, kill_at: int) -> None:
    """The script. It learns ``y = 3 a - 2 b`` from samples that it draws as an environment would."""
    replay = TensorDictPrioritizedReplayBuffer.open_or_create(
        folder / "replay", ROWS, alpha=0.6, beta=0.4, batch_size=BATCH
    )
    weights = torch.zeros(2)
    if (folder / "weights.pt").exists():
        weights = torch.load(folder / "weights.pt")
    begun = replay.write_count  # one row per step
    print(f"starts at step {begun}: {len(replay)} rows are there", flush=True)

    for step in range(begun, STEPS):
        x = torch.randn(2)
        replay.add(TensorDict({"x": x, "y": 3 * x[0] - 2 * x[1]}))
        if len(replay) < BATCH:
            continue
        batch = replay.sample()
        error = batch["y"] - batch["x"] @ weights
        weights += 0.05 * (batch["x"] * (error * batch["priority_weight"])[:, None]).mean(0)
        batch["td_error"] = error.abs()
        replay.update_tensordict_priority(batch)
        if step % 50 == 0:
            torch.save(weights, folder / "new.pt")
            (folder / "new.pt").rename(folder / "weights.pt")  # whole, or not there
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"done after {replay.write_count} steps: y = {weights[0]:.1f} a + {weights[1]:.1f} b", flush=True)


def main(folder: Path) -> None:
    context = multiprocessing.get_context("fork")  # nothing is open here
    for kill_at in (*KILL_AT, STEPS):
        process = context.Process(target=train, args=(folder, kill_at))
        process.start()
        process.join()
        print("killed" if process.exitcode == -signal.SIGKILL else "ended", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
