"""The storage of a store that the first write of any client creates: with an actor of Ray, or at a server."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import NamedTuple, NoReturn, Protocol, TypeVar, cast

import torch

from engram.errors import EMPTY, NoSampleable, RowError
from engram.format.schema import encode
from engram.remote import protocol
from engram.remote.connection import Access, Connection, Found, Servers
from engram.remote.served import ServedStorage
from engram.remote.storage import RemoteStorage
from engram.saved.rows import Roles
from engram.storages import Count, Storage, _columns, _geometry, _structure, _types
from engram.store.store import COUNTERS, Store

Method = TypeVar("Method", bound="Callable[..., object]")


class Described(NamedTuple):
    """A shard's description of its buffer, also before anything was written."""

    #: Of clients' buffers.
    kind: type
    #: Without a schema as long as nothing was written.
    served: protocol.Served
    #: Of the storage.
    geometry: _geometry.Geometry
    #: Where it is, as Ray numbers its nodes.
    node: str
    #: Of clients' buffers, besides the components.
    arguments: Mapping[str, object]


class Stores(Protocol):
    """One store, or several that are one buffer, which may not exist yet."""

    @property
    def number(self) -> int:
        """How many stores."""

    def find(self) -> ServedStorage | None:
        """A storage over a connection; None: nothing was written. Raises as ``ReplayBuffer.connect``."""

    def make(self, schema: str) -> ServedStorage:
        """The same; what is not there is made of a schema. Raises ``OSError``, too: no space."""


class Awaited(Servers, Protocol):
    """What knows where a store is served, and makes the store: a shard on Ray, or the servers of a directory."""

    def serve(self, schema: str | None) -> Found | None:
        """Where its store is served, which is made of a schema if there is none. None: there is neither.

        Raises ``ConnectionError``: it does not answer; ``OSError``: no space.
        """


class AtServers(Access):
    """The servers of one store, which the first write makes. As long as it is not there, they say no schema.

    They never stand for another store.
    """

    def serve(self, schema: str | None) -> Found | None:
        """As :class:`Awaited`."""
        connection = Connection(self)
        try:
            if schema is not None and not connection.served.schema:
                connection.ask("make", protocol.Make(schema), dict)
            there = schema is not None or bool(connection.served.schema)
        finally:
            connection.close()
        return self.find(None) if there else None


class OneStore:
    """One store.

    Args:
        shard: it makes the store.
    """

    number = 1

    def __init__(self, shard: Awaited) -> None:
        self._shard = shard

    def find(self) -> ServedStorage | None:
        return None if self._shard.serve(None) is None else RemoteStorage(Connection(self._shard))

    def make(self, schema: str) -> ServedStorage:
        self._shard.serve(schema)
        return RemoteStorage(Connection(self._shard))

    def __str__(self) -> str:
        return f"RemoteStorage({self._shard})"


def awaited_at(stores: Stores, served: protocol.Served) -> AwaitedStorage:
    """The storage of stores that the first write makes, of which a server has said this."""
    geometry = _geometry.Geometry(served.requested_size, served.lanes)
    return AwaitedStorage(stores, Described(object, served, geometry, "", {}))


class _Awaited:
    """``memory`` of a storage whose store is looked for, until it is there and lies before this in the instance."""

    def __get__(self, storage: AwaitedStorage | None, _: type[object]) -> Store | None:
        return None if storage is None or storage.there is None else vars(storage)["memory"]


def _of_store(method: Method, before: object = None) -> Method:
    """A method that the storage over a connection answers. ``before``: what is returned until there is one, or a method that does."""

    @wraps(method)
    def answer(self: AwaitedStorage, *arguments: object, **named: object) -> object:
        if (there := self.there) is not None:
            return operator.methodcaller(method.__name__, *arguments, **named)(there)
        return before(self, *arguments, **named) if callable(before) else before

    return cast("Method", answer)


def _empty(self: AwaitedStorage, *_: object, **__: object) -> NoReturn:  # noqa: ARG001 - of any storage
    """Raise ``NoSampleable``: nothing was written."""
    raise NoSampleable(EMPTY)


