"""What the page on moving says about TorchRL itself, tried with the version that is installed."""

import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import engram

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("torchrl.data")
    from torchrl import collectors, objectives
    from torchrl.data.map import QueryModule, TensorDictMap
    from torchrl.data.replay_buffers import Sequence, StreamingSliceSampler, TensorDictRoundRobinWriter, scheduler
    from torchrl.data.replay_buffers.samplers import prioritized
    from torchrl.envs.transforms import ObservationNorm
    from torchrl.modules import ValueOperator
    from torchrl.modules.llm import trl_interop
    from torchrl.trainers import ReplayBufferTrainer, algorithms

    from tests.buffer import families
    from tests.buffer.counting import Counting

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's own
BOTH = pytest.mark.parametrize("lib", [theirs, engram], ids=["torchrl", "engram"])


class Tree:
    """In place of TorchRL's trees, whose extension needs the torch that it was built for."""

    start: float

    def __init__(self, size):
        self.values = torch.full((size,), self.start)

    def __getitem__(self, index):
        return self.values[torch.as_tensor(index)]

    def __setitem__(self, index, value):
        self.values[torch.as_tensor(index)] = torch.as_tensor(value, dtype=torch.float32)

    def scan_lower_bound(self, mass):
        found = torch.searchsorted(self.values.cumsum(0), torch.as_tensor(mass, dtype=torch.float32))
        return found.clamp(max=len(self.values) - 1)


class Sum(Tree):
    start = 0.0

    def query(self, low, high):
        return float(self.values[low:high].sum())


class Min(Tree):
    start = float("inf")

    def query(self, low, high):
        return float(self.values[low:high].min())


@pytest.fixture
def trees(monkeypatch):
    for width in ("Fp32", "Fp64"):
        monkeypatch.setattr(prioritized, f"SumSegmentTree{width}", Sum)
        monkeypatch.setattr(prioritized, f"MinSegmentTree{width}", Min)


def rows(n, **more):
    return TensorDict({"obs": torch.arange(float(n))[:, None].expand(n, 4).clone(), **more}, [n])


def filled(lib, data, size=100, **how):
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(size), **how)
    rb.extend(data)
    return rb


# ---- what differs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracked", [True, False])
def test_torchrls_late_priorities_change_new_rows(trees, tracked):
    writer = TensorDictRoundRobinWriter(track_generations=tracked)
    sampler = theirs.PrioritizedSampler(10, 1.0, 1.0)
    rb = filled(theirs, rows(10), 10, sampler=sampler, batch_size=4, writer=writer)
    batch = rb.sample()
    rb.extend(rows(10))
    batch["td_error"] = torch.full((4,), 50.0)
    rb.update_tensordict_priority(batch)
    assert (sampler._sum_tree.values[batch["index"]] > 49).all()


@BOTH
def test_weights_are_over_the_largest_of_the_buffer(trees, lib):
    rb = filled(lib, rows(1000), 1000, sampler=lib.PrioritizedSampler(1000, 1.0, 1.0), batch_size=256)
    rb.update_priority(torch.arange(1000), torch.ones(1000).index_fill_(0, torch.tensor([0]), 1e-6))
    assert rb.sample()["priority_weight"].max() < 1e-5


def hindsight(lib, strategy, done=None, size=30, **how):
    n = 47 if done is None else len(done)
    done = (torch.arange(n) % 10 == 4)[:, None] if done is None else done
    steps = torch.arange(float(n))[:, None]
    data = {"desired_goal": steps - 1000, "achieved_goal": steps, "observation": steps}
    rb = lib.HERReplayBuffer(
        how.pop("reward_fn", lambda td: td["desired_goal"] * 0),
        her_ratio=1.0,
        storage=lib.LazyTensorStorage(size),
        batch_size=5000,
        strategy=strategy,
        **how,
        **({} if lib is theirs else {"achieved_goal_key": "achieved_goal"}),
    )
    rb.extend(TensorDict({**data, "next": {"reward": torch.zeros(n, 1), "done": done}}, [n]))
    batch = rb.sample()
    goals, steps = (batch[name].squeeze(-1).int() for name in ("desired_goal", "observation"))
    return lambda step: set(goals[steps == step].tolist())


def test_goals_in_a_full_ring():
    """The array's end lies between the steps 29 and 30 of one episode, from 25 to 34."""
    assert hindsight(theirs, "future")(26) == {26}
    assert hindsight(theirs, "final")(26) == {24}
    assert hindsight(engram, "future")(26) == {*range(26, 35)}
    assert hindsight(engram, "final")(26) == {34}


