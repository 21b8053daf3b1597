"""``convert=True``: a checkpoint of a buffer with another sampler."""

import re

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.components import Newest
from tests.ranks.jobs import checkpointer, done, episode, job
from tests.statistics_of import assert_proportional, assert_uniform

STEPS = 24


def steps(n=STEPS, first=0):
    step = torch.arange(first, first + n)
    return {"step": step, "episode": step // 6, "next": {"done": (step + 1) % 6 == 0, "reward": step.float()}}


def prioritized(capacity=40, **more):
    return PrioritizedSampler(capacity, 1.0, 1.0, **{"eps": 0.0, **more})


def prioritized_slices(**more):
    return PrioritizedSliceSampler(40, 1.0, 1.0, eps=0.0, slice_len=3, **more)


def buffer(sampler, *, capacity=40, rows=STEPS, **more):
    storage = more.pop("storage", None) or LazyTensorStorage(capacity, lanes=more.pop("lanes", 1))
    rb = ReplayBuffer(storage=storage, sampler=sampler, **more)
    if rows:
        rb.extend(steps(rows), lane=0)
    return rb


def saved(rb, how, place):
    """Save a buffer; how another one takes it over."""
    if how == "loads":
        rb.dumps(place / "dump")
        return lambda other, **more: other.loads(place / "dump", **more)
    Checkpointer(place / "series", rb).save(1)
    return lambda other, **more: Checkpointer(place / "series", other).restore(resume="exact", **more)


def counts(rb, draws=4000):
    return torch.bincount(rb.sample(draws)["step"], minlength=STEPS)


HOWS = pytest.mark.parametrize("how", ["loads", "restore"])


@HOWS
@pytest.mark.parametrize("kept", [0, 5], ids=["an empty buffer", "one with rows"])
def test_rows_of_a_uniform_buffer_get_the_default_priority(tmp_path, ram, how, kept):
    load = saved(buffer(RandomSampler()), how, ram)
    rb = buffer(prioritized(), rows=kept)
    if kept:
        rb.update_priority(torch.arange(kept), 7.0)
    load(rb, convert=True)
    assert rb[:]["step"].tolist() == list(range(STEPS))
    assert_uniform(counts(rb))
    rb.update_priority(torch.arange(STEPS), torch.arange(STEPS).double())
    assert_proportional(counts(rb), range(STEPS))
    assert rb.extend(steps(2)).tolist() == [STEPS, STEPS + 1]
    assert float(rb.sampler.default_priority) == STEPS - 1


@HOWS
@pytest.mark.parametrize("lanes", [1, 2], ids=["as it was", "redistributed"])
def test_slices_are_those_of_a_buffer_that_was_given_the_rows(ram, how, lanes):
    load = saved(buffer(RandomSampler(), batch_size=5), how, ram)
    rb = buffer(SliceSampler(slice_len=3, traj_key="episode"), rows=0, lanes=lanes, batch_size=12)
    load(rb, convert=True)
    assert rb.batch_size == 12
    fresh = buffer(SliceSampler(slice_len=3, traj_key="episode"), rows=0, lanes=lanes)
    for lane, seam in enumerate(rb.storage.extent().filled):
        rows = list(range(lane * 40 // lanes, lane * 40 // lanes + seam))
        fresh.extend(rb[rows], lane=lane)
    for one in (rb, fresh):
        one.set_rng(torch.Generator().manual_seed(3))
    for _ in range(10):
        assert torch.equal(rb.sample(12)["step"], fresh.sample(12)["step"])
    rb.extend(steps(5, first=STEPS), lane=0)
    fresh.extend(steps(5, first=STEPS), lane=0)
    assert torch.equal(rb.sample(12)["step"], fresh.sample(12)["step"])


@HOWS
def test_priorities_become_those_of_first_steps(ram, how):
    source = buffer(prioritized())
    source.update_priority(torch.arange(STEPS), torch.arange(STEPS).double())
    rb = buffer(prioritized_slices(), rows=0)
    saved(source, how, ram)(rb, convert=True)
    starts = torch.bincount(rb.sample(12000)["step"].view(-1, 3)[:, 0], minlength=STEPS)
    assert_proportional(starts, [step if step % 6 < 4 else 0 for step in range(STEPS)])


def test_priorities_of_another_alpha_are_computed_again(ram):
    source = buffer(prioritized())
    source.update_priority(torch.arange(STEPS), torch.arange(STEPS).double() ** 2)
    rb = buffer(PrioritizedSliceSampler(40, 0.5, 0.3, eps=0.0, slice_len=1), rows=0)
    saved(source, "loads", ram)(rb, convert=True)
    assert (rb.sampler.alpha, rb.sampler.beta) == (0.5, 0.3)
    assert_proportional(counts(rb), range(STEPS))


@HOWS
@pytest.mark.parametrize("capacity", [40, 30], ids=["as it was", "smaller"])
@pytest.mark.parametrize("around", [lambda it: it, lambda it: NStep(it, 1, 0.9)], ids=["alone", "within returns"])
def test_a_sampler_of_the_same_class_computes_them_again_too(ram, how, capacity, around):
    source = buffer(around(prioritized()))
    source.update_priority(torch.arange(STEPS), torch.arange(STEPS).double() ** 2)
    load = saved(source, how, ram)
    rb = buffer(around(PrioritizedSampler(capacity, 0.5, 0.3, eps=0.0)), capacity=capacity, rows=3)
    if (capacity, how) == (30, "loads"):
        with pytest.raises(IncompatibleCheckpoint, match="expected"):
            load(rb)
        assert len(rb) == 3
    load(rb, convert=True)
    assert rb.sampler.alpha == 0.5
    assert_proportional(counts(rb), range(STEPS))
    rb.update_priority(torch.tensor([0]), 23.0**2)
    assert counts(rb)[0] > 0


@HOWS
def test_a_prioritized_buffer_becomes_uniform(ram, how):
    source = buffer(prioritized())
    source.update_priority(torch.arange(STEPS), torch.arange(STEPS).double())
    rb = buffer(RandomSampler(), rows=0)
    saved(source, how, ram)(rb, convert=True)
    assert_uniform(counts(rb))
    rb.set_sampler(prioritized())
    if how == "restore":  # a Checkpointer saves them beside the rows, where they stay for a sampler of that index
        assert_proportional(counts(rb), range(STEPS))
    else:
        assert_uniform(counts(rb))


@HOWS
@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, lambda: SliceSamplerWithoutReplacement(num_slices=2)])
def test_an_epoch_begins(ram, how, sampler):
    rb = buffer(sampler(), batch_size=8)
    rb.sample()
    saved(buffer(RandomSampler(), batch_size=4), how, ram)(rb, convert=True)
    drawn = torch.cat([batch["step"] for batch in rb])
    assert len(set(drawn.tolist())) == len(drawn) > 8
    if rb.sampler.traits.draws_once:
        assert sorted(drawn.tolist()) == list(range(STEPS))


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, lambda: SliceSamplerWithoutReplacement(slice_len=2)])
def test_an_epoch_of_the_same_sampler_goes_on(ram, sampler):
    there = buffer(sampler(), batch_size=4)
    drawn = [there.sample()["step"]]
    there.extend(steps(12, first=STEPS))  # which the epoch is not over
    rb = buffer(sampler(), batch_size=4)
    saved(there, "restore", ram)(rb, convert=True)
    while not rb.sampler.ran_out:
        drawn.append(rb.sample()["step"])
    trajectories = 24 if rb.sampler.traits.draws_once else 4
    seen = torch.cat(drawn)
    assert int(seen.max()) < STEPS
    assert len(set(seen.tolist())) == len(seen) == (trajectories if rb.sampler.traits.draws_once else 2 * trajectories)


