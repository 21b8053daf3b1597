"""Layouts in one HDF5 file: a group per trajectory, a data set per entry.

Files are read as those of unknown origin: data sets that lie in the file itself, of numbers only.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from engram._dtypes import DTYPE_NAMES, DTYPE_OF
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.schema import DTYPES, MAX_DEPTH, validate_key
from engram.layouts.reading import FULL, SHAPE, SHIFT, Leaf, Ring

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.layouts.reading import Key, Keys, Steps

_LENGTH = "_len"
_TRAJECTORY = "traj"
#: Rows that a file may claim to have.
_MAX_ROWS = 1 << 36


def h5py(who: str) -> ModuleType:
    """The package. Raises ``ImportError``: it is not installed; says how to install it."""
    try:
        import h5py as found
    except ImportError as error:
        raise ImportError(f"{who}: HDF5 files need the package h5py: pip install 'engram-replay[hdf5]'.") from error
    module: ModuleType = found
    return module


class _Group(Protocol):
    """A group of an HDF5 file."""

    name: str

    def __contains__(self, name: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> _DataSet: ...
    def get(self, name: str, *, getlink: bool) -> object: ...


class _DataSet(_Group, Protocol):
    """A data set of an HDF5 file, or a group, before it is known which."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    ndim: int
    size: int
    is_virtual: bool
    external: object

    def __getitem__(self, index: object) -> _DataSet: ...
    def __setitem__(self, index: object, values: object) -> None: ...
    def read_direct(self, into: object, source: object, target: object) -> None: ...
    def __int__(self) -> int: ...


class HDF5Sink:
    """Writes a layout into a new file.

    Args:
        path: of the file; nothing may be there.
        options: of ``h5py.Group.create_dataset``, such as ``compression``.
        who: what messages begin with.

    Raises:
        ImportError: there is no h5py. OSError: no file can be made there.
    """

    def __init__(self, path: str | os.PathLike[str], options: Mapping[str, object], who: str) -> None:
        self._file = h5py(who).File(path, "x")
        self._options, self._who = options, who

    def __enter__(self) -> HDF5Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, ring: Ring, steps: Steps, keys: Keys) -> None:
        self._lengths = steps.trajectories()
        n = len(self._lengths[0])
        digits = math.ceil(math.log10(n))
        self._groups = [self._file.create_group(f"{_TRAJECTORY}_{number:0{digits}d}") for number in range(n)]
        noted = {keys.full: ring.full, keys.shift: ring.shift, SHAPE: [ring.slots, *ring.columns]}
        for name, data in noted.items():
            self._file.create_dataset(name, data=data)

    @contextlib.contextmanager
    def column(self, key: Key, shape: torch.Size, dtype: torch.dtype, *, expanded: bool) -> Iterator[_DataSets]:
        try:
            kind = torch.zeros((), dtype=dtype).numpy().dtype
        except TypeError as error:
            raise IncompatibleCheckpoint(
                f"{self._who}: field {key}: expected a dtype that HDF5 knows, got {dtype}. Use FlatStorageCheckpointer."
            ) from error
        lengths = self._lengths[expanded].tolist()
        name = "/".join(key)
        if any("/" in part or part in ("", ".") for part in key):
            raise IncompatibleCheckpoint(
                f"{self._who}: field {key}: expected a key that HDF5 can name, without a slash."
            )
        made = [
            group.create_dataset(name, shape=(n, *shape), dtype=kind, **self._options)
            for group, n in zip(self._groups, lengths, strict=True)
        ]
        yield _DataSets(made, _offsets(self._lengths[expanded]))

    def finish(self, length: int) -> None:
        """Note how many rows are live."""
        self._file.create_dataset(_LENGTH, data=length)


class _DataSets:
    """Those of one entry, one behind the other."""

    def __init__(self, sets: list[_DataSet], offsets: NDArray[np.int64]) -> None:
        self._sets, self._offsets = sets, offsets

    def write(self, at: int, values: Tensor) -> None:
        if values.numel():
            for number, begin, end, first in _overlapping(self._offsets, at, len(values)):
                self._sets[number][begin:end] = values[first : first + end - begin].numpy()


