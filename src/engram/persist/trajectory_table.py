"""The trajectories of a store at one moment, as a checkpoint's table has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engram.format.tables import HAS_FIRST, HAS_LAST, OPEN, TRUNCATED

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

#: Rows whose fields are looked at together.
_PIECE = 1 << 18

#: Kinds of trajectories, by which ends they still have (checkpoint format, "totals").
KINDS = ("complete", "open", "headless", "both", "mid", "orphan")


class Marks(NamedTuple):
    """What ``n`` rows say of where trajectories begin and end. None: no field says it."""

    ids: NDArray[np.signedinteger] | None = None
    """``[n, words]``: of another trajectory where other words stand."""
    ends: NDArray[np.bool_] | None = None
    """``[n]``: the last step of its trajectory."""
    cut: NDArray[np.bool_] | None = None
    """``[n]``: the last step because the trajectory was cut short."""
    starts: NDArray[np.bool_] | None = None
    """``[n]``: the first step of its trajectory."""


def find_runs(
    lanes: NDArray[np.int64],
    numbers: NDArray[np.int64],
    marks: Callable[[NDArray[np.int64]], Marks],
    *,
    lane_length: int,
    columns: int = 1,
    piece: int = _PIECE,
) -> NDArray[np.int64]:
    """Live steps that belong together, of all lanes.

    Args:
        lanes: int64 ``[L, 2]`` or wider: position of each lane's next step, and its live rows.
        numbers: int64 ticket numbers of all rows up to the last live one; 0 for a row that holds nothing.
        marks: what rows int64 ``[n]`` say.
        lane_length: rows of a lane.
        columns: of the only lane (``ndim > 1``), each of which has runs of its own.
        piece: rows that are asked for together.

    Returns:
        int64 ``[K, 5]``: lane, position of the first step, position behind the last one, time of the end, flags; by lane and
        position. With columns, positions step by their number, and runs of different columns lie between each other. Rows that
        were written by number, ahead of the cursor, lie before position 0.

    Cost: O(rows): about 50 ns and 5 bytes each.
    """
    found = [
        _track(lane, int(position), int(live), lane_length, column, columns, numbers, marks, piece)
        for lane, (position, live) in enumerate(lanes[:, :2])
        for column in range(columns)
        if live
    ]
    runs = np.concatenate(found) if found else np.empty((0, 5), np.int64)
    return runs if columns == 1 else runs[np.lexsort((runs[:, 1], runs[:, 0]))]


def _track(
    lane: int,
    position: int,
    live: int,
    length: int,
    column: int,
    columns: int,
    numbers: NDArray[np.int64],
    marks: Callable[[NDArray[np.int64]], Marks],
    piece: int,
) -> NDArray[np.int64]:
    """The runs of a lane, or of one of its columns."""
    # The oldest step lies at the seam; where the cursor has not come yet, rows that were written by number are a lap older.
    steps, seam = live // columns, position % length // columns
    row = np.concatenate([np.arange(seam, steps), np.arange(seam)])
    row *= columns
    row += lane * length + column
    there = numbers[row] != 0
    changes, ends, cut, starts = (np.zeros(steps, bool) for _ in range(4))
    knows_starts = knows_ends = False
    before: Marks | None = None
    for begin in range(0, steps, piece):
        at = slice(begin, min(begin + piece, steps))
        said = marks(row[at])
        if said.ids is not None:
            changes[at][1:] = (said.ids[1:] != said.ids[:-1]).any(1)
            if before is not None and before.ids is not None:
                changes[begin] = bool((said.ids[0] != before.ids[-1]).any())
        for flags, values in ((ends, said.ends), (cut, said.cut), (starts, said.starts)):
            if values is not None:
                flags[at] = values
        knows_starts, knows_ends = said.starts is not None, said.ends is not None
        before = said
    follows = np.zeros(steps, bool)  # behind a live step of the same track
    follows[1:] = there[:-1]
    over = np.zeros(steps, bool)  # of the step before: an end that says so, or another trajectory's step behind it
    over[1:] = ends[:-1] | changes[1:]
    borders = ~there | ~follows | over | starts
    first = (borders & there).nonzero()[0]
    every = np.append(borders.nonzero()[0], steps)
    end = every[every.searchsorted(first, "right")]
    last = end - 1
    # Where no field marks ends, a row that holds nothing does as well as another's step: it was left there, or its writer died.
    ended = over & there if knows_ends else (over & there) | ~there
    has_last = ends[last] | np.append(ended, False)[end]
    from_the_beginning = position == live
    has_first = starts[first] if knows_starts else np.where(first == 0, from_the_beginning, follows[first])
    flags = (
        HAS_FIRST * has_first
        + HAS_LAST * has_last
        + TRUNCATED * (cut[last] & ends[last])
        + OPEN * (~has_last & (end == steps))
    )
    time = np.minimum.accumulate(numbers[row[last]][::-1])[::-1]
    place = position - live + column
    return np.stack([np.full(len(first), lane), place + first * columns, place + end * columns, time, flags], 1)


def kinds_of(runs: NDArray[np.int64], columns: int = 1) -> NDArray[np.int64]:
    """int64 ``[K]``: for each run of a table which of the :data:`KINDS` it is."""
    lane, begin, _, _, flags = runs.T
    order = np.lexsort((begin, begin % columns, lane))
    track = np.stack([lane, begin % columns])[:, order]
    oldest = np.ones(len(runs), bool)  # of its lane, or of its column
    oldest[order[1:]] = (track[:, 1:] != track[:, :-1]).any(0)
    first, last, is_open = (flags & bit != 0 for bit in (HAS_FIRST, HAS_LAST, OPEN))
    members = (
        first & last,
        first & is_open,
        ~first & last & oldest,
        ~first & is_open & oldest,
        first & ~last & ~is_open,
    )
    return np.select(members, range(len(members)), len(members))


def count_kinds(runs: NDArray[np.int64], columns: int = 1) -> dict[str, dict[str, int]]:
    """Episodes and steps of each of the :data:`KINDS`."""
    kinds = kinds_of(runs, columns)
    steps = (runs[:, 2] - runs[:, 1]) // columns
    return {
        kind: {"episodes": int((kinds == i).sum()), "steps": int(steps[kinds == i].sum())}
        for i, kind in enumerate(KINDS)
    }
