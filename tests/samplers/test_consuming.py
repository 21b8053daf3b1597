"""ConsumingSampler: each row so many times, and never again."""

import copy
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

from engram import (
    ConsumingSampler,
    IncompatibleCheckpoint,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedSampler,
    ReplayBuffer,
    RowError,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests import stress
from tests.samplers.machine import SETTINGS, stressed
from tests.statistics_of import assert_uniform
from tests.twins import through_a_file

STORAGES = [LazyTensorStorage, ListStorage]


def buffer(rows, batch_size, most=1, *, capacity=None, storage=LazyTensorStorage, seed=0, **arguments):
    rb = ReplayBuffer(
        storage=storage(capacity or max(rows, 1)),
        sampler=ConsumingSampler(most),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
        **arguments,
    )
    if rows:
        rb.extend(torch.arange(rows))
    return rb


def drawn(rb):
    return [batch.tolist() for batch in rb]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize(("rows", "batch_size"), [(1, 1), (2, 3), (9, 4), (12, 4), (200, 7)])
def test_each_row_comes_so_often(rows, batch_size, most, storage):
    batches = drawn(buffer(rows, batch_size, most, storage=storage))
    assert Counter(sum(batches, [])) == dict.fromkeys(range(rows), most)
    assert all(len(set(batch)) == len(batch) for batch in batches)


def test_an_exhausted_buffer_raises_until_there_is_data():
    rb = buffer(3, 2)
    assert (len(rb), rb.can_sample(), rb.sampler.ran_out) == (3, True, False)
    assert len(drawn(rb)) == 2
    assert (len(rb), rb.can_sample(), rb.sampler.ran_out) == (0, False, True)
    with pytest.raises(NoSampleable, match="max_sample_count=1"):
        rb.sample()
    rb.extend(torch.arange(10, 12))
    assert sorted(rb.sample().tolist()) == [10, 11]


def test_nothing_was_ever_written():
    rb = buffer(0, 2)
    assert (len(rb), rb.can_sample()) == (0, False)
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.mark_update(torch.tensor([0]))
    assert rb.sampler.state_dict()["counts"].tolist() == []


@pytest.mark.parametrize("most", [1, 2])
def test_draws_are_uniform(most):
    """Of nine rows, some of them drawn before, every pair that is left is equally likely."""
    pairs = Counter()
    for seed in range(400):
        rb = buffer(9, 2, most, seed=seed)
        rb.sample()
        rb.sample()
        pairs.update([tuple(sorted(rb.sample().tolist()))])
    assert len(pairs) == 36
    assert_uniform(pairs.values())


def test_many_rows_are_drawn_uniformly():
    """Also over more rows than one word and one block of the set count."""
    found = torch.zeros(10_000, dtype=torch.int64)
    for seed in range(4):
        rb = buffer(10_000, 2_500, seed=seed)
        found[rb.sample()] += 1
    assert int(found.sum()) == 10_000
    assert_uniform(found.reshape(20, -1).sum(1).tolist())


# ---- writes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_used_rows_are_written_over_before_others(storage):
    rb = buffer(8, 5, capacity=10, storage=storage)
    used = set(rb.sample().tolist())
    left = set(range(8)) - used
    assert set(rb.extend(torch.arange(10, 14)).tolist()) < used
    assert len(rb) == 7
    rows = rb.extend(torch.arange(14, 17)).tolist()  # one used row and the two that hold nothing yet
    assert set(rows) > {8, 9}
    assert len(rb) == 10
    assert sorted(sum(drawn(rb), [])) == sorted([*left, *range(10, 17)])


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_that_were_drawn_and_not_read_yet_are_not_written_over(storage):
    rb = buffer(4, 4, capacity=10, storage=storage)
    draw = rb.sampler.draw(rb.storage.extent(), 4, 1)  # another thread is to read them now
    assert rb.extend(torch.arange(4, 6)).tolist() == [4, 5]
    rb.sampler.were_read(draw)
    assert set(rb.extend(torch.arange(6, 10)).tolist()) == {0, 1, 2, 3}
    assert sorted(sum(drawn(rb), [])) == [*range(4, 10)]


def test_a_full_ring_loses_no_more_rows_than_there_is_no_room_for():
    rb = buffer(6, 2)
    used = set(rb.sample().tolist())
    kept = [row for row in range(6) if row not in used]
    rows = rb.extend(torch.arange(10, 14)).tolist()
    assert set(rows) == used | set(kept[:2])  # what the cursor comes to first
    assert sorted(sum(drawn(rb), [])) == sorted([*kept[2:], 10, 11, 12, 13])


def test_one_row_takes_the_place_of_a_used_one():
    rb = buffer(4, 2)
    used = set(rb.sample().tolist())
    assert {rb.add(torch.tensor(8)), rb.add(torch.tensor(9))} == used
    assert rb.add(torch.tensor(10)) == 0


def test_lanes_keep_to_their_rings():
    rb = ReplayBuffer(storage=LazyTensorStorage(6, lanes=2), sampler=ConsumingSampler(), batch_size=6)
    rb.extend(torch.arange(4), lane=torch.tensor([0, 0, 1, 1]))
    rb.sample()
    assert rb.extend(torch.arange(2), lane=0).tolist() == [2, 0]
    assert len(rb) == 2


def test_columns_keep_to_their_rings():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), sampler=ConsumingSampler(), batch_size=20)
    rb.extend(torch.arange(6).reshape(2, 3))
    assert len(rb) == 6
    assert sorted(rb.sample().tolist()) == list(range(6))
    assert rb.extend(torch.arange(2).reshape(2, 1)).tolist() == [[3, 0], [3, 1]]


