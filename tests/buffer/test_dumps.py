"""A buffer saved as a folder and loaded again. A1–A17 of the checkpoint tests."""

import io
import os
import pickle
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Compose,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ObservationNorm,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.checkpoint.checkpointer import Checkpointer
from engram.format.verify import verify
from engram.persist import rows as rows_module
from tests.buffer.test_state import STORAGES, Counting, L, buffer, items, kinds, twins
from tests.format.checkpoint_folders import tree
from tests.format.system_calls import counted, killed_at, settled
from tests.twins import bits, contents, rows

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size", "ignore:.* has no priorities")


class Through:
    """Takes a buffer's state to another one through a folder: each time the same, so that one dump replaces another."""

    def __init__(self, folder):
        self.folder, self.checkpointer, self.step = folder, None, 0

    def dumps(self, rb, other):
        rb.dumps(self.folder / "dump")
        other.loads(self.folder / "dump")

    def series(self, rb, other):
        """The one that was restored last goes on saving, and links what it was restored from."""
        if self.checkpointer is None or self.checkpointer[0] is not rb:
            self.checkpointer = rb, Checkpointer(self.folder / "series", rb)
        self.step += 1
        report = self.checkpointer[1].save(self.step)
        live = int((rb.storage.state_dict()["numbers"] != 0).sum())
        assert (report.steps, report.lost_rows) == (live, 0), "nobody else writes"
        self.checkpointer = other, Checkpointer(self.folder / "series", other)
        self.checkpointer[1].restore(resume="exact")


# ---- what a dump cannot hold ---------------------------------------------------------------------------------------------


def halved(batch):
    return batch.set("score", batch["score"] / 2)


class Doubled:
    """A transform of a user's own, without a state."""

    def forward(self, batch):
        return batch.set("score", batch["score"] * 2)


@pytest.mark.parametrize("way", ["dumps", "series"])
@pytest.mark.parametrize(
    ("there", "here", "named"),
    [
        ([halved], [], "halved"),
        ([lambda batch: batch], [], "<lambda>"),
        ([Doubled()], [], "Doubled"),
        ([halved, Doubled()], [halved], "halved, Doubled"),
        ([Compose(halved, Doubled()), halved], [Compose()], "halved, Doubled, halved"),
        ([halved], [halved], None),
        ([halved], [lambda batch: batch], None),
        ([], [halved], None),
        ([], [], None),
    ],
)
def test_functions_that_are_missing_where_a_dump_is_loaded_are_named(there, here, named, way, ram):
    def made(transforms):
        return buffer(transform=Compose(*transforms), n=4)

    rb, other, through = made(there), made(here), Through(ram)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        getattr(through, way)(rb, other)
    told = [str(one.message) for one in said if "transform" in str(one.message)]
    assert len(told) == (0 if named is None else 1)
    assert named is None or f"saved with the transforms {named}," in told[0]
    assert torch.equal(rb.storage[:]["score"], other.storage[:]["score"])


# ---- exact ---------------------------------------------------------------------------------------------------------------


@pytest.mark.stress(sample=32)
@pytest.mark.parametrize(("storage", "sampler", "writer"), list(kinds()))
def test_goes_on_as_if_it_had_never_been_saved(storage, sampler, writer, ram):
    both, through = twins(storage, sampler, writer, seed=len(storage) + 10 * len(sampler)), Through(ram)
    both.run(20)
    both.swap(through=through.dumps)
    both.run(20)
    both.swap(used=True, through=through.series)
    both.run(20)
    both.check()
    both.close()


@pytest.mark.parametrize("way", ["dumps", "series"])
@pytest.mark.parametrize(
    ("storage", "sampler", "writer"),
    [("memmap", "priority-slices", "generations"), ("lanes", "priority", "ring"), ("list", "live-max", "best")],
)
def test_for_a_thousand_operations(storage, sampler, writer, way, ram):
    both, through = twins(storage, sampler, writer, seed=2), Through(ram)
    both.run(100)
    both.swap(through=getattr(through, way))
    both.run(1000)
    both.check()
    both.close()


