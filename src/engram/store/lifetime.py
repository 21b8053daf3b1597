"""How long a store in a folder lives: the locks on the folder, this process's attachment to it, temporary folders, and the removal of
files. One lock is held to create, open or close it; one byte of ``alive`` per process that has it open is another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engram._support import fork, native
from engram.errors import CorruptStore, IncompatibleStore, StoreInUse, WriterStalled
from engram.format import files, layout
from engram.format import schema as schemas
from engram.store.memory import Block

#: Timeout for another process that is creating, opening or closing the store; an index scan may take that long.
WAIT_S = 60.0


def exclusive(
    directory: Path, made: files.Creation | None = None, wait_s: float | None = None
) -> contextlib.AbstractContextManager[None]:
    """A context manager: no other process or thread creates, opens or closes the store in the folder meanwhile.

    Re-entrant within a thread, because the collector may close a store at any point.

    Args:
        directory: the folder.
        made: creates it, if it does not exist.
        wait_s: how long to wait; default :data:`WAIT_S`; 0.0: not at all.

    Raises (when entered):
        StoreInUse: another process or thread holds it. OSError: there is no such folder.
    """
    wait_s = WAIT_S if wait_s is None else wait_s
    if made is not None:
        made.folder(directory)

    def busy() -> StoreInUse:
        return StoreInUse(
            f"{str(directory)!r}: another process or thread has been creating, opening or closing the store for {wait_s:g} s."
        )

    return native.folder_lock(directory, wait_s, busy)


class AliveFile:
    """``.engram/alive``, in which the core locks one byte for as long as this process has the store open.

    A process opens it once, because closing any descriptor of the file drops that lock.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / layout.FOLDER / layout.ALIVE
        files.check_size(path, 0)
        self.fd = files.open_regular(path, os.O_RDWR)
        self.pid = os.getpid()

    def locked_by_others(self) -> bool:
        """Whether another process has the store open. Only for a process that has not."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return True
        return False


def others_have_open(directory: Path) -> bool:
    """Whether another process has a store open that this process has not."""
    try:
        alive = AliveFile(directory)
    except (FileNotFoundError, CorruptStore):
        return False
    try:
        return alive.locked_by_others()
    finally:
        alive.fd.close()


def others_attached(participants: native.Participants, directory: Path) -> bool:
    """Whether another process has the store open. Waits for processes that are just being forked."""
    with files.Descriptor.open(directory / layout.FOLDER, os.O_RDONLY | os.O_DIRECTORY) as fd:
        deadline = time.monotonic() + WAIT_S
        while not participants.others:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return True
                time.sleep(0.001)
            else:
                return bool(participants.others)  # a child that was being forked at the first look has joined by now
    return True


class Hold:
    """A lock on a file, which is made if it is not there, for as long as the object is referred to.

    Raises ``StoreInUse``: another process, or another object here, has it. ``what``: what the message begins with; it is about ``path``.
    """

    def __init__(self, file: Path, what: str, path: Path) -> None:
        self.fd = files.Descriptor.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(
                f"{what}: {str(path)!r} is in use, by another process or here. Wait until that ends, or name another directory."
            ) from None


_held: weakref.WeakValueDictionary[Path, Hold] = weakref.WeakValueDictionary()


def hold(file: Path, what: str, path: Path) -> Hold:
    """The :class:`Hold` of a file, one for all who ask in this process. Raises as that."""
    with _registry_lock:
        held = _held.get(file.resolve()) or Hold(file, what, path)
        _held[file.resolve()] = held
        return held


class Process(NamedTuple):
    """A process, identified by PID and start time because PIDs are reused."""

    pid: int
    start_time: int

    @classmethod
    def this(cls) -> Process:
        pid = os.getpid()
        return cls(pid, native.start_time_of(pid))

    def runs(self) -> bool:
        return self.start_time != 0 and native.start_time_of(self.pid) == self.start_time


# ---- stores that this process has open -------------------------------------------------------------------------------

_registry: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
_registry_lock = fork.lock()


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(directory / layout.FOLDER)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def opened(directory: Path) -> Any:
    """The store that this process already has open there, or None: closing a second descriptor would drop its lock."""
    identity = _identity(directory)
    with _registry_lock:
        return _registry.get(identity) if identity is not None else None


def register(directory: Path, store: object) -> None:
    """From now on :func:`opened` finds this store."""
    identity = _identity(directory)
    assert identity is not None  # just attached
    with _registry_lock:
        _registry[identity] = store


def forget(store: object) -> None:
    """Undo :func:`register`."""
    with _registry_lock:
        for identity, known in list(_registry.items()):
            if known is store:
                del _registry[identity]


# ---- this process's attachment ---------------------------------------------------------------------------------------


class Attachment:
    """This process's place among those that have a store open: a locked byte, an entry in the table, a finalizer."""

    def __init__(self, directory: Path, alive: AliveFile, control: Block, tickets: Block, *, has_files: bool) -> None:
        self.directory = directory
        #: Whether the rows lie in the folder, and not in memory that a program shared before.
        self.has_files = has_files
        self._alive = alive
        self._control, self._tickets = control, tickets  # mapped until the participant has left
        self._participants: native.Participants
        #: Which one this process is of those that have the store open, from 1 on; 0: it was the only one when it opened it.
        self.participant = 0
        self._finalizer: weakref.finalize[..., Any] | None = None

    def begin(self, owner: object, core: native.Store) -> None:
        """From here on :meth:`end`, or the collection of the owner, releases all that was taken.

        Raises:
            ValueError: control memory that is none.
        """
        participants = native.Participants(
            self._control.address, self._control.nbytes, self._tickets.address, self._tickets.nbytes, self._alive.fd
        )
        self._participants = participants
        self._finalizer = weakref.finalize(owner, self._leave, core, participants)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`end` has not run to its end."""
        return self._finalizer is not None and self._finalizer.peek() is not None

    def others(self) -> bool:
        """Whether another process has the store open."""
        return others_attached(self._participants, self.directory)

    def join(self, core: native.Store, attach_new: Callable[[], None], *, beside: bool = True) -> None:
        """Take an entry in the table, ``beside`` those of others. From now on writes attach indexes that other processes make.

        Raises:
            StoreInUse: the table is full.
        """
        try:
            core.join(self._participants)
        except WriterStalled as error:
            raise StoreInUse(f"open: {str(self.directory)!r}: {error} Close it in one of them.") from error
        self.participant = self._participants.number + 1 if beside else 0
        known = weakref.WeakMethod(attach_new)  # the store owns both: a reference would keep it
        core.on_new_index(lambda: (attach := known()) and attach())

    def rejoin(self, owner: object, core: native.Store, attach_new: Callable[[], None]) -> None:
        """In a forked child: join beside the parent. The child has its descriptors and maps, but not its locks."""
        self._detach()
        check_store(self.directory)
        self.begin(owner, core)
        try:
            core.forget_holds()
            self.join(core, attach_new)
        except BaseException:
            self._detach()
            raise
        self._alive.pid = os.getpid()

    def _detach(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()

    def end(self, owner: object) -> None:
        """Leave. If an interrupt stops this, the next call or the collection of the owner continues."""
        finalizer = self._finalizer
        found = None if finalizer is None else finalizer.peek()
        if finalizer is None or found is None:
            return
        _, leave, arguments, _ = found
        leave(*arguments)
        forget(owner)
        finalizer.detach()

    def _leave(self, core: native.Store, participants: native.Participants) -> None:
        if self._alive.pid != os.getpid():
            return  # a forked child that could not join
        try:
            with exclusive(self.directory):
                last = participants.joined and not others_attached(participants, self.directory)
                if last:
                    core.reclaim()
                    core.clean = core.in_flight == 0  # if a thread is still writing, the next open checks the rows
                if participants.joined:
                    participants.leave()
                    _leave_temporary(self.directory, last=last)
        except (FileNotFoundError, StoreInUse):
            pass  # the folder was removed; or the next process finds that this one has left
        finally:
            participants.leave()
            self._alive.fd.close()  # last: another file may get the descriptor's number at once


# ---- temporary stores ------------------------------------------------------------------------------------------------

#: In place of the process that a temporary store was made for, once that process no longer needs it; as long as any.
_NO_PROCESS = b"0 0".ljust(48)


def temporary_note(guest_of: Process) -> bytes:
    """What the folder of a temporary store notes: the process that it is made for."""
    return f"{guest_of.pid} {guest_of.start_time}".encode().ljust(len(_NO_PROCESS))


def _host_of(directory: Path) -> Process | None:
    """The process that a temporary store was made for; None: it is not temporary."""
    try:
        pid, start_time = (directory / layout.FOLDER / layout.TEMPORARY).read_text().split()
        return Process(int(pid), int(start_time))
    except (OSError, ValueError):
        return None


def _leave_temporary(directory: Path, *, last: bool) -> None:
    """This process no longer needs a store. Removes a temporary one, unless others have it open (not ``last``), or the
    process that it was made for may still attach.
    """
    host = _host_of(directory)
    if host is None:
        return
    ours = host == Process.this()
    if last and (ours or not host.runs()):
        erase(directory, schema_in(directory))
        with contextlib.suppress(OSError):
            directory.rmdir()
    elif ours:
        files.overwrite(directory / layout.FOLDER / layout.TEMPORARY, _NO_PROCESS)


def shared_memory() -> Path:
    """Where files lie in RAM, for all processes of this machine; else the folder for temporary files."""
    place = Path("/dev/shm")  # noqa: S108 - Linux has it there
    return place if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else Path(tempfile.gettempdir()).absolute()


def sweep_shared_memory() -> None:
    """Remove shared stores of this user all of whose processes died."""
    for directory in shared_memory().glob("engram-*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid == os.getuid():  # one that a live process has locked is none of them
                forget_temporary(directory, maker_of(directory), wait_s=0.0)


def forget_temporary(directory: Path, maker: str, *, wait_s: float | None = None) -> None:
    """For the process that a temporary store was made for and that no longer needs it."""
    with contextlib.suppress(OSError, StoreInUse, CorruptStore, IncompatibleStore):
        if maker_of(directory) != maker or opened(directory) is not None:
            return  # a process that has it open removes it
        with exclusive(directory, wait_s=wait_s):
            if not (directory / layout.FOLDER).exists():  # the process that was creating it died
                remove_unfinished(directory)
                if time.time() - directory.stat().st_mtime > WAIT_S:  # else a process may be about to lock it
                    directory.rmdir()
                return
            _leave_temporary(directory, last=not others_have_open(directory))


# ---- files -----------------------------------------------------------------------------------------------------------


def check_store(directory: Path) -> None:
    """Raises ``FileNotFoundError`` unless there is a store."""
    if not (directory / layout.FOLDER).exists():
        remedy = "ReplayBuffer.open_or_create(directory, size) makes one where there is none."
        if layout.is_series(directory):
            remedy = (
                "It holds checkpoints, of which Checkpointer(directory, buffer).restore() loads the newest into a buffer, and engram "
                "inspect says what they hold."
            )
        elif (directory / layout.MANIFEST).is_file():
            remedy = "It holds a dump or one checkpoint: rb.loads(directory) loads it into a buffer."
        raise FileNotFoundError(
            f"open: expected a store in {str(directory)!r} (a folder with {layout.FOLDER}/{layout.STORE}), found none. {remedy}"
        )


def schema_in(directory: Path, folder: str = layout.FOLDER) -> schemas.Schema:
    """What the rows of the store in a folder are. ``folder``: the one in it that has the description."""
    path = directory / folder / layout.STORE
    return schemas.decode_store(files.read_small(path, schemas.MAX_BYTES), str(path))


def maker_of(directory: Path) -> str:
    """The ``maker`` of the store in a folder; empty if there is none."""
    try:
        return (directory / layout.FOLDER / layout.MAKER).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def erase(directory: Path, schema: schemas.Schema) -> None:
    """Remove the files of a store, and folders in it that are empty then. Other files are not engram's and stay."""
    hidden = directory / f"{layout.FOLDER}-{os.getpid()}-{threading.get_ident()}"
    with contextlib.suppress(OSError):  # if this process dies, it says which other files belong to the store
        (directory / layout.FOLDER).rename(hidden)
    if _erase_fields(directory, schema, hidden):  # else the next process to find it tries again
        shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(directory / layout.FOLDER, ignore_errors=True)


