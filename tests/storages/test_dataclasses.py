"""Rows that are dataclasses: as named tuples, batches come back as what was written."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import DeviceLoader, LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from tests.fresh import run


@dataclasses.dataclass
class Plain:
    obs: Any
    next: Any
    t: Any = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    obs: Any
    next: Any
    t: Any


@dataclasses.dataclass
class Checked:
    """Its checks are of rows, and not of batches."""

    obs: Any
    next: Any
    t: Any = 0
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        assert np.ndim(self.t) == 0
        self.made = 7


@dataclasses.dataclass
class Inner:
    reward: Any
    done: Any


KINDS = [Plain, Frozen]


def inner(t, form):
    return {"dict": lambda *v: {"reward": v[0], "done": v[1]}, "tuple": lambda *v: v, "inner": Inner}[form](
        t / 2, t % 5 == 4
    )


def leaves(data):
    if dataclasses.is_dataclass(data):
        data = [getattr(data, f.name) for f in dataclasses.fields(data)]
    if isinstance(data, dict):
        data = list(data.values())
    return [leaf for one in data for leaf in leaves(one)] if isinstance(data, tuple | list) else [np.asarray(data)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(["dict", "tuple", "inner"]),
    st.lists(
        st.tuples(st.sampled_from(["add", "extend", "list", "tensors"]), st.integers(1, 5)), min_size=1, max_size=6
    ),
)
def test_rows_are_what_was_written(kind, form, writes):
    rb, written, t = ReplayBuffer(storage=LazyTensorStorage(64)), [], 0
    for call, n in writes:
        times = np.arange(t, t + (1 if call == "add" else n))
        rows = [kind(obs=np.full(3, float(i)), next=inner(i, form), t=i) for i in times]
        if call == "add":
            rb.add(rows[0])
        elif call == "list":
            rb.extend(rows)
        else:
            batch = kind(obs=np.stack([np.full(3, float(i)) for i in times]), next=inner(times, form), t=times)
            if call == "tensors":
                batch = dataclasses.replace(batch, obs=torch.from_numpy(batch.obs), t=torch.from_numpy(batch.t))
            rb.extend(batch)
        written += [leaves(row) for row in rows]
        t += len(rows)
    assert len(rb) == len(written)
    batch = rb[:]
    assert type(batch) is kind
    assert isinstance(batch.next, {"dict": dict, "tuple": tuple, "inner": Inner}[form])
    for i, row in enumerate(written):
        assert type(rb[i]) is kind
        for column, leaf in zip(leaves(batch), row, strict=True):
            np.testing.assert_array_equal(column[i], leaf)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_native_call(kind, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    rows = kind(obs=np.zeros((4, 3)), next=Inner(np.zeros(4), np.zeros(4, bool)), t=np.arange(4))
    rb.extend(rows)
    rb.add(kind(obs=np.zeros(3), next=Inner(0.0, False), t=0))
    monkeypatch.setattr(type(rb.storage), "prepare", None)  # the way through Python
    rb.extend(rows)
    rb.add(kind(obs=np.zeros(3), next=Inner(0.0, False), t=0))
    assert len(rb) == 10


def test_batches_are_made_without_the_checks_of_rows():
    rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4)
    for t in range(9):
        rb.add(Checked(np.zeros(3), 0.0, t))
    batch = rb.sample()
    assert type(batch) is Checked
    assert batch.t.shape == (4,)
    assert batch.made.tolist() == [7] * 4


def as_it_is(batch):
    return batch


def rows(n=20):
    return Plain(np.zeros((n, 3), np.float32), Inner(np.zeros(n, np.float32), np.arange(n) % 5 == 4), np.arange(n))


@pytest.mark.parametrize("output", ["torch", "numpy", "namedtuple"])
def test_batches_go_everywhere(output):
    rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=8, prefetch=2, output=output, transform=as_it_is)
    rb.extend(rows())
    for batch in (
        rb.sample(),
        next(iter(rb)),
        next(iter(DeviceLoader(rb, "cpu"))),
        pickle.loads(pickle.dumps(rb)).sample(),
    ):
        assert type(batch) is Plain
        assert type(batch.next) is Inner
        assert type(batch.next.reward) is (np.ndarray if output == "numpy" else torch.Tensor)
    if output == "torch":
        assert rb.sample(device="meta").next.done.is_meta


def test_write_transforms_and_windows():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(64), batch_size=6, sampler=SliceSampler(slice_len=3, end_key=("next", "done"))
    )
    seen = []
    rb.append_transform(lambda data: seen.append(data) or data, invert=True)
    rb.extend(rows())
    rb.add(Plain(np.zeros(3, np.float32), Inner(0.0, False), 20))
    assert [type(data) for data in seen] == [Plain, Plain]
    t = rb.sample().t.reshape(2, 3)
    assert bool((t.diff(dim=1) == 1).all())


def test_a_directory_names_the_class(tmp_path, monkeypatch):
    rb = ReplayBuffer(storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "a"), batch_size=4)
    rb.extend(rows())
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "a")
    assert type(rb.sample()) is Plain
    rb.extend(rows())
    rb.close()
    other = dataclasses.make_dataclass("Plain", ["t", "obs", "next"])
    monkeypatch.setitem(globals(), "Plain", other)
    with pytest.raises(
        TypeError, match=r"'Plain' with the fields \['obs', 'next', 't'\], but in this program it has \['t', 'obs'"
    ):
        ReplayBuffer.open(tmp_path / "a")


#: A program that has not defined the class.
ELSEWHERE = """
import copy, pickle, warnings
import numpy as np
import torch
from engram import Checkpointer, LazyTensorStorage, ReplayBuffer

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    rb = ReplayBuffer.open(folder)
    again = ReplayBuffer.open(folder, readonly=True)
