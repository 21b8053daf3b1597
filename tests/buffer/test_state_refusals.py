"""The rest of a buffer's state, and states that are refused."""

import contextlib
import copy
import itertools
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    Compose,
    FinalObservations,
    IncompatibleCheckpoint,
    LazyTensorStorage,
    ListStorage,
    NextFromFollowing,
    NoSampleable,
    ObservationNorm,
    PrioritizedSampler,
    PriorityError,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    VecNorm,
)
from engram._support.state import copied, mapped
from engram.store.priorities import PriorityIndex
from tests.buffer.states import STORAGES, Counting, L, buffer
from tests.components import Backwards, Newest
from tests.twins import bits, contents, rows, through_a_file

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size", "ignore:.* has no priorities")


# ---- the rest of a buffer ----------------------------------------------------------------------------------------------


def test_the_keys_of_a_state():
    rb = buffer(n=2)
    state = rb.state_dict()
    theirs = {
        "_storage",
        "_sampler",
        "_writer",
        "_transforms",
        "_batch_size",
        "_consume_after_n_samples",
        "_rng",
        "_prefetch_state",
    }
    assert set(state) == theirs | {"_lane", "_iterating", "_default_rng"}
    assert state["_rng"] is None
    assert state["_prefetch_state"] is None
    rb.set_rng(torch.Generator())
    rng, device = rb.state_dict()["_rng"]
    assert (rng.dtype, device) == (torch.uint8, "cpu")


def test_generators():
    mine = torch.Generator().manual_seed(5)
    rb = buffer(generator=mine, n=9)
    rb.sample()
    state = through_a_file(rb.state_dict())
    drawn = [rb.sample()["step"].tolist() for _ in range(5)]
    theirs = torch.Generator().manual_seed(6)
    for other in (buffer(), buffer(generator=theirs)):
        before = torch.get_rng_state()
        other.load_state_dict(state)
        assert [other.sample()["step"].tolist() for _ in range(5)] == drawn
        assert torch.equal(torch.get_rng_state(), before), "a load does not reseed the program"
    assert torch.equal(theirs.get_state(), mine.get_state()), "it is the generator that was given that goes on"


def test_the_default_generator():
    rb = buffer(n=9)
    torch.manual_seed(3)
    rb.sample()
    state = through_a_file(rb.state_dict())
    drawn = rb.sample()["step"].tolist()
    other = buffer()
    torch.manual_seed(4)
    other.load_state_dict(state, default_rng=True)
    assert other.sample()["step"].tolist() == drawn
    torch.manual_seed(4)
    other.load_state_dict(state)
    assert torch.initial_seed() == 4


def test_settings_of_the_buffer():
    rb = buffer(LazyTensorStorage(L, lanes=3), n=3).on_lane(2)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(L, lanes=3))
    other.load_state_dict(rb.state_dict())
    assert other.batch_size == 4
    assert other.extend(rows(1)).tolist() == rb.extend(rows(1)).tolist() == [9]


@pytest.mark.parametrize("batches", range(6))
def test_iteration_goes_on(batches):
    rb = buffer(sampler=SamplerWithoutReplacement(), generator=torch.Generator().manual_seed(0), n=10)
    for _ in range(batches):
        rb.next()
    other = buffer(sampler=SamplerWithoutReplacement())
    other.load_state_dict(through_a_file(rb.state_dict()))
    for _ in range(9):
        assert bits(rb.next()) == bits(other.next())


def test_transforms():
    def make():
        return buffer(transform=Compose(VecNorm(["obs"], decay=0.9), ObservationNorm(1.0, 2.0, ["score"])))

    rb, other = make(), make()
    rb.extend(rows(9))
    torch.manual_seed(0)
    rb.sample()
    state = rb.state_dict()
    before = bits(state)
    drawn = rb.sample()
    rb.transform[1].scale.fill_(7.0)
    assert bits(state) == before
    other.load_state_dict(through_a_file(state), default_rng=True)
    assert bits(other.sample()) == bits(drawn)
    assert bits(other.transform[0].state_dict()) == bits(rb.transform[0].state_dict())


