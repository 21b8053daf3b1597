"""Tables of trajectories in a store: who shares them, beside writers, and against plain lists."""

import copy
import gc
import itertools
import json
import pickle
import threading
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

from engram import (
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from engram._support import native, progress
from engram.store.store import Store
from tests.samplers.machine import SETTINGS, Rings, TrajectoryMachine, stressed
from tests.samplers.slicing import buffer, runs_of, steps, windows

# ---- the table in the store ----------------------------------------------------------------------------------------------


def test_samplers_of_a_store_share_a_table_of_one_name():
    storage = LazyTensorStorage(30)
    one = buffer(SliceSampler(slice_len=2), steps([4, 6]), storage=storage)
    other = buffer(SliceSamplerWithoutReplacement(slice_len=3), storage=storage)
    named = buffer(SliceSampler(slice_len=2, index="other"), storage=storage)
    for rb in (one, other, named):
        rb.sample(6)
    assert one.sampler._table is other.sampler._table
    assert one.sampler._table is not named.sampler._table
    one.extend(steps([5], first=2))  # a write through one is seen by all
    assert runs_of(other) == runs_of(named) == [4, 6, 5]
    with pytest.raises(IncompatibleStore, match="Give another index=… name"):
        buffer(SliceSampler(slice_len=2, end_keys=[]), storage=storage).sample(4)
    buffer(SliceSampler(slice_len=2, end_keys=[], index="ids"), storage=storage).sample(4)


def test_the_table_outlives_storage_and_buffer():
    sampler = SliceSampler(slice_len=2)
    rb = buffer(sampler, steps([4, 6]))
    rb.sample(4)
    table = sampler._table
    del rb, sampler
    assert table.census() == (2, 6)


def test_a_store_with_a_table_is_let_go():
    rb = buffer(SliceSampler(slice_len=2), steps([4, 6]))
    rb.sample(4)
    store = weakref.ref(rb.storage.memory)
    del rb
    gc.collect()
    assert store() is None


def test_a_sampler_goes_with_its_buffer_and_learns_of_another_storage():
    rb = buffer(SliceSampler(slice_len=2), steps([4, 6]))
    assert runs_of(rb) == [4, 6]
    rb.set_storage(LazyTensorStorage(50))
    with pytest.raises(NoSampleable):
        rb.sample(4)
    rb.extend(steps([3]))
    assert runs_of(rb) == [3]


def test_one_sampler_of_two_buffers():
    sampler = SliceSampler(slice_len=2)
    one, other = buffer(sampler, steps([4, 6])), buffer(sampler, steps([3], lane=1))
    for _ in range(3):
        assert {lane for lane, _, _ in windows(one.sample(8), 2)} == {0}
        assert {lane for lane, _, _ in windows(other.sample(8), 2)} == {1}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies_draw_the_same_from_tables_of_their_own(duplicate):
    rb = buffer(SliceSampler(slice_len=2), steps([4, 6]))
    rb.sample(4)
    twin = duplicate(rb)
    assert torch.equal(twin.sample(8)["index"], rb.sample(8)["index"])
    twin.extend(steps([5], first=2))
    assert runs_of(twin) == [4, 6, 5]
    assert runs_of(rb) == [4, 6]


@pytest.mark.parametrize(
    "sampler",
    [
        SliceSampler(num_slices=2, end_keys=["x", ("next", "done")], strict_length=False, pad_output=True, span=(1, 0)),
        SliceSampler(slice_len=3, traj_key=("collector", "ids"), truncated_key=None, uniform_over="anchors", index="a"),
        SliceSamplerWithoutReplacement(slice_len=3, end_key="e", init_key="i", shuffle=False, strict_length=False),
    ],
)
def test_a_store_knows_its_sampler(sampler, tmp_path):
    assert type(sampler)(**json.loads(json.dumps(sampler.config()))).config() == sampler.config()
    rb = buffer(sampler, steps([4, 6]), storage=LazyMemmapStorage(20, scratch_dir=tmp_path), batch_size=6)
    rb.close()
    again = ReplayBuffer.open(tmp_path)
    assert repr(again.sampler) == repr(sampler)
    again.sampler._bound_to(again.storage, 2)
    assert again.sampler._table.census() == (2, 6)


def test_a_store_does_not_guess_boundaries_that_were_given(tmp_path):
    sampler = SliceSampler(slice_len=2, ends=[0, 0, 0, 1], cache_values=True)
    buffer(sampler, steps([4]), storage=LazyMemmapStorage(4, scratch_dir=tmp_path)).close()
    with pytest.raises(TypeError, match="pass sampler="):
        ReplayBuffer.open(tmp_path)
    assert len(ReplayBuffer.open(tmp_path, sampler=sampler).sample(2)) == 2


def test_a_long_scan_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress, "CHUNK", 3)
    monkeypatch.setattr(progress, "_SILENT_S", 0)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    rb = buffer(RandomSampler(), steps([10, 10]))
    rb.set_sampler(SliceSampler(slice_len=3))
    assert runs_of(rb) == [10, 10]
    assert "engram: looking for trajectories" in capsys.readouterr().err


