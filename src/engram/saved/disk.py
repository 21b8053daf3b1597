"""Every system call that saves, commits and removes a checkpoint, in one place; and threads that wait for the disk.

Tests count the calls, let the n-th one fail, and end the process before or after it: so nothing else in ``saved/`` may change a
folder. A file is made under a name that did not exist, never changed after ``finish``, and is on disk when that returns; its
name is when ``sync_folder`` returns.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import secrets
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType

from engram.format import files

StrPath = str | os.PathLike[str]

_AT_FDCWD = -2 if sys.platform == "darwin" else -100
#: Waits for bytes or names to be on disk. What the first one leaves out is when a file or a folder was changed.
_SYNC = "fdatasync" if hasattr(os, "fdatasync") else "fsync"
_START, _THROUGH = 2, 7  # SYNC_FILE_RANGE_WRITE; and to wait before and after
_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_ONCE = 4 if sys.platform == "darwin" else 1  # RENAME_EXCL of macOS and RENAME_NOREPLACE of Linux
#: Bytes that are announced together: of more the kernel may take the beginning only.
_ANNOUNCED = 128 << 10
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS
_statx = getattr(_libc, "statx", None)
_FORCE_SYNC, _EMPTY_PATH, _ALL_STATS, _STATX_BYTES = 0x2000, 0x1000, 0xFFF, 256
#: What a file system says that cannot do a thing at all.
_CANNOT = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.EBADF, errno.EPERM, errno.EACCES})
_NO_LINK = frozenset({errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
#: What it says of a file that is not there, or that another machine has removed.
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
#: What it says of two names that it cannot exchange.
NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


# ---- writing ---------------------------------------------------------------------------------------------------------


def make_folder(path: StrPath) -> None:
    """Make a folder for this user alone, whatever the umask. Raises ``FileExistsError``."""
    os.mkdir(path, 0o700)


def make_folders(path: str) -> None:
    """Make a folder and those above it that are missing, as :func:`make_folder` does. One that is there stays as it is."""
    try:
        make_folder(path)
    except FileExistsError:
        pass
    except FileNotFoundError:
        above = os.path.dirname(path)
        if above in ("", path):
            raise
        make_folders(above)
        make_folders(path)


def create(path: StrPath, nbytes: int, *, sparse: bool = False) -> files.Descriptor:
    """A descriptor of a new file of ``nbytes`` zeros, open for reading and writing.

    Args:
        path: where; nothing may be there.
        nbytes: how long the file is.
        sparse: no space is reserved for what is never written.

    Raises:
        OSError: the file exists, no space, no permission. Nothing is left behind.
    """
    fd = files.Descriptor.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        if nbytes and (sparse or not files.fallocate(fd, nbytes)):
            os.ftruncate(fd, nbytes)
    except BaseException:
        fd.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return fd


def write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at ``offset``, in as many calls as it takes."""
    view, done = memoryview(data), 0
    while done < len(view):
        count = os.pwrite(fd, view[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file system took no bytes and gave no reason")
        done += count


def copy(source: int, source_offset: int, target: int, target_offset: int, nbytes: int) -> bool:
    """Let the file system copy bytes between files, sharing their space where it can.

    Returns:
        False: it cannot, and nothing is promised of the target's bytes. Copy them yourself.

    Raises:
        EOFError: the source ends before.
    """
    if not hasattr(os, "copy_file_range"):
        return False
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(source, target, nbytes - done, source_offset + done, target_offset + done)
        except OSError as error:
            if error.errno in _CANNOT:
                return False
            raise
        if count == 0:
            raise EOFError(f"expected {nbytes} bytes at byte {source_offset}, the file ends after {done}")
        done += count
    return True


def start(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing these bytes to disk, so that a later fsync waits less. Does nothing where that is missing."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, _START)  # an error is the file's, and comes again when it is waited for


def forget(fd: int, offset: int, nbytes: int) -> None:
    """Wait until these bytes are on disk, and let the kernel's memory go to others. Raises ``OSError``: they are not on disk."""
    if _sync_file_range is None or not nbytes:
        return
    if _sync_file_range(fd, offset, nbytes, _THROUGH) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT:
            return
        raise OSError(code, os.strerror(code))
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def announce(fd: int, offset: int, nbytes: int) -> None:
    """Let the kernel begin to read bytes, and from now on nothing behind those that are asked for."""
    if _sync_file_range is not None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for at in range(offset, offset + nbytes, _ANNOUNCED):
            os.posix_fadvise(fd, at, min(_ANNOUNCED, offset + nbytes - at), os.POSIX_FADV_WILLNEED)


def drop(fd: int, offset: int, nbytes: int) -> None:
    """Let the kernel forget bytes that were read."""
    if _sync_file_range is not None:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


class _Batch(list[files.Descriptor]):
    """Files and folders whose ``fsync`` comes at the end of a :func:`batched_fsync`."""


class _Waiting(threading.local):
    """A reference to the batch of this thread, which lives as long as its :func:`batched_fsync`."""

    batch: Callable[[], _Batch | None] = NoneType  # there is none


_waiting = _Waiting()

#: Threads that wait for the disk at the same time, this one included: it writes what they wait for in one go. Few, as each takes
#: its time to start.
THREADS = 4
#: The name of a thread of :func:`run_in_background`.
BACKGROUND = "engram-background"
#: Descriptors that wait, at most.
_MOST_WAITING = 128


@contextlib.contextmanager
def batched_fsync() -> Iterator[None]:
    """Inside, :func:`finish` and :func:`sync_folder` do not wait. Leaving the block waits for all files and folders at once.

    For files that no other process looks for yet, written by the calling thread. Publish them afterwards.

    Raises (when leaving):
        OSError: something may not be on disk.
    """
    if _waiting.batch() is not None:  # the outer one waits
        yield
        return
    batch = _Batch()
    try:
        _waiting.batch = weakref.ref(batch)
        yield
        _wait(batch)
    finally:
        _waiting.batch = NoneType
        for fd in batch:
            fd.close()


def _wait(fds: _Batch) -> None:
    sync = getattr(os, _SYNC)
    work_off([[functools.partial(sync, fd)] for fd in fds], THREADS)
    while fds:
        fds.pop()  # closes it


def _wait_for(fd: files.Descriptor, *, now: bool = False) -> None:
    """Wait until this file or folder is on disk, and close it; inside of a :func:`batched_fsync`, at its end."""
    batch = None if now else _waiting.batch()
    if batch is None:
        getattr(os, _SYNC)(fd)
        fd.close()
    else:
        batch.append(fd)
        if len(batch) >= _MOST_WAITING:
            _wait(batch)


def finish(fd: files.Descriptor, *, now: bool = False) -> None:
    """Make a file read-only, wait until its bytes are on disk, and close it.

    Args:
        fd: belongs to this function from now on; after an error the caller closes it.
        now: do not leave the wait to a :func:`batched_fsync`.

    Raises:
        OSError: they may not be. Final: give up the file, a second call proves nothing.
    """
    os.fchmod(fd, 0o400)
    _wait_for(fd, now=now)


def sync_folder(path: StrPath) -> None:
    """Wait until the names in a folder are on disk."""
    fd = open_folder(path)
    try:
        _wait_for(fd)
    except BaseException:
        fd.close()
        raise


def put(path: StrPath, raw: bytes | memoryview, *, now: bool = False) -> None:
    """Make a small file that is complete when this returns. Its name is not on disk yet.

    Args:
        path: where; nothing may be there.
        raw: what it holds.
        now: do not leave the wait to a :func:`batched_fsync`.

    Raises:
        FileExistsError: something is there. OSError: no space, or an I/O error. Nothing is left behind.
    """
    fd = create(path, 0)
    try:
        write(fd, raw, 0)
        finish(fd, now=now)
    except BaseException:
        fd.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def publish(path: StrPath, raw: bytes) -> bool:
    """Make a small file that appears complete or not at all, and once: of several processes one succeeds.

    Returns:
        False: the name was taken. Read what the other one wrote.

    Raises:
        OSError: no space, or an I/O error; or a file system without hard links that cannot rename without replacing, either.
    """
    try:
        with _temporary(path) as temporary:
            put(temporary, raw, now=True)
            return _name_again(temporary, os.fspath(path))
    finally:
        sync_folder(os.path.dirname(path) or ".")


@contextlib.contextmanager
def _temporary(path: StrPath) -> Iterator[str]:
    """A free name beside a path, whose file is gone in the end."""
    name = f"{os.fspath(path)}.{secrets.token_hex(4)}.tmp"
    try:
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _rename_once(old: str, new: str) -> bool:
    """Rename a file; False: the name was taken. Raises ``OSError``: this file system cannot tell."""
    try:
        _rename(old, new, _ONCE)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_EXCHANGE:
            raise
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno or 0)}: expected a file system with hard links, or one that renames without replacing, got "
            "one with neither: two processes could each make a file of this name. Keep checkpoints on another one",
            new,
        ) from error
    return True


