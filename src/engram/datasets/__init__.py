"""Data sets in and out: episodes of other programs' files in a store's directory, and back.

Every ``from_…`` writes whole episodes, notes in the directory how many there are, and goes on there if it was killed. It returns the
buffer over the finished store, opened read-only. Every ``to_…`` reads a store and writes a file or folder that appears when it is whole.
"""

from engram.datasets.arrays import from_hdf5, from_numpy, to_hdf5

__all__ = ["from_hdf5", "from_numpy", "to_hdf5"]
