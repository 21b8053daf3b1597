"""Checking what lies on disk: a dump, a checkpoint, a series of them, a part, or a live store. Changes nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING, Literal, NamedTuple

from engram._support.progress import Work
from engram.errors import CorruptCheckpoint, CorruptStore, IncompatibleCheckpoint, IncompatibleStore
from engram.format import control, disk, files, layout, leases, pins, schema, series
from engram.format.checkpoints import ATTEMPT, MANIFEST, REFUSAL, SHARD, Checkpoint, rank_folder
from engram.format.description import PART, SUMS
from engram.format.part_reader import Level, PartReader
from engram.format.problems import Problem, problem_of, read_small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engram._support.progress import OnProgress
    from engram.format.checkpoints import Manifest

__all__ = ["Kind", "Report", "is_aborted", "kind_of", "read_store", "store_header", "verify"]

Kind = Literal["store", "dump", "checkpoint", "attempt", "part", "series"]

#: Where a folder holds nothing itself: how many folders in it are looked at, and how many of them are named.
_LOOKED_AT, _NAMED = 100, 3


class Report(NamedTuple):
    """What was found."""

    path: Path
    kind: Kind
    level: Level
    problems: list[Problem]
    """What is damaged; empty: it is good."""
    notes: list[Problem]
    """What is not damage: attempts that were aborted or not decided, a hint that is out of date."""

    @property
    def good(self) -> bool:
        return not self.problems


def kind_of(path: Path) -> Kind:
    """What is in a folder, or was before one of its files was lost.

    Raises:
        FileNotFoundError: nothing of ours; of folders directly in it that hold something, it names some.
        OSError: no folder, or no permission.
    """
    kind = _kind_of(path)
    if kind is not None:
        return kind
    inside = [*itertools.islice(_inside(path), _NAMED)]
    hint = (
        f"Name what is in it: {', '.join(inside)}"
        if inside
        else "If there was one, the files that describe it are gone"
    )
    raise FileNotFoundError(
        f"{path}: expected a checkpoint, a folder of checkpoints, a dump or a store, found none. {hint}."
    )


def _inside(path: Path) -> Iterator[str]:
    """Folders directly in it that hold something of ours, as far as they may be read."""
    for name in sorted(os.listdir(path))[:_LOOKED_AT]:
        with contextlib.suppress(OSError):
            if (path / name).is_dir() and _kind_of(path / name):
                yield str(path / name)


def _kind_of(path: Path) -> Kind | None:
    disk.look_again(path)
    lies = set(os.listdir(path))
    hidden = set(os.listdir(path / layout.FOLDER)) if layout.FOLDER in lies else set()
    if ATTEMPT in lies or any(name.startswith("rank-") for name in lies):
        return "checkpoint" if MANIFEST in lies else "attempt"
    if lies & {MANIFEST, SHARD}:
        return "dump"
    if (lies | hidden) & {PART, SUMS}:
        return "part"
    if hidden & {layout.STORE, layout.CONTROL}:
        return "store"
    if series.is_series(path):
        return "series"
    return None


def verify(path: Path, level: Level = "full", progress: OnProgress | None = None) -> Report:
    """Look at everything below ``path``.

    Args:
        path: of any kind that ``kind_of`` knows.
        level: ``meta``: descriptions, digests, and the exact size of every file. ``read``: every block of a checkpoint too.
            ``full``: and no file that is not listed. A live store changes, and has no sums: it is looked at as by ``meta``.
        progress: called with a :class:`Progress` now and then. None: a bar on a terminal, if it takes longer than a second.

    Raises:
        FileNotFoundError: nothing of ours lies there.
        OSError: no permission, an I/O error.

    Cost: reads every byte once, but for ``meta``; memory does not depend on the size.
    """
    with Work("checking", 0, progress) as work:
        return _verified(path, level, work)


def _verified(path: Path, level: Level, work: Work) -> Report:
    kind = kind_of(path)
    notes: list[Problem] = []
    problems: list[Problem] = []
    try:
        if kind == "series":
            problems, notes = _series(path, level, work)
        elif kind == "attempt" or (kind == "checkpoint" and is_aborted(path)):
            said = list(filter(None, [series.look(path)]))
            (problems if _lacks_manifest(path) else notes).extend(said)
            problems.extend(_partial(path, level))
        else:
            problems.extend(_found(path, kind, level, work))
    except CorruptCheckpoint as error:
        problems.append(problem_of(error))
    except (CorruptStore, IncompatibleStore, IncompatibleCheckpoint) as error:
        problems.append(_said(path, error))
    return Report(path, kind, level, problems, notes)


def read_store(path: Path) -> tuple[schema.Schema, control.Header]:
    """The description and the header of a live store.

    Raises:
        CorruptStore: it is damaged, or not of its description.
    """
    folder = path / layout.FOLDER
    description = files.read_small(folder / layout.STORE, schema.MAX_BYTES)
    decoded = schema.decode_store(description, str(folder / layout.STORE))
    files.check_size(folder / layout.CONTROL, control.control_bytes(decoded.lanes))
    fd = files.open_regular(folder / layout.CONTROL, os.O_RDONLY)
    try:
        raw = bytearray(control.FIXED_BYTES)
        disk.read(fd, memoryview(raw), 0)
        header = control.parse(bytes(raw))
    except ValueError as error:
        raise CorruptStore(f"{folder / layout.CONTROL}: {error}.") from error
    finally:
        fd.close()
    sums = schema.first_fingerprints(decoded, description)
    if (header.capacity, header.lanes) != (decoded.capacity, decoded.lanes) or header.schema_sum not in sums:
        raise CorruptStore(
            f"{folder / layout.CONTROL}: expected the header of this store's description, got another's."
        )
    return decoded, header


def store_header(path: Path) -> control.Header:
    """The header of a live store. Raises as :func:`read_store`."""
    return read_store(path)[1]


def _said(path: Path, error: Exception) -> Problem:
    """The problem in the message of an exception that names its file itself."""
    return Problem(path, str(error).removeprefix(f"{path}: ").removesuffix("."))


def _found(path: Path, kind: Kind, level: Level, work: Work) -> Iterator[Problem]:
    if kind == "store":
        yield from _store(path)
    elif kind == "part":
        with PartReader(path, progress=work) as part:
            work.total += sum(part.files.values())
            yield from part.problems(level)
    else:
        with Checkpoint(path) as checkpoint:
            if not work.total:
                work.total = checkpoint.nbytes
            checkpoint.progress = work
            yield from checkpoint.problems(level)
            if not checkpoint.is_dump:
                yield from _attempt(path, checkpoint.manifest)


def is_aborted(path: Path) -> bool:
    """Whether an attempt was aborted. Raises ``CorruptCheckpoint``: the decision is damaged."""
    made = series.decision(path)
    return made is not None and made.status == "aborted"


def _lacks_manifest(path: Path) -> bool:
    """Whether all ranks voted for an attempt, so that its decision was lost, or the process that was about to decide died."""
    return series.decision(path) is None and all(vote.shard is not None for vote in series.votes(path))


def _partial(path: Path, level: Level) -> Iterator[Problem]:
    """Damage in the shards of an undecided attempt, which can be restored."""
    if series.decision(path) is None:
        for vote in series.votes(path):
            own = path / rank_folder(vote.rank, series.read_attempt(path).world)
            if vote.error is not None and not os.path.lexists(own / REFUSAL):
                yield Problem(own / SHARD, vote.error.removeprefix(f"{own / SHARD}: ").removesuffix("."))
    if series.is_partial(path):
        with series.open_partial(path) as checkpoint:
            yield from checkpoint.problems("read" if level == "full" else level)  # others may be writing beside it


def _attempt(path: Path, manifest: Manifest) -> Iterator[Problem]:
    """Compares ``attempt.json``, which no digest names, with the manifest, which repeats it."""
    try:
        attempt = series.read_attempt(path)
    except CorruptCheckpoint as error:
        yield problem_of(error)
        return
    for entry in ("name", "step", "world", "trigger", "parent", "user"):
        expected, got = getattr(manifest, entry), getattr(attempt, entry)
        if expected != got:
            yield Problem(path / ATTEMPT, f"expected the {entry} {expected!r:.100} of the manifest, got {got!r:.100}")


def _series(root: Path, level: Level, work: Work) -> tuple[list[Problem], list[Problem]]:
    problems: list[Problem] = []
    notes: list[Problem] = []
    for name in series.names(root) if level != "meta" else ():
        with (
            contextlib.suppress(OSError, CorruptCheckpoint, IncompatibleCheckpoint),
            Checkpoint(root / str(name)) as one,
        ):
            work.total += one.nbytes
    for name in series.names(root):
        folder = root / str(name)
        try:
            made = series.decision(folder)
        except CorruptCheckpoint as error:
            problems.append(problem_of(error))
            continue
        except IncompatibleCheckpoint as error:
            problems.append(_said(folder, error))
            continue
        if made is None or made.status == "aborted":
            notes += filter(None, [series.look(folder)])
            try:
                notes += _partial(folder, level)
            except CorruptCheckpoint as error:
                notes.append(problem_of(error))
        else:
            problems += _verified(folder, level, work).problems
    hint = root / series.LATEST
    notes += [problem for problem in series.latest(root)[1] if problem.path == hint]
    notes += leases.problems(root)
    notes += pins.problems(root)
    return problems, notes


def _store(path: Path) -> Iterator[Problem]:
    """A store that may be in use: what never changes of it, and the sizes of its files."""
    decoded, _ = read_store(path)
    folder = path / layout.FOLDER
    rows = layout.row_files(path, decoded).values()
    sizes = {file: size * decoded.capacity for file, size in rows if size}  # empty rows have no file
    earlier = schema.is_earlier(files.read_small(folder / layout.STORE, schema.MAX_BYTES))
    sizes[folder / layout.TICKETS] = layout.tickets_bytes(decoded.capacity, earlier=earlier)
    sizes[folder / layout.ALIVE] = 0
    for file, nbytes in sizes.items():
        try:
            files.check_size(file, nbytes)
        except CorruptStore as error:
            yield _said(file, error)
    fd = disk.open_folder(path)
    try:
        # A process that died may not have described the field that it was adding: the next one to open the store does.
        before = layout.meta_files(path, decoded.until(len(decoded.fields) - 1)) if decoded.added else {}
        for file, raw in layout.meta_files(path, decoded).items():
            if before and file not in before and not file.exists():
                continue
            try:
                if read_small(path, fd, file.relative_to(path).as_posix(), schema.MAX_BYTES) not in (
                    raw,
                    before.get(file),
                ):
                    yield Problem(file, "expected what the store's description says, got something else")
            except CorruptCheckpoint as error:
                yield problem_of(error)
    finally:
        fd.close()
