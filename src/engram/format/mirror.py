"""Local copies of the checkpoints of a series, for a process that follows it: what is new is copied, what is known is linked."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import disk, series
from engram.format.checkpoints import ATTEMPT, MANIFEST, SHARD, Checkpoint
from engram.format.problems import corrupt, read_small
from engram.format.strict import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from engram.format.part_reader import PartReader
    from engram.format.sums import Sums

_CHUNK = 1 << 20
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
    made = series.decision(folder)
    if made is None or made.status != "complete":
        raise corrupt(folder, "expected a complete checkpoint, found none")
    if ranks is None:
        return Checkpoint(folder)
    if not all(0 <= rank < made.world for rank in ranks):
        raise ValueError(f"{folder}: shard: expected ranks in [0, {made.world}), got {list(ranks)}.")
    wanted = msgspec.structs.replace(
        made,
        world=len(ranks),
        steps_by_rank=tuple(made.steps_by_rank[rank] for rank in ranks),
        shards=tuple(msgspec.structs.replace(made.shards[rank], rank=i) for i, rank in enumerate(ranks)),
    )
    return Checkpoint.partial(folder, wanted, ranks, made.world)


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
        with contextlib.suppress(CorruptCheckpoint, IncompatibleCheckpoint):
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
                _copy_small(source, f"{own}/{SHARD}", partial)
        for small in (ATTEMPT, MANIFEST):
            _copy_small(source, small, partial)
        disk.rename(partial, target)
        return self._checked(target)

    def _checked(self, copy: Path) -> Path:
        """The folder of a copy. Raises ``CorruptCheckpoint``: a file is missing, or has another size or digest."""
        with open_shards(copy, self._ranks) as checkpoint:
            for problem in checkpoint.problems("meta"):
                raise corrupt(*problem)
        return copy

    def keep_only(self, name: str) -> None:
        """Remove all other copies. Raises ``OSError``: something cannot be removed."""
        for folder in self._cache.iterdir():
            if folder.name != name and series.Name.parse(folder.name.removeprefix(_PARTIAL)):
                disk.remove(folder)

    def forget(self, name: str) -> None:
        """Remove a copy that turned out to be damaged. Raises ``OSError``: it cannot be removed."""
        disk.remove(self._cache / name)

    def _known(self) -> dict[tuple[int, bytes], tuple[Path, str]]:
        """Folders and names of files of copies, by their size and sums."""
        known: dict[tuple[int, bytes], tuple[Path, str]] = {}
        for name in series.names(self._cache):
            with (
                contextlib.suppress(CorruptCheckpoint, IncompatibleCheckpoint, ValueError),
                open_shards(self._cache / str(name), self._ranks) as checkpoint,
            ):
                for place in range(checkpoint.manifest.world):
                    for part in checkpoint.parts(place):
                        for file, nbytes in part.files.items():
                            known[nbytes, _bytes_of(part.listing.sums_of(file))] = part.folder, file
        return known

    def _copy_part(
        self, part: PartReader, target: Path, known: dict[tuple[int, bytes], tuple[Path, str]], beat: Callable[[], None]
    ) -> None:
        memory = memoryview(bytearray(_CHUNK))
        disk.make_folders(str(target))
        for name, nbytes in part.listing.sizes.items():
            beat()
            path = target / name
            disk.make_folders(str(path.parent))
            if name not in part.files:  # the description itself: its digest is compared when the copy is opened
                _copy_small(part.folder, name, target, nbytes)
                continue
            same = known.get((nbytes, _bytes_of(part.listing.sums_of(name))))
            if same is not None:
                with disk.open_folder(same[0]) as folder:
                    if disk.link(same[1], folder, path):
                        continue
            with disk.create(path, nbytes) as fd:
                for at in range(0, nbytes, _CHUNK):
                    beat()
                    piece = memory[: min(_CHUNK, nbytes - at)]
                    part.read(name, at, piece)
                    disk.write(fd, piece, at)


def _bytes_of(sums: Sums) -> bytes:
    return bytes(memoryview(sums).cast("B"))


def _copy_small(source: Path, name: str, target: Path, limit: int = MAX_BYTES) -> None:
    """Copy a description, whose digest is compared when the copy is opened."""
    with disk.open_folder(source) as folder:
        raw = read_small(source, folder, name, limit)
    with disk.create(target / name, 0) as fd:
        disk.write(fd, raw, 0)
