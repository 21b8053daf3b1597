"""A list of transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engram.state import HasState, Loads, Stateful, check_keys, has_state, prepare_load, saved
from engram.transforms._base import Transform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engram.types import Commit


class _Step:
    """A transform and its two directions."""

    def __init__(self, transform: object, *, invert: bool) -> None:
        forward: Callable[[object], object] | None
        inverse: Callable[[object], object] | None
        forward, inverse = getattr(transform, "forward", None), getattr(transform, "inv", None)
        if forward is not None or inverse is not None:
            if isinstance(transform, type):
                raise RuntimeError(
                    f"transform: expected a transform, got the class {transform.__name__}. Pass an instance of it."
                )
            forward = transform if isinstance(transform, torch.nn.Module) else forward
        elif callable(transform):
            forward, inverse = transform, None
        else:
            raise RuntimeError(
                f"transform: expected a callable, or an object with forward and inv, got {type(transform).__name__}."
            )
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
        if not isinstance(index, int):
            raise TypeError(f"insert_transform: index: expected an int, got {type(index).__name__}.")
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
                raise RuntimeError(
                    f"transform {number}, {step.name}: expected the batch, got None. Does it end with a return?"
                )
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
        return Loads(
            [
                prepare_load(transform, state_dict[number], f"transform {number}")
                for number, transform in transforms.items()
            ]
        )

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
