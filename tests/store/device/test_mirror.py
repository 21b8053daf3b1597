"""A folder that trails behind rows on a device, imitated on the CPU."""

import copy
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import IncompatibleStore, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from engram.store.device import mirror
from tests import fresh, stress
from tests.device.graphs import Graph, state_of
from tests.store.device.mirrored import There, assert_same, content, imitate

ROOT = Path(__file__).parents[3]


@pytest.fixture
def device(monkeypatch):
    made = imitate(monkeypatch)
    monkeypatch.setattr(mirror, "LOOK_S", 3600.0)  # tests say when
    yield made
    assert made.faults == []


def rows(first, n):
    numbers = torch.arange(first, first + n)
    return {"a": numbers, "b": numbers[:, None].expand(n, 3).float()}


steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "lanes", "edit", "edit there", "empty", "remove", "priorities", "copy", "load"]),
        st.integers(0, 2**31),
    ),
    max_size=16,
)


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@settings(
    max_examples=stress.size(60, 2_000),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 400), steps)
def test_random_operations(device, monkeypatch, tmp_path_factory, length, lanes, block, operations):
    monkeypatch.setattr(mirror, "BLOCK_BYTES", block)
    folder = tmp_path_factory.mktemp("mirror") / "store"
    storage = There(length * lanes, lanes=lanes, mirror=folder)
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=0.7, beta=0.5), batch_size=4)
    rb.extend(rows(1, 1), lane=0)
    rb.sample()
    payload = 2
    for name, seed in operations:
        random = torch.Generator().manual_seed(seed)
        n = int(torch.randint(1, 2 * length * lanes + 1, (), generator=random))
        there = storage.extent().rows(torch.arange(len(rb)))
        some = there[torch.randint(len(there), (min(n, 5),), generator=random)] if len(there) else there
        if name == "extend":
            rb.extend(rows(payload, n), lane=n % lanes)
            payload += n
        elif name == "lanes":
            rb.extend(rows(payload, n), lane=torch.randint(lanes, (n,), generator=random))
            payload += n
        elif name == "edit" and len(some):
            storage.set(some, rows(payload, len(some)))
            payload += n
        elif name == "edit there" and len(some):
            storage.store.edit_there(some, [0], [torch.arange(payload, payload + len(some))])
            payload += n
        elif name == "empty":
            rb.empty()
        elif name == "remove" and len(some):
            rb.remove(some)
        elif name == "priorities" and len(some):
            rb.update_priority(some, torch.rand(len(some), generator=random))
        elif name == "copy":
            storage.store.mirror.copy()
            assert storage.store.mirror.error is None
        elif name == "load" and len(some) and seed % 3 == 0:
            rb.load_state_dict(rb.state_dict())
    storage.flush()
    assert storage.store.mirror.stats()["mirror_lag"] == 0
    assert_same(storage, folder)
    again = There(length * lanes, lanes=lanes, mirror=folder)
    assert storage.store.mirror.error is None
    rb.close()
    again.close()


def test_a_buffer_begins_where_the_folder_is(device, tmp_path):
    def made():
        return TensorDictReplayBuffer(
            storage=There(10, mirror=tmp_path / "store"), sampler=PrioritizedSampler(alpha=0.6, beta=0.4), batch_size=4
        )

    rb = made()
    rb.extend(TensorDict(rows(0, 14), [14]))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 0.0, 4.0]))
    before, leaves = rb[:], rb.sampler.priorities().leaves(10)
    rb.close()
    opened = ReplayBuffer.open(tmp_path / "store")
    assert type(opened) is TensorDictReplayBuffer
    assert opened.batch_size == 4
    assert (opened[:] == before).all()
    assert torch.equal(opened.sampler.priorities().leaves(10), leaves)
    opened.close()
    rb = made()
    assert (rb[:] == before).all()
    rb.sample()
    assert torch.equal(rb.sampler.priorities().leaves(10), leaves)
    assert rb.extend(TensorDict(rows(14, 3), [3])).tolist() == [4, 5, 6]
    assert rb.stats()["mirror_lag"] == 3
    assert rb.stats()["mirror_lag_s"] > 0
    rb.storage.flush()
    assert rb.stats()["mirror_lag"] == rb.stats()["mirror_lag_s"] == rb.stats()["mirror_lost"] == 0
    assert_same(rb.storage, tmp_path / "store")
    rb.close()


