"""Batches in one block of bytes: where columns lie, what draws put there, and what views of foreign bytes check."""

import gc
import math
import mmap
import struct
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    WindowSpec,
)
from engram._support import native
from engram.format.schema import DTYPES, Field
from engram.store.blocks import GENERATION, INDEX, WEIGHT, BlockLayout, DrawingPart, Key
from engram.types import WritePlan

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
FIELDS = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=6).map(
    lambda found: [Field((f"f{i}",), dtype, shape) for i, (dtype, shape) in enumerate(found)]
)


class DrawingInto(DrawingPart):
    """What the core draws on this thread goes into a block, one column behind the other; the next batch follows."""

    def __init__(self, block):
        self._native = native.OutputBlock(block)

    @property
    def used(self):
        return self._native.used


def holds(layout, block, columns, rows, at=0):
    """Whether columns lie in a block where the views of a layout look for them."""
    base = block.ctypes.data + at
    return [c.data_ptr() for c in columns if c.numel()] == [
        base + offset for offset, c in zip(layout.offsets(rows), columns, strict=True) if c.numel()
    ]


@given(FIELDS, st.integers(0, 40))
def test_columns_begin_at_multiples_of_64_and_do_not_overlap(fields, rows):
    layout = BlockLayout(fields)
    ends = [0]
    for field, begin in zip(fields, layout.offsets(rows), strict=True):
        assert begin % 64 == 0
        assert 0 <= begin - ends[-1] < 64
        ends.append(begin + rows * math.prod(field.shape) * DTYPES[field.dtype])
    assert 0 <= layout.nbytes(rows) - ends[-1] < 64
    assert layout.nbytes(rows) % 64 == 0
    assert layout == BlockLayout(list(fields))


@given(FIELDS, st.integers(0, 6), st.integers(0, 3))
def test_views_are_the_bytes_of_the_block(fields, n, unused):
    layout = BlockLayout(fields)
    block = layout.empty(n + unused)
    block[:] = np.arange(len(block)) % 251
    for field, begin, view in zip(
        fields, layout.offsets(n + unused), layout.views(block, n, rows=n + unused), strict=True
    ):
        assert view.shape == (n, *field.shape)
        assert str(view.dtype) == f"torch.{field.dtype}"
        assert view.is_contiguous()
        size = n * field.row_bytes
        assert view.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(block[begin : begin + size])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.asarray])
def test_views_take_any_bytes(kind):
    layout = BlockLayout([Field(("a",), "int64", ()), Field(("b",), "int32", (2,))])
    raw = struct.pack("<3q", 1, 2, 3).ljust(64, b"\0") + struct.pack("<6i", *range(6)).ljust(64, b"\0")
    given = kind(np.frombuffer(raw, np.uint8)) if kind in (np.asarray, memoryview) else kind(raw)
    a, b = layout.views(given, 3)
    assert a.tolist() == [1, 2, 3]
    assert b.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_views_keep_the_memory():
    layout = BlockLayout([INDEX, GENERATION])
    block = layout.empty(1000)
    block[:] = 7
    index, _ = layout.views(block, 1000)
    del block, _
    gc.collect()
    more = [layout.empty(1000) for _ in range(8)]  # would be put in its place
    for other in more:
        other[:] = 9
    assert index.view(torch.uint8).unique().tolist() == [7]
    part = index[5:]
    del index
    assert part.view(torch.uint8).unique().tolist() == [7]


