"""Words of messages."""

from __future__ import annotations

import sys
import warnings


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> from engram._words import count
    >>> count(1, "episode"), count(2, "step")
    ('1 episode', '2 steps')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def said_wait(seconds: float) -> str:
    """How long something was waited for, to follow a verb; nothing, if it was not."""
    return f" within {seconds:g} s" if seconds else ""


def said_bytes(nbytes: int) -> str:
    """A size for people, in bytes where it would be 0.000 MB.

    >>> from engram._words import said_bytes
    >>> said_bytes(40), said_bytes(28_224_000)
    ('40 bytes', '28.224 MB')
    """
    return f"{nbytes / 1e6:.3f} MB" if nbytes >= 1000 else count(nbytes, "byte")


def warn(message: str) -> None:
    """Warn, and point to the line outside of this package that led here, through however many calls."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - what warnings count
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_of_mixed(who: str) -> None:
    """Warn of what ``mixed()`` of a table has found: processes write to one lane by turns, and end flags alone tell trajectories."""
    warn(
        f"sample: {who}: several processes write to one lane, and end flags alone tell trajectories: windows and returns mix their "
        "steps. Give each writer a lane of its own (lanes=n, and rb.on_lane(k)), or store an id of the trajectory (traj_key)."
    )
