"""Servers of stores that are not there yet: a description makes them, or the first write of a client."""

import contextlib
import json
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tensordict import TensorDict

from engram import (
    NoSampleable,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from engram.cli import main
from engram.errors import IncompatibleStore
from engram.format.schema import Field
from engram.remote.protocol import address_of
from engram.serving.awaiting import Awaiting, awaiting
from engram.serving.server import Server
from tests import fresh

SERVE = """
from click.testing import CliRunner
import sys
from engram.cli import main
main(command)
"""


@contextlib.contextmanager
def serving(folder, *options):
    """``engram serve`` of a folder, in a process: its address."""
    program = fresh.start(SERVE, command=["serve", str(folder), "--listen", f"unix:{folder}.sock", *map(str, options)])
    try:
        yield program.until("\n").out.strip()
    finally:
        program.kill()


def row(k=0, n=None):
    lead = () if n is None else (n,)
    return {"obs": torch.full((*lead, 3), float(k)), "next": {"done": torch.zeros(lead, dtype=torch.bool)}}


def test_batches_have_what_a_sampler_computes_also_of_who_came_first(tmp_path):
    rb = ReplayBuffer.open_or_create(tmp_path / "store", 50, sampler=NStep(RandomSampler(), 2, 0.9), batch_size=8)
    address = f"unix:{tmp_path}/store.sock"
    (tmp_path / "store").mkdir()  # its number names the store
    server = Server(Awaiting(rb, tmp_path / "store"), address_of(address, "test"))
    with ReplayBuffer.connect(address) as remote:
        remote.extend({"next": {"done": torch.zeros(9, dtype=torch.bool), "reward": torch.ones(9)}})
        batch = remote.sample()
        assert ({*batch}, {*batch["next"]}) == (
            {"gamma", "next", "steps_to_next_obs"},
            {"done", "original_reward", "reward"},
        )
    server.drain()
    rb.close()


def test_the_first_write_decides(tmp_path):
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(tmp_path / "store", "--capacity", 50, "--batch-size", 8))
        with ReplayBuffer.connect(address) as one, ReplayBuffer.connect(address) as other:
            assert (len(one), one.can_sample(), one.storage.max_size, one.batch_size) == (0, False, 50, 8)
            with pytest.raises(NoSampleable):
                one.sample()
            assert not (tmp_path / "store" / ".engram" / "store.json").exists()
            assert one.extend(row(1, 4)).tolist() == [0, 1, 2, 3]
            assert other.sample()["obs"].tolist() == [[1.0] * 3] * 8
            assert other.add(row(2)) == 4
            with pytest.raises(Exception, match="obs"):
                other.extend({"obs": torch.zeros(2, 5), "next": {"done": torch.zeros(2, dtype=torch.bool)}})
            assert one.stats()["size"] == 5
    with serving(tmp_path / "store", "--capacity", 50) as address, ReplayBuffer.connect(address) as one:
        assert len(one) == 5  # the same command goes on with it
    with ReplayBuffer.open(tmp_path / "store") as rb:
        assert rb["obs"][:, 0].tolist() == [1.0] * 4 + [2.0]


def test_of_writes_at_the_same_time_one_decides(tmp_path):
    with serving(tmp_path / "store", "--capacity", 500, "--lanes", 2) as address:
        clients = [ReplayBuffer.connect(address) for _ in range(4)]
        barrier, failed = threading.Barrier(4), []

        def write(k):
            barrier.wait()
            try:
                clients[k].extend(row(k, 10) if k % 2 else {"other": torch.zeros(10)}, lane=k % 2)
            except Exception as error:  # noqa: BLE001 - it is counted
                failed.append((k, error))

        threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
        [it.start() for it in threads]
        [it.join() for it in threads]
        assert {k % 2 for k, _ in failed} in ({0}, {1})
        assert len(failed) == 2
        assert len(clients[0]) == 20
        [it.close() for it in clients]


