"""The documents of what is saved: JSON files of declared types, and what may be wrong with them.

The common case takes one pass of C code each way: a text is taken if what was read from it is written as the same text, and a
value is written if the same value is read back. Whatever fails that is looked at entry by entry, to say what is wrong and where,
or to accept what is only written otherwise, as by another program or a newer engram.
"""

from __future__ import annotations

import errno
import functools
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self, TypeVar

import msgspec
import xxhash

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import files, layout
from engram.format.strict import MAX_BYTES, MAX_DEPTH, REFUSALS, describe, is_tame, parse, plain
from engram.saved import disk


class Problem(NamedTuple):
    """A file that is not as it must be."""

    path: Path
    #: What was expected and what was found.
    what: str
    #: Byte in the file; None: the file as a whole.
    offset: int | None = None

    def __str__(self) -> str:
        where = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.path}{where}: {self.what.removesuffix('.')}."

    def entry(self) -> dict[str, str | int | None]:
        """In JSON values: the same form in every command's answer."""
        return {"file": str(self.path), "offset": self.offset, "what": self.what}


def corrupt(path: disk.StrPath, what: str, offset: int | None = None) -> CorruptCheckpoint:
    """An exception that carries a :class:`Problem`."""
    return CorruptCheckpoint(Problem(Path(path), what, offset))


#: What is raised of a document that is damaged, or of a newer engram.
UNREADABLE = (CorruptCheckpoint, IncompatibleCheckpoint)


def problem_of(error: Exception, path: Path | None = None) -> Problem:
    """The problem that an exception carries, or says in its message: of that path, which it may begin with."""
    problem = error.args[0]
    if isinstance(problem, Problem):
        return problem
    return Problem(path or Path(), str(error).removeprefix(f"{path}: ").removesuffix("."))


def no_file(error: OSError, nbytes: int | None = None) -> str:
    """Describes why a file does not open. Raises ``error`` again if that is no damage: no permission, an I/O error."""
    size = "" if nbytes is None else f" of {nbytes} bytes"
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return f"expected a file{size}, found none"
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENOTSUP, errno.ENXIO):
        return f"expected a regular file{size}, got something else"
    raise error


