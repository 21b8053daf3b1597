"""Shared by the transforms: keys, and access to entries of TensorDicts and nested dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias, TypeGuard

import numpy as np
import torch

from engram._support import checks, field_paths, nested, tensordicts
from engram._support.state import HasState, Loads, Stateful, check_keys, has_state, prepare_load, saved
from engram._support.tensordicts import is_tensor_collection, tensordict_type
from engram.types import Commit

#: Of an entry: its name, or the path of names to a nested entry.
Key: TypeAlias = str | tuple[str, ...]
#: Keys as a user gives them, a list or one key. A tuple is one key, as in TorchRL; None is no key.
Keys: TypeAlias = "Sequence[Key] | None"
Array: TypeAlias = "torch.Tensor | np.typing.NDArray[np.generic]"


class Transform:
    """Base of engram's transforms. Your own transform needs no base class: ``forward`` and ``inv`` are enough."""

    #: Whether :meth:`forward` and :meth:`inv` do anything. A direction that does nothing is skipped.
    reads = True
    writes = True

    def forward(self, data: object) -> Any:
        """Transform a batch that was read, and return it: the same, if there is nothing to do. The argument is not changed.

        Args:
            data: a TensorDict, a nested dict, or what the buffer's batches are: entries ``[B, ...]``.

        >>> import torch
        >>> from engram import RenameTransform
        >>> batch = {"obs": torch.zeros(2)}
        >>> list(RenameTransform(["obs"], ["pixels"]).forward(batch)), list(batch)
        (['pixels'], ['obs'])
        """
        return data

    def inv(self, data: object) -> Any:
        """Transform rows that will be written, and return them: the same, if there is nothing to do. The argument is not changed.

        Args:
            data: a TensorDict, a nested dict, or what is handed to ``extend``: entries ``[n, ...]``.

        >>> import torch
        >>> from engram import ExcludeTransform
        >>> list(ExcludeTransform("debug", inverse=True).inv({"obs": torch.zeros(2), "debug": torch.zeros(2)}))
        ['obs']
        """
        return data

    def __call__(self, data: object) -> Any:
        return self.forward(data)


class KeyedTransform(Transform):
    """Computes ``out_keys`` from ``in_keys`` on reading, and ``in_keys_inv`` from ``out_keys_inv`` on writing."""

    #: Arguments that ``repr`` shows, but those that are None or empty.
    shown: ClassVar[tuple[str, ...]] = ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv")

    def __init__(self, in_keys: Keys, out_keys: Keys, in_keys_inv: Keys, out_keys_inv: Keys) -> None:
        name = type(self).__name__
        self.in_keys, self.out_keys = _pairs(in_keys, out_keys, name, "")
        self.in_keys_inv, self.out_keys_inv = _pairs(in_keys_inv, out_keys_inv, name, "_inv")
        self.reads, self.writes = bool(self.in_keys), bool(self.in_keys_inv)

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        """Transform one entry on reading: ``[B, ...]``, as it is stored. Returns the new entry; the argument is not changed.

        >>> import torch
        >>> from engram import DTypeCastTransform
        >>> DTypeCastTransform(torch.uint8, torch.float32).apply(torch.tensor([1, 2], dtype=torch.uint8))
        tensor([1., 2.])
        """
        raise NotImplementedError

    def apply_inv(self, value: torch.Tensor) -> torch.Tensor:
        """Transform one entry on writing: ``[n, ...]``, as it was handed over. Returns the new entry; the argument is not changed.

        >>> import torch
        >>> from engram import DTypeCastTransform
        >>> DTypeCastTransform(torch.uint8, torch.float32).apply_inv(torch.tensor([1.0, 2.0]))
        tensor([1, 2], dtype=torch.uint8)
        """
        raise NotImplementedError

    def forward(self, data: object) -> object:
        return self._mapped(data, self.in_keys, self.out_keys, self.apply)

    def inv(self, data: object) -> object:
        return self._mapped(data, self.out_keys_inv, self.in_keys_inv, self.apply_inv)

    def _mapped(
        self, data: object, sources: list[Key], targets: list[Key], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> object:
        if not sources:
            return data
        if is_tensor(data):
            return change(torch.as_tensor(data))
        copied = shallow(data, type(self).__name__)
        for source, target in zip(sources, targets, strict=True):
            put(copied, target, change(torch.as_tensor(entry(data, source, type(self).__name__))))
        return copied

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in self.shown}
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if value not in (None, []))
        return f"{type(self).__name__}({shown})"


