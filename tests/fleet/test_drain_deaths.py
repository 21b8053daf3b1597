"""What a drain leaves where requests are repeated, rows change on their way, and processes die."""

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from uuid import NAMESPACE_OID, uuid4, uuid5

import pytest
import torch

from engram import LazyMemmapStorage, Ragged, RandomSampler, ReplayBuffer, SamplerWithoutReplacement, WritePlan
from engram.buffer.connecting import Way
from engram.format import layout
from engram.remote.connection import Connection
from engram.remote.protocol import Drain, address_of
from engram.remote.storage import RemoteStorage
from engram.serving import draining
from engram.serving.draining import Listening
from engram.serving.service import Service
from engram.store.requests import Requests
from tests import fresh, stress
from tests.fleet.test_drain import (  # noqa: F401 - a fixture of all tests
    _soon,
    by_priority,
    connected,
    drain,
    dying,
    expected_of_two,
    lingering,
    stored,
    stored_live,
)
from tests.fleet.test_fleets import made, rows_of
from tests.serving.servers import Served, serving
from tests.serving.test_kills import is_whole, row_of
from tests.waiting import Limit, until


def stored_ids(folder):
    """What the live rows of a store say they are, also twice."""
    with ReplayBuffer.open(folder, unclean="accept") as rb:
        live = rb.storage.extent().in_order(torch.arange(rb.lanes))
        return rb[live[rb.storage.tickets_of(live) >= 0]]["a"].tolist()


def asked(server, *given, **how):
    """One command of a drain."""
    connection = Connection(Way(patience=0.0).access(str(server.address), "test"))
    try:
        return connection.ask("drain", Drain(*given, **how), int)
    finally:
        connection.close()


def drained_again(folder, target):
    """Start a server again, and drain its store to the end."""
    with serving(folder) as server:
        result = drain(server.address, target.address)
        assert result.exit_code == 0, result.output
        assert server.program.wait() == 0


@contextlib.contextmanager
def died(two, tmp_path, method="_keep", call=0, when="after"):
    """The second store, whose server died in the midst of its drain: as soon as a block is noted, or later."""
    two[1].kill()
    first = dying(tmp_path / "1", method, call, when)
    assert drain(first.address, two[0].address).exit_code == 1
    assert first.program.wait() == -9
    with ReplayBuffer.open(tmp_path / "1", unclean="accept") as rb:
        yield rb


#: The first block is noted; the other store has it; it is noted that it has; half of the rows are gone from here.
MOMENTS = [("_keep", 0, "after"), ("taken", 0, "after"), ("_keep", 1, "after"), ("_remove", 0, "half")]
#: Until it is noted that the other store has the block, rows may change here, and that holds.
EARLY = MOMENTS[:2]


@pytest.mark.parametrize("moment", MOMENTS)
def test_rows_whose_tickets_are_in_no_order_are_all_there_once(two, tmp_path, moment):
    two[1].stop()
    with ReplayBuffer.open(tmp_path / "1") as rb:
        row, columns = torch.tensor([3]), rb.storage.read(torch.tensor([3]))[0]
        rb.remove(row)
        rb.storage.write(WritePlan(rows=row), columns, 1)  # a newer write, before older ones
        rb.update_priority(row, 2.0)
    with died(two, tmp_path, *moment):
        pass
    drained_again(tmp_path / "1", two[0])
    two[0].stop()
    assert stored(tmp_path / "0") == expected_of_two()
    assert stored(tmp_path / "1") == {}


@pytest.mark.parametrize("moment", EARLY)
def test_rows_that_are_removed_or_edited_before_the_drain_goes_on_stay_so(two, tmp_path, moment):
    with died(two, tmp_path, *moment) as rb:
        rb.remove(torch.tensor([0, 5]))
        rb[6] = rows_of(1, 500)[0]
    drained_again(tmp_path / "1", two[0])
    two[0].stop()
    expected = expected_of_two()
    for gone in (100, 105, 106):
        del expected[gone]
    assert stored(tmp_path / "0") == expected | {500: 2.0}
    assert stored(tmp_path / "1") == {}


