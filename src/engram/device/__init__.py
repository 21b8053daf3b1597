"""Batches on the learner's device: read by itself, or copied through pinned memory."""
