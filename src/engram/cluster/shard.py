"""The actor of a shard: it has a store, and the server of it."""

from __future__ import annotations

import inspect
import itertools
import secrets
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import ray
import torch

from engram.buffer.wiring import component
from engram.cluster.saving import ShardSaver
from engram.format.schema import decode
from engram.remote.addresses import Address
from engram.remote.connection import Found
from engram.remote.shards import Described
from engram.serving.server import Server
from engram.serving.service import Service, served_by, why_alone
from engram.storages import LazyMemmapStorage, Storage, TensorStorage
from engram.types import Write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engram.buffer import ReplayBuffer
    from engram.checkpoint.options import Options, RestoreOptions
    from engram.checkpoint.reports import RestoreReport, SaveReport
    from engram.checkpoint.select import Wanted
    from engram.cluster.saving import Said
    from engram.remote.shards import Handle
    from engram.types import Sampler, Writer


class Place(NamedTuple):
    """Of a shard among those of its buffer."""

    maker: str
    """32 hexadecimal digits, by which an actor that takes the place of another one finds temporary rows."""
    number: int
    of: int
    """How many shards there are."""

    def folder(self, scratch_dir: str | None) -> Path:
        """Of the rows, in that of all shards; None: a temporary one."""
        if scratch_dir is None:
            return Path(tempfile.gettempdir()) / f"engram-{self.maker}"
        folder = Path(scratch_dir).absolute()
        return folder if self.of == 1 else folder / f"shard-{self.number:05d}-of-{self.of:05d}"


class ShardActor:
    """Makes a buffer, again where it takes the place of one that died, and serves its store as soon as there is one.

    Args:
        kind: the class of the buffer.
        made_of: arguments of its constructor.
        of_clients: arguments of the constructors of clients' buffers, besides the components.
        place: which shard it is.
    """

    def __init__(
        self, kind: type[ReplayBuffer], made_of: Mapping[str, Any], of_clients: Mapping[str, object], place: Place
    ) -> None:
        self._kind, self._of_clients = kind, of_clients
        self._server: Server | None = None
        self._found: Found | None = None
        self._failed: Exception | None = None
        self._turns = itertools.count()
        try:
            self._storage, self._temporary = storage_of(made_of.get("storage"), made_of.get("size"), place)
            self._rb = kind(**{**made_of, "storage": self._storage})
            self._saver = ShardSaver(self._rb, place.number, place.of)
        except Exception as error:  # noqa: BLE001 - `describe` raises it: Ray would start the actor again and again
            self._failed = error

    def describe(self) -> Described:
        """What clients know before there is a store. Raises what making the buffer raised."""
        if self._failed is not None:
            raise self._failed
        node, geometry = ray.get_runtime_context().get_node_id(), self._storage._geometry  # noqa: SLF001 - what it was asked for
        return Described(self._kind, served_by(self._rb, alone=why_alone(self._rb)), geometry, node, self._of_clients)

    def components(self) -> tuple[Storage, Sampler, Writer]:
        """Copies of them, which share the memory of the store."""
        return self._rb.storage, self._rb.sampler, self._rb.writer

    def serve(self, schema: str | None) -> Found | None:
        """Serve the store, which is made of a schema if there is none. Where; None: there is neither."""
        rb = self._rb
        if schema is not None and not rb.storage.initialized:
            self._storage.allocate_for(decode(schema.encode(), "extend"))
        if self._server is None and rb.storage.initialized:
            rb.observe(Write(torch.empty(0, dtype=torch.int64), 0), None)  # the folder notes what the buffer is
            host, token = ray.util.get_node_ip_address(), secrets.token_hex(16)
            self._server = Server(Service(rb), Address("grpc", host), token=token.encode())
            self._found = Found((Address("grpc", host, self._server.port),), token.encode())
        return self._found

    def turn(self) -> int:
        """Another number for each client."""
        return next(self._turns)

    def close(self) -> None:
        """End serving. Temporary files go."""
        if self._failed is not None:
            return
        if self._server is not None:
            self._server.drain()
        if self._temporary and isinstance(self._rb.storage, LazyMemmapStorage):
            self._rb.storage.cleanup()
        self._rb.close()

    # ---- checkpoints, in threads of their own: see ShardSaver ------------------------------------------------------------

    def knows_series(self, key: str) -> bool:
        """Whether it saves for this Checkpointer."""
        return self._saver.knows(key)

    def open_series(self, key: str, root: Path, options: Options, holder: Handle) -> None:
        """Save for a Checkpointer from now on."""
        self._saver.open(key, root, options, holder)

    def begin_save(self, key: str, step: int, user: str) -> None:
        """Begin a save."""
        self._saver.begin(key, step, user)

    def end_save(self, key: str) -> SaveReport:
        """Wait for it."""
        return self._saver.end(key)

    def restore(self, key: str, wanted: Wanted, options: RestoreOptions) -> RestoreReport:
        """Load a checkpoint."""
        return self._saver.restore(key, wanted, options)

    def prune(self, key: str, keep: int | None) -> list[str]:
        """Remove old checkpoints."""
        return self._saver.prune(key, keep)

    def give_up(self, key: str, rank: int, why: str) -> bool:
        """Vote against a save for another actor, which is gone: whether it could be."""
        return self._saver.give_up(key, rank, why)

    def board(self, key: str, what: Said, name: str, value: bytes | int | None) -> bytes | int | None:
        """What ranks tell each other."""
        return self._saver.board.do(key, what, name, value)

    def look(self, key: str, names: Sequence[str]) -> dict[str, bytes]:
        """What they said under some names."""
        return self._saver.board.look(key, names)

    def break_off(self, key: str, why: str) -> None:
        """End what they agree on."""
        self._saver.board.break_off(key, why)


