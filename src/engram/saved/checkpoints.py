"""Checkpoints: parts in one folder, with a chain of digests from ``manifest.json`` down to every block; and dumps.

``manifest.json`` → ``shard.json`` of each rank → ``part.json`` of each part → ``sums.bin`` → blocks. A checkpoint exists if
and only if its manifest says ``complete``. A dump is a checkpoint of one rank in a folder of its own, which is the shard, too; it
takes the place of an older one in one step.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from engram._support.closing import Closes
from engram.errors import CorruptCheckpoint
from engram.format import files, strict
from engram.saved import disk, documents, folder, part_writer
from engram.saved.description import NO_SCHEMA
from engram.saved.documents import SHARD, Attempt, Manifest, Problem, Shard, ShardEntry, corrupt, read_small
from engram.saved.part_reader import Level, Listing, PartReader, is_part

Parts: TypeAlias = Sequence[part_writer.PartInfo]

# ---- writing ---------------------------------------------------------------------------------------------------------


def shard_of(
    attempt: Attempt,
    rank: int,
    folder: Path,
    parts: Parts,
    rows: documents.ShardRows,
    layout: documents.Layout,
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
        if not documents.PART_FOLDER.fullmatch(name):
            raise ValueError(f"{part.folder}: expected a part called like 'sampler' or 'indexes/000', got {name!r}.")
        found.append(documents.PartEntry(name, part.bytes, part.sha256))
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
    return (path / documents.MANIFEST).is_file()


class Contents:
    """The documents of one checkpoint, as far as they were read or written.

    A document counts only if its digest is still the one that the document above it names.
    """

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.manifest: Manifest | None = None
        #: The digest of the manifest.
        self.sha256 = ""
        #: Shards by the path of their file.
        self.shards: dict[str, tuple[Shard, ShardEntry]] = {}
        #: Descriptions by the folder of their part.
        self.listings: dict[str, Listing] = {}

    def wrote(self, folder: str, shard: Shard, raw: bytes, parts: Parts) -> None:
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
            own = documents.rank_folder(shard.rank, self.manifest.world)
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
        self._fd = documents.open_folder(folder, "a checkpoint")
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
    def partial(cls, folder: Path, manifest: Manifest, ranks: Sequence[int]) -> Checkpoint:
        """The shards of some ranks, as a checkpoint of these ranks alone.

        Args:
            folder: where it lies.
            manifest: of at least those ranks.
            ranks: which of them are numbered from 0 here.
        """
        place = {entry.rank: i for i, entry in enumerate(manifest.shards)}
        steps = tuple(manifest.steps_by_rank[place[rank]] for rank in ranks)
        shards = tuple(msgspec.structs.replace(manifest.shards[place[rank]], rank=i) for i, rank in enumerate(ranks))
        own = msgspec.structs.replace(manifest, world=len(ranks), steps_by_rank=steps, shards=shards)
        checkpoint = cls(folder, own)
        checkpoint._places = [(rank, manifest.world) for rank in ranks]
        checkpoint.missing = tuple(sorted(set(range(manifest.world)) - set(ranks)))
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
                yield documents.problem_of(error)
                continue
            yield from documents.misfits(
                self.folder, self._fd, {self._in_shard(rank, SHARD): self.manifest.shards[rank].bytes}
            )
            for entry in shard.parts:
                try:
                    with self._open_part(rank, entry) as part:
                        yield from part.problems(level)
                except CorruptCheckpoint as error:
                    yield documents.problem_of(error)

    # -- inside --

    def _in_shard(self, rank: int, relative: str) -> str:
        """A path below a rank's shard, from the folder of the checkpoint."""
        return relative if self.is_dump else f"{documents.rank_folder(*self._places[rank])}/{relative}"

    def _described(self, manifest: Manifest | None) -> Manifest:
        path = f"{self.folder}/{documents.MANIFEST}"
        manifest = manifest and manifest.sealed()
        raw = (
            documents.encode(manifest)
            if manifest
            else read_small(self.folder, self._fd, documents.MANIFEST, strict.MAX_BYTES)
        )
        sha256 = hashlib.sha256(raw).hexdigest()
        if self.contents.manifest is not None and self.contents.sha256 == sha256:
            return self.contents.manifest
        if manifest is None:
            manifest = Manifest.decode(raw, path)
        if manifest.status != "complete":
            raise corrupt(
                path, f"expected a complete checkpoint, this attempt was aborted: {', '.join(manifest.reasons)}"
            )
        if not 1 <= manifest.world <= documents.MAX_RANKS or (manifest.name == "" and manifest.world != 1):
            raise corrupt(path, f"expected 1 to {documents.MAX_RANKS} ranks, 1 in a dump, got {manifest.world}")
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

    def _open_part(self, rank: int, entry: documents.PartEntry) -> PartReader:
        relative = self._in_shard(rank, entry.folder)
        try:
            fd = disk.open_below(self._fd, relative)
        except OSError as error:
            what = documents.no_file(error).replace("regular file", "folder").replace("file", "folder")
            raise corrupt(self.folder / relative, what) from error
        known = self.contents.listings.get(relative)
        if known is not None and known.sha256 != entry.sha256:
            known = None
        part = PartReader(self.folder / relative, entry.sha256, fd, known, self.progress)
        self.contents.listings[relative] = part.listing
        return part

    def _strangers(self) -> Iterator[Problem]:
        """Files and folders beside the shards and parts that the checkpoint does not list."""
        known = {documents.MANIFEST, SHARD} if self.is_dump else {documents.MANIFEST, documents.ATTEMPT}
        folders: set[str] = set()
        parts: tuple[str, ...] = ()
        for rank in range(self.manifest.world):
            known.add(self._in_shard(rank, SHARD))
            if not self.is_dump:
                folders.add(documents.rank_folder(*self._places[rank]))
            with contextlib.suppress(CorruptCheckpoint):  # reported by problems()
                for entry in self.shard(rank).parts:
                    part = self._in_shard(rank, entry.folder)
                    parts += (f"{part}/",)
                    folders |= {part, part.rpartition("/")[0]}
        for name, is_folder in disk.entries(self._fd):
            if name.startswith(parts) or (documents.LEFTOVER.fullmatch(name) and not is_folder):
                continue
            if name not in (folders if is_folder else known) and not (self.is_dump and name == folder.OF_DUMP):
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
        raise corrupt(folder / documents.MANIFEST, f"expected shards of at most {strict.MAX_BYTES} bytes, got {limit}")
    raw = read_small(folder, folder_fd, name, limit, exactly=entry is not None)
    digest = hashlib.sha256(raw).hexdigest()
    if entry is not None and digest != entry.sha256:
        raise corrupt(
            folder / name, f"expected the sha256 {entry.sha256} that {documents.MANIFEST} names, got {digest}"
        )
    shard, known = contents.shards.get(name, (None, None))
    if shard is not None and known is not None and known.sha256 == digest:
        return shard, known
    shard = documents.decode(raw, f"{folder}/{name}", Shard)
    names = [part.folder for part in shard.parts]
    if names != sorted(set(names)) or not all(map(documents.PART_FOLDER.fullmatch, names)):
        raise corrupt(
            folder / name, f"expected parts called like 'sampler' or 'indexes/000', in order, got {names!r:.200}"
        )
    found = shard, entry_of(shard, raw)
    contents.shards[name] = found
    return found


