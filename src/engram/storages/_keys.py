"""Keys of dicts in rows: strings and ints. Paths and messages call an int by its digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.format.layout import SINGLE
from engram.format.schema import INTEGER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engram.format.schema import Node

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
#: Of these the value alone tells a key: ``1 == True == 1.0``.
_PLAIN = frozenset((str, int))


def by_name(entries: Iterable[tuple[object, object]], path: tuple[str, ...], call: str) -> dict[str, object]:
    """Entries of a container by the names that they have in paths.

    Raises:
        TypeError: a key that is neither a string nor an int of 64 bits, or two keys of one name, such as ``0`` and ``"0"``.
    """
    named: dict[str, object] = {}
    for key, value in entries:
        if not isinstance(key, str):
            _check_int(key, path, call)
        name = key if isinstance(key, str) else str(key)
        if name in named:
            raise TypeError(
                f"{call}: {at(path)}: expected either {name!r} or {name} as a key, got both: their fields would have one name. "
                "Rename one of them."
            )
        named[name] = value
    return named


def _check_int(key: object, path: tuple[str, ...], call: str) -> None:
    """Raise ``TypeError`` for a key that is no int, or more than one: a bool, a member of an enum, an int beyond 64 bits."""
    is_int = isinstance(key, int) and repr(key).removeprefix("-").isdecimal()
    if not is_int:
        got = f"{key!r:.60}, a {type(key).__name__}"
    elif not _LEAST <= key <= _MOST or not INTEGER.fullmatch(str(key)):  # type: ignore[operator]
        got = f"one of {int(key).bit_length()} bits"  # type: ignore[call-overload]
    else:
        return
    raise TypeError(f"{call}: {at(path)}: expected keys that are strings or ints of 64 bits, got {got}. Rename it.")


def taken_by_key(node: Node, entries: dict[str | int, object]) -> dict[str, object]:
    """Entries of a dict, by name, under the keys of a node; None where there is none. Empty: a key is no plain string or int."""
    if not _PLAIN.issuperset(map(type, entries)):
        return {}
    return {name: entries.get(key) for name, key in zip(node.children, node.keys, strict=True)}


def at(path: tuple[str, ...]) -> str:
    """Where in the data, for a message."""
    if not path or path == (SINGLE,):
        return "data"
    return f"field {path[0]!r}" if len(path) == 1 else f"field {path}"
