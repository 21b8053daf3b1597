"""Storages hold what is written."""

from engram.storages._base import Storage, check_count
from engram.storages._columns import coordinates
from engram.storages._dtypes import Dtypes, checked_dtypes
from engram.storages._port import Count, Rows
from engram.storages._structure import leading_size
from engram.storages.compressed import CompressedListStorage, LazyStackStorage
from engram.storages.lazy import LazyTensorStorage
from engram.storages.list import ListStorage
from engram.storages.memmap import LazyMemmapStorage
from engram.storages.tensor import TensorStorage

__all__ = [
    "CompressedListStorage",
    "Count",
    "Dtypes",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Rows",
    "Storage",
    "TensorStorage",
    "check_count",
    "checked_dtypes",
    "coordinates",
    "leading_size",
]
