"""Memory of large batches is used again, as soon as nothing refers to a batch, and never before."""

import random
import resource
from concurrent.futures import ThreadPoolExecutor

import torch

from engram import LazyTensorStorage, ReplayBuffer

ROWS, SIZE = 64, 8192


def filled():
    """Rows of 32 KiB that hold their own number everywhere."""
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS))
    rb.extend({"a": torch.arange(ROWS, dtype=torch.int32)[:, None].expand(ROWS, SIZE).contiguous()})
    return rb


def is_whole(batch):
    return bool((batch["a"] == batch["a"][:, :1]).all())


def test_the_kernel_is_not_asked_for_new_pages_with_each_batch():
    """A batch of 8 MiB is 2,048 pages, which the kernel would clear one by one."""
    rb = filled()
    held = [rb.sample(256) for _ in range(3)]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(20):
        held = [*held[1:], rb.sample(256)]  # of three batches that are held, one is let go
    assert (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) / 20 < 200


def test_batches_that_are_held_stay_what_they_are():
    """Also views of them, and whatever order they are let go in; of four threads."""
    rb = filled()

    def draw(seed):
        rng, held = random.Random(seed), []
        for _ in range(150):
            batch = rb.sample(rng.choice([4, 8, 12, 16]))
            first = batch["a"][:, 0].clone()
            held.append((batch["a"][:, 1:], first))  # the batch is gone, its memory is not
            if len(held) > 5:
                view, expected = held.pop(rng.randrange(len(held)))
                assert torch.equal(view, expected[:, None].expand_as(view))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(draw, range(4)))
    assert is_whole(rb.sample(16))
