"""Finds the files in which tensors lie, so that other processes can map the same memory. A file may have no name."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from engram._support.memory import lines_of

#: Makes pages that can be written to at once, as Linux 5.14 and later know it.
POPULATE_WRITE = 23
#: How the kernel marks a file without a name.
_DELETED = " (deleted)"
_libc = ctypes.CDLL(None)


class Piece(NamedTuple):
    """The place of a tensor in a file that is mapped as shared."""

    #: The path of the file, or its last path.
    path: str
    named: bool
    device: int
    inode: int
    #: Bytes of the file; -1: it cannot be opened for writing.
    size: int
    #: The offset of the tensor's first byte.
    offset: int


class _Mapping(NamedTuple):
    start: int
    end: int
    how: str
    offset: int
    inode: int
    path: str


def _mappings() -> list[_Mapping]:
    """All mappings of this process, by address; empty where the system does not list them."""
    found = []
    for line in lines_of("/proc/self/maps"):
        place, how, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in place.split("-"))
        name = path[0].replace("\\012", "\n") if path else ""
        found.append(_Mapping(start, end, how, int(offset, 16), int(inode), name))
    return found


def shared_pieces(tensors: Iterable[torch.Tensor]) -> list[Piece | None]:
    """The file and place of each tensor; None: it lies in private memory, or has no elements."""
    mappings = _mappings()
    starts = [mapping.start for mapping in mappings]
    nameless = open_files(["self"]) if any(mapping.path.endswith(_DELETED) for mapping in mappings) else {}
    found: list[Piece | None] = []
    for tensor in tensors:
        at = bisect.bisect_right(starts, tensor.data_ptr()) - 1 if tensor.numel() else -1
        mapping = mappings[at] if at >= 0 else None
        if mapping is None or tensor.data_ptr() >= mapping.end or "s" not in mapping.how:
            found.append(None)
            continue
        named = not mapping.path.endswith(_DELETED)
        device, size = 0, -1
        if "w" in mapping.how:
            device, size = _open(mapping, nameless, named=named)
        offset = mapping.offset + tensor.data_ptr() - mapping.start
        found.append(Piece(mapping.path.removesuffix(_DELETED), named, device, mapping.inode, size, offset))
    return found


def _open(mapping: _Mapping, nameless: dict[tuple[int, int], list[str]], *, named: bool) -> tuple[int, int]:
    """Device and size of a mapping's file, -1 if it cannot be opened for writing."""
    if named:
        paths = [mapping.path]
    else:
        paths = [path for (_, inode), paths in nameless.items() if inode == mapping.inode for path in paths]
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            writable = status.st_mode & 0o222 and os.access(path, os.R_OK | os.W_OK)
            if status.st_ino == mapping.inode and stat.S_ISREG(status.st_mode) and writable:
                return status.st_dev, status.st_size
    return 0, -1


def open_files(processes: Iterable[int | str]) -> dict[tuple[int, int], list[str]]:
    """Paths by which the regular files that processes have open can be opened, also those without a name, by device and inode.

    A process that has ended, or that this process may not inspect, has none. One that ends later takes its paths with it.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for process in processes:
        for path, status in _files_of(process):
            found.setdefault((status.st_dev, status.st_ino), []).append(path)
    return found


def _files_of(process: int | str) -> Iterator[tuple[str, os.stat_result]]:
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{entry}"
            with contextlib.suppress(OSError):
                status = os.stat(path)
                if stat.S_ISREG(status.st_mode):
                    yield path, status


def advise(address: int, nbytes: int, advice: int) -> None:
    """Tell the kernel what the whole pages of some mapped memory are for. Other threads go on meanwhile.

    ``mmap.MADV_DONTNEED`` takes them out of this process: what was written stays, and the next look reads them again.
    :data:`POPULATE_WRITE` is the opposite. A kernel that does not know an advice does nothing.
    """
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def bytes_of(fd: int, size: int, *, readonly: bool = False, private: bool = False) -> torch.Tensor:
    """The first bytes of an open file, mapped: uint8 ``[size]``. It keeps a descriptor of its own.

    Args:
        fd: open for writing, unless one of the following.
        size: at least 1.
        readonly: without the right to write: a write is a SIGSEGV.
        private: writes stay in this tensor.
    """
    protection = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
    memory = mmap.mmap(fd, size, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, protection)
    with torch.inference_mode(mode=False):
        if not readonly:
            return torch.frombuffer(memory, dtype=torch.uint8)
        seen = np.frombuffer(memory, np.uint8)
        raw = (ctypes.c_ubyte * size).from_address(seen.ctypes.data)
        vars(raw)["memory"] = memory  # mapped as long as the tensor lives
        # Of the map itself torch would warn that it must not be written to.
        return torch.frombuffer(raw, dtype=torch.uint8)


def map_piece(
    path: str, device: int, inode: int, size: int, *, readonly: bool = False, private: bool = False
) -> torch.Tensor:
    """The bytes of a file, uint8 ``[size]``. As long as the tensor lives, :func:`open_files` of this process names the file.

    ``readonly`` and ``private``: as for :func:`bytes_of`.

    Raises:
        FileNotFoundError: another file has taken its place. OSError: it cannot be opened or mapped.
    """
    fd = os.open(path, (os.O_RDONLY if readonly or private else os.O_RDWR) | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_size) != (device, inode, size):
            raise FileNotFoundError(2, "another file", path)
        return bytes_of(fd, size, readonly=readonly, private=private)
    finally:
        os.close(fd)
