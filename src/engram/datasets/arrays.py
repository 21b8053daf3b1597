"""Arrays in memory, and HDF5 files in D4RL's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import xxhash

from engram._support.checks import check_path
from engram._support.field_paths import FieldPath, public
from engram.datasets.blocks import (
    BLOCK_BYTES,
    Rename,
    Table,
    file_identity,
    flat_names,
    new_names,
    required,
    shown_names,
)
from engram.datasets.episodes import stored, written_whole
from engram.datasets.importing import ImportArguments, import_source
from engram.errors import DatasetError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.datasets.blocks import Array, Columns

#: Bytes of an array that say which data set it is of, at its beginning and at its end.
_LOOKED_AT = 1 << 16
#: What fields of a store are called in a file of D4RL's.
_D4RL: dict[FieldPath, str] = {
    ("observation",): "observations",
    ("next", "observation"): "next_observations",
    ("action",): "actions",
    ("next", "reward"): "rewards",
    ("next", "terminated"): "terminals",
    ("next", "truncated"): "timeouts",
    ("collector", "traj_ids"): "episode",
}


class Arrays(Table):
    """Columns that can be sliced: arrays, data sets of HDF5, memory-mapped tensors."""

    def __init__(
        self, call: str, where: str, fields: Mapping[FieldPath, Any], rename: Rename | None, end_keys: object = None
    ) -> None:
        super().__init__(call, where)
        self.names = new_names(call, fields, rename)
        self.ends = self.end_paths(end_keys)
        self._columns = {new: fields[old] for old, new in self.names.items() if new is not None}
        if not self._columns:
            raise self.refuse("expected fields, got none.")
        lengths = {public(old): len(fields[old]) for old, new in self.names.items() if new is not None}
        self.rows = max(lengths.values())
        for name, n in lengths.items():
            if n != self.rows:
                raise self.refuse(
                    f"expected as many rows in all fields, {self.rows}, but {name!r} has {n}. It was truncated, or is no column of "
                    f"steps: rename={{{name!r}: None}} leaves it out."
                )
        row_bytes = sum(column.dtype.itemsize * int(np.prod(column.shape[1:])) for column in self._columns.values())
        self.piece = max(1, BLOCK_BYTES // max(1, row_bytes))

    def identity(self) -> dict[str, object]:
        """Their shapes, and a sum of how they begin and end."""
        sums = xxhash.xxh3_128()
        step = max(1, _LOOKED_AT * self.piece // BLOCK_BYTES)
        for column in self._columns.values():
            for piece in (column[:step], column[-step:]):
                sums.update(np.ascontiguousarray(piece).tobytes())
        shapes = [[list(path), str(column.dtype), list(column.shape)] for path, column in self._columns.items()]
        return {"source": self.where, "fields": shapes, "sum": sums.hexdigest()}

    def parts(self, row: int) -> Iterator[Iterator[Columns]]:
        starts = range(row, self.rows, self.piece)
        yield ({path: self.read(column, start) for path, column in self._columns.items()} for start in starts)

    def read(self, column: Any, start: int) -> Array:
        """The rows of a column from one on, as many as are read at a time."""
        rows: Array = column[start : start + self.piece]
        return rows


def from_numpy(
    data: Mapping[str, object] | Sequence[Mapping[str, object]],
    directory: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    end_keys: Sequence[str | tuple[str, ...]] | None = None,
    **more: Unpack[ImportArguments],
) -> ReplayBuffer[Any]:
    """Write arrays of steps to a store in a directory, and open it read-only.

    Rows get the names of TorchRL: ``observations`` becomes ``observation``, ``rewards`` ``("next", "reward")``, ``terminals``
    ``("next", "terminated")``, ``timeouts`` ``("next", "truncated")``, and the number of the episode ``("collector", "traj_ids")``.
    That number is added where it is missing, and so is ``episode_return``, the sum of the rewards of the step's episode. Next
    observations that are not among the arrays are read from the following row, by a :class:`NextFromFollowing`.

    A call that was killed is made again: it goes on behind the last whole episode. Once all are there, it only opens the store.

    Args:
        data: arrays ``[N, …]`` by name, nested or not, of which an episode number or end flags tell the episodes; or a list of
            such dicts, one per episode.
        directory: a new one.
        rename: new names by old ones, which are strings or paths; None as a name leaves the field out.
        end_keys: the fields that are not zero at the last step of an episode, by their old names. Default: ``terminals``,
            ``timeouts`` and the like.
        batch_size, progress, show: of all imports. ``batch_size`` is that of the buffer, ``progress`` is called with a
            :class:`Progress`, and ``show`` with a line for each field; both go to the log by default.

    Raises:
        DatasetError: arrays differ in length, hold no numbers, or nothing tells episodes apart.
        IncompatibleStore: the directory holds an import of other arrays. FileExistsError: it holds other files.
        StoreInUse: another process imports into it.

    Cost: that of copying the arrays.

    >>> import tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_numpy
    >>> steps = {"observations": np.arange(6.0), "rewards": np.ones(6), "terminals": np.arange(6) % 3 == 2}
    >>> rb = from_numpy(steps, tempfile.mkdtemp() + "/data", batch_size=4)
    >>> rb["collector", "traj_ids"].tolist(), rb["episode_return"].tolist()
    ([0, 0, 0, 1, 1, 1], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    >>> batch = rb.sample()
    >>> bool((batch["next"]["observation"] == batch["observation"] + 1).all())
    True
    """
    call = "from_numpy"
    if isinstance(data, Sequence):
        data = _joined(data, call)
    if not isinstance(data, Mapping):
        raise TypeError(
            f"{call}: data: expected a dict of arrays, or a list of one per episode, got {type(data).__name__}."
        )
    columns = {path: np.asarray(leaf) for path, leaf in flat_names(data, call)}
    return import_source(Arrays(call, "data", columns, rename, end_keys), directory, more)


def _joined(episodes: Sequence[Mapping[str, object]], call: str) -> dict[str, object]:
    """Episodes as one table, with their number."""
    found = [dict(flat_names(episode, call)) for episode in episodes]
    for number, one in enumerate(found):
        if one.keys() != found[0].keys():
            raise TypeError(
                f"{call}: episode {number}: expected the arrays {[*map(public, found[0])]}, got {[*map(public, one)]}."
            )
    columns: dict[str, object] = {}
    if found:
        lengths = [len(np.asarray(next(iter(one.values())))) for one in found]
        columns["episode"] = np.repeat(np.arange(len(found)), lengths)
    for path in found[0] if found else ():
        at = columns
        for part in path[:-1]:
            at = at.setdefault(part, {})  # type: ignore[assignment]
        at[path[-1]] = np.concatenate([np.asarray(one[path]) for one in found])
    return columns


# ---- HDF5 ---------------------------------------------------------------------------------------------------------------


def from_hdf5(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    end_keys: Sequence[str | tuple[str, ...]] | None = None,
    **more: Unpack[ImportArguments],
) -> ReplayBuffer[Any]:
    """Write the steps of an HDF5 file in D4RL's layout to a store in a directory, and open it read-only.

    Its data sets are columns of steps: ``observations``, ``actions``, ``rewards``, ``terminals``, ``timeouts`` and others, such as
    ``infos/qpos``, whose name is the path ``("infos", "qpos")``. The group ``metadata`` is left out. The file is read in pieces of 8 MB.

    Args:
        path: the file.
        directory, rename, end_keys, batch_size, progress, show: as for :func:`from_numpy`.

    Raises:
        DatasetError: the file is damaged, columns differ in length, or nothing tells episodes apart. FileNotFoundError.
        ModuleNotFoundError: h5py is missing, which ``engram-replay[hdf5]`` brings. Others as :func:`from_numpy`.

    >>> import tempfile
    >>> import h5py, numpy as np
    >>> from engram.datasets import from_hdf5
    >>> folder = tempfile.mkdtemp()
    >>> with h5py.File(folder + "/steps.hdf5", "w") as file:
    ...     for name, column in {"observations": np.arange(4.0), "rewards": np.ones(4), "terminals": np.arange(4) == 3}.items():
    ...         file[name] = column
    >>> len(from_hdf5(folder + "/steps.hdf5", folder + "/data"))
    4
    """
    call = "from_hdf5"
    file = check_path(f"{call}: path", path)
    with _hdf5(file, call) as fields:
        return import_source(_File(call, file, fields, rename, end_keys), directory, more)


class _File(Arrays):
    """The columns of an HDF5 file."""

    def __init__(
        self, call: str, path: Path, fields: Mapping[FieldPath, Any], rename: Rename | None, end_keys: object
    ) -> None:
        self._path = path
        super().__init__(call, str(path), fields, rename, end_keys)

    def identity(self) -> dict[str, object]:
        return {**file_identity([self._path]), "names": shown_names(self.names)}

    def read(self, column: Any, start: int) -> Array:
        try:
            return super().read(column, start)
        except OSError as error:
            raise self.refuse(
                f"{column.name!r}: rows from {start} on cannot be read ({error}). The file is damaged."
            ) from error


@contextmanager
def _hdf5(path: Path, call: str) -> Iterator[dict[FieldPath, Any]]:
    """The columns of a file, by path."""
    h5py = required("h5py", "hdf5", call)
    path.stat()  # raises FileNotFoundError, which names it
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DatasetError(
            f"{call}: {path}: expected a whole HDF5 file, got one that is damaged or of another kind ({error})."
        ) from error
    with file:
        fields: dict[FieldPath, Any] = {}

        def found(name: str, entry: Any) -> None:
            parts = tuple(name.split("/"))
            if isinstance(entry, h5py.Dataset) and entry.shape and parts[0] != "metadata":
                fields[parts] = entry

        file.visititems(found)
        yield fields


def to_hdf5(directory: str | os.PathLike[str], path: str | os.PathLike[str], *, compression: str | None = None) -> None:
    """Write the steps of a store to an HDF5 file in D4RL's layout.

    Episodes follow each other, lane after lane and oldest first. Fields get D4RL's names: ``observation`` becomes ``observations``,
    ``("next", "reward")`` ``rewards``, ``("next", "terminated")`` ``terminals``, ``("next", "truncated")`` ``timeouts``; the others keep
    theirs. Next observations are among them where the store has them. The file appears when it is whole.

    Args:
        directory: of the store; it is only read.
        path: the file. It must not exist.
        compression: one of h5py's, such as ``"gzip"``.

    Raises:
        FileExistsError: the file is there. DatasetError: nothing tells episodes apart.
        ModuleNotFoundError: h5py is missing, which ``engram-replay[hdf5]`` brings.

    >>> import tempfile
    >>> import h5py, numpy as np
    >>> from engram.datasets import from_numpy, to_hdf5
    >>> folder = tempfile.mkdtemp()
    >>> steps = {"observations": np.arange(4.0), "rewards": np.ones(4), "terminals": np.arange(4) == 3}
    >>> from_numpy(steps, folder + "/data").close()
    >>> to_hdf5(folder + "/data", folder + "/steps.hdf5")
    >>> with h5py.File(folder + "/steps.hdf5") as file:
    ...     file["observations"][:].tolist(), file["terminals"][:].tolist()
    ([0.0, 1.0, 2.0, 3.0], [False, False, False, True])
    """
    call = "to_hdf5"
    h5py = required("h5py", "hdf5", call)
    with stored(directory, call) as store, written_whole(path, call) as partial, h5py.File(partial, "w") as file:
        columns: dict[FieldPath, Any] = {}
        at = 0
        for block in store.blocks(0, 0):
            n = int(block.lengths.sum())
            for field, rows in block.columns.items():
                if field not in columns:
                    shape, known = (
                        (store.rows, *rows.shape[1:]),
                        next((key for key in _D4RL if field[: len(key)] == key), ()),
                    )
                    name = "/".join([*filter(None, [_D4RL.get(known)]), *field[len(known) :]])
                    columns[field] = file.create_dataset(name, shape, rows.dtype, compression=compression)
                columns[field][at : at + n] = rows
            at += n
