"""The buffer behind an adapter: rows in RAM, or in a directory that one running process has."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import engram
from engram.errors import IncompatibleStore
from engram.storages import LazyTensorStorage
from engram.store.lifetime import Hold, hold

if TYPE_CHECKING:
    from pathlib import Path

    from engram.types import Sampler

T = TypeVar("T")


def open_rows(
    who: str,
    folder: Path | None,
    size: int,
    lanes: int,
    what: str,
    *,
    sampler: Sampler | None = None,
    transform: object = None,
) -> tuple[engram.ReplayBuffer[dict[str, object]], Hold | None]:
    """A buffer of ``size`` rows in as many lanes as environments, and the lock on its folder, which lives as long as it is referred to.

    Args:
        who: begins messages, which call the folder ``scratch_dir``.
        folder: None: the rows lie in RAM.
        what: what the folder must hold, for a message.

    Raises:
        StoreInUse: another process has the folder. IncompatibleStore: it holds other lanes or another number of rows. Nothing is changed.
    """
    if folder is None:
        storage = LazyTensorStorage(size, lanes=lanes)
        return engram.ReplayBuffer(storage=storage, sampler=sampler, transform=transform), None
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = hold(folder.with_name(f".{folder.name}.lock"), f"{who}: scratch_dir", folder)
    try:
        rb = engram.ReplayBuffer[dict[str, object]].open_or_create(
            folder, size, lanes=lanes, sampler=sampler, transform=transform
        )
    except IncompatibleStore as error:
        raise IncompatibleStore(f"{who}: scratch_dir: expected {what}: {error}") from None
    return rb, lock


def check_there(who: str, folder: Path | None) -> None:
    """Raise ``FileNotFoundError`` if the folder that a pickle names is gone."""
    if folder is not None and not folder.exists():
        raise FileNotFoundError(2, f"{who}: expected the directory of the saved replay", str(folder))


def nested(values: dict[tuple[str, ...], T]) -> dict[str, object]:
    """Dicts in each other of values by path."""
    root: dict[str, object] = {}
    for path, value in values.items():
        inside = root
        for key in path[:-1]:
            inside = inside.setdefault(key, {})  # type: ignore[assignment] # of a path that is a value no other begins with it
        inside[path[-1]] = value
    return root