print([str(warning.message) for warning in said])
batch = rb.sample()
print(type(batch).__name__, batch._fields, batch.next._fields, batch.obs.shape, again[0].t == rb[0].t)
rb.add(rb[3])
rb.extend(batch)
print(len(rb), rb[20].obs.tolist() == rb[3].obs.tolist())
print(pickle.loads(pickle.dumps(batch)).t.tolist() == batch.t.tolist(), pickle.loads(pickle.dumps(rb))[20].t == rb[20].t)
there = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4)
there.loads(dump)
print(len(there), copy.deepcopy(there)[3].next.reward == there[3].next.reward, pickle.loads(pickle.dumps(there))[3].t == 3)
try:
    rb.add({"obs": np.zeros(3, np.float32)})
except TypeError as error:
    print(error)
"""


def test_a_program_without_the_class_has_named_tuples(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "a"), batch_size=4)
    rb.extend(rows())
    rb.dumps(tmp_path / "dump")
    rb.close()
    lines = run(ELSEWHERE, folder=str(tmp_path / "a"), dump=str(tmp_path / "dump")).splitlines()
    assert lines[0].count("which this program has not defined: here they are named tuples with its fields, ") == 2
    assert "the class 'Plain' of module 'tests.storages.test_dataclasses'" in lines[0]
    assert lines[1:5] == [
        "Batch ('obs', 'next', 't') ('reward', 'done') torch.Size([4, 3]) tensor(True)",
        "25 True",
        "True tensor(True)",
        "20 tensor(True) tensor(True)",
    ]
    assert "expected a namedtuple Plain as in the first row, got dict" in lines[5]
    rb = ReplayBuffer.open(tmp_path / "a")  # where it is defined
    assert len(rb) == 25
    assert type(rb[20]) is Plain


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (
            Frozen(
                obs=np.zeros((2, 3), np.float32),
                next=Inner(np.zeros(2, np.float32), np.zeros(2, bool)),
                t=np.zeros(2, int),
            ),
            TypeError,
        ),
        ({"obs": np.zeros((2, 3))}, TypeError),
        (Plain(np.zeros((2, 3)), Inner(np.zeros(2, np.float32), np.zeros(2, bool)), np.zeros(2, int)), RuntimeError),
        (Plain(np.zeros((2, 3), np.float32), {}, np.zeros(2, int)), TypeError),
        (Plain, TypeError),
    ],
)
def test_other_rows_are_refused(wrong, error):
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(rows())
    with pytest.raises(error, match="extend"):
        rb.extend(wrong)
    assert len(rb) == 20


def test_lists_keep_them_as_they_are():
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=list)
    row = Checked("text", object(), 1)
    rb.extend([row, row])
    assert rb[0] is row
    assert rb.sample() == [row, row]


@dataclasses.dataclass(slots=True)
class Slotted:
    obs: object
    reward: object


@pytest.mark.parametrize("written", [False, True])
def test_a_field_without_a_value(written):
    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    if written:
        rb.add(Slotted(torch.zeros(2), 0.5))
    row, batch = Slotted(torch.zeros(2), 0.5), Slotted(torch.zeros(4, 2), torch.zeros(4))
    del row.reward, batch.reward
    for write in (lambda: rb.add(row), lambda: rb.extend(batch), lambda: rb.extend([row, row])):
        with pytest.raises(KeyError, match=r"Slotted: expected a value in every field: .*reward"):
            write()
    assert len(rb) == written
