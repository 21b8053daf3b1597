"""Buffers whose rows are elsewhere: over a connection to a server, or with actors of Ray."""

from __future__ import annotations

import os
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch

from engram._support import checks, field_paths, fork, native
from engram._support.progress import OnProgress, Work
from engram._support.unsupported import BY_NUMBER, meant, refused, refusing
from engram.buffer.configuration import READING_ARGUMENTS, ConnectArguments, Settings
from engram.buffer.field_updates import CALL, ConditionalUpdateResult, entries_of_patch
from engram.buffer.recipe import kind_of, noted_settings, noted_unit
from engram.buffer.row_access import KeyedRows, RowAccess
from engram.buffer.services import Facade, Service
from engram.errors import NoSampleable
from engram.saved.checkpoints import replacing
from engram.store.blocks import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engram.buffer import prefetching, read_path, saving
    from engram.buffer.wiring import Wiring
    from engram.remote import awaited, protocol
    from engram.remote.connection import Access
    from engram.remote.fleet.members import Missing
    from engram.remote.served import Drawn, ServedStorage
    from engram.remote.shards import Shard, ShardSavers
    from engram.saved.rows import Roles

    Given = str | os.PathLike[str] | None


#: Addresses that are names in a Ray cluster begin with it.
_ON_RAY = "ray:"


class Way(NamedTuple):
    """The arguments of ``ReplayBuffer.connect`` that say how servers are reached."""

    token: Given = None
    tls_root: Given | Sequence[str | os.PathLike[str]] = None
    tls_cert: Given = None
    tls_key: Given = None
    patience: float = 60.0
    full: protocol.Full | None = None
    missing: Missing = "skip"
    stratum: int | None = None
    compression: str | None = None
    own_lanes: bool = False

    def access(self, address: object, call: str) -> Access:
        """Raises ``TypeError``: no path or address. ``ValueError``: no address; a certificate without its key, or a key alone."""
        from engram.remote import member_list, protocol
        from engram.remote.connection import Access

        own = self.tls_cert, self.tls_key
        if own.count(None) == 1:
            raise ValueError(f"{call}: expected tls_cert and tls_key together, got one of them.")
        if checks.check_type(f"{call}: own_lanes", self.own_lanes, bool, "a bool") and self.full is None:
            raise ValueError(f"{call}: own_lanes: expected full= beside it. Other writes return the numbers anyway.")
        given = self.tls_root
        roots = [given] if given is None or isinstance(given, str | os.PathLike) else [*given]
        token = None if self.token is None else os.fspath(self.token)
        named, pair = (tuple(os.fspath(path) for path in group if path is not None) for group in (roots, own))
        members = member_list.listed(address)
        at = tuple(protocol.addresses_of(address, call)) if members is None else members.addresses()
        certificate = cast("tuple[str, str] | None", pair or None)
        how = self.compression, members, self.own_lanes
        return Access(at, token, named, float(self.patience), self.full, False, certificate, *how)

    def check_on_ray(self) -> None:
        """Raise ``TypeError``, ``ValueError``: what shards on Ray do not take."""
        taken = ("patience", "missing", "stratum")
        given = sorted(
            name for name, value in self._asdict().items() if name not in taken and value not in (None, False)
        )
        if given:
            raise TypeError(
                f"connect: a name in a Ray cluster takes {', '.join((*taken, *READING_ARGUMENTS))}, as Ray says how its servers are "
                f"reached; got {given}."
            )
        checks.check_choice("connect: missing", self.missing, ("skip", "wait"))


