"""State: what every ``state_dict`` is made of, and what takes one over.

Tensors and plain values only (dict with str keys, list, str, int, float, bool, None), so that ``torch.save`` with
``weights_only``, ``torch.distributed.checkpoint`` and safetensors carry it.

A :class:`Stateful` component has ``prepare_load(state)``: it checks everything, changes nothing, and returns a commit that takes the
state over. So several components can be checked before the first one changes.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeGuard

import torch

from engram.errors import CorruptCheckpoint, EngramError, PriorityError
from engram.types import Commit

# ---- trees of tensors and plain values ---------------------------------------------------------------------------------


def mapped(state: object, change: Callable[[torch.Tensor], object], where: str = "state") -> Any:
    """The same tree in new containers, with ``change(tensor)`` in place of every tensor.

    Raises:
        TypeError: something that is neither a tensor nor a plain value; names the way to it.
    """
    if isinstance(state, torch.Tensor):
        if state.layout is not torch.strided:
            raise TypeError(
                f"{where}: expected a dense tensor, got a sparse one. Turn it into its parts in state_dict."
            )
        return change(state)
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise TypeError(f"{where}: expected keys that are strings, got {key!r}.")
        return {key: mapped(value, change, f"{where}[{key!r}]") for key, value in state.items()}
    if isinstance(state, list):
        return [mapped(value, change, f"{where}[{i}]") for i, value in enumerate(state)]
    if state is None or type(state) in (str, int, float, bool):
        return state
    raise TypeError(
        f"{where}: expected a tensor, str, int, float, bool, None, or a dict or list of those, got a {type(state).__name__}. "
        "Turn it into one in state_dict."
    )


def copied(state: object, where: str = "state") -> Any:
    """The same tree with tensors of its own. Raises ``TypeError`` as :func:`mapped`."""
    return mapped(state, lambda value: value.detach().as_subclass(torch.Tensor).clone(), where)


# ---- components --------------------------------------------------------------------------------------------------------

_P = ParamSpec("_P")


class Change(Generic[_P]):
    """A :class:`~engram.types.Commit` of one call, with its arguments."""

    def __init__(self, apply: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        self._apply, self._args, self._kwargs = apply, args, kwargs

    def commit(self) -> None:
        self._apply(*self._args, **self._kwargs)


class Loads(NamedTuple):
    """Several loads as one, or none."""

    parts: Sequence[Commit] = ()

    def commit(self) -> None:
        for part in self.parts:
            part.commit()


class Stateful:
    """A component whose ``state_dict`` returns copies, and whose states are checked before anything changes."""

    def prepare_load(self, state_dict: dict[str, Any]) -> Commit:
        """Check a state. Raises as :meth:`load_state_dict`; nothing is changed.

        Returns:
            What takes the state over: call its ``commit()`` once.

        >>> import torch
        >>> from engram import VecNorm
        >>> norm, other = VecNorm(in_keys=["obs"]), VecNorm(in_keys=["obs"])
        >>> _ = norm.forward({"obs": torch.tensor([[0.0], [4.0]])})
        >>> load = other.prepare_load(norm.state_dict())  # changes nothing
        >>> load.commit()
        >>> other.loc["obs"].item()
        2.0
        """
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state.

        Raises:
            KeyError: an entry is missing or unknown. TypeError: an entry has another type. ValueError: a number is out of range.
            IncompatibleCheckpoint: the state belongs to another configuration. Nothing is changed then.
        """
        prepare_load(self, state_dict, type(self).__name__).commit()


class HasState(Protocol):
    """A component, perhaps the user's own, with a state."""

    def state_dict(self) -> dict[str, object]: ...


def has_state(component: object) -> TypeGuard[HasState]:
    """Whether a component, perhaps the user's own, has a ``state_dict``."""
    return callable(getattr(component, "state_dict", None))


def saved(component: object, where: str) -> dict[str, Any]:
    """A copy of a component's ``state_dict()``; empty for one that has none.

    Raises:
        TypeError: it holds something else than tensors and plain values; names the way to it.
    """
    if not has_state(component):
        return {}
    state = component.state_dict()
    if not isinstance(state, dict):
        raise TypeError(f"{where}: expected a dict from state_dict, got a {type(state).__name__}.")
    return state if isinstance(component, Stateful) else copied(state, where)


