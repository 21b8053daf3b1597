"""Small fields that lie together in one file: what a buffer gives does not depend on it. The oracle is a store without groups."""

import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    Checkpointer,
    CorruptStore,
    FrameStack,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from engram.format import schema
from engram.saved import rows, snapshot
from engram.saved.inspection import verify
from engram.store import opening
from tests import stress

ROWS = 60
DTYPES = [getattr(torch, name) for name in schema.DTYPES]


@pytest.fixture
def disk():
    """A folder beside the tests: where temporary files are memory, stores have no files to read."""
    made = Path(tempfile.mkdtemp(dir=Path(__file__).parents[2]))
    yield made
    shutil.rmtree(made)


def steps(n, seed=0):
    torch.manual_seed(seed)
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[6::7] = True
    return TensorDict(
        {
            "obs": torch.randn(n, 5),
            "frame": torch.randint(0, 255, (n, 3, 20, 20), dtype=torch.uint8),
            "nothing": torch.zeros(n, 0),
            "id": torch.arange(n, dtype=torch.int64),
            "half": torch.randn(n, 3).to(torch.bfloat16),
            "next": {"reward": torch.randn(n, 1), "done": done, "wide": torch.randn(n, dtype=torch.float64)},
        },
        [n],
    )


def buffer(folder, grouped, n=0, capacity=ROWS, batch_size=32, **options):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(capacity, scratch_dir=folder, group_small_fields=grouped, **options),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(3),
    )
    if n:
        rb.extend(steps(n))
    return rb


def same(a, b):
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict | TensorDict):
        return set(a.keys()) == set(b.keys()) and all(same(a[key], b[key]) for key in a.keys())
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def raw(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- the same rows -------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw):
    """Fields, sizes, and what is done to a store."""
    shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    fields = draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=6))
    lanes = draw(st.sampled_from([1, 1, 3]))
    capacity = lanes * draw(st.integers(1, 12))
    write = st.tuples(st.just("extend"), st.integers(1, 2 * capacity), st.integers(0, lanes - 1))
    edit = st.tuples(st.just("edit"), st.integers(0, len(fields) - 1), st.integers(1, 5))
    number = st.tuples(st.just("number"), st.integers(0, capacity - 1), st.just(0))
    done = draw(st.lists(write | edit | number | st.tuples(st.just("read"), st.just(0), st.just(0)), max_size=8))
    return fields, capacity, lanes, draw(st.sampled_from([1, 8, 24, 1000])), [("extend", 1, 0), *done]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@settings(max_examples=stress.size(25, 3_000), suppress_health_check=list(HealthCheck), deadline=None)
@given(programs(), st.sampled_from(["map", "read"]), st.integers(0, 2**32 - 1))
def test_any_fields_and_writes(program, io, seed):
    fields, capacity, lanes, grouped, done = program
    folder = Path(tempfile.mkdtemp(dir=Path(__file__).parents[2]))
    try:
        of_both = {"capacity": capacity, "lanes": lanes, "batch_size": None}
        pair = [buffer(folder / "plain", 0, **of_both), buffer(folder / "grouped", grouped, io=io, **of_both)]
        chance = np.random.default_rng(seed)

        def values(n, which=None):
            some = {}
            for i, (dtype, shape) in enumerate(fields):
                nbytes = n * int(np.prod(shape, dtype=int)) * dtype.itemsize
                drawn = torch.from_numpy(chance.integers(0, 2 if dtype is torch.bool else 256, nbytes, np.uint8))
                if which in (None, i):
                    some[str(i)] = drawn.view(dtype).view(n, *shape) if nbytes else torch.zeros(n, *shape, dtype=dtype)
            return some

        for what, at, n in done:
            if what == "extend":
                data = values(at)
                for rb in pair:
                    rb.extend(data, lane=n)
            elif what == "number":
                data = values(1)
                for rb in pair:
                    rb.storage.set(torch.tensor([at]), data)
            elif what == "edit":
                rows, again = (rb.sample(n, return_info=True)[1]["index"] for rb in pair)
                assert torch.equal(rows, again)
                data = values(n, at)[str(at)]
                for rb in pair:
                    rb.set_at_(str(at), data, rows)
            else:
                assert same(pair[0].sample(20), pair[1].sample(20))
        assert same(pair[0][:], pair[1][:])
        pair[1].close()
        pair[1] = ReplayBuffer.open(folder / "grouped")
        assert same(pair[0][:], pair[1][:])
        for rb in pair:
            rb.close()
    finally:
        shutil.rmtree(folder)


