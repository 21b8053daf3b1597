"""States, dumps and checkpoints of before and of after a field was added."""

import pytest
import torch

from engram import Checkpointer, IncompatibleCheckpoint
from tests.buffer.adding import KINDS, flat, made, nested


def saved(rb):
    return nested({key: value.clone() for key, value in flat(rb[:]).items()})


def same(one, other):
    one, other = flat(one), flat(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("how", ["state", "dump", "series"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_before_and_of_after_can_be_loaded(kind, how, tmp_path):
    def save(rb, name):
        if how == "state":
            return rb.state_dict()
        if how == "dump":
            rb.dumps(tmp_path / name)
        else:
            Checkpointer(tmp_path / name, rb).save(1)
        return name

    def load(rb, state):
        if how == "state":
            rb.load_state_dict(state)
        elif how == "dump":
            rb.loads(tmp_path / state)
        else:
            assert Checkpointer(tmp_path / state, rb).restore() is not None

    with made(kind) as rb:
        rb.extend({"a": torch.arange(3), "next": {"b": torch.ones(3, 3)}})
        rows, before = saved(rb), save(rb, "before")
        rb.add_field(("next", "u"), torch.zeros(2), fill=-1.0)
        rb.extend({"a": torch.arange(2), "next": {"b": torch.zeros(2, 3), "u": torch.ones(2, 2)}})
        more, after = saved(rb), save(rb, "after")
        # Into the store that has the field: of before, it is filled.
        load(rb, before)
        assert same(rb[:], {**rows, "next": {**rows["next"], "u": torch.full((3, 2), -1.0)}})
        load(rb, after)
        assert same(rb[:], more)
        rb.add({"a": 5, "next": {"b": torch.zeros(3)}})
        assert rb["next", "u"][5].tolist() == [-1.0, -1.0]
    for kinds in (kind, "ram"):
        with made(kinds) as fresh:
            load(fresh, after)
            assert same(fresh[:], more)
            fresh.add({"a": 5, "next": {"b": torch.zeros(3)}})
            assert fresh["next", "u"][5].tolist() == [-1.0, -1.0]
        with made(kinds) as older:  # a store that is without it gets it
            older.extend({"a": torch.arange(7), "next": {"b": torch.zeros(7, 3)}})
            load(older, after)
            assert same(older[:], more)
        with made(kinds) as others:
            others.extend({"a": torch.arange(7), "next": {"c": torch.zeros(7, 3)}})
            others.add_field(("next", "u"), torch.zeros(2), fill=-1.0)
            with pytest.raises(IncompatibleCheckpoint):
                load(others, after)


def test_segments_are_linked_before_and_after_but_not_across(tmp_path):
    with made("disk", capacity=4096) as rb:
        checkpointer = Checkpointer(tmp_path / "series", rb, keep=9)
        rb.extend({"a": torch.arange(4000)})
        found, names = [], []
        for step in range(4):
            if step == 2:
                rb.add_field("v", torch.zeros(3), fill=2.0)
            checkpointer.save(step)
            names.append(checkpointer.latest)
            segments = (tmp_path / "series" / names[-1]).rglob("seg/*.bin")
            found.append({path.stat().st_ino for path in segments})
        assert found[0]
        assert found[0] == found[1]
        assert found[2] == found[3]
        assert not found[1] & found[2]
        for step, name in enumerate(names):
            with made("ram", capacity=4096) as fresh:
                assert Checkpointer(tmp_path / "series", fresh).restore(name=name) is not None
                assert fresh["a"].tolist() == list(range(4000))
                assert set(fresh[:]) == ({"a"} if step < 2 else {"a", "v"})
                fresh.add({"a": 0})
                assert step < 2 or fresh["v"].eq(2.0).all()


def test_a_save_in_the_background_has_the_fields_of_its_moment(tmp_path):
    with made("disk", capacity=4096) as rb:
        checkpointer = Checkpointer(tmp_path / "series", rb)
        rb.extend({"a": torch.arange(4000)})
        handle = checkpointer.save(1, wait=False)
        rb.add_field("v", 0, fill=2)
        handle.wait()
        first = checkpointer.latest
        checkpointer.save(2)
        for name, keys in ((first, {"a"}), (checkpointer.latest, {"a", "v"})):
            with made("ram", capacity=4096) as fresh:
                assert Checkpointer(tmp_path / "series", fresh).restore(name=name) is not None
                assert fresh["a"].tolist() == list(range(4000))
                assert set(fresh[:]) == keys


def test_storages_of_another_size_take_it(tmp_path):
    with made("disk") as rb:
        rb.extend({"a": torch.arange(6), "done": torch.tensor([0, 0, 1, 0, 0, 1]).bool()})
        rb.dumps(tmp_path / "before")
        rb.add_field("v", 0, fill=3)
        rb["v"] = torch.arange(6)
        rb.dumps(tmp_path / "after")
    for size in (8, 12):
        with made("ram", capacity=size) as other:
            other.loads(tmp_path / "after", convert=True)
            assert other["v"].tolist() == list(range(6))
            other.add({"a": 1, "done": False})
            assert other["v"][6] == 3
            other.loads(tmp_path / "before", convert=True)
            assert other["v"].tolist() == [3] * 6
