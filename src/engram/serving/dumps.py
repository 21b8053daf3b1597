"""Dumps of a store on their way to clients: a few at a time, each in a folder of its own."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

#: Dumps at a time: each is a folder on disk.
MAX_DUMPS = 4
#: A dump that its client has not read for so long makes room for another.
_MAX_UNREAD_S = 60.0
#: Of a file, in one message.
_PART_BYTES = 4 << 20


class TooMany(Exception):
    """Raised where as many dumps as a server makes are under way, and are read."""


class _Dump:
    """A folder of files, which its client reads."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="engram-dump-", ignore_cleanup_errors=True)
        #: Since when the client reads nothing; infinity while a part is made.
        self.unread_since = float("inf")


class Dumps:
    """Dumps under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dumps: list[_Dump] = []

    def files(self, dumps: Callable[[Path], object], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The files that ``dumps`` writes, as record batches of name and data.

        Raises :class:`TooMany`. ``RuntimeError``: this one was not read for too long, and made room for another.
        """
        with self._lock:
            if len(self._dumps) >= MAX_DUMPS:
                oldest = min(self._dumps, key=lambda other: other.unread_since)
                if time.monotonic() - oldest.unread_since < _MAX_UNREAD_S:
                    raise TooMany(f"the server makes {MAX_DUMPS} dumps already")
                self._dumps.remove(oldest)
                oldest.folder.cleanup()
            self._dumps.append(dump := _Dump())
        try:
            root = Path(dump.folder.name) / "dump"
            dumps(root)
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    yield from self._parts(dump, path, str(path.relative_to(root)), schema)
        finally:
            with self._lock:
                if dump in self._dumps:
                    self._dumps.remove(dump)
            dump.folder.cleanup()

    def _parts(self, dump: _Dump, path: Path, name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for part in parts_of(path):
            dump.unread_since = time.monotonic()
            yield pa.record_batch([[name], [part]], schema=schema)
            dump.unread_since = float("inf")
            if dump not in self._dumps:
                raise RuntimeError(f"dumps: the client read nothing for {_MAX_UNREAD_S:g} s, and others wait.")


def parts_of(path: Path) -> Iterator[bytes]:
    """A file in parts: one at least, so that an empty file is sent, too."""
    with path.open("rb") as file:
        while True:
            yield (part := file.read(_PART_BYTES))
            if len(part) < _PART_BYTES:
                return
