"""Windows of trajectories whose steps are interleaved in the store."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    WindowSpec,
)
from tests.forkserver import CONTEXT
from tests.samplers.slicing import seeded
from tests.store.test_device import OnDevice


def sampler(length=3, **options):
    return SliceSampler(**{"slice_len": length, "traj_key": "traj", "fragmented": True, "step_key": "step", **options})


def buffer(length=3, *, capacity=64, lanes=1, storage=None, **options):
    storage = LazyTensorStorage(capacity * lanes, lanes=lanes) if storage is None else storage
    return ReplayBuffer(storage=storage, sampler=sampler(length, **options), generator=seeded())


def rows(*pairs):
    """Of (trajectory, step)."""
    return {"traj": np.array([traj for traj, _ in pairs]), "step": np.array([step for _, step in pairs])}


def runs_of(pairs):
    """The oracle: steps without gaps, by sorting."""
    runs = []
    for traj, step in sorted(pairs):
        if runs and runs[-1][-1] == (traj, step - 1):
            runs[-1].append((traj, step))
        else:
            runs.append([(traj, step)])
    return runs


def windows(batch, length):
    pairs = list(zip(batch["traj"].tolist(), batch["step"].tolist(), strict=True))
    return [pairs[i : i + length] for i in range(0, len(pairs), length)]


def check_table(rb, stored, length):
    runs = runs_of(stored)
    table = rb.sampler._bound_to(rb.storage, length).table
    assert table.census() == (len(runs), max(map(len, runs), default=0))
    spec = rb.sampler.settings.native(length, "")
    long = [run for run in runs if len(run) >= length]
    assert table.choices(rb.storage.memory.core, spec) == len(long)
    assert table.windows(rb.storage.memory.core, spec) == sum(len(run) - length + 1 for run in long)
    return long


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("write"), st.lists(st.tuples(st.integers(0, 3), st.integers(-6, 12)), min_size=1, max_size=8)
            ),
            st.tuples(
                st.just("replace"), st.tuples(st.integers(0, 15), st.tuples(st.integers(0, 3), st.integers(0, 12)))
            ),
            st.tuples(st.just("empty"), st.none()),
        ),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 4),
)
def test_runs_are_those_of_a_sort(operations, length):
    rb, stored, cursor = buffer(length, capacity=16), {}, 0
    for operation, argument in operations:
        if operation == "write":
            new = [pair for i, pair in enumerate(argument) if pair not in stored.values() and pair not in argument[:i]]
            if new:
                rb.extend(rows(*new))
            for pair in new:
                stored[cursor % 16] = pair
                cursor += 1
        elif operation == "replace":
            row, pair = argument
            if row in stored and pair not in stored.values():
                rb[row] = {"traj": pair[0], "step": pair[1]}
                stored[row] = pair
        elif stored:
            rb.empty()
            stored, cursor = {}, 0
        if not stored:
            continue
        long = check_table(rb, stored.values(), length)
        if not long:
            assert not rb.can_sample(length)
            continue
        batch, info = rb.sample(length * 4, return_info=True)
        for window in windows(batch, length):
            assert any(window == run[i : i + length] for run in long for i in range(len(run)))
        assert [stored[row] for row in info["index"][0].tolist()] == sum(windows(batch, length), [])


def test_runs_are_equally_likely_and_then_their_windows():
    rb = buffer(3)
    pairs = [(0, s) for s in (*range(7), *range(9, 13))] + [(1, s) for s in range(6)] + [(2, 0), (2, 1)]
    order = np.random.default_rng(3).permutation(len(pairs))
    rb.extend(rows(*[pairs[i] for i in order]))
    counts = {}
    for window in windows(rb.sample(3 * 6_000), 3):
        counts[window[0]] = counts.get(window[0], 0) + 1
    expected = {(0, s): 400 for s in range(5)} | {(0, 9): 1000, (0, 10): 1000} | {(1, s): 500 for s in range(4)}
    assert counts.keys() == expected.keys()
    chi = sum((counts[start] - n) ** 2 / n for start, n in expected.items())
    assert chi < 31.4  # 10 degrees of freedom, p = 0.0005


@pytest.mark.parametrize("where", ["ram", "directory", "device"])
@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ({"next": {"done": "end"}}, {}),
        ({"next": {"terminated": "odd", "truncated": "even"}}, {}),
        ({"done": "end"}, {}),
        ({"step_type": "type"}, {}),
        ({"over": "end", "next": {"done": "never"}}, {"end_key": "over"}),
        ({"a": "odd", "b": "even"}, {"end_keys": ["a", "b"]}),
        ({"done": "agents"}, {"end_when": "all"}),
    ],
)
def test_no_window_crosses_a_stored_end(tmp_path, where, flags, keys):
    at = torch.arange(60)
    step = at // 2  # of two environments, which go on counting
    end = step % 5 == 4
    values = {
        "end": end.unsqueeze(1),
        "never": torch.zeros(60, dtype=torch.bool),
        "odd": end & (at % 2 == 1),
        "even": end & (at % 2 == 0),
        "type": torch.where(end, 2, torch.where(step % 5 == 0, 0, 1)),
        "agents": torch.stack([end, torch.ones(60, dtype=torch.bool)], 1),
    }
    data = {"traj": at % 2, "step": step}
    for name, value in flags.items():
        inner = isinstance(value, dict)
        data[name] = {key: values[flag] for key, flag in value.items()} if inner else values[value]
    storage = {"directory": lambda: LazyMemmapStorage(64, scratch_dir=tmp_path), "device": lambda: OnDevice(64)}
    rb = buffer(3, storage=storage.get(where, lambda: LazyTensorStorage(64))(), **keys)
    rb.extend(
        {
            name: value[:30] if not isinstance(value, dict) else {k: v[:30] for k, v in value.items()}
            for name, value in data.items()
        }
    )
    rb.sample(3)  # the rest is written beside a table
    rb.extend(
        {
            name: value[30:] if not isinstance(value, dict) else {k: v[30:] for k, v in value.items()}
            for name, value in data.items()
        }
    )
    drawn = windows(rb.sample(1800), 3)
    assert all(window[0][1] // 5 == window[2][1] // 5 for window in drawn)
    assert len({window[0] for window in drawn}) == 36  # three in each of twelve episodes
    assert rb.sampler._bound_to(rb.storage, 3).table.census() == (12, 5)


def test_ids_alone_and_ends_that_are_edited():
    data = {"traj": torch.zeros(8).long(), "step": torch.arange(8), "done": torch.arange(8) == 3}
    for keys, found in (({"end_keys": []}, (1, 8)), ({}, (2, 4))):
        rb = buffer(2, **keys)
        rb.extend(data)
        rb.sample(2)
        table = rb.sampler._bound_to(rb.storage, 2).table
        assert table.census() == found
        rb.set_at_("done", torch.tensor([False]), torch.tensor([3]))
        assert table.census() == (1, 8)
    rb.set_sampler(sampler(2, end_keys=["done"]))
    rb.sample(2)
    other = sampler(2, end_keys=[])
    rb.set_sampler(other)
    with pytest.raises(IncompatibleStore):
        rb.sample(2)


def test_a_last_step_is_marked_where_an_end_is_stored():
    made = SliceSampler(slice_len=9, traj_key="traj", step_key="step", fragmented=True, strict_length=False)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=made, batch_size=9, generator=seeded())
    done = (torch.arange(8) == 3).unsqueeze(1)
    rb.extend(TensorDict({"traj": torch.zeros(8).long(), "step": torch.arange(8), "next": {"done": done}}, [8]))
    for _ in range(8):
        batch = rb.sample()
        assert batch["step"].tolist() in ([*range(first, 4)] for first in range(4)) or batch["step"][0] > 3
        assert batch["next", "truncated"].flatten().tolist() == [False] * (len(batch) - 1) + [True]


def test_marks_short_windows_and_padding():
    data = TensorDict(
        {"traj": torch.tensor([0, 0, 1]), "step_count": torch.tensor([4, 3, 2]), "is_init": torch.zeros(3, 1).bool()},
        [3],
    )
    for padded in (False, True):
        made = SliceSampler(slice_len=3, traj_key="traj", fragmented=True, strict_length=False, pad_output=padded)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=made, batch_size=6, generator=seeded())
        rb.extend(data)
        batch = rb.sample()
        ends = batch["next", "truncated"].flatten()
        assert set(batch["step_count"][ends].tolist()) <= {4, 2}
        assert len(batch) == 6 if padded else len(batch) < 6
        assert int(ends.sum()) == 2
        if padded:
            assert int(batch["collector", "mask"].sum()) < 6


def test_windows_of_a_spec():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(64),
        sampler=sampler(None, window=WindowSpec(length=2, burn_in=1, padding=1, dilation=2), flat=False),
        generator=seeded(),
    )
    rb.extend(rows(*[(0, step) for step in np.random.default_rng(1).permutation(9)]))
    batch, info = rb.sample(64, return_info=True)
    for window, real in zip(batch["step"].tolist(), info["validity_mask"].tolist(), strict=True):
        first = window[2] - 4
        assert window == [max(first, 0), window[2] - 2, window[2]]
        assert real == [first >= 0, True, True]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_of_every_width(dtype):
    rb = buffer(3)
    rb.extend({"traj": torch.zeros(6, 1, dtype=dtype), "step": torch.tensor([102, 100, 101, 1, 0, 2], dtype=dtype)})
    starts = {window[0][1] for window in windows({k: v.flatten() for k, v in rb.sample(60).items()}, 3)}
    assert starts == {0, 100}


def test_a_step_in_two_rows_is_an_error_until_one_goes():
    rb = buffer(2, capacity=4)
    rb.extend(rows((5, 0), (5, 1), (5, 1)))
    with pytest.raises(RuntimeError, match="got step 1 of trajectory 5 in two"):
        rb.sample(2)
    rb[1] = {"traj": 5, "step": 2}
    assert {window[0] for window in windows(rb.sample(40), 2)} == {(5, 0), (5, 1)}


def test_states_copies_and_reopened_stores(tmp_path):
    rb = buffer(storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "store"))
    rb.extend(rows(*[(traj, step) for step in range(5) for traj in range(3)]))
    rb.dumps(tmp_path / "dump")
    rb.close()
    again = ReplayBuffer.open(tmp_path / "store")
    assert again.sampler.fragmented
    assert again.sampler.step_key == ("step",)
    other = buffer()
    other.loads(tmp_path / "dump")
    for one in (again, other):
        for window in windows(one.sample(30), 3):
            assert window == [(window[0][0], window[0][1] + i) for i in range(3)]
    again.close()


STEPS, SHARE = 100, 20


def produce(path, rank, said):
    """Write trajectories of one's own, step by step, into the only lane; say so after each share."""
    rb = ReplayBuffer.open(path)
    for step in range(STEPS):
        rb.extend(rows((rank * 100 + step // SHARE, step % SHARE)))
        if step % SHARE == SHARE - 1:
            said.put(rank)
    rb.close()


def test_several_processes_write_into_one_lane(tmp_path):
    rb = buffer(4, storage=LazyMemmapStorage(128, scratch_dir=tmp_path / "store"))
    rb.extend(rows((9, 0), (9, 1), (9, 2), (9, 3)))
    assert {traj for window in windows(rb.sample(40), 4) for traj, _ in window} == {9}
    said = CONTEXT.Queue()
    producers = [CONTEXT.Process(target=produce, args=(tmp_path / "store", rank, said)) for rank in (1, 2)]
    for producer in producers:
        producer.start()
    for _ in range(2 * STEPS // SHARE):
        said.get(timeout=120)
        for window in windows(rb.sample(32), 4):  # while the others write
            assert window == [(window[0][0], window[0][1] + i) for i in range(4)]
    for producer in producers:
        producer.join(120)
        assert producer.exitcode == 0
    stored = rb[:]
    pairs = list(zip(stored["traj"].tolist(), stored["step"].tolist(), strict=True))
    assert len(pairs) == 128
    check_table(rb, pairs, 4)
    rb.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"span": True}, NotImplementedError, "expected no span"),
        ({"compile": True}, NotImplementedError, "expected no compile"),
        ({"step_key": None}, ValueError, "expected a step_key"),
        ({"traj_key": None, "ends": torch.zeros(4).bool(), "cache_values": True}, ValueError, "got ends"),
        ({"traj_key": None, "trajectories": torch.zeros(4), "cache_values": True}, ValueError, "got trajectories"),
        ({"uniform_over": "anchors"}, ValueError, "expected no uniform_over"),
        ({"slice_len": None, "window": WindowSpec(2), "online": True}, ValueError, "expected no online"),
    ],
)
def test_what_does_not_go_with_it(arguments, error, message):
    with pytest.raises(error, match=message):
        sampler(**{"slice_len": 3, **arguments} if "slice_len" not in arguments else {**arguments, "length": None})


