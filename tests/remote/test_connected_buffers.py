"""A connected buffer gives what a buffer over the store itself gives: the same batches, info and effects."""

import pickle

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Compose,
    ExcludeTransform,
    FrameStack,
    LazyMemmapStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PriorityError,
    RandomSampler,
    ReplayBuffer,
    RowError,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.fresh import run
from tests.serving.servers import serving, serving_each

ROWS = 48
SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": lambda: SamplerWithoutReplacement(shuffle=True),
    "priority": lambda: PrioritizedSampler(ROWS, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices-epoch": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "priority-slices": lambda: PrioritizedSliceSampler(ROWS, 1.0, 0.5, slice_len=2),
    "n-step": lambda: NStep(RandomSampler(), 2, 0.9),
    "stack": lambda: FrameStack(PrioritizedSampler(ROWS, 1.0, 0.5), 2, -1, ["frame"]),
}


def data(n=ROWS, first=0):
    steps = torch.arange(first, first + n)
    done = (steps % 4 == 3).unsqueeze(-1)
    next_ = TensorDict({"done": done, "reward": torch.ones(n, 1)}, [n])
    more = {"half": torch.ones(n, 3, dtype=torch.bfloat16), "none": torch.ones(n, 0), "bit": done}
    return TensorDict({"a": steps, "frame": steps.float().unsqueeze(-1), "next": next_, **more}, [n])


def made(kind, folder, sampler, **more):
    storage = LazyMemmapStorage(ROWS, scratch_dir=folder)
    rb = kind(storage=storage, sampler=sampler, batch_size=8, **more)
    rb.extend(data() if kind is TensorDictReplayBuffer else data().to_dict())
    if sampler.traits.prioritized:
        rb.update_priority(torch.arange(ROWS), torch.arange(ROWS) + 0.5)
    return rb


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By name: a store that is served, and one with the same rows that is not."""
    root = tmp_path_factory.mktemp("served")
    found = {}
    for name, sampler in SAMPLERS.items():
        for kind in (TensorDictReplayBuffer, ReplayBuffer):
            pair = [root / f"{name}-{kind.__name__}-{which}" for which in "ab"]
            for folder in pair:
                made(kind, folder, sampler()).close()
            found[name, kind] = pair
    with serving_each([pair[0] for pair in found.values()]):
        yield found


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def same(one, other):
    """Whether two batches are: nested dicts, TensorDicts, tuples and tensors."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert type(one) is type(other)
        assert {*one.keys()} == {*other.keys()}
        for key in one.keys():
            same(one[key], other[key])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, ReplayBuffer])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_connected_buffer_draws_what_a_local_one_draws(folders, name, kind, prefetch):
    served, twin = folders[name, kind]
    # An epoch that a connection has asked for cannot be put back: these cases use it up.
    with (
        ReplayBuffer.connect(f"unix:{served}.sock", generator=seeded(), prefetch=prefetch) as remote,
        ReplayBuffer.open(twin, generator=seeded(), prefetch=prefetch) as local,
    ):
        assert type(remote) is kind
        assert len(remote) == len(local)
        assert remote.can_sample() is True
        if "epoch" in name:
            for ours, theirs in zip(remote, local, strict=True):
                same(ours, theirs)
            return
        for _ in range(10):
            (ours, our_info), (theirs, their_info) = (rb.sample(return_info=True) for rb in (remote, local))
            same(ours, theirs)
            our_info.pop("index_generation", None)
            their_info.pop("index_generation", None)
            same(our_info, their_info)


@pytest.fixture
def served(tmp_path):
    """A prioritized store of two lanes, open here, and the address of its server."""
    folder = tmp_path / "store"
    storage = LazyMemmapStorage(ROWS, scratch_dir=folder, lanes=2)
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=8)
    rb.extend(data(10), lane=[0] * 6 + [1] * 4)
    with rb, serving(folder) as server:
        yield rb, server.address


