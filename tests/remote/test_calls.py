"""Rows by key, updates and rows that grow over a connection: as where the store is, once, whatever becomes of messages and servers."""

import contextlib
import threading

import msgspec
import numpy as np
import pytest
import torch
from pyarrow import flight

from engram import LazyMemmapStorage, Ragged, RateLimited, ReplayBuffer, RoundRobinWriter, SamplesPerInsert
from engram.remote.protocol import address_of
from engram.serving import calls
from engram.serving.server import Server
from engram.serving.service import Service
from tests import fresh
from tests.serving.servers import serving, serving_each, start
from tests.serving.test_exactly_once import Proxy

ROWS = 20
FIELDS = {
    "tokens": Ragged(torch.int32, max_length=30),
    "log_prob": Ragged(torch.float32, like="tokens"),
    "prompt": Ragged("utf-8", max_length=50),
}


def rows(first, n):
    numbers = range(first, first + n)
    return {
        "uid": torch.tensor([*numbers]),
        "reward": torch.zeros(n),
        "tokens": [torch.full((i % 7 + 1,), i, dtype=torch.int32) for i in numbers],
        "log_prob": None,
        "prompt": [f"prompt {i}" for i in numbers],
    }


def made(folder, first=0, slots=4):
    storage = LazyMemmapStorage(100, scratch_dir=folder, ragged=FIELDS, ragged_bytes=1e5, open_rows=slots)
    rb = ReplayBuffer(storage=storage, batch_size=4, writer=RoundRobinWriter(track_generations=True))
    rb.extend(rows(first, ROWS))
    return rb


@contextlib.contextmanager
def served_here(rb, folder):
    """A server in this process, and its address."""
    server = Server(Service(rb), address_of(f"unix:{folder}.sock", "test"))
    try:
        yield f"unix:{folder}.sock"
    finally:
        threading.Thread(target=server.shutdown, daemon=True).start()  # it waits for streams


@pytest.fixture
def served(tmp_path):
    """A store that is open here, and the address of its server."""
    with made(tmp_path / "store") as rb, served_here(rb, tmp_path / "store") as address:
        yield rb, address


class Interrupted(Proxy):
    """Hands calls on, and does to the next ones what ``faults`` says; ``killed`` ends the server, and starts another one."""

    killed = None
    #: What others do between a message that was lost and the one that is sent again.
    between = None

    def do_action(self, context, action):
        fault = self.faults.pop(0) if self.faults and action.type == "call" else "none"
        if fault == "killed before":
            self.killed()
        if fault == "keep back":
            self.kept.append(action)
        if fault in ("lose message", "keep back", "killed before", "edited"):
            self.happens()
        if fault in ("lose message", "keep back", "killed before"):
            raise flight.FlightUnavailableError(fault)
        answer = [*super().do_action(context, action)]
        if fault == "repeat":
            list(super().do_action(context, action))
        if fault == "killed after":
            self.killed()
        if fault in ("lose answer", "killed after"):
            self.happens()
            raise flight.FlightUnavailableError(fault)
        return iter(answer)

    def happens(self):
        """Others do now what they do between two messages."""
        if self.between is not None:
            self.between()

    def let_calls_go(self):
        """What was kept back arrives, long after it was sent again."""
        kept, self.kept = self.kept, []
        for action in kept:
            with flight.connect(self.server) as client:
                list(client.do_action(action))


FAULTS = ("none", "lose message", "lose answer", "repeat", "keep back")
KILLS = ("killed before", "killed after")


@contextlib.contextmanager
def interrupted(folder, rb):
    """A proxy before a server in another process, which it can kill; ``rb`` sees what is in the store."""
    server = [start(folder, f"unix:{folder}.sock")]

    def killed():
        server[0].kill()
        server[0] = start(folder, f"unix:{folder}.sock")

    with Interrupted.before(folder) as proxy:
        proxy.killed = killed
        try:
            yield proxy
        finally:
            server[0].kill()


# ---- rows by key -----------------------------------------------------------------------------------------------------------


