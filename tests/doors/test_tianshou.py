"""tianshou's collectors and algorithms over a store. Its own buffers say what is right: each step goes to one of them, too."""

import copy
import pickle

import numpy as np
import pytest
import torch

pytest.importorskip("tianshou")

from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import Batch
from tianshou.data import PrioritizedVectorReplayBuffer as TheirPrioritized
from tianshou.data import VectorReplayBuffer as Theirs

from engram.adapters.tianshou import PrioritizedVectorReplayBuffer, VectorReplayBuffer
from engram.errors import IncompatibleStore, PriorityError, StoreInUse
from tests import fresh
from tests.doors.tianshou_steps import Steps, leaves, same


def both(size=40, n=4, ours=VectorReplayBuffer, **how):
    where = {name: how.pop(name) for name in ("scratch_dir", "exclude") if name in how}
    return ours(size, n, **where, **how), Theirs(size, n, **how)


# ---- steps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["RAM", "directory"])
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({}, "plain"),
        ({}, "dict"),
        ({}, "extras"),
        ({"ignore_obs_next": True}, "plain"),
        ({"stack_num": 3}, "plain"),
        ({"stack_num": 3, "sample_avail": True, "ignore_obs_next": True}, "plain"),
        ({"stack_num": 2, "save_only_last_obs": True}, "stacks"),
    ],
)
def test_every_call_gives_what_tianshous_own_gives(how, kind, where, tmp_path):
    place = {"scratch_dir": tmp_path / "replay"} if where == "directory" else {}
    ours, theirs = both(**how, **place)
    steps = Steps(kind)
    for count in range(60):
        ids = np.sort(steps.rng.choice(4, steps.rng.integers(1, 5), replace=False))
        rows = steps.rows(ids)
        for one, other in zip(ours.add(rows, buffer_ids=ids), theirs.add(rows, buffer_ids=ids), strict=True):
            assert np.array_equal(one, other), count
        assert len(ours) == len(theirs)
        assert np.array_equal(ours.unfinished_index(), theirs.unfinished_index()), count
        assert np.array_equal(ours.last_index, theirs.last_index)
        held = theirs.sample_indices(0)
        assert np.array_equal(ours.sample_indices(0), held)
        for name in ("prev", "next"):
            assert np.array_equal(getattr(ours, name)(held), getattr(theirs, name)(held)), (count, name)
            for row in held[-1:].tolist():
                assert getattr(ours, name)(row) == getattr(theirs, name)(row)
        if count % 5 == 4:
            (batch, rows), (wanted, others) = ours.sample(16), theirs.sample(16)
            assert np.array_equal(rows, others)
            same(batch, wanted)
            same(ours[:], theirs[:])
            same(ours[3], theirs[3])
    ours.close()


def test_returns_of_several_steps():
    ours, theirs = both()
    steps = Steps("plain")
    for _ in range(35):
        rows = steps.rows(np.arange(4))
        ours.add(rows)
        theirs.add(rows)
    returns = []
    for buffer in (ours, theirs):
        batch, indices = buffer.sample(0)
        with_returns = Algorithm.compute_nstep_return(
            batch, buffer, indices, lambda b, i: torch.from_numpy(b.obs_next[i].sum(1)), gamma=0.9, n_step=3
        )
        returns.append(with_returns.returns)
    assert torch.equal(*returns)
    assert returns[0].unique().numel() > 30


def test_a_field_of_whole_episodes():
    """What a hook of a collector adds when an episode is over."""
    ours, theirs = both()
    steps = Steps("plain")
    for _ in range(5):
        rows = steps.rows(np.arange(4))
        for buffer in (ours, theirs):
            buffer.add(rows)
    for buffer in (ours, theirs):
        buffer.set_array_at_key(np.array([1.5, 2.5]), "bonus", index=np.array([11, 12]))
        buffer.set_array_at_key(np.array([7.0]), "rew", index=np.array([30]))
    for _ in range(3):
        rows = steps.rows(np.arange(4))
        for buffer in (ours, theirs):
            buffer.add(rows)
    held = theirs.sample_indices(0)
    written = {5, 6, 7, 15, 16, 17, 25, 26, 27, 35, 36, 37}  # without it, afterwards
    same(ours[held[~np.isin(held, [*written])]], theirs[held[~np.isin(held, [*written])]])
    with pytest.raises(ValueError, match="read-only"):
        ours.rew[3] = 1.0