def as_keys(keys: object, name: str) -> list[Key]:
    """A user's keys as a list. None is no key; a tuple is one key, as in TorchRL.

    Raises:
        TypeError: a key is neither a string nor a tuple of strings.
    """
    if keys is None:
        return []
    if isinstance(keys, str | tuple | int) and not isinstance(keys, bool):
        keys = [keys]
    if not isinstance(keys, list):
        raise TypeError(f"{name}: expected a list of keys, strings or tuples of strings, got {keys!r}.")
    return [as_key(key, name) for key in keys]


def as_key(key: object, name: str) -> Key:
    """A user's key. Raises ``TypeError``: it is neither a string or int nor a tuple of them."""
    if isinstance(key, list):
        raise TypeError(f"{name}: expected keys that are strings or tuples of strings, got {key!r}.")
    return field_paths.public(field_paths.checked_path(key, name))


def _pairs(given: object, others: object, who: str, which: str) -> tuple[list[Key], list[Key]]:
    """``in_keys`` and ``out_keys``, which are the same by default; ``which``: those of writing. Raises ``ValueError``."""
    sources = as_keys(given, f"{who}: in_keys{which}")
    targets = sources if others is None else as_keys(others, f"{who}: out_keys{which}")
    if len(sources) != len(targets):
        raise ValueError(
            f"{who}: in_keys{which} and out_keys{which}: expected equally many keys, got {len(sources)} and {len(targets)}: "
            f"{sources} and {targets}."
        )
    return sources, targets


