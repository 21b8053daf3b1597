"""What lies on disk, in words and numbers: schema, sizes, rows, trajectories, priorities. Reads no rows and changes nothing."""

from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engram.errors import CorruptCheckpoint, CorruptStore, IncompatibleCheckpoint, IncompatibleStore
from engram.format import control, disk, files, layout, schema, series, tables
from engram.format.checkpoints import MANIFEST, Checkpoint, Totals, added
from engram.format.histograms import MOST, histogram
from engram.format.part_reader import PartReader
from engram.format.schema import PartField
from engram.format.verify import is_aborted, kind_of, read_store, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Entries = dict[str, object]

#: Where a state keeps priorities: an array of float64, one per row.
LEAVES = "leaves"
#: Where the state of a storage keeps those of its indexes, by name.
INDEXES = "priorities"

_CHUNK = 1 << 20
_PRIORITIES = struct.Struct("=8sQQdddd")


def describe(path: Path) -> Entries:
    """A description of a dump, a checkpoint, an attempt at one, a series, a part or a live store, in JSON values.

    ``problems`` in it lists what is damaged, as ``verify`` finds it at level ``meta``: each with ``file``, ``offset`` and ``what``.
    What cannot be read is left out. Times are those of files; ``age_s`` are seconds since then.

    Raises:
        FileNotFoundError: nothing of ours lies there.
        OSError: no permission, an I/O error.

    Cost: reads tables and priorities, in pieces of 1 MiB.
    """
    kind = kind_of(path)
    found: Entries = {"path": str(path), "kind": kind}
    report = verify(path, "meta")
    try:
        if kind == "store":
            found |= _store(path)
        elif kind == "series":
            found |= _series(path)
        elif kind == "part":
            with PartReader(path) as part:
                found |= _part(part)
        elif kind == "attempt" or (kind == "checkpoint" and is_aborted(path)):
            found |= _attempt(path)
        else:
            with Checkpoint(path) as checkpoint:
                found |= _checkpoint(checkpoint)
    except (CorruptCheckpoint, CorruptStore, IncompatibleCheckpoint, IncompatibleStore):
        assert report.problems, "what cannot be read is a problem"
    found["problems"] = [problem.entry() for problem in report.problems]
    found["notes"] = [note.entry() for note in report.notes]
    return found


def moment(name: str, *paths: Path) -> Entries:
    """When the last of these files was changed, under that name, and ``age_s``; nothing, if one is missing."""
    try:
        changed = max(path.stat().st_mtime for path in paths)
    except OSError:
        return {}
    at = datetime.fromtimestamp(changed, UTC)
    age = max(0.0, (datetime.now(UTC) - at).total_seconds())
    return {name: at.strftime("%Y-%m-%dT%H:%M:%SZ"), "age_s": round(age, 1)}


def _field(field: schema.Column) -> Entries:
    entries = {"key": list(field.key), "dtype": field.dtype, "shape": list(field.shape), "row_bytes": field.row_bytes}
    return entries | {"role": field.role} if isinstance(field, PartField) else entries


def _attempt(path: Path) -> Entries:
    """An attempt that is no checkpoint: what became of it, and what each rank voted and saved."""
    attempt, made = series.read_attempt(path), series.decision(path)
    votes, totals = [], []
    for vote in series.votes(path, attempt):
        said: Entries = {"rank": vote.rank, "vote": "none"}
        if vote.shard is not None:
            said |= {"vote": "yes", "step": vote.shard.step, **_in_short([vote.shard.totals])}
            totals.append(vote.shard.totals)
        elif vote.error is not None:
            said |= {"vote": "no", "error": vote.error}
        votes.append(said)
    return {
        **{name: value for name, value in msgspec.to_builtins(attempt).items() if name not in ("format", "version")},
        "status": "undecided" if made is None else made.status,
        "reasons": [] if made is None else list(made.reasons),
        "totals": msgspec.to_builtins(added(totals)),
        "votes": votes,
    }


def _in_short(shards: Sequence[Totals]) -> dict[str, int]:
    return {
        "steps": sum(totals.steps for totals in shards),
        "episodes": sum(totals.episodes for totals in shards),
        "bytes": sum(totals.bytes_logical for totals in shards),
        "bytes_linked": sum(totals.bytes_linked for totals in shards),
    }


