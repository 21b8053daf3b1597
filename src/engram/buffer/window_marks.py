"""Marks of windows: the flags that transforms see, and the rows that one priority per window belongs to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engram._support import tensordicts
from engram._support.checks import as_numbers
from engram._support.field_paths import WINDOW_ENDS, FieldPath, public
from engram._support.nested import has_entries, is_tensordict
from engram.around import sequence, windows
from engram.around.episodes import END_KEYS, STEP_TYPE
from engram.buffer.wiring import Wiring
from engram.samplers.prioritized import rows_of
from engram.transforms._base import find, path_of, put
from engram.types import Entry

#: Entries that say which steps of windows are padding.
MASKS = (("collector", "mask"), "validity_mask")


class WindowMarks:
    """The marks that transforms see of a batch besides its fields: flags at the end of each window, masks, and :data:`WINDOW_ENDS`."""

    def __init__(
        self, wiring: Wiring, info: Mapping[Entry, object], shape: tuple[int, ...], kept: Collection[Entry]
    ) -> None:
        """``info``: of a batch of windows, with rows of that shape. ``kept``: keys that are set again after the transforms."""
        unit, source = wiring.unit, wiring.source
        sampler = source.chooser
        truncated: FieldPath | None = ("next", "truncated")
        even = 0
        if isinstance(sampler, windows.WindowSampler):
            truncated, even = sampler.truncated_key, sampler.settings.even_steps(shape[-1])
        done = truncated and (*truncated[:-1], "done")
        rules = sampler.rules if isinstance(sampler, windows.WindowSampler) else None
        if isinstance(unit, sequence.Sequence):
            rules = unit.rules
            done, truncated = unit.done_key, unit.done_key and (*unit.done_key[:-1], "truncated")
        self._shape, self._kept, ends = shape, {*kept} - {WINDOW_ENDS}, _ends_in(info, shape, truncated, even)
        #: The last steps of windows, bool ``[*shape]``, where the rows are; None: not known.
        self.ends = None if ends is None else ends.to(wiring.storage.device)
        #: Flags in which ends of windows are set.
        self._flags = [path for path in (truncated, done) if path is not None]
        #: Those that end trajectories, which are set too where they are stored; None: the usual ones.
        self._named = rules.end_keys if rules is not None else None
        #: By path: what is set in a batch, ``[*shape, ...]``, and what was stored there.
        self._marks: dict[FieldPath, Tensor] = {
            path_of(key): value
            for key, value in info.items()
            if isinstance(value, Tensor) and value.dtype is torch.bool and key not in source.computed_keys
        }
        self._stored: dict[FieldPath, object] = {}
        #: Whether the flags that the sampler has made say all.
        self._as_marked = not any(key in info for key in MASKS) and "sequence_id" not in info

    def set_in(self, data: object) -> object:
        """A batch, new from the storage, with the marks. Another form than a TensorDict or a dict stays as it is."""
        ends, lead = self.ends, len(self._shape)
        if ends is None or not has_entries(data) or (is_tensordict(data) and data.batch_size[:lead] != self._shape):
            return data
        named = self._named
        if named is None and all(find(data, path) is None for path in END_KEYS):  # they may be beside the observation
            named = tuple(path[1:] for path in self._flags if path in END_KEYS)
        stored = [path for path in named or () if path[-1] != STEP_TYPE and find(data, path) is not None]
        for path in dict.fromkeys((*self._flags, *stored)):
            flag = self._marks.get(path)
            if flag is not None and self._as_marked:
                continue
            if flag is None and (flag := find(data, path)) is None:
                flag = ends.new_zeros(*self._shape, 1)
            if isinstance(flag, Tensor) and flag.shape[:lead] == self._shape:
                here = ends.to(flag.device).reshape(*self._shape, *(1,) * (flag.ndim - lead))
                self._marks[path] = flag.masked_fill(here, 1)
        self._marks[(WINDOW_ENDS,)] = ends.unsqueeze(-1)
        if tensordicts.is_tensorclass(data):  # which has no other fields
            self._marks = {path: mark for path, mark in self._marks.items() if find(data, path) is not None}
        self._stored = {path: find(data, path) for path in self._marks if public(path) not in self._kept}
        data = _open(data)
        if is_tensordict(data):
            attach(data, self._shape, {public(path): mark for path, mark in self._marks.items()})
            self._marks.update((path, find(data, path)) for path in self._stored)
            return data
        for path, mark in self._marks.items():
            put(data, path, mark)
        return data

    def reset_in(self, data: object) -> object:
        """What transforms returned, with flags as they are stored where no transform changed them."""
        for path, stored in self._stored.items():
            now, mark = find(data, path), self._marks[path]
            if now is None or not (path == (WINDOW_ENDS,) or _are_equal(now, mark)):
                continue
            data = _open(data)
            if not isinstance(stored, Tensor):
                _remove(data, path)
            else:
                like = torch.as_tensor(now)
                dtype = stored.dtype if like.dtype is mark.dtype else like.dtype
                value = stored.reshape(like.shape).to(like.device, dtype)
                put(data, path, value if isinstance(now, Tensor) else value.numpy())
        return data


def _ends_in(info: Mapping[Entry, object], shape: tuple[int, ...], last: FieldPath | None, even: int) -> Tensor | None:
    """Bool ``[*shape]``: the last steps of windows, and those before and after which padding begins. None: not known.

    ``last``: the mark of the last steps. ``even``: steps of each window; 0: not known.
    """
    if isinstance(known := info.get(WINDOW_ENDS), Tensor):
        return known.reshape(*shape, -1)[..., 0]
    found = [info.get(key) for key in (public(last or ()), "sequence_id", *MASKS)]
    marked, number, *masks = (of if isinstance(of, Tensor) else None for of in found)
    mask = next((of.reshape(shape) for of in masks if of is not None), None)
    if marked is not None and mask is None and number is None:
        return marked.reshape(*shape, -1)[..., 0]
    place = torch.arange(1, shape[-1] + 1, device=next((of.device for of in (marked, mask) if of is not None), None))
    if number is not None:
        ends: Tensor = number.reshape(shape) != number.reshape(shape).roll(-1, -1)
    elif marked is not None:  # one in each window, before its padding; all are of one length
        ends = marked.reshape(*shape, -1)[..., 0].clone()
        ends |= place % (shape[-1] // ends.sum(-1, keepdim=True).clamp_min(1)) == 0
    elif even:
        ends = (place % even == 0).expand(shape).clone()
    else:
        return None
    ends[..., -1] = True
    if mask is not None:
        ends[..., :-1] |= mask[..., 1:] != mask[..., :-1]
    return ends


def _are_equal(now: object, mark: Tensor) -> bool:
    """Whether an entry has the values of a mark, in another shape or dtype perhaps."""
    if now is mark or not isinstance(now, Tensor | np.ndarray):
        return now is mark
    value = torch.as_tensor(now)
    return value.numel() == mark.numel() and torch.equal(value.reshape(mark.shape).to(mark.device, mark.dtype), mark)


def _open(data: object) -> object:
    """A batch to which entries can be added."""
    return data.copy() if is_tensordict(data) and data.is_locked else data


def _remove(data: object, path: FieldPath) -> None:
    """Remove an entry, and containers that are empty then."""
    inner = find(data, path[:-1])
    del inner[path[-1]]
    if len(path) > 1 and not len(inner.keys()):
        _remove(data, path[:-1])


def attach(data: Any, batch: tuple[int, ...], entries: Mapping[Entry, Tensor]) -> None:
    """Add entries ``[*batch, ...]`` to a batch of another form than ours, as TorchRL does: a tensorclass has no place for new ones, a
    locked TensorDict is locked again. Raises ``RuntimeError``: it has another size, or no entries.
    """
    if not tensordicts.is_tensor_collection(data):
        raise RuntimeError(f"sample: expected a TensorDict after collating and transforms, got {type(data).__name__}.")
    if tensordicts.is_tensorclass(data):
        entries = {key: value for key, value in entries.items() if find(data, path_of(key)) is not None}
    dims, ours = len(data.batch_size), len(batch)
    if data.batch_size[:ours] != batch[:dims]:
        was = batch[0] if ours == 1 else list(batch)
        raise RuntimeError(
            f"sample: a transform or collate_fn changed the batch size from {was} to {list(data.batch_size)}, so "
            f"{sorted(map(str, entries))} cannot be attached. Use a ReplayBuffer with sample(return_info=True)."
        )
    locked = data.is_locked
    if locked:
        data.unlock_()
    elif dims == ours and tensordicts.is_plain_tensordict(data):
        tensordicts.put(data, entries)
        return
    for key, value in entries.items():
        stored = data.get(key, None)
        if dims > ours and (stored is None or stored.shape != value.shape):  # else a stored flag, marked
            laid_out = value.reshape(*batch, *(1,) * (dims - ours), *value.shape[ours:])
            value = laid_out.expand(*data.batch_size, *value.shape[ours:])
        data.set(key, value)
    if locked:
        data.lock_()


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
    sampler = sampler.chooser
    if not isinstance(sampler, windows.WindowSampler):  # a server's
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
    told: dict[Entry, Tensor] = {k: as_numbers(_CALL, v) for k, v in info.items() if isinstance(v, Tensor | np.ndarray)}
    begun = told["step_in_sequence"] == 0
    n, count, got = begun.numel(), int(begun.count_nonzero()), values.numel()
    if isinstance(unit, sequence.Sequence) and got not in (1, count):
        if n not in (got, len(values)):
            raise RuntimeError(
                f"{_CALL}: expected one priority per record, {n}, or per window, {count}, got {list(values.shape)}."
            )
        return unit.anchor_priorities(values, told)
    numbers = told.get("anchor_generation")
    return told["anchor_index"][begun], values, None if numbers is None else numbers[begun]