class Vote(NamedTuple):
    """The vote of a rank, as far as it has voted."""

    rank: int
    #: It voted yes.
    shard: Shard | None
    entry: ShardEntry | None
    #: It voted no, or its vote cannot be read. Neither: it has not voted.
    error: str | None


def manifest_of(attempt: Attempt, given: Sequence[Vote], reasons: Sequence[str]) -> Manifest:
    """The decision on an attempt: complete, or aborted for these reasons."""
    shards = [vote.shard for vote in given if vote.shard is not None]
    schema_sums = {shard.schema_sum for shard in shards} - {NO_SCHEMA}  # where nothing was ever written there is none
    complete = not reasons
    return Manifest(
        name=attempt.name,
        step=attempt.step,
        steps_by_rank=tuple(shard.step for shard in shards) if complete else (),
        world=attempt.world,
        trigger=attempt.trigger,
        status="complete" if complete else "aborted",
        reasons=tuple(reasons),
        parent=attempt.parent,
        schema_sum=min(schema_sums, default=NO_SCHEMA) if complete else "",
        shards=tuple(vote.entry for vote in given if vote.entry is not None) if complete else (),
        user=attempt.user if complete else {},
    )


#: Behind the name of a dump: folders of writers, which a killed one leaves.
_LEFT = re.compile(r"(tmp|trash|was)-[0-9a-f]{16}")
#: One of them: a dump that is being replaced, where two names cannot be exchanged.
_ASIDE = re.compile(r"was-[0-9a-f]{16}")


