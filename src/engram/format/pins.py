"""Pins: steps of a series whose checkpoints stay, whatever ``keep`` says, as something outside of the series names them.

``<root>/pins.json`` lists them, the one that was pinned last at the end. Only the job that saves writes it. If it cannot be read,
it protects nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Literal

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import disk, strict
from engram.format.problems import Problem, problem_of, read_small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "pins.json"
_MAX_BYTES = 1 << 16
#: Steps that a file may list.
MOST = 1000


class Document(strict.Document, frozen=True, kw_only=True):
    """The file."""

    steps: tuple[int, ...]
    format: Literal["engram.pins"] = "engram.pins"


def pinned(root: Path) -> tuple[int, ...]:
    """The steps that are pinned, the newest pin last. Raises nothing."""
    with contextlib.suppress(OSError, CorruptCheckpoint, IncompatibleCheckpoint):
        return _read(root)
    return ()


def pin(root: Path, step: int, keep: int) -> None:
    """Pin a step, and forget all pins but the newest ``keep``.

    Raises:
        OSError: the file cannot be written. The pins are as they were.
        CorruptCheckpoint, IncompatibleCheckpoint: the file is damaged, or a newer engram's. It stays as it is: what it pinned may still
            be in use.
    """
    steps = [*(other for other in _read(root) if other != step), step][-keep:]
    disk.replace(root / NAME, strict.encode(Document(steps=tuple(steps))))


def problems(root: Path) -> Iterator[Problem]:
    """A file that cannot be read, and so protects nothing."""
    try:
        _read(root)
    except CorruptCheckpoint as error:
        yield problem_of(error)
    except IncompatibleCheckpoint as error:
        yield Problem(root / NAME, str(error).removesuffix("."))


def _read(root: Path) -> tuple[int, ...]:
    if not os.path.lexists(root / NAME):
        return ()
    with disk.open_folder(root) as folder:
        return strict.decode(read_small(root, folder, NAME, _MAX_BYTES), f"{root}/{NAME}", Document).steps
