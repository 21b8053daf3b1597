"""Storages hold what is written."""

from engram.storages._base import Count, Rows, Storage, check_count
from engram.storages._columns import coordinates
from engram.storages._structure import leading_size
from engram.storages._types import Dtypes, checked_dtypes
from engram.storages.compressed import CompressedListStorage, LazyStackStorage
from engram.storages.list import ListStorage
from engram.storages.memmap import LazyMemmapStorage
from engram.storages.own import METHODS, DefaultStorage, LazyTensorStorage, OwnStorage, adapted
from engram.storages.own import GivenStorage as GivenStorage
from engram.storages.tensor import TensorStorage

__all__ = [
    "METHODS",
    "CompressedListStorage",
    "Count",
    "DefaultStorage",
    "Dtypes",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "OwnStorage",
    "Rows",
    "Storage",
    "TensorStorage",
    "adapted",
    "check_count",
    "checked_dtypes",
    "coordinates",
    "leading_size",
]