def finish_dump(
    folder: Path, parts: Parts, rows: documents.ShardRows, *, step: int = 0, user: Mapping[str, object] | None = None
) -> Manifest:
    """Make a checkpoint of one rank out of the parts in a folder. It is on disk when this returns.

    Args:
        folder: which ``replacing`` gave.
        parts: as ``PartWriter.finish`` returned them, all below it.
        rows: what it holds; bytes are filled in.
        step: of the training.
        user: the user's own state, as JSON.

    Raises:
        TypeError: ``user`` has something that JSON has no word for; names it.
        ValueError: ``user`` is too long or too deep, or a part lies elsewhere.
        OSError: no space, or an I/O error.
    """
    token = secrets.token_hex(4)
    attempt = Attempt(
        name="", attempt=token, epoch=0, step=step, world=1, trigger="dumps", parent=None, user=dict(user or {})
    )
    shard = shard_of(attempt, 0, folder, parts, rows, "flat")
    raw = documents.encode(shard)
    manifest = manifest_of(attempt, [Vote(0, shard, entry_of(shard, raw), None)], [])
    disk.put(folder / SHARD, raw)
    disk.put(folder / documents.MANIFEST, manifest.encode())
    sync_parts(folder, shard)
    disk.sync_folder(folder)
    return manifest


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new folder that takes the place of ``path`` in one step, when the block ends without an exception.

    For ``dumps`` of a buffer (``finish_dump`` in it) and of one component (a part in it). Until then, and after an exception,
    ``path`` is what it was. What was replaced is removed in the background; what a killed process left beside it, first.

    Where the file system cannot exchange two names, as on NFS, a dump is away for a moment while it is replaced: see
    :func:`standing`.

    Raises:
        FileExistsError: ``path`` is neither free, nor an empty folder, nor a dump of the same kind.
        OSError: no space, or an I/O error.
    """
    path = Path(os.path.abspath(path))
    before = standing(path)
    if before != path:  # a process was killed while it replaced the dump
        with contextlib.suppress(OSError):  # or another one does, just now
            disk.rename(before, path)
    _check_target(path)
    _sweep(path)
    for parent in reversed(path.parents):
        if not parent.exists():
            with contextlib.suppress(FileExistsError):
                disk.make_folder(parent)
                disk.sync_folder(parent.parent)
    temporary, held = _temporary(path)
    try:
        yield temporary
        if not (_is_dump(temporary) or is_part(temporary)):
            raise ValueError(f"{temporary}: expected a finished dump or part.")
        _take_place(temporary, path)
    except BaseException:
        _throw_away(temporary, path, lambda remove: remove())
        raise
    else:
        _throw_away(temporary, path, disk.run_in_background)
    finally:
        held.close()


def _throw_away(temporary: Path, path: Path, run: Callable[[Callable[[], None]], None]) -> None:
    """Remove a folder with ``run``: the dump that was replaced, or a new one that failed."""
    trash = temporary.with_name(f".{path.name}.trash-{secrets.token_hex(8)}")

    def remove() -> None:
        try:
            with contextlib.suppress(OSError):
                disk.remove(trash)
        finally:
            fd.close()

    with contextlib.suppress(OSError):
        fd = disk.open_folder(temporary)
        disk.lock(fd)  # others see that it is being removed
        try:
            disk.rename(temporary, trash)
        except OSError:
            fd.close()
            raise
        run(remove)


def _take_place(temporary: Path, path: Path) -> None:
    try:
        disk.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        _check_target(path)
        try:
            disk.exchange(temporary, path)
        except OSError as why:
            if why.errno not in disk.NO_EXCHANGE:
                raise
            _take_turns(temporary, path)
    disk.sync_folder(path.parent)


def _take_turns(temporary: Path, path: Path) -> None:
    """Exchange two names in steps. Between them ``path`` is free, and :func:`standing` finds what was there."""
    aside = path.with_name(f".{path.name}.was-{secrets.token_hex(8)}")
    with disk.open_folder(path) as fd:
        disk.lock(fd)  # others see that it is in use
        while True:
            disk.rename(path, aside)
            try:
                disk.rename(temporary, path)
                break
            except BaseException:
                try:
                    disk.rename(aside, path)
                except FileNotFoundError:
                    continue  # another process took this one for dead, and put it back
                raise
        with contextlib.suppress(OSError):
            disk.rename(aside, temporary)


def standing(path: Path) -> Path:
    """Where the dump of a name lies: there; or beside it, while it is replaced where two names cannot be exchanged.

    It stays there if the process that replaces it is killed just then. The next ``dumps`` to that name puts it back.
    """
    return path if os.path.lexists(path) else next(iter(_beside(path, _ASIDE)), path)


def _beside(path: Path, names: re.Pattern[str]) -> list[Path]:
    """What lies beside a path and is called as it, behind a point, with such a name behind another one."""
    ours = f".{path.name}."
    with contextlib.suppress(OSError):
        found = os.listdir(path.parent)
        return [path.with_name(name) for name in found if name.startswith(ours) and names.fullmatch(name, len(ours))]
    return []


def _check_target(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink() and (_is_dump(path) or is_part(path) or not any(path.iterdir())):
        return
    raise FileExistsError(
        errno.EEXIST,
        "expected a free name, an empty folder or a dump to replace. Remove it, or take another",
        str(path),
    )


def _is_dump(path: Path) -> bool:
    """Whether the folder has the manifest of a dump. A damaged manifest does not count."""
    try:
        return Manifest.decode((path / documents.MANIFEST).read_bytes(), path / documents.MANIFEST).name == ""
    except (OSError, *documents.UNREADABLE):
        return False


def _temporary(path: Path) -> tuple[Path, files.Descriptor]:
    """A new folder beside ``path``, and the descriptor whose lock tells other processes that it is in use."""
    while True:
        temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
        disk.make_folder(temporary)
        try:
            held = disk.open_folder(temporary)
        except FileNotFoundError:  # another process swept it before it was locked
            continue
        disk.lock(held, wait=True)
        if temporary.exists():
            return temporary, held
        held.close()


def _sweep(path: Path) -> None:
    """Remove temporary folders that killed processes left of dumps to ``path``."""
    for left in _beside(path, _LEFT):
        with contextlib.suppress(OSError), disk.open_folder(left) as fd:
            if disk.lock(fd):
                disk.remove(left)
