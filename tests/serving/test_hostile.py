"""Clients that break the rules, and what a server does: it refuses by name, and goes on for the others."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import flight

from engram import LazyMemmapStorage, ReplayBuffer
from engram.remote import wire
from engram.remote.protocol import ACTIONS, MAX_COMMAND
from tests import fresh
from tests.serving.servers import SERVER, Served, serving

BRIEF = "from engram.serving import server; server._DRAIN_TIMEOUT_S = 0.1"
NO_SECRETS = {"token": None, "cert": None, "key": None, "insecure": False}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of a server of ten rows."""
    folder = tmp_path_factory.mktemp("hostile") / "store"
    with ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder, lanes=2), batch_size=4) as rb:
        rb.extend({"a": torch.arange(10), "b": torch.zeros(10, 3)}, lane=0)
    with serving(folder) as server:
        yield server.address


@pytest.fixture
def client(served):
    """A client of Flight. Afterwards the server answers, and has the rows that it had."""
    with flight.connect(served.replace("unix:", "grpc+unix://")) as connected:
        yield connected
    with ReplayBuffer.connect(served) as remote:
        assert len(remote) == 10
        assert remote.sample()["a"].shape == (4,)


def act(client, name, raw):
    return json.loads(b"".join(part.body.to_pybytes() for part in client.do_action(flight.Action(name, raw))))


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("eval", b"{}", "expected one of the commands"),
        ("stats", b"{" * 9999, f"at most {MAX_COMMAND} bytes"),
        ("stats", b"[" * 4000, "stats: "),
        ("stats", b'{"path": "/etc/passwd"}', "unknown field"),
        ("can_sample", b"{}", "missing required field"),
        ("can_sample", b'{"rows": "many"}', "Expected `int`"),
        ("stats", b"\xff\xfe", "stats: "),
        ("end_trajectory", b'{"lanes": [7]}', "lane"),
        ("describe", b'{"protocol": 99, "engram": "x"}', "expected protocol"),
    ],
)
def test_commands_outside_of_the_table_are_refused(client, name, raw, said):
    answer = act(client, name, raw)
    assert said in answer["message"]
    assert answer.keys() == {"error", "message"}


def test_the_table_of_commands_can_be_listed(client):
    assert {action.type for action in client.list_actions()} == ACTIONS.keys()


def exchange(client, command):
    return client.do_exchange(flight.FlightDescriptor.for_command(command))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ({"do": "sample", "rows": 0, "keys": [1]}, "expected 1 to 8 batches"),
        ({"do": "sample", "rows": 4, "keys": []}, "expected 1 to 8 batches"),
        ({"do": "sample", "rows": 4, "keys": [1] * 9}, "expected 1 to 8 batches"),
        ({"do": "sample", "rows": 1 << 40, "keys": [1]}, "expected 1 to 8 batches"),
        ({"do": "append"}, "Invalid value"),
        ({"rows": 4}, "missing required field"),
    ],
)
def test_draws_that_ask_for_too_much_are_refused_and_the_stream_goes_on(client, command, said):
    writer, reader = exchange(client, b"learn")
    with writer:
        writer.write_metadata(json.dumps(command).encode())
        assert said in json.loads(reader.read_chunk().app_metadata.to_pybytes())["message"]
        writer.write_metadata(b'{"do": "sample", "rows": 4, "keys": [1]}')
        assert reader.read_chunk().data.num_rows == 4


def edits(rows, tickets):
    schema = wire.arrow_schema([wire.Column("row", "int64", ()), wire.Column("ticket", "int64", ())])
    return wire.record_batch(schema, [torch.tensor(rows), torch.tensor(tickets)], len(rows))


