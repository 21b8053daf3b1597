"""Data sets in and out: episodes of other programs' files in a store's directory, and back.

Every ``from_…`` writes whole episodes, notes in the directory how many there are, and goes on there if it was killed. It returns the
buffer over the finished store, opened read-only. Every ``to_…`` reads a store and writes a file or folder that appears when it is whole.
"""

from engram.datasets.arrays import from_hdf5, from_numpy, to_hdf5
from engram.datasets.minari import from_minari, to_minari
from engram.datasets.parquet import from_parquet, to_parquet
from engram.datasets.sb3 import from_sb3
from engram.datasets.torchrl import from_torchrl, to_torchrl

__all__ = [
    "from_hdf5",
    "from_minari",
    "from_numpy",
    "from_parquet",
    "from_sb3",
    "from_torchrl",
    "to_hdf5",
    "to_minari",
    "to_parquet",
    "to_torchrl",
]
