"""Rows with ragged fields over connections: what is drawn and written there is what it is here, once and in order."""

import contextlib
import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import flight

from engram import ConsumingSampler, LazyMemmapStorage, PrioritizedReplayBuffer, Ragged, ReplayBuffer, SliceSampler
from engram.remote import wire
from engram.remote.protocol import COALESCED_BYTES
from tests.serving.servers import serving, serving_each
from tests.serving.test_exactly_once import FAULTS, Proxy

LONGEST = 40
FIELDS = {
    "tokens": Ragged(torch.int32, max_length=LONGEST),
    "log_prob": Ragged(torch.float32, like="tokens"),
    "boxes": Ragged(torch.int16, max_length=8, shape=(3,)),
    "text": Ragged("utf-8", max_length=200),
    "raw": Ragged("bytes", max_length=100),
    "extra": Ragged("json", max_length=200),
}


def row(one, *, late=False):
    """A row that follows from its id, one that has none of most items now and then."""
    chance = np.random.default_rng(one)
    length, boxes = chance.integers(0, LONGEST + 1), chance.integers(0, 9)
    said = {
        "id": torch.tensor(one),
        "tokens": torch.from_numpy(chance.integers(0, 1 << 30, length, np.int32)),
        "log_prob": torch.from_numpy(chance.random(length, np.float32)),
        "boxes": torch.from_numpy(chance.integers(-100, 100, (boxes, 3), np.int16)),
        "text": "ä" * int(chance.integers(0, 100)),
        "raw": chance.bytes(int(chance.integers(0, 101))),
        "extra": {"id": one, "of": [1.5, None, "x" * int(chance.integers(0, 20))]},
    }
    if late:
        said["log_prob"] = None
    return said


def rows(ids):
    each = [row(one) for one in ids]
    return {key: [it[key] for it in each] if key != "id" else torch.tensor(list(ids)) for key in each[0]}


def same(got, one):
    """Whether one row of a batch is the row of an id."""
    for key, value in row(one).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[key], value), (key, got[key], value)
        else:
            assert got[key] == value, (key, got[key], value)


def check(batch):
    """The ids of a batch, whose rows are what they should be."""
    n = len(batch["id"])
    each = {
        key: value.unbind() if isinstance(value, torch.Tensor) and value.is_nested else value
        for key, value in batch.items()
    }
    for place in range(n):
        same({key: each[key][place] for key in row(0)}, int(batch["id"][place]))
    return batch["id"].tolist()


