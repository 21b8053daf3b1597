"""JSON that can be read one way only.

Python's reader keeps the last of two equal keys, takes NaN for a number and integers of any length; msgspec writes NaN as
``null``. Here all of that is refused. An integer is an int64: 64-bit sums are hex strings.

The common case takes one pass of C code each way: a text is taken if what was read from it is written as the same text, and a
value is written if the same value is read back. Whatever fails that is looked at entry by entry, to say what is wrong and where,
or to accept what is only written otherwise, as by another program or a newer engram.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec
import xxhash

from engram._support import fork
from engram.errors import IncompatibleCheckpoint
from engram.format.problems import corrupt

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from engram.format.disk import StrPath

    _Container = msgspec.Struct | dict[object, object] | list[object] | tuple[object, ...]

MAX_BYTES = 1 << 20
MAX_DEPTH = 16

_SORTED = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
_IN_ORDER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# Closed or not. Possessive: whatever the text, one pass over it.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
#: So many digits may be more than an int64.
_DIGITS = re.compile(rb"[0-9]{19}")
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
#: What readers and writers raise of a text or a value that is not as it must be.
_REFUSALS = (ValueError, TypeError, RecursionError)

_describing = fork.lock()
_described: set[object] = set()


def describe(kind: object) -> None:
    """Let msgspec describe a class, as it would when the class is first read: two threads that do so at once crash it."""
    with _describing:
        msgspec.json.Decoder(kind)
        _described.add(kind)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A file: subclasses say which, in a field ``format``.

    Of a newer minor version entries that are not known are ignored; of this one or an older they are an error.
    """

    VERSION: ClassVar[tuple[int, int]] = (1, 0)

    version: tuple[int, int] = (1, 0)


class Summed(Document, frozen=True, kw_only=True):
    """A file that holds a sum of itself, as nothing else may name its digest."""

    sum: str = ""
    """xxh3-64 of the text without it."""

    def sealed(self) -> Self:
        """The same with its sum. Raises as :func:`encode`."""
        bare = encode(msgspec.structs.replace(self, sum=""))
        return msgspec.structs.replace(self, sum=xxhash.xxh3_64_hexdigest(bare))

    def encode(self) -> bytes:
        """The text of the file. Raises as :func:`encode`."""
        return encode(self.sealed())

    @classmethod
    def decode(cls, raw: bytes, path: StrPath) -> Self:
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


def parse(raw: bytes, max_depth: int = MAX_DEPTH) -> object:
    """The tree that a JSON text says.

    Raises:
        ValueError: the text is too long, not UTF-8 or not JSON; a key appears twice; a number is not finite or not an int64;
            lists and objects are nested deeper than ``max_depth``.
    """
    try:
        tree = msgspec.json.decode(raw)
        if _is_tame(raw, max_depth) and _IN_ORDER.encode(tree).encode() == raw:
            return tree
    except _REFUSALS:
        pass  # said below
    if len(raw) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes, got {len(raw)}")
    try:
        return _plain(json.loads(raw.decode(), object_pairs_hook=_unique), "$", max_depth)
    except RecursionError as error:
        raise ValueError(f"nested more than {max_depth} deep") from error


def parse_loosely(raw: bytes) -> object:
    """The tree that a JSON text of another program says, of any length: NaN, infinities and long integers are numbers in it, too.

    Raises ``ValueError``: the text is not UTF-8 or not JSON, a key appears twice, or it is nested too deep for Python.
    """
    try:
        return json.loads(raw.decode(), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def decode(raw: bytes, path: StrPath, kind: type[D]) -> D:
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


def encode(value: msgspec.Struct | Mapping[str, object]) -> bytes:
    """The text of a value: sorted keys, no spaces. Equal values have equal bytes.

    Raises:
        TypeError: something JSON has no word for, or a key that is not a string; names where it is.
        ValueError: a number that is not finite or not an int64, half a character, too deep, or longer than ``MAX_BYTES``.
    """
    try:
        raw = _text(value)
        kind = type(value) if isinstance(value, msgspec.Struct) else dict
        if kind not in _described:
            describe(kind)
        if _is_tame(raw, MAX_DEPTH) and msgspec.json.decode(raw, type=kind) == value:
            return raw
    except _REFUSALS:
        pass  # said below
    raw = _text(_plain(value, "$", MAX_DEPTH))
    if len(raw) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes of JSON, got {len(raw)}. Keep what is long in an array.")
    return raw


def copied(user: Mapping[str, object]) -> dict[str, object]:
    """The user's own state as it comes back from a document. Raises as :func:`encode`."""
    state = msgspec.json.decode(encode({"user": dict(user)}), type=dict[str, dict[str, object]])
    return state["user"]


def _text(value: object) -> bytes:
    return _SORTED.encode(msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value).encode()


def _is_tame(raw: bytes, max_depth: int) -> bool:
    """Whether a text is neither too long nor too deep, and all its integers are short."""
    if len(raw) > MAX_BYTES:
        return False
    without_strings = _STRINGS.sub(b"", raw)  # sums in them may have many digits in a row
    if _DIGITS.search(without_strings):
        return False
    brackets = without_strings.translate(_AS_LISTS, _NO_BRACKETS)
    for _ in range(max_depth):  # each round takes away the innermost ones
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _decode_same(raw: bytes, kind: type[D]) -> D | None:
    """The document of this version, or of an older minor one, whose text this is; None: there is none."""
    try:
        if kind not in _described:
            describe(kind)
        document = msgspec.json.decode(raw, type=kind)
        if (
            (kind.VERSION[0], 0) <= document.version <= kind.VERSION
            and _is_tame(raw, MAX_DEPTH)
            and _text(document) == raw
        ):
            return document
    except _REFUSALS:
        pass
    return None


def _decode_carefully(raw: bytes, path: StrPath, kind: type[D]) -> tuple[D, dict[str, object]]:
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
    major, minor = kind.VERSION
    if version[0] != major:
        raise IncompatibleCheckpoint(
            f"{path}: expected version {major}.{minor} or another {major}.x of {expected}, got {version[0]}.{version[1]}. "
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


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = sorted(key for key, _ in pairs)
        twice = next(key for key, following in itertools.pairwise(keys) if key == following)
        raise ValueError(f"the key {twice[:100]!r} appears twice")
    return result


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


def _plain(value: object, where: str, most: int, depth: int = 1) -> object:
    """The value as json takes it; what json would write but not read back as it was is refused, and what is too deep."""
    if isinstance(value, int):  # bools are ints
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{where}: expected a 64-bit integer, got one of {value.bit_length()} bits.")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: expected a finite number, got {value}.")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: expected text that is valid Unicode, got {value!a:.100}.") from error
    elif isinstance(value, msgspec.Struct | dict | list | tuple):
        if depth > most:
            raise ValueError(f"{where}: nested more than {most} deep.")
        return _container(value, where, most, depth + 1)
    elif value is not None:
        raise TypeError(
            f"{where}: expected None, a bool, number, string, list or dict, got {type(value).__name__}. "
            "Keep other things in arrays."
        )
    return value


def _container(value: _Container, where: str, most: int, depth: int) -> object:
    if isinstance(value, list | tuple):
        return [_plain(part, f"{where}[{i}]", most, depth) for i, part in enumerate(value)]
    if isinstance(value, msgspec.Struct):
        value = {name: part for name, part in msgspec.structs.asdict(value).items() if part is not msgspec.UNSET}
    plain = {}
    for key, part in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{where}: expected keys that are strings, got {key!r:.100}.")
        _plain(key, where, most)
        plain[key] = _plain(part, f"{where}.{key}", most, depth)
    return plain
