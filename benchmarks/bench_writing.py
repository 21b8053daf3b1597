"""Claim: writing rows is many times faster than with TorchRL, one by one and in batches; keeping the best rows costs little more.

Measured: ``add`` of one TensorDict and ``extend`` by 64 rows into a full buffer of 100,000 rows in RAM (the ring
wraps, nothing is allocated), with ``ReplayBuffer`` and ``TensorDictReplayBuffer`` on both sides; and filling a new
buffer by ``extend`` of 64 until its 100,000 rows are written, the creation of the storage included. cpprb's ``add``
gets the same fields as NumPy arrays by keyword, one row or 64. Every call writes other rows than the previous one.
``extend`` of a ``TensorDictMaxValueWriter`` whose storage is full is put over a plain one of the same rows: if it keeps all
of them, none, or every second one. One thread.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import data, rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

WRITE = Effort(calls=100, blocks=100)
FILL = Effort(calls=1, blocks=7, warmup=1, lead=0)
"""One call makes a buffer, fills it with 1,563 writes, draws one batch as proof and drops the buffer."""

CHUNK = 64
KEPT = {"all": 1, "half": 2, "none": 0}
"""Of how many rows the best writer keeps one."""
LAP = 128
"""Writes after which the same tensors come again, with higher ranks."""

BY_KEYWORD = "cpprb: NumPy arrays by keyword, it takes no TensorDict."


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Steady writing for both buffer classes, then filling in RAM and memory-mapped."""
    fields = data.fields()
    single = data.pieces({key: value[: 10 * CHUNK] for key, value in fields.items()}, 1)
    chunks = data.pieces(fields, CHUNK)
    for buffer in ("ReplayBuffer", "TensorDictReplayBuffer"):
        yield _steady(libraries, "add", buffer, fields, single, share)
        yield _steady(libraries, "extend", buffer, fields, chunks, share)
    for storage in ("tensor", "memmap"):
        yield _fill(libraries, storage, chunks, share)
    for kept in KEPT:
        for rows in (1, 8, 64, 512):
            yield _best(libraries["engram"].module, kept, rows, share)


def _steady(
    libraries: rivals.Libraries,
    verb: str,
    buffer: str,
    fields: data.Fields,
    pieces: Sequence[data.Fields],
    share: float,
) -> Row:
    """``add`` or ``extend`` into a full buffer."""
    sides = []
    for name in rivals.TORCH_LIKE:
        if libraries[name].module is not None:
            replay = _full(libraries[name], buffer, fields)
            sides.append(Side(name, data.each(getattr(replay, verb), data.tensordicts(pieces))))
            data.check(replay.sample())
    if libraries["cpprb"].module is not None:
        replay = rivals.cpprb_buffer(libraries["cpprb"], data.arrays(fields), data.ROWS)
        replay.add(**data.arrays(fields))
        sides.append(Side("cpprb", _each_by_keyword(replay.add, [data.arrays(piece) for piece in pieces])))
    timing = alternate(sides, WRITE.scaled(share))
    key, rows = ("write/add", "one row") if verb == "add" else ("write/extend-64", "64 rows")
    what = f"{verb} {rows} · TensorDict · {buffer}"
    notes = {"cpprb": BY_KEYWORD}
    return timed(f"{key}/{buffer}", what, timing, times=("TorchRL", "cpprb"), notes=notes)


def _full(library: rivals.Library, buffer: str, fields: data.Fields) -> Any:
    """A buffer in RAM whose every row is written."""
    replay = rivals.torch_like(library, "tensor", data.ROWS, Path(), batch_size=data.BATCH, buffer=buffer)
    replay.extend(data.tensordict(fields))
    return replay


