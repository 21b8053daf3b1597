"""Arrays in memory, HDF5 files in D4RL's layout, tables of Parquet and Lance, and buffers of Stable-Baselines3."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
import xxhash

from engram._support import checks, field_paths, words
from engram.around import episodes, expander
from engram.around.following import finals_of
from engram.buffer.replay_buffer import ReplayBuffer
from engram.datasets import importing as of
from engram.datasets.importing import BLOCK_BYTES
from engram.errors import DatasetError
from engram.format.files import Descriptor
from engram.saved import disk
from engram.types import StrPath

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from engram.format.schema import Field


class Stored(of.Table):
    """The rows of a store, lane after lane and oldest first."""

    sorted = False

    def __init__(self, buffer: of.DataSet, call: str, where: Path) -> None:
        super().__init__(call, where)
        self._storage, self._extent, self._finals = buffer.storage, buffer.storage.extent(), finals_of(buffer.sampler)
        memory = buffer.storage.memory
        assert memory is not None  # it was opened from its directory
        fields, self.rows = memory.schema.fields, self._extent.size
        if not self.rows:
            raise self.refuse("expected rows, got an empty store.")
        marks = episodes.TrajectoryKeys(None, None, None).boundaries(
            fields, episodes.numbers_by_path(memory), f"{call}: {where}"
        )
        self.id = next((fields[number].key for number in marks.ids), None)
        self.ends = [fields[number].key for number in marks.ends]
        self._paths = [field.key for field in fields]
        self.names = {path: path for path in self._paths if path != expander.MARK}
        check_dtypes(self, fields)
        self._piece = max(1, BLOCK_BYTES // memory.schema.row_bytes)

    def parts(self, row: int) -> Iterator[Iterator[of.Columns]]:
        assert row == 0  # exports begin there
        yield from map(self._lane, range(len(self._extent.filled)))

    def _lane(self, lane: int) -> Iterator[of.Columns]:
        filled = self._extent.filled[lane]
        for start in range(0, filled, self._piece):
            places = torch.arange(start, min(start + self._piece, filled))
            rows = self._extent.in_order(torch.tensor([lane]), places=places)
            columns, moved = self._storage.read(rows)
            if moved:
                raise self.refuse("expected a store that is not written to, but its rows change while they are read.")
            if len(rows):
                yield {path: column.numpy() for path, column in zip(self._paths, columns, strict=True)}

    def blocks(self, row: int, episode: int) -> Iterator[of.Block]:
        """Its episodes, and the observations after their last steps, as far as they are known."""
        for block in super().blocks(row, episode):
            mark, last = block.columns.pop(expander.MARK, None), np.cumsum(block.lengths) - 1
            pairs = [(key, ("next", *key)) for key in block.columns if ("next", *key) in block.columns]
            finals = {key: block.columns[following][last] for key, following in pairs}
            known = None
            if mark is not None and self._finals is not None:
                known = mark[last, 0] >= 0
                values, found = self._finals.read(torch.from_numpy(mark[last[known]]))
                known[known] = found.numpy()
                finals |= {key: block.columns[key][last] for key in self._finals.keys}
                for key, value in zip(self._finals.keys, values, strict=False):
                    finals[key][known] = value[found].numpy()
            yield of.Block(block.columns, block.lengths, finals, known)

    def steps(self, block: of.Block, final: str, first: str | None = None) -> of.Columns:
        """The rows of a block, with the next observations where they are not stored: of what the store has observations of after last
        steps, and of fields whose path begins with ``first``. ``final``: as for :meth:`after`.
        """
        columns = dict(block.columns)
        for key in [key for key in columns if key in block.finals or key[0] == first]:
            if ("next", *key) not in columns:
                columns["next", *key] = following = np.roll(columns[key], -1, axis=0)
                following[np.cumsum(block.lengths) - 1] = self.after(block, key, final)
        return columns

    def after(self, block: of.Block, path: field_paths.FieldPath, final: str) -> of.Array:
        """The observations after the last steps of a block, ``[episodes, …]``.

        Args:
            block: of this store.
            path: the observation.
            final: what those are that are not stored: ``"repeat"``, the observations of the last steps, or ``"refuse"``.
        """
        if path in block.finals and (final == "repeat" or block.known is None or block.known.all()):
            return block.finals[path]
        if final != "repeat":
            raise self.refuse(
                f"expected the observation after the last step of each episode, but none is stored of {field_paths.public(path)!r}. "
                "final='repeat' takes that of the last step in its place."
            )
        return block.columns[path][np.cumsum(block.lengths) - 1]


def distinct(names: list[str], call: str) -> list[str]:
    """What fields are called in a file. Raises ``DatasetError``: two get one name, or one that of a group of others."""
    if same := [one for one, other in pairwise(sorted(f"{name}/" for name in names)) if other.startswith(one)]:
        raise DatasetError(f"{call}: expected a name for each field in the file, but several would be called {same}.")
    return names


def check_dtypes(source: of.Table, fields: Iterator[Field] | tuple[Field, ...]) -> None:
    for field in fields:
        if field.dtype.startswith(("float8", "bfloat", "complex32")):
            raise source.refuse(f"field {field.name}: expected a dtype that NumPy has, got {field.dtype}.")


@contextmanager
def stored(directory: StrPath, call: str) -> Iterator[Stored]:
    """The rows of a store, which is only read."""
    folder = checks.check_path(f"{call}: directory", directory)
    with ReplayBuffer.open(folder, readonly=True) as buffer:
        yield Stored(buffer, call, folder)


@contextmanager
def written_whole(path: StrPath, call: str) -> Iterator[Path]:
    """Where to write a file or folder that then appears, whole, under a path. Raises ``FileExistsError``: that is there."""
    target = checks.check_path(f"{call}: path", path)
    if target.exists():
        raise FileExistsError(17, f"{call}: expected a path where nothing is", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        for one in (partial, *partial.rglob("*")):
            with Descriptor.open(one, os.O_RDONLY) as fd:
                os.fsync(fd)
        with disk.open_folder(target.parent) as folder:
            if not disk.link(partial.name, folder, target):  # a folder, or a file system without links
                os.rename(partial, target)
            os.fsync(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # of a file or of nothing, it does nothing
        partial.unlink(missing_ok=True)


class Arrays(of.Table):
    """Columns that can be sliced: arrays, or data sets of an HDF5 file."""

    def __init__(
        self, call: str, where: StrPath, fields: Mapping[field_paths.FieldPath, of.Array], arguments: of.ImportArguments
    ) -> None:
        super().__init__(call, where)
        self.named(fields, arguments)
        self._columns = {new: fields[old] for old, new in self.names.items() if new is not None}
        lengths = {field_paths.public(path): len(column) for path, column in self._columns.items()}
        self.rows = max(lengths.values(), default=0)
        if short := {name: n for name, n in lengths.items() if n != self.rows}:
            raise self.refuse(f"expected as many rows in all fields, {self.rows}, got {short}. They were truncated.")
        row_bytes = sum(column.dtype.itemsize * int(np.prod(column.shape[1:])) for column in self._columns.values())
        self._piece = max(1, BLOCK_BYTES // max(1, row_bytes))

    def identity(self) -> dict[str, object]:
        """Without a file, a sum of all their bytes tells arrays apart."""
        sums = xxhash.xxh3_128()
        for piece in () if self.files else self.pieces(0):
            sums.update(b"".join(column.tobytes() for column in piece.values()))
        shapes = [(path, str(column.dtype), column.shape) for path, column in self._columns.items()]
        return {**super().identity(), "fields": shapes, "sum": sums.hexdigest()}

    def pieces(self, row: int) -> Iterator[of.Columns]:
        for start in range(row, self.rows, self._piece):
            with words.raise_as(self.refuse, f"rows from {start} on cannot be read, as the file is damaged", OSError):
                yield {path: column[start : start + self._piece] for path, column in self._columns.items()}


def from_numpy(data: Mapping[str, object], directory: StrPath, **more: Unpack[of.ImportArguments]) -> of.DataSet:
    """Write arrays of steps to a store in a directory, and open it read-only.

    Rows get the names of TorchRL: ``observations`` becomes ``observation``, ``rewards`` ``("next", "reward")``, ``terminals``
    ``("next", "terminated")``, ``timeouts`` ``("next", "truncated")``, and the number of the episode ``("collector", "traj_ids")``.
    That number is added where it is missing, and so is ``episode_return``, the sum of the rewards of the step's episode. Next
    observations that are not among the arrays are read from the following row, by a :class:`NextFromFollowing`: a terminated last step
    has its own one there, and other last steps are not drawn.

    A call that was killed is made again: it goes on behind the last whole episode. Once all are there, it only opens the store.

    Args:
        data: arrays ``[N, …]`` by name, nested or not, of which an episode number or end flags tell the episodes.
        directory: a new one.
        rename: new names by old ones, which are strings or paths; None as a name leaves the field out.
        end_keys: the fields that are not zero at the last step of an episode, by their old names. Default: ``terminals``,
            ``timeouts`` and the like. Those that do not exist are skipped.
        batch_size, progress, show: of all imports. ``batch_size`` is that of the buffer, ``progress`` is called with a
            :class:`Progress`, and ``show`` with a line for each field; both go to the log by default.

    Raises:
        DatasetError: arrays differ in length, hold no numbers, or nothing tells episodes apart.
        IncompatibleStore: the directory holds an import of other arrays. FileExistsError: it holds other files.
        StoreInUse: another process imports into it.

    Cost: that of copying the arrays, and of reading them once more, which tells whether they are those of an earlier call.

    >>> import tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_numpy
    >>> steps = {"observations": np.arange(6.0), "rewards": np.ones(6), "terminals": np.arange(6) % 3 == 2}
    >>> rb = from_numpy(steps, tempfile.mkdtemp() + "/data", batch_size=4)
    >>> rb["collector", "traj_ids"].tolist(), rb["episode_return"].tolist()
    ([0, 0, 0, 1, 1, 1], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    >>> batch = rb.sample()
    >>> bool((batch["next"]["observation"] == batch["observation"] + ~batch["next"]["terminated"]).all())
    True
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"from_numpy: data: expected a dict of arrays, got {type(data).__name__}.")
    columns = {path: np.atleast_1d(np.asarray(leaf)) for path, leaf in of.flat_names(data)}
    return of.import_source(Arrays("from_numpy", "data", columns, more), directory, more)


