"""State beside the rows: a reshard takes that of one rank, so the others must have saved the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram._raw import raw_bytes
from engram.errors import IncompatibleCheckpoint
from engram.persist.parts import STORAGE, read_parts, reset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engram.format.checkpoints import Checkpoint
    from engram.persist.components import SavedPart
    from engram.reshard.driver import Reshard
    from engram.reshard.shards import SavedShard

#: Parts that begin again, whatever they say.
_RESET = ("rng", "prefetch")
#: Of priorities, what is not of rows; other entries must agree, or are those of all.
_OF_PRIORITIES = "beta"
_MOST = 8
#: What a storage's state is called that is part of something else.
_ROWS = "storage"


def disagreements(checkpoint: Checkpoint, made: Reshard) -> list[str]:
    """Where ranks that have written differ from the one whose state is taken, an entry each.

    Raises:
        CorruptCheckpoint: a part is damaged.
        IncompatibleCheckpoint: something has rows of its own that others' rows mean, such as final observations.
    """
    written = [rank for rank, one in enumerate(made.shards) if one.reader.geometry is not None]
    if len(written) < 2:
        return []
    taken = made.leader
    ours = _state(made.shards[taken], made.leader_parts(checkpoint))
    found: dict[str, list[str]] = {}
    names = checkpoint.ranks
    for rank in written:
        if rank == taken:
            continue
        theirs = _state(made.shards[rank], read_parts(checkpoint, rank, without=(STORAGE, *_RESET)))
        for where, here, there in _differences(ours, theirs, ""):
            if where not in found:
                found[where] = [f"rank {names[taken]}{_said(here)}"]
            if where.rpartition(".")[2] == _ROWS:
                raise IncompatibleCheckpoint(
                    f"{checkpoint.folder}: {where}: expected no state with rows of its own, which those of the buffer mean, as final "
                    "observations are: it cannot be redistributed. Restore it with as many ranks as saved it, into buffers of "
                    "their sizes."
                )
            found[where].append(f"rank {names[rank]}{_said(there)}")
    return [
        f"{where}: expected the same on all ranks, got that of {', '.join(said[:_MOST])}{' …' * (len(said) > _MOST)}; "
        f"that of rank {names[taken]} is taken"
        for where, said in found.items()
    ]


def _state(shard: SavedShard, parts: Mapping[str, SavedPart]) -> dict[str, object]:
    """All of it that could matter to others."""
    storage = shard.head
    state: dict[str, object] = {
        "priorities": {name: {_OF_PRIORITIES: it[_OF_PRIORITIES]} for name, it in storage["priorities"].items()},
        "windows": storage["windows"],
        "transforms": {},
    }
    return state | {name: reset(name, it.state, 0, None) for name, it in parts.items() if name not in _RESET}


def _differences(ours: object, theirs: object, where: str) -> Iterator[tuple[str, object, object]]:
    """The deepest entries that differ; of a storage's state, that it does."""
    if where.rpartition(".")[2] == _ROWS and any(True for _ in _differences(ours, theirs, "")):
        yield where, ours, theirs
        return
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        for key, value in ours.items():
            yield from _differences(value, theirs[key], f"{where}.{key}" if where else key)
        return
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = _same_tensors(ours, theirs)
    else:
        same = repr(ours) == repr(theirs)
    if not same:
        yield where, ours, theirs


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(raw_bytes(one), raw_bytes(other))


def _said(value: object) -> str:
    return f" ({value!r})" if isinstance(value, bool | int | float | str) and len(repr(value)) < 40 else ""
