"""Methods of a buffer that clients of its server call: rows by their key, updates, and rows that grow."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, cast
from uuid import UUID

import torch

from engram._support.checks import check_count
from engram.buffer import ReplayBuffer
from engram.buffer.field_updates import FieldUpdates
from engram.buffer.growing import Fields, Key, OpenRow, ShownRow, paths_of
from engram.remote import protocol
from engram.storages import TensorStorage
from engram.store.trees import tree_bytes, tree_of

#: A row that grows is abandoned when its client was not heard of for so long.
LEASE_S = 60.0
#: Bytes of the text of arguments.
MAX_TEXT = 16 << 20


class _Held(NamedTuple):
    """A row that grows here, its client, and when that was heard of last."""

    row: OpenRow
    holder: UUID | None
    heard: float


class Calls:
    """The calls of clients, for any number of threads. It owns which client has which of the rows that grow. ``check`` raises what a
    call of that name must not do now.
    """

    def __init__(self, rb: ReplayBuffer, check: Callable[[str], None]) -> None:
        self._rb, self._check = rb, check
        #: By the number of the slot.
        self._held: dict[int, _Held] = {}
        #: Held while rows grow: a message that is sent again waits for the first one.
        self._growing = threading.Lock()

    def do(self, command: protocol.Call, data: bytes) -> bytes:
        """What is answered. Raises what the method does; ``ValueError``: arguments that are none."""
        if not 0 < command.length <= min(len(data), MAX_TEXT) or len(data) > protocol.MAX_MESSAGE:
            raise ValueError(
                f"{command.name}: expected a text of {command.length} bytes, at most {MAX_TEXT}, before data."
            )
        given = tree_of(torch.frombuffer(bytearray(data), dtype=torch.uint8), command.length)
        if not isinstance(given, dict):
            raise ValueError(f"{command.name}: expected arguments by name, got {type(given).__name__}.")
        with self._growing if command.holder is not None else contextlib.nullcontext():
            done = getattr(self, f"_{command.name}")(command, **given)
        answer, length = tree_bytes(done, command.name)
        return b"%d\n%b" % (length, answer.numpy().tobytes())

    # ---- rows by key, and updates --------------------------------------------------------------------------------------

    def _index_keys(self, _: protocol.Call, field: str | tuple[str, ...]) -> None:
        self._rb.index_keys(field)

    def _rows_of(self, _: protocol.Call, keys: object) -> tuple[torch.Tensor, ...]:
        return tuple(self._rb.rows_of(keys))

    def _rows_with(self, _: protocol.Call, keys: object) -> tuple[torch.Tensor, ...]:
        """All rows with one of these keys."""
        found = self._rb.storage.keyed("remove")
        assert found is not None  # rows were written
        return found.all(keys, "remove")

    def _update_if_present(self, _: protocol.Call, **given: object) -> tuple[torch.Tensor, ...]:
        updates = FieldUpdates(self._rb._wiring)  # noqa: SLF001 - of the facade
        return updates.apply_once(**given)  # type: ignore[arg-type] # it checks them

    # ---- rows that grow ------------------------------------------------------------------------------------------------

    def _open_row(self, command: protocol.Call, data: Fields, late: Fields | None, lane: int) -> ShownRow:
        self._check("open_row")
        lane = check_count("open_row: lane", lane, least=0, most=self._rb.storage.lanes - 1)
        return self._hold(self._rb.open_row(data, lane=lane, late=late, timeout=0), command)

    def _unsealed(self, _: protocol.Call) -> list[ShownRow]:
        return [self._shown(row) for row in self._rb.unsealed()]

    def _show(self, command: protocol.Call) -> dict[Key, torch.Tensor]:
        return self._row(command).fields

    def _resume(self, command: protocol.Call) -> ShownRow:
        row = self._row(command)
        return self._hold(row, command) if self._is_late(row) else self._shown(self._mine(command))

    def _append(self, command: protocol.Call, lengths: dict[Key, int], data: Fields) -> dict[Key, int]:
        row = self._mine(command)
        row.append(self._missing(row, lengths, data))
        return row.lengths

    def _seal(self, command: protocol.Call, lengths: dict[Key, int], data: Fields, lane: int) -> int:
        lane, row = check_count("seal: lane", lane, least=0, most=self._rb.storage.lanes - 1), self._mine(command)
        row._lane = lane  # noqa: SLF001 - of a server that has ended the lane is not known
        return row.seal(self._missing(row, lengths, data), timeout=0)

    def _discard(self, command: protocol.Call, **_: object) -> None:
        self._mine(command).discard()

    def _row(self, command: protocol.Call) -> OpenRow:
        """The row that is in the slot. Raises :class:`RowGone`: another one is, or none."""
        known = self._held.get(command.slot)
        if known is not None and known.row.place == (command.slot, command.times) and known.row.is_mine:
            return known.row
        for row in self._rb.unsealed():
            if row.place == (command.slot, command.times):
                return row
        raise protocol.RowGone(
            f"{command.name}: expected an open row, got one that was sealed or discarded. Open another."
        )

    def _holder_of(self, row: OpenRow) -> _Held | None:
        """Who has a row that grows here; None: a process has it, or had it."""
        held = self._held.get(row.place[0])
        return held if held is not None and held.row.place == row.place else None

    def _is_late(self, row: OpenRow) -> bool:
        held = self._holder_of(row)
        return held is not None and time.monotonic() - held.heard > LEASE_S

    def _mine(self, command: protocol.Call) -> OpenRow:
        """The row of a client, which is heard of: also one of a server that has ended. Raises ``RuntimeError``: another one has it."""
        row = self._row(command)
        held = self._holder_of(row)
        if held is None and row.is_abandoned:
            row.resume()
        elif held is None or held.holder != command.holder:
            raise RuntimeError(
                f"{command.name}: expected an open row of this client, got one that another client or process has. Choose one of "
                "rb.unsealed() whose is_abandoned is True, or open another."
            )
        self._hold(row, command)
        return row

    def _hold(self, row: OpenRow, command: protocol.Call) -> ShownRow:
        self._held[row.place[0]] = _Held(row, command.holder, time.monotonic())
        return self._shown(row)

    def _shown(self, row: OpenRow) -> ShownRow:
        return (*row.place, row.lengths, row.is_abandoned or self._is_late(row))

    def _missing(self, row: OpenRow, lengths: object, data: Fields) -> dict[tuple[str, ...], object]:
        """What is not there yet, where a message came again. ``lengths``: before. Fields of one length have all of its items, or none.

        Raises ``RuntimeError``: others have appended since. ``TypeError``: no lengths.
        """
        if not isinstance(lengths, dict) or {*map(type, lengths.values())} - {int}:
            raise TypeError(f"append: lengths: expected how many items there were, by key, got {lengths!r:.80}.")
        given, done = paths_of(data, {}, row.groups, "append"), set()
        structure = cast("TensorStorage", self._rb.storage).written()
        for group, (key, n) in enumerate(row.lengths.items()):
            before, its = lengths.get(key, 0), [it for it in given if row.groups.get(it) == group]
            if n == before:
                continue
            each = {len(structure.items_in(structure.field_of(it, "append"), given[it], "append")) for it in its}
            if each != {n - before}:
                raise RuntimeError(
                    f"append: {key!r}: expected {before} items, as this client left them, got {n}. Another one has resumed the row since: "
                    "resume it again, or open another."
                )
            done.add(group)
        return {key: value for key, value in given.items() if row.groups.get(key) not in done}
