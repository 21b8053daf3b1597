"""A component's state as one folder, and back: tensors are arrays, all else is JSON."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from engram._support.copies import raw_bytes
from engram._support.state import Stateful, mapped, prepare_load, saved
from engram.errors import IncompatibleCheckpoint
from engram.format import disk
from engram.format.dumps import replacing, standing
from engram.format.parts import PartReader, PartWriter
from engram.format.problems import corrupt
from engram.format.schema import DTYPES
from engram.store.memory import DTYPE_NAMES, DTYPE_OF

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from engram.format.parts import PartInfo
    from engram.types import Commit

S_co = TypeVar("S_co", covariant=True)


def write_part(folder: Path, part: str, kind: str, state: dict[str, object]) -> PartInfo:
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
    writer = PartWriter(folder, part, kind)
    return writer.finish(described_state(writer, state, part))


class Snapshot(Protocol):
    """A component's state at one moment, which later changes do not touch."""

    def save(self, folder: Path) -> object:
        """Write it into a new folder, as a part of a dump. Others may be writing. Raises as :meth:`Dumpable.dumps`."""


class Preparation(Protocol[S_co]):
    """What a snapshot needs, gathered before writers wait for it."""

    def take(self) -> S_co:
        """The snapshot of this moment. Call it while writers are paused."""


class _StatePreparation:
    def __init__(self, component: Dumpable) -> None:
        self._component = component

    def take(self) -> StateSnapshot:
        component = self._component
        return StateSnapshot(component.part, type(component).__name__, saved(component, component.part))


class StateSnapshot(NamedTuple):
    """A state without rows of its own."""

    part: str
    kind: str
    """The class of the component."""
    state: dict[str, object]

    def save(self, folder: Path) -> PartInfo:
        return write_part(folder, self.part, self.kind, self.state)


class Dumpable(Stateful):
    """A component that can be saved as a folder of its own."""

    #: What it is to a buffer.
    part: ClassVar[str]

    @property
    def paused(self) -> AbstractContextManager[object]:
        """Inside nothing that is saved changes."""
        return contextlib.nullcontext()

    def prepare_snapshot(self) -> Preparation[Snapshot]:
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
        return _StatePreparation(self)

    def prepare_part(self, reader: PartReader) -> Commit:
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
        with replacing(Path(path)) as folder, disk.batched_fsync():
            prepared = self.prepare_snapshot()
            with self.paused:
                snapshot = prepared.take()
            snapshot.save(folder)

    def loads(self, path: str | Path) -> None:
        """Take over what :meth:`dumps` saved.

        Raises:
            CorruptCheckpoint: damaged; names file and byte.
            IncompatibleCheckpoint: of another kind of component. Otherwise as ``load_state_dict``. Nothing is changed.
        """
        with PartReader.open(standing(Path(path))) as reader:
            self.prepare_part(reader).commit()

    dump = save = dumps
    load = loads


class SavedPart(NamedTuple):
    """A part that was read, every block of it checked."""

    folder: Path
    part: str
    type: str
    """The class that wrote it."""
    state: dict[str, object]


def check_kind(reader: PartReader | SavedPart, part: str, *kinds: str) -> None:
    """Raise ``IncompatibleCheckpoint`` unless that part is one of these kinds."""
    if reader.part != part or reader.type not in kinds:
        raise IncompatibleCheckpoint(
            f"{reader.folder}: expected a {part} of type {' or '.join(kinds)}, as here, got the {reader.part} {reader.type!r:.100}."
        )


def check_blocks(reader: PartReader) -> None:
    """Read everything, before anything changes. Raises ``CorruptCheckpoint``: the first block that is not as it was."""
    for problem in reader.damage():
        raise corrupt(*problem)


def described_state(writer: PartWriter, state: dict[str, object], where: str) -> dict[str, object]:
    """The state as JSON values, its tensors written as arrays. Raises as :func:`write_part`."""

    def written(value: Tensor) -> dict[str, int]:
        plain = value.detach().resolve_conj().resolve_neg().to("cpu")
        raw = raw_bytes(plain).numpy().data
        return {"$array": writer.array(DTYPE_NAMES[value.dtype], tuple(plain.shape), raw)}

    _check_entries(state, where)
    described: dict[str, object] = mapped(_without_tails(state), written, where)
    return described


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


def read_state(reader: PartReader) -> dict[str, object]:
    """The state of a part, every block of it checked.

    Raises:
        CorruptCheckpoint: a block has another sum; names file and byte.
    """
    return {key: _read(it, reader) if isinstance(it, dict | list) else it for key, it in reader.state.items()}


def _read(value: object, reader: PartReader) -> object:
    if isinstance(value, dict):
        if "$array" in value:
            return _array(reader, value["$array"])
        return {key: _read(it, reader) if isinstance(it, dict | list) else it for key, it in value.items()}
    if isinstance(value, list):
        return [_read(it, reader) if isinstance(it, dict | list) else it for it in value]
    return value


def _array(reader: PartReader, number: int) -> Tensor:
    array = reader.arrays[number]
    if not hasattr(torch, array.dtype):
        raise corrupt(reader.folder, f"expected a dtype that this torch has, got {array.dtype}")
    made = torch.empty(array.shape, dtype=DTYPE_OF[array.dtype], device="cpu")
    reader.read(number, 0, made.reshape(-1).view(torch.uint8).numpy().data)
    return made
