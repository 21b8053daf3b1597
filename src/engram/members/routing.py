"""Rows of an ensemble on their way to members: who gets which, and what members would refuse is found before any changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import torch

from engram import storages
from engram._support import checks, nested, tensordicts
from engram._support.field_paths import FieldPath, as_path, checked_path, public
from engram._support.tensordicts import is_tensor_collection, is_tensorclass, tensordict_type
from engram.around import episodes, windows
from engram.buffer import row_access, tensordict, window_marks
from engram.buffer.field_updates import CALL, ConditionalUpdateResult, FieldUpdates
from engram.buffer.wiring import Wiring
from engram.errors import RowError
from engram.members.components import WriterEnsemble, check_ids, naming, routed
from engram.members.reading import Member
from engram.remote.fleet import plans
from engram.samplers import _base, prioritized
from engram.types import Entry


class Routing:
    """Says which member each row of a write goes to.

    Args:
        key: the field that has the number of the member of each row, or None.
        dim: the dimension of the data whose entries are of one member each, or None.

    Raises:
        ValueError: both. TypeError: no key, or no int.
    """

    def __init__(self, key: object, dim: object) -> None:
        who = "ReplayBufferEnsemble"
        if key is not None and dim is not None:
            raise ValueError(f"{who}: expected one of routing_key and routing_dim, got both.")
        self.key: FieldPath | None = as_path(key, f"{who}: routing_key")
        self.dim = None if dim is None else checks.check_count(f"{who}: routing_dim", dim, least=-(1 << 62))

    def members_of(self, data: tensordicts.TensorDict, members: int) -> torch.Tensor:
        """The member of each row of ``data.reshape(-1)``, int64 ``[n]``.

        Raises:
            RuntimeError: nothing says it. KeyError: no such field. TypeError: it has no ints. ValueError: no such member; not one number
            for each row; no such dimension, or one of another size.
        """
        batch = data.batch_size
        if self.key is not None:
            found = nested.find(data, self.key)
            if found is None:
                raise KeyError(
                    f"extend: routing_key: expected the field {public(self.key)!r}, got {sorted(data.keys(True, True), key=str)}."
                )
            ids = check_ids(found, members, f"extend: routing_key {self.key}")
            if ids.numel() != batch.numel() or ids.shape[: len(batch)] != batch:
                raise ValueError(
                    f"extend: routing_key {self.key}: expected the number of a member for each row, {list(batch)}, got {list(ids.shape)}."
                )
            return ids.reshape(-1)
        if self.dim is None:
            raise RuntimeError(
                "extend: expected an ensemble that was made with routing_key or routing_dim. Without, write to a member: "
                "ensemble[i].extend(data)."
            )
        if not -len(batch) <= self.dim < len(batch):
            raise ValueError(f"extend: routing_dim={self.dim}: expected that dimension, got batch size {list(batch)}.")
        dim = self.dim % len(batch)
        if batch[dim] != members:
            raise ValueError(
                f"extend: routing_dim={self.dim}: expected {members} entries, one for each member, got {batch[dim]} of {list(batch)}."
            )
        outer, inner = batch[:dim].numel(), batch[dim + 1 :].numel()
        return torch.arange(members, device="cpu").repeat_interleave(inner).repeat(outer)


class RoutedWrites:
    """Writes, updates and priorities of an ensemble. It keeps nothing of its own.

    Args:
        members: the buffers.
        wiring: of the ensemble, whose transform sees rows before they are divided.
        routing: which member each row goes to.
    """

    def __init__(self, members: Sequence[Member], wiring: Wiring, routing: Routing) -> None:
        self._members, self._wiring, self._routing = members, wiring, routing

    # ---- rows ----------------------------------------------------------------------------------------------------------

    def extend(self, data: object, call: str = "extend") -> tensordicts.TensorDict:
        """What ``ReplayBufferEnsemble.extend`` returns."""
        if isinstance(data, list | tuple) and not data:
            data = tensordict_type()({}, [0])
        if not is_tensor_collection(data) or is_tensorclass(data):
            raise TypeError(f"{call}: expected a TensorDict, as its rows are divided, got {type(data).__name__}.")
        transform = self._wiring.transform
        if transform.writes:
            data = cast("tensordicts.TensorDict | None", transform.inv(data.copy()))
        if data is None or not data.batch_size.numel():
            return self._written(torch.empty(0, dtype=torch.int64, device="cpu"), [], [])
        ids = self._routing.members_of(data, len(self._members))
        shares = plans.shares(self._members, ids, data.reshape(-1))
        for share in shares:
            with naming(share.member.number, "Nothing was written."):
                self._check(share.member, share.rows, call, alone=len(shares) == 1)
        written: list[torch.Tensor] = []
        for share in shares:
            with naming(share.member.number, "Members before it have written their rows." if written else ""):
                written.append(share.member.buffer.extend(share.rows))
        return self._written(ids, shares, written)

    def _check(self, member: Member, rows: tensordicts.TensorDict, call: str, *, alone: bool) -> None:
        """Raise what writing the rows would, before any is written. What a transform of the member makes of them is not known yet."""
        wiring = member.wiring
        storage = wiring.storage
        storage.check_writable()
        if wiring.of_writer.read_only:
            wiring.placer.place(storage.extent(), 0, 0, rows)  # refuses
        if storage.ndim > 1:
            raise RuntimeError(f"{call}: expected a storage with ndim=1, got ndim={storage.ndim}.")
        if alone or wiring.transform.writes:
            return
        member.check_priorities(rows)
        if not storage.initialized:
            return
        count = storage.unnamed_lanes(call, batched=True)[1]
        storage.prepare(rows, call, batched=True, ignored=(*member.ignored, "index", "index_generation"), count=count)

    def _written(
        self, ids: torch.Tensor, shares: list[plans.Share[Member, tensordicts.TensorDict]], written: list[torch.Tensor]
    ) -> tensordicts.TensorDict:
        """The places of rows: -1 where a member's transforms made other rows of those that it was given."""
        index = torch.full(ids.shape, -1, dtype=torch.int64, device="cpu")
        for share, rows in zip(shares, written, strict=True):
            if len(rows) == len(share.at):
                index[share.at] = rows.to("cpu")
        entries = {"buffer_ids": ids, "index": index}
        writer: WriterEnsemble = self._wiring.writer
        if writer.tracks_generations:
            numbers = writer.generations_of(entries) if len(ids) else torch.empty_like(ids)
            entries["index_generation"] = numbers.where(_last_of_each(ids, index), -1)
        return tensordict_type()(entries, batch_size=ids.shape)

    # ---- updates -------------------------------------------------------------------------------------------------------

    def update_if_present(
        self, index: object, generation: object, patch: object, version_key: object, version: object, *, newer: bool
    ) -> ConditionalUpdateResult:
        """What ``ReplayBufferEnsemble.update_if_present`` does."""
        shape, shares = self._shares(index, CALL)
        expected, n = checks.as_numbers(f"{CALL}: generation", generation).to("cpu"), shape.numel()
        if expected.numel() != n:
            raise ValueError(f"{CALL}: expected one generation per row, {list(shape)}, got {list(expected.shape)}.")
        if not nested.has_entries(patch):
            raise TypeError(f"{CALL}: patch: expected a dict or TensorDict, got {type(patch).__name__}.")
        entries = dict(cast("dict[str, object]", patch).items())
        versions = isinstance(version, torch.Tensor) and version.numel() == n > 1
        updates = []
        for share in shares:
            some = nested.map_leaves(entries, partial(_of_rows, shape=shape, share=share))
            own = share.of(cast("torch.Tensor", version).reshape(n, -1)) if versions else version
            share.member.check_editable(CALL)
            updates.append((share, some, own))
        for share, some, own in updates:
            with share.member.checking():
                FieldUpdates(share.member.wiring).check(share.rows, some, version_key, own)
        updated, numbers = torch.zeros(n, dtype=torch.bool, device="cpu"), torch.full((n,), -1, device="cpu")
        rejected = None if version_key is None else torch.zeros_like(updated)
        for share, some, own in updates:
            made = share.member.buffer.update_if_present(
                index=share.rows,
                generation=share.of(expected.reshape(-1)),
                patch=some,
                version_key=version_key,
                version=own,
                require_newer=newer,
            )
            updated[share.at], numbers[share.at] = made.updated.cpu(), made.generation.cpu()
            if rejected is not None and made.version_rejected is not None:
                rejected[share.at] = made.version_rejected.cpu()
        rejected = None if rejected is None else rejected.reshape(shape)
        return ConditionalUpdateResult(updated.reshape(shape), rejected, numbers.reshape(shape))

    def update_priority(self, index: object, priority: object, generation: torch.Tensor | None) -> None:
        """What ``ReplayBufferEnsemble.update_priority`` does."""
        call = "update_priority"
        info = cast("dict[Entry, torch.Tensor]", index)
        if priority is None:
            _base.refuse_batch(index, priority)
        if (is_tensor_collection(index) or isinstance(index, dict)) and "buffer_ids" not in info and "index" in info:
            generation = info.get("index_generation", None) if generation is None else generation
            ids, named = routed(info["index"], len(self._members), call)
            both = torch.cat([ids.reshape(-1, 1), named.reshape(ids.numel(), -1)], 1)
            both, priority, generation = window_marks.by_window(info, both, priority, generation)
            index = {"buffer_ids": both[:, 0], "index": both[:, 1:].squeeze(1)}
        shape, shares = self._shares(index, call)
        given, n = checks.as_numbers(f"{call}: priority", priority), shape.numel()
        if given.numel() not in (1, n):
            raise RuntimeError(f"{call}: expected a priority for each of {n} rows, got {list(given.shape)}.")
        values = given.reshape(-1).expand(n)
        numbers = None if generation is None else prioritized.rows_of(generation, f"{call}: generation")
        if numbers is not None and numbers.numel() != n:
            raise RuntimeError(f"{call}: generation: expected one per row, {n}, got {numbers.numel()}.")
        for share in shares:
            with share.member.checking():
                share.member.wiring.bound_sampler().check_priority(share.of(values), len(share.at))
        taking = [share for share in shares if share.member.wiring.of_sampler.takes_priorities]
        for share in taking:
            _check_written(share, call)
        for share in taking:
            share.member.buffer.update_priority(share.rows, share.of(values), generation=share.of(numbers))

    def update_tensordict_priority(self, data: tensordicts.TensorDict) -> None:
        """What ``ReplayBufferEnsemble.update_tensordict_priority`` does."""
        taking = [member for member in self._members if member.wiring.of_sampler.takes_priorities]
        if taking:
            buffers = (member.buffer for member in taking)
            keys = (it.priority_key for it in buffers if isinstance(it, tensordict.TensorDictReplayBuffer))
            key = next(keys, "td_error")
            index, priority, generation = tensordict.priorities_in(data, key, "TensorDictReplayBuffer")
            errors = taking[0].wiring.source.reduced(priority.reshape(data.numel(), -1))
            self.update_priority(index, errors, generation)

    def remove(self, index: object, generation: object) -> int:
        """What ``ReplayBufferEnsemble.remove`` does."""
        call = row_access.REMOVE
        shape, shares = self._shares(index, call)
        numbers = None if generation is None else checks.as_numbers(f"{call}: generation", generation).reshape(-1)
        if numbers is not None and len(numbers) != shape.numel():
            raise ValueError(f"{call}: expected one generation per row, {shape.numel()}, got {len(numbers)}.")
        for share in shares:
            share.member.check_editable(call)
            with share.member.checking():
                row_access.checked_removal(share.member.wiring, share.rows, share.of(numbers))
        return sum(share.member.buffer.remove(share.rows, generation=share.of(numbers)) for share in shares)

    def mark_update(self, index: object) -> None:
        """What ``ReplayBufferEnsemble.mark_update`` does."""
        _, shares = self._shares(index, "mark_update")
        for share in shares:
            _check_written(share, "mark_update")
        for share in shares:
            share.member.buffer.mark_update(share.rows)

    def _shares(self, index: object, call: str) -> tuple[torch.Size, list[plans.Share[Member, torch.Tensor]]]:
        """The shape of an index, and the share of each of the members. Raises as :func:`routed`."""
        ids, rows = routed(index, len(self._members), call)
        rows = rows.reshape(ids.numel(), *rows.shape[ids.ndim :])
        return ids.shape, plans.shares(self._members, ids.reshape(-1), rows)


