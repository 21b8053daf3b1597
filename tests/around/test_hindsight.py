"""Hindsight: how often each goal comes, the same goals from the same key, stores of every kind, TorchRL beside it, and bad input."""

import copy
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from engram import (
    FinalObservations,
    FrameStack,
    HERReplayBuffer,
    Hindsight,
    HindsightStrategy,
    IncompatibleStore,
    LazyTensorStorage,
    ListStorage,
    NextFromFollowing,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    SliceSampler,
    TensorDictReplayBuffer,
    WindowSpec,
)
from tests import fresh
from tests.around.hindsight import OWN, check, goals_of, reward, steps
from tests.ranks.jobs import checkpointer, done, job
from tests.statistics_of import assert_proportional, assert_uniform

pytestmark = pytest.mark.filterwarnings("ignore:sample. Hindsight. goals are those that were achieved before")
STRATEGIES = list(HindsightStrategy)


def buffer(sampler, *data, storage=None, batch_size=64, **more):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100) if storage is None else storage,
        sampler=sampler,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(3),
        **more,
    )
    for part in data:
        rb.extend(part)
    return rb


def her(strategy="future", ratio=1.0, **more):
    storage = more.pop("storage", None)
    return HERReplayBuffer(
        reward,
        her_ratio=ratio,
        strategy=strategy,
        storage=LazyTensorStorage(100) if storage is None else storage,
        **{"batch_size": 64, "generator": torch.Generator().manual_seed(3), **more},
    )


def stored(rb):
    """What each live row holds, by row."""
    extent = rb.storage.extent()
    rows = extent.rows(torch.arange(extent.size))
    return dict(zip(rows.tolist(), map(tuple, rb[rows]["where"].tolist()), strict=True))


def runs(rb, where):
    """The rows of each episode, oldest first: rows that hold consecutive steps of one."""
    found = {}
    for row, (lane, episode, step) in where.items():
        found.setdefault((lane, episode), []).append((step, row))
    return [[row for _, row in sorted(run)] for run in found.values()]


def checked(rb, strategy, ratio=1.0, batches=1):
    """Draw, and refuse goals that may not be. Returns pairs of a row and the row that its goal comes from."""
    where, pairs = stored(rb), []
    allowed = {row: goals_of(strategy, run, row, where) for run in runs(rb, where) for row in run}
    for _ in range(batches):
        batch = rb.sample()
        rows = batch["index"].tolist()
        n = int(len(rows) * ratio)
        pairs += zip(rows[:n], check(batch, rows, n, allowed.__getitem__, where), strict=True)
    return pairs


# ---- how often each goal comes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_goal_that_may_be_comes_equally_often(strategy, wrapped):
    storage = LazyTensorStorage(12)
    rb = her(strategy, storage=storage, batch_size=4_000)
    rb.extend(steps([4, 3, 5], open_end=True) if not wrapped else steps([3, 4, 6, 3], open_end=True))
    pairs = Counter(checked(rb, strategy, batches=5))
    where = stored(rb)
    for run in runs(rb, where):
        for row in run:
            goals = goals_of(strategy, run, row, where)
            assert_uniform([pairs[row, goal] for goal in goals])


def test_goals_of_lanes_are_their_own_and_any_row_is_of_all_lanes():
    for strategy in STRATEGIES:
        rb = her(strategy, storage=LazyTensorStorage(30, lanes=3), batch_size=3_000)
        for lane, n in enumerate([4, 13, 0]):
            if n:
                rb.extend(steps([3, n - 3], lane=lane, open_end=True), lane=lane)
        pairs = checked(rb, strategy, batches=4)
        if strategy == "random":  # 4 rows of one lane, 10 of the other
            assert_uniform(Counter(goal for _, goal in pairs).values())
            assert len({goal for _, goal in pairs}) == 14


def test_goals_follow_priorities():
    inner = PrioritizedSampler(100, alpha=1.0, beta=0.5)
    rb = buffer(Hindsight(inner, reward, her_ratio=1.0, strategy="final"), steps([2, 3]), batch_size=3_000)
    rb.update_priority(torch.arange(5), torch.tensor([1.0, 2, 3, 4, 5]))
    batch = rb.sample()
    counts = Counter(batch["index"].tolist())
    assert_proportional([counts[row] for row in range(5)], [1, 2, 3, 4, 5])
    last = torch.where(batch["index"] < 2, 1, 2)
    assert torch.equal(batch["desired_goal"][:, 1], last.float())
    assert {"priority_weight", "index_generation"} <= set(batch.keys())
    batch["td_error"] = torch.ones(len(batch))
    rb.update_tensordict_priority(batch)
    assert rb.stats()["priority_updates_dropped"] == 0


