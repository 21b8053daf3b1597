"""Dumps of TorchRL's ``ReplayBufferEnsemble``."""

import collections
import json
import shutil
import warnings

import pytest
import torch
from tensordict import TensorDict

from engram import (
    CompressedListStorage,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.torchrl.dumps import EmptyMember, read, read_ensemble
from tests.torchrl import make_golden
from tests.torchrl.make_golden import TENSORS, rows
from tests.torchrl.torchrl_dumps import edit, faults, make_priorities, put, snapshot, watched


def quietly(call, *arguments, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not read, and lost")
        return call(*arguments, **options)


def members(*, storage=LazyTensorStorage, third=ListStorage, sizes=(5, 4, 4)):
    return [
        TensorDictReplayBuffer(storage=storage(sizes[0]), sampler=SamplerWithoutReplacement()),
        TensorDictReplayBuffer(storage=storage(sizes[1]), sampler=SliceSampler(slice_len=2, end_key=("next", "done"))),
        ReplayBuffer(storage=third(sizes[2]), collate_fn=list),
    ]


def ensemble(*given, **options):
    return ReplayBufferEnsemble(*(given or members()), collate_fn=list, **options)


@pytest.fixture
def dump(golden, tmp_path):
    return shutil.copytree(golden / "ensemble", tmp_path / "dump")


def numbers(rb):
    """Of the rows, oldest first."""
    order = rb.storage.tickets_of(torch.arange(len(rb))).argsort()
    return rb[:]["number"][order].tolist()


def check(rb):
    """That it holds what :func:`make_golden.ensemble` wrote."""
    ring, nothing, items = (rb[i] for i in range(3))
    assert numbers(ring) == [2, 3, 4, 5, 6]
    assert torch.equal(ring[:]["next", "obs"], ring[:]["obs"] + 1)
    assert len(nothing) == 0
    assert all(map(torch.equal, [items.storage[i] for i in range(3)], TENSORS))
    assert [member.write_count for member in (ring, nothing, items)] == [7, 0, 3]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_members_hold_what_they_held(dump, storage):
    rb = ensemble(*members(storage=storage))
    before = snapshot(dump)
    with watched() as events:
        quietly(rb.loads, dump)
    assert [fault for fault in faults(events) if str(dump) in fault or "pickle" in fault] == []
    assert snapshot(dump) == before
    check(rb)
    rb[0].extend(rows(7, 2))
    assert numbers(rb[0]) == [4, 5, 6, 7, 8]
    rb[1].extend(rows(0, 3))
    assert numbers(rb[1]) == [0, 1, 2]
    assert sum(map(len, rb.sample(6))) == 6


def test_what_was_here_goes(dump):
    rb = ensemble()
    rb[0].extend(rows(100, 9))
    rb[1].extend(rows(100, 3))
    rb[2].extend([torch.zeros(1)] * 4)
    before = rb[1].storage.tickets_of(torch.arange(3))
    quietly(rb.loads, dump)
    check(rb)
    rb[1].extend(rows(0, 3))
    assert int(rb[1].storage.tickets_of(torch.arange(3)).min()) > int(before.max())


def test_an_empty_list(torchrl, tmp_path):
    there = [torchrl.ReplayBuffer(storage=torchrl.CompressedListStorage(4), collate_fn=list) for _ in range(2)]
    there[0].add(torch.ones(2))
    torchrl.ReplayBufferEnsemble(*there, batch_size=2, collate_fn=list).dumps(tmp_path / "dump")
    here = [ReplayBuffer(storage=ListStorage(4), collate_fn=list) for _ in range(2)]
    here[1].extend([torch.zeros(3)] * 3)
    quietly(ensemble(*here).loads, tmp_path / "dump")
    assert list(map(len, here)) == [1, 0]
    assert here[1].write_count == 0
    here[1].add(torch.ones(1))
    assert here[1].storage[0].tolist() == [1.0]


def test_all_members_are_empty(torchrl, tmp_path):
    there = [torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(4)) for _ in range(2)]
    torchrl.ReplayBufferEnsemble(*there, batch_size=2).dumps(tmp_path / "dump")
    here = [TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2)]
    here[0].extend(rows(0, 3))
    quietly(ensemble(*here).loads, tmp_path / "dump")
    assert list(map(len, here)) == [0, 0]


