"""A buffer that follows the checkpoints of another one: read-only, its rows replaced whenever there is a newer checkpoint."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from engram import samplers, storages
from engram._support import checks, words
from engram._support.state import real
from engram.buffer import recipe, services
from engram.buffer.saving import OwnLoad, Saving
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.reshard.driver import reshard
from engram.reshard.plan import Policy, Target, checked_incomplete
from engram.reshard.plan import open_shards as open_saved
from engram.saved import attempts, checkpoints, disk, parts, series
from engram.types import Form, Sampler
from engram.writers._base import FollowingWriter

T = TypeVar("T")

#: How often a checkpoint that was removed while it was copied makes a look begin again.
_TRIES = 20
#: Seconds that closing waits for the thread, which may be in a call to a file system that does not answer.
_LEAVE_S = 5.0
#: Samplers that are made without arguments.
_PLAIN: dict[str, Callable[[], Sampler]] = {
    "RandomSampler": samplers.RandomSampler,
    "SamplerWithoutReplacement": samplers.SamplerWithoutReplacement,
}
_KEPT = checked_incomplete({"open": "keep", "headless": "keep"})


class Followed(NamedTuple):
    """The checkpoint that a buffer holds."""

    name: str
    step: int
    #: Seconds since it was complete, by the clock of its file system.
    age: float
    #: Newer ones that are damaged.
    passed_over: tuple[str, ...]


class Taken(NamedTuple):
    """A checkpoint that was loaded."""

    #: A buffer of its own with the rows.
    rb: services.Facade
    name: attempts.Name
    #: When it was complete, by ``time.monotonic()``.
    born: float


class NotFollowing:
    """Stands in for a :class:`Following` in buffers that follow no checkpoints."""

    followed: Followed | None = None

    def refuse(self, call: str) -> None:
        """Nothing is refused."""

    def stats(self) -> dict[str, float]:
        return {}

    def refresh(self, timeout: float = 60.0) -> bool:  # noqa: ARG002 - as of one that follows
        """Raise ``RuntimeError``."""
        raise RuntimeError(
            "refresh: this buffer follows no checkpoints: ReplayBuffer.follow makes one that does. Rows of other processes that "
            "share a store are seen at once."
        )

    def close(self) -> None:
        """There is nothing to end."""


class FollowOptions(NamedTuple):
    """The user's options for the buffers that are made."""

    cls: type[services.Facade]
    storage: storages.Storage | Callable[[], storages.Storage] | None
    sampler: Sampler | Callable[[], Sampler] | None
    arguments: Mapping[str, object]

    def made(self, checkpoint: checkpoints.Checkpoint) -> services.Facade:
        """An empty buffer of the kind that was saved, or was asked for."""
        with parts.open_storage(checkpoint, 0) as reader:
            found = parts.read_parts(checkpoint, 0, without=(parts.STORAGE, "prefetch"))
            kind = recipe.kind_of({"buffer": found["buffer"].type}, "follow")
            state = found["sampler"].state
            if parts.INDEX in state:
                state = parts.index_state(reader, state)
        storage = _storage_of(checkpoint) if self.storage is None else _again(self.storage, storages.Storage)
        sampler = _again(self.sampler, Sampler)
        if sampler is None:
            sampler = _sampler_of(found["sampler"], state, storage.max_size)
        elif kind._prioritized and not isinstance(sampler, samplers.PrioritizedSampler):  # noqa: SLF001 - a class here
            kind = kind.__mro__[1]
        if not issubclass(kind, self.cls):
            raise TypeError(f"follow: expected checkpoints of a {self.cls.__name__}, got those for a {kind.__name__}.")
        make: Callable[..., services.Facade] = kind
        return make(storage=storage, sampler=sampler, writer=FollowingWriter(), **self.arguments)


