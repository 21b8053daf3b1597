"""Who goes when the store is full: components that choose the rows which new ones replace."""

from engram.removers.ranked import FifoRemover, Lifo, LowestPriority, MaxTimesSampled, Removable, Remover, StalestFirst

__all__ = ["FifoRemover", "Lifo", "LowestPriority", "MaxTimesSampled", "Removable", "Remover", "StalestFirst"]
