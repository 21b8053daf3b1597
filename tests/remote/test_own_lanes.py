"""``own_lanes``: a streamed write is told the numbers of its rows at once, and they are those of the rows, or an error says so."""

import itertools
import json
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import engram
from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    Ragged,
    ReplayBuffer,
    RowError,
    SamplesPerInsert,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    serve,
)
from engram._support.native import NotAdmitted
from engram.remote import wire
from engram.remote.under_way import WritesUnderWay
from tests import fresh, stress
from tests.serving.servers import serving_each, start
from tests.serving.test_awaiting import serving
from tests.serving.test_exactly_once import FAULTS, Proxy
from tests.waiting import until

LANES, LENGTH = 3, 8
COLUMNS = [wire.Column("a", "int64", ()), wire.Column(":lane", "int64", ())]
SCHEMA = wire.arrow_schema(COLUMNS)


# ---- what is under way, against a server that is a dict ------------------------------------------------------------------


class Server:
    """Rows by number, each lane a ring. It does as it is told, once each."""

    def __init__(self, orders):
        self.orders, self.rows, self.counts = list(orders), {}, [0] * LANES

    def write(self, lane, what):
        number = lane * LENGTH + self.counts[lane] % LENGTH
        self.counts[lane] += 1
        self.rows[number] = what
        return number

    def send(self, batch):
        order = self.orders.pop(0) if self.orders else "take"
        if order == "refuse":
            raise NotAdmitted(1)
        if order == "fail":
            raise OSError("away")
        if isinstance(order, int):
            self.write(order, "of another")
        ids, each = (it.tolist() for it in wire.tensors_in(batch, COLUMNS))
        numbers = torch.tensor([self.write(lane, one) for lane, one in zip(each, ids, strict=True)])
        answer = wire.record_batch(wire.arrow_schema(wire.ROW), [numbers], len(numbers))
        return SimpleNamespace(rows=answer, columns=wire.ROW)


@given(
    st.lists(st.one_of(st.sampled_from(["take", "refuse", "fail"]), st.integers(0, LANES - 1)), max_size=6),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, LANES - 1), min_size=1, max_size=12)), max_size=10),
)
@settings(max_examples=150)
def test_a_number_that_was_told_is_that_of_the_row_or_an_error_is_raised(orders, writes):
    server = Server(orders)
    under_way = WritesUnderWay("block", server.send, LENGTH)
    ids, told, errors = itertools.count(), {}, []

    def tried(act):
        while True:
            try:
                return act()
            except NotAdmitted:
                continue
            except (RowError, OSError) as error:
                errors.append(error)

    def written(columns, lanes, *, whole):
        """As the storage of a client does it: where a number is not known, it is asked for when nothing is under way."""
        batch = wire.record_batch(SCHEMA, columns, len(lanes))
        if whole:
            numbers = under_way.put(batch, lanes)
        else:
            numbers = under_way.gather(SCHEMA, [column.numpy().tobytes() for column in columns], lanes)
        if numbers is not None:
            return numbers
        under_way.settle()
        if under_way.rows:
            raise NotAdmitted(len(lanes))
        answer = server.send(batch)
        numbers = wire.tensors_in(answer.rows, answer.columns)[0].tolist()
        under_way.newest.update(zip(lanes, numbers, strict=True))
        return numbers

    for whole, lanes in writes:
        mine = [next(ids) for _ in lanes]
        columns = [torch.tensor(mine), torch.tensor(lanes)]
        numbers = tried(partial(written, columns, lanes, whole=whole))
        told.update(zip(mine, numbers, strict=True))
    while under_way.rows:
        tried(under_way.settle)
    tried(under_way.settle)
    newest = {number: one for one, number in told.items()}  # of those with one number, the last one
    right = all(server.rows.get(number) == one for number, one in newest.items())
    assert right or errors
    if not {*orders} - {"take", "refuse"}:
        assert right
        assert not errors
    assert len(told) == next(ids)
    under_way.close(wait=True)


# ---- clients, each with a lane of its own --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A store of three short lanes, open here and served, and its folder."""
    folder = tmp_path_factory.mktemp("own") / "store"
    rb = ReplayBuffer(storage=LazyMemmapStorage(LANES * LENGTH, scratch_dir=folder, lanes=LANES))
    rb.extend({"a": torch.full((LANES,), -1), "b": torch.zeros(LANES, 2)}, lane="each")
    with rb, serving_each([folder]):
        yield rb, folder


def row(one):
    return {"a": torch.tensor(one), "b": torch.full((2,), float(one))}


