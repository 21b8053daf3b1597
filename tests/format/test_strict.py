import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram.format import strict
from engram.saved import documents
from tests.fresh import run

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(texts, values, max_size=4))
def test_parse_undoes_encode(value):
    raw = documents.encode(value)
    assert repr(strict.parse(raw)) == repr(dict_in_order(value))
    assert documents.encode(strict.parse(raw)) == raw


def dict_in_order(value):
    if isinstance(value, dict):
        return {key: dict_in_order(value[key]) for key in sorted(value)}
    return [dict_in_order(part) for part in value] if isinstance(value, list) else value


def test_digits_in_a_text_cost_nothing(monkeypatch):
    """A sum of hexadecimal digits may have nineteen decimal ones in a row; a number of as many is looked at."""
    monkeypatch.setattr(documents, "plain", lambda *_: pytest.fail("looked at entry by entry"))
    value = {"sum": "1" * 64}
    assert strict.parse(documents.encode(value)) == value
    with pytest.raises(pytest.fail.Exception):
        documents.encode({"sum": 10**18})


@given(st.binary(max_size=60))
def test_any_bytes(raw):
    try:
        tree = strict.parse(raw)
    except ValueError:
        return
    assert strict.parse(documents.encode({"a": tree})) == {"a": tree}


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ({"a": float("nan")}, ValueError, r"\$\.a: expected a finite number, got nan"),
        ({"a": [1, float("-inf")]}, ValueError, r"\$\.a\[1\]: expected a finite number"),
        ({"a": 1 << 63}, ValueError, r"\$\.a: expected a 64-bit integer, got one of 64 bits"),
        ({"a": {1: 2}}, TypeError, r"\$\.a: expected keys that are strings, got 1"),
        ({"a": {2, 3}}, TypeError, r"\$\.a: expected None, a bool.*got set"),
        ({"a": b"x"}, TypeError, r"got bytes\. Keep other things in arrays"),
        ({"a": "\ud800"}, ValueError, r"\$\.a: expected text that is valid Unicode"),
        ({"\ud800": 1}, ValueError, "valid Unicode"),
        ({"a": "x" * (1 << 20)}, ValueError, "at most 1048576 bytes"),
    ],
)
def test_what_is_not_written(value, kind, says):
    with pytest.raises(kind, match=says):
        documents.encode(value)


def test_the_depth_that_is_written_is_the_depth_that_is_read():
    value = {}
    for _ in range(strict.MAX_DEPTH - 1):
        value = {"a": value}
    assert strict.parse(documents.encode(value)) == value
    with pytest.raises(ValueError, match="nested more than 16 deep"):
        documents.encode({"a": value})
    with pytest.raises(ValueError, match=r"\$(\.a){16}: nested more than 16 deep"):
        strict.parse(b'{"a":' * 17 + b"1" + b"}" * 17)


class Inner(msgspec.Struct, frozen=True):
    x: int = 0


class Some(documents.Document, frozen=True, kw_only=True):
    inner: Inner
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = {}
    free: dict[str, object] = {}
    format: str = "some"


@pytest.mark.parametrize("where", [("new",), ("inner", "new"), ("many", 0, "new"), ("named", "a", "new")])
def test_entries_that_are_not_known(where, tmp_path):
    def document(version):
        tree = {"format": "some", "version": version, "inner": {"x": 1}, "many": [{"x": 2}], "named": {"a": {"x": 3}}}
        inner = tree
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = 5
        return documents.encode(tree)

    with pytest.raises(documents.corrupt(tmp_path, "").__class__, match="an unknown entry 'new'"):
        documents.decode(document([1, 0]), tmp_path, Some)
    assert documents.decode(document([1, 1]), tmp_path, Some).inner.x == 1  # a newer engram knows what it is


def test_free_entries_are_free(tmp_path):
    raw = documents.encode(Some(inner=Inner(1), free={"a": {"b": 1}}))
    assert documents.decode(raw, tmp_path, Some).free == {"a": {"b": 1}}


def test_threads_that_read_a_class_for_the_first_time():
    """msgspec describes a class when it is first read: two threads that did so at once ended the process."""
    out = run(
        """
        import sys, threading, msgspec
        from engram.saved import documents
        sys.setswitchinterval(1e-6)

        def at_once(work, threads=8):
            begin = threading.Barrier(threads)
            def body():
                begin.wait()
                done.append(work())
            done = []
            running = [threading.Thread(target=body) for _ in range(threads)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            return done

        for _ in range(60):
            class Inner(msgspec.Struct, frozen=True):
                a: "int"
                b: "list[dict[str, int]]"

            class Some(documents.Document, frozen=True, kw_only=True):
                inner: "Inner"
                many: "list[Inner]" = []
                format: str = "some"

            some = Some(inner=Inner(1, [{"a": 2}]))
            assert at_once(lambda: documents.decode(documents.encode(some), "a file", Some) == some) == [True] * 8
        print("fine")
        """
    )
    assert out == "fine"
