"""Recording environments of dm_env."""

import dm_env
import numpy as np
import pytest
from dm_env import specs
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import LazyTensorStorage, ReplayBuffer
from tests.env.tales import FORMS, Tale, rows_of

SPECS = {
    "box": specs.Array((3,), np.float32),
    "dict": {"at": specs.Array((2,), np.int64), "who": {"id": specs.Array((1,), np.uint8)}},
    "tuple": [specs.Array((), np.int64), (specs.Array((2,), np.float32),)],
}


class TaleDm(dm_env.Environment):
    """A tale. Its step after an end, and before a reset, begins an episode."""

    def __init__(self, lengths, form):
        self.tale = Tale(0, lengths)
        self.tell = FORMS[form][0]
        self.form = form

    def reset(self):
        self.tale.begin()
        self.returned = dm_env.restart(self.tell(self.tale.seen))
        return self.returned

    def step(self, action):
        if self.tale.over:
            return self.reset()
        reward, terminated, _ = self.tale.go_on(action)
        observation = self.tell(self.tale.seen)
        if terminated:  # dm_env has one end, and this is its kind
            self.tale.log[-1].update(truncated=False)
            self.returned = dm_env.termination(reward, observation)
        elif self.tale.over:
            self.returned = dm_env.truncation(reward, observation, discount=0.9)
        else:
            self.returned = dm_env.transition(reward, observation)
        return self.returned

    def observation_spec(self):
        return SPECS[self.form]

    def action_spec(self):
        return specs.DiscreteArray(1000, np.int64)


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 20),
    st.sampled_from(sorted(SPECS)),
    st.sets(st.integers(0, 19), max_size=3),
)
def test_rows_are_what_the_environment_logged(lengths, steps, form, resets):
    rb = ReplayBuffer(storage=LazyTensorStorage(200))
    inner = TaleDm(lengths, form)
    env = rb.record(inner)
    for at in range(steps):
        if at in resets:
            assert env.reset() is inner.returned
        assert env.step(at) is inner.returned
    assert rows_of(rb, 0, form) == inner.tale.log


def test_it_is_an_environment_still():
    inner = TaleDm([3], "box")
    env = ReplayBuffer(storage=LazyTensorStorage(200)).record(inner)
    assert isinstance(env, dm_env.Environment)
    assert env.tale is inner.tale
    assert (env.observation_spec(), env.action_spec().num_values) == (SPECS["box"], 1000)
    assert (env.reward_spec(), env.discount_spec()) == (inner.reward_spec(), inner.discount_spec())
    with env:
        env.reset()


def test_texts_are_refused():
    class Telling(TaleDm):
        def observation_spec(self):
            return {"said": specs.StringArray(())}

    rb = ReplayBuffer(storage=LazyTensorStorage(200))
    with pytest.raises(TypeError, match=r"record: observation\['said'\]: expected numbers of a fixed shape"):
        rb.record(Telling([3], "box"))
