"""Bodies of calls that no client of ours sends: they are refused in a sentence, and change nothing."""

import copy
import json
import pickle
import re

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
    "an update without tickets": body("update_if_present", {"index": [0], "generation": [1], "patch": {}}),
    "one leaf twice": b'{"name": "rows_of", "length": %d}\n' % len(TEXT) + TEXT + bytes(-len(TEXT) % 16) + bytes(16),
    "a long command": b'{"name": "rows_of", "length": 5, "x": "' + b"x" * MAX_COMMAND + b'"}\n{}',
    "deep": body("rows_of", {}, length=100_000)[:34] + b"\n" + b"[" * 100_000,
}


UPDATE = {"index": [0], "generation": [1], "patch": {"reward": [5.0]}, "version_key": None, "version": None}
UPDATE["require_newer"] = False
LENGTHS = r"append: lengths: expected how many items there were, by key, got "
#: Of a row that this client has: arguments, and what is said of them.
OF_A_ROW = {
    "lengths that are a number": ("append", {"lengths": 7, "data": {}}, LENGTHS + "7"),
    "lengths that are a list": ("append", {"lengths": [1], "data": {"tokens": [1]}}, LENGTHS + r"\[1\]"),
    "lengths that are texts": ("append", {"lengths": {"tokens": "x"}, "data": {}}, LENGTHS + "{'tokens': 'x'}"),
    "lengths of a seal": ("seal", {"lengths": None, "data": {"reward": 1.0}, "lane": 0}, LENGTHS + "None"),
    **{
        f"lane {lane!r} of {call}": (
            call,
            {**given, "lane": lane},
            rf"{call}: lane: expected (an int|at least 0|at most 0), got {got}",
        )
        for call, given in (
            ("seal", {"lengths": {"tokens": 1, "prompt": 0}, "data": {"reward": 1.0}}),
            ("open_row", {"data": {}, "late": None}),
        )
        for lane, got in (
            (-1, -1),
            (1, 1),
            (10**30, 10**30),
            (0.0, "float"),
            ("x", "str"),
            (None, "NoneType"),
            ([0], "list"),
        )
    },
    "tickets of other rows": (
        "update_if_present",
        {**UPDATE, "tickets": [1, 2]},
        "tickets: expected one per row, 1, got 2",
    ),
    "tickets that are none": ("update_if_present", {**UPDATE, "tickets": "x"}, "update_if_present: tickets: expected"),
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


@pytest.mark.parametrize("name", OF_A_ROW)
def test_arguments_that_are_none_get_a_sentence_and_change_nothing(served, name):
    rb, address = served
    call, given, message = OF_A_ROW[name]
    with ReplayBuffer.connect(address) as remote:
        row = remote.open_row(uid=7)
        row.append(tokens=[1])
        slot, times = row._id
        asked = body(call, given, slot=slot, times=times, holder=str(row._holder))
        with flight.connect(address.replace("unix:", "grpc+unix://")) as client:
            said = json.loads(b"".join(it.body.to_pybytes() for it in client.do_action(flight.Action("call", asked))))
        assert re.search(message, said["message"]), said
        assert "incompatible function arguments" not in said["message"]
        assert [it.lengths for it in rb.unsealed()] == [{"tokens": 1, "prompt": 0}]
        assert (len(rb), rb[0]["reward"]) == (ROWS, 0.0)
        row.append(tokens=[2])
        assert rb[row.seal(reward=1.0)]["tokens"].tolist() == [1, 2]


def test_a_row_that_grows_is_not_pickled(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        row = remote.open_row(uid=7)
        (listed,) = remote.unsealed()
        for one in (row, listed, rb.open_row(uid=8)):
            for copied in (pickle.dumps, copy.copy):
                with pytest.raises(TypeError, match=r"got an OpenRow, of one process or client\. See rb\.unsealed"):
                    copied(one)
        assert rb[row.seal(reward=1.0)]["uid"] == 7
