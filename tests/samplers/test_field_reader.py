"""Samplers of one's own that draw by what rows hold: what they read, beside the rows themselves and beside others who write."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import (
    Draw,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    NStep,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorStorage,
)
from engram.testing import SamplerContract
from tests.store.processes import Child


class Own:
    """The rest of the protocol."""

    reads = ("group",)

    def observe(self, write, data): ...

    def update_priority(self, index, priority, *, generation=None): ...

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict): ...


class Stratified(Own):
    """As many rows of every group."""

    def draw(self, extent, batch_size, key, fields):
        if len(fields.changed):
            groups, counts = fields["group"][fields.rows].unique(return_counts=True)
            self.groups, self.counts = groups, counts
            self.rows = fields.rows[fields["group"][fields.rows].argsort(stable=True)]
        dice = torch.Generator().manual_seed(key)
        chosen = torch.arange(batch_size) % len(self.groups)
        within = (torch.rand(batch_size, generator=dice) * self.counts[chosen]).long()
        rows = self.rows[self.counts.cumsum(0)[chosen] - self.counts[chosen] + within]
        return Draw(rows, fields.tickets[rows], {"wanted": self.groups[chosen]})


class Looking(Own):
    """Keeps what it is shown."""

    reads = ("group", ("next", "reward"))

    def draw(self, extent, batch_size, key, fields):
        kept = (fields.rows, fields.tickets, fields.changed, fields["group"], fields[("next", "reward")])
        self.rows, self.tickets, self.changed, self.group, self.reward = map(torch.clone, kept)
        return Draw(self.rows[:1].expand(batch_size), self.tickets[self.rows[:1]].expand(batch_size))


def steps(first, n):
    ids = torch.arange(first, first + n)
    return {"id": ids, "group": ids % 3, "next": {"reward": -ids.float()[:, None]}}


class TestStratified(SamplerContract):
    """What samplers owe a buffer, this one too."""

    def make(self, capacity):
        class BySteps(Stratified):
            reads = ("step",)

            def draw(self, extent, batch_size, key, fields):
                rows = fields.rows[
                    torch.randint(len(fields.rows), (batch_size,), generator=torch.Generator().manual_seed(key))
                ]
                return Draw(rows, fields.tickets[rows])

        return BySteps()


def test_groups_come_equally_often():
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=Stratified(), batch_size=300)
    rb.extend({"group": torch.tensor([0] * 900 + [1] * 90 + [2] * 10)})
    assert rb.sample()["group"].bincount().tolist() == [100, 100, 100]
    rb.extend({"group": torch.full((1000,), 7)})
    assert (rb.sample()["group"] == 7).all()
    for other in (pickle.loads(pickle.dumps(rb)), copy.deepcopy(rb)):
        assert (other.sample()["group"] == 7).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["add", "many", "edit", "patch", "empty", "lap", "nothing", "elsewhere"]), max_size=8),
    st.integers(1, 2),
)
def test_it_shows_what_is_stored(operations, lanes):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(12, lanes=lanes),
        sampler=Looking(),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=1,
    )
    rb.extend(steps(0, 2), lane=lanes - 1)
    other = ReplayBuffer(storage=rb.storage)
    written, before = 2, [-1] * 12
    for operation in ["nothing", *operations]:
        if operation == "empty":
            rb.empty()
        if operation in ("add", "many", "lap", "empty", "elsewhere"):
            n = {"add": 1, "many": 5, "lap": 15}.get(operation, 2)
            (other if operation == "elsewhere" else rb).extend(steps(written, n), lane=0)
            written += n
        row = int(rb.storage.extent().rows(torch.tensor([0])))
        if operation == "edit":
            rb.set_at_("group", [77], [row])
        if operation == "patch":
            patch = {("next", "reward"): torch.tensor([[5.0]])}
            rb.update_if_present(index=[row], generation=rb.writer.generations_of([row]), patch=patch)
        rb.sample()
        seen, numbers = rb.sampler, rb.storage.tickets_of(torch.arange(12)).tolist()
        live = [row for row in range(12) if numbers[row] >= 0]
        assert seen.rows.tolist() == live
        assert seen.tickets.tolist() == numbers
        assert seen.group[live].tolist() == rb["group"].tolist()
        assert seen.reward[live].tolist() == rb["next", "reward"].tolist()
        assert seen.changed.tolist() == [row for row in range(12) if numbers[row] != before[row]]
        before = numbers


def write(rb, lane):
    """Rows of other groups, in every place."""
    for i in range(400):
        ids = torch.arange(8) + i
        rb.extend({"id": ids, "group": ids % 3, "next": {"reward": -ids.float()[:, None]}}, lane=lane)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_has_what_the_sampler_has_seen(prefetch):
    """Rows change their group while they are drawn: what was drawn by one is not read as another."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(16, lanes=2), sampler=Stratified(), batch_size=12, shared=True, prefetch=prefetch
    )
    for lane in range(2):
        rb.extend(steps(0, 8), lane=lane)
    children = [Child(write, rb, lane) for lane in range(2)]
    while True:
        over = not any(child.process.is_alive() for child in children)
        batch, info = rb.sample(return_info=True)
        assert batch["group"].equal(info["wanted"])
        assert batch["group"].equal(batch["id"] % 3)
        if over:
            break
    for child in children:
        child.join()
    rb.close()


