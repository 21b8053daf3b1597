"""Checkpoints: parts in one folder, with a chain of digests from ``manifest.json`` down to every block.

``manifest.json`` → ``shard.json`` of each rank → ``part.json`` of each part → ``sums.bin`` → blocks. A checkpoint exists if
and only if its manifest says ``complete``. One that ``dumps`` writes is of one rank, whose shard is the folder itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from engram._support.closing import Closes
from engram.errors import CorruptCheckpoint
from engram.format import beside, disk, strict
from engram.format.description import NO_SCHEMA
from engram.format.part_reader import Level, PartReader
from engram.format.problems import Problem, corrupt, misfits, no_file, problem_of, read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from engram.format.part_writer import Listing, PartInfo

MANIFEST = "manifest.json"
SHARD = "shard.json"
ATTEMPT = "attempt.json"
REFUSAL = "error.json"
MAX_RANKS = 1 << 16

#: Names of parts: of a component, or numbered.
_PART_FOLDER = re.compile(r"[a-z][a-z_]{0,31}(/[0-9]{3})?")
#: Left behind by a process that was killed while it published a file.
LEFTOVER = re.compile(r"(.*/)?[A-Za-z0-9._-]+\.[0-9a-f]{8}\.tmp")

Layout = Literal["flat", "segments"]


# ---- documents -------------------------------------------------------------------------------------------------------


class Attempt(strict.Document, frozen=True, kw_only=True):
    """``attempt.json``: what all ranks agreed on before they began."""

    name: str
    attempt: str
    epoch: int
    step: int
    world: int
    trigger: str
    parent: str | None
    user: dict[str, object]
    format: Literal["engram.attempt"] = "engram.attempt"


class PartEntry(msgspec.Struct, frozen=True):
    folder: str
    bytes: int
    sha256: str


class ShardEntry(msgspec.Struct, frozen=True):
    rank: int
    bytes: int
    sha256: str


class Cut(msgspec.Struct, frozen=True):
    """The snapshot that a shard holds."""

    clock: int
    """The store's ticket counter: ages are counted back from it."""
    exact: bool = True
    """Whether writers waited, so that no row was lost."""
    lost_rows: int = 0
    """Rows that were overwritten before they were copied."""


class Count(msgspec.Struct, frozen=True):
    episodes: int = 0
    steps: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.episodes + other.episodes, self.steps + other.steps)


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard holds. Bytes are filled in when it is written."""

    steps: int
    episodes: int
    complete: Count = Count()
    open: Count = Count()
    headless: Count = Count()
    both: Count = Count()
    mid: Count = Count()
    orphan: Count = Count()
    bytes_logical: int = 0
    bytes_written: int = 0
    bytes_linked: int = 0


def added(every: Iterable[Totals]) -> Totals:
    """The totals of some shards together."""
    columns = zip(*map(msgspec.structs.astuple, [*every] or [Totals(steps=0, episodes=0)]), strict=True)
    sums = (functools.reduce(operator.add, column) for column in columns)
    return Totals(**dict(zip(Totals.__struct_fields__, sums, strict=True)))


class ShardRows(NamedTuple):
    """What a shard says of its rows."""

    cut: Cut
    totals: Totals
    schema_sum: str
    """Of ``()`` where there is no schema."""


class Shard(strict.Document, frozen=True, kw_only=True):
    """One rank's part of a checkpoint."""

    attempt: str
    epoch: int
    step: int
    rank: int
    world: int
    trigger: str
    layout: Layout
    schema_sum: str
    parts: tuple[PartEntry, ...]
    cut: Cut
    totals: Totals
    format: Literal["engram.shard"] = "engram.shard"


class Manifest(strict.Summed, frozen=True, kw_only=True):
    """The decision on an attempt. Two processes that decide write the same bytes."""

    name: str
    """The name of the folder; empty: a dump, which may be moved."""
    step: int
    steps_by_rank: tuple[int, ...]
    world: int
    trigger: str
    status: Literal["complete", "aborted"]
    reasons: tuple[str, ...]
    """Why it was aborted."""
    parent: str | None
    schema_sum: str
    shards: tuple[ShardEntry, ...]
    user: dict[str, object]
    format: Literal["engram.checkpoint"] = "engram.checkpoint"


def rank_folder(rank: int, world: int) -> str:
    """Name of a rank's folder."""
    return f"rank-{rank:05d}-of-{world:05d}"


# ---- writing ---------------------------------------------------------------------------------------------------------


