"""Slice samplers: windows of consecutive steps of one trajectory, drawn with or without replacement, or by priority."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, Unpack, cast

import torch
import xxhash

from engram._support import checks, unsupported, words
from engram._support import native as _native
from engram._support.field_paths import FieldPath, as_path, plain
from engram._support.state import Change, check_keys, integer, tensor_in, typed
from engram.around.settings import Setting, StreamingArguments, WindowArguments, WindowSettings
from engram.around.windows import NativeArguments, Table, WindowSampler, _Bound
from engram.errors import NoSampleable
from engram.samplers import _base, prioritized
from engram.store import blocks, priorities, sampled, store
from engram.store.opening import origin_of
from engram.types import Commit, Write


class SliceArguments(WindowArguments, total=False):
    """The keywords of a :class:`SliceSampler`, apart from ``anchors`` and ``replacement``."""

    cache_values: bool
    pad_output: bool
    span: object
    online: bool
    uniform_over: str
    fragmented: bool
    step_key: object


class SliceSampler(WindowSampler):
    """Draws windows of one trajectory each, with replacement: first a trajectory, uniformly, then where the window starts.

    A batch of ``B`` rows is ``num_slices`` windows of ``slice_len`` steps, one after the other. Trajectories follow
    from what was written. They continue across the end of a full ring, never across its seam, and each lane (with
    ``ndim > 1`` each column) has its own. Finding them costs a write O(rows written), and a sample almost nothing; the
    first sample from a storage that holds data scans it once.

    Samples have ``("next", "truncated")``, true at the last step of every window, ``("next", "done")`` (stored, or
    truncated), ``("next", "terminated")`` (stored, or false), bool ``[B, 1]``, and, if it is stored, ``"is_init"``,
    true at the first step of every window. TensorDict buffers put them into the batch, all buffers into ``info``, where
    ``"index"`` is a tuple of int64 ``[B]``. So in a batch of TensorDicts ``("next", "done")`` is true at the end of every window,
    also within an episode, as in TorchRL, and in batches of other rows it is as stored. A target that is to look past the end of a
    window goes by ``("next", "terminated")``, which stays as stored, or by other rows; ``truncated_key=None`` leaves all flags alone.
    Transforms see the marks in batches of TensorDicts and of dicts.

    With ``window=`` all windows have the steps of a :class:`WindowSpec`, ``T``, and samples have ``"validity_mask"``, false
    where a step stands for one beyond its trajectory, and ``"learning_mask"``, false in the burn-in: bool ``[B]``. With
    ``flat=False`` a batch of ``B`` is ``B`` windows: wherever else ``[B]`` is written here, it is then ``[B, T]``, and so is the
    ``batch_size`` of TensorDicts.

    Args:
        num_slices: windows per batch.
        slice_len: steps per window.
        window: what a window is: steps, burn-in, padding, and how far apart. Give exactly one of the three.
        flat: False: batches ``[B, T, ...]``, of ``B`` windows. It needs ``window``.
        end_key: a bool field that is true at the last step of a trajectory. Default: each of ``("next", "done")``,
            ``("next", "terminated")`` and ``("next", "truncated")`` that is stored, or where none of them is, of the flags of these names
            beside the observation; and an integer field named ``step_type``, at any depth, which holds step types as dm_env numbers
            them: 2 is the last step of a trajectory, and 0 the first one, which begins a trajectory also if the last step before it
            was lost.
        end_keys: several of these: each of them ends a trajectory; those that are not stored are skipped. An empty list: ids alone count.
        traj_key: a field that is constant within a trajectory and changes with the next one. Default ``("collector", "traj_ids")``,
            ``"traj_ids"`` or ``"episode"``, the first that is stored. A trajectory ends where the id changes, and at every end, so that
            an id may come again. If a given key is not stored, ends alone count.
        ends, trajectories: end flags or ids of all live rows in row order, ``[N]``, instead of a stored field. They
            stay those of their rows when a full ring is written to. They need ``cache_values=True``.
        cache_values, compile, use_gpu: have no effect: boundaries are always kept and always current.
        truncated_key: the name of the marks; ``done`` and ``terminated`` are next to it. None: no such marks.
        init_key: the field of first steps; None: it is not changed.
        strict_length: skip trajectories that are shorter; False: draw such a trajectory as a whole. With ``window``, its last
            step then stands for those that are missing.
        pad_output: repeat the last step of short windows up to the length; ``("collector", "mask")`` is false there.
        span: ``(left, right)``, or one value for both: how far a window may extend beyond its trajectory at that end.
            True: as long as one step is inside; an int: by so many steps. Only existing steps are returned, so batches
            may be short.
        uniform_over: ``"trajectories"``, or ``"anchors"``: every window is equally likely, so that long trajectories
            weigh more.
        online: an online queue. Every batch begins with the newest complete window of each lane whose steps are all newer than
            those that the queue took from this lane before, the newest window first; the rest of the batch is drawn as
            without. So fresh steps are learned from at once, and by the queue only once. Every sampler has a queue of its own,
            which other processes do not see; its state is saved, unless there are ``anchors``. It needs ``window``.
        anchors: draws the first steps of windows by priority, as in a :class:`PrioritizedSliceSampler`; with burn-in, the first
            steps to learn from.
        fragmented: the steps of a trajectory may lie anywhere among those of others, as where several processes write into one lane:
            it is put together from ``traj_key`` and ``step_key``. Steps that follow each other without a gap are a *run*; a step that
            is missing, as it was overwritten or not written yet, ends one. First a run that is long enough is drawn, uniformly, then
            where the window starts. A stored end ends a run, too; ``end_keys=[]`` leaves it to both keys. It needs ``ndim=1``.
        step_key: with ``fragmented``, the field of a step's number in its trajectory. Both keys are one integer per row.
        end_when: of end flags of which a step has several, ``[B, agents, 1]``: ``"any"``, the default, ends the trajectory where
            one of a field's is set, ``"all"`` where all of one field's are.
        index: the name of the store's trajectory table; samplers of the same name and boundaries share it.
        replacement: False constructs a :class:`SliceSamplerWithoutReplacement`.

    Raises:
        NotImplementedError: ``fragmented`` with ``span`` or ``compile``.
        TypeError: not exactly one of ``num_slices``, ``slice_len`` and ``window`` is given; ``flat=False`` or ``online`` without
            ``window``, or ``span`` or ``pad_output`` with it; a key is not a key.
        RuntimeError: several kinds of boundaries are given, or static ones without ``cache_values``.
        ValueError: a number is out of range; ``pad_output`` with ``strict_length``; ``uniform_over`` or ``index`` is
            invalid; ``anchors``, and a window of more padding than burn-in; ``fragmented`` with ``step_key=None``, ``ends``,
            ``trajectories``, ``anchors``, ``online`` or ``uniform_over="anchors"``.

    Raises (when drawing):
        RuntimeError: the batch size is not divisible; a field is not stored; a row is one tensor without a name; with ``fragmented``,
            two rows are the same step of a trajectory.
        TypeError: with ``fragmented``, a key that is not one integer per row.
        NoSampleable: no trajectory is long enough; the message says how many there are, and how long.
        ValueError: the length of ``ends`` or ``trajectories`` is not the number of live rows; ``span`` is a whole
            window or more.
        IncompatibleStore: ``index`` names a table with other boundaries.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3), batch_size=6)
    >>> _ = rb.extend(TensorDict({"episode": torch.arange(20) // 5, "step": torch.arange(20) % 5}, batch_size=[20]))
    >>> steps = rb.sample()["step"].reshape(2, 3)
    >>> bool((steps[:, 1:] - steps[:, :-1] == 1).all())
    True
    >>> from engram import WindowSpec
    >>> rb.set_sampler(SliceSampler(window=WindowSpec(length=2, burn_in=2, padding=2), flat=False))  # doctest: +ELLIPSIS
    SliceSampler(...)
    >>> batch = rb.sample()
    >>> batch.shape, batch["learning_mask"][0].tolist()
    (torch.Size([6, 4]), [False, False, True, True])
    >>> bool((batch["step"][~batch["validity_mask"]] == 0).all())  # the first step of an episode, repeated
    True
    """

    noted = (*WindowSampler.noted, "pad_output", "span", "uniform_over")

    span = Setting[tuple[bool | int, bool | int]]()
    uniform_over = Setting[str]()
    online = Setting[bool]()
    fragmented = Setting[bool]()
    step_key = Setting[FieldPath | None]()

    if not TYPE_CHECKING:  # for them it would hide the arguments of the constructor

        def __new__(cls, *, replacement: bool = True, **kwargs):
            return super().__new__(cls) if replacement else SliceSamplerWithoutReplacement(**kwargs)

    def __init__(
        self,
        *,
        cache_values: bool = False,
        pad_output: bool = False,
        span: object = False,
        uniform_over: str = "trajectories",
        online: bool = False,
        anchors: prioritized.PrioritizedSampler | None = None,
        fragmented: bool = False,
        step_key: object = "step_count",
        replacement: bool = True,
        **windows: Unpack[WindowArguments],
    ) -> None:
        name = type(self).__name__
        settings = WindowSettings.of(name, windows)
        if settings.static is not None and not cache_values:
            raise RuntimeError(f"{name}: ends and trajectories need cache_values=True, as they are kept.")
        if pad_output and settings.strict_length:
            raise ValueError(f"{name}: pad_output: expected strict_length=False: there are no short windows to pad.")
        if anchors is not None and not isinstance(anchors, prioritized.PrioritizedSampler):
            raise TypeError(f"{name}: anchors: expected a PrioritizedSampler, got {type(anchors).__name__}.")
        left, right = _as_span(name, span)
        settings = replace(
            settings,
            pad_output=bool(pad_output),
            span=(left, right),
            uniform_over=uniform_over,
            online=bool(online),
            fragmented=bool(fragmented),
            step_key=as_path(step_key, f"{name}: step_key") if fragmented else None,
        )
        _check_window(name, settings, anchored=anchors is not None)
        if fragmented:
            _check_fragmented(name, settings, windows.get("compile"), anchored=anchors is not None)
        if anchors is not None and left:
            words.warn(f"{name}: span: at the left end there is none.")
            settings = replace(settings, span=(False, right))
        if settings.slice_len is not None:
            settings.native(settings.slice_len, name)  # raises for a span that is too large
        self.cache_values = bool(cache_values)
        #: Ticket numbers of the last steps that the online queue took, int64 [tracks], -1 for none; None: not known yet.
        self._taken: torch.Tensor | None = None
        self.anchors = anchors
        if anchors is not None:
            anchors.on_device = False  # windows are drawn on the host
            if not self.traits.prioritized:
                self.traits = self.traits._replace(prioritized=True, takes_priorities=True)
        elif online:
            self.traits = self.traits._replace(can_rewind=True)
        super().__init__(settings)

    def bind(self, storage: sampled.SampledStorage) -> None:
        """Take a storage to draw from. Raises ``ValueError``: it is larger than the anchors' ``max_capacity``.

        >>> from engram import LazyTensorStorage, PrioritizedSampler, SliceSampler
        >>> sampler = SliceSampler(slice_len=4, anchors=PrioritizedSampler(10, alpha=0.6, beta=0.4))
        >>> sampler.bind(LazyTensorStorage(100))
        Traceback (most recent call last):
        ValueError: PrioritizedSampler: max_capacity: expected at least the storage's 100 rows, got 10.
        """
        if self._storage is not None and storage is not self._storage:
            self._taken = None
        super().bind(storage)
        if self.anchors is not None:
            self.anchors.bind(storage)

    def moved(self) -> None:
        super().moved()
        if self.anchors is not None:
            self.anchors.moved()

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _choose(self, table: Table, arguments: NativeArguments) -> list[torch.Tensor]:
        anchors = self.anchors
        if anchors is None or isinstance(table, _native.Fragments):
            return table.sample(*arguments)
        index = anchors.priorities()
        assert isinstance(index, priorities.PriorityIndex)  # as anchors lie on the host
        single, over_batch = anchors.dtype is torch.float32, anchors.normalize == "batch"
        drawn = table.sample_anchored(*arguments, index.core, single, over_batch)
        drawn[-2] = drawn[-2].to(anchors.dtype)
        return drawn

    def _raise_without_windows(self, table: Table, length: int) -> NoReturn:
        trajectories, longest = table.census()
        if self.anchors is None or longest < (self.settings.needed(length) if self.strict_length else 1):
            super()._raise_without_windows(table, length)
        raise NoSampleable(
            f"sample: expected a row of positive priority where a window of {length} steps begins, got {trajectories} "
            f"trajectories of at most {longest} steps without one."
        )

    def masses(self, storage: sampled.SampledStorage) -> blocks.Masses:
        if self.anchors is None:
            return super().masses(storage)
        self.bind(storage)
        return self.anchors.masses(storage)

    # ---- priorities, which are the anchors' --------------------------------------------------------------------------

    @property
    def _priorities(self) -> _base.NativeSampler:
        """The anchors; without any, this sampler as one that has no priorities."""
        return super() if self.anchors is None else self.anchors  # type: ignore[return-value] # super() has its methods

    @property
    def default_priority(self) -> float:  # type: ignore[override]
        """Priority of new rows."""
        return self._priorities.default_priority

    def update_priority(
        self, index: object, priority: object, *, generation: torch.Tensor | None = None, storage: object = None
    ) -> None:
        """As :meth:`PrioritizedSampler.update_priority`, step by step; without anchors it has no effect and warns.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, SliceSampler
        >>> sampler = SliceSampler(slice_len=2, traj_key="episode", anchors=PrioritizedSampler(10, alpha=1.0, beta=0.4))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> _ = rb.extend({"episode": torch.zeros(6, dtype=torch.int64)})
        >>> sampler.update_priority([0, 1], [4.0, 2.0])
        >>> sampler.anchors.priorities().leaves(2).round().tolist()
        [4.0, 2.0]
        """
        self._priorities.update_priority(index, priority, generation=generation)

    def check_priority(self, priority: object, n: int) -> None:
        """As :meth:`PrioritizedSampler.check_priority`.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, SliceSampler
        >>> sampler = SliceSampler(slice_len=2, traj_key="episode", anchors=PrioritizedSampler(10, alpha=1.0, beta=0.4))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> sampler.check_priority([-1.0], 1)
        Traceback (most recent call last):
        engram.errors.PriorityError: ...
        """
        self._priorities.check_priority(priority, n)

    def mark_update(self, index: object, *, storage: object = None) -> None:
        """As :meth:`PrioritizedSampler.mark_update`.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, SliceSampler
        >>> sampler = SliceSampler(slice_len=2, traj_key="episode", anchors=PrioritizedSampler(10, alpha=1.0, beta=0.4))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> _ = rb.extend({"episode": torch.zeros(6, dtype=torch.int64)})
        >>> sampler.update_priority([0, 1], [4.0, 2.0])
        >>> sampler.mark_update([1])  # the highest priority so far
        >>> sampler.anchors.priorities().leaves(2).round().tolist()
        [4.0, 4.0]
        """
        self._priorities.mark_update(index)

    # ---- state: the table of trajectories follows from the rows ------------------------------------------------------

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        return self._priorities.own_indexes

    def state_dict(self) -> dict[str, object]:
        """As :meth:`PrioritizedSampler.state_dict`; without anchors it is empty, or that of the online queue.

        The queue's: int64 ``taken`` ``[tracks]`` and ``clock`` of the store.

        >>> from engram import PrioritizedSampler, SliceSampler
        >>> SliceSampler(slice_len=4, end_keys=["done"]).state_dict()
        {}
        """
        if self.anchors is not None or not self.online:
            return self._priorities.state_dict()
        clock, base = self._clock()
        taken = _NONE if self._taken is None else self._taken
        return {"clock": clock - base, "taken": torch.where(taken < 0, -1, taken - base)}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        queue = {"clock", "taken"}
        if self.anchors is None and not self.online and state_dict.keys() == queue:
            state_dict = {}  # of a sampler with a queue, which this one has not
        if self.anchors is not None or not self.online:
            return self._priorities.prepare_load(state_dict, capacity)
        if not state_dict:  # of a sampler without
            return Change(self._go_on, 0, _NONE)
        where = type(self).__name__
        check_keys(state_dict, tuple(sorted(queue)), where)
        clock = integer(state_dict, "clock", 0, 1 << 62, where)
        taken = tensor_in(state_dict, "taken", torch.int64, (None,), where)
        if bool(((taken < -1) | (taken >= clock)).any()):
            raise ValueError(f"{where}: taken: expected numbers from -1 to below the clock, {clock}, got others.")
        return Change(self._go_on, clock, taken.clone())

    def _go_on(self, clock: int, taken: torch.Tensor) -> None:
        """The queue begins again if the rows are not those of the state."""
        with self._lock:
            now, base = self._clock()
            known = now - base == clock and len(taken) > 0
            self._taken = torch.where(taken < 0, -1, taken + base) if known else None
            self._bound = None

    def _taken_of(self, table: _native.Trajectories) -> torch.Tensor | None:
        if not self.online and not self.streaming:
            return None
        if self._taken is None or len(self._taken) != table.tracks:
            self._taken = torch.full((table.tracks,), -1, dtype=torch.int64, device="cpu")
        return self._taken

    def config(self) -> dict[str, object]:
        anchors = {} if self.anchors is None else {"anchors": self.anchors.config()}
        pieces = {"fragmented": True, "step_key": plain(self.settings.step_key)} if self.settings.fragmented else {}
        return {**super().config(), **({"online": True} if self.settings.online else {}), **anchors, **pieces}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The sampler that a store noted.

        >>> from engram import SliceSampler
        >>> SliceSampler.from_config(SliceSampler(slice_len=4, traj_key="episode").config()).slice_len
        4
        """
        if "anchors" in config:
            config = {**config, "anchors": prioritized.PrioritizedSampler.from_config(config["anchors"])}
        return cls(**config)


def _check_window(name: str, settings: WindowSettings, *, anchored: bool) -> None:
    """Raise for an unknown way to draw windows, and for arguments that a :class:`WindowSpec` does not go with, or that need one."""
    checks.check_choice(f"{name}: uniform_over", settings.uniform_over, ("trajectories", "anchors"))
    window = settings.window
    if window is None:
        if settings.online:
            raise TypeError(f"{name}: online=True: expected window=WindowSpec(…) beside it, which says what is queued.")
        return
    for argument, given in {"span": any(settings.span), "pad_output": settings.pad_output}.items():
        if given:
            raise TypeError(
                f"{name}: expected one of window and {argument}, got both. Windows of a WindowSpec always have all their steps: "
                'give it a padding, or pass strict_length=False, and look at "validity_mask".'
            )
    if anchored and window.padding > window.burn_in:
        raise ValueError(
            f"{name}: window: expected padding of at most burn_in={window.burn_in} with priorities, as the first step to learn from "
            f"is drawn by its own, got {window.padding}."
        )


def _check_fragmented(name: str, settings: WindowSettings, compiled: object, *, anchored: bool) -> None:
    """Raise for arguments that windows of interleaved trajectories do not go with."""
    for argument, given in {"span": any(settings.span), "compile": compiled}.items():
        if given:
            raise NotImplementedError(f"{name}: fragmented=True: expected no {argument}: they do not go together.")
    if settings.static is not None:
        raise ValueError(
            f"{name}: fragmented=True: expected traj_key and step_key, got {settings.static[0]}, which says nothing of steps that lie "
            "apart. Store a field of ids."
        )
    by_anchor = settings.uniform_over == "anchors"
    others = {"anchors": anchored, "online": settings.online, "uniform_over='anchors'": by_anchor}
    for argument, given in others.items():
        if given:
            raise ValueError(f"{name}: fragmented=True: expected no {argument}: runs are drawn alike. Leave it out.")
    if settings.step_key is None:
        raise ValueError(f"{name}: fragmented=True: expected a step_key, the field of a step's number, got None.")


def _as_span(who: str, span: object) -> tuple[bool | int, bool | int]:
    ends = (span, span) if isinstance(span, bool | int) else span
    if not isinstance(ends, tuple | list) or len(ends) != 2 or not all(isinstance(end, bool | int) for end in ends):
        raise TypeError(f"{who}: span: expected a bool or an int, or two of them, got {span!r}.")
    if min(ends) < 0:
        raise ValueError(f"{who}: span: expected at least 0 steps, got {span!r}.")
    return ends[0], ends[1]


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
            raise TypeError(f"{cls.__name__}: expected replacement=True: without new windows, draws are independent.")
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
        self._loaded: tuple[int, torch.Tensor, int | None] | None = None
        name, known = type(self).__name__, StreamingArguments.__annotations__
        unsupported.reject_unsupported(
            name, {argument: v for argument, v in windows.items() if argument not in known}, {}, known
        )
        super().__init__(slice_len=slice_len, cache_values=cache_values, pad_output=pad_output, span=span, **windows)

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _find(self, storage: sampled.SampledStorage | None, memory: store.Store | None, length: int) -> _Bound:
        bound = super()._find(storage, memory, length)
        steps = bound.memory.lane_length // math.prod(bound.memory.schema.columns)
        if length > steps:
            raise ValueError(
                f"sample: {type(self).__name__}: expected slice_len of at most {steps}, as many steps as a lane holds, got {length}. "
                "Make the storage larger, or the windows shorter."
            )
        return bound

    def _taken_of(self, table: _native.Trajectories) -> torch.Tensor | None:
        """Of each track the place at which its next window begins, int64 ``[tracks]``. Draws write to it."""
        if self._loaded is not None:
            clock, positions, rows = self._loaded
            now, base = self._clock()
            if len(positions) == table.tracks and clock <= now - base and rows in (None, self._stored_rows()):
                self._taken = torch.from_numpy(table.places_of(positions))
            self._loaded = None
        return super()._taken_of(table)

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

    def _position(self) -> tuple[int, torch.Tensor, int | None]:
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

    def _begin(self, clock: int, positions: torch.Tensor, rows: int | None) -> None:
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
        loaded = clock, torch.tensor(positions, dtype=torch.int64, device="cpu"), rows
        super().__setstate__({**state, "_loaded": loaded})


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

    def bind(self, storage: sampled.SampledStorage) -> None:
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

    def _choose(self, table: Table, arguments: NativeArguments) -> list[torch.Tensor]:
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

    def masses(self, storage: sampled.SampledStorage) -> blocks.Masses:
        left = self.epoch(storage)[1]
        trajectories = left or self._bound_to(storage, self.settings.length).table.census()[0]
        return blocks.Masses(trajectories, 1.0, len(storage))

    def epoch(self, storage: sampled.SampledStorage) -> tuple[int, int]:
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


class PrioritizedSliceSampler(SliceSampler):
    """A :class:`SliceSampler` whose windows start at rows drawn as by a :class:`PrioritizedSampler`.

    The first step is drawn in proportion to its priority among the rows where a window may start, so long trajectories
    weigh more. With the burn-in of a ``window`` it is the first step to learn from. Samples have ``"priority_weight"``, the
    weight of the step that was drawn at every step of its window, and ``"index_generation"``. Priorities belong to single
    steps: ``update_priority`` sets those of every row of a batch, or with one for each window those of the steps that were drawn.
    New rows, ``alpha`` and ``beta`` are as for ``PrioritizedSampler``. Tree and trajectory table belong to the store under the name
    ``index``.

    This class has TorchRL's signature. ``SliceSampler(anchors=PrioritizedSampler(…))`` draws the same windows.

    Args:
        max_capacity, alpha, beta, eps, dtype: as for :class:`PrioritizedSampler`.
        reduction, max_priority_within_buffer, normalize: as for :class:`PrioritizedSampler`.
        num_slices, slice_len, window, flat, online, end_key, end_keys, end_when: as for :class:`SliceSampler`.
        traj_key, ends, trajectories, cache_values, truncated_key, init_key: as for :class:`SliceSampler`.
        strict_length: skip shorter trajectories; False: draw such a trajectory from its first step.
        span: only at the right end; at the left it is ignored, with a warning.
        compile: has no effect.

    Raises: as :class:`SliceSampler` and :class:`PrioritizedSampler`.

    Cost: that of both. O(rows) if hardly any row of high priority may start a window.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer
    >>> sampler = PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, slice_len=3)
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=3)
    >>> index = rb.extend(TensorDict({"episode": torch.arange(20) // 5, "step": torch.arange(20) % 5}, batch_size=[20]))
    >>> rb.update_priority(index, (index == 7).float())
    >>> rb.sample()["step"].tolist()
    [2, 3, 4]
    """

    traits = SliceSampler.traits._replace(prioritized=True, takes_priorities=True)
    noted = (*WindowSampler.noted, "span")
    anchors: prioritized.PrioritizedSampler

    def __new__(cls, *args: object, replacement: bool = True, **kwargs: object) -> Self:  # noqa: ARG004 - for __init__
        if not replacement:
            raise TypeError(f"{cls.__name__}: expected replacement=True: draws by priority are independent.")
        return object.__new__(cls)

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        max_priority_within_buffer: bool = False,
        replacement: bool = True,
        normalize: Literal["store", "batch"] = "store",
        **slices: Unpack[SliceArguments],
    ) -> None:
        given = (max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        anchors = prioritized.PrioritizedSampler(*given, index=slices.get("index", "main"), normalize=normalize)
        super().__init__(anchors=anchors, **slices)

    @property
    def max_size(self) -> int:
        """Rows at most, as :attr:`PrioritizedSampler.max_size`."""
        return self.anchors.max_size

    @property
    def alpha(self) -> float:
        """Exponent of priorities, as :attr:`PrioritizedSampler.alpha`."""
        return self.anchors.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.anchors.alpha = value

    @property
    def beta(self) -> float:
        """Exponent of the weights, as :attr:`PrioritizedSampler.beta`."""
        return self.anchors.beta

    @beta.setter
    def beta(self, value: float) -> None:
        self.anchors.beta = value

    def config(self) -> dict[str, object]:
        slices = {name: value for name, value in super().config().items() if name != "anchors"}
        return {**slices, **self.anchors.config()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The sampler that a store noted: ``alpha`` and ``beta`` are those of its index.

        >>> from engram import PrioritizedSliceSampler
        >>> config = PrioritizedSliceSampler(100, alpha=0.6, beta=0.4, slice_len=4).config()
        >>> PrioritizedSliceSampler.from_config(config).slice_len
        4
        """
        made = cls(**{**config, "dtype": getattr(torch, config["dtype"])})
        made.anchors.adopts_index = True
        return made