def test_an_epoch_in_a_directory_begins(ram):
    rb = buffer(SamplerWithoutReplacement(), storage=LazyMemmapStorage(40, scratch_dir=ram / "store"), batch_size=8)
    rb.sample()
    saved(buffer(RandomSampler()), "loads", ram)(rb, convert=True)
    assert sorted(torch.cat([rb.sample()["step"] for _ in range(3)]).tolist()) == list(range(STEPS))


@HOWS
@pytest.mark.parametrize(
    "there", [NStep(RandomSampler(), 2, 0.9), NStep(prioritized(), 2, 0.9)], ids=["uniform", "prioritized"]
)
def test_what_an_expander_draws_by(ram, how, there):
    """The class of an expander stays what it is."""
    rb = buffer(
        NStep(prioritized(), 2, 0.9) if isinstance(there.sampler, RandomSampler) else NStep(RandomSampler(), 2, 0.9),
        rows=0,
    )
    source = buffer(there)
    if how == "restore" and isinstance(there.sampler, PrioritizedSampler):
        source.update_priority(torch.arange(STEPS), 2.0)
    saved(source, how, ram)(rb, convert=True)
    assert_uniform(counts(rb))


@HOWS
def test_buffer_and_writer_that_go_with_the_sampler(ram, how):
    rows = TensorDict(steps(), [STEPS])
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=6)
    source.extend(rows)
    plain = buffer(RandomSampler(), rows=0)
    plain.extend(rows)
    for number, one in enumerate((source, plain)):
        place = ram / str(number)
        place.mkdir()
        load = saved(one, how, place)
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(40), batch_size=8
        )
        load(rb, convert=True)
        assert (rb.batch_size, len(rb)) == (8, STEPS)
        batch = rb.sample()
        batch["td_error"] = torch.ones(8)
        rb.update_tensordict_priority(batch)
        assert_uniform(torch.bincount(torch.cat([rb.sample()["step"] for _ in range(300)]), minlength=STEPS))


