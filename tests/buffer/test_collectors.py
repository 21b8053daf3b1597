"""TorchRL's collectors of several processes, writing to our buffers (semantics.md, section 4)."""

import multiprocessing
import time
import warnings

import pytest

from engram import LazyMemmapStorage, LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from tests import forkserver

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    collectors = pytest.importorskip("torchrl.collectors")
    from torchrl.envs import EnvCreator
    from torchrl.envs.utils import RandomPolicy

    from tests.buffer.counting import Counting

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's own


def uniform(storage):
    return TensorDictReplayBuffer(storage=storage, batch_size=16)


def prioritized(storage):
    return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=16)


@pytest.fixture(autouse=True)
def _imported_once():
    """Processes that come from the one which has imported torch and torchrl: importing them in each takes seconds."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    forkserver.start()
    yield
    multiprocessing.set_start_method(before, force=True)


# Each two of the choices meet in one of them.
@pytest.mark.parametrize(
    ("kind", "whole_batches", "started", "storage", "buffer"),
    [
        ("MultiSyncCollector", True, False, LazyTensorStorage, uniform),
        ("MultiSyncCollector", False, True, LazyMemmapStorage, prioritized),
        ("MultiAsyncCollector", True, True, LazyTensorStorage, prioritized),
        ("MultiAsyncCollector", False, False, LazyMemmapStorage, uniform),
    ],
)
def test_collectors_with_an_env_creator(kind, whole_batches, started, storage, buffer):
    rb = buffer(storage(1000))
    collector = getattr(collectors, kind)(
        [EnvCreator(Counting)] * 2,
        RandomPolicy(Counting().action_spec),
        frames_per_batch=20,
        total_frames=-1 if started else 100,
        replay_buffer=rb,
        extend_buffer=whole_batches,
    )
    try:
        assert rb.shared
        assert not rb.storage.initialized  # no fake row
        if started:
            collector.start()
            while rb.write_count < 100:
                time.sleep(0.01)
        else:
            for _ in collector:
                pass
    finally:
        collector.async_shutdown() if started else collector.shutdown()
    assert rb.write_count >= 100
    assert len(rb) == min(1000, rb.write_count)
    rows = rb[:]
    assert "_reset" not in rows.keys()
    assert (rows["next", "observation"] == rows["observation"] + 1).all()
    assert (rows["next", "done"].squeeze(-1) == (rows["next", "observation"][:, 0] == 5)).all()
    assert len(rows["collector", "traj_ids"].unique()) > 1
    assert rb.sample().batch_size == (16,)
    rb.close()


def test_a_collector_that_writes_a_fake_row():
    """As TorchRL's do where a storage does not say that its first write is coordinated: the row has more fields than theirs."""
    storage = LazyTensorStorage(1000)
    storage.shared_init = False
    rb = uniform(storage)
    collector = collectors.MultiSyncCollector(
        [EnvCreator(Counting)] * 2,
        RandomPolicy(Counting().action_spec),
        frames_per_batch=20,
        total_frames=40,
        replay_buffer=rb,
    )
    try:
        for _ in collector:
            pass
    finally:
        collector.shutdown()
    assert rb.write_count == 40
    assert "_reset" not in rb[:].keys()
    rb.close()


@pytest.mark.parametrize("whole_batches", [True, False])
@pytest.mark.parametrize("buffer", [uniform, prioritized])
def test_a_collector_of_one_process(buffer, whole_batches):
    rb = buffer(LazyTensorStorage(1000))
    collector = collectors.Collector(
        Counting(),
        RandomPolicy(Counting().action_spec),
        frames_per_batch=20,
        total_frames=60,
        replay_buffer=rb,
        extend_buffer=whole_batches,
    )
    try:
        assert list(collector) == [None] * 3  # rows are in the buffer
    finally:
        collector.shutdown()
    rows = rb[:]
    assert rb.write_count == len(rb) == 60
    assert (rows["next", "observation"] == rows["observation"] + 1).all()
    assert rb.sample().batch_size == (16,)
