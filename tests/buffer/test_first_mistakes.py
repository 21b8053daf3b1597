"""The mistakes of a first day: each is answered by a sentence with what was expected, what came, and what to do."""

import inspect
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import engram
from engram import (
    Checkpointer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

BUFFERS = [ReplayBuffer, TensorDictReplayBuffer, PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer]


def arguments_of(kind):
    return {"alpha": 0.6, "beta": 0.4} if "Prioritized" in kind.__name__ else {}


def filled(kind=ReplayBuffer, storage=None, **given):
    storage = LazyTensorStorage(20) if storage is None else storage
    rb = kind(storage=storage, **{"batch_size": 4, **arguments_of(kind), **given})
    rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
    return rb


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize(
    ("size", "said"),
    [
        (4.0, "expected an int, got float. Write 4."),
        (4.5, "expected an int, got float."),
        (np.float32(4), "expected an int, got float32."),
        ("4", "expected an int, got str."),
        (True, "expected an int, got bool."),
        (np.True_, "expected an int, got bool"),
        (torch.tensor(4), "expected an int, got Tensor."),
        ([4], "expected an int, got list."),
    ],
)
def test_a_batch_size_that_is_no_int(kind, storage, size, said):
    for rb in (filled(kind, storage(20)), filled(kind, storage(20), batch_size=None)):
        with pytest.raises(TypeError, match=f"^batch_size: {re.escape(said)}"):
            rb.sample(size)


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.array])
def test_ints_of_numpy_are_taken_as_sizes(number):
    rb = filled(
        size=number(20), storage=LazyTensorStorage(number(20), lanes=number(1), ndim=number(1)), batch_size=number(4)
    )
    assert (rb.batch_size, type(rb.batch_size), rb.storage.max_size, type(rb.storage.max_size)) == (4, int, 20, int)
    assert len(rb.sample()["obs"]) == 4
    assert len(filled(batch_size=None).sample(number(2))["obs"]) == 2
    assert filled(prefetch=number(2)).prefetch == 2
    assert ListStorage(number(3)).max_size == 3
    assert LazyMemmapStorage(number(3)).max_size == 3
    assert PrioritizedSampler(number(20), 0.6, 0.4).max_size == 20
    assert SliceSampler(num_slices=number(2)).config()["num_slices"] == 2
    assert engram.plan(torch.zeros(3), number(7)).capacity == 7


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_batch_that_no_memory_holds(kind):
    rb = filled(kind, batch_size=None)
    with pytest.raises(MemoryError, match=r"batch of 10{12} rows of 12 bytes in one field.*fewer rows\.$"):
        rb.sample(10**12)
    for size in (1 << 62, 10**30):
        with pytest.raises((ValueError, MemoryError)):
            rb.sample(size)
    assert len(rb.sample(3)["obs"]) == 3


# ---- components ------------------------------------------------------------------------------------------------------


@pytest.fixture
def torchrl_component(monkeypatch):
    """Makes an object that looks like one of TorchRL's, of a module of that name."""

    def make(name, base=object):
        theirs = type(name, (base,), {"__module__": "torchrl.data.replay_buffers"})
        return theirs()

    return make


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("name", ["LazyTensorStorage", "LazyMemmapStorage", "ListStorage"])
def test_a_storage_of_torchrl(kind, name, torchrl_component):
    storage = torchrl_component(name)
    said = rf"^storage: expected a Storage .*got {{}}\. It is torchrl's {name}: from engram import {name}\.$"
    with pytest.raises(TypeError, match=said.format(name)):
        kind(storage=storage, **arguments_of(kind))
    with pytest.raises(TypeError, match=said.format(f"one that made a {name}")):
        kind(storage=lambda: storage, **arguments_of(kind))


def test_a_class_of_ones_own_above_torchrls(torchrl_component):
    base = type(torchrl_component("LazyTensorStorage"))
    with pytest.raises(TypeError, match="It is torchrl's LazyTensorStorage: from engram import LazyTensorStorage"):
        ReplayBuffer(storage=type("MyStorage", (base,), {})())