# ---- beside writers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2])
def test_windows_are_whole_beside_writers(lanes):
    rb = buffer(SliceSampler(slice_len=3), capacity=60 * lanes, lanes=lanes)
    for lane in range(lanes):
        rb.extend(steps([5, 6, 7], lane=lane), lane=lane)
    stop, failures = threading.Event(), []

    def write(lane):
        number = 3
        while not stop.is_set():
            rb.extend(steps([3 + number % 6], lane=lane, first=number), lane=lane)
            number += 1

    threads = [threading.Thread(target=write, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            windows(rb.sample(12), 3)
    except AssertionError as error:
        failures.append(error)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_child_goes_on_with_its_copy():
    """Also where another thread of the parent was at work in the table."""
    from tests import fresh

    program = fresh.start(
        """
        import os, threading, torch
        from tensordict import TensorDict
        from engram import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5000), sampler=SliceSampler(slice_len=2), batch_size=512)
        data = TensorDict({"episode": torch.arange(1000) // 7}, [1000])
        rb.extend(data)
        stop = threading.Event()

        def work(call):
            while not stop.is_set():
                call()

        threads = [threading.Thread(target=work, args=(call,)) for call in (rb.sample, lambda: rb.extend(data))]
        for thread in threads:
            thread.start()
        for _ in range(30):
            child = os.fork()
            if child == 0:
                rb.set_rng(torch.Generator())  # of torch's own a thread of the parent may have held the lock
                for _ in range(3):
                    rb.extend(data)
                    episodes = rb.sample()["episode"].reshape(-1, 2)
                os._exit(0 if bool((episodes[:, 0] == episodes[:, 1]).all()) else 3)
            _, status = os.waitpid(child, 0)
            if status != 0:
                stop.set()
                raise SystemExit(f"child: {status}")
        stop.set()
        for thread in threads:
            thread.join()
        """
    )
    assert program.wait() == 0, program.err


def test_a_child_forked_during_the_first_look_at_the_rows_looks_itself():
    """The parent's thread held the sampler's lock, the store's and the table's."""
    from tests import fresh

    program = fresh.start(
        """
        import os, threading, torch
        from tensordict import TensorDict
        from engram import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
        from engram._support import progress as _progress

        watch, parent, looks, forked = _progress.watch, os.getpid(), threading.Event(), threading.Event()

        def looks_until_the_fork(*arguments):
            looks.set()
            watch(*arguments)
            if os.getpid() == parent:
                assert forked.wait(60)

        _progress.watch = looks_until_the_fork
        n = 8_000_000
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(n), sampler=SliceSampler(slice_len=2), batch_size=64)
        rb.extend(TensorDict({"episode": torch.arange(n) // 7}, [n]))
        thread = threading.Thread(target=rb.sample)
        thread.start()
        assert looks.wait(60)
        child = os.fork()
        if child == 0:
            rb.set_rng(torch.Generator())
            rb.extend(TensorDict({"episode": torch.arange(10) // 7}, [10]))
            episodes = rb.sample()["episode"].reshape(-1, 2)
            os._exit(0 if bool((episodes[:, 0] == episodes[:, 1]).all()) else 3)
        _, status = os.waitpid(child, 0)
        forked.set()
        thread.join()
        assert status == 0, status
        """
    )
    assert program.wait() == 0, program.err


# ---- the table against plain lists ---------------------------------------------------------------------------------------


class Runs(RuleBasedStateMachine):
    """Writes of every kind; the sampler's table says what lists of rows say."""

    @initialize(
        lanes=st.integers(1, 3),
        length=st.integers(1, 9),
        by=st.sampled_from(["ids", "ends", "both"]),
        late=st.booleans(),
    )
    def start(self, lanes, length, by, late):
        self.rings, self.by = Rings(lanes, length), by
        key = {"traj_key": "absent" if by == "ends" else "id", "end_keys": [] if by == "ids" else ["done", "cut"]}
        self.rb = ReplayBuffer(
            storage=LazyTensorStorage(lanes * length, lanes=lanes), sampler=SliceSampler(slice_len=1, **key)
        )
        if not late:
            self.write(0, [(0, False, False)])
            self.rb.sample(1)

    values = st.tuples(st.integers(0, 2), st.booleans(), st.booleans())

    def data(self, values):
        ids, done, cut = zip(*values, strict=True)
        return TensorDict(
            {"id": torch.tensor(ids), "done": torch.tensor(done), "cut": torch.tensor(cut)}, [len(values)]
        )

    @rule(lane=st.integers(0, 2), values=st.lists(values, min_size=1, max_size=12))
    def write(self, lane, values):
        lane %= len(self.rings.lanes)
        rows = self.rb.extend(self.data(values), lane=lane).tolist()
        assert rows == [self.rings.append(lane, value) for value in values]

    @precondition(lambda self: self.rings.live())
    @rule(data=st.data(), value=values)
    def edit(self, data, value):
        row = data.draw(st.sampled_from(list(self.rings.live())))
        self.rings.edit(row, value)
        if data.draw(st.booleans()):
            self.rb[[row]] = self.data([value])
        else:
            self.rb.storage.set([row], self.data([value]))

    @rule()
    def empty(self):
        self.rb.empty()
        self.rings.clear()

    def runs(self):
        return self.rings.runs(
            lambda a, b: (self.by != "ends" and a[0] != b[0]) or (self.by != "ids" and (a[1] or a[2]))
        )

    @invariant()
    def agrees(self):
        expected = self.runs()
        assert self.rb.can_sample(1) == bool(expected)
        if not expected:
            return
        _, info = self.rb.sample(8, return_info=True)
        assert {row for run in expected for row in run} >= set(info["index"][0].tolist())
        table = self.rb.sampler._table
        found = table.runs().reshape(-1, 3).tolist()
        assert [[table.row(track, first + i) for i in range(n)] for track, first, n in found] == expected


TestRuns = Runs.TestCase
TestRuns.settings = SETTINGS
stressed(TestRuns)


class TrajectoryPasses(TrajectoryMachine):
    """Beside the sampler, the trajectories that a pass has left: those that were there when it began, up to the steps of then."""

    def make_sampler(self, draw):
        self.drop_last, self.shuffle = draw(st.booleans()), draw(st.booleans())
        self.count, self.written = itertools.count(), {}  # which write a row holds
        self.left, self.key, self.needed, self.ended, self.saved = [], None, 1, False, None
        return SliceSamplerWithoutReplacement(**self.boundaries(draw), drop_last=self.drop_last, shuffle=self.shuffle)

    def wrote(self, rows):
        self.written.update(zip(rows, self.count, strict=False))

    def emptied(self):
        self.written, self.left = {}, []

    def alive(self):
        """Last row of each trajectory that the pass has left, and the write that it held when the pass began."""
        return [(row, write) for row, write in self.left if self.written.get(row) == write]

    def ran_out(self):
        return self.ended or (bool(self.left) and len(self.alive()) < self.needed)

    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)

    @rule(ns=sizes)
    def draw(self, ns):
        there = [(run[-1], self.written[run[-1]]) for run in self.trajectories()]
        for n in ns:
            needed = n if self.drop_last else 1
            begins = len(self.alive()) < needed
            if begins and len(there) < needed:
                with pytest.raises(ValueError if there else NoSampleable):
                    self.rb.sample(n * self.length)
            else:
                self.draw_from(there if begins else None, n, needed)
            self.says_whether_it_is_over()
            assert self.rb.can_sample(n * self.length) == bool(self.starts())

    @invariant()
    def says_whether_it_is_over(self):
        assert self.rb.sampler.ran_out == self.ran_out()

    def draw_from(self, there, n, needed):
        """``there``: what a pass that begins is over; None: it goes on."""
        try:
            drawn = self.drawn_windows(n)
        except NoSampleable:  # all that the batch is made of are too short, which does not keep the pass from going on
            drawn = []
        key = self.rb.sampler.state_dict()["key"]
        if there is not None:
            order = torch.arange(len(there))
            if self.shuffle:
                native.permute(key, len(there), 0, order)
            self.left, self.key = [there[k] for k in order.tolist()], key
        assert key == self.key
        alive = self.alive()
        possible = [windows for row, _ in alive[:n] if (windows := self.windows_up_to(row))]
        assert all(window in windows for window, windows in zip(drawn, possible, strict=True))
        self.left, self.needed = alive[n:], needed
        self.ended = len(self.left) < needed
        if self.ended:
            self.left = []

    def drawn_windows(self, n):
        rows, info = self.drawn(n * self.length)
        windows = [[]]
        for row, last in zip(rows, info["next", "truncated"].flatten().tolist(), strict=True):
            windows[-1].append(row)
            if last:
                windows.append([])
        assert not windows.pop()
        return windows

    def windows_up_to(self, last):
        """The windows of the trajectory that a row is of now, none of which has a later step."""
        run = next(run for run in self.trajectories() if last in run)
        run = run[: run.index(last) + 1]
        if len(run) < self.length:
            return [] if self.strict else [run]
        return [run[i : i + self.length] for i in range(len(run) - self.length + 1)]

    @precondition(lambda self: self.left)
    @rule()
    def save(self):
        self.saved = self.rb.sampler.state_dict(), (self.left, self.key, self.ran_out())

    @precondition(lambda self: self.saved)
    @rule(ns=sizes)
    def load(self, ns):
        state, (self.left, self.key, self.ended) = self.saved
        self.needed = 1
        self.rb.sampler.load_state_dict(state)
        self.draw(ns)


TestTrajectoryPasses = pytest.mark.filterwarnings("ignore:sample. batch_size")(TrajectoryPasses.TestCase)
TestTrajectoryPasses.settings = SETTINGS
stressed(TestTrajectoryPasses)


def test_index_of_a_store():
    from engram.format.schema import Field, Node, Schema

    schema = Schema(4, 1, (), (Field(("a",), "int64", ()),), Node("leaf", 0))
    store = Store.private(schema)
    made = []
    assert store.indexes.table("main", "list", 1, lambda: made) is made
    assert store.indexes.table("main", "list", 1, dict) is made
    assert store.indexes.table("main", "dict", 2, dict) == {}
    assert store.indexes.table("other", "list", 2, list) == []
    with pytest.raises(IncompatibleStore, match="index 'main': expected the list of 1"):
        store.indexes.table("main", "list", 2, list)

    def fail():
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        store.indexes.table("broken", "list", 1, fail)
    assert store.indexes.table("broken", "list", 1, list) == []
