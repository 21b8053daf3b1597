"""Methods of TorchRL's that a subclass overrides: a buffer calls them as TorchRL's does, with the same results."""

import copy
import pickle

import pytest
import torch
import torchrl.data
from tensordict import TensorDict

import engram
from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MaxInFlight,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    RateLimited,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    RowError,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)


def rows(start, stop):
    step = torch.arange(start, stop)
    done = (step % 4 == 3).unsqueeze(-1)
    after = {"reward": torch.ones(len(step), 1), "done": done}
    return TensorDict({"a": step.float(), "episode": step // 4, "next": after}, [len(step)])


def plain(index):
    return index if index is None else torch.as_tensor(index).tolist()


# ---- the same program with both libraries ------------------------------------------------------------------------------------


def every_hook(lib, storage):
    said = []

    class Last(lib.RandomSampler):
        def sample(self, storage, batch_size):
            return torch.arange(len(storage) - batch_size, len(storage)), {"weight": torch.full((batch_size,), 0.5)}

        def add(self, index):
            said.append(("sampler.add", plain(index)))

        def extend(self, index):
            said.append(("sampler.extend", plain(index)))

        def mark_update(self, index, *, storage=None):
            said.append(("mark_update", plain(index)))

        def _empty(self):
            said.append("emptied")

    class Logged(lib.TensorDictRoundRobinWriter):
        def add(self, data):
            said.append(("add", plain(super().add(data))))
            return said[-1][1]

        def extend(self, data):
            index = super().extend(data.clone().set("a", data["a"] + 100))
            said.append(("extend", plain(index)))
            return index

    class Halved(getattr(lib, storage)):
        def set(self, cursor, data, *, set_cursor=True):
            said.append(("set", plain(cursor)))
            super().set(cursor, data.clone().set("a", data["a"] * 2), set_cursor=set_cursor)

        def get(self, index):
            data = super().get(index).clone()
            return data.set("a", data["a"] / 2 + 0.5)

    rb = lib.TensorDictReplayBuffer(storage=Halved(10), sampler=Last(), writer=Logged(), batch_size=3)
    rb.extend(rows(0, 7))
    rb.add(rows(7, 8)[0])
    rb.extend(rows(8, 12))
    batch, info = rb.sample(return_info=True)
    said.append((batch["a"].tolist(), batch["weight"].tolist(), batch["index"].tolist(), sorted(info)))
    said += [rb[:]["a"].tolist(), rb[2]["a"].tolist(), rb[[4, 1]]["a"].tolist()]
    rb.empty()
    return said


def best_rows(lib, storage):
    said = []

    class Even(lib.TensorDictMaxValueWriter):
        def get_insert_index(self, data):
            if data["a"] % 2 == 1:
                return None
            said.append((float(data["a"]), super().get_insert_index(data)))
            return said[-1][1]

    rb = lib.TensorDictReplayBuffer(storage=getattr(lib, storage)(4), writer=Even(rank_key="a"), batch_size=2)
    said += [plain(rb.extend(rows(0, 9))), plain(rb.extend(rows(5, 14)))]
    said += [plain(rb.add(rows(at, at + 1)[0])) for at in (3, 30)]
    return said, sorted(rb[:]["a"].tolist())


def best_rows_set(lib, storage):
    said = []

    class Logged(getattr(lib, storage)):
        def set(self, cursor, data, *, set_cursor=True):
            said.append((plain(cursor), data["a"].tolist()))
            super().set(cursor, data, set_cursor=set_cursor)

    writer = lib.TensorDictMaxValueWriter(rank_key="a")
    rb = lib.TensorDictReplayBuffer(storage=Logged(4), writer=writer, batch_size=2)
    said += [plain(rb.extend(rows(*span))) for span in ((0, 3), (5, 8), (0, 2))]
    return said, [plain(rb.add(rows(at, at + 1)[0])) for at in (1, 9)], sorted(rb[:]["a"].tolist())


def rows_set_one_by_one(lib, storage):
    said = []

    class Slow(getattr(lib, storage)):
        def set(self, cursor, data, *, set_cursor=True):
            said.append(plain(cursor))
            for at, row in [(cursor, data)] if isinstance(cursor, int) else zip(plain(cursor), data, strict=True):
                super().set(at, row.clone().set("a", row["a"] * 2), set_cursor=set_cursor)

    rb = lib.TensorDictReplayBuffer(storage=Slow(5), batch_size=2)
    written = [plain(rb.extend(rows(*span))) for span in ((0, 3), (3, 6))] + [rb.add(rows(6, 7)[0])]
    return said, written, rb[:]["a"].tolist()


def windows(lib, storage):
    class Counted(lib.SliceSampler):
        def sample(self, storage, batch_size):
            index, info = super().sample(storage, batch_size)
            return index, {**info, "place": torch.arange(batch_size)}

    sampler = Counted(slice_len=2, traj_key="episode")
    rb = lib.TensorDictReplayBuffer(storage=getattr(lib, storage)(40), sampler=sampler, batch_size=8)
    rb.extend(rows(0, 40))
    batch, info = rb.sample(return_info=True)
    found = batch["a"].diff()[::2].tolist(), batch["next", "truncated"].flatten().tolist(), batch["place"].tolist()
    return found, batch["index"].shape, (batch["a"] == batch["index"].squeeze(-1)).all().item(), sorted(map(str, info))


def epochs(lib, storage):
    class Counted(lib.SamplerWithoutReplacement):
        def sample(self, storage, batch_size):
            return super().sample(storage, batch_size)

    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), sampler=Counted(), batch_size=4)
    rb.extend(torch.arange(10))
    batches = list(rb)
    return list(map(len, batches)), torch.cat(batches).sort().values.tolist()


