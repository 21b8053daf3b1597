"""How many functions of the package a trip calls, in all threads, counted in a process of its own.

Functions that poll depend on time, and comprehensions on the version of Python, so neither counts. Two threads that read one file
may both open it, so the fewest calls of several trips count.
"""

import functools
import json
from pathlib import Path

from tests import fresh

_PROGRAM = Path(__file__).with_name("trips.py")


@functools.cache
def counted():
    """By trip: how many calls, and those of each function, most first."""
    return json.loads(fresh.run(_PROGRAM.read_text()))
