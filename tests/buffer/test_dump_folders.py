"""Where dumps go, what cannot be dumped or loaded, and who else writes."""

import io
import os
import pickle
import sys
import threading
import time

import pytest
import torch

from engram import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.checkpoint.checkpointer import Checkpointer
from engram.saved import part_writer
from engram.saved.inspection import verify
from tests.buffer.dumped import Through, Writers, check_marked, marked
from tests.buffer.states import Counting, L, buffer, twins
from tests.saved.checkpoint_folders import tree
from tests.saved.system_calls import counted, killed_at, settled
from tests.twins import bits, contents, rows
from tests.waiting import Limit

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size", "ignore:.* has no priorities")


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


def test_the_storage_that_is_written_to_is_never_the_dump(tmp_path):
    rb = buffer(LazyMemmapStorage(L, scratch_dir=tmp_path / "dump" / "storage"), n=3)
    before = rb[:]
    with pytest.raises(FileExistsError, match="expected a free name, an empty folder or a dump to replace"):
        rb.dumps(tmp_path / "dump")
    rb.extend(rows(1))
    assert len(rb) == len(before) + 1


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
        lambda: buffer(sampler=Counting(torch.zeros(2).to(torch.float8_e8m0fnu)), n=2),
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
    elif kind == "eps":
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
    fields, write = [], part_writer.PartWriter.file

    def file(part, name, *more, **how):
        if name.endswith(".memmap"):
            fields.append(name)
            if len(fields) == 2:  # one is copied, the others are not
                writer = threading.Thread(target=rb.extend, args=(marked(90, 1),), kwargs={"lane": 1})
                writer.start()
                writer.join(60)
                assert not writer.is_alive()
        return write(part, name, *more, **how)

    monkeypatch.setattr(part_writer.PartWriter, "file", file)
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
    limit = Limit(20)
    rb.extend(marked(3, 0), lane=0)
    limit.check("a death is noticed")
    rb.dumps(ram / "d")
    assert settled(ram) == ["count", "d"]
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(128, lanes=2))
    other.loads(ram / "d")
    check_marked(other)
    rb.close()
