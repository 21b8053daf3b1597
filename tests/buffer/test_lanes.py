"""Lanes of writes: named, one for each row, or none."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from engram import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from engram.checkpoint.checkpointer import Checkpointer
from engram.store.device.store import DeviceStore
from engram.types import WritePlan

# ---- lanes that are not named --------------------------------------------------------------------------------------------


def vector(n, first=0):
    return TensorDict({"env": torch.arange(n), "step": torch.arange(first, first + n)}, [n])


@pytest.fixture(params=["RAM", "directory", "reopened", "a copy", "a custom writer"])
def laned(request, tmp_path):
    """``laned(n, length)`` gives a buffer whose handle never named a lane."""

    class Custom(TensorDictRoundRobinWriter):
        def place(self, extent, n, lane, data):
            return super().place(extent, n, lane, data)

    def make(n, length=5):
        if request.param in ("RAM", "a copy", "a custom writer"):
            storage = LazyTensorStorage(n * length, lanes=n)
        else:
            storage = LazyMemmapStorage(n * length, lanes=n, scratch_dir=tmp_path / "store")
        rb = TensorDictReplayBuffer(storage=storage, writer=Custom() if request.param == "a custom writer" else None)
        if request.param == "a copy":
            return pickle.loads(pickle.dumps(rb))
        if request.param == "reopened":
            rb.extend(vector(n), lane="each")
            rb.empty()
            rb.close()
            return ReplayBuffer.open(tmp_path / "store")
        return rb

    return make


@pytest.mark.parametrize("each", [{}, {"lane": "each"}, {"lane": None}])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_as_many_rows_as_lanes_go_one_to_each(laned, n, each):
    rb = laned(n)
    for step in range(7):
        rows = rb.extend(vector(n, step), **each)
        assert rows.tolist() == [env * 5 + step % 5 for env in range(n)]
    assert len(rb) == 5 * n
    assert rb[:]["env"].reshape(n, 5).unique(dim=1).flatten().tolist() == list(range(n)), "row i is in lane i"


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 9, 16, 800])
def test_another_number_of_rows_is_refused_with_the_remedy(laned, rows, written):
    rb = laned(8)
    if written:
        rb.extend(vector(8))
    before = (len(rb), rb.write_count)
    for call in (
        lambda: rb.extend(vector(rows)),
        lambda: rb.extend(vector(rows), lane=None),
        lambda: rb.writer.extend(vector(rows)),
    ):
        with pytest.raises(
            RuntimeError, match=rf'extend: expected 8 rows, one for each lane.*got {rows}\..*lane=.*on_lane.*"each"'
        ):
            call()
    with pytest.raises(
        RuntimeError, match=rf'extend: expected 8 rows, one for each lane, as lane="each" says, got {rows}\.'
    ):
        rb.extend(vector(rows), lane="each")
    for call in (lambda: rb.add(vector(1)[0]), lambda: rb.writer.add(vector(1)[0])):
        with pytest.raises(
            RuntimeError, match=r"add: expected the lane of a row, one of 8, got none\..*lane=.*on_lane"
        ):
            call()
    with pytest.raises(RuntimeError, match='lane="each".*extend'):
        rb.add(vector(1)[0], lane="each")
    assert (len(rb), rb.write_count) == before
    assert rb.extend(vector(rows), lane=3).tolist()[:1] == [3 * 5 + written]
    rb.empty()
    rb.on_lane(7).extend(vector(rows))
    assert rb.add(vector(1)[0]) == 35 + rows % 5


def test_zero_is_a_lane_like_others(laned):
    rb = laned(4)
    assert rb.on_lane(0).add(vector(1)[0]) == 0
    assert rb.extend(vector(4)).tolist() == [1, 2, 3, 4], "not one to each"
    assert rb.extend(vector(4), lane="each").tolist() == [0, 5, 10, 15]


@pytest.mark.parametrize("storage", [LazyTensorStorage(8), LazyTensorStorage(8, lanes=1), ListStorage(8)])
def test_with_one_lane_nothing_need_be_named(storage):
    rb = ReplayBuffer(storage=storage)
    assert rb.extend(torch.arange(3)).tolist() == [0, 1, 2]
    assert rb.add(torch.tensor(3)) == 3
    assert rb.extend(torch.arange(1), lane="each").tolist() == [4]
    with pytest.raises(RuntimeError, match='expected 1 row, one for each lane, as lane="each" says, got 2'):
        rb.extend(torch.arange(2), lane="each")


@pytest.mark.parametrize("lane", ["all", "", "Each"])
def test_other_words_are_no_lanes(laned, lane):
    rb = laned(4)
    for name, call in (
        ("extend", lambda: rb.extend(vector(4), lane=lane)),
        ("add", lambda: rb.add(vector(1)[0], lane=lane)),
        ("on_lane", lambda: rb.on_lane(lane)),
        ("on_lane", lambda: rb.on_lane(None)),
        ("appender", lambda: rb.appender(1.5)),
        ("end_trajectory", lambda: rb.end_trajectory(lane)),
        ("record", lambda: rb.record(None, lane=lane)),
    ):
        with pytest.raises(TypeError, match=f"^{name}: lane: expected an int"):
            call()
    with pytest.raises(RuntimeError, match="extend: expected 0 rows, one per index or lane that was given, got 4"):
        rb.extend(vector(4), lane=[])
    with pytest.raises(TypeError, match=r"^extend: lane: expected ints, one per row, got torch\.float64\. Convert"):
        rb.extend(vector(4), lane=[0.0, 1.0, 2.0, 3.0])


def test_unnamed_lanes_are_told_once_per_handle(caplog):
    caplog.set_level("INFO", "engram")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=4))
    with pytest.raises(RuntimeError):
        rb.extend(vector(3))
    rb.extend(vector(4), lane="each")
    caplog.clear()
    for _ in range(3):
        rb.extend(vector(4))
    said = [message for message in caplog.messages if "lane" in message]
    assert len(said) == 1
    assert 'lane="each"' in said[0]
    other = TensorDictReplayBuffer(storage=rb.storage)
    other.extend(vector(4))
    assert len([message for message in caplog.messages if "lane" in message]) == 2
    TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=4)).on_lane(1).extend(vector(4))
    assert len([message for message in caplog.messages if "lane" in message]) == 2


def test_rows_are_counted_as_they_are_stored():
    """Behind write transforms, in lists, and in TensorDicts of more dimensions."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=4))
    rb.append_transform(lambda td: td[:4], invert=True)
    assert rb.extend(vector(9)).tolist() == [0, 4, 8, 12]
    with pytest.raises(RuntimeError, match="expected 4 rows"):
        rb.extend(vector(3))
    seen = []
    rb.append_transform(lambda td: seen.append(td) or td, invert=True)
    with pytest.raises(RuntimeError, match="add: expected the lane"):
        rb.add(vector(1)[0])
    assert not seen, "it is refused before transforms are asked"
    rb = ReplayBuffer(storage=LazyTensorStorage(16, lanes=4))
    assert rb.extend([{"a": torch.zeros(7)}] * 4).tolist() == [0, 4, 8, 12]
    assert rb.extend({"a": torch.zeros(4, 7)}).tolist() == [1, 5, 9, 13]
    with pytest.raises(RuntimeError, match="expected 4 rows"):
        rb.extend({"a": torch.zeros(7, 7)})
    with pytest.raises(RuntimeError, match="expected 4 rows"):
        rb.extend([{"a": torch.zeros(7)}] * 5)


