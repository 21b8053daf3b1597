"""What a hostile client can make a server keep: memory and disk stay within bounds that are said, and the others go on."""

import contextlib
import json
import threading
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import flight

from engram import FrameStack, LazyMemmapStorage, RandomSampler, ReplayBuffer
from engram.remote import wire
from engram.remote.protocol import MAX_MESSAGE
from engram.serving import dumps as limits_of_dumps
from engram.serving import service
from engram.serving.dumps import Dumps, TooMany
from engram.serving.service import Answers, drawn_bytes
from tests import fresh
from tests.serving.servers import SERVER, Served, serving
from tests.waiting import until

#: A server that has room for two answers of 8 MiB and for one dump, and waits for neither. It says which it keeps, and has sent.
SMALL = """
import contextlib
from engram.serving import dumps, service
service.ANSWER_BYTES, service._ROOM_TIMEOUT_S, dumps.MAX_DUMPS = 17 << 20, 0.0, 1
counted, numbers = service.Answers.counted, iter(range(1000))

@contextlib.contextmanager
def told(answers, nbytes):
    with counted(answers, nbytes):
        number = next(numbers)
        print("keeps", number, flush=True)
        yield
    print("sent", number, flush=True)

service.Answers.counted = told
"""
CLIENTS = 60


@pytest.fixture
def small(tmp_path):
    """Such a server, of 16 rows of 1 MiB."""
    with ReplayBuffer(storage=LazyMemmapStorage(16, scratch_dir=tmp_path / "store"), batch_size=8) as rb:
        rb.extend({"a": torch.zeros(16, 1 << 18)})
    values = {"folder": str(tmp_path / "store"), "listen": f"unix:{tmp_path}/sock", "insecure": False}
    server = Served(fresh.start(SMALL + SERVER, token=None, cert=None, key=None, **values))
    yield server
    server.kill()


