"""A DQN that several processes train together, each with its own prioritized replay, and that more or fewer continue.

    torchrun --nproc-per-node 4 examples/ddp_dqn.py run     # trains, saves, stops
    torchrun --nproc-per-node 3 examples/ddp_dqn.py run     # continues with what the four collected

Without torchrun, the program starts itself in this way with 4, then 3, then 5 processes.

The task: on a ring of 24 places, walk to the place that is shown. From every place, one of two actions is the shorter way.
Each step costs, and an episode ends after 20 steps. Random walks return about -0.5, the shorter ways +0.7.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import distributed, nn

from engram import Checkpointer, LazyTensorStorage, PrioritizedSampler, Ranks, TensorDictReplayBuffer

PLACES, LONGEST, LANES, CAPACITY, BATCH = 24, 20, 8, 8 * 4000, 64


class Ring:
    """As many environments as a rank has lanes."""

    def __init__(self, generator):
        self.generator = generator
        self.at, self.goal, self.steps = (torch.zeros(LANES, dtype=torch.long) for _ in range(3))
        self.worth = torch.zeros(LANES)
        self.begin(torch.ones(LANES, dtype=torch.bool))

    def begin(self, which):
        new = torch.randint(PLACES, (2, LANES), generator=self.generator)
        self.at, self.goal = torch.where(which, new[0], self.at), torch.where(which, new[1], self.goal)
        self.steps, self.worth = self.steps * ~which, self.worth * ~which

    def seen(self):
        angles = torch.stack([self.at, self.goal]) * (2 * torch.pi / PLACES)
        return torch.cat([angles.sin(), angles.cos()]).T.float()

    def step(self, action):
        """Rows of a replay buffer, one per lane, and the returns of episodes that ended."""
        before = self.seen()
        self.at = (self.at + 2 * action - 1) % PLACES
        self.steps = self.steps + 1
        there, late = self.at == self.goal, self.steps >= LONGEST
        reward = torch.where(there, 1.0, -0.05)
        self.worth = self.worth + reward
        after = TensorDict(
            {
                "obs": self.seen(),
                "reward": reward,
                "done": there | late,
                "terminated": there,
                "truncated": late & ~there,
            }
        )
        rows = {"obs": before, "action": action, "env_id": torch.arange(LANES, dtype=torch.int32), "next": after}
        ended = self.worth[there | late].tolist()
        self.begin(there | late)
        return TensorDict(rows, batch_size=[LANES]), ended


def train(folder, steps):
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, lanes=LANES),
        sampler=PrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4),
        batch_size=BATCH,
        generator=generator,
    )
    checkpoints = Checkpointer(folder / "replay", replay, ranks=Ranks.from_torch(), timeout=120)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    begun, user = 0, {}
    if checkpoints.latest:
        report = checkpoints.restore(incomplete={"open": "keep", "headless": "keep"})  # one step each
        begun, user = report.step, report.user
        if "model" in user:  # missing if the job failed before the first model
            network.load_state_dict(torch.load(folder / user["model"], weights_only=True))
        dealt = report.dealt
        if rank == 0:
            what = "as they were" if dealt is None else f"{len(dealt['shards'])} shards on {world} ranks"
            print(f"restored step {begun}: {what}; rank 0 has {report.steps} rows", flush=True)
    target.load_state_dict(network.state_dict())
    together = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(together.parameters(), lr=1e-3)
    ring, lanes, returns = Ring(generator), torch.arange(LANES), []
    with checkpoints.guard(), checkpoints.serve():
        for step in range(begun + 1, begun + steps + 1):
            chance = max(0.05, 1 - step / 150)
            with torch.no_grad():
                best = network(ring.seen()).argmax(1)
            guess = torch.randint(2, (LANES,), generator=generator)
            rows, ended = ring.step(torch.where(torch.rand(LANES, generator=generator) < chance, guess, best))
            replay.extend(rows, lane=lanes)
            returns += ended
            for _ in range(2 if step * LANES >= BATCH else 0):
                batch = replay.sample()
                with torch.no_grad():
                    later = target(batch["next", "obs"]).max(1).values * ~batch["next", "terminated"]
                values = together(batch["obs"]).gather(1, batch["action"][:, None])[:, 0]
                errors = values - (batch["next", "reward"] + 0.95 * later)
                optimizer.zero_grad()
                (errors.square() * batch["priority_weight"]).mean().backward()
                optimizer.step()
                replay.update_priority(batch["index"], errors.detach().abs())
            if step % 20 == 0:
                target.load_state_dict(network.state_dict())
            # Saves on SIGUSR2 to any rank, or POST /checkpoint. A crash checkpoint has the same user state.
            checkpoints.poll(step, user=user)
            if step % 100 == 0:
                model = f"model-{step}-{world}.pt"
                if rank == 0:
                    torch.save(network.state_dict(), folder / model)
                sums = torch.tensor([sum(returns), len(returns)])
                distributed.all_reduce(sums)  # now the file exists on all ranks
                user = {"model": model}
                returns = []
                if rank == 0:
                    print(f"step {step}, {world} ranks: mean return {sums[0] / sums[1]:.2f}", flush=True)
        model = f"model-{step}-{world}.pt"
        if rank == 0:
            torch.save(network.state_dict(), folder / model)
        saved = checkpoints.save(step, user={"model": model})
        if rank == 0:
            print(f"saved step {step}: {saved.steps} rows of {world} ranks", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="folder of the run; required under torchrun")
    parser.add_argument("--steps", type=int, default=300, help="steps of each start")
    parser.add_argument("--worlds", default="4,3,5", help="numbers of processes of the starts, without torchrun")
    given = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        train(given.folder, given.steps)
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        for world in given.worlds.split(","):
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world]
            quiet = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            subprocess.run(  # noqa: S603 - this file
                [*launch, __file__, folder, "--steps", str(given.steps)], env=quiet, check=True
            )
