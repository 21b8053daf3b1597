"""Next observations from following rows: against buffers that store them, and where they cannot be known."""

import copy
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    FinalObservations,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextFromFollowing,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)


def steps(done, *, first=0, lane=0):
    """Steps of a lane, numbered from ``first``. A final observation is negative, so that no other row has it."""
    done = torch.tensor(done)
    n = len(done)
    number = torch.arange(first, first + n)
    obs = torch.stack([torch.full((n,), lane), number], -1).float()
    following = obs + torch.tensor([0, 1])
    following[done] *= -1
    next_ = {"obs": following, "reward": number.float().unsqueeze(-1), "done": done.unsqueeze(-1)}
    return TensorDict(
        {"obs": obs, "number": number, "lane": torch.full((n,), lane), "next": TensorDict(next_, [n])}, [n]
    )


def buffer(
    wrap=lambda s: s, *, inner=RandomSampler, finals=50, capacity=100, lanes=1, kind=TensorDictReplayBuffer, **arguments
):
    kept = finals if isinstance(finals, FinalObservations) else FinalObservations(["obs"], LazyTensorStorage(finals))
    arguments.setdefault("storage", LazyTensorStorage(capacity, lanes=lanes))
    sampler = wrap(NextFromFollowing(inner(), kept))
    return kind(sampler=sampler, transform=kept, generator=torch.Generator().manual_seed(0), **arguments)


def check(batch, ends):
    """The next observations that were written; ``ends``: numbers of the last steps, of each lane."""
    for lane, number, there in zip(
        batch["lane"].tolist(), batch["number"].tolist(), batch["next", "obs"].tolist(), strict=True
    ):
        sign = -1 if number in ends[lane] else 1
        assert there == [sign * lane, sign * (number + 1)]


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.booleans(), min_size=1, max_size=9)), min_size=1, max_size=12
    ),
    alone=st.booleans(),
)
def test_as_if_they_were_stored(pieces, alone):
    rb, ends, written = buffer(capacity=24, lanes=2), [set(), set()], [0, 0]
    for lane, done in pieces:
        data = steps(done, first=written[lane], lane=lane)
        ends[lane] |= {written[lane] + i for i, last in enumerate(done) if last}
        written[lane] += len(done)
        for row in data if alone else [data]:
            (rb.add if alone else rb.extend)(row, lane=lane)
    oldest = [max(0, n - 12) for n in written]
    known = {
        (lane, number)
        for lane in range(2)
        for number in range(oldest[lane], written[lane])
        if number in ends[lane] or number + 1 < written[lane]
    }
    assert rb.can_sample(3) == bool(known)
    if not known:
        with pytest.raises(NoSampleable, match="has a next observation yet"):
            rb.sample(3)
        return
    batch = rb.sample(400)
    check(batch, ends)
    assert set(zip(batch["lane"].tolist(), batch["number"].tolist(), strict=True)) <= known
    if len(known) < 12:
        assert set(zip(batch["lane"].tolist(), batch["number"].tolist(), strict=True)) == known


@pytest.mark.parametrize("inside", [False, True])
def test_with_returns_of_several_steps(inside):
    done = [False, False, True, False, False, False, False]
    if inside:
        kept = FinalObservations(["obs"], LazyTensorStorage(9))
        sampler = NextFromFollowing(NStep(RandomSampler(), 3, 1.0), kept)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, transform=kept)
    else:
        rb = buffer(lambda s: NStep(s, 3, 1.0))
    rb.extend(steps(done))
    batch = rb.sample(200)
    there = dict(zip(batch["number"].tolist(), batch["next", "obs"][:, 1].tolist(), strict=True))
    assert there == {0: -3, 1: -3, 2: -3, 3: 6}  # of 4, 5 and 6 the step that is reached has no next one yet
    assert batch["steps_to_next_obs"][batch["number"] == 3].unique().tolist() == [3]


