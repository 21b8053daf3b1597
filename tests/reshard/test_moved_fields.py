"""What a field says after its step was moved: where it is now, and which trajectory is its own."""

import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import FrameStack, IncompatibleCheckpoint, LazyTensorStorage, ListStorage, RandomSampler, SliceSampler
from engram import TensorDictReplayBuffer as Buffer
from tests.ranks.jobs import checkpointer, columns_of, done, job, layout

ROLES = {"place": "position"}


def make(lanes, length, sampler=None):
    return Buffer(
        storage=LazyTensorStorage(lanes * length, lanes=lanes), sampler=sampler or RandomSampler(), batch_size=8
    )


def rows(who, steps, *, env_dtype=torch.int64, lane=0, trajectory=0, first=0):
    over = torch.zeros(steps, 1, dtype=torch.bool)
    over[-1] = True
    return TensorDict(
        {
            "who": torch.arange(steps) + who,
            "seen": (torch.arange(steps) + who)[:, None],
            "env_id": torch.full((steps, 1), lane, dtype=env_dtype),
            "episode": torch.full((steps,), trajectory, dtype=torch.int32),
            "place": torch.arange(first, first + steps),
            ("next", "done"): over,
        },
        [steps],
    )


def save(ranks, rank, root, lengths, roles=None, sampler=None, **more):
    """Every lane of every rank has the same trajectories with the same numbers."""
    rb = make(2, 64, sampler() if sampler else None)
    for lane in range(2):
        first = 0
        for i, steps in enumerate(lengths):
            who = ((rank * 2 + lane) * 100 + i) * 1000
            rb.extend(rows(who, steps, lane=lane, trajectory=i, first=first, **more), lane=lane)
            first += steps
    checkpointer(root, rb, ranks, roles=roles).save(1)


def load(ranks, rank, root, lanes, length, sampler=None, **how):
    rb = make(lanes, length, sampler() if sampler else None)
    return checkpointer(root, rb, ranks).restore(**how), rb


def test_more_lanes_than_the_field_can_number(tmp_path):
    done(job(1, lambda *args: save(*args, [3, 4], env_dtype=torch.uint8), tmp_path))
    errors = job(2, load, tmp_path, 300, 8)
    for error in errors:
        assert isinstance(error, IncompatibleCheckpoint)
        assert "expected at most 256 lanes, as many as uint8 can number, got 300" in str(error)
    done(job(2, load, tmp_path, 128, 8, None))
    with pytest.raises((IncompatibleCheckpoint, RuntimeError), match="256 lanes"):
        done(job(3, lambda *args: load(*args, env_id="global"), tmp_path, 100, 8))


