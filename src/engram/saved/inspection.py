"""Looks at what lies on disk, and changes nothing: which kind of folder it is, what is wrong with it, and what is in it."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec

from engram._support.progress import OnProgress, Work
from engram._support.words import raise_as
from engram.errors import CorruptCheckpoint, CorruptStore, IncompatibleStore
from engram.format import files, layout, schema, sizes
from engram.saved import attempts, checkpoints, description, disk, documents
from engram.saved.part_reader import Level, PartReader
from engram.saved.series import LATEST, Series

__all__ = ["Kind", "Report", "is_aborted", "kind_of", "read_store", "store_header", "verify"]

#: A description in JSON values, or a part of one.
Entries: TypeAlias = dict[str, Any]
Kind = Literal["store", "dump", "checkpoint", "attempt", "part", "series"]

#: What is raised of something that is damaged, or of a newer engram.
_DAMAGE = (*documents.UNREADABLE, CorruptStore, IncompatibleStore)
#: Where a folder holds nothing itself: how many folders in it are looked at, and how many of them are named.
_LOOKED_AT, _NAMED = 100, 3


class Report(NamedTuple):
    """The result of a verification."""

    path: Path
    kind: Kind
    level: Level
    #: What is damaged; empty: it is good.
    problems: list[documents.Problem]
    #: What is not damage: attempts that were aborted or not decided, a hint that is out of date.
    notes: list[documents.Problem]

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
    known = f"Name what is in it: {', '.join(inside)}"
    hint = known if inside else "If there was one, the files that describe it are gone"
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
    if documents.ATTEMPT in lies or any(name.startswith("rank-") for name in lies):
        return "checkpoint" if documents.MANIFEST in lies else "attempt"
    if lies & {documents.MANIFEST, documents.SHARD}:
        return "dump"
    if (lies | hidden) & {description.PART, description.SUMS}:
        return "part"
    if hidden & {layout.STORE, layout.CONTROL}:
        return "store"
    if layout.is_series(path):
        return "series"
    return None


def verify(path: Path, level: Level = "full", progress: OnProgress | None = None) -> Report:
    """Look at everything below ``path``.

    Args:
        path: of any kind that ``kind_of`` knows.
        level: ``meta``: descriptions, digests, and the exact size of every file. ``read``: every block of a checkpoint too, and
            whether the items of ragged fields are where rows say.
            ``full``: and no file that is not listed. A live store changes, and has no sums: it is looked at as by ``meta``.
        progress: called with a :class:`Progress` now and then. None: a bar on a terminal, if it takes longer than a second.

    Raises:
        FileNotFoundError: nothing of ours lies there.
        OSError: no permission, an I/O error.

    Cost: reads every byte once, but for ``meta``. Memory does not depend on the size, but for 150 bytes per row with ragged fields.
    """
    with Work("checking", 0, progress) as work:
        return _verified(path, level, work)


def _verified(path: Path, level: Level, work: Work) -> Report:
    kind = kind_of(path)
    notes: list[documents.Problem] = []
    problems: list[documents.Problem] = []
    try:
        if kind == "series":
            problems, notes = _series(path, level, work)
        elif kind == "attempt" or (kind == "checkpoint" and is_aborted(path)):
            said = list(filter(None, [Series(path.parent).look(path.name)]))
            # All ranks voted: the decision was lost, or the process died that was about to decide.
            lacks = attempts.decision(path) is None and all(vote.shard is not None for vote in attempts.votes(path))
            (problems if lacks else notes).extend(said)
            problems.extend(_partial(path, level))
        else:
            problems.extend(_found(path, kind, level, work))
    except _DAMAGE as error:
        problems.append(documents.problem_of(error, path))
    return Report(path, kind, level, problems, notes)


def read_store(path: Path) -> tuple[schema.Schema, files.ControlHeader]:
    """The description and the header of a live store.

    Raises:
        CorruptStore: it is damaged, or not of its description.
    """
    folder = path / layout.FOLDER
    description = files.read_small(folder / layout.STORE, schema.MAX_BYTES)
    decoded = schema.decode_store(description, str(folder / layout.STORE))
    files.check_size(folder / layout.CONTROL, files.control_bytes(decoded.lanes))
    raw = bytearray(files.FIXED_BYTES)
    _read_file(folder / layout.CONTROL, memoryview(raw), 0)
    with raise_as(CorruptStore, folder / layout.CONTROL):
        header = files.parse_control(bytes(raw))
    sums = schema.first_fingerprints(decoded, description)
    if (header.capacity, header.lanes) != (decoded.capacity, decoded.lanes) or header.schema_sum not in sums:
        raise CorruptStore(f"{folder / layout.CONTROL}: expected the header of this description, got another's.")
    return decoded, header


def store_header(path: Path) -> files.ControlHeader:
    """The header of a live store. Raises as :func:`read_store`."""
    return read_store(path)[1]


def _found(path: Path, kind: Kind, level: Level, work: Work) -> Iterator[documents.Problem]:
    if kind == "store":
        yield from _store(path)
    elif kind == "part":
        with PartReader(path, progress=work) as part:
            work.total += sum(part.files.values())
            yield from part.problems(level)
    else:
        with checkpoints.Checkpoint(path) as checkpoint:
            if not work.total:
                work.total = checkpoint.nbytes
            checkpoint.progress = work
            yield from checkpoint.problems(level)
            if not checkpoint.is_dump:
                yield from _attempt(path, checkpoint.manifest)


def is_aborted(path: Path) -> bool:
    """Whether an attempt was aborted. Raises ``CorruptCheckpoint``: the decision is damaged."""
    made = attempts.decision(path)
    return made is not None and made.status == "aborted"


def _partial(path: Path, level: Level) -> Iterator[documents.Problem]:
    """Damage in the shards of an undecided attempt, which can be restored."""
    if attempts.decision(path) is None:
        for vote in attempts.votes(path):
            own = path / documents.rank_folder(vote.rank, attempts.read_attempt(path).world)
            if vote.error is not None and not os.path.lexists(own / documents.REFUSAL):
                yield documents.Problem(
                    own / documents.SHARD, vote.error.removeprefix(f"{own / documents.SHARD}: ").removesuffix(".")
                )
    if attempts.is_partial(path):
        with attempts.open_partial(path) as checkpoint:
            yield from checkpoint.problems("read" if level == "full" else level)  # others may be writing beside it


def _attempt(path: Path, manifest: documents.Manifest) -> Iterator[documents.Problem]:
    """Compares ``attempt.json``, which no digest names, with the manifest, which repeats it."""
    try:
        attempt = attempts.read_attempt(path)
    except CorruptCheckpoint as error:
        yield documents.problem_of(error)
        return
    for entry in ("name", "step", "world", "trigger", "parent", "user"):
        expected, got = getattr(manifest, entry), getattr(attempt, entry)
        if expected != got:
            yield documents.Problem(
                path / documents.ATTEMPT, f"expected the {entry} {expected!r:.100} of the manifest, got {got!r:.100}"
            )


def _series(root: Path, level: Level, work: Work) -> tuple[list[documents.Problem], list[documents.Problem]]:
    problems: list[documents.Problem] = []
    notes: list[documents.Problem] = []
    for name in attempts.names(root) if level != "meta" else ():
        with contextlib.suppress(OSError, *documents.UNREADABLE), checkpoints.Checkpoint(root / str(name)) as one:
            work.total += one.nbytes
    for name in attempts.names(root):
        folder = root / str(name)
        try:
            made = attempts.decision(folder)
        except documents.UNREADABLE as error:
            problems.append(documents.problem_of(error, folder))
            continue
        if made is None or made.status == "aborted":
            notes += filter(None, [Series(root).look(name)])
            try:
                notes += _partial(folder, level)
            except CorruptCheckpoint as error:
                notes.append(documents.problem_of(error))
        else:
            problems += _verified(folder, level, work).problems
    series = Series(root)
    notes += [problem for problem in series.latest()[1] if problem.path == root / LATEST]
    notes += series.unreadable_marks()
    return problems, notes


def _store(path: Path) -> Iterator[documents.Problem]:
    """A store that may be in use: what never changes of it, and the sizes of its files."""
    decoded, _ = read_store(path)
    folder = path / layout.FOLDER
    rows = layout.row_files(path, decoded).values()
    expected = {file: size * decoded.capacity for file, size in rows if size}  # empty rows have no file
    earlier = schema.is_earlier(files.read_small(folder / layout.STORE, schema.MAX_BYTES))
    expected[folder / layout.TICKETS] = layout.tickets_bytes(decoded.capacity, earlier=earlier)
    expected[folder / layout.ALIVE] = 0
    if decoded.ragged:
        expected |= dict(layout.values_files(path, decoded).values())
        expected[layout.ragged_control(path)] = sizes.ragged_control_bytes(decoded)
    for file, nbytes in expected.items():
        try:
            files.check_size(file, nbytes)
        except CorruptStore as error:
            yield documents.problem_of(error, file)
    with disk.open_folder(path) as fd:
        # A process that died may not have described the field that it was adding: the next one to open the store does.
        before = layout.meta_files(path, decoded.until(len(decoded.fields) - 1)) if decoded.added else {}
        for file, raw in layout.meta_files(path, decoded).items():
            if before and file not in before and not file.exists():
                continue
            try:
                found = documents.read_small(path, fd, file.relative_to(path).as_posix(), schema.MAX_BYTES)
                if found not in (raw, before.get(file)):
                    yield documents.Problem(file, "expected what the store's description says, got something else")
            except CorruptCheckpoint as error:
                yield documents.problem_of(error)


#: Bars of a histogram, at most.
BARS = 8
#: Values that are looked at, at most, where there may be very many.
MAX_VALUES = 1 << 16
#: From this ratio of the largest to the smallest value on, each bar is as many times as wide as the one before.
_WIDE = 50.0


class Histogram(TypedDict):
    """Bar ``i`` counts values in ``[edges[i], edges[i + 1])``; the last bar also its upper edge."""

    edges: list[float]
    counts: list[int]


def histogram(values: Mapping[float, int]) -> Histogram:
    """How often values of which size come: at most 8 bars; without values there is none.

    ``values``: how often each value comes, none negative.

    >>> from engram.saved.inspection import histogram
    >>> histogram({1.0: 3, 1.5: 2, 9.0: 5})["counts"]
    [5, 0, 0, 0, 0, 0, 0, 5]
    """
    if not values:
        return {"edges": [], "counts": []}
    low, high = min(values), max(values)
    edges = _edges(low, high)
    counts = [0] * (len(edges) - 1)
    for value, number in values.items():
        counts[min(max(bisect.bisect_right(edges, value) - 1, 0), len(counts) - 1)] += number
    return {"edges": edges, "counts": counts}


def _edges(low: float, high: float) -> list[float]:
    if low == high:
        return [low, high]
    if low > 0 and high / low >= _WIDE:
        inner = [low * (high / low) ** (bar / BARS) for bar in range(1, BARS)]
    else:
        inner = [low + (high - low) * bar / BARS for bar in range(1, BARS)]
    return [low, *dict.fromkeys(edge for edge in inner if low < edge < high), high]


#: Where a state keeps priorities: an array of float64, one per row.
LEAVES = "leaves"
#: Where the state of a storage keeps those of its indexes, by name.
INDEXES = "priorities"

_CHUNK = 1 << 20
#: Bytes of a page that begins an index, and of what begins a slot of a row that grows.
_PAGE, _SLOT_HEAD = 4096, 64
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
            found |= _described_store(path)
        elif kind == "series":
            found |= _described_series(path)
        elif kind == "part":
            with PartReader(path) as part:
                found |= _described_part(part)
        elif kind == "attempt" or (kind == "checkpoint" and is_aborted(path)):
            found |= _described_attempt(path)
        else:
            with checkpoints.Checkpoint(path) as checkpoint:
                found |= _described_checkpoint(checkpoint)
    except _DAMAGE:
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


def described_field(field: schema.Column) -> Entries:
    """A field, as descriptions have it."""
    key, shape = list(field.key), list(field.shape)
    entries: Entries = {"key": key, "dtype": field.dtype, "shape": shape, "row_bytes": field.row_bytes}
    if isinstance(field, schema.PartField):
        entries["role"] = field.role
    return entries | {"ragged": msgspec.to_builtins(field.ragged)} if field.ragged else entries


def _described_attempt(path: Path) -> Entries:
    """An attempt that is no checkpoint: what became of it, and what each rank voted and saved."""
    attempt, made = attempts.read_attempt(path), attempts.decision(path)
    votes, totals = [], []
    for vote in attempts.votes(path, attempt):
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
        "totals": msgspec.to_builtins(documents.added(totals)),
        "votes": votes,
    }


def _in_short(shards: Sequence[documents.Totals]) -> dict[str, int]:
    of = documents.added(shards)
    return {"steps": of.steps, "episodes": of.episodes, "bytes": of.bytes_logical, "bytes_linked": of.bytes_linked}


def _described_checkpoint(checkpoint: checkpoints.Checkpoint) -> Entries:
    manifest = checkpoint.manifest
    shards = []
    totals: list[documents.Totals] = []
    for rank in range(manifest.world):
        found: Entries = {"rank": rank}
        parts: Entries = {}
        try:
            shard = checkpoint.shard(rank)
            totals.append(shard.totals)
            found |= {"cut": msgspec.to_builtins(shard.cut), "totals": msgspec.to_builtins(shard.totals)}
            found |= {"layout": shard.layout, "parts": parts}
            for part in checkpoint.parts(rank):
                parts[part.folder.relative_to(checkpoint.shard_folder(rank)).as_posix()] = _described_part(part)
        except documents.UNREADABLE as error:
            found["problem"] = str(error)
        shards.append(found)
    return {
        "name": manifest.name,
        "sha256": checkpoint.sha256,
        **{entry: getattr(manifest, entry) for entry in ("step", "world", "trigger", "parent", "user")},
        **moment("saved", checkpoint.folder / documents.MANIFEST),
        "totals": msgspec.to_builtins(documents.added(totals)),
        "shards": shards,
    }


def _described_part(part: PartReader) -> Entries:
    found: Entries = {"part": part.part, "type": part.type, "name": part.name, "bytes": sum(part.files.values())}
    if part.geometry is not None:
        found["geometry"] = msgspec.to_builtins(part.geometry)
    if part.schema is not None:
        found["fields"] = [*map(described_field, part.schema)]
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
    return _priorities(parameters, part.arrays[number].bytes, lambda into, offset: part.read(number, offset, into))


def _trajectories(every: Iterable[description.Trajectory], columns: int) -> Entries:
    """How many, of how many steps, and of which kinds. ``every``: by lane and position."""
    kinds = dict.fromkeys(description.KINDS, 0)
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
    return {"count": count, "shortest": shortest, "longest": longest, **kinds}


def _kind(flags: int, *, oldest: bool) -> str:
    """What is there of a trajectory. ``oldest``: of its lane, or of a column."""
    last, is_open = bool(flags & description.HAS_LAST), bool(flags & description.OPEN)
    if flags & description.HAS_FIRST:
        return "complete" if last else "open" if is_open else "mid"
    if oldest and (last or is_open):
        return "headless" if last else "both"
    return "orphan"


def _priorities(parameters: Entries, nbytes: int, read: Callable[[memoryview, int], None]) -> Entries:
    """Of the leaves above zero: how many, the smallest and the largest. Of all: the sum. And a histogram of priorities."""
    live, total, smallest, largest = 0, 0.0, math.inf, 0.0
    looked = Counter[float]()
    chunk = memoryview(bytearray(min(_CHUNK, nbytes)))
    step = -(-nbytes // 8 // MAX_VALUES) or 1
    for at in range(0, nbytes, _CHUNK):
        piece = chunk[: min(_CHUNK, nbytes - at)]
        read(piece, at)
        leaves = piece.cast("d")
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


def _described_series(root: Path) -> Entries:
    rows = []
    series = Series(root)
    for name in attempts.names(root):
        folder = root / str(name)
        row: Entries = {"name": str(name), "step": name.step, "epoch": name.epoch}
        wrong = series.look(name)
        if wrong is None:
            with series.open(folder) as checkpoint:
                totals = [checkpoint.shard(rank).totals for rank in range(checkpoint.manifest.world)]
                row |= {"status": "complete", "world": checkpoint.manifest.world, **_in_short(totals)}
                row |= moment("saved", folder / documents.MANIFEST)
        else:
            row["status"] = wrong.what
        rows.append(row)
    newest = next((row["name"] for row in rows if row["status"] == "complete"), None)
    return {"epoch": attempts.newest_epoch(root), "latest": newest, "checkpoints": rows}


def _described_store(path: Path) -> Entries:
    folder = path / layout.FOLDER
    decoded, header = read_store(path)
    raw = bytearray(files.control_bytes(header.lanes))
    _read_file(folder / layout.CONTROL, memoryview(raw), 0)
    filled = [*map(len, extents := files.extents(bytes(raw[files.FIXED_BYTES :]), header))]
    found: Entries = {
        **moment("created", folder / layout.STORE),
        **moment("written", folder / layout.CONTROL, folder / layout.TICKETS),
        "capacity": decoded.capacity,
        "lanes": {"count": decoded.lanes, "fewest_rows": min(filled), "most_rows": max(filled)},
        "columns": list(decoded.columns),
        "rows": sum(filled),
        "clean": header.clean,
        "processes": [] if header.clean else files.processes(bytes(raw[: files.FIXED_BYTES])),
        "row_bytes": decoded.row_bytes,
        "bytes": decoded.nbytes,
        "fields": [*map(described_field, decoded.fields)],
        "indexes": [_described_index(index) for index in sorted((folder / layout.INDEXES).glob("*/[!.]*"))],
    }
    if decoded.ragged:
        found["items"] = _described_items(path, decoded, header.lane_length, extents)
    slots = folder / layout.INDEXES / "main" / "open"
    described = _described_slots(slots, decoded) if decoded.ragged and slots.exists() else None
    return found if described is None else found | {"open_rows": described}


def _described_items(path: Path, decoded: schema.Schema, lane_length: int, extents: Sequence[range]) -> Entries:
    """Bytes of each lane's rings of items, or of its slots, that rows have; or more, as rows that are void may still count."""
    groups, lanes, raw = decoded.ragged_groups, [], bytearray(sizes.ragged_control_bytes(decoded))
    _read_file(layout.ragged_control(path), memoryview(raw), 0)
    words = struct.iter_unpack(f"<{(len(raw) - _PAGE) // 8 // decoded.lanes}Q", raw[_PAGE:])
    for lane, (extent, word) in enumerate(zip(extents, words, strict=True)):
        oldest, used, room = max(word[0], extent.start), 0, 0
        for group, head, floor in zip(groups, word[1::2], word[2::2], strict=False):
            item_bytes = sum(decoded.ragged[number].item_bytes for number in group.members)
            column, row = layout.column_path(path, decoded, group.leader), lane * lane_length
            first, span = head, bytearray(schema.SPAN_BYTES)
            if group.slot:
                _read_file(column, memoryview(spans := bytearray(len(span) * len(extent))), row * len(span))
                first, head = 0, sum(length for _, length in struct.iter_unpack("<QI", spans))
            elif oldest < extent.stop:
                _read_file(column, memoryview(span), (row + oldest % lane_length) * len(span))
                first = max(int.from_bytes(span[:8], "little"), floor)
            used, room = used + min(max(head - first, 0), group.items) * item_bytes, room + group.items * item_bytes
        lanes.append({"lane": lane, "bytes_used": used, "bytes_free": room - used})
    return {"evicted_rows": int.from_bytes(raw[32:40], "little"), "lanes": lanes}


