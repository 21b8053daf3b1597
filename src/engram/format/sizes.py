"""What the core says of sizes, for commands that do not wait for torch, which :mod:`engram._support.native` imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram._core import priority_bytes
from engram.format import layout

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["priority_bytes", "resident_bytes"]


def resident_bytes(directory: Path, capacity: int) -> int:
    """Of the store in a folder: bytes that every draw touches."""
    indexes = len(list((directory / layout.FOLDER / layout.INDEXES).glob("*/priorities")))
    return layout.tickets_bytes(capacity) + indexes * priority_bytes(capacity, True)
