"""Dicts whose keys are ints, in rows: stored, read back, saved and opened again as they were written."""

import enum
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    ActionChunkTransform,
    Checkpointer,
    CorruptStore,
    DTypeCastTransform,
    ExcludeTransform,
    FrameStack,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PromptGroupSampler,
    RandomSampler,
    RenameTransform,
    ReplayBuffer,
    RoundRobinWriter,
    SelectTransform,
    SliceSampler,
)
from engram.format.schema import decode, encode
from engram.storages.items import pack, unpack
from tests.ranks.jobs import done, job

N = 5


class Agent(enum.IntEnum):
    FIRST = 1


keys = st.one_of(st.integers(-3, 12), st.sampled_from([2**63 - 1, -(2**63)]), st.sampled_from(["a", "b", "0", "-1"]))
leaves = st.sampled_from([torch.float32, torch.int64, torch.bool])
#: Rows as leaves of dtypes in containers; no two keys of a dict have one name.
pytrees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(st.tuples(keys, inner), min_size=1, max_size=3, unique_by=lambda pair: str(pair[0])).map(dict),
        st.lists(inner, min_size=1, max_size=2),
        st.lists(inner, min_size=1, max_size=2).map(tuple),
    ),
    max_leaves=6,
)
rows = st.lists(st.tuples(keys, pytrees), min_size=1, max_size=3, unique_by=lambda pair: str(pair[0])).map(dict)


def filled(tree, count=N, first=0):
    """A batch of a tree of dtypes, whose numbers tell rows and leaves apart."""
    number = iter(range(1000))

    def fill(node):
        if isinstance(node, dict):
            return {key: fill(child) for key, child in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(map(fill, node))
        return (torch.arange(first, first + count) + next(number) * 7).to(node)

    return fill(tree)


def said(data):
    """Data as text: order, types and all keys count."""
    if isinstance(data, torch.Tensor):
        return f"{data.dtype}{data.tolist()}"
    if isinstance(data, dict):
        return f"{{{', '.join(f'{key!r}: {said(child)}' for key, child in data.items())}}}"
    return f"{type(data).__name__}[{', '.join(map(said, data))}]"


def taken(data, row):
    if isinstance(data, dict):
        return {key: taken(child, row) for key, child in data.items()}
    return type(data)(taken(child, row) for child in data) if isinstance(data, list | tuple) else data[row]


def has_integers(tree):
    if isinstance(tree, dict):
        return any(type(key) is int or has_integers(child) for key, child in tree.items())
    return isinstance(tree, list | tuple) and any(map(has_integers, tree))


def buffer(size=8, **options):
    return ReplayBuffer(storage=LazyTensorStorage(size), batch_size=3, **options)


TREE = {1: torch.float32, 0: {"x": torch.int64, -3: [torch.bool, {7: torch.int64}]}}


@settings(max_examples=60, deadline=None)
@given(rows)
def test_rows_are_read_as_they_were_written(tree):
    rb, batch = buffer(), filled(tree)
    rb.extend(batch)
    rb.add(taken(filled(tree, 1, first=N), 0))
    rb.extend([taken(filled(tree, 1, first=N + 1), 0)] * 2)
    assert said(rb[:N]) == said(batch)
    assert said(rb[N]) == said(taken(filled(tree, 1, first=N), 0))
    sample, info = rb.sample(return_info=True)
    every = rb[:]
    for place, row in enumerate(info["index"].tolist()):
        assert said(taken(sample, place)) == said(taken(every, row))


@settings(max_examples=15, deadline=None)
@given(rows)
def test_stores_states_and_dumps_keep_them(tree):
    batch = filled(tree)
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=there / "store"), batch_size=3)
        rb.extend(batch)
        rb.dumps(there / "dump")
        Checkpointer(there / "series", rb).save(1)
        state = rb.state_dict()
        rb.close()
        text = json.loads((there / "store" / ".engram" / "store.json").read_bytes())
        assert text["version"] == [2, 4]
        assert ('"integers"' in json.dumps(text)) == has_integers(tree)
        with ReplayBuffer.open(there / "store", batch_size=3) as again:
            assert said(again[:]) == said(batch)
            again.extend(filled(tree, 2, first=N))
            assert said(again[N:]) == said(filled(tree, 2, first=N))
        loaded, restored, larger, stated = buffer(), buffer(), buffer(16), buffer()
        loaded.loads(there / "dump")
        assert Checkpointer(there / "series", restored).restore() is not None
        larger.loads(there / "dump", convert=True)
        stated.load_state_dict(state)
        for other in (loaded, restored, larger, stated):
            assert said(other[:]) == said(batch)


