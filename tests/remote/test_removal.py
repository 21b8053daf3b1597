"""Rows that are removed over a connection: as where the store is, once, whatever becomes of messages, or refused by name."""

import contextlib
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RowError,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from engram.remote.protocol import MAX_BATCHES, address_of
from engram.serving.server import Server
from engram.serving.service import Service
from tests.buffer.test_remove import REFUSED
from tests.fresh import start
from tests.serving.servers import serving, serving_each
from tests.serving.test_exactly_once import Proxy
from tests.store.processes import leaves

ROWS = 40
SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(ROWS, 1.0, 1.0),
    "slices": lambda: SliceSampler(slice_len=3),
}
#: Serves as an engram did that knew neither the command nor the stream.
OLD = """
import msgspec
from engram.remote import protocol
from engram.serving import service
del protocol.ACTIONS["can_remove"]
served_by = service.served_by
service.served_by = lambda *of: msgspec.structs.replace(served_by(*of), level=0)
from pathlib import Path
from engram.serving.server import listening
from engram.serving.server import run
run(Path(folder), listening(listen, None, None, None, insecure=False), lambda address: print("ready", address, flush=True))
"""


def steps(first, n):
    ids = torch.arange(first, first + n)
    return TensorDict({"id": ids, "next": {"done": (ids % 10 == 9)[:, None]}}, [n])


def made(folder, sampler=RandomSampler, n=ROWS):
    storage = LazyMemmapStorage(ROWS, scratch_dir=folder)
    writer = TensorDictRoundRobinWriter(track_generations=True)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler(), writer=writer, batch_size=12)
    rb.extend(steps(0, n))
    return rb


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def served(tmp_path):
    """A prioritized store that is open here, and the address of its server."""
    with made(tmp_path / "store", SAMPLERS["priority"]) as rb, serving(tmp_path / "store") as server:
        yield rb, server.address


# ---- what is gone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [None, "block"])
def test_rows_are_removed_where_the_store_is(served, full):
    rb, address = served
    rb.update_priority(torch.arange(ROWS), torch.arange(1.0, ROWS + 1))
    with ReplayBuffer.connect(address, full=full) as remote:
        remote.extend(steps(ROWS, 1))
        assert remote.remove(torch.tensor([3, 5, 3, -1])) == 2
        assert remote.remove([0, 3]) == 1  # what was written before has arrived
        assert remote.remove(7) == 1
        assert remote.remove(7) == remote.remove([]) == 0
        assert len(remote) == ROWS - 4
        assert remote.stats()["void_rows"] == rb.stats()["void_rows"] == 4
    assert rb[:]["id"].tolist() == [i for i in range(ROWS) if i not in (0, 3, 5, 7)]
    assert leaves(rb)[[0, 3, 5, 7]].tolist() == [0, 0, 0, 0]
    rb.extend(steps(100, 7))
    assert len(rb) == ROWS - 1


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_draw_finds_a_row_that_was_removed(sampler, prefetch, tmp_path):
    with made(tmp_path / "store", SAMPLERS[sampler]), serving(tmp_path / "store") as server:
        with ReplayBuffer.connect(server.address, prefetch=prefetch, generator=seeded()) as remote:
            remote.sample()
            gone = {4, 15, 30}
            assert remote.remove(sorted(gone)) == 3
            for _ in range(3 * MAX_BATCHES if prefetch else 0):  # those that were made before keep them
                remote.sample()
            seen = {i for _ in range(40) for i in remote.sample()["id"].flatten().tolist()}
        assert not seen & gone
        assert len(seen) > 20


def test_a_draw_of_a_row_that_was_removed_would_be_noticed(tmp_path):
    """The negative control of the test above."""
    with (
        made(tmp_path / "store"),
        serving(tmp_path / "store") as server,
        ReplayBuffer.connect(server.address, generator=seeded()) as remote,
    ):
        assert any(4 in remote.sample()["id"] for _ in range(200))


