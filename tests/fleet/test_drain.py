"""Stores whose rows are moved to the others of their fleet, while clients go on: ``engram drain``."""

import concurrent.futures
import contextlib
import itertools
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from engram import (
    FrameStack,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    MinSize,
    PrioritizedSampler,
    Ragged,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)
from engram.cli import main
from engram.remote.member_list import MemberList
from engram.remote.protocol import Drain, address_of
from engram.remote.storage import RemoteStorage
from engram.serving import draining
from engram.serving.draining import Listening
from engram.serving.service import Service
from engram.storages import TensorStorage
from tests import fresh
from tests.fleet.test_fleets import made, rows_of, seeded
from tests.fleet.test_listed import write
from tests.serving.servers import Served, serving, token_file
from tests.serving.test_doors import certificate
from tests.serving.test_kills import is_whole, row_of
from tests.statistics_of import assert_proportional
from tests.waiting import until


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)
    monkeypatch.setattr("engram.remote.member_list.MemberList.interval_s", 0.02)
    monkeypatch.setattr(draining, "FORWARD_S", 0.0)
    monkeypatch.setattr(draining, "INTERVAL_S", 0.01)


def drain(address, to, *options):
    """The command, in this process."""
    return CliRunner().invoke(main, ["drain", str(address), "--to", str(to), *options])


def stored(folder):
    """What the live rows of a store say they are, and their priorities, by what they are."""
    with ReplayBuffer.open(folder, unclean="accept") as rb:
        rows, ids = torch.arange(len(rb["a"])), rb["a"].tolist()
        assert torch.equal(rb["b"], torch.ones(len(ids), 2)), "a row is torn"
        live = rb.storage.extent().in_order(torch.arange(rb.lanes))
        ids = rb[live]["a"].tolist() if len(live) else []
        del rows
        if not isinstance(rb.sampler, PrioritizedSampler):
            return dict.fromkeys(ids, 1.0) if len(set(ids)) == len(ids) else pytest.fail("a row is there twice")
        found = dict(zip(ids, rb.sampler.priorities().leaves_of(live).tolist(), strict=True))
        assert len(found) == len(ids), "a row is there twice"
        return found


def by_priority():
    return PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)