# ---- HDF5 ---------------------------------------------------------------------------------------------------------------

#: What fields of a store are called in a file of D4RL's, besides their own names.
_D4RL = {path: name for name, path in reversed([*of.USUAL.items()]) if path is not None and path != of.DONE}


def from_hdf5(path: StrPath, directory: StrPath, **more: Unpack[of.ImportArguments]) -> of.DataSet:
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
    h5py, where = of.required("h5py", "hdf5", call), checks.check_path(f"{call}: path", path)
    where.stat()  # raises FileNotFoundError, which names it
    with words.raise_as(DatasetError, f"{call}: {where}: expected a whole HDF5 file", OSError):
        file = h5py.File(where, "r")
    with file:
        fields: dict[field_paths.FieldPath, of.Array] = {}

        def visit(name: str, entry: object) -> None:
            if isinstance(entry, h5py.Dataset) and entry.shape and not name.startswith("metadata/"):
                fields[tuple(name.split("/"))] = entry

        file.visititems(visit)
        source = Arrays(call, where, fields, more)
        source.files = [where]
        return of.import_source(source, directory, more)


def to_hdf5(directory: StrPath, path: StrPath, *, compression: str | None = None, final: str = "refuse") -> None:
    """Write the steps of a store to an HDF5 file in D4RL's layout.

    Episodes follow each other, lane after lane and oldest first. Fields get D4RL's names: ``observation`` becomes ``observations``,
    ``("next", "reward")`` ``rewards``, ``("next", "terminated")`` ``terminals``, ``("next", "truncated")`` ``timeouts``; the others keep
    theirs. Next observations are among them where the store has them, or the observations after last steps, as an import of Minari's
    data has. The file appears when it is whole.

    Args:
        directory: of the store; it is only read.
        path: the file. It must not exist.
        compression: one of h5py's, such as ``"gzip"``.
        final: of a store with observations after last steps, what those are that are not stored, such as that of the newest step of
            a recording: ``"repeat"``, that of the last step, or ``"refuse"``.

    Raises:
        FileExistsError: the file is there. DatasetError: nothing tells episodes apart, two fields get the same name, or there is no
            observation after a last step.
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
    h5py = of.required("h5py", "hdf5", call)
    with stored(directory, call) as store, written_whole(path, call) as partial, h5py.File(partial, "w") as file:
        at = 0
        for block in store.blocks(0, 0):
            n, columns = int(block.lengths.sum()), store.steps(block, final)
            for name, rows in zip(distinct([*map(_d4rl, columns)], call), columns.values(), strict=True):
                if name not in file:
                    file.create_dataset(name, (store.rows, *rows.shape[1:]), rows.dtype, compression=compression)
                file[name][at : at + n] = rows
            at += n


def _d4rl(field: field_paths.FieldPath) -> str:
    known = next((key for key in _D4RL if field[: len(key)] == key), ())
    return "/".join([*([_D4RL[known]] if known else []), *field[len(known) :]])


# ---- Parquet ------------------------------------------------------------------------------------------------------------


class ArrowRows(of.Table):
    """The rows of Arrow's tables. Dots in names of columns part those of groups."""

    def __init__(self, call: str, path: Path, files: Sequence[Path]) -> None:
        super().__init__(call, path)
        self._arrow, self.files = of.required("pyarrow", "datasets", call), files

    def _choose(self, columns: Sequence[str], arguments: of.ImportArguments) -> None:
        """Say what columns become, and how many rows are read at a time."""
        old = {tuple(name.split(".")): name for name in columns}
        self.named(old, arguments)
        self._new = {name: new for path, name in old.items() if (new := self.names[path]) is not None}
        nbytes = max(1, sum(one.stat().st_size for one in self.files))
        self._piece = min(1 << 16, max(1, BLOCK_BYTES * self.rows // (4 * nbytes)))

    def _columns(self, batch: pa.RecordBatch) -> of.Columns:
        return {new: self._array(name, batch.column(name)) for name, new in self._new.items()}

    def _array(self, name: str, column: pa.Array) -> of.Array:
        """A column as an array, ``[rows, …]``. Raises ``DatasetError``: an entry is missing, or lists differ in length."""
        shape, types = [len(column)], self._arrow.types
        column = column.storage if isinstance(column, self._arrow.ExtensionArray) else column
        while types.is_fixed_size_list(column.type) or types.is_list(column.type) or types.is_large_list(column.type):
            sizes = column.value_lengths().to_numpy(zero_copy_only=False)
            lengths = [] if column.null_count else np.unique(sizes).tolist()
            if len(lengths) != 1:
                raise self.refuse(f"column {name!r}: expected lists of one length, got {lengths or 'empty ones'}.")
            shape.append(lengths[0])
            column = column.flatten()
        if column.null_count:
            raise self.refuse(f"column {name!r}: expected a value in every row, got {column.null_count} empty ones.")
        if not (types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)):
            raise self.refuse(f"column {name!r}: expected numbers, got {column.type}. rename={{name: None}} omits it.")
        return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)


