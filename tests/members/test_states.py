"""Ensembles saved, loaded, copied and handed to processes."""

import copy
import pickle
import shutil

import pytest
import torch
from tensordict import TensorDict

from engram import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    VecNorm,
    WriterEnsemble,
)
from engram._support.state import Change
from tests.fresh import run
from tests.members.buffers import member, members, rows, storages

SAMPLERS = [RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(100, 1.0, 0.5)]


def made(n=20, seed=0, storage=LazyTensorStorage, **arguments):
    some = [member(i, n, sampler=sampler(), storage=storage, tracks=True) for i, sampler in enumerate(SAMPLERS)]
    generator = torch.Generator().manual_seed(seed)
    return ReplayBufferEnsemble(*some, generator=generator, batch_size=12, routing_key="to", p=[1, 2, 3], **arguments)


def drawn(rb, n=4):
    """Batches without their generations: rows that were loaded have others."""
    keys = "a", ("index", "index"), ("index", "buffer_ids"), "priority_weight"
    batches = [rb.sample() for _ in range(n)]
    return [{key: batch[key].tolist() for key in keys if key in batch.keys(True)} for batch in batches]


def taken_over(how, rb, other, folder):
    if how == "state":
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(folder / "saved")
        other.loads(folder / "saved")


@pytest.mark.parametrize("how", ["state", "folder"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("storage", ["RAM", "directory", "list"])
def test_what_is_loaded_goes_on_as_it_would_have(tmp_path, how, prefetch, storage):
    kind = storages(tmp_path)[storage]
    rb, other = made(storage=kind, prefetch=prefetch), made(0, 7, storage=kind, prefetch=prefetch)
    rb.sample()
    taken_over(how, rb, other, tmp_path)
    assert [len(one) for one in other._rbs] == [20] * 3
    assert drawn(rb) == drawn(other)
    rb.close()
    other.close()


def test_a_dump_replaces_one_and_its_members_load_by_themselves(tmp_path):
    rb = made()
    rb.dumps(str(tmp_path / "saved"))
    rb.empty()
    for number, one in enumerate(rb._rbs):
        one.extend(rows(number, 3))
    rb.dumps(tmp_path / "saved", prefetch="drop")
    alone = member(1, 0, sampler=SamplerWithoutReplacement(), tracks=True)
    alone.loads(tmp_path / "saved" / "members" / "1")
    assert alone[:]["a"].tolist() == [1000, 1001, 1002]
    with pytest.raises(ValueError, match="prefetch"):
        rb.dumps(tmp_path / "saved", prefetch="x")


def test_transforms_of_the_ensemble_are_saved(tmp_path):
    def one():
        norm = VecNorm(in_keys=["x"], decay=0.5)
        return ReplayBufferEnsemble(*members(0, 0), transform=norm, routing_key="to")

    rb, other = one(), one()
    rb.extend(rows(0, 8, to=torch.arange(8) % 2))
    for how in ("state", "folder"):
        taken_over(how, rb, other, tmp_path)
        for name, value in rb.transform.state_dict()["0"].items():
            assert str(other.transform.state_dict()["0"][name]) == str(value)


def test_what_does_not_fit_changes_nothing(tmp_path):
    rb = made()
    rb.dumps(tmp_path / "saved")
    state = rb.state_dict()
    fewer = ReplayBufferEnsemble(*members(3, 3))
    with pytest.raises(IncompatibleCheckpoint, match="2 members"):
        fewer.loads(tmp_path / "saved")
    with pytest.raises(KeyError):
        fewer.load_state_dict(state)
    others = [member(i, 3, sampler=sampler(), tracks=True) for i, sampler in enumerate(SAMPLERS[:2])]
    larger = ReplayBufferEnsemble(*others, member(2, 3, tracks=True))
    for load in (lambda: larger.load_state_dict(state), lambda: larger.loads(tmp_path / "saved")):
        with pytest.raises((IncompatibleCheckpoint, KeyError)):
            load()
        assert [len(one) for one in larger._rbs] == [3, 3, 3]
    for name in ("_storage", "_members", "_rng", "_batch_size"):
        broken = {**state, name: "x"}
        with pytest.raises((TypeError, ValueError, KeyError)):
            made().load_state_dict(broken)
    with pytest.raises(IncompatibleCheckpoint):
        rb.loads(tmp_path / "saved" / "members" / "0" / "storage")


def test_a_damaged_member_is_found_before_anything_changes(tmp_path):
    rb, other = made(), made(3)
    rb.dumps(tmp_path / "saved")
    rows_of_last = max(
        (tmp_path / "saved" / "members" / "2" / "storage").rglob("*.memmap"), key=lambda path: path.stat().st_size
    )
    raw = bytearray(rows_of_last.read_bytes())
    raw[3] ^= 1
    rows_of_last.write_bytes(raw)
    with pytest.raises(CorruptCheckpoint):
        other.loads(tmp_path / "saved")
    assert [len(one) for one in other._rbs] == [3] * 3
    shutil.rmtree(tmp_path / "saved" / "members" / "1")
    with pytest.raises(CorruptCheckpoint):
        other.loads(tmp_path / "saved")
    assert [len(one) for one in other._rbs] == [3] * 3


def test_other_folders_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    rb = made()
    with pytest.raises(FileExistsError):
        rb.dumps(tmp_path / "other")
    with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint)):
        rb.loads(tmp_path / "other")
    rb[0].dumps(tmp_path / "alone")
    with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint)):
        rb.loads(tmp_path / "alone")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_copies_go_on_the_same_way(copied, prefetch):
    rb = made(prefetch=prefetch)
    other = copied(rb)
    if copied is not copy.copy:  # whose members are the same buffers
        assert drawn(rb) == drawn(other)
        other[0].empty()
        assert len(rb[0]) == 20
    assert other.routing_key == ("to",)
    assert torch.equal(other.sampler.p, rb.sampler.p)
    rb.close()


