"""The choices of ``engram demo``. Imports nothing, so that ``engram --help`` starts quickly."""

from __future__ import annotations

SAMPLERS = ("prioritized", "uniform")
MOST_ACTORS = 64
