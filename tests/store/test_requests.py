"""Requests that are repeated, in this process or another, after lost replies and deaths: their rows are written once, in order."""

import json
import mmap
import os
import struct
import threading
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import (
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RateLimited,
    ReadOnlyStore,
    ReplayBuffer,
    RowError,
    SamplesPerInsert,
    SliceSampler,
)
from engram.format import layout
from engram.store.blocks import BlockLayout
from engram.store.device.store import DeviceStore
from engram.store.requests import IN_DOUBT, NAME, OutOfOrder, Requests, WritersIndex
from tests import stress
from tests.fresh import run, start
from tests.waiting import until


def _columns(first, n):
    """Rows that say which they are."""
    step = torch.arange(first, first + n)
    return [torch.zeros(n, dtype=torch.bool), step]


def _buffer(storage=None, sampler=None):
    storage = LazyTensorStorage(12, lanes=2) if storage is None else storage
    rb = ReplayBuffer(storage=storage, sampler=sampler)
    rb.extend({"done": torch.zeros(1, dtype=torch.bool), "step": torch.tensor([-1])}, lane=1)
    return rb


# ---- a lane of one's own -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
@settings(max_examples=40)
def test_a_lane_holds_what_a_list_says(requests):
    rb = _buffer()
    once, sent = Requests(rb.storage.store), 0
    for back, n in requests:
        position = max(0, sent - back)
        written = once.append_at(0, position, _columns(position, n), n)
        assert written.rows.tolist() == [(position + i) % 6 for i in range(n)]
        end = max(sent, position + n)
        assert written.new == min(end - sent, 6)
        sent = end
        assert once.next_position(0) == sent
        live = rb.storage.store.tensors[1][:6].tolist()
        assert {live[p % 6] for p in range(max(0, sent - 6), sent)} == set(range(max(0, sent - 6), sent))
    assert rb.storage.store.core.lapped_rows == 0


def test_a_repeat_changes_neither_rows_nor_tickets_nor_priorities():
    rb = _buffer(sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0))
    once = Requests(rb.storage.store)
    rows = once.append_at(0, 0, _columns(0, 4), 4).rows
    rb.update_priority(rows, torch.tensor([5.0, 6.0, 7.0, 8.0]))
    tickets, count = rb.storage.tickets_of(rows), rb.write_count
    other = _columns(100, 4)  # would show
    assert once.append_at(0, 0, other, 4).new == 0
    assert rb.storage.tickets_of(rows).tolist() == tickets.tolist()
    assert rb.storage.store.tensors[1][:4].tolist() == [0, 1, 2, 3]
    assert rb.sampler.priorities().leaves(4).tolist() == [5.0, 6.0, 7.0, 8.0]
    assert rb.write_count == count
    assert once.append_at(0, 2, _columns(2, 4), 4).new == 2
    assert rb.sampler.priorities().leaves(6).tolist() == [5.0, 6.0, 7.0, 8.0, 8.0, 8.0]


def test_gaps_and_emptied_lanes_are_refused():
    rb = _buffer()
    once = Requests(rb.storage.store)
    once.append_at(0, 0, _columns(0, 3), 3)
    with pytest.raises(
        OutOfOrder, match="expected position 3, the next one of lane 0, got 5: rows between them are missing"
    ) as refused:
        once.append_at(0, 5, _columns(5, 1), 1)
    assert refused.value.expected == 3
    rb.empty()
    with pytest.raises(OutOfOrder, match="expected position 6, .* got 3: .*emptied meanwhile") as refused:
        once.append_at(0, 3, _columns(3, 1), 1)
    assert len(rb) == 0
    assert once.append_at(0, refused.value.expected, _columns(3, 1), 1).new == 1
    assert rb.storage.store.tensors[1][0] == 3


