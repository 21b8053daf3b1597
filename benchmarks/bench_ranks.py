"""Claim: M shards restart as N at the speed of memory and disk, and a save of many ranks stops none of them.

Planning: 10^6 episodes of 64 shards are resharded to 48 ranks of two lanes, in a separate process. Measured are its
time, and how far its resident set grows, tables included.

Restore: a job of M ranks saved two lanes of episodes of different lengths each; a job of N ranks restores them into
empty buffers with priorities; every episode is kept. Compared with "copying": each of N processes reads an equal
share of all files of the same checkpoint (rows, and the tickets and priorities that a restore reads as well) into
new memory of the kind that stores have (private, huge pages where available), one MiB at a time, in one thread (a
restore has two), and does nothing else. From disk, which is judged: the page cache is dropped before both. From
memory, which is shown: there, copying runs at the speed of memory, while each rank also reads other ranks' parts of
shared blocks, checks everything, and moves rows to their places. If free memory is fragmented, huge pages take
seconds to allocate, for both sides; the quartiles show it.

Memory: the maximum growth of a rank's resident set while it restores, beyond its rows. Judged for frames: the
tickets and priorities of millions of small rows, which the store keeps, take some 100 MiB themselves.

A save of four ranks: all of them take steps (a prioritized sample of 256, its update, a reduction over all ranks)
and then save in the background, full copies. Measured are how long the call stops the slowest rank, the agreement
on the step included, and the longest step until the save has ended, compared with the longest of as many steps
without a save.

Requests: a rank requests a save at a random step. Measured is after how many calls of ``poll`` all ranks save, at
the same step, as a share of ``poll_every``. Four ranks on fewer cores also wait for each other's turn.

Files are written where ``tempfile`` puts them.
"""

import gc
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import resident, rivals
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.jobs import Job, Member
from benchmarks.machine import drop_cache
from benchmarks.timing import Effort, Side, Spread, Timing, alternate, once

EPISODES, SHARDS, TARGETS = 10**6, 64, 48
PLANS = 5

RESTORES = Effort(calls=1, blocks=7, warmup=1, lead=0)
GB = 10**9
SHAPES = ((2, 3), (3, 2))
KINDS = {"frames": (2.0, (200, 800)), "small": (1.0, (100, 300))}
"""Gigabytes of all shards, and the lengths of their episodes."""
QUICK = 0.2
RESIDENT_MIB = 64
PIECE = 1 << 20
LANES = 2

WORLD = 4
STALL_ROWS, STALLS = 10**6, 9
BATCH = 256
REQUESTS, POLL_EVERY = 20, 10


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """engram alone; ``share`` below 1 takes less data, too, where sizes are judged nothing then."""
    if libraries["engram"].module is None:
        return
    for row in _planning(share):
        yield row
    for kind, (size, lengths) in KINDS.items():
        for saved_by, loaded_by in SHAPES:
            for row in _restores(kind, saved_by, loaded_by, size * (1 if share >= 1 else QUICK), lengths, share):
                yield row if share >= 1 else row.unjudged()
    rows = STALL_ROWS if share >= 1 else round(QUICK * STALL_ROWS)
    with Job(WORLD) as job, tempfile.TemporaryDirectory() as name:
        job.each(_train_with, Path(name), rows)
        for row in _stalls(job, rows):
            yield row if share >= 1 else row.unjudged()
        yield _requests(job)


# ---- planning --------------------------------------------------------------------------------------------------------


def _planning(share: float) -> Iterator[Row]:
    found = []
    for _ in range(max(3, round(PLANS * share))):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(_plan_once).result())
    what = f"a plan · {EPISODES:.0e} episodes, {SHARDS} shards, {TARGETS} ranks"
    for key, against, unit, values in zip(
        ("time", "memory"), ("10 s", "200 MB"), ("s", "MB"), zip(*found, strict=True), strict=True
    ):
        spread = Spread.of(values)
        compared = [Comparison(against, "value", spread, FLOORS[f"ranks/plan/{key}", against])]
        yield Row(f"ranks/plan/{key}", f"{what} · {key}", {"engram": spread}, compared, unit=unit)


