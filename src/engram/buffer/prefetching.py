"""Batches of a buffer ahead of the caller: the stages of the read path, and the state of batches that are ahead."""

from __future__ import annotations

from time import monotonic, perf_counter, perf_counter_ns
from typing import Any

from torch import Tensor

from engram._support import native, nested, tensordicts
from engram._support.state import Change, Loads, check_keys, copied, integer, typed
from engram._support.tensordicts import children, is_plain_tensordict, tensordict_type
from engram.buffer import configuration, prefetch, read_path
from engram.buffer.wiring import Wiring
from engram.errors import NoSampleable
from engram.storages.items import pack, unpack
from engram.store import blocks, limits, memory
from engram.types import Commit

#: Data, rows and info of a batch.
Made = tuple[object, Tensor | None, dict[object, object]]


class Prefetching(prefetch.Prefetcher):
    """Draws and reads the batches of a buffer before they are asked for."""

    def __init__(self, wiring: Wiring, settings: configuration.Settings, reading: read_path.ReadPath) -> None:
        super().__init__(settings.prefetch)
        self._wiring = wiring
        self._settings = settings
        self._reading = reading
        self.rewired()

    def rewired(self) -> None:
        """The components are others, or others of their paths are open. Nothing is prefetched, or they are equal."""
        wiring = self._wiring
        plainly = wiring.draws_natively and wiring.pinning is None and not wiring.transform.reads
        self.draws(plainly=plainly, has_epochs=wiring.of_sampler.has_epochs)

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """The next batch: what ``ReplayBuffer.sample`` returns."""
        reading = self._reading
        if not reading.looked:
            reading.say_repeated(batch_size)
        if self.lazy:
            try:
                key = self.turns.popleft()
            except IndexError:  # more threads than turns
                return reading.sample(batch_size, return_info, timeout)
            start = perf_counter()
            try:
                return reading.sample_with(key, batch_size, return_info, timeout)
            finally:
                reading.draw_key(key)
                self.turns.append(key)
                if self.slow or perf_counter() - start > self.slow_s:
                    self.took(perf_counter() - start)
        begun = perf_counter_ns()
        data, rows, info = self._next(batch_size, timeout)
        reading.waited(data, begun)
        if not return_info:
            return data
        return data, (info if rows is None else reading.info(rows, info))

    def _next(self, batch_size: int, timeout: float) -> Made:
        """The next batch. What waits for the limits of the store holds no lock: writers of this buffer go on."""
        deadline, waited = monotonic() + timeout, False
        gate, storage = self._wiring.gate, self._wiring.storage
        while True:
            store = gate.created(storage, batch_size, deadline)
            written = 0 if store is None else store.core.write_count
            try:
                made: Made = self.next(deadline)
            except native.NotAdmitted:
                if store is not None:
                    waited = gate.wait(store, batch_size, deadline, samples=True, counted=waited)
            except NoSampleable:
                if store is None or not store.core.limited:
                    raise
                gate.await_rows(store, batch_size, written, deadline, uses_up=self._wiring.of_sampler.consumes)
            else:
                return made

    # ---- the stages of a batch -------------------------------------------------------------------------------------------

    def ask(self, key: blocks.Key) -> None:
        self._reading.draw_key(key)

    def read(self, key: blocks.Key) -> tuple[object, dict[str, object] | None]:
        wiring, reading, batch_size = self._wiring, self._reading, self._settings.batch_size
        assert batch_size is not None
        before = self.place()
        with wiring.gate.admitted(wiring.storage.memory, batch_size):
            if wiring.pinning is None or not reading.gathers_pinned():
                return reading.read(key, batch_size), before
            with wiring.pinning.gathering():
                return reading.read(key, batch_size), before

    def room(self) -> limits.LimitWait | None:
        """What the thread that reads sleeps on, if it is not admitted; None: there are no limits."""
        assert self._settings.batch_size is not None  # it prefetches
        return limits.LimitWait.of(self._wiring.storage.memory, self._settings.batch_size)

    def finish(self, raw: Any) -> object:
        """``(data, rows, info)``: the info is made when it is asked for. Pinned, it is complete, and the rows are None."""
        columns, rows, info = raw
        if self._wiring.pinning is None:
            return self._reading.finish(columns, rows, info, False), rows, info
        data, info = self._reading.finish(columns, rows, info, True)
        return data, None, info

    def ended(self) -> bool:
        """Whether the batch read last ended an epoch. The sampler says so when that batch is handed out."""
        return self._wiring.epoch_ended()

    def over(self) -> None:
        self._wiring.source.ran_out = True

    # ---- what happens to the rows ----------------------------------------------------------------------------------------

    def discard(self, call: str, *, keys: bool = True) -> None:
        """Forget prefetched batches. Their rows go back to their epoch, unless other processes draw from it, too."""
        before = self.drop(call, keys=keys)
        if before is not None:
            self.go_back(before)

    def place(self) -> dict[str, object] | None:
        """What :meth:`go_back` takes rows back to their epoch by, if they are drawn now; None: they cannot go back."""
        return place_of(self._wiring)

    def go_back(self, before: dict[str, object]) -> None:
        """Take rows that were drawn since back to their epoch, unless other processes draw from it, too."""
        go_back(self._wiring, before)

    # ---- copies and states -----------------------------------------------------------------------------------------------

    def copy(self) -> dict[str, object]:
        """What is prefetched, for :meth:`restore` in another process."""
        return _by_value(self.entries())  # type: ignore[no-any-return]

    def restore(self, copy: dict[str, object]) -> None:
        """Go on with what :meth:`copy` returned."""
        self.take_entries(_from_value(copy))

    def saved(self, *, drop: bool = False) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """What is prefetched, for :func:`prepare_batches`. Draws what was asked for.

        ``drop``: nothing of it, as if it had never been drawn.

        Returns:
            What a state has of the batches; None: nothing is prefetched, or it is left out. And the sampler's state before it drew
            batches that are left out; None: as it is.
        """
        ahead = self.entries()
        if drop:
            befores = [batch["before"] for batch in ahead["batches"] if batch.get("before") is not None]
            return None, next(iter(befores), None)
        if not any(ahead.values()):
            return None, None
        queue = []
        for batch in ahead["batches"]:
            made = batch.get("made")
            known = None if made is None else pack([[part for part in made if part is not None]])
            queue.append({"key": batch["key"], "made": known, "last": batch.get("last"), "before": batch.get("before")})
        clock, keys = self._wiring.storage.next_number(), ahead["keys"]
        return {"version": 1, "capacity": self._settings.prefetch, "clock": clock, "queue": queue, "keys": keys}, None


