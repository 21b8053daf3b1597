"""What a data set is while it is copied: blocks of whole episodes, the names of their fields, and where episodes begin."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from engram._support.field_paths import FieldPath, checked_path, public
from engram._support.words import count
from engram.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.generic]
    Columns: TypeAlias = dict[FieldPath, Array]

#: New names of a data set's fields, by their old ones. None: the field is left out.
Rename: TypeAlias = "Mapping[str | tuple[str, ...], str | tuple[str, ...] | None]"

TRAJECTORY: FieldPath = ("collector", "traj_ids")
REWARD: FieldPath = ("next", "reward")
FLAGS: tuple[FieldPath, ...] = (("next", "terminated"), ("next", "truncated"), ("next", "done"))
#: What the first part of a name becomes, unless a ``rename`` says otherwise: the names of D4RL, Minari, SB3 and RLlib.
USUAL: dict[str, FieldPath] = {
    **dict.fromkeys(("observations", "obs"), ("observation",)),
    **dict.fromkeys(("next_observations", "next_obs", "new_obs"), ("next", "observation")),
    "actions": ("action",),
    **dict.fromkeys(("rewards", "reward"), REWARD),
    **dict.fromkeys(("terminals", "terminations", "terminateds", "terminated"), FLAGS[0]),
    **dict.fromkeys(("timeouts", "truncations", "truncateds", "truncated"), FLAGS[1]),
    **dict.fromkeys(("dones", "done"), FLAGS[2]),
    **dict.fromkeys(("episode", "episode_index", "episode_id", "eps_id", "traj_ids"), TRAJECTORY),
}
#: Bytes of the rows that are read at a time.
BLOCK_BYTES = 8 << 20


class Block(NamedTuple):
    """Whole episodes, one after the other."""

    columns: Columns
    """``[rows, …]`` each."""
    lengths: NDArray[np.int64]
    """Rows of each episode: int64."""
    finals: Columns
    """``[episodes, …]`` each: the observations after the last steps. Empty: the data set has none."""

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())


class Source(ABC):
    """A data set that is read."""

    #: Names in it, and what they become. None: left out.
    names: dict[FieldPath, FieldPath | None]
    rows: int
    #: Episodes, and what observations are kept of their ends; 0: none are.
    finals: int = 0

    def __init__(self, call: str, where: str) -> None:
        self.call, self.where = call, where

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """What tells it from other data sets, and from itself after a change: JSON values."""

    @abstractmethod
    def blocks(self, row: int, episode: int) -> Iterator[Block]:
        """Its episodes from one on, which begins at a row. Raises ``DatasetError``."""

    def refuse(self, what: str) -> DatasetError:
        return DatasetError(f"{self.call}: {self.where}: {what}")


class Table(Source):
    """A data set of rows in order: an id, or flags of last steps, tell where episodes begin."""

    def __init__(self, call: str, where: str, ends: Sequence[FieldPath] | None = None) -> None:
        super().__init__(call, where)
        #: Fields that are not zero at the last step of an episode, by their new names. None: the usual ones.
        self.ends = ends
        #: The field that numbers episodes; None: there is none. Whether its numbers must not become smaller.
        self.id: FieldPath | None = TRAJECTORY
        self.sorted = True

    @abstractmethod
    def parts(self, row: int) -> Iterator[Iterable[Columns]]:
        """Its rows from one on, by their new names: pieces of them, in order. No episode goes on from one part to the next."""

    def blocks(self, row: int, episode: int) -> Iterator[Block]:  # noqa: ARG002 - it is known by its row
        seen = row
        for part in self.parts(row):
            for block in self._split(part):
                seen += int(block.lengths.sum())
                yield block
        if seen < self.rows:
            raise self.refuse(f"expected {count(self.rows, 'row')}, but it ends after {seen}. It was truncated.")

    def _split(self, chunks: Iterable[Columns]) -> Iterator[Block]:
        begun: list[Columns] = []  # pieces of an episode of which more rows may follow
        for chunk in chunks:
            rows = self._checked_rows(chunk)
            first = np.flatnonzero(self._begins(begun[-1] if begun else None, chunk))
            if begun and len(first):
                yield self._one([*begun, _slice(chunk, 0, int(first[0]))])
                begun = []
            if len(first) > 1:
                yield Block(_slice(chunk, int(first[0]), int(first[-1])), np.diff(first), {})
            begun.append(_slice(chunk, int(first[-1]) if len(first) else 0, rows))
        if begun:
            yield self._one(begun)

    @staticmethod
    def _one(pieces: list[Columns]) -> Block:
        columns = {path: np.concatenate([piece[path] for piece in pieces]) for path in pieces[0]}
        return Block(columns, np.array([len(next(iter(columns.values())))]), {})

    def _checked_rows(self, chunk: Columns) -> int:
        rows = {path: len(column) for path, column in chunk.items()}
        if len(set(rows.values())) != 1:
            said = ", ".join(f"{public(path)!r} has {n}" for path, n in rows.items())
            raise self.refuse(f"expected as many rows in all fields, but {said}.")
        return next(iter(rows.values()))

    def _begins(self, before: Columns | None, chunk: Columns) -> NDArray[np.bool_]:
        """Whether each row is the first one of an episode. ``before``: the rows before, without a break."""
        ids = None if self.id is None else chunk.get(self.id)
        flags = [key for key in (FLAGS if self.ends is None else self.ends) if key in chunk]
        if ids is None and not flags:
            named = [public(key) for key in (self.ends or FLAGS)]
            raise self.refuse(
                f"expected the number of the episode, {public(TRAJECTORY)!r}, or one of the end flags {named}, got "
                f"{[*map(public, chunk)]}. Name it with rename= or end_keys=."
            )
        ended = np.zeros(len(next(iter(chunk.values()))), bool)
        for key in flags:
            ended |= _any(chunk[key])
        begins = np.roll(ended, 1)
        begins[0] = before is None or any(_any(before[key][-1:])[0] for key in flags)
        if ids is not None:
            ids = ids.reshape(len(ids)).astype(np.int64)
            last = ids[:1] if before is None or self.id is None else before[self.id].reshape(-1)[-1:]
            steps = np.diff(ids, prepend=last.astype(np.int64))
            if self.sorted and (steps < 0).any():
                at = int(np.flatnonzero(steps < 0)[0])
                raise self.refuse(
                    f"expected episodes one after the other, but rows of episode {ids[at]} come after rows of episode "
                    f"{ids[at] - steps[at]}. Sort the rows by episode and step."
                )
            begins |= steps != 0
        return begins

    def end_paths(self, end_keys: object) -> list[FieldPath] | None:
        """The new names of the flags that a user named by their old ones. Raises ``DatasetError``: it has no such field."""
        if end_keys is None:
            return None
        if not isinstance(end_keys, list | tuple):
            raise TypeError(f"{self.call}: end_keys: expected a list of names, got {end_keys!r}.")
        keys = [checked_path(key, f"{self.call}: end_keys") for key in end_keys]
        keys = [key for key in keys if key != ("timeouts",) or key in self.names]  # older files of D4RL have none
        for key in keys:
            if self.names.get(key) is None:
                raise self.refuse(
                    f"end_keys: expected fields of it, {[*map(public, self.names)]}, got {public(key)!r}."
                )
        return [path for key in keys if (path := self.names[key]) is not None]


def _slice(columns: Columns, start: int, stop: int) -> Columns:
    return {path: column[start:stop] for path, column in columns.items()}


def _any(flag: Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (flag != 0).reshape(len(flag), -1).any(1)
    return found


def new_names(
    call: str, found: Iterable[FieldPath], rename: Rename | None, usual: Mapping[str, FieldPath] = USUAL
) -> dict[FieldPath, FieldPath | None]:
    """What the fields of a data set become.

    A name that stands for a group of fields, such as ``"infos"``, names all of them.

    Raises:
        TypeError: ``rename`` is no mapping of names. DatasetError: it names no field, or two fields become one.
    """
    found = list(found)
    if not isinstance(rename, Mapping | None):
        raise TypeError(f"{call}: rename: expected a mapping of names, got {type(rename).__name__}.")
    given: dict[FieldPath, FieldPath | None] = {}
    for old, new in (rename or {}).items():
        path = checked_path(old, f"{call}: rename")
        given[path] = None if new is None else checked_path(new, f"{call}: rename")
        if not any(field[: len(path)] == path for field in found):
            fields = [*map(public, found)]
            raise DatasetError(f"{call}: rename: expected fields of the data set, {fields}, got {public(path)!r}.")
    names: dict[FieldPath, FieldPath | None] = {}
    for field in found:
        group = next((field[:n] for n in range(len(field), 0, -1) if field[:n] in given), None)
        if group is None:
            names[field] = (*usual.get(field[0], field[:1]), *field[1:])
        else:
            new_path = given[group]
            names[field] = None if new_path is None else (*new_path, *field[len(group) :])
    kept = [path for path in names.values() if path is not None]
    for path in kept:
        if kept.count(path) > 1:
            old_ones = [public(field) for field, new in names.items() if new == path]
            raise DatasetError(
                f"{call}: expected a name for each field, but {old_ones} become {public(path)!r}. Use rename=."
            )
    return names


def required(module: str, extra: str, call: str) -> Any:
    """A module of an extra. Raises ``ModuleNotFoundError``: it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{call}: needs {error.name}: pip install "engram-replay[{extra}]".', name=error.name
        ) from error


def file_identity(paths: Sequence[Path]) -> dict[str, object]:
    """Which files, and whether they have changed: their place, size and time."""
    status = [path.stat() for path in paths]
    sizes = [[path.name, one.st_size, one.st_mtime_ns] for path, one in zip(paths, status, strict=True)]
    return {"source": str(paths[0].resolve().parent), "files": xxhash.xxh3_128_hexdigest(json.dumps(sizes).encode())}


def shown_names(names: dict[FieldPath, FieldPath | None]) -> list[list[object]]:
    """Names as JSON values."""
    return [[list(old), None if new is None else list(new)] for old, new in names.items()]


def flat_names(data: Mapping[str, object], call: str) -> Iterator[tuple[FieldPath, object]]:
    """The leaves of nested mappings, by path."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from (((str(key), *path), leaf) for path, leaf in flat_names(value, call))
        else:
            yield (str(key),), value


def nested(columns: Mapping[FieldPath, object]) -> dict[str, object]:
    """Columns by path as nested dicts."""
    found: dict[str, object] = {}
    for path, column in columns.items():
        at = found
        for part in path[:-1]:
            at = at.setdefault(part, {})  # type: ignore[assignment] # a dict, as no field is a group
        at[path[-1]] = column
    return found