def test_another_writer_resets_the_counts_of_what_it_overwrites():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4),
        sampler=ConsumingSampler(),
        batch_size=2,
        writer=TensorDictMaxValueWriter(rank_key="a"),
    )
    rb.extend(TensorDict({"a": torch.arange(4.0)}, [4]))
    assert len(rb.sample()) == len(rb.sample()) == 2
    rb.extend(TensorDict({"a": torch.tensor([9.0, 8.0])}, [2]))
    assert rb.sample()["a"].sort().values.tolist() == [8.0, 9.0]


def test_a_buffer_with_another_sampler_writes_to_the_ring_and_resets_counts():
    rb = buffer(4, 4)
    other = ReplayBuffer(storage=rb.storage)
    rb.sample()
    assert other.extend(torch.arange(10, 12)).tolist() == [0, 1]
    assert len(other) == 4
    assert sorted(rb.sample().tolist()) == [10, 11]


@pytest.mark.parametrize("storage", STORAGES)
def test_edits_keep_counts_and_mark_update_resets_them(storage):
    rb = buffer(4, 4, storage=storage)
    rb.sample()
    rb[1] = torch.tensor(11)
    assert len(rb) == 0
    rb.mark_update(torch.tensor([1, -1]))
    assert rb.sample().tolist() == [11]
    with pytest.raises((RowError, IndexError)):
        rb.mark_update(torch.tensor([4]))


def test_writes_beside_a_draw_are_not_handed_out_uncounted(monkeypatch):
    """A row that is overwritten between its count and its read: what it held is gone, and what it holds is drawn once."""
    rb = buffer(6, 3)
    read, seen = rb.storage.read, []

    def interrupted(rows, expected=None):
        if not seen:
            seen.append(rows.tolist())
            ReplayBuffer(storage=rb.storage).extend(torch.arange(10, 16))
        return read(rows, expected)

    monkeypatch.setattr(rb.storage, "read", interrupted)
    got = rb.sample().tolist()
    assert len(got) == 3
    assert min(got) >= 10
    assert sorted(got + sum(drawn(rb), [])) == list(range(10, 16))


def test_a_batch_is_short_where_rows_moved_and_none_is_left(monkeypatch):
    rb = buffer(3, 3)
    read = rb.storage.read

    def interrupted(rows, expected=None):
        monkeypatch.undo()
        ReplayBuffer(storage=rb.storage).add(torch.tensor(9))
        rb.sampler._index.core.claim(1, 1)  # another consumer takes it
        return read(rows, expected)

    monkeypatch.setattr(rb.storage, "read", interrupted)
    assert sorted(rb.sample().tolist()) == [1, 2]


def test_prefetched_rows_are_counted_when_they_are_drawn():
    rb = buffer(20, 4, prefetch=2)
    assert sorted(sum(drawn(rb), [])) == list(range(20))


