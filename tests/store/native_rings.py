"""Until the extension has rings: what it checks of their control block, and nothing else. Then this file goes, with its imports."""

import ctypes

import pytest

from engram import _core
from engram._support import native

_MAGIC = b"engring\1"


def _control_bytes(lanes, groups):
    return 4096 + 64 * lanes * groups


def _format(address, nbytes, capacity, lanes, groups):
    assert nbytes == _control_bytes(lanes, len(groups))
    ctypes.memmove(address, _MAGIC, 8)


def _use(core, address, nbytes, groups):
    assert nbytes == _control_bytes(core.lanes, len(groups))
    if ctypes.string_at(address, 8) != _MAGIC:
        raise ValueError("not a control block of ragged fields")


@pytest.fixture(autouse=True)
def native_rings(monkeypatch):
    if not hasattr(_core, "ragged_control_bytes"):
        for module in (_core, native):
            monkeypatch.setattr(module, "ragged_control_bytes", _control_bytes, raising=False)
            monkeypatch.setattr(module, "format_ragged", _format, raising=False)
        monkeypatch.setattr(_core.Store, "use_ragged", _use, raising=False)
