"""Fields that are added to a buffer which holds rows, beside writes of all kinds and beside other processes."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReadOnlyStore,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.buffer.adding import CAPACITY, KINDS, Other, flat, made, nested, numpy_of, tensors
from tests.store.processes import Child, context

#: Of the fields that may be added: an example, what it is filled with, and what is written.
NEW = {
    ("v",): (torch.zeros(2), 3.5, lambda i: torch.tensor([i, -i], dtype=torch.float32)),
    ("w",): (torch.zeros((), dtype=torch.int16), -2, lambda i: torch.tensor(i, dtype=torch.int16)),
    ("next", "u"): (torch.zeros(1, dtype=torch.bool), True, lambda i: torch.tensor([i % 2 == 0])),
    ("deep", "er", "z"): (torch.zeros(0, 3), 0, lambda i: torch.zeros(0, 3)),
}


class Model:
    """The rows of a ring, as dicts of lists."""

    def __init__(self):
        self.rows, self.cursor, self.fills, self.count = [], 0, {}, 0

    def row(self, keys):
        i = self.count = self.count + 1
        new = {key: NEW[key][2](i) for key in keys if key in self.fills}
        return {("a",): torch.tensor(i), ("next", "b"): torch.full((3,), float(i)), **new}

    def filled(self, row):
        return {**self.fills, **row}

    def extend(self, rows):
        for row in rows:
            if len(self.rows) < CAPACITY:
                self.rows.append(None)
            self.rows[self.cursor] = self.filled(row)
            self.cursor = (self.cursor + 1) % CAPACITY

    def add_field(self, key, fill=None):
        example, value, _ = NEW[key]
        self.fills[key] = torch.full_like(example, value) if fill is None else fill
        for row in self.rows:
            row.setdefault(key, self.fills[key])

    def check(self, data):
        got = flat(data)
        assert set(got) == set(self.rows[0])
        for key, column in got.items():
            wanted = torch.stack([row[key] for row in self.rows])
            assert column.dtype is wanted.dtype, key
            assert torch.equal(column, wanted), key

    def check_sample(self, data):
        got = flat(data)
        assert set(got) == set(self.rows[0])
        known = {int(row["a",]): row for row in self.rows}
        for i, number in enumerate(got["a",].tolist()):
            for key, column in got.items():
                assert torch.equal(column[i], known[number][key]), key


def batch(rows):
    return nested({key: torch.stack([row[key] for row in rows]) for key in rows[0]})


SUBSETS = st.sets(st.sampled_from(sorted(NEW)))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 5), SUBSETS),
        st.tuples(st.just("add"), SUBSETS),
        st.tuples(st.just("field"), st.sampled_from(sorted(NEW))),
        st.tuples(st.just("all"), st.sampled_from(sorted(NEW))),
        st.tuples(st.just("row"), st.integers(0, CAPACITY - 1), SUBSETS),
        st.tuples(st.just("look")),
    ),
    max_size=14,
)


def act(rb, model, step, as_sent=lambda data: data):
    """One step of a buffer and of its model."""
    match step:
        case ("extend", n, keys):
            rows = [model.row(keys) for _ in range(n)]
            rb.extend(as_sent(batch(rows)))
            model.extend(rows)
        case ("add", keys):
            row = model.row(keys)
            rb.add(as_sent(nested(row)))
            model.extend([row])
        case ("field", key):
            if key in model.fills and not torch.equal(model.fills[key], torch.full_like(*NEW[key][:2])):
                with pytest.raises(ValueError, match="is there already"):
                    rb.add_field(key, NEW[key][0], fill=NEW[key][1])
            else:
                rb.add_field(key, NEW[key][0], fill=NEW[key][1])
                if key not in model.fills:
                    model.add_field(key)
        case ("all", key):
            rows = [{**row, key: NEW[key][2](number)} for number, row in enumerate(model.rows)]
            rb.write_all(as_sent(batch(rows)))
            if key not in model.fills:
                model.add_field(key, torch.zeros_like(NEW[key][0]))
            model.rows = rows
        case ("row", number, keys) if number < len(model.rows):
            row = model.row(keys)
            rb[number] = as_sent(nested(row))
            model.rows[number] = model.filled(row)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_rows_are_those_of_a_model(kind, steps):
    model = Model()
    with made(kind, batch_size=6) as rb:
        act(rb, model, ("extend", 3, set()))
        for step in steps:
            act(rb, model, step)
        model.check(rb[:])
        model.check_sample(rb.sample())
        model.check(copy.copy(rb)[:])
        other = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
        other.load_state_dict(rb.state_dict())
        rb = pickle.loads(pickle.dumps(other))
        act(rb, model, ("extend", 2, set()))  # what was saved knows what they are filled with
        model.check(rb[:])


@pytest.mark.parametrize("kind", ["shared", "disk"])
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(st.tuples(st.booleans(), STEPS.map(lambda steps: steps[:2])), max_size=6))
def test_two_processes_see_the_same_at_their_next_call(kind, steps):
    model = Model()
    with made(kind, batch_size=6) as rb:
        act(rb, model, ("extend", 3, set()))
        other = Other(rb)
        try:
            for there, some in steps:
                for step in some:
                    if there and step[0] != "row":
                        act(other, model, step, numpy_of)
                    else:
                        act(rb, model, step)
                model.check_sample(tensors(other.sample(6)))
                model.check_sample(rb.sample())
            model.check(rb[:])
            model.check(tensors(other.rows()))
        finally:
            other.end()


@pytest.mark.parametrize(
    ("first", "method"),
    [("sample", "spawn"), *((call, "fork") for call in ("sample", "rows", "extend", "__getitem__", "state_dict"))],
)
def test_the_first_call_after_a_field_was_added_has_it(first, method):
    with made("shared", batch_size=4) as rb:
        rb.extend({"a": torch.arange(3)})
        other = Other(rb, method)
        try:
            other.sample(4)
            rb.add_field("v", 0.0, fill=7.0)
            if first == "extend":
                other.extend({"a": np.arange(2)})
            elif first == "__getitem__":
                assert other.row("v").tolist() == [7.0] * 3
            elif first == "state_dict":
                other.state_dict()
            else:
                data = other.sample(4) if first == "sample" else other.rows()
                assert data["v"].tolist() == [7.0] * len(data["v"])
            assert set(other.rows()) == {"a", "v"}
        finally:
            other.end()
        assert rb["v"].tolist() == [7.0] * len(rb)


def episodes(n, length, start=0):
    step = torch.arange(start, start + n)
    done = (step % length == length - 1).unsqueeze(1)
    return TensorDict(
        {
            "obs": step.float().unsqueeze(1),
            "episode": step // length,
            "next": {"done": done, "reward": step.float().unsqueeze(1)},
        },
        [n],
    )


SAMPLERS = {
    "random": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(64, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=4, traj_key="episode"),
    "slices by ends": lambda: SliceSampler(slice_len=4, end_key=("next", "done")),
    "prioritized slices": lambda: PrioritizedSliceSampler(64, 0.6, 0.4, slice_len=4, traj_key="episode"),
    "n-step": lambda: NStep(RandomSampler(), n=2, gamma=0.9),
    "n-step slices": lambda: NStep(SliceSampler(slice_len=4, traj_key="episode"), n=2, gamma=0.9),
}


@pytest.mark.parametrize("key", ["value", ("next", "truncated")])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_goes_on(name, key):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(64), sampler=SAMPLERS[name](), batch_size=16)
    rb.extend(episodes(40, 8))
    rb.sample()
    rb.add_field(key, torch.zeros(1, dtype=torch.bool), fill=True)
    for more in range(3):
        got = rb.sample()
        assert (got["episode"] == got["obs"].squeeze(1).long() // 8).all()
        if key == "value" or not name.startswith(("slices", "prioritized slices", "n-step")):
            assert got[key].all()
        rb.extend(episodes(8, 8, 40 + 8 * more))
    assert rb[:][key].all()


def test_frames_and_priorities_stay_what_they_are():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(16), sampler=PrioritizedSampler(16, 1.0, 1.0, 0.0), batch_size=16
    )
    rb.extend(episodes(8, 4))
    rb.update_priority(torch.arange(8), torch.arange(8).double())
    rb.add_field("v", 1.0)
    assert rb.sampler.priorities().leaves(8).tolist() == list(range(8))
    assert 0 not in rb.sample()["index"]


def test_windows_of_columns():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=4)
    rb.extend(TensorDict({"obs": torch.arange(10).view(2, 5)}, [2, 5]))
    rb.add_field("v", 0.0, fill=2.0)
    assert rb[:]["v"].tolist() == [[2.0] * 5] * 2
    rb[:] = rb[:].clone().update({"w": torch.ones(2, 5, 3)})
    assert rb[:]["w"].shape == (2, 5, 3)
    assert rb.sample()["w"].eq(1).all()


def test_torchrls_recipe_for_value_targets():
    for storage in (LazyTensorStorage(10), LazyMemmapStorage(10)):
        rb = TensorDictReplayBuffer(storage=storage, batch_size=4)
        rb.extend(TensorDict({"obs": torch.arange(6.0).unsqueeze(1), "next": {"reward": torch.ones(6, 1)}}, [6]))
        data = rb[:].clone()
        data["value_target"] = data["obs"] * 2
        data["next", "value"] = data["obs"] + 1
        rb.write_all(data)
        batch = rb.sample()
        assert torch.equal(batch["value_target"], batch["obs"] * 2)
        assert torch.equal(batch["next", "value"], batch["obs"] + 1)
        rb.extend(TensorDict({"obs": torch.ones(1, 1), "next": {"reward": torch.ones(1, 1)}}, [1]))
        assert rb[6]["value_target"].tolist() == [0.0]
        rb.close()


def test_a_misspelt_entry_is_no_new_field():
    with made("ram") as rb:
        rb.extend({"a": torch.arange(3), "b": torch.arange(3)})
        with pytest.raises(KeyError, match=r"missing \['b'\]"):
            rb[:] = {"a": torch.arange(3), "c": torch.arange(3)}
        with pytest.raises(KeyError, match=r"unknown \['c'\].*add_field"):
            rb[1:] = {"a": torch.arange(2), "b": torch.arange(2), "c": torch.arange(2)}
        with pytest.raises(RuntimeError, match="field a"):
            rb[:] = {"a": torch.arange(3.0), "b": torch.arange(3), "c": torch.arange(3)}
        with pytest.raises(KeyError, match=r"unknown \['c'\]"):
            rb.extend({"a": torch.arange(2), "b": torch.arange(2), "c": torch.arange(2)})
        assert set(rb[:]) == {"a", "b"}
        with pytest.raises(RuntimeError):
            rb[:] = {"a": torch.arange(3), "b": torch.arange(3), "c": torch.arange(4)}
        assert set(rb[:]) == {"a", "b"}


REFUSED = {
    "another shape": ("v", {"example": torch.zeros(3)}, ValueError, "is there already"),
    "another dtype": ("v", {"example": 1}, ValueError, "is there already"),
    "another fill": ("v", {"example": torch.zeros(2), "fill": 1}, ValueError, "is there already"),
    "a container": (("n",), {"example": 0.0}, ValueError, "is there already"),
    "below a field": (("a", "b"), {"example": 0.0}, ValueError, "a is a leaf"),
    "a fill that does not fit": ("x", {"example": 0, "fill": 0.5}, ValueError, "expected a value that int64 holds"),
    "a fill of another shape": (
        "x",
        {"example": torch.zeros(2), "fill": [1.0, 2.0, 3.0]},
        ValueError,
        r"shape \[2\], got \[3\]",
    ),
    "no tensor": ("x", {"example": "text"}, TypeError, "expected a tensor"),
    "a container as example": ("x", {"example": {"y": 1}}, TypeError, "expected a tensor"),
    "no key": (3, {"example": 0}, TypeError, "key"),
    "an impossible key": (".engram", {"example": 0}, ValueError, "reserved"),
    "a dtype": ("x", {"example": torch.zeros(2).to_sparse()}, TypeError, "dense"),
}


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_added_is_refused_and_nothing_changes(name, kind):
    key, arguments, error, match = REFUSED[name]
    with made(kind) as rb:
        rb.extend({"a": torch.arange(3), "n": {"b": torch.arange(3)}})
        rb.add_field("v", torch.zeros(2), fill=5.0)
        folder = rb.storage.store.directory
        before = folder and sorted(folder.rglob("*"))
        with pytest.raises(error, match=match):
            rb.add_field(key, arguments["example"], fill=arguments.get("fill", 0))
        assert set(flat(rb[:])) == {("a",), ("n", "b"), ("v",)}
        assert before == (folder and sorted(folder.rglob("*")))


def test_buffers_without_fields_say_so(tmp_path):
    with pytest.raises(RuntimeError, match="add_field: expected a store; nothing was ever written"):
        ReplayBuffer(storage=LazyTensorStorage(3)).add_field("a", 0)
    with pytest.raises(TypeError, match="add_field: expected a tensor storage, a ListStorage"):
        ReplayBuffer(storage=ListStorage(3)).add_field("a", 0)
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(torch.arange(3))
    with pytest.raises(ValueError, match="the row is a leaf, which takes no entry more"):
        rb.add_field("a", 0)
    rb = ReplayBuffer.open_or_create(tmp_path / "store", 3)
    rb.extend({"a": torch.arange(3)})
    with ReplayBuffer.open(tmp_path / "store", readonly=True) as reader, pytest.raises(ReadOnlyStore):
        reader.add_field("b", 0)
    rb.close()


def test_a_reader_adopts_it_and_one_that_was_opened_before_sees_rows_of_later(tmp_path):
    rb = ReplayBuffer.open_or_create(tmp_path / "store", 6, batch_size=3)
    rb.extend({"a": torch.arange(3)})
    with ReplayBuffer.open(tmp_path / "store", readonly=True) as reader:
        reader.sample()
        rb.add_field("v", 0, fill=4)
        rb.extend({"a": torch.arange(2), "v": torch.arange(2)})
        assert set(reader.sample()) == {"a", "v"}
        assert reader["v"].tolist() == [4, 4, 4, 0, 1]
    rb.close()
    with ReplayBuffer.open(tmp_path / "store") as rb:
        rb.add({"a": 9})
        assert rb["v"].tolist() == [4, 4, 4, 0, 1, 4]
        assert TensorDict.load_memmap(tmp_path / "store")["v"].tolist() == [4, 4, 4, 0, 1, 4]


def test_around_memory_that_processes_share():
    data = TensorDict({"a": torch.arange(4)}, [4]).share_memory_()
    rb = ReplayBuffer(storage=TensorStorage(data), batch_size=4)
    folder = rb.storage.store.directory
    rb.add_field("v", 0, fill=1)
    other = Other(rb)
    try:
        other.add(TensorDict({"a": 7}))
    finally:
        other.end()
    assert rb["v"].tolist() == [1] * 4
    assert rb["a"].tolist() == [7, 1, 2, 3]
    rb.close()
    assert not folder.exists()


def test_in_a_folder_of_the_users_own_what_it_says_stays(tmp_path):
    data = TensorDict({"a": torch.arange(4), "n": {"b": torch.ones(4)}}, [4]).memmap_(tmp_path / "data")
    rb = ReplayBuffer(storage=TensorStorage(data))
    rb.add_field(("n", "c"), 0, fill=1)
    rb.close()
    loaded = TensorDict.load_memmap(tmp_path / "data")
    assert loaded["n", "c"].tolist() == [1] * 4
    with ReplayBuffer.open(tmp_path / "data") as rb:
        assert rb["n", "c"].tolist() == [1] * 4


def test_prefetched_batches_stay_what_they_were():
    with made("ram", prefetch=2, batch_size=3) as rb:
        rb.extend({"a": torch.arange(6)})
        rb.sample()
        rb.add_field("v", 0, fill=1)
        seen = [set(rb.sample()) for _ in range(5)]
        assert {"a", "v"} in seen
        assert all(it in ({"a"}, {"a", "v"}) for it in seen)


THREADS = {
    "random": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(64, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=4, traj_key="episode"),
    "n-step slices": lambda: NStep(SliceSampler(slice_len=4, traj_key="episode"), n=2, gamma=0.9),
}


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("name", THREADS)
def test_threads_read_and_write_while_fields_are_added(name, kind):
    rb = TensorDictReplayBuffer(storage=kind(64), sampler=THREADS[name](), batch_size=16)
    rb.extend(episodes(40, 8))
    done, errors = threading.Event(), []
    turns = [threading.Semaphore(0) for _ in range(3)]

    def check(got):
        assert torch.equal(got["episode"], got["obs"].squeeze(-1).long() // 8)
        for key in got.keys():
            if key.startswith("v"):
                assert got[key].eq(int(key[1:])).all(), key

    def sample():
        check(rb.sample())

    def read():
        check(rb[torch.arange(40)])

    def write():
        rb.extend(episodes(8, 8))

    def loop(act, turn):
        try:
            while not done.is_set():
                act()
                turn.release()
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)
            turn.release()

    threads = [threading.Thread(target=loop, args=it) for it in zip((sample, read, write), turns, strict=True)]
    for thread in threads:
        thread.start()
    try:
        for number in range(12):
            for turn in turns:
                assert turn.acquire(timeout=100)
            rb.add_field(f"v{number}", torch.zeros(number % 3), fill=number)
            assert not errors, errors
    finally:
        done.set()
        for thread in threads:
            thread.join(100)
    assert not errors, errors
    assert len([key for key in rb.sample().keys() if key.startswith("v")]) == 12
    rb.close()


def write_on(rb, ready, end):
    number = 0
    while not end.is_set():
        rb.extend({"a": torch.arange(number, number + 3)})
        number += 3
        ready.release()


@pytest.mark.parametrize("kind", ["shared", "disk"])
def test_what_a_process_writes_meanwhile_is_filled(kind):
    with made(kind, capacity=50) as rb:
        rb.extend({"a": torch.arange(50)})
        processes = context("fork")
        ready, end = processes.Semaphore(0), processes.Event()
        child = Child(write_on, rb, ready, end)
        try:
            for number in range(8):
                assert ready.acquire(timeout=100)
                rb.add_field(f"v{number}", torch.zeros(2), fill=number + 1)
                for _ in range(3):
                    assert ready.acquire(timeout=100)
                assert all(rb[f"v{n}"].eq(n + 1).all() for n in range(number + 1))
        finally:
            end.set()
            child.join()
        assert len(rb) == 50


@pytest.mark.parametrize("key", ["index", "index_generation", ("index", "more"), ("index_generation",)])
def test_a_buffer_of_tensordicts_refuses_the_entries_that_its_writes_drop(key):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
    with pytest.raises(
        ValueError, match="add_field: key: expected another key than .*TensorDictReplayBuffer drops 'ind"
    ):
        rb.add_field(key, torch.zeros(()))
    assert set(rb.sample().keys()) == {"a", "index"}
    rb.add_field(("next", "index"), torch.zeros(()))
    rows = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    rows.extend({"a": torch.arange(3)})
    rows.add_field(key, torch.zeros(()))
