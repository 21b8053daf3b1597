"""Rows by themselves, of which a writer keeps the best, on other ranks and sizes: the best stay, dealt out round robin."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.checkpoint.ranks import Ranks
from engram.cli import main
from engram.reshard.plan import DROPPED, Source, Target, plan_by_rank
from tests.ranks.jobs import checkpointer, columns_of, done, job


def best(size, *, key="score", reduction="sum", storage=LazyTensorStorage):
    return TensorDictReplayBuffer(
        storage=storage(size),
        sampler=PrioritizedSampler(size, alpha=0.7, beta=0.5),
        writer=TensorDictMaxValueWriter(rank_key=key, reduction=reduction),
        batch_size=4,
    )


def rows(scores, rank=0):
    """Rows that end nothing, with fields that would be rewritten if they were steps of trajectories."""
    n = len(scores)
    return TensorDict(
        {
            "score": torch.as_tensor(scores, dtype=torch.float64),
            "who": rank * 1000 + torch.arange(n),
            "env_id": torch.full((n,), 7),
            "episode": torch.full((n,), 3),
            ("next", "done"): torch.zeros(n, dtype=torch.bool),
        },
        [n],
    )


def fill(ranks, rank, root, scores, size):
    rb = best(size)
    data = rows(scores[rank], rank)
    at = rb.extend(data)
    rb.update_priority(at[at >= 0], data["who"].double()[at >= 0] + 1)
    return checkpointer(root, rb, ranks).save(3), rb


def whos(rb):
    return set(rb[:]["who"].tolist())


SCORES = [[5.0, 1.0, 9.0, 3.0], [2.0, 8.0, 8.0], [7.0, -1.0, 4.0, 6.0, 0.0]]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_all_stay_where_there_is_room(tmp_path, n):
    saved = [rb for _, rb in done(job(3, fill, tmp_path, SCORES, 8))]

    def act(ranks, rank):
        rb = best(16)
        return checkpointer(tmp_path, rb, ranks).restore(), rb

    loaded = done(job(n, act))
    parts = [whos(rb) for _, rb in loaded]
    assert set.union(*parts) == set.union(*map(whos, saved))
    assert sum(map(len, parts)) == 12
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    priority = {who: leaf for rb in saved for who, leaf in zip(rb[:]["who"].tolist(), leaves(rb), strict=True)}
    for report, rb in loaded:
        assert report.dealt["kept"] == report.dealt["saved"] == {"episodes": 12, "steps": 12}
        assert [priority[who] for who in rb[:]["who"].tolist()] == leaves(rb)
        assert (rb[:]["env_id"] == 7).all()
        assert (rb[:]["episode"] == 3).all()


def leaves(rb):
    return rb.sampler.state_dict()["leaves"][: len(rb)].tolist()


def test_the_best_stay_dealt_out_by_turns(tmp_path):
    done(job(3, fill, tmp_path, SCORES, 8))

    def act(ranks, rank):
        rb = best(3)
        return checkpointer(tmp_path, rb, ranks).restore(), rb

    with pytest.warns(UserWarning, match="6 steps did not fit"):
        loaded = done(job(2, act))
    # 9 | 8 of rank 1's row 1, then its row 2 | 7 | 6 | 5
    assert [sorted(rb[:]["score"].tolist()) for _, rb in loaded] == [[6.0, 8.0, 9.0], [5.0, 7.0, 8.0]]
    assert whos(loaded[0][1]) == {2, 1002, 2003}
    dealt = loaded[0][0].dealt
    assert dealt["dropped"]["overflow"] == {"episodes": 6, "steps": 6}
    assert dealt["dropped"]["open"] == {"episodes": 0, "steps": 0}
    assert [shard["kept"]["episodes"] for shard in dealt["shards"]] == [2, 2, 2]
    rb = loaded[0][1]
    assert rb.add(rows([5.9])[0]) is None  # what is worse than the worst is refused, as the ranks are known anew
    assert rb.add(rows([6.5])[0]) is not None
    assert sorted(rb[:]["score"].tolist()) == [6.5, 8.0, 9.0]


@pytest.mark.parametrize("resume", ["exact", "env_reset"])
def test_back_to_as_many_no_row_makes_room_for_an_end(tmp_path, resume):
    """A row that is no step of a trajectory goes on nowhere."""
    saved = [rb[:]["who"].tolist() for _, rb in done(job(3, fill, tmp_path, SCORES, 3))]

    def act(ranks, _):
        rb = best(3)
        assert checkpointer(tmp_path, rb, ranks).restore(resume=resume).dealt is None
        return rb[:]["who"].tolist()

    assert done(job(3, act)) == saved


def test_a_save_says_that_nothing_would_be_dropped(tmp_path):
    for report, _ in done(job(3, fill, tmp_path, SCORES, 8)):
        assert report.would_drop == {}


def test_ranks_of_different_sizes_and_some_never_written(tmp_path):
    def write(ranks, rank):
        rb = best(8)
        if rank == 1:
            rb.extend(rows([4.0, 1.0, 3.0, 2.0]))
        checkpointer(tmp_path, rb, ranks).save(1)

    done(job(2, write))

    def act(ranks, rank):
        rb = best([1, 5, 1][rank])
        checkpointer(tmp_path, rb, ranks).restore()
        return sorted(rb[:]["score"].tolist())

    assert done(job(3, act)) == [[4.0], [1.0, 3.0], [2.0]]


def test_another_rank_key_is_refused_and_nothing_changes(tmp_path):
    done(job(2, fill, tmp_path, SCORES, 8))
    for n in (1, 2):

        def act(ranks, _):
            rb = best(8, key="who")
            rb.extend(rows([1.0]))
            with pytest.raises(IncompatibleCheckpoint, match=r"ranked by .*'who'.* as here, got .*'score'"):
                checkpointer(tmp_path, rb, ranks).restore()
            return rb[:]["score"].tolist()

        assert done(job(n, act)) == [[1.0]] * n


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("room", [2, 4, 9])
def test_a_dump_is_converted_to_another_capacity(tmp_path, storage, room):
    rb = best(6, reduction="max")
    rb.extend(rows([3.0, 6.0, 1.0, 5.0, 2.0, 4.0]))
    rb.update_priority(torch.arange(6), torch.arange(1.0, 7.0))
    rb.dumps(tmp_path / "x")
    other = best(room, reduction="max", storage=storage)
    if room < 6:
        gone = "2 episodes with 2 steps" if room == 4 else "4 episodes with 4 steps"
        with pytest.warns(
            UserWarning, match=f"^loads: {tmp_path / 'x'}: left out: {gone} as overflow. The best were taken: .* larger"
        ) as said:
            other.loads(tmp_path / "x", convert=True)
        assert [it.filename for it in said] == [__file__], "it points to the caller's line"
    else:
        other.loads(tmp_path / "x", convert=True)
    assert sorted(other[:]["score"].tolist()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0][-room:]
    before = dict(zip(rb[:]["who"].tolist(), leaves(rb), strict=True))
    assert [before[who] for who in other[:]["who"].tolist()] == leaves(other)
    assert (other[:]["episode"] == 3).all()


def test_a_nan_that_was_stored_goes_first(tmp_path):
    rb = best(4)
    rb.extend(rows([3.0, 6.0, 1.0, 5.0]))
    columns_of(rb)["score"][1] = float("nan")
    rb.dumps(tmp_path / "x")
    other = best(3)
    with pytest.warns(UserWarning, match="left out"):
        other.loads(tmp_path / "x", convert=True)
    assert sorted(other[:]["score"].tolist()) == [1.0, 3.0, 5.0]


def test_offline(tmp_path):
    done(job(3, fill, tmp_path / "old", SCORES, 8))
    arguments = ["reshard", str(tmp_path / "old"), str(tmp_path / "new"), "--ranks", "2", "--capacity", "3"]
    refused = CliRunner().invoke(main, [*arguments, "--lanes", "2"])
    assert refused.exit_code != 0
    assert "expected targets of 1 lane" in refused.output.replace("\n", " ")
    said = CliRunner().invoke(main, [*arguments, "--lanes", "1"], env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert "dropped: overflow: 6 episodes, 6 steps" in said.output

    def act(ranks, _):
        rb = best(3)
        assert checkpointer(tmp_path / "new", rb, ranks).restore().dealt is None
        return sorted(rb[:]["score"].tolist())

    assert done(job(2, act)) == [[6.0, 8.0, 9.0], [5.0, 7.0, 8.0]]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_plan_is_that_of_an_oracle(data):
    """Python's sort, and a deal by hand."""
    shards = data.draw(st.lists(st.lists(st.integers(-3, 3), max_size=8), min_size=1, max_size=4))
    room = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    sources, ages = [], {}
    for which, scores in enumerate(shards):
        n = len(scores)
        numbers = np.array(data.draw(st.permutations(range(1, n + 1))), np.int64)
        clock = n + 1 + data.draw(st.integers(0, 5))
        runs = np.stack([np.zeros(n), np.arange(n), np.arange(n) + 1, numbers, np.full(n, 3)], 1).astype(np.int64)
        sources.append(Source(clock, runs))
        ages |= {(which, i): clock - int(numbers[i]) for i in range(n)}
    targets = [Target(1, size) for size in room]
    values = [np.array(scores, np.float64) for scores in shards]
    plan = plan_by_rank(sources, values, targets)

    order = sorted(
        ((which, i) for which, scores in enumerate(shards) for i in range(len(scores))),
        key=lambda at: (-shards[at[0]][at[1]], at),
    )
    got = [[] for _ in room]
    left, turn = list(order), 0
    while left and any(len(mine) < size for mine, size in zip(got, room, strict=True)):
        if len(got[turn]) < room[turn]:
            got[turn].append(left.pop(0))
        turn = (turn + 1) % len(room)
    expected = [
        (rank, 0, position, *at)
        for rank, mine in enumerate(got)
        for position, at in enumerate(sorted(mine, key=lambda at: (-ages[at], at)))
    ]
    assert list(zip(*(a.tolist() for a in plan[:5]), strict=True)) == expected
    dropped = [sum(at[0] == which for at in left) for which in range(len(shards))]
    assert plan.drops[:, DROPPED.index("overflow")].tolist() == [[n, n] for n in dropped]
    assert plan.drops.sum() == 2 * len(left)
    assert plan.steps.tolist() == [1] * len(expected)


def test_one_process_alone(tmp_path):
    rb = best(6)
    rb.extend(rows([3.0, 6.0, 1.0, 5.0, 2.0, 4.0]))
    ck = checkpointer(tmp_path, rb, Ranks.local())
    ck.save(1)
    other = best(2)
    with pytest.warns(UserWarning, match="4 steps did not fit"):
        checkpointer(tmp_path, other, Ranks.local()).restore()
    assert sorted(other[:]["score"].tolist()) == [5.0, 6.0]