def test_all_rows_may_go(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        assert remote.remove(torch.arange(ROWS)) == ROWS
        with pytest.raises(NoSampleable):
            remote.sample()
    assert len(rb) == 0


def test_rows_written_since_they_were_drawn_stay(served):
    rb, address = served
    with ReplayBuffer.connect(address, batch_size=60, generator=seeded()) as remote:
        batch = remote.sample()
        rows, generation = batch["index"], batch["index_generation"]
        rb.extend(steps(ROWS, 5))
        old = [row for row in rows.unique().tolist() if row >= 5]
        assert remote.remove(rows, generation=generation) == len(old)
        assert remote.remove(rows, generation=generation) == 0
        assert remote.remove([1], generation=[-1]) == 0
    assert len(rb) == ROWS - len(old)
    assert rb[:5]["id"].tolist() == [40, 41, 42, 43, 44]


def test_rows_of_several_columns_are_named_by_coordinates(tmp_path):
    storage = LazyMemmapStorage(12, scratch_dir=tmp_path / "store", ndim=2)
    with TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(12, 1.0, 1.0), batch_size=6) as rb:
        rb.extend(steps(0, 12).reshape(3, 4))
        with serving(tmp_path / "store") as server, ReplayBuffer.connect(server.address) as remote:
            index = remote.sample()["index"]
            remote.update_priority(torch.cat([index, torch.tensor([[-1, -1]])]), 2.0)
            gone = {tuple(place) for place in index.tolist()}
            assert len(remote.sample()) == 6  # behind them
            assert (leaves(rb) > 1.5).sum() == len(gone)
            assert remote.remove(index) == len(gone)
            with pytest.raises(RowError):
                remote.remove(torch.tensor([[4, 0]]))
        assert len(rb) == 12 - len(gone)


def test_members_of_ensembles_may_be_connected(served, tmp_path):
    rb, address = served
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    other.extend(steps(0, 5))
    named = {"buffer_ids": torch.tensor([0, 1, 1]), "index": torch.tensor([1, 2, 3])}
    with ReplayBuffer.connect(address) as remote:
        assert ReplayBufferEnsemble(remote, other).remove(named) == 3
    with (
        old_server(tmp_path / "old") as old,
        ReplayBuffer.connect(old) as remote,
        pytest.raises(RuntimeError, match="older engram") as raised,
    ):
        ReplayBufferEnsemble(other, remote).remove(
            {"buffer_ids": named["buffer_ids"], "index": torch.tensor([0, 0, 1])}
        )
    assert raised.value.__notes__ == ["Raised by member 1 of the ensemble. Nothing was changed."]
    assert (len(rb), len(other)) == (ROWS - 1, 3)


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED)
def test_bad_arguments_change_nothing(served, arguments, error, text):
    rb, address = served
    rows, generation = (*arguments, None)[:2]
    with ReplayBuffer.connect(address) as remote, pytest.raises(error, match=text):
        remote.remove(rows, generation=generation)
    assert len(rb) == ROWS


def test_more_rows_than_a_message_takes_are_refused(served, monkeypatch):
    rb, address = served
    monkeypatch.setattr("engram.remote.protocol.MAX_MESSAGE", 100)
    with (
        ReplayBuffer.connect(address) as remote,
        pytest.raises(ValueError, match="remove: expected at most 100 bytes.*Remove fewer at once"),
    ):
        remote.remove([0, 1, 2])
    assert len(rb) == ROWS


@contextlib.contextmanager
def old_server(folder, make=made):
    with make(folder):
        program = start(OLD, folder=str(folder), listen=f"unix:{folder}.sock").until("\n")
        try:
            yield program.out.split()[1]
        finally:
            program.kill()


def test_a_server_of_an_older_engram_is_named(tmp_path):
    with old_server(tmp_path / "store") as address, ReplayBuffer.connect(address) as remote:
        with pytest.raises(RuntimeError, match=r"remove: .*, got one of an older engram, .*, at unix:.* or newer"):
            remote.remove([0])
        assert len(remote) == ROWS
        remote.sample()


def test_a_server_of_a_store_that_is_only_read_refuses(tmp_path):
    with made(tmp_path / "store") as rb:
        rb.set_writer(ImmutableDatasetWriter())
        place = f"{tmp_path}/sock"
        server = Server(Service(rb), address_of(f"unix:{place}", "test"))
        try:
            with (
                ReplayBuffer.connect(f"unix:{place}") as remote,
                pytest.raises(RuntimeError, match="remove: the buffer is read-only"),
            ):
                remote.remove(0)
        finally:
            threading.Thread(target=server.shutdown, daemon=True).start()
        assert len(rb) == ROWS


