"""A directory store in two processes beside a model of plain lists and dicts: whatever either does, or dies of, all agree."""

import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

from engram import LazyMemmapStorage, NoSampleable, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from tests import stress
from tests.samplers.machine import SETTINGS, Rings

INDEXES = ("main", "other")


def data(values):
    values = torch.tensor(values)
    return TensorDict({"a": values, "b": torch.stack([values, -values], 1).double()}, [len(values)])


class Handle:
    """What a process does when it is asked to, by name."""

    folder = rb = None

    def move(self, folder):
        self.close()
        self.folder = folder

    def make(self, capacity, lanes):
        self.rb = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(capacity, scratch_dir=self.folder, lanes=lanes),
            sampler=PrioritizedSampler(capacity, 1.0, 0.5, 0.0),
        )

    def open(self):
        self.close()
        self.rb = ReplayBuffer.open(self.folder)

    def close(self):
        if self.rb is not None:
            self.rb.close()
        self.rb = None

    def add(self, lane, value):
        return self.rb.add(data([value])[0], lane=lane)

    def extend(self, lane, values):
        lane = torch.tensor(lane) if isinstance(lane, list) else lane
        return self.rb.extend(data(values), lane=lane).tolist()

    def edit(self, row, value):
        self.rb[[row]] = data([value])

    def empty(self, keep):
        self.rb.empty(empty_write_count=not keep)

    def use_index(self, name):
        self.rb.set_sampler(PrioritizedSampler(self.rb.storage.max_size, 1.0, 0.5, 0.0, index=name))

    def update(self, rows, priorities, generation):
        rows, generation = torch.tensor(rows), None if generation is None else torch.tensor(generation)
        self.rb.update_priority(rows, torch.tensor(priorities, dtype=torch.float64), generation=generation)

    def sample(self, n):
        try:
            batch, info = self.rb.sample(n, return_info=True)
        except NoSampleable:
            return None
        assert bool((batch["b"][:, 0] == batch["a"]).all())
        return info["index"].tolist(), batch["a"].tolist(), info["index_generation"].tolist()

    def state(self):
        """All there is to see, as plain values; sums of priorities are checked here."""
        rb = self.rb
        store = rb.storage.store
        rows = rb[:]
        live = [row for row in range(store.capacity) if row in rb.storage]
        assert len(rb) == len(live) == len(rows)
        assert bool((rows["b"] == torch.stack([rows["a"], -rows["a"]], 1)).all())
        store.indexes.attach_new()  # as the next write would
        leaves = {key[0]: stress.check_priorities(index, live).tolist() for key, index in store.indexes.items()}
        assert store.core.in_flight == 0
        return dict(zip(live, rows["a"].tolist(), strict=True)), rb.write_count, leaves, rb.stats()["void_rows"]


class Process:
    """A handle in a forked process, which can be killed."""

    def __init__(self):
        self.here, there = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                torch.set_num_threads(1)
                self.here.close()
                self._serve(there, Handle())
            except EOFError:  # the tests were interrupted
                pass
            finally:
                os._exit(0)
        there.close()

    @staticmethod
    def _serve(pipe, handle):
        while True:
            name, arguments = pipe.recv()
            if name == "end":
                return
            try:
                pipe.send((True, getattr(handle, name)(*arguments)))
            except Exception:  # noqa: BLE001 - handed over
                pipe.send((False, traceback.format_exc()))

    def __call__(self, name, *arguments):
        self.here.send((name, arguments))
        assert self.here.poll(100), f"{name}{arguments}: no answer"
        well, answer = self.here.recv()
        assert well, answer
        return answer

    def end(self, with_signal=None):
        if with_signal is not None:
            os.kill(self.pid, with_signal)
        else:
            self.here.send(("end", ()))
        self.here.close()
        os.waitpid(self.pid, 0)


