"""Finds the stores of a fleet: by the addresses of servers, or by shards on Ray."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from engram._support.checks import check_count
from engram._support.words import said_wait, warn
from engram.format.schema import decode
from engram.remote import protocol
from engram.remote.connection import Connection, Found, Servers
from engram.remote.fleet import check_missing
from engram.remote.fleet.members import SKIP_S
from engram.remote.fleet.storage import FleetStorage
from engram.remote.storage import RemoteStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engram.remote.connection import Access
    from engram.remote.fleet.members import Missing
    from engram.remote.protocol import Full
    from engram.remote.served import ServedStorage


K = TypeVar("K")
T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
#: Addresses that are asked at a time.
_MAX_CONNECTING = 32


def storage_at(access: Access, missing: Missing, stratum: int | None) -> ServedStorage:
    """The store, or the fleet of stores, at some addresses. Raises as ``ReplayBuffer.connect``."""
    check_missing(missing)
    if len(access.addresses) == 1 and stratum is None:
        return RemoteStorage(Connection(access))
    served = _ask_servers(access, missing)
    stores: dict[str, list[protocol.Address]] = {}
    for address, answer in served.items():
        stores.setdefault(answer.store, []).append(address)
    check_stratum(stratum, len(stores))
    silent = [address for address in access.addresses if address not in served]
    if silent:
        others = "are taken for further servers of the one that does" if len(stores) == 1 else "join when they answer"
        warn(f"connect: no server answers at {', '.join(map(str, silent))}: these addresses {others}.")
    if len(stores) == 1 and stratum is None:
        return RemoteStorage(Connection(access._replace(addresses=(*served, *silent))))
    check_stores(list(served.values()), access.full)
    patience_s = min(SKIP_S, access.patience_s) if missing == "skip" else access.patience_s
    with ExitStack() as opened:  # where one cannot belong to the fleet, all are closed
        each = [access._replace(addresses=tuple(addresses), patience_s=patience_s) for addresses in stores.values()]
        storages = [opened.enter_context(closing(_without_limits(one))) for one in each]
        opened.pop_all()
    joining = Silent(access._replace(patience_s=patience_s), silent) if silent else None
    return FleetStorage(storages, missing, stratum, joining)


class Silent:
    """Addresses that did not answer when the fleet was connected. The stores that they serve join the fleet when they answer."""

    def __init__(self, access: Access, addresses: list[protocol.Address]) -> None:
        self._access, self._addresses = access, addresses

    def left(self) -> bool:
        """Whether some have not answered yet."""
        return bool(self._addresses)

    def find(self, known: Sequence[RemoteStorage]) -> Iterator[RemoteStorage]:
        """Stores that answer now, and are not known yet. Those that cannot belong to the fleet are named in a warning, once."""
        first, stores = known[0].served, {storage.served.store for storage in known}
        for address in tuple(self._addresses):
            try:
                answer = _served_at(self._access, address)
                self._addresses.remove(address)
                if answer.store in stores:  # another server of a known one
                    continue
                check_stores([first, answer], self._access.full)
                storage = _without_limits(self._access._replace(addresses=(address,)))
            except ConnectionError:  # gone again
                if address not in self._addresses:
                    self._addresses.append(address)
                continue
            except (OSError, ValueError, RuntimeError) as error:
                if address not in self._addresses:
                    warn(f"the store at {address} does not join: {error}")
                continue
            stores.add(answer.store)
            yield storage


def _without_limits(access: Access) -> RemoteStorage:
    """A store of a fleet. Raises ``ConnectionError``. ``ValueError``: it has limits of its own."""
    storage = RemoteStorage(Connection(access))
    with ExitStack() as opened:
        opened.callback(storage.close)
        state = storage.state()
        if any(state.limit) and not state.fleet[0]:
            raise ValueError(f"connect: {storage!r} has limits, which hold for one store. Remove them: rb.limit(None).")
        opened.pop_all()
    return storage


def _ask_servers(access: Access, missing: Missing) -> dict[protocol.Address, protocol.Served]:
    """What servers say, in the order of their addresses. Silent ones are asked again until the time is over.

    Raises ``ConnectionError``: none answers; or not all do, and they are waited for.
    """
    found: dict[protocol.Address, protocol.Served | ConnectionError] = {}
    begun, pause = time.monotonic(), _FIRST_PAUSE_S
    while True:
        silent = [it for it in access.addresses if isinstance(found.get(it, ConnectionError()), ConnectionError)]
        found |= zip(silent, _answers(partial(_served_at, access), silent), strict=True)
        served = {it: answer for it in access.addresses if not isinstance(answer := found[it], ConnectionError)}
        errors = [answer for answer in found.values() if isinstance(answer, ConnectionError)]
        waits_all = missing == "wait" or not served
        patience_s = access.patience_s if waits_all else min(SKIP_S, access.patience_s)
        if not errors or time.monotonic() + pause > begun + patience_s:
            break
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    if errors and waits_all:
        where = ", ".join(str(it) for it in access.addresses if it not in served)
        raise ConnectionError(
            f"connect: no server answered{said_wait(patience_s)} at {where}. Start it with engram serve, or pass another address."
        ) from errors[0]
    return served


def _served_at(access: Access, address: protocol.Address) -> protocol.Served:
    """What the server at an address says, if it answers at once. Raises ``ConnectionError``."""
    connection = Connection(access._replace(addresses=(address,), patience_s=0.0))
    connection.close()
    return connection.served


def _answers(ask: Callable[[K], T], each: Sequence[K]) -> list[T | ConnectionError]:
    """The answer of each, or the error of one that does not answer: they are asked at the same time."""

    def answer(one: K) -> T | ConnectionError:
        try:
            return ask(one)
        except ConnectionError as error:
            return error

    with ThreadPoolExecutor(max(1, min(_MAX_CONNECTING, len(each))), "engram-connect") as threads:
        return list(threads.map(answer, each))


def check_stratum(stratum: int | None, stores: int) -> None:
    """Raise ``ValueError``, ``TypeError``: no number of one of so many stores. None is no stratum."""
    if stratum is not None and check_count("connect: stratum", stratum, "stores", least=0) >= stores:
        raise ValueError(f"connect: stratum: expected the number of one of {stores} stores, got {stratum}.")


def check_stores(served: list[protocol.Served], full: Full | None) -> None:
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
    "fields and lanes": lambda served: msgspec.structs.replace(decode(served.schema.encode(), "connect"), capacity=0),
}


class Awaited(Servers, Protocol):
    """A shard on Ray: it knows where its store is served, and makes the store."""

    def serve(self, schema: str | None) -> Found | None:
        """Where its store is served, which is made of a schema if there is none. None: there is neither.

        Raises ``ConnectionError``: it does not answer; ``OSError``: no space.
        """


class AwaitedFleet:
    """A fleet of shards, some of whose stores may not exist yet.

    Args:
        shards: in the order of their numbers.
        makers: the same, which are waited for as long as it takes to make stores.
        missing: what happens to one that does not answer: see ``ReplayBuffer.connect``.
        stratum: the number of the store that draws all batches; None: all draw.
        turn: a number that is another one for each client that writes.

    Raises ``ValueError``: no such stratum.
    """

    def __init__(
        self,
        shards: Sequence[Awaited],
        makers: Sequence[Awaited],
        missing: Missing,
        stratum: int | None,
        turn: Callable[[], int],
    ) -> None:
        check_stratum(stratum, len(shards))
        self._shards, self._makers, self._missing, self._stratum, self._turn = shards, makers, missing, stratum, turn

    @property
    def number(self) -> int:
        """How many stores."""
        return len(self._shards)

    def find(self) -> FleetStorage | None:
        """The fleet. Stores that are not there are made as the others; None: there are none.

        Raises ``ConnectionError``: no shard answers, or not all do, and they are waited for. As ``ReplayBuffer.connect``.
        """
        found = _answers(lambda shard: shard.serve(None), self._shards)
        errors = [one for one in found if isinstance(one, ConnectionError)]
        if errors and (self._missing == "wait" or len(errors) == len(self._shards)):
            raise errors[0]
        having = [k for k, one in enumerate(found) if isinstance(one, Found)]
        return self._joined(having) if having else None

    def make(self, schema: str) -> FleetStorage:
        """The same; stores are made of a schema, of that of the first shard if it has one. All shards must be there."""
        self._makers[0].serve(schema)  # the first one decides where several clients do this
        first = Connection(self._makers[0])
        first.close()
        schema = first.served.schema
        for one in _answers(lambda shard: shard.serve(schema), self._makers[1:]):
            if isinstance(one, ConnectionError):
                raise one
        return self._joined(range(len(self._shards)))

    def __str__(self) -> str:
        return f"FleetStorage({', '.join(map(str, self._shards))})"

    def _joined(self, having: Sequence[int]) -> FleetStorage:
        """Connect to all. ``having``: those that have a store. Raises ``ConnectionError``: none answers, or not all do, and they are
        waited for.
        """
        storages: dict[int, RemoteStorage] = {}
        silent: dict[int, ConnectionError] = {}
        served: protocol.Served | None = None
        with ExitStack() as opened:
            for k in (*having, *(k for k in range(len(self._shards)) if k not in having)):
                try:  # one without a store makes one like that of the others
                    storages[k] = opened.enter_context(closing(RemoteStorage(Connection(self._shards[k], served))))
                    served = storages[k].served
                except ConnectionError as error:
                    silent[k] = error
            if served is None or (silent and self._missing == "wait"):
                raise silent[min(silent)]
            check_stores([storage.served for storage in storages.values()], None)
            for k in silent:
                away = RemoteStorage(Connection(self._shards[k], served, opens=False))
                storages[k] = opened.enter_context(closing(away))
            fleet = FleetStorage([storages[k] for k in sorted(storages)], self._missing, self._stratum, turn=self._turn)
            opened.pop_all()
        for k, why in silent.items():
            fleet.members.lose(fleet.members.shards[k], why)
        return fleet
