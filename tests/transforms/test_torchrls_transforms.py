"""TorchRL's transforms for replay buffers in engram's: what is stored and read is what TorchRL's buffer would store and read."""

import warnings

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule
from torch import nn

import engram
from engram._support import absent

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    rl = pytest.importorskip("torchrl.data")
    from torchrl.data.llm import TopKRewardSelector
    from torchrl.envs import transforms
    from torchrl.objectives.llm import MCAdvantage

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

EPISODE = 6


def steps(first, n, **more):
    """Steps of episodes of six, as a collector of one environment gives them."""
    t = torch.arange(first, first + n)
    done = (t % EPISODE == EPISODE - 1).unsqueeze(-1)
    return TensorDict(
        {
            "observation": torch.stack([t, 2 * t], -1).float(),
            "action": t.unsqueeze(-1).float(),
            "done": torch.zeros_like(done),
            "collector": {"traj_ids": t // EPISODE},
            "next": {
                "observation": torch.stack([t, 2 * t], -1).float() + 1,
                "reward": (t % 7 + 1).unsqueeze(-1).float(),
                "done": done,
                "terminated": done,
                "truncated": torch.zeros_like(done),
            },
            **more,
        },
        [n],
    )


def windows(n, length=4):
    """Rows that are windows of steps."""
    return steps(0, n * length, is_init=torch.zeros(n * length, 1, dtype=torch.bool)).reshape(n, length)


def recurrent():
    torch.manual_seed(3)

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.5))

        def forward(self, x, hidden):
            sums = x.cumsum(-2) * self.weight + hidden
            return sums, sums

    return TensorDictModule(Sums(), in_keys=["observation", "hidden"], out_keys=["out", ("next", "hidden")])


def compact(n):
    return steps(0, n).exclude(("next", "observation"))


def deltas(n):
    return compact(n).set(("next", "delta", "observation"), torch.ones(n, 2, dtype=torch.float16))


def hidden_windows(n):
    return windows(n, 5).set("hidden", torch.zeros(n, 5, 2))


def answers(first):
    """Trajectories of two steps that answer prompts, four to each prompt, in two halves."""
    which = torch.arange(first, first + 8)
    end = torch.tensor([[False], [True]]).repeat(4, 1)
    return TensorDict(
        {"group": which // 16 * 2 + which // 2 % 2, "next": {"reward": (which**2).unsqueeze(-1).float(), "done": end}},
        [8],
    )


#: Of each: how it is made, and the batches that are written one after the other.
CASES = {
    "steps of several": (lambda: transforms.MultiStepTransform(3, 0.9), [steps(0, 9), steps(9, 2), steps(11, 10)]),
    "steps of several, too few": (
        lambda: transforms.MultiStepTransform(4, 0.9),
        [steps(0, 2), steps(2, 1), steps(3, 9)],
    ),
    "reward to go": (lambda: transforms.Reward2GoTransform(0.9, out_keys=["to_go"]), [steps(0, 12), steps(12, 6)]),
    "next observations of the batch": (transforms.NextStateReconstructor, [compact(20)]),
    "next observations from differences": (lambda: transforms.NextObservationDelta(["observation"]), [deltas(9)]),
    "policies that are not too old": (
        lambda: transforms.PolicyAgeFilter(4, 2),
        [steps(0, 8, policy_version=torch.arange(8) % 5), steps(8, 8, policy_version=torch.arange(8) % 5)],
    ),
    "frames": (
        lambda: transforms.CatFrames(3, -1, in_keys=["observation"], out_keys=["stack"], mask_key="padded"),
        [windows(6)],
    ),
    "frames that are stored": (
        lambda: transforms.CatFrames(3, -1, in_keys=["observation"], out_keys=["stack"], as_inverse=True),
        [windows(6)],
    ),
    "chunks of actions": (lambda: transforms.ActionChunkTransform(3), [windows(6)]),
    "burn-in": (lambda: transforms.BurnInTransform([recurrent()], 2), [hidden_windows(5)]),
    "advantages in a group": (lambda: MCAdvantage(4, "group"), [answers(0), answers(8), answers(16), answers(24)]),
}


def written(rb, batches):
    for batch in batches:
        rb.extend(batch.clone())
    return rb


@pytest.fixture(params=["RAM", "shared", "directory"])
def ours(request, tmp_path):
    def make(transform):
        storage = (
            engram.LazyMemmapStorage(40, scratch_dir=tmp_path / "store")
            if request.param == "directory"
            else engram.LazyTensorStorage(40)
        )
        return engram.TensorDictReplayBuffer(
            storage=storage,
            sampler=engram.SamplerWithoutReplacement(shuffle=False),
            transform=transform,
            batch_size=5,
            shared=request.param == "shared",
        )

    return make


def theirs(transform):
    return rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(40),
        sampler=rl.SamplerWithoutReplacement(shuffle=False),
        transform=transform,
        batch_size=5,
    )


