"""Stores that are opened for reading alone: nothing changes, and what others write is seen."""

import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    CorruptStore,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReadOnlyStore,
    ReplayBuffer,
    RoundRobinWriter,
    RowError,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    UncleanStore,
)
from engram._support import fork
from tests import stress
from tests.statistics_of import assert_proportional, assert_uniform
from tests.store.processes import Child, context
from tests.store.readers import left_by_the_dead, prioritized, run, steps, whole, without_rights
from tests.store.stores import snapshot

SAMPLERS = [
    RandomSampler,
    SamplerWithoutReplacement,
    lambda: PrioritizedSampler(60, 1.0, 1.0, eps=0.0),
    lambda: PrioritizedSampler(60, 0.5, 0.4, index="other"),
    lambda: SliceSampler(slice_len=3),
    lambda: SliceSamplerWithoutReplacement(slice_len=3),
    lambda: PrioritizedSliceSampler(60, 1.0, 1.0, eps=0.0, slice_len=3),
]


@pytest.fixture
def folder():
    """A place that other users may look into, in RAM."""
    with tempfile.TemporaryDirectory(dir=stress.RAM) as place:
        os.chmod(place, 0o777)
        yield Path(place, "store")


def read_everything(folder):
    """All that a buffer can do with rows without writing them."""
    for sampler in SAMPLERS:
        for prefetch in (0, 2):
            rb = ReplayBuffer.open(folder, readonly=True, sampler=sampler(), batch_size=6, prefetch=prefetch)
            assert whole(rb.sample())
            batch, info = rb.sample(return_info=True)
            assert whole(batch)
            if hasattr(rb.sampler, "alpha"):
                rb.update_priority(info["index"], 2.0)
            assert whole(rb.sample())
            assert rb[7]["step"] == 7
            assert (rb.stats()["size"], len(rb), rb.write_count) == (31, 31, 31)
            assert "read-only" in repr(rb)
            rb.close()
    rb = ReplayBuffer.open(folder, readonly=True, sampler=SamplerWithoutReplacement(), batch_size=6)
    assert sorted(torch.cat([batch["step"] for batch in rb]).tolist()) == list(range(31))
    rb.sampler.state_dict()
    assert len(rb.storage.store.changes().rows) == 31
    for call in writes(rb):
        with pytest.raises(ReadOnlyStore):
            call()


