"""Rows of an ensemble on their way to members: who gets which, and what members would refuse is found before any changes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from engram._support.checks import as_numbers, check_count
from engram._support.field_paths import FieldPath, as_path, public
from engram._support.nested import find, has_entries, map_leaves
from engram._support.tensordicts import is_tensor_collection, is_tensorclass, tensordict_type
from engram.buffer.field_updates import CALL, ConditionalUpdateResult, FieldUpdates
from engram.buffer.row_access import REMOVE, checked_removal
from engram.buffer.tensordict import TensorDictReplayBuffer, priorities_in
from engram.buffer.window_marks import by_window
from engram.errors import RowError
from engram.members.samplers import OnePerMember
from engram.members.storages import StorageEnsemble, check_ids, naming, routed
from engram.remote.fleet.plans import places_of
from engram.samplers._base import refuse_batch
from engram.samplers.prioritized import rows_of
from engram.types import Traits, Writer
from engram.writers._base import NativeWriter, declared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict

    from engram.buffer.wiring import Wiring
    from engram.members.reading import Member
    from engram.types import Entry, Extent, WritePlan

Rows = TypeVar("Rows", bound="Tensor | TensorDict")


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
        self.dim = None if dim is None else check_count(f"{who}: routing_dim", dim, least=-(1 << 62))

    def members_of(self, data: TensorDict, members: int) -> Tensor:
        """The member of each row of ``data.reshape(-1)``, int64 ``[n]``.

        Raises:
            RuntimeError: nothing says it. KeyError: no such field. TypeError: it has no ints. ValueError: no such member; not one number
            for each row; no such dimension, or one of another size.
        """
        batch = data.batch_size
        if self.key is not None:
            found = find(data, self.key)
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
            raise ValueError(
                f"extend: routing_dim={self.dim}: expected data with that dimension, got batch size {list(batch)}."
            )
        dim = self.dim % len(batch)
        if batch[dim] != members:
            raise ValueError(
                f"extend: routing_dim={self.dim}: expected {members} entries, one for each member, got {batch[dim]} of {list(batch)}."
            )
        shape = [1] * len(batch)
        shape[dim] = members
        return torch.arange(members, device="cpu").reshape(shape).expand(batch).reshape(-1)


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

    def extend(self, data: object, call: str = "extend") -> TensorDict:
        """What ``ReplayBufferEnsemble.extend`` returns."""
        if isinstance(data, list | tuple) and not data:
            data = tensordict_type()({}, [0])
        if not is_tensor_collection(data) or is_tensorclass(data):
            raise TypeError(f"{call}: expected a TensorDict, as its rows are divided, got {type(data).__name__}.")
        transform = self._wiring.transform
        if transform.writes:
            data = cast("TensorDict | None", transform.inv(data.copy()))
        if data is None or not data.batch_size.numel():
            return self._written(torch.empty(0, dtype=torch.int64, device="cpu"), {}, {})
        ids = self._routing.members_of(data, len(self._members))
        flat = data.reshape(-1)
        parts = places_of(ids)
        rows = {number: _at(flat, at) for number, at in parts.items()}
        for number, some in rows.items():
            with naming(number, "Nothing was written."):
                self._check(self._members[number], some, call, alone=len(parts) == 1)
        written: dict[int, Tensor] = {}
        for number, some in rows.items():
            with naming(number, "Members before it have written their rows." if written else ""):
                written[number] = self._members[number].buffer.extend(some)
        return self._written(ids, parts, written)

    def _check(self, member: Member, rows: TensorDict, call: str, *, alone: bool) -> None:
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

    def _written(self, ids: Tensor, parts: dict[int, Tensor], written: dict[int, Tensor]) -> TensorDict:
        """The places of rows: -1 where a member's transforms made other rows of those that it was given."""
        index = torch.full(ids.shape, -1, dtype=torch.int64, device="cpu")
        for number, at in parts.items():
            found = written[number].to("cpu")
            if len(found) == len(at):
                index[at] = found
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
        expected, n = as_numbers(f"{CALL}: generation", generation).to("cpu"), shape.numel()
        if expected.numel() != n:
            raise ValueError(
                f"{CALL}: expected one generation per row, got {list(shape)} rows and {list(expected.shape)} generations."
            )
        if not has_entries(patch):
            raise TypeError(f"{CALL}: patch: expected a dict or TensorDict, got {type(patch).__name__}.")
        entries = dict(cast("dict[str, object]", patch).items())
        versions = isinstance(version, Tensor) and version.numel() == n > 1
        updates = []
        for share in shares:
            some = map_leaves(entries, partial(_of_rows, shape=shape, at=share.at))
            own = share.of(cast("Tensor", version).reshape(n, -1)) if versions else version
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
        return ConditionalUpdateResult(
            updated=updated.reshape(shape),
            version_rejected=None if rejected is None else rejected.reshape(shape),
            generation=numbers.reshape(shape),
        )

    def update_priority(self, index: object, priority: object, generation: Tensor | None) -> None:
        """What ``ReplayBufferEnsemble.update_priority`` does."""
        call = "update_priority"
        info = cast("dict[Entry, Any]", index)
        if priority is None:
            refuse_batch(index, priority)
        if (is_tensor_collection(index) or isinstance(index, dict)) and "buffer_ids" not in info and "index" in info:
            generation = info.get("index_generation", None) if generation is None else generation
            ids, named = routed(info["index"], len(self._members), call)
            both = torch.cat([ids.reshape(-1, 1), named.reshape(ids.numel(), -1)], 1)
            both, priority, generation = by_window(info, both, priority, generation)
            index = {"buffer_ids": both[:, 0], "index": both[:, 1:].squeeze(1)}
        shape, shares = self._shares(index, call)
        given, n = as_numbers(f"{call}: priority", priority), shape.numel()
        if given.numel() not in (1, n):
            raise RuntimeError(f"{call}: expected a priority for each of {n} rows, got {list(given.shape)}.")
        values = given.reshape(-1).expand(n)
        numbers = None if generation is None else rows_of(generation, f"{call}: generation")
        if numbers is not None and numbers.numel() != n:
            raise RuntimeError(f"{call}: generation: expected one per row, {n}, got {numbers.numel()}.")
        for share in shares:
            with share.member.checking():
                share.member.wiring.bound_sampler().check_priority(share.of(values), len(share.at))
        taking = [share for share in shares if share.member.wiring.of_sampler.takes_priorities]
        for share in taking:
            share.check(call)
        for share in taking:
            share.member.buffer.update_priority(share.rows, share.of(values), generation=share.of(numbers))

    def update_tensordict_priority(self, data: TensorDict) -> None:
        """What ``ReplayBufferEnsemble.update_tensordict_priority`` does."""
        taking = [member for member in self._members if member.wiring.of_sampler.takes_priorities]
        if taking:
            buffers = (member.buffer for member in taking if isinstance(member.buffer, TensorDictReplayBuffer))
            key = next((buffer.priority_key for buffer in buffers), "td_error")
            index, priority, generation = priorities_in(data, key, "TensorDictReplayBuffer")
            errors = taking[0].wiring.source.reduced(priority.reshape(data.numel(), -1))
            self.update_priority(index, errors, generation)

    def remove(self, index: object, generation: object) -> int:
        """What ``ReplayBufferEnsemble.remove`` does."""
        call = REMOVE
        shape, shares = self._shares(index, call)
        numbers = None if generation is None else as_numbers(f"{call}: generation", generation).reshape(-1)
        if numbers is not None and len(numbers) != shape.numel():
            raise ValueError(
                f"{call}: expected one generation per row, got {shape.numel()} rows and {len(numbers)} generations."
            )
        for share in shares:
            share.member.check_editable(call)
            with share.member.checking():
                checked_removal(share.member.wiring, share.rows, share.of(numbers))
        return sum(share.member.buffer.remove(share.rows, generation=share.of(numbers)) for share in shares)

    def mark_update(self, index: object) -> None:
        """What ``ReplayBufferEnsemble.mark_update`` does."""
        _, shares = self._shares(index, "mark_update")
        for share in shares:
            share.check("mark_update")
        for share in shares:
            share.member.buffer.mark_update(share.rows)

    def _shares(self, index: object, call: str) -> tuple[torch.Size, list[_Share]]:
        """The shape of an index, and what each of the members has of its rows. Raises as :func:`routed`."""
        ids, rows = routed(index, len(self._members), call)
        rows = rows.reshape(ids.numel(), *rows.shape[ids.ndim :])
        places = places_of(ids.reshape(-1))
        return ids.shape, [_Share(self._members[number], at, _at(rows, at)) for number, at in places.items()]