class ParquetRows(ArrowRows):
    """The rows of Parquet files, one file after the other."""

    def __init__(self, call: str, path: Path, files: Sequence[Path], arguments: of.ImportArguments) -> None:
        super().__init__(call, path, files)
        self._tables = files
        if not files:
            raise self.refuse("expected Parquet files, got none.")
        self._parquet = of.required("pyarrow.parquet", "datasets", call)
        found = [self._opened(one) for one in files]
        self._rows = [file.metadata.num_rows for file in found]
        self.rows = sum(self._rows)
        columns = [(file.schema_arrow.names, file.schema_arrow.types) for file in found]
        for one, file, theirs in zip(files, found, columns, strict=True):
            file.close()
            if theirs != columns[0]:
                raise self.refuse(f"expected the same columns in all files, but {one.name} has others.")
        self._choose(columns[0][0], arguments)

    def _opened(self, path: Path) -> pq.ParquetFile:
        path.stat()  # raises FileNotFoundError, which names it
        try:
            return self._parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            why = f"damaged or open still ({error})"
            raise self.refuse(f"{path.name}: expected a whole Parquet file, {why}.") from error

    def pieces(self, row: int) -> Iterator[of.Columns]:
        for path, rows in zip(self._tables, self._rows, strict=True):
            if row < rows:
                with self._opened(path) as file:
                    sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
                    first = int(np.searchsorted(np.cumsum(sizes), row, side="right"))
                    skipped, groups = row - sum(sizes[:first]), [*range(first, len(sizes))]
                    for batch in self._batches(file, groups, path):
                        if skipped < len(batch):
                            yield self._columns(batch.slice(skipped))
                        skipped = max(0, skipped - len(batch))
            row = max(0, row - rows)

    def _batches(self, file: pq.ParquetFile, groups: list[int], path: Path) -> Iterator[pa.RecordBatch]:
        with words.raise_as(self.refuse, f"{path.name}: expected a whole Parquet file, got a damaged one", OSError):
            yield from file.iter_batches(self._piece, row_groups=groups, columns=[*self._new], use_threads=False)