def _checkpoint(checkpoint: Checkpoint) -> Entries:
    manifest = checkpoint.manifest
    shards = []
    totals: list[Totals] = []
    for rank in range(manifest.world):
        found: Entries = {"rank": rank}
        parts: Entries = {}
        try:
            shard = checkpoint.shard(rank)
            totals.append(shard.totals)
            found |= {"cut": msgspec.to_builtins(shard.cut), "totals": msgspec.to_builtins(shard.totals)}
            found |= {"layout": shard.layout, "parts": parts}
            for part in checkpoint.parts(rank):
                parts[part.folder.relative_to(checkpoint.shard_folder(rank)).as_posix()] = _part(part)
        except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
            found["problem"] = str(error)
        shards.append(found)
    return {
        "name": manifest.name,
        "sha256": checkpoint.sha256,
        "step": manifest.step,
        "world": manifest.world,
        "trigger": manifest.trigger,
        "parent": manifest.parent,
        "user": manifest.user,
        **moment("saved", checkpoint.folder / MANIFEST),
        "totals": msgspec.to_builtins(added(totals)),
        "shards": shards,
    }


def _part(part: PartReader) -> Entries:
    found: Entries = {"part": part.part, "type": part.type, "name": part.name, "bytes": sum(part.files.values())}
    if part.geometry is not None:
        found["geometry"] = msgspec.to_builtins(part.geometry)
    if part.schema is not None:
        found["fields"] = [*map(_field, part.schema)]
        found["segment_rows"] = part.segment_rows
    if "lanes" in part.records:
        lanes = part.lanes()
        found["rows"] = sum(lane.live_rows for lane in lanes)
        found["lanes"] = {
            "open": sum(lane.is_open for lane in lanes),
            "fewest_rows": min(lane.live_rows for lane in lanes),
            "most_rows": max(lane.live_rows for lane in lanes),
        }
    if "trajectories" in part.records and part.geometry is not None:
        found["trajectories"] = _trajectories(part.trajectories(), math.prod(part.geometry.columns))
    if (described := _priorities_of(part, part.state)) is not None:
        found["priorities"] = described
    every = part.state.get(INDEXES)
    states = every.items() if isinstance(every, dict) else ()
    indexes = [{"name": name, **it} for name, state in states if (it := _priorities_of(part, state)) is not None]
    return found | {"indexes": indexes} if indexes else found


def _priorities_of(part: PartReader, state: object) -> Entries | None:
    """Of a state that has leaves; None: it has none."""
    leaves = state.get(LEAVES) if isinstance(state, dict) else None
    number = leaves.get("$array") if isinstance(leaves, dict) else None
    if not isinstance(state, dict) or not isinstance(number, int) or part.arrays[number].dtype != "float64":
        return None
    names = {"alpha": "alpha", "beta": "beta", "eps": "eps", "highest": "max_priority"}
    parameters = {name: state[key] for key, name in names.items() if key in state}
    return _priorities(parameters, part.arrays[number].nbytes, lambda into, offset: part.read(number, offset, into))


def _trajectories(every: Iterable[tables.Trajectory], columns: int) -> Entries:
    """How many, of how many steps, of which kinds, and how long those are that are complete. ``every``: by lane and position."""
    lengths = Counter[float]()
    kinds = dict.fromkeys(("complete", "open", "headless", "both", "mid", "orphan"), 0)
    count = shortest = longest = 0
    lane, seen = -1, set[int]()
    for it in every:
        count += 1
        steps = (it.end - it.first) // columns
        shortest = steps if count == 1 else min(shortest, steps)
        longest = max(longest, steps)
        if it.lane != lane:
            lane, seen = it.lane, set()
        kind = _kind(it.flags, oldest=it.first % columns not in seen)
        kinds[kind] += 1
        seen.add(it.first % columns)
        if kind == "complete":
            lengths[steps] += 1
    return {
        "count": count,
        "shortest": shortest,
        "longest": longest,
        **kinds,
        "lengths": histogram(lengths, whole=True),
    }


def _kind(flags: int, *, oldest: bool) -> str:
    """What is there of a trajectory. ``oldest``: of its lane, or of a column."""
    last, is_open = bool(flags & tables.HAS_LAST), bool(flags & tables.OPEN)
    if flags & tables.HAS_FIRST:
        return "complete" if last else "open" if is_open else "mid"
    if oldest and (last or is_open):
        return "headless" if last else "both"
    return "orphan"


