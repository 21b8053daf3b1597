"""What the samplers' state machines share: a buffer whose rows say where they belong, and the same rows as plain lists."""

import copy
import itertools
import pickle
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict

from engram import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from tests import stress

SETTINGS = settings(
    max_examples=stress.size(60, 2_000),
    stateful_step_count=30,
    phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],  # no explanations: they take minutes
    database=None,
    suppress_health_check=list(HealthCheck),
)


def stressed(case):
    """Mark a test case whose number of examples :data:`SETTINGS` says."""
    pytest.mark.stress(case)
    pytest.mark.timeout(stress.LIMIT_S)(case)


class Rings:
    """Of each lane the live rows with what they hold, oldest first."""

    def __init__(self, lanes, length):
        self.length = length
        self.lanes = [[] for _ in range(lanes)]
        self._next = [0] * lanes

    def append(self, lane, value):
        """The row that a new value of a lane goes to."""
        row = lane * self.length + self._next[lane]
        self._next[lane] = (self._next[lane] + 1) % self.length
        self.lanes[lane] = [*self.lanes[lane], (row, value)][-self.length :]
        return row

    def edit(self, row, value):
        lane = self.lanes[row // self.length]
        lane[[other for other, _ in lane].index(row)] = (row, value)

    def clear(self):
        self.__init__(len(self.lanes), self.length)

    def live(self):
        """What each live row holds, in row order."""
        return dict(sorted(itertools.chain.from_iterable(self.lanes)))

    def runs(self, ends):
        """The rows of each trajectory, lane by lane; ``ends(a, b)``: whether one ends between two rows that hold these."""
        runs = []
        for lane in self.lanes:
            for i, (row, value) in enumerate(lane):
                if i == 0 or ends(lane[i - 1][1], value):
                    runs.append([])
                runs[-1].append(row)
        return runs


class Step(NamedTuple):
    """What a row holds. No two rows ever hold the same."""

    lane: int
    episode: int
    step: int
    done: bool

    @property
    def where(self):
        return [self.lane, self.episode, self.step]


class StoreMachine(RuleBasedStateMachine):
    """Writes of every kind. Subclasses say which sampler, note what a write means for it, and draw."""

    #: Whether the rows may lie in a list, too.
    lists = False
    lane = st.integers(0, 2)

    def make_sampler(self, draw):
        raise NotImplementedError

    def wrote(self, rows):
        """These rows are new."""

    def edited(self, row, before):
        """This row holds something else than it held before, by the same write."""

    def emptied(self):
        """No row is live."""

    @initialize(lanes=st.integers(1, 3), length=st.integers(1, 9), data=st.data())
    def begin(self, lanes, length, data):
        self.rings = Rings(lanes, length)
        self.at = [(lane, 0) for lane in range(lanes)]  # episode and step that come next
        self.episodes = lanes
        listed = self.lists and lanes == 1 and data.draw(st.booleans())
        storage = ListStorage(length) if listed else LazyTensorStorage(lanes * length, lanes=lanes)
        self.rb = TensorDictReplayBuffer(
            storage=storage,
            sampler=self.make_sampler(data.draw),
            batch_size=3,
            generator=torch.Generator().manual_seed(0),
        )

    def new_episode(self):
        self.episodes += 1
        return self.episodes - 1

    def next_step(self, lane, done):
        episode, step = self.at[lane]
        self.at[lane] = (self.new_episode(), 0) if done else (episode, step + 1)
        return Step(lane, episode, step, done)

    @staticmethod
    def data(steps):
        return TensorDict(
            {
                "where": torch.tensor([step.where for step in steps]),
                "episode": torch.tensor([step.episode for step in steps]),
                "next": {"done": torch.tensor([[step.done] for step in steps])},
            },
            [len(steps)],
        )

    # ---- what may happen to the rows ---------------------------------------------------------------------------------

    @rule(lane=lane, done=st.booleans())
    def add(self, lane, done):
        step = self.next_step(lane % len(self.rings.lanes), done)
        row = self.rb.add(self.data([step])[0], lane=step.lane)
        assert row == self.rings.append(step.lane, step)
        self.wrote([row])

    @rule(lanes=lane | st.lists(lane, min_size=12, max_size=12), dones=st.lists(st.booleans(), min_size=1, max_size=12))
    def extend(self, lanes, dones):
        if isinstance(lanes, int):
            lane = lanes % len(self.rings.lanes)
            lanes = [lane] * len(dones)
        else:
            lanes = [lane % len(self.rings.lanes) for lane in lanes[: len(dones)]]
            lane = torch.tensor(lanes)
        steps = [self.next_step(*both) for both in zip(lanes, dones, strict=True)]
        rows = self.rb.extend(self.data(steps), lane=lane).tolist()
        assert rows == [self.rings.append(step.lane, step) for step in steps]
        self.wrote(rows)

    @precondition(lambda self: self.rings.live())
    @rule(data=st.data(), done=st.booleans(), beside=st.booleans())
    def edit(self, data, done, beside):
        """Another step in a row: of an episode of its own, or of one that may lie beside it."""
        row = data.draw(st.sampled_from(list(self.rings.live())))
        lane = row // self.rings.length
        of_lane = [step.episode for _, step in self.rings.lanes[lane]]
        unique = -self.new_episode()
        step = Step(lane, data.draw(st.sampled_from(of_lane)) if beside else unique, unique, done)
        self.rb[[row]] = self.data([step])
        before = self.rings.live()[row]
        self.rings.edit(row, step)
        self.edited(row, before)

    @precondition(lambda self: len(self.rings.live()) > len(self.rings.lanes) * self.rings.length // 2)
    @rule(keep=st.booleans(), refill=st.booleans())
    def empty(self, keep, refill):
        """``refill``: after which there are as many rows as before."""
        counts = [len(lane) for lane in self.rings.lanes]
        self.rb.empty(empty_write_count=not keep)
        self.rings.clear()
        self.emptied()
        for lane, n in enumerate(counts):
            if refill and n > 0:
                self.extend(lane, [False] * n)

    @rule(how=st.sampled_from([copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))]))
    def go_on_with_a_copy(self, how):
        self.rb = how(self.rb)

    # ---- what a draw shows -------------------------------------------------------------------------------------------

    def drawn(self, batch_size):
        """A batch that holds what its rows hold; its rows and info."""
        batch, info = self.rb.sample(batch_size, return_info=True)
        index = info["index"]
        rows = (index[0] if isinstance(index, tuple) else index).tolist()
        live = self.rings.live()
        assert set(rows) <= live.keys()
        assert batch["where"].tolist() == [live[row].where for row in rows]
        return rows, info


