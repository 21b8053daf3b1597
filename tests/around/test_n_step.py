"""Returns of several steps: by hand, beside TorchRL's, around every sampler, beside writers, and what is refused."""

import copy
import pickle
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from engram import (
    FrameStack,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
    WriterStalled,
)
from engram.types import Draw

INNER = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(1000, 0.6, 0.4),
}


def steps(lengths, *, first=0, open_end=False, cut=(), **more):
    """Episodes of these lengths; those in ``cut`` are truncated. Rewards and observations say where they belong."""
    episode = torch.cat([torch.full((n,), first + i) for i, n in enumerate(lengths)])
    step = torch.cat([torch.arange(n) for n in lengths])
    last = (step + 1 == torch.tensor(lengths)[episode - first]).unsqueeze(-1)
    if open_end:
        last[-1] = False
    truncated = last & torch.tensor([int(e) in cut for e in episode]).unsqueeze(-1)
    n = len(step)
    flags = {"done": last, "truncated": truncated, "terminated": last & ~truncated}
    following = {
        "observation": torch.stack([episode, step + 1], -1).float(),
        "reward": (1.0 + step).unsqueeze(-1),
        **flags,
    }
    td = {"number": episode, "step": step, "observation": torch.stack([episode, step], -1).float(), **more}
    return TensorDict({**td, "next": TensorDict(following, [n])}, [n])


def buffer(sampler, *data, capacity=100, kind=TensorDictReplayBuffer, storage=None, lanes=1, **arguments):
    storage = LazyTensorStorage(capacity, lanes=lanes) if storage is None else storage
    rb = kind(storage=storage, sampler=sampler, generator=torch.Generator().manual_seed(0), **arguments)
    for part in data:
        rb.extend(part)
    return rb


def by_row(batch):
    """What the batch says of each row, once."""
    seen = {}
    for i, row in enumerate(batch["index"].tolist()):
        seen.setdefault(row, batch[i])
    return [seen[row] for row in sorted(seen)]


def test_by_hand():
    rb = buffer(NStep(RandomSampler(), 3, 0.5), steps([4, 2, 3], cut={1}, open_end=True))
    rows = by_row(rb.sample(500))
    assert [float(row["next", "reward"]) for row in rows] == [2.75, 4.5, 5, 4, 2, 2, 2.75, 3.5, 3]
    assert [int(row["steps_to_next_obs"]) for row in rows] == [3, 3, 2, 1, 2, 1, 3, 2, 1]
    assert [float(row["gamma"]) for row in rows] == [0.125, 0.125, 0.25, 0.5, 0.25, 0.5, 0.125, 0.25, 0.5]
    assert [row["next", "observation"].tolist()[1] for row in rows] == [3, 4, 4, 4, 2, 2, 3, 3, 3]
    assert [bool(row["next", "terminated"]) for row in rows] == [False, True, True, True] + [False] * 5
    assert [bool(row["next", "truncated"]) for row in rows] == [False] * 4 + [True] * 2 + [False] * 3
    assert [float(row["next", "original_reward"]) for row in rows] == [1, 2, 3, 4, 1, 2, 1, 2, 3]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 0, 1, 0, 1, 2]


def test_shapes_and_dtypes():
    batch = buffer(NStep(RandomSampler, 3, 0.9), steps([5])).sample(7)
    for key, dtype in (
        (("next", "reward"), torch.float32),
        ("steps_to_next_obs", torch.int64),
        ("gamma", torch.float32),
    ):
        assert batch[key].shape == (7, 1)
        assert batch[key].dtype is dtype
    assert torch.allclose(batch["gamma"], (0.9 ** batch["steps_to_next_obs"].double()).float())


def test_one_step_is_the_plain_sample():
    plain, wrapped = buffer(RandomSampler(), steps([4, 9])), buffer(NStep(RandomSampler(), 1, 0.9), steps([4, 9]))
    a, b = plain.sample(50), wrapped.sample(50)
    assert (a["index"] == b["index"]).all()
    assert all((a[key] == b[key]).all() for key in a.keys(True, True))