def _again(given: T | Callable[[], T], kind: type[object]) -> T:
    """A component for another buffer: what a callable makes, or a copy of one that no buffer has used."""
    if isinstance(given, type) or (callable(given) and not isinstance(given, kind)):
        return given()
    return copy.deepcopy(given)  # type: ignore[return-value] # it is no callable


def _storage_of(checkpoint: checkpoints.Checkpoint) -> storages.Storage:
    """A storage in RAM that holds all shards."""
    geometries = []
    for rank in range(checkpoint.manifest.world):
        with parts.open_storage(checkpoint, rank) as reader:
            geometries.append(reader.geometry)
    known = [geometry for geometry in geometries if geometry is not None]
    if not known:
        raise IncompatibleCheckpoint(
            f"follow: {checkpoint.folder}: expected rows that are tensors, got a list, or none yet. Of a list, pass "
            "storage=lambda: ListStorage(…) of its size."
        )
    if known[0].columns:
        return storages.LazyTensorStorage(known[0].capacity, ndim=len(known[0].columns) + 1)
    lanes = sum(geometry.lanes for geometry in known)
    length = max(geometry.lane_length for geometry in known)
    return storages.LazyTensorStorage(lanes * length, lanes=lanes)


def _sampler_of(saved: parts.SavedPart, state: Mapping[str, object], capacity: int) -> Sampler:
    """The sampler that was saved, as far as a checkpoint says what it was."""
    if saved.type == "PrioritizedSampler":
        alpha, beta, eps = (real(state, name, "follow: sampler") for name in ("alpha", "beta", "eps"))
        return samplers.PrioritizedSampler(capacity, alpha, beta, eps=eps)
    made = _PLAIN.get(saved.type)
    if made is not None:
        return made()
    raise TypeError(
        f"follow: sampler: expected one, as a checkpoint does not say all of the {saved.type} that was saved: pass sampler=."
    )


