"""Paths of fields: how users name an entry of a nested row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

FieldPath: TypeAlias = tuple[str, ...]
#: The entry of a batch of windows that transforms find beside its fields: bool ``[*batch, 1]``, true at the last step of each window.
#: No field has its name.
WINDOW_ENDS = ".engram"
#: Flags that end a trajectory, by the names that environments give them.
DEFAULT_DONE_KEYS = ("done", "truncated", "terminated")


def checked_path(key: object, what: str) -> FieldPath:
    """A user's key as a path: ints, which keys of dicts may be, by their digits.

    Raises ``TypeError`` unless it is a string or an int, or a tuple or list of them.
    """
    parts = tuple(key) if isinstance(key, tuple | list) else (key,)
    if not parts or not all(isinstance(part, str | int) and not isinstance(part, bool) for part in parts):
        raise TypeError(f"{what}: expected a string or a tuple of strings, got {key!r}.")
    return tuple(map(str, parts))


def as_path(key: object, what: str) -> FieldPath | None:
    """As :func:`checked_path`; None stays None."""
    return None if key is None else checked_path(key, what)


def checked_paths(keys: object, what: str, *, empty: bool = False) -> tuple[FieldPath, ...]:
    """A list of keys as paths. Raises ``TypeError`` unless it is a list of keys, which may be ``empty`` or not."""
    if not isinstance(keys, tuple | list) or not (keys or empty):
        raise TypeError(f"{what}: expected a list of keys, got {keys!r}.")
    return tuple(checked_path(key, what) for key in keys)


def as_paths(keys: object, what: str, *, empty: bool = False) -> tuple[FieldPath, ...] | None:
    """As :func:`checked_paths`; None as it is."""
    return None if keys is None else checked_paths(keys, what, empty=empty)


def public(path: Sequence[str]) -> str | FieldPath:
    """A path as users write it: a string if it has one part."""
    return path[0] if len(path) == 1 else tuple(path)


def nested(values: Mapping[FieldPath, object]) -> dict[str, object]:
    """Values by path as dicts in each other."""
    root: dict[str, object] = {}
    for path, value in values.items():
        inside = root
        for key in path[:-1]:
            inside = inside.setdefault(key, {})  # type: ignore[assignment] # no path of a value begins another one
        inside[path[-1]] = value
    return root


def plain(value: object) -> object:
    """A path, or a tuple of them, as JSON values; anything else as it is."""
    if not isinstance(value, tuple):
        return value
    if len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return [plain(part) for part in value]
