"""Places of final observations: they follow the buffer by default, and rows whose place another took are passed over."""

import copy
import pickle
import warnings

import pytest
import torch

from engram import (
    FinalObservations,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    NextFromFollowing,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.around.test_next_from_following import steps

INNER = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(1_000, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2),
}
AROUND = {
    "alone": lambda s: s,
    "n steps": lambda s: NStep(s, 3, 1.0),
    "frames": lambda s: FrameStack(s, 2, -1, ["obs"]),
}


def buffer(finals, inner="uniform", around="alone", *, capacity=200, lanes=1, **arguments):
    sampler = AROUND[around](NextFromFollowing(INNER[inner](), finals))
    arguments.setdefault("storage", LazyTensorStorage(capacity, lanes=lanes))
    generator = torch.Generator().manual_seed(1)
    return TensorDictReplayBuffer(sampler=sampler, transform=finals, generator=generator, **arguments)


def episode(length, first):
    return steps([i == length - 1 for i in range(length)], first=first)


def check(batch, length, ahead=1):
    number, there = batch["number"], batch["next", "obs"][:, -1]
    last = length - number % length
    expected = torch.where(last <= ahead, -(number + last), number + ahead)
    assert torch.equal(there, expected.float())


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("length", [2, 5])
def test_with_too_few_places_draws_pass_over_the_rows_that_lost_theirs(length, inner, around):
    finals = FinalObservations(["obs"], LazyTensorStorage(7))
    rb, told, lost = buffer(finals, inner, around), [], None
    for at in range(120):
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            rb.extend(episode(length, at * length))
        told += [(at, one) for one in now]
        batch = rb.sample(32)
        check(batch, length, 3 if around == "n steps" else 1)
        lost = batch["number"] if lost is None else torch.cat([lost, batch["number"]])
    assert [at for at, _ in told] == [7], "the write that lost one, and no other"
    assert "holds fewer final observations" in str(told[0][1].message)
    assert rb.stats()["final_observations_lost"] > 80
    if inner == "uniform" and around == "alone":
        kept = {n for n in rb.sample(3_000)["number"].tolist() if n % length == length - 1}
        assert kept == {at * length - 1 for at in range(120, 113, -1)}


def test_one_write_of_more_ends_than_places():
    rb = buffer(FinalObservations(["obs"], LazyTensorStorage(2)))
    with pytest.warns(UserWarning, match=r"LazyTensorStorage\(size=2/2.*Give it as many rows"):
        rb.extend(steps([True] * 5))
    assert sorted(set(rb.sample(50)["number"].tolist())) == [3, 4]
    assert rb.stats()["final_observations_lost"] == 3
    assert len(rb) == 5


def test_a_batch_that_hardly_any_row_can_fill():
    rb = buffer(FinalObservations(["obs"], LazyTensorStorage(1)), capacity=50_000)
    with pytest.warns(UserWarning, match="holds fewer"):
        rb.extend(steps([True] * 50_000))
    assert rb.sample(1_000)["number"].unique().tolist() == [49_999]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_as_many_places_as_episodes_are_enough(one_by_one, lanes):
    finals = FinalObservations(["obs"], LazyTensorStorage(10 * lanes))
    rb = buffer(finals, capacity=50 * lanes, lanes=lanes)
    for at in range(40):
        for lane in range(lanes):
            data = episode(5, 5 * at)
            for part in data.unsqueeze(-1).unbind(0) if one_by_one else [data]:
                rb.extend(part, lane=lane)
        check(rb.sample(32), 5)
    assert rb.stats()["final_observations_lost"] == 0


def test_edits_and_loads_are_no_losses():
    finals = FinalObservations(["obs"], LazyTensorStorage(4))
    rb = buffer(finals, capacity=20)
    for at in range(12):
        rb.extend(episode(5, 5 * at))
    rb[[4]] = steps([True], first=44)
    again = pickle.loads(pickle.dumps(rb))
    for one in (rb, again, copy.deepcopy(rb)):
        check(one.sample(64), 5)


# ---- by default ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["uniform", "slices"])
@pytest.mark.parametrize("length", [1, 5])
def test_the_default_has_a_place_for_each_row(length, inner):
    if (length, inner) == (1, "slices"):
        pytest.skip("no windows")
    finals = FinalObservations(["obs"])
    rb = buffer(finals, inner)
    assert finals.storage.max_size == 200
    for at in range(500 // length):
        rb.extend(episode(length, at * length))
        check(rb.sample(32), length)
    assert rb.stats()["final_observations_lost"] == 0


def _write(rb):
    rb.extend(episode(5, 5))


@pytest.mark.parametrize("late", [False, True])
def test_the_default_of_a_buffer_that_processes_share(late):
    finals = FinalObservations(["obs"])
    rb = buffer(finals, **({} if late else {"shared": True}))
    if late:
        rb.share()
    rb.extend(episode(5, 0))
    child = torch.multiprocessing.get_context("fork").Process(target=_write, args=(rb,))
    child.start()
    child.join()
    batch = rb.sample(200)
    check(batch, 5)
    assert batch["number"].unique().tolist() == list(range(10))
    rb.close()
    finals.storage.close()


def test_rows_that_are_shared_later_take_their_final_observations_along():
    finals = FinalObservations(["obs"])
    rb = buffer(finals)
    rb.extend(episode(5, 0))
    rb.share()
    assert finals.storage.shared
    check(rb.sample(32), 5)
    rb.close()
    finals.storage.close()


def test_the_default_of_a_directory_is_opened_again(tmp_path):
    for start in range(2):
        finals = FinalObservations(["obs"])
        storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "replay") if not start else None
        sampler = NextFromFollowing(RandomSampler(), finals)
        if start:
            rb = ReplayBuffer.open(tmp_path / "replay", sampler=sampler, transform=finals)
        else:
            rb = buffer(finals, storage=storage)
        assert finals.folder == tmp_path / "replay-finals"
        rb.extend(episode(5, 5 * start))
        check(rb.sample(64), 5)
        assert len(finals.storage) == start + 1
        rb.close()
        finals.storage.close()
    rb = ReplayBuffer.open(tmp_path / "replay")
    batch = rb.sample(200)
    check(batch, 5)
    assert batch["number"].unique().tolist() == list(range(10))
    rb.close()


def test_without_a_buffer_that_draws_with_them_there_is_no_default():
    finals = FinalObservations(["obs"])
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=finals)
    with pytest.raises(RuntimeError, match=r"expected a storage, as no buffer draws .*FinalObservations\(keys, Lazy"):
        rb.extend(episode(5, 0))
    assert len(rb) == 0


def test_memory_of_the_default_is_taken_as_episodes_end():
    finals = FinalObservations(["obs"])
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100_000), sampler=NextFromFollowing(RandomSampler(), finals), transform=finals
    )

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    frame = torch.zeros(5, 50_000, dtype=torch.uint8)  # 5 GB of places
    before = resident()
    rb.extend({"obs": frame, "next": {"obs": frame, "done": torch.arange(5) == 4}})
    assert resident() - before < 200e6
