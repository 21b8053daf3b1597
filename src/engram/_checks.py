"""Checks of arguments."""

from __future__ import annotations


def check_count(what: str, value: object, noun: str = "", *, least: int = 1) -> int:
    """A number of things. Raises ``TypeError``: it is no int. ``ValueError``: it is below ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what}: expected an int, got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{what}: expected at least {f'{least} {noun}'.strip()}, got {value}.")
    return value