def connect_buffer(asked: type[Facade], address: object, arguments: ConnectArguments) -> Facade:
    """The buffer that a served store notes, over a connection.

    Args:
        asked: the class whose ``connect`` was called.
        address: of the servers.
        arguments: its keywords.

    Raises: as ``ReplayBuffer.connect``.
    """
    way = Way(**{name: value for name, value in cast("dict[str, Any]", arguments).items() if name in Way._fields})
    reading = {name: value for name, value in arguments.items() if name not in Way._fields}
    for name in reading:
        if name not in READING_ARGUMENTS:
            raise TypeError(
                f"connect: {name}: a connection takes {', '.join((*Way._fields, *READING_ARGUMENTS))}. The storage, the sampler and "
                f"the writer are those of the server.{meant(name, (*Way._fields, *READING_ARGUMENTS))}"
            )
    checks.check_choice("connect: full", way.full, (None, "block", "raise", "drop"))
    checks.check_choice("connect: compression", way.compression, (None, "zstd"))
    try:
        if isinstance(address, str) and address.startswith(_ON_RAY):
            way.check_on_ray()
            return attached_by_name(asked, address.removeprefix(_ON_RAY), way, reading)
        from engram.remote.fleet.storage import storage_at
        from engram.remote.served import RemoteSampler, RemoteWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'connect: needs {error.name}: pip install "engram-replay[{"ray" if error.name == "ray" else "serve"}]".',
            name=error.name,
        ) from error
    access = way.access(address, "connect")
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
        writer, unit, more = RemoteWriter(served), noted_unit(noted), kind.open_arguments(noted)
        return kind(storage=storage, sampler=sampler, writer=writer, sample_unit=unit, **settings, **more)
    except BaseException:
        storage.close()
        raise


Transport = Literal["auto", "flight", "shared"]


class Shards(NamedTuple):
    """The shards of one buffer, and how a client uses them. They go by pickle to all processes of the Ray cluster."""

    #: In the order of their numbers.
    each: tuple[Shard, ...]
    transport: Transport = "auto"
    #: What happens to one that does not answer, if there are several.
    missing: Missing = "skip"
    #: The number of the one that draws all batches; None: all draw.
    stratum: int | None = None
    #: Their actors have it in common: others may join or leave. Empty: they stay.
    name: str = ""

    @property
    def is_one(self) -> bool:
        """Whether the store of the only shard is used as it is, and no fleet."""
        return len(self.each) == 1 and not self.name and self.stratum is None

    def now(self) -> tuple[Shard, ...]:
        """Those that there are now."""
        from engram.remote.shards import names_of, shards_of

        return tuple(shards_of(names_of(self.name), self.each[0].patience_s, self.each)) or self.each


class OnRay(Service):
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

        return ShardSavers(self.shards.now, partial(_discard, weakref.ref(buffer)))


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

    shards = shards._replace(each=shards.now())  # a pickle may be old
    return _made(shards, first_described(shards.each), own)


def _made(shards: Shards, described: awaited.Described, own: Mapping[str, object]) -> Facade:
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


def _storage_of(shards: Shards, described: awaited.Described) -> ServedStorage:
    """The rows, over connections, as soon as there are some."""
    from engram.remote.awaited import AwaitedStorage, OneStore
    from engram.remote.fleet.members import SKIP_S
    from engram.remote.fleet.storage import AwaitedFleet, check_stratum
    from engram.remote.shards import Listed, Shard

    if shards.is_one:
        return AwaitedStorage(OneStore(shards.each[0]), described)
    each = shards.each
    check_stratum(shards.stratum, len(each))
    if shards.missing == "skip":
        each = tuple(Shard(shard.actor, min(SKIP_S, shard.patience_s), shard.name) for shard in each)
    joining = Listed(shards.name, each) if shards.name else None
    of = shards.missing, shards.stratum, each[0].turn, joining
    return AwaitedStorage(AwaitedFleet(each, shards.each, *of), described)


def attached_by_name(asked: type[Facade], name: str, way: Way, arguments: dict[str, object]) -> Facade:
    """A buffer of the shards of this name. Raises as ``ReplayBuffer.connect``."""
    import ray

    from engram.remote.shards import first_described, names_of, shards_of

    if not ray.is_initialized():
        raise ConnectionError("connect: expected a Ray cluster that was joined. Call ray.init(address=…) first.")
    several = tuple(shards_of(names_of(name), float(way.patience)))
    each = several or tuple(shards_of([name], float(way.patience)))
    if not each:
        raise ConnectionError(f"connect: no RayReplayBuffer(name={name!r}) is known in this Ray cluster.")
    shards = Shards(each, "auto", way.missing, way.stratum, name if several else "")
    described = first_described(shards.each)
    if asked._prioritized and "prioritized" not in described.served.traits_of_sampler:  # noqa: SLF001 - of the facade
        raise TypeError(
            f"connect: expected a buffer with priorities, got a {described.kind.__name__} with {described.served.sampler}. Use "
            "ReplayBuffer.connect."
        )
    return _made(shards, described, arguments)