def test_bad_requests_change_nothing():
    rb = _buffer()
    once = Requests(rb.storage.store)
    before = [tensor.clone() for tensor in rb.storage.store.control_memory]
    for lane in (-1, 2):
        with pytest.raises(RowError, match=rf"expected a lane in \[0, 2\), got {lane}"):
            once.append_at(lane, 0, _columns(0, 1), 1)
        with pytest.raises(RowError):
            once.next_position(lane)
    good = _columns(0, 2)
    for columns in (
        good[:1],
        good[::-1],
        [good[0], good[1].float()],
        [good[0], good[1][:1]],
        [good[0], torch.arange(4)[::2]],
    ):
        with pytest.raises(
            RuntimeError, match=r"append_at: expected contiguous CPU columns done \[2\] bool, step \[2\] int64; got"
        ):
            once.append_at(0, 0, columns, 2)
        with pytest.raises(RuntimeError, match="append_by: expected contiguous CPU columns"):
            once.append_by(uuid.uuid4(), 1, 0, columns, 2)
    for position in (-1, 1 << 60):
        with pytest.raises((TypeError, ValueError)):
            once.append_at(0, position, good, 2)
    assert all((a == b).all() for a, b in zip(before, rb.storage.store.control_memory, strict=True))


def test_windows_run_through_rows_that_were_written_later():
    """A sampler that has passed a lost row by draws it once a repeat has written it."""
    rb = _buffer(sampler=SliceSampler(slice_len=5, end_key="done"))
    store = rb.storage.store
    once = Requests(store)
    once.append_at(0, 0, _columns(0, 6), 6)
    words = store._ticket_words()
    words[2] |= 3  # as if its writer had died amid it
    store.core.recover()
    rb.set_sampler(SliceSampler(slice_len=5, end_key="done"))
    with pytest.raises(RuntimeError, match="at most 3"):
        rb.sample(5)
    assert once.append_at(0, 0, _columns(0, 6), 6).new == 1
    steps = rb.sample(50)["step"].reshape(-1, 5)
    assert (steps[:, 1:] - steps[:, :-1] == 1).all()


def test_a_request_comes_from_a_block():
    rb = _buffer()
    once, columns = Requests(rb.storage.store), BlockLayout(rb.storage.store.schema.fields)
    block = columns.empty(3)
    for view, column in zip(columns.views(block, 3), _columns(0, 3), strict=True):
        view.copy_(column)
    for new in (3, 0):
        assert once.append_at(0, 0, columns.views(bytes(block), 3), 3).new == new
    assert rb.storage.store.tensors[1][:3].tolist() == [0, 1, 2]


# ---- lanes that writers share ------------------------------------------------------------------------------------------


def test_writers_share_a_lane():
    rb = _buffer()
    store = rb.storage.store
    requests, (one, two) = [Requests(store), Requests(store)], (uuid.uuid4(), uuid.uuid4())
    assert requests[0].append_by(one, 1, 0, _columns(10, 2), 2).rows.tolist() == [0, 1]
    assert requests[1].append_by(two, 1, 0, _columns(20, 1), 1).rows.tolist() == [2]
    assert requests[1].append_by(one, 2, 0, _columns(12, 2), 2).rows.tolist() == [3, 4]
    for once in requests:
        assert once.append_by(one, 1, 1, _columns(99, 2), 2) == (pytest.approx([0, 1]), 0)  # the lane of the first time
        assert (once.next_request(one), once.next_request(two), once.next_request(uuid.uuid4())) == (3, 2, 1)
    assert store.tensors[1][:5].tolist() == [10, 11, 20, 12, 13]
    assert [requests[0].place_of(one, number) for number in (1, 2, 3)] == [(0, 0, 2), (0, 3, 2), (0, 0, 0)]
    assert (requests[1].place_of(two, 1), requests[1].place_of(uuid.uuid4(), 1)) == ((0, 2, 1), (0, 0, 0))
    with pytest.raises(ValueError, match=r"as many rows as it had first, got 3 for request 1 of writer "):
        requests[0].append_by(one, 1, 0, _columns(10, 3), 3)
    for number in (0, 4):
        with pytest.raises(OutOfOrder, match=f"expected request 3 of writer {one}, got {number}") as refused:
            requests[0].append_by(one, number, 0, _columns(0, 1), 1)
        assert refused.value.expected == 3
    rb.empty()
    assert requests[0].append_by(two, 1, 0, _columns(20, 1), 1).new == 0  # it was written, and forgotten
    assert len(rb) == 0


