"""Prioritized replay for Stable-Baselines3: draws, weights, and losses that are weighted by them."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("stable_baselines3")

from stable_baselines3 import DDPG, DQN, SAC, TD3

from engram.adapters.sb3 import (
    Prioritized,
    PrioritizedDQN,
    PrioritizedReplayBuffer,
    PrioritizedSAC,
    PrioritizedTD3,
    ReplayBuffer,
)
from tests.adapters.sb3_steps import BOX, DISCRETE, Steps

SMALL = {
    "buffer_size": 200,
    "learning_starts": 0,
    "batch_size": 16,
    "seed": 0,
    "device": "cpu",
    "policy_kwargs": {"net_arch": [8]},
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def filled(count=40, **keywords):
    buffer = PrioritizedReplayBuffer(100, BOX, DISCRETE, "cpu", **keywords)
    return buffer, Steps(BOX).fill(count, buffer)


def test_draws_and_weights_follow_the_priorities():
    """P(i) = (p_i + eps) ** alpha / sum, w_i = (N * P(i)) ** -beta, divided by the largest of the batch."""
    buffer, _ = filled(4, alpha=0.5, beta=0.7, eps=0.0)
    batch = buffer.sample(100)
    assert torch.equal(batch.weights, torch.ones(100, 1))
    priorities = np.array([1.0, 4.0, 9.0, 16.0])
    buffer.update_priorities(batch, -torch.tensor(priorities, dtype=torch.float32)[batch.rows])  # their size counts
    torch.manual_seed(0)
    batch = buffer.sample(50_000)
    chances = priorities**0.5 / (priorities**0.5).sum()
    shares = np.bincount(batch.rows, minlength=4) / 50_000
    assert np.abs(shares - chances).max() < 0.011  # five times the largest standard deviation
    weights = (4 * chances) ** -0.7
    np.testing.assert_allclose(batch.weights[:, 0], (weights / weights.max())[batch.rows], rtol=1e-4)
    buffer.beta = 0.0
    assert torch.equal(buffer.sample(100).weights, torch.ones(100, 1))


def test_a_step_that_was_overwritten_keeps_its_own_priority():
    buffer, _ = filled(100)
    batch = buffer.sample(64)
    Steps(BOX, seed=1).fill(100, buffer)
    buffer.update_priorities(batch, torch.full((64, 1), 1e6))
    assert buffer.rb.stats()["priority_updates_dropped"] == 64


def test_a_directory_keeps_priorities(tmp_path):
    buffer, _ = filled(20, scratch_dir=tmp_path / "replay", alpha=1.0, eps=0.0)
    for _ in range(5):
        batch = buffer.sample(100)
        buffer.update_priorities(batch, (batch.rows == 7).float())
    buffer.close()
    again = PrioritizedReplayBuffer(100, BOX, DISCRETE, "cpu", scratch_dir=tmp_path / "replay", alpha=1.0, eps=0.0)
    assert again.sample(50).rows.unique().tolist() == [7]
    again.close()


def test_n_steps_once_and_weights():
    buffer = PrioritizedReplayBuffer(100, BOX, DISCRETE, "cpu", 2, True, n_steps=3, gamma=0.9)
    Steps(BOX, n=2).fill(20, buffer)
    batch = buffer.sample(32)
    assert batch.discounts.min() == pytest.approx(0.9**3)
    buffer.update_priorities(batch, torch.rand(32))


def test_a_buffer_without_priorities_in_return_warns_once():
    buffer, _ = filled()
    for _ in range(99):
        buffer.sample(2)
    with pytest.warns(UserWarning, match=r"100 batches were drawn, and no priorities came back.*PrioritizedDQN"):
        buffer.sample(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(150):
            buffer.sample(2)


# ---- losses --------------------------------------------------------------------------------------------------------------


def model_of(cls, **keywords):
    return cls("MlpPolicy", "CartPole-v1" if issubclass(cls, DQN) else "Pendulum-v1", **copy.deepcopy(SMALL | keywords))


def prepared(cls, **keywords):
    """A model with 64 steps, of different priorities, that has not learned."""
    model = model_of(cls, gradient_steps=0, **keywords)
    model.learn(64, log_interval=None)
    buffer = model.replay_buffer
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        batch = buffer.sample(32)
        buffer.update_priorities(batch, torch.rand(32, generator=generator) * 3 + 0.1)
    return model


def the_batch(model, seed):
    """What the model is going to draw."""
    torch.manual_seed(seed)
    batch = model.replay_buffer.sample(16)
    assert batch.weights.min() < 0.9
    torch.manual_seed(seed)
    return batch


def test_dqn_takes_the_gradient_of_the_weighted_loss():
    model = prepared(PrioritizedDQN)
    batch = the_batch(model, 5)
    by_hand = copy.deepcopy(model.q_net)
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=1e-4)
    with torch.no_grad():
        best = model.q_net_target(batch.next_observations).max(1, keepdim=True).values
        target = batch.rewards + (1 - batch.dones) * 0.99 * best
    error = by_hand(batch.observations).gather(1, batch.actions) - target
    huber = torch.where(error.abs() < 1, 0.5 * error**2, error.abs() - 0.5)
    (batch.weights * huber).mean().backward()
    torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 10)
    optimizer.step()
    model.train(1, 16)
    for ours, wanted in zip(model.q_net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-7)
    check_priorities(model, batch, error)


def target_of(model, batch):
    """What SAC and TD3 learn, in their order of random numbers (Haarnoja et al. 2018; Fujimoto et al. 2018)."""
    with torch.no_grad():
        if isinstance(model, SAC):
            model.actor.action_log_prob(batch.observations)  # for the temperature and the actor
            action, log_prob = model.actor.action_log_prob(batch.next_observations)
            entropy = -model.log_ent_coef.exp() * log_prob.reshape(-1, 1)
        else:
            noise = batch.actions.clone().normal_(0, 0.2).clamp(-0.5, 0.5)
            action, entropy = (model.actor_target(batch.next_observations) + noise).clamp(-1, 1), 0
        value = torch.cat(model.critic_target(batch.next_observations, action), 1).amin(1, keepdim=True)
        return batch.rewards + (1 - batch.dones) * 0.99 * (value + entropy)


@pytest.mark.parametrize(("cls", "scale"), [(PrioritizedSAC, 0.5), (PrioritizedTD3, 1.0)])
def test_critics_take_the_gradient_of_the_weighted_loss(cls, scale):
    model = prepared(cls)
    torch.manual_seed(5)
    batch = model.replay_buffer.sample(16)
    assert batch.weights.min() < 0.9
    target = target_of(model, batch)
    by_hand = copy.deepcopy(model.critic)
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=model.learning_rate)
    errors = [guess - target for guess in by_hand(batch.observations, batch.actions)]
    (scale * sum((batch.weights * error**2).mean() for error in errors)).backward()
    optimizer.step()
    torch.manual_seed(5)
    model.train(1, 16)
    for ours, wanted in zip(model.critic.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-7)
    check_priorities(model, batch, torch.stack(errors).abs().amax(0))


def check_priorities(model, batch, error):
    """The rows that were drawn have the absolute errors for priorities: of one that was drawn twice, the last."""
    leaves = model.replay_buffer.rb.sampler.priorities().leaves(64)
    wanted = dict(zip(batch.rows.tolist(), (error.detach().abs().flatten().double() + 1e-6).tolist(), strict=True))
    for row, priority in wanted.items():
        assert leaves[row] == pytest.approx(priority**0.6, rel=1e-4)


@pytest.mark.parametrize("cls", [PrioritizedDQN, PrioritizedSAC, PrioritizedTD3])
def test_weights_of_one_change_nothing(cls):
    """With ``beta=0`` the steps that are learned from are the algorithm's own."""
    plain = next(base for base in cls.__mro__ if base in (DQN, SAC, TD3))

    model = prepared(cls, replay_buffer_kwargs={"beta": 0.0})
    keep = copy.deepcopy(model.get_parameters())
    rows = copy.deepcopy(model.replay_buffer)
    results = []
    for train in (cls.train, plain.train):
        model.set_parameters(keep)
        model._n_updates = 0
        model.replay_buffer = copy.deepcopy(rows)
        torch.manual_seed(3)
        train(model, 1, 16)
        results.append([p.detach().clone() for p in model.policy.parameters()])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-7)


