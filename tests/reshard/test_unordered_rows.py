"""Rows that a remover placed, on other ranks and sizes: each goes by itself, as it was, and the newest stay."""

import json
import warnings

import pytest
import torch
from click.testing import CliRunner
from tensordict import TensorDict

from engram import (
    IncompatibleCheckpoint,
    LazyTensorStorage,
    Lifo,
    LowestPriority,
    PrioritizedSampler,
    RemovingWriter,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.cli import main
from tests.ranks.jobs import checkpointer, done, job

SIZE = 12


def buffer(size=SIZE, remover=LowestPriority):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=PrioritizedSampler(size, 1.0, 1.0), remover=remover(), batch_size=4
    )


def steps(first, n):
    """Rows with all fields that would be rewritten, or that would hold rows together, if they were steps of trajectories."""
    ids = torch.arange(first, first + n)
    ends = (ids % 4 == 3)[:, None]
    return TensorDict(
        {
            "id": ids,
            "env_id": ids % 3,
            "episode": ids // 4,
            ("next", "done"): ends,
            ("next", "terminated"): ends & (ids % 8 == 3)[:, None],
            ("next", "truncated"): ends & (ids % 8 != 3)[:, None],
        },
        [n],
    )


def filled(rank, size=SIZE, remover=LowestPriority):
    """Full, with later rows in the places of some. Returns it, and the ids of its rows, the newest first."""
    rb = buffer(size, remover)
    rb.extend(steps(1000 * rank, size))
    rb.update_priority(torch.arange(size), 1.0 + (torch.arange(size) * 5 % size).double())
    stored = dict(enumerate(range(1000 * rank, 1000 * rank + size)))
    for first in (100, 200):
        new = steps(1000 * rank + first, 3 + rank)
        for row, number in zip(rb.extend(new).tolist(), new["id"].tolist(), strict=True):
            stored.pop(row)
            stored[row] = number  # at the end: the newest
    assert sorted(stored.values()) == sorted(rb[:]["id"].tolist())
    return rb, list(reversed(stored.values()))


def contents(rb):
    """All that is stored of each row, by its id."""
    rows, leaves = rb[:], rb.sampler.state_dict()["leaves"][: len(rb)].tolist()
    return {
        number: (rows[row].exclude("index").to_dict(), leaves[row]) for row, number in enumerate(rows["id"].tolist())
    }


def same(found, expected):
    assert found.keys() == expected.keys()
    for number, (row, leaf) in found.items():
        then, before = expected[number]
        assert leaf == pytest.approx(before)
        assert str(row) == str(then)


