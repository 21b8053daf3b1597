"""Data sets in and out: episodes of other programs' files in a store's directory, and back.

Every ``from_…`` writes whole episodes, notes in the directory how many there are, and goes on there if it was killed. It returns the
buffer over the finished store, opened read-only. Every ``to_…`` reads a store and writes a file or folder that appears when it is whole.
"""

from engram.datasets.libraries import from_lerobot, from_minari, from_torchrl, to_lerobot, to_minari, to_torchrl
from engram.datasets.tables import from_hdf5, from_lance, from_numpy, from_parquet, from_sb3, to_hdf5, to_parquet
from engram.datasets.videos import VideoFrames

__all__ = [
    "VideoFrames",
    "from_hdf5",
    "from_lance",
    "from_lerobot",
    "from_minari",
    "from_numpy",
    "from_parquet",
    "from_sb3",
    "from_torchrl",
    "to_hdf5",
    "to_lerobot",
    "to_minari",
    "to_parquet",
    "to_torchrl",
]
