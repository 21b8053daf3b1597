"""The storage of a buffer whose rows are in several stores, and how these are found."""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from engram._support import checks, fork, native, unsupported, words
from engram.around.episodes import usual_flags
from engram.errors import RowError
from engram.format.schema import decode
from engram.format.sizes import without_rings
from engram.remote import awaited, protocol
from engram.remote.connection import Access, Connection, Final, Found
from engram.remote.fleet import draws, plans
from engram.remote.fleet.members import SKIP_S, Joining, Ledger, Members, Missing, Shard, at_once, combined
from engram.remote.served import Drawn, OneStore, ServedStorage
from engram.remote.storage import RemoteStorage
from engram.saved.rows import Roles
from engram.store.limits import Rules
from engram.types import Write, WritePlan

Turn: TypeAlias = Callable[[], int]


_log = logging.getLogger("engram")

#: Counters of stores of which the fleet's is the largest, not the sum.
_LARGEST = ("consumer_version", "larger_than_memory", "reads_from_files", "writes_to_files")
_ROW = (1 << plans.SHIFT) - 1


def random_turn() -> int:
    """Where nothing tells clients that begin to write at the same time apart."""
    return random.getrandbits(48)


class FleetStorage(ServedStorage):
    """The rows of several stores that servers have open, as one storage.

    Args:
        storages: of each.
        missing, stratum: as ``ReplayBuffer.connect`` has them.
        joining: finds stores that did not answer at first.
        turn: of clients that begin to write at the same time, each gets another number.
    """

    def __init__(
        self,
        storages: Sequence[RemoteStorage],
        missing: Missing,
        stratum: int | None,
        joining: Joining | None = None,
        turn: Turn = random_turn,
    ) -> None:
        super().__init__()
        self._turn, first = turn, storages[0]
        assert first.memory is not None  # it is described
        schema, self._stratum = first.memory.schema, stratum
        self.members = Members(storages, missing, joining, epochs="has_epochs" in first.served.traits_of_sampler)
        self.ledger = Ledger(self.members)
        self.describe(schema, f"in {len(storages)} served stores", self.ledger, first.memory.participant)
        self.draws = draws.Draws(self.members, first.served, self._usual_bytes, stratum)
        #: Rows of the batches in each message under way.
        self._ahead: deque[int] = deque()
        self._homes = fork.rlock()
        #: The store that rows of this buffer go to, and the lanes in which a trajectory goes on there.
        self._home: Shard | None = None
        self._open: set[int] = set()
        #: Updates for rows of stores that were gone.
        self._dropped = 0

    # ---- what it is ----------------------------------------------------------------------------------------------------

    @property
    def served(self) -> protocol.Served:
        return self.members.shards[0].storage.served

    @property
    def max_size(self) -> int:
        return sum(shard.storage.max_size for shard in self.members.shards if not shard.left)

    @property
    def requested_size(self) -> int:
        return sum(shard.storage.requested_size for shard in self.members.shards if not shard.left)

    @property
    def nbytes(self) -> int:
        return sum(shard.storage.nbytes for shard in self.members.shards if not shard.left)

    def adopt_fields(self) -> None:
        """Once all stores have shown them."""
        storages = [shard.storage for shard in self.members.shards if not shard.lost]
        for storage in storages:
            storage.adopt_fields()
        schemas = [storage.memory.schema for storage in storages if storage.memory is not None]
        least = min(schemas, key=lambda it: len(it.fields), default=self._schema)
        if len(least.fields) > len(self._schema.fields):
            assert self.memory is not None  # it is described
            self.describe(least, self.memory.place, self.ledger, self.memory.participant)

    def state(self) -> protocol.State:
        found = [state for _, state in self.members.answers(self.members.ask)]
        self.adopt_fields()
        counters = plans.summed([state.counters for state in found], _LARGEST)
        counters["priority_updates_dropped"] += self._dropped
        shards = sum(not shard.left for shard in self.members.shards)
        counters |= {"shards": shards, "shards_missing": shards - len(found)}
        counters |= self.members.counters() | self.draws.counters()
        sizes = sum(state.size for state in found), sum(state.write_count for state in found)
        return protocol.State(*sizes, counters, (0.0, 0.0, 0, 0), {}, None, sum(state.writers for state in found))

    def gauges(self) -> dict[str, float]:
        ask = self.members.ask
        return combined([both for _, both in self.members.answers(lambda it: (ask(it), it.storage.gauges()))])

    def consumer_version(self, at_least: int | None = None) -> int:
        """The largest of all stores, which those learn that are there now; and those that are gone, when they are back."""
        with self._homes:
            known = max(self._versions(at_least))
            if at_least is None:
                return known
            self.members.version = known
            return max(self._versions(known))

    def _versions(self, at_least: int | None) -> Iterator[int]:
        """Of those that are there."""
        for shard, version in self.members.answers(lambda it: it.storage.consumer_version(at_least)):
            if at_least is not None:
                shard.change()
            yield version

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def batches_in_message(self, rows: int) -> int:
        return 1 if self.members.epochs else super().batches_in_message(rows)

    def ask_for(self, keys: Sequence[int], rows: int) -> None:
        """As many batches as the limits of the fleet admit. Raises ``NotAdmitted``: none."""
        admitted = self._admitted(rows, len(keys))
        try:
            self.draws.ask_for(keys[:admitted], rows)
        except BaseException:
            self.ledger.counted(rows * admitted, samples=True)
            raise
        self._ahead.append(rows * admitted)

    def _admitted(self, rows: int, calls: int) -> int:
        admitted = self.ledger.admit(rows, calls, samples=True, by=self.members.known())
        if not admitted:
            raise native.NotAdmitted(rows)
        return admitted

    def _count(self) -> None:
        """Messages that came, or were forgotten, are counted."""
        while len(self._ahead) > len(self.draws.pending):
            self.ledger.counted(self._ahead.popleft(), samples=True)

    def answer(self, rows: int) -> list[Callable[[], Drawn]]:  # noqa: ARG002 - the plan of the batch says it
        try:
            return self.draws.answer()
        finally:
            self._count()

    def settle(self) -> None:
        self.draws.settle()

    def forget_asked(self) -> None:
        self.draws.forget_asked()
        self._count()

    def draw(self, key: int, rows: int) -> Drawn:
        self._admitted(rows, 1)
        try:
            return self.draws.draw(key, rows)
        finally:
            self.ledger.counted(rows, samples=True)

    def draw_within(self, key: int, command: protocol.Sample) -> Drawn:
        return self.draws.draw_within(key, command)

    def can_sample(self, rows: int) -> bool:
        return rows > 0 and self.draws.can_sample()

    def check_rows(self, rows: Tensor, call: str = "update_priority") -> None:
        sizes = torch.tensor([shard.storage.max_size for shard in self.members.shards], device="cpu")
        stores, inside = rows >> plans.SHIFT, rows & _ROW
        known = (stores >= 0) & (stores < len(sizes))
        bad = rows[(rows != -1) & ~(known & (inside < sizes[stores.clamp(0, len(sizes) - 1)]))]
        if len(bad):
            raise RowError(
                f"{call}: expected rows that batches have, store << {plans.SHIFT} | row, of {len(sizes)} stores of "
                f"{sizes.tolist()} rows, or -1, got {int(bad[0])}."
            )

    def prioritize(self, rows: Tensor, priorities: Tensor, tickets: Tensor | None) -> None:
        for share in self._shares(rows):
            if not share.member.lost:
                with self.members.reaching(share.member):
                    share.member.storage.prioritize(share.rows, priorities[share.at], share.of(tickets))
                    continue
            self._dropped += len(share.at)

    # ---- writing -------------------------------------------------------------------------------------------------------

    def home(self) -> Shard:
        """The store that rows of this buffer go to: while it is there, and is not drained, it stays the one.

        Raises ``ConnectionError``: none is there. It is gone, or drained, in the midst of a trajectory: once, then others are taken.
        """
        with self._homes:
            gone = self._home
            if gone is None or gone.lost or gone.leaving:
                self._home = None
                if self._open:
                    self._open.clear()
                    raise ConnectionError(
                        f"extend: {gone.storage if gone else self!r}, which has the trajectory so far, is gone. Nothing was written. Begin "
                        "a new episode: it goes to another store."
                    )
                turn, stores = self._turn(), len(self.members.shards)
                answers = self.members.answers(lambda it: it.storage.writers())
                found = [(writers, (it.number - turn) % stores, it) for it, writers in answers if writers is not None]
                if not found:
                    raise ConnectionError(f"extend: all stores of {self!r} are gone, or drained. Nothing was written.")
                self._home = home = min(found)[2]
                home.leaving = False
                return home
            return gone

    def limit(self, rules: Rules, unconsumed: int) -> None:  # noqa: ARG002 - each store knows its own
        self.ledger.set(rules)

    def write(self, plan: WritePlan, prepared: list[Tensor], n: int) -> Write:
        shard = self.home()
        try:
            with self._writing(shard, n):
                written = shard.storage.write(plan, prepared, n)
        except protocol.TakesNone:  # another store takes them, unless a trajectory goes on in this one
            return self.write(plan, prepared, n)
        self._note_open(plan.lane, prepared, n)
        return Write(plans.number(written.rows, shard.number), 0)

    @contextmanager
    def _writing(self, shard: Shard, n: int) -> Iterator[None]:
        """Write rows to a store, which the limits of the fleet admit. Raises ``NotAdmitted``: not now."""
        if not self.ledger.admit(n, samples=False, by=[shard]):
            raise native.NotAdmitted(n)
        try:
            with self.members.needing(shard):
                yield
        except ConnectionError:
            self._open.clear()  # the trajectory is told of it now
            raise
        finally:
            self.ledger.counted(n, samples=False)
        shard.change()

    def _note_open(self, lane: Tensor | int | None, prepared: list[Tensor], n: int) -> None:
        """In which lanes a trajectory goes on behind rows that were written: none of the usual flags ends it with the last one."""
        fields = self._schema.fields
        flags = usual_flags([field.key for field in fields].__contains__)
        rows = slice(None) if isinstance(lane, Tensor) else slice(-1, None)
        ends = [of.reshape(n, -1)[rows].any(1) for it, of in zip(fields, prepared, strict=False) if it.key in flags]
        over = torch.stack(ends).any(0).tolist() if ends else [False] * n
        last = dict(zip(lane.tolist() if isinstance(lane, Tensor) else [lane or 0], over, strict=False))
        self._open = (self._open - last.keys()) | {lane for lane, ended in last.items() if not ended}

    def check_removal(self, rows: Tensor) -> None:
        """Raises, too: ``RuntimeError``, ``ConnectionError``: as a store of rows does, or it is gone."""
        self.check_rows(rows, "remove")
        for share in self._shares(rows):
            shard = share.member
            if shard.lost:
                raise ConnectionError(
                    f"remove: expected the stores of all rows, but {shard.storage!r} is gone. Nothing is removed."
                )
            with self.members.needing(shard, "Nothing is removed."):
                shard.storage.check_removal(share.rows)

    def remove(self, rows: Tensor, expected: Tensor | None) -> int:
        removed = 0
        for share in self._shares(rows):
            shard = share.member
            with self.members.needing(shard, f"remove: {removed} rows of other stores are removed."):
                removed += shard.storage.remove(share.rows, share.of(expected))
            shard.change()
        return removed

    # ---- methods that the servers call ---------------------------------------------------------------------------------

    def call_each(self, name: str, given: Mapping[str, object]) -> list[tuple[Tensor, ...]]:
        """All are asked at the same time."""
        self.members.check_all_present(name)
        answers = self.members.answers(lambda shard: shard.storage.call_each(name, given)[0])
        self.members.check_all_present(name)
        return [(plans.number(it[0], shard.number), *it[1:]) if it else () for shard, it in answers]

    def update(self, rows: Tensor, given: Mapping[str, object]) -> tuple[Tensor | None, ...]:
        self.check_rows(rows, "update_if_present")
        expected, version = cast("Tensor", given["generation"]), given["version"]
        batch, n = expected.shape, rows.numel()
        if n != batch.numel():
            raise ValueError(f"update_if_present: expected one generation per row, got {batch.numel()} for {n} rows.")
        entries = cast("dict[object, object]", given["patch"])
        patch = {key: plans.flattened(key, it, batch) for key, it in entries.items()}
        several = isinstance(version, list | tuple | np.ndarray | Tensor) and torch.as_tensor(version).numel() != 1
        versions = plans.flattened("version", version, batch) if several else None
        updated, rejected = expected.new_zeros((2, n), dtype=torch.bool)
        numbers = expected.new_full((n,), -1)
        for share in self._shares(rows.reshape(-1)):
            own = {key: plans.picked(value, share.at) for key, value in patch.items()}
            mine: dict[str, object] = {"generation": share.of(expected.reshape(-1)), "patch": own}
            mine |= {"version": plans.picked(versions, share.at)} if several else {}
            with self.members.needing(share.member, "update_if_present: rows of other stores may be written."):
                done = share.member.storage.update(share.rows, {**given, **mine})
            for whole, part in zip((updated, rejected, numbers), done, strict=True):
                if part is not None:
                    whole[share.at] = part
        wholes = [whole.reshape(batch) for whole in (updated, rejected, numbers)]
        return wholes[0], wholes[1] if given["version_key"] is not None else None, wholes[2]

    def stores(self, *, home: bool) -> list[OneStore]:
        each, shift = [self.home()] if home else self.members.present(), plans.SHIFT
        return [OneStore(it.storage.connection.call, partial(self._writing, it), it.number << shift) for it in each]

    def _shares(self, rows: Tensor) -> list[plans.Share[Shard, Tensor]]:
        """The share of each store."""
        return plans.shares(self.members.shards, torch.where(rows < 0, -1, rows >> plans.SHIFT), rows & _ROW)

    def empty(self, *, keep_write_count: bool) -> None:
        there = self.members.known()
        self.members.check_all_present("empty", " Nothing is emptied.")
        for shard in there:
            shard.storage.empty(keep_write_count=keep_write_count)
            shard.change()
        self.ledger.emptied()

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        """Of the store that rows of this buffer go to."""
        shard = self.home()
        self._open -= {*lanes.tolist()}
        with self.members.needing(shard):
            rows: Tensor = shard.storage.end_trajectories(lanes, roles, terminated=terminated)
        return plans.number(rows, shard.number)

    fetch_dump = unsupported.refusing("dumps", "Dump each of the stores, or save checkpoints of ranks, where they are.")

    # ---- life ----------------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[type[FleetStorage], tuple[object, ...]]:
        storages = [shard.storage for shard in self.members.shards]
        return FleetStorage, (storages, self.members.missing, self._stratum, self.members.joining)

    def close(self) -> None:
        members = self.members
        super().close()
        members.close()

    def __repr__(self) -> str:
        return f"FleetStorage({', '.join(repr(shard.storage) for shard in self.members.shards)})"


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


