"""Rows that change between the kernels: a batch holds whole rows of one moment each, or says that it does not."""

import builtins
import random
import threading

import pytest
import torch

from engram.store.device.chain import Chain, columns_of
from engram.types import WritePlan
from tests import stress
from tests.store.device.stores import as_bytes, assert_as_uniform, assert_whole, content, filled, prioritized, remove
from tests.store.device.twin import Twin

FIELDS = (("int64", ()), ("uint8", (700,)), ("float32", (3,)))


class Disturbed(Chain):
    """Something happens before a kernel is launched. ``without``: a kernel that is not."""

    def __init__(self, *arguments, before="gather", act=lambda: None, without=None, **options):
        self.before, self.act, self.without = before, act, without
        super().__init__(*arguments, **options)

    def _launch(self, name, *arguments, **constants):
        if name == self.before:
            self.act()
        if name != self.without:
            super()._launch(name, *arguments, **constants)


class DisturbedTwin(Twin):
    def __init__(self, *arguments, before="gather", act=lambda: None, without=None, **options):
        self.before, self.act, self.without, self._times = before, act, without, 0
        super().__init__(*arguments, **options)

    def gather(self, *arguments):
        self._times += 1
        if self.before == "gather" and self._times == 1:
            self.act()
        super().gather(*arguments)

    def repair(self, batch, *arguments):
        if self.before == "repair":
            self.act()
        super().repair(batch, *arguments)


def disturbed(of, store, n, **options):
    if of is Chain:
        at = columns_of(store, priorities=options.pop("priorities", None))
        return Disturbed(at, n, "cpu", rows_per_program=1 << (n - 1).bit_length(), **options)
    return DisturbedTwin(store, n, "cpu", **options)


def rewrite(store, rows):
    store.write(WritePlan(rows=torch.as_tensor(rows)), content(store, torch.as_tensor(rows) + 5000), len(rows))


def edit(store, rows):
    rows = torch.as_tensor(rows)
    store.edit(rows, [1], [content(store, rows + 9000)[1]])


CHANGES = {
    "rewrite": lambda store: rewrite(store, [1, 3, 4, 5, 7, 9]),
    "rewrite all": lambda store: rewrite(store, list(range(10))),
    "edit": lambda store: edit(store, [1, 3, 5]),
    "remove": lambda store: remove(store, [0, 2, 4, 6, 8]),
    "remove but one": lambda store: remove(store, [0, 1, 2, 3, 4, 5, 6, 8, 9]),
    "append": lambda store: store.write(WritePlan(lane=0), content(store, torch.arange(50, 56)), 6),
    "empty": lambda store: store.empty(keep_write_count=False),
    "empty and append": lambda store: (
        store.empty(keep_write_count=False),
        store.write(WritePlan(lane=0), content(store, torch.arange(70, 72)), 2),
    ),
}