@pytest.mark.parametrize("what", ["extend", "edit", "remove", "empty", "load"])
def test_rows_that_change_while_all_are_copied_piece_by_piece(device, monkeypatch, tmp_path, what):
    """A load is copied without holding the rows: another thread goes on between pieces, and the folder holds no row that is newer."""
    monkeypatch.setattr(mirror, "BLOCK_BYTES", 60)
    rb = ReplayBuffer(storage=There(40, mirror=tmp_path / "store"), batch_size=4)
    rb.extend(rows(0, 33))
    state = rb.state_dict()
    rb.storage.flush()
    rb.load_state_dict(state)
    number, done, wait = iter(range(100, 10_000, 3)), [], device.wait
    copied, seen = rb.storage.store.mirror._copy_all, []

    def change():
        first = next(number)
        if what == "edit":
            rb[torch.tensor([first % 30, 3])] = rows(first, 2)
        elif what == "remove":
            rb.remove(torch.tensor([first % 30]))
        elif what in ("empty", "load") and len(done) == 4:
            rb.empty() if what == "empty" else rb.load_state_dict(state)
        else:
            rb.extend(rows(first, 3))
        done.append(first)

    def waited(stream, event):
        if len(done) < 12:
            thread = threading.Thread(target=change)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "the rows are locked"
        wait(stream, event)

    def copy_all():
        copied()
        target = rb.storage.store.mirror._target
        live = (target.tickets_of(torch.arange(40)) >= 0).nonzero().flatten()
        seen.append((live, target.tensors[0][live].clone()))

    monkeypatch.setattr(device, "wait", waited)
    monkeypatch.setattr(rb.storage.store.mirror, "_copy_all", copy_all)
    rb.storage.flush()
    assert len(done) == 12 or what == "empty"
    live, numbers = seen[0] if what not in ("empty", "load") else seen[-1]
    if what not in ("empty", "load"):
        assert torch.equal(numbers, live), "rows of before alone"
        assert len(live) < 33 or what == "remove"
    else:
        assert len(seen) > 1, "it began anew"
    monkeypatch.setattr(device, "wait", wait)
    rb.storage.flush()
    assert_same(rb.storage, tmp_path / "store")
    assert rb.storage.store.mirror.error is None
    rb.close()


def test_rows_of_a_load_that_are_removed_are_removed_in_the_folder(device, tmp_path):
    """The numbers of their writes are others than their tickets there."""
    rb = ReplayBuffer(storage=There(10, mirror=tmp_path / "store"), batch_size=4)
    rb.extend(rows(0, 6))
    rb.load_state_dict(rb.state_dict())
    rb.load_state_dict(rb.state_dict())
    rb.storage.flush()
    rb.remove(torch.tensor([2, 4]))
    rb.storage.flush()
    assert_same(rb.storage, tmp_path / "store")
    rb.close()


def test_a_graph_that_writes_while_rows_are_copied(device, monkeypatch, tmp_path):
    """The rows that it may have been replacing are copied again; the rest is written."""
    storage = There(20, mirror=tmp_path / "store")
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(0, 20))
    storage.flush()
    there, mirrored = storage.store, storage.store.mirror
    data, at = rows(100, 4), torch.tensor([9])
    append = Graph(monkeypatch, state_of(storage), lambda: rb.extend(data))
    edit = Graph(monkeypatch, state_of(storage), lambda: there.edit_there(at, [0], [torch.tensor([7])]))
    rb.extend(rows(20, 10))
    select, between = torch.index_select, [edit, append]

    def selected(column, dim, index, *, out):
        """Between the copies of the first and the second field a graph runs."""
        select(column, dim, index, out=out)
        if between and column is there.rows.whole[0]:
            between.pop().replay()

    monkeypatch.setattr(torch, "index_select", selected)
    for _ in range(2):
        mirrored.copy()
        assert mirrored.error is None
        opened = ReplayBuffer.open(tmp_path / "store")
        found = opened[:]
        assert ((found["a"] == found["b"][:, 0]) | (found["a"] == 7)).all()
        opened.close()
    assert not between
    storage.flush()
    assert_same(storage, tmp_path / "store")
    assert len(rb) == 20
    assert rb.write_count == 34
    rb.close()


def moves_cursor(storage, func, args):
    """Whether an operation of a graph is the one that ends an append."""
    return func is torch.ops.aten.add_.Tensor and args[0].data_ptr() == storage.store.rows.cursor.data_ptr()


