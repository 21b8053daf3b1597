"""Checkpoints: the state of a buffer's components, in and out of folders."""
