"""A list of transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engram.state import check_keys, checked, saved
from engram.transforms._base import Transform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Compose"]


class _Step:
    """One transform with its two directions."""

    def __init__(self, transform: Any, *, invert: bool) -> None:
        forward: Callable[[Any], Any] | None
        inverse: Callable[[Any], Any] | None
        if isinstance(transform, type) and (hasattr(transform, "forward") or hasattr(transform, "inv")):
            raise RuntimeError(f"transform: expected a transform, got the class {transform.__name__}. Make one of it.")
        if hasattr(transform, "forward") or hasattr(transform, "inv"):
            forward = transform if isinstance(transform, torch.nn.Module) else getattr(transform, "forward", None)
            inverse = getattr(transform, "inv", None)
        elif callable(transform):
            forward, inverse = transform, None
        else:
            raise RuntimeError(
                f"transform: expected a callable, or an object with forward and inv, got {type(transform).__name__}."
            )
        if isinstance(transform, torch.nn.Module):
            transform.eval()
        if isinstance(transform, Transform):  # ours say which direction does nothing
            forward = forward if transform.reads else None
            inverse = inverse if transform.writes else None
        self.transform = transform
        self.invert = invert
        self.forward = inverse if invert else forward
        self.inverse = forward if invert else inverse

    @property
    def name(self) -> str:
        """What messages call it."""
        return getattr(self.transform, "__name__", None) or type(self.transform).__name__


class Compose:
    """A list of transforms: :meth:`forward` applies them in order to what is read, :meth:`inv` in reverse to what is written.

    A transform is an object with ``forward`` and/or ``inv`` (TorchRL's are, and so is another ``Compose``), a ``torch.nn.Module``,
    which is called, or a callable, which is for reading unless ``invert``. Modules are put into evaluation mode. ``rb.transform``
    is such a list.

    Args:
        *transforms: the first is applied first on reading, last on writing.

    Raises:
        RuntimeError: no transform.

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

    def __init__(self, *transforms: Any) -> None:
        self._steps = [_Step(transform, invert=False) for transform in transforms]
        self._look()

    @classmethod
    def of(cls, transform: Any) -> Compose:
        """A list of what a user gave a buffer: None, a transform, or a list of them, which is copied."""
        made = cls()
        if isinstance(transform, Compose):
            made._steps = list(transform._steps)  # noqa: SLF001 - of our own class
            made._look()
        elif transform is not None:
            made.append(transform)
        return made

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end. ``invert`` swaps its directions. Raises ``RuntimeError`` for anything else."""
        self._steps.append(_Step(transform, invert=invert))
        self._look()

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before position ``index``.

        Raises:
            ValueError: no such position. RuntimeError: no transform.
        """
        if not -len(self) <= index <= len(self):
            raise ValueError(f"insert_transform: index: expected one in [{-len(self)}, {len(self)}], got {index}.")
        self._steps.insert(index, _Step(transform, invert=invert))
        self._look()

    def _look(self) -> None:
        # A list within counts for both directions: it may grow later.
        #: Whether :meth:`forward` does anything, and :meth:`inv`.
        self.reads = any(step.forward is not None for step in self._steps)
        self.writes = any(step.inverse is not None for step in self._steps)

    def forward(self, data: Any) -> Any:
        """What the user gets for rows read.

        Raises:
            RuntimeError: a transform returned None.
            Exception: whatever a transform raises, with a note which one it was.
        """
        for number, step in enumerate(self._steps):
            if step.forward is None:
                continue
            try:
                data = step.forward(data)
            except Exception as error:
                error.add_note(f"Raised by transform {number}, {step.name}, on reading.")
                raise
            if data is None:
                raise RuntimeError(
                    f"transform {number}, {step.name}: expected the batch, got None. Does it end with a return?"
                )
        return data

    def inv(self, data: Any) -> Any:
        """What is stored for rows written; None if a transform held everything back.

        Raises:
            Exception: whatever a transform raises, with a note which one it was.
        """
        for number, step in reversed(list(enumerate(self._steps))):
            if step.inverse is None or data is None:
                continue
            try:
                data = step.inverse(data)
            except Exception as error:
                error.add_note(f"Raised by transform {number}, {step.name}, on writing.")
                raise
        return data

    def __call__(self, data: Any) -> Any:
        return self.forward(data)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The states of those that have one, under their positions: copies.

        Raises:
            TypeError: one holds something else than tensors and plain values; names the way to it.
        """
        return {number: saved(transform, f"transform {number}") for number, transform in self._with_states().items()}

    def _with_states(self) -> dict[str, Any]:
        return {
            str(number): step.transform
            for number, step in enumerate(self._steps)
            if callable(getattr(step.transform, "state_dict", None))
        }

    @property
    def functions(self) -> list[str]:
        """Names of the transforms without a state, which only a program can make again; of lists within, theirs."""
        named = []
        for step in self._steps:
            if isinstance(step.transform, Compose):
                named += step.transform.functions
            elif not callable(getattr(step.transform, "state_dict", None)):
                named.append(step.name)
        return named

    def checked_state(self, state_dict: dict[str, dict[str, Any]]) -> Callable[[], None]:
        """Check the states of all; what makes the transforms take them over."""
        transforms = self._with_states()
        check_keys(state_dict, transforms, "Compose")
        takes = [
            checked(transform, state_dict[number], f"transform {number}") for number, transform in transforms.items()
        ]

        def take() -> None:
            for one in takes:
                one.commit()

        return take

    def load_state_dict(self, state_dict: dict[str, dict[str, Any]]) -> None:
        """Hand every transform its state.

        Raises:
            KeyError: states at other positions than here. Whatever a transform raises for its own. Nothing is changed.
        """
        self.checked_state(state_dict)()

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int | slice) -> Any:
        """A transform; of a slice, a list of those, with their directions."""
        if isinstance(index, slice):
            made = Compose()
            made._steps = self._steps[index]
            made._look()
            return made
        return self._steps[index].transform

    def __iter__(self) -> Iterator[Any]:
        return (step.transform for step in self._steps)

    def __repr__(self) -> str:
        names = [repr(one) if isinstance(one, Compose) else type(one).__name__ for one in self]
        return f"Compose({', '.join(names)})"