def test_around_priorities_and_stacks():
    rb = buffer(lambda s: FrameStack(s, 2, -1, ["number"]), inner=lambda: PrioritizedSampler(100, 1.0, 1.0, eps=0.0))
    data = steps([False, False, True, False])
    rb.extend(data.set("number", data["number"].unsqueeze(-1)))
    batch = rb.sample(100)
    assert batch["number"].shape == (100, 2)
    check(batch.set("number", batch["number"][:, 1]), [{2}])
    batch["td_error"] = (batch["number"] == 2).float()
    rb.update_tensordict_priority(batch)
    rb.update_priority(torch.tensor([3]), 0.0)
    assert rb.sample(20)["number"][:, 1].unique().tolist() == [2]


@pytest.mark.parametrize("order", ["around", "inside", "further inside", "further out"])
def test_stacks_of_next_observations_alone_are_refused_where_the_buffer_is_built(order):
    """A single frame beside a stack of next frames, [B, 1, ...] and [B, 4, ...], would be told by nothing."""
    kept = FinalObservations(["pixels", "obs"], LazyTensorStorage(9))

    def stacked(sampler):
        return FrameStack(sampler, 4, -1, [("next", "obs")])

    def following(sampler):
        return NextFromFollowing(sampler, kept)

    sampler = {
        "around": lambda: stacked(following(RandomSampler())),
        "inside": lambda: following(stacked(RandomSampler())),
        "further inside": lambda: following(NStep(stacked(RandomSampler()), 3, 1.0)),
        "further out": lambda: RewardToGo(stacked(NStep(following(RandomSampler()), 3, 1.0))),
    }[order]()
    says = r"FrameStack: in_keys: .*'obs'.*NextFromFollowing"
    with pytest.raises(TypeError, match=says):
        TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, transform=kept)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=kept)
    before = rb.sampler
    with pytest.raises(TypeError, match=says):
        rb.set_sampler(sampler)
    assert rb.sampler is before


def test_dicts():
    rb = buffer(kind=ReplayBuffer)
    data = steps([False, True, False])
    rb.extend({**data.exclude("next").to_dict(), "next": data["next"].to_dict()})
    batch = rb.sample(50)
    there = dict(zip(batch["number"].tolist(), batch["next"]["obs"][:, 1].tolist(), strict=True))
    assert there == {0: 1, 1: -2}


@pytest.mark.parametrize("flag", [bool, np.bool_, torch.tensor, lambda x: np.array([x])])
@pytest.mark.parametrize("how", ["add", "appender"])
def test_steps_one_by_one_whose_flags_are_of_any_kind(flag, how):
    """Gymnasium's environments return flags of Python; transforms see each as a batch of one."""
    finals = FinalObservations(["obs"], LazyTensorStorage(5))
    sampler = NextFromFollowing(RandomSampler(), finals=finals)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, transform=finals, batch_size=50)
    add = rb.add if how == "add" else lambda row: rb.appender().add(**row)
    for t in range(9):
        ends = {"terminated": flag(t == 5), "truncated": flag(False)}
        add(
            {
                "obs": np.full(2, t),
                "reward": 1.0,
                "action": 3,
                "next": {"obs": np.full(2, 10 * t + 1 if t == 5 else t + 1), **ends},
            }
        )
    stored = rb[:]
    assert (stored["reward"].dtype, stored["action"].dtype) == (torch.float32, torch.int64)
    assert stored["next"]["terminated"].flatten().tolist() == [t == 5 for t in range(9)]
    batch = rb.sample()
    pairs = set(zip(batch["obs"][:, 0].tolist(), batch["next"]["obs"][:, 0].tolist(), strict=True))
    assert pairs <= {(t, 51 if t == 5 else t + 1) for t in range(8)}


def test_edits_keep_their_final_observations():
    rb = buffer()
    rb.extend(steps([False, False, True]))
    rb[[1]] = steps([True], first=77)
    batch = rb.sample(60)
    there = dict(zip(batch["number"].tolist(), batch["next", "obs"][:, 1].tolist(), strict=True))
    assert there == {0: 77, 77: -78, 2: -3}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies(again):
    rb = buffer()
    rb.extend(steps([False, True] * 5))
    twin = again(rb)
    assert twin.sampler.finals is twin.transform[0]
    twin.extend(steps([False, True], first=10))
    check(twin.sample(99), [set(range(1, 12, 2))])
    check(rb.sample(99), [set(range(1, 10, 2))])


