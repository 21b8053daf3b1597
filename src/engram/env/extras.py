"""What a row holds besides what every environment gives: values that the agent computes, and entries of infos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np

from engram._support.field_paths import FieldPath, checked_path, public
from engram.env.values import Array, as_array, conformed, is_numeric, some

if TYPE_CHECKING:
    from types import EllipsisType

    from engram.env.values import Mask

Key: TypeAlias = str | tuple[str, ...]
#: Fields by name: a value of one environment each, of which dtype and shape count. They may be nested.
Examples: TypeAlias = Mapping[str, object] | Mapping[tuple[str, ...], object] | Mapping[Key, object]


class Leaf(NamedTuple):
    """A declared field: what it is in one row."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, example: object, what: str) -> Leaf:
        """As an example is. Raises ``TypeError``: it holds no numbers."""
        array = as_array(example)
        if not is_numeric(array.dtype):
            raise TypeError(
                f"{what}: expected an example, numbers of the shape that one environment has, got {type(example).__name__}."
            )
        narrow = array.dtype == np.float64 and isinstance(example, float | list | tuple)  # of Python
        return cls(np.dtype(np.float32) if narrow else array.dtype, array.shape)

    def fitted(self, value: object, batch: tuple[int, ...], what: str, says: str) -> Array:
        """A value as an array ``[*batch, *shape]``, which may share its memory. Raises ``TypeError``, ``ValueError``."""
        array = cast("Array", conformed(self.dtype, value, what, says))
        if array.shape != (*batch, *self.shape):
            raise ValueError(
                f"{what}: expected shape {[*batch, *self.shape]}, as {says} says, got {list(array.shape)}."
            )
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
        self._batch: tuple[int, ...] = ()
        self._values: dict[FieldPath, Array] = {}

    def belong_to(self, *batch: int) -> None:
        """From now on values are ``[*batch, *shape]``: there are so many environments."""
        self._batch = batch

    def put(self, *given: Examples) -> None:
        """Keep copies of some values for the next step. Raises as ``ReplayBuffer.note``; nothing is kept then."""
        found = {}
        for path, value in [leaf for values in given for leaf in leaves_of(values, "note")]:
            leaf = self.leaves.get(path)
            if leaf is None:
                known = [public(one) for one in self.leaves]
                raise KeyError(
                    f"note: expected fields that record(env, store=…) declares, some of {known}, got {public(path)!r}."
                )
            found[path] = np.array(leaf.fitted(value, self._batch, f"note: {public(path)!r}", "record(store=…)"))
        self._values.update(found)

    def take(self, *, needed: bool) -> list[Array]:
        """What the step that begins now stores, in the order in which it was declared. It is forgotten.

        Args:
            needed: the step is a row.

        Raises ``RuntimeError``: some is missing that is needed.
        """
        if not self.leaves:
            return []
        missing = needed and [public(path) for path in self.leaves if path not in self._values]
        if missing:
            raise RuntimeError(
                f"step: expected rb.note({', '.join(f'{path[0]}=…' for path in self.leaves)}) before it, as record(env, store=…) "
                f"declares, got none of {missing}. The environment was not stepped."
            )
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
            raise KeyError(
                f"{what}: expected it of every environment, got it of {as_array(has).nonzero()[0].tolist()}."
            )
        infos = infos[name]
    return infos
