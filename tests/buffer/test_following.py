"""Buffers that follow checkpoints: whose rows they hold, what they copy, and what they survive. Rows say themselves whose they are."""

import copy
import json
import os
import pickle
import shutil
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from engram import (
    IncompatibleCheckpoint,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.checkpoint.checkpointer import Checkpointer
from engram.saved import attempts, disk, series
from engram.saved.inspection import verify
from tests.network_files import Server
from tests.ranks.jobs import checkpointer, done, filled, job, steps_of, whos
from tests.waiting import until

ROWS = 64


def steps(first, n=ROWS):
    at = torch.arange(first, first + n)
    done_ = (at % 8 == 7).unsqueeze(1)
    return TensorDict({"at": at, "twice": 2.0 * at, "next": {"done": done_, "reward": at.float()}}, [n])


def saving(root, rb=None, **more):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=8) if rb is None else rb
    return rb, Checkpointer(root, rb, **more)


def follow(root, cls=ReplayBuffer, **more):
    return cls.follow(root, **{"every": 600.0, **more})


def at(rb):
    """The rows that are there. Each must be whole."""
    rows = rb[:]
    assert torch.equal(rows["twice"], 2.0 * rows["at"])
    return rows["at"].tolist()


# ---- rows ------------------------------------------------------------------------------------------------------------------


def test_rows_are_replaced_by_those_of_the_newest_checkpoint(tmp_path):
    rb, ck = saving(tmp_path / "root")
    rb.extend(steps(0, 10))
    ck.save(1)
    with follow(tmp_path / "root") as reader:
        assert type(reader) is TensorDictReplayBuffer
        assert reader.batch_size == 8
        assert at(reader) == list(range(10))
        assert not reader.refresh()
        for step in (2, 3, 7):
            rb.extend(steps(100 * step, 30))
            name = ck.save(step).name
            assert reader.refresh()
            assert at(reader) == at(rb)
            assert reader.followed[:2] == (name, step)
            stats = reader.stats()
            assert stats["followed_step"] == step
            assert 0 <= stats["followed_age"] < 3600
        assert reader.sample().batch_size == (8,)
        assert at(rb) == at(reader)


def test_the_log_has_one_line_for_the_buffer_whatever_it_follows(tmp_path, caplog):
    rb, checkpoints = saving(tmp_path)
    rb.extend(steps(0))
    checkpoints.save(1)
    caplog.set_level("INFO", "engram")
    with follow(tmp_path) as following:
        checkpoints.save(2)
        assert following.refresh()
    assert len([line for line in caplog.messages if line.startswith(f"{ROWS} rows in RAM")]) == 1


def test_a_thread_looks_by_itself(tmp_path):
    rb, ck = saving(tmp_path)
    rb.extend(steps(0, 10))
    ck.save(1)
    with follow(tmp_path, every=0.02) as reader:
        rb.extend(steps(10, 10))
        ck.save(2)
        until(lambda: reader.followed.step == 2, 60)
        assert at(reader) == list(range(20))


@pytest.mark.parametrize("prefetch", [None, 2])
def test_no_batch_has_rows_of_two_checkpoints(tmp_path, prefetch):
    rb, ck = saving(tmp_path)
    rb.extend(TensorDict({"of": torch.zeros(ROWS)}, [ROWS]))
    ck.save(1)
    seen, stop, failed = [], threading.Event(), []

    def sample(reader):
        try:
            while not stop.is_set():
                batch = reader.sample()["of"]
                assert len(set(batch.tolist())) == 1
                seen.append(batch[0].item())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    with follow(tmp_path, batch_size=32, prefetch=prefetch) as reader:
        thread = threading.Thread(target=sample, args=(reader,))
        thread.start()
        for step in range(2, 5):
            rb.extend(TensorDict({"of": torch.full((ROWS,), float(step))}, [ROWS]))
            ck.save(step)
            assert reader.refresh()
        stop.set()
        thread.join()
    assert not failed, failed
    assert seen == sorted(seen)


