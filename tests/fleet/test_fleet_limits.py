"""Limits of several stores hold for all clients that are connected to them."""

import contextlib
import io
import threading
import warnings

import pytest
import torch

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    MaxInFlight,
    MinSize,
    NoSampleable,
    PrioritizedSampler,
    RandomSampler,
    RateLimited,
    ReplayBuffer,
    SamplesPerInsert,
    TensorDictReplayBuffer,
)
from engram.cli.top import show
from tests.fleet.test_fleets import rows_of, seeded
from tests.fresh import start
from tests.ranks.processes import wait_for
from tests.serving.servers import serving, serving_each

SAMPLERS = {
    "uniform": RandomSampler,
    "priority": lambda: PrioritizedSampler(alpha=0.6, beta=0.4),
    "queue": ConsumingSampler,
}


def made(folder, sampler):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(400, scratch_dir=folder), sampler=sampler(), batch_size=10)
    rb.extend(rows_of(1))
    rb.empty()
    return rb


@pytest.fixture(scope="module")
def fleets(tmp_path_factory):
    """By sampler: stores that are open here, and their addresses."""
    root, found = tmp_path_factory.mktemp("limited"), {}
    for name, sampler in SAMPLERS.items():
        folders = [root / f"{name}-{k}" for k in range(3)]
        found[name] = [made(folder, sampler) for folder in folders], [f"unix:{folder}.sock" for folder in folders]
    with serving_each([root / f"{name}-{k}" for name in SAMPLERS for k in range(3)]):
        yield found
    for stores, _ in found.values():
        for store in stores:
            store.close()


@pytest.fixture
def connect(fleets):
    """Connects to the stores of a sampler, empty and without limits."""
    with contextlib.ExitStack() as stack:

        def connected(name="uniform", **how):
            return stack.enter_context(ReplayBuffer.connect(fleets[name][1], generator=seeded(), **how))

        for name in fleets:
            connected(name).limit(None).empty()
        yield connected


def admitted(call):
    """How often a call is admitted in a row, as it does not wait."""
    times = 0
    with contextlib.suppress(RateLimited, NoSampleable):
        while True:
            call()
            times += 1
    return times


@pytest.mark.parametrize("name", ["uniform", "priority"])
def test_inserts_and_samples_of_all_clients_keep_to_the_band(connect, name):
    writer, learner = connect(name), connect(name)
    assert writer.limit(SamplesPerInsert(2, min_size=50, tolerance=0.5)) is writer
    assert learner.limits == writer.limits == (SamplesPerInsert(2, min_size=50, tolerance=0.5),)
    assert not learner.can_sample()
    assert admitted(lambda: writer.extend(rows_of(7), timeout=0)) * 7 == 70  # to 2 * 50 * 1.5, at most
    assert learner.can_sample()
    assert admitted(lambda: learner.sample(timeout=0)) == 9  # to 2 * 50 * 0.5, at least
    stats = learner.stats()
    assert (stats["limit_inserts"], stats["limit_samples"], stats["limit_level"]) == (70, 90, 50)
    assert (stats["limit_lowest"], stats["limit_highest"], stats["limit_error"]) == (50, 150, -0.5)
    assert stats["samples_per_insert"] == 90 / 70
    with pytest.raises(
        RateLimited, match=r"sample: 10 rows .* SamplesPerInsert\(ratio=2.0.* level is 50, to stay from 50 to 150"
    ):
        learner.sample(timeout=0.2)
    assert learner.stats()["sample_waits"] == 2  # a call counts once, however often it asked; the one of no time, too
    assert learner.stats()["sample_waited_s"] > 0
    assert writer.stats()["sample_waits"] == 0
    writer.extend(rows_of(5))
    assert admitted(lambda: learner.sample(timeout=0)) == 1


def test_one_waits_until_another_has_gone_on(connect):
    writer, learner = connect(), connect(prefetch=2)
    writer.limit(SamplesPerInsert(1, min_size=20, tolerance=0))
    got = []
    waiting = threading.Thread(target=lambda: got.append(learner.sample(timeout=None)))
    waiting.start()
    wait_for(lambda: learner.stats()["sample_waited_s"] > 0.1)  # it has asked several times
    writer.extend(rows_of(20), timeout=0)
    waiting.join()
    assert len(got[0]) == 10
    assert learner.stats()["sample_waits"] == 1  # of calls
    for _ in range(20):  # whoever asks first, one of both may go on
        writer.extend(rows_of(10), timeout=60)
        assert len(learner.sample(timeout=60)) == 10