# ---- the classes ---------------------------------------------------------------------------------------------------------


def test_beta_goes_to_its_end():
    model = PrioritizedDQN(
        "MlpPolicy", "CartPole-v1", final_beta=1.0, replay_buffer_kwargs={"beta": 0.5}, **copy.deepcopy(SMALL)
    )
    betas = []
    model.learn(100, callback=lambda *_: betas.append(model.replay_buffer.beta) or True)
    assert betas[0] == 0.5
    assert betas == sorted(betas)
    assert betas[-1] == pytest.approx(1, abs=0.05)


def test_steps_and_gamma_reach_the_buffer_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = PrioritizedDQN("MlpPolicy", "CartPole-v1", n_steps=3, gamma=0.9, **copy.deepcopy(SMALL))
    assert (model.n_steps, model.replay_buffer.n_steps, model.replay_buffer.gamma) == (3, 3, 0.9)
    model.learn(40)
    assert model.replay_buffer.drawn.discounts.min() == pytest.approx(0.9**3)


@pytest.mark.parametrize("cls", [PrioritizedDQN, PrioritizedSAC, PrioritizedTD3])
def test_saved_models_go_on(cls, tmp_path):
    model = model_of(cls, replay_buffer_kwargs={"scratch_dir": tmp_path / "replay"}, final_beta=0.9)
    model.learn(40)
    model.save(tmp_path / "model")
    size = model.replay_buffer.size()
    model.replay_buffer.close()
    again = cls.load(tmp_path / "model", env=model.env)
    assert (again.replay_buffer.size(), again.final_beta) == (size, 0.9)
    again.learn(20, reset_num_timesteps=False)
    again.replay_buffer.close()


def test_another_algorithm_takes_the_mixin():
    class PrioritizedDDPG(Prioritized, DDPG):
        loss = functional.mse_loss

    model = model_of(PrioritizedDDPG)
    model.learn(40)
    assert model.replay_buffer.rb.stats()["priority_max"] > 1  # errors of a pendulum


def test_a_loss_that_is_not_called():
    class Mistaken(Prioritized, DDPG):
        loss = functional.smooth_l1_loss

    model = model_of(Mistaken)
    with pytest.raises(
        RuntimeError, match=r"Mistaken: train: expected a call of smooth_l1_loss for each of \d+ batches, got 0"
    ):
        model.learn(40)


def test_another_buffer_class():
    with pytest.raises(TypeError, match=r"PrioritizedDQN: replay_buffer_class: expected PrioritizedReplayBuffer"):
        PrioritizedDQN("MlpPolicy", "CartPole-v1", replay_buffer_class=ReplayBuffer)
    with pytest.raises(TypeError, match="normalise"):
        PrioritizedReplayBuffer(10, BOX, DISCRETE, normalise="batch")
    with pytest.raises(ValueError, match="normalize: expected 'store' or 'batch'"):
        PrioritizedReplayBuffer(10, BOX, DISCRETE, normalize="all")