def from_parquet(path: StrPath, directory: StrPath, **more: Unpack[of.ImportArguments]) -> of.DataSet:
    """Write the steps of Parquet files to a store in a directory, and open it read-only.

    A row of the files is a step, a column a field: numbers, or lists of one length. A column ``next.reward`` is the field ``("next",
    "reward")``. Files are read in batches of some MB.

    Args:
        path: a file, or a folder of files, which are read in the order of their names.
        directory, rename, end_keys, batch_size, progress, show: as for :func:`from_numpy`.

    Raises:
        DatasetError: a file is damaged or was not closed, a column holds no numbers or empty entries, files have other columns,
            or nothing tells episodes apart. FileNotFoundError.
        ModuleNotFoundError: pyarrow is missing, which ``engram-replay[datasets]`` brings. Others as :func:`from_numpy`.

    >>> import tempfile
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> from engram.datasets import from_parquet
    >>> folder = tempfile.mkdtemp()
    >>> table = pa.table({"obs": [[0.0, 1.0], [2.0, 3.0]], "next.reward": [1.0, 2.0], "episode": [0, 0]})
    >>> pq.write_table(table, folder + "/steps.parquet")
    >>> rb = from_parquet(folder + "/steps.parquet", folder + "/data")
    >>> rb["observation"].shape, rb["episode_return"].tolist()
    (torch.Size([2, 2]), [3.0, 3.0])
    """
    where = checks.check_path("from_parquet: path", path)
    files = sorted(where.rglob("*.parquet")) if where.is_dir() else [where]
    return of.import_source(ParquetRows("from_parquet", where, files, more), directory, more)


