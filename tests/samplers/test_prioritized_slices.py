"""Windows by priority: every row says which lane, episode and step it is, so a window shows whether it is one."""

import copy
import warnings

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PriorityError,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.samplers.machine import SETTINGS, TrajectoryMachine, stressed
from tests.statistics_of import assert_proportional


def steps(lengths, first_episode=0):
    """Whole episodes of these lengths, one after the other."""
    episode = np.repeat(np.arange(len(lengths)) + first_episode, lengths)
    step = np.concatenate([np.arange(n) for n in lengths])
    done = step == np.repeat(lengths, lengths) - 1
    return TensorDict(
        {
            "episode": torch.from_numpy(episode),
            "step": torch.from_numpy(step),
            "next": {"done": torch.from_numpy(done).unsqueeze(1)},
        },
        batch_size=[len(step)],
    )


def buffer(capacity=40, batch_size=30, storage=LazyTensorStorage, data=None, **arguments):
    settings = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, "slice_len": 3, **arguments}
    if settings.get("num_slices"):
        settings.pop("slice_len")
    rb = TensorDictReplayBuffer(
        storage=storage(capacity), sampler=PrioritizedSliceSampler(capacity, **settings), batch_size=batch_size
    )
    if data is not None:
        rb.extend(data)
    return rb


def windows(batch, length=3):
    """Episode and first step of each window, after a look at every row of it."""
    episode, step = batch["episode"].reshape(-1, length), batch["step"].reshape(-1, length)
    assert bool((episode == episode[:, :1]).all())
    assert bool((step == step[:, :1] + torch.arange(length)).all())
    return episode[:, 0], step[:, 0]


