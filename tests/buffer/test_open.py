"""ReplayBuffer.open: going on with a store, and what it brings back."""

import json
import pickle

import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import (
    CorruptStore,
    ImmutableDatasetWriter,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    Lifo,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    UncleanStore,
)
from tests import fresh
from tests.components import Backwards, Listener, Newest


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def written(folder, *, buffer=ReplayBuffer, rows=3, capacity=5, lanes=1, **arguments):
    """A buffer of a few rows that was closed."""
    rb = buffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder, lanes=lanes), **arguments)
    data = {"a": torch.arange(rows)}
    rb.extend(data if buffer is ReplayBuffer else TensorDict(data, batch_size=[rows]))
    rb.close()


def test_rows_cursors_and_lanes(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder, lanes=2))
    rb.extend({"a": torch.arange(7)}, lane=0)
    rb.extend({"a": torch.arange(20, 23)}, lane=1)
    rb.close()
    rb = ReplayBuffer.open(folder)
    assert rb["a"].tolist() == [5, 6, 2, 3, 4, 20, 21, 22]
    assert (len(rb), rb.write_count, rb.lanes) == (8, 10, 2)
    assert rb.sample(4)["a"].shape == (4,)
    assert rb.add({"a": torch.tensor(7)}, lane=0) == 2
    assert rb.add({"a": torch.tensor(23)}, lane=1) == 8
    assert rb.stats()["capacity"] == 10


def test_as_path_or_text(folder):
    written(folder)
    rb = ReplayBuffer.open(str(folder))
    assert len(rb) == 3
    rb.close()
    assert len(TensorDictReplayBuffer.open(folder)) == 3


def test_where_there_is_none(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="expected a store"):
            ReplayBuffer.open(path)


# ---- recorded components -------------------------------------------------------------------------------------------------------


def test_dumps_and_stores_are_told_apart(tmp_path):
    with ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "store")) as rb:
        rb.extend({"a": torch.arange(3)})
        rb.dumps(tmp_path / "dump")
        with pytest.raises(FileNotFoundError, match=r"a dump or one checkpoint: rb\.loads"):
            ReplayBuffer.open(tmp_path / "dump")
        with pytest.raises(IncompatibleCheckpoint, match=r"got a store\. ReplayBuffer\.open\('.*store'\) goes on"):
            rb.loads(tmp_path / "store")
        assert rb["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_the_buffer_class_comes_back(folder, buffer):
    written(folder, buffer=buffer)
    assert type(ReplayBuffer.open(folder)) is buffer


def test_the_priority_key_comes_back(folder):
    written(folder, buffer=TensorDictReplayBuffer, priority_key="error")
    assert ReplayBuffer.open(folder).priority_key == "error"


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(), SamplerWithoutReplacement(drop_last=True), SamplerWithoutReplacement(shuffle=False)],
    ids=repr,
)
def test_the_sampler_comes_back(folder, sampler):
    written(folder, sampler=sampler, batch_size=2)
    assert repr(ReplayBuffer.open(folder).sampler) == repr(sampler)


@pytest.mark.parametrize(
    "writer",
    [RoundRobinWriter(), RoundRobinWriter(track_generations=True), TensorDictRoundRobinWriter(track_generations=True)],
    ids=repr,
)
def test_the_writer_comes_back(folder, writer):
    written(folder, writer=writer)
    assert repr(ReplayBuffer.open(folder).writer) == repr(writer)


def test_the_batch_size_comes_back(folder):
    written(folder, batch_size=2)
    assert ReplayBuffer.open(folder).batch_size == 2


def test_components_that_were_swapped_come_back(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder), batch_size=2)
    rb.extend({"a": torch.arange(3)})
    rb.set_sampler(SamplerWithoutReplacement())
    rb.set_writer(ImmutableDatasetWriter())
    rb.close()
    rb = ReplayBuffer.open(folder)
    assert type(rb.sampler) is SamplerWithoutReplacement
    assert type(rb.writer) is ImmutableDatasetWriter


