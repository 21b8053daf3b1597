"""Rows that are removed: beside a model, in every way of reading, in other processes, through saves, and across deaths."""

import contextlib
import math
import random
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    Checkpointer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    RowError,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    traj,
)
from tests.store.processes import Child, leaves

ROWS = 40
STORAGES = {
    "RAM": lambda _, **more: LazyTensorStorage(ROWS, **more),
    "temporary": lambda _, **more: LazyMemmapStorage(ROWS, **more),
    "directory": lambda folder, **more: LazyMemmapStorage(ROWS, scratch_dir=folder / "store", **more),
}


def steps(first, n):
    """Steps of episodes of ten, that know who they are."""
    ids = torch.arange(first, first + n)
    ends = {"done": (ids % 10 == 9)[:, None], "reward": ids[:, None].float()}
    return TensorDict(
        {"id": ids, "episode": ids // 10, "group": ids % 4, "policy_version": ids // 20, "next": ends}, [n]
    )


def made(sampler=RandomSampler, storage=None, batch_size=12, n=ROWS, **more):
    storage = LazyTensorStorage(ROWS) if storage is None else storage
    writer = TensorDictRoundRobinWriter(track_generations=True)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler(), writer=writer, batch_size=batch_size, **more)
    rb.extend(steps(0, n))
    return rb


def void(rb):
    return rb.stats()["void_rows"]


# ---- what is gone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_removed_rows_are_gone_until_they_are_written_again(storage, tmp_path):
    rb = made(storage=STORAGES[storage](tmp_path))
    assert rb.remove(torch.tensor([3, 5, 3, -1])) == 2
    assert rb.remove([3, 7]) == 1
    assert rb.remove(7) == 0
    left = [i for i in range(ROWS) if i not in (3, 5, 7)]
    assert rb[:]["id"].tolist() == left
    assert (len(rb), void(rb), rb.write_count) == (37, 3, ROWS)
    with pytest.raises(IndexError):
        rb[3]
    assert rb.extend(steps(100, 4)).tolist() == [0, 1, 2, 3]
    assert (len(rb), void(rb)) == (38, 2)
    assert rb[3]["id"] == 103
    rb.remove(torch.arange(ROWS))
    assert (len(rb), void(rb)) == (0, ROWS)
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.empty()
    assert (len(rb), void(rb)) == (0, 0)


SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(ROWS, 1.0, 1.0),
    "slices": lambda: SliceSampler(slice_len=3),
    "slices of an epoch": lambda: SliceSamplerWithoutReplacement(slice_len=3),
    "slices by priority": lambda: PrioritizedSliceSampler(ROWS, 1.0, 1.0, slice_len=3),
    "n-step": lambda: NStep(RandomSampler(), 3, 0.9),
    "groups": lambda: PromptGroupSampler(group_key="group", samples_per_group=3),
    "versions": StalenessAwareSampler,
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_draw_finds_a_removed_row(sampler, storage, tmp_path):
    rb = made(SAMPLERS[sampler], STORAGES[storage](tmp_path))
    rb.sample()
    gone = {4, 15, 16, 30}
    assert rb.remove(sorted(gone)) == 4
    for _ in range(20):
        ids = rb.sample()["id"].flatten()
        assert not gone & set(ids.tolist())
        if "slices" in sampler:
            assert (ids.reshape(-1, 3).diff(dim=1) == 1).all()


def test_a_draw_over_a_removed_row_would_be_noticed():
    """The negative control of the test above: a removal that forgets nothing but the priority."""
    rb = made()
    rb.sample()
    assert any(4 in rb.sample()["id"] for _ in range(200))


def test_an_epoch_has_every_row_that_is_left_once():
    rb = made(SamplerWithoutReplacement, batch_size=6)
    before = rb.sample()["id"].tolist()
    rb.remove(torch.arange(0, ROWS, 4))
    left = set(range(ROWS)) - {*before, *range(0, ROWS, 4)}  # the epoch goes on
    assert sorted(i for batch in rb for i in batch["id"].tolist()) == sorted(left)