def test_never_across_the_seam():
    rb = buffer(NStep(RandomSampler(), 4, 1.0), steps([17], open_end=True), capacity=10)
    for row in by_row(rb.sample(500)):
        left = 17 - int(row["step"])
        assert int(row["steps_to_next_obs"]) == min(4, left)
        assert row["next", "observation"].tolist() == [0, int(row["step"]) + min(4, left)]


def test_grows_with_what_is_written():
    rb = buffer(NStep(RandomSampler(), 3, 1.0), steps([2], open_end=True))
    assert [int(row["steps_to_next_obs"]) for row in by_row(rb.sample(100))] == [2, 1]
    rb.extend(steps([3])[2:])
    assert [int(row["steps_to_next_obs"]) for row in by_row(rb.sample(100))] == [3, 2, 1]


@pytest.mark.parametrize("given", [{}, {"traj_key": "number"}])
def test_ends_by_id_and_by_any_flag(given):
    data = steps([3, 3], open_end=True)
    if given:
        data["next"] = data["next"].exclude("done", "terminated", "truncated")
    else:  # flags that contradict: done is not set at a truncation
        data["next", "done"].zero_()
        data["next", "truncated"][2] = True
    rb = buffer(NStep(RandomSampler(), 9, 1.0, **given), data)
    assert [int(row["steps_to_next_obs"]) for row in by_row(rb.sample(200))] == [3, 2, 1, 3, 2, 1]


def test_flags_that_are_edited():
    rb = buffer(NStep(RandomSampler(), 9, 1.0), steps([6]))
    assert [int(row["steps_to_next_obs"]) for row in by_row(rb.sample(200))] == [6, 5, 4, 3, 2, 1]
    for key, row in (("truncated", 2), ("done", 3)):
        rb.set_at_(("next", key), torch.ones(1, 1, dtype=torch.bool), [row])
    assert [int(row["steps_to_next_obs"]) for row in by_row(rb.sample(200))] == [3, 2, 1, 1, 2, 1]