@pytest.mark.parametrize(
    ("command", "batch", "said"),
    [
        ({"do": "remove"}, None, "got none"),
        ({"do": "remove"}, edits([0, 1 << 40], [1, 1]), "remove: expected rows in [-1,"),
        ({"do": "remove"}, edits([-2], [1]), "got -2"),
        ({"do": "tickets"}, edits([1 << 62], [1]), "remove: expected rows in [-1,"),
        ({"do": "remove", "rows": [1]}, edits([0], [1]), "unknown field"),
        ({"do": "append"}, edits([0], [1]), "Invalid value"),
        ({"do": "remove"}, edits([0], [1]).select(["row"]), "expected the columns"),
    ],
)
def test_rows_that_cannot_be_removed_are_refused_and_the_stream_goes_on(client, command, batch, said):
    before = act(client, "stats", b"{}")["size"]
    writer, reader = exchange(client, b"edit")
    with writer:
        raw = json.dumps(command).encode()
        if batch is None:
            writer.write_metadata(raw)
        else:
            writer.begin(batch.schema)
            writer.write_with_metadata(batch, raw)
        assert said in json.loads(reader.read_chunk().app_metadata.to_pybytes())["message"]
        if batch is not None and batch.num_columns == 2:
            never = edits([0, 0, -1], [-1, 1 << 62, 5])
            writer.write_with_metadata(never, b'{"do": "remove"}')
            assert json.loads(reader.read_chunk().app_metadata.to_pybytes()) == {"removed": 0}
    assert act(client, "stats", b"{}")["size"] == before


def columns(*, lane=0, n=2, **changed):
    found = {"0:a": ("int64", ()), "1:b": ("float32", (3,)), ":lane": ("int64", ())} | changed
    schema = wire.arrow_schema([wire.Column(name, *it) for name, it in found.items() if it])
    tensors = [torch.full((n, *it[1]), lane, dtype=getattr(torch, it[0])) for it in found.values() if it]
    return wire.record_batch(schema, tensors, n)


FIELD = pa.field("0:a", pa.binary(8), metadata={"dtype": "int64", "shape": "[]"})
WRONG = {
    "a missing column": columns(**{"1:b": None}),
    "another dtype": columns(**{"0:a": ("float64", ())}),
    "another shape": columns(**{"1:b": ("float32", (1, 3))}),
    "an unknown column": columns(more=("int64", ())),
    "no metadata": pa.record_batch({"0:a": [1, 2]}),
    "bytes that are not what the shape says": pa.record_batch(
        [pa.array([b"x"], pa.binary(1))], pa.schema([FIELD.with_type(pa.binary(1))])
    ),
    "a negative shape": pa.record_batch(
        [pa.array([b"x" * 8], pa.binary(8))], pa.schema([FIELD.with_metadata({"dtype": "int64", "shape": "[-1, -1]"})])
    ),
    "a shape that is none": pa.record_batch(
        [pa.array([b"x" * 8], pa.binary(8))], pa.schema([FIELD.with_metadata({"dtype": "int64", "shape": "{}"})])
    ),
    "an unknown dtype": pa.record_batch(
        [pa.array([b"x" * 8], pa.binary(8))], pa.schema([FIELD.with_metadata({"dtype": "object", "shape": "[]"})])
    ),
    "a lane that is none": columns(lane=2),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_of_another_form_are_refused(client, name):
    writer, reader = exchange(client, b"write")
    with writer:
        writer.begin(WRONG[name].schema)
        writer.write_with_metadata(WRONG[name], b'{"do": "append"}')
        assert "error" in json.loads(reader.read_chunk().app_metadata.to_pybytes())


def test_nulls_and_messages_without_rows_are_refused(client):
    good = columns()
    nulls = pa.record_batch(
        [pa.array([None, b"x" * 8], good.schema[0].type), *good.columns[1:]],
        pa.schema([good.schema[0].with_nullable(True), *list(good.schema)[1:]]),
    )
    writer, reader = exchange(client, b"write")
    with writer:
        writer.begin(nulls.schema)
        writer.write_with_metadata(nulls, b'{"do": "append"}')
        assert "without nulls" in json.loads(reader.read_chunk().app_metadata.to_pybytes())["message"]
        writer.write_metadata(b'{"do": "append"}')
        assert "got none" in json.loads(reader.read_chunk().app_metadata.to_pybytes())["message"]


def test_streams_and_tickets_that_do_not_exist_end_with_an_error(client):
    writer, reader = exchange(client, b"shell")
    with pytest.raises(flight.FlightError):
        reader.read_chunk()
    with pytest.raises((flight.FlightError, pa.ArrowException)):
        writer.close()
    with pytest.raises((flight.FlightError, pa.ArrowException)):
        client.do_get(flight.Ticket(b"/etc/passwd")).read_all()


def test_a_client_that_does_not_read_holds_nobody_up(client, served):
    writer, reader = exchange(client, b"learn")
    for _ in range(200):
        writer.write_metadata(b'{"do": "sample", "rows": 1000, "keys": [1]}')
    with ReplayBuffer.connect(served) as remote:
        for _ in range(20):
            remote.sample()
    assert reader.read_chunk().data.num_rows == 1000
    reader.cancel()


def test_a_server_ends_while_a_client_does_not_read(tmp_path):
    with ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "store"), batch_size=4) as rb:
        rb.extend({"a": torch.zeros(4, 1 << 20)})
    server = Served(
        fresh.start(BRIEF + SERVER, folder=str(tmp_path / "store"), listen=f"unix:{tmp_path}/sock", **NO_SECRETS)
    )
    try:
        with flight.connect(f"grpc+unix://{tmp_path}/sock") as client:
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"learn"))
            for _ in range(2):
                writer.write_metadata(b'{"do": "sample", "rows": 4, "keys": [1]}')
            reader.read_chunk()
            assert server.stop() == 0
    finally:
        server.kill()