SAMPLERS = {
    "uniform": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(ROWS, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=4, end_key=("next", "done")),
    "slices by id": lambda: SliceSampler(slice_len=2, traj_key="lap"),
    "prioritized slices": lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.5, slice_len=4, end_key=("next", "done")),
    "n steps": lambda: NStep(FrameStack(RandomSampler(), 4, -3, ["frame"]), 3, 0.9),
}


def seen(folder, sampler, grouped, **options):
    """All that a program with a fixed seed sees."""
    storage = LazyMemmapStorage(ROWS, scratch_dir=folder, group_small_fields=grouped, **options)
    generator = torch.Generator().manual_seed(3)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=16, generator=generator)
    found = []
    for start in range(0, 2 * ROWS, 20):
        data = steps(20, seed=start)
        data["lap"] = (torch.arange(start, start + 20) // 5)[:, None]
        rb.extend(data)
        batch, info = rb.sample(return_info=True)
        if "prioritized" in sampler:
            rb.update_priority(info["index"], torch.rand(16, generator=generator))
        found += [batch, {"index": info["index"]}]
    rb[torch.tensor([3, 4, 50])] = data[7:10]
    found += [rb.sample(), rb[:], rb[torch.arange(0, ROWS, 7)], rb[11]]
    rb.close()
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_any_sampler(disk, sampler):
    plain = seen(disk / "plain", sampler, 0)
    for io in ("map", "read"):
        together = seen(disk / io, sampler, 64, io=io)
        assert len(plain) == len(together)
        assert all(map(same, plain, together))


# ---- files ---------------------------------------------------------------------------------------------------------------


def test_the_file_is_an_array_of_records(tmp_path):
    rb = buffer(tmp_path / "store", 64, 40)
    expected = rb[:]
    rb.close()
    assert sorted(path.name for path in (tmp_path / "store").rglob("*.memmap")) == ["frame.memmap"]
    described = json.loads((tmp_path / "store" / ".engram" / "store.json").read_text())
    assert (described["version"], described["grouped"]) == ([2, 4], 64)
    names = ["id", "wide", "obs", "reward", "half", "done"]  # wide dtypes first, then as the rows name them
    formats = ["<i8", "<f8", ("<f4", 5), "<f4", ("<u2", 3), "?"]
    offsets = [0, 8, 16, 36, 40, 46]
    record = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": 48})
    found = np.memmap(tmp_path / "store" / ".engram" / "grouped", record, "r")
    assert found.shape == (ROWS,)
    for name in names:
        key = name if name in expected.keys() else ("next", name)
        assert found[name][:40].tobytes() == raw(expected[key])
    read = TensorDict.load_memmap(tmp_path / "store")
    assert set(read.keys()) == {"frame", "nothing"}
    assert torch.equal(read["frame"][:40], expected["frame"])


def test_a_store_with_fewer_than_two_small_fields_is_an_ordinary_one(tmp_path):
    found = []
    for grouped in (0, 15):
        rb = ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=tmp_path / str(grouped), group_small_fields=grouped))
        rb.extend({"a": torch.arange(9), "b": torch.zeros(9, 2, dtype=torch.int64)})
        rb.close()
        folder = tmp_path / str(grouped)
        files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        same_bytes = [
            name for name in files if name.name in ("store.json", "a.memmap", "b.memmap", "meta.json", "tickets")
        ]
        found.append((sorted(files), [files[name].read_bytes() for name in sorted(same_bytes)]))
    assert found[0] == found[1]


def test_other_versions_refuse_it_by_name(tmp_path):
    buffer(tmp_path, 64, 4).close()
    text = (tmp_path / ".engram" / "store.json").read_bytes()
    with pytest.raises(IncompatibleStore, match=r"expected format 2\.0, got 2\.4\. A newer engram wrote it"):
        schema.decode(text, "store.json")  # what version 2.0 reads
    for wrong in (
        text.replace(b"[2,4]", b"[2,0]"),
        text.replace(b"[2,4]", b"[2,1]").replace(b',"grouped":64', b""),
        text.replace(b":64}", b":-1}"),
    ):
        assert wrong != text
        with pytest.raises(CorruptStore, match="grouped"):
            schema.decode_store(wrong, "store.json")
    with pytest.raises(CorruptStore, match=r"version 2\.3 has keys that are ints, got none"):
        schema.decode_store(text.replace(b"[2,4]", b"[2,3]"), "store.json")
    with pytest.raises(CorruptStore, match=r"ragged ones where its version is 2\.5"):
        schema.decode_store(text.replace(b"[2,4]", b"[2,5]"), "store.json")
    with pytest.raises(IncompatibleStore, match=r"expected format 2\.6, got 2\.7"):
        schema.decode_store(text.replace(b"[2,4]", b"[2,7]"), "store.json")


