"""Writes under way, against a server that is a list."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram import RateLimited
from engram._support.native import NotAdmitted
from engram.remote import wire
from engram.remote.under_way import _MAX_TOGETHER, CREDIT_BYTES, WritesUnderWay
from tests.waiting import until

COLUMNS = [wire.Column("a", "int64", ())]
SCHEMA = wire.arrow_schema(COLUMNS)


def rows_of(*numbers):
    return wire.record_batch(SCHEMA, [torch.tensor(numbers)], len(numbers))


class Server:
    """It answers when it is let, and raises what it is told to, once each."""

    def __init__(self, *errors):
        self.errors, self.messages = list(errors), []
        self.asked, self.go = threading.Event(), threading.Event()

    def send(self, batch):
        self.asked.set()
        self.go.wait(60)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.messages.append(wire.tensors_in(batch, COLUMNS)[0].tolist())

    @property
    def rows(self):
        return [row for rows in self.messages for row in rows]


def test_credits_are_bytes_or_rows_and_a_larger_message_goes_alone(monkeypatch):
    monkeypatch.setattr("engram.remote.under_way.CREDIT_ROWS", CREDIT_BYTES // 8)
    large, half = torch.zeros(CREDIT_BYTES // 4).long(), torch.zeros(CREDIT_BYTES // 16).long()
    rows = torch.zeros(CREDIT_BYTES // 40).long()
    for sizes, most in (([half] * 3, 2), ([large] * 2, 1), ([half, large], 1), ([rows] * 6, 5)):
        server = Server()
        writes = WritesUnderWay("raise", server.send)
        batches = [wire.record_batch(SCHEMA, [rows], len(rows)) for rows in sizes]
        for batch in batches[:most]:
            writes.put(batch, [0] * batch.num_rows)
        before = sum(map(len, sizes[:most]))
        with pytest.raises(RateLimited, match=f"got {before} and {8 * before} before these {len(sizes[most])} of"):
            writes.put(batches[most], [0] * batches[most].num_rows)
        server.go.set()
        writes.settle()
        assert writes.rows == writes._bytes == 0
        writes.put(batches[most], [0] * batches[most].num_rows)
        writes.close(wait=True)
        assert len(server.rows) == sum(map(len, sizes[: most + 1]))


def gather(writes, *numbers):
    writes.gather(SCHEMA, [torch.tensor(numbers).numpy().tobytes()], [0] * len(numbers))


def test_small_writes_go_together_in_order_and_are_copied():
    server = Server()
    writes = WritesUnderWay("block", server.send)
    writes.put(rows_of(-1), [0])
    assert server.asked.wait(60)
    row = torch.zeros(1, dtype=torch.int64)
    for number in range(20_000):  # more than a block holds, while nothing is answered
        row[0] = number
        writes.gather(SCHEMA, [row.numpy().tobytes()], (number % 3,))
    assert writes.rows == 20_001
    server.go.set()
    writes.settle()
    assert server.rows == [-1, *range(20_000)]
    assert len(server.messages) <= 4
    writes.close(wait=True)


def test_credits_of_small_writes_are_rows(monkeypatch):
    monkeypatch.setattr("engram.remote.under_way.CREDIT_ROWS", 10)
    server = Server()
    writes = WritesUnderWay("drop", server.send)
    for number in range(12):
        gather(writes, number)
    assert (writes.rows, writes.dropped) == (10, 2)
    server.go.set()
    writes.settle()
    assert server.rows == [*range(10)]
    writes.close(wait=True)


class Limited(Server):
    """It never takes more than so many rows at a time, and says so in one of two ways."""

    def __init__(self, most, kind):
        super().__init__()
        self.most, self.kind = most, kind
        self.go.set()

    def send(self, batch):
        if batch.num_rows > self.most:
            raise self.kind
        super().send(batch)


@pytest.mark.parametrize("kind", [NotAdmitted(1), ValueError("can never admit so many")])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_what_was_gathered_is_sent_in_parts_where_limits_ask_for_it(kind, most):
    server = Limited(most, kind)
    writes = WritesUnderWay("block", server.send)
    for number in range(50):
        while True:
            try:
                gather(writes, number)
                break
            except NotAdmitted:
                continue
    while writes.rows:
        writes.settle()
    assert server.rows == [*range(50)]
    assert max(len(rows) for rows in server.messages) <= most
    assert writes.dropped == writes._bytes == 0
    writes.close(wait=True)


def test_what_waits_goes_in_one_message():
    server = Server()
    writes = WritesUnderWay("block", server.send)
    writes.put(rows_of(1), [3])
    assert server.asked.wait(60)
    writes.put(rows_of(2, 3), [0, 3])
    writes.put(rows_of(4), [1])
    server.go.set()
    writes.settle()
    assert server.messages == [[1], [2, 3, 4]]
    writes.close(wait=True)
    writes.close(wait=True)


@given(st.lists(st.sampled_from([None, NotAdmitted(1), ValueError("too many"), OSError("away")]), max_size=6))
def test_rows_are_written_in_order_or_an_error_is_raised_for_them(errors):
    server = Server(*errors)
    writes = WritesUnderWay("block", server.send)
    server.go.set()
    raised = 0
    for number in range(12):
        while True:
            try:
                writes.put(rows_of(number), [0])
                break
            except NotAdmitted:  # the caller waits
                continue
            except (ValueError, OSError):  # of an earlier one
                raised += 1
    while writes.rows:
        try:
            writes.settle()
        except (ValueError, OSError):
            raised += 1
    assert server.rows == sorted(set(server.rows))
    assert len(server.rows) + writes.dropped == 12
    assert (writes.dropped == 0) == (raised == 0) or writes._error is not None
    assert writes.dropped <= _MAX_TOGETHER * sum(isinstance(it, ValueError | OSError) for it in errors)
    if writes._error is None:
        writes.close(wait=True)


def test_who_only_waits_leaves_an_error_to_the_next_write():
    server = Server(OSError("away"))
    writes = WritesUnderWay("block", server.send)
    writes.put(rows_of(1), [0])
    server.go.set()
    for _ in range(2):
        writes.wait()
    assert writes.dropped == 1
    with pytest.raises(OSError, match="away"):
        writes.put(rows_of(2), [0])
    writes.close(wait=True)


def test_an_error_that_no_call_has_raised_is_said_at_the_end():
    server = Server(OSError("away"))
    writes = WritesUnderWay("block", server.send)
    writes.put(rows_of(1), [0])
    server.go.set()
    writes.wait()
    with pytest.warns(RuntimeWarning, match="rows of an earlier write are not known to be written: away"):
        writes.close(wait=True)
    writes.close(wait=True)


def test_rows_that_are_refused_for_now_are_written_before_the_end():
    server = Server(*[NotAdmitted(1)] * 3)
    server.go.set()
    writes = WritesUnderWay("block", server.send)
    writes.put(rows_of(1, 2), [0, 0])
    writes.close(wait=True)
    assert server.rows == [1, 2]


class OneInThree(Server):
    """Its limits refuse two messages of three."""

    def __init__(self):
        super().__init__()
        self.asked_so_often = 0

    def send(self, batch):
        self.go.wait(60)
        time.sleep(0.01)  # time in which a writer that may write does
        self.asked_so_often += 1
        if self.asked_so_often % 3:
            raise NotAdmitted(1)
        super().send(batch)


def test_little_is_under_way_while_limits_refuse_rows():
    server = OneInThree()
    writes = WritesUnderWay("block", server.send)
    for number in range(20):  # before the first refusal is known
        gather(writes, number)
    server.go.set()
    until(lambda: server.asked_so_often > 1)
    number, most = 20, 0
    while number < 60:
        try:
            gather(writes, number)
        except NotAdmitted:
            continue
        number, most = number + 1, max(most, writes.rows)
    assert most <= _MAX_TOGETHER
    writes.close(wait=True)
    assert server.rows == [*range(60)]


class Hesitant(Server):
    """It refuses one message, and later admits one at a time, when it is let."""

    def __init__(self):
        super().__init__(NotAdmitted(1))
        self.let = threading.Semaphore(0)

    def send(self, batch):
        self.let.acquire()
        super().send(batch)


def test_more_is_under_way_once_what_was_refused_is_admitted():
    server = Hesitant()
    server.go.set()
    writes = WritesUnderWay("drop", server.send)
    for number in range(3):
        writes.put(rows_of(number), [0])
    server.let.release()  # refused: three are under way
    until(lambda: not server.errors)
    writes.put(rows_of(3), [0])
    writes.put(rows_of(99), [0])  # a fifth one is not taken now
    assert writes.dropped == 1
    server.let.release()
    until(lambda: writes.rows == 3)
    writes.put(rows_of(4), [0])
    server.let.release()
    until(lambda: writes.rows == 1)
    assert server.rows == [0, 1, 2, 3]
    for number in range(5, 20):  # there is always something under way
        writes.put(rows_of(number), [0])
    assert writes.dropped == 1
    for _ in range(20):
        server.let.release()
    writes.close(wait=True)
    assert server.rows == [*range(20)]


def test_the_end_waits_as_long_as_rows_are_admitted(monkeypatch):
    monkeypatch.setattr("engram.remote.under_way._CLOSE_TIMEOUT_S", 2.0)
    monkeypatch.setattr("engram.remote.under_way.RETRY_INTERVAL_S", 0.1)
    server = OneInThree()
    writes = WritesUnderWay("block", server.send)
    for number in range(30):  # the first refusals come late; then a row is admitted every 0.2 s, for 6 s
        writes.put(rows_of(number), [0])
    monkeypatch.setattr("engram.remote.under_way._MAX_TOGETHER", 1)
    server.go.set()
    writes.close(wait=True)
    assert server.rows == [*range(30)]


def test_rows_that_no_server_takes_are_said_at_the_end(monkeypatch):
    monkeypatch.setattr("engram.remote.under_way._CLOSE_TIMEOUT_S", 0.1)
    server = Server(*[NotAdmitted(1)] * 10_000)
    server.go.set()
    writes = WritesUnderWay("block", server.send)
    writes.put(rows_of(1, 2), [0, 0])
    with pytest.warns(RuntimeWarning, match="2 rows are not known to be written: the server did not admit"):
        writes.close(wait=True)
    assert writes.rows == 0
