"""Windows of consecutive steps, of which every trajectory gives one per epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from engram import _native
from engram.around.settings import WindowArguments, WindowSettings
from engram.around.windows import WindowSampler
from engram.errors import NoSampleable
from engram.state import Change, check_keys, integer, tensor_in, typed
from engram.store import Masses

if TYPE_CHECKING:
    from typing import Unpack

    from torch import Tensor

    from engram.around.windows import Arguments, Table
    from engram.types import Commit, SampledStorage, Write

#: Before the first draw: key of the order, ticket number of the next write, visited trajectories, and all of them.
_NO_EPOCH = (0, 0, 0, 0)


class SliceSamplerWithoutReplacement(WindowSampler):
    """Draws every trajectory at most once per epoch, one random window of it. ``isinstance`` takes it for a :class:`SliceSampler` and a
    :class:`SamplerWithoutReplacement`.

    A batch takes the next ``num_slices`` trajectories of the epoch. The last batch of an epoch sets ``ran_out``, and
    may be short unless ``drop_last`` is set. The next draw starts a new epoch.

    An epoch is over the trajectories that were there when it began, and windows hold none of the steps that came later. New
    trajectories and new steps join the next epoch; trajectories whose steps are overwritten or removed drop out. Trajectories that are
    too short are skipped, which shortens their batch. An epoch takes 16 bytes per trajectory.

    Args:
        num_slices, slice_len, window, flat, end_key, end_keys, end_when, traj_key: as for :class:`SliceSampler`.
        ends, trajectories: as for :class:`SliceSampler`; they need nothing else.
        truncated_key, init_key, strict_length, index: as for :class:`SliceSampler`.
        drop_last: skip the trajectories of an epoch that do not fill a batch.
        shuffle: random order; otherwise lane by lane, oldest first.
        compile, use_gpu: have no effect.

    Raises: as :class:`SliceSampler`, and when drawing
        ValueError: ``drop_last``, and fewer trajectories than slices.
        NoSampleable: a batch would be empty, because its trajectories are too short.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
    >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
    >>> _ = rb.extend({"episode": torch.arange(20) // 5})
    >>> [sorted(set(batch["episode"].tolist())) for batch in rb]  # 4 trajectories, two a batch
    [[...], [...]]
    """

    traits = WindowSampler.traits._replace(has_epochs=True, can_rewind=True)
    noted = (*WindowSampler.noted, "drop_last", "shuffle")

    def __init__(
        self,
        *,
        drop_last: bool = False,
        shuffle: bool = True,
        replacement: bool = False,
        **windows: Unpack[WindowArguments],
    ) -> None:
        if replacement:
            raise TypeError(f"{type(self).__name__}: expected replacement=False. Use SliceSampler().")
        super().__init__(WindowSettings.of(type(self).__name__, windows))
        self.drop_last = bool(drop_last)
        self.shuffle = bool(shuffle)
        self._ran_out = False
        self._begin(_NO_EPOCH)

    def _begin(self, epoch: tuple[int, int, int, int], known: bytes = b"") -> None:
        """``known``: of each trajectory of the epoch the row of its last step, and the number of that write; empty: not known yet."""
        self._epoch, self._known = epoch, known
        #: Without so many trajectories an epoch is over.
        self._needed = 1

    def bind(self, storage: SampledStorage) -> None:
        """As of every sampler; with another storage the epoch begins again.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend({"episode": torch.arange(20) // 5})
        >>> sampler.bind(rb.storage)  # a buffer has done so already
        """
        if self._storage is not None and storage is not self._storage:
            with self._lock:
                self._begin(_NO_EPOCH)
        super().bind(storage)

    @property
    def ran_out(self) -> bool:
        """Whether the epoch of the last batch has ended. What was left of it may have been overwritten."""
        with self._lock:
            return self._ran_out or self._over()

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = bool(value)

    def _over(self) -> bool:
        """Whether too few trajectories are left of the epoch, also of a loaded one before the first draw."""
        storage = self._storage
        if not self._known or storage is None or storage.memory is None:
            return False
        table = cast("_native.Trajectories", self._bound_to(storage, self.settings.length).table)
        return table.left(self._epoch, self._known, self.shuffle, self._needed) < self._needed

    def observe(self, write: Write | None, data: object) -> None:
        """Ends the epoch when the buffer was emptied.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> rows = {"episode": torch.arange(4).repeat_interleave(2)}
        >>> _ = rb.extend(rows)
        >>> _ = rb.sample()
        >>> rb.empty()  # tells the sampler
        >>> _ = rb.extend(rows)
        >>> len(list(rb))  # batches of a whole epoch
        2
        """
        if write is None:
            with self._lock:
                self._begin(_NO_EPOCH)

    def _choose(self, table: Table, arguments: Arguments) -> list[Tensor]:
        assert isinstance(table, _native.Trajectories)  # it takes no other argument
        with self._lock:
            state, known, drawn = table.sample_epoch(*arguments, self._epoch, self._known, self.shuffle, self.drop_last)
            (_, _, visited, found), count = state, arguments[3]
            if self.drop_last and 0 < found < count:
                raise ValueError(
                    f"sample: drop_last: expected at least {count} trajectories, got {found}. Add data first, or use "
                    "drop_last=False."
                )
            if found > 0:
                self._begin(state, known)
                self._needed = count if self.drop_last else 1
                self._ran_out = visited == found
        return drawn

    def masses(self, storage: SampledStorage) -> Masses:
        left = self.epoch(storage)[1]
        trajectories = left or self._bound_to(storage, self.settings.length).table.census()[0]
        return Masses(trajectories, 1.0, len(storage))

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        self.bind(storage)
        with self._lock:
            key, version, visited, count = self._epoch
            goes_on = (self._known or version == self._clock()[0]) and not self._over()
            return key, count - visited if goes_on else 0

    def _raise_without_windows(self, table: Table, length: int) -> NoReturn:
        trajectories, longest = table.census()
        if longest < self.settings.needed(length):
            super()._raise_without_windows(table, length)
        raise NoSampleable(
            f"sample: {self.settings.named(length)}: expected a trajectory of at least {self.settings.needed(length)} steps in "
            f"every batch of an epoch, got a batch of shorter ones ({trajectories} trajectories, of at most {longest} steps). Take "
            f"more slices per batch, {self._shorter().lower()}, or pass strict_length=False."
        )

    def state_dict(self) -> dict[str, object]:
        """``key, version, visited, count`` of the current epoch, ``clock`` of the store, and ``ran_out``: plain values. ``known``,
        as long as it goes on: its trajectories, int64 ``[count, 2]``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> _ = rb.extend({"episode": torch.arange(4).repeat_interleave(2)})
        >>> _ = rb.sample()
        >>> state = sampler.state_dict()
        >>> state["visited"], state["count"]  # of 4 windows
        (2, 4)
        """
        with self._lock:
            (key, version, visited, count), known = self._epoch, self._known
        clock, base = self._clock()
        goes_on = known and visited < count
        more = {"known": torch.frombuffer(bytearray(known), dtype=torch.int64).reshape(-1, 2)} if goes_on else {}
        return {
            "key": key,
            "version": max(0, version - base),
            "visited": visited,
            "count": count,
            "clock": clock - base,
            "ran_out": self.ran_out,
            **more,
        }

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        where = type(self).__name__
        check_keys(state_dict, ("key", "version", "visited", "count", "clock", "ran_out"), where, optional=("known",))
        key = integer(state_dict, "key", 0, 1 << 64, where)
        clock = integer(state_dict, "clock", 0, 1 << 62, where)
        version = integer(state_dict, "version", 0, clock + 1, where)
        count = integer(state_dict, "count", 0, 1 << 62, where)
        visited = integer(state_dict, "visited", 0, count + 1, where)
        ran_out = typed(state_dict, "ran_out", bool, where)
        known = b""
        if "known" in state_dict:
            known = tensor_in(state_dict, "known", torch.int64, (count, 2), where).contiguous().numpy().tobytes()
        return Change(self._go_on, (key, version, visited, count), clock if clock == version else None, known, ran_out)

    def _go_on(self, epoch: tuple[int, int, int, int], clock: int | None, known: bytes, ran_out: bool) -> None:
        """``clock``: that of the last write, if the epoch began after it; else it is over what is ``known``."""
        key, version, visited, count = epoch
        with self._lock:
            now, base = self._clock()
            began = (key, version + base if known else now, visited, count)
            self._begin(began if known or now - base == clock else _NO_EPOCH, known)
            self._ran_out = ran_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_pass" in state:  # pickled by an earlier version
            state["_epoch"] = state.pop("_pass")
        state["_ran_out"] = state.pop("ran_out", state.get("_ran_out"))
        super().__setstate__({"_known": b"", "_needed": 1, **state})