def test_slices_reach_every_anchor_that_is_left():
    rb = made(lambda: SliceSampler(slice_len=3), batch_size=300)
    rb.sample()
    rb.remove([4, 15, 30])
    starts = set(rb.sample()["id"].reshape(-1, 3)[:, 0].tolist())
    starts |= {i for _ in range(20) for i in rb.sample()["id"].reshape(-1, 3)[:, 0].tolist()}
    gone = {4, 15, 30}
    assert starts == {i for i in range(ROWS) if i % 10 <= 7 and not gone & {i, i + 1, i + 2}}


def test_returns_of_n_steps_end_before_a_removed_row():
    rb = made(lambda: NStep(RandomSampler(), 3, 1.0), batch_size=400)
    rb.remove(15)
    batch = rb.sample()
    rewards = {13: 13 + 14, 14: 14, 12: 12 + 13 + 14, 16: 16 + 17 + 18}
    found = dict(zip(batch["id"].tolist(), batch["next", "reward"].flatten().tolist(), strict=True))
    assert {i: found[i] for i in rewards if i in found} == {i: rewards[i] for i in rewards if i in found}
    assert set(rewards) & set(found)


def test_trajectories_end_at_removed_rows():
    rb = made(lambda: SliceSampler(slice_len=1))
    rb.remove([4, 20])
    parts = [trajectory.id.tolist() for trajectory in rb.query(traj.length > 0)]
    assert parts == [[0, 1, 2, 3], [5, 6, 7, 8, 9], [*range(10, 20)], [*range(21, 30)], [*range(30, 40)]]


def test_priorities_are_forgotten():
    rb = made(SAMPLERS["priority"])
    rb.update_priority(torch.arange(ROWS), torch.arange(1.0, ROWS + 1))
    rb.remove([0, 39])
    assert leaves(rb)[[0, 39]].tolist() == [0, 0]
    rb.update_priority([0, 39], 7.0)
    assert leaves(rb)[[0, 39]].tolist() == [0, 0]
    rb.extend(steps(ROWS, 1))
    assert leaves(rb)[0] == pytest.approx(40)
    assert leaves(rb).sum() == pytest.approx(sum(range(2, ROWS + 1)), rel=1e-6)


# ---- rows of a time --------------------------------------------------------------------------------------------------------


def test_rows_written_since_stay():
    rb = made(SAMPLERS["priority"])
    batch = rb.sample()
    rows, generation = batch["index"], batch["index_generation"]
    rb.extend(steps(ROWS, 5))
    old = [row for row in rows.unique().tolist() if row >= 5]
    assert rb.remove(rows, generation=generation) == len(old)
    assert len(rb) == ROWS - len(old)
    assert rb[:5]["id"].tolist() == [40, 41, 42, 43, 44]
    assert rb.remove([0, 1], generation=rb.writer.generations_of(torch.tensor([0, 1]))) == 2
    assert rb.remove([0], generation=[-1]) == 0


def test_an_edited_row_goes_and_one_that_was_written_stays():
    rb = made()
    before = rb.writer.generations_of(torch.tensor([2, 3]))
    rb.set_at_("group", torch.tensor([9]), [2])
    rb.writer.write_at([3], rb[3:4].exclude("index"))
    assert rb.remove([2, 3], generation=before) == 1
    assert (rb.writer.generations_of(torch.tensor([2, 3])) > 0).tolist() == [False, True]


@pytest.mark.parametrize("kind", ["lanes", "columns"])
def test_rows_of_lanes_and_columns(kind):
    if kind == "lanes":
        rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2))
        rb.extend(torch.arange(6).reshape(2, 3).flatten(), lane=torch.tensor([0, 0, 0, 1, 1, 1]))
        assert rb.remove([1, 4, 5]) == 3
        assert rb[:].tolist() == [0, 2, 5]
    else:
        rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
        rb.extend({"a": torch.arange(8).reshape(2, 4)})
        assert rb.remove(torch.tensor([[1, 0], [3, 1]])) == 2
        assert len(rb) == 6
        with pytest.raises(IndexError):
            rb.remove(torch.tensor([[4, 0]]))


