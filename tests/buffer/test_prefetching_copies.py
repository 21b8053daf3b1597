"""Copies, forks and processes of buffers that prefetch; who makes the batches."""

import copy
import os
import pickle
import threading
import time
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    DeviceLoader,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from engram.buffer import prefetch
from engram.device import pinning
from engram.device.pinning import HostMemory
from tests import fresh
from tests.buffer.prefetched import BATCH, EPOCHS, ROWS, SAMPLERS, buffer, data, engaged, made_by, rows_of
from tests.waiting import Limit

# ---- copies, forks, processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["copy", "pickle"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_copy_goes_on_with_the_same_batches(copied, sampler, who):
    rb = buffer(2, sampler)
    rows_of(rb, 3)
    other = copied(rb)
    assert rows_of(other, 12) == rows_of(rb, 12) == rows_of(buffer(0, sampler), 15)[3:]


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_what_was_saved_comes_back(sampler, who):
    rb = buffer(2, sampler)
    rows_of(rb, 3)
    saved = copy.deepcopy(rb._prefetching.entries())
    assert len(saved["batches"]) == rb.stats()["prefetch_queue_size"]
    drawn, generator = rb.sampler.state_dict(), rb._wiring.generator.get_state()
    expected = rows_of(rb, 8)
    rb.sampler.load_state_dict(drawn)
    rb._wiring.generator.set_state(generator)
    rb._prefetching.take_entries(saved)
    assert rows_of(rb, 8) == expected


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_state_goes_on_with_the_same_batches(sampler, who):
    rb, other = buffer(2, sampler), buffer(2, sampler, filled=False)
    rows_of(rb, 3)
    other.load_state_dict(rb.state_dict())
    expected = [rb.sample(return_info=True) for _ in range(8)]
    for batch, info in expected:
        found, its_info = other.sample(return_info=True)
        assert all((found[key] == batch[key]).all() for key in batch.keys(True, True) if key != "index_generation")
        assert its_info.keys() == info.keys()
    rb.append_transform(lambda td: td)  # random bits are given back, and nothing is ahead
    other.load_state_dict(rb.state_dict())
    assert rows_of(other, 3) == rows_of(rb, 3)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("save", ["state_dict", "dumps", "Checkpointer"])
def test_priorities_of_batches_ahead_that_were_loaded_count(save, storage, tmp_path, threads):
    """They name the rows as they are numbered now."""
    rb, other = (buffer(2, SAMPLERS["prioritized"], storage) for _ in range(2))
    rows_of(rb, 3)
    other.extend(data(n=7))
    for _ in range(2):  # what was loaded is saved again
        if save == "state_dict":
            other.load_state_dict(rb.state_dict())
        elif save == "dumps":
            rb.dumps(tmp_path / "dump")
            other.loads(tmp_path / "dump")
        else:
            Checkpointer(tmp_path / "series", rb).save(1)
            Checkpointer(tmp_path / "series", other).restore(resume="exact")
        for _ in range(4):
            drawn, same = rb.sample(), other.sample()
            assert (drawn["x"] == same["x"]).all()
            for one, batch in ((rb, drawn), (other, same)):
                one.update_priority(batch["index"], torch.arange(8.0), generation=batch["index_generation"])
                assert one.stats()["priority_updates_dropped"] == 0
        rb, other = other, rb