def _unmade(call: str) -> Callable[..., NoReturn]:
    """A method that raises ``RuntimeError``: nothing was written."""

    def refuse(self: AwaitedStorage, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{call}: expected rows in {self!r}, got none: nothing was ever written. Write some first.")

    return refuse


class AwaitedStorage(ServedStorage):
    """The storage of a store that the first write of any client creates.

    Args:
        stores: where to find it.
        described: what a shard said of itself.
    """

    memory: Store | None = _Awaited()  # type: ignore[assignment]
    structure: _structure.Structure | None = None  # type: ignore[assignment] # until there is a store

    def __init__(self, stores: Stores, described: Described) -> None:
        ServedStorage.__init__(self)
        self._stores, self._described = stores, described
        self._there: ServedStorage | None = None
        self.ndim = described.geometry.ndim

    @property
    def there(self) -> ServedStorage | None:
        """The storage over a connection; None: nothing was written. Raises as ``ReplayBuffer.connect``."""
        with self._lock:
            if self._there is None:
                self._take(self._stores.find())
            return self._there

    def _take(self, there: ServedStorage | None) -> None:
        if there is not None:
            self._there = there
            self._schema, self._structures = there._schema, there._structures  # noqa: SLF001 - of a storage
            self.structure, self.ndim = there.structure, there.ndim
            vars(self)["memory"] = there.memory

    def adopt_fields(self) -> None:
        if self._there is not None:
            self._there.adopt_fields()
            self._take(self._there)

    def _create(self, data: object, n: int | None, columns: tuple[int, ...], call: str) -> None:
        """Have the store made, for rows as these, unless it is there."""
        with self._lock:
            if self.memory is None:
                geometry = self._described.geometry
                structure = _structure.Structure.of(data, batched=n is not None, call=call, dtypes=geometry.dtypes)
                structure.flatten(data, n, call)
                self._take(self._stores.make(encode(geometry.schema(structure, columns)).decode()))

    limit = _of_store(ServedStorage.limit, _unmade("limit"))
    consumer_version = _of_store(ServedStorage.consumer_version, _unmade("consumer_version"))

    # ---- what it is ----------------------------------------------------------------------------------------------------

    @property
    def served(self) -> protocol.Served:
        return self._described.served if (there := self.there) is None else there.served

    @property
    def initialized(self) -> bool:  # type: ignore[override]
        return self.memory is not None

    @property
    def max_size(self) -> int:
        there, geometry = self.there, self._described.geometry
        return geometry.capacity * self._stores.number if there is None else there.max_size

    @property
    def requested_size(self) -> int:
        return self._described.geometry.max_size * self._stores.number

    @property
    def lanes(self) -> int:
        return self._described.geometry.lanes

    @property
    def columns(self) -> tuple[int, ...]:
        return () if self.memory is None else super().columns

    @property
    def nbytes(self) -> int:
        return 0 if (there := self.there) is None else there.nbytes

    @property
    def write_count(self) -> int:
        return 0 if (there := self.there) is None else there.write_count

    state = _of_store(ServedStorage.state, _empty)
    __len__ = _of_store(ServedStorage.__len__, 0)
    counters = _of_store(ServedStorage.counters, lambda _: dict.fromkeys(COUNTERS, 0))
    gauges = _of_store(ServedStorage.gauges, lambda _: {})

    # ---- drawing -------------------------------------------------------------------------------------------------------

    batches_in_message = _of_store(ServedStorage.batches_in_message, 1)
    ask_for = _of_store(ServedStorage.ask_for, _empty)
    answer = _of_store(ServedStorage.answer, _empty)
    draw = _of_store(ServedStorage.draw, _empty)
    settle = _of_store(ServedStorage.settle)
    forget_asked = _of_store(ServedStorage.forget_asked)
    can_sample = _of_store(ServedStorage.can_sample, before=False)
    draw_within = _of_store(ServedStorage.draw_within, _empty)
    call_each = _of_store(ServedStorage.call_each, _unmade("index_keys and rows_of"))
    update = _of_store(ServedStorage.update, _unmade("update_if_present"))
    stores = _of_store(ServedStorage.stores, _unmade("open_row and unsealed"))
    prioritize = _of_store(ServedStorage.prioritize)

    def extent(self) -> NoReturn:
        """Raise: it is asked for to draw here."""
        if self.there is None:
            raise NoSampleable(EMPTY)
        super().extent()

    def check_rows(self, rows: torch.Tensor, call: str = "update_priority") -> None:
        if (there := self.there) is not None:
            there.check_rows(rows, call)
        elif bool((rows != -1).any()):
            raise RowError(f"{call}: expected rows that batches have, got {rows.tolist()!r:.80} of an empty buffer.")

    # ---- writing -------------------------------------------------------------------------------------------------------

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[list[torch.Tensor], int]:
        if self.memory is None:
            dtypes = self._described.geometry.dtypes
            self._create(*_columns.rows_of_written(data, self, call, dtypes, batched=batched, count=count), call)
        return super().prepare(data, call, batched=batched, ignored=ignored, count=count)

    def number(self, value: object, path: tuple[str, ...]) -> object:
        return _types.as_tensor(value, path, "add") if self.memory is None else super().number(value, path)

    write = _of_store(ServedStorage.write, _empty)
    add_row = _of_store(ServedStorage.add_row)
    empty = _of_store(ServedStorage.empty)
    check_removal = _of_store(ServedStorage.check_removal, Storage.check_removal)
    remove = _of_store(ServedStorage.remove, 0)

    def end_trajectories(self, lanes: torch.Tensor, roles: Roles | None, *, terminated: bool) -> torch.Tensor:
        if (there := self.there) is None:
            return torch.full((len(lanes),), -1, device="cpu")
        return there.end_trajectories(lanes, roles, terminated=terminated)

    # ---- life ----------------------------------------------------------------------------------------------------------

    fetch_dump = _of_store(ServedStorage.fetch_dump, _empty)

    def __reduce__(self) -> tuple[type[AwaitedStorage], tuple[Stores, Described]]:
        return AwaitedStorage, (self._stores, self._described)

    def close(self) -> None:
        there = self._there
        super().close()
        if there is not None:
            there.close()

    def __repr__(self) -> str:
        return str(self._stores)
