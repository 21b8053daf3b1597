"""Fields that are added to a store which holds rows.

A field of a store in a folder is there from the moment in which ``store.json`` names it, which is renamed into place while no process
writes. Before, its rows are there, in a file that is not named yet; afterwards that gets its name. A process that finds another epoch of
fields in the control block adopts what is new before its next read or write.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from pathlib import Path

import numpy as np
import torch

from engram.errors import CorruptStore, WriterStalled
from engram.format import files, layout
from engram.format import schema as schemas
from engram.store import lifetime, memory
from engram.store.store import Store

#: How often a pause is tried: who holds one may be waiting for the lock of the folder.
_TRIES = 3


def add_field(store: Store, field: schemas.Field, fill: bytes) -> None:
    """One field more, which holds ``fill`` in every row. Nothing is done if there is one of the same key, dtype, shape and fill.

    If this raises, or the process dies, there is the field in all rows, or none.

    Args:
        store: on the CPU.
        field: the new one.
        fill: a row of it.

    Raises:
        ValueError: the key is taken, or no entry can be added there. Nothing is changed.
        OSError: no space; a file of that name is there already. Nothing is changed.
        WriterStalled: another thread or process has paused the store, or is writing, for 5 s. Nothing is changed.
        StoreInUse: another process is opening or closing the store.
    """
    for tried in range(1, _TRIES + 1):
        try:
            if store.folder is None:
                _add_in_memory(store, field, fill)
            else:
                _add_in(store.folder, store, field, fill)
        except WriterStalled:
            if tried == _TRIES:
                raise
        else:
            return


def _add_in_memory(store: Store, field: schemas.Field, fill: bytes) -> None:
    with store.adding:
        schema = _grown(store.schema, field, fill)
        if schema is None:
            return
        tensor = memory.private_field(field, store.capacity)
        fill_rows(tensor, fill)
        with store.paused():
            store.grow(schema, [tensor])


def _add_in(directory: Path, store: Store, field: schemas.Field, fill: bytes) -> None:
    with lifetime.exclusive(directory):
        adopt_fields(store)
        schema = _grown(store.schema, field, fill)
        if schema is None:
            return
        raw, number = encoded(schema), len(schema.fields) - 1
        path = layout.field_path(directory, field.key)
        if os.path.lexists(path):
            raise FileExistsError(17, "a file of that name is there already", str(path))
        hidden = layout.unnamed_column(directory, number)
        hidden.unlink(missing_ok=True)  # of a process that died
        try:
            files.reserve(hidden, field.row_bytes * schema.capacity)
            tensor = memory.column_field(hidden, field, schema.capacity)
            fill_rows(tensor, fill)
            with store.paused():
                # In this order: who sees the new epoch waits for the folder, and finds the field, or that there is none.
                epoch = store.core.next_fields_epoch()
                files.write_atomically(directory / layout.FOLDER / layout.STORE, raw)
                store.grow(schema, [tensor])
                store.core.knows_fields(epoch)
        except BaseException:
            if len(lifetime.schema_in(directory).fields) <= number:
                hidden.unlink(missing_ok=True)
            raise
        with contextlib.suppress(OSError):  # the field is there: the next process that opens the store names its file
            name_columns(directory, schema)


def encoded(schema: schemas.Schema) -> bytes:
    """The description of a store in a folder. Raises ``ValueError``: it is too long, or two fields need the same path."""
    raw, clash = schemas.encode_store(schema), layout.clash(schema.fields)
    if len(raw) > schemas.MAX_BYTES:
        raise ValueError(f"store: its description needs {len(raw)} bytes, at most {schemas.MAX_BYTES} are possible.")
    if clash is not None:
        raise ValueError(f"store: two keys need {clash!r}, once as a file and once as a folder. Rename one of them.")
    return raw


def changed_description(folder: Path) -> CorruptStore:
    """The error of a store whose description is not the one that it was made with."""
    return CorruptStore(
        f"{folder / layout.STORE}: expected the description this store was made with, got a changed one."
    )


def _grown(schema: schemas.Schema, field: schemas.Field, fill: bytes) -> schemas.Schema | None:
    """The schema with the field; None: it has it. Raises ``ValueError``."""
    for number, known in enumerate(schema.fields):
        if known == field and schema.fill(number) == fill:
            return None
    return schema.grown(field, fill)


def fill_rows(tensor: torch.Tensor, fill: bytes, *, zeroed: bool = True) -> None:
    """Let all rows of a field hold ``fill``. ``zeroed``: they are zeros."""
    if any(fill) or (fill and not zeroed):
        rows = tensor.reshape(-1).view(torch.uint8).numpy().reshape(len(tensor), len(fill))
        rows[:] = np.frombuffer(fill, np.uint8)


def adopt_fields(store: Store) -> None:
    """Take over what other processes have added since.

    Raises:
        CorruptStore: the description of the store is another one. OSError: a file cannot be mapped.
    """
    directory = store.folder
    if directory is None or store.closed:
        return
    with lifetime.exclusive(directory):
        epoch, schema = store.core.fields_epoch, lifetime.schema_in(directory)
        known = len(store.schema.fields)
        if schema.fields[:known] != store.schema.fields or schema.first_fields != store.schema.first_fields:
            raise changed_description(directory / layout.FOLDER)
        if len(schema.fields) > known:
            if not store.readonly:
                with contextlib.suppress(OSError):
                    name_columns(directory, schema)
            store.grow(schema, [store.map_column(schema, number) for number in range(known, len(schema.fields))])
        store.core.knows_fields(epoch)


def adopt_what_follows(store: Store) -> None:
    """From now on the store adopts, before a read or a write, what other processes have added since."""
    known = weakref.ref(store)

    def adopt() -> None:
        if (there := known()) is not None:
            adopt_fields(there)

    store.core.on_new_fields(adopt)


def name_columns(directory: Path, schema: schemas.Schema) -> None:
    """Give the files of added fields their names, and describe them as TensorDict does. The folder is locked.

    Raises ``OSError``.
    """
    for number in range(schema.first_fields, len(schema.fields)):
        hidden, path = layout.unnamed_column(directory, number), layout.field_path(directory, schema.fields[number].key)
        if not hidden.exists():
            continue
        if schema.fields[number].row_bytes:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            hidden.rename(path)
        else:
            hidden.unlink()
    adopted = directory / layout.FOLDER / layout.ADOPTED
    given = adopted.read_bytes() if adopted.exists() else b""
    for path, text in layout.meta_files(directory, schema).items() if given in (b"", layout.IN_FILES) else ():
        known = path.read_bytes() if path.exists() else b""
        wanted = _merged(known, text) if known and given else text  # in a folder of the user's own, what it says stays
        if known != wanted:
            files.write_atomically(path, wanted)


def _merged(known: bytes, text: bytes) -> bytes:
    """A ``meta.json`` that was there, with the entries that it lacks."""
    entries, wanted = json.loads(known), json.loads(text)
    missing = {key: value for key, value in wanted.items() if key not in entries}
    return json.dumps({**entries, **missing}, ensure_ascii=False).encode() if missing else known


def put_in_order(directory: Path, schema: schemas.Schema) -> None:
    """When a store is opened, its folder locked: finish what a process that died has left of a field that it was adding."""
    with contextlib.suppress(OSError):
        for left in (directory / layout.FOLDER).glob(f"{layout.COLUMN}*"):
            number = left.name.removeprefix(layout.COLUMN)
            if not number.isdecimal() or int(number) >= len(schema.fields):
                left.unlink(missing_ok=True)
        if schema.added:
            name_columns(directory, schema)
