"""The parts of a buffer whose rows are on a server, in place of those that have them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engram._support import fork
from engram._support.checks import check_path
from engram._support.native import NotAdmitted
from engram._support.progress import OnProgress, Work
from engram._support.unsupported import BY_NUMBER, refused, refusing
from engram.buffer.row_access import RowAccess
from engram.errors import NoSampleable
from engram.saved.checkpoints import replacing
from engram.store import Key

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch import Tensor

    from engram.buffer.configuration import Settings
    from engram.buffer.prefetching import Prefetching
    from engram.buffer.read_path import ReadPath
    from engram.buffer.saving import Saving
    from engram.buffer.wiring import Wiring
    from engram.remote.served import Drawn
    from engram.saved.rows import Roles


class RequestsUnderWay:
    """Batches that a server was asked for before they are: as many messages as ``prefetch`` says, each of several small batches.

    An epoch is asked for one message at a time, as its end is not known.
    """

    def __init__(self, wiring: Wiring, settings: Settings, reading: ReadPath) -> None:
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
            return self._taken()

    def _taken(self) -> Drawn:
        wiring = self._wiring
        has_epochs = wiring.of_sampler.has_epochs
        depth, asked_before = 1 if has_epochs else self._depth, bool(self._asked)
        while True:
            while len(self._asked) < depth and not (has_epochs and self._ready):
                try:
                    self._ask()
                except NotAdmitted:
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
            except (NoSampleable, NotAdmitted) as error:
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


class ConnectedRowAccess(RowAccess):
    """Rows by number are refused. Trajectories end on the server."""

    in_order = refusing("read_all_in_order", BY_NUMBER)

    def set(self, index: object, value: object, call: str = "rb[index] = value") -> None:  # noqa: ARG002 - whatever they are
        raise refused(call, "Edit them where the store is.")

    def empty(self, lanes: Tensor | None, *, keep_write_count: bool) -> None:
        if lanes is not None:
            raise refused("empty(lane=)", "Call it where the store is; remove(rows) and empty() can be called here.")
        super().empty(None, keep_write_count=keep_write_count)

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        if self._prefetching is not None:
            self._prefetching.materialize()
        newest: Tensor = self._wiring.storage.end_trajectories(lanes, roles, terminated=terminated)
        return newest


class ConnectedSaving:
    """Saves what a server sends. Everything else about states is refused."""

    def __init__(self, wiring: Wiring, *others: object) -> None:
        """``others``: what :class:`Saving` takes besides, and a server needs none of."""
        del others
        self._wiring = wiring

    def dumps(self, path: str | os.PathLike[str], prefetch: str, progress: OnProgress | None) -> None:
        """As :meth:`ReplayBuffer.dumps`: the server dumps, and its files are written here. Batches under way are not in it."""
        if prefetch not in ("save", "drop"):
            raise ValueError(f"dumps: prefetch: expected 'save' or 'drop', got {prefetch!r}.")
        with replacing(Path(check_path("dumps", path))) as folder, Work("copying", 0, progress) as work:
            self._wiring.storage.fetch_dump(folder, work)

    _refuse = refusing("state_dict, loads and checkpoints", "Save with dumps(path), or use them where the store is.")
    state_dict = prepare_state = snapshot = loads = prepare_load = prepare_placed = _refuse
    form = property(_refuse)


#: In place of what accesses rows, saves, and prefetches.
CONNECTED = (ConnectedRowAccess, cast("type[Saving]", ConnectedSaving), cast("type[Prefetching]", RequestsUnderWay))