def test_anchors_are_drawn_in_proportion_and_weighed_by_the_formula():
    lengths = [5, 2, 9, 3, 7]
    data = steps(lengths)
    rb = buffer(batch_size=3 * 2000, data=data, beta=0.5)
    priority = torch.rand(len(data), dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    rb.update_priority(torch.arange(len(data)), priority)
    legal = (data["step"] + 3 <= torch.tensor(lengths)[data["episode"]]).numpy()
    counts = np.zeros(len(data))
    for _ in range(30):
        batch = rb.sample()
        windows(batch)
        anchors = batch["index"].reshape(-1, 3)[:, 0].numpy()
        np.add.at(counts, anchors, 1)
        weight = batch["priority_weight"].reshape(-1, 3)
        expected = (priority[anchors] / priority.min()) ** -0.5
        torch.testing.assert_close(weight[:, 0].double(), expected, rtol=1e-6, atol=0)
        assert bool((weight == weight[:, :1]).all())
    assert_proportional(counts, np.where(legal, priority.numpy(), 0))


def test_the_exact_fallback_has_the_same_distribution():
    """Nearly all priority is where no window may start."""
    lengths = [2] * 15 + [5, 4]
    data = steps(lengths)
    rb = buffer(batch_size=3 * 500, data=data)
    priority = torch.full((len(data),), 1e9, dtype=torch.float64)
    priority[30:] = 0
    priority[[30, 31, 32, 35, 36]] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    rb.update_priority(torch.arange(len(data)), priority)
    counts = np.zeros(len(data))
    for _ in range(20):
        batch = rb.sample()
        windows(batch)
        np.add.at(counts, batch["index"].reshape(-1, 3)[:, 0].numpy(), 1)
    assert_proportional(counts[30:], priority[30:])
    assert counts[:30].sum() == 0


def test_windows_while_a_ring_turns():
    rb = buffer(capacity=25, batch_size=60)
    generator = np.random.default_rng(4)
    episode = 0
    for _ in range(60):
        lengths = generator.integers(1, 9, size=3)
        rb.extend(steps(lengths, episode))
        episode += 3
        rb.update_priority(torch.from_numpy(generator.integers(0, len(rb), 10)), torch.rand(10) + 0.01)
        try:
            batch = rb.sample()
        except NoSampleable:
            continue
        windows(batch)
        assert bool((batch["priority_weight"] > 0).all())


def test_updates_are_per_step_and_stale_ones_are_dropped():
    rb = buffer(capacity=10, batch_size=6, data=steps([10]))
    batch = rb.sample()
    batch["td_error"] = torch.arange(6.0).unsqueeze(1) + 5
    rb.update_tensordict_priority(batch)
    leaves = rb.sampler.state_dict()["leaves"]
    for row, value in zip(batch["index"].flatten().tolist(), batch["td_error"].flatten().tolist(), strict=True):
        assert leaves[row] in (value, *batch["td_error"].flatten()[batch["index"].flatten() == row].tolist())
    assert rb.sampler.default_priority == 10.0
    rb.extend(steps([10], 7))
    rb.update_tensordict_priority(batch)
    assert rb.stats()["priority_updates_dropped"] == 6
    assert batch["index_generation"].shape == (6,)
    with pytest.raises(PriorityError):
        rb.update_priority(batch["index"], -1.0)


def test_marks_and_info():
    rb = buffer(batch_size=6, data=steps([8]))
    batch, info = rb.sample(return_info=True)
    truncated = batch["next", "truncated"].reshape(2, 3)
    assert truncated.tolist() == [[False, False, True]] * 2
    assert isinstance(info["index"], tuple)
    assert {"priority_weight", "index_generation"} <= set(info)
    assert batch["index"].shape == (6, 1)


def test_shorter_trajectories_are_drawn_from_their_first_step():
    rb = buffer(batch_size=30, data=steps([2, 2]), strict_length=False)
    batch = rb.sample()
    assert set(batch["index"].flatten().tolist()) == {0, 1, 2, 3}
    assert batch["step"].reshape(-1, 2).tolist() == [[0, 1]] * (len(batch) // 2)


def test_span_is_for_the_right_end():
    with pytest.warns(UserWarning, match="left end"):
        rb = buffer(batch_size=300, data=steps([4]), span=True)
    assert {len(part) for part in np.split(*_by_window(rb.sample()))} == {1, 2, 3}
    with pytest.warns(UserWarning, match="left end"):
        buffer(span=(1, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(buffer(batch_size=300, data=steps([4]), span=(0, 1)).sample()["step"].tolist()) == {0, 1, 2, 3}


def _by_window(batch):
    step = batch["step"].numpy()
    return step, np.flatnonzero(batch["next", "truncated"].squeeze(1).numpy())[:-1] + 1


def test_num_slices_and_slices_of_one_step():
    rb = buffer(batch_size=8, data=steps([9]), num_slices=2)
    windows(rb.sample(), 4)
    assert len(buffer(batch_size=5, data=steps([3]), slice_len=1).sample()) == 5


def test_settings_are_the_anchors():
    rb = buffer(data=steps([9]), alpha=0.5, beta=0.25)
    assert (rb.sampler.alpha, rb.sampler.beta) == (0.5, 0.25)
    rb.sampler.alpha, rb.sampler.beta = 1.0, 0.75
    assert (rb.sampler.anchors.alpha, rb.sampler.anchors.beta) == (1.0, 0.75)
    rb.mark_update(torch.arange(9))
    other = copy.deepcopy(rb)
    assert torch.equal(other.sampler.state_dict()["leaves"], rb.sampler.state_dict()["leaves"])
    windows(other.sample())


def test_a_slice_sampler_with_anchors_draws_the_same(tmp_path):
    def draws(sampler, folder):
        torch.manual_seed(0)
        path = tmp_path / folder
        rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=path), sampler=sampler, batch_size=9)
        rb.extend(steps([9, 7, 12]))
        rb.update_priority(torch.arange(28), torch.arange(28.0) + 1)
        rb.mark_update([3])
        batches = [rb.sample(), copy.deepcopy(rb).sample()]
        rb.close()
        again = ReplayBuffer.open(path)
        assert type(again.sampler) is type(sampler)
        assert again.sampler.anchors.alpha == 0.5
        return [*batches, again.sample()]

    anchors = PrioritizedSampler(40, 0.5, 0.25, dtype=torch.float64)
    ours = draws(SliceSampler(slice_len=3, anchors=anchors), "ours")
    theirs = draws(PrioritizedSliceSampler(40, 0.5, 0.25, dtype=torch.float64, slice_len=3), "theirs")
    for one, other in zip(ours, theirs, strict=True):
        assert one["priority_weight"].dtype is torch.float64
        assert (one == other).all()
    with pytest.raises(TypeError, match="anchors: expected a PrioritizedSampler"):
        SliceSampler(slice_len=3, anchors=PrioritizedSampler)


def test_nothing_to_draw():
    rb = buffer()
    with pytest.raises(NoSampleable, match="empty"):
        rb.sample()
    rb.extend(steps([2, 1, 2]))
    with pytest.raises(NoSampleable, match=r"expected a trajectory of at least 3 steps, got 3 of at most 2"):
        rb.sample()
    rb.extend(steps([5], 9))
    rb.update_priority(torch.arange(10), 0.0)
    with pytest.raises(NoSampleable, match="zero"):
        rb.sample()
    with pytest.raises(TypeError, match="replacement"):
        PrioritizedSliceSampler(5, 1.0, 1.0, slice_len=2, replacement=False)
    with pytest.raises(ValueError, match="max_capacity"):
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSliceSampler(9, 1.0, 1.0, slice_len=2))


def test_draws_follow_from_the_generator():
    def draw(seed):
        rb = buffer(data=steps([9, 8]))
        rb.set_rng(torch.Generator().manual_seed(seed))
        return [rb.sample()["index"].flatten().tolist() for _ in range(3)]

    assert draw(1) == draw(1) != draw(2)


def test_a_directory_keeps_it(tmp_path):
    rb = buffer(storage=lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"), data=steps([9, 8]))
    rb.update_priority(torch.arange(17), torch.rand(17))
    rb.sampler.beta = 0.9
    before = rb.sampler.state_dict()["leaves"]
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s")
    assert isinstance(rb.sampler, PrioritizedSliceSampler)
    assert torch.equal(rb.sampler.state_dict()["leaves"], before)
    assert (rb.sampler.beta, rb.sampler.slice_len) == (0.9, 3)
    windows(rb.sample())
    rb.close()


# ---- against a model ---------------------------------------------------------------------------------------------------


class Windows(TrajectoryMachine):
    """Beside the sampler, a leaf per live row."""

    priority = st.sampled_from([0.0, 0.25, 1.0, 8.0])

    def make_sampler(self, draw):
        self.alpha, self.beta, self.eps = (
            draw(st.sampled_from(x)) for x in ([0.5, 1.0, 2.0], [0.0, 0.5, 1.0], [0.0, 0.1])
        )
        self.within = draw(st.booleans())
        self.leaves, self.highest, self.late, self.saved, self.dropped = {}, 0.0, None, None, 0
        return PrioritizedSliceSampler(
            27, self.alpha, self.beta, self.eps, max_priority_within_buffer=self.within, **self.boundaries(draw)
        )

    def leaf(self, priority):
        return (priority + self.eps) ** self.alpha

    def new_leaf(self):
        most = max(self.leaves.values(), default=0.0) if self.within else 0.0
        return most or self.leaf(self.highest or 1.0)

    def wrote(self, rows):
        self.leaves.update(dict.fromkeys(rows, self.new_leaf()))

    def edited(self, row, before):
        """What was drawn names the write that the row holds still."""
        if self.late:
            self.late[1][:] = [self.rings.live()[row] if held == before else held for held in self.late[1]]

    def emptied(self):
        self.leaves, self.highest = {}, 0.0

    def update(self, rows, held, priorities, dtype, **generation):
        """``held``: what the rows must hold still; None: anything."""
        self.rb.update_priority(torch.tensor(rows), torch.tensor(priorities, dtype=dtype), **generation)
        live = self.rings.live()
        for row, step, priority in zip(rows, held, priorities, strict=True):
            if row == -1:
                continue
            if row not in live or step not in (None, live[row]):
                self.dropped += 1
                continue
            self.leaves[row] = self.leaf(priority)
            self.highest = max(self.highest, priority)

    dtypes = st.sampled_from([torch.float32, torch.float64])

    @precondition(lambda self: self.rb.storage.initialized)
    @rule(data=st.data(), dtype=dtypes)
    def update_some(self, data, dtype):
        last = len(self.rings.lanes) * self.rings.length - 1
        updates = data.draw(st.lists(st.tuples(st.integers(-1, last), self.priority), min_size=1, max_size=9))
        rows, priorities = zip(*updates, strict=True)
        self.update(rows, [None] * len(rows), priorities, dtype)

    @precondition(lambda self: self.late)
    @rule(priority=priority, dtype=dtypes)
    def update_what_was_drawn(self, priority, dtype):
        rows, held, generation = self.late
        self.update(rows, held, [priority] * len(rows), dtype, generation=generation)

    @precondition(lambda self: self.rings.live())
    @rule(data=st.data())
    def mark_update(self, data):
        rows = data.draw(st.lists(st.sampled_from(list(self.rings.live())), min_size=1, max_size=4))
        self.rb.mark_update(rows)
        self.wrote(rows)

    @rule(alpha=st.sampled_from([0.5, 1.0, 2.0]), beta=st.sampled_from([0.0, 0.5, 1.0]))
    def anneal(self, alpha, beta):
        self.rb.sampler.alpha, self.rb.sampler.beta = alpha, beta
        self.leaves = {row: leaf ** (alpha / self.alpha) for row, leaf in self.leaves.items()}
        self.alpha, self.beta = alpha, beta

    @precondition(lambda self: self.rb.storage.initialized)
    @rule()
    def save(self):
        self.saved = self.rb.sampler.state_dict(), (self.alpha, self.beta, self.highest, self.leaves.copy())

    @precondition(lambda self: self.saved)
    @rule()
    def load(self):
        state, (self.alpha, self.beta, self.highest, leaves) = self.saved
        self.leaves = {row: leaves[row] for row in self.rings.live() if row in leaves}
        self.wrote([row for row in self.rings.live() if row not in leaves])
        self.rb.sampler.alpha = self.alpha
        self.rb.sampler.load_state_dict(state)

    @rule(n=st.integers(1, 6))
    def draw(self, n):
        starts = self.starts()
        assert self.rb.can_sample(n * self.length) == bool(starts)
        drawable = [first for first in starts if self.leaves[first] > 0]
        if not drawable:
            with pytest.raises(NoSampleable):
                self.rb.sample(n * self.length)
            return
        firsts, info = self.windows(n)
        assert len(firsts) == n
        assert set(firsts) <= set(drawable)
        least = min(leaf for leaf in self.leaves.values() if leaf > 0)
        weights = [(self.leaves[first] / least) ** -self.beta for first in firsts for _ in starts[first][0]]
        assert info["priority_weight"].tolist() == pytest.approx(weights, rel=1e-5)
        live, rows = self.rings.live(), info["index"][0].tolist()
        self.late = rows, [live[row] for row in rows], info["index_generation"]

    @precondition(lambda self: self.rings.live())
    @invariant()
    def agrees(self):
        leaves = self.rb.sampler.state_dict()["leaves"].tolist()
        assert leaves == pytest.approx([self.leaves.get(row, 0.0) for row in range(len(leaves))], rel=1e-5)
        assert self.leaf(self.rb.sampler.default_priority) == pytest.approx(self.new_leaf(), rel=1e-5)
        assert self.rb.stats()["priority_updates_dropped"] == self.dropped


TestWindows = pytest.mark.filterwarnings("ignore:sample. batch_size")(Windows.TestCase)
TestWindows.settings = SETTINGS
stressed(TestWindows)
