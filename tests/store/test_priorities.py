"""The index of priorities by itself, beside an array of leaves."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engram import NoSampleable, PriorityError, RowError
from engram.store.priorities import PriorityConfig, PriorityIndex
from tests.samplers.machine import SETTINGS, stressed


class Leaves(RuleBasedStateMachine):
    """Each rule does the same to both."""

    alphas = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    betas = st.sampled_from([0.0, 0.5, 1.0])
    dtypes = st.sampled_from([torch.float32, torch.float64])
    priorities = st.sampled_from([0.0, 0.25, 1.0, 8.0])

    @initialize(n=st.integers(1, 80), alpha=alphas, beta=betas, eps=st.sampled_from([0.0, 0.1]), within=st.booleans())
    def begin(self, n, alpha, beta, eps, within):
        self.alpha, self.beta, self.eps, self.within = alpha, beta, eps, within
        self.index = PriorityIndex.of_no_store(n, PriorityConfig(alpha, beta, eps, within))
        self.leaves, self.highest = np.zeros(n), 0.0
        self.given = np.zeros(n, bool)  # the rows that hold an item, as far as the index knows

    def rows(self, data, first=0):
        return data.draw(st.lists(st.integers(first, len(self.leaves) - 1), min_size=1, max_size=20))

    def new_leaf(self):
        most = self.leaves.max() if self.within else 0.0
        return most or ((self.highest or 1.0) + self.eps) ** self.alpha

    @rule(data=st.data(), again=st.booleans())
    def write(self, data, again):
        rows = self.rows(data, first=-1 if again else 0)
        (self.index.reset if again else self.index.core.written)(torch.tensor(rows))
        rows = [row for row in rows if row >= 0 and (self.given[row] or not again)]
        self.leaves[rows], self.given[rows] = self.new_leaf(), True

    @rule(data=st.data(), dtype=dtypes)
    def update(self, data, dtype):
        rows = self.rows(data, first=-1)
        priorities = data.draw(st.lists(self.priorities, min_size=len(rows), max_size=len(rows)))
        self.index.update(torch.tensor(rows), torch.tensor(priorities, dtype=dtype), None)
        for row, priority in zip(rows, priorities, strict=True):
            if row >= 0:  # of a row named twice the last one stays
                self.leaves[row], self.given[row] = (priority + self.eps) ** self.alpha, True
                self.highest = max(self.highest, priority)

    @rule(data=st.data(), dtype=dtypes, bad=st.sampled_from([-1.0, float("nan"), float("inf"), None]))
    def refused_updates_change_nothing(self, data, dtype, bad):
        rows = torch.tensor(self.rows(data))
        priorities = torch.full(rows.shape, 5.0, dtype=dtype)
        at = data.draw(st.integers(0, len(rows) - 1))
        if bad is None:
            rows[at] = data.draw(st.sampled_from([-2, len(self.leaves), 1 << 40]))
        else:
            priorities[at] = bad
        with pytest.raises(RowError if bad is None else PriorityError):
            self.index.update(rows, priorities, None)

    @rule(alpha=alphas, beta=betas)
    def anneal(self, alpha, beta):
        self.index.core.alpha, self.index.core.beta = alpha, beta
        if self.alpha > 0:  # else all were equal, and stay so
            self.leaves[self.leaves > 0] **= alpha / self.alpha
        self.alpha, self.beta = alpha, beta

    @rule()
    def empty(self):
        self.index.core.emptied()
        self.leaves[:], self.given[:], self.highest = 0, False, 0.0

    @rule(data=st.data())
    def lose(self, data):
        rows = self.rows(data)
        self.index.core.lost(torch.tensor(rows))
        self.leaves[rows], self.given[rows] = 0, False

    @rule()
    def go_on_with_a_copy(self):
        self.index = PriorityIndex(PriorityIndex.copied(self.index.block.tensor), None)  # as copies of a store do

    @precondition(lambda self: not self.leaves.any())
    @rule()
    def nothing_to_draw(self):
        with pytest.raises(NoSampleable):
            self.index.draw(1, 2)

    @precondition(lambda self: self.leaves.any())
    @rule(key=st.integers(0, (1 << 64) - 1))
    def draw(self, key):
        rows, _, weights = self.index.draw(key, 4000)
        counts = np.bincount(rows, minlength=len(self.leaves))
        assert not counts[self.leaves == 0].any()
        assert counts[self.leaves >= 0.01 * self.leaves.sum()].all()  # that one does not come: one in 10 ** 17
        leaves = self.leaves[rows]
        np.testing.assert_allclose(weights, (leaves / self.leaves[self.leaves > 0].min()) ** -self.beta, rtol=1e-5)
        assert torch.equal(self.index.weights(rows), weights)
        assert torch.equal(self.index.draw(key, 4000)[0], rows)

    @invariant()
    def agrees(self):
        leaves = self.index.leaves(len(self.leaves)).numpy()
        np.testing.assert_allclose(leaves, self.leaves, rtol=1e-5)
        assert self.index.core.total == pytest.approx(leaves.sum(), rel=1e-12)
        default = self.index.core.default_priority
        if self.within and self.alpha > 0:
            assert (default + self.eps) ** self.alpha == pytest.approx(self.new_leaf(), rel=1e-5)
        elif not self.within:
            assert default == (self.highest or 1.0)


TestLeaves = Leaves.TestCase
TestLeaves.settings = SETTINGS
stressed(TestLeaves)