@pytest.mark.stress(sample=14)
@pytest.mark.parametrize("n", [0, 1, L - 1, L, L + 1, 3 * L + 7])
@pytest.mark.parametrize("storage", STORAGES)
def test_of_every_size(storage, n, ram):
    """Save, load, write, save, load."""
    both, through = twins(storage, "priority"), Through(ram)
    if n:
        both.extend(n)
    both.swap(through=through.dumps)
    both.sample()
    both.extend(2)
    both.swap(used=storage != "full", through=through.series)
    both.update()
    both.extend(L + 1)
    both.swap(through=through.series)
    both.sample()
    both.check()
    both.close()


@pytest.mark.parametrize("sampler", ["uniform", "epoch", "priority", "slices"])
@pytest.mark.parametrize("storage", ["ram", "memmap", "list"])
def test_of_a_buffer_that_was_never_written(storage, sampler, ram):
    if (storage, sampler) == ("list", "slices"):
        pytest.skip("lists have no trajectories")
    made = twins(storage, sampler)
    for way in (Through(ram).dumps, Through(ram).series):
        rb, used = made._make(), made._make()
        used.extend(rows(9))
        way(rb, used)
        assert len(used) == 0
        assert used.write_count == 0
        assert used.extend(rows(2)).tolist() == [0, 1]
        used.close()
        rb.close()
    made.close()


def test_rows_written_by_number(ram):
    """A row ahead of the cursor, holes below it."""
    for way in (Through(ram).dumps, Through(ram).series):
        rb, other = buffer(), buffer()
        rb.extend(rows(L))
        rb.empty()
        rb.writer.write_at([2, 7], rows(2, 50))
        way(rb, other)
        assert bits(other[:]) == bits(rb[:])
        for n in (3, L):
            assert other.extend(rows(n)).tolist() == rb.extend(rows(n)).tolist()
            assert contents(other) == contents(rb)


def test_several_indexes(ram):
    def make(n):
        rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=n)
        more = [PrioritizedSampler(L, 1.0, 0.3, index="critic"), SliceSampler(slice_len=2, index="windows")]
        return rb, [ReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=2) for sampler in more]

    for way in (Through(ram).dumps, Through(ram).series):
        rb, (critic, _) = make(L + 3)
        critic.update_priority(torch.arange(4), torch.tensor([0.0, 2.0, 5e-324, 7.0], dtype=torch.float64))
        other, (its_critic, _) = make(2)
        way(rb, other)
        assert contents(other) == contents(rb)
        assert bits(its_critic.sampler.state_dict()) == bits(critic.sampler.state_dict())


# ---- generators and batches ahead ------------------------------------------------------------------------------------------


def test_generators(ram):
    """A given one goes on; torch's own only if that is asked for."""
    rb = buffer(n=9, generator=torch.Generator().manual_seed(5))
    rb.sample()
    rb.dumps(ram / "given")
    torch.manual_seed(3)
    free = buffer(n=9)
    free.sample()
    free.dumps(ram / "default")
    Checkpointer(ram / "series", free).save(1)
    drawn, freely = ([one.sample()["step"].tolist() for _ in range(5)] for one in (rb, free))

    for other in (buffer(), buffer(generator=torch.Generator().manual_seed(6))):
        before = torch.get_rng_state()
        other.loads(ram / "given")
        assert [other.sample()["step"].tolist() for _ in range(5)] == drawn
        assert torch.equal(torch.get_rng_state(), before), "a load does not reseed the program"
    for load in (
        lambda one, **more: one.loads(ram / "default", **more),
        lambda one, **more: Checkpointer(ram / "series", one).restore(resume="exact", **more),
    ):
        other = buffer()
        torch.manual_seed(4)
        load(other)
        assert torch.initial_seed() == 4
        load(other, default_rng=True)
        assert [other.sample()["step"].tolist() for _ in range(5)] == freely


@pytest.mark.parametrize("transform", [None, lambda: ObservationNorm(1.0, 2.0, ["score"])], ids=["plain", "transform"])
@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(L, 0.7, 0.5), SamplerWithoutReplacement])
def test_batches_that_were_drawn_ahead(sampler, transform, ram):
    def make(seed):
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(L),
            sampler=sampler(),
            transform=transform and transform(),
            batch_size=3,
            prefetch=2,
            generator=torch.Generator().manual_seed(seed),
        )

    for way in (Through(ram).dumps, Through(ram).series):
        rb, other = make(1), make(2)
        rb.extend(rows(L))
        rb.sample()
        rb.sample()
        ahead = rb.state_dict()["_prefetch_state"]["queue"]
        assert ahead, "otherwise this tests nothing"
        way(rb, other)
        rb.extend(rows(3, 100))  # what was drawn before is not changed by it
        other.extend(rows(3, 100))
        for _ in range(6):
            one, two = rb.sample(return_info=True), other.sample(return_info=True)
            assert bits(one[0].exclude("index_generation")) == bits(two[0].exclude("index_generation"))
        rb.close()
        other.close()


