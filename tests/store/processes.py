"""A buffer's other processes."""

from __future__ import annotations

import os
import signal

import torch
import torch.multiprocessing as mp
from tensordict import TensorDict

from engram import ReplayBuffer
from tests import forkserver
from tests.waiting import ended

#: The first and the last, which a sample takes, begin at once. A spawned process takes seconds.
METHODS = ["fork", "spawn", "forkserver"]


def steps(start: int, n: int, episode: int = 0) -> TensorDict:
    """Rows that know where they belong."""
    step = torch.arange(start, start + n)
    return TensorDict({"step": step, "twice": 2 * step, "episode": torch.full((n,), episode)}, [n])


def whole(batch: TensorDict) -> bool:
    return bool((batch["twice"] == 2 * batch["step"]).all())


def leaves(rb: ReplayBuffer) -> torch.Tensor:
    index = rb.sampler._index
    return index.leaves(index.core.rows)


def context(method):
    """Of processes that begin so."""
    return forkserver.CONTEXT if method == "forkserver" else mp.get_context(method)


class Child:
    """A process that runs a function of a module."""

    def __init__(self, target, *arguments, method="fork"):
        self.process = context(method).Process(target=target, args=arguments, daemon=True)
        self.process.start()

    def join(self):
        ended(self.process)
        assert self.process.exitcode == 0, self.process.exitcode

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        ended(self.process)