def test_a_check_that_expects_another_strategy_fails():
    """What the checks of this file are worth: each strategy's goals are refused as those of a narrower one."""
    for strategy, narrower in (("future", "final"), ("episode", "future"), ("random", "episode")):
        rb = her(strategy, batch_size=200)
        rb.extend(steps([5, 6, 7]))
        with pytest.raises(AssertionError):
            checked(rb, narrower)


# ---- which rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "expected"), [(0, 0), (0.05, 0), (0.1, 1), (0.8, 8), (0.99, 9), (1, 10)])
def test_the_first_rows_are_relabelled(ratio, expected):
    rb = her(ratio=ratio, batch_size=10)
    rb.extend(steps([30]))
    for _ in range(5):
        batch = rb.sample()
        assert (batch["desired_goal"][:, 0] != OWN).tolist() == [True] * expected + [False] * (10 - expected)
        assert len(checked(rb, "future", ratio)) == expected


def test_nothing_that_is_stored_changes():
    rb = her()
    rb.extend(steps([9, 9]))
    before = rb[:].clone()
    rb.sample()
    assert (rb[:] == before).all()


@pytest.mark.parametrize(
    ("windows", "lengths"),
    [
        (lambda: SliceSampler(slice_len=4), {4}),
        (lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True), {4}),
        (lambda: SliceSampler(num_slices=16), {4}),
        (lambda: SliceSampler(slice_len=4, strict_length=False), {2, 3, 4}),
        (lambda: SliceSampler(slice_len=4, span=(True, False)), {1, 2, 3, 4}),
        (lambda: SliceSampler(window=WindowSpec(length=3, burn_in=1, padding=1)), {4}),
        (lambda: SliceSampler(window=WindowSpec(length=2, dilation=2), flat=False), {2}),
    ],
)
def test_windows_have_one_goal_each(windows, lengths):
    """No episode is shorter than a window but one, and steps are numbered, so that windows are told apart by them."""
    sampler = Hindsight(windows(), reward, her_ratio=0.5, strategy="future")
    rb = buffer(sampler, steps([9, 50, 2, 80, 3], open_end=True), batch_size=64)
    found, batch = [], rb.sample().reshape(-1)
    places = list(range(len(batch)))
    if len(lengths) == 1:
        found = [places[at : at + min(lengths)] for at in range(0, len(places), min(lengths))]
    else:
        ends = batch["next", "truncated"].flatten().tolist()
        for place in places:
            if place == 0 or ends[place - 1]:
                found.append([])
            found[-1].append(place)
    assert {len(window) for window in found} <= lengths
    for at, window in enumerate(found):
        goals, where = batch["desired_goal"][window], batch["where"][window]
        if at >= len(found) // 2:
            assert (goals[:, 0] == OWN).all()
            continue
        assert (goals == goals[0]).all()
        assert goals[0, 0] == where[0, 1]  # of its episode
        assert goals[0, 1] >= where[:, 2].max()  # and of no step before the window's last one
        assert torch.equal(batch["next", "reward"][window], reward(batch[window]))


def test_windows_of_several_lengths_that_nothing_marks():
    samplers = [SliceSampler(slice_len=4, strict_length=False, **more) for more in ({}, {"truncated_key": None})]
    marked, bare = (buffer(Hindsight(sampler, reward), steps([3, 9])).sample() for sampler in samplers)
    assert torch.equal(marked["desired_goal"], bare["desired_goal"])


def test_flags_end_episodes_inside_of_ids():
    data = steps([300, 5, 300], ids=True)
    data["episode"] = torch.zeros_like(data["episode"])
    for strategy in ("future", "final", "episode"):
        rb = her(strategy, storage=LazyTensorStorage(1_000), batch_size=2_000)
        rb.extend(data)
        checked(rb, strategy)


def test_flags_beside_those_of_the_table_end_episodes_across_the_end_of_the_array():
    data = steps([300, 700, 5, 900, 40])
    data["next", "terminated"] = data["next", "done"].clone()
    data["next", "done"] = torch.zeros_like(data["next", "done"])
    for strategy in ("future", "final", "episode"):
        rb = her(strategy, storage=LazyTensorStorage(1_300), batch_size=2_000)
        rb.extend(data)
        checked(rb, strategy)