def test_shared_memory_keeps_them():
    with ReplayBuffer(storage=LazyTensorStorage(8), batch_size=3, shared=True) as rb:
        rb.extend(filled(TREE))
        assert said(rb[:]) == said(filled(TREE))


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_keep_them(ranks, tmp_path):
    tree = {**TREE, "done": torch.bool}

    def save(ranks, rank):
        rb = buffer(32)
        rb.extend(filled(tree, 6, first=100 * rank))
        return Checkpointer(tmp_path, rb, ranks=ranks).save(1)

    def restore(ranks, rank):
        rb = buffer(32)
        assert Checkpointer(tmp_path, rb, ranks=ranks).restore() is not None
        return [said(taken(rb[:], row)) for row in range(len(rb))]

    done(job(2, save))
    found = [row for share in done(job(ranks, restore)) for row in share]
    saved = [said(taken(filled(tree, 6, first=first), row)) for first in (0, 100) for row in range(6)]
    assert sorted(found) == sorted(saved)


def test_paths_name_them_by_their_digits():
    rb = buffer()
    rb.extend(filled(TREE))
    assert torch.equal(rb["1"], filled(TREE)[1])
    assert torch.equal(rb["0", "x"], filled(TREE)[0]["x"])
    rb.set_at_(("0", "x"), torch.tensor([99]), [2])
    assert rb[2][0]["x"] == 99
    rb.update_({1: torch.zeros(N)})
    assert rb["1"].tolist() == [0.0] * N
    with pytest.raises(KeyError, match=r"expected one of \['1', '0'\], got '2'"):
        rb["2"]


def test_users_name_them_by_themselves():
    steps = {0: torch.rand(20, 3), 1: {2: torch.arange(20) // 5, "end": torch.arange(20) % 5 == 4}}

    def made(sampler=None, **arguments):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(20, dtypes={0: torch.float64}), sampler=sampler, batch_size=10, **arguments
        )
        rb.extend(steps)
        return rb

    rb = made(writer=RoundRobinWriter(track_generations=True))
    assert rb[0][0].dtype is torch.float64
    rb.set_at_((1, 2), torch.tensor([9]), [3])
    index = torch.arange(4)
    rb.update_if_present(
        index=index, generation=rb.writer.generations_of(index), patch={0: torch.ones(4, 3, dtype=torch.float64)}
    )
    assert rb[:4][0].eq(1).all()
    assert rb[3][1][2] == 9
    for sampler in (SliceSampler(slice_len=5, traj_key=(1, 2)), SliceSampler(slice_len=5, end_key=(1, "end"))):
        assert made(sampler).sample()[1][2].view(2, 5).unique(dim=1).shape[1] == 1
    stacked = made(FrameStack(RandomSampler(), n=2, dim=-1, in_keys=[0], traj_key=(1, 2))).sample()
    assert stacked[0].shape == (10, 6)
    assert (
        made(PromptGroupSampler(num_groups=2, group_key=(1, 2))).sample()[1][2].view(2, 5).unique(dim=1).shape[1] == 1
    )


@pytest.mark.parametrize("name", [0, "0"])
def test_transforms_name_them(name):
    data = {0: torch.rand(4, 3), 1: {2: torch.rand(4)}}
    cast = DTypeCastTransform(torch.float32, torch.float64, in_keys=[name, (1, 2)])(data)
    assert list(cast) == [0, 1]
    assert cast[0].dtype is cast[1][2].dtype is torch.float64
    assert list(RenameTransform([name], ["obs"])(data)) == [1, "obs"]
    assert list(SelectTransform(name, ("1", "2"))(data)) == [0, 1]
    assert SelectTransform((1, 2))(data).keys() == {1}
    assert list(ExcludeTransform(name, (1, "2"))(data)) == [1]
    with pytest.raises(TypeError, match="in_keys: expected a string or a tuple of strings, got True"):
        DTypeCastTransform(torch.float32, torch.float64, in_keys=[True])
    for key in ("action_key", "chunk_key", "pad_key", "done_key"):
        with pytest.raises(TypeError, match=rf"{key}: expected a string or a tuple of strings, got \(\)"):
            ActionChunkTransform(2, **{key: ()})


def test_fields_that_are_added_are_strings():
    rb = buffer()
    rb.extend(filled(TREE))
    before = rb[:]
    for key in (5, (0, 5), ("v", 5)):
        with pytest.raises(TypeError, match="add_field: key: expected new keys that are strings, got"):
            rb.add_field(key, torch.zeros(1))
    with pytest.raises(KeyError, match=r"unknown \[7\]"):
        rb[:] = {**before, 7: torch.zeros(N)}
    rb.add_field((0, "v"), torch.zeros(2))
    assert rb[:][0]["v"].shape == (N, 2)


@pytest.mark.parametrize(
    "key", [True, Agent.FIRST, np.int64(1), 1.5, None, (1,), b"a", 2**63, -(2**63) - 1, 10**30], ids=repr
)
def test_other_keys_are_refused(key):
    rb = buffer()
    with pytest.raises(TypeError, match="expected keys that are strings or ints of 64 bits, got"):
        rb.extend({"a": torch.ones(2), key: torch.ones(2)})
    assert len(rb) == 0


def test_two_keys_of_one_name_are_refused():
    rb = buffer()
    with pytest.raises(TypeError, match="got both"):
        rb.extend({"a": {0: torch.ones(2), "0": torch.ones(2)}})
    assert len(rb) == 0


@pytest.mark.parametrize("key", ["1", True, 1.0, np.int64(1), Agent.FIRST], ids=repr)
def test_later_rows_have_the_keys_of_the_first(key):
    rb = buffer()
    rb.extend({0: torch.ones(2), 1: torch.ones(2)})
    for write, row in [(rb.extend, torch.ones(2)), (rb.add, torch.tensor(1.0)), (rb.extend, None)]:
        data = {0: torch.ones(2), key: row} if row is not None else [{0: torch.tensor(1.0), key: torch.tensor(1.0)}]
        with pytest.raises((KeyError, TypeError), match="unknown|strings or ints"):
            write(data)
    names = buffer()
    names.extend({"0": torch.ones(2), "1": torch.ones(2)})
    with pytest.raises(KeyError, match="missing"):
        names.extend({0: torch.ones(2), 1: torch.ones(2)})
    assert len(rb) == len(names) == 2


def test_fields_can_be_added_beside_them(tmp_path):
    with ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "store")) as rb:
        rb.extend(filled(TREE))
        rb.add_field(("0", "v"), torch.zeros(2), fill=-1.0)
    with ReplayBuffer.open(tmp_path / "store") as again:
        assert list(again[0][0]) == ["x", -3, "v"]
        again.add(taken(filled(TREE), 0))
        assert again[N][0]["v"].tolist() == [-1.0, -1.0]