def test_threads_share_the_rows_out():
    rb = buffer(3_000, 7, 2)

    def consume():
        rows = []
        while True:
            try:
                rows += rb.sample().tolist()
            except NoSampleable:
                return rows

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(consume) for _ in range(4)]
        rows = sum((one.result() for one in found), [])
    assert Counter(rows) == dict.fromkeys(range(3_000), 2)


# ---- the buffer's own argument -----------------------------------------------------------------------------------------


def test_consume_after_n_samples():
    rb = ReplayBuffer(storage=LazyTensorStorage(5), consume_after_n_samples=2, batch_size=5)
    rb.extend(torch.arange(5))
    assert rb.sampler.max_sample_count == 2
    assert len(sum(drawn(rb), [])) == 10
    same = ConsumingSampler(3)
    assert ReplayBuffer(5, sampler=same, consume_after_n_samples=3).sampler is same
    assert ReplayBuffer(5, consume_after_n_samples=None).sampler.draws_of_a_row is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"consume_after_n_samples": 0}, ValueError),
        ({"consume_after_n_samples": -1}, ValueError),
        ({"consume_after_n_samples": True}, TypeError),
        ({"consume_after_n_samples": 1.0}, TypeError),
        ({"consume_after_n_samples": 2, "sampler": ConsumingSampler(1)}, ValueError),
        ({"consume_after_n_samples": 2, "sampler": PrioritizedSampler(5, 1.0, 1.0)}, ValueError),
    ],
)
def test_consume_after_n_samples_refuses(arguments, error):
    with pytest.raises(error, match="consume_after_n_samples"):
        ReplayBuffer(5, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error"), [((0,), ValueError), ((True,), TypeError), ((1.5,), TypeError), ((1 << 31,), ValueError)]
)
def test_bad_arguments(arguments, error):
    with pytest.raises(error, match="max_sample_count"):
        ConsumingSampler(*arguments)
    with pytest.raises(ValueError, match="name"):
        ConsumingSampler(index="a/b")


def test_a_list_needs_a_bound():
    with pytest.raises(ValueError, match="bound"):
        ReplayBuffer(storage=ListStorage(), sampler=ConsumingSampler())


def test_one_index_has_one_count():
    rb = buffer(4, 2)
    with pytest.raises(IncompatibleStore, match=r"max_sample_count=1.*got 2"):
        rb.set_sampler(ConsumingSampler(2))
    rb.sample()
    rb.set_sampler(ConsumingSampler(2, index="other"))
    assert len(rb) == 4


# ---- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("how", ["state", "dump"])
def test_a_saved_buffer_goes_on(how, storage, tmp_path):
    rb, other = buffer(20, 6, 2, storage=storage), buffer(0, 6, 2, capacity=20, storage=storage, seed=99)
    for _ in range(4):
        rb.sample()
    if how == "state":
        other.load_state_dict(through_a_file(rb.state_dict()))
    else:
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
    assert len(other) == len(rb)
    assert drawn(other) == drawn(rb)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("storage", STORAGES)
def test_copies_go_on_by_themselves(how, storage):
    rb = buffer(20, 6, storage=storage)
    rb.sample()
    other = how(rb)
    assert drawn(other) == drawn(rb)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"max_sample_count": 3}, IncompatibleCheckpoint),
        ({"max_sample_count": "2"}, TypeError),
        ({"counts": torch.tensor([3], dtype=torch.int32)}, ValueError),
        ({"counts": torch.tensor([-1], dtype=torch.int32)}, ValueError),
        ({"counts": torch.zeros(21, dtype=torch.int32)}, IncompatibleCheckpoint),
        ({"counts": torch.zeros(2)}, TypeError),
        ({"ran_out": 1}, TypeError),
        ({"more": 1}, KeyError),
    ],
)
def test_a_wrong_state_changes_nothing(change, error):
    rb = buffer(20, 6, 2)
    rb.sample()
    state = rb.sampler.state_dict()
    with pytest.raises(error):
        rb.sampler.load_state_dict({**state, **change})
    now = rb.sampler.state_dict()
    assert torch.equal(now.pop("counts"), state.pop("counts"))
    assert now == state


