"""What the demo sets out to do. Imports nothing, so that the process that only starts others is there at once."""

from __future__ import annotations

__all__ = [
    "ALPHA",
    "AT_ONCE",
    "BATCH",
    "BETA",
    "CAPACITY",
    "DONE",
    "EPSILON",
    "FAILED",
    "INTERRUPTED",
    "LEARN_EVERY",
    "LEARN_FROM",
    "MOST_ACTORS",
    "PUBLISH_EVERY",
    "REPLACE",
    "SAMPLERS",
    "SOLVED",
    "WINDOW",
]

SOLVED = 195.0
"""Mean return of the last ``WINDOW`` episodes that ends training."""
WINDOW = 20
CAPACITY = 20_000
BATCH = 128
LEARN_FROM = 500
"""Rows before the first update."""
LEARN_EVERY = 2
"""Steps between two updates."""
EPSILON = (1.0, 0.05, 4_000)
"""First value, last value, steps between them."""

SAMPLERS = ("uniform", "prioritized")
ALPHA = 0.6
"""Of prioritized replay: how far priorities count."""
BETA = (0.4, 1.0)
"""Of prioritized replay: how far weights correct for it, at the first step and at the last."""

MOST_ACTORS = 64
AT_ONCE = 8
"""Steps that an actor may make before it hears from the learner again."""
PUBLISH_EVERY = 10
"""Updates between two policies for the actors."""

DONE, FAILED, REPLACE, INTERRUPTED = 0, 1, 10, 130
"""Exit codes of a training process."""
