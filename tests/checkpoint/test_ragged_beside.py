"""Checkpoints of ragged rows that others change while they are saved, and whose items come to lie elsewhere in the checkpoint."""

import pytest
import torch

from engram import LazyTensorStorage, Ragged, ReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from engram.saved import ragged
from engram.storages import tensor_state


def rows(first, n, items=2):
    numbers = torch.arange(first, first + n, dtype=torch.int32)
    return {"number": numbers.long(), "a": (numbers.repeat_interleave(items), torch.arange(n + 1) * items)}


def made(capacity, **more):
    storage = LazyTensorStorage(capacity, ragged={"a": Ragged(torch.int32, max_length=8)}, **more)
    return ReplayBuffer(storage=storage, batch_size=2)


def check(root, step, numbers, capacity, items=2, **more):
    """The checkpoint has these rows, each with its own items."""
    rb = made(capacity, **more)
    Checkpointer(root, rb).restore(step, resume="exact")
    found = rb[:]
    assert sorted(found["number"].tolist()) == sorted(numbers)
    for number, one in zip(found["number"].tolist(), found["a"].unbind(), strict=True):
        assert one.tolist() == [number] * items


@pytest.mark.parametrize("paranoid", [False, True])
def test_rows_in_slots_whose_items_are_written_again_elsewhere(paranoid, ram):
    """More than half of a piece is replaced: what is left of it is written again, and its rows did not change."""
    n, more = 20_000, {"ragged_layout": "slots"}
    rb = made(n, **more)
    checkpointer = Checkpointer(ram, rb, paranoid=paranoid, keep=20)
    rb.extend(rows(0, n))
    checkpointer.save(1)
    rb.extend(rows(n, 15_000))
    checkpointer.save(2)
    check(ram, 2, range(15_000, 35_000), n, **more)
    for step in range(3, 6):
        rb.extend(rows(n * step, 1_500))
        checkpointer.save(step)
        check(ram, step, rb[:]["number"].tolist(), n, **more)


@pytest.mark.parametrize("change", ["remove", "edit", "overwrite"])
def test_all_rows_of_a_piece_change_while_it_is_saved(change, ram, monkeypatch):
    """Its neighbour must not be taken for what has its rows."""
    monkeypatch.setattr(tensor_state, "_COPIED", 0)  # as of a store that is too large to be copied: writers do not wait
    capacity, more = 4096, {"ragged_bytes": 1 << 18}
    rb = made(capacity, **more)
    checkpointer = Checkpointer(ram, rb)
    for step in range(8):
        rb.extend(rows(2 * step, 2, 4))
        checkpointer.save(step)
    rb.extend(rows(16, 1000, 4))
    checkpointer.save(9)
    rb.extend(rows(1016, 500, 4))
    write, gone = ragged.ItemsWriter.write, [6, 7]

    def later(self, numbers):
        monkeypatch.undo()
        if change == "remove":
            rb.remove(torch.tensor(gone))
        elif change == "edit":
            rb.storage.store.edit(torch.tensor(gone), [0], [torch.tensor(gone)])
        else:
            rb.extend(rows(1516, capacity - 1516 + 8, 4))
            gone[:] = range(8)
        return write(self, numbers)

    monkeypatch.setattr(ragged.ItemsWriter, "write", later)
    checkpointer.save(10)
    check(ram, 10, set(range(1516)) - {*gone}, capacity, 4, **more)


@pytest.mark.parametrize("emptied", ["empty", "remove"])
def test_a_dump_without_rows(emptied, ram):
    rb = made(10)
    rb.extend(rows(0, 3))
    if emptied == "empty":
        rb.empty()
    else:
        rb.remove(torch.arange(3))
    rb.dumps(ram / "dump")
    other = made(10)
    other.extend(rows(5, 2))
    other.loads(ram / "dump")
    assert len(other) == 0
