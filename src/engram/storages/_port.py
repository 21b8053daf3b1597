"""What a buffer asks of its storage beside what users do: rows on their way in and out, tickets, and states that are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engram.types import SampledStorage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch
    from torch import Tensor

    from engram.types import Write, WritePlan


class Rows(NamedTuple):
    """An index of the user's, resolved against the live rows."""

    rows: Tensor
    """int64 ``[B]``."""
    single: bool = False
    """The user asked for one row, not for a batch of one."""
    span: tuple[int, int] | None = None
    """Rows ``[a, b)``, where the index is a contiguous slice without holes."""
    shape: torch.Size | None = None
    """``ndim > 1``: the shape that the index selects from ``[*columns, time]``; ``rows`` is flat."""
    view: slice | None = None
    """The slice, where a live view shows these rows."""


class Count(NamedTuple):
    """How many rows there must be."""

    rows: int
    why: str = "one per index or lane that was given"
    remedy: str = ""


class Port(SampledStorage, Protocol):
    """What every storage implements. Prepared rows, and columns that were read, are of the form that the storage likes."""

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[object, int]:
        """Check data and bring it into the form that :meth:`write` takes, with the number of rows. Writes nothing.

        The first call of a storage of tensors allocates its memory: the data says which fields there are.

        Args:
            data: one row, or a batch of rows.
            call: for messages.
            batched: whether it is a batch.
            ignored: names of entries that are not stored.
            count: rows there must be.

        Raises:
            KeyError: an entry is missing, or is no field. RuntimeError: another shape, dtype or number of rows. TypeError: no rows.

        >>> import torch
        >>> from engram import LazyTensorStorage
        >>> LazyTensorStorage(10).prepare({"obs": torch.arange(3)}, "extend", batched=True)
        ([tensor([0, 1, 2])], 3)
        """

    def write(self, plan: WritePlan, prepared: Any, n: int) -> Write:
        """Write prepared rows where a plan says.

        Args:
            plan: of ``n`` rows.
            prepared: as :meth:`prepare` returned it.

        Raises:
            RowError: a planned row or lane is outside the storage. RuntimeError: the plan is one of another number of rows.

        >>> import torch
        >>> from engram import LazyTensorStorage, WritePlan
        >>> storage = LazyTensorStorage(10)
        >>> prepared, n = storage.prepare(torch.arange(3), "extend", batched=True)
        >>> storage.write(WritePlan(lane=0), prepared, n).rows.tolist()
        [0, 1, 2]
        """

    def edit(self, where: Rows, prepared: Any) -> Write:
        """Replace live rows. Cursor and length stay.

        Args:
            where: as :meth:`Storage.locate` returns it.
            prepared: as :meth:`Storage.prepare_at` returns it.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> where = rb.storage.locate(1)
        >>> _ = rb.storage.edit(where, rb.storage.prepare_at(where, torch.tensor(7), "example"))
        >>> rb[:].tolist()
        [0, 7, 2]
        """

    def read(self, rows: Tensor, expected: Tensor | None = None) -> tuple[Any, list[int]]:
        """Copy rows out: ``(what pack takes, positions that moved)``.

        Args:
            rows: int64 ``[B]``.
            expected: int64 ``[B]``: tickets that the rows must still have; None: any whole row will do.

        Returns:
            Of tensors one column ``[B, *shape]`` per field; of a list ``B`` items. And the positions of rows that were overwritten,
            in ``[0, B)``: what was read for them is to be replaced.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(3))
        >>> rows = torch.tensor([0, 2])
        >>> tickets = rb.storage.tickets_of(rows)
        >>> _ = rb.add(torch.tensor(7))  # overwrites row 0
        >>> columns, moved = rb.storage.read(rows, tickets)
        >>> moved
        [0]
        """

    def patch(self, columns: Any, places: list[int], fresh: Any) -> None:
        """Replace what :meth:`read` returned for some places.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> columns, _ = rb.storage.read(torch.tensor([0, 1]))
        >>> fresh, _ = rb.storage.read(torch.tensor([2]))
        >>> rb.storage.patch(columns, [1], fresh)
        >>> columns
        [tensor([0, 2])]
        """

    def batch(self, columns: Any, n: int | tuple[int, ...] | None) -> Any:
        """A sampled batch of ``n`` rows, or ``[*n]``, around what :meth:`read` returned; None: as the columns say. No copy.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"obs": torch.arange(3)})
        >>> columns, _ = rb.storage.read(torch.tensor([2, 0]))
        >>> rb.storage.batch(columns, 2)
        {'obs': tensor([2, 0])}
        """

    def pack(self, columns: Any, where: Rows, extra: dict[str, Tensor] | None = None) -> Any:
        """Data in the user's form around what :meth:`read` returned. ``extra`` ``[n]`` joins the entries of TensorDicts.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"obs": torch.arange(3)})
        >>> where = rb.storage.locate(2)
        >>> columns, _ = rb.storage.read(where.rows)
        >>> rb.storage.pack(columns, where)  # one row
        {'obs': tensor(2)}
        """

    def empty(self, *, keep_write_count: bool) -> None:
        """Forget all rows, keep the memory.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.empty(keep_write_count=True)
        >>> len(rb), rb.write_count
        (0, 3)
        """

    @property
    def write_count(self) -> int:
        """Rows written since the last ``empty()``."""

    def next_number(self) -> int:
        """Ticket number of the next write: by as much as a load moves this, it moves those of all rows.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> before = rb.storage.next_number()
        >>> _ = rb.extend(torch.arange(2))
        >>> rb.storage.next_number() - before
        2
        """

    def state_dict(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
        """All that is stored, and in which order it was written, as tensors and plain values: copies.

        ``without``: names and kinds of indexes that are left out, as the caller saves them.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.state_dict()["write_count"]
        3
        """