def test_modules_are_transforms_with_state():
    def make():
        torch.manual_seed(0)
        return ReplayBuffer(storage=LazyTensorStorage(5), transform=torch.nn.Linear(3, 2).double())

    rb, other = make(), make()
    state = rb.state_dict()
    with torch.no_grad():
        other.transform[0].weight.zero_()
    weight = other.transform[0].weight.clone()
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({**state, "_transforms": {"0": {"weight": torch.zeros(1, 1), "bias": torch.ones(2)}}})
    assert torch.equal(other.transform[0].weight, weight)
    assert not torch.equal(other.transform[0].bias, torch.ones(2, dtype=torch.float64)), "and its other parts"
    other.load_state_dict(state)
    assert torch.equal(other.transform[0].weight, rb.transform[0].weight)


def test_final_observations():
    def make():
        finals = FinalObservations(["obs"], LazyTensorStorage(6))
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(L),
            sampler=NextFromFollowing(RandomSampler(), finals),
            transform=finals,
            batch_size=16,
            generator=torch.Generator().manual_seed(0),
        )

    def steps(n, first):
        data = rows(n, first).select("obs", "next")
        data["next", "obs"] = data["obs"] + 1
        data["obs"][1:] = data["next", "obs"][:-1]
        data["next", "obs"][:-1] = data["obs"][1:]
        data["next", "done"][-1] = True
        return data

    rb, other = make(), make()
    for first in range(0, 21, 7):
        rb.extend(steps(7, first))
    other.load_state_dict(through_a_file(rb.state_dict()))
    for first in range(21, 49, 7):
        one, two = rb.sample(), other.sample()
        assert bits(one.exclude(("next", "final"))) == bits(two.exclude(("next", "final")))
        rb.extend(steps(7, first))
        other.extend(steps(7, first))


def test_a_sampler_of_ones_own():
    rb = buffer(sampler=Newest(), n=5)
    other = buffer(sampler=Newest(), n=2)
    other.load_state_dict(through_a_file(rb.state_dict()))
    assert other.sampler.state_dict() == {"rows": [0, 1, 2, 3, 4]}
    assert other.sample(2)["step"].tolist() == [3, 4]


@pytest.mark.parametrize("held", [object(), (1, 2), {1: 2}, {1}, np.float64(2.0), b"x"])
def test_state_that_cannot_be_saved_is_named(held):
    rb = buffer(sampler=Counting(held), n=2)
    with pytest.raises(TypeError, match=r"_sampler\['deep'\]\[0\]\['held'\]"):
        rb.state_dict()


def test_a_writer_of_ones_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(6), writer=Backwards())
    rb.extend(torch.arange(2))
    state = rb.state_dict()
    assert state["_writer"] == {}, "it has none"
    with pytest.raises(KeyError, match="_writer: expected an empty state"):
        rb.load_state_dict({**state, "_writer": {"asked": 3}})
    rb.load_state_dict(state)
    assert rb[:].tolist() == [0] * 4 + [1, 0]


# ---- refusals ----------------------------------------------------------------------------------------------------------


def put(state, way, value):
    """The state with another entry; ``...`` takes it out."""
    state = copied(state)
    at = state
    for part in way[:-1]:
        at = at[part]
    if value is ...:
        del at[way[-1]]
    else:
        at[way[-1]] = value(at[way[-1]]) if callable(value) else value
    return state


def _changed(index, value):
    def change(tensor):
        tensor[index] = value
        return tensor

    return change


