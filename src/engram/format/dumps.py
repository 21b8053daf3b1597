"""Dumps: checkpoints of one rank in a folder of their own, which in one step take the place of older ones."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import disk, files, strict
from engram.format.checkpoints import MANIFEST, SHARD, Attempt, Manifest, ShardRows, entry_of, shard_of, sync_parts
from engram.format.part_reader import is_part
from engram.format.series import Vote, manifest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from engram.format.part_writer import PartInfo

#: Behind the name of a dump: folders of writers, which a killed one leaves.
_LEFT = re.compile(r"(tmp|trash|was)-[0-9a-f]{16}")
#: One of them: a dump that is being replaced, where two names cannot be exchanged.
_ASIDE = re.compile(r"was-[0-9a-f]{16}")


def finish_dump(
    folder: Path, parts: Sequence[PartInfo], rows: ShardRows, *, step: int = 0, user: Mapping[str, object] | None = None
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
    attempt = Attempt(
        name="",
        attempt=secrets.token_hex(4),
        epoch=0,
        step=step,
        world=1,
        trigger="dumps",
        parent=None,
        user=dict(user or {}),
    )
    shard = shard_of(attempt, 0, folder, parts, rows, "flat")
    raw = strict.encode(shard)
    manifest = manifest_of(attempt, [Vote(0, shard, entry_of(shard, raw), None)], [])
    raw_manifest = manifest.encode()
    disk.put(folder / SHARD, raw)
    disk.put(folder / MANIFEST, raw_manifest)
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
    if not os.path.lexists(path):
        with contextlib.suppress(OSError):
            ours = f".{path.name}."
            for name in os.listdir(path.parent):
                if name.startswith(ours) and _ASIDE.fullmatch(name, len(ours)):
                    return path.with_name(name)
    return path


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
        return Manifest.decode((path / MANIFEST).read_bytes(), path / MANIFEST).name == ""
    except (OSError, CorruptCheckpoint, IncompatibleCheckpoint):
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
    if not path.parent.is_dir():
        return
    ours = f".{path.name}."
    for name in os.listdir(path.parent):
        if name.startswith(ours) and _LEFT.fullmatch(name, len(ours)):
            with contextlib.suppress(OSError), disk.open_folder(path.parent / name) as fd:
                if disk.lock(fd):
                    disk.remove(path.parent / name)
