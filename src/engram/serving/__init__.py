"""Serving a store: a process of its own, which has nothing but the open store."""

from engram.serving.process import serve

__all__ = ["serve"]