class LanceRows(ArrowRows):
    """The rows of the newest version of a Lance data set. Fields of structs are columns of their own."""

    def __init__(self, call: str, path: Path, arguments: of.ImportArguments) -> None:
        lance = of.required("lance", "lance", call)
        if not path.exists():
            raise FileNotFoundError(2, f"{call}: expected the folder of a Lance data set", str(path))
        super().__init__(call, path, [])
        with words.raise_as(self.refuse, "expected a whole Lance data set", (OSError, ValueError)):
            self._dataset = lance.dataset(path)
            self.rows = self._dataset.count_rows()
        files = {one.path for part in self._dataset.get_fragments() for one in part.data_files()}
        self.files = [path / "data" / name for name in sorted(files)]
        self._choose(self._flat(self._dataset.schema.empty_table()).column_names, arguments)

    def identity(self) -> dict[str, object]:
        return {**super().identity(), "version": self._dataset.version}

    def _flat(self, table: pa.Table) -> pa.Table:
        while any(map(self._arrow.types.is_struct, table.schema.types)):
            table = table.flatten()
        return table

    def pieces(self, row: int) -> Iterator[of.Columns]:
        # A scan of all rows would read ahead hundreds of MB.
        for first in range(row, self.rows, self._piece):
            with words.raise_as(
                self.refuse, f"rows from {first} on: expected rows that Lance can read", (OSError, ValueError)
            ):
                table = self._dataset.to_table([*self._new], offset=first, limit=self._piece)
            yield from map(self._columns, table.combine_chunks().to_batches())