def _best(engram: Any, kept: str, rows: int, share: float) -> Row:
    """``extend`` into a full storage that keeps the best rows, and into one that overwrites the oldest."""
    writers = {"engram": engram.TensorDictMaxValueWriter("rank"), "plain extend": engram.RoundRobinWriter()}
    sides = []
    for name, writer in writers.items():
        storage = engram.LazyTensorStorage(data.ROWS)
        replay = engram.TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=data.BATCH)
        replay.extend(data.tensordict({**data.fields(), "rank": torch.rand(data.ROWS)}))
        sides.append(Side(name, _each_better(replay.extend, kept, rows)))
        data.check(replay.sample())
    timing = alternate(sides, WRITE.scaled(share))
    what = f"extend {rows} · the best rows, {kept} kept"
    return timed(f"write/best/{kept}/{rows}", what, timing, share=("plain extend",))


def _each_better(write: Callable[[Any], object], kept: str, rows: int) -> Callable[[], object]:
    """``write`` of the next rows, each of which, of every second one or of none ranks above all before."""
    fields = {**data.fields(LAP * rows), "rank": torch.full((LAP * rows,), -1.0)}
    rising = fields["rank"][:: KEPT[kept]] if KEPT[kept] else fields["rank"][:0]
    rising.copy_(torch.linspace(1, 2, len(rising)))
    pieces = [TensorDict(part, [rows]) for part in _parts(fields, rows)]

    def endless() -> Iterator[Any]:
        while True:
            yield from pieces
            rising.add_(1)  # once per lap: next to nothing, and the same on both sides

    upcoming = endless().__next__

    def call() -> object:
        return write(upcoming())

    return call


def _parts(fields: data.Fields, size: int) -> Iterator[data.Fields]:
    for part in zip(*(torch.split(column, size) for column in fields.values()), strict=True):
        yield dict(zip(fields, part, strict=True))


def _fill(libraries: rivals.Libraries, storage: str, pieces: Sequence[data.Fields], share: float) -> Row:
    """From no buffer to a full one. Reported in rows per second; the ratios are those of the times."""
    with tempfile.TemporaryDirectory() as name:
        sides = []
        for library in (libraries[n] for n in rivals.TORCH_LIKE if libraries[n].module is not None):
            tensordicts = data.tensordicts(pieces)
            sides.append(Side(library.name, _filler(library, storage, tensordicts, Path(name))))
        if libraries["cpprb"].module is not None:
            arrays = [data.arrays(piece) for piece in pieces]
            sides.append(Side("cpprb", _cpprb_filler(libraries["cpprb"], storage, arrays, Path(name))))
        timing = alternate(sides, FILL.scaled(share))
    what = f"fill by 64 · TensorDict · {rivals.SHORT[storage]}, rows/s"
    notes = {"cpprb": BY_KEYWORD}
    row = timed(f"write/fill/{storage}", what, timing, times=("TorchRL", "cpprb"), notes=notes)
    return row.as_rate(data.ROWS)


def _filler(library: rivals.Library, storage: str, pieces: Sequence[Any], root: Path) -> Callable[[], object]:
    def fill() -> object:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            replay = rivals.torch_like(library, storage, data.ROWS, Path(folder), batch_size=data.BATCH)
            for piece in pieces:
                replay.extend(piece)
            return replay.sample()

    return data.checked(fill)


def _cpprb_filler(
    cpprb: rivals.Library, storage: str, pieces: Sequence[dict[str, Any]], root: Path
) -> Callable[[], object]:
    def fill() -> object:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            files = Path(folder) if storage == "memmap" else None
            replay = rivals.cpprb_buffer(cpprb, pieces[0], data.ROWS, files)
            for piece in pieces:
                replay.add(**piece)
            return replay.sample(data.BATCH)

    return data.checked(fill)


def _each_by_keyword(write: Callable[..., object], pieces: Sequence[dict[str, Any]]) -> Callable[[], object]:
    """As ``data.each``, with the fields as keyword arguments."""
    upcoming = cycle(pieces).__next__

    def call() -> object:
        return write(**upcoming())

    return call