def test_rows_and_priorities_are_in_the_other_stores(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = []
        for k in range(3):
            with made(tmp_path / str(k), rows_of(30, 100 * k), by_priority()) as rb:
                rb.update_priority(torch.arange(30), torch.arange(1.0, 31.0) * (k + 1))
            servers.append(stack.enter_context(serving(tmp_path / str(k))))
        path = tmp_path / "members"
        write(path, [it.address for it in servers])
        result = drain(servers[1].address, f"file:{path}")
        assert result.exit_code == 0, result.output
        assert servers[1].program.wait() == 0
        assert servers[1].address not in path.read_text()
        assert servers[2].address in path.read_text()
        assert path.read_text().startswith("# the stores of this run\n")
    assert stored(tmp_path / "1") == {}
    found = [stored(tmp_path / name) for name in "02"]
    assert not found[0].keys() & found[1].keys()
    expected = {100 * k + i: (i + 1.0) * (k + 1) for k in range(3) for i in range(30)}
    assert found[0] | found[1] == pytest.approx(expected)


def connected(servers, **more):
    return ReplayBuffer.connect([it.address for it in servers], generator=seeded(), batch_size=64, **more)


@contextlib.contextmanager
def lingering(monkeypatch, address, to):
    """A drain of which the rows have left, and whose server still answers. Then it goes on to its end, which must be a good one."""
    results = []
    monkeypatch.setattr(draining, "FORWARD_S", 1e9)
    thread = threading.Thread(target=lambda: results.append(drain(address, to)))
    thread.start()
    try:
        with ReplayBuffer.connect(address) as own:
            until(lambda: len(own) == 0)
        yield
    finally:
        monkeypatch.setattr(draining, "FORWARD_S", 0.0)
        thread.join(60)
    assert results[0].exit_code == 0, results[0].output


def test_new_priorities_follow_their_rows_and_are_dropped_later(two, tmp_path, monkeypatch):
    with connected(two, patience=0.2) as rb:
        batch = rb.sample()
        while not (theirs := batch["index"] >> 48 == 1).any():
            batch = rb.sample()
        with lingering(monkeypatch, two[1].address, two[0].address):
            rb.update_priority(batch["index"], 7.0, generation=batch.get("index_generation"))
            expected = {int(a): 7.0 for a in batch["a"]}
            until(lambda: len(rb) == 60)
            until(lambda: all(stored_live(tmp_path / "0")[a] == 7.0 for a in expected), what="priorities that follow")
        assert two[1].program.wait() == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rb.update_priority(batch["index"], 9.0)
            until(lambda: rb.stats()["shards_missing"] == 1)
            rb.update_priority(batch["index"][theirs], 9.0)
            assert rb.stats()["priority_updates_dropped"] >= int(theirs.sum())
    found = stored(tmp_path / "0")
    assert all(found[int(a)] == 7.0 for a in batch["a"][theirs])


def test_a_writer_goes_on_in_another_store(two, tmp_path, monkeypatch):
    with connected(two, patience=0.2) as rb, connected(two, patience=0.2) as other:
        homes = {int(it.extend(ended(3, 1000 + 10 * k))[0] >> 48): it for k, it in enumerate((rb, other))}
        assert homes.keys() == {0, 1}
        leaving, staying = homes[1], homes[0]
        with lingering(monkeypatch, two[1].address, two[0].address), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (leaving.extend(ended(4, 2000)) >> 48 == 0).all()  # no trajectory goes on: nobody is told
            assert (staying.extend(ended(4, 3000)) >> 48 == 0).all()
    assert stored(tmp_path / "0").keys() >= {
        *range(1000, 1003),
        *range(1010, 1013),
        *range(2000, 2004),
        *range(3000, 3004),
    }


def test_a_writer_in_the_midst_of_a_trajectory_is_told_once(two, tmp_path, monkeypatch):
    with connected(two, patience=0.2) as rb, connected(two, patience=0.2) as other:
        homes = {int(it.extend(rows_of(3, 1000 + 10 * k))[0] >> 48): it for k, it in enumerate((rb, other))}
        with lingering(monkeypatch, two[1].address, two[0].address):
            with pytest.raises(ConnectionError, match="Nothing was written. Begin a new episode"):
                homes[1].extend(rows_of(3, 2000))
            assert (homes[1].extend(rows_of(3, 3000)) >> 48 == 0).all()
    found = stored(tmp_path / "0").keys()
    assert found >= {*range(3000, 3003)}
    assert not found & {*range(2000, 2003)}


def ended(n, first):
    """Rows of which the last one ends a trajectory."""
    rows = rows_of(n, first)
    rows["next", "done"][-1] = True
    return rows


#: A server that kills itself at a call of a method: before it, behind it, or with half of the rows that it was to remove.
DYING = """
import os
import msgspec
from pathlib import Path
from engram.remote.storage import RemoteStorage
from engram.serving import draining, server, service
draining.BLOCK_ROWS, draining.SKIP_S = 8, 60.0  # it waits for a store that starts again on a busy machine
of = {"_keep": draining.Draining, "_remove": draining, "take": service.Service, "taken": RemoteStorage}[method]
method = method.replace("taken", "take")
done, calls = getattr(of, method), iter(range(1_000_000))
def dying(self, *given):
    dies = (method != "take" or given[0].number) and next(calls) == call  # others ask for a number only
    if dies and when == "half":
        (note,) = given
        half = len(note.rows) // 16 * 8
        done(self, msgspec.structs.replace(note, rows=note.rows[:half], tickets=note.tickets[:half]))
    if dies and when != "after":
        os.kill(os.getpid(), 9)
    result = done(self, *given)
    if dies:
        os.kill(os.getpid(), 9)
    return result
setattr(of, method, dying)
server.run(Path(folder), server.listening(listen, None, None, None, insecure=False), lambda it: print("ready", it, flush=True))
"""


def dying(folder, method, call, when):
    program = fresh.start(DYING, folder=str(folder), listen=f"unix:{folder}.sock", method=method, call=call, when=when)
    return Served(program)


#: Each block is noted as on its way, as arrived, and as gone; in between its rows are removed.
MOMENTS = [
    *itertools.product(["_keep"], range(6), ["before", "after"]),
    *itertools.product(["_remove"], range(2), ["before", "half", "after"]),
]


@pytest.mark.parametrize(("method", "call", "when"), MOMENTS)
def test_no_row_is_lost_or_doubled_where_the_server_is_killed(two, tmp_path, method, call, when):
    two[1].kill()
    first = dying(tmp_path / "1", method, call, when)
    assert drain(first.address, two[0].address).exit_code == 1
    assert first.program.wait() == -9
    with serving(tmp_path / "1") as second:
        result = drain(second.address, two[0].address)
        assert result.exit_code == 0, result.output
        assert second.program.wait() == 0
    two[0].stop()
    assert stored(tmp_path / "0") == expected_of_two()
    assert stored(tmp_path / "1") == {}


@pytest.mark.parametrize(("call", "when"), [*itertools.product(range(2), ["before", "after"])])
def test_a_target_that_is_killed_has_each_row_once(two, tmp_path, call, when):
    two[0].kill(), two[1].kill()
    source = dying(tmp_path / "1", "take", -1, "before")  # it does not die, and moves few rows at a time
    target = dying(tmp_path / "0", "take", call, when)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        result = threads.submit(drain, source.address, target.address)
        assert target.program.wait() == -9
        with serving(tmp_path / "0") as again:
            assert result.result(60).exit_code == 0, result.result().output
            again.stop()
    assert stored(tmp_path / "0") == expected_of_two()


def test_a_store_that_is_gone_takes_none_and_others_do(tmp_path, two):
    with made(tmp_path / "2", rows_of(5, 200), by_priority(), 10_000) as rb:
        rb.update_priority(torch.arange(5), 1.0)
    with serving(tmp_path / "2") as third:
        two[0].kill()
        result = drain(two[1].address, f"{two[0].address},{third.address}")
        assert result.exit_code == 0, result.output
    assert stored(tmp_path / "2") == dict.fromkeys(range(200, 205), 1.0) | dict.fromkeys(range(100, 120), 2.0)


def test_draws_are_exact_while_rows_move(tmp_path, two):
    two[1].kill()
    source = dying(tmp_path / "1", "take", -1, "before")
    drawn, lefts = [], []
    with connected([two[0], source]) as rb:
        for left in draining.drained(source.address, two[0].address, evict=False):
            lefts.append(left)
            drawn += rb.sample()["a"].tolist()
            drawn += rb.sample()["a"].tolist()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is gone, with 0 rows")
            drawn += itertools.chain.from_iterable(rb.sample()["a"].tolist() for _ in range(100))
            assert (rb.sample()["index"] >> 48 == 0).all()
    assert source.program.wait() == 0
    counts = np.bincount(drawn, minlength=120)
    assert_proportional(counts, [1.0] * 40 + [0.0] * 60 + [2.0] * 20)


def expected_of_two():
    return dict.fromkeys(range(40), 1.0) | dict.fromkeys(range(100, 120), 2.0)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"capacity": 30}, "room for the rows, got 10 rows. Evict"),
        ({"lanes": 2}, "the same fields and lanes"),
        ({"sampler": RandomSampler()}, "the same sampler"),
    ],
)
def test_stores_that_cannot_take_the_rows_are_refused_before_one_moves(two, tmp_path, theirs, why):
    given = {"sampler": by_priority(), "capacity": 10_000, **theirs}
    made(tmp_path / "2", rows_of(20, 200), given.pop("sampler"), given.pop("capacity"), **given).close()
    with serving(tmp_path / "2") as other:
        result = drain(two[0].address, other.address)
        assert (result.exit_code, why in result.output) == (1, True), result.output
        with ReplayBuffer.connect(two[0].address) as rb:
            rb.extend(rows_of(1, 500))  # the server goes on as before
            assert len(rb) == 41


