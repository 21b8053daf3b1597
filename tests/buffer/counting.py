"""An environment of TorchRL's. Importing it needs torchrl."""

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase


class Counting(EnvBase):
    """Its observation counts the steps of an episode of five."""

    def __init__(self, actions=None):
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded(shape=(3,)), shape=())
        self.action_spec = Bounded(-1, 1, shape=(1,)) if actions is None else actions
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict):
        self.step_number = 0
        return TensorDict({"observation": torch.zeros(3)}, [])

    def _step(self, tensordict):
        self.step_number += 1
        over = torch.tensor([self.step_number == 5])
        observation = torch.full((3,), float(self.step_number))
        return TensorDict({"observation": observation, "reward": torch.ones(1), "done": over, "terminated": over}, [])

    def _set_seed(self, seed):
        pass
