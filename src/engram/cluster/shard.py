"""The actor of a shard: it has a store, and the server of it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import secrets
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import ray
import torch

from engram.buffer.wiring import component
from engram.checkpoint.checkpointer import Checkpointer
from engram.checkpoint.ranks import Ranks
from engram.errors import CorruptCheckpoint, RankFailed
from engram.format.schema import decode
from engram.remote.addresses import Address
from engram.remote.connection import Found
from engram.remote.shards import Described, answer_of
from engram.saved import attempts
from engram.serving.server import Server
from engram.serving.service import Service, served_by, why_alone
from engram.storages import LazyMemmapStorage, Storage, TensorStorage
from engram.types import Write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engram.buffer import ReplayBuffer
    from engram.checkpoint.reports import Options, RestoreOptions, RestoreReport, SaveReport, Wanted
    from engram.checkpoint.save import SaveHandle
    from engram.remote.shards import Call, Handle
    from engram.types import Sampler, Writer


Said: TypeAlias = Literal["set", "get", "claim", "add", "forget"]
#: For how long the actor that holds the board may take to answer.
_ANSWER_S = 60.0
_AGAIN = "the shard was started again, or another Checkpointer saves it now."


class Board:
    """What ranks tell each other: the actor of the first shard holds it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        #: Why nothing is told any more.
        self.broken = ""

    def _check(self, key: str) -> None:
        if key != self.key or self.broken:
            raise RankFailed(self.broken or _AGAIN)

    def do(self, key: str, what: Said, name: str, value: bytes | int | None) -> bytes | int | None:
        """What :class:`Ranks` calls by these names. Raises ``RankFailed``: this is the board of another job, or the job was broken off."""
        self._check(key)
        values, counters = self._values, self._counters
        match what, value:
            case "set", bytes():
                values[name] = value
            case "get", None:
                return values.get(name)
            case "claim", bytes():
                return values.setdefault(name, value)
            case "add", int():
                counters[name] = counters.get(name, 0) + value
                return counters[name]
            case "forget", None:
                values.pop(name, None)
                counters.pop(name, None)
        return None

    def look(self, key: str, names: Sequence[str]) -> dict[str, bytes]:
        """What is set of some names. Raises as :meth:`do`."""
        self._check(key)
        return {name: self._values[name] for name in names if name in self._values}

    def break_off(self, key: str, why: str) -> None:
        """Whatever is asked for from now on fails, for this reason."""
        if key == self.key:
            self.broken = why


class RanksOnRay(Ranks):
    """A rank of a job of actors.

    Args:
        rank, world: as of all ranks.
        holder: the actor that holds the board.
        key: of the board.
    """

    def __init__(self, rank: int, world: int, holder: Handle, key: str) -> None:
        super().__init__(rank, world)
        self._holder, self._key = holder, key

    def _answer(self, method: Call, *arguments: object) -> Any:
        """What the holder answers. Raises ``RankFailed``: it does not."""
        asked = method.options(max_task_retries=0, concurrency_group="board").remote(self._key, *arguments)
        try:
            return answer_of(asked, _ANSWER_S, "rank 0, which holds the board of this job")
        except ConnectionError as error:
            raise RankFailed(str(error)) from error

    def _ask(self, what: Said, name: str, value: bytes | int | None = None) -> Any:
        return self._answer(self._holder.board, what, name, value)

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._ask("get", key)
        return found

    def _look(self, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = self._answer(self._holder.look, [*keys])
        return found

    def claim(self, key: str, value: bytes) -> bytes:
        there: bytes = self._ask("claim", key, value)
        return there

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def forget(self, key: str) -> None:
        self._ask("forget", key)


class ShardSaver:
    """Saves and restores the rows of one shard.

    Args:
        rb: its buffer.
        rank, world: its number, and how many shards there are.
    """

    def __init__(self, rb: ReplayBuffer, rank: int, world: int) -> None:
        self._rb, self._rank, self._world = rb, rank, world
        self.board = Board("")
        self._key = ""
        self._checkpointer: Checkpointer
        self._handle: SaveHandle | None = None
        self._lock = threading.Lock()

    def knows(self, key: str) -> bool:
        """Whether its Checkpointer is that of this job."""
        return key == self._key and not self.board.broken

    def _check(self, key: str) -> None:
        if key != self._key:
            raise RankFailed(_AGAIN)

    def open(self, key: str, root: Path, options: Options, holder: Handle) -> None:
        """Make the Checkpointer of a job, in place of that of an older one. Raises what making it raises."""
        if self._rank == 0:
            self.board = Board(key)
        ranks = RanksOnRay(self._rank, self._world, holder, key) if self._world > 1 else None
        self._checkpointer = Checkpointer(root, self._rb, ranks=ranks, **options._asdict())
        with self._lock:
            self._key, self._handle = key, None

    def begin(self, key: str, step: int, user: str) -> None:
        """Begin a save, and return when the snapshot is taken. Raises as ``Checkpointer.save``."""
        self._check(key)
        with self._lock:
            self._handle = None
        handle = self._checkpointer.save(step, user=json.loads(user), wait=False)
        with self._lock:
            self._handle = handle

    def end(self, key: str) -> SaveReport:
        """Wait for the save. Raises as ``Checkpointer.save``."""
        self._check(key)
        if self._handle is None:
            raise RankFailed("no save goes on here.")
        return self._handle.wait()

    def give_up(self, key: str, rank: int, why: str) -> bool:
        """Vote against the save that goes on, for a rank that is gone. Whether it was named already, so that this could be."""
        with self._lock:
            handle = self._handle if key == self._key else None
        if handle is None or handle.path is None:
            return False
        with contextlib.suppress(OSError, CorruptCheckpoint):
            if attempts.decision(handle.path) is None:
                attempts.refuse(handle.path, rank, why)
        return True

    def restore(self, key: str, wanted: Wanted, options: RestoreOptions) -> RestoreReport:
        """As ``Checkpointer.restore``."""
        self._check(key)
        which = {"step": wanted.step, "name": wanted.name, "at_most": wanted.at_most, "allow_partial": wanted.partial}
        return self._checkpointer.restore(**which, **options._asdict())  # type: ignore[arg-type] # as it was called

    def prune(self, key: str, keep: int | None) -> list[str]:
        """As ``Checkpointer.prune``."""
        self._check(key)
        return self._checkpointer.prune(keep)

    def break_off(self, key: str, why: str) -> None:
        """End what ranks agree on."""
        self.board.break_off(key, why)


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
            self._storage, self._temporary = storage_of(made_of["storage"], place)
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

    def saver(self, name: str, *arguments: object) -> object:
        """Call a method of its :class:`ShardSaver`."""
        return getattr(self._saver, name)(*arguments)

    def board(self, key: str, what: Said, name: str, value: bytes | int | None) -> bytes | int | None:
        """What ranks tell each other."""
        return self._saver.board.do(key, what, name, value)

    def look(self, key: str, names: Sequence[str]) -> dict[str, bytes]:
        """What they said under some names."""
        return self._saver.board.look(key, names)


def storage_of(given: object, place: Place) -> tuple[TensorStorage, bool]:
    """A storage that processes share, whose rows an actor that takes the place of this one finds again; and whether it is temporary.

    Raises:
        TypeError: a callable that makes a ``LazyMemmapStorage`` and is no ``functools.partial`` of it.
        RuntimeError: one that processes cannot share. What making it raises.
    """
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
