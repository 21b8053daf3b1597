"""The seam, priorities, ranks, rows, and what is left out."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, tensorclass

from engram import (
    ConsumingSampler,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyTensorStorage,
    TensorDictReplayBuffer,
)
from engram.format.schema import DTYPES, Field
from engram.torchrl.dumps import read, recognises
from tests.torchrl.torchrl_dumps import (
    MAX32,
    columns_of,
    edit,
    faults,
    make_dump,
    make_priorities,
    make_tensordict,
    oldest_first,
    put,
    quietly_read,
    raw,
    watched,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:last_cursor is None"),  # TorchRL, of a storage that nothing was written to
]


@tensorclass
class Labelled:
    value: torch.Tensor
    label: object


# ---- the seam ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 9), st.sampled_from(["exact", "none", "less", "more"]))
@example(4, 0, 0, "none")
@example(4, 4, 0, "none")
@settings(max_examples=80)
def test_the_seam(tmp_path_factory, capacity, written, before, count):
    """A simulated ring: whatever is known of the writes, the live rows come out oldest first."""
    path = tmp_path_factory.mktemp("seam")
    ring = torch.full((capacity,), -1)
    for i in range(written):
        ring[i % capacity] = i
    length, cursor = min(written, capacity), written % capacity
    counts = {"exact": written, "none": None, "less": max(0, written - before), "more": written + before}
    make_dump(path, {"x": ring}, length, writer={"cursor": cursor, "write_count": counts[count]})
    dump = quietly_read(path)
    assert oldest_first(dump, ring) == list(range(written - length, written))
    assert dump.position % capacity == cursor
    known = counts[count]
    if known is None:
        assert dump.position == cursor + (capacity if length == capacity else 0)
        assert dump.write_count == dump.position
    else:
        assert dump.write_count == known
        assert max(known, length) <= dump.position < max(known, length) + capacity
        if count == "exact":
            assert dump.position == written


def test_old_dumps_without_a_count(plain):
    put(plain / "writer" / "metadata.json", {"cursor": 6})
    assert quietly_read(plain).position == 6


@pytest.mark.parametrize(("length", "cursor"), [(6, 5), (6, 7), (6, 0), (10, 10), (0, 1)])
def test_a_cursor_that_contradicts_the_rows(plain, length, cursor):
    put(plain / "storage" / "storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": length})
    put(plain / "writer" / "metadata.json", {"cursor": cursor, "write_count": cursor})
    with pytest.raises(CorruptCheckpoint, match=r"writer/metadata\.json: expected a cursor of .*, got"):
        read(plain)


# ---- priorities, ranks, generators ---------------------------------------------------------------------------------------


def test_priorities(full):
    dump = quietly_read(full)
    got = dump.priorities
    assert (got.alpha, got.beta, got.eps, got.max_priority) == (0.6, 0.4, 1e-8, 3.0)
    assert got.leaves.dtype is torch.float64
    assert got.leaves.tolist() == [0.5, 1.0, 0.0, 2.0, 1.5, 3.0]


@pytest.mark.parametrize("unwritten", [MAX32, sys.float_info.max, float("inf")])
def test_leaves_never_written(plain, unwritten):
    make_priorities(plain, [1.0, 0.0, 0.0] + [1.0] * 7, [1.0, unwritten, 0.0] + [1.0] * 7)
    assert quietly_read(plain).priorities.leaves.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_leaves_of_rows_that_are_not_live_are_not_looked_at(plain):
    make_priorities(plain, [1.0] * 6 + [float("nan")] * 6, [1.0] * 12)
    assert quietly_read(plain).priorities.leaves.tolist() == [1.0] * 6


def test_leaves_are_bitwise(plain):
    values = [1.0, np.nextafter(1.0, 2), 5e-324, 1e300, 0.1, 1 / 3]
    make_priorities(plain, values + [0.0] * 4)
    assert quietly_read(plain).priorities.leaves.tolist() == values


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        ((float(np.float32(4.0**0.6)), 3.0), pytest.approx(4.0, rel=1e-5)),  # the leaf of row 3
        ((5.0, 3.0), 5.0),  # a priority; the row was rewritten since
        ((5.0, 9.0), 5.0),  # of a row that is not live
        ((5.0, None), 5.0),
        ((None, None), None),
    ],
)
def test_the_largest_priority_of_older_versions_may_be_a_leaf(plain, largest, expected):
    leaves = [1.0, 1.0, 1.0, float(np.float32(4.0**0.6)), 1.0, 1.0, 0, 0, 0, 0]
    make_priorities(plain, leaves, largest=largest)
    assert quietly_read(plain).priorities.max_priority == largest[0], "the version says it is a priority"
    described = plain / "sampler" / "sampler_metadata.json"
    state = json.loads(described.read_text())
    del state["_schema_version"]
    put(described, state)
    assert quietly_read(plain).priorities.max_priority == expected
    state["_alpha"] = 0.0
    put(described, state)
    assert quietly_read(plain).priorities.max_priority == largest[0], "alpha 0 cannot be undone"


@pytest.mark.parametrize(
    "heap",
    [
        torch.tensor([[1.0, 0.0], [2.0, 1.0]]),
        torch.tensor([[float(i), float(max(i, 1))] for i in range(6)]),
        torch.tensor([]),
    ],
    ids=["some rows", "one twice", "none"],
)
def test_ranks_that_do_not_fit_are_left_to_the_rows(full, heap):
    put(full / "writer" / "current_top_values.memmap", raw(heap))
    state = json.loads((full / "writer" / "metadata.json").read_text())
    put(full / "writer" / "metadata.json", {**state, "shape": list(heap.shape)})
    assert quietly_read(full).length == 6


def test_generators_continue(full):
    state = quietly_read(full).rng_state
    ours, theirs = torch.Generator(), torch.Generator().manual_seed(3)
    ours.set_state(state)
    assert torch.equal(torch.rand(5, generator=ours), torch.rand(5, generator=theirs))


def test_the_state_of_an_accelerators_generator_is_kept_as_it_is(plain):
    make_tensordict(plain / "rng_state", {"rng_state": torch.arange(16, dtype=torch.uint8)}, [])
    assert quietly_read(plain).rng_state.tolist() == list(range(16))


# ---- rows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_dtype(tmp_path, dtype):
    size = DTYPES[dtype]
    numbers = np.arange(10 * 3 * size, dtype=np.uint8) if dtype != "bool" else np.arange(30, dtype=np.uint8) % 2
    values = torch.from_numpy(numbers).view(getattr(torch, dtype)).reshape(10, 3)
    dump = quietly_read(make_dump(tmp_path / "dump", {"x": values}, 7))
    assert dump.fields == (Field(("x",), dtype, (3,)),)
    assert raw(columns_of(dump)[0]) == raw(values[:7])
    piece = torch.empty(2, 3, dtype=values.dtype)
    dump.read_rows(("x",), piece, first=4)
    assert raw(piece) == raw(values[4:6])
    dump.read_rows(("x",), piece[:0], first=7)


def test_a_file_that_changes_after_it_was_checked(plain):
    dump = quietly_read(plain)
    os.truncate(plain / "storage" / "obs.memmap", 119)
    with pytest.raises(CorruptCheckpoint, match=r"obs\.memmap: expected 120 bytes, got 119"):
        dump.read_rows(("obs",), torch.empty(6, 3))


def test_bytes_that_are_no_bools(plain):
    put(plain / "storage" / "next" / "done.memmap", bytes([0, 1, 2] + [0] * 7))
    dump = quietly_read(plain)
    dump.read_rows(("next", "done"), torch.empty(2, dtype=torch.bool))
    with pytest.raises(CorruptCheckpoint, match=r"done\.memmap: expected bools"):
        dump.read_rows(("next", "done"), torch.empty(3, dtype=torch.bool))


def test_descriptions_may_say_more_than_we_know(plain):
    edit("buffer_metadata.json", note=json.loads('{"a":' * 15 + "1" + "}" * 15), number=(1 << 63) - 1)(plain)
    assert quietly_read(plain).batch_size == 4


def test_names_of_older_versions(tmp_path):
    """They were not encoded."""
    path = make_dump(tmp_path / "dump", {"a b": torch.arange(4), "c:d": {"e<": torch.arange(4)}}, 4)
    assert (path / "storage" / "c:d" / "e<.memmap").is_file()
    assert all(torch.equal(column, torch.arange(4)) for column in columns_of(quietly_read(path)))


def test_a_limit(plain):
    assert quietly_read(plain, max_bytes=130).capacity == 10
    with pytest.raises(IncompatibleCheckpoint, match=r"at most 129 bytes, got 10 rows of 13 bytes\. Raise max_bytes"):
        read(plain, max_bytes=129)


def test_what_is_a_dump(tmp_path, plain):
    assert recognises(plain)
    assert not recognises(tmp_path / "nothing")
    assert not recognises(plain / "buffer_metadata.json")
    put(plain / "manifest.json", {})
    assert not recognises(plain), "ours may have been written over it"
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")


# ---- what is left out ----------------------------------------------------------------------------------------------------


def test_pickles_are_named(plain):
    for name in ("prefetch.pkl", "transform.t", "sampler/streaming_slice.pt", "sampler/own.pickle"):
        put(plain / name, b"not even a pickle")
    with pytest.warns(UserWarning, match="Pickles are never opened") as caught:
        read(plain)
    assert len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__)
    text = str(caught[0].message)
    assert "prefetch.pkl (prefetched batches" in text
    assert "transform.t (state of the transforms" in text
    assert "sampler/streaming_slice.pt" in text
    assert "sampler/own.pickle" in text


def test_a_load_points_to_the_line_that_asked_for_it(plain):
    put(plain / "prefetch.pkl", b"not even a pickle")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.warns(UserWarning, match=f"{plain}: not read, and lost .*prefetch.pkl") as caught:
        rb.loads(plain)
    assert [it.filename for it in caught] == [__file__]
    assert len(rb) == 6


def test_counts_of_a_consuming_sampler_are_lost_and_their_file_is_not_opened(plain):
    put(plain / "sampler" / "consuming_sampler.pt", b"not even a pickle")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=2)
    with pytest.warns(UserWarning, match=r"consuming_sampler.pt \(state of the consuming sampler\)"):
        rb.loads(plain)
    assert len(rb) == 6
    rb.sample()
    with pytest.warns(UserWarning, match="consuming_sampler.pt"):
        rb.loads(plain)
    assert len(rb) == 6  # the counts here were of other rows


def test_nothing_left_out_is_no_warning(plain):
    assert read(plain).left_out == ()


def test_a_sampler_that_is_not_known(plain):
    make_tensordict(plain / "sampler", {"consumer_version": torch.tensor(3), "max_staleness": torch.tensor(9)}, [])
    with pytest.warns(UserWarning, match=r"sampler's state \(consumer_version, max_staleness\)"):
        read(plain)


def test_entries_that_are_no_tensors_are_named(tmp_path, torchrl):
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10))
    rb.extend(TensorDict({"x": torch.arange(4), "name": NonTensorData("n", batch_size=[4])}, [4]))
    rb.dumps(tmp_path / "dump")
    with pytest.warns(UserWarning, match="storage/name: field name, which is no tensor"):
        dump = read(tmp_path / "dump")
    assert {field.key for field in dump.fields} == {("x",), ("index",)}


def test_pickled_parts_of_tensorclasses_are_named(plain):
    folder = plain / "storage" / "labelled"
    make_tensordict(folder / "_tensordict", {"value": torch.arange(10)}, [10])
    put(folder / "meta.json", {"_type": f"<class '{__name__}.Labelled'>", "note": 1})
    put(folder / "other.pickle", b"?")
    meta = json.loads((plain / "storage" / "meta.json").read_text())
    put(plain / "storage" / "meta.json", {"labelled": {"type": "Labelled"}, **meta})
    with (
        pytest.warns(
            UserWarning, match=r"storage/labelled: what is no tensor in .*Labelled \(note, other\.pickle, a pickle\)"
        ),
        watched() as events,
    ):
        dump = read(plain)
    assert list(faults(events)) == []
    assert dump.structure.children["labelled"].type == f"{__name__}:Labelled"
    assert dump.fields[0] == Field(("labelled", "value"), "int64", ())
