"""Actors of the demo, and the check of what a dead one wrote."""

from types import SimpleNamespace

import pytest
import torch

from examples.demo.agent import Agent, checksums
from examples.demo.learner import Actor, new_replay, verify


@pytest.fixture
def replay(tmp_path):
    rb = new_replay(tmp_path / "replay", 200)  # 100 rows a lane
    yield rb
    rb.close()


def written(replay, *, steps, acknowledged, lane=1):
    """An actor that wrote some rows and acknowledged the first of them."""
    rows = []
    for _, (row, episode_return) in zip(range(steps), Agent().play(0, lambda: 0), strict=False):
        (checksum,) = checksums(row.unsqueeze(0))
        rows.append((replay.add(row, lane=lane), checksum, 0.0, episode_return))
    return SimpleNamespace(lane=lane, process=SimpleNamespace(pid=4711), acknowledged=rows[:acknowledged])


def test_an_actor_that_raises_ends_with_another_exit_code(tmp_path):
    replay = new_replay(tmp_path / "replay", 2)
    actor = Actor(replay, Agent(), lane=2, seed=0)  # there is no lane 2
    actor.channel.send(1)
    assert actor.channel.poll(60)
    with pytest.raises(EOFError):
        actor.channel.recv()
    actor.process.join(60)
    assert actor.process.exitcode == 1
    replay.close()


def test_an_actor_uses_what_the_learner_learns(tmp_path):
    """Once the actor has opened its buffer, its network turns from one that goes left to one that goes right."""
    replay = new_replay(tmp_path / "replay", 1)
    agent = Agent()
    torch.nn.utils.vector_to_parameters(torch.zeros(70_000), agent.online.parameters())
    replay.extend(torch.stack([next(agent.play(0, lambda: 0))[0]] * 4_000), lane=0)  # little is left to chance
    actor, taken = Actor(replay, agent, lane=0, seed=0), []
    for bias in ([1.0, 0.0], [0.0, 1.0]):
        with torch.no_grad():
            agent.online[-1].bias.copy_(torch.tensor(bias))
        actor.channel.send(40)
        rows = [actor.channel.recv()[0] for _ in range(40)]
        taken.append(float(replay[rows]["action"].float().mean()))
    actor.channel.close()
    actor.process.join(60)
    replay.close()
    assert taken[0] < 0.3
    assert taken[1] > 0.7


def test_the_rows_of_a_dead_actor_are_found(replay):
    assert verify(replay, written(replay, steps=0, acknowledged=0)) == 0
    assert verify(replay, written(replay, steps=5, acknowledged=5)) == 5


def test_a_row_that_was_not_acknowledged_is_not_expected(replay):
    assert verify(replay, written(replay, steps=5, acknowledged=4)) == 4


@pytest.mark.parametrize("begun", [0, 1])
def test_a_full_lane_may_have_lost_its_oldest_row_to_the_one_begun_last(replay, begun):
    assert verify(replay, written(replay, steps=230 + begun, acknowledged=230)) == 99


def test_a_changed_row_is_noticed(replay):
    dead = written(replay, steps=5, acknowledged=5)
    replay.set_at_("action", 1 - replay[102]["action"].unsqueeze(0), [102])
    with pytest.raises(RuntimeError, match=r"Rows \[102\] are not what process 4711 wrote"):
        verify(replay, dead)


def test_a_missing_row_is_noticed(replay):
    dead = written(replay, steps=5, acknowledged=5)
    dead.acknowledged.append((105, *dead.acknowledged[-1][1:]))
    with pytest.raises(IndexError, match="105"):
        verify(replay, dead)


def test_the_same_seed_plays_the_same_episodes():
    torch.manual_seed(0)
    agent, runs = Agent(), []
    for seed in (5, 5, 6):
        rows = [row for _, (row, _) in zip(range(60), agent.play(seed, lambda: 0), strict=False)]
        runs.append(torch.stack([row["observation"] for row in rows]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_checksums_depend_on_every_field(replay):
    row, _ = next(Agent().play(0, lambda: 0))
    rows = torch.stack([row] * 8).contiguous()
    for i, key in enumerate(sorted(row.keys(True, True), key=str)):
        rows[key][i] = 1 - rows[key][i].to(torch.float32)
    assert len(set(checksums(rows))) == 8, "seven changed in one field each, one as it was"
