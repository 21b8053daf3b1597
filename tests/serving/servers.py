"""Servers in processes of their own, for tests: forked from a process that has torch already."""

import contextlib
import os
import signal

from tests import fresh

SERVER = """
from pathlib import Path
from engram.serving.server import listening
from engram.serving.server import run
run(Path(folder), listening(listen, token, cert, key, insecure=insecure), lambda address: print("ready", address, flush=True))
"""
_SERVERS = """
import os
from pathlib import Path
from engram import ReplayBuffer
from engram.remote.protocol import address_of
from engram.serving.server import Server
from engram.serving.service import Service
servers = [Server(Service(ReplayBuffer.open(folder)), address_of("unix:" + folder + ".sock", "test")) for folder in folders]
print("ready", flush=True)
os.read(ends, 1) if ends else __import__("signal").pause()
"""


class Served:
    """A server that runs."""

    def __init__(self, program):
        self.program = program.until("\n")
        assert program.out.startswith("ready "), program.err
        self.address = program.out.split()[1]

    def kill(self):
        self.program.kill()

    def stop(self):
        """SIGTERM, and its exit status."""
        os.kill(self.program.pid, signal.SIGTERM)
        return self.program.wait()


def start(folder, listen, token=None, cert=None, key=None, *, insecure=False):
    paths = [None if path is None else str(path) for path in (token, cert, key)]
    values = dict(zip(("token", "cert", "key"), paths, strict=True))
    return Served(fresh.start(SERVER, folder=str(folder), listen=listen, insecure=insecure, **values))


@contextlib.contextmanager
def serving(folder, listen=None, *more, **how):
    """A server of the store in a folder; at a socket beside it where nothing else is said."""
    served = start(folder, listen or f"unix:{folder}.sock", *more, **how)
    try:
        yield served
    finally:
        served.kill()


@contextlib.contextmanager
def serving_each(folders):
    """One process that serves the stores in these folders, each at a socket beside it."""
    program = fresh.start(_SERVERS, folders=[str(folder) for folder in folders], ends=0).until("ready")
    try:
        yield
    finally:
        program.kill()


def token_file(folder, word="a-secret-word", mode=0o600):
    path = folder / "token"
    path.write_text(word)
    path.chmod(mode)
    return path