class HDF5Leaves:
    """A layout in an HDF5 file.

    Args:
        path: of the file.
        who: what messages begin with.
        done: the entry that says how long trajectories are.
        names: of what says that it is full, and the shift.

    Raises:
        CorruptCheckpoint: it is damaged, or no HDF5 file. IncompatibleCheckpoint: it is no such layout.
        ImportError: there is no h5py. FileNotFoundError: no file.
    """

    def __init__(
        self, path: str | os.PathLike[str], who: str, done: Key, names: tuple[str, str] = (FULL, SHIFT)
    ) -> None:
        self.name = str(path)
        with open(path, "rb"):
            pass
        module = h5py(who)
        self._hard, self._group, self._set = module.HardLink, module.Group, module.Dataset
        with self._damage():
            self._file = module.File(path, "r")
        full, shift = names
        with self._damage():
            self.length = int(self._number(_LENGTH)[()])
            shape = tuple(map(int, np.array(self._number(SHAPE)[()], ndmin=1)))
            if not shape or min(shape) < 1 or math.prod(shape) > _MAX_ROWS or not 0 <= self.length <= math.prod(shape):
                raise CorruptCheckpoint(
                    f"{self.name}: expected at most {_MAX_ROWS} rows, and not more live ones, got the shape {list(shape)} and "
                    f"{self.length} rows."
                )
            self.ring = Ring(shape[0], shape[1:], int(self._number(shift)[()]), bool(self._number(full)[()]))
            if not 1 <= self.ring.shift <= shape[0]:
                raise CorruptCheckpoint(f"{self.name}: {shift}: expected 1 to {shape[0]}, got {self.ring.shift}.")
            names_of = sorted(name for name in self._file if name.startswith(_TRAJECTORY))
            self._groups = [self._found(self._file, name, self._group) for name in names_of]
            if not self._groups:
                raise CorruptCheckpoint(f"{self.name}: expected groups {_TRAJECTORY}_0, {_TRAJECTORY}_1 …, found none.")
            lengths = [self._of(group, done).shape[0] for group in self._groups]
            self._lengths = np.array(lengths, np.int64)
            if int(self._lengths.sum()) != math.prod(shape) or min(lengths) < 1:
                raise CorruptCheckpoint(
                    f"{self.name}: expected trajectories of {math.prod(shape)} steps, got {int(self._lengths.sum())}."
                )
            self.leaves: dict[Key, Leaf] = {}
            self._describe(self._groups[0], ())
        self._offsets: dict[Key, NDArray[np.int64]] = {}
        self._steps_offsets = np.concatenate([[0], np.cumsum(self._lengths)])

    def read(self, key: Key, first: int, n: int) -> Tensor:
        leaf = self.leaves[key]
        values = torch.empty((n, *leaf.shape), dtype=DTYPE_OF[leaf.dtype], device="cpu")
        offsets = self._offsets.get(key, self._steps_offsets)
        if first + n > int(offsets[-1]):
            raise CorruptCheckpoint(
                f"{self.name}: {key}: expected at least {first + n} values, got {int(offsets[-1])}."
            )
        with self._damage():
            for number, begin, end, at in _overlapping(offsets, first, n):
                found = self._of(self._groups[number], key)
                length = int(offsets[number + 1] - offsets[number])
                if found.shape != (length, *leaf.shape) or found.dtype != values.numpy().dtype:
                    raise CorruptCheckpoint(
                        f"{self.name}: {found.name}: expected {leaf.dtype} of shape {[length, *leaf.shape]}, got {found.dtype} of shape "
                        f"{list(found.shape)}."
                    )
                if values.numel():
                    found.read_direct(values.numpy(), np.s_[begin:end], np.s_[at : at + end - begin])
        return values

    def check(self, steps: Steps) -> None:
        lengths, longer = steps.trajectories()
        if not np.array_equal(lengths.numpy(), self._lengths):
            raise CorruptCheckpoint(f"{self.name}: expected trajectories as long as their flags say, got others.")
        longer = longer.clone()
        slots = self.ring.slots
        if not self.ring.full:  # what lies behind the live slots of a column is never longer than its steps
            longer[torch.cumsum(lengths, 0) % slots == 0] = lengths[torch.cumsum(lengths, 0) % slots == 0]
        for key, leaf in self.leaves.items():
            if leaf.expanded:
                self._offsets[key] = _offsets(longer)

    def verify(self) -> None:
        for key, leaf in self.leaves.items():
            total = int(self._offsets.get(key, self._steps_offsets)[-1])
            step = max(1, (16 << 20) // max(1, math.prod(leaf.shape) * DTYPES[leaf.dtype]))
            for first in range(0, total, step):
                self.read(key, first, min(step, total - first))

    def close(self) -> None:
        self._file.close()

    # ---- what lies in the file itself ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        """What h5py raises, as ``CorruptCheckpoint``."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, CorruptCheckpoint | IncompatibleCheckpoint):
                raise
            raise CorruptCheckpoint(
                f"{self.name}: not readable as such a file: {error}. Nothing was changed."
            ) from error

    def _found(self, group: _Group, name: str, kind: type[object]) -> _DataSet:
        if name not in group or not isinstance(group.get(name, getlink=True), self._hard):
            raise CorruptCheckpoint(f"{self.name}: expected {name!r:.100} in {group.name}, in this file, found none.")
        found = group[name]
        if not isinstance(found, kind):
            raise CorruptCheckpoint(
                f"{self.name}: {found.name}: expected a {kind.__name__}, got a {type(found).__name__}."
            )
        return found

    def _checked(self, found: _DataSet) -> _DataSet:
        if found.is_virtual or found.external:
            raise CorruptCheckpoint(f"{self.name}: {found.name}: expected numbers in this file, got a link to another.")
        return found

    def _number(self, name: str) -> _DataSet:
        found = self._checked(self._found(self._file, name, self._set))
        if found.dtype.kind not in "biu" or found.size > 32:
            raise CorruptCheckpoint(f"{self.name}: {name}: expected a number, got {found.size} of {found.dtype}.")
        return found

    def _of(self, group: _Group, key: Key) -> _DataSet:
        for part in key[:-1]:
            group = self._found(group, part, self._group)
        return self._checked(self._found(group, key[-1], self._set))

    def _describe(self, group: _Group, key: Key) -> None:
        for name in group:
            own = (*key, name)
            try:
                validate_key(own)
            except ValueError as error:
                raise CorruptCheckpoint(f"{self.name}: {str(error).removesuffix('.')}.") from error
            found = self._found(group, name, (self._set, self._group))  # type: ignore[arg-type] # isinstance takes both
            if isinstance(found, self._group):
                if len(own) < MAX_DEPTH:
                    self._describe(found, own)
                continue
            self._checked(found)
            dtype = _dtype_of(found.dtype)
            if dtype is None or found.ndim < 1:
                raise IncompatibleCheckpoint(
                    f"{self.name}: {found.name}: expected numbers of steps, got {found.dtype}."
                )
            self.leaves[own] = Leaf(dtype, found.shape[1:], found.shape[0] != int(self._lengths[0]))


def _dtype_of(dtype: np.dtype[np.generic]) -> str | None:
    if dtype.kind not in "biufc" or not dtype.isnative:
        return None
    try:
        return DTYPE_NAMES.get(torch.from_numpy(np.zeros(0, dtype)).dtype)
    except TypeError:
        return None


def _offsets(lengths: Tensor) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths.numpy())])


def _overlapping(offsets: NDArray[np.int64], first: int, n: int) -> Iterator[tuple[int, int, int, int]]:
    """The trajectories that values ``[first, first + n)`` lie in: ``(number, begin, end, from which value on)``."""
    number = int(np.searchsorted(offsets, first, side="right")) - 1
    at = first
    while at < first + n:
        start, stop = int(offsets[number]), int(offsets[number + 1])
        end = min(stop, first + n)
        yield number, at - start, end - start, at - first
        at = end
        number += 1
