"""What is wrong with a file, in the same words for a load that stops and for a report that goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engram.errors import CorruptCheckpoint
from engram.format import disk
from engram.format.sums import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engram.format.disk import StrPath
    from engram.format.sums import Sums


class Problem(NamedTuple):
    """One file that is not as it must be."""

    path: Path
    what: str
    """What was expected and what was found."""
    offset: int | None = None
    """Byte in the file; None: the file as a whole."""

    def __str__(self) -> str:
        where = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.path}{where}: {self.what.removesuffix('.')}."

    def entry(self) -> dict[str, str | int | None]:
        """In JSON values: the same form in every command's answer."""
        return {"file": str(self.path), "offset": self.offset, "what": self.what}


def corrupt(path: StrPath, what: str, offset: int | None = None) -> CorruptCheckpoint:
    """An exception that carries a :class:`Problem`."""
    return CorruptCheckpoint(Problem(Path(path), what, offset))


def problem_of(error: CorruptCheckpoint) -> Problem:
    """The problem that an exception carries."""
    problem = error.args[0]
    return problem if isinstance(problem, Problem) else Problem(Path(), str(error).removesuffix("."))


def no_file(error: OSError, nbytes: int | None = None) -> str:
    """Describes why a file does not open. Raises ``error`` again if that is no damage: no permission, an I/O error."""
    size = "" if nbytes is None else f" of {nbytes} bytes"
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return f"expected a file{size}, found none"
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENOTSUP, errno.ENXIO):
        return f"expected a regular file{size}, got something else"
    raise error


def wrong_block(path: Path, sums: Sums, block: int) -> Problem:
    """The problem of a block whose sum differs from the one in ``sums``."""
    return Problem(path, f"expected the checksum {sums[block]:016x} of a block, got another", block * BLOCK)


def misfits(folder: Path, folder_fd: int, expected: Mapping[str, int]) -> Iterator[Problem]:
    """Files of an open folder that are missing, not regular, or not as many bytes long as expected."""
    for (name, nbytes), size in zip(expected.items(), disk.sizes(folder_fd, expected), strict=True):
        if isinstance(size, OSError):
            yield Problem(folder / name, no_file(size, nbytes))
        elif size != nbytes:
            yield Problem(folder / name, f"expected {nbytes} bytes, got {size}")


def read_small(folder: Path, folder_fd: int, name: str, limit: int, *, exactly: bool = False) -> bytes:
    """The bytes of a file of an open folder: at most ``limit``, or exactly that many.

    Raises:
        CorruptCheckpoint: it is missing, not a regular file, or of another size.
    """
    try:
        fd = disk.open_file(folder_fd, name)
    except OSError as error:
        raise corrupt(folder / name, no_file(error, limit if exactly else None)) from error
    with fd:
        size = os.fstat(fd).st_size
        if size > limit or (exactly and size != limit):
            raise corrupt(folder / name, f"expected {'' if exactly else 'at most '}{limit} bytes, got {size}")
        raw = bytearray(size)
        if disk.read(fd, memoryview(raw), 0) != size:
            raise corrupt(folder / name, f"expected {size} bytes, the file has become shorter")
        return bytes(raw)
