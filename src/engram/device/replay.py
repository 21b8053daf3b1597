"""Replay for a learner whose whole step may be one CUDA graph: draw, read, weigh and update on the device."""

from __future__ import annotations

import collections
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from engram._support.checks import check_choice, check_count
from engram._support.closing import Closes
from engram._support.devices import existing_device
from engram._support.nested import is_tensordict
from engram._support.words import warn
from engram.device.direct import Changed, DeviceReadable, DirectReader, NotDirect, Readable
from engram.errors import NoSampleable, PriorityError, WriterStalled
from engram.store.device.accelerator import Accelerator
from engram.store.device.chain import NoRoom, ResidentRows

if TYPE_CHECKING:
    from tensordict import TensorDictBase


__all__ = ["DeviceReplay"]


class DeviceReplay(Closes):
    """Draws batches of a buffer on a GPU, which reads the rows in host memory by itself and sends priorities back.

    No call waits for the device, so all may be captured in a CUDA graph, together with the loss and the optimizer step: each replay then
    draws a new batch. Batches follow from a sequence of their own, which begins with a key from the buffer's generator.

    Args:
        rb: a buffer in RAM or in shared memory whose rows are tensors and whose sampler draws uniformly or by priority, without
            transforms and ``collate_fn``. Rows must have been written.
        device: a CUDA device.
        batch_size: rows of a batch; default the buffer's.
        graphs: how many calls of :meth:`sample` graphs may capture. Each has memory of its own, so that graphs do not disturb each other.
        transport: ``"direct"``: rows are read from host memory each time. ``"resident"``: they stay in the device's memory, which must
            have room for all; rows in a directory are sent by the host, those that changed, and graphs cannot capture that.

    Raises:
        RuntimeError: the buffer, its memory or the device does not allow it, with the cause. Use :class:`DeviceLoader`, which then
            copies on the host.
        TypeError: not a buffer, or ``batch_size`` and ``graphs`` are no ints. ValueError: they are below 1, or no such ``transport``.

    A batch has whole rows that were live when it was read. A place for which none is found repeats another place's row; :meth:`stats`
    counts these. Of an empty buffer batches are zeros, and :meth:`check` raises. Fields that are added later, another sampler,
    transforms and limits are seen by the next call outside of a graph, which raises; captured calls go on as they are.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
    >>> if torch.cuda.is_available():
    ...     from engram import DeviceReplay
    ...     replay = DeviceReplay(rb, "cuda")
    ...     replay.sample()["obs"].device.type
    """

    def __init__(
        self,
        rb: object,
        device: torch.device | str | int,
        batch_size: int | None = None,
        *,
        graphs: int = 4,
        transport: str = "direct",
    ) -> None:
        check_choice("DeviceReplay: transport", transport, ("direct", "resident"))
        graphs = check_count("DeviceReplay: graphs", graphs)
        on = existing_device(device, "DeviceReplay: device")
        if on.type in ("cpu", "meta"):
            raise RuntimeError(f"DeviceReplay: device: expected a CUDA device, got {on}. Use rb.sample() there.")
        if not isinstance(rb, Readable):
            raise TypeError(f"DeviceReplay: rb: expected a ReplayBuffer, got {type(rb).__name__}.")
        found = batch_size if batch_size is not None else cast("Any", rb).batch_size
        if found is None:
            raise RuntimeError("DeviceReplay: expected a batch size: DeviceReplay(rb, device, batch_size=…).")
        self.rb, self.batch_size = rb, check_count("DeviceReplay: batch_size", found)
        self._rows, self._accelerator = rb.device_readable(), Accelerator(on)
        store = self._rows.store
        try:
            resident = ResidentRows(store, self._accelerator) if transport == "resident" and store is not None else None
            reader = partial(DirectReader, self._rows, self.batch_size, self._accelerator, resident=resident)
            numbers = range(1 if self._rows.on_disk else graphs + 1)
            made = [reader(seed=0, updates=not number) for number in numbers]
        except (NotDirect, NoRoom) as error:
            raise RuntimeError(
                f"DeviceReplay: expected rows that {on} can read by itself, got a buffer that does not allow it: {error}. Use "
                "DeviceLoader(rb, device), which copies on the host."
            ) from error
        seed = self._rows.next_seed()  # now: what is refused draws nothing from the buffer's generator
        for number, one in enumerate(made):
            one.seed(seed + number)
        self._reader, *self._spare = made
        self._captured: list[DirectReader] = []
        self._last: tuple[Tensor, Tensor] | None = None
        self._missing = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"DeviceReplay(batch_size={self.batch_size}, device='{self._accelerator.device}')"

    def sample(self, return_info: bool = False) -> Any:
        """A new batch on the device, in the form of ``rb.sample``. Its reading is queued on the stream in use.

        Batches of buffers of TensorDicts have ``"index"``, and with priorities ``"priority_weight"`` and ``"index_generation"``.

        Args:
            return_info: return ``(batch, info)``; the info has these, too.

        Raises:
            RuntimeError: the buffer is not what it was; outside of a capture only. Or graphs have captured as many calls as were named.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     batch = DeviceReplay(rb, "cuda").sample()
        """
        reader = self._reader
        if self._rows.on_disk:
            self._accelerator.check_not_capturing(
                "DeviceReplay.sample", "the host sends rows that are in files on a disk"
            )
        if self._accelerator.capturing():
            if not self._spare:
                raise RuntimeError(
                    f"DeviceReplay.sample: expected at most {len(self._captured)} captured calls, got one more. Make it with "
                    f"DeviceReplay(…, graphs={2 * len(self._captured)})."
                )
            reader = self._spare.pop()
            self._captured.append(reader)
        elif not reader.is_current():
            what = self._rows.refusal or "its fields, or its memory"
            raise Changed(
                f"DeviceReplay.sample: expected a buffer as it was, got one that changed ({what}). Make a new DeviceReplay."
            )
        batch, info = cast("tuple[Any, dict[str, Tensor]]", reader.read(return_info=True))
        tickets = info.get("index_generation")
        self._last = None if tickets is None else (info["index"], tickets)
        return (batch, info) if return_info else batch

    def update_priority(self, index: Tensor, priority: Tensor, *, generation: Tensor | None = None) -> None:
        """New priorities for rows of a batch. They reach the buffer some batches later; a crash loses those under way.

        Args:
            index: int64 ``[n]`` on the device, at most a batch. Of a row named twice the last counts.
            priority: ``[n]`` or ``[n, 1]`` on the device. Negative and infinite ones and NaN are left out, and :meth:`check` raises.
            generation: int64 ``[n]``, as ``"index_generation"``; rows that were written since are left out. Default that of the last
                batch, if ``index`` is its index.

        Raises:
            RuntimeError: the buffer has no priorities; or no ``generation`` of another index. ValueError: another number of priorities.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(alpha=0.6, beta=0.4), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     with DeviceReplay(rb, "cuda") as replay:
        ...         batch, info = replay.sample(return_info=True)
        ...         replay.update_priority(info["index"], torch.rand(4, device="cuda"))
        """
        if self._reader.updates is None:
            raise RuntimeError("DeviceReplay.update_priority: expected a PrioritizedSampler, got a buffer without.")
        if generation is None:
            if self._last is None or index is not self._last[0]:
                raise RuntimeError(
                    "DeviceReplay.update_priority: expected the index of the last batch, or generation=…, got another index. Pass "
                    "generation=info['index_generation']."
                )
            generation = self._last[1]
        if priority.numel() != index.numel():
            raise ValueError(
                f"DeviceReplay.update_priority: expected one priority per row, {index.numel()}, got {list(priority.shape)}."
            )
        self._reader.send(index.reshape(-1), generation.reshape(-1), priority.reshape(-1))

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """As :meth:`update_priority`, with ``"index"``, ``"index_generation"`` and the buffer's ``priority_key`` of a batch.

        Raises:
            KeyError: one of them is missing. TypeError: no TensorDict. What :meth:`update_priority` raises.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import DeviceReplay, LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(10, 3)}, [10]))
        >>> if torch.cuda.is_available():
        ...     with DeviceReplay(rb, "cuda") as replay:
        ...         batch = replay.sample()
        ...         batch["td_error"] = torch.rand(4, device="cuda")  # of your model
        ...         replay.update_tensordict_priority(batch)
        """
        key = cast("Any", self.rb).priority_key
        if not is_tensordict(data):
            raise TypeError(
                f"DeviceReplay.update_tensordict_priority: expected a TensorDict, got {type(data).__name__}."
            )
        found = [data.get(name, None) for name in ("index", key, "index_generation")]
        if None in [value if value is None else 0 for value in found]:
            raise KeyError(
                f"DeviceReplay.update_tensordict_priority: expected the keys 'index', {key!r} and 'index_generation', got "
                f"{sorted(map(str, data.keys()))}."
            )
        self.update_priority(found[0], found[1], generation=found[2])

    def flush(self) -> None:
        """Wait until all priorities are in the buffer. Not in a capture. Raises as :meth:`check`, but
        for batches; ``WriterStalled``: it takes longer than 5 s.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(alpha=0.6, beta=0.4), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     DeviceReplay(rb, "cuda").flush()
        """
        self._accelerator.check_not_capturing("DeviceReplay.flush", "it waits for the device")
        self._reader.flush("DeviceReplay.flush")

    def check(self) -> None:
        """Raise for what the device has found since the last check. Waits for it: not in a capture.

        Raises:
            PriorityError: some priorities were none; the others are in the buffer, or on their way. NoSampleable: batches had no rows.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     DeviceReplay(rb, "cuda").check()
        """
        missing = int(self.stats()["missing"]) - self._missing
        self._missing += missing
        self._reader.check("DeviceReplay.update_priority")
        if missing:
            raise NoSampleable(
                f"DeviceReplay.sample: expected rows to read, found none for {missing} places, which are zeros."
            )

    def stats(self) -> dict[str, int | str]:
        """What happened since this was made. Waits for the device: not in a capture.

        ``transport``; ``batches``, those of graphs among them; ``bytes``: of their blocks; ``redraws``: rows that were read again, or
        drawn again, because they moved; ``repeated``: places that repeat another place's row; ``missing``: places without a row;
        ``resident``: places whose row was on the device already, with that transport and without
        files; and of updates of priorities ``updates``: batches
        of them that the buffer has taken, ``dropped``: priorities for which there was no room on the way, and ``refused``: those that
        are none.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     batches = DeviceReplay(rb, "cuda").stats()["batches"]
        """
        self._accelerator.check_not_capturing("DeviceReplay.stats", "it waits for the device")
        found = collections.Counter[str]()
        for reader in (self._reader, *self._captured):
            found.update(reader.counts)
        updates, applied, dropped, refused = self._reader.updates, 0, 0, 0
        if updates is not None:
            (applied, _, refused), dropped = updates.stats, int(updates.counters[7])
        sent = {"updates": applied, "dropped": dropped, "refused": refused}
        return {"transport": self._reader.transport, **found, **sent}

    def close(self) -> None:
        """Apply the priorities that are under way, and give the memory up. Graphs must not be replayed afterwards. Repeatable.
        Until then the memory that graphs use stays, even if nothing refers to this any more. Raises as :meth:`flush`.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     DeviceReplay(rb, "cuda").close()
        """
        if not self._closed:
            self._closed = True
            try:
                self._reader.flush("DeviceReplay.close")
            finally:
                for reader in (self._reader, *self._spare, *self._captured):
                    reader.close()

    def _sends(self, index: object, priority: object, generation: Tensor | None) -> bool:
        """Send priorities of a batch, if all are on the device. False: those before are in the buffer then."""
        last = self._last
        known = generation if generation is not None or last is None or index is not last[0] else last[1]
        given = self._reader.on_device(index, priority, known)
        if not given or self._reader.updates is None:
            self.flush()
            return False
        try:
            self.update_priority(given[0], given[1], generation=given[2])
        except Changed:
            self.flush()
            return False
        return True


