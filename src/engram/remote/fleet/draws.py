"""Batches of which several stores draw a part each."""

from __future__ import annotations

import math
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import numpy as np
import torch

from engram._support import fork
from engram._support.native import NotAdmitted
from engram.errors import NoSampleable, RateLimited
from engram.remote import protocol
from engram.remote.fleet import plans
from engram.remote.served import Drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.remote.fleet.members import Members, Shard
    from engram.remote.storage import RemoteStorage
    from engram.types import Entry, Info

#: Rounds in a row that give no row, after which there is none.
_MAX_EMPTY_ROUNDS = 200
_WEIGHT = "priority_weight"


class _Part(NamedTuple):
    """The part of a batch that one store has drawn."""

    shard: Shard
    places: NDArray[np.int64]
    drawn: Drawn
    #: Of its weights. Where these are to be over the batch's largest: how likely its least likely row was, until all parts are there.
    factor: float


class _Batch:
    """A batch whose parts are still arriving."""

    def __init__(
        self, key: int, wanted: int, owners: NDArray[np.int64], used: NDArray[np.float64], shards: list[Shard]
    ) -> None:
        #: ``wanted``: units. Of an epoch there may be fewer.
        self.key, self.wanted, self.used, self.shards = key, wanted, used, shards
        #: Place in ``shards`` of the store of each unit.
        self.owners = owners
        #: Units of each store.
        self.counts = np.bincount(owners, minlength=len(shards))
        self.parts: list[_Part] = []
        self.there = np.zeros(len(owners), bool)

    def take(self, shard: Shard, drawn: Drawn, together: int) -> protocol.Mass:
        """The part of a store, of whose units the last may be missing: what is true of the store."""
        at, mass = self.shards.index(shard), drawn.mass
        assert mass is not None  # it is a part
        places = np.flatnonzero((self.owners == at) & ~self.there)[: drawn.rows.numel() // together]
        factor = 1.0
        if _WEIGHT in drawn.info:
            now, least = ([getattr(it.mass, name) for it in self.shards] for name in ("total", "least"))
            now[at], least[at] = mass.total, mass.least
            if mass.over_batch:
                factor = mass.least * float(self.used[at] / self.used.sum()) / mass.total
            else:
                factor = plans.factor(mass.beta, at, self.used.tolist(), now, least)
        self.there[places] = True
        self.parts.append(_Part(shard, places, drawn, factor))
        return mass


class _Message:
    """Batches that were requested together."""

    def __init__(self, batches: list[_Batch]) -> None:
        self.batches = batches
        #: Stores that have not answered yet, how often each was lost and changed then, and the batches that it has a part of.
        self.left: deque[tuple[Shard, tuple[int, int], list[int]]] = deque()
        self.error: Exception | None = None


class Draws:
    """Plans batches, asks stores for their parts, and puts these together."""

    def __init__(self, members: Members, served: protocol.Served, row_bytes: int, stratum: int | None) -> None:
        self._members, self._epochs, self._stratum = members, members.epochs, stratum
        self._prioritized = "prioritized" in served.traits_of_sampler
        self._row_bytes = row_bytes
        #: Rows of a unit, and how many it is of a batch size.
        self._together, self._counted = served.together
        self._lock = fork.rlock()
        self.pending: deque[_Message] = deque()
        #: Of parts of batches: how many were asked for, and how long their answers were waited for.
        self._requests, self._waited_s = 0, 0.0

    def counters(self) -> dict[str, float]:
        """Requests to stores, and the seconds that these were waited for."""
        return {"requests": self._requests, "request_waited_s": self._waited_s}

    # ---- asking --------------------------------------------------------------------------------------------------------

    def ask_for(self, keys: Sequence[int], rows: int) -> None:
        """Ask for a batch of each key, and do not wait for it.

        Raises ``ValueError``: a batch is larger than a message may be, or no multiple of a window. ``NoSampleable``: no store has rows.
        """
        with self._lock:
            message = _Message([self._planned(key, self._units(rows)) for key in keys])
            self.pending.append(message)
            try:
                self._send(message)
            except BaseException:
                self.pending.pop()
                raise

    def draw(self, key: int, rows: int) -> Drawn:
        """A batch. Nothing else may be under way. Raises as :meth:`ask_for` and :meth:`answer`."""
        with self._lock:
            self.ask_for([key], rows)
            try:
                return self.answer()[0]
            finally:
                if self.pending:  # it was interrupted
                    self.forget_asked()

    def draw_within(self, key: int, command: protocol.Sample) -> Drawn:
        """A batch by tokens. One store draws all of it, and knows which row fits. Raises as :meth:`answer`.

        A store is chosen by its mass, over the rows that its batches have: so all rows of all stores come equally often.
        """
        form = command.rows, command.max_tokens, (*command.tokens_of,), command.multiple
        with self._lock:
            for attempt in range(_MAX_EMPTY_ROUNDS):
                shards, masses = self._chosen_by(begins=True)
                known = [shard.rows_within.get(form, 0.0) for shard in shards]
                usual = sum(known) / max(1, sum(map(bool, known))) or 1.0
                shares = masses / np.array([n or usual for n in known])
                at = int(plans.chosen(shares, plans.random_of(key, attempt).random(1))[0])
                shard, message = shards[at], _Message([])
                part = msgspec.structs.replace(command, parts=[1], epoch=shard.epoch, ended=shard.ended or 0)
                ask = partial(_drawn_alone, shard.storage, plans.key_of(key, shard.number, attempt), part)
                found = self._received(message, shard, shard.losses, ask)
                if message.error is not None:
                    raise message.error
                for drawn in found:
                    units = drawn.rows.numel() // self._together
                    shard.rows_within.note(form, units)
                    batch = _Batch(key, units, np.full(units, at), masses, shards)
                    self._take(batch, shard, drawn)
                    return self._assembled(batch)
        raise NoSampleable("sample: no store has given a row, at any try. Add data first.")

    def _units(self, rows: int) -> int:
        units, rest = divmod(rows, self._counted)
        if rest or not units:
            raise RuntimeError(
                f"sample: batch_size: expected a multiple of the {self._counted} steps of a window, got {rows}."
            )
        if rows * self._row_bytes > protocol.MAX_MESSAGE:
            raise ValueError(
                f"sample: batch_size: expected batches of at most {protocol.MAX_MESSAGE} bytes over a connection, got {rows} rows of "
                f"{self._row_bytes} bytes."
            )
        return units

    def _planned(self, key: int, units: int, attempt: int = 0, *, begins: bool = True) -> _Batch:
        """Which store draws which unit. Raises as :meth:`_chosen_by`."""
        shards, masses = self._chosen_by(begins=begins)
        if not self._epochs:
            used = np.array([shard.weight for shard in shards])
            return _Batch(key, units, plans.chosen(masses, plans.random_of(key, attempt).random(units)), used, shards)
        batch = _Batch(key, units, plans.dealt(key, attempt, masses.astype(np.int64), units), masses, shards)
        for shard, n in zip(shards, batch.counts, strict=True):
            shard.weight -= n
        return batch

    def _chosen_by(self, *, begins: bool) -> tuple[list[Shard], NDArray[np.float64]]:
        """The stores, and what they are chosen by. ``begins``: an epoch, where nothing is left of one. Raises ``NoSampleable``: none has
        any.
        """
        shards = self._members.known()
        masses = self._masses(shards)
        if not masses.any() and begins:
            shards = self._members.refreshed()
            masses = self._masses(shards)
        if self._stratum is not None and self._members.shards[self._stratum].lost:
            raise ConnectionError(
                f"sample: store {self._stratum}, the stratum of this buffer, is gone. It is looked for."
            )
        if not masses.any():
            begin = "sample" if any(shard.mass.live for shard in shards) else "Cannot sample from an empty storage"
            raise NoSampleable(f"{begin}: no store of the fleet has a row to draw. Add data before sampling.")
        return shards, masses

    def _masses(self, shards: list[Shard]) -> NDArray[np.float64]:
        """What stores are chosen by."""
        stratum = self._stratum
        return np.array([shard.weight if stratum in (None, shard.number) else 0.0 for shard in shards])

    def _send(self, message: _Message) -> None:
        for shard in {shard: None for batch in message.batches for shard in batch.shards}:
            which = [k for k, batch in enumerate(message.batches) if self._count(batch, shard)]
            if not which or shard.lost:
                continue
            moment = shard.losses, shard.changes
            with self._members.reaching(shard):
                shard.storage.ask(self._command(shard, [message.batches[k] for k in which]))
                message.left.append((shard, moment, which))

    @staticmethod
    def _count(batch: _Batch, shard: Shard) -> int:
        return int(batch.counts[batch.shards.index(shard)]) if shard in batch.shards else 0

    def _command(self, shard: Shard, batches: list[_Batch], attempt: int = 0) -> protocol.Sample:
        parts = [self._count(batch, shard) * self._counted for batch in batches]
        keys = [plans.key_of(it.key, shard.number, attempt) for it in batches]
        return protocol.Sample(max(parts), keys, parts, shard.epoch, shard.ended or 0)

    # ---- answers -------------------------------------------------------------------------------------------------------

    def answer(self) -> list[Drawn]:
        """The batches that were asked for first. An interrupt loses none: the next call goes on.

        Raises: what a store has raised.
        """
        with self._lock:
            message = self.pending[0]
            while message.left:
                shard, (losses, changes), which = message.left[0]
                batches = [message.batches[k] for k in which]
                drawn = self._received(message, shard, losses, partial(_answer, shard.storage))
                for batch, part in zip(batches, drawn, strict=False):
                    self._take(batch, shard, part, tells=changes == shard.changes)
                message.left.popleft()
            try:
                if message.error is not None:
                    raise message.error
                made = [self._completed(batch) for batch in message.batches]
            except Exception:
                self.pending.popleft()
                raise
            self.pending.popleft()
            return made

    def _received(self, message: _Message, shard: Shard, losses: int, ask: Callable[[], list[Drawn]]) -> list[Drawn]:
        """What a store has drawn: nothing where it is gone, has no row any more, or no window there."""
        if shard.lost or shard.losses != losses:
            return []
        self._requests += 1
        begun = time.perf_counter()
        try:
            return ask()
        except NoSampleable:
            shard.updated_at = -math.inf  # it is asked what it has before others are drawn
        except (RateLimited, NotAdmitted) as error:
            message.error = RateLimited(f"sample: {shard.storage!r} has limits, which hold for one store. {error}")
        except ConnectionError as error:
            self._members.lose(shard, error)
        except Exception as error:  # noqa: BLE001 - raised when all stores have answered
            message.error = error
        finally:
            self._waited_s += time.perf_counter() - begun
        return []

    def _take(self, batch: _Batch, shard: Shard, drawn: Drawn, *, tells: bool = True) -> None:
        mass = batch.take(shard, drawn, self._together)
        if self._epochs:
            shard.epoch = mass.epoch
        if tells and (not self._epochs or len(self.pending) <= 1):
            shard.tell(mass, epochs=self._epochs)

    def _completed(self, batch: _Batch) -> Drawn:
        """The batch, once all of its units are there; fewer at the end of an epoch."""
        attempt, empty_rounds = 0, 0
        while not batch.there.all():
            attempt += 1
            if not batch.parts:  # of the next epoch, perhaps
                batch.there = np.zeros(batch.wanted, bool)
            missing = np.flatnonzero(~batch.there)
            try:
                rest = self._planned(batch.key, len(missing), attempt, begins=not batch.parts)
            except NoSampleable:
                if batch.parts and self._epochs:
                    break
                raise
            for at in np.unique(rest.owners):
                self._redraw(rest, rest.shards[at], attempt)
            batch.parts += [part._replace(places=missing[part.places]) for part in rest.parts]
            batch.there[missing[: len(rest.there)][rest.there]] = True  # an epoch may have had fewer
            empty_rounds = 0 if rest.parts else empty_rounds + 1
            if empty_rounds > _MAX_EMPTY_ROUNDS:
                raise NoSampleable("sample: no store has given a row, at any try. Add data first.")
        return self._assembled(batch)

    def _redraw(self, batch: _Batch, shard: Shard, attempt: int) -> None:
        message = _Message([batch])
        command = self._command(shard, [batch], attempt)
        for drawn in self._received(message, shard, shard.losses, partial(shard.storage.redraw, command)):
            self._take(batch, shard, drawn)
        if message.error is not None:
            raise message.error

    def _assembled(self, batch: _Batch) -> Drawn:
        """All parts as one batch."""
        parts, together = batch.parts, self._together
        mass = cast("protocol.Mass", parts[0].drawn.mass)  # they are parts
        if mass.over_batch:
            least = min((part.factor for part in parts if part.factor), default=1.0)
            parts = [part._replace(factor=(least / (part.factor or 1.0)) ** mass.beta) for part in parts]
        units, first = int(batch.there.sum()), parts[0].drawn
        dims, flat = first.rows.ndim, first.rows.ndim == 1
        shape = (units * together,) if flat else (units, together)
        order = plans.order_of([part.places for part in parts])

        def joined(tensors: list[Tensor]) -> Tensor:
            if together > 1 and flat:
                of_row = tensors[0].shape[dims:]
                tensors = [tensor.reshape(-1, together, *of_row) for tensor in tensors]
                return plans.joined(tensors, order).reshape(*shape, *of_row)
            return plans.joined(tensors, order)

        info: Info = {name: joined([_weighed(name, part) for part in parts]) for name in first.info}
        if self._stratum is not None:
            info["loss_factor"] = torch.full(shape, self._loss_factor(), device="cpu")
        if mass.over_batch:
            weights = cast("Tensor", info[_WEIGHT])
            info[_WEIGHT] = weights / weights.max().clamp_min(torch.finfo(weights.dtype).tiny)
        fields = min(len(part.drawn.columns) for part in parts)  # one may have been asked for some that others lack
        columns = [joined([part.drawn.columns[k] for part in parts]) for k in range(fields)]
        rows = joined([plans.number(part.drawn.rows, part.shard.number) for part in parts])
        last = self._epochs and not self._masses(self._members.present()).any()
        return Drawn(columns, rows, info, last)

    def _loss_factor(self) -> float:
        """``S * T_s / T``: how much more a row counts that is drawn from its own store alone."""
        shards = self._members.present()
        shares = [shard.mass.total if self._prioritized else float(shard.mass.live) for shard in shards]
        own = next(share for share, shard in zip(shares, shards, strict=True) if shard.number == self._stratum)
        return len(shards) * own / sum(shares)

    # ---- the rest ------------------------------------------------------------------------------------------------------

    def can_sample(self) -> bool:
        """Whether a store has rows to draw."""
        with self._lock:
            if any(shard.mass.total > 0 for shard in self._members.known()):
                return True
            return any(shard.mass.total > 0 for shard in self._members.refreshed())

    def settle(self) -> None:
        """Wait until all that was asked for is drawn."""
        with self._lock:
            self._members.answers(lambda shard: shard.storage.settle())

    def forget_asked(self) -> None:
        """Drop what was asked for."""
        with self._lock:
            self.settle()
            self.pending.clear()
            for shard in self._members.present():
                shard.storage.forget_asked()
                shard.change()  # it may have other rows now


def _weighed(name: Entry, part: _Part) -> Tensor:
    value: Tensor = part.drawn.info[name]  # type: ignore[assignment] # a server sends nothing else
    return value * part.factor if name == _WEIGHT and part.factor != 1.0 else value


def _drawn_alone(storage: RemoteStorage, key: int, command: protocol.Sample) -> list[Drawn]:
    return [storage.draw_within(key, command)]


def _answer(storage: RemoteStorage) -> list[Drawn]:
    return [batch() for batch in storage.answer(0)]