def test_batches_ahead_are_left_out(ram):
    def make(prefetch):
        return buffer(generator=torch.Generator().manual_seed(1), prefetch=prefetch)

    rb = make(2)
    rb.extend(rows(L))
    rb.sample()
    rb.dumps(ram / "with")
    rb.dumps(ram / "without", prefetch="drop")
    other = make(3)
    with pytest.raises(RuntimeError, match="expected a buffer with prefetch=2"):
        other.loads(ram / "with")
    assert len(other) == 0
    for depth in (0, 3):
        other = make(depth)
        other.loads(ram / "without")
        assert other.state_dict()["_prefetch_state"] is None
        assert len(other.sample()["step"]) == 4
        other.close()
    with pytest.raises(ValueError, match="prefetch: expected 'save' or 'drop', got 'x'"):
        rb.dumps(ram / "x", prefetch="x")
    assert settled(ram) == ["with", "without"]
    rb.close()


# ---- components, and where rows go -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dumps", "dump", "save"])
def test_components_alone(name, ram):
    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), writer=TensorDictMaxValueWriter("score"), n=L + 5)
    rb.update_priority(torch.arange(5), torch.rand(5))
    rb.dumps(ram / "whole")
    load = {"dumps": "loads", "dump": "load", "save": "load"}[name]
    for part in ("storage", "sampler", "writer"):
        component = getattr(rb, part)
        getattr(component, name)(ram / part)
        getattr(component, name)(str(ram / part))  # replaces it
        assert verify(ram / part).good
        for folder in (ram / part, ram / "whole" / part):
            other = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), writer=TensorDictMaxValueWriter("score"))
            if part == "sampler":
                other.storage.loads(ram / "storage")
            getattr(getattr(other, part), load)(folder)
            if part == "storage":
                assert bits(list(other.storage)) == bits(list(rb.storage))
                assert other.write_count == rb.write_count
            assert part != "sampler" or bits(other.sampler.state_dict()) == bits(rb.sampler.state_dict())
    with pytest.raises(IncompatibleCheckpoint, match="expected a sampler of type PrioritizedSampler"):
        rb.sampler.loads(ram / "whole" / "writer")
    assert settled(ram) == ["sampler", "storage", "whole", "writer"]


def test_a_subclass_loads_what_it_dumped(ram):
    class Mine(LazyTensorStorage):
        pass

    rb, other = buffer(Mine(L), n=5), buffer(Mine(L))
    rb.dumps(ram / "d")
    other.loads(ram / "d")
    assert contents(other) == contents(rb)


def test_tensordict_reads_the_rows(ram):
    rb = buffer(n=L + 2)
    rb.dumps(ram / "d")
    read = TensorDict.load_memmap(ram / "d" / "storage")
    assert read.batch_size == (L,)
    assert bits(read.to_tensordict()) == bits(rb[:].exclude("index", "index_generation"))
    assert verify(ram / "d").good


@pytest.mark.parametrize("first", ["ram", "memmap", "full"])
@pytest.mark.parametrize("then", ["ram", "memmap", "full"])
def test_from_one_memory_to_another(first, then, ram):
    rb, other = (buffer(STORAGES[kind](), PrioritizedSampler(L, 0.7, 0.5)) for kind in (first, then))
    rb.extend(rows(L + 5))
    rb.update_priority(torch.arange(5), torch.rand(5))
    for way in (Through(ram).dumps, Through(ram).series):
        way(rb, other)
        assert contents(other) == contents(rb)
    rb.close()
    other.close()