def storage_of(given: object, size: int | None, place: Place) -> tuple[TensorStorage, bool]:
    """A storage that processes share, whose rows an actor that takes the place of this one finds again; and whether it is temporary.

    Raises:
        TypeError: none was given; a callable that makes a ``LazyMemmapStorage`` and is no ``functools.partial`` of it.
        RuntimeError: one that processes cannot share. What making it raises.
    """
    if given is None:
        raise TypeError(
            f"RayReplayBuffer: storage: expected one that processes share, got none. Pass partial(LazyTensorStorage, {size or 1000})."
        )
    if isinstance(given, partial) and given.func is LazyMemmapStorage:
        asked = inspect.signature(LazyMemmapStorage).bind(*given.args, **given.keywords)
        asked.apply_defaults()
        return _in_directory(place, **asked.arguments)
    storage: Storage = component(given, Storage, "storage", None)
    if isinstance(storage, LazyMemmapStorage) and not isinstance(given, Storage):
        raise TypeError(
            "RayReplayBuffer: storage: expected functools.partial(LazyMemmapStorage, …), which says the directory to an actor that is "
            "started again; got another callable that makes one."
        )
    storage.share(place.maker)  # which others than tensor storages refuse
    return cast("TensorStorage", storage), False


def _in_directory(
    place: Place,
    max_size: int,
    *,
    scratch_dir: str | None,
    existsok: bool,
    auto_cleanup: bool | None,
    device: str,
    later: Mapping[str, Any] | None = None,
    **form: Any,
) -> tuple[TensorStorage, bool]:
    """The storage in a directory, with the rows that are there."""
    if existsok:
        raise ValueError(
            "RayReplayBuffer: storage: existsok: expected False: a shard goes on with the rows in its directory. Remove them first."
        )
    LazyMemmapStorage(max_size, device=device, **form, **(later or {}))  # it checks them
    temporary = auto_cleanup is True or (auto_cleanup is None and scratch_dir is None)
    return LazyMemmapStorage.open_or_create(place.folder(scratch_dir), max_size, **form, unclean="refuse"), temporary
