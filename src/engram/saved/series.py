"""A series of checkpoints below one folder: which is the newest, which stay, and copies of them elsewhere.

::

    <root>/LATEST                               name of the newest one; a hint
           EPOCH-00000007                       create-only: the seventh incarnation of the job began
           ckpt-000000120000-e0007-00001c2d/    step, epoch, attempt: its number at this step, then at random
             attempt.json                       written first
             rank-00000-of-00004/shard.json     a rank's vote: yes.    error.json: no
             manifest.json                      the decision, create-only: complete or aborted
           trash-<name>/                        being removed
           pins.json                            steps whose checkpoints stay, the one that was pinned last at the end
           lease-<16 hex digits>.json           a checkpoint that another process copies

Only the job that saves writes pins. A lease names a checkpoint, and for how long it is needed after the file was changed last, by
the clock of the file system. What cannot be read, or is older, protects nothing: a reader that was killed delays a removal, and no
more.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Self

from engram._support.words import count
from engram.errors import CorruptCheckpoint
from engram.format.strict import MAX_BYTES
from engram.saved import attempts, disk, documents
from engram.saved.checkpoints import Checkpoint, Contents
from engram.saved.part_reader import PartReader

LATEST = "LATEST"
PINS = "pins.json"
#: Steps that may be pinned.
MAX_PINS = 1000
#: For how long a checkpoint may be leased without a sign of life, whatever a file says.
MAX_LEASE_SECONDS = 3600
_LEASE = re.compile(r"lease-[0-9a-f]{16}\.json")
_MAX_PINS_BYTES, _MAX_LEASE_BYTES = 1 << 16, 4096


class Series:
    """A series of checkpoints, and what this process remembers of them, so that it reads no document twice or that it wrote.

    It still compares the manifest and the size of every file each time. A new one remembers nothing, and so reads everything.

    Args:
        root: the folder of the series.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[str, Contents] = {}

    # ---- what is remembered ----------------------------------------------------------------------------------------------

    def contents(self, folder: Path) -> Contents:
        """The documents of an attempt or a checkpoint; empty if none is known yet."""
        return self._contents.setdefault(folder.name, Contents())

    def open(self, folder: Path, manifest: documents.Manifest | None = None) -> Checkpoint:
        """A checkpoint of the series. Raises as :class:`Checkpoint`."""
        return Checkpoint(folder, manifest, self.contents(folder))

    def confirms(self, folder: Path) -> bool:
        """Whether a known checkpoint still has the same manifest and the exact size of every file. If not, it is forgotten."""
        contents = self._contents.get(folder.name)
        if contents is None or contents.manifest is None:
            return False
        with contextlib.suppress(CorruptCheckpoint, OSError, KeyError), disk.open_folder(folder) as fd:
            raw = documents.read_small(folder, fd, documents.MANIFEST, MAX_BYTES)
            if hashlib.sha256(raw).hexdigest() == contents.sha256 and disk.have_sizes(fd, contents.sizes):
                return True
        self.forget(folder.name)
        return False

    def forget(self, name: str) -> None:
        """Drop what is known of a checkpoint."""
        self._contents.pop(name, None)

    # ---- which checkpoints there are -------------------------------------------------------------------------------------

    def recover(self, epoch: int) -> list[str]:
        """Commit each attempt that all ranks voted for and that no process decided, because it died first. Returns their names."""
        committed = []
        for name in attempts.names(self.root):
            folder = self.root / str(name)
            with contextlib.suppress(*documents.UNREADABLE):  # latest() reports it
                if attempts.decision(folder) is None and all(vote.shard for vote in attempts.votes(folder)):
                    made = attempts.decide(folder, epoch)
                    if made is not None and made.status == "complete":
                        committed.append(made.name)
        return committed

    def latest(
        self, *, at_most: int | None = None, without: Collection[str] = ()
    ) -> tuple[Path | None, list[documents.Problem]]:
        """The newest checkpoint that is complete, with the exact size of every file, and the newer ones that were passed over.

        Args:
            at_most: the largest step that is wanted.
            without: names that are passed over.

        Returns:
            ``(folder, problems)``; None: there is none.
        """
        found, problems = self.first(lambda it: (at_most is None or it.step <= at_most) and str(it) not in without)
        hint, expected = self._hint(), found.name if found else None
        if at_most is None and not without and hint != expected and not self._lags(hint, found):
            what = f"expected the name of {expected or 'no checkpoint'}, got {hint!r:.100}"
            problems.append(documents.Problem(self.root / LATEST, what))
        return found, problems

    def first(self, means: Callable[[attempts.Name], bool]) -> tuple[Path | None, list[documents.Problem]]:
        """The newest whole checkpoint of those that are meant, and what is wrong with newer ones of them."""
        problems: list[documents.Problem] = []
        for name in filter(means, attempts.names(self.root)):
            wrong = self.look(name)
            if wrong is None:
                return self.root / str(name), problems
            problems.append(wrong)
        return None, problems

    def _hint(self) -> str | None:
        try:
            with disk.open_folder(self.root) as fd:
                return documents.read_small(self.root, fd, LATEST, 256).decode("utf-8", "replace").strip()
        except CorruptCheckpoint:
            return None

    def _lags(self, hint: str | None, found: Path | None) -> bool:
        """Whether a process may have died between its decision and the hint: the hint names an older good checkpoint, or is missing."""
        newest = attempts.Name.parse(found.name) if found else None
        if newest is None:
            return False
        fresh, before = Series(self.root), attempts.Name.parse(hint or "")
        if before is not None:
            return before < newest and before.epoch <= newest.epoch and fresh.look(before) is None
        older = (name for name in attempts.names(self.root) if name < newest)
        return not os.path.lexists(self.root / LATEST) and not any(fresh.look(name) is None for name in older)

    def look(self, name: str | attempts.Name) -> documents.Problem | None:
        """Why a folder of the series is no checkpoint; None: it is one, with the exact size of every file."""
        folder = self.root / str(name)
        if self.confirms(folder):
            return None
        try:
            made = attempts.decision(folder)
            if made is None:
                given = attempts.votes(folder)
                said_yes = sum(vote.shard is not None for vote in given)
                return documents.Problem(folder, f"undecided: {said_yes} of {count(len(given), 'rank')} voted for it")
            if made.status == "aborted":
                return documents.Problem(folder, f"aborted: {', '.join(made.reasons)[:1000]}")
            if made.name != folder.name:
                return documents.Problem(
                    folder / documents.MANIFEST, f"expected the checkpoint {folder.name}, got {made.name!r:.100}"
                )
            with self.open(folder) as checkpoint:
                return next(checkpoint.problems("meta"), None)
        except documents.UNREADABLE as error:
            return documents.problem_of(error, folder)

    def is_unfinished(self) -> bool:
        """Whether the series holds nothing but saves that were killed or given up, which never were checkpoints.

        What the living ranks of a crashed job saved is none of those: it is all that the job left.
        """
        try:
            every = [(name, attempts.decision(self.root / str(name))) for name in attempts.names(self.root)]
        except documents.UNREADABLE:
            return False
        left = any(name.attempt.startswith("crash") and attempts.is_partial(self.root / str(name)) for name, _ in every)
        decided = any(made and made.status != "aborted" for _, made in every)
        return not (left or decided or os.path.lexists(self.root / LATEST))

    def set_latest(self, name: str, epoch: int) -> None:
        """Note the newest checkpoint: a hint for people and programs. Raises ``RuntimeError`` if a later incarnation has begun."""
        attempts.check_epoch(self.root, epoch)
        disk.replace(f"{self.root}/{LATEST}", f"{name}\n".encode())

    # ---- which stay ------------------------------------------------------------------------------------------------------

    def prune(self, keep: int, epoch: int) -> list[str]:
        """Remove old checkpoints and failed attempts: :meth:`retire`, then :meth:`sweep`. Names of what was removed."""
        removed = self.retire(keep, epoch)
        self.sweep()
        return removed

    def retire(self, keep: int, epoch: int, saved: str | None = None) -> list[str]:
        """Rename old checkpoints and failed attempts, so that no process finds half a one: :meth:`sweep` removes them.

        Kept are: the ``keep`` newest good checkpoints, by step and by epoch; whatever is of a later epoch, or of a later step than
        the newest good one; the newest crash attempt; undecided attempts of this epoch, which may be under way; good ones of steps
        that are pinned; the one that was just ``saved``; and what other processes read, as their leases say.

        Args:
            keep: at least 1.
            epoch: of this incarnation.
            saved: the name of a checkpoint that stays even if it is of an earlier step than all that are kept.

        Returns:
            Their names.

        Raises:
            ValueError: ``keep`` is below 1.
            RuntimeError: a later incarnation has begun.
            OSError: something cannot be renamed.
        """
        if keep < 1:
            raise ValueError(f"prune: keep: expected at least 1, got {keep}.")
        attempts.check_epoch(self.root, epoch)
        retired = [str(name) for name in self._superfluous(keep, epoch) if str(name) != saved]
        for name in retired:
            disk.rename(self.root / name, self.root / f"trash-{name}")
            self.forget(name)
        if retired:
            disk.sync_folder(self.root)
        return retired

    def sweep(self) -> None:
        """Remove what :meth:`retire` renamed, also in processes that were killed. Raises ``OSError``: something cannot be removed.

        Of files that a process of this machine has open, NFS keeps the bytes under other names: a later call removes those.
        """
        for left in sorted(os.listdir(self.root)):
            if left.startswith("trash-") and attempts.Name.parse(left.removeprefix("trash-")):
                try:
                    disk.remove(self.root / left)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                        raise

    def _superfluous(self, keep: int, epoch: int) -> list[attempts.Name]:
        every = attempts.names(self.root)
        # Looked at, all files of each, only as far as it is asked for.
        good = functools.cache(lambda name: self.look(name) is None)
        newest = [*itertools.islice(filter(good, every), keep)]
        if not newest:
            return []
        by_epoch = sorted(every, key=lambda name: (name.epoch, name.step), reverse=True)
        kept = {*newest, *itertools.islice(filter(good, by_epoch), keep)}
        kept |= set([name for name in every if name.attempt.startswith("crash")][:1])
        kept |= {name for name in every if name.epoch > epoch or name.step > newest[0].step}
        current = [name for name in every if name.epoch == epoch]
        kept |= {name for name in current if not os.path.lexists(f"{self.root}/{name}/{documents.MANIFEST}")}
        left = [name for name in every if name not in kept]
        steps = self.pinned() if left else ()
        left = [name for name in left if not (name.step in steps and good(name))]
        leased = self.leased() if left else ()
        return [name for name in left if str(name) not in leased]

    def pinned(self) -> tuple[int, ...]:
        """The steps whose checkpoints stay, whatever ``keep`` says, the newest pin last. Raises nothing."""
        with contextlib.suppress(OSError, *documents.UNREADABLE):
            return self._pins()
        return ()

    def pin(self, step: int, keep: int) -> None:
        """Pin a step, as something outside of the series names its checkpoint, and forget all pins but the newest ``keep``.

        Raises:
            OSError: the file cannot be written. The pins are as they were.
            CorruptCheckpoint, IncompatibleCheckpoint: the file is damaged, or a newer engram's. It stays as it is: what it pinned may
                still be in use.
        """
        steps = [*(other for other in self._pins() if other != step), step][-keep:]
        disk.replace(self.root / PINS, documents.encode(documents.Pins(steps=tuple(steps))))

    def _pins(self) -> tuple[int, ...]:
        if not os.path.lexists(self.root / PINS):
            return ()
        with disk.open_folder(self.root) as fd:
            return documents.read(self.root, fd, PINS, documents.Pins, _MAX_PINS_BYTES).steps

    def leased(self) -> set[str]:
        """The names of checkpoints that other processes read. Removes leases that have expired. Raises nothing."""
        held: set[str] = set()
        with contextlib.suppress(OSError):
            files = self._leases()
            now = disk.now(self.root) if files else 0.0
            for file in files:
                with contextlib.suppress(*documents.UNREADABLE):
                    terms, changed = self._lease(file)
                    if now - changed <= min(terms.seconds, MAX_LEASE_SECONDS):
                        held.add(terms.checkpoint)
                    elif now - changed > MAX_LEASE_SECONDS:
                        disk.remove(self.root / file)
        return held

    def _leases(self) -> list[str]:
        return [name for name in sorted(os.listdir(self.root)) if _LEASE.fullmatch(name)]

    def _lease(self, file: str) -> tuple[documents.LeaseTerms, float]:
        """A lease, and when it was changed last. It is opened, so that a network's file system asks its server."""
        with disk.open_folder(self.root) as fd:
            return documents.read(self.root, fd, file, documents.LeaseTerms, _MAX_LEASE_BYTES), disk.changed(fd, file)

    def unreadable_marks(self) -> Iterator[documents.Problem]:
        """Leases and pins that cannot be read, and so protect nothing."""
        for file in (*self._leases(), PINS):
            try:
                self._pins() if file == PINS else self._lease(file)
            except documents.UNREADABLE as error:
                if os.path.lexists(self.root / file):  # else it was given back
                    yield documents.problem_of(error, self.root / file)


