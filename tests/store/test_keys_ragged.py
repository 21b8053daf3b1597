"""Rows by a key that is a text of any length: beside what the rows say, while items are evicted, through reopening and deaths."""

import os
import pickle
import random

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, Ragged, ReplayBuffer, RoundRobinWriter
from tests import stress
from tests.store.keyed import check, opened, text
from tests.store.processes import Child

CAPACITY = 16
FIELDS = {"name": Ragged("utf-8", max_length=40), "tokens": Ragged(torch.int16, max_length=12)}


def long_text(n):
    """Keys of any length, some of them one that is another one with more behind it."""
    return text(n) + "x" * (n % 5)


def rows(numbers):
    return {
        "uid": torch.tensor(numbers),
        "name": [long_text(n) for n in numbers],
        "tokens": [torch.full((n % 13,), n, dtype=torch.int16) for n in numbers],
        "reward": torch.zeros(len(numbers)),
    }


def made(folder=None, nbytes=700, field="name"):
    """Items of fewer rows than there is room for: old ones are evicted."""
    storage = (
        LazyTensorStorage(CAPACITY, ragged=FIELDS, ragged_bytes=nbytes)
        if folder is None
        else LazyMemmapStorage(CAPACITY, scratch_dir=folder, ragged=FIELDS, ragged_bytes=nbytes)
    )
    rb = ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))
    rb.index_keys(field)
    return rb


@pytest.mark.stress
@pytest.mark.parametrize("place", ["RAM", "directory"])
def test_rows_are_found_by_what_they_say(place, tmp_path):
    evicted = 0
    for seed in range(stress.size(6, 300)):
        chance = random.Random(seed)
        folder = None if place == "RAM" else tmp_path / str(seed)
        rb = made(folder)
        for _ in range(40):
            numbers = [chance.randrange(30) for _ in range(chance.randrange(1, 6))]
            match chance.randrange(8):
                case 0:
                    rb.remove(keys=[long_text(n) for n in numbers[:2]])
                case 1 if len(rb):
                    found = rb.rows_of([long_text(n) for n in numbers])
                    late = {"reward": torch.arange(float(len(numbers)))}
                    done = rb.update_if_present(index=found.rows, generation=found.generations, patch=late)
                    assert done.updated.tolist() == (found.rows >= 0).tolist()
                case 2 if chance.random() < 0.2:
                    rb.empty()
                case 3:
                    rb.add({key: value[0] for key, value in rows(numbers).items()})
                case 4 if chance.random() < 0.3:
                    if folder is None:
                        rb = pickle.loads(pickle.dumps(rb))
                    else:
                        rb.close()
                        rb = opened(folder)
                case _:
                    rb.extend(rows(numbers))
            if rb.storage.memory is not None:
                check(rb, range(30), long_text)
        evicted += rb.stats()["evicted_rows"]
        rb.close()
    assert evicted > 20


def test_a_text_is_another_key_than_one_with_more_behind_it():
    rb = made(nbytes=1e5)
    names = ["a", "ab", "", "ab ", "é", "a" * 40]
    rb.extend({**rows(list(range(6))), "name": names})
    assert rb.rows_of(names).rows.tolist() == list(range(6))
    assert rb.rows_of(["b", "a" * 39, b"ab"]).rows.tolist() == [-1, -1, 1]
    with pytest.raises(ValueError, match="expected at most 40 bytes, as the field 'name' has, got 41"):
        rb.rows_of("a" * 41)


def test_an_edit_of_as_many_bytes_is_found():
    rb = made(nbytes=1e5)
    rb.extend({**rows(list(range(3))), "name": ["aa", "bb", "cc"]})
    rb.set_at_("name", ["dd"], [1])
    assert rb.rows_of(["aa", "bb", "dd"]).rows.tolist() == [0, -1, 1]


@pytest.mark.parametrize(
    ("field", "said"),
    [("tokens", "got ragged shape"), ("long", "got ragged utf-8, at most 2000"), ("notes", "got ragged json")],
)
def test_rows_of_other_items_are_no_keys(field, said):
    fields = {**FIELDS, "long": Ragged("utf-8", max_length=2000), "notes": Ragged("json", max_length=20)}
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, ragged=fields, ragged_bytes=1e6))
    rb.extend({**rows([1]), "long": ["x"], "notes": [{}]})
    with pytest.raises(TypeError, match=f"index_keys: '{field}': expected one integer per row.*{said}"):
        rb.index_keys(field)


def write_for_ever(folder, writer):
    """Until it is killed."""
    chance, rb = random.Random(writer), opened(folder)
    while True:
        rb.extend(rows([chance.randrange(30) for _ in range(chance.randrange(1, 6))]))
        if chance.random() < 0.2:
            rb.remove(keys=long_text(chance.randrange(30)))


@pytest.mark.stress
def test_writers_that_are_killed_leave_the_index_as_the_rows_are(tmp_path):
    with made(tmp_path / "store") as rb:
        rb.extend(rows([0]))
    with opened(tmp_path / "store") as rb:
        rb.extend(rows([1, 2, 3]))
        for number in range(stress.size(6, 300)):
            children = [Child(write_for_ever, tmp_path / "store", 2 * number + k) for k in range(2)]
            before = rb.write_count
            while rb.write_count < before + 200:
                os.sched_yield()
            for child in children:
                child.kill()
            rb.storage.store.core.reclaim()  # as writers do twice a second
            rb.extend(rows([5]))
            check(rb, range(30), long_text)
