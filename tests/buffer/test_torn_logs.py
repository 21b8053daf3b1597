"""A sampling log of a process that was killed, and one whose bytes are others."""

import hashlib
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import CorruptCheckpoint, IncompatibleCheckpoint, SamplingLog, TensorDictReplayBuffer, replay_draws
from engram.format.draws import MAGIC
from tests.buffer.logged import made, raw, same, steps

PROGRAM = """
import hashlib, sys
import torch
from engram import LazyMemmapStorage, PrioritizedSampler, SamplingLog, TensorDictReplayBuffer
from tests.buffer.logged import made, raw, steps

rb = made("prioritized", storage=LazyMemmapStorage(120, scratch_dir=sys.argv[1]))
rb.extend(steps(0, 60))
SamplingLog(sys.argv[2], rb)
first = 60
while True:
    batch = rb.sample()
    text = b"".join(raw(batch[key]) for key in ("at", "obs", "index", "priority_weight", "index_generation"))
    print(hashlib.sha256(text).hexdigest(), flush=True)
    if first < 120:
        rb.extend(steps(first, 1))
        first += 1
"""


def test_every_batch_that_was_handed_out_before_a_kill_comes_again(tmp_path):
    store, log = tmp_path / "store", tmp_path / "draws.log"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(store), str(log)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    try:
        said = [program.stdout.readline().strip() for _ in range(100)]
        program.send_signal(signal.SIGKILL)
        said += program.stdout.read().split("\n")[:-1]  # whole lines
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
    with TensorDictReplayBuffer.open(store) as rb:
        replayed = list(replay_draws(log, rb))
        assert [again.state for again in replayed] == ["same"] * len(replayed)
        found = [digest(again.batch) for again in replayed]
        assert len(found) in (len(said), len(said) + 1), "the last one may not have been said"
        assert found[: len(said)] == said
        with SamplingLog(log, rb):
            rb.sample(8)
        assert len(list(replay_draws(log, rb))) == len(found) + 1


def digest(batch):
    text = b"".join(raw(batch[key]) for key in ("at", "obs", "index", "priority_weight", "index_generation"))
    return hashlib.sha256(text).hexdigest()


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A buffer, what was drawn of it, and the bytes of the log after each batch."""
    path = tmp_path_factory.mktemp("logged") / "draws.log"
    rb, drawn, ends = made("n-step prioritized"), [], []
    with SamplingLog(path, rb):
        for turn in range(4):
            rb.extend(steps(turn * 12, 12))
            drawn.append(rb.sample())
            ends.append(path.stat().st_size)
    return rb, drawn, ends, path.read_bytes()


def test_a_log_that_ends_anywhere(logged, tmp_path):
    rb, drawn, ends, whole = logged
    path = tmp_path / "draws.log"
    for end in sorted(
        {*range(len(MAGIC), len(whole), 37), *ends, *(end + 1 for end in ends[:-1]), *(e - 1 for e in ends)}
    ):
        path.write_bytes(whole[:end])
        there = sum(end >= of for of in ends)
        replay = replay_draws(path, rb)
        batches = [again.batch for again in replay]
        assert same(batches, drawn[:there])
        with SamplingLog(path, rb):
            more = rb.sample()
        again = replay_draws(path, rb)
        assert same([it.batch for it in again], [*drawn[:there], more])
        assert again.torn_bytes == 0


@pytest.mark.parametrize("size", range(len(MAGIC)))
def test_a_log_that_was_just_made(logged, tmp_path, size):
    path = tmp_path / "draws.log"
    path.write_bytes(MAGIC[:size])
    with SamplingLog(path, logged[0]):
        pass
    assert path.read_bytes() == MAGIC


def test_zeros_at_the_end_are_cut_off_and_damage_before_it_is_not(logged, tmp_path):
    rb, drawn, ends, whole = logged
    path = tmp_path / "draws.log"
    path.write_bytes(whole + bytes(5000))
    replay = replay_draws(path, rb)
    assert same([again.batch for again in replay], drawn)
    assert replay.torn_bytes == 5000
    damaged = bytearray(whole)
    damaged[ends[1] + 100] ^= 1
    path.write_bytes(damaged)
    replay = replay_draws(path, rb)
    assert same([next(replay).batch, next(replay).batch], drawn[:2])
    for refused in (lambda: next(replay), lambda: SamplingLog(path, rb)):
        with pytest.raises(CorruptCheckpoint, match=f"at byte {ends[1]}: .*whole records follow it"):
            refused()
    assert path.read_bytes() == damaged


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_no_change_of_bytes_gives_another_batch(logged, tmp_path_factory, changes):
    rb, drawn, _, whole = logged
    damaged = bytearray(whole)
    for at, value in changes:
        damaged[at % len(whole)] = value
    check_no_other_batch(rb, drawn, damaged, tmp_path_factory)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nor_do_bytes_whose_sums_are_right(logged, tmp_path_factory, data):
    rb, drawn, _, whole = logged
    records, at = [], len(MAGIC)
    while at < len(whole):
        kind, n = int.from_bytes(whole[at + 4 : at + 8], "little"), int.from_bytes(whole[at + 8 : at + 16], "little")
        records.append((kind, bytearray(whole[at + 24 : at + 24 + n])))
        at += 24 + n
    which = data.draw(st.integers(0, len(records) - 1))
    kind, raw_bytes = records[which]
    for _ in range(data.draw(st.integers(1, 3))):
        raw_bytes[data.draw(st.integers(0, len(raw_bytes) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytearray(MAGIC)
    for kind, raw_bytes in records:
        damaged += record(kind, raw_bytes)
    check_no_other_batch(rb, drawn, damaged, tmp_path_factory, said=False)


def record(kind, payload):
    """As docs/sampling-log.md describes it."""
    import xxhash

    head = b"DRAW" + kind.to_bytes(4, "little") + len(payload).to_bytes(8, "little")
    return head + xxhash.xxh3_64_intdigest(head + bytes(payload)).to_bytes(8, "little") + payload


def check_no_other_batch(rb, drawn, damaged, folders, *, said=True):
    """``said``: what the sampler said is compared, too, which only the sum of a record protects."""
    path = folders.mktemp("damaged") / "draws.log"
    path.write_bytes(damaged)
    try:
        for again in replay_draws(path, rb):
            if again.state == "same":
                keys = [key for key in again.batch.keys(True, True) if said or key in ("at", "obs", ("next", "reward"))]
                assert any(all(same(again.batch.get(key), batch.get(key)) for key in keys) for batch in drawn)
    except (CorruptCheckpoint, IncompatibleCheckpoint):
        pass
