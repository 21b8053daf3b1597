"""What is said when memory for rows is taken."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from engram._words import said_bytes
from engram.field_paths import public
from engram.format.layout import SINGLE
from engram.format.schema import name_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engram.format.schema import Field


def creation_line(fields: Sequence[Field], capacity: int, where: object) -> str:
    """One line of a store to be: place and size, and of each field shape, dtype and size. ``where`` is a folder, ``RAM`` or a device."""
    said, total = [], 0
    for field in fields:
        nbytes = field.row_bytes * capacity
        said.append(f"{field.name} {list(field.shape)} {field.dtype} ({said_bytes(nbytes)})")
        total += nbytes
    return f"{capacity} rows in {where}, {said_bytes(total)}: {', '.join(said)}"


def advice(fields: Sequence[Field], dtypes: Collection[tuple[str, ...]]) -> list[str]:
    """One line about the float64 fields that ``dtypes`` does not name, if there are any and they have names."""
    wide = [f.key for f in fields if f.dtype == "float64" and f.key not in dtypes and f.key != (SINGLE,)]
    if not wide:
        return []
    remedy = ", ".join(f"{public(key)!r}: torch.float32" for key in wide)
    return [f"float64: {', '.join(map(name_of, wide))}. dtypes={{{remedy}}} of the storage takes half the memory."]


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
