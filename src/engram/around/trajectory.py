"""One trajectory as a tensorclass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, cast

from tensordict import TensorClass, TensorDictBase

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    Key = str | tuple[str, ...]

    class _Steps:
        """A tensorclass, as type checkers are to see it."""

        batch_size: torch.Size

        def __init__(self, data: TensorDictBase) -> None: ...
        def __getattr__(self, name: str) -> torch.Tensor: ...
        def __getitem__(self, index: slice) -> Self: ...
else:
    _Steps = TensorClass["nocast"]


class Trajectory(_Steps):
    """The steps of one trajectory in order, around a TensorDict ``[T]``.

    Entries are attributes: ``trajectory.reward`` is ``data["reward"]`` or, if there is none, ``data["next", "reward"]``; so are those
    of :meth:`get`. Slices, ``trajectory[:10]``, are trajectories, and ``trajectory["next", "reward"]`` is an entry.

    Args:
        data: a TensorDict with one batch dimension.

    Raises ``TypeError``: no TensorDict. ``ValueError``: more batch dimensions.

    >>> import torch
    >>> from engram import Trajectory
    >>> from tensordict import TensorDict
    >>> trajectory = Trajectory(TensorDict({"obs": torch.zeros(3, 4), ("next", "reward"): torch.ones(3, 1)}, [3]))
    >>> trajectory.length, float(trajectory.total_reward), trajectory[:2].reward.shape
    (3, 3.0, torch.Size([2, 1]))
    """

    data: TensorDictBase

    def __post_init__(self) -> None:
        if not isinstance(self.data, TensorDictBase):
            got = "none" if "<property object" in (text := f"{self.data!r:.60}") else text
            raise TypeError(
                f"Trajectory: data: expected a TensorDict [T], got {got}. To draw steps: sample_unit=Sequence(length=…)."
            )
        if not self.batch_size and self.data.batch_dims:
            if self.data.batch_dims != 1:
                raise ValueError(
                    f"Trajectory: expected a TensorDict with one batch dimension, [T], got {list(self.data.batch_size)}. Make one of each "
                    "column."
                )
            self.batch_size = self.data.batch_size

    @property
    def length(self) -> int:
        """Steps."""
        return int(self.batch_size[0])

    @property
    def total_reward(self) -> torch.Tensor:
        """The sum of the rewards, of no dimension. Raises ``AttributeError``: there are none."""
        return self.reward.sum()

    def get(self, key: Key, default: torch.Tensor | None = None) -> torch.Tensor | None:
        """The entry of a key, or else of ``("next", key)``, or else ``default``.

        >>> import torch
        >>> from engram import Trajectory
        >>> from tensordict import TensorDict
        >>> Trajectory(TensorDict({("next", "done"): torch.ones(2, 1)}, [2])).get("done").shape
        torch.Size([2, 1])
        """
        value = self.data.get(key, None)
        if value is None and isinstance(key, str):
            value = self.data.get(("next", key), None)
        return default if value is None else cast("torch.Tensor", value)

    def keys(self, *args: object, **kwargs: object) -> Iterable[Key]:
        """Those of the TensorDict, whose arguments it takes.

        >>> import torch
        >>> from engram import Trajectory
        >>> from tensordict import TensorDict
        >>> list(Trajectory(TensorDict({"obs": torch.zeros(2, 4)}, [2])).keys())
        ['obs']
        """
        return cast("Iterable[Key]", self.data.keys(*args, **kwargs))


# A tensorclass gets its own methods of these names when it is made.
_attribute_of, _item_of = Trajectory.__getattr__, Trajectory.__getitem__


def _entry(self: Trajectory, name: str) -> object:
    try:
        return _attribute_of(self, name)
    except AttributeError:
        value = None if name.startswith("_") else self.get(name)
        if value is None:
            raise AttributeError(_missing(self, name)) from None
        return value


def _missing(self: Trajectory, key: Key) -> str:
    found = sorted(self.data.keys(include_nested=True, leaves_only=True), key=str)
    either = f"{key!r} or {('next', key)!r}" if isinstance(key, str) else f"{key!r}"
    return f"Trajectory: expected an entry {either}, got {found}."


def _entry_or_steps(self: Trajectory, index: object) -> object:
    if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(part, str) for part in index)):
        value = self.get(cast("Key", index))
        if value is None:
            raise KeyError(_missing(self, cast("Key", index)))
        return value
    return _item_of(self, cast("slice", index))


def _shown(self: Trajectory) -> str:
    shape = f"length={self.length}" if len(self.batch_size) == 1 else f"batch_size={tuple(self.batch_size)}"
    return f"Trajectory({shape}, keys={sorted(map(str, self.data.keys()))})"


for _name, _method in (("__getattr__", _entry), ("__getitem__", _entry_or_steps), ("__repr__", _shown)):
    setattr(Trajectory, _name, _method)
