"""What is saved when a rank fails, and how ranks leave the watch."""

import pytest

from engram import Ranks
from engram.format import series
from tests.ranks.jobs import buffer, checkpointer, done, job, play, steps_of, whos


class Failed(Exception):
    pass


def crashes(root, *, heard):
    """A process that fails after ``heard(checkpointer)``, with a step that none of that knows; its next incarnation's restore."""
    rb = buffer(2, 64)
    play(rb, 0, 0, [3])
    ck = checkpointer(root, rb, Ranks.local())
    with pytest.raises(Failed), ck.guard():
        heard(ck)
        play(rb, 0, 1, [4])
        raise Failed
    return checkpointer(root, buffer(2, 64), Ranks.local())


HEARD = [
    pytest.param(lambda ck: ck.save(1000, user={"m": 1}), 1000, {"m": 1}, id="save"),
    pytest.param(lambda ck: ck.poll(1000, user={"m": 1}), 1000, {"m": 1}, id="poll"),
    pytest.param(lambda ck: (ck.save(900, user={"m": 1}), ck.poll(1000)), 1000, {"m": 1}, id="poll without user"),
    pytest.param(lambda ck: (ck.poll(900, user={"m": 1}), ck.save(1000, user={"m": 2})), 1000, {"m": 2}, id="both"),
    pytest.param(lambda ck: (ck.poll(1000), ck.save(900)), 1000, {}, id="an older save"),
    pytest.param(lambda ck: (ck.save(1000, user={"m": 1}), ck.save(1001), ck.restore(1000)), 1000, {"m": 1}, id="back"),
]


@pytest.mark.parametrize(("heard", "step", "user"), HEARD)
def test_a_crash_checkpoint_is_of_the_latest_step_and_user_state(tmp_path, heard, step, user):
    again = crashes(tmp_path, heard=heard)
    (crashed,) = [entry for entry in again.list() if "crash" in entry.name]
    assert crashed.step == step
    report = again.restore(name=crashed.name)
    assert (report.step, report.user, report.steps) == (step, user, 7)


def test_at_most_gives_nothing_that_is_newer(tmp_path):
    def heard(ck):
        for step in (100, 200, 300):
            ck.save(step)

    again = crashes(tmp_path, heard=heard)
    assert [(again.restore(at_most=step).step, "crash" in again.restore(at_most=step).name) for step in (299, 300)] == [
        (200, False),
        (300, True),
    ]


def test_what_was_told_is_a_copy(tmp_path):
    user = {"m": [1]}

    def heard(ck):
        ck.poll(5, user=user)
        user["m"].append(object())

    assert crashes(tmp_path, heard=heard).restore().user == {"m": [1]}