@pytest.mark.parametrize("parts", [None, 1, 3, 5])
def test_some_members_of_a_copy_draw_as_many_parts(parts):
    rb = ReplayBufferEnsemble(*members(5, 5, 5), num_buffer_sampled=parts)
    other = pickle.loads(pickle.dumps(rb))
    for one in (rb, other):
        assert one.sampler.num_buffer_sampled == (parts or 3)
        assert one[:2].sampler.num_buffer_sampled == (parts or 2)


def test_a_shared_ensemble_is_one_in_all_processes():
    rb = ReplayBufferEnsemble(*members(5, 5, tracks=True), routing_key="to", shared=True)
    assert rb.shared
    raw = pickle.dumps(rb)
    said = run(
        f"""
        import pickle
        import torch
        rb = pickle.loads(bytes.fromhex({raw.hex()!r}))
        batch = rb.sample(8)
        assert torch.equal(batch["a"], 1000 * batch["index", "buffer_ids"] + batch["index", "index"])
        new = batch[0, :2].exclude("index", "index_generation")
        rb[1].extend(new.set("a", torch.tensor([1005, 1006])))
        print(len(rb[1]))
        rb.close()
        """
    )
    assert said.split() == ["7"]
    assert rb[1][:]["a"].tolist() == [1000 + i for i in range(7)]
    rb.close()


def test_members_are_made_of_components():
    storages = StorageEnsemble(ListStorage(10), ListStorage(10), transforms=[None, lambda x: x * 2])
    samplers = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
    rb = ReplayBufferEnsemble(
        storages=storages,
        samplers=samplers,
        writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
        collate_fns=[torch.stack, lambda items: torch.stack(items) + 1],
    )
    for one in rb._rbs:
        one.extend(torch.full((5,), 3))
    assert rb.sample(4).tolist() == [[3, 3], [8, 8]]
    index, _ = samplers.sample(storages, 4)
    assert index["buffer_ids"].tolist() == [0, 1]
    assert len(storages) == len(samplers) == 2


def test_components_are_saved_by_themselves(tmp_path):
    rb, other = made(), made(0)
    for name in ("storage", "sampler", "writer"):
        getattr(rb, name).dumps(tmp_path / name)
        getattr(other, name).loads(tmp_path / name)
    assert [one[:]["a"].tolist() for one in other._rbs] == [one[:]["a"].tolist() for one in rb._rbs]
    for name in ("storage", "sampler", "writer"):
        getattr(other, name).load_state_dict(getattr(rb, name).state_dict())
    assert rb.writer.write_count == other.writer.write_count == 60


def test_storages_read_what_samplers_name():
    rb = ReplayBufferEnsemble(*members(5, 6))
    index, _ = rb.sampler.sample(rb.storage, 4)
    read = rb.storage.get(index)
    assert [number for number, _ in read] == index["buffer_ids"].tolist()
    for (number, data), wanted in zip(read, index["index"], strict=True):
        assert torch.equal(data["a"], 1000 * number + wanted)
    assert rb.storage[1] is rb[1].storage
    assert rb.storage[1, 2]["a"] == 1002
    assert [data["a"].item() for data in rb.storage[:, 2]] == [2, 1002]
    assert len(rb.storage[[1]]) == 1
    assert isinstance(rb.storage[:1], StorageEnsemble)


def test_generations_of_rows_of_members():
    rb = ReplayBufferEnsemble(*members(5, 5, tracks=True))
    batch = rb.sample(4)
    assert torch.equal(rb.writer.generations_of(batch["index"]), batch["index_generation"])


def test_the_default_generator_is_loaded_where_that_is_asked_for():
    rb = ReplayBufferEnsemble(*members(5, 5))
    state = rb.state_dict()
    torch.manual_seed(3)
    first = rb.sample(8)["a"].tolist()
    rb.load_state_dict(state)
    torch.manual_seed(3)
    assert rb.sample(8)["a"].tolist() == first
    rb.load_state_dict(state, default_rng=True)
    assert torch.equal(torch.get_rng_state(), state["_default_rng"])


def test_lists_of_objects():
    some = []
    for number in range(2):
        some.append(ReplayBuffer(storage=ListStorage(5), collate_fn=list))
        some[-1].extend([f"{number}-{i}" for i in range(5)])
    rb = ReplayBufferEnsemble(*some, collate_fn=lambda parts: parts, sample_from_all=True)
    batch, info = rb.sample(6, return_info=True)
    assert [[item[0] for item in part] for part in batch] == [["0"] * 3, ["1"] * 3]
    assert isinstance(info, TensorDict)


@pytest.mark.parametrize("how", ["state", "folder"])
def test_a_load_that_fails_late_says_which_members_hold_what(tmp_path, monkeypatch, how):
    rb, other = made(), made(0, 7)

    def fail():
        raise OSError("no space left")

    for call in ("prepare_state", "prepare_load"):
        monkeypatch.setattr(other[1]._saving, call, lambda *_, **__: Change(fail))
    with pytest.raises(OSError, match="no space left") as raised:
        taken_over(how, rb, other, tmp_path)
    assert "Members before it are loaded, those behind it are as they were." in raised.value.__notes__[-1]
    assert raised.value.__notes__[-1].startswith("Raised by member 1 of the ensemble.")
    assert [len(one) for one in other._rbs] == [20, 0, 0]