def test_what_is_written_through_a_connection_is_there(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        assert remote.extend(data(4, 100), lane=[0, 1, 1, 0]).tolist() == [6, 28, 29, 7]
        assert remote.extend(data(2, 200), lane="each").tolist() == [8, 30]
        assert remote.add(data(1, 300)[0], lane=1) == 31
        remote.on_lane(0)
        assert remote.extend(data(1, 400)).tolist() == [9]
        assert remote.appender(lane=1).lane == 1
        assert rb["a"].tolist() == [*range(6), 100, 103, 200, 400, *range(6, 10), 101, 102, 201, 300]
        assert len(remote) == remote.write_count == 18
        assert remote.stats().keys() - {"server_streams"} == rb.stats().keys()
        assert remote.stats()["utilization"] == rb.stats()["utilization"]
        remote.empty()
        assert len(rb) == 0
        with pytest.raises(NoSampleable):
            remote.sample()


def test_environments_keep_their_lanes_as_far_as_this_end_knows(tmp_path):
    """The rows that say whose a lane is are elsewhere."""
    ids = lambda *ids: TensorDict({"collector": {"env_id": torch.tensor(ids)}}, [len(ids)])  # noqa: E731
    storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "store", lanes=2)
    with TensorDictReplayBuffer(storage=storage) as rb:
        rb.extend(ids(0, 1))
        with serving(tmp_path / "store") as server, ReplayBuffer.connect(server.address) as remote:
            assert remote.extend(ids(1, 0)).tolist() == [5, 1]
        with serving(tmp_path / "store") as server, ReplayBuffer.connect(server.address) as remote:
            assert remote.extend(ids(7, 8)).tolist() == [2, 6]
            assert remote.extend(ids(8, 7)).tolist() == [7, 3]


