"""An epoch of slices is over the trajectories that were there when it began, whatever is written beside it."""

import copy
from collections import Counter

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement

STEPS = 4


def _episodes(first, n=1, steps=STEPS):
    return {"episode": torch.arange(first, first + n).repeat_interleave(steps), "step": torch.arange(steps).repeat(n)}


def _buffer(storage, episodes, **arguments):
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", **arguments)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4, generator=torch.Generator().manual_seed(0))
    if episodes:
        rb.extend(_episodes(0, episodes))
    return rb


def _drawn(batch):
    return batch["episode"][::2].tolist()


def _epoch(rb, write, most=200):
    seen = Counter()
    for count, batch in enumerate(rb):
        assert count < most
        seen.update(_drawn(batch))
        write()
    return seen


@pytest.fixture(params=["ram", "directory"])
def storage(request, tmp_path):
    if request.param == "ram":
        return LazyTensorStorage
    return lambda size, **more: LazyMemmapStorage(size, scratch_dir=tmp_path / "store", **more)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_ends_while_trajectories_arrive(storage, shuffle):
    rb = _buffer(storage(400), 7, shuffle=shuffle)
    count = iter(range(7, 90))
    for live in (7, 11):  # the second epoch has what came during the first, one a batch
        assert _epoch(rb, lambda: rb.extend(_episodes(next(count)))) == Counter(range(live))


def test_an_epoch_that_every_write_begins_again_is_seen():
    """A negative control."""
    rb = _buffer(LazyTensorStorage(400), 7)
    count = iter(range(7, 90))

    def write():
        rb.extend(_episodes(next(count)))
        rb.sampler.observe(None, None)

    with pytest.raises(AssertionError):
        _epoch(rb, write, most=20)


@pytest.mark.filterwarnings("ignore:sample. batch_size")
@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_that_come_later_are_in_no_window(shuffle):
    rb = _buffer(LazyTensorStorage(400), 5, shuffle=shuffle)
    first = rb.sample()
    rb.extend({"episode": torch.full((50,), 4), "step": torch.arange(50) + STEPS})  # the open one goes on
    rest = [first, *(rb.sample() for _ in range(2))]
    assert rb.sampler.ran_out
    assert sorted(sum(map(_drawn, rest), [])) == list(range(5))
    assert max(int(batch["step"].max()) for batch in rest) < STEPS
    assert max(int(rb.sample(10)["step"].max()) for _ in range(30)) > STEPS  # of later epochs


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("n", [1, 3, 10])
def test_overwritten_trajectories_drop_out(storage, n, drop_last):
    rb = _buffer(storage(10 * STEPS), 10, drop_last=drop_last)
    begin = 10
    for _ in range(4):
        live, written = set(range(begin - 10, begin)), [begin]

        def write(written=written):
            rb.extend(_episodes(written[0], n))
            written[0] += n

        seen = _epoch(rb, write)
        assert live.issuperset(seen)
        assert max(seen.values()) == 1
        begin = written[0]


def test_removed_trajectories_drop_out_and_edited_ones_stay():
    rb = _buffer(LazyTensorStorage(100), 10)
    seen = _drawn(rb.sample())
    gone, edited = [i for i in range(10) if i not in seen][:2]
    rb.remove(torch.arange(gone * STEPS, (gone + 1) * STEPS))
    rb.set_at_("step", torch.arange(STEPS), range(edited * STEPS, (edited + 1) * STEPS))
    while not rb.sampler.ran_out:
        seen += _drawn(rb.sample())
    assert sorted(seen) == [i for i in range(10) if i != gone]


def test_lanes():
    rb = _buffer(LazyTensorStorage(240, lanes=3), 0)
    for lane, n in enumerate((2, 5, 9)):
        rb.extend(_episodes(100 * lane, n), lane=lane)
    expected = Counter(100 * lane + i for lane, n in enumerate((2, 5, 9)) for i in range(n))
    count = iter(range(900, 999))
    assert _epoch(rb, lambda: rb.extend(_episodes(next(count)), lane=0)) == expected


def test_a_saved_epoch_goes_on_without_later_trajectories(tmp_path):
    rb = _buffer(LazyTensorStorage(200), 9)
    seen = _drawn(rb.sample())
    rb.extend(_episodes(9, 3))
    state = copy.deepcopy(rb.sampler.state_dict())
    assert state["known"].shape == (9, 2)
    rb.dumps(tmp_path / "dump")
    other = _buffer(LazyTensorStorage(200), 1)
    other.loads(tmp_path / "dump")
    for one in (rb, other, rb):
        again = [*seen]
        while not one.sampler.ran_out:
            again += _drawn(one.sample())
        assert sorted(again) == list(range(9))
        rb.sampler.load_state_dict(state)
    for bad, kind in ((state["known"][1:], ValueError), ("x", TypeError)):
        with pytest.raises(kind, match="known"):
            rb.sampler.load_state_dict({**state, "known": bad})


@pytest.mark.parametrize("how", ["state", "dump"])
def test_a_loaded_epoch_ends_where_its_rest_is_overwritten(storage, how, tmp_path):
    """Before its first draw, too."""
    rb = _buffer(LazyTensorStorage(10 * STEPS), 10)
    rb.sample()
    other = _buffer(storage(10 * STEPS), 0)
    if how == "state":
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
    for one in (rb, other):
        assert not one.sampler.ran_out
        one.extend(_episodes(10, 10))
        assert one.sampler.ran_out
        assert one.sampler.state_dict()["ran_out"]
        assert one.sampler.epoch(one.storage)[1] == 0


def test_a_state_of_earlier_versions_goes_on_where_nothing_was_written_since():
    rb = _buffer(LazyTensorStorage(200), 9)
    seen = _drawn(rb.sample())
    state = rb.sampler.state_dict()
    del state["known"]
    rb.sampler.load_state_dict(state)
    while not rb.sampler.ran_out:
        seen += _drawn(rb.sample())
    assert sorted(seen) == list(range(9))
