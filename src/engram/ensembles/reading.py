"""From members to a batch of an ensemble: choose, draw, put together, collate, transform, pin."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from engram import collate
from engram._tensordict import add_fields, is_plain_tensordict, is_tensor_collection, put, wrap
from engram.buffer.read_path import ReadPath
from engram.buffer.tensordict import attach
from engram.ensembles.members import MISSING, Drawn, check_alike
from engram.fleet import plans
from engram.limits import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict

    from engram.buffer.wiring import Wiring
    from engram.ensembles.members import Member
    from engram.ensembles.samplers import SamplerEnsemble
    from engram.store import Key, Store
    from engram.types import Entry, Shown

#: What a batch is said to be, beside which rows it has.
_INDEX, _IDS = ("index", "index"), ("index", "buffer_ids")


class _Part(NamedTuple):
    """What a member has drawn, and of which parts of the batch it is, in order."""

    member: Member
    places: list[int]
    drawn: Drawn


#: Parts of a batch, their members ``[parts]``, and what the batch is said to be.
_Raw: TypeAlias = "tuple[list[_Part], Tensor, dict[Entry, Tensor]]"


class EnsembleReadPath(ReadPath):
    """Draws batches of several members. It keeps which of them were found to have the same fields."""

    def __init__(self, wiring: Wiring, members: Sequence[Member]) -> None:
        super().__init__(wiring)
        self._members = members
        #: Stores whose rows are of one form.
        self._alike: tuple[Store | None, ...] = ()

    def gathers_pinned(self) -> bool:
        return False  # parts are put together first

    def sample_with(self, key: Key, batch_size: int, return_info: bool, timeout: float | None) -> object:
        raw = self._drawn(key.value, batch_size, WAIT_S if timeout is None else timeout)
        return self._finished(*raw, return_info=return_info)

    def read(self, key: Key, n: int, shown: Shown = "beside", *, recorded: bool = False) -> _Raw:  # type: ignore[override] # parts in place of columns
        """As of a buffer; for batches ahead, which do not wait for the limits of members."""
        del shown, recorded
        return self._drawn(key.value, n, 0.0)

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def _drawn(self, key: int, n: int, timeout: float) -> _Raw:
        """What members have drawn, the member of each part ``[parts]``, and what the batch is said to be."""
        sampler: SamplerEnsemble = self._wiring.sampler
        rows = sampler.choice.rows_of_part(n)
        ids = sampler.choice.chosen(
            key, rows, [(member.wiring.source, member.wiring.storage) for member in self._members]
        )
        parts = []
        for number in sorted(set(ids)):
            member, places = self._members[number], [at for at, one in enumerate(ids) if one == number]
            if member.draws_rows:
                drawn = member.draw(plans.key_of(key, number, 0), rows * len(places), timeout)
                parts.append(_Part(member, places, drawn))
            else:
                parts += [
                    _Part(member, [at], member.draw(plans.key_of(key, number, at), rows, timeout)) for at in places
                ]
        return parts, torch.tensor(ids, device="cpu"), self._said(parts)

    def _said(self, parts: Sequence[_Part]) -> dict[Entry, Tensor]:
        """The entries of a batch's info, ``[parts, rows, ...]``: those that all members have, and :data:`MISSING` ones."""
        shapes = {_shape_of(part.drawn.rows, len(part.places)) for part in parts}
        if len(shapes) > 1:
            got = [
                f"{list(_shape_of(part.drawn.rows, len(part.places)))} of member {part.member.number}" for part in parts
            ]
            raise RuntimeError(
                f"sample: expected parts of one shape, got {', '.join(dict.fromkeys(got))}. Give the members samplers that draw the same."
            )
        order, places = _order(parts)
        index = [part.member.wiring.user_index(part.drawn.rows) for part in parts]
        if len({one.shape[1:] for one in index}) > 1:
            raise RuntimeError(
                "sample: expected members with the same ndim, got several. Sample from each of them by itself."
            )
        said: dict[Entry, Tensor] = {_INDEX: _joined(index, order, places)}
        for key in dict.fromkeys(key for part in parts for key in part.drawn.info):
            values = [part.drawn.info.get(key) for part in parts]
            if all(value is not None for value in values):
                said[key] = _joined([value for value in values if value is not None], order, places)
            elif key in MISSING:
                like = next(value for value in values if value is not None)
                filled = [
                    like.new_full((len(part.drawn.rows), *like.shape[1:]), MISSING[str(key)])
                    if value is None
                    else value
                    for part, value in zip(parts, values, strict=True)
                ]
                said[key] = _joined(filled, order, places)
        return said

    # ---- putting together ----------------------------------------------------------------------------------------------

    def finish(self, columns: object, rows: Tensor | None, info: dict[object, object], return_info: bool) -> object:
        """``columns``: the parts. ``rows``: their members."""
        raw = cast("_Raw", (columns, rows, info))
        return self._finished(*raw, return_info=return_info)

    def _finished(self, parts: list[_Part], rows: Tensor, info: dict[Entry, Tensor], *, return_info: bool) -> object:
        wiring = self._wiring
        data: object
        computed: dict[Entry, bool] = {}
        plain = wiring.collate_fn is None and all(part.member.is_plain for part in parts)
        if plain and self._are_alike([part.member for part in parts]):
            data = self._gathered(parts)
            computed = dict(parts[0].member.wiring.source.computed_keys)
            if computed:
                add_fields(data, {key: info[key].squeeze(-1) if flat else info[key] for key, flat in computed.items()})
        else:
            data = self._collated(parts, rows)
        for part in parts:
            computed |= part.member.wiring.source.computed_keys
        if wiring.transform.reads:
            data = wiring.transform.forward(data)
        if is_tensor_collection(data):
            data = self._attached(data, {key: value for key, value in info.items() if key not in computed}, rows)
        sample = (data, self._info(rows, info)) if return_info else data
        return sample if wiring.pinning is None else wiring.pinning(sample, None)

    def _are_alike(self, chosen: Sequence[Member]) -> bool:
        """Whether rows of members can be gathered into one block: raises as :func:`check_alike` if they have other fields."""
        members = [member for member in self._members if member.is_plain and member.memory is not None]
        stores = tuple(member.memory for member in members)
        if stores != self._alike:
            check_alike(members)
            self._alike = stores
        keys = chosen[0].wiring.source.computed_keys
        return all(member.wiring.source.computed_keys == keys for member in chosen)

    def _gathered(self, parts: Sequence[_Part]) -> object:
        order, places = _order(parts)
        fields = zip(*(part.drawn.columns for part in parts), strict=True)
        columns = [_joined(field, order, places) for field in fields]
        shape = (places, *_shape_of(parts[0].drawn.rows, len(parts[0].places)))
        return parts[0].member.wiring.storage.batch(columns, shape)

    def _collated(self, parts: Sequence[_Part], ids: Tensor) -> object:
        made: dict[int, object] = {}
        for part in parts:
            for place, drawn in zip(part.places, part.member.cut(part.drawn, len(part.places)), strict=True):
                made[place] = part.member.finished(drawn)
        chunks = [made[place] for place in range(len(ids))]
        how = self._wiring.collate_fn
        return collated(chunks, ids.tolist()) if how is None else how(chunks)

    def _attached(self, data: TensorDict, info: dict[Entry, Tensor], ids: Tensor) -> object:
        index = info.pop(_INDEX)
        lead = _lead(index, self._members)
        named = ids.reshape(-1, *(1,) * (len(lead) - 1)).expand(lead)
        if is_plain_tensordict(data) and data.batch_size == lead and not data.is_locked:
            both = wrap({"index": index, "buffer_ids": named}, data.batch_size, data.device)
            put(data, info)
            put(data, {"index": both})
            return data
        if "index" in data.keys():  # noqa: SIM118 - TensorDicts compare values with "in"
            data = data.exclude("index")
        entries: dict[object, object] = {_INDEX: index, _IDS: named}
        entries.update(info.items())
        attach(data, tuple(lead), entries)
        return data

    def info(self, rows: object, info: dict[object, object]) -> dict[object, object]:
        """A TensorDict ``[parts, rows]``."""
        made: object = self._info(*cast("tuple[Tensor, dict[Entry, Tensor]]", (rows, info)))
        return cast("dict[object, object]", made)

    def _info(self, rows: Tensor, info: dict[Entry, Tensor]) -> TensorDict:
        index = info[_INDEX]
        lead = _lead(index, self._members)
        named = rows.reshape(-1, *(1,) * (len(lead) - 1)).expand(lead)
        both = wrap({"index": index, "buffer_ids": named}, torch.Size(lead), None)
        made = wrap({"index": both}, torch.Size(lead), None)
        put(made, {key: value for key, value in info.items() if key != _INDEX})
        return made


