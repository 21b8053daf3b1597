"""A checkpoint of some ranks and sizes loaded by others."""