class Following(NotFollowing):
    """The thread that looks for newer checkpoints, the copies that it makes, and what the buffer holds now.

    Args:
        root: of the series.
        options: what buffers are made.
        every: seconds between two looks.
        shard: ranks whose shards are wanted; None: all.
        cache: local folder of the copies; None: a temporary one.
    """

    def __init__(
        self, root: Path, options: FollowOptions, every: float, shard: Sequence[int] | None, cache: Path | None
    ) -> None:
        self._root, self._options, self._every, self._ranks = root, options, every, shard
        self._temporary = tempfile.TemporaryDirectory(prefix="engram-follow-") if cache is None else None
        self._mirror = series.Mirror(root, cache or Path(self._temporary.name) / "copies", shard)  # type: ignore[union-attr]
        self._name: attempts.Name | None = None
        self._born = 0.0
        self._damaged: dict[str, None] = {}
        self._changed = threading.Condition()
        self._asked = self._looked = 0
        self._stop = False
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._warned = ""

    # ---- what the buffer asks --------------------------------------------------------------------------------------------

    @property
    def followed(self) -> Followed:  # type: ignore[override]
        assert self._name is not None  # the buffer exists since the first
        name = self._name
        return Followed(str(name), name.step, time.monotonic() - self._born, tuple(self._damaged))

    def refuse(self, call: str) -> None:
        """Raise ``RuntimeError``: what the call does would end with the next checkpoint."""
        raise RuntimeError(
            f"{call}: the buffer follows checkpoints in {str(self._root)!r}, which replace its rows and components. Give follow() what "
            "it is to have, or load a checkpoint into a buffer of your own."
        )

    def stats(self) -> dict[str, float]:
        it = self.followed
        return {"followed_step": it.step, "followed_age": it.age, "followed_damaged": len(it.passed_over)}

    def refresh(self, timeout: float = 60.0) -> bool:
        """Look for a newer checkpoint now, and take it.

        Args:
            timeout: seconds to wait for it to be copied and loaded.

        Returns:
            Whether there was one.

        Raises:
            TimeoutError: it takes longer, and goes on. OSError: the folder cannot be read. RuntimeError: the buffer follows
                nothing, or was inherited through a fork.
            IncompatibleCheckpoint, TypeError: the newest one does not fit what :meth:`follow` was told.
        """
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("refresh: the following thread is not in this process. Call ReplayBuffer.follow here.")
        with self._changed:
            self._asked += 1
            number, before = self._asked, self._name
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._looked >= number or self._stop, timeout):
                raise TimeoutError(f"refresh: not over after {timeout:g} s. It goes on: look at followed later.")
            if self._failed is not None:
                raise self._failed
            return self._name != before

    def __reduce__(self) -> NoReturn:
        raise TypeError("a buffer that follows checkpoints cannot be copied or sent elsewhere. Call follow there.")

    def close(self) -> None:
        """End the thread, and remove temporary copies. Repeatable."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_S)
        self._mirror.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    # ---- looking ---------------------------------------------------------------------------------------------------------

    def first(self, timeout: float) -> services.Facade:
        """The buffer of the newest checkpoint, as soon as there is one. Raises as ``ReplayBuffer.follow``."""
        until = time.monotonic() + timeout
        while True:
            with contextlib.suppress(FileNotFoundError):
                taken = self._newer()
                if taken is not None:
                    self._hold(taken)
                    return taken.rb
            if time.monotonic() >= until:
                raise FileNotFoundError(
                    f"follow: {str(self._root)!r}: expected a complete checkpoint within {timeout:g} s, found none."
                )
            time.sleep(min(self._every, 0.2, max(0.0, until - time.monotonic())))

    def begin(self, rb: services.Facade) -> None:
        """Keep a buffer up to date, as long as it is used."""
        target = weakref.ref(rb)
        self._thread = threading.Thread(target=_follow, args=(self, target), name="engram-follow", daemon=True)
        weakref.finalize(rb, self.close)
        self._thread.start()

    def turn(self, target: weakref.ref[services.Facade]) -> bool:
        """Wait until it is time, look, and replace the rows. Whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._asked > self._looked, self._every)
            number = self._asked
        failed: BaseException | None = None
        try:
            taken = None if self._stop or target() is None else self._newer()
            rb = target()
            if taken is not None and rb is not None and not self._stop:
                _replace(rb, taken.rb)
                self._hold(taken)
        except Exception as error:  # noqa: BLE001 - told, and the next look may succeed
            failed = error
            if not self._stop and str(error) != self._warned:
                self._warned = str(error)
                words.warn(
                    f"follow: {self._root}: the rows stay those of {self._name}: {type(error).__name__}: {error}"
                )
        with self._changed:
            self._looked, self._failed = number, failed
            self._changed.notify_all()
        return not self._stop and target() is not None

    def _hold(self, taken: Taken) -> None:
        """The buffer has these rows now."""
        self._name, self._born = taken.name, taken.born
        self._mirror.keep_only(str(taken.name))

    def _newer(self) -> Taken | None:
        """The newest good checkpoint; None: there is none that is newer than the one held."""
        for _ in range(_TRIES):
            gone = False
            for name in attempts.names(self._root):
                if self._name is not None and name <= self._name:
                    break
                if str(name) in self._damaged or not _is_complete(self._root / str(name)):
                    continue
                try:
                    return self._taken(name)
                except CorruptCheckpoint as error:
                    disk.look_again(self._root)
                    gone = not os.path.lexists(self._root / str(name))
                    if gone:
                        break
                    self._damaged[str(name)] = None
                    self._mirror.forget(str(name))
                    words.warn(f"follow: {name} is passed over: {error}")
            if not gone:
                return None
        return None

    def _taken(self, name: attempts.Name) -> Taken:
        """A checkpoint, copied and loaded. Raises ``CorruptCheckpoint``: it is damaged, or was removed meanwhile."""
        with series.Lease(self._root, str(name)) as lease:
            disk.look_again(self._root)
            born = time.monotonic() - _age(self._root, self._root / str(name))

            def beat() -> None:
                lease.renew()
                if self._stop:
                    raise InterruptedError("follow: the buffer was closed.")

            folder = self._mirror.copy(str(name), beat)
        first = self._name is None  # later ones give their rows to the buffer that is there
        with contextlib.nullcontext() if first else storages.announcing.temporary():
            return Taken(self._loaded(folder), name, born)

    def _loaded(self, folder: Path) -> services.Facade:
        with series.open_shards(folder, self._ranks) as checkpoint, contextlib.ExitStack() as stack:
            rb = self._options.made(checkpoint)
            saving: Saving = vars(rb)["_saving"]
            if checkpoint.manifest.world == 1 and _fits(rb.form, checkpoint):
                load = saving.prepare_load(
                    checkpoint, 0, default_rng=False, close_open=False, convert=True, prefetched=False
                )
            else:
                _check_takes_rows(rb.form, folder)
                targets = [Target(rb.form.lanes, rb.form.lane_length)]
                plan = reshard(open_saved(checkpoint, stack), targets, Policy(_KEPT))
                load = saving.prepare_placed(checkpoint, plan, 0, env_offset=0, default_rng=False, convert=True)
            wished = cast("int | None", self._options.arguments.get("batch_size"))
            rng = load.own.rng._replace(own=None, default=None)
            load._replace(own=OwnLoad(wished or load.own.batch_size, False, rng)).commit()
        return rb


