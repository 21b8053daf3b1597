"""Writers say where rows go. The cursors belong to the store."""

from engram.writers._base import declared
from engram.writers.max_value import TensorDictMaxValueWriter
from engram.writers.removing import RemovingWriter
from engram.writers.round_robin import ImmutableDatasetWriter, RoundRobinWriter, TensorDictRoundRobinWriter

__all__ = [
    "ImmutableDatasetWriter",
    "RemovingWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "declared",
]
