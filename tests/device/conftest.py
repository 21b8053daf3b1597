"""Imitated devices, and a registry of one's own."""

import pytest

from engram.store.device.accelerator import Registry
from tests.device.imitation import Imitation


@pytest.fixture
def device():
    made = Imitation()
    yield made
    assert made.faults == []


@pytest.fixture
def held():
    """Its stream is held back."""
    made = Imitation(held={"MainThread"})
    yield made
    made.release()
    assert made.faults == []


@pytest.fixture
def registry():
    return Registry(available=lambda: 1 << 40)