def test_priorities_of_rows_one_in_each_lane():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(16, lanes=4), batch_size=8)
    rb.extend(vector(4).set("td_error", torch.tensor([0.0, 0.0, 5.0, 0.0])))
    assert rb.sample()["env"].unique().tolist() == [2]


WAYS = {
    "state": lambda rb, other, _: other.load_state_dict(rb.state_dict()),
    "dump": lambda rb, other, folder: (rb.dumps(folder / "dump"), other.loads(folder / "dump")),
    "converted": lambda rb, other, folder: (rb.dumps(folder / "dump"), other.loads(folder / "dump", convert=True)),
    "series": lambda rb, other, folder: (
        Checkpointer(folder / "series", rb).save(1),
        Checkpointer(folder / "series", other).restore(resume="exact"),
    ),
    "pickle": lambda rb, other, _: vars(other).update(vars(pickle.loads(pickle.dumps(rb)))),
    "deepcopy": lambda rb, other, _: vars(other).update(vars(copy.deepcopy(rb))),
}


@pytest.mark.parametrize("here", [None, 0, 3])
@pytest.mark.parametrize("named", [None, 0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_states_and_copies_know_whether_a_lane_was_named(way, named, here, tmp_path):
    def make(lane):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=4))
        return rb if lane is None else rb.on_lane(lane)

    rb, other = make(named), make(here)
    rb.extend(vector(4), lane="each")
    WAYS[way](rb, other, tmp_path)
    if named is None:
        with pytest.raises(RuntimeError, match="expected the lane of a row"):
            other.add(vector(1)[0])
        assert other.extend(vector(4)).tolist() == [1, 5, 9, 13]
    else:
        assert other.add(vector(1)[0]) == named * 4 + 1


