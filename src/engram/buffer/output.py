"""The form in which a buffer hands out its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

import torch

from engram._support import devices, field_paths, tensordicts
from engram._support.nested import Path, batch_of, can_be_attribute, map_leaves, map_tensors, map_with_paths

Output: TypeAlias = Literal["torch", "numpy", "namedtuple"]
FORMS = ("torch", "numpy", "namedtuple")


class Source(Protocol):
    """Draws batches."""

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """A batch, or ``(batch, info)``."""


class View:
    """Batches of a source in another form, without a copy of what is on the CPU. It keeps nothing of its own."""

    def __init__(self, form: str, source: Source) -> None:
        self.source = source
        self._leaf: Callable[[object, Path], object] = _as_array if form == "numpy" else lambda leaf, _: leaf
        self._entries = None if form == "numpy" else _as_tuple

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """What ``ReplayBuffer.sample`` returns."""
        sample = self.source.sample(batch_size, return_info, timeout)
        if not return_info or not isinstance(sample, tuple):
            return self._viewed(sample, ())
        batch, info = sample
        # Its keys may be tuples, or no identifiers: it stays a dict.
        return self._viewed(batch, ()), {k: map_leaves(v, lambda leaf: self._leaf(leaf, ())) for k, v in info.items()}

    def _viewed(self, data: object, path: Path) -> object:
        return map_with_paths(data, self._opened, path, entries=self._entries)

    def _opened(self, leaf: object, path: Path) -> object:
        if tensordicts.is_tensor_collection(leaf) and not tensordicts.is_non_tensor(leaf):
            return self._viewed(dict(leaf.items()), path)
        return self._leaf(leaf, path)


def target_of(device: torch.device | str, form: str) -> torch.device:
    """The device that batches go to. Raises ``TypeError``, ``RuntimeError``: it is none. ``ValueError``: arrays cannot be there."""
    target = devices.existing_device(device, "sample: device")
    if form == "numpy":
        raise ValueError(
            f"sample: device: expected none, as NumPy's arrays are on the host, got {str(device)!r}. Use output='torch'."
        )
    return target


def moved(sample: object, target: torch.device) -> object:
    """A batch, perhaps with its info, on a device."""
    return map_tensors(sample, lambda leaf: leaf.to(target, non_blocking=True), device=target)


# ---- arrays ------------------------------------------------------------------------------------------------------------


def _as_array(leaf: object, path: Path) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    try:
        return leaf.numpy(force=True)
    except TypeError as error:
        raise TypeError(
            f"sample: output='numpy': field {field_paths.public(path)!r}: NumPy has no {leaf.dtype}. Store the field as torch.float32 "
            "(dtypes= of the storage), or cast it with DTypeCastTransform."
        ) from error


# ---- named tuples ------------------------------------------------------------------------------------------------------


def _as_tuple(entries: dict[str, object], path: Path) -> object:
    for name in entries:
        if not can_be_attribute(name):
            raise ValueError(
                f"sample: output='namedtuple': field {field_paths.public((*path, name))!r}: expected a name that can be an attribute, got "
                f"{name!r}. Store it under another one, or rename it with RenameTransform."
            )
    return batch_of(tuple(entries), entries.values())
