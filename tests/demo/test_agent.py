"""The agent of the demo."""

import torch
from tensordict import TensorDict

from examples.demo.agent import SCALE, Agent


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


def copied(agent):
    other = Agent()
    other.load_state_dict(agent.state_dict())
    return other


def test_the_agent_learns_which_action_is_right():
    torch.manual_seed(0)
    agent = Agent()
    for seed in range(300):
        agent.learn(batch(128, seed))
    unseen = torch.rand(200, 4, generator=torch.Generator().manual_seed(1))
    unseen = unseen[(unseen[:, 0] - 0.5).abs() > 0.1]
    right = agent.online(unseen * SCALE).argmax(1) == (unseen[:, 0] > 0.5)
    assert float(right.float().mean()) > 0.9


def test_only_steps_that_did_not_terminate_bootstrap():
    torch.manual_seed(0)
    agent, data = Agent(), batch(32)
    data["next", "reward"] = torch.zeros(32, 1)
    other = data.clone()
    other["next", "terminated"] = torch.zeros(32, 1, dtype=torch.bool)
    copied(agent).learn(data)
    copied(agent).learn(other)
    assert not torch.equal(data["td_error"], other["td_error"])


def test_weights_of_zero_teach_nothing():
    torch.manual_seed(0)
    agent = Agent()
    same, other = copied(agent), copied(agent)
    same.learn(batch(8).set("priority_weight", torch.zeros(8)))
    other.learn(batch(8).set("priority_weight", torch.ones(8)))
    observations = batch(8)["observation"]
    before, unmoved, moved = (a.online(observations) for a in (agent, same, other))
    assert torch.equal(before, unmoved)
    assert not torch.equal(before, moved)


def test_learning_says_how_wrong_the_agent_was():
    torch.manual_seed(0)
    agent, data = Agent(), batch(16)  # every step ends its episode: the target is the reward
    with torch.no_grad():
        value = agent.online(data["observation"] * SCALE).gather(1, data["action"].unsqueeze(1))
    agent.learn(data)
    torch.testing.assert_close(data["td_error"], (data["next", "reward"] - value).abs().squeeze(1))