def test_a_received_block_is_checked_against_its_schema():
    column = wire.Column("x", "float32", (2,))
    batch = wire.record_batch(wire.arrow_schema([column]), [torch.arange(6.0).reshape(3, 2)], 3)
    (back,) = wire.tensors_in(batch, [column])
    assert torch.equal(back, torch.arange(6.0).reshape(3, 2))
    back += 1  # memory of its own
    with pytest.raises(ValueError, match="expected 48 bytes"):
        wire.tensors_in(batch, [wire.Column("x", "float64", (2,))])
    with pytest.raises(ValueError, match="without nulls"):
        wire.tensors_in(batch.slice(1), [column])
    assert np.frombuffer(batch.column(0).buffers()[1], np.float32)[0] == 0


def test_batches_of_a_message_have_their_rows_and_none_beyond_its_end():
    columns = [
        wire.Column("pixels", "uint8", (4096,)),
        wire.Column("flag", "bool", ()),
        wire.Column("none", "int64", (0,)),
    ]
    sent = [torch.randint(0, 256, (40, 4096), dtype=torch.uint8), torch.arange(40) % 3 == 0, torch.zeros(40, 0).long()]
    batch = wire.record_batch(wire.arrow_schema(columns), sent, 40)
    for begin, copied in zip((0, 17, 17), wire.batches_in(batch, columns, [17, 0, 23]), strict=True):
        found = copied()
        assert all(torch.equal(one, all_[begin : begin + len(one)]) for one, all_ in zip(found, sent, strict=True))
    assert len(found[0]) == 23
    assert found[0].data_ptr() == sent[0].data_ptr() + 17 * 4096  # a large column stays where it is
    with pytest.raises(ValueError, match="bytes of all rows"):
        wire.batches_in(batch, columns, [17, 24])
    with pytest.raises(ValueError, match="bytes of all rows"):
        wire.batches_in(batch, columns, [17, -1])
    with pytest.raises(ValueError, match="expected 24 bytes for 3 rows, got 12"):
        wire.record_batch(wire.arrow_schema([wire.Column("x", "float32", (2,))]), [torch.zeros(3)], 3)