def test_a_directory_is_dumped_and_loaded_into(ram):
    rb = buffer(LazyMemmapStorage(L, scratch_dir=ram / "one"), PrioritizedSampler(L, 0.7, 0.5), n=L + 3)
    rb.update_priority(torch.arange(5), torch.rand(5))
    live = {path.stat().st_ino for path in (ram / "one").rglob("*")}
    Through(ram).series(rb, rb)
    rb.dumps(ram / "d")
    assert not live & {path.stat().st_ino for path in (ram / "d").rglob("*")}, "a dump is never live memory"
    assert not live & {path.stat().st_ino for path in (ram / "series").rglob("*")}
    expected = bits(rb[:].exclude("index_generation")), bits(rb.sampler.state_dict())
    rb.extend(rows(5, 100))
    rb.close()
    other = buffer(LazyMemmapStorage(L, scratch_dir=ram / "two"), PrioritizedSampler(L, 0.7, 0.5))
    other.loads(ram / "d")
    other.close()
    again = ReplayBuffer.open(ram / "two")
    assert (bits(again[:].exclude("index_generation")), bits(again.sampler.state_dict())) == expected
    again.close()


def test_every_dtype_and_key(ram):
    longest = "k" * 200

    def data(n=5):
        return TensorDict(
            {
                "half": torch.rand(n).half(),
                "brain": torch.rand(n, 2).bfloat16(),
                "flag": torch.rand(n) > 0.5,
                "nothing": torch.zeros(n, 0),
                "a/b.c ü%": {"..": torch.rand(n, dtype=torch.complex64), "日本": torch.arange(n).to(torch.uint16)},
                longest: torch.rand(n, 1, 1, dtype=torch.complex128),
                "words": (torch.arange(n) - 2).view(torch.uint64),
            },
            batch_size=[n],
        )

    for way in (Through(ram).dumps, Through(ram).series):
        rb, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(7), batch_size=2) for _ in range(2))
        rb.extend(data())
        rb.extend(data(4))
        way(rb, other)
        assert bits(other[:].exclude("index")) == bits(rb[:].exclude("index"))
    assert verify(ram / "dump").good
    assert verify(ram / "series").good
    assert all(ram in path.resolve().parents for path in ram.rglob("*"))


def test_lists(ram):
    given = items()
    for way in (Through(ram).dumps, Through(ram).series):
        rb, other = (ReplayBuffer(storage=ListStorage(20), collate_fn=list) for _ in range(2))
        rb.extend(given)
        way(rb, other)
        loaded = other[:]
        assert [type(item) for item in loaded] == [type(item) for item in given]
        assert bits(loaded) == bits([*given[:-1], given[-1].resolve_conj()])


def test_no_descriptor_stays_open(ram):
    rb, other = buffer(n=5), buffer()
    other.loads(_dumped(rb, ram / "d"))
    checkpointer = Checkpointer(ram / "s", rb)
    checkpointer.save(1)
    (ram / "broken").mkdir()
    _dumped(rb, ram / "broken")
    (ram / "broken" / "writer" / "sums.bin").unlink()
    settled(ram)
    before = os.listdir("/proc/self/fd")
    for step in range(2, 4):
        other.loads(ram / "d")
        checkpointer.save(step)
        checkpointer.restore()
        with pytest.raises(CorruptCheckpoint):
            other.loads(ram / "broken")
        with pytest.raises(IncompatibleCheckpoint):
            buffer(LazyTensorStorage(L + 1)).loads(ram / "d")
        rb.storage.dumps(ram / "part")
        other.storage.loads(ram / "part")
    settled(ram)
    assert os.listdir("/proc/self/fd") == before


def _dumped(rb, path):
    rb.dumps(path)
    return path


# ---- where dumps go --------------------------------------------------------------------------------------------------------


def test_one_dump_over_another(ram):
    rb, other = buffer(n=5), buffer()
    (ram / "empty").mkdir()
    rb.dumps(ram / "empty")
    rb.dumps(ram / "new" / "deep")
    for target in ("empty", "new/deep"):
        old = os.open(ram / target, os.O_RDONLY)
        rb.extend(rows(3, 40))
        rb.dumps(str(ram / target))
        settled(ram)
        assert os.listdir(old) == [], "what was there is another folder, and is gone"
        os.close(old)
        other.loads(str(ram / target))
        assert contents(other) == contents(rb)
    assert settled(ram) == ["empty", "new"]


