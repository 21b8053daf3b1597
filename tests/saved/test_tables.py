import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram.saved import description
from engram.saved.description import Lane, Segment, Trajectory

u32 = st.integers(0, (1 << 32) - 1)
big = st.integers(0, (1 << 63) - 1)


@given(st.lists(st.builds(Lane, big, st.integers(0, 50), st.booleans()), max_size=20))
def test_lanes(lanes):
    raw = description.pack_lanes(lanes)
    assert len(raw) == len(lanes) * description.RECORD_BYTES["lanes"]
    assert description.unpack_lanes(raw, 50) == lanes


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 9), big, st.integers(0, 15)), max_size=20)
)
def test_trajectories(steps):
    ends = [0] * 4
    every = []
    for lane, length, gap, t_end, flags in sorted(steps, key=lambda step: step[0]):
        first = ends[lane] + gap
        ends[lane] = first + length
        every.append(Trajectory(lane, first, ends[lane], t_end, flags))
    raw = description.pack_trajectories(every)
    assert list(description.unpack_trajectories(raw, 4)) == every
    cut = len(every) // 2 * 40
    after = every[len(every) // 2 - 1] if cut else None
    assert list(description.unpack_trajectories(raw[cut:], 4, after=after)) == every[len(every) // 2 :]


@given(
    st.lists(
        st.builds(Segment, u32, u32, big, big, big, st.integers(0, (1 << 64) - 1), big, st.integers(0, 1)),
        unique_by=lambda it: it[:2],
        max_size=9,
    )
)  # fmt: skip
def test_segments(every):
    every.sort()
    raw = description.pack_segments(every)
    assert len(raw) == 64 * len(every)
    assert list(description.unpack_segments(raw)) == every
    if len(every) > 1:
        with pytest.raises(ValueError, match="by lane and number"):
            list(description.unpack_segments(description.pack_segments(every[::-1])))


def test_records_are_little_endian():
    assert description.pack_lanes([Lane(1, 2, True)]) == b"".join(n.to_bytes(8, "little") for n in (1, 2, 1, 0))
    raw = description.pack_segments([Segment(1, 2, 3, 4, 5, (1 << 64) - 1, 7, 1)])
    assert raw[:8] == b"\1\0\0\0\2\0\0\0"
    assert raw[32:40] == b"\xff" * 8
    assert raw[48:] == b"\1" + bytes(15)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Trajectory(4, 0, 1, 0, 0), "one of 4 lanes"),
        (Trajectory(0, -(1 << 59), 1, 0, 0), "expected a trajectory"),
        (Trajectory(0, 5, 5, 0, 0), "expected a trajectory"),
        (Trajectory(0, 0, 1, -1, 0), "expected a trajectory"),
        (Trajectory(0, 0, 1, 0, 16), "expected a trajectory"),
        (Trajectory(0, 8, 9, 0, 0), "by lane and position"),
    ],
)
def test_trajectories_that_no_store_has(wrong, says):
    with pytest.raises(ValueError, match=says):
        list(description.unpack_trajectories(description.pack_trajectories([Trajectory(0, 3, 10, 0, 0), wrong]), 4))


def test_trajectories_of_columns_lie_between_each_other():
    every = [Trajectory(0, 0, 8, 1, 0), Trajectory(0, 1, 7, 1, 0), Trajectory(0, 8, 10, 1, 0)]
    raw = description.pack_trajectories(every)
    assert list(description.unpack_trajectories(raw, 1, columns=2)) == every
    with pytest.raises(ValueError, match="by lane"):
        list(description.unpack_trajectories(raw, 1))
