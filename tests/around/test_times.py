"""Windows by time. The oracle is a list of rows that is searched from one end to the other."""

import signal
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer, Window
from tests import fresh


def rows_of(episodes, spacing, start=0.0):
    """Rows of episodes of given lengths: each has times from ``start`` on, and a value of its own."""
    rows, value = [], 0
    for episode, length in enumerate(episodes):
        for step in range(length):
            rows.append({"episode": episode, "time": start + spacing(step), "value": value, "done": step == length - 1})
            value += 1
    return rows


def batch_of(rows, time=torch.float64):
    return {
        "episode": torch.tensor([row["episode"] for row in rows]),
        "timestamp": torch.tensor([row["time"] for row in rows], dtype=time),
        "state": {
            "a": torch.tensor([[row["value"]] * 2 for row in rows]),
            "b": torch.tensor([row["value"] for row in rows]),
        },
        "action": torch.tensor([row["value"] for row in rows], dtype=torch.float32),
    }


def meant(live, row, delta, tolerance):
    """The value at a time from a row, and whether it is padding, among the live rows of its episode."""
    mine = sorted((one for one in live if one["episode"] == row["episode"]), key=lambda one: one["time"])
    wanted = row["time"] + delta
    nearest = min(mine, key=lambda one: abs(one["time"] - wanted))
    is_near = abs(nearest["time"] - wanted) <= tolerance
    assert is_near or wanted < mine[0]["time"] or wanted > mine[-1]["time"]
    return nearest["value"], not is_near


def check(rb, live, deltas, tolerance, n=64):
    """What is drawn is what the oracle finds."""
    by_value = {row["value"]: row for row in live}
    batch, info = rb.sample(n, return_info=True)
    for i, value in enumerate(batch["extra"].tolist()):
        for key, of in (
            ("state", lambda at: batch["state"]["a"][at].tolist()),
            ("action", lambda at: batch["action"][at]),
        ):
            for j, delta in enumerate(deltas[key]):
                expected, pad = meant(live, by_value[value], delta, tolerance)
                assert bool(info[f"{key}_is_pad"][i, j]) == pad
                found = of((i, j))
                assert found == ([expected] * 2 if key == "state" else expected), (value, key, delta)
        assert batch["state"]["b"][i].tolist() == [one[0] for one in batch["state"]["a"][i].tolist()]
    assert batch["timestamp"].shape == (n,)
    return batch, info


def with_extra(rows, **how):
    return {**batch_of(rows, **how), "extra": torch.tensor([row["value"] for row in rows])}


DELTAS = {"state": [-0.25, -0.125, 0.0], "action": [0.0, 0.125, 0.25, 0.5, 10.0]}


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("time", [torch.float64, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [400, 37])
def test_evenly_spaced_rows(size, time, kind):
    whole = time is torch.int64
    scale = 8 if whole else 1
    deltas = {key: [round(one * scale) if whole else one for one in each] for key, each in DELTAS.items()}
    rows = rows_of([5, 1, 12, 30, 3, 20], lambda step: step / 8 * scale, start=100 * scale)
    rb = kind(storage=LazyTensorStorage(size), sample_unit=Window(deltas=deltas, tolerance=0.01))
    data = with_extra(rows, time=time)
    for at in range(0, len(rows), 7):  # the ring ends within a batch
        part = {
            key: ({k: v[at : at + 7] for k, v in value.items()} if isinstance(value, dict) else value[at : at + 7])
            for key, value in data.items()
        }
        rb.extend(TensorDict(part, [len(part["action"])]) if kind is TensorDictReplayBuffer else part)
    check(rb, rows[-size:], deltas, 0.01, 200)


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.integers(1, 60), min_size=9, max_size=9),
    st.integers(10, 90),
    st.lists(st.integers(-90, 90), min_size=1, max_size=6),
)
def test_rows_that_are_not_evenly_spaced(episodes, gaps, size, deltas):
    """With a tolerance that any row is within."""
    times = np.cumsum([0, *gaps]).tolist()
    rows = rows_of(episodes, lambda step: times[step])
    deltas = {"state": deltas, "action": [0.0]}
    rb = ReplayBuffer(storage=LazyTensorStorage(size), sample_unit=Window(deltas, tolerance=30.5))
    rb.extend(with_extra(rows))
    live, by_value = rows[-size:], {row["value"]: row for row in rows}
    batch, info = rb.sample(40, return_info=True)
    for i, value in enumerate(batch["extra"].tolist()):
        row = by_value[value]
        mine = [one for one in live if one["episode"] == row["episode"]]
        for j, delta in enumerate(deltas["state"]):
            found = by_value[int(batch["state"]["b"][i, j])]
            wanted = row["time"] + delta
            assert found["episode"] == row["episode"]
            assert abs(found["time"] - wanted) == min(abs(one["time"] - wanted) for one in mine)
            assert bool(info["state_is_pad"][i, j]) == (abs(found["time"] - wanted) > 30.5)


