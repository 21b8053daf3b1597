"""Claim: a checkpoint costs what is new since the last one, and stops no process; saving and loading are bound by the
disk.

dumps: the prioritized buffer of ``bench_indexes``, 100,000 rows, saved under a new name, and under the name of the
last dump. With the same name, engram exchanges the folders and removes the old one; TorchRL overwrites its files.
TorchRL does not wait for the disk; "TorchRL, synced" does. TorchRL's extension loads only with the torch that it
was built for. Otherwise, Python lists replace its trees; they take less time to read. Then the same rows in 100
times the capacity.

One per cent: a ``LazyMemmapStorage`` of 10 kB rows, all of them live. A full checkpoint, then three more, each
after a hundredth of the rows was overwritten, of which the median counts; then the same again. Judged with
``--large``: 20 GB.

Pause: the longest ``add``, and the longest ``sample``, of a thread that does nothing else while 10^7 small rows
with priorities are saved in the background, without links. Compared with the longest one in a second without a
save.

loads: into an empty buffer in RAM, compared with reading the same files into one piece of memory, front to back,
and, not judged, with reading them in as many threads as ``loads`` has. The page cache is dropped before both. Its
memory: how far the resident set of a new process grows beyond the rows.

verify: at the level ``full``, of files in the page cache; one thread.

Files are written where ``tempfile`` puts them: set ``TMPDIR`` to a folder on the disk to measure.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import bench_indexes, resident, rivals
from benchmarks.bench_indexes import ALPHA, BETA, ROWS
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.machine import drop_cache
from benchmarks.timing import Effort, Side, Spread, Timing, alternate, longest, once

DUMPS = Effort(calls=1, blocks=15, warmup=2, lead=0)
WHOLE = Effort(calls=1, blocks=7, warmup=1, lead=0)
"""Of files of gigabytes."""

GB = 10**9
STORE_GB, QUICK_GB, LARGE_GB = 4.0, 0.5, 20.0
ROW_BYTES, CHUNK = 10_000, 1_000
NEW = 0.01
ROUNDS, AFTER = 3, 3
"""Full checkpoints of the large store, and how many of what is new come after each."""

PAUSED_ROWS, PAUSES = 10**7, 9
RESIDENT_MIB = 64
PIECE, LONG_PIECE, READERS = 4 << 20, 128 << 20, 2
AT_ONCE = f"reading, {READERS} threads"
SYNCED = "TorchRL, synced"
UNSYNCED = "TorchRL does not wait for the disk."
STAND_IN = " Its extension does not load with this torch: lists stand in for its trees, which takes less time."


def run(libraries: rivals.Libraries, share: float, *, store_gb: float | None = None) -> Iterator[Row]:
    """Dumps beside TorchRL, then engram alone; ``share`` below 1 takes less data, too, where sizes are judged nothing then."""
    engram = libraries["engram"].module
    if engram is None:
        return
    size = store_gb or (STORE_GB if share >= 1 else QUICK_GB)
    yield from _dumps(libraries, share)
    yield _capacity(libraries["engram"], share)
    yield from _pauses(engram, PAUSED_ROWS if share >= 1 else PAUSED_ROWS // 10)
    yield from _one_per_cent(engram, size)  # behind it a disk has gigabytes to remove
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "dump")
        nbytes = _dumped(engram, min(size, STORE_GB) / 2, path)
        yield _loads(engram, path, nbytes, share)
        yield _memory(path, nbytes)
        yield _verify(path, nbytes, share)


# ---- one folder ------------------------------------------------------------------------------------------------------


def _dumps(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    data = bench_indexes.steps(ROWS)
    buffers = {"engram": _prioritized(libraries["engram"], data, ROWS)}
    notes = {"cpprb": "cpprb: not measured."}
    if libraries["TorchRL"].module is not None:
        buffers["TorchRL"], note = _theirs(libraries["TorchRL"].module, data)
        notes["TorchRL"] = note
    for key, where in (("new", "to a new name"), ("again", "to the name of the last one")):
        with tempfile.TemporaryDirectory() as name:
            sides = []
            for side, replay in buffers.items():
                folder = Path(name, side)
                prepare = partial(_settle, folder if key == "new" else None)
                sides.append(Side(side, partial(replay.dumps, folder), prepare=prepare))
                if side == "TorchRL":
                    sides.append(Side(SYNCED, partial(_dump_and_sync, replay, folder), prepare=prepare))
            timing = alternate(sides, DUMPS.scaled(share))
        what = f"dumps {where} · {ROWS:,} rows, prioritized"
        yield timed(f"checkpoints/dumps/{key}", what, timing, times=("TorchRL", SYNCED), notes=notes)


def _settle(folder: Path | None = None) -> None:
    """Remove a folder, and wait until the disk has written what others left, so that the measured side does not wait for it."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def _dump_and_sync(replay: Any, folder: Path) -> None:
    replay.dumps(folder)
    for file in _files(folder):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _capacity(engram: rivals.Library, share: float) -> Row:
    data = bench_indexes.steps(ROWS)
    with tempfile.TemporaryDirectory() as name:
        sides = [
            Side(side, partial(_prioritized(engram, data, capacity).dumps, Path(name, side)), prepare=_settle)
            for side, capacity in (("full", ROWS), ("engram", 100 * ROWS))
        ]
        timing = alternate(sides, DUMPS.scaled(share))
    what = f"dumps · {ROWS:,} rows in 100 times the capacity"
    return timed("checkpoints/capacity", what, timing, share=("full",))


