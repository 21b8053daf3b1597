"""Rainbow on CartPole (Hessel et al., 2018, "Rainbow: combining improvements in deep reinforcement learning").

Double, dueling, categorical Q-learning with noisy layers. Priorities and returns of three steps are the replay's: a
``PrioritizedSampler`` in an ``NStep``. Rows stay single steps. Hyper-parameters are those of CleanRL's ``rainbow_atari.py``; those
that depend on the environment are of its ``c51.py``.
"""

import argparse
import math

import gymnasium
import torch
from torch import Tensor, nn

from engram import LazyTensorStorage, NStep, PrioritizedSampler, TensorDictReplayBuffer

ROWS, BATCH, WARMUP = 10_000, 128, 10_000
GAMMA, LEARNING_RATE = 0.99, 2.5e-4
LEARN_EVERY, FOLLOW_EVERY = 10, 500  # steps
STEPS_OF_RETURN, ALPHA, BETA, NOISE = 3, 0.5, 0.4, 0.5  # BETA: at first; 1 in the end
ATOMS = torch.linspace(-100, 100, 101)  # the values of a return


class NoisyLinear(nn.Linear):
    """Fortunato et al., 2018: weights with learned noise, which a factor for each input and one for each output make."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        bound = 1 / math.sqrt(inputs)
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)
        self.weight_noise = nn.Parameter(torch.full((outputs, inputs), NOISE * bound))
        self.bias_noise = nn.Parameter(torch.full((outputs,), NOISE * bound))

    def forward(self, x: Tensor) -> Tensor:
        """With new noise."""
        entering, leaving = (noise.sign() * noise.abs().sqrt() for noise in map(torch.randn, self.weight.shape[::-1]))
        weight = self.weight + self.weight_noise * leaving.outer(entering)
        return nn.functional.linear(x, weight, self.bias + self.bias_noise * leaving)


class Network(nn.Module):
    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 120), nn.ReLU())
        self.value = nn.Sequential(NoisyLinear(120, 84), nn.ReLU(), NoisyLinear(84, len(ATOMS)))
        self.advantage = nn.Sequential(NoisyLinear(120, 84), nn.ReLU(), NoisyLinear(84, actions * len(ATOMS)))
        self.actions = actions

    def forward(self, observation: Tensor) -> Tensor:
        """Log-probabilities ``[B, actions, atoms]``."""
        hidden = self.body(observation)
        advantage = self.advantage(hidden).unflatten(-1, (self.actions, -1))
        return (self.value(hidden).unsqueeze(-2) + advantage - advantage.mean(-2, keepdim=True)).log_softmax(-1)

    def best(self, observation: Tensor) -> Tensor:
        """The actions ``[B]`` of the highest mean return."""
        return (self(observation).exp() @ ATOMS).argmax(-1)


def projected(probabilities: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
    """The distribution of ``reward + discount * return``, each value shared between the two atoms around it: ``[B, atoms]``."""
    place = ((reward + discount * ATOMS).clamp(ATOMS[0], ATOMS[-1]) - ATOMS[0]) / (ATOMS[1] - ATOMS[0])
    below = place.long().clamp(max=len(ATOMS) - 2)
    upper = probabilities * (place - below)
    found = torch.zeros_like(probabilities).scatter_add_(1, below, probabilities - upper)
    return found.scatter_add_(1, below + 1, upper)


def train(steps: int, warmup: int, seed: int) -> None:
    priorities = PrioritizedSampler(ROWS, alpha=ALPHA, beta=BETA)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(ROWS), sampler=NStep(priorities, n=STEPS_OF_RETURN, gamma=GAMMA), batch_size=BATCH
    )
    env = rb.record(gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1")))
    torch.manual_seed(seed)
    env.action_space.seed(seed)
    online, target = (Network(env.observation_space.shape[0], int(env.action_space.n)) for _ in range(2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=LEARNING_RATE, eps=1.5e-4)
    rows = torch.arange(BATCH)

    observation, _ = env.reset(seed=seed)
    for step in range(1, steps + 1):
        if rb.write_count <= warmup:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = online.best(torch.from_numpy(observation)).item()  # the noise explores
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            print(f"step {step}: return {info['episode']['r']:.0f}")
            observation, _ = env.reset()

        if rb.write_count > warmup and step % LEARN_EVERY == 0:
            priorities.beta = BETA + (1 - BETA) * step / steps
            batch = rb.sample()
            following = batch["next"]  # three steps later, or where the episode ended
            with torch.no_grad():
                likely = target(following["observation"]).exp()[rows, online.best(following["observation"])]
                goal = projected(likely, following["reward"], batch["gamma"] * ~following["terminated"])
            guess = online(batch["observation"])[rows, batch["action"]]
            loss = -(goal * guess).sum(1)
            optimizer.zero_grad()
            (batch["priority_weight"] * loss).mean().backward()
            optimizer.step()
            batch["td_error"] = loss.detach()
            rb.update_tensordict_priority(batch)
        if step % FOLLOW_EVERY == 0:
            target.load_state_dict(online.state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="rows before it learns")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is so small that more threads make it slower
    train(arguments.steps, arguments.warmup, arguments.seed)


if __name__ == "__main__":
    main()