@pytest.mark.parametrize("wrong", [-1, "64", True, 1.5, None])
def test_what_is_no_size_is_refused_before_anything_is_made(tmp_path, wrong):
    with pytest.raises((TypeError, ValueError), match=r"LazyMemmapStorage: group_small_fields: expected"):
        LazyMemmapStorage(9, scratch_dir=tmp_path / "store", group_small_fields=wrong)
    with pytest.raises((TypeError, ValueError), match=r"open_or_create: group_small_fields: expected"):
        ReplayBuffer.open_or_create(tmp_path / "store", 9, group_small_fields=wrong)
    assert os.listdir(tmp_path) == []


def test_a_file_that_was_cut_is_named(disk):
    rb = buffer(disk / "store", 64, 40, io="read")
    os.truncate(disk / "store" / ".engram" / "grouped", 48)
    for call in (
        rb.sample,
        lambda: rb.extend(steps(40)),
        lambda: rb.set_at_("id", torch.zeros(1, dtype=torch.int64), [3]),
    ):
        with pytest.raises(OSError, match=r"at byte \d+.*file ends there") as caught:
            call()
        assert caught.value.filename == str(disk / "store" / ".engram" / "grouped")
    assert os.path.getsize(disk / "store" / ".engram" / "grouped") == 48
    rb.close()
    with pytest.raises(CorruptStore, match=r"\.engram/grouped: expected 2880 bytes, got 48"):
        ReplayBuffer.open(disk / "store")
    assert [str(problem.path) for problem in verify(disk / "store").problems] == [
        str(disk / "store" / ".engram" / "grouped")
    ]


def test_all_files_go(tmp_path):
    rb = buffer(tmp_path / "store", 64, 4)
    assert rb.storage.cleanup()
    assert os.listdir(tmp_path) == []
    (tmp_path / "store").mkdir()
    mine = tmp_path / "store" / "obs.memmap"
    mine.write_text("of the user")
    rb = buffer(tmp_path / "store", 64, 4)
    assert rb.storage.cleanup()
    assert mine.read_text() == "of the user"


@pytest.mark.parametrize(("first", "second"), [(0, 64), (64, 0)])
def test_one_kind_replaces_the_other(tmp_path, first, second):
    buffer(tmp_path, first, 4).close()
    rb = buffer(tmp_path, second, 9, existsok=True)
    assert same(rb[:], steps(9))
    rb.close()
    assert (tmp_path / "obs.memmap").exists() == (tmp_path / "next").exists() == (second == 0)
    assert same(ReplayBuffer.open(tmp_path)[:], steps(9))


# ---- other processes, copies, views ----------------------------------------------------------------------------------------


def test_copies_reopening_and_reading_alone(disk):
    rb = buffer(disk / "store", 64, 40)
    copied = pickle.loads(pickle.dumps(rb))
    copied.extend(steps(3, seed=5))
    readonly = ReplayBuffer.open(disk / "store", readonly=True)
    assert len(rb) == len(readonly) == 43
    assert same(rb[:], readonly[:])
    readonly[:]["id"].zero_()
    assert same(rb[:], copied[:])
    pid = os.fork()
    if pid == 0:
        try:
            ReplayBuffer.open(disk / "store", io="read").extend(steps(2, seed=6))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert same(rb[[43, 44]], steps(2, seed=6))
    copied.close()
    readonly.close()
    rb.close()
    rb = ReplayBuffer.open_or_create(disk / "store", ROWS)  # as it was made
    assert same(rb[:40], steps(40))
    rb.close()
    rb = ReplayBuffer.open_or_create(disk / "other", ROWS, group_small_fields=64)
    rb.extend(steps(5))
    assert (disk / "other" / ".engram" / "grouped").exists()
    rb.close()


def test_views_show_the_file_and_torch_moves_no_rows(tmp_path):
    rb = buffer(tmp_path, 64, 10)
    view = rb[:]
    rb.set_at_("id", torch.tensor([70]), [3])
    assert view["id"][3] == 70
    view["id"][4] = 71
    assert rb[[4]]["id"].tolist() == [71]
    view["id"].share_memory_()
    view["id"][5] = 72  # of what torch has moved
    assert rb[:]["id"].tolist() == [0, 1, 2, 70, 71, 5, 6, 7, 8, 9]
    rb.set_at_("id", torch.tensor([73]), [6])
    assert rb[:]["id"][6] == 73
    rb.close()