KINDS = {
    "plain": lambda: ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=SamplerWithoutReplacement(), batch_size=4),
    "priorities": lambda: PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(ROWS), batch_size=4),
    "tensordicts": lambda: TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(ROWS, lanes=2), batch_size=4, prefetch=2
    ),
    "the best": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(ROWS), writer=TensorDictMaxValueWriter(rank_key="twice"), batch_size=4
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_that_was_saved(tmp_path, kind):
    rb = KINDS[kind]()
    rows = rb.extend(steps(0, 20), **({"lane": 1} if kind == "tensordicts" else {}))
    rb.update_priority(rows, torch.arange(1.0, 21.0)) if "prio" in kind or kind == "tensordicts" else None
    rb.sample()
    saving(tmp_path, rb)[1].save(1)
    with follow(tmp_path) as reader:
        assert type(reader) is type(rb)
        assert type(reader.sampler) is type(rb.sampler)
        assert sorted(at(reader)) == list(range(20))
        assert reader.lanes == rb.lanes
        assert reader.sample().batch_size == (4,)
        ours, theirs = (one.sampler.state_dict().get("leaves") for one in (reader, rb))
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_another_sampler_storage_and_batch_size(tmp_path):
    rb, ck = saving(tmp_path, KINDS["tensordicts"]())
    rb.extend(steps(0, 32), lane=0)
    ck.save(1)
    slices = {"sampler": lambda: SliceSampler(slice_len=4), "storage": LazyTensorStorage(24), "batch_size": 8}
    with follow(tmp_path, TensorDictReplayBuffer, **slices) as reader:
        assert type(reader) is TensorDictReplayBuffer
        assert at(reader) == list(range(8, 32)), "the newest trajectories"
        batch = reader.sample()
        assert batch.batch_size == (8,)
        assert (batch["at"].view(2, 4).diff() == 1).all()
        rb.extend(steps(32, 8), lane=0)
        ck.save(2)
        assert reader.refresh()
        assert at(reader) == list(range(16, 40))


def test_a_list_and_numbers_of_its_own(tmp_path):
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    rb.extend([torch.tensor(i) for i in range(5)])
    saving(tmp_path, rb)[1].save(1)
    with pytest.raises(IncompatibleCheckpoint, match="pass storage=lambda: ListStorage"):
        follow(tmp_path)
    drawn = []
    for _ in range(2):
        with follow(tmp_path, storage=lambda: ListStorage(10), generator=torch.Generator().manual_seed(3)) as reader:
            drawn.append([reader.sample().tolist() for _ in range(5)])
    assert drawn[0] == drawn[1]


# ---- ranks -----------------------------------------------------------------------------------------------------------------


def save_ranks(ranks, rank, root, step):
    rb = filled(rank)
    checkpointer(root, rb, ranks).save(step)
    return whos(steps_of(rb))


@pytest.mark.parametrize("shard", [None, 2, [0, 2]])
def test_shards_of_ranks(tmp_path, shard):
    root = tmp_path / "root"
    who = done(job(3, save_ranks, root, 1))
    wanted = range(3) if shard is None else [shard] if isinstance(shard, int) else shard
    with follow(root, shard=shard, cache=tmp_path / "cache") as reader:
        assert set(reader[:]["who"].tolist()) == set().union(*(who[rank] for rank in wanted))
        assert reader.lanes == 2 * len(wanted)
        copied = {folder.name for folder in (tmp_path / "cache").glob("ckpt-*/rank-*")}
        assert copied == {f"rank-{rank:05d}-of-00003" for rank in wanted}
        more = done(job(3, save_ranks, root, 2))
        assert reader.refresh()
        assert set(reader[:]["who"].tolist()) == set().union(*(more[rank] for rank in wanted))
    with pytest.raises(ValueError, match=r"expected ranks in \[0, 3\), got \[3\]"):
        follow(root, shard=3)


# ---- copies ----------------------------------------------------------------------------------------------------------------


def big(first, n=3000):
    return {
        "at": torch.arange(first, first + n),
        "block": torch.arange(first, first + n)[:, None].expand(n, 1024).clone(),
    }


def test_only_what_is_new_is_copied_also_after_a_restart(tmp_path, monkeypatch):
    rb, ck = saving(tmp_path / "root", ReplayBuffer(storage=LazyTensorStorage(6000), batch_size=8))
    cache, copied = tmp_path / "cache", []
    write = disk.write
    monkeypatch.setattr(disk, "write", lambda fd, data, offset: (copied.append(len(data)), write(fd, data, offset)))
    rb.extend(big(0))
    ck.save(1)
    with follow(tmp_path / "root", cache=cache) as reader:
        rb.extend(big(3000))
        ck.save(2)
        copied.clear()
        assert reader.refresh()
        assert sum(copied) < 36e6, "what is new, and a piece of 16 MiB"
        assert reader["at"].tolist() == list(range(6000))
    copied.clear()
    with follow(tmp_path / "root", cache=cache) as reader:
        assert sum(copied) < 1e6, "what lies there is used again"
        assert len(reader) == 6000
    assert [folder.name for folder in cache.iterdir()] == [ck.latest]


