"""Rows that stay on a device: what is read from there is what the store holds under its ticket, and never anything else."""

import pytest
import torch

from engram.store.device.chain import Chain, NoRoom, ResidentRows, columns_of
from engram.types import WritePlan
from tests.device.imitation import Imitation
from tests.store.device.stores import (
    assert_as_prioritized,
    assert_as_uniform,
    assert_whole,
    content,
    filled,
    prioritized,
)
from tests.store.device.test_repair import CHANGES, FIELDS, Disturbed, rewrite

WORD = 40


def resident_in(store):
    return ResidentRows(store, Imitation())


def chain_of(store, resident, n=6, cls=Chain, **options):
    return cls(columns_of(store, priorities=options.pop("priorities", None)), n, "cpu", resident=resident, **options)


def hits(chain):
    return int(chain.counters[5])


def content_of(store, resident, row):
    return [field[row].tolist() for field in resident.fields], [
        column[row].reshape(-1).view(torch.uint8).tolist()
        if column[row].dim()
        else column[row : row + 1].view(torch.uint8).tolist()
        for column in store.tensors
    ]


@pytest.mark.parametrize(("lanes", "per"), [(1, 8), (3, 8), (1, 1)])
def test_rows_cross_once(lanes, per):
    store = filled(6, lanes, FIELDS)
    resident = resident_in(store)
    chain = chain_of(store, resident, rows_per_program=per)
    seen, expected = set(), 0
    for key in range(6):
        before = hits(chain)
        batch = chain.run(key)
        assert_as_uniform(batch, store, key)
        assert hits(chain) - before == sum(row in seen for row in batch.rows.tolist())
        expected += sum(row in seen for row in batch.rows.tolist())
        seen |= set(batch.rows.tolist())
    assert len(seen) == 6
    assert hits(chain) == expected
    for row in range(6):
        kept, held = content_of(store, resident, row)
        assert kept == held


def test_what_is_resident_is_read_and_nothing_else_of_the_store():
    """Where the words agree the store's bytes are not looked at: bytes without a ticket show what was read."""
    store = filled(3, 1, FIELDS)
    chain = chain_of(store, resident_in(store), 16, rows_per_program=16)
    chain.run(0)
    expected = chain.run(1)
    store.tensors[1].fill_(77)  # past the tickets
    again = chain.run(1)
    assert torch.equal(again.fields[1], expected.fields[1])
    rewrite(store, [0, 1, 2])
    assert_as_uniform(chain.run(1), store, 1)


def test_rows_by_priority():
    store = filled(6, 1, FIELDS)
    index = prioritized(store)
    chain = chain_of(store, resident_in(store), kind="prioritized", priorities=index)
    for key in range(3):
        assert_as_prioritized(chain.run(key), store, index, key)
    assert hits(chain) > 0


@pytest.mark.stress(sample=8)
@pytest.mark.parametrize("before", ["draw", "gather", "repair"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_writer_between_kernels(before, change):
    """Also one that comes after draw() found a row resident: then its ticket is another one."""
    store = filled(10, 1, FIELDS)
    act = []
    n = 2 if change == "empty" else 4
    options = {"before": before, "act": lambda: act and act.pop()(), "rows_per_program": 4}
    chain = chain_of(store, resident_in(store), n, Disturbed, **options)
    for key in range(3):
        chain.run(key)
    act.append(lambda: CHANGES[change](store))
    for key in (1, 2):
        assert_whole(chain.run(key), store)
    assert not act
    words = store._ticket_words()
    for row in range(10):
        if int(chain._resident.words[row]) == int(words[row]):
            kept, held = content_of(store, chain._resident, row)
            assert kept == held


def test_a_torn_row_is_not_kept():
    store = filled(2, 1, FIELDS)
    resident = resident_in(store)
    chain = chain_of(store, resident, 4)
    words = store._ticket_words()
    committed = words.clone()
    words[:] = committed & ~3 | 1  # both are being written
    assert not chain.run(0).valid.any()
    assert resident.words.tolist() == [0, 0]
    words[:] = committed
    assert chain.run(0).valid.all()


def test_a_later_row_is_not_replaced_by_an_earlier_one():
    """Another stream has kept what was written since."""
    store = filled(2, 1, FIELDS)
    resident = resident_in(store)
    later = int(store._ticket_words()[0]) + WORD
    resident.words[:] = torch.tensor([later, 1])  # 1: another program is at it
    before = [field.clone() for field in resident.fields]
    assert_as_uniform(chain_of(store, resident, 8).run(0), store, 0)
    assert resident.words.tolist() == [later, 1]
    for one, other in zip(resident.fields, before, strict=True):
        assert torch.equal(one, other)


def test_edits_and_chains_that_share_rows():
    store = filled(6, 1, FIELDS)
    resident = resident_in(store)
    one, other = (chain_of(store, resident, 12, rows_per_program=16) for _ in range(2))
    for key in range(3):
        one.run(key)
    assert hits(other) == 0
    assert_as_uniform(other.run(9), store, 9)
    assert hits(other) == 12
    store.edit(torch.tensor([1, 4]), [2], [content(store, torch.tensor([900, 901]))[2]])
    for chain in (one, other):
        for key in range(3):
            assert_as_uniform(chain.run(key), store, key)


def test_a_lane_that_wraps():
    store = filled(8, 1, FIELDS)
    chain = chain_of(store, resident_in(store), 4)
    for turn in range(5):
        assert_as_uniform(chain.run(turn), store, turn)
        store.write(WritePlan(lane=0), content(store, torch.arange(3) + 100 * turn), 3)


def test_too_little_memory_is_refused_before_any_is_taken():
    store, device = filled(1000, 1, [("uint8", (1000,))]), Imitation()
    device.free = 1_000_000
    with pytest.raises(
        NoRoom, match=r"all rows stay on cpu: expected 1\.02 MB, got 1 MB that are free\. Use fewer rows"
    ):
        ResidentRows(store, device)
    device.free = 1_016_100
    assert ResidentRows(store, device).nbytes == 1_016_064