def writes(rb):
    """Calls that would write."""
    words, done = torch.zeros(3, 64, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    rows = {"step": torch.arange(50, 53), "words": words, "next": {"done": done}}
    arrays = {"step": [50, 51, 52], "words": words.numpy(), "next": {"done": done.numpy()}}
    one = {"step": 50, "words": words[0], "next": {"done": True}}
    return [
        lambda: rb.extend(rows),
        lambda: rb.extend(arrays),
        lambda: rb.add(one),
        lambda: rb.appender().add(**one),
        lambda: rb.__setitem__(3, one),
        lambda: rb.set_at_("step", torch.tensor(5), 3),
        lambda: rb.set_("step", torch.zeros(len(rb), dtype=torch.int64)),
        lambda: rb.update_({"step": torch.zeros(len(rb), dtype=torch.int64)}),
        rb.end_trajectory,
        rb.empty,
        lambda: rb.storage.empty(keep_write_count=True),
        lambda: rb.storage.set(2, one),
        rb.state_dict,
        lambda: rb.dumps(f"{rb.storage.scratch_dir}-dump"),
        rb.storage.cleanup,
    ]


# ---- nothing changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["user", "mount"])
def test_a_process_without_the_right_to_write_reads_everything(folder, how):
    prioritized(folder, n=31).close()
    before = snapshot(folder)
    why = without_rights(read_everything, folder, how)
    if why:
        pytest.skip(why)
    after = snapshot(folder)
    assert {name: known[1:] for name, known in after.items()} == {name: known[1:] for name, known in before.items()}


def test_every_write_is_refused(folder):
    writer = prioritized(folder, n=31)
    rb = ReplayBuffer.open(folder, readonly=True, batch_size=8, writer=RoundRobinWriter(track_generations=True))
    before = snapshot(folder.parent)
    known = rb.storage.tickets_of(torch.tensor([3]))
    late = {"index": [3], "patch": {"step": torch.tensor([50])}}
    for call in [
        *writes(rb),
        lambda: rb.update_if_present(generation=known, **late),
        lambda: rb.update_if_present(generation=[0], **late),
    ]:
        with pytest.raises(ReadOnlyStore, match=r"opened with readonly=True.* Open it without readonly=True\."):
            call()
    assert snapshot(folder.parent) == before
    assert whole(rb.sample())
    assert writer.extend(steps(31, 2)).tolist() == [31, 32]
    assert len(rb) == 33


def test_a_write_of_other_fields_is_one_to_a_store_that_is_only_read(folder):
    """That is said first: no transform runs, and no field is looked at."""
    writer = prioritized(folder, n=31)
    for transforms in ([], [lambda rows: 1 / 0]):
        rb = ReplayBuffer.open(folder, readonly=True, batch_size=8)
        for transform in transforms:
            rb.append_transform(transform, invert=True)
        wrong = TensorDict({"other": torch.zeros(())}, [])
        for call in (
            lambda rb=rb: rb.add(wrong),
            lambda rb=rb: rb.extend(wrong.expand(2)),
            lambda rb=rb: rb.extend([wrong]),
            lambda rb=rb: rb.__setitem__(3, wrong),
            lambda rb=rb: rb.__setitem__("other", torch.zeros(31)),
            lambda rb=rb: rb.set_at_("other", torch.zeros(1), [3]),
        ):
            with pytest.raises(ReadOnlyStore, match=r"opened with readonly=True.* Open it without readonly=True\."):
                call()
    assert len(writer) == 31


def test_saves_and_loads_are_refused(folder, tmp_path):
    writer = prioritized(folder)
    writer.dumps(tmp_path / "dump")
    state = writer.state_dict()
    rb = ReplayBuffer.open(folder, readonly=True)
    before = snapshot(folder)
    checkpoints = Checkpointer(tmp_path / "series", rb)
    for call in (
        lambda: checkpoints.save(1),
        lambda: rb.loads(tmp_path / "dump"),
        lambda: rb.loads(tmp_path / "dump", convert=True),
        lambda: rb.load_state_dict(state),
        lambda: rb.storage.load_state_dict(writer.storage.state_dict()),
    ):
        with pytest.raises(ReadOnlyStore):
            call()
    assert snapshot(folder) == before
    assert (len(rb), rb.sampler._index.core.leaf(4)) == (30, 5.0)


def test_other_components_are_not_noted(folder):
    prioritized(folder).close()
    before = snapshot(folder)
    rb = ReplayBuffer.open(folder, readonly=True)
    rb.set_sampler(RandomSampler())
    rb.set_writer(RoundRobinWriter())
    assert rb.share() is rb
    rb.sample(2)
    rb.close()
    assert snapshot(folder) == before
    assert isinstance(ReplayBuffer.open(folder, readonly=True).sampler, PrioritizedSampler)


def test_files_are_mapped_without_the_right_to_write(folder):
    prioritized(folder).close()
    rb = ReplayBuffer.open(folder, readonly=True)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert {parts[1] for parts in mapped} == {"r--s"}
    assert {Path(parts[5]).name for parts in mapped} >= {"control", "tickets", "step.memmap", "words.memmap"}
    rb.close()


def test_what_is_written_to_a_view_stays_in_it(folder):
    writer = prioritized(folder)
    rb = ReplayBuffer.open(folder, readonly=True)
    view = rb[:]
    view["step"].zero_()
    assert int(view["step"].sum()) == 0
    assert rb.sample(100)["step"].max() > 0
    assert rb[[3]]["step"].tolist() == writer[[3]]["step"].tolist() == [3]


def test_a_refused_writer_of_the_best_rows(folder):
    storage = LazyMemmapStorage(4, scratch_dir=folder)
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="score"), batch_size=2)
    rb.extend(TensorDict({"score": torch.arange(6.0)}, [6]))
    reader = ReplayBuffer.open(folder, readonly=True)
    assert (type(reader), type(reader.writer)) == (TensorDictReplayBuffer, TensorDictMaxValueWriter)
    with pytest.raises(ReadOnlyStore):
        reader.extend(TensorDict({"score": torch.arange(10.0, 13.0)}, [3]))
    assert sorted(reader["score"].tolist()) == [2, 3, 4, 5]


