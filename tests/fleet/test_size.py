"""A fleet of many stores and writers, over a wire that delays and loses: connections and requests are as docs/cluster.md counts them,
and every row is there once, in order.

One process serves all stores, and one speaks for all writers, a thread for each. ``make stress`` runs 64 stores and 256 writers, a
quarter of the writers that the page is about: so far go two cores.
"""

import json

import pytest
import torch

from engram import LazyMemmapStorage, ReplayBuffer
from tests import stress
from tests.serving.wires import Wire
from tests.waiting import until

STORES, WRITERS = stress.size(6, 64), stress.size(24, 256)
MESSAGES, ROWS = stress.size(8, 20), 10
#: Of each writer.
INTERVAL_S = stress.size(0.2, 5)

SERVERS = """
import json, os, resource, sys, time
from engram import ReplayBuffer
from engram.remote.protocol import address_of
from engram.serving.server import Doors, Server, make_room
from engram.serving.service import Service

Doors._run = lambda doors: None  # each would look through the connections of all servers every second

def established():
    lines = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/self/net/" + name)]
    return [int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "01"]  # the port of each

make_room()
servers = [
    Server(Service(ReplayBuffer.open(folder)), address_of(f"10.78.0.1:{port}", "test"))
    for port, folder in enumerate(folders, 7000)
]
print("ready", flush=True)
while True:
    used, ports = resource.getrusage(resource.RUSAGE_SELF), established()
    said = {"connections": [ports.count(port) for port in range(7000, 7000 + len(folders))]}
    said["cpu"] = used.ru_utime + used.ru_stime
    said["threads"] = len(os.listdir("/proc/self/task"))
    with open(told + ".part", "w") as file:
        json.dump(said, file)
    os.rename(told + ".part", told)
    time.sleep(0.25)
"""
CLIENTS = """
import json, os, random, resource, threading, time
import torch
from engram import ReplayBuffer
from engram.remote import connection

asked, answer = [0], connection._answer

def counted(*args):
    asked[0] += 1
    return answer(*args)

connection._answer = counted
addresses = [f"10.78.0.1:{port}" for port in range(7000, 7000 + stores)]
begin, end = threading.Barrier(writers + 1), threading.Barrier(writers + 1)
errors, few = [], threading.Semaphore(4)

def write(number):
    try:
        def message(step):
            ids = torch.arange(step * rows, (step + 1) * rows)
            rb.extend({"who": torch.full_like(ids, number), "step": ids, "data": ids.unsqueeze(1).expand(rows, 16).contiguous()})

        with few:
            rb = ReplayBuffer.connect(addresses, patience=600)
            message(0)
        begin.wait()
        begin.wait()
        time.sleep(random.random() * interval)
        for step in range(1, messages):
            message(step)
            time.sleep(interval)
    except BaseException as error:
        errors.append(repr(error))
        begin.abort(), end.abort()
    else:
        end.wait()
        end.wait()
        rb.close()

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

for number in range(writers):
    threading.Thread(target=write, args=(number,)).start()
try:
    begin.wait()
    first, before, start = asked[0], cpu(), time.monotonic()
    print("connected", flush=True)
    begin.wait()
    end.wait()
    said = {"asked": asked[0] - first, "cpu": cpu() - before, "seconds": time.monotonic() - start}
    print("written", json.dumps(said), flush=True)
    while not os.path.exists(go):
        time.sleep(0.1)
    end.wait()
except threading.BrokenBarrierError:
    print("failed", errors[:3], len(errors), flush=True)
"""


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
def test_connections_and_requests_of_many_writers(tmp_path):
    folders = [tmp_path / f"store-{number}" for number in range(STORES)]
    for folder in folders:
        with ReplayBuffer(storage=LazyMemmapStorage(1 << 15, scratch_dir=folder), batch_size=32) as rb:
            rb.extend({"who": torch.tensor([-1]), "step": torch.zeros(1).long(), "data": torch.zeros(1, 16).long()})
    wire = Wire(tmp_path, stress.chance("size", "wire"))
    wire.delay_s, wire.loss = 0.001, 0.0005
    told, programs = tmp_path / "told", []

    def said():
        return json.loads(told.read_text())

    try:
        programs.append(wire.start(1, SERVERS, folders=[str(folder) for folder in folders], told=str(told)))
        programs[0].until("ready", 200)
        until(told.exists, 60)
        values = {"stores": STORES, "writers": WRITERS, "rows": ROWS, "messages": MESSAGES, "interval": INTERVAL_S}
        programs.append(wire.start(2, CLIENTS, go=str(tmp_path / "go"), **values))
        programs[1].until("connected", stress.size(200, 3000))
        before = said()
        programs[1].until("}", stress.size(200, 3000))
        after, clients = said(), json.loads(programs[1].out.rpartition("written")[2])
        (tmp_path / "go").touch()
        assert programs[1].wait(stress.size(200, 3000)) == 0, programs[1].err
    finally:
        for program in programs:
            program.kill()
        wire.close()
    messages = WRITERS * (MESSAGES - 1)
    print(
        f"{STORES} stores, {WRITERS} writers: {sum(after['connections'])} connections, {min(after['connections'])} to "
        f"{max(after['connections'])} a store, {after['threads']} threads; {messages} messages in {clients['seconds']:.0f} s and "
        f"{clients['asked']} other requests; CPU of a message: {(after['cpu'] - before['cpu']) / messages * 1e3:.2f} ms at servers, "
        f"{clients['cpu'] / messages * 1e3:.2f} ms at writers; {wire.lost} packets lost"
    )
    # As the page says: one stream for each writer, to one store; and what is asked are writes.
    assert WRITERS <= sum(after["connections"]) <= 1.2 * WRITERS
    assert clients["asked"] <= 0.2 * messages
    check_rows(folders)


def check_rows(folders):
    """Of each writer, every step is in one store, in order."""
    found = {}
    for folder in folders:
        with ReplayBuffer.open(folder, unclean="accept") as rb:
            rows = rb[:]
        assert torch.equal(rows["data"], rows["step"].unsqueeze(1).expand(-1, 16))
        for who, step in zip(rows["who"].tolist(), rows["step"].tolist(), strict=True):
            found.setdefault(who, []).append(step)
    found.pop(-1)
    assert found == {number: list(range(MESSAGES * ROWS)) for number in range(WRITERS)}
