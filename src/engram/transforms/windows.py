"""What transforms of windows share: the steps around each step. Chunks of actions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engram._support import checks, field_paths
from engram.transforms._base import Key, Transform, as_key, entry, find, path_of, put, shallow


class Windows(NamedTuple):
    """Of each step ``[*batch, T]`` the ``n`` steps around it, oldest first."""

    #: ``[*batch, T, n]``: numbers of steps. Steps outside the trajectory are replaced by its nearest one.
    steps: torch.Tensor
    #: ``[*batch, T, n]``: how far a step lies outside the trajectory; 0 inside.
    beyond: torch.Tensor

    @classmethod
    def of(cls, ends: torch.Tensor, n: int, future: bool) -> Windows:
        """``ends``: bool ``[*batch, T]``. The windows end with their step, or begin with it."""
        at = torch.arange(ends.shape[-1], device=ends.device)
        around = at.unsqueeze(-1) + torch.arange(n, device=ends.device)
        if future:
            is_last = ends.clone()
            is_last[..., -1:] = True
            last = torch.where(is_last, at, len(at)).flip(-1).cummin(-1).values.flip(-1).unsqueeze(-1)
            return cls(torch.minimum(around, last), (around - last).clamp_min(0))
        is_first = torch.ones_like(ends)
        is_first[..., 1:] = ends[..., :-1]
        first = torch.where(is_first, at, 0).cummax(-1).values.unsqueeze(-1)
        around = around - (n - 1)
        return cls(torch.maximum(around, first), (first - around).clamp_min(0))

    def read(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """``[*batch, T, *shape]`` as ``[*batch, T, n, *shape]``. Raises ``ValueError``: it has not as many steps as the end flags."""
        batch = self.steps.shape[:-1]
        if value.shape[: len(batch)] != batch:
            raise ValueError(f"{name}: expected {list(batch)} steps, as of end flags, got shape {list(value.shape)}.")
        rows = value.reshape(-1, *value.shape[len(batch) - 1 :])
        lane = torch.arange(len(rows), device=self.steps.device).reshape(-1, 1, 1)
        steps = self.steps.reshape(len(rows), *self.steps.shape[-2:])
        return rows[lane, steps].reshape(*self.steps.shape, *value.shape[len(batch) :])


def checked_dim(what: str, dim: object) -> int:
    """A dimension that is counted from the last one. Raises ``ValueError``: it is not negative. ``TypeError``: no int."""
    number = checks.check_count(what, dim, least=-(1 << 31))
    if number >= 0:
        raise ValueError(f"{what}: expected a negative number, counted from the last dimension, got {number}.")
    return number


def ends_of(data: object, key: Key | None, dims: int, name: str) -> torch.Tensor | None:
    """The end flags under ``("next", key)``, and the ends of windows, one per step; None if there are none of either.

    Raises ``ValueError``: they do not fit.
    """
    found = None if key is None else find(data, ("next", *path_of(key)))
    ends: torch.Tensor | None = find(data, field_paths.WINDOW_ENDS)
    ends = None if ends is None or ends.ndim != dims + 1 else ends.to(torch.bool).squeeze(-1)
    if found is None:
        return ends
    flags = torch.as_tensor(found).to(torch.bool)
    if flags.ndim < dims:
        raise ValueError(f"{name}: ('next', {key!r}): expected {dims} dimensions of a batch, got {list(flags.shape)}.")
    flags = flags.reshape(*flags.shape[:dims], -1).any(-1)
    return flags if ends is None or ends.shape != flags.shape else flags | ends.to(flags.device)


class ActionChunkTransform(Transform):
    """Gives each step of a window its action and the ``chunk_size - 1`` actions after it: what a policy of chunks learns. TorchRL's.

    Actions ``[*batch, T, A]`` become ``[*batch, T, chunk_size, A]`` under ``chunk_key``. After a window, also one of a flat batch of a
    buffer, and after an end ``("next", done_key)`` the last action is repeated; ``pad_key``, bool ``[*batch, T, chunk_size]``, says where.

    Args:
        chunk_size: number of actions, at least 1.
        action_key, chunk_key, pad_key: the entries.
        time_dim: the dimension of time in the actions, negative: -2 for ``[…, T, A]``.
        done_key: the end flag beside the next observation. None, or where there is none: a window is one trajectory.

    Raises:
        ValueError: ``chunk_size`` is less than 1 or ``time_dim`` not negative; on use: actions without that dimension.
        KeyError: on use: there are no actions.

    Cost: a copy of ``chunk_size`` times the bytes of the actions, and one look at the end flags, for each batch.

    (Zhao et al. 2023, "Learning fine-grained bimanual manipulation with low-cost hardware".)

    >>> import torch
    >>> from engram import ActionChunkTransform
    >>> batch = ActionChunkTransform(3)({"action": torch.arange(4.0).reshape(1, 4, 1)})
    >>> batch["vla_action"]["chunk"][0, :, :, 0].tolist()
    [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    >>> batch["action_is_pad"][0, 2].tolist()
    [False, False, True]
    """

    writes = False

    def __init__(
        self,
        chunk_size: int,
        *,
        action_key: Key = "action",
        chunk_key: Key = ("vla_action", "chunk"),
        pad_key: Key = "action_is_pad",
        time_dim: int = -2,
        done_key: Key | None = "done",
    ) -> None:
        self.chunk_size = checks.check_count("ActionChunkTransform: chunk_size", chunk_size)
        self.action_key = as_key(action_key, "ActionChunkTransform: action_key")
        self.chunk_key = as_key(chunk_key, "ActionChunkTransform: chunk_key")
        self.pad_key = as_key(pad_key, "ActionChunkTransform: pad_key")
        self.done_key = None if done_key is None else as_key(done_key, "ActionChunkTransform: done_key")
        self.time_dim = checked_dim("ActionChunkTransform: time_dim", time_dim)

    def forward(self, data: object) -> object:
        """Add the chunks and the mask to a batch of windows. What it is given stays as it is; other entries are not copied.

        >>> import torch
        >>> from engram import ActionChunkTransform
        >>> window = {"action": torch.arange(3.0).reshape(1, 3, 1), "next": {"done": torch.tensor([[True, False, False]])}}
        >>> ActionChunkTransform(2).forward(window)["vla_action"]["chunk"][0, :, :, 0].tolist()
        [[0.0, 0.0], [1.0, 2.0], [2.0, 2.0]]
        """
        made = shallow(data, "ActionChunkTransform")
        actions = torch.as_tensor(entry(data, self.action_key, "ActionChunkTransform"))
        dims = actions.ndim + self.time_dim + 1
        if dims < 1:
            raise ValueError(f"ActionChunkTransform: time_dim={self.time_dim}: got actions {list(actions.shape)}.")
        ends = ends_of(data, self.done_key, dims, "ActionChunkTransform")
        if ends is None:
            ends = torch.zeros(actions.shape[:dims], dtype=torch.bool, device=actions.device)
        windows = Windows.of(ends, self.chunk_size, future=True)
        put(made, self.chunk_key, windows.read(actions, "ActionChunkTransform"))
        put(made, self.pad_key, windows.beyond > 0)
        return made

    def __repr__(self) -> str:
        return f"ActionChunkTransform({self.chunk_size})"