@pytest.mark.parametrize("of", [Chain, Twin])
@pytest.mark.parametrize("before", ["gather", "repair"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_writer_between_kernels(of, before, change):
    store = filled(10, 1, FIELDS)
    n = 2 if change == "empty" else 5
    chain = disturbed(of, store, n, before=before, act=lambda: CHANGES[change](store))
    batch = chain.run(3)
    assert_whole(batch, store)
    assert batch.valid.all() or change == "empty"
    if change == "empty":
        assert not batch.valid.any()
        assert batch.rows.tolist() == [-1] * n
        assert of is Twin or int(chain.counters[4]) == n
    assert (int(chain.counters[2]) if of is Chain else chain.redraws) > 0 or change == "empty"


@pytest.mark.parametrize("change", ["rewrite all", "remove but one", "empty"])
@pytest.mark.parametrize("of", [Chain, Twin])
def test_a_writer_between_kernels_of_prioritized_draws(of, change):
    store = filled(10, 1, FIELDS)
    index = prioritized(store)
    n = 2 if change == "empty" else 6
    chain = disturbed(of, store, n, kind="prioritized", priorities=index, act=lambda: CHANGES[change](store))
    batch = chain.run(3)
    assert_whole(batch, store)
    weights = index.weights(batch.rows.clamp(min=0))
    assert torch.allclose(batch.weights[batch.valid].double(), weights[batch.valid], rtol=1e-6)
    assert batch.weights[~batch.valid].tolist() == [0.0] * int((~batch.valid).sum())


@pytest.mark.parametrize("before", ["gather", "repair"])
def test_without_repair_rows_would_be_stale_or_torn(before):
    """What the tests above would find then."""
    store = filled(10, 1, FIELDS)
    chain = disturbed(Chain, store, 6, before=before, act=lambda: rewrite(store, list(range(10))), without="repair")
    block = chain.layout.empty("cpu").zero_()
    batch = chain.run(3, block)
    rows, words = chain._state[72:84].view(2, 6)
    batch.rows.copy_(rows), batch.tickets.copy_(words >> 2), batch.valid.fill_(True)
    with pytest.raises(AssertionError):
        assert_whole(batch, store)


def test_a_torn_row_would_be_seen():
    """Half of the fields are copied before a rewrite, half after it."""
    store = filled(10, 1, FIELDS)
    torn = []

    class Halves(Disturbed):
        def _launch(self, name, *arguments, **constants):
            if name != "gather":
                return super()._launch(name, *arguments, **constants)
            table, chunks = self._kernels.H_TABLE.value, self._kernels.H_CHUNKS.value
            for first, n in ((0, 1), (1, self._chunks - 1)):
                self._state[[table, chunks]] += torch.tensor([first * 8, n - self._chunks])
                super()._launch(name, *arguments, **constants)
                self._state[[table, chunks]] -= torch.tensor([first * 8, n - self._chunks])
                if not first:
                    rewrite(store, list(range(10)))
            torn.append(self.layout.views(self.block).fields[0].clone())
            return None

    chain = Halves(columns_of(store), 4, "cpu", rows_per_program=4)
    chain.block = chain.layout.empty("cpu")
    batch = chain.run(1, chain.block)
    assert not torch.equal(torn[0], batch.fields[0])
    assert_whole(batch, store)


def test_a_row_that_moves_at_every_try_is_replaced():
    """Each time that a ticket is looked at again, the row has been written once more."""
    store = filled(6, 1, FIELDS)
    kernels = Chain(columns_of(store), 1, "cpu")._kernels
    copy, tries = kernels._copy, []

    def disturbing(*arguments, **constants):
        copy(*arguments, **constants)
        tries.append(1)
        if len(tries) < 30:
            rewrite(store, list(range(6)))

    chain = Disturbed(columns_of(store), 1, "cpu", before="repair")

    def act():
        rewrite(store, list(range(6)))
        kernels._copy = disturbing

    chain.act = act
    try:
        batch = chain.run(2)
    finally:
        kernels._copy = copy
    assert len(tries) >= 30
    assert_whole(batch, store)
    assert batch.valid.all()


@pytest.mark.parametrize("of", [Chain, Twin])
def test_places_that_cannot_be_filled_repeat_a_good_row(of):
    """One row is left, which hardly any draw finds, and one place has it."""
    store = filled(2000, 1, [("int64", ()), ("uint8", (3,))])
    chain = disturbed(
        of, store, 4, kind="permuted", act=lambda: remove(store, [row for row in range(2000) if row != 777])
    )
    batch = chain.run(ranks=torch.tensor([5, 1000, 777, 1900]))
    assert_whole(batch, store)
    assert batch.rows.tolist() == [777] * 4
    assert of is Twin or int(chain.counters[3]) == 3


@pytest.mark.parametrize("of", [Chain, Twin])
def test_an_empty_store(of):
    store = filled(4, 2, FIELDS, rows=[0, 0])
    index = prioritized(store)
    for kind in ("uniform", "prioritized", "permuted"):
        chain = disturbed(of, store, 1, kind=kind, priorities=index)
        batch = chain.run(1, chain.layout.empty("cpu").fill_(77), ranks=torch.tensor([0]))
        assert not batch.valid.any()
        assert batch.rows.tolist() == batch.tickets.tolist() == [-1]
        assert not any(as_bytes(field).any() for field in batch.fields)


@pytest.mark.parametrize("state", [0, 1, 3])
def test_tickets_that_name_no_whole_row(state):
    """Unused, being written, void: under any number, of a write or an edit."""
    store = filled(10, 1, FIELDS)
    words = store._ticket_words()
    words[:9] = torch.tensor([number << 2 | state for number in (0, 1, 2, 2**60, 5, 6, 7, 8, 9)])
    words[3:5] |= -(2**63)
    batch = Chain(columns_of(store), 8, "cpu", rows_per_program=8).run(2)
    assert batch.rows.tolist() == [9] * 8
    assert batch.valid.all()


def test_lanes_that_say_more_than_there_is():
    """Words of a damaged store: no address leaves its memory."""
    store = filled(8, 2, FIELDS)
    at = columns_of(store)
    lanes = store.control_memory[0][at.lanes_at - store.control_memory[0].data_ptr() :].view(torch.int64).view(2, 8)
    for words in ([2**62, 0, 0], [-(2**62), 0, 0], [0, 2**62, 0], [0, 0, 2**63 - 1], [-1, -1, -1]):
        lanes[0, :3] = torch.tensor(words)
        assert_whole(Chain(at, 4, "cpu", rows_per_program=4).run(1), store)
        assert_whole(Twin(store, 4, "cpu").run(1), store)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_programs_in_any_order(monkeypatch, kind):
    from triton.runtime import interpreter

    store = filled(40, 4, FIELDS)
    index = prioritized(store)
    at = columns_of(store, priorities=index)
    expected = Chain(at, 5, "cpu", kind=kind).run(9)
    shuffle = random.Random(1)

    def shuffled(*arguments):
        order = builtins.range(*arguments)
        return shuffle.sample(order, len(order))

    monkeypatch.setattr(interpreter, "range", shuffled, raising=False)
    chain = Chain(at, 5, "cpu", kind=kind, seed=None)
    batch = chain.run(9)
    assert batch.rows.tolist() == expected.rows.tolist()
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(batch.fields, expected.fields, strict=True))
    assert chain.counters[:2].tolist() == [1, 0]


def test_what_cannot_be_made():
    at = columns_of(filled(3))
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        Chain(at, 0, "cpu")
    with pytest.raises(ValueError, match="kind: expected 'uniform'.* got 'slices'"):
        Chain(at, 1, "cpu", kind="slices")
    with pytest.raises(ValueError, match="expected columns with a priority tree"):
        Chain(at, 1, "cpu", kind="prioritized")


def test_without_triton(monkeypatch):
    import sys

    import engram.store.device

    monkeypatch.setitem(sys.modules, "engram.store.device.kernels", None)
    monkeypatch.delattr(engram.store.device, "kernels", raising=False)
    store = filled(5)
    with pytest.raises(RuntimeError, match=r"expected Triton, got .* pip install triton"):
        Chain(columns_of(store), 2, "cpu")
    assert_as_uniform(Twin(store, 2, "cpu").run(1), store, 1)


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize("of", [Chain, Twin])
def test_rows_are_whole_beside_a_writer(of):
    """A thread rewrites rows, of which all numbers are the same. The interpreter reads slowly: it is not to meet each row in vain."""
    store = filled(64, 1, [("int64", ()), ("int64", (500,)), ("int64", (20,))])
    stop = threading.Event()

    def write():
        number = 0
        while not stop.wait(0.002):
            number += 1
            rows = torch.arange(number % 5, 64, 5)
            values = torch.full((len(rows),), number)
            columns = [
                values,
                values[:, None].expand(-1, 500).contiguous(),
                values[:, None].expand(-1, 20).contiguous(),
            ]
            store.write(WritePlan(rows=rows), columns, len(rows))

    reader, valid = disturbed(of, store, 8), 0
    store.write(
        WritePlan(rows=torch.arange(64)),
        [torch.zeros((64, *f.shape), dtype=torch.int64) for f in store.schema.fields],
        64,
    )
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for key in range(stress.size(3, 20_000) if of is Chain else stress.size(100, 1_000_000)):
            batch = reader.run(key)
            first, second, third = batch.fields
            valid += int(batch.valid.sum())
            assert (second == first[:, None]).all()
            assert (third == first[:, None]).all()
    finally:
        stop.set()
        writer.join()
    assert valid > 0
