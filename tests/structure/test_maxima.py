"""Figures and calls stay below their maxima, which ``python -m tests.structure --tighten`` lowers."""

import textwrap

import pytest

from tests.structure import calls, figures, maxima

FIGURES = maxima.kept()["figures"]
CALLS = maxima.kept()["calls"]
#: Two threads that read one file may both open it.
CALLS_MORE = 1.005


@pytest.fixture(scope="module")
def measured():
    return figures.measured()


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_rises(name, measured):
    found, where = measured[name]
    assert found <= FIGURES[name], f"{name}: at most {FIGURES[name]}, got {found} {where}"


@pytest.mark.parametrize("name", CALLS)
def test_no_trip_calls_more(name):
    found, functions = calls.counted()[name]
    assert found <= CALLS[name] * CALLS_MORE, f"{name}: at most {CALLS[name]} calls, got {found}: {functions[:40]}"


def test_every_figure_has_a_maximum(measured):
    assert set(FIGURES) == set(measured)
    assert set(CALLS) == set(calls.counted())


def test_maxima_that_could_be_lowered(measured):
    """Fails never; says in the summary what to lower."""
    low = list(maxima.lower({"figures": FIGURES}, {"figures": measured}))
    if low:
        pytest.skip(f"python -m tests.structure --tighten would lower {'; '.join(low)}")


def test_maxima_only_fall():
    measured = {"figures": {"a": (3, ""), "b": (5, "x"), "new": (7, "")}}
    assert maxima.tightened({"figures": {"a": 4, "b": 4, "old": 1}}, measured) == {
        "figures": {"a": 3, "b": 4, "new": 7}
    }
    assert list(maxima.lower({"figures": {"a": 4, "b": 4}}, measured)) == ["a: 4 → 3"]


# ---- the figures themselves --------------------------------------------------------------------------------------------


def test_functions_of_native_code_are_found():
    code = """
    namespace a {
    // void no() {
    struct S { int x = 0; void one() { x = 1; } };
    template <class T>
    std::vector<int> S::two(const T& t) const
    {
        if (t) { return {}; }
        const char* brace = "{";

        return {1};
    }
    S::S(int y) : x(y), z{y} {
        for (;;) {}
    }
    int table[] = {1, 2};
    }  // namespace a
    """
    assert list(figures.functions_of(textwrap.dedent(code))) == [("one", 1), ("S::two", 7), ("S::S", 3)]


def test_a_method_without_a_docstring_shows_that_of_its_base():
    shown = dict(figures.public_functions())
    assert ">>> rb.sampler.masses(" in shown["RandomSampler.masses"]


def test_annotations_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    path = tmp_path / "one.py"
    path.write_text(
        textwrap.dedent(
            '''
            """Not
            counted."""
            from typing import Any
            Data = Any  # counted as a line


            def f(a: Any, b: dict[str, Any], c: list, d: "Data", e: int) -> tuple[Any, ...]:
                """Not counted."""
                return getattr(a, "x"), getattr(a, b), type(a) is int
            '''
        )
    )
    source = figures.Source(path)
    assert len(source.lines) == 4
    assert figures._anys(source, {"Data"}) == 5
    monkeypatch.setattr(figures, "package", lambda: [source])
    assert figures._any_aliases() == {"Data"}
    assert len(figures._sniffs()) == 1
    assert len(list(figures._exact_types())) == 1
