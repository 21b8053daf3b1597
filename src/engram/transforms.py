"""Transforms: forward on what is read, inverse on what is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Transforms"]


class _Step:
    """One transform with its two directions."""

    def __init__(self, transform: Any, *, invert: bool) -> None:
        forward: Callable[[Any], Any] | None
        inverse: Callable[[Any], Any] | None
        if hasattr(transform, "forward") or hasattr(transform, "inv"):
            forward = transform if isinstance(transform, torch.nn.Module) else getattr(transform, "forward", None)
            inverse = getattr(transform, "inv", None)
        elif callable(transform):
            forward, inverse = transform, None
        else:
            raise RuntimeError(
                f"transform: expected a callable, or an object with forward and inv, got {type(transform).__name__}."
            )
        if hasattr(transform, "eval") and isinstance(transform, torch.nn.Module):
            transform.eval()
        self.transform = transform
        self.forward = inverse if invert else forward
        self.inverse = forward if invert else inverse


class Transforms:
    """A list of transforms: :meth:`forward` applies them in order to what is read, :meth:`inv` in reverse to what is written.

    A transform is any object with ``forward`` and/or ``inv`` (TorchRL's ``Transform`` and ``Compose`` are), or a plain
    callable, which is for reading unless ``invert``.
    """

    def __init__(self, transform: Any = None) -> None:
        self._steps: list[_Step] = []
        #: Whether :meth:`forward` does anything, and :meth:`inv`.
        self.reads = self.writes = False
        if isinstance(transform, Transforms):
            self._steps = list(transform._steps)  # noqa: SLF001 - of our own class
            self.reads, self.writes = transform.reads, transform.writes
        elif transform is not None:
            self.append(transform)

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end. ``invert`` swaps its directions. Raises ``RuntimeError`` for anything else."""
        self._take(len(self), _Step(transform, invert=invert))

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before position ``index``."""
        if not -len(self) <= index <= len(self):
            raise ValueError(f"insert_transform: index: expected one in [{-len(self)}, {len(self)}], got {index}.")
        self._take(index, _Step(transform, invert=invert))

    def _take(self, index: int, step: _Step) -> None:
        self._steps.insert(index, step)
        self.reads |= step.forward is not None
        self.writes |= step.inverse is not None

    def forward(self, data: Any) -> Any:
        """What the user gets for rows read."""
        for step in self._steps:
            if step.forward is not None:
                data = step.forward(data)
        return data

    def inv(self, data: Any) -> Any:
        """What is stored for rows written; None if a transform held everything back."""
        for step in reversed(self._steps):
            if step.inverse is not None and data is not None:
                data = step.inverse(data)
        return data

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Any:
        return self._steps[index].transform

    def __iter__(self) -> Iterator[Any]:
        return (step.transform for step in self._steps)

    def __repr__(self) -> str:
        return f"Transforms({', '.join(type(step.transform).__name__ for step in self._steps)})"