def shard_of(
    attempt: Attempt,
    rank: int,
    folder: Path,
    parts: Sequence[PartInfo],
    rows: ShardRows,
    layout: Layout,
    step: int | None = None,
) -> Shard:
    """The document of a shard whose parts lie finished below ``folder``, with their bytes.

    Args:
        attempt: that it is of.
        rank: whose it is.
        folder: of the shard.
        parts: as ``PartWriter.finish`` returned them.
        rows: what it holds.
        layout: of its rows.
        step: of this rank. Default: that of the attempt.

    Raises:
        ValueError: a part lies elsewhere or under an impossible name.
    """
    found = []
    for part in parts:
        name = part.folder.relative_to(folder).as_posix()
        if not _PART_FOLDER.fullmatch(name):
            raise ValueError(f"{part.folder}: expected a part called like 'sampler' or 'indexes/000', got {name!r}.")
        found.append(PartEntry(name, part.bytes, part.sha256))
    written, linked = sum([part.written for part in parts]), sum([part.linked for part in parts])
    return Shard(
        attempt=attempt.attempt,
        epoch=attempt.epoch,
        step=attempt.step if step is None else step,
        rank=rank,
        world=attempt.world,
        trigger=attempt.trigger,
        layout=layout,
        schema_sum=rows.schema_sum,
        parts=tuple(sorted(found, key=lambda part: part.folder)),
        cut=rows.cut,
        totals=msgspec.structs.replace(
            rows.totals, bytes_logical=written + linked, bytes_written=written, bytes_linked=linked
        ),
    )


def entry_of(shard: Shard, raw: bytes) -> ShardEntry:
    """How a manifest names a shard, whose text is ``raw``."""
    return ShardEntry(shard.rank, len(raw), hashlib.sha256(raw).hexdigest())


def sync_parts(folder: Path, shard: Shard) -> None:
    """Wait until the names of a shard's parts are on disk."""
    for parent in sorted({part.folder.rpartition("/")[0] for part in shard.parts}, reverse=True):
        disk.sync_folder(f"{folder}/{parent}" if parent else folder)


# ---- reading ---------------------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """Whether a decided attempt or a dump lies there."""
    return (path / MANIFEST).is_file()