@pytest.mark.parametrize(("saved", "lane"), [(0, None), (3, 3), (1, 1)])
def test_in_states_saved_before_zero_meant_that_none_was_named(saved, lane):
    rb, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=4)) for _ in "ab")
    rb.extend(vector(4), lane="each")
    other.on_lane(2).load_state_dict({**rb.state_dict(), "_lane": saved})
    if lane is None:
        with pytest.raises(RuntimeError, match="expected the lane of a row"):
            other.add(vector(1)[0])
    else:
        assert other.add(vector(1)[0]) == lane * 4 + 1


@pytest.mark.parametrize(
    ("saved", "error"),
    [
        *((saved, ValueError) for saved in (4, -1, [4], [], [0, 1])),
        *((saved, TypeError) for saved in ("each", [None], True, [True], 1.0)),
    ],
)
def test_states_with_other_lanes_are_refused(saved, error):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=4)).on_lane(2)
    rb.extend(vector(4))
    state = {**rb.state_dict(), "_lane": saved}
    with pytest.raises(error, match="_lane"):
        rb.load_state_dict(state)
    assert rb.add(vector(1)[0]) == 8


def test_into_other_lanes(tmp_path):
    """Of one lane into several none was named, and neither was one that is not there any more."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(16)).on_lane(0)
    rb.extend(vector(8))
    rb.dumps(tmp_path / "one")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=4))
    other.loads(tmp_path / "one", convert=True)
    with pytest.raises(RuntimeError, match="expected the lane of a row"):
        other.add(vector(1)[0])
    other.on_lane(3).dumps(tmp_path / "four")
    two = TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=2))
    two.loads(tmp_path / "four", convert=True)
    with pytest.raises(RuntimeError, match="expected the lane of a row"):
        two.add(vector(1)[0])
    rb.loads(tmp_path / "four", convert=True)
    rb.add(vector(1)[0])


def test_another_storage_has_other_lanes():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(16, lanes=4)).on_lane(3)
    rb.set_storage(LazyTensorStorage(16, lanes=8))
    assert rb.add(vector(1)[0]) == 6
    rb.set_storage(LazyTensorStorage(16))
    assert rb.add(vector(1)[0]) == 0
    rb.set_storage(LazyTensorStorage(16, lanes=2))
    with pytest.raises(RuntimeError, match="expected the lane of a row"):
        rb.add(vector(1)[0])


def test_a_read_only_buffer_says_so_first():
    rb = ReplayBuffer(storage=TensorStorage(torch.arange(8), lanes=4), writer=ImmutableDatasetWriter())
    for call in (
        lambda: rb.add(torch.tensor(1)),
        lambda: rb.extend(torch.arange(3)),
        lambda: rb.writer.add(torch.tensor(1)),
    ):
        with pytest.raises(RuntimeError, match="read-only|one of 4"):
            call()
    with pytest.raises(RuntimeError, match="read-only"):
        rb.extend(torch.arange(3))


def test_existing_data_fills_every_lane_of_a_device():
    data = torch.arange(8)
    cpu = TensorStorage(data.clone(), lanes=2)
    store = DeviceStore.on(cpu.store.schema, torch.device("cpu"))
    store.tensors[0].copy_(data)
    store.core.fill()
    assert store.extent().filled == (4, 4)
    assert store.write(WritePlan(lane=1), [torch.tensor([9])], 1).rows.tolist() == [4]


def test_refused_lanes_allocate_nothing():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2))
    with pytest.raises(RuntimeError, match="one dimension"):
        rb.extend(torch.arange(4), lane=torch.zeros(4, 1, dtype=torch.int64))
    assert not rb.storage.initialized


def test_another_storage_has_its_own_lanes():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=4)).on_lane(3)
    rb.set_storage(LazyTensorStorage(8))
    assert rb.add(torch.tensor(1)) == 0
