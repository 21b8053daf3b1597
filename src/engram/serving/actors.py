"""Actors of Ray: a shard has a store and the server of it; a list has a buffer whose rows no other process sees."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, cast

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from engram._support import checks, nested
from engram.buffer import ReplayBuffer
from engram.buffer.wiring import component
from engram.checkpoint import checkpointer, reports, save
from engram.checkpoint.ranks import Ranks
from engram.errors import CorruptCheckpoint, RankFailed
from engram.format.schema import decode
from engram.remote import awaited, connection, protocol
from engram.remote.fleet.storage import AwaitedFleet, FleetStorage, random_turn
from engram.remote.shards import Handle, answer_of, shards_of
from engram.saved import attempts
from engram.serving import draining, server, service
from engram.storages import LazyMemmapStorage, ListStorage, Storage, TensorStorage
from engram.types import RowStorage, Sampler, Write, Writer

BoardCall: TypeAlias = Literal["set", "get", "claim", "add", "forget", "_look"]
#: For how long the actor that holds the board may take to answer.
_BOARD_TIMEOUT_S = 60.0
_OTHER_JOB = "the shard was started again, or another Checkpointer saves it now."


class Board:
    """A board on which ranks tell each other things. The actor of the first shard holds it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._held = Ranks.local()
        #: Why nothing is told any more.
        self.broken = ""

    def do(self, key: str, what: BoardCall, *arguments: object) -> object:
        """What :class:`Ranks` calls by these names. Raises ``RankFailed``: this is the board of another job, or the job was broken off."""
        if key != self.key or self.broken:
            raise RankFailed(self.broken or _OTHER_JOB)
        return getattr(self._held, what)(*arguments)

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

    def _answer(self, what: BoardCall, *arguments: object) -> Any:
        """What the holder answers. Raises ``RankFailed``: it does not."""
        board = self._holder.board.options(max_task_retries=0, concurrency_group="board")
        call = board.remote(self._key, what, *arguments)
        try:
            return answer_of(call, _BOARD_TIMEOUT_S, "rank 0, which holds the board of this job")
        except ConnectionError as error:
            raise RankFailed(str(error)) from error

    def set(self, key: str, value: bytes) -> None:
        self._answer("set", key, value)

    def get(self, key: str) -> bytes | None:
        return cast("bytes | None", self._answer("get", key))

    def _look(self, keys: Sequence[str]) -> dict[str, bytes]:
        return cast("dict[str, bytes]", self._answer("_look", [*keys]))

    def claim(self, key: str, value: bytes) -> bytes:
        return cast("bytes", self._answer("claim", key, value))

    def add(self, key: str, amount: int) -> int:
        return int(self._answer("add", key, amount))

    def forget(self, key: str) -> None:
        self._answer("forget", key)


class ShardSaver:
    """Saves and restores the rows of one shard.

    Args:
        rb: its buffer.
    """

    def __init__(self, rb: ReplayBuffer) -> None:
        self._rb = rb
        self.board = Board("")
        self._key = ""
        self._checkpointer: checkpointer.Checkpointer
        self._handle: save.SaveHandle | None = None
        self._lock = threading.Lock()

    def knows(self, key: str) -> bool:
        """Whether its Checkpointer is that of this job."""
        return key == self._key and not self.board.broken

    def _check(self, key: str) -> None:
        if key != self._key:
            raise RankFailed(_OTHER_JOB)

    def open(self, key: str, root: Path, options: reports.Options, holder: Handle, ids: Sequence[str]) -> None:
        """Make the Checkpointer of a job, in place of that of an older one. ``ids``: of the actors, in the order of the ranks.

        Raises what making it raises.
        """
        rank = ids.index(ray.get_runtime_context().get_actor_id())
        if rank == 0:
            self.board = Board(key)
        ranks = RanksOnRay(rank, len(ids), holder, key) if len(ids) > 1 else None
        self._checkpointer = checkpointer.Checkpointer(root, self._rb, ranks=ranks, **options._asdict())
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

    def end(self, key: str) -> reports.SaveReport:
        """Wait for the save. Raises as ``Checkpointer.save``."""
        self._check(key)
        if self._handle is None:
            raise RankFailed("no save goes on here.")
        return self._handle.wait()

    def settle(self) -> None:
        """Wait until no save goes on: all ranks have their snapshots then, or it has failed."""
        if self._handle is not None:
            with contextlib.suppress(Exception):  # it is told to who saves
                self._handle.wait()

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

    def restore(self, key: str, wanted: reports.Wanted, options: reports.RestoreOptions) -> reports.RestoreReport:
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
    """The place of a shard among those of its buffer."""

    #: 32 hexadecimal digits, by which an actor that takes the place of another one finds temporary rows.
    maker: str
    number: int
    #: How many shards there are.
    of: int

    def folder(self, scratch_dir: str | None) -> Path:
        """Of the rows, in that of all shards; None: a temporary one."""
        if scratch_dir is None:
            return Path(tempfile.gettempdir()) / f"engram-{self.maker}"
        folder = Path(scratch_dir).absolute()
        return folder if self.of == 1 else folder / f"shard-{self.number:05d}-of-{self.of:05d}"


