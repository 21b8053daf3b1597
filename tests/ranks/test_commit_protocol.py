"""Once there is a checkpoint, no rank says that there is none."""

import pytest

from engram.saved import attempts
from engram.saved.series import Series
from tests.ranks.jobs import buffer, checkpointer, done, job, play


@pytest.mark.parametrize("error", [OSError(5, "EIO"), RuntimeError("a later incarnation")])
@pytest.mark.parametrize("what", ["set_latest", "retire"])
def test_what_cannot_be_tidied_is_a_warning_in_the_log(tmp_path, monkeypatch, caplog, what, error):
    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [3])
        ck = checkpointer(tmp_path, rb, ranks, keep=1)
        names = [ck.save(1).name]
        ranks.gather(b"", 60.0)  # rank 0 has tidied
        monkeypatch.setattr(Series, what, fails) if rank == 0 else None
        ranks.gather(b"", 60.0)
        names.append(ck.save(2).name)
        ranks.gather(b"", 60.0)
        monkeypatch.undo() if rank == 0 else None
        ranks.gather(b"", 60.0)
        return [*names, ck.save(3).name]

    def fails(*_, **__):
        raise error

    first, second = done(job(2, act))
    assert first == second
    assert caplog.text.count(f"{first[1]} is there; LATEST and old ones stay as they are") == 1
    assert (tmp_path / "LATEST").read_text().strip() == first[2]
    assert list(map(str, attempts.names(tmp_path))) == first[2:]


def open_no_decided_one(known, folder, manifest=None, *, real=Series.open):
    if manifest is None:
        raise OSError(24, "too many open files")
    return real(known, folder, manifest)


def test_a_report_that_cannot_be_made_is_a_warning_in_the_log(tmp_path, monkeypatch, caplog):
    ck = checkpointer(tmp_path, buffer(), None)
    play(ck._job.buffer, 0, 0, [3])
    with monkeypatch.context() as patch:
        patch.setattr(Series, "open", open_no_decided_one)
        report = ck.save(7)
    assert (report.step, report.steps, report.name) == (7, 0, Series(tmp_path).latest()[0].name)
    assert "lacks figures: [Errno 24]" in caplog.text
    assert ck.save(8).steps == 3


def test_another_user_state_is_told_before_the_vote(tmp_path, caplog):
    """It is no error, and of all kinds of states the comparison itself is none."""

    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [3])
        return checkpointer(tmp_path, rb, ranks).save(1, user={"model": [rank, 0.1, None, {"ä": True}]}).name

    assert len(set(done(job(2, act)))) == 1
    assert caplog.text.count("user: expected the same on all ranks, got other keys or values on rank 1") == 1
    caplog.clear()
    done(job(2, lambda ranks, rank: checkpointer(tmp_path, buffer(), ranks).save(2, user={"m": (1, 0.1)})))
    assert "user: expected" not in caplog.text
