"""Ensembles: several buffers that are drawn from, and written to, as one."""

from engram.ensembles.routing import WriterEnsemble
from engram.ensembles.samplers import SamplerEnsemble
from engram.ensembles.storages import StorageEnsemble

__all__ = ["SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]
