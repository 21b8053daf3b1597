"""A store that is served, and its copy."""

import contextlib

import msgspec
import torch

from engram import LazyMemmapStorage, ReplayBuffer
from engram.saved import attempts
from engram.serving import copies
from engram.serving.copies import Follower, Origin
from engram.serving.server import listening
from tests import fresh
from tests.serving.servers import Served
from tests.waiting import until

SERVER = """
from pathlib import Path
from engram.serving.copies import begin
from engram.serving.server import listening, run
at = listening(listen, token, None, None, insecure=True)._replace(sync=sync)
begin(Path(folder), follow or None, at, Path(lease) if lease else None)
run(Path(folder), at, lambda address: print("ready", address, flush=True))
"""


class Pair:
    """A store that is served at one socket, and its copy at another one."""

    def __init__(self, root):
        self.root, self.at = root, {name: f"unix:{root}/{name}.sock" for name in "abcd"}
        self.running = []

    def program(self, name, follow="", *, sync=False, token=None, lease=""):
        folder, follow = str(self.root / name), follow and self.at[follow]
        more = {"sync": sync, "token": token, "lease": str(lease)}
        self.running.append(fresh.start(SERVER, folder=folder, listen=self.at[name], follow=follow, **more))
        return self.running[-1]

    def start(self, name, **how):
        return Served(self.program(name, **how))

    def newest(self, name="b"):
        """What the newest whole copy says of its store."""
        root = self.root / f"{name}-copy"
        with contextlib.suppress(FileNotFoundError, StopIteration):
            return msgspec.convert(attempts.read_attempt(root / str(next(iter(attempts.names(root))))).user, Origin)
        return None

    def copied(self, writes, name="b"):
        """Wait until the copy has so many rows that were written."""
        until(lambda: (newest := self.newest(name)) and newest.writes >= writes)

    def promote(self, name="b"):
        """Promote a copy, and wait until it is served."""
        note = copies.promoted(self.root / name)
        until((self.root / f"{name}.sock").exists)
        return note

    def rows(self, name):
        with ReplayBuffer.open(self.root / name, readonly=True) as rb:
            return rb[:]["a"].tolist()

    def follower(self, leader="a", name="b"):
        return Follower(self.root / name, self.at[leader], listening(self.at[name], None, None, None, insecure=True))


def store(folder, rows=10, capacity=1 << 16, **how):
    with ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder), batch_size=4, **how) as rb:
        rb.extend({"a": torch.arange(rows)})