class ShardActor:
    """An actor that makes a buffer, and serves its store as soon as there is one. It does so again in place of one that died.

    Args:
        kind: the class of the buffer.
        made_of: arguments of its constructor.
        of_clients: arguments of the constructors of clients' buffers, besides the components.
        place: which shard it is.
    """

    def __init__(
        self, kind: type[ReplayBuffer], made_of: Mapping[str, object], of_clients: Mapping[str, object], place: Place
    ) -> None:
        self._kind, self._of_clients = kind, of_clients
        self._server: server.Server | None = None
        self._service: service.Service | None = None
        self._serving = threading.Lock()
        self._found: connection.Found | None = None
        self._failed: Exception | None = None
        self._turns = itertools.count()
        try:
            self._storage, self._temporary = storage_of(made_of["storage"], place)
            self._rb = kind(**{**made_of, "storage": self._storage})  # type: ignore[arg-type] # it checks
            self._saver = ShardSaver(self._rb)
        except Exception as error:  # noqa: BLE001 - `describe` raises it: Ray would start the actor again and again
            self._failed = error

    def describe(self) -> awaited.Described:
        """What clients know before there is a store. Raises what making the buffer raised."""
        if self._failed is not None:
            raise self._failed
        node, geometry = ray.get_runtime_context().get_node_id(), self._storage._geometry  # noqa: SLF001 - what it was asked for
        return awaited.Described(
            self._kind, service.served_by(self._rb, alone=service.why_alone(self._rb)), geometry, node, self._of_clients
        )

    def components(self) -> tuple[Storage, Sampler, Writer]:
        """Copies of them, which share the memory of the store."""
        return self._rb.storage, self._rb.sampler, self._rb.writer

    def serve(self, schema: str | None) -> connection.Found | None:
        """Serve the store, which is made of a schema if there is none. Where; None: there is neither."""
        rb = self._rb
        with self._serving:
            if schema is not None and not rb.storage.initialized:
                self._storage.allocate_for(decode(schema.encode(), "extend"))
            if self._server is None and rb.storage.initialized:
                draining.finish(self._storage)
                rb.observe(Write(torch.empty(0, dtype=torch.int64), 0), None)  # the folder notes what the buffer is
                host, token = ray.util.get_node_ip_address(), secrets.token_hex(16)
                self._service = service.Service(rb)
                self._server = server.Server(self._service, protocol.Address("grpc", host), token=token.encode())
                self._found = connection.Found((protocol.Address("grpc", host, self._server.port),), token.encode())
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
        """Call a method of its :class:`ShardSaver`. Raises ``RuntimeError``: rows leave for shards that may have been saved already."""
        if name in ("knows", "begin", "restore") and self._service is not None and self._service.is_drained:
            raise RuntimeError("Checkpointer: expected shards that stay, but one is drained. Call it again then.")
        return getattr(self._saver, name)(*arguments)

    def drain(self, command: protocol.Drain) -> int:
        """Move some rows to other shards, by the names of their actors: how many are left. Raises as :func:`draining.drain`."""
        self._saver.settle()
        self.serve(None)
        return 0 if self._service is None else draining.drain(self._service, command, _fleet_of)

    def board(self, key: str, what: BoardCall, *arguments: object) -> object:
        """What ranks tell each other."""
        return self._saver.board.do(key, what, *arguments)