def test_end_keys_alone():
    rb = buffer(
        NStep(RandomSampler(), 9, 1.0, end_keys=["over", "not there"]),
        steps([6], over=torch.tensor([0, 1, 0, 0, 1, 0])),
    )
    assert [int(row["steps_to_next_obs"]) for row in by_row(rb.sample(200))] == [2, 1, 3, 2, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_of_any_shape(dtype):
    n = 9
    reward = torch.arange(n * 6, dtype=dtype).reshape(n, 2, 3)
    data = TensorDict({"r": reward, "next": {"done": torch.zeros(n, 1).bool()}}, [n])
    rows = by_row(buffer(NStep(RandomSampler(), 4, 0.5, reward_key="r"), data).sample(300))
    for t, row in enumerate(rows):
        assert row["r"].dtype is dtype
        assert (row["r"] == sum(0.5**i * reward[t + i] for i in range(min(4, n - t)))).all()
        assert (row["original_reward"] == reward[t]).all()


def test_next_keys():
    data = steps([6], far=torch.arange(6), near=torch.arange(6))
    rows = by_row(buffer(NStep(RandomSampler(), 3, 1.0, next_keys=["far", ("next", "done")]), data).sample(200))
    assert [int(row["far"]) for row in rows] == [2, 3, 4, 5, 5, 5]
    assert [int(row["near"]) for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [bool(row["next", "done"]) for row in rows] == [False, False, False, True, True, True]
    assert [int(row["next", "observation"][1]) for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("inner", INNER)
def test_around_samplers_of_rows(inner):
    rb = buffer(NStep(INNER[inner](), 3, 1.0), steps([30, 20]), batch_size=50)
    batch, info = rb.sample(return_info=True)
    assert (batch["index"] == info["index"]).all()
    end = torch.where(batch["number"] == 0, 30, 20)
    k = (end - batch["step"]).clamp(max=3)
    assert (batch["steps_to_next_obs"].flatten() == k).all()
    assert (batch["next", "observation"][:, 1] == batch["step"] + k).all()
    if inner == "epoch":
        assert sorted(batch["index"].tolist()) == list(range(50))
        assert len(list(rb)) == 1
    if inner == "prioritized":
        assert (batch["priority_weight"] == 1).all()
        assert batch["index_generation"].shape == (50,)


def test_priorities_are_those_of_the_rows():
    rb = buffer(NStep(PrioritizedSampler(100, 1.0, 1.0, eps=0.0), 3, 1.0), steps([10]))
    batch = rb.sample(400)
    batch["td_error"] = torch.where(batch["step"] == 4, 1.0, 0.0)
    rb.update_tensordict_priority(batch)
    assert rb.sample(50)["step"].unique().tolist() == [4]
    rb[[4]] = rb[[4]]
    rb.update_tensordict_priority(batch)
    assert rb.stats()["priority_updates_dropped"] == 0
    rb.writer.write_at([4], steps([10])[4:5])
    rb.update_tensordict_priority(batch)
    assert rb.stats()["priority_updates_dropped"] > 0
    rb.sampler.beta = 0.25
    assert rb.sampler.sampler.beta == rb.sampler.beta == 0.25


def test_custom_samplers():
    class Newest:
        heard = 0

        def draw(self, extent, batch_size, key):
            return Draw(torch.full((batch_size,), extent.size - 2), info={"twice": torch.arange(batch_size)})

        def observe(self, write, data):
            self.heard += 1

        def update_priority(self, index, priority, *, generation=None):
            self.updated = index

        def state_dict(self):
            return {"heard": self.heard}

        def load_state_dict(self, state_dict):
            self.heard = state_dict["heard"]

    rb = buffer(NStep(Newest(), 5, 1.0), steps([6]), steps([7]))
    batch = rb.sample(3)
    assert batch["step"].tolist() == [5, 5, 5]
    assert batch["steps_to_next_obs"].tolist() == [[2]] * 3
    assert batch["twice"].tolist() == [0, 1, 2]
    assert rb.sampler.state_dict() == {"heard": 2}
    rb.sampler.load_state_dict({"heard": 7})
    rb.update_priority(torch.tensor([1]), 1.0)
    assert (rb.sampler.sampler.heard, rb.sampler.sampler.updated.tolist()) == (7, [1])
    assert not rb.sampler.recordable


def test_plain_buffers_have_new_entries_in_batch_and_info():
    rows = steps([5])
    for data in (rows, {**rows.exclude("next").to_dict(), "next": rows["next"].to_dict()}):
        batch, info = buffer(NStep(RandomSampler(), 5, 1.0), data, kind=ReplayBuffer).sample(20, return_info=True)
        k = 5 - batch["step"]
        assert (info["steps_to_next_obs"].flatten() == k).all()
        assert (info["next", "original_reward"].flatten() == 1 + batch["step"]).all()
        assert (batch["next"]["observation"][:, 1] == 5).all()
        for key in ("steps_to_next_obs", "gamma"):
            assert batch[key] is info[key]
        assert batch["next"]["original_reward"] is info["next", "original_reward"]
        assert "index" not in batch.keys()


def test_generations_where_they_are_tracked():
    rb = buffer(NStep(RandomSampler(), 3, 1.0), steps([5]), writer=RoundRobinWriter(track_generations=True))
    batch, info = rb.sample(9, return_info=True)
    assert (info["index_generation"] == rb.storage.tickets_of(batch["index"])).all()


def test_columns_of_a_storage_with_more_dimensions():
    data = torch.stack([steps([6, 4]), steps([3, 7], first=7)])
    rb = buffer(NStep(RandomSampler(), 4, 1.0), data, storage=LazyTensorStorage(40, ndim=2))
    batch = rb.sample(300)
    length = torch.tensor([{0: 6, 1: 4, 7: 3, 8: 7}[int(e)] for e in batch["number"]])
    assert (batch["steps_to_next_obs"].flatten() == (length - batch["step"]).clamp(max=4)).all()
    assert batch["index"].shape == (300, 2)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies(again):
    rb = buffer(FrameStack(NStep(RandomSampler(), 3, 1.0), 2, -1, ["observation"]), steps([9]))
    rb.sample(3)
    twin = again(rb)
    a, b = rb.sample(20), twin.sample(20)
    assert (a["index"] == b["index"]).all()
    assert (a["next", "reward"] == b["next", "reward"]).all()
    assert b["observation"].shape == (20, 4)


def test_shared_and_reopened(tmp_path):
    sampler = RewardToGo(
        FrameStack(NStep(PrioritizedSampler(100, 0.6, 0.4), 3, 0.5), 2, -1, ["observation"], padding="constant")
    )
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path)
    rb = buffer(sampler, steps([9], open_end=True), storage=storage, batch_size=300)
    assert rb.sample()["observation"].shape == (300, 4)
    rb.close()
    rb = ReplayBuffer.open(tmp_path)
    assert repr(rb.sampler) == repr(sampler)
    assert [float(row["next", "reward"]) for row in by_row(rb.sample())[:2]] == [2.75, 4.5]
    rb.close()
    rb = buffer(NStep(RandomSampler(), 3, 0.5), steps([9]))
    before = by_row(rb.sample(200))
    after = by_row(rb.share().sample(200))
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    rb.close()


@pytest.mark.parametrize("open_end", [False, True])
def test_steps_to_the_end_of_the_episode(tmp_path, open_end):
    """Counted to the last stored step, under a name of the user's, and noted with the store."""
    sampler = RewardToGo(RandomSampler(), steps_key=("info", "left"))
    data = steps([4, 1, 5], open_end=open_end)
    rb = buffer(sampler, data, storage=LazyMemmapStorage(100, scratch_dir=tmp_path), batch_size=300)
    for again in (False, True):
        if again:
            rb.close()
            rb = ReplayBuffer.open(tmp_path)
            assert repr(rb.sampler) == repr(sampler)
        rows = by_row(rb.sample())
        assert [int(row["info", "left"]) for row in rows] == [4, 3, 2, 1, 1, 5, 4, 3, 2, 1]
        assert rows[0]["info", "left"].dtype == torch.int64
    rb.close()
    assert "steps_key" not in RewardToGo(RandomSampler()).config()


def test_sharing_a_table_with_slices():
    slices = SliceSampler(slice_len=2)
    rb = buffer(slices, steps([4, 5]))
    rb.sample(4)
    rb.set_sampler(NStep(RandomSampler(), 3, 1.0))
    rb.sample(4)
    assert len(rb.storage.store.indexes) <= 1
    rb.set_sampler(NStep(RandomSampler(), 3, 1.0, traj_key="number"))
    with pytest.raises(IncompatibleStore):
        rb.sample(4)
    rb.set_sampler(NStep(RandomSampler(), 3, 1.0, traj_key="number", index="ids"))
    rb.sample(4)


def test_beside_a_writer():
    """Whoever writes laps the ring all the time; returns are always those of rows that belong together."""
    rb = buffer(NStep(RandomSampler(), 3, 0.5), capacity=64, lanes=2)
    rb.extend(steps([60]), lane=0)
    stop = threading.Event()

    def write(lane):
        episode = lane
        while not stop.is_set():
            episode += 2
            rb.extend(steps([1 + episode % 7], first=episode), lane=lane)

    writers = [threading.Thread(target=write, args=(lane,)) for lane in range(2)]
    for writer in writers:
        writer.start()
    try:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            batch = rb.sample(64)
            k, step = batch["steps_to_next_obs"].flatten(), batch["step"]
            assert (batch["next", "observation"][:, 0] == batch["observation"][:, 0]).all()
            assert (batch["next", "observation"][:, 1] == step + k).all()
            expected = sum(torch.where(i < k, 0.5**i * (1.0 + step + i), 0.0) for i in range(3))
            assert torch.equal(batch["next", "reward"].flatten(), expected)
            length = torch.where(batch["number"] > 1, 1 + batch["number"] % 7, 60)
            ended = batch["next", "done"].flatten()
            assert torch.equal(ended, step + k == length)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    rb.close()


def test_a_row_that_moves_at_every_try(monkeypatch):
    monkeypatch.setattr("engram._support.native.wait_limit", lambda: 0.05)

    class Stale(RandomSampler):
        def draw(self, extent, batch_size, key):
            draw = super().draw(extent, batch_size, key)
            return draw._replace(tickets=torch.full_like(draw.rows, 10**9))

    rb = buffer(NStep(Stale(), 3, 1.0), steps([9]))
    with pytest.raises(WriterStalled, match="around it, moved"):
        rb.sample(4)


def test_beside_torchrls_transform():
    transforms = pytest.importorskip("torchrl.envs.transforms")
    data = steps([7, 1, 12, 2, 30])
    theirs = transforms.MultiStepTransform(n_steps=4, gamma=0.9)._inv_call(data.clone().unsqueeze(0)).squeeze(0)
    rb = buffer(NStep(RandomSampler(), 4, 0.9), data)
    ours = torch.stack(by_row(rb.sample(2000)))[: len(theirs)]
    assert len(theirs) > 40
    for key in (("next", "reward"), ("next", "original_reward"), "gamma"):
        torch.testing.assert_close(ours[key].flatten(), theirs[key].flatten())
    for key in ("steps_to_next_obs", ("next", "observation")):
        assert (ours[key].flatten() == theirs[key].flatten()).all()


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 0.9), ValueError, "n: expected at least 1"),
        ((2.0, 0.9), TypeError, "n: expected an int"),
        ((True, 0.9), TypeError, "n: expected an int"),
        ((2, 1.1), ValueError, "gamma: expected"),
        ((2, float("nan")), ValueError, "gamma: expected"),
    ],
)
def test_bad_numbers(arguments, error, text):
    with pytest.raises(error, match=text):
        NStep(RandomSampler(), *arguments)