def test_generators_and_the_batch_size(dump):
    generator = torch.Generator().manual_seed(1)
    rb = ensemble(generator=generator)
    quietly(rb.loads, dump)
    assert rb.batch_size == 6
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())
    rb = ensemble(batch_size=3)
    quietly(rb.loads, dump)
    assert rb.batch_size == 3


def test_priorities(dump):
    make_priorities(dump / "x", [4.0, 0.0, 1.0, 0.0, 0.0], alpha=0.5, beta=0.25, largest=(16.0, 0.0))
    make_priorities(dump / "y", [0.0] * 4, alpha=0.3, beta=0.2, largest=(None, None))
    for name, member in (("x", "0"), ("y", "1")):
        shutil.rmtree(dump / "sampler" / member, ignore_errors=True)
        (dump / name / "sampler").rename(dump / "sampler" / member)
    given = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=PrioritizedSampler(size, alpha=0.9, beta=0.9))
        for size in (5, 4)
    ]
    rb = ensemble(*given, members()[2])
    given[1].extend(rows(0, 3))
    quietly(rb.loads, dump)
    assert [(one.sampler.alpha, one.sampler.beta) for one in given] == [(0.5, 0.25), (0.3, 0.2)]
    index = given[0].sample(500)["index"]
    counts = torch.bincount(index, minlength=5)
    assert counts[1] == counts[3] == counts[4] == 0
    assert counts[0] > 2 * counts[2] > 0
    given[1].extend(rows(0, 2))
    assert set(given[1].sample(100)["index"].tolist()) == {0, 1}


def test_what_is_lost_is_named_once(dump):
    with pytest.warns(UserWarning, match="not read, and lost") as caught:
        ensemble().loads(dump)
    assert len(caught) == 1
    said = str(caught[0].message)
    for name in ("prefetch.pkl", "storage/0_transform.pt (state of a member's transforms", "storage/2_transform.pt"):
        assert name in said


def test_states_of_samplers_that_are_not_read_are_named_by_member(dump):
    put(dump / "sampler" / "1" / "streaming_slice.pt", b"x")
    shutil.rmtree(dump / "sampler" / "0")
    put(dump / "sampler" / "0" / "meta.json", {"consumer_version": {"dtype": "torch.int64", "shape": []}})
    with pytest.warns(
        UserWarning, match=r"sampler's state in sampler/0 \(consumer_version\).*sampler/1/streaming_slice.pt"
    ):
        read_ensemble(dump, [1, 1, 1])


def test_transforms_of_members_stay(dump):
    given = members()
    given[0].append_transform(lambda batch: batch.set("twice", batch["obs"] * 2))
    rb = ensemble(*given)
    quietly(rb.loads, dump)
    batch = rb[0].sample(3)
    assert torch.equal(batch["twice"], batch["obs"] * 2)


def test_columns(torchrl, tmp_path):
    there = [
        torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(8, ndim=2)),
        torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(4)),
    ]
    there[0].extend(TensorDict({"obs": torch.arange(6).view(2, 3)}, [2, 3]))
    there[1].extend(TensorDict({"obs": torch.arange(3)}, [3]))
    torchrl.ReplayBufferEnsemble(*there, batch_size=2).dumps(tmp_path / "dump")
    here = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(8, ndim=2)),
        TensorDictReplayBuffer(storage=LazyTensorStorage(4)),
    ]
    quietly(ensemble(*here).loads, tmp_path / "dump")
    assert torch.equal(here[0][:]["obs"], torch.arange(6).view(2, 3))
    assert here[1][:]["obs"].tolist() == [0, 1, 2]


