"""Uniform draws, and what is read in place of rows that moved between their draw and their read."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from engram._support import checks, native
from engram._support.retries import Retries
from engram.errors import EMPTY, NoSampleable, RowError
from engram.samplers._base import DeclaredSampler, NativeSampler, check_drawable
from engram.store import blocks, sampled
from engram.types import Draw, Extent, Info


class DrawOverBatch(Draw):
    """A draw by priority whose weights are over the largest of the batch: a row that is drawn in place of another changes them all."""

    #: Logarithms of the weights, each with the same number added, float64 ``[B]``.
    logs: Tensor

    @classmethod
    def of(cls, rows: Tensor, tickets: Tensor, writes: Tensor, logs: Tensor, dtype: torch.dtype) -> DrawOverBatch:
        """A draw with weights of that dtype."""
        made = cls(rows, tickets, {"priority_weight": _over_largest(logs).to(dtype), "index_generation": writes})
        made.logs = logs
        return made


def _over_largest(logs: Tensor) -> Tensor:
    """Weights, of which the largest is 1."""
    return (logs - logs.max()).exp() if len(logs) else logs


class Redraw:
    """The rows of one draw, of which some are drawn or read again.

    Args:
        storage: holds the rows.
        draw: whose rows moved.
        source: draws others in their place. None: the same rows are read again, with what they hold now, and live ones in place
            of those that hold nothing any more.
        key: of the draw. None: rows were named, not drawn, so that those that hold nothing any more are refused.
        call, detail: for messages.
    """

    def __init__(
        self,
        storage: sampled.SampledStorage,
        draw: Draw,
        source: DeclaredSampler | None,
        key: int | None,
        call: str = "sample",
        detail: str = "",
    ) -> None:
        self.rows = draw.rows.clone()
        self._tickets = None if draw.tickets is None else draw.tickets.clone()
        self.info: Info = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in draw.info.items()}
        self._logs = draw.logs.clone() if isinstance(draw, DrawOverBatch) else None
        self.retries = Retries()
        self._storage, self._source, self._key = storage, source, key
        self._call, self._detail = call, detail

    def repeat(self, moved: list[int], tensors: list[Tensor]) -> None:
        """Put other rows of the draw, by turns, at the places of those that moved. ``tensors``: what was read, changed as well."""
        there = torch.ones(len(self.rows), dtype=torch.bool, device="cpu")
        there[moved] = False
        good = there.nonzero().flatten()
        source = good[torch.arange(len(moved), device="cpu") % len(good)]
        for tensor in (self.rows, *tensors, *self.info.values()):
            if isinstance(tensor, torch.Tensor) and tensor.shape[:1] == self.rows.shape:
                tensor[moved] = tensor[source]

    def again(self, moved: list[int], *, waiting: bool = False) -> tuple[Tensor, Draw]:
        """The places of rows that moved, and of those that are drawn together with them; and what to read there.

        ``waiting``: no row moves, so there is nothing to wait for.

        Raises:
            RowError: a row that was named holds nothing any more.
            NoSampleable: the buffer was emptied.
            WriterStalled: rows moved at every try.
        """
        storage, retries, call = self._storage, self.retries, self._call
        extent = storage.extent()
        if extent.size == 0:
            raise NoSampleable(EMPTY if call == "sample" else f"{call}: the buffer was emptied meanwhile.")
        if waiting:
            retries.count += 1
        else:
            retries.again(self.rows, moved, self._detail, call)
        key = None if self._key is None else retries.key_of(self._key)
        if self._source is not None and key is not None:
            again, fresh = self._source.draw_again(extent, Draw(self.rows, self._tickets), moved, key)
            places = torch.tensor(again, device="cpu")
            self.rows[places] = fresh.rows
            if self._tickets is not None and fresh.tickets is not None:
                self._tickets[places] = fresh.tickets
            for name, value in fresh.info.items():
                known = self.info.get(name)
                if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
                    known[places.to(known.device)] = value
            if self._logs is not None and isinstance(fresh, DrawOverBatch):
                self._logs[places] = fresh.logs
                cast("Tensor", self.info["priority_weight"]).copy_(_over_largest(self._logs))
            return places, fresh
        places = torch.tensor(moved, device="cpu")
        gone = places[storage.hold_nothing(self.rows[places])]
        if len(gone):  # their writer died meanwhile
            if key is None:
                raise RowError(
                    f"{call}: row {int(self.rows[gone[0]])} is not live any more: its writer died, newer rows took its items, or the "
                    "buffer was emptied."
                )
            self.rows[gone] = RandomSampler().draw(extent, len(gone), key).rows
        return places, Draw(self.rows[places])


#: What else is drawn by a key, independently: recent rows, and whether there is one more of them.
_RECENT, _REST = 0x9216D5D98979FB1B, 0xD1310BA698DFB5AC


class RandomSampler(NativeSampler):
    """Draws live rows uniformly, independently, with replacement. A batch may be larger than the buffer.

    ``RandomSampler(replacement=False, …)`` constructs a :class:`SamplerWithoutReplacement`. With tensor storages,
    drawing and copying are one native call.

    Args:
        recent_share: the part of each batch drawn uniformly from the newest rows; these come first. ``recent_share * B`` rows, rounded
            down or up at random so that the mean is exact.
        recent_steps: how many of each lane's last rows are new. With ``ndim > 1`` a step is a row for each column. Where one of them was
            removed, a row of all is drawn in its place.

    Raises:
        ValueError: ``recent_share`` outside [0, 1]; ``recent_steps`` below 1, or given without a share. TypeError: another argument;
            ``recent_share`` with ``replacement=False``.

    Cost with a share: O(B log lanes) for each draw.

    >>> import torch
    >>> from engram import RandomSampler, ReplayBuffer, LazyTensorStorage
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler())
    >>> _ = rb.extend(torch.arange(4))
    >>> rb.sample(100).unique()
    tensor([0, 1, 2, 3])
    """

    traits = NativeSampler.traits._replace(draws_uniformly=True)
    #: Of a subclass that does not call this one's ``__init__``.
    recent_share, recent_steps = 0.0, 0

    def __new__(cls, *args: object, replacement: bool = True, **kwargs: Any) -> Any:
        if cls.__init__ is not RandomSampler.__init__:  # a subclass has arguments of its own
            return super().__new__(cls)
        known = ("recent_share", "recent_steps") if replacement else ("drop_last", "shuffle", "index")
        unknown = sorted(kwargs.keys() - known)
        if unknown or args:
            raise TypeError(
                f"RandomSampler(replacement={replacement}): expected no arguments but {[*known]}, got {unknown or args}."
            )
        if replacement:
            return super().__new__(cls)
        from engram.samplers.epoch import SamplerWithoutReplacement

        return SamplerWithoutReplacement(**kwargs)

    def __init__(self, *, replacement: bool = True, recent_share: float = 0.0, recent_steps: int = 0) -> None:
        self.recent_share = checks.check_number("RandomSampler: recent_share", recent_share, least=0.0, most=1.0)
        self.recent_steps = checks.check_count(
            "RandomSampler: recent_steps", recent_steps, least=1 if self.recent_share else 0
        )
        if self.recent_steps and not self.recent_share:
            raise ValueError(f"RandomSampler: recent_steps: expected a recent_share above 0, too, got {recent_share}.")
        if self.recent_share:
            self.traits, self.noted = self.traits._replace(draws_uniformly=False), ("recent_share", "recent_steps")

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        check_drawable(extent.size)
        ranks = native.empty_rows(batch_size)
        native.uniform(key, extent.size, ranks)
        rows = extent.rows(ranks)
        if self.recent_share:
            lanes, rest = torch.arange(len(extent.filled), device="cpu"), native.empty_rows(1)
            native.uniform(key ^ _REST, 1 << 53, rest)
            places = native.empty_rows(int(self.recent_share * batch_size + int(rest) / (1 << 53)))
            native.uniform(key ^ _RECENT, sum(min(n, self.recent_steps) for n in extent.filled), places)
            new = extent.in_order(lanes, self.recent_steps, places)
            rows[: len(new)] = new
        return Draw(rows)

    def draw_among(self, rows: Tensor, n: int, key: int) -> Draw | None:
        places = native.empty_rows(n)
        native.uniform(key, len(rows), places)
        return None if self.recent_share else Draw(rows[places])

    def masses(self, storage: sampled.SampledStorage) -> blocks.Masses:
        return blocks.Masses(len(storage), 1.0, len(storage))
