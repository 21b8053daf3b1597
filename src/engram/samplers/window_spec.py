"""Which windows a slice sampler draws: its arguments, checked, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypedDict, TypeVar

from engram import _native
from engram._checks import as_numbers, check_count
from engram._unsupported import reject_unsupported
from engram.field_paths import FieldPath, as_path, as_paths
from engram.store import check_index_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.samplers.windows import WindowSampler

_UNSUPPORTED = {
    "fragmented": "slices of interleaved trajectories",
    "step_key": "slices of interleaved trajectories",
}

_T = TypeVar("_T")


class WindowArguments(TypedDict, total=False):
    """The keywords that all slice samplers take, as TorchRL names them."""

    num_slices: int | None
    slice_len: int | None
    end_key: object
    end_keys: Sequence[object] | None
    traj_key: object
    ends: object
    trajectories: object
    truncated_key: object
    init_key: object
    strict_length: bool
    index: str
    compile: object
    use_gpu: object


@dataclass(frozen=True)
class WindowSpec:
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

    @classmethod
    def of(cls, who: str, arguments: WindowArguments) -> WindowSpec:
        """Check the arguments of a sampler. Raises as :class:`SliceSampler`; messages begin with ``who``."""
        known = WindowArguments.__annotations__
        reject_unsupported(who, {name: v for name, v in arguments.items() if name not in known}, _UNSUPPORTED, known)
        num_slices, slice_len = arguments.get("num_slices"), arguments.get("slice_len")
        if (num_slices is None) == (slice_len is None):
            raise TypeError(
                f"{who}: expected one of num_slices and slice_len, got num_slices={num_slices}, slice_len={slice_len}."
            )
        name, value = ("num_slices", num_slices) if slice_len is None else ("slice_len", slice_len)
        value = check_count(f"{who}: {name}", value)
        signals = ("ends", "trajectories", "end_key", "end_keys", "traj_key")
        given = {name for name, value in arguments.items() if name in signals and value is not None}
        if {"end_key", "end_keys"} <= given:
            raise RuntimeError(f"{who}: expected one of end_key and end_keys, got both. Put all into end_keys.")
        if given & {"ends", "trajectories"} and len(given) > 1:
            raise RuntimeError(f"{who}: expected one kind of boundaries, got {sorted(given)}. Give one of them.")
        index = arguments.get("index", "main")
        check_index_name(index, f"{who}: index")
        return cls(
            None if num_slices is None else value,
            None if slice_len is None else value,
            as_path(arguments.get("end_key"), f"{who}: end_key"),
            as_paths(arguments.get("end_keys"), f"{who}: end_keys"),
            as_path(arguments.get("traj_key"), f"{who}: traj_key"),
            _as_static(arguments.get("ends"), f"{who}: ends"),
            _as_static(arguments.get("trajectories"), f"{who}: trajectories"),
            as_path(arguments.get("truncated_key", ("next", "truncated")), f"{who}: truncated_key"),
            as_path(arguments.get("init_key", "is_init"), f"{who}: init_key"),
            bool(arguments.get("strict_length", True)),
            index,
        )

    @property
    def static(self) -> tuple[str, Tensor] | None:
        """Name and values of boundaries that are no field of the rows; None: the rows hold them."""
        found = {"ends": self.ends, "trajectories": self.trajectories}
        return next(((name, values) for name, values in found.items() if values is not None), None)

    def split(self, batch_size: int) -> tuple[int, int]:
        """Windows of a batch, and steps of each. Raises ``RuntimeError``: the batch size is not divisible."""
        if self.num_slices is not None:
            count, rest = self.num_slices, batch_size % self.num_slices
        else:
            assert self.slice_len is not None  # one of the two was given
            count, rest = batch_size // self.slice_len, batch_size % self.slice_len
        if rest or not count:
            which = f"num_slices={self.num_slices}" if self.num_slices is not None else f"slice_len={self.slice_len}"
            raise RuntimeError(f"sample: batch_size: expected a multiple of {which}, got {batch_size}.")
        return count, batch_size // count

    def shape(self, length: int) -> _native.Shape:
        """Which windows of that length may be drawn. Raises ``ValueError``: they may overhang by a whole window."""
        left, right = (length - 1 if end is True else int(end) for end in self.span)
        if max(left, right) >= length:
            raise ValueError(f"SliceSampler: span: expected less than the {length} steps of a window, got {self.span}.")
        return _native.Shape(length, self.strict_length, self.uniform_over == "anchors", left, right)


class Setting(Generic[_T]):
    """An attribute of a slice sampler: an entry of its :class:`WindowSpec`. It can be set at any time."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, sampler: WindowSampler | None, owner: type) -> _T:
        value: _T = self if sampler is None else getattr(sampler.spec, self._name)  # type: ignore[assignment] # of a class
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
    flat: Tensor = values.reshape(-1).clone()
    return flat
