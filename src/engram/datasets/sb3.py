"""Replay buffers of Stable-Baselines3: the pickles of ``save_replay_buffer``, and their arrays."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from engram._support.checks import check_path
from engram._support.field_paths import public
from engram.datasets.arrays import Arrays
from engram.datasets.blocks import Rename, file_identity, flat_names
from engram.datasets.importing import ImportArguments, import_source
from engram.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.datasets.blocks import Columns

_KEPT = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
#: What a pickle of arrays calls: the parts of NumPy that put arrays together, and containers.
_CALLED = {
    ("collections", "OrderedDict"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


class _Record:
    """Stands for an object of any other class. None of its code runs."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            vars(self).update(state)

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) in _CALLED else _Record


class _Envs(Arrays):
    """Arrays ``[T, environments, …]``: the steps of one environment after the other, oldest first."""

    def __init__(
        self, call: str, where: str, buffer: Mapping[str, Any], rename: Rename | None, path: Path | None
    ) -> None:
        self._path = path
        parts = {key: buffer[key] for key in _KEPT if buffer.get(key) is not None}
        if missing := sorted({"observations", "actions", "rewards", "dones"} - parts.keys()):
            raise DatasetError(
                f"{call}: {where}: expected a replay buffer of Stable-Baselines3, but {missing} are missing."
            )
        found = {key: np.asarray(leaf) for key, leaf in flat_names(parts, call)}
        size, pos = len(found["rewards",]), int(buffer.get("pos", 0))
        if not (0 <= pos <= size) or found["rewards",].ndim != 2:
            raise DatasetError(
                f"{call}: {where}: expected rewards [steps, environments] and a position in them, got {pos} of {size}."
            )
        full = bool(buffer.get("full", False)) or "pos" not in buffer
        self._order = (np.arange(size) + pos % size) % size if full else np.arange(pos)
        self._envs = found["rewards",].shape[1]
        dones = found.pop(("dones",)) != 0
        timeouts = found.pop(("timeouts",), np.zeros_like(dones)) != 0
        found |= {("terminals",): dones & ~timeouts, ("timeouts",): dones & timeouts}
        for key, column in found.items():
            if column.shape[:2] != (size, self._envs):
                raise DatasetError(
                    f"{call}: {where}: {public(key)!r}: expected {size} steps of {self._envs} environments, got {list(column.shape)}."
                )
        super().__init__(call, where, found, rename)
        self.rows = len(self._order) * self._envs

    def identity(self) -> dict[str, object]:
        here: dict[str, object] = {} if self._path is None else file_identity([self._path])
        return {
            **super().identity(),
            **here,
            "order": [len(self._order), int(self._order[0]) if len(self._order) else 0],
        }

    def parts(self, row: int) -> Iterator[Iterator[Columns]]:
        first, steps = divmod(row, max(1, len(self._order)))
        for env in range(first, self._envs):
            yield self._steps(env, steps)
            steps = 0

    def _steps(self, env: int, first: int) -> Iterator[Columns]:
        for start in range(first, len(self._order), self.piece):
            rows = self._order[start : start + self.piece]
            yield {path: column[rows, env] for path, column in self._columns.items()}


def from_sb3(
    source: str | os.PathLike[str] | Mapping[str, object] | object,
    directory: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    **more: Unpack[ImportArguments],
) -> ReplayBuffer[Any]:
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
    call = "from_sb3"
    path = None
    if isinstance(source, str | os.PathLike):
        path = check_path(f"{call}: source", source)
        raw = path.read_bytes()
        try:
            source = _Reader(io.BytesIO(raw)).load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise DatasetError(
                f"{call}: {path}: expected a whole pickle of a replay buffer ({type(error).__name__}: {error})."
            ) from error
    entries = source if isinstance(source, Mapping) else getattr(source, "__dict__", {})
    return import_source(_Envs(call, "arrays" if path is None else str(path), entries, rename, path), directory, more)
