"""Components that break one rule each: the contract finds every one of them, and says which rule."""

import copy
import pickle
import threading

import pytest
import torch

from engram import DeviceCastTransform, Draw, LazyTensorStorage, ListStorage, RandomSampler, WritePlan
from engram.testing import Contract, SamplerContract, StorageContract, TransformContract, WriterContract


def failures(contract, made, **more):
    """Which tests of a contract fail for a component, and with which message."""
    ways = (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)))
    case = type("Case", (contract,), {"make": lambda self, *args: made(*args), "copies": ways, **more})
    found = {}
    for name in dir(case):
        if name.startswith("test_"):
            try:
                getattr(case(), name)()
            except Exception as error:  # noqa: BLE001 - whatever it is, the component fails
                found[name] = str(error)
    return found


class Good:
    """A sampler that keeps all rules, for others to break one: its next rows follow those that it drew last."""

    def __init__(self):
        self.at = torch.zeros(1, dtype=torch.int64)

    def draw(self, extent, batch_size, key):
        skip = torch.randint(3, (1,), generator=torch.Generator().manual_seed(key))
        self.at = self.at + skip
        return Draw(extent.rows((self.at + torch.arange(batch_size)) % extent.size))

    def observe(self, write, data): ...

    def update_priority(self, index, priority, *, generation=None): ...

    def state_dict(self):
        return {"at": self.at.clone()}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"].clone()


class DrawsDeadRows(Good):
    def draw(self, extent, batch_size, key):
        return Draw(torch.arange(batch_size) + extent.capacity - batch_size)


class DrawsTooFew(Good):
    def draw(self, extent, batch_size, key):
        return Draw(super().draw(extent, batch_size, key).rows[1:])


