"""Fixtures of several files here."""

from tests.migrate.torchrl_dumps import full, plain, torchrl

__all__ = ["full", "plain", "torchrl"]