# ---- what is refused -------------------------------------------------------------------------------------------------------


#: Arguments of remove, and how each is refused, wherever the rows are.
REFUSED = [
    (([1, ROWS],), RowError, rf"remove: expected rows in \[-1, {ROWS}\), got {ROWS}"),
    (([-2, 1],), RowError, "got -2"),
    (([1.5],), TypeError, "remove: rows: expected ints"),
    ((torch.ones(ROWS, dtype=torch.bool),), TypeError, "expected ints, got torch.bool"),
    (("id",), TypeError, "rows"),
    (([1, 2], [3]), ValueError, "2 rows and 1 generations"),
    (([1], [0.5]), TypeError, "generation: expected ints"),
    ((steps(0, 2),), TypeError, "expected rows, got a TensorDict"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED)
def test_bad_arguments_change_nothing(arguments, error, text):
    rb = made()
    rows, generation = (*arguments, None)[:2]
    with pytest.raises(error, match=text):
        rb.remove(rows, generation=generation)
    assert (len(rb), void(rb)) == (ROWS, 0)


def test_what_is_only_read(tmp_path):
    fixed = made()
    fixed.set_writer(ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="remove: the buffer is read-only"):
        fixed.remove(0)
    made(storage=STORAGES["directory"](tmp_path)).close()
    reading = ReplayBuffer.open(tmp_path / "store", readonly=True)
    with pytest.raises(RuntimeError):
        reading.remove(0)
    assert len(reading) == ROWS
    unwritten = ReplayBuffer(storage=LazyTensorStorage(4))
    assert unwritten.remove([0, 3]) == 0
    with pytest.raises(RowError):
        unwritten.remove(4)
    assert made().remove([]) == 0


def test_batches_of_before_keep_what_they_have():
    rb = made(batch_size=ROWS, prefetch=2, sampler=SamplerWithoutReplacement)
    rb.sample()
    rb.remove(torch.arange(ROWS))
    batches = []
    with contextlib.suppress(NoSampleable):
        while len(batches) < 10:
            batches.append(rb.sample()["id"].tolist())
    assert len(batches) < 10
    assert all(sorted(ids) == list(range(ROWS)) for ids in batches)


# ---- beside other components -----------------------------------------------------------------------------------------------


def test_a_writer_of_best_rows_takes_the_places():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter(rank_key="id"))
    rb.extend(steps(10, 4))
    rb.remove([1, 3])
    assert rb.extend(steps(0, 3)).tolist() == [-1, 3, 1]
    assert rb[:]["id"].tolist() == [10, 2, 12, 1]
    assert void(rb) == 0


@pytest.mark.parametrize("form", ["dump", "series", "state"])
@pytest.mark.parametrize("storage", STORAGES)
def test_saves_have_the_rows_that_are_left(storage, form, tmp_path):
    rb = made(SAMPLERS["priority"], STORAGES[storage](tmp_path))
    rb.update_priority(torch.arange(ROWS), torch.arange(1.0, ROWS + 1))
    rb.remove([4, 15])
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=SAMPLERS["priority"](), batch_size=4)
    if form == "dump":
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
    elif form == "series":
        Checkpointer(tmp_path / "series", rb).save(1)
        rb.remove([7])
        Checkpointer(tmp_path / "series", rb).restore()
        Checkpointer(tmp_path / "series", other).restore()
    else:
        other.load_state_dict(rb.state_dict())
    for each in (rb, other):
        assert each[:]["id"].tolist() == [i for i in range(ROWS) if i not in (4, 15)]
        assert leaves(each)[[4, 15]].tolist() == [0, 0]
        assert leaves(each).sum() == pytest.approx(sum(range(1, ROWS + 1)) - 5 - 16, rel=1e-5)
        assert not {4, 15} & {i for _ in range(20) for i in each.sample()["id"].tolist()}