def open_folder(folder: Path, of: str) -> files.Descriptor:
    """A descriptor of the folder of a part, an attempt or a checkpoint. Raises ``CorruptCheckpoint``: there is none."""
    try:
        return disk.open_folder(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise corrupt(folder, f"expected the folder of {of}, found none") from error


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


_SORTED = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A file: subclasses say which, in a field ``format``.

    Of a newer minor version entries that are not known are ignored; of this one or an older they are an error.
    """

    #: The newest minor version of each major one that is read, in order.
    VERSIONS: ClassVar[tuple[tuple[int, int], ...]] = ((1, 0),)

    version: tuple[int, int] = (1, 0)


class Summed(Document, frozen=True, kw_only=True):
    """A file that holds a sum of itself, as nothing else may name its digest."""

    #: xxh3-64 of the text without it.
    sum: str = ""

    def sealed(self) -> Self:
        """The same with its sum. Raises as :func:`encode`."""
        bare = encode(msgspec.structs.replace(self, sum=""))
        return msgspec.structs.replace(self, sum=xxhash.xxh3_64_hexdigest(bare))

    def encode(self) -> bytes:
        """The text of the file. Raises as :func:`encode`."""
        return encode(self.sealed())

    @classmethod
    def decode(cls, raw: bytes, path: disk.StrPath) -> Self:
        """What the text says. Raises as :func:`decode`, and ``CorruptCheckpoint`` if it is not what was written."""
        document = _decode_same(raw, cls)
        if document is not None:
            bare = _text(msgspec.structs.replace(document, sum=""))
        else:
            document, tree = _decode_carefully(raw, path, cls)
            try:
                bare = encode({**tree, "sum": ""})  # with what a newer engram may have added
            except ValueError as error:  # numbers may be longer as they are written here
                raise corrupt(path, str(error)) from error
        expected = xxhash.xxh3_64_hexdigest(bare)
        if document.sum != expected:
            raise corrupt(path, f"expected the checksum {expected}, got {document.sum!r:.100}")
        return document


D = TypeVar("D", bound=Document)


def decode(raw: bytes, path: disk.StrPath, kind: type[D]) -> D:
    """A document of that kind.

    Args:
        raw: the bytes of the file.
        path: which file that is, for messages.
        kind: a ``Document``.

    Raises:
        CorruptCheckpoint: the text is not strict JSON, or does not say what such a document says.
        IncompatibleCheckpoint: another major version.
    """
    document = _decode_same(raw, kind)
    return _decode_carefully(raw, path, kind)[0] if document is None else document


def read(folder: Path, folder_fd: int, name: str, kind: type[D], limit: int = MAX_BYTES) -> D:
    """A document below an open folder. Raises as :func:`read_small` and :func:`decode`."""
    return decode(read_small(folder, folder_fd, name, limit), f"{folder}/{name}", kind)


def encode(value: msgspec.Struct | Mapping[str, object]) -> bytes:
    """The text of a value: sorted keys, no spaces. Equal values have equal bytes.

    Raises:
        TypeError: something JSON has no word for, or a key that is not a string; names where it is.
        ValueError: a number that is not finite or not an int64, half a character, too deep, or longer than ``MAX_BYTES``.
    """
    try:
        raw = _text(value)
        kind = type(value) if isinstance(value, msgspec.Struct) else dict
        describe(kind)
        if is_tame(raw, MAX_DEPTH) and msgspec.json.decode(raw, type=kind) == value:
            return raw
    except REFUSALS:
        pass  # said below
    raw = _text(plain(value, "$", MAX_DEPTH))
    if len(raw) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes of JSON, got {len(raw)}. Keep what is long in an array.")
    return raw


def copied(user: Mapping[str, object]) -> dict[str, object]:
    """The user's own state as it comes back from a document. Raises as :func:`encode`."""
    state = msgspec.json.decode(encode({"user": dict(user)}), type=dict[str, dict[str, object]])
    return state["user"]


def _text(value: object) -> bytes:
    return _SORTED.encode(msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value).encode()


def _decode_same(raw: bytes, kind: type[D]) -> D | None:
    """The document of this version, or of an older minor one, whose text this is; None: there is none."""
    try:
        describe(kind)
        document = msgspec.json.decode(raw, type=kind)
        major, minor = document.version
        known = dict(kind.VERSIONS).get(major, -1)
        if 0 <= minor <= known and is_tame(raw, MAX_DEPTH) and _text(document) == raw:
            return document
    except REFUSALS:
        pass
    return None


def _decode_carefully(raw: bytes, path: disk.StrPath, kind: type[D]) -> tuple[D, dict[str, object]]:
    """A document, and all that its text says. Raises as :func:`decode`."""
    try:
        tree = parse(raw)
    except ValueError as error:
        raise corrupt(path, f"not readable as JSON ({error})") from error
    expected = _format_of(kind)
    if not isinstance(tree, dict) or tree.get("format") != expected:
        found = tree.get("format") if isinstance(tree, dict) else type(tree).__name__
        raise corrupt(path, f"expected the format {expected!r}, got {found!r:.100}")
    version = tree.get("version")
    if not (isinstance(version, list) and len(version) == 2 and all(type(v) is int and v >= 0 for v in version)):
        raise corrupt(path, f"expected a version [major, minor], got {version!r:.100}")
    minor = dict(kind.VERSIONS).get(version[0])
    if minor is None:
        said = " or ".join(f"{major}.{known} or another {major}.x" for major, known in kind.VERSIONS)
        raise IncompatibleCheckpoint(
            f"{path}: expected version {said} of {expected}, got {version[0]}.{version[1]}. "
            f"Read it with an engram that reads {expected} {version[0]}.x; newer ones do."
        )
    try:
        document = msgspec.convert(tree, kind, strict=True)
        if version[1] <= minor:
            _refuse_unknown(tree, msgspec.to_builtins(document), "$")
    except (msgspec.ValidationError, ValueError) as error:
        raise corrupt(path, str(error)) from error
    return document, tree


@functools.cache  # msgspec evaluates all annotations to say it
def _format_of(kind: type[Document]) -> str:
    (field,) = (field for field in msgspec.structs.fields(kind) if field.name == "format")
    return str(field.default)


def _refuse_unknown(tree: object, known: object, where: str) -> None:
    """Entries of objects that typed reading passed over: they are not in what was read."""
    if isinstance(tree, dict) and isinstance(known, dict):
        unknown = sorted(set(tree) - set(known))
        if unknown:
            raise ValueError(f"an unknown entry {unknown[0][:100]!r} at `{where}`")
        for name, part in tree.items():
            _refuse_unknown(part, known[name], f"{where}.{name}")
    elif isinstance(tree, list) and isinstance(known, list | tuple):
        for i, (part, read) in enumerate(zip(tree, known, strict=True)):
            _refuse_unknown(part, read, f"{where}[{i}]")


MANIFEST = layout.MANIFEST
SHARD = "shard.json"
ATTEMPT = "attempt.json"
REFUSAL = "error.json"
MAX_RANKS = 1 << 16

#: Names of parts: of a component, or numbered.
PART_FOLDER = re.compile(r"[a-z][a-z_]{0,31}(/[0-9]{3})?")
#: Left behind by a process that was killed while it published a file.
LEFTOVER = re.compile(r"(.*/)?[A-Za-z0-9._-]+\.[0-9a-f]{8}\.tmp")

Layout = Literal["flat", "segments"]


# ---- documents -------------------------------------------------------------------------------------------------------


class Attempt(Document, frozen=True, kw_only=True):
    """``attempt.json``: what all ranks agreed on before they began."""

    name: str
    attempt: str
    epoch: int
    step: int
    world: int
    trigger: str
    parent: str | None
    user: dict[str, object]
    format: Literal["engram.attempt"] = "engram.attempt"


class PartEntry(msgspec.Struct, frozen=True):
    """A part, as a shard lists it."""

    folder: str
    bytes: int
    sha256: str


class ShardEntry(msgspec.Struct, frozen=True):
    """A shard, as a manifest lists it."""

    rank: int
    bytes: int
    sha256: str


class Cut(msgspec.Struct, frozen=True):
    """The snapshot that a shard holds."""

    #: The store's ticket counter: ages are counted back from it.
    clock: int
    #: Whether writers waited, so that no row was lost.
    exact: bool = True
    #: Rows that were overwritten before they were copied.
    lost_rows: int = 0


class Count(msgspec.Struct, frozen=True):
    """Trajectories and their steps."""

    episodes: int = 0
    steps: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.episodes + other.episodes, self.steps + other.steps)


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of what a shard holds. Bytes are filled in when it is written."""

    steps: int
    episodes: int
    complete: Count = Count()
    open: Count = Count()
    headless: Count = Count()
    both: Count = Count()
    mid: Count = Count()
    orphan: Count = Count()
    bytes_logical: int = 0
    bytes_written: int = 0
    bytes_linked: int = 0


def added(every: Iterable[Totals]) -> Totals:
    """The totals of some shards together."""
    columns = zip(*map(msgspec.structs.astuple, [*every] or [Totals(steps=0, episodes=0)]), strict=True)
    sums = (functools.reduce(operator.add, column) for column in columns)
    return Totals(**dict(zip(Totals.__struct_fields__, sums, strict=True)))


class ShardRows(NamedTuple):
    """The entries of a shard that describe its rows."""

    cut: Cut
    totals: Totals
    #: Of ``()`` where there is no schema.
    schema_sum: str


class Shard(Document, frozen=True, kw_only=True):
    """``shard.json``: a rank's part of a checkpoint."""

    attempt: str
    epoch: int
    step: int
    rank: int
    world: int
    trigger: str
    layout: Layout
    schema_sum: str
    parts: tuple[PartEntry, ...]
    cut: Cut
    totals: Totals
    format: Literal["engram.shard"] = "engram.shard"


