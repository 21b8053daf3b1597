"""Ranks that never wrote anything: their shards are empty, and buffers that are restored into take the schema of others."""

import pytest
import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage, PrioritizedSampler, TensorDictReplayBuffer
from engram.cli.reshard import reshard
from engram.saved import attempts
from engram.saved.checkpoints import Checkpoint
from tests.ranks.jobs import buffer, checkpointer, done, job, play, steps_of


def write(ranks, rank, root, writers):
    rb = buffer()
    if rank in writers:
        play(rb, rank, 0, [5, 3])
        play(rb, rank, 1, [2, 4])
    checkpointer(root, rb, ranks).save(7)
    return steps_of(rb) if rank in writers else set()


def load(ranks, rank, root, written=()):
    rb = buffer()
    if rank in written:
        play(rb, 50 + rank, 0, [9])
    report = checkpointer(root, rb, ranks).restore()
    return report, rb


@pytest.mark.parametrize("writers", [(0,), (1,), ()])
@pytest.mark.parametrize("written", [(), (0, 1)])
def test_back_to_as_many_each_has_what_it_had(tmp_path, writers, written):
    saved = done(job(3, write, tmp_path, writers))
    loaded = done(job(3, load, tmp_path, written))
    for rank, (steps, (report, rb)) in enumerate(zip(saved, loaded, strict=True)):
        assert report.dealt is None
        assert rb.storage.initialized == (rank in writers or rank in written)
        assert len(rb) == len(steps)
        assert not steps or steps_of(rb) == steps
        play(rb, rank, 0, [4], first=10)  # and goes on
        assert len(rb.sample()) == 8


@pytest.mark.parametrize("writers", [(0,), (2,), (1, 2), ()])
@pytest.mark.parametrize("written", [(), (0,)])
@pytest.mark.parametrize("n", [2, 4])
def test_dealt_out_to_others(tmp_path, writers, written, n):
    saved = set.union(*done(job(3, write, tmp_path, writers)))
    loaded = done(job(n, load, tmp_path, written))
    parts = [steps_of(rb) if rb.storage.initialized else set() for _, rb in loaded]
    assert sum(map(len, parts)) == len(saved)
    assert set.union(*parts) == saved
    assert loaded[0][0].dealt["kept"]["steps"] == 14 * len(writers)
    assert [shard["saved"]["steps"] for shard in loaded[0][0].dealt["shards"]] == [
        14 * (rank in writers) for rank in range(3)
    ]
    for rank, (_, rb) in enumerate(loaded):
        if writers:
            assert rb.storage.initialized  # the fields are known, if there is nothing for it
            assert rb.sampler.alpha == 0.7
        play(rb, rank, 0, [4], first=10)
        assert len(rb.sample()) == 8


@pytest.mark.parametrize("writers", [(1,), ()])
def test_offline(tmp_path, writers):
    saved = set.union(*done(job(2, write, tmp_path / "old", writers)))
    reshard(
        tmp_path / "old",
        tmp_path / "new",
        3,
        2,
        capacity=64,
        open_ones="drop",
        headless="drop",
        overflow="cut",
        max_drop_fraction=0.5,
        dry_run=False,
        as_json=False,
    )
    loaded = done(job(3, load, tmp_path / "new"))
    assert [report.dealt for report, _ in loaded] == [None] * 3
    assert set.union(*(steps_of(rb) if rb.storage.initialized else set() for _, rb in loaded)) == saved


@pytest.mark.filterwarnings("ignore:Checkpointer. no field says where")
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage, "columns"])
def test_every_storage_takes_the_schema(tmp_path, kind):
    def made():
        if kind is ListStorage:
            return TensorDictReplayBuffer(storage=ListStorage(20), batch_size=4)
        if kind == "columns":
            return TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=4)
        return TensorDictReplayBuffer(storage=kind(20), sampler=PrioritizedSampler(20, 0.6, 0.4), batch_size=4)

    shape = [5, 2] if kind == "columns" else [10]
    data = TensorDict({"obs": torch.arange(10).reshape(shape)}, shape)

    def act(ranks, rank):
        rb = made()
        if rank == 1:
            rb.extend(data)
        ck = checkpointer(tmp_path, rb, ranks)
        ck.save(1)
        again = made()
        checkpointer(tmp_path, again, ranks).restore(resume="exact")
        assert len(again) == (len(rb) if rank == 1 else 0)
        again.extend(data)  # the first write of rank 0
        return again[:]["obs"] if kind is not ListStorage else torch.stack([again[i]["obs"] for i in range(len(again))])

    first, second = done(job(2, act))
    assert sorted(second.reshape(-1).tolist()) == sorted(2 * list(range(10)))
    assert sorted(first.reshape(-1).tolist()) == list(range(10))