def test_views_release_the_memory():
    memory = mmap.mmap(-1, 4096)
    views = BlockLayout([INDEX]).views(memory, 512)
    with pytest.raises(BufferError):
        memory.close()  # exported
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    memory.close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((bytes(128), 17), r"views: expected 192 bytes for 17 rows at 0, got 128"),
        ((bytes(128), 8, {"at": 128}), r"expected 64 bytes for 8 rows at 128, got 128"),
        ((bytes(128), -1), r"expected 0 to -1 rows, at 0 or behind it, got -1 rows at 0"),
        ((bytes(128), 3, {"rows": 2}), r"expected 0 to 2 rows"),
        ((bytes(128), 1, {"at": -64}), r"got 1 rows at -64"),
        ((np.zeros(129, np.uint8)[1:], 4), r"views: expected columns at multiples of 8 bytes"),
        ((bytes(128), 1 << 61), r"views: expected .* bytes"),
    ],
)
def test_views_refuse_bytes_that_do_not_fit(arguments, expected):
    block, n, *keywords = arguments
    with pytest.raises(ValueError, match=expected):
        BlockLayout([INDEX]).views(block, n, **(keywords[0] if keywords else {}))


def test_views_refuse_what_has_no_bytes():
    layout = BlockLayout([INDEX])
    with pytest.raises(TypeError):
        layout.views(3, 0)
    with pytest.raises((BufferError, ValueError, TypeError)):
        layout.views(np.zeros((64, 4), np.uint8)[:, 0], 4)


@pytest.mark.parametrize("fields", [[], [INDEX, INDEX], [Field(("a",), "object", ())], [Field(("a",), "int8", (-1,))]])
def test_a_layout_refuses_what_no_store_has(fields):
    with pytest.raises(ValueError, match=r"field"):
        BlockLayout(fields)


# ---- draws -----------------------------------------------------------------------------------------------------------


def _rows(n=40, length=10):
    step = torch.arange(n)
    return TensorDict(
        {
            "obs": torch.stack([step, -step, step + 0.5], 1),
            "done": step % length == length - 1,
            "episode": step // length,
        },
        batch_size=[n],
    )


def _buffer(sampler, n=40):
    rb = ReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler, batch_size=8)
    rb.extend(_rows(n))
    return rb


SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "epoch": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=4),
    "windows": lambda: SliceSampler(window=WindowSpec(length=3, burn_in=1, padding=1), flat=False),
    "prioritized slices": lambda: PrioritizedSliceSampler(64, 0.7, 0.5, slice_len=4),
    "double precision": lambda: PrioritizedSampler(alpha=0.7, beta=0.5, dtype=torch.float64),
}


def _drawn(rb, key=11, n=8, numbered=True):
    store, sampler = rb.storage.store, rb.sampler
    if type(sampler) is RandomSampler:
        columns = store.sample_uniform(Key.of(key), n, True, numbered)
        info = {"index_generation": columns.pop()} if numbered else {}
        return columns, columns.pop(), info
    sampler.bind(rb.storage)
    return sampler.sample_natively(rb.storage, Key.of(key), n, numbered=numbered)


def _named(rb, drawn):
    columns, rows, info = drawn
    fields = rb.storage.store.schema.fields
    return {**{field.key: c for field, c in zip(fields, columns, strict=True)}, ("index",): rows, **info}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_draw_into_a_block_is_the_draw(name):
    rb, other = _buffer(SAMPLERS[name]()), _buffer(SAMPLERS[name]())
    block = torch.empty(1 << 14, dtype=torch.uint8).numpy()
    block[:] = 0xEE
    drawn = [DrawingInto(block)]
    with drawn[0]:
        into = _named(rb, _drawn(rb))
    ndim = into["index",].ndim
    outside = _named(other, _drawn(other))
    assert into.keys() == outside.keys()
    for key, value in into.items():
        assert value.dtype == outside[key].dtype
        torch.testing.assert_close(value, outside[key], rtol=0, atol=0)
    layout = BlockLayout.of(into, ndim=ndim)
    ordered = sorted(into.values(), key=torch.Tensor.data_ptr)
    rows = into["index",].numel()
    assert holds(layout, block, ordered, rows)
    assert not holds(layout, block, ordered, rows + 64)
    assert drawn[0].used == layout.nbytes(rows)
    assert bytes(block[drawn[0].used :]) == b"\xee" * (len(block) - drawn[0].used)
    for view, column in zip(layout.views(bytes(block), rows), ordered, strict=True):
        torch.testing.assert_close(view, column.flatten(0, ndim - 1), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "extra"), [("uniform", ()), ("prioritized", (WEIGHT,)), ("epoch", ())])