@pytest.mark.parametrize("kind", ["file", "folder", "store", "component", "series"])
def test_what_is_no_dump_is_left_alone(kind, ram):
    rb, target = buffer(n=5), ram / "d"
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
        (target / "mine").write_text("x")
    elif kind == "store":
        store = buffer(LazyMemmapStorage(L, scratch_dir=target), n=3)
        store.close()
    elif kind == "series":
        Checkpointer(target, rb).save(1)
        target = next(target.glob("ckpt-*"))
    else:
        target = ram
        (ram / "sampler").mkdir()
    before = tree(ram)
    with pytest.raises(FileExistsError, match="expected a free name, an empty folder or a dump to replace"):
        rb.dumps(target)
    assert tree(ram) == before
    rb.extend(rows(1))


# ---- what cannot be saved, or loaded ---------------------------------------------------------------------------------------


class Odd(torch.nn.Module):
    """A transform whose state cannot be stored."""

    def forward(self, data):
        return data

    def get_extra_state(self):
        return {1, 2}

    def set_extra_state(self, state):
        pass


def _of_texts():
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    rb.extend([torch.zeros(1), "text"])
    return rb


UNSTORABLE = {
    "items": (_of_texts, "item 1"),
    "sampler": (lambda: buffer(sampler=Counting(object()), n=2), r"_sampler\['deep'\]\[0\]\['held'\]"),
    "reserved": (lambda: buffer(sampler=Counting({"$array": 0}), n=2), r"sampler\['deep'\]\[0\]\['held'\].*'\$'"),
    "sparse": (lambda: buffer(sampler=Counting(torch.eye(2).to_sparse()), n=2), r"_sampler\['deep'\]\[0\]\['held'\]"),
    "dtype": (
        lambda: buffer(sampler=Counting(torch.zeros(2).to(torch.float8_e5m2)), n=2),
        r"sampler\['deep'\]\[0\]\['held'\]: expected a dense tensor of .*float8",
    ),
    "transform": (lambda: buffer(transform=Odd(), n=2), r"transform 0\['_extra_state'\]"),
}


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_state_that_cannot_be_stored(kind, ram):
    make, way = UNSTORABLE[kind]
    rb, good = make(), buffer(n=3)
    good.dumps(ram / "old")
    good.close()
    before = tree(ram)
    for target in ("old", "new"):
        with pytest.raises(TypeError, match=way):
            rb.dumps(ram / target)
    assert tree(ram) == before
    checkpointer = Checkpointer(ram / "series", rb)
    with pytest.raises(TypeError, match=way):
        checkpointer.save(1)
    assert list((ram / "series").rglob("*.bin")) == []
    assert all(entry.problem for entry in checkpointer.list())
    rb.extend(rows(2) if kind != "items" else [torch.zeros(1)])


def _one(**more):
    return buffer(**{"sampler": PrioritizedSampler(2 * L, 0.7, 0.5), **more})