class Remembers(Good):
    """Rows that it heard of, also after ``empty()``."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def observe(self, write, data):
        self.heard = self.heard if write is None else [*self.heard, *write.rows.tolist()]

    def draw(self, extent, batch_size, key):
        return Draw(torch.tensor(sorted(set(self.heard))[-batch_size:]))


class DrawsFromTheGlobalGenerator(Good):
    def draw(self, extent, batch_size, key):
        return Draw(extent.rows(torch.randint(extent.size, (batch_size,))))


class ForgetsItsState(Good):
    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict): ...


class DrawsInPlace(Good):
    def draw(self, extent, batch_size, key):
        before = self.at
        drawn = super().draw(extent, batch_size, key)
        self.at = before.copy_(self.at)
        return drawn


class SharesItsState(DrawsInPlace):
    def state_dict(self):
        return {"at": self.at}


class KeepsTheLoadedState(DrawsInPlace):
    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]


class ChangesWhatIsWritten(Good):
    def observe(self, write, data):
        if data is not None:
            data["step"] += 1


class CannotBeSent(Good):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class LacksAMethod:
    draw, observe = Good.draw, Good.observe
    state_dict, load_state_dict = Good.state_dict, Good.load_state_dict


class RefusesPriorities(Good):
    def update_priority(self, index, priority, *, generation=None):
        raise ValueError("no priorities")


def test_the_good_one_keeps_all_rules():
    assert not failures(SamplerContract, lambda capacity: Good())


@pytest.mark.parametrize(
    ("sampler", "test", "said"),
    [
        (DrawsDeadRows, "test_draws_live_rows", ""),
        (DrawsDeadRows, "test_draws_nothing_that_was_there_before_empty", ""),
        (DrawsTooFew, "test_draws_live_rows", ""),
        (Remembers, "test_draws_nothing_that_was_there_before_empty", ""),
        (DrawsFromTheGlobalGenerator, "test_draws_follow_from_the_generator_alone", "derive"),
        (ForgetsItsState, "test_a_state_goes_on_where_it_was_taken", "state_dict"),
        (ForgetsItsState, "test_a_dump_goes_on_where_it_was_saved", "dumps"),
        (SharesItsState, "test_a_state_is_a_copy", "state_dict() to copy"),
        (KeepsTheLoadedState, "test_a_state_is_a_copy", "load_state_dict() to copy"),
        (ChangesWhatIsWritten, "test_written_data_stays_as_it_is", "observe"),
        (CannotBeSent, "test_copies_go_on_by_themselves", "lock"),
        (LacksAMethod, "test_follows_the_protocol", "update_priority"),
        (RefusesPriorities, "test_takes_or_ignores_priorities_of_drawn_rows", "no priorities"),
    ],
)
def test_broken_samplers(sampler, test, said):
    found = failures(SamplerContract, lambda capacity: sampler())
    assert said in found[test]


# ---- writers -----------------------------------------------------------------------------------------------------------


class GoodWriter:
    def place(self, extent, n, lane, data):
        return WritePlan(rows=data["step"] % extent.capacity)


class CountsWhenAsked:
    """Takes a place for a write that is refused afterwards."""

    def __init__(self):
        self.at = 0

    def place(self, extent, n, lane, data):
        self.at += n
        return WritePlan(rows=(self.at + torch.arange(n)) % extent.capacity)


class Outside(GoodWriter):
    def place(self, extent, n, lane, data):
        return WritePlan(rows=data["step"])


class ChangesData(GoodWriter):
    def place(self, extent, n, lane, data):
        data["step"] = data["step"] + 1
        return super().place(extent, n, lane, data)


class TakesAll(GoodWriter):
    """Says that it takes nothing."""


def test_the_good_writer_keeps_all_rules():
    assert not failures(WriterContract, lambda capacity: GoodWriter())


@pytest.mark.parametrize(
    ("writer", "test"),
    [
        (CountsWhenAsked, "test_a_place_that_is_not_used_has_no_effect"),
        (CountsWhenAsked, "test_starts_again_after_empty"),
        (CountsWhenAsked, "test_a_state_goes_on_where_it_was_taken"),
        (Outside, "test_rows_hold_what_was_written"),
        (ChangesData, "test_rows_hold_what_was_written"),
        (object, "test_follows_the_protocol"),
    ],
)
def test_broken_writers(writer, test):
    assert test in failures(WriterContract, lambda capacity: writer())


def test_a_writer_that_is_said_to_refuse_and_does_not():
    found = failures(WriterContract, lambda capacity: TakesAll(), read_only=True)
    assert "expected an error for a write" in found["test_a_refused_write_changes_nothing"]


# ---- transforms --------------------------------------------------------------------------------------------------------


class Plain:
    def forward(self, data):
        return data.copy()

    def inv(self, data):
        return data.copy()


class ChangesInPlace(Plain):
    def forward(self, data):
        data["step"] = data["step"] * 2
        return data


class ChangesWritten(Plain):
    def inv(self, data):
        data["step"] += 1
        return data


class DropsRows(Plain):
    def forward(self, data):
        return data[1:]


class RefusesData(Plain):
    def inv(self, data):
        raise ValueError("no data")


class CountsReads(Plain):
    def __init__(self):
        self.reads = 0

    def forward(self, data):
        self.reads += 1
        return data.copy().set("step", data["step"] + self.reads)


class SharedAverage(Plain):
    """A copy has the average of the original."""

    def __init__(self):
        self.mean = torch.zeros(())

    def inv(self, data):
        self.mean += data["step"].double().mean()
        return data.copy()

    def forward(self, data):
        return data.copy().set("step", data["step"] - self.mean)

    def __deepcopy__(self, memo):
        twin = SharedAverage()
        twin.mean = self.mean
        return twin

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


def test_the_plain_transform_keeps_all_rules():
    assert not failures(TransformContract, Plain, inverts=True)


@pytest.mark.parametrize(
    ("transform", "test", "more"),
    [
        (ChangesInPlace, "test_data_that_is_given_stays_as_it_is", {}),
        (ChangesWritten, "test_data_that_is_given_stays_as_it_is", {}),
        (ChangesWritten, "test_forward_undoes_inv", {"inverts": True}),
        (DropsRows, "test_rows_stay_rows", {}),
        (CountsReads, "test_reading_changes_nothing", {}),
        (SharedAverage, "test_copies_compute_the_same_and_go_on_by_themselves", {}),
        (SharedAverage, "test_a_state_is_all_there_is", {}),
        (RefusesData, "test_a_buffer_with_it_writes_and_samples", {}),
    ],
)
def test_broken_transforms(transform, test, more):
    assert test in failures(TransformContract, transform, **more)


# ---- storages ----------------------------------------------------------------------------------------------------------


class NeverForgets(ListStorage):
    def empty(self, *, keep_write_count=True): ...


class GivesNoState(ListStorage):
    def state_dict(self, **more):
        return ListStorage(self.max_size).state_dict(**more)


class SharesCopies(LazyTensorStorage):
    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize(
    ("storage", "test"),
    [
        (NeverForgets, "test_empty_forgets_all"),
        (GivesNoState, "test_a_state_goes_on_where_it_was_taken"),
        (SharesCopies, "test_copies_go_on_by_themselves"),
        (lambda capacity: LazyTensorStorage(capacity - 1), "test_holds_what_was_written"),
    ],
)
def test_broken_storages(storage, test):
    assert test in failures(StorageContract, storage)


# ---- the contracts themselves ------------------------------------------------------------------------------------------


def test_without_a_test_runner():
    class Case(TransformContract):
        def make(self):
            return DeviceCastTransform("cpu")

    Case().run_all()

    class Broken(SamplerContract):
        def make(self, capacity):
            return LacksAMethod()

    with pytest.raises(Exception, match="update_priority"):
        Broken().run_all()


def test_a_note_names_the_test_that_failed():
    class Overflows(RandomSampler):
        def draw(self, extent, batch_size, key):
            raise OverflowError("exp of the rewards")

    class Case(SamplerContract):
        def make(self, capacity):
            return Overflows()

    with pytest.raises(OverflowError, match="exp of the rewards") as raised:
        Case().run_all()
    assert raised.value.__notes__ == ["in Case.test_draws_live_rows"]


def test_a_contract_says_what_to_make():
    for contract in (SamplerContract, WriterContract, StorageContract, TransformContract):
        assert issubclass(contract, Contract)
        with pytest.raises(NotImplementedError):
            contract().run_all()


def test_of_other_rows():
    class Case(SamplerContract):
        batch_size = 4

        def make(self, capacity):
            return RandomSampler()

        def rows(self, first, n):
            return super().rows(first, n).select("step")

    Case().run_all()
