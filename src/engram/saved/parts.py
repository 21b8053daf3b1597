"""Components and buffers as parts: a folder for each component, whose tensors are arrays, and all else JSON."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar, cast

import numpy as np
import torch

from engram._support.copies import raw_bytes
from engram._support.field_paths import plain
from engram._support.state import Loads, Stateful, check_keys, mapped, prepare_load, saved
from engram.errors import IncompatibleCheckpoint
from engram.format.schema import DTYPES
from engram.saved import checkpoints, disk, documents, part_reader, part_writer
from engram.store.memory import DTYPE_NAMES, DTYPE_OF
from engram.types import Commit, Declared

S_co = TypeVar("S_co", covariant=True)


def write_part(folder: Path, part: str, kind: str, state: dict[str, object]) -> part_writer.PartInfo:
    """Write a state into a new folder.

    Args:
        folder: where; it must not exist.
        part: what the component is to a buffer: ``sampler``, ``writer`` …
        kind: its class.
        state: tensors and plain values.

    Raises:
        TypeError: something else; names the way to it. Nothing that could be taken for a part is left.
        OSError: no space, or an I/O error.
    """
    writer = part_writer.PartWriter(folder, part, kind)
    return writer.finish(described_state(writer, state, part))


class PartSnapshot(Protocol):
    """A component's state at one moment, which later changes do not touch."""

    @property
    def needs_pause(self) -> bool:
        """Whether writers must wait until it is saved."""

    def save(self, folder: Path) -> object:
        """Write it into a new folder, as a part of a dump. Others may be writing. Raises as :meth:`Dumpable.dumps`."""


class Preparation(Protocol[S_co]):
    """The preparation of a snapshot: it gathers what a snapshot needs before writers wait for it."""

    def take(self) -> S_co:
        """The snapshot of this moment. Call it while writers are paused."""


class Unprepared(NamedTuple, Generic[S_co]):
    """The preparation of a snapshot that needs none."""

    take: Callable[[], S_co]


class StateSnapshot(NamedTuple):
    """A state without rows of its own."""

    part: str
    #: The class of the component.
    kind: str
    state: dict[str, object]
    needs_pause: bool = False

    def save(self, folder: Path) -> part_writer.PartInfo:
        return write_part(folder, self.part, self.kind, self.state)


class Dumpable(Stateful):
    """A component that can be saved as a folder of its own."""

    #: What it is to a buffer.
    part: ClassVar[str]

    @property
    def paused(self) -> contextlib.AbstractContextManager[object]:
        """Inside nothing that is saved changes."""
        return contextlib.nullcontext()

    def prepare_snapshot(self) -> Preparation[PartSnapshot]:
        """What takes a snapshot, as fast as can be, while the component is :attr:`paused`. Raises as :meth:`dumps`.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> folder = Path(tempfile.mkdtemp()) / "storage"
        >>> rb, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
        >>> _ = rb.extend(torch.arange(3))
        >>> prepared = rb.storage.prepare_snapshot()
        >>> with rb.storage.paused:
        ...     snapshot = prepared.take()
        >>> _ = rb.extend(torch.arange(2))  # not in it
        >>> _ = snapshot.save(folder)
        >>> other.storage.loads(folder)
        >>> len(other)
        3
        """
        return Unprepared(lambda: StateSnapshot(self.part, type(self).__name__, saved(self, self.part)))

    def prepare_part(self, reader: part_reader.PartReader) -> Commit:
        """Check a part. Raises as :meth:`loads`; nothing is changed."""
        check_kind(reader, self.part, type(self).__name__)
        return prepare_load(self, read_state(reader), self.part)

    def dumps(self, path: str | Path) -> None:
        """Save the state as a folder, which in one step replaces one that was saved there.

        Args:
            path: a free name, an empty folder, or what an earlier call has made.

        Raises:
            FileExistsError: something else lies there.
            TypeError: something that is neither a tensor nor a plain value; names the way to it.
            OSError: no space, or an I/O error. What lay there before still does.
        """
        with checkpoints.replacing(Path(path)) as folder, disk.batched_fsync():
            prepared = self.prepare_snapshot()
            with self.paused:
                snapshot = prepared.take()
                if snapshot.needs_pause:
                    snapshot.save(folder)
            if not snapshot.needs_pause:
                snapshot.save(folder)

    def loads(self, path: str | Path) -> None:
        """Take over what :meth:`dumps` saved.

        Raises:
            CorruptCheckpoint: damaged; names file and byte.
            IncompatibleCheckpoint: of another kind of component. Otherwise as ``load_state_dict``. Nothing is changed.
        """
        with part_reader.PartReader.open(checkpoints.standing(Path(path))) as reader:
            self.prepare_part(reader).commit()

    dump = save = dumps
    load = loads


