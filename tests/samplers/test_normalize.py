"""Importance weights over the largest of the store, or of the batch."""

import pickle

import pytest
import torch
from tensordict import TensorDict

from engram import (
    FinalObservations,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextFromFollowing,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sequence,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from engram.samplers.redraw import Redraw
from tests.serving.servers import serving_each

ROWS, NEAR_0 = 200, 1e-30
LEAVES = torch.linspace(0.5, 3, ROWS, dtype=torch.float64)
LEAVES[17] = NEAR_0
BETA = 0.8


def prioritized(normalize="batch", dtype=torch.float32, **more):
    return PrioritizedSampler(alpha=1.0, beta=BETA, eps=0.0, dtype=dtype, normalize=normalize, **more)


def rows():
    done = torch.arange(ROWS).remainder(20).eq(19).unsqueeze(-1)
    next_ = TensorDict({"reward": torch.ones(ROWS, 1), "done": done}, [ROWS])
    return TensorDict({"a": torch.arange(ROWS), "next": next_}, [ROWS])


def made(sampler, storage=LazyTensorStorage, cls=TensorDictReplayBuffer, **more):
    rb = cls(storage=storage(ROWS), sampler=sampler, generator=torch.Generator().manual_seed(3), **more)
    rb.extend(list(torch.arange(ROWS)) if storage is ListStorage else rows())
    rb.update_priority(torch.arange(ROWS), LEAVES)
    return rb


def expected(drawn, leaves=LEAVES):
    """By hand: the weights of rows, of which the largest is 1."""
    weights = leaves[drawn] ** -BETA
    return weights / weights.max()


def check(weights, drawn, dtype=torch.float32):
    assert weights.dtype is dtype
    assert weights.max() == 1
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2)
    torch.testing.assert_close(weights.double(), expected(drawn), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_one_row_near_0_does_not_hide_the_others(storage, dtype):
    for normalize in ("store", "batch"):
        rb = made(prioritized(normalize, dtype), storage, ReplayBuffer)
        for n in (1, 16, 150):
            batch, info = rb.sample(n, return_info=True)
            drawn = batch if storage is ListStorage else batch["a"]
            assert 17 not in drawn
            if normalize == "batch":
                check(info["priority_weight"], drawn, dtype)
            else:
                assert info["priority_weight"].double().max() < 1e-20
        rb.close()


WRAPPED = {
    "slices": lambda: SliceSampler(slice_len=4, end_keys=[("next", "done")], anchors=prioritized()),
    "prioritized slices": lambda: PrioritizedSliceSampler(
        alpha=1.0, beta=BETA, eps=0.0, slice_len=4, end_keys=[("next", "done")], normalize="batch"
    ),
    "n-step": lambda: NStep(prioritized(), 3, 0.9),
    "n-step of slices": lambda: NStep(
        SliceSampler(slice_len=4, end_keys=[("next", "done")], anchors=prioritized()), 2, 0.9
    ),
    "sequence": prioritized,
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", WRAPPED)
def test_windows_and_wrappers_have_weights_over_the_batch(name, prefetch):
    unit = Sequence(4, done_key=("next", "done")) if name == "sequence" else None
    size = 16 if unit is not None else 64
    with made(WRAPPED[name](), sample_unit=unit, batch_size=size, prefetch=prefetch) as rb:
        for _ in range(4):
            batch = rb.sample()
            first = batch["a"] if name == "n-step" else batch["a"].reshape(-1, 4)[:, 0]
            weights = batch["priority_weight"]
            if name != "n-step":
                weights = weights.reshape(len(first), -1)
                assert (weights == weights[:, :1]).all()
                weights = weights[:, 0]
            check(weights, first)


def test_rows_drawn_in_place_of_others_are_weighed_with_the_rest():
    """Of those without a next observation yet others are drawn, at nearly every batch."""
    leaves = LEAVES.clone()
    leaves[-1] = 500.0  # whose next observation is not known yet
    ends = {"done": torch.zeros(ROWS, 1, dtype=torch.bool)}
    numbers = torch.arange(ROWS)
    data = TensorDict({"obs": numbers, "next": TensorDict({"obs": numbers + 1, **ends}, [ROWS])}, [ROWS])
    kept = FinalObservations(["obs"], LazyTensorStorage(8))
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=NextFromFollowing(prioritized(), kept),
        transform=kept,
        batch_size=64,
        generator=torch.Generator().manual_seed(3),
    )
    rb.extend(data)
    rb.update_priority(torch.arange(ROWS), leaves)
    for _ in range(5):
        batch = rb.sample()
        assert ROWS - 1 not in batch["obs"]
        check(batch["priority_weight"], batch["obs"])


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_row_that_moved_is_replaced_by_one_of_the_right_weight(storage):
    rb = made(prioritized(), storage, ReplayBuffer)
    draw = rb.sampler.draw(rb.storage.extent(), 20, 5)
    check(draw.info["priority_weight"], draw.rows)
    redraw = Redraw(rb.storage, draw, rb.sampler, 5)
    for moved in ([3], [0, 7], list(range(20))):
        redraw.again(moved)
        check(redraw.info["priority_weight"], redraw.rows)


def test_rows_that_were_removed_meanwhile_have_weights_of_the_rest():
    rb = made(prioritized())
    rb.update_priority(torch.arange(ROWS), torch.where(torch.arange(ROWS) < 5, 1.0, 0.0))
    assert rb.sample(40)["priority_weight"].unique().tolist() == [1]
    rb.update_priority([0], [4.0])
    weights = rb.sample(40)["priority_weight"]
    torch.testing.assert_close(weights.unique(), torch.tensor([4.0**-BETA, 1.0]))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_exponents(beta):
    rb = made(prioritized())
    rb.sampler.beta = beta
    batch = rb.sample(50)
    weights = (LEAVES[batch["a"]] / LEAVES[batch["a"]].min()) ** -beta
    torch.testing.assert_close(batch["priority_weight"].double(), weights, rtol=1e-6, atol=0)


def test_buffers_take_the_argument():
    for cls in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        rb = cls(alpha=1.0, beta=BETA, eps=0.0, storage=LazyTensorStorage(ROWS), normalize="batch")
        rb.extend(rows())
        rb.update_priority(torch.arange(ROWS), LEAVES)
        _, info = rb.sample(32, return_info=True)
        assert info["priority_weight"].max() == 1
        assert cls(alpha=1.0, beta=BETA).sampler.normalize == "store"


@pytest.mark.parametrize("cls", [PrioritizedSampler, PrioritizedSliceSampler, PrioritizedReplayBuffer])
@pytest.mark.parametrize("bad", ["batches", None, True, ["batch"]])
def test_another_value_is_refused(cls, bad):
    more = {"slice_len": 2} if cls is PrioritizedSliceSampler else {}
    with pytest.raises(ValueError, match="normalize: expected 'store' or 'batch', got"):
        cls(alpha=1.0, beta=1.0, normalize=bad, **more)


def test_it_is_noted_only_where_it_differs(tmp_path):
    """So that what earlier versions wrote, and read, stays as it is."""
    assert "normalize" not in prioritized("store").config()
    assert "normalize" not in repr(prioritized("store"))
    assert "normalize='batch'" in repr(prioritized("batch"))
    for name in (name for name in WRAPPED if name != "sequence"):
        sampler = WRAPPED[name]()
        for other in (type(sampler).from_config(sampler.config()), pickle.loads(pickle.dumps(sampler))):
            by = getattr(other, "anchors", None) or other
            assert by.normalize == "batch"
    sampler = prioritized("batch")
    del sampler.normalize  # as an earlier version pickled it
    assert pickle.loads(pickle.dumps(sampler)).normalize == "store"


@pytest.mark.parametrize("normalize", ["store", "batch"])
@pytest.mark.parametrize("slices", [False, True])
def test_dumps_and_directories_keep_it(tmp_path, normalize, slices):
    sampler = (
        PrioritizedSliceSampler(
            alpha=1.0, beta=BETA, eps=0.0, slice_len=4, end_keys=[("next", "done")], normalize=normalize
        )
        if slices
        else prioritized(normalize)
    )
    storage = LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "rows")
    with TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=32) as rb:
        rb.extend(rows())
        rb.update_priority(torch.arange(ROWS), LEAVES)
        rb.dumps(tmp_path / "dump")
    with ReplayBuffer.open(tmp_path / "rows") as opened:
        assert opened.sampler.config().get("normalize", "store") == normalize
        assert (opened.sample()["priority_weight"].max() == 1) == (normalize == "batch")
    again = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=type(sampler).from_config(sampler.config()))
    again.loads(tmp_path / "dump")
    assert (again.sample(32)["priority_weight"].max() == 1) == (normalize == "batch")