def own_bytes(pid):
    """Memory of a process that no file and no other process has."""
    line = next(it for it in Path(f"/proc/{pid}/status").read_text().splitlines() if it.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def learning(client, *commands):
    there, back = client.do_exchange(flight.FlightDescriptor.for_command(b"learn"))
    for command in commands:
        there.write_metadata(json.dumps(command).encode())
    return there, back


def said(back):
    return json.loads(back.read_chunk().app_metadata.to_pybytes())


def test_clients_that_read_nothing_do_not_fill_the_memory_of_a_server(small, tmp_path):
    """60 of them ask for 8 MiB each."""
    with ReplayBuffer.connect(small.address) as remote, contextlib.ExitStack() as stack:
        remote.sample()
        small.program.until("sent 0\n")
        before, streams, refused = own_bytes(small.program.pid), [], 0
        for number in range(CLIENTS):
            client = stack.enter_context(flight.connect(f"grpc+unix://{tmp_path}/sock"))
            streams.append(learning(client, {"do": "sample", "rows": 8, "keys": [1]}))
            if number < 2:  # they hold what there is
                small.program.until(f"keeps {number + 1}\n")
            else:
                refused += "did not read within 0 s" in said(streams[-1][1])["message"]
        grown = own_bytes(small.program.pid) - before
        assert refused == CLIENTS - 2
        assert grown < CLIENTS * 8 << 19, f"the server took {grown >> 20} MiB"
        with pytest.raises(RuntimeError, match="Draw again, or fewer rows"):
            remote.sample()
        remote.extend({"a": torch.ones(1, 1 << 18)})  # what else it does goes on
        for _, back in streams[:2]:
            back.cancel()
        until(lambda: draws(remote))


def draws(remote):
    try:
        return len(remote.sample()["a"]) == 8
    except RuntimeError:
        return False


def learning_once(client, command):
    there, back = learning(client, command)
    found = said(back)
    there.close()
    return found


@pytest.mark.parametrize("rows", [1 << 40, MAX_MESSAGE // 32 + 1])
def test_rows_without_bytes_are_counted_all_the_same(tmp_path, rows):
    with ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=tmp_path / "store"), batch_size=4) as rb:
        rb.extend({"a": torch.zeros(9, 0)})
    with serving(tmp_path / "store") as server:
        with flight.connect(f"grpc+unix://{tmp_path}/store.sock") as client:
            assert (
                "expected 1 to 8 batches"
                in learning_once(client, {"do": "sample", "rows": rows, "keys": [1]})["message"]
            )
            each = rows // 8 + 1
            answer = learning_once(client, {"do": "sample", "rows": each, "keys": [1] * 8})
            assert "expected 1 to 8 batches" in answer["message"]
            schema = wire.arrow_schema([wire.Column("0:a", "float32", (0,))])
            batch = wire.record_batch(schema, [torch.zeros(min(rows, 1 << 30), 0)], min(rows, 1 << 30))
            there, back = client.do_exchange(flight.FlightDescriptor.for_command(b"write"))
            with there:
                there.begin(schema)
                there.write_with_metadata(batch, b'{"do": "append"}')
                assert f"expected at most {MAX_MESSAGE} bytes" in said(back)["message"]
        with ReplayBuffer.connect(server.address, batch_size=rows) as remote:
            assert remote.extend({"a": torch.zeros(2, 0)}).tolist() == [0, 1]
            with pytest.raises(ValueError, match="and 32 beside them"):
                remote.sample()


def test_rows_count_as_wide_as_they_are_drawn():
    rb = ReplayBuffer(storage=LazyMemmapStorage(9), sampler=FrameStack(RandomSampler(), 4, -1, ["a"]))
    rb.extend({"a": torch.zeros(9, 100), "done": torch.zeros(9)})
    memory = rb.storage.memory
    assert drawn_bytes(rb.sampler, memory) >= 1600
    assert drawn_bytes(RandomSampler(), memory) == memory.schema.row_bytes
    rb.close()


def test_answers_wait_for_those_before_them(monkeypatch):
    monkeypatch.setattr(service, "ANSWER_BYTES", 10 << 20)
    answers, entered = Answers(), threading.Event()

    def other():
        with answers.counted(6 << 20):
            entered.set()

    with answers.counted(6 << 20):
        waiting = threading.Thread(target=other)
        waiting.start()
        with answers.counted(100), answers.counted(4 << 20):  # both find room
            assert not entered.is_set()
    assert entered.wait(60)
    waiting.join(60)
    with answers.counted(11 << 20):  # alone, anything goes
        monkeypatch.setattr(service, "_ROOM_TIMEOUT_S", 0.0)
        with pytest.raises(RuntimeError, match="got 11534336 before these 1048576"), answers.counted(1 << 20):
            pass
    with pytest.raises(KeyError), answers.counted(1 << 20):
        raise KeyError
    with answers.counted(10 << 20):
        pass


SCHEMA = pa.schema([("name", pa.string()), ("data", pa.binary())])


def write(folder):
    folder.mkdir()
    (folder / "one").write_bytes(b"x" * 10)
    (folder / "two").write_bytes(b"y")


def test_dumps_are_few_and_one_that_nobody_reads_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dumps = Dumps()
    begun = [dumps.files(write, SCHEMA) for _ in range(limits_of_dumps.MAX_DUMPS)]
    first = [next(one)["name"].to_pylist() for one in begun]
    assert first == [["one"]] * limits_of_dumps.MAX_DUMPS
    assert len(list(tmp_path.iterdir())) == limits_of_dumps.MAX_DUMPS
    with pytest.raises(TooMany):
        next(dumps.files(write, SCHEMA))
    monkeypatch.setattr(limits_of_dumps, "_MAX_UNREAD_S", 0.0)
    assert [it["name"][0].as_py() for it in dumps.files(write, SCHEMA)] == ["one", "two"]
    assert len(list(tmp_path.iterdir())) == limits_of_dumps.MAX_DUMPS - 1
    with pytest.raises(RuntimeError, match="read nothing"):
        list(begun[0])
    assert [it["name"][0].as_py() for it in begun[1]] == ["two"]
    begun[2].close()  # its client has left
    del begun[3]
    assert list(tmp_path.iterdir()) == []

    def breaks(folder):
        folder.mkdir()
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        next(dumps.files(breaks, SCHEMA))
    assert list(tmp_path.iterdir()) == []


def test_a_client_is_told_that_a_server_makes_dumps_enough(small, tmp_path):
    with ReplayBuffer.connect(small.address) as remote, flight.connect(f"grpc+unix://{tmp_path}/sock") as client:
        reader = client.do_get(flight.Ticket(b"dump"))
        assert reader.read_chunk().data.num_rows == 1  # of 16 MiB, which lie in its way
        with pytest.raises(ConnectionError, match=r"sent no whole dump: .*makes 1 dumps already"):
            remote.dumps(tmp_path / "dump")
        assert not (tmp_path / "dump").exists()
        reader.cancel()
        until(lambda: dumps(remote, tmp_path / "dump"))
        assert {path.name for path in (tmp_path / "dump").iterdir()} >= {"storage", "sampler", "writer"}


def dumps(remote, folder):
    try:
        remote.dumps(folder)
    except ConnectionError:
        return False
    return True


def test_an_os_error_of_a_server_is_raised_and_is_no_lost_server(small, monkeypatch):
    with ReplayBuffer.connect(small.address) as remote:
        assert len(remote) == 16
        monkeypatch.setattr("engram.remote.connection._answer", lambda *_: b'{"error":"OSError","message":"no space"}')
        with pytest.raises(OSError, match="no space"):
            len(remote)