class SavedPart(NamedTuple):
    """A part that was read, every block of it checked."""

    folder: Path
    part: str
    #: The class that wrote it.
    type: str
    state: dict[str, object]


def check_kind(reader: part_reader.PartReader | SavedPart, part: str, *kinds: str) -> None:
    """Raise ``IncompatibleCheckpoint`` unless that part is one of these kinds."""
    if reader.part != part or reader.type not in kinds:
        raise IncompatibleCheckpoint(
            f"{reader.folder}: expected a {part} of type {' or '.join(kinds)}, as here, got the {reader.part} {reader.type!r:.100}."
        )


def check_blocks(reader: part_reader.PartReader) -> None:
    """Read everything, before anything changes. Raises ``CorruptCheckpoint``: the first block that is not as it was."""
    for problem in reader.damage():
        raise documents.corrupt(*problem)


def described_state(writer: part_writer.PartWriter, state: dict[str, object], where: str) -> dict[str, object]:
    """The state as JSON values, its tensors written as arrays. Raises as :func:`write_part`."""

    def written(value: torch.Tensor) -> dict[str, int]:
        plain = value.detach().resolve_conj().resolve_neg().to("cpu")
        raw = raw_bytes(plain).numpy().data
        return {"$array": writer.array(DTYPE_NAMES[value.dtype], tuple(plain.shape), raw)}

    _check_entries(state, where)
    return cast("dict[str, object]", mapped(_without_tails(state), written, where))


def _without_tails(state: object) -> object:
    """Leaves of priorities without those behind the last row that has one: capacity costs nothing."""
    if not isinstance(state, dict):
        return state
    shorter = {key: _without_tails(value) for key, value in state.items()}
    leaves = shorter.get("leaves")
    if isinstance(leaves, torch.Tensor) and leaves.ndim == 1 and leaves.dtype is torch.float64 and "alpha" in state:
        bits = leaves.view(torch.int64).numpy()  # a priority of zero is -0.0
        used = np.flatnonzero(bits)
        shorter["leaves"] = leaves[: used[-1] + 1 if len(used) else 0]
    return shorter


def _check_entries(state: object, where: str) -> None:
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            if isinstance(key, str) and key.startswith("$"):
                raise TypeError(f"{where}[{key!r}]: expected a key that does not begin with '$'. Rename it.")
            if isinstance(value, dict | list | torch.Tensor):
                _check_entries(value, f"{where}[{key!r}]")
    elif isinstance(state, torch.Tensor) and state.dtype not in DTYPE_NAMES:
        raise TypeError(f"{where}: expected a dense tensor of {', '.join(DTYPES)}, got one of {state.dtype}.")


def read_state(reader: part_reader.PartReader) -> dict[str, object]:
    """The state of a part, every block of it checked.

    Raises:
        CorruptCheckpoint: a block has another sum; names file and byte.
    """
    return {key: _read(it, reader) if isinstance(it, dict | list) else it for key, it in reader.state.items()}


def _read(value: object, reader: part_reader.PartReader) -> object:
    if isinstance(value, dict):
        if "$array" in value:
            return _array(reader, value["$array"])
        return {key: _read(it, reader) if isinstance(it, dict | list) else it for key, it in value.items()}
    if isinstance(value, list):
        return [_read(it, reader) if isinstance(it, dict | list) else it for it in value]
    return value


def _array(reader: part_reader.PartReader, number: int) -> torch.Tensor:
    array = reader.arrays[number]
    if not hasattr(torch, array.dtype):
        raise documents.corrupt(reader.folder, f"expected a dtype that this torch has, got {array.dtype}")
    made = torch.empty(array.shape, dtype=DTYPE_OF[array.dtype], device="cpu")
    reader.read(number, 0, made.reshape(-1).view(torch.uint8).numpy().data)
    return made


