"""The choices of ``engram demo``. Imports nothing, so that ``engram --help`` starts quickly."""

from __future__ import annotations

__all__ = ["MOST_ACTORS", "SAMPLERS"]

SAMPLERS = ("prioritized", "uniform")
MOST_ACTORS = 64
