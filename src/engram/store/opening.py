"""Creating a store in a folder, opening it to write or to read only, and copies of stores."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engram._support import fork, mappings, native, words
from engram._support.memory import available_memory
from engram.errors import CorruptStore, IncompatibleStore, ReadOnlyStore, StoreInUse, UncleanStore
from engram.format import files, layout, sizes
from engram.format import schema as schemas
from engram.store import adding, lifetime, memory, ragged
from engram.store.device.store import DeviceStore
from engram.store.indexes import INDEX_KINDS, Host, Indexes
from engram.store.rings import make_rings, private_rings, rings_in
from engram.store.store import Repair, Saved, Store

#: Kinds of indexes that hold more than rows say: a reader takes over what others note there.
_FOLLOWING = ("consumer", "draws", "groups")


class IndexCopies(Indexes):
    """Indexes in private memory. Each begins as a copy of the one in a folder, when it is first asked for.

    What others note there is known here, too, also of one that they make later.
    """

    #: Where the others are.
    source: Path

    def lasting(self, name: str, kind: str, nbytes: int, make: Callable[[memory.Block], None]) -> tuple[Any, bool]:
        known = self.get((name, kind))
        index, made = super().lasting(name, kind, nbytes, make)
        if kind in _FOLLOWING and (name, kind) not in self._copied and self._has_copy(name, kind):
            theirs = self._copied[name, kind] = self._theirs(name, kind)
            index.core.follow(theirs.address, theirs.nbytes, theirs.tensor, known is None)
        return index, made

    def _theirs(self, name: str, kind: str) -> memory.Block:
        path = self.source / name / kind
        return memory.read_block(path, path.stat().st_size)

    def _copy_of(self, name: str, kind: str) -> memory.Block | None:
        return INDEX_KINDS[kind].copied(self._theirs(name, kind).tensor) if self._has_copy(name, kind) else None

    def _has_copy(self, name: str, kind: str) -> bool:
        return (self.source / name / kind).exists()


class ReaderStore(Store):
    """Rows that others write, or have written. Every write raises the error ``ReadOnlyStore``.

    It joins no participants, recovers nothing and keeps no index of the folder.
    """

    readonly = True
    folder: Path

    def __init__(
        self, schema: schemas.Schema, folder: Path, control: memory.Block, tickets: memory.Block, *, abandoned: bool
    ) -> None:
        self.folder = folder
        self._segments = memory.segments_in(folder / layout.FOLDER)
        columns, rings = self._mapped(schema, control, private=False), rings_in(folder, schema, memory.read_block)
        super().__init__(schema, columns, control, tickets, abandoned=abandoned, rings=rings)
        self.indexes = IndexCopies(Host(self.core, control.tensor, tickets.tensor, None), schema.capacity)
        self.indexes.source = folder / layout.FOLDER / layout.INDEXES

    @property
    def in_use(self) -> bool:
        """Whether a process other than this one has the store open for writing."""
        return anyone_has_open(self.folder, self._control, self._tickets)

    @property
    def participant(self) -> int:
        """It is none of them: the number of the process stands for it."""
        return os.getpid() if self.in_use else 0

    def _mapped(self, schema: schemas.Schema, control: memory.Block, *, private: bool) -> list[torch.Tensor]:
        """The fields. ``private``: what is written to them is not seen elsewhere."""
        if self._segments is None:
            field = partial(memory.read_field, private=private)
            return memory.fields_in(
                self.folder, schema, field, lambda path, nbytes: memory.read_block(path, nbytes, private=private).tensor
            )
        inside = self.folder / layout.FOLDER
        return memory.segment_fields(inside, schema, self._segments, control, readonly=not private, private=private)

    def map_column(self, schema: schemas.Schema, number: int) -> torch.Tensor:
        path = layout.column_path(self.folder, schema, number)
        return memory.read_field(path, schema.fields[number], schema.capacity)

    @property
    def place(self) -> str:
        return f"{self.folder} (read-only)"

    @property
    def has_files(self) -> bool:
        return self._segments is None

    def views(self) -> list[torch.Tensor]:
        """As for every store, but what is written to them stays in them: the core reads other mappings of the same files."""
        with self._viewing:
            self._views = self._views or self._mapped(self.schema, self._control, private=True)
            return self._views

    def hold_nothing(self, rows: torch.Tensor) -> torch.Tensor:
        left = torch.tensor([self.core.left_behind(row) for row in rows.tolist()], dtype=torch.bool, device="cpu")
        return super().hold_nothing(rows) | left

    def check_writable(self) -> None:
        raise ReadOnlyStore(
            f"expected a store that may be written to, got the one in {str(self.folder)!r}, which was opened with readonly=True: its rows "
            "and all that belongs to them stay as they are. Open it without readonly=True."
        )

    def remove(self) -> bool:
        raise ReadOnlyStore(
            f"cleanup: the store in {str(self.folder)!r} was opened with readonly=True: its files stay. Open it without readonly=True."
        )

    def detached(self) -> Saved:
        return Saved(None, self.folder, None, {}, readonly=True)

    def after_fork(self) -> None:
        """In a child: the maps are its own, and it has nothing to recover."""


class RaggedReaderStore(ragged.RaggedStore, ReaderStore):
    """As :class:`ReaderStore`, of rows with ragged fields."""


def anyone_has_open(directory: Path, control: memory.Block, tickets: memory.Block) -> bool:
    """Whether a process other than this one has the store in a folder open for writing. This one must not."""
    with files.open_regular(directory / layout.FOLDER / layout.ALIVE, os.O_RDONLY) as fd:
        return native.Participants(control.address, control.nbytes, tickets.address, tickets.nbytes, int(fd)).others


#: Fields of a store whose files may be open. A process has 1,024 descriptors, most often.
_MOST_FILES = 64

#: Held while a store is created or opened, so that two threads do not attach to one folder twice.
_attaching = fork.rlock()


def create_store(
    schema: schemas.Schema,
    directory: Path,
    *,
    maker: str = "",
    guest_of: lifetime.Process | None = None,
    replace: bool = False,
    begin: Callable[[Any], None] = lambda _: None,
    adopted: Sequence[mappings.Piece | None] | None = None,
) -> Store:
    """A new store in a folder, its space reserved.

    Args:
        schema: what its rows are.
        directory: the folder.
        maker: a later call with the same one gets the store that the first has created, if it has that schema.
        guest_of: a temporary store: the last process that closes it removes the folder, unless this process may still attach.
        replace: remove an existing store of another maker, and files of those names.
        begin: called with the core of the new store, without its fields, before another process can see it.
        adopted: where the rows of each field are already: in files of the folder, or in memory without a name that this
            process has mapped; None for a field without bytes.

    Raises:
        RuntimeError: the folder holds a store, or files of that name, and not ``replace``.
        IncompatibleStore: the same ``maker`` has created one of another schema.
        StoreInUse: ``replace``, but a live process has the store open.
        OSError: no space, no permission, not a folder. Nothing is left behind.
        ValueError: a key that cannot be a file name; a field is ragged, and rows are ``adopted``.
    """
    if adopted is not None:
        memory.refuse_ragged(schema, "rows that exist already", "Write them to a new storage")
    raw = adding.encoded(schema)
    hidden = directory / f"{layout.FOLDER}-{os.getpid()}-{threading.get_ident()}"
    rows = layout.row_files(directory, schema, hidden.name).values()
    paths = {path: row_bytes * schema.capacity for path, row_bytes in rows}
    metas = layout.meta_files(directory, schema)
    note = None
    if adopted is not None:
        note, paths, metas = _adopting(adopted, paths, metas)
    with _attaching, files.Creation() as home, lifetime.exclusive(directory, home), files.Creation() as made:
        lifetime.remove_unfinished(directory)
        if maker and lifetime.maker_of(directory) == maker:
            store = _opened_or_attached(directory, "refuse")
            if store.schema != schema:
                raise IncompatibleStore(
                    f"{str(directory)!r}: expected rows as in the first write of another process, got others: "
                    f"{schemas.differences(store.schema, schema)}."
                )
            return store
        if replace:
            lifetime.remove_store(directory)
            for path in (*paths, *metas):
                path.unlink(missing_ok=True)
        existing = [path for path in (directory / layout.FOLDER, *paths, *metas) if path.exists()]
        if existing:
            raise RuntimeError(lifetime.occupied(directory, existing[0]))
        made.folder(hidden)
        if note is not None:  # first: if this process dies, the files that existed before stay
            made.text(hidden / layout.ADOPTED, note)
        made.text(hidden / layout.STORE, raw)  # first: if this process dies, it says which other files it has created
        _make_fields(made, paths, metas)
        make_rings(made, directory, schema, hidden.name, memory.file_block)
        _make_control(made, hidden, schema, maker, guest_of, begin)
        made.publish(hidden, directory / layout.FOLDER)  # from here on the folder is a store
        return _attach(schema, directory, schemas.first_fingerprints(schema, raw), unclean="refuse")


def open_store(directory: Path, *, unclean: str = "refuse") -> Store:
    """The store in a folder. Within a process every caller gets the same object.

    Raises:
        FileNotFoundError: there is no store.
        StoreInUse: another process is creating or closing it, or the limit of processes is reached.
        IncompatibleStore, CorruptStore, UncleanStore: it cannot be read as it is; nothing was changed.
    """
    directory = directory.absolute()
    lifetime.check_store(directory)
    with _attaching, lifetime.exclusive(directory):
        lifetime.check_store(directory)
        return _opened_or_attached(directory, unclean)


def open_readonly(directory: Path, *, unclean: str = "refuse") -> Store:
    """The store in a folder, for reading alone: nothing in the folder changes, and no right to write is needed.

    Every call returns another object. Raises: as :func:`open_store`, but for ``StoreInUse``.
    """
    directory = directory.absolute()
    lifetime.check_store(directory)
    folder = directory / layout.FOLDER
    with _attaching:  # no thread of this process takes the lock of `alive`, which closing that file drops
        schema, fingerprints, earlier = _described(directory)
        control, tickets = _read_control(folder, schema, earlier=earlier)
        with _naming(folder):
            in_use = lifetime.opened(directory) is not None or anyone_has_open(directory, control, tickets)
            kind = RaggedReaderStore if schema.ragged else ReaderStore
            store = kind(schema, directory, control, tickets, abandoned=not in_use)
        adding.adopt_what_follows(store)
    try:
        _check_description(store, folder, fingerprints)
        if store.has_files:
            _use_files(store, directory)
        if not in_use and _closed_in_order(store.core, directory, unclean):
            _check_closed(store.core, directory)
    except BaseException:
        store.close()
        raise
    return store


def holds_store(directory: Path, call: str) -> bool:
    """Whether a folder holds a store; False: it is free for one. Waits for a process that is creating one there.

    Raises:
        FileExistsError: it holds other files. StoreInUse: as :func:`open_store`.
    """
    if not directory.is_dir():
        return False
    with _attaching, lifetime.exclusive(directory):
        lifetime.remove_unfinished(directory)
        if layout.is_store(directory):
            return True
        other = next(directory.iterdir(), None)
    if other is not None:
        why = f"{call}: expected a folder with a store, an empty one or a free name, found {other.name!r} and no store. Choose another"
        raise FileExistsError(errno.EEXIST, why, str(directory))
    return False


def origin_of(store: Store) -> str:
    """A name that no other store has. Every process that has a directory open knows the same one; of private memory, no other process."""
    if not store.origin:
        with contextlib.suppress(OSError):
            if store.directory is not None:
                status = (store.directory / layout.FOLDER / layout.CONTROL).stat()
                store.origin = f"{status.st_dev:x}-{status.st_ino:x}"
        store.origin = store.origin or secrets.token_hex(8)
    return store.origin


def moved(store: Store, directory: Path, maker: str, guest_of: lifetime.Process | None) -> Store:
    """A store in a folder with the rows, cursors and indexes of a private one, which must not be written to meanwhile.

    Raises:
        OSError: no space. Nothing is left behind.
    """
    shared = create_store(store.schema, directory, maker=maker, guest_of=guest_of)
    try:
        for to, tensor in zip(shared.tensors, store.tensors, strict=True):
            to.copy_(tensor)
        shared.rings.copy_from(store.rings.parts)
        shared.core.copy_state(store.core)
        store.indexes.copy_to(shared.indexes)
        shared.origin = origin_of(store)
    except BaseException:
        shared.remove()
        raise
    return shared


def reattach(saved: Saved) -> Store:
    """The store of a copied object: the same one for a directory, an independent one for private memory."""
    if saved.parts is None:
        assert saved.directory is not None  # one of the two is there
        return open_readonly(saved.directory, unclean="accept") if saved.readonly else open_store(saved.directory)
    schema = saved.schema
    assert schema is not None  # as detached() makes them
    control, tickets, *columns = [part.tensor for part in saved.parts]
    store: Store
    if all(column.is_cpu for column in columns):
        fields = [memory.private_field(field, schema.capacity) for field in schema.fields]
        for field, column in zip(fields, columns, strict=True):
            field.copy_(column)
        rings = private_rings(schema).copy_from([part.tensor for part in saved.rings])
        store = ragged.store_class(schema)(schema, fields, *memory.new_control_memory(schema), rings=rings)
    else:
        store = DeviceStore.on(schema, columns[0].device, columns)
    store.take_over(control, tickets)
    store.indexes.keep_copies({key: copied.tensor for key, copied in saved.indexes.items()})
    return store


def skip_numbers(core: native.Store, given: int) -> None:
    """Let a new store begin behind that many ticket numbers, so that no earlier draw matches: each emptying takes one."""
    for _ in range(given):
        core.empty(False)


# ---- creating the files ----------------------------------------------------------------------------------------------


def _adopting(
    adopted: Sequence[mappings.Piece | None], paths: Mapping[Path, int], metas: Mapping[Path, bytes]
) -> tuple[bytes, dict[Path, int], dict[Path, bytes]]:
    """What a store notes of rows that existed before it, and the files of fields and descriptions that must be created.

    Raises:
        CorruptStore: a file of another size. OSError: no space, no permission.
    """
    if any(piece is not None and not piece.named for piece in adopted):
        segments = [None if piece is None else piece[2:] for piece in adopted]
        return json.dumps({"segments": segments}).encode(), {}, {}
    for path, nbytes in paths.items():
        if nbytes:
            files.take_space(path, nbytes)
    return layout.IN_FILES, {}, {path: text for path, text in metas.items() if not path.exists()}


def _make_fields(made: files.Creation, paths: Mapping[Path, int], metas: Mapping[Path, bytes]) -> None:
    for path, nbytes in paths.items():
        if nbytes:
            made.folder(path.parent)
            made.file(path, nbytes)
    for path, text in metas.items():
        made.folder(path.parent)
        made.text(path, text)


def _make_control(
    made: files.Creation,
    folder: Path,
    schema: schemas.Schema,
    maker: str,
    guest_of: lifetime.Process | None,
    begin: Callable[[Any], None],
) -> None:
    """Control memory and notes of a new store; the description of its rows exists already."""
    made.file(folder / layout.CONTROL, native.control_bytes(schema.lanes))
    made.file(folder / layout.TICKETS, layout.tickets_bytes(schema.capacity))
    made.text(folder / layout.ALIVE, b"")
    made.text(folder / layout.MAKER, maker.encode())
    if guest_of is not None:
        made.text(folder / layout.TEMPORARY, lifetime.temporary_note(guest_of))
    made.text(folder / layout.BUFFER, layout.NO_RECORD)
    control, tickets = _mapped_control(folder, schema)
    fingerprint, _ = schemas.first_fingerprints(schema, schemas.encode_store(schema))
    native.format_control(control.address, control.nbytes, schema.capacity, schema.lanes, fingerprint)
    begin(native.Store(control.address, control.nbytes, tickets.address, tickets.nbytes, (), (), ()))


# ---- attaching -------------------------------------------------------------------------------------------------------


def _opened_or_attached(directory: Path, unclean: str) -> Store:
    known: Store | None = lifetime.opened(directory)
    if known is not None:
        return known
    schema, fingerprints, earlier = _described(directory)
    with _upgraded(directory, schema, fingerprints) if earlier else contextlib.nullcontext():
        return _attach(schema, directory, fingerprints, unclean=unclean)


def _described(directory: Path) -> tuple[schemas.Schema, tuple[int, ...], bool]:
    """What the rows of the store in a folder are, the fingerprints that it may have, and whether it is of an earlier version."""
    path = directory / layout.FOLDER / layout.STORE
    raw = files.read_small(path, schemas.MAX_BYTES)
    schema = schemas.decode_store(raw, str(path))
    return schema, schemas.first_fingerprints(schema, raw), schemas.is_earlier(raw)


def _mapped_control(folder: Path, schema: schemas.Schema) -> tuple[memory.Block, memory.Block]:
    """Control block and tickets."""
    control = memory.file_block(folder / layout.CONTROL, native.control_bytes(schema.lanes))
    return control, memory.file_block(folder / layout.TICKETS, layout.tickets_bytes(schema.capacity))


def _read_control(folder: Path, schema: schemas.Schema, *, earlier: bool) -> tuple[memory.Block, memory.Block]:
    """Control block and tickets, for reading alone. An upgrade that was interrupted has left the tickets of an earlier store longer."""
    control = memory.read_block(folder / layout.CONTROL, native.control_bytes(schema.lanes))
    path, nbytes = folder / layout.TICKETS, layout.tickets_bytes(schema.capacity)
    if earlier and not (path.is_file() and path.stat().st_size == nbytes):
        nbytes = layout.tickets_bytes(schema.capacity, earlier=True)
    return control, memory.read_block(path, nbytes)


@contextlib.contextmanager
def _upgraded(directory: Path, schema: schemas.Schema, fingerprints: Sequence[int]) -> Iterator[None]:
    """Give the rows of a store of an earlier version room for the numbers of their writes, unless it cannot be opened. The folder is
    locked.

    Raises:
        StoreInUse: a process of that version has it open. CorruptStore: it is not of its description. OSError: no space.
    """
    folder = directory / layout.FOLDER
    control, tickets = _read_control(folder, schema, earlier=True)
    with _naming(folder):
        in_use = anyone_has_open(directory, control, tickets)
        header = files.parse_control(bytes(control.tensor[: files.FIXED_BYTES].numpy()))
    if header.schema_sum not in fingerprints:
        raise adding.changed_description(folder)
    if in_use:
        raise StoreInUse(
            f"open: a process of an earlier engram has the store in {str(directory)!r} open, and this one would change its format. "
            "Close it there first."
        )
    description = files.read_small(folder / layout.STORE, schemas.MAX_BYTES)
    files.extend(folder / layout.TICKETS, layout.tickets_bytes(schema.capacity))
    files.write_atomically(folder / layout.STORE, schemas.encode_store(schema))
    try:
        yield
    except BaseException:
        files.write_atomically(folder / layout.STORE, description)
        os.truncate(folder / layout.TICKETS, layout.tickets_bytes(schema.capacity, earlier=True))
        raise


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Raises ``IncompatibleStore`` or ``CorruptStore`` for what the core says of control memory."""
    try:
        yield
    except ValueError as error:
        foreign = any(word in str(error) for word in ("format", "platform", "byte order"))
        kind = IncompatibleStore if foreign else CorruptStore
        raise kind(f"{folder}: {error}.") from error


