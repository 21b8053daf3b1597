"""A buffer as parts of a checkpoint: its storage's rows, and all else that its state says, a folder per component."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engram.errors import IncompatibleCheckpoint
from engram.format.problems import corrupt
from engram.persist.components import SavedPart, check_kind, read_state, write_part

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from engram.format.checkpoints import Checkpoint
    from engram.format.parts import PartInfo, PartReader
    from engram.persist.snapshot import StorageSnapshot
    from engram.types import Form

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


class Snapshot(NamedTuple):
    """All that a checkpoint saves of a buffer, at one moment. The rows are read when they are written."""

    rows: StorageSnapshot
    parts: Parts
    form: Form
    paused_s: float
    """For how long writers waited."""


def write_parts(folder: Path, parts: Parts) -> Iterator[PartInfo]:
    """Write a folder for each part that says something.

    Raises:
        TypeError: a state that is not made of tensors and plain values; names the way to it.
        OSError: no space, or an I/O error.
    """
    for name, state in parts.states.items():
        if name in EMPTY and state == EMPTY[name]:
            continue
        yield write_part(folder / name, name, parts.kinds[name], state)


def read_parts(checkpoint: Checkpoint, rank: int, *, without: Collection[str] = (STORAGE,)) -> dict[str, SavedPart]:
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
            raise corrupt(shard / "shard.json", _no_part(name))
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
        saved: Any = state["generator"] or [None]
        return {"generator": None if saved[0] is None else [generator, "cpu"], "default": generator}
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


def index_state(storage: PartReader, sampler: Mapping[str, object]) -> dict[str, object]:
    """The state of a sampler that lies in the storage's part. Raises ``CorruptCheckpoint``: it does not."""
    name = sampler[INDEX]
    found = storage.state.get("priorities", {})
    if not isinstance(name, str) or not isinstance(found, dict) or name not in found:
        raise corrupt(storage.folder, f"expected the priorities {name!r:.100} of the sampler, found none")
    states: dict[str, Any] = read_state(storage)
    state: dict[str, object] = states["priorities"][name]
    return state


def open_storage(checkpoint: Checkpoint, rank: int) -> PartReader:
    """The part with the rows. Raises ``CorruptCheckpoint``: it is missing, or a file has another size."""
    try:
        return checkpoint.part(rank, STORAGE)
    except KeyError as error:
        raise corrupt(checkpoint.shard_folder(rank) / "shard.json", _no_part(STORAGE)) from error


def _no_part(name: str) -> str:
    return f"expected a part called {name!r}, found none"
