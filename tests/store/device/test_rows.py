"""Rows on a device, which torch's CPU stands for: what two threads do, steps of environments, memory that there is not."""

import contextlib
import subprocess
import threading
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.overrides import TorchFunctionMode

from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, RowError, TensorDictReplayBuffer
from engram.store.blocks import Key
from engram.store.device import rows
from engram.store.device.row_operations import RowOperations
from engram.store.device.store import DeviceStore
from engram.store.priorities import DeviceIndex, PriorityConfig, PriorityIndex
from engram.types import WritePlan
from tests.device.imitation import Imitation
from tests.store.device.test_priorities import steps_of
from tests.store.device.there import There
from tests.store.test_device import columns, schema
from tests.waiting import until

CONFIG = PriorityConfig(0.6, 0.4, 0.0, False)
#: Of priorities, as one is saved.
STATE = {"alpha": 0.5, "beta": 0.5, "highest": 2.0, "leaves": torch.ones(4, dtype=torch.float64)}


def test_kernels_that_cannot_be_compiled_are_done_without(monkeypatch):
    """Triton calls a C compiler, which may find no headers."""

    def fails(*_):
        raise subprocess.CalledProcessError(1, "gcc main.c")

    device = Imitation()
    there = SimpleNamespace(device=torch.device("cuda", 0), accelerator=device)
    monkeypatch.setattr(rows, "RowKernels", fails)
    with pytest.warns(UserWarning, match=r"got none: CalledProcessError: .*gcc main\.c"):
        assert type(rows.work_on(there)) is RowOperations


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


def test_an_edit_is_known_although_another_row_was_removed_since():
    rb = ReplayBuffer(storage=There(10))
    rb.extend(torch.arange(6))
    before = rb.storage.tickets_of(torch.arange(6))
    rb.storage.store.edit_there(torch.tensor([1, 2]), [0], [torch.tensor([7, 8])])
    rb.remove(torch.tensor([2, 4]))
    assert rb.storage.store.changes(int(before.max()) + 1).rows.tolist() == [1]
    assert rb[:].tolist() == [0, 7, 3, 5]


def test_too_little_memory(monkeypatch):
    taken = []
    monkeypatch.setattr("engram._support.devices.free_bytes", lambda device: 1_000)
    monkeypatch.setattr("engram.store.device.store.DeviceRows", lambda *given: taken.append(given))
    rb = ReplayBuffer(storage=There(100_000))
    with pytest.raises(RuntimeError, match=r"100,000 rows on cpu need [\d,]+ bytes, and 1,000 are free"):
        rb.extend(torch.arange(3))
    assert not taken


def test_too_little_memory_for_priorities(monkeypatch):
    rb = ReplayBuffer(storage=There(100_000), batch_size=2)
    rb.extend(torch.arange(3))

    def drawn():
        rb.set_sampler(PrioritizedSampler(alpha=0.6, beta=0.4))
        return rb.sample()

    monkeypatch.setattr("engram._support.devices.free_bytes", lambda device: 1_000)
    with pytest.raises(RuntimeError, match=r"priorities of 100,000 rows on cpu need [\d,]+ bytes, and 1,000 are free"):
        drawn()
    monkeypatch.undo()
    assert drawn().shape == (2,)


def test_rows_that_exist():
    tensors = [torch.rand(4, 3), torch.arange(4)]
    store = DeviceStore.on(schema(4, 1), torch.device("cpu"), tensors)
    store.fill()
    assert store.extent().filled == (4,)
    assert torch.equal(store.read(torch.tensor([2]))[0][0], tensors[0][2:3])
    assert (store.rows.numbers[:-1] > 0).all()


# ---- two streams, two threads ------------------------------------------------------------------------------------------------


def written():
    store = DeviceStore.on(schema(16, 1), torch.device("cpu"))
    store.write(WritePlan(lane=0), columns(torch.arange(8)), 8)
    index = DeviceIndex.of_device_store(store, "main", CONFIG)[0]
    return store, index


def numbers_of(store):
    return store.tickets_of(torch.arange(2))


