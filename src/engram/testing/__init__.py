"""Contracts for components: a test class derives from one, makes its component, and inherits the tests.

>>> from engram import RandomSampler
>>> from engram.testing import SamplerContract
>>> class TestRandomSampler(SamplerContract):
...     def make(self, capacity):
...         return RandomSampler()
>>> TestRandomSampler().run_all()

The tests are methods called ``test_…`` without parameters, so pytest and other runners find them. Nothing here imports pytest.
"""

from engram.testing.contract import Contract
from engram.testing.row_storages import RowStorageContract, StorageContract
from engram.testing.samplers import SamplerContract, TransformContract, WriterContract

__all__ = [
    "Contract",
    "RowStorageContract",
    "SamplerContract",
    "StorageContract",
    "TransformContract",
    "WriterContract",
]