# ---- a model ---------------------------------------------------------------------------------------------------------------

SIZE = 7


class Model:
    """A ring of ids and priorities, of which some are None."""

    def __init__(self):
        self.ids, self.priorities, self.written, self.highest = [None] * SIZE, [0.0] * SIZE, [0] * SIZE, 1.0
        self.next = self.clock = self.reached = 0

    def write(self, first, n):
        for i in range(n):
            self.clock += 1
            row = self.next % SIZE
            self.ids[row], self.priorities[row], self.written[row] = first + i, self.highest, self.clock
            self.next += 1
        self.reached = min(SIZE, self.next)

    def remove(self, rows, since):
        gone = {
            row
            for row, at in zip(rows, since, strict=True)
            if row >= 0 and self.ids[row] is not None and at in (None, self.written[row])
        }
        for row in gone:
            self.ids[row], self.priorities[row] = None, 0.0
        return len(gone)

    def check(self, rb):
        live = [i for i in self.ids if i is not None]
        assert rb[:].tolist() == live if live else len(rb) == 0
        assert (len(rb), void(rb)) == (len(live), self.reached - len(live))
        assert leaves(rb).tolist() == pytest.approx(self.priorities, rel=1e-6)
        if live:
            drawn = rb.sample(return_info=True)[1]["index"].tolist()
            assert all(self.ids[row] is not None for row in drawn)
        else:
            with pytest.raises(NoSampleable):
                rb.sample()


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 9)),
    st.tuples(st.just("remove"), st.lists(st.integers(-1, SIZE - 1), max_size=5)),
    st.tuples(st.just("remove those of before"), st.lists(st.integers(0, SIZE - 1), max_size=5)),
    st.tuples(st.just("update"), st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("empty"), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0)),
)


def run_program(program, folder):
    storage = LazyTensorStorage(SIZE) if folder is None else LazyMemmapStorage(SIZE, scratch_dir=folder)
    writer = RoundRobinWriter(track_generations=True)
    rb = ReplayBuffer(
        storage=storage, sampler=PrioritizedSampler(SIZE, 1.0, 1.0, eps=0.0), writer=writer, batch_size=64
    )
    rb.extend(torch.zeros(1, dtype=torch.int64))
    rb.update_priority([0], 1.0)
    model = Model()
    model.write(0, 1)
    kept, kept_in_model = rb.writer.generations_of(torch.arange(SIZE)), list(model.written)
    for at, (name, what) in enumerate(program):
        if name == "write":
            rb.extend(torch.arange(100 * at, 100 * at + what))
            model.write(100 * at, what)
        elif name == "remove":
            assert rb.remove(torch.tensor(what, dtype=torch.int64)) == model.remove(what, [None] * len(what))
        elif name == "remove those of before":
            # Of rows that held nothing then, or were never drawn: the model's clock has the same order as the tickets.
            rows = torch.tensor(what, dtype=torch.int64)
            assert rb.remove(rows, generation=kept[rows]) == model.remove(what, [kept_in_model[row] for row in what])
            kept, kept_in_model = rb.writer.generations_of(torch.arange(SIZE)), list(model.written)
        elif name == "update":
            values = [1.0 + (row + at) % 5 for row in what]
            rb.update_priority(torch.tensor(what), torch.tensor(values))
            for row, value in zip(what, values, strict=True):
                if model.ids[row] is not None:
                    model.priorities[row] = value
                    model.highest = max(model.highest, value)
        elif name == "empty":
            rb.empty()
            model.ids, model.priorities = [None] * SIZE, [0.0] * SIZE
            model.next, model.reached, model.highest = 0, 0, 1.0
            model.written = [-5] * SIZE
            kept, kept_in_model = torch.full((SIZE,), -1), [-7] * SIZE
        elif folder is not None:
            rb.close()
            rb = ReplayBuffer.open(folder, batch_size=64)
            rb.update_priority([], [])
        model.check(rb)
    rb.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=14))