def test_samplers_and_writers_of_torchrl(torchrl_component):
    with pytest.raises(TypeError, match="It is torchrl's SliceSampler: from engram import SliceSampler"):
        filled(sampler=torchrl_component("SliceSampler"))
    with pytest.raises(TypeError, match="It is torchrl's SamplerEnsemble: use one of engram's"):
        filled(sampler=torchrl_component("SamplerEnsemble"))
    with pytest.raises(TypeError, match="It is torchrl's RoundRobinWriter: from engram import RoundRobinWriter"):
        filled(writer=torchrl_component("RoundRobinWriter"))


def test_torchrl_is_not_imported_for_that():
    program = """if True:
        import sys
        from engram import LazyTensorStorage, ReplayBuffer
        try:
            ReplayBuffer(LazyTensorStorage(5))
        except TypeError:
            print(any(name.startswith("torchrl") for name in sys.modules))
    """
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("storage", [LazyTensorStorage(5), LazyTensorStorage, ListStorage(5)])
def test_a_storage_in_place_of_the_size(kind, storage):
    name = kind.__name__
    said = rf"^{name}: size: expected an int, got \w+\. Pass the storage by name: {name}\(storage=…\)\.$"
    with pytest.raises(TypeError, match=said):
        kind(storage, **arguments_of(kind))


def test_what_is_no_storage_is_not_called_one():
    with pytest.raises(TypeError, match=r"^ReplayBuffer: size: expected an int, got float. Write 1000000\.$"):
        ReplayBuffer(1e6)
    with pytest.raises(TypeError, match=r"got dict\.$"):
        ReplayBuffer(storage={})


# ---- keywords --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *[
            (lambda kind=kind: kind(batchsize=4, **arguments_of(kind)), "'batchsize'. Did you mean batch_size?")
            for kind in BUFFERS
        ],
        (lambda: TensorDictReplayBuffer(priority_keys="a"), "'priority_keys'. Did you mean priority_key?"),
        (lambda: LazyTensorStorage(5, devise="cpu"), "'devise'. Did you mean device?"),
        (lambda: LazyMemmapStorage(5, scratchDir="x"), "'scratchDir'. Did you mean scratch_dir?"),
        (lambda: ListStorage(5, maxsize=5), "'maxsize'. Did you mean max_size?"),
        (lambda: SliceSampler(numslices=2), "'numslices'. Did you mean num_slices?"),
        (lambda: ReplayBuffer(zzz=1), "'zzz'."),
        (lambda: RoundRobinWriter(zzz=1), "'zzz'."),
        (lambda: RoundRobinWriter(track_generation=True), "'track_generation'. Did you mean track_generations?"),
        (lambda: ImmutableDatasetWriter(compileable=True), "'compileable'. Did you mean compilable?"),
        (lambda: ReplayBuffer.open("x", batchsize=3), "'batchsize'. Did you mean batch_size?"),
        (lambda: Checkpointer("x", ReplayBuffer(), every_step=3), "'every_step'. Did you mean every_steps?"),
    ],
)
def test_an_unknown_keyword(make, said):
    with pytest.raises(TypeError, match=f"unexpected argument {re.escape(said)}$"):
        make()


def test_a_misspelt_exponent():
    with pytest.raises(TypeError, match=r"expected alpha and beta, got alpha=0\.1, beta=None\. Did you mean beta\?$"):
        PrioritizedReplayBuffer(alpha=0.1, bta=0.2)


# ---- memory and folders ----------------------------------------------------------------------------------------------


def test_a_field_for_which_there_is_no_ram():
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    said = (
        r"field \('next', 'obs'\), 100 rows in RAM: expected 28\.1 PB, got [\d.]+ GB that are free\. "
        r"Use fewer rows, .*LazyMemmapStorage.*; engram\.plan\(row, capacity\)"
    )
    with pytest.raises(OSError, match=said):
        rb.extend({"next": {"obs": torch.zeros(1).expand(2, 1 << 46)}})
    assert not rb.storage.initialized
    with pytest.raises(OSError, match=r"row numbers in RAM: expected [\d.]+ [PE]B"):
        ReplayBuffer(storage=LazyTensorStorage(1 << 57)).extend(torch.zeros(2))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        with pytest.raises(
            NotADirectoryError, match="LazyMemmapStorage: scratch_dir: expected a folder, found a file: .*file'"
        ):
            LazyMemmapStorage(5, scratch_dir=tmp_path / place)
    for place, said in ((5, "got int"), (["x"], "got list")):
        with pytest.raises(TypeError, match=rf"^LazyMemmapStorage: scratch_dir: expected a path, {said}\.$"):
            LazyMemmapStorage(5, scratch_dir=place)
    with pytest.raises(ValueError, match="scratch_dir: expected a path without null characters"):
        LazyMemmapStorage(5, scratch_dir="a\0b")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system in which nobody can make a folder")
