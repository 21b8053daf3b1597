"""Train from a store five times larger than the memory that the program may have.

The program holds itself to a limit with a control group, where it may make one (as root, with control groups v1). Then it writes
frames until the store is five times larger than the limit, and learns from random batches to tell the brighter half of a frame.
Nothing is configured for that: engram reads the rows that are not in memory from their files, and two batches ahead.
"""

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch

from engram import LazyMemmapStorage, ReplayBuffer

SHAPE, BATCH = (3, 64, 64), 64


@contextlib.contextmanager
def limited(megabytes: int):
    """Within: at most so much memory for this process and for the files that it reads. Yields what says the most it took, in MB."""
    group = Path("/sys/fs/cgroup/memory", f"engram-example-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(megabytes << 20))
    except OSError as error:
        print(f"no limit, the store fits into memory: {error.strerror}")
        yield lambda: 0
        return
    (group / "cgroup.procs").write_text(str(os.getpid()))
    yield lambda: int((group / "memory.max_usage_in_bytes").read_text()) >> 20
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))
    group.rmdir()


def steps(n: int) -> dict[str, torch.Tensor]:
    """Frames of noise with a brighter left or right half, and which it is."""
    right = torch.randint(0, 2, (n,))
    frames = torch.randint(0, 200, (n, *SHAPE), dtype=torch.uint8)
    halves = frames.view(n, *SHAPE[:2], 2, SHAPE[2] // 2)
    halves[torch.arange(n), :, :, right] += 20
    return {"frame": frames, "right": right}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--memory", type=int, default=400, help="the limit, in MB; 0: none, and a store of 20 MB")
parser.add_argument("--updates", type=int, default=400)
arguments = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)  # of a model so small

with limited(arguments.memory) if arguments.memory else contextlib.nullcontext(lambda: 0) as most:
    rows = (5 * arguments.memory or 20) * 1_000_000 // (3 * 64 * 64)
    # "auto" looks whether rows are in memory. "read" never copies from memory: for the 20 MB that fit there.
    storage = LazyMemmapStorage(rows, io="auto" if arguments.memory else "read")
    with contextlib.closing(ReplayBuffer(storage=storage, batch_size=BATCH, prefetch=2)) as rb:
        while len(rb) < rows:
            rb.extend(steps(min(250, rows - len(rb))))
        print(f"{rows} rows, {storage.nbytes / 1e6:.0f} MB")

        model = torch.nn.Sequential(torch.nn.AvgPool2d(16), torch.nn.Flatten(), torch.nn.Linear(48, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        begun, right = time.perf_counter(), 0.0
        for _ in range(arguments.updates):
            batch = rb.sample()
            said = model(batch["frame"].float() / 100 - 1)
            loss = torch.nn.functional.cross_entropy(said, batch["right"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += 0.05 * (float((said.argmax(1) == batch["right"]).float().mean()) - right)
        seconds, stats = time.perf_counter() - begun, rb.stats()
        print(f"{arguments.updates} updates of {BATCH} rows, {arguments.updates / seconds:.0f} per second")
        print(f"read from files: {stats['file_bytes_read'] / 1e6:.0f} MB; memory at most: {most()} MB")
        print(f"in the end: right in {right:.0%} of the frames")
