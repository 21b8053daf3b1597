"""A series of checkpoints of one buffer, of one rank or of many."""