def test_a_state_of_one_goes_into_the_other():
    rb, other = made(prioritized("store")), made(prioritized("batch"))
    other.load_state_dict(rb.state_dict())
    assert other.sample(32)["priority_weight"].max() == 1


@pytest.mark.parametrize("everywhere", [False, True])
def test_members_of_an_ensemble_have_weights_of_their_own(everywhere):
    """So that the smallest priority of one does not hide the rows of another."""

    def member(normalize, near):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(ROWS), sampler=prioritized(normalize), writer=TensorDictRoundRobinWriter()
        )
        rb.extend(rows())
        leaves = LEAVES.clone()
        leaves[17] = near
        rb.update_priority(torch.arange(ROWS), leaves)
        return rb

    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=RandomSampler())
    plain.extend(rows())
    members = [member("batch", 1e-30), member("store", 1e-9), member("batch", 1e-12), plain]
    rb = ReplayBufferEnsemble(
        *members,
        num_buffer_sampled=None if everywhere else 6,
        sample_from_all=everywhere,
        batch_size=48,
        generator=torch.Generator().manual_seed(3),
    )
    for _ in range(5):
        batch = rb.sample()
        ids = batch["index", "buffer_ids"]
        for number in ids.unique().tolist():
            own = ids == number
            weights, drawn = batch["priority_weight"][own], batch["a"][own]
            if number in (0, 2):
                check(weights, drawn)
            else:
                assert (weights == 1).all() if number == 3 else (weights < 1e-5).all()


