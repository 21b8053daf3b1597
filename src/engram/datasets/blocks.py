"""What a data set is while it is copied: blocks of whole episodes, the names of their fields, and where episodes begin."""

from __future__ import annotations

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypedDict, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from engram._support.field_paths import FieldPath, as_paths, checked_path, public
from engram._support.progress import OnProgress
from engram.buffer.replay_buffer import ReplayBuffer
from engram.errors import DatasetError
from engram.types import StrPath

Array: TypeAlias = NDArray[Any]
Columns: TypeAlias = dict[FieldPath, Array]
Names: TypeAlias = dict[FieldPath, FieldPath | None]
Usual: TypeAlias = Mapping[str, FieldPath]
DataSet: TypeAlias = ReplayBuffer[Any]
Key: TypeAlias = str | tuple[str, ...]

TRAJECTORY: FieldPath = ("collector", "traj_ids")
REWARD: FieldPath = ("next", "reward")
TERMINATED, TRUNCATED, DONE = FLAGS = (("next", "terminated"), ("next", "truncated"), ("next", "done"))
#: What the first part of a name becomes, unless a ``rename`` says otherwise: the names of D4RL, Minari, SB3 and RLlib.
USUAL: Usual = {
    **dict.fromkeys(("observations", "obs"), ("observation",)),
    **dict.fromkeys(("next_observations", "next_obs", "new_obs"), ("next", "observation")),
    "actions": ("action",),
    **dict.fromkeys(("rewards", "reward"), REWARD),
    **dict.fromkeys(("terminals", "terminations", "terminateds", "terminated"), TERMINATED),
    **dict.fromkeys(("timeouts", "truncations", "truncateds", "truncated"), TRUNCATED),
    **dict.fromkeys(("dones", "done"), DONE),
    **dict.fromkeys(("episode", "episode_index", "episode_id", "eps_id", "traj_ids"), TRAJECTORY),
}
#: Bytes of the rows that are read at a time.
BLOCK_BYTES = 8 << 20


class ImportArguments(TypedDict, total=False):
    """What imports take: see :func:`engram.datasets.from_numpy`."""

    rename: Mapping[Key, Key | None] | None
    end_keys: Sequence[Key] | None
    batch_size: int | None
    progress: OnProgress | None
    show: Callable[[str], object] | None


class Block(NamedTuple):
    """Whole episodes, one after the other."""

    #: ``[rows, …]`` each; and the rows of each episode.
    columns: Columns
    lengths: NDArray[np.int64]
    #: ``[episodes, …]`` each: the observations after the last steps. Empty: the data set has none.
    finals: Columns
    #: Of which episodes; in place of the others are those of the last steps. None: of all.
    known: Array | None = None


class Source(ABC):
    """A data set that is read."""

    #: Names in it, and what they become. None: left out.
    names: Names
    rows: int
    #: How many observations after last steps there are: as many as episodes, or 0.
    finals: int = 0
    files: Sequence[Path] = ()

    def __init__(self, call: str, where: StrPath) -> None:
        self.call, self.where = call, os.fspath(where)

    def identity(self) -> dict[str, object]:
        """What tells it from other data sets, and from itself after a change: JSON values."""
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        content = xxhash.xxh3_128_hexdigest(json.dumps(files).encode())
        return {"source": self.where, "names": [*self.names.items()], "content": content}

    @abstractmethod
    def blocks(self, row: int, episode: int) -> Iterator[Block]:
        """Its episodes from one on, which begins at a row. Raises ``DatasetError``."""

    def refuse(self, what: str) -> DatasetError:
        return DatasetError(f"{self.call}: {self.where}: {what}")