def check_names_once(folder: StrPath) -> None:
    """Raise ``OSError`` where :func:`publish` could not tell whether a name is taken."""
    probed = False
    while not probed:  # a process that sweeps the folder may have taken the probe for a leftover
        with _temporary(f"{os.fspath(folder)}/once") as probe, _temporary(f"{os.fspath(folder)}/once") as other:
            create(probe, 0).close()
            with contextlib.suppress(FileNotFoundError):
                _name_again(probe, other)
                probed = True


def _name_again(path: str, name: str) -> bool:
    """Give a file a name: one more, or, without hard links, in place of its own. False: the name was taken."""
    try:
        os.link(path, name, follow_symlinks=False)
    except FileExistsError:
        look_again(os.path.dirname(name) or ".")
        # A server whose answer was lost is asked again, and finds what it has made itself.
        return os.path.samefile(path, name)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return _rename_once(path, name)
    return True


def replace(path: StrPath, raw: bytes) -> None:
    """Replace a small file: readers see the old bytes or the new ones."""
    with _temporary(path) as temporary:
        put(temporary, raw, now=True)
        os.replace(temporary, path)
    sync_folder(os.path.dirname(path) or ".")


def link(name: str, folder: int, target: StrPath) -> bool:
    """Hard-link a file of an open folder. False: that is not possible there, or the file is gone. Copy it instead.

    Raises:
        FileExistsError: ``target`` is taken.
    """
    try:
        os.link(name, target, src_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK | _GONE:
            return False
        raise
    return True


def rename(old: Path, new: Path) -> None:
    """Give a folder another name; ``new`` may be an empty folder."""
    os.rename(old, new)


def exchange(one: Path, other: Path) -> None:
    """Exchange two names in one step.

    Raises:
        OSError: the file system or the platform cannot (ENOSYS, EINVAL, EOPNOTSUPP …). Both are as they were.
    """
    _rename(one, other, _EXCHANGE)


def _rename(old: StrPath, new: StrPath, flag: int) -> None:
    """``renameat2``, which Python does not have."""
    name = "renameatx_np" if sys.platform == "darwin" else "renameat2"
    function = getattr(_libc, name, None)
    code = errno.ENOSYS
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
        if function(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), str(old), None, str(new))


