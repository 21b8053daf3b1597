"""The buffer behind an adapter: rows in RAM, or in a directory that one running process has."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from typing import Self, TypeAlias, cast

import numpy as np
import torch

import engram
from engram._support.words import raise_as
from engram.errors import IncompatibleStore
from engram.format.schema import DTYPES
from engram.storages import LazyTensorStorage
from engram.store.lifetime import Hold, hold
from engram.types import Sampler

Array: TypeAlias = np.typing.NDArray[np.generic]
Path: TypeAlias = tuple[str, ...]
Rows: TypeAlias = np.typing.NDArray[np.int64]


class Scratch:
    """A framework's buffer whose rows lie in an engram buffer, :attr:`rb`. Pickles hold all rows in RAM, or the directory's name.

    ``copy.deepcopy`` makes a buffer in RAM, as one alone goes on with a directory.
    """

    #: Attributes that pickles leave out.
    not_pickled: tuple[str, ...]
    #: The directory; None: the rows lie in RAM.
    scratch_dir: pathlib.Path | None
    rb: engram.ReplayBuffer[dict[str, object]]
    #: The lock on the directory, which lives as long as it is referred to.
    _hold: Hold | None

    def _open(self) -> None:
        """Make the engram buffer, or open its directory. What was open there ends."""
        raise NotImplementedError

    def _open_rows(self, size: int, lanes: int, what: str, sampler: Sampler, transform: object = None) -> None:
        """Have a buffer of ``size`` rows in as many lanes as environments, and the lock on its directory.

        Args:
            what: what the directory must hold, for a message.

        Raises:
            StoreInUse: another process has the directory. IncompatibleStore: it holds other lanes or another number of rows. Nothing is
                changed.
        """
        folder, where = self.scratch_dir, f"{type(self).__name__}: scratch_dir"
        if folder is None:
            storage = LazyTensorStorage(size, lanes=lanes)
            self.rb, self._hold = engram.ReplayBuffer(storage=storage, sampler=sampler, transform=transform), None
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = hold(folder.with_name(f".{folder.name}.lock"), where, folder)
        kind = engram.ReplayBuffer[dict[str, object]]
        with raise_as(IncompatibleStore, f"{where}: expected {what}", IncompatibleStore):
            self.rb = kind.open_or_create(folder, size, lanes=lanes, sampler=sampler, transform=transform)
        self._hold = lock

    def close(self) -> None:
        """Give the directory up: of a buffer that is used no more."""
        self.rb.close()
        self._hold = None

    def _stored_columns(self) -> dict[Path, Array]:
        """The stored fields by path: views of all rows. There are none before the first row."""
        memory = self.rb.storage.memory
        fields = () if memory is None else zip(memory.schema.fields, memory.views(), strict=True)
        return {field.key: view.numpy() for field, view in fields}

    def __getstate__(self) -> dict[str, object]:
        """What a pickle holds: all rows in RAM, or the directory's name."""
        state = {name: value for name, value in vars(self).items() if name not in self.not_pickled}
        return state if self.scratch_dir is not None else {**state, "rows": (self.rb.state_dict(),)}

    def __deepcopy__(self, memo: dict[int, Self]) -> Self:
        inside, made = object.__new__(type(self)), memo.setdefault(id(self), object.__new__(type(self)))
        vars(inside).update(vars(self), scratch_dir=None)
        made.__setstate__(deepcopy(inside.__getstate__(), memo))
        return made

    def __setstate__(self, state: dict[str, object]) -> None:
        saved = cast("tuple[dict[str, object], ...]", state.pop("rows", ()))
        vars(self).update(state)
        if self.scratch_dir is not None and not self.scratch_dir.exists():
            who = type(self).__name__
            raise FileNotFoundError(2, f"{who}: expected the directory of the saved replay", str(self.scratch_dir))
        self._open()
        for rows in saved:
            self.rb.load_state_dict(rows)


def leaves(
    given: Mapping[str, object], exclude: Collection[str], *root: str, of: type[dict[str, object]] = dict
) -> Iterator[tuple[Path, Array]]:
    """The arrays of values nested in ``of`` by path, without those of the names in ``exclude``. Raises ``TypeError``: one of objects."""
    for key, value in given.items():
        path = (*root, key)
        if (name := ".".join(path)) in exclude:
            continue
        if isinstance(value, of):
            yield from leaves(dict(value.items()), exclude, *path, of=of)
            continue
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        if isinstance(value, tuple) or array.dtype.name not in DTYPES:
            got = "a tuple" if isinstance(value, tuple) else array.dtype
            raise TypeError(
                f"add: {name}: expected numbers or a dict of them, got {got}. Leave it out: exclude=[{name!r}]."
            )
        yield path, array
