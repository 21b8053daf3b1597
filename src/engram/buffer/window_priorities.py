"""Turns priorities per row or per window into updates of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engram._checks import as_numbers
from engram.around import Expander, Sequence
from engram.around.windows import WindowSampler
from engram.buffer.window_marks import MASKS
from engram.field_paths import public
from engram.samplers.prioritized import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.buffer.wiring import Wiring
    from engram.types import Entry

_CALL = "update_priority"
#: Rows, their priorities, and their generations or None.
Update: TypeAlias = tuple[Any, object, Tensor | None]


def of_batch(wiring: Wiring, index: object, priority: object, generation: Tensor | None) -> Update:
    """Rows, their priorities and generations, as samplers take them. ``index``: of a batch, or its whole info.

    Raises ``RuntimeError``: neither a priority for each row, nor one for each window.
    """
    info: dict[Entry, Any] = index if isinstance(index, dict) else {"index": index}
    if generation is None and info is index:
        generation = info.get("index_generation")
    if "anchor_index" in info:
        index, priority, generation = _of_anchors(wiring.unit, info, as_numbers(f"{_CALL}: priority", priority))
        return wiring.rows_named(index), priority, generation
    rows, of_sampler, sampler = wiring.rows_named(info["index"]), wiring.of_sampler, wiring.source
    if not (of_sampler.draws_windows and of_sampler.takes_priorities):
        return rows, priority, generation
    sampler = sampler.innermost if isinstance(sampler, Expander) else sampler
    if not isinstance(sampler, WindowSampler):  # a server's
        return by_window(info, rows_of(rows, _CALL), priority, generation)
    rows, window = rows_of(rows, _CALL), sampler.window
    if window is not None:
        info = {"learning_mask": torch.arange(len(rows), device="cpu") % window.steps >= window.burn_in, **info}
    steps = sampler.settings.even_steps(len(rows))
    return by_window(info, rows, priority, generation, steps, public(sampler.truncated_key or ()))


def by_window(
    info: Mapping[Entry, object],
    rows: Tensor,
    priority: object,
    generation: Tensor | None,
    steps: int = 0,
    marks: Entry = ("next", "truncated"),
) -> Update:
    """The same. If there is one priority per window, the step by which the window was drawn gets it.

    Args:
        info: what is said of the rows.
        rows: of the batch, ``[n, ...]``.
        steps: of each window; 0: not known, or windows differ.
        marks: the entry that is true at the last step of each window.
    """
    n, values, ends = len(rows), as_numbers(f"{_CALL}: priority", priority), info.get(marks, None) if marks else None
    if values.ndim == 0 or values.numel() == n or len(values) == n or not (steps or ends is not None):
        return rows, priority, generation
    place = torch.arange(1, n + 1, device="cpu")
    last = place == n if ends is None else as_numbers(_CALL, ends).reshape(n, -1)[:, 0].to("cpu", torch.bool)
    padded = any(info.get(mask, None) is not None for mask in MASKS)  # so they are of one length
    if steps or padded:
        last = place % (steps or n // max(1, int(last.count_nonzero()))) == 0
    count = int(last.count_nonzero())
    if values.numel() != count and len(values) != count:
        if values.shape == (1,):
            return rows, priority, generation
        got = list(values.shape)
        raise RuntimeError(f"{_CALL}: expected one priority per row, {n}, or per window, {count}, got {got}.")
    learned = info.get("learning_mask", None)
    drawn = place > 0 if learned is None else as_numbers(_CALL, learned).reshape(n).cpu()
    drawn = drawn & ~(drawn.roll(1) & ~last.roll(1) & (place > 1))  # the first steps to learn from
    numbers = None if generation is None else rows_of(generation, f"{_CALL}: generation")
    numbers = numbers[drawn] if numbers is not None and len(numbers) == n else numbers
    return rows[drawn], values.detach().reshape(count, -1).amax(1), numbers


def _of_anchors(unit: object, info: Mapping[Entry, object], values: Tensor) -> Update:
    """Anchors of sequences, each with the priority of its window, or with what its errors make."""
    told: dict[Entry, Tensor] = {
        key: as_numbers(_CALL, value) for key, value in info.items() if isinstance(value, Tensor | np.ndarray)
    }
    begun = told["step_in_sequence"] == 0
    n, count, got = begun.numel(), int(begun.count_nonzero()), values.numel()
    if isinstance(unit, Sequence) and got not in (1, count):
        if n not in (got, len(values)):
            raise RuntimeError(
                f"{_CALL}: expected one priority per record, {n}, or per window, {count}, got {list(values.shape)}."
            )
        return unit.anchor_priorities(values, told)
    numbers = told.get("anchor_generation")
    return told["anchor_index"][begun], values, None if numbers is None else numbers[begun]
