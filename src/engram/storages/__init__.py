"""Storages hold what is written."""

from engram.storages._base import Rows, Storage
from engram.storages.list import ListStorage
from engram.storages.memmap import LazyMemmapStorage
from engram.storages.tensor import LazyTensorStorage, TensorStorage

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Rows", "Storage", "TensorStorage"]
