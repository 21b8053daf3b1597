"""A store in a folder that is only read: its files are mapped without the right to write, and no process notices."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch

from engram._support import native
from engram.errors import ReadOnlyStore
from engram.format import files, layout
from engram.store.indexes import INDEX_KINDS, Host, Indexes
from engram.store.memory import Block, fields_in, read_block, read_field, segment_fields
from engram.store.store import Saved, Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from engram.format.schema import Schema
    from engram.store.memory import Segment


class IndexCopies(Indexes):
    """Indexes in private memory. Each begins as a copy of the one in a folder, when it is first asked for."""

    source: Path
    """Where the others are."""

    def _copy_of(self, name: str, kind: str) -> Block | None:
        path = self.source / name / kind
        return INDEX_KINDS[kind].copied(read_block(path, path.stat().st_size).tensor) if path.exists() else None


class ReaderStore(Store):
    """Rows that others write, or have written. Every write raises the error ``ReadOnlyStore``.

    It joins no participants, recovers nothing and keeps no index of the folder.
    """

    readonly = True

    def __init__(
        self,
        schema: Schema,
        folder: Path,
        control: Block,
        tickets: Block,
        segments: Sequence[Segment | None] | None,
        *,
        abandoned: bool,
    ) -> None:
        self._folder = folder
        self._segments = segments
        super().__init__(schema, self._mapped(schema, control, private=False), control, tickets, abandoned=abandoned)
        self.indexes = IndexCopies(Host(self.core, control.tensor, tickets.tensor, None), schema.capacity)
        self.indexes.source = folder / layout.FOLDER / layout.INDEXES

    @property
    def in_use(self) -> bool:
        """Whether a process other than this one has the store open for writing."""
        return anyone_has_open(self._folder, self._control, self._tickets)

    @property
    def participant(self) -> int:
        """It is none of them: the number of the process stands for it."""
        return os.getpid() if self.in_use else 0

    def _mapped(self, schema: Schema, control: Block, *, private: bool) -> list[Tensor]:
        """The fields. ``private``: what is written to them is not seen elsewhere."""
        if self._segments is None:
            return fields_in(
                self._folder,
                schema,
                partial(read_field, private=private),
                lambda path, nbytes: read_block(path, nbytes, private=private).tensor,
            )
        inside = self._folder / layout.FOLDER
        return segment_fields(inside, schema, self._segments, control, readonly=not private, private=private)

    def map_column(self, schema: Schema, number: int) -> Tensor:
        return read_field(layout.column_path(self._folder, schema, number), schema.fields[number], schema.capacity)

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def place(self) -> str:
        return f"{self._folder} (read-only)"

    @property
    def has_files(self) -> bool:
        return self._segments is None

    def views(self) -> list[Tensor]:
        """As for every store, but what is written to them stays in them: the core reads other mappings of the same files."""
        with self._viewing:
            self._views = self._views or self._mapped(self.schema, self._control, private=True)
            return self._views

    def hold_nothing(self, rows: Tensor) -> Tensor:
        left = torch.tensor([self.core.left_behind(row) for row in rows.tolist()], dtype=torch.bool, device="cpu")
        return super().hold_nothing(rows) | left

    def check_writable(self) -> None:
        raise ReadOnlyStore(
            f"expected a store that may be written to, got the one in {str(self._folder)!r}, which was opened with readonly=True: its rows "
            "and all that belongs to them stay as they are. Open it without readonly=True."
        )

    def remove(self) -> bool:
        raise ReadOnlyStore(
            f"cleanup: the store in {str(self._folder)!r} was opened with readonly=True: its files stay. Open it without readonly=True."
        )

    def detached(self) -> Saved:
        return Saved(None, self._folder, None, {}, readonly=True)

    def after_fork(self) -> None:
        """In a child: the maps are its own, and it has nothing to recover."""


def anyone_has_open(directory: Path, control: Block, tickets: Block) -> bool:
    """Whether a process other than this one has the store in a folder open for writing. This one must not."""
    with files.open_regular(directory / layout.FOLDER / layout.ALIVE, os.O_RDONLY) as fd:
        return native.Participants(control.address, control.nbytes, tickets.address, tickets.nbytes, int(fd)).others