BROKEN = [
    (("_storage",), ..., KeyError),
    (("_more",), 1, KeyError),
    (("_storage",), [], TypeError),
    (("_storage", "rows"), ..., KeyError),
    (("_storage", "more"), 1, KeyError),
    (("_storage", "schema"), 3, TypeError),
    (("_storage", "schema"), "{", ValueError),
    (("_storage", "schema"), lambda text: text.replace("float32", "float16"), IncompatibleCheckpoint),
    (("_storage", "schema"), lambda text: text.replace('"capacity":12', '"capacity":24'), IncompatibleCheckpoint),
    (("_storage", "schema"), lambda text: text.replace('"lanes":1', '"lanes":2'), IncompatibleCheckpoint),
    (("_storage", "schema"), lambda text: text.replace("[2,0]", "[9,0]"), IncompatibleCheckpoint),
    (("_storage", "schema"), None, ValueError),
    (("_storage", "lanes"), _changed((0, 1), L + 1), ValueError),
    (("_storage", "lanes"), _changed((0, 0), -1), ValueError),
    (("_storage", "lanes"), lambda lanes: lanes.int(), TypeError),
    (("_storage", "lanes"), lambda lanes: lanes[0], ValueError),
    (("_storage", "numbers"), _changed(0, -1), ValueError),
    (("_storage", "numbers"), _changed(0, 1 << 40), ValueError),
    (("_storage", "numbers"), lambda numbers: torch.cat([numbers] * 9), ValueError),
    (("_storage", "clock"), 0, ValueError),
    (("_storage", "clock"), True, TypeError),
    (("_storage", "write_count"), -1, ValueError),
    (("_storage", "write_count"), 1.0, TypeError),
    (("_storage", "rows"), lambda fields: fields[1:], ValueError),
    (("_storage", "rows", 0), lambda field: field.double(), TypeError),
    (("_storage", "rows", 0), lambda field: field[1:], ValueError),
    (("_storage", "rows", 0), "x", TypeError),
    (("_storage", "priorities"), {"a b": {}}, ValueError),
    (("_storage", "priorities", "critic", "eps"), 0.5, IncompatibleCheckpoint),
    (("_storage", "priorities", "critic", "leaves"), lambda leaves: leaves.repeat(2), IncompatibleCheckpoint),
    (("_storage", "priorities", "critic", "leaves"), _changed(2, math.nan), PriorityError),
    (("_storage", "passes"), {"x": {"key": 1, "rows": 2, "visited": 3}}, ValueError),
    (("_storage", "windows"), {"main": 0}, ValueError),
    (("_sampler", "leaves"), ..., KeyError),
    (("_sampler", "leaves"), _changed(3, -1.0), PriorityError),
    (("_sampler", "leaves"), _changed(3, math.inf), PriorityError),
    (("_sampler", "leaves"), lambda leaves: leaves.float(), TypeError),
    (("_sampler", "eps"), 0.6, IncompatibleCheckpoint),
    (("_sampler", "beta"), math.nan, ValueError),
    (("_sampler", "beta"), "0.4", TypeError),
    (("_storage", "priorities", "critic", "highest"), 1e300, PriorityError),
    (("_sampler", "highest"), -1.0, ValueError),
    (("_writer",), {"_cursor": 3}, KeyError),
    (("_transforms",), {}, KeyError),
    (("_transforms", "0", "frozen"), torch.zeros(2), TypeError),
    (("_transforms", "0", "0.mean"), ..., KeyError),
    (("_transforms", "0", "0.mean"), torch.full((3,), math.nan), ValueError),
    (("_transforms", "0", "0.weight"), torch.zeros(()), ValueError),
    (("_transforms", "0", "0.squares"), torch.zeros(2), ValueError),
    (("_transforms", "1", "scale"), torch.tensor(-1.0), ValueError),
    (("_transforms", "1", "loc"), "x", TypeError),
    (("_batch_size",), 0, ValueError),
    (("_batch_size",), "4", TypeError),
    (("_lane",), 1, ValueError),
    (("_iterating",), None, TypeError),
    (("_consume_after_n_samples",), "2", TypeError),
    (("_rng",), torch.zeros(3), TypeError),
    (("_rng",), [torch.zeros(3, dtype=torch.uint8), "cpu"], ValueError),
    (("_rng",), [torch.zeros(3), "cpu"], TypeError),
    (("_rng",), [torch.get_rng_state(), "cuda"], ValueError),
    (("_default_rng",), None, TypeError),
    (("_prefetch_state",), {"queue": []}, KeyError),
    (("_prefetch_state",), [], TypeError),
]