def _prioritized(library: rivals.Library, data: TensorDict, capacity: int) -> Any:
    module = library.module
    replay = module.TensorDictReplayBuffer(
        storage=module.LazyTensorStorage(capacity), sampler=module.PrioritizedSampler(capacity, ALPHA, BETA)
    )
    replay.extend(data)
    replay.update_priority(torch.arange(len(data)), torch.rand(len(data)))
    return replay


def _theirs(module: Any, data: TensorDict) -> tuple[Any, str]:
    """TorchRL's prioritized buffer, and what to say of it."""
    rows = len(data)
    try:
        sampler, note = module.PrioritizedSampler(rows, ALPHA, BETA), UNSYNCED
    except (RuntimeError, ImportError):
        sampler, note = module.RandomSampler(), UNSYNCED + STAND_IN
    replay = module.TensorDictReplayBuffer(storage=module.LazyTensorStorage(rows), sampler=sampler, batch_size=1)
    replay.extend(data)
    if note == UNSYNCED:
        replay.update_priority(torch.arange(rows), torch.rand(rows))
        return replay, note
    stand_in = object.__new__(module.PrioritizedSampler)  # all that dumps reads
    stand_in._max_capacity, stand_in._max_priority = rows, (1.0, 0)
    stand_in._alpha, stand_in._beta, stand_in._eps = ALPHA, BETA, 1e-8
    stand_in._sum_tree, stand_in._min_tree = torch.rand(rows).tolist(), torch.rand(rows).tolist()
    replay._sampler = stand_in  # noqa: SLF001 - its set_sampler asks more of it
    return replay, note


def _files(folder: Path) -> list[Path]:
    return [Path(root, file) for root, _, files in os.walk(folder) for file in files]


# ---- a series --------------------------------------------------------------------------------------------------------


