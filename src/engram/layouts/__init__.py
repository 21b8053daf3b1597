"""Layouts of saved rows that hold each observation once, as TorchRL has them, and what saves a storage in them."""

from engram.layouts.checkpointers import (
    CompressedListStorageCheckpointer,
    FlatStorageCheckpointer,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    StorageCheckpointerBase,
    StorageEnsembleCheckpointer,
    TensorStorageCheckpointer,
)
from engram.layouts.hdf5 import H5Combine, H5Split, H5StorageCheckpointer
from engram.layouts.hooks import Flat2TED, Nested2TED, TED2Flat, TED2Nested

__all__ = [
    "CompressedListStorageCheckpointer",
    "Flat2TED",
    "FlatStorageCheckpointer",
    "H5Combine",
    "H5Split",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "StorageCheckpointerBase",
    "StorageEnsembleCheckpointer",
    "TED2Flat",
    "TED2Nested",
    "TensorStorageCheckpointer",
]