def test_rows_that_clients_of_the_other_store_remove_or_edit_stay_so(two, tmp_path):
    with died(two, tmp_path, "taken") as rb:
        assert len(rb) == 20
    with ReplayBuffer.connect(two[0].address) as rb:
        rows = torch.arange(40, 48)  # the block is there
        assert rb.remove(rows[:2]) == 2
    with ReplayBuffer.open(tmp_path / "0") as rb:
        rb[42] = rows_of(1, 500)[0]
    drained_again(tmp_path / "1", two[0])
    two[0].stop()
    expected = expected_of_two()
    for gone in (100, 101, 102):
        del expected[gone]
    assert stored(tmp_path / "0") == expected | {500: 2.0}


def test_a_server_that_starts_again_removes_what_has_arrived_before_clients_come(two, tmp_path):
    with died(two, tmp_path, "_remove", 0, "half") as rb:
        assert len(rb) == 16
    with serving(tmp_path / "1") as server, ReplayBuffer.connect(server.address) as rb:
        assert len(rb) == 12


def test_a_store_that_has_forgotten_a_block_is_an_error_and_no_double(two, tmp_path):
    two[0].stop()
    with ReplayBuffer.open(tmp_path / "0") as rb:  # a table of two writers
        Requests(rb.storage.store, writers=2).next_request(uuid4())
    with serving(tmp_path / "0") as target:
        with died([target, two[1]], tmp_path, "taken"):
            pass
        with ReplayBuffer.open(tmp_path / "0") as rb:
            requests, columns = Requests(rb.storage.store), rb.storage.read(torch.tensor([0]))[0]
            for _ in range(2):
                requests.append_by(uuid4(), 1, 0, columns, 1)
        with serving(tmp_path / "1") as server:
            result = drain(server.address, target.address)
            assert (result.exit_code, "one that it has forgotten: whether its last rows came" in result.output) == (
                1,
                True,
            ), result.output
            with ReplayBuffer.connect(server.address) as rb:
                assert len(rb) == 20
        with ReplayBuffer.open(tmp_path / "0") as rb:
            assert rb.remove(torch.arange(40, 48)) == 8
        (tmp_path / "1" / layout.FOLDER / "draining").unlink()
        drained_again(tmp_path / "1", target)
    found = stored_ids(tmp_path / "0")
    assert {*range(100, 120)} <= {*found}
    assert len(found) == 40 + 20 + 2


def test_one_writer_of_the_other_store_moves_any_number_of_blocks(two, tmp_path):
    two[1].kill()
    source = dying(tmp_path / "1", "take", -1, "before")
    with ReplayBuffer.connect(source.address) as rb:
        store = rb.storage.served.store
    assert drain(source.address, two[0].address).exit_code == 0
    with ReplayBuffer.open(tmp_path / "0") as rb:
        name = uuid5(NAMESPACE_OID, f"engram drain {store} 0")
        assert Requests(rb.storage.store).next_request(name) == 2 + 2 * 3  # three blocks


def test_new_rows_in_the_places_of_moved_ones_keep_their_own_priorities(two, tmp_path):
    two[1].kill()
    made(tmp_path / "3", rows_of(20, 100), by_priority(), 20).close()  # its ring is full
    first = dying(tmp_path / "3", "taken", 0, "after")
    assert drain(first.address, two[0].address).exit_code == 1
    with ReplayBuffer.open(tmp_path / "3", unclean="accept") as rb:
        rb.extend(rows_of(5, 300))
        rb.update_priority(torch.arange(5), 9.0)
    drained_again(tmp_path / "3", two[0])
    two[0].stop()
    found = stored(tmp_path / "0")
    assert {a: found[a] for a in range(300, 305)} == dict.fromkeys(range(300, 305), 9.0)
    assert found.keys() == {*range(40), *range(105, 120), *range(300, 305)}
    assert {found[a] for a in range(105, 120)} == {1.0}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_block_that_has_arrived_needs_no_room(two, tmp_path, moment):
    made(tmp_path / "2", rows_of(40), by_priority(), 60).close()
    with serving(tmp_path / "2") as target:
        with died([target, two[1]], tmp_path, *moment):
            pass
        drained_again(tmp_path / "1", target)
    assert stored(tmp_path / "2").keys() == expected_of_two().keys()


