"""The processes of one job: small messages between them, and what they agree on. Every wait ends.

Bulk data never travels here. Nothing uses the default process group, and no thread but the caller's takes part in a collective.
"""

from __future__ import annotations

import abc
import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

from engram.errors import RankFailed

__all__ = ["Ranks"]

T = TypeVar("T")

_FINE, _FAILED = b"+", b"-"
#: Seconds between two looks at what others said: the first, and the longest; and how much longer each is than the one before.
_SOON, _LATER, _LONGER = 0.0005, 0.05, 1.25
#: Of the seconds that have passed, the share of the longest pause between two looks at files, and the longest one of all.
_SHARE, _LATEST = 0.1, 1.0
#: Seconds for those that live to say so, once something failed that does not say who did.
_ROLL_CALL_S = 3.0


class Ranks(abc.ABC):
    """The processes of a job, as one of them sees them.

    :meth:`set`, :meth:`get`, :meth:`claim` and :meth:`add` may be called in any thread and never wait. :meth:`gather`, :meth:`max`,
    :meth:`all` and :meth:`run_on_all` are for one thread of each rank, all of which must call them in the same order.

    >>> from engram.checkpoint.ranks import Ranks
    >>> alone = Ranks.local()
    >>> alone.rank, alone.world, alone.gather(b"mine", timeout=1.0)
    (0, 1, [b'mine'])
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._gathered = 0
        self._sections = 0

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world={self.world})"

    # ---- making them -----------------------------------------------------------------------------------------------------

    @staticmethod
    def local() -> Ranks:
        """One process alone.

        >>> from engram import Ranks
        >>> Ranks.local().world
        1
        """
        return Ranks.threads(1)[0]

    @staticmethod
    def threads(n: int) -> list[Ranks]:
        """As many as there are threads in this process that play ranks; for tests. Raises ``ValueError``: below 1.

        >>> from engram import Ranks
        >>> [(it.rank, it.world) for it in Ranks.threads(2)]
        [(0, 2), (1, 2)]
        """
        if n < 1:
            raise ValueError(f"Ranks.threads: expected at least 1, got {n}.")
        board = _Board()
        return [_OnBoard(rank, n, board) for rank in range(n)]

    @staticmethod
    def from_torch(*, timeout: float = 60.0, host: str | None = None) -> Ranks:
        """The ranks of ``torch.distributed``, which must be initialised. All of them must call this, at the same place.

        They get a gloo group and a key-value store of their own: neither takes part in what training does with the default group.

        Args:
            timeout: seconds that any later message or agreement may take.
            host: name or address under which others reach the machine of rank 0. Default: ``MASTER_ADDR``, else its host name.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised.
            RankFailed: others did not come.

        >>> from engram import Ranks
        >>> Ranks.from_torch()  # in a program that torchrun did not start
        Traceback (most recent call last):
        RuntimeError: Ranks.from_torch: expected torch.distributed to be initialised, found that it is not. ...
        """
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "Ranks.from_torch: expected torch.distributed to be initialised, found that it is not. Call "
                "torch.distributed.init_process_group first, or use Ranks.local()."
            )
        return _Torch(distributed.get_rank(), distributed.get_world_size(), timeout, host)

    # ---- the store -------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Let all ranks know.

        >>> from engram import Ranks
        >>> one, other = Ranks.threads(2)
        >>> one.set("learning rate", b"0.1")
        >>> other.get("learning rate")
        b'0.1'
        """

    @abc.abstractmethod
    def get(self, key: str) -> bytes | None:
        """What some rank set; None: nothing yet.

        >>> from engram import Ranks
        >>> one, other = Ranks.threads(2)
        >>> one.get("learning rate") is None
        True
        >>> other.set("learning rate", b"0.1")
        >>> one.get("learning rate")
        b'0.1'
        """

    @abc.abstractmethod
    def claim(self, key: str, value: bytes) -> bytes:
        """Set a value that is not set yet. Returns the value that is there then, the same on all ranks.

        >>> from engram import Ranks
        >>> one, other = Ranks.threads(2)
        >>> one.claim("leader", b"0"), other.claim("leader", b"1")
        (b'0', b'0')
        """

    @abc.abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a counter that all ranks share, 0 at first; its value then. Keys of counters and of values are different.

        >>> from engram import Ranks
        >>> one, other = Ranks.threads(2)
        >>> one.add("steps", 10), other.add("steps", 5)
        (10, 15)
        """

    @abc.abstractmethod
    def forget(self, key: str) -> None:
        """Remove a key, or a counter, that no rank waits for any more.

        >>> from engram import Ranks
        >>> one, other = Ranks.threads(2)
        >>> one.set("learning rate", b"0.1")
        >>> other.forget("learning rate")
        >>> one.get("learning rate") is None
        True
        """

    def leave(self, key: str, others: int, timeout: float) -> None:
        """End an exchange: rank 0, whose process holds the store, returns last, and may end at once.

        The other ranks say here that they look at nothing of this exchange any more. Raises nothing: the exchange is over.

        Args:
            key: of a counter, the same on all ranks.
            others: how many ranks rank 0 waits for.
            timeout: seconds that it waits at most.

        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from engram import Ranks
        >>> def exchange(rank):
        ...     rank.set(f"answer/{rank.rank}", b"done")
        ...     found = rank.wait(["answer/0", "answer/1"], 60)
        ...     rank.leave("left", 1, 60)
        ...     return found
        >>> with ThreadPoolExecutor(2) as pool:
        ...     list(pool.map(exchange, Ranks.threads(2)))
        [[b'done', b'done'], [b'done', b'done']]
        """
        with contextlib.suppress(RankFailed):
            if self.rank:
                self.add(key, 1)
            elif others > 0:
                for _ in looks(timeout):
                    if self.add(key, 0) >= others:
                        break
                self.forget(key)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        """What is set under each key, once all are; None where nothing is when the time is over.

        Args:
            keys: that some rank sets.
            timeout: seconds.

        >>> from engram import Ranks
        >>> one, other = Ranks.threads(2)
        >>> one.set("ready", b"yes")
        >>> other.wait(["ready"], timeout=5.0)
        [b'yes']
        """
        return self._wait(keys, timeout)

    def _wait(self, keys: Sequence[str], timeout: float, over: str | None = None) -> list[bytes | None]:
        """As :meth:`wait`, which ends too when the key ``over`` is set."""
        found: dict[str, bytes] = {}
        for _ in looks(timeout):
            found.update(self._look([key for key in keys if key not in found]))
            if len(found) == len(set(keys)) or (over is not None and self.get(over) is not None):
                break
        return [found.get(key) for key in keys]

    def _look(self, keys: Sequence[str]) -> dict[str, bytes]:
        """What is set now, of some keys."""
        return {key: value for key in keys if (value := self.get(key)) is not None}

    def section(self) -> str:
        """A prefix for keys of one user of the store: the first on each rank gets the same, and so on.

        >>> from engram import Ranks
        >>> first, second = Ranks.threads(2)
        >>> first.section() == second.section()
        True
        >>> first.section() == first.section()
        False
        """
        self._sections += 1
        return f"{self._sections}/"

    # ---- all at once ------------------------------------------------------------------------------------------------------

    def gather(self, value: bytes, timeout: float) -> list[bytes]:
        """What every rank gave, in their order, on every rank.

        Raises:
            RankFailed: some did not come in time; names them. On all ranks, also on those, whenever they come.

        >>> from engram import Ranks
        >>> Ranks.local().gather(b"mine", timeout=5.0)
        [b'mine']
        """
        number = self._gathered
        self._gathered += 1
        until = time.monotonic() + timeout
        keys = [f"gather/{number}/{rank}" for rank in range(self.world)]
        self.set(keys[self.rank], value)
        over = f"gather/{number}/over"
        given = self._wait(keys, timeout, over)
        missing = [rank for rank, one in enumerate(given) if one is None]
        ended = _FINE
        if missing:
            said = f"expected all {self.world} ranks within {timeout:g} s, got nothing from {_names(missing)}."
            ended = _FAILED + said.encode()
        ended = self.claim(over, ended)
        left = f"gather/{number}/left"
        if ended != _FINE:
            self.leave(left, self.world - 1 - len(missing), _ROLL_CALL_S)
            raise RankFailed(ended[1:].decode())
        if missing:  # they came just then, and others go on with them
            given = [self.get(key) for key in keys]
        if number:  # every rank that came here has read what was given before
            self.forget(f"gather/{number - 1}/{self.rank}")
            if self.rank == 0:
                self.forget(f"gather/{number - 1}/over")
        self.leave(left, self.world - 1, max(_ROLL_CALL_S, until - time.monotonic()))
        return [one for one in given if one is not None]

    def max(self, value: int, timeout: float) -> int:
        """The largest of what all ranks gave. Raises as :meth:`gather`.

        >>> from engram import Ranks
        >>> Ranks.local().max(3, timeout=5.0)
        3
        """
        return max(int(one) for one in self.gather(str(value).encode(), timeout))

    def all(self, true: bool, timeout: float) -> bool:
        """Whether it is true on all ranks. Raises as :meth:`gather`.

        Before training, so that none collects while others wait in a collective::

            while not ranks.all(rb.can_sample(), timeout=60):
                rb.extend(collect())

        >>> from engram import Ranks
        >>> Ranks.local().all(True, timeout=5.0)
        True
        """
        return self.max(int(not true), timeout) == 0

    def run_on_all(self, what: str, act: Callable[[], tuple[T, bytes]], timeout: float) -> tuple[T, list[bytes]]:
        """Let every rank do its part.

        Args:
            what: is being done, for messages.
            act: this rank's part: its result, and what all ranks hear of it. They also hear of what it raises.
            timeout: seconds, for the slowest one.

        Returns:
            The result of this rank, and what all ranks gave, in their order.

        Raises:
            RankFailed: the part of some ranks failed, or they did not come in time: the same on all ranks. Where all failed in
                the same way, each raises that.

        >>> from engram import Ranks
        >>> Ranks.local().run_on_all("counting", lambda: (5, b"five"), timeout=5.0)
        (5, [b'five'])
        """
        failure: BaseException | None = None
        own: T
        try:
            own, told = act()
            mine = _FINE + told
        except BaseException as error:  # noqa: BLE001 - raised below, once others know
            failure, mine = error, _FAILED + f"{type(error).__name__}: {error}".encode()
        try:
            given = self.gather(mine, timeout)
        except RankFailed as error:
            raise RankFailed(f"{what}: {error}") from failure
        failed = {rank: one[1:].decode() for rank, one in enumerate(given) if one[:1] == _FAILED}
        if failure is not None and (not isinstance(failure, Exception) or set(given) == {mine}):
            raise failure
        if failed:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise RankFailed(f"{what}: {said}", {r: text.partition(":")[0] for r, text in failed.items()}) from failure
        return own, [one[1:] for one in given]

    def together(self, what: str, act: Callable[[], bytes], timeout: float) -> list[bytes]:
        """As :meth:`run_on_all`, of parts without a result of their own.

        >>> from engram import Ranks
        >>> Ranks.local().together("counting", lambda: b"five", timeout=5.0)
        [b'five']
        """
        return self.run_on_all(what, lambda: (None, act()), timeout)[1]

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release connections. Repeatable.

        >>> from engram import Ranks
        >>> Ranks.local().close()
        """