class Replays:
    """The :class:`DeviceReplay` objects of a buffer, made when they are asked for."""

    def __init__(self, rows: DeviceReadable) -> None:
        self._rows = rows
        self.made: dict[tuple[torch.device, int], DeviceReplay] = {}
        """By device and size of batches."""
        #: Why there is none, and the state of the buffer for which that is so.
        self._refused: dict[tuple[torch.device, int], tuple[str, object]] = {}

    def sample(self, device: torch.device, n: int, return_info: bool) -> object:
        """A batch that the device reads. None: the host must draw it.

        Raises ``RuntimeError``: it must, and a graph is being captured; or this was not called before with this device and size.
        """
        key, in_graph = (device, n), Accelerator(device).capturing()
        why, state = self._refused.get(key, ("call it once before the capture, which registers the memory", None))
        if not in_graph and key not in self.made and (state is None or state != self._rows.state()):
            try:
                self.made[key] = DeviceReplay(self._rows, device, n)
            except RuntimeError as error:
                self._refused[key] = str(error.__cause__ or error), self._rows.state()
        if key in self.made:
            try:
                return self.made[key].sample(return_info)
            except Changed:
                self.made.pop(key).close()
                return self.sample(device, n, return_info)
        if in_graph and (self._rows.store is None or self._rows.store.is_native):
            raise RuntimeError(
                f"sample: device: expected rows that {device} can read by itself while a graph is captured, got a buffer that does not "
                f"allow it: {why}."
            )
        return None

    def update(self, index: object, priority: object, generation: Tensor | None) -> bool:
        """Send priorities of a batch to the buffer. False: the host must apply them; those before are applied."""
        return any(replay._sends(index, priority, generation) for replay in self.made.values())  # noqa: SLF001 - it is in this module

    def close(self) -> None:
        """Apply the priorities that are under way, and give the memory up. A failure is a warning."""
        while self.made:
            try:
                self.made.popitem()[1].close()
            except (PriorityError, WriterStalled) as error:
                warn(f"close: {error}")