class TrajectoryMachine(StoreMachine):
    """Of samplers of windows: steps of one trajectory each, which ends by its flag, and where ids are looked at by its id."""

    def boundaries(self, draw):
        """The arguments of a sampler."""
        self.by_id, self.length, self.strict = draw(st.booleans()), draw(st.integers(1, 4)), draw(st.booleans())
        keys = {"traj_key": "episode" if self.by_id else "absent", "end_key": ("next", "done")}
        return {**keys, "slice_len": self.length, "strict_length": self.strict}

    def trajectories(self):
        return self.rings.runs(lambda a, b: a.done or (self.by_id and a.episode != b.episode))

    def starts(self):
        """The rows of each window that may be drawn, by its first row, and the number of its trajectory."""
        starts = {}
        for number, run in enumerate(self.trajectories()):
            if len(run) < self.length and not self.strict:
                starts[run[0]] = (run, number)
            for i in range(len(run) - self.length + 1):
                starts[run[i]] = (run[i : i + self.length], number)
        return starts

    def windows(self, windows):
        """First rows of so many windows that are drawn now, each of which may be, and the info of the batch."""
        rows, info = self.drawn(windows * self.length)
        starts, firsts, lasts = self.starts(), [], []
        while len(lasts) < len(rows):
            first = rows[len(lasts)]
            window, _ = starts[first]
            assert rows[len(lasts) : len(lasts) + len(window)] == window
            firsts.append(first)
            lasts += [row == window[-1] for row in window]
        assert info["next", "truncated"].flatten().tolist() == lasts
        return firsts, info