def _erase_fields(directory: Path, schema: schemas.Schema, hidden: Path) -> bool:
    """Remove the files of a store that was in ``hidden``, except those that existed before it. Whether all are gone."""
    adopted = hidden / layout.ADOPTED
    if adopted.exists() and adopted.read_bytes() == layout.IN_FILES:
        return True
    if adopted.exists():  # other rows lie in memory without a name
        paths = [layout.field_path(directory, field.key) for field in schema.fields[schema.first_fields :]]
    else:
        paths = [path for path, _ in layout.row_files(directory, schema, hidden.name).values()]
        paths += layout.meta_files(directory, schema)
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
    for folder in sorted({path.parent for path in paths} - {directory}, key=lambda folder: -len(folder.parts)):
        with contextlib.suppress(OSError):
            folder.rmdir()
    return not any(path.exists() for path in paths)


def remove_unfinished(directory: Path) -> None:
    """Remove what processes that died had made of a store. The folder is locked, so no process is still creating one."""
    for hidden in directory.glob(f"{layout.FOLDER}-*"):
        gone = True
        with contextlib.suppress(CorruptStore, IncompatibleStore):  # then its description was not complete yet
            gone = _erase_fields(directory, schema_in(directory, hidden.name), hidden)
        if gone:
            shutil.rmtree(hidden, ignore_errors=True)