def from_lance(path: StrPath, directory: StrPath, **more: Unpack[of.ImportArguments]) -> of.DataSet:
    """Write the steps of a Lance data set to a store in a directory, and open it read-only.

    A row of the newest version is a step, a column a field: numbers, or lists of one length. The field ``reward`` of a struct ``next``
    is the field ``("next", "reward")``. Deleted rows are left out. A data set that got another version is another data set.

    Lance starts threads, and warns of processes that are started by ``fork`` afterwards. Import in a process of its own, or start
    others by ``spawn``.

    Args:
        path: the folder of the data set on this machine.
        directory, rename, end_keys, batch_size, progress, show: as for :func:`from_numpy`.

    Raises:
        DatasetError: the data set is damaged, a column holds no numbers or empty entries, or nothing tells episodes apart.
            FileNotFoundError.
        ModuleNotFoundError: pylance is missing, which ``engram-replay[lance]`` brings. Others as :func:`from_numpy`.

    >>> import tempfile
    >>> import lance, pyarrow as pa
    >>> from engram.datasets import from_lance
    >>> folder = tempfile.mkdtemp()
    >>> steps = {"obs": [[0.0, 1.0], [2.0, 3.0]], "next": [{"reward": 1.0}, {"reward": 2.0}], "episode": [0, 0]}
    >>> _ = lance.write_dataset(pa.table(steps), folder + "/steps.lance")
    >>> rb = from_lance(folder + "/steps.lance", folder + "/data")
    >>> rb["observation"].shape, rb["episode_return"].tolist()
    (torch.Size([2, 2]), [3.0, 3.0])
    """
    return of.import_source(LanceRows("from_lance", checks.check_path("from_lance: path", path), more), directory, more)


def to_parquet(directory: StrPath, path: StrPath, *, compression: str = "zstd", final: str = "refuse") -> None:
    """Write the steps of a store to a Parquet file, a row each.

    Episodes follow each other, lane after lane and oldest first. The field ``("next", "reward")`` is the column ``next.reward``. A field
    of several numbers is a column of lists of fixed size. Next observations are columns where the store has them, or the observations
    after last steps. The file appears when it is whole.

    Args:
        directory: of the store; it is only read.
        path: the file. It must not exist.
        compression: one of Parquet's.
        final: as for :func:`to_hdf5`.

    Raises:
        FileExistsError: the file is there. DatasetError: as :func:`to_hdf5`, or a field is of a dtype that Arrow lacks.
        ModuleNotFoundError: pyarrow is missing, which ``engram-replay[datasets]`` brings.

    >>> import tempfile
    >>> import numpy as np, pyarrow.parquet as pq
    >>> from engram.datasets import from_numpy, to_parquet
    >>> folder = tempfile.mkdtemp()
    >>> from_numpy({"obs": np.arange(4.0), "reward": np.ones(4), "done": np.arange(4) == 3}, folder + "/data").close()
    >>> to_parquet(folder + "/data", folder + "/steps.parquet")
    >>> pq.read_table(folder + "/steps.parquet")["observation"].to_pylist()
    [0.0, 1.0, 2.0, 3.0]
    """
    call = "to_parquet"
    parquet = of.required("pyarrow.parquet", "datasets", call)
    with stored(directory, call) as store, written_whole(path, call) as partial:
        tables = (arrow_table(store.steps(block, final), call) for block in store.blocks(0, 0))
        first = next(tables)
        with parquet.ParquetWriter(partial, first.schema, compression=compression) as writer:
            writer.write_table(first)
            for table in tables:
                writer.write_table(table)


def arrow_table(columns: of.Columns, call: str) -> pa.Table:
    """Columns as a table of Arrow's, with dots in their names. Raises ``DatasetError``: it lacks a dtype."""
    arrow = of.required("pyarrow", "datasets", call)
    found = {}
    for name, column in zip(distinct([*map(".".join, columns)], call), columns.values(), strict=True):
        try:
            values = arrow.array(np.ascontiguousarray(column).reshape(-1))
        except (ValueError, NotImplementedError) as error:
            raise DatasetError(f"{call}: {name!r}: expected a dtype of Arrow's, got {column.dtype}.") from error
        for size in reversed(column.shape[1:]):
            values = arrow.FixedSizeListArray.from_arrays(values, size)
        found[name] = values
    return arrow.table(found)


# ---- Stable-Baselines3 --------------------------------------------------------------------------------------------------

