"""Windows of consecutive steps, of which each complete one comes first, once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
import xxhash

from engram import _native
from engram._unsupported import reject_unsupported
from engram.samplers.slices import SliceSampler
from engram.samplers.window_settings import StreamingArguments
from engram.state import Change, check_keys, integer, tensor_in
from engram.store import origin_of

if TYPE_CHECKING:
    from typing import Self, Unpack

    from torch import Tensor

    from engram.samplers.windows import _Bound
    from engram.store import Store
    from engram.types import Commit, SampledStorage

#: State of a queue of which nothing was drawn: no entry for any track.
_NONE = torch.zeros(0, dtype=torch.int64, device="cpu")


class StreamingSliceSampler(SliceSampler):
    """A :class:`SliceSampler` whose batches begin with the complete windows that were not drawn yet, the oldest first.

    Each trajectory is cut into windows of ``slice_len`` steps, one behind another from its first step on; a rest at its end that is
    shorter gives none. A window is complete when its last step is written. A batch takes the windows that were completed first, each
    at most once; when none is left, the rest of the batch is drawn as by a :class:`SliceSampler`. Windows of which a step is
    overwritten before they are drawn are dropped. So every step is learned from soon, in the order of the writes, and old ones are
    drawn again while nothing new arrives. ``SliceSampler(window=…, online=True)`` takes the newest window of each lane instead, and
    never the ones before it.

    Lanes, and with ``ndim > 1`` columns, have windows of their own. Windows hold the steps that were appended: rows that are replaced
    by number are no new ones. Each sampler counts for itself which windows it has drawn, as each process has its own: two processes
    that share a store draw every window once each. A sampler that is new to a store, which may be an opened one, begins with the
    windows that are stored, where a trajectory begins with its oldest stored step. ``state_dict``, and so dumps and checkpoints, hold
    where it is. Where rows were moved to other shards, lanes or a storage of another capacity, all stored windows come again. So they
    do after ``load_state_dict`` of the sampler alone, unless the storage holds the rows of that state: no window is passed over because
    another buffer has drawn it.

    Args:
        slice_len: steps per window. The only length there is: a batch of ``B`` rows is ``B / slice_len`` windows.
        end_key, end_keys, end_when, traj_key, truncated_key, init_key, index: as for :class:`SliceSampler`.
        strict_length, pad_output, span: as for :class:`SliceSampler`, of the windows that are drawn when no new ones are left.
        cache_values, compile, use_gpu: have no effect.

    Raises: as :class:`SliceSampler`, and when drawing
        ValueError: ``slice_len`` is more than a lane holds.

    Cost: O(lanes) a batch beside that of :class:`SliceSampler`, and a word per lane of memory.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, StreamingSliceSampler
    >>> sampler = StreamingSliceSampler(slice_len=2, traj_key="episode")
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=2)
    >>> _ = rb.extend({"episode": torch.tensor([0, 0, 0, 1, 1]), "step": torch.tensor([0, 1, 2, 0, 1])})
    >>> [rb.sample()["step"].tolist() for _ in range(2)]  # the first window of each
    [[0, 1], [0, 1]]
    >>> _ = rb.extend({"episode": torch.tensor([1, 1]), "step": torch.tensor([2, 3])})
    >>> rb.sample()["step"].tolist()
    [2, 3]
    """

    traits = SliceSampler.traits._replace(can_rewind=True)
    noted = tuple(name for name in SliceSampler.noted if name not in ("num_slices", "uniform_over"))

    streaming = True

    def __new__(cls, *, replacement: bool = True, **kwargs: object) -> Self:  # noqa: ARG004 - for __init__
        if not replacement:
            raise TypeError(
                f"{cls.__name__}: expected replacement=True: when no new windows are left, draws are independent."
            )
        return object.__new__(cls)

    def __init__(
        self,
        *,
        slice_len: int,
        cache_values: bool = False,
        pad_output: bool = False,
        span: object = False,
        replacement: bool = True,
        **windows: Unpack[StreamingArguments],
    ) -> None:
        #: As loaded, until the first draw knows the store: the store's clock, and ``next`` and ``rows`` of :meth:`state_dict`, without
        #: ``rows`` where they were loaded, too.
        self._loaded: tuple[int, Tensor, int | None] | None = None
        name, known = type(self).__name__, StreamingArguments.__annotations__
        reject_unsupported(name, {argument: v for argument, v in windows.items() if argument not in known}, {}, known)
        super().__init__(slice_len=slice_len, cache_values=cache_values, pad_output=pad_output, span=span, **windows)

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _find(self, storage: SampledStorage | None, memory: Store | None, length: int) -> _Bound:
        bound = super()._find(storage, memory, length)
        steps = bound.memory.lane_length // math.prod(bound.memory.schema.columns)
        if length > steps:
            raise ValueError(
                f"sample: {type(self).__name__}: expected slice_len of at most {steps}, as many steps as a lane holds, got {length}. "
                "Make the storage larger, or the windows shorter."
            )
        return bound

    def _taken_of(self, table: _native.Trajectories) -> Tensor:
        """Of each track the place at which its next window begins, int64 ``[tracks]``. Draws write to it."""
        if self._loaded is not None:
            clock, positions, rows = self._loaded
            now, base = self._clock()
            if len(positions) == table.tracks and clock <= now - base and rows in (None, self._stored_rows()):
                self._taken = torch.from_numpy(table.places_of(positions))
            self._loaded = None
        if self._taken is None or len(self._taken) != table.tracks:
            self._taken = torch.full((table.tracks,), -1, dtype=torch.int64, device="cpu")
        return self._taken

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Which windows are still to come: int64 ``next`` ``[lanes]``, ``clock`` of the store, and ``rows``, which names its rows.

        ``next``: of each lane (with ``ndim > 1`` of each column) how many steps were appended before the first of its next window;
        empty where nothing was drawn yet.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, StreamingSliceSampler
        >>> sampler = StreamingSliceSampler(slice_len=2, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=2)
        >>> _ = rb.extend({"episode": torch.zeros(4, dtype=torch.int64)})
        >>> _ = rb.sample()
        >>> sampler.state_dict()["next"].tolist()
        [2]
        """
        with self._lock:
            clock, positions, rows = self._position()
        return {"clock": clock, "next": positions.clone(), "rows": self._stored_rows() if rows is None else rows}

    def _stored_rows(self) -> int:
        """Names the rows of the storage: after a load they have another name, and so they have in other stores. 0: there are none."""
        memory = None if self._storage is None else self._storage.memory
        return 0 if memory is None else xxhash.xxh3_64_intdigest(f"{origin_of(memory)} {memory.replaced}".encode()) >> 1

    def _position(self) -> tuple[int, Tensor, int | None]:
        if self._loaded is not None:
            return self._loaded
        table, taken, (clock, base) = self._table, self._taken, self._clock()
        if not isinstance(table, _native.Trajectories) or taken is None:
            return clock - base, _NONE, None
        spec = self.settings.native(self.settings.length, type(self).__name__)
        return clock - base, torch.from_numpy(table.positions_of(taken, spec)), None

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        """Check a :meth:`state_dict`; what is returned takes it over.

        ``capacity``: of the rows that are loaded, too; None: the sampler's state is loaded alone.

        Raises ``KeyError``, ``TypeError``, ``ValueError``: it is no such state.

        >>> from engram import StreamingSliceSampler
        >>> sampler = StreamingSliceSampler(slice_len=2)
        >>> change = sampler.prepare_load(sampler.state_dict())
        """
        where = type(self).__name__
        state = {"rows": 0, **state_dict}  # older versions did not name them
        check_keys(state, ("clock", "next", "rows"), where)
        clock = integer(state, "clock", 0, 1 << 62, where)
        rows = integer(state, "rows", 0, 1 << 63, where)
        positions = tensor_in(state, "next", torch.int64, (None,), where).clone()
        return Change(self._begin, clock, positions, rows if capacity is None else None)

    def _begin(self, clock: int, positions: Tensor, rows: int | None) -> None:
        """The next draw goes on there, if the rows are those of the state."""
        with self._lock:
            self._loaded, self._taken, self._bound = (clock, positions, rows), None, None

    def __getstate__(self) -> dict[str, object]:
        with self._lock:
            clock, positions, rows = self._position()
            # By value: another process would look for the memory of a new tensor after it is gone.
            return {**super().__getstate__(), "_loaded": (clock, positions.tolist(), rows), "_taken": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        clock, positions, rows = cast("tuple[int, list[int], int | None]", state["_loaded"])
        super().__setstate__(
            {**state, "_loaded": (clock, torch.tensor(positions, dtype=torch.int64, device="cpu"), rows)}
        )