def _check_description(store: Store, folder: Path, fingerprints: Sequence[int]) -> None:
    """Raise ``CorruptStore`` unless control memory belongs to the description."""
    core, schema = store.core, store.schema
    if (core.capacity, core.lanes) != (schema.capacity, schema.lanes) or core.schema_sum not in fingerprints:
        raise adding.changed_description(folder)


def _attach(schema: schemas.Schema, directory: Path, fingerprints: Sequence[int], *, unclean: str) -> Store:
    """The store in a folder whose description was read. The folder is locked."""
    folder = directory / layout.FOLDER
    alive, store = lifetime.AliveFile(directory), None
    adding.put_in_order(directory, schema)
    try:
        control, tickets = _mapped_control(folder, schema)
        segments = memory.segments_in(folder)
        if segments is None:
            tensors = memory.fields_in(
                directory, schema, memory.column_field, lambda path, nbytes: memory.file_block(path, nbytes).tensor
            )
        else:
            tensors = memory.segment_fields(folder, schema, segments, control)
        attachment = lifetime.Attachment(directory, alive, control, tickets, has_files=segments is None)
        with _naming(folder):
            rings = rings_in(directory, schema, memory.file_block)
            store = ragged.store_class(schema)(schema, tensors, control, tickets, attachment, rings=rings)
            adding.adopt_what_follows(store)
            attachment.begin(store, store.core)  # from here on closing it releases all that was taken
        _check_description(store, folder, fingerprints)
        if segments is None:
            _use_files(store, directory)
        if attachment.others():
            store.join(beside=True)
            store.indexes.attach_new()
            store.indexes.finish_scans()  # the maker of an index may have died before its scan
        else:
            _attach_first(store, directory, unclean)
        store.core.knows_fields(store.core.fields_epoch)
        lifetime.register(directory, store)
    except BaseException:
        if store is not None:
            store.close()
        alive.fd.close()
        raise
    return store


