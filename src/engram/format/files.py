"""The files of a store: made with their space, checked for their exact size, and the control block, read without the core."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import shutil
import stat
import struct
from pathlib import Path
from typing import NamedTuple, Self

from engram._support.words import no_space
from engram.errors import CorruptStore

_ZEROES = bytes(1 << 20)
_libc = ctypes.CDLL(None, use_errno=True)  # once, not with every file


class Descriptor(int):
    """A file descriptor that closes when it is dropped.

    Python handles signals between bytecodes only. Opening a file and owning its descriptor is one call of C code, and so is closing
    it and noting that: wherever Ctrl-C arrives, nothing stays open and nothing is closed twice.
    """

    @classmethod
    def open(cls, path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> Self:
        """As ``os.open``, never inherited by another program."""
        return next(map(cls, map(functools.partial(os.open, dir_fd=dir_fd), (path,), (flags | os.O_CLOEXEC,), (mode,))))

    @classmethod
    def copy_of(cls, fd: int) -> Self:
        """As ``os.dup``."""
        return next(map(cls, map(os.dup, (fd,))))

    def close(self, *_: object) -> None:
        """Close it. A second call does nothing."""
        next(vars(self).setdefault("_closing", map(os.close, (int(self),))), None)

    __del__ = __exit__ = close

    def __enter__(self) -> Self:
        return self


def reserve(path: Path, nbytes: int) -> None:
    """Create a file of ``nbytes`` zero bytes whose space is taken at once.

    A sparse file that is mapped kills the process with SIGBUS when the disk fills up; this one raises here instead. On
    file systems without ``fallocate`` zeros are written. On a RAM-backed file system this commits the RAM. Copy-on-write
    and thinly provisioned volumes may still run out later.

    Raises:
        OSError: no space, no permission, the file exists. Nothing is left behind.
    """
    fd = Descriptor.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        if nbytes and not fallocate(fd, nbytes):
            _write_zeros(fd, 0, nbytes)
    except OSError as error:
        os.unlink(path)
        told = f"{os.strerror(error.errno or 0)} (reserving {nbytes} bytes)"
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            told += f": {no_space(nbytes, shutil.disk_usage(path.parent).free)}"
        raise OSError(error.errno, told, str(path)) from error
    except BaseException:
        os.unlink(path)
        raise
    finally:
        fd.close()


def fallocate(fd: int, nbytes: int) -> bool:
    """Reserve the space of a file by the system call, which glibc emulates badly. False: the file system does not have it."""
    function = getattr(_libc, "fallocate", None)
    if function is None:
        return False
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while function(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def extend(path: Path, nbytes: int) -> None:
    """Let an existing file have ``nbytes`` bytes, more than it has, whose space is taken at once: zeros behind its content.

    Raises ``OSError``: no space, no permission.
    """
    with open_regular(path, os.O_RDWR) as fd:
        if not fallocate(fd, nbytes):
            _write_zeros(fd, os.lseek(fd, 0, os.SEEK_END), nbytes)


def _write_zeros(fd: int, at: int, end: int) -> None:
    while at < end:
        at += os.write(fd, _ZEROES[: end - at])


def take_space(path: Path, nbytes: int) -> None:
    """Reserve the space of an existing file, parts of which may never have been written. Its content stays.

    Raises:
        CorruptStore: it is not a regular file of ``nbytes`` bytes. OSError: no space, no permission.
    """
    with open_regular(path, os.O_RDWR) as fd:
        check_size(path, nbytes)
        if nbytes:
            fallocate(fd, nbytes)


def check_size(path: Path, nbytes: int) -> None:
    """Raise ``CorruptStore`` unless ``path`` is a regular file of exactly ``nbytes`` bytes."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptStore(f"{path}: expected a file of {nbytes} bytes, found none.") from error
    if not stat.S_ISREG(status.st_mode):
        raise CorruptStore(f"{path}: expected a regular file, got something else.")
    if status.st_size != nbytes:
        raise CorruptStore(
            f"{path}: expected {nbytes} bytes, got {status.st_size}. The file was truncated or replaced; nothing was changed."
        )


def open_regular(path: Path, flags: int) -> Descriptor:
    """Open an existing file. Raises ``CorruptStore`` if it is missing or not regular, a link for instance."""
    try:
        fd = Descriptor.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptStore(f"{path}: expected a file, found none.") from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise CorruptStore(f"{path}: expected a regular file, got something else.") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        fd.close()
        raise CorruptStore(f"{path}: expected a regular file, got something else.")
    return fd


def read_small(path: Path, limit: int) -> bytes:
    """The bytes of a small regular file. Raises ``CorruptStore`` if it is missing, not regular or longer than ``limit``."""
    with open_regular(path, os.O_RDONLY) as fd, open(fd, "rb", closefd=False) as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise CorruptStore(f"{path}: expected at most {limit} bytes, got more.")
    return raw


def overwrite(path: Path, raw: bytes) -> None:
    """Replace a small file. If the new content fits, it is written in place, so that this works on a full disk too.

    Up to a page is written by one system call, which no signal cuts short.
    """
    try:
        fd = Descriptor.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        size = 0
    else:
        try:
            size = os.fstat(fd).st_size
            if len(raw) <= size <= mmap.PAGESIZE:
                os.pwrite(fd, raw.ljust(size), 0)
                return
        finally:
            fd.close()
    write_atomically(path, raw.ljust(size))