def test_shared_with_a_forked_writer(tmp_path):
    kept = FinalObservations(["obs"], LazyMemmapStorage(50, scratch_dir=tmp_path / "finals"))
    rb = buffer(finals=kept, storage=LazyMemmapStorage(40, lanes=2, scratch_dir=tmp_path / "rows"))
    rb.extend(steps([False, True, False, True]), lane=0)
    writer = torch.multiprocessing.get_context("fork").Process(
        target=lambda: rb.extend(steps([False, True] * 5, lane=1), lane=1)
    )
    writer.start()
    writer.join()
    batch = rb.sample(300)
    check(batch, [{1, 3}, {1, 3, 5, 7, 9}])
    assert batch["lane"].unique().tolist() == [0, 1]
    rb.close()
    kept.storage.close()
    kept = FinalObservations(["obs"], LazyMemmapStorage.open(tmp_path / "finals"))
    rb = ReplayBuffer.open(tmp_path / "rows", sampler=NextFromFollowing(RandomSampler(), kept), transform=kept)
    check(rb.sample(300), [{1, 3}, {1, 3, 5, 7, 9}])
    rb.close()
    kept.storage.close()


def test_beside_a_writer():
    rb = buffer(capacity=64, finals=64)
    rb.extend(steps([False, True] * 5))
    stop = threading.Event()

    def write():
        first = 10
        while not stop.is_set():
            done = [i % 7 == 0 for i in range(first, first + 5)]
            rb.extend(steps(done, first=first))
            first += 5

    writer = threading.Thread(target=write)
    writer.start()
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            batch = rb.sample(32)
            number, there = batch["number"], batch["next", "obs"][:, 1]
            last = torch.where(number < 10, number % 2 == 1, number % 7 == 0)
            assert torch.equal(there, torch.where(last, -1.0, 1.0) * (number + 1))
    finally:
        stop.set()
        writer.join()


# ---- where it cannot be exact --------------------------------------------------------------------------------------------


def test_final_observations_of_another_storage():
    rb, other = buffer(), buffer()
    rb.extend(steps([True] * 5))
    other.extend(steps([True] * 5))
    rb.set_sampler(other.sampler)
    with pytest.raises(RuntimeError, match="not the one that was written to"):
        rb.sample(5)


def test_a_trajectory_that_ends_without_a_flag():
    kept = FinalObservations(["obs"], LazyTensorStorage(9))
    sampler = NextFromFollowing(RandomSampler(), kept, traj_key="lane")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, transform=kept)
    rb.extend(steps([False] * 3, lane=0))
    rb.extend(steps([False] * 3, lane=1))
    with pytest.raises(RuntimeError, match="without an end flag"):
        rb.sample(50)


def test_a_shared_buffer_needs_shared_final_observations():
    rb = buffer(shared=True)
    rb.extend(steps([True] * 3))
    with pytest.raises(RuntimeError, match="storage of final observations is not"):
        rb.sample(5)
    rb.close()


def test_what_is_refused():
    kept = FinalObservations(["obs"], LazyTensorStorage(9))
    with pytest.raises(TypeError, match="expected one with replacement"):
        NextFromFollowing(SamplerWithoutReplacement(), kept)
    with pytest.raises(TypeError, match="a NextFromFollowing inside"):
        NextFromFollowing(NextFromFollowing(RandomSampler(), kept), kept)
    with pytest.raises(TypeError, match="expected FinalObservations"):
        NextFromFollowing(RandomSampler(), None)
    with pytest.raises(TypeError, match="expected a LazyTensorStorage"):
        FinalObservations(["obs"], ListStorage(9))
    with pytest.raises(TypeError, match="expected a list"):
        FinalObservations("obs", LazyTensorStorage(9))
    with pytest.raises(TypeError, match="expected a list"):
        FinalObservations(None, LazyTensorStorage(9))