def test_a_server_that_is_gone_is_named(served):
    _, address = served
    with ReplayBuffer.connect(address, patience=0.2) as remote:
        remote.close()
        with pytest.raises(RuntimeError, match="closed"):
            remote.remove([0])
    with pytest.raises(ConnectionError):
        ReplayBuffer.connect("unix:/nowhere/there.sock", patience=0)


# ---- messages that are lost ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    """A store that is open here, and a proxy before its server."""
    folder = tmp_path_factory.mktemp("lost") / "store"
    with made(folder) as rb, serving_each([folder]), Proxy.before(folder) as proxy:
        yield rb, proxy


@pytest.fixture(scope="module")
def remote(behind):
    with ReplayBuffer.connect(behind[1].address) as remote:
        remote.remove([])
        yield remote


def reset(rb):
    rb.empty()
    rb.extend(steps(0, ROWS))


def test_a_row_that_was_written_since_the_answer_was_lost_stays(behind, remote):
    """The message is sent again, and finds another row there."""
    rb, proxy = behind
    reset(rb)
    proxy.faults[:] = ["none", "lose answer", "hold"]  # the tickets, the removal, and the same again
    proxy.held.clear()
    proxy.go.clear()
    found = []
    thread = threading.Thread(target=lambda: found.append(remote.remove([0, 1, 30])))
    thread.start()
    assert proxy.held.wait(60)
    assert len(rb) == ROWS - 3
    rb.extend(steps(100, 1))  # row 0
    proxy.go.set()
    thread.join(60)
    assert found == [2]
    assert rb[0]["id"] == 100
    assert len(rb) == ROWS - 2


def test_a_message_that_comes_late_removes_nothing_that_was_written_since(behind, remote):
    rb, proxy = behind
    reset(rb)
    proxy.faults[:] = ["none", "keep back"]
    assert remote.remove([0, 1]) == 2
    rb.extend(steps(100, 2))
    proxy.let_go(b"edit")
    assert rb[:]["id"][:2].tolist() == [100, 101]


def test_a_late_message_would_be_noticed_if_tickets_did_not_count(tmp_path, monkeypatch):
    """The negative control: a server that removes whatever the rows hold."""
    remove = lambda service, rows, tickets: service._wiring.storage.remove(rows.contiguous(), None)  # noqa: E731
    monkeypatch.setattr(Service, "remove", remove)
    folder = tmp_path / "store"
    with made(folder) as rb:
        server = Server(Service(rb), address_of(f"unix:{folder}.sock", "test"))
        with Proxy.before(folder) as proxy, ReplayBuffer.connect(proxy.address) as remote:
            proxy.faults[:] = ["none", "keep back"]
            assert remote.remove([0, 1]) == 2
            rb.extend(steps(100, 2))
            proxy.let_go(b"edit")
            assert rb[:]["id"][0] == 2
        threading.Thread(target=server.shutdown, daemon=True).start()


FAULTS = st.sampled_from(["none", "lose message", "lose answer", "repeat", "keep back"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.lists(st.integers(0, ROWS - 1), max_size=6), st.lists(FAULTS, max_size=4)), max_size=5))
def test_rows_go_once_whatever_becomes_of_messages(behind, remote, calls):
    rb, proxy = behind
    reset(rb)
    live = dict(enumerate(range(ROWS)))
    for at, (rows, faults) in enumerate(calls):
        gone = set(rows) & set(live)
        proxy.faults[:] = faults
        assert remote.remove(rows) == len(gone)
        proxy.faults.clear()
        for row in gone:
            del live[row]
        rb.extend(steps(1000 * at + 100, 4))
        live |= {(4 * at + i) % ROWS: 1000 * at + 100 + i for i in range(4)}
        if proxy.kept:
            with contextlib.suppress(Exception):  # those that only ask
                proxy.let_go(b"edit")
        assert rb[:]["id"].tolist() == [live[row] for row in sorted(live)]
