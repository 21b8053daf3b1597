"""Processes that write groups of rows into one store."""

import torch

from engram import ReplayBuffer

#: Groups that each writer has.
KINDS = 7


def rows(writer, first, n):
    """Rows that tell which group they must be in: by who wrote them, and when."""
    number = torch.arange(first, first + n)
    key = writer * 1_000 + number % KINDS
    return {"query": key, "row": number, "check": key * 1_000_003 + number, "next": {"reward": (number % 13).double()}}


def write(directory, writer, batches, n, sampler=None):
    """Write with a sampler of one's own."""
    rb = ReplayBuffer.open(directory, sampler=sampler)
    for batch in range(batches):
        rb.extend(rows(writer, batch * n, n))
    rb.close()


def write_for_ever(directory, writer, n, ready):
    """Until it is killed."""
    rb = ReplayBuffer.open(directory)
    batch = 0
    while True:
        rb.extend(rows(writer, batch * n, n))
        rb[[batch % len(rb)]] = rows(writer, 5, 1)
        batch += 1
        if batch == 3:
            ready.set()