# ---- dumps, checkpoints, loads ---------------------------------------------------------------------------------------------


def files_of(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".memmap", ".bin")
    }


@pytest.mark.parametrize("copied", [True, False])
def test_dumps_and_checkpoints_are_those_of_an_ordinary_store(disk, monkeypatch, copied):
    if not copied:  # as dumps of many rows are
        monkeypatch.setattr("engram.storages.tensor_state._COPIED", 0)
        monkeypatch.setattr(rows, "PIECE", 500)
        monkeypatch.setattr(snapshot, "PIECE", 500)
        monkeypatch.setattr(snapshot, "_OPEN_FILES", 2)
    found = []
    for grouped in (0, 64):
        rb = buffer(disk / str(grouped), grouped, ROWS + 10)
        rb.dumps(disk / f"{grouped}-dump")
        Checkpointer(disk / f"{grouped}-series", rb).save(1)
        found.append((files_of(disk / f"{grouped}-dump"), files_of(next((disk / f"{grouped}-series").glob("ckpt*")))))
        rb.close()
    for plain, together in zip(*found, strict=True):
        assert plain.keys() == together.keys()
        different = [str(name) for name in plain if plain[name] != together[name]]
        assert all("rng" in name or "sums" in name for name in different), different
    assert TensorDict.load_memmap(disk / "64-dump" / "storage")["next", "reward"].shape == (ROWS, 1)


LOADS = {
    "dump": lambda rb, folder: rb.loads(folder / "dump"),
    "conversion": lambda rb, folder: rb.loads(folder / "dump", convert=True),
    "checkpoint": lambda rb, folder: Checkpointer(folder / "series", rb).restore(),
    "state": lambda rb, folder: rb.load_state_dict(torch.load(folder / "state")),
}


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("kind", LOADS)
def test_rows_move_between_both_kinds(disk, monkeypatch, kind, larger):
    """Also past the mapping, as into stores larger than memory."""
    for grouped in (0, 64):
        folder = disk / str(grouped)
        rb = buffer(folder / "store", grouped, ROWS + 10)
        rb.dumps(folder / "dump")
        Checkpointer(folder / "series", rb).save(1)
        torch.save(rb.state_dict(), folder / "state")
        expected = rb[:]
        rb.close()
        with monkeypatch.context() as patch:
            if larger:
                patch.setattr(opening, "available_memory", lambda: 10_000)
                patch.setattr(rows, "PIECE", 500)
                patch.setattr(snapshot, "PIECE", 500)
            for to in (0, 64, None):
                if to is None:
                    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS))
                else:
                    rb = buffer(folder / f"to-{to}", to, 2, ROWS + 5 * (kind == "conversion"))
                LOADS[kind](rb, folder)
                got = rb[:]
                order = [one["id"].argsort() for one in (got, expected)]
                if kind == "conversion":  # which may mark where trajectories end
                    got, wanted = (one.exclude(("next", "done")) for one in (got, expected))
                else:
                    wanted = expected
                assert same(got[order[0]], wanted[order[1]])
                if to is not None:
                    assert (folder / f"to-{to}" / ".engram" / "grouped").exists() == (to == 64)
                    assert bool(rb.stats()["larger_than_memory"]) == larger
                rb.close()


# ---- what it is for ----------------------------------------------------------------------------------------------------------


def test_a_row_is_one_read_and_a_write_is_one_call(disk):
    def calls():
        return int(Path("/proc/self/io").read_text().split("syscr:")[1].split()[0])

    found = []
    for grouped in (0, 64):
        rb = ReplayBuffer(
            storage=LazyMemmapStorage(4_000, scratch_dir=disk / str(grouped), io="read", group_small_fields=grouped)
        )
        rb.extend({str(i): torch.arange(4_000) * i for i in range(8)})
        written, before = rb.stats()["file_writes"], calls()
        batch = rb.sample(300)
        found.append((written, calls() - before))
        assert all(torch.equal(batch[str(i)], batch["1"] * i) for i in range(8))
        rb.close()
    (writes_of_all, reads_of_all), (writes, reads) = found
    assert (writes_of_all, writes) == (8, 1)
    assert 6 * reads < reads_of_all
