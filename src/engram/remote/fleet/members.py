"""The stores of a fleet: what is known of each, which of them are gone, and when they are back."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import msgspec

from engram._support import fork
from engram._support.words import count, warn
from engram.remote.commands import Mass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engram.remote.commands import State
    from engram.remote.storage import RemoteStorage

_log = logging.getLogger("engram")

#: What happens to a store whose servers are gone.
Missing: TypeAlias = Literal["skip", "wait"]
#: For how long a store that is to be skipped is waited for.
SKIP_S = 10.0
#: A mass is asked for that no answer has told for so long.
_OLD_S = 1.0
#: Between two looks for a store that is gone.
_LOOK_S = 1.0


_NOTHING = Mass(0.0, 0.0, 0, 0.0, 0, goes_on=False)


class Shard:
    """One store."""

    def __init__(self, number: int, storage: RemoteStorage) -> None:
        self.number, self.storage = number, storage
        self.mass = _NOTHING
        #: What it is chosen by; of an epoch, the rest of it for this client.
        self.weight = 0.0
        #: Key of the epoch that is drawn from; 0: the first draw says it. And of the last one before it; None: not known yet.
        self.epoch = 0
        self.ended: int | None = None
        self.told_at = -math.inf
        #: How often it was lost: what was asked before is not answered.
        self.losses = 0
        #: How often this client has changed its mass: what was drawn before does not tell it.
        self.changes = 0
        self.lost = False

    def change(self) -> None:
        """Its mass is another one now: it is asked for before it is used."""
        self.changes, self.told_at = self.changes + 1, -math.inf

    def tell(self, mass: Mass, *, epochs: bool) -> None:
        """What was true of it when it answered last. ``epochs``: it is drawn from without replacement."""
        over = False
        if epochs and mass.goes_on and self.epoch == 0:
            self.epoch = mass.epoch
        elif epochs and self.ended is None:
            self.ended = mass.epoch
        elif epochs:
            over = mass.epoch != self.epoch or not mass.goes_on if self.epoch else mass.epoch != self.ended
        self.mass, self.weight, self.told_at = mass, 0.0 if over else mass.total, time.monotonic()


class Joining(Protocol):
    """Addresses that did not answer when the fleet was connected."""

    def left(self) -> bool:
        """Whether some have not answered yet."""

    def find(self, known: Sequence[RemoteStorage]) -> Iterator[RemoteStorage]:
        """Stores that answer now, and are not known yet."""


class Members:
    """All stores of a fleet, in the order of their numbers: those that join later come last."""

    def __init__(
        self, storages: Sequence[RemoteStorage], missing: Missing, joining: Joining | None = None, *, epochs: bool
    ) -> None:
        self.shards = [Shard(number, storage) for number, storage in enumerate(storages)]
        self.missing, self.epochs, self.joining = missing, epochs, joining
        self._closed = False
        #: The policy version that all stores are to know.
        self.version: int | None = None
        self._lock = fork.rlock()
        self._looker: _Looker | None = None
        if joining is not None and joining.left():
            self._looker = _Looker(self)

    def present(self) -> list[Shard]:
        """Those that are there. Raises ``ConnectionError``: none is."""
        there = [shard for shard in self.shards if not shard.lost]
        if not there:
            raise ConnectionError(
                f"no server of any of the {len(self.shards)} stores of the fleet answers. They are looked for."
            )
        return there

    def known(self) -> list[Shard]:
        """Those that are there, with masses of this second. Raises as :meth:`lose`."""
        for shard in self.present():
            if time.monotonic() - shard.told_at >= _OLD_S:
                self.ask(shard)
        return self.present()

    def asked_again(self) -> list[Shard]:
        """As :meth:`known`, where none has anything, or nothing is left of the epoch: masses of this moment."""
        for shard in self.present():
            if self.epochs:
                shard.epoch, shard.ended = 0, None
            self.ask(shard)
        return self.present()

    def ask(self, shard: Shard) -> State | None:
        """Numbers of a store; None: it is gone. Raises as :meth:`lose`."""
        state: State | None = None
        with self.reaching(shard):
            state = shard.storage.state()
            shard.tell(state.mass or msgspec.structs.replace(_NOTHING, live=state.size), epochs=self.epochs)
        return state

    def ask_all(self) -> list[tuple[Shard, State]]:
        """All stores that are there, with their numbers. Raises as :meth:`lose`."""
        found = [(shard, self.ask(shard)) for shard in self.present()]
        return [(shard, state) for shard, state in found if state is not None]

    @contextmanager
    def reaching(self, shard: Shard) -> Iterator[None]:
        """Ask a store something. If it is gone, it is lost, and the rest of the block is passed over. Raises as :meth:`lose`."""
        try:
            yield
        except ConnectionError as error:
            self.lose(shard, error)

    def check_all_present(self, call: str, after: str = "") -> None:
        """Raise ``ConnectionError``: a store of the fleet is gone."""
        gone = [shard.storage for shard in self.shards if shard.lost]
        if gone:
            raise ConnectionError(f"{call}: expected all stores of the fleet, but {gone[0]!r} is gone.{after}")

    def lose(self, shard: Shard, error: ConnectionError) -> None:
        """Go on without a store, and look for it. Raises the error where stores are waited for. ``ConnectionError``: none is left."""
        if self.missing == "wait":
            raise error
        with self._lock:
            known, shard.lost, shard.weight = shard.lost, True, 0.0
            shard.losses += not known
            if self._looker is None:
                self._looker = _Looker(self)
        others = len(self.present())
        if not known:
            warn(
                f"the store {shard.storage!r} is gone, with {count(shard.mass.live, 'row')}: batches come from {others} of "
                f"{len(self.shards)} stores until it is back."
            )

    def find(self) -> bool:
        """Look for stores that are gone, and take those that are back. Whether others are gone still."""
        for shard in [shard for shard in self.shards if shard.lost]:
            try:
                shard.storage.connection.look()
                shard.storage.forget_asked()  # what came before it was lost is answered otherwise
                if self.version is not None:
                    shard.storage.consumer_version(self.version)
            except (OSError, ValueError, RuntimeError):
                continue
            shard.told_at = -math.inf
            shard.lost = False
            _log.info("the store %r is back", shard.storage)
        self._join()
        with self._lock:
            if any(shard.lost for shard in self.shards) or (self.joining is not None and self.joining.left()):
                return True
            self._looker = None
            return False

    def _join(self) -> None:
        """Take stores that answer for the first time."""
        if self.joining is None:
            return
        for storage in self.joining.find([shard.storage for shard in self.shards]):
            shard = Shard(len(self.shards), storage)
            try:
                if self.version is not None:
                    storage.consumer_version(self.version)
            except (OSError, ValueError, RuntimeError):
                shard.lost = True  # it is looked for, as others are
            with self._lock:
                if self._closed:
                    storage.close()
                    return
                self.shards.append(shard)
            _log.info("the store %r has joined", storage)

    def counters(self) -> dict[str, float]:
        """How often stores were lost, and how uneven those are that are there: the largest mass, over the mean of all."""
        masses = [shard.mass.total for shard in self.shards if not shard.lost]
        whole = sum(masses)
        imbalance = max(masses) * len(masses) / whole if whole > 0 else 1.0
        return {"stores_lost": sum(shard.losses for shard in self.shards), "imbalance": imbalance}

    @property
    def rows_missing(self) -> int:
        """Live rows of the stores that are gone, as far as they were known."""
        return sum(shard.mass.live for shard in self.shards if shard.lost)

    def close(self) -> None:
        """Stop looking, and close the connections."""
        with self._lock:
            self._closed = True
            if self._looker is not None:
                self._looker.end()
        for shard in self.shards:
            shard.storage.close()


class _Looker:
    """A thread that looks for stores, until all are back or the fleet is closed."""

    def __init__(self, members: Members) -> None:
        self._members, self._ended = weakref.ref(members), threading.Event()
        threading.Thread(target=self._run, name="engram-fleet", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            members = self._members()
            if members is None or not members.find():
                return
            del members

    def end(self) -> None:
        self._ended.set()