class Noted:
    """An object that a store notes by the arguments of its constructor, with which it is made again."""

    #: Arguments of the constructor that a store notes: attributes of these names.
    noted: tuple[str, ...] = ()

    def config(self) -> dict[str, object]:
        """The constructor's arguments, as plain values: a store notes them to make the component again.

        >>> from engram import SamplerWithoutReplacement
        >>> SamplerWithoutReplacement(drop_last=True).config()["drop_last"]
        True
        """
        return {name: plain(getattr(self, name)) for name in self.noted}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make the component that a store noted.

        >>> from engram import SamplerWithoutReplacement
        >>> sampler = SamplerWithoutReplacement(drop_last=True)
        >>> SamplerWithoutReplacement.from_config(sampler.config())
        SamplerWithoutReplacement(drop_last=True)
        """
        return cls(**config)

    def __repr__(self) -> str:
        """Arguments that differ from their defaults."""
        defaults = {name: plain(it.default) for name, it in inspect.signature(type(self).__init__).parameters.items()}
        given = [  # a dtype is known by its name here
            f"{name}={value!r}"
            for name, value in self.config().items()
            if value != (default := defaults.get(name)) and f"torch.{value}" != str(default)
        ]
        return f"{type(self).__name__}({', '.join(given)})"


class Component(Noted, Declared, Dumpable):
    """A sampler or writer of engram's own."""

    @property
    def recordable(self) -> bool:
        """Whether :meth:`config` says all."""
        return True

    def _empty(self, empty_write_count: bool = True) -> None:
        """TorchRL's; no effect, because rows and cursors are the store's."""

    def state_dict(self) -> dict[str, object]:
        """All state, as tensors and plain values: copies.

        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> import torch
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, alpha=0.6, beta=0.4))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.sampler.state_dict()["alpha"]
        0.6
        """
        return {}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:  # noqa: ARG002 - an empty state fits all
        """Check a state. ``capacity``: rows that the storage will have when it is committed; None: as now.

        Returns:
            What makes the change: call its ``commit()`` once. Until then nothing is changed.

        Raises:
            KeyError: a missing or unknown entry. TypeError: one of another type. ValueError: one out of range.
            IncompatibleCheckpoint: the state of a component with other arguments (a ``ValueError``).

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3)
        >>> _ = rb.extend(torch.arange(10))
        >>> saved = rb.sampler.state_dict()
        >>> _ = rb.sample()
        >>> load = rb.sampler.prepare_load(saved)  # changes nothing
        >>> load.commit()
        >>> len(list(rb))  # again the whole epoch: batches of 3, 3, 3 and 1
        4
        """
        check_keys(state_dict, (), type(self).__name__)
        return Loads()


def adopt(wrapper: Component, inner: object, methods: Iterable[str]) -> None:
    """Let a wrapper around a user's component answer with those of these methods that the component has."""
    for name in methods:
        if hasattr(inner, name):
            setattr(wrapper, name, getattr(inner, name))


STORAGE = "storage"
#: Parts that are left out where they say nothing else.
EMPTY: dict[str, dict[str, object]] = {"prefetch": {"batches": None}, "transforms": {}}
#: In a sampler's state: where its epoch is.
_OF_AN_EPOCH = ("rows", "visited", "count", "version", "clock")
#: In a sampler's state, as long as an epoch goes on beside writes: what it is over.
WHILE_IT_GOES_ON = frozenset({"begun", "known"})
#: In a sampler's state: the name of the storage's priorities, which are all of that state.
INDEX = "index_of_storage"


#: Beside the states of transforms: names of those without one, which the program that loads them must make.
FUNCTIONS = "functions"


class Parts(NamedTuple):
    """A buffer's state without its storage, and which class each part is of."""

    states: dict[str, dict[str, object]]
    kinds: dict[str, str]


def write_parts(folder: Path, parts: Parts) -> Iterator[part_writer.PartInfo]:
    """Write a folder for each part that says something.

    Raises:
        TypeError: a state that is not made of tensors and plain values; names the way to it.
        OSError: no space, or an I/O error.
    """
    for name, state in parts.states.items():
        if name in EMPTY and state == EMPTY[name]:
            continue
        yield write_part(folder / name, name, parts.kinds[name], state)