def test_only_the_last_requests_of_the_last_writers_are_known():
    rb = _buffer()
    once = Requests(rb.storage.store, writers=2)
    first, *others = [uuid.uuid4() for _ in range(3)]
    for number in range(1, IN_DOUBT + 3):
        once.append_by(first, number, 0, _columns(number, 1), 1)
    for number in range(3, IN_DOUBT + 3):
        assert once.append_by(first, number, 0, _columns(number, 1), 1).new == 0
    with pytest.raises(OutOfOrder, match=f"knows its last {IN_DOUBT} requests"):
        once.append_by(first, 2, 0, _columns(2, 1), 1)
    for other in others:
        once.append_by(other, 1, 1, _columns(0, 1), 1)
    with pytest.raises(OutOfOrder, match="silent while 2 others wrote") as refused:
        once.append_by(first, IN_DOUBT + 3, 0, _columns(0, 1), 1)
    assert refused.value.expected == 1


def test_the_table_is_made_by_the_first_such_request_alone(tmp_path):
    rb = _buffer(LazyMemmapStorage(12, scratch_dir=tmp_path / "store", lanes=2))
    table = tmp_path / "store" / layout.FOLDER / layout.INDEXES / NAME / WritersIndex.kind
    once = Requests(rb.storage.store)
    once.append_at(0, 0, _columns(0, 1), 1)
    assert not table.exists()
    assert once.next_request(uuid.uuid4()) == 1
    assert table.exists()
    assert Requests(rb.storage.store, writers=5)._table().writers == 1024  # as it was made
    rb.dumps(tmp_path / "dump")
    assert not list((tmp_path / "dump").rglob(WritersIndex.kind))


KNOWN = """
    import json, uuid
    import torch
    from engram import ReplayBuffer
    from engram.store.requests import Requests
    rb = ReplayBuffer.open(folder)
    once = Requests(rb.storage.store)
    columns = [torch.zeros(2, dtype=torch.bool), torch.tensor([4, 5])]
    written = [once.append_by(uuid.UUID(writer), number, 0, columns, 2) for number in (1, 2)]
    rb.close()
    print(json.dumps([(w.rows.tolist(), w.new) for w in written]))
"""


def test_another_process_knows_what_was_requested(tmp_path):
    folder, writer = tmp_path / "store", uuid.uuid4()
    rb = _buffer(LazyMemmapStorage(12, scratch_dir=folder, lanes=2))
    Requests(rb.storage.store).append_by(writer, 1, 0, _columns(0, 2), 2)
    values = {"folder": str(folder), "writer": str(writer)}
    assert json.loads(run(KNOWN, **values)) == [[[0, 1], 0], [[2, 3], 2]]  # beside this one
    rb.close()
    assert json.loads(run(KNOWN, **values)) == [[[0, 1], 0], [[2, 3], 0]]


def test_a_store_that_is_only_read_refuses_requests(tmp_path):
    _buffer(LazyMemmapStorage(12, scratch_dir=tmp_path / "store", lanes=2)).close()
    rb = ReplayBuffer.open(tmp_path / "store", readonly=True)
    once = Requests(rb.storage.store)
    assert once.next_position(1) == 1
    with pytest.raises(ReadOnlyStore):
        once.append_at(0, 0, _columns(0, 1), 1)