def test_data_that_does_not_fit():
    kept = FinalObservations(["obs"], LazyTensorStorage(9))
    data = steps([True])
    with pytest.raises(KeyError, match="end flags.*Name the flags of your rows with end_keys="):
        kept.inv(data.exclude(("next", "done")))
    with pytest.raises(KeyError, match="expected an entry"):
        kept.inv(data.exclude(("next", "obs")))
    with pytest.raises(KeyError, match="expected an entry 'obs'"):
        kept.inv(data.exclude("obs"))
    with pytest.raises(RuntimeError, match="one batch dimension"):
        kept.inv(data.unsqueeze(0))
    with pytest.raises(TypeError, match="TensorDicts or dicts"):
        kept.inv([data])
    wide = data.clone()
    wide["next", "obs"] = wide["next", "obs"].double()
    with pytest.raises(RuntimeError, match="float32 as 'obs' has, got"):
        kept.inv(wide)
    assert len(kept.storage) == 0
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=NextFromFollowing(RandomSampler(), kept))
    rb.extend(data)
    with pytest.raises(KeyError, match="transform=finals"):
        rb.sample(2)


def test_end_keys():
    kept = FinalObservations(["obs"], LazyTensorStorage(9), end_keys=["over"])
    data = steps([False, True, False])
    data["over"] = torch.tensor([1, 0, 0])
    stored = kept.inv(data)
    assert (stored["next", "final"][:, 0] >= 0).tolist() == [True, False, False]
    assert ("next", "obs") in data.keys(True)
    assert ("next", "obs") not in stored.keys(True)


# ---- keys alone: rows without final observations -------------------------------------------------------------------------


def flat_rows(lengths, lanes=1):
    """Rows as a data set has them: of each, the number of its step, and two flags that end episodes by turns."""
    n = sum(lengths)
    last = torch.zeros(n, dtype=torch.bool)
    last[torch.tensor(lengths).cumsum(0) - 1] = True
    by_terminal = (torch.arange(n) % 2 == 0) & last
    return {"obs": torch.arange(n), "rewards": torch.ones(n), "terminals": by_terminal, "timeouts": last & ~by_terminal}


ENDS = ["terminals", "timeouts"]
DATA = [1, 4, 2, 1, 9, 3]
#: Steps that another one of the same episode follows.
FOLLOWED = {step for start, end in ((1, 5), (5, 7), (8, 17), (17, 20)) for step in range(start, end - 1)}
#: Last steps with a terminal. Those with a timeout are 7 and 19.
TERMINATED = {0, 4, 6, 16}
PAIRS = {(step, step + 1) for step in FOLLOWED} | {(step, step) for step in TERMINATED}


def drawn(rb, times=30):
    return [
        row for _ in range(times) for row in zip(*(column.tolist() for column in observed(rb.sample(64))), strict=True)
    ]


def observed(batch):
    return batch["obs"], batch["next"]["obs"]


def test_keys_alone_leave_truncated_steps_out_and_repeat_terminated_ones():
    sampler = NextFromFollowing(RandomSampler(), ["obs"], end_keys=ENDS)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    rb.extend(flat_rows(DATA))
    assert set(drawn(rb)) == PAIRS


