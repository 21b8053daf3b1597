"""One buffer, several threads; and interrupts at any moment."""

import ctypes
import functools
import gc
import itertools
import signal
import sys
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram._support import native
from tests import fresh

WIDTH = 97
STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]


@pytest.fixture(params=STORAGES)
def storage(request):
    return request.param


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def described(payloads):
    """Rows that describe themselves: every number of a row is the same, in three fields."""
    payloads = torch.as_tensor(payloads)
    return {
        "id": payloads,
        "wide": payloads.unsqueeze(-1).expand(*payloads.shape, WIDTH).to(torch.float64),
        "check": payloads * 3 + 1,
    }


def as_rows(payloads):
    payloads = torch.as_tensor(payloads)
    return TensorDict(described(payloads), batch_size=payloads.shape)


def assert_whole(batch):
    assert torch.equal(batch["wide"], batch["id"].unsqueeze(-1).expand(*batch["id"].shape, WIDTH).to(torch.float64))
    assert torch.equal(batch["check"], batch["id"] * 3 + 1)


def together(*jobs, seconds=0.6):
    """Run jobs in threads until time is up and each was called six times: each is called again and again with its count."""
    end = time.monotonic() + seconds
    errors = []
    counts = [0] * len(jobs)

    def work(i, job):
        try:
            while not errors and (time.monotonic() < end or min(counts) < 6):
                job(counts[i])
                counts[i] += 1
        except BaseException as error:  # noqa: BLE001 - reported by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i, job)) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return counts


@pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement])
@pytest.mark.parametrize("tracks", [False, True])
def test_writers_and_readers(storage, sampler, tracks):
    rb = TensorDictReplayBuffer(
        storage=storage(256), sampler=sampler, writer=RoundRobinWriter(track_generations=tracks), batch_size=16
    )
    rb.extend(as_rows(torch.arange(256)))

    def add(i):
        rb.add(as_rows(1_000_000 + i))

    def extend(i):
        rb.extend(as_rows(2_000_000 + 100 * i + torch.arange(37)))

    def sample(_):
        batch = rb.sample()
        assert_whole(batch)
        # The last batch of an epoch is short, as rows drop out of it.
        assert batch.batch_size == (16,) if sampler is None else 1 <= len(batch) <= 16

    def read(i):
        assert_whole(rb[[i % 256, (7 * i) % 256]])
        assert_whole(rb[i % 256])

    counts = together(add, extend, sample, read)
    assert len(rb) == 256
    assert rb.write_count == 256 + counts[0] + 37 * counts[1]
    for row in range(256):
        assert_whole(rb[row])


def test_editors_and_readers():
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(described(torch.arange(64)))

    def edit(i):
        rb[i % 64] = described(1_000 + i)

    def edit_many(i):
        rb[[3, 9, 27]] = described(torch.tensor([5_000 + i, 6_000 + i, 7_000 + i]))

    def sample(_):
        assert_whole(rb.sample(32))

    together(edit, edit_many, sample, sample)
    assert rb.write_count == 64


def test_editing_rows_that_are_just_being_rewritten():
    """Such a row is live: the edit waits for the writer."""
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(torch.zeros(3, 50_000))
    batch, row = torch.ones(7, 50_000), torch.full((50_000,), 2.0)

    def write(_):
        rb.extend(batch)

    def edit(i):
        rb[i % 3] = row

    def read(i):
        assert len(rb[i % 3].unique()) == 1

    together(write, edit, read)


