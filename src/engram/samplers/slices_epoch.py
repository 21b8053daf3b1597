"""Windows of consecutive steps, of which every trajectory gives one per epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from engram import _native
from engram.errors import NoSampleable
from engram.samplers.window_settings import WindowArguments, WindowSettings
from engram.samplers.windows import WindowSampler
from engram.state import Change, check_keys, integer, typed
from engram.store import Masses

if TYPE_CHECKING:
    from typing import Unpack

    from torch import Tensor

    from engram.samplers.windows import Arguments, Table
    from engram.types import Commit, SampledStorage, Write

#: Before the first draw: key of the order, ticket number of the next write, visited trajectories, and all of them.
_NO_EPOCH = (0, 0, 0, 0)


class SliceSamplerWithoutReplacement(WindowSampler):
    """Draws every trajectory at most once per epoch, one random window of it.

    A batch takes the next ``num_slices`` trajectories of the epoch. The last batch of an epoch sets ``ran_out``, and
    may be short unless ``drop_last`` is set. The next draw starts a new epoch. So does any draw after a write, because
    writes change trajectories. Trajectories that are too short are skipped, which shortens their batch.

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
        self.ran_out = False
        self._epoch = _NO_EPOCH

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
                self._epoch = _NO_EPOCH

    def _choose(self, table: Table, arguments: Arguments) -> list[Tensor]:
        assert isinstance(table, _native.Trajectories)  # it takes no other argument
        with self._lock:
            state, drawn = table.sample_epoch(*arguments, self._epoch, self.shuffle, self.drop_last)
            _, _, visited, found = state
            count = arguments[3]
            if self.drop_last and 0 < found < count:
                raise ValueError(
                    f"sample: drop_last: expected at least {count} trajectories, got {found}. Add data first, or use "
                    "drop_last=False."
                )
            if found > 0:
                self._epoch = state
                self.ran_out = visited == found
        return drawn

    def masses(self, storage: SampledStorage) -> Masses:
        self.bind(storage)
        left = self.epoch(storage)[1]
        trajectories = left or self._bound_to(storage, self.settings.length).table.census()[0]
        return Masses(trajectories, 1.0, len(storage))

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        self.bind(storage)
        with self._lock:
            key, version, visited, count = self._epoch
        return key, count - visited if version == self._clock()[0] else 0

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
        """``key, version, visited, count`` of the current epoch, ``clock`` of the store, and ``ran_out``: plain values.

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
        key, version, visited, count = self._epoch
        clock, base = self._clock()
        return {
            "key": key,
            "version": max(0, version - base),
            "visited": visited,
            "count": count,
            "clock": clock - base,
            "ran_out": self.ran_out,
        }

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        where = type(self).__name__
        check_keys(state_dict, ("key", "version", "visited", "count", "clock", "ran_out"), where)
        key = integer(state_dict, "key", 0, 1 << 64, where)
        clock = integer(state_dict, "clock", 0, 1 << 62, where)
        version = integer(state_dict, "version", 0, clock + 1, where)
        count = integer(state_dict, "count", 0, 1 << 62, where)
        visited = integer(state_dict, "visited", 0, count + 1, where)
        ran_out = typed(state_dict, "ran_out", bool, where)
        return Change(self._go_on, (key, visited, count), clock if clock == version else None, ran_out)

    def _go_on(self, epoch: tuple[int, int, int], clock: int | None, ran_out: bool) -> None:
        """``clock``: that of the last write, if the epoch began after it."""
        key, visited, count = epoch
        with self._lock:
            now, base = self._clock()
            self._epoch = (key, now, visited, count) if now - base == clock else _NO_EPOCH
            self.ran_out = ran_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_pass" in state:  # pickled by an earlier version
            state["_epoch"] = state.pop("_pass")
        super().__setstate__(state)
