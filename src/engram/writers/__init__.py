"""Writers say where rows go. The cursors belong to the store."""

from engram.writers._base import ImmutableDatasetWriter, RoundRobinWriter, TensorDictRoundRobinWriter, declared
from engram.writers.max_value import RemovingWriter, TensorDictMaxValueWriter

__all__ = [
    "ImmutableDatasetWriter",
    "RemovingWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "declared",
]
