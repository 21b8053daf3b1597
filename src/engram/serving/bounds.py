"""What clients may have a server keep for them: answers that they do not read, and dumps on its disk."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from engram.remote.commands import COALESCED_BYTES, MAX_MESSAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Of answers that are made, or that clients have not read. Small ones are as many as streams, and are not counted.
ANSWER_BYTES = 2 * MAX_MESSAGE
#: For how long an answer waits until others are read.
_WAIT_S = 10.0
#: Dumps at a time: each is a folder on disk.
MAX_DUMPS = 4
#: A dump that its client has not read for so long makes room for another.
_UNREAD_S = 60.0
#: Of a file, in one message.
_PART_BYTES = 4 << 20


class Answers:
    """Bytes of large answers under way."""

    def __init__(self) -> None:
        self._bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def counted(self, nbytes: int) -> Iterator[None]:
        """Make an answer of so many bytes, and send it. It waits while those before it leave no room.

        Raises ``RuntimeError``: they are not read.
        """
        if nbytes <= COALESCED_BYTES:
            yield
            return
        with self._changed:
            if not self._changed.wait_for(lambda: not self._bytes or self._bytes + nbytes <= ANSWER_BYTES, _WAIT_S):
                raise RuntimeError(
                    f"sample: expected at most {ANSWER_BYTES} bytes of batches under way from a server, got {self._bytes} before these "
                    f"{nbytes}, which clients did not read within {_WAIT_S:g} s. Draw again, or fewer rows."
                )
            self._bytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._bytes -= nbytes
                self._changed.notify_all()


class TooMany(Exception):
    """Dumps are under way, and are read."""


class Dumps:
    """Dumps under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dumps: list[_Dump] = []

    def files(self, dumps: Callable[[Path], object], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The files that ``dumps`` writes, as record batches of name and data.

        Raises :class:`TooMany`. ``RuntimeError``: this one was not read for too long, and made room for another.
        """
        dump = _Dump()
        with self._lock:
            if len(self._dumps) >= MAX_DUMPS:
                oldest = min(self._dumps, key=lambda other: other.unread_since)
                if time.monotonic() - oldest.unread_since < _UNREAD_S:
                    raise TooMany(f"the server makes {MAX_DUMPS} dumps already")
                self._dumps.remove(oldest)
                oldest.give_up()
            self._dumps.append(dump)
        try:
            yield from dump.parts(dumps, schema)
        finally:
            with self._lock:
                if dump in self._dumps:
                    self._dumps.remove(dump)
            dump.give_up()


class _Dump:
    """A folder, which is sent in parts."""

    def __init__(self) -> None:
        #: Since when its client reads nothing; for ever later while a part is made.
        self.unread_since = float("inf")
        self._folder: Path | None = None
        self._given_up = False
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """Remove the folder. Repeatable."""
        with self._lock:
            self._given_up, folder, self._folder = True, self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def parts(self, dumps: Callable[[Path], object], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Write the files, and read them."""
        self._folder = folder = Path(tempfile.mkdtemp(prefix="engram-dump-"))
        dumps(folder / "dump")
        for path in sorted((folder / "dump").rglob("*")):
            if path.is_file():
                yield from self._parts_of(path, str(path.relative_to(folder / "dump")), schema)

    def _parts_of(self, path: Path, name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """A file, and an empty one, too."""
        with path.open("rb") as file:
            while True:
                part = file.read(_PART_BYTES)
                self.unread_since = time.monotonic()
                yield pa.record_batch([[name], [part]], schema=schema)
                self.unread_since = float("inf")
                with self._lock:
                    if self._given_up:
                        raise RuntimeError(f"dumps: the client read nothing for {_UNREAD_S:g} s, and others wait.")
                if len(part) < _PART_BYTES:
                    return