def save(root, ranks=3):
    """A checkpoint of so many ranks. Returns, by rank, all rows and their ids, the newest first."""

    def act(together, rank):
        rb, newest = filled(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as rows are moved as they are, there is nothing to warn of
            checkpointer(root, rb, together).save(1)
        return contents(rb), newest

    return done(job(ranks, act))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("resume", ["exact", "env_reset"])
def test_every_row_stays_as_it_was_where_there_is_room(tmp_path, ranks, resume):
    saved = save(tmp_path)

    def act(together, _):
        rb = buffer(40)
        report = checkpointer(tmp_path, rb, together).restore(resume=resume)
        assert report.dealt["kept"] == report.dealt["saved"] == {"episodes": 3 * SIZE, "steps": 3 * SIZE}
        return contents(rb)

    parts = done(job(ranks, act))
    assert sum(map(len, parts)) == 3 * SIZE
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    same({k: v for part in parts for k, v in part.items()}, {k: v for rows, _ in saved for k, v in rows.items()})


def dealt(newest, ranks, size):
    """By age, of equal ages by shard: round robin, until there is no room."""
    order = [column[age] for age in range(SIZE) for column in newest]
    return [set(order[rank::ranks][:size]) for rank in range(ranks)]


def test_the_newest_stay_by_turns(tmp_path):
    saved = save(tmp_path)

    def act(together, _):
        rb = buffer(8)
        checkpointer(tmp_path, rb, together).restore(max_drop_fraction=1.0)
        return contents(rb)

    with pytest.warns(UserWarning, match="20 steps did not fit"):
        parts = done(job(2, act))
    assert [part.keys() for part in parts] == dealt([newest for _, newest in saved], 2, 8)
    every = {k: v for rows, _ in saved for k, v in rows.items()}
    same({k: v for part in parts for k, v in part.items()}, {k: every[k] for part in parts for k in part})


def test_the_command_line_deals_them_out_alike(tmp_path):
    saved = save(tmp_path / "from")
    options = ["--ranks", "2", "--lanes", "1", "--capacity", "8", "--max-drop-fraction", "1", "--json"]
    ran = CliRunner().invoke(main, ["reshard", str(tmp_path / "from"), str(tmp_path / "to"), *options])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["dropped"]["overflow"]["steps"] == 20

    def act(together, _):
        rb = buffer(8)
        checkpointer(tmp_path / "to", rb, together).restore()
        return set(contents(rb))

    assert done(job(2, act)) == dealt([newest for _, newest in saved], 2, 8)


@pytest.mark.parametrize("size", [5, 30])
def test_a_dump_is_converted_to_another_capacity(tmp_path, size):
    before, newest = filled(1)
    before.dumps(tmp_path)
    rb = buffer(size)
    if size < SIZE:
        with pytest.warns(UserWarning, match=r"7 episodes with 7 steps as overflow\. The newest were taken"):
            rb.loads(tmp_path, convert=True)
    else:
        rb.loads(tmp_path, convert=True)
    every = contents(before)
    same(contents(rb), {number: every[number] for number in newest[:size]})
    rb.extend(steps(5000, 3))  # and it goes on
    assert {5000, 5001, 5002} <= contents(rb).keys()


@pytest.mark.parametrize("size", [8, 30])
def test_removed_rows_go_nowhere(tmp_path, size):
    before, newest = filled(0)
    gone = [newest[0], newest[5], newest[11]]
    ids = before[:]["id"].tolist()
    before.remove(torch.tensor([ids.index(number) for number in gone]))
    left = [number for number in newest if number not in gone]
    checkpointer(tmp_path, before, done(job(1, lambda together, _: together))[0]).save(1)

    def act(together, _):
        rb = buffer(size)
        checkpointer(tmp_path, rb, together).restore(max_drop_fraction=1.0)
        return contents(rb)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = done(job(2, act))
    assert [part.keys() for part in parts] == [set(left[rank::2][:size]) for rank in range(2)]


def test_who_goes_next_follows_from_the_rows_that_came(tmp_path):
    before, newest = filled(2, remover=Lifo)
    before.dumps(tmp_path)
    rb = buffer(7, Lifo)
    with pytest.warns(UserWarning, match="newest were taken"):
        rb.loads(tmp_path, convert=True)
    rb.extend(steps(5000, 2))  # in the places of the newest
    assert contents(rb).keys() == {*newest[2:7], 5000, 5001}


def test_rows_in_no_order_are_for_no_writer_that_needs_one():
    state = filled(0)[0].state_dict()
    with pytest.raises((KeyError, IncompatibleCheckpoint), match="ranking"):
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(SIZE), sampler=PrioritizedSampler(SIZE, 1.0, 1.0)
        ).load_state_dict(state)
    with pytest.raises(IncompatibleCheckpoint, match=r"RemovingWriter: expected the state .*in no order, got \{\}"):
        RemovingWriter(Lifo()).load_state_dict({})


def test_several_lanes_are_refused(tmp_path):
    save(tmp_path / "from")
    ran = CliRunner().invoke(
        main, ["reshard", str(tmp_path / "from"), str(tmp_path / "to"), "--ranks", "2", "--lanes", "2"]
    )
    assert ran.exit_code != 0
    assert "expected targets of 1 lane, as its writer puts rows in no order, got 2" in ran.output
    assert not (tmp_path / "to").exists()
    assert ReplayBuffer(storage=LazyTensorStorage(4), remover=Lifo()).writer.ranking == "newest"
