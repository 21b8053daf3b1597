"""What a device reads of rows: every dtype, row size, stride and alignment, at any address."""

import mmap

import pytest
import torch

from engram import LazyMemmapStorage, ReplayBuffer
from engram.format.schema import DTYPES
from engram.store.device.chain import Chain, Column, Columns, Layout, chunk_table, columns_of
from tests.store.device.stores import as_bytes, assert_as_uniform, filled
from tests.store.device.twin import Twin

SIZES = [1, 2, 3, 7, 8, 12, 31, 255, 256, 257, 1000, 2048, 2049, 4095, 4097, 16_384, 28_224, 99_999, 100_000]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("of", [Chain, Twin])
def test_every_dtype(of):
    fields = [(dtype, shape) for dtype in DTYPES for shape in ((), (3,), (2, 0))]
    store = filled(9, 3, fields)
    reader = Chain(columns_of(store), 3, "cpu", rows_per_program=4) if of is Chain else Twin(store, 3, "cpu")
    assert_as_uniform(reader.run(4), store, 4)


@pytest.mark.parametrize("of", [Chain, Twin])
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_row_size(of, nbytes):
    """Beside a field of another size, whose place in the block follows from it."""
    store = filled(
        5, 1, [("uint8", (nbytes,)), ("int32", ()), *([("float64", (nbytes // 8,))] if nbytes % 8 == 0 else [])]
    )
    reader = Chain(columns_of(store), 3, "cpu", rows_per_program=4) if of is Chain else Twin(store, 3, "cpu")
    assert_as_uniform(reader.run(nbytes), store, nbytes)


@pytest.mark.parametrize("of", [Chain, Twin])
def test_thousands_of_fields(of):
    store = filled(4, 1, [("float32", ()), ("uint8", (3,))] * 1000)
    reader = Chain(columns_of(store), 1, "cpu") if of is Chain else Twin(store, 2, "cpu")
    assert_as_uniform(reader.run(1), store, 1)


@pytest.mark.parametrize("of", [Chain, Twin])
def test_small_fields_that_lie_together(tmp_path, of):
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "store", group_small_fields=24))
    rb.extend(
        {"a": torch.arange(20.0), "b": torch.arange(20) % 3 == 0, "c": torch.arange(60).view(20, 3).to(torch.int16)}
    )
    store = rb.storage.store
    at = columns_of(store)
    assert all(field.stride > field.row_bytes for field in at.fields)
    reader = Chain(at, 5, "cpu", rows_per_program=8) if of is Chain else Twin(store, 5, "cpu")
    assert_as_uniform(reader.run(2), store, 2)
    rb.close()


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_programs_that_share_chunks(programs):
    store = filled(9, 1, [("uint8", (40_000,)), ("int64", ())])
    assert_as_uniform(Chain(columns_of(store), 4, "cpu", rows_per_program=4, programs=programs).run(1), store, 1)


def test_no_fields_with_bytes():
    store = filled(9, 1, [("uint8", (0,))])
    chain = Chain(columns_of(store), 4, "cpu", rows_per_program=4)
    assert_as_uniform(chain.run(1), store, 1)
    assert chain.launches == 2


def columns_around(memory, capacity, stride, row_bytes, offset):
    """A store of one field of bytes at an offset of memory, all of whose rows are committed."""
    tickets = mmap.mmap(-1, 8 * capacity)
    words = torch.frombuffer(tickets, dtype=torch.int64)
    lane = torch.tensor([capacity, 0, 0, 0, 0, 0, 0, 0])
    field = Column(memory.data_ptr() + offset, stride, row_bytes, torch.uint8, (row_bytes,))
    return Columns(words.data_ptr(), words.data_ptr(), lane.data_ptr(), capacity, 1, capacity, (field,)), words, lane


@pytest.mark.parametrize("row_bytes", [1, 7, 8, 100, 1004])
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 6, 8, 12])
def test_every_alignment(row_bytes, offset):
    capacity, stride = 11, row_bytes + offset
    memory = torch.randint(0, 256, (capacity * stride + offset,), dtype=torch.uint8)
    at, words, _lane = columns_around(memory, capacity, stride, row_bytes, offset)
    words[:] = torch.arange(1, capacity + 1) << 2 | 2
    chain = Chain(at, 3, "cpu", rows_per_program=4)
    for source, step, to, apart, nbytes, width, *_ in chunk_table(at, chain.layout, chain._chunk):
        assert not any(word % width for word in (source, step, to, apart, nbytes))
        assert width == 8 or any(word % (2 * width) for word in (at.fields[0].address, step, apart))
    batch = chain.run(offset)
    for row, number, found in zip(batch.rows.tolist(), batch.tickets.tolist(), batch.fields[0], strict=True):
        assert number == row + 1
        assert torch.equal(found, memory[offset + row * stride :][:row_bytes])


def test_addresses_of_ten_million_rows():
    """Rows of 28,224 bytes: 282 GB of addresses, of which only the pages that are touched exist."""
    capacity, row_bytes = 10**7, 28_224
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    memory = torch.frombuffer(mmap.mmap(-1, capacity * row_bytes, flags=flags), dtype=torch.uint8)
    at, words, _lane = columns_around(memory, capacity, row_bytes, row_bytes, 0)
    ranks = torch.tensor([capacity - 1, 2**31 // row_bytes + 1, 2**32 // row_bytes + 1, 0, 7_654_321])
    for row in ranks.tolist():
        words[row] = (row + 1) << 2 | 2
        memory[row * row_bytes :][:row_bytes] = torch.arange(row_bytes) % 251 + row % 5
    batch = Chain(at, 5, "cpu", kind="permuted", rows_per_program=8).run(ranks=ranks)
    assert batch.rows.tolist() == ranks.tolist()
    assert batch.valid.all()
    for row, found in zip(ranks.tolist(), batch.fields[0], strict=True):
        assert torch.equal(found, memory[row * row_bytes :][:row_bytes])


def test_a_layout():
    fields = [
        Column(0, 7, 7, torch.uint8, (7,)),
        Column(0, 4, 4, torch.float32, ()),
        Column(0, 0, 0, torch.int64, (0, 2)),
    ]
    layout = Layout(fields, 10, weighted=True)
    starts = (*layout.fields, layout.rows, layout.tickets, layout.valid, layout.weights)
    assert not any(start % 64 for start in starts)
    assert layout.nbytes == 128 + 64 + 0 + 128 + 128 + 64 + 64
    block = layout.empty("cpu")
    batch = layout.views(block)
    assert [tuple(field.shape) for field in batch.fields] == [(10, 7), (10,), (10, 0, 2)]
    assert batch.weights.dtype is torch.float32
    assert batch.valid.dtype is torch.bool
    assert batch.tickets.data_ptr() == block.data_ptr() + layout.tickets
    assert Layout(fields, 10, weighted=False).views(layout.empty("cpu")[: layout.nbytes - 64]).weights is None
    with pytest.raises(ValueError, match="Use Layout.empty"):
        layout.views(torch.empty(layout.nbytes + 64, dtype=torch.uint8)[3 : 3 + layout.nbytes])
    with pytest.raises(ValueError, match=r"expected a contiguous block of uint8 \[576\]"):
        layout.views(block[:-1])


def test_given_blocks_are_filled():
    store = filled(9)
    chain = Chain(columns_of(store), 4, "cpu", rows_per_program=4)
    block = chain.layout.empty("cpu")
    batch = chain.run(1, block)
    assert batch.block is block
    assert batch.fields[0].data_ptr() == block.data_ptr()
    again = chain.run(1)
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(batch.fields, again.fields, strict=True))


def test_addresses_are_translated_once_per_memory():
    store = filled(9)
    seen = []
    at = columns_of(store, lambda address: seen.append(address) or address + 2**40)
    assert seen == [
        store.control_memory[1].data_ptr(),
        *(t.data_ptr() for t in store.tensors),
        store.control_memory[0].data_ptr(),
    ]
    own = columns_of(store)
    assert at.tickets - own.tickets == at.writes - own.writes == at.lanes_at - own.lanes_at == 2**40
    assert [f.address - 2**40 for f in at.fields] == [f.address for f in own.fields]


def test_new_addresses_of_the_same_rows():
    store, other = filled(9), filled(9)
    other.edit(torch.arange(9), [0], [torch.arange(100, 109)])
    chain = Chain(columns_of(store), 4, "cpu", rows_per_program=4)
    chain.replace(columns_of(other))
    assert_as_uniform(chain.run(3), other, 3)
