"""Closed buffers and storages: every use of them raises, whatever the class can do, and other handles go on unharmed."""

import copy
import pickle
import threading

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from engram import (
    DeviceLoader,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram._support.closing import end
from engram.checkpoint.checkpointer import Checkpointer
from engram.checkpoint.save import SaveAttempt
from tests.fresh import run, start

pytestmark = pytest.mark.filterwarnings("ignore:.* has no priorities")

ROWS = 24


def data(n=ROWS, first=0):
    steps = torch.arange(first, first + n)
    done = (steps % 4 == 3).unsqueeze(-1)
    next_ = TensorDict({"done": done, "reward": torch.ones(n, 1)}, [n])
    return TensorDict({"a": steps, "frame": steps.float().unsqueeze(-1), "episode": steps // 4, "next": next_}, [n])


STORAGES = {
    "list": lambda _: ListStorage(ROWS),
    "RAM": lambda _: LazyTensorStorage(ROWS),
    "given": lambda _: TensorStorage(data()),
    "temporary": lambda _: LazyMemmapStorage(ROWS),
    "directory": lambda folder: LazyMemmapStorage(ROWS, scratch_dir=folder / "store"),
}
SAMPLERS = {
    "uniform": RandomSampler,
    "pass": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(ROWS, 1.0, 0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices-pass": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "priority-slices": lambda: PrioritizedSliceSampler(ROWS, 1.0, 0.5, slice_len=2),
    "n-step": lambda: NStep(RandomSampler(), 2, 0.9),
    "stack": lambda: FrameStack(PrioritizedSampler(ROWS, 1.0, 0.5), 2, -1, ["frame"]),
}
#: Of lists nothing but single items is drawn.
OF_LISTS = ("uniform", "pass", "priority")
KINDS = [("directory", sampler) for sampler in SAMPLERS]
KINDS += [(storage, sampler) for storage in STORAGES if storage != "directory" for sampler in ("uniform", "priority")]


def filled(storage, sampler, folder, **more):
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](folder), sampler=SAMPLERS[sampler](), batch_size=4, **more)
    if storage != "given":
        rb.extend(data())
    return rb


#: What is asked of a buffer, with arguments that an open one takes. Bound before it is closed, and called then.
CALLS = {
    "add": lambda rb: (data(1)[0],),
    "extend": lambda rb: (data(2),),
    "sample": lambda rb: (),
    "can_sample": lambda rb: (),
    "next": lambda rb: (),
    "empty": lambda rb: (),
    "on_lane": lambda rb: (0,),
    "appender": lambda rb: (0,),
    "end_trajectory": lambda rb: (0,),
    "record": lambda rb: (gymnasium.make("CartPole-v1"),),
    "observe": lambda rb: (None, None),
    "moved": lambda rb: (),
    "update_priority": lambda rb: (torch.tensor([0, 1]), torch.ones(2)),
    "update_tensordict_priority": lambda rb: (TensorDict({"index": torch.arange(2), "td_error": torch.ones(2)}, [2]),),
    "remove": lambda rb: (torch.tensor([0]),),
    "mark_update": lambda rb: (torch.tensor([0]),),
    "index_keys": lambda rb: ("a",),
    "rows_of": lambda rb: ([1],),
    "open_row": lambda rb: (),
    "unsealed": lambda rb: (),
    "read_all_in_order": lambda rb: (),
    "write_all": lambda rb: (data(),),
    "add_field": lambda rb: ("added", torch.zeros(2)),
    "set_": lambda rb: ("a", torch.zeros(ROWS, dtype=torch.int64)),
    "set_at_": lambda rb: ("a", torch.zeros(1, dtype=torch.int64), [0]),
    "update_": lambda rb: (TensorDict({"a": torch.zeros(ROWS, dtype=torch.int64)}, [ROWS]),),
    "append_transform": lambda rb: (lambda td: td,),
    "insert_transform": lambda rb: (0, lambda td: td),
    "set_storage": lambda rb: (LazyTensorStorage(ROWS),),
    "set_sampler": lambda rb: (RandomSampler(),),
    "set_writer": lambda rb: (type(rb.writer)(),),
    "set_rng": lambda rb: (torch.Generator(),),
    "share": lambda rb: (),
    "state_dict": lambda rb: (),
    "load_state_dict": lambda rb: (rb.state_dict(),),
    "dumps": lambda rb: ("never made",),
    "loads": lambda rb: ("never made",),
    "stats": lambda rb: (),
    "health": lambda rb: (),
    "explain": lambda rb: (0,),
    "count_usage": lambda rb: (),
    "limit": lambda rb: (None,),
    "synchronize": lambda rb: (),
    "shutdown": lambda rb: (),
}
#: What is no use of rows: they have their tests, or do nothing, or are of the class.
OTHERS = {
    "assemble",
    "device_readable",
    "moved",
    "note",
    "start",
    "client",
    "clients",
    "as_remote",
    "open",
    "open_arguments",
    "open_or_create",
    "connect",
    "follow",
    "update_if_present",  # takes names, as the other one: below
    "submit_update_if_present",
}
OTHERS |= {"dump", "save", "load"}  # other names of those above
#: What goes on.
GOES_ON = {"close", "closed", "storage", "sampler", "writer"}
USES = {
    "len": len,
    "bool": bool,
    "iter": iter,
    "in": lambda rb: 3 in rb,
    "rb[i]": lambda rb: rb[0],
    "rb[:]": lambda rb: rb[:],
    "rb[key]": lambda rb: rb["a"],
    "rb[i] =": lambda rb: rb.__setitem__(0, data(1)[0]),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


def public(thing):
    return {name for name in dir(type(thing)) if not name.startswith("_")}


def test_all_methods_are_in_the_table():
    """A new one must be called here after closing, or be named among those that do not use rows."""
    methods = {
        name for name in public(filled("RAM", "uniform", None)) if callable(getattr(TensorDictReplayBuffer, name))
    }
    assert methods - {"close"} == set(CALLS) | OTHERS


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("storage", "sampler"), KINDS)
def test_every_use_of_a_closed_buffer_raises(storage, sampler, prefetch, tmp_path):
    rb = filled(storage, sampler, tmp_path, prefetch=prefetch)
    rb.sample()
    view, names = rb[:], public(rb)
    rb.dumps(tmp_path / "dump")
    arguments = {name: of(rb) for name, of in CALLS.items()} | {"loads": (tmp_path / "dump",)}
    bound = {name: getattr(rb, name) for name in CALLS}
    batches, patching, submitting = iter(rb), rb.update_if_present, rb.submit_update_if_present
    next(batches)
    rb.close()
    rb.close()
    assert rb.closed
    for name, use in USES.items():
        with pytest.raises(RuntimeError, match="closed"):
            pytest.fail(f"{name} gave {use(rb)!r}")
    for name in names - GOES_ON:
        with pytest.raises(RuntimeError, match=f"^{name}: the buffer was closed"):
            pytest.fail(f"{name} is {getattr(rb, name)!r}")
    for name, method in bound.items():
        with pytest.raises(RuntimeError, match="closed"):
            pytest.fail(f"{name} gave {method(*arguments[name])!r}")
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    with pytest.raises(RuntimeError, match="closed"):
        patching(index=[0], generation=[1], patch={"a": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="closed"):
        submitting(index=[0], generation=[1], patch={"a": torch.zeros(1)})
    assert repr(rb).startswith("closed TensorDictReplayBuffer(size=24")
    assert rb.storage.closed
    if storage != "list":
        assert view["a"].tolist() == list(range(ROWS))


@pytest.mark.parametrize("close", ["buffer", "storage"])
@pytest.mark.parametrize(("storage", "sampler"), KINDS)
def test_components_taken_before_raise_too(storage, sampler, close, tmp_path):
    rb = filled(storage, sampler, tmp_path)
    rb.sample()
    kept, drawn, writer, extent = rb.storage, rb.sampler, rb.writer, rb.storage.extent()
    texts = repr(drawn), repr(writer)
    (rb if close == "buffer" else kept).close()
    for name in public(kept) - {"close", "closed", "cleanup", "scratch_dir", "store"}:
        with pytest.raises(RuntimeError, match=f"^{name}: the storage was closed"):
            pytest.fail(f"{name} is {getattr(kept, name)!r}")
    for name, use in USES.items():
        with pytest.raises(RuntimeError, match="closed"):
            pytest.fail(f"{name} gave {use(kept)!r}")
    uses = {
        "sample": lambda: drawn.sample(kept, 4),
        "can_sample": lambda: drawn.can_sample(kept, 4),
        "add": lambda: writer.add(data(1)[0]),
        "extend": lambda: writer.extend(data(2)),
        "write_count": lambda: writer.write_count,
    }
    if drawn.prioritized:
        uses |= {
            "update_priority": lambda: drawn.update_priority(torch.tensor([0]), 5.0),
            "mark_update": lambda: drawn.mark_update(torch.tensor([0])),
            "state_dict": drawn.state_dict,
        }
    if sampler.startswith("priority"):
        uses["draw"] = lambda: drawn.draw(extent, 4, 1)
    for name, use in uses.items():
        with pytest.raises(RuntimeError, match="closed"):
            pytest.fail(f"{name} gave {use()!r}")
    assert (repr(drawn), repr(writer)) == texts
    assert "closed" in repr(kept)
    rb.close()
    assert "TensorDictReplayBuffer" in repr(rb)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_another_handle_of_the_store_goes_on_unharmed(sampler, tmp_path):
    """The closed one changes neither rows nor priorities, of this process or another."""
    rb = filled("directory", sampler, tmp_path)
    rb.update_priority(torch.arange(ROWS), 0.5)
    other = ReplayBuffer.open(tmp_path / "store")
    watching = start(
        """
        import os, time
        from engram import ReplayBuffer
        rb = ReplayBuffer.open(folder)
        print("open")
        while not os.path.exists(go):
            time.sleep(0.003)
        print(rb.write_count, rb[:]["a"].sum().item(), rb.sample().shape[0])
        """,
        folder=str(tmp_path / "store"),
        go=str(tmp_path / "go"),
    ).until("open")
    mine, index = rb.sampler, rb.sample(return_info=True)[1]["index"]
    update, extend = rb.update_priority, rb.extend
    before = other.state_dict()
    rb.close()
    for write in (lambda: update(index, 9.0), lambda: rb.update_priority(index, 9.0), lambda: extend(data(2))):
        with pytest.raises(RuntimeError):
            write()
    if mine.prioritized:
        with pytest.raises(RuntimeError, match="closed"):
            mine.update_priority(torch.tensor([0]), 9.0)
    after = other.state_dict()
    assert str({k: v for k, v in before.items() if k != "_default_rng"}) == str(
        {k: v for k, v in after.items() if k != "_default_rng"}
    )
    other.extend(data(2, first=100))
    other.update_priority(torch.arange(2), 3.0)
    assert other.sample().shape == (4,)
    (tmp_path / "go").touch()
    assert watching.wait() == 0
    assert watching.out.split()[1:] == [str(ROWS + 2), str(sum(range(2, ROWS)) + 201), "4"]
    other.close()


def test_the_last_of_several_buffers_closes_their_storage(tmp_path):
    storage = LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "store")
    rb, other = (TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(ROWS, 1.0, 1.0)) for _ in "ab")
    rb.extend(data())
    mine = rb.sampler
    rb.close()
    assert not storage.closed
    with pytest.raises(RuntimeError, match="closed"):
        rb.storage  # noqa: B018 - through which rows could be written
    other.update_priority(torch.tensor([0]), 5.0)
    assert len(other.sample(8)) == 8
    assert repr(mine) == repr(other.sampler)
    other.close()
    assert storage.closed
    assert (
        run("from engram import ReplayBuffer\nprint(len(ReplayBuffer.open(folder)))", folder=str(tmp_path / "store"))
        == "24"
    )


def test_one_sampler_of_two_buffers():
    sampler = PrioritizedSampler(ROWS, 1.0, 1.0)
    one, two = (TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, batch_size=4) for _ in "ab")
    one.extend(data())
    two.extend(data())
    two.update_priority(torch.arange(ROWS), (torch.arange(ROWS) == 5).float())
    one.sample()
    one.close()
    assert two.sample()["a"].unique().tolist() == [5]
    with pytest.raises(RuntimeError, match="closed"):
        one.sample()