class Manifest(Summed, frozen=True, kw_only=True):
    """The decision on an attempt. Two processes that decide write the same bytes."""

    #: The name of the folder; empty: a dump, which may be moved.
    name: str
    step: int
    steps_by_rank: tuple[int, ...]
    world: int
    trigger: str
    status: Literal["complete", "aborted"]
    #: Why it was aborted.
    reasons: tuple[str, ...]
    parent: str | None
    schema_sum: str
    shards: tuple[ShardEntry, ...]
    user: dict[str, object]
    format: Literal["engram.checkpoint"] = "engram.checkpoint"


def rank_folder(rank: int, world: int) -> str:
    """Name of a rank's folder."""
    return f"rank-{rank:05d}-of-{world:05d}"


class Refusal(Document, frozen=True, kw_only=True):
    """A rank's vote against an attempt."""

    attempt: str
    rank: int
    error: str
    format: Literal["engram.error"] = "engram.error"


class Pins(Document, frozen=True, kw_only=True):
    """The file."""

    steps: tuple[int, ...]
    format: Literal["engram.pins"] = "engram.pins"


class LeaseTerms(Document, frozen=True, kw_only=True):
    """The file."""

    checkpoint: str
    seconds: int
    format: Literal["engram.lease"] = "engram.lease"
