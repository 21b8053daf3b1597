"""No public name and no keyword vanishes."""

import inspect
import typing

import pytest

import engram
from engram import samplers
from engram.writers import removers
from tests.structure import public_names


def test_no_public_name_vanishes_and_no_call_breaks():
    """``python -m tests.structure --add-names`` freezes names that have been added since."""
    assert not list(public_names.vanished(public_names.kept(), public_names.found()))


def described(function):
    return {"m": {"f": {"call": public_names._parameters(function)}}}


def before(a, /, b, c=0, *, d, e=0):
    """What programs call today."""


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (lambda a, /, b, c=0, *, d, e=0, f=0: ..., None),
        (lambda a, /, b, c=0, f=0, *, d, e=0: ..., None),
        (lambda a, b, c=0, *, d=0, **more: ..., None),
        (lambda *args, **more: ..., None),
        (lambda a, /, b, c=0, *, d: ..., "e is gone"),
        (lambda a, /, b, *, d, e=0: ..., "c is gone"),
        (lambda a, /, b, c, *, d, e=0: ..., "c is required now"),
        (lambda a, /, c, b=0, *, d, e=0: ..., "b is not parameter 1 now"),
        (lambda a, b, c=0, /, *, d, e=0: ..., "b is no keyword now"),
        (lambda a, /, b, c=0, *, d, e=0, f: ..., "f is new and required"),
    ],
)
def test_it_sees_what_breaks_a_call(now, said):
    found = list(public_names.vanished(described(before), described(now)))
    assert said is None or any(said in one for one in found)
    assert (said is None) == (not found)


def test_it_sees_names_that_are_gone():
    one = {"call": "()", "members": {"a": "(self)", "b": None}}
    other = {"call": "()", "members": {"a": "(self, more=)"}}
    said = public_names.vanished({"m": {"C": one, "d": None}, "n": {}}, {"m": {"C": other}})
    assert list(said) == ["m.C.b is gone", "m.d is gone", "n is gone"]


class Table(typing.TypedDict, total=False):
    first: int
    second: str


def test_keywords_of_a_table_count():
    def call(**more: typing.Unpack[Table]): ...

    assert inspect.signature(call)
    assert public_names._parameters(call) == "(*, first=, second=)"


def test_what_a_store_notes_can_be_made_again():
    """``ReplayBuffer.open`` makes samplers and removers from these tables."""
    public = {name: getattr(engram, name) for name in engram.__all__}
    of = lambda room: {n for n, v in public.items() if inspect.isclass(v) and v.__module__.startswith(room)}  # noqa: E731
    protocols = {name for name, value in public.items() if getattr(value, "_is_protocol", False)}
    assert of("engram.samplers.") - protocols - {"FieldReader"} == {cls.__name__ for cls in samplers.OF_ROWS}
    assert of("engram.writers.removers") - protocols == {*removers.KNOWN}