def test_reset_forgets_the_rows():
    ours, theirs = both()
    steps = Steps("plain")
    for keep in (False, True):
        rows = steps.rows(np.arange(4))
        for buffer in (ours, theirs):
            buffer.add(rows)
            buffer.reset(keep_statistics=keep)
            assert len(buffer) == 0
    for _ in range(25):
        rows = steps.rows(np.arange(4))
        for one, other in zip(ours.add(rows), theirs.add(rows), strict=True):
            assert np.array_equal(one, other)
    same(ours[:], theirs[:])


# ---- saved and opened ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["pickle", "hdf5", "copy"])
@pytest.mark.parametrize("where", ["RAM", "directory"])
def test_a_saved_buffer(form, where, tmp_path):
    place = {"scratch_dir": tmp_path / "replay"} if where == "directory" else {}
    ours, theirs = both(**place)
    steps = Steps("plain")
    for _ in range(14):
        rows = steps.rows(np.arange(4))
        ours.add(rows)
        theirs.add(rows)
    if form == "pickle":
        held = pickle.dumps(ours)
        ours.close()
        again = pickle.loads(held)
    elif form == "copy":
        again, before = copy.deepcopy(ours), copy.deepcopy(theirs)
        assert again.scratch_dir is None
    else:
        ours.save_hdf5(str(tmp_path / "saved.h5"))
        ours.close()
        again = VectorReplayBuffer.load_hdf5(str(tmp_path / "saved.h5"))
    if where == "directory" and form != "copy":  # opened again, its episodes have ended
        last = theirs.unfinished_index()
        theirs.done[last] = theirs.truncated[last] = True
    same(again[:], theirs[:])
    rows = steps.rows(np.arange(4))
    assert np.array_equal(again.add(rows)[0], theirs.add(rows)[0])
    same(again[:], theirs[:])
    again.close()
    if form == "copy":
        same(ours[:], before[:])
        ours.close()


def test_a_saved_buffer_of_a_directory_holds_its_name_alone(tmp_path):
    ours, _ = both(size=80_000, scratch_dir=tmp_path / "replay")
    ours.add(Steps("plain").rows(np.arange(4)))
    views = [buffer._meta for buffer in ours.buffers]
    held = pickle.dumps(ours)
    ours.save_hdf5(str(tmp_path / "saved.h5"))
    assert len(held) < 16 * 80_000 + 50_000  # two numbers of each row are tianshou's own; rows take 67 bytes each
    assert (tmp_path / "saved.h5").stat().st_size < 16 * 80_000 + 100_000
    assert all(buffer._meta is view for buffer, view in zip(ours.buffers, views, strict=True))
    rows = ours[:]
    ours.close()
    again = pickle.loads(held)
    assert np.array_equal(again[:].obs, rows.obs)
    assert np.array_equal(again.buffers[1].obs[:1], rows.obs[1:2])
    again.close()


def test_a_directory_that_is_gone(tmp_path):
    ours, _ = both(scratch_dir=tmp_path / "replay")
    ours.add(Steps("plain").rows(np.arange(4)))
    held = pickle.dumps(ours)
    ours.close()
    (tmp_path / "replay").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="VectorReplayBuffer: expected the directory of the saved replay"):
        pickle.loads(held)


DYING = """
import numpy as np
from engram.adapters.tianshou import VectorReplayBuffer
from tests.doors.tianshou_steps import Steps

buffer, steps = VectorReplayBuffer(400, 4, scratch_dir=folder), Steps("extras")
for count in range(1, 10_000_000):
    buffer.add(steps.rows(np.arange(4)))
    print(count)
"""