def matrices(lib, storage):
    class Grid(lib.RandomSampler):
        def sample(self, storage, batch_size):
            return torch.arange(batch_size * 3).reshape(batch_size, 3), {"weight": torch.arange(batch_size) * 0.5}

    rb = lib.TensorDictReplayBuffer(storage=getattr(lib, storage)(20), sampler=Grid(), batch_size=4)
    rb.extend(rows(0, 20))
    batch = rb.sample()
    return batch.shape, batch["a"].tolist(), batch["index"].tolist(), batch["weight"].tolist()


PROGRAMS = [every_hook, best_rows, best_rows_set, rows_set_one_by_one, windows, epochs, matrices]


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.__name__)
def test_results_are_those_of_torchrl(program, storage):
    assert program(engram, storage) == program(torchrl.data, storage)


# ---- with what TorchRL does not have -----------------------------------------------------------------------------------------


class Even(RandomSampler):
    def __init__(self, step=2):
        super().__init__()
        self.step, self.calls, self.told = step, 0, []

    def sample(self, storage, batch_size):
        self.calls += 1
        index, info = super().sample(storage, batch_size)
        return index // self.step * self.step, info

    def extend(self, index):
        self.told.append(index.tolist())


class Counted(TensorDictRoundRobinWriter):
    calls = 0

    def add(self, data):
        self.calls += 1
        return super().add(data)

    def extend(self, data):
        self.calls += 1
        return super().extend(data)


class Doubled(LazyTensorStorage):
    def get(self, index):
        data = super().get(index).clone()
        return data.set("a", data["a"] + 0.5)

    def set(self, cursor, data, *, set_cursor=True):
        super().set(cursor, data.clone().set("a", data["a"] * 2), set_cursor=set_cursor)


def buffer(size=20, **arguments):
    parts = {"storage": Doubled(size), "sampler": Even(), "writer": Counted(), "batch_size": 6}
    return TensorDictReplayBuffer(**{**parts, **arguments})


@pytest.mark.parametrize("prefetch", [None, 3])
def test_draws_follow_from_the_generator(prefetch):
    def drawn():
        rb = buffer(prefetch=prefetch, generator=torch.Generator().manual_seed(3))
        rb.extend(rows(0, 20))
        return [rb.sample()["a"].tolist() for _ in range(3)]

    first = drawn()
    assert first == drawn()
    assert first[0] != first[1]
    assert {a % 4 for batch in first for a in batch} == {0.5}


def test_lanes_stay_as_they_were_named():
    rb = buffer(storage=Doubled(8, lanes=2))
    assert rb.extend(rows(0, 2)).tolist() == [0, 4]
    assert rb.on_lane(1).extend(rows(2, 4)).tolist() == [5, 6]
    assert rb.extend(rows(4, 8), lane=[0, 1, 0, 1]).tolist() == [1, 7, 2, 4]
    assert rb.add(rows(8, 9)[0]) == 5
    assert rb.writer.calls == 4
    assert rb.sampler.told == [[0, 4], [5, 6], [1, 7, 2, 4]]
    assert rb[:]["a"].tolist() == [0.5, 8.5, 12.5, 14.5, 16.5, 6.5, 10.5]