def looks(timeout: float, *, at_files: bool = False) -> Iterator[float]:
    """When to look at something that others do: at once, after pauses that become longer, and when the time is over.

    Gives the seconds that have passed. ``at_files``: all ranks ask one server, so the pauses become longer yet.
    """
    began, pause = time.monotonic(), _SOON
    while True:
        passed = time.monotonic() - began
        yield passed
        if passed >= timeout:
            return
        time.sleep(min(pause, max(timeout - passed, 0.0)))
        pause = min(pause * _LONGER, max(_LATER, min(_SHARE * passed, _LATEST)) if at_files else _LATER)


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# ---- threads of one process ------------------------------------------------------------------------------------------


class _Board:
    """Keys, values and counters that threads share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}


class _OnBoard(Ranks):
    def __init__(self, rank: int, world: int, board: _Board) -> None:
        super().__init__(rank, world)
        self._board = board

    def set(self, key: str, value: bytes) -> None:
        with self._board.lock:
            self._board.values[key] = value

    def get(self, key: str) -> bytes | None:
        with self._board.lock:
            return self._board.values.get(key)

    def claim(self, key: str, value: bytes) -> bytes:
        with self._board.lock:
            return self._board.values.setdefault(key, value)

    def add(self, key: str, amount: int) -> int:
        with self._board.lock:
            self._board.counters[key] = self._board.counters.get(key, 0) + amount
            return self._board.counters[key]

    def forget(self, key: str) -> None:
        with self._board.lock:
            self._board.values.pop(key, None)
            self._board.counters.pop(key, None)


# ---- torch.distributed -----------------------------------------------------------------------------------------------


class _Torch(Ranks):
    """A gloo group for agreements, and a TCPStore on rank 0 for the rest.

    A client of the store waits for an answer without a limit: one thread does that, and others wait for it with one.
    """

    def __init__(self, rank: int, world: int, timeout: float, host: str | None) -> None:
        super().__init__(rank, world)
        from torch import distributed

        self._timeout = timeout
        self._distributed: ModuleType = distributed
        self._dead = ""
        self._agreements = 0
        self._roll = ""
        limit = timedelta(seconds=timeout)
        try:
            self._group: object = distributed.new_group(backend="gloo", timeout=limit)
            self._store = self._make_store(host, limit)
        except RuntimeError as error:
            raise RankFailed(f"Ranks.from_torch: {error}") from error
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._server = threading.Thread(target=_serve, args=(self._calls,), name="engram-ranks", daemon=True)
        self._server.start()

    def _make_store(self, host: str | None, limit: timedelta) -> Any:
        """Rank 0 listens, and says where through the group."""
        import torch

        where = torch.zeros(260, dtype=torch.int64)
        store = None
        if self.rank == 0:
            name = host or os.environ.get("MASTER_ADDR") or _own_name()
            store = self._distributed.TCPStore(name, 0, None, True, timeout=limit, wait_for_workers=False)
            raw = name.encode()[:255]
            where[0], where[1] = store.port, len(raw)
            where[2 : 2 + len(raw)] = torch.tensor(list(raw))
        self._distributed.broadcast(where, self._distributed.get_global_rank(self._group, 0), group=self._group)
        if store is None:
            port, length = int(where[0]), int(where[1])
            name = bytes(where[2 : 2 + length].tolist()).decode()
            store = self._distributed.TCPStore(name, port, None, False, timeout=limit)
        return store

    def _ask(self, act: Callable[[], T]) -> T:
        """What the store says."""
        if self._dead:
            raise RankFailed(self._dead)
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def call() -> None:
            try:
                answer.put((act(), None))
            except BaseException as error:  # noqa: BLE001 - raised where it was asked for
                answer.put((None, error))

        self._calls.put(call)
        try:
            value, error = answer.get(timeout=self._timeout)
        except queue.Empty:
            self._dead = f"rank 0, which holds the store of this job, did not answer for {self._timeout:g} s."
            raise RankFailed(self._dead) from None
        if error is not None:
            if not isinstance(error, RuntimeError):
                raise error
            self._dead = f"rank 0, which holds the store of this job, cannot be reached: {error}"
            raise RankFailed(self._dead) from error
        return value  # type: ignore[return-value]

    def set(self, key: str, value: bytes) -> None:
        # A TCPStore takes strings: one byte a character, as UTF-8 would change others.
        self._ask(lambda: self._store.set(key, value.hex()))

    def get(self, key: str) -> bytes | None:
        return self._look([key]).get(key)

    def _look(self, keys: Sequence[str]) -> dict[str, bytes]:
        def look() -> dict[str, bytes]:
            store = self._store
            if len(keys) > 1 and store.check([*keys]):  # few messages, however many they are
                found = dict(zip(keys, store.multi_get([*keys]), strict=True))
            else:
                found = {key: store.get(key) for key in keys if store.check([key])}
            return {key: bytes.fromhex(value.decode()) for key, value in found.items()}

        return self._ask(look)

    def claim(self, key: str, value: bytes) -> bytes:
        return self._ask(lambda: bytes.fromhex(self._store.compare_set(key, "", value.hex()).decode()))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda: self._store.add(key, amount)))

    def forget(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def max(self, value: int, timeout: float) -> int:
        import torch

        mine = torch.tensor([value], dtype=torch.int64)
        self._agreements += 1
        try:
            work = self._distributed.all_reduce(mine, self._distributed.ReduceOp.MAX, group=self._group, async_op=True)
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RankFailed(f"expected all {self.world} ranks to agree, {self._who_failed()}: {error}") from error
        return int(mine)

    def _who_failed(self) -> str:
        """Those who did not notice."""
        roll = f"roll/{self._agreements}/"
        try:
            if self._roll:  # a rank that was there then may be gone now
                self.forget(f"{self._roll}{self.rank}")
            self._roll = roll
            self.set(f"{roll}{self.rank}", b"here")
            given = self.wait([f"{roll}{rank}" for rank in range(self.world)], min(_ROLL_CALL_S, self._timeout))
            missing = [rank for rank, one in enumerate(given) if one is None]
            self.leave(f"{roll}left", self.world - 1 - len(missing), _ROLL_CALL_S)
        except RankFailed as error:
            return f"but {error}"
        return f"{_names(missing)} did not" if missing else "a connection broke"

    def close(self) -> None:
        if not self._dead:
            self._dead = "closed"
            self._calls.put(None)
            self._server.join(_ROLL_CALL_S)
            with contextlib.suppress(Exception):
                self._distributed.destroy_process_group(self._group)


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    # It keeps nothing that it was asked: torch's process groups must not be released by a thread that the end of the interpreter stops.
    while (call := calls.get()) is not None:
        call()
        del call


def _own_name() -> str:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name