def test_the_layout_of_a_draw_follows_from_the_schema(name, extra):
    rb = _buffer(SAMPLERS[name]())
    layout = BlockLayout((*rb.storage.store.schema.fields, INDEX, GENERATION, *extra))
    block = layout.empty(8, batches=3)
    kept = []
    with DrawingInto(block) as drawing:
        for k in range(3):
            assert drawing.used == k * layout.nbytes(8)
            kept.append(_named(rb, _drawn(rb, key=k)))
    for k, named in enumerate(kept):
        ordered = [named[field.key] if field.key in named else named[field.key[0]] for field in layout.fields]
        assert holds(layout, block, ordered, 8, at=k * layout.nbytes(8))
    assert drawing.used == len(block)


def test_a_block_that_is_too_small_refuses_the_draw_and_nothing_else():
    rb = _buffer(RandomSampler())
    layout = BlockLayout((*rb.storage.store.schema.fields, INDEX))
    block = layout.empty(8)
    with DrawingInto(block) as drawing:
        with pytest.raises(
            ValueError, match=r"expected a block with room for 72 bytes more, got one of 320 of which 320 are in use"
        ):
            _drawn(rb, n=9, numbered=False)
        assert drawing.used == 0
        columns, rows, _ = _drawn(rb, numbered=False)
        assert holds(layout, block, [*columns, rows], 8)
    columns, rows, _ = _drawn(rb, n=9, numbered=False)
    assert not holds(layout, block, [*columns, rows], 9)


def test_a_draw_that_fails_leaves_the_block_as_it_was():
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(_rows(4))
    rb.empty()
    block = torch.empty(4096, dtype=torch.uint8).numpy()
    with DrawingInto(block) as drawing:
        with pytest.raises(RuntimeError, match="no row"):
            _drawn(rb)
        assert drawing.used == 0


def test_what_blocks_refuse():
    layout = BlockLayout([INDEX])
    block = layout.empty(8)
    with pytest.raises(ValueError, match="multiple of 64"):
        DrawingInto(block[8:])
    with pytest.raises((BufferError, ValueError)):
        DrawingInto(bytes(64))
    with DrawingInto(block) as drawing, pytest.raises(ValueError, match="once at a time"):
        drawing.__enter__()


def test_blocks_within_each_other_and_of_other_threads():
    rb = _buffer(RandomSampler())
    layout = BlockLayout((*rb.storage.store.schema.fields, INDEX, GENERATION))
    blocks = [layout.empty(8) for _ in range(3)]
    held = SimpleNamespace()

    def elsewhere():
        with DrawingInto(blocks[2]):
            held.third = _drawn(rb)

    def places(drawn):
        return [*drawn[0], drawn[1], drawn[2]["index_generation"]]

    with DrawingInto(blocks[0]):
        with DrawingInto(blocks[1]):
            inner = _drawn(rb)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        outer = _drawn(rb)
    for block, drawn in zip(blocks, (outer, inner, held.third), strict=True):
        assert holds(layout, block, places(drawn), 8)
    assert not any(holds(layout, block, places(_drawn(rb)), 8) for block in blocks)


# ---- masses ----------------------------------------------------------------------------------------------------------


def _masses(rb, n=8, key=11):
    block = torch.empty(1 << 14, dtype=torch.uint8).numpy()
    with DrawingInto(block) as drawing:
        drawn = _drawn(rb, key=key, n=n)
    return drawing.masses, drawn