class Pieces(LazyTensorStorage):
    """Sets two rows at a time, and then the first of all again."""

    def set(self, cursor, data, *, set_cursor=True):
        for at in range(0, len(cursor), 2):
            super().set(cursor[at : at + 2], data[at : at + 2])
        super().set(cursor[:1], data[:1].clone().set("a", data["a"][:1] + 50))


def test_pieces_go_where_all_rows_would():
    rb = buffer(storage=Pieces(8, lanes=2), sampler=RandomSampler())
    assert rb.extend(rows(0, 5), lane=[0, 1, 0, 1, 0]).tolist() == [0, 4, 1, 5, 2]
    assert rb.extend(rows(5, 8), lane=1).tolist() == [6, 7, 4]
    assert rb.storage[[0, 4, 1, 5, 2, 6, 7]]["a"].tolist() == [50, 7, 2, 3, 4, 55, 6]


def test_items_of_a_list_are_set_as_one_likes():
    class Counting(ListStorage):
        calls = 0

        def set(self, cursor, data, *, set_cursor=True):
            self.calls += 1
            for at, item in zip(cursor.tolist(), data, strict=True):
                super().set(at, item + 1)

    rb = ReplayBuffer(storage=Counting(4), batch_size=2)
    for span in ((0, 3), (3, 5)):
        rb.extend(list(torch.arange(*span)))
    assert rb[:].tolist() == [5, 2, 3, 4]
    assert rb.storage.calls == 2  # not once for each item


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on(copied):
    rb = buffer()
    rb.extend(rows(5, 7))
    rb.sample()
    other = copied(rb)
    other.extend(rows(1, 2))
    assert other[:]["a"].tolist() == [10.5, 12.5, 2.5]
    other.sample()
    assert (rb.writer.calls, other.writer.calls, other.sampler.calls) == (1, 2, 2)


def test_processes_share_what_methods_write():
    rb = buffer(shared=True)
    rb.extend(rows(0, 3))
    other = copy.copy(rb)
    other.extend(rows(3, 5))
    assert rb[:]["a"].tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]


def test_states_and_dumps_hold_what_is_stored(tmp_path):
    rb, one, two = buffer(), buffer(), buffer()
    rb.extend(rows(5, 7))
    one.load_state_dict(rb.state_dict())
    rb.dumps(tmp_path / "dump")
    two.loads(tmp_path / "dump")
    assert one[:]["a"].tolist() == two[:]["a"].tolist() == [10.5, 12.5]


def test_components_are_swapped():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    rb.extend(rows(0, 4))
    rb.set_sampler(Even(100))
    rb.set_writer(Counted())
    assert rb.sample()["a"].tolist() == [0.0] * 4
    rb.extend(rows(4, 6))
    rb.set_storage(Doubled(9))
    rb.extend(rows(5, 6))
    assert rb.sample()["a"].tolist() == [10.5] * 4
    assert rb.writer.calls == 2
    for part in (rb.set_sampler(RandomSampler()), rb.set_writer(TensorDictRoundRobinWriter())):
        part.calls = 0
    rb.extend(rows(5, 6))
    assert part.calls == 0


def test_an_expander_and_an_ensemble_ask_the_sampler_inside():
    rb = buffer(storage=LazyTensorStorage(20), sampler=NStep(Even(), n=2, gamma=0.5, traj_key="episode"))
    rb.extend(rows(0, 20))
    assert (rb.sample()["a"] % 2 == 0).all()
    assert rb.sampler.told == [list(range(20))]
    members = [buffer(), buffer()]
    both = ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True, num_buffer_sampled=2)
    members[0].extend(rows(0, 10))
    members[1].extend(rows(20, 30))
    batch = both.sample()
    assert (batch["a"] % 4 == 0.5).all()
    assert [len(batch["a"][i].unique()) > 0 and float(batch["a"][i].max()) < 40 * (i + 1) for i in range(2)] == [
        True
    ] * 2
    assert [member.sampler.calls for member in members] == [1, 1]


