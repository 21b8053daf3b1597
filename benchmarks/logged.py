"""What a sampling log costs: a logged sample beside an unlogged one, and a replayed batch.

Microseconds of the thread's CPU time, the least of seven rounds: python -m benchmarks.logged
"""

import tempfile
import time

import torch
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplingLog,
    SliceSampler,
    TensorDictReplayBuffer,
    replay_draws,
)

ROWS, BATCH, SAMPLES, ROUNDS = 100_000, 256, 500, 7
SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(ROWS, alpha=0.6, beta=0.4),
    "slices of 16": lambda: SliceSampler(slice_len=16),
    "n-step": lambda: NStep(RandomSampler(), n=3, gamma=0.99),
}


def buffer(sampler):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=SAMPLERS[sampler](), batch_size=BATCH)
    obs = torch.randn(ROWS, 17)
    done = (torch.arange(ROWS) % 1000 == 999)[:, None]
    following = {"obs": obs.roll(-1, 0), "reward": torch.zeros(ROWS, 1), "done": done}
    rb.extend(TensorDict({"obs": obs, "action": torch.randn(ROWS, 6), "next": following}, [ROWS]))
    return rb


def microseconds(act):
    begin = time.thread_time()
    for _ in range(SAMPLES):
        act()
    return (time.thread_time() - begin) / SAMPLES * 1e6


def main():
    torch.set_num_threads(1)
    for sampler in SAMPLERS:
        rb = buffer(sampler)
        plain, logged, replayed, nbytes = [], [], [], 0
        for _ in range(ROUNDS):
            plain.append(microseconds(rb.sample))
            with tempfile.TemporaryDirectory() as folder:
                path = f"{folder}/draws.log"
                with SamplingLog(path, rb) as log:
                    logged.append(microseconds(rb.sample))
                    nbytes = log.path.stat().st_size / log.batches
                replay = replay_draws(path, rb)
                replayed.append(microseconds(lambda replay=replay: next(replay)))
                assert replay.same == SAMPLES
        said = (f"{min(of):.0f}" for of in (plain, logged, replayed))
        print(
            "{:14} sample {:>5} us   logged {:>5} us   replayed {:>5} us".format(sampler, *said),
            f"  {nbytes:.0f} B a batch",
        )


if __name__ == "__main__":
    main()
