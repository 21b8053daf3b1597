"""The stores of a fleet: what is known of each, which of them are gone, and how fast rows come and go in all of them."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from engram._support import fork, words
from engram.remote import protocol, served
from engram.remote.connection import Final
from engram.store.limits import Rules
from engram.store.ragged import RowsWithin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engram.remote.storage import RemoteStorage


_log = logging.getLogger("engram")

T = TypeVar("T")
#: What happens to a store whose servers are gone.
Missing: TypeAlias = Literal["skip", "wait"]
#: For how long a store that is to be skipped is waited for.
SKIP_S = 10.0
#: A mass is asked for that no answer has told for so long.
_MAX_MASS_AGE_S = 1.0
#: Between two looks for a store that is gone.
_RECONNECT_INTERVAL_S = 1.0


_NOTHING = protocol.Mass(0.0, 0.0, 0, 0.0, 0, goes_on=False)


class Shard:
    """One store of a fleet: what this client knows of it."""

    def __init__(self, number: int, storage: RemoteStorage) -> None:
        self.number, self.storage = number, storage
        self.mass = _NOTHING
        #: What it is chosen by; of an epoch, the rest of it for this client.
        self.weight = 0.0
        #: Key of the epoch that is drawn from; 0: the first draw says it. And of the last one before it; None: not known yet.
        self.epoch = 0
        self.ended: int | None = None
        self.updated_at = -math.inf
        #: How often it was lost: what was asked before is not answered.
        self.losses = 0
        #: How often this client has changed its mass: what was drawn before does not tell it.
        self.changes = 0
        self.lost = False
        #: Whether it is lost because it is no longer listed: then it is no more of the fleet.
        self.left = False
        #: Whether it refused rows, as it is drained: another store is chosen.
        self.leaving = False
        #: Rows that its last batches by tokens had, by what was asked.
        self.rows_within = RowsWithin()

    def change(self) -> None:
        """Its mass is another one now: it is asked for before it is used."""
        self.changes, self.updated_at = self.changes + 1, -math.inf

    def tell(self, mass: protocol.Mass, *, epochs: bool) -> None:
        """What was true of it when it answered last. ``epochs``: it is drawn from without replacement."""
        over = False
        if epochs and mass.goes_on and self.epoch == 0:
            self.epoch = mass.epoch
        elif epochs and self.ended is None:
            self.ended = mass.epoch
        elif epochs:
            over = mass.epoch != self.epoch or not mass.goes_on if self.epoch else mass.epoch != self.ended
        self.mass, self.weight, self.updated_at = mass, 0.0 if over else mass.total, time.monotonic()


class Joining(Protocol):
    """Addresses that did not answer when the fleet was connected, as the fleet uses them."""

    def left(self) -> bool:
        """Whether some have not answered yet, or others may be listed."""

    def find(self, known: Sequence[RemoteStorage]) -> Iterator[RemoteStorage]:
        """Stores that answer now, and are not known yet."""

    def has_left(self, storage: RemoteStorage, *, lost: bool) -> bool:
        """Whether a store is no more of the fleet, as its servers are not listed. ``lost``: none of them answers."""


class Members:
    """The stores of a fleet, in the order of their numbers. Stores that join later come last."""

    def __init__(
        self, storages: Sequence[RemoteStorage], missing: Missing, joining: Joining | None = None, *, epochs: bool
    ) -> None:
        self.shards = [Shard(number, storage) for number, storage in enumerate(storages)]
        self.missing, self.epochs, self.joining = missing, epochs, joining
        self._closed = False
        #: The policy version that all stores are to know.
        self.version: int | None = None
        self._lock = fork.rlock()
        self._poller: ReconnectPoller | None = None
        if joining is not None and joining.left():
            self._poller = ReconnectPoller(self)

    def present(self) -> list[Shard]:
        """Those that are there. Raises ``ConnectionError``: none is."""
        there = [shard for shard in self.shards if not shard.lost]
        if not there:
            raise ConnectionError(
                f"no server of any of the {len(self.shards)} stores of the fleet answers. They are looked for."
            )
        return there

    def known(self) -> list[Shard]:
        """Those that are there, with masses of this second. Raises as :meth:`lose`."""
        now = time.monotonic()
        self.answers(self.ask, lambda shard: now - shard.updated_at >= _MAX_MASS_AGE_S)
        return self.present()

    def refreshed(self) -> list[Shard]:
        """As :meth:`known`, where none has anything, or nothing is left of the epoch: masses of this moment."""
        for shard in self.present():
            if self.epochs:
                shard.epoch, shard.ended = 0, None
        self.answers(self.ask)
        return self.present()

    def ask(self, shard: Shard) -> protocol.State:
        """Numbers of a store. Raises ``ConnectionError``: it is gone."""
        state = shard.storage.state()
        shard.tell(state.mass or msgspec.structs.replace(_NOTHING, live=state.size), epochs=self.epochs)
        return state

    def answers(self, ask: Callable[[Shard], T], which: Callable[[Shard], bool] | None = None) -> list[tuple[Shard, T]]:
        """What stores answer that are there, all or some, at the same time. Those that are gone are lost. Raises as :meth:`lose`."""
        shards, found = [*filter(which, self.present())], []
        for shard, answer in zip(shards, at_once(ask, shards), strict=True):
            if isinstance(answer, ConnectionError):
                self.lose(shard, answer)
            else:
                found.append((shard, answer))
        return found

    @contextmanager
    def reaching(self, shard: Shard) -> Iterator[None]:
        """Ask a store something. If it is gone, it is lost, and the rest of the block is passed over. Raises as :meth:`lose`."""
        try:
            yield
        except ConnectionError as error:
            self.lose(shard, error)

    @contextmanager
    def needing(self, shard: Shard, note: str = "") -> Iterator[None]:
        """Ask a store something that no other one can do. If it is gone, it is lost, and ``ConnectionError`` is raised, with a note."""
        try:
            yield
        except protocol.TakesNone:
            shard.leaving = True
            raise
        except ConnectionError as error:
            if note:
                error.add_note(note)
            self.lose(shard, error)
            raise

    def check_all_present(self, call: str, after: str = "") -> None:
        """Raise ``ConnectionError``: a store of the fleet is gone."""
        gone = [shard.storage for shard in self.shards if shard.lost and not shard.left]
        if gone:
            raise ConnectionError(f"{call}: expected all stores of the fleet, but {gone[0]!r} is gone.{after}")

    def lose(self, shard: Shard, error: ConnectionError) -> None:
        """Go on without a store, and look for it, unless it has left. Raises the error where stores are waited for. ``ConnectionError``:
        none is left.
        """
        shard.left = self.joining is not None and self.joining.has_left(shard.storage, lost=isinstance(error, Final))
        if self.missing == "wait" and not shard.left:
            raise error
        with self._lock:
            known, shard.lost, shard.weight = shard.lost, True, 0.0
            shard.losses += not known
            if self._poller is None:
                self._poller = ReconnectPoller(self)
        others = len(self.present())
        if shard.left and not known:
            _log.info("the store %r has left", shard.storage)
        elif not known:
            words.warn(
                f"the store {shard.storage!r} is gone, with {words.count(shard.mass.live, 'row')}: batches come from {others} of "
                f"{len(self.shards)} stores until it is back."
            )

    def find(self) -> bool:
        """Look for stores that are gone, and take those that are back. Whether others are gone still."""
        at_once(self._take_back, [shard for shard in self.shards if shard.lost and not shard.left])
        self._join()
        with self._lock:
            lost = any(shard.lost and not shard.left for shard in self.shards)
            if lost or (self.joining is not None and self.joining.left()):
                return True
            self._poller = None
            return False

    def _take_back(self, shard: Shard) -> None:
        """Take a store that is back."""
        try:
            shard.storage.connection.reconnect()
            shard.storage.forget_asked()  # what came before it was lost is answered otherwise
            if self.version is not None:
                shard.storage.consumer_version(self.version)
        except (OSError, ValueError, RuntimeError):
            return
        shard.updated_at = -math.inf
        shard.lost = False
        _log.info("the store %r is back", shard.storage)

    def _join(self) -> None:
        """Take stores that answer for the first time."""
        if self.joining is None:
            return
        for storage in self.joining.find([shard.storage for shard in self.shards]):
            shard = Shard(len(self.shards), storage)
            try:
                if self.version is not None:
                    storage.consumer_version(self.version)
            except (OSError, ValueError, RuntimeError):
                shard.lost = True  # it is looked for, as others are
            with self._lock:
                if self._closed:
                    storage.close()
                    return
                self.shards.append(shard)
            _log.info("the store %r has joined", storage)
        for shard in self.shards:
            left = self.joining.has_left(shard.storage, lost=shard.lost)
            if left and not shard.left:
                with self._lock:
                    shard.losses += not shard.lost
                    shard.lost, shard.weight = True, 0.0
                _log.info("the store %r has left", shard.storage)
            shard.left = left

    def counters(self) -> dict[str, float]:
        """Live rows of the stores that are gone, as far as they were known; how often stores were lost; and how uneven those are that
        are there: the largest mass, over the mean of all.
        """
        missing = sum(shard.mass.live for shard in self.shards if shard.lost and not shard.left)
        masses = [shard.mass.total for shard in self.shards if not shard.lost]
        whole = sum(masses)
        imbalance = max(masses) * len(masses) / whole if whole > 0 else 1.0
        losses = sum(shard.losses for shard in self.shards)
        return {"rows_missing": missing, "stores_lost": losses, "imbalance": imbalance}

    def close(self) -> None:
        """Stop looking, and close the connections."""
        with self._lock:
            self._closed = True
            if self._poller is not None:
                self._poller.end()
        for shard in self.shards:
            shard.storage.close()


class ReconnectPoller:
    """A thread that reconnects to lost stores, until all are back or the fleet is closed."""

    def __init__(self, members: Members) -> None:
        self._members, self._ended = weakref.ref(members), threading.Event()
        threading.Thread(target=self._run, name="engram-fleet", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(_RECONNECT_INTERVAL_S):
            members = self._members()
            try:
                if members is None or not members.find():
                    return
            except RuntimeError:  # of a store that was closed meanwhile
                if self._ended.is_set():
                    return
                raise
            del members

    def end(self) -> None:
        self._ended.set()


K = TypeVar("K")
#: Stores that are asked at a time.
_MAX_ASKED = 32


def at_once(ask: Callable[[K], T], each: Sequence[K]) -> list[T | ConnectionError]:
    """The answer of each, or the error of one that does not answer: they are asked at the same time."""

    def answer(one: K) -> T | ConnectionError:
        try:
            return ask(one)
        except ConnectionError as error:
            return error

    if len(each) < 2:
        return [*map(answer, each)]
    with ThreadPoolExecutor(min(_MAX_ASKED, len(each)), "engram-fleet") as threads:
        return list(threads.map(answer, each))


_SUMS = ("bytes_ram", "bytes_disk", "sample_count", "add_per_s", "sample_per_s", "server_streams")
#: Of which the largest is the worst, or the largest of all rows.
_WORST = ("sample_wait_ms_p50", "sample_wait_ms_p99", "checkpoint_age_s", "copy_age_s", "age_p99", "priority_max")
#: Shares and means, which rows of all stores count in alike.
_MEANS = ("age_mean", "never_sampled_frac", "priority_mean")
#: What a store need not have to be left out: no call has waited there, or it has no copy.
_WHERE_KNOWN = ("sample_wait_ms_p50", "sample_wait_ms_p99", "copy_age_s")
#: What a store without rows lacks.
_OF_ROWS = ("age_p99", "priority_max", *_MEANS)


def combined(stores: Sequence[tuple[protocol.State, dict[str, float]]]) -> dict[str, float]:
    """What ``RemoteStorage.gauges`` says of each of these stores, as of one store with all their rows.

    Sizes, counts and rates are summed. Means are those of all rows. Of waits, of the age of the last checkpoint and of ``age_p99``, the
    worst store decides. ``priority_ess`` is that of draws which choose a store by its mass, as a fleet does. A number is not there if
    a store that answers does not know it; so nothing is, if one has a server of an older engram.
    """
    if not stores or not all(gauges for _, gauges in stores):
        return {}
    found = {name: value for name in (*_SUMS, *_WORST, *_MEANS) for value in _one(name, stores)}
    found |= {"replay_ratio": _ratio(stores), "usage_counted": min(gauges["usage_counted"] for _, gauges in stores)}
    effective = _effective(stores)
    return found if effective is None else found | {"priority_ess": effective}


def _one(name: str, stores: Sequence[tuple[protocol.State, dict[str, float]]]) -> Iterator[float]:
    """The number of all stores, or nothing."""
    numbers = [(state.size, gauges.get(name)) for state, gauges in stores if state.size or name not in _OF_ROWS]
    known = [(size, value) for size, value in numbers if value is not None]
    if not known or (len(known) < len(numbers) and name not in _WHERE_KNOWN):
        return
    values = [value for _, value in known]
    if name in _MEANS:
        yield sum(size * value for size, value in known) / sum(size for size, _ in known)
    else:
        yield sum(values) if name in _SUMS else max(values)


def _ratio(stores: Sequence[tuple[protocol.State, dict[str, float]]]) -> float:
    """Rows sampled for each row inserted. Of a store that was never sampled, all rows written count as inserted."""
    inserted = (
        gauges["sample_count"] / gauges["replay_ratio"] if gauges["replay_ratio"] else state.write_count
        for state, gauges in stores
    )
    return sum(gauges["sample_count"] for _, gauges in stores) / max(sum(inserted), 1)


def _effective(stores: Sequence[tuple[protocol.State, dict[str, float]]]) -> float | None:
    """Of rows with leaves ``p``: ``(sum p)² / sum p²``. Of each store the first sum is its mass. None: not all stores say it."""
    whole = squares = 0.0
    for state, gauges in stores:
        if not state.size:
            continue
        if state.mass is None or "priority_ess" not in gauges:
            return None
        whole += state.mass.total
        if gauges["priority_ess"]:
            squares += state.mass.total**2 / gauges["priority_ess"]
    return whole**2 / squares if squares else None


#: For how long what was read holds, in seconds: limits that were changed hold everywhere after it.
_LEASE_S = 1.0
#: Of a lease, as many calls as the one that it is taken for; and which part of the rows that are left until the edge of the band.
_LEASE_CALLS, _LEASE_SHARE = 64, 4
#: What a store that is gone had counted is known where it was read so shortly before it was missed.
_MAX_COUNTS_AGE_S = 30.0
#: Looks at limits that other clients are changing, and the longest pause between two.
_MAX_LOOKS, _MAX_LOOK_PAUSE_S = 100, 0.1


class Counts(NamedTuple):
    """Sums of what the stores of a fleet have counted."""

    rules: Rules
    #: Which limits these are; 0: there never were any.
    fleet: int = 0
    #: What inserts have brought and samples have not used.
    level: float = 0.0
    live: int = 0
    #: Rows that are not used up.
    in_flight: int = 0
    #: Rows since the limits were set.
    inserts: int = 0
    samples: int = 0
    #: Stores that the limits were set for, and that this client never met.
    unknown: int = 0

    @property
    def centre(self) -> float:
        """Where the level is to stay. Without a ratio it is the number of rows."""
        return (self.rules.ratio or 1.0) * self.rules.min_size

    @property
    def slack(self) -> float:
        """By how much it may be off."""
        return self.rules.tolerance * self.centre

    def since(self, before: Counts, under_way: int, *, samples: bool) -> Counts:
        """As the call would see it that has the least room, at a moment between two looks.

        Stores were asked one after the other: rows may have come, or gone, in one of them when another one had answered already. And some
        rows of this client are ``under_way`` to them.
        """
        if samples:
            missed = under_way + self.rules.ratio * max(0, self.inserts - before.inserts)
            return self._replace(level=self.level - missed)
        missed = (self.rules.ratio or 1.0) * under_way + max(0, self.samples - before.samples)
        return self._replace(level=self.level + missed, in_flight=self.in_flight + under_way)


def room(counts: Counts, rows: int, *, samples: bool) -> float:
    """How many rows may be inserted or sampled now, of which a call wants some; 0: not so many.

    As of one store (docs/flow-control.md), but for rows that are missing before the first sample: where stores have replaced rows
    before there were ``min_size``, so many that were inserted will do. Never are both sides refused because of the level.
    """
    rules, centre, slack = counts.rules, counts.centre, counts.slack
    if rules.in_flight:
        filling = counts.in_flight < rules.min_size
    else:
        filling = counts.live < rules.min_size and counts.level < centre
    if samples:
        if filling:
            return 0.0
        return _left((counts.level - centre), rows, slack) if rules.ratio else math.inf
    by_level = math.inf
    if rules.ratio and not (filling and rules.in_flight):  # else the level is below its centre
        by_level = _left(centre - counts.level, rows * rules.ratio, slack) / rules.ratio
    in_flight = rules.in_flight - counts.in_flight if rules.in_flight else math.inf
    most = min(by_level, in_flight)
    return most if most >= rows else 0.0


def _left(until_centre: float, by: float, slack: float) -> float:
    """How far the level may go where it is so far from its centre, for a call that moves it by some; 0: not so far."""
    return max(by, until_centre + slack) if until_centre + max(slack, by) >= by else 0.0


class _Lease:
    """A number of rows that this client may insert, or sample, without asking the stores again."""

    rows, until = 0.0, -math.inf

    def take(self, rows: int) -> bool:
        if self.rows < rows or time.monotonic() >= self.until:
            return False
        self.rows -= rows
        return True

    def renew(self, rows: int, most: float) -> None:
        """For a call of some rows, which are taken at once, where so many may be moved."""
        self.rows = most if math.isinf(most) else max(0.0, min(_LEASE_CALLS * rows, most // _LEASE_SHARE) - rows)
        self.until = time.monotonic() + _LEASE_S


class _Waits:
    """Counts of the calls of this buffer that waited to insert, or to sample."""

    calls, waiting, seconds = 0, 0, 0.0


class Ledger(served.Limits):
    """The limits of a fleet, as one of its clients follows them.

    No process keeps a ledger. Each store counts in its own memory the rows that are inserted and sampled there, and the sum of these
    counts is the ledger. A client that has read them may insert and sample for a while without reading them again: its lease. A lease
    covers so few rows, and ends so soon, that all clients together leave the band by no more than their leases. No lease is written
    down: it ends with its client.
    """

    #: They may be: only the stores know.
    limited = True

    def __init__(self, members: Members) -> None:
        self._members = members
        self._lock = fork.rlock()
        #: What each store said last, by its number, and when; and when it was missed.
        self._states: dict[int, tuple[protocol.State, float]] = {}
        self._missed_at: dict[int, float] = {}
        self._counts = Counts(Rules())
        self._looked_at = -math.inf
        self._leases = {True: _Lease(), False: _Lease()}
        self._waits = {True: _Waits(), False: _Waits()}
        #: Rows that were admitted, and that the stores have not counted yet, as far as is known.
        self._under_way = {True: 0, False: 0}

    # ---- admitting -----------------------------------------------------------------------------------------------------

    def admit(self, rows: int, calls: int = 1, *, samples: bool, by: Sequence[Shard] = ()) -> int:
        """How many of some calls, of so many rows each, may insert or sample now. Then the stores count them, which :meth:`counted` says.

        Args:
            rows, calls: of each call, and how many.
            samples: whether rows are sampled.
            by: the stores that do it. As long as their answers tell of no other limits than were read last, and these admit everything,
                no store is asked.

        Raises ``ValueError``: so many can never be inserted at a time. ``RuntimeError``: a store has limits of its own.
        """
        with self._lock:
            lease, admitted = self._leases[samples], 0
            told = {it.storage.limits.told for it in by}
            if told == {self._counts.fleet}:
                if not any(self._counts.rules):
                    self._under_way[samples] += rows * calls
                    return calls
            elif None not in told:  # other limits hold now
                lease.until = -math.inf if told else lease.until
            while admitted < calls and (lease.take(rows) or self._renewed(lease, rows, samples=samples)):
                self._under_way[samples] += rows
                admitted += 1
            return admitted

    def counted(self, rows: int, *, samples: bool) -> None:
        """The stores have counted rows that were admitted, or they never came there."""
        with self._lock:
            self._under_way[samples] -= rows

    def _renewed(self, lease: _Lease, rows: int, *, samples: bool) -> bool:
        """Whether there is another lease for a call of some rows, which are taken."""
        for _ in range(2):  # of two looks in a row, the second one misses nothing that came before the first
            before, now = self._counts, self._look()
            self._check(now.rules, rows, samples=samples)
            if now.unknown or before.fleet != now.fleet:
                continue
            under_way = self._under_way[samples]
            most = room(now.since(before, under_way, samples=samples), rows, samples=samples)
            if most:
                lease.renew(rows, most)
                return True
        return False

    @staticmethod
    def _check(rules: Rules, rows: int, *, samples: bool) -> None:
        fit = rules.in_flight - max(rules.min_size, 1) + 1
        if rules.in_flight and not samples and rows > fit:
            raise ValueError(
                f"extend: expected at most {fit} rows at a time, as MaxInFlight({rules.in_flight}) can never admit more, got {rows}. Write "
                f"fewer at a time, or rb.limit(MaxInFlight({rows + rules.in_flight - fit}))."
            )

    # ---- what is counted -----------------------------------------------------------------------------------------------

    def _look(self) -> Counts:
        """What the stores have counted. Limits that do not hold in all of them are set again in all.

        Raises ``RuntimeError``: a store has limits of its own, or others keep setting them. As ``Members.lose``.
        """
        with self._lock:
            for attempt in range(_MAX_LOOKS):
                states = self._ask_states()
                found = self._together(states)
                if found is not None:
                    self._counts, self._looked_at = found, time.monotonic()
                    return found
                if attempt % 2:
                    newest = max(states.values(), key=lambda state: state.fleet[0])
                    self._set(Rules(*newest.limit), states)
                else:  # another client may be at it
                    time.sleep(random.uniform(0.1, 1.0) * _MAX_LOOK_PAUSE_S)  # noqa: S311 - no secret
        raise RuntimeError("limit: other clients keep setting the limits of the fleet.")

    def _ask_states(self) -> dict[Shard, protocol.State]:
        """Of each store that is there, what it says."""
        found = dict(self._members.answers(lambda shard: shard.storage.state()))
        now = time.monotonic()
        for shard in self._members.shards:
            if shard in found:
                self._states[shard.number] = found[shard], now
                self._missed_at.pop(shard.number, None)
            else:
                self._missed_at.setdefault(shard.number, now)
        return found

    def _gone(self, fleet: int) -> list[protocol.State]:
        """What stores that are gone had counted, as far as it is known."""
        known = [(*self._states[number], at) for number, at in self._missed_at.items() if number in self._states]
        return [it for it, at, missed_at in known if it.fleet[0] == fleet and missed_at - at <= _MAX_COUNTS_AGE_S]

    def _together(self, states: dict[Shard, protocol.State]) -> Counts | None:
        """What states say together; None: the limits do not hold in all stores, or one has begun again without the others."""
        for shard, state in states.items():
            if any(state.limit) and not state.fleet[0]:
                raise RuntimeError(
                    f"limit: expected a store without limits of its own in a fleet, but {shard.storage!r} has some. Remove them where it "
                    "is: rb.limit(None). Limits of a fleet are set through a buffer that is connected to all of its stores."
                )
        fleet = max(state.fleet[0] for state in states.values())
        live = sum(state.size for state in states.values())
        if not fleet:
            return Counts(Rules(), live=live)
        if any(state.fleet[0] < fleet or not state.fleet[1] for state in states.values()):
            return None
        stores, limit = next((state.fleet[1], state.limit) for state in states.values())
        counts = [state.limit_counts for state in (*states.values(), *self._gone(fleet))]
        level = sum(it["limit_level"] for it in counts)
        in_flight, inserts, samples = (int(sum(it[f"limit_{of}"] for it in counts)) for of in _COUNTED)
        unknown = max(0, stores - len(counts))
        return Counts(Rules(*limit), fleet, level, live, in_flight, inserts, samples, unknown)

    def _set(self, rules: Rules, states: dict[Shard, protocol.State]) -> None:
        """Set limits in all stores that are there, which begin balanced."""
        newest = max(state.fleet[0] for state in states.values())
        fleet = max(time.time_ns() // 1000, newest + 1)
        live = sum(state.size for state in states.values())
        level = rules.ratio * min(live, rules.min_size) if rules.ratio else float(live)
        for shard in states:
            with self._members.reaching(shard):
                shard.storage.limit_part(protocol.Limit(*rules, fleet, len(states), level))
                level = 0.0  # the first one has all of it
            if shard.lost:
                self._set(rules, {other: state for other, state in states.items() if other is not shard})
                return

    def set(self, rules: Rules) -> None:
        """Set limits, unless they are in force. Raises ``ConnectionError``: a store is gone. As :meth:`_look`."""
        with self._lock:
            if self._members.missing == "wait":
                self._members.check_all_present("limit")
            now = self._look()
            if now.rules != rules or now.unknown:
                self._set(rules, self._ask_states())
            self.emptied()

    def emptied(self) -> None:
        """Counts began again: nothing that was read holds any more."""
        with self._lock:
            self._leases = {True: _Lease(), False: _Lease()}
            self._look()

    # ---- what those ask who wait -----------------------------------------------------------------------------------------

    @property
    def limit(self) -> tuple[float, float, int, int]:
        with self._lock:
            if time.monotonic() - self._looked_at >= _LEASE_S:
                self._look()
            rules = self._counts.rules
            return rules.ratio, rules.tolerance, rules.min_size, rules.in_flight

    def size(self) -> int:
        """Live rows."""
        return self._counts.live

    def limit_counts(self) -> dict[str, float]:
        """As of one store. What waited is of this buffer alone."""
        now = self._look()
        counts: dict[str, float] = {
            "limit_inserts": now.inserts,
            "limit_samples": now.samples,
            "limit_in_flight": now.in_flight,
            "limit_level": now.level,
            "limit_lowest": now.centre - now.slack,
            "limit_highest": now.centre + now.slack,
            "limit_stores_unknown": now.unknown,
        }
        for side, it in (("insert", self._waits[False]), ("sample", self._waits[True])):
            counts |= {f"{side}_waits": it.calls, f"{side}_waited_s": it.seconds, f"{side}s_waiting": it.waiting}
        return counts

    def admits_samples(self, rows: int) -> bool:
        """Whether so many rows could be sampled now."""
        now = self._look()
        return not now.unknown and room(now, rows, samples=True) > 0

    def await_limit(self, samples: bool, rows: int, event: int, seconds: float) -> bool:  # noqa: ARG002
        """Sleep until the stores are to be asked again."""
        waits, seconds = self._waits[samples], min(seconds, served.RETRY_INTERVAL_S)
        waits.waiting += 1
        time.sleep(seconds)
        waits.waiting -= 1
        waits.seconds += seconds
        return True

    def count_limit_wait(self, samples: bool) -> None:
        """One more call has had to wait."""
        self._waits[samples].calls += 1


#: What a store counts, in rows.
_COUNTED = ("in_flight", "inserts", "samples")
