"""Rows whose fields are nested, as those of ALF and dm_env: ids and ends are found wherever they lie."""

import random
import re
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from tests import stress
from tests.ranks.jobs import checkpointer, columns_of, done, job

TimeStep = namedtuple("TimeStep", ["step_type", "reward", "discount", "env_id", "observation"])
Experience = namedtuple("Experience", ["time_step", "action"])
Inner = namedtuple("Inner", ["who", "env_id"])
FIRST, MID, LAST = 0, 1, 2


def types_of(steps, *, first, last):
    types = torch.full((steps,), MID, dtype=torch.int32)
    if last:
        types[-1] = LAST
    if first:
        types[0] = FIRST
    return types


def fields(who, lane, steps, *, first=True, last=True):
    return {
        "step_type": types_of(steps, first=first, last=last),
        "reward": torch.zeros(steps),
        "discount": torch.ones(steps),
        "env_id": torch.full((steps,), lane),
        "observation": who + torch.arange(steps),
    }


def td(who, lane, steps, **how):
    return TensorDict({"time_step": fields(who, lane, steps, **how), "action": torch.zeros(steps, 2)}, [steps])


def plain(who, lane, steps, **how):
    return {"time_step": fields(who, lane, steps, **how), "action": torch.zeros(steps, 2)}


def named(who, lane, steps, **how):
    return Experience(TimeStep(**fields(who, lane, steps, **how)), torch.zeros(steps, 2))


def mixed(who, lane, steps, **how):
    """A named tuple in a TensorDict's place of a dict, and ids in several places, one of them of the next step."""
    step = fields(who, lane, steps, **how)
    return {
        "a": [Inner(step["observation"], step["env_id"].to(torch.int16)), {"step_type": step["step_type"][:, None]}],
        "next": {"env_id": step["env_id"].to(torch.uint8)[:, None], "b": {"env_id": step["env_id"]}},
    }


def flags(who, lane, steps, *, first=True, last=True):
    """Flags of the transition, three levels deep; those of the state, and of agents, say nothing."""
    over = torch.zeros(steps, 1, dtype=torch.bool)
    over[-1] = last
    begun = torch.zeros(steps, 1, dtype=torch.bool)
    begun[0] = first
    agents = torch.rand(steps, 3, generator=torch.Generator().manual_seed(who)) < 0.5
    return TensorDict(
        {
            "data": {
                "is_init": begun,
                "env_id": torch.full((steps,), lane),
                "observation": who + torch.arange(steps),
                "done": torch.ones(steps, 1, dtype=torch.bool),
                "next": {"env_id": torch.full((steps, 1), lane), "done": over, "agents": {"terminated": agents}},
            }
        },
        [steps],
    )


LAYOUTS = [td, plain, named, mixed, flags]


def column(rb, *names):
    """Fields called so, whatever they are in."""
    return {key: value for key, value in columns_of(rb).items() if key.rpartition(".")[2] in names}


def who_of(rb):
    (found,) = column(rb, "observation", "who").values()
    return found