def test_a_block_goes_where_there_is_room_for_a_part_of_it(two, tmp_path):
    """Two stores with room for 5 and for 15 rows take 20."""
    for name, n in (("2", 45), ("3", 35)):
        made(tmp_path / name, rows_of(n, 1000 * int(name)), by_priority(), 50).close()
    with serving(tmp_path / "2") as one, serving(tmp_path / "3") as other:
        result = drain(two[1].address, f"{one.address},{other.address}")
        assert result.exit_code == 0, result.output
    found = [stored(tmp_path / name).keys() - {*range(1000, 4000)} for name in "23"]
    assert [*map(len, found)] == [5, 15]
    assert found[0] | found[1] == {*range(100, 120)}


def test_a_server_whose_drain_fails_takes_rows_again(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = []
        for k in range(2):
            made(tmp_path / str(k), rows_of(20, 100 * k), RandomSampler(), 40, lanes=2).close()
            servers.append(stack.enter_context(serving(tmp_path / str(k))))
        with ReplayBuffer.connect(servers[0].address) as rb:
            rb.extend(rows_of(10, 500), lane=torch.zeros(10, dtype=torch.int64))
            rb.remove(torch.arange(20, 30))  # room for all, but not in their lane
        result = drain(servers[1].address, servers[0].address)
        assert (result.exit_code, "no other store takes 10 rows of lane 0" in result.output) == (1, True), result.output
        with ReplayBuffer.connect(servers[1].address) as rb:
            rb.extend(rows_of(2, 900), lane=torch.tensor([0, 1]))
            assert len(rb) == 22
        assert drain(servers[1].address, servers[0].address, "--evict").exit_code == 0


def test_a_store_that_is_drained_itself_is_refused(two, tmp_path, monkeypatch):
    with lingering(monkeypatch, two[1].address, two[0].address):
        result = drain(two[0].address, two[1].address)
        assert (result.exit_code, "one that is drained itself" in result.output) == (1, True), result.output
        with ReplayBuffer.connect(two[0].address) as rb:
            rb.extend(rows_of(1, 900))
            assert len(rb) == 61


def test_two_stores_that_are_drained_into_each_other_both_take_rows_in_the_end(two, tmp_path):
    """Each says that it is drained before it asks whether the other is: one of them is refused at least."""
    with ThreadPoolExecutor(2) as threads:
        each = [threads.submit(drain, two[k].address, two[1 - k].address) for k in range(2)]
        codes = sorted(it.result(60).exit_code for it in each)
    assert codes in ([0, 1], [1, 1])
    for server, it in zip(two, each, strict=True):
        if it.result().exit_code == 1 and codes == [1, 1]:
            with ReplayBuffer.connect(server.address) as rb:
                rb.extend(rows_of(1, 900))
    for server in two:
        server.kill()
    found = [stored(tmp_path / name) for name in "01"]
    assert {a for it in found for a in it} - {900} == expected_of_two().keys()


def test_rows_with_more_items_than_the_other_ring_has_come_in_smaller_blocks(tmp_path):
    for k, nbytes in ((0, 8 * 8 * 8), (1, 1 << 16)):  # the first one has room for 64 items
        ids = torch.arange(20) + 100 * k
        items = {"ragged": {"b": Ragged(torch.int64, max_length=8)}, "ragged_bytes": nbytes}
        storage = LazyMemmapStorage(200, scratch_dir=tmp_path / str(k), **items)
        with ReplayBuffer(storage=storage, batch_size=16) as rb:
            for one in ids.split(2):
                rb.extend(row_of(one, ragged=True))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(tmp_path / str(k))) for k in range(2)]
        result = drain(servers[1].address, servers[0].address, "--evict")
        assert result.exit_code == 0, result.output
    with ReplayBuffer.open(tmp_path / "0", unclean="accept") as rb:
        rows = rb[:]
        assert rows["a"][-1] == 119
        assert rows["a"].tolist() == [*range(120 - len(rows["a"]), 120)]
        assert is_whole(rows, ragged=True)