class RequestsUnderWay:
    """Batches that a server was asked for before they are: as many messages as ``prefetch`` says, each of several small batches.

    An epoch is asked for one message at a time, as its end is not known.
    """

    def __init__(self, wiring: Wiring, settings: Settings, reading: read_path.ReadPath) -> None:
        self._wiring, self._reading, self._depth = wiring, reading, settings.prefetch
        assert settings.batch_size is not None  # the settings checked it
        self._rows = settings.batch_size
        #: Of batches that are to be drawn again, before others.
        self._keys: deque[int] = deque()
        #: Keys of the messages under way.
        self._asked: deque[list[int]] = deque()
        #: Batches that came, with their keys. Each is copied out of its message when it is taken.
        self._ready: deque[tuple[int, Callable[[], Drawn]]] = deque()
        self._key = Key()
        self._lock = fork.rlock()

    def rewired(self) -> None:
        """The components are others. What was drawn stays: it is as the server sent it."""

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """The next batch: what ``ReplayBuffer.sample`` returns."""
        wiring = self._wiring
        uses_up = wiring.of_sampler.consumes
        batch = wiring.gate.sampled(self._next, wiring.storage, batch_size, timeout, uses_up=uses_up)
        if batch.last:
            self._wiring.source.ran_out = True
        return self._reading.finish(batch.columns, batch.rows, cast("dict[object, object]", batch.info), return_info)

    def _next(self, _: None) -> Drawn:
        with self._lock:
            wiring = self._wiring
            has_epochs = wiring.of_sampler.has_epochs
            depth, asked_before = 1 if has_epochs else self._depth, bool(self._asked)
            while True:
                while len(self._asked) < depth and not (has_epochs and self._ready):
                    try:
                        self._ask()
                    except native.NotAdmitted:
                        if not self._asked and not self._ready:
                            raise
                        break  # those that were asked for come first
                if self._ready:
                    drawn = self._ready[0][1]()
                    self._ready.popleft()
                    return drawn
                refused = self._received()
                if refused is not None:
                    if not asked_before:
                        raise refused
                    asked_before = False  # it may be different when it is asked for again

    def _received(self) -> Exception | None:
        """Take the next answer; of those that are refusals also the following ones, as their batches may have been drawn and counted.

        Returns the refusal if there is no batch. Raises what else the server or the connection says.
        """
        refused, again = None, []
        while self._asked and not self._ready:
            try:
                batches = self._wiring.storage.answer(self._rows)
            except (NoSampleable, native.NotAdmitted) as error:
                refused = error
                again += self._asked.popleft()
                continue
            except ConnectionError:
                self.discard("sample")
                raise
            except Exception:
                self._put_back(self._asked.popleft()[1:])
                raise
            keys = self._asked.popleft()
            again += keys[len(batches) :]
            self._ready.extend(zip(keys, batches, strict=False))
        self._put_back(again)
        return None if self._ready else refused

    def _ask(self) -> None:
        each = self._wiring.storage.batches_in_message(self._rows)
        keys = [self._keys.popleft() if self._keys else self._drawn_key() for _ in range(each)]
        self._asked.append(keys)
        try:
            self._wiring.storage.ask_for(keys, self._rows)
        except BaseException:
            self._put_back(self._asked.pop())
            raise

    def _drawn_key(self) -> int:
        self._reading.draw_key(self._key)
        return self._key.value

    def _put_back(self, keys: list[int]) -> None:
        """Draw the batches of these keys before others."""
        self._keys.extendleft(reversed(keys))

    def __len__(self) -> int:
        return len(self._ready) + sum(map(len, self._asked))

    def materialize(self) -> None:
        """What is under way is drawn before what comes now."""
        with self._lock:
            self._wiring.storage.settle()

    wait = materialize

    def discard(self, call: str, *, keys: bool = True) -> None:  # noqa: ARG002 - as of batches that threads make
        """Forget batches. ``keys``: draw them again."""
        with self._lock:
            self._put_back([*(key for key, _ in self._ready), *(key for asked in self._asked for key in asked)])
            self._ready.clear()
            self._asked.clear()
            if not keys:
                self._keys.clear()
            self._wiring.storage.forget_asked()

    def close(self, timeout: float | None = None) -> None:  # noqa: ARG002 - there are no threads
        """Drop them, unless a thread is taking one: that ends when the connection does."""
        if self._lock.acquire(blocking=False):
            self._ready.clear()
            self._asked.clear()
            self._lock.release()


