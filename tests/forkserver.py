"""Processes of their own that begin without anything of this one, in the time of a fork.

They come from a server that has loaded torch and engram and done nothing else. What they are given is pickled, as for a process that is
spawned; those take seconds each, which a few tests take to show that they are no different.
"""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "engram.buffer.tensordict",
        "engram.checkpoint.checkpointer",
        "torch.distributed",
        "torch.multiprocessing",
        "torchrl.collectors",
        "tests.ranks.jobs",
    ]
)