def test_other_samplers_do_not_take_it():
    with pytest.raises(TypeError, match="fragmented"):
        SliceSamplerWithoutReplacement(slice_len=3, fragmented=True)
    with pytest.raises(ValueError, match="expected no anchors"):
        PrioritizedSliceSampler(8, 0.5, 0.5, slice_len=3, traj_key="traj", fragmented=True)


def test_fields_that_do_not_do():
    rb = buffer(2)
    rb.extend({"traj": torch.zeros(4), "step": torch.arange(4)})
    with pytest.raises(TypeError, match="traj_key='traj': expected one integer per row, got float32"):
        rb.sample(2)
    assert not rb.can_sample(2)
    rb = buffer(2)
    rb.extend({"traj": torch.arange(4)})
    with pytest.raises(RuntimeError, match="expected rows with the step_key"):
        rb.sample(2)
    rb = buffer(3)
    rb.extend(rows((0, 0), (0, 1), (0, 5)))
    with pytest.raises(NoSampleable, match="got 2 of at most 2"):
        rb.sample(3)
    made = TensorDictReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=sampler(2))
    made.extend(TensorDict({"traj": torch.zeros(2, 3).long(), "step": torch.arange(6).reshape(2, 3)}, [2, 3]))
    with pytest.raises(RuntimeError, match="ndim=1"):
        made.sample(2)
