"""Ends of the streams of an ensemble's members, before producers start again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engram import storages
from engram.field_paths import FieldPath, checked_path, public
from engram.samplers.trajectory_tables import END_KEYS
from engram.samplers.windows import WindowSampler
from engram.types import Extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.ensembles.members import Member

CALL = "end_streams"


class Keys(NamedTuple):
    """The fields that say how a trajectory ends."""

    end: FieldPath
    terminated: FieldPath | None
    truncated: FieldPath | None

    @classmethod
    def checked(cls, end: object, terminated: object, truncated: object) -> Keys:
        """Raises ``TypeError``: one is no key. ``ValueError``: two are the same."""
        named = {"end_key": end, "terminated_key": terminated, "truncated_key": truncated}
        paths = {
            name: None if key is None and name != "end_key" else checked_path(key, f"{CALL}: {name}")
            for name, key in named.items()
        }
        known = [path for path in paths.values() if path is not None]
        if len(set(known)) < len(known):
            raise ValueError(f"{CALL}: expected keys that differ, got {', '.join(map(str, known))}.")
        return cls(paths["end_key"] or (), paths["terminated_key"], paths["truncated_key"])


class _Patch(NamedTuple):
    member: Member
    row: Tensor
    number: Tensor
    entries: dict[FieldPath, object]


def end_streams(members: Sequence[Member], keys: Keys) -> None:
    """Make the newest row of each member an end: what ``ReplayBufferEnsemble.end_streams`` does."""
    patches = [patch for member in members if (patch := _patch_of(member, keys)) is not None]
    for member, row, number, entries in patches:
        member.buffer.update_if_present(index=row, generation=number, patch=entries)


def _patch_of(member: Member, keys: Keys) -> _Patch | None:
    """What is to be written to a member's newest row; None: nothing was ever written, or it is an end already."""
    wiring = member.wiring
    storage, sampler = wiring.storage, wiring.sampler
    who = f"{CALL}: member {member.number}"
    if not isinstance(storage, storages.TensorStorage) or storage.ndim != 1 or storage.lanes != 1:
        raise RuntimeError(f"{who}: expected a tensor storage with ndim=1 and one lane, got {storage!r}.")
    if not (wiring.of_writer.appends and wiring.of_writer.tracks_tickets):
        raise RuntimeError(f"{who}: expected a round-robin writer with track_generations=True, got {wiring.writer!r}.")
    if not isinstance(sampler, WindowSampler):
        raise RuntimeError(f"{who}: expected a SliceSampler that reads {public(keys.end)!r}, got {sampler!r}.")
    if keys.end not in _ends_of(sampler):
        raise RuntimeError(
            f"{who}: expected a SliceSampler that reads {public(keys.end)!r}, got {sampler!r}. Give it end_key={public(keys.end)!r}."
        )
    newest = _newest(storage.extent(), storage)
    if newest is None:
        return None
    structure = storage.written()
    row = torch.tensor([newest], device="cpu")
    number = storage.writes_of(row, storage.tickets_of(row))
    fields = {field.key: at for at, field in enumerate(structure.fields)}
    if keys.end not in fields:
        raise RuntimeError(
            f"{who}: expected the stored field {public(keys.end)!r}, got {sorted(map(public, fields), key=str)}."
        )
    columns = dict(zip(fields, storage.read(row)[0], strict=True))
    done = columns[keys.end]
    if done.dtype is not torch.bool:
        raise TypeError(f"{who}: {public(keys.end)!r}: expected a field of bools, got {done.dtype}.")
    entries: dict[FieldPath, object] = {keys.end: torch.ones_like(done)}
    truncated = columns.get(keys.truncated) if keys.truncated is not None else None
    if truncated is not None and keys.truncated is not None:
        over = done.any()
        terminated = columns.get(keys.terminated) if keys.terminated is not None else None
        if terminated is not None:
            over = over | (terminated != 0).any()
        entries[keys.truncated] = truncated | ~over
    return _Patch(member, row, number, entries)


def _ends_of(sampler: WindowSampler) -> tuple[FieldPath, ...]:
    """The end flags that a sampler was told to read, or reads by default."""
    rules = sampler.rules
    if rules is None:  # boundaries that are no fields
        return ()
    return (*END_KEYS, *(key[1:] for key in END_KEYS)) if rules.end_keys is None else rules.end_keys


def _newest(extent: Extent, storage: storages.TensorStorage) -> int | None:
    """The newest row that holds something; None: there is none."""
    for back in range(1, extent.filled[0] + 1):
        row = (extent.seam[0] - back) % extent.capacity
        if int(storage.tickets_of(torch.tensor([row], device="cpu"))[0]) >= 0:
            return row
    return None