def remove_store(directory: Path) -> None:
    """Remove a store that no process has open. Raises ``StoreInUse``."""
    if not (directory / layout.FOLDER).exists():
        return
    here = opened(directory) is not None
    if here or others_have_open(directory):
        which, where = ("this", "") if here else ("another", " there")
        raise StoreInUse(
            f"expected a store that no process has open, but {which} process has {str(directory)!r}. Close it{where} first."
        )
    try:
        schema = schema_in(directory)
    except (CorruptStore, IncompatibleStore):
        shutil.rmtree(directory / layout.FOLDER)  # its fields are unknown: files of other names stay
    else:
        erase(directory, schema)


def occupied(directory: Path, existing: Path) -> str:
    """Why no store can be created in a folder: what it holds already."""
    if existing.name == layout.FOLDER:
        return (
            f"LazyMemmapStorage: scratch_dir={str(directory)!r} already holds a store. Use ReplayBuffer.open({str(directory)!r}) "
            f"to go on with it. ReplayBuffer.open_or_create({str(directory)!r}, size) does so in a script that is started again, and "
            "FinalObservations.open_or_create(keys, folder, size) for final observations. (existsok=True erases it, with all its rows.)"
        )
    return (
        f"LazyMemmapStorage: scratch_dir={str(directory)!r}: expected a folder without data of the same name, found "
        f"{str(existing)!r}. Choose another folder. (existsok=True erases what is found.)"
    )
