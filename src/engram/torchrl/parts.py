"""Storages saved in a layout: the files that TorchRL reads, and beside them engram's state, with sums of these files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engram._support.state import typed
from engram.errors import CorruptCheckpoint, CorruptStore, IncompatibleCheckpoint, IncompatibleStore
from engram.format import layout
from engram.format import schema as schemas
from engram.saved import disk, folder
from engram.saved.checkpointers import LAYOUTS, Ring, check_sums, fields_of, ring_of, summed, written_store
from engram.saved.description import NO_SCHEMA
from engram.saved.documents import Cut, ShardRows, Totals
from engram.saved.folder import ENTRY, Folder, convert
from engram.saved.part_writer import PartWriter
from engram.saved.parts import described_state, read_state
from engram.saved.snapshot import SavedRows
from engram.torchrl.folders import FolderLeaves, FolderSink
from engram.torchrl.layouts import Keys, LayoutDump, RowsWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from engram.saved.checkpointers import Key, SavedStorage
    from engram.saved.part_reader import PartReader
    from engram.types import StorageLoad


class Layout(NamedTuple):
    """Which files rows are saved in."""

    kind: str
    """``flat`` or ``nested``."""
    keys: Keys
    who: str
    """What messages begin with."""

    @property
    def part(self) -> str:
        """What a part of this layout calls itself."""
        return _PART_OF[self.kind]

    def write(self, folder: Path, fields: Mapping[Key, Tensor], ring: Ring) -> list[str]:
        """Write rows into a folder that exists. Returns the names of the files. Raises as :class:`RowsWriter`; ``OSError``."""
        writer = RowsWriter(fields, ring, self.keys, f"{self.who}: dumps")
        sink = FolderSink(folder, f"{self.who}: dumps", nested=self.kind == "nested")
        writer.write(sink)
        sink.finish(ring.live * ring.width)
        return sink.files

    def snapshot(self, storage: SavedStorage, without: Collection[tuple[str, str]] = ()) -> LayoutSnapshot:
        """What is saved, once writers wait."""
        return LayoutSnapshot(storage, self, without)

    def load(self, storage: SavedStorage, folder: Path) -> StorageLoad:
        """Check a layout that engram did not write for a storage: everything that can be damaged, if it holds rows that would be lost."""
        dump, here = self.open(folder), storage.memory
        schema = dump.schema(None if here is None else here.schema)
        if here is not None and int(here.core.size()):
            dump.verify()
        return storage.prepare_rows(dump.state(schema), dump.source(schema))

    def open(self, folder: Path) -> LayoutDump:
        """Describe and check the layout in a folder. Raises as :func:`open_layout`."""
        found = open_layout(Folder(folder), (), self.keys)
        if found is None:
            raise IncompatibleCheckpoint(
                f"{self.who}: loads: {folder}: expected a storage saved flat or nested, found none."
            )
        return found


_PART_OF = dict(zip(("flat", "nested", "hdf5"), LAYOUTS, strict=True))
_KIND_OF = {part: kind for kind, part in _PART_OF.items()}


def open_layout(folder: Folder, parts: tuple[str, ...], keys: Keys) -> LayoutDump | None:
    """Describe and check the layout that lies in a folder, whichever it is; None: there is none.

    Args:
        folder: what lies around it.
        parts: names of the folders that it lies in, below that.
        keys: which entries are flags and rewards.

    Raises:
        CorruptCheckpoint: damaged. IncompatibleCheckpoint: not of steps, or an HDF5 file.
    """
    if FolderLeaves.recognised(folder, parts):
        return LayoutDump(FolderLeaves(folder, parts, (keys.full, keys.shift)), keys)
    if any(name.endswith(".h5") for name in folder.names(parts)):
        raise _hdf5(folder.name(parts))
    return None


def _hdf5(folder: str) -> IncompatibleCheckpoint:
    return IncompatibleCheckpoint(
        f"{folder}: expected a storage saved flat or nested, got an HDF5 file. TorchRL's checkpointer loads its rows, where TorchRL is "
        f"installed: H5StorageCheckpointer().loads(rb.storage, {folder!r})."
    )


class LayoutSnapshot:
    """A storage that is saved in a layout. It must not change until then.

    Args:
        storage: which; its writers are paused.
        layout: the layout.
        without: names and kinds of indexes that others save.

    Raises:
        RuntimeError: nothing was ever written. TypeError: it has no fields.
    """

    #: Whether writers must wait until it is saved.
    needs_pause = True

    def __init__(self, storage: SavedStorage, laid: Layout, without: Collection[tuple[str, str]] = ()) -> None:
        self._store = written_store(storage, laid.who)
        self._layout = laid
        self.state = storage.state_without_rows(without=without)
        self._ring = ring_of(self._store, laid.who)
        self.nbytes = self._ring.live * self._ring.width * self._store.schema.row_bytes
        self._moment = self._now()

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:
        """Write it into a new folder, as a part of a dump.

        Raises:
            IncompatibleCheckpoint: the rows are no steps that follow each other; names the row.
            RuntimeError: rows were written since. OSError: no space, or an I/O error.
        """
        laid = self._layout
        part = PartWriter(folder, "storage", laid.part)
        written = laid.write(folder, fields_of(self._store, self._ring), self._ring)
        if self._now() != self._moment:
            raise RuntimeError(f"{laid.who}: dumps: expected no writes meanwhile, got some. Save it again.")
        noted = {"file": "checkpoint.h5", "keys": _noted(laid.keys), **summed(folder, written)}
        info = part.finish(described_state(part, {**self.state, ENTRY: noted}, "storage"))
        for below in sorted({(folder / name).parent for name in written} - {folder / layout.FOLDER}):
            disk.sync_folder(below)
        if progress is not None:
            progress(self.nbytes)
        steps = self._ring.live * self._ring.width
        return SavedRows(
            info, ShardRows(Cut(typed(self.state, "clock", int, "storage")), Totals(steps=steps, episodes=0), NO_SCHEMA)
        )

    @property
    def cursor(self) -> dict[str, int]:
        """Where TorchRL's writer goes on, and how many slots were ever written."""
        ring = self._ring
        return {
            "cursor": ring.shift % ring.slots,
            "write_count": typed(self.state, "write_count", int, "storage") // ring.width,
        }

    def _now(self) -> tuple[int, int]:
        return int(self._store.core.next_ticket), int(self._store.core.write_count)