def random_lengths(chance, room):
    """Of trajectories that fill a lane, now and then over its end. A first step is none that is the last."""
    lengths, total = [], chance.choice([room // 3, room, 2 * room])
    while sum(lengths) < total:
        lengths.append(chance.randint(2, max(2, room // 3)))
    return lengths


def played(chance, layout, lanes, length, rank):
    """A buffer, and of every trajectory that was written who its steps are, and whether it ends."""
    rb = ReplayBuffer(storage=LazyTensorStorage(lanes * length, lanes=lanes), batch_size=4)
    written = []
    for lane in range(lanes):
        lengths = random_lengths(chance, length)
        for i, steps in enumerate(lengths):
            who = ((rank * 8 + lane) * 1000 + i) * 1000
            last = i < len(lengths) - 1 or chance.random() < 0.5
            rb.extend(layout(who, lane, steps, last=last), lane=lane)
            written.append(([who + k for k in range(steps)], last))
    return rb, written


def oracle(written, there):
    """Episodes and steps by kind, of what is still there."""
    counts = {}
    for steps, last in written:
        left = [who for who in steps if who in there]
        if left:
            kind = {(True, True): "complete", (True, False): "open", (False, True): "headless", (False, False): "both"}[
                left[0] == steps[0], last
            ]
            episodes, rows = counts.get(kind, (0, 0))
            counts[kind] = (episodes + 1, rows + len(left))
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(stress.size(3, 60)))
def test_m_to_n_leaves_no_id_stale_and_cuts_no_trajectory(tmp_path, layout, seed):
    chance = random.Random(seed)
    m, n = chance.choice([(3, 2), (2, 5), (1, 3), (4, 1)])
    lanes, length = chance.randint(1, 3), chance.randint(6, 40)

    def save(ranks, rank):
        rb, written = played(random.Random(f"{seed} {rank}"), layout, lanes, length, rank)
        report = checkpointer(tmp_path, rb, ranks).save(1)
        live = rb.state_dict()["_storage"]["numbers"].numpy() != 0
        return written, set(who_of(rb)[: len(live)][torch.from_numpy(live)].tolist()), report

    saved = done(job(m, save))
    expected = {}
    whole = set()
    for written, there, _ in saved:
        for kind, (episodes, steps) in oracle(written, there).items():
            before = expected.get(kind, (0, 0))
            expected[kind] = (before[0] + episodes, before[1] + steps)
        whole |= {tuple(steps) for steps, last in written if last and set(steps) <= there}
    for *_, report in saved:
        assert {kind: (it["episodes"], it["steps"]) for kind, it in report.episodes.items()} == expected
        assert report.would_drop == {kind: it for kind, it in report.episodes.items() if kind != "complete"}

    def load(ranks, rank):
        rb = ReplayBuffer(storage=LazyTensorStorage(5 * 64, lanes=5), batch_size=4)
        report = checkpointer(tmp_path, rb, ranks).restore(max_drop_fraction=1.0, incomplete={})
        found = []
        if not rb.storage.initialized:
            return found, report
        state = rb.state_dict()["_storage"]
        numbers = state["numbers"].numpy()
        rows = np.flatnonzero(numbers)
        for key, ids in column(rb, "env_id").items():
            assert (ids.reshape(len(ids), -1)[rows, 0].numpy() == rows // 64).all(), key
        owner = who_of(rb)[rows].numpy()
        for lane in range(5):
            here = owner[rows // 64 == lane]
            if len(here):
                found += [tuple(it.tolist()) for it in np.split(here, np.flatnonzero(np.diff(here // 1000)) + 1)]
        return found, report

    loaded = done(job(n, load))
    kept = [trajectory for found, _ in loaded for trajectory in found]
    assert sorted(kept) == sorted(whole)
    for _, report in loaded:
        dropped = {
            kind: (it["episodes"], it["steps"]) for kind, it in report.dealt["dropped"].items() if it["episodes"]
        }
        assert dropped == {kind: counts for kind, counts in expected.items() if kind != "complete"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trajectory_that_is_cut_short_is_marked_where_it_ends(tmp_path, layout):
    rb = ReplayBuffer(storage=LazyTensorStorage(16), batch_size=4)
    rb.extend(layout(1000, 0, 3))
    rb.extend(layout(2000, 0, 4, last=False))
    done(job(1, lambda ranks, _: checkpointer(tmp_path, rb, ranks).save(1)))
    other = ReplayBuffer(storage=LazyTensorStorage(64, lanes=2), batch_size=4)
    done(job(1, lambda ranks, _: checkpointer(tmp_path, other, ranks).restore(incomplete={"open": "truncate"})))
    who = who_of(other).tolist()
    ends = {key: value for key, value in column(other, "step_type", "done").items() if key != "data.done"}
    (end,) = ends.values()
    over = (end.reshape(64) == LAST) if end.dtype != torch.bool else end.reshape(64)
    assert [bool(over[who.index(it)]) for it in (1000, 1001, 1002, 2000, 2001, 2002, 2003)] == [0, 0, 1, 0, 0, 0, 1]


def test_fields_of_named_tuples_have_their_names(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(16), batch_size=4)
    rb.extend(named(0, 0, 5))
    assert [field.key for field in rb.storage.store.schema.fields] == [
        *(("time_step", name) for name in TimeStep._fields),
        ("action",),
    ]
    assert rb[2].time_step.observation == 2
    assert isinstance(rb.sample().time_step, TimeStep)
    rb.dumps(tmp_path / "x")
    other = ReplayBuffer(storage=LazyTensorStorage(16), batch_size=4)
    other.loads(tmp_path / "x")
    assert other[2].time_step.observation == 2


def test_roles_name_several_fields(tmp_path):
    """Also with the names of a named tuple's fields."""

    def save(ranks, rank):
        rb = ReplayBuffer(storage=LazyTensorStorage(32, lanes=2), batch_size=4)
        for lane in range(2):
            step = fields(rank * 2000 + lane * 1000, lane, 4)
            rb.extend(
                {"one": Inner(step["observation"], step["step_type"]), "two": step["env_id"], "three": step["env_id"]},
                lane=lane,
            )
        roles = {("one", "env_id"): "step_type", "two": "env_id", "three": "env_id"}
        checkpointer(tmp_path, rb, ranks, roles=roles).save(1)

    def load(ranks, _):
        rb = ReplayBuffer(storage=LazyTensorStorage(32, lanes=1), batch_size=4)
        checkpointer(tmp_path, rb, ranks).restore()
        columns = columns_of(rb)
        return columns["two"][:8].tolist(), columns["three"][:8].tolist(), columns["one.who"][:8].tolist()

    done(job(2, save))
    for two, three, who in done(job(2, load)):
        assert two == three == [0] * 8
        assert [it % 1000 for it in who] == [0, 1, 2, 3] * 2


# ---- what a restore could not do right is said before ----------------------------------------------------------------------


ENDS = {"done": torch.zeros(4, dtype=torch.bool)}
IDS = torch.zeros(4, dtype=torch.int64)
DOUBTFUL = [
    ({"x": torch.zeros(4)}, None, [r"no field says where trajectories end: .* got \['x'\]\."]),
    ({**ENDS, "worker_id": IDS}, None, ["'worker_id': called like an id"]),
    ({**ENDS, "a": {"id": IDS.to(torch.uint8), "id_of": IDS}}, None, [r"\('a', 'id'\): called like an id"]),
    ({"agent_ids": IDS}, None, ["no field says where", "'agent_ids': called like an id"]),
    ({**ENDS, "worker_id": torch.zeros(4)}, None, []),
    ({**ENDS, "worker_id": IDS}, {"worker_id": "data"}, []),
    ({**ENDS, "worker_id": IDS}, {"worker_id": "env_id"}, []),
    ({"over": torch.zeros(4)}, {"over": "done"}, []),
    ({"a": {"step_type": IDS}, "env_id": IDS, "b": {"traj_ids": IDS}}, None, []),
]


@pytest.mark.parametrize(("rows", "roles", "said"), DOUBTFUL)
@pytest.mark.parametrize("empty", [None, 0, 1])
def test_what_a_restore_could_not_do_right_is_said_once_on_all_ranks(tmp_path, rows, roles, said, empty):
    """Also on a rank that has no rows yet."""

    def act(ranks, rank):
        rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
        if rank != empty:
            rb.extend(rows)
        ck = checkpointer(tmp_path, rb, ranks, roles=roles)
        return [ck.save(step).step for step in (1, 2)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done(job(2, act))
    assert {it.filename for it in caught} <= {__file__}
    texts = [str(it.message) for it in caught]
    assert len(texts) == 2 * len(said)
    for pattern in said:
        assert sum(re.search(f"^Checkpointer: {pattern}", text) is not None for text in texts) == 2


def test_a_process_alone_is_not_warned(tmp_path):
    """It gets its rows back as they were."""
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    rb.extend(torch.arange(4))
    Checkpointer(tmp_path, rb).save(1)