def test_a_file_system_that_takes_no_folder():
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir="/proc/engram/replay"))
    with pytest.raises(OSError, match="LazyMemmapStorage: scratch_dir='/proc/engram/replay' cannot be made: .*"):
        rb.extend(torch.zeros(2))


# ---- priorities ------------------------------------------------------------------------------------------------------


def test_another_key_of_priorities():
    rb = filled(TensorDictPrioritizedReplayBuffer)
    batch = rb.sample()
    batch["priority"] = torch.rand(4)
    said = r"expected the key 'td_error', got \[.*'priority'\]\. Other keys: TensorDictPrioritizedReplayBuffer\(priority_key=…\)\."
    with pytest.raises(KeyError, match=said):
        rb.update_tensordict_priority(batch)
    with pytest.raises(KeyError, match="expected the key 'index', got"):
        rb.update_tensordict_priority(TensorDict({"td_error": torch.rand(4)}, [4]))
    with pytest.raises(TypeError, match="expected a sampled TensorDict, got dict"):
        rb.update_tensordict_priority({"td_error": torch.rand(4)})


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_batch_in_place_of_rows(kind):
    rb = filled(kind)
    batch = TensorDict({"td_error": torch.rand(4)}, [4])
    for priority in ((), (torch.rand(4),)):
        with pytest.raises(
            TypeError, match=r"expected rows and their priorities, got a TensorDict\..*update_tensordict_priority"
        ):
            rb.update_priority(batch, *priority)


def test_priorities_that_are_no_numbers():
    rb = filled(PrioritizedReplayBuffer)
    for index, priority in (
        ("a", 1.0),
        (None, 1.0),
        ([0], None),
        ([0], "high"),
        ([0], [object()]),
        ([[0], [1, 2]], 1.0),
    ):
        with pytest.raises((TypeError, ValueError), match=r"^update_priority.*expected .* got \w+\."):
            rb.update_priority(index, priority)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_without_ends():
    rb = filled(TensorDictReplayBuffer, sampler=SliceSampler(num_slices=2))
    with pytest.raises(
        RuntimeError, match=r"end flags \[\('next', 'done'\), .*got \['obs'\]\. Name a stored field with .*end_keys"
    ):
        rb.sample()


@pytest.mark.parametrize(
    "value",
    [np.array([object(), object()]), np.array([[1], [1, 2]], dtype=object), ["a", None], [[1, 2], [3]], None, object()],
)
def test_objects_in_a_tensor_storage(value):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    for write in (rb.add, rb.extend):
        with pytest.raises(TypeError, match=r"field (\('info', '0'\)|'info'): .*ListStorage"):
            write({"obs": torch.zeros(2, 3), "info": value})
    assert not rb.storage.initialized


def test_ragged_rows_in_a_tensor_storage():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(
        RuntimeError,
        match=r"field obs: expected shape \[1, 2\] .*got \[1, 3\].*rows of several shapes there is ListStorage",
    ):
        rb.extend([{"obs": torch.zeros(1, 2)}, {"obs": torch.zeros(1, 3)}])


# ---- anything --------------------------------------------------------------------------------------------------------