def remove(path: StrPath) -> None:
    """Remove a file, or a folder and all below it. Follows no link. It is no error if something is gone already."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            _remove_folder(str(path))
        else:
            os.unlink(path)


def _remove_folder(path: str) -> None:
    with os.scandir(path) as found:
        below = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in below:
        with contextlib.suppress(FileNotFoundError):
            (_remove_folder if is_folder else os.unlink)(name)
    os.rmdir(path)


def touch(path: StrPath) -> None:
    """Note that a file was changed now, by the clock of the file system. Raises ``OSError``."""
    os.utime(path)


def now(folder: StrPath) -> float:
    """The time by the clock of the file system. Raises ``OSError``: nothing can be written to the folder."""
    with _temporary(f"{os.fspath(folder)}/now") as path, create(path, 0) as fd:
        return os.fstat(fd).st_mtime


def changed(folder: int, name: str) -> float:
    """When a file below an open folder was changed last, by the clock of the file system. Raises as :func:`open_file`."""
    with open_file(folder, name) as fd:
        return os.fstat(fd).st_mtime


def run_in_background(work: Callable[[], object]) -> None:
    """Run slow work such as removing files in a thread. The interpreter ends after it."""
    if THREADS > 1:
        with contextlib.suppress(RuntimeError):  # there can be no more threads
            start_thread(threading.Thread(target=work, name=BACKGROUND))
            return
    work()


def lock(folder: int, *, wait: bool = False) -> bool:
    """Lock an open folder. The process keeps the lock until the descriptor closes.

    Returns:
        False: another process has it, or this file system has none.
    """
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


# ---- reading ---------------------------------------------------------------------------------------------------------


def look_again(*folders: StrPath | int) -> None:
    """Ask the file system which names are in folders now: paths, each below the one before it or elsewhere, or open ones.

    On a network's file system a machine believes for up to a minute that a name is missing, and what a listing said. Then it looks
    again. Does nothing for a folder that is not there, and where the system call is missing.

    Cost: a system call for each; on a network's file system a request.
    """
    if _statx is not None:
        for folder in folders:
            found = ctypes.create_string_buffer(_STATX_BYTES)
            if isinstance(folder, int):
                _statx(folder, b"", _FORCE_SYNC | _EMPTY_PATH, _ALL_STATS, found)
            else:
                _statx(_AT_FDCWD, os.fsencode(folder), _FORCE_SYNC, _ALL_STATS, found)


def open_folder(path: StrPath) -> files.Descriptor:
    """A descriptor of a folder, which may be reached through links."""
    return files.Descriptor.open(path, os.O_RDONLY | os.O_DIRECTORY)


def open_below(folder: int, relative: str) -> files.Descriptor:
    """A descriptor of a folder below an open one. Raises ``OSError`` where there is none, or a link is on the way."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    first, _, rest = relative.partition("/")
    try:
        here = files.Descriptor.open(first, flags, dir_fd=folder)
    except FileNotFoundError:
        look_again(folder)
        here = files.Descriptor.open(first, flags, dir_fd=folder)
    return open_below(here, rest) if rest else here