def test_a_copy_that_was_damaged_is_made_again_and_names_say_nothing(tmp_path):
    rb, ck = saving(tmp_path / "root")
    rb.extend(steps(0, 10))
    name = ck.save(1).name
    with follow(tmp_path / "root", cache=tmp_path / "cache") as reader:
        assert at(reader) == list(range(10))
    for file in (tmp_path / "cache" / name).rglob("seg/*.bin"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    rb.extend(steps(10, 10))
    ck.save(2)
    with follow(tmp_path / "root", cache=tmp_path / "cache") as reader:
        assert at(reader) == list(range(20))


def test_a_cache_is_of_one_buffer(tmp_path):
    rb, ck = saving(tmp_path / "root")
    rb.extend(steps(0, 10))
    ck.save(1)
    again = pytest.raises(RuntimeError, match="another buffer that follows uses it")
    with follow(tmp_path / "root", cache=tmp_path / "cache"), again:
        follow(tmp_path / "root", cache=tmp_path / "cache")


# ---- leases ----------------------------------------------------------------------------------------------------------------


def test_a_lease_keeps_a_checkpoint_until_it_expires(tmp_path):
    rb, ck = saving(tmp_path, keep=1)
    rb.extend(steps(0, 10))
    first = ck.save(1).name
    lease = tmp_path / "lease-00000000000000aa.json"
    with series.Lease(tmp_path, first, seconds=30):
        second = ck.save(2).name
        assert [str(name) for name in attempts.names(tmp_path)] == [second, first]
        assert verify(tmp_path) == verify(tmp_path)._replace(problems=[], notes=[])
        shutil.copy(next(tmp_path.glob("lease-*")), lease)
    assert os.listdir(tmp_path).count(lease.name) == 1
    os.utime(lease, (time.time() - 31,) * 2)
    third = ck.save(3).name
    assert [str(name) for name in attempts.names(tmp_path)] == [third]
    os.utime(lease, (0, 0))
    ck.save(4)
    assert not lease.exists()


@pytest.mark.parametrize("raw", [b"", b"{}", b"x" * 5000, b'{"format":"engram.lease","version":[9,0]}'])
def test_a_lease_that_cannot_be_read_protects_nothing(tmp_path, raw):
    rb, ck = saving(tmp_path, keep=1)
    rb.extend(steps(0, 10))
    (tmp_path / "lease-0123456789abcdef.json").write_bytes(raw)
    for step in range(3):
        name = ck.save(step).name
    assert [str(one) for one in attempts.names(tmp_path)] == [name]
    report = verify(tmp_path)
    assert report.good
    assert [note.path.name for note in report.notes] == ["lease-0123456789abcdef.json"]


def test_a_lease_that_claims_eternity_ends(tmp_path):
    rb, ck = saving(tmp_path, keep=1)
    rb.extend(steps(0, 10))
    first = ck.save(1).name
    series.Lease(tmp_path, first, seconds=1 << 40)
    (file,) = tmp_path.glob("lease-*")
    assert json.loads(file.read_text())["checkpoint"] == first
    os.utime(file, (time.time() - series.MAX_LEASE_SECONDS - 1,) * 2)
    ck.save(2)
    assert not file.exists()
    assert len(attempts.names(tmp_path)) == 1


def test_what_is_copied_is_leased_by_the_clock_of_the_server(tmp_path):
    """On another machine, and 5,000 s behind both."""
    with Server(tmp_path, seconds=600, clock=-5000) as server:
        near, far = server.mount("near"), server.mount("far")
        rb, ck = saving(near / "root", keep=1)
        rb.extend(steps(0, 10))
        first = ck.save(1).name
        disk.look_again(far)
        with series.Lease(far / "root", first, seconds=600):
            ck.save(2)
            assert first in map(str, attempts.names(near / "root"))
        ck.save(3)
        assert len(attempts.names(near / "root")) == 1


def test_a_checkpoint_that_is_removed_while_it_is_copied(tmp_path, monkeypatch):
    """The next one is taken."""
    rb, ck = saving(tmp_path, keep=1, full_every=1)
    rb.extend(steps(0, 10))
    ck.save(1)
    monkeypatch.setattr(series.Series, "leased", lambda _: set())  # as if it had come too late

    copy_part, removed = series.Mirror._copy_part, []

    def amid(self, part, *more):
        if not removed:
            removed.append(ck.save(2).name)
            ck.prune()
        copy_part(self, part, *more)

    monkeypatch.setattr(series.Mirror, "_copy_part", amid)
    with follow(tmp_path) as reader:
        assert reader.followed.step == 2
        assert reader.followed.passed_over == ()
    assert not list(tmp_path.glob("lease-*"))


# ---- damage and death ------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    rb, ck = saving(tmp_path, full_every=1)
    rb.extend(steps(0, 10))
    ck.save(1)
    with follow(tmp_path) as reader:
        rb.extend(steps(10, 10))
        bad = ck.save(2)
        for file in bad.path.rglob("seg/*.bin"):
            file.chmod(0o600)
            file.write_bytes(b"\xff" * file.stat().st_size)
        with pytest.warns(UserWarning, match=f"{bad.name} is passed over: .*checksum"):
            assert not reader.refresh()
        assert at(reader) == list(range(10))
        assert reader.followed.passed_over == (bad.name,)
        assert not reader.refresh(), "said once"
        ck.save(3)
        assert reader.refresh()
        assert at(reader) == list(range(20))


def test_a_folder_that_goes_and_comes_back(tmp_path):
    rb, ck = saving(tmp_path / "root")
    rb.extend(steps(0, 10))
    ck.save(1)
    with follow(tmp_path / "root") as reader:
        (tmp_path / "root").rename(tmp_path / "away")
        with pytest.warns(UserWarning, match="the rows stay those of ckpt-"), pytest.raises(FileNotFoundError):
            reader.refresh()
        assert at(reader) == list(range(10))
        (tmp_path / "away").rename(tmp_path / "root")
        rb.extend(steps(10, 10))
        ck.save(2)
        assert reader.refresh()
        assert at(reader) == list(range(20))


def test_there_is_no_checkpoint_yet(tmp_path):
    rb, ck = saving(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected a complete checkpoint within 0.05 s, found none"):
        follow(tmp_path, timeout=0.05)
    rb.extend(steps(0, 10))
    thread = threading.Timer(0.05, ck.save, (1,))
    thread.start()
    with follow(tmp_path, timeout=60.0) as reader:
        assert at(reader) == list(range(10))
    thread.join()


# ---- what is refused, and the end ------------------------------------------------------------------------------------------

REFUSED = {
    "add": lambda rb: rb.add(steps(0, 1)[0]),
    "extend": lambda rb: rb.extend(steps(0, 2)),
    "empty": lambda rb: rb.empty(),
    "rb[i] =": lambda rb: rb.__setitem__(0, steps(0, 1)[0]),
    "set_at_": lambda rb: rb.set_at_("at", torch.zeros(1, dtype=torch.int64), [0]),
    "set_sampler": lambda rb: rb.set_sampler(RandomSampler()),
    "set_storage": lambda rb: rb.set_storage(LazyTensorStorage(3)),
    "set_writer": lambda rb: rb.set_writer(type(rb.writer)()),
    "append_transform": lambda rb: rb.append_transform(lambda td: td),
    "loads": lambda rb: rb.loads("nowhere"),
    "load_state_dict": lambda rb: rb.load_state_dict(rb.state_dict()),
    "share": lambda rb: rb.share(),
    "copy": copy.copy,
    "pickle": pickle.dumps,
}


def test_what_is_refused(tmp_path):
    rb, ck = saving(tmp_path)
    rb.extend(steps(0, 10))
    ck.save(1)
    with follow(tmp_path) as reader:
        for call, act in REFUSED.items():
            with pytest.raises(RuntimeError, match=r"follows checkpoints|read-only \(FollowingWriter\)"):
                pytest.fail(f"{call} gave {act(reader)!r}")
        assert at(reader) == list(range(10))
    with pytest.raises(
        TypeError, match="expected checkpoints of a PrioritizedReplayBuffer, got those for a TensorDictR"
    ):
        follow(tmp_path, PrioritizedReplayBuffer)
    with pytest.raises(TypeError, match="writer: expected none"):
        follow(tmp_path, writer=RandomSampler())
    with pytest.raises(ValueError, match="expected every and timeout above 0 s"):
        follow(tmp_path, every=0)
    with pytest.raises(RuntimeError, match=r"refresh: this buffer follows no checkpoints: ReplayBuffer\.follow makes"):
        rb.refresh()
    assert rb.followed is None
    rb.set_sampler(PrioritizedSampler(ROWS, 1.0, 0.5))


def test_a_sampler_that_a_checkpoint_does_not_describe(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=SliceSampler(slice_len=2), batch_size=4)
    rb.extend(steps(0, 16))
    saving(tmp_path, rb)[1].save(1)
    with pytest.raises(TypeError, match="does not say all of the SliceSampler that was saved: pass sampler="):
        follow(tmp_path)
    with follow(tmp_path, sampler=SliceSampler(slice_len=2)) as reader:
        assert (reader.sample()["at"].view(2, 2).diff() == 1).all()


def test_closing_ends_the_thread_and_removes_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rb, ck = saving(tmp_path / "root")
    rb.extend(steps(0, 10))
    ck.save(1)
    names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
    for drop in (False, True):
        reader = follow(tmp_path / "root")
        assert "engram-follow" in names()
        assert list(tmp_path.glob("engram-follow-*"))
        if not drop:
            reader.close()
            with pytest.raises(RuntimeError, match="closed"):
                reader.sample()
        del reader
        until(lambda: not ("engram-follow" in names() or list(tmp_path.glob("engram-follow-*"))), 60)
