"""Steps of Stable-Baselines3 as rows: what its spaces are stored as, and what ``optimize_memory_usage`` leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape, is_image_space_channels_first

from engram.format.schema import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import EllipsisType

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.generic]
    Nested: TypeAlias = Array | dict[str, Array]

#: The kinds of spaces that have a dtype and a shape.
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Column(NamedTuple):
    """A field: the dtype and the shape of one step of one environment."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    def of(self, value: object, n: int, what: str) -> Array:
        """Values of ``n`` environments, ``[n, *shape]``. Raises ``ValueError``: they are not that many numbers."""
        array = np.asarray(value, self.dtype)
        shape = (n, *self.shape)
        try:
            return array if array.shape == shape else array.reshape(shape)
        except ValueError:
            raise ValueError(f"add: {what}: expected {list(shape)}, got {list(array.shape)}.") from None


class Columns:
    """The columns that observations are: one, or one for each key of a ``Dict``.

    Raises ``TypeError``: a space that cannot be stored.
    """

    def __init__(self, who: str, space: spaces.Space[object]) -> None:
        what = f"{who}: observation_space"
        self._nested = isinstance(space, spaces.Dict)
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        self.columns = {key: column_of(f"{what}[{key!r}]" if key else what, part) for key, part in parts.items()}

    def of(self, value: object, n: int, what: str) -> Nested:
        """Observations of ``n`` environments. Raises: as :meth:`Column.of`; ``KeyError``: one is missing."""
        if not self._nested:
            return self.columns[""].of(value, n, what)
        given: dict[str, object] = value  # type: ignore[assignment] # as the space says
        return {key: column.of(given[key], n, f"{what}[{key!r}]") for key, column in self.columns.items()}

    def paths(self, *root: str) -> dict[tuple[str, ...], Column]:
        """Where they are stored below ``root``."""
        return {(*root, key) if self._nested else root: column for key, column in self.columns.items()}

    def map(self, function: Callable[[tuple[str, ...]], Array], *root: str) -> Nested:
        """What a function returns for the path of each column below ``root``, nested as observations are."""
        return {key: function((*root, key)) for key in self.columns} if self._nested else function(root)


def column_of(what: str, space: spaces.Space[object]) -> Column:
    """What a space is stored as. Raises ``TypeError``: it cannot be stored."""
    dtype = np.dtype(space.dtype)
    if not isinstance(space, _ARRAYS) or dtype.name not in DTYPES:
        got = type(space).__name__ + (f" of {dtype}" if isinstance(space, _ARRAYS) else "")
        raise TypeError(
            f"{what}: expected a Box, Discrete, MultiDiscrete or MultiBinary of numbers, or for observations a Dict of these, got {got}."
        )
    return Column(dtype, tuple(get_obs_shape(space)))  # type: ignore[arg-type] # of such a space it is a tuple


def action_column(who: str, space: spaces.Space[object]) -> Column:
    """What actions are stored as: flat, and float32 in place of float64. Raises: as :func:`column_of`."""
    dtype = column_of(f"{who}: action_space", space).dtype
    return Column(np.dtype(np.float32) if dtype == np.float64 else dtype, (get_action_dim(space),))


class Frames:
    """How observations that are stacks become single frames: the last of ``n`` along an axis.

    Raises ``ValueError``: observations that are no stacks of so many frames; another padding.
    """

    def __init__(self, who: str, space: spaces.Space[object], n: int, padding: str) -> None:
        shape = space.shape if isinstance(space, spaces.Box) else None
        first = shape is not None and len(shape) == 3 and is_image_space_channels_first(space)  # type: ignore[arg-type]
        #: The axis of a stack, which counts from its end.
        self.axis = -3 if first else -1
        if not shape or shape[self.axis] % n:
            raise ValueError(
                f"{who}: frame_stack: expected observations that are {n} frames, a Box with {n} times as many channels, got {space}."
            )
        if padding not in ("zeros", "first"):
            raise ValueError(f"{who}: frame_padding: expected 'zeros' or 'first', got {padding!r}.")
        self.n, self.padding, self.size = n, padding, shape[self.axis] // n

    def column(self, stacks: Column) -> Column:
        """What one frame is stored as."""
        shape = [*stacks.shape]
        shape[self.axis] = self.size
        return stacks._replace(shape=tuple(shape))

    def older(self, stacks: Array) -> Array:
        """All frames but the newest."""
        return self._cut(stacks, slice(None, -self.size))

    def newer(self, stacks: Array) -> Array:
        """All frames but the oldest."""
        return self._cut(stacks, slice(self.size, None))

    def newest(self, stacks: Array) -> Array:
        """The last frame of each stack."""
        return self._cut(stacks, slice(-self.size, None))

    def _cut(self, stacks: Array, part: slice) -> Array:
        index: tuple[slice | EllipsisType, ...] = (..., part, *(slice(None),) * (-self.axis - 1))
        return stacks[index]

    def check(self, stacks: Array, following: Array, starts: NDArray[np.bool_]) -> None:
        """Raise ``ValueError`` unless sampling can build these stacks again of single frames.

        Args:
            stacks, following: ``[n, *shape]``, observed before and after a step.
            starts: whose episode begins, bool ``[n]``.
        """
        if not np.array_equal(self.newer(stacks), self.older(following)):
            raise ValueError(
                f"add: next_obs: expected the last {self.n - 1} frames of obs before its newest, as frame_stack={self.n} says, got others."
            )
        if starts.any():
            begun = stacks[starts]
            repeated = np.concatenate([self.newest(begun)] * (self.n - 1), self.axis)
            expected = repeated if self.padding == "first" else np.zeros_like(repeated)
            if not np.array_equal(self.older(begun), expected):
                raise ValueError(
                    f"add: obs: expected older frames that are {self.padding} where an episode begins, got others. VecFrameStack pads with "
                    "frame_padding='zeros', FrameStackObservation with 'first'."
                )


class Following:
    """Which episodes begin, of observations that are read from the following rows."""

    def __init__(self, n: int) -> None:
        #: Of each environment, whether the next step begins an episode.
        self.starts = np.ones(n, np.bool_)
        self._after: list[Array] = []

    def cut(self, observed: Nested) -> NDArray[np.bool_]:
        """Whose observation is not what followed the last step, though no flag ended the episode: bool ``[n]``."""
        differ = np.zeros_like(self.starts)
        for before, now in zip(self._after, _parts(observed), strict=False):
            differ |= (_bytes(before) != _bytes(now)).any(1)
        return differ & ~self.starts

    def stepped(self, following: Nested, over: NDArray[np.bool_]) -> None:
        """Remember what was observed after a step, and which episodes it ended."""
        self._after = [part.copy() for part in _parts(following)]
        self.starts = over.reshape(-1).copy()


def _parts(observed: Nested) -> Iterator[Array]:
    yield from observed.values() if isinstance(observed, dict) else (observed,)


def _bytes(array: Array) -> Array:
    """Bytes ``[n, …]``, eight at a time where they are as many: NaN equals itself."""
    rows = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
    return rows if rows.shape[1] % 8 else rows.view(np.uint64)
