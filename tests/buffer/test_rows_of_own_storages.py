"""Storages of one's own get the leaves of rows by name and return them: the buffer builds rows of every kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import (
    Checkpointer,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.testing import RowStorageContract
from engram.testing.contract import same, steps
from tests.testing.test_broken_storages import Builds, Ring

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "components.md"


@tensorclass
class Step:
    obs: torch.Tensor
    done: torch.Tensor


class Pair(NamedTuple):
    obs: torch.Tensor
    inner: dict


@dataclass
class Record:
    obs: torch.Tensor
    inner: Step


def n(first, rows):
    return torch.arange(first, first + rows)


def x(first, rows):
    return torch.stack([n(first, rows), -n(first, rows)], 1).float()


def step(first, rows):
    return Step(obs=x(first, rows), done=n(first, rows) % 4 == 3, batch_size=[rows])


KINDS = {
    "one tensor": x,
    "numbers": n,
    "dict": lambda *it: {"obs": x(*it), "n": n(*it)},
    "nested dict": lambda *it: {"obs": x(*it), "next": {"obs": x(*it), "info": {"n": n(*it)}}},
    "ints as keys": lambda *it: {0: n(*it), 1: {2: x(*it)}},
    "dots in keys": lambda *it: {"a.b": n(*it), "c": {"d.e": x(*it)}},
    "TensorDict": lambda *it: TensorDict({"obs": x(*it), "n": n(*it)}, [it[1]]),
    "nested TensorDict": steps,
    "TensorDict in a dict": lambda *it: {"n": n(*it), "td": TensorDict({"obs": x(*it)}, [it[1]])},
    "TensorDict of two dims": lambda *it: TensorDict({"obs": x(*it)}, [it[1], 2]),
    "tensorclass": step,
    "tuple": lambda *it: (n(*it), {"obs": x(*it)}),
    "list in a dict": lambda *it: {"each": [n(*it), x(*it)]},
    "named tuple": lambda *it: Pair(x(*it), {"n": n(*it)}),
    "dataclass": lambda *it: Record(x(*it), step(*it)),
}


def kept():
    """The class that the guide shows."""
    page = GUIDE.read_text()
    found = {"torch": torch}
    exec(page[page.index("from engram import Extent, SliceSampler, Traits") :].partition("\nrb = ")[0], found)
    return found["Kept"]


every_kind = pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS)


@every_kind
def test_the_storage_of_the_guide_keeps_the_contract_with_rows_of_every_kind(rows):
    storage = kept()

    class Case(RowStorageContract):
        def make(self, capacity):
            return storage(capacity)

        def rows(self, first, count):
            return rows(first, count)

    Case().run_all()


@every_kind
def test_a_storage_is_given_named_tensors_and_the_buffer_returns_rows(rows):
    seen = []

    class Noting(Ring):
        def write(self, rows, data, *, append):
            seen.append({name: value.shape[0] for name, value in data.items()})
            assert type(data) is dict
            assert all(isinstance(value, torch.Tensor) for value in data.values())
            super().write(rows, data, append=append)

    own, ram = (ReplayBuffer(storage=one, batch_size=4) for one in (Noting(8), LazyTensorStorage(8)))
    for rb in (own, ram):
        rb.extend(rows(0, 6))
        rb.add(rb[2])
        rb[1] = rb[0]
    for index in (0, slice(None), [3, 1]):
        assert same(own[index], ram[index])
        assert type(own[index]) is type(ram[index])
    assert [set(one.values()) for one in seen] == [{6}, {1}, {1}]


@every_kind
def test_states_dumps_and_checkpoints_keep_the_kind_of_rows(rows, tmp_path):
    rb = ReplayBuffer(storage=Ring(8), batch_size=4)
    rb.extend(rows(0, 11))
    rb.dumps(tmp_path / "dump")
    Checkpointer(tmp_path / "series", rb).save(1)
    others = [ReplayBuffer(storage=Ring(8), batch_size=4) for _ in range(3)]
    others[0].load_state_dict(rb.state_dict())
    others[1].loads(tmp_path / "dump")
    Checkpointer(tmp_path / "series", others[2]).restore(resume="exact")
    for other in others:
        assert same(other[:], rb[:])


@every_kind
def test_a_new_buffer_of_the_object_has_rows_of_the_same_kind(rows):
    first = ReplayBuffer(storage=Ring(8), batch_size=4)
    first.extend(rows(0, 11))
    again = ReplayBuffer(storage=first.storage.own, batch_size=4)
    assert same(again[:], first[:])
    again.extend(rows(11, 2))
    assert len(again) == 8


def lost(ring):
    """What another process finds where a program keeps nothing but rows, and these in another order of leaves."""
    other = Ring(ring.capacity)
    other.seam = ring.seam
    other.rows = {row: dict(reversed(leaves.items())) for row, leaves in ring.rows.items()}
    return other


@every_kind
def test_the_first_write_says_the_kind_of_rows_that_are_known_by_the_names_of_leaves(rows):
    first = ReplayBuffer(storage=Ring(8), batch_size=4)
    first.extend(rows(0, 11))
    sampler = PrioritizedSampler(8, alpha=1.0, beta=1.0)
    again = ReplayBuffer(storage=lost(first.storage.own), sampler=sampler, batch_size=64)
    again.update_priority(torch.arange(8), torch.tensor([0.0] * 7 + [1.0]))
    assert set(again.sample(return_info=True)[1]["index"].tolist()) == {7}
    with pytest.raises((RuntimeError, TypeError, KeyError)):
        again.extend({"another": torch.zeros(2)})
    again.extend(rows(11, 2))  # to rows 3 and 4, which get the priority of new rows
    assert set(again.sample(return_info=True)[1]["index"].tolist()) == {3, 4, 7}
    expected = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    expected.extend(rows(0, 11))
    expected.extend(rows(11, 2))
    assert same(again[:], expected[:])


def test_slices_of_rows_that_are_known_by_the_names_of_leaves():
    first = TensorDictReplayBuffer(storage=Ring(20))
    first.extend(steps(0, 31))
    again = ReplayBuffer(storage=lost(first.storage.own), sampler=SliceSampler(slice_len=4), batch_size=8)
    assert (again.sample()["step"].view(2, 4).diff(dim=1) == 1).all()
    assert again[0]["next"]["reward"].shape == (1,)


def test_a_storage_keeps_the_kind_of_rows_beside_them():
    class Filed(Ring):
        file = {}
        engram_schema = property(lambda self: self.file.get("schema"), lambda self, text: self.file.update(schema=text))

    first = TensorDictReplayBuffer(storage=Filed(8), batch_size=4)
    first.extend(steps(0, 11))
    other = Filed(8)
    other.rows, other.seam = first.storage.own.rows, first.storage.own.seam
    again = TensorDictReplayBuffer(storage=other, batch_size=4)
    assert same(again[:], first[:])
    assert isinstance(again.sample(), TensorDict)


def test_a_storage_that_takes_no_attributes_and_one_that_builds_rows():
    class Slotted(Ring):
        __slots__ = ()
        __setattr__ = None

        def __init__(self, capacity):
            vars(self).update(capacity=capacity, rows={}, seam=0)

    class Frozen(Ring):
        @property
        def engram_schema(self):
            return None

    for make in (Frozen, Builds):
        rb = TensorDictReplayBuffer(storage=make(8), batch_size=4)
        rb.extend(steps(0, 11))
        again = ReplayBuffer(storage=rb.storage.own, batch_size=4)
        assert again[:]["next"]["reward"].tolist() == rb[:]["next", "reward"].tolist()


def test_what_is_refused():
    rb = ReplayBuffer(storage=Ring(8))
    with pytest.raises(ValueError, match=r"Ring: expected leaves of different names, got \['a.b', 'a.b'\]"):
        rb.extend({"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}})
    rb.extend(steps(0, 4))
    read = rb.storage.own.read
    rb.storage.own.read = lambda rows: {**read(rows), "next.reward": torch.zeros(len(rows))}
    with pytest.raises(RuntimeError, match=r"Ring\.read: field next\.reward: expected shape \[2, 1\] float32"):
        rb.sample(2)
    rb.storage.own.read = lambda rows: {name: it for name, it in read(rows).items() if name != "next.reward"}
    with pytest.raises(KeyError, match=r"Ring\.read: .*missing \['next\.reward'\]"):
        rb.sample(2)

    class Clones(Ring):
        def write(self, rows, data, *, append):
            data.clone()

    with pytest.raises(AttributeError, match="clone") as raised:
        ReplayBuffer(storage=Clones(8)).extend(torch.zeros(2))
    assert raised.value.__notes__ == ["Clones.write: data is a dict of the leaves of rows, ['_-single-tensor-_']."]
