"""Writes down which rows each batch had, so that :func:`replay_draws` gives the same batches again."""

from __future__ import annotations

import math
import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor

from engram import _fork
from engram._closing import Closes
from engram._words import warn
from engram.around import Expander
from engram.buffer.drawn import NUMBERS, TICKETS, Drawn, bytes_of, entry_of, form_of, says_tickets
from engram.format.draws import BATCH, FORM, Appending, Batch
from engram.format.strict import encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.buffer.wiring import ReadsBatch
    from engram.format.draws import Entry, Form
    from engram.storages import Storage
    from engram.store import Key
    from engram.types import Info


class SamplingLog(Closes):
    """Writes down each batch that a buffer draws: its key, rows and tickets, weights and masks, and a digest of what was read.

    :func:`replay_draws` gives the same batches again, bit for bit, from the buffer while the rows live, or from one that a
    checkpoint was restored to, and says of each other batch why not. No row is written down: a batch of 256 rows takes 2 KiB, and
    1 KiB for weights. The file is appended to; docs/sampling-log.md describes it.

    Every process that samples needs a file of its own. Batches are in the order in which they were read: with ``prefetch`` that is
    before they are handed out, and a batch that was dropped by a change of the buffer stands there twice, with the same key. A batch
    is in the file before it is handed out, and outlives the process; a record that was torn by its death is cut off when the log
    is opened next. Forked children and pickled copies of the buffer do not log.

    Args:
        path: of the file; made if it is missing, else appended to.
        buffer: whose batches are written down from now on, until :meth:`close` or the end of a ``with`` block. A storage of tensors.

    Raises:
        TypeError: no such buffer: its rows are items of a list, or lie in another process or in checkpoints that it follows.
        RuntimeError: another log is attached to the buffer; another process or log writes to the file.
        CorruptCheckpoint: the file is no log, or damaged before its end. OSError: it cannot be written.

    ``sample`` raises ``OSError`` where a batch cannot be written down, such as on a full disk; :meth:`close` the log, and it goes on.
    It raises ``TypeError`` if a sampler of your own says something that is no array.

    Cost: opening reads the whole file. A logged batch takes a hash of its bytes and one write to the page cache more. Buffers without a log
    pay nothing.

    >>> import tempfile, torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, SamplingLog, replay_draws
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend(torch.arange(50))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SamplingLog(f"{folder}/draws.log", rb):
    ...         batches = [rb.sample() for _ in range(3)]
    ...     again = [drawn.batch for drawn in replay_draws(f"{folder}/draws.log", rb)]
    >>> all(torch.equal(one, other) for one, other in zip(batches, again))
    True
    """

    def __init__(self, path: str | os.PathLike[str], buffer: ReplayBuffer) -> None:
        self._buffer, self._wiring = buffer, buffer._wiring  # noqa: SLF001 - of the facade
        self._check()
        self._lock = _fork.lock()
        self.inherited = False
        """Whether this process was forked from the one that writes the file."""
        self._told = False
        #: By what they follow from: forms, and where their records begin. Of these parts of the buffer: the addresses of parts that it
        #: had before may be those of others.
        self._forms: dict[tuple[object, ...], tuple[int, Form]] = {}
        self._parts: tuple[object, ...] = ()
        self.batches = 0
        """How many this log has written down since it was opened."""
        self._file = Appending(Path(path).absolute())
        try:
            self._attach(self)
        except BaseException:
            self._file.close()
            raise
        _fork.registered(self)

    def _check(self) -> None:
        storage, kind = self._wiring.storage, type(self._buffer).__name__
        if storage.traits.is_remote or not storage.traits.has_fields:
            where = "a connection" if storage.traits.is_remote else f"a {type(storage).__name__}"
            raise TypeError(
                f"SamplingLog: expected a storage of tensors in this process, got {where}. Use LazyTensorStorage or LazyMemmapStorage; "
                "log draws of a served store where it is served."
            )
        other = self._wiring.recorder
        if isinstance(other, SamplingLog) and not other.inherited:
            raise RuntimeError(f"SamplingLog: expected a {kind} without a log, got one with {other!r}. Close that.")

    def _attach(self, recorder: SamplingLog | None) -> None:
        """Write batches down from now on, or no more."""
        buffer = self._buffer
        buffer._discard_prefetched("SamplingLog")  # noqa: SLF001 - of the facade
        self._wiring.recorder = recorder
        buffer._rewire()  # noqa: SLF001

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._file.path

    def close(self) -> None:
        """Log no more, and wait until the file is on disk. Repeatable.

        The end of a ``with`` block does it, too. The buffer goes on without a log.

        >>> import tempfile, torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplingLog
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(50))
        >>> log = SamplingLog(tempfile.mkdtemp() + "/draws.log", rb)
        >>> _ = rb.sample()
        >>> log.close()
        >>> _ = rb.sample()
        >>> log.batches
        1
        """
        if self._wiring.recorder is self and not self._buffer.closed:
            self._attach(None)
        with self._lock:
            self._file.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, batches={self.batches}{', closed' * self._file.closed})"

    def after_fork(self) -> None:
        """In a child: the file is its parent's, and batches that the child draws are not written down. Python calls it after a fork.

        >>> import tempfile, torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplingLog
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> with SamplingLog(tempfile.mkdtemp() + "/draws.log", rb) as log:
        ...     before = log.inherited
        ...     log.after_fork()
        ...     before, log.inherited
        (False, True)
        """
        self.inherited = True
        self._file.let_go()

    # ---- writing down ----------------------------------------------------------------------------------------------------

    def read(self, read: ReadsBatch, key: Key, n: int) -> tuple[list[Tensor], Tensor, Info]:
        """Draw and read a batch, and write it down. What it returns is what the buffer would have read without a log.

        The buffer calls it; ``rb.sample()`` is for programs.

        Args:
            read: what draws and reads: ``read(key, n, "beside", recorded=True)``.
            key: 64 random bits, from which the draw follows.
            n: rows.

        Returns:
            One column ``[n, *shape]`` per field, copied; rows, int64 ``[n]``; and the info.

        Raises:
            OSError: the batch cannot be written down. What ``read`` raises.

        >>> import tempfile, torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplingLog
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(50))
        >>> with SamplingLog(tempfile.mkdtemp() + "/draws.log", rb) as log:
        ...     _ = rb.sample()  # calls log.read
        ...     log.batches
        1
        """
        wiring, storage = self._wiring, self._wiring.storage
        source = wiring.source
        young = _Young(storage, source.reach(storage)) if isinstance(source, Expander) else None
        columns, rows, info = read(key, n, "beside", recorded=True)
        assert rows is not None  # as they are shown
        tickets = info.pop(TICKETS, None)
        said = {name: value for name, value in info.items() if tickets is not None or name != NUMBERS}
        if tickets is None:
            tickets = info[NUMBERS] if says_tickets(wiring) else info.pop(NUMBERS)
        if self.inherited:
            self._tell_inherited()
        else:
            drawn = Drawn.of(wiring, columns, info)
            self._note(key.value, n, drawn, rows, cast("Tensor", tickets), said, young)
        return columns, rows, info

    def _tell_inherited(self) -> None:
        if not self._told:
            self._told = True
            warn(
                f"SamplingLog: {self.path} is the parent's: batches of this process are not written down. Make a log for it."
            )

    def _note(
        self, key: int, n: int, drawn: Drawn, rows: Tensor, tickets: Tensor, info: Info, young: _Young | None
    ) -> None:
        said = {name: value for name, value in info.items() if name not in drawn.computed}
        entries = tuple(entry_of(name, value, rows) for name, value in said.items())
        flat, numbers = rows.reshape(-1).cpu().numpy(), tickets.cpu().reshape(-1).numpy()
        kept = _NONE if young is None else young.places(flat, numbers)
        first = int(numbers.min(initial=1 << 61))
        offsets = numbers - first
        ticket_bytes = 4 if int(offsets.max(initial=0)) < 1 << 32 else 8
        values = [] if kept is _NONE else drawn.values(kept, rows.ndim)
        digest = drawn.digest()
        with self._lock:
            if self._file.closed:
                return
            at, form = self._form(drawn, rows, entries)
            head = Batch(at, key % (1 << 64), digest, first, n, len(flat), len(kept), ticket_bytes)
            self._file.append(
                BATCH,
                head.packed(),
                flat.astype(f"<u{form.row_bytes}").data,
                offsets.astype(f"<u{ticket_bytes}").data,
                *map(bytes_of, said.values()),
                kept.astype("<u4").data,
                *values,
            )
            self.batches += 1

    def _form(self, drawn: Drawn, rows: Tensor, said: tuple[Entry, ...]) -> tuple[int, Form]:
        """Where the form of such batches begins in the file, and what it says."""
        memory, source = self._wiring.storage.memory, self._wiring.source
        parts = memory, source
        if not all(map(operator.is_, parts, self._parts)) or not self._parts:
            self._forms, self._parts = {}, parts
        made_of = len(drawn.columns), rows.shape[1:], said
        if made_of not in self._forms:
            form = form_of(self._wiring, drawn, rows, said)
            self._forms[made_of] = self._file.append(FORM, encode(form)), form
        return self._forms[made_of]


_NONE: NDArray[np.int64] = np.zeros(0, np.int64)


class _Young:
    """Rows after which steps may still be written that change what is read with them. Made before a batch is drawn."""

    def __init__(self, storage: Storage, reach: int) -> None:
        self._reach = reach * math.prod(storage.columns)
        self._extent, self._clock = storage.extent(), storage.next_number()

    def places(self, rows: NDArray[np.int64], tickets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of a batch."""
        extent = self._extent
        length = extent.capacity // len(extent.filled)
        behind = (np.asarray(extent.seam)[rows // length] - 1 - rows) % length + 1
        found: NDArray[np.int64] = ((behind <= self._reach) | (tickets >= self._clock)).nonzero()[0]
        return found
