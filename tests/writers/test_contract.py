"""Every writer keeps the contract of writers."""

import copy
import pickle

from engram import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    WritePlan,
)
from engram.testing import WriterContract


class Contract(WriterContract):
    copies = (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)))


class TestRoundRobinWriter(Contract):
    def make(self, capacity):
        return RoundRobinWriter()


class TestTensorDictRoundRobinWriter(Contract):
    def make(self, capacity):
        return TensorDictRoundRobinWriter(track_generations=True)


class TestTensorDictMaxValueWriter(Contract):
    def make(self, capacity):
        return TensorDictMaxValueWriter("step")


class TestTensorDictMaxValueWriterOfRejectedRows(Contract):
    """Later steps are worse."""

    def make(self, capacity):
        return TensorDictMaxValueWriter("score")

    def rows(self, first, n):
        data = super().rows(first, n)
        return data.set("score", -data["step"].float())


class TestImmutableDatasetWriter(Contract):
    read_only = True

    def make(self, capacity):
        return ImmutableDatasetWriter()


class FromTheEnd:
    """A writer of one method: rows by their number of writes, from the last one down."""

    def place(self, extent, n, lane, data):
        return WritePlan(rows=(extent.capacity - 1 - data["step"]) % extent.capacity)


class TestOneMethod(Contract):
    def make(self, capacity):
        return FromTheEnd()
