"""The buffers that an ensemble consists of, and what it asks of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from engram.buffer.read_path import ReadPath
from engram.buffer.replay_buffer import ReplayBuffer
from engram.collate import join
from engram.ensembles.refusing import naming
from engram.errors import NoSampleable
from engram.limits import Room
from engram.samplers._base import check_drawable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from tensordict import TensorDict

    from engram.buffer.saving import Saving
    from engram.buffer.wiring import Wiring
    from engram.store import Store
    from engram.types import Entry

#: What stands in a batch's info where a member says nothing.
MISSING = {"priority_weight": 1.0, "index_generation": -1}


class Drawn(NamedTuple):
    """Rows that a member has drawn, before they are put together."""

    columns: list[Tensor]
    rows: Tensor
    info: dict[Entry, Tensor]


class _Raw(ReadPath):
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
        if drawn.rows.ndim == 1 and not 0 < drawn.rows.shape[0] <= rows:
            raise RuntimeError(
                f"sample: expected {rows} rows of {self._wiring.sampler!r}, or fewer, and one at least, got {len(drawn.rows)}."
            )
        return drawn

    def finish(self, columns: object, rows: Tensor | None, info: dict[object, object], return_info: bool) -> Drawn:
        del return_info
        assert rows is not None  # info is asked for
        entries = {
            key: value for key, value in info.items() if isinstance(value, Tensor) and value.shape[:1] == rows.shape[:1]
        }
        return Drawn(columns, rows, entries)  # type: ignore[arg-type] # keys of entries


class Member:
    """A buffer of an ensemble.

    Args:
        number: its place.
        buffer: which the ensemble reads past its ``prefetch``.
    """

    def __init__(self, number: int, buffer: ReplayBuffer) -> None:
        self.number, self.buffer = number, buffer
        self.wiring: Wiring = buffer._wiring  # noqa: SLF001 - of the facade
        self._raw, self._reading = _Raw(self.wiring), ReadPath(self.wiring)

    @property
    def saving(self) -> Saving:
        """What saves it."""
        saving: Saving = self.buffer._saving  # noqa: SLF001 - of the facade
        return saving

    @property
    def ignored(self) -> tuple[str, ...]:
        """Entries of what is written that it drops."""
        ignored: tuple[str, ...] = self.buffer._settings.ignored  # noqa: SLF001 - of the facade
        return ignored

    def checking(self) -> AbstractContextManager[None]:
        """Errors of checks say which member they are of."""
        return naming(self.number, "Nothing was changed.")

    def check_editable(self, call: str) -> None:
        """Raise ``RuntimeError``: its rows must not be changed."""
        with self.checking():
            self.wiring.check_editable(call)

    def check_priorities(self, rows: TensorDict) -> None:
        """Raise for priorities that come along with rows and that its sampler would refuse."""
        key = self.buffer._settings.priority_key  # noqa: SLF001 - of the facade
        if key is not None and self.wiring.of_sampler.prioritized and (priority := rows.get(key, None)) is not None:
            self.wiring.bound_sampler().check_priority(priority, len(rows))

    # ---- drawing -------------------------------------------------------------------------------------------------------

    @property
    def draws_rows(self) -> bool:
        """Whether each row is drawn by itself, so that several parts of a batch can be drawn together."""
        traits = self.wiring.of_sampler
        return not (traits.has_epochs or traits.consumes or traits.draws_windows)

    def check_left(self, rows: int) -> None:
        """Raise ``NoSampleable``, before any row is drawn, where those that are left cannot be so many rows of a batch.

        Of a buffer with limits that is not known: more rows may be written while it waits for them.
        """
        wiring, memory = self.wiring, self.memory
        if not wiring.of_sampler.consumes or memory is None or Room.of(memory, rows) is not None:
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
            return drawn.rows.shape[0]
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
        columns = [torch.cat(column) for column in zip(*(part.columns for part in parts), strict=False)]
        return Drawn(columns, rows, info)

    def cut(self, drawn: Drawn, parts: int) -> list[Drawn]:
        """Parts of one size of what was drawn."""
        if parts == 1:
            return [drawn]
        n = drawn.rows.shape[0] // parts
        storage = self.wiring.storage
        return [
            Drawn(
                storage.some(drawn.columns, slice(begin, begin + n)),
                drawn.rows[begin : begin + n],
                {key: value[begin : begin + n] for key, value in drawn.info.items()},
            )
            for begin in range(0, parts * n, n)
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
    def memory(self) -> Store | None:
        """Where its fields are; None: of a list, or before the first write."""
        memory: Store | None = self.wiring.storage.memory
        return memory


def check_alike(members: Sequence[Member]) -> None:
    """Raise ``KeyError`` or ``RuntimeError``: two have other fields, or rows of another form, dtype or shape.

    Fields that were added to some of them only are no part of their batches.
    """
    first = members[0]
    assert first.memory is not None  # its rows were drawn
    own = first.memory.schema
    for other in members[1:]:
        assert other.memory is not None
        theirs = other.memory.schema
        shared = max(min(len(own.fields), len(theirs.fields)), own.first_fields, theirs.first_fields)
        before, then = own.until(shared), theirs.until(shared)
        if (before.fields, before.structure) == (then.fields, then.structure):
            continue
        names = f"of member {first.number}", f"of member {other.number}"
        some = [one.finished(_none_of(one)) for one in (first, other)]
        join(some, names, lambda batches: batches[0])
        shapes = [f"{field.name} {list(field.shape)}" for field in own.fields]
        others = [f"{field.name} {list(field.shape)}" for field in theirs.fields]
        raise RuntimeError(
            f"sample: expected members with the same rows, got {shapes} in a {own.structure.kind} {names[0]} and {others} in a "
            f"{theirs.structure.kind} {names[1]}. Give them transforms that leave the same fields, or the ensemble a collate_fn."
        )


def _none_of(member: Member) -> Drawn:
    rows = torch.empty(0, dtype=torch.int64, device="cpu")
    return Drawn(member.wiring.storage.read(rows)[0], rows, {})