def place_of(wiring: Wiring) -> dict[str, object] | None:
    """The state of a sampler, for :func:`go_back`; None: what it has drawn cannot go back."""
    return wiring.source.state_dict() if wiring.of_sampler.can_rewind and not wiring.storage.shared else None


def go_back(wiring: Wiring, before: dict[str, object]) -> None:
    """Let a sampler draw again what it has drawn since, unless other processes draw from its storage, too."""
    if wiring.storage.shared:
        return
    source = wiring.source
    ran_out = source.ran_out
    source.load_state_dict(before)
    source.ran_out = ran_out


def prepare_batches(state: Any, prefetching: Prefetching | None, where: str) -> Commit:
    """Check the state of prefetched batches.

    Raises:
        KeyError, TypeError, ValueError: no such state. RuntimeError: another depth. Nothing is changed.
    """
    if state is None:
        return Loads()
    check_keys(state, ("version", "capacity", "clock", "queue", "keys"), where)
    integer(state, "version", 1, 2, where)
    depth = integer(state, "capacity", 1, 1 << 31, where)
    here = 0 if prefetching is None else prefetching.depth
    if prefetching is None or depth != here:
        raise RuntimeError(f"{where}: expected a buffer with prefetch={depth}, as it was saved, got prefetch={here}.")
    queue = enumerate(typed(state, "queue", list, where))
    batches = [_checked_batch(entry, f"{where}: batch {i}") for i, entry in queue]
    keys = [_checked_key(key, f"{where}: keys") for key in typed(state, "keys", list, where)]
    integer(state, "clock", 0, 1 << 62, where)
    return Change(prefetching.take_entries, {"batches": batches, "keys": keys})


def _checked_batch(entry: Any, where: str) -> dict[str, object]:
    check_keys(entry, ("key", "made", "last", "before"), where)
    key = _checked_key(entry["key"], where)
    if entry["made"] is None:
        return {"key": key}
    parts = unpack(entry["made"], None, where)
    if len(parts) != 1 or len(parts[0]) not in (2, 3) or not isinstance(parts[0][-1], dict):
        raise ValueError(f"{where}: made: expected a batch, perhaps rows, and info.")
    data, *rows, info = parts[0]
    before = copied(typed(entry, "before", (dict, type(None)), where), where)
    last = typed(entry, "last", bool, where)
    return {"key": key, "made": (data, rows[0] if rows else None, info), "last": last, "before": before}


def _checked_key(key: object, where: str) -> int:
    """64 bits, as an int. Raises ``TypeError``, ``ValueError``: they are none."""
    return integer({"key": key}, "key", -(1 << 63), 1 << 64, where)


# ---- batches in copies -------------------------------------------------------------------------------------------------


class _ByValue:
    """A TensorDict on its way through a copy."""

    def __init__(self, td: tensordicts.TensorDict) -> None:
        self._entries = _by_value(dict(children(td)))
        self._batch_size, self._device = td.batch_size, td.device
        self._names = td.names if any(td.names) else None

    def restored(self) -> tensordicts.TensorDict:
        entries = _from_value(self._entries)
        return tensordict_type()(entries, batch_size=self._batch_size, device=self._device, names=self._names)


def _by_value(data: object) -> Any:
    """Batches for a copy: copies of their tensors, which go by value (see ``Copied``); other objects as they are."""

    def copied(leaf: object) -> object:
        if is_plain_tensordict(leaf):
            return _ByValue(leaf)
        return memory.Copied(leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf

    return nested.map_leaves(data, copied)


def _from_value(data: object) -> Any:
    """Batches again."""

    def restored(leaf: object) -> object:
        if isinstance(leaf, _ByValue):
            return leaf.restored()
        return leaf.tensor if isinstance(leaf, memory.Copied) else leaf

    return nested.map_leaves(data, restored)
