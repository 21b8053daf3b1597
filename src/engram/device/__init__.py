"""Batches on the learner's device: pinned memory, and the loader."""
