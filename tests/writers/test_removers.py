"""Which rows go when the store is full: each remover beside a model, in several processes, reopened, and through saves."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    Checkpointer,
    FifoRemover,
    LazyMemmapStorage,
    LazyTensorStorage,
    Lifo,
    ListStorage,
    LowestPriority,
    MaxTimesSampled,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    RemovingWriter,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    StalestFirst,
    TensorDictReplayBuffer,
)
from tests.ranks.jobs import checkpointer, done, job
from tests.store.processes import Child
from tests.testing.test_broken_storages import FreeSlots, Ring

SIZE = 6
REMOVERS = {
    "lifo": Lifo,
    "priority": LowestPriority,
    "sampled": MaxTimesSampled,
    "stale": lambda: StalestFirst("version"),
}


def steps(first, n, versions=None):
    ids = torch.arange(first, first + n)
    versions = (ids * 7 % 5) if versions is None else torch.tensor(versions)
    return TensorDict({"id": ids, "version": versions}, [n])


def made(remover, storage=None, capacity=SIZE, **more):
    storage = LazyTensorStorage(capacity) if storage is None else storage
    sampler = PrioritizedSampler(capacity, 1.0, 1.0)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, remover=remover, batch_size=8, **more)
    rb.extend(steps(0, 1))
    if isinstance(remover, MaxTimesSampled):
        rb.count_usage()
    return rb


class Model:
    """Rows as dicts, and who goes first by a sort of all of them."""

    def __init__(self, kind):
        self.kind, self.rows, self.clock, self.highest = kind, [None] * SIZE, 0, 1.0
        self.write(steps(0, 1))

    def order(self):
        key = {
            "lifo": lambda row: -self.rows[row]["time"],
            "priority": lambda row: self.rows[row]["priority"],
            "sampled": lambda row: (-self.rows[row]["times"], self.rows[row]["time"]),
            "stale": lambda row: self.rows[row]["version"],
        }[self.kind]
        return sorted((row for row in range(SIZE) if self.rows[row] is not None), key=lambda row: (key(row), row))

    def write(self, data):
        """The rows of the data, -1 for those that do not stay."""
        n = len(data)
        kept = min(n, SIZE)
        free = [row for row in range(SIZE) if self.rows[row] is None][:kept]
        rows = free + self.order()[: kept - len(free)]
        for row, step in zip(rows, data[n - kept :], strict=True):
            self.clock += 1
            self.rows[row] = {
                "id": int(step["id"]),
                "version": int(step["version"]),
                "time": self.clock,
                "priority": self.highest,
                "times": 0,
            }
        return [-1] * (n - kept) + rows


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.lists(st.integers(0, 5), min_size=1, max_size=8)),
    st.tuples(st.just("add"), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.lists(st.integers(0, SIZE - 1), max_size=3)),
    st.tuples(st.just("update"), st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("by number"), st.integers(0, SIZE - 1)),
    st.tuples(st.just("sample"), st.integers(1, 3)),
    st.tuples(st.just("empty"), st.none()),
    st.tuples(st.just("another handle"), st.none()),
)


def run_program(kind, program, folder=None):
    storage = None if folder is None else LazyMemmapStorage(SIZE, scratch_dir=folder)
    rb, model = made(REMOVERS[kind](), storage), Model(kind)
    for at, (name, what) in enumerate(program):
        first = 10 * at + 10
        if name == "write":
            data = steps(first, len(what), what)
            assert rb.extend(data).tolist() == model.write(data)
        elif name == "add":
            data = steps(first, 1, [what])
            assert [rb.add(data[0])] == model.write(data)
        elif name == "remove":
            rb.remove(what)
            for row in what:
                model.rows[row] = None
        elif name == "update":
            values = [1.0 + (3 * row + at) % 7 for row in what]
            rb.update_priority(torch.tensor(what), torch.tensor(values))
            for row, value in zip(what, values, strict=True):
                if model.rows[row] is not None:
                    model.rows[row]["priority"] = value
                    model.highest = max(model.highest, value)
        elif name == "by number":
            if model.rows[what] is not None:
                rb[what] = steps(first, 1, [at % 6])[0]
                model.clock += 1
                model.rows[what] |= {"id": first, "version": at % 6, "time": model.clock}
        elif name == "sample":
            for _ in range(what if len(rb) else 0):
                for row in rb.sample(return_info=True)[1]["index"].tolist():
                    model.rows[row]["times"] += 1
        elif name == "empty":
            rb.empty()
            model.rows, model.highest = [None] * SIZE, 1.0
        elif folder is not None:
            rb.close()
            rb = ReplayBuffer.open(folder)
            assert repr(rb.writer) == f"RemovingWriter({REMOVERS[kind]()!r})"
        live = [row for row in model.rows if row is not None]
        assert len(rb) == len(live)
        if live:
            assert rb[:]["id"].tolist() == [row["id"] for row in live]
    rb.close()


@pytest.mark.parametrize("kind", REMOVERS)
@settings(max_examples=40, deadline=None)
@given(program=st.lists(OPERATIONS, max_size=12))
def test_random_programs(kind, program):
    run_program(kind, program)


@pytest.mark.parametrize("kind", REMOVERS)
@settings(max_examples=6, deadline=None)
@given(program=st.lists(OPERATIONS, max_size=8))
def test_random_programs_in_a_directory(kind, tmp_path_factory, program):
    run_program(kind, program, tmp_path_factory.mktemp("store") / "store")


@pytest.mark.parametrize("kind", REMOVERS)
def test_the_model_notices_other_rows(kind, monkeypatch):
    """The negative control: a remover that takes the first rows."""
    for cls in (type(REMOVERS[kind]()), Lifo):
        monkeypatch.setattr(cls, "choose", lambda self, storage, n: torch.arange(n))
    with pytest.raises(AssertionError):
        run_program(kind, [("write", [5, 3, 1, 4, 2]), ("update", [0, 1, 2]), ("write", [3, 3]), ("write", [2, 2])])


def test_the_path_of_a_version_is_noted(tmp_path):
    remover = StalestFirst(("next", "version"))
    with ReplayBuffer(storage=LazyMemmapStorage(3, scratch_dir=tmp_path), remover=remover) as rb:
        rb.extend({"next": {"version": torch.tensor([3, 1, 2])}})
    with ReplayBuffer.open(tmp_path) as rb:
        assert rb.add({"next": {"version": torch.tensor(4)}}) == 1
        assert repr(rb.writer) == "RemovingWriter(StalestFirst(version_key=['next', 'version']))"


def test_the_rows_that_were_sampled_most_go():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(SIZE),
        sampler=SamplerWithoutReplacement(shuffle=False),
        remover=MaxTimesSampled(),
        batch_size=4,
    )
    rb.extend(steps(0, SIZE))
    rb.count_usage()
    rb.sample()
    rb.sample()
    rb.sample()  # each row twice, and then the rows 0 to 3 again, in batches of 4, 2 and 4
    assert rb.extend(steps(10, 2)).tolist() == [0, 1]
    assert rb.extend(steps(20, 2)).tolist() == [2, 3]
    assert rb[:]["id"].tolist() == [10, 11, 20, 21, 4, 5]
    assert rb.extend(steps(30, 3)).tolist() == [4, 5, 0]


@pytest.mark.parametrize("capacity", [100, 1000])
def test_counts_are_those_of_the_choice(capacity):
    """Against a sort of all counts before each write, with samples in between."""
    rb = made(MaxTimesSampled(), capacity=capacity)
    rb.extend(steps(1, capacity - 1))
    for step in range(3 * capacity // 5):
        for _ in range(step % 3):
            rb.sample()
        counts = rb.storage.store.indexes["main", "usage"].counts(torch.arange(capacity)).tolist()
        tickets = rb.storage.tickets_of(torch.arange(capacity)).tolist()
        expected = sorted(range(capacity), key=lambda row: (-counts[row], tickets[row]))[:5]
        assert rb.extend(steps(5000 + 5 * step, 5)).tolist() == expected


def test_fifo_is_the_ring():
    rb = ReplayBuffer(storage=LazyTensorStorage(3), remover=FifoRemover())
    assert type(rb.writer) is RoundRobinWriter
    by_choice = ReplayBuffer(storage=LazyTensorStorage(3), writer=RemovingWriter(FifoRemover()))
    for each in (rb, by_choice):
        assert each.extend(torch.arange(3)).tolist() == [0, 1, 2]
    assert ReplayBuffer(remover=None, size=3).writer is not None


# ---- places, processes and saves --------------------------------------------------------------------------------------------


def _write_some(rb, first):
    for i in range(5):
        rb.extend(steps(first + 10 * i, 3, [9, 9, 9]))


@pytest.mark.parametrize("kind", REMOVERS)
def test_what_another_process_wrote_counts(kind, tmp_path):
    rb = made(REMOVERS[kind](), LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "store"))
    rb.extend(steps(1, SIZE - 1))
    rb.extend(steps(50, 1, [1]))
    Child(_write_some, rb, 100).join()
    assert (len(rb), rb.stats()["void_rows"]) == (SIZE, 0)
    if kind == "stale":
        rb.update_priority(torch.arange(SIZE), 1.0)
        least = int(rb[:]["version"].argmin())
        assert rb.add(steps(900, 1, [9])[0]) == least
    if kind == "lifo":
        newest = int(rb.storage.tickets_of(torch.arange(SIZE)).argmax())
        assert rb.add(steps(900, 1)[0]) == newest
    if kind == "priority":
        rb.update_priority(torch.arange(SIZE), torch.tensor([3.0, 2.0, 5.0, 0.5, 1.0, 4.0]))
        Child(_write_some, rb, 300).join()
        rb.update_priority([2], 0.1)
        assert rb.add(steps(900, 1)[0]) == 2


@pytest.mark.parametrize("kind", REMOVERS)
@pytest.mark.parametrize("form", ["dump", "series", "pickle", "copy", "shared"])
def test_saved_and_copied(kind, form, tmp_path):
    rb = made(REMOVERS[kind]())
    rb.extend(steps(1, SIZE + 3))
    rb.update_priority(torch.arange(SIZE), torch.arange(SIZE, 0, -1.0))
    other = made(REMOVERS[kind]())
    if form == "dump":
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
    elif form == "series":
        Checkpointer(tmp_path / "series", rb).save(1)
        Checkpointer(tmp_path / "series", other).restore()
    elif form == "shared":
        other = rb.share()
    else:
        other = copy.deepcopy(rb) if form == "copy" else pickle.loads(pickle.dumps(rb))
    assert other[:]["id"].tolist() == rb[:]["id"].tolist()
    if kind != "sampled":
        expected = REMOVERS[kind]().choose(rb.storage, 2).tolist()
        assert other.extend(steps(500, 2)).tolist() == expected
    assert len(other) == SIZE


# ---- what is refused ---------------------------------------------------------------------------------------------------------


def test_samplers_that_need_an_order_are_refused():
    with pytest.raises(ValueError, match="expected a sampler of single rows"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=SliceSampler(slice_len=2), remover=Lifo())
    with pytest.raises(ValueError, match="expected a sampler of single rows"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=NStep(RandomSampler(), 2, 0.9), remover=Lifo())
    with pytest.raises(ValueError, match="expected a sampler of single rows"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(4), sample_unit=Sequence(length=2), remover=Lifo())
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), remover=Lifo())
    before = rb.sampler
    with pytest.raises(ValueError, match="expected a sampler of single rows"):
        rb.set_sampler(SliceSampler(slice_len=2))
    assert rb.sampler is before
    slices = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=SliceSampler(slice_len=2))
    with pytest.raises(ValueError, match="expected a sampler of single rows"):
        slices.set_writer(RemovingWriter(Lifo()))


@pytest.mark.parametrize(
    "storage", [lambda: LazyTensorStorage(4, lanes=2), lambda: LazyTensorStorage(4, ndim=2), lambda: ListStorage(4)]
)
def test_storages_without_one_order_of_places_are_refused(storage):
    with pytest.raises(ValueError, match="remover: expected a tensor storage with ndim=1 and one lane"):
        ReplayBuffer(storage=storage(), remover=Lifo())


def test_arguments():
    with pytest.raises(TypeError, match="expected writer or remover"):
        ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(), remover=Lifo())
    for wrong in (Lifo, object(), "lifo"):
        with pytest.raises(TypeError, match="remover: expected a component with the method choose"):
            ReplayBuffer(storage=LazyTensorStorage(4), remover=wrong)
    for name, error in ((3, TypeError), ("a b", ValueError)):
        with pytest.raises(error, match="LowestPriority: index: expected a name"):
            LowestPriority(name)


@pytest.mark.parametrize(
    ("remover", "error", "text"),
    [
        (LowestPriority(), RuntimeError, "expected priorities 'main' in the store"),
        (LowestPriority("critic"), RuntimeError, "expected priorities 'critic'"),
        (MaxTimesSampled(), RuntimeError, "Call rb.count_usage"),
        (
            StalestFirst("absent"),
            KeyError,
            r"StalestFirst: version_key: expected a stored field, one of .*'a'.* got 'absent'",
        ),
        (StalestFirst("wide"), ValueError, "expected one number per row"),
    ],
)
def test_a_remover_without_what_it_asks_writes_nothing(remover, error, text):
    rb = ReplayBuffer(storage=LazyTensorStorage(4), remover=remover)
    data = {"a": torch.arange(4), "wide": torch.zeros(4, 2)}
    rb.extend(data)
    with pytest.raises(error, match=text):
        rb.extend(data | {"a": torch.arange(10, 14)})
    assert rb[:]["a"].tolist() == [0, 1, 2, 3]


def test_versions_may_be_infinite_or_no_numbers():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), remover=StalestFirst("version"))
    infinite = float("inf")
    rb.extend({"version": torch.tensor([infinite, 2.0, float("nan"), -infinite])})
    assert rb.extend({"version": torch.tensor([3.0, infinite])}).tolist() == [2, 3]
    assert rb.extend({"version": torch.tensor([9.0] * 4)}).tolist() == [1, 2, 0, 3]


def test_priorities_of_zero_have_no_order():
    sampler = PrioritizedSampler(4, 1.0, 1.0, eps=0.0)
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, remover=LowestPriority(), batch_size=2)
    rb.extend(torch.arange(4))
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 1.0, 0.0, 2.0]))
    assert rb.add(torch.tensor(9)) == 1
    with pytest.raises(RuntimeError, match="expected 3 rows with a priority above zero, got 2"):
        rb.extend(torch.arange(3))
    assert rb[:].tolist() == [0, 9, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda n: torch.zeros(n, dtype=torch.int64),
        lambda n: torch.arange(n + 1),
        lambda n: torch.arange(n) + 3,
        lambda n: torch.arange(n).double(),
        lambda n: list(range(n)),
        lambda n: torch.arange(n) - 1,
    ],
)
def test_what_a_remover_of_ones_own_returns_is_checked(wrong):
    class Wrong:
        def choose(self, storage, n):
            return wrong(n)

    rb = ReplayBuffer(storage=LazyTensorStorage(4), remover=Wrong())
    rb.extend(torch.arange(4))
    with pytest.raises(ValueError, match=r"Wrong.choose: expected 2 rows in \[0, 4\)"):
        rb.extend(torch.arange(2))
    assert rb[:].tolist() == [0, 1, 2, 3]


def test_a_remover_of_ones_own_in_a_directory(tmp_path):
    class First:
        def choose(self, storage, n):
            return torch.arange(n)

    rb = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "store"), remover=First())
    rb.extend(torch.arange(4))
    rb.close()
    with pytest.raises(TypeError, match="custom writer 'RemovingWriter'"):
        ReplayBuffer.open(tmp_path / "store")
    rb = ReplayBuffer.open(tmp_path / "store", writer=RemovingWriter(First()))
    assert rb.extend(torch.arange(2)).tolist() == [0, 1]


# ---- other ranks, and storages of one's own ------------------------------------------------------------------------------------


def _by_id(rb):
    rows = rb[:]
    values = zip(rows["version"].tolist(), leaves_of(rb)[:].tolist(), strict=True)
    return dict(zip(rows["id"].tolist(), values, strict=True))


def leaves_of(rb):
    index = rb.sampler.priorities()
    every = index.leaves(index.core.rows)
    return every[every > 0]


@pytest.mark.filterwarnings("ignore:Checkpointer:UserWarning")  # no field ends trajectories, and rows keep their ids
@pytest.mark.parametrize("kind", REMOVERS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_on_other_ranks(kind, ranks, tmp_path):
    """Of three ranks: each row comes to one of the others, as it was, and who goes there next follows from what is there."""
    size = 24

    def saved(job, rank):
        rb = made(REMOVERS[kind](), capacity=size)
        rb.extend(steps(1000 * rank, size - 1))
        rb.extend(steps(1000 * rank + 500, 7))  # in the places of others
        rows = torch.arange(size)
        rb.update_priority(rows, 1.0 + rb[:]["id"].double() % 97)
        checkpointer(tmp_path, rb, job).save(1)
        return rb

    def loaded(job, rank):
        del rank
        rb = made(REMOVERS[kind](), capacity=80)
        checkpointer(tmp_path, rb, job).restore()
        return rb

    before = [_by_id(rb) for rb in done(job(3, saved))]
    after = done(job(ranks, loaded))
    assert {key: value for one in before for key, value in one.items()} == {
        key: pytest.approx(value) for rb in after for key, value in _by_id(rb).items()
    }
    assert sum(map(len, after)) == 3 * size
    for rb in after:
        rb.extend(steps(5000, 80 - len(rb)))
        assert (len(rb), rb.stats()["void_rows"]) == (80, 0)
        order = {
            "lifo": lambda row, rb=rb: -int(rb.storage.tickets_of(torch.tensor([row]))),
            "priority": lambda row, rb=rb: float(leaves_of(rb)[row]),
            "stale": lambda row, rb=rb: int(rb[row]["version"]),
        }.get(kind)
        if kind == "sampled":
            rb.count_usage()
        expected = None if order is None else sorted(range(80), key=lambda row: (order(row), row))[:5]
        rows = rb.extend(steps(6000, 5)).tolist()
        assert expected is None or rows == expected
        assert rb[rows]["id"].tolist() == list(range(6000, 6005))


@pytest.mark.parametrize("kind", REMOVERS)
@pytest.mark.parametrize("storage", [Ring, FreeSlots])
def test_a_storage_of_ones_own(kind, storage):
    """As with rows in memory."""
    twins = [made(REMOVERS[kind](), storage=each) for each in (storage(SIZE), None)]
    for rb in twins:
        rb.extend(steps(1, SIZE - 1))
        rb.update_priority(torch.arange(SIZE), torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]))
    for first in range(100, 200, 10):
        rows, expected = (rb.extend(steps(first, 1 + first % 4)).tolist() for rb in twins)
        assert rows == expected
        for rb in twins:
            rb.update_priority(torch.tensor(rows), 0.5 + torch.tensor(rows).double())
        assert twins[0][:]["id"].tolist() == twins[1][:]["id"].tolist()