def open_file(folder: int, relative: str) -> files.Descriptor:
    """A descriptor for reading a regular file below an open folder.

    Raises:
        OSError: there is none, or a link is on the way (ELOOP, ENOTDIR), or it is no regular file (ENOTSUP).
    """
    parents, _, name = relative.rpartition("/")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    above = open_below(folder, parents) if parents else folder
    try:
        fd = files.Descriptor.open(name, flags, dir_fd=above)
    except FileNotFoundError:
        look_again(above)
        fd = files.Descriptor.open(name, flags, dir_fd=above)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        fd.close()
        raise _irregular(relative)
    return fd


def sizes(folder: int, names: Iterable[str]) -> list[int | OSError]:
    """The size of each file below an open folder, or the error that :func:`open_file` would raise.

    Cost: one system call for each, where those of one folder follow each other.
    """
    found: list[int | OSError] = []
    here = ""
    opened = folder
    for relative in names:
        parents, _, name = relative.rpartition("/")
        try:
            if parents != here:  # the one before closes when it is dropped
                here, opened = parents, open_below(folder, parents) if parents else folder
            try:
                status = os.stat(name, dir_fd=opened, follow_symlinks=False)
            except FileNotFoundError:
                look_again(opened)
                status = os.stat(name, dir_fd=opened, follow_symlinks=False)
        except OSError as error:
            found.append(error)
        else:
            found.append(status.st_size if stat.S_ISREG(status.st_mode) else _irregular(relative))
    return found


def have_sizes(folder: int, expected: Mapping[str, int]) -> bool:
    """Whether below an open folder all these are regular files of that many bytes. Raises ``OSError``: one is not there.

    Cost: one system call for each. Links on the way are followed: a reader refuses them.
    """
    for relative, nbytes in expected.items():
        status = os.stat(relative, dir_fd=folder, follow_symlinks=False)
        if status.st_size != nbytes or not stat.S_ISREG(status.st_mode):
            return False
    return True