#: What reads or writes memory of the device.
CALLS = {
    "write": lambda store, _: store.write(WritePlan(lane=0), columns(torch.arange(2)), 2),
    "read": lambda store, _: store.read(torch.arange(4)),
    "read some fields": lambda store, _: store.read(torch.arange(4), which=[1]),
    "sample": lambda store, _: store.sample_uniform(Key.of(1), 4, with_rows=True),
    "edit": lambda store, _: store.edit(torch.tensor([1, 3]), [0, 1], columns(torch.arange(2))),
    "edit consecutive rows": lambda store, _: store.edit(torch.arange(2), [0, 1], columns(torch.arange(2))),
    "edit there": lambda store, _: store.edit_there(torch.tensor([1, 3]), [0, 1], columns(torch.arange(2))),
    "changes": lambda store, _: store.changes(),
    "patch": lambda store, _: store.patch(torch.arange(2), [0, 1], columns(torch.arange(2)), numbers_of(store)),
    "empty": lambda store, _: store.empty(keep_write_count=False),
    "refilled": lambda store, _: store.refilled(),
    "fill": lambda store, _: store.fill(),
    "detached": lambda store, _: store.detached(),
    "replace": lambda store, _: store.replace(store.state(), lambda _: None),
    "on_host": lambda store, _: store.on_host([1]),
    "check": lambda store, _: store.rows.check(),
    "alpha": lambda _, index: setattr(index, "alpha", 0.5),
    "beta": lambda _, index: setattr(index, "beta", 0.5),
    "highest": lambda _, index: index.highest,
    "total": lambda _, index: index.total,
    "default_priority": lambda _, index: index.default_priority,
    "masses": lambda _, index: index.masses,
    "leaves": lambda _, index: index.leaves(4),
    "weights": lambda _, index: index.weights(torch.arange(4)),
    "state": lambda _, index: index.state(),
    "restore": lambda _, index: index.restore(STATE),
    "scan": lambda store, index: index.scan(0, store.capacity),
    "draw": lambda _, index: index.draw(1, 4),
    "sample by priority": lambda store, index: index.sample(store, Key.of(1), 4, False, False),
    "update": lambda _, index: index.update(torch.arange(2), torch.ones(2), None),
    "reset": lambda _, index: index.reset(torch.arange(2)),
    "make priorities": lambda store, _: DeviceIndex.of_device_store(store, "others", CONFIG),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_comes_behind_those_of_other_streams(monkeypatch, call):
    """It follows before the first operation on memory of the device."""
    store, index = written()
    edited = call == "changes"
    if edited:
        CALLS["edit there"](store, index)
    followed, early = [], []

    class Operations(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if not followed and any(map(theirs, flat(args, kwargs))) and not looks_only(function):
                early.append(function)
            return function(*args, **(kwargs or {}))

    memory = memory_of(store, index)

    def theirs(thing):
        return isinstance(thing, torch.Tensor) and thing.untyped_storage().data_ptr() in memory

    follow = store.rows.follow_stream
    monkeypatch.setattr(store.rows, "follow_stream", lambda: (followed.append(call), follow()))
    with Operations():
        CALLS[call](store, index)
    assert followed
    assert not early


def flat(args, kwargs):
    for thing in (*args, *(kwargs or {}).values()):
        yield from thing if isinstance(thing, list | tuple) else (thing,)


def looks_only(function):
    """Whether it makes a view, or asks what the host knows."""
    name = getattr(function, "__name__", "")
    return name in ("__get__", "__getitem__", "__len__", "data_ptr", "untyped_storage", "detach", "view", "size", "dim")


def memory_of(store, index):
    rows, tree = store.rows, index.tree
    own = [*rows.whole, rows.numbers, rows.edited, rows.cursor, rows.tally, *tree.sums, *tree.lows]
    own += [index._alpha, index._beta, index.highest_there]
    return {tensor.untyped_storage().data_ptr() for tensor in own}


def both(*acts):
    """Two threads at once. Raises ``TooSlow``: they wait for each other."""
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    until(lambda: not any(thread.is_alive() for thread in threads), 10, "two threads")


@pytest.mark.parametrize("outer", ["paused", "placing", "rows"])
@pytest.mark.parametrize("inner", ["make priorities", "replace", "write"])
def test_locks_have_one_order(outer, inner):
    """Whatever a thread holds of a store, it waits for none that waits for it."""
    store, _ = written()
    meeting = threading.Barrier(2)

    def hold(what):
        with contextlib.suppress(threading.BrokenBarrierError):  # one may have to wait for the other
            return meeting.wait(timeout=0.2)
        return what

    def first():
        with store.rows if outer == "rows" else getattr(store, outer)():
            hold(outer)
            with store.placing():
                CALLS["write"](store, None)

    def second():
        with store.placing():
            hold("placing")
            CALLS[inner](store, None)

    both(first, second)


def test_two_threads_make_one_index(monkeypatch):
    """Whichever looks first finds none, and both look at once if nothing keeps them apart."""
    store, index = written()
    meeting, get = threading.Barrier(2), store.indexes.get

    def look(key):
        found = get(key)
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(timeout=0.2)
        return found

    monkeypatch.setattr(store.indexes, "get", look, raising=False)
    made = []

    def make():
        made.append(DeviceIndex.of_device_store(store, "others", CONFIG))

    both(make, make)
    (one, first), (other, second) = made
    assert one is other
    assert {first, second} == {True, False}
    assert store.rows.trees == [index, one]


def test_two_threads_move_one_index_to_the_host(monkeypatch):
    """Both find it on the device if nothing keeps them apart, or the second one an index on the host without its priorities."""
    store, index = written()
    live = int((store.rows.numbers > 0).sum())
    index.update_there(torch.arange(live), torch.arange(1.0, live + 1), None)
    expected = index.leaves(live)
    (name,) = [name for name, kind in store.indexes if kind == PriorityIndex.kind]
    meeting, state = threading.Barrier(2), DeviceIndex.state

    def look(*given):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(timeout=0.2)
        return state(*given)

    monkeypatch.setattr(DeviceIndex, "state", look)
    made, failures = [], []

    def move():
        try:
            host, _ = PriorityIndex.of_store(store, name, CONFIG)
            made.append((host, host.leaves(live)))
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    both(move, move)
    assert not failures
    (one, leaves), (other, later) = made
    assert one is other
    assert torch.equal(leaves, expected)
    assert torch.equal(later, expected)
    assert store.rows.trees == []
    assert index.retired