@pytest.mark.parametrize("shape", [(20,), (20, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_keys_alone_with_flags_of_the_next_step(shape, dtype):
    rows = flat_rows(DATA)
    flags = {
        name: rows[old].to(dtype).reshape(shape) for name, old in (("terminated", ENDS[0]), ("truncated", ENDS[1]))
    }
    rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=NextFromFollowing(RandomSampler(), ["obs"]))
    rb.extend({"obs": rows["obs"], "next": flags})
    assert set(drawn(rb)) == PAIRS


def test_keys_alone_leave_last_steps_out_where_no_flag_tells_terminated_from_truncated():
    rows = flat_rows(DATA)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=NextFromFollowing(RandomSampler(), ["obs"]))
    rb.extend({"obs": rows["obs"], "next": {"done": rows["terminals"] | rows["timeouts"]}})
    assert set(drawn(rb)) == {(step, step + 1) for step in FOLLOWED}


def test_keys_alone_by_priority_and_by_id():
    sampler = NextFromFollowing(PrioritizedSampler(20, 1.0, 1.0), ["obs"], traj_key="episode")
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    rows = flat_rows(DATA)
    rb.extend({"obs": rows["obs"], "episode": torch.repeat_interleave(torch.arange(6), torch.tensor(DATA))})
    rb.update_priority(torch.arange(20), torch.where(torch.arange(20) == 9, 50.0, 1.0))
    steps = [step for step, _ in drawn(rb)]
    assert set(steps) == FOLLOWED
    assert steps.count(9) > len(steps) / 2


def test_keys_alone_with_returns_of_several_steps():
    sampler = NStep(NextFromFollowing(RandomSampler(), ["obs"], end_keys=ENDS), 3, 0.5, reward_key="rewards")
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    rb.extend(flat_rows(DATA))
    pairs = set(drawn(rb))
    whole = {(step, step + 3) for step in range(20) if {step, step + 1, step + 2} <= FOLLOWED}
    assert pairs == whole | {
        (max(end - left, start), end) for start, end in ((0, 0), (1, 4), (5, 6), (8, 16)) for left in range(3)
    }
    batch = rb.sample(256)
    reached = batch["next"]["obs"]
    ended = torch.isin(reached, torch.tensor(sorted(TERMINATED))) & (reached - batch["obs"] < 3)
    assert torch.equal(batch["terminals"], ended)
    assert batch["rewards"][~ended].unique().tolist() == [1.75]
    assert batch["rewards"][ended].unique().tolist() == [1.0, 1.5, 1.75]


def test_keys_alone_with_frames():
    sampler = FrameStack(NextFromFollowing(RandomSampler(), ["obs"], end_keys=ENDS), n=2, dim=None, in_keys=["obs"])
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    rb.extend(flat_rows(DATA))
    batch = rb.sample(256)
    assert torch.equal(batch["next"]["obs"][:, 0], batch["obs"][:, 1])
    assert set(zip(batch["obs"][:, 1].tolist(), batch["next"]["obs"][:, 1].tolist(), strict=True)) <= PAIRS


def test_keys_alone_are_noted_copied_and_read(tmp_path):
    sampler = NextFromFollowing(RandomSampler(), ["obs"], end_keys=ENDS)
    rb = ReplayBuffer.open_or_create(tmp_path / "data", 20, sampler=sampler, batch_size=64)
    rb.extend(flat_rows(DATA))
    rb.close()
    for readonly in (True, False):
        with ReplayBuffer.open(tmp_path / "data", readonly=readonly) as again:
            assert repr(again.sampler) == "NextFromFollowing(RandomSampler(), ['obs'])"
            assert again.sampler.recordable
            assert set(drawn(again)) == PAIRS
    copied = pickle.loads(pickle.dumps(sampler))
    assert copied.followed == (("obs",),)


def test_keys_alone_where_nothing_can_be_drawn():
    rb = ReplayBuffer(storage=LazyTensorStorage(3), sampler=NextFromFollowing(RandomSampler(), ["obs"], end_keys=ENDS))
    rb.extend(flat_rows([1, 1, 1]) | {"terminals": torch.zeros(3), "timeouts": torch.ones(3)})
    assert not rb.can_sample(2)
    with pytest.raises(NoSampleable, match="no row that is drawn has a next observation"):
        rb.sample(2)


def test_keys_alone_refuse_windows_and_rows_with_next_observations():
    with pytest.raises(TypeError, match="windows would hold last steps"):
        NextFromFollowing(SliceSampler(slice_len=2), ["obs"])
    with pytest.raises(TypeError, match="expected a list of keys"):
        NextFromFollowing(RandomSampler(), "obs")
    rb = ReplayBuffer(storage=LazyTensorStorage(3), sampler=NextFromFollowing(RandomSampler(), ["obs"], end_keys=ENDS))
    rb.extend(flat_rows([3]) | {"next": {"obs": torch.ones(3)}})
    with pytest.raises(ValueError, match="have a field"):
        rb.sample(2)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(3), sampler=NextFromFollowing(RandomSampler(), ["absent"], end_keys=ENDS)
    )
    rb.extend(flat_rows([3]))
    with pytest.raises(KeyError, match="expected a stored field"):
        rb.sample(2)
