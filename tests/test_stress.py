"""How much of a stress test an ordinary run does."""

import json
import re

import pytest

from tests import stress


@pytest.mark.parametrize(
    ("cases", "n", "kept"),
    [
        (6, 3, [0, 2, 5]),
        (36, 4, [0, 11, 23, 35]),
        (2, 1, [0]),
        (2, 5, [0, 1]),
        (1, 1, [0]),
        (3, 0, []),
        (3, 99, [0, 1, 2]),
    ],
)
def test_a_sample_is_spread_evenly(cases, n, kept):
    assert stress.others(list(range(cases)), n) == [case for case in range(cases) if case not in kept]


def test_an_ordinary_run_takes_as_many_cases_as_their_time_allows(monkeypatch):
    monkeypatch.setattr(stress, "_took", lambda: {"a": 0.1, "b": 0.2, "c": 0.7, "d": 0.8, "killed": 2.9})
    assert [stress.cases(test) for test in ("unknown", "a", "b", "c", "d", "killed")] == [2, 2, 1, 1, 0, 1]
    assert stress.cases("tests/test_docs.py::test_examples_of_a_page") > 1000


def test_seconds_are_kept_of_tests_that_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(stress, "_TOOK", tmp_path / "seconds.json")
    monkeypatch.setattr(stress, "_took", lambda: {"kept": 1.0, "faster": 7.0})
    stress.record({"faster": 0.1, "new": 2.04})
    monkeypatch.undo()
    assert json.loads((tmp_path / "seconds.json").read_text()) == {"kept": 1.0, "new": 2.0}


def test_tests_whose_seconds_are_known_exist():
    """``make test-all ARGS=--record-seconds`` writes them anew; a test that is gone leaves the file by hand."""
    names = json.loads(stress._TOOK.read_text())
    modules = {name.partition("::")[0] for name in names}
    texts = {module: (stress._TOOK.parents[1] / module).read_text() for module in modules}
    gone = [
        name
        for name in names
        for module, *parts in [name.split("::")]
        if not all(
            part == "runTest" or re.search(rf"\b(def|class) {part}\b|^{part} =", texts[module], re.MULTILINE)
            for part in parts
        )
    ]
    assert not gone