def test_rows_are_found_by_their_key(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        with pytest.raises(RuntimeError, match=r"rows_of: expected rows with an index of their keys"):
            remote.rows_of([3])
        remote.index_keys("uid")
        found = remote.rows_of([7, 3, 99])
        assert found.rows.tolist() == [7, 3, -1]
        assert torch.equal(found.generations[:2], rb.writer.generations_of(torch.tensor([7, 3])))
        remote.extend(rows(7, 1))
        assert remote.rows_of(7).rows.tolist() == [ROWS]  # the newest
        for keys, error in (("seven", TypeError), ([1.5], TypeError), ({"a": 1}, TypeError)):
            with pytest.raises(error, match="rows_of"):
                remote.rows_of(keys)
        with pytest.raises(KeyError, match="expected a stored field"):
            remote.index_keys("nothing")
        assert remote.remove(keys=[7, 7, 99]) == 2
        assert remote.remove(keys=[7]) == 0
        assert remote.rows_of(7).rows.tolist() == [-1]
    assert sorted(rb["uid"].tolist()) == [i for i in range(ROWS) if i != 7]


def test_keys_may_be_texts(tmp_path):
    with made(tmp_path / "store") as rb, served_here(rb, tmp_path / "store") as address:
        rb.index_keys("prompt")
        with ReplayBuffer.connect(address) as remote:
            assert remote.rows_of(["prompt 4", "prompt", "prompt 9"]).rows.tolist() == [4, -1, 9]


def test_rows_are_removed_by_texts_of_every_form(tmp_path):
    nine, four = list(b"prompt 9"), list(b"prompt 4")
    forms = (
        ("prompt 4", 1),
        (b"prompt 4", 1),
        (("prompt 9", "prompt 4"), 2),
        (["prompt 4", "prompt 4"], 1),
        (np.array(["prompt 9", "prompt 4"]), 2),
        (torch.tensor(four, dtype=torch.uint8), 1),
        (torch.tensor([nine, four], dtype=torch.uint8), 2),
    )
    with made(tmp_path / "store") as rb, served_here(rb, tmp_path / "store") as address:
        rb.index_keys("prompt")
        with ReplayBuffer.connect(address) as remote:
            for keys, n in forms:
                assert remote.rows_of(keys).rows[-1] == remote.rows_of("prompt 4").rows, keys
                assert remote.remove(keys=keys) == n, keys
                assert remote.rows_of(["prompt 4"]).rows.tolist() == [-1]
                assert len(rb) == ROWS - n
                rb.empty()
                rb.extend(rows(0, ROWS))


def test_a_text_is_no_set_of_bytes(tmp_path):
    uids = torch.tensor([list(b"ab"), list(b"ba"), list(b"aa")], dtype=torch.uint8)
    storage = LazyMemmapStorage(9, scratch_dir=tmp_path / "other")
    with ReplayBuffer(storage=storage, batch_size=1) as rb:
        rb.extend({"uid": uids})
        rb.index_keys("uid")
        with served_here(rb, tmp_path / "other") as address, ReplayBuffer.connect(address) as remote:
            assert remote.remove(keys=uids[1:2]) == 1
            assert rb["uid"].tolist() == [list(b"ab"), list(b"aa")]


def test_rows_that_were_found_are_updated_unless_they_were_written_since(served):
    rb, address = served
    rb.index_keys("uid")
    with ReplayBuffer.connect(address) as remote:
        found = remote.rows_of([2, 5, 99, 8])
        rb.remove(8)
        patch = {"reward": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        done = remote.update_if_present(index=found.rows, generation=found.generations, patch=patch)
        assert done.updated.tolist() == [True, True, False, False]
        assert torch.equal(done.generation[:2], found.generations[:2])
        assert done.version_rejected is None
        lists = {"log_prob": [torch.ones(3), torch.ones(6)]}
        index, generation = found.rows[:2], found.generations[:2]
        assert remote.update_if_present(index=index, generation=generation, patch=lists).updated_count == 2
        with pytest.raises(ValueError, match="an edit keeps the length"):
            remote.update_if_present(index=index, generation=generation, patch={"log_prob": [torch.ones(9)] * 2})
        named = {"index": index, "generation": generation, "version_key": "reward"}
        done = remote.update_if_present(
            **named, version=torch.tensor([0.5, 3.0]), patch={"uid": torch.tensor([70, 71])}
        )
        assert done.updated.tolist() == [False, True]
        assert done.version_rejected.tolist() == [True, False]
        patch = {"reward": torch.zeros(2)}
        for wrong, error in (
            ({"patch": {"nothing": torch.zeros(2)}}, KeyError),
            ({"patch": {"reward": torch.zeros(3)}}, ValueError),
            ({"patch": 3}, TypeError),
            ({"index": torch.tensor([1000, 0])}, IndexError),
        ):
            with pytest.raises(error, match="update_if_present|row 1000"):
                remote.update_if_present(**{"index": index, "generation": generation, "patch": patch, **wrong})
    assert rb[2]["reward"] == 1.0
    assert rb[2]["log_prob"].tolist() == [1.0] * 3
    assert rb[2]["uid"] == 2
    assert (rb[5]["reward"], rb[5]["uid"]) == (3.0, 71)


def test_a_fleet_says_whose_row_it_is(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    with contextlib.ExitStack() as opened:
        buffers = [made(folder, 100 * k) for k, folder in enumerate(folders)]
        opened.enter_context(serving_each(folders))
        [opened.enter_context(rb) for rb in buffers]
        fleet = opened.enter_context(ReplayBuffer.connect([f"unix:{folder}.sock" for folder in folders]))
        fleet.index_keys("uid")
        found = fleet.rows_of([103, 4, 55])
        assert found.rows.tolist() == [1 << 48 | 3, 4, -1]
        patch = {"reward": torch.tensor([1.0, 2.0, 3.0]), "log_prob": [torch.full((n,), 7.0) for n in (6, 5, 1)]}
        done = fleet.update_if_present(index=found.rows, generation=found.generations, patch=patch)
        assert done.updated.tolist() == [True, True, False]
        assert [float(rb[row]["reward"]) for rb, row in zip(buffers, (4, 3), strict=True)] == [2.0, 1.0]
        assert buffers[1][3]["log_prob"].tolist() == [7.0] * 6
        assert fleet.remove(keys=[103, 4]) == 2
        assert [len(rb) for rb in buffers] == [ROWS - 1] * 2
        row = fleet.open_row(uid=500, prompt="p")
        row.append(tokens=[1, 2], log_prob=[0.5, 0.5])
        assert [it.lengths for it in fleet.unsealed()] == [{"tokens": 2, "prompt": 1}]
        number = row.seal(reward=1.0)
        here = buffers[number >> 48]
        assert here[number & (1 << 48) - 1]["tokens"].tolist() == [1, 2]
        assert fleet.rows_of(500).rows.tolist() == [number]


def test_an_update_of_a_fleet_is_laid_out_as_one_of_a_store(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    with contextlib.ExitStack() as opened:
        buffers = [opened.enter_context(made(folder, 100 * k)) for k, folder in enumerate(folders)]
        for rb, folder in zip(buffers, folders, strict=True):
            rb.index_keys("uid")
            opened.enter_context(served_here(rb, folder))
        fleet = opened.enter_context(ReplayBuffer.connect([f"unix:{folder}.sock" for folder in folders]))
        found = fleet.rows_of([103, 4, 5, 104])
        index, generation = found.rows, found.generations

        def rewards():
            return [float(rb[row]["reward"]) for rb, row in zip(buffers * 2, (4, 3, 5, 4), strict=True)]

        for n, value in enumerate((np.arange(4, dtype=np.float32), torch.arange(4.0), [0.0, 1.0, 2.0, 3.0])):
            patch = {"reward": value + n if n < 2 else value}
            assert fleet.update_if_present(index=index, generation=generation, patch=patch).updated_count == 4
            assert rewards() == [1 + n % 2, n % 2, 2 + n % 2, 3 + n % 2]
        patch = {"reward": torch.tensor([[5.0, 6.0], [7.0, 8.0]])}
        done = fleet.update_if_present(index=index.view(2, 2), generation=generation.view(2, 2), patch=patch)
        assert done.updated.tolist() == [[True, True], [True, True]]
        assert rewards() == [6.0, 5.0, 7.0, 8.0]
        for wrong in (
            {"patch": {"reward": torch.zeros(2)}},
            {"patch": {"reward": [0.0, 0.0]}},
            {"patch": {"reward": torch.zeros(4)}, "generation": generation[:2]},
            {"patch": {"uid": torch.arange(4)}, "version_key": "reward", "version": [9.0, 9.0]},
        ):
            with pytest.raises(ValueError, match="update_if_present: "):
                fleet.update_if_present(**{"index": index, "generation": generation, **wrong})
        assert rewards() == [6.0, 5.0, 7.0, 8.0]
        for version in (np.array([9, 9, 1, 9], dtype=np.float32), (9.0, 9.0, 1.0, 9.0)):
            done = fleet.update_if_present(
                index=index,
                generation=generation,
                patch={"uid": torch.tensor([103, 4, 5, 104])},
                version_key="reward",
                version=version,
            )
        assert done.version_rejected.tolist() == [False, False, True, False]  # an equal version wins
        assert rewards() == [9.0, 9.0, 7.0, 9.0]
        done = fleet.update_if_present(
            index=index, generation=generation, patch={}, version_key="reward", version=torch.tensor([20.0])
        )
        assert rewards() == [20.0] * 4
        none = torch.empty(0, dtype=torch.int64)
        assert len(fleet.update_if_present(index=none, generation=none, patch={"reward": torch.zeros(0)})) == 0


@pytest.mark.parametrize("fault", [*FAULTS, *KILLS])
def test_rows_are_removed_by_key_once(fault, tmp_path):
    with made(tmp_path / "store") as rb:
        rb.index_keys("uid")
        with interrupted(tmp_path / "store", rb) as proxy, ReplayBuffer.connect(proxy.address) as remote:
            proxy.faults = [fault]
            assert remote.remove(keys=[3, 4]) == 2
            rb.extend(rows(3, 1))
            proxy.let_calls_go()
        assert sorted(rb["uid"].tolist()) == [i for i in range(ROWS) if i != 4]


# ---- rows that grow --------------------------------------------------------------------------------------------------------


def test_a_row_grows_where_the_store_is(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        row = remote.open_row({"uid": 7}, prompt="p")
        row.append(tokens=[1, 2], log_prob=[0.5, 0.25])
        row.append(tokens=torch.tensor([3], dtype=torch.int32))
        assert row.lengths == {"tokens": 3, "prompt": 1}
        shown = row.fields
        assert shown["tokens"].tolist() == [1, 2, 3]
        assert shown["log_prob"].tolist() == [0.5, 0.25, 0.0]
        assert shown["uid"] == 7
        assert (repr(row), [repr(it) for it in rb.unsealed()]) == ("OpenRow(tokens=3, prompt=1)",) * 1 + (
            ["OpenRow(tokens=3, prompt=1)"],
        )
        for wrong, error in (
            ({"tokens": [1] * 28}, "at most 30 items"),
            ({"tokens": [1], "log_prob": [0.1, 0.2]}, "as many items"),
            ({"reward": 1.0}, "expected ragged fields"),
            ({"nothing": [1]}, "expected ragged fields"),
            ({"tokens": torch.zeros(2)}, "append"),
        ):
            with pytest.raises((RuntimeError, KeyError, TypeError), match=error):
                row.append(wrong)
        with pytest.raises(KeyError, match="got none for 'reward'"):
            row.seal()
        with pytest.raises(RuntimeError, match="that this client has, got one"):
            remote.unsealed()[0].append(tokens=[1])
        assert row.lengths == {"tokens": 3, "prompt": 1}
        assert len(rb) == ROWS
        number = row.seal(reward=2.0, tokens=[4])
        assert number == ROWS
        assert rb[number]["tokens"].tolist() == [1, 2, 3, 4]
        assert rb[number]["log_prob"].tolist() == [0.5, 0.25, 0.0, 0.0]
        for call in (row.append, row.seal, row.discard):
            with pytest.raises(RuntimeError, match="expected an open row that this client has"):
                call()
        given_up = remote.open_row(uid=8)
        given_up.discard()
        assert remote.unsealed() == rb.unsealed() == []
    assert len(rb) == ROWS + 1


def test_slots_and_limits_are_waited_for(served):
    rb, address = served
    with ReplayBuffer.connect(address) as remote:
        taken = [remote.open_row(uid=i) for i in range(4)]
        with pytest.raises(RateLimited, match="expected a free slot"):
            remote.open_row(uid=4, timeout=0.05)
        rb.limit(SamplesPerInsert(1.0, min_size=ROWS, tolerance=0.0))
        assert taken[0].seal(reward=1.0) == ROWS  # one may be ahead
        with pytest.raises(RateLimited):
            taken[1].seal(reward=1.0, tokens=[1], timeout=0.05)
        assert taken[1].lengths == {"tokens": 0, "prompt": 0}
        rb.limit(None)
        assert taken[1].seal(reward=1.0) == ROWS + 1


@pytest.mark.parametrize("fault", [*FAULTS, *KILLS])
def test_items_are_appended_once_and_in_order(fault, tmp_path):
    with made(tmp_path / "store") as rb, interrupted(tmp_path / "store", rb) as proxy:
        with ReplayBuffer.connect(proxy.address) as remote:
            row = remote.open_row(uid=7, prompt="p")
            expected = []
            for i in range(3):
                proxy.faults = [fault] if i else []
                items = [10 * i, 10 * i + 1][: 1 + i % 2]
                row.append(tokens=items, log_prob=[float(it) for it in items])
                expected += items
                assert rb.unsealed()[0].fields["tokens"].tolist() == expected  # there when the call returns
            assert row.lengths == {"tokens": len(expected), "prompt": 1}
            proxy.let_calls_go()
            assert rb.unsealed()[0].fields["tokens"].tolist() == expected
            proxy.faults = [fault]
            number = row.seal(reward=1.0, tokens=[99], log_prob=[99.0])
            # a server that died as it had sealed the row cannot say which one it is
            assert number == (-1 if fault in ("lose answer", "killed after") else ROWS)
            with contextlib.suppress(Exception):
                proxy.let_calls_go()
        assert rb.unsealed() == []
        assert len(rb) == ROWS + 1
        assert rb[ROWS]["tokens"].tolist() == [*expected, 99]
        assert rb[ROWS]["log_prob"].tolist() == [float(it) for it in [*expected, 99]]


@pytest.mark.parametrize("fault", [*FAULTS, *KILLS])
def test_a_row_is_discarded_once(fault, tmp_path):
    with made(tmp_path / "store") as rb, interrupted(tmp_path / "store", rb) as proxy:
        with ReplayBuffer.connect(proxy.address) as remote:
            row, other = remote.open_row(uid=7), remote.open_row(uid=8)
            proxy.faults = [fault]
            row.discard()
            assert [it.fields["uid"] for it in rb.unsealed()] == [8]
            with contextlib.suppress(Exception):
                proxy.let_calls_go()
            other.seal(reward=1.0)
        assert len(rb) == ROWS + 1


CLIENT = """
from engram import ReplayBuffer
rb = ReplayBuffer.connect(address)
row = rb.open_row(uid=7, prompt="p")
row.append(tokens=[1, 2, 3])
print("ready", flush=True)
import signal
signal.pause()
"""


def test_a_row_of_a_client_that_died_is_abandoned_and_resumed_once(served, monkeypatch):
    rb, address = served
    client = fresh.start(CLIENT, address=address).until("ready")
    client.kill()
    with ReplayBuffer.connect(address) as remote, ReplayBuffer.connect(address) as other:
        (row,) = remote.unsealed()
        assert not row.is_abandoned  # it may live: it was heard of a moment ago
        with pytest.raises(RuntimeError, match="another client or process has"):
            row.resume()
        monkeypatch.setattr(calls, "LEASE_S", -1.0)
        (row,) = remote.unsealed()
        (late,) = other.unsealed()
        assert row.is_abandoned
        assert row.resume() is row
        monkeypatch.setattr(calls, "LEASE_S", 60.0)
        assert not row.is_abandoned
        with pytest.raises(RuntimeError, match="another client or process has"):
            late.resume()
        row.append(tokens=[4])
        number = row.seal(reward=1.0)
    assert rb[number]["tokens"].tolist() == [1, 2, 3, 4]
    assert len(rb) == ROWS + 1


def test_items_of_another_client_are_not_taken_for_ones_that_were_sent_again(tmp_path):
    folder = tmp_path / "store"
    with made(folder) as rb, interrupted(folder, rb) as proxy:
        first, other = (ReplayBuffer.connect(f"unix:{folder}.sock") for _ in range(2))
        with first, other:
            row = first.open_row(uid=1)
            row.append(tokens=[1])
            proxy.killed()
            (resumed,) = other.unsealed()
            resumed.resume().append(tokens=[2])
            proxy.killed()
            with pytest.raises(RuntimeError, match="'tokens': expected 1 items, as this client left them, got 2"):
                row.append(tokens=[3, 4])
            (shown,) = rb.unsealed()
            assert shown.lengths["tokens"] == 2
            row.resume().append(tokens=[3, 4])
            assert rb[row.seal(reward=0.0)]["tokens"].tolist() == [1, 2, 3, 4]


def test_a_client_that_was_silent_goes_on_unless_another_one_has_resumed(served, monkeypatch):
    rb, address = served
    with ReplayBuffer.connect(address) as remote, ReplayBuffer.connect(address) as other:
        kept, lost = remote.open_row(uid=1), remote.open_row(uid=2)
        monkeypatch.setattr(calls, "LEASE_S", -1.0)
        listed = {int(row.fields["uid"]): row for row in other.unsealed()}
        listed[2].resume()
        kept.append(tokens=[5])
        for call in (lambda: lost.append(tokens=[6]), lambda: lost.seal(reward=1.0), lost.discard):
            with pytest.raises(RuntimeError, match="another client or process has"):
                call()
        assert kept.seal(reward=1.0) == ROWS
        assert listed[2].seal(reward=1.0) == ROWS + 1
    assert [rb[row]["uid"].item() for row in (ROWS, ROWS + 1)] == [1, 2]


def test_a_row_of_a_process_beside_the_server_is_not_its_clients(served):
    rb, address = served
    row = rb.open_row(uid=7)
    with ReplayBuffer.connect(address) as remote:
        (listed,) = remote.unsealed()
        assert not listed.is_abandoned
        with pytest.raises(RuntimeError, match="another client or process has"):
            listed.resume()
    row.append(tokens=[1])


def test_the_next_server_hands_out_the_rows_of_one_that_died(tmp_path):
    with made(tmp_path / "store") as rb, interrupted(tmp_path / "store", rb) as proxy:
        with ReplayBuffer.connect(proxy.address) as gone:
            gone.open_row(uid=7, prompt="p").append(tokens=[1])
        proxy.killed()
        with ReplayBuffer.connect(proxy.address) as remote:
            (row,) = remote.unsealed()
            assert row.is_abandoned
            row.resume().append(tokens=[2])
            assert rb[row.seal(reward=1.0)]["tokens"].tolist() == [1, 2]


# ---- servers and clients that know less, or break the rules ---------------------------------------------------------------------


def test_a_server_of_an_older_engram_is_named(served):
    _, address = served
    with ReplayBuffer.connect(address) as remote:
        connection = remote.storage.connection
        connection.served = msgspec.structs.replace(connection.served, level=0, engram="0.1")
        for call in (
            lambda: remote.index_keys("uid"),
            lambda: remote.rows_of([1]),
            lambda: remote.remove(keys=[1]),
            lambda: remote.open_row(uid=1),
            remote.unsealed,
            lambda: remote.sample(max_tokens=10),
        ):
            with pytest.raises(
                RuntimeError, match=r"expected a server that knows this call, got one of an older engram, 0\.1, at unix"
            ):
                call()


def test_calls_of_many_clients_take_turns(served):
    rb, address = served
    sealed, errors = [], []

    def generate(number):
        try:
            with ReplayBuffer.connect(address) as remote:
                for k in range(5):
                    row = remote.open_row(uid=1000 + 10 * number + k, prompt="p")
                    for token in range(4):
                        row.append(tokens=[token], log_prob=[float(number)])
                    sealed.append((row.seal(reward=float(number)), 1000 + 10 * number + k))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors
    assert sorted(row for row, _ in sealed) == [*range(ROWS, ROWS + 20)]
    for row, uid in sealed:
        assert rb[row]["uid"] == uid
        assert rb[row]["tokens"].tolist() == [0, 1, 2, 3]
        assert rb[row]["log_prob"].tolist() == [float((uid - 1000) // 10)] * 4


def test_the_command_serves_rows_that_grow(tmp_path):
    with made(tmp_path / "store") as rb, serving(tmp_path / "store") as server:
        with ReplayBuffer.connect(server.address) as remote:
            row = remote.open_row(uid=1)
            assert [it.is_abandoned for it in rb.unsealed()] == [False]
        server.kill()
        assert [it.is_abandoned for it in rb.unsealed()] == [True]
        assert row.lengths == {"tokens": 0, "prompt": 0}


DESCRIBED = """
import msgspec
import msgspec._utils as described
import engram.remote.connection
from engram.remote import protocol

find, found = described.get_class_annotations.__globals__["_get_class_mro_and_typevar_mappings"], []
described._get_class_mro_and_typevar_mappings = lambda kind: (found.append(kind), find(kind))[1]
messages = [kind for kind in vars(protocol).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
for kind in messages:
    msgspec.json.Decoder(kind)
print(len(messages) > 20, found)
msgspec.json.Decoder(msgspec.defstruct("Other", ["a"]))
print(len(found))
"""


def test_no_thread_describes_a_message():
    """msgspec describes a class when it is first read. Two threads that did so at once crashed the process."""
    assert fresh.run(DESCRIBED) == "True []\n1"
