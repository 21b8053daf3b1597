"""Patches of rows that still hold what was drawn, beside a model, TorchRL, and processes that overwrite them meanwhile."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    ConditionalUpdateResult,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    RowError,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    WindowSpec,
)
from tests.store.processes import Child

ROWS = 6


def of_dicts(capacity=ROWS, **kwargs):
    writer = RoundRobinWriter(track_generations=True)
    return ReplayBuffer(storage=LazyTensorStorage(capacity, **kwargs), writer=writer)


def steps(first, n):
    """Rows that know who they are."""
    return {"id": torch.arange(first, first + n), "state": torch.zeros(n, 2), "v": torch.zeros(n, 1, dtype=torch.int32)}


def as_tensors(arguments):
    """The same arguments as the core reads them at once: lists of ints are looked at in Python first."""
    return {key: torch.tensor(given) if isinstance(given, list) else given for key, given in arguments.items()}


def of_tensordicts(sampler, storage=None, batch_size=16, **kwargs):
    storage = LazyTensorStorage(40) if storage is None else storage
    writer = TensorDictRoundRobinWriter(track_generations=True)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, writer=writer, batch_size=batch_size, **kwargs)
    rb.extend(episodes(0, 40))
    return rb


def episodes(first, n):
    ids = torch.arange(first, first + n)
    following = {"done": (ids % 10 == 9)[:, None], "reward": torch.zeros(n, 1)}
    return TensorDict({"id": ids, "state": torch.zeros(n), "next": following}, [n])


# ---- what batches carry and what a patch of them does ------------------------------------------------------------------

SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(40, 1.0, 1.0),
    "slices": lambda: SliceSampler(slice_len=4),
    "priority slices": lambda: PrioritizedSliceSampler(40, 1.0, 1.0, slice_len=4),
    "n-step": lambda: NStep(RandomSampler(), 2, 0.9),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_states_of_a_batch_go_back_to_its_rows(sampler, prefetch):
    rb = of_tensordicts(SAMPLERS[sampler](), prefetch=prefetch)
    batch = rb.sample()
    rb.extend(episodes(40, 5))
    rows = batch["index"].flatten()
    result = rb.update_if_present(
        index=batch["index"], generation=batch["index_generation"], patch={"state": rows.float() + 100}
    )
    assert result.updated.tolist() == (rows >= 5).tolist()
    assert (result.generation >= 0).equal(result.updated)
    drawn = torch.zeros(40, dtype=torch.bool).index_fill_(0, rows, True) & (torch.arange(40) >= 5)
    assert rb["state"].equal(torch.where(drawn, torch.arange(40) + 100.0, 0.0))
    assert rb.stats()["field_updates"] == result.updated_count == int((rows >= 5).sum())
    assert rb.stats()["field_updates_dropped"] == result.stale_count


def test_rows_of_every_layout():
    """Of dicts, of columns, of TensorDicts with batch dimensions, and in a directory."""
    rb = of_dicts()
    rb.extend(steps(0, ROWS))
    batch, info = rb.sample(4, return_info=True)
    result = rb.update_if_present(
        index=info["index"].numpy(),
        generation=info["index_generation"],
        patch={"state": batch["id"][:, None].expand(4, 2) + 1.0},
    )
    assert result.updated_count == 4
    assert all((rb[int(i)]["state"] == i + 1).all() for i in info["index"])

    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), writer=RoundRobinWriter(track_generations=True))
    rb.extend({"id": torch.arange(12).view(3, 4), "state": torch.zeros(3, 4)})
    batch, info = rb.sample(5, return_info=True)
    patch = {"state": batch["id"] + 1.0}
    assert (
        rb.update_if_present(index=info["index"], generation=info["index_generation"], patch=patch).updated_count == 5
    )
    assert (rb["state"][rb["state"] > 0] == rb["id"][rb["state"] > 0] + 1.0).all()

    writer = TensorDictRoundRobinWriter(track_generations=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), writer=writer, batch_size=3)
    rb.extend(TensorDict({"a": torch.zeros(8, 2, 5)}, [8, 2]))
    batch = rb.sample()
    batch["a"] += 1
    result = rb.update_if_present(index=batch["index"], generation=batch["index_generation"], patch=batch.select("a"))
    assert result.updated.tolist() == [True] * 3
    assert int(rb["a"].sum()) == 10 * batch["index"].unique().numel()


def test_a_directory_counts_for_all(tmp_path):
    storage = LazyMemmapStorage(8, scratch_dir=tmp_path)
    rb = ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))
    index = rb.extend({"a": torch.zeros(8), "next": {"h": torch.zeros(8, 3)}})
    generation = rb.writer.generations_of(index)
    other = pickle.loads(pickle.dumps(rb))
    patch = {("next", "h"): torch.ones(8, 3)}
    assert other.update_if_present(index=index, generation=generation, patch=patch).updated_count == 8
    assert rb.update_if_present(
        index=index, generation=generation, patch={"next": {"h": torch.full((8, 3), 2.0)}}
    ).updated.all()
    rb.extend({"a": torch.zeros(8), "next": {"h": torch.zeros(8, 3)}})
    assert other.update_if_present(index=index, generation=generation, patch=patch).stale_count == 8
    assert (rb["next", "h"] == 0).all()
    assert rb.stats()["field_updates"] == 16
    assert rb.stats()["field_updates_dropped"] == 8
    other.close(), rb.close()


def test_the_best_rows_and_priorities():
    """Writers of all kinds can track; a prioritized sampler does without."""
    writer = TensorDictMaxValueWriter(rank_key="r", track_generations=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=writer, batch_size=2)
    rb.extend(TensorDict({"r": torch.arange(9.0), "h": torch.zeros(9)}, [9]))
    batch = rb.sample()
    assert batch["index_generation"].dtype is torch.int64
    patch = {"h": torch.ones(2)}
    assert (
        rb.update_if_present(index=batch["index"], generation=batch["index_generation"], patch=patch).updated_count == 2
    )

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 1.0, 1.0), batch_size=4)
    rb.extend(TensorDict({"h": torch.zeros(4)}, [4]))
    batch = rb.sample()
    result = rb.update_if_present(
        index=batch["index"], generation=batch["index_generation"], patch={"h": torch.ones(4)}
    )
    assert result.generation.equal(batch["index_generation"])
    rb.update_priority(batch["index"], 7.0, generation=batch["index_generation"])
    assert rb.stats()["priority_updates_dropped"] == 0
    rb.extend(TensorDict({"h": torch.zeros(4)}, [4]))
    rb.update_priority(batch["index"], 7.0, generation=batch["index_generation"])  # of before: dropped
    assert rb.stats()["priority_updates_dropped"] == 4


# ---- beside a model, and TorchRL --------------------------------------------------------------------------------------

entry = st.tuples(st.integers(-1, ROWS - 1), st.sampled_from(["now", "before", "never"]), st.integers(0, 4))


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, ROWS + 2)),
            st.tuples(st.just("edit"), st.integers(0, ROWS - 1)),
            st.tuples(st.just("patch"), st.lists(entry, min_size=1, max_size=8)),
            st.tuples(st.sampled_from(["older", "newer"]), st.lists(entry, min_size=1, max_size=8)),
        ),
        max_size=8,
    ),
)
def test_a_model_agrees(at_once, operations):
    rb = of_dicts()
    rb.extend(steps(0, ROWS))
    rows = [[i, 0.0, 0] for i in range(ROWS)]  # id, state, version
    cursor, value, last = 0, 0.0, [0] * ROWS  # generations of before
    for name, what in operations:
        now = rb.writer.generations_of(torch.arange(ROWS)).tolist()
        if name == "write":
            rb.extend(steps(100, what))
            for _ in range(what):
                rows[cursor % ROWS] = [100 + (_ if what else 0), 0.0, 0]
                cursor += 1
            last = now
        elif name == "edit":
            rb.set_at_("state", torch.full((1, 2), -1.0), [what])
            rows[what][1] = -1.0
            last = now
        else:
            index = [row for row, _, _ in what]
            named = {"now": now, "before": last, "never": [1 << 40] * ROWS}
            generation = [named[kind][row] for row, kind, _ in what]
            values = [value + i for i in range(len(what))]
            live = [row >= 0 and given == now[row] for row, given in zip(index, generation, strict=True)]
            patch = {"state": torch.tensor(values)[:, None].expand(-1, 2)}
            arguments = {"index": index, "generation": generation, "patch": patch}
            value += len(what)
            expected, rejected = list(live), None
            if name != "patch":
                versions = [version for _, _, version in what]
                arguments |= {"version_key": "v", "version": versions, "require_newer": name == "newer"}
                for row in set(index):
                    fits = [
                        i
                        for i in range(len(what))
                        if index[i] == row
                        and live[i]
                        and (versions[i] > rows[row][2] if name == "newer" else versions[i] >= rows[row][2])
                    ]
                    best = max(fits, key=lambda i: (versions[i], i), default=None)
                    for i in range(len(what)):
                        if index[i] == row:
                            expected[i] = i == best
                rejected = [alive and not kept for alive, kept in zip(live, expected, strict=True)]
            if at_once:
                arguments = as_tensors(arguments)
                if "version" in arguments:
                    arguments["version"] = arguments["version"].int()
            result = rb.update_if_present(**arguments)
            assert result.updated.tolist() == expected
            assert (None if result.version_rejected is None else result.version_rejected.tolist()) == rejected
            assert result.stale_count == live.count(False)
            for i, kept in enumerate(expected):
                if kept:
                    rows[index[i]][1] = values[i]
                    if name != "patch":
                        rows[index[i]][2] = versions[i]
            after = rb.writer.generations_of(torch.arange(ROWS)).tolist()
            assert result.generation.tolist() == [
                after[row] if kept else -1 for row, kept in zip(index, expected, strict=True)
            ]
            if any(expected):
                last = now
        assert rb["state"].tolist() == [[state, state] for _, state, _ in rows]
        assert rb["v"].flatten().tolist() == [version for _, _, version in rows]
        assert rb["id"].tolist() == [who for who, _, _ in rows]


def test_torchrl_says_the_same():
    torchrl = pytest.importorskip("torchrl.data")
    theirs = torchrl.TensorDictReplayBuffer(
        storage=torchrl.LazyTensorStorage(8),
        writer=torchrl.TensorDictRoundRobinWriter(track_generations=True),
        batch_size=8,
    )
    ours = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8), writer=TensorDictRoundRobinWriter(track_generations=True), batch_size=8
    )
    dice = np.random.default_rng(0)
    for rb in (theirs, ours):
        rb.extend(TensorDict({"s": torch.zeros(8), "v": torch.zeros(8, dtype=torch.int64)}, [8]))
    handles = [rb.writer.generations_of(torch.arange(8)) for rb in (theirs, ours)]
    for rb in (theirs, ours):
        rb.extend(TensorDict({"s": torch.zeros(3), "v": torch.zeros(3, dtype=torch.int64)}, [3]))
    index, version = torch.tensor(dice.integers(0, 8, 20)), torch.tensor(dice.integers(-1, 3, 20))
    patch = {"s": torch.arange(20.0)}
    for more in ({}, {"version_key": "v", "version": version}):
        found = [
            rb.update_if_present(index=index, generation=handle[index], patch=patch, **more)
            for rb, handle in zip((theirs, ours), handles, strict=True)
        ]
        handles[1] = ours.writer.generations_of(torch.arange(8)).index_fill(0, torch.arange(3), 0)
        assert found[0].updated.equal(found[1].updated)
        for name in ("updated_count", "stale_count", "version_rejected_count"):
            assert getattr(found[0], name) == getattr(found[1], name)
        assert theirs[:]["s"].equal(ours["s"])
        assert theirs[:]["v"].equal(ours["v"])


# ---- beside others ------------------------------------------------------------------------------------------------------


def overwrite(rb, first, n):
    for i in range(first, first + n):
        rb.add({"id": torch.tensor(i), "state": torch.zeros(256)})


def test_a_row_that_another_process_rewrites_is_never_patched():
    """A patch says whose it is. A state of one step in the row of another would show."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True), shared=True)
    rb.extend({"id": torch.arange(4), "state": torch.zeros(4, 256)})
    children = [Child(overwrite, rb, first, 3000) for first in (1000, 10_000)]
    while True:
        over = not any(child.process.is_alive() for child in children)
        batch, info = rb.sample(4, return_info=True)
        assert ((batch["state"] == 0) | (batch["state"] == batch["id"][:, None])).all()
        assert (batch["state"] == batch["state"][:, :1]).all()
        rb.update_if_present(
            index=info["index"],
            generation=info["index_generation"],
            patch={"state": batch["id"][:, None].expand(4, 256).float()},
        )
        if over:
            break
    for child in children:
        child.join()
    assert rb.stats()["field_updates"] > 0
    assert rb.stats()["void_rows"] == 0
    rb.close()