def test_rows_that_are_converted_were_not_drawn_yet(tmp_path):
    """Into a storage of another size, from another sampler, and to one."""
    rb = buffer(20, 6, 2)
    for _ in range(4):
        rb.sample()
    assert len(rb) < 20
    rb.dumps(tmp_path / "counted")
    larger = buffer(0, 6, 2, capacity=40)
    larger.loads(tmp_path / "counted", convert=True)
    assert len(larger) == 20
    plain = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=6)
    plain.loads(tmp_path / "counted", convert=True)
    plain.dumps(tmp_path / "plain")
    rb.loads(tmp_path / "plain", convert=True)
    assert len(rb) == 20


def test_an_opened_store_goes_on(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "s"), sampler=ConsumingSampler(2), batch_size=8
    )
    rb.extend(torch.arange(20))
    seen = Counter(rb.sample().tolist())
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s")
    assert repr(rb.sampler) == "ConsumingSampler(max_sample_count=2)"
    for batch in rb:
        seen.update(batch.tolist())
    assert seen == dict.fromkeys(range(20), 2)
    rb.close()
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True)
    assert len(reader) == 0
    reader.close()


# ---- against a model ---------------------------------------------------------------------------------------------------


class Rows(RuleBasedStateMachine):
    """What each row holds and how often it was drawn, beside the buffer."""

    @initialize(capacity=st.integers(1, 9), most=st.integers(1, 3), storage=st.sampled_from(STORAGES))
    def begin(self, capacity, most, storage):
        self.capacity, self.most, self.value = capacity, most, 0
        self.rb = buffer(0, None, most, capacity=capacity, storage=storage)
        self.rows = {}
        self.saved = None

    def used(self):
        return {row for row, (_, count) in self.rows.items() if count >= self.most}

    def left(self):
        return self.rows.keys() - self.used()

    @rule(n=st.integers(1, 9), single=st.booleans())
    def write(self, n, single):
        n = 1 if single else min(n, self.capacity)
        values = list(range(self.value, self.value + n))
        self.value += n
        used, cursor = self.used(), self.rb.storage.extent().seam[0]
        if n <= len(used):
            expected = used
        else:  # as TorchRL does it: the used rows, then those that the cursor comes to
            expected = set(used)
            while len(expected) < n:
                expected.add(cursor)
                cursor = (cursor + 1) % self.capacity
        rows = [self.rb.add(torch.tensor(values[0]))] if single else self.rb.extend(torch.tensor(values)).tolist()
        assert len(set(rows)) == n
        assert set(rows) <= expected if n <= len(used) else set(rows) == expected
        self.rows.update({row: (value, 0) for row, value in zip(rows, values, strict=True)})

    @rule(n=st.integers(1, 9))
    def draw(self, n):
        left = self.left()
        assert self.rb.can_sample(n) == bool(left)
        if not left:
            with pytest.raises(NoSampleable):
                self.rb.sample(n)
            return
        batch, info = self.rb.sample(n, return_info=True)
        rows = info["index"].tolist()
        assert len(set(rows)) == len(rows) == min(n, len(left))
        assert set(rows) <= left
        assert batch.tolist() == [self.rows[row][0] for row in rows]
        for row in rows:
            self.rows[row] = (self.rows[row][0], self.rows[row][1] + 1)
        assert self.rb.sampler.ran_out == (not self.left())

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), marked=st.booleans())
    def edit(self, data, marked):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.rb[row] = torch.tensor(self.value)
        if marked:
            self.rb.mark_update(row)
        self.rows[row] = (self.value, 0 if marked else self.rows[row][1])
        self.value += 1

    @rule()
    def empty(self):
        self.rb.empty()
        self.rows = {}

    @rule(how=st.sampled_from([copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))]))
    def go_on_with_a_copy(self, how):
        self.rb = how(self.rb)

    @rule()
    def save(self):
        self.saved = through_a_file(self.rb.state_dict()), dict(self.rows)

    @precondition(lambda self: self.saved)
    @rule()
    def load(self):
        state, rows = self.saved
        self.rb.load_state_dict(state)
        self.rows = dict(rows)

    @invariant()
    def counts_what_is_left(self):
        if hasattr(self, "rb"):
            assert len(self.rb) == len(self.left())


TestRows = Rows.TestCase
TestRows.settings = settings(SETTINGS, max_examples=stress.size(25, 2_000))
stressed(TestRows)
