"""What a disk gives for batches of rows that are not in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from engram._memory import available_memory, missing_share
from engram._sizes import resident_bytes
from engram._words import said_bytes
from engram.cli.doctor import Finding
from engram.format import files, layout
from engram.format.describe import describe
from engram.format.verify import read_store

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAGE = 4096
#: Rows of a batch; bytes of a row, and of the file, that are tried where there is no store.
_BATCH, _ROW, _TRIAL = 256, 28_224, 256 << 20
#: Reads that are under way at a time.
_THREADS = 32


class _Field(NamedTuple):
    """Where rows of a field lie."""

    fd: int
    row_bytes: int


def disk_speed(directory: Path, seconds: float = 2.0) -> list[Finding]:
    """What the disk of a store, or of a folder for one, gives, measured for that long.

    Reads random rows, of which the kernel keeps none in memory. A folder without rows gets a file of 256 MB, which is removed.

    Raises:
        OSError: no folder, no permission, no space, or a file system whose files cannot be read past memory.
    """
    schema = read_store(directory)[0] if layout.is_store(directory) else None
    lanes = cast("dict[str, int]", describe(directory)["lanes"]) if schema is not None else {}
    nbytes = 0 if schema is None else schema.capacity * schema.row_bytes
    needed = 0 if schema is None else resident_bytes(directory, schema.capacity)
    with contextlib.ExitStack() as stack:
        if schema is not None and (most := lanes["most_rows"]):
            starts = range(0, schema.capacity, schema.capacity // schema.lanes)
            fields = [_opened(stack, path, size) for path, size in layout.row_files(directory, schema).values() if size]
            said = f"{schema.row_bytes} bytes each, {said_bytes(nbytes)} in all"
        else:
            trial = stack.enter_context(tempfile.NamedTemporaryFile(dir=directory))
            for _ in range(_TRIAL >> 20):
                trial.write(os.urandom(1 << 20))
            os.fsync(trial.fileno())
            fields, starts, most = [_opened(stack, Path(trial.name), _ROW)], range(1), _TRIAL // _ROW
            said = f"none yet, {_ROW} bytes were tried"
        batches, read = _measured(fields, starts, most, seconds)
    speed = f"{read / 1e6:.0f} MB/s, {batches:.1f} batches of {_BATCH} rows per second"
    found = [Finding("rows", said), Finding("disk", speed)]
    memory = available_memory()
    if nbytes:
        missing = missing_share(nbytes, memory, needed)
        expected = f"expect {batches / missing:.1f} batches of {_BATCH} rows per second" if missing else "all rows fit"
        value = (
            f"{said_bytes(memory)} beside what is in use; tickets and priorities need {said_bytes(needed)}: {expected}"
        )
        fits = memory >= needed
        advice = "" if fits else "Each draw waits for the disk: give the process more memory, or the store fewer rows."
        found.append(Finding("memory of rows", value, "ok" if fits else "BAD", advice))
    return found


def _opened(stack: contextlib.ExitStack, path: Path, row_bytes: int) -> _Field:
    return _Field(stack.enter_context(files.Descriptor.open(path, os.O_RDONLY | os.O_DIRECT)), row_bytes)


def _measured(fields: Sequence[_Field], starts: range, rows: int, seconds: float) -> tuple[float, float]:
    """Batches and bytes per second, of that many rows from each start on."""
    began = time.perf_counter()
    longest = max(field.row_bytes for field in fields) + 2 * _PAGE

    def read(seed: int) -> tuple[int, int]:
        draws, done, nbytes = random.Random(seed), 0, 0  # noqa: S311 - which rows are read is no secret
        with mmap.mmap(-1, longest) as memory, memoryview(memory) as view:
            while done == 0 or time.perf_counter() - began < seconds:
                row = draws.choice(starts) + draws.randrange(rows)
                for fd, size in fields:
                    first = row * size // _PAGE * _PAGE
                    with view[: -(-(row + 1) * size // _PAGE) * _PAGE - first] as page:
                        nbytes += os.preadv(fd, [page], first)
                done += 1
        return done, nbytes

    with ThreadPoolExecutor(_THREADS) as pool:
        done, nbytes = map(sum, zip(*pool.map(read, range(_THREADS)), strict=True))
    elapsed = time.perf_counter() - began
    return done / _BATCH / elapsed, nbytes / elapsed
