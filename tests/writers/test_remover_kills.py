"""Writers that are killed while a remover chooses and rows are replaced, beside a model that replays every call.

A writer notes in a mapped file how many calls came back. Calls follow from their number, so whoever opens the store afterwards
knows each row: all are what the model says, but for the rows of the one call that was cut short, which hold what they held before,
nothing, or what the call wrote there, whole.
"""

import contextlib
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import engram.buffer.write_path
import engram.writers.max_value
import engram.writers.removers
from engram import (
    FifoRemover,
    LazyMemmapStorage,
    LazyTensorStorage,
    Lifo,
    LowestPriority,
    MaxTimesSampled,
    PrioritizedSampler,
    RemovingWriter,
    ReplayBuffer,
    StalestFirst,
    TensorDictReplayBuffer,
)
from tests import stress
from tests.store.processes import leaves

ROWS = 12
REMOVERS = {
    "fifo": FifoRemover,
    "lifo": Lifo,
    "priority": LowestPriority,
    "sampled": MaxTimesSampled,  # nothing is sampled here: the oldest rows go
    "stale": lambda: StalestFirst("version"),
}
#: Rows of a call.
SIZES = (1, 5, 2, 8, 3)
#: Of the lowest priority that there is, and of new rows.
FIRST, MOST = 1.0, 8.0


def steps(call, words):
    """Rows of a call, whose every word follows from their number."""
    ids = 100 * call + torch.arange(SIZES[call % len(SIZES)])
    wide = ids[:, None] * 31 + torch.arange(words)
    return TensorDict({"id": ids, "twice": 2 * ids, "version": ids * 7 % 11, "wide": wide}, [len(ids)])


def updated(call):
    """Rows that get a priority after a call, and those priorities."""
    rows = [(5 * call + i) % ROWS for i in range(4)]
    return rows, [FIRST + (3 * row + call) % 7 / 10 for row in rows]


class Model:
    """What the rows hold, and who goes first by a sort of all of them."""

    def __init__(self, kind):
        self.kind, self.clock = kind, 0
        self.rows = [None] * ROWS

    def _order(self):
        key = {"lifo": lambda one: -one["time"], "stale": lambda one: one["id"] * 7 % 11}
        key |= {"priority": lambda one: one["priority"]}
        key = key.get(self.kind, lambda one: one["time"])
        return sorted((row for row in range(ROWS) if self.rows[row]), key=lambda row: (key(self.rows[row]), row))

    def plan(self, call):
        """The rows that a call writes, in order, and the ids that they get."""
        n = SIZES[call % len(SIZES)]
        free = [row for row in range(ROWS) if not self.rows[row]][:n]
        return free + self._order()[: n - len(free)], [100 * call + i for i in range(n)]

    def put(self, row, number):
        self.clock += 1
        self.rows[row] = {"id": number, "time": self.clock, "priority": MOST}

    def carry_out(self, call):
        for row, number in zip(*self.plan(call), strict=True):
            self.put(row, number)
        for row, value in zip(*updated(call), strict=True):
            if self.rows[row]:
                self.rows[row]["priority"] = value


def made(kind, where, folder, words):
    storage = LazyTensorStorage(ROWS) if where == "shared" else LazyMemmapStorage(ROWS, scratch_dir=folder)
    sampler = PrioritizedSampler(ROWS, 1.0, 1.0)
    remover = REMOVERS[kind]()
    # That of `remover=FifoRemover()` is the ring.
    more = {"writer": RemovingWriter(remover)} if kind == "fifo" else {"remover": remover}
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4, **more)
    if where == "shared":
        rb.share()
    model = Model(kind)
    for call in range(-5, 0):  # of 1 + 5 + 2 + 8 + 3 rows
        rb.extend(steps(call, words))
        if call == -5:
            rb.update_priority([0], MOST)  # the highest that there will be, which every new row gets
            rb.count_usage()
        rows, values = updated(call)
        rb.update_priority(torch.tensor(rows), torch.tensor(values))
        model.carry_out(call)
    return rb, model