def test_one_thread_that_samples_and_writes_never_waits_for_itself(connect):
    rb = connect(prefetch=2)
    rb.limit(SamplesPerInsert(1, min_size=20, tolerance=0))
    rb.extend(rows_of(20))
    for _ in range(30):
        rb.sample(timeout=0)
        rb.extend(rows_of(10), timeout=0)
    assert 0 <= rb.stats()["limit_level"] <= 40  # batches that are ahead count


def test_batches_that_are_ahead_count_when_they_are_drawn(connect, fleets):
    writer, learner = connect(), connect(prefetch=3, batch_size=4)
    writer.limit(SamplesPerInsert(1, min_size=40, tolerance=0.5))
    writer.extend(rows_of(60))
    learner.sample(timeout=0)
    # A message of eight batches. Of the next ones as many as are admitted: before the first has come, perhaps none.
    wait_for(lambda: writer.stats()["limit_samples"] >= 32)
    assert admitted(lambda: learner.sample(timeout=0)) == 9
    assert sum(store.stats()["limit_samples"] for store in fleets["uniform"][0]) == 40


def test_what_is_live_is_waited_for(connect):
    rb = connect()
    rb.limit(MinSize(30))
    rb.extend(rows_of(29), timeout=0)
    with pytest.raises(RateLimited, match="Insert 1 more row"):
        rb.sample(timeout=0)
    rb.extend(rows_of(1), timeout=0)
    for _ in range(30):
        rb.sample(timeout=0)
        rb.extend(rows_of(100), timeout=0)
    assert len(rb) == 400  # its store has replaced rows


def test_a_queue_over_stores_hands_each_row_out_once(connect):
    writers = [connect("queue") for _ in range(3)]
    learner = connect("queue")
    learner.limit(MaxInFlight(60))
    for number, writer in enumerate(writers):
        writer.extend(rows_of(20, 100 * number), timeout=0)
    assert sorted(store for writer in writers for store in [int(writer.storage.home().number)]) == [0, 1, 2]
    for writer in writers:
        with pytest.raises(RateLimited, match="60 are in flight"):
            writer.extend(rows_of(1), timeout=0)
    with pytest.raises(ValueError, match=r"at most 60 rows at a time, as MaxInFlight\(60\)"):
        writers[0].extend(rows_of(61))
    assert learner.stats()["limit_in_flight"] == 60
    drawn = [batch["a"] for batch in learner]
    assert [len(batch) for batch in drawn] == [10] * 6
    assert torch.cat(drawn).sort().values.tolist() == [100 * k + i for k in range(3) for i in range(20)]
    got = []
    waiting = threading.Thread(target=lambda: got.append(learner.sample(timeout=None)))
    waiting.start()
    writers[1].extend(rows_of(1, 500), timeout=0)
    waiting.join()
    assert got[0]["a"].tolist() == [500]
    with pytest.raises(RateLimited):
        learner.sample(timeout=0)


def test_what_would_stop_both_sides_is_refused(connect):
    rb = connect()
    with pytest.raises(ValueError, match="a storage of at least 1201 rows"):
        rb.limit(MinSize(1201))
    with pytest.raises(ValueError, match="a sampler that uses rows up"):
        rb.limit(MaxInFlight(5))
    with pytest.raises(ValueError, match="ratio: expected at most 1"):
        connect("queue").limit(SamplesPerInsert(2, min_size=5))
    assert rb.limits == ()


def test_limits_change_while_calls_wait(connect):
    writer, learner = connect(), connect()
    writer.limit(SamplesPerInsert(1, min_size=100, tolerance=0))
    writer.extend(rows_of(30))
    got = []
    waiting = threading.Thread(target=lambda: got.append(learner.sample(timeout=None)))
    waiting.start()
    wait_for(lambda: learner.stats()["sample_waits"])
    writer.limit(MinSize(30))
    waiting.join()
    assert len(got[0]) == 10
    writer.limit(SamplesPerInsert(1, min_size=30, tolerance=0))
    stats = learner.stats()
    assert (stats["limit_inserts"], stats["limit_level"]) == (0, 30)  # balanced
    learner.sample(timeout=0)
    writer.limit(SamplesPerInsert(1, min_size=30, tolerance=0))
    assert learner.stats()["limit_samples"] == 10  # equal ones go on
    writer.empty()
    stats = learner.stats()
    assert (stats["limit_level"], stats["limit_samples"]) == (0, 0)
    assert learner.limits == (SamplesPerInsert(1, min_size=30, tolerance=0),)


