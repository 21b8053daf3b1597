"""The buffers that an ensemble consists of, and how a batch is made of theirs: choose, draw, put together, collate, transform, pin."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from engram._support import checks, field_paths, tensordicts
from engram._support.tensordicts import add_fields, is_tensor_collection, put, wrap
from engram.buffer import read_path, replay_buffer, window_marks
from engram.buffer.saving import Saving
from engram.buffer.wiring import Wiring
from engram.errors import NoSampleable
from engram.format import schema, sizes
from engram.members.components import SamplerEnsemble, naming
from engram.remote.fleet import plans
from engram.samplers._base import check_drawable, key_for
from engram.storages import items
from engram.store import blocks, limits, ragged_rows, store
from engram.types import Entry, Shown

#: What stands in a batch's info where a member says nothing.
MISSING = {"priority_weight": 1.0, "index_generation": -1}


_TOTAL = "The unit's total says how many rows stand for each drawn one: parts of a batch have one size."


class Drawn(NamedTuple):
    """Rows that a member has drawn, before they are put together."""

    columns: list[Tensor]
    rows: Tensor
    info: dict[Entry, Tensor]


class _MemberReadPath(read_path.ReadPath):
    """Draws batches of a member as it would itself, and leaves them as they were read."""

    def drawn(self, key: int, rows: int, timeout: float) -> Drawn:
        """So many rows, or fewer. Raises ``RuntimeError``: none, or more."""
        wiring, own = self._wiring, self._key
        own.set(key)
        memory = wiring.storage.memory
        if memory is not None and wiring.draws_natively:  # sample_with, without its calls
            tracks = wiring.of_writer.tracks_tickets
            columns = memory.sample_unlimited(own, rows, True, tracks)
            if columns is not None:
                info: dict[Entry, Tensor] = {"index_generation": columns.pop()} if tracks else {}
                return Drawn(columns, columns.pop(), info)
        drawn: Drawn = self.sample_with(own, rows, True, timeout)  # type: ignore[assignment] # what finish returns
        most = rows * (1 if wiring.unit is None else wiring.unit.total)
        if drawn.rows.ndim == 1 and not 0 < drawn.rows.shape[0] <= most:
            who, advice = (wiring.sampler, "") if wiring.unit is None else (wiring.unit, f" {_TOTAL}")
            raise RuntimeError(
                f"sample: expected {most} rows of {who!r}, or fewer, and one at least, got {len(drawn.rows)}.{advice}"
            )
        return drawn

    def finish(self, columns: object, rows: Tensor | None, info: dict[object, object], return_info: bool) -> Drawn:  # noqa: ARG002 - the keys tell
        assert rows is not None  # info is asked for
        entries = {k: v for k, v in info.items() if isinstance(v, Tensor) and v.shape[:1] == rows.shape[:1]}
        return Drawn(columns, rows, entries)  # type: ignore[arg-type] # keys of entries


class Member:
    """A buffer of an ensemble.

    Args:
        number: its place.
        buffer: which the ensemble reads past its ``prefetch``.
    """

    def __init__(self, number: int, buffer: replay_buffer.ReplayBuffer) -> None:
        self.number, self.buffer = number, buffer
        self.wiring: Wiring = buffer._wiring  # noqa: SLF001 - of the facade
        self._raw, self._reading = _MemberReadPath(self.wiring), read_path.ReadPath(self.wiring)

    @property
    def saving(self) -> Saving:
        """What saves it."""
        return self.buffer._saving  # noqa: SLF001 - of the facade

    @property
    def ignored(self) -> tuple[str, ...]:
        """Entries of what is written that it drops."""
        return self.buffer._settings.ignored  # noqa: SLF001 - of the facade

    def checking(self) -> AbstractContextManager[None]:
        """Errors of checks say which member they are of."""
        return naming(self.number, "Nothing was changed.")

    def check_editable(self, call: str) -> None:
        """Raise ``RuntimeError``: its rows must not be changed."""
        with self.checking():
            self.wiring.check_editable(call)

    def check_priorities(self, rows: tensordicts.TensorDict) -> None:
        """Raise for priorities that come along with rows and that its sampler would refuse."""
        key = self.buffer._settings.priority_key  # noqa: SLF001 - of the facade
        if key is not None and self.wiring.of_sampler.prioritized and (priority := rows.get(key, None)) is not None:
            self.wiring.bound_sampler().check_priority(priority, len(rows))

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def check_left(self, rows: int) -> None:
        """Raise ``NoSampleable``, before any row is drawn, where those that are left cannot be so many rows of a batch.

        Of a buffer with limits that is not known: more rows may be written while it waits for them.
        """
        wiring, memory = self.wiring, self.memory
        if not wiring.of_sampler.consumes or memory is None or limits.LimitWait.of(memory, rows) is not None:
            return
        source = wiring.bound_sampler()
        if source.draws_of_a_row is None:
            return
        left = source.drawable(wiring.storage) * source.draws_of_a_row
        if left < rows:
            with naming(self.number):
                check_drawable(len(wiring.storage))
                raise NoSampleable(
                    f"sample: expected {rows} rows for a batch, got {left} that are left to draw. Add data before sampling, or draw fewer."
                )

    def draw(self, key: int, rows: int, timeout: float) -> Drawn:
        """So many rows. Where its sampler comes to the end of an epoch it goes on with the next one.

        Raises:
            RuntimeError: it gives other rows than were asked for, as windows that are cut are. What drawing raises, with its number.
        """
        try:
            if not self.wiring.gate.samples:
                self.wiring.gate.check_open("sample")
            drawn = self._raw.drawn(key, rows, timeout)
            if self.wiring.draws_uniformly:  # never fewer
                return drawn
            parts, missing = [drawn], rows - self._rows_of(drawn)
            if missing and self.wiring.of_sampler.draws_windows and not self.wiring.of_sampler.has_epochs:
                self._refuse(rows, rows - missing)
            while missing:
                key = (key + 0x9E3779B97F4A7C15) & ((1 << 63) - 1)
                parts.append(self._raw.drawn(key, missing, timeout))
                missing -= self._rows_of(parts[-1])
                if missing < 0:
                    self._refuse(rows, rows - missing)
        except Exception as error:
            error.add_note(f"Raised by member {self.number} of the ensemble.")
            raise
        return drawn if len(parts) == 1 else self._together(parts)

    def _rows_of(self, drawn: Drawn) -> int:
        """How many rows of a batch size a draw is."""
        if drawn.rows.ndim == 1:
            return drawn.rows.shape[0] // (1 if self.wiring.unit is None else self.wiring.unit.total)
        return drawn.rows.shape[0] * (self.wiring.source.rows_together()[1] or 1)

    def _refuse(self, rows: int, got: int) -> NoReturn:
        raise RuntimeError(
            f"sample: expected {rows} rows of {self.wiring.sampler!r}, as parts of a batch have one size, got {got}. Draw windows of one "
            "length: strict_length=True or pad_output=True."
        )

    def _together(self, parts: Sequence[Drawn]) -> Drawn:
        storage, first = self.wiring.storage, parts[0]
        info = {key: torch.cat([part.info[key] for part in parts]) for key in first.info}
        rows = torch.cat([part.rows for part in parts])
        if not storage.traits.has_fields:
            return Drawn([item for part in parts for item in part.columns], rows, info)
        # A field may have been added between two parts.
        columns = [ragged_rows.joined(column) for column in zip(*(part.columns for part in parts), strict=False)]
        return Drawn(columns, rows, info)

    def cut(self, drawn: Drawn, parts: int) -> list[Drawn]:
        """Parts of one size of what was drawn."""
        if parts == 1:
            return [drawn]
        n = drawn.rows.shape[0] // parts
        storage = self.wiring.storage
        each = (slice(begin, begin + n) for begin in range(0, parts * n, n))
        return [
            Drawn(storage.some(drawn.columns, of), drawn.rows[of], {key: it[of] for key, it in drawn.info.items()})
            for of in each
        ]

    def finished(self, drawn: Drawn) -> object:
        """A part of a batch as the member itself hands out a batch: collated, and through its transforms."""
        with naming(self.number):
            return self._reading.finish(drawn.columns, drawn.rows, dict(drawn.info.items()), False)

    # ---- what it is like -----------------------------------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        """Whether its batches are just what was read."""
        wiring = self.wiring
        return not (wiring.transform.reads or wiring.collates or wiring.storage.gets or wiring.pinning is not None)

    @property
    def memory(self) -> store.Store | None:
        """Where its fields are; None: of a list, or before the first write."""
        return cast("store.Store | None", self.wiring.storage.memory)


def check_alike(members: Sequence[Member]) -> None:
    """Raise ``KeyError`` or ``RuntimeError``: two have other fields, or rows of another form, dtype or shape.

    Fields that were added to some of them only are no part of their batches.
    """
    first = members[0]
    assert first.memory is not None  # its rows were drawn
    own = sizes.without_rings(first.memory.schema)
    for other in members[1:]:
        assert other.memory is not None
        other_schema = sizes.without_rings(other.memory.schema)
        shared = max(min(len(own.fields), len(other_schema.fields)), own.first_fields, other_schema.first_fields)
        before, then = own.until(shared), other_schema.until(shared)
        if (before.fields, before.structure) == (then.fields, then.structure):
            continue
        names = f"of member {first.number}", f"of member {other.number}"
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        some = [one.finished(Drawn(one.wiring.storage.read(none)[0], none, {})) for one in (first, other)]
        items.join(some, names, lambda batches: batches[0])
        shapes = [f"{field.name} {list(field.shape)}" for field in own.fields]
        others = [f"{field.name} {list(field.shape)}" for field in other_schema.fields]
        raise RuntimeError(
            f"sample: expected members with the same rows, got {shapes} in a {own.structure.kind} {names[0]} and {others} in a "
            f"{other_schema.structure.kind} {names[1]}. Give them transforms that leave the same fields, or the ensemble a collate_fn."
        )


#: What a batch is said to be, beside which rows it has.
_INDEX, _IDS = ("index", "index"), ("index", "buffer_ids")


class _Part(NamedTuple):
    """The rows that a member has drawn, and the parts of the batch that they are."""

    member: Member
    places: list[int]
    drawn: Drawn


class _Parts(NamedTuple):
    """The parts of a batch, those of one member together."""

    parts: list[_Part]
    total: int
    #: Of the rows of one of them.
    shape: tuple[int, ...]
    #: Which of them, one behind the other, comes at each place; None: they are in order.
    order: Tensor | None

    @classmethod
    def of(cls, parts: list[_Part]) -> _Parts:
        """Raises ``RuntimeError``: they have several shapes."""
        shapes = [(part.drawn.rows.shape[0] // len(part.places), *part.drawn.rows.shape[1:]) for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            got = [f"{list(shape)} of member {part.member.number}" for part, shape in zip(parts, shapes, strict=True)]
            raise RuntimeError(
                f"sample: expected parts of one shape, got {', '.join(dict.fromkeys(got))}. Give the members samplers that draw the same."
            )
        places = [at for part in parts for at in part.places]
        order = sorted(range(len(places)), key=places.__getitem__)
        in_order = order == list(range(len(places)))
        return cls(parts, len(places), shapes[0], None if in_order else torch.tensor(order, device="cpu"))

    @property
    def flat(self) -> bool:
        """Whether the rows of all parts are in one dimension: those of ragged fields have no others."""
        return bool(self.parts[0].member.wiring.storage.is_ragged)

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Tensors of each part, ``[*batch, ...]``."""
        joined = plans.joined(values, self.order, self.total)
        return joined if not self.flat or ragged_rows.items_in(joined) is not None else joined.flatten(0, 1)