def prepare_load(component: Any, state: object, where: str) -> Commit:
    """Check that a component takes a state over.

    One of the user's own is tried: it takes the state, and then its old one again.

    Raises: whatever the component raises; nothing is changed then.
        TypeError: no such tree.
    """
    if not isinstance(state, dict):
        raise TypeError(f"{where}: expected a dict that state_dict() returned, got a {type(state).__name__}.")
    if isinstance(component, Stateful):
        return component.prepare_load(state)
    if not callable(getattr(component, "load_state_dict", None)):
        check_keys(state, (), where)
        return Loads()
    kept, before = copied(state, where), saved(component, where)
    try:
        with raised_by_the_user():
            component.load_state_dict(copied(kept))
    finally:
        component.load_state_dict(before)
    return Change(component.load_state_dict, kept)


class _Theirs(threading.local):
    """The last exception of a component that is the user's own: what it means, only the user knows."""

    error: BaseException | None = None


_theirs = _Theirs()


@contextlib.contextmanager
def raised_by_the_user(note: str | None = None) -> Iterator[None]:
    """Around a call of what is the user's own: what it raises passes :func:`read_from` as it is, with a note."""
    try:
        yield
    except Exception as error:
        if note is not None:
            error.add_note(note)
        _theirs.error = error
        raise


@contextlib.contextmanager
def read_from(where: str) -> Iterator[None]:
    """Around the checks of a state that was read from a file, whose sums were right.

    What our own components refuse is then a state that none of them saves: ``CorruptCheckpoint``. That of another configuration is
    ``IncompatibleCheckpoint`` all the same, and what a component of the user's own raises is raised.
    """
    _theirs.error = None
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        ours = isinstance(error, EngramError) and not isinstance(error, PriorityError)
        if ours or error is _theirs.error:
            raise
        said = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise CorruptCheckpoint(f"{where}: {str(said).removesuffix('.')}. No engram saves such a state.") from error
    finally:
        _theirs.error = None


# ---- entries -----------------------------------------------------------------------------------------------------------


def check_keys(state: object, names: Iterable[str], where: str, optional: Collection[str] = ()) -> None:
    """Raise unless ``state`` is a dict with exactly these keys, and perhaps the optional ones: ``TypeError``, ``KeyError``."""
    if not isinstance(state, dict):
        raise TypeError(f"{where}: expected a dict that state_dict() returned, got a {type(state).__name__}.")
    expected = sorted(names)
    if sorted(str(name) for name in state if name not in optional) != expected:
        wanted = f"a state with {expected}" if expected else "an empty state"
        raise KeyError(f"{where}: expected {wanted}, got {sorted(map(str, state))}.")


def typed(state: Mapping[str, object], name: str, kind: type[object] | tuple[type[object], ...], where: str) -> Any:
    """An entry of exactly that type, or of one of those. Raises ``TypeError``."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    value = state[name]
    if type(value) not in kinds:
        names = " or ".join("None" if one is type(None) else one.__name__ for one in kinds)
        raise TypeError(f"{where}: {name}: expected {names}, got a {type(value).__name__}.")
    return value


def integer(state: Mapping[str, object], name: str, least: int, end: int, where: str) -> int:
    """An int in ``[least, end)``. Raises ``TypeError``, ``ValueError``."""
    value: int = typed(state, name, int, where)
    if not least <= value < end:
        raise ValueError(f"{where}: {name}: expected an int in [{least}, {end}), got {value}.")
    return value


def real(state: Mapping[str, object], name: str, where: str) -> float:
    """A finite number of at least 0. Raises ``TypeError``, ``ValueError``."""
    value = float(typed(state, name, (float, int), where))
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where}: {name}: expected a finite number of at least 0, got {value}.")
    return value


def tensor_in(
    state: Mapping[str, object], name: str, dtype: torch.dtype, shape: tuple[int | None, ...], where: str
) -> torch.Tensor:
    """A tensor of that dtype and shape (None: any size), contiguous and on the CPU. Raises ``TypeError``, ``ValueError``."""
    value = state[name]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: {name}: expected a tensor, got a {type(value).__name__}.")
    if value.dtype is not dtype:
        raise TypeError(f"{where}: {name}: expected {dtype}, got {value.dtype}.")
    fits = value.ndim == len(shape) and all(s in (None, d) for s, d in zip(shape, value.shape, strict=True))
    if not fits:
        wanted = ["any" if size is None else size for size in shape]
        raise ValueError(f"{where}: {name}: expected the shape {wanted}, got {list(value.shape)}.")
    return value.detach().to("cpu").contiguous()
