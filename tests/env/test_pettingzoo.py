"""Recording parallel environments of PettingZoo: each agent is a lane, and what it sees is a row."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test

from engram import LazyTensorStorage, ReplayBuffer
from tests.env.tales import FORMS, Tale, rows_of


class TaleAgents(ParallelEnv):
    """A tale per agent; each leaves when its episode is over. ``late``: this agent comes one step after the others."""

    metadata = {"name": "tales_v0"}

    def __init__(self, lengths, form="box", late=None):
        self.tales = [Tale(which, one) for which, one in enumerate(lengths)]
        self.possible_agents = [f"agent_{which}" for which in range(len(lengths))]
        self.agents = []
        self.tell, self._space, _ = FORMS[form]
        self._action_space = spaces.Discrete(1000)
        self.late = late

    def observation_space(self, agent):
        return self._space

    def action_space(self, agent):
        return self._action_space

    def tale(self, agent):
        return self.tales[self.possible_agents.index(agent)]

    def _told(self, agents):
        return {agent: self.tell(self.tale(agent).seen) for agent in agents}

    def reset(self, seed=None, options=None):
        self.agents = [agent for which, agent in enumerate(self.possible_agents) if which != self.late]
        for agent in self.agents:
            self.tale(agent).begin()
        self.waits = self.late is not None
        self.returned = self._told(self.agents), {agent: {} for agent in self.agents}
        return self.returned

    def step(self, actions):
        acted = list(self.agents)
        said = {agent: self.tale(agent).go_on(actions[agent]) for agent in acted}
        there = list(acted)
        if self.waits:
            self.waits = False
            there.append(self.possible_agents[self.late])
            self.tale(there[-1]).begin()
            said[there[-1]] = (0.0, False, False)
        rewards, terminations, truncations = ({agent: said[agent][i] for agent in there} for i in range(3))
        self.agents = [agent for agent in there if not self.tale(agent).over]
        self.returned = self._told(there), rewards, terminations, truncations, {agent: {} for agent in there}
        return self.returned


def buffer(lanes):
    return ReplayBuffer(storage=LazyTensorStorage(200 * lanes, lanes=lanes))


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(1, 20),
    st.sampled_from(sorted(FORMS)),
    st.sets(st.integers(1, 19), max_size=2),
    st.booleans(),
)
def test_rows_are_what_the_agents_logged(lengths, steps, form, cut, late):
    n = len(lengths)
    rb = buffer(n)
    inner = TaleAgents(lengths, form, late=n - 1 if late and n > 1 else None)
    env = rb.record(inner)
    for at in range(steps):
        if not env.agents or at in cut:
            assert env.reset(seed=at) is inner.returned
        actions = {agent: 10 * at + int(agent[-1]) for agent in env.agents}
        assert env.step(actions) is inner.returned
    logged = [tale.log for tale in inner.tales]
    for lane, log in enumerate(logged):
        found = rows_of(rb, lane, form)
        if log and not log[-1]["done"] and inner.late == lane and inner.waits:
            log[-1].end()  # it has not come since the reset, which ended it
        assert found == log


def test_it_is_a_parallel_environment_still():
    env = buffer(2).record(TaleAgents([[3], [5]]))
    assert isinstance(env, ParallelEnv)
    assert env.tell is FORMS["box"][0], "attributes are those of the environment"
    parallel_api_test(env, num_cycles=20)


def test_agents_that_see_different_things_are_refused():
    class Unlike(TaleAgents):
        def observation_space(self, agent):
            return spaces.Box(0, 1, (int(agent[-1]) + 1,), np.float32)

    with pytest.raises(ValueError, match="expected agents with spaces of one shape and dtype, got Box.* of 'agent_0'"):
        buffer(2).record(Unlike([[3], [5]]))