@pytest.mark.parametrize("name", EPOCHS)
def test_batches_that_are_left_out_of_a_dump_go_back_to_their_pass(name, tmp_path, threads):
    rb, other, plain = buffer(2, SAMPLERS[name]), buffer(0, SAMPLERS[name], filled=False), buffer(0, SAMPLERS[name])
    assert rows_of(rb, 3) == rows_of(plain, 3)
    rb.dumps(tmp_path / "dump", prefetch="drop")
    other.loads(tmp_path / "dump")
    which, expected = rows_of(other, 2), rows_of(plain, 2)
    if name == "slices-pass":  # where in its trajectory a slice begins follows from the batch's own random bits
        which, expected = ([[x // 6 for x in batch] for batch in batches] for batches in (which, expected))
    assert which == expected


def test_batches_that_cannot_be_saved_can_be_left_out(tmp_path, threads):
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=8, prefetch=2, transform=lambda td: td["x"].numpy())
    rb.extend(data())
    rb.sample(), rb.sample()
    with pytest.raises(TypeError, match="ndarray"):
        rb.dumps(tmp_path / "dump")
    rb.dumps(tmp_path / "dump", prefetch="drop")
    other = ReplayBuffer(storage=LazyTensorStorage(ROWS), transform=lambda td: td)
    other.loads(tmp_path / "dump")
    assert other[:]["x"].tolist() == list(range(ROWS))


@pytest.mark.parametrize("save", ["state_dict", "dumps"])
def test_writers_do_not_wait_for_batches_ahead_to_be_saved(save, tmp_path, threads):
    """Nor does a transform that writes: it would wait for the save, and the save for it."""
    started = threading.Event()

    def writes(td):
        started.set()
        time.sleep(0.05)
        written.append(rb.extend(data(n=1)))
        return td

    written = []
    rb = buffer(2, transform=writes)
    rb.sample()
    started.clear()
    rb.sample()
    assert started.wait(60)
    limit = Limit(20)
    if save == "state_dict":
        rb.state_dict()
    else:
        rb.dumps(tmp_path / "dump")
    limit.check("going on")
    assert len(rb.sample()) == BATCH
    rb.close()
    assert len(written) >= 4


def test_a_state_without_batch_size_is_refused():
    rb, other = buffer(0, batch=None), buffer(2)
    with pytest.raises(ValueError, match="_batch_size: expected an int, as prefetch=2 needs one"):
        other.load_state_dict(rb.state_dict())
    assert len(other.sample()) == BATCH


def test_random_bits_that_were_given_back_are_saved_too(who):
    rb, plain = buffer(2), buffer(0)
    rows_of(rb, 3)
    rb.append_transform(lambda td: td)
    plain.sample()
    rows_of(plain, 2)
    assert rows_of(copy.copy(rb), 5) == rows_of(plain, 5)


def test_a_batch_that_failed_is_made_anew_by_whoever_restores_it(threads):
    fail = threading.Event()
    fail.set()

    def fragile(td):
        if fail.is_set() and threading.current_thread().name.startswith("engram"):
            raise ZeroDivisionError
        return td

    rb, expected = buffer(2, transform=fragile), buffer(0)
    rb.sample()
    saved = rb._prefetching.entries()
    assert [sorted(entry) for entry in saved["batches"]] == [["key"], ["key"]]
    fail.clear()
    rb._prefetching.take_entries(saved)
    assert rows_of(rb, 2) == rows_of(expected, 3)[1:]


def test_a_copy_has_batches_of_its_own(who):
    rb = buffer(1)
    rb.sample()
    other = copy.copy(rb)
    rb.sample()["x"].zero_()
    assert other.sample()["x"].tolist() == rows_of(buffer(0), 2)[1]


def test_a_shared_handle_takes_no_batches_along(who):
    rb = buffer(2, SamplerWithoutReplacement, batch=10, shared=True)
    rb.sample()
    handle = pickle.loads(pickle.dumps(rb))
    assert handle.prefetch == 2
    assert handle.stats()["prefetch_queue_size"] == 0
    rows = rows_of(rb, 2)
    theirs = [handle.sample()["x"].tolist()]
    assert not {row for batch in rows for row in batch} & set(theirs[0])
    handle.close()
    rb.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_child(shared, who):
    """It leaves what was drawn ahead to its parent, and draws other batches: of the same epoch, if they share it, else of its own."""
    rb = buffer(2, SamplerWithoutReplacement, batch=4)
    rb.share(shared)
    done = [rows_of(rb, 3)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rows = rows_of(rb, 4)
            rb.close()
            os.write(writer, repr(rows).encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    theirs = eval(os.read(reader, 10_000).decode())
    os.close(reader)
    os.close(writer)
    ours = rows_of(rb, 4)
    for batches, n in [((*done, theirs, ours), 11)] if shared else [((*done, ours), 7), ((theirs,), 4)]:
        rows = [row for some in batches for batch in some for row in batch]
        assert len(set(rows)) == len(rows) == 4 * n
    if not shared:
        assert not set(map(tuple, ours)) & set(map(tuple, theirs))
        assert [*done[0], *ours] == rows_of(buffer(0, SamplerWithoutReplacement, batch=4), 7)
    rb.close()


def test_a_fork_does_not_wait_for_ever(threads, monkeypatch):
    """What a thread of its parent is at the child leaves to it, and makes its own batches."""
    monkeypatch.setattr(prefetch, "LEAVE_S", 0.05)
    go = threading.Event()

    def stuck(td):
        if threading.current_thread() is not threading.main_thread():
            go.wait(60)
        return td

    rb, expected = buffer(2, transform=stuck), rows_of(buffer(0), 5)
    rb.sample()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            made_by("caller", monkeypatch)  # a thread of the child would wait, too
            code = 0 if len(rows_of(rb, 4)) == 4 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    assert rows_of(rb, 4) == expected[1:]


def test_fork_beside_busy_threads(threads):
    rb = buffer(3, SamplerWithoutReplacement, batch=1, transform=lambda td: time.sleep(0.002) or td)
    for _ in range(8):
        rb.sample()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if len(rows_of(rb, 5)) == 5 else 1
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_processes_share_a_pass():
    out = fresh.run(
        """
        import multiprocessing, torch
        from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

        def take(rb, out):
            out.put([row for _ in range(5) for row in rb.sample().tolist()])
            rb.close()

        rb = ReplayBuffer(
            storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=5, prefetch=2, shared=True,
            transform=lambda x: x + 0,
        )
        rb.extend(torch.arange(100))
        mine = [row for _ in range(2) for row in rb.sample().tolist()]
        context = multiprocessing.get_context("fork")
        out = context.SimpleQueue()
        others = [context.Process(target=take, args=(rb, out)) for _ in range(2)]
        for other in others:
            other.start()
        theirs = out.get() + out.get()
        for other in others:
            other.join()
        mine += [row for _ in range(2) for row in rb.sample().tolist()]
        rows = mine + theirs
        print(len(rows), len(set(rows)), [other.exitcode for other in others])
        """
    )
    assert out == "70 70 [0, 0]"


@pytest.mark.parametrize(
    ("recorded", "given", "depth"), [(None, 2, 2), (3, None, 3), (3, 1, 1), (3, 0, 0), (None, None, 0)]
)
def test_open_takes_it_or_what_was_recorded(recorded, given, depth, tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "store"), batch_size=4, prefetch=recorded)
    rb.extend(torch.arange(20))
    rb.close()
    again = ReplayBuffer.open(tmp_path / "store", prefetch=given)
    assert again.sample().shape == (4,)
    assert again.prefetch == again.stats()["prefetch_queue_size"] == depth
    again.close()


def test_a_loader_hands_out_the_whole_pass(who):
    for return_info in (False, True):
        loader = DeviceLoader(buffer(2, SamplerWithoutReplacement, batch=25), "cpu", return_info=return_info)
        for _ in range(2):
            batches = [one[0] if return_info else one for one in loader]
            assert [len(batch) for batch in batches] == [25, 25, 10]


# ---- pinning ---------------------------------------------------------------------------------------------------------------


class Memory(HostMemory):
    """Ordinary tensors that count as pinned."""

    def __init__(self):
        self.made, self.threads, self.copied = {}, set(), False

    def empty(self, shape, dtype):
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.made[tensor.data_ptr()] = tensor
        self.threads.add(threading.current_thread())
        return tensor

    def is_pinned(self, tensor):
        self.copied |= tensor.data_ptr() not in self.made
        return tensor.data_ptr() in self.made


@pytest.mark.parametrize("transform", [None, lambda td: td.set("y", td["x"] + 1)])
def test_batches_are_pinned_by_whoever_makes_them(transform, who, monkeypatch):
    memory = Memory()
    monkeypatch.setattr(pinning, "host_memory", lambda: memory)
    rb, plain = buffer(2, transform=transform, pin_memory=True), buffer(0, transform=transform)
    for number in range(6):
        batch, info = rb.sample(return_info=True)
        assert all(memory.is_pinned(leaf) for leaf in (*batch.values(), *info.values()))
        assert batch["index"] is info["index"]
        assert batch["x"].tolist() == plain.sample()["x"].tolist()
        assert number or memory.threads  # or nothing would be shown
    assert memory.copied == (transform is not None)  # else rows are gathered there
    if who != "as-it-comes":
        assert (memory.threads == {threading.main_thread()}) == (who == "caller")


# ---- pickles between processes -----------------------------------------------------------------------------------------------


def test_batches_go_to_processes_by_value(who):
    """A tensor's file descriptor would be another's by the time that the receiver looks."""
    rb = buffer(2)
    rb.sample()
    sent = bytes(ForkingPickler.dumps(rb))
    expected = rows_of(rb, 4)
    for _ in range(2):
        assert rows_of(pickle.loads(sent), 4) == expected


def test_batches_of_other_kinds_survive_too(who):
    def nested(td):
        inner = TensorDict({"z": td["x"][:, None] * torch.ones(3)}, [len(td), 3], names=["batch", "time"])
        return {"td": inner, "many": (td["x"], [1, "two"]), "scale": torch.ones((), requires_grad=True) * 2}

    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=BATCH, prefetch=1, transform=nested)
    rb.extend(data())
    rb.sample()
    one, other = copy.deepcopy(rb).sample(), rb.sample()
    assert torch.equal(one["td"]["z"], other["td"]["z"])
    assert (one["td"].batch_size, one["td"].names) == (other["td"].batch_size, ["batch", "time"])
    assert one["many"][0].tolist() == other["many"][0].tolist()
    assert one["many"][1] == [1, "two"]


# ---- who makes them --------------------------------------------------------------------------------------------------------


class Clock:
    """Time passes when it is told to: else a busy machine would decide."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def lasting(self, *seconds):
        """A transform that takes so long, each time, and the last of these from then on."""
        left = list(seconds)

        def transform(data):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return data

        return transform


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("engram.buffer.prefetch.perf_counter", clock)
    monkeypatch.setattr("engram.buffer.prefetching.perf_counter", clock)
    return clock


def test_cheap_batches_are_the_callers(clock):
    rb = buffer(2, transform=clock.lasting(190e-6))
    seen = set()
    rb.append_transform(lambda td: (seen.add(threading.current_thread()), td)[1])
    rows_of(rb, 50)
    assert seen == {threading.main_thread()}
    assert not engaged(rb)


def test_slow_ones_go_to_threads_until_the_buffer_is_another(clock):
    rb = buffer(2, transform=clock.lasting(210e-6))
    rows_of(rb, 5)  # and two ahead
    assert not engaged(rb)
    rows_of(rb, 2)
    assert engaged(rb)
    assert rb._prefetching._threaded
    rb.set_sampler(RandomSampler())
    rows_of(rb, 1)
    assert not rb._prefetching._threaded


def test_one_cheap_batch_among_slow_ones_keeps_them_with_the_caller(clock):
    rb = buffer(2, transform=clock.lasting(*[210e-6] * 7, 0, *[210e-6] * 7, 0))
    rows_of(rb, 30)
    assert not engaged(rb)


def test_slow_uniform_batches_go_to_threads_too(clock):
    """Those that nothing is done to are timed by the call itself."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3, prefetch=2, collate_fn=clock.lasting(210e-6))
    rb.extend(torch.arange(10))
    for _ in range(7):
        rb.sample()
    assert rb._prefetching.lazy
    rb.sample()
    assert not rb._prefetching.lazy
    for _ in range(3):
        rb.sample()
    assert engaged(rb)
    assert rb.stats()["prefetch_queue_size"] == 2
