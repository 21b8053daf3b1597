"""What a storage held at one moment. It is written later, while others write to the buffer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from engram._words import count
from engram.format.checkpoints import Cut, ShardRows, Totals
from engram.format.parts import NO_SCHEMA
from engram.persist.components import Preparation, write_part
from engram.persist.roles import roles_of
from engram.persist.rows import SavedRows, described, save_flat
from engram.persist.segments import save_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.parts import PartField, PartReader
    from engram.persist.roles import Roles
    from engram.store import Store

_log = logging.getLogger("engram")


class WholeSnapshot(NamedTuple):
    """A state that is all of a storage: items of a list, or a storage that was never written."""

    kind: str
    """The class of the storage."""
    state: dict[str, Any]
    clock: int
    steps: int
    nbytes: int
    needs_pause: bool = False
    """Whether writers must wait until it is saved."""

    def fields(self, roles: Roles | None) -> Sequence[PartField]:  # noqa: ARG002 - it has none
        return ()

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:  # noqa: ARG002 - it is short
        info = write_part(folder, "storage", self.kind, self.state)
        return SavedRows(info, ShardRows(Cut(self.clock), Totals(steps=self.steps, episodes=0), NO_SCHEMA))

    def save_segments(self, folder: Path, **_: object) -> SavedRows:
        return self.save(folder)


class RowsSnapshot(NamedTuple):
    """The rows of a store. A row that others change before it is written is left out."""

    kind: str
    """The class of the storage."""
    store: Store
    state: dict[str, Any]
    """The storage's, without rows; also without ``numbers`` and ``writes``, where these are read later."""
    base: int
    """By how much tickets in the store were larger than those that are saved."""
    live: int
    """How many rows there were."""
    nbytes: int
    """Of the rows."""
    copies: Sequence[Tensor] | None = None
    """Copies of all rows, by field. None: rows are read when they are written."""
    needs_pause: bool = False
    """Whether writers must wait until it is saved."""

    def fields(self, roles: Roles | None) -> Sequence[PartField]:
        schema = self.store.schema
        return described(schema, roles_of(schema.fields, roles))[1]

    def numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ticket numbers of the rows up to the last live one, and the numbers of their writes, to be changed by the caller."""
        if "numbers" in self.state:
            tickets = self.state["numbers"]
            return tickets.numpy().copy(), self.state.get("writes", tickets).numpy().copy()
        return self.numbers_now()

    def numbers_now(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same as the store has them by now: 0 also for rows that changed since."""
        state = self.state
        return self.store.numbers_before(state["clock"] + self.base, state["lanes"])

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:
        rows = save_flat(folder, self, progress)
        if lost_rows := rows.shard.cut.lost_rows:
            lost = count(lost_rows, "row")
            _log.warning("dumps: left out, as others changed them before they were copied: %s", lost)
        return rows

    def save_segments(
        self,
        folder: Path,
        *,
        roles: Roles | None,
        progress: Callable[[int], None],
        parent: PartReader | None = None,
        paranoid: bool = False,
    ) -> SavedRows:
        return save_segments(folder, self, roles, progress=progress, parent=parent, paranoid=paranoid)


#: What a storage held at one moment.
StorageSnapshot: TypeAlias = RowsSnapshot | WholeSnapshot
StoragePreparation: TypeAlias = Preparation[StorageSnapshot]
