"""Buffers of Stable-Baselines3 that are pickled, closed, killed and opened again."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces

import engram

sb3 = pytest.importorskip("stable_baselines3.common.buffers")

from engram.adapters.sb3 import ReplayBuffer  # noqa: E402
from engram.errors import IncompatibleStore, StoreInUse  # noqa: E402
from tests import fresh  # noqa: E402
from tests.adapters.sb3_steps import BOX, DISCRETE, Steps, all_of, all_steps, as_bytes, both, row_of, same  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# ---- pickles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("once", [False, True])
def test_a_pickle_of_a_buffer_in_ram_is_whole(once):
    ours, other = both(BOX, n=2, optimize_memory_usage=once)
    steps = Steps(BOX, n=2)
    steps.fill(15, ours, other)
    again = pickle.loads(pickle.dumps(ours, protocol=pickle.HIGHEST_PROTOCOL))
    ours.reset()
    check_goes_on(again, other, steps)


def check_goes_on(ours, other, steps):
    """Both hold the same steps, and take the same ones."""
    assert (ours.pos, ours.full, ours.size()) == (other.pos, other.full, other.size())
    steps.fill(3, ours, other)
    for name in ("observations", "actions", "rewards"):
        assert np.array_equal(getattr(ours, name), getattr(other, name)), name
    wanted = all_of(other)
    for i, row in enumerate(row_of(ours.sample(100), i) for i in range(100)):
        assert as_bytes(row[2]) == as_bytes(wanted[as_bytes(row[0])][1]), i


@pytest.mark.parametrize("once", [False, True])
def test_a_deep_copy_of_a_directory_is_in_ram(once, tmp_path):
    ours, other = both(BOX, n=2, optimize_memory_usage=once, scratch_dir=tmp_path / "replay")
    steps = Steps(BOX, n=2)
    steps.fill(45, ours, other)
    held = {name: getattr(ours, name) for name in ("observations", "actions", "rewards")}
    ours.owners = [ours]  # an attribute of a subclass that leads back to it
    twin = copy.deepcopy(ours)
    assert twin.scratch_dir is None
    assert twin.owners == [twin]
    check_goes_on(twin, other, steps)
    assert ours.scratch_dir == tmp_path / "replay"
    assert all(np.array_equal(getattr(ours, name), before) for name, before in held.items())


def test_a_pickle_of_a_directory_names_it(tmp_path):
    space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    ours, other = both(space, size=200, scratch_dir=tmp_path / "replay")
    Steps(space).fill(100, ours, other)
    held = pickle.dumps(ours)
    assert len(held) < 200_000  # the space has its bounds; the steps take 2.4 MB
    ours.close()
    again = pickle.load(io.BytesIO(held))
    same(all_steps(again), all_steps(other))
    again.close()


def test_a_pickle_of_a_directory_that_moved(tmp_path):
    ours, _ = both(BOX, scratch_dir=tmp_path / "replay")
    Steps(BOX).fill(5, ours)
    held = pickle.dumps(ours)
    ours.close()
    (tmp_path / "replay").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"expected the directory of the saved replay.*/replay'"):
        pickle.loads(held)
    assert not (tmp_path / "replay").exists()


# ---- directories ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("count", [7, 30])
def test_a_directory_goes_on(tmp_path, once, count):
    ours, other = both(BOX, n=2, scratch_dir=tmp_path / "replay", optimize_memory_usage=once)
    steps = Steps(BOX, n=2)
    steps.fill(count, ours, other)
    ours.close()
    again, _ = both(BOX, n=2, scratch_dir=str(tmp_path / "replay"), optimize_memory_usage=once)
    assert (again.pos, again.full, again.size()) == (other.pos, other.full, other.size())
    for name in ("observations", "actions", "rewards"):
        assert np.array_equal(getattr(again, name), getattr(other, name)), name
    fresh_start = Steps(BOX, n=2, seed=9)
    fresh_start.count = 10_000
    fresh_start.observed = fresh_start._observe()
    fresh_start.fill(3, again, other)
    wanted = all_of(other)
    for row in (row_of(batch, i) for batch in [again.sample(300)] for i in range(300)):
        assert as_bytes(row[2]) == as_bytes(wanted[as_bytes(row[0])][1])  # none joins the first episode to the second
    again.close()


def test_engram_opens_a_directory_by_itself(tmp_path):
    """With its final observations."""
    ours, _ = both(BOX, n=2, scratch_dir=tmp_path / "replay", optimize_memory_usage=True)
    Steps(BOX, n=2).fill(15, ours)
    wanted = {
        as_bytes(row[0]): row[2] for batch in [ours.sample(300)] for row in (row_of(batch, i) for i in range(300))
    }
    ours.close()
    rb = engram.ReplayBuffer.open(tmp_path / "replay")
    batch = rb.sample(100)
    for seen, following in zip(batch["observation"].numpy(), batch["next"]["observation"].numpy(), strict=True):
        assert np.array_equal(following, wanted[as_bytes(seen)])
    rb.close()


def test_returns_of_several_steps_do_not_cross_a_restart(tmp_path):
    how = {"n_steps": 3, "gamma": 0.5, "scratch_dir": tmp_path / "replay"}
    for _ in range(2):
        buffer = ReplayBuffer(20, BOX, DISCRETE, "cpu", **how)
        Steps(BOX, ends=0).fill(4, buffer)
        discounts = [round(float(x), 3) for x in all_steps(buffer).discounts]
        buffer.close()
    assert discounts == [0.125, 0.125, 0.25, 0.5] * 2
    assert buffer.n_steps == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"n_envs": 2}, r"scratch_dir: expected steps of n_envs=2.*lanes: expected 2, got 1"),
        ({"buffer_size": 80}, r"buffer_size=80.*capacity: expected 80, got 40"),
        (
            {"observation_space": spaces.Box(-1, 1, (4,))},
            r"expected float32 \[4\] under 'observation'.*got float32 \[3\]",
        ),
        (
            {"observation_space": spaces.Dict({"at": BOX})},
            r"expected float32 \[3\] under 'observation.at'.*got nothing",
        ),
        ({"action_space": spaces.Box(-1, 1, (2,))}, r"expected float32 \[2\] under 'action'.*got int64 \[1\]"),
        ({"optimize_memory_usage": True}, r"expected int64 \[2\] under 'next.final'.*got nothing"),
    ],
)
def test_a_directory_of_other_steps(tmp_path, changed, said):
    how = {
        "buffer_size": 40,
        "observation_space": BOX,
        "action_space": DISCRETE,
        "device": "cpu",
        "scratch_dir": tmp_path / "replay",
    }
    buffer = ReplayBuffer(**how)
    Steps(BOX).fill(5, buffer)
    before = buffer.observations
    buffer.close()
    with pytest.raises(IncompatibleStore, match=said):
        ReplayBuffer(**how | changed)
    again = ReplayBuffer(**how)
    assert np.array_equal(again.observations, before)
    again.close()


DYING = """
import os, sys
import numpy as np
from engram.adapters.sb3 import ReplayBuffer
from tests.adapters.sb3_steps import BOX, DISCRETE, Steps, copied