@pytest.mark.parametrize(("way", "value", "error"), BROKEN)
def test_a_state_that_is_refused_changes_nothing(way, value, error):
    def make(seed):
        rb = buffer(
            sampler=PrioritizedSampler(L, 0.7, 0.5),
            transform=Compose(VecNorm(["obs"]), ObservationNorm(1.0, 2.0, ["score"])),
            generator=torch.Generator().manual_seed(seed),
            n=seed,
        )
        critic = PrioritizedSampler(L, 1.0, 0.5, index="critic")
        critic.bind(rb.storage)
        rb.update_priority(torch.arange(seed), torch.rand(seed))
        rb.sample()
        return rb

    state = make(8).state_dict()
    broken = put(state, way, value)
    used, fresh = make(5), buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), transform=make(5).transform)
    for rb in (used,) if way[:2] in NEEDS_ROWS else (used, fresh):
        before = bits(rb.state_dict())
        with pytest.raises(error) as raised:
            rb.load_state_dict(broken)
        assert type(raised.value) is error
        assert bits(rb.state_dict()) == before


#: What can be compared only where there is something.
NEEDS_ROWS = [("_storage", "priorities"), ("_storage", "schema")]


BROKEN_LISTS = [
    (("max_size",), 13, IncompatibleCheckpoint),
    (("cursor",), -1, ValueError),
    (("numbers",), _changed(0, 2), ValueError),
    (("numbers",), _changed(0, 0), ValueError),
    (("numbers",), lambda numbers: numbers[1:], ValueError),
    (("items", "form"), _changed(0, 7), ValueError),
    (("items", "form"), _changed(0, -1), ValueError),
    (("items", "forms", 0, "tree"), "[", ValueError),
    (("items", "forms", 0, "tree"), '["object","x"]', ValueError),
    (("items", "forms", 0, "tree"), '["tensor","object",1,"cpu"]', ValueError),
    (("items", "forms", 0, "parts", 0, "bytes"), lambda raw: raw[1:], ValueError),
    (("items", "forms", 0, "parts", 0, "bytes"), lambda raw: torch.cat([raw, raw]), ValueError),
    (("items", "forms", 0, "parts", 0, "sizes"), lambda sizes: -sizes, ValueError),
    (("items", "forms", 0, "parts", 0, "sizes"), lambda sizes: sizes + (1 << 40), ValueError),
    (("items", "forms", 0, "parts"), [], ValueError),
    (("items", "forms", 0, "parts"), lambda parts: parts * 2, ValueError),
    (("items", "forms"), lambda forms: forms * 2, ValueError),
    (("items",), {}, KeyError),
    (("priorities",), {"main": 3}, TypeError),
]


@pytest.mark.parametrize(("way", "value", "error"), BROKEN_LISTS)
def test_a_list_that_is_refused_changes_nothing(way, value, error):
    def make(n):
        rb = ReplayBuffer(storage=ListStorage(L), collate_fn=list)
        rb.extend([torch.arange(float(k + 1)) for k in range(n)])
        return rb

    rb = make(3)
    before = bits(rb.state_dict())
    with pytest.raises(error):
        rb.storage.load_state_dict(put(make(5).storage.state_dict(), way, value))
    assert bits(rb.state_dict()) == before


def test_a_component_of_ones_own_that_refuses():
    class Picky(Newest):
        def load_state_dict(self, state_dict):
            self._rows = list(state_dict["rows"])
            if len(self._rows) > 3:
                raise OverflowError("too many")

    state = buffer(sampler=Newest(), n=5).state_dict()
    rb = buffer(sampler=Picky(), n=2)
    before = bits(rb.state_dict())
    with pytest.raises(OverflowError):
        rb.load_state_dict(state)
    assert bits(rb.state_dict()) == before
    with pytest.raises(KeyError):
        rb.load_state_dict({**state, "_transforms": {"0": {}}, "_sampler": {"rows": [1]}})
    assert bits(rb.state_dict()) == before