def test_a_write_that_is_not_admitted_is_not_begun():
    rb = buffer(sampler=ConsumingSampler())
    rb.limit(MaxInFlight(4))
    rb.extend(rows(0, 4))
    with pytest.raises(RateLimited):
        rb.extend(rows(4, 6), timeout=0)
    assert rb.writer.calls == 1
    rb.sample()
    rb.extend(rows(4, 6), timeout=0)
    assert rb.writer.calls == 2


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_writer_may_set_rows_itself(storage):
    class Own(RoundRobinWriter):
        at = 0

        def add(self, data):
            return int(self.extend([data] if storage is ListStorage else data.unsqueeze(0))[0])

        def extend(self, data):
            index = (self.at + torch.arange(len(data))) % self._storage.max_size
            self.at += len(data)
            self._storage.set(index, data)
            return index

    rb = ReplayBuffer(storage=storage(6), writer=Own(), batch_size=3)
    assert rb.extend(torch.arange(4.0)).tolist() == [0, 1, 2, 3]
    assert rb.extend(torch.arange(4.0, 7.0)).tolist() == [4, 5, 0]
    assert rb.add(torch.tensor(9.0)) == 1
    assert torch.as_tensor(list(rb[:])).tolist() == [6, 9, 2, 3, 4, 5]


def test_priorities_in_torchrls_form():
    class Doubling(PrioritizedSampler):
        def update_priority(self, index, priority, *, storage=None):
            super().update_priority(index, priority * 2, storage=storage)

    rb = buffer(storage=LazyTensorStorage(4), sampler=Doubling(4, alpha=1.0, beta=1.0, eps=0.0))
    rb.extend(rows(0, 4))
    tickets = rb.writer.generations_of(torch.arange(4)), rb.storage.tickets_of(torch.arange(4))
    rb.extend(rows(4, 5))  # over row 0
    rb.update_priority(torch.arange(4), torch.full((4,), 3.0), generation=tickets[1])
    assert rb.sampler.priorities().leaves(4).tolist() == [1.0, 6.0, 6.0, 6.0]
    rb[1] = rows(9, 10)[0]  # an edit leaves the handle good, and so does a load
    rb.update_priority(torch.arange(4), torch.full((4,), 4.0), generation=tickets[1])
    assert rb.sampler.priorities().leaves(4).tolist() == [1.0, 8.0, 8.0, 8.0]
    rb.load_state_dict(rb.state_dict())
    rb.update_priority(torch.arange(4), torch.full((4,), 5.0), generation=tickets[1])
    assert rb.sampler.priorities().leaves(4).tolist() == [1.0, 10.0, 10.0, 10.0]


def test_a_sampler_whose_only_method_is_sample():
    class Own(engram.Sampler):
        def sample(self, storage, batch_size):
            return torch.randint(len(storage), (batch_size,), generator=self._rng).tolist(), {"weight": 0.5}

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict): ...

    rb = buffer(sampler=Own())
    rb.extend(rows(0, 9))
    assert rb.sample()["weight"].tolist() == [0.5] * 6


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (None, TypeError),
        (torch.tensor([0]), TypeError),
        ((torch.tensor([20]), {}), engram.RowError),
        ((torch.tensor([-1]), {}), engram.RowError),
        ((torch.tensor([0.5]), {}), engram.RowError),
        ((["a"], {}), TypeError),
    ],
)
def test_what_sample_must_return(returned, error):
    sampler = type("Wrong", (RandomSampler,), {"sample": lambda *_: returned})()
    rb = buffer(sampler=sampler)
    rb.extend(rows(0, 4))
    with pytest.raises(error, match=r"sample: Wrong\.sample: expected"):
        rb.sample()


@pytest.mark.parametrize(
    ("part", "base", "name", "instead"),
    [
        ("storage", LazyTensorStorage, "_empty", "empty"),
        ("storage", LazyMemmapStorage, "_empty", "empty"),
        ("storage", ListStorage, "_set_item", "set"),
        ("storage", ListStorage, "_get_item", "get"),
        ("sampler", RandomSampler, "_sampleable_count", "can_sample"),
        ("writer", RoundRobinWriter, "generations_of", "written"),
        ("sampler", NStep, "sample", "that of the sampler inside"),
    ],
)
def test_what_is_never_called_is_refused(part, base, name, instead):
    arguments = {"storage": (10,), "sampler": (RandomSampler(), 2, 0.5) if base is NStep else (), "writer": ()}[part]
    made = type("Mine", (base,), {name: lambda *_: None})(*arguments)
    with pytest.raises(TypeError, match=rf"Mine\.{name}: a buffer never calls it\. Override {instead} in its place"):
        ReplayBuffer(**{"storage": LazyTensorStorage(10), part: made})
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(TypeError, match="never calls it"):
        getattr(rb, f"set_{part}")(made)
    rb.extend(torch.arange(3))
    assert len(rb) == 3


