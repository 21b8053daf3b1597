"""Limits of how fast rows come and go: what they are, and where calls wait for them."""

from engram.limits.gate import WAIT_S, Gate, Room, checked_timeout, limit_stats
from engram.limits.rules import Limit, MaxInFlight, MinSize, Rules, SamplesPerInsert, rules_of

__all__ = [
    "WAIT_S",
    "Gate",
    "Limit",
    "MaxInFlight",
    "MinSize",
    "Room",
    "Rules",
    "SamplesPerInsert",
    "checked_timeout",
    "limit_stats",
    "rules_of",
]
