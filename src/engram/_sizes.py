"""What the core says of sizes, for commands that do not wait for torch, which :mod:`engram._native` imports."""

from engram._core import priority_bytes

__all__ = ["priority_bytes"]