@pytest.mark.parametrize("ids", [True, False])
def test_lanes_and_end_flags(ids):
    """Several lanes, whose rows come by turns, with ids or end flags alone."""
    lanes = [rows_of([4, 9, 2, 11], lambda step: step / 8), rows_of([13, 6, 7], lambda step: step / 8)]
    for lane, rows in enumerate(lanes):
        for row in rows:
            row.update(value=row["value"] + 1000 * lane, episode=row["episode"] + 10 * lane)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, lanes=2), sample_unit=Window(deltas=DELTAS, tolerance=0.01)
    )
    for both in zip(*lanes, strict=True):
        data = with_extra(both)
        data["next"] = {"done": torch.tensor([[row["done"]] for row in both])}
        if not ids:
            del data["episode"]
        rb.extend(TensorDict(data, [2]), lane="each")
    live = [row for rows in lanes for row in rows[-20:]]
    batch, _ = check(rb, live, DELTAS, 0.01, 200)
    assert torch.equal(batch["state_is_pad"][:, 2], torch.zeros(200, dtype=torch.bool))


def test_equal_times_are_the_row_itself():
    rows = rows_of([6], lambda step: step // 2)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Window({"action": [0.0]}))
    rb.extend(with_extra(rows))
    batch = rb.sample(50)
    assert torch.equal(batch["action"][:, 0].long(), batch["extra"])


@pytest.mark.parametrize("time", [torch.int64, torch.uint64], ids=str)
def test_nanoseconds_since_1970(time):
    """Which a double rounds to 256 of them."""
    start, gap = 1_764_438_000_000_000_000, 33_333_333
    rows = rows_of([20, 7], lambda step: step * gap, start=start)
    deltas = {"state": [-float(gap), 0.0], "action": [0.0, 2.0 * gap + 1]}
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sample_unit=Window(deltas, tolerance=1.0))
    rb.extend(with_extra(rows, time=time))
    check(rb, rows, {key: [int(one) for one in each] for key, each in deltas.items()}, 1)
    near = ReplayBuffer(
        storage=rb.storage, sample_unit=Window({"action": [2.0 * gap + 9]}, tolerance=8.5, traj_key="episode")
    )
    with pytest.raises(
        ValueError, match=r"within 8.5 of the time of row \d+ plus 66666675, got the nearest at that plus 66666666\."
    ):
        near.sample(64)


def test_small_unsigned_times():
    rows = rows_of([10], lambda step: step, start=250 - 9)
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sample_unit=Window({"state": [-1.0, 0.0], "action": [2.0]}))
    rb.extend(with_extra(rows, time=torch.uint8))
    check(rb, rows, {"state": [-1, 0], "action": [2]}, 0)


def test_windows_by_priority():
    """Priorities are those of drawn rows."""
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(20), sample_unit=Window({"action": [0.0, 0.125]}), batch_size=16
    )
    rb.extend(TensorDict(with_extra(rows_of([10], lambda step: step / 8)), [10]))
    rb.update_priority(torch.arange(10), torch.tensor([0.0] * 9 + [1.0]) + 1e-9)
    batch = rb.sample()
    assert batch["extra"].tolist() == [9] * 16
    assert batch["action_is_pad"].tolist() == [[False, True]] * 16
    batch["td_error"] = torch.zeros(16)
    rb.update_tensordict_priority(batch)
    assert set(rb.sample()["extra"].tolist()) != {9}


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"deltas": {}}, ValueError, "deltas: expected times of one key"),
        ({"deltas": 3}, TypeError, "deltas: expected a dict of times by key, got 3"),
        ({"deltas": {"a": 0.1}}, ValueError, "deltas: 'a': expected a list of finite times"),
        ({"deltas": {"a": [float("nan")]}}, ValueError, "deltas: 'a': expected a list of finite times"),
        ({"deltas": {"a": "now"}}, TypeError, "deltas: 'a'"),
        ({"deltas": {"a": [0]}, "tolerance": -1}, ValueError, "tolerance"),
        ({"deltas": {"a": [0]}, "time_key": 1.5}, TypeError, "time_key: expected a string"),
    ],
)
def test_arguments_that_cannot_be(arguments, error, said):
    with pytest.raises(error, match=f"Window: {said}"):
        Window(**arguments)