def storage(folder, capacity=1000, **more):
    return LazyMemmapStorage(capacity, scratch_dir=folder, ragged=FIELDS, ragged_bytes=capacity * 600, **more)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A store of lanes that is open here, and served."""
    folder = tmp_path_factory.mktemp("ragged") / "store"
    with ReplayBuffer(storage=storage(folder, 4000, lanes=4), batch_size=8) as rb:
        rb.extend(rows(range(8)), lane=0)
        with serving(folder) as server:
            yield rb, folder, server.address


def test_what_is_drawn_is_what_was_written(served):
    rb, _, address = served
    with ReplayBuffer.connect(address, batch_size=64) as remote:
        assert set(check(remote.sample())) <= set(rb["id"].tolist())
        assert remote.storage.nbytes == rb.storage.nbytes
    with ReplayBuffer.connect(address, prefetch=3, batch_size=2) as remote:  # several batches come in one message
        seen = list(itertools.chain.from_iterable(check(remote.sample()) for _ in range(40)))
        assert len(set(seen)) > 3


def test_batches_are_laid_out_as_the_client_says(served):
    rb, _, address = served
    with ReplayBuffer.connect(address, batch_size=6) as remote:
        batch, info = remote.sample(layout="packed", return_info=True)
        expected = rb[info["index"]]["tokens"]
        assert torch.equal(batch["tokens"].values, expected.values())
        assert torch.equal(batch["tokens"].cu_seqlens, expected.offsets().to(torch.int32))
        remote.storage.layout = {"kind": "padded", "multiple": 8}
        batch, info = remote.sample(return_info=True)
        assert batch["tokens"].values.shape[1] % 8 == 0
        assert torch.equal(batch["tokens"].values[batch["tokens"].mask], rb[info["index"]]["tokens"].values())
        with pytest.raises(ValueError, match="layout: kind: expected one of"):
            remote.storage.layout = "flat"


@pytest.mark.parametrize("full", [None, "block"])
def test_what_is_written_there_is_here(served, full):
    rb, _, address = served
    with ReplayBuffer.connect(address, full=full) as remote:
        first = 1000 if full is None else 2000
        for begin in range(first, first + 40, 10):
            remote.extend(rows(range(begin, begin + 10)), lane=1)
        remote.add(row(first + 40), lane=2)
        remote.add(row(first + 41, late=True), lane=2)
        remote.extend(rows(range(first + 42, first + 46)), lane=[0, 1, 2, 3])
        assert len(remote) == len(rb)
    stored = rb[:]
    each = {key: value.unbind() if key in ("tokens", "log_prob", "boxes") else value for key, value in stored.items()}
    for one in range(first, first + 46):
        (place,) = (stored["id"] == one).nonzero()[:, 0].tolist()
        got = {key: value[place] for key, value in each.items()}
        if one == first + 41:  # its late field is zeros
            assert torch.equal(got["log_prob"], torch.zeros(len(got["tokens"])))
            got = {**got, "log_prob": row(one)["log_prob"]}
        same(got, one)


def test_rows_with_items_that_are_refused_here_are_refused_before_they_are_sent(served):
    rb, _, address = served
    before = rb.write_count
    with ReplayBuffer.connect(address) as remote:
        for key, value, said in (
            ("tokens", torch.zeros(LONGEST + 1, dtype=torch.int32), f"max_length={LONGEST}"),
            ("tokens", torch.zeros(3), "int32"),
            ("log_prob", torch.zeros(LONGEST - len(row(1)["tokens"])), "lengths of"),
            ("boxes", torch.zeros(2, 4, dtype=torch.int16), "shape"),
            ("text", 5, "strings"),
        ):
            with pytest.raises((RuntimeError, TypeError, ValueError), match=said):
                remote.add({**row(1), key: value}, lane=0)
        with pytest.raises(KeyError):
            remote.add({key: value for key, value in row(1).items() if key != "text"}, lane=0)
    assert rb.write_count == before


# ---- messages that get lost -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.lists(st.sampled_from(FAULTS), max_size=3), st.integers(1, 12), st.booleans()), max_size=6)
)
@settings(max_examples=8)
def test_rows_are_there_once_whatever_becomes_of_messages(served, writes):
    rb, folder, _ = served
    expected = rb["id"].tolist()
    written = rb.write_count
    with Proxy.before(folder) as proxy, ReplayBuffer.connect(proxy.address) as remote:
        for faults, n, late in writes:
            proxy.faults = [*faults]
            ids = [10_000 + written + k for k in range(n)]
            written += n
            remote.extend(rows(ids), lane=3)
            expected += ids
            if late:
                proxy.let_go()
        proxy.faults = []
        proxy.let_go()
    assert rb.write_count == written
    there = rb["id"].tolist()
    lane = expected[-rb.storage.max_size // 4 :]  # a lane may have come round
    assert len(there) == len(set(there))
    assert [one for one in there if one >= 10_000] == [one for one in lane if one >= 10_000]


# ---- samplers, and several stores --------------------------------------------------------------------------------------------


def test_rows_that_are_used_up_come_once(tmp_path):
    with ReplayBuffer(storage=storage(tmp_path / "store"), sampler=ConsumingSampler(), batch_size=5) as rb:
        rb.extend(rows(range(40)))
    with serving(tmp_path / "store") as server, ReplayBuffer.connect(server.address) as remote:
        got = [one for _ in range(8) for one in check(remote.sample())]
        assert sorted(got) == list(range(40))
        assert not remote.can_sample()


def test_priorities_and_flat_windows(tmp_path):
    folders = [tmp_path / name for name in ("priorities", "windows")]
    with PrioritizedReplayBuffer(storage=storage(folders[0]), alpha=1.0, beta=1.0, batch_size=8) as rb:
        rb.extend(rows(range(20)))
    fields = {"tokens": FIELDS["tokens"], "text": FIELDS["text"]}
    sampler = SliceSampler(slice_len=3, traj_key="episode")
    kept = LazyMemmapStorage(100, scratch_dir=folders[1], ragged=fields, ragged_bytes=1e5)
    with ReplayBuffer(storage=kept, sampler=sampler, batch_size=6) as rb:
        each = rows(range(12))
        rb.extend({key: each[key] for key in ("id", "tokens", "text")} | {"episode": torch.arange(12) // 4})
    with serving_each(folders):
        with ReplayBuffer.connect(f"unix:{folders[0]}.sock") as remote:
            check(remote.sample())
            remote.update_priority(torch.arange(20), torch.zeros(20).index_fill(0, torch.tensor([7]), 1.0))
            assert set(check(remote.sample())) == {7}
        with ReplayBuffer.connect(f"unix:{folders[1]}.sock") as remote:
            batch = remote.sample()
            ids = batch["id"].view(2, 3)
            assert torch.equal(ids, ids[:, :1] + torch.arange(3))
            for place, one in enumerate(batch["id"].tolist()):
                assert torch.equal(batch["tokens"].unbind()[place], row(one)["tokens"])
                assert batch["text"][place] == row(one)["text"]


def test_batches_of_several_stores(tmp_path):
    folders = [tmp_path / str(k) for k in range(3)]
    for k, folder in enumerate(folders):
        # rings of items have other sizes
        with ReplayBuffer(storage=storage(folder, 100 * (k + 1)), batch_size=16) as rb:
            rb.extend(rows(range(100 * k, 100 * k + 20)))
    with serving_each(folders), ReplayBuffer.connect([f"unix:{folder}.sock" for folder in folders]) as fleet:
        assert len(fleet) == 60
        seen = {one for _ in range(20) for one in check(fleet.sample())}
        assert {one // 100 for one in seen} == {0, 1, 2}
        fleet.extend(rows(range(500, 510)))
        seen = {one for _ in range(60) for one in check(fleet.sample())}
        assert any(one >= 500 for one in seen)


def test_a_batch_larger_than_a_message_is_refused(tmp_path):
    fields = {"tokens": Ragged(torch.int32, max_length=1000)}
    kept = LazyMemmapStorage(100, scratch_dir=tmp_path / "store", ragged=fields, ragged_bytes=1e6)
    with ReplayBuffer(storage=kept, batch_size=4) as rb:
        rb.extend({"tokens": [torch.arange(1000, dtype=torch.int32)] * 10})
    with serving(tmp_path / "store") as server, ReplayBuffer.connect(server.address) as remote:
        assert remote.storage.batches_in_message(4) == min(8, COALESCED_BYTES // (4 * (12 + 10_000)))
        with (
            pytest.warns(UserWarning, match="is used instead"),
            pytest.raises(ValueError, match="sample: batch_size: expected at most"),
        ):
            remote.sample(1 << 20)
        assert len(remote.sample()["tokens"].unbind()) == 4


# ---- clients that break the rules ---------------------------------------------------------------------------------------------

COLUMNS = [
    wire.Column("0:tokens", "int32", (), True),
    wire.Column("1:log_prob", "float32", (), True),
    wire.Column("2:id", "int64", ()),
]


def message(tokens=(0, 8, 12), log_probs=(0, 8, 12), data=64, n=2):
    """Rows as a client may send them: offsets in bytes."""
    arrays = []
    for column, offsets in zip(COLUMNS, (tokens, log_probs, None), strict=True):
        raws = [pa.py_buffer(np.array(offsets, np.int64).tobytes())] if offsets is not None else []
        raws += [pa.py_buffer(bytes(data if offsets is not None else 8 * n))]
        arrays.append(pa.Array.from_buffers(column.type, n, [None, *raws]))
    return pa.RecordBatch.from_arrays(arrays, schema=wire.arrow_schema(COLUMNS))


WRONG = {
    "offsets that fall": message(tokens=(0, 12, 8)),
    "offsets that do not begin at 0": message(tokens=(4, 8, 12)),
    "parts of items": message(tokens=(0, 7, 12)),
    "other lengths in fields that share them": message(log_probs=(0, 4, 12)),
    "negative offsets": message(tokens=(0, -8, 12)),
    "a row that is too long": message(tokens=(0, 8, 400), log_probs=(0, 8, 400), data=400),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "store"
    fields = {"tokens": FIELDS["tokens"], "log_prob": FIELDS["log_prob"]}
    kept = LazyMemmapStorage(100, scratch_dir=folder, ragged=fields, ragged_bytes=1e5)
    with ReplayBuffer(storage=kept, batch_size=4) as rb:
        rb.extend({"tokens": [torch.arange(3, dtype=torch.int32)] * 10, "log_prob": None, "id": torch.arange(10)})
        names = [(field.name, field.ragged) for field in rb.storage.memory.schema.fields]
        with serving(folder) as server:
            yield rb, server.address, names


def test_the_columns_of_a_message_are_those_of_the_store(small):
    rb, _, _ = small
    made = {column.name.partition(":")[2]: column for column in wire.fields_of(rb.storage.memory.schema)}
    assert {column.name.partition(":")[2] for column in COLUMNS} == made.keys()
    assert [made[key].ragged for key in ("tokens", "log_prob", "id")] == [True, True, False]


@pytest.mark.parametrize("name", [None, *WRONG])
def test_items_that_are_none_are_refused(small, name):
    rb, address, _ = small
    expected = wire.fields_of(rb.storage.memory.schema)
    names = {column.name.partition(":")[2]: column.name for column in expected}
    batch = message() if name is None else WRONG[name]
    arrays = dict(zip([column.name.partition(":")[2] for column in COLUMNS], batch.columns, strict=True))
    order = [column.name.partition(":")[2] for column in expected]
    batch = pa.RecordBatch.from_arrays([arrays[key] for key in order], schema=wire.arrow_schema(expected))
    assert [field.name for field in batch.schema] == [names[key] for key in order]
    before = rb.write_count
    with flight.connect(address.replace("unix:", "grpc+unix://")) as client:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"write"))
        with writer:
            writer.begin(batch.schema)
            writer.write_with_metadata(batch, b'{"do": "append"}')
            answer = reader.read_chunk()
            said = json.loads(answer.app_metadata.to_pybytes())
    if name is None:
        assert said == {"ok": 1}
        assert rb.write_count == before + 2
    else:
        assert "error" in said, said
        assert rb.write_count == before
    with contextlib.closing(ReplayBuffer.connect(address)) as remote:
        assert len(remote) == len(rb)
