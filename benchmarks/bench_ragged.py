"""Claim: rows of any length cost what their bytes cost, in RAM and in a directory.

Measured: 2,048 rows of 200 to 2,000 tokens, int32 and float32, 18 MB, in rings that were written once. ``extend`` of values and offsets
beside a copy of the same bytes and TorchRL's ``LazyStackStorage``; ``sample(32)`` packed, jagged and padded, and as many rows as fit into
as many tokens, beside ``torch.cat`` of the same rows and TorchRL's samples; one row of 16 kB by ``add``, with a key and without, and as
one that grows.

Groups: 512 rows as 64 complete groups of 8 whose rewards are known, of 10^6 small rows, beside 64 random groups of the same rows; then
complete groups of 10^5 to 10^7 rows.

Lists: ``sample(32)`` of a ``LazyStackStorage``, beside TorchRL's.

Ticks: a ``Checkpointer`` saves 64 new responses (0.56 MB) of a directory with 1 GB of them, and with 4 GB: bytes written, the time, and
the longest ``extend`` of a thread that writes all the while. Reopening: a directory of 100,000 rows with keys whose process was killed
in the middle of a write. Files are written where ``tempfile`` puts them.
"""

import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.bench_indexes import grouped
from benchmarks.bench_sharing import in_child
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.timing import Effort, Side, Spread, Timing, alternate, once
from benchmarks.workers import Forked