def test_a_lane_per_thread_keeps_its_order():
    rb = ReplayBuffer(storage=LazyTensorStorage(4 * 1000, lanes=4))

    def writer(lane):
        def write(i):
            if i < 300:
                rb.extend(described(10_000 * lane + 3 * i + torch.arange(3)), lane=lane)
            else:
                time.sleep(0.01)

        return write

    counts = together(*(writer(lane) for lane in range(4)))
    for lane in range(4):
        n = 3 * min(300, counts[lane])
        assert rb["id"][rb["id"] // 10_000 == lane].tolist() == list(range(10_000 * lane, 10_000 * lane + n))


def test_every_write_has_its_own_rows(storage):
    """Until the ring is full, no row is lost and none is handed out twice."""
    rb = ReplayBuffer(storage=storage(4 * 60 * 5))
    taken = [[] for _ in range(4)]

    def writer(k):
        def write(i):
            if i < 60:
                if i % 2:
                    taken[k] += rb.extend(as_rows(torch.full((9,), k))).tolist()
                else:
                    taken[k].append(rb.add(as_rows(k)))
            else:
                time.sleep(0.01)

        return write

    together(*(writer(k) for k in range(4)), seconds=1.0)
    rows = sum(taken, [])
    assert sorted(rows) == list(range(len(rows)))
    assert len(rb) == rb.write_count == len(rows)
    for k in range(4):
        assert set(rb[taken[k]]["id"].tolist()) <= {k}


def test_emptying_while_others_work(storage):
    rb = ReplayBuffer(storage=storage(64))
    rb.extend(as_rows(torch.arange(64)))

    def write(i):
        rb.extend(as_rows(1_000 + i + torch.arange(9)))

    def sample(_):
        try:
            assert_whole(rb.sample(8))
        except (RuntimeError, IndexError) as error:
            assert "empty" in str(error) or "no row" in str(error) or "read" in str(error), error  # noqa: PT017

    def empty(_):
        rb.empty()
        time.sleep(0.005)

    together(write, sample, empty)
    rb.empty()
    rb.extend(as_rows(torch.arange(5)))
    assert rb["id"].tolist() == [0, 1, 2, 3, 4]


def test_the_first_write_is_made_by_one(storage):
    for _ in range(5):
        rb = ReplayBuffer(storage=storage(64))
        barrier = threading.Barrier(4)
        errors = []

        def write(k, rb=rb, barrier=barrier, errors=errors):
            barrier.wait()
            try:
                rb.extend(as_rows(torch.full((3,), k)))
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(rb) == rb.write_count == 12
        assert_whole(rb[:])
        assert sorted(rb["id"].tolist()) == sorted([0, 1, 2, 3] * 3)


def test_one_pass_shared_by_threads(storage):
    rb = ReplayBuffer(storage=storage(999), sampler=SamplerWithoutReplacement(), batch_size=9)
    rb.extend(torch.arange(999))
    seen = [[] for _ in range(3)]

    def read(k):
        def take(i):
            if i < 37:
                seen[k] += rb.sample().tolist()
            else:
                time.sleep(0.01)

        return take

    together(*(read(k) for k in range(3)), seconds=1.0)
    if sum(map(len, seen)) == 999:  # else the machine was too slow to finish the pass
        assert sorted(sum(seen, [])) == list(range(999))
    assert len(set(sum(seen, []))) == sum(map(len, seen))


# ---- interrupts ------------------------------------------------------------------------------------------------------------------


class Interrupted(threading.Thread):
    """Calls a job again and again, and gets KeyboardInterrupt between two bytecodes of it: the next one never before it has
    recovered from the last. (One that comes inside a finalizer is lost: Python reports and drops it.)
    """

    def __init__(self, job):
        super().__init__(daemon=True)
        self.job = job
        self.interrupts = 0
        self.calls = 0
        self.errors = []
        self._armed = self._stop_now = False
        self.start()

    def run(self):
        while not self._stop_now:
            try:
                self._armed = True
                while not self._stop_now:
                    self.job()
                    self.calls += 1
            except KeyboardInterrupt:
                self.interrupts += 1
            except BaseException as error:  # noqa: BLE001 - reported by the test
                self.errors.append(error)
                return

    def interrupt(self):
        while not self._armed and not self.errors:
            time.sleep(0)
        self._armed, before = False, self.interrupts
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(KeyboardInterrupt))
        calls = self.calls  # of two calls that begin from now on, one gets it
        while self.interrupts == before and not self.errors:
            if self.calls > calls + 1:  # it was lost
                self._armed = True
                break
            time.sleep(0)

    def finish(self):
        self._stop_now = True
        self.join(60)
        assert not self.is_alive()
        if self.errors:
            raise self.errors[0]


@pytest.fixture
def _no_finalizers():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


lossy = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@lossy
@pytest.mark.usefixtures("_no_finalizers")
def test_interrupts_leave_whole_rows(storage):
    rb = ReplayBuffer(storage=storage(50))
    rb.extend(as_rows(torch.arange(50)))
    batch = as_rows(1_000 + torch.arange(33))

    def write():
        rb.extend(batch)
        rb.add(batch[3])
        rb[[1, 2]] = batch[4:6]

    victim = Interrupted(write)
    end = time.monotonic() + 0.8
    while (time.monotonic() < end or min(victim.interrupts, victim.calls) <= 5) and not victim.errors:
        victim.interrupt()
        time.sleep(0.0005 * (victim.interrupts % 5))
    victim.finish()
    check_after_interrupts(rb)


def check_after_interrupts(rb):
    assert len(rb) == 50
    for row in range(50):
        assert_whole(rb[row])
    for _ in range(20):
        assert_whole(rb.sample(32))
    # and it goes on as a ring
    index = rb.extend(as_rows(torch.arange(120)))
    assert index.tolist() == [(int(index[0]) + i) % 50 for i in range(120)]
    assert sorted(rb["id"].tolist()) == list(range(70, 120))
    assert rb.stats()["void_rows"] == 0


