"""Where the files of a directory store are.

The data lies exactly as ``TensorDict.memmap`` lays it out, so that ``TensorDict.load_memmap(dir)`` reads a store without
engram; ours lies beside it in ``.engram/``::

    <dir>/meta.json, observation.memmap, next/meta.json, next/reward.memmap …
    <dir>/.engram/store.json     schema (format/schema.py); the last file to appear: it makes the folder a store
    <dir>/.engram/control        header, lock page, participants, lane cursors
    <dir>/.engram/tickets        a ticket (u64) per row, a lap (u32) per row, padded to 8 bytes, the number of a write (u64) per row
    <dir>/.engram/alive          one byte lock per participant; nothing else opens this file
    <dir>/.engram/indexes/<name>/priorities   a priority tree and its parameters
    <dir>/.engram/maker          identifies the store to copies of the buffer that made it; empty: no copy waits for it
    <dir>/.engram/temporary      if it exists, the last process to close the store removes the folder
    <dir>/.engram/buffer.json    which components the last buffer had
    <dir>/.engram/copy.json      if it is there: where the other copy of the store is served, and which of both took over
    <dir>/.engram/grouped        the small fields of a store that groups them: in each row all of its fields, which have no file then
    <dir>/.engram/adopted        if it is there, the rows were there before the store, and stay without it
    <dir>/.engram/column-<n>     field n, which was added: until its file has its own name, too
    <dir>/.engram/ragged/control       rings of items, of stores with fields whose rows have any number of items
    <dir>/.engram/ragged/<n>.spans     field n, which such fields share: where the items of each row lie, and how many
    <dir>/.engram/ragged/<n>.values    the items of field n, lane by lane
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from engram._support.field_paths import nested
from engram.format.schema import DTYPES, Column, Schema

FOLDER = ".engram"
#: Key of the only field of rows that are tensors.
SINGLE = "_-single-tensor-_"
STORE = "store.json"
CONTROL = "control"
TICKETS = "tickets"
ALIVE = "alive"
BUFFER = "buffer.json"
COPY = "copy.json"
#: Of a dump or a checkpoint.
MANIFEST = "manifest.json"
INDEXES = "indexes"
MAKER = "maker"
TEMPORARY = "temporary"
ADOPTED = "adopted"
GROUPED = "grouped"
#: Of a field that is added, with its number behind.
COLUMN = "column-"
#: The folder with the items of ragged fields.
RAGGED = "ragged"
#: What ``adopted`` holds where the rows lie in files of the folder, as their fields are named.
IN_FILES = b'{"segments": null}'
#: What ``buffer.json`` holds at first: an empty object, and room to be overwritten when the disk is full.
NO_RECORD = b"{}".ljust(4096)

_ENCODED = {code: f"%{code:02X}" for code in (*map(ord, '/<>:"|?*\\ %'), *range(32), 127)}
_NAME_MAX = 255
#: What :mod:`engram.saved.series` keeps below its folder.
_OF_A_SERIES = re.compile(r"LATEST|EPOCH-[0-9]{8}|ckpt-[0-9]{12,18}-e[0-9]{4,9}-([0-9a-f]{8}|crash[0-9]{1,9})")


def encode_key(key: str) -> str:
    """File name of a key in TensorDict's layout: unsafe characters percent-encoded."""
    if not key:
        return "%"
    if key in (".", ".."):
        return "%2E" * len(key)
    return key.translate(_ENCODED)


def field_path(directory: Path, key: tuple[str, ...]) -> Path:
    """The file of a field. Raises as :func:`field_name`."""
    return directory / field_name(key)


@functools.lru_cache(4096)
def field_name(key: tuple[str, ...]) -> str:
    """The path of a field's file in its folder.

    Raises:
        ValueError: a part of the key is too long for a file name.
    """
    parts = [*map(encode_key, key)]
    parts[-1] += ".memmap"
    for part, name in zip(key, parts, strict=True):
        nbytes = len(name.encode("utf-8", "surrogatepass"))
        if nbytes > _NAME_MAX:
            raise ValueError(
                f"field {key}: the key {part[:40]!r}… needs a file name of {nbytes} bytes, at most {_NAME_MAX} "
                "are possible. Shorten the key, or use a storage in RAM."
            )
    return "/".join(parts)


class Group(NamedTuple):
    """The layout of the file in which the small fields of a store lie together."""

    #: Bytes from row to row: a multiple of the widest dtype.
    stride: int
    #: Where in a row each field begins, by its number, in ascending order: a multiple of its dtype.
    offsets: dict[int, int]