def test_random_programs_in_memory(program):
    run_program(program, None)


@settings(max_examples=25, deadline=None)
@given(st.lists(OPERATIONS, max_size=10))
def test_random_programs_in_a_directory(tmp_path_factory, program):
    run_program(program, tmp_path_factory.mktemp("store") / "store")


def test_the_model_notices_a_row_that_comes_back(monkeypatch):
    """The negative control: a removal that says it has removed what it has not."""
    monkeypatch.setattr("engram.buffer.row_access.remove_rows", lambda wiring, rows, generation: len(rows))
    with pytest.raises(AssertionError):
        run_program([("write", 3), ("remove", [1])], None)


# ---- other processes -------------------------------------------------------------------------------------------------------


def _remove_and_look(rb, rows, expected):
    assert rb.remove(rows) == expected
    assert not set(rows) & {i for _ in range(20) for i in rb.sample()["id"].tolist()}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_process_sees_what_another_one_removed(method, tmp_path):
    rb = made(SAMPLERS["priority"], STORAGES["directory"](tmp_path))
    slices = TensorDictReplayBuffer(storage=rb.storage, sampler=SliceSampler(slice_len=3), batch_size=30)
    slices.sample()
    Child(_remove_and_look, rb, [4, 15, 30], 3, method=method).join()
    assert (len(rb), void(rb)) == (ROWS - 3, 3)
    assert leaves(rb)[[4, 15, 30]].tolist() == [0, 0, 0]
    for _ in range(10):
        ids = slices.sample()["id"].reshape(-1, 3)
        assert (ids.diff(dim=1) == 1).all()
        assert not {4, 15, 30} & set(ids.flatten().tolist())
    rb.remove([5])
    Child(_remove_and_look, rb, [5, 6], 1, method=method).join()
    assert len(rb) == ROWS - 5


def _remove_for_ever(rb, ready):
    chance = random.Random(1)
    for first in range(0, 1 << 40, 8):
        rb.remove([chance.randrange(ROWS) for _ in range(6)])
        rb.extend(steps(first, 5))
        ready.set()


@pytest.mark.parametrize("kind", ["shared", "directory"])
def test_a_death_leaves_each_row_live_or_void(kind, tmp_path):
    """Wherever the kill comes: rows that are read are whole, the others are void and counted so, and priorities agree."""
    from tests.store.processes import context

    storage = STORAGES["directory"](tmp_path) if kind == "directory" else LazyTensorStorage(ROWS)
    rb = made(SAMPLERS["priority"], storage)
    if kind == "shared":
        rb.share()
    for _ in range(12):
        ready = context("fork").Event()
        child = Child(_remove_for_ever, rb, ready)
        assert ready.wait(60)
        child.kill()
        assert child.process.exitcode == -signal.SIGKILL
        rb.storage.store.core.reclaim()
        live = torch.tensor([row in rb.storage for row in range(ROWS)])
        assert (len(rb), void(rb)) == (int(live.sum()), ROWS - int(live.sum()))
        rows = rb[:]
        assert (rows["next", "done"][:, 0] == (rows["id"] % 10 == 9)).all()
        assert ((leaves(rb) > 0) == live).all()
        rb.extend(steps(0, 3))
    rb.extend(steps(0, ROWS))
    assert (len(rb), void(rb)) == (ROWS, 0)


def test_draws_stay_uniform():
    rb = made(batch_size=2000)
    rb.remove(torch.arange(0, ROWS, 2))
    counts = torch.bincount(rb.sample()["id"], minlength=ROWS)[1::2].double()
    expected = 2000 / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 60  # of 19 degrees of freedom, at a fixed seed
    assert math.isclose(float(counts.sum()), 2000)