def storage_at(access: Access, missing: Missing, stratum: int | None) -> ServedStorage:
    """The store, or the fleet of stores, at some addresses. Raises as ``ReplayBuffer.connect``."""
    checks.check_choice("connect: missing", missing, ("skip", "wait"))
    if len(access.addresses) == 1 and stratum is None and access.members is None:
        connection = Connection(access)
        if connection.served.schema:
            return RemoteStorage(connection)
        connection.close()
        return awaited.awaited_at(awaited.OneStore(awaited.AtServers(*access)), connection.served)
    served = ask_servers(access, missing)
    stores: dict[str, list[protocol.Address]] = {}
    for address, answer in sorted(served.items(), key=lambda it: -it[1].generation):
        stores.setdefault(answer.store, []).append(address)
    check_stratum(stratum, len(stores))
    silent = [address for address in access.addresses if address not in served]
    new = next((one for one in served.values() if not one.schema), None)
    if new is not None:
        makers = [awaited.AtServers(tuple(addresses), *access[1:]) for addresses in stores.values()]
        if silent:
            raise ConnectionError(
                f"connect: no server answers at {', '.join(map(str, silent))}: expected all of them, as the first write makes stores."
            )
        if len(makers) == 1 and stratum is None and access.members is None:
            return awaited.awaited_at(awaited.OneStore(makers[0]), new)
        check_stores([one for one in served.values() if not one.schema], access.full)
        brief = access._replace(patience_s=_patience(access, missing), hurried=missing == "skip")
        hurried = [awaited.AtServers(one.addresses, *brief[1:]) for one in makers]
        joining = Silent(brief, silent) if access.members is not None else None
        return awaited.awaited_at(AwaitedFleet(hurried, makers, missing, stratum, random_turn, joining), new)
    if {*map(str, silent)} - {it.other for it in served.values()}:
        alone = len(stores) == 1 and access.members is None
        others = "are taken for further servers of the one that does" if alone else "join when they answer"
        words.warn(f"connect: no server answers at {', '.join(map(str, silent))}: these addresses {others}.")
    if len(stores) == 1 and stratum is None and access.members is None:
        return RemoteStorage(Connection(access._replace(addresses=(*next(iter(stores.values())), *silent))))
    check_stores(list(served.values()), access.full)
    access = access._replace(patience_s=_patience(access, missing), hurried=missing == "skip")
    with ExitStack() as opened:  # where one cannot belong to the fleet, all are closed
        each = [access._replace(addresses=tuple(addresses)) for addresses in stores.values()]
        storages = [opened.enter_context(closing(_without_limits(one, served[one.addresses[0]]))) for one in each]
        opened.pop_all()
    joining = Silent(access, silent) if silent or access.members is not None else None
    return FleetStorage(storages, missing, stratum, joining)


