"""Rows on a device, which torch's CPU stands for: what two threads do, steps of environments, memory that there is not."""

import threading

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, RowError, TensorDictReplayBuffer
from engram.store import DeviceStore
from tests.store.device.test_priorities import There, steps_of
from tests.store.test_device import schema


def test_steps_of_environments_are_those_of_the_host():
    both = [
        TensorDictReplayBuffer(
            storage=storage(40, ndim=2),
            sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
            batch_size=16,
            generator=torch.Generator().manual_seed(1),
        )
        for storage in (There, LazyTensorStorage)
    ]
    random = torch.Generator().manual_seed(2)
    for time in (1, 3, 1, 5, 9, 13):
        data = TensorDict(
            {"a": torch.rand(4, time, generator=random), "b": torch.rand(4, time, 2, generator=random)}, [4, time]
        )
        error = torch.rand(16, generator=random)
        drawn = []
        for rb in both:
            rb.extend(data)
            batch = rb.sample()
            rb.update_priority(batch["index"], error)
            drawn.append(rb.sample())
            assert (rb[:, :2] == rb[:, :2]).all()
        assert (drawn[0].exclude("priority_weight") == drawn[1].exclude("priority_weight")).all()
    assert torch.equal(both[0][:]["a"], both[1][:]["a"])
    assert isinstance(both[0].storage.store, DeviceStore)


def test_operations_of_threads_do_not_mix():
    """Sums stay those of the leaves, whoever writes, draws and updates."""
    rb = TensorDictReplayBuffer(storage=There(200), sampler=PrioritizedSampler(alpha=1.0, beta=1.0), batch_size=32)
    rb.extend(steps_of(200))
    rb.sample()
    failures = []

    def run(act):
        try:
            for turn in range(60):
                act(turn)
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    def update(turn):
        batch = rb.sample()
        rb.update_priority(batch["index"], torch.rand(32), generation=batch["index_generation"])

    acts = [
        lambda turn: rb.extend(steps_of(17, turn)),
        update,
        update,
        lambda turn: rb.__setitem__(turn, steps_of(1)[0]),
    ]
    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    tree = rb.sampler.priorities().tree
    assert torch.allclose(tree.leaves.view(-1, 128).sum(1), tree.sums[1][: len(tree.leaves) // 128], rtol=1e-12)
    rows = torch.arange(200)
    assert torch.equal(rb.storage.store.rows.numbers[:-1], rb.storage.writes_of(rows, rb.storage.tickets_of(rows)))


@pytest.mark.parametrize("n", [2, 1_024, 1_025, 5_000])
def test_of_a_row_that_is_named_twice_the_last_entry_stays(n):
    store = DeviceStore.on(schema(50, 1), torch.device("cpu"))
    rows = torch.randint(50, (n,), generator=torch.Generator().manual_seed(n))
    last = store.rows.last_of(rows)
    places = {int(row): place for place, row in enumerate(rows.tolist())}
    assert last.tolist() == [places[row] for row in rows.tolist()]
    assert torch.equal(
        store.rows.last_of(rows.flip(0)),
        (n - 1) - torch.tensor([rows.flip(0).flip(0).tolist().index(r) for r in rows.flip(0).tolist()]),
    )


def test_rows_are_edited_by_an_index_of_the_device():
    rb = ReplayBuffer(storage=There(10))
    rb.extend(torch.arange(6))
    store = rb.storage.store
    before = rb.storage.tickets_of(torch.arange(6))
    store.edit_there(torch.tensor([1, -1, 1]), [0], [torch.tensor([7, 8, 9])])
    assert rb[:].tolist() == [0, 9, 2, 3, 4, 8]
    with rb.storage.paused:
        now = rb.storage.tickets_of(torch.arange(6))
    assert (now != before).tolist() == [False, True, False, False, False, True]
    assert torch.equal(rb.storage.writes_of(torch.arange(6), now), before)
    store.edit_there(torch.tensor([0, 6, 99]), [0], [torch.tensor([5, 5, 5])])
    with pytest.raises(RowError, match="got 2 others"):
        rb.stats()
    assert rb[:].tolist() == [5, 9, 2, 3, 4, 8]
    assert rb.extend(torch.arange(3)).tolist() == [6, 7, 8]
    assert rb.write_count == 9


def test_too_little_memory(monkeypatch):
    taken = []
    monkeypatch.setattr("engram.store.device.store.free_bytes", lambda device: 1_000)
    monkeypatch.setattr("engram.store.device.store.DeviceRows", lambda *given: taken.append(given))
    rb = ReplayBuffer(storage=There(100_000))
    with pytest.raises(RuntimeError, match=r"100,000 rows on cpu need [\d,]+ bytes, and 1,000 are free"):
        rb.extend(torch.arange(3))
    assert not taken


def test_rows_that_exist():
    tensors = [torch.rand(4, 3), torch.arange(4)]
    store = DeviceStore.on(schema(4, 1), torch.device("cpu"), tensors)
    store.fill()
    assert store.extent().filled == (4,)
    assert torch.equal(store.read(torch.tensor([2]))[0][0], tensors[0][2:3])
    assert (store.rows.numbers[:-1] > 0).all()
