"""Families of losses over the counting environment: what acts, and what is learnt. Importing it needs torchrl."""

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl import objectives
from torchrl.data import Bounded, OneHot
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, observation, action):
        return self.layer(torch.cat([observation, action], -1))


def continuous():
    return Bounded(-1, 1, shape=(1,))


def critic():
    return ValueOperator(Critic(), in_keys=["observation", "action"])


def stochastic(**more):
    net = TensorDictModule(
        nn.Sequential(nn.Linear(3, 2), NormalParamExtractor()), in_keys=["observation"], out_keys=["loc", "scale"]
    )
    return ProbabilisticActor(net, in_keys=["loc", "scale"], distribution_class=TanhNormal, spec=continuous(), **more)


def deterministic():
    return TensorDictModule(nn.Sequential(nn.Linear(3, 1), nn.Tanh()), in_keys=["observation"], out_keys=["action"])


def dqn():
    actor = QValueActor(nn.Linear(3, 2), in_keys=["observation"], spec=OneHot(2))
    return OneHot(2), actor, objectives.DQNLoss(actor, action_space="one_hot", delay_value=True)


def ddpg():
    actor = deterministic()
    return continuous(), actor, objectives.DDPGLoss(actor, critic(), delay_value=True)


def td3():
    actor = deterministic()
    return continuous(), actor, objectives.TD3Loss(actor, critic(), bounds=(-1, 1), delay_qvalue=True)


def sac():
    actor = stochastic()
    return continuous(), actor, objectives.SACLoss(actor, critic(), delay_qvalue=True)


def iql():
    actor = stochastic()
    value = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    return continuous(), actor, objectives.IQLLoss(actor, critic(), value)


def cql():
    actor = stochastic()
    return continuous(), actor, objectives.CQLLoss(actor, critic())


FAMILIES = {
    "DQNTrainer": dqn,
    "DDPGTrainer": ddpg,
    "TD3Trainer": td3,
    "SACTrainer": sac,
    "IQLTrainer": iql,
    "CQLTrainer": cql,
}