class _Share(NamedTuple):
    """What a member has of the rows of a call."""

    member: Member
    at: Tensor
    """Where its rows are among those of the call, int64 ``[k]``."""
    rows: Tensor
    """Their numbers in the member."""

    def of(self, values: Tensor | None) -> Tensor | None:
        """Its part of values, one for each row of the call; None stays."""
        return None if values is None else _at(values, self.at)

    def check(self, call: str) -> None:
        """Raise what new priorities of these rows would. Nothing is changed."""
        wiring = self.member.wiring
        with self.member.checking():
            if not wiring.storage.initialized:
                raise RuntimeError(f"{call}: expected rows that were written; nothing was ever written.")
            named = rows_of(wiring.rows_named(self.rows), call)
            outside = named[(named < -1) | (named >= wiring.storage.max_size)]
            if len(outside):
                raise RowError(f"{call}: expected rows in [-1, {wiring.storage.max_size}), got {int(outside[0])}.")


def _at(values: Rows, at: Tensor) -> Rows:
    """Some rows, wherever they lie."""
    return cast("Rows", values[at.to(values.device or "cpu")])


def _of_rows(leaf: object, shape: torch.Size, at: Tensor) -> object:
    """Some rows of a leaf of a patch ``[*shape, ...]``. Raises ``ValueError``: it has another shape."""
    value = as_numbers(f"{CALL}: patch", leaf) if not is_tensor_collection(leaf) else leaf
    if value.shape[: len(shape)] != shape:
        raise ValueError(
            f"{CALL}: patch: expected entries that begin with shape {list(shape)}, got {list(value.shape)}."
        )
    return _at(value.reshape(shape.numel(), *value.shape[len(shape) :]), at)