OTHERS = {
    "capacity": lambda: _one(storage=LazyTensorStorage(L + 1)),
    "lanes": lambda: _one(storage=LazyTensorStorage(L, lanes=2)),
    "columns": lambda: _one(storage=LazyTensorStorage(L, ndim=2)),
    "list": lambda: _one(storage=ListStorage(L)),
    "alpha": lambda: _one(sampler=PrioritizedSampler(L, 0.6, 0.5)),
    "eps": lambda: _one(sampler=PrioritizedSampler(L, 0.7, 0.5, eps=0.1)),
    "sampler": lambda: _one(sampler=RandomSampler()),
    "writer": lambda: _one(writer=TensorDictMaxValueWriter("score")),
    "buffer": lambda: ReplayBuffer(storage=LazyTensorStorage(L), sampler=PrioritizedSampler(L, 0.7, 0.5), batch_size=4),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_buffer_of_another_kind_refuses(kind, used, ram):
    rb = _one()
    rb.extend(rows(5))
    through = Through(ram)
    through.dumps(rb, _one())
    through.series(rb, _one())
    other = OTHERS[kind]()
    if used:
        other.extend(rows(4, 60).reshape(1, 4) if kind == "columns" else rows(4, 60), lane=0)
    elif kind in ("alpha", "eps"):
        pytest.skip("there are no priorities yet")
    before, saved = bits(other.state_dict()), tree(ram)
    loads = [lambda: other.loads(ram / "dump")]
    if kind not in ("capacity", "lanes"):  # to which a series deals itself out: tests/ranks
        loads.append(Checkpointer(ram / "series", other).restore)
    for load in loads:
        with pytest.raises(IncompatibleCheckpoint):
            load()
        assert bits(other.state_dict()) == before
        assert used or kind == "list" or not other.storage.initialized, "nothing was allocated"
    assert tree(ram) == saved


def test_another_schema_is_refused(ram):
    rb = buffer(n=5)
    rb.dumps(ram / "d")
    for changed in (
        rows(3).set("more", torch.zeros(3)),
        rows(3).exclude("obs"),
        rows(3).set("obs", torch.zeros(3, 4)),
        rows(3).set("obs", torch.zeros(3, 3).double()),
    ):
        other = buffer()
        other.extend(changed)
        before = bits(other.state_dict())
        with pytest.raises(IncompatibleCheckpoint, match="schema"):
            other.loads(ram / "d")
        assert bits(other.state_dict()) == before


@pytest.mark.parametrize("path", ["nothing", "file", "folder", "part"])
def test_what_is_no_checkpoint(path, ram):
    (ram / "file").write_text("x")
    (ram / "folder").mkdir()
    rb = buffer(n=3)
    rb.storage.dumps(ram / "part")
    before = bits(rb.state_dict()), tree(ram)
    with pytest.raises(CorruptCheckpoint, match=path):
        rb.loads(ram / path)
    assert (bits(rb.state_dict()), tree(ram)) == before


# ---- the folder belongs to nobody ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["ram", "memmap", "list"])
def test_training_after_a_load_changes_no_byte(storage, ram):
    both, through = twins(storage, "priority"), Through(ram)
    both.run(20)
    both.swap(through=through.dumps)
    both.swap(through=through.series)
    before = tree(ram)
    both.run(60)
    both.both(lambda rb: rb.empty())
    both.close()
    assert tree(ram) == before


#: What happened, while somebody looks. A hook cannot be taken out again.
_events = []
_watching = threading.Event()


def _audit(event, arguments):
    if _watching.is_set() and event in ("pickle.find_class", "exec", "compile", "import", "marshal.loads"):
        _events.append((event, str(arguments[0])[:80]))


def test_no_pickle(ram, monkeypatch):
    """Nothing is pickled, unpickled or executed, and no file looks like a pickle or an archive."""
    both, through = twins("ram", "priority", "best"), Through(ram)
    both.run(20)
    other = both._make()
    through.dumps(both.pair[0], other)  # whatever is imported late is there now
    through.series(both.pair[0], other)

    def never(*_, **__):
        raise AssertionError("pickled")

    for module, name in ((pickle, "dumps"), (pickle, "loads"), (pickle, "load"), (pickle, "dump")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(torch, "save", never)
    monkeypatch.setattr(torch, "load", never)
    sys.addaudithook(_audit)
    _watching.set()
    try:
        through.dumps(both.pair[0], other)
        through.series(both.pair[0], other)
        assert _events == []
        with pytest.raises(AssertionError, match="pickled"):
            pickle.loads(b"")
        pickle.Unpickler(io.BytesIO(b"cbuiltins\nlist\n.")).load()
        assert ("pickle.find_class", "builtins") in _events, "a negative control"
    finally:
        _watching.clear()
        _events.clear()
    files = [path for path in ram.rglob("*") if path.is_file()]
    assert len(files) > 40
    for path in files:
        head = path.read_bytes()[:4]
        assert head[:2] not in {b"\x80" + bytes([protocol]) for protocol in range(1, 6)} | {b"PK"}, path
        assert path.suffix in (".bin", ".json", ".memmap", ""), path


# ---- others that write -----------------------------------------------------------------------------------------------------


def marked(position, lane, n=3):
    """Rows that know their place: whoever finds others between them sees a tear."""
    at = torch.arange(position, position + n)
    return TensorDict({"at": at, "lane": torch.full((n,), lane), "copy": at[:, None].expand(n, 500).clone()}, [n])


def check_marked(rb, *, least=0):
    """Every row is whole, and each lane has its newest ones, in order."""
    length = rb.storage.max_size // rb.lanes
    lanes = rb.storage.state_dict()["lanes"]
    data = rb[:]
    assert (data["copy"] == data["at"][:, None]).all()
    for lane in range(rb.lanes):
        position, live = lanes[lane, :2].tolist()
        assert position % 3 == 0, "no write by half"
        assert live == min(position, length)
        assert sorted(data["at"][data["lane"] == lane].tolist()) == list(range(position - live, position))
        assert position >= least
    return lanes[:, 0]


class Writers:
    """Processes that write to a lane each, until they are killed."""

    def __init__(self, rb, lanes):
        self.pids = [self._start(rb, lane) for lane in range(lanes)]

    def _start(self, rb, lane):
        pid = os.fork()
        if pid:
            return pid
        try:
            position = 0
            while True:
                rb.extend(marked(position, lane), lane=lane)
                position += 3
        finally:
            os._exit(1)

    def kill(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def shared_buffer(lanes=2, length=64):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(lanes * length, lanes=lanes), batch_size=4)
    return rb.share()


def test_dumps_while_two_processes_write(ram):
    """They wait meanwhile: a dump is of one instant, and exact."""
    rb = shared_buffer()
    writers = Writers(rb, 2)
    try:
        while len(rb) != 128:
            time.sleep(0.001)
        for i in range(6):
            rb.dumps(ram / "d")
            other = TensorDictReplayBuffer(storage=LazyTensorStorage(128, lanes=2))
            other.loads(ram / "d")
            before = check_marked(other)
            assert verify(ram / "d").good, i
            while not (rb.storage.memory.lane_states()[:, 0] > before).all():  # they go on in between
                time.sleep(0.001)
    finally:
        writers.kill()
    rb.close()


def test_writers_wait_while_it_is_dumped(ram, monkeypatch):
    rb = buffer(n=5)
    threads = []

    def late(**_):
        threads.append(threading.Thread(target=rb.extend, args=(rows(2, 100),)))
        threads[0].start()
        threads[0].join(0.1)
        assert threads[0].is_alive()
        return write(**_)

    write = rb.storage.state_without_rows
    monkeypatch.setattr(rb.storage, "state_without_rows", late)
    rb.dumps(ram / "d")
    threads[0].join()
    other = buffer()
    other.loads(ram / "d")
    assert (len(other), len(rb)) == (5, 7)


@pytest.mark.parametrize("where", ["buffer", "storage"])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_writers_go_on_while_many_rows_are_dumped(ram, monkeypatch, caplog, kind, where):
    """Rows that they overwrite before all fields were copied are left out, and counted; all others are as they were."""
    monkeypatch.setattr("engram.storages.tensor_state._COPIED", 0)
    rb = TensorDictReplayBuffer(storage=kind(128, lanes=2), batch_size=4)
    for lane in range(2):
        for position in range(0, 90, 3):  # over the end of the ring
            rb.extend(marked(position, lane), lane=lane)
    before = {(lane, position) for lane in range(2) for position in range(26, 90)}
    fields, write = [], rows_module.PartWriter.file

    def file(part, name, *more, **how):
        if name.endswith(".memmap"):
            fields.append(name)
            if len(fields) == 2:  # one is copied, the others are not
                writer = threading.Thread(target=rb.extend, args=(marked(90, 1),), kwargs={"lane": 1})
                writer.start()
                writer.join(20)
                assert not writer.is_alive()
        return write(part, name, *more, **how)

    monkeypatch.setattr(rows_module.PartWriter, "file", file)
    (rb if where == "buffer" else rb.storage).dumps(ram / "d")
    monkeypatch.undo()
    assert len(fields) > 1
    assert "dumps: left out, as others changed them before they were copied: 3 rows" in caplog.text
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(128, lanes=2))
    if where == "buffer":
        assert verify(ram / "d").good
        other.loads(ram / "d")
    else:
        other.storage.loads(ram / "d")
    found = other[:]
    assert {(lane, position) for lane, position in zip(found["lane"].tolist(), found["at"].tolist(), strict=True)} == (
        before - {(1, 26), (1, 27), (1, 28)}
    )
    assert (found["copy"] == found["at"][:, None]).all()


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_process_killed_while_it_dumps_holds_nobody_up(share, ram):
    rb = shared_buffer()
    rb.extend(marked(0, 0), lane=0)
    calls = counted(lambda: rb.dumps(ram / "count")).calls
    assert killed_at(int(calls * share), lambda: rb.dumps(ram / "d"))
    started = time.monotonic()
    rb.extend(marked(3, 0), lane=0)
    assert time.monotonic() - started < 1.5, "a death is noticed within a second"
    rb.dumps(ram / "d")
    assert settled(ram) == ["count", "d"]
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(128, lanes=2))
    other.loads(ram / "d")
    check_marked(other)
    rb.close()