def _patience(access: Access, missing: Missing) -> float:
    """For how long a store of a fleet is waited for."""
    return min(SKIP_S, access.patience_s) if missing == "skip" else access.patience_s


class Silent:
    """Addresses that did not answer when the fleet was connected, and those that are listed later, where they are listed. The stores
    that they serve join the fleet when they answer.
    """

    def __init__(self, access: Access, addresses: list[protocol.Address]) -> None:
        self._access, self._addresses = access, addresses
        #: What is listed, when it was looked at, and why the list could not be used then.
        self._listed, self._looked_at, self._unusable = {*access.addresses} if access.members else set(), -math.inf, ""

    def left(self) -> bool:
        return bool(self._addresses) or self._access.members is not None

    def has_left(self, storage: RemoteStorage, *, lost: bool) -> bool:
        members, connection = self._access.members, storage.connection
        if members is None or not (members.has_all or (lost and self._access.hurried)):
            return False
        return connection.is_replaced or self._listed.isdisjoint(connection.access.reached.addresses)

    def _look(self) -> None:
        """Read the list again, if it is time. One that cannot be read, or is empty, changes nothing, which is logged once."""
        members = self._access.members
        if members is None or time.monotonic() < self._looked_at + members.interval_s:
            return
        self._looked_at = time.monotonic()
        try:
            listed = {*members.addresses()}
        except (OSError, ValueError) as error:
            if str(error) != self._unusable:
                _log.warning("the stores of the fleet stay as they are: %s", error)
            self._unusable = str(error)
            return
        self._unusable = ""
        self._addresses = [it for it in self._addresses if it in listed] + sorted(listed - self._listed)
        self._listed = listed

    def find(self, known: Sequence[RemoteStorage]) -> Iterator[RemoteStorage]:
        """Stores that answer now, and are not known yet. Those that cannot belong to the fleet are named in a warning, once."""
        self._look()
        first, stores = known[0].served, {storage.served.store: storage for storage in known}
        taken = [at for it in known if it.connection.is_replaced for at in it.connection.access.reached.addresses]
        self._addresses = [*dict.fromkeys([*self._addresses, *self._listed.intersection(taken)])]
        for address in tuple(self._addresses):
            try:
                answer = _served_at(self._access, address)
                self._addresses.remove(address)
                if answer.store in stores:  # another server of a known one
                    stores[answer.store].connection.add_address(address)
                    continue
                check_stores([first, answer], self._access.full)
                storage = _without_limits(self._access._replace(addresses=(address,)))
            except ConnectionError:  # gone again
                if address not in self._addresses:
                    self._addresses.append(address)
                continue
            except (OSError, ValueError, RuntimeError) as error:
                if address not in self._addresses:
                    words.warn(f"the store at {address} does not join: {error}")
                continue
            stores[answer.store] = storage
            yield storage


