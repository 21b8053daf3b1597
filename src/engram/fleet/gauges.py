"""Numbers of several stores as those of one: sums, means over their rows, and the worst of what does not add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engram.remote.commands import State

_SUMS = ("bytes_ram", "bytes_disk", "sample_count", "add_per_s", "sample_per_s")
#: Of which the largest is the worst, or the largest of all rows.
_LARGEST = ("sample_wait_ms_p50", "sample_wait_ms_p99", "checkpoint_age_s", "age_p99", "priority_max")
#: Shares and means, which rows of all stores count in alike.
_MEANS = ("age_mean", "never_sampled_frac", "priority_mean")
#: What a store need not have to be left out: no call has waited there.
_WHERE_KNOWN = ("sample_wait_ms_p50", "sample_wait_ms_p99")
#: What a store without rows lacks.
_OF_ROWS = ("age_p99", "priority_max", *_MEANS)


def combined(stores: Sequence[tuple[State, dict[str, float]]]) -> dict[str, float]:
    """What ``RemoteStorage.gauges`` says of each of these stores, as of one store with all their rows.

    Sizes, counts and rates are summed. Means are those of all rows. Of waits, of the age of the last checkpoint and of ``age_p99``, the
    worst store decides. ``priority_ess`` is that of draws which choose a store by its mass, as a fleet does. A number is not there if
    a store that answers does not know it; so nothing is, if one has a server of an older engram.
    """
    if not stores or not all(gauges for _, gauges in stores):
        return {}
    found = {name: value for name in (*_SUMS, *_LARGEST, *_MEANS) for value in _one(name, stores)}
    found |= {"replay_ratio": _ratio(stores), "usage_counted": min(gauges["usage_counted"] for _, gauges in stores)}
    effective = _effective(stores)
    return found if effective is None else found | {"priority_ess": effective}


def _one(name: str, stores: Sequence[tuple[State, dict[str, float]]]) -> Iterator[float]:
    """The number of all stores, or nothing."""
    asked = [(state.size, gauges.get(name)) for state, gauges in stores if state.size or name not in _OF_ROWS]
    known = [(size, value) for size, value in asked if value is not None]
    if not known or (len(known) < len(asked) and name not in _WHERE_KNOWN):
        return
    values = [value for _, value in known]
    if name in _MEANS:
        yield sum(size * value for size, value in known) / sum(size for size, _ in known)
    else:
        yield sum(values) if name in _SUMS else max(values)


def _ratio(stores: Sequence[tuple[State, dict[str, float]]]) -> float:
    """Rows sampled for each row inserted. Of a store that was never sampled, all rows written count as inserted."""
    inserted = (
        gauges["sample_count"] / gauges["replay_ratio"] if gauges["replay_ratio"] else state.write_count
        for state, gauges in stores
    )
    return sum(gauges["sample_count"] for _, gauges in stores) / max(sum(inserted), 1)


def _effective(stores: Sequence[tuple[State, dict[str, float]]]) -> float | None:
    """Of rows with leaves ``p``: ``(sum p)² / sum p²``. Of each store the first sum is its mass. None: not all stores say it."""
    whole = squares = 0.0
    for state, gauges in stores:
        if not state.size:
            continue
        if state.mass is None or "priority_ess" not in gauges:
            return None
        whole += state.mass.total
        if gauges["priority_ess"]:
            squares += state.mass.total**2 / gauges["priority_ess"]
    return whole**2 / squares if squares else None
