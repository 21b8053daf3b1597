"""What removers choose after other processes have written, edited, removed and sampled: beside a sort of all rows each time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    FifoRemover,
    LazyMemmapStorage,
    LazyTensorStorage,
    Lifo,
    MaxTimesSampled,
    RandomSampler,
    RemovingWriter,
    ReplayBuffer,
    StalestFirst,
    TensorDictReplayBuffer,
)
from engram.store.indexes import INDEX_KINDS
from engram.writers.removers import ChangesIndex
from tests.store.processes import context
from tests.waiting import ended

SIZE = 100
REMOVERS = {"fifo": FifoRemover, "lifo": Lifo, "sampled": MaxTimesSampled, "stale": lambda: StalestFirst("version")}


def steps(first, n):
    ids = torch.arange(first, first + n)
    return TensorDict({"id": ids, "version": ids * 7919 % 50}, [n])


def made(kind, storage):
    rb = TensorDictReplayBuffer(
        storage=storage, sampler=RandomSampler(), writer=RemovingWriter(REMOVERS[kind]()), batch_size=32
    )
    rb.extend(steps(0, SIZE))
    rb.count_usage()
    return rb


def expected(rb, kind, n):
    """Rows that go next, by what the store says of all rows."""
    every = torch.arange(rb.storage.extent().capacity)
    tickets = rb.storage.tickets_of(every).tolist()
    live = [row for row in every.tolist() if tickets[row] >= 0]
    counts = rb.storage.memory.indexes["main", "usage"].counts(every).tolist()
    versions = rb.storage.field(("version",), every, rb.storage.tickets_of(every))[0].tolist()
    key = {
        "fifo": lambda row: tickets[row],
        "lifo": lambda row: -tickets[row],
        "sampled": lambda row: (-counts[row], tickets[row]),
        "stale": lambda row: (versions[row], row),
    }[kind]
    free = [row for row in every.tolist() if tickets[row] < 0][:n]
    return free + sorted(live, key=key)[: n - len(free)]


def work(rb, name, at):
    """One step of any process."""
    if name == "write":
        rb.extend(steps(1000 + 10 * at, 1 + at % 7))
    elif name == "many":
        rb.extend(steps(1000 + 10 * at, SIZE - at % 3))
    elif name == "edit":
        rows = torch.arange(at % 50, SIZE, 17)
        live = rows[rb.storage.tickets_of(rows) >= 0]
        if len(live):
            rb[live] = steps(5000 + at, len(live))
    elif name == "remove":
        rb.remove(torch.arange(at % 40, SIZE, 29))
    elif name == "sample":
        rb.sample()
    elif name == "empty":
        rb.empty()
        rb.extend(steps(9000 + at, SIZE))


def serve(rb, asked, answers):
    while (what := asked.recv()) is not None:
        work(rb, *what)
        answers.send("done")


class Other:
    """A process that does one step after the other, as it is told."""

    def __init__(self, rb, method):
        processes = context(method)
        theirs, self.asked = processes.Pipe(duplex=False)
        self.answers, said = processes.Pipe(duplex=False)
        self.process = processes.Process(target=serve, args=(rb, theirs, said), daemon=True)
        self.process.start()
        theirs.close()
        said.close()

    def do(self, name, at):
        self.asked.send((name, at))
        assert self.answers.poll(120), "the other process says nothing"
        assert self.answers.recv() == "done"

    def end(self):
        self.asked.send(None)
        ended(self.process)
        assert self.process.exitcode == 0


def run_program(rb, kind, others, program):
    for at, (who, name) in enumerate(program):
        if who == 0:
            work(rb, name, at)
        else:
            others[who - 1].do(name, at)
        n = 1 + at % 4
        rows = expected(rb, kind, n)
        assert rb.extend(steps(20_000 + 10 * at, n)).tolist() == rows, (at, who, name)


PROGRAM = [
    (who, name)
    for name in ("write", "edit", "sample", "remove", "write", "sample", "sample", "many", "empty", "sample", "write")
    for who in (1, 0, 2, 1)
]


@pytest.mark.parametrize(("kind", "method"), [*((kind, "fork") for kind in REMOVERS), ("sampled", "spawn")])
def test_two_processes_beside(kind, method, tmp_path):
    rb = made(kind, LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "store"))
    others = [Other(rb, method), Other(rb, method)]
    run_program(rb, kind, others, PROGRAM)
    for other in others:
        other.end()
    rb.close()
    again = ReplayBuffer.open(tmp_path / "store")
    rows = expected(again, kind, 3)
    assert again.extend(steps(90_000, 3)).tolist() == rows


@pytest.mark.parametrize("kind", REMOVERS)
@settings(max_examples=25, deadline=None)
@given(
    program=st.lists(
        st.tuples(st.just(0), st.sampled_from(["write", "many", "edit", "sample", "remove", "empty"])), max_size=25
    )
)
def test_one_process(kind, program):
    run_program(made(kind, LazyTensorStorage(SIZE)), kind, [], program)


@pytest.mark.parametrize("kind", REMOVERS)
def test_what_is_not_marked_is_not_found(kind, monkeypatch):
    """The negative control: a look that finds no row."""
    rb = made(kind, LazyTensorStorage(SIZE))
    rb.extend(steps(500, 4))
    look = ChangesIndex.look
    monkeypatch.setattr(
        ChangesIndex, "look", lambda index, since: (look(index, since)[0], torch.empty(0).long().numpy())
    )
    with pytest.raises(AssertionError):
        run_program(rb, kind, [], [(0, "edit"), (0, "sample"), (0, "write"), (0, "write")])


def test_a_choice_looks_at_what_was_written_since(monkeypatch):
    rb = made("lifo", LazyTensorStorage(10_000))
    rb.extend(steps(0, 10_000))
    looked = []
    look = ChangesIndex.look

    def noted(index, since):
        found = look(index, since)
        looked.append(len(found[1]))
        return found

    monkeypatch.setattr(ChangesIndex, "look", noted)
    for first in range(0, 30, 3):
        rb.extend(steps(first, 3))
    rb[5_000] = steps(7, 1)[0]
    rb.extend(steps(0, 1))
    assert max(looked[1:]) <= 64, looked


def test_loads_and_other_capacities_are_noticed(tmp_path):
    """Rows that a load puts there are ranked anew, by removers that have looked before."""
    for kind in REMOVERS:
        rb = made(kind, LazyMemmapStorage(SIZE, scratch_dir=tmp_path / f"store-{kind}"))
        saved = made(kind, LazyTensorStorage(SIZE))
        saved.extend(steps(400, 30))
        saved.dumps(tmp_path / f"dump-{kind}")
        rb.extend(steps(800, 5))
        rb.sample()
        rb.loads(tmp_path / f"dump-{kind}")
        for first in (0, 10, 20):
            rows = expected(rb, kind, 4)
            assert rb.extend(steps(600 + first, 4)).tolist() == rows, kind
        rb.close()


def test_an_engram_that_does_not_know_the_marks_refuses_the_directory(tmp_path, monkeypatch):
    rb = made("lifo", LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "store"))
    rb.extend(steps(0, 1))
    rb.close()
    monkeypatch.delitem(INDEX_KINDS, "changes")
    with pytest.raises(Exception, match="an index that a newer engram has made"):
        ReplayBuffer.open(tmp_path / "store")


def test_memory_after_a_power_cut_is_begun_again(tmp_path):
    """Marks that reached the disk while those above them did not would hide rows."""
    rb = made("lifo", LazyMemmapStorage(2_000, scratch_dir=tmp_path / "store"))
    rb.extend(steps(0, 2_000))
    rb.close()
    (path,) = (tmp_path / "store" / ".engram" / "indexes").glob("*/changes")
    raw = bytearray(path.read_bytes())
    raw[4096 : 4096 + 8 * 125] = (1000).to_bytes(8, "little") * 125
    path.write_bytes(bytes(raw))
    again = ReplayBuffer.open(tmp_path / "store")
    for first in range(0, 40, 2):
        rows = expected(again, "lifo", 2)
        assert again.extend(steps(first, 2)).tolist() == rows
        again[first] = steps(first, 1)[0]