def prepare_layout(storage: SavedStorage, reader: PartReader, without: Sequence[str] = ()) -> StorageLoad:
    """Check a part in a layout for a storage: its sums first.

    Args:
        storage: which.
        reader: of the part.
        without: names of priorities that the caller loads.

    Raises:
        CorruptCheckpoint: damaged; names the file. IncompatibleCheckpoint: another schema. Nothing is changed.
    """
    if _KIND_OF[reader.type] == "hdf5":
        raise _hdf5(str(reader.folder))
    state = read_state(reader)
    noted = state.pop(folder.ENTRY, None)
    root = str(reader.folder)
    text, priorities = state.get("schema"), state.get("priorities")
    if not isinstance(noted, dict) or not isinstance(text, str) or not isinstance(priorities, dict):
        raise CorruptCheckpoint(f"{root}: expected what the layout notes, found nothing.")
    check_sums(reader.folder, noted)
    keys = _keys_of(noted, root)
    dump = Layout(_KIND_OF[reader.type], keys, "loads").open(reader.folder)
    try:
        schema = schemas.decode(text.encode(), root)
    except (ValueError, CorruptStore, IncompatibleStore) as error:
        raise CorruptCheckpoint(f"{root}: {error}") from error
    expected = [(field.key, field.dtype, field.shape) for field in schema.fields]
    found = {(field.key, field.dtype, field.shape) for field in dump.fields}
    if (schema.capacity, schema.columns) != (dump.capacity, dump.columns) or not found.issuperset(expected):
        raise CorruptCheckpoint(f"{root}: expected the rows of its schema, got others.")
    kept = {name: it for name, it in priorities.items() if name not in without}
    return storage.prepare_rows({**state, "priorities": kept}, dump.source(schema))


class _NotedKeys(msgspec.Struct):
    """What a state says of the entries."""

    done: tuple[str, ...]
    flags: list[tuple[str, ...]]
    rewards: list[tuple[str, ...]]
    shift: str
    full: str


def _noted(keys: Keys) -> dict[str, object]:
    """Keys, as a state has them."""
    lists = {
        "done": list(keys.done),
        "flags": sorted(map(list, keys.flags)),
        "rewards": sorted(map(list, keys.rewards)),
    }
    return {**lists, "shift": keys.shift, "full": keys.full}


def _keys_of(noted: Mapping[str, object], root: str) -> Keys:
    """The keys that a state notes. Raises ``CorruptCheckpoint``: it notes none."""
    found: _NotedKeys = convert(noted.get("keys"), _NotedKeys, root)
    if not found.done:
        raise CorruptCheckpoint(f"{root}: expected the key of the flag that ends trajectories, got none.")
    return Keys(found.done, frozenset(found.flags), frozenset(found.rewards), found.shift, found.full)
