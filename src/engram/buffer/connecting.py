"""Buffers whose rows are elsewhere: over a connection to a server, or with actors of Ray."""

from __future__ import annotations

import os
import re
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from engram._support.unsupported import meant
from engram.buffer.configuration import READING_ARGUMENTS, ConnectArguments
from engram.buffer.recipe import kind_of, noted_settings, noted_unit
from engram.remote.fleet import check_missing

if TYPE_CHECKING:
    from engram.buffer.services import Facade
    from engram.remote.fleet.members import Missing
    from engram.remote.protocol import Full
    from engram.remote.served import ServedStorage

    Path = str | os.PathLike[str] | None
    from collections.abc import Callable, Mapping

    from engram.remote.shards import Described, Shard, ShardSavers

#: Addresses that are names in a Ray cluster begin with it.
_ON_RAY = "ray:"


class _Way(NamedTuple):
    """The arguments of ``ReplayBuffer.connect`` that say how servers are reached."""

    token: Path = None
    tls_root: Path = None
    patience: float = 60.0
    full: Full | None = None
    missing: Missing = "skip"
    stratum: int | None = None

    def check_on_ray(self) -> None:
        """Raise ``TypeError``, ``ValueError``: what shards on Ray do not take."""
        taken = ("patience", "missing", "stratum")
        given = sorted(name for name, value in self._asdict().items() if name not in taken and value is not None)
        if given:
            raise TypeError(
                f"connect: a name in a Ray cluster takes {', '.join((*taken, *READING_ARGUMENTS))}, as Ray says how its servers are "
                f"reached; got {given}."
            )
        check_missing(self.missing)


def connect_buffer(asked: type[Facade], address: object, arguments: ConnectArguments) -> Facade:
    """The buffer that a served store notes, over a connection.

    Args:
        asked: the class whose ``connect`` was called.
        address: of the servers.
        arguments: its keywords.

    Raises: as ``ReplayBuffer.connect``.
    """
    way = _Way(**{name: value for name, value in cast("dict[str, Any]", arguments).items() if name in _Way._fields})
    reading = {name: value for name, value in arguments.items() if name not in _Way._fields}
    for name in reading:
        if name not in READING_ARGUMENTS:
            raise TypeError(
                f"connect: {name}: a connection takes {', '.join((*_Way._fields, *READING_ARGUMENTS))}. The storage, the sampler and "
                f"the writer are those of the server.{meant(name, (*_Way._fields, *READING_ARGUMENTS))}"
            )
    if way.full not in (None, "block", "raise", "drop"):
        raise ValueError(f"connect: full: expected None, 'block', 'raise' or 'drop', got {way.full!r:.40}.")
    try:
        if isinstance(address, str) and address.startswith(_ON_RAY):
            way.check_on_ray()
            name, patience = address.removeprefix(_ON_RAY), float(way.patience)
            return attached_by_name(asked, name, patience, way.missing, way.stratum, reading)
        from engram.remote.connection import Access
        from engram.remote.fleet.storage import storage_at
        from engram.remote.protocol import addresses_of
        from engram.remote.served import RemoteSampler, RemoteWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'connect: needs {error.name}: pip install "engram-replay[{"ray" if error.name == "ray" else "serve"}]".',
            name=error.name,
        ) from error
    paths = [None if path is None else os.fspath(path) for path in (way.token, way.tls_root)]
    access = Access(tuple(addresses_of(address, "connect")), paths[0], paths[1], float(way.patience), way.full)
    storage: ServedStorage = storage_at(access, way.missing, way.stratum)
    try:
        served, noted = storage.served, storage.served.recipe
        kind = kind_of(noted, "connect")
        sampler = RemoteSampler(served)
        if asked._prioritized and not sampler.traits.prioritized:  # noqa: SLF001 - of the facade
            raise TypeError(
                f"connect: expected a store that a buffer with priorities wrote to, got one of a {kind.__name__} with {sampler!r}. "
                "Use ReplayBuffer.connect."
            )
        settings = {**noted_settings(noted), **{name: value for name, value in reading.items() if value is not None}}
        rb: Facade = kind(
            storage=storage,
            sampler=sampler,
            writer=RemoteWriter(served),
            sample_unit=noted_unit(noted),
            **settings,
            **kind.open_arguments(noted),
        )
        return rb
    except BaseException:
        storage.close()
        raise


Transport = Literal["auto", "flight", "shared"]
#: Names in Ray are looked for here, so that drivers of other jobs find them.
NAMESPACE = "engram"


class Shards(NamedTuple):
    """The shards of one buffer, and how a client uses them. They go by pickle to all processes of the Ray cluster."""

    each: tuple[Shard, ...]
    """In the order of their numbers."""
    transport: Transport = "auto"
    missing: Missing = "skip"
    """What happens to one that does not answer, if there are several."""
    stratum: int | None = None
    """The number of the one that draws all batches; None: all draw."""

    @property
    def is_one(self) -> bool:
        """Whether the store of the only shard is used as it is, and no fleet."""
        return len(self.each) == 1 and self.stratum is None