def _fits(form: Form, checkpoint: checkpoints.Checkpoint) -> bool:
    """Whether the shard is of a storage like this."""
    with parts.open_storage(checkpoint, 0) as reader:
        it = reader.geometry
    return it is None or (form.capacity, form.lanes, form.ndim) == (it.capacity, it.lanes, len(it.columns) + 1)


def _check_takes_rows(form: Form, folder: Path) -> None:
    if form.ndim > 1 or not form.takes_rows:
        raise IncompatibleCheckpoint(
            f"follow: {folder.name}: expected a storage of tensors with lanes to place rows of other sizes or several ranks in, got a "
            f"{form.kind} with ndim={form.ndim}. Pass storage= of the size that was saved, or shard=."
        )


def _follow(following: Following, target: weakref.ref[services.Facade]) -> None:
    while following.turn(target):
        pass


def _replace(rb: services.Facade, made: services.Facade) -> None:
    """Give a buffer the parts of another one, in one step: a batch that is being drawn is of the old rows, the next one of the new."""
    storage = made.storage
    storage.detach(made)
    storage.attach(rb)
    rb.storage.detach(rb)
    vars(made)["_wiring"].gate = vars(rb)["_wiring"].gate  # which knows whether it was shut down
    vars(rb).update({name: part for name, part in vars(made).items() if name != "_following"})


def _is_complete(folder: Path) -> bool:
    with contextlib.suppress(CorruptCheckpoint, IncompatibleCheckpoint):
        made = attempts.decision(folder)
        return made is not None and made.status == "complete"
    return False


def _age(root: Path, folder: Path) -> float:
    """Seconds since a checkpoint was complete; 0 where the clock of the file system cannot be asked."""
    with contextlib.suppress(OSError), disk.open_folder(folder) as fd:
        return max(0.0, disk.now(root) - disk.changed(fd, "manifest.json"))
    return 0.0


