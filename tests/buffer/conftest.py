"""Fixtures of several files here."""

from tests.buffer.every_storage import storage
from tests.buffer.prefetched import threads, who

__all__ = ["storage", "threads", "who"]
