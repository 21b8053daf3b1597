"""Who gets in, who keeps others out, and what those hear that do not get in."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from pyarrow import flight

from engram import LazyMemmapStorage, ReplayBuffer
from engram.cli import main
from engram.remote import connection
from engram.serving import server as doors
from tests import fresh
from tests.serving.servers import SERVER, Served, serving, token_file
from tests.waiting import until

#: Begins a server with few files, and lets a connection that says nothing stay for a second.
FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from engram.serving import server
server.SILENT_S, server._INTERVAL_S, server.MAX_STREAMS = silent, 0.05, streams
"""


@pytest.fixture
def store(tmp_path):
    """The folder of a store of ten rows."""
    with ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "store"), batch_size=4) as rb:
        rb.extend({"a": torch.arange(10)})
    return tmp_path / "store"


@contextlib.contextmanager
def few(store, token=None, *, soft=256, hard=256, silent=1.0, streams=1024, listen="127.0.0.1:0"):
    values = {"folder": str(store), "listen": listen, "insecure": False, "cert": None, "key": None}
    limits = {"soft": soft, "hard": hard, "silent": silent, "streams": streams}
    token = None if token is None else str(token)
    server = Served(fresh.start(FEW + SERVER, token=token, **values, **limits))
    try:
        yield server
    finally:
        server.kill()


