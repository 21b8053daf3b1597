"""Claim: engram needs at most nine bytes per row in addition to the data.

Folder: 100,000 rows in a memory-mapped buffer. Measured are the blocks that all files of its folder occupy on disk
after they were synchronized (``st_blocks``, not the apparent size), minus the bytes of the rows. A store in RAM has
the same layout without a folder, so the figure holds for it as well. The difference is rounded up to whole blocks,
to our disadvantage.

Resident: growth of the resident set while a new process writes 1,000,000 rows into a buffer in RAM, minus the bytes
of the rows. It includes what the allocator rounds up and keeps, so it is not judged.
"""

import gc
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import data, rivals
from benchmarks.claims import FLOORS, Comparison, Row
from benchmarks.timing import Spread

RESIDENT_ROWS = 1_000_000
CLASSES = ("ReplayBuffer", "TensorDictReplayBuffer")
NO_SUCH_CLASS = "cpprb: no counterpart of TensorDictReplayBuffer."


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Bytes per row beyond the data, in files and in the resident set; ``share`` changes nothing here."""
    del share
    for buffer in CLASSES:
        found = {library.name: _folder(library, buffer) for library in _present(libraries, buffer)}
        what = f"files beyond the data, per row · {buffer}"
        yield _row(f"memory/folder/{buffer}", what, found, buffer)
    for buffer in CLASSES:
        names = [library.name for library in _present(libraries, buffer)]
        found = {name: _in_new_process(name, buffer) for name in names}
        what = f"resident beyond the data, per row · {buffer}"
        yield _row(f"memory/resident/{buffer}", what, found, buffer)


def _present(libraries: rivals.Libraries, buffer: str) -> list[rivals.Library]:
    """The libraries that are there and have this class."""
    return [
        library
        for library in libraries.values()
        if library.module is not None
        and (library.name in rivals.TORCH_LIKE or (library.name == "cpprb" and buffer == "ReplayBuffer"))
    ]


def _row(key: str, what: str, found: dict[str, float], buffer: str) -> Row:
    spreads = {name: Spread.of([value]) for name, value in found.items()}
    comparisons = []
    if "engram" in spreads:
        floor = FLOORS.get((key, "the data"))
        comparisons.append(Comparison("the data", "value", spreads["engram"], floor))
    notes = {"cpprb": NO_SUCH_CLASS} if buffer != "ReplayBuffer" else {}
    return Row(key, what, spreads, comparisons, unit="B/row", notes=notes)


def _folder(library: rivals.Library, buffer: str) -> float:
    """Bytes per row that the folder of a full memory-mapped buffer takes beyond its data."""
    fields = data.fields()
    with tempfile.TemporaryDirectory() as name:
        replay = _written(library, buffer, "memmap", fields, data.ROWS, Path(name))
        occupied = sum(_occupied(Path(root, file)) for root, _, files in os.walk(name) for file in files)
        data.check(_batch(library, replay))
    return (occupied - data.ROWS * data.ROW_BYTES) / data.ROWS


def _occupied(path: Path) -> int:
    """Bytes on disk, once the file system has decided where they go."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_blocks * 512


def _in_new_process(name: str, buffer: str) -> float:
    """``_resident`` where nothing was freed before: memory in reserve would hide the growth."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_resident, name, buffer).result()


def _resident(name: str, buffer: str) -> float:
    """Bytes per row that the resident set grows beyond the data."""
    libraries = rivals.load()
    rivals.set_threads(libraries, 1)
    library = libraries[name]
    fields = data.fields(RESIDENT_ROWS)
    few = {key: value[:1000] for key, value in fields.items()}
    _written(library, buffer, "tensor", few, 1000, Path())  # loads the code and warms the allocator
    gc.collect()
    before = _resident_bytes()
    replay = _written(library, buffer, "tensor", fields, RESIDENT_ROWS, Path())
    gc.collect()
    grown = _resident_bytes() - before
    data.check(_batch(library, replay), RESIDENT_ROWS)
    return (grown - RESIDENT_ROWS * data.ROW_BYTES) / RESIDENT_ROWS


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _written(
    library: rivals.Library, buffer: str, storage: str, fields: data.Fields, capacity: int, folder: Path
) -> Any:
    """A full buffer, written in pieces of 1,000 rows, so that no copy of everything is made on the way."""
    if library.name == "cpprb":
        files = folder if storage == "memmap" else None
        replay = rivals.cpprb_buffer(library, data.arrays(fields), capacity, files)
    else:
        replay = rivals.torch_like(library, storage, capacity, folder, batch_size=data.BATCH, buffer=buffer)
    for start in range(0, capacity, 1000):
        piece = {key: value[start : start + 1000] for key, value in fields.items()}
        if library.name == "cpprb":
            replay.add(**data.arrays(piece))
        else:
            replay.extend(data.tensordict(piece))
    return replay


def _batch(library: rivals.Library, replay: Any) -> object:
    return replay.sample(data.BATCH) if library.name == "cpprb" else replay.sample()
