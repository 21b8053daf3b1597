"""The endpoint, by the rules: whatever is not allowed is refused, and many requests are one save."""

import contextlib
import gc
import json
import os
import random
import re
import socket
import stat
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from engram import Ranks
from engram._support import http
from engram.checkpoint import requests as endpoints
from engram.saved import attempts
from engram.saved.checkpoints import Checkpoint
from tests import stress
from tests.ranks.jobs import buffer, checkpointer, done, job, play
from tests.ranks.processes import wait_for
from tests.waiting import Limit


def connected(endpoint):
    if not endpoint.address.startswith("unix:"):
        host, port = endpoint.address.split(":")
        return socket.create_connection((host, int(port)))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(endpoint.address.removeprefix("unix:"))
    return connection


def send(endpoint, raw):
    """The code and the whole answer to some bytes."""
    with connected(endpoint) as connection:
        connection.settimeout(60)
        connection.sendall(raw)
        said = b""
        while piece := connection.recv(65536):
            said += piece
    return int(said.split()[1]), said


def call(endpoint, method="POST", path="/checkpoint", body=b"", **headers):
    token = endpoint.token_file.read_text().strip()
    usual = {"Host": "localhost", "Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    usual |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in usual.items() if value is not None]
    if "Content-Length" not in usual:
        lines.append(f"Content-Length: {len(body)}")
    raw = "\r\n".join([f"{method} {path} HTTP/1.1", *lines]).encode() + b"\r\n\r\n" + body
    return send(endpoint, raw)


def said(endpoint, *args, **more):
    code, raw = call(endpoint, *args, **more)
    return code, json.loads(raw.partition(b"\r\n\r\n")[2] or b"null")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No thread is too slow to read, or to give a place back."""
    monkeypatch.setattr(http, "READ_S", 60.0)
    monkeypatch.setattr(http, "SEND_S", 60.0)


@pytest.fixture(params=["unix", "tcp"])
def served(request, tmp_path):
    ck = checkpointer(tmp_path / "root", buffer(), Ranks.local(), poll_every=1)
    play(ck._job.buffer, 0, 0, [3])
    with ck.serve(None if request.param == "unix" else "127.0.0.1:0", interval=0.0) as endpoint:
        yield ck, endpoint


def test_request_status_and_list(served):
    ck, endpoint = served
    code, asked = said(endpoint)
    assert code == 202
    assert said(endpoint, "GET", f"/checkpoint/{asked['id']}")[1]["state"] == "asked"
    name = ck.poll(5).wait(60).name
    assert said(endpoint, "GET", f"/checkpoint/{asked['id']}") == (
        200,
        {
            "id": asked["id"],
            "state": "complete",
            "checkpoint": name,
            "error": None,
            "ranks": [{"rank": 0, "state": "saved"}],
        },
    )
    assert said(endpoint, "GET", "/checkpoints") == (200, [{"name": name, "step": 5, "good": True}])


def test_all_ranks_save_and_the_state_of_each_is_told(tmp_path):
    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks, poll_every=2)
        play(ck._job.buffer, rank, 0, [3])
        if rank == 1:
            ck._job.write_parts = lambda *_: (_ for _ in ()).throw(OSError(f"no space at {tmp_path}"))
        with ck.serve() as endpoint:
            assert (endpoint is None) == (rank != 0)
            if rank == 0:
                asked = said(endpoint)[1]["id"]
            for step in range(1, 3):
                handle = ck.poll(step)
            while not handle.done:
                time.sleep(0.01)
            if rank == 0:
                _, raw = call(endpoint, "GET", f"/checkpoint/{asked}")
                assert str(tmp_path).encode() not in raw
                return json.loads(raw.partition(b"\r\n\r\n")[2])
        return None

    state = done(job(3, act))[0]
    assert state["state"] == "failed"
    assert state["error"] == "RankFailed"
    assert [it["rank"] for it in state["ranks"]] == [0, 1, 2]
    assert [it["state"] == "failed" for it in state["ranks"]] == [False, True, False]


def test_two_requests_to_a_job_are_one_checkpoint_of_all_ranks(tmp_path):
    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks, poll_every=3)
        play(ck._job.buffer, rank, 0, [3])
        with ck.serve() as endpoint:
            asked = [said(endpoint) for _ in range(2)] if rank == 0 else []
            ranks.gather(b"", 60.0)
            saved = [handle.wait(60).name for step in range(1, 10) if (handle := ck.poll(step)) is not None]
            assert len(saved) == 1
            if rank:
                return saved
            assert asked[0] == asked[1]
            assert asked[0][0] == 202
            state = said(endpoint, "GET", f"/checkpoint/{asked[0][1]['id']}")[1]
            assert (state["state"], state["checkpoint"]) == ("complete", saved[0])
            assert state["ranks"] == [{"rank": rank, "state": "saved"} for rank in range(3)]
        return saved

    saved = done(job(3, act))
    assert saved[0] == saved[1] == saved[2]
    with Checkpoint(tmp_path / saved[0][0]) as checkpoint:
        assert checkpoint.manifest.steps_by_rank == (3, 3, 3)


def test_rule_14_nobody_else_on_this_or_other_machines_can_connect(tmp_path):
    ck = checkpointer(tmp_path, buffer(), Ranks.local())
    with ck.serve() as endpoint:
        path = endpoint.address.removeprefix("unix:")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert not os.path.exists(os.path.dirname(path))
    for address in ("0.0.0.0:80", "localhost:80", ":80", "192.168.0.1:80", "127.0.0.1:x", "127.0.0.1:99999", "[::]:1"):
        with pytest.raises(ValueError, match="serve: address: expected"), ck.serve(address):
            pass


def test_rule_15_the_token_lies_in_a_file_of_ours_and_nowhere_else(tmp_path, caplog):
    ck = checkpointer(tmp_path, buffer(), Ranks.local())
    file = tmp_path / "token"
    with caplog.at_level("DEBUG"), ck.serve(token_file=file) as endpoint:
        token = file.read_text().strip()
        assert re.fullmatch("[0-9a-f]{64}", token)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert call(endpoint)[0] == 202
        for wrong in ("", token[:-1], token[:-1] + ("0" if token[-1] != "0" else "1"), token.upper() + "x"):
            assert call(endpoint, Authorization=f"Bearer {wrong}")[0] == 401
        assert call(endpoint, Authorization=None)[0] == 401
        assert call(endpoint, Authorization=f"Basic {token}")[0] == 401
        assert call(endpoint, path=f"/checkpoint?token={token}", Authorization=None)[0] == 401
    assert token not in caplog.text
    with ck.serve(token_file=file):  # used again
        assert file.read_text().strip() == token
    file.chmod(0o644)
    with pytest.raises(PermissionError, match="mode 644"), ck.serve(token_file=file):
        pass
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(ValueError, match="64 hex digits"), ck.serve(token_file=file):
        pass
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(OSError, match="link"), ck.serve(token_file=link):
        pass


def test_rules_16_and_20_what_is_not_listed_is_refused(served):
    ck, endpoint = served
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "HEAD", "TRACE", "GET"):
        assert call(endpoint, method)[0] == 405
    for method in ("POST", "DELETE", "PUT"):
        assert call(endpoint, method, "/checkpoints")[0] == 405
    for path in (
        "/",
        "/checkpoint/",
        "/checkpoint/../x",
        "/checkpoints/1",
        "/load",
        "/checkpoint/" + "0" * 15,
        "/metrics",
    ):
        assert call(endpoint, "GET", path)[0] == 404
    assert call(endpoint, "GET", "/checkpoint/" + "0" * 16)[0] == 404
    assert not ck.requests.any


def test_rule_17_web_pages_are_refused(served):
    ck, endpoint = served
    for headers in (
        {"Origin": "http://localhost"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "none"},
        {"Host": "evil.example"},
        {"Host": "localhost.evil.example"},
        {"Host": None},
    ):
        assert call(endpoint, **headers)[0] == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        assert call(endpoint, Content_Type=kind)[0] == 415
    assert not ck.requests.any
    code, raw = call(endpoint)
    assert code == 202
    assert b"access-control" not in raw.lower()


def test_rule_18_nothing_is_chosen_by_the_client(served):
    ck, endpoint = served
    for body in (b'{"path": "/tmp/x"}', b"[]", b"null", b'{"name": "a"}'):
        assert call(endpoint, body=body)[0] == 400
    assert call(endpoint, "GET", "/checkpoints", body=b"{}")[0] == 400
    assert not ck.requests.any
    assert call(endpoint, body=b"{}")[0] == 202


def test_rule_19_limits(served, monkeypatch):
    ck, endpoint = served
    assert call(endpoint, body=b" " * 4096)[0] == 202
    ck.poll(1).wait(60)
    assert call(endpoint, body=b" " * 4097)[0] == 413
    assert call(endpoint, X="a" * 9000)[0] == 431
    with monkeypatch.context() as patch:
        patch.setattr(http, "READ_S", 0.2)
        limit = Limit(50)
        assert send(endpoint, b"POST /checkpoint HTTP/1.1\r\n")[0] == 408
        assert call(endpoint, Content_Length="10")[0] == 408
        limit.check("going on")
    for raw in (
        b"nonsense\r\n\r\n",
        b"POST /checkpoint HTTP/2\r\n\r\n",
        b"POST  /checkpoint HTTP/1.1\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\n folded: x\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"POST /checkpoint\r\n\r\n",  # HTTP/0.9
        b"POST /checkpoint HTTP/1.99\r\n\r\n",
        b"POST http://localhost/checkpoint HTTP/1.1\r\n\r\n",
        b"POST /a\x01 HTTP/1.1\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nContent-Length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST /checkpoint HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab",
        b"POST /checkpoint HTTP/1.1\r\nContent-Length: +2\r\n\r\nab",
        b"POST /checkpoint HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\na",
        b"POST /checkpoint HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nab",
        b"POST /checkpoint HTTP/1.1\r\nContent-Length: 2\r\n\r\nabPOST /checkpoint HTTP/1.1\r\n\r\n",  # two at once
        b"POST /checkpoint HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nX: a\rOrigin: b\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nX: a\nOrigin: b\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nX: a\r\n folded: x\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nX: a\x00\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\nX: a\x85Origin: b\r\n\r\n",
        b"POST /checkpoint HTTP/1.1\r\n: b\r\n\r\n",
    ):
        assert send(endpoint, raw)[0] == 400, raw
    assert not ck.requests.any


def test_rule_19_connections(tmp_path, monkeypatch):
    ck = checkpointer(tmp_path, buffer(), Ranks.local())
    with ck.serve("127.0.0.1:0") as endpoint:
        host, port = endpoint.address.split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(16)]
        wait_for(lambda: len(endpoint._server._idle) == 16)
        with monkeypatch.context() as patch:
            patch.setattr(http, "READ_S", 0.5)
            assert send(endpoint, b"")[0] == 503
        for connection in idle:
            connection.close()
        assert call(endpoint)[0] == 202


def test_rule_19_a_head_is_read_in_linear_time(served):
    """Blanks that several parts of a pattern match made it cubic: a head of 8 KiB stopped the training process for minutes."""
    _, endpoint = served
    began = time.process_time()
    assert send(endpoint, b"POST /checkpoint HTTP/1.1\r\nX:" + b" " * 3000 + b"\x01\r\n\r\n")[0] == 400
    assert time.process_time() - began < 5  # of this process alone, however busy the machine: it was 20 s


def test_rule_19_the_time_to_read_is_for_the_whole_request(served, monkeypatch):
    monkeypatch.setattr(http, "READ_S", 0.3)
    _, endpoint = served
    with connected(endpoint) as slow:
        slow.settimeout(0.02)
        slow.sendall(b"POST /checkpoint HTTP/1.1\r\nX: ")
        for _ in range(1000):
            with contextlib.suppress(TimeoutError):
                assert slow.recv(65536).startswith(b"HTTP/1.1 408")
                break
            slow.sendall(b"a")
        else:
            pytest.fail("each byte began the time again")


TOKEN = b"<the token>"
SLOW = {
    "silent": b"",
    "half a head": b"POST /checkpoint HTTP/1.1\r\nHost:",
    "half a body": b"POST /checkpoint HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + TOKEN + b"\r\n"
    b"Content-Type: application/json\r\nContent-Length: 4096\r\n\r\n{",
}


@pytest.mark.parametrize("now_and_then", [False, True])
@pytest.mark.parametrize("first", SLOW)
def test_slow_connections_do_not_hold_up_a_caller(served, first, now_and_then, monkeypatch):
    """Forty that say nothing, or begin and do not end; some say a byte now and then.

    Each may take ten minutes: a caller who had to wait for one of them would be seen. The others are answered in milliseconds.
    """
    monkeypatch.setattr(http, "READ_S", 600.0)
    _, endpoint = served
    first = SLOW[first].replace(TOKEN, endpoint.token_file.read_bytes().strip())
    with contextlib.ExitStack() as stack:
        slow, over = [], threading.Event()
        for _ in range(40):
            slow.append(stack.enter_context(connected(endpoint)))
            with contextlib.suppress(OSError):  # refused already
                slow[-1].sendall(first)

        def drip():
            while not over.wait(0.05):
                for it in slow[:-1:2]:
                    with contextlib.suppress(OSError):
                        it.sendall(b" " if first else b"P")

        dripping = threading.Thread(target=drip)
        if now_and_then:
            dripping.start()
            stack.callback(dripping.join)
            stack.callback(over.set)
        for _ in range(3):
            assert call(endpoint)[0] == 202
            assert call(endpoint, "GET", "/checkpoints")[0] == 200


def test_the_oldest_idle_connection_loses_its_place(served, monkeypatch):
    """One at a time, and it hears of it; the others go on."""
    monkeypatch.setattr(http, "READ_S", 600.0)
    _, endpoint = served
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(endpoint)) for _ in range(16)]
        for it in idle:
            it.settimeout(60)
            it.sendall(b"GET /checkpoints HTTP/1.1\r\n")
        assert call(endpoint)[0] == 202
        assert idle[0].recv(65536).startswith(b"HTTP/1.1 503")
        for it in idle[1:]:
            it.sendall(b"\r\n")
            assert it.recv(65536).startswith(b"HTTP/1.1 403")  # for want of a host


def test_no_thread_for_a_connection_costs_that_connection_alone(served, monkeypatch):
    _, endpoint = served
    real, failed = threading.Thread.start, []

    def start(thread):
        if thread.name == "engram-http" and len(failed) < 20:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(20):
        with connected(endpoint) as connection:
            connection.settimeout(60)
            assert connection.recv(1) == b""
    assert call(endpoint)[0] == 202
    assert len(failed) == 20


def test_a_failure_is_a_code_and_says_nothing_else(served, monkeypatch, caplog):
    _, endpoint = served
    monkeypatch.setattr(endpoint, "_listed", lambda: (_ for _ in ()).throw(OSError("no space at /secret")))
    code, raw = call(endpoint, "GET", "/checkpoints")
    assert code == 500
    assert b"secret" not in raw
    assert raw.endswith(b"\r\n\r\n")
    assert "no space at /secret" in caplog.text


def test_a_minimum_interval(tmp_path, monkeypatch):
    ck = checkpointer(tmp_path, buffer(), Ranks.local(), poll_every=1)
    play(ck._job.buffer, 0, 0, [3])
    later = 0.0  # than it is, for the endpoint
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later, sleep=time.sleep)
    monkeypatch.setattr(endpoints, "time", clock)
    with ck.serve(interval=1000.0) as endpoint:
        assert call(endpoint)[0] == 202
        ck.poll(1).wait(60)
        assert call(endpoint)[0] == 429
        assert not ck.requests.any
        later = 1000.0
        assert call(endpoint)[0] == 202
        ck.poll(2).wait(60)
        later = 0.0
        assert call(endpoint)[0] == 429
        later = 1000.0  # it counts from the end of the save, whether anybody asked since or not
        assert call(endpoint)[0] == 202


def held():
    """What a server must not have more of in the end: descriptors, threads, objects. Its connections are closed soon."""
    wait_for(lambda: sum(it.name == "engram-http" for it in threading.enumerate()) == 1)
    gc.collect()
    ours = sum(it.name.startswith("engram") for it in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), ours, len(gc.get_objects())


def client(endpoint, number, n):
    """Requests of all kinds; the codes and ids that were answered."""
    draws, codes, ids = random.Random(number), Counter(), set()
    for _ in range(n):
        kind = draws.random()
        if kind < 0.5:
            code, answer = said(endpoint)
            ids.add(answer["id"])
        elif kind < 0.7:
            code, _ = said(endpoint, "GET", "/checkpoints")
        elif kind < 0.8 and ids:
            code, _ = said(endpoint, "GET", f"/checkpoint/{min(ids)}")
        elif kind < 0.9:
            code, _ = call(endpoint, Authorization="Bearer " + "0" * 64)
        else:
            code, _ = send(endpoint, draws.randbytes(20) + b"\r\n\r\n")
        codes[code] += 1
    return codes, ids


def many_at_once_are_one_save_and_leave_nothing_behind(tmp_path, n):
    """Of several clients, while a save goes on; also requests that are refused."""
    ck = checkpointer(tmp_path, buffer(), Ranks.local(), poll_every=1)
    play(ck._job.buffer, 0, 0, [3])
    gate = threading.Event()
    real = ck._job.write_parts
    ck._job.write_parts = lambda *args: gate.wait(300) and real(*args)
    clients = 6
    with ck.serve(interval=60.0) as endpoint, ThreadPoolExecutor(clients) as pool, contextlib.ExitStack() as stack:
        stack.callback(gate.set)  # where this fails, too: the interpreter waits for the save
        before = [said(endpoint)[1]["id"] for _ in range(3)]
        handle = ck.poll(1)
        list(pool.map(lambda i: client(endpoint, i, 20), range(clients)))
        fds, threads, objects = held()
        answers = list(pool.map(lambda i: client(endpoint, i, n), range(clients)))
        now = held()
        assert now[:2] == (fds, threads)
        assert now[2] < objects + clients * n / 4
        gate.set()
        handle.wait(60)
        ck.poll(2)
    codes, ids = sum((it[0] for it in answers), Counter()), set().union(*(it[1] for it in answers))
    assert codes.keys() == {200, 202, 400, 401}
    assert codes.total() == clients * n
    assert ids == set(before)
    assert len(ids) == len(attempts.names(tmp_path)) == 1


@pytest.mark.stress
def test_many_requests_at_once_are_one_save_and_leave_nothing_behind(tmp_path):
    many_at_once_are_one_save_and_leave_nothing_behind(tmp_path, stress.size(200, 2000))


def test_a_mutant_that_remembers_every_request_is_found(tmp_path, monkeypatch):
    kept, real = [], http.read

    def read(connection):
        kept.append(real(connection))
        return kept[-1]

    monkeypatch.setattr(http, "read", read)
    with pytest.raises(AssertionError):
        many_at_once_are_one_save_and_leave_nothing_behind(tmp_path, 60)