def _without_limits(access: Access, served: protocol.Served | None = None) -> RemoteStorage:
    """A store of a fleet. ``served``: what its server has said: then it is connected to when it is needed.

    Raises ``ConnectionError``. ``ValueError``: it has limits of its own.
    """
    limited = None if served is None else served.limited
    storage = RemoteStorage(Connection(access) if limited is None else Connection(access, served, opens=False))
    with ExitStack() as opened:
        opened.callback(storage.close)
        if limited is None:
            state = storage.state()
            limited = any(state.limit) and not state.fleet[0]
        if limited:
            raise ValueError(f"connect: {storage!r} has limits, which hold for one store. Remove them: rb.limit(None).")
        opened.pop_all()
    return storage


def ask_servers(access: Access, missing: Missing) -> dict[protocol.Address, protocol.Served]:
    """What servers say, in the order of their addresses. Silent ones are asked again until the time is over.

    Raises ``ConnectionError``: none answers; or not all do, and they are waited for.
    """
    found: dict[protocol.Address, protocol.Served | ConnectionError] = {}
    begun, pause = time.monotonic(), _FIRST_PAUSE_S
    while True:
        silent = [it for it in access.addresses if isinstance(found.get(it, ConnectionError()), ConnectionError)]
        found |= zip(silent, at_once(partial(_served_at, access), silent), strict=True)
        served = {it: answer for it in access.addresses if not isinstance(answer := found[it], ConnectionError)}
        copies = {answer.other for answer in served.values()}  # they have no address before they are promoted
        errors = {at: it for at, it in found.items() if isinstance(it, ConnectionError) and str(at) not in copies}
        if (final := next((error for error in errors.values() if isinstance(error, Final)), None)) is not None:
            raise final
        patience_s = _patience(access, missing) if served else access.patience_s
        if not errors or time.monotonic() + pause > begun + patience_s:
            break
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    if errors and (missing == "wait" or not served):
        where = f"{words.format_wait(patience_s)} at {', '.join(map(str, errors))}"
        raise ConnectionError(
            f"connect: no server answered{where}. Start it with engram serve, or pass another address."
        ) from next(iter(errors.values()))
    return served


