"""Marks of a batch of windows: the last step of each window, first steps of trajectories, and padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from engram import _native
from engram.field_paths import WINDOW_ENDS, public
from engram.samplers.trajectory_tables import numbers_by_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from engram.samplers.window_settings import WindowSettings
    from engram.store import Store
    from engram.types import Entry, Info

    Merge: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_MASK = ("collector", "mask")
_VALID, _LEARNING = "validity_mask", "learning_mask"
#: What the native core is told of a mark that is not wanted, or that is not merged with a stored flag.
_UNWANTED, _ALONE = -2, -1


class EndMarks(NamedTuple):
    """Which marks a batch of windows carries, and where its tensors hold them.

    The tensors of a batch are its columns, its rows, then one tensor per mark, priority weights and tickets if it has them.
    """

    wanted: _native.Marks
    """What the native core is asked for."""
    places: dict[Entry, int]
    """Entries of ``info`` that are among the tensors: the place of each."""
    merged: list[tuple[Entry, Merge, int, int]]
    """Entries made of a stored flag and a mark: the entry, the function that merges them, and the places of both."""
    fields: int = 0
    """Columns of the batch."""

    @classmethod
    def none(cls) -> EndMarks:
        """No marks."""
        return cls(_native.Marks(_UNWANTED, False, _UNWANTED, False, _UNWANTED, False, False, False), {}, [])

    @classmethod
    def of(
        cls, store: Store, settings: WindowSettings, *, weighted: bool, apart: bool = False, within: bool = False
    ) -> EndMarks:
        """The marks for the flags that a store holds.

        Under ``truncated_key`` and its siblings ``done`` and ``terminated`` they are bool ``[B, 1]``. Under ``init_key``, if it is
        stored, the mark has its shape and dtype. With padding ``("collector", "mask")`` is bool ``[B]``; of windows of a spec,
        ``"validity_mask"`` and ``"learning_mask"`` are.

        Args:
            store: holds the rows.
            settings: names the flags, and says whether short windows are filled up.
            weighted: the batch has ``"priority_weight"``.
            apart: the native core does not read the stored flags, so it cannot merge its marks with them.
            within: the marks take the place of the batch's own flags: columns of the same shape and dtype are marked themselves.
        """
        truncated_key, init_key, padded = settings.truncated_key, settings.init_key, settings.pad_output
        fields = numbers_by_path(store)
        places: dict[Entry, int] = {}
        merged: list[tuple[Entry, Merge, int, int]] = []
        ends, never, done, in_place, begun, begun_is_column = _UNWANTED, False, _UNWANTED, False, _UNWANTED, False
        stored = len(store.schema.fields)
        at = stored + 1
        if truncated_key is not None:
            *above, name = truncated_key
            within = within and name not in ("done", "terminated")
            number, entry = fields.get(truncated_key), public(truncated_key)
            if within and number is not None and _is_flag(store, number, (1,)):
                ends = places[entry] = number
            else:
                ends, places[entry], at = _ALONE, at, at + 1
            number, entry = fields.get((*above, "done")), public((*above, "done"))
            if within and number is not None and _is_flag(store, number, (1,)):
                done, in_place, places[entry] = number, True, number
            elif number is None or (not apart and _is_flag(store, number, (), (1,))):
                done, places[entry], at = _ALONE if number is None else number, at, at + 1
            else:
                done, at = _ALONE, at + 1
                merged.append((entry, _with_ends, number, at - 1))
            number, entry = fields.get((*above, "terminated")), public((*above, "terminated"))
            if number is None:
                never, places[entry], at = True, at, at + 1
            elif _is_flag(store, number, (1,)):
                places[entry] = number
            else:
                merged.append((entry, lambda stored, _: _as_flag(stored), number, number))
        elif not settings.are_even:  # for transforms alone, and for goals
            ends, places[WINDOW_ENDS], at = _ALONE, at, at + 1
        if init_key is not None and init_key in fields:
            number, entry = fields[init_key], public(init_key)
            if not apart and _is_flag(store, number, (), (1,)):
                begun, begun_is_column = number, store.schema.fields[number].shape != ()
                places[entry] = at
            else:
                begun = _ALONE
                merged.append((entry, with_starts, number, at))
            at += 1
        specified = settings.window is not None
        for mask in [_VALID, _LEARNING] if specified else [_MASK] if padded else []:
            places[mask], at = at, at + 1
        if weighted:
            places["priority_weight"] = at
        wanted = _native.Marks(ends, never, done, in_place, begun, begun_is_column, padded or specified, specified)
        return cls(wanted, places, merged, stored)

    def info(self, tensors: Sequence[Tensor], *, numbered: bool, flat: bool = True) -> Info:
        """The ``info`` of a batch, without its index. ``numbered``: the last tensor holds tickets. ``flat``: tensors are ``[B, ...]``,
        else ``[B, T, ...]``.
        """
        info: Info = {entry: tensors[place] for entry, place in self.places.items()}
        for entry, merge, field, mark in self.merged:
            if flat:
                info[entry] = merge(tensors[field], tensors[mark])
            else:
                merged = merge(tensors[field].flatten(0, 1), tensors[mark].flatten(0, 1))
                info[entry] = merged.reshape(*tensors[field].shape[:2], *merged.shape[1:])
        if numbered:
            info["index_generation"] = tensors[-1]
        return info


def _is_flag(store: Store, number: int, *shapes: tuple[int, ...]) -> bool:
    field = store.schema.fields[number]
    return field.dtype == "bool" and tuple(field.shape) in shapes


# ---- flags that are stored as something else than bool [B] or [B, 1] -----------------------------------------------------


def _as_flag(stored: Tensor) -> Tensor:
    """A stored flag as bools ``[B, 1]`` (rows with batch dimensions: as stored)."""
    flag = stored if stored.dtype is torch.bool else stored != 0
    return flag.unsqueeze(-1) if flag.ndim == 1 else flag


def _with_ends(stored: Tensor, ends: Tensor) -> Tensor:
    flag = _as_flag(stored)
    return flag | _like(ends, flag)


def with_starts(stored: Tensor, first: Tensor) -> Tensor:
    """A stored flag of first steps, set where ``first`` is: a new tensor of its shape and dtype."""
    first = _like(first, stored)
    return stored | first if stored.dtype is torch.bool else stored.where(~first, 1)


def _like(mark: Tensor, stored: Tensor) -> Tensor:
    """Marks ``[B]`` or ``[B, 1]`` in the dimensions of a stored field."""
    return mark if mark.ndim == stored.ndim else mark.reshape(-1, *(1,) * (stored.ndim - 1))
