"""Named tuples whose class is not found under its name, as those that functions make: their fields are compared."""

import collections
import copy
import pickle
import sys

import pytest
import torch

from engram import Checkpointer, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from tests.fresh import run

PROGRAM = """
import collections, warnings
import torch
from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
warnings.simplefilter("ignore")

Info = collections.namedtuple("Local", ["log_pi", "uid"])
Row = collections.namedtuple("Step", ["obs", "info"])
LocalInfo, Row_ = Info, Row
del Info, Row

def rows(n):
    return Row_(torch.ones(n, 3), LocalInfo(torch.ones(n), torch.arange(n)))

def fresh():
    return ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4)

loaded, restored = fresh(), fresh()
loaded.loads(dump)
Checkpointer(folder + "-saves", restored).restore()
for rb in (ReplayBuffer.open(folder), loaded, restored):
    before = type(rb.sample()).__name__
    rb.extend(rows(3))
    rb.add(Row_(torch.ones(3), LocalInfo(torch.tensor(1.0), torch.tensor(0))))
    rb.extend([Row_(torch.ones(3), LocalInfo(torch.tensor(1.0), torch.tensor(0)))] * 2)
    rb[0] = rb[1]
    batch = rb.sample()
    print(before, len(rb), type(batch) is Row_, type(batch.info) is LocalInfo, rb.storage.structure.intake is not None)
    try:
        rb.extend(Row_(torch.ones(2, 3), collections.namedtuple("Local", ["log_pi", "other"])(torch.ones(2), torch.ones(2))))
    except KeyError as error:
        print("missing ['uid'], unknown ['other']" in str(error))
"""


def made(fields=("log_pi", "uid")):
    return collections.namedtuple("Local", fields)


def rows(n, info=None):
    row = collections.namedtuple("Step", ["obs", "info"])
    return row(torch.randn(n, 3), (info or made())(torch.randn(n), torch.arange(n)))


def test_a_program_that_starts_again_writes_on(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "a"), batch_size=4)
    rb.extend(rows(5))
    rb.dumps(tmp_path / "dump")
    Checkpointer(f"{tmp_path / 'a'}-saves", rb).save(1)
    rb.close()
    lines = run(PROGRAM, folder=str(tmp_path / "a"), dump=str(tmp_path / "dump")).splitlines()
    assert lines == ["Batch 11 True True True", "True"] * 3


@pytest.mark.parametrize("shared", [False, True])
def test_a_class_that_is_made_again_is_the_same(shared):
    rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4, shared=shared)
    for _ in range(3):
        rb.extend(rows(2))
        rb.add(rows(2)._replace(obs=torch.ones(3), info=made()(torch.tensor(1.0), torch.tensor(3))))
    assert len(rb) == 9


def test_other_fields_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(rows(5))
    with pytest.raises(KeyError, match=r"missing \['uid'\], unknown \['other'\]"):
        rb.extend(rows(5, made(("log_pi", "other"))))
    with pytest.raises(TypeError, match="expected a namedtuple Local as in the first row, got dict"):
        rb.extend(rows(5, lambda a, b: {"log_pi": a, "uid": b}))
    assert len(rb) == 5


def test_fields_go_by_name_and_not_by_place():
    rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4)
    rb.extend(rows(5))
    rb.extend(rows(5, lambda a, b: made(("uid", "log_pi"))(b, a)))
    assert rb[5:].info.uid.tolist() == [0, 1, 2, 3, 4]


def test_pickles_name_no_class_that_others_do_not_find():
    rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4)
    rb.extend(rows(5))
    assert type(copy.deepcopy(rb)[0]) is type(rb[0])
    with pytest.warns(UserWarning, match="named tuples with its fields"):
        other = pickle.loads(pickle.dumps(rb))
    other.extend(rows(2))
    assert len(other) == 7
    assert type(other[0].info).__name__ == "Local"


def test_a_class_that_is_found_stays_the_only_one(monkeypatch):
    found = made()
    found.__module__ = __name__
    monkeypatch.setattr(sys.modules[__name__], "Local", found, raising=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(found(torch.ones(2), torch.ones(2)))
    with pytest.raises(TypeError, match="expected a namedtuple Local as in the first row"):
        rb.extend(made()(torch.ones(2), torch.ones(2)))