def test_bad_keys():
    for more in ({"reward_key": 1.5}, {"end_keys": "done"}, {"traj_key": ()}, {"next_keys": [1.5]}):
        with pytest.raises(TypeError, match="expected a"):
            NStep(RandomSampler(), 2, 0.9, **more)
    with pytest.raises(ValueError, match="index"):
        NStep(RandomSampler(), 2, 0.9, index="a b")


def test_what_is_no_sampler():
    with pytest.raises(TypeError, match="expected a sampler, got int"):
        NStep(3, 3, 0.9)
    with pytest.raises(TypeError, match="an NStep inside"):
        NStep(FrameStack(NStep(RandomSampler(), 3, 0.9), 2, -1, ["a"]), 3, 0.9)
    with pytest.raises(ValueError, match="innermost expander"):
        FrameStack(NStep(RandomSampler(), 3, 0.9), 2, -1, ["a"], traj_key="episode")


def test_storages_without_neighbours():
    with pytest.raises(RuntimeError, match="got a ListStorage"):
        buffer(NStep(RandomSampler(), 3, 0.9), storage=ListStorage(10))
    with pytest.raises(RuntimeError, match="on meta"):
        buffer(NStep(RandomSampler(), 3, 0.9), storage=LazyTensorStorage(10, device="meta"))
    sampler = NStep(RandomSampler(), 3, 0.9)
    with pytest.raises(RuntimeError, match="tensor storage on the CPU"):
        sampler.draw(None, 1, 0)