def write_atomically(path: Path, raw: bytes, mode: int = 0o600) -> None:
    """Replace a small file: readers see the old bytes or the new ones."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with Descriptor.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW) as fd:
            os.fchmod(fd, stat.S_IMODE(mode))
            _write_all(fd, raw)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_all(fd: int, raw: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.write(raw)
    os.fsync(fd)


class Creation:
    """Makes the files of one store; removes what it made if anything fails, but no folder in which others have files.

    >>> with Creation() as made:                               # doctest: +SKIP
    ...     made.folder(directory)
    ...     made.file(directory / "a.memmap", 4096)
    """

    def __init__(self) -> None:
        self._made: list[Path] = []

    def __enter__(self) -> Creation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                (path.rmdir if path.is_dir() else path.unlink)()

    def folder(self, path: Path) -> None:
        """Make a folder and its missing parents, for this user alone; one that exists is left as it is."""
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process was faster
                folder.mkdir(mode=0o700)
                self._made.append(folder)

    def file(self, path: Path, nbytes: int, *, sparse: bool = False) -> None:
        """Make a file of zeros, its space reserved. ``sparse``: it is one hole, of which writers take what they need."""
        reserve(path, 0 if sparse else nbytes)
        self._made.append(path)
        if sparse:
            os.truncate(path, nbytes)

    def publish(self, old: Path, new: Path) -> None:
        """Rename a file or folder that this made. An interrupt may come before or after: it is removed under either name."""
        self._made += [new / path.relative_to(old) for path in self._made if path.is_relative_to(old)]
        old.rename(new)

    def text(self, path: Path, raw: bytes) -> None:
        """Make a small file with this content."""
        with Descriptor.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as fd:
            self._made.append(path)
            _write_all(fd, raw)


_HEADER = struct.Struct("=8sIIII9Q")
_SECTION = struct.Struct("=16sQQ")
_MAGIC = b"engram\0\1"
_MAJOR = 2
_BYTE_ORDER = 0x01020304
_LANE = struct.Struct("=QQQ40x")
_PARTICIPANT = struct.Struct("=II120x")

#: Offset and bytes of the parts of a block, by name. Behind them lie the lanes.
_SECTIONS = {
    "locks": (4096, 4096),
    "counters": (8192, 2048),
    "limits": (10240, 1024),
    "waits": (11264, 1024),
    "participants": (12288, 256 * 128),
}
#: Bytes before the lanes: header and the other sections.
FIXED_BYTES = sum(_SECTIONS["participants"])
_HEADER_BYTES = _HEADER.size + (len(_SECTIONS) + 1) * _SECTION.size
_CLEAN_AT = _SECTIONS["locks"][0] + 56
_ID_AT = _SECTIONS["counters"][0] + 1024


class ControlHeader(NamedTuple):
    """The header of a control block: what never changes of a store, and whether it was closed in order."""

    capacity: int
    lanes: int
    lane_length: int
    #: xxh3-64 of ``store.json``.
    schema_sum: int
    #: Closed by its last owner. False: open now, or its processes died.
    clean: bool


def store_id(control: Path, fresh: bytes = bytes(16)) -> bytes:
    """The 16 bytes that name a store, in its control block; zeros: it has no name. ``fresh``: the name that it is given then.

    Only one process at a time may give one. Raises ``OSError``: the file cannot be read, or written.
    """
    with open_regular(control, os.O_RDWR if any(fresh) else os.O_RDONLY) as fd:
        found = os.pread(fd, len(fresh), _ID_AT)
        if any(found) or not any(fresh):
            return found
        os.pwrite(fd, fresh, _ID_AT)
    return fresh


def control_bytes(lanes: int) -> int:
    """Size of the block of a store with that many lanes."""
    return FIXED_BYTES + lanes * _LANE.size


def parse_control(raw: bytes) -> ControlHeader:
    """The header of a block, of which ``raw`` holds the fixed part.

    Raises:
        ValueError: not a control block, of another machine or version, or its checksum does not match.
    """
    magic, major, _, order, crc, _, capacity, lanes, length, _, at, count, _, schema_sum = _HEADER.unpack_from(raw)
    if magic != _MAGIC or order != _BYTE_ORDER:
        raise ValueError("not a control block of this byte order")
    if major != _MAJOR:
        raise ValueError(f"expected format {_MAJOR}, got {major}")
    if crc != _crc32c(raw[:20] + bytes(4) + raw[24:_HEADER_BYTES]):
        raise ValueError("the header's checksum does not match")
    if lanes < 1 or lanes * length != capacity:
        raise ValueError(f"{lanes} lanes of {length} rows are not the capacity {capacity}")
    sections = {**_SECTIONS, "lanes": (FIXED_BYTES, lanes * _LANE.size)}
    directory = b"".join(_SECTION.pack(name.encode(), *place) for name, place in sections.items())
    if (at, count, raw[_HEADER.size : _HEADER_BYTES]) != (_HEADER.size, len(sections), directory):
        raise ValueError("the sections do not fit the geometry")
    (clean,) = struct.unpack_from("=Q", raw, _CLEAN_AT)
    return ControlHeader(capacity, lanes, length, schema_sum, clean == 1)


def processes(raw: bytes) -> list[int]:
    """Numbers of the processes that are noted in a block, of which ``raw`` holds the fixed part. Some may have ended."""
    at, nbytes = _SECTIONS["participants"]
    return [pid for state, pid in _PARTICIPANT.iter_unpack(raw[at : at + nbytes]) if state]


def extents(raw: bytes, header: ControlHeader) -> list[range]:
    """The positions inside each lane's extent, those of rows that hold nothing included. ``raw``: the lanes."""
    found = []
    for cursor, base, high in _LANE.iter_unpack(raw):
        end = max(cursor, high)
        found.append(range(end - min(max(end - base, 0), header.lane_length), end))
    return found


def _crc32c(raw: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
