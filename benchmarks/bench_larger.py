"""Claim: rows of a store that is larger than memory come and go at the speed of the disk.

A process is held to 0.3 of the bytes of the rows by a control group of its own. Where it may not make one, it drops the files from
memory before each block (``POSIX_FADV_DONTNEED``), and looks with ``mincore`` that they are gone. All sides take turns in that
process and share what memory keeps. One thread.

Frames of 28 kB, batches of 256 in random order, beside what could be done with Python's ``os`` alone, sorted: announce all rows,
then read them; read them; copy from a mapping, with ``MADV_RANDOM`` and as it is. TorchRL's storage reads its rows as
``TensorDict.load_memmap(dir)[rows]`` does, which is measured under a limit of time. Slices of 8 x 32 beside reading the file from
one end to the other; what the kernel has read ahead between two blocks is forgotten. Rows of 200 B in five fields beside
mappings. The wait for a batch of 64 with ``prefetch=2`` and a learner of 5 ms. ``extend`` by 64 frames beside ``pwrite`` of the
same bytes, and the longest call. A process that writes beside one that samples. What a dump and a checkpoint leave in memory of
rows that were drawn before.
"""

import ctypes
import gc
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from benchmarks import resident, rivals
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.timing import Effort, Side, Spread, Timing, alternate, longest

FRAME, BATCH = 28_224, 256
LIMIT = 0.3
LATE_S = 20.0
WRITES = 100
READ_AHEAD = 64 << 20  # more than any kernel reads ahead
GROUPS = Path("/sys/fs/cgroup/memory")
FAST, SLOW = Effort(calls=10, blocks=20, warmup=3, lead=0), Effort(calls=1, blocks=10, warmup=1, lead=0)
SMALL_FIELDS = {"obs": 20, "next": 20, "action": 8, "reward": 1, "value": 1}  # float32 each: 200 B


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """A store of frames, then one of small rows."""
    if libraries["engram"].module is None:
        return
    for measure, make, rows in ((_frames, _make_frames, 100_000), (_small, _make_small, 8_000_000)):
        with tempfile.TemporaryDirectory() as folder:
            nbytes = make(Path(folder, "store"), round(rows * max(share, 0.5)))
            gc.collect()  # what a process maps, stays
            group = _Group(round(nbytes * LIMIT))
            context = multiprocessing.get_context("spawn")
            try:
                with ProcessPoolExecutor(1, mp_context=context, initializer=group.enter) as pool:
                    yield from pool.submit(measure, Path(folder, "store"), group, share).result()
            finally:
                group.remove()


