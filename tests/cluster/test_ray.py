"""Buffers whose rows an actor of Ray keeps: one cluster of two nodes, which are processes of this machine, for all tests."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from engram import (
    Compose,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RayReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.buffer.connecting import attached
from tests import stress
from tests.cluster.on_nodes import AWAY, HERE, made, rows
from tests.test_docs import OF_RAY, ON_RAY, examples_of, run, run_page

ray = pytest.importorskip("ray", reason="engram-replay[ray] is not installed")


@pytest.fixture(scope="module")
def near(nodes):
    with made(HERE, name="near") as rb:
        yield rb


@pytest.fixture(scope="module")
def away(nodes):
    sampler = partial(PrioritizedSampler, 100, 1.0, 1.0)
    with made(AWAY, sampler=sampler, prefetch=2) as rb:
        yield rb


def test_before_the_first_row_a_buffer_is_empty_and_after_it_has_the_rows_of_all(near, away):
    for rb, transport in ((near, "shared"), (away, "flight")):
        assert (rb.transport_kind, rb.service_backend) == (transport, "ray")
        assert isinstance(rb, RayReplayBuffer)
        assert isinstance(rb, TensorDictReplayBuffer)
        assert (len(rb), rb.write_count, rb.stats()["size"], rb.can_sample()) == (0, 0, 0, False)
        with pytest.raises(NoSampleable):
            rb.sample()
        other = rb.client()
        assert rb.extend(rows(10)).tolist() == list(range(10))
        assert other.add(rows(1, 10)[0]) == 10
        assert len(rb) == len(other) == rb.write_count == 11
        batch = other.sample()
        assert batch["next", "reward"].tolist() == batch["a"].float().tolist() == batch["index"].float().tolist()
        other.close()
        assert len(rb) == 11


def test_pickles_are_clients_wherever_they_arrive(near, away):
    @ray.remote(num_cpus=0)
    def use(rb, first):
        rb.extend(rows(5, first))
        kind, transport = type(rb).__name__, rb.transport_kind
        rb.close()
        return kind, transport

    sizes = len(near), len(away)
    there = use.options(resources={"away": 0.01})
    asked = [ray.get(there.remote(rb, 50 + k)) for k, rb in enumerate((near, away))]
    assert asked == [("TensorDictReplayBuffer", "flight"), ("TensorDictReplayBuffer", "shared")]
    assert (len(near), len(away)) == (sizes[0] + 5, sizes[1] + 5)
    with pickle.loads(pickle.dumps(near)) as other:
        assert len(other) == len(near)
    clients = near.clients(2)
    assert [len(client) for client in clients] == [len(near)] * 2
    [client.close() for client in clients]


def test_priorities_reach_rows_that_are_elsewhere(away):
    away.empty()
    away.extend(rows(20))
    away.update_priority(torch.arange(20), torch.tensor([0.0] * 19 + [1.0]))
    batch = away.sample()
    while len(set(batch["a"].tolist())) > 1:  # those that were under way
        batch = away.sample()
    assert batch["a"].tolist() == [19] * 8
    batch["td_error"] = torch.ones(8)
    away.update_tensordict_priority(batch)


def test_a_name_is_found(near):
    near.extend(rows(5))
    with ReplayBuffer.connect("ray:near", batch_size=3, patience=240) as rb:
        assert len(rb.sample()) == 3
        assert rb.transport_kind == "shared"
    with pytest.raises(ConnectionError, match="name='nobody'"):
        ReplayBuffer.connect("ray:nobody")
    for taken in ("near", "near/1"):  # so a shard of it would be called
        with pytest.raises(ValueError, match=r"name: expected one without '/' that no buffer here has"):
            made(HERE, name=taken)
    with pytest.raises(TypeError, match=r"got \['full', 'token'\]"):
        ReplayBuffer.connect("ray:near", full="drop", token="file")
    with pytest.raises(ValueError, match="one of 1 stores, got 1"):
        ReplayBuffer.connect("ray:near", stratum=1)
    with pytest.raises(TypeError, match="expected a buffer with priorities"):
        PrioritizedReplayBuffer.connect("ray:near")


def test_copies_and_clients_read_as_what_they_are_made_of(near):
    def marked(batch):
        return batch.set("a", torch.full_like(batch["a"], -1))

    with ReplayBuffer.connect(
        "ray:near", batch_size=3, patience=240, transform_factory=lambda: Compose(marked)
    ) as first:
        copies = [first.client(), copy.copy(first), ray.cloudpickle.loads(ray.cloudpickle.dumps(first))]
        first.sample()  # made now
        copies += [first.client(), copy.copy(first), ray.cloudpickle.loads(ray.cloudpickle.dumps(first))]
        for one in copies:
            with one:
                assert one.sample()["a"].tolist() == [-1] * 3
    with near.client() as second:
        second.append_transform(marked)
        with copy.copy(second) as third:
            third.append_transform(lambda batch: batch.set("more", batch["a"]))
            assert third.sample()["more"].tolist() == [-1] * 8
        assert "more" not in second.sample().keys()
    assert min(near.sample()["a"].tolist()) >= 0


def test_rows_in_memory_and_in_a_directory_outlive_their_actor(nodes, tmp_path):
    memory = made(HERE)
    disk = made(AWAY, partial(LazyMemmapStorage, scratch_dir=tmp_path / "store"), prefetch=1)
    for rb in (memory, disk):
        rb.extend(rows(10))
        assert len(rb.sample()) == 8
    for rb in (memory, disk):
        ray.kill(rb._service.shards.each[0].actor, no_restart=False)
    for rb in (memory, disk):
        rb.extend(rows(10, 10))
        assert len(rb) == rb.write_count == 20
        assert set(rb.sample()["a"].tolist()) <= set(range(20))
        other = rb.client()
        assert len(other) == 20
        other.close()
    (shard,), folder = memory._service.shards.each, memory.storage.memory.directory
    for _ in range(2):
        memory.close()
        disk.close()
    assert not Path(folder).exists()
    with pytest.raises(ConnectionError):
        shard.describe()
    with ReplayBuffer.open(tmp_path / "store") as found:
        assert found[:]["a"].tolist() == list(range(20))


@pytest.mark.skipif(stress.SIZE == "small", reason="Ray takes 20 seconds to see that a node is back")
def test_a_node_that_dies_and_returns_has_its_rows(nodes, tmp_path):
    node = nodes.add_node(num_cpus=4, object_store_memory=80_000_000, resources={"visitor": 1})
    where = {"num_cpus": 0, "resources": {"visitor": 0.01}}
    with made(where, partial(LazyMemmapStorage, scratch_dir=tmp_path / "store")) as rb:
        rb.extend(rows(10))
        actor = rb._service.shards.each[0].actor
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        nodes.remove_node(node, allow_graceful=False)
        os.kill(pid, signal.SIGKILL)  # it outlives its node for a moment
        nodes.add_node(num_cpus=4, object_store_memory=80_000_000, resources={"visitor": 1})
        rb.extend(rows(10, 10))
        assert len(rb) == 20
    with ReplayBuffer.open(tmp_path / "store") as found:
        assert found[:]["a"].tolist() == list(range(20))


def test_torchrl_spells_it_service_backend_and_its_collector_writes_into_it(nodes):
    pytest.importorskip("torchrl", reason="torchrl is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.collectors.distributed import RayCollector
        from torchrl.envs import GymEnv
        from torchrl.envs.utils import RandomPolicy

        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0,
            beta=1.0,
            storage=partial(LazyTensorStorage, 1000),
            batch_size=8,
            transform=lambda batch: batch.set("doubled", 2 * batch["observation"]),
            service_backend="ray",
            service_backend_options={"remote_config": AWAY},
            transport="auto",
        )
        env = partial(GymEnv, "CartPole-v1")
        collector = RayCollector(
            [env],
            RandomPolicy(GymEnv("CartPole-v1").action_spec),
            frames_per_batch=32,
            total_frames=64,
            replay_buffer=rb,
            remote_configs={"num_cpus": 0, "resources": {"here": 0.01}},
            collector_class="single",
        )
        for data in collector:
            assert data is None
        collector.shutdown(shutdown_ray=False)
    assert len(rb) >= 64
    batch = rb.sample()
    assert batch["next", "observation"].shape == (8, 4)
    assert torch.equal(batch["doubled"], 2 * batch["observation"])
    assert batch["priority_weight"].shape == (8,)
    rb.close()


PROGRAM = """
import sys
from functools import partial