#: Parts of a batch, their members ``[parts]``, and what the batch is said to be.
_Raw: TypeAlias = "tuple[_Parts, Tensor, dict[Entry, Tensor]]"


class EnsembleReadPath(read_path.ReadPath):
    """Draws batches of several members. It keeps which of them were found to have the same fields."""

    def __init__(self, wiring: Wiring, members: Sequence[Member]) -> None:
        super().__init__(wiring)
        self._members = members
        #: Schemas of rows that are of one form.
        self._alike: tuple[schema.Schema | None, ...] = ()

    def gathers_pinned(self) -> bool:
        return False  # parts are put together first

    def sample_with(self, key: blocks.Key, batch_size: int, return_info: bool, timeout: float | None) -> object:
        raw = self._drawn(key.value, batch_size, limits.WAIT_S if timeout is None else timeout)
        return self.finish(*raw, return_info)

    def read(self, key: blocks.Key, n: int, shown: Shown = "beside") -> _Raw:  # type: ignore[override]  # noqa: ARG002 - it joins parts, not columns
        """As of a buffer; for batches ahead, which do not wait for the limits of members."""
        return self._drawn(key.value, n, 0.0)

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def _drawn(self, key: int, n: int, timeout: float) -> _Raw:
        """What members have drawn, the member of each part ``[parts]``, and what the batch is said to be."""
        sampler: SamplerEnsemble = self._wiring.sampler
        rows = sampler.rows_of_part(n)
        ids = sampler.chosen(key, rows, [(member.wiring.source, member.wiring.storage) for member in self._members])
        for number in dict.fromkeys(ids):
            self._members[number].check_left(rows * ids.count(number))
        parts = []
        for number in sorted(set(ids)):
            member, places = self._members[number], [at for at, one in enumerate(ids) if one == number]
            of = member.wiring.of_sampler
            apart = of.has_epochs or of.consumes or of.draws_windows or member.wiring.unit is not None
            if len(places) == 1 or not apart:  # each row is drawn by itself
                drawn = member.draw(plans.key_of(key, number, places[0]), rows * len(places), timeout)
                parts.append(_Part(member, places, drawn))
            else:
                parts += [_Part(member, [k], member.draw(plans.key_of(key, number, k), rows, timeout)) for k in places]
        batch = _Parts.of(parts)
        return batch, torch.tensor(ids, device="cpu"), self._info_of(batch)

    def _info_of(self, batch: _Parts) -> dict[Entry, Tensor]:
        """The entries of a batch's info, ``[parts, rows, ...]``: those that all members have, and :data:`MISSING` ones."""
        parts = batch.parts
        index = [part.member.wiring.user_index(part.drawn.rows) for part in parts]
        if any(one.ndim != index[0].ndim for one in index):
            raise RuntimeError("sample: expected members with the same ndim, got several. Sample from each.")
        info: dict[Entry, Tensor] = {_INDEX: batch.joined(index)}
        for key in dict.fromkeys([key for part in parts for key in part.drawn.info]):
            found = [(part, part.drawn.info.get(key)) for part in parts]
            values = [value for _, value in found if value is not None]
            if len(values) < len(found) and key in MISSING:
                like, default = values[0], MISSING[str(key)]
                values = [
                    like.new_full((len(part.drawn.rows), *like.shape[1:]), default) if value is None else value
                    for part, value in found
                ]
            if len(values) == len(found):
                info[key] = batch.joined(values)
        return info

    # ---- putting together ----------------------------------------------------------------------------------------------

    def finish(self, batch: _Parts, rows: Tensor, info: dict[Entry, Tensor], return_info: bool) -> object:  # type: ignore[override]
        """``rows``: the members of the parts."""
        wiring, parts = self._wiring, batch.parts
        computed = parts[0].member.wiring.source.computed_keys
        data: object
        if wiring.collate_fn is None and self._are_alike(parts):
            data = self._gathered(batch)
            if computed:
                add_fields(data, {key: info[key].squeeze(-1) if flat else info[key] for key, flat in computed.items()})
        else:
            data = self._collated(parts, rows)
            computed = {key: flat for part in parts for key, flat in part.member.wiring.source.computed_keys.items()}
        if wiring.transform.reads:
            shape = tuple(_lead(info[_INDEX], self._members))
            data = self.transformed(data, parts[0].member.wiring, shape, info)
        info.pop(field_paths.WINDOW_ENDS, None)
        if is_tensor_collection(data):
            data = self._attached(data, {key: value for key, value in info.items() if key not in computed}, rows)
        sample = (data, self.info(rows, info)) if return_info else data
        return sample if wiring.pinning is None else wiring.pinning(sample, None)

    def _are_alike(self, parts: Sequence[_Part]) -> bool:
        """Whether rows of members can be gathered into one block: raises as :func:`check_alike` if they have other fields."""
        keys = parts[0].member.wiring.source.computed_keys
        for part in parts:
            member = part.member
            if not member.is_plain or member.wiring.source.computed_keys != keys:
                return False
        if member.wiring.storage.is_ragged and not all(one.is_plain for one in self._members):
            return False  # whichever are drawn
        schemas = tuple([None if member.memory is None else member.memory.schema for member in self._members])
        if schemas != self._alike:
            check_alike([member for member in self._members if member.is_plain and member.memory is not None])
            self._alike = schemas
        return True

    def _gathered(self, batch: _Parts) -> object:
        # A field may have been added between two parts.
        fields = zip(*[part.drawn.columns for part in batch.parts], strict=False)
        columns, (rows, *others) = [batch.joined(field) for field in fields], batch.shape
        shape = (batch.total * rows, *others) if batch.flat else (batch.total, *batch.shape)
        return batch.parts[0].member.wiring.storage.batch(columns, shape)

    def _collated(self, parts: Sequence[_Part], ids: Tensor) -> object:
        made: dict[int, object] = {}
        for part in parts:
            for place, drawn in zip(part.places, part.member.cut(part.drawn, len(part.places)), strict=True):
                made[place] = part.member.finished(drawn)
        chunks = [made[place] for place in range(len(ids))]
        how = self._wiring.collate_fn
        return collated(chunks, [self._members[number] for number in ids.tolist()]) if how is None else how(chunks)

    def _attached(self, data: tensordicts.TensorDict, info: dict[Entry, Tensor], ids: Tensor) -> object:
        lead, named = self._named(info, ids)
        if "index" in data.keys():  # noqa: SIM118 - TensorDicts compare values with "in"
            data = data.exclude("index")
        window_marks.attach(data, tuple(lead), {_INDEX: info.pop(_INDEX), _IDS: named, **info})
        return data

    def _named(self, info: dict[Entry, Tensor], ids: Tensor) -> tuple[torch.Size, Tensor]:
        """The batch dimensions, and the member of each row."""
        lead = _lead(info[_INDEX], self._members)
        each = ids.repeat_interleave(lead[0] // len(ids))  # 1, unless the rows of all parts are in one dimension
        return lead, each.reshape(-1, *(1,) * (len(lead) - 1)).expand(lead)

    def info(self, rows: Tensor, info: dict[Entry, Tensor]) -> tensordicts.TensorDict:  # type: ignore[override]
        """A TensorDict ``[parts, rows]``."""
        lead, named = self._named(info, rows)
        both = wrap({"index": info[_INDEX], "buffer_ids": named}, lead, None)
        made = wrap({"index": both}, lead, None)
        put(made, {key: value for key, value in info.items() if key != _INDEX})
        return made


def concatenated(parts: Sequence[tuple[Member, int]]) -> object:
    """Rows of members, so many of each, as one batch of one dimension. Ragged fields are laid out as in the first one.

    Raises as :func:`check_alike`. RuntimeError: a member adds to what it has read, or changes it. What drawing raises.
    """
    keys = [key_for(it.wiring.storage, generator=it.wiring.generator) for it, _ in parts]
    drawn = [member.draw(key.value, n, limits.WAIT_S) for key, (member, n) in zip(keys, parts, strict=True)]
    check_alike([member for member, _ in parts])
    if not all(member.is_plain and not member.wiring.source.computed_keys for member, _ in parts):
        raise RuntimeError(
            "sample: expected buffers whose batches are what was read, to join ragged fields, got one with transforms, expanders or "
            "functions of its own. Give transforms to the buffer that joins: transform=."
        )
    columns = [ragged_rows.joined(column) for column in zip(*(part.columns for part in drawn), strict=False)]
    return parts[0][0].wiring.storage.batch(columns, (sum(len(part.rows) for part in drawn),))


def collated(chunks: Sequence[object], members: Sequence[Member]) -> object:
    """Parts of a batch on top of each other: ``[parts, ...]``. Of TensorDicts whose shapes differ a lazy stack.

    Raises:
        KeyError: other fields. RuntimeError: other dtypes, or other shapes of tensors; ragged fields. TypeError: they are no tensors.
    """
    if any(member.wiring.storage.is_ragged for member in members):
        raise RuntimeError(
            "sample: an ensemble: expected parts of one shape, which can be stacked, got ragged fields. Give transforms and functions of "
            "members to the ensemble, which joins what members read, or pass it a collate_fn. Read rows of one member: rb[i, rows]."
        )
    owners = [f"of member {member.number}" for member in members]
    if all(map(is_tensor_collection, chunks)):
        items.join(chunks, owners, lambda leaves: leaves[0])  # checks them
        return items.stack(list(chunks))
    return items.join(chunks, owners, _stack)


def _stack(leaves: list[Tensor]) -> Tensor:
    for leaf in leaves:
        checks.check_type("sample: parts", leaf, Tensor, "tensors", "Pass collate_fn= to the ensemble.")
    return torch.stack(leaves)


def _lead(index: Tensor, members: Sequence[Member]) -> torch.Size:
    """The batch dimensions of an index: with ``ndim > 1`` it has coordinates behind them."""
    return index.shape[:-1] if members[0].wiring.storage.ndim > 1 else index.shape
