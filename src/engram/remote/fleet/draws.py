"""Batches of which several stores draw a part each."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engram._support import fork, native
from engram.errors import NoSampleable, RateLimited
from engram.remote import protocol
from engram.remote.fleet import plans
from engram.remote.fleet.members import Members, Shard
from engram.remote.served import Drawn, Parts
from engram.saved.rows import Ints
from engram.store import ragged_rows
from engram.types import Info

#: Rounds in a row that give no row, after which there is none.
_MAX_EMPTY_ROUNDS = 200
_WEIGHT = "priority_weight"


class _Round(NamedTuple):
    """Units of the batches of a message that stores are asked for together."""

    attempt: int
    shards: list[Shard]
    #: Masses that the stores were chosen by.
    used: NDArray[np.float64]
    #: Units of each batch and store.
    counts: Ints
    #: Units of each store, batch by batch: places in the message.
    places: list[Ints]


class _Message:
    """Batches that are requested together, and what has come of them."""

    def __init__(self, keys: Sequence[int], units: int) -> None:
        #: ``units``: of each batch. Of an epoch there may be fewer.
        self.keys, self.units = keys, units
        #: Where each unit of each batch is among the units that came; -1: it is not there.
        self.at = np.full((len(keys), units), -1)
        #: What stores have drawn: rows of all their parts, one behind the other.
        self.came: list[tuple[Shard, Parts]] = []
        #: How many units these are, and of each by how much its weight is to be multiplied. Where weights are to be over the batch's
        #: largest: how likely the least likely row of its part was.
        self.count, self.factors = 0, [np.zeros(0)]
        #: Stores that have not answered yet, and how often each was lost and changed when it was asked.
        self.left: deque[tuple[int, tuple[int, int]]] = deque()
        self.first: _Round
        self.error: Exception | None = None

    def round_of(
        self, attempt: int, shards: list[Shard], used: NDArray[np.float64], where: Ints, owners: Ints
    ) -> _Round:
        """A round of units at places ``where``. ``owners``: the place in ``shards`` of the store of each."""
        batches, units = self.at.shape
        counts = np.bincount(where // units * len(shards) + owners, minlength=batches * len(shards))
        counts = counts.reshape(batches, len(shards))
        by_store = where[np.argsort(owners, kind="stable")]
        return _Round(attempt, shards, used, counts, np.split(by_store, np.cumsum(counts.sum(0))[:-1]))

    def take(self, asked: _Round, at: int, parts: Parts, together: int) -> None:
        """The parts of a store, of whose units the last may be missing."""
        counts, which = asked.counts[:, at], np.flatnonzero(asked.counts[:, at])
        got = np.array([math.prod(size) // together for size in parts.sizes], np.int64)
        places, units = asked.places[at], np.arange(got.sum())
        if not np.array_equal(got, counts[which]):
            each = zip(np.split(places, np.cumsum(counts[which])[:-1]), np.split(units, np.cumsum(got)), strict=False)
            kept = [(some[: len(came)], came[: len(some)]) for some, came in each]
            places, units = (np.concatenate(them) for them in zip(*kept, strict=True))
        self.at.flat[places] = units + self.count
        self.came.append((asked.shards[at], parts))
        self.count += int(got.sum())
        if _WEIGHT in parts.info:
            self.factors.append(np.repeat([_factor(asked, at, mass) for mass in parts.masses], got))


def _factor(asked: _Round, at: int, mass: protocol.Mass) -> float:
    """As of :attr:`_Message.factors`, for the part of a store with this mass."""
    if mass.over_batch:
        return mass.least * float(asked.used[at] / asked.used.sum()) / mass.total
    now, least = [it.mass.total for it in asked.shards], [it.mass.least for it in asked.shards]
    now[at], least[at] = mass.total, mass.least
    return plans.factor(mass.beta, at, asked.used.tolist(), now, least)


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
            message = _Message(keys, self._units(rows))
            message.first = self._planned(message)
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
                return self.answer()[0]()
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
                at = int(plans.chosen(shares, plans.fractions([key], [1], attempt))[0])
                shard, asked = shards[at], _Message([key], 0)
                protocol.check_level(shard.storage.served, str(shard.storage.connection.access), "sample: max_tokens")
                keys = [plans.key_of(key, shard.number, attempt)]
                part = msgspec.structs.replace(command, keys=keys, parts=[1], epoch=shard.epoch, ended=shard.ended or 0)
                found = self._received(asked, shard, shard.losses, partial(shard.storage.redraw, part))
                if asked.error is not None:
                    raise asked.error
                if found is None:
                    continue
                message = _Message([key], len(found.rows) // self._together)
                shard.rows_within.note(form, message.units)
                owners = np.full(message.units, at)
                of = message.round_of(attempt, shards, masses, np.arange(message.units), owners)
                self._take(message, of, at, found)
                return self._assembled(message)[0]()
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

    def _planned(self, message: _Message, attempt: int = 0) -> _Round:
        """Which store draws which of the units that are not there. Raises as :meth:`_chosen_by`."""
        shards, masses = self._chosen_by(begins=not (self._epochs and message.came))
        missing = message.at < 0
        where = np.flatnonzero(missing)
        if not self._epochs:
            owners = plans.chosen(masses, plans.fractions(message.keys, missing.sum(1).tolist(), attempt))
            used = np.array([shard.weight for shard in shards])
            return message.round_of(attempt, shards, used, where, owners)
        owners = plans.dealt(message.keys[0], attempt, masses.astype(np.int64), len(where))
        if not message.came:
            message.at = message.at[:, : len(owners)]
        planned = message.round_of(attempt, shards, masses, where[: len(owners)], owners)
        for shard, n in zip(shards, planned.counts[0], strict=True):
            shard.weight -= n
        return planned

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
        for at, shard in enumerate(message.first.shards):
            if shard.lost or not message.first.counts[:, at].any():
                continue
            moment = shard.losses, shard.changes
            with self._members.reaching(shard):
                shard.storage.ask(self._command(message, message.first, at))
                message.left.append((at, moment))

    def _command(self, message: _Message, asked: _Round, at: int) -> protocol.Sample:
        """What asks a store for its parts."""
        shard, counts = asked.shards[at], asked.counts[:, at].tolist()
        keyed = zip(message.keys, counts, strict=True)
        keys = [plans.key_of(key, shard.number, asked.attempt) for key, n in keyed if n]
        parts = [n * self._counted for n in counts if n]
        return protocol.Sample(max(parts), keys, parts, shard.epoch, shard.ended or 0)

    # ---- answers -------------------------------------------------------------------------------------------------------

    def answer(self) -> list[Callable[[], Drawn]]:
        """The batches that were asked for first. An interrupt loses none: the next call goes on.

        Raises: what a store has raised.
        """
        with self._lock:
            message = self.pending[0]
            while message.left:
                at, (losses, changes) = message.left[0]
                shard = message.first.shards[at]
                parts = self._received(message, shard, losses, shard.storage.answer_parts)
                if parts is not None:
                    self._take(message, message.first, at, parts, tells=changes == shard.changes)
                message.left.popleft()
            try:
                made = self._completed(message)
            except Exception:
                self.pending.popleft()
                raise
            self.pending.popleft()
            return made

    def _received(self, message: _Message, shard: Shard, losses: int, ask: Callable[[], Parts]) -> Parts | None:
        """What a store has drawn: nothing where it is gone, has no row any more, or no window there."""
        if shard.lost or shard.losses != losses:
            return None
        self._requests += 1
        begun = time.perf_counter()
        try:
            return ask()
        except NoSampleable:
            shard.updated_at = -math.inf  # it is asked what it has before others are drawn
        except (RateLimited, native.NotAdmitted) as error:
            message.error = RateLimited(f"sample: {shard.storage!r} has limits, which hold for one store. {error}")
        except ConnectionError as error:
            self._members.lose(shard, error)
        except Exception as error:  # noqa: BLE001 - raised when all stores have answered
            message.error = error
        finally:
            self._waited_s += time.perf_counter() - begun
        return None

    def _take(self, message: _Message, asked: _Round, at: int, parts: Parts, *, tells: bool = True) -> None:
        message.take(asked, at, parts, self._together)
        shard, mass = asked.shards[at], parts.masses[-1]
        if self._epochs:
            shard.epoch = mass.epoch
        if tells and (not self._epochs or len(self.pending) <= 1):
            shard.tell(mass, epochs=self._epochs)

    def _completed(self, message: _Message) -> list[Callable[[], Drawn]]:
        """The batches, once all of their units are there; fewer at the end of an epoch. Raises what a store has raised."""
        attempt, empty_rounds = 0, 0
        while message.error is None and (message.at < 0).any():
            attempt += 1
            if not message.came:  # of the next epoch, perhaps
                message.at = np.full((len(message.keys), message.units), -1)
            try:
                rest = self._planned(message, attempt)
            except NoSampleable:
                if message.came and self._epochs:
                    break
                raise
            before = message.count
            for at in np.flatnonzero(rest.counts.sum(0)).tolist():
                shard = rest.shards[at]
                ask = partial(shard.storage.redraw, self._command(message, rest, at))
                if (parts := self._received(message, shard, shard.losses, ask)) is not None:
                    self._take(message, rest, at, parts)
            empty_rounds = 0 if message.count > before else empty_rounds + 1
            if empty_rounds > _MAX_EMPTY_ROUNDS:
                raise NoSampleable("sample: no store has given a row, at any try. Add data first.")
        if message.error is not None:
            raise message.error
        return self._assembled(message)

    def _assembled(self, message: _Message) -> list[Callable[[], Drawn]]:
        """All parts as batches. Each is copied out of what came when it is called for: into the block of a loader that draws."""
        came, first = message.came, message.came[0][1]
        fields = min(len(parts.columns) for _, parts in came)  # one may have been asked for some that others lack
        columns = [ragged_rows.joined([parts.columns[k] for _, parts in came]) for k in range(fields)]
        columns.append(ragged_rows.joined([plans.number(parts.rows, shard.number) for shard, parts in came]))
        columns += [ragged_rows.joined([parts.info[name] for _, parts in came]) for name in first.info]
        ragged = {k for k, column in enumerate(columns) if ragged_rows.items_in(column) is not None}
        plain, flat = [column for k, column in enumerate(columns) if k not in ragged], len(first.sizes[0]) == 1
        factors = np.concatenate(message.factors)
        last = self._epochs and not self._masses(self._members.present()).any()
        factor = None if self._stratum is None else self._loss_factor(self._members.shards[self._stratum])

        def made(places: Ints) -> Drawn:
            units = places[places >= 0] if self._epochs else places
            picked = torch.from_numpy(units)
            found = native.units_of(plain, self._together, picked, flat)
            for k in sorted(ragged):
                found.insert(k, plans.joined([columns[k]], picked, message.count))
            info: Info = dict(zip(first.info, found[fields + 1 :], strict=True))
            if len(factors):
                weights = cast("torch.Tensor", info[_WEIGHT])  # a server sends nothing else
                info[_WEIGHT] = _weighed(weights, factors[units], first.masses[0])
            if factor is not None:
                info["loss_factor"] = torch.full(found[fields].shape, factor, device="cpu")
            return Drawn(found[:fields], found[fields], info, last)

        return [partial(made, places) for places in message.at]

    def _loss_factor(self, own: Shard) -> float:
        """``S * T_s / T``: how much more a row counts that is drawn from its own store alone, which may be gone since it drew."""
        shards = [own, *(shard for shard in self._members.present() if shard is not own)]
        shares = [shard.mass.total if self._prioritized else float(shard.mass.live) for shard in shards]
        return len(shares) * shares[0] / sum(shares) if shares[0] else 1.0

    # ---- the rest ------------------------------------------------------------------------------------------------------

    def can_sample(self) -> bool:
        """Whether a store has rows to draw."""
        with self._lock:
            asked = (ask() for ask in (self._members.known, self._members.refreshed))
            return any(shard.mass.total > 0 for shards in asked for shard in shards)

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


def _weighed(weights: torch.Tensor, factors: NDArray[np.float64], mass: protocol.Mass) -> torch.Tensor:
    """The weights of a batch. ``factors``: of its units, as :attr:`_Message.factors`."""
    if mass.over_batch:
        likely = factors[factors > 0]
        least = float(likely.min(initial=1.0))
        factors = (least / np.where(factors > 0, factors, 1.0)) ** mass.beta
    by = torch.from_numpy(factors).to(weights.dtype)
    weights = weights * by.repeat_interleave(weights.shape[0] // len(factors)).view(-1, *(1,) * (weights.ndim - 1))
    return weights / weights.max().clamp_min(torch.finfo(weights.dtype).tiny) if mass.over_batch else weights
