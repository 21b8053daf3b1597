"""A server and its client on computers of their own, and a wire that delays, loses, is cut, and resets connections in mid-message."""

import os
import signal

import pytest
import torch

from engram import LazyMemmapStorage, ReplayBuffer
from tests import stress
from tests.serving.servers import SERVER
from tests.serving.wires import Wire
from tests.waiting import until

ADDRESS = "10.78.0.1:7777"  # of a network of its own
CLIENT = """
import torch
from engram.remote import connection
connection._ACKNOWLEDGED_MS = 1_000  # a peer that answers nothing is gone after it
from engram import ReplayBuffer

remote = ReplayBuffer.connect(address, prefetch=2, full=full)
ended = first
while ended < first + rows:
    ids = torch.arange(ended, ended + 4)
    remote.extend({"a": ids, "b": ids.unsqueeze(1).expand(4, width).contiguous()})
    ended += 4
    if full is not None:
        len(remote)  # waits for what is under way
    print("ack", ended, flush=True)
    batch = remote.sample()
    assert (batch["b"] == batch["a"].unsqueeze(1)).all(), batch
print("done", flush=True)
if stays:
    __import__("signal").pause()
remote.close()
"""
ROWS = stress.size(80, 2000)


class Nodes:
    """A store with a server on one computer, and clients on others."""

    def __init__(self, folder, width):
        self.folder, self.width = folder / "store", width
        with ReplayBuffer(storage=LazyMemmapStorage(1 << 14, scratch_dir=self.folder), batch_size=16) as rb:
            rb.extend({"a": torch.full((4,), -1), "b": torch.full((4, width), -1)})
        self.wire, self.programs = Wire(folder, stress.chance("wire", folder.name)), []

    def _start(self, *what, **values):
        program = self.wire.start(*what, **values)
        self.programs.append(program)
        return program

    def serve(self):
        values = {"folder": str(self.folder), "listen": ADDRESS, "insecure": True}
        return self._start(1, SERVER, token=None, cert=None, key=None, **values).until("\n")

    def connect(self, number=2, first=0, rows=ROWS, full=None, stays=False):
        values = {"address": ADDRESS, "first": first, "rows": rows, "width": self.width, "full": full, "stays": stays}
        return self._start(number, CLIENT, **values)

    def close(self):
        for program in self.programs:
            program.kill()
        self.wire.close()

    def end(self, client):
        """Kill it, and look at the rows."""
        client.kill()
        known = acknowledged(client)
        with ReplayBuffer.open(self.folder, unclean="accept") as rb:
            rows = len(rb) - 4
        assert known <= rows <= known + 4
        self.check(rows)

    def check(self, rows):
        """Every row is there once, in order and whole."""
        with ReplayBuffer.open(self.folder, unclean="accept") as rb:
            assert rb["a"][4:].tolist() == list(range(rows))
            assert torch.equal(rb["b"], rb["a"].unsqueeze(1).expand(-1, self.width))


@pytest.fixture
def nodes(tmp_path, request):
    made = Nodes(tmp_path, getattr(request, "param", 16))
    yield made
    made.close()


def acknowledged(client):
    """Rows, as far as whole lines say."""
    assert client.poll() in (None, 0, -signal.SIGKILL), client.err
    return max((int(line.split()[1]) for line in client.out.split("\n")[:-1] if line.startswith("ack")), default=0)


def goes_on(client, steps=3):
    """Wait until more is acknowledged."""
    enough = acknowledged(client) + 4 * steps
    until(lambda: acknowledged(client) >= enough)


@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize(("delay_s", "loss"), [(0.001, 0.0), (0.05, 0.0), (0.002, 0.02)])
def test_a_wire_that_is_slow_or_loses(nodes, delay_s, loss):
    nodes.wire.delay_s, nodes.wire.loss = delay_s, loss
    nodes.serve()
    client = nodes.connect()
    assert client.wait(stress.size(200, 3600)) == 0, client.err
    assert nodes.wire.lost or not loss
    nodes.check(ROWS)


@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize("full", [None, "block"])
@pytest.mark.parametrize("nodes", [1 << 13], indirect=True)
def test_connections_that_are_reset_in_mid_message(nodes, full):
    """Rows that are written, 256 KiB each time, and batches of 1 MiB begin again at the next connection."""
    nodes.serve()
    client, chance = nodes.connect(rows=1 << 13, full=full), stress.chance("resets", full)
    for reset in range(stress.size(5, 200)):
        nodes.wire.reset_after = chance.randrange(1, 3 << 20)
        until(lambda reset=reset: nodes.wire.resets > reset)
        goes_on(client, 1)
    nodes.end(client)


@pytest.mark.timeout(stress.LIMIT_S)
def test_a_cable_that_is_pulled_and_plugged_in_again(nodes):
    """For as long as a connection bears, and for longer: then the client asks for another one."""
    nodes.serve()
    client = nodes.connect(rows=1 << 13)
    for number in range(stress.size(4, 100)):
        goes_on(client)
        lost, requests = nodes.wire.lost, nodes.wire.lost_requests
        nodes.wire.is_cut = True
        if number % 2:
            until(lambda requests=requests: nodes.wire.lost_requests > requests)
        else:
            until(lambda lost=lost: nodes.wire.lost > lost + 1)  # something is sent again
        nodes.wire.is_cut = False
    goes_on(client)
    nodes.end(client)


@pytest.mark.timeout(stress.LIMIT_S)
def test_a_server_whose_computer_is_gone_without_a_word(nodes):
    """The client's connection is half open: it looks for a server, and finds the next one at the same address."""
    server = nodes.serve()
    client = nodes.connect(rows=1 << 13)
    for _ in range(stress.size(1, 50)):
        goes_on(client)
        nodes.wire.unplug(1)
        server.kill()
        requests = nodes.wire.lost_requests
        nodes.wire.is_cut = True  # until the client has found out
        until(lambda requests=requests: nodes.wire.lost_requests > requests)
        nodes.wire.is_cut = False
        server = nodes.serve()
    goes_on(client)
    nodes.end(client)


@pytest.mark.timeout(stress.LIMIT_S)
def test_clients_whose_computers_are_gone_without_a_word(nodes):
    """Their connections are half open at the server, which serves the next one, and ends when it is asked to."""
    server, gone = nodes.serve(), stress.size(3, 100)
    for number in range(gone):
        client = nodes.connect(2 + number, first=16 * number, rows=16, stays=True).until("done\n")
        nodes.wire.unplug(2 + number)
        client.kill()
    assert nodes.connect(2 + gone, first=16 * gone, rows=16).wait() == 0
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 0
    nodes.check(16 * (gone + 1))