def test_all_callers_get_one_service(tmp_path):
    # it counts the clients, and draws of an epoch take turns in it
    made = awaiting(tmp_path / "store", 10, fields=[Field(("obs",), "float32", (3,))])
    barrier, found = threading.Barrier(8), []

    def look():
        barrier.wait()
        found.append(made.found())

    threads = [threading.Thread(target=look) for _ in range(8)]
    [it.start() for it in threads]
    [it.join() for it in threads]
    with made.buffer:
        assert len(found) == 8
        assert {*map(id, found)} == {id(made.found())}


def test_what_cannot_be_stored_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="lanes"):
        awaiting(tmp_path / "store", 10, lanes=11, fields=[Field(("obs",), "float32", (3,))])
    assert not (tmp_path / "store").exists()


def test_a_store_whose_maker_died_gets_its_kind(tmp_path):
    how = {"priorities": (0.6, 0.4), "batch_size": 8}
    with awaiting(tmp_path / "store", 10, **how, fields=[Field(("obs",), "float32", (3,))]).buffer:
        pass  # before anything was asked
    made = awaiting(tmp_path / "store", 10, **how)
    with made.buffer:
        assert made.found() is not None
    with ReplayBuffer.open(tmp_path / "store") as rb:
        assert (type(rb), rb.batch_size, rb.sampler.alpha) == (PrioritizedReplayBuffer, 8, 0.6)


def test_a_description_of_other_fields_than_the_store_has_is_refused(tmp_path):
    with ReplayBuffer.open_or_create(tmp_path / "store", 10) as rb:
        rb.extend({"obs": torch.zeros(2, 3)})
    awaiting(tmp_path / "store", 10, fields=[Field(("obs",), "float32", (3,))]).buffer.close()
    for field in (Field(("other",), "float32", (3,)), Field(("obs",), "float32", (4,)), Field(("obs",), "int64", (3,))):
        with pytest.raises(IncompatibleStore, match="other fields"):
            awaiting(tmp_path / "store", 10, fields=[field])
    with ReplayBuffer.open(tmp_path / "store") as rb:
        assert rb["obs"].shape == (2, 3)


def test_a_buffer_is_pickled_before_and_after_the_first_write(tmp_path):
    with contextlib.ExitStack() as stack:
        at = [stack.enter_context(serving(tmp_path / name, "--capacity", 50, "--batch-size", 4)) for name in "ab"]
        for addresses in (at[0], at):
            rb = stack.enter_context(ReplayBuffer.connect(addresses))
            before = stack.enter_context(pickle.loads(pickle.dumps(rb)))
            assert len(before) == len(rb)
            rb.extend(row(1, 6))
            after = stack.enter_context(pickle.loads(pickle.dumps(rb)))
            assert len(before) == len(after) == len(rb) >= 6
            assert before.sample()["obs"].shape == after.sample()["obs"].shape == (4, 3)


def rows_of_other_kinds(folder):
    with ReplayBuffer.open_or_create(folder, 50) as rb:
        rb.extend(
            {"obs": torch.full((20, 3), 7, dtype=torch.int32), "next": {"done": torch.ones(20, dtype=torch.bool)}}
        )


@pytest.mark.parametrize("becomes", ["another store", "an empty folder"])
def test_a_store_that_is_lost_is_no_other_one(tmp_path, becomes):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serving(tmp_path / "a", "--capacity", 50, "--batch-size", 8))
        with serving(tmp_path / "b", "--capacity", 50, "--batch-size", 8) as second:
            rb = stack.enter_context(ReplayBuffer.connect([first, second], patience=20))
            alone = stack.enter_context(ReplayBuffer.connect(second, patience=20))
            [stack.enter_context(ReplayBuffer.connect([first, second])).extend(row(1, 10)) for _ in range(2)]
            assert len(rb) == 20
            assert len(alone) == 10
        (tmp_path / "b").rename(tmp_path / "gone")
        if becomes == "another store":
            rows_of_other_kinds(tmp_path / "b")
        again = stack.enter_context(serving(tmp_path / "b", "--capacity", 50))
        assert again == second
        with pytest.raises((ValueError, ConnectionError), match="another store"):
            alone.sample()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which store is gone
            for _ in range(5):
                assert rb.sample()["obs"].tolist() == [[1.0] * 3] * 8
            rb.extend(row(1, 4))
    if becomes == "another store":
        with ReplayBuffer.open(tmp_path / "b") as rb:
            assert rb["obs"].unique().tolist() == [7]


