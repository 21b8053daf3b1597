"""Which windows a slice sampler draws: what a window is, and the arguments of the samplers, checked, as one value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Generic, TypedDict, TypeVar

from engram._support import native as _native
from engram._support.checks import as_numbers, check_count, check_type
from engram._support.field_paths import FieldPath, as_path, as_paths
from engram._support.unsupported import reject_unsupported
from engram.around.episodes import checked_end_when
from engram.store.indexes import check_index_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.around.windows import WindowSampler

_T = TypeVar("_T")


class StreamingArguments(TypedDict, total=False):
    """The keywords that all slice samplers and a :class:`StreamingSliceSampler` take, as TorchRL names them."""

    end_key: object
    end_keys: Sequence[object] | None
    traj_key: object
    truncated_key: object
    init_key: object
    strict_length: bool
    index: str
    end_when: str | None
    compile: object
    use_gpu: object


class WindowArguments(StreamingArguments, total=False):
    """The keywords that all other slice samplers take."""

    num_slices: int | None
    slice_len: int | None
    window: WindowSpec | None
    flat: bool
    ends: object
    trajectories: object


@dataclass(frozen=True)
class WindowSettings:
    """Which windows a batch holds, which trajectories they are windows of, and how their ends are marked."""

    num_slices: int | None
    slice_len: int | None
    end_key: FieldPath | None
    end_keys: tuple[FieldPath, ...] | None
    traj_key: FieldPath | None
    ends: Tensor | None
    trajectories: Tensor | None
    truncated_key: FieldPath | None
    init_key: FieldPath | None
    strict_length: bool
    index: str
    pad_output: bool = False
    span: tuple[bool | int, bool | int] = (False, False)
    uniform_over: str = "trajectories"
    window: WindowSpec | None = None
    flat: bool = True
    online: bool = False
    end_when: str | None = None
    fragmented: bool = False
    step_key: FieldPath | None = None

    @classmethod
    def of(cls, who: str, arguments: WindowArguments) -> WindowSettings:
        """Check the arguments of a sampler. Raises as :class:`SliceSampler`; messages begin with ``who``."""
        known = WindowArguments.__annotations__
        reject_unsupported(who, {name: v for name, v in arguments.items() if name not in known}, {}, known)
        num_slices, slice_len, window = (arguments.get(name) for name in ("num_slices", "slice_len", "window"))
        if (num_slices, slice_len, window).count(None) != 2:
            raise TypeError(
                f"{who}: expected one of num_slices, slice_len and window, got num_slices={num_slices}, slice_len={slice_len}, "
                f"window={window}."
            )
        if isinstance(window, dict):  # as a store notes it
            window = WindowSpec(**window)
        if window is not None:
            window = check_type(f"{who}: window", window, WindowSpec, "a WindowSpec", "Write WindowSpec(length=…).")
        flat = bool(arguments.get("flat", True))
        if window is None and not flat:
            raise TypeError(f"{who}: flat=False: expected window=WindowSpec(…) beside it: how long windows are.")
        signals = ("ends", "trajectories", "end_key", "end_keys", "traj_key")
        given = {name for name, value in arguments.items() if name in signals and value is not None}
        if {"end_key", "end_keys"} <= given:
            raise RuntimeError(f"{who}: expected one of end_key and end_keys, got both. Put all into end_keys.")
        if given & {"ends", "trajectories"} and len(given) > 1:
            raise RuntimeError(f"{who}: expected one kind of boundaries, got {sorted(given)}. Give one of them.")
        index = arguments.get("index", "main")
        check_index_name(index, f"{who}: index")
        return cls(
            None if num_slices is None else check_count(f"{who}: num_slices", num_slices),
            None if slice_len is None else check_count(f"{who}: slice_len", slice_len),
            as_path(arguments.get("end_key"), f"{who}: end_key"),
            as_paths(arguments.get("end_keys"), f"{who}: end_keys", empty=True),
            as_path(arguments.get("traj_key"), f"{who}: traj_key"),
            _as_static(arguments.get("ends"), f"{who}: ends"),
            _as_static(arguments.get("trajectories"), f"{who}: trajectories"),
            as_path(arguments.get("truncated_key", ("next", "truncated")), f"{who}: truncated_key"),
            as_path(arguments.get("init_key", "is_init"), f"{who}: init_key"),
            bool(arguments.get("strict_length", True)),
            index,
            window=window,
            flat=flat,
            end_when=checked_end_when(arguments.get("end_when"), who),
        )

    @property
    def static(self) -> tuple[str, Tensor] | None:
        """Name and values of boundaries that are no field of the rows; None: the rows hold them."""
        found = {"ends": self.ends, "trajectories": self.trajectories}
        return next(((name, values) for name, values in found.items() if values is not None), None)

    @property
    def length(self) -> int:
        """Steps of a window; 0 where they follow from the batch size."""
        return self.window.steps if self.window is not None else self.slice_len or 0

    @property
    def are_even(self) -> bool:
        """Whether all windows of a batch have as many steps."""
        return self.window is not None or self.pad_output or (self.strict_length and not any(self.span))

    def even_steps(self, total: int) -> int:
        """Steps of each window of a batch of ``total`` steps; 0: windows may differ in length."""
        return (self.length or total // (self.num_slices or 1)) if self.are_even else 0

    def split(self, batch_size: int) -> tuple[int, int]:
        """Windows of a batch, and steps of each. Raises ``RuntimeError``: the batch size is not divisible."""
        length = self.slice_len if self.window is None else self.window.steps
        if self.num_slices is not None:
            count, rest = self.num_slices, batch_size % self.num_slices
        else:
            assert length is not None  # one of the three was given
            if not self.flat:
                return batch_size, length
            count, rest = divmod(batch_size, length)
        if rest or not count:
            which = f"num_slices={self.num_slices}" if self.num_slices is not None else self.named(length)
            advice = "" if self.window is None else f" With flat=False it counts windows of {length} steps."
            raise RuntimeError(f"sample: batch_size: expected a multiple of {which}, got {batch_size}.{advice}")
        return count, batch_size // count

    def named(self, length: int | None) -> str:
        """What messages call windows of that length."""
        return f"slice_len={length}" if self.window is None else f"the {length} steps of {self.window}"

    def needed(self, length: int) -> int:
        """Steps of the shortest trajectory that gives a window of that length, if shorter windows are none."""
        window = self.window
        return length if window is None else window.reach - window.padding * window.dilation

    def native(self, length: int, who: str) -> _native.WindowSpec:
        """Which windows of that length may be drawn. Raises ``ValueError``: they overhang by a whole window; ``who``: it begins so."""
        by_anchor, window = self.uniform_over == "anchors", self.window
        if window is not None:
            rules = (window.period, window.dilation, window.burn_in, window.padding, True)
            return _native.WindowSpec(length, self.strict_length, by_anchor, 0, 0, *rules)
        left, right = (length - 1 if end is True else int(end) for end in self.span)
        if max(left, right) >= length:
            raise ValueError(f"{who}: span: expected less than the {length} steps of a window, got {self.span}.")
        return _native.WindowSpec(length, self.strict_length, by_anchor, left, right)


class Setting(Generic[_T]):
    """An attribute of a slice sampler: an entry of its :class:`WindowSettings`. It can be set at any time."""

    def __set_name__(self, owner: type[object], name: str) -> None:
        self._name = name

    def __get__(self, sampler: WindowSampler | None, owner: type[object]) -> _T:
        value: _T = self if sampler is None else getattr(sampler.settings, self._name)  # type: ignore[assignment] # of a class
        return value

    def __set__(self, sampler: WindowSampler, value: _T) -> None:
        sampler.change(**{self._name: value})


def _as_static(values: object, what: str) -> Tensor | None:
    """Boundaries of all live rows, flat and contiguous, in memory of their own."""
    if values is None:
        return None
    values = as_numbers(what, values).to("cpu")
    if values.ndim < 1:
        raise TypeError(f"{what}: expected one value per row, got a scalar.")
    return values.reshape(-1).clone()


@dataclass(frozen=True)
class WindowSpec:
    """Windows of trajectories: ``burn_in + length`` steps each, ``dilation`` apart.

    The windows of a trajectory begin ``period`` steps apart, the first one ``padding`` window steps before the trajectory.
    Where a window reaches beyond its trajectory, the trajectory's first or last step stands for the steps that are missing;
    ``"validity_mask"`` is false there. ``"learning_mask"`` is false in the burn-in, and true in the ``length`` steps after it.

    Of a full ring, a trajectory begins with its oldest step that is still stored.

    Args:
        length: steps to learn from.
        period: steps of the trajectory from the beginning of one window to that of the next. With ``period=length`` and
            ``padding=burn_in``, the steps to learn from follow each other from the first step of a trajectory on.
        dilation: steps of the trajectory from one step of a window to the next. 1: consecutive ones.
        burn_in: steps of a window before those to learn from, with which a recurrent network warms up.
        padding: how many steps of a window may lie before its trajectory, less than all of them. With ``padding=burn_in``
            a trajectory is learned from its first step on.

    Raises:
        TypeError: not an int.
        ValueError: ``length``, ``period`` or ``dilation`` below 1, ``burn_in`` or ``padding`` below 0, or a window that is all
            padding.

    >>> from engram import WindowSpec
    >>> # Windows of R2D2 that share no step to learn from:
    >>> WindowSpec(length=40, burn_in=20, padding=20, period=40)
    WindowSpec(length=40, period=40, dilation=1, burn_in=20, padding=20)
    """

    length: int
    period: int = 1
    dilation: int = 1
    burn_in: int = 0
    padding: int = 0

    #: Steps at most of a trajectory that a window spans, and that its numbers count.
    _MAX_STEPS: ClassVar[int] = 1 << 40

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("burn_in", "padding") else 1
            what, value = f"WindowSpec: {field.name}", getattr(self, field.name)
            number = check_count(what, value, "steps", least=least, most=self._MAX_STEPS)
            object.__setattr__(self, field.name, number)
        if self.padding >= self.steps:
            raise ValueError(
                f"WindowSpec: padding: expected less than burn_in + length = {self.steps} steps, so that one of them is real, got "
                f"{self.padding}."
            )
        if self.reach > self._MAX_STEPS:
            raise ValueError(f"WindowSpec: expected windows over at most {self._MAX_STEPS} steps, got {self.reach}.")

    @property
    def steps(self) -> int:
        """Steps of a window: ``burn_in + length``."""
        return self.burn_in + self.length

    @property
    def reach(self) -> int:
        """Steps of a trajectory from the first to the last step of a window, both included."""
        return (self.steps - 1) * self.dilation + 1