def test_several_flags():
    done = torch.zeros(40, 2, dtype=torch.bool)
    done[9::10] = True
    assert hindsight(theirs, "final", done, 100)(5) == {18}  # flag 19 of all, which is the second of row 9
    assert hindsight(engram, "final", done, 100)(5) == {9}
    data = TensorDict({"i": torch.arange(40), "next": {"done": done}}, [40])
    for kind in (theirs.SliceSampler, theirs.SliceSamplerWithoutReplacement):
        with pytest.raises(RuntimeError, match="1-dimensional"):
            filled(theirs, data, sampler=kind(slice_len=4), batch_size=8).sample()


@BOTH
def test_rewards_beside_transforms(lib):
    seen = []

    def reward(td):
        seen.append(float(td["observation"].min()))
        return td["desired_goal"] * 0

    done = torch.ones(20, 1, dtype=torch.bool)
    norm = ObservationNorm(100.0, 1.0, in_keys=["observation"], standard_normal=True)
    hindsight(lib, "future", done, reward_fn=reward, transform=norm)
    assert (seen[0] < -50) == (lib is theirs)


@BOTH
def test_sequences(lib):
    none = torch.zeros(40, 1, dtype=torch.bool)
    data = {
        "i": torch.arange(40),
        "is_init": none,
        "next": {"done": none, "truncated": torch.arange(40)[:, None] % 10 == 9},
    }
    unit = Sequence(4) if lib is theirs else engram.Sequence(4)
    rb = filled(lib, TensorDict(data, [40]), sample_unit=unit, batch_size=40)
    batch = rb.sample()
    valid, steps = batch["validity_mask"].reshape(-1, 4).all(1), batch["i"].reshape(-1, 4)
    assert bool((steps[valid, 0] // 10 != steps[valid, 3] // 10).any()) == (lib is theirs)
    assert bool(batch["is_init"].reshape(-1, 4)[:, 0].any()) == (lib is engram)
    bare = filled(engram, rows(20, next={"done": none[:20]}), sample_unit=engram.Sequence(4), batch_size=4)
    assert "is_init" not in bare.sample()


def test_what_torchrl_says_of_no_rows():
    for kind, first, error in (
        (theirs.ReplayBuffer, True, RuntimeError),
        (theirs.ReplayBuffer, False, RuntimeError),
        (theirs.TensorDictReplayBuffer, False, IndexError),
    ):
        rb = kind(storage=theirs.LazyTensorStorage(10))
        if first:
            rb.extend(rows(3))
        with pytest.raises(error):
            rb.extend(rows(3)[:0])
    assert len(filled(theirs, rows(3)).extend(rows(3)[:0])) == 0


def test_torchrls_buffers_without_a_storage():
    with pytest.raises(TypeError):
        theirs.ReplayBuffer(100)
    storage = theirs.ReplayBuffer().storage
    assert (type(storage).__name__, storage.max_size) == ("ListStorage", 1000)


def test_what_torchrl_keeps_when_it_is_emptied():
    rb = filled(theirs, rows(3))
    rb.empty()
    rb.extend(TensorDict({"other": torch.zeros(3)}, [3]))
    assert {"obs", "other"} <= {*rb[:].keys()}
    for other in (torch.zeros(3, 9), torch.zeros(3, 4, dtype=torch.int64)):
        rb = filled(theirs, rows(3))
        rb.empty()
        with pytest.raises(RuntimeError):
            rb.extend(TensorDict({"obs": other}, [3]))


def test_a_streaming_state_in_other_rows():
    def make(n):
        data = TensorDict({"i": torch.arange(n), "next": {"done": torch.arange(n)[:, None] % 10 == 9}}, [n])
        return filled(theirs, data, sampler=StreamingSliceSampler(slice_len=2), batch_size=4)

    before, after = make(40), make(20)
    before.sample(), before.sample()
    after.sampler.load_state_dict(before.sampler.state_dict())
    assert after.sample()["i"].tolist() == [8, 9, 10, 11]
    with pytest.raises(IndexError):
        [after.sample() for _ in range(5)]


# ---- the first row ---------------------------------------------------------------------------------------------------


def test_rows_unlike_the_first_one(tmp_path):
    one = TensorDict({"obs": torch.ones(2, 1)}, [2])
    rb, ours = filled(theirs, rows(2)), filled(engram, rows(2))
    rb.extend(one)
    assert rb[2:4]["obs"].tolist() == [[1.0] * 4] * 2
    rb.add(rows(2).double()[0])
    assert rb[:]["obs"].dtype == torch.float32
    for broken in (one, rows(2).double()):
        with pytest.raises(RuntimeError):
            ours.extend(broken)
        with pytest.raises(RuntimeError):
            ours.add(broken[0])
    for broken in (rows(2).double(), TensorDict({"obs": torch.zeros(2, 5)}, [2])):
        with pytest.raises(RuntimeError):
            rb.extend(broken)
    rb.extend(rows(1, more=torch.ones(1)))
    assert "more" in rb[:].keys()
    disk = theirs.TensorDictReplayBuffer(storage=theirs.LazyMemmapStorage(10, scratch_dir=tmp_path))
    disk.extend(rows(2))
    disk.extend(rows(1, more=torch.ones(1)))
    assert "more" not in disk[:].keys()


@BOTH
def test_names_of_the_dims_of_rows(lib, tmp_path):
    rb = filled(lib, TensorDict({"r": torch.ones(8, 5)}, [8, 5], names=["path", "time"]))
    assert rb[:].names == [None, "time"]
    rb.dumps(tmp_path / "dump")
    again = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(100))
    again.loads(tmp_path / "dump")
    assert again[:].names == [None, None]


# ---- where TorchRL asks for its own classes --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LinearScheduler", "StepScheduler", "LambdaScheduler"])
def test_schedulers_ask_for_torchrls_classes(name):
    how = {
        "LinearScheduler": {"final_value": 1.0, "num_steps": 3},
        "StepScheduler": {"gamma": 0.1, "n_steps": 1},
        "LambdaScheduler": {"lambda_fn": lambda _: 1.0},
    }[name]
    rb = filled(engram, rows(3), sampler=engram.PrioritizedSampler(100, 0.7, 0.5))
    with pytest.raises(TypeError, match="Sampler"):
        getattr(scheduler, name)(rb, "beta", **how)
    getattr(engram, name)(rb, "beta", **how).step()


def test_what_asks_for_torchrls_buffers():
    rb = filled(engram, rows(3))
    assert not isinstance(rb, theirs.ReplayBuffer)
    with pytest.raises(TypeError, match="torchrl ReplayBuffer"):
        trl_interop.TorchRLBufferDataset(rb, 4)
    with pytest.raises(AttributeError):
        theirs.ReplayBufferEnsemble(rb, rb, batch_size=4)
    query = QueryModule(in_keys=["obs"], index_key="index")
    with pytest.raises(NotImplementedError, match="storage"):
        TensorDictMap(query_module=query, storage=engram.LazyTensorStorage(10))[rows(3)] = rows(3)


@pytest.mark.parametrize(
    "component",
    [
        {"storage": engram.LazyTensorStorage(3)},
        {"sampler": engram.RandomSampler()},
        {"writer": engram.RoundRobinWriter()},
    ],
)
def test_torchrls_buffers_take_its_components_only(component):
    with pytest.raises(TypeError, match=f"{next(iter(component))} must be"):
        theirs.ReplayBuffer(**component)


def test_a_trainer_of_untyped_rows_updates_no_priorities(trees):
    sampler = theirs.PrioritizedSampler(10, 0.7, 0.5)
    with pytest.raises(ValueError, match="Prioritized sampler not supported"):
        ReplayBufferTrainer(theirs.ReplayBuffer(storage=theirs.LazyTensorStorage(10), sampler=sampler))
    how = {"storage": engram.LazyTensorStorage(10), "sampler": engram.PrioritizedSampler(10, 0.7, 0.5)}
    assert ReplayBufferTrainer(engram.ReplayBuffer(**how))._update_priority is None
    assert ReplayBufferTrainer(engram.TensorDictReplayBuffer(**how))._update_priority is not None


@BOTH
@pytest.mark.parametrize(("name", "loss"), [("PPOTrainer", "ClipPPOLoss"), ("A2CTrainer", "A2CLoss")])
def test_trainers_of_ppo_and_a2c_warn_and_run(name, loss, lib):
    torch.manual_seed(0)
    actor = families.stochastic(return_log_prob=True)
    module = getattr(objectives, loss)(actor, ValueOperator(nn.Linear(3, 1), in_keys=["observation"]))
    sampler = lib.SamplerWithoutReplacement()
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(40), sampler=sampler, batch_size=10)
    environment = Counting(families.continuous())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = getattr(algorithms, name)(
            collector=collectors.Collector(environment, actor, frames_per_batch=20, total_frames=60),
            total_frames=60,
            frame_skip=1,
            optim_steps_per_batch=2,
            loss_module=module,
            optimizer=torch.optim.Adam(module.parameters(), 1e-3),
            progress_bar=False,
            replay_buffer=rb,
            enable_logging=False,
        )
    warned = [it for it in said if "is not a SamplerWithoutReplacement" in str(it.message)]
    assert bool(warned) == (lib is engram)
    trainer.train()
    assert (trainer.collected_frames, len(rb)) == (60, 40)
    assert trainer._optim_count > 0
