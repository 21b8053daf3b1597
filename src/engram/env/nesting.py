"""Observations and actions: arrays, or dicts and tuples of them, of ``n`` environments with a leading dimension ``n``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.generic]
    #: Arrays, or dicts and tuples of them.
    Nested: TypeAlias = Array | dict[str, "Nested"] | tuple["Nested", ...]
    #: The dtypes of an observation or action, nested as it is.
    Spec: TypeAlias = np.dtype[np.generic] | dict[str, "Spec"] | tuple["Spec", ...]

#: Kinds of dtypes that are numbers, and those of whole ones.
_NUMBERS, _WHOLE = "biufc", "biu"


def checked_dtype(dtype: object, field: str, what: object) -> np.dtype[np.generic]:
    """The dtype of rows of a ``field``. Raises ``TypeError``: it has none of numbers; ``what`` says what it is."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in _NUMBERS:
        raise TypeError(f"record: {field}: expected numbers of a fixed shape, got {what}. Wrap the environment.")
    return dtype


def conformed(spec: Spec, value: object, field: str) -> Nested:
    """A value as arrays of the dtypes of a spec; the same ones where they are that already.

    Raises:
        TypeError: it is nested in another way, or has fractions where the spec says whole numbers; names the entry.
    """
    if isinstance(spec, dict):
        if not isinstance(value, dict) or value.keys() != spec.keys():
            got = list(value) if isinstance(value, dict) else type(value).__name__
            raise TypeError(f"record: {field}: expected a dict of {list(spec)}, got {got}.")
        return {key: conformed(entry, value[key], f"{field}[{key!r}]") for key, entry in spec.items()}
    if isinstance(spec, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(spec):
            raise TypeError(f"record: {field}: expected a tuple of {len(spec)}, got {type(value).__name__}.")
        return tuple(conformed(entry, value[i], f"{field}[{i}]") for i, entry in enumerate(spec))
    array: Array = np.asarray(value)
    if array.dtype == spec:
        return array
    if array.dtype.kind not in (_WHOLE if spec.kind in _WHOLE else _NUMBERS):
        raise TypeError(f"record: {field}: expected {spec}, as the environment says, got {array.dtype}.")
    cast = array.astype(spec)
    if spec.kind in _WHOLE and not np.can_cast(array.dtype, spec) and not np.array_equal(cast, array):
        raise TypeError(
            f"record: {field}: expected values of {spec}, as the environment says, got {array.dtype} beyond it."
        )
    return cast


def has_tuple(spec: Spec) -> bool:
    """Whether a tuple is in it."""
    return isinstance(spec, tuple) or (isinstance(spec, dict) and any(map(has_tuple, spec.values())))


def mapped(change: Callable[..., Array], first: Nested, *others: Nested) -> Nested:
    """``change`` of the leaves that stand in the same place of several nestings."""
    if isinstance(first, dict):
        return {key: mapped(change, first[key], *(other[key] for other in others)) for key in first}  # type: ignore[call-overload]
    if isinstance(first, tuple):
        return tuple(mapped(change, *entries) for entries in zip(first, *others, strict=True))
    return change(first, *others)


def copied(nested: Nested) -> Nested:
    """A copy."""
    return nested.copy() if isinstance(nested, np.ndarray) else mapped(np.array, nested)


def stacked(each: list[Nested]) -> Nested:
    """Those of ``n`` environments."""
    return mapped(lambda *leaves: np.stack(leaves), *each)


def taken(nested: Nested, which: NDArray[np.int64]) -> Nested:
    """Those of some environments."""
    return mapped(lambda leaf: leaf.take(which, 0), nested)


def pick(nested: Nested, i: int) -> Nested:
    """That of one environment."""
    return mapped(lambda leaf: leaf[i], nested)


def put(nested: Nested, i: int, value: Nested) -> None:
    """Replace that of one environment, in place."""

    def replace(leaf: Array, new: Array) -> Array:
        leaf[i] = new
        return leaf

    mapped(replace, nested, value)
