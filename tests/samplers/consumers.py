"""Processes that use up the rows of one store."""

import os
import signal

import torch

from engram import NoSampleable, RateLimited, ReplayBuffer
from tests.ranks.processes import tell


def consume(directory, file, end):
    """Draw until ``end`` exists and nothing is left; write what was handed out."""
    rb = ReplayBuffer.open(directory, batch_size=5)
    got = []
    while True:
        last = end.exists()
        try:
            got += rb.sample(timeout=0).tolist()
        except (NoSampleable, RateLimited):
            if last:
                break
    rb.close()
    tell(file, " ".join(map(str, got)))


def consume_and_die(directory, file, batches):
    """Draw some batches, writing each before the next one; and be killed amid one more."""
    rb = ReplayBuffer.open(directory, batch_size=5)
    with file.open("w") as out:
        for _ in range(batches):
            print(*rb.sample().tolist(), file=out, flush=True)
    rb.sample()
    os.kill(os.getpid(), signal.SIGKILL)


def write(directory, first, batches, n):
    """Write with a sampler of one's own: rows that follow each other, overwriting none that is not used up."""
    rb = ReplayBuffer.open(directory)
    for batch in range(batches):
        begin = first + batch * n
        rb.extend(torch.arange(begin, begin + n))
    rb.close()