# ---- beside writers --------------------------------------------------------------------------------------------------


def keep_writing(folder, begun, stop):
    rb = ReplayBuffer.open(folder)
    start = 30
    while not stop.is_set():
        rb.extend(steps(start, 7))
        rb.update_priority(rb.sample(8, return_info=True)[1]["index"], torch.rand(8))
        start += 7
        begun.set()
    rb.close()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_no_torn_row_beside_a_writer(folder, sampler):
    prioritized(folder).close()
    begun, stop = context("fork").Event(), context("fork").Event()
    child = Child(keep_writing, folder, begun, stop)
    assert begun.wait(60)
    rb = ReplayBuffer.open(folder, readonly=True, sampler=sampler(), batch_size=12)
    written = rb.write_count
    rounds = 0
    while rounds < 100 or rb.write_count == written:
        try:
            assert whole(rb.sample())
        except NoSampleable:
            assert rb.sampler.traits.has_epochs  # a batch of an epoch may have no window that is long enough
        rounds += 1
    stop.set()
    child.join()
    assert int(rb[:]["step"].max()) > 37


def test_rows_appear_and_go(folder):
    writer = prioritized(folder, n=3)
    rb = ReplayBuffer.open(folder, readonly=True, sampler=RandomSampler())
    writer.extend(steps(3, 2))
    assert rb[:]["step"].tolist() == [0, 1, 2, 3, 4]
    assert set(rb.sample(200)["step"].tolist()) == {0, 1, 2, 3, 4}
    writer.empty()
    assert len(rb) == 0
    with pytest.raises(NoSampleable):
        rb.sample(2)
    writer.extend(steps(70, 1))
    assert rb.sample(2)["step"].tolist() == [70, 70]


def test_the_writer_keeps_its_lock(folder):
    writer = prioritized(folder)
    for _ in range(2):
        ReplayBuffer.open(folder, readonly=True).close()

    def take_over():
        rb = ReplayBuffer.open(folder)
        assert rb.storage.store.repair is None
        assert rb.storage.store.attachment.others()

    run(take_over)
    writer.close()
    assert ReplayBuffer.open(folder).storage.store.repair is None


def test_a_reader_is_no_participant(folder):
    prioritized(folder).close()
    readers = [ReplayBuffer.open(folder, readonly=True) for _ in range(2)]
    assert readers[0].storage.store is not readers[1].storage.store
    rb = ReplayBuffer.open(folder)
    assert not rb.storage.store.attachment.others()
    rb.close()
    readers[0].close()
    assert whole(readers[1].sample(8))


# ---- what the dead leave ---------------------------------------------------------------------------------------------