def test_an_end_key_of_ones_own_and_its_terminated_sibling():
    data = steps([4, 3, 5])
    data["over"] = data["next", "done"].clone()
    data["over"][3] = False
    data["terminated"] = torch.zeros(12, 1, dtype=torch.bool)
    data["terminated"][3] = True
    data["next", "done"] = torch.zeros_like(data["next", "done"])
    rb = her("final", end_key="over")
    rb.extend(data)
    checked(rb, "final")


# ---- the same goals from the same key ----------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_goals_at_every_depth_of_prefetching():
    batches = []
    for prefetch in (0, 1, 3):
        rb = her("episode", 0.7, prefetch=prefetch)
        rb.extend(steps([20, 30, 25]))
        batches.append([rb.sample() for _ in range(6)])
        rb.close()
    for other in batches[1:]:
        for a, b in zip(batches[0], other, strict=True):
            assert (a == b).all()
    assert not (batches[0][0]["desired_goal"] == batches[0][1]["desired_goal"]).all()


def test_a_state_goes_on_with_the_same_goals():
    rb = her("random", 0.7, sampler=PrioritizedSampler(100, 0.7, 0.5))
    rb.extend(steps([20, 30, 25]))
    rb.sample()
    state = rb.state_dict()
    other = her("random", 0.7, sampler=PrioritizedSampler(100, 0.7, 0.5))
    other.load_state_dict(state)
    twin = copy.deepcopy(rb)
    for _ in range(3):
        batch = rb.sample()
        assert (batch == twin.sample()).all()
        again = other.sample()
        assert (batch.exclude("index_generation") == again.exclude("index_generation")).all()


# ---- stores ------------------------------------------------------------------------------------------------------------


def test_a_directory_is_opened_again_with_the_expander(tmp_path):
    rb = HERReplayBuffer.open_or_create(tmp_path / "store", 50, reward_fn=reward, her_ratio=1.0, batch_size=64)
    rb.extend(steps([20, 30, 25]))
    checked(rb, "future")
    rb.close()
    with pytest.raises(TypeError, match="custom sampler 'Hindsight'"):
        ReplayBuffer.open(tmp_path / "store")
    again = ReplayBuffer.open(tmp_path / "store", sampler=Hindsight(RandomSampler(), reward, her_ratio=1.0))
    assert isinstance(again, HERReplayBuffer)
    assert (again.her_ratio, again.strategy, again.reward_fn) == (1.0, "future", reward)
    again.extend(steps([3], first=7))
    checked(again, "future", batches=4)
    again.close()
    beside = ReplayBuffer.open(
        tmp_path / "store", sampler=Hindsight(RandomSampler(), reward, her_ratio=1.0), readonly=True
    )
    checked(beside, "future")
    beside.close()


def test_a_process_beside_finds_goals_that_another_one_wrote(tmp_path):
    rb = HERReplayBuffer.open_or_create(tmp_path / "store", 60, reward_fn=reward, her_ratio=1.0, batch_size=64)
    rb.extend(steps([5]))
    checked(rb, "future")
    fresh.run(
        """
        import sys
        import torch
        from engram import HERReplayBuffer
        sys.path.insert(0, root)
        from tests.around.hindsight import OWN, reward, steps
        rb = HERReplayBuffer.open_or_create(folder, 60, reward_fn=reward, her_ratio=1.0, batch_size=64)
        rb.extend(steps([20, 30, 25], first=1))
        batch = rb.sample()
        assert (batch["desired_goal"][:, 0] != OWN).all()
        assert torch.equal(batch["next", "reward"], reward(batch))
        """,
        folder=str(tmp_path / "store"),
        root=str(Path(__file__).parents[2]),
    )
    assert len({row for row, _ in checked(rb, "future", batches=10)}) > 50
    rb.close()


def test_a_shared_buffer():
    rb = her("episode", storage=LazyTensorStorage(50))
    rb.extend(steps([20, 25]))
    rb.share()
    checked(rb, "episode")
    rb.extend(steps([9], first=5))
    checked(rb, "episode")


def test_dumps_and_loads(tmp_path):
    rb = her("future", storage=LazyTensorStorage(40))
    rb.extend(steps([20, 25]))
    rb.dumps(tmp_path / "dump")
    other = her("future", storage=LazyTensorStorage(40))
    other.loads(tmp_path / "dump")
    checked(other, "future")
    other.extend(steps([9], first=5))
    checked(other, "future")


def _of_lanes():
    return her("future", storage=LazyTensorStorage(64, lanes=2))


def _save(ranks, rank, root):
    rb = _of_lanes()
    for lane in range(2):
        rb.extend(steps([5 + rank, 9, 4], first=10 * rank, lane=lane), lane=lane)
    checkpointer(root, rb, ranks).save(1)


