"""The only code that reaches inside TensorDict: three shortcuts for the hot path, each with the public way as fallback.

The public constructor checks every entry (4 µs for three leaves, unchecked 0.2 µs) and ``items()`` filters what it yields;
both are waste for data that was checked against a schema. tests/buffer/test_tensordict_shortcuts.py runs at both ends
of the supported range of versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

    import torch
    from torch import Tensor

    def is_tensor_collection(data: object) -> TypeGuard[TensorDict]:
        """As tensordict has it, without types."""

    def is_tensorclass(data: object) -> TypeGuard[TensorDict]:
        """As tensordict has it, without types."""
else:
    from tensordict import is_tensor_collection, is_tensorclass

__all__ = ["HAS_SHORTCUTS", "children", "find", "is_tensor_collection", "is_tensorclass", "put", "wrap"]


def _wrap_public(source: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    return TensorDict(source, batch_size=batch_size, device=device)


def _wrap_unchecked(source: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    td: TensorDict = object.__new__(TensorDict)
    td._tensordict = source
    td._batch_size = batch_size
    td._device = device
    td._td_dim_names = None
    return td


def _has_shortcuts() -> bool:
    """Whether a TensorDict still consists of exactly what ``_wrap_unchecked`` sets."""
    import torch

    try:
        made = vars(_wrap_public({"a": torch.zeros(2)}, torch.Size([2]), torch.device("cpu")))
        ours = vars(_wrap_unchecked({"a": torch.zeros(2)}, torch.Size([2]), torch.device("cpu")))
    except (AttributeError, TypeError):
        return False
    return (
        made.keys() == ours.keys()
        and all(type(made[key]) is type(ours[key]) for key in made if key != "_tensordict")
        and isinstance(made["_tensordict"], dict)
    )


HAS_SHORTCUTS = _has_shortcuts()

if HAS_SHORTCUTS:
    wrap = _wrap_unchecked

    def children(td: Any) -> Mapping[str, Tensor | Any]:
        """The entries of a TensorDict, by name. Not a copy: do not change it."""
        if type(td) is TensorDict:
            entries: Mapping[str, Any] = td._tensordict
            return entries
        return dict(td.items())

    def put(td: TensorDict, entries: Mapping[Any, Tensor]) -> None:
        """Add entries whose shapes begin with the batch size, under strings or tuples, to an unlocked TensorDict."""
        own = td._tensordict
        for key, value in entries.items():
            if isinstance(key, str):
                own[key] = value
                continue
            child = own.get(key[0])
            if len(key) == 2 and child is None:
                own[key[0]] = wrap({key[1]: value}, td._batch_size, td._device)
            elif len(key) == 2 and type(child) is TensorDict and not child.is_locked:
                child._tensordict[key[1]] = value
            else:
                td.set(key, value)

else:  # pragma: no cover - a tensordict with other internals
    wrap = _wrap_public

    def children(td: Any) -> Mapping[str, Tensor | Any]:
        """The entries of a TensorDict, by name."""
        return dict(td.items())

    def put(td: TensorDict, entries: Mapping[Any, Tensor]) -> None:
        """Add entries whose shapes begin with the batch size, under strings or tuples, to an unlocked TensorDict."""
        for key, value in entries.items():
            td.set(key, value)


def find(td: Any, path: tuple[str, ...]) -> Any:
    """The entry of a TensorDict under a path of names, or None."""
    for name in path:
        td = children(td).get(name) if type(td) is TensorDict or is_tensor_collection(td) else None
    return td