SERVED = {"rows": prioritized, "n-step": lambda: NStep(prioritized(), 3, 0.9), "slices": WRAPPED["slices"]}
SHARES = (120, 60, 20)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """By name: stores of some of the rows each; the near one is in the first."""
    root, found = tmp_path_factory.mktemp("normalize"), {}
    for name, sampler in SERVED.items():
        first, found[name] = 0, []
        for share in SHARES:
            folder, some = root / f"{name}-{first}", slice(first, first + share)
            storage = LazyMemmapStorage(ROWS, scratch_dir=folder)
            with TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=64) as rb:
                rb.extend(rows()[some])
                rb.update_priority(torch.arange(share), LEAVES[some])
            found[name].append(folder)
            first += share
    with serving_each([folder for folders in found.values() for folder in folders]):
        yield {name: [f"unix:{folder}.sock" for folder in folders] for name, folders in found.items()}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("stores", [1, 3])
@pytest.mark.parametrize("name", SERVED)
def test_weights_of_a_batch_of_several_stores_are_over_its_largest(addresses, name, stores, prefetch):
    generator = torch.Generator().manual_seed(5)
    where = addresses[name][:stores]
    with ReplayBuffer.connect(
        where if stores > 1 else where[0], batch_size=64, generator=generator, prefetch=prefetch
    ) as rb:
        seen = set()
        for _ in range(4):
            batch = rb.sample()
            drawn, weights = batch["a"], batch["priority_weight"]
            if name == "slices":
                drawn, weights = drawn.reshape(-1, 4)[:, 0], weights.reshape(-1, 4)[:, 0]
            check(weights, drawn)
            seen |= set((batch["index"] >> 48).flatten().tolist())
        assert seen == set(range(stores))


# ---- health ------------------------------------------------------------------------------------------------------------


def weights_of(rb):
    return next(finding for finding in rb.health() if finding.name == "weights")


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_health_warns_of_weights_near_0(storage):
    finding = weights_of(made(prioritized("store"), storage, ReplayBuffer))
    assert not finding.good
    assert finding.numbers["largest_weight"] < 1e-20
    assert 'normalize="batch"' in finding.text
    assert weights_of(made(prioritized("batch"), storage, ReplayBuffer)).good


def test_health_estimates_the_largest_weight_of_a_batch():
    rb = made(prioritized("store"))
    for near, good in ((1e-2, True), (1e-6, False)):
        rb.update_priority([17], [near])
        largest = torch.stack([rb.sample(256)["priority_weight"].max() for _ in range(21)]).median()
        finding = weights_of(rb)
        assert finding.numbers["largest_weight"] == pytest.approx(float(largest), rel=0.2)
        assert finding.good is good


def test_health_looks_through_windows_and_wrappers():
    for name in ("slices", "n-step", "n-step of slices"):
        assert weights_of(made(WRAPPED[name]())).good
    anchors = prioritized("store")
    assert not weights_of(made(SliceSampler(slice_len=4, end_keys=[("next", "done")], anchors=anchors))).good