def _described_slots(path: Path, decoded: schema.Schema) -> Entries | None:
    """How many rows may grow at once, and those that do: their processes, whether these have ended, and how many items there are.

    None: the file holds no slots for rows of these fields.
    """
    page, slot_bytes = memoryview(bytearray(_PAGE)), sizes.slot_layout(decoded).nbytes
    stride = -(-(_SLOT_HEAD + slot_bytes) // 64) * 64
    slots, rest = divmod(path.lstat().st_size - _PAGE, stride)
    if slots > 0 and not rest:
        _read_file(path, page, 0)
    if bytes(page[:24]) != struct.pack("=8sQQ", b"engopen\1", max(slots, 0), slot_bytes):
        return None
    groups = [decoded.fields[group.leader].name for group in decoded.ragged_groups]
    head = memoryview(bytearray(_SLOT_HEAD + 8 + 4 * len(groups)))
    growing = []
    for slot in range(slots):
        _read_file(path, head, _PAGE + slot * stride)
        owner, sealed_as = struct.unpack_from("=QQ", head)
        if owner and not sealed_as:
            lengths = struct.unpack_from(f"={len(groups)}I", head, _SLOT_HEAD + 8)
            it = {"slot": slot, "process": owner >> 32, "abandoned": not sizes.is_owner_alive(owner)}
            growing.append({**it, "items": dict(zip(groups, lengths, strict=True))})
    return {"slots": slots, "growing": growing}


def _described_index(path: Path) -> Entries:
    nbytes = path.lstat().st_size
    found: Entries = {"name": path.parent.name, "kind": path.name, "bytes": nbytes}
    page = bytearray(_PAGE)
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