def path_of(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def keys_of(data: object, key: Key) -> tuple[str, ...]:
    """The keys on the way to an entry of nested data, where ints may stand for their digits."""
    found: list[str] = []
    for part in path_of(key):
        if isinstance(data, dict) and part not in data:
            part = next((held for held in data if nested.name_of(held) == part), part)
        found.append(part)
        data = nested.find(data, (part,))
    return tuple(found)


def is_tensor(data: object) -> TypeGuard[Array]:
    """Whether data is one tensor or array."""
    return isinstance(data, torch.Tensor | np.ndarray | np.generic) and not is_tensor_collection(data)


def find(data: object, key: Key) -> Any:
    """The entry of a nested dict or TensorDict under a key, or None."""
    return nested.find(data, path_of(key))


def entry(data: object, key: Key, call: str) -> Array:
    """The tensor or array under a key.

    Raises:
        KeyError: there is no such entry.
        TypeError: the entry is not a tensor.
    """
    value = find(data, key)
    if value is None:
        raise KeyError(f"{call}: expected the key {key!r}, got {described(data)}.")
    if not is_tensor(value):
        raise TypeError(f"{call}: expected a tensor under {key!r}, got {type(value).__name__}.")
    return value


def described(data: object) -> str:
    """The keys of data, for messages."""
    if isinstance(data, dict):
        return f"the keys {[str(key) for key in data]}"
    return f"the keys {sorted(map(str, data.keys()))}" if nested.is_tensordict(data) else type(data).__name__


def shallow(data: object, call: str) -> Any:
    """New containers around the same tensors, so that entries can be set in them.

    Raises:
        TypeError: ``data`` is not a TensorDict, tensorclass or dict.
    """
    if nested.is_tensordict(data):
        return data.copy()
    if isinstance(data, dict):
        return {key: shallow(value, call) if nested.has_entries(value) else value for key, value in data.items()}
    raise TypeError(f"{call}: expected a TensorDict, a tensorclass or a nested dict, got {type(data).__name__}.")


def put(data: Any, key: Key, value: object) -> None:
    """Set an entry in containers that :func:`shallow` returned, creating the containers on its path."""
    *way, last = keys_of(data, key)
    for part in way:
        inner = data.get(part, None)
        if not nested.has_entries(inner):
            inner = (
                {} if isinstance(data, dict) else tensordict_type()({}, batch_size=data.batch_size, device=data.device)
            )
            _set(data, part, inner)
            inner = data.get(part)
        data = inner
    _set(data, last, value)


def _set(data: dict[str, object] | tensordicts.TensorDictBase, name: str, value: object) -> None:
    if isinstance(data, dict):
        data[name] = value
    else:
        data.set(name, value)


def map_tensors(data: object, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """New containers around ``change(tensor)`` of every tensor and array. Other objects stay."""
    return nested.map_tensors(nested.map_leaves(data, lambda x: torch.as_tensor(x) if is_tensor(x) else x), change)


class _Step:
    """A transform and its two directions."""

    def __init__(self, transform: object, *, invert: bool) -> None:
        forward: Callable[[object], object] | None
        inverse: Callable[[object], object] | None
        forward, inverse = getattr(transform, "forward", None), getattr(transform, "inv", None)
        if forward is not None or inverse is not None:
            if isinstance(transform, type):
                raise RuntimeError(f"transform: expected an instance, got the class {transform.__name__}.")
            forward = transform if isinstance(transform, torch.nn.Module) else forward
        elif callable(transform):
            forward, inverse = transform, None
        else:
            raise RuntimeError(f"transform: expected a callable, or forward and inv, got {type(transform).__name__}.")
        if isinstance(transform, torch.nn.Module):
            transform.eval()
        if isinstance(transform, Transform):  # engram's transforms say which direction does nothing
            forward = forward if transform.reads else None
            inverse = inverse if transform.writes else None
        self.transform = transform
        self.invert = invert
        self.forward = inverse if invert else forward
        self.inverse = forward if invert else inverse

    def apply(self, change: Callable[[object], object], data: object, number: int, when: str) -> object:
        """``change(data)``. An error gets a note that names the transform."""
        try:
            return change(data)
        except Exception as error:
            error.add_note(f"Raised by transform {number}, {self.name}, on {when}.")
            raise

    @property
    def name(self) -> str:
        """The name in messages."""
        return getattr(self.transform, "__name__", None) or type(self.transform).__name__


class Compose(Stateful):
    """A list of transforms. :meth:`forward` applies them in order to batches, :meth:`inv` in reverse to written rows.

    A transform is an object with ``forward``, ``inv`` or both (such as TorchRL's, or another ``Compose``), a
    ``torch.nn.Module``, which is called, or any other callable, which is applied on reading unless ``invert``. Modules are put
    into evaluation mode. ``rb.transform`` is such a list.

    Args:
        *transforms: the first is applied first on reading, and last on writing.

    Raises:
        RuntimeError: an argument is not a transform.

    >>> import torch
    >>> from engram import Compose, DTypeCastTransform, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(
    ...     storage=LazyTensorStorage(10),
    ...     transform=Compose(DTypeCastTransform(torch.uint8, torch.float32), lambda x: x / 255),
    ... )
    >>> _ = rb.extend(torch.full((3,), 255, dtype=torch.uint8))
    >>> rb.sample(2), len(rb.transform)
    (tensor([1., 1.]), 2)
    """

    def __init__(self, *transforms: object) -> None:
        self._steps = [_Step(transform, invert=False) for transform in transforms]
        self._update_directions()

    @classmethod
    def of(cls, transform: object) -> Compose:
        """The list for what a user passed to a buffer: None, a transform, or a list of them, which is copied.

        >>> from engram import Compose, DoubleToFloat
        >>> Compose.of(DoubleToFloat())
        Compose(...)
        """
        if isinstance(transform, Compose):
            copy: Compose = transform[:]
            return copy
        return cls() if transform is None else cls(transform)

    def needed(self, keys: Iterable[object]) -> Compose:
        """What changes entries of these keys on reading: transforms that write them, by ``out_keys``, and what those read; and all
        before one that does not say what it writes.

        >>> from engram import Compose, DoubleToFloat
        >>> len(Compose(DoubleToFloat(["a"]), DoubleToFloat(["b"])).needed(["b"]))
        1
        """
        paths = {(*prefix, *field_paths.checked_path(key, "needed")) for key in keys for prefix in ((), ("next",))}
        chain = Compose()
        for number, step in reversed([*enumerate(self._steps)]):
            written, read = (getattr(step.transform, name, None) for name in ("out_keys", "in_keys"))
            if step.forward is not None and (step.invert or not written):
                chain._steps[:0] = self._steps[: number + 1]
                break
            found = field_paths.as_paths(written or [], "out_keys", empty=True) or ()
            if any(one[: len(other)] == other[: len(one)] for one in found for other in paths):
                chain._steps.insert(0, step)
                paths.update(field_paths.as_paths(read, "in_keys", empty=True) or ())
        chain._update_directions()
        return chain

    def append(self, transform: object, *, invert: bool = False) -> None:
        """Add a transform at the end. ``invert`` swaps its directions.

        Raises:
            RuntimeError: ``transform`` is not a transform.

        >>> from engram import Compose, DoubleToFloat
        >>> chain = Compose()
        >>> _ = chain.append(DoubleToFloat())
        >>> len(chain)
        1
        """
        self._steps.append(_Step(transform, invert=invert))
        self._update_directions()

    def insert(self, index: int, transform: object, *, invert: bool = False) -> None:
        """Add a transform before position ``index``.

        Raises:
            TypeError: ``index`` is no int. ValueError: there is no such position.
            RuntimeError: ``transform`` is not a transform.

        >>> from engram import Compose, DoubleToFloat
        >>> chain = Compose(lambda batch: batch)
        >>> _ = chain.insert(0, DoubleToFloat())
        >>> len(chain)
        2
        """
        index = checks.check_type("insert_transform: index", index, int, "an int")
        if not -len(self) <= index <= len(self):
            raise ValueError(f"insert_transform: index: expected one in [{-len(self)}, {len(self)}], got {index}.")
        self._steps.insert(index, _Step(transform, invert=invert))
        self._update_directions()

    def _update_directions(self) -> None:
        # A nested Compose counts for both directions, because it may grow later.
        #: Whether :meth:`forward` and :meth:`inv` do anything.
        self.reads = any(step.forward is not None for step in self._steps)
        self.writes = any(step.inverse is not None for step in self._steps)

    def forward(self, data: object) -> Any:
        """Apply the transforms in order to a batch, and return the result.

        Raises:
            RuntimeError: a transform returned None.
            Exception: what a transform raises, with a note that names the transform.

        >>> import torch
        >>> from engram import Compose
        >>> chain = Compose(lambda batch: batch + 1, lambda batch: batch * 2)
        >>> chain.forward(torch.zeros(2)).tolist()
        [2.0, 2.0]
        """
        for number, step in enumerate(self._steps):
            if step.forward is None:
                continue
            data = step.apply(step.forward, data, number, "reading")
            if data is None:
                raise RuntimeError(f"transform {number}, {step.name}: expected a batch, got None. Does it return one?")
        return data

    def inv(self, data: object) -> Any:
        """Apply the inverse transforms in reverse order to rows. None if a transform kept all of them back.

        Raises:
            Exception: what a transform raises, with a note that names the transform.

        >>> import torch
        >>> from engram import Compose, DTypeCastTransform
        >>> chain = Compose(DTypeCastTransform(torch.uint8, torch.float32))
        >>> chain.inv({"a": torch.tensor([3.0])})["a"]
        tensor([3], dtype=torch.uint8)
        """
        for number, step in reversed(list(enumerate(self._steps))):
            if step.inverse is not None and data is not None:
                data = step.apply(step.inverse, data, number, "writing")
        return data

    def __call__(self, data: object) -> Any:
        return self.forward(data)

    def state_dict(self) -> dict[str, dict[str, object]]:
        """The states of the transforms that have one, by position. Copies.

        Raises:
            TypeError: a state contains something other than tensors and plain values; the message names the path to it.

        >>> from engram import Compose, ObservationNorm
        >>> list(Compose(ObservationNorm(loc=0.0, scale=2.0, in_keys=["a"])).state_dict())
        ['0']
        """
        return {number: saved(transform, f"transform {number}") for number, transform in self._with_states().items()}

    def _with_states(self) -> dict[str, HasState]:
        return {str(number): step.transform for number, step in enumerate(self._steps) if has_state(step.transform)}

    @property
    def functions(self) -> list[str]:
        """Names of the transforms without a state, which only a program can create again; also those of nested lists."""
        named = []
        for step in self._steps:
            if isinstance(step.transform, Compose):
                named += step.transform.functions
            elif not has_state(step.transform):
                named.append(step.name)
        return named

    def prepare_load(self, state_dict: dict[str, object]) -> Commit:
        """Check the states of all transforms. Raises what a transform raises for its state; nothing is changed.

        Returns:
            What takes all states over: call its ``commit()`` once.

        >>> import torch
        >>> from engram import Compose, DoubleToFloat, VecNorm
        >>> def composed():
        ...     return Compose(DoubleToFloat(), VecNorm(in_keys=["obs"]))
        >>> transform, other = composed(), composed()
        >>> _ = transform.forward({"obs": torch.tensor([[0.0], [4.0]])})
        >>> other.prepare_load(transform.state_dict()).commit()
        >>> other[1].loc["obs"].item()
        2.0
        """
        transforms = self._with_states()
        check_keys(state_dict, transforms, "Compose")
        return Loads([prepare_load(one, state_dict[at], f"transform {at}") for at, one in transforms.items()])

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int | slice) -> Any:
        """A transform; for a slice, a new ``Compose`` of those, with their directions."""
        if isinstance(index, slice):
            some = Compose()
            some._steps = self._steps[index]
            some._update_directions()
            return some
        return self._steps[index].transform

    def __iter__(self) -> Iterator[object]:
        return (step.transform for step in self._steps)

    def __repr__(self) -> str:
        names = [repr(one) if isinstance(one, Compose) else type(one).__name__ for one in self]
        return f"Compose({', '.join(names)})"
