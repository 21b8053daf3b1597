"""Loops of whole families, run twice: with TorchRL's buffer and with engram's, from the same seeds.

Where the order of the rows is fixed, every loss is the same. Where it is drawn, each batch is compared with what was
written. The buffers draw from generators of their own, so what is collected depends on the losses alone.
"""

import itertools
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
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


def theirs(size, ndim=1, **arguments):
    """TorchRL's buffer."""
    return made(rl, rl.LazyTensorStorage(size, ndim=ndim), **arguments)


@pytest.fixture(params=["RAM", "shared", "directory"])
def ours(request, tmp_path):
    """Makes engram's buffers: in RAM, shared, and in a directory."""

    def make(size, ndim=1, **arguments):
        if request.param == "directory":
            return made(engram, engram.LazyMemmapStorage(size, scratch_dir=tmp_path / "store", ndim=ndim), **arguments)
        return made(engram, engram.LazyTensorStorage(size, ndim=ndim), shared=request.param == "shared", **arguments)

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


EPOCHS = itertools.count()


def begin_epoch(rb, **more):
    """Of all rows that are there. By itself a sampler of ours goes on with those of its epoch, TorchRL's with those of the storage."""
    if isinstance(rb, engram.ReplayBuffer):  # a store keeps the epoch of each name
        more["index"] = f"epoch{next(EPOCHS)}"
    rb.set_sampler(type(rb.sampler)(**more))
    if not isinstance(rb, engram.ReplayBuffer):
        rb.set_rng(rb._rng)  # else a new sampler of TorchRL's takes numbers from the actor's generator


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
        begin_epoch(rb, shuffle=False)
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


def test_another_order_gives_other_losses():
    """That the comparison sees a difference."""
    _, losses = run_on_policy("a2c", theirs, shuffle=False)
    _, others = run_on_policy("a2c", theirs, shuffle=True)
    with pytest.raises(AssertionError):
        check_same(others, losses, 9)


# ---- Offline data: decision transformer ----------------------------------------------------------------------------

EPISODES, LENGTH, STACKED = 9, 12, 4


def episodes():
    """Offline data in rows that are whole episodes, as data sets with ``split_trajs=True`` are."""
    noise = torch.Generator().manual_seed(3)
    done = (torch.arange(LENGTH) == LENGTH - 1).expand(EPISODES, LENGTH).unsqueeze(-1)
    return TensorDict(
        {
            "observation": torch.randn(EPISODES, LENGTH, 3, generator=noise),
            "action": torch.randn(EPISODES, LENGTH, 1, generator=noise),
            "number": torch.arange(EPISODES * LENGTH).reshape(EPISODES, LENGTH),
            "next": {
                "reward": torch.randint(-3, 9, (EPISODES, LENGTH, 1), generator=noise).float(),
                "done": done,
                "terminated": done,
            },
        },
        [EPISODES, LENGTH],
    )


def returns_to_go():
    """The sum of the rewards from each step on, by a loop over plain numbers."""
    found = []
    for rewards in episodes()["next", "reward"].squeeze(-1).tolist():
        found += [sum(rewards[at:]) for at in range(LENGTH)]
    return torch.tensor(found)


def decision_maker():
    torch.manual_seed(4)

    class Causal(nn.Module):
        """An action from each step's own and earlier ones."""

        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, observation, to_go):
            return self.head(self.cells(torch.cat([observation, to_go], -1))[0])

    actor = TensorDictModule(Causal(), in_keys=["observation", "return_to_go"], out_keys=["action"])
    return Learner(objectives.DTLoss(actor))