def group_of(schema: Schema) -> Group | None:
    """The fields that lie together, those of wide dtypes first; None: each has a file of its own."""
    if not schema.grouped:
        return None
    fields = schema.fields[: schema.first_fields]
    small = [n for n, it in enumerate(fields) if 0 < it.row_bytes <= schema.grouped and it.ragged is None]
    if len(small) < 2 or schema.capacity < 2:
        return None
    offsets, end = {}, 0
    for number in sorted(small, key=lambda number: -DTYPES[fields[number].dtype]):
        offsets[number] = end
        end += fields[number].row_bytes
    widest = DTYPES[fields[next(iter(offsets))].dtype]
    return Group(-(-end // widest) * widest, offsets)


def row_files(directory: Path, schema: Schema, hidden: str = FOLDER) -> dict[int, tuple[Path, int]]:
    """The files with the rows of a store, and the bytes of a row in each, by the number of their first field."""
    group = group_of(schema)
    together = group.offsets if group else {}
    paths = column_paths(directory, schema, hidden)
    found = {n: (paths[n], field.row_bytes) for n, field in enumerate(schema.fields) if n not in together}
    return {**found, min(together): (directory / hidden / GROUPED, group.stride)} if group else found


def unnamed_column(directory: Path, number: int) -> Path:
    """The file of a field that is added, until it has its name."""
    return directory / FOLDER / f"{COLUMN}{number}"


def column_path(directory: Path, schema: Schema, number: int, hidden: str = FOLDER) -> Path:
    """Where the rows of a field lie that has a file of its own. Of one that was added, perhaps just now, it may have no name yet."""
    if schema.fields[number].ragged is not None:
        return directory / hidden / RAGGED / f"{number}.spans"
    if number >= schema.first_fields and (unnamed := unnamed_column(directory, number)).exists():
        return unnamed
    return field_path(directory, schema.fields[number].key)


def column_paths(directory: Path, schema: Schema, hidden: str = FOLDER) -> list[Path]:
    """Where the rows of each field lie, those of a field that lies with others aside."""
    if schema.added or schema.ragged:
        return [column_path(directory, schema, number, hidden) for number in range(len(schema.fields))]
    return [field_path(directory, field.key) for field in schema.fields]


def ragged_control(directory: Path, hidden: str = FOLDER) -> Path:
    """The file that says which items of a store's rings are in use."""
    return directory / hidden / RAGGED / CONTROL


def values_files(directory: Path, schema: Schema, hidden: str = FOLDER) -> dict[int, tuple[Path, int]]:
    """The files with the items of ragged fields, and their bytes, by the number of the field."""
    folder = directory / hidden / RAGGED
    return {number: (folder / f"{number}.values", nbytes) for number, nbytes in schema.values_bytes.items()}


def folder_of(paths: Iterable[tuple[tuple[str, ...], str]]) -> Path | None:
    """The folder in which files lie as those of these keys do; None: there is none. ``paths``: ``(key, path)``."""
    folders = set()
    for key, path in paths:
        expected, found = Path(field_name(key)).parts, Path(path).parts
        folders.add(Path(*found[: -len(expected)]) if found[-len(expected) :] == expected else None)
    return folders.pop() if len(folders) == 1 else None


def clash(fields: Iterable[Column]) -> str | None:
    """A name that would be a file and a folder at once, as of the keys ``a`` and ``("a.memmap", "b")``; None if all fit."""
    paths = {field_name(field.key) for field in fields if not field.ragged}
    folders = {path[:at] for path in paths for at, char in enumerate(path) if char == "/"}
    metas = {"meta.json", *(f"{folder}/meta.json" for folder in folders)}
    return min((paths | metas) & folders, default=None)


def tickets_bytes(capacity: int, *, earlier: bool = False) -> int:
    """Size of the file of tickets; ``earlier``: of a store in which edits do not keep the numbers of writes."""
    return (8 if earlier else 16) * capacity + -(-4 * capacity // 8) * 8


def is_store(directory: Path) -> bool:
    """Whether the folder holds a published store."""
    return (directory / FOLDER / STORE).is_file()


def is_series(root: Path) -> bool:
    """Whether checkpoints were made below this folder."""
    with contextlib.suppress(OSError):
        return any(map(_OF_A_SERIES.fullmatch, os.listdir(root)))
    return False


def meta_files(directory: Path, schema: Schema) -> dict[Path, bytes]:
    """TensorDict's ``meta.json`` of every level."""
    group, rows = group_of(schema), schema.capacity
    apart = group.offsets if group else ()
    shown = {
        it.key: Described(device="cpu", shape=[rows, *it.shape], dtype=f"torch.{it.dtype}", is_nested=False)
        for number, it in enumerate(schema.fields)
        if number not in apart and it.ragged is None
    }
    return metas(directory, shown, [rows])


class Described(dict[str, object]):
    """What TensorDict's ``meta.json`` says of an entry."""


def metas(directory: Path, entries: Mapping[tuple[str, ...], Described], shape: list[int]) -> dict[Path, bytes]:
    """TensorDict's ``meta.json`` of every level above entries, whose batch has that shape."""
    return dict(_levels(directory, nested(entries), shape))


def _levels(folder: Path, level: Mapping[str, object], shape: list[int]) -> Iterator[tuple[Path, bytes]]:
    meta = dict(level)
    for key, value in level.items():
        if isinstance(value, dict) and not isinstance(value, Described):
            meta[key] = {"type": "TensorDict"}
            yield from _levels(folder / encode_key(key), value, shape)
    meta |= {"shape": shape, "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    yield folder / "meta.json", json.dumps(meta, ensure_ascii=False).encode()