def test_a_damaged_table_is_refused(tmp_path):
    rb = _buffer(LazyMemmapStorage(12, scratch_dir=tmp_path / "store", lanes=2))
    Requests(rb.storage.store).next_request(uuid.uuid4())
    rb.close()
    table = tmp_path / "store" / layout.FOLDER / layout.INDEXES / NAME / WritersIndex.kind
    table.write_bytes(b"\0" * table.stat().st_size)
    with pytest.raises(IncompatibleStore, match="not a table of writers"):
        ReplayBuffer.open(tmp_path / "store")


def test_a_store_on_an_accelerator_has_no_requests():
    schema = _buffer().storage.store.schema
    with pytest.raises(RuntimeError, match="expected a store on the CPU"):
        Requests(DeviceStore.on(schema, torch.device("cpu")))


def test_a_forked_child_has_the_table_of_private_memory():
    rb, writer = _buffer(), uuid.uuid4()
    once = Requests(rb.storage.store)
    once.append_by(writer, 1, 0, _columns(0, 1), 1)
    reader, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(end, struct.pack("<q", once.append_by(writer, 1, 0, _columns(0, 1), 1).new))
        os._exit(0)
    assert struct.unpack("<q", os.read(reader, 8)) == (0,)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in (reader, end):
        os.close(fd)


# ---- others at work ----------------------------------------------------------------------------------------------------


def test_threads_that_ask_for_the_same_requests_write_them_once():
    rb = _buffer(LazyTensorStorage(4000, lanes=2))
    writer, errors, new = uuid.uuid4(), [], [0, 0, 0]

    def ask(k):
        once = Requests(rb.storage.store)
        try:
            for number in range(1, 151):
                new[k] += once.append_at(0, 3 * (number - 1), _columns(3 * (number - 1), 3), 3).new
                new[k] += once.append_by(writer, number, 1, _columns(2 * number, 2), 2).new
        except OutOfOrder as error:
            if error.expected <= number:  # the others may be ahead by more than the table knows
                errors.append(error)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    store = rb.storage.store
    once = Requests(store)
    assert store.tensors[1][: once.next_position(0)].tolist() == list(range(450))
    assert store.tensors[1][2001 : 2000 + once.next_position(1)].tolist() == list(range(2, 302))
    assert sum(new) == 450 + 300


ASK = """
    import mmap, struct, sys, uuid
    import torch
    from engram import ReplayBuffer
    from engram.store.requests import OutOfOrder, Requests

    with open(account, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    acknowledged = lambda k: struct.unpack_from("<q", memory, 8 * k)[0]
    rb = ReplayBuffer.open(folder)
    once = Requests(rb.storage.store)
    writers = [uuid.UUID(int=1000 + k) for k in range(2)]

    def rows(k, first, n):
        number = torch.arange(first, first + n) * 10 + k
        return [torch.zeros(n, dtype=torch.bool), number, number.repeat_interleave(words).reshape(n, words)]

    print("begun")
    while acknowledged(0) < most:
        # A lane of its own, in pieces that depend on where they begin; then two writers who share the other lane.
        first = acknowledged(0)
        n = first % 5 + 1
        once.append_at(0, first, rows(0, first, n), n)
        struct.pack_into("<q", memory, 0, first + n)
        for k, writer in enumerate(writers, 1):
            number = acknowledged(k) + 1
            once.append_by(writer, number, 1, rows(k, 3 * (number - 1), 3), 3)
            struct.pack_into("<q", memory, 8 * k, number)
    print("done")
"""


