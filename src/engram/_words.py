"""Words of messages."""

from __future__ import annotations

__all__ = ["count"]


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> from engram._words import count
    >>> count(1, "episode"), count(2, "step")
    ('1 episode', '2 steps')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