def _restore(ranks, rank, root):
    rb = _of_lanes()
    checkpointer(root, rb, ranks).restore()
    return rb


def test_checkpoints_of_other_numbers_of_ranks(tmp_path):
    done(job(3, _save, tmp_path))
    rows = 0
    for rb in done(job(2, _restore, tmp_path)):
        checked(rb, "future", batches=3)
        rows += len(rb)
    assert rows == 2 * (18 + 19 + 20)


def test_beside_a_writer_goals_are_of_the_rows_episode():
    rb = her("future", storage=LazyTensorStorage(64), batch_size=32)
    rb.extend(steps([7, 9]))
    stop, failed = threading.Event(), []

    def write():
        number = 2
        try:
            while not stop.is_set():
                rb.extend(steps([7, 9], first=number % 900))
                number += 2
        except BaseException as error:  # noqa: BLE001 - the test raises it
            failed.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        for _ in range(300):
            batch = rb.sample()
            assert torch.equal(batch["desired_goal"][:, 0], batch["where"][:, 1].float())
            assert (batch["desired_goal"][:, 1] >= batch["where"][:, 2]).all()
            assert torch.equal(batch["next", "reward"], reward(batch))
    finally:
        stop.set()
        writer.join(60)
    assert not writer.is_alive()
    assert not failed


# ---- around others -----------------------------------------------------------------------------------------------------


def test_next_observations_of_following_rows_and_frames_are_there():
    finals = FinalObservations(["obs"], LazyTensorStorage(10))
    seen = []

    def told(rows):
        seen.append((rows["obs"].shape, (rows["next", "obs"][:, -1] - rows["obs"][:, -1]).unique().tolist()))
        return reward(rows)

    sampler = FrameStack(Hindsight(NextFromFollowing(RandomSampler(), finals), told, her_ratio=0.5), 3, -1, ["obs"])
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, transform=finals, batch_size=20)
    data = steps([6, 7])
    data["obs"] = data["where"][:, 2:].float()
    data["next", "obs"] = data["obs"] + 1
    rb.extend(data)
    batch = rb.sample()
    assert seen == [(torch.Size([10, 3]), [1.0])]
    assert torch.equal(batch["next", "reward"][:10], reward(batch[:10]))


def test_rows_of_dicts_and_rewards_without_a_dimension():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=Hindsight(
            RandomSampler(), lambda rows: rows["goal"], goal_key="goal", achieved_goal_key="at", her_ratio=0.5
        ),
        batch_size=10,
    )
    rb.extend(
        {
            "at": torch.arange(8.0),
            "goal": torch.zeros(8) - 1,
            "next": {"reward": torch.zeros(8), "done": torch.arange(8) == 7},
        }
    )
    batch = rb.sample()
    assert (batch["goal"][:5] >= batch["at"][:5]).all()
    assert torch.equal(batch["next"]["reward"], torch.where(torch.arange(10) < 5, batch["goal"], 0))


def test_transforms_run_after_it():
    seen = []

    def told(rows):
        seen.append(rows["desired_goal"].dtype)
        return reward(rows)

    rb = HERReplayBuffer(
        told,
        storage=LazyTensorStorage(20),
        batch_size=10,
        transform=lambda td: td.set("desired_goal", td["desired_goal"].double()),
    )
    rb.extend(steps([9]))
    assert rb.sample()["desired_goal"].dtype is torch.float64
    assert seen == [torch.float32]


def test_the_same_keys_and_shapes_as_torchrl():
    rl = pytest.importorskip("torchrl.data")
    theirs = rl.HERReplayBuffer(
        reward, storage=rl.LazyTensorStorage(100), batch_size=20, strategy="final", her_ratio=0.8
    )
    ours = her("final", 0.8, batch_size=20)
    batches = []
    for rb in (theirs, ours):
        rb.extend(steps([7, 9, 4]))
        batches.append(rb.sample())
    a, b = batches
    assert sorted(map(str, a.keys(True, True))) == sorted(map(str, b.keys(True, True)))
    for key in a.keys(True, True):
        assert (a[key].shape, a[key].dtype) == (b[key].shape, b[key].dtype), key
    for batch in batches:  # both relabel the first rows, with goals of the last steps
        last = torch.tensor([6.0, 8, 3])[batch["where"][:16, 1]]
        assert torch.equal(batch["desired_goal"][:16, 1], last)
        assert (batch["desired_goal"][16:, 0] == OWN).all()
        assert torch.equal(batch["next", "reward"][:16], reward(batch[:16]))


