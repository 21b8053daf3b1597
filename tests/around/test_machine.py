"""All expanders, around samplers of rows and around each other, against sums over plain lists of rows."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tensordict import TensorDict

from engram import (
    FrameStack,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RewardToGo,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.samplers.machine import SETTINGS, StoreMachine, TrajectoryMachine

GAMMA = 0.5  # sums of small integers are exact then


def reward_of(step):
    return float((7 * step.episode + 3 * step.step + step.lane) % 16)


def frame_of(step):
    return [step.lane, step.episode, step.step]


def next_frame_of(step):
    return [step.lane, step.episode, step.step + 0.5]  # tells a next frame from the frame of the following row


class ExpanderMachine(StoreMachine):
    """Which expanders there are, and in which order, is drawn too."""

    def make_source(self, draw):
        sampler = draw(st.sampled_from([RandomSampler, SamplerWithoutReplacement, PrioritizedSampler]))
        return sampler(1000, 0.6, 0.4) if sampler is PrioritizedSampler else sampler()

    def make_rules(self, draw):
        self.by_id = draw(st.booleans())
        ends = [("next", "terminated"), ("next", "truncated")]
        return {"traj_key": "episode"} if self.by_id else {"traj_key": "absent", "end_keys": ends}

    def make_sampler(self, draw):
        rules = self.make_rules(draw)
        sampler = self.make_source(draw)
        self.n, self.frames, self.padding = (
            draw(st.integers(1, 5)),
            draw(st.integers(1, 4)),
            draw(st.sampled_from(["same", "constant"])),
        )
        wrappers = {
            "steps": lambda s, **more: NStep(s, self.n, GAMMA, **more),
            "frames": lambda s, **more: FrameStack(
                s, self.frames, -1, ["frame", ("next", "frame")], padding=self.padding, padding_value=-1, **more
            ),
            "to_go": lambda s, **more: RewardToGo(s, GAMMA, **more),
        }
        self.kinds = draw(st.permutations(sorted(wrappers)))[: draw(st.integers(1, 3))]
        for i, kind in enumerate(self.kinds):
            sampler = wrappers[kind](sampler, **(rules if i == 0 else {}))
        return sampler

    @staticmethod
    def data(steps):
        td = StoreMachine.data(steps)
        td["frame"] = torch.tensor([frame_of(step) for step in steps], dtype=torch.float32)
        done = td["next", "done"]
        truncated = done & (td["episode"] % 2 == 1).unsqueeze(-1)
        td["next"] = TensorDict(
            {
                "frame": torch.tensor([next_frame_of(step) for step in steps]),
                "reward": torch.tensor([[reward_of(step)] for step in steps]),
                "done": done,
                "truncated": truncated,
                "terminated": done & ~truncated,
            },
            [len(steps)],
        )
        return td

    def expected(self, row):
        """What a batch holds of a row, entry by entry."""
        runs = self.rings.runs(lambda a, b: a.done or (self.by_id and a.episode != b.episode))
        live = self.rings.live()
        run = [live[other] for other in next(run for run in runs if row in run)]
        newest = {lane[-1][0] for lane in self.rings.lanes if lane}
        complete = run[-1].done or not any(live[last] == run[-1] for last in newest)
        at = run.index(live[row])
        left = run[at:]
        k = min(self.n, len(left)) if "steps" in self.kinds else 1
        last = left[k - 1]
        truncated = last.done and last.episode % 2 == 1
        entries = {
            ("next", "reward"): [sum(GAMMA**i * reward_of(step) for i, step in enumerate(left[:k]))],
            ("next", "done"): [last.done],
            ("next", "truncated"): [truncated],
            ("next", "terminated"): [last.done and not truncated],
            "frame": frame_of(left[0]),
            ("next", "frame"): next_frame_of(last),
        }
        if "steps" in self.kinds:
            entries["steps_to_next_obs"], entries["gamma"] = [k], [GAMMA**k]
            entries["next", "original_reward"] = [reward_of(left[0])]
        if "to_go" in self.kinds:
            entries["reward_to_go"] = [sum(GAMMA**i * reward_of(step) for i, step in enumerate(left))]
            entries["reward_to_go_complete"] = [complete]
        if "frames" in self.kinds:
            frames = [frame_of(step) for step in run[: at + 1]]
            entries["frame"] = self.stacked(frames)
            entries["next", "frame"] = self.stacked(
                [frame_of(run[0]), *(next_frame_of(step) for step in run[: at + k])]
            )
        return entries

    def stacked(self, frames):
        missing = max(self.frames - len(frames), 0)
        pad = frames[0] if self.padding == "same" else [-1, -1, -1]
        return sum([pad] * missing + frames[-self.frames :], [])

    @precondition(lambda self: self.rings.live())
    @rule(batch_size=st.sampled_from([1, 3, 40]))
    def draw(self, batch_size):
        batch, info = self.rb.sample(batch_size, return_info=True)
        rows = info["index"].tolist()
        live = self.rings.live()
        assert batch["where"].tolist() == [live[row].where for row in rows]
        expected = {row: self.expected(row) for row in set(rows)}
        for key in expected[rows[0]]:
            assert batch[key].tolist() == [expected[row][key] for row in rows], key

    @precondition(lambda self: self.rings.live())
    @rule()
    def update_priority(self):
        try:
            batch = self.rb.sample(12)
        except NoSampleable:
            return  # of windows; draw() knows whether there are some
        if "index_generation" in batch.keys():
            batch["td_error"] = torch.rand(len(batch)) + 0.1
            self.rb.update_tensordict_priority(batch)
            assert self.rb.stats()["priority_updates_dropped"] == 0


class WindowExpanderMachine(ExpanderMachine, TrajectoryMachine):
    """Around samplers of slices: the windows are theirs, and each step of them is what it is when it is drawn alone."""

    def make_rules(self, draw):
        self.arguments = self.boundaries(draw)
        own = {"traj_key": self.arguments["traj_key"], "end_keys": [("next", "done")]}
        return draw(st.sampled_from([own, {}]))

    def make_source(self, draw):
        sampler = draw(st.sampled_from([SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler]))
        self.may_be_empty = sampler is SliceSamplerWithoutReplacement  # a batch of trajectories that are too short
        return (
            sampler(1000, 0.6, 0.4, **self.arguments)
            if sampler is PrioritizedSliceSampler
            else sampler(**self.arguments)
        )

    @precondition(lambda self: self.rings.live())
    @rule(windows=st.sampled_from([1, 3, 12]))
    def draw(self, windows):
        starts = self.starts()
        try:
            batch, info = self.rb.sample(windows * self.length, return_info=True)
        except NoSampleable:
            assert not starts or self.may_be_empty
            return
        rows, live, lasts = info["index"][0].tolist(), self.rings.live(), []
        assert batch["where"].tolist() == [live[row].where for row in rows]
        while len(lasts) < len(rows):
            window, _ = starts[rows[len(lasts)]]
            assert rows[len(lasts) : len(lasts) + len(window)] == window
            lasts += [row == window[-1] for row in window]
        expected = {row: self.expected(row) for row in set(rows)}
        for key in expected[rows[0]].keys() - {("next", "truncated"), ("next", "done")}:
            assert batch[key].tolist() == [expected[row][key] for row in rows], key
        assert batch["next", "truncated"].flatten().tolist() == lasts
        done = [expected[row]["next", "done"][0] or last for row, last in zip(rows, lasts, strict=True)]
        assert batch["next", "done"].flatten().tolist() == done


TestExpanders = pytest.mark.filterwarnings("ignore:sample. batch_size")(ExpanderMachine.TestCase)
TestExpanders.settings = settings(SETTINGS, max_examples=60)

TestExpandersOfWindows = pytest.mark.filterwarnings("ignore:sample. batch_size")(WindowExpanderMachine.TestCase)
TestExpandersOfWindows.settings = settings(SETTINGS, max_examples=60)
