"""The dtypes that a user says once, and what becomes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from engram._support.field_paths import checked_path
from engram.errors import IncompatibleStore
from engram.format.schema import DTYPES, name_of
from engram.store.memory import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.format.schema import Field

#: Names of dtypes, by the fields' paths.
Dtypes: TypeAlias = Mapping[tuple[str, ...], str]
NO_DTYPES: Dtypes = {}


def overflows(given: Tensor, made: Tensor) -> bool:
    """Whether a value has become infinite, or the largest or smallest float of 8 bits, of which some kinds have no infinity."""
    if given.is_floating_point() and given.itemsize == 1:
        given = given.float()  # those do not know isinf
    if made.itemsize > 1 or not made.is_floating_point():
        return bool((made.isinf() & ~given.isinf()).any())
    limits, given = torch.finfo(made.dtype), given.double()
    return bool((((given > limits.max) | (given < limits.min)) & (given != made.double())).any())


def cast(value: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Values as another dtype; None if more than precision would be lost: an int that does not fit, a fraction, an imaginary part, or a
    float that :func:`overflows`.
    """
    if dtype.is_floating_point or dtype.is_complex:
        if value.dtype.is_complex and not dtype.is_complex:
            return None
        made = value.to(dtype)
        return None if overflows(value, made) else made
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return None
    given = value.numpy(force=True)
    whole = given.astype(DTYPE_NAMES[dtype])
    same = (whole.astype(given.dtype) == given).all() and ((whole < 0) == (given < 0)).all()
    return torch.from_numpy(whole).to(value.device) if same else None


def checked_dtypes(dtypes: object, where: str) -> Dtypes:
    """The dtypes of fields by their paths.

    Raises:
        TypeError: no mapping, a key that is no name or tuple of names, or a value that is no dtype.
    """
    if not isinstance(dtypes, Mapping):
        raise TypeError(f'{where}: dtypes: expected a dict such as {{"reward": torch.float32}}, got {dtypes!r:.80}.')
    checked = {}
    for key, dtype in dtypes.items():
        try:
            name = DTYPE_NAMES[dtype] if isinstance(dtype, torch.dtype) else str(dtype)
            name = name if name in DTYPES else np.dtype(dtype).name  # NumPy does not know all of ours
        except (KeyError, TypeError):
            name = ""
        if name not in DTYPES or dtype is None:
            nested = f" Name nested fields by tuples, ({key!r}, …)." if isinstance(dtype, Mapping) else ""
            raise TypeError(
                f"{where}: dtypes: {key!r}: expected a dtype, one of {', '.join(DTYPES)}, got {dtype!r:.80}.{nested}"
            )
        checked[checked_path(key, f"{where}: dtypes")] = name
    return checked


def check_stored(fields: Sequence[Field], dtypes: Dtypes) -> None:
    """Raise ``IncompatibleStore`` unless fields have these dtypes."""
    stored = {field.key: field.dtype for field in fields}
    for key, dtype in dtypes.items():
        if key not in stored:
            raise IncompatibleStore(
                f"dtypes: expected stored fields, {[field.name for field in fields]}, got field {name_of(key)}."
            )
        if stored[key] != dtype:
            raise IncompatibleStore(
                f"dtypes: expected {dtype} for the field {name_of(key)}, as was given, but it is stored as {stored[key]}."
            )