# ---- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_a_share_outside_of_0_and_1_is_refused(ratio):
    with pytest.raises(ValueError, match=r"her_ratio: expected a number in \[0, 1\]"):
        HERReplayBuffer(reward, her_ratio=ratio, storage=LazyTensorStorage(10))


@pytest.mark.parametrize("ratio", [None, "0.5", True])
def test_a_share_that_is_no_number_is_refused(ratio):
    with pytest.raises(TypeError, match=r"her_ratio: expected a number in \[0, 1\], got"):
        HERReplayBuffer(reward, her_ratio=ratio, storage=LazyTensorStorage(10))


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="strategy: expected .*'random', got 'nearest'"):
        Hindsight(RandomSampler(), reward, strategy="nearest")
    assert Hindsight(RandomSampler(), reward, strategy="final").strategy is HindsightStrategy.FINAL


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="reward_fn: expected a function"):
        Hindsight(RandomSampler(), None)
    with pytest.raises(TypeError, match="reward_fn: expected a function"):
        HERReplayBuffer(storage=LazyTensorStorage(10))


def test_columns_and_lists_are_refused():
    with pytest.raises(NotImplementedError, match="ndim=1"):
        HERReplayBuffer(reward, storage=LazyTensorStorage(10, ndim=2))
    with pytest.raises(RuntimeError, match="tensor storage on the CPU"):
        HERReplayBuffer(reward, storage=ListStorage(10))


@pytest.mark.parametrize("key", ["achieved_goal", "desired_goal", ("next", "reward")])
def test_a_missing_field_is_named_at_sampling(key):
    rb = her()
    rb.extend(steps([4]).exclude(key))
    with pytest.raises(KeyError, match="Hindsight"):
        rb.sample()


def test_rows_without_end_flags_are_named_at_sampling():
    rb = her()
    rb.extend(steps([4]).exclude(("next", "done")))
    with pytest.raises(KeyError, match="end flags"):
        rb.sample()


def test_goals_of_another_shape_or_dtype_are_named_at_sampling():
    rb, data = her(), steps([4])
    data["desired_goal"] = torch.zeros(4, 3)
    rb.extend(data)
    with pytest.raises(
        ValueError, match=r"desired_goal: expected goals of the shape \[2\] of achieved_goal, got \[3\]"
    ):
        rb.sample()
    rb, data = her(), steps([4])
    data["next", "desired_goal"] = data["next", "desired_goal"].double()
    rb.extend(data)
    with pytest.raises(TypeError, match="expected goals of the dtype float32"):
        rb.sample()


def test_a_reward_of_another_shape_is_refused():
    for made, error in (
        (lambda rows: reward(rows)[:2], RuntimeError),
        (lambda rows: reward(rows).expand(-1, 2), RuntimeError),
        (lambda rows: 1.0, TypeError),
    ):
        rb = HERReplayBuffer(made, storage=LazyTensorStorage(10), batch_size=8)
        rb.extend(steps([4]))
        with pytest.raises(error, match=r"reward_fn: expected"):
            rb.sample()
        rb.extend(steps([3], first=1))  # goes on
    rb = HERReplayBuffer(
        lambda rows: reward(rows).squeeze(-1), her_ratio=1.0, storage=LazyTensorStorage(10), batch_size=8
    )
    rb.extend(steps([4]))
    batch = rb.sample()
    assert torch.equal(batch["next", "reward"], reward(batch))


def test_returns_of_several_steps_are_refused():
    for sampler in (
        Hindsight(NStep(RandomSampler(), 3, 0.9), reward),
        NStep(Hindsight(RandomSampler(), reward), 3, 0.9),
        RewardToGo(Hindsight(RandomSampler(), reward)),
    ):
        with pytest.raises(TypeError, match="those of the stored goals"):
            buffer(sampler, steps([4])).sample()
    with pytest.raises(TypeError, match="a Hindsight inside"):
        Hindsight(Hindsight(RandomSampler(), reward), reward)
    with pytest.raises(TypeError, match="another expander changes it"):
        buffer(FrameStack(Hindsight(RandomSampler(), reward), 2, -1, ["desired_goal"]), steps([4])).sample()


def test_other_boundaries_of_the_same_table_are_refused():
    rb = buffer(SliceSampler(slice_len=2, end_keys=[]), steps([4, 5], ids=True))
    rb.sample()
    other = buffer(Hindsight(RandomSampler(), reward, traj_key="episode"), storage=rb.storage)
    with pytest.raises(IncompatibleStore):
        other.sample()