def _use_files(store: Store, directory: Path) -> None:
    """Let the core read and write the files of rows that are not in memory. Warns if not even what draws need fits there.

    Spans and items of ragged fields are mapped only: every draw needs the spans, and the core finds items by them.
    """
    fields, capacity, available = store.schema.fields, store.capacity, available_memory()
    stored = {
        f: (size, str(path))
        for f, (path, size) in layout.row_files(directory, store.schema).items()
        if size and f not in store.items
    }
    longest = dict(sorted(stored.items(), key=lambda file: file[1])[-_MOST_FILES:])
    paths = [longest[f][1] if f in longest else "" for f in range(len(fields))]
    store.larger = 0 < available < 2 * store.nbytes
    store.core.use_files(paths, store.larger)
    needed = sizes.resident_bytes(directory, capacity)
    if store.larger and available < needed:
        words.warn(
            f"{str(directory)!r}: tickets and priorities of {capacity:,} rows need {words.format_size(needed)} of memory, this process can "
            f"have {words.format_size(available)}: each draw waits for the disk. Give it more, or choose a smaller store."
        )


def _attach_first(store: Store, directory: Path, unclean: str) -> None:
    """For the only process that has the store open: recovers what other processes left."""
    core = store.core
    clean = _closed_in_order(core, directory, unclean)
    if clean:
        _check_closed(core, directory)
    core.reset_locks(clean)
    store.rings.connect(core, store.schema, alone=True)
    store.indexes.attach_all(alone=True)
    if not clean:
        store.repair = Repair(*core.recover())
        for index in store.indexes.values():
            index.put_in_order()
    store.indexes.finish_scans()
    core.boot_id = _boot_id()
    core.pid_namespace = native.pid_namespace()
    core.clean = False  # before others see this process: if it dies now, they may take it for alive, and write
    store.join(beside=False)


def _closed_in_order(core: native.Store, directory: Path, unclean: str) -> bool:
    """Whether the last process closed a store that no process has open. Raises ``UncleanStore``."""
    try:
        last = str(core.boot_id)
    except UnicodeDecodeError:
        last = "unreadable"
    clean = last == "" or (core.clean and core.in_flight == 0)  # "": it was just created
    if not clean and not core.clean and last != _boot_id() and unclean != "accept":
        raise UncleanStore(
            f"open: the store in {str(directory)!r} was open when its machine went down, and nothing is promised "
            'of its rows. Use ReplayBuffer.open(dir, unclean="accept") to take it as it is.'
        )
    return clean


def _check_closed(core: native.Store, directory: Path) -> None:
    """Check the control memory of a store that was closed in order. Cost: O(lanes)."""
    with words.raise_as(CorruptStore, directory / layout.FOLDER / layout.CONTROL, CorruptStore):
        core.check_closed()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
