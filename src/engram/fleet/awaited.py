"""The stores of several shards as one fleet, once there are stores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from engram.fleet.finding import check_stores, check_stratum
from engram.fleet.storage import FleetStorage
from engram.remote.connection import Connection
from engram.remote.storage import RemoteStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engram.fleet.members import Missing
    from engram.remote.commands import Served
    from engram.remote.connection import Found, Servers

#: Shards that are asked at a time.
_AT_A_TIME = 32


class Awaited(Protocol):
    """A shard: it knows where its store is served, and makes one."""

    def serve(self, schema: str | None) -> Found | None:
        """Where its store is served, which is made of a schema if there is none. None: there is neither.

        Raises ``ConnectionError``: it does not answer; ``OSError``: no space.
        """


class AwaitedFleet:
    """The stores of several shards.

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
        found, errors = _asked(self._shards, None)
        if errors and (self._missing == "wait" or len(errors) == len(self._shards)):
            raise errors[min(errors)]
        having = [k for k, one in found.items() if one is not None]
        return self._joined(having) if having else None

    def make(self, schema: str) -> FleetStorage:
        """The same; stores are made of a schema, of that of the first shard if it has one. All shards must be there."""
        self._makers[0].serve(schema)  # the first one decides where several clients do this
        _, errors = _asked(self._makers[1:], self._schema_of_first())
        if errors:
            raise errors[min(errors)]
        return self._joined(range(len(self._shards)))

    def _schema_of_first(self) -> str:
        connection = Connection(self._access(self._makers[0]))
        connection.close()
        return connection.served.schema

    def __str__(self) -> str:
        return f"FleetStorage({', '.join(map(str, self._shards))})"

    @staticmethod
    def _access(shard: Awaited) -> Servers:
        return shard  # type: ignore[return-value] # it is both

    def _joined(self, having: Sequence[int]) -> FleetStorage:
        """Connect to all. ``having``: those that have a store. Raises ``ConnectionError``: none answers, or not all do, and they are
        waited for.
        """
        storages: dict[int, RemoteStorage] = {}
        silent: dict[int, ConnectionError] = {}
        served: Served | None = None
        try:
            for k in (*having, *(k for k in range(len(self._shards)) if k not in having)):
                try:  # one without a store makes one like that of the others
                    storages[k] = RemoteStorage(Connection(self._access(self._shards[k]), served))
                    served = storages[k].served
                except ConnectionError as error:
                    silent[k] = error
            if served is None or (silent and self._missing == "wait"):
                raise silent[min(silent)]
            check_stores([storage.served for storage in storages.values()], None)
            for k in silent:
                storages[k] = RemoteStorage(Connection(self._access(self._shards[k]), served, opens=False))
            fleet = FleetStorage([storages[k] for k in sorted(storages)], self._missing, self._stratum, turn=self._turn)
        except BaseException:
            for storage in storages.values():
                storage.close()
            raise
        for k, why in silent.items():
            fleet.members.lose(fleet.members.shards[k], why)
        return fleet


def _asked(shards: Sequence[Awaited], schema: str | None) -> tuple[dict[int, Found | None], dict[int, ConnectionError]]:
    """Where shards serve, by their numbers, and the errors of those that do not answer."""
    found: dict[int, Found | None] = {}
    errors: dict[int, ConnectionError] = {}
    with ThreadPoolExecutor(max(1, min(_AT_A_TIME, len(shards))), "engram-connect") as threads:
        asked = [threads.submit(shard.serve, schema) for shard in shards]
        for k, one in enumerate(asked):
            try:
                found[k] = one.result()
            except ConnectionError as error:
                errors[k] = error
    return found, errors