def _check_written(share: plans.Share[Member, torch.Tensor], call: str) -> None:
    """Raise what new priorities of these rows would. Nothing is changed."""
    wiring = share.member.wiring
    with share.member.checking():
        if not wiring.storage.initialized:
            raise RuntimeError(f"{call}: expected rows that were written; nothing was ever written.")
        named = prioritized.rows_of(wiring.rows_named(share.rows), call)
        outside = named[(named < -1) | (named >= wiring.storage.max_size)]
        if len(outside):
            raise RowError(f"{call}: expected rows in [-1, {wiring.storage.max_size}), got {int(outside[0])}.")


def _of_rows(leaf: object, shape: torch.Size, share: plans.Share[Member, torch.Tensor]) -> object:
    """Some rows of a leaf of a patch ``[*shape, ...]``. Raises ``ValueError``: it has another shape."""
    value = checks.as_numbers(f"{CALL}: patch", leaf) if not is_tensor_collection(leaf) else leaf
    if value.shape[: len(shape)] != shape:
        raise ValueError(f"{CALL}: patch: expected entries beginning with {list(shape)}, got {list(value.shape)}.")
    return share.of(value.reshape(shape.numel(), *value.shape[len(shape) :]))


def _last_of_each(ids: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Whether no later row was written to the same place: bool ``[n]``."""
    last = {place: at for at, place in enumerate(zip(ids.tolist(), index.tolist(), strict=True))}
    kept = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")
    kept[list(last.values())] = True
    return kept


END_STREAMS = "end_streams"


class Keys(NamedTuple):
    """The fields that say how a trajectory ends."""

    end: FieldPath
    terminated: FieldPath | None
    truncated: FieldPath | None

    @classmethod
    def checked(cls, end: object, terminated: object, truncated: object) -> Keys:
        """Raises ``TypeError``: one is no key. ``ValueError``: two are the same."""
        keys = cls(
            checked_path(end, f"{END_STREAMS}: end_key"),
            None if terminated is None else checked_path(terminated, f"{END_STREAMS}: terminated_key"),
            None if truncated is None else checked_path(truncated, f"{END_STREAMS}: truncated_key"),
        )
        known = [path for path in keys if path is not None]
        if len(set(known)) < len(known):
            raise ValueError(f"{END_STREAMS}: expected keys that differ, got {', '.join(map(str, known))}.")
        return keys


def end_streams(members: Sequence[Member], keys: Keys) -> None:
    """Make the newest row of each member an end: what ``ReplayBufferEnsemble.end_streams`` does."""
    patches = [(member.buffer, _patch_of(member, keys)) for member in members]
    for buffer, patch in patches:
        if patch is not None:
            row, number, entries = patch
            buffer.update_if_present(index=row, generation=number, patch=entries)


def _patch_of(member: Member, keys: Keys) -> tuple[torch.Tensor, torch.Tensor, dict[FieldPath, torch.Tensor]] | None:
    """A member's newest row, the number of its write, and what is to be written to it; None: there is none."""
    wiring = member.wiring
    storage, sampler = wiring.storage, wiring.sampler
    who = f"{END_STREAMS}: member {member.number}"
    if not isinstance(storage, storages.TensorStorage) or storage.ndim != 1 or storage.lanes != 1:
        raise RuntimeError(f"{who}: expected a tensor storage with ndim=1 and one lane, got {storage!r}.")
    if not (wiring.of_writer.appends and wiring.of_writer.tracks_tickets):
        raise RuntimeError(f"{who}: expected a round-robin writer with track_generations=True, got {wiring.writer!r}.")
    if not isinstance(sampler, windows.WindowSampler):
        raise RuntimeError(f"{who}: expected a SliceSampler that reads {public(keys.end)!r}, got {sampler!r}.")
    if keys.end not in _ends_of(sampler):
        raise RuntimeError(
            f"{who}: expected a SliceSampler that reads {public(keys.end)!r}, got {sampler!r}. Give it end_key={public(keys.end)!r}."
        )
    row = row_access.newest_rows(storage, torch.zeros(1, dtype=torch.int64, device="cpu"))
    if row < 0:
        return None
    fields = [field.key for field in storage.written().fields]
    if keys.end not in fields:
        raise RuntimeError(f"{who}: expected the stored field {public(keys.end)!r}, got {[*map(public, fields)]}.")
    columns: dict[FieldPath | None, torch.Tensor] = dict(zip(fields, storage.read(row)[0], strict=True))
    done = columns[keys.end]
    if done.dtype is not torch.bool:
        raise TypeError(f"{who}: {public(keys.end)!r}: expected a field of bools, got {done.dtype}.")
    entries = {keys.end: torch.ones_like(done)}
    if keys.truncated is not None and keys.truncated in columns:
        over = done.any() | (columns.get(keys.terminated, done) != 0).any()
        entries[keys.truncated] = columns[keys.truncated] | ~over
    return row, storage.writes_of(row, storage.tickets_of(row)), entries


def _ends_of(sampler: windows.WindowSampler) -> tuple[FieldPath, ...]:
    """The end flags that a sampler was told to read, or reads by default."""
    rules = sampler.rules
    if rules is None:  # boundaries that are no fields
        return ()
    return (*episodes.END_KEYS, *(key[1:] for key in episodes.END_KEYS)) if rules.end_keys is None else rules.end_keys
