"""What engram's own writers share beyond the protocol: TorchRL's verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram.persist.components import Dumpable
from engram.state import check_keys
from engram.types import Extent, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.types import Write

__all__ = ["NativeWriter"]


class NativeWriter(Dumpable):
    """Base of engram's writers."""

    part = "writer"

    #: Whether every write and ``empty`` are refused.
    read_only = False
    #: Whether rows read back carry ``"index"``.
    adds_index = False
    #: Whether rows may be rejected: reported as -1, and so is a row that a later one of the same batch replaced.
    rejects = False
    #: Whether samples carry ``"index_generation"``.
    tracks_generations = False

    def __init__(self) -> None:
        self._storage: Any = None

    def register_storage(self, storage: Any) -> None:
        """The storage that :meth:`add`, :meth:`extend` and :meth:`write_at` write to."""
        self._storage = storage

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: Any) -> Plan:
        raise NotImplementedError

    def written(self, plan: Plan, write: Write) -> None:
        """Hear that a plan was written, before anybody else can place rows. A custom writer need not have this."""

    def _registered(self) -> Any:
        if self._storage is None:
            raise RuntimeError(
                f"{type(self).__name__}: expected a registered storage. Hand the writer to a buffer first."
            )
        return self._storage

    def _write(self, call: str, data: Any, plan: Plan | None, *, batched: bool) -> Write:
        storage = self._registered()
        lane, count = (0, None) if plan is not None else storage.unnamed_lanes(call, batched=batched)
        prepared, n = storage.prepare(data, call, batched=batched, count=count)
        with storage.placing:
            plan = plan or self.place(storage.extent(), n, lane, data)
            write: Write = storage.write(plan, prepared, n)
            self.written(plan, write)
        storage.notify(write, data)
        return write

    def add(self, data: Any) -> int | None:
        """Write one row to the registered storage, without transforms; its row number, None if it was rejected.

        Raises ``RuntimeError`` also for a storage with several lanes: the buffer's ``add`` names one.
        """
        row = int(self._write("add", data, None, batched=False).rows[0])
        return None if self.rejects and row < 0 else row

    def extend(self, data: Any) -> Tensor:
        """Write a batch of rows to the registered storage, without transforms; int64 ``[n]``. Of several lanes each gets one."""
        write = self._write("extend", data, None, batched=True)
        return write.survivors if self.rejects else write.rows

    @property
    def write_count(self) -> int:
        """Rows written to the registered storage since it was last emptied."""
        return 0 if self._storage is None else int(self._storage.write_count)

    def generations_of(self, index: Any) -> Tensor:
        """Ticket numbers of rows, int64, same shape; -1 if not tracked, never written or out of range.

        With ``ndim > 1`` the index is ``[..., ndim]`` coordinates, or a tuple of those, and the result ``[...]``. Only
        equality and order mean anything: a rewrite gives a larger one.
        """
        ndim = 1 if self._storage is None else self._storage.ndim
        if isinstance(index, tuple):
            index = torch.stack([torch.as_tensor(one, device="cpu") for one in index], -1) if ndim > 1 else index[0]
        index = torch.as_tensor(index, device="cpu").to(torch.int64)
        if ndim > 1:
            index = self._storage.rows_at(index)
        if not self.tracks_generations or self._storage is None:
            return torch.full_like(index, -1)
        numbers: Tensor = self._storage.numbers_of(index.reshape(-1))
        return numbers.reshape(index.shape)

    def state_dict(self) -> dict[str, Any]:
        """Empty: cursors, counts and generations belong to the store."""
        return {}

    def checked_state(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Check a state; what takes it over."""
        check_keys(state_dict, (), type(self).__name__)
        return lambda: None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state. Raises ``KeyError`` for one that is not empty."""
        self.checked_state(state_dict)()

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values: what a store notes to make the writer again."""
        return {}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({arguments})"