def test_no_two_trajectories_have_one_number_and_slices_never_cross(tmp_path):
    """The sources number theirs alike: neighbours with one number would be one trajectory."""

    def sampler():
        return SliceSampler(slice_len=4, traj_key="episode")

    done(job(3, save, tmp_path, [4, 5, 4, 6], {("next", "done"): "data"}, sampler))
    for _, rb in done(job(2, load, tmp_path, 1, 200, sampler)):
        columns = columns_of(rb)
        *there, closing = layout(rb)[0]
        assert closing is None, "no field marks ends: what comes next must not join the newest one"
        numbers = columns["episode"][: len(there)]
        owners = torch.tensor(there) // 1000
        assert ((numbers[1:] == numbers[:-1]) == (owners[1:] == owners[:-1])).all()
        for _ in range(30):
            who = rb.sample()["who"].reshape(-1)
            runs = who.reshape(-1, 4)
            assert (runs // 1000 == runs[:, :1] // 1000).all()


def test_positions_move_along(tmp_path):
    done(job(2, save, tmp_path, [3, 5, 4], {"place": "position"}))
    for _, rb in done(job(3, load, tmp_path, 1, 100)):
        there = layout(rb)[0]
        assert columns_of(rb)["place"][: len(there)].tolist() == list(range(len(there)))


_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def numbered(ranks, rank, root, dtype, lengths=(3, 5, 4), roles=None, *, open_end=False):
    """Every field that a move rewrites is of that dtype."""
    rb, first = make(1, 64), 0
    for i, steps in enumerate(lengths):
        over = torch.zeros(steps, 1, dtype=torch.bool)
        over[-1] = open_end is False or i < len(lengths) - 1
        kind = torch.ones(steps)
        kind[0], kind[-1] = 0, 2 if over[-1] else 1
        columns = {
            "who": torch.arange(steps) + rank * 100_000 + i * 1000,
            "place": torch.arange(first, first + steps).to(dtype),
            "env_id": torch.zeros(steps, 1).to(dtype),
            "episode": torch.full((steps,), i).to(dtype),
            "step_type": kind.to(dtype),
            ("next", "done"): over,
        }
        rb.extend(TensorDict(columns, [steps]), lane=0)
        first += steps
    checkpointer(root, rb, ranks, roles={**ROLES, ("next", "done"): "done", **(roles or {})}).save(1)


@pytest.mark.parametrize("dtype", [*_UNSIGNED, torch.int8, torch.int64])
def test_every_integer_can_say_where_a_step_is(tmp_path, dtype):
    done(job(3, lambda *args: numbered(*args, open_end=True), tmp_path, dtype))
    how = {"incomplete": {"open": "truncate"}}
    for _, rb in done(job(2, lambda *args: load(*args, **how), tmp_path, 2, 40)):
        columns = {key: column.to(torch.int64) for key, column in columns_of(rb).items()}
        seen = set()
        for lane, there in enumerate(layout(rb)):
            mine = slice(40 * lane, 40 * lane + len(there))
            assert columns["place"][mine].tolist() == list(range(len(there)))
            assert columns["env_id"][mine].unique().tolist() == [lane]
            ids = columns["episode"][mine]
            assert ((ids[1:] == ids[:-1]) == (torch.tensor(there).diff() == 1)).all()
            last = [who % 1000 == (2, 4, 3)[who // 1000 % 100] for who in there]
            assert (columns["step_type"][mine] == 2).tolist() == last
            assert not seen & set(ids.tolist())
            seen |= set(ids.tolist())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float64, torch.complex128])
def test_a_last_step_is_marked_whatever_the_dtype_of_its_flags(tmp_path, dtype):
    def act(ranks, rank, root):
        rb = make(1, 64)
        flags = torch.zeros(5, 2).to(dtype)
        rb.extend(TensorDict({"who": torch.arange(5), "over": flags, "episode": torch.ones(5)}, [5]), lane=0)
        checkpointer(root, rb, ranks, roles={"over": "done"}).save(1)

    done(job(1, act, tmp_path))
    how = {"incomplete": {"open": "truncate"}}
    for _, rb in done(job(1, lambda *args: load(*args, **how), tmp_path, 1, 40)):
        assert columns_of(rb)["over"][:5].to(torch.complex128).real.tolist() == [[0, 0]] * 4 + [[1, 1]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_a_dtype_that_is_no_position_is_refused_before_anything_changes(tmp_path, dtype):
    done(job(1, numbered, tmp_path, dtype, (2, 2), {"step_type": "data", "env_id": "data", "episode": "data"}))

    def act(ranks, _):
        rb = make(1, 100)
        rb.extend(rows(7, 5), lane=0)
        with pytest.raises(IncompatibleCheckpoint, match="dtype of integers, as its role is 'position', got"):
            checkpointer(tmp_path, rb, ranks).restore()
        return layout(rb)

    assert done(job(2, act)) == [[[7, 8, 9, 10, 11]]] * 2


def test_more_positions_than_the_field_can_number(tmp_path):
    """A lane of 64 rows is numbered by any dtype, one of 192 not by each."""
    data = {"step_type": "data", "env_id": "data", "episode": "data"}
    done(job(3, numbered, tmp_path, torch.int8, (20, 20, 20, 4), data))
    for error in job(1, load, tmp_path, 1, 200):
        assert isinstance(error, IncompatibleCheckpoint)
        assert "expected at most 128 rows in a lane, as many as int8 can number, got 192" in str(error)
    for report, _ in done(job(1, load, tmp_path, 2, 128)):
        assert report.dealt["kept"]["steps"] == 192


def test_shards_that_come_back_as_they_were_keep_the_lanes_that_were_written(tmp_path):
    """Whoever numbers lanes of all ranks has written such numbers: they are right where they were."""
    done(job(2, save, tmp_path, [3, 4]))
    same = done(job(2, lambda *args: load(*args, env_id="global"), tmp_path, 2, 64))
    dealt = done(job(2, lambda *args: load(*args, env_id="global"), tmp_path, 2, 65))
    for found, lanes in ((same, ({0, 1}, {0, 1})), (dealt, ({0, 1}, {2, 3}))):
        for (_, rb), expected in zip(found, lanes, strict=True):
            assert set(rb[:]["env_id"].flatten().tolist()) == expected


def test_a_number_that_a_float_would_round(tmp_path):
    data = {"step_type": "data", "place": "data", "episode": "data"}
    done(job(1, numbered, tmp_path, torch.bfloat16, (3, 4), data))
    for error in job(2, load, tmp_path, 300, 8):
        assert "expected at most 257 lanes, as many as bfloat16 can number, got 300" in str(error)
    done(job(2, load, tmp_path, 257, 8))


def test_positions_of_the_newest_steps_of_what_is_too_long(tmp_path):
    done(job(2, save, tmp_path, [40], {"place": "position"}))
    with pytest.warns(UserWarning, match="60 steps did not fit"):
        loaded = done(job(2, lambda *args: load(*args, incomplete={"headless": "keep"}), tmp_path, 2, 25))
    for report, rb in loaded:
        assert report.dealt["kept"] == {"episodes": 4, "steps": 100}
        for lane, there in enumerate(layout(rb)):
            assert [who % 1000 for who in there] == list(range(15, 40))
            assert columns_of(rb)["place"][lane * 25 : (lane + 1) * 25].tolist() == list(range(25))


def test_goals_in_hindsight_stay_in_their_trajectories(tmp_path):
    """Each step says where in its lane its goal is: a later step of its own trajectory. Also after a second move."""

    def with_goals(ranks, rank):
        rb, first = make(1, 64), 0
        for i, steps in enumerate([5, 9, 3, 7, 6]):
            data = rows((rank * 100 + i) * 1000, steps, trajectory=i, first=first)
            goal = torch.tensor([int(torch.randint(at, steps, ())) for at in range(steps)])
            data["place"], data["seen"] = first + goal, data["who"][goal][:, None]
            rb.extend(data, lane=0)
            first += steps
        checkpointer(tmp_path, rb, ranks, roles=ROLES).save(1)

    def moved(ranks, rank, lanes, step):
        rb = make(lanes, 100)
        ck = checkpointer(tmp_path, rb, ranks, roles=ROLES)
        ck.restore()
        ck.save(step)
        found = columns_of(rb)
        for lane, there in enumerate(layout(rb)):
            for at, who in enumerate(there):
                goal = there[int(found["place"][100 * lane + at])]
                assert goal == int(found["seen"][100 * lane + at])
                assert goal >= who
                assert goal // 1000 == who // 1000
        return sum(map(len, layout(rb)))

    done(job(3, with_goals))
    assert sum(done(job(2, moved, 2, 2))) == 3 * 30
    assert sum(done(job(4, moved, 1, 3))) == 3 * 30


def test_longer_than_a_lane(tmp_path):
    done(job(2, save, tmp_path, [3, 20, 4]))
    (report, rb), *_ = done(job(1, lambda *args: load(*args, max_drop_fraction=1.0), tmp_path, 4, 10))
    assert report.dealt["dropped"]["oversize"] == {"episodes": 4, "steps": 80}
    assert len(rb) == 4 * 7
    with pytest.raises(IncompatibleCheckpoint, match="lanes longer than 10 rows keep the oversize ones"):
        done(job(1, load, tmp_path, 4, 10))


def test_lanes_that_are_exactly_full(tmp_path):
    done(job(2, save, tmp_path, [4, 4]))
    for report, rb in done(job(2, load, tmp_path, 1, 16)):
        assert len(rb) == 16
        assert report.dealt["targets"][0]["unused"] == 0
        rb.extend(rows(0, 3), lane=0)  # and then the oldest go
        assert layout(rb)[0][-3:] == [0, 1, 2]


def test_a_stack_at_a_headless_trajectory_amid_a_lane_never_reads_its_neighbour(tmp_path):
    def act(ranks, rank, root):
        rb = make(1, 10, FrameStack(RandomSampler(), 3, -1, ["seen"]))
        rb.extend(rows(rank * 100_000, 8), lane=0)
        rb.extend(rows(rank * 100_000 + 1000, 6), lane=0)  # of the first one 4 are left, without their beginning
        checkpointer(root, rb, ranks).save(1)

    done(job(2, act, tmp_path))
    how = {"incomplete": {"headless": "keep"}}

    def sampler():
        return FrameStack(RandomSampler(), 3, -1, ["seen"])

    _, rb = done(job(1, lambda *args: load(*args, **how), tmp_path, 1, 40, sampler))[0]
    assert len(rb) == 20
    for _ in range(20):
        stacked = rb.sample()["seen"].reshape(8, 3)
        assert (stacked // 1000 == stacked[:, -1:] // 1000).all()


@pytest.mark.filterwarnings("ignore:Checkpointer. no field says where")
def test_no_field_says_where_trajectories_end(tmp_path):
    def act(ranks, rank, root):
        rb = make(2, 50)
        for lane in range(2):
            rb.extend(TensorDict({"x": torch.arange(40) + 1000 * rank + 100 * lane}, [40]), lane=lane)
        checkpointer(root, rb, ranks).save(1)

    done(job(2, act, tmp_path))
    loaded = done(job(3, load, tmp_path, 1, 100))
    found = [columns_of(rb)["x"][: len(rb)].tolist() for _, rb in loaded]
    every = sorted(x + 1000 * rank + 100 * lane for x in range(40) for rank in range(2) for lane in range(2))
    assert sorted(sum(found, [])) == every
    assert max(map(len, found)) - min(map(len, found)) <= 100 // 16


@pytest.mark.filterwarnings("ignore:Checkpointer. no field says where")
@pytest.mark.parametrize(("length", "block", "most_unused"), [(4000, 250, 0), (1000, 62, 8), (200, 12, 8), (5, 1, 0)])
def test_blocks_keep_steps_together_and_fill_lanes(tmp_path, length, block, most_unused):
    """As much as was saved fits where there is as much room, but for less than a block of each lane."""

    def act(ranks, rank, root):
        rb = make(1, 3 * length)
        rb.extend(TensorDict({"who": torch.arange(3 * length + 17) + 1_000_000 * rank}, [3 * length + 17]), lane=0)
        checkpointer(root, rb, ranks).save(1)

    done(job(2, act, tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what did not fit
        loaded = done(job(3, load, tmp_path, 2, length))
    every = []
    for _, rb in loaded:
        for lane in layout(rb):
            assert len(lane) >= length - block
            every += lane
            steps = np.array(lane)
            pieces = np.split(steps, np.flatnonzero(np.diff(steps) != 1) + 1)
            assert all(len(piece) >= block for piece in pieces[1:]), "but for the oldest, which may be what was left"
            assert sum(map(len, pieces)) == len(lane)
    assert len(every) == len(set(every)) >= 6 * (length - most_unused)


@pytest.mark.filterwarnings("ignore:Checkpointer. no field says where")
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (0,)])
def test_every_dtype_and_shape_is_moved_bit_for_bit(tmp_path, dtype, shape):
    values = torch.randint(0, 2, (12, *shape)).to(dtype)

    def act(ranks, _, root):
        rb = make(1, 12)
        rb.extend(TensorDict({"x": values, "n": torch.arange(12)}, [12]), lane=0)
        checkpointer(root, rb, ranks).save(1)

    done(job(1, act, tmp_path))
    for _, rb in done(job(2, load, tmp_path, 1, 12)):
        columns = columns_of(rb)
        here = columns["n"][: len(rb)]
        assert len(here) == 6
        assert torch.equal(columns["x"][: len(rb)], values[here])


def test_columns_become_lanes(tmp_path):
    def act(ranks, rank, root):
        rb = Buffer(storage=LazyTensorStorage(60, ndim=2), batch_size=4)
        over = torch.zeros(3, 12, 1, dtype=torch.bool)
        over[:, 3::4] = True
        who = torch.arange(12) + 1000 * torch.arange(3)[:, None] + 100_000 * rank
        rb.extend(TensorDict({"who": who, ("next", "done"): over}, [3, 12]))  # time is the second dimension
        checkpointer(root, rb, ranks).save(1)
        return set(who.reshape(-1).tolist())

    every = set().union(*done(job(2, act, tmp_path)))
    loaded = done(job(2, load, tmp_path, 2, 40))
    found = [who for _, rb in loaded for lane in layout(rb) for who in lane]
    assert sorted(found) == sorted(every)
    for _, rb in loaded:
        for lane in layout(rb):
            steps = np.array(lane).reshape(-1, 4)
            assert (np.diff(steps) == 1).all()


@pytest.mark.parametrize(
    ("storage", "got"),
    [
        (lambda: LazyTensorStorage(60, ndim=2), "one with ndim=2, whose columns"),
        (lambda: ListStorage(60), "a ListStorage"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_storage_that_cannot_take_what_is_dealt_out(tmp_path, storage, got, n):
    done(job(3, save, tmp_path, [3, 4]))

    def act(ranks, _):
        rb = Buffer(storage=storage(), batch_size=4)
        checkpointer(tmp_path, rb, ranks).restore()

    for error in job(n, act):
        assert isinstance(error, IncompatibleCheckpoint)
        assert f"expected a storage of tensors with lanes to redistribute trajectories to, got {got}" in str(error)
        assert "Make it with lanes=" in str(error)
        assert len(str(error)) < 500


def test_known_by_their_numbers_alone_they_stay_whole_and_apart(tmp_path):
    """The newest of a lane is closed by a row that holds nothing: it is whole at the next move, too, and nothing joins it."""

    def sampler():
        return SliceSampler(slice_len=4, traj_key="episode")

    only_numbers = {("next", "done"): "data"}

    def again(ranks, rank, step):
        report, rb = load(ranks, rank, tmp_path, 2, 100, sampler)
        checkpointer(tmp_path, rb, ranks, roles=only_numbers).save(step)
        return report.dealt["kept"], rb

    done(job(2, save, tmp_path, [4, 5, 4, 6], only_numbers, sampler))
    first, *later = (done(job(n, again, step)) for step, n in ((2, 1), (3, 3), (4, 2)))
    assert first[0][0] == {"episodes": 12, "steps": 52}, "the newest of each lane is open, as far as anybody knows"
    assert all(kept == first[0][0] for parts in later for kept, _ in parts)
    for _, rb in later[-1]:
        newest = columns_of(rb)["episode"][[lane * 100 + len(layout(rb)[lane]) - 2 for lane in (0, 1)]].tolist()
        for lane in (0, 1):
            rb.extend(rows(7_000_000, 4, trajectory=newest[lane]), lane=lane)
        for _ in range(50):
            slices = rb.sample()["who"].reshape(-1, 4) // 1000
            assert (slices == slices[:, :1]).all()


@pytest.mark.parametrize("roles", [{("next", "done"): "data"}, {("next", "done"): "terminated"}])
def test_cut_short_where_no_field_can_say_so(tmp_path, roles):
    done(job(2, save, tmp_path, [4, 5], roles))
    for error in job(1, lambda *args: load(*args, incomplete={"open": "truncate"}), tmp_path, 1, 100):
        assert isinstance(error, IncompatibleCheckpoint)
        assert (
            'role done, truncated or step_type, which can say that a trajectory was cut short, found none. "keep"'
            in str(error)
        )