def _last_of_each(ids: Tensor, index: Tensor) -> Tensor:
    """Whether no later row was written to the same place: bool ``[n]``."""
    last = {place: at for at, place in enumerate(zip(ids.tolist(), index.tolist(), strict=True))}
    kept = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")
    kept[list(last.values())] = True
    return kept


class _Writers(OnePerMember[Writer], NativeWriter):
    """What a buffer asks of the writers of an ensemble."""

    traits = Traits()

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> WritePlan:
        del extent, n, lane, data
        raise self._refused()

    def add(self, data: object = None) -> NoReturn:
        """Refuses: each member writes for itself."""
        del data
        raise self._refused()

    def extend(self, data: object = None) -> NoReturn:
        """Refuses: each member writes for itself."""
        del data
        raise self._refused()

    def _refused(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__}: expected a member to write to: ensemble[i].extend(data), or an ensemble that was made with "
            "routing_key or routing_dim."
        )


class WriterEnsemble(_Writers):
    """The writers of an ensemble, each of which writes to the storage of its member.

    Args:
        *writers: one of each member.

    Raises:
        TypeError: no writers.

    >>> from engram import RoundRobinWriter, WriterEnsemble
    >>> writer = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter(track_generations=True))
    >>> len(writer), writer.tracks_generations
    (2, False)
    """

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        if not writers or not all(isinstance(one, Writer) for one in writers):
            got = [type(one).__name__ for one in writers] or "none"
            raise TypeError(f"{type(self).__name__}: expected writers, got {got}.")
        self._all = writers
        self._placers = tuple(map(declared, writers))

    @property
    def writers(self) -> tuple[Writer, ...]:
        """One of each member."""
        return self._all

    @property
    def tracks_generations(self) -> bool:
        """Whether all of them do."""
        return all(placer.traits.tracks_tickets for placer in self._placers)

    @property
    def write_count(self) -> int:
        """Rows written to all of the storages since each was last emptied."""
        return sum(placer.write_count for placer in self._placers)

    def register_storage(self, storage: object) -> None:
        """Set the storage of each writer that has another one.

        Raises:
            TypeError: no :class:`StorageEnsemble`. ValueError: not a storage for each writer. What a writer raises to refuse its storage.

        >>> from engram import LazyTensorStorage, RoundRobinWriter, StorageEnsemble, WriterEnsemble
        >>> writer = WriterEnsemble(RoundRobinWriter())
        >>> writer.register_storage(StorageEnsemble(LazyTensorStorage(10)))
        >>> writer.write_count
        0
        """
        who = type(self).__name__
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"{who}: expected a StorageEnsemble, got {type(storage).__name__}.")
        if len(storage) != len(self._all):
            raise ValueError(f"{who}: expected {len(self._all)} storages, one for each writer, got {len(storage)}.")
        for number, (placer, one) in enumerate(zip(self._placers, storage.storages, strict=True)):
            if placer._storage is not one:  # noqa: SLF001 - of the family
                with naming(number):
                    placer.register_storage(one)
        super().register_storage(storage)

    def generations_of(self, index: object) -> Tensor:
        """Ticket numbers of rows, int64, of the shape of ``"buffer_ids"``; -1 as each writer says it.

        Args:
            index: what ``extend`` of an ensemble returned, or ``"index"`` of a batch.

        Raises ``TypeError``, ``ValueError``: no such index, or no such member.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, RoundRobinWriter
        >>> member = ReplayBuffer(storage=LazyTensorStorage(100), writer=RoundRobinWriter(track_generations=True))
        >>> _ = member.extend(torch.zeros(3))
        >>> rows = {"buffer_ids": torch.tensor([0, 0]), "index": torch.tensor([2, 50])}
        >>> ReplayBufferEnsemble(member).writer.generations_of(rows).tolist()
        [3, -1]
        """
        ids, rows = routed(index, len(self._all), "generations_of")
        rows = rows.reshape(ids.numel(), *rows.shape[ids.ndim :])
        numbers = torch.full((ids.numel(),), -1, dtype=torch.int64, device="cpu")
        for member, at in places_of(ids.reshape(-1)).items():
            found = self._placers[member].generations_of(_at(rows, at))
            numbers[at] = found.to("cpu").reshape(len(at), -1)[:, 0]
        return numbers.reshape(ids.shape)
