"""Ensembles: several buffers that are drawn from, and written to, as one."""

from engram.members.components import SamplerEnsemble, StorageEnsemble, WriterEnsemble

__all__ = ["SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]