def test_dumps_without_a_list_of_empty_members(dump):
    """Older versions could not save such."""
    (dump / "storage" / "metadata.json").unlink()
    (dump / "storage" / "2").rename(dump / "storage" / "1")
    for part in ("sampler", "writer"):
        shutil.rmtree(dump / part / "1", ignore_errors=True)
    (dump / "writer" / "2").rename(dump / "writer" / "1")
    given = members()
    quietly(ensemble(given[0], given[2]).loads, dump)
    assert [len(given[0]), len(given[2])] == [5, 3]


def test_as_it_is_read(dump):
    found = quietly(read_ensemble, dump, [1, 1, 1])
    assert [type(member).__name__ for member in found.members] == ["TorchRLDump", "EmptyMember", "TorchRLItems"]
    assert (found.members[0].length, found.members[0].position) == (5, 7)
    assert isinstance(found.members[1], EmptyMember)
    assert found.batch_size == 6


# ---- what is refused -------------------------------------------------------------------------------------------------------


def test_one_buffer_and_several(dump, golden):
    with pytest.raises(IncompatibleCheckpoint, match="got those of an ensemble.*ReplayBufferEnsemble"):
        ReplayBuffer(storage=LazyTensorStorage(5)).loads(dump)
    with pytest.raises(IncompatibleCheckpoint, match=r"got those of one buffer.*ensemble\[i\].loads"):
        ensemble().loads(golden / "tensors")
    with pytest.raises(IncompatibleCheckpoint, match="expected 2 members, as here, got an ensemble of 3"):
        ensemble(*members()[:2]).loads(dump)
    with pytest.raises(IncompatibleCheckpoint, match="cannot be converted"):
        ensemble().loads(dump, convert=True)


def test_an_ensemble_in_an_ensemble(dump):
    shutil.rmtree(dump / "storage" / "0")
    put(dump / "storage" / "0" / "metadata.json", {"empty_members": [0, 1]})
    with pytest.raises(IncompatibleCheckpoint, match=r"storage/0: .*an ensemble in an ensemble"):
        read_ensemble(dump, [1, 1, 1])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"sizes": (6, 4, 4)}, "capacity"),
        ({"sizes": (5, 4, 2)}, "at most 2 items"),
        ({"third": LazyTensorStorage}, "got the items of a list"),
        ({"storage": ListStorage}, "LazyTensorStorage or a LazyMemmapStorage"),
    ],
)
def test_members_of_another_kind(dump, given, match):
    """Nothing has changed, not even of the members before."""
    rb = ensemble(*members(**given))
    if "storage" not in given:
        rb[0].extend(rows(50, 2))
    with pytest.raises(IncompatibleCheckpoint, match=match) as caught:
        quietly(rb.loads, dump)
    assert "member" in caught.value.__notes__[0]
    assert [len(rb[i]) for i in range(3)] == [0 if "storage" in given else 2, 0, 0]


def removed(name):
    def change(path):
        target = path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return change


def link(name):
    def change(path):
        (path / name).rename(path / "moved")
        (path / name).symlink_to(path / "moved")

    return change


