"""What is said when memory for rows is taken."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar

from engram._support import field_paths, words
from engram.format import layout, sizes
from engram.format.schema import Field, Schema, name_of

_log = logging.getLogger("engram")
_is_temporary = ContextVar("engram_temporary", default=False)


def creation_line(schema: Schema, where: object) -> str:
    """One line of a store to be: place and size, and of each field shape, dtype and size. ``where`` is a folder, ``RAM`` or a device."""
    fields = [sizes.ShownField.of(field, schema.capacity, schema.lanes) for field in schema.fields]
    each = ", ".join(f"{it.name} {it.shape} {it.dtype} ({words.format_size(it.nbytes)})" for it in fields)
    return f"{words.count(schema.capacity, 'row')} in {where}, {words.format_size(sum(it.nbytes for it in fields))}: {each}"


def advice(fields: Sequence[Field], dtypes: Collection[tuple[str, ...]]) -> list[str]:
    """One line about the float64 fields that ``dtypes`` does not name, if there are any and they have names."""
    wide = [f.key for f in fields if f.dtype == "float64" and f.key not in dtypes and f.key != (layout.SINGLE,)]
    if not wide:
        return []
    remedy = ", ".join(f"{field_paths.public(key)!r}: torch.float32" for key in wide)
    return [f"float64: {', '.join(map(name_of, wide))}. dtypes={{{remedy}}} of the storage takes half the memory."]


def warn_of_lanes(asked: int, capacity: int, lanes: int) -> None:
    """Log a warning where lanes of one length cannot have all rows that were asked for."""
    if capacity < asked:
        line = f"{asked:,} rows in {lanes} lanes are {capacity:,}, as all lanes have {capacity // lanes:,}. Ask for a multiple of {lanes}."
        announce(line, level=logging.WARNING)


def announce(*lines: str, level: int = logging.INFO) -> None:
    """Log to ``engram``, except inside :func:`temporary`."""
    if not _is_temporary.get():
        for line in lines:
            _log.log(level, "%s", line)


@contextlib.contextmanager
def temporary() -> Iterator[None]:
    """Inside, stores that this thread makes are engram's own, and are not announced: no user made them."""
    before = _is_temporary.set(True)
    try:
        yield
    finally:
        _is_temporary.reset(before)