def test_it_reads_wherever_rows_are(tmp_path):
    storages = [
        LazyMemmapStorage(30, scratch_dir=tmp_path),
        LazyTensorStorage(30, ndim=2),
        TensorStorage({"id": torch.arange(30), "group": torch.arange(30) % 3, "next": {"reward": torch.zeros(30, 1)}}),
    ]
    for storage in storages:
        rb = ReplayBuffer(storage=storage, sampler=Stratified(), batch_size=6)
        if storage.ndim == 2:
            rb.extend({"id": torch.arange(30).view(3, 10), "group": (torch.arange(30) % 3).view(3, 10)})
        elif not isinstance(storage, TensorStorage) or not len(storage):
            rb.extend(steps(0, 30))
        assert rb.sample()["group"].tolist() == [0, 1, 2, 0, 1, 2]
        if storage.ndim == 1 and not rb.shared:
            rb.share()
            assert rb.sample()["group"].tolist() == [0, 1, 2, 0, 1, 2]
        rb.close()


def test_expanders_are_around_it_as_around_others():
    ids = torch.arange(30)
    data = steps(0, 30)
    data["next"]["done"] = (ids % 10 == 9)[:, None]
    data["frame"] = ids.float()[:, None, None, None].expand(30, 1, 2, 2)
    for expander in (NStep(Stratified(), 2, 0.9), FrameStack(Stratified(), 2, -3, ["frame"])):
        rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=expander, batch_size=9)
        rb.extend(data)
        assert rb.sample()["group"].bincount().tolist() == [3, 3, 3]


# ---- refusals ------------------------------------------------------------------------------------------------------------


def test_an_unknown_field_is_refused():
    class Unknown(Stratified):
        reads = ("groups",)

    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Unknown(), batch_size=2)
    rb.extend(steps(0, 4))
    with pytest.raises(
        KeyError, match=r"reads: expected stored fields, \['group', 'id', \('next', 'reward'\)\], got 'groups'"
    ):
        rb.sample()
    with pytest.raises(KeyError, match="got 'groups'"):  # at once where rows are there
        rb.set_sampler(Unknown())
    rb.set_sampler(RandomSampler())
    assert len(rb.sample()["id"]) == 2


def test_a_field_that_is_not_declared_is_refused():
    class Greedy(Stratified):
        def draw(self, extent, batch_size, key, fields):
            return fields["id"]

    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Greedy(), batch_size=2)
    rb.extend(steps(0, 4))
    with pytest.raises(KeyError, match=r"declares, \['group'\], got 'id'"):
        rb.sample()


def test_lists_have_no_fields():
    with pytest.raises(
        TypeError, match=r"Stratified: expected a tensor storage, as it declares reads=\['group'\]; a ListStorage"
    ):
        ReplayBuffer(storage=ListStorage(10), sampler=Stratified())


@pytest.mark.parametrize("reads", ["group", (), (1.5,)])
def test_what_is_declared_are_keys(reads):
    sampler = Stratified()
    sampler.reads = reads
    with pytest.raises(TypeError, match="Stratified: reads"):
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)


def test_an_empty_buffer_is_said_to_be_empty():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Stratified(), batch_size=2)
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.extend(steps(0, 4))
    rb.sample()
    rb.empty()
    with pytest.raises(NoSampleable):
        rb.sample()