def test_processes_with_a_store_open_count_and_do_not_wait(connect, fleets):
    store = fleets["uniform"][0][0]
    rb = connect()
    rb.limit(SamplesPerInsert(1, min_size=20, tolerance=0))
    store.extend(rows_of(60), timeout=0)
    assert rb.stats()["limit_level"] == 60
    with pytest.raises(RateLimited):
        rb.extend(rows_of(1), timeout=0)
    for _ in range(8):
        store.sample(10, timeout=0)
    assert rb.stats()["limit_level"] == -20
    assert store.limits == rb.limits
    assert "limit_error" not in store.stats()
    with ReplayBuffer.connect(fleets["uniform"][1][0]) as one:  # one of the stores
        one.sample(10, timeout=0)
        assert one.limits == rb.limits
    store.limit(MinSize(1))  # of its own
    with pytest.raises(RuntimeError, match="limits of its own"):
        rb.stats()
    with pytest.raises(ValueError, match="limits, which hold for one store"):
        ReplayBuffer.connect(fleets["uniform"][1])
    store.limit(None)
    assert rb.stats()["limit_level"] == 20  # they hold for it, too, and begin again


CLIENT = """
import torch
from engram import ReplayBuffer
rb = ReplayBuffer.connect(addresses, batch_size=2)
while True:
    rb.sample(timeout=None)
    print("x", flush=True)
"""


def test_a_client_that_is_killed_holds_nothing(connect, fleets):
    writer, learner = connect(), connect(batch_size=2)
    writer.limit(SamplesPerInsert(1, min_size=100, tolerance=0.5))
    writer.extend(rows_of(100))
    program = start(CLIENT, addresses=fleets["uniform"][1]).until("x\nx\nx\n")  # it may draw more at once
    program.kill()
    admitted(lambda: learner.sample(timeout=0))
    assert 50 <= writer.stats()["limit_samples"] <= 52  # a batch of the dead may have been under way


def test_servers_that_die_take_no_count_along(tmp_path, monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._MAX_COUNTS_AGE_S", 1e9)  # on however slow a machine
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        made(folder, RandomSampler).close()
    how = {"patience": 0.2, "generator": seeded()}
    with serving(folders[0]) as one, serving(folders[1]) as other:
        addresses = [one.address, other.address]
        with ReplayBuffer.connect(addresses, **how) as rb:
            rb.limit(SamplesPerInsert(1, min_size=40, tolerance=0.5))
            for _ in range(4):
                rb.extend(rows_of(10))
            home = rb.storage.home().number
            assert rb.stats()["limit_level"] == 40
            (one, other)[home].kill()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert rb.stats()["limit_level"] == 40  # what is gone has counted its rows
            assert rb.stats()["shards_missing"] == 1
            with pytest.raises(ConnectionError, match="Begin a new episode"):  # once
                rb.extend(rows_of(10), timeout=0)
            assert admitted(lambda: rb.extend(rows_of(10), timeout=0)) == 2
            with serving(folders[home]):
                wait_for(lambda: rb.stats()["shards_missing"] == 0)
                assert rb.stats()["limit_level"] == 60
                assert rb.stats()["limit_inserts"] == 60
                assert admitted(lambda: rb.sample(10, timeout=0)) == 4


def test_metrics_and_a_terminal_show_a_fleet(connect, fleets):
    prometheus = pytest.importorskip("prometheus_client")
    metrics = pytest.importorskip("engram.metrics")
    rb = connect()
    rb.limit(MinSize(10))
    rb.extend(rows_of(20))
    rb.sample()
    registry = prometheus.CollectorRegistry()
    registry.register(metrics.Collector({"a": rb}))

    def shown(name, **labels):
        return registry.get_sample_value(f"engram_{name}", {"buffer": "a", **labels})

    assert (shown("stores", which="all"), shown("stores", which="missing"), shown("lost_stores_total")) == (3, 0, 0)
    assert (shown("imbalance"), shown("requests_total"), shown("limit_sampled_rows_total")) == (3, 1, 10)
    assert shown("request_wait_seconds_total") > 0
    out = io.StringIO()
    show(",".join(fleets["uniform"][1]), 0.01, 1, out)
    assert "3 of 3 answer\n" in out.getvalue()
    assert "20 of 1,200" in out.getvalue()