def test_a_row_that_is_being_written_is_not_waited_for():
    """Its ticket says so: a writer that is stopped in the middle would leave it like that."""
    rb = of_dicts()
    index = rb.extend(steps(0, ROWS))
    generation, words = rb.writer.generations_of(index), rb.storage.store._ticket_words()
    before = int(words[2])
    words[2] = (before >> 2 << 2) + 1 + 4 * 100  # under a newer number
    result = rb.update_if_present(index=index, generation=generation, patch={"state": torch.ones(ROWS, 2)})
    words[2] = before
    assert result.updated.tolist() == [True, True, False, True, True, True]
    assert rb["state"][:, 0].tolist() == [1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("between", ["write", "edit", "empty"])
def test_what_happens_between_looking_at_versions_and_writing_counts(between, monkeypatch):
    rb = of_dicts()
    index = rb.extend(steps(0, ROWS))
    generation, store = rb.writer.generations_of(index), rb.storage.store
    read = store.read

    def read_and_then(*args, **kwargs):
        found = read(*args, **kwargs)
        monkeypatch.undo()
        {"write": lambda: rb.extend(steps(50, 1)), "edit": lambda: rb.set_at_("id", [50], [0]), "empty": rb.empty}[
            between
        ]()
        return found

    monkeypatch.setattr(store, "read", read_and_then)
    entries = {"index": index.tolist(), "generation": generation}  # not at once, so that there is something between
    result = rb.update_if_present(**entries, patch={"state": torch.ones(ROWS, 2)}, version_key="v", version=3)
    # A row that was edited is looked at again, and one that was written is left alone.
    assert result.updated.tolist() == [between == "edit" or (between == "write" and i > 0) for i in range(ROWS)]
    assert result.stale_count == ROWS - result.updated_count
    if between == "empty":
        assert len(rb) == 0
    else:
        assert (rb[0]["state"] == (between == "edit")).all()


# ---- refusals ------------------------------------------------------------------------------------------------------------

PATCH = {"state": torch.ones(2, 2)}
REFUSED = {
    "an unknown field": (KeyError, "stored field", {"patch": {"states": torch.ones(2, 2)}}),
    "a field that is unknown behind one that is not": (
        KeyError,
        "stored field",
        {"patch": {**PATCH, "w": torch.ones(2)}},
    ),
    "another shape": (ValueError, "shape", {"patch": {"state": torch.ones(2, 3)}}),
    "another number of rows": (ValueError, "shape", {"patch": {"state": torch.ones(3, 2)}}),
    "another dtype": (ValueError, "float32", {"patch": {"state": torch.ones(2, 2).double()}}),
    "no patch": (TypeError, "dict or TensorDict", {"patch": torch.ones(2, 2)}),
    "a key that is none": (TypeError, "string", {"patch": {1.5: torch.ones(2, 2)}}),
    "too few generations": (ValueError, "one generation per row", {"generation": [1]}),
    "generations that are none": (TypeError, "ints", {"generation": [1.0, 2.0]}),
    "rows that are none": (TypeError, "ints", {"index": [0.0, 1.0]}),
    "a row outside": (RowError, "outside", {"index": [0, ROWS]}),
    "a key without a version": (ValueError, "together", {"version_key": "v"}),
    "a version without a key": (ValueError, "together", {"version": 1}),
    "an unknown version key": (KeyError, "stored field", {"version_key": "w", "version": 1}),
    "a dotted version key": (ValueError, "tuple", {"version_key": "a.v", "version": 1}),
    "a version key in the patch": (
        ValueError,
        "without the version key",
        {"patch": {**PATCH, "v": torch.ones(2, 1).int()}, "version_key": "v", "version": 1},
    ),
    "a version key of many numbers": (
        ValueError,
        "one number per row",
        {"patch": {"v": torch.zeros(2, 1).int()}, "version_key": "state", "version": 1},
    ),
    "too many versions": (ValueError, "shape", {"version_key": "v", "version": [1, 2, 3]}),
    "versions of another dtype": (ValueError, "int32", {"version_key": "v", "version": torch.tensor([1.0, 2.0])}),
    "a version that the field cannot hold": (ValueError, "int32", {"version_key": "v", "version": 1 << 40}),
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_changes_nothing(mistake, at_once):
    error, words, change = REFUSED[mistake]
    rb = of_dicts()
    generation = rb.writer.generations_of(rb.extend(steps(0, ROWS)))
    arguments = {"index": [0, 1], "generation": generation[:2], "patch": PATCH} | change
    with pytest.raises(error, match=words):
        rb.update_if_present(**(as_tensors(arguments) if at_once else arguments))
    assert (rb["state"] == 0).all()
    assert rb.writer.generations_of(torch.arange(ROWS)).equal(generation)


@pytest.mark.parametrize(
    ("rb", "words"),
    [
        (
            lambda: ReplayBuffer(storage=ListStorage(4), writer=RoundRobinWriter(track_generations=True)),
            "has no fields",
        ),
        (lambda: ReplayBuffer(storage=LazyTensorStorage(4)), "track_generations=True"),
        (of_dicts, "nothing was ever written"),
        (lambda: ReplayBuffer(storage=LazyTensorStorage(4), writer=ImmutableDatasetWriter()), "read-only"),
    ],
)
def test_buffers_that_cannot(rb, words):
    with pytest.raises(RuntimeError, match=words):
        rb().update_if_present(index=[0], generation=[1], patch={"a": torch.zeros(1)})


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("newer", [False, True])
def test_any_version_replaces_nan(newer, at_once):
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
    generation = rb.writer.generations_of(
        rb.extend({"v": torch.tensor([torch.nan, torch.nan, 1.0]), "x": torch.zeros(3)})
    )
    version = torch.tensor([-5.0, torch.nan, torch.nan])
    entries = {"index": [0, 1, 2], "generation": generation, "patch": {"x": torch.ones(3)}}
    entries = as_tensors(entries) if at_once else entries
    result = rb.update_if_present(**entries, version_key="v", version=version, require_newer=newer)
    assert result.updated.tolist() == [True, False, False]
    assert result.version_rejected.tolist() == [False, True, True]
    assert rb["v"].nan_to_num(9).tolist() == [-5, 9, 1]
    assert rb["x"].tolist() == [1, 0, 0]


LARGEST = {
    torch.bool: 1,
    torch.uint8: 255,
    torch.int8: 127,
    torch.int32: 2**31 - 1,
    torch.int64: 2**63 - 1,
    torch.uint64: 2**64 - 1,
    torch.float16: 2048,
    torch.bfloat16: 256,
    torch.float32: 2**24,
    torch.float64: 2**53,
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("dtype", LARGEST)
def test_versions_of_every_dtype_are_compared_exactly(dtype, at_once):
    """The largest ones, too, which are equal as floats."""
    largest = LARGEST[dtype]
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
    held = torch.tensor([0, largest - 1, largest], dtype=dtype)
    generation = rb.writer.generations_of(rb.extend({"v": held, "x": torch.zeros(3)}))
    entries = {"index": [0, 1, 2, 0], "generation": [*generation.tolist(), int(generation[0])]}
    entries = as_tensors(entries) if at_once else entries
    version = torch.tensor([largest - 1, largest, largest - 1, largest], dtype=dtype)
    result = rb.update_if_present(**entries, patch={"x": torch.ones(4)}, version_key="v", version=version)
    assert result.updated.tolist() == [False, True, False, True]
    assert rb["v"].tolist() == held.new_tensor([largest, largest, largest]).tolist()
    assert rb["x"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("row", [-2, -(1 << 62), 8, (1 << 63) - 1])
def test_rows_outside_are_named_and_nothing_is_written(storage, row):
    rb = ReplayBuffer(storage=storage(8), writer=RoundRobinWriter(track_generations=True))
    generation = rb.writer.generations_of(rb.extend({"x": torch.zeros(8), "v": torch.zeros(8)}))
    entries = {"index": torch.tensor([0, row]), "generation": generation[:2], "patch": {"x": torch.ones(2)}}
    for more in ({}, {"version_key": "v", "version": torch.ones(2)}):
        with pytest.raises(RowError, match=str(row)):
            rb.update_if_present(**entries, **more)
    assert (rb["x"] == 0).all()
    assert rb.writer.generations_of(torch.arange(8)).equal(generation)


@pytest.mark.parametrize("strided", ["index", "generation", "patch", "version", "none"])
def test_tensors_of_any_layout_are_taken(strided):
    rb = of_dicts()
    generation = rb.writer.generations_of(rb.extend(steps(0, ROWS)))
    given = {
        "index": torch.tensor([4, 1, 2]),
        "generation": generation[torch.tensor([4, 1, 2])],
        "patch": torch.arange(6.0).reshape(3, 2),
        "version": torch.tensor([1, 2, 3], dtype=torch.int32),
    }
    if strided != "none":
        given[strided] = torch.stack([given[strided], given[strided]], -1)[..., 0]
        assert not given[strided].is_contiguous()
    patch = {"state": given.pop("patch")}
    assert rb.update_if_present(**given, patch=patch, version_key="v").updated.tolist() == [True] * 3
    assert rb["state"][:5].tolist() == [[0, 0], [2, 3], [4, 5], [0, 0], [0, 1]]
    assert rb["v"].flatten().tolist() == [0, 2, 3, 0, 1, 0]


def test_no_rows_are_none():
    rb = of_dicts()
    rb.extend(steps(0, ROWS))
    result = rb.update_if_present(index=[], generation=[], patch={"state": torch.ones(0, 2)})
    assert (result.updated_count, result.stale_count, result.updated.dtype) == (0, 0, torch.bool)


def test_the_result_counts():
    result = ConditionalUpdateResult(
        torch.tensor([True, False, False]), torch.tensor([False, True, False]), torch.zeros(3)
    )
    assert (result.updated_count, result.version_rejected_count, result.stale_count) == (1, 1, 1)


def test_steps_that_stand_for_missing_ones_are_left_out_by_their_mask():
    sampler = SliceSampler(window=WindowSpec(4, padding=1), strict_length=False, flat=False, end_key="done")
    writer = RoundRobinWriter(track_generations=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(2), sampler=sampler, writer=writer)
    rb.extend({"h": torch.zeros(2), "done": torch.tensor([False, True])})
    _, info = rb.sample(1, return_info=True)
    real = info["validity_mask"]
    assert real.tolist() == [[False, True, True, False]]
    generation = info["index_generation"].where(real, -1)
    result = rb.update_if_present(index=info["index"], generation=generation, patch={"h": torch.arange(4.0)[None]})
    assert result.updated.tolist() == real.tolist()
    assert rb["h"].tolist() == [1, 2]


def test_some_entries_of_a_result():
    updated, rejected, generation = torch.tensor([[True, False], [False, True]]), None, torch.tensor([[5, -1], [-1, 6]])
    result = ConditionalUpdateResult(updated, rejected, generation)
    assert (len(result), result.batch_size) == (2, torch.Size([2, 2]))
    second = result[1]
    assert (second.updated.tolist(), second.version_rejected, second.generation.tolist()) == (
        [False, True],
        None,
        [-1, 6],
    )
    assert ConditionalUpdateResult(updated, updated, generation)[0, 0].version_rejected.item() is True
    copied = result.to_tensordict()
    assert (sorted(copied.keys()), copied.batch_size) == (["generation", "updated"], torch.Size([2, 2]))
    copied["updated"].zero_()
    assert result.updated_count == 2
