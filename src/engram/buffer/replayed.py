"""The batches of a sampling log, again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram._checks import check_count
from engram.around import Expander
from engram.buffer.drawn import (
    NUMBERS,
    Drawn,
    described,
    expanders_of,
    form_of,
    key_of,
    nbytes_of,
    says_tickets,
    tensor_of,
)
from engram.buffer.output import View
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.draws import BATCH, FORM, Batch, Form, Records
from engram.format.files import Descriptor
from engram.format.strict import decode
from engram.retries import IN_A_ROW
from engram.types import Draw

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.buffer.wiring import Wiring
    from engram.format.draws import Entry, Record
    from engram.types import Info


class ReplayedDraw(NamedTuple):
    """A batch of a log.

    >>> import tempfile, torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, SamplingLog, replay_draws
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend(torch.arange(100))
    >>> path = tempfile.mkdtemp() + "/draws.log"
    >>> with SamplingLog(path, rb):
    ...     batch = rb.sample()
    >>> drawn = next(replay_draws(path, rb))
    >>> drawn.number, drawn.state, torch.equal(drawn.batch, batch)
    (0, 'same', True)
    >>> _ = rb.extend(torch.zeros(100, dtype=torch.int64))  # overwrites all rows
    >>> drawn = next(replay_draws(path, rb))
    >>> drawn.state, drawn.batch, drawn.rows_gone
    ('gone', None, 4)
    """

    number: int
    """Which one of the log, from 0 on."""
    key: int
    """64 bits, from which the draw followed."""
    batch_size: int
    """That was asked for."""
    state: Literal["same", "gone", "different"]
    """``"same"``: bit for bit what was read then. ``"gone"``: rows of it were overwritten, or were never here. ``"different"``: all rows
    are here, but what is read of them is something else: a row was changed in place, or a step around it is another one or gone."""
    batch: object
    """As ``sample`` returned it, through collate function and transforms; None unless it is the same."""
    info: dict[object, object] | None
    """As ``sample(return_info=True)`` returns it; None unless the batch is the same."""
    rows_gone: int
    """How many rows of it are gone."""


class DrawReplay:
    """The batches of a log, in order: an iterator, which counts what became of them. See :func:`replay_draws`.

    >>> import tempfile, torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, SamplingLog, replay_draws
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend(torch.arange(100))
    >>> path = tempfile.mkdtemp() + "/draws.log"
    >>> with SamplingLog(path, rb):
    ...     batches = [rb.sample() for _ in range(3)]
    >>> replay = replay_draws(path, rb)
    >>> all(torch.equal(again.batch, batch) for again, batch in zip(replay, batches))
    True
    >>> replay
    DrawReplay(same=3, gone=0, different=0, rows=12, rows_gone=0)
    """

    def __init__(self, path: Path, buffer: ReplayBuffer, start: int) -> None:
        self._path, self._buffer = path, buffer
        self._draws = self._replayed(start)
        self.same = self.gone = self.different = 0
        """Batches so far."""
        self.rows = self.rows_gone = 0
        """Rows of these batches, and those that are gone."""
        self.torn_bytes = 0
        """At the end of the file, of a batch that was not handed out, or is just being written. Known when all were replayed."""

    def __iter__(self) -> Iterator[ReplayedDraw]:
        return self

    def __next__(self) -> ReplayedDraw:
        return next(self._draws)

    def __repr__(self) -> str:
        counts = f"same={self.same}, gone={self.gone}, different={self.different}"
        return f"{type(self).__name__}({counts}, rows={self.rows}, rows_gone={self.rows_gone})"

    def _replayed(self, start: int) -> Iterator[ReplayedDraw]:
        path, number = self._path, 0
        forms: dict[int, _OfForm] = {}
        with Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            records = Records(path, fd)
            for record in records:
                if record.kind == FORM:
                    forms[record.begin] = _OfForm(decode(bytes(record.raw), path, Form), self._buffer, str(path))
                elif record.kind == BATCH:
                    if number >= start:
                        yield self._replay(record, forms, number)
                    number += 1
            self.torn_bytes = records.torn

    def _replay(self, record: Record, forms: dict[int, _OfForm], number: int) -> ReplayedDraw:
        where = f"{self._path} at byte {record.begin}"
        head, raw = Batch.unpacked(record.raw, where)
        if head.form not in forms:
            raise CorruptCheckpoint(
                f"{where}: expected a batch whose form is in the file, got one of byte {head.form}."
            )
        saved = _Saved.of(head, forms[head.form].form, raw, where)
        found = forms[head.form].read(saved)
        self.rows += head.rows
        said = number, head.key, head.batch_size
        if isinstance(found, int):
            self.rows_gone += found
            if found:
                self.gone += 1
                return ReplayedDraw(*said, "gone", None, None, found)
            self.different += 1
            return ReplayedDraw(*said, "different", None, None, 0)
        self.same += 1
        return ReplayedDraw(*said, "same", *found, 0)


class _Saved(NamedTuple):
    """The arrays of a record."""

    digest: bytes
    rows: Tensor
    """int64 ``[n]`` or ``[B, T]``."""
    tickets: Tensor
    """int64 ``[n]``, without the base of the store."""
    said: Info
    kept: Tensor
    """Places among the rows, flat."""
    values: list[Tensor]
    """Of columns and computed entries at these places."""

    @classmethod
    def of(cls, head: Batch, form: Form, raw: memoryview, where: str) -> _Saved:
        at = 0

        def taken(nbytes: int) -> memoryview:
            nonlocal at
            at += nbytes
            if at > len(raw):
                raise CorruptCheckpoint(f"{where}: expected at least {at} bytes of arrays, got {len(raw)}.")
            return raw[at - nbytes : at]

        if form.row_bytes not in (4, 8) or form.steps < 0:
            raise CorruptCheckpoint(f"{where}: expected a form with rows of 4 or 8 bytes, got {form.row_bytes}.")
        n, lead = head.rows, (head.rows,) if not form.steps else (head.rows // form.steps, form.steps)
        rows = np.frombuffer(taken(n * form.row_bytes), f"<u{form.row_bytes}").astype(np.int64)
        offsets = np.frombuffer(taken(n * head.ticket_bytes), f"<u{head.ticket_bytes}").astype(np.int64)
        if (form.steps and n % form.steps) or int(rows.max(initial=0)) >= form.capacity:
            raise CorruptCheckpoint(
                f"{where}: expected rows below {form.capacity}, in windows of {form.steps}, got others."
            )

        def array(entry: Entry, shape: tuple[int, ...]) -> Tensor:
            try:
                return tensor_of(taken(nbytes_of(entry, shape)), entry, shape)
            except ValueError as error:
                raise CorruptCheckpoint(f"{where}: {error}.") from error

        said: Info = {}
        for entry in form.said:
            value = array(entry, entry.shape if entry.whole else (*lead, *entry.shape))
            said[key_of(entry)] = value.numpy() if entry.array else value
        kept = torch.from_numpy(np.frombuffer(taken(4 * head.kept), "<u4").astype(np.int64))
        values = (
            [array(entry, (head.kept, *entry.shape)) for entry in (*form.columns, *form.computed)] if head.kept else []
        )
        if at != len(raw) or int(kept.amax() if len(kept) else -1) >= n:
            raise CorruptCheckpoint(
                f"{where}: expected {at} bytes of arrays, and places below {n}, got {len(raw)} bytes."
            )
        tickets = torch.from_numpy(offsets + head.first_ticket)
        return cls(head.digest, torch.from_numpy(rows).reshape(lead), tickets, said, kept, values)


class _OfForm:
    """Reads batches of one form from a buffer."""

    def __init__(self, form: Form, buffer: ReplayBuffer, where: str) -> None:
        self.form = form
        self._wiring: Wiring = buffer._wiring  # noqa: SLF001 - of the facade
        self._reading = buffer._read_path(self._wiring)  # noqa: SLF001
        self._output = buffer._settings.output  # noqa: SLF001
        self._where = where
        self._check()

    def _check(self) -> None:
        """Raise ``IncompatibleCheckpoint`` unless rows here may be those of the log."""
        form, storage = self.form, self._wiring.storage
        if storage.memory is None:
            return  # whatever was drawn is gone
        schema = storage.memory.schema
        asked = [(".".join(one.key), one.dtype, list(one.shape)) for one in form.columns]
        for what, expected, got in (
            ("rows and lanes", [form.capacity, form.lanes], [schema.capacity, schema.lanes]),
            ("expanders", list(form.around), list(expanders_of(self._wiring))),
            ("fields", [list(one.key) for one in form.columns], [list(field.key) for field in schema.fields]),
        ):
            if expected != got:
                raise IncompatibleCheckpoint(
                    f"replay_draws: {self._where}: expected a buffer with the {what} {expected} of the log, got {got}. Rows that were "
                    f"redistributed or converted are not those that were drawn. The log's fields are {asked}."
                )

    def read(self, saved: _Saved) -> tuple[object, dict[object, object]] | int:
        """The batch and its info; or how many rows are gone, 0: it is another one."""
        storage = self._wiring.storage
        rows = saved.rows.reshape(-1)
        young = torch.zeros(len(rows), dtype=torch.bool)
        young[saved.kept] = True
        if storage.memory is None:
            return int((~young).sum()) or len(rows)
        tickets = storage.tickets_of(rows)
        writes = storage.writes_of(rows, tickets)
        drawn_of = self._numbers(writes, saved.tickets, young)
        gone = (writes != drawn_of) & ~young
        if bool(gone.any()):
            return int(gone.sum())
        drawn = self._read(rows, tickets, young, saved)
        if isinstance(drawn, int):
            return drawn
        info: dict[object, object] = {}
        for part in (saved.said, drawn.computed):
            info.update(part.items())
        if says_tickets(self._wiring):
            info[NUMBERS] = drawn_of.reshape(saved.rows.shape)
        batch = _Finished(self._reading.finish(drawn.columns, saved.rows, info, True))
        if self._output != "torch":
            return View(self._output, batch).sample(0, True, 0)  # type: ignore[return-value]
        return batch.made

    def _numbers(self, writes: Tensor, saved: Tensor, young: Tensor) -> Tensor:
        """The numbers of the writes that were drawn, of rows that hold ``writes`` now.

        Earlier logs have them less what a load had added.
        """
        bases = dict.fromkeys((0, self.form.base))
        found = {base: int(((writes == saved + base) | young).sum()) for base in bases}
        base: int = max(found, key=lambda base: found[base])
        return saved + base

    def _read(self, rows: Tensor, tickets: Tensor, young: Tensor, saved: _Saved) -> Drawn | int:
        """What is read of rows that are live; 0 where that is something else."""
        wiring, shape = self._wiring, saved.rows.shape
        storage, source = wiring.storage, wiring.source
        source.bind(storage)
        info: Info = {}
        for _ in range(IN_A_ROW):
            if isinstance(source, Expander):
                try:
                    columns, info, moved = source.read_drawn(storage, Draw(rows, tickets))
                except RuntimeError:  # a final observation is gone
                    return 0
            else:
                columns, moved = storage.read(rows, tickets)
            if bool(young[moved].all()):
                break
        else:
            return int((storage.tickets_of(rows) != tickets).sum())
        drawn = Drawn.of(wiring, columns, info)
        here = form_of(wiring, drawn, rows, ())
        if described((*here.columns, *here.computed)) != described((*self.form.columns, *self.form.computed)):
            raise IncompatibleCheckpoint(
                f"replay_draws: {self._where}: expected batches of {described((*self.form.columns, *self.form.computed))}, as they were "
                f"drawn, got {described((*here.columns, *here.computed))}. Replay with the sampler and the rows of the log."
            )
        for array, values in zip(drawn.arrays, saved.values, strict=False):  # values of some rows, or of none
            array[saved.kept] = values.to(array.device)
        if drawn.digest() != saved.digest:
            return 0
        return Drawn(
            [column.reshape(*shape, *column.shape[1:]) for column in drawn.columns],
            {key: value.reshape(*shape, *value.shape[1:]) for key, value in drawn.computed.items()},
        )


class _Finished(NamedTuple):
    """A batch that was read, where one is drawn otherwise."""

    made: tuple[object, dict[object, object]]

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:  # noqa: ARG002 - of a source
        return self.made


def replay_draws(path: str | os.PathLike[str], buffer: ReplayBuffer, *, start: int = 0) -> DrawReplay:
    """The batches that a :class:`SamplingLog` has written down, read again by their rows.

    The buffer is the one that was logged, or one with the same rows: the store opened again, or a checkpoint of the run restored by
    as many ranks as saved it. It has the same kind of storage, capacity, lanes and fields, expanders, transforms and output; its sampler
    and its generator are neither asked nor changed. Each batch is compared with the digest of what was read then: it is the same,
    bit for bit, or none is given, and it says whether rows are gone or something is different. Transforms run again, so random ones
    give other batches. With the restored buffer, ``"index_generation"`` is what it was.

    Args:
        path: of the log. It may be written to meanwhile: batches that are there at the beginning are replayed.
        buffer: with the rows. Nothing of it is changed.
        start: the first batch, from 0 on.

    Returns:
        An iterator of :class:`ReplayedDraw`. Its ``same``, ``gone`` and ``different`` count batches so far, ``rows_gone`` rows.

    Raises:
        FileNotFoundError: no such file. TypeError: no storage of tensors in this process. ValueError: ``start`` below 0.
        IncompatibleCheckpoint: while iterating: another geometry, fields or expanders. CorruptCheckpoint: no log, or a damaged one.

    Cost: as a draw by number of each batch, and a hash of its bytes.

    >>> import tempfile, torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, SamplingLog, replay_draws
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    >>> _ = rb.extend(torch.arange(10))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SamplingLog(f"{folder}/draws.log", rb):
    ...         batch = rb.sample()
    ...     again = replay_draws(f"{folder}/draws.log", rb)
    ...     print(torch.equal(next(again).batch, batch), again)
    ...     _ = rb.extend(torch.arange(10))  # all rows are others now
    ...     print([drawn.state for drawn in replay_draws(f"{folder}/draws.log", rb)])
    True DrawReplay(same=1, gone=0, different=0, rows=4, rows_gone=0)
    ['gone']
    """
    start = check_count("replay_draws: start", start, least=0)
    storage = buffer.storage
    if storage.traits.is_remote or not storage.traits.has_fields:
        raise TypeError(
            f"replay_draws: expected a buffer with a storage of tensors in this process, got a {type(storage).__name__}."
        )
    return DrawReplay(Path(path).absolute(), buffer, start)