def test_masses_of_priorities_are_those_of_all_leaves():
    rb = _buffer(PrioritizedSampler(alpha=0.5, beta=1.0, eps=0.0))
    priorities = [float(1 + (k * 7) % 13) for k in range(40)]
    rb.update_priority(torch.arange(40), torch.tensor(priorities, dtype=torch.float64))
    leaves = [p**0.5 for p in priorities]
    masses, (_, rows, info) = _masses(rb)
    assert masses.total == pytest.approx(math.fsum(leaves), rel=1e-12)
    assert masses.least == min(leaves)
    assert masses.live == 40
    expected = [masses.least / leaves[row] for row in rows.tolist()]
    assert info["priority_weight"].tolist() == pytest.approx(expected, rel=1e-6)


def test_masses_of_uniform_draws_are_live_rows():
    rb = _buffer(RandomSampler(), n=17)
    assert _masses(rb)[0] == (17.0, 1.0, 17)
    rb.extend(_rows(60))
    assert _masses(rb)[0] == (64.0, 1.0, 64)


def test_masses_of_an_epoch_are_the_rows_that_are_left():
    rb = _buffer(SamplerWithoutReplacement(), n=20)
    assert [_masses(rb, key=k)[0].total for k in range(4)] == [12.0, 4.0, 0.0, 12.0]


def test_two_shards_draw_as_one_by_their_masses():
    """Weights of a batch over shards, put on one scale by the smallest leaf of each, are those of one tree."""
    priorities = torch.linspace(0.1, 4.0, 40, dtype=torch.float64)
    whole = _buffer(PrioritizedSampler(alpha=0.6, beta=0.4))
    whole.update_priority(torch.arange(40), priorities)
    shards = [_buffer(PrioritizedSampler(alpha=0.6, beta=0.4), n=20) for _ in range(2)]
    drawn = []
    for k, shard in enumerate(shards):
        shard.update_priority(torch.arange(20), priorities[20 * k : 20 * k + 20])
        drawn.append(_masses(shard, key=k))
    index = whole.sampler.priorities()
    assert sum(masses.total for masses, _ in drawn) == pytest.approx(index.core.total, rel=1e-12)
    least = min(masses.least for masses, _ in drawn)
    for k, (masses, (_, rows, info)) in enumerate(drawn):
        scaled = info["priority_weight"].double() * (least / masses.least) ** 0.4
        torch.testing.assert_close(scaled, index.weights(rows + 20 * k), rtol=1e-6, atol=0)


# ---- writes ----------------------------------------------------------------------------------------------------------


def test_rows_are_written_from_a_block():
    rb, other = _buffer(RandomSampler()), _buffer(RandomSampler(), n=10)
    store, target = rb.storage.store, other.storage.store
    layout = BlockLayout(store.schema.fields)
    block = layout.empty(12)
    for view, column in zip(layout.views(block, 12), store.tensors, strict=True):
        view.copy_(column[:12])
    sent = bytes(block)
    written = target.write(WritePlan(lane=0), layout.views(sent, 12), 12)
    assert written.rows.tolist() == list(range(10, 22))
    assert (other[10:22] == _rows()[:12]).all()


def test_priorities_are_updated_from_a_block():
    rb = _buffer(PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0))
    rows = torch.arange(10)
    tickets = rb.storage.tickets_of(rows)
    rb[3:5] = _rows()[3:5]
    layout = BlockLayout([INDEX, GENERATION, Field(("priority",), "float64", ())])
    block = layout.empty(10)
    for view, column in zip(layout.views(block, 10), (rows, tickets, rows + 2.0), strict=True):
        view.copy_(column)
    index, generation, priority = layout.views(bytes(block), 10)
    rb.update_priority(index, priority, generation=generation)
    leaves = rb.sampler.priorities().leaves(10).tolist()
    assert leaves == [float(n) for n in range(2, 12)]  # those of edited rows, too
    assert rb.stats()["priority_updates_dropped"] == 0
