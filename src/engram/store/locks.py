"""Locks on a store's folder: one held to create, open or close it, and one byte of ``alive`` per process that has it open."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING

from engram._support import native
from engram.errors import CorruptStore, StoreInUse
from engram.format import files, layout

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

#: Timeout for another process that is creating, opening or closing the store; an index scan may take that long.
WAIT_S = 60.0


def exclusive(
    directory: Path, made: files.Creation | None = None, wait_s: float | None = None
) -> AbstractContextManager[None]:
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

    lock: AbstractContextManager[None] = native.folder_lock(directory, wait_s, busy)
    return lock


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

    def release(self) -> None:
        self.fd.close()


def others_have_open(directory: Path) -> bool:
    """Whether another process has a store open that this process has not."""
    try:
        alive = AliveFile(directory)
    except (FileNotFoundError, CorruptStore):
        return False
    try:
        return alive.locked_by_others()
    finally:
        alive.release()


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