def test_rows_without_keys():
    with pytest.raises(RuntimeError, match="whose fields have keys, got a leaf"):
        buffer(NStep(RandomSampler(), 3, 0.9), torch.arange(9.0), kind=ReplayBuffer).sample(2)


def test_fields_that_are_missing_or_wrong():
    with pytest.raises(KeyError, match="NStep: expected a stored field, one of .*observation.* got .*r"):
        buffer(NStep(RandomSampler(), 3, 0.9, reward_key="r"), steps([5])).sample(2)
    with pytest.raises(KeyError, match="next_keys"):
        buffer(NStep(RandomSampler(), 3, 0.9, next_keys=["far"]), steps([5])).sample(2)
    data = steps([5])
    data["next", "reward"] = data["next", "reward"].to(torch.complex64)
    with pytest.raises(TypeError, match="'reward'.*expected real numbers, got complex64"):
        buffer(NStep(RandomSampler(), 3, 0.9), data).sample(2)
    with pytest.raises(RuntimeError, match="expected rows with one of the trajectory ids"):
        buffer(NStep(RandomSampler(), 3, 0.9, reward_key="r"), TensorDict({"r": torch.zeros(4, 1)}, [4])).sample(2)
    with pytest.raises(ValueError, match="a name of its own for 'gamma'"):
        buffer(NStep(RandomSampler(), 3, 0.9), steps([5], gamma=torch.zeros(5))).sample(2)