class Lease:
    """A lease of this process, which keeps a checkpoint from being removed. Also a context manager, which gives it back.

    A folder that this process may only read gets none: then what is read may be removed.

    Args:
        root: of the series.
        checkpoint: the name of what is read.
        seconds: for which it stays after each :meth:`renew`.
    """

    def __init__(self, root: Path, checkpoint: str, seconds: int = 60) -> None:
        self._path = root / f"lease-{secrets.token_hex(8)}.json"
        self._every, self._renewed = seconds / 4, time.monotonic()
        raw = documents.encode(documents.LeaseTerms(checkpoint=checkpoint, seconds=seconds))
        with contextlib.suppress(OSError):
            disk.replace(self._path, raw)

    def renew(self) -> None:
        """The reader lives. Call this often: most calls do nothing."""
        if time.monotonic() - self._renewed >= self._every:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):
                disk.touch(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            disk.remove(self._path)


_PARTIAL = "copying-"


def open_shards(folder: Path, ranks: Sequence[int] | None) -> Checkpoint:
    """A checkpoint of a series, or some shards of it as if there were no others.

    Args:
        folder: of the checkpoint.
        ranks: those that are wanted; None: all.

    Raises:
        CorruptCheckpoint: it is missing, damaged or not complete. IncompatibleCheckpoint: written by a newer engram.
        ValueError: it has no shard of such a rank.
    """
    made = attempts.decision(folder)
    if made is None or made.status != "complete":
        raise documents.corrupt(folder, "expected a complete checkpoint, found none")
    if ranks is None:
        return Checkpoint(folder)
    if not all(0 <= rank < made.world for rank in ranks):
        raise ValueError(f"{folder}: shard: expected ranks in [0, {made.world}), got {list(ranks)}.")
    return Checkpoint.partial(folder, made, ranks)


class Mirror:
    """Copies of one series in a local folder.

    A file is linked to the copy of the checkpoint before if all its sums and its size are the same; its name says nothing.

    Args:
        root: of the series.
        cache: the local folder; made if it is not there. What an earlier process left there is used.
        ranks: whose shards are wanted; None: all.

    Raises:
        OSError: the folder cannot be made. RuntimeError: another mirror uses it.
    """

    def __init__(self, root: Path, cache: Path, ranks: Sequence[int] | None) -> None:
        self._root, self._cache, self._ranks = root, cache, ranks
        disk.make_folders(str(cache))
        self._held = disk.open_folder(cache)
        if not disk.lock(self._held):
            raise RuntimeError(
                f"follow: cache: {str(cache)!r}: another buffer that follows uses it. Give each its own folder."
            )

    def close(self) -> None:
        """Let others use the folder. A second call does nothing."""
        self._held.close()

    def copy(self, name: str, beat: Callable[[], None]) -> Path:
        """Copy a checkpoint. Every byte is compared with its sum.

        Args:
            name: of the checkpoint.
            beat: called again and again; what it raises ends the copy.

        Returns:
            The folder of the copy. One that is there already is returned at once.

        Raises:
            CorruptCheckpoint: it is damaged, or was removed meanwhile. IncompatibleCheckpoint: written by a newer engram.
            OSError: no space, or an I/O error. ValueError: as :func:`open_shards`.
        """
        target, source = self._cache / name, self._root / name
        partial = self._cache / f"{_PARTIAL}{name}"
        with contextlib.suppress(*documents.UNREADABLE):
            return self._checked(target)
        disk.remove(target)
        disk.remove(partial)
        known = self._known()
        with open_shards(source, self._ranks) as checkpoint:
            disk.make_folder(partial)
            for place in range(checkpoint.manifest.world):
                own = checkpoint.shard_folder(place).name
                disk.make_folder(partial / own)
                for part in checkpoint.parts(place):
                    self._copy_part(part, partial / own / part.folder.relative_to(source / own), known, beat)
                _copy_small(source, f"{own}/{documents.SHARD}", partial)
        for small in (documents.ATTEMPT, documents.MANIFEST):
            _copy_small(source, small, partial)
        disk.rename(partial, target)
        return self._checked(target)

    def _checked(self, copy: Path) -> Path:
        """The folder of a copy. Raises ``CorruptCheckpoint``: a file is missing, or has another size or digest."""
        with open_shards(copy, self._ranks) as checkpoint:
            for problem in checkpoint.problems("meta"):
                raise documents.corrupt(*problem)
        return copy

    def keep_only(self, name: str) -> None:
        """Remove all other copies. Raises ``OSError``: something cannot be removed."""
        for folder in self._cache.iterdir():
            if folder.name != name and attempts.Name.parse(folder.name.removeprefix(_PARTIAL)):
                disk.remove(folder)

    def forget(self, name: str) -> None:
        """Remove a copy that turned out to be damaged. Raises ``OSError``: it cannot be removed."""
        disk.remove(self._cache / name)

    def _known(self) -> dict[tuple[int, bytes], tuple[Path, str]]:
        """Folders and names of files of copies, by their size and sums."""
        known: dict[tuple[int, bytes], tuple[Path, str]] = {}
        for name in attempts.names(self._cache):
            with (
                contextlib.suppress(*documents.UNREADABLE, ValueError),
                open_shards(self._cache / str(name), self._ranks) as checkpoint,
            ):
                for place in range(checkpoint.manifest.world):
                    for part in checkpoint.parts(place):
                        for file, nbytes in part.files.items():
                            known[nbytes, part.listing.sums_of(file).tobytes()] = part.folder, file
        return known

    def _copy_part(
        self, part: PartReader, target: Path, known: dict[tuple[int, bytes], tuple[Path, str]], beat: Callable[[], None]
    ) -> None:
        disk.make_folders(str(target))
        for name, nbytes in part.listing.sizes.items():
            beat()
            path = target / name
            disk.make_folders(str(path.parent))
            if name not in part.files:  # the description itself: its digest is compared when the copy is opened
                _copy_small(part.folder, name, target, nbytes)
                continue
            same = known.get((nbytes, part.listing.sums_of(name).tobytes()))
            if same is not None:
                with disk.open_folder(same[0]) as folder:
                    if disk.link(same[1], folder, path):
                        continue
            step = max(1 << 20, part.listing.blocks.get(name, 0))
            memory = memoryview(bytearray(min(step, nbytes)))
            with disk.create(path, nbytes) as fd:
                for at in range(0, nbytes, step):
                    beat()
                    piece = memory[: min(step, nbytes - at)]
                    part.read(name, at, piece)
                    disk.write(fd, piece, at)


def _copy_small(source: Path, name: str, target: Path, limit: int = MAX_BYTES) -> None:
    """Copy a description, whose digest is compared when the copy is opened."""
    with disk.open_folder(source) as folder:
        raw = documents.read_small(source, folder, name, limit)
    with disk.create(target / name, 0) as fd:
        disk.write(fd, raw, 0)