_OF_SB3 = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
#: What a pickle of arrays calls: containers, and the parts of NumPy that put arrays together.
_CALLED = {("collections", "OrderedDict"), ("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"numpy.{core}.{module}", name)
    for core in ("core", "_core")
    for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
}


class _Record:
    """Stands for an object of any other class. None of its code runs."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        vars(self).update(state if isinstance(state, Mapping) else {})

    def __setitem__(self, key: object, value: object) -> None: ...


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        return super().find_class(module, name) if (module, name) in _CALLED else _Record


class _Envs(Arrays):
    """Arrays ``[T, environments, …]``: the steps of one environment after the other, oldest first."""

    def __init__(self, call: str, where: str, buffer: Mapping[str, object], arguments: of.ImportArguments) -> None:
        given = {key: buffer[key] for key in _OF_SB3 if buffer.get(key) is not None}
        found = {key: np.asarray(leaf) for key, leaf in of.flat_names(given)}
        shape: tuple[int, ...] = found.get(("rewards",), np.zeros(0)).shape
        wrong = {field_paths.public(key): leaf.shape for key, leaf in found.items() if leaf.shape[:2] != shape}
        if len(shape) != 2 or ("dones",) not in found or wrong:
            raise DatasetError(f"{call}: {where}: expected arrays [steps, environments, …], got {wrong or [*buffer]}.")
        steps, self._envs = shape
        pos, full = int(str(buffer.get("pos", 0))), bool(buffer.get("full", "pos" not in buffer))
        order = (np.arange(steps) + pos) % steps if full else np.arange(pos)
        # Without next observations, the newest of them has taken the place of the oldest observation.
        self._order = order[bool(buffer.get("full")) and "next_observations" not in given :]
        of.Table.__init__(self, call, where)
        dones = self.is_set(("dones",), found.pop(("dones",)))
        timeouts = self.is_set(("timeouts",), found.pop(("timeouts",), np.zeros_like(dones)))
        found |= {("terminals",): dones & ~timeouts, ("timeouts",): dones & timeouts}
        super().__init__(call, where, found, arguments)
        self.rows = len(self._order) * self._envs

    def identity(self) -> dict[str, object]:
        return {**super().identity(), "order": [self.rows, *map(int, self._order[:1])]}

    def parts(self, row: int) -> Iterator[Iterator[of.Columns]]:
        env, steps = divmod(row, max(1, len(self._order)))
        for one in range(env, self._envs):
            yield self._steps(one, steps if one == env else 0)

    def _steps(self, env: int, first: int) -> Iterator[of.Columns]:
        for start in range(first, len(self._order), self._piece):
            rows = self._order[start : start + self._piece]
            yield {path: column[rows, env] for path, column in self._columns.items()}


def from_sb3(source: object, directory: StrPath, **more: Unpack[of.ImportArguments]) -> of.DataSet:
    """Write a replay buffer of Stable-Baselines3 to a store in a directory, and open it read-only.

    The steps of one environment follow those of another. A done that is a timeout becomes ``("next", "truncated")``, another one
    ``("next", "terminated")``. A buffer with ``optimize_memory_usage`` has no next observations; they are read from the following rows.
    A pickle has to fit into memory. Of it, arrays and numbers alone are read: no code in it runs, and Stable-Baselines3 is not needed.

    Args:
        source: a file of ``model.save_replay_buffer``, a ``ReplayBuffer``, or a dict of its arrays, ``[steps, environments, …]``.
        directory, rename, batch_size, progress, show: as for :func:`from_numpy`.

    Raises:
        DatasetError: the file is damaged, or holds something else. FileNotFoundError. Others as :func:`from_numpy`.

    >>> import tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_sb3
    >>> column = np.arange(4.0).reshape(4, 1)
    >>> arrays = {"observations": column, "next_observations": column + 1, "actions": column, "rewards": column, "dones": column == 1}
    >>> rb = from_sb3(arrays, tempfile.mkdtemp() + "/data")
    >>> rb["collector", "traj_ids"].tolist(), rb["next", "observation"].tolist()
    ([0, 0, 1, 1], [1.0, 2.0, 3.0, 4.0])
    """
    call, where = "from_sb3", "buffer"
    if isinstance(source, str | Path):
        path = checks.check_path(f"{call}: source", source)
        where = str(path)
        try:
            source = _Reader(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise DatasetError(f"{call}: {where}: expected a whole pickle of a ReplayBuffer ({error}).") from error
    entries = source if isinstance(source, Mapping) else vars(source) if "__dict__" in dir(source) else {}
    return of.import_source(_Envs(call, where, entries, more), directory, more)
