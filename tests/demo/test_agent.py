"""The agent of the demo."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram.demo.agent import Agent


def batch(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    observation = torch.rand(n, 4, generator=g)
    action = torch.randint(2, (n,), generator=g)
    return TensorDict(
        {
            "observation": observation,
            "action": action,
            "next": {
                "observation": torch.rand(n, 4, generator=g),
                "reward": (action == (observation[:, 0] > 0.5).long()).float().unsqueeze(1),  # one action is right
                "terminated": torch.ones(n, 1, dtype=torch.bool),
                "truncated": torch.zeros(n, 1, dtype=torch.bool),
                "done": torch.ones(n, 1, dtype=torch.bool),
            },
        },
        batch_size=[n],
    )


def test_the_agent_learns_which_action_is_right():
    torch.manual_seed(0)
    agent = Agent()
    for seed in range(300):
        agent.learn(batch(128, seed))
    unseen = torch.rand(200, 4, generator=torch.Generator().manual_seed(1))
    unseen = unseen[(unseen[:, 0] - 0.5).abs() > 0.1]
    right = [agent.act(observation) == int(observation[0] > 0.5) for observation in unseen]
    assert np.mean(right) > 0.9


def test_only_steps_that_did_not_terminate_bootstrap():
    torch.manual_seed(0)
    ending, going_on = Agent(), Agent()
    going_on.load_policy(ending.policy())
    data = batch(32)
    data["next", "reward"] = torch.zeros(32, 1)
    other = data.clone()
    other["next", "terminated"] = torch.zeros(32, 1, dtype=torch.bool)
    assert ending.learn(data) != going_on.learn(other)


def losses_by_row(agent, data):
    """The loss of every row, each from an agent that has not learned yet."""
    losses = []
    for i in range(len(data)):
        fresh = Agent()
        fresh.load_policy(agent.policy())
        losses.append(fresh.learn(data[i : i + 1].clone()))
    return torch.tensor(losses)


def test_weights_multiply_the_losses():
    torch.manual_seed(0)
    agent, data = Agent(), batch(6)
    losses = losses_by_row(agent, data)
    assert len(losses.unique()) == 6
    weights = torch.tensor([1.0, 0.5, 0.25, 0.0, 0.1, 0.9])
    unweighted, weighted = Agent(), Agent()
    unweighted.load_policy(agent.policy())
    weighted.load_policy(agent.policy())
    assert unweighted.learn(data.clone()) == pytest.approx(float(losses.mean()))
    assert weighted.learn(data.clone().set("priority_weight", weights)) == pytest.approx(
        float((weights * losses).mean())
    )


def test_weights_of_zero_teach_nothing():
    torch.manual_seed(0)
    agent, same, other = Agent(), Agent(), Agent()
    same.load_policy(agent.policy())
    other.load_policy(agent.policy())
    same.learn(batch(8).set("priority_weight", torch.zeros(8)))
    other.learn(batch(8).set("priority_weight", torch.ones(8)))
    observations = batch(8)["observation"]
    before, unmoved, moved = (a._online(observations) for a in (agent, same, other))
    assert torch.equal(before, unmoved)
    assert not torch.equal(before, moved)


def test_learning_says_how_wrong_the_agent_was():
    torch.manual_seed(0)
    agent, data = Agent(), batch(16)  # every step ends its episode: the target is the reward
    with torch.no_grad():
        value = agent._online(data["observation"] * agent._scale).gather(1, data["action"].unsqueeze(1))
    agent.learn(data)
    torch.testing.assert_close(data["td_error"], (data["next", "reward"] - value).abs().squeeze(1))


def test_a_policy_acts_in_another_agent_as_in_the_first():
    torch.manual_seed(0)
    one, other = Agent(), Agent()
    observations = torch.randn(50, 4)
    assert [one.act(o) for o in observations] != [other.act(o) for o in observations]
    policy = one.policy()
    other.load_policy(policy.clone())
    assert [one.act(o) for o in observations] == [other.act(o) for o in observations]
    assert policy.untyped_storage().data_ptr() != one.policy().untyped_storage().data_ptr()
