"""Loops of whole families, run twice: with TorchRL's buffer and with engram's, from the same seeds.

Where the order of the rows is fixed, every loss is the same. Where it is drawn, each batch is compared with what was
written. The buffers draw from generators of their own, so what is collected depends on the losses alone.
"""

import copy
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import engram

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    rl = pytest.importorskip("torchrl.data")
    from torchrl import objectives
    from torchrl.collectors import Collector
    from torchrl.envs import SerialEnv, transforms
    from torchrl.modules import ValueOperator
    from torchrl.objectives.value import GAE

    from tests.buffer.counting import Counting
    from tests.buffer.families import FAMILIES, continuous, stochastic

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's own


def theirs(size, **arguments):
    """TorchRL's buffer."""
    return made(rl, rl.LazyTensorStorage(size), **arguments)


@pytest.fixture(params=["RAM", "shared", "directory"])
def ours(request, tmp_path):
    """Makes engram's buffers: in RAM, shared, and in a directory."""

    def make(size, **arguments):
        if request.param == "directory":
            return made(engram, engram.LazyMemmapStorage(size, scratch_dir=tmp_path / "store"), **arguments)
        return made(engram, engram.LazyTensorStorage(size), shared=request.param == "shared", **arguments)

    return make


def made(library, storage, *, sampler, batch_size=8, more=None, **arguments):
    """A buffer that draws from a generator of its own; ``sampler`` names the class, ``more`` its arguments."""
    return library.TensorDictReplayBuffer(
        storage=storage,
        sampler=getattr(library, sampler)(**more or {}),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(5),
        **arguments,
    )


class Learner:
    """A loss module and its optimizer; it keeps every loss."""

    def __init__(self, loss, update_target=lambda: None):
        self.loss, self.update_target = loss, update_target
        self.optimizer = torch.optim.Adam(loss.parameters(), 1e-2)
        self.losses = []

    def learn(self, batch):
        values = self.loss(batch)
        total = sum(value for key, value in values.items() if key.startswith("loss"))
        self.losses.append(total.item())
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        self.update_target()


def check_same(losses, expected, number):
    assert len(losses) == len(expected) == number
    assert torch.tensor(losses).isfinite().all()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert len(set(losses)) > number // 2  # something is learnt


# ---- Off-policy: DQN, DDPG, TD3, SAC, IQL, CQL ---------------------------------------------------------------------


def off_policy(name, make):
    torch.manual_seed(1)
    actions, actor, loss = FAMILIES[name]()
    updater = [] if name == "IQLTrainer" else [objectives.SoftUpdate(loss, eps=0.9)]
    learner = Learner(loss, lambda: [each.step() for each in updater])
    rb = make(24, sampler="SamplerWithoutReplacement", more={"shuffle": False})
    drawn = []
    for batch in Collector(Counting(actions), actor, frames_per_batch=10, total_frames=60):
        rb.extend(batch.reshape(-1))
        for _ in range(3):
            rows = rb.sample()
            drawn.append(rows.select("observation", "action", "next", "index").clone())
            learner.learn(rows)
            rb.update_tensordict_priority(rows)
    return learner.losses, drawn


@pytest.mark.parametrize("name", FAMILIES)
def test_off_policy_losses_are_those_with_torchrls_buffer(name, ours):
    losses, rows = off_policy(name, ours)
    expected_losses, expected = off_policy(name, theirs)
    check_same(losses, expected_losses, 18)
    for one, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(one.to_dict(), other.select(*one.keys(True, True)).to_dict())


# ---- On-policy: PPO, A2C -------------------------------------------------------------------------------------------


def on_policy(kind):
    torch.manual_seed(2)
    actor = stochastic(return_log_prob=True)
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    loss = {"ppo": objectives.ClipPPOLoss, "a2c": objectives.A2CLoss}[kind](actor, critic)
    collector = Collector(SerialEnv(2, lambda: Counting(continuous())), actor, frames_per_batch=20, total_frames=60)
    return collector, GAE(gamma=0.9, lmbda=0.8, value_network=critic), Learner(loss)


def numbered(data, first):
    """The batch in one row of steps, each with a number."""
    return data.reshape(-1).set("number", torch.arange(first, first + data.numel()))


def epoch_of(rb, learner, numbers):
    """All batches until the epoch ends: each row is in one of them."""
    found = []
    for batch in rb:
        assert batch["advantage"].shape == batch["value_target"].shape == (len(batch), 1)
        found += batch["number"].tolist()
        learner.learn(batch)
    assert len(found) == len(numbers)
    assert sorted(found) == numbers
    return found


def ppo_by_extend(rb, collector, advantage, learner):
    """As in TorchRL's recipe: the advantage is computed in each epoch, and the rows are written over those of the last one."""
    orders = []
    for at, data in enumerate(collector):
        for _ in range(3):
            with torch.no_grad():
                data = advantage(data)
            rb.extend(numbered(data, 20 * at))
            assert len(rb) == 20
            orders.append(epoch_of(rb, learner, list(range(20 * at, 20 * at + 20))))
    return orders


def ppo_by_assignment(rb, collector, advantage, learner):
    """As in TorchRL's tutorial on value targets: rows are written without advantages, which come later as new fields."""
    orders = []
    for at, data in enumerate(collector):
        rb.empty()
        rb.extend(numbered(data, 20 * at))
        for _ in range(3):
            with torch.no_grad():
                rows = advantage(rb[:].clone().reshape(2, 10))
            rb[:] = rows.reshape(-1)
            orders.append(epoch_of(rb, learner, list(range(20 * at, 20 * at + 20))))
    return orders


def a2c(rb, collector, advantage, learner):
    """As in TorchRL's recipe: the buffer is emptied, and there is one epoch."""
    orders = []
    for at, data in enumerate(collector):
        with torch.no_grad():
            data = advantage(data)
        rb.empty()
        rb.extend(numbered(data, 20 * at))
        orders.append(epoch_of(rb, learner, list(range(20 * at, 20 * at + 20))))
    return orders


LOOPS = {"ppo by extend": ("ppo", ppo_by_extend), "ppo by assignment": ("ppo", ppo_by_assignment), "a2c": ("a2c", a2c)}


def run_on_policy(name, make, *, shuffle):
    kind, loop = LOOPS[name]
    collector, advantage, learner = on_policy(kind)
    rb = make(20, sampler="SamplerWithoutReplacement", more={"shuffle": shuffle})
    return loop(rb, collector, advantage, learner), learner.losses


@pytest.mark.parametrize("name", LOOPS)
def test_on_policy_losses_are_those_with_torchrls_buffer(name, ours):
    _, losses = run_on_policy(name, ours, shuffle=False)
    _, expected = run_on_policy(name, theirs, shuffle=False)
    check_same(losses, expected, 9 if name == "a2c" else 27)


@pytest.mark.parametrize("name", LOOPS)
def test_each_row_comes_once_in_a_shuffled_epoch(name, ours):
    orders, losses = run_on_policy(name, ours, shuffle=True)
    assert torch.tensor(losses).isfinite().all()
    assert len(losses) == 3 * len(orders)  # 8, 8 and the last 4
    orders = [tuple(number % 20 for number in order) for order in orders]
    assert len(set(orders)) == len(orders) > 1
    assert tuple(range(20)) not in orders