def by_number(base):
    """A writer that puts a row where its number says, and passes over each third one."""

    def get_insert_index(self, data):
        number = int(data["a"])
        return None if number % 3 == 2 else number % 7

    return type("ByNumber", (base,), {"get_insert_index": get_insert_index})


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("base", [RoundRobinWriter, TensorDictRoundRobinWriter])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement, ConsumingSampler])
def test_any_writer_is_asked_for_the_place_of_each_row(base, storage, sampler, shared):
    if storage is ListStorage and (shared or sampler is ConsumingSampler):
        pytest.skip("a list is private")
    first = [0, 1, 3, 4] if storage is not ListStorage else [0, 1]  # which has no gaps
    rb = TensorDictReplayBuffer(storage=storage(10), sampler=sampler(), writer=by_number(base)(), batch_size=2)
    if shared:
        rb.share()
    written = rb.extend(rows(0, 5)[: max(first) + 1])
    assert written.tolist() == ([0, 1, -1, 3, 4] if storage is not ListStorage else [0, 1])
    assert rb.add(rows(7, 8)[0]) == 0
    assert rb.add(rows(8, 9)[0]) is None
    assert rb.extend(rows(14, 16)).tolist() == [-1, 1]
    assert rb[:]["a"][first].tolist() == [7.0, 15.0, 3.0, 4.0][: len(first)]
    assert set(rb.sample()["a"].tolist()) <= {0.0, 3.0, 4.0, 7.0, 15.0}


def test_places_of_rows_keep_priorities_and_are_asked_beside_other_overrides():
    said = []

    class Both(by_number(TensorDictRoundRobinWriter)):
        def extend(self, data):
            said.append("extend")
            return super().extend(data)

    class Set(LazyTensorStorage):
        def set(self, cursor, data, *, set_cursor=True):
            said.append("set")
            super().set(cursor, data, set_cursor=set_cursor)

    sampler = PrioritizedSampler(10, 1.0, 1.0)
    rb = TensorDictReplayBuffer(storage=Set(10), sampler=sampler, writer=Both(), batch_size=64)
    assert rb.extend(rows(6, 9)).tolist() == [6, 0, -1]
    assert rb.extend(rows(10, 11)).tolist() == [3]
    assert said == ["extend", "set"] * 2
    rb.update_priority(torch.tensor([0, 1, 2, 4, 5, 6]), torch.full((6,), 1e-12))
    assert set(rb.sample()["a"].tolist()) == {10.0}


@pytest.mark.parametrize("more", [{"lanes": 2}, {"ndim": 2}])
def test_places_of_rows_need_one_lane(more):
    writer = by_number(RoundRobinWriter)()
    match = r"ByNumber\.get_insert_index: expected a storage with ndim=1 and one lane, got LazyTensorStorage"
    with pytest.raises(ValueError, match=match):
        ReplayBuffer(storage=LazyTensorStorage(12, **more), writer=writer)
    rb = ReplayBuffer(storage=LazyTensorStorage(12, **more))
    with pytest.raises(ValueError, match=match):
        rb.set_writer(writer)


@pytest.mark.parametrize("at", [10, -1])
def test_a_place_outside_the_storage_raises(at):
    writer = type("Mine", (RoundRobinWriter,), {"get_insert_index": lambda self, data: at})()
    rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=writer)
    with pytest.raises(RowError, match=rf"row {at} is outside \[0, 10\)"):
        rb.extend(torch.arange(3))
    assert len(rb) == 0


def test_windows_are_drawn_again_as_a_whole():
    """Another writer replaces rows between the draw and the read."""

    class Late(SliceSampler):
        after = staticmethod(lambda: None)

        def sample(self, storage, batch_size):
            drawn = super().sample(storage, batch_size)
            self.after()
            return drawn

    rb = ReplayBuffer(storage=LazyTensorStorage(16), sampler=Late(slice_len=4, traj_key="episode"), batch_size=8)
    rb.extend(rows(0, 16))
    reads, read = [], rb.storage.read

    def late(index, expected=None):
        reads.append(index)
        if len(reads) == 1:
            rb.extend(rows(16, 32))
        return read(index, expected)

    rb.storage.read = late
    assert (rb.sample()["a"].view(2, 4).diff(dim=1) == 1).all()
    assert len(reads) > 1
