"""Batches of rows of any length in the form that one call asks for: how they are laid out, and as many rows as a budget of tokens has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import reduce
from typing import NamedTuple, TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from engram._support import checks, field_paths
from engram._support.retries import Retries
from engram.around import Expander
from engram.buffer import field_updates, output
from engram.buffer.wiring import Wiring
from engram.errors import NoSampleable
from engram.remote.protocol import Sample
from engram.samplers import FilteredSampler, LengthBucketSampler, check_drawable, picked
from engram.samplers.redraw import DrawOverBatch
from engram.storages.ragged import LayoutKind, RaggedLayout
from engram.types import Device, Draw, Entry, Wait

#: How one batch holds ragged fields, and items that it has at most: of each row those of its longest field, or of one that is named.
LayoutOfCall: TypeAlias = LayoutKind | Mapping[str, object] | None
Tokens: TypeAlias = int | Mapping[Entry, int] | None

#: Rows that are drawn first, while nothing is known of their lengths.
_FIRST = 16


class SampleArguments(TypedDict, total=False):
    """Keywords of ``sample``, as it documents them."""

    include_info: bool | None
    device: Device
    timeout: Wait
    layout: LayoutOfCall
    max_tokens: Tokens


class BatchForm(NamedTuple):
    """What one call of ``sample`` asks of a batch of ragged rows."""

    #: None: as the storage says.
    layout: RaggedLayout | None
    #: Tokens; 0: there is no budget.
    most: int
    #: Whose items count; None: of each row those of the longest field.
    field: tuple[str, ...] | None

    @classmethod
    def checked(cls, layout: LayoutOfCall, max_tokens: Tokens) -> BatchForm:
        """Raises ``TypeError``, ``ValueError``: it is none."""
        name, field, most = "sample: max_tokens", None, max_tokens
        if isinstance(most, Mapping):
            if len(most) != 1:
                raise ValueError(
                    f"{name}: expected a number, or a dict of one field and its number, got {len(most)} fields."
                )
            ((key, most),) = most.items()
            field = field_paths.checked_path(key, name)
        laid_out = None if layout is None else RaggedLayout.checked(layout, "sample")
        return cls(laid_out, 0 if most is None else checks.check_count(name, most, "token"), field)

    def asked(self, wiring: Wiring, rows: int) -> Sample:
        """The command to a server, which draws so many rows at most."""
        from engram.remote.protocol import Sample

        layout = self.layout or wiring.storage.ragged.layout
        multiple = layout.multiple if layout.kind == "padded" else 0
        return Sample(rows, [], max_tokens=self.most, tokens_of=[*(self.field or ())], multiple=multiple)

    @classmethod
    def of_command(cls, command: Sample) -> BatchForm:
        """What a command to this server asks."""
        layout = RaggedLayout("padded", multiple=command.multiple) if command.multiple else RaggedLayout("packed")
        return cls(layout, command.max_tokens, tuple(command.tokens_of) or None)

    def of(self, source: output.Source, wiring: Wiring, *, ahead: bool) -> output.Source:
        """The source of batches, for one call of this form. ``ahead``: it prefetches. Raises ``ValueError``: there are none such."""
        if isinstance(source, output.View | field_updates.AfterUpdates):
            around = copy(source)
            around.source = self.of(source.source, wiring, ahead=ahead)
            return around
        storage, instead = wiring.storage, ""
        if storage.initialized and not storage.is_ragged:
            instead = "a buffer with ragged fields, LazyTensorStorage(…, ragged={…}), got one whose rows have one size"
        elif ahead:
            instead = "a buffer without prefetch, whose batches are made before a call asks for them"
        elif self.most and wiring.of_sampler.draws_once and isinstance(wiring.source, FilteredSampler):
            instead = "a FilteredSampler around one that draws with replacement, got an epoch's. Use batch_size"
        elif self.most and (
            wiring.unit_reader
            or wiring.of_sampler.draws_windows
            or isinstance(wiring.source, Expander | LengthBucketSampler)
        ):
            instead = f"a sampler that draws rows, got {wiring.source!r:.80}. Use batch_size"
        elif self.most and storage.memory is not None and storage.memory.bare.limited and not storage.traits.is_remote:
            instead = "a store without limits, which admit a number of rows that is known before. Use batch_size"
        if instead:
            raise ValueError(f"sample: {'max_tokens' if self.most else 'layout'}: expected {instead}.")
        return source.with_form(self)  # type: ignore[attr-defined, no-any-return] # of a ReadPath


class TokenBudget:
    """The tokens of a batch, and those that its rows take.

    Args:
        wiring: of the buffer. Rows were written.
        form: with a budget.
        rows: at most; 0: as many as fit.

    Raises:
        KeyError: no such ragged field.
    """

    def __init__(self, wiring: Wiring, form: BatchForm, rows: int) -> None:
        self._storage, self._store, of = wiring.storage, wiring.storage.store, wiring.of_sampler
        layout = form.layout or self._storage.ragged.layout
        #: The groups of fields of which the longest counts; what divides the length of padded rows, whose padding counts, or 0.
        self._which = self._store.counted_groups(form.field, "sample: max_tokens")
        self._multiple = layout.multiple if layout.kind == "padded" else 0
        self._most, self._most_rows, self.each = form.most, rows or form.most, wiring.source.rows_of_unit
        #: Rows that batches of this form had lately, of which the first draw takes a few more.
        self._lately = wiring.rows_within.get(form, _FIRST)
        #: Whether a row comes once in a batch, by whatever number of draws.
        self._once = not (of.draws_uniformly or of.prioritized or of.draws_once)
        self.rows = torch.empty(0, dtype=torch.int64, device="cpu")
        self._taken = 0  # items, or those of the longest row
        #: Whether a row did not fit; and why the first one is refused.
        self.is_full, self.too_long = False, ""

    @property
    def likely(self) -> int:
        """How many rows more may fit, at least those of one unit; 0: no more are allowed."""
        rows, left = len(self.rows), (self._most_rows - len(self.rows)) // self.each
        used = self._taken * (rows if self._multiple else 1)
        n = math.ceil(rows * (self._most - used) / used) if used else _FIRST + rows
        n += 0 if self._once else n // 4 + 2  # that are not handed out cost nothing
        return 0 if self.is_full else min(left, max(n // self.each, 1)) * self.each

    def looked_at(self, draw: Draw) -> tuple[Draw, NDArray[np.int64], NDArray[np.int64]]:
        """The draw with the tickets that its rows have now, -1 of those that hold another write; which of its units are whole; and the
        tokens of their rows, ``[units, each]``.

        Raises ``WriterStalled``: a row was being written at every try.
        """
        storage, retries, rows = self._storage, Retries(), draw.rows
        while True:
            tickets = storage.tickets_of(rows)
            known = tickets.clone()
            if draw.tickets is not None:
                tickets[storage.writes_of(rows, tickets) != storage.writes_of(rows, draw.tickets)] = -1
            spans, moved = self._store.read_spans(rows, tickets)
            if not moved:
                break
            waits = (known < 0) & ~storage.hold_nothing(rows)
            waits[moved] |= tickets[moved] >= 0
            if not waits.any():
                break
            retries.again(rows, waits.nonzero().flatten().tolist())
        whole = np.flatnonzero((tickets.numpy() >= 0).reshape(-1, self.each).all(1))
        return draw._replace(tickets=tickets), whole, self._tokens(spans).reshape(-1, self.each)[whole]

    def accept(self, draw: Draw) -> tuple[Draw, torch.Tensor]:
        """The draw with the tickets that its rows have now, and positions of those that are handed out, int64: of rows that are there
        still, those before the first that does not fit. Nothing is taken before :meth:`take`.
        """
        draw, units, tokens = self.looked_at(draw)
        if self._once and len(self.rows):
            new = ~np.isin(draw.rows.numpy()[units * self.each], self.rows.numpy())
            units, tokens = units[new], tokens[new]
        count, taken, total = self._fitting(tokens)
        self.is_full = count < len(units)
        if self.is_full and not count and not len(self.rows):
            first = str(draw.rows.reshape(-1, self.each)[units[0]].tolist())[1:-1]
            self.too_long = f"{'row' if self.each == 1 else 'the group of rows'} {first}, which has {int(total[0]):,}, got {self._most:,}"
        places = self.positions(units[:count])
        self._found = picked(draw, places), int(taken[count - 1]) if count else self._taken
        return draw, places

    def _fitting(self, tokens: NDArray[np.int64]) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """How many units fit, and behind each what :attr:`_taken` would be, and the tokens of the batch."""
        if self._multiple:
            taken = np.maximum.accumulate(np.maximum(tokens.max(1, initial=0), self._taken))
            rows = len(self.rows) + np.arange(1, len(tokens) + 1) * self.each
            total = -(-taken // self._multiple) * self._multiple * rows
        else:
            total = taken = self._taken + tokens.sum(1).cumsum()
        return int(np.searchsorted(total, self._most, "right")), taken, total

    def read_uniform(self, key: int) -> tuple[list[torch.Tensor], Draw] | None:
        """The whole batch, of rows that are drawn uniformly, and its columns. None: no row fits, or one has moved.

        The same key gives the same rows, however many are drawn first: longer draws begin with the rows of shorter ones.
        """
        n = min(self._most_rows, math.ceil(self._lately) + 4)
        while True:
            found: tuple[int, list[torch.Tensor], Draw] | None = self._store.sample_within(key, n, self._fit)
            if found is None or found[0] < n or n == self._most_rows:
                return None if found is None else found[1:]
            n = min(2 * n, self._most_rows)

    def _fit(self, spans: Sequence[torch.Tensor]) -> int:
        return self._fitting(self._tokens(spans)[:, None])[0]

    def _tokens(self, spans: Sequence[torch.Tensor]) -> NDArray[np.int64]:
        """Of each row, which the spans of its groups say."""
        each: list[NDArray[np.int32]] = [spans[place].numpy()[:, 2] for place in self._which]
        return reduce(np.maximum, each).astype(np.int64)

    def positions(self, units: NDArray[np.int64]) -> torch.Tensor:
        """Those of the rows of some units of a draw."""
        return torch.from_numpy((units[:, None] * self.each + np.arange(self.each)).reshape(-1))

    def take(self) -> Draw:
        """Take what was accepted last."""
        draw, self._taken = self._found
        self.rows = torch.cat((self.rows, draw.rows)) if len(self.rows) else draw.rows
        return draw


def draw_within(wiring: Wiring, budget: TokenBudget, key: int) -> Draw:
    """Draw rows until the tokens are used up: at least one.

    Raises:
        NoSampleable: there is none. ValueError: the first one has too many tokens. Nothing is drawn then.
        WriterStalled: rows moved at every try.
    """
    source, retries = wiring.source, Retries()
    parts: list[Draw] = []
    logs: list[torch.Tensor] = []
    try:
        while (n := budget.likely) and not (parts and wiring.of_sampler.has_epochs and source.ran_out):
            if not parts:
                check_drawable((extent := wiring.storage.extent()).size)
            draw, places = source.draw_within(extent, n, retries.key_of(key), budget.accept, budget.rows)
            if budget.too_long:
                raise ValueError(
                    f"sample: max_tokens: expected the tokens of {budget.too_long}. Nothing was drawn: raise the budget, or remove what is "
                    "too long with rb.remove, as it would come first again."
                )
            if not len(places) and not parts:  # all were written over meanwhile
                retries.again(draw.rows, [0])
                continue
            if not len(places):  # there are no others
                break
            parts.append(budget.take())
            retries.count += 1  # of the next draw's key
            if isinstance(draw, DrawOverBatch):
                logs.append(draw.logs[places])
    except BaseException as error:
        if not (isinstance(error, NoSampleable) and parts):
            for part in parts:
                source.give_back(part, part.rows[:0])
            raise
    if not parts:
        raise ValueError(f"sample: max_tokens: expected room for the {budget.each} rows of a group.")
    return parts[0] if len(parts) == 1 and not logs else _joined(parts, logs)


def _joined(parts: list[Draw], logs: list[torch.Tensor]) -> Draw:
    """Draws as one. ``logs``: of their weights, which are over the largest."""
    rows, tickets, infos = map(list, zip(*parts, strict=True))
    info = {k: torch.cat([one[k] for one in infos]) if isinstance(v, torch.Tensor) else v for k, v in infos[0].items()}
    if logs:  # weights over the largest of the batch
        weights = torch.cat(logs)
        info["priority_weight"] = (weights - weights.max()).exp().to(info["priority_weight"].dtype)
    return Draw(torch.cat(rows), torch.cat(tickets), info)


def read_within(wiring: Wiring, form: BatchForm, rows: int, key: int) -> tuple[list[torch.Tensor], Draw]:
    """Draw rows until the tokens are used up, ``rows`` at most, and read them. Those that are written over before they were read are
    left out; where all were, others are drawn.

    Raises as :func:`draw_within`. KeyError: no such ragged field.
    """
    source, retries = wiring.source, Retries()
    budget = TokenBudget(wiring, form, rows)
    if wiring.draws_uniformly and (read := budget.read_uniform(key)) is not None:
        wiring.rows_within.note(form, len(read[1].rows))
        return read
    while True:
        draw = draw_within(wiring, budget, retries.key_of(key))
        wiring.rows_within.note(form, len(draw.rows))
        try:
            while len(draw.rows):
                columns, moved = wiring.storage.read(draw.rows, draw.tickets)
                if not moved:
                    if wiring.of_sampler.consumes:
                        source.were_read(draw)
                    return columns, draw
                retries.again(draw.rows, moved)
                draw, units, _ = budget.looked_at(draw)
                source.give_back(draw, whole := budget.positions(units))
                draw = picked(draw, whole)
        except BaseException:
            source.give_back(draw, draw.rows[:0])
            raise
        budget = TokenBudget(wiring, form, rows)