def test_components_come_back_whoever_wrote_first(folder):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=SamplerWithoutReplacement(), batch_size=2
    )
    rb.writer.extend({"a": torch.arange(3)})
    rb.close()
    rb = ReplayBuffer.open(folder)
    assert type(rb.sampler) is SamplerWithoutReplacement
    assert rb.batch_size == 2


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("reads", ["set_sampler", "sampler"])
def test_a_writer_that_was_given_no_sampler_takes_no_place(folder, first, reads):
    """Whichever comes first, an actor or the learner; until somebody asks for the default sampler."""

    def writes():
        with ReplayBuffer.open_or_create(folder, 50, batch_size=3) as actor:
            actor.extend({"a": torch.arange(5)})

    if first:
        writes()
    with PrioritizedReplayBuffer.open_or_create(folder, 50, alpha=0.7, beta=0.4, batch_size=2) as rb:
        rb.extend({"a": torch.arange(3)})
    writes()
    with PrioritizedReplayBuffer.open(folder) as rb:
        assert (type(rb), rb.sampler.alpha, rb.batch_size) == (PrioritizedReplayBuffer, 0.7, 2)
    if reads == "sampler":
        with ReplayBuffer.open_or_create(folder, 50, sampler=RandomSampler(), batch_size=3) as rb:
            rb.extend({"a": torch.arange(1)})
    else:
        with ReplayBuffer.open_or_create(folder, 50, batch_size=3) as rb:
            rb.set_sampler(RandomSampler())
    with ReplayBuffer.open(folder) as rb:
        assert (type(rb.sampler), rb.batch_size) == (RandomSampler, 3)


@pytest.mark.parametrize("comes", ["opened before", "as a copy"])
def test_a_writer_by_another_way_takes_no_place_either(folder, comes):
    with ReplayBuffer.open_or_create(folder, 50, batch_size=3) as actor:
        actor.extend({"a": torch.arange(5)})
    actor = ReplayBuffer.open(folder)
    if comes == "as a copy":
        actor = pickle.loads(pickle.dumps(ReplayBuffer(storage=actor.storage)))
    with PrioritizedReplayBuffer.open_or_create(folder, 50, alpha=0.7, beta=0.4, batch_size=2) as rb:
        rb.extend({"a": torch.arange(3)})
        actor.extend({"a": torch.arange(5)})
        actor.close()
    assert type(ReplayBuffer.open(folder)) is PrioritizedReplayBuffer


@pytest.mark.parametrize("how", ["writer", "set_writer", "remover"])
def test_a_writer_that_was_chosen_is_noted_beside_a_sampler(folder, how):
    with PrioritizedReplayBuffer.open_or_create(folder, 50, alpha=0.7, beta=0.4, batch_size=2) as rb:
        rb.extend({"a": torch.arange(3)})
    given = {"writer": {"writer": RoundRobinWriter(track_generations=True)}, "remover": {"remover": Lifo()}}
    with ReplayBuffer.open_or_create(folder, 50, **given.get(how, {})) as rb:
        rb.extend({"a": torch.arange(3)})
        if how == "set_writer":
            rb.set_writer(ImmutableDatasetWriter())
        expected = repr(rb.writer)
    with ReplayBuffer.open(folder) as rb:
        assert (type(rb), repr(rb.writer), rb.sampler.alpha) == (PrioritizedReplayBuffer, expected, 0.7)


def test_a_second_buffer_that_only_listens_leaves_the_record_alone(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=SamplerWithoutReplacement())
    rb.extend({"a": torch.arange(3)})
    watching = ReplayBuffer(storage=rb.storage, sampler=Listener())
    rb.extend({"a": torch.arange(3)})
    assert len(watching.sampler.heard) == 1
    rb.close()
    assert type(ReplayBuffer.open(folder).sampler) is SamplerWithoutReplacement


def test_components_come_back_whoever_wrote_before_a_crash(folder):
    program = fresh.start(
        """
        import os, torch
        from engram import LazyMemmapStorage, ReplayBuffer, SamplerWithoutReplacement

        rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=SamplerWithoutReplacement())
        rb.empty()
        rb.writer.extend({"a": torch.arange(3)})
        os._exit(0)
        """,
        folder=str(folder),
    )
    assert program.wait() == 0
    assert type(ReplayBuffer.open(folder).sampler) is SamplerWithoutReplacement


def test_reading_with_other_components_leaves_the_record_alone(folder):
    written(folder, sampler=SamplerWithoutReplacement(), batch_size=2)
    ReplayBuffer.open(folder, sampler=RandomSampler(), batch_size=3).close()
    rb = ReplayBuffer.open(folder)
    assert type(rb.sampler) is SamplerWithoutReplacement
    assert rb.batch_size == 2


