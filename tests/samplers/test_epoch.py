"""SamplerWithoutReplacement: passes over the live rows."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from tests.samplers.machine import SETTINGS, StoreMachine, stressed
from tests.statistics_of import assert_uniform


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def buffer(rows, batch_size, *, capacity=None, storage=None, seed=0, **arguments):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(capacity or max(rows, 1)) if storage is None else storage,
        sampler=SamplerWithoutReplacement(**arguments),
        batch_size=batch_size,
        generator=seeded(seed),
    )
    if rows:
        rb.extend(torch.arange(rows))
    return rb


def passed(rb):
    return [batch.tolist() for batch in rb]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize(("rows", "batch_size"), [(1, 1), (2, 3), (5, 5), (9, 4), (12, 4), (100, 7), (1000, 64)])
def test_every_row_once_per_pass(rows, batch_size, storage):
    rb = buffer(rows, batch_size, storage=storage(2 * rows))
    for _ in range(3):
        batches = passed(rb)
        assert sorted(sum(batches, [])) == list(range(rows))
        full, rest = divmod(rows, batch_size)
        assert [len(batch) for batch in batches] == [batch_size] * full + [rest] * (rest > 0)


def test_passes_differ():
    rb = buffer(50, 50)
    passes = [tuple(rb.sample().tolist()) for _ in range(20)]
    assert len(set(passes)) == 20
    assert all(list(one) != sorted(one) for one in passes)


def test_orders_are_uniform():
    """All 24 orders of four rows are equally likely, and so is every row in every place of a larger pass."""
    rb = buffer(4, 4)
    orders = Counter(tuple(rb.sample().tolist()) for _ in range(2400))
    assert len(orders) == 24
    assert_uniform(orders.values())
    rb = buffer(11, 11, seed=1)
    passes = torch.stack([rb.sample() for _ in range(600)])
    for place in range(11):
        assert_uniform(torch.bincount(passes[:, place], minlength=11).tolist())


def test_storage_order_without_shuffle():
    rb = buffer(7, 3, shuffle=False)
    assert passed(rb) == [[0, 1, 2], [3, 4, 5], [6]]
    assert passed(rb) == [[0, 1, 2], [3, 4, 5], [6]]


def test_storage_order_is_lane_after_lane():
    rb = buffer(0, 10, storage=LazyTensorStorage(9, lanes=3), shuffle=False)
    rb.extend(torch.arange(6), lane=torch.tensor([2, 0, 2, 0, 1, 2]))
    batch, info = rb.sample(return_info=True)
    assert info["index"].tolist() == [0, 1, 3, 6, 7, 8]
    assert batch.tolist() == [1, 3, 4, 0, 2, 5]


@pytest.mark.parametrize("lanes", [1, 3])
def test_lanes_with_shuffle(lanes):
    rb = buffer(0, 4, storage=LazyTensorStorage(9, lanes=lanes))
    rb.extend(torch.arange(5), lane=lanes - 1)
    assert sorted(sum(passed(rb), [])) == ([0, 1, 2, 3, 4] if lanes == 1 else [2, 3, 4])


# ---- the end of a pass -------------------------------------------------------------------------------------------------


def test_the_last_batch_is_short_and_says_so():
    rb = buffer(9, 4)
    sizes, flags = [], []
    for _ in range(6):
        sizes.append(len(rb.sample()))
        flags.append(rb.sampler.ran_out)
    assert sizes == [4, 4, 1, 4, 4, 1]
    assert flags == [False, False, True, False, False, True]


def test_drop_last_skips_the_rest():
    rb = buffer(9, 4, drop_last=True, shuffle=False)
    assert passed(rb) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert passed(rb) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shuffled = buffer(9, 4, drop_last=True)
    seen = Counter()
    for _ in range(360):
        batches = passed(shuffled)
        assert [len(batch) for batch in batches] == [4, 4]
        assert len(set(sum(batches, []))) == 8
        seen.update(sum(batches, []))
    assert_uniform(seen.values())  # it is not always the same row that is skipped


def test_drop_last_with_full_batches_drops_nothing():
    assert passed(buffer(8, 4, drop_last=True, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_drop_last_needs_rows_for_one_batch():
    rb = buffer(3, 4, drop_last=True)
    assert not rb.can_sample()
    with pytest.raises(ValueError, match=r"drop_last.*4.*3"):
        rb.sample()
    rb.set_sampler(SamplerWithoutReplacement())
    assert rb.can_sample()
    assert len(rb.sample()) == 3


def test_drop_last_needs_a_batch_size():
    with pytest.raises(ValueError, match="drop_last"):
        ReplayBuffer(10, sampler=SamplerWithoutReplacement(drop_last=True))
    rb = ReplayBuffer(10)
    before = rb.sampler
    with pytest.raises(ValueError, match="drop_last"):
        rb.set_sampler(SamplerWithoutReplacement(drop_last=True))
    assert rb.sampler is before


@pytest.mark.filterwarnings("ignore:sample. batch_size")
def test_another_batch_size_than_the_last():
    rb = buffer(10, 4, shuffle=False)
    assert [rb.sample(n).tolist() for n in (3, 5, 4, 1)] == [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9], [0]]


@pytest.mark.filterwarnings("ignore:sample. batch_size")
def test_rows_that_drop_last_skipped_do_not_come_in_a_smaller_batch():
    rb = buffer(7, 4, drop_last=True, shuffle=False)
    assert rb.sample().tolist() == [0, 1, 2, 3]
    assert rb.sampler.ran_out
    assert rb.sample(2).tolist() == [0, 1]


def test_empty_buffer():
    rb = buffer(0, 4)
    assert not rb.can_sample()
    with pytest.raises(NoSampleable):
        rb.sample()


# ---- what begins a new pass --------------------------------------------------------------------------------------------


def test_threads_that_draw_from_two_stores_use_the_epoch_of_each(tmp_path, monkeypatch):
    """Even if one binds its store while the other one is about to draw."""
    sampler = SamplerWithoutReplacement(shuffle=False)
    one, other = (
        ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / name), sampler=sampler, batch_size=2)
        for name in ("one", "other")
    )
    for rb in (one, other):
        rb.extend(torch.arange(8))
        rb.sample()
    epoch_of = SamplerWithoutReplacement._epoch_of

    def interrupted(self, store):
        epoch = epoch_of(self, store)
        epoch_of(self, other.storage.store)
        return epoch

    monkeypatch.setattr(SamplerWithoutReplacement, "_epoch_of", interrupted)
    assert one.sample().tolist() == [2, 3]
    monkeypatch.undo()
    assert other.sample().tolist() == [2, 3]
    assert one.sample().tolist() == [4, 5]
    one.close()
    other.close()


def test_rows_that_come_later_join_the_next_pass():
    rb = buffer(6, 4, capacity=10, shuffle=False)
    assert rb.sample().tolist() == [0, 1, 2, 3]
    rb.add(torch.tensor(6))
    assert rb.sample().tolist() == [4, 5]
    assert rb.sampler.ran_out
    assert rb.sample().tolist() == [0, 1, 2, 3]
    assert rb.sample().tolist() == [4, 5, 6]


def test_overwritten_rows_drop_out():
    rb = buffer(6, 4, shuffle=False)
    assert rb.sample().tolist() == [0, 1, 2, 3]
    rb.extend(torch.tensor([10, 11, 12, 13, 14]))
    assert rb.sample().tolist() == [5]
    assert rb.sampler.ran_out


def test_edited_rows_stay():
    rb = buffer(6, 4, shuffle=False)
    rb.sample()
    rb[4] = torch.tensor(40)
    assert rb.sample().tolist() == [40, 5]


def test_empty_begins_a_new_pass_even_of_the_same_length():
    rb = buffer(6, 4, shuffle=False)
    rb.sample()
    rb.empty()
    rb.extend(torch.arange(10, 16))
    assert rb.sample().tolist() == [10, 11, 12, 13]


def test_empty_through_another_buffer_on_the_storage():
    rb = buffer(6, 4, shuffle=False)
    other = ReplayBuffer(storage=rb.storage)
    rb.sample()
    other.empty()
    other.extend(torch.arange(10, 16))
    assert rb.sample().tolist() == [10, 11, 12, 13]


def test_iterating_again_goes_on_with_the_pass():
    rb = buffer(9, 4, shuffle=False)
    for batch in rb:
        assert batch.tolist() == [0, 1, 2, 3]
        break
    assert passed(rb) == [[4, 5, 6, 7], [8]]


# ---- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"drop_last": True}, {"shuffle": False}])
def test_a_saved_state_goes_on_with_the_pass(arguments):
    rb = buffer(20, 3, **arguments)
    rb.sample()
    rb.sample()
    state = copy.deepcopy(rb.sampler.state_dict())
    rest = passed(rb)
    other = buffer(20, 3, seed=99, **arguments)
    other.sample()
    other.sampler.load_state_dict(state)
    assert passed(other) == rest


def test_state_is_a_copy_of_plain_values():
    rb = buffer(20, 3)
    rb.sample()
    state = rb.sampler.state_dict()
    kept = dict(state)
    rb.sample()
    assert state == kept
    assert all(type(value) in (int, bool) for value in state.values())


@pytest.mark.parametrize(
    "change", [{"key": "x"}, {"rows": None}, {"more": 1}, {"visited": -1}, {"visited": 21}, {"key": -1}]
)
def test_a_wrong_state_changes_nothing(change):
    rb = buffer(20, 3)
    rb.sample()
    state = rb.sampler.state_dict()
    wrong = {**state, "key": 0, "visited": 0, **change}
    with pytest.raises((KeyError, TypeError, ValueError)):
        rb.sampler.load_state_dict(wrong)
    assert rb.sampler.state_dict() == state
    with pytest.raises(KeyError, match="visited"):
        rb.sampler.load_state_dict({"key": 0})


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_go_on_with_the_pass(how):
    rb = buffer(20, 3)
    rb.sample()
    other = how(rb)
    assert passed(other) == passed(rb)
    assert other.sampler is not rb.sampler


# ---- randomness ----------------------------------------------------------------------------------------------------------


def test_reproducible():
    assert passed(buffer(30, 4, seed=3)) == passed(buffer(30, 4, seed=3))
    assert passed(buffer(30, 4, seed=3)) != passed(buffer(30, 4, seed=4))
    rb = buffer(30, 4)
    rb.set_rng(None)
    torch.manual_seed(7)
    first = passed(rb)
    torch.manual_seed(7)
    assert passed(rb) == first


def test_every_batch_takes_one_key():
    """So what another draw gets does not depend on where in a pass this sampler is."""
    a, b = buffer(30, 4, seed=3), buffer(30, 4, seed=3)
    b.sample()
    b.set_sampler(SamplerWithoutReplacement())
    a.sample()
    a.set_sampler(SamplerWithoutReplacement())
    assert passed(a) == passed(b)


# ---- the class -----------------------------------------------------------------------------------------------------------


def test_replacement_argument():
    assert type(SamplerWithoutReplacement(replacement=False)) is SamplerWithoutReplacement
    with pytest.raises(TypeError, match="replacement"):
        SamplerWithoutReplacement(replacement=True)


def test_positional_arguments_as_in_torchrl():
    sampler = SamplerWithoutReplacement(True, False)
    assert (sampler.drop_last, sampler.shuffle) == (True, False)
    assert repr(sampler) == "SamplerWithoutReplacement(drop_last=True, shuffle=False)"


def test_can_sample_is_about_the_rows():
    rb = buffer(3, 4)
    assert rb.can_sample()  # a short batch
    assert not buffer(3, 4, drop_last=True).can_sample()
    assert buffer(4, 4, drop_last=True).can_sample()


# ---- against a model ---------------------------------------------------------------------------------------------------


class Passes(StoreMachine):
    """Beside the sampler, the ranks that a pass has left."""

    lists = True

    def make_sampler(self, draw):
        self.drop_last, self.shuffle = draw(st.booleans()), draw(st.booleans())
        self.left, self.ran_out, self.saved = set(), False, None
        return SamplerWithoutReplacement(self.drop_last, self.shuffle)

    def emptied(self):
        self.dropped(self.left)

    def dropped(self, rows):
        """These rows are not what they were when the pass began."""
        self.left = self.left.difference(rows)
        if self.saved is not None:
            self.saved = self.saved[0], (self.saved[1][0].difference(rows), self.saved[1][1])

    def wrote(self, rows):
        self.dropped(rows)
        if self.saved is not None and "begun" not in self.saved[0]:
            self.saved = None  # it says nothing of later writes

    def edited(self, row, before):
        """It stays."""

    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)

    @rule(ns=sizes)
    def draw(self, ns):
        for n in ns:
            self.draw_one(n)

    def draw_one(self, n):
        live = list(self.rings.live())
        if len(live) < (n if self.drop_last else 1):
            assert not self.rb.can_sample(n)
            with pytest.raises(ValueError if live else NoSampleable):
                self.rb.sample(n)
        else:
            assert self.rb.can_sample(n)
            if len(self.left) < (n if self.drop_last else 1):
                self.left = set(live)
            rows, _ = self.drawn(n)
            assert len(rows) == len(set(rows)) == min(n, len(self.left))
            assert self.left.issuperset(rows)
            if not self.shuffle:
                assert rows == sorted(self.left)[: len(rows)]
            self.left.difference_update(rows)
            if self.drop_last and len(self.left) < n:
                self.left = set()
            assert self.rb.sampler.ran_out == (not self.left)

    @precondition(lambda self: self.left)
    @rule()
    def save(self):
        self.saved = self.rb.sampler.state_dict(), (self.left.copy(), self.ran_out)

    @precondition(lambda self: self.saved)
    @rule(ns=sizes)
    def load(self, ns):
        state, (left, self.ran_out) = self.saved
        self.left = left.copy()
        self.rb.sampler.load_state_dict(state)
        self.draw(ns)


TestPasses = pytest.mark.filterwarnings("ignore:sample. batch_size")(Passes.TestCase)
TestPasses.settings = SETTINGS
stressed(TestPasses)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_whose_rows_nobody_asks_for_are_the_same(shuffle):
    asked, silent = (buffer(23, 5, capacity=40, seed=3, shuffle=shuffle) for _ in range(2))
    for _ in range(12):
        batch, info = asked.sample(return_info=True)
        assert torch.equal(batch, info["index"])
        assert torch.equal(silent.sample(), batch)
        assert silent.sampler.ran_out == asked.sampler.ran_out
        assert silent.sampler.state_dict() == asked.sampler.state_dict()


def test_tensordicts_whose_rows_nobody_asks_for_know_their_batch_size():
    steps = TensorDict({"obs": torch.zeros(7, 2, 3), "next": {"obs": torch.zeros(7, 2, 3)}}, [7, 2])
    rb = buffer(0, 5, capacity=7)
    rb.extend(steps)
    flat = buffer(0, 5, capacity=7)
    flat.extend(steps.exclude("next"))
    for n in (5, 2):
        assert [rb.sample().batch_size, flat.sample().batch_size] == [(n, 2), (n, 2)]