def _fleet_of(command: protocol.Drain) -> FleetStorage | None:
    """A client of the shards that a command names. One that is started again meanwhile is waited for."""
    to = [*shards_of(command.to, _BOARD_TIMEOUT_S)]
    return AwaitedFleet(to, to, "skip", 0, random_turn).find()


def storage_of(given: object, place: Place) -> tuple[TensorStorage, bool]:
    """A storage that processes share, whose rows an actor that takes the place of this one finds again; and whether it is temporary.

    Raises:
        TypeError: a callable that makes a ``LazyMemmapStorage`` and is no ``functools.partial`` of it.
        RuntimeError: one that processes cannot share. What making it raises.
    """
    if isinstance(given, partial) and given.func is LazyMemmapStorage:
        call = inspect.signature(LazyMemmapStorage).bind(*given.args, **given.keywords)
        call.apply_defaults()
        return _in_directory(place, call.arguments)
    storage: Storage = component(given, Storage, "storage", None)
    if isinstance(storage, LazyMemmapStorage) and not isinstance(given, Storage):
        raise TypeError(
            "RayReplayBuffer: storage: expected functools.partial(LazyMemmapStorage, …), which says the directory to an actor that is "
            "started again; got another callable that makes one."
        )
    storage.share(place.maker)  # which others than tensor storages refuse
    return cast("TensorStorage", storage), False


def _in_directory(place: Place, form: dict[str, Any]) -> tuple[TensorStorage, bool]:
    """The storage in a directory, with the rows that are there. ``form``: all arguments of its constructor."""
    scratch_dir, existsok, auto_cleanup = map(form.pop, ("scratch_dir", "existsok", "auto_cleanup"))
    if existsok:
        raise ValueError(
            "RayReplayBuffer: storage: existsok: expected False: a shard goes on with the rows in its directory. Remove them first."
        )
    form |= form.pop("more")
    LazyMemmapStorage(**form)  # it checks them
    del form["device"]
    temporary = auto_cleanup is True or (auto_cleanup is None and scratch_dir is None)
    return LazyMemmapStorage.open_or_create(place.folder(scratch_dir), **form, unclean="refuse"), temporary


#: Another actor in its place would be empty. Threads let a write through while a draw waits for it.
LIST_OPTIONS = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 16}


def is_kept_in_list(storage: object) -> bool:
    """Whether ``storage=`` asks for a list, as None does, or for a storage of one's own."""
    made = storage.func if isinstance(storage, partial) else storage() if inspect.isroutine(storage) else storage
    kind = made if inspect.isclass(made) else type(made)
    own = issubclass(kind, RowStorage) and not issubclass(kind, Storage)
    return made is None or issubclass(kind, ListStorage) or own


class ListActor:
    """An actor that keeps a buffer and runs its methods."""

    def open(self, kind: type[ReplayBuffer], given: Mapping[str, object]) -> None:
        """Make it. Raises what that raises."""
        self._rb = kind(**given)  # type: ignore[arg-type] # it checks
        self._iterations: dict[object, Iterator[object]] = {}

    def iterate(self) -> int:
        """Begin to iterate over batches: the number of the iteration."""
        self._iterations[number := len(self._iterations)] = iter(self._rb)
        return number

    def do(self, name: str, *arguments: object, **named: object) -> object:
        """Call a method. ``...`` stands for the buffer itself. Raises ``AttributeError``: an attribute of which a copy would do nothing."""
        if name == "following":
            return next(self._iterations[arguments[0]], None)
        found = getattr(self._rb, name)(*arguments, **named)
        if name == "__getattribute__" and not isinstance(found, int | float | str | tuple | None):
            raise AttributeError(
                f"RayReplayBuffer: {arguments[0]} stays in the actor that keeps the rows. Use methods of the buffer, such as set_sampler."
            )
        return ... if found is self._rb else found