def test_rows_of_several_steps():
    data = TensorDict({"next": {"reward": torch.zeros(4, 2, 1), "done": torch.zeros(4, 2, 1).bool()}}, [4, 2])
    data["next"].batch_size = [4, 2]
    with pytest.raises(RuntimeError, match=r"TensorDicts of batch size \[2\]"):
        buffer(NStep(RandomSampler(), 3, 0.9), data).sample(2)


def test_empty():
    rb = buffer(NStep(RandomSampler(), 3, 0.9))
    assert not rb.can_sample(3)
    with pytest.raises(NoSampleable):
        rb.sample(3)
    rb.extend(steps([4]))
    assert rb.can_sample(3)
    rb.sample(3)
    rb.empty()
    with pytest.raises(NoSampleable):
        rb.sample(3)


def test_settings_are_fixed():
    sampler = NStep(RandomSampler(), 3, 0.9)
    for name in ("n", "sampler", "beta", "config"):
        with pytest.raises(AttributeError, match=f"NStep.{name} cannot be set"):
            setattr(sampler, name, 5)


def test_around_existing_data():
    data = steps([5, 4])
    rb = TensorDictReplayBuffer(storage=TensorStorage(data), sampler=NStep(RandomSampler(), 9, 1.0))
    assert [int(row["steps_to_next_obs"]) for row in by_row(rb.sample(300))] == [5, 4, 3, 2, 1, 4, 3, 2, 1]


def test_step_types_end_trajectories():
    """Where no flag and no id does: at a last step, also the newest; and before a first one whose predecessor was lost."""
    types = torch.tensor([0, 1, 2, 0, 1, 0, 1, 1, 2], dtype=torch.int32)
    rows = {"time_step": {"step_type": types, "reward": torch.ones(9), "observation": torch.arange(9.0)[:, None]}}
    stacked = FrameStack(RandomSampler(), 3, in_keys=[("time_step", "observation")], dim=-1)
    sampler = NStep(stacked, n=3, gamma=0.5, reward_key=("time_step", "reward"))
    rb = ReplayBuffer(storage=LazyTensorStorage(16), sampler=sampler, batch_size=128)
    rb.extend(TensorDict(rows, [9]))
    batch, info = rb.sample(return_info=True)
    frames, index = batch["time_step", "observation"], info["index"]
    ends, begins = torch.tensor([2, 2, 2, 4, 4, 8, 8, 8, 8]), torch.tensor([0, 0, 0, 3, 3, 5, 5, 5, 5])
    assert (info["steps_to_next_obs"].flatten() == (ends[index] - index + 1).clamp(max=3)).all()
    expected = torch.stack([(index - k).maximum(begins[index]) for k in (2, 1, 0)], -1).float()
    assert (frames == expected).all()
    rb = ReplayBuffer(
        storage=LazyTensorStorage(16),
        sampler=RewardToGo(RandomSampler(), gamma=1.0, reward_key=("time_step", "reward")),
        batch_size=64,
    )
    rb.extend(TensorDict(rows, [9]))
    batch, info = rb.sample(return_info=True)
    assert (info["reward_to_go"].flatten() == (ends[info["index"]] - info["index"] + 1)).all()
    assert info["reward_to_go_complete"].all()
