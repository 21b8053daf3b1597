"""The ends of windows, as transforms see them: flags that are set in a batch before its transforms, and reset after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram._tensordict import is_tensor_collection, is_tensorclass
from engram.field_paths import public
from engram.nested import has_entries
from engram.transforms._base import find, path_of, put, shallow
from engram.transforms.windows import WINDOW_ENDS
from engram.units.sequence import WindowUnit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.buffer.wiring import Wiring
    from engram.field_paths import FieldPath

_MASKS = (("collector", "mask"), "validity_mask")
_TRUNCATED = ("next", "truncated")


class WindowMarks:
    """What transforms see of a batch besides its fields: flags at the end of each window, masks, and :data:`WINDOW_ENDS`."""

    def __init__(self, wiring: Wiring, info: Mapping[Any, Any], shape: tuple[int, ...]) -> None:
        """``info``: of a batch of windows, with rows of that shape."""
        source, unit = wiring.source, wiring.unit
        self._shape = shape
        #: Where ends of windows are set. None: flags stay as they are stored.
        self._truncated: FieldPath | None = getattr(source, "truncated_key", _TRUNCATED)
        if isinstance(unit, WindowUnit):
            self._truncated = None if unit.done_key is None else (*unit.done_key[:-1], "truncated")
        self._done = None if self._truncated is None else (*self._truncated[:-1], "done")
        if isinstance(unit, WindowUnit):
            self._done = unit.done_key
        even = getattr(source, "even_steps", None)
        self._ends = self._ends_in(info, 0 if even is None else even(shape[-1]))
        computed = source.computed_keys
        #: By path: what is set in a batch, ``[*shape, ...]``.
        self._marks: dict[FieldPath, Tensor] = {
            path_of(key): value
            for key, value in info.items()
            if isinstance(value, Tensor) and value.dtype is torch.bool and key not in computed
        }
        self._stored: dict[FieldPath, Any] = {}

    def _ends_in(self, info: Mapping[Any, Any], even: int) -> Tensor | None:
        """Bool ``[*shape]``: the last steps of windows, and those before and after which padding begins. None: not known."""
        shape, total = self._shape, self._shape[-1]
        mask = next((info[key].reshape(shape) for key in _MASKS if key in info), None)
        truncated = None if self._truncated is None else info.get(public(self._truncated))
        if "sequence_id" in info:
            number = info["sequence_id"].reshape(shape)
            ends: Tensor = number != number.roll(-1, -1)
        elif truncated is not None:
            ends = truncated.reshape(*shape, -1)[..., 0].clone()
            if mask is not None:  # windows of one length, each of which has one end before its padding
                even_steps = total // ends.sum(-1, keepdim=True).clamp_min(1)
                ends |= torch.arange(1, total + 1, device=ends.device) % even_steps == 0
        elif even:
            place = torch.arange(1, total + 1, device=None if mask is None else mask.device)
            ends = (place % even == 0).expand(shape).clone()
        else:
            return None
        ends[..., -1] = True
        if mask is not None:
            ends[..., :-1] |= mask[..., 1:] != mask[..., :-1]
        return ends

    def set_in(self, data: Any) -> Any:
        """A batch, new from the storage, with the marks. Another form than a TensorDict or a dict stays as it is."""
        is_td = is_tensor_collection(data)
        if not has_entries(data) or (is_td and data.batch_size[: len(self._shape)] != self._shape):
            return data
        if self._ends is not None:
            self._set_ends(data, self._ends)
        if is_td and is_tensorclass(data):  # which has no other fields
            self._marks = {path: mark for path, mark in self._marks.items() if find(data, path) is not None}
        self._stored = {path: find(data, path) for path in self._marks}
        data = _open(data)
        if is_td:
            attach(data, self._shape, {public(path): mark for path, mark in self._marks.items()})
            self._marks = {path: data.get(path) for path in self._marks}
        else:
            for path, mark in self._marks.items():
                put(data, path, mark)
        return data

    def _set_ends(self, data: Any, ends: Tensor) -> None:
        for path in filter(None, (self._truncated, self._done)):
            flag = self._marks.get(path, find(data, path))
            if flag is None and path == self._done:
                flag = torch.zeros(*self._shape, 1, dtype=torch.bool, device=ends.device)
            if isinstance(flag, Tensor) and flag.shape[: len(self._shape)] == self._shape:
                here = ends.to(flag.device).reshape(*self._shape, *(1,) * (flag.ndim - ends.ndim))
                self._marks[path] = flag | here if flag.dtype is torch.bool else flag.masked_fill(here, 1)
        self._marks[(WINDOW_ENDS,)] = ends.unsqueeze(-1)

    def reset_in(self, data: Any, kept: Mapping[Any, object]) -> Any:
        """What transforms returned, with flags as they are stored where no transform changed them. ``kept``: keys that are set anew."""
        changed = [path for path in self._stored if public(path) not in kept and self._is_mark(path, find(data, path))]
        if not changed or not has_entries(data):
            return data
        data = _open(data)
        for path in changed:
            now, stored = find(data, path), self._stored[path]
            if stored is None:
                _remove(data, path)
            else:
                put(data, path, stored.reshape(now.shape).to(now.device))
        return data

    def _is_mark(self, path: FieldPath, now: object) -> bool:
        mark = self._marks[path]
        if path == (WINDOW_ENDS,):
            return now is not None
        if now is mark or not isinstance(now, Tensor):
            return now is mark
        same = now.numel() == mark.numel() and now.dtype is mark.dtype
        return same and torch.equal(now.reshape(mark.shape).to(mark.device), mark)


def _open(data: Any) -> Any:
    """A batch to which entries can be added."""
    return shallow(data, "sample") if is_tensor_collection(data) and data.is_locked else data


def _remove(data: Any, path: FieldPath) -> None:
    """Remove an entry, and containers that are empty then."""
    inner = data if len(path) == 1 else find(data, path[:-1])
    del inner[path[-1]]
    if len(path) > 1 and not len(inner.keys()):
        _remove(data, path[:-1])


def attach(data: Any, batch: tuple[int, ...], entries: Mapping[Any, Any]) -> None:
    """Add entries ``[*batch, ...]`` to a batch of another form than ours. Raises ``RuntimeError``: it has another size, or no entries."""
    if not is_tensor_collection(data):
        raise RuntimeError(f"sample: expected a TensorDict after collating and transforms, got {type(data).__name__}.")
    ours = len(batch)
    if data.batch_size[:ours] != batch:
        was = batch[0] if ours == 1 else list(batch)
        raise RuntimeError(
            f"sample: a transform or collate_fn changed the batch size from {was} to {list(data.batch_size)}, so "
            f"{sorted(map(str, entries))} cannot be attached. Use a ReplayBuffer with sample(return_info=True)."
        )
    missing = len(data.batch_size) - ours
    for key, value in entries.items():
        stored = data.get(key, None)
        if stored is not None and stored.shape == value.shape:  # a stored flag, marked
            data.set(key, value)
            continue
        laid_out = value.reshape(*value.shape[:ours], *(1,) * missing, *value.shape[ours:])
        data.set(key, laid_out.expand(*data.batch_size, *value.shape[ours:]))