def _listed(keys: object) -> object:
    """Keys as a server takes them."""
    texts = isinstance(keys, np.ndarray) and keys.dtype.kind in "USO"
    return np.ravel(keys).tolist() if texts or isinstance(keys, range) else keys  # type: ignore[call-overload]


class ConnectedRowAccess(RowAccess):
    """Rows by number are refused. Trajectories end on the server."""

    in_order = refusing("read_all_in_order", BY_NUMBER)

    def set(self, index: object, value: object, call: str = "rb[index] = value") -> None:  # noqa: ARG002 - whatever they are
        raise refused(call, "Edit them where the store is.")

    def index_keys(self, field: object) -> None:
        self._wiring.storage.call_each("index_keys", {"field": field_paths.checked_path(field, "index_keys: field")})

    def rows_of(self, keys: object) -> KeyedRows:
        """Of several stores that have a key, the first: the numbers of their writes say nothing of each other."""
        (rows, generations), *others = self._wiring.storage.call_each("rows_of", {"keys": _listed(keys)})
        for more, theirs in others:
            generations, rows = generations.where(rows >= 0, theirs), rows.where(rows >= 0, more)
        return KeyedRows(rows, generations)

    def remove(self, rows: object, generation: object, keys: object) -> int:
        if keys is None or rows is not None or generation is not None:
            return super().remove(rows, generation, keys)
        self._check_editable("remove")
        found = self._wiring.storage.call_each("rows_with", {"keys": _listed(keys)})
        rows, generations = map(torch.cat, zip(*found, strict=True))
        return super().remove(rows, generations, None)

    def update_if_present(
        self, index: object, generation: object, patch: object, version_key: object, version: object, *, newer: bool
    ) -> ConditionalUpdateResult:
        self._check_editable(CALL)
        rows = checks.as_ints(f"{CALL}: index", self._wiring.rows_named(index))
        expected = checks.as_ints(f"{CALL}: generation", generation)
        given = {
            "generation": expected,
            "patch": {
                key: [*it.unbind()] if isinstance(it, torch.Tensor) and it.is_nested else it
                for key, it in entries_of_patch(patch)
            },
            "version_key": version_key,
            "version": version,
        }
        return ConditionalUpdateResult(*self._wiring.storage.update(rows, {**given, "require_newer": newer}))

    def empty(self, lanes: torch.Tensor | None, *, keep_write_count: bool) -> None:
        if lanes is not None:
            raise refused("empty(lane=)", "Call it where the store is; remove(rows) and empty() can be called here.")
        super().empty(None, keep_write_count=keep_write_count)

    def end_trajectories(self, lanes: torch.Tensor, roles: Roles | None, *, terminated: bool) -> torch.Tensor:
        if self._prefetching is not None:
            self._prefetching.materialize()
        return cast("torch.Tensor", self._wiring.storage.end_trajectories(lanes, roles, terminated=terminated))


class ConnectedSaving:
    """Saves what a server sends. Everything else about states is refused."""

    def __init__(self, wiring: Wiring, *others: object) -> None:  # noqa: ARG002 - others are of a buffer here
        """``others``: what :class:`Saving` takes besides, and a server needs none of."""
        self._wiring = wiring

    def dumps(self, path: str | os.PathLike[str], prefetch: str, progress: OnProgress | None) -> None:
        """As :meth:`ReplayBuffer.dumps`: the server dumps, and its files are written here. Batches under way are not in it."""
        checks.check_choice("dumps: prefetch", prefetch, ("save", "drop"))
        with replacing(Path(checks.check_path("dumps", path))) as folder, Work("copying", 0, progress) as work:
            self._wiring.storage.fetch_dump(folder, work)

    _refuse = refusing("state_dict, loads and checkpoints", "Save with dumps(path), or use them where the store is.")
    state_dict = prepare_state = snapshot = loads = prepare_load = prepare_placed = _refuse
    form = property(_refuse)


#: In place of what accesses rows, saves, and prefetches.
CONNECTED = (
    ConnectedRowAccess,
    cast("type[saving.Saving]", ConnectedSaving),
    cast("type[prefetching.Prefetching]", RequestsUnderWay),
)
