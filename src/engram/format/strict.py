"""JSON that can be read one way only.

Python's reader keeps the last of two equal keys, takes NaN for a number and integers of any length; msgspec writes NaN as
``null``. Here all of that is refused. An integer is an int64: 64-bit sums are hex strings.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re

import msgspec

from engram._support import fork

_Container = msgspec.Struct | dict[object, object] | list[object] | tuple[object, ...]

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
_IN_ORDER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# Closed or not. Possessive: whatever the text, one pass over it.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
#: So many digits may be more than an int64.
_DIGITS = re.compile(rb"[0-9]{19}")
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
#: What readers and writers raise of a text or a value that is not as it must be.
REFUSALS = (ValueError, TypeError, RecursionError)


_describing = fork.lock()


@functools.cache
def describe(kind: object) -> None:
    """Let msgspec describe a class, as it would when the class is first read: two threads that do so at once crash it."""
    with _describing:
        msgspec.json.Decoder(kind)


def parse(raw: bytes, max_depth: int = MAX_DEPTH) -> object:
    """The tree that a JSON text says.

    Raises:
        ValueError: the text is too long, not UTF-8 or not JSON; a key appears twice; a number is not finite or not an int64;
            lists and objects are nested deeper than ``max_depth``.
    """
    try:
        tree = msgspec.json.decode(raw)
        if is_tame(raw, max_depth) and _IN_ORDER.encode(tree).encode() == raw:
            return tree
    except REFUSALS:
        pass  # said below
    if len(raw) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes, got {len(raw)}")
    try:
        return plain(json.loads(raw.decode(), object_pairs_hook=_unique), "$", max_depth)
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


def is_tame(raw: bytes, max_depth: int) -> bool:
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


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = sorted(key for key, _ in pairs)
        twice = next(key for key, following in itertools.pairwise(keys) if key == following)
        raise ValueError(f"the key {twice[:100]!r} appears twice")
    return result


def plain(value: object, where: str, most: int, depth: int = 1) -> object:
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
        return [plain(part, f"{where}[{i}]", most, depth) for i, part in enumerate(value)]
    if isinstance(value, msgspec.Struct):
        value = {name: part for name, part in msgspec.structs.asdict(value).items() if part is not msgspec.UNSET}
    entries = {}
    for key, part in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{where}: expected keys that are strings, got {key!r:.100}.")
        plain(key, where, most)
        entries[key] = plain(part, f"{where}.{key}", most, depth)
    return entries
