"""Buffers to dump."""

import os
import signal

import torch
from tensordict import TensorDict

from engram.checkpoint.checkpointer import Checkpointer


class Through:
    """Takes a buffer's state to another one through a folder: each time the same, so that one dump replaces another."""

    def __init__(self, folder):
        self.folder, self.checkpointer, self.step = folder, None, 0

    def dumps(self, rb, other):
        rb.dumps(self.folder / "dump")
        other.loads(self.folder / "dump")

    def series(self, rb, other):
        """The one that was restored last goes on saving, and links what it was restored from."""
        if self.checkpointer is None or self.checkpointer[0] is not rb:
            self.checkpointer = rb, Checkpointer(self.folder / "series", rb)
        self.step += 1
        report = self.checkpointer[1].save(self.step)
        live = int((rb.storage.state_dict()["numbers"] != 0).sum())
        assert (report.steps, report.lost_rows) == (live, 0), "nobody else writes"
        self.checkpointer = other, Checkpointer(self.folder / "series", other)
        self.checkpointer[1].restore(resume="exact")


# ---- others that write -----------------------------------------------------------------------------------------------------


def marked(position, lane, n=3):
    """Rows that know their place: whoever finds others between them sees a tear."""
    at = torch.arange(position, position + n)
    return TensorDict({"at": at, "lane": torch.full((n,), lane), "copy": at[:, None].expand(n, 500).clone()}, [n])


def check_marked(rb, *, least=0):
    """Every row is whole, and each lane has its newest ones, in order."""
    length = rb.storage.max_size // rb.lanes
    lanes = rb.storage.state_dict()["lanes"]
    data = rb[:]
    assert (data["copy"] == data["at"][:, None]).all()
    for lane in range(rb.lanes):
        position, live = lanes[lane, :2].tolist()
        assert position % 3 == 0, "no write by half"
        assert live == min(position, length)
        assert sorted(data["at"][data["lane"] == lane].tolist()) == list(range(position - live, position))
        assert position >= least
    return lanes[:, 0]


class Writers:
    """Processes that write to a lane each, until they are killed."""

    def __init__(self, rb, lanes):
        self.pids = [self._start(rb, lane) for lane in range(lanes)]

    def _start(self, rb, lane):
        pid = os.fork()
        if pid:
            return pid
        try:
            position = 0
            while True:
                rb.extend(marked(position, lane), lane=lane)
                position += 3
        finally:
            os._exit(1)

    def kill(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL
