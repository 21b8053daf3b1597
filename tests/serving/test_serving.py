"""Servers: where they listen, whom they let in, how they begin and end."""

import os
import re
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pyarrow import flight

import engram
from engram import IncompatibleStore, LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from engram.remote import protocol
from engram.remote.protocol import address_of, addresses_of, token_in
from engram.serving.server import Listening, Server, listening, run
from engram.serving.service import Service
from tests import fresh
from tests.serving.servers import serving, token_file
from tests.waiting import until


@pytest.fixture
def store(tmp_path):
    """The folder of a store of ten rows."""
    with ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "store"), batch_size=4) as rb:
        rb.extend({"a": torch.arange(10)})
    return tmp_path / "store"


def test_importing_engram_and_using_buffers_loads_neither_pyarrow_nor_ray():
    fresh.run("""
        import sys
        import torch, engram
        sys.modules["ray"] = None  # importing it raises: torchrl, which this interpreter has imported, loads it
        [getattr(engram, name) for name in engram.__all__]
        rb = engram.ReplayBuffer(storage=engram.LazyTensorStorage(10), batch_size=2, prefetch=2)
        rb.extend({"a": torch.arange(5)})
        rb.sample()
        assert "pyarrow" not in sys.modules
    """)


@pytest.mark.parametrize("listen", ["unix", "127.0.0.1:0"])
def test_a_token_is_asked_for_by_the_server_that_has_one(store, tmp_path, listen):
    token = token_file(tmp_path)
    with serving(store, f"unix:{store}.sock" if listen == "unix" else listen, token) as server:
        with ReplayBuffer.connect(server.address, token=token) as remote:
            assert len(remote) == 10
            assert "a-secret-word" not in repr(remote) + repr(vars(remote.storage)) + repr(
                remote.storage.connection.access
            )
        (tmp_path / "wrong").mkdir()
        wrong = token_file(tmp_path / "wrong", "another-word")
        for given in (None, wrong):
            with pytest.raises(PermissionError, match="token"):
                ReplayBuffer.connect(server.address, token=given)
        assert "secret" not in server.program.out + server.program.err


def test_token_files_that_others_may_read_are_refused(tmp_path):
    for mode in (0o640, 0o604, 0o666):
        with pytest.raises(PermissionError, match="chmod 600"):
            token_in(token_file(tmp_path, mode=mode), "serve")
    for word in ("", "two words", "é"):
        with pytest.raises(ValueError, match="one word"):
            token_in(token_file(tmp_path, word), "serve")
    with pytest.raises(TypeError, match="path"):
        token_in(b"raw", "serve")


def test_where_listening_would_be_unsafe_it_is_refused(tmp_path):
    token = token_file(tmp_path)
    for address in ("127.0.0.1:0", "localhost:0", "0.0.0.0:0"):
        with pytest.raises(ValueError, match="expected a token"):
            listening(address, None, None, None, insecure=False)
    for address in ("0.0.0.0:0", "192.168.1.2:0", "127.example.org:0"):
        with pytest.raises(ValueError, match="tls_cert"):
            listening(address, token, None, None, insecure=False)
        assert listening(address, None, None, None, insecure=True).token == b""
    with pytest.raises(ValueError, match="together"):
        listening("127.0.0.1:0", token, "cert", None, insecure=False)
    found = listening("[::1]:0", token, None, None, insecure=False)
    assert found.token == b"a-secret-word"
    assert "secret" not in repr(found)
    assert found.address.uri == "grpc://[::1]:0"


def test_the_folder_of_sockets_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"engram-{os.geteuid()}"
    if len(str(tmp_path)) <= 60:
        at = listening("unix:", None, None, None, insecure=False).address
        assert at.host.startswith(str(folder))
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)
        with pytest.raises(PermissionError, match="0700"):
            listening("unix:", None, None, None, insecure=False)
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(FileExistsError):
        listening(f"unix:{taken}", None, None, None, insecure=False)
    with pytest.raises(FileNotFoundError):
        listening(f"unix:{tmp_path}/no/where", None, None, None, insecure=False)


def test_a_socket_is_not_taken_from_a_server_that_answers(store):
    with serving(store) as server:
        mode = os.stat(f"{store}.sock").st_mode
        assert mode & 0o777 == 0o600
        with pytest.raises(FileExistsError, match="answers"):
            listening(server.address, None, None, None, insecure=False)
        server.kill()
        assert os.path.exists(f"{store}.sock")
        listening(server.address, None, None, None, insecure=False)
        assert not os.path.exists(f"{store}.sock")


def test_tls(store, tmp_path):
    cert, key, token = tmp_path / "cert.pem", tmp_path / "key.pem", token_file(tmp_path)
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = [*command.split(), "-addext", names, "-keyout", key, "-out", cert]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("makes its certificate with openssl")
    with serving(store, "127.0.0.1:0", token, cert, key) as server:
        assert server.address.startswith("grpc+tls://127.0.0.1:")
        with ReplayBuffer.connect(server.address, token=token, tls_root=cert) as remote:
            assert remote.sample()["a"].shape == (4,)
        with pytest.raises(ConnectionError):
            ReplayBuffer.connect(server.address, token=token, patience=0)  # nobody vouches for the certificate
        with pytest.raises(ConnectionError):
            ReplayBuffer.connect(server.address.removeprefix("grpc+tls://"), token=token, patience=0)


def test_another_protocol_is_refused_with_both_versions(store, monkeypatch):
    with serving(store) as server:
        known = protocol.PROTOCOL
        monkeypatch.setattr(protocol, "PROTOCOL", known + 1)
        with pytest.raises(IncompatibleStore, match=f"expected protocol {known}, of engram .*, got {known + 1}"):
            ReplayBuffer.connect(server.address)


def test_a_server_that_is_asked_to_end_removes_its_socket_and_clients_go_on_at_the_next(store):
    with serving(store) as server, ReplayBuffer.connect(server.address, prefetch=2) as remote:
        remote.sample()
        assert server.stop() == 0
        assert not os.path.exists(f"{store}.sock")
        with serving(store):
            for _ in range(40):  # those that were under way, and more
                remote.sample()
            assert remote.extend({"a": torch.arange(3)}).tolist() == [10, 11, 12]


def test_a_server_of_another_store_does_not_stand_in(store, tmp_path):
    with ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=tmp_path / "other"), batch_size=4) as rb:
        rb.extend({"a": torch.arange(9)})
    with serving(store) as one, ReplayBuffer.connect(one.address) as remote:
        remote.sample()
        one.kill()
        with serving(tmp_path / "other", one.address), pytest.raises(ValueError, match="another store"):
            remote.sample()


def test_addresses_with_commas_take_the_scheme_of_the_first():
    found = addresses_of("grpc+tls://a:1,b:2", "connect")
    assert [str(one) for one in found] == ["grpc+tls://a:1", "grpc+tls://b:2"]


def test_serve_says_what_it_cannot_serve(tmp_path):
    for storage, error in ((LazyTensorStorage(9), TypeError), (ListStorage(9), TypeError)):
        with pytest.raises(error, match="share"):
            engram.serve(ReplayBuffer(storage=storage))
    with pytest.raises(RuntimeError, match="nothing was ever written"):
        engram.serve(ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=tmp_path / "new")))
    with pytest.raises(TypeError, match="expected a ReplayBuffer"):
        engram.serve(3)


def test_the_command_line_serves_until_it_is_interrupted(store, tmp_path):
    code = "from engram.cli import main; main(arguments, prog_name='engram')"
    program = fresh.start(code, arguments=["serve", str(store), "--listen", f"unix:{store}.sock"]).until("\n")
    address = program.out.strip()
    assert address == f"unix:{store}.sock"
    assert fresh.run(code, arguments=["health", address]) == "ok"
    os.kill(program.pid, signal.SIGINT)
    assert program.wait() == 0
    gone = fresh.start(code, arguments=["health", address])
    assert gone.wait() == 1
    assert "no server answered" in gone.err
    (tmp_path / "empty").mkdir()
    other = socket.create_server(("127.0.0.1", 0))
    taken = f"127.0.0.1:{other.getsockname()[1]}"
    for arguments, status, said in (
        (["serve", str(store), "--listen", "127.0.0.1:0"], 1, "expected a token"),
        (
            ["serve", str(store), "--listen", taken, "--insecure"],
            1,
            rf"\nError: serve: grpc://{taken}: cannot listen there",
        ),
        (["serve", str(store), "--metrics", taken], 1, rf"^Error: {taken}: address already in use\.$"),
        (["serve", str(tmp_path / "empty")], 2, "or a store, found none"),
    ):
        refused = fresh.start(code, arguments=arguments)
        assert refused.wait() == status
        assert re.search(said, refused.err), refused.err
    other.close()


@pytest.mark.parametrize("fails", ["opening", "showing", "listening", "telling"])
def test_serving_that_fails_leaves_the_process_as_it_was(store, tmp_path, monkeypatch, fails):
    """Programs that it starts later would inherit blocked signals, and never hear of Ctrl-C."""
    closed = []
    monkeypatch.setattr(ReplayBuffer, "close", lambda self, close=ReplayBuffer.close: closed.append(close(self)))

    def act(name):
        if name == fails:
            raise OSError(f"while {name}")

    place = tmp_path / "none" / "socket" if fails == "listening" else tmp_path / "socket"
    at = Listening(address_of(f"unix:{place}", "test"), b"", None)
    signals, files = signal.pthread_sigmask(signal.SIG_BLOCK, []), os.umask(0o22)
    try:
        with pytest.raises(
            OSError, match={"opening": "expected", "listening": "cannot listen there"}.get(fails, fails)
        ):
            run(
                tmp_path / "nothing" if fails == "opening" else store,
                at,
                lambda address: act("telling"),
                lambda rb: act("showing"),
            )
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == signals
        assert not signals & {signal.SIGINT, signal.SIGTERM}
        assert len(closed) == (fails != "opening")
    finally:
        left = os.umask(files)
    assert left == 0o22


def test_actions_at_a_server_that_leaves_are_done_or_asked_of_the_next(store, monkeypatch):
    monkeypatch.setattr("engram.serving.server._DRAIN_TIMEOUT_S", 60.0)
    begun, go, ended = (threading.Event() for _ in range(3))
    rb = ReplayBuffer.open(store)
    service = Service(rb)
    server = Server(service, address_of(f"unix:{store}.sock", "test"))
    do = service.do

    def slow(command, *more):
        if isinstance(command, protocol.Stats):
            begun.set()
            assert go.wait(60)
            assert not ended.is_set()
        return do(command, *more)

    monkeypatch.setattr(service, "do", slow)
    remote = ReplayBuffer.connect(f"unix:{store}.sock", patience=0)
    with ThreadPoolExecutor(2) as threads:
        size = threads.submit(len, remote)
        assert begun.wait(60)
        drained = threads.submit(server.drain)
        drained.add_done_callback(lambda _: ended.set())
        until(lambda: server._draining)
        with flight.connect(f"grpc+unix://{store}.sock") as client, pytest.raises(flight.FlightUnavailableError):
            list(client.do_action(flight.Action("health", b"{}")))
        go.set()
        assert size.result(60) == 10
        assert drained.result(60)
    with pytest.raises(ConnectionError, match="the server leaves"):
        len(remote)
    remote.close()
    rb.close()
    server.shutdown()