def _one_per_cent(engram: Any, size: float) -> Iterator[Row]:
    """Time and bytes. Both are judged of the large store alone: of a smaller one, two segments that are written in full and the
    files of every checkpoint are a part that says little of either."""
    rows = round(size * GB / ROW_BYTES)
    times: dict[str, list[float]] = {"engram": [], "full": []}
    written: dict[str, list[float]] = {"engram": [], "full": []}
    with tempfile.TemporaryDirectory() as name:
        replay = _large(engram, engram.LazyMemmapStorage(rows, scratch_dir=Path(name, "store")), rows)
        for round_ in range(ROUNDS):
            series = Path(name, f"series-{round_}")  # no full one is removed in the background while others are saved
            checkpoints = engram.Checkpointer(series, replay, keep=1)
            saved = []
            for step in range(round_ * (AFTER + 1), (round_ + 1) * (AFTER + 1)):
                os.sync()  # of the store itself
                saved.append(once(partial(checkpoints.save, step)))
                _write(replay, round(NEW * rows))
            full, *after = ((1e3 * elapsed_ms, report.bytes_written / 1e6) for elapsed_ms, report in saved)
            for side, found in (("full", [full]), ("engram", after)):
                for kept, values in zip((times, written), zip(*found, strict=True), strict=True):
                    kept[side].append(median(values))
            shutil.rmtree(series, ignore_errors=True)  # beside the last save, which removes what it retired
        replay.close()
    what = f"a checkpoint of {size:g} GB, {NEW:.0%} of it new"
    in_time = timed("checkpoints/one-per-cent/time", what, Timing(1, times), share=("full",))
    in_bytes = timed("checkpoints/one-per-cent/bytes", f"{what} · written", Timing(1, written), share=("full",))
    for row in (in_time, replace(in_bytes, unit="MB", blocks_us={})):
        yield row if size >= LARGE_GB else row.unjudged()


def _large(engram: Any, storage: Any, rows: int) -> Any:
    replay = engram.TensorDictReplayBuffer(storage=storage, sampler=engram.PrioritizedSampler(rows, ALPHA, BETA))
    _write(replay, rows)
    return replay


def _write(replay: Any, rows: int) -> None:
    piece = TensorDict({"obs": torch.randint(256, (CHUNK, ROW_BYTES), dtype=torch.uint8)}, batch_size=[CHUNK])
    for first in range(0, rows, CHUNK):
        replay.extend(piece[: rows - first])


def _pauses(engram: Any, rows: int) -> Iterator[Row]:
    """Writer and sampler one after the other: together they would wait for each other's turn in the interpreter."""
    replay = engram.TensorDictReplayBuffer(
        storage=engram.LazyTensorStorage(rows), sampler=engram.PrioritizedSampler(rows, ALPHA, BETA), batch_size=256
    )
    step = TensorDict({"obs": torch.rand(4)}, [])
    for first in range(0, rows, 10**5):
        replay.extend(TensorDict({"obs": torch.rand(min(rows - first, 10**5), 4)}, [min(rows - first, 10**5)]))
    paused: list[float] = []
    found: list[tuple[str, str, dict[str, list[float]]]] = []
    with tempfile.TemporaryDirectory() as name:
        checkpoints = engram.Checkpointer(name, replay, keep=1, full_every=1)

        def save() -> None:
            paused.append(1e3 * checkpoints.save(len(paused), wait=False).wait().paused_s)

        def wait() -> None:
            threading.Event().wait(1)

        for key, call in (("add", lambda: replay.add(step)), ("sample", replay.sample)):
            rounds = [(_longest_while(call, save), _longest_while(call, wait)) for _ in range(PAUSES)]
            saving, alone = (list(side) for side in zip(*rounds, strict=True))
            found.append((key, f"the longest {key} during a save", {"engram": saving, "no save": alone}))
        found.append(("paused", "writers are stopped by a save", {"engram": paused}))
    for key, what, values in found:
        against = (f"checkpoints/pause/{key}", "20 ms")
        spreads = {side: Spread.of(value) for side, value in values.items()}
        compared = [Comparison("20 ms", "value", spreads["engram"], FLOORS[against])]
        if "no save" in values:
            ratio = Timing(1, values).ratio("engram", "no save")
            compared.append(Comparison("no save", "share", ratio, None))
        row = Row(against[0], f"{what} · {rows:.0e} rows", spreads, compared, unit="ms")
        yield row if rows >= PAUSED_ROWS else row.unjudged()