def test_priorities_follow_rows_to_stores_of_an_earlier_list(two, tmp_path):
    made(tmp_path / "2", rows_of(5, 200), by_priority(), 10_000).close()
    with serving(tmp_path / "2") as third, ReplayBuffer.connect(two[1].address) as rb:
        while asked(two[1], [str(two[0].address)]):
            pass
        assert asked(two[1], [str(third.address)]) == 0
        rb.update_priority(torch.tensor([4]), 7.0)
        until(lambda: stored_live(tmp_path / "0").get(104) == 7.0, what="a priority that follows")


def test_the_end_of_a_trajectory_that_has_moved_is_refused(two, monkeypatch):
    with connected(two, patience=0.2) as rb, connected(two, patience=0.2) as other:
        homes = {int(it.extend(rows_of(3, 1000 + 10 * k))[0] >> 48): it for k, it in enumerate((rb, other))}
        with lingering(monkeypatch, two[1].address, two[0].address):
            with pytest.raises(RuntimeError, match="end_trajectory: .* one that is drained.*begin a new episode"):
                homes[1].end_trajectory(0)
            assert (homes[1].extend(rows_of(3, 3000)) >> 48 == 0).all()  # it was told


def test_samplers_with_epochs_are_refused_before_a_row_moves(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = []
        for k in range(2):
            made(tmp_path / str(k), rows_of(20, 100 * k), SamplerWithoutReplacement()).close()
            servers.append(stack.enter_context(serving(tmp_path / str(k))))
        result = drain(servers[1].address, servers[0].address)
        assert (result.exit_code, "in whose epochs rows that move would come twice" in result.output) == (1, True)
        with connected(servers) as rb:
            assert len(rb) == 40


def test_a_list_of_the_server_alone_still_waits_for_what_is_under_way(two, monkeypatch):
    while asked(two[1], [str(two[0].address)]):
        pass
    with lingering(monkeypatch, two[1].address, two[1].address), ReplayBuffer.connect(two[1].address) as rb:
        rb.update_priority(torch.tensor([4]), 7.0)
        assert rb.stats()["void_rows"] == 20
    assert two[1].program.wait() == 0


def test_a_store_takes_rows_again_where_its_drain_does_not_go_on(two, tmp_path, monkeypatch):
    monkeypatch.setattr(draining, "DRAIN_LEASE_S", 0.0)
    with made(tmp_path / "3", rows_of(20, 100), by_priority(), 20) as rb:
        service = Service(rb)
        at = Listening(address_of(two[0].address, "test"), b"", None, reaching={})
        assert draining.drain(service, Drain([two[0].address]), partial(draining.connected, at)) == 0
        assert not service.is_drained
        assert rb.extend(rows_of(1, 900)).tolist() == [0]
        update = torch.tensor([0]), torch.tensor([9.0], dtype=torch.float64), torch.tensor([-1])
        service.prioritize(*update)  # of the row that is there now
        assert rb.sampler.priorities().leaves_of(torch.tensor([0])).tolist() == [9.0]
        service.draining._fleets[-1].close()
    two[0].stop()
    assert stored(tmp_path / "0")[100] == 1.0


def test_what_is_edited_while_a_block_is_on_its_way_has_its_newest_content(two, tmp_path, monkeypatch):
    two[1].kill()
    with ReplayBuffer.open(tmp_path / "1", unclean="accept") as rb:
        service, taken, once = Service(rb), RemoteStorage.take, iter([5])

        def changed(*given):
            found = taken(*given)
            if found[1][0].numel() and next(once, None):
                rb[5] = rows_of(1, 500)[0]
            return found

        monkeypatch.setattr(RemoteStorage, "take", changed)
        at = Listening(address_of(two[0].address, "test"), b"", None, reaching={})
        while draining.drain(service, Drain([two[0].address]), partial(draining.connected, at)):
            pass
        service.draining._fleets[-1].close()
    two[0].stop()
    expected = expected_of_two() | {500: 2.0}
    del expected[105]
    assert stored(tmp_path / "0") == expected


def test_nothing_changes_between_the_last_look_at_rows_and_their_removal(two, tmp_path, monkeypatch):
    two[1].kill()
    with ReplayBuffer.open(tmp_path / "1", unclean="accept") as rb:
        service, remove, results, threads = Service(rb), draining._remove, [], []  # a thread waits for the pause to end

        def removed(storage, note):
            rows, tickets = torch.tensor([4]), service.tickets(torch.tensor([4]))
            threads.append(threading.Thread(target=lambda: results.append(service.remove(rows, tickets))))
            threads[-1].start()
            remove(storage, note)

        monkeypatch.setattr(draining, "_remove", removed)
        at = Listening(address_of(two[0].address, "test"), b"", None, reaching={})
        assert draining.drain(service, Drain([two[0].address]), partial(draining.connected, at)) == 0
        threads[0].join()
        service.draining._fleets[-1].close()
    two[0].stop()
    assert results == [0]  # the client is told that nothing was removed
    assert stored(tmp_path / "0") == expected_of_two()


#: A server of a drain that kills itself, and changes rows, at moments of its protocol that a number decides.
CHAOS = """
import json, os, random
from pathlib import Path
import msgspec, torch
from engram.remote.storage import RemoteStorage
from engram.serving import draining, server, service
draining.BLOCK_ROWS, draining.TURN_S, draining.SKIP_S = 5, 0.0, 60.0
chance, log, services = random.Random(seed), open(f"{folder}.log", "a", buffering=1), []

def may_die():
    if chance.random() < dies:
        os.kill(os.getpid(), 9)

def change():
    rb = services[0].buffer
    live = rb.storage.extent().in_order(torch.arange(rb.lanes))
    live = live[rb.storage.tickets_of(live) >= 0]
    if not len(live):
        return
    known = {row: a for row, a in zip(live.tolist(), rb[live]["a"].tolist()) if a % 4 == turn and a < 1000}
    if not known:
        return
    row = torch.tensor([chance.choice(sorted(known))])
    a, version = known[int(row)], chance.randrange(1, 1 << 30)
    kind = chance.choice(["remove", "edit", "edit", "prioritize"])
    print(json.dumps(["begin", kind, a, version]), file=log)
    tickets = services[0].tickets(row)
    if kind == "remove":
        assert services[0].remove(row, tickets) == 1
    elif kind == "edit":
        patch = {"v": torch.tensor([version]), "c": torch.tensor([1000003 * a + version])}
        assert rb.update_if_present(index=row, generation=tickets, patch=patch).updated.all()
    else:
        services[0].prioritize(row, torch.tensor([version % 5 + 1.0], dtype=torch.float64), tickets)
    print(json.dumps(["done", kind, a, version]), file=log)

def wrapped(of, name, changes=""):
    done = getattr(of, name)
    def call(*given, **how):
        may_die()
        if "before" in changes and chance.random() < 0.5:
            change()
        if name == "_remove" and chance.random() < dies:
            storage, note = given
            half = len(note.rows) // 16 * 8
            done(storage, msgspec.structs.replace(note, rows=note.rows[:half], tickets=note.tickets[:half]))
            os.kill(os.getpid(), 9)
        result = done(*given, **how)
        if "after" in changes and chance.random() < 0.5:
            change()
        may_die()
        return result
    setattr(of, name, call)

made = service.Service.__init__
def noted(self, rb):
    made(self, rb)
    services.append(self)
service.Service.__init__ = noted
wrapped(draining.Draining, "_keep"), wrapped(draining, "_remove"), wrapped(RemoteStorage, "take", "before after")
wrapped(service.Service, "take", "after"), wrapped(service.Service, "_request")
server.run(Path(folder), server.listening(listen, None, None, None, insecure=False), lambda it: print("ready", it, flush=True))
"""


def chaotic(folder, seed, turn, dies):
    program = fresh.start(CHAOS, folder=str(folder), listen=f"unix:{folder}.sock", seed=seed, turn=turn, dies=dies)
    try:
        return Served(program)
    except AssertionError:  # it died before clients could come, in what it had to finish
        assert program.poll() == -9, program.err
        return chaotic(folder, seed + 1, turn, dies)


def numbered(folder, ids):
    storage = LazyMemmapStorage(200, scratch_dir=folder, lanes=2)
    with ReplayBuffer(storage=storage, sampler=by_priority(), batch_size=4) as rb:
        rb.extend({"a": ids, "v": torch.zeros_like(ids), "c": 1000003 * ids}, lane=ids % 2)


def changes_of(folder):
    """What was done to rows, by what they are: ``[kind, version, whether it is known that it was done]`` each, in order."""
    path, found = folder.with_name(f"{folder.name}.log"), {}
    for done, kind, a, version in map(json.loads, path.read_text().splitlines()):
        if done == "done":
            found[a][-1][2] = True
        else:
            found.setdefault(a, []).append([kind, version, False])
    return found


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize("seed", range(stress.size(4, 200)))
def test_each_row_is_in_one_store_whatever_dies_and_changes(tmp_path, seed):
    """Rows say what they are. Those of ``a % 4 == 0`` are changed at the store that is drained, those of 1 at the other one."""
    chance, kills, folders = stress.chance(f"drain-{seed}"), 0, [tmp_path / "0", tmp_path / "1"]
    numbered(folders[0], torch.arange(1000, 1010)), numbered(folders[1], torch.arange(40))
    servers, limit = [None, None], Limit(120)

    def started():
        nonlocal kills
        for k, server in enumerate(servers):
            if server is None or server.program.poll() is not None:
                kills += server is not None
                turn = 1 - k
                servers[k] = chaotic(folders[k], chance.randrange(1 << 30), turn, 0.04 if kills < 8 else 0.0)

    with ThreadPoolExecutor(1) as threads:
        while True:
            started()
            command = threads.submit(asked, servers[1], [servers[0].address])
            while not command.done():
                limit.check("a drain")
                if servers[0].program.poll() is not None:
                    started()
                time.sleep(0.01)
            error = command.exception()
            assert error is None or isinstance(error, OSError), error
            if error is None and command.result() == 0:
                break
    for server in servers:
        server.kill()
    found = {}
    for folder in folders:
        with ReplayBuffer.open(folder, unclean="accept") as rb:
            live = rb.storage.extent().in_order(torch.arange(2))
            live = live[rb.storage.tickets_of(live) >= 0]
            assert len(live) == 0 or folder is folders[0]
            rows = rb[live] if len(live) else {"a": live, "v": live, "c": live}
            assert torch.equal(rows["c"], 1000003 * rows["a"] + rows["v"]), "a row is torn"
            assert rows["a"].unique().numel() == len(rows["a"]), "a row is there twice"
            found |= dict(zip(rows["a"].tolist(), rows["v"].tolist(), strict=True))
    changes = {**changes_of(folders[0]), **changes_of(folders[1])}
    for a in (*range(40), *range(1000, 1010)):
        removed, versions = {False}, {0}
        for kind, version, known in changes.get(a, []):
            if kind == "remove":
                removed = {True} if known else {True, False}
            elif kind == "edit":
                versions = {version} if known else versions | {version}
        assert (a not in found) in removed, (a, changes.get(a))
        assert a not in found or found[a] in versions, (a, found[a], changes.get(a))
