"""Each room keeps to its budget of code lines, and the rooms together to what issues allow."""

from tests.structure import budget


def test_rooms_keep_to_their_budget():
    assert list(budget.above(budget.rooms(), budget.ROOMS, budget.ALLOWED)) == []


def test_what_breaks_a_budget_is_said():
    allowed = {"before": 25, "1": 5}
    assert list(budget.above({"a": 10, "b": 20}, {"a": 10, "b": 20}, allowed)) == []
    (said,) = budget.above({"a": 11, "b": 19}, {"a": 10, "b": 20}, allowed)
    assert said.startswith("a: expected at most 10 code lines, got 11")
    assert list(budget.above({"a": 10, "c": 1}, {"a": 10, "b": 21}, allowed)) == [
        "c: it has 1 code lines and no place in the budget",
        "the rooms may have 31 code lines together, and issues allow 30",
        "b: it is in the budget and not in the package",
    ]


def test_every_line_is_in_one_room():
    assert sum(budget.rooms().values()) == sum(len(source.lines) for source in budget.figures.package())