import ray
import torch
from engram import LazyMemmapStorage, RayReplayBuffer

ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
rb = RayReplayBuffer(storage=partial(LazyMemmapStorage, 100), batch_size=4, remote_config={"num_cpus": 0}, shards=2)
rb.extend({"a": torch.arange(10)})
for shard in rb._service.shards.each:
    print("rows in", ray.get(shard.actor.__ray_call__.remote(lambda it: str(it._storage.memory.directory))))
raise SystemExit(3)
"""


def test_temporary_rows_end_with_a_program_that_does_not_close_its_buffer(nodes):
    ended = subprocess.run([sys.executable, "-c", PROGRAM, nodes.address], capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
    folders = [line.partition("rows in ")[2] for line in ended.stdout.splitlines() if line.startswith("rows in ")]
    assert len(folders) == 2
    assert not any(Path(folder).exists() for folder in folders)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"transport": "ray"}, ValueError, "never travel by Ray's"),
        ({"placement": "nowhere"}, ValueError, "'learners', 'spread' or 'actors'"),
        ({"shards": 0}, ValueError, "shards"),
        ({"shards": 2, "transport": "shared"}, ValueError, "several stores"),
        ({"shards": 2, "missing": "drop"}, ValueError, "missing"),
        ({"shards": 2, "where": [HERE]}, ValueError, "2 dicts"),
        ({"where": "here"}, TypeError, "one for each shard"),
        ({"transport_options": {"backend": "gloo"}}, ValueError, "transport_options"),
        ({"kind": dict}, TypeError, "buffer class of engram's"),
    ],
)
def test_what_cannot_be_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        made(**{"where": HERE, **arguments})


def test_what_making_the_buffer_raises_comes_back(nodes):
    with pytest.raises(ValueError, match="max_size: expected at least 1"):
        made(HERE, size=0)


def test_the_page_shows_what_works(nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(ON_RAY)


def test_the_docstring_shows_what_works(nodes):
    shown = [test for test in examples_of("engram.serving.on_ray") if test.name.startswith(OF_RAY)]
    assert len(shown) == 3
    for test in shown:
        run(test)


def test_memory_is_not_shared_between_nodes(away):
    with pytest.raises(RuntimeError, match="this process is not"):
        attached(away._service.shards._replace(transport="shared"), {})
