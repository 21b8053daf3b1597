"""If a rank of a job fails, all live ranks save their shards: without a collective, even while their main threads wait in one.

The first rank that notices names an attempt in ``<root>/CRASH-e<epoch>-<number>``, which it creates; a thread of every rank looks
for that file. It is decided when all ranks have voted; what has fewer votes stays undecided.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from engram.checkpoint.ranks import looks
from engram.checkpoint.save import JobSeries
from engram.errors import CorruptCheckpoint, RankFailed
from engram.saved import attempts, disk, documents

_log = logging.getLogger("engram")

#: Seconds between two looks for the file, and between two heartbeats.
_LOOK_S, _BEAT_S = 0.2, 1.0
#: Seconds without a heartbeat after which a rank counts as dead.
_SILENT_S = 10.0
#: Seconds that a main thread has to notice a signal, before it counts as stuck.
_STUCK_S = 1.0


class Watchdog:
    """Watches the other ranks, for one rank.

    Args:
        attempts: of the job.
        number: of the watch: the same on all ranks.
        latest: the step that the training has come to, and the user state.
        write: writes this rank's shard into a folder and votes.
        grace: seconds to wait for the votes of others.
        timeout: seconds to wait for others to leave.
    """

    def __init__(
        self,
        attempts: JobSeries,
        number: int,
        latest: Callable[[], tuple[int, Mapping[str, object]]],
        write: Callable[[Path], None],
        grace: float,
        timeout: float,
    ) -> None:
        self._attempts, self._ranks = attempts, attempts.ranks
        self._number, self._latest, self._write = number, latest, write
        self._grace, self._timeout = grace, timeout
        self._file = attempts.root / f"CRASH-e{attempts.epoch:04d}-{number}"
        self._key = f"{attempts.section}watch/{number}/"
        self._once = threading.RLock()
        #: The thread that saves or has saved; None: all is well.
        self._saver: int | None = None
        self._over = threading.Event()
        self._stop = threading.Event()
        self._dead: set[int] = set()
        self._seen: dict[int, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._watch, name="engram-watch", daemon=True)
        self._signals: int | None = None
        self._others = -1
        self._ends_by_default = False
        self._handled = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, this rank is watched, and watches others. An exception that leaves it saves first."""
        with self._signals_watched():
            self._thread.start()
            try:
                yield
            except SystemExit as error:
                if error.code in (None, 0):
                    self._leave()
                else:
                    self.save(f"SystemExit: {error.code}")
                raise
            except BaseException as error:
                self.save(f"{type(error).__name__}: {error}")
                raise
            else:
                self._leave()
            finally:
                self._stop.set()

    def _leave(self) -> None:
        """Wait until all ranks have come to their end, or one of them has failed: they must not think that this one died."""
        until, rank = time.monotonic() + self._timeout, self._ranks.rank
        with contextlib.suppress(RankFailed):  # the watch sees it, too
            self._ranks.set(self._end_of(rank), b"")
            while not self.begun:
                said = self._ranks.wait([self._end_of(rank) for rank in range(self._ranks.world)], _LOOK_S)
                missing = [rank for rank, one in enumerate(said) if one is None]
                if not missing:
                    self._stop.set()
                    self._thread.join(2 * _LOOK_S + 1)  # it looks at the store, too
                    self._ranks.leave(f"{self._key}left", self._ranks.world - 1, max(0.0, until - time.monotonic()))
                    break
                if time.monotonic() > until:
                    text = "rank %d left guard() without ranks %s, %g s after its end"
                    _log.error(text, rank, missing, self._timeout)
                    break
        if self.begun:
            self._over.wait(self._grace)

    def _end_of(self, rank: int) -> str:
        """Where a rank says that it has come to its end."""
        return f"{self._key}end/{rank}"

    # ---- a crash ---------------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        return self._saver is not None

    def save(self, cause: str) -> None:
        """Save this rank's shard, and let all others save theirs; once. Raises nothing: whatever failed is logged."""
        mine = threading.get_ident()
        with self._once:  # without a call in between, where a signal could be handled
            first, self._saver = self._saver is None, self._saver or mine
        if not first:
            if self._saver != mine:  # a signal, while this thread saves: it will end soon
                self._over.wait(self._grace)
            return
        try:
            folder = self._agreed()
            _log.warning("saving to %s: %s", folder.name, cause)
            self._write(folder)
            self._decide(folder)
        except Exception:  # noqa: BLE001 - the error that led here is what matters
            _log.exception("rank %d: its shard was not saved", self._ranks.rank)
        finally:
            self._over.set()

    def _agreed(self) -> Path:
        """The folder that all ranks use: the first of them says which."""
        root, epoch = self._attempts.root, self._attempts.epoch
        step, user = self._latest()
        name = attempts.Name(step, epoch, f"crash{self._number}")
        disk.publish(self._file, str(name).encode())
        said = self._file.read_bytes().decode("ascii", "replace")
        agreed = attempts.Name.parse(said)
        if agreed is None:
            raise CorruptCheckpoint(f"{self._file}: expected the name of an attempt, got {said!r:.100}.")
        folder: Path = root / str(agreed)
        try:
            step, attempt, world = agreed.step, agreed.attempt, self._ranks.world
            attempts.begin(root, step=step, epoch=epoch, world=world, trigger="crash", user=user, attempt=attempt)
        except FileExistsError:
            for _ in looks(self._grace, at_files=True):
                disk.look_again(root, folder)
                if os.path.lexists(folder / documents.ATTEMPT):
                    return folder
            raise
        return folder

    def _decide(self, folder: Path) -> None:
        """Wait for those that live; commit if all voted."""
        missing: set[int] = set()
        for _ in looks(self._grace, at_files=True):
            made = attempts.decide(folder, self._attempts.epoch, contents=self._attempts.series.contents(folder))
            if made is not None:
                _log.warning("saved %s: %s", folder.name, made.status)
                if made.status == "complete":
                    with contextlib.suppress(OSError, RuntimeError):  # a hint, and all ranks write the same
                        self._attempts.series.set_latest(folder.name, self._attempts.epoch)
                return
            missing = {vote.rank for vote in attempts.votes(folder) if vote.shard is None and vote.error is None}
            if missing <= self._dead:
                break
        _log.warning("saved %s without ranks %s", folder.name, sorted(missing))

    # ---- watching --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        beat = 0.0
        try:
            while not self._stop.wait(0 if self._signals is not None else _LOOK_S):
                if self._signals is not None and signal.SIGTERM in self._received(self._signals):
                    self._terminated()
                if not self.begun and self._file.exists():
                    self.save("another rank failed")
                if self._ranks.world > 1 and time.monotonic() - beat >= _BEAT_S:
                    beat = time.monotonic()
                    disk.look_again(self._attempts.root)
                    self._look_for_life()
        finally:
            if self._signals is not None:
                os.close(self._signals)  # here: its number must not become another file's while this thread may read

    def _look_for_life(self) -> None:
        try:
            self._ranks.add(f"{self._key}{self._ranks.rank}", 1)
            counts = {rank: self._ranks.add(f"{self._key}{rank}", 0) for rank in range(self._ranks.world)}
        except RankFailed as error:
            self._dead.add(0)
            if not (self._stop.is_set() or self.begun):
                self.save(str(error))
            return
        now = time.monotonic()
        for rank, count in counts.items():
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = (count, now)
        silent = {rank for rank, (_, since) in self._seen.items() if now - since > _SILENT_S} - self._dead
        try:  # others did not wait for us
            silent = {rank for rank in silent if self._ranks.get(self._end_of(rank)) is None}
        except RankFailed:
            return  # the next look says it
        self._dead |= silent
        if silent and not self.begun:
            self.save(f"no heartbeat of ranks {sorted(silent)} for {_SILENT_S:g} s")

    # ---- signals ---------------------------------------------------------------------------------------------------------

    def _received(self, signals: int) -> bytes:
        """Signals that arrived, also while the main thread cannot handle them. Waits a moment."""
        ready, _, _ = select.select([signals], [], [], _LOOK_S)
        if not ready:
            return b""
        numbers = os.read(signals, 4096)
        if self._others >= 0:  # an earlier reader of wakeups gets them, too
            with contextlib.suppress(OSError):
                os.write(self._others, numbers)
        return numbers

    def _terminated(self) -> None:
        """SIGTERM arrived. The main thread handles it; unless it is stuck, then this one does."""
        if self._handled.wait(_STUCK_S) or self._saver is not None:
            return
        self.save("SIGTERM")
        if not self._handled.wait(_STUCK_S) and self._ends_by_default:
            os._exit(128 + signal.SIGTERM)  # as a shell says it: its own way to end needs the main thread

    @contextlib.contextmanager
    def _signals_watched(self) -> Iterator[None]:
        """Inside, SIGTERM saves before it does what it did; and the thread hears of it, whatever the main thread is doing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)
        self._ends_by_default = before == signal.SIG_DFL

        def handle(number: int, _: object) -> None:
            self._handled.set()
            if self._saver == threading.get_ident():
                return  # it saves, and then ends with the error that it has
            self.save("SIGTERM")
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)

        read, write = os.pipe()
        for fd in (read, write):
            os.set_blocking(fd, False)
        self._signals, self._others = read, signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
            signal.set_wakeup_fd(self._others)
            self._stop.set()
            os.close(write)  # the thread wakes
            self._thread.join(2 * _LOOK_S + 1) if self._thread.ident is not None else os.close(read)
