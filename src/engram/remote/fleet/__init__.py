"""Several stores as one buffer: which of them draws which rows of a batch, and where rows go.

Nothing is imported here, so that pyarrow is loaded when a buffer connects, and not before.
"""


def check_missing(missing: object, call: str = "connect") -> None:
    """Raise ``ValueError``: nothing that could be done about a store whose servers are gone."""
    if missing not in ("skip", "wait"):
        raise ValueError(f"{call}: missing: expected 'skip' or 'wait', got {missing!r}.")