def test_another_layout_is_refused():
    state = buffer(n=5).state_dict()
    for storage, says in (
        (
            LazyTensorStorage(L + 1),
            f"capacity: expected {L + 1}, got {L}. A buffer of another size takes what rb.dumps saved",
        ),
        (LazyTensorStorage(L, lanes=2), "lanes: expected 2, got 1. A buffer of another size"),
        (LazyTensorStorage(L, ndim=2), r"ndim: expected 2, got 1\.$"),
    ):
        rb = buffer(storage)
        with pytest.raises(IncompatibleCheckpoint, match=f"schema: expected that of this storage, got another: {says}"):
            rb.load_state_dict(state)
        assert not rb.storage.initialized, "nothing was allocated"
    with pytest.raises(KeyError):
        buffer(ListStorage(L)).load_state_dict(state)


def test_a_disk_that_fails_leaves_an_empty_buffer(monkeypatch):
    rb = buffer(n=5)
    state = rb.state_dict()

    def fails(tensors):
        tensors[0][:3] = 1.0
        raise OSError(5, "no more")

    head = {k: v for k, v in state["_storage"].items() if k != "rows"}
    with pytest.raises(OSError, match="no more") as caught:
        rb.storage.prepare_rows(head, SimpleNamespace(fill=fails)).commit()
    assert any("empty now" in note for note in caught.value.__notes__)
    assert len(rb) == 0
    assert rb.extend(rows(2)).tolist() == [0, 1]


@pytest.mark.parametrize("writer", [RoundRobinWriter, lambda: TensorDictMaxValueWriter("a")], ids=["ring", "best"])
def test_states_of_a_buffer_at_work(writer):
    """Writers wait while a state is made or taken over: its rows are whole, and those it says are there."""
    stop, failed = threading.Event(), []

    def work(do):
        try:
            while not stop.is_set():
                do()
        except BaseException as error:
            failed.append(error)
            raise

    def same(steps):
        return TensorDict({"a": steps, "b": steps.unsqueeze(-1).expand(-1, 50).clone()}, batch_size=[len(steps)])

    rb = buffer(LazyTensorStorage(64), PrioritizedSampler(64, 0.7, 0.5), writer())
    numbers = itertools.count()

    def write():
        rb.extend(same(torch.arange(7) + 7 * next(numbers)))

    def read():
        with contextlib.suppress(NoSampleable):  # it is just being replaced
            batch = rb.sample(16)
            assert (batch["b"] == batch["a"].unsqueeze(-1)).all()

    write()
    threads = [threading.Thread(target=work, args=(do,)) for do in (write, read)]
    for thread in threads:
        thread.start()
    try:
        states = []
        for _ in range(40):
            states.append(rb.state_dict())
            rb.load_state_dict(states[0])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    for state in states:
        a, b = state["_storage"]["rows"]
        written, live = state["_storage"]["write_count"], len(a)
        assert live == min(written, 64)
        assert (b == a.unsqueeze(-1)).all()
        assert written % 7 == 0, "no write by half"
        assert (state["_sampler"]["leaves"][:live] > 0).all()


class Watching(Newest):
    """Lets another thread write while its state is made or taken over, and notes whether that waits."""

    def __init__(self):
        super().__init__()
        self.rb, self.waited, self.thread = None, [], None

    def write(self):
        self.thread = threading.Thread(target=self.rb.add, args=(rows(1)[0],))
        self.thread.start()
        self.thread.join(0.1)
        self.waited.append(self.thread.is_alive())

    def state_dict(self):
        self.write()
        return super().state_dict()


@pytest.mark.parametrize("storage", ["ram", "memmap", "list", "device"])
def test_writers_wait_for_a_state(storage):
    rb = buffer(STORAGES[storage](), Watching(), n=3)
    rb.sampler.rb = rb
    state = rb.state_dict()
    rb.sampler.thread.join()
    assert rb.sampler.waited == [True]
    assert len(rb) == 4
    assert len(state["_storage"]["numbers"]) == 3
    assert state["_sampler"] == {"rows": [0, 1, 2]}
    rb.close()


