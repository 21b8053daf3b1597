"""What is logged when memory for rows is taken."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from engram._words import said_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engram.format.schema import Field


def creation_lines(fields: Sequence[Field], capacity: int, where: Callable[[Field], object]) -> list[str]:
    """One line per field of a store to be: key, place, size, shape. ``where(field)`` is a path or ``RAM``."""
    return [
        f"{field.name}: {where(field)}, {said_bytes(field.row_bytes * capacity)}, "
        f"shape {[capacity, *field.shape]} {field.dtype}"
        for field in fields
    ]


def announce(lines: Sequence[str]) -> None:
    """Log at INFO to ``engram``; shown on stderr unless the program configured logging or silenced that logger."""
    logger = logging.getLogger("engram")
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("engram: %(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    for line in lines:
        logger.info("%s", line)
