"""What a store's folder notes of its copies, and of which generation it is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engram._support.words import raise_as
from engram.errors import CorruptStore
from engram.format import files, layout


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file ``.engram/copy.json``. A store that was never copied has none."""

    #: Of a copy that was promoted: the name of its folder, so that a copy of that folder is another store, and that of the store.
    folder: str = ""
    store: str = ""
    #: How often a copy of the store was promoted, up to this one; and rows that this one lacked then, at least.
    generation: int = 0
    lost: int = 0
    #: Address of the server that has a copy of this store.
    follower: str = ""
    #: Address of the server before, until it knows of the promotion.
    before: str = ""
    #: Address of the copy that took over: this store is served no more.
    successor: str = ""

    def name(self, folder: str) -> str:
        """Of the store, for its clients. ``folder``: the name of its folder."""
        return self.store if self.folder == folder else folder


def read(directory: Path) -> Note:
    """The note of a store; an empty one where there is none. Raises ``CorruptStore``."""
    path = directory / layout.FOLDER / layout.COPY
    if not path.exists():
        return Note()
    with raise_as(CorruptStore, f"{path}: not readable as JSON"):
        return msgspec.json.decode(files.read_small(path, 1 << 16), type=Note)


def change(directory: Path, **changes: object) -> Note:
    """Note something more. Raises as :func:`read`; ``OSError``."""
    made = msgspec.structs.replace(read(directory), **changes)
    files.write_atomically(directory / layout.FOLDER / layout.COPY, msgspec.json.encode(made))
    return made
