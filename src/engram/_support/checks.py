"""Checks of arguments."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from engram.errors import RowError

T = TypeVar("T")

#: Above any number of rows, and an int64 with room to add to.
_MAX_COUNT = 1 << 62


def check_count(what: str, value: object, noun: str = "", *, least: int = 1, most: int = _MAX_COUNT) -> int:
    """A number of things: an int, or what Python takes for one, such as ``np.int64``. Returns it as an int.

    Raises ``TypeError``: it is none. ``ValueError``: it is below ``least`` or above ``most``.
    """
    number = value if isinstance(value, int) and not isinstance(value, bool) else _as_int(value)
    if number is None:
        whole = isinstance(value, float) and value.is_integer()
        raise TypeError(
            f"{what}: expected an int, got {type(value).__name__}." + (f" Write {value:.0f}." if whole else "")
        )
    if number < least:
        raise ValueError(f"{what}: expected at least {f'{least} {noun}'.strip()}, got {number}.")
    if number > most:
        raise ValueError(f"{what}: expected at most {f'{most} {noun}'.strip()}, got {number}.")
    return number


def _as_int(value: object) -> int | None:
    """None: it is no int. A bool is none, nor is a tensor."""
    if isinstance(value, bool | torch.Tensor):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type] # that is the question
    except TypeError:
        return None


def check_number(what: str, value: object, *, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number of Python's or NumPy's, or that of a tensor or array without a dimension, as a float.

    Raises ``TypeError``: it is none. ``ValueError``: it is not finite, below ``least`` or above ``most``.
    """
    held = value.item() if isinstance(value, torch.Tensor | np.ndarray) and not value.ndim else value
    span = f"a number in [{least:g}, {most:g}]" if most < math.inf else f"a finite number of at least {least:g}"
    wanted = "a finite number" if least == -math.inf else span
    if isinstance(held, bool) or not isinstance(held, int | float | np.integer | np.floating):
        raise TypeError(f"{what}: expected {wanted}, got {type(value).__name__}.")
    try:
        number = float(held)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and least <= number <= most):
        raise ValueError(f"{what}: expected {wanted}, got {value}.")
    return number


def check_type(what: str, value: object, kind: type[T], wanted: str, advice: str = "") -> T:
    """A value of a type. Raises ``TypeError``: it is of another one."""
    if not isinstance(value, kind):
        raise TypeError(f"{what}: expected {wanted}, got {type(value).__name__}. {advice}".rstrip())
    return value


def check_callable(what: str, value: object, wanted: str, advice: str = "", *, optional: bool = False) -> None:
    """Raise ``TypeError`` unless a value can be called, or is None where it is optional."""
    if not (callable(value) or (optional and value is None)):
        raise TypeError(f"{what}: expected {wanted}, got {type(value).__name__}. {advice}".rstrip())


def check_choice(what: str, value: object, choices: Collection[object]) -> None:
    """Raise ``ValueError`` unless a value is one of some."""
    # Lists are in no set, and arrays compare as several values: neither can be hashed.
    if type(value).__hash__ is None or value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(
            f"{what}: expected {' or '.join([*filter(None, [', '.join(first)]), last])}, got {value!r:.80}."
        )


#: How addresses of servers begin.
_ADDRESSES = ("unix:", "grpc://", "grpc+tls://", "ray:", "file:", "dns:")


def check_path(what: str, value: object) -> Path:
    """The path of a file or folder, absolute. Raises ``TypeError``: it is none. ``ValueError``: an address."""
    try:
        path = os.fsdecode(value)  # type: ignore[arg-type] # that is the question
    except TypeError:
        raise TypeError(f"{what}: expected a path, got {type(value).__name__}.") from None
    if "\0" in path:
        raise ValueError(f"{what}: expected a path without null characters, got {path!r}.")
    if path.startswith(_ADDRESSES):
        raise ValueError(f"{what}: expected a path, got the address {path!r}. ReplayBuffer.connect takes addresses.")
    return Path(path).absolute()


def _has_large_ints(array: np.ndarray) -> bool:
    """Whether it was made of ints of which no int64 holds some."""
    if array.dtype.kind == "u":
        return array.dtype.itemsize == 8 and bool((array >= 1 << 63).any())
    return array.dtype.kind == "O" and array.size > 0 and all(isinstance(one, int) for one in array.flat)


def as_numbers(what: str, value: object, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers of any array, list or range as a tensor on the CPU, complex ones as they are; a tensor as it is. An empty list has ints.

    Raises ``TypeError``: they are none. ``RowError``: ints that no int64 holds. ``ValueError``: they have no common shape.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        array = np.asarray(value)
        if not array.size and isinstance(value, list | tuple):
            array = array.astype(np.int64)
        if dtype is not torch.float64 and array is not value and _has_large_ints(array):
            raise RowError(f"{what}: expected numbers below 2**63, got larger ones.")
        if dtype is torch.float64 and array.dtype.kind in "fu":
            array = array.astype(np.float64, copy=False)  # by NumPy: in a third of the time
        # torch takes no strides below zero, nor other byte orders.
        if not (array.flags.c_contiguous and array.dtype.isnative):
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        tensor = torch.from_numpy(array)
        return tensor if dtype is None or tensor.dtype is dtype or tensor.is_complex() else tensor.to(dtype)
    except (TypeError, RuntimeError):
        raise TypeError(
            f"{what}: expected a number, or a list, range, array or tensor of numbers, got {type(value).__name__}."
        ) from None
    except ValueError as error:
        raise ValueError(f"{what}: expected an array or tensor of one shape, got {type(value).__name__}.") from error


def as_ints(what: str, value: object, wanted: str = "ints") -> torch.Tensor:
    """Ints of any array, list, range or tensor, of any shape, as int64 on the CPU. What is empty may be of any dtype.

    Raises ``TypeError``: they are none. ``RowError``: ints that no int64 holds. ``ValueError``: they have no common shape.
    """
    numbers = value if isinstance(value, torch.Tensor) else as_numbers(what, value)
    if numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype is torch.bool:
        if numbers.numel():
            raise TypeError(f"{what}: expected {wanted}, got {numbers.dtype}.")
    elif numbers.dtype is torch.uint64 and bool((numbers.view(torch.int64) < 0).any()):  # the largest would become -1
        raise RowError(f"{what}: expected numbers below 2**63, got larger ones.")
    return numbers.to("cpu", torch.int64)