def test_rows_of_a_dead_writer_are_invisible(folder):
    left_by_the_dead(folder, [2, 11, 32, 33])
    before = snapshot(folder)
    whole_rows = sorted(set(range(35)) - {2, 11, 32, 33})
    for sampler in (RandomSampler(), SamplerWithoutReplacement(), PrioritizedSampler(60, 1.0, 1.0, eps=0.0)):
        rb = ReplayBuffer.open(folder, readonly=True, sampler=sampler, batch_size=6)
        assert len(rb) == 31
        for _ in range(20):
            batch, info = rb.sample(return_info=True)
            assert whole(batch)
            assert set(info["index"].tolist()) <= set(whole_rows)
    rb = ReplayBuffer.open(folder, readonly=True, sampler=SamplerWithoutReplacement(), batch_size=6)
    assert sorted(torch.cat([batch["step"] for batch in rb]).tolist()) == rb["step"].tolist()
    assert rb["step"].tolist() == [*(k for k in range(30) if k not in (2, 11)), 100, 101, 104]
    with pytest.raises(RowError):
        rb[[2]]
    rb = ReplayBuffer.open(folder, readonly=True, sampler=SliceSampler(slice_len=3), batch_size=30)
    starts = set(rb.sample()["step"].view(-1, 3)[:, 0].tolist())
    assert starts == {5, 6, 7, 12, 15, 16, 17, 20, 21, 22, 25, 26, 27} & starts
    assert {12, 25} & starts
    epoch = SliceSamplerWithoutReplacement(slice_len=1, traj_key="step")
    rb = ReplayBuffer.open(folder, readonly=True, sampler=epoch, batch_size=6)
    assert sorted(torch.cat([batch["step"] for batch in rb]).tolist()) == rb["step"].tolist()
    assert snapshot(folder) == before
    assert ReplayBuffer.open(folder).storage.store.repair.voided == 4


def test_what_the_next_process_recovers_is_seen(folder):
    left_by_the_dead(folder, [2, 34])
    rb = ReplayBuffer.open(folder, readonly=True, sampler=SamplerWithoutReplacement(), batch_size=60)
    assert len(rb) == 33
    writer = ReplayBuffer.open(folder)
    assert len(rb) == len(writer) == 33
    writer.extend(steps(200, 60))
    assert len(rb) == 60
    assert sorted(rb.sample()["step"].tolist()) == list(range(200, 260))


def test_a_store_that_another_boot_left_open(folder, monkeypatch):
    left_by_the_dead(folder, [2])
    monkeypatch.setattr("engram.store.opening._boot_id", lambda: "another")
    with pytest.raises(UncleanStore, match='unclean="accept"'):
        ReplayBuffer.open(folder, readonly=True)
    assert len(ReplayBuffer.open(folder, readonly=True, unclean="accept")) == 34


# ---- what readers have of their own ----------------------------------------------------------------------------------


def test_draws_by_priority_go_by_a_copy(folder):
    writer = prioritized(folder)
    rb = ReplayBuffer.open(folder, readonly=True)
    counts = torch.bincount(rb.sample(6000, return_info=True)[1]["index"], minlength=30)
    assert_proportional(counts, range(1, 31))
    rb.update_priority(torch.arange(30), torch.ones(30))
    rb.sampler.beta = 0.5
    assert_uniform(torch.bincount(rb.sample(3000, return_info=True)[1]["index"], minlength=30))
    assert (writer.sampler._index.core.leaf(29), writer.sampler.beta) == (30.0, 1.0)
    # What is written later has the priority of what was there, or none.
    writer.extend(steps(30, 35))
    batch, info = rb.sample(6000, return_info=True)
    assert whole(batch)
    assert set(info["index"].tolist()) == set(range(30))
    assert set(batch["step"].tolist()) == {*range(5, 30), *range(60, 65)}
    rb.update_priority(torch.tensor([40]), torch.tensor([1e6]))
    assert rb.sample(50, return_info=True)[1]["index"].mode().values == 40


def test_a_late_priority_is_dropped(folder):
    writer = prioritized(folder)
    rb = ReplayBuffer.open(folder, readonly=True)
    info = rb.sample(200, return_info=True)[1]
    writer.extend(steps(30, 60))
    rb.update_priority(info["index"], 50.0, generation=info["index_generation"])
    assert rb.stats()["priority_updates_dropped"] == 200


def test_priorities_that_the_store_does_not_have(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(60, scratch_dir=folder))
    rb.extend(steps(0, 30))
    before = snapshot(folder)
    reader = ReplayBuffer.open(folder, readonly=True, sampler=PrioritizedSampler(60, 1.0, 1.0))
    assert_uniform(torch.bincount(reader.sample(3000)["step"], minlength=30))
    assert snapshot(folder) == before


