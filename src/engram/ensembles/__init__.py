"""Ensembles: several buffers that are drawn from, and written to, as one."""

from engram.ensembles.samplers import SamplerEnsemble
from engram.ensembles.storages import StorageEnsemble
from engram.ensembles.writers import WriterEnsemble

__all__ = ["SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]