def certificate(folder, name, names="DNS:localhost,IP:127.0.0.1", signer=None):
    """Paths of a certificate and its key, signed by itself or by another one."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj"
    command = [*command.split(), f"/CN={name}", "-addext", f"subjectAltName={names}", "-keyout", key, "-out", cert]
    if signer is not None:
        command += ["-CA", signer[0], "-CAkey", signer[1]]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("makes its certificates with openssl")
    return cert, key


def silent(place, n):
    host, _, port = place.removeprefix("grpc+tls://").removeprefix("grpc://").rpartition(":")
    found = []
    for _ in range(n):
        one = socket.socket()
        one.settimeout(60)
        one.connect((host, int(port)))
        found.append(one)
    return found


def is_closed(one):
    """Whether the other end has hung up, behind what it had said."""
    with one, contextlib.suppress(ConnectionError):
        while one.recv(4096):
            pass
    return True


def test_silent_connections_are_closed_and_clients_stay(store, tmp_path):
    token = token_file(tmp_path)
    with few(store, token) as server, ReplayBuffer.connect(server.address, token=token) as remote:
        remote.sample()
        knocking = silent(server.address, 300)  # more than there are files
        assert len(remote.sample()["a"]) == 4
        assert all(is_closed(one) for one in knocking)
        with ReplayBuffer.connect(server.address, token=token) as other:
            assert other.sample()["a"].shape == (4,)
        assert len(remote.sample()["a"]) == 4


def test_a_connection_that_is_refused_for_its_token_is_closed_too(store, tmp_path):
    token = token_file(tmp_path)
    with few(store, token) as server:
        client = flight.connect(server.address)
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_action(flight.Action("health", b"{}")))
        pid = server.program.pid
        until(lambda: not any(of(pid, server.address)))
        client.close()


def of(pid, address):
    """The connections of a process to its port."""
    port = int(address.rpartition(":")[2])
    files = {
        os.readlink(f"/proc/{pid}/fd/{fd}")
        for fd in os.listdir(f"/proc/{pid}/fd")
        if os.path.lexists(f"/proc/{pid}/fd/{fd}")
    }
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        one
        for one in lines
        if int(one[1].rpartition(":")[2], 16) == port and f"socket:[{one[9]}]" in files and one[3] == "01"
    ]


def test_a_quiet_client_that_has_called_stays(store, tmp_path):
    token = token_file(tmp_path)
    with few(store, token) as server, ReplayBuffer.connect(server.address, token=token) as remote:
        remote.sample()
        opened = connection.Connection._open
        knocking = silent(server.address, 3)
        assert all(is_closed(one) for one in knocking)  # whoever was silent as long is gone
        try:
            connection.Connection._open = None  # it would have to connect again
            assert remote.sample()["a"].shape == (4,)
            assert len(remote) == 10
        finally:
            connection.Connection._open = opened


def test_a_client_that_calls_while_connections_are_listed_stays(monkeypatch):
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        door = doors.Doors(listening.getsockname()[1])
        door.close()  # its thread: here all looks are by hand
        listed = door._connections
        ends = []

        def connect():
            client = opened.enter_context(socket.create_connection(listening.getsockname()))
            client.settimeout(60)
            ends.append((client, opened.enter_context(listening.accept()[0])))
            return f"ipv4:127.0.0.1:{client.getsockname()[1]}"

        def slowly():
            found = listed()
            door.know(connect())
            return found

        with monkeypatch.context() as patched:
            patched.setattr(door, "_connections", slowly)
            door.look(0.0)
        connect()  # and says nothing
        for now in (1.0, 100.0):
            door.look(now)
        ends[0][1].sendall(b"streamed")
        assert ends[0][0].recv(8) == b"streamed"
        assert is_closed(ends[1][0])
        ends[0][0].close(), ends[0][1].close()
        door.look(200.0)
        assert not door._callers  # of the one that is gone


def test_the_soft_limit_of_files_is_raised(store, tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard <= 256:
        pytest.skip("the system allows no more files")
    with few(store, token_file(tmp_path), soft=256, hard=hard) as server:
        limits = Path(f"/proc/{server.program.pid}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
        assert int(line.split()[3]) == min(hard, doors._OPEN_FILES)


def test_too_many_silent_ones_go_before_their_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = doors.Doors(listener.getsockname()[1])
        one.close()
        far, near = [], []
        for _ in range(3):
            far.append(socket.create_connection(listener.getsockname()))
            near.append(listener.accept()[0])
            one.look(float(len(near)))  # the first one is the oldest
        one.know("ipv4:{}:{}".format(*far[1].getsockname()))
        one.look(3.0)
        [it.settimeout(0.05) for it in far]
        for it in far:
            with pytest.raises(TimeoutError):
                it.recv(1)
        before, doors._SHARE = doors._SHARE, resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # one may stay
        try:
            one.look(4.0)
        finally:
            doors._SHARE = before
        assert is_closed(far[0])
        for it in far[1:]:
            with pytest.raises(TimeoutError):
                it.recv(1)
        [it.close() for it in (*far, *near)]


def test_a_certificate_that_nobody_vouches_for_is_told_at_once(store, tmp_path):
    token = token_file(tmp_path)
    one, other = certificate(tmp_path, "one"), certificate(tmp_path, "other")
    with serving(store, "127.0.0.1:0", token, *one) as server:
        for roots in (None, other[0], [other[0]]):
            with pytest.raises(ConnectionError, match=r"is not trusted \(self-signed certificate\). Pass tls_root="):
                ReplayBuffer.connect(server.address, token=token, tls_root=roots, patience=1e6)
        with pytest.raises(ConnectionError, match=r"is not trusted .* Pass tls_root="):
            ReplayBuffer.connect([server.address, "grpc+tls://127.0.0.1:1"], token=token, patience=1e6)
        with ReplayBuffer.connect(server.address, token=token, tls_root=[other[0], one[0]]) as remote:
            assert remote.sample()["a"].shape == (4,)
        for command in ("health", "top"):
            said = engram(command, server.address, "--token", token)
            assert "--tls-root" in said
            assert "tls_root" not in said
            assert "--token" in engram(command, server.address, "--tls-root", one[0])
    named = certificate(tmp_path, "named", "DNS:elsewhere")
    with (
        serving(store, "127.0.0.1:0", token, *named) as server,
        pytest.raises(ConnectionError, match="not for that name"),
    ):
        ReplayBuffer.connect(server.address, token=token, tls_root=named[0], patience=1e6)
    with serving(store, "127.0.0.1:0", token) as server, pytest.raises(ConnectionError, match="speaks no TLS"):
        ReplayBuffer.connect(server.address.replace("grpc://", "grpc+tls://"), token=token, patience=1e6)


def engram(*command):
    """What it says, and that it fails."""
    done = CliRunner().invoke(main, [*map(str, command)])
    assert done.exit_code == 1, done
    return done.stderr


def test_clients_show_a_certificate_where_one_is_asked_for(store, tmp_path):
    token = token_file(tmp_path)
    server, root, stranger = (certificate(tmp_path, name) for name in ("server", "root", "stranger"))
    client = certificate(tmp_path, "client", signer=root)
    command = ["serve", store, "--listen", "127.0.0.1:0", "--token", token]
    command += ["--tls-cert", server[0], "--tls-key", server[1], "--tls-clients", root[0]]
    with subprocess.Popen(
        [sys.executable, "-m", "engram", *map(str, command)], stdout=subprocess.PIPE, text=True
    ) as program:
        address = program.stdout.readline().strip()
        try:
            how = {"token": token, "tls_root": server[0], "patience": 0}
            with ReplayBuffer.connect(address, tls_cert=client[0], tls_key=client[1], **how) as remote:
                assert remote.sample()["a"].shape == (4,)
            for shown in ({}, {"tls_cert": stranger[0], "tls_key": stranger[1]}):
                with pytest.raises(ConnectionError, match="or a certificate: tls_cert= and tls_key="):
                    ReplayBuffer.connect(address, **shown, **how)
        finally:
            program.terminate()
    for half in ("tls_cert", "tls_key"):
        with pytest.raises(ValueError, match="tls_cert and tls_key together"):
            ReplayBuffer.connect(address, **{half: client[0]})


def test_where_all_streams_are_taken_a_client_waits_and_says_so(store):
    with few(store, streams=2, listen=f"unix:{store}.sock") as server, ReplayBuffer.connect(server.address) as one:
        one.sample(), one.extend({"a": torch.arange(1)})
        assert one.stats()["server_streams"] == 2
        with (
            ReplayBuffer.connect(server.address, patience=0) as other,
            pytest.raises(ConnectionError, match="all streams are taken: 2. .* start another server of the store"),
        ):
            other.sample()
        pauses, pause = [], connection.Connection.pause

        def paused(self, seconds):
            pauses.append(seconds)
            if len(pauses) == 3:
                one.close()  # which makes room
            pause(self, seconds)

        with ReplayBuffer.connect(server.address, patience=1e6) as other, pytest.MonkeyPatch.context() as patched:
            patched.setattr(connection.Connection, "pause", paused)
            assert other.sample()["a"].shape == (4,)
            assert len(pauses) >= 3


BROKEN = """
from engram.serving.service import Service
def fails(self, *_):
    raise KeyError("a fault")
Service.dump_files = Service.count_stream = fails
"""


def test_errors_of_a_server_come_without_its_lines(store, tmp_path):
    values = {"folder": str(store), "listen": f"unix:{store}.sock", "insecure": False}
    server = Served(fresh.start(BROKEN + SERVER, token=None, cert=None, key=None, **values))
    with flight.connect(f"grpc+unix://{store}.sock") as client:
        with pytest.raises((flight.FlightError, pa.ArrowException)) as dump:
            client.do_get(flight.Ticket(b"dump")).read_all()
        there, back = client.do_exchange(flight.FlightDescriptor.for_command(b"learn"))
        with pytest.raises((flight.FlightError, pa.ArrowException)) as stream:
            back.read_chunk()
        with contextlib.suppress(flight.FlightError, pa.ArrowException):
            there.close()
    for found in (dump, stream):
        assert "a fault" in str(found.value)
        assert "Traceback" not in str(found.value)
        assert ".py" not in str(found.value)
    server.kill()