@pytest.mark.parametrize("what", ["rows", "all rows"])
@pytest.mark.parametrize("writes", ["append", "edit"])
def test_a_graph_that_is_just_writing_while_rows_are_copied(device, monkeypatch, tmp_path, what, writes):
    """Its cursor is where it was, or its edit has not ended: the folder has none of the rows that it is at."""
    storage = There(20, mirror=tmp_path / "store")
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(0, 20))
    storage.flush()
    there, mirrored = storage.store, storage.store.mirror
    data = rows(100, 4)
    if writes == "append":
        graph = Graph(monkeypatch, state_of(storage), lambda: rb.extend(data))
    else:
        columns = [data["a"], data["b"]]
        graph = Graph(monkeypatch, state_of(storage), lambda: there.edit_there(torch.arange(4), [0, 1], columns))
    rb.extend(rows(20, 17))
    replay, select, clone = graph.replaying(), torch.index_select, torch.Tensor.clone
    begun = []

    def begin(column):
        """Once a part of the first field was copied, until the graph has put its rows there."""
        if not begun and column.data_ptr() == there.rows.whole[0].data_ptr():
            begun.append(True)
            ends = [at for at, (func, *_) in enumerate(graph._steps) if func is torch.ops.aten.index_put_.default]
            for at, (func, args) in enumerate(replay):
                if moves_cursor(storage, func, args) or (writes == "edit" and at > ends[-1]):
                    break

    def selected(column, dim, index, *, out):
        select(column, dim, index, out=out)
        begin(column)

    def cloned(tensor):
        made = clone(tensor)
        begin(tensor)
        return made

    if what == "all rows":
        mirrored._replaced = -1
        monkeypatch.setattr(torch.Tensor, "clone", cloned)
    monkeypatch.setattr(torch, "index_select", selected)
    mirrored.copy()
    assert mirrored.error is None
    assert begun
    opened = ReplayBuffer.open(tmp_path / "store")
    found = opened[:]
    assert torch.equal(found["a"], found["b"][:, 0])
    opened.close()
    for _ in replay:
        pass
    storage.flush()
    assert_same(storage, tmp_path / "store")
    rb.close()


def test_the_learner_need_not_wait_for_copies_to_the_host(monkeypatch, tmp_path):
    """The second stream is held: calls go on, and the folder lags until it runs."""
    device = imitate(monkeypatch, held={"stream 3"})
    monkeypatch.setattr(mirror, "LOOK_S", 3600.0)
    storage = There(20, mirror=tmp_path / "store")
    rb = ReplayBuffer(storage=storage, batch_size=4)
    rb.extend(rows(0, 5))
    mirrored = storage.store.mirror
    assert mirrored._down.name == "stream 3"
    block = mirrored._read()
    rb.extend(rows(5, 5))
    rb.sample()
    assert rb.stats()["mirror_lag"] == 10
    assert not torch.equal(block.columns[0], rows(0, 5)["a"])  # nothing has come
    mirrored._write(block)  # waits for it
    assert rb.stats()["mirror_lag"] == 5
    rb.close()
    assert ReplayBuffer.open(tmp_path / "store")[:]["a"].tolist() == list(range(10))
    assert device.faults == []


def test_an_error_is_said_and_made_good(device, monkeypatch, tmp_path):
    storage = There(20, mirror=tmp_path / "store")
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(0, 5))
    mirrored = storage.store.mirror

    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(type(mirrored), "_write", fails)
        broken.setattr(type(mirrored), "_copy_all", fails)
        with pytest.warns(UserWarning, match=r"lags behind.*No space left"):
            mirrored.copy()
        with pytest.raises(OSError, match="No space left"):
            storage.flush()
    assert rb.stats()["mirror_lag"] == 5
    storage.flush()
    assert_same(storage, tmp_path / "store")
    rb.close()


def test_rows_that_were_overwritten_before_they_were_copied_are_counted(device, tmp_path):
    rb = ReplayBuffer(storage=There(10, mirror=tmp_path / "store"))
    for first in range(0, 70, 7):
        rb.extend(rows(first, 7))
    rb.storage.flush()
    assert rb.stats()["mirror_lost"] == 60
    assert rb.stats()["mirror_lag"] == 0
    assert_same(rb.storage, tmp_path / "store")
    rb.close()