def _plan_once() -> tuple[float, float]:
    """Seconds of a plan and its digest, and MB that the resident set of this process grows, tables included."""
    from engram.reshard.plan import Source, Target, plan_by_trajectory
    from engram.saved.description import HAS_FIRST, HAS_LAST

    before = resident.now()
    dice = np.random.default_rng(0)
    sources, total = [], 0
    for _ in range(SHARDS):
        lengths = dice.integers(50, 500, EPISODES // SHARDS)
        ends = np.cumsum(lengths)
        table = np.stack([np.zeros_like(ends), ends - lengths, ends, ends, np.full_like(ends, HAS_FIRST | HAS_LAST)], 1)
        sources.append(Source(int(ends[-1]) + 1, table))
        total += int(ends[-1])
    targets = [Target(2, round(1.01 * total / TARGETS / 2))] * TARGETS
    elapsed_ms, plan = once(partial(plan_by_trajectory, sources, targets))
    hashing_ms, _ = once(lambda: plan.digest)
    if plan.kept["steps"] != total:
        raise RuntimeError(f"expected all {total} steps to be kept, got {plan.kept}")
    return (elapsed_ms + hashing_ms) / 1e3, (resident.peak() - before) / 1e6


# ---- restoring -------------------------------------------------------------------------------------------------------


def _restores(
    kind: str, saved_by: int, loaded_by: int, size: float, lengths: tuple[int, int], share: float
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with Job(saved_by) as job:
            steps = sum(job.each(_save_episodes, root, kind, size * GB / saved_by, lengths))
        files = sorted((str(file), file.stat().st_size) for file in root.glob("ckpt-*/rank-*/**/*") if file.is_file())
        nbytes = sum(size for _, size in files)
        os.sync()  # what is not on disk stays in memory
        what = f"restore {saved_by} to {loaded_by} ranks · {nbytes / GB:.1f} GB, {kind}"
        move = f"{kind}/{saved_by}-{loaded_by}"
        with Job(loaded_by) as job:

            def prepare(task: Callable[..., None], *arguments: Any, drop: bool) -> None:
                job.each(task, *arguments)
                if drop:
                    drop_cache(root)

            for where, drop in (("disk", True), ("memory", False)):
                sides = [
                    Side("engram", partial(job.each, _restore), partial(prepare, _empty, root, kind, steps, drop=drop)),
                    Side("copying", partial(job.each, _copy, files), partial(prepare, _forget, drop=drop)),
                ]
                timing = alternate(sides, RESTORES.scaled(share))
                yield timed(f"ranks/restore/{where}/{move}", f"{what} · from {where}", timing, share=("copying",))
            job.each(_empty, root, kind, steps)
            grown = Spread.of([max(job.each(_grown))])
    key, against = f"ranks/memory/{move}", f"{RESIDENT_MIB} MiB"
    compared = [Comparison(against, "value", grown, FLOORS.get((key, against)))]
    yield Row(key, f"{what} · memory beyond the rows, at most", {"engram": grown}, compared, unit="MiB")


def _steps(kind: str, numbers: torch.Tensor, ends: torch.Tensor) -> TensorDict:
    """Rows of an episode each, of which the last one ends it."""
    n = len(numbers)
    following = {"reward": torch.rand(n, 1), "done": ends.unsqueeze(1)}
    if kind == "frames":
        fields: dict[str, Any] = {
            "pixels": torch.randint(256, (n, 4, 84, 84), dtype=torch.uint8),
            "action": torch.zeros(n, dtype=torch.int64),
        }
    else:
        fields = {"obs": torch.randn(n, 17), "action": torch.randn(n, 6), "episode": numbers}
        following["obs"] = torch.randn(n, 17)
    return TensorDict({**fields, "next": TensorDict(following, [n])}, [n])


def _row_bytes(kind: str) -> int:
    return sum(
        leaf.nbytes for leaf in _steps(kind, torch.arange(1), torch.ones(1, dtype=torch.bool)).values(True, True)
    )


def _replay(rows: int) -> Any:
    from engram import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

    capacity = rows // LANES * LANES
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity, lanes=LANES),
        sampler=PrioritizedSampler(capacity, 0.6, 0.4),
        batch_size=BATCH,
    )


def _save_episodes(member: Member, root: Path, kind: str, nbytes: float, lengths: tuple[int, int]) -> int:
    """Fill both lanes of this rank with whole episodes and save; the steps."""
    from engram import Checkpointer

    rows = round(nbytes / _row_bytes(kind))
    replay = _replay(rows)
    dice = random.Random(member.rank)
    for lane in range(LANES):
        episode, left = 0, rows // LANES
        while left >= lengths[1]:
            length = dice.randint(*lengths)
            ends = torch.zeros(length, dtype=torch.bool)
            ends[-1] = True
            replay.extend(_steps(kind, torch.full((length,), episode), ends), lane=lane)
            episode, left = episode + 1, left - length
    replay.update_priority(torch.arange(len(replay)), torch.rand(len(replay)))
    Checkpointer(root, replay, ranks=member.ranks).save(1)
    return len(replay)


def _forget(member: Member) -> None:
    """Let go of all memory of the last round, so that both sides get what the other one had."""
    member.kept.clear()
    gc.collect()  # a buffer and its parts know each other


def _empty(member: Member, root: Path, kind: str, steps: int) -> None:
    """A buffer with room for a share of the steps, and a little more: shares are equal but for an episode."""
    from engram import Checkpointer

    _forget(member)
    replay = _replay(round(steps / member.world * 1.02) + 2 * KINDS[kind][1][1])
    member.kept.update(replay=replay, kind=kind, checkpoints=Checkpointer(root, replay, ranks=member.ranks))


def _restore(member: Member) -> None:
    report = member.kept["checkpoints"].restore()
    if report.dealt["kept"] != report.dealt["saved"]:
        raise RuntimeError(f"expected all steps to be kept, got {report}")