def test_top_of_a_server_without_a_store(tmp_path):
    with serving(tmp_path / "store", "--capacity", 50) as address:
        done = CliRunner().invoke(main, ["top", address, "--count", "1"])
    assert done.exit_code == 0, done.output


def described(tmp_path, kind):
    path = tmp_path / f"row.{'npz' if kind == 'npz' else 'json'}"
    if kind == "npz":
        np.savez(path, **{"obs": np.zeros(3, np.float32), "next.done": np.zeros((), bool)})
        return "--like", path
    if kind == "json":
        path.write_text(json.dumps({"obs": "float32[3]", "next": {"done": "bool"}}))
        return "--schema", path
    with ReplayBuffer.open_or_create(tmp_path / "like", 10) as rb:
        rb.extend(row(0, 2))
    if kind == "store.json":
        return "--schema", tmp_path / "like" / ".engram" / "store.json"
    return "--like", tmp_path / "like"


@pytest.mark.parametrize("kind", ["npz", "json", "store", "store.json"])
def test_a_description_makes_the_store(tmp_path, kind):
    options = [
        "--capacity",
        40,
        "--batch-size",
        4,
        "--priorities",
        0.6,
        0.4,
        "--tensordicts",
        *described(tmp_path, kind),
    ]
    with serving(tmp_path / "new", *options) as address, ReplayBuffer.connect(address) as rb:
        assert isinstance(rb, TensorDictPrioritizedReplayBuffer)
        assert (len(rb), rb.storage.max_size) == (0, 40)
        rb.extend(TensorDict(row(3, 6), [6]))
        batch = rb.sample()
        assert batch["obs"].tolist() == [[3.0] * 3] * 4
        assert batch["next", "done"].dtype is torch.bool
        rb.update_priority(batch["index"], torch.ones(4))
    with ReplayBuffer.open(tmp_path / "new") as rb:
        assert isinstance(rb.sampler, PrioritizedSampler)
        assert (rb.sampler.alpha, rb.sampler.beta, len(rb)) == (0.6, 0.4, 6)


def test_a_fleet_of_stores_that_are_made_together(tmp_path):
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(serving(tmp_path / name, "--capacity", n)) for name, n in (("a", 50), ("b", 70))
        ]
        rb = stack.enter_context(ReplayBuffer.connect(addresses, batch_size=16))
        assert len(rb) == 0
        home = int(rb.extend(row(1, 10))[0] >> 48)
        other = stack.enter_context(ReplayBuffer.connect(addresses, batch_size=16))
        assert int(other.extend(row(2, 10))[0] >> 48) == 1 - home
        assert set(other.sample()["obs"][:, 0].tolist()) <= {1.0, 2.0}
        assert (len(rb), rb.storage.max_size) == (20, 120)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--like", "row.npz"], "expected --capacity"),
        (["--capacity", "9", "--like", "nowhere.npz"], "found nothing"),
        (["--capacity", "0"], "x>=1"),
        ([], "expected a folder, found nothing"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(tmp_path, options, said):
    done = CliRunner().invoke(main, ["serve", str(tmp_path / "store"), *options])
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "store").exists()


def test_a_store_of_another_size_is_refused(tmp_path):
    with ReplayBuffer.open_or_create(tmp_path / "store", 10) as rb:
        rb.extend(row(0, 2))
    done = CliRunner().invoke(main, ["serve", str(tmp_path / "store"), "--capacity", "20"])
    assert done.exit_code == 1
    assert "10" in done.output
    assert "20" in done.output