def _priorities(parameters: Entries, nbytes: int, read: Callable[[memoryview, int], None]) -> Entries:
    """Of the leaves above zero: how many, the smallest and the largest. Of all: the sum. And a histogram of priorities."""
    live, total, smallest, largest = 0, 0.0, math.inf, 0.0
    looked = Counter[float]()
    chunk = memoryview(bytearray(min(_CHUNK, nbytes)))
    step = -(-nbytes // 8 // MOST) or 1
    for at in range(0, nbytes, _CHUNK):
        piece = chunk[: min(_CHUNK, nbytes - at)]
        read(piece, at)
        leaves = array("d")
        leaves.frombytes(piece)
        if sys.byteorder == "big":
            leaves.byteswap()
        positive = [leaf for leaf in leaves if leaf > 0]
        if positive:
            live += len(positive)
            total += math.fsum(positive)
            smallest, largest = min(smallest, *positive), max(largest, *positive)
            looked.update(leaf for leaf in leaves[::step] if leaf > 0)
    found = {"drawable": live, "sum": total, "min": smallest if live else None, "max": largest if live else None}
    return parameters | found | {"histogram": histogram(_of_leaves(looked, parameters))}


def _of_leaves(leaves: Counter[float], parameters: Entries) -> Counter[float]:
    """The priorities that have these leaves, ``(priority + eps) ** alpha``. Without an exponent, or with 0, the leaves."""
    alpha, eps = parameters.get("alpha"), parameters.get("eps", 0.0)
    if not isinstance(alpha, float) or not isinstance(eps, float) or not 0 < alpha < math.inf or not math.isfinite(eps):
        return leaves
    priorities = Counter[float]()
    for leaf, number in leaves.items():
        try:
            priorities[max(leaf ** (1 / alpha) - eps, 0.0)] += number
        except OverflowError:
            return leaves
    return priorities


def _series(root: Path) -> Entries:
    rows = []
    known = series.Known()
    for name in series.names(root):
        folder = root / str(name)
        row: Entries = {"name": str(name), "step": name.step, "epoch": name.epoch}
        wrong = series.look(folder, known)
        if wrong is None:
            with known.open(folder) as checkpoint:
                totals = [checkpoint.shard(rank).totals for rank in range(checkpoint.manifest.world)]
                row |= {"status": "complete", "world": checkpoint.manifest.world, **_in_short(totals)}
                row |= moment("saved", folder / MANIFEST)
        else:
            row["status"] = wrong.what
        rows.append(row)
    newest = next((row["name"] for row in rows if row["status"] == "complete"), None)
    return {"epoch": series.newest_epoch(root), "latest": newest, "checkpoints": rows}


def _store(path: Path) -> Entries:
    folder = path / layout.FOLDER
    decoded, header = read_store(path)
    raw = bytearray(control.control_bytes(header.lanes))
    _read_file(folder / layout.CONTROL, memoryview(raw), 0)
    filled = control.filled(bytes(raw[control.FIXED_BYTES :]), header)
    return {
        **moment("created", folder / layout.STORE),
        **moment("written", folder / layout.CONTROL, folder / layout.TICKETS),
        "capacity": decoded.capacity,
        "lanes": {"count": decoded.lanes, "fewest_rows": min(filled), "most_rows": max(filled)},
        "columns": list(decoded.columns),
        "rows": sum(filled),
        "clean": header.clean,
        "processes": [] if header.clean else control.processes(bytes(raw[: control.FIXED_BYTES])),
        "row_bytes": decoded.row_bytes,
        "bytes": decoded.row_bytes * decoded.capacity,
        "fields": [*map(_field, decoded.fields)],
        "indexes": [_index(index) for index in sorted((folder / layout.INDEXES).glob("*/[!.]*"))],
    }


def _index(path: Path) -> Entries:
    nbytes = path.lstat().st_size
    found: Entries = {"name": path.parent.name, "kind": path.name, "bytes": nbytes}
    page = bytearray(4096)
    if path.name != "priorities" or nbytes < len(page):
        return found
    _read_file(path, memoryview(page), 0)
    magic, leaves, _, eps, alpha, beta, highest = _PRIORITIES.unpack_from(page)
    if magic == b"engprio\1" and leaves * 8 <= nbytes - len(page):
        parameters: Entries = {"alpha": alpha, "beta": beta, "eps": eps, "max_priority": highest}
        found |= _priorities(parameters, leaves * 8, lambda into, offset: _read_file(path, into, len(page) + offset))
    return found


def _read_file(path: Path, into: memoryview, offset: int) -> None:
    with files.open_regular(path, os.O_RDONLY) as fd:
        if disk.read(fd, into, offset) != len(into):
            raise CorruptStore(f"{path}: expected {offset + len(into)} bytes, the file has become shorter.")
