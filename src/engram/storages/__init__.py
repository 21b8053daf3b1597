"""Storages hold what is written."""

from engram.storages._base import Count, Rows, Storage, check_count
from engram.storages.list import ListStorage
from engram.storages.memmap import LazyMemmapStorage
from engram.storages.tensor import LazyTensorStorage, TensorStorage

__all__ = [
    "Count",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Rows",
    "Storage",
    "TensorStorage",
    "check_count",
]