def follow_buffer(
    cls: type[services.Facade],
    /,
    root: str | os.PathLike[str],
    *,
    every: float = 30.0,
    timeout: float = 60.0,
    shard: int | Sequence[int] | None = None,
    cache: str | os.PathLike[str] | None = None,
    storage: storages.Storage | Callable[[], storages.Storage] | None = None,
    sampler: Sampler | Callable[[], Sampler] | None = None,
    **arguments: object,
) -> Any:
    """A read-only buffer with the rows of the newest complete checkpoint below a folder, and then of every newer one.

    For evaluation, a second learner or a data set that grows, on another machine that sees the folder. A thread looks for a newer
    checkpoint, copies what is new in it to a local folder, checks every block, and loads the rows into new memory. Then the buffer
    gets them in one step between two batches: no batch has rows of two checkpoints, and sampling never waits.

    Args:
        root: the folder of a ``Checkpointer``, of one process or of many ranks.
        every: seconds between two looks.
        timeout: seconds to wait for the first complete checkpoint.
        shard: the rank, or ranks, whose rows are wanted. Default: all. Rows of several ranks are placed as by
            ``Checkpointer.restore`` on one rank; trajectories that are not whole are kept.
        cache: a local folder for copies, of this buffer alone: if it is started again, it copies only what is new. Default: a
            temporary one.
        storage: where the rows are: a callable that makes one for each checkpoint, or a storage that no buffer uses. Default:
            a ``LazyTensorStorage`` of the saved sizes. In a smaller one the newest trajectories are kept.
        sampler: which rows a batch has: likewise. Default: as saved, if it draws uniformly or by priority, or in epochs.
        **arguments: others of the constructor, such as ``batch_size`` (default: as saved), ``prefetch``, ``generator``, ``output``,
            ``transform_factory`` (called for each checkpoint).

    Returns:
        A buffer of the class that was saved, or, with another sampler in place of a prioritized class, of the one below it. Writes,
        and calls that replace components or load something, raise ``RuntimeError``. ``update_priority`` changes the priorities here
        until the next checkpoint. ``refresh()`` looks at once; ``followed`` and ``stats()`` say which checkpoint it is, and its age.

    While a checkpoint is copied, a lease below ``root`` keeps ``keep=`` of the Checkpointer from removing it. Without the right to
    write there, it may be removed meanwhile: then the next one is taken. Damaged checkpoints are passed over with a warning. If the
    job dies, the rows stay those of its last checkpoint.

    Raises:
        FileNotFoundError: there is no complete checkpoint within ``timeout``.
        IncompatibleCheckpoint: rows that do not fit the storage, or transforms that have other states.
        TypeError: a class other than this; a sampler that a checkpoint does not describe: pass ``sampler``.
        ValueError: ``every`` or ``timeout`` is not above 0, or there is no such shard. RuntimeError: another buffer uses ``cache``.
        OSError: no space, or an I/O error.

    Cost: the local folder has a copy of the checkpoint, and while the next one is copied that, too, where files of unchanged rows are
    shared. Rows are in memory twice while they are loaded.

    >>> import tempfile, torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend(torch.arange(10))
    >>> with tempfile.TemporaryDirectory() as root:
    ...     checkpoints = Checkpointer(root, rb)
    ...     _ = checkpoints.save(step=1)
    ...     reader = ReplayBuffer.follow(root)
    ...     _ = rb.extend(torch.arange(10, 15))
    ...     _ = checkpoints.save(step=2)
    ...     print(reader.followed.step, len(reader), reader.refresh(), reader.followed.step, len(reader))
    ...     reader.close()
    1 10 True 2 15
    """
    if not (every > 0 and timeout > 0):
        raise ValueError(f"follow: expected every and timeout above 0 s, got {every!r} and {timeout!r}.")
    given = [shard] if isinstance(shard, int) else shard
    ranks = None if given is None else [checks.check_count("follow: shard", rank, "rank", least=0) for rank in given]
    if "writer" in arguments:
        raise TypeError("follow: writer: expected none: the buffer is read-only.")
    options = FollowOptions(cls, storage, sampler, arguments)
    following = Following(
        Path(root).absolute(), options, every, ranks, None if cache is None else Path(cache).absolute()
    )
    try:
        rb = following.first(timeout)
        vars(rb)["_following"] = following
        following.begin(rb)
    except BaseException:
        following.close()
        raise
    return rb