def _longest_while(call: Callable[[], object], work: Callable[[], object]) -> float:
    """Milliseconds of the longest call that another thread makes while this one works."""
    over = threading.Event()
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(longest(call, over.is_set)))
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return found[0]


# ---- reading ---------------------------------------------------------------------------------------------------------


def _dumped(engram: Any, size: float, path: Path) -> int:
    """Save a buffer; the bytes of its files."""
    rows = round(size * GB / ROW_BYTES)
    _large(engram, engram.LazyTensorStorage(rows), rows).dumps(path)
    return sum(file.stat().st_size for file in _files(path))


def _empty(engram: Any, nbytes: int) -> Any:
    rows = nbytes // ROW_BYTES // CHUNK * CHUNK  # the files hold little beside the rows
    sampler = engram.PrioritizedSampler(rows, ALPHA, BETA)
    return engram.TensorDictReplayBuffer(storage=engram.LazyTensorStorage(rows), sampler=sampler)


def _loads(engram: Any, path: Path, nbytes: int, share: float) -> Row:
    held: list[Any] = []
    memory = bytearray(PIECE)

    def prepare() -> None:
        held[:] = [_empty(engram, nbytes)]
        drop_cache(path)

    def read() -> None:
        for file in _files(path):
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(memory):
                    pass

    def read_at_once() -> None:
        pieces = [(file, at) for file in _files(path) for at in range(0, file.stat().st_size, LONG_PIECE)]
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read_piece, pieces))

    def read_piece(piece: tuple[Path, int]) -> None:
        file, begin = piece
        memory = bytearray(PIECE)
        with file.open("rb", buffering=0) as opened:
            opened.seek(begin)
            while opened.tell() < begin + LONG_PIECE and opened.readinto(memory):
                pass

    sides = [
        Side("engram", lambda: held[0].loads(path), prepare=prepare),
        Side("reading", read, prepare=lambda: drop_cache(path)),
        Side(AT_ONCE, read_at_once, prepare=lambda: drop_cache(path)),
    ]
    timing = alternate(sides, WHOLE.scaled(share))
    return timed("checkpoints/loads", f"loads · {nbytes / GB:.1f} GB", timing, share=("reading", AT_ONCE))


def _memory(path: Path, nbytes: int) -> Row:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        peak = Spread.of([pool.submit(_grown, str(path), nbytes).result()])
    key, against = "checkpoints/memory", f"{RESIDENT_MIB} MiB"
    compared = [Comparison(against, "value", peak, FLOORS[key, against])]
    return Row(key, "loads · memory beyond the rows, at most", {"engram": peak}, compared, unit="MiB")


def _grown(name: str, nbytes: int) -> float:
    """MiB that the resident set of this process grows while it loads, at most, less those of the rows."""
    engram = rivals.load()["engram"].module
    path = Path(name)
    with tempfile.TemporaryDirectory() as other:  # loads the code
        _dumped(engram, CHUNK * ROW_BYTES / GB, Path(other, "small"))
        _empty(engram, CHUNK * ROW_BYTES).loads(Path(other, "small"))
    replay = _empty(engram, nbytes)
    resident.forget_peak()
    before = resident.now()
    replay.loads(path)
    return (resident.peak() - before - len(replay) * ROW_BYTES) / 2**20


def _verify(path: Path, nbytes: int, share: float) -> Row:
    from engram.saved.inspection import verify

    def full() -> None:
        if not verify(path, "full").good:
            raise RuntimeError("verify: found damage where there is none")

    timing = alternate([Side("engram", full)], WHOLE.scaled(share))
    per_gb = Spread.of([us / 1e3 / (nbytes / GB) for us in timing.blocks_us["engram"]])
    key, against = "checkpoints/verify", "1 GB/s"
    compared = [Comparison(against, "value", per_gb, FLOORS[key, against])]
    return Row(key, "verify, full · a GB", {"engram": per_gb}, compared, unit="ms", blocks_us=timing.blocks_us)