def test_rows_of_the_others_are_replaced_if_that_is_asked_for(two, tmp_path):
    with made(tmp_path / "2", rows_of(20, 200), by_priority(), 30) as rb:
        rb.update_priority(torch.arange(20), 3.0)
    with serving(tmp_path / "2") as other:
        result = drain(two[1].address, other.address, "--evict")
        assert result.exit_code == 0, result.output
    assert stored(tmp_path / "2") == dict.fromkeys(range(210, 220), 3.0) | dict.fromkeys(range(100, 120), 2.0)


def test_a_drain_uses_the_token_and_the_certificate_of_its_server(tmp_path):
    pem, key = certificate(tmp_path, "both")
    token = token_file(tmp_path)
    with contextlib.ExitStack() as stack:
        servers = []
        for k in range(2):
            made(tmp_path / str(k), rows_of(20, 100 * k), RandomSampler()).close()
            servers.append(stack.enter_context(serving(tmp_path / str(k), "127.0.0.1:0", token, pem, key)))
        how = ["--token", str(token), "--tls-root", str(pem)]
        assert drain(servers[1].address, servers[0].address, *how[2:]).exit_code == 1
        result = drain(servers[1].address, servers[0].address, *how)
        assert result.exit_code == 0, result.output
        assert servers[1].program.wait() == 0
    assert stored(tmp_path / "0").keys() == {*range(20), *range(100, 120)}


