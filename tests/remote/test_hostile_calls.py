"""Bodies of calls that no client of ours sends: they are refused in a sentence, and change nothing."""

import json

import pytest
from pyarrow import flight

from engram import ReplayBuffer
from engram.remote.protocol import MAX_COMMAND
from engram.store.trees import tree_bytes
from tests.remote.test_calls import ROWS, made, served_here


def body(name, given, *, length=None, **more):
    data, text = tree_bytes(given, "test")
    command = {"name": name, "length": text if length is None else length, **more}
    return json.dumps(command).encode() + b"\n" + data.numpy().tobytes()


HOLDER = "00000000-0000-0000-0000-000000000001"
TEXT = b'[{"": ["bytes", "uint8", 16], "at": [0, 16]}, {"": ["bytes", "uint8", 16], "at": [0, 16]}]'
HOSTILE = {
    "no method": body("__init__", {}),
    "another method": body("close", {}),
    "no data": b'{"name": "rows_of", "length": 5}',
    "a longer text than came": body("rows_of", {"keys": [1]}, length=1 << 40),
    "no text": body("rows_of", {"keys": [1]}, length=0),
    "a part of a text": body("rows_of", {"keys": [1]}, length=5),
    "no arguments by name": body("rows_of", [1]),
    "another argument": body("rows_of", {"keys": [1], "more": 2}),
    "no argument": body("rows_of", {}),
    "a negative slot": body("append", {"lengths": {}, "data": {}}, slot=-1, times=1, holder=HOLDER),
    "a slot that is not there": body("append", {"lengths": {}, "data": {}}, slot=1000, times=1, holder=HOLDER),
    "no holder": body("append", {"lengths": {}, "data": {}}, holder="me"),
    "data that are none": body("open_row", {"data": 3, "late": None, "lane": 0}, holder=HOLDER),
    "a lane that is not there": body("open_row", {"data": {}, "late": None, "lane": 7}, holder=HOLDER),
    "one leaf twice": b'{"name": "rows_of", "length": %d}\n' % len(TEXT) + TEXT + bytes(-len(TEXT) % 16) + bytes(16),
    "a long command": b'{"name": "rows_of", "length": 5, "x": "' + b"x" * MAX_COMMAND + b'"}\n{}',
    "deep": body("rows_of", {}, length=100_000)[:34] + b"\n" + b"[" * 100_000,
}


@pytest.fixture
def served(tmp_path):
    """A buffer, and the address of a server of it."""
    with made(tmp_path / "store") as rb, served_here(rb, tmp_path / "store") as address:
        yield rb, address


@pytest.mark.parametrize("name", HOSTILE)
def test_calls_that_are_none_are_refused_and_change_nothing(served, name):
    rb, address = served
    with flight.connect(address.replace("unix:", "grpc+unix://")) as client:
        answer = b"".join(it.body.to_pybytes() for it in client.do_action(flight.Action("call", HOSTILE[name])))
        said = json.loads(answer)
        assert said["message"]
        assert "Traceback" not in said["message"]
        assert "error" in said
    assert rb.write_count == ROWS
    assert rb.unsealed() == []
    with ReplayBuffer.connect(address) as remote:
        assert len(remote) == ROWS
