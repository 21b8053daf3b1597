"""Stores whose rows say which they are, and what a device must read of them."""

import torch

from engram.format.schema import Field, Node, Schema
from engram.store.blocks import Key
from engram.store.memory import torch_dtype
from engram.store.priorities import PriorityConfig, PriorityIndex
from engram.store.store import Store
from engram.types import WritePlan

FIELDS = (("int64", ()), ("float32", (3,)), ("uint8", (7,)), ("bool", ()))


def schema(capacity, lanes=1, fields=FIELDS):
    fields = tuple(Field((f"f{number}",), dtype, shape) for number, (dtype, shape) in enumerate(fields))
    root = Node(kind="dict", children={field.key[0]: Node(kind="leaf", field=i) for i, field in enumerate(fields)})
    return Schema(capacity, lanes, (), fields, root)


def content(store, numbers):
    """Rows of which every byte follows from their number: one contiguous tensor per field."""
    columns = []
    for at, field in enumerate(store.schema.fields):
        nbytes = field.row_bytes
        raw = (numbers[:, None] * 31 + torch.arange(nbytes) * 7 + (numbers[:, None] >> 5) + at) % 251
        raw = raw % 2 if field.dtype == "bool" else raw
        raw = raw.to(torch.uint8).contiguous()
        shape = (len(numbers), *field.shape)
        columns.append(
            raw.view(torch_dtype(field)).view(shape) if nbytes else torch.empty(shape, dtype=torch_dtype(field))
        )
    return columns


def filled(capacity, lanes=1, fields=FIELDS, rows=None, seed=0):
    """A store in memory. ``rows``: how many of each lane were written; default all."""
    store = Store.private(schema(capacity, lanes, fields))
    length = capacity // lanes
    for lane in range(lanes):
        n = length if rows is None else rows[lane]
        if n:
            numbers = torch.arange(n) + lane * 1000
            store.write(WritePlan(lane=lane), content(store, numbers), n)
    return store


def prioritized(store, *, alpha=0.7, beta=0.5, zeros=0.0, seed=0, name="main"):
    """Its priorities, random ones. ``zeros``: the share of those that are zero."""
    index = PriorityIndex.of_store(store, name, PriorityConfig(alpha, beta, 0.0, False))[0]
    live = (store.tickets_of(torch.arange(store.capacity)) >= 0).nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(len(live), generator=generator, dtype=torch.float64) * 10 + 1e-3
    values[torch.rand(len(live), generator=generator) < zeros] = 0
    index.update(live, values, None)
    return index


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(batch, columns):
    """Fields, bit for bit: floats may be NaN."""
    assert len(batch.fields) == len(columns)
    for one, other in zip(batch.fields, columns, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        assert not one.numel() or torch.equal(as_bytes(one), as_bytes(other))


def assert_as_uniform(batch, store, key):
    """A batch is what the host draws with that key."""
    *columns, rows, writes = store.sample_uniform(Key.of(key), len(batch.rows), with_rows=True, with_numbers=True)
    assert batch.rows.tolist() == rows.tolist()
    assert batch.tickets.tolist() == writes.tolist()
    assert batch.valid.all()
    assert_same(batch, columns)


def assert_as_prioritized(batch, store, index, key):
    *columns, rows, writes, weights = index.sample(store, Key.of(key), len(batch.rows), False, False)
    assert batch.rows.tolist() == rows.tolist()
    assert batch.tickets.tolist() == writes.tolist()
    assert batch.valid.all()
    assert_same(batch, columns)
    assert torch.allclose(batch.weights.double(), weights, rtol=1e-6, atol=0)


def assert_whole(batch, store):
    """Every row that is said to be valid is one that the store holds, whole, under that number."""
    valid = batch.valid
    columns, moved = store.read(batch.rows[valid])
    assert moved == []
    assert (
        store.writes_of(batch.rows[valid], store.tickets_of(batch.rows[valid])).tolist()
        == batch.tickets[valid].tolist()
    )
    for one, other in zip(batch.fields, columns, strict=True):
        assert torch.equal(as_bytes(one[valid]), as_bytes(other))
    for one in batch.fields:
        assert not as_bytes(one[~valid]).any()
    assert set(batch.rows[~valid].tolist()) <= {-1}
    assert set(batch.tickets[~valid].tolist()) <= {-1}


def remove(store, rows):
    """Make rows void."""
    rows = torch.as_tensor(rows)
    expected = store.tickets_of(rows)
    assert store.core.remove(rows.data_ptr(), len(rows), expected.data_ptr()) == len(rows)