@pytest.mark.parametrize("storage", ["RAM", "temporary", "directory"])
def test_a_save_that_was_begun_is_finished(storage, tmp_path, monkeypatch):
    rb = filled(storage, "priority", tmp_path)
    checkpointer = Checkpointer(tmp_path / "series", rb)
    go, write = threading.Event(), SaveAttempt._write

    def late(*arguments):
        assert go.wait(60)
        return write(*arguments)

    monkeypatch.setattr(SaveAttempt, "_write", late)
    handle = checkpointer.save(1, wait=False)
    rb.close()
    go.set()
    assert handle.wait().steps == ROWS
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.save(2)
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.restore()
    other = TensorDictReplayBuffer(
        storage=LazyTensorStorage(ROWS), sampler=PrioritizedSampler(ROWS, 1.0, 0.5), batch_size=4
    )
    Checkpointer(tmp_path / "series", other).restore()
    assert other[:]["a"].tolist() == list(range(ROWS))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loaders_of_a_closed_buffer(prefetch):
    rb = filled("RAM", "priority", None, prefetch=prefetch)
    loader = DeviceLoader(rb, "cpu")
    batches = iter(loader)
    next(batches)
    rb.close()
    for use in (
        lambda: next(batches),
        lambda: next(iter(loader)),
        lambda: loader.update_priority(torch.tensor([0]), torch.ones(1)),
        lambda: loader.update_tensordict_priority(
            TensorDict({"index": torch.arange(2), "td_error": torch.ones(2)}, [2])
        ),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("sampler", ["uniform", "pass", "priority", "priority-slices"])
@pytest.mark.parametrize("storage", ["list", "RAM", "temporary"])
def test_closed_while_other_threads_are_at_it(storage, sampler, prefetch, tmp_path):
    if storage == "list" and sampler not in OF_LISTS:
        pytest.skip("lists have no windows")
    rb = filled(storage, sampler, tmp_path, prefetch=prefetch)
    ended, under_way = {}, [threading.Event() for _ in range(3)]

    def use(i, what):
        try:
            while True:
                what()
                under_way[i].set()
        except RuntimeError as error:
            ended[i] = str(error)

    uses = [rb.sample, lambda: rb.extend(data(2)), lambda: rb.update_priority(torch.arange(4), torch.rand(4))]
    threads = [threading.Thread(target=use, args=one) for one in enumerate(uses)]
    for thread in threads:
        thread.start()
    for event in under_way:
        assert event.wait(60)
    rb.close()
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == [0, 1, 2]
    assert all("closed" in text for text in ended.values()), ended


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_before_anything_was_written(kind, tmp_path):
    for make in STORAGES.values():
        rb = kind(storage=make(tmp_path))
        rb.close()
        with pytest.raises(RuntimeError, match="closed"):
            rb.extend(data(2))
        with pytest.raises(RuntimeError, match="closed"):
            rb.storage.extent()
    assert not (tmp_path / "store").exists()


def test_classes_of_a_users_own(tmp_path):
    """Methods that a class adds refuse, too, and those that it has."""

    class Mine(TensorDictPrioritizedReplayBuffer):
        def __init__(self, **more):
            super().__init__(alpha=1.0, beta=1.0, **more)
            self.seen = 0

        def count(self):
            self.seen += 1
            return self.seen

        def __call__(self):
            return self.sample(2)

    rb = Mine(storage=LazyTensorStorage(ROWS))
    rb.extend(data())
    assert (rb.count(), len(rb())) == (1, 2)
    count = rb.count
    rb.close()
    assert isinstance(rb, Mine)
    for use in (rb, lambda: rb.count, lambda: rb._sampler):
        with pytest.raises(RuntimeError, match="the buffer was closed"):
            use()
    assert (rb.seen, count()) == (1, 2), "what is the user's own goes on"
    other = Mine(storage=LazyTensorStorage(ROWS))
    other.extend(data())
    assert other.count() == 1, "other objects of the class stay open"


def test_a_text_that_cannot_be_made():
    class Odd:
        def __repr__(self):
            raise ValueError("no")

    odd = Odd()
    end(odd, "it was closed.")
    assert repr(odd) == "closed Odd"
    assert odd.close() is None


def test_in_a_forked_child(tmp_path):
    out = run(
        """
        import os, torch
        from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
        for storage in (LazyMemmapStorage(5, scratch_dir=folder), LazyTensorStorage(5)):
            rb, closed = ReplayBuffer(storage=storage), ReplayBuffer(storage=LazyTensorStorage(5))
            rb.extend(torch.arange(3))
            closed.extend(torch.arange(3))
            closed.close()
            pid = os.fork()
            if pid == 0:
                rb.close()
                for one in (rb, closed):
                    try:
                        one.extend(torch.arange(3))
                    except RuntimeError as error:
                        assert "closed" in str(error)
                    else:
                        os._exit(1)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            rb.extend(torch.arange(2))
            print(len(rb))
        """,
        folder=str(tmp_path),
    )
    assert out.split()[-2:] == ["5", "5"]


def test_the_type_of_a_closed_buffer_makes_open_ones(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.close()
    with type(rb)(storage=LazyTensorStorage(4), batch_size=2) as made:
        assert made.extend(torch.arange(4)).tolist() == [0, 1, 2, 3]
        assert type(made) is ReplayBuffer
    assert made.closed
    with type(rb).open_or_create(tmp_path / "store", 4) as opened:
        opened.extend(torch.arange(4))
    with type(opened).open(tmp_path / "store") as again:
        assert again[:].tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="storag"):
        type(rb)(storag=LazyTensorStorage(4))


def test_a_user_s_own_attributes_go_on():
    class Mine(ReplayBuffer):
        def close(self):
            super().close()
            self.log.append("closed")

    rb = Mine(storage=LazyTensorStorage(4))
    rb.log = []
    rb.extend(torch.arange(3))
    rb.close()
    assert rb.log == ["closed"]
    assert not hasattr(rb, "nothing of that name")
    with pytest.raises(RuntimeError, match="was closed"):
        rb.sample(1)


def test_no_checkpointer_of_a_closed_buffer(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.close()
    with pytest.raises(RuntimeError, match="Checkpointer: buffer: expected an open"):
        Checkpointer(tmp_path, rb)