@pytest.mark.parametrize("buffer", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_priorities_are_written_to_the_directory_as_rows_are(folder, buffer):
    """A uniform store that goes on with priorities is drawn by them from then on, also where nothing else was written."""
    plain = buffer.__bases__[0]
    written(folder, buffer=plain, rows=5)
    reader = buffer.open_or_create(folder, 5, alpha=1.0, beta=0.5)
    reader.sample(4)
    reader.close()
    assert type(ReplayBuffer.open(folder)) is plain
    rb = buffer.open_or_create(folder, 5, alpha=1.0, beta=0.5, batch_size=32)
    ReplayBuffer.open(folder, readonly=True, sampler=PrioritizedSampler(5, 1.0, 0.5)).update_priority([0], 9.0)
    assert json.loads(record_of(folder).read_text())["buffer"] == plain.__name__  # of the reader nothing is noted
    rb.update_priority([0, 1, 2, 3, 4], [0.0, 0.0, 1.0, 0.0, 0.0])
    rb.close()
    for cls in (ReplayBuffer, buffer):
        again = cls.open(folder)
        assert type(again) is buffer
        assert (again.sample()["a"] == 2).all()
        again.close()


@pytest.mark.parametrize("buffer", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_a_prioritized_class_opens_no_uniform_buffer(folder, buffer):
    plain = buffer.__bases__[0]
    written(folder, buffer=plain)
    with pytest.raises(
        TypeError, match=rf"of a {plain.__name__} with RandomSampler.*{buffer.__name__}\.open_or_create.*sampler="
    ):
        buffer.open(folder)
    rb = buffer.open(folder, sampler=PrioritizedSampler(5, 1.0, 0.5))
    assert type(rb) is plain
    assert rb.sample(2, return_info=True)[1]["priority_weight"].tolist() == [1, 1]
    rb.close()


@pytest.mark.parametrize("buffer", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
@pytest.mark.parametrize("sampler", [RandomSampler(), RandomSampler, SamplerWithoutReplacement()])
def test_what_a_prioritized_class_wrote_is_read_with_any_sampler(folder, buffer, sampler):
    written(folder, buffer=buffer, alpha=0.6, beta=0.4, batch_size=3)
    with ReplayBuffer.open(folder, readonly=True, sampler=sampler) as rb:
        assert type(rb) is buffer.__bases__[0]
        assert set(rb.sample()["a"].tolist()) <= {0, 1, 2}
    for given in ({}, {"sampler": PrioritizedSampler(5, 1.0, 0.5)}):
        with ReplayBuffer.open(folder, readonly=True, **given) as rb:
            assert type(rb) is buffer
    with pytest.raises(TypeError, match="its sampler is a PrioritizedSampler"):
        buffer.open(folder, readonly=True, sampler=sampler)


# ---- arguments -----------------------------------------------------------------------------------------------------------------


def test_sampler_and_writer_given(folder):
    written(folder, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=2)
    rb = ReplayBuffer.open(folder, sampler=RandomSampler, writer=RoundRobinWriter(track_generations=True))
    assert type(rb.sampler) is RandomSampler
    assert rb.writer.tracks_generations
    assert "index_generation" in rb.sample(return_info=True)[1]


def test_batch_size_given(folder):
    written(folder, batch_size=2)
    assert len(ReplayBuffer.open(folder, batch_size=3).sample()["a"]) == 3


def test_collate_function_and_transform_given(folder):
    written(folder)
    rb = ReplayBuffer.open(folder, collate_fn=lambda x: x["a"] + 100, transform=lambda x: x * 2)
    assert rb[:].tolist() == [200, 202, 204]
    assert rb.sample(5).min() >= 200


def test_generator_given(folder):
    written(folder, rows=5)
    draws = []
    for seed in (1, 1, 2):
        rb = ReplayBuffer.open(folder, generator=seeded(seed))
        draws.append(rb.sample(40)["a"].tolist())
        rb.close()
    assert draws[0] == draws[1] != draws[2]


def test_a_store_that_another_boot_left_open(folder, monkeypatch):
    program = fresh.start(
        """
        import os, torch
        from engram import LazyMemmapStorage, ReplayBuffer

        rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
        rb.extend({"a": torch.arange(3)})
        os._exit(0)
        """,
        folder=str(folder),
    )
    assert program.wait() == 0
    monkeypatch.setattr("engram.store.opening._boot_id", lambda: "another")
    with pytest.raises(UncleanStore, match='unclean="accept"'):
        ReplayBuffer.open(folder)
    with pytest.raises(UncleanStore):
        ReplayBuffer.open(folder, unclean="refuse")
    assert ReplayBuffer.open(folder, unclean="accept")["a"].tolist() == [0, 1, 2]


def test_unclean_is_one_of_two(folder):
    written(folder)
    with pytest.raises(ValueError, match="unclean.*'maybe'"):
        ReplayBuffer.open(folder, unclean="maybe")
    assert len(ReplayBuffer.open(folder, unclean="accept")) == 3


@pytest.mark.parametrize("later", [{"transport": "distributed"}])
def test_arguments_that_come_later(folder, later):
    written(folder)
    (name,) = later
    with pytest.raises(TypeError, match=f"open.*'{name}'.*service_backend='ray'"):
        ReplayBuffer.open(folder, **later)
    assert len(ReplayBuffer.open(folder, **dict.fromkeys(later))) == 3


@pytest.mark.parametrize("unknown", ["storage", "size", "priority_key"])
def test_unknown_arguments(folder, unknown):
    written(folder)
    with pytest.raises(TypeError, match=unknown):
        ReplayBuffer.open(folder, **{unknown: 3})


# ---- custom components -----------------------------------------------------------------------------------------------------------


def test_a_custom_sampler_must_be_given(folder):
    written(folder, sampler=Newest())
    with pytest.raises(TypeError, match=r"custom sampler 'Newest'.*sampler="):
        ReplayBuffer.open(folder)
    rb = ReplayBuffer.open(folder, sampler=Listener())
    assert rb.sample(1)["a"].tolist() == [0]


def test_a_custom_writer_must_be_given(folder):
    written(folder, writer=Backwards())
    with pytest.raises(TypeError, match=r"custom writer 'Backwards'.*writer="):
        ReplayBuffer.open(folder)
    rb = ReplayBuffer.open(folder, writer=RoundRobinWriter())
    assert len(rb) == 5


def test_a_class_of_a_known_name_is_not_the_known_class(folder):
    class RandomSampler(Listener):
        pass

    written(folder, sampler=RandomSampler())
    with pytest.raises(TypeError, match="custom sampler 'RandomSampler'"):
        ReplayBuffer.open(folder)


def test_a_refused_open_leaves_the_store_free(folder):
    written(folder, sampler=Newest())
    with pytest.raises(TypeError):
        ReplayBuffer.open(folder)
    out = fresh.run(
        "from engram import ReplayBuffer, RandomSampler\nprint(len(ReplayBuffer.open(folder, sampler=RandomSampler())))",
        folder=str(folder),
    )
    assert out == "3"


def test_a_refused_open_does_not_take_the_store_from_its_user(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=Newest())
    rb.extend({"a": torch.arange(3)})
    with pytest.raises(TypeError):
        ReplayBuffer.open(folder)
    in_use(folder)
    rb.close()


def in_use(folder):
    program = fresh.start(
        """
        import torch
        from engram import LazyMemmapStorage, ReplayBuffer
        ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder, existsok=True)).extend({"a": torch.arange(3)})
        """,
        folder=str(folder),
    )
    assert program.wait() == 1
    assert "StoreInUse" in program.err


def test_tensorclasses_must_be_defined(folder):
    @tensorclass
    class Local:
        a: torch.Tensor

    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
    rb.extend(Local(a=torch.arange(3), batch_size=[3]))
    rb.close()
    with pytest.raises(TypeError, match="Local"):
        ReplayBuffer.open(folder)


# ---- damaged records -------------------------------------------------------------------------------------------------------------


def record_of(folder):
    return next(path for path in (folder / ".engram").iterdir() if b"sampler" in path.read_bytes()[:4096])


def test_no_record_means_defaults(folder):
    written(folder, sampler=SamplerWithoutReplacement(), batch_size=2)
    record_of(folder).unlink()
    rb = ReplayBuffer.open(folder)
    assert type(rb) is ReplayBuffer
    assert type(rb.sampler) is RandomSampler
    assert rb.batch_size is None
    assert rb["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda record: b"{", CorruptStore),
        (lambda record: b"[]", CorruptStore),
        (lambda record: b"\xff\xfe", CorruptStore),
        (lambda record: {**record, "buffer": "os.system"}, TypeError),
        (lambda record: {**record, "sampler": {"type": "os.system"}}, TypeError),
        (lambda record: {**record, "sampler": "RandomSampler"}, TypeError),
        (lambda record: {**record, "sampler": {"type": "RandomSampler", "config": {"x": 1}}}, CorruptStore),
        (lambda record: {**record, "sampler": {"type": "RandomSampler", "config": [1]}}, CorruptStore),
        (lambda record: {**record, "writer": {"type": "RoundRobinWriter", "config": {"track": 1}}}, CorruptStore),
        (lambda record: {**record, "batch_size": "many"}, CorruptStore),
        (lambda record: {**record, "batch_size": -3}, CorruptStore),
        (lambda record: {**record, "prefetch": "many"}, CorruptStore),
        (lambda record: {**record, "prefetch": -3}, CorruptStore),
        (lambda record: {**record, "prefetch": 3, "batch_size": None}, CorruptStore),
    ],
)
def test_a_damaged_record(folder, change, kind):
    written(folder)
    path = record_of(folder)
    changed = change(json.loads(path.read_bytes()))
    path.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    with pytest.raises(kind, match=r"\S"):
        ReplayBuffer.open(folder)
    path.unlink()
    assert len(ReplayBuffer.open(folder)) == 3


# ---- several handles -------------------------------------------------------------------------------------------------------------


def test_a_store_that_is_open_already_is_attached_to(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
    rb.extend({"a": torch.arange(3)})
    other = ReplayBuffer.open(folder)
    other.extend({"a": torch.arange(3, 5)})
    assert rb["a"].tolist() == [0, 1, 2, 3, 4]
    assert rb.add({"a": torch.tensor(5)}) == 0
    assert other["a"].tolist() == [5, 1, 2, 3, 4]


def test_closing_one_handle_leaves_the_other_its_lock(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
    rb.extend({"a": torch.arange(3)})
    other = ReplayBuffer.open(folder)
    other.close()
    other.close()
    in_use(folder)
    rb.add({"a": torch.tensor(3)})
    rb.close()
    assert (
        fresh.run("from engram import ReplayBuffer\nprint(len(ReplayBuffer.open(folder)))", folder=str(folder)) == "4"
    )


def test_another_process_goes_on(folder):
    fresh.run(
        """
        import torch
        from tensordict import TensorDict
        from engram import LazyMemmapStorage, SamplerWithoutReplacement, TensorDictReplayBuffer

        rb = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=SamplerWithoutReplacement(), batch_size=2
        )
        rb.extend(TensorDict({"a": torch.arange(7)}, batch_size=[7]))
        """,
        folder=str(folder),
    )
    rb = ReplayBuffer.open(folder)
    assert rb["a"].tolist() == [5, 6, 2, 3, 4]
    assert sorted(torch.cat([batch["a"] for batch in rb]).tolist()) == [2, 3, 4, 5, 6]
    assert rb.add(TensorDict({"a": torch.tensor(7)}, batch_size=[])) == 2


def test_repairs_are_told(folder, caplog):
    program = fresh.start(
        """
        import os, torch
        from engram import LazyMemmapStorage, ReplayBuffer

        rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
        rb.extend({"a": torch.arange(3)})
        os._exit(7)
        """,
        folder=str(folder),
    )
    assert program.wait() == 7
    caplog.set_level("INFO", logger="engram")
    rb = ReplayBuffer.open(folder)
    assert rb["a"].tolist() == [0, 1, 2]
    assert [message for message in caplog.messages if "did not close" in message] == [
        f"{folder}: its last process did not close it: no write was unfinished."
    ]
    caplog.clear()
    rb.close()
    ReplayBuffer.open(folder)
    assert caplog.messages == []


def test_ram_storages_cannot_be_opened(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend({"a": torch.arange(3)})
    rb.close()
    assert list(tmp_path.iterdir()) == []


def test_a_write_in_flight_at_close_is_looked_at_by_the_next_open(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "r"))
    rb.extend(torch.arange(8))
    at = 12288 + 32  # t0 of the first claim of the first participant (docs/store-format.md)
    rb.close()
    with (tmp_path / "r" / ".engram" / "control").open("r+b") as file:
        file.seek(at)
        file.write((99).to_bytes(8, "little"))
    again = ReplayBuffer.open(tmp_path / "r")
    assert again.storage.store.repair.claims == 1
    again.close()
    assert ReplayBuffer.open(tmp_path / "r").storage.store.repair is None
