"""From rows of the storage to what a user gets: draw, read, draw again what moved, collate, transform, pin."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engram import samplers, storages
from engram._support import field_paths, words
from engram._support.retries import Retries
from engram._support.tensordicts import add_fields, is_lazy_stack
from engram.buffer.ragged_batches import BatchForm, read_within
from engram.buffer.window_marks import WindowMarks
from engram.buffer.wiring import Wiring
from engram.buffer.write_path import map_dimensioned
from engram.errors import NoSampleable
from engram.remote.served import Drawn
from engram.samplers.redraw import Redraw
from engram.storages.ragged import RaggedLayout
from engram.store.blocks import Key, ThreadKey
from engram.types import Draw, Entry, Info, Shown


class ReadPath:
    """Draws batches and reads them. All that it keeps is the key of the draw under way, of each thread."""

    #: Whether batches say which rows they hold.
    shows_rows = False
    #: What one call asks of a batch of ragged rows, of which how they are laid out; empty: as the storage says.
    form: BatchForm | None = None
    layout: tuple[RaggedLayout, ...] = ()

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._key = ThreadKey()
        #: Whether it was looked whether a batch has rows several times.
        self.looked = False

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """Draw a batch: what ``ReplayBuffer.sample`` returns."""
        key, wiring = self._key, self._wiring
        if not self.looked:
            self.say_repeated(batch_size)
        if wiring.generator is None:  # draw_key, without a call
            key.draw()
        else:
            key.draw(generator=wiring.generator)
        if wiring.stream:
            key.mix(wiring.stream)
        elif wiring.stream is None:
            wiring.mix(key)
        if wiring.pinning is None or not self.gathers_pinned():
            return self.sample_with(key, batch_size, return_info, timeout)
        with wiring.pinning.gathering():
            return self.sample_with(key, batch_size, return_info, timeout)

    def with_form(self, form: BatchForm) -> ReadPath:
        """The same for one call, whose batch has this form."""
        other = object.__new__(type(self))  # a copy, in a fifth of the time that copy() takes
        vars(other).update(vars(self))
        other.form, other.layout, other.looked = form, () if form.layout is None else (form.layout,), True
        return other

    def _sample_within(self, form: BatchForm, key: Key, rows: int, return_info: bool) -> object:
        """A batch of as many rows as there are tokens for, ``rows`` at most; 0: of any number."""
        wiring, start = self._wiring, perf_counter_ns()
        if wiring.storage.memory is None:
            samplers.check_drawable(0)
        if wiring.storage.traits.is_remote:
            batch: Drawn = wiring.storage.draw_within(key.value, form.asked(wiring, rows))
            wiring.source.ran_out = batch.last
            return self.finish(batch.columns, batch.rows, cast("dict[object, object]", batch.info), return_info)
        return self.waited(self.finish(*self.read_within(form, key, rows), return_info), start)

    def read_within(self, form: BatchForm, key: Key, rows: int) -> tuple[list[Tensor], Tensor, dict[Any, object]]:
        """As :meth:`read`, as many rows as there are tokens for."""
        wiring = self._wiring
        columns, draw = read_within(wiring, form, rows, key.value)
        info = dict(draw.info)
        if wiring.numbers:
            info["index_generation"] = wiring.storage.writes_of(draw.rows, draw.tickets)
        wiring.storage.memory.count_sampled(draw.rows)
        return columns, draw.rows, info

    def say_repeated(self, batch_size: int) -> None:
        """Log a warning where the first batch has more rows than are stored, of a sampler that then draws some several times."""
        storage, of = self._wiring.storage, self._wiring.of_sampler
        if not (of.draws_uniformly or (of.prioritized and not of.draws_windows)) or storage.traits.is_remote:
            self.looked = True
        elif size := len(storage):
            self.looked = True
            if size < batch_size:
                line = (
                    f"sample: a batch of {batch_size:,} rows has some of the {words.count(size, 'stored row')} several times. Write "
                    "more before the first batch."
                )
                storages.announcing.announce(line, level=logging.WARNING)

    def draw_key(self, key: Key) -> None:
        """64 random bits from the generator, and what sets this process apart: all randomness of one draw."""
        wiring = self._wiring
        if wiring.generator is None:
            key.draw()
        else:
            key.draw(generator=wiring.generator)
        if wiring.stream != 0:
            wiring.mix(key)

    def gathers_pinned(self) -> bool:
        """Whether nothing stands between gathering and the user, so that rows are gathered into pinned memory."""
        wiring = self._wiring
        return wiring.pinning is not None and not wiring.transform.reads and not wiring.collates

    def sample_with(self, key: Key, batch_size: int, return_info: bool, timeout: float | None) -> object:
        """Draw with a key, and read. ``timeout``: of the wait for the limits of the store; None: the rows are admitted."""
        wiring, form = self._wiring, self.form
        if form is not None and form.most:
            return self._sample_within(form, key, batch_size, return_info)
        memory = wiring.storage.memory
        if memory is not None and wiring.draws_natively:  # as read, without a call; the store counts the wait
            with_rows, tracks = return_info or self.shows_rows, wiring.of_writer.tracks_tickets
            if timeout is None:
                columns = memory.sample_uniform(key, batch_size, with_rows, tracks)
            else:
                columns = memory.sample_unlimited(key, batch_size, with_rows, tracks)
            if columns is not None:
                info: dict[object, object] = {"index_generation": columns.pop()} if tracks else {}
                return self.finish(columns, columns.pop() if with_rows else None, info, return_info)
        if timeout is not None and (memory is None or memory.bare.limited):
            start = perf_counter_ns()
            draw = partial(self.sample_with, key, batch_size, return_info)
            uses_up = wiring.of_sampler.consumes
            batch = wiring.gate.sampled(draw, wiring.storage, batch_size, timeout, uses_up=uses_up)
            return self.waited(batch, start)
        since = memory.bare.begin_wait() if timeout is not None and memory is not None else 0
        shown: Shown = "beside" if return_info or wiring.transform.reads or wiring.storage.gets else "nothing"
        if self.shows_rows:
            shown = "beside" if wiring.transform.reads or wiring.collates else "within"
        columns, rows, info = self.read(key, batch_size, shown)
        batch = self.finish(columns, rows, info, return_info)
        if since and memory is not None:
            memory.bare.count_wait(since)
        return batch

    def waited(self, batch: object, start: int) -> object:
        """A batch that a call has got, which waited for it since then, by ``perf_counter_ns``."""
        memory = self._wiring.storage.memory
        if memory is not None:
            memory.core.count_wait(start)
        return batch

    def read(self, key: Key, n: int, shown: Shown = "beside") -> tuple[Any, Tensor | None, dict[Any, object]]:
        """Draw with a key, and copy the rows: ``(columns, rows, info)``.

        With ``shown="nothing"`` the rows may be None, and the info need only have what are fields of the batch.
        """
        wiring = self._wiring
        storage, tracks = wiring.storage, wiring.numbers
        if self.form is not None and self.form.most:
            return self.read_within(self.form, key, n)
        if wiring.unit_reader is not None:
            return wiring.unit_reader.sample(storage, key, n, numbered=tracks, shown=shown)
        memory = storage.memory
        if memory is not None:
            if wiring.draws_uniformly:
                columns = memory.sample_uniform(key, n, True, tracks)
                info = {"index_generation": columns.pop()} if tracks else {}
                return columns, columns.pop(), info
            natively = wiring.sample_natively
            if natively is not None and (not memory.reads_apart or wiring.reads_around(memory)):
                return natively(storage, key, n, numbered=tracks, shown=shown)
        return self._draw(n, key.value)

    def finish(self, columns: object, rows: Tensor | None, info: dict[object, object], return_info: bool) -> Any:
        """From rows that were read to what the user gets. ``rows`` ``[*batch]`` may be None where they are not shown."""
        wiring = self._wiring
        data = wiring.storage.batch(columns, None if rows is None else rows.shape, *self.layout)
        if wiring.storage.gets and rows is not None:
            data = wiring.storage.got(wiring.user_index(rows), data)
        computed = wiring.source.computed_keys
        if computed:
            made = cast("dict[Entry, Tensor]", info)
            add_fields(data, {key: made[key].squeeze(-1) if flat else made[key] for key, flat in computed.items()})
        if wiring.collates:
            data = self.collated(data)
        device = None
        if wiring.transform.reads:
            device = getattr(data, "device", None)
            data = self.copied(data, stacked=wiring.collate_fn is None)
            data = self.transformed(data, wiring, None if rows is None else rows.shape, cast("Info", info))
        info.pop(field_paths.WINDOW_ENDS, None)
        if self.shows_rows:
            data = self.attached(data, rows, info)
        sample = (data, self.info(rows, info)) if return_info else data
        return sample if wiring.pinning is None else wiring.pinning(sample, device)

    def transformed(
        self, data: object, wiring: Wiring, shape: tuple[int, ...] | None, info: Mapping[Entry, object]
    ) -> object:
        """A batch as the transforms return it, to which flags say where windows end. ``wiring``: of what was drawn; ``shape``: of rows."""
        windows = wiring.of_sampler.draws_windows or "sequence_id" in info
        kept: Collection[Entry] = info if self.shows_rows else ()
        marks = WindowMarks(wiring, info, shape, kept) if windows and shape is not None else None
        made: object = self._wiring.transform.forward(data if marks is None else marks.set_in(data))
        return made if marks is None else marks.reset_in(made)

    def attached(self, data: object, rows: Any, info: dict[object, object]) -> Any:  # noqa: ARG002 - of batches that show rows
        """The batch with the entries that say which rows it holds."""
        return data

    def info(self, rows: Any, info: dict[object, object]) -> dict[object, object]:
        """What a batch is said to be beside it: ``"index"``, and what the sampler says."""
        wiring = self._wiring
        index: Any = wiring.user_index(rows)
        if wiring.storage.ndim > 1:
            index = tuple(index.unbind(-1))
        elif wiring.of_sampler.draws_windows:
            index = (index,)
        return {"index": index, **info}

    # ---- collating -------------------------------------------------------------------------------------------------------

    def collated(self, data: Any) -> object:
        """A batch of what was gathered: list storages gather a list of items."""
        wiring = self._wiring
        if wiring.collate_fn is not None:
            return wiring.collate_fn(data)
        if wiring.storage.traits.has_fields:
            return data
        stack = wiring.storage.stacked
        return storages.items.stack(data) if stack is None else stack(data)

    def copied(self, data: object, *, stacked: bool) -> Any:
        """Data that transforms may change: a list storage hands out what it keeps, unless it was stacked into something new."""
        if self._wiring.storage.traits.has_fields:
            return data
        if stacked:
            return map_dimensioned(data, lambda x: x.clone() if is_lazy_stack(x) else x)
        return map_dimensioned(data, lambda x: x.copy() if isinstance(x, np.ndarray | np.generic) else x.clone())

    # ---- rows that move --------------------------------------------------------------------------------------------------

    def _draw(self, batch_size: int, key: int) -> tuple[Any, Tensor, dict[Any, object]]:
        """Ask the sampler, read, and draw again what moved meanwhile."""
        wiring = self._wiring
        storage, source, tracks = wiring.storage, wiring.source, wiring.numbers
        extent = storage.extent()
        samplers.check_drawable(extent.size)
        if wiring.of_sampler.draws_windows or source.samples:  # perhaps it has drawn for another buffer since
            source.bind(storage)
        draw = source.draw(extent, batch_size, key)
        chosen = draw.tickets is not None
        if tracks and not chosen:  # so that the generation is that of what was read
            draw = draw._replace(tickets=storage.tickets_of(draw.rows))
        shape = draw.rows.shape
        if len(shape) > 1:  # of a sampler of the user's own
            draw = draw._replace(rows=draw.rows.reshape(-1))
        try:
            columns, moved = storage.read(draw.rows, draw.tickets)
            taken = self._draw_others(draw, columns, moved, key) if moved and wiring.of_sampler.consumes else None
        except BaseException:
            if wiring.of_sampler.consumes:
                source.were_read(draw, failed=True)
            raise
        if wiring.of_sampler.consumes:
            columns, draw = taken or (columns, draw)
            source.were_read(draw)
        elif moved:
            draw = self.read_again(draw, columns, moved, "sample", key=key, chosen=chosen)
        info = dict(draw.info)
        if tracks:
            assert draw.tickets is not None  # they were asked for above
            info["index_generation"] = storage.writes_of(draw.rows, draw.tickets)
        if storage.memory is not None:
            storage.memory.count_sampled(draw.rows)
        if len(shape) > 1 and storage.traits.has_fields:
            return [column.reshape(*shape, *column.shape[1:]) for column in columns], draw.rows.reshape(shape), info
        return columns, draw.rows, info

    def _draw_others(self, draw: Draw, columns: object, moved: list[int], key: int) -> tuple[object, Draw]:
        """Rows that moved, of a sampler that counts what it draws: edited ones are read again, and others take the place of the rest.

        Where none are left, the batch is shorter.

        Raises:
            NoSampleable: no row of the draw is left, and no other one.
            WriterStalled: rows moved at every try.
        """
        storage, source, retries, left_out = self._wiring.storage, self._wiring.source, Retries(), set[int]()
        assert draw.tickets is not None  # a row that was written since was not counted
        rows, tickets, info = draw.rows, draw.tickets, dict(draw.info)  # which become those of others
        while moved:
            retries.again(rows, moved)
            at = torch.tensor(moved, device="cpu")
            now = storage.tickets_of(rows[at])
            edited = storage.writes_of(rows[at], now) == storage.writes_of(rows[at], tickets[at])
            tickets[at[edited]] = now[edited]
            gone = at[~edited & ((now >= 0) | storage.hold_nothing(rows[at]))]
            if len(gone):
                try:
                    fresh = source.draw(storage.extent(), len(gone), retries.key_of(key))
                    at = gone[: len(fresh.rows)]
                    rows[at], tickets[at] = fresh.rows, cast("Tensor", fresh.tickets)
                    for name, value in fresh.info.items():
                        cast("Tensor", info[name])[at] = cast("Tensor", value)
                    left_out.update(gone[len(fresh.rows) :].tolist())
                except NoSampleable:
                    left_out.update(gone.tolist())
                    if len(left_out) == len(rows):
                        raise
            moved = [i for i in moved if i not in left_out]
            if not moved:
                break
            values, still = storage.read(rows[moved], tickets[moved])
            storage.patch(columns, moved, values)
            moved = [moved[i] for i in still]
        if left_out:
            left = [i for i in range(len(rows)) if i not in left_out]
            columns = storage.some(columns, left)
            rows, tickets = rows[left], tickets[left]
            info = {name: cast("Tensor", value)[left] for name, value in info.items()}
        return columns, Draw(rows, tickets, info)

    def read_again(
        self, draw: Draw, columns: object, moved: list[int], call: str, *, key: int | None = None, chosen: bool = False
    ) -> Draw:
        """Replace what was read of rows that moved meanwhile; what was read in the end.

        The same rows are read once more; or, where the sampler named the tickets that they must have (``chosen``), others of its
        choice. Of the former, those that hold nothing any more are replaced by live ones; without a ``key`` they are refused.

        Raises:
            RowError: a row that holds nothing any more, without a ``key``.
            NoSampleable: the buffer was emptied.
            WriterStalled: a row moved at every try.
        """
        storage, tickets = self._wiring.storage, None if draw.tickets is None else draw.tickets.clone()
        redraw = Redraw(storage, draw, self._wiring.source if chosen else None, key, call)
        while moved:
            places, fresh = redraw.again(moved)
            expected = fresh.tickets
            if tickets is not None:
                expected = storage.tickets_of(fresh.rows) if expected is None else expected
                tickets[places] = expected
            values, still = storage.read(fresh.rows, expected)
            again = places.tolist()
            storage.patch(columns, again, values)
            moved = [again[i] for i in still]
        return Draw(redraw.rows, tickets, redraw.info)