@pytest.mark.stress
def test_a_process_that_is_killed_is_followed_by_one_that_repeats_what_was_in_doubt(tmp_path):
    """One process after the other is killed amid its requests. Nothing is missing, twice or torn."""
    chance, kills, words = stress.chance("requests"), stress.size(8, 400, 2000), 300
    per_kill = 400
    folder, account = tmp_path / "store", tmp_path / "account"
    account.write_bytes(bytes(64))
    length = 40_000
    rb = ReplayBuffer(storage=LazyMemmapStorage(2 * length, scratch_dir=folder, lanes=2))
    first = {"a": torch.zeros(1, dtype=torch.bool), "b": torch.tensor([-1])}
    rb.extend({**first, "c": torch.full((1, words), -1)}, lane=1)
    store = rb.storage.store
    with account.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    values = {"folder": str(folder), "account": str(account), "words": words}
    for kill in range(kills):
        before = struct.unpack_from("<q", memory)[0]
        program = start(ASK, most=1 << 40, **values)
        program.until("begun")
        enough = before + chance.randrange(1, per_kill)

        def wrote_enough(program=program, enough=enough):
            assert program.poll() is None, program.err
            return struct.unpack_from("<q", memory)[0] >= enough

        until(wrote_enough)
        program.kill()
        if kill % 8 == 7 or kill == kills - 1:
            _check_account(store, memory, length)
    assert run(ASK, most=struct.unpack_from("<q", memory)[0] + 50, **values).splitlines() == ["begun", "done"]
    _check_account(store, memory, length)


def _check_account(store, memory, length):
    """Acknowledged rows are there once, in order; what was in doubt is there whole, in part or not at all, and behind them."""
    own, *shared = struct.unpack_from("<3q", memory)
    store.core.reclaim()
    _, numbers, words = store.tensors
    end = Requests(store).next_position(0)
    live = torch.arange(max(0, own - length), own)
    assert own <= end <= own + 5
    rows = live % length
    assert (store.tickets_of(rows) >= 0).all()
    assert (numbers[rows] == live * 10).all()
    assert (words[rows] == numbers[rows, None]).all()
    there = torch.arange(length, 2 * length)
    there = there[store.tickets_of(there) >= 0]
    assert (words[there] == numbers[there, None]).all()
    lapped = Requests(store).next_position(1) > length
    for k, requests in enumerate(shared, 1):
        found = numbers[there][numbers[there] % 10 == k] // 10
        found = found.sort().values if lapped else found
        known = found[found < 3 * requests]
        assert known.tolist() == list(range(3 * requests - len(known), 3 * requests))
        assert lapped or len(known) == 3 * requests


# ---- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["by", "at"])
def test_limits_admit_a_request_once(way):
    rb = _buffer().limit(SamplesPerInsert(1, min_size=1, tolerance=0))
    once, writer = Requests(rb.storage.store), uuid.uuid4()

    def ask(number, first, n):
        if way == "by":
            return once.append_by(writer, number, 0, _columns(first, n), n)
        return once.append_at(0, first, _columns(first, n), n)

    assert ask(1, 0, 2).new == 2  # so many may be ahead
    for _ in range(2):
        assert ask(1, 0, 2).new == 0  # a repeat needs no admission
        with pytest.raises(RateLimited):
            ask(2, 2, 1)
        assert rb.stats()["limit_inserts"] == rb.stats()["limit_level"] - 1 == 2
    assert rb.write_count == 3
    rb.sample(2)
    assert ask(2, 2, 1).new == 1
    assert rb.stats()["limit_inserts"] == 3
    if way == "at":
        with pytest.raises(RateLimited):
            once.append_at(0, 1, _columns(1, 3), 3)
        rb.sample(1)
        assert once.append_at(0, 1, _columns(1, 3), 3).new == 1  # of which the last is new
        assert (rb.stats()["limit_inserts"], rb.stats()["limit_level"]) == (4, 2)
    with pytest.raises(OutOfOrder):
        ask(9, 9, 1)
    assert rb.stats()["limit_inserts"] == (4 if way == "at" else 3)


def test_a_sample_that_waits_hears_of_a_request():
    rb = _buffer().limit(SamplesPerInsert(1, min_size=4, tolerance=0))
    sampled = threading.Event()

    def sample():
        rb.sample(1, timeout=60)
        sampled.set()

    waiting = threading.Thread(target=sample)
    waiting.start()
    until(lambda: rb.stats()["samples_waiting"])
    Requests(rb.storage.store).append_by(uuid.uuid4(), 1, 0, _columns(0, 3), 3)
    waiting.join(60)
    assert sampled.is_set()