class OnRay:
    """The service of a client of shards: the client, and its pickles, make other clients."""

    backend = "ray"

    def __init__(self, shards: Shards, transport: str, own: Mapping[str, object]) -> None:
        """``own``: arguments of this buffer, in place of those that the shards know."""
        self.shards, self.transport = shards, transport
        self._own = {name: value for name, value in own.items() if name != "generator"}

    def client(self, buffer: Facade) -> Facade:
        made, arguments = self.reduced(buffer)
        return made(*arguments)

    def reduced(self, buffer: Facade) -> tuple[Callable[..., Facade], tuple[object, ...]]:
        own = self._own
        if buffer.initialized and len(buffer.transform):
            own = {**own, "transform": buffer.transform}
            own.pop("transform_factory", None)
        return attached, (self.shards, own)

    def savers(self, buffer: Facade) -> ShardSavers | None:
        if self.transport == "shared":
            return None
        from engram.remote.shards import ShardSavers

        return ShardSavers(self.shards.each, partial(_discard, weakref.ref(buffer)))

    def close(self) -> None:
        """Others use the shards."""


def _discard(known: weakref.ref[Facade]) -> None:
    """Drop what was drawn before rows were restored."""
    buffer = known()
    if buffer is not None and not buffer.closed:
        buffer._discard_prefetched("restore")  # noqa: SLF001 - of the facade
        cast("ServedStorage", buffer.storage).forget_asked()


def attached(shards: Shards, own: Mapping[str, object]) -> Facade:
    """A buffer of shards: of one shard, on its node, over the same memory; else over connections.

    Args:
        shards: they. ``transport``: ``"flight"``: a connection in any case; ``"shared"``: never one.
        own: arguments of the constructor, in place of those that the shards know. None: theirs.

    Raises:
        ConnectionError: the shard does not answer, or none does. RuntimeError: ``"shared"``, on another node. ValueError: ``"shared"``, and
            several shards; no such stratum. What making its buffer raised.
    """
    from engram.remote.shards import first_described

    return _made(shards, first_described(shards.each), own)


def _made(shards: Shards, described: Described, own: Mapping[str, object]) -> Facade:
    import ray

    from engram.remote.served import RemoteSampler, RemoteWriter

    wanted = shards.transport
    if wanted == "shared" and not shards.is_one:
        raise ValueError(
            f"transport='shared': expected one shard, whose memory a client can share, got {len(shards.each)}. Use transport='auto'."
        )
    near = described.node == ray.get_runtime_context().get_node_id()
    if wanted == "shared" and not near:
        raise RuntimeError(
            f"transport='shared': the rows are on node {described.node:.8}, and this process is not. Use transport='auto'."
        )
    shares = near and wanted != "flight" and shards.is_one
    if shares:
        storage, sampler, writer = shards.each[0].components()
    else:
        served = described.served
        storage, sampler, writer = _storage_of(shards, described), RemoteSampler(served), RemoteWriter(served)
    own = {name: value for name, value in own.items() if value is not None}
    given = {**described.arguments, **own}
    for name, other in (("transform", "transform_factory"), ("transform_factory", "transform")):
        if name in own and other not in own:  # they exclude each other
            given.pop(other, None)
    rb: Facade = described.kind(storage=storage, sampler=sampler, writer=writer, **given)
    rb._service = OnRay(shards, "shared" if shares else "flight", own)  # noqa: SLF001 - of the facade
    return rb


def _storage_of(shards: Shards, described: Described) -> ServedStorage:
    """The rows, over connections, as soon as there are some."""
    from engram.remote.fleet.members import SKIP_S
    from engram.remote.fleet.storage import AwaitedFleet
    from engram.remote.shards import AwaitedStorage, OneStore, Shard

    if shards.is_one:
        return AwaitedStorage(OneStore(shards.each[0]), described)
    each = shards.each
    if shards.missing == "skip":
        each = tuple(Shard(shard.actor, min(SKIP_S, shard.patience_s)) for shard in each)
    return AwaitedStorage(AwaitedFleet(each, shards.each, shards.missing, shards.stratum, each[0].turn), described)


def name_of(name: str, number: int, shards: int) -> str:
    """In Ray, of one of several shards. The first has the name of the buffer, so that it is there once."""
    return name if number == 0 else f"{name}/{number}-of-{shards}"


def attached_by_name(
    asked: type[Facade], name: str, patience: float, missing: Missing, stratum: int | None, arguments: dict[str, object]
) -> Facade:
    """A buffer of the shards of this name. Raises as ``ReplayBuffer.connect``."""
    import ray

    from engram.remote.shards import Shard, first_described

    if not ray.is_initialized():
        raise ConnectionError(
            "connect: expected a Ray cluster that this program has joined. Call ray.init(address=…) first."
        )
    number = re.compile(re.escape(name) + r"/(\d+)-of-(\d+)")
    known = [it["name"] for it in ray.util.list_named_actors(all_namespaces=True) if it["namespace"] == NAMESPACE]
    others = {int(found[1]): int(found[2]) for it in known if (found := number.fullmatch(it))}
    names = [name_of(name, k, 1 + len(others)) for k in range(1 + len(others))]
    try:
        actors = [ray.get_actor(one, NAMESPACE) for one in names]
    except ValueError as error:
        raise ConnectionError(f"connect: no RayReplayBuffer(name={name!r}) is known in this Ray cluster.") from error
    shards = Shards(tuple(Shard(actor, patience) for actor in actors), "auto", missing, stratum)
    described = first_described(shards.each)
    if asked._prioritized and "prioritized" not in described.served.traits_of_sampler:  # noqa: SLF001 - of the facade
        raise TypeError(
            f"connect: expected a buffer with priorities, got a {described.kind.__name__} with {described.served.sampler}. Use "
            "ReplayBuffer.connect."
        )
    return _made(shards, described, arguments)
