"""Several learners, one per GPU, that draw from one store by priority and average their gradients.

    torchrun --nproc-per-node 4 examples/ddp_one_store.py /dev/shm/replay

Each rank has a lane of its own for the rows that it collects, and draws from the rows of all ranks through its own `DeviceLoader`, with
its own seed: no two ranks draw the same batches, and the priorities of all go to one tree. The store lies in shared memory, which each
GPU reads by itself. Without GPUs the same runs on the CPU with gloo; without torchrun the program starts two ranks.

The task: find a and b of y = a x0 + b x1.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import distributed, nn

from engram import DeviceLoader, PrioritizedSampler, TensorDictReplayBuffer

CAPACITY, COLLECTED, BATCH = 8_192, 32, 128


def collect(rank, generator):
    x = torch.randn(COLLECTED, 2, generator=generator)
    fields = {"x": x, "y": x @ torch.tensor([3.0, -2.0]), "rank": torch.full((COLLECTED,), rank)}
    return TensorDict(fields, batch_size=[COLLECTED])


def learn(folder, updates):
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(rank)  # of rows and batches
    rb = TensorDictReplayBuffer.open_or_create(
        folder,
        CAPACITY * world,
        lanes=world,
        sampler=PrioritizedSampler(alpha=0.6, beta=0.4),
        batch_size=BATCH,
        generator=generator,
    )
    for _ in range(BATCH // COLLECTED):
        rb.extend(collect(rank, generator), lane=rank)
    distributed.barrier()  # from here on there are rows of all ranks
    torch.manual_seed(0)
    model = nn.Linear(2, 1).to(device)
    together = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    seen = torch.zeros(world, dtype=torch.int64, device=device)
    with DeviceLoader(rb, device) as loader:
        for batch in islice(loader, updates):
            rb.extend(collect(rank, generator), lane=rank)
            error = together(batch["x"])[:, 0] - batch["y"]
            optimizer.zero_grad()
            (error.square() * batch["priority_weight"]).mean().backward()  # gradients are averaged here
            optimizer.step()
            loader.update_priority(batch["index"], error.detach().abs(), generation=batch["index_generation"])
            seen += torch.bincount(batch["rank"], minlength=world)
        transport = loader.transport
    firsts = [torch.zeros(2, device=device) for _ in range(world)]
    distributed.all_gather(firsts, batch["x"][0].contiguous())
    differ = len({tuple(first.tolist()) for first in firsts}) == world
    if rank == 0:
        a, b = model.weight[0].tolist()
        print(f"{world} ranks on {device.type}, transport {transport}: {len(rb):,} rows in one store")
        print(f"rank 0 drew rows of {int((seen > 0).sum())} ranks; last batches differ: {differ}")
        print(f"y = {a:.1f} x0 + {b:.1f} x1")
    distributed.barrier()
    rb.close()
    # It holds the group, whose threads may wait for Python's lock while it ends: the group must be the last to go.
    del together
    gc.collect()
    distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", help="of the store, a new one in /dev/shm; required under torchrun"
    )
    parser.add_argument("--ranks", type=int, default=2, help="without torchrun")
    parser.add_argument("--updates", type=int, default=300)
    given = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        learn(given.folder, given.updates)
        return
    shared = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run(  # noqa: S603 - this file
            [*launch, __file__, f"{folder}/replay", "--updates", str(given.updates)], env=quiet, check=True
        )


if __name__ == "__main__":
    main()
