"""ConsumingSampler beside edits: a row that is edited between its draw and its read comes once, and is used up once."""

import threading
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from engram import ConsumingSampler, LazyMemmapStorage, LazyTensorStorage, ListStorage, MaxInFlight, ReplayBuffer

STORAGES = ["tensor", "shared", "directory", "list"]


def buffer(kind, path, rows=8, most=1, batch_size=8, **arguments):
    makers = {
        "tensor": lambda: LazyTensorStorage(rows),
        "shared": lambda: LazyTensorStorage(rows),
        "directory": lambda: LazyMemmapStorage(rows, scratch_dir=path / "store"),
        "list": lambda: ListStorage(rows),
    }
    sampler = ConsumingSampler(most)
    rb = ReplayBuffer(
        storage=makers[kind](), sampler=sampler, batch_size=batch_size, shared=kind == "shared", **arguments
    )
    data = TensorDict({"id": torch.arange(rows), "reward": torch.zeros(rows)}, batch_size=[rows])
    rb.extend(list(data) if kind == "list" else data)
    return rb


def edit(rb, row, value):
    rb[row] = TensorDict({"id": torch.tensor(row), "reward": torch.tensor(float(value))})


def before(rb, name, act):
    """``act`` once before the next call of a method of the storage."""
    method = getattr(rb.storage, name)

    def first(*args, **kwargs):
        setattr(rb.storage, name, method)
        act()
        return method(*args, **kwargs)

    setattr(rb.storage, name, first)


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("edits", [1, 3, 8])
def test_a_row_edited_between_its_draw_and_its_read_comes_once_with_its_edit(kind, edits, tmp_path):
    rb = buffer(kind, tmp_path)
    before(rb, "read", lambda: [edit(rb, row, 10 + row) for row in range(edits)])
    batch = rb.sample()
    assert sorted(batch["id"].tolist()) == list(range(8))
    assert all(
        reward == (10 + row if row < edits else 0)
        for row, reward in zip(batch["id"].tolist(), batch["reward"].tolist(), strict=True)
    )
    assert len(rb) == 0
    assert rb.sampler.used_rows(8).tolist() == list(range(8))


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("most", [1, 2])
def test_a_row_edited_while_it_is_read_is_used_up(kind, most, tmp_path):
    rb = buffer(kind, tmp_path, most=most)
    for turn in range(most):
        draw = rb.sampler.draw(rb.storage.extent(), 8, key=7)
        for row in range(4):
            edit(rb, row, turn)
        assert rb.sampler.used_rows(8).tolist() == []
        rb.sampler.were_read(draw)
    assert rb.sampler.used_rows(8).tolist() == list(range(8))
    assert len(rb) == 0


@pytest.mark.parametrize("kind", STORAGES)
def test_a_row_edited_before_a_read_that_fails_can_be_drawn_again(kind, tmp_path):
    rb = buffer(kind, tmp_path)

    def fail():
        for row in range(4):
            edit(rb, row, 1)
        raise OSError("no read")

    before(rb, "read", fail)
    with pytest.raises(OSError, match="no read"):
        rb.sample()
    assert len(rb) == 8
    assert sorted(rb.sample()["id"].tolist()) == list(range(8))


@pytest.mark.parametrize("kind", STORAGES)
def test_edits_and_writes_between_draw_and_read(kind, tmp_path):
    rb = buffer(kind, tmp_path, batch_size=4)
    draw = rb.sampler.draw(rb.storage.extent(), 4, key=3)
    rb.sampler.were_read(draw)
    left = sorted(set(range(8)) - set(draw.rows.tolist()))
    edit(rb, left[0], 5)
    before(rb, "read", lambda: (edit(rb, left[1], 6), rb.remove([left[2]])) if kind != "list" else edit(rb, left[1], 6))
    got = rb.sample()["id"].tolist()
    assert sorted(got) == sorted(set(left) - ({left[2]} if kind != "list" else set()))
    assert len(rb) == 0


@pytest.mark.parametrize("kind", ["tensor", "shared"])
def test_rows_edited_while_they_are_read_give_their_room_back(kind, tmp_path):
    rb = buffer(kind, tmp_path)
    rb.limit(MaxInFlight(8))
    before(rb, "read", lambda: [edit(rb, row, 1) for row in range(8)])
    assert len(rb.sample()) == 8
    more = TensorDict({"id": torch.arange(8, 16), "reward": torch.zeros(8)}, batch_size=[8])
    rb.extend(more, timeout=5)
    assert sorted(rb.sample()["id"].tolist()) == list(range(8, 16))


@pytest.mark.parametrize("kind", STORAGES)
def test_each_row_comes_once_beside_a_thread_that_edits(kind, tmp_path):
    rb, over, errors = buffer(kind, tmp_path, rows=512, batch_size=8), threading.Event(), []

    def edits():
        try:
            value = 0
            while not over.is_set():
                value += 1
                edit(rb, value * 37 % 512, value)
        except Exception as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    thread = threading.Thread(target=edits)
    thread.start()
    try:
        seen = Counter(row for batch in rb for row in batch["id"].tolist())
    finally:
        over.set()
        thread.join()
    assert not errors
    assert seen == dict.fromkeys(range(512), 1)
    assert len(rb.sampler.used_rows(512)) == 512