class ListBuffer:
    """Stands for a buffer of class ``kind`` kept by an actor; each call is a message. Pickles and clients cannot end the actor."""

    service_backend = transport_kind = "ray"

    def __init__(self, actor: Handle, kind: type[ReplayBuffer], *, owns: bool = False) -> None:
        vars(self).update(_actor=actor, _kind=kind, _owns=owns, closed=False)

    __class__ = property(lambda self: self._kind)  # what isinstance() looks at

    def __reduce__(self) -> tuple[type[ListBuffer], tuple[Handle, type[ReplayBuffer]]]:
        return ListBuffer, (self._actor, self._kind)

    def _call(self, name: str, *arguments: object, **named: object) -> object:
        if self.closed:
            raise RuntimeError(f"{name}: the buffer was closed. Make another one.")
        try:
            arguments, named = nested.map_tensors((arguments, named), torch.Tensor.cpu)
            found = ray.get(self._actor.do.remote(name, *arguments, **named))
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise ConnectionError(
                f"RayReplayBuffer: {name}: the actor does not answer. Its rows are in its memory alone, and lost if it is gone. Load a "
                f"state or dump into another buffer, or use partial(LazyMemmapStorage, …), whose rows stay. {str(error).strip():.300}"
            ) from error
        return self if found is ... else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name}: no attribute of a buffer that an actor has.")
        if callable(getattr(self._kind, name, None)) or name in ("query", "register_save_hook", "register_load_hook"):
            return partial(self._call, name)
        return self._call("__getattribute__", name)

    __len__ = partialmethod(_call, "__len__")
    __getitem__ = partialmethod(_call, "__getitem__")
    __setitem__ = partialmethod(_call, "__setitem__")
    __setattr__ = partialmethod(_call, "__setattr__")  # type: ignore[assignment, misc]

    def __iter__(self) -> Iterator[object]:
        number = ray.get(self._actor.iterate.remote())
        while (batch := self._call("following", number)) is not None:
            yield batch

    @property
    def savers(self) -> NoReturn:
        """Raise ``TypeError``: a Checkpointer asks for them, and saves stores."""
        raise TypeError(
            "Checkpointer: buffer: expected a buffer whose rows lie in a store, got a list in an actor of Ray. Save it with "
            "rb.dumps(path), or make it of partial(LazyTensorStorage, …) or partial(LazyMemmapStorage, …)."
        )

    def start(self) -> ListBuffer:
        return self

    __enter__ = start

    def __exit__(self, *error: object) -> None:
        self.close()

    is_alive = property(lambda self: not self.closed)

    def clients(self, num_clients: int) -> list[ListBuffer]:
        return [ListBuffer(self._actor, self._kind) for _ in range(checks.check_count("clients", num_clients))]

    def client(self) -> ListBuffer:
        return self.clients(1)[0]

    def close(self, timeout: float | None = None) -> None:  # noqa: ARG002 - it ends at once
        """End the actor, and with it its rows, where the buffer was made. Repeatable."""
        if self._owns and not self.closed and ray.is_initialized():
            ray.kill(self._actor)
        vars(self)["closed"] = True

    shutdown = close

    def __repr__(self) -> str:
        return f"RayReplayBuffer({self._kind.__name__}, in an actor)"


def opened(actor: Handle, kind: type[ReplayBuffer], given: Mapping[str, object], patience: float) -> ReplayBuffer:
    """The buffer of an actor, which makes it. Raises what making it raises; ``ConnectionError``: the actor has not started in time."""
    answer_of(actor.open.remote(kind, given), patience, "RayReplayBuffer")
    return ListBuffer(actor, kind, owns=True)  # type: ignore[return-value] # it stands for one
