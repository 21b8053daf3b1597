"""Words of messages."""

from __future__ import annotations

import sys
import warnings

__all__ = ["count", "warn"]


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> from engram._words import count
    >>> count(1, "episode"), count(2, "step")
    ('1 episode', '2 steps')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def warn(message: str) -> None:
    """Warn, and point to the line outside of this package that led here, through however many calls."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - what warnings count
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