buffer = ReplayBuffer(400, BOX, DISCRETE, "cpu", 2, once, scratch_dir=folder)
steps = Steps(BOX, n=2)
for count in range(1, 10_000_000):
    buffer.add(*copied(steps.step()))
    print(count)
"""


def test_two_trainings_of_one_directory(tmp_path):
    program = fresh.start(DYING, folder=str(tmp_path / "replay"), once=False)
    program.until("\n5\n")
    with pytest.raises(StoreInUse, match="ReplayBuffer: scratch_dir: .*replay' is in use, by another process"):
        ReplayBuffer(400, BOX, DISCRETE, "cpu", 2, scratch_dir=tmp_path / "replay")
    program.kill()
    one = ReplayBuffer(400, BOX, DISCRETE, "cpu", 2, scratch_dir=tmp_path / "replay")
    other = pickle.loads(pickle.dumps(one))  # as load_replay_buffer does beside the buffer of its model
    assert other.size() == one.size() >= 5


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("least", [20, 330])
def test_a_process_is_killed_while_it_adds(tmp_path, once, least):
    """Every step that it reported is there, byte for byte, and the next process goes on."""
    program = fresh.start(DYING, folder=str(tmp_path / "replay"), once=once)
    program.until(f"\n{least}\n")
    program.kill()
    reported = int(program.out.rsplit("\n", 1)[0].rsplit("\n", 1)[-1])
    wanted = sb3.ReplayBuffer(400, BOX, DISCRETE, "cpu", 2)
    steps = Steps(BOX, n=2)
    steps.fill(reported, wanted)
    ours = ReplayBuffer(400, BOX, DISCRETE, "cpu", 2, once, scratch_dir=tmp_path / "replay")
    ahead = 0  # of the step that was under way, which may be there
    if ours.rb.write_count > 2 * reported:
        steps.fill(1, wanted)
        ahead = 1
    assert 2 * reported <= ours.rb.write_count <= 2 * (reported + ahead)
    seam, names = (
        ours.rb.storage.extent().seam,
        ["observations", "actions", "rewards"] + ["next_observations"] * (not once),
    )
    for env in range(2):  # a step that is not counted may have taken its place
        begun = (seam[env] - env * 200 - wanted.pos) % 200
        assert begun in (0, 1)
        kept = np.arange(200) != (wanted.pos if begun else -1)
        for name in names:
            assert getattr(ours, name)[kept, env].tobytes() == getattr(wanted, name)[kept, env].tobytes(), name
    assert ours.full == wanted.full
    Steps(BOX, n=2, seed=5).fill(3, ours)
    assert ours.sample(64).observations.shape == (64, 3)
    ours.close()