def test_an_epoch_of_its_own(folder):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(60, scratch_dir=folder), sampler=SamplerWithoutReplacement(), batch_size=10
    )
    rb.extend(steps(0, 30))
    first = rb.sample()["step"].tolist()
    reader = ReplayBuffer.open(folder, readonly=True)
    assert sorted(torch.cat([batch["step"] for batch in reader]).tolist()) == list(range(30))
    rest = torch.cat([rb.sample()["step"] for _ in range(2)]).tolist()
    assert sorted(first + rest) == list(range(30))


def test_slices_are_those_of_the_writer(folder, monkeypatch):
    monkeypatch.setattr(fork, "stream", lambda *_: 0)  # of one process: of two, each draws its own
    writer = prioritized(folder)
    writer.set_sampler(SliceSampler(slice_len=4))
    reader = ReplayBuffer.open(folder, readonly=True)
    for rb in (writer, reader):
        rb.set_rng(torch.Generator().manual_seed(5))
    for _ in range(5):
        assert torch.equal(writer.sample(40)["step"], reader.sample(40)["step"])
    writer.extend(steps(30, 10))
    assert torch.equal(writer.sample(40)["step"], reader.sample(40)["step"])


# ---- copies ----------------------------------------------------------------------------------------------------------


def read_in_another_process(rb):
    assert whole(rb.sample(20))
    assert "read-only" in repr(rb)
    with pytest.raises(ReadOnlyStore):
        rb.empty()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_copy_in_another_process_only_reads(folder, method):
    prioritized(folder).close()
    before = snapshot(folder)
    rb = ReplayBuffer.open(folder, readonly=True, prefetch=2, batch_size=20)
    rb.sample()
    Child(read_in_another_process, rb, method=method).join()
    read_in_another_process(pickle.loads(pickle.dumps(rb)))
    read_in_another_process(rb)
    assert snapshot(folder) == before


# ---- other stores ----------------------------------------------------------------------------------------------------


def test_stores_in_shared_memory():
    rb = ReplayBuffer(storage=LazyTensorStorage(60)).share()
    rb.extend(steps(0, 30))
    data = TensorDict(steps(0, 30), [30]).share_memory_()
    around = ReplayBuffer(storage=TensorStorage(data))
    for writer in (rb, around):
        reader = ReplayBuffer.open(writer.storage.store.directory, readonly=True)
        assert whole(reader.sample(8))
        assert reader[:]["step"].tolist() == list(range(30))
        writer.set_at_(("next", "done"), torch.tensor(True), 3)
        assert reader[[3]]["next"]["done"].tolist() == [True]
        reader[:]["step"].zero_()
        assert reader[[5]]["step"].tolist() == [5]
        with pytest.raises(ReadOnlyStore):
            reader.empty()
        reader.close()
        run(read_in_another_process, ReplayBuffer.open(writer.storage.store.directory, readonly=True))
        directory = writer.storage.store.directory
        writer.close()
        assert not directory.exists()


def test_rows_without_bytes(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
    rb.extend({"a": torch.arange(3), "empty": torch.zeros(3, 0)})
    reader = ReplayBuffer.open(folder, readonly=True)
    assert reader[:]["empty"].shape == (3, 0)
    assert reader.sample(5)["empty"].shape == (5, 0)


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_where_there_is_none(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="expected a store"):
            ReplayBuffer.open(path, readonly=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "part", ["step.memmap", "next/done.memmap", ".engram/control", ".engram/tickets", ".engram/store.json"]
)
def test_files_that_were_cut(folder, part):
    prioritized(folder).close()
    for length in (50, 0):
        os.truncate(folder / part, length)
        before = snapshot(folder)
        with pytest.raises(CorruptStore, match=part):
            ReplayBuffer.open(folder, readonly=True)
        assert snapshot(folder) == before


def test_priorities_that_were_cut(folder):
    prioritized(folder).close()
    for length in (4200, 100, 0):
        os.truncate(folder / ".engram/indexes/main/priorities", length)
        with pytest.raises(IncompatibleStore, match="index: "):
            ReplayBuffer.open(folder, readonly=True)
    assert len(ReplayBuffer.open(folder, readonly=True, sampler=RandomSampler())) == 30
