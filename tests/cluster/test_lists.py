"""Buffers whose rows one actor of Ray keeps for itself, such as lists: they answer by messages."""

import copy
import os
import pickle
import signal
import warnings
from functools import partial

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from engram import (
    Checkpointer,
    CompressedListStorage,
    LazyStackStorage,
    ListStorage,
    PriorityError,
    RayReplayBuffer,
    ReplayBuffer,
    RowError,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.cluster.on_nodes import AWAY, HERE, rows
from tests.testing.test_broken_storages import Ring

ray = pytest.importorskip("ray", reason="engram-replay[ray] is not installed")
pytestmark = pytest.mark.usefixtures("nodes")


def ragged(i):
    """One answer of a language model: its length is its own."""
    return TensorDict({"ids": torch.arange(i + 1), "text": f"row {i}"}, [])


@pytest.fixture(scope="module")
def answers(nodes):
    """As TorchRL's programs for GRPO build it."""
    with RayReplayBuffer(
        storage=partial(LazyStackStorage, 100),
        replay_buffer_cls=TensorDictReplayBuffer,
        transform_factory=partial(partial, lambda td: td.set("seen", torch.ones(td.batch_size))),
        sampler=SamplerWithoutReplacement,
        batch_size=4,
        remote_config={**AWAY, "num_cpus": 0},
    ) as rb:
        yield rb


def test_ragged_rows_and_strings_come_back_whole(answers):
    answers.empty()
    assert answers.extend(lazy_stack([ragged(i) for i in range(8)])).tolist() == list(range(8))
    assert (len(answers), answers.write_count, answers.batch_size) == (8, 8, 4)
    batches = list(answers)
    assert [len(batch) for batch in batches] == [4, 4]
    found = [row for batch in batches for row in batch.unbind(0)]
    assert sorted(row["text"] for row in found) == [f"row {i}" for i in range(8)]
    assert all(row["ids"].tolist() == list(range(1 + int(row["text"].split()[1]))) for row in found)
    assert all(row["seen"] == 1 for row in found)
    assert answers.add(ragged(8)) == 8
    assert answers[8]["text"] == "row 8"
    answers[8] = ragged(2)
    assert answers[8]["ids"].tolist() == [0, 1, 2]


def test_it_is_a_buffer_of_its_class_and_its_pickles_are_clients(answers):
    assert isinstance(answers, RayReplayBuffer)
    assert isinstance(answers, TensorDictReplayBuffer)
    assert not isinstance(answers, TensorDictPrioritizedReplayBuffer)
    assert (answers.service_backend, answers.transport_kind, answers.is_alive) == ("ray", "ray", True)
    assert answers.start() is answers
    answers.empty()

    @ray.remote(num_cpus=0)
    def write(rb, first):
        rb.extend(lazy_stack([ragged(first + i) for i in range(3)]))
        rb.close()  # of a client: the rows stay
        return rb.closed

    assert ray.get([write.remote(answers, first) for first in (0, 10)]) == [True, True]
    assert len(answers) == 6
    for other in (*answers.clients(2), answers.client(), copy.copy(answers), pickle.loads(pickle.dumps(answers))):
        with other:
            assert (len(other), isinstance(other, RayReplayBuffer)) == (6, True)
    assert len(answers) == 6


def test_without_a_storage_it_is_a_list_and_states_go_both_ways(tmp_path):
    with RayReplayBuffer(remote_config=HERE) as rb, RayReplayBuffer(1000, remote_config=HERE, transport="ray") as other:
        rb.extend([torch.ones(i + 1) for i in range(5)])
        assert rb[3].tolist() == [1.0] * 4
        state = rb.state_dict()
        here = ReplayBuffer(storage=ListStorage(1000))
        for one in (other, here):
            one.load_state_dict(state)
            assert [len(one[i]) for i in range(5)] == [1, 2, 3, 4, 5]
        other.empty()
        assert (len(other), len(rb)) == (0, 5)
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
        assert len(other) == 5
        assert rb.append_transform(lambda batch: batch) in (None, rb)
        rb.set_sampler(SamplerWithoutReplacement())
        assert rb.stats()["size"] == 5
        rb.remark = "of the user"
        assert rb.remark == "of the user"


def test_priorities():
    with RayReplayBuffer(
        storage=partial(ListStorage, 100),
        replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
        alpha=1.0,
        beta=1.0,
        batch_size=8,
        generator=torch.Generator().manual_seed(3),
        remote_config=HERE,
    ) as rb:
        rb.extend(rows(10))
        batch = rb.sample()
        batch["td_error"] = torch.ones(8)
        rb.update_tensordict_priority(batch)
        rb.update_priority(torch.arange(10), torch.tensor([0.0] * 9 + [1.0]))
        assert rb.sample()["a"].tolist() == [9] * 8
        with pytest.raises(PriorityError):
            rb.update_priority(torch.arange(2), torch.tensor([-1.0, 0.0]))


@pytest.mark.parametrize("storage", [ListStorage, CompressedListStorage, Ring, lambda: ListStorage(20)])
def test_every_storage_that_processes_cannot_share(storage):
    given = storage if storage.__name__ == "<lambda>" else partial(storage, 20)
    with RayReplayBuffer(
        storage=given, batch_size=4, remote_config=HERE, replay_buffer_cls=TensorDictReplayBuffer
    ) as rb:
        rb.extend(rows(30))
        assert len(rb) == 20
        batch = rb.sample()
        assert batch["next", "reward"].tolist() == batch["a"].float().tolist()


def test_errors_are_those_of_the_buffer():
    with RayReplayBuffer(storage=partial(ListStorage, 10), remote_config=HERE) as rb:
        rb.extend([torch.zeros(2)])
        with pytest.raises(RowError, match="row 7 is not live"):
            rb[7]
        with pytest.raises(RuntimeError, match="sample: expected a batch size"):
            rb.sample()
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = rb.nothing
        for name in ("storage", "sampler", "writer", "transform", "snapshot"):
            with pytest.raises(AttributeError, match=f"RayReplayBuffer: {name} stays in the actor"):
                getattr(rb, name)
        with pytest.raises(TypeError, match=r"Checkpointer: .* got a list in an actor of Ray.*rb\.dumps"):
            Checkpointer("series", rb)
        assert len(rb) == 1
    with pytest.raises(RuntimeError, match="the buffer was closed"):
        len(rb)
    rb.close()
    assert not rb.is_alive


def test_what_making_the_buffer_raises_comes_back():
    with pytest.raises(ValueError, match="max_size: expected at least 1"):
        RayReplayBuffer(storage=partial(ListStorage, 0), remote_config=HERE)
    with pytest.raises(TypeError, match="unexpected argument 'nonsense'"):
        RayReplayBuffer(storage=ListStorage, nonsense=1, remote_config=HERE)


@pytest.mark.parametrize(
    "arguments", [{"shards": 2}, {"name": "list"}, {"transport": "flight"}, {"transport": "shared"}]
)
def test_what_needs_rows_that_processes_share_is_refused(arguments):
    with pytest.raises(ValueError, match="got a list: one actor keeps it"):
        RayReplayBuffer(storage=ListStorage, remote_config=HERE, **arguments)


def test_torchrls_other_spelling_says_what_to_call():
    with pytest.raises(TypeError, match="got a list. Call RayReplayBuffer"):
        TensorDictReplayBuffer(
            storage=partial(ListStorage, 10), service_backend="ray", service_backend_options={"remote_config": HERE}
        )


def test_rows_end_with_their_actor_and_every_call_says_so():
    rb = RayReplayBuffer(storage=partial(LazyStackStorage, 10), remote_config=HERE, batch_size=2)
    rb.add(ragged(1))
    other = rb.client()
    pid = ray.get(rb._actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    for call in (rb.sample, lambda: other.add(ragged(2)), lambda: len(rb), lambda: rb.write_count):
        with pytest.raises(ConnectionError, match="Its rows are in its memory alone, and lost if it is gone"):
            call()
    other.close()
    rb.close()


def test_torchrls_collector_writes_into_it():
    pytest.importorskip("torchrl", reason="torchrl is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.collectors.distributed import RayCollector
        from torchrl.envs import GymEnv
        from torchrl.envs.utils import RandomPolicy

        with RayReplayBuffer(storage=partial(LazyStackStorage, 1000), batch_size=8, remote_config=AWAY) as rb:
            collector = RayCollector(
                [partial(GymEnv, "CartPole-v1")],
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
            assert len(rb) == rb.write_count >= 64
            assert rb.sample()["next", "observation"].shape == (8, 4)
