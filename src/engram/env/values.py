"""Values that environments, agents and infos hand over, as arrays of declared dtypes: those of every step, notes, and infos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import NamedTuple, SupportsFloat, TypeAlias, TypeVar, cast

import numpy as np
from torch import Tensor

from engram._support.field_paths import FieldPath, checked_path, public

Mask: TypeAlias = "np.typing.NDArray[np.bool_]"
Array: TypeAlias = "np.typing.NDArray[np.generic]"
Nested: TypeAlias = "Array | dict[str, Nested] | tuple[Nested, ...]"
Spec: TypeAlias = "np.dtype[np.generic] | dict[str, Spec] | tuple[Spec, ...]"
Key: TypeAlias = str | tuple[str, ...]
#: Fields by name: a value of one environment each, of which dtype and shape count. They may be nested.
Examples: TypeAlias = Mapping[str, object] | Mapping[tuple[str, ...], object] | Mapping[Key, object]

S = TypeVar("S", bound=np.generic)
BOOL, FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)
#: Kinds of dtypes that are numbers, and those of whole ones.
_NUMBERS, _WHOLE = "biufc", "biu"


def checked_dtype(dtype: object, field: str, what: object) -> np.dtype[np.generic]:
    """The dtype of rows of a ``field``. Raises ``TypeError``: it has none of numbers; ``what`` says what it is."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in _NUMBERS:
        raise TypeError(f"record: {field}: expected numbers of a fixed shape, got {what}. Wrap the environment.")
    return dtype


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
    array = as_array(value)
    return array.item() if array.size == 1 else array


def of_each(value: object, dtype: np.dtype[S], n: int, what: str) -> np.typing.NDArray[S]:
    """What an environment returned for each of ``n`` environments, ``[n, ...]``. One number stands for all of them.

    Raises ``ValueError``: it is of another number of environments; says ``what`` it is.
    """
    array = as_array(value).astype(dtype, copy=False)
    if array.ndim == 0:
        return np.full(n, array)
    if len(array) != n:
        raise ValueError(f"{what}: expected one for each of {n} environments, got {list(array.shape)}.")
    return array[:, 0] if array.shape[1:] == (1,) else array


def some(mask: Mask) -> bool:
    """Whether any is true, in a fifth of the time of ``mask.any()``."""
    return b"\1" in mask.tobytes()


def conformed(spec: Spec, value: object, field: str, says: str = "the environment") -> Nested:
    """A value as arrays of the dtypes of a spec; the same ones where they are that already.

    Args:
        spec, value: as the names say.
        field, says: what it is, and who says of which dtype, for messages.

    Raises:
        TypeError: it is nested in another way, or has fractions where the spec says whole numbers; names the entry.
    """
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


def leaves_in(nested: Nested) -> Iterator[Array]:
    """The arrays in a nesting, in order."""
    if isinstance(nested, np.ndarray):
        yield nested
    else:
        for one in nested.values() if isinstance(nested, dict) else nested:
            yield from leaves_in(one)


def stacked(each: list[Nested]) -> Nested:
    """Those of ``n`` environments."""
    return mapped(lambda *leaves: np.stack(leaves), *each)


def pick(nested: object, i: int | np.typing.NDArray[np.int64]) -> object:
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


# ---- what a row holds besides what every environment gives: values that the agent computes, and entries of infos --------