def read_parts(
    checkpoint: checkpoints.Checkpoint, rank: int, *, without: Collection[str] = (STORAGE,)
) -> dict[str, SavedPart]:
    """The parts of a rank, by the name of their folder.

    Raises:
        CorruptCheckpoint: one is damaged.
    """
    return {
        reader.folder.name: SavedPart(reader.folder, reader.part, reader.type, read_state(reader))
        for reader in checkpoint.parts(rank, without=without)
    }


def checked_states(
    parts: Mapping[str, SavedPart], shard: Path, kinds: Mapping[str, str]
) -> dict[str, dict[str, object]]:
    """The states of all parts but the storage, by the name of the part.

    Args:
        parts: as :func:`read_parts` found them.
        shard: the folder that they lie in.
        kinds: the class of each part here.

    Raises:
        CorruptCheckpoint: one is missing.
        IncompatibleCheckpoint: one is of another class than here.
    """
    states = {}
    for name, kind in kinds.items():
        if name in parts:
            check_kind(parts[name], name, kind)
            states[name] = parts[name].state
        elif name in EMPTY:
            states[name] = dict(EMPTY[name])
        else:
            raise documents.corrupt(shard / "shard.json", _no_part(name))
    return states


#: What states of samplers say of each row or lane: how often it was drawn, or how far.
_DRAWN = {"counts": torch.int32, "taken": torch.int64, "next": torch.int64}


def reset(part: str, state: dict[str, object], seed: int, generator: object) -> dict[str, object]:
    """The state of a part for rows that were moved: epochs and generators begin again, and nothing is prefetched.

    Args:
        part: its name.
        state: as one rank saved it.
        seed: of passes.
        generator: the state of a generator.

    Raises:
        IncompatibleCheckpoint: priorities that are not beside the rows that they belong to.
    """
    leaves = state.get("leaves")
    if part == "sampler" and isinstance(leaves, Sized) and len(leaves):
        raise IncompatibleCheckpoint(
            "expected priorities in the part of the storage, as a Checkpointer saves them, got those of a dump. Load it with "
            "loads(path, convert=True), and save that with a Checkpointer."
        )
    if part == "sampler":
        return reset_epoch(state, seed)
    if part == "buffer":
        return {**state, "lane": 0, "iterating": False}
    if part == "rng":
        saved = state["generator"]
        has_one = isinstance(saved, list | tuple) and bool(saved) and saved[0] is not None
        return {"generator": [generator, "cpu"] if has_one else None, "default": generator}
    if part == "prefetch":
        return dict(EMPTY[part])
    if part == "transforms":
        return {name: of for name, of in state.items() if name != FUNCTIONS}
    return state


def reset_epoch(state: dict[str, object], seed: int) -> dict[str, object]:
    """The state of a sampler for rows that were moved: an epoch begins again, and no row was drawn. ``seed``: of the epoch's order."""
    none = {name: torch.zeros(0, dtype=dtype, device="cpu") for name, dtype in _DRAWN.items() if name in state}
    if not none and "visited" not in state:
        return state
    begin = {name: 0 for name in _OF_AN_EPOCH if name in state}
    state = {name: entry for name, entry in state.items() if name not in WHILE_IT_GOES_ON}
    if none:
        return {**state, **none, **begin, **({"ran_out": False} if "ran_out" in state else {})}
    return {**state, **begin, "key": seed, "ran_out": False}


def index_state(storage: part_reader.PartReader, sampler: Mapping[str, object]) -> dict[str, object]:
    """The state of a sampler that lies in the storage's part. Raises ``CorruptCheckpoint``: it does not."""
    name = sampler[INDEX]
    found = storage.state.get("priorities", {})
    if not isinstance(name, str) or not isinstance(found, dict) or name not in found:
        raise documents.corrupt(storage.folder, f"expected the priorities {name!r:.100} of the sampler, found none")
    states = read_state(storage)["priorities"]
    assert isinstance(states, dict)  # as the part says it
    return cast("dict[str, object]", states[name])


def open_storage(checkpoint: checkpoints.Checkpoint, rank: int) -> part_reader.PartReader:
    """The part with the rows. Raises ``CorruptCheckpoint``: it is missing, or a file has another size."""
    try:
        return checkpoint.part(rank, STORAGE)
    except KeyError as error:
        raise documents.corrupt(checkpoint.shard_folder(rank) / "shard.json", _no_part(STORAGE)) from error


def _no_part(name: str) -> str:
    return f"expected a part called {name!r}, found none"
