"""Stores that a device reads. Without one the device is the CPU, and kernels run in Triton's interpreter: tests/conftest.py."""

import pytest

from tests.device import interpreted

pytest.importorskip("triton", reason="the kernels are Triton's")
interpreted.patch_once()