def _irregular(relative: str) -> OSError:
    return OSError(errno.ENOTSUP, "not a regular file", relative)


def read(fd: int, into: memoryview, offset: int) -> int:
    """Fill ``into`` from ``offset``. Returns how many bytes were read: fewer only at the end of the file.

    A file that another machine has removed ends where reading has come to.
    """
    done = 0
    while done < len(into):
        try:
            count = os.preadv(fd, [into[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            break
        if count == 0:
            break
        done += count
    return done


def entries(folder: int) -> Iterator[tuple[str, bool]]:
    """Everything below an open folder: the relative path, and whether it is a folder. A folder comes before its entries."""
    look_again(folder)
    for name in sorted(os.listdir(folder)):
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        yield name, is_folder
        if is_folder:
            with open_below(folder, name) as inner:
                for relative, deeper in entries(inner):
                    yield f"{name}/{relative}", deeper


#: Seconds between two looks at what may have ended unheard.
_POLL_S = 0.1


class WorkerEvent:
    """An event that may come from another thread.

    A ``threading.Event`` is locked for ever if an interrupt arrives just as it takes its lock; this one is not.
    """

    def __init__(self) -> None:
        self._is_set, self._wake = False, threading.Lock()
        self._wake.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True  # first: who waits looks at this from time to time
        with contextlib.suppress(RuntimeError):  # it was set before
            self._wake.release()

    def wait(self, timeout: float | None = None) -> bool:
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_set and (left := until - time.monotonic()) > 0:
            if self._wake.acquire(timeout=min(left, _POLL_S)):
                self._wake.release()
        return self._is_set


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. An interrupt may come back from here, but does not keep the thread from running.

    ``Thread.start`` waits under a lock until the thread has begun. If an interrupt leaves that locked, the thread waits for ever, and
    so does the interpreter in the end. Here a thread waits that gets no interrupts.

    Raises:
        RuntimeError: there can be no more threads, or the interpreter ends.
    """
    begun = WorkerEvent()
    failed: list[BaseException] = []

    def start() -> None:
        try:
            thread.start()
        except BaseException as error:  # noqa: BLE001 - the calling thread raises it
            failed.append(error)
        finally:
            begun.set()

    _thread.start_new_thread(start, ())
    begun.wait()
    if failed:
        raise failed[0]


def work_off(shares: Sequence[Iterable[Callable[[], object]]], threads: int) -> None:
    """Call all that the shares consist of: each share one after another, several shares at once.

    Raises what the first one that fails does, an interrupt too, once the others stopped.

    Args:
        shares: no two of them may touch the same thing at once.
        threads: at most, the calling thread included. Where there can be no more, it does all.
    """
    left = collections.deque(shares)
    failed: list[BaseException] = []
    ended: list[None] = []
    heard = _thread.allocate_lock()  # released when another helper has ended

    def help_out() -> None:
        _work(left, failed)
        ended.append(None)
        with contextlib.suppress(RuntimeError):  # it is released, and the waiting thread looks once more
            heard.release()

    # Bare threads cost little. Those of an executor are refused while the interpreter ends, and a save may end after the program.
    helpers: list[int] = []
    try:
        with contextlib.suppress(RuntimeError):  # there can be no more threads
            for _ in range(min(threads, len(shares)) - 1):
                # Begun and noted in one call of C code, which no interrupt divides.
                helpers.extend(map(_thread.start_new_thread, (help_out,), ((),)))
        _work(left, failed)
    except BaseException as error:  # noqa: BLE001 - an interrupt between two lines
        failed.append(error)
    while len(ended) < len(helpers):  # they use what they were given: no second interrupt gives that free before
        try:
            heard.acquire(timeout=_POLL_S)
        except KeyboardInterrupt as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _work(left: collections.deque[Iterable[Callable[[], object]]], failed: list[BaseException]) -> None:
    """Do one share after another, until there are no more or something failed in whatever thread."""
    try:
        while not failed:
            try:
                share = left.popleft()
            except IndexError:
                return
            for act in share:
                if failed:
                    return
                act()
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for all
        failed.append(error)