def test_an_end_of_a_trajectory_is_stored(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        assert remote.end_trajectory().tolist() == [5, 27]
        assert rb[[5, 27]]["next", "done"].all()


def test_priorities_are_those_of_the_store_and_stale_ones_are_counted(served):
    rb, address = served
    with ReplayBuffer.connect(address, batch_size=64) as remote:
        batch = remote.sample()
        rb.extend(data(ROWS // 2, 500), lane=0)  # replaces rows 0 to 5
        batch["td_error"] = torch.where(batch["index"] == 25, 1000.0, 0.0)
        remote.update_tensordict_priority(batch)
        again = remote.sample()  # behind them, in the same stream
        dropped = int((batch["index"] < 6).sum())
        assert remote.stats()["priority_updates_dropped"] == rb.stats()["priority_updates_dropped"] == dropped > 0
        assert (again["index"] == 25).sum() > 32
        remote.update_priority(torch.tensor([25, -1]), 0.0)
        remote.update_priority(24, torch.tensor([[3.0]]))
        assert 25 not in remote.sample()["index"]


BAD_PRIORITIES = [
    ([0], float("nan"), PriorityError),
    ([0], -1.0, PriorityError),
    ([ROWS], 1.0, RowError),
    ([0, 1], [1.0, 2.0, 3.0], RuntimeError),
    ([0.5], 1.0, TypeError),
    ([0], 1j, TypeError),
]


def test_bad_priorities_are_refused_before_they_are_sent(served):
    rb, address = served
    before = rb.state_dict()["_storage"]["priorities"]
    with ReplayBuffer.connect(address) as remote:
        for index, priority, error in BAD_PRIORITIES:
            with pytest.raises(error):
                remote.update_priority(index, priority)
        remote.sample()
    after = rb.state_dict()["_storage"]["priorities"]
    assert repr(before) == repr(after)


def test_rows_may_bring_their_priority(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        rows = data(2, 600)
        rows["td_error"] = torch.tensor([1e6, 0.0])
        index = remote.extend(rows, lane=0)
        assert (remote.sample()["index"] == index[0]).all()
        rows["td_error"] = torch.tensor([1.0, -1.0])
        with pytest.raises(PriorityError):
            remote.extend(rows, lane=0)
        assert len(rb) == 12


def test_data_that_does_not_fit_is_refused_here(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        for wrong, error in ((data(2).exclude("a"), KeyError), (data(2).set("a", torch.zeros(2)), RuntimeError)):
            with pytest.raises(error):
                remote.extend(wrong, lane=0)
        with pytest.raises(RowError):
            remote.extend(data(2), lane=2)
        with pytest.raises(RuntimeError, match="one for each lane"):
            remote.extend(data(3))
    assert len(rb) == 10


def test_transforms_output_and_batch_size_are_the_clients(served):
    _, address = served
    how = {"transform": Compose(lambda td: td.set("double", td["a"] * 2)), "batch_size": 5}
    with ReplayBuffer.connect(address, **how) as remote:
        batch = remote.sample()
        assert batch["double"].tolist() == (batch["a"] * 2).tolist()
        assert len(batch) == 5
    with ReplayBuffer.connect(address, output="numpy", prefetch=2, transform=ExcludeTransform("half")) as remote:
        batch = next(iter(remote))
        batch["a"] += 1  # its own memory
        assert batch["next"]["reward"].shape == (8, 1)


def test_a_pickle_holds_where_the_server_is_and_no_secret(served):
    _, address = served
    with ReplayBuffer.connect(address, generator=seeded()) as remote:
        raw = pickle.dumps(remote)
        with pickle.loads(raw) as copy:  # a client of its own, which draws apart
            assert copy.sample().keys() == remote.sample().keys()
            assert len(copy) == len(remote)
        assert len(raw) < 16_384


def test_a_dump_is_written_where_the_client_is(served, tmp_path):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        remote.dumps(tmp_path / "dump")
        remote.dumps(tmp_path / "dump")  # replaces it
        with pytest.raises(FileExistsError):
            remote.dumps(tmp_path)
    storage = LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "other", lanes=2)
    with TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=8) as other:
        other.loads(tmp_path / "dump")
        same(other[:], rb[:])


NEEDS_ROWS = {
    "rb[:]": lambda rb: rb[:],
    "rb[0]": lambda rb: rb[0],
    "rb[key]": lambda rb: rb["a"],
    "rb[0] = row": lambda rb: rb.__setitem__(0, data(1)[0]),
    "set_": lambda rb: rb.set_("a", torch.zeros(10)),
    "update_": lambda rb: rb.update_({"a": torch.zeros(10)}),
    "read_all_in_order": lambda rb: rb.read_all_in_order(),
    "set_sampler": lambda rb: rb.set_sampler(RandomSampler()),
    "set_writer": lambda rb: rb.set_writer(TensorDictMaxValueWriter()),
    "set_storage": lambda rb: rb.set_storage(LazyMemmapStorage(ROWS)),
    "mark_update": lambda rb: rb.mark_update([0]),
    "state_dict": lambda rb: rb.state_dict(),
    "load_state_dict": lambda rb: rb.load_state_dict({}),
    "loads": lambda rb: rb.loads("x"),
    "snapshot": lambda rb: rb.snapshot(),
    "form": lambda rb: rb.form,
    "sampler.beta": lambda rb: rb.sampler.beta,
    "sampler.beta = 1": lambda rb: setattr(rb.sampler, "beta", 1.0),
    "storage[0]": lambda rb: rb.storage[0],
    "storage.state_dict": lambda rb: rb.storage.state_dict(),
}


def test_what_needs_the_rows_here_is_refused_by_name(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        for call in NEEDS_ROWS.values():
            with pytest.raises((RuntimeError, TypeError), match="server|RemoteStorage"):
                call(remote)
        remote.sample()
    assert len(rb) == 10


def test_arguments_that_a_connection_does_not_take_are_refused(served):
    _, address = served
    with pytest.raises(TypeError, match="sampler: a connection takes"):
        ReplayBuffer.connect(address, sampler=RandomSampler())
    with pytest.raises(TypeError, match="expected a str"):
        ReplayBuffer.connect(7)
    for bad in ("nowhere", "unix:here", "http://a:1", "a:99999", ""):
        with pytest.raises(ValueError, match="address: expected"):
            ReplayBuffer.connect(bad)
    with pytest.raises(ConnectionError, match="engram serve"):
        ReplayBuffer.connect("unix:/nowhere/there.sock", patience=0)


def test_a_connected_buffer_that_was_closed_says_so(served):
    _, address = served
    remote = ReplayBuffer.connect(address, prefetch=2)
    remote.sample()
    remote.close()
    remote.close()
    with pytest.raises(RuntimeError, match="closed"):
        remote.sample()


def test_writers_that_keep_the_best_do_so_on_the_server(tmp_path):
    folder = tmp_path / "best"
    writer = TensorDictMaxValueWriter(rank_key="a")
    with TensorDictReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=folder), writer=writer, batch_size=4) as rb:
        rb.extend(data(4))
        with serving(folder) as server, ReplayBuffer.connect(server.address) as remote:
            assert sorted(remote.extend(data(3, 2)).tolist()) == [-1, 0, 1]
            assert remote.add(data(1, 0)[0]) is None
        assert sorted(rb["a"].tolist()) == [2, 3, 3, 4]


def test_prioritized_classes_connect_to_prioritized_stores_only(tmp_path):
    folder = tmp_path / "plain"
    made(TensorDictReplayBuffer, folder, RandomSampler()).close()
    with serving(folder) as server, pytest.raises(TypeError, match=r"ReplayBuffer\.connect"):
        TensorDictPrioritizedReplayBuffer.connect(server.address)


class Interrupted:
    """A reader whose answer is interrupted."""

    def read_chunk(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupt_mixes_no_answers_up(folders, prefetch):
    folder, twin = folders["uniform", TensorDictReplayBuffer]
    with (
        ReplayBuffer.connect(f"unix:{folder}.sock", generator=seeded(), prefetch=prefetch) as remote,
        ReplayBuffer.open(twin, generator=seeded()) as local,
    ):
        for _ in range(8):  # all of the first message
            same(remote.sample(), local.sample())
        remote.storage._learning._reader = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            remote.sample()
        if not prefetch:
            local.sample()  # its draw was lost
        for _ in range(20):
            same(remote.sample(), local.sample())


class Sending:
    """A stream that is interrupted when a message has just been sent."""

    def __init__(self, writer):
        self._writer = writer

    def write_metadata(self, said):
        self._writer.write_metadata(said)
        raise KeyboardInterrupt

    def write_with_metadata(self, rows, said):
        self._writer.write_with_metadata(rows, said)
        raise KeyboardInterrupt

    def close(self):
        self._writer.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_message_that_was_just_sent_is_not_answered_to_the_next(folders, prefetch):
    folder, twin = folders["uniform", TensorDictReplayBuffer]
    with (
        ReplayBuffer.connect(f"unix:{folder}.sock", generator=seeded(), prefetch=prefetch) as remote,
        ReplayBuffer.open(twin, generator=seeded()) as local,
    ):
        for _ in range(8):  # all of the first message
            same(remote.sample(), local.sample())
        remote.storage._learning._writer = Sending(remote.storage._learning._writer)
        with pytest.raises(KeyboardInterrupt):
            remote.sample()
        if not prefetch:
            local.sample()  # its draw was lost
        for _ in range(20):
            same(remote.sample(), local.sample())


def test_a_write_that_was_just_sent_is_not_answered_to_the_next(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        remote.extend(data(1, 100), lane=0)
        remote.storage._writing._writer = Sending(remote.storage._writing._writer)
        with pytest.raises(KeyboardInterrupt):
            remote.extend(data(1, 200), lane=0)
        rows = remote.extend(data(2, 300), lane=0)
        assert rb["a"][rows].tolist() == [300, 301]


def test_an_interrupted_write_is_not_sent_twice(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        remote.extend(data(1, 100), lane=0)
        remote.storage._writing._reader = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            remote.extend(data(1, 200), lane=0)
        remote.extend(data(1, 300), lane=0)
        assert rb["a"].tolist().count(200) <= 1
        assert rb["a"].tolist().count(300) == 1


@pytest.mark.parametrize("full", [None, "block"])
def test_a_forked_child_cannot_use_its_parents_connection_and_can_close_it(served, full):
    _, address = served
    run(
        """
        import os, signal, warnings
        from engram import ReplayBuffer
        remote = ReplayBuffer.connect(address, full=full)
        remote.extend(remote.sample(4), lane=0)
        if full:  # rows that stay under way
            remote.storage._under_way._send = lambda *_: signal.pause()
            remote.extend(remote.sample(4), lane=0)
        child = os.fork()
        if child == 0:
            for call in (remote.sample, lambda: len(remote)):
                try:
                    call()
                except RuntimeError as error:
                    assert "forked" in str(error)
                else:
                    os._exit(1)
            warnings.simplefilter("error")
            remote.close()
            del remote
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        remote.sample()
        if not full:
            remote.close()
        os._exit(0)
        """,
        address=address,
        full=full,
    )