@pytest.mark.parametrize("case", CASES)
def test_as_in_torchrls_buffer(ours, case):
    make, batches = CASES[case]
    found, expected = written(ours(make()), batches), written(theirs(make()), batches)
    assert len(found) == len(expected) > 0
    for _ in range(3):
        same(found.sample(), expected.sample())


def test_a_random_piece_of_every_window(ours):
    rb = written(ours(transforms.RandomCropTensorDict(3)), [windows(20, 9)])
    seen = set()
    for first in range(0, 20, 5):
        batch = rb.sample()
        assert batch.batch_size == (5, 3)
        start = batch["action"][:, 0, 0] - 9 * torch.arange(first, first + 5)
        assert torch.equal(batch["action"][:, :, 0], batch["action"][:, :1, 0] + torch.arange(3))
        assert ((start >= 0) & (start <= 6)).all()
        seen.update(start.tolist())
    assert len(seen) > 1


def test_statistics_of_the_second_kind_are_of_environments_only(ours):
    """Nor does TorchRL's buffer take it; `VecNorm` is engram's."""
    for make in (ours, theirs):
        rb = written(make(transforms.VecNormV2(["observation"])), [steps(0, 9)])
        with pytest.raises(NotImplementedError, match="VecNormV2"):
            rb.sample()


def test_pinning_is_asked_for(ours, monkeypatch):
    pinned = []
    monkeypatch.setattr(TensorDict, "pin_memory", lambda self: pinned.append(self) or self)
    batch = written(ours(transforms.PinMemoryTransform()), [steps(0, 9)]).sample()
    assert pinned[-1] is batch


def test_the_best_answers_to_each_prompt():
    """Text and rewards of several lengths: rows of a list."""
    data = [
        TensorDict(
            {
                "text": f"prompt {i // 5}",
                "next": {"done": torch.ones(1, 1) > 0, "reward": torch.full((i + 5, 1), float(i))},
            }
        )
        for i in range(20)
    ]
    kept = []
    for module, storage in ((engram, engram.ListStorage), (rl, rl.LazyStackStorage)):
        rb = module.ReplayBuffer(storage=storage(50), transform=TopKRewardSelector(5, 3, prompt_key="text"))
        for first in range(0, 20, 4):
            rb.extend(lazy_stack(data[first : first + 4]))
        kept.append([(row["text"], row["next", "reward"].tolist()) for row in (rb[i] for i in range(len(rb)))])
    assert kept[0] == kept[1]
    assert len(kept[0]) > 0


def same(one, other):
    assert one.batch_size == other.batch_size
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in other.keys(True, True):
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key].nan_to_num(-7), other[key].nan_to_num(-7)), key


def frames(n):
    pixels = torch.arange(n * 192).reshape(n, 8, 8, 3).remainder(255).to(torch.uint8)
    return steps(0, n, pixels=pixels).set(("next", "pixels"), pixels)


#: What constructors need; ``in_keys`` alone, and nothing, are tried for the others.
ARGUMENTS = {
    "ClipTransform": {"in_keys": ["observation"], "low": -1.0, "high": 1.0},
    "FlattenObservation": {"first_dim": -3, "last_dim": -1},
    "PermuteTransform": {"dims": (-1, -3, -2), "in_keys": ["pixels"]},
    "RewardClipping": {"clamp_min": 0.0, "clamp_max": 1.0},
    "SqueezeTransform": {"dim": -1, "in_keys": ["action"]},
    "Stack": {"in_keys": ["action", ("next", "reward")], "out_key": "both"},
    "TargetReturn": {"target_return": 10.0},
    "UnaryTransform": {"in_keys": ["observation"], "out_keys": ["more"], "fn": lambda x: x + 1},
    "UnsqueezeTransform": {"dim": -1, "in_keys": ["observation"]},
    "VecNormV2": {"in_keys": ["observation"]},
}
ELSEWHERE = sorted(name for name, (_, taken) in absent._MODULES.items() if taken and hasattr(transforms, name))


def transform_of(name):
    """A transform; None: it needs a model, or another package."""
    for arguments in (ARGUMENTS.get(name, {}), {"in_keys": ["observation"]}):
        try:
            return getattr(transforms, name)(**arguments)
        except Exception:  # noqa: BLE001 - TorchRL's
            continue
    return None


MADE = [name for name in ELSEWHERE if transform_of(name) is not None]


def outcome(library, name):
    rb = library.TensorDictReplayBuffer(
        storage=library.LazyTensorStorage(20),
        sampler=library.SamplerWithoutReplacement(shuffle=False),
        transform=transform_of(name),
        batch_size=4,
    )
    try:
        rb.extend(frames(12))
        return rb.sample()
    except Exception as error:  # noqa: BLE001 - some need an environment
        return type(error)


@pytest.mark.parametrize("name", MADE)
def test_each_that_engram_does_not_have_does_what_it_does_in_torchrls_buffer(name):
    found, expected = outcome(engram, name), outcome(rl, name)
    if isinstance(expected, type):
        assert found is expected
    else:
        same(found, expected)


def test_most_of_them_are_compared():
    assert len(MADE) >= 40
    assert sum(not isinstance(outcome(rl, name), type) for name in MADE) >= 15
