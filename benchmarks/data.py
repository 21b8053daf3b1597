"""The rows that every library stores, and the check that a batch really holds them.

Field ``a``, ``b`` and ``c`` of row ``i`` carry ``i``, so a sampled batch can be tested for complete rows: no
library is timed for less work than the others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

ROWS = 100_000
BATCH = 128
ROW_BYTES = 2 * 3 * 4 * 4 + 1

Fields = dict[str, torch.Tensor]
T = TypeVar("T")


def fields(rows: int = ROWS) -> Fields:
    """``a``, ``b`` float32 ``[rows, 3, 4]`` and ``c`` bool ``[rows]``; float32 holds row numbers below 2**24
    exactly.
    """
    number = torch.arange(rows)
    a, b = torch.rand(rows, 3, 4), torch.rand(rows, 3, 4)
    a[:, 0, 0] = number
    b[:, 0, 0] = number
    return {"a": a, "b": b, "c": number % 2 == 1}


def tensordict(data: Fields) -> TensorDict:
    """The same rows as a TensorDict with batch size ``[rows]``."""
    return TensorDict(data, batch_size=[len(data["c"])])


def arrays(data: Fields) -> dict[str, np.ndarray]:
    """The same rows as NumPy arrays, without a copy."""
    return {key: value.numpy() for key, value in data.items()}


def pieces(fields: Fields, size: int) -> list[Fields]:
    """The rows cut into pieces of ``size`` outside the clock; a piece of one row has no leading dimension."""
    columns = (column.unbind(0) if size == 1 else torch.split(column, size) for column in fields.values())
    return [dict(zip(fields, piece, strict=True)) for piece in zip(*columns, strict=True)]


def tensordicts(pieces: Sequence[Fields]) -> list[TensorDict]:
    """The same pieces as TensorDicts."""
    return [TensorDict(piece, batch_size=piece["c"].shape) for piece in pieces]


def each(write: Callable[[Any], object], pieces: Iterable[Any]) -> Callable[[], object]:
    """``write`` of the next piece, round and round."""
    upcoming = cycle(pieces).__next__

    def call() -> object:
        return write(upcoming())

    return call


def identity(batch: T) -> T:
    """The ``collate_fn`` of tensor storages on both sides: the gathered batch as it is."""
    return batch


def stack_dicts(items: list[Fields]) -> Fields:
    """The ``collate_fn`` of lists of dicts on both sides: TorchRL's default does not stack them."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def check(batch: object, live: int = ROWS, size: int = BATCH) -> None:
    """Refuse a batch that is not ``size`` whole rows out of the first ``live``.

    Raises:
        ValueError: a field is missing, has another shape, or mixes rows.
    """
    if isinstance(batch, torch.Tensor):
        batch = {"a": batch}
    elif isinstance(batch, TensorDictBase):
        batch = dict(batch.items())
    if not isinstance(batch, Mapping):
        raise ValueError(f"check: expected a tensor, dict or TensorDict, got {type(batch).__name__}.")
    numbers = np.asarray(batch["a"])[:, 0, 0].astype(np.int64)
    if np.asarray(batch["a"]).shape != (size, 3, 4) or numbers.min() < 0 or numbers.max() >= live:
        raise ValueError(f"check: field a: expected {size} rows out of {live}, got {numbers}.")
    if "b" in batch:
        whole = np.asarray(batch["b"])[:, 0, 0] == numbers
        whole &= np.asarray(batch["c"]).reshape(size) == (numbers % 2 == 1)
        if not whole.all():
            raise ValueError(f"check: expected whole rows, got fields of different rows at {~whole}.")


def checked(sample: Callable[[], object], live: int = ROWS) -> Callable[[], object]:
    """``sample`` itself, after one checked batch."""
    check(sample(), live)
    return sample