def test_a_list_keeps_what_else_it_says(tmp_path):
    path = tmp_path / "members"
    path.write_text("# ours\ngrpc+tls://one:1 # first\n\ntwo:2  # second\n  three:3\n")
    path.chmod(0o644)
    gone = address_of("grpc+tls://one:1", "test")
    MemberList(f"file:{path}").remove([gone])
    assert path.read_text() == "# ours\n\ngrpc+tls://two:2  # second\n  grpc+tls://three:3\n"
    assert path.stat().st_mode & 0o777 == 0o644


def test_without_other_stores_nothing_happens(two, tmp_path):
    path = tmp_path / "members"
    write(path, [two[1].address])
    for command in (lambda: drain(two[1].address, f"file:{path}"), lambda: drain(two[1].address, two[1].address)):
        result = command()
        assert (result.exit_code, "expected servers of other stores" in result.output) == (1, True), result.output
    with ReplayBuffer.connect(two[1].address) as rb:
        rb.empty()
        with pytest.raises(ValueError, match="expected servers of other stores"):  # an empty store is no reason to end
            rb.storage.connection.ask("drain", Drain(), int)
        rb.extend(rows_of(1, 500))
        assert len(rb) == 1


def test_rows_with_items_are_moved_whole(tmp_path):
    for k in range(2):
        ids = torch.arange(20) + 100 * k
        items = {"ragged": {"b": Ragged(torch.int64, max_length=8)}, "ragged_bytes": 1 << 16}
        storage = LazyMemmapStorage(200, scratch_dir=tmp_path / str(k), **items)
        with ReplayBuffer(storage=storage, batch_size=16) as rb:
            rb.extend(row_of(ids, ragged=True))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(tmp_path / str(k))) for k in range(2)]
        refused = drain(servers[1].address, servers[0].address)
        assert (refused.exit_code, "room for the rows" in refused.output) == (1, True), refused.output
        result = drain(servers[1].address, servers[0].address, "--evict")
        assert result.exit_code == 0, result.output
    with ReplayBuffer.open(tmp_path / "0", unclean="accept") as rb:
        rows = rb[:]
        assert rows["a"].tolist() == [*range(20), *range(100, 120)]
        assert is_whole(rows, ragged=True)


@pytest.mark.parametrize("name", ["traj_ids", "number", "stack"])
def test_windows_are_of_one_trajectory_or_refused(tmp_path, name):
    for k in range(2):
        steps = torch.arange(60)
        storage = LazyMemmapStorage(400, scratch_dir=tmp_path / str(k))
        sampler = SliceSampler(traj_key=name, slice_len=4)
        if name == "stack":  # of rows before a row
            sampler = FrameStack(RandomSampler(), 4, None, ["step"], traj_key=name)
        with ReplayBuffer(storage=storage, sampler=sampler, batch_size=640) as rb:
            rb.extend({"step": steps, name: steps // 12 + 10 * k})
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(tmp_path / str(k))) for k in range(2)]
        result = drain(servers[1].address, servers[0].address)
        assert result.exit_code == (name != "traj_ids"), result.output
        if name != "traj_ids":
            assert "ids of trajectories" in result.output
            return
        with ReplayBuffer.connect(servers[0].address) as rb:
            batch = rb.sample()
    windows, ids = batch["step"].view(-1, 4), batch[name].view(-1, 4)
    assert (windows.diff(dim=1) == 1).all()
    assert (ids == ids[:, :1]).all()
    assert (ids >= 10).any()


def test_what_changes_while_a_block_is_on_its_way_holds_in_the_end(two, tmp_path, monkeypatch):
    two[1].kill()
    with ReplayBuffer.open(tmp_path / "1", unclean="accept") as rb:
        service, taken = Service(rb), RemoteStorage.take

        def changed(*given):
            found = taken(*given)  # the other store has the rows, and they are here
            service.prioritize(torch.tensor([3]), torch.tensor([9.0], dtype=torch.float64), torch.tensor([-1]))
            service.remove(torch.tensor([4]), service.tickets(torch.tensor([4])))
            return found

        monkeypatch.setattr(RemoteStorage, "take", changed)
        at = Listening(address_of(two[0].address, "test"), b"", None, reaching={})
        assert draining.drain(service, Drain([two[0].address]), partial(draining.connected, at)) == 0
        service.prioritize(torch.tensor([5]), torch.tensor([8.0], dtype=torch.float64), torch.tensor([-1]))
        until(lambda: stored_live(tmp_path / "0").get(105) == 8.0)
        service.draining._fleets[-1].close()
    two[0].stop()
    expected = expected_of_two() | {103: 9.0, 105: 8.0}
    del expected[104]
    assert stored(tmp_path / "0") == expected