@lossy
@pytest.mark.usefixtures("_no_finalizers")
def test_interrupts_while_it_fills(storage):
    """Growing is where a list could lose count."""
    rb = ReplayBuffer(storage=storage(4_000))

    def fill():
        if len(rb) + 7 > 4_000:
            rb.empty()
        rb.extend(as_rows(torch.arange(7)))

    victim = Interrupted(fill)
    for i in itertools.count():
        victim.interrupt()
        time.sleep(0.0002 * (i % 7))
        if victim.interrupts > 120 or victim.errors:
            break
    victim.finish()
    n = len(rb)
    if n:
        assert_whole(rb[:])
    index = rb.extend(as_rows(torch.tensor([100, 101])))
    assert index[1] - index[0] == 1
    assert index[0] <= n
    assert n <= len(rb) <= n + 2
    assert rb[index.tolist()]["id"].tolist() == [100, 101]
    rb.empty()
    assert rb.extend(as_rows(torch.arange(9))).tolist() == list(range(9))
    assert rb["id"].tolist() == list(range(9))


def test_a_storm_of_signals():
    """SIGINT from another process, as a user's Ctrl-C or a scheduler's: no torn row."""
    out = fresh.run(
        """
        import os, signal, subprocess, sys, time, torch
        from engram import LazyTensorStorage, ReplayBuffer

        armed = False

        def interrupt(*_):
            global armed
            if armed:  # one at a time: none may come where nobody catches it
                armed = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        storm = subprocess.Popen(
            [sys.executable, "-S", "-c",
             "import os, signal, sys, time\\n"
             "while True:\\n"
             "    os.kill(int(sys.argv[1]), signal.SIGINT)\\n"
             "    time.sleep(0.0005)\\n", str(os.getpid())],
        )
        rb = ReplayBuffer(storage=LazyTensorStorage(50))
        batch = {"id": torch.arange(33), "wide": torch.arange(33.0)[:, None].expand(33, 4096).contiguous()}
        caught = done = 0
        end = time.monotonic() + 2.0

        def goes_on():
            return time.monotonic() < end or caught <= 20 or done <= 20

        while goes_on():
            try:
                armed = True
                while goes_on():
                    rb.extend(batch)
                    done += 1
                armed = False
            except KeyboardInterrupt:
                caught += 1
        storm.kill()
        storm.wait()  # before the exit, where Python gives SIGINT its default action back
        rows = rb[:]
        assert torch.equal(rows["wide"], rows["id"][:, None].float().expand(len(rb), 4096))
        assert rb.stats()["void_rows"] == 0
        assert len(rb) == 50
        print("whole")
        """
    )
    assert out == "whole"


def test_a_signal_in_the_middle_of_extend():
    """The handler runs after the native call, and the rows are there."""
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sampler=RaisesWhenTold())
    rb.extend(described(torch.arange(10)))
    rb.sampler.armed = True
    with pytest.raises(KeyboardInterrupt):
        rb.extend(described(torch.arange(10, 20)))
    assert len(rb) == 20
    assert_whole(rb[:])
    rb.sampler.armed = False
    assert rb.extend(described(torch.arange(3))).tolist() == [20, 21, 22]


class RaisesWhenTold:
    """A custom sampler that sends its own process SIGINT while it hears of a write."""

    armed = False

    def draw(self, extent, batch_size, key):
        raise NotImplementedError

    def observe(self, write, data):
        if self.armed:
            signal.raise_signal(signal.SIGINT)

    def update_priority(self, index, priority, *, generation=None):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


# ---- Python's lock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_a_short_call_that_has_to_wait_lets_others_go_on(shared, request):
    """It keeps Python's lock only as long as it finds rows. Here the one row is being written, by the thread that looks on."""
    request.addfinalizer(functools.partial(native._core.set_wait_limit, native.wait_limit()))
    native._core.set_wait_limit(60.0)
    rb = ReplayBuffer(storage=LazyTensorStorage(1), batch_size=4, shared=shared)
    rb.extend(torch.arange(1))
    word = rb.storage.store._ticket_words()
    word += 1 - 2  # from committed, 2, to writing, 1
    found = []
    thread = threading.Thread(target=lambda: found.append(rb.sample()))
    thread.start()
    while thread.is_alive() and rb.storage.store.core.redraws < 256:  # then it waits
        time.sleep(0)
    assert rb.storage.store.core.redraws == 256
    assert not found
    word += 1
    thread.join(60)
    assert found[0].tolist() == [0] * 4
    rb.close()


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_short_and_long_calls_beside_each_other_read_whole_rows(sampler):
    """Some keep Python's lock and others do not, while a thread overwrites what they read."""
    rb = ReplayBuffer(storage=LazyTensorStorage(3000), sampler=sampler())
    rb.extend({"a": torch.zeros(3000, 40), "b": torch.zeros(3000)})
    failed = []

    def draw(n):
        for _ in range(60):
            batch = rb.sample(n)
            if not (batch["a"] == batch["b"][:, None]).all():
                failed.append(n)

    threads = [threading.Thread(target=draw, args=(n,)) for n in (8, 64, 400, 2000)]
    for thread in threads:
        thread.start()
    i = 0
    while any(thread.is_alive() for thread in threads):
        i += 1
        rb.extend({"a": torch.full((64, 40), float(i)), "b": torch.full((64,), float(i))})
    assert not failed
