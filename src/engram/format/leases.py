"""Leases: files below the root of a series that keep a checkpoint from being removed while another process copies it.

``<root>/lease-<16 hex digits>.json`` names the checkpoint and for how long it is needed after the file was changed last, by the
clock of the file system. What cannot be read, or is older, protects nothing: a reader that was killed delays a removal, and no more.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Literal

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import disk, strict
from engram.format.problems import Problem, problem_of, read_small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

_NAME = re.compile(r"lease-[0-9a-f]{16}\.json")
#: For how long a checkpoint may be leased without a sign of life, whatever a file says.
MAX_SECONDS = 3600
_MAX_BYTES = 4096


class Document(strict.Document, frozen=True, kw_only=True):
    """The file."""

    checkpoint: str
    seconds: int
    format: Literal["engram.lease"] = "engram.lease"


class Lease:
    """A lease of this process. Also a context manager, which gives it back.

    A folder that this process may only read gets none: then what is read may be removed.

    Args:
        root: of the series.
        checkpoint: the name of what is read.
        seconds: for which it stays after each :meth:`renew`.
    """

    def __init__(self, root: Path, checkpoint: str, seconds: int = 60) -> None:
        self._path = root / f"lease-{secrets.token_hex(8)}.json"
        self._every, self._renewed = seconds / 4, time.monotonic()
        raw = strict.encode(Document(checkpoint=checkpoint, seconds=seconds))
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


def leased(root: Path) -> set[str]:
    """The names of checkpoints that others are reading. Removes leases that have expired. Raises nothing."""
    held: set[str] = set()
    with contextlib.suppress(OSError):
        names = _names(root)
        if not names:
            return held
        now = disk.now(root)
        for name in names:
            with contextlib.suppress(CorruptCheckpoint, IncompatibleCheckpoint):
                document, changed = _read(root, name)
                if now - changed <= min(document.seconds, MAX_SECONDS):
                    held.add(document.checkpoint)
                elif now - changed > MAX_SECONDS:
                    disk.remove(root / name)
    return held


def problems(root: Path) -> Iterator[Problem]:
    """Leases that cannot be read, and so protect nothing."""
    for name in _names(root):
        try:
            _read(root, name)
        except CorruptCheckpoint as error:
            if os.path.lexists(root / name):  # else it was given back
                yield problem_of(error)
        except IncompatibleCheckpoint as error:
            yield Problem(root / name, str(error).removesuffix("."))


def _names(root: Path) -> list[str]:
    return [name for name in sorted(os.listdir(root)) if _NAME.fullmatch(name)]


def _read(root: Path, name: str) -> tuple[Document, float]:
    """A lease, and when it was changed last. It is opened, so that a network's file system asks its server."""
    with disk.open_folder(root) as folder:
        document = strict.decode(read_small(root, folder, name, _MAX_BYTES), f"{root}/{name}", Document)
        return document, disk.changed(folder, name)