#: Words of the native bindings, of the C++ library and of Python below engram.
FOREIGN = re.compile(
    r"incompatible function|Invoked with|_core|nanobind|std::|bad_alloc|can't convert np|has no attribute|generator raised"
    r"|object is not (callable|iterable|subscriptable)|not supported between|invalid combination|only integer|Could not infer"
)
ODD = [
    *(
        None,
        True,
        4.0,
        -1,
        10**30,
        -(10**30),
        "x",
        b"x",
        object(),
        [],
        [1.5],
        ["a"],
        {},
        {"a": 1},
        (1, 2),
        float("nan"),
    ),
    *(
        np.float32(1.5),
        np.array([1.5]),
        np.array(["a"]),
        np.array([object()]),
        np.uint64(2**64 - 1),
        np.datetime64("2020-01-01"),
    ),
    *(torch.rand(3), torch.tensor(2.5), torch.zeros(3, dtype=torch.complex64), torch.zeros(2, device="meta")),
    *(
        TensorDict({}, []),
        TensorDict({"a": torch.zeros(2)}, [2]),
        lambda: 1,
        int,
        slice("a"),
        range(10**20, 10**20 + 2),
    ),
]
VALID = {
    "index": [0, 1],
    "priority": [0.5, 0.5],
    "data": TensorDict({"obs": torch.zeros(2, 3)}, [2]),
    "key": "obs",
    "value": torch.zeros(10, 3),
    "input": {"obs": torch.zeros(10, 3)},
    "transform": lambda data: data,
}
METHODS = [
    *(
        "add",
        "extend",
        "sample",
        "can_sample",
        "on_lane",
        "empty",
        "__getitem__",
        "__setitem__",
        "set_",
        "set_at_",
        "update_",
    ),
    *("read_all_in_order", "write_all", "insert_transform", "set_rng", "set_sampler", "set_writer", "set_storage"),
    *("update_priority", "mark_update", "update_tensordict_priority"),
]


def plain(error):
    return not FOREIGN.search(str(error)) and not isinstance(error, AttributeError | AssertionError | SystemError)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.filterwarnings("ignore")
def test_no_text_of_the_native_bindings_reaches_a_user(kind, storage):
    bad = []
    for name in METHODS:
        method = getattr(kind, name, None)
        parameters = [] if method is None else list(inspect.signature(method).parameters.values())[1:]
        needed = {p.name: VALID.get(p.name) for p in parameters if p.default is p.empty}
        for parameter in parameters:
            for value in ODD:
                rb = filled(kind, storage(20))
                try:
                    getattr(rb, name)(**{**needed, parameter.name: value})
                except Exception as error:  # noqa: BLE001 - whatever it is
                    if not plain(error):
                        bad.append((name, parameter.name, value, error))
    assert not bad


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: ReplayBuffer(**{"storage": LazyTensorStorage(10), **given}),
        lambda **given: TensorDictPrioritizedReplayBuffer(**{"alpha": 0.5, "beta": 0.5, **given}),
        lambda **given: ReplayBuffer(
            sampler=PrioritizedSampler(**{"max_capacity": 2000, "alpha": 0.5, "beta": 0.5, **given})
        ),
        lambda **given: ReplayBuffer(sampler=SliceSampler(**{"num_slices": 2, **given})),
        lambda **given: ReplayBuffer(sampler=SamplerWithoutReplacement(**given)),
        lambda **given: ReplayBuffer(storage=LazyTensorStorage(**{"max_size": 10, **given})),
        lambda **given: ReplayBuffer(storage=LazyMemmapStorage(**{"max_size": 10, **given})),
        lambda **given: ReplayBuffer(storage=engram.TensorStorage(**{"storage": torch.zeros(3), **given})),
        lambda **given: ReplayBuffer(storage=ListStorage(**given)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_nor_from_a_constructor(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for what is taken for the name of a folder
    names = {
        *("size", "storage", "sampler", "writer", "collate_fn", "batch_size", "prefetch", "pin_memory", "generator"),
        *(
            "max_size",
            "device",
            "ndim",
            "lanes",
            "scratch_dir",
            "max_capacity",
            "alpha",
            "beta",
            "eps",
            "dtype",
            "reduction",
        ),
        *("num_slices", "slice_len", "traj_key", "end_keys", "drop_last", "shuffle", "index", "priority_key", "span"),
    }
    bad = []
    for name in sorted(names):
        for value in ODD:
            try:
                rb = make(**{name: value})
                rb.extend(TensorDict({"obs": torch.zeros(3)}, [3]))
                rb.sample(2)
            except Exception as error:  # noqa: BLE001 - whatever it is
                called = name in ("collate_fn", "storage", "sampler", "writer") and callable(
                    value
                )  # the user's own error
                if not plain(error) and not called:
                    bad.append((name, value, error))
    assert not bad