def test_the_first_write_comes_between_two_saves(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        ck = checkpointer(tmp_path, rb, ranks)
        if rank == 0:
            play(rb, rank, 0, [4])
        ck.save(1)
        play(rb, rank, 1, [6])
        ck.save(2)
        again = buffer()
        checkpointer(tmp_path, again, ranks).restore()
        return steps_of(again) == steps_of(rb)

    assert done(job(2, act)) == [True, True]


def test_a_crash_checkpoint_has_an_empty_shard_too(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        if rank == 2:
            play(rb, rank, 0, [4])
        ck = checkpointer(tmp_path, rb, ranks)
        epoch = ck._job.protocol.claim(5.0)
        name = b""
        if rank == 0:
            name = attempts.begin(
                tmp_path, step=9, epoch=epoch, world=3, trigger="crash", attempt="crash1"
            ).name.encode()
        folder = tmp_path / ranks.gather(name, 5.0)[0].decode()
        if rank != 1:
            ck._job.write_crash(folder)

    done(job(3, act))
    rb = buffer()
    report = checkpointer(tmp_path, rb, job(1, lambda ranks, _: ranks)[0]).restore(allow_partial=True)
    assert report.missing == (1,)
    assert len(rb) == 4


def _rows(**columns):
    return TensorDict(columns, [3])


OBS, ACT, DONE = torch.zeros(3, 2), torch.zeros(3), torch.zeros(3, dtype=torch.bool)
UNLIKE = {
    "shape": (
        [_rows(obs=OBS, act=ACT), _rows(obs=OBS[:, :1], act=ACT)],
        "field obs: expected shape [2] float32, got shape [1] float32",
    ),
    "dtype": (
        [_rows(obs=OBS, act=ACT), _rows(obs=OBS, act=ACT.double())],
        "field act: expected shape [] float32, got shape [] float64",
    ),
    "missing": ([_rows(obs=OBS, next={"done": DONE}), _rows(obs=OBS)], "missing [('next', 'done')]"),
    "more": ([_rows(obs=OBS), _rows(obs=OBS, act=ACT)], "unknown ['act']"),
    "order": ([_rows(obs=OBS, act=ACT), _rows(act=ACT, obs=OBS)], "fields in another order: expected obs where act is"),
    "roles": (
        [_rows(obs=OBS, act=ACT), _rows(obs=OBS, act=ACT)],
        "field act: expected shape [] float32, got shape [] float32 as env_id",
    ),
}


@pytest.mark.filterwarnings("ignore:Checkpointer. no field says where")
@pytest.mark.parametrize("what", UNLIKE)
def test_other_fields_are_still_refused_at_the_save_with_the_first_that_differs(tmp_path, what):
    rows, said = UNLIKE[what]

    def act(ranks, rank):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
        if rank:
            rb.extend(rows[rank == 2])
        roles = {"act": "env_id"} if what == "roles" and rank == 2 else None
        checkpointer(tmp_path, rb, ranks, roles=roles).save(1)

    for error in job(4, act):
        assert f"expected one schema on all ranks, got 2: rank 2, beside ranks 1, 3: {said}" in str(error)


def test_a_shard_without_fields_has_no_rows_of_others(tmp_path):
    """The manifest names the schema of those that were written, and all shards are found whole."""
    done(job(2, write, tmp_path, (1,)))
    (name,) = attempts.names(tmp_path)
    with Checkpoint(tmp_path / str(name)) as checkpoint:
        assert [*checkpoint.problems("full")] == []
        assert checkpoint.manifest.schema_sum == checkpoint.shard(1).schema_sum != checkpoint.shard(0).schema_sum