class Contents:
    """The documents of one checkpoint, as far as they were read or written.

    A document counts only if its digest is still the one that the document above it names.
    """

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.manifest: Manifest | None = None
        self.sha256 = ""
        """The digest of the manifest."""
        self.shards: dict[str, tuple[Shard, ShardEntry]] = {}
        """Shards by the path of their file."""
        self.listings: dict[str, Listing] = {}
        """Descriptions by the folder of their part."""

    def wrote(self, folder: str, shard: Shard, raw: bytes, parts: Sequence[PartInfo]) -> None:
        """Add a shard that this process has written: its text is ``raw``, and ``folder`` is that of its rank."""
        self.shards[f"{folder}/{SHARD}"] = shard, entry_of(shard, raw)
        listings = {part.sha256: part.listing for part in parts}
        for entry in shard.parts:
            self.listings[f"{folder}/{entry.folder}"] = listings[entry.sha256]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file of a checkpoint in a series, by its path in the folder. Raises ``KeyError``: a document is not known."""
        sizes = {}
        assert self.manifest is not None
        for shard in self.manifest.shards:
            own = rank_folder(shard.rank, self.manifest.world)
            sizes[f"{own}/{SHARD}"] = shard.bytes
            for entry in self.shards[f"{own}/{SHARD}"][0].parts:
                listing = self.listings[f"{own}/{entry.folder}"]
                sizes.update({f"{own}/{entry.folder}/{name}": nbytes for name, nbytes in listing.sizes.items()})
        return sizes


class Checkpoint(Closes):
    """A checkpoint, open for reading: its manifest, and from there everything by digest. Also a context manager.

    Args:
        folder: where it lies; may be reached through links, nothing in it may be one.
        manifest: of an attempt that is about to be decided; None: the one that lies there.
        contents: what is known of it already; what is read is added.

    Raises:
        CorruptCheckpoint: there is no manifest, it is damaged, or the attempt was aborted.
        IncompatibleCheckpoint: written by a newer engram.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None, contents: Contents | None = None) -> None:
        self.folder = folder
        #: Called with how many bytes of parts were read, of those that are opened from now on.
        self.progress: Callable[[int], None] | None = None
        self._opened: list[PartReader] = []
        try:
            self._fd = disk.open_folder(folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise corrupt(folder, "expected the folder of a checkpoint, found none") from error
        self.contents = Contents() if contents is None else contents
        try:
            self.manifest = self._described(manifest)
        except BaseException:
            self.close()
            raise
        #: Names the whole checkpoint.
        self.sha256 = self.contents.sha256
        #: Whether it is a folder of its own, not one of a series.
        self.is_dump = self.manifest.name == ""
        world = self.manifest.world  # a comprehension's cell of self would outlive an interrupt here
        self._places = [(rank, world) for rank in range(world)]
        #: Ranks that wrote no shard, where that is allowed: others then count from 0 without them.
        self.missing: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the checkpoint and the parts that it opened. A second call does nothing."""
        while self._opened:
            self._opened.pop().close()
        self._fd.close()

    @classmethod
    def partial(cls, folder: Path, manifest: Manifest, ranks: Sequence[int], world: int) -> Checkpoint:
        """The shards of some ranks of an undecided attempt, as a checkpoint of these ranks alone.

        Args:
            folder: where it lies.
            manifest: of those ranks, numbered from 0.
            ranks: what they are called there, of ``world``.
        """
        checkpoint = cls(folder, manifest)
        checkpoint._places = [(rank, world) for rank in ranks]
        checkpoint.missing = tuple(sorted(set(range(world)) - set(ranks)))
        return checkpoint

    @property
    def ranks(self) -> list[int]:
        """The rank that saved each shard. The shards are numbered from 0, so the two differ where ranks are missing."""
        return [rank for rank, _ in self._places]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, as far as the shards can be read."""
        found = 0
        for rank in range(self.manifest.world):
            with contextlib.suppress(CorruptCheckpoint):
                found += self.shard(rank).totals.bytes_logical
        return found

    def shard_folder(self, rank: int) -> Path:
        return self.folder / self._in_shard(rank, ".")

    def shard(self, rank: int) -> Shard:
        """The shard of a rank.

        Raises:
            CorruptCheckpoint: it is missing or damaged, or of another attempt.
        """
        name, entry = self._in_shard(rank, SHARD), self.manifest.shards[rank]
        shard, known = self.contents.shards.get(name, (None, None))
        if shard is None or known != entry:
            shard = read_shard(self.folder, self._fd, name, self.contents, entry)[0]
        expected = self.manifest.schema_sum
        if (shard.rank, shard.world) != self._places[rank] or shard.schema_sum not in (expected, NO_SCHEMA):
            raise corrupt(
                self.folder / name,
                f"expected rank {self._places[rank][0]} of {self._places[rank][1]} with the schema {expected}, "
                f"got rank {shard.rank} of {shard.world} with {shard.schema_sum}",
            )
        return shard

    def part(self, rank: int, folder: str) -> PartReader:
        """Open a part of a rank's shard, by the name of its folder. All its files have their sizes. This closes it at the latest.

        Raises:
            CorruptCheckpoint: a file is missing or damaged.
            KeyError: the shard has no such part.
        """
        for entry in self.shard(rank).parts:
            if entry.folder == folder:
                self._opened.append(self._open_part(rank, entry).complete())
                return self._opened[-1]
        raise KeyError(folder)

    def parts(self, rank: int, *, without: Collection[str] = ()) -> Iterator[PartReader]:
        """The parts of a rank's shard, one after another; each is closed when the next is asked for. Raises as ``part``.

        ``without``: folders of those that are not wanted.
        """
        for entry in self.shard(rank).parts:
            if entry.folder not in without:
                with self._open_part(rank, entry).complete() as part:
                    yield part

    def problems(self, level: Level) -> Iterator[Problem]:
        """All that is wrong. ``meta``: digests and sizes. ``read``: also every block. ``full``: also files that are not listed."""
        if level == "meta" and self._is_known_and_whole():
            return
        if level == "full":
            yield from self._strangers()
        for rank in range(self.manifest.world):
            try:
                shard = self.shard(rank)
            except CorruptCheckpoint as error:
                yield problem_of(error)
                continue
            yield from misfits(self.folder, self._fd, {self._in_shard(rank, SHARD): self.manifest.shards[rank].bytes})
            for entry in shard.parts:
                try:
                    with self._open_part(rank, entry) as part:
                        yield from part.problems(level)
                except CorruptCheckpoint as error:
                    yield problem_of(error)

    # -- inside --

    def _in_shard(self, rank: int, relative: str) -> str:
        """A path below a rank's shard, from the folder of the checkpoint."""
        return relative if self.is_dump else f"{rank_folder(*self._places[rank])}/{relative}"

    def _described(self, manifest: Manifest | None) -> Manifest:
        path = f"{self.folder}/{MANIFEST}"
        manifest = manifest and manifest.sealed()
        raw = strict.encode(manifest) if manifest else read_small(self.folder, self._fd, MANIFEST, strict.MAX_BYTES)
        sha256 = hashlib.sha256(raw).hexdigest()
        if self.contents.manifest is not None and self.contents.sha256 == sha256:
            return self.contents.manifest
        if manifest is None:
            manifest = Manifest.decode(raw, path)
        if manifest.status != "complete":
            raise corrupt(
                path, f"expected a complete checkpoint, this attempt was aborted: {', '.join(manifest.reasons)}"
            )
        if not 1 <= manifest.world <= MAX_RANKS or (manifest.name == "" and manifest.world != 1):
            raise corrupt(path, f"expected 1 to {MAX_RANKS} ranks, and 1 in a dump, got {manifest.world}")
        ranks = [shard.rank for shard in manifest.shards]
        if ranks != list(range(manifest.world)) or len(manifest.steps_by_rank) != manifest.world:
            raise corrupt(
                path, f"expected one shard and one step of each of {manifest.world} ranks, got those of {ranks[:20]}"
            )
        self.contents.manifest, self.contents.sha256 = manifest, sha256
        return manifest

    def _is_known_and_whole(self) -> bool:
        """Whether all documents were read or written before, and every file has its size."""
        if self.is_dump:
            return False
        try:
            return disk.have_sizes(self._fd, self.contents.sizes)
        except (KeyError, OSError):
            return False

    def _open_part(self, rank: int, entry: PartEntry) -> PartReader:
        relative = self._in_shard(rank, entry.folder)
        try:
            fd = disk.open_below(self._fd, relative)
        except OSError as error:
            what = no_file(error).replace("regular file", "folder").replace("file", "folder")
            raise corrupt(self.folder / relative, what) from error
        known = self.contents.listings.get(relative)
        if known is not None and known.sha256 != entry.sha256:
            known = None
        part = PartReader(self.folder / relative, entry.sha256, fd, known, self.progress)
        self.contents.listings[relative] = part.listing
        return part

    def _strangers(self) -> Iterator[Problem]:
        """Files and folders beside the shards and parts that the checkpoint does not list."""
        known = {MANIFEST, SHARD} if self.is_dump else {MANIFEST, ATTEMPT}
        folders: set[str] = set()
        parts: tuple[str, ...] = ()
        for rank in range(self.manifest.world):
            known.add(self._in_shard(rank, SHARD))
            if not self.is_dump:
                folders.add(rank_folder(*self._places[rank]))
            with contextlib.suppress(CorruptCheckpoint):  # reported by problems()
                for entry in self.shard(rank).parts:
                    part = self._in_shard(rank, entry.folder)
                    parts += (f"{part}/",)
                    folders |= {part, part.rpartition("/")[0]}
        for name, is_folder in disk.entries(self._fd):
            if name.startswith(parts) or (LEFTOVER.fullmatch(name) and not is_folder):
                continue
            if name not in (folders if is_folder else known) and not (self.is_dump and name == beside.OF_DUMP):
                yield Problem(self.folder / name, "expected nothing here: the checkpoint does not list it")


def read_shard(
    folder: Path, folder_fd: int, name: str, contents: Contents, entry: ShardEntry | None = None
) -> tuple[Shard, ShardEntry]:
    """A ``shard.json`` below an open folder, and how a manifest names it.

    Args:
        folder: of the checkpoint, for messages.
        folder_fd: the same, open.
        name: of the file.
        contents: what is known of the checkpoint; is told of this shard.
        entry: how the manifest names it; None: there is none yet.

    Raises:
        CorruptCheckpoint: it is missing or damaged.
    """
    limit = strict.MAX_BYTES if entry is None else entry.bytes
    if not 0 <= limit <= strict.MAX_BYTES:
        raise corrupt(folder / MANIFEST, f"expected shards of at most {strict.MAX_BYTES} bytes, got {limit}")
    raw = read_small(folder, folder_fd, name, limit, exactly=entry is not None)
    digest = hashlib.sha256(raw).hexdigest()
    if entry is not None and digest != entry.sha256:
        raise corrupt(folder / name, f"expected the sha256 {entry.sha256} that {MANIFEST} names, got {digest}")
    shard, known = contents.shards.get(name, (None, None))
    if shard is not None and known is not None and known.sha256 == digest:
        return shard, known
    shard = strict.decode(raw, f"{folder}/{name}", Shard)
    names = [part.folder for part in shard.parts]
    if names != sorted(set(names)) or not all(map(_PART_FOLDER.fullmatch, names)):
        raise corrupt(
            folder / name, f"expected parts called like 'sampler' or 'indexes/000', in order, got {names!r:.200}"
        )
    found = shard, entry_of(shard, raw)
    contents.shards[name] = found
    return found
