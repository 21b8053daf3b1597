"""Messages and answers that are lost, repeated and late: rows that are written over a connection are in the store once, in order."""

import contextlib
import itertools
import json
import threading
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import flight
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    RateLimited,
    ReplayBuffer,
    SamplesPerInsert,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.remote import wire
from tests.serving.servers import serving_each
from tests.waiting import until

LANES, ROWS = 20, 20 << 12


#: What becomes of a message.
FAULTS = ("none", "lose message", "lose answer", "repeat", "keep back")


class Proxy(flight.FlightServerBase):
    """Hands messages on to a server, and does to those of the next writes what ``faults`` says, in order."""

    _numbers = itertools.count()

    def __init__(self, listen, server):
        super().__init__(listen)
        self.server = server
        self.faults = []
        #: Whether actions are done; one that is not is counted.
        self.describes, self.refused = True, threading.Semaphore(0)
        #: A message that is held has come, and may go on.
        self.held, self.go = threading.Event(), threading.Event()
        #: Messages that were kept back: they come when they are let go.
        self.kept = []

    def do_action(self, _, action):
        if not self.describes:
            self.refused.release()
            raise flight.FlightUnavailableError("away")
        with flight.connect(self.server) as client:
            return iter([part.body for part in client.do_action(action)])

    def do_exchange(self, _, descriptor, reader, writer):
        with flight.connect(self.server) as client:
            there, back = client.do_exchange(descriptor)
            begun = {}

            def passed(chunk):
                if not begun.get("there"):
                    there.begin(chunk.data.schema)
                there.write_with_metadata(chunk.data, chunk.app_metadata)
                begun["there"] = True
                return back.read_chunk()

            with contextlib.suppress(StopIteration), contextlib.closing(there):
                while True:
                    chunk = reader.read_chunk()
                    fault = self.faults.pop(0) if self.faults else "none"
                    if fault == "keep back":
                        self.kept.append(chunk)
                    if fault == "hold":
                        self.held.set()
                        self.go.wait(60)
                    if fault in ("lose message", "keep back"):
                        raise flight.FlightUnavailableError(fault)
                    answer = passed(chunk)
                    if fault == "lose answer":
                        raise flight.FlightUnavailableError(fault)
                    if fault == "repeat":
                        again = passed(chunk)
                        assert again.data is None or again.data == answer.data
                    if answer.data is None:
                        writer.write_metadata(answer.app_metadata)
                        continue
                    if not begun.get("back"):
                        writer.begin(answer.data.schema)
                        begun["back"] = True
                    writer.write_with_metadata(answer.data, answer.app_metadata)

    @classmethod
    @contextlib.contextmanager
    def before(cls, folder):
        """A proxy before the server of a store."""
        # A place of its own: one that shuts down late would remove the socket of the next one.
        place = f"{folder}.proxy{next(cls._numbers)}"
        proxy = cls(f"grpc+unix://{place}", f"grpc+unix://{folder}.sock")
        proxy.address = f"unix:{place}"
        try:
            yield proxy
        finally:
            threading.Thread(target=proxy.shutdown, daemon=True).start()  # it waits for streams, which may be idle

    def let_go(self, stream=b"write"):
        """What was kept back arrives: long after it was sent again."""
        kept, self.kept = self.kept, []
        for chunk in kept:
            with flight.connect(self.server) as client:
                there, back = client.do_exchange(flight.FlightDescriptor.for_command(stream))
                with there:
                    there.begin(chunk.data.schema)
                    there.write_with_metadata(chunk.data, chunk.app_metadata)
                    back.read_chunk()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A store of many lanes, open here, one of the best rows, and their folders: both are served."""
    root = tmp_path_factory.mktemp("once")
    lanes, best = root / "lanes", root / "best"
    rb = ReplayBuffer(storage=LazyMemmapStorage(ROWS, scratch_dir=lanes, lanes=LANES))
    rb.extend({"a": torch.full((LANES,), -1)}, lane="each")
    writer = TensorDictMaxValueWriter(rank_key="a")
    with TensorDictReplayBuffer(storage=LazyMemmapStorage(64, scratch_dir=best), writer=writer) as other:
        other.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    with rb, serving_each([lanes, best]):
        yield rb, lanes, best


@pytest.fixture(scope="module")
def proxy(served):
    """Before the server of the store of many lanes."""
    _, lanes, _ = served
    with Proxy.before(lanes) as found:
        yield found


class Expected:
    """What must be in a store: for each lane a list, and where a row that is written lies."""

    def __init__(self, rb):
        self.rb = rb
        self.lanes = [[] for _ in range(LANES)]
        rows, room = rb["a"].tolist(), rb.storage.max_size // LANES
        for lane in self.lanes:  # each begins with -1
            end = rows.index(-1, 1) if -1 in rows[1:] else len(rows)
            lane += rows[:end]
            rows = rows[end:]
        self.room, self.next = room, rb.write_count

    def ids(self, n):
        self.next += n
        return torch.arange(self.next - n, self.next)

    def wrote(self, ids, lanes):
        """Take rows in, and say their numbers."""
        numbers = []
        for one, lane in zip(ids.tolist(), lanes, strict=True):
            numbers.append(lane * self.room + len(self.lanes[lane]))
            self.lanes[lane].append(one)
        return numbers

    def check(self):
        assert self.rb["a"].tolist() == [one for lane in self.lanes for one in lane]
        assert self.rb.write_count == sum(map(len, self.lanes))


WRITES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(FAULTS), max_size=3),
        st.one_of(st.integers(0, LANES - 1), st.lists(st.integers(0, LANES - 1), min_size=1, max_size=40)),
        st.booleans(),
    ),
    max_size=8,
)


@given(WRITES)
@settings(max_examples=10)
def test_rows_are_there_once_and_in_order_whatever_becomes_of_messages(served, proxy, writes):
    expected = Expected(served[0])
    with ReplayBuffer.connect(proxy.address) as remote:
        for faults, lane, late in writes:
            proxy.faults = [*faults]
            lanes = [lane] * 3 if isinstance(lane, int) else lane
            ids = expected.ids(len(lanes))
            rows = remote.extend({"a": ids}, lane=lane)
            assert rows.tolist() == expected.wrote(ids, lanes)
            if late:
                proxy.let_go()
        proxy.faults = []
        proxy.let_go()
    expected.check()


def test_a_row_that_is_added_is_sent_again(served, proxy):
    expected = Expected(served[0])
    with ReplayBuffer.connect(proxy.address) as remote:
        for fault in FAULTS:
            proxy.faults = [fault]
            ids = expected.ids(1)
            assert [remote.add({"a": ids[0]}, lane=5)] == expected.wrote(ids, [5])
    proxy.let_go()
    expected.check()


def test_a_writer_that_the_store_has_forgotten_goes_on_by_another_name(served, proxy):
    expected = Expected(served[0])
    with ReplayBuffer.connect(proxy.address) as remote:
        for lost in (False, True):
            remote.storage._writer, remote.storage._numbers = uuid.uuid4(), [7]  # as if others had taken its place
            proxy.faults = ["lose answer"] * lost
            ids = expected.ids(2)
            if lost:  # which may have been there before it was forgotten
                with pytest.raises(ConnectionError, match="may be written or not"):
                    remote.extend({"a": ids}, lane=0)
                ids = expected.ids(2)
            assert remote.extend({"a": ids}, lane=0).tolist() == expected.wrote(ids, [0, 0])
    expected.check()


def test_what_cannot_be_written_once_is_not_sent_again(served, proxy):
    _, _, best = served
    with Proxy.before(best) as other, ReplayBuffer.connect(other.address) as remote:
        rows = TensorDict({"a": torch.ones(1)}, [1])
        remote.extend(rows)
        other.faults = ["lose answer"]
        with pytest.raises(ConnectionError, match="may be written or not"):
            remote.extend(rows)
        assert len(remote) == 4


def test_limits_admit_rows_once_whatever_becomes_of_messages(served, proxy):
    rb, _, _ = served
    expected = Expected(rb)
    with ReplayBuffer.connect(proxy.address) as remote:
        ids = expected.ids(2)
        assert remote.extend({"a": ids}, lane=4).tolist() == expected.wrote(ids, [4, 4])
        rb.limit(SamplesPerInsert(1.0, min_size=len(rb), tolerance=0.0))
        try:
            ids = expected.ids(2)  # so many may be ahead
            assert remote.extend({"a": ids}, lane=[2, 3]).tolist() == expected.wrote(ids, [2, 3])
            for lane in (0, [0, 1]):
                with pytest.raises(RateLimited):
                    remote.extend({"a": ids}, lane=lane, timeout=0)
            for _ in range(2):  # the same numbers, now of other rows
                rb.sample(2)
                ids = expected.ids(2)
                proxy.faults = ["lose answer", "repeat"]
                assert remote.extend({"a": ids}, lane=[0, 1]).tolist() == expected.wrote(ids, [0, 1])
            assert rb.stats()["limit_inserts"] == 6
        finally:
            rb.limit(None)
    expected.check()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ({"writer": "x", "number": 1}, "UUID"),
        ({"writer": str(uuid.UUID(int=1)), "number": -1}, ">= 0"),
        ({"writer": str(uuid.UUID(int=1)), "number": 1 << 63}, "number"),
        ({"writer": str(uuid.UUID(int=1)), "number": 0}, "expected request 1 of writer"),
        ({"writer": str(uuid.UUID(int=1)), "number": 2}, "expected request 1 of writer"),
        (
            {"writer": str(uuid.UUID(int=1)), "number": 1, "more": [2], "lane": 1},
            "a number for each 8 lanes, got 2 for 2",
        ),
        ({"writer": str(uuid.UUID(int=1)), "number": 1, "lane": 99}, "expected rows, and lanes in"),
        ({"writer": str(uuid.UUID(int=1)), "number": 1, "lane": -1}, "expected rows, and lanes in"),
    ],
)
def test_names_numbers_and_lanes_that_are_none_are_refused(served, command, said):
    rb, lanes, _ = served
    expected = Expected(rb)
    names = wire.written_columns(rb.storage.memory.schema)
    batch = wire.record_batch(
        wire.arrow_schema(names), [torch.zeros(2, dtype=torch.int64), torch.tensor([0, command.pop("lane", 0)])], 2
    )
    with flight.connect(f"grpc+unix://{lanes}.sock") as client:
        there, back = client.do_exchange(flight.FlightDescriptor.for_command(b"write"))
        with there:
            there.begin(batch.schema)
            there.write_with_metadata(batch, json.dumps({"do": "append", **command}).encode())
            assert said in json.loads(back.read_chunk().app_metadata.to_pybytes())["message"]
    expected.check()


# ---- writes that are under way -----------------------------------------------------------------------------------------


@given(WRITES)
@settings(max_examples=10)
def test_streamed_rows_are_there_once_and_in_order_whatever_becomes_of_messages(served, proxy, writes):
    expected = Expected(served[0])
    with ReplayBuffer.connect(proxy.address, full="block") as remote:
        for faults, lane, _ in writes:
            proxy.faults = [*faults]
            lanes = [lane] * 3 if isinstance(lane, int) else lane
            ids = expected.ids(len(lanes))
            expected.wrote(ids, lanes)
            assert remote.extend({"a": ids}, lane=lane).tolist() == [-1] * len(lanes)
            ids.fill_(-2)  # the caller's memory is his own again
        assert len(remote) == len(served[0])  # which waits
        expected.check()
        assert remote.stats()["rows_dropped"] == remote.stats()["rows_under_way"] == 0
        proxy.faults = []
        proxy.let_go()
    expected.check()


def test_rows_of_many_lanes_that_limits_refuse_go_in_parts(served, proxy):
    rb = served[0]
    expected = Expected(rb)

    def add(remote, lane):
        (one,) = expected.ids(1)
        expected.wrote(one[None], [lane])
        remote.add({"a": one}, lane=lane)

    with ReplayBuffer.connect(proxy.address, full="block") as remote:
        proxy.held.clear()
        proxy.go.clear()
        proxy.faults = ["hold"]
        add(remote, 0)
        assert proxy.held.wait(60)
        rb.limit(SamplesPerInsert(1.0, min_size=len(rb), tolerance=0.0))
        try:
            ids = expected.ids(40)
            assert rb.extend({"a": ids}, lane=4).tolist() == expected.wrote(ids, [4] * 40)  # so many are ahead
            for lane in range(LANES):  # one block
                add(remote, lane)
            proxy.go.set()
            until(lambda: bool(rb.sample(1)) and not remote.stats()["rows_under_way"])
        finally:
            rb.limit(None)
        assert remote.stats()["rows_dropped"] == 0
        add(remote, 1)
    expected.check()


@pytest.mark.parametrize("full", ["block", "raise", "drop"])
def test_without_credits_a_write_waits_raises_or_is_dropped(served, proxy, full, monkeypatch):
    monkeypatch.setattr("engram.remote.under_way.CREDIT_ROWS", 4)
    expected = Expected(served[0])
    with ReplayBuffer.connect(proxy.address, full=full) as remote:
        proxy.held.clear()
        proxy.go.clear()
        proxy.faults = ["hold"]

        def write():
            ids = expected.ids(1)
            assert remote.extend({"a": ids}, lane=3).tolist() == [-1]
            return ids

        sent = [write()]
        assert proxy.held.wait(60)
        sent += [write() for _ in range(3)]
        blocked = threading.Thread(target=lambda: sent.append(write()))
        if full == "block":
            blocked.start()
            assert remote.storage._under_way.rows == 4
        elif full == "raise":
            with pytest.raises(
                RateLimited, match=r"at most 4 rows and 4194304 bytes under way, or 4 writes .*, got 4 and"
            ):
                write()
        else:
            write()
        proxy.go.set()
        if full == "block":
            blocked.join(60)
        assert remote.stats()["rows_dropped"] == (full == "drop")
        for ids in sent:
            expected.wrote(ids, [3])
    expected.check()


def test_limits_that_refuse_streamed_rows_keep_writes_waiting(served, proxy):
    rb, _, _ = served
    expected = Expected(rb)
    rb.limit(SamplesPerInsert(1.0, min_size=len(rb), tolerance=0.0))
    try:
        with ReplayBuffer.connect(proxy.address, full="block") as remote:
            for _ in range(1 + 4):  # one is admitted at once
                ids = expected.ids(1)
                remote.extend({"a": ids}, lane=1, timeout=60)
                expected.wrote(ids, [1])
                remote.storage._under_way.settle()
            with pytest.raises(RateLimited, match="SamplesPerInsert"):
                remote.extend({"a": ids}, lane=1, timeout=0.1)
            rb.sample(4)
            until(lambda: not remote.storage._under_way.rows)
            expected.check()
    finally:
        rb.limit(None)


def test_what_a_streamed_write_raised_the_next_one_raises(served):
    _, lanes, _ = served
    with Proxy.before(lanes) as other, ReplayBuffer.connect(other.address, full="block", patience=0.1) as remote:
        other.faults = ["lose message"] * 100
        remote.extend({"a": torch.zeros(3, dtype=torch.int64)}, lane=2)
        until(lambda: remote.storage._under_way.dropped)
        other.faults = []
        len(remote)  # it waits, and leaves the error
        with pytest.raises(ConnectionError, match="20 times in a row"):
            remote.extend({"a": torch.zeros(2, dtype=torch.int64)}, lane=2)
        assert remote.stats()["rows_dropped"] == 3
    with pytest.raises(ValueError, match="expected None, 'block', 'raise' or 'drop', got 'wait'"):
        ReplayBuffer.connect(other.address, full="wait")


def test_closing_ends_a_search_for_a_server_and_says_which_rows_are_in_doubt(served):
    _, lanes, _ = served
    with Proxy.before(lanes) as other:
        remote = ReplayBuffer.connect(other.address, full="block", patience=3600)
        other.describes = False
        other.faults = ["lose message"] * 100
        remote.extend({"a": torch.zeros(3, dtype=torch.int64)}, lane=2)
        for _ in range(3):  # it asks which store is there, for a server, and again when it knows that none answered
            assert other.refused.acquire(timeout=60)
        assert remote.storage.connection.is_searching
        with pytest.warns(RuntimeWarning, match="3 rows are not known to be written"):
            remote.close()
