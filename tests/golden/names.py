"""The names that lie in files: whatever the code comes to call these things, files go on saying these."""

from engram.format import layout
from engram.store.indexes import INDEX_KINDS
from tests.golden.cases import DUMPS


def found():
    """Index kinds, files of a store, and by component the keys of its state."""
    keys = {}
    for case in DUMPS.values():
        with case.filled() as rb:
            for part, state in rb.state_dict().items():
                _add(keys, part, state)
    files = (value for name, value in vars(layout).items() if name.isupper() and isinstance(value, str))
    return {"index kinds": sorted(INDEX_KINDS), "files": sorted(files), "state": sorted(keys)}


def _add(keys, way, state):
    """Every way to an entry of nested dicts."""
    keys[way] = None
    if isinstance(state, dict):
        for key, entry in state.items():
            _add(keys, f"{way}/{key}", entry)