def drawn(unit, rows=None, **columns):
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sample_unit=unit)
    rb.extend({**with_extra(rows or rows_of([10, 10], lambda step: step / 8)), **columns})
    return rb.sample(64)


def test_no_row_is_near_enough():
    with pytest.raises(
        ValueError,
        match=r"deltas: 'action': expected a row of the episode within 0.01 of the time .* got the nearest at",
    ):
        drawn(Window({"state": [0.0], "action": [0.06]}, tolerance=0.01))


def test_a_gap_is_no_padding():
    rows = rows_of([10], lambda step: step / 8 + (step > 4))
    with pytest.raises(ValueError, match=r"raise tolerance="):
        drawn(Window({"action": [0.5]}), rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 4, 9])
def test_timestamps_that_are_not_finite(value, at):
    rows = rows_of([10], lambda step: value if step == at else step / 8)
    with pytest.raises(ValueError, match=rf"time_key: expected finite timestamps, got {value} in row {at}\."):
        drawn(Window({"action": [-0.5, 0.0, 0.125, 9.0]}), rows)


@pytest.mark.parametrize(
    ("unit", "error", "said"),
    [
        (Window({"velocity": [0.0]}), KeyError, r"deltas: \['velocity'\]: expected a stored field, one of .*'action'"),
        (
            Window({"action": [0.0]}, time_key="clock"),
            KeyError,
            r"time_key: 'clock': expected a stored field, one of .*'action'",
        ),
        (
            Window({"action": [0.0]}, time_key=("state", "a")),
            TypeError,
            r"expected one real number per row, got int64 \[2\]",
        ),
        (Window({"action": [0.0]}, traj_key="game", end_keys=[]), RuntimeError, "traj_key"),
    ],
)
def test_fields_that_are_not_there(unit, error, said):
    with pytest.raises(error, match=said):
        drawn(unit)


def test_a_list_of_anything():
    with pytest.raises(TypeError, match="expected a tensor storage"):
        ReplayBuffer(10, sample_unit=Window({"a": [0.0]})).sample(1)


# ---- others write, are killed, open again --------------------------------------------------------------------------------


def test_beside_a_writer():
    """Rows of one episode each are consistent while a writer goes round the ring."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(256),
        sample_unit=Window({"state": [-0.25, 0.0], "action": [0.0, 0.25]}, tolerance=0.01),
        batch_size=32,
    )
    rows = rows_of([16] * 16, lambda step: step / 8)
    rb.extend(with_extra(rows))
    stop = threading.Event()

    def write():
        value = len(rows)
        while not stop.is_set():
            part = [{**row, "value": value + i, "episode": value // 16} for i, row in enumerate(rows[:16])]
            rb.extend(with_extra(part))
            value += 16

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            batch, info = rb.sample(return_info=True)
            pad = info["state_is_pad"][:, 0]
            step = batch["extra"] % 16
            assert torch.equal(batch["state"]["b"][:, 1], batch["extra"])
            assert torch.equal(batch["state"]["b"][~pad, 0], batch["extra"][~pad] - 2)
            assert bool((step[~info["action_is_pad"][:, 1]] < 14).all())
            assert torch.equal(batch["state"]["b"] // 16, (batch["extra"] // 16)[:, None].expand(32, 2)), (
                "of one episode"
            )
    finally:
        stop.set()
        writer.join()


KILLED = """
import os, signal
from tensordict import TensorDict
from engram import LazyMemmapStorage, TensorDictReplayBuffer, Window
from tests.around.test_times import DELTAS, rows_of, with_extra

unit = Window(deltas=DELTAS, tolerance=0.01, traj_key="episode")
rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=directory), sample_unit=unit)
rb.extend(TensorDict(with_extra(rows_of([20, 31], lambda step: step / 8)), [51]))
rb.sample(8)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_and_opened_again(tmp_path):
    program = fresh.start(KILLED, directory=str(tmp_path / "store"))
    assert program.wait() == -signal.SIGKILL
    rows = rows_of([20, 31], lambda step: step / 8)
    with TensorDictReplayBuffer.open(tmp_path / "store") as rb:
        assert np.array_equal(rb[:]["action"].numpy().tobytes(), with_extra(rows)["action"].numpy().tobytes())
        check(rb, rows, DELTAS, 0.01)
