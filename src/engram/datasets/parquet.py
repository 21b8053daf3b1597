"""Parquet files, and other tables of Arrow's, whose rows are steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from engram._support.checks import check_path
from engram.datasets.blocks import BLOCK_BYTES, Rename, Table, file_identity, new_names, required, shown_names
from engram.datasets.episodes import stored, written_whole
from engram.datasets.importing import ImportArguments, import_source
from engram.errors import DatasetError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.datasets.blocks import Array, Columns


class ArrowTable(Table):
    """Batches of Arrow's, by the names of their columns, in which dots part the names of groups."""

    def named(self, schema: Any, rename: Rename | None, end_keys: object = None) -> None:
        self._old = {tuple(name.split(".")): name for name in schema.names}
        self.names = new_names(self.call, self._old, rename)
        self.ends = self.end_paths(end_keys)
        #: Columns that are read, by their old names.
        self.columns = {self._old[old]: new for old, new in self.names.items() if new is not None}
        for name in self.columns:
            self._check(name, schema.field(name).type)
        self.piece = 1024

    def _check(self, name: str, kind: Any) -> None:
        types = required("pyarrow", "datasets", self.call).types
        inner = kind.storage_type if hasattr(kind, "storage_type") else kind
        while types.is_fixed_size_list(inner) or types.is_list(inner) or types.is_large_list(inner):
            inner = inner.value_type
        if not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
            raise self.refuse(
                f"column {name!r}: expected numbers, or lists of them, got {kind}. Leave it out: rename={{{name!r}: None}}."
            )

    def arrays(self, batch: Any) -> Columns:
        return {new: self._array(name, batch.column(name)) for name, new in self.columns.items()}

    def _array(self, name: str, column: Any) -> Array:
        """A column as an array, ``[rows, …]``. Raises ``DatasetError``: an entry is missing, or lists differ in length."""
        types = required("pyarrow", "datasets", self.call).types
        column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        column = column.storage if hasattr(column, "storage") else column
        shape = [len(column)]
        while True:
            if column.null_count:
                raise self.refuse(
                    f"column {name!r}: expected a value in every row, got {column.null_count} empty ones."
                )
            if types.is_fixed_size_list(column.type):
                shape.append(column.type.list_size)
            elif types.is_list(column.type) or types.is_large_list(column.type):
                lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
                if len(lengths) > 1:
                    raise self.refuse(
                        f"column {name!r}: expected lists of one length, got {lengths[0]} to {lengths[-1]}."
                    )
                shape.append(int(lengths[0]) if len(lengths) else 0)
            else:
                break
            column = column.flatten()
        values: Array = column.to_numpy(zero_copy_only=False).reshape(shape)
        return values


class _Files(ArrowTable):
    """The rows of Parquet files, one file after the other."""

    def __init__(self, call: str, paths: Sequence[Path], rename: Rename | None, end_keys: object = None) -> None:
        super().__init__(call, str(paths[0]))
        self._paths = paths
        self._parquet = required("pyarrow.parquet", "datasets", call)
        found = [self._opened(path) for path in paths]
        self._rows = [file.metadata.num_rows for file in found]
        self.rows = sum(self._rows)
        schema = found[0].schema_arrow
        for path, file in zip(paths, found, strict=True):
            if file.schema_arrow.names != schema.names or file.schema_arrow.types != schema.types:
                raise self.refuse(f"expected the same columns in all files, but {path.name} has others.")
            nbytes = sum(
                file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)
            )
            file.close()
        self.named(schema, rename, end_keys)
        self.piece = min(1 << 16, max(1, BLOCK_BYTES * max(1, self._rows[-1]) // max(1, nbytes)))

    def _opened(self, path: Path) -> Any:
        path.stat()  # raises FileNotFoundError, which names it
        try:
            return self._parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # ArrowInvalid is one
            raise self.refuse(
                f"{path.name}: expected a whole Parquet file, got one that is damaged or open still ({error})."
            ) from error

    def identity(self) -> dict[str, object]:
        return {**file_identity(self._paths), "names": shown_names(self.names)}

    def parts(self, row: int) -> Iterator[Iterable[Columns]]:
        yield self._pieces(row)

    def _pieces(self, row: int) -> Iterator[Columns]:
        for path, rows in zip(self._paths, self._rows, strict=True):
            if row >= rows:
                row -= rows
                continue
            with self._opened(path) as file:
                groups = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
                first = 0
                while row >= groups[first]:
                    row, first = row - groups[first], first + 1
                yield from self._batches(file, range(first, len(groups)), row)
            row = 0

    def _batches(self, file: Any, groups: range, skipped: int) -> Iterator[Columns]:
        names = [*self.columns]
        try:
            for batch in file.iter_batches(self.piece, row_groups=[*groups], columns=names, use_threads=False):
                if skipped < len(batch):
                    yield self.arrays(batch.slice(skipped))
                skipped = max(0, skipped - len(batch))
        except OSError as error:
            raise self.refuse(f"expected a whole Parquet file, got one that is damaged ({error}).") from error


def parquet_files(path: Path, call: str) -> list[Path]:
    """A file, or the files of a folder and of those in it, by name. Raises ``DatasetError``: there are none."""
    found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not found:
        raise DatasetError(f"{call}: {path}: expected Parquet files, got none.")
    return found


def from_parquet(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    end_keys: Sequence[str | tuple[str, ...]] | None = None,
    **more: Unpack[ImportArguments],
) -> ReplayBuffer[Any]:
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
    call = "from_parquet"
    files = parquet_files(check_path(f"{call}: path", path), call)
    return import_source(_Files(call, files, rename, end_keys), directory, more)


def to_parquet(directory: str | os.PathLike[str], path: str | os.PathLike[str], *, compression: str = "zstd") -> None:
    """Write the steps of a store to a Parquet file, a row each.

    Episodes follow each other, lane after lane and oldest first. The field ``("next", "reward")`` is the column ``next.reward``. A field
    of several numbers is a column of lists of fixed size. The file appears when it is whole.

    Args:
        directory: of the store; it is only read.
        path: the file. It must not exist.
        compression: one of Parquet's.

    Raises:
        FileExistsError: the file is there. DatasetError: nothing tells episodes apart, or a field is of a dtype that Arrow lacks.
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
    parquet = required("pyarrow.parquet", "datasets", call)
    with stored(directory, call) as store, written_whole(path, call) as partial:
        writer = None
        try:
            for block in store.blocks(0, 0):
                table = arrow_table({".".join(key): column for key, column in block.columns.items()}, call)
                writer = writer or parquet.ParquetWriter(partial, table.schema, compression=compression)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()


def arrow_table(columns: dict[str, Array], call: str) -> Any:
    """Columns as a table of Arrow's. Raises ``DatasetError``: it lacks a dtype."""
    arrow = required("pyarrow", "datasets", call)
    found = {}
    for name, column in columns.items():
        try:
            values = arrow.array(np.ascontiguousarray(column).reshape(-1))
        except (ValueError, NotImplementedError) as error:
            raise DatasetError(
                f"{call}: field {name!r}: expected a dtype that Arrow has, got {column.dtype}."
            ) from error
        for size in reversed(column.shape[1:]):
            values = arrow.FixedSizeListArray.from_arrays(values, size)
        found[name] = values
    return arrow.table(found)
