"""Starting processes. What a forked child has to recover from: its parent's threads do not exist there, but the locks that they held do."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from multiprocessing import context
from typing import Any, Protocol, TypeVar


class Forked(Protocol):
    """What has something to do in a forked child."""

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

    Things that use others come behind those. If such a one has ``before_fork()``, that is called first, and what it returns is
    given to ``forked(…)``: in the parent when the child is there, in the child after ``after_fork()``.
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
    """What was prepared for the forks that this thread has begun."""

    def __init__(self) -> None:
        self.prepared: list[list[tuple[Any, object]]] = []


_forks = _Forks()


def _prepare() -> None:
    prepared: list[tuple[Any, object]] = []
    _forks.prepared.append(prepared)  # first: an interrupt here is told, and the fork goes on
    prepared.extend((thing, thing.before_fork()) for thing in list(_users) if hasattr(thing, "before_fork"))


def _settle() -> None:
    for thing, token in _forks.prepared.pop():
        thing.forked(token)


def _recover() -> None:
    for made in list(_locks):
        owned = hasattr(made, "_is_owned") and made._is_owned()  # noqa: SLF001
        if not owned:  # else the thread that forked gives it back itself
            made._at_fork_reinit()  # noqa: SLF001 - as the locks of the standard library's own modules
    for thing in (*_others, *_users):
        thing.after_fork()
    _settle()


os.register_at_fork(before=_prepare, after_in_parent=_settle, after_in_child=_recover)