def run_call(rb, call, words):
    rb.extend(steps(call, words))
    rows, values = updated(call)
    rb.update_priority(torch.tensor(rows), torch.tensor(values))


def held(rb):
    """Per row its content, whole, or None."""
    live = [row for row in range(ROWS) if row in rb.storage]
    assert (len(rb), rb.stats()["void_rows"]) == (len(live), ROWS - len(live))
    content = [None] * ROWS
    if live:
        rows = rb[live]
        assert torch.equal(rows["twice"], 2 * rows["id"])
        assert torch.equal(rows["version"], rows["id"] * 7 % 11)
        wide = rows["wide"]
        assert torch.equal(wide, rows["id"][:, None] * 31 + torch.arange(wide.shape[1])), "torn"
        for row, number, leaf in zip(live, rows["id"].tolist(), leaves(rb)[live].tolist(), strict=True):
            content[row] = (number, leaf)
    return content


def compare(rb, model, call, cut=None):
    """The store at rest, of which a writer was killed in ``call``, with the model of before it; the model learns what came of it.

    Returns how many rows the call had written, and how many are void.
    """
    planned = dict(zip(*model.plan(call), strict=True))
    values = dict(zip(*updated(call), strict=True))
    found = held(rb)
    wrote = [row for row, number in planned.items() if found[row] and found[row][0] == number]
    assert wrote == list(planned)[: len(wrote)], "rows of one call are written in order"
    void = 0
    for row, now in enumerate(found):
        before = model.rows[row]
        if row not in planned:
            assert (now and now[0]) == (before and before["id"]), f"row {row}, which nobody replaced, holds {now}"
        elif now is None:
            void += 1
        else:
            assert now[0] in (planned[row], before and before["id"]), (row, now, planned[row], before)
    for row in wrote:
        model.put(row, planned[row])
    for row in planned:
        if found[row] is None:
            model.rows[row] = None
    for row, now in enumerate(found):
        if now is None:
            continue
        allowed = {MOST, model.rows[row]["priority"]} | ({values[row]} if row in values else set())
        priority = min(allowed, key=lambda one: abs(one - now[1]))
        assert now[1] == pytest.approx(priority, rel=1e-6), (row, now, allowed)
        if row not in planned and row not in values:
            assert priority == pytest.approx(model.rows[row]["priority"])
        model.rows[row]["priority"] = priority
    if cut is not None:
        cut["void rows"] += void
        cut["calls that wrote some"] += 0 < len(wrote) < len(planned)
        cut["calls that wrote all"] += len(wrote) == len(planned)
        cut["calls that wrote none"] += not wrote
    return len(wrote), void


class Case:
    """One store, its model, and calls by writers that are killed and by the test itself."""

    def __init__(self, kind, where, folder, words):
        self.words, self.where, self.call = words, where, 0
        self.folder = folder / "store"
        self.rb, self.model = made(kind, where, self.folder, words)
        self.acknowledged = np.memmap(folder / "account", np.int64, "w+", shape=(1,))
        self.close()

    def close(self):
        if self.where == "directory":
            self.rb.close()
            self.rb = None

    def end(self):
        if self.rb is not None:
            self.rb.close()

    def open(self):
        if self.where == "directory":
            self.rb = ReplayBuffer.open(self.folder)
            self.rb.update_priority([], [])
        else:
            self.rb.storage.store.core.reclaim()
        assert self.rb.storage.store.core.in_flight == 0
        return self.rb

    def in_child(self, function):
        """Run a function of the buffer in a process of its own: its number."""
        self.acknowledged[0] = self.call
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                function(ReplayBuffer.open(self.folder) if self.where == "directory" else self.rb)
                code = 0
            finally:
                os._exit(code)
        return pid

    def after(self, cut=None):
        """Look at what a dead writer left; then two calls more, as if nothing had been."""
        rb = self.open()
        while self.call < self.acknowledged[0]:
            self.model.carry_out(self.call)
            self.call += 1
        compare(rb, self.model, self.call, cut)
        self.call += 1
        for _ in range(2):
            planned = self.model.plan(self.call)[0]
            assert rb.extend(steps(self.call, self.words)).tolist() == planned
            rows, values = updated(self.call)
            rb.update_priority(torch.tensor(rows), torch.tensor(values))
            self.model.carry_out(self.call)
            self.call += 1
            assert [now and now[0] for now in held(rb)] == [one and one["id"] for one in self.model.rows]
        self.close()


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- at each line of choosing and placing ------------------------------------------------------------------------------------