NAMES, EMPTYS = "storage/metadata.json", "sampler/1/sampler_metadata.json"
Damage = collections.namedtuple("Damage", ["change", "file", "kind"], defaults=[CorruptCheckpoint])
DAMAGE = {
    "a member missing": Damage(removed("storage/0"), NAMES),
    "the last member missing": Damage(removed("storage/2"), NAMES, IncompatibleCheckpoint),
    "a member more": Damage(lambda path: (path / "storage/3").mkdir(), NAMES, IncompatibleCheckpoint),
    "a member far away": Damage(lambda path: (path / "storage/300").mkdir(), NAMES),
    "an empty member that is there": Damage(edit(NAMES, empty_members=[0, 1]), NAMES),
    "no empty members": Damage(edit(NAMES, empty_members=[]), NAMES),
    "empty twice": Damage(edit(NAMES, empty_members=[1, 1]), NAMES),
    "empty without a list": Damage(edit(NAMES, empty_members=None), NAMES),
    "empty members of texts": Damage(edit(NAMES, empty_members=["../1"]), NAMES),
    "empty and negative": Damage(edit(NAMES, empty_members=[-1]), NAMES),
    "empty and huge": Damage(edit(NAMES, empty_members=[1, 1 << 57]), NAMES),
    "empty beyond int64": Damage(edit(NAMES, empty_members=[1, 1 << 70]), NAMES),
    "names no JSON": Damage(lambda path: put(path / NAMES, b"{"), NAMES),
    "names a link": Damage(link(NAMES), NAMES),
    "a member a link": Damage(link("storage/0"), "storage/0"),
    "a member a file": Damage(lambda path: [removed("storage/0")(path), put(path / "storage/0", b"")], "storage/0"),
    "rows shorter": Damage(lambda path: put(path / "storage/0/obs.memmap", b"123"), "storage/0/obs.memmap"),
    "a row more than there is room": Damage(edit("storage/0/storage_metadata.json", len=6), "storage/0/storage_metadata.json"),
    "a cursor": Damage(edit("writer/0/metadata.json", cursor=5), "writer/0/metadata.json"),
    "a cursor of the list": Damage(edit("writer/2/metadata.json", cursor=4), "writer/2/metadata.json"),
    "an item": Damage(lambda path: put(path / "storage/2/compressed_data/1/data.memmap", b"1"), "storage/2/compressed_data/1/data.memmap"),
    "a sampler": Damage(removed("sampler/0/drop_last.memmap"), "sampler/0/drop_last.memmap"),
    "the sampler of an empty one": Damage(lambda path: put(path / EMPTYS, {}), EMPTYS),
    "the generator": Damage(removed("rng_state/rng_state.memmap"), "rng_state/rng_state.memmap"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(dump, name):
    change, file, kind = DAMAGE[name]
    quietly(ensemble().loads, dump)
    change(dump)
    before = snapshot(dump)
    rb = ensemble()
    rb[0].extend(rows(50, 2))
    rb[2].add(torch.ones(1))
    with pytest.raises(kind) as caught:
        quietly(rb.loads, dump)
    assert file in str(caught.value)
    assert snapshot(dump) == before
    assert [len(rb[i]) for i in range(3)] == [2, 0, 1]


# ---- by TorchRL, here and now ------------------------------------------------------------------------------------------------


def test_torchrl_writes_what_is_committed(torchrl, tmp_path, golden):
    """Names and descriptions of files."""
    make_golden.ensemble(torchrl, tmp_path / "ensemble")

    def said(path):
        return {
            str(one.relative_to(path)): json.loads(one.read_text()) if one.suffix == ".json" else None
            for one in path.rglob("*")
            if one.is_file()
        }

    assert said(tmp_path / "ensemble") == said(golden / "ensemble")
    rb = ensemble()
    quietly(rb.loads, tmp_path / "ensemble")
    check(rb)


def test_torchrl_without_an_empty_member(torchrl, tmp_path):
    make_golden.ensemble(torchrl, tmp_path / "dump", empty=False)
    given = members(third=lambda size: CompressedListStorage(size, compression_fn=as_bytes, decompression_fn=of_bytes))
    with pytest.raises(IncompatibleCheckpoint, match="decompression_fn"):
        quietly(ensemble(given[0], given[2]).loads, tmp_path / "dump")
    given = members()
    quietly(ensemble(given[0], given[2]).loads, tmp_path / "dump")
    assert [len(given[0]), len(given[2])] == [5, 3]
    with pytest.raises(IncompatibleCheckpoint, match="ensemble"):
        read(tmp_path / "dump")


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def of_bytes(data, said):
    return data.view(said["dtype"]).view(said["shape"])


def test_members_behind_each_other_share_what_there_is(dump):
    """``max_bytes`` is of all of them."""
    size = quietly(read_ensemble, dump, [1, 1, 1]).members[0].nbytes
    with pytest.raises(IncompatibleCheckpoint, match="Raise max_bytes"):
        quietly(read_ensemble, dump, [1, 1, 1], max_bytes=size - 1)