def check_windows(batch):
    """Steps that follow one another in one episode, with their returns."""
    numbers = batch["number"]
    assert (numbers == numbers[:, :1] + torch.arange(numbers.shape[1])).all()
    assert (numbers // LENGTH == numbers[:, :1] // LENGTH).all()
    torch.testing.assert_close(batch["return_to_go"].squeeze(-1), returns_to_go()[numbers])
    torch.testing.assert_close(
        batch["observation"].flatten(0, 1), episodes().reshape(-1)["observation"][numbers.flatten()]
    )


def decision_transformer(library, make):
    """As in TorchRL's recipe: returns are written for all episodes at once; a step is a piece of each episode drawn."""
    learner, numbers = decision_maker(), []
    rb = make(EPISODES, sampler="SamplerWithoutReplacement", more={"shuffle": False, "drop_last": True}, batch_size=4)
    rb.extend(episodes())
    to_go = transforms.Reward2GoTransform(gamma=1.0, out_keys=["return_to_go"])
    whole = to_go.inv(rb[:].clone())
    rb._storage = library.TensorStorage(whole)
    rb.append_transform(to_go)
    rb.append_transform(transforms.RandomCropTensorDict(sub_seq_len=STACKED, sample_dim=-1))
    for _ in range(8):
        batch = rb.sample()
        assert batch.shape == (4, STACKED)
        check_windows(batch)
        numbers.append(batch["number"].tolist())
        learner.learn(batch)
    return learner.losses, numbers


def test_decision_transformer_of_whole_episodes(ours):
    losses, numbers = decision_transformer(engram, ours)
    expected_losses, expected = decision_transformer(rl, theirs)
    assert numbers == expected
    check_same(losses, expected_losses, 8)


def decision_transformer_of_slices(make, sampler, more):
    """Episodes one after the other, of which windows of steps are drawn; returns are computed as they are written."""
    learner, numbers = decision_maker(), []
    length = more["slice_len"]
    rb = make(EPISODES * LENGTH, sampler=sampler, more={"traj_key": "episode", **more}, batch_size=3 * length)
    rb.append_transform(transforms.Reward2GoTransform(gamma=1.0, out_keys=["return_to_go"]))
    data = episodes()
    data["episode"] = torch.arange(EPISODES).unsqueeze(-1).expand(EPISODES, LENGTH)
    rb.extend(data.reshape(-1))
    for _ in range(10):
        batch = rb.sample().reshape(-1, length)
        check_windows(batch)
        numbers.append(batch["number"].tolist())
        learner.learn(batch)
    return learner.losses, numbers


def test_decision_transformer_of_slices_in_order(ours):
    more = {"slice_len": LENGTH, "shuffle": False}
    losses, numbers = decision_transformer_of_slices(ours, "SliceSamplerWithoutReplacement", more)
    expected_losses, expected = decision_transformer_of_slices(theirs, "SliceSamplerWithoutReplacement", more)
    assert numbers == expected
    check_same(losses, expected_losses, 10)


@pytest.mark.parametrize("sampler", ["SliceSampler", "SliceSamplerWithoutReplacement"])
def test_decision_transformer_of_slices_that_are_drawn(ours, sampler):
    losses, numbers = decision_transformer_of_slices(ours, sampler, {"slice_len": STACKED})
    assert torch.tensor(losses).isfinite().all()
    drawn = [window[0] // LENGTH for batch in numbers for window in batch]
    assert len(drawn) == 30
    if sampler == "SliceSampler":
        return
    for first in range(0, 27, EPISODES):  # each episode once
        assert sorted(drawn[first : first + EPISODES]) == list(range(EPISODES))


# ---- Windows for a world model: Dreamer ----------------------------------------------------------------------------


def world_model():
    torch.manual_seed(6)

    class Latent(nn.Module):
        """A state from the actions and observations so far, and from it the reward and the next observation."""

        def __init__(self):
            super().__init__()
            self.cells, self.decoder, self.reward = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, batch):
            state, _ = self.cells(torch.cat([batch["observation"], batch["action"]], -1))
            real = batch.get("real", torch.ones(batch.shape, dtype=torch.bool))
            return {
                "loss_observation": (self.decoder(state) - batch["next", "observation"])[real].square().mean(),
                "loss_reward": (self.reward(state) - batch["next", "reward"])[real].square().mean(),
            }

    return Learner(Latent())


def check_world(windows):
    """Steps that follow one another in one episode of the counting environment, of one of its copies."""
    steps = windows["observation"][..., 0]
    assert (steps == steps[:, :1] + torch.arange(steps.shape[1])).all()
    assert (windows["next", "observation"][..., 0] == steps + 1).all()
    trajectories = windows["collector", "traj_ids"]
    assert (trajectories == trajectories[:, :1]).all()


def dreamer(make, sampler, more, *, size):
    """As in TorchRL's recipe: a collector of several environments, rows by columns and time, windows that are cut from them."""
    learner, drawn = world_model(), []
    torch.manual_seed(7)
    actor = stochastic()
    length = more["slice_len"]
    traj_key = ("collector", "traj_ids")
    rb = make(size, ndim=2, sampler=sampler, more={"traj_key": traj_key, **more}, batch_size=4 * length)
    for data in Collector(SerialEnv(2, lambda: Counting(continuous())), actor, frames_per_batch=20, total_frames=100):
        rb.extend(data)
        if "shuffle" in more:
            begin_epoch(rb, traj_key=traj_key, **more)
        for _ in range(2):
            windows = rb.sample().reshape(-1, length)
            check_world(windows)
            drawn.append(windows["collector", "traj_ids"][:, 0].tolist())
            learner.learn(windows)
    return learner.losses, drawn


def test_dreamers_windows_in_order(ours):
    more = {"slice_len": 5, "shuffle": False}
    # Until the ring is full: from then on the order is engram's, oldest first.
    losses, drawn = dreamer(ours, "SliceSamplerWithoutReplacement", more, size=100)
    expected_losses, expected = dreamer(theirs, "SliceSamplerWithoutReplacement", more, size=100)
    assert drawn == expected
    check_same(losses, expected_losses, 10)


@pytest.mark.parametrize(("size", "more"), [(24, {}), (100, {"strict_length": False, "cache_values": False})], ids=str)
def test_dreamers_windows_that_are_drawn(ours, size, more):
    losses, drawn = dreamer(ours, "SliceSampler", {"slice_len": 4, **more}, size=size)
    assert torch.tensor(losses).isfinite().all()
    assert len(losses) == 10
    assert {len(each) for each in drawn} == {4}


def dreamer_by_sequences(library, make):
    """Windows around the rows of a sampler, padded where an episode ends."""
    learner, drawn = world_model(), []
    torch.manual_seed(7)
    actor = stochastic()
    unit = library.Sequence(length=3, burn_in=1, bootstrap=1)
    rb = make(30, sampler="SamplerWithoutReplacement", more={"shuffle": False}, batch_size=6, sample_unit=unit)
    for data in Collector(Counting(continuous()), actor, frames_per_batch=10, total_frames=50):
        rb.extend(data)
        begin_epoch(rb, shuffle=False)
        for _ in range(2):
            rows, info = rb.sample(return_info=True)
            windows = rows.reshape(-1, 5)
            windows["real"] = info["validity_mask"].reshape(-1, 5)
            for window in windows:
                check_world(window[window["real"]].unsqueeze(0))
            drawn.append(
                (windows["observation"][..., 0].tolist(), windows["real"].tolist(), info["learning_mask"].tolist())
            )
            learner.learn(windows)
    return learner.losses, drawn


def test_dreamers_windows_around_the_rows_of_a_sampler(ours):
    losses, drawn = dreamer_by_sequences(engram, ours)
    expected_losses, expected = dreamer_by_sequences(rl, theirs)
    assert drawn == expected
    assert not all(all(real) for _, windows, _ in drawn for real in windows)
    check_same(losses, expected_losses, 10)