class Table(Source):
    """A data set of rows in order: an id, or flags of last steps, tell where episodes begin."""

    #: Fields that are not zero at the last step of an episode, the field that numbers episodes, and whether its numbers only grow.
    ends: Sequence[FieldPath] = FLAGS
    id: FieldPath | None = TRAJECTORY
    sorted = True

    def parts(self, row: int) -> Iterator[Iterator[Columns]]:
        """Its rows from one on in parts: no episode goes on from one to the next."""
        yield self.pieces(row)

    def pieces(self, row: int) -> Iterator[Columns]:
        """Its rows from one on, if all of them are one part, by their new names: pieces of them, in order."""
        raise NotImplementedError

    def named(self, found: Iterable[FieldPath], arguments: ImportArguments, usual: Usual = USUAL) -> None:
        """Say what its fields become, and which of them end an episode; flags that it lacks are passed over."""
        self.names = new_names(self.call, [*found], arguments.get("rename"), usual)
        if (ends := as_paths(arguments.get("end_keys"), f"{self.call}: end_keys")) is not None:
            self.ends = [new for key in ends if (new := self.names.get(key)) is not None]

    def blocks(self, row: int, episode: int) -> Iterator[Block]:  # noqa: ARG002 - it is known by its row
        for part in self.parts(row):
            begun: list[Columns] = []  # pieces of an episode of which more rows may follow
            for chunk in part:
                rows = len(next(iter(chunk.values())))
                first = np.flatnonzero(self._begins(begun[-1] if begun else None, chunk)).tolist()
                if begun and first:
                    yield _one([*begun, _slice(chunk, 0, first[0])])
                    begun = []
                if len(first) > 1:
                    yield Block(_slice(chunk, first[0], first[-1]), np.diff(first), {})
                begun.append(_slice(chunk, first[-1] if first else 0, rows))
            if begun:
                yield _one(begun)

    def _begins(self, before: Columns | None, chunk: Columns) -> NDArray[np.bool_]:
        """Whether each row is the first one of an episode. ``before``: the rows before, without a break."""
        ids = None if self.id is None else chunk.get(self.id)
        flags = [key for key in self.ends if key in chunk]
        if ids is None and not flags:
            expected = f"the number of the episode, {TRAJECTORY}, or an end flag, {[*self.ends]}"
            raise self.refuse(f"expected {expected}, got {[*chunk]}. Name it with rename= or end_keys=.")
        ended = np.zeros(len(next(iter(chunk.values()))), bool)
        for key in flags:
            ended |= self.is_set(key, chunk[key]).reshape(len(ended), -1).any(1)
        begins = np.roll(ended, 1)
        begins[0] = before is None or any(self.is_set(key, before[key][-1:]).any() for key in flags)
        if ids is not None and self.id is not None:
            ids = self._whole(ids)
            earlier = np.concatenate([ids[:1] if before is None else self._whole(before[self.id][-1:]), ids[:-1]])
            if self.sorted and (ids < earlier).any():
                late = ids[np.argmax(ids < earlier)]
                raise self.refuse(f"expected sorted rows, but those of episode {late} follow those of a later one.")
            begins |= ids != earlier
        return begins

    def is_set(self, key: FieldPath, flag: Array) -> Array:
        """Where a flag of last steps is not zero. Raises ``DatasetError``: it is NaN somewhere."""
        if flag.dtype.kind in "fc" and np.isnan(flag).any():
            raise self.refuse(f"end flag {public(key)!r}: expected numbers, got NaN. Write 0 or 1 in its place.")
        return np.asarray(flag != 0)

    def _whole(self, ids: Array) -> NDArray[np.int64]:
        """Numbers of episodes, ``[rows]``. Raises ``DatasetError``: they are no such."""
        one = ids.astype(np.float64) if ids.dtype.kind in "bf" else ids
        if one.dtype.kind in "iuf" and ids.size == len(ids) and ((np.rint(one) == one) & (abs(one) < 2**63)).all():
            return one.reshape(len(ids)).astype(np.int64)
        got = f"{ids.dtype}{[*ids.shape[1:]]}, such as {ids[:3].tolist()}"
        raise self.refuse(f"{public(self.id or ())!r}: expected one whole number of int64 in each row, got {got}.")


def _one(pieces: list[Columns]) -> Block:
    columns = {path: np.concatenate([piece[path] for piece in pieces]) for path in pieces[0]}
    return Block(columns, np.array([len(next(iter(columns.values())))]), {})


def _slice(columns: Columns, start: int, stop: int) -> Columns:
    return {path: column[start:stop] for path, column in columns.items()}


def new_names(call: str, found: list[FieldPath], rename: object, usual: Usual = USUAL) -> Names:
    """What the fields of a data set become. A name of a group of fields, such as ``"infos"``, names all of them.

    Raises:
        TypeError: ``rename`` is no mapping of names. DatasetError: it names no field, or two fields become one.
    """
    if not isinstance(rename, Mapping | None):
        raise TypeError(f"{call}: rename: expected a mapping of names, got {type(rename).__name__}.")
    pairs = {checked_path(old, f"{call}: rename"): new for old, new in (rename or {}).items()}
    given = {old: None if new is None else checked_path(new, f"{call}: rename") for old, new in pairs.items()}
    if unknown := [public(old) for old in given if not any(field[: len(old)] == old for field in found)]:
        raise DatasetError(f"{call}: rename: expected fields of the data set, {[*map(public, found)]}, got {unknown}.")
    names: Names = {}
    for field in found:
        n = next((n for n in range(len(field), 0, -1) if field[:n] in given), 0)
        new = given[field[:n]] if n else usual.get(field[0], field[:1])
        names[field] = None if new is None else (*new, *field[n or 1 :])
    kept = [path for path in names.values() if path is not None]
    if twice := {path for path in kept if kept.count(path) > 1}:
        raise DatasetError(f"{call}: expected a name for each field, but several become {twice}. Use rename=.")
    return names


def required(module: str, extra: str, call: str) -> ModuleType:
    """A module of an extra. Raises ``ModuleNotFoundError``: it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        text = f'{call}: needs {error.name}: pip install "engram-replay[{extra}]".'
        raise ModuleNotFoundError(text, name=error.name) from error


def flat_names(data: Mapping[str, object]) -> Iterator[tuple[FieldPath, object]]:
    """The leaves of nested mappings and tuples, by path."""
    for key, value in data.items():
        inner = dict(enumerate(value)) if isinstance(value, tuple) else value
        if isinstance(inner, Mapping):
            yield from (((str(key), *path), leaf) for path, leaf in flat_names(inner))
        else:
            yield (str(key),), value


def nested(columns: Mapping[FieldPath, object]) -> dict[str, object]:
    """Columns by path as nested dicts."""
    found: dict[str, object] = {}
    for path, column in columns.items():
        at = found
        for part in path[:-1]:
            at = cast("dict[str, object]", at.setdefault(part, {}))
        at[path[-1]] = column
    return found