@pytest.mark.parametrize("storage", ["ram", "memmap", "list", "device"])
@pytest.mark.parametrize("n", [0, 2])
def test_writers_wait_until_all_is_taken_over(storage, n, monkeypatch):
    """A row that is written before the priorities are there is not one that the state says nothing of."""
    rb = buffer(STORAGES[storage](), PrioritizedSampler(L, 1.0, 0.5, eps=0.0), n=n)
    state = buffer(STORAGES[storage](), PrioritizedSampler(L, 1.0, 0.5, eps=0.0), n=4).state_dict()
    restore, threads = PriorityIndex.restore, []

    def late(index, state):
        threads.append(threading.Thread(target=rb.add, args=(rows(1)[0],)))
        threads[0].start()
        threads[0].join(0.1)
        restore(index, state)

    monkeypatch.setattr(PriorityIndex, "restore", late)
    rb.load_state_dict(state)
    threads[0].join()
    assert len(rb) == 5
    assert rb.sampler.state_dict()["leaves"][:6].tolist() == [1, 1, 1, 1, 1, 0]
    rb.close()


@pytest.mark.parametrize("storage", ["ram", "memmap", "device"])
def test_writers_wait_for_a_load(storage):
    rb = buffer(STORAGES[storage](), Watching(), n=3)
    rb.sampler.rb = rb
    state = rb.storage.state_dict()
    without = {name: value for name, value in state.items() if name != "rows"}

    def fill(tensors):
        assert len(rb) == 0, "nobody reads what is just being filled"
        rb.sampler.write()
        for tensor, field in zip(tensors, state["rows"], strict=True):
            tensor[:3] = field

    rb.storage.prepare_rows(without, SimpleNamespace(fill=fill)).commit()
    rb.sampler.thread.join()
    assert rb.sampler.waited == [True]
    assert rb["step"].tolist() == [0, 1, 2, 0]
    rb.close()


@pytest.mark.parametrize("storage", ["ram", "memmap", "list", "device"])
@pytest.mark.parametrize("part", ["buffer", "storage"])
def test_a_load_waits_for_who_has_placed_rows(storage, part):
    """And does not pause him: he would wait for the load, and it for him."""
    rb = buffer(STORAGES[storage](), n=3)
    one = rb if part == "buffer" else rb.storage
    thread = threading.Thread(target=one.load_state_dict, args=(one.state_dict(),))
    with rb.storage.placing:
        thread.start()
        thread.join(0.1)
        assert rb.extend(rows(1)).tolist() == [3]
    thread.join()
    assert len(rb) == 3
    rb.close()


def test_trees():
    tree = {"a": [1, None, {"b": torch.ones(2)}], "c": "x", "d": 1.5, "e": True}
    assert bits(mapped(tree, lambda tensor: tensor * 0)) == bits(
        {"a": [1, None, {"b": torch.zeros(2)}], "c": "x", "d": 1.5, "e": True}
    )
    copy_ = copied({"a": torch.nn.Parameter(torch.ones(2))})
    assert type(copy_["a"]) is torch.Tensor
    assert not copy_["a"].requires_grad


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_carry_it(tmp_path):
    import torch.distributed.checkpoint as dcp

    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=7, generator=torch.Generator().manual_seed(0))
    state = rb.state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded = mapped(state, torch.zeros_like)
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert bits(loaded) == bits(state)
    other = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5))
    other.load_state_dict(loaded)
    assert contents(other) == contents(rb)
    tensors = []
    mapped(state, tensors.append)
    assert all(one.is_contiguous() and type(one) is torch.Tensor for one in tensors)
    memory = [one.untyped_storage().data_ptr() for one in tensors if one.numel()]
    assert len(set(memory)) == len(memory), "safetensors takes none that share memory"


def test_a_deepcopy_and_a_load_agree():
    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=L + 3, generator=torch.Generator().manual_seed(0))
    assert contents(copy.deepcopy(rb)) == contents(rb)