def test_lists(ram):
    def listed(sampler, rows):
        rb = ReplayBuffer(storage=ListStorage(40), sampler=sampler)
        if rows:
            rb.extend([torch.tensor(k) for k in range(rows)])
        return rb

    load = saved(listed(RandomSampler(), STEPS), "restore", ram)
    for kept in (0, 3):
        rb = listed(prioritized(), kept)
        load(rb, convert=True)
        assert_uniform(torch.bincount(rb.sample(3000), minlength=STEPS))


# ---- across ranks ----------------------------------------------------------------------------------------------------


def test_ranks_of_a_uniform_job_restore_into_fewer_prioritized_ones(tmp_path):
    def made(sampler, length):
        storage = LazyTensorStorage(2 * length, lanes=2)
        return TensorDictReplayBuffer(storage=storage, sampler=sampler)

    def save(ranks, rank):
        rb = made(RandomSampler(), 32)
        for lane in range(2):
            for number, length in enumerate((5, 7, 3)):
                rb.extend(episode(rank, lane, number, length), lane=lane)
        checkpointer(tmp_path, rb, ranks).save(1)
        return set(rb["who"].tolist())

    def load(ranks, rank, convert):
        rb = made(PrioritizedSampler(128, 1.0, 1.0), 64)
        checkpointer(tmp_path, rb, ranks).restore(convert=convert)
        found = torch.stack([rb.sample(500)["who"] for _ in range(8)]).flatten()
        values, times = found.unique(return_counts=True)
        assert_uniform(times)
        return set(values.tolist())

    written = set().union(*done(job(3, save)))
    assert set().union(*done(job(2, load, True))) == written
    for error in job(2, load, False):
        assert isinstance(error, Exception)
        assert "convert=True" in str(error)


# ---- what is refused -------------------------------------------------------------------------------------------------

TARGETS = [
    prioritized,
    prioritized_slices,
    SamplerWithoutReplacement,
    lambda: SliceSampler(slice_len=3),
    lambda: SliceSamplerWithoutReplacement(num_slices=2),
    lambda: NStep(prioritized(), 2, 0.9),
]