def _served_at(access: Access, address: protocol.Address) -> protocol.Served:
    """What the server at an address says, if it answers at once. Raises ``ConnectionError``."""
    connection = Connection(access._replace(addresses=(address,), patience_s=0.0))
    connection.close()
    return connection.served


def check_stratum(stratum: int | None, stores: int) -> None:
    """Raise ``ValueError``, ``TypeError``: no number of one of so many stores. None is no stratum."""
    if stratum is not None and checks.check_count("connect: stratum", stratum, "stores", least=0) >= stores:
        raise ValueError(f"connect: stratum: expected the number of one of {stores} stores, got {stratum}.")


def check_stores(served: list[protocol.Served], full: protocol.Full | None) -> None:
    """Raise ``ValueError``: stores that cannot be one buffer. ``full``: what a write does that has no credits."""
    if full is not None:
        raise ValueError(
            f"connect: full: expected None with several stores, whose rows are numbered as they are written, got {full!r}."
        )
    alone = next((one.alone for one in served if one.alone), None)
    if alone is not None:
        raise ValueError(f"connect: expected one store, got several: {alone}. Connect to each.")
    kinds = {name: [kind(one) for one in served] for name, kind in _KINDS.items()}
    for name, found in kinds.items():
        other = next((one for one in found if one != found[0]), None)
        if other is not None:
            raise ValueError(
                f"connect: expected stores with the same {name}, got {found[0]!s:.200} and {other!s:.200}."
            )