class _Group:
    """A control group of this benchmark; without the right to make one, nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.folder: Path | None = GROUPS / f"engram-bench-{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / "memory.limit_in_bytes").write_text(str(limit))
        except OSError:
            self.folder = None

    def enter(self) -> None:
        torch.set_num_threads(1)
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        if self.folder is not None:
            self.folder.rmdir()

    def most(self) -> float | None:
        """MB that it had at most."""
        return None if self.folder is None else int((self.folder / "memory.max_usage_in_bytes").read_text()) / 1e6


# ---- stores --------------------------------------------------------------------------------------------------------------


def _make_frames(folder: Path, rows: int) -> int:
    from engram import LazyMemmapStorage, ReplayBuffer

    rb = ReplayBuffer(storage=LazyMemmapStorage(rows, scratch_dir=folder))
    for start in range(0, rows, 500):
        rb.extend(_steps(start, 500))
    rb.close()
    return rows * FRAME


def _steps(start: int, n: int) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + n)
    frame = torch.randint(0, 255, (n, FRAME), dtype=torch.uint8)
    return {"frame": frame, "number": number, "done": (number % 200 == 199)[:, None]}


def _make_small(folder: Path, rows: int) -> int:
    from engram import LazyMemmapStorage, ReplayBuffer

    piece = {key: torch.randn(20_000, width) for key, width in SMALL_FIELDS.items()}
    for place, together in ((folder, 0), (folder.with_name("grouped"), 256)):
        rb = ReplayBuffer(storage=LazyMemmapStorage(rows, scratch_dir=place, group_small_fields=together))
        for _ in range(rows // 20_000):
            rb.extend(piece)
        rb.close()
    return rows * 200


def _cold(folder: Path, group: _Group) -> Callable[[], None]:
    """Makes the files cold; and what does it before a block: in a control group, nothing has to. Raises ``RuntimeError``: they stay."""
    files = sorted(path for name in ("*.memmap", "grouped") for path in folder.rglob(name) if path.is_file())

    def drop() -> None:
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                    at = np.frombuffer(memory, np.uint8).ctypes.data
                    pages = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
                    ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(len(memory)), pages)
                    if sum(bytes(pages)) > len(pages) // 10:
                        raise RuntimeError(
                            f"{path} stays in memory: no control group may be made, and no file be dropped."
                        )

    drop()  # of what another process read, a limit keeps as much as there is
    return drop if group.folder is None else lambda: None


# ---- frames --------------------------------------------------------------------------------------------------------------


def _frames(folder: Path, group: _Group, share: float) -> list[Row]:
    try:
        cold = _cold(folder, group)
    except RuntimeError as error:
        return [_nothing("larger/frames", "sample 256 frames of 28 kB", str(error))]
    rows = [*_sampling(folder, cold, share), _slices(folder, cold, share), _waiting(folder, cold, share)]
    rows += _writing(folder, cold, share)
    if group.folder is not None:
        rows += _saving(folder, group)
    rows.append(_beside(folder, share))  # last: the writer is killed, and some rows with it
    most = group.most()
    if most is not None:
        rows.append(
            _number("larger/memory", "memory of the group, at most", most, "MB", "the limit", group.limit / 1e6)
        )
    return rows


def _sampling(folder: Path, cold: Callable[[], None], share: float) -> list[Row]:
    from engram import ReplayBuffer

    rb = ReplayBuffer.open(folder, batch_size=BATCH)
    drawn = _sorted_rows(len(rb), BATCH)
    path = folder / "frame.memmap"
    file = os.open(path, os.O_RDONLY)
    plain = np.memmap(path, np.uint8, "r").reshape(-1, FRAME)
    single = np.memmap(path, np.uint8, "r").reshape(-1, FRAME)
    assert single.base is not None
    _advise(single, mmap.MADV_RANDOM)

    def read(announced: bool) -> None:
        rows = drawn()
        if announced:
            for row in rows:
                os.posix_fadvise(file, row * FRAME, FRAME, os.POSIX_FADV_WILLNEED)
        out = np.empty((BATCH, FRAME), np.uint8)
        for row, place in zip(rows, out, strict=True):
            os.preadv(file, [place], row * FRAME)

    announced, by_read = lambda: read(True), lambda: read(False)
    sides = [
        Side("engram", rb.sample, prepare=cold),
        Side("announced, read", announced, prepare=cold),
        Side("read", by_read, prepare=cold),
    ]
    timing = alternate(sides, FAST.scaled(share))
    what = f"sample {BATCH} frames of 28 kB · {LIMIT:.0%} of them fit into memory"
    rows = [timed("larger/frames", what, timing, share=("announced, read", "read"))]
    sides = [
        Side("engram", rb.sample, prepare=cold),
        Side("mapping", lambda: plain[drawn()], prepare=cold),
        Side("mapping, MADV_RANDOM", lambda: single[drawn()], prepare=cold),
    ]
    timing = alternate(sides, SLOW.scaled(share))
    rows.append(timed("larger/mapping", what, timing, times=("mapping", "mapping, MADV_RANDOM")))
    stored = TensorDict.load_memmap(folder)
    spent, began = [], time.perf_counter()
    while len(spent) < 5 and time.perf_counter() - began < LATE_S:
        start = time.perf_counter()
        stored[torch.from_numpy(drawn())].clone()
        spent.append((time.perf_counter() - start) * 1e6)
    mine = timing.spread("engram")
    theirs = Spread.of(spent)
    ratio = Spread(theirs.median / mine.median, theirs.low / mine.high, theirs.high / mine.low)
    rows.append(
        Row("larger/torchrl", what, {"engram": mine, "TorchRL": theirs}, [Comparison("TorchRL", "times", ratio, None)])
    )
    os.close(file)
    rb.close()
    return rows


def _sorted_rows(size: int, n: int) -> Callable[[], NDArray[np.int64]]:
    random = np.random.default_rng(0)
    return lambda: np.sort(random.integers(0, size, n))


def _advise(array: NDArray[np.uint8], advice: int) -> None:
    at, size = array.ctypes.data, array.nbytes
    begin = at // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size + at - begin), advice)


def _slices(folder: Path, cold: Callable[[], None], share: float) -> Row:
    from engram import ReplayBuffer, SliceSampler

    sampler = SliceSampler(slice_len=32, end_key="done", strict_length=True)
    rb = ReplayBuffer.open(folder, sampler=sampler, batch_size=8 * 32)
    number, place = os.open(folder / "frame.memmap", os.O_RDONLY), 0
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    nbytes, size = BATCH * FRAME, os.fstat(number).st_size

    def read() -> None:
        nonlocal place
        os.preadv(number, [np.empty(nbytes, np.uint8)], place)
        place = (place + nbytes) % (size - nbytes)

    def rest() -> None:
        """The kernel goes on to read behind the last block of the other side: in the time of neither, and for neither."""
        cold()
        time.sleep(0.05)
        os.posix_fadvise(number, place, READ_AHEAD, os.POSIX_FADV_DONTNEED)

    sides = [Side("engram", rb.sample, prepare=rest), Side("from end to end", read, prepare=rest)]
    timing = alternate(sides, FAST.scaled(share))
    os.close(number)
    rb.close()
    return timed("larger/slices", "slices of 8 x 32 frames", timing, share=("from end to end",))


def _waiting(folder: Path, cold: Callable[[], None], share: float) -> Row:
    from engram import ReplayBuffer

    sides = []
    for depth in (0, 2):
        rb = ReplayBuffer.open(folder, batch_size=64, prefetch=depth or None)
        sides.append(Side(f"prefetch={depth}", rb.sample, prepare=cold, between=lambda: time.sleep(0.005)))
    timing = alternate(sides, Effort(calls=30, blocks=10, warmup=2, lead=2).scaled(share))
    what = "wait for 64 frames, with a learner of 5 ms"
    return timed("larger/wait", what, timing, ours="prefetch=2", share=("prefetch=0",))


def _writing(folder: Path, cold: Callable[[], None], share: float) -> list[Row]:
    from engram import ReplayBuffer

    rb = ReplayBuffer.open(folder)
    steps = _steps(0, 64)
    number, place = os.open(folder / "frame.memmap", os.O_RDWR), count()
    raw, size = steps["frame"].numpy().tobytes(), os.fstat(number).st_size

    def write() -> None:
        os.pwrite(number, raw, next(place) * len(raw) % (size - len(raw)))

    def written(call: Callable[[], object]) -> None:
        for _ in range(WRITES):
            call()
        os.fdatasync(number)  # else it is the other side that waits for the disk

    sides = [
        Side("engram", lambda: written(lambda: rb.extend(steps)), prepare=cold),
        Side("pwrite", lambda: written(write), prepare=cold),
    ]
    timing = alternate(sides, SLOW.scaled(share))
    until = time.monotonic() + 60 * share
    slowest = longest(lambda: rb.extend(steps), lambda: time.monotonic() > until)
    os.close(number)
    rb.close()
    what = "extend by 64 frames of 28 kB"
    return [
        timed("larger/extend", f"{what}, {WRITES} times, then fdatasync", timing, share=("pwrite",)),
        _number("larger/longest", f"{what} · longest in {60 * share:.0f} s", slowest, "ms", "100 ms"),
    ]


def _beside(folder: Path, share: float) -> Row:
    """Batches beside a process that writes, in the same group, and alone."""
    from engram import ReplayBuffer

    rb = ReplayBuffer.open(folder, batch_size=BATCH)
    found: dict[str, list[float]] = {}
    for name in ("alone", "beside a writer"):
        writer = None
        if name != "alone":
            writer = os.fork()
            if writer == 0:
                steps, other = _steps(0, 64), ReplayBuffer.open(folder)
                while True:
                    other.extend(steps)
        timing = alternate([Side(name, rb.sample)], FAST.scaled(share))
        found |= timing.blocks_us
        if writer is not None:
            os.kill(writer, 9)
            os.waitpid(writer, 0)
    rb.close()
    return timed("larger/beside", f"sample {BATCH} frames beside a process that writes", Timing(FAST.calls, found),
                 ours="beside a writer", share=("alone",))  # fmt: skip


def _saving(folder: Path, group: _Group) -> list[Row]:
    """Of rows that were drawn several times, a tenth of the limit: how many a dump and a checkpoint leave in memory."""
    from engram import Checkpointer, ReplayBuffer

    rb = ReplayBuffer.open(folder)
    hot = torch.randperm(len(rb))[: group.limit // 10 // FRAME]
    stored = np.memmap(folder / "frame.memmap", np.uint8, "r").reshape(-1, FRAME)
    rows = []
    saves: tuple[tuple[str, Callable[[Path], object]], ...] = (
        ("dump", rb.dumps),
        ("checkpoint", lambda path: Checkpointer(path, rb).save(1)),
    )
    for name, save in saves:
        for piece in hot.repeat(3).split(64):
            rb[piece]
        with tempfile.TemporaryDirectory() as target:
            save(Path(target, "saved"))
        left = np.mean([_is_in_memory(stored[row]) for row in hot.tolist()]) * 100
        what = f"rows drawn before a {name} that are in memory after it"
        rows.append(_number(f"larger/{name}", what, float(left), "%", "all"))
    rb.close()
    return rows


def _is_in_memory(row: NDArray[np.uint8]) -> bool:
    """Whether the page in its middle is."""
    state = ctypes.c_ubyte()
    middle = (row.ctypes.data + FRAME // 2) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).mincore(ctypes.c_void_p(middle), ctypes.c_size_t(1), ctypes.byref(state))
    return bool(state.value & 1)


# ---- small rows ----------------------------------------------------------------------------------------------------------


def _small(folder: Path, group: _Group, share: float) -> list[Row]:
    from engram import ReplayBuffer

    what = f"sample {BATCH} rows of 200 B in 5 fields"
    try:
        cold = _cold(folder.parent, group)
    except RuntimeError as error:
        return [_nothing("larger/small", what, str(error))]
    rb = ReplayBuffer.open(folder, batch_size=BATCH)
    grouped = ReplayBuffer.open(folder.with_name("grouped"), batch_size=BATCH)
    drawn = _sorted_rows(len(rb), BATCH)
    maps = [np.memmap(folder / f"{key}.memmap", np.float32, "r").reshape(-1, n) for key, n in SMALL_FIELDS.items()]
    sides = [
        Side("engram", rb.sample, prepare=cold),
        Side("mapping", lambda: [field[rows] for rows in (drawn(),) for field in maps], prepare=cold),
    ]
    timing = alternate(sides, SLOW.scaled(share))
    together = alternate(
        [Side("engram", grouped.sample, prepare=cold), Side("a file each", rb.sample, prepare=cold)], FAST.scaled(share)
    )
    rb.close()
    grouped.close()
    return [
        timed("larger/small", what, timing, times=("mapping",)),
        timed("larger/grouped", f"{what}, in one file", together, times=("a file each",)),
    ]


def _number(key: str, what: str, value: float, unit: str, against: str, bound: float | None = None) -> Row:
    spread = Spread.of([value])
    compared = Comparison(against, "value", spread, FLOORS.get((key, against)))
    notes = (
        {} if bound is None else {"engram": f"{against}: {bound:.0f} {unit}; {resident.now() / 1e6:.0f} MB resident"}
    )
    return Row(key, what, {"engram": spread}, [compared], unit=unit, notes=notes)


def _nothing(key: str, what: str, why: str) -> Row:
    return Row(key, what, {}, [], notes={"engram": why})