@HOWS
def test_another_sampler_is_refused_without_it(ram, how):
    load = saved(buffer(RandomSampler()), how, ram)
    for target in TARGETS:
        rb = buffer(target(), rows=5, batch_size=6)
        before = rb.state_dict()
        message = f"expected a sampler of type {type(rb.sampler).__name__}.*'RandomSampler'.* With convert=True"
        with pytest.raises(IncompatibleCheckpoint, match=message):
            load(rb)
        same(rb.state_dict(), before)


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@HOWS
def test_what_cannot_be_converted_is_refused(ram, how):
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(40))
    source.extend(TensorDict(steps(), [STEPS]))
    load = saved(source, how, ram)
    best = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40), sampler=prioritized(), writer=TensorDictMaxValueWriter(rank_key="step")
    )
    with pytest.raises(IncompatibleCheckpoint, match="writer of type TensorDictMaxValueWriter") as refused:
        load(best, convert=True)
    assert "convert=True" not in str(refused.value)
    with pytest.raises(IncompatibleCheckpoint, match="Samplers of your own cannot be converted to"):
        load(TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=Newest()), convert=True)
    within = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=prioritized(max_priority_within_buffer=True))
    load(within, convert=True)
    assert_uniform(counts(within))


def test_other_rows_are_refused_all_the_same(ram):
    load = saved(buffer(RandomSampler()), "loads", ram)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=prioritized())
    rb.extend({"other": torch.arange(3)})
    before = rb.state_dict()
    with pytest.raises(IncompatibleCheckpoint, match="expected the fields of this storage"):
        load(rb, convert=True)
    same(rb.state_dict(), before)


# ---- what is said ----------------------------------------------------------------------------------------------------


@HOWS
def test_it_is_logged(ram, how, caplog):
    caplog.set_level("INFO", logger="engram")
    load = saved(buffer(RandomSampler()), how, ram)
    rb = buffer(prioritized(), rows=0)
    caplog.clear()
    report = load(rb, convert=True)
    found = [message for message in caplog.messages if "from now on" in message]
    pattern = (
        "rows of a buffer with a RandomSampler are drawn by a PrioritizedSampler from now on; rows without priorities"
    )
    assert len(found) == 1
    assert re.search(pattern, found[0])
    assert report is None or (re.match(pattern, report.converted) and report.converted in str(report))
    caplog.clear()
    report = load(buffer(RandomSampler(), rows=0), convert=True)
    assert report is None or report.converted == ""
    assert not any("from now on" in message for message in caplog.messages)


def test_a_restore_into_a_buffer_of_another_size_is_one_line(ram, caplog):
    caplog.set_level("INFO", logger="engram")
    load = saved(buffer(RandomSampler()), "restore", ram)
    rb = buffer(prioritized(), rows=0, capacity=30)
    caplog.clear()
    report = load(rb, convert=True)
    assert [message for message in caplog.messages if "ckpt-" in message] == [f"restored {report}"]
    assert re.search(
        "24 rows in .* kept 4 episodes with 24 steps; from 1 rank to 1; rows of a buffer with", str(report)
    )


@pytest.mark.parametrize(("theirs", "ours"), [(RandomSampler, prioritized), (prioritized, RandomSampler)])
def test_a_state_of_another_sampler_names_the_way(theirs, ours):
    rb = buffer(ours(), rows=3)
    before = rb.state_dict()
    with pytest.raises(KeyError, match=r"Sampler: expected .* state.* by dumps and loads\(convert=True\)"):
        rb.load_state_dict(buffer(theirs()).state_dict())
    same(rb.state_dict(), before)


@pytest.mark.parametrize("anchored", [False, True])
def test_slices_with_anchors_and_without(tmp_path, anchored):
    def made(anchored):
        anchors = PrioritizedSampler(alpha=0.7, beta=0.5) if anchored else None
        sampler = SliceSampler(slice_len=2, end_key="done", anchors=anchors)
        return ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)

    rb, here = made(anchored), made(not anchored)
    rb.extend({"x": torch.arange(20), "done": torch.arange(20) % 5 == 4})
    rb.dumps(tmp_path / "dump")
    says = "without priorities, as here, got one with" if anchored else "with priorities, as here, got one without"
    with pytest.raises(IncompatibleCheckpoint, match=rf"a SliceSampler {says}.*convert=True"):
        here.loads(tmp_path / "dump")
    here.loads(tmp_path / "dump", convert=True)
    assert len(here.sample()["x"]) == 4
