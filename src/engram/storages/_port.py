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

        ``count``: rows there must be.
        """

    def write(self, plan: WritePlan, prepared: Any, n: int) -> Write:
        """Write prepared rows where a plan says."""

    def edit(self, where: Rows, prepared: Any) -> Write:
        """Replace live rows. Cursor and length stay."""

    def read(self, rows: Tensor, expected: Tensor | None = None) -> tuple[Any, list[int]]:
        """Copy rows out: ``(what pack takes, positions that moved)``."""

    def patch(self, columns: Any, places: list[int], fresh: Any) -> None:
        """Replace what :meth:`read` returned for some places."""

    def batch(self, columns: Any, n: int | tuple[int, ...] | None) -> Any:
        """A sampled batch of ``n`` rows, or ``[*n]``, around what :meth:`read` returned; None: as the columns say. No copy."""

    def pack(self, columns: Any, where: Rows, extra: dict[str, Tensor] | None = None) -> Any:
        """Data in the user's form around what :meth:`read` returned. ``extra`` ``[n]`` joins the entries of TensorDicts."""

    def empty(self, *, keep_write_count: bool) -> None:
        """Forget all rows, keep the memory."""

    @property
    def write_count(self) -> int:
        """Rows written since the last ``empty()``."""

    def next_number(self) -> int:
        """Ticket number of the next write: by as much as a load moves this, it moves those of all rows."""

    def state_dict(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
        """All that is stored, and in which order it was written, as tensors and plain values: copies.

        ``without``: names and kinds of indexes that are left out, as the caller saves them.
        """
