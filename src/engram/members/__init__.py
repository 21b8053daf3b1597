"""Ensembles: several buffers that are drawn from, and written to, as one."""

from engram.members.routing import WriterEnsemble
from engram.members.samplers import SamplerEnsemble
from engram.members.storages import StorageEnsemble

__all__ = ["SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]