def collated(chunks: Sequence[object], ids: Sequence[int]) -> object:
    """Parts of a batch on top of each other: ``[parts, ...]``. Of TensorDicts whose shapes differ a lazy stack.

    Raises:
        KeyError: other fields. RuntimeError: other dtypes, or other shapes of tensors. TypeError: they are no tensors.
    """
    owners = [f"of member {member}" for member in ids]
    if all(map(is_tensor_collection, chunks)):
        collate.join(chunks, owners, lambda leaves: leaves[0])  # checks them
        return collate.stack(list(chunks))
    return collate.join(chunks, owners, _stack)


def _stack(leaves: list[Tensor]) -> Tensor:
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(
            f"sample: expected parts of tensors, got {type(leaves[0]).__name__}. Pass collate_fn= to the ensemble."
        )
    return torch.stack(leaves)


def _shape_of(rows: Tensor, parts: int) -> tuple[int, ...]:
    """Of the rows of one of so many parts."""
    return (rows.shape[0] // parts, *rows.shape[1:])


def _order(parts: Sequence[_Part]) -> tuple[Tensor | None, int]:
    """Which of all parts, one behind the other, comes at each place; None: they are in order. And how many there are."""
    places = [at for part in parts for at in part.places]
    if all(at == place for at, place in enumerate(places)):
        return None, len(places)
    order = [0] * len(places)
    for at, place in enumerate(places):
        order[place] = at
    return torch.tensor(order, device="cpu"), len(places)


def _joined(values: Sequence[Tensor], order: Tensor | None, parts: int) -> Tensor:
    """Tensors one behind the other, ``[parts, rows, ...]``, in an order of the parts."""
    joined = values[0] if len(values) == 1 else torch.cat(list(values))
    joined = joined.view(parts, joined.shape[0] // parts, *joined.shape[1:])
    return joined if order is None else joined.index_select(0, order)


def _lead(index: Tensor, members: Sequence[Member]) -> torch.Size:
    """The batch dimensions of an index: with ``ndim > 1`` it has coordinates behind them."""
    return index.shape[:-1] if members[0].wiring.storage.ndim > 1 else index.shape
