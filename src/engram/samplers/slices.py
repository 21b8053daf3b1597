"""Windows of consecutive steps of one trajectory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from engram import _fork, _native
from engram._later import refuse
from engram.errors import NoSampleable, WriterStalled
from engram.samplers._base import NativeSampler
from engram.samplers._boundaries import as_key, as_keys, boundaries_of, field_numbers, scan, shared_table, static_table
from engram.state import check_keys, integer, typed
from engram.store import Key as DrawKey
from engram.store import check_index_name
from engram.types import Draw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from engram.samplers._boundaries import Key
    from engram.store import Store
    from engram.types import Extent, Write

__all__ = ["SliceSampler", "SliceSamplerWithoutReplacement"]

_LATER = {
    "fragmented": "slices of interleaved trajectories",
    "step_key": "slices of interleaved trajectories",
}
_MASK = ("collector", "mask")
#: A draw that reads no field.
_NO_FIELDS = _native.Layout([])
#: Draws of windows that keep moving: tries in a row, then with pauses.
_TRIES = 8
#: Of a mark: not wanted, or not added to a stored flag.
_UNWANTED, _ALONE = -2, -1


class Marks(NamedTuple):
    """Where the entries of ``info`` come from."""

    wanted: Any
    """What the native core is asked for."""
    places: dict[Any, int]
    """Entries that are among the tensors as they are: columns, rows and what it marks, one behind the other."""
    merged: list[tuple[Any, Callable[[Tensor, Tensor], Tensor], int, int]]
    """Entries made of a stored field and a mark: ``(entry, how, place of the field, place of the mark)``."""
    end: int
    """The place behind the last mark."""


class Bound(NamedTuple):
    """A store, and what a sampler knows of it.

    Replaced as a whole: while one thread draws, others may draw from other stores.
    """

    memory: Store
    table: Any
    static: Tensor | None
    """Memory of static boundaries."""
    marks: Marks
    apart: Marks
    """Where somebody else reads the columns."""


#: What a sampler may be told at any time.
_SETTINGS = frozenset(
    ("num_slices", "slice_len", "strict_length", "span", "uniform_over", "pad_output", "truncated_key", "init_key")
)


class _SliceSampler(NativeSampler):
    """What slice samplers share: arguments, the table, and the marks of a window's ends."""

    traits = NativeSampler.traits._replace(reads_natively=True, draws_windows=True)

    #: Whether short windows are filled up.
    pad_output = False

    def __init__(
        self,
        *,
        num_slices: int | None,
        slice_len: int | None,
        end_key: Any,
        end_keys: Any,
        traj_key: Any,
        ends: Any,
        trajectories: Any,
        truncated_key: Any,
        init_key: Any,
        strict_length: bool,
        index: str,
        later: dict[str, Any],
    ) -> None:
        name = type(self).__name__
        refuse(name, later, _LATER)
        if (num_slices is None) == (slice_len is None):
            raise TypeError(
                f"{name}: expected one of num_slices and slice_len, got num_slices={num_slices}, slice_len={slice_len}."
            )
        for argument, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            if value is not None:
                _check_count(f"{name}: {argument}", value, least=1)
        if end_key is not None and end_keys is not None:
            raise RuntimeError(f"{name}: expected one of end_key and end_keys, got both. Put all into end_keys.")
        kinds = {
            "ends": ends,
            "trajectories": trajectories,
            "end_key": end_key,
            "end_keys": end_keys,
            "traj_key": traj_key,
        }
        given = {argument for argument, value in kinds.items() if value is not None}
        if given & {"ends", "trajectories"} and len(given) > 1:
            raise RuntimeError(f"{name}: expected one kind of boundaries, got {sorted(given)}. Give one of them.")
        check_index_name(index, f"{name}: index")
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.end_key = as_key(end_key, f"{name}: end_key")
        self.end_keys = as_keys(end_keys, f"{name}: end_keys")
        self.traj_key = as_key(traj_key, f"{name}: traj_key")
        self.truncated_key = as_key(truncated_key, f"{name}: truncated_key")
        self.init_key = as_key(init_key, f"{name}: init_key")
        self.strict_length = bool(strict_length)
        self.index = index
        self._ends = _as_static(ends, f"{name}: ends")
        self._trajectories = _as_static(trajectories, f"{name}: trajectories")
        self._unbind()

    # ---- the store and its table -------------------------------------------------------------------------------------

    def _unbind(self) -> None:
        self._lock = _fork.rlock()
        self._storage: Any = None
        self._bound: Bound | None = None
        self._static_version = -1
        self._splits: dict[int, tuple[int, int, Any]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _SETTINGS:
            self._splits, self._bound = {}, None

    @property
    def _table(self) -> Any:
        return None if self._bound is None else self._bound.table

    def bind(self, storage: Any) -> None:
        """Take a storage to draw from. Its table is made by the first draw.

        The buffer calls this when it takes the sampler and before every draw, as a sampler may serve several buffers.
        """
        if storage is not self._storage:
            with self._lock:
                self._storage, self._bound = storage, None

    def moved(self) -> None:
        with self._lock:
            self._bound = None

    @property
    def recordable(self) -> bool:
        """Whether :meth:`config` says all: static boundaries are not noted in a store."""
        return self._ends is None and self._trajectories is None

    def _bound_to(self, storage: Any, length: int) -> Bound:
        """A storage's table and what else is needed, looked for where another one was drawn from last."""
        memory: Store | None = getattr(storage, "memory", None)
        bound = self._bound
        if bound is None or bound.memory is not memory:
            with self._lock:
                bound = self._bound
                if bound is None or bound.memory is not memory:
                    bound = self._bound = self._find_table(storage, memory, length)
        return bound

    def _find_table(self, storage: Any, memory: Store | None, length: int) -> Bound:
        name = type(self).__name__
        if storage is None:
            raise RuntimeError(f"{name}: expected a storage: give the sampler to a ReplayBuffer, or bind(storage).")
        if memory is None:
            if not storage.initialized:
                raise NoSampleable("sample: the buffer is empty. Add data before sampling.")
            raise RuntimeError(
                f"{name}: expected a tensor storage of TensorDicts, got a {type(storage).__name__}. "
                "Use LazyTensorStorage or LazyMemmapStorage."
            )
        self._static_version = -1
        field, fields = None, field_numbers(memory)
        static = self._ends if self._ends is not None else self._trajectories
        if static is not None:
            if not fields:
                raise RuntimeError(f"{name}: expected a storage of TensorDicts, got other rows.")
            by_id = self._trajectories is not None
            table, field = static_table(memory, static, by_id=by_id, window=length)
        else:
            boundaries = boundaries_of(memory, self.traj_key, self.end_key, self.end_keys)
            table = shared_table(memory, self.index, boundaries, length)
        marks = self._marks_in(memory, fields, apart=False)
        return Bound(memory, table, field, marks, apart=self._marks_in(memory, fields, apart=True))

    def _place_static(self, bound: Bound, extent: Extent) -> None:
        """Static boundaries belong to the live rows in row order; a write can only make them too few or too many.

        The lock is held until a draw is over: others see neither table nor boundaries half made.
        """
        values = self._ends if self._ends is not None else self._trajectories
        assert values is not None and bound.static is not None  # noqa: PT018
        name = "ends" if self._ends is not None else "trajectories"
        if len(values) != extent.size:
            raise ValueError(
                f"sample: {name}: expected one value per live row, {extent.size}, got {len(values)}. Give a sampler with "
                "those of the rows that are there now."
            )
        version = int(bound.memory.core.next_ticket)
        if version == self._static_version:
            return
        self._static_version = -1  # in case of an interrupt
        rows = extent.rows(torch.arange(extent.size, device="cpu"))
        bound.static.zero_()
        bound.static[rows] = values
        bound.table.forget()
        scan(bound.table, bound.memory)
        self._static_version = version

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _split(self, batch_size: int) -> tuple[int, int]:
        """Windows, and steps of each."""
        if self.num_slices is not None:
            count, rest = self.num_slices, batch_size % self.num_slices
        else:
            assert self.slice_len is not None  # one of the two was given
            count, rest = batch_size // self.slice_len, batch_size % self.slice_len
        if rest or not count:
            which = f"num_slices={self.num_slices}" if self.num_slices is not None else f"slice_len={self.slice_len}"
            raise RuntimeError(f"sample: batch_size: expected a multiple of {which}, got {batch_size}.")
        return count, batch_size // count

    def _shape(self, length: int) -> Any:
        """Which windows of that length may be drawn."""
        return _native.Shape(length, self.strict_length)

    def _remember(self, batch_size: int) -> tuple[int, int, Any]:
        """Windows, steps of each, and which they may be, for batches of that size."""
        count, length = self._split(batch_size)
        if len(self._splits) > 64:
            self._splits.clear()
        self._splits[batch_size] = split = (count, length, self._shape(length))
        return split

    def _sample(self, table: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
        """The native core's draw: fields, rows, marks, tickets if asked for. ``arguments``: what all kinds of it take."""
        raise NotImplementedError

    def _chosen(
        self, storage: Any, layout: Any, key: DrawKey, n: int, *, numbered: bool, apart: bool
    ) -> tuple[Marks, list[Tensor]]:
        """Draw windows in one native call: the fields of a layout, which may be empty, rows, marks and tickets if numbered.

        Windows of which a row moves meanwhile are replaced by others.
        """
        if storage is not self._storage:
            self.bind(storage)
        count, length, shape = self._splits.get(n) or self._remember(n)
        store: Store = storage.memory
        bound = self._bound
        if bound is None or bound.memory is not store:
            bound = self._bound_to(storage, length)
        marks = bound.apart if apart else bound.marks
        arguments = (store.core, layout, key.address, count, shape, self.pad_output, numbered, marks.wanted)
        if bound.static is None:
            tensors = self._sample(bound.table, arguments)
        else:
            with self._lock:
                bound = self._bound_to(storage, length)
                self._place_static(bound, storage.extent())
                tensors = self._sample(bound.table, arguments)
        if not len(tensors[0]):
            self._refuse(bound.table, length)
        return marks, tensors

    def _info(self, marks: Marks, tensors: list[Tensor], *, numbered: bool) -> dict[Any, Tensor]:
        """What a batch says of its steps. ``tensors``: columns, rows, marks, and tickets if numbered."""
        info = {entry: tensors[place] for entry, place in marks.places.items()}
        for entry, how, field, mark in marks.merged:
            info[entry] = how(tensors[field], tensors[mark])
        if numbered:
            info["index_generation"] = tensors[-1]
        return info

    def sample_natively(
        self, storage: Any, key: DrawKey, n: int, *, numbered: bool = False
    ) -> tuple[list[Tensor], Tensor, dict[Any, Tensor]]:
        """Draw windows, read them and mark their ends in one native call: ``(columns, rows, info)``.

        From an accelerator they are read by torch, after the draw.
        """
        store: Store = storage.memory
        if not store.is_native:
            return self.sample_apart(
                storage, key, n, lambda draw: store.read(draw.rows, expected=draw.tickets), numbered=numbered
            )
        marks, tensors = self._chosen(storage, store.layout, key, n, numbered=numbered, apart=False)
        fields = len(store.tensors)
        return tensors[:fields], tensors[fields], self._info(marks, tensors, numbered=numbered)

    def sample_apart(
        self,
        storage: Any,
        key: DrawKey,
        n: int,
        read: Callable[[Draw], tuple[list[Tensor], list[int]]],
        *,
        numbered: bool = False,
    ) -> tuple[list[Tensor], Tensor, dict[Any, Tensor]]:
        """As :meth:`sample_natively`, of columns that somebody else reads.

        Args:
            storage, key, n, numbered: as there.
            read: gives one tensor per field (more may follow) of a draw's rows, and the places of those that do not hold the
                draw's tickets any more. If there are any, all windows are drawn again.

        Raises:
            WriterStalled: there were some at every try for 5 s.
        """
        store: Store = storage.memory
        deadline, attempt, bits = time.monotonic() + _native.wait_limit(), 0, key
        while True:
            marks, drawn = self._chosen(storage, _NO_FIELDS, bits, n, numbered=True, apart=True)
            rows, *marked = drawn
            columns, moved = read(Draw(rows, drawn[-1]))
            if not moved:
                break
            attempt += 1
            if attempt > _TRIES:
                if time.monotonic() > deadline:
                    raise WriterStalled(
                        f"sample: row {int(rows[moved[0]])}, of a window, moved at every try for {_native.wait_limit():g} s."
                    )
                time.sleep(0.001)
            bits = DrawKey.of((key.value + attempt * 0x9E3779B97F4A7C15) % (1 << 63))
        there = [tensor.to(store.device) for tensor in marked]
        info = self._info(marks, [*columns[: len(store.tensors)], rows, *there], numbered=True)
        if not numbered:
            del info["index_generation"]
        return columns, rows, info

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """Rows and tickets of the windows that :meth:`sample_natively` draws by the same key."""
        self._bound_to(self._storage, self._split(batch_size)[1])  # where the storage is none for windows, this says so
        _, drawn = self._chosen(self._storage, _NO_FIELDS, DrawKey.of(key), batch_size, numbered=True, apart=True)
        return Draw(drawn[0], drawn[-1])

    def _refuse(self, table: Any, length: int) -> NoReturn:
        trajectories, longest = table.census()
        if trajectories == 0:
            raise NoSampleable("sample: the buffer is empty. Add data before sampling.")
        if longest >= length:  # a batch of a pass
            raise NoSampleable(
                f"sample: slice_len={length}: expected a trajectory of at least {length} steps in every batch of a pass, got a "
                f"batch of shorter ones ({trajectories} trajectories, of at most {longest} steps). Take more slices per batch, "
                "lower slice_len, or pass strict_length=False."
            )
        raise NoSampleable(
            f"sample: slice_len={length}: expected a trajectory of at least {length} steps, got {trajectories} of at most "
            f"{longest}. Lower slice_len, or pass strict_length=False."
        )

    # ---- marks -------------------------------------------------------------------------------------------------------

    def _marks_in(self, store: Store, fields: dict[Key, int], *, apart: bool) -> Marks:
        """What ``info`` holds beside the index, for the flags that a store has.

        Under :attr:`truncated_key` and its siblings ``done`` and ``terminated``, bool ``[B, 1]``; under :attr:`init_key`, if it
        is stored, as it is stored; under ``("collector", "mask")``, with padding, bool ``[B]``. ``apart``: the native core marks
        columns of its own only, as it does not see the stored ones.
        """
        places: dict[Any, int] = {}
        merged: list[tuple[Any, Callable[[Tensor, Tensor], Tensor], int, int]] = []
        ends, never, done, begun, begun_is_column = False, False, _UNWANTED, _UNWANTED, False
        at = len(store.tensors) + 1
        if self.truncated_key is not None:
            *above, _ = self.truncated_key
            ends, done = True, _ALONE
            places[_public(self.truncated_key)] = at
            number, entry = fields.get((*above, "done")), _public((*above, "done"))
            if number is None or (not apart and _is_flag(store, number, (), (1,))):
                done, places[entry] = _ALONE if number is None else number, at + 1
            else:
                merged.append((entry, _ended, number, at + 1))
            at += 2
            number, entry = fields.get((*above, "terminated")), _public((*above, "terminated"))
            if number is None:
                never, places[entry], at = True, at, at + 1
            elif _is_flag(store, number, (1,)):
                places[entry] = number
            else:
                merged.append((entry, lambda stored, _: _as_flag(stored), number, number))
        if self.init_key is not None and self.init_key in fields:
            number, entry = fields[self.init_key], _public(self.init_key)
            if not apart and _is_flag(store, number, (), (1,)):
                begun, begun_is_column = number, store.schema.fields[number].shape != ()
                places[entry] = at
            else:
                begun = _ALONE
                merged.append((entry, _begun, number, at))
            at += 1
        if self.pad_output:
            places[_MASK], at = at, at + 1
        return Marks(_native.Marks(ends, never, done, begun, begun_is_column, self.pad_output), places, merged, at)

    # ---- the rest of a sampler ---------------------------------------------------------------------------------------

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """Whether a long enough trajectory is there; False, too, where boundaries or batch size do not fit."""
        if not len(storage):
            return False
        self.bind(storage)
        try:
            _, length = self._split(batch_size)
            with self._lock:
                bound = self._bound_to(storage, length)
                if bound.static is not None:
                    self._place_static(bound, storage.extent())
        except (RuntimeError, ValueError):
            return False
        return bool(bound.table.anchors(length if self.strict_length else 1) > 0)

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draw from a storage with a key of torch's default generator: ``((int64 [B],), info)``."""
        self.bind(storage)
        self._bound_to(storage, self._split(batch_size)[1])  # where the storage is none for windows, this says so
        key = DrawKey()
        key.draw()
        _, rows, info = self.sample_natively(storage, key, batch_size)
        return (rows,), info

    def config(self) -> dict[str, Any]:
        return {
            "num_slices": self.num_slices,
            "slice_len": self.slice_len,
            "end_key": _plain(self.end_key),
            "end_keys": None if self.end_keys is None else [_plain(key) for key in self.end_keys],
            "traj_key": _plain(self.traj_key),
            "truncated_key": _plain(self.truncated_key),
            "init_key": _plain(self.init_key),
            "strict_length": self.strict_length,
            "index": self.index,
        }

    def __getstate__(self) -> dict[str, Any]:
        local = (
            "_lock",
            "_storage",
            "_bound",
            "_static_version",
            "_splits",
        )
        return {k: v for k, v in self.__dict__.items() if k not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._unbind()
        self.__dict__.update(state)


class SliceSampler(_SliceSampler):
    """Windows of one trajectory each, drawn with replacement: first a trajectory, uniformly, then where it starts.

    A batch of ``B`` rows is ``num_slices`` windows of ``slice_len`` steps, one behind the other. Trajectories are found by
    what was written: they go on across the end of a full ring, never across its seam, and each lane (with ``ndim > 1``
    each column) has its own. Finding them costs a write what it wrote, and a sample next to nothing; the first sample
    from a storage that holds data scans it once.

    Samples have ``("next", "truncated")``, true at the last step of every window, ``("next", "done")`` (stored, or
    truncated), ``("next", "terminated")`` (stored, or false), bool ``[B, 1]``, and where it is stored ``"is_init"``, true
    at the first step of every window. TensorDict buffers put them into the batch, all buffers into ``info``, where
    ``"index"`` is a tuple of int64 ``[B]``.

    Args:
        num_slices: windows per batch.
        slice_len: steps per window. Exactly one of the two.
        end_key: bool field that is true at the last step of a trajectory. Default ``("next", "done")``. An integer field called
            ``step_type``, at any depth, holds step types as dm_env numbers them: 2 is the last step of a trajectory, and 0 the first
            one, which begins a trajectory also where the last step before it was lost. One is looked for where nothing else is stored.
        end_keys: several of these: any of them ends a trajectory; those that are not stored are skipped.
        traj_key: field that is constant within a trajectory and changes with the next one. By default, and if neither end key
            is given, ``("collector", "traj_ids")``, else ``"episode"``, if one is stored. A key given that is not stored: the
            other kind is looked for.
        ends, trajectories: end flags or ids of all live rows in row order, ``[N]``, instead of a stored field. They stay
            those of their rows when a full ring is written to. Need ``cache_values=True``.
        cache_values, compile, use_gpu: change nothing: boundaries are always kept and always fresh.
        truncated_key: where the marks go; ``done`` and ``terminated`` stand beside it. None: no such marks.
        init_key: the field of first steps; None: left as it is.
        strict_length: leave out trajectories that are shorter; False: such a trajectory is drawn as a whole.
        pad_output: repeat the last step of short windows up to the length; ``("collector", "mask")`` is false there.
        span: ``(left, right)``, or one for both: how far a window may overhang its trajectory at that end: True: as long as one
            step is left, an int: by so many steps. Only steps that are there are returned, so batches may be short.
        uniform_over: ``"trajectories"``, or ``"anchors"``: every window equally likely, so that long trajectories weigh more.
        index: name of the store's table of trajectories; samplers of the same name and boundaries share it.
        replacement: False makes a :class:`SliceSamplerWithoutReplacement`.

    Raises:
        TypeError: not exactly one of ``num_slices`` and ``slice_len``; a key that is none.
        RuntimeError: several kinds of boundaries; static ones without ``cache_values``.
        ValueError: a number out of range; ``pad_output`` with ``strict_length``; a bad ``uniform_over`` or ``index``.

    Raises (when drawing):
        RuntimeError: a batch size that is not divisible; no such field; rows that are no TensorDicts.
        NoSampleable: no trajectory is long enough; says how many there are, and how long.
        ValueError: ``ends`` or ``trajectories`` of another length than the live rows; ``span`` of a whole window or more.
        IncompatibleStore: ``index`` is the name of a table with other boundaries.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3), batch_size=6)
    >>> _ = rb.extend(TensorDict({"episode": torch.arange(20) // 5, "step": torch.arange(20) % 5}, batch_size=[20]))
    >>> steps = rb.sample()["step"].reshape(2, 3)
    >>> bool((steps[:, 1:] - steps[:, :-1] == 1).all())
    True
    """

    def __new__(cls, *, replacement: bool = True, **kwargs: Any) -> Any:
        return super().__new__(cls) if replacement else SliceSamplerWithoutReplacement(**kwargs)

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: Any = False,  # noqa: A002 - TorchRL's argument: nothing here is compiled
        span: Any = False,
        use_gpu: Any = False,
        uniform_over: str = "trajectories",
        index: str = "main",
        replacement: bool = True,
        **later: Any,
    ) -> None:
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            index=index,
            later=later,
        )
        if not self.recordable and not cache_values:
            raise RuntimeError("SliceSampler: ends and trajectories need cache_values=True, as they are kept.")
        if pad_output and strict_length:
            raise ValueError(
                "SliceSampler: pad_output: expected strict_length=False: with it there are no short windows to pad."
            )
        if uniform_over not in ("trajectories", "anchors"):
            raise ValueError(f"SliceSampler: uniform_over: expected 'trajectories' or 'anchors', got {uniform_over!r}.")
        self.pad_output = bool(pad_output)
        self.span = _as_span(span)
        self.uniform_over = uniform_over
        self.cache_values = bool(cache_values)
        if slice_len is not None:
            self._shape(slice_len)

    def _shape(self, length: int) -> Any:
        left, right = (length - 1 if end is True else int(end) for end in self.span)
        if max(left, right) >= length:
            raise ValueError(f"SliceSampler: span: expected less than the {length} steps of a window, got {self.span}.")
        return _native.Shape(length, self.strict_length, self.uniform_over == "anchors", left, right)

    def _sample(self, table: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
        drawn: list[Tensor] = table.sample(*arguments)
        return drawn

    def config(self) -> dict[str, Any]:
        more = {"pad_output": self.pad_output, "span": list(self.span), "uniform_over": self.uniform_over}
        return {**super().config(), **more}


class SliceSamplerWithoutReplacement(_SliceSampler):
    """Every trajectory at most once per pass, one random window of it.

    A batch takes the next ``num_slices`` trajectories of the pass. The last batch of a pass is short, unless ``drop_last``,
    and sets ``ran_out``; the next draw starts a new pass, and so does any draw after a write, since trajectories have
    changed then. Trajectories that are too short are skipped, which shortens their batch.

    Args:
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, truncated_key, init_key, strict_length, index:
            as for :class:`SliceSampler`; ``ends`` and ``trajectories`` need nothing else.
        drop_last: skip the trajectories of a pass that do not fill a batch.
        shuffle: random order; else lane by lane, oldest first.
        compile, use_gpu: change nothing.

    Raises: as :class:`SliceSampler`, and when drawing
        ValueError: ``drop_last`` and fewer trajectories than slices.
        NoSampleable: a batch would be empty, as the trajectories it is made of are too short.
    """

    traits = _SliceSampler.traits._replace(has_epochs=True, can_rewind=True)

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: Any = False,  # noqa: A002 - TorchRL's argument: nothing here is compiled
        use_gpu: Any = False,
        index: str = "main",
        replacement: bool = False,
        **later: Any,
    ) -> None:
        if replacement:
            raise TypeError("SliceSamplerWithoutReplacement: expected replacement=False. Use SliceSampler().")
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            index=index,
            later=later,
        )
        self.drop_last = bool(drop_last)
        self.shuffle = bool(shuffle)
        self.ran_out = False
        self._pass = (0, 0, 0, 0)

    def observe(self, write: Write | None, data: Any) -> None:
        """An emptied buffer: the pass is over."""
        if write is None:
            with self._lock:
                self._pass = (0, 0, 0, 0)

    def _sample(self, table: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
        drawn: list[Tensor]
        with self._lock:
            state, drawn = table.sample_pass(*arguments, self._pass, self.shuffle, self.drop_last)
            _, _, visited, found = state
            count = arguments[3]
            if self.drop_last and 0 < found < count:
                raise ValueError(
                    f"sample: drop_last: expected at least {count} trajectories, got {found}. Add data first, or use "
                    "drop_last=False."
                )
            if found > 0:
                self._pass = state
                self.ran_out = visited == found
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """``key, version, visited, count`` of the pass under way, ``clock`` of the store, and ``ran_out``: plain values."""
        key, version, visited, count = self._pass
        clock, base = self._clock(), self._base()
        return {
            "key": key,
            "version": max(0, version - base),
            "visited": visited,
            "count": count,
            "clock": clock - base,
            "ran_out": self.ran_out,
        }

    def _clock(self) -> int:
        """Ticket number of the store's next write: any write ends a pass."""
        memory: Store | None = getattr(self._storage, "memory", None)
        return 0 if memory is None else int(memory.core.next_ticket)

    def _base(self) -> int:
        memory: Store | None = getattr(self._storage, "memory", None)
        return 0 if memory is None else memory.base

    def checked_state(self, state_dict: dict[str, Any], capacity: int | None = None) -> Callable[[], None]:
        where = type(self).__name__
        check_keys(state_dict, ("key", "version", "visited", "count", "clock", "ran_out"), where)
        key = integer(state_dict, "key", 0, 1 << 64, where)
        clock = integer(state_dict, "clock", 0, 1 << 62, where)
        version = integer(state_dict, "version", 0, clock + 1, where)
        count = integer(state_dict, "count", 0, 1 << 62, where)
        visited = integer(state_dict, "visited", 0, count + 1, where)
        ran_out = typed(state_dict, "ran_out", bool, where)

        def take() -> None:
            with self._lock:
                now = self._clock()
                same = now - self._base() == clock == version
                self._pass = (key, now, visited, count) if same else (0, 0, 0, 0)
                self.ran_out = ran_out

        return take

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the pass of a saved state, if the store holds what it held then; else the next draw begins a new one.

        Raises:
            KeyError: a missing or unknown entry. TypeError: one of another type. ValueError: a number out of range. Nothing is
                changed.
        """
        self.checked_state(state_dict)()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "drop_last": self.drop_last, "shuffle": self.shuffle}


# ---- arguments ---------------------------------------------------------------------------------------------------------


def _check_count(what: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what}: expected an int, got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{what}: expected at least {least}, got {value}.")


def _as_static(values: Any, what: str) -> Tensor | None:
    """Boundaries of all live rows, flat and contiguous, apart from the caller's memory."""
    if values is None:
        return None
    values = torch.as_tensor(values, device="cpu")
    if values.ndim < 1:
        raise TypeError(f"{what}: expected one value per row, got a scalar.")
    flat: Tensor = values.reshape(-1).clone()
    return flat


def _as_span(span: Any) -> tuple[bool | int, bool | int]:
    ends = (span, span) if isinstance(span, bool | int) else span
    if not isinstance(ends, tuple | list) or len(ends) != 2 or not all(isinstance(end, bool | int) for end in ends):
        raise TypeError(f"SliceSampler: span: expected a bool or an int, or two of them, got {span!r}.")
    if min(ends) < 0:
        raise ValueError(f"SliceSampler: span: expected at least 0 steps, got {span!r}.")
    return ends[0], ends[1]


def _plain(key: Key | None) -> str | list[str] | None:
    return None if key is None else key[0] if len(key) == 1 else list(key)


def _public(key: Sequence[str]) -> str | Key:
    return key[0] if len(key) == 1 else tuple(key)


# ---- flags that are stored as something else than bool [B] or [B, 1] -----------------------------------------------------


def _is_flag(store: Store, number: int, *shapes: tuple[int, ...]) -> bool:
    field = store.schema.fields[number]
    return field.dtype == "bool" and tuple(field.shape) in shapes


def _as_flag(stored: Tensor) -> Tensor:
    """A stored flag as bools ``[B, 1]`` (rows with batch dimensions: as stored)."""
    flag = stored if stored.dtype is torch.bool else stored != 0
    return flag.unsqueeze(-1) if flag.ndim == 1 else flag


def _ended(stored: Tensor, ends: Tensor) -> Tensor:
    flag = _as_flag(stored)
    return flag | _like(ends, flag)


def _begun(stored: Tensor, first: Tensor) -> Tensor:
    first = _like(first, stored)
    return stored | first if stored.dtype is torch.bool else stored.where(~first, 1)


def _like(mark: Tensor, stored: Tensor) -> Tensor:
    """Marks ``[B]`` or ``[B, 1]`` in the dimensions of a stored field."""
    return mark if mark.ndim == stored.ndim else mark.reshape(-1, *(1,) * (stored.ndim - 1))
