"""Actors and the learner of ``engram demo --nodes 2``, without Ray."""

import pytest
import torch

from engram.demo.actors import checksums
from engram.demo.learner import new_replay
from engram.demo.remote import Learner, Player


@pytest.fixture(params=["prioritized", "uniform"])
def replay(request, tmp_path):
    with new_replay(tmp_path / "replay", request.param, 2) as rb:
        yield rb


def player(replay, lane, seed=0):
    one = Player(lane, seed)
    one.attach(replay)
    return one


class Fails:
    """A buffer whose third write fails."""

    def __init__(self, replay):
        self.replay, self.writes = replay, 0

    def add(self, row, lane):
        self.writes += 1
        if self.writes == 3:
            raise ConnectionError
        return self.replay.add(row, lane=lane)


def test_a_player_acknowledges_what_it_wrote(replay):
    played = [player(replay, lane, lane).play(None, 0, 60) for lane in (0, 1)]
    for lane, one in enumerate(played):
        assert len(one.rows) == len(one.checksums) == len(one.times) == 60
        assert one.times == sorted(one.times)
        assert checksums(replay[one.rows]) == one.checksums
        half = replay.storage.max_size // 2
        assert {row // half for row in one.rows} == {lane}
        ended = replay[one.rows]["next", "done"]
        assert len(one.returns) == int(ended.sum()) > 0
    assert replay.write_count == 120


def test_a_player_explores_less_the_more_was_written_and_uses_the_policy(replay):
    learner = Learner(None, seed=0)
    with torch.no_grad():
        learner._agent._online[-1].weight.zero_()
        learner._agent._online[-1].bias.copy_(torch.tensor([0.0, 1.0]))
    one = player(replay, 0)
    right = []
    for written in (0, 100_000):
        rows = one.play(learner._agent.policy(), written, 100).rows
        right.append(float(replay[rows]["action"].float().mean()))
    assert right[0] < 0.8 < right[1]


def test_a_write_that_fails_ends_the_call_and_the_episode(replay):
    one = player(Fails(replay), 0)
    first, second = one.play(None, 0, 60), one.play(None, 0, 60)
    assert (len(first.rows), len(second.rows)) == (2, 60)
    rows = replay[[*first.rows, *second.rows]]
    assert not torch.equal(rows["observation"][2], rows["next", "observation"][1])
    assert not rows["next", "done"][1]


def test_a_learner_learns_from_one_batch_at_least_and_goes_on_with_a_policy(replay):
    player(replay, 0).play(None, 0, 60)
    learner = Learner(None, seed=0)
    before = learner._agent.policy()
    learner.attach(replay)
    learned = learner.learn(0.0)
    assert len(learned.times) >= 1
    assert not torch.equal(learned.policy, before)
    assert torch.equal(Learner(learned.policy, seed=1)._agent.policy(), learned.policy)


def test_rows_that_differ_are_named(replay):
    played = player(replay, 1).play(None, 0, 20)
    learner = Learner(None, seed=0)
    learner.attach(replay)
    assert learner.differing([], []) == []
    assert learner.differing(played.rows, played.checksums) == []
    sums = [*played.checksums[:7], 1 ^ played.checksums[7], *played.checksums[8:]]
    assert learner.differing(played.rows, sums) == [played.rows[7]]
    with pytest.raises(IndexError):
        learner.differing([played.rows[-1] + 1], [0])  # never written
