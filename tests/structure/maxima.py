"""Maxima of figures and of calls: ``maxima.json``. They only fall.

A feature raises one kind by hand: the methods of the facade, which are doors of one line.
"""

import json
from pathlib import Path

from tests.structure import calls, figures

FILE = Path(__file__).with_name("maxima.json")


def found():
    """By kind and name: the figure, and where it is."""
    trips = {name: (count, "") for name, (count, _) in calls.counted().items()}
    return {"figures": figures.measured(), "calls": trips}


def kept():
    return json.loads(FILE.read_text())


def tightened(maxima, measured):
    """Maxima lowered to what was measured, which is the first one of a figure that has none."""
    return {
        kind: {name: min(value, maxima.get(kind, {}).get(name, value)) for name, (value, _) in of.items()}
        for kind, of in measured.items()
    }


def lower(maxima, measured):
    """What could be lowered, a line each."""
    for kind, of in maxima.items():
        for name, maximum in of.items():
            if name in measured[kind] and measured[kind][name][0] < maximum:
                yield f"{name}: {maximum} → {measured[kind][name][0]}"


def write(maxima):
    FILE.write_text(json.dumps(maxima, indent=1) + "\n")
