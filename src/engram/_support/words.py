"""Words of messages."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> from engram._support.words import count
    >>> count(1, "episode"), count(20_000, "step")
    ('1 episode', '20,000 steps')
    """
    several = f"{noun.removesuffix('y')}ies" if noun.endswith("ory") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else several}"


def format_wait(seconds: float) -> str:
    """How long something was waited for, to follow a verb; nothing, if it was not."""
    return f" within {seconds:g} s" if seconds else ""


def format_number(value: object) -> str:
    """A number for people, as everywhere: thousands apart, six figures of what is no whole number. Anything else as ``str`` has it.

    >>> from engram._support.words import format_number
    >>> format_number(100_000), format_number(2_500_000.0), format_number(0.1234567)
    ('100,000', '2,500,000', '0.123457')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.6g}"


def format_size(nbytes: int) -> str:
    """A size for people, in three figures.

    >>> from engram._support.words import format_size
    >>> format_size(40), format_size(28_224_000)
    ('40 B', '28.2 MB')
    """
    size, units = float(nbytes), ["EB", "PB", "TB", "GB", "MB", "kB", "B"]
    while size >= 999.5 and len(units) > 1:  # 1000 in three figures
        size, _ = size / 1000, units.pop()
    return f"{size:,.3g} {units[-1]}"


def format_share(share: float) -> str:
    """A share for people, in three figures.

    >>> from engram._support.words import format_share
    >>> format_share(0.01), format_share(0.8684), format_share(1)
    ('1 %', '86.8 %', '100 %')
    """
    return f"{100 * share:.3g} %"


def no_space(nbytes: int, free: int, advice: str = "Use fewer rows, a smaller dtype or another folder") -> str:
    """What to say where so many bytes are not there.

    >>> from engram._support.words import no_space
    >>> no_space(3 << 40, 5 << 29, "Use fewer rows")
    'expected 3.3 TB, got 2.68 GB that are free. Use fewer rows; engram.plan(row, capacity) says what they take'
    """
    sizes = f"expected {format_size(nbytes)}, got {format_size(free)}"
    return f"{sizes} that are free. {advice}; engram.plan(row, capacity) says what they take"


@contextlib.contextmanager
def raise_as(
    kind: Callable[[str], Exception], where: object, caught: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Raise what the block raises as another error, whose message says first where that was.

    >>> from engram._support.words import raise_as
    >>> with raise_as(TypeError, "extend: lane"):
    ...     int("seven")
    Traceback (most recent call last):
    ...
    TypeError: extend: lane: invalid literal for int() with base 10: 'seven'.

    Args:
        kind: the class of the error that is raised.
        where: a file, a call or an argument, before the colon.
        caught: the classes of errors that are raised as another one.
    """
    try:
        yield
    except caught as error:
        raise kind(f"{where}: {str(error).removesuffix('.')}.") from error


def warn(message: str) -> None:
    """Warn, and point to the line outside of this package that led here, through however many calls."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - what warnings count
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "engram":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_of_mixed(who: str) -> None:
    """Warn of what ``mixed()`` of a table has found: processes write to one lane by turns, and end flags alone tell trajectories."""
    warn(
        f"sample: {who}: several processes write to one lane, and end flags alone tell trajectories: windows and returns mix their "
        "steps. Give each writer a lane of its own (lanes=n, and rb.on_lane(k)), or store an id of the trajectory (traj_key)."
    )
