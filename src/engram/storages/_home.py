"""Where processes that have copies of a storage find its store, and whether rows that exist already can be one."""

from __future__ import annotations

import os
import secrets
import weakref
from functools import partial
from pathlib import Path
from typing import NamedTuple

from engram._support.mappings import Piece, shared_pieces
from engram.format import layout
from engram.format.schema import Schema
from engram.store.lifetime import Process, forget_temporary, maker_of, shared_memory, sweep_shared_memory
from engram.store.opening import create_store, moved, open_store, skip_numbers
from engram.store.store import Store

#: The maker whose copies take any store in their folder.
OPEN_OR_CREATE = "open_or_create"


class Home(NamedTuple):
    """The folder of a store, which the first process to write to it creates."""

    folder: Path
    #: By which the copies of a storage recognize the store that one of them has created.
    maker: str = ""
    #: The process that a temporary store is made for.
    host: Process | None = None

    @classmethod
    def of(cls, owner: object, folder: Path, maker: str, *, temporary: bool) -> Home:
        """``temporary``: the store is removed with its last owner, and the owner given here may be the first."""
        if not temporary:
            return cls(folder, maker)
        weakref.finalize(owner, _forget, folder, maker, os.getpid())
        return cls(folder, maker, Process.this())

    @classmethod
    def in_shared_memory(cls, owner: object, maker: str | None = None) -> Home:
        """A temporary one: a new one, or that of a maker, whose process may have died with the store left behind."""
        if maker is None:
            sweep_shared_memory()
            maker = secrets.token_hex(16)
        return cls.of(owner, shared_memory() / f"engram-{maker}", maker, temporary=True)

    @property
    def holds_store(self) -> bool:
        """Whether one of the copies has created the store."""
        if self.maker == OPEN_OR_CREATE:
            return layout.is_store(self.folder)
        return bool(self.maker) and maker_of(self.folder) == self.maker

    def find(self) -> Store | None:
        """The store that one of the copies has created; None if all have closed it since."""
        try:
            return open_store(self.folder)
        except FileNotFoundError:
            return None

    def create(self, schema: Schema, *, replace: bool, given: int) -> Store:
        """A new store, whose ticket numbers begin behind those that were given. Raises as :func:`create_store`."""
        begin = partial(skip_numbers, given=given)
        return create_store(schema, self.folder, maker=self.maker, guest_of=self.host, replace=replace, begin=begin)

    def move(self, private: Store) -> Store:
        """The store, with the rows of a private one. Raises ``OSError``: no space."""
        return moved(private, self.folder, self.maker, self.host)


def _forget(directory: Path, maker: str, pid: int) -> None:
    if pid == os.getpid():
        forget_temporary(directory, maker)


def share_in_place(store: Store, owner: object) -> tuple[Home, Store] | None:
    """A store that processes share, around rows in memory that they share already, all of which are live. None: they do not.

    Raises:
        RuntimeError: these rows cannot be one. EngramError, OSError, ValueError: as :func:`create_store`.
    """
    pieces = shared_pieces(store.tensors)
    if not any(pieces) and not any(tensor.is_shared() for tensor in store.tensors):  # type: ignore[no-untyped-call]
        return None
    maker = secrets.token_hex(16)
    folder, pieces = _place_of(store, pieces, maker)
    sweep_shared_memory()
    named = all(piece is None or piece.named for piece in pieces)
    home = Home.of(owner, folder, maker, temporary=not named)
    shared = create_store(
        store.schema, folder, maker=maker, guest_of=home.host, begin=lambda core: core.fill(), adopted=pieces
    )
    return home, shared


def _place_of(store: Store, pieces: list[Piece | None], maker: str) -> tuple[Path, list[Piece | None]]:
    """The folder of the store around rows that lie in files, and where they lie.

    Raises:
        RuntimeError: they cannot be its rows.
    """
    named = []
    for field, tensor, piece in zip(store.schema.fields, store.tensors, pieces, strict=True):
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            continue
        if piece is None:
            raise RuntimeError(
                f"field {field.name}: expected memory that is shared, as of other fields, got memory of this process alone. "
                "Share all of the data, or none of it."
            )
        if piece.size < 0:
            raise RuntimeError(f"field {field.name}: expected a file that can be written to, got {piece.path!r}.")
        if piece.offset + nbytes != piece.size or tensor.untyped_storage().nbytes() != nbytes:
            raise RuntimeError(
                f"field {field.name}: expected all of the memory that was shared, got a view of a part of it. Use the data "
                "that was shared itself, or a copy."
            )
        named.append((field.key, piece))
    folder = layout.folder_of((key, piece.path) for key, piece in named)
    if folder is not None and all(piece.named and piece.offset == 0 for _, piece in named):
        if (folder / layout.FOLDER).exists():
            raise RuntimeError(
                f"{str(folder)!r} holds a store already. Use ReplayBuffer.open({str(folder)!r}) to go on with it."
            )
        return folder, pieces
    device = os.stat(shared_memory()).st_dev
    for key, piece in named:
        if piece.device != device:
            raise RuntimeError(
                f"field {key[0] if len(key) == 1 else key}: expected files as memmap_(folder) of a TensorDict makes them, all "
                f"in one folder, or memory shared by share_memory_(), got the file {piece.path!r}."
            )
    home = shared_memory() / f"engram-{maker}"
    return home, [None if piece is None else piece._replace(named=False) for piece in pieces]
