"""Groups of one store while several processes write, and some of them die."""

import multiprocessing

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, NoSampleable, PromptGroupSampler, RandomSampler, ReplayBuffer
from tests import stress
from tests.samplers.groupers import rows, write, write_for_ever
from tests.serving.servers import serving
from tests.store.processes import Child
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:PromptGroupSampler", "ignore:this process was forked")


def store(folder, capacity, strategy="random"):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(capacity, scratch_dir=folder),
        sampler=PromptGroupSampler(num_groups=4, strategy=strategy),
        batch_size=12,
    )
    rb.extend(rows(9, 0, 30))
    return rb


def check(batch):
    """All rows are whole, and of one group each."""
    assert (batch["check"] == batch["query"] * 1_000_003 + batch["row"]).all()
    keys = batch["query"].reshape(4, 3)
    assert (keys == keys[:, :1]).all()
    assert len(set(keys[:, 0].tolist())) == 4


def check_all(rb):
    """Groups are those of the rows that are there."""
    live = rb[:]
    assert (live["check"] == live["query"] * 1_000_003 + live["row"]).all()
    assert rb.sampler.groups == len(set(live["query"].tolist()))


@pytest.mark.parametrize("strategy", ["random", "recency", "reward"])
def test_batches_are_groups_while_others_write(tmp_path, strategy):
    """The writers overwrite all rows several times; one of them has another sampler."""
    rb = store(tmp_path / "s", 200, strategy)
    writers = [
        Child(write, tmp_path / "s", 1, stress.size(60, 2_000), 20),
        Child(write, tmp_path / "s", 2, stress.size(60, 2_000), 20, RandomSampler()),
    ]
    for _ in range(stress.size(200, 10_000)):
        check(rb.sample())
    for child in writers:
        child.join()
    check_all(rb)
    assert not (rb[:]["query"] >= 9_000).any()
    rb.close()


@pytest.mark.stress
def test_writers_that_are_killed_leave_groups_whole(tmp_path):
    rb = store(tmp_path / "s", 150)
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=12)
    for kill in range(stress.size(4, 100)):
        ready = multiprocessing.get_context("fork").Event()
        child = Child(write_for_ever, tmp_path / "s", kill % 3, 15, ready)
        assert ready.wait(60)
        for _ in range(20 + 7 * kill % 30):
            check(rb.sample())
            check(reader.sample())
        child.kill()
        rb.extend(rows(8, 0, 10))
        for _ in range(20):
            check(rb.sample())
            check(reader.sample())
        # What the dead one had written and not told is noted when its death is noticed.
        until(lambda: rb.sample() is not None and rb.sampler.groups == len(set(rb[:]["query"].tolist())))
        check_all(rb)
    reader.close()
    rb.close()


def test_a_server_draws_groups(tmp_path):
    rb = store(tmp_path / "s", 90)
    with serving(tmp_path / "s") as served:
        there = ReplayBuffer.connect(served.address, batch_size=12)
        there.extend(rows(4, 0, 20))
        for _ in range(5):
            check(there.sample())
        there.close()
    check_all(rb)
    rb.close()


def test_groups_survive_the_death_of_all(tmp_path):
    def begin(ready):
        rb = store(tmp_path / "s", 90)
        rb.sample()
        write_for_ever(tmp_path / "s", 3, 7, ready)

    ready = multiprocessing.get_context("fork").Event()
    child = Child(begin, ready)
    assert ready.wait(60)
    child.kill()
    rb = ReplayBuffer.open(tmp_path / "s", batch_size=12)
    check_all(rb)
    for _ in range(20):
        check(rb.sample())
    rb.close()


def test_a_forked_child_of_a_private_buffer_has_groups_of_its_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PromptGroupSampler(num_groups=2), batch_size=4)
    rb.extend({"query": torch.tensor([1, 1, 2, 2])})
    rb.sample()

    def child():
        rb.extend({"query": torch.tensor([3, 3])})
        assert rb.sampler.groups == 3
        rb.sample()

    Child(child).join()
    assert rb.sampler.groups == 2


# ---- groups that are handed out once -----------------------------------------------------------------------------------


def answered(folder):
    """200 groups of 4 rows."""
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(800, scratch_dir=folder),
        sampler=PromptGroupSampler(samples_per_group=4, max_uses=1),
        batch_size=8,
    )
    rb.extend(rows(0, 0, 800) | {"query": torch.arange(800) // 4, "check": torch.arange(800)})
    return rb


def draw_all(folder, log):
    """Say which groups were drawn, one write for each batch."""
    rb = ReplayBuffer.open(folder, batch_size=8)
    with log.open("ab", buffering=0) as out:
        while rb.can_sample():
            try:
                batch = rb.sample()
            except NoSampleable:  # another process has drawn the last ones
                break
            groups = batch["check"].reshape(2, 4) // 4
            assert (groups == groups[:, :1]).all()
            assert (batch["check"] % 4).reshape(2, 4).sort().values.tolist() == [[0, 1, 2, 3]] * 2
            out.write(bytes(groups[:, 0].tolist()))
    rb.close()


def test_processes_share_groups_out_exactly(tmp_path):
    rb = answered(tmp_path / "s")
    logs = [tmp_path / f"{i}" for i in range(3)]
    children = [Child(draw_all, tmp_path / "s", log) for log in logs]
    for child in children:
        child.join()
    drawn = sorted(b"".join(log.read_bytes() for log in logs))
    assert drawn == list(range(200))
    assert rb.sampler.groups == 0
    rb.close()


def test_a_server_hands_groups_out_once(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(80, scratch_dir=tmp_path / "s"),
        sampler=PromptGroupSampler(
            samples_per_group=4, max_uses=1, ready=["score"], max_staleness=1, policy_version="version"
        ),
        batch_size=8,
    )
    rb.extend(
        {
            "query": torch.arange(16) // 4,
            "score": torch.tensor([0.0] * 11 + [float("nan")] * 5),
            "version": torch.tensor([0] * 4 + [1] * 12),
        }
    )
    with serving(tmp_path / "s") as served:
        there = ReplayBuffer.connect(served.address, batch_size=8)
        assert there.can_sample()
        there.sampler.consumer_version = 2
        assert rb.sampler.consumer_version == 2
        assert not there.can_sample()  # of two groups with all scores one is too old
        with pytest.raises(NoSampleable, match="1 of 2 groups"):
            there.sample(timeout=0)
        rb.set_at_("score", torch.ones(1), torch.tensor([11]))
        assert sorted(there.sample(timeout=60)["query"].tolist()) == [1] * 4 + [2] * 4
        assert not there.can_sample()
        there.close()
    rb.close()


def test_a_process_that_is_killed_takes_no_group_that_another_one_gets(tmp_path):
    rb = answered(tmp_path / "s")
    logs = [tmp_path / f"{i}" for i in range(4)]
    for log in logs[:3]:
        child = Child(draw_all, tmp_path / "s", log)
        while not (log.exists() and log.stat().st_size) and rb.can_sample():
            pass
        child.kill()
    draw_all(tmp_path / "s", logs[3])
    drawn = b"".join(log.read_bytes() for log in logs if log.exists())
    assert len(set(drawn)) == len(drawn)
    assert len(drawn) >= 200 - 3 * 2  # the two of a batch that was drawn and not said
    assert not rb.can_sample()
    rb.close()
