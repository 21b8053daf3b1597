"""Values that environments, agents and infos hand over, as arrays of declared dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, SupportsFloat, TypeAlias, TypeVar, cast

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mask: TypeAlias = "NDArray[np.bool_]"
Array: TypeAlias = "NDArray[np.generic]"
Nested: TypeAlias = "Array | dict[str, Nested] | tuple[Nested, ...]"
Spec: TypeAlias = "np.dtype[np.generic] | dict[str, Spec] | tuple[Spec, ...]"

S = TypeVar("S", bound=np.generic)
BOOL, FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)
#: Kinds of dtypes that are numbers, and those of whole ones.
_NUMBERS, _WHOLE = "biufc", "biu"


def checked_dtype(dtype: object, field: str, what: object) -> np.dtype[np.generic]:
    """The dtype of rows of a ``field``. Raises ``TypeError``: it has none of numbers; ``what`` says what it is."""
    if not isinstance(dtype, np.dtype) or not is_numeric(dtype):
        raise TypeError(f"record: {field}: expected numbers of a fixed shape, got {what}. Wrap the environment.")
    return dtype


def is_numeric(dtype: np.dtype[np.generic]) -> bool:
    """Whether it is of numbers."""
    return dtype.kind in _NUMBERS


def as_array(value: object) -> Array:
    """What an environment returned as an array, which shares its memory where it can.

    Args:
        value: an array, a number, a tensor (on any device, of any dtype, with or without gradient), or a list or tuple of these.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, Tensor):
        try:
            return value.numpy(force=True)
        except TypeError:  # bfloat16 and the like
            return value.float().numpy(force=True)
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor | list | tuple) for one in value):
        return np.stack([as_array(one) for one in value])
    return np.asarray(value)


def as_number(value: object) -> SupportsFloat:
    """A number that an environment returned: one of Python or NumPy. More than one number: an array of them."""
    if isinstance(value, (bool, int, float)):  # faster than a union
        return value
    array = as_array(value)
    return array.item() if array.size == 1 else array


def of_each(value: object, dtype: np.dtype[S], n: int, what: str) -> NDArray[S]:
    """What an environment returned for each of ``n`` environments, ``[n, ...]``. One number stands for all of them.

    Raises ``ValueError``: it is of another number of environments; says ``what`` it is.
    """
    if isinstance(value, np.ndarray) and value.dtype is dtype and value.shape == (n,):
        return value
    array = as_array(value).astype(dtype, copy=False)
    if array.ndim == 0:
        return np.full(n, array)
    if len(array) != n:
        raise ValueError(f"{what}: expected one for each of {n} environments, got {list(array.shape)}.")
    return array[:, 0] if array.shape[1:] == (1,) else array


def some(mask: Mask) -> bool:
    """Whether any is true, in a fifth of the time of ``mask.any()``."""
    return b"\1" in mask.tobytes()


def every(mask: Mask) -> bool:
    """Whether all are true, in a fifth of the time of ``mask.all()``."""
    return b"\0" not in mask.tobytes()


def conformed(spec: Spec, value: object, field: str, says: str = "the environment") -> Nested:
    """A value as arrays of the dtypes of a spec; the same ones where they are that already.

    Args:
        spec, value: as the names say.
        field, says: what it is, and who says of which dtype, for messages.

    Raises:
        TypeError: it is nested in another way, or has fractions where the spec says whole numbers; names the entry.
    """
    if isinstance(value, np.ndarray) and value.dtype is spec:
        return value
    if isinstance(spec, dict):
        if not isinstance(value, Mapping) or set(value.keys()) != spec.keys():
            got = list(value.keys()) if isinstance(value, Mapping) else type(value).__name__
            raise TypeError(f"record: {field}: expected a dict of {list(spec)}, got {got}.")
        return {key: conformed(entry, value[key], f"{field}[{key!r}]") for key, entry in spec.items()}
    if isinstance(spec, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(spec):
            raise TypeError(f"record: {field}: expected a tuple of {len(spec)}, got {type(value).__name__}.")
        return tuple(conformed(entry, value[i], f"{field}[{i}]") for i, entry in enumerate(spec))
    array = np.array(value) if isinstance(value, int) else as_array(value)
    if array.dtype == spec:
        return array
    if array.dtype.kind not in (_WHOLE if spec.kind in _WHOLE else _NUMBERS):
        raise TypeError(f"record: {field}: expected {spec}, as {says} says, got {array.dtype}.")
    made = array.astype(spec)
    if spec.kind in _WHOLE and not np.can_cast(array.dtype, spec) and not np.array_equal(made, array):
        raise TypeError(f"record: {field}: expected values of {spec}, as {says} says, got {array.dtype} beyond it.")
    return made


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


def fill(target: Nested, value: Nested | np.generic) -> bool:
    """Write a value of the same nesting into these arrays. False: one has another shape, and some may be written."""
    if isinstance(target, np.ndarray):
        same = isinstance(value, np.ndarray | np.generic) and target.shape == value.shape
        if same:
            target[...] = cast("Array", value)
        return same
    names = target if isinstance(target, dict) else range(len(target))
    return all(fill(target[name], value[name]) for name in names)  # type: ignore[index]


def stacked(each: list[Nested]) -> Nested:
    """Those of ``n`` environments."""
    return mapped(lambda *leaves: np.stack(leaves), *each)


def taken(nested: Nested, which: NDArray[np.int64]) -> Nested:
    """Those of some environments."""
    return mapped(lambda leaf: leaf.take(which, 0), nested)


def pick(nested: object, i: int) -> object:
    """That of one environment: of arrays, tensors or lists of ``n``, or dicts and tuples of them."""
    if isinstance(nested, Mapping):
        return {key: pick(nested[key], i) for key in nested.keys()}  # noqa: SIM118 - a TensorDict iterates over its batch
    if isinstance(nested, tuple):
        return tuple(pick(one, i) for one in nested)
    return nested[i]  # type: ignore[index]


def put(nested: Nested, i: int, value: Nested) -> None:
    """Replace that of one environment, in place."""

    def replace(leaf: Array, new: Array) -> Array:
        leaf[i] = new
        return leaf

    mapped(replace, nested, value)
