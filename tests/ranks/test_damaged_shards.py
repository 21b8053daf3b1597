"""A damaged block of a shard: a restore names it, and what ranks held before is what they hold."""

import pytest

from engram import CorruptCheckpoint, RankFailed
from engram.saved.part_reader import PartReader
from tests.ranks.jobs import buffer, checkpointer, done, job, play, steps_of
from tests.saved.checkpoint_folders import tree
from tests.saved.test_damage import flip
from tests.twins import contents

SAVED_BY = 3


def save(ranks, rank, root):
    rb = buffer(2, 64)
    for lane in range(2):
        play(rb, rank, lane, [5, 7 + rank, 3])
    return checkpointer(root, rb, ranks).save(1).path


def segments(path):
    return sorted(path.glob("rank-*/storage/seg/*"))


def make(rank, holds, lanes, length):
    rb = buffer(lanes, length)
    if rank in holds:
        play(rb, 70 + rank, 0, [6, 2])
    return rb


@pytest.mark.parametrize("holds", [{0, 1, 2}, {1}], ids=["all", "one"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_damaged_block_costs_nobody_its_rows(tmp_path, n, holds):
    path = done(job(SAVED_BY, save, tmp_path))[0]
    holds = {rank for rank in holds if rank < n} or {0}
    for file in segments(path)[::5]:
        raw = file.read_bytes()
        flip(file)
        as_it_was = tree(tmp_path)

        def act(ranks, rank):
            rb = make(rank, holds, 2, 64)
            before = contents(rb)
            with pytest.raises((CorruptCheckpoint, RankFailed), match=f"{file.name}.*expected the checksum"):
                checkpointer(tmp_path, rb, ranks).restore(1)
            return contents(rb) == before and (len(rb) == 8) == (rank in holds)

        assert all(done(job(n, act)))
        assert tree(tmp_path) == as_it_was
        file.chmod(0o600)
        file.write_bytes(raw)


def test_one_extra_read_in_all_and_none_into_empty_buffers(tmp_path, monkeypatch):
    done(job(SAVED_BY, save, tmp_path))
    looked, real = [], PartReader.damage

    def damage(reader):
        looked.append(reader.folder.parent.name)
        return real(reader)

    monkeypatch.setattr(PartReader, "damage", damage)

    def act(ranks, rank, n, holds):
        rb = make(rank, holds, 2, 64)
        checkpointer(tmp_path, rb, ranks).restore(1)
        return steps_of(rb)

    for n in (2, 3, 5):
        found = done(job(n, act, n, set()))
        assert looked == []
        assert done(job(n, act, n, {1})) == found
        assert sorted(looked) == [f"rank-{shard:05d}-of-{SAVED_BY:05d}" for shard in range(SAVED_BY)]
        looked.clear()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("holds", [set(), {0}], ids=["empty", "one holds rows"])
def test_of_two_that_only_reading_tells_apart_the_older_one_is_taken(tmp_path, n, holds):
    """By all ranks, whichever meets the damage; whoever asks for that one by name or step gets the error."""

    def two(ranks, rank):
        rb = buffer(2, 64)
        ck = checkpointer(tmp_path, rb, ranks, full_every=1)
        play(rb, rank, 0, [5, 3])
        ck.save(1)
        older = steps_of(rb)
        play(rb, rank, 1, [4], first=7)
        return older, ck.save(2).path

    saved = done(job(2, two))
    older, newest = set().union(*(steps for steps, _ in saved)), saved[0][1]
    flip(segments(newest)[-1])

    def act(ranks, rank, **how):
        rb = make(rank, holds, 2, 64)
        ck = checkpointer(tmp_path, rb, ranks)
        if how:
            with pytest.raises((CorruptCheckpoint, RankFailed), match="expected the checksum"):
                ck.restore(**how)
            return None
        report = ck.restore()
        return report.step, steps_of(rb), [problem.path.name for problem in report.passed_over]

    with pytest.warns(UserWarning, match="is loaded, and not: .*expected the checksum"):
        every = done(job(n, act))
    assert [step for step, _, _ in every] == [1] * n
    assert set().union(*(steps for _, steps, _ in every)) == older
    assert every[0][2] == [newest.name]
    for how in ({"step": 2}, {"name": newest.name}):
        done(job(n, lambda ranks, rank, how=how: act(ranks, rank, **how)))
