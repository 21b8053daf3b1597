"""Several stores as one buffer: which of them draws which rows of a batch, and where rows go.

Nothing is imported here, so that pyarrow is loaded when a buffer connects, and not before.
"""
