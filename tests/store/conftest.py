"""Fixtures of several files here."""

from tests.store.stores import folder, template

__all__ = ["folder", "template"]
