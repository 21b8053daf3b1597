"""The state of a storage's priorities, one entry per name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram._support.state import check_keys, typed
from engram.store import check_index_name
from engram.store.priorities import KIND, NAMES, check_priorities

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from engram.store.priorities import PriorityConfig, PriorityIndex


def saved_priorities(
    indexes: Mapping[str, PriorityIndex],
    without: Collection[tuple[str, str]],
    rows: int | None = None,
    room: Mapping[str, Tensor] | None = None,
) -> dict[str, dict[str, object]]:
    """The states of priorities, by name. Copies.

    Args:
        indexes: by name.
        without: names and kinds of those that are left out.
        rows: whose leaves; default all.
        room: for leaves, by name.
    """
    return {
        name: index.state(rows, (room or {}).get(name))
        for name, index in sorted(indexes.items())
        if (name, KIND) not in without
    }


def checked_priorities(
    state: Any, indexes: Mapping[str, PriorityIndex], rows: int, where: str
) -> dict[str, tuple[PriorityConfig, dict[str, object]]]:
    """What to make each index with, and its state. Raises: as :func:`check_priorities`."""
    checked = {}
    for name in check_names(state, where):
        entries = typed(state, name, dict, where)
        check_keys(entries, NAMES, f"{where}: {name!r}")
        known = indexes.get(name)
        config = None if known is None else known.config
        checked[name] = (check_priorities(entries, config, rows, f"{where}: {name!r}"), entries)
    return checked


def check_names(state: object, where: str) -> list[str]:
    """The names in a dict of indexes. Raises ``TypeError``, ``ValueError``: it is none, or one is no name."""
    if not isinstance(state, dict):
        raise TypeError(f"{where}: expected a dict, got a {type(state).__name__}.")
    for name in state:
        check_index_name(name, where)
    return list(state)