ROWS, BATCH, RING_BYTES, CAPACITY = 2_048, 32, 60e6, 10_000
WRITES, READS, ONE = Effort(calls=2, blocks=15), Effort(calls=30, blocks=30), Effort(calls=200, blocks=20)
GROUPS, OF_EACH, DRAWS = 64, 8, Effort(calls=10, blocks=30)
GROUPED = (10**5, 10**6, 10**7)
NEW, TICKS, TICK_GB, QUICK_GB = 64, 9, (1.0, 4.0), (0.1, 0.4)
KEYED, REOPENED = 100_000, 5


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Batches in and out, and single rows."""
    engram, torchrl = libraries["engram"].module, libraries["TorchRL"].module
    if engram is None:
        return
    torch.set_num_threads(1)
    answers = _Answers()
    with ExitStack() as stack:

        def made(layout: str, *, folder: bool, **more: Any) -> Any:
            where = {"ragged": _fields(engram), "ragged_bytes": RING_BYTES, "layout": layout, "open_rows": 8}
            storage = engram.LazyTensorStorage(CAPACITY, **where)
            if folder:
                directory = stack.enter_context(tempfile.TemporaryDirectory())
                storage = engram.LazyMemmapStorage(CAPACITY, scratch_dir=directory + "/store", **where)
            buffer = stack.enter_context(engram.ReplayBuffer(storage=storage, batch_size=BATCH))
            for _ in range(5):
                buffer.extend(answers.rows | more)
            return buffer

        ram, directory = made("packed", folder=False), made("packed", folder=True)
        sides = [
            Side("copy", answers.copy),
            Side("directory", lambda: directory.extend(answers.rows)),
            Side("engram", lambda: ram.extend(answers.rows)),
        ]
        others = [Side(kind, lambda kind=kind: ram.sample(layout=kind)) for kind in ("jagged", "padded")]
        tokens = Side("max_tokens", lambda: ram.sample(max_tokens=BATCH * 1_100))
        reads = [Side("torch.cat", answers.gather), *others, tokens, Side("engram", ram.sample)]
        if torchrl is not None:
            theirs = torchrl.ReplayBuffer(storage=torchrl.LazyStackStorage(CAPACITY), batch_size=BATCH)
            single = [TensorDict({"tokens": t, "log_prob": p}) for t, p in answers.single]
            theirs.extend(single)
            sides.insert(1, Side("TorchRL", lambda: theirs.extend(single)))
            reads.insert(1, Side("TorchRL", lambda: _packed(theirs.sample())))
        for key, what, found, effort in (
            ("ragged/extend", "extend of values + offsets, 18 MB", sides, WRITES),
            ("ragged/sample", "sample(32), packed", reads, READS),
        ):
            timing = alternate(found, effort.scaled(share))
            beside = [side.name for side in found if side.name not in ("engram", "TorchRL")]
            yield timed(key, what, timing, times=["TorchRL"], share=beside)
        yield timed(
            "ragged/directory",
            "extend of 18 MB, to a directory",
            alternate(sides, WRITES.scaled(share)),
            ours="directory",
            share=["copy"],
        )
        yield _one(made, answers, share)
        if torchrl is not None:
            yield _lists(libraries, single, share)
    yield from _groups(engram, share)
    yield from _ticks(engram, answers, TICK_GB if share >= 1 else QUICK_GB, share)
    yield _reopened(engram, share)


def _fields(engram: Any) -> dict[str, Any]:
    return {
        "tokens": engram.Ragged(torch.int32, max_length=4_096),
        "log_prob": engram.Ragged(torch.float32, like="tokens"),
    }


class _Answers:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(200, 2_001, (ROWS,), generator=generator)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        total = int(self.offsets[-1])
        self.tokens = torch.randint(50_000, (total,), dtype=torch.int32, generator=generator)
        self.log_prob = torch.rand(total, generator=generator)
        self.rows = {"tokens": (self.tokens, self.offsets), "log_prob": (self.log_prob, self.offsets)}
        self.single = list(zip(self.tokens.split(lengths.tolist()), self.log_prob.split(lengths.tolist()), strict=True))
        self._copies = torch.empty_like(self.tokens), torch.empty_like(self.log_prob)
        self._generator = generator

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.log_prob.nbytes

    def first(self, n: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        end = int(self.offsets[n])
        return {key: (values[:end], self.offsets[: n + 1]) for key, (values, _) in self.rows.items()}

    def copy(self) -> None:
        for copy, values in zip(self._copies, (self.tokens, self.log_prob), strict=True):
            copy.copy_(values)

    def gather(self) -> list[torch.Tensor]:
        rows = [self.single[i] for i in torch.randint(ROWS, (BATCH,), generator=self._generator).tolist()]
        return [torch.cat(values) for values in zip(*rows, strict=True)]


def _packed(batch: Any) -> list[torch.Tensor]:
    """A lazy stack as attention kernels take it."""
    return [torch.cat([row[key] for row in batch.tensordicts]) for key in ("tokens", "log_prob")]


def _one(made: Callable[..., Any], answers: _Answers, share: float) -> Row:
    buffer, keyed = made("packed", folder=True), made("packed", folder=True, uid=torch.arange(ROWS))
    keyed.index_keys("uid")
    row = {"tokens": answers.tokens[:2_048], "log_prob": answers.log_prob[:2_048]}
    keys = itertools.count()

    def grown() -> None:
        growing = buffer.open_row()
        growing.append(row)
        growing.seal()

    by_key = Side("engram", lambda: keyed.add(row | {"uid": next(keys)}))
    sides = [Side("grown", grown), Side("without a key", lambda: buffer.add(row)), by_key]
    what = "one row of 16 kB in a directory, by key"
    found = timed("ragged/one", what, alternate(sides, ONE.scaled(share)), share=["grown", "without a key"])
    judged = Comparison("25 µs", "value", found.spreads["engram"], FLOORS["ragged/one", "25 µs"])
    return replace(found, comparisons=[judged, *found.comparisons])


def _lists(libraries: rivals.Libraries, rows: list[TensorDict], share: float) -> Row:
    sides = []
    for name in ("TorchRL", "engram"):
        module = libraries[name].module
        buffer = module.ReplayBuffer(storage=module.LazyStackStorage(CAPACITY), batch_size=BATCH)
        buffer.extend(rows)
        sides.append(Side(name, buffer.sample))
    return timed(
        "ragged/lists", "sample(32) of a LazyStackStorage", alternate(sides, READS.scaled(share)), share=["TorchRL"]
    )


# ---- groups ----------------------------------------------------------------------------------------------------------


def _groups(engram: Any, share: float) -> Iterator[Row]:
    """16 rows of each key are stored, of which a batch has 8."""

    def made(rows: int, name: str, **chosen: Any) -> Side:
        sampler = engram.PromptGroupSampler(**chosen)
        buffer = engram.TensorDictReplayBuffer(
            storage=engram.LazyTensorStorage(rows), sampler=sampler, batch_size=GROUPS * OF_EACH
        )
        buffer.extend(grouped(rows))
        return Side(name, buffer.sample)

    complete = {"samples_per_group": OF_EACH, "ready": (("next", "reward"),)}
    sizes = [made(rows, f"{rows:.0e} rows", **complete) for rows in (GROUPED if share >= 1 else GROUPED[:2])]
    timing = alternate([made(GROUPED[1], "random", num_groups=GROUPS), *sizes], DRAWS.scaled(share))
    what = f"sample {GROUPS} x {OF_EACH} · complete groups that are ready"
    yield timed("ragged/groups", what, timing, ours="1e+06 rows", share=["random"])
    yield timed("ragged/groups/scaling", f"{what} · more rows", timing, ours=sizes[-1].name, share=["1e+05 rows"])


# ---- ticks, and what is there after a kill ---------------------------------------------------------------------------


def _ticks(engram: Any, answers: _Answers, sizes: tuple[float, float], share: float) -> Iterator[Row]:
    new = answers.first(NEW)
    new_bytes = sum(values.nbytes for values, _ in new.values())
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for size in sizes:
            name = stack.enter_context(tempfile.TemporaryDirectory())
            fields = _fields(engram)
            rows = round(size * 1e9 / answers.nbytes) * ROWS
            storage = engram.LazyMemmapStorage(
                rows + 2 * ROWS, scratch_dir=name + "/store", ragged=fields, ragged_bytes=1.2 * size * 1e9
            )
            buffer = stack.enter_context(engram.ReplayBuffer(storage=storage, batch_size=BATCH))
            for _ in range(rows // ROWS):
                buffer.extend(answers.rows)
            checkpoints = engram.Checkpointer(name + "/series", buffer, keep=2)
            checkpoints.save(0)
            os.sync()  # ticks wait for their own bytes, not for those of the store
            written, paused, took = [], [], []
            for step in range(1, 1 + max(5, round(TICKS * share))):
                buffer.extend(new)
                elapsed_ms, report = once(partial(checkpoints.save, step))
                took.append(1e3 * elapsed_ms)
                written.append(report.bytes_written / new_bytes)
                paused.append(1e3 * report.paused_s)
            times[f"{size:g} GB"] = took
            for key, what, values, unit, bound in (
                ("bytes", "bytes written ÷ new bytes", written, "×", "1.3 ×"),
                ("paused", "writers wait", paused, "ms", "1 ms"),
            ):
                spread = Spread.of(values)
                compared = [Comparison(bound, "value", spread, FLOORS["ragged/tick/" + key, bound])]
                row = Row(
                    f"ragged/tick/{key}/{size:g}",
                    f"a tick of {NEW} responses over {size:g} GB · {what}",
                    {"engram": spread},
                    compared,
                    unit=unit,
                )
                yield row if share >= 1 else row.unjudged()
    small, large = times
    row = timed(
        "ragged/tick/time", f"a tick of {NEW} responses over {large}", Timing(1, times), ours=large, share=[small]
    )
    yield row if share >= 1 else row.unjudged()


def _reopened(engram: Any, share: float) -> Row:
    found = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(max(3, round(REOPENED * share))):
            folder = Path(name, str(number))
            in_child(_make_keyed, engram, folder)
            writer = Forked(partial(_keyed_writer, engram, folder))
            writer.begin_without_end()
            time.sleep(0.2 + 0.1 * random.random())
            writer.kill()
            found.append(in_child(_reopen, engram, folder))
    spread = Spread.of(found)
    judged = [Comparison("100 ms", "value", spread, FLOORS["ragged/reopened", "100 ms"])]
    return Row(
        "ragged/reopened", f"open {KEYED:,} ragged rows with keys after kill -9", {"engram": spread}, judged, unit="ms"
    )


def _make_keyed(engram: Any, folder: Path) -> None:
    fields = {"tokens": engram.Ragged(torch.int32, max_length=256)}
    storage = engram.LazyMemmapStorage(KEYED, scratch_dir=folder, ragged=fields, ragged_bytes=KEYED * 4 * 64)
    with engram.ReplayBuffer(storage=storage, batch_size=BATCH) as buffer:
        buffer.index_keys("uid")
        for first in range(0, KEYED, ROWS):
            buffer.extend(_keyed(first, min(ROWS, KEYED - first)))


def _keyed(first: int, n: int) -> dict[str, Any]:
    return {
        "uid": torch.arange(first, first + n),
        "tokens": (torch.zeros(32 * n, dtype=torch.int32), torch.arange(n + 1) * 32),
    }


def _keyed_writer(engram: Any, folder: Path) -> Callable[[], object]:
    buffer, first = engram.ReplayBuffer.open(folder), itertools.count(KEYED, 64)
    return lambda: buffer.extend(_keyed(next(first), 64))


def _reopen(engram: Any, folder: Path) -> float:
    """Milliseconds until a row is found by its key."""

    def opened() -> Any:
        buffer = engram.ReplayBuffer.open(folder)
        return buffer, buffer.rows_of([KEYED])

    elapsed_ms, (buffer, found) = once(opened)
    if int(found.rows[0]) < 0 or len(buffer) < KEYED - 64:
        raise ValueError(f"ragged: expected {KEYED} rows and the key {KEYED}, got {len(buffer)} and {found}.")
    buffer.close()
    return elapsed_ms