@pytest.mark.parametrize("least", [7, 230])
def test_a_process_is_killed_while_it_adds(tmp_path, least):
    """Every step that it reported is there, byte for byte, and the next process goes on."""
    program = fresh.start(DYING, folder=str(tmp_path / "replay"))
    program.until(f"\n{least}\n")
    with pytest.raises(StoreInUse, match="VectorReplayBuffer: scratch_dir: .*replay' is in use, by another process"):
        VectorReplayBuffer(400, 4, scratch_dir=tmp_path / "replay")
    program.kill()
    reported = int(program.out.rsplit("\n", 1)[0].rsplit("\n", 1)[-1])
    theirs, steps = Theirs(400, 4), Steps("extras")
    for _ in range(reported):
        theirs.add(steps.rows(np.arange(4)))
    ours = VectorReplayBuffer(400, 4, scratch_dir=tmp_path / "replay")
    one_more = steps.rows(np.arange(4))  # which may be there, in some of the four
    for env in range(4):
        ahead = ours.buffers[env]._insertion_idx != theirs.buffers[env]._insertion_idx
        if ahead:
            theirs.add(one_more[[env]], buffer_ids=[env])
        assert ours.buffers[env]._insertion_idx == theirs.buffers[env]._insertion_idx
    last = theirs.unfinished_index()
    theirs.done[last] = theirs.truncated[last] = True
    held = theirs.sample_indices(0)
    torn = ours.rb.storage.extent().holes  # of the step that was under way
    held = held if torn is None else held[~np.isin(held, torn.numpy())]
    assert len(held) >= min(4 * reported, 396)
    for (path, ours_now), (_, theirs_now) in zip(leaves(ours[held]), leaves(theirs[held]), strict=True):
        assert ours_now.tobytes() == theirs_now.tobytes(), path
    assert ours.unfinished_index().size == 0
    ours.add(Steps("extras", seed=5).rows(np.arange(4)))
    assert len(ours.sample(64)[1]) == 64
    ours.close()


def test_a_row_that_a_killed_process_began(tmp_path):
    """tianshou reads all rows below the cursor: a torn one is a copy of the step before, an end."""
    ours, _ = both(scratch_dir=tmp_path / "replay")
    steps = Steps("plain")
    for _ in range(6):
        ours.add(steps.rows(np.arange(4)))
    row, storage = torch.tensor([15]), ours.rb.storage
    storage.remove(
        row, storage.writes_of(row, storage.tickets_of(row))
    )  # as a writer that dies leaves it: within the extent, without a step
    ours.close()
    again = VectorReplayBuffer(40, 4, scratch_dir=tmp_path / "replay")
    assert again.rb.storage.extent().holes.tolist() == [15]
    same(again[15], again[14])
    assert bool(again.truncated[14] | again.terminated[14])
    again.add(steps.rows(np.arange(4)))
    assert again.prev(16) == 16
    for _ in range(9):
        again.add(steps.rows(np.arange(4)))
    assert again.rb.storage.extent().holes is None
    again.close()


def test_a_directory_of_other_rows(tmp_path):
    ours, _ = both(scratch_dir=tmp_path / "replay")
    ours.add(Steps("plain").rows(np.arange(4)))
    before = ours[:].obs
    with pytest.raises(RuntimeError, match=r"obs: expected shape \[4, 3\] float64.*got \[4, 2\]"):
        ours.add(Steps("plain", width=2).rows(np.arange(4)))
    ours.close()
    for n, size in ((2, 40), (4, 80)):
        with pytest.raises(IncompatibleStore, match=rf"expected steps of buffer_num={n}.*total_size={size}"):
            VectorReplayBuffer(size, n, scratch_dir=tmp_path / "replay")
    again, _ = both(scratch_dir=tmp_path / "replay")
    assert np.array_equal(again[:].obs, before)
    again.close()


