"""Rows that say which they are in every byte, and processes that write them while a device reads."""

import random

import torch

from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from tests import forkserver

#: Fields that need loads of every width, several programs a row, and bytes left over.
WIDTHS = {"byte": 1, "odd": 7, "line": 64, "obs": 248, "long": 4_099}
#: Numbers of the rows of one writer.
_OF_ONE = 1 << 40
OPERATIONS = ("append", "append", "append", "edit", "remove", "empty")


def rows_of(numbers):
    """Rows of these numbers, int64 ``[n]``; number 0 is a row of zeros."""
    columns = {"number": numbers}
    for at, (name, width) in enumerate(WIDTHS.items()):
        bytes_ = torch.arange(width, device=numbers.device)
        columns[name] = ((numbers % 251)[:, None] * (bytes_ % 13 + 1 + at) % 256).to(torch.uint8)
    columns["value"] = (numbers % 4_093).float()
    return columns


def wrong(batch):
    """bool ``[n]`` on the device of the batch: the row is a mixture of several. Nothing waits."""
    expected, found = rows_of(batch["number"]), torch.zeros_like(batch["number"], dtype=torch.bool)
    for name, column in expected.items():
        found |= (batch[name] != column).reshape(len(found), -1).any(1)
    return found


def buffer(capacity, lanes, *, prioritized=False, batch_size):
    """A buffer in shared memory, half full."""
    sampler = PrioritizedSampler(alpha=0.6, beta=0.4) if prioritized else None
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity, lanes=lanes), sampler=sampler, batch_size=batch_size)
    for lane in range(lanes):
        rb.extend(rows_of(torch.arange(1, max(capacity // lanes // 2, 1) + 1) + lane), lane=lane)
    return rb.share()


def write(rb, lane, seed, empties, pause_s, stop):
    """Append, edit, remove and sometimes empty, until told to stop."""
    torch.set_num_threads(1)
    choose, number = random.Random(seed), seed * _OF_ONE + 1
    most = max(rb.storage.max_size // 8, 1)
    while not stop.wait(pause_s):
        n = choose.randint(1, min(most, 64))
        rows = rows_of(torch.arange(number, number + n))
        number += n
        what = choose.choice(OPERATIONS)
        if what == "append" or not len(rb):
            rb.extend(rows, lane=lane)
        elif what == "empty":
            if empties and choose.random() < 0.02:
                rb.empty()
        else:
            change(rb, what, choose, rows)


def change(rb, what, choose, rows):
    """Edit or remove rows, which other processes may remove at the same time."""
    size = len(rb)
    at = torch.tensor(choose.sample(range(size), min(size, len(rows["number"]), 8 if what == "edit" else 2)))
    try:
        if what == "edit":
            rb[at] = {name: column[: len(at)] for name, column in rows.items()}
        else:
            rb.remove(at)
    except (LookupError, RuntimeError):
        pass  # a row that another process has just removed


class Writers:
    """Processes that write to a shared buffer inside a ``with``. ``pause_s``: between two writes."""

    def __init__(self, rb, count, pause_s=0.0):
        self._stop = forkserver.CONTEXT.Event()
        lanes = rb.storage.lanes
        given = [(rb, number % lanes, number + 1, number == 0, pause_s, self._stop) for number in range(count)]
        self._them = [forkserver.CONTEXT.Process(target=write, args=one) for one in given]

    def __enter__(self):
        for one in self._them:
            one.start()
        return self

    def check(self):
        """Raises ``AssertionError``: one has ended."""
        assert all(one.is_alive() for one in self._them), [one.exitcode for one in self._them]

    def __exit__(self, *_):
        self._stop.set()
        for one in self._them:
            one.join(60)
        for one in self._them:
            if one.is_alive():
                one.kill()
        assert [one.exitcode for one in self._them] == [0] * len(self._them)