class SharedMachine(RuleBasedStateMachine):
    #: They outlive an example.
    processes = []
    who = st.integers(0, 1)
    lane = st.integers(0, 2)
    #: Any double is as good as another: sums are compared bit for bit.
    priority = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-300, 1e200))

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(dir=stress.RAM)

    @initialize(lanes=st.integers(1, 3), length=st.sampled_from([1, 2, 3, 7, 9]))
    def begin(self, lanes, length):
        self.rings = Rings(lanes, length)
        while len(self.processes) < 2:
            self.processes.append(Process())
        for process in self.processes:
            process("move", f"{self.folder}/store")
        self.processes[0]("make", lanes * length, lanes)
        self.leaves = {"main": [0.0] * (lanes * length)}
        self.highest = {"main": 0.0}
        self.values = self.count = 0
        self.drawn = None
        self.append(0, 0, [self.next()])  # who writes first makes the store; the other one opens it
        self.processes[1]("open")

    def next(self):
        self.values += 1
        return self.values

    def wrote(self, row):
        for name in self.leaves:
            self.leaves[name][row] = self.highest[name] or 1.0
        if self.drawn is not None:
            self.drawn = [(other, mark, stale or other == row) for other, mark, stale in self.drawn]
        self.count += 1

    def append(self, who, lane, values):
        lanes = lane if isinstance(lane, list) else [lane] * len(values)
        rows = [self.rings.append(*both) for both in zip(lanes, values, strict=True)]
        assert self.processes[who]("extend", lane, values) == rows
        for row in rows:
            self.wrote(row)

    # ---- what may happen ---------------------------------------------------------------------------------------------

    @rule(who=who, lane=lane)
    def add(self, who, lane):
        lane %= len(self.rings.lanes)
        value = self.next()
        row = self.rings.append(lane, value)
        assert self.processes[who]("add", lane, value) == row
        self.wrote(row)

    @rule(who=who, lanes=lane | st.lists(lane, min_size=12, max_size=12), n=st.integers(1, 12))
    def extend(self, who, lanes, n):
        count = len(self.rings.lanes)
        lanes = lanes % count if isinstance(lanes, int) else [lane % count for lane in lanes[:n]]
        self.append(who, lanes, [self.next() for _ in range(n)])

    @precondition(lambda self: self.rings.live())
    @rule(who=who, at=st.data())
    def edit(self, who, at):
        row = at.draw(st.sampled_from(list(self.rings.live())))
        value = self.next()
        leaves = {name: leaves[row] for name, leaves in self.leaves.items()}
        self.processes[who]("edit", row, value)
        self.rings.edit(row, value)
        drawn = self.drawn
        self.wrote(row)
        self.drawn = drawn  # marks name the write that the row holds still
        self.count -= 1
        for name, leaf in leaves.items():
            self.leaves[name][row] = leaf

    @rule(who=who, keep=st.booleans())
    def empty(self, who, keep):
        self.processes[who]("empty", keep)
        self.rings.clear()
        self.drawn = None
        self.count = self.count if keep else 0
        for name, leaves in self.leaves.items():
            leaves[:] = [0.0] * len(leaves)
            self.highest[name] = 0.0

    @rule(who=who, name=st.sampled_from(INDEXES), values=st.data())
    def update(self, who, name, values):
        """Through the index of that name, which the first one to use it makes."""
        live = self.rings.live()
        if name not in self.leaves:
            self.leaves[name] = [1.0 if row in live else 0.0 for row in range(len(self.leaves["main"]))]
            self.highest[name] = 0.0
        self.processes[who]("use_index", name)
        if live:
            rows = values.draw(st.lists(st.sampled_from(list(live)), min_size=1, max_size=6))
            priorities = values.draw(st.lists(self.priority, min_size=len(rows), max_size=len(rows)))
            self.processes[who]("update", rows, priorities, None)
            self.updated(name, rows, priorities)
        self.processes[who]("use_index", "main")

    def updated(self, name, rows, priorities):
        for row, priority in zip(rows, priorities, strict=True):
            self.leaves[name][row] = priority
            self.highest[name] = max(self.highest[name], priority)

    @rule(who=who, n=st.integers(1, 8))
    def sample(self, who, n):
        drawn = self.processes[who]("sample", n)
        if not any(self.leaves["main"]):
            assert drawn is None
            return
        live = self.rings.live()
        assert [live[row] for row in drawn[0]] == drawn[1]
        assert all(self.leaves["main"][row] > 0 for row in drawn[0])
        self.drawn = [(row, mark, False) for row, _, mark in zip(*drawn, strict=True)]

    @precondition(lambda self: self.drawn is not None)
    @rule(who=who, values=st.data())
    def update_what_was_drawn(self, who, values):
        """By either of the two; rows rewritten since stay as they are."""
        rows, marks, stale = zip(*self.drawn, strict=True)
        priorities = values.draw(st.lists(self.priority, min_size=len(rows), max_size=len(rows)))
        self.processes[who]("update", rows, priorities, marks)
        fresh = [i for i in range(len(rows)) if not stale[i]]
        self.updated("main", [rows[i] for i in fresh], [priorities[i] for i in fresh])

    @rule(who=who)
    def reopen(self, who):
        self.processes[who]("open")

    @rule(both=st.booleans(), who=who)
    def crash(self, both, who):
        """One is killed, or both so that nobody has the store open; somebody opens it."""
        dead = [0, 1] if both else [who]
        for process in dead:
            self.processes[process].end(signal.SIGKILL)
        for process in dead:
            self.processes[process] = Process()
            self.processes[process]("move", f"{self.folder}/store")
            self.processes[process]("open")

    # ---- what must be so ---------------------------------------------------------------------------------------------

    @invariant()
    def agree(self):
        for process in self.processes:
            held, count, leaves, void = process("state")
            assert held == self.rings.live()
            assert count == self.count
            assert leaves == self.leaves
            assert void == 0

    def teardown(self):
        for process in list(self.processes):
            try:
                process("move", None)
            except (AssertionError, OSError):  # dead or stuck: the next example begins with another one
                self.processes.remove(process)
                process.end(signal.SIGKILL)
        shutil.rmtree(self.folder)


TestShared = SharedMachine.TestCase
TestShared.settings = settings(
    SETTINGS, max_examples=stress.size(25, 50_000, 100_000), stateful_step_count=stress.size(30, 50)
)
TestShared.pytestmark = [pytest.mark.stress, pytest.mark.timeout(stress.LIMIT_S)]