def rows(ids):
    ids = torch.as_tensor(ids)
    return {"a": ids, "b": ids.unsqueeze(1).expand(-1, 2).float()}


def check(rb, told):
    """The rows with the newest numbers are there, whole. ``told``: the number of each row, in the order of the writes."""
    for number, one in {number: one for one, number in told}.items():
        there = rb[number]
        assert (int(there["a"]), there["b"].tolist()) == (one, [float(one)] * 2)


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(FAULTS), max_size=2), st.integers(0, LANES - 1), st.sampled_from([0, 0, 1, 5, 20])
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=15)
def test_numbers_hold_over_laps_whatever_becomes_of_messages(served, writes):
    rb, folder = served
    ids, told = itertools.count(1000), []
    with Proxy.before(folder) as proxy, ReplayBuffer.connect(proxy.address, full="block", own_lanes=True) as remote:
        for faults, lane, n in writes:
            proxy.faults = [*faults]
            mine = [next(ids) for _ in range(n or 1)]
            numbers = remote.extend(rows(mine), lane=lane).tolist() if n else [remote.add(row(mine[0]), lane=lane)]
            assert all(number // LENGTH == lane for number in numbers)
            told += zip(mine, numbers, strict=True)
        remote.storage._under_way.settle()  # raises where one has moved
        check(rb, told)
        proxy.faults = []
        proxy.let_go()
        check(rb, told)
    for lane in range(LANES):
        numbers = [number for _, number in told if number // LENGTH == lane]
        assert numbers == [lane * LENGTH + (numbers[0] + k) % LENGTH for k in range(len(numbers))]


def test_several_clients_know_their_numbers_beside_each_other(served):
    rb, folder = served
    found = [[] for _ in range(LANES)]

    def write(lane):
        with ReplayBuffer.connect(f"unix:{folder}.sock", full="block", own_lanes=True) as remote:
            remote.on_lane(lane)
            for k in range(500):
                one = 1000 * lane + k
                found[lane].append((one, remote.add(row(one))))
            remote.storage._under_way.settle()

    threads = [threading.Thread(target=write, args=(lane,)) for lane in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane, told in enumerate(found):
        first = told[0][1] - lane * LENGTH
        assert [number for _, number in told] == [lane * LENGTH + (first + k) % LENGTH for k in range(500)]
        check(rb, told)


def test_threads_of_one_client_may_share_a_lane(served):
    rb, folder = served
    told, begin = [], int(rb.storage.extent().seam[1])
    with ReplayBuffer.connect(f"unix:{folder}.sock", full="block", own_lanes=True) as remote:

        def write(first):
            told.extend((one, remote.add(row(one), lane=1)) for one in range(first, first + 100))

        threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1000, 2000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        remote.storage._under_way.settle()
    numbers = [number for _, number in told]
    assert sorted(numbers) == sorted((begin + k) % LENGTH + LENGTH for k in range(300))
    written = dict(told)
    for number in range(LENGTH, 2 * LENGTH):
        assert written[int(rb[number]["a"])] == number


def test_another_writer_in_the_lane_is_an_error_and_no_row_is_lost(served):
    rb, folder = served
    before = rb.write_count
    with ReplayBuffer.connect(f"unix:{folder}.sock", full="block", own_lanes=True) as remote:
        first = remote.add(row(1), lane=2)
        assert int(rb[first]["a"]) == 1
        rb.add(row(99), lane=2)
        told = remote.add(row(2), lane=2)
        remote.storage._under_way.wait()
        assert int(rb[told]["a"]) == 99
        with pytest.raises(
            RowError, match=f"got row .* for one that was told {told}, and 0 more: they are in the store"
        ):
            remote.add(row(3), lane=2)
        numbers = [(one, remote.add(row(one), lane=2)) for one in (4, 5)]
        remote.storage._under_way.settle()
        check(rb, numbers)
        assert remote.stats()["rows_dropped"] == 0
    assert rb.write_count == before + 5
    assert [int(rb[(told - 2 * LENGTH + k) % LENGTH + 2 * LENGTH]["a"]) for k in range(4)] == [99, 2, 4, 5]


def test_what_moves_a_lane_is_asked_for_again(served):
    rb, folder = served
    with ReplayBuffer.connect(f"unix:{folder}.sock", full="block", own_lanes=True) as remote:
        remote.extend(rows([1, 2, 3]), lane=0)
        remote.empty(empty_write_count=False)
        assert remote.add(row(4), lane=0) == 0
        told = [(one, remote.add(row(one), lane=0)) for one in (5, 6)]
        remote.storage._under_way.settle()
        assert told == [(5, 1), (6, 2)]
        check(rb, [(4, 0), *told])
        remote.extend(rows([7, 8]), lane=[1, 2])
        assert remote.extend(rows([9, 10, 11]), lane=[2, 1, 2]).tolist() == [17, 9, 18]
        remote.storage._under_way.settle()
        check(rb, [(9, 17), (10, 9), (11, 18)])


def test_rows_that_limits_refuse_have_their_numbers_later(served):
    rb, folder = served
    with ReplayBuffer.connect(f"unix:{folder}.sock", full="block", own_lanes=True) as remote:
        told = [(one, remote.add(row(one), lane=1)) for one in (1, 2)]
        remote.storage._under_way.settle()
        rb.limit(SamplesPerInsert(1.0, min_size=len(rb), tolerance=0.0))
        try:
            told += [(one, remote.add(row(one), lane=1)) for one in range(3, 6)]
            rb.sample(8)
            while remote.stats()["rows_under_way"]:
                rb.sample(2)
        finally:
            rb.limit(None)
        check(rb, told)
        assert len({number for _, number in told}) == 5


def test_rows_that_are_dropped_have_no_numbers(served, monkeypatch):
    rb, folder = served
    monkeypatch.setattr("engram.remote.under_way.CREDIT_ROWS", 2)
    with Proxy.before(folder) as proxy, ReplayBuffer.connect(proxy.address, full="drop", own_lanes=True) as remote:
        remote.add(row(0), lane=0)
        proxy.faults = ["hold"]
        told = [(one, remote.add(row(one), lane=0)) for one in range(1, 6)]
        proxy.go.set()
        remote.storage._under_way.settle()
        assert [number is None for _, number in told] == [False, False, True, True, True]
        told = [*told[:2], (6, remote.add(row(6), lane=0))]
        remote.storage._under_way.settle()
        check(rb, told)
        assert remote.stats()["rows_dropped"] == 3


def test_a_writer_that_says_which_rows_go_tells_no_numbers(tmp_path):
    writer = TensorDictMaxValueWriter(rank_key="a")
    with TensorDictReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "best"), writer=writer) as rb:
        rb.extend(TensorDict({"a": torch.zeros(4)}, [4]))
        with engram.serve(rb) as address, ReplayBuffer.connect(address, full="block", own_lanes=True) as remote:
            for value in (3.0, 2.0):
                remote.add(TensorDict({"a": torch.tensor(value)}, []))
            assert remote.extend(TensorDict({"a": torch.ones(2)}, [2])).tolist() == [-1, -1]
            remote.storage._under_way.settle()
        assert sorted(rb[:]["a"].tolist()) == [1.0, 1.0, 2.0, 3.0]


def test_a_row_that_grew_takes_a_place_between(tmp_path):
    items = {"b": Ragged(torch.int64, max_length=4)}
    storage = LazyMemmapStorage(16, scratch_dir=tmp_path / "grows", ragged=items, ragged_bytes=4096, open_rows=2)
    with ReplayBuffer(storage=storage) as rb:
        rb.extend({"a": torch.tensor([0]), "b": [torch.arange(2)]})
        with engram.serve(rb) as address, ReplayBuffer.connect(address, full="block", own_lanes=True) as remote:
            assert remote.extend({"a": torch.tensor([1]), "b": [torch.arange(1)]}).tolist() == [1]
            growing = remote.open_row({"a": torch.tensor(2)})
            assert remote.extend({"a": torch.tensor([3]), "b": [torch.arange(3)]}).tolist() == [2]
            growing.append({"b": torch.arange(4)})
            assert growing.seal() == 3
            assert remote.extend({"a": torch.tensor([4]), "b": [torch.arange(0)]}).tolist() == [4]
            remote.storage._under_way.settle()
        assert rb["a"].tolist() == [0, 1, 3, 2, 4]


def test_a_client_that_came_before_the_store_knows_them_too(tmp_path):
    with (
        serving(tmp_path / "new", "--capacity", 10) as address,
        ReplayBuffer.connect(address, full="block", own_lanes=True) as remote,
    ):
        assert [remote.add(row(one)) for one in range(15)] == [one % 10 for one in range(15)]
        assert len(remote) == 10
    with ReplayBuffer.open(tmp_path / "new") as rb:
        assert rb["a"].tolist() == [10, 11, 12, 13, 14, 5, 6, 7, 8, 9]


def test_own_lanes_needs_streams(served):
    _, folder = served
    with pytest.raises(ValueError, match="own_lanes: expected full= beside it"):
        ReplayBuffer.connect(f"unix:{folder}.sock", own_lanes=True)
    with pytest.raises(TypeError, match="own_lanes: expected a bool, got int"):
        ReplayBuffer.connect(f"unix:{folder}.sock", full="block", own_lanes=1)
    with ReplayBuffer.connect(f"unix:{folder}.sock", full="block") as remote:
        assert remote.add(row(1), lane=0) is None
        assert remote.extend(rows([1]), lane=0).tolist() == [-1]


CLIENT = """
import json
import torch
from engram import ReplayBuffer
from tests.remote.test_own_lanes import row

remote = ReplayBuffer.connect(addresses, full="block", own_lanes=True).on_lane(lane)
one = 0
while True:
    told = []
    for _ in range(8):
        told.append((one, remote.add(row(one))))
        one += 1
    remote.storage._under_way.settle()
    print(json.dumps(told), flush=True)
"""


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
def test_numbers_hold_where_servers_are_killed(tmp_path):
    folder = tmp_path / "store"
    length = stress.size(1 << 16, 1 << 19)
    with ReplayBuffer(storage=LazyMemmapStorage(2 * length, scratch_dir=folder, lanes=2)) as rb:
        rb.extend(rows([-1, -1]), lane="each")
    chance = stress.chance("own lanes", 0)
    sockets = [f"unix:{tmp_path}/{name}.sock" for name in "ab"]
    servers = [start(folder, at) for at in sockets]
    clients = [fresh.start(CLIENT, addresses=sockets, lane=lane) for lane in range(2)]
    try:
        for _ in range(stress.size(3, 100)):
            said = [len(client.out) for client in clients]

            def all_progressed(said=said):
                for client in clients:
                    assert client.poll() is None, client.err
                return all(client.out[since:].count("\n") >= 2 for client, since in zip(clients, said, strict=True))

            until(all_progressed)
            which = chance.randrange(2)
            servers[which].kill()
            servers[which] = start(folder, sockets[which])
    finally:
        for program in (*clients, *servers):
            program.kill()
    with ReplayBuffer.open(folder) as rb:
        for lane, client in enumerate(clients):
            told = [pair for line in client.out.split("\n")[:-1] for pair in json.loads(line)]
            assert [number for _, number in told] == [lane * length + (1 + k) % length for k in range(len(told))]
            there = rb.storage.get(torch.tensor([number for _, number in told[-length:]]))
            assert there["a"].tolist() == [one for one, _ in told[-length:]]


@pytest.mark.parametrize("by", ["extend", "remove"])
def test_threads_of_one_buffer_are_told_the_numbers_of_their_rows(by):
    rb = ReplayBuffer(storage=LazyTensorStorage(400_000, lanes=4)).share()
    rb.extend({"a": torch.zeros(1, dtype=torch.int64)}, lane=0)
    with serve(rb) as address, ReplayBuffer.connect(address, full="block", own_lanes=True) as remote:
        told, failed, ready, stop = [], [], threading.Event(), threading.Event()

        def add():
            try:
                for value in itertools.count():
                    told.append((remote.add({"a": torch.tensor(value)}, lane=1), value))
                    if value == 50:
                        ready.set()
                    if stop.is_set():
                        return
            except Exception as error:  # noqa: BLE001 - said by the test
                failed.append(error)
            finally:
                ready.set()

        thread = threading.Thread(target=add)
        thread.start()
        assert ready.wait(60)
        for value in range(-20, 0):
            if by == "remove":
                remote.remove(remote.add({"a": torch.tensor(value)}, lane=2))
            rows = remote.extend({"a": torch.tensor([value, value])}, lane=torch.tensor([3, 2]))
            told += [(int(row), value) for row in rows]
        stop.set()
        thread.join(60)
        assert not failed
        remote.storage._under_way.settle()
        last = {int(row): value for row, value in told}
        held = rb[torch.tensor([*last])]["a"].tolist()
        assert held == [*last.values()]


def test_rows_that_a_thread_adds_while_another_one_empties_the_store():
    rb = ReplayBuffer(storage=LazyTensorStorage(400_000)).share()
    rb.extend({"a": torch.zeros(1, dtype=torch.int64)})
    with serve(rb) as address, ReplayBuffer.connect(address, full="block", own_lanes=True) as remote:
        failed, stop = [], threading.Event()

        def add():
            try:
                while not stop.is_set():
                    remote.add({"a": torch.tensor(1)})
            except Exception as error:  # noqa: BLE001 - said by the test
                failed.append(error)

        thread = threading.Thread(target=add)
        thread.start()
        for _ in range(30):
            remote.empty()
        stop.set()
        thread.join(60)
        assert not failed
        remote.storage._under_way.settle()