def test_descriptions_say_so_in_a_version_of_their_own():
    rb = buffer()
    rb.extend(filled(TREE))
    schema = rb.storage.store.schema
    text = json.loads(encode(schema))
    assert text["version"] == [2, 3]
    assert encode(decode(encode(schema), "x")) == encode(schema)
    with pytest.raises(CorruptStore, match="versions? 2.3"):
        decode(json.dumps({**text, "version": [2, 0]}).encode(), "x")
    with pytest.raises(IncompatibleStore, match="newer"):
        decode(json.dumps({**text, "version": [2, 4]}).encode(), "x")
    for wrong in (["0", "1"], ["1", "2"], ["01"], ["x"]):
        text["structure"]["integers"] = wrong
        with pytest.raises(CorruptStore, match="integers"):
            decode(json.dumps(text).encode(), "x")


@settings(max_examples=30, deadline=None)
@given(rows)
def test_lists_of_rows_keep_them(tree):
    rb, other = (ReplayBuffer(storage=ListStorage(4)) for _ in range(2))
    rb.extend([filled(tree), {"x": torch.zeros(1), -1: torch.ones(2)}])
    with tempfile.TemporaryDirectory() as folder:
        rb.dumps(Path(folder) / "dump")
        other.loads(Path(folder) / "dump")
    assert said(other[0]) == said(filled(tree))
    assert list(other[1]) == ["x", -1]


@pytest.mark.parametrize("key", [True, 1.5, None, (1,), b"a"], ids=repr)
def test_other_keys_of_lists_are_not_saved(key, tmp_path):
    rb = ReplayBuffer(storage=ListStorage(4))
    rb.add({"a": {key: torch.zeros(1)}})
    with pytest.raises(
        TypeError, match=r"item 0\['a'\]: expected keys that are strings, tuples of strings or ints, got"
    ):
        rb.dumps(tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


def test_a_tensordict_in_a_damaged_list_has_no_ints():
    state = pack([TensorDict({"a": torch.zeros(1)}, [])])
    state["forms"][0]["tree"] = state["forms"][0]["tree"].replace('"a"', "1")
    with pytest.raises(ValueError, match="expected keys, each once"):
        unpack(state, None, "items")
