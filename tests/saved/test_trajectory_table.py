"""Runs against a plain loop over the rows, from the oldest to the newest."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("engram.saved.description")
from engram.errors import CorruptStore
from engram.saved.description import KINDS
from engram.saved.rows import Marks, count_kinds, find_runs

FIRST, LAST, TRUNCATED, OPEN = 1, 2, 4, 8


def oracle(lanes, numbers, ids, ends, cut, starts, columns):
    length, found = len(numbers) // len(lanes), []
    for lane, (position, live) in enumerate(lanes):
        for column in range(columns):
            runs, run = [], None
            for place in range(position - live + column, position, columns):
                row = lane * length + place % length
                if numbers[row] == 0:
                    if run is not None and ends is None:
                        run[4] |= LAST
                    run = None
                    continue
                before = lane * length + (place - columns) % length
                has_before = place - columns >= position - live and numbers[before] != 0
                ended = has_before and (
                    (ends is not None and ends[before]) or (ids is not None and ids[row] != ids[before])
                )
                marked = starts is not None and starts[row]
                if run is None or ended or marked:
                    if starts is not None:
                        begun = bool(starts[row])
                    else:
                        begun = bool(ended or (place == column and place - columns < position - live) or (marked))
                    run = [lane, place, place, 0, FIRST * begun]
                    runs.append(run)
                    if ended and len(runs) > 1:
                        runs[-2][4] |= LAST
                run[2] = place + columns
                run[3] = numbers[row]
                if ends is not None and ends[row]:
                    run[4] |= LAST | (TRUNCATED if cut is not None and cut[row] else 0)
            if runs and runs[-1][2] == position + column and not runs[-1][4] & LAST:
                runs[-1][4] |= OPEN
            for older, newer in zip(runs[-2::-1], runs[:0:-1], strict=True):
                older[3] = min(older[3], newer[3])
            found += runs
    found.sort(key=lambda run: (run[0], run[1]))
    return np.array(found, np.int64).reshape(-1, 5)


@given(st.data())
def test_runs_are_those_of_a_plain_loop(data):
    columns = data.draw(st.sampled_from([1, 1, 1, 2, 3]))
    count = 1 if columns > 1 else data.draw(st.integers(1, 3))
    length = data.draw(st.integers(1, 12)) * columns
    lanes = []
    for _ in range(count):
        position = data.draw(st.integers(0, 3 * length // columns)) * columns
        lanes.append((position, min(position, length)))
    capacity = count * length
    numbers = np.array(data.draw(st.permutations(range(1, capacity + 1))), np.int64)
    for lane, (_, live) in enumerate(lanes):
        numbers[lane * length + live : (lane + 1) * length] = 0
    for row in data.draw(st.lists(st.integers(0, capacity - 1), max_size=3)):
        numbers[row] = 0

    def flags():
        return np.array(data.draw(st.lists(st.booleans(), min_size=capacity, max_size=capacity)))

    ids = (
        np.array(data.draw(st.lists(st.integers(0, 2), min_size=capacity, max_size=capacity)))
        if data.draw(st.booleans())
        else None
    )
    ends = flags() if data.draw(st.booleans()) else None
    cut = flags() if ends is not None and data.draw(st.booleans()) else None
    starts = flags() if data.draw(st.booleans()) else None

    words = None if ids is None else ids[:, None].astype(np.uint8)
    marks = Marks(words, ends, cut, starts)
    found = find_runs(np.array(lanes, np.int64), numbers, marks, lane_length=length, columns=columns)
    expected = oracle(lanes, numbers, ids, ends, cut, starts, columns)
    assert found.tolist() == expected.tolist()
    counted = count_kinds(found, columns)
    assert sum(kind["steps"] for kind in counted.values()) == np.count_nonzero(numbers)
    assert sum(kind["episodes"] for kind in counted.values()) == len(found)
    assert tuple(counted) == KINDS


def test_rows_by_number_ahead_of_the_cursor_are_older():
    numbers = np.array([4, 5, 1, 2, 0, 0])
    runs = find_runs(np.array([[2, 4]]), numbers, Marks(ids=np.arange(6)[:, None].astype(np.uint8)), lane_length=6)
    assert runs[:, 1].tolist() == [-2, -1, 0, 1]
    assert runs[:, 3].tolist() == [1, 2, 4, 5]


def test_marks_of_fewer_rows_are_refused():
    """The native pass would read behind them."""
    with pytest.raises(CorruptStore, match="expected marks of 12 rows"):
        find_runs(np.array([[12, 12]]), np.arange(1, 13), Marks(ends=np.zeros(11, bool)), lane_length=12)


def test_kinds():
    ends = np.zeros(12, bool)
    ends[[2, 5]] = True  # of rows whose oldest is row 9
    starts = np.zeros(12, bool)
    starts[[3, 7]] = True
    runs = find_runs(np.array([[21, 12]]), np.arange(1, 13), Marks(ends=ends, starts=starts), lane_length=12)
    kinds = count_kinds(runs)
    assert {kind: tuple(count.values()) for kind, count in kinds.items()} == {
        "complete": (1, 3),
        "open": (1, 2),
        "headless": (1, 6),
        "both": (0, 0),
        "mid": (0, 0),
        "orphan": (1, 1),
    }
