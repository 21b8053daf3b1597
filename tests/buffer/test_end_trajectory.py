"""``end_trajectory``: the newest step of a lane becomes an end, wherever that is said and whoever asks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RowError,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.store.device.store import DeviceStore
from tests.store.processes import METHODS, Child

FLAGS = ("done", "terminated", "truncated")


def steps(first, n, flags=FLAGS, ends=()):
    """Steps that know their number, below ``"next"`` the flags; ``ends``: numbers of terminal ones."""
    number = torch.arange(first, first + n)
    over = torch.isin(number, torch.tensor(ends, dtype=torch.int64))
    said = {"done": over, "terminated": over, "truncated": torch.zeros(n, dtype=torch.bool)}
    flags = {flag: said[flag].unsqueeze(-1) for flag in flags}
    return TensorDict({"step": number, "next": TensorDict(flags, [n])}, [n])


def buffer(lanes=2, length=5, **arguments):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(lanes * length, lanes=lanes), **arguments)


def flags_of(rb, row):
    return {flag: bool(rb[row]["next", flag]) for flag in FLAGS}


# ---- against plain lists -------------------------------------------------------------------------------------------------


class Lane:
    """A ring of steps in a list: [number, terminated, truncated], newest last."""

    def __init__(self, length):
        self.length, self.written, self.live = length, 0, []

    def append(self, number, over):
        self.live = [*self.live, [number, over, False]][-self.length :]
        self.written += 1

    def end(self, first_row, *, terminated):
        if not self.live or any(self.live[-1][1:]):
            return -1
        self.live[-1][1 if terminated else 2] = True
        return first_row + (self.written - 1) % self.length

    def trajectories(self):
        found, open_one = [], []
        for number, *over in self.live:
            open_one.append(number)
            if any(over):
                found.append(open_one)
                open_one = []
        return [*found, open_one] if open_one else found


operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("end"), st.lists(st.integers(0, 2), min_size=1, max_size=3), st.booleans()),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None, database=None)
@given(operations, st.booleans())
def test_it_does_what_lists_do(program, watched):
    """``watched``: the table of trajectories was there all along, else it is made at the end."""
    rb = buffer(3, 4, sampler=SliceSampler(slice_len=1, end_keys=[("next", "done")]), batch_size=1)
    lanes, number = [Lane(4) for _ in range(3)], 0
    for kind, *how in program:
        if kind == "write":
            lane, n, over = how
            rb.extend(steps(number, n, ends=[number + n - 1] if over else []), lane=lane)
            for i in range(n):
                lanes[lane].append(number + i, over and i == n - 1)
            number += n
        else:
            which, terminated = how
            expected = {lane: lanes[lane].end(4 * lane, terminated=terminated) for lane in dict.fromkeys(which)}
            assert rb.end_trajectory(which, terminated=terminated).tolist() == [expected[lane] for lane in which]
        if watched and len(rb):
            rb.sample()
    live = [step for lane in lanes for step in lane.live]
    if not live:
        return
    rows = {int(row["step"]): row["next"] for row in rb[:]}
    found = [[n, bool(rows[n]["terminated"]), bool(rows[n]["truncated"])] for n, *_ in live]
    assert found == live
    assert len(rows) == len(live)
    assert all(bool(row["done"]) == bool(row["terminated"] | row["truncated"]) for row in rows.values())
    rb.sample()
    table = rb.sampler._table
    told = [
        [int(rb[table.row(track, place + i)]["step"]) for i in range(length)]
        for track, place, length in table.runs().reshape(-1, 3).tolist()
    ]
    assert told == [trajectory for lane in lanes for trajectory in lane.trajectories()]


# ---- lanes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lane",
    [None, "each", [0, 1, 2], (0, 1, 2), range(3), np.arange(3), torch.arange(3), np.arange(3, dtype=np.int32)],
    ids=repr,
)
def test_many_lanes(lane):
    rb = buffer(3)
    rb.extend(steps(0, 4), lane=0)
    rb.extend(steps(9, 1), lane=2)
    rows = rb.end_trajectory(lane)
    assert rows.dtype is torch.int64
    assert rows.tolist() == [3, -1, 10]
    assert rb.end_trajectory(lane=lane).tolist() == [-1, -1, -1], "an end stays what it is"


@pytest.mark.parametrize("lane", [1, np.int64(1), torch.tensor(1), [1]], ids=repr)
def test_one_lane(lane):
    rb = buffer(2)
    rb.extend(steps(0, 4), lane=torch.tensor([0, 0, 1, 1]))
    assert rb.end_trajectory(lane).tolist() == [6]
    assert not flags_of(rb, 1)["done"], "the other lane goes on"


def test_the_lane_of_the_handle_is_the_default():
    rb = buffer(3)
    rb.extend(steps(0, 3), lane="each")
    assert rb.on_lane(1).end_trajectory().tolist() == [5]
    assert rb.end_trajectory("each").tolist() == [0, -1, 10]


@pytest.mark.parametrize(
    ("lane", "error"), [(3, RowError), (-1, RowError), ([0, 3], RowError), (1.5, TypeError), ([[0]], RuntimeError)]
)
def test_lanes_that_are_none(lane, error):
    rb = buffer(3)
    rb.extend(steps(0, 3), lane="each")
    with pytest.raises(error, match="lane: expected"):
        rb.end_trajectory(lane)
    assert not rb["next", "done"].any()


def test_nothing_was_ever_written():
    assert buffer(2).end_trajectory().tolist() == [-1, -1]


def test_an_emptied_lane_has_no_newest_step():
    rb = buffer(1)
    rb.extend(steps(0, 3))
    rb.empty()
    assert rb.end_trajectory().tolist() == [-1]
    rb.extend(steps(3, 1))
    assert rb.end_trajectory().tolist() == [0]


def test_several_columns_end_together():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend({"step": torch.arange(15).reshape(3, 5), "done": torch.zeros(3, 5, 1, dtype=torch.bool)})
    assert rb.end_trajectory().tolist() == [[0, 0], [0, 1], [0, 2]], "five steps of three columns in four slots"
    assert rb[:]["done"][..., 0].sum(0).tolist() == [3, 0, 0, 0]
    assert rb.end_trajectory().tolist() == [[-1, -1]] * 3


# ---- flags ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("stored", [FLAGS, ("done",), ("done", "terminated"), ("done", "truncated")])
def test_which_flags_say_it(stored, terminated):
    rb = buffer(1)
    rb.extend(steps(0, 3, stored))
    rb.end_trajectory(terminated=terminated)
    said = {"done": True, "terminated": terminated, "truncated": not terminated}
    for flag in stored:
        assert rb["next", flag].flatten().tolist() == [False, False, said[flag]]


@pytest.mark.parametrize("stored", ["terminated", "truncated"])
def test_a_flag_alone_says_its_own_end_and_no_other(stored):
    rb = buffer(1)
    rb.extend(steps(0, 3, (stored,)))
    with pytest.raises(RuntimeError, match="end_trajectory: expected a stored flag that says 'done' or"):
        rb.end_trajectory(terminated=stored != "terminated")
    assert not rb["next", stored].any()
    rb.end_trajectory(terminated=stored == "terminated")
    assert rb["next", stored].flatten().tolist() == [False, False, True]


@pytest.mark.parametrize("flag", FLAGS)
def test_an_end_of_any_kind_stays_as_it_is(flag):
    rb = buffer(1)
    data = steps(0, 3)
    data["next", flag][-1] = True
    rb.extend(data)
    before = rb[:].clone()
    for terminated in (False, True):
        assert rb.end_trajectory(terminated=terminated).tolist() == [-1]
    assert (rb[:] == before).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_flags_of_other_types(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend({"done": torch.zeros(3, dtype=dtype)})
    assert rb.end_trajectory().tolist() == [2]
    assert rb["done"].tolist() == [0, 0, 1]
    assert rb["done"].dtype is dtype
    assert rb.end_trajectory().tolist() == [-1]


def test_step_types():
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend({"step_type": torch.tensor([0, 1, 1])})
    assert rb.end_trajectory().tolist() == [2]
    assert rb["step_type"].tolist() == [0, 1, 2]
    assert rb.end_trajectory().tolist() == [-1]


def test_flags_of_the_step_that_only_an_agent_has_stay():
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    no = torch.zeros(3, dtype=torch.bool)
    rb.extend({"done": no, "next": {"done": no, "agent": {"done": no}}})
    rb.end_trajectory()
    assert rb["next", "done"].tolist() == [False, False, True]
    assert not rb["done"].any()
    assert not rb["next", "agent", "done"].any()


def test_flags_of_other_names():
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend({"over": torch.zeros(3, dtype=torch.bool), "x": torch.arange(3)})
    with pytest.raises(RuntimeError, match=r"got \['over', 'x'\]. Store .* roles="):
        rb.end_trajectory()
    with pytest.raises(KeyError, match="roles: expected stored fields"):
        rb.end_trajectory(roles={"end": "done"})
    with pytest.raises(ValueError, match="roles: 'over': expected one of"):
        rb.end_trajectory(roles={"over": "end"})
    assert not rb["over"].any()
    assert rb.end_trajectory(roles={"over": "done"}).tolist() == [2]
    assert rb["over"].tolist() == [False, False, True]


def test_ids_alone_are_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(TensorDict({"episode": torch.zeros(3, dtype=torch.int64)}, [3]))
    with pytest.raises(RuntimeError, match="the next step's id ends one"):
        rb.end_trajectory()


# ---- what stays ----------------------------------------------------------------------------------------------------------


def test_priorities_stay_and_late_ones_arrive():
    rb = buffer(2, sampler=PrioritizedSampler(10, 1.0, 1.0), batch_size=64)
    rb.extend(steps(0, 4), lane=torch.tensor([0, 0, 1, 1]))
    rb.update_priority(torch.tensor([0, 1, 5, 6]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    leaves = rb.sampler._index.leaves(10)
    batch = rb.sample()
    rb.end_trajectory(0)
    assert torch.equal(rb.sampler._index.leaves(10), leaves)
    batch["td_error"] = torch.full((64,), 9.0)
    rb.update_tensordict_priority(batch)
    after = rb.sampler._index.leaves(10)
    assert int((batch["index"] == 1).sum()) > 0
    assert after[1] == 9 != leaves[1], "the edited row is still the one that was drawn"
    assert rb.stats()["priority_updates_dropped"] == 0


def test_cursors_length_and_other_rows_stay():
    rb = buffer(2)
    rb.extend(steps(0, 12), lane=torch.arange(12) % 2)
    before = rb[:]["step"].clone()
    rb.end_trajectory()
    assert torch.equal(rb[:]["step"], before)
    assert rb.write_count == 12
    assert rb.extend(steps(12, 2), lane="each").tolist() == [1, 6]


# ---- rows of other processes ----------------------------------------------------------------------------------------------


def _write(rb):
    rb.extend(steps(0, 6), lane=torch.arange(6) % 2)
    rb.sample()  # it has a table of its own


def _ends(rb):
    assert rb["next", "truncated"].flatten().tolist() == [False, False, True] * 2
    for _ in range(20):
        assert not rb.sample()["next", "done"].reshape(-1, 2)[:, 0].any(), "no window crosses an end"


@pytest.mark.parametrize("method", METHODS)
def test_processes_see_ends_of_each_others_steps(method, tmp_path):
    storage = LazyMemmapStorage(20, lanes=2, scratch_dir=tmp_path / "store")
    rb = TensorDictReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2), batch_size=8)
    Child(_write, rb, method=method).join()
    rb.sample()
    assert rb.end_trajectory().tolist() == [2, 12]
    Child(_ends, rb, method=method).join()
    rb.extend(steps(6, 4), lane=torch.arange(4) % 2)
    assert sorted(n for *_, n in rb.sampler._table.runs().reshape(-1, 3).tolist()) == [2, 2, 3, 3]
    rb.close()
    again = ReplayBuffer.open(tmp_path / "store")
    assert again["next", "truncated"].sum() == 2
    assert again.end_trajectory("each").tolist() == [4, 14]
    again.close()


def test_a_row_that_a_dead_writer_left_void_is_passed_over():
    rb = buffer(2)
    rb.extend(steps(0, 6), lane=torch.arange(6) % 2)
    state = rb.state_dict()
    state["_storage"]["numbers"][2] = 0
    rb.load_state_dict(state)
    assert rb.storage.extent().holes.tolist() == [2]
    assert rb.storage.extent().size == 5
    assert rb.end_trajectory().tolist() == [1, 7]
    assert rb.end_trajectory().tolist() == [-1, -1]


class OnDevice(LazyTensorStorage):
    """As a storage on an accelerator, without one."""

    def _allocate(self, schema):
        return DeviceStore.on(schema, self._device)


def test_a_store_whose_rows_torch_moves():
    sampler = SliceSampler(slice_len=2, end_keys=[("next", "done")])
    rb = TensorDictReplayBuffer(storage=OnDevice(20, lanes=2), sampler=sampler, batch_size=8)
    rb.extend(steps(0, 6), lane=torch.arange(6) % 2)
    rb.sample()
    assert rb.end_trajectory().tolist() == [2, 12]
    assert rb.end_trajectory().tolist() == [-1, -1]
    rb.extend(steps(6, 4), lane=torch.arange(4) % 2)
    rb.sample()
    assert sorted(n for *_, n in rb.sampler._table.runs().reshape(-1, 3).tolist()) == [2, 2, 3, 3]
    assert rb["next", "truncated"].flatten().tolist() == [False, False, True, False, False] * 2


# ---- refusals ------------------------------------------------------------------------------------------------------------


def test_a_list_has_no_flags():
    rb = ReplayBuffer(storage=ListStorage(8))
    rb.extend([{"done": False}])
    with pytest.raises(TypeError, match="end_trajectory: expected a tensor storage"):
        rb.end_trajectory()


def test_a_read_only_writer_refuses():
    rb = buffer(1)
    rb.extend(steps(0, 3))
    rb.set_writer(ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="read-only"):
        rb.end_trajectory()
    assert not rb["next", "done"].any()


def test_the_best_rows_are_no_steps():
    rb = buffer(1, writer=TensorDictMaxValueWriter(rank_key="step"))
    rb.extend(steps(0, 3))
    with pytest.raises(RuntimeError, match="keeps the best"):
        rb.end_trajectory()
    assert not rb["next", "done"].any()
