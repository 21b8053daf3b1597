"""TorchRL's dumps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from engram._support.checks import check_path
from engram._support.field_paths import FieldPath
from engram.datasets.blocks import (
    BLOCK_BYTES,
    FLAGS,
    REWARD,
    Rename,
    Table,
    file_identity,
    nested,
    new_names,
    shown_names,
)
from engram.datasets.episodes import stored, written_whole
from engram.datasets.importing import ImportArguments, import_source
from engram.store.memory import torch_dtype
from engram.torchrl.dumps import read
from engram.torchrl.items import TorchRLDump

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.datasets.blocks import Columns


class _Dump(Table):
    """The live rows of a dump, oldest first."""

    def __init__(self, call: str, path: Path, rename: Rename | None) -> None:
        super().__init__(call, str(path))
        dump = read(path)
        if not isinstance(dump, TorchRLDump):
            raise self.refuse("expected a dump of rows that are tensors, got one of a list.")
        self._dump, self._path = dump, path
        self.rows = dump.length
        fields = [field for field in dump.fields if field.key != ("index",)]
        self.names = new_names(call, [field.key for field in fields], rename, {})
        self._fields = [(field, new) for field in fields if (new := self.names[field.key]) is not None]
        self.sorted = False
        for field, _ in self._fields:
            if "float8" in field.dtype or field.dtype in ("bfloat16", "complex32"):
                raise self.refuse(f"field {field.name}: expected a dtype that NumPy has, got {field.dtype}.")
        self._piece = max(1, BLOCK_BYTES // max(1, sum(field.row_bytes for field, _ in self._fields)))

    def identity(self) -> dict[str, object]:
        files = sorted(path for path in self._path.rglob("*") if path.is_file())
        return {**file_identity(files), "source": str(self._path.resolve()), "names": shown_names(self.names)}

    def parts(self, row: int) -> Iterator[Iterable[Columns]]:
        yield self._pieces(row)

    def _pieces(self, row: int) -> Iterator[Columns]:
        oldest = self._dump.position % self.rows if self.rows == self._dump.capacity else 0
        while row < self.rows:
            first = (oldest + row) % self.rows
            n = min(self._piece, self.rows - row, self.rows - first)
            piece = {}
            for field, new in self._fields:
                out = torch.empty((n, *field.shape), dtype=torch_dtype(field), device="cpu")
                self._dump.read_rows(field.key, out, first)
                piece[new] = out.numpy()
            yield piece
            row += n


def from_torchrl(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    **more: Unpack[ImportArguments],
) -> ReplayBuffer[Any]:
    """Write the rows of a folder that TorchRL's ``ReplayBuffer.dumps`` wrote to a store in a directory, and open it read-only.

    Fields keep their names. ``ReplayBuffer.loads`` also takes such folders, into a buffer that is written to; an import is for data sets,
    adds the numbers and returns of episodes, and goes on after a kill.

    Args:
        path: the folder.
        directory, rename, batch_size, progress, show: as for :func:`from_numpy`.

    Raises:
        CorruptCheckpoint: a file is damaged. IncompatibleCheckpoint: it is a dump of an ensemble.
        DatasetError: nothing tells episodes apart. Others as :func:`from_numpy`.

    >>> import tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_numpy, from_torchrl, to_torchrl
    >>> folder = tempfile.mkdtemp()
    >>> from_numpy({"obs": np.arange(4.0), "reward": np.ones(4), "done": np.arange(4) == 3}, folder + "/data").close()
    >>> to_torchrl(folder + "/data", folder + "/dump", final="repeat")
    >>> from_torchrl(folder + "/dump", folder + "/again")["next", "observation"].tolist()
    [1.0, 2.0, 3.0, 3.0]
    """
    call = "from_torchrl"
    return import_source(_Dump(call, check_path(f"{call}: path", path), rename), directory, more)


def to_torchrl(directory: str | os.PathLike[str], path: str | os.PathLike[str], *, final: str = "refuse") -> None:
    """Write the rows of a store as a dump that ``loads`` of TorchRL's ``TensorDictReplayBuffer`` reads.

    Rows have TorchRL's form: next observations beside the observations, ``("next", "done")``, and rewards and flags of shape ``[N, 1]``.
    The buffer that reads them has a ``LazyMemmapStorage`` or ``LazyTensorStorage`` of as many rows.

    Args:
        directory: of the store; it is only read.
        path: the folder. It must not exist.
        final: what the observation after the last step is, where none is stored: ``"repeat"``, that of the last step, or ``"refuse"``.

    Raises:
        DatasetError: there is no observation after the last step, or nothing tells episodes apart. FileExistsError: the folder is there.

    >>> import json, tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_numpy, to_torchrl
    >>> folder = tempfile.mkdtemp()
    >>> from_numpy({"obs": np.arange(4.0), "reward": np.ones(4), "done": np.arange(4) == 3}, folder + "/data").close()
    >>> to_torchrl(folder + "/data", folder + "/dump", final="repeat")
    >>> json.load(open(folder + "/dump/storage/storage_metadata.json"))["len"]
    4
    """
    from tensordict import TensorDict

    call = "to_torchrl"
    with stored(directory, call) as store, written_whole(path, call) as partial:
        partial.mkdir()
        rows, at = None, 0
        for block in store.blocks(0, 0):
            columns = dict(block.columns)
            n, last = len(next(iter(columns.values()))), np.cumsum(block.lengths) - 1
            for field in [key for key in columns if key[0] == "observation" and ("next", *key) not in columns]:
                columns["next", *field] = following = np.roll(columns[field], -1, axis=0)
                following[last] = store.after(block, field, final)
            if FLAGS[2] not in columns:
                columns[FLAGS[2]] = _done(columns, n)
            flat: list[FieldPath] = [key for key in (REWARD, *FLAGS) if key in columns and columns[key].ndim == 1]
            columns |= {key: columns[key][:, None] for key in flat}
            data = TensorDict(nested({key: torch.from_numpy(column) for key, column in columns.items()}), [n])
            if rows is None:
                rows = data[:1].expand(store.rows).memmap_like(partial / "storage")
            rows[at : at + n] = data
            at += n
        _describe(partial, store.rows)


def _done(columns: Columns, n: int) -> Any:
    flags = [columns[flag].reshape(n) != 0 for flag in FLAGS[:2] if flag in columns]
    return np.any(flags, axis=0) if flags else np.zeros(n, bool)


def _describe(folder: Path, rows: int) -> None:
    """What stands beside the rows in a dump of TorchRL's."""
    (folder / "writer").mkdir()
    for name, entries in {
        "buffer_metadata.json": {"batch_size": 256, "consume_after_n_samples": None},
        "storage/storage_metadata.json": {"metadata": {}, "is_pytree": False, "len": rows},
        "writer/metadata.json": {"cursor": 0, "write_count": rows},
    }.items():
        (folder / name).write_text(json.dumps(entries))