def test_limits_are_refused(two):
    with connected(two) as rb:
        rb.limit(MinSize(5))
    result = drain(two[1].address, two[0].address)
    assert (result.exit_code, "no limits" in result.output) == (1, True), result.output


def test_lanes_stay_and_rows_in_order(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = []
        for k in range(3):
            made(tmp_path / str(k), rows_of(30, 100 * k), RandomSampler(), 300, lanes=3).close()
            servers.append(stack.enter_context(serving(tmp_path / str(k))))
        result = drain(servers[1].address, ",".join(it.address for it in servers))
        assert result.exit_code == 0, result.output
    found = {}
    for name in "02":
        with ReplayBuffer.open(tmp_path / name, unclean="accept") as rb:
            for lane in range(3):
                rows = rb.storage.extent().in_order(torch.tensor([lane]))
                found[name, lane] = rb[rows]["a"][10:].tolist()
    each = [found["0", lane] + found["2", lane] for lane in range(3)]
    assert each == [[*range(100 + lane, 130, 3)] for lane in range(3)]


def test_clients_go_on_while_a_store_is_drained(tmp_path, two, monkeypatch):
    """Two writers, and a learner that gives each row it draws one priority, until all rows have left."""
    path, done, kept, seen = tmp_path / "members", threading.Event(), [], set()
    write(path, [it.address for it in two])
    how = {"generator": seeded(), "batch_size": 32, "patience": 5.0}

    def written(first):
        with ReplayBuffer.connect(f"file:{path}", **how) as rb:
            for k in range(first, first + 2000, 4):
                rb.extend(ended(4, k))
                kept.extend(range(k, k + 4))
                if done.is_set():
                    return

    def learnt():
        with ReplayBuffer.connect(f"file:{path}", **how) as rb:
            while not done.is_set():
                batch = rb.sample()
                assert (batch["b"] == 1).all()
                rb.update_priority(batch["index"], (batch["a"] % 5 + 1).double())
                seen.update(batch["a"].tolist())
            assert rb.stats()["priority_updates_dropped"] == 0

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        clients = [threads.submit(written, 1000), threads.submit(written, 5000), threads.submit(learnt)]
        until(lambda: len(kept) > 100 and len(seen) > 20)
        try:
            with lingering(monkeypatch, two[1].address, f"file:{path}"):
                before = len(kept)
                until(lambda: len(kept) > before + 40 or all(it.done() for it in clients))
                done.set()
                [it.result(60) for it in clients]
        finally:
            done.set()
    assert two[1].program.wait() == 0
    two[0].stop()
    found = stored(tmp_path / "0")
    assert found.keys() == {*range(40), *range(100, 120), *kept}
    assert all(found[a] == a % 5 + 1 for a in seen)


def stored_live(folder):
    """As :func:`stored`, beside a server."""
    with ReplayBuffer.open(folder) as rb:
        live = rb.storage.extent().in_order(torch.arange(rb.lanes))
        return dict(zip(rb[live]["a"].tolist(), rb.sampler.priorities().leaves_of(live).tolist(), strict=True))


@pytest.mark.parametrize("k", [0, 1])
def test_a_writer_that_is_read_only_is_refused_before_a_row_moves(two, tmp_path, k):
    two[k].stop()
    with ReplayBuffer.open(tmp_path / str(k)) as rb:
        rb.set_writer(ImmutableDatasetWriter())
    with serving(tmp_path / str(k)) as server:
        servers = [server if it is two[k] else it for it in two]
        result = drain(servers[1].address, servers[0].address)
        assert (result.exit_code, "not read-only. Nothing is moved" in result.output) == (1, True), result.output
        with connected(servers) as rb:
            assert len(rb) == 60


def test_rows_that_change_while_they_are_read_are_read_again(two, tmp_path, monkeypatch):
    two[1].kill()
    with ReplayBuffer.open(tmp_path / "1", unclean="accept") as rb:
        service, read, removed = Service(rb), TensorStorage.read, iter([[4]])

        def changed(self, rows, tickets=None):
            if gone := next(removed, None):
                service.remove(torch.tensor(gone), service.tickets(torch.tensor(gone)))
            return read(self, rows, tickets)

        monkeypatch.setattr(TensorStorage, "read", changed)
        at = Listening(address_of(two[0].address, "test"), b"", None, reaching={})
        assert draining.drain(service, Drain([two[0].address]), partial(draining.connected, at)) == 0
        service.draining._fleets[-1].close()
    two[0].stop()
    expected = expected_of_two()
    del expected[104]
    assert stored(tmp_path / "0") == expected
