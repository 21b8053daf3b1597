"""Starting processes. What a forked child has to recover from: its parent's threads do not exist there, but the locks that they held do."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from multiprocessing import context, current_process, parent_process
from typing import Any, Protocol, TypeVar

import xxhash


class Forked(Protocol):
    """An object that has something to do in a forked child."""

    def after_fork(self) -> None: ...


T = TypeVar("T", bound=Forked)

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_others: weakref.WeakSet[Forked] = weakref.WeakSet()
#: Those that use others of them in ``after_fork()``.
_users: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """A ``threading.Lock`` that a forked child finds free. Do not fork while holding it."""
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> threading.RLock:
    """A ``threading.RLock`` that a forked child finds free, unless the thread that forked holds it."""
    made = threading.RLock()
    _locks.add(made)
    return made


def registered(thing: T, *, uses_others: bool = False) -> T:
    """The same thing, whose ``after_fork()`` is called in every forked child, without any lock held. Kept weakly.

    Things that use others come behind those. ``before_fork()``, if a thing has it, is called first. For things that use others, its
    result is passed to ``forked(…)``: in the parent when the child is there, in the child after ``after_fork()``.
    """
    (_users if uses_others else _others).add(thing)
    return thing


def dropped(thing: Forked) -> None:
    """Forget a registered thing. Repeatable."""
    _users.discard(thing)
    _others.discard(thing)


def is_spawning() -> bool:
    """Whether this thread is just pickling what it hands to a process that it starts, by ``spawn`` or ``forkserver``."""
    return context.get_spawning_popen() is not None


def keep_for_child(thing: object) -> None:
    """Keep a thing as long as the ``Process`` that this thread is starting, so that the child finds it even if the program drops it
    at once.

    ``Process.start`` drops the arguments when it returns, which is before the child has unpickled them.
    """
    starting: Any = context.get_spawning_popen()
    with contextlib.suppress(AttributeError):  # another library's, which takes no attributes
        starting.engram_keeps = [*getattr(starting, "engram_keeps", ()), thing]


class _Forks(threading.local):
    """Preparations for the forks that this thread has begun."""

    def __init__(self) -> None:
        self.prepared: list[list[tuple[Any, object]]] = []


_forks = _Forks()


# ---- which process this is -------------------------------------------------------------------------------------------


def rank() -> int | None:
    """The rank of this process: that of ``torch.distributed`` where it is initialised, else ``RANK``; None: it has none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    said = os.environ.get("RANK", "")
    return int(said) if said.isdecimal() else None


def worker() -> int | None:
    """The number of this process among the workers of a DataLoader; None: it is none."""
    data = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return None if info is None else int(info.id)


def _identity() -> tuple[int, ...]:
    """What ``multiprocessing`` numbers the processes by that it starts: the number of each behind that of its parent."""
    return tuple(current_process()._identity)  # noqa: SLF001 - all have one


class _Lineage:
    """The descent of this process from the first one of its program."""

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()
        self._at: tuple[int, ...] = ()
        self._forked, self.forks = 0, 0
        #: The rank that this process has from its parent.
        self.inherited = None if parent_process() is None else rank()

    def forked_off(self) -> None:
        """This process was forked from the one that this describes."""
        self._before, self._at = self.ordinals(), _identity()
        self._forked, self.forks, self.inherited = self.forks, 0, rank()

    def ordinals(self) -> tuple[int, ...]:
        """Nothing in the first process; another number behind those of its parent in each worker, child and fork."""
        number, identity = worker(), _identity()
        if number is not None:
            return (*self._before, -1 - number)
        if identity != self._at:  # multiprocessing has numbered it
            return (*self._before, *identity[len(self._at) :])
        return (*self._before, 0, self._forked) if self._forked else ()


_lineage = _Lineage()


def stream(*participants: int) -> int:
    """The 63 bits that are mixed into every key drawn in this process, so that no two processes draw the same from one seed.

    They follow from its rank; without one from its ordinals among the workers, children and forks of a program; else from the numbers
    of the participants that it is of its stores. Of those that inherited a rank, from rank and ordinals. 0, which changes no key: for
    rank 0, and without ordinals for participants 0.
    """
    own, ordinals = rank(), _lineage.ordinals()
    if own is None:
        said = f"ordinals {ordinals}" if ordinals else f"participants {participants}" if any(participants) else ""
    elif ordinals and (own == _lineage.inherited or worker() is not None):
        said = f"rank {own} {ordinals}"
    else:
        said = f"rank {own}" if own else ""
    return xxhash.xxh3_64_intdigest(said.encode()) >> 1 if said else 0


def _prepare() -> None:
    _lineage.forks += 1
    prepared: list[tuple[Any, object]] = []
    _forks.prepared.append(prepared)  # first: an interrupt here is told, and the fork goes on
    try:
        for thing in list(_others):
            getattr(thing, "before_fork", bool)()
    finally:
        prepared.extend((thing, thing.before_fork()) for thing in list(_users) if hasattr(thing, "before_fork"))


def _settle() -> None:
    for thing, token in _forks.prepared.pop():
        thing.forked(token)


def _recover() -> None:
    # No garbage is collected meanwhile: what is finalized before it was told would look for threads that are not there.
    with contextlib.ExitStack() as calls:
        if gc.isenabled():
            gc.disable()
            calls.callback(gc.enable)
        _lineage.forked_off()
        for made in list(_locks):
            if not getattr(made, "_is_owned", bool)():  # else the thread that forked gives it back itself
                made._at_fork_reinit()  # noqa: SLF001 - as the locks of the standard library's own modules
        # All of them, the last one first. What one raises, such as a damaged store, Python tells in the end.
        calls.callback(_settle)
        for thing in reversed([*_others, *_users]):
            calls.callback(thing.after_fork)


os.register_at_fork(before=_prepare, after_in_parent=_settle, after_in_child=_recover)