def _copy(member: Member, files: list[tuple[str, int]]) -> None:
    """Read this rank's share of all bytes, one file behind the other, into new memory."""
    total = sum(size for _, size in files)
    begin, end = (total * rank // member.world for rank in (member.rank, member.rank + 1))
    memory = mmap.mmap(-1, end - begin, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view, done, at = memoryview(memory), 0, 0
    for name, size in files:
        low, high = max(begin, at) - at, min(end, at + size) - at
        at += size
        if low >= high:
            continue
        fd = os.open(name, os.O_RDONLY)
        while low < high:
            got = os.preadv(fd, [view[done : done + min(PIECE, high - low)]], low)
            low, done = low + got, done + got
        os.close(fd)
    member.kept.update(view=view, memory=memory)


def _grown(member: Member) -> float:
    """MiB that this process grows while it restores, at most, beyond its rows."""
    resident.forget_peak()
    before = resident.now()
    _restore(member)
    rows = len(member.kept["replay"]) * _row_bytes(member.kept["kind"])
    return (resident.peak() - before - rows) / 2**20


# ---- saving, and who asks for it -------------------------------------------------------------------------------------


def _train_with(member: Member, root: Path, rows: int) -> None:
    from engram import Checkpointer

    replay = _replay(rows)
    piece = 10**4
    for lane in range(LANES):
        for first in range(0, rows // LANES, piece):
            numbers = torch.arange(first, min(first + piece, rows // LANES))
            replay.extend(_steps("small", numbers // 200, numbers % 200 == 199), lane=lane)
    replay.update_priority(torch.arange(len(replay)), torch.rand(len(replay)))
    checkpoints = Checkpointer(root, replay, ranks=member.ranks, keep=1, full_every=1, poll_every=POLL_EVERY)
    member.kept.update(replay=replay, checkpoints=checkpoints, step=0)


def _step(member: Member) -> None:
    """What a learner does with a replay buffer, and with the others."""
    from torch import distributed

    replay = member.kept["replay"]
    batch, info = replay.sample(return_info=True)
    replay.update_priority(info["index"], batch["next", "reward"].flatten())
    distributed.all_reduce(batch["obs"].mean(0))
    member.kept["step"] += 1


def _stalls(job: Job, rows: int) -> Iterator[Row]:
    rounds = [job.each(_stall) for _ in range(STALLS + 1)][1:]  # the first one makes what later ones have
    call, saving, alone = ([max(answer[i] for answer in answers) for answers in rounds] for i in range(3))
    key, against, spread = "ranks/stall/call", "50 ms", Spread.of(call)
    compared = [Comparison(against, "value", spread, FLOORS[key, against])]
    what = f"save(wait=False) of {WORLD} ranks · {rows:.0e} rows each"
    yield Row(key, f"{what} · the call, of the slowest", {"engram": spread}, compared, unit="ms")
    values = {"engram": saving, "no save": alone}
    compared = [Comparison("no save", "share", Timing(1, values).ratio("engram", "no save"), None)]
    spreads = {side: Spread.of(value) for side, value in values.items()}
    yield Row("ranks/stall/step", f"{what} · the longest step until its end", spreads, compared, unit="ms")


def _stall(member: Member) -> tuple[float, float, float]:
    """Milliseconds: of the call, of the longest step until the save is over, and of the longest of as many steps after it."""
    from torch import distributed

    checkpoints = member.kept["checkpoints"]
    for _ in range(20):
        _step(member)
    call_ms, handle = once(lambda: checkpoints.save(member.kept["step"], wait=False))
    saving = [once(partial(_step, member))[0]]
    while True:
        over = torch.tensor(int(handle.done))
        distributed.all_reduce(over, distributed.ReduceOp.MIN)
        if over:
            break
        saving.append(once(partial(_step, member))[0])
    handle.wait()
    alone = [once(partial(_step, member))[0] for _ in saving]
    return call_ms, max(saving), max(alone)


def _requests(job: Job) -> Row:
    shares: list[float] = []
    for number in range(REQUESTS):
        asked_by, asked_after = number % WORLD, random.Random(number).randrange(POLL_EVERY)
        answers = job.each(_ask, asked_by, asked_after)
        if len({step for step, _ in answers}) != 1:
            raise RuntimeError(f"expected one step, got {answers}")
        shares.append(answers[asked_by][1] / POLL_EVERY)
    key, against, worst = "ranks/request", "poll_every", Spread.of([max(shares)])
    compared = [Comparison(against, "value", worst, FLOORS[key, against])]
    what = f"from a request to the save of {WORLD} ranks, at most"
    return Row(key, what, {"engram": worst}, compared, unit="poll_every")


def _ask(member: Member, asked_by: int, after: int) -> tuple[int, int]:
    """The step at which this rank saves, and its calls of ``poll`` from the request on."""
    checkpoints = member.kept["checkpoints"]
    polls, handle = 0, None
    while handle is None:
        if polls == after and member.rank == asked_by:
            checkpoints.request()
        _step(member)
        handle = checkpoints.poll(member.kept["step"])
        polls += 1
    handle.wait()
    member.ranks.gather(b"", 60.0)  # all ranks have ended, so that none is busy at the next request
    return member.kept["step"], polls - after
