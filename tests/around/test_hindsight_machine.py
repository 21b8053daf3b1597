"""Hindsight around every sampler, over writes of every kind, against plain lists of rows."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tensordict import TensorDict

from engram import (
    Hindsight,
    HindsightStrategy,
    NoSampleable,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.around.hindsight import OWN, achieved_of, check, goals_of, reward
from tests.samplers.machine import SETTINGS, StoreMachine, TrajectoryMachine


class HindsightMachine(StoreMachine):
    """Strategy, share and the sampler inside are drawn, too."""

    def make_source(self, draw):
        kind = draw(st.sampled_from([RandomSampler, SamplerWithoutReplacement, PrioritizedSampler]))
        return kind(1000, 0.6, 0.4) if kind is PrioritizedSampler else kind()

    def make_rules(self, draw):
        self.by_id = draw(st.booleans())
        return {"traj_key": "episode"} if self.by_id else {"traj_key": "absent", "end_keys": [("next", "done")]}

    def make_sampler(self, draw):
        rules = self.make_rules(draw)
        self.strategy = draw(st.sampled_from(HindsightStrategy))
        self.ratio = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
        rules["achieved_goal_key"] = "achieved_goal"
        return Hindsight(self.make_source(draw), reward, her_ratio=self.ratio, strategy=self.strategy, **rules)

    @staticmethod
    def data(steps):
        n = len(steps)
        own = torch.tensor([[OWN, float(step.step)] for step in steps])
        flags = torch.tensor([[step.done] for step in steps])
        return TensorDict(
            {
                "where": torch.tensor([step.where for step in steps]),
                "episode": torch.tensor([step.episode for step in steps]),
                "achieved_goal": torch.tensor([achieved_of(*step.where) for step in steps]),
                "desired_goal": own,
                "next": {"desired_goal": own.clone(), "reward": torch.full((n, 1), OWN), "done": flags},
            },
            [n],
        )

    def goals(self):
        """Of each live row, the rows that its goal may come from."""
        live = self.rings.live()
        runs = self.rings.runs(lambda a, b: a.done or (self.by_id and a.episode != b.episode))
        return {row: goals_of(self.strategy, run, row, live) for run in runs for row in run}

    def stored(self):
        return {row: tuple(step.where) for row, step in self.rings.live().items()}

    @precondition(lambda self: self.rings.live())
    @rule(batch_size=st.sampled_from([1, 3, 40]))
    def draw(self, batch_size):
        batch, info = self.rb.sample(batch_size, return_info=True)
        rows = info["index"].tolist()
        check(batch, rows, int(len(rows) * self.ratio), self.goals().__getitem__, self.stored())

    @precondition(lambda self: self.rings.live())
    @invariant()
    def draw_after_every_step(self):
        self.draw(12)


class HindsightOfWindowsMachine(HindsightMachine, TrajectoryMachine):
    """Around samplers of slices: one goal for each window, drawn for its last step."""

    def make_rules(self, draw):
        self.arguments = self.boundaries(draw)
        own = {"traj_key": self.arguments["traj_key"], "end_keys": [("next", "done")]}
        return draw(st.sampled_from([own, {}]))

    def make_source(self, draw):
        kind = draw(st.sampled_from([SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler]))
        self.may_be_empty = kind is SliceSamplerWithoutReplacement  # a batch of trajectories that are too short
        return kind(1000, 0.6, 0.4, **self.arguments) if kind is PrioritizedSliceSampler else kind(**self.arguments)

    @precondition(lambda self: self.rings.live())
    @rule(windows=st.sampled_from([1, 3, 12]))
    def draw(self, windows):
        starts = self.starts()
        try:
            batch, info = self.rb.sample(windows * self.length, return_info=True)
        except NoSampleable:
            assert not starts or self.may_be_empty
            return
        rows, found, at = info["index"][0].tolist(), [], 0
        while at < len(rows):
            window, _ = starts[rows[at]]
            found.append(window)
            at += len(window)
        relabelled = found[: int(len(found) * self.ratio)]
        goals, stored, last = self.goals(), self.stored(), []
        for window in relabelled:
            last += [window[-1]] * len(window)
        places = iter(last)
        chosen = check(batch, rows, len(last), lambda _: goals[next(places)], stored)
        for window in relabelled:  # all steps have one goal
            assert len(set(chosen[: len(window)])) == 1
            chosen = chosen[len(window) :]


TestHindsight = pytest.mark.filterwarnings("ignore:sample. batch_size")(HindsightMachine.TestCase)
TestHindsight.settings = settings(SETTINGS, max_examples=30)

TestHindsightOfWindows = pytest.mark.filterwarnings("ignore:sample. batch_size")(HindsightOfWindowsMachine.TestCase)
TestHindsightOfWindows.settings = settings(SETTINGS, max_examples=30)