TRACED = {
    module.__file__
    for module in (
        engram.writers.removers,
        engram.writers.removers,
        engram.writers.removers,
        engram.writers.max_value,
        engram.buffer.write_path,
    )
}


def die_at(n):
    """From now on: the n-th line of the files traced is not run."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            lines += 1
            if lines == n:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


@pytest.mark.stress(sample=4)
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize("where", ["shared", "directory"])
@pytest.mark.parametrize("kind", REMOVERS)
def test_killed_at_each_line_of_choosing_and_writing(kind, where, tmp_path):
    case = Case(kind, where, tmp_path, 3)
    step = stress.size(9, 1)
    for n in range(1 + len(kind), 10_000, step):

        def write(rb, n=n):
            die_at(n)
            run_call(rb, case.call, 3)
            sys.settrace(None)
            case.acknowledged[0] = case.call + 1

        code = ended(case.in_child(write))
        assert code in (0, -signal.SIGKILL)
        case.after()
        if code == 0:
            break
    assert n > 3 * step
    case.end()


# ---- at random instants -------------------------------------------------------------------------------------------------------


@pytest.mark.stress(sample=4)
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize("where", ["shared", "directory"])
@pytest.mark.parametrize("kind", REMOVERS)
def test_killed_while_it_writes(kind, where, tmp_path):
    """Rows are large and at hand, so that most of the time passes in native writing."""
    chance = stress.chance("killed removers", kind, where)
    cut = dict.fromkeys(("void rows", "calls that wrote some", "calls that wrote all", "calls that wrote none"), 0)
    case = Case(kind, where, tmp_path, chance.choice([2_000, 20_000]))
    for _ in range(stress.size(6, 300)):
        reading, writing = os.pipe()
        ready = {call: steps(call, case.words) for call in range(case.call, case.call + 12)}

        def write(rb, writing=writing, ready=ready):
            for call in range(case.call, 1 << 40):
                rb.extend(ready[call] if call in ready else steps(call, case.words))
                rows, values = updated(call)
                rb.update_priority(torch.tensor(rows), torch.tensor(values))
                case.acknowledged[0] = call + 1
                os.write(writing, b".")

        pid = case.in_child(write)
        os.close(writing)
        try:
            for _ in range(chance.randrange(1, 8)):
                assert os.read(reading, 1), "the writer ended"
            time.sleep(chance.random() * 0.002)
        finally:
            os.kill(pid, signal.SIGKILL)
            assert ended(pid) == -signal.SIGKILL
            os.close(reading)
        case.after(cut)
    print(kind, where, cut, file=sys.stderr)
    case.end()


# ---- several writers -----------------------------------------------------------------------------------------------------------


class Beside:
    """One of several writers of a store, in a process of its own."""

    def __init__(self, rb, folder, number, acknowledged):
        self.number, self.acknowledged = number, acknowledged
        self._reading, writing = os.pipe()
        self._heard = 0
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._reading)
                torch.set_num_threads(1)
                rb = ReplayBuffer.open(folder) if rb is None else rb
                for count in range(1 << 40):
                    run_call(rb, 1_000_000 * number + count, 500)
                    acknowledged[number] = 1_000_000 * number + count
                    os.write(writing, b".")
            finally:
                os._exit(1)
        os.close(writing)

    def goes_on(self, calls):
        """Wait until it has written that many calls more than now."""
        until = max(int(self.acknowledged[self.number]) - 1_000_000 * self.number + 1, 0) + calls
        while self._heard < until:
            heard = os.read(self._reading, until - self._heard)
            assert heard, "the writer ended"
            self._heard += len(heard)

    def kill(self):
        if self._reading is not None:
            os.kill(self.pid, signal.SIGKILL)
            assert ended(self.pid) == -signal.SIGKILL
            os.close(self._reading)
            self._reading = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


@pytest.mark.stress(sample=4)
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize("where", ["shared", "directory"])
@pytest.mark.parametrize("kind", REMOVERS)
def test_other_writers_go_on_when_one_is_killed(kind, where, tmp_path):
    """Each row is whole and of a call that was begun, and rows that a remover never chooses are there."""
    chance = stress.chance("killed beside others", kind, where)
    folder = tmp_path / "store"
    rb, model = made(kind, where, folder, 500)
    rounds = stress.size(2, 100)
    acknowledged = np.memmap(tmp_path / "account", np.int64, "w+", shape=(1 + 3 * rounds,))
    acknowledged[:] = -1
    for number in range(1, 1 + 3 * rounds, 3):
        if where == "directory":
            rb.close()
            rb = None
        with contextlib.ExitStack() as writers:
            first, second = (writers.enter_context(Beside(rb, folder, n, acknowledged)) for n in (number, number + 1))
            first.goes_on(chance.randrange(1, 6))
            second.goes_on(chance.randrange(1, 6))
            first.kill()
            third = writers.enter_context(Beside(rb, folder, number + 2, acknowledged))
            second.goes_on(3)
            third.goes_on(3)
        if where == "directory":
            rb = ReplayBuffer.open(folder)
            rb.update_priority([], [])
        else:
            rb.storage.store.core.reclaim()
        found = held(rb)
        for one in found:
            if one is not None and one[0] >= 0 and (call := one[0] // 100) >= 1_000_000:
                last = int(acknowledged[call // 1_000_000])
                assert call <= max(last, call // 1_000_000 * 1_000_000 - 1) + 1, "of a call that was never begun"
        if kind == "lifo":  # a call chooses the newest eight at most
            first = sorted(
                (one["id"], row) for row, one in enumerate(model.rows) if one and one["time"] <= ROWS - max(SIZES)
            )
            assert [found[row] and found[row][0] for _, row in first] == [number for number, _ in first]
        if None in found:
            void = [row for row, one in enumerate(found) if one is None]
            assert rb.extend(TensorDict.cat([steps(3, 500), steps(3, 500)])[: len(void)]).tolist() == void
        assert (len(rb), rb.stats()["void_rows"]) == (ROWS, 0)
    rb.close()


# ---- negative controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["torn", "lost", "another row", "none"])
def test_the_account_notices(wrong, tmp_path):
    case = Case("lifo", "directory", tmp_path, 40)
    rb = case.open()
    planned = case.model.plan(0)[0]
    others = [row for row in range(ROWS) if row not in planned]
    if wrong == "torn":
        rb.set_at_("wide", torch.zeros(1, 40, dtype=torch.int64), [others[0]])
    elif wrong == "lost":
        rb.remove([others[0]])
    elif wrong == "another row":
        rb[others[0]] = steps(0, 40)[0]
    if wrong == "none":
        compare(rb, case.model, 0)
    else:
        with pytest.raises(AssertionError):
            compare(rb, case.model, 0)
    rb.close()


def test_the_account_notices_another_choice(monkeypatch, tmp_path):
    """A remover that takes the first rows, in a writer that is killed."""
    case = Case("lifo", "shared", tmp_path, 40)
    monkeypatch.setattr(Lifo, "choose", lambda self, storage, n: torch.arange(n))

    def write(rb):
        run_call(rb, 0, 40)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(case.in_child(write)) == -signal.SIGKILL
    with pytest.raises(AssertionError, match="which nobody replaced"):
        case.after()
    case.end()