def test_what_is_refused(device, tmp_path):
    with pytest.raises(ValueError, match=r"mirror: expected a storage on an accelerator.*got device='cpu'"):
        LazyTensorStorage(10, mirror=tmp_path)
    with pytest.raises(ValueError, match="got device='auto'"):
        LazyTensorStorage(10, device="auto", mirror=tmp_path)
    with pytest.raises(TypeError, match="mirror"):
        There(10, mirror=3)
    rb = ReplayBuffer(storage=There(10, mirror=tmp_path / "store"))
    rb.extend(rows(0, 3))
    rb.close()
    with pytest.raises(IncompatibleStore, match="another size: capacity"):
        There(20, mirror=tmp_path / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.memmap").write_text("mine")
    with pytest.raises((RuntimeError, OSError)):
        ReplayBuffer(storage=There(10, mirror=tmp_path / "other")).extend(rows(0, 3))
    assert (tmp_path / "other" / "a.memmap").read_text() == "mine"


def test_a_copy_of_the_storage_has_no_mirror(device, tmp_path):
    rb = ReplayBuffer(storage=There(10, mirror=tmp_path / "store"))
    rb.extend(rows(0, 3))
    other = copy.deepcopy(rb)
    assert other.storage._mirror is None
    other.extend(rows(3, 3))
    rb.storage.flush()
    assert_same(rb.storage, tmp_path / "store")
    rb.close()
    other.close()


def test_the_folder_of_rows_that_were_never_kept_is_made_anew(device, tmp_path):
    rb = ReplayBuffer(storage=There(10, mirror=tmp_path / "store"))
    rb.extend({"other": torch.zeros(1)})
    rb.empty()
    rb.extend(rows(0, 3))
    rb.close()
    assert ReplayBuffer.open(tmp_path / "store")[:]["a"].tolist() == [0, 1, 2]


def test_too_little_memory_for_a_mirror(device, tmp_path, monkeypatch):
    answers = iter([1 << 20, 100])  # for the rows, and once they are there
    monkeypatch.setattr("engram._support.devices.free_bytes", lambda device: next(answers))
    rb = ReplayBuffer(storage=There(10, mirror=tmp_path / "store"))
    with pytest.raises(RuntimeError, match=r"the blocks of a mirror on cpu need [\d,]+ bytes, and 100 are free"):
        rb.extend(rows(0, 3))
    monkeypatch.setattr("engram._support.devices.free_bytes", lambda device: None)
    rb = ReplayBuffer(storage=There(10, mirror=tmp_path / "store"))
    rb.extend(rows(0, 3))
    rb.close()
    assert ReplayBuffer.open(tmp_path / "store")[:]["a"].tolist() == [0, 1, 2]


_WRITES = """
import sys
sys.path.insert(0, root)
import torch
from engram import PrioritizedSampler, ReplayBuffer
from engram.store.device import mirror
from tests.device.imitation import Imitation
from tests.store.device.mirrored import There, content

mirror.Accelerator, mirror.LOOK_S, mirror.PRIORITIES_S = lambda _: Imitation(), 0.002, 0.01
rb = ReplayBuffer(storage=There(500, mirror=folder), sampler=PrioritizedSampler(alpha=1.0, beta=0.5, eps=0.0), batch_size=8)
first = rb.write_count
random = torch.Generator().manual_seed(first)
while True:
    n = int(torch.randint(1, 60, (), generator=random))
    rb.extend(content(torch.arange(first, first + n)))
    first += n
    some = torch.randint(len(rb), (8,), generator=random)
    rb.update_priority(some, rb[some]["a"].double() % 13 + 2)
    if not some[0] % 50:
        rb.storage.flush()
        print("flushed", first, flush=True)
"""


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
def test_killed_at_any_moment(tmp_path):
    """The folder opens, holds consecutive whole rows up to at least the last flush, and priorities that these had."""
    random = torch.Generator().manual_seed(3)
    seen = 0
    for _ in range(stress.size(4, 500)):
        writes = fresh.start(_WRITES, root=str(ROOT), folder=str(tmp_path / "store"))
        writes.until("flushed")
        time.sleep(float(torch.rand((), generator=random)) * 0.2)
        os.kill(writes.pid, signal.SIGKILL)
        writes.wait()
        flushed = int(writes.out.split("\n")[-2].split()[1])
        rb = ReplayBuffer.open(tmp_path / "store")
        found = rb.storage[rb.storage.extent().rows(torch.arange(len(rb)))]
        expected = content(found["a"])
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        order = rb.storage.tickets_of(rb.storage.extent().rows(torch.arange(len(rb)))).argsort()
        numbers = found["a"][order]
        assert torch.equal(numbers, torch.arange(int(numbers[0]), int(numbers[0]) + len(numbers)))
        assert int(numbers[-1]) + 1 == rb.write_count >= max(flushed, seen)
        leaves = rb.sampler.priorities().leaves(500)[rb.storage.extent().rows(torch.arange(len(rb)))]
        given = leaves == found["a"].double() % 13 + 2
        assert (given | (leaves <= 14)).all()
        assert given.any()
        seen = rb.write_count
        rb.close()
