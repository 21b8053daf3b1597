"""From a data set to a directory: episodes are written in order, and a note in the directory says how many are whole.

A killed import goes on behind the last episode of the note. What was written after it is written again, to the same rows.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, cast

import msgspec
import numpy as np
import xxhash

from engram._support import checks, mappings, unsupported
from engram._support.field_paths import FieldPath, as_paths, checked_path, nested, public
from engram._support.progress import OnProgress, Work
from engram._support.words import count
from engram.around import FinalObservations, NextFromFollowing
from engram.around.expander import MARK
from engram.buffer.replay_buffer import ReplayBuffer
from engram.errors import CorruptStore, DatasetError, IncompatibleStore
from engram.format import files, layout
from engram.samplers import RandomSampler
from engram.storages import LazyMemmapStorage
from engram.store.lifetime import Hold
from engram.types import StrPath

Array: TypeAlias = np.typing.NDArray[Any]
Columns: TypeAlias = dict[FieldPath, Array]
Names: TypeAlias = dict[FieldPath, FieldPath | None]
Usual: TypeAlias = Mapping[str, FieldPath | None]
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
    lengths: np.typing.NDArray[np.int64]
    #: ``[episodes, …]`` each: the observations after the last steps. Empty: the data set has none.
    finals: Columns
    #: Of which episodes; in place of the others are those of the last steps. None: of all.
    known: Array | None = None

    def episodes(self) -> Iterator[Columns]:
        """The columns of each episode."""
        for end, length in zip(np.cumsum(self.lengths), self.lengths, strict=True):
            yield _slice(self.columns, end - length, end)


class Source(ABC):
    """A data set that is read."""

    #: Names in it, and what they become. None: left out.
    names: Names
    rows: int
    #: How many observations after last steps there are: as many as episodes, or 0.
    finals: int = 0
    files: Sequence[Path] = ()
    #: What the note keeps of it besides rows: JSON values, such as the names of tasks.
    about: Mapping[str, object] = {}

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

    def _begins(self, before: Columns | None, chunk: Columns) -> np.typing.NDArray[np.bool_]:
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

    def _whole(self, ids: Array) -> np.typing.NDArray[np.int64]:
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
    with unsupported.needs(call, extra):
        return importlib.import_module(module)


def flat_names(data: Mapping[str, object]) -> Iterator[tuple[FieldPath, object]]:
    """The leaves of nested mappings and tuples, by path."""
    for key, value in data.items():
        inner = dict(enumerate(value)) if isinstance(value, tuple) else value
        if isinstance(inner, Mapping):
            yield from (((str(key), *path), leaf) for path, leaf in flat_names(inner))
        else:
            yield (str(key),), value


#: In the directory of the store: the note, the folder of observations after last steps, and a file that an import locks.
NOTE, FINALS, LOCK = "import.json", "finals", "import.lock"
RETURN: FieldPath = ("episode_return",)
#: Written bytes after which the pages of the tickets are given back.
_FORGET_BYTES = 32 << 20
_log = logging.getLogger("engram")


class Note(msgspec.Struct):
    """What ``import.json`` says."""

    source: dict[str, object]
    rows: int = 0
    episodes: int = 0
    returns: float = 0.0  # their sum
    complete: bool = False
    about: dict[str, object] = {}
    version: Literal[1] = 1

    @classmethod
    def read(cls, folder: Path, source: Source) -> Note | None:
        """None: there is none. Raises ``CorruptStore``: it cannot be read. ``IncompatibleStore``: it is of another data set."""
        try:
            note = msgspec.json.decode((folder / NOTE).read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise CorruptStore(f"{folder / NOTE}: expected the note of an import ({error}).") from error
        asked = _identity(source)
        if differs := [key for key in asked if asked[key] != note.source.get(key)]:
            raise IncompatibleStore(
                f"{source.call}: {str(folder)!r} holds an import of another data set, or of one that has changed since: "
                f"{differs} differ. Use another directory, or remove this one."
            )
        return note

    def write(self, folder: Path) -> None:
        raw = msgspec.json.encode(self)
        files.overwrite(folder / NOTE, raw.ljust(-(-len(raw) // 512) * 512))  # the next one then fits in its place


def import_source(source: Source, directory: StrPath, arguments: ImportArguments) -> DataSet:
    """Import a data set, or the rest of it, and open the store read-only.

    Raises:
        DatasetError: the data set cannot be read or stored. What was whole stays, and the same call goes on with it.
        IncompatibleStore: the directory holds another import. FileExistsError: it holds something else.
        StoreInUse: another process imports into it.
    """
    folder = checks.check_path(f"{source.call}: directory", directory)
    if source.rows < 1:
        raise source.refuse("expected at least one row, got none.")
    note = Note.read(folder, source)
    if note is None or not note.complete:
        fresh = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with Hold(folder / LOCK, source.call, folder).fd:
            _import_rest(source, folder, arguments, fresh=fresh)
            (folder / LOCK).unlink()
    return ReplayBuffer.open(folder, readonly=True, batch_size=arguments.get("batch_size", 256))


def _import_rest(source: Source, folder: Path, arguments: ImportArguments, *, fresh: bool) -> None:
    note = Note.read(folder, source)  # another process may have been faster
    if note is None and [*folder.iterdir()] != [folder / LOCK]:
        (folder / LOCK).unlink()
        raise FileExistsError(17, f"{source.call}: expected a new directory, or an import's, got files", str(folder))
    note = note or Note(_identity(source), about=dict(source.about))
    try:
        note.write(folder)
        if not note.complete:
            _Import(source, folder, note, arguments).run()
    except BaseException:
        if not note.rows and not layout.is_store(folder):  # nothing of it is there
            for name in (NOTE, LOCK):
                (folder / name).unlink()
            if fresh:
                folder.rmdir()
        raise


def _identity(source: Source) -> dict[str, object]:
    return cast("dict[str, object]", json.loads(json.dumps({"from": source.call, **source.identity()})))


class _Import:
    """One import, from its note to the end."""

    def __init__(self, source: Source, folder: Path, note: Note, arguments: ImportArguments) -> None:
        self._source, self._folder, self._note, self._arguments = source, folder, note, arguments
        self._show = arguments.get("show") or _log.info
        #: What the tags of final observations count from.
        self._first_tag = xxhash.xxh3_64_intdigest(msgspec.json.encode(note.source, order="deterministic")) >> 2
        self._buffer: DataSet | None = None
        self._finals: DataSet | None = None
        self._unforgotten = 0

    def run(self) -> None:
        note, source = self._note, self._source
        try:
            with Work("importing", source.rows, self._arguments.get("progress"), "rows") as work:
                work(note.rows)
                for block in source.blocks(note.rows, note.episodes):
                    self._write(block)
                    work.reach(note.rows)
            if note.rows != source.rows:
                raise source.refuse(f"expected {count(source.rows, 'row')}, got {note.rows}: steps of it are missing.")
            note.complete = True
            note.write(self._folder)
            mean = f"mean return {note.returns / note.episodes:.6g}"
            self._show(f"{self._folder}: {count(note.episodes, 'episode')} of {count(note.rows, 'row')}, {mean}")
        finally:
            for opened in (self._buffer, self._finals):
                if opened is not None:
                    opened.close()

    def _write(self, block: Block) -> None:
        """Write whole episodes, then note them."""
        note, lengths = self._note, block.lengths
        rows, episodes = int(lengths.sum()), len(lengths)
        if note.rows + rows > self._source.rows:
            raise self._source.refuse(f"expected {count(self._source.rows, 'row')}, got more.")
        columns = {path: self._storable(path, column) for path, column in block.columns.items()}
        numbers = np.arange(note.episodes, note.episodes + episodes)
        columns.setdefault(TRAJECTORY, np.repeat(numbers, lengths))
        returns = self._returns(columns, lengths[lengths > 0])
        finals: Columns = {(".".join(path),): self._storable(path, column) for path, column in block.finals.items()}
        if finals:
            finals["tag",] = tags = self._first_tag + numbers
            columns[MARK] = mark = np.full((rows, 2), -1)
            mark[np.cumsum(lengths)[lengths > 0] - 1] = np.stack([numbers, tags], 1)[lengths > 0]
        buffer = self._buffer or self._open(columns, [*block.finals])
        if self._finals is not None:
            self._put(self._finals, note.episodes, finals)
        self._put(buffer, note.rows, columns)
        note.rows, note.episodes, note.returns = note.rows + rows, note.episodes + episodes, note.returns + returns
        note.write(self._folder)

    def _storable(self, path: FieldPath, column: Array) -> Array:
        """A column as a store takes it: in the byte order of this machine. Raises ``DatasetError``: it holds no numbers."""
        if column.dtype.kind not in "biufc" or column.dtype.char in "gG":
            expected = f"field {public(path)!r}: expected numbers, got {column.dtype}"
            raise self._source.refuse(f"{expected}. Leave it out: rename={{name: None}}.")
        if path == TRAJECTORY:
            return column.reshape(len(column)).astype(np.int64)
        return column if column.dtype.isnative else column.astype(column.dtype.newbyteorder("="))

    @staticmethod
    def _returns(columns: Columns, lengths: Array) -> float:
        """Add a field that says at each step what the rewards of its episode sum up to. The sum of all of them."""
        reward = columns.get(REWARD)
        if reward is None or reward.size != len(reward) or reward.dtype.kind == "c":  # no single numbers
            return 0.0
        sums = np.add.reduceat(reward.reshape(-1).astype(np.float64), np.cumsum(lengths) - lengths)
        columns.setdefault(RETURN, np.repeat(sums.astype(np.float32), lengths))
        return float(sums.sum())

    def _open(self, columns: Columns, finals: list[FieldPath]) -> DataSet:
        """The store, made for such rows if it is not there. ``finals``: observations that are kept of last steps."""
        source = self._source
        there = [path for path in columns if path[0] == "observation" and ("next", *path) not in columns]
        kept: FinalObservations | list[FieldPath] = there
        if finals:
            kept = FinalObservations(finals, _storage(self._folder / FINALS, source.finals))
            self._finals = ReplayBuffer(storage=kept.storage)
        sampler = NextFromFollowing(RandomSampler(), kept) if finals or there else RandomSampler()
        storage, batch_size = _storage(self._folder, source.rows), self._arguments.get("batch_size", 256)
        self._buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
        for old, new in source.names.items() if not self._note.rows else ():
            kind = "" if new is None else f"{public(new)!r}, {columns[new].dtype}{[*columns[new].shape[1:]]}"
            self._show(f"{public(old)!r}: {kind or 'left out'}")
        return self._buffer

    def _put(self, buffer: DataSet, first: int, columns: Columns) -> None:
        """Write rows from one on. Those that a killed import has written, or has begun, are replaced."""
        storage = cast("LazyMemmapStorage", buffer.storage)
        there, end = storage.extent().size if storage.initialized else 0, first + len(next(iter(columns.values())))
        # Of columns that are read when they are sliced, such as frames, no more than a block is in memory.
        step = max(1, BLOCK_BYTES // max(1, sum(column.nbytes // max(1, len(column)) for column in columns.values())))
        for at in range(first, end, step):
            n, part = min(step, end - at), {path: one[at - first : at - first + step] for path, one in columns.items()}
            again = min(max(there - at, 0), n)
            if again:
                storage.set(range(at, at + again), nested({path: column[:again] for path, column in part.items()}))
            if again < n:
                buffer.extend(nested({path: column[again:] for path, column in part.items()}))
            self._unforgotten += sum(column.nbytes for column in part.values())
            if self._unforgotten > _FORGET_BYTES:
                self._unforgotten = 0
                for tensor in storage.store.control_memory:
                    mappings.advise(tensor.data_ptr(), tensor.nbytes, mmap.MADV_DONTNEED)


def _storage(folder: Path, rows: int) -> LazyMemmapStorage:
    """The store of a folder. Rows go there by writes: a write fills pages of a new file at twice the speed of copies to mapped ones."""
    if layout.is_store(folder):
        return LazyMemmapStorage.open(folder, io="read")
    return LazyMemmapStorage(rows, scratch_dir=folder, existsok=True, io="read")  # a kill may have left files
