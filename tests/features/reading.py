"""Units, groups, windows and queries: what reads rows beside each other."""

import torch

from engram import (
    CatFrames,
    FrameStack,
    HERReplayBuffer,
    Hindsight,
    NStep,
    PromptGroupSampler,
    RandomSampler,
    RewardToGo,
    Sequence,
    StalenessAwareSampler,
    Transition,
    traj,
)
from tests.features.base import LEAST, MOST, Feature, until
from tests.features.rows import by_trajectory, check_whole, window


class OneStep(Feature):
    def arguments(self):
        return {"sample_unit": Transition()}

    def broken(self):
        return {"sample_unit": Sequence(1)}

    def sound(self, batch, whos):
        assert batch.batch_size == (8,)
        assert "validity_mask" not in batch
        super().sound(batch, whos)


class Windows(Feature):
    """One record before each anchor and two behind it, where the trajectory has them."""

    def arguments(self):
        return {"sample_unit": Sequence(3, burn_in=1)}

    def broken(self):
        return {"sample_unit": Sequence(3, burn_in=1, episode_boundary="include_reset")}

    def windows(self, batch):
        check_whole(batch.reshape(-1))
        batch = batch.reshape(-1, 4)
        return zip(batch["who"].tolist(), batch["validity_mask"].tolist(), strict=True)

    def sound(self, batch, whos):
        for got, valid in self.windows(batch):
            assert set(got) <= whos
            assert valid[1]
            anchor, first, last = got[1], valid.index(True), 3 - valid[::-1].index(True)
            assert valid == [first <= at <= last for at in range(4)]
            assert got == [anchor - 1 + min(max(at, first), last) for at in range(4)]
            assert len({who // 100 for who in got}) == 1

    def check(self, rb, known):
        trajectories, anchors = by_trajectory(known.whos), set()
        for _ in until(lambda: anchors >= known.whos):
            for got, valid in self.windows(rb.sample()):
                own = trajectories[got[1] // 100]  # the anchor is the second record
                at = own.index(got[1])
                assert got == window(own, at - 1, 4)
                assert valid == [0 <= place < len(own) for place in range(at - 1, at + 3)]
                anchors.add(got[1])
        assert anchors == known.whos


class Groups(Feature):
    """Three rows of one group."""

    batch_size = 3

    def __init__(self, key):
        self.key = key

    def arguments(self):
        return {"sampler": PromptGroupSampler(num_groups=1, group_key=self.key)}

    def broken(self):
        return {"sampler": PromptGroupSampler(num_groups=1, group_key="same")}

    def sound(self, batch, whos):
        super().sound(batch, whos)
        assert len(set(batch["who"].tolist())) == 3
        assert len({who // 100 for who in batch["who"].tolist()}) == 1

    def check(self, rb, known):
        super().check(rb, known)
        assert rb.sampler.groups == len(by_trajectory(known.whos))


class Queries(Feature):
    def spoil(self, rb, known):
        """Let a trajectory end too early."""
        row = known.rows[101]
        rb[row] = rb[row].set(("next", "reward"), torch.tensor([9.0]))

    def check(self, rb, known):
        def found(predicate=None):
            return sorted(it["who"].tolist() for it in rb.query(predicate, trajectory_key="episode"))

        trajectories = list(by_trajectory(known.whos).values())
        assert found() == trajectories
        assert found(traj.reward.sum() > 7) == [own for own in trajectories if sum(who % 100 for who in own) > 7]
        assert found((traj.length == 4) & (traj.reward.max() < 4)) == [own for own in trajectories if len(own) == 4]
        assert found(traj.reward.max() >= 9) == []


class Stacks(Feature):
    key = "obs"

    def arguments(self, **others):
        keys = {"traj_key": "episode", **others}
        return {"sampler": FrameStack(RandomSampler(), 3, -1, ["obs"], **keys)}

    def broken(self):
        """Stacks that join trajectories."""
        return self.arguments(traj_key="same", end_keys=["never"])

    def sound(self, batch, whos):
        assert set(batch["who"].tolist()) <= whos
        for who, stack in zip(batch["who"].tolist(), batch[self.key].tolist(), strict=True):
            first = who // 100 * 100
            assert stack == [max(who - 2, first), max(who - 1, first), who]


class Frames(Stacks):
    key = "stack"

    def arguments(self, n=3):
        frames = CatFrames(n, -1, in_keys=["obs"], out_keys=["stack"])
        transform, sampler = frames.make_rb_transform_and_sampler(8, traj_key="episode")
        return {"transform": transform, "sampler": sampler}

    def broken(self):
        return self.arguments(2)

    def reopening(self):
        return {"transform": self.arguments()["transform"]}

    def sound(self, batch, whos):
        check_whole(batch)
        super().sound(batch, whos)


class Stale(Feature):
    """Steps of at most so much ago."""

    batch_size = 3

    def arguments(self, most=2):
        return {"sampler": StalenessAwareSampler(most, version_key="step")}

    def broken(self):
        return self.arguments(3)

    def play(self, rb, trajectories):
        rb.sampler.consumer_version = 4
        return super().play(rb, trajectories)

    def sound(self, batch, whos):
        super().sound(batch, {who for who in whos if who % 100 >= 2})

    def check(self, rb, known):
        assert rb.sampler.consumer_version == 4
        fresh, drawn = {who for who in known.whos if who % 100 >= 2}, set()
        for _ in until(lambda: drawn >= fresh):
            batch = rb.sample()
            self.sound(batch, known.whos)
            drawn.update(batch["who"].tolist())
        assert drawn == fresh


class Returns(Feature):
    """The rewards of this step and the next one, and the observation behind them; at the end of a trajectory, of what is left."""

    def arguments(self, n=2):
        return {"sampler": NStep(RandomSampler(), n, 0.5, traj_key="episode")}

    def broken(self):
        return self.arguments(3)

    def sound(self, batch, whos):
        assert set(batch["who"].tolist()) <= whos
        rewards = batch["next", "reward"].squeeze(-1).tolist()
        nexts = batch["next", "obs"].squeeze(-1).tolist()
        for who, step, reward, after in zip(batch["who"].tolist(), batch["step"].tolist(), rewards, nexts, strict=True):
            assert (reward, after) in ((step + 0.5 * (step + 1), who + 2), (step, who + 1))

    def check(self, rb, known):
        super().check(rb, known)
        for _ in range(LEAST):
            batch = rb.sample()
            for who, after in zip(batch["who"].tolist(), batch["next", "obs"].squeeze(-1).tolist(), strict=True):
                assert after == who + 1 + (who + 1 in known.whos)


class Sums(Feature):
    """The rewards from a step to the last one of its trajectory."""

    def arguments(self, gamma=0.5):
        return {"sampler": RewardToGo(RandomSampler(), gamma, traj_key="episode")}

    def broken(self):
        return self.arguments(1.0)

    def check(self, rb, known):
        super().check(rb, known)
        trajectories = by_trajectory(known.whos)
        for _ in range(LEAST):
            batch = rb.sample()
            for who, found in zip(batch["who"].tolist(), batch["reward_to_go"].squeeze(-1).tolist(), strict=True):
                last = trajectories[who // 100][-1]
                assert found == sum(0.5 ** (later - who) * (later % 100) for later in range(who, last + 1))


class Hindsights(Feature):
    """Half of a batch has the last state of its trajectory as the goal, and is rewarded by it."""

    strategy = "final"

    def arguments(self, strategy=None):
        sampler = Hindsight(
            RandomSampler(),
            reached,
            her_ratio=0.5,
            strategy=strategy or self.strategy,
            goal_key="goal",
            achieved_goal_key="obs",
            traj_key="episode",
        )
        return {"sampler": sampler}

    def broken(self):
        return self.arguments("random")

    def reopening(self):
        return self.arguments()

    def sound(self, batch, whos):
        assert set(batch["who"].tolist()) <= whos
        for key in ("goal", ("next", "reward")):
            assert batch[key].shape == (8, 1)
        goals, rewards = batch["goal"].squeeze(-1).tolist(), batch["next", "reward"].squeeze(-1).tolist()
        for who, goal, reward in zip(batch["who"].tolist()[:4], goals[:4], rewards[:4], strict=True):
            assert goal in whos
            assert who // 100 == goal // 100
            assert goal >= who
            assert reward == 100 * (goal == who)
        assert goals[4:] == [-1.0] * 4
        assert rewards[4:] == batch["step"][4:].tolist()

    def check(self, rb, known):
        expected = {
            (who, goal) for own in by_trajectory(known.whos).values() for who in own for goal in self.goals(who, own)
        }
        found = set()
        for _ in until(lambda: found >= expected, 4 * MOST):
            batch = rb.sample()
            self.sound(batch, known.whos)
            found.update(zip(batch["who"][:4].tolist(), batch["goal"][:4, 0].int().tolist(), strict=True))
        assert found == expected

    def goals(self, who, own):
        return own[-1:]


class LaterGoals(Hindsights):
    """As :class:`Hindsights`, with any state from this one on."""

    strategy = "future"

    def goals(self, who, own):
        return own[own.index(who) :]


class HerBuffer(LaterGoals):
    """As :class:`LaterGoals`, of TorchRL's class."""

    cls = HERReplayBuffer

    def arguments(self, strategy="future"):
        keys = {"goal_key": "goal", "achieved_goal_key": "obs"}
        return {"reward_fn": reached, "her_ratio": 0.5, "strategy": strategy, **keys}

    def broken(self):
        return self.arguments("final")

    def reopening(self):
        return {"sampler": Hindsight(RandomSampler(), **self.arguments())}


def reached(rows):
    """The rewards of a goal."""
    return 100.0 * (rows["goal"] == rows["obs"]).float()