@pytest.mark.parametrize(("width", "extras"), [(2, 4), (3, 3)])
def test_a_refused_step_adds_no_field(tmp_path, width, extras):
    ours, _ = both(scratch_dir=tmp_path / "replay")
    steps = Steps("plain")
    ours.add(steps.rows(np.arange(4)))
    bad = Steps("plain", width=width).rows(np.arange(4))
    bad.info = Batch(extra=np.zeros(extras))
    with pytest.raises(
        RuntimeError, match="same number of rows in every leaf" if extras == 3 else "obs: expected shape"
    ):
        ours.add(bad)
    ours.close()
    ours, _ = both(scratch_dir=tmp_path / "replay")
    assert "extra" not in ours[:].info.get_keys()
    assert len(ours) == 4
    good = steps.rows(np.arange(4))
    good.info = Batch(extra=np.ones(4))
    ours.add(good)
    assert sorted(ours[:].info.extra.tolist()) == [0] * 4 + [1] * 4
    ours.close()


def test_what_rows_cannot_hold():
    ours, _ = both()
    rows = Steps("plain").rows(np.arange(4))
    rows.info = Batch(name=np.array(["a", "b", "c", "d"]), ok=np.arange(4))
    with pytest.raises(TypeError, match=r"add: info.name: expected numbers.*Leave it out: exclude=\['info.name'\]"):
        ours.add(rows)
    assert len(ours) == 0
    ours, _ = both(exclude=["info.name"])
    ours.add(rows)
    assert ours[:].info.ok.tolist() == [0, 1, 2, 3]
    assert "name" not in ours[:].info.get_keys()
    del rows.act
    with pytest.raises(KeyError, match=r"add: expected \['act'\] in the batch"):
        ours.add(rows)
    with pytest.raises(NotImplementedError, match="Call add"):
        ours.set_batch(rows)
    with pytest.raises(NotImplementedError, match="and stay"):
        ours.dropnull()
    assert len(ours) == 4


# ---- priorities ----------------------------------------------------------------------------------------------------------


def test_draws_and_weights_go_by_priority(tmp_path):
    np.random.seed(0)  # noqa: NPY002 - which they draw by
    where = tmp_path / "replay"
    ours = PrioritizedVectorReplayBuffer(40, 4, alpha=0.5, beta=0.4, scratch_dir=where)
    theirs, steps = TheirPrioritized(40, 4, alpha=0.5, beta=0.4), Steps("plain")
    for _ in range(5):
        rows = steps.rows(np.arange(4))
        ours.add(rows)
        theirs.add(rows)
    held = theirs.sample_indices(0)
    priorities = np.linspace(0.5, 8, len(held))
    for buffer in (ours, theirs):
        buffer.update_weight(held, torch.from_numpy(priorities))
    ours.close()
    ours = PrioritizedVectorReplayBuffer(40, 4, alpha=0.5, beta=0.4, scratch_dir=where)  # which keeps them
    assert np.allclose(ours[held].weight, theirs[held].weight, rtol=1e-6)
    ours.set_beta(1.0)
    theirs._beta = 1.0  # their set_beta of several environments sets those of parts that weigh nothing
    assert np.allclose(ours[held[3:9]].weight, theirs[held[3:9]].weight, rtol=1e-6)
    drawn = np.bincount(ours.sample_indices(40_000), minlength=40)[held]
    wanted = 40_000 * np.sqrt(priorities) / np.sqrt(priorities).sum()
    assert ((drawn - wanted) ** 2 / wanted).sum() < 43.8  # chi-squared, 19 degrees of freedom: p = 0.001
    where_new, *_ = ours.add(steps.rows(np.array([2])), buffer_ids=[2])
    assert ours.get_weight(where_new) == pytest.approx(
        ours.get_weight(held[-1:])
    )  # a new step has the largest priority
    assert ours.sample(8)[0].weight.max() == 1.0
    before = ours.get_weight(held)
    with pytest.raises(PriorityError, match="expected finite priorities"):
        ours.update_weight(held[:2], np.array([1.0, np.nan]))
    assert np.array_equal(ours.get_weight(held), before)
    assert np.array_equal(ours.sample_indices(0), np.sort([*held, *where_new]))
    ours.close()