class Leaf(NamedTuple):
    """A declared field: what it is in one row."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, example: object, what: str) -> Leaf:
        """As an example is. Raises ``TypeError``: it holds no numbers."""
        array = as_array(example)
        if array.dtype.kind not in _NUMBERS:
            raise TypeError(f"{what}: expected an example: numbers of one environment, got {type(example).__name__}.")
        narrow = array.dtype == np.float64 and isinstance(example, float | list | tuple)  # of Python
        return cls(np.dtype(np.float32) if narrow else array.dtype, array.shape)

    def fitted(self, value: object, batch: tuple[int, ...], what: str, says: str) -> Array:
        """A value as an array ``[*batch, *shape]``, which may share its memory. Raises ``TypeError``, ``ValueError``."""
        array = cast("Array", conformed(self.dtype, value, what, says))
        if array.shape != (*batch, *self.shape):
            raise ValueError(f"{what}: expected shape {[*batch, *self.shape]}, as {says} says, got {[*array.shape]}.")
        return array


def leaves_of(values: Examples, what: str, above: FieldPath = ()) -> Iterator[tuple[FieldPath, object]]:
    """The leaves of nested dicts or TensorDicts, with their paths. Raises ``TypeError``, ``ValueError``: bad keys."""
    for key in values.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
        path = (*above, *checked_path(key, what))
        value = cast("Mapping[object, object]", values)[key]
        if isinstance(value, Mapping):
            yield from leaves_of(value, what, path)
        else:
            yield path, value


def _declared(examples: object, what: str) -> dict[FieldPath, Leaf]:
    """The declared fields. Raises ``TypeError``: no examples by name."""
    if examples is not None and not isinstance(examples, Mapping):
        raise TypeError(f"{what}: expected a dict of examples by name, got {type(examples).__name__}.")
    return {path: Leaf.of(value, f"{what}: {public(path)!r}") for path, value in leaves_of(examples or {}, what)}


class Notes:
    """What the agent supplies for the next step of the environments that were recorded with it.

    Raises ``TypeError``, ``ValueError``: bad examples.
    """

    def __init__(self, store: Examples | None = None) -> None:
        self.leaves = _declared(store, "record: store")
        #: How many environments there are: values are ``[*batch, *shape]``.
        self.batch: tuple[int, ...] = ()
        self._values: dict[FieldPath, Array] = {}

    def put(self, *given: Examples) -> None:
        """Keep copies of some values for the next step. Raises as ``ReplayBuffer.note``; nothing is kept then."""
        found = {}
        for path, value in [leaf for values in given for leaf in leaves_of(values, "note")]:
            leaf = self.leaves.get(path)
            if leaf is None:
                known = [public(one) for one in self.leaves]
                raise KeyError(f"note: expected fields of record(env, store=…), some of {known}, got {public(path)!r}.")
            found[path] = np.array(leaf.fitted(value, self.batch, f"note: {public(path)!r}", "record(store=…)"))
        self._values.update(found)

    def check(self, *, needed: bool) -> None:
        """Raise ``RuntimeError`` if the step that begins now is a row, ``needed``, and something is missing."""
        missing = needed and [public(path) for path in self.leaves if path not in self._values]
        if missing:
            raise RuntimeError(
                f"step: expected rb.note({', '.join(f'{path[0]}=…' for path in self.leaves)}) before it, as record(env, store=…) "
                f"declares, got none of {missing}. The environment was not stepped."
            )

    def take(self, *, needed: bool) -> list[Array]:
        """What the step that begins now stores, if it is a row, in the order in which it was declared. It is forgotten."""
        taken = [self._values[path] for path in self.leaves if needed]
        self._values.clear()
        return taken


#: Infos, and whose they are: of the environments of a mask, ``[n]``; of one of ``n``; or of the only one.
Told: TypeAlias = "tuple[object, Mask | int | EllipsisType]"


class Infos:
    """Which entries of infos rows hold: ``before`` the action, with the observation, and after it, below ``"next"``.

    Raises ``TypeError``, ``ValueError``: bad examples.
    """

    def __init__(self, keys: Examples | None = None) -> None:
        declared = _declared(keys, "record: info_keys")
        self.before = {path: leaf for path, leaf in declared.items() if path[0] != "next"}
        self.after = {path: leaf for path, leaf in declared.items() if path[0] == "next"}

    def read(self, leaves: Mapping[FieldPath, Leaf], told: Sequence[Told], *batch: int) -> list[Array]:
        """The entries of some fields, ``[*batch, *shape]`` each; zeros for environments that ``told`` says nothing of.

        Raises ``KeyError``: an info lacks an entry. ``TypeError``, ``ValueError``: it is another one than was declared.
        """
        found = []
        for path, leaf in leaves.items():
            values = np.zeros((*batch, *leaf.shape), leaf.dtype)
            key = path[1:] if leaves is self.after else path
            what = f"step: infos{''.join(f'[{name!r}]' for name in key)}"
            for infos, which in told:
                mask = which if isinstance(which, np.ndarray) else None
                if mask is not None and not some(mask):
                    continue
                value = _entry(infos, key, mask, what)
                fitted = leaf.fitted(value, () if mask is None else batch, what, "record(info_keys=…)")
                values[which] = fitted if mask is None else fitted[mask]
            found.append(values)
        return found


def _entry(infos: object, key: FieldPath, which: Mask | None, what: str) -> object:
    """An entry of infos. ``which``: environments that must have it, where the infos are of several and say who does."""
    for name in key:
        known = [one for one in [*infos.keys()] if not str(one).startswith("_")] if isinstance(infos, Mapping) else []
        if not isinstance(infos, Mapping) or name not in known:
            raise KeyError(
                f"{what}: expected this entry, as record(info_keys=…) says, got {known}. Let the environment give it in every step."
            )
        has = infos.get(f"_{name}")
        if which is not None and has is not None and (which & ~as_array(has).astype(np.bool_)).any():
            raise KeyError(f"{what}: expected it of all environments, got it of {as_array(has).nonzero()[0].tolist()}.")
        infos = infos[name]
    return infos