#: What the stores of a fleet have in common.
_KINDS: dict[str, Callable[[protocol.Served], object]] = {
    "buffer class": lambda served: served.recipe.get("buffer"),
    "sampler": lambda served: re.sub(r"max_capacity=\d+", "max_capacity=…", served.sampler),
    "fields and lanes": lambda served: (
        served.schema and msgspec.structs.replace(without_rings(decode(served.schema.encode(), "connect")), capacity=0)
    ),
}


class AwaitedFleet(NamedTuple):
    """A fleet of shards, some of whose stores may not exist yet."""

    #: In the order of their numbers.
    shards: Sequence[awaited.Awaited]
    #: The same, which are waited for as long as it takes to make stores.
    makers: Sequence[awaited.Awaited]
    #: What happens to one that does not answer: see ``ReplayBuffer.connect``.
    missing: Missing
    #: The number of the store that draws all batches, which was checked; None: all draw.
    stratum: int | None
    #: A number that is another one for each client that writes.
    turn: Turn
    #: Finds stores that are listed later.
    joining: Joining | None = None

    @property
    def number(self) -> int:
        """How many stores."""
        return len(self.shards)

    def find(self) -> FleetStorage | None:
        """The fleet. Stores that are not there are made as the others; None: there are none.

        Raises ``ConnectionError``: no shard answers, or not all do, and they are waited for. As ``ReplayBuffer.connect``.
        """
        found = at_once(lambda shard: shard.serve(None), self.shards)
        errors = [one for one in found if isinstance(one, ConnectionError)]
        if errors and (self.missing == "wait" or len(errors) == len(self.shards)):
            raise errors[0]
        having = [k for k, one in enumerate(found) if isinstance(one, Found)]
        return self._joined(having) if having else None

    def make(self, schema: str) -> FleetStorage:
        """The same; stores are made of a schema, of that of the first shard if it has one. All shards must be there."""
        self.makers[0].serve(schema)  # the first one decides where several clients do this
        first = Connection(self.makers[0])
        first.close()
        schema = first.served.schema
        for one in at_once(lambda shard: shard.serve(schema), self.makers[1:]):
            if isinstance(one, ConnectionError):
                raise one
        return self._joined(range(len(self.shards)))

    def __str__(self) -> str:
        return f"FleetStorage({', '.join(map(str, self.shards))})"

    def _joined(self, having: Sequence[int]) -> FleetStorage:
        """Connect to all. ``having``: those that have a store. Raises ``ConnectionError``: none answers, or not all do, and they are
        waited for.
        """
        storages: dict[int, RemoteStorage] = {}
        silent: dict[int, ConnectionError] = {}
        served: protocol.Served | None = None
        with ExitStack() as opened:
            for k in (*having, *(k for k in range(len(self.shards)) if k not in having)):
                try:
                    if served is not None:  # one without a store makes one like that of the others
                        self.shards[k].serve(served.schema)
                    storages[k] = opened.enter_context(closing(RemoteStorage(Connection(self.shards[k]))))
                    served = storages[k].served
                except ConnectionError as error:
                    silent[k] = error
            certain = all(self.shards[k].replaces_lost for k in silent)  # else they may serve anything by then
            if served is None or (silent and (self.missing == "wait" or not certain)):
                raise silent[min(silent)]
            check_stores([storage.served for storage in storages.values()], None)
            for k in silent:
                away = RemoteStorage(Connection(self.shards[k], served, opens=False))
                storages[k] = opened.enter_context(closing(away))
            each = [storages[k] for k in sorted(storages)]
            fleet = FleetStorage(each, self.missing, self.stratum, self.joining, self.turn)
            opened.pop_all()
        for k, why in silent.items():
            fleet.members.lose(fleet.members.shards[k], why)
        return fleet
